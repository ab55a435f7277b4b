"""A written file, called at other sizes than the example's beside the module: a compiler may have fixed what it calls free."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call

from ..core.errors import FxplugError
from ..core.ir.comparison import COMPILED, is_close, is_equal
from ..core.ir.containers import list_leaves, map_leaves
from ..core.torch_internals import modules as pytree
from ..core.torch_internals.exporting import Condition, compute_size
from ..core.torch_internals.tensors import get_size_name
from .blockers import Unfit, report_refusals
from .package import ExportedModel

STEPS = (1, 2, 3, 4, 8, 16, 32)  # how far from the example's size is tried, until the file takes one
MOST = 16  # conditions of a compiler that are tried one by one
LARGEST = 1 << 24  # numbers of an input that is made for a trial
Sizes = dict[str, int]  # by the name of a free size


class NotFree(FxplugError):
    """Dimensions that a file calls free and does not compute for, as (number of the input, dimension)."""

    def __init__(self, places: set[tuple[int, int]], text: str) -> None:
        super().__init__(text)
        self.places = places


def call_alone(module: nn.Module, inputs: Any) -> Any:
    """Return the module's result. Raises Unfit if it changes its own state or its inputs."""
    state = {name: tensor.detach().clone() for name, tensor in module.named_buffers()}
    given = map_leaves(inputs, lambda t, _: t.detach().clone())
    with torch.no_grad(), report_refusals():
        found = functional_call(module, state, *given)
    before = [*dict(module.named_buffers()).items(), *((f"its input {i}", t) for i, t in enumerate(list_leaves(inputs)))]
    for (name, old), new in zip(before, [*state.values(), *list_leaves(given)], strict=True):
        if isinstance(old, Tensor) and not is_equal(old, new):
            raise Unfit(f"a call of this module changes {name}")
    return found


