"""How often something compiles while adapters change, in fxplug, PEFT and diffusers.

python benchmarks/recompiles.py [--json FILE] [--ways WAY ...] [--only small|unet] [--inductor]

A UNet of `models.py` with LoRA on its attention goes through the steps below. `ink` has rank 8 on all of it,
`film` rank 16 on to_q and to_v, `chalk` rank 4 on the second attention of each block, `fourth` rank 16 on all. Each way is
compiled once with dynamic=True and called after each step; a number is how many graphs were compiled in that call. First as
one graph (fullgraph=True); a way that gets an error there goes again with graph breaks allowed, as `way, breaks`. Results are
compared with those of fxplug without a compiler: `away` is the largest difference over the largest value. A step that a way
does not have, and one that raises, is there with the error's first line; the call after it is left out.

Nothing is generated (a backend that counts and runs as in eager code), but with --inductor, which also gives the seconds of
each call, that of the first one being the compile.

fxplug, fused, live       slots; after `fuse`; after lower(merge="live"), whose weights all samples share
peft                      set_adapter, set_scale, several active, disable_adapter_layers, load_adapter, adapter_names
peft_hotswap              prepare_model_for_compiled_hotswap and hotswap_adapter
diffusers                 load_lora_adapter, set_adapters, disable_lora
diffusers_hotswap         enable_lora_hotswap and load_lora_adapter(hotswap=True)
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from models import Subject
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from record import write
from timing import difference, error_of
from torch import Tensor

import fxplug

WHOLE, ATTENTION_1, ATTENTION_2 = ".*", r".*\.(to_q|to_v)", r".*\.attn2\..*"
ADAPTERS = {"ink": (8, WHOLE), "film": (16, ATTENTION_1), "chalk": (4, ATTENTION_2), "fourth": (16, WHOLE)}
MIXED = ["ink", "none", "film", "ink"]
LIMIT = 64  # more recompiles than torch allows by itself, so that all are counted
Steps = dict[str, Callable[[], Any]]

# what a step asks for, as `adapters.use` says it, and which inputs the call has
STEPS: dict[str, tuple[Any, str]] = {
    "first call": ("ink", "inputs"),
    "scale": ({"ink": 0.5}, "inputs"),
    "switch to film": ("film", "inputs"),
    "switch to chalk": ("chalk", "inputs"),
    "switch back": ("ink", "inputs"),
    "combine": ({"ink": 0.8, "film": 0.3}, "inputs"),
    "disable": (None, "inputs"),
    "load a fourth": ("fourth", "inputs"),
    "per-sample mix": ([None if name == "none" else name for name in MIXED], "four"),
    "one for all again": ("ink", "four"),
    "other batch size": ("ink", "three"),
    "other resolution": ("ink", "larger"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ways", choices=list(WAYS), nargs="+", default=list(WAYS))
    parser.add_argument("--only", choices=["small", "unet"], default="small")
    parser.add_argument("--inductor", action="store_true")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = LIMIT
    torch._dynamo.config.accumulated_recompile_limit = 4 * LIMIT
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        of = models.subject(options.only)
        inputs = {"inputs": of.inputs, "four": examples(4, 32), "three": examples(3, 32), "larger": examples(3, 48)}
        folders = {
            name: models.adapter(of, Path(folder) / name, rank, part, seed)
            for seed, (name, (rank, part)) in enumerate(ADAPTERS.items())
        }
        base = models.traced(of)
        wanted = expected(of, base, folders, inputs)
        for way in options.ways:
            for fullgraph in (True, False):
                name = way if fullgraph else f"{way}, breaks"
                rows[name] = through(WAYS[way](of, base, folders), inputs, wanted, fullgraph, options.inductor)
                show(name, rows[name])
                if options.json:
                    write(
                        options.json,
                        {"model": options.only, "backend": "inductor" if options.inductor else "eager", "rows": rows},
                    )
                if not any("graph" in found for found in rows[name]["steps"].values()):
                    break


def examples(batch: int, side: int) -> dict[str, Any]:
    with torch.device(models.DEVICE):
        found = models.denoised(batch, side, 768)
    return {k: v.to(models.DTYPE) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in found.items()}


def expected(of: Subject, base: Any, folders: dict[str, Path], inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What each step should give: fxplug's slots without a compiler."""
    new, wanted = models.with_slots(of, base, folders), {}
    for step, (use, kind) in STEPS.items():
        new.adapters.use(use)
        wanted[step] = models.output(new(**inputs[kind]))
    return wanted


