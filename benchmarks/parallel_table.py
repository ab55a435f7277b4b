"""xDiT's table of models and ways, from one planner: `python benchmarks/parallel_table.py [FILTER] [--zoo] [--json FILE]`.

Every model of the table in xDiT's README (commit 175e0bf, July 2026) whose class diffusers has, small and with random weights.
A cell is filled where the written graph, run on pretended processes, gives what one process gives, to 1e-5 of the largest
value, and at least a fourth of the work is split; beside it stands xDiT's own tick. An empty cell has its reason.

CFG          batch=2
SP           ulysses=2, ring=2 and ulysses=2 with ring=2: all three
PipeFusion   two stages on two patches, each with fresh values of the other; the share is that of the lighter stage, doubled
TP           tensor=2
With --zoo it is the zoo's diffusion transformers by Ulysses on 2 and 4, each with how much of the work in products and
attention is split, and how much of that which is done on tokens: the zoo's models have few, and what embeds times, texts and
patches weighs more there than in use. Below 90 % it says what had to be gathered, and why. The exit code is 1 when a result
differs by more than 1e-6.
Each model runs in a process of its own, each way within --limit seconds; what is found is appended to --keep at once, and what
stands there is not run again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

CLOSE = 1e-5  # of the largest value
LEAST = 0.25  # of the work is split, or it is no way to run a model
CELLS: dict[str, list[dict[str, int]]] = {
    "CFG": [{"batch": 2}],
    "SP": [{"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}],
    "PipeFusion": [{"stages": 2}],
    "TP": [{"tensor": 2}],
}
ZOO: dict[str, list[dict[str, int]]] = {"2 processes": [{"ulysses": 2}], "4 processes": [{"ulysses": 4}]}
KINDS = ("Transformer", "DiT", "UVit", "T5Film")  # in the names of the zoo's diffusion transformers
OTHERS = ("Control", "VAE", "Autoencoder", "UNet")
EXACT, MOST = 1e-6, 0.9
Kwargs = dict[str, Any]


@dataclass
class Row:
    """A model of the table: its case in the zoo, what is other in its configuration and inputs, and xDiT's ticks."""

    name: str
    ticks: str  # of xDiT, one a cell: + for a tick, - for none, n for "NA"
    case: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Kwargs], Kwargs] = dict
    why: str = ""  # there is no class


def twice(kwargs: Kwargs) -> Kwargs:
    """Tokens of a second picture behind those of the first, with positions of their own."""
    ids = kwargs["img_ids"].clone()
    ids[..., 0] = 1
    return {
        **kwargs,
        "hidden_states": torch.cat([kwargs["hidden_states"], kwargs["hidden_states"].flip(1)], 1),
        "img_ids": torch.cat([kwargs["img_ids"], ids], -2),
    }


def edited(kwargs: Kwargs) -> Kwargs:
    """The same where positions come from shapes."""
    hidden = kwargs["hidden_states"]
    shapes = [[shape, shape] for shape in kwargs["img_shapes"]]
    return {**kwargs, "hidden_states": torch.cat([hidden, hidden.flip(1)], 1), "img_shapes": shapes}


def conditioned(kwargs: Kwargs) -> Kwargs:
    """The first picture's latents and their mask behind the channels of the video."""
    hidden = kwargs["hidden_states"]
    return {**kwargs, "hidden_states": torch.cat([hidden, hidden.flip(3), hidden[:, :1]], 1)}


def longer(*names: str) -> Callable[[Kwargs], Kwargs]:
    """Text twice as long: the zoo's has fewer tokens than there may be processes."""
    return lambda kwargs: {k: torch.cat([v, v.flip(1)], 1) if k in names else v for k, v in kwargs.items()}


