"""What hoisting finds in denoisers of published sizes, on the meta device, and what it costs in CPU time at a width of 1,024.

python benchmarks/hoist.py [--json FILE] [--only NAME ...] [--turns N] [--no-times] [--families [NAME ...]]

`no step needs` is the share of parameters that only stages before the step read: once conditions and times are known, they may
leave the device. Times are CPU time of one call over that of the same module not hoisted: the first call of a prompt, and one
whose conditions and time are kept. Sizes are those of 1024 px, and of videos of 81 (Wan, 480p) and 161 frames (LTX).

With --families it does something else: each class of diffusers in the tests' zoo that is told a time is hoisted in a tiny form,
with all inputs but the first as conditions, and called between random changes of time, conditions, latents and weights, in turn
with the same module not hoisted. A row says how many of these calls are equal to the bit, how often a stage was found, the
weights that no step needs, and the CPU time of a call of both in milliseconds, of each change the medians of rounds that
are alike and in which one or the other is called first; or why nothing is hoisted.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch
from record import write

import fxplug
from fxplug.core.errors import FxplugError, GuardError
from fxplug.core.ir.containers import map_leaves

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

GIB, MIB = 2**30, 2**20
TIMES, LATENTS = {"timestep", "t"}, {"hidden_states", "sample", "x"}


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def single(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def flux_call() -> dict[str, Any]:
    return {
        "hidden_states": half(1, 4096, 64), "encoder_hidden_states": half(1, 512, 4096), "pooled_projections": half(1, 768),
        "timestep": half(1), "img_ids": half(4096, 3), "txt_ids": half(512, 3), "guidance": single(1), "return_dict": False,
    }  # fmt: skip


def sd3_call() -> dict[str, Any]:
    text = {"encoder_hidden_states": half(1, 333, 4096), "pooled_projections": half(1, 2048)}
    return {"hidden_states": half(1, 16, 128, 128), **text, "timestep": single(1), "return_dict": False}


def qwen_call() -> dict[str, Any]:
    text = {"encoder_hidden_states": half(1, 256, 3584), "encoder_hidden_states_mask": None, "img_shapes": [[(1, 64, 64)]]}
    return {"hidden_states": half(1, 4096, 64), **text, "timestep": half(1), "return_dict": False}


def wan_call() -> dict[str, Any]:
    text = {"encoder_hidden_states": half(1, 512, 4096)}
    return {"hidden_states": half(1, 16, 21, 60, 104), **text, "timestep": single(1), "return_dict": False}


def sdxl_call() -> dict[str, Any]:
    text = {"encoder_hidden_states": half(2, 77, 2048)}
    more = {"added_cond_kwargs": {"text_embeds": half(2, 1280), "time_ids": half(2, 6)}}
    return {"sample": half(2, 4, 128, 128), "timestep": single(2), **text, **more, "return_dict": False}


def masked_call(latents: tuple[int, ...], words: int, channels: int, **more: Any) -> dict[str, Any]:
    text = {"encoder_hidden_states": half(2, words, channels), "encoder_attention_mask": half(2, words)}
    return {"hidden_states": half(*latents), **text, "timestep": single(2), **more, "return_dict": False}


def z_image_call() -> dict[str, Any]:
    return {"x": [half(16, 1, 128, 128)], "t": single(1), "cap_feats": [half(100, 2560)], "return_dict": False}


SD35 = {"caption_projection_dim": 2432, "pos_embed_max_size": 192, "qk_norm": "rms_norm"}
SDXL = {
    "sample_size": 128, "block_out_channels": (320, 640, 1280), "layers_per_block": 2, "attention_head_dim": [5, 10, 20],
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 2048,
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": [1, 2, 10],
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}  # fmt: skip
PIXART = {"caption_channels": 4096, "interpolation_scale": 2, "use_additional_conditions": False}
Case = tuple[type, dict[str, Any], Callable[[], dict[str, Any]]]
MODELS: dict[str, Case] = {
    "pixart": (diffusers.PixArtTransformer2DModel, PIXART, lambda: masked_call((2, 4, 128, 128), 300, 4096)),
    "sana": (diffusers.SanaTransformer2DModel, {}, lambda: masked_call((2, 32, 32, 32), 300, 2304)),
    "sdxl": (diffusers.UNet2DConditionModel, SDXL, sdxl_call),
    "ltx": (
        diffusers.LTXVideoTransformer3DModel, {},
        lambda: masked_call((2, 6930, 128), 128, 4096, num_frames=21, height=15, width=22),
    ),
    "z_image": (diffusers.ZImageTransformer2DModel, {}, z_image_call),
    "flux": (diffusers.FluxTransformer2DModel, {"guidance_embeds": True}, flux_call),
    "sd35_medium": (
        diffusers.SD3Transformer2DModel,
        {**SD35, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
         "dual_attention_layers": tuple(range(13))}, sd3_call,
    ),
    "sd35_large": (diffusers.SD3Transformer2DModel, {**SD35, "num_layers": 38, "num_attention_heads": 38}, sd3_call),
    "wan_1b": (
        diffusers.WanTransformer3DModel, {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, wan_call,
    ),
    "wan_14b": (diffusers.WanTransformer3DModel, {}, wan_call),
    "qwen_image": (diffusers.QwenImageTransformer2DModel, {}, qwen_call),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(MODELS))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--families", nargs="*")
    options = parser.parse_args()
    if options.families is not None:
        measure_families(options.families, options.json)
        return
    results: dict[str, Any] = {} if options.no_times else {"times": measure_times(options.turns)}
    results["rows"] = rows = {}
    for name in MODELS if options.only is None else options.only:
        rows[name] = measure_share(name)
        if options.json:
            write(options.json, results)


def name_groups(gm: Any) -> dict[str, list[str]]:
    """All inputs but latents and time are conditions."""
    names = [str(node.target).lstrip("*") for node in gm.graph.nodes if node.op == "placeholder"]
    return {"conditions": [n for n in names if n not in TIMES | LATENTS], "time": [n for n in names if n in TIMES]}


def measure_share(name: str) -> dict[str, Any]:
    """Trace and cut a model of published size."""
    kind, config, call = MODELS[name]
    began = time.process_time()
    with torch.device("meta"):
        model = kind(**config).to(torch.bfloat16).eval()
        gm = fxplug.trace(model, kwargs=call(), check=False)
    hoisted = fxplug.lower(gm, fuse=None, hoist=name_groups(gm))
    rows = {row.name: row for row in hoisted.stages}
    step = rows.pop("step")
    total = sum(p.numel() for p in gm.parameters())
    early = sum(row.weights for row in rows.values())
    result = {
        "parameters": total, "no step needs": early / total, "GiB in bf16": 2 * early / GIB,
        "of time alone": rows["time"].weights / total if "time" in rows else 0.0,
        "FLOPs hoisted": 1 - step.flop_share, "MiB kept": {key: row.result_bytes / MIB for key, row in rows.items()},
        "CPU seconds": time.process_time() - began,
    }  # fmt: skip
    kept = ", ".join(f"{key} {size:.1f}" for key, size in result["MiB kept"].items())
    shares = f"no step needs {result['no step needs']:.1%} ({result['GiB in bf16']:.1f} GiB)"
    shares += f", of time alone {result['of time alone']:.1%}, FLOPs {result['FLOPs hoisted']:.2%}"
    print(f"{name:12} {total / 1e9:6.2f} B, {shares}, MiB kept: {kept}", flush=True)
    return result


def measure_times(turns: int) -> dict[str, float]:
    """CPU time at a width of 1,024: Flux with one block of each kind, 128 words and 256 patches."""
    torch.manual_seed(0)
    sizes = {"attention_head_dim": 128, "num_attention_heads": 8, "joint_attention_dim": 1024, "pooled_projection_dim": 768}
    model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True, **sizes).eval()

    def call() -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(1, 256, 64), "encoder_hidden_states": torch.randn(1, 128, 1024),
            "pooled_projections": torch.randn(1, 768), "timestep": torch.rand(1), "guidance": torch.ones(1),
            "img_ids": torch.zeros(256, 3), "txt_ids": torch.zeros(128, 3), "return_dict": False,
        }  # fmt: skip

    def spend(module: Any, inputs: dict[str, Any]) -> float:
        began = time.process_time()
        module(**inputs)
        return time.process_time() - began

    gm = fxplug.trace(model, kwargs=call()).eval()
    hoisted = fxplug.lower(gm, fuse=None, hoist=name_groups(gm))
    rows = []
    with torch.no_grad():
        for turn in range(turns + 2):
            inputs = call()
            plain, first, kept = spend(gm, inputs), spend(hoisted, inputs), spend(hoisted, inputs)
            again = spend(gm, inputs)
            rows += [(2 * first / (plain + again), 2 * kept / (plain + again))] if turn > 1 else []
    found = {"first call of a prompt": median(row[0] for row in rows), "once kept": median(row[1] for row in rows)}
    print(*(f"{key}: {value:.3f} of the plain call" for key, value in found.items()), sep="\n", flush=True)
    return found


# --- families, in tiny forms

CLOCKS = ("timestep", "timesteps", "t", "temb")
CHANGES, ROUNDS = 24, 6


def measure_families(names: list[str], file: Path | None) -> None:
    """Hoist every class that is told a time; the sum of all rows is the last line."""
    import zoo

    rows: dict[str, Any] = {}
    for case in zoo.cases("diffusers/"):
        if names and not any(name in case.name for name in names):
            continue
        model = case.build().eval()
        parameters = list(inspect.signature(model.forward).parameters)
        args, kwargs = case.inputs(batch=2)
        call = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if any(name in CLOCKS for name in call):
            rows[case.name] = row = measure_family(model, call)
            print(f"{case.name:60} " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if file:
                write(file, {"families": rows})
    equal, called = (sum(row.get(key, 0) for row in rows.values()) for key in ("equal", "calls"))
    refused = sum("refused" in row for row in rows.values())
    ours, theirs = (sum(row.get(key, 0.0) for row in rows.values()) for key in ("ms hoisted", "ms plain"))
    ratio = f"; CPU time of all calls {ours / theirs:.3f}" if theirs else ""
    above = sum(row.get("ratio", 0.0) > 1.05 for row in rows.values())
    print(f"{len(rows)} classes, {refused} refused; {equal} of {called} calls equal{ratio}, of {above} models above 1.05")


@torch.no_grad()
def measure_family(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Trace and hoist one model, and call it between random changes."""
    draw, gen = random.Random(0), torch.Generator().manual_seed(0)

    def new(tensor: torch.Tensor, _: Any) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=gen).to(tensor.dtype) if tensor.is_floating_point() else tensor.clone()

    try:
        gm = fxplug.trace(model, kwargs=copy_of(call)).eval()
        inputs = [str(node.target).lstrip("*") for node in gm.graph.nodes if node.op == "placeholder"]
        stay = [name for name in inputs[1:] if name in call and name not in CLOCKS]
        groups = {"conditions": stay, "time": [name for name in inputs if name in CLOCKS]}
        hoisted = fxplug.lower(gm, fuse=None, hoist=groups)
    except FxplugError as error:
        return {"refused": str(error)}
    weights, early = [p for p in gm.parameters() if p.is_floating_point()], groups["conditions"]
    prompts = [{name: map_leaves(call[name], new) for name in early} for _ in range(2)]
    times = [{name: map_leaves(call[name], lambda t, _, value=value: torch.full_like(t, value)) for name in groups["time"]}
             for value in (3, 1)]  # fmt: skip
    for module in (gm, hoisted):  # whose code is written at the first call
        module(**copy_of(call))
    prompts = [prompt for prompt in prompts if takes(gm, {**call, **prompt})] or [{}]  # some decide by values
    equal, rounds = 0, []
    start = {key: value.clone() for key, value in gm.state_dict().items()}
    for number in range(ROUNDS):  # of the same changes; who is called first is slower
        draw, rows = random.Random(1), []
        gm.load_state_dict(start)  # after which nothing that was kept is used
        for turn in range(CHANGES):
            call |= {inputs[0]: map_leaves(call[inputs[0]], new), **draw.choice(times), **draw.choice(prompts)}
            if turn % 12 == 11:
                draw.choice(weights).mul_(1.01)
            found, row = {}, {}
            for key, module in [("hoisted", hoisted), ("plain", gm)][:: 1 if (turn + number) % 2 else -1]:
                given = copy_of(call)
                torch.manual_seed(turn)
                began = time.process_time()
                found[key] = module(**given)
                row[key] = time.process_time() - began
            equal += same(*found.values())
            rows.append(row)
        rounds.append(rows)
    spent = {
        f"ms {key}": sum(median(row[key] for row in turn[order::2]) for turn in zip(*rounds, strict=True) for order in (0, 1))
        * 500 / CHANGES for key in ("hoisted", "plain")
    }  # fmt: skip
    counts = hoisted.counts
    kept = sum(counts["step"] - count for name, count in counts.items() if name != "step")  # with the first call
    share = sum(row.weights for row in hoisted.stages[:-1]) / max(1, sum(p.numel() for p in gm.parameters()))
    return {"equal": equal, "calls": CHANGES * ROUNDS, "found": kept, "no step needs": round(share, 3),
            **{key: round(value, 3) for key, value in spent.items()},
            "ratio": round(spent["ms hoisted"] / spent["ms plain"], 3)}  # fmt: skip


def takes(gm: Any, call: dict[str, Any]) -> bool:
    """Whether a graph is for these inputs: some that its model decides by must stay as they are."""
    try:
        gm(**copy_of(call))
    except GuardError:
        return False
    return True


def copy_of(value: Any) -> Any:
    """Inputs in new containers, as a call may change lists and dicts."""
    if isinstance(value, dict):
        return {key: copy_of(member) for key, member in value.items()}
    return [copy_of(member) for member in value] if type(value) is list else value


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal to the bit."""
    from fuzz_hoist import is_same

    return bool(is_same(one, other))


if __name__ == "__main__":
    main()