def through(
    way: tuple[Any, Steps], inputs: dict[str, Any], wanted: dict[str, Tensor], fullgraph: bool, inductor: bool
) -> dict[str, Any]:
    """One way through all steps."""
    module, actions = way
    torch._dynamo.reset()
    count = 0

    def backend(graph: Any, example: Any) -> Any:
        nonlocal count
        count += 1
        return torch._dynamo.lookup_backend("inductor")(graph, example) if inductor else graph.forward

    call = torch.compile(module, fullgraph=fullgraph, dynamic=True, backend=backend)
    steps: dict[str, dict[str, Any]] = {}
    for step, (_, kind) in STEPS.items():
        before, found = count, steps.setdefault(step, {})
        begun = time.perf_counter()
        try:
            more = actions[step]() if step in actions else None
            found["seconds_of_the_change"] = time.perf_counter() - begun
        except Exception as error:
            found["error"] = error_of(error)
            continue
        begun = time.perf_counter()
        try:
            out = models.output(call(**inputs[kind], **(more if isinstance(more, dict) else {})))
            found.update(compiles=count - before, away=difference(out, wanted[step]))
        except Exception as error:
            found.update(
                compiles=count - before, error=error_of(error), graph=type(error).__module__.startswith("torch._dynamo")
            )
        if inductor:
            found["seconds"] = time.perf_counter() - begun
    again = sum(found.get("compiles", 0) for step, found in steps.items() if step != "first call")
    return {"first": steps["first call"].get("compiles"), "again": again, "steps": steps}


def show(name: str, row: dict[str, Any]) -> None:
    failed = sum("error" in found for found in row["steps"].values())
    print(f"{name}: {row['first']} compiled at first, {row['again']} again, {failed} of {len(row['steps'])} steps failed")
    for step, found in row["steps"].items():
        seconds = f"  {found['seconds']:6.1f} s" if "seconds" in found else ""
        text = found.get("error") or f"away {found['away']:.0e}"
        print(f"    {step:18} {found.get('compiles', '-'):>3}{seconds}  {text}", flush=True)


# --- the ways: a module that has `ink` in use, and what is done before the call of each step


def ours(lowered: Callable[[Any], Any]) -> Callable[..., tuple[Any, Steps]]:
    def make(of: Subject, base: Any, folders: dict[str, Path]) -> tuple[Any, Steps]:
        three = {name: folder for name, folder in folders.items() if name != "fourth"}
        module = lowered(models.with_slots(of, base, three, use="ink"))
        adapters = module.adapters

        def change(step: str, use: Any) -> Callable[[], Any]:
            def action() -> None:
                if step == "load a fourth":
                    adapters.load("fourth", folders["fourth"])
                adapters.use(use)

            return action

        return module, {step: change(step, use) for step, (use, _) in STEPS.items()}

    return make


def in_peft(of: Subject, base: Any, folders: dict[str, Path]) -> tuple[Any, Steps]:
    module = models.in_peft(of, {name: folders[name] for name in ("ink", "film", "chalk")})
    tuner = module.base_model

    def use(**weights: float) -> None:
        tuner.enable_adapter_layers()
        tuner.set_adapter(list(weights), inference_mode=True)
        for layer in scaled(module):
            for name, weight in weights.items():
                layer.set_scale(name, weight)

    def fourth() -> None:
        module.load_adapter(str(folders["fourth"]), adapter_name="fourth")
        use(fourth=1.0)

    def mix() -> dict[str, Any]:
        use(film=1.0)  # `combine` left it another scale
        use(ink=1.0)
        return {"adapter_names": ["__base__" if name == "none" else name for name in MIXED]}

    return module, {
        "scale": lambda: use(ink=0.5),
        "switch to film": lambda: use(film=1.0),
        "switch to chalk": lambda: use(chalk=1.0),
        "switch back": lambda: use(ink=1.0),
        "combine": lambda: use(ink=0.8, film=0.3),
        "disable": tuner.disable_adapter_layers,
        "load a fourth": fourth,
        "per-sample mix": mix,
        "one for all again": lambda: use(ink=1.0),
    }