TEXTS = "encoder_hidden_states", "encoder_hidden_states_2", "encoder_attention_mask", "encoder_attention_mask_2", "image_embeds"
FLUX = {"num_layers": 2, "num_single_layers": 2}
ROWS = [
    Row("StepVideo", "n+-+", why="diffusers has no class"),
    Row("HunyuanVideo", "n+--", "HunyuanVideoTransformer3DModel", FLUX),
    Row("HunyuanVideo-1.5", "-+--", "HunyuanVideo15Transformer3DModel", {"num_layers": 4}, longer(*TEXTS)),
    Row("ConsisID-Preview", "++--", "ConsisIDTransformer3DModel", {"num_layers": 2}),
    Row("CogVideoX1.5", "++--", "CogVideoXTransformer3DModel-15"),
    Row("Mochi-1", "++--", "MochiTransformer3DModel"),
    Row("CogVideoX", "++--", "CogVideoXTransformer3DModel"),
    Row("Latte", "-+--", "LatteTransformer3DModel", {"num_layers": 2}),
    Row("Wan2.1", "-+--", "WanTransformer3DModel"),
    Row("Wan2.2", "-+--", "WanTransformer3DModel", {"in_channels": 9}, conditioned),
    Row("Wan2.2-Distilled", "-+--", "WanTransformer3DModel", {"in_channels": 9, "num_layers": 4}, conditioned),
    Row("CausalWan2.2", "----", why="diffusers has no class"),
    Row("LTX-2", "-+--", "LTX2VideoTransformer3DModel", {"num_layers": 2}),
    Row("HunyuanDiT-v1.2", "+++-", "HunyuanDiT2DModel", {"num_layers": 4}),
    Row("Z-Image Turbo", "-+--", "ZImageTransformer2DModel", {"n_layers": 2}),
    Row("Flux 2 klein", "-+--", "Flux2Transformer2DModel", FLUX | {"guidance_embeds": False}),
    Row("Flux 2", "-+--", "Flux2Transformer2DModel", FLUX),
    Row("Flux", "n++-", "FluxTransformer2DModel", FLUX),
    Row("Flux Kontext", "-+--", "FluxTransformer2DModel", FLUX, twice),
    Row("Qwen Image", "-+--", "QwenImageTransformer2DModel"),
    Row("Qwen Image-Edit", "-+--", "QwenImageTransformer2DModel", inputs=edited),
    Row("Krea2-Raw", "-+--", "Krea2Transformer2DModel"),
    Row("Krea2-Turbo", "-+--", "Krea2Transformer2DModel", {"num_layers": 4}),
    Row("PixArt-Sigma", "+++-", "PixArtTransformer2DModel", {"num_layers": 2}),
    Row(
        "PixArt-alpha", "+++-", "PixArtTransformer2DModel",
        {"num_layers": 2, "use_additional_conditions": True, "attention_head_dim": 6, "cross_attention_dim": 12},
        lambda kw: {**kw, "added_cond_kwargs": {"resolution": torch.full((2, 2), 64.0), "aspect_ratio": torch.ones(2, 1)}},
    ),
    Row("Stable Diffusion 3", "+++-", "SD3Transformer2DModel"),
    Row("SANA", "+++-", "SanaTransformer2DModel"),
    Row("SANA Sprint", "n+--", "SanaTransformer2DModel-sprint"),
    Row("SDXL", "+---", "UNet2DConditionModel-sdxl"),
]  # fmt: skip


def zoo_rows() -> list[Row]:
    """The zoo's diffusion transformers."""
    import zoo

    names = [case.name.removeprefix("diffusers/") for case in zoo.cases("diffusers/")]
    own = [name for name in names if any(kind in name for kind in KINDS) and not any(other in name for other in OTHERS)]
    return [Row(name, "", name) for name in own]


# --- one model


def model_of(row: Row) -> tuple[Any, tuple[Any, ...], Kwargs]:
    import zoo

    case = {c.name: c for c in zoo.cases("diffusers/")}[f"diffusers/{row.case}"]
    model = case.build()
    args, kwargs = case.inputs(2, case.sizes - 1) if row.ticks else case.inputs(2)
    if row.config:
        config = {k: v for k, v in model.config.items() if not k.startswith("_")}
        model = zoo._make(lambda: type(model)(**{**config, **row.config}))
    return model.eval(), args, row.inputs(kwargs)


def checked(gm: Any, args: Any, kwargs: Any, ways: dict[str, int]) -> dict[str, Any]:
    """A plan beside one process: the error and the share of the work that is split."""
    import fxplug

    if "stages" in ways:
        return piped(gm, args, kwargs, ways["stages"])
    if not set(ways) <= set(inspect.signature(fxplug.parallel_plan).parameters):
        return {"reason": "not there"}
    plan = fxplug.parallel_plan(gm, args, kwargs, check=False, **ways)
    why = [f"{node.name}: {why}" for stage in plan.stages for node, why in stage.found.why.items()][:8]
    return {"error": plan.check(), "share": plan.share, "of tokens": of_tokens(plan), "why": why if plan.share < MOST else []}


