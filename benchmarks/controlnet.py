"""A UNet with its ControlNet as one compiled graph, and as diffusers' two compiled models, in one run.

python benchmarks/controlnet.py [--json FILE] [--pairs N] [--only unet|sd15]

Models are those of `models.py`: unet, which a CPU can compile and run, and where CUDA is sd15, too. Both ways get the same
weights and inputs and take turns; a time is a whole step (ControlNet and UNet), the ratio is ours over theirs in the same turn.
Strengths and the part of the schedule then change: what each way compiles again is counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from diffusers import ControlNetModel
from record import write
from timing import by_the_clock, difference, shown, turns
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import fxplug

KINDS = ["unet", "sd15"]
CHANGES = [(0.3, 0.0, 1.0), (0.7, 0.2, 0.8), (0.0, 0.0, 1.0), (1.0, 0.5, 0.6)]  # strength, start, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    names = [options.only] if options.only else KINDS if cuda else KINDS[:1]
    rows = {name: measure(name, options.pairs) for name in names}
    if options.json:
        write(options.json, rows)


def measure(name: str, pairs: int) -> dict[str, Any]:
    of = models.subject(name)
    unet, inputs, device, dtype = of.module, of.inputs, models.DEVICE, models.DTYPE
    control = control_of(unet).to(device, dtype)
    n, _, *sides = inputs["sample"].shape
    condition = torch.rand(n, 3, *(8 * side for side in sides)).to(device, dtype)
    inputs = {**inputs, "timestep": torch.tensor(500, device=device)}
    start = time.perf_counter()
    gm = fxplug.trace(unet, (), inputs)
    ours = fxplug.apply(gm, fxplug.load_pass("controlnet", network=control))
    rewrite = time.perf_counter() - start
    theirs = TwoModels(unet, control)
    given = {**inputs, "cond": condition, **tensors((1.0, 0.0, 1.0), device)}
    with torch.no_grad():
        one = difference(ours(**given)[0], theirs(inputs, condition, 1.0))
    row: dict[str, Any] = {"batch": n, "dtype": str(dtype), "rewrite_seconds": rewrite, "error": one}
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


def control_of(unet: nn.Module) -> nn.Module:
    control = ControlNetModel.from_unet(unet).eval()
    for parameter in control.parameters():  # the zero convolutions of a new one would measure nothing
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return control


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
