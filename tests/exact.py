"""Is the traced module bit for bit the model? One function for the fast tests and for the whole sweep."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from zoo import Case

import fxplug
from fxplug.core.ir.containers import list_leaves


def difference(a: Any, b: Any) -> str | None:
    """What differs between two results, or None when type, structure and every bit are the same."""
    if type(a) is not type(b):
        return f"a {type(b).__name__} instead of a {type(a).__name__}"
    ours, theirs = list_leaves(b), list_leaves(a)
    if len(ours) != len(theirs):
        return f"{len(ours)} values instead of {len(theirs)}"
    for index, (x, y) in enumerate(zip(theirs, ours, strict=True)):
        if not isinstance(x, torch.Tensor):
            if x != y:
                return f"value {index}: {y!r} instead of {x!r}"
        elif x.dtype != y.dtype or x.shape != y.shape:
            return f"value {index}: {y.dtype} {tuple(y.shape)} instead of {x.dtype} {tuple(x.shape)}"
        elif not torch.equal(x, y) and not same_with_nan(x, y):
            return f"value {index} differs by {(x - y).abs().max().item():.1e}"
    return None


def same_with_nan(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal where they are numbers, and no number in the same places: NaN is not equal to itself."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x[~x.isnan()], y[~y.isnan()])


@torch.no_grad()
def compare(model: torch.nn.Module, gm: torch.nn.Module, inputs: Callable[[], Any]) -> str | None:
    """Run both from the same random state and say what differs. Each gets inputs of its own, as a model may use them up."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    results = []
    for module in (model, gm):
        # the two share weights: running statistics that the first run moved are put back
        for key, value in model.state_dict().items():
            value.copy_(state[key])
        args, kwargs = inputs()
        torch.manual_seed(7)
        results.append(module(*args, **kwargs))
    return difference(*results)


def check(case: Case, train: bool = True) -> dict[str, Any]:
    """Trace at the first batch size, then compare in eval and train at the others and at every resolution.

    The result has `problems` (empty when exact), `seconds` to trace, `nodes`, `guards`, `graphs` and `refused`: the inputs
    that a guard turned away although the model itself takes them. Where tracing fails and names a module to keep whole,
    that is done; those are in `list_leaves`.
    """
    model = case.build()
    row: dict[str, Any] = {"name": case.name, "problems": [], "refused": [], "leaves": []}
    while True:
        args, kwargs = case.inputs(batch=case.batches[0])
        start = time.perf_counter()
        try:
            gm = fxplug.trace(model, args, kwargs, leaf=row["leaves"])
            break
        except fxplug.TraceError as error:
            named = re.search(r"leaf: \[([\w.]+)\]", str(error))
            if named is None or named[1] in row["leaves"]:
                raise
            row["leaves"].append(named[1])
    row["seconds"] = time.perf_counter() - start
    nodes = list(gm.graph.nodes)
    row["nodes"] = len(nodes)
    row["guards"] = sum(n.target is fxplug.core.ir.ops.guard for n in nodes)
    row["graphs"] = len(gm.graphs)
    if list(gm.state_dict()) != list(model.state_dict()):
        row["problems"].append("state_dict keys differ")
    runs = [(b, s) for s in range(case.sizes) for b in case.batches]
    for mode in (False, True) if train else (False,):
        model.train(mode)
        try:
            gm.train(mode)
        except fxplug.TraceError as error:
            row["problems"].append(f"train: {error}")
            continue
        for batch, size in runs if not mode else [r for r in runs if r[0] > 1]:
            where = f"{'train' if mode else 'eval'} batch {batch} size {size}"
            try:
                problem = compare(model, gm, partial(case.inputs, batch=batch, size=size))
            except fxplug.GuardError as error:
                row["refused"].append(f"{where}: {error}")
                continue
            if problem:
                row["problems"].append(f"{where}: {problem}")
    return row
