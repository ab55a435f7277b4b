"""A module on its way through the features of `make matrix`: how it stands, how it is called, and what it gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from matrix_models import DEVICE, Subject
from torch import Tensor, nn

from fxplug.core.ir.containers import list_leaves, map_leaves
from fxplug.core.ir.traced_module import TracedModule
from fxplug.parallel.runtime.pretended import run_simulated

# what torch.compile is called with: on a CPU it traces and functionalises, and compiles nothing
COMPILER = "aot_eager" if DEVICE == "cpu" else "inductor"
Call = Callable[..., Any]


class NotApplicable(Exception):
    """Why a feature has no meaning for a model, in a sentence."""


@dataclass
class State:
    """A module between two features, how it is called, and what later features have to know."""

    subject: Subject
    gm: Any
    kwargs: dict[str, Any]
    done: tuple[str, ...] = ()
    around: tuple[Callable[[Any, State], Any], ...] = ()  # put around the module for a call, the first one innermost
    contexts: tuple[Callable[[], Any], ...] = ()  # entered for a call
    ways: dict[str, int] = field(default_factory=dict)  # processes along each axis
    whole: Any = None  # what was split, until another feature follows
    calls: int = 1  # as many as what is kept from an earlier one needs to be used
    result: Call | None = None  # called instead of the module until another feature follows
    gradients: bool = False  # compared as well
    compiled: bool = False
    lowered: dict[str, Any] = field(default_factory=dict)  # arguments of `lower` so far
    entered: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # what is left after the last call


@dataclass(frozen=True)
class Feature:
    """What can be done to a traced module."""

    name: str
    what: str
    do: Callable[[State], State]
    adapts: bool = False
    passes: Callable[[State], list[Any]] | None = None
    after: Callable[[State], State] = lambda state: state
    needs: tuple[str, ...] = ()  # one of these comes before it in a cell: else the first that the cell does not have
    splits: bool = False
    slow: bool = False  # only with --long


# --- what is called, and what it gives


def result_of(state: State) -> tuple[list[Any], list[Tensor]]:
    """What a state's last call gives in each process, and its gradients by the floating-point inputs if they are compared."""
    if state.gradients and state.calls > 1:
        raise NotApplicable("what takes from an earlier step is for inference")
    if state.gradients:
        inputs = {k: v.detach().requires_grad_() if is_float(v) else v for k, v in state.kwargs.items()}
        return gradients_of(state, inputs, [value for value in inputs.values() if is_float(value)])
    return _in_each(state, lambda: _called(state, state.kwargs), False), []


def gradients_of(state: State, kwargs: Mapping[str, Any], wanted: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """The results, and the gradients of their mean square by some tensors: the mean over the processes, as DDP takes it."""

    def both() -> tuple[Any, list[Tensor]]:
        found = _called(state, kwargs)
        loss = sum(t.to(torch.promote_types(t.dtype, torch.float32)).square().mean() for t in list_leaves(found) if is_float(t))
        slopes = torch.autograd.grad(loss, wanted, allow_unused=True)
        detached = map_leaves(found, lambda t, _: t.detach() if isinstance(t, Tensor) else t)
        return detached, [torch.zeros_like(w) if g is None else g for g, w in zip(slopes, wanted, strict=True)]

    results = _in_each(state, both, True)
    means = [torch.stack(slopes).mean(0) for slopes in zip(*(slopes for _, slopes in results), strict=True)]
    return [value for value, _ in results], means


def _in_each(state: State, call: Callable[[], Any], gradients: bool) -> list[Any]:
    """What a call gives in each process, whose modes are its thread's own."""

    def one(rank: int) -> Any:
        with torch.set_grad_enabled(gradients), contextlib.ExitStack() as stack:
            for context in state.contexts:
                stack.enter_context(context())
            return call()

    return run_simulated(state.ways, one) if state.ways else [one(0)]


def _called(state: State, kwargs: Mapping[str, Any]) -> Any:
    call = state.result or target_of(state)
    for _ in range(state.calls):
        found = call(**copy_of(kwargs))
    return found


def copy_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs in new containers, as a call may change lists and dicts."""
    return map_leaves(dict(kwargs), lambda value, _: value)  # type: ignore[no-any-return]


def target_of(state: State) -> Call:
    """The module with all that is put around it."""
    target = state.gm
    if state.compiled and state.ways:
        raise NotApplicable("torch.compile cannot follow threads as processes: tests/test_parallel.py has real ones")
    if state.compiled and not state.around and vars(target).get("_compiled_call_impl") is None:
        target.compile(backend=COMPILER, fullgraph=True)
    for wrap in state.around:
        target = wrap(target, state)
    if state.compiled and isinstance(target, TracedModule) and state.around:  # regions, which a training compiles from outside
        return torch.compile(target, backend=COMPILER, fullgraph=not torch.distributed.is_initialized())
    if state.compiled and state.around and isinstance(target, nn.Module):
        target.compile(backend=COMPILER, fullgraph=True)
    return target  # type: ignore[no-any-return]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
