"""A written file, called with values that an example seldom has: zeros, masks of nothing, ids at both ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ..core.errors import FxplugError
from ..core.ir.comparison import COMPILED, Difference, measure_difference
from ..core.ir.containers import list_leaves, map_leaves
from .size_trial import list_tensors

EMBEDDING = torch.ops.aten.embedding.default
Call = Callable[[Any, Any], Any]  # of arguments and keyword arguments


def try_values(file: Call, module: Call, program: ExportedProgram, names: Mapping[int, str]) -> list[str]:
    """Return a note, and warn, for each kind of values on which file and module differ.

    `names` are those of the program's tensors, by number. Values for which the module raises are left out.
    """
    found: list[str] = []
    for what, (args, kwargs) in _values(program, names):
        try:
            wanted = list_tensors(module(args, kwargs))
        except Exception:  # the module's own
            continue
        try:
            got = list_tensors(file(args, kwargs))
        except FxplugError as error:
            found.append(f"it fails where {what}, and the module does not: {error}")
        else:
            gap = _gap(wanted, got)
            if gap.times > 1:  # what nearly cancels has the rounding of the example's numbers
                gap = _gap(wanted, got, list_tensors(module(*program.example_inputs)))
            if gap.times <= 1:
                continue
            found.append(f"it differs from the module by {gap.distance:.1e} where {what}: do not give it such values")
        warnings.warn(found[-1], stacklevel=2)
    return found


def _gap(wanted: list[Tensor], got: list[Tensor], beside: list[Tensor] | None = None) -> Difference:
    """Return the distance of results, relative to the largest number in them and in those `beside` them."""
    if beside is not None and len(wanted) == len(got) and all(a.shape == b.shape for a, b in zip(wanted, got, strict=True)):
        wanted, got = ([torch.cat([a.flatten(), b.flatten()]) for a, b in zip(beside, t, strict=True)] for t in (wanted, got))
    return measure_difference([t.cpu() for t in wanted], [t.cpu() for t in got], COMPILED)


def _values(program: ExportedProgram, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield a description of some special values, and the example with them."""
    inputs = program.example_inputs
    tensors = [value for value in list_leaves(inputs) if isinstance(value, Tensor)]
    if any(tensor.is_floating_point() for tensor in tensors):
        yield "all numbers are 0", map_leaves(inputs, lambda t, _: torch.zeros_like(t) if t.is_floating_point() else t)
    rows = _embedded(program)
    for place, tensor in enumerate(tensors):
        if tensor.dtype == torch.bool and tensor.numel():
            yield f"a sample has nothing but False in '{names[place]}'", _with(inputs, place, _masked(tensor))
        elif place in rows:
            ends = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape) % 2 * (rows[place] - 1)
            yield f"'{names[place]}' has the numbers of the first and the last row", _with(inputs, place, ends.to(tensor.dtype))


def _embedded(program: ExportedProgram) -> dict[int, int]:
    """Return the number of rows of the embedding that an input indexes, for each such tensor by its place."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    read = [nodes[str(name)] for name in program.graph_signature.user_inputs if str(name) in nodes]
    found = {}
    for place, node in enumerate(node for node in read if isinstance(node.meta.get("val"), Tensor)):
        tables = [user.args[0].meta["val"] for user in node.users if user.target is EMBEDDING and user.args[1] is node]
        if tables and all(isinstance(table.shape[0], int) for table in tables):
            found[place] = min(table.shape[0] for table in tables)
    return found


def _masked(tensor: Tensor) -> Tensor:
    """Return a mask that is False in its first sample, or everywhere without a batch dimension."""
    new = tensor.clone()
    (new[0] if new.dim() > 1 else new).fill_(False)
    return new


def _with(inputs: Any, place: int, new: Tensor) -> Any:
    """Return inputs with another tensor at a place."""
    places = count()
    return map_leaves(inputs, lambda tensor, _: new if next(places) == place else tensor)