def of_tokens(plan: Any) -> float:
    """The share of the work that is split, in operations that follow from what is split."""
    done = work = 0
    for stage in plan.stages:
        found, reached = stage.found, set()
        for node in found.walk.graph.nodes:
            if found.is_split(node) or not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
                done += found.walk.work.get(node, 0) * found.on_parts(node)
                work += found.walk.work.get(node, 0)
    return done / max(1, work)


def piped(gm: Any, args: Any, kwargs: Any, stages: int) -> dict[str, Any]:
    """Stages on fresh patches beside the model; the share is the lightest stage's of an even one."""
    import fxplug

    found = fxplug.pipefusion(gm, args, kwargs, stages=stages, patches=2, clock=None, check=False)
    work = [stage.work for stage in found.plan.stages]
    return {"error": found.check(args, kwargs), "share": len(work) * min(work) / max(1, sum(work))}


def run(row: Row, cells: dict[str, list[dict[str, int]]], limit: int, done: set[str]) -> None:
    """Print what is found for each way, a line each."""
    import fxplug

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {limit} s")

    signal.signal(signal.SIGALRM, late)
    gm: Any = None
    for cell, several in cells.items():
        for ways in several:
            if str(ways) in done:
                continue
            start = time.perf_counter()
            signal.alarm(limit)
            try:
                if gm is None:
                    model, args, kwargs = model_of(row)
                    gm = fxplug.trace(model, args, kwargs, check=False).eval()
                found = checked(gm, args, kwargs, ways)
            except TimeoutError as error:
                found = {"reason": str(error)}
            except fxplug.FxplugError as error:
                found = {"reason": str(error)}
            except Exception as error:  # a planner's mistake is a result here
                found = {"reason": f"{type(error).__name__}: {error}"[:500], "crash": True}
            finally:
                signal.alarm(0)
            seconds = round(time.perf_counter() - start, 1)
            line = {"model": row.name, "cell": cell, "ways": ways, "seconds": seconds, **found}
            print("RESULT " + json.dumps(line), flush=True)
    os._exit(0)  # threads of a check that was broken off may still wait for each other


# --- all of them


def gathered(row: Row, options: argparse.Namespace) -> None:
    """Run a model in a process of its own; what it finds is kept line by line."""
    done = {str(line["ways"]) for line in kept(options.keep) if line["model"] == row.name}
    if len(done) == sum(map(len, (ZOO if options.zoo else CELLS).values())):
        return
    command = [sys.executable, __file__, "--one", row.name, "--limit", str(options.limit), "--done", json.dumps(sorted(done))]
    command += ["--zoo"] * options.zoo
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("RESULT "):
            line = json.loads(text.removeprefix("RESULT "))
            options.keep.parent.mkdir(parents=True, exist_ok=True)
            with options.keep.open("a") as file:
                file.write(json.dumps(line) + "\n")
            what = line.get("reason") or f"{line['error']:.1e}, {line['share']:.0%} split"
            print(f"{row.name:20} {line['ways']!s:28} {line['seconds']:6.1f} s  {what[:200]}", flush=True)
    if process.wait():
        print(f"{row.name:20} ended with {process.returncode}", flush=True)


