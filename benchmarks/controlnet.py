"""A UNet with its ControlNet as one compiled graph, and as diffusers' two compiled models, in one run.

python benchmarks/controlnet.py [--json FILE] [--pairs N] [--only small|sd15]

small  a UNet in the shape of Stable Diffusion 1.5, of fewer channels, that a CPU can compile and run
sd15   Stable Diffusion 1.5's own sizes, random weights; by itself where CUDA is
Both ways get the same weights and inputs and take turns; a time is a whole step (ControlNet and UNet), the ratio is ours over
theirs in the same turn. Strengths and the part of the schedule then change: what each way compiles again is counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from record import write
from timing import by_the_clock, difference, shown, turns
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import fxplug

SIZES: dict[str, dict[str, Any]] = {
    "small": {"channels": (64, 128, 256, 256), "latent": 32, "words": 128, "heads": 4, "batch": 1},
    "sd15": {"channels": (320, 640, 1280, 1280), "latent": 64, "words": 768, "heads": 8, "batch": 2},
}
CHANGES = [(0.3, 0.0, 1.0), (0.7, 0.2, 0.8), (0.0, 0.0, 1.0), (1.0, 0.5, 0.6)]  # strength, start, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--only", choices=list(SIZES))
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    names = [options.only] if options.only else list(SIZES) if cuda else ["small"]
    rows = {name: measure(name, "cuda" if cuda else "cpu", options.pairs) for name in names}
    if options.json:
        write(options.json, rows)


def measure(name: str, device: str, pairs: int) -> dict[str, Any]:
    size = SIZES[name]
    dtype = torch.float16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    unet, control = models(size)
    unet, control = unet.to(device, dtype), control.to(device, dtype)
    inputs, condition = example(size, device, dtype)
    start = time.perf_counter()
    gm = fxplug.trace(unet, (), inputs)
    ours = fxplug.apply(gm, fxplug.load_pass("controlnet", network=control))
    rewrite = time.perf_counter() - start
    theirs = TwoModels(unet, control)
    given = {**inputs, "cond": condition, **tensors((1.0, 0.0, 1.0), device)}
    with torch.no_grad():
        one = difference(ours(**given)[0], theirs(inputs, condition, 1.0))
    row: dict[str, Any] = {"sizes": size, "dtype": str(dtype), "rewrite_seconds": rewrite, "error": one}
    print(f"{name}  rewritten in {rewrite:.1f} s, {one:.1e} from diffusers' pair (relative)", flush=True)
    with torch.no_grad():
        ways = {"ours": lambda: ours(**given), "theirs": lambda: theirs(inputs, condition, 1.0)}
        row["eager"] = turns(ways, pairs, "theirs", clock=by_the_clock)
        report(name, "eager", row["eager"])
        compiled, pair = torch.compile(ours), TwoModels(torch.compile(unet), torch.compile(control))
        ways = {"ours": lambda: compiled(**given), "theirs": lambda: pair(inputs, condition, 1.0)}
        row |= {who: compile_anew(call) for who, call in ways.items()}
        row["compiled"] = turns(ways, pairs, "theirs", clock=by_the_clock)
        report(name, "compiled", row["compiled"])
        row["ours"]["recompiles"] = recompiles(lambda *change: compiled(**{**given, **tensors(change, device)}))
        row["theirs"]["recompiles"] = recompiles(lambda *change: pair(inputs, condition, *change))
    for who in ("ours", "theirs"):
        print(f"{name}  {who}: " + ", ".join(f"{k} {v:.3g}" for k, v in row[who].items()), flush=True)
    return row


def models(size: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    unet = UNet2DConditionModel(
        sample_size=size["latent"],
        block_out_channels=size["channels"],
        cross_attention_dim=size["words"],
        attention_head_dim=size["heads"],
    ).eval()
    control = ControlNetModel.from_unet(unet).eval()
    for parameter in control.parameters():  # the zero convolutions of a new one would measure nothing
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return unet, control


def example(size: dict[str, Any], device: str, dtype: torch.dtype) -> tuple[dict[str, Any], Tensor]:
    n, side = size["batch"], size["latent"]
    inputs = {
        "sample": torch.randn(n, 4, side, side).to(device, dtype),
        "timestep": torch.tensor(500, device=device),
        "encoder_hidden_states": torch.randn(n, 77, size["words"]).to(device, dtype),
        "return_dict": False,
    }
    return inputs, torch.rand(n, 3, 8 * side, 8 * side).to(device, dtype)


class TwoModels:
    """A step of diffusers' pipeline: the ControlNet, then the UNet with what it gave; the gate is Python's there."""

    def __init__(self, unet: Any, control: Any) -> None:
        self.unet, self.control = unet, control

    def __call__(self, inputs: dict[str, Any], condition: Tensor, strength: float, start: float = 0, end: float = 1) -> Tensor:
        active = start <= 0.5 <= end  # half way through the schedule: timestep 500 of 1000
        call = {k: inputs[k] for k in ("sample", "timestep", "encoder_hidden_states", "return_dict")}
        down, middle = self.control(**call, controlnet_cond=condition, conditioning_scale=strength * active)
        found = self.unet(**call, down_block_additional_residuals=down, mid_block_additional_residual=middle)
        return found[0]  # type: ignore[no-any-return]


def tensors(change: tuple[float, ...], device: str) -> dict[str, Tensor]:
    return {k: torch.tensor(v, device=device) for k, v in zip(("strength", "start", "end"), change, strict=True)}


def report(name: str, how: str, row: dict[str, Any]) -> None:
    ours, theirs = (row[who]["milliseconds"] for who in ("ours", "theirs"))
    ratio = shown(row["ours"]["ratio"])
    print(f"{name}  {how:8}  ours {ours:8.2f} ms   theirs {theirs:8.2f} ms   ratio {ratio}", flush=True)


def compile_anew(call: Callable[[], Any]) -> dict[str, Any]:
    """The first call, with empty caches: how long it takes, into how many graphs, with how many breaks between."""
    counters.clear()
    begun = time.perf_counter()
    with fresh_cache():
        call()
    seconds = time.perf_counter() - begun
    return {"compile_seconds": seconds, "graphs": graphs(), "breaks": sum(counters["graph_break"].values())}


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def recompiles(call: Callable[..., Any]) -> int:
    """How many graphs are compiled while strength and gate change."""
    counters.clear()
    for change in CHANGES:
        call(*change)
    return graphs()


if __name__ == "__main__":
    main()
