"""What two calls leave, and where it differs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import VerifyError
from ..ir.pytree import leaves
from ..ir.traced_module import TracedModule
from ..torch_internals.tensors import version
from .differences import equal, is_differentiable, unlike
from .probe import Unchecked

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Left:
    """What one call leaves: its result, the state and the inputs after it, and the weights and inputs a gradient reaches."""

    out: Any
    state: dict[str, torch.Tensor]
    inputs: Any
    reached: set[str]


@dataclass
class Finding:
    """How what two calls left differs: in which of the calls, in words."""

    index: int
    text: str


@contextlib.contextmanager
def kept_results(gm: TracedModule, new: TracedModule, call: Call) -> Iterator[None]:
    """See that what the calls got copies of is not written by another way. Raises VerifyError."""
    named = {f"the {kind} '{name}' of the model": t for kind in ("parameter", "buffer") for name, t in named_leaves(gm, kind)}
    given = [("an input", t) for t in leaves(call) if isinstance(t, torch.Tensor)]
    watched = [(what, t, version(t)) for what, t in [*named.items(), *given] if not t.is_inference()]
    yield
    changed = [what for what, t, before in watched if version(t) != before]
    if changed:
        raise VerifyError(f"{changed[0]} is written by a block that keeps it as its own: a block changes nothing of the model")


def named_leaves(module: nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters or buffers of a module with their names."""
    yield from module.named_parameters() if kind == "parameter" else module.named_buffers()


def first_difference(base: list[Left], new: list[Left]) -> Finding | None:
    """The first thing that calls of two modules left otherwise."""
    for index, (a, b) in enumerate(zip(base, new, strict=True)):
        if off := unlike(a.out, b.out):
            return Finding(index, f"outputs differ {off}")
        if off := unlike(a.inputs, {**b.inputs} if isinstance(b.inputs, dict) else common_part(a.inputs, b.inputs)):
            return Finding(index, f"the inputs after the call differ {off}")
        for name in a.state.keys() & b.state.keys():
            if off := unlike(a.state[name], b.state[name]):
                return Finding(index, f"'{name}' after the call differs {off}")
        if lost := sorted(a.reached - b.reached):
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            return Finding(index, f"no gradient reaches {', '.join(lost[:3])}{more} any more")
    return None


def common_part(before: Call, after: Call) -> Call:
    """The inputs of the rewritten model without those that passes added."""
    return after[0], {k: v for k, v in after[1].items() if k in before[1]}


def close_enough(base: list[Left], control: list[Left]) -> bool:
    """Whether every element of every output agrees within 1e-5 of itself, but for the last bits of the output's largest."""
    for a, b in zip(base, control, strict=True):
        for x, y in zip(leaves(a.out), leaves(b.out), strict=True):
            if not isinstance(x, torch.Tensor) or equal(x, y):
                continue
            if unlike(torch.zeros_like(x), torch.zeros_like(y)) or not is_differentiable(x):
                return False
            last = torch.finfo(x.dtype).eps * x.nan_to_num(0, 0, 0).abs().max().item()
            if not torch.allclose(x, y, rtol=1e-5, atol=2 * last, equal_nan=True):
                return False
    return True


def hidden_state(out: Any) -> str:
    """What keeps a comparison from seeing much."""
    tensors = [t for t in leaves(out) if is_differentiable(t) and t.numel() > 1 and t.layout == torch.strided]
    if tensors and all(t.isnan().all() for t in tensors):
        raise Unchecked("every output of the model is NaN on these inputs, so there is nothing to compare")
    if tensors and all(equal(t, t.flatten()[:1].expand(t.numel()).view(t.shape)) for t in tensors):
        return "every output is one value throughout, which may hide what changed before it"
    return ""
