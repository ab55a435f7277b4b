"""Diffusers' own test pipelines in an engine: made jointly and right, never made jointly, or refused in words; none wrong.

    python benchmarks/served_pipelines.py CHECKOUT [NAME...] [--limit SECONDS] [--out FILE]

CHECKOUT is one of diffusers of the version that is installed, NAME a part of a file's path below its `tests/pipelines`. Each
file has a process of its own, two at a time. What these tests take from the hub is made here, as in `pipelines.py`.

Three requests with other prompts, pictures, seeds and numbers of steps run one by one, which must give the stock pipeline's
bits, and together, twice. Each joint call is made again for each request alone, by the model as it is: the rows must be within
1e-5 of the largest value of the same rows alone. With one bucket a request runs with others beside it and without: its bits
must be the same. The pictures must be within ten times what one disturbed last bit of each call does to them.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pipelines
import torch
from torch import Tensor, nn

import fxplug
from fxplug.serving import Engine, Request
from fxplug.serving.forms import use_modes
from fxplug.serving.parked import copy_pipeline, make_stand_in, use_caller

CLOSE = 1e-5  # of the largest value of the same rows alone
REQUESTS = 3


def tensors_of(value: Any) -> list[Tensor]:
    """List the numbers of a result."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)]
    if hasattr(value, "getbands"):
        return [torch.from_numpy(np.asarray(value).copy())]
    if isinstance(value, Mapping):
        return [x for each in value.values() for x in tensors_of(each)]
    return [x for each in value for x in tensors_of(each)] if isinstance(value, (list, tuple)) else []


def is_same(one: Any, two: Any) -> bool:
    left, right = tensors_of(one), tensors_of(two)
    return len(left) == len(right) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(left, right, strict=True)
    )


def off(one: Any, two: Any) -> float:
    """Return the largest difference over the largest value of the second; infinity for other shapes."""
    left, right = tensors_of(one), tensors_of(two)
    if [x.shape for x in left] != [x.shape for x in right]:
        return float("inf")
    found = [0.0]
    for a, b in zip(left, right, strict=True):
        a, b = a.double(), b.double()
        if not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        a, b = a.nan_to_num(), b.nan_to_num()
        found.append(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if b.numel() else 0.0)
    return max(found)


def make_requests(pipe: Any, call: dict[str, Any]) -> list[Request]:
    takes = inspect.signature(pipe.__call__).parameters
    made = []
    for number in range(REQUESTS):
        own = pipelines.variant(call, number + 1)
        if "num_inference_steps" in takes:
            own["num_inference_steps"] = steps = 2 + number % 2
            if steps * own.get("strength", 1) < 1:  # so few are none
                own["num_inference_steps"] = math.ceil(steps / own["strength"])
        if "intermediate_timesteps" in takes:  # which two steps alone take
            own["intermediate_timesteps"] = None
        if "output_type" in takes:
            own["output_type"] = "np"
        made.append(Request(call=own, seed=number if "generator" in takes else None))
    return made