def in_peft_hotswap(of: Subject, base: Any, folders: dict[str, Path]) -> tuple[Any, Steps]:
    module = models.in_peft(of, {"ink": folders["ink"]})
    prepare_model_for_compiled_hotswap(module, target_rank=models.RANK)

    def swap(name: str) -> Callable[[], Any]:
        return lambda: hotswap_adapter(module, str(folders[name]), adapter_name="ink", torch_device=models.DEVICE)

    def scale() -> None:
        for layer in scaled(module):
            layer.set_scale("ink", 0.5)

    def mix() -> dict[str, Any]:
        return {"adapter_names": ["__base__" if name == "none" else name for name in MIXED]}

    def again() -> None:
        module.base_model.enable_adapter_layers()
        swap("ink")()

    return module, {
        "scale": scale,
        "switch to film": swap("film"),
        "switch to chalk": swap("chalk"),
        "switch back": swap("ink"),
        "combine": lambda: missing("one adapter at a time is hot-swapped"),
        "disable": module.base_model.disable_adapter_layers,
        "load a fourth": lambda: (module.base_model.enable_adapter_layers(), swap("fourth")()),
        "per-sample mix": mix,
        "one for all again": again,
    }


def in_diffusers(of: Subject, base: Any, folders: dict[str, Path]) -> tuple[Any, Steps]:
    module = models.in_diffusers(of, {name: folders[name] for name in ("ink", "film", "chalk")})

    def use(**weights: float) -> None:
        module.enable_lora()
        module.set_adapters(list(weights), list(weights.values()))

    def fourth() -> None:
        module.load_lora_adapter(models.weights_of(folders["fourth"]), prefix=None, adapter_name="fourth")
        use(fourth=1.0)

    return module, {
        "scale": lambda: use(ink=0.5),
        "switch to film": lambda: use(film=1.0),
        "switch to chalk": lambda: use(chalk=1.0),
        "switch back": lambda: use(ink=1.0),
        "combine": lambda: use(ink=0.8, film=0.3),
        "disable": module.disable_lora,
        "load a fourth": fourth,
        "per-sample mix": lambda: missing("no call for adapters by sample"),
        "one for all again": lambda: use(ink=1.0),
    }


def in_diffusers_hotswap(of: Subject, base: Any, folders: dict[str, Path]) -> tuple[Any, Steps]:
    module = models.in_diffusers(of, {"ink": folders["ink"]}, hotswap=models.RANK)

    def swap(name: str) -> Callable[[], Any]:
        def action() -> None:
            module.enable_lora()
            module.load_lora_adapter(models.weights_of(folders[name]), prefix=None, adapter_name="ink", hotswap=True)
            module.set_adapters(["ink"], [1.0])

        return action

    return module, {
        "scale": lambda: module.set_adapters(["ink"], [0.5]),
        "switch to film": swap("film"),
        "switch to chalk": swap("chalk"),
        "switch back": swap("ink"),
        "combine": lambda: missing("one adapter at a time is hot-swapped"),
        "disable": module.disable_lora,
        "load a fourth": swap("fourth"),
        "per-sample mix": lambda: missing("no call for adapters by sample"),
        "one for all again": swap("ink"),
    }


def missing(text: str) -> None:
    raise NotImplementedError(text)


def scaled(module: Any) -> list[Any]:
    return [m for m in module.modules() if hasattr(m, "set_scale")]


WAYS: dict[str, Callable[..., tuple[Any, Steps]]] = {
    "fxplug": ours(lambda new: new),
    "fused": ours(fxplug.fuse),
    "live": ours(lambda new: fxplug.lower(new, merge="live", fuse=None)),
    "peft": in_peft,
    "peft_hotswap": in_peft_hotswap,
    "diffusers": in_diffusers,
    "diffusers_hotswap": in_diffusers_hotswap,
}


if __name__ == "__main__":
    main()