def kept(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


def cell_of(lines: list[dict[str, Any]], count: int) -> tuple[bool, str]:
    """Whether a cell is filled, and what stands there."""
    for line in lines:
        named = " x ".join(f"{k} {n}" for k, n in line["ways"].items())
        if "reason" in line:
            return False, f"{named}: {line['reason']}" if line["reason"] != "not there" else line["reason"]
        if not line["error"] <= CLOSE:
            return False, f"{named}: differs by {line['error']:.1e}"
        if line["share"] < LEAST:
            return False, f"{named}: exact, and {line['share']:.0%} of the work is split"
    if len(lines) < count:
        return False, "was not run to its end"
    return True, f"{min(line['share'] for line in lines):.0%}, {max(line['error'] for line in lines):.0e}"


def table(rows: list[Row], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the table; its counts and cells."""
    theirs = {"+": "yes", "-": "no", "n": "NA"}
    cells: dict[str, dict[str, Any]] = {}
    reasons: list[str] = []
    print("\nours: share of the work that is split and the largest error, or the number of a reason; in brackets xDiT's\n")
    print(f"| {'model':18} | " + " | ".join(f"{name:24}" for name in CELLS) + " |")
    print("| --- |" + " --- |" * len(CELLS))
    for row in rows:
        texts = []
        cells[row.name] = {}
        for index, (name, ways) in enumerate(CELLS.items()):
            own = [line for line in lines if line["model"] == row.name and line["cell"] == name]
            filled, text = (False, row.why) if row.why else cell_of(own, len(ways))
            cells[row.name][name] = {"filled": filled, "text": text, "xdit": theirs[row.ticks[index]]}
            if not filled and text not in reasons:
                reasons.append(text)
            shown = f"yes: {text}" if filled else f"- [{reasons.index(text) + 1}]"
            texts.append(f"{shown + f' ({theirs[row.ticks[index]]})':24}")
        print(f"| {row.name:18} | " + " | ".join(texts) + " |")
    print()
    for index, text in enumerate(reasons):
        print(f"[{index + 1}] {text}")
    there = [row for row in rows if not row.why]
    counts = {
        "cells": len(rows) * len(CELLS),
        "filled": sum(c["filled"] for row in cells.values() for c in row.values()),
        "cells of classes that diffusers has": len(there) * len(CELLS),
        "by way": {name: sum(row[name]["filled"] for row in cells.values()) for name in CELLS},
        "xdit": sum(row.ticks.count("+") for row in rows),
        "xdit by way": {name: sum(row.ticks[i] == "+" for row in rows) for i, name in enumerate(CELLS)},
    }
    share = counts["filled"] / max(1, counts["cells of classes that diffusers has"])  # type: ignore[operator]
    print(f"\n{counts['filled']} of {counts['cells']} cells are filled, {share:.0%} of those whose class diffusers has; xDiT: "
          f"{counts['xdit']}")  # fmt: skip
    print(f"by way {counts['by way']}, xDiT {counts['xdit by way']}")
    return {"counts": counts, "table": cells}


def zoo_list(rows: list[Row], lines: list[dict[str, Any]]) -> bool:
    """Print what was found of the zoo's models by each way; whether a result is wrong."""
    wrong = False
    for cell in ZOO:
        mine = [line for row in rows for line in lines if line["model"] == row.name and line["cell"] == cell]
        for line in mine:
            text = line.get("reason") or f"{line['error']:8.1e} {line['share']:7.1%} {line['of tokens']:7.1%}"
            print("\n    ".join([f"{line['model']:58s} {text}", *line.get("why", [])]))
        exact = [line for line in mine if line.get("error", 1) <= EXACT]
        wrong |= any(line.get("error", 0) > EXACT for line in mine)
        split, here = (sum(line[key] >= MOST for line in exact) for key in ("share", "of tokens"))
        print(f"\n{cell}: {len(exact)} of {len(mine)} exact to {EXACT:g}")
        print(f"{split} split {MOST:.0%} of the work or more, {here} of what is done on tokens\n")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="?", default="", help="part of a name")
    parser.add_argument("--zoo", action="store_true", help="the zoo's diffusion transformers by Ulysses")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="where lines are appended; by default a file for this run")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one way of one model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--done", type=json.loads, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    every, cells = (zoo_rows(), ZOO) if options.zoo else (ROWS, CELLS)
    if options.one:
        run(next(row for row in every if row.name == options.one), cells, options.limit, set(options.done))
    options.keep = options.keep or Path(tempfile.mkdtemp()) / "parallel_table.jsonl"
    rows = [row for row in every if options.only.lower() in row.name.lower()]
    for row in rows:
        if not row.why:
            gathered(row, options)
    lines = kept(options.keep)
    wrong = options.zoo and zoo_list(rows, lines)
    found = {} if options.zoo else table(rows, lines)
    if options.json:
        from record import write

        write(options.json, {**found, "ways": lines})
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