def list_tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a nested result."""
    return [value for value in list_leaves(result) if isinstance(value, Tensor)]


class SizeTrial:
    """Calls at sizes that a program calls free, of what was written of it and of the module."""

    def __init__(self, program: ExportedProgram) -> None:
        self.flat, self.spec = pytree.tree_flatten(program.example_inputs)
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        self.shapes: dict[int, Sequence[int | torch.SymInt]] = {}
        self.example: Sizes = {}
        self.places: dict[str, list[tuple[int, int]]] = {}
        for i, (value, name) in enumerate(zip(self.flat, program.graph_signature.user_inputs, strict=True)):
            if isinstance(value, Tensor):
                self.shapes[i] = nodes[str(name)].meta["val"].shape
                for d, size in enumerate(self.shapes[i]):
                    if isinstance(size, torch.SymInt) and isinstance(known := get_size_name(size), str):
                        self.example[known] = value.shape[d]
                        self.places.setdefault(known, []).append((i, d))

    def check(self, file: ExportedModel, module: Callable[..., Any], decided: Sequence[Condition] = ()) -> list[Condition]:
        """Return those of the `decided` conditions on which the file agrees with `module(args, kwargs)`.

        A condition that fails at tried sizes where the file is right is dropped. Raises NotFree if the file returns other
        values than the module, or fails where that does not, and no condition explains it.
        """
        self.file: Any = file
        self.module = module
        kept: list[Condition] = []
        left = [one for one in dict.fromkeys(decided) if one.names and one.names <= self.example.keys()]
        for steps in (STEPS, tuple(-step for step in STEPS), None):
            while sizes := self._accepted(steps, kept):
                verdicts = [(sizes, self._holds(sizes))]
                if verdicts[0][1] is None:
                    verdicts = [({name: size}, self._holds({name: size})) for name, size in sizes.items()]
                for tried, holds in verdicts:
                    broken = [one for one in left if not one.holds({**self.example, **tried})]
                    if holds is False and not broken:
                        raise self._not_free(tried)
                    kept += broken if holds is False else []
                    left = left if holds is None else [one for one in left if one not in broken]
                if all(holds is not False for _, holds in verdicts):
                    break
        for number, one in enumerate(left):
            sizes = self._breaking(one, kept) if number < MOST else {}
            if not sizes or not self._holds(sizes):
                kept.append(one)
        return kept

    def readable(self, conditions: Sequence[Condition], where: Mapping[int, str]) -> list[str]:
        """Return conditions in the names of the inputs, as torch.export writes them; `where` maps the number of a tensor to its
        name."""
        numbers = {i: n for n, i in enumerate(self.shapes)}
        sources = {}
        for name, ((i, d), *_) in self.places.items():
            head, dot, rest = where[numbers[i]].partition("[")
            sources[name] = f"L['{head}']{dot}{rest}.size()[{d}]"
        texts = (one.text for one in conditions if one.names and one.names <= sources.keys())
        return [re.sub(r"\bs\d+\b", lambda found: sources[found[0]], text) for text in dict.fromkeys(texts)]

    def _not_free(self, sizes: Sizes) -> NotFree:
        wrong = [name for name, size in sizes.items() if self._holds({name: size}) is False] or list(sizes)
        tried = ", ".join(f"{sizes[name]} instead of {self.example[name]}" for name in wrong)
        places = {place for name in wrong for place in self.places[name]}
        return NotFree(places, f"what was written differs from the module at other sizes ({tried})")

    def _accepted(self, steps: Sequence[int] | None, kept: Sequence[Condition]) -> Sizes:
        """Return for each dynamic size the first at these steps from the example's that the file accepts, or 1 without
        steps."""
        found: Sizes = {}
        for name, size in self.example.items():
            for new in [1] if steps is None else [size + step for step in steps]:
                if new != size and new > 0 and self._accepts({**found, name: new}, kept):
                    found[name] = new
                    break
        return found

    def _breaking(self, condition: Condition, kept: Sequence[Condition]) -> Sizes:
        """Return sizes that violate a condition, and that the file accepts; none if there are none near its numbers."""
        near = {number + step for number in condition.numbers for step in (-1, 0, 1)} | {1, 2, 3}
        for name in sorted(condition.names):
            for new in sorted(near | {self.example[name] + step for step in STEPS}):
                sizes = {name: new}
                if new > 0 and not condition.holds({**self.example, **sizes}) and self._accepts(sizes, kept):
                    return sizes
        return {}

    def _accepts(self, sizes: Sizes, kept: Sequence[Condition]) -> bool:
        every = {**self.example, **sizes}
        if not all(one.holds(every) for one in kept):
            return False
        if any(math.prod(self._shape(i, every)) > LARGEST for i in self.shapes):
            return False
        args, kwargs = self._inputs(sizes)
        try:
            self.file.check_call(args, kwargs)
        except FxplugError:
            return False
        return True

    def _holds(self, sizes: Sizes) -> bool | None:
        """Return whether file and module agree at these sizes; None if the module raises."""
        args, kwargs = self._inputs(sizes)
        try:
            wanted = self.module(args, kwargs)
        except Exception:  # the module's own
            return None
        try:
            found = self.file(*args, **kwargs)
        except FxplugError:
            return False
        return is_close(list_tensors(wanted), list_tensors(found), COMPILED)

    def _inputs(self, sizes: Sizes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the example's values at these sizes, repeated from the first if there are more."""
        made = list(self.flat)
        for i in self.shapes:
            for d, number in enumerate(self._shape(i, {**self.example, **sizes})):
                if number != made[i].shape[d]:
                    made[i] = made[i].index_select(d, torch.arange(number, device=made[i].device) % made[i].shape[d])
        args, kwargs = pytree.tree_unflatten(made, self.spec)
        return args, kwargs

    def _shape(self, i: int, sizes: Sizes) -> list[int]:
        return [size if isinstance(size, int) else compute_size(size, sizes) for size in self.shapes[i]]
