"""Calls of torch's flex_attention and create_block_mask, which are given Python functions: one node each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..errors import TraceError
from ..ir import ops
from ..ir.containers import list_leaves
from .graph_builder import Recording
from .recorder import record_call


@functools.cache
def _recorded_kind(base: type) -> Any:
    """Return the class of a BlockMask for the model's code: it has a block size, and nothing else that a graph could follow."""

    def read(mask: Any, name: str) -> Any:
        recording = mask.fxplug_recording
        raise TraceError(
            f"{recording.place()}: reads BlockMask.{name}, which cannot be captured in a graph; {recording.way_out()}"
        )

    unread = {name: property(functools.partial(read, name=name)) for name in ("shape", "numel", "sparsity", "to_dense", "to")}
    return type(base.__name__, (base,), {**unread, "__module__": base.__module__, "__getattr__": read})


def create_block_mask(recording: Recording, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Record a call of torch's `create_block_mask`, and return a mask that the model's code can only pass on."""
    kind = _recorded_kind(original.__globals__["BlockMask"])
    for size in list_leaves(kwargs.get("BLOCK_SIZE", args[6:7])):
        recording.decide(size)
    target, given, named, cells = _opened(recording, original, args, kwargs)
    (plain, plain_kw), (nodes, node_kw) = recording.lower((given, named))
    recording.paused = True
    try:
        made = target(*plain, **plain_kw)
    finally:
        recording.paused = False
    mask = kind.__new__(kind)
    node = recording.node("call_function", target, nodes, node_kw, recording.named("block_mask"))
    vars(mask).update(BLOCK_SIZE=made.BLOCK_SIZE, _fxplug_of=made, fxplug_cells=cells, fxplug_recording=recording)
    recording.opaque[id(mask)] = node
    recording.kept.append(mask)
    return mask


def flex_attention(recording: Recording, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Record a call of torch's `flex_attention`. Raises TraceError for a BlockMask that forward did not make."""
    base = original.__globals__["BlockMask"]
    for mask in (x for x in (*args, *kwargs.values()) if isinstance(x, base)):
        if id(mask) not in recording.opaque:
            raise TraceError(
                f"{recording.place()}: flex_attention is given a BlockMask that create_block_mask did not make in this "
                f"forward, and a graph cannot hold one; {recording.way_out()}"
            )
        if changed := [name for name, cell, value in mask.fxplug_cells if cell.cell_contents is not value]:
            raise TraceError(
                f"{recording.place()}: the variable '{changed[0]}' that a mask_mod reads was assigned again after "
                f"create_block_mask, which cannot be captured in a graph; {recording.way_out()}"
            )
    target, given, named, _ = _opened(recording, original, args, kwargs)
    return record_call(recording, target, None, given, named)


def _opened(
    recording: Recording, original: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Any]]:
    """Return a call with its functions replaced by the values that they read; and the variables of these values."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    functions = {at: value for at, value in given.items() if callable(value)}
    variables = []
    for at, function in functions.items():
        if not isinstance(function, FunctionType) or function.__kwdefaults__:
            raise TraceError(
                f"{recording.place()}: {original.__name__} is given a {type(function).__name__} to call, and a graph can hold "
                f"a plain Python function only, without keyword-only arguments; {recording.way_out()}"
            )
        try:
            free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            cells = [(name, cell, cell.cell_contents) for name, cell in free]
        except ValueError:  # an empty cell
            raise TraceError(f"{recording.place()}: a variable of {function.__name__} has no value yet") from None
        defaults = function.__defaults__ or ()
        for name, value in [*((n, v) for n, _, v in cells), *zip(function.__code__.co_varnames[4:], defaults, strict=False)]:
            try:
                recording.lower(value)
            except TraceError as error:
                raise TraceError(
                    f"{recording.place()}: {function.__name__}, which {original.__name__} calls, reads the variable '{name}', "
                    f"a {type(value).__name__}: only tensors and plain values can be passed to it in a graph; "
                    f"{recording.way_out()}"
                ) from error
        given[at] = (*(v for _, _, v in cells), *defaults)
        variables += cells
    target = ops.with_functions(original, tuple(functions.items()))
    return target, tuple(given[n] for n in range(len(args))), {name: given[name] for name in kwargs}, variables