def run_stock(pipe: Any, request: Request, disturb: bool = False) -> Any:
    """Run the stock pipeline; `disturb` changes the last bits of what its models give."""
    own = copy.copy(pipe)
    if getattr(pipe, "scheduler", None) is not None:
        own.scheduler = copy.deepcopy(pipe.scheduler)
    call = copy.deepcopy(request.call)
    if request.seed is not None:
        call["generator"] = torch.Generator().manual_seed(request.seed)
    torch.manual_seed(0)
    if not disturb:
        return own(**call)
    draw = torch.Generator().manual_seed(1)

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64) or not x.numel():
            return x
        return x + (torch.rand(x.shape, generator=draw) * 2 - 1).to(x) * torch.finfo(x.dtype).eps * x.detach().abs().max()

    def make(model: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map(change, getattr(model, method)(*args, **kwargs))

    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    ways = {id(part): make_stand_in(part, ("decode",) if hasattr(part, "decode") else ("__call__",)) for part in parts}
    own, _ = copy_pipeline(pipe, ways)  # also of pipelines within it
    with use_caller(make):
        return own(**call)


class Watch:
    """Makes each joint call of an engine again, for each request alone, by the model as it is."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.joined, self.asked = engine, 0, 0
        self.worst, self.where = 0.0, ""
        self.real: Callable[..., None] = engine.caller.make
        engine.caller.make = self.make  # type: ignore[method-assign]

    def make(self, asked: Any) -> None:
        copies = [copy.deepcopy((call.args, call.kwargs)) for call, _ in asked]
        proven = self.engine.forms.form_of(asked[0][0]).proven
        self.real(asked)
        self.asked += len(asked)
        if len(asked) < 2:
            return
        self.joined += len(asked) if proven else 0
        for (call, _), (args, kwargs) in zip(asked, copies, strict=True):
            with torch.no_grad(), use_modes(call.modes):
                try:
                    right = getattr(call.model, call.method)(*args, **kwargs)
                except Exception as error:
                    right = error
            found = off(call.result, right)
            if isinstance(call.result, Exception) != isinstance(right, Exception):
                found = float("inf")
            if found > self.worst:
                self.worst, self.where = found, f"{type(call.model).__name__}.{call.method}"


def run(engine: Engine, requests: list[Request]) -> list[Any]:
    torch.manual_seed(0)
    tickets = [engine.submit(Request(call=copy.deepcopy(one.call), seed=one.seed)) for one in requests]
    while not engine.is_idle:
        engine.step()
    return [ticket._error if ticket._error is not None else ticket._result for ticket in tickets]


def state_of(pipe: Any) -> list[Any]:
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    return [x.clone() for part in parts for x in part.state_dict().values() if isinstance(x, Tensor)] + [
        [(name, type(module)) for name, module in part.named_modules()] for part in parts
    ]


def measure(case: Any) -> dict[str, Any]:
    """Return what becomes of one test's pipeline."""
    try:
        pipe, call = pipelines.build(case)
        requests = make_requests(pipe, call)
        with torch.no_grad():
            alone = [run_stock(pipe, one) for one in requests]
    except (Exception, SystemExit) as error:
        return {"result": "cannot be built", "text": pipelines.say(error)}
    repeats = is_same(run_stock(pipe, requests[0]), alone[0])
    before = state_of(pipe)
    engine = Engine(pipe)
    for one, right in zip(requests, alone, strict=True):
        (made,) = run(engine, [one])
        if isinstance(made, fxplug.FxplugError):
            return {"result": "refused", "text": str(made)}
        if isinstance(made, Exception):
            return {"result": "wrong", "text": f"alone it raises {pipelines.say(made)}"}
        if repeats and not is_same(made, right):
            return {"result": "wrong", "text": f"alone it is not the stock pipeline's: {off(made, right):.1e}"}
    row: dict[str, Any] = {"repeats": repeats}
    watch, wrong, far, moved = Watch(engine), [], 0.0, 0.0
    for turn in range(2):
        for right, made in zip(alone, run(engine, requests), strict=True):
            if isinstance(made, Exception):
                wrong.append(f"turn {turn} raises {pipelines.say(made)}")
            elif repeats:
                far = max(far, off(made, right))
    if far > CLOSE:
        moved = max(off(run_stock(pipe, one, disturb=True), right) for one, right in zip(requests, alone, strict=True))
    row |= {"calls": watch.asked, "joined": watch.joined, "rows": watch.worst, "pictures": far, "disturbed": moved}
    refused = sorted({form.refused for form in engine.forms.forms.values() if form.refused})
    if watch.worst > CLOSE:
        wrong.append(f"rows of {watch.where} are {watch.worst:.1e} away")
    if far > max(10 * moved, CLOSE):
        wrong.append(f"pictures are {far:.1e} away, one last bit moves them by {moved:.1e}")
    bits = check_bits(pipe, requests) if repeats else ""
    wrong += [bits] if bits else []
    if not all(is_same(a, b) and (isinstance(a, Tensor) or a == b) for a, b in zip(before, state_of(pipe), strict=True)):
        wrong.append("its models are not what they were")
    if wrong:
        return {**row, "result": "wrong", "text": "; ".join(wrong[:3])}
    return {**row, "result": "joined" if watch.joined else "alone", "text": "; ".join(refused)}


def check_bits(pipe: Any, requests: list[Request]) -> str:
    """Say whether the bits of a request depend on who else is there, with one bucket; "" if not."""
    engine = Engine(pipe, rows=16, buckets=[16])
    (first,) = run(engine, requests[:1])
    for others in (requests[::-1], requests[:2]):
        at = next(n for n, one in enumerate(others) if one is requests[0])
        made = run(engine, others)[at]
        if isinstance(made, Exception) or not is_same(made, first):
            how = pipelines.say(made) if isinstance(made, Exception) else f"{off(made, first):.1e}"
            return f"with others beside it its bits differ: {how}"
    return ""


if __name__ == "__main__":
    logging.getLogger("fxplug.serving").setLevel(logging.ERROR)
    pipelines.main(sys.argv[1:], measure, __doc__)
