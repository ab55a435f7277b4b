"""Which inputs of a denoiser stay while a pipeline draws, which say the time, and in which forms it is called: two steps of a
run tell."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.ir.containers import list_leaves, map_leaves
from ..core.ir.traced_module import TracedModule
from ..core.torch_internals import trees as pytree

META = "input_groups"  # the key in a traced module's meta that `lower(hoist=True)` reads
DENOISERS = ("unet", "transformer")  # as names of denoisers begin
MOST_STEPS = 3


@dataclass
class StepInputs:
    """The first call of each denoiser in each of the first steps of a run: `calls` has the step and the inputs by name.

    `forms` has the arguments of one call of each form: a step may have several, with further settings or other numbers of
    samples, as for guidance of several kinds. A step ends where the scheduler's `step` is called. Once all first calls are
    known, a denoiser runs once in each form, and its further calls get copies of that result: what it computes does not matter.
    """

    step: int = 0
    known: bool = False  # whether the pipeline's scheduler says where a step ends
    calls: dict[str, list[tuple[int, dict[str, Any]]]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    forms: dict[str, dict[str, tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)

    @contextmanager
    def watch(self, pipe: Any) -> Iterator[None]:
        """Count the steps of a pipeline's scheduler meanwhile."""
        scheduler: Any = getattr(pipe, "scheduler", None)
        step = getattr(scheduler, "step", None)
        own = vars(scheduler).get("step") if hasattr(scheduler, "__dict__") else None
        if step is None:
            yield
            return

        @functools.wraps(step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.step += 1
            return step(*args, **kwargs)

        self.known = True
        scheduler.step = counted
        try:
            yield
        finally:
            del scheduler.step
            if own is not None:
                scheduler.step = own

    def note(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note the form of a denoiser's call, and its inputs, if it is the first one in a step."""
        forms = self.forms.setdefault(name, {})
        if name.startswith(DENOISERS) and (form := describe_form((args, kwargs))) not in forms:
            forms[form] = map_leaves((args, kwargs), lambda tensor, _: tensor.detach().clone())
        seen = self.calls.setdefault(name, [])
        if not name.startswith(DENOISERS) or (seen and seen[-1][0] == self.step) or len(seen) >= MOST_STEPS:
            return
        try:
            inputs = inspect.signature(forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            return
        seen.append((self.step, map_leaves(dict(inputs), lambda tensor, _: tensor.detach().clone())))

    def is_complete(self, names: Iterable[str]) -> bool:
        """Return whether all these denoisers were seen in two steps, or will not be."""
        wanted = [name for name in names if name.startswith(DENOISERS)]
        return not self.known or self.step > MOST_STEPS or all(len(self.calls.get(name, ())) > 1 for name in wanted)

    def answer(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of a denoiser, by the result of its first one in that form."""
        if not name.startswith(DENOISERS):
            return forward(*args, **kwargs)
        key = f"{name} {describe_form((args, kwargs))}"
        if key not in self.results:
            self.results[key] = forward(*args, **kwargs)
        return map_leaves(self.results[key], lambda tensor, _: tensor.clone())

    def find_groups(self, name: str) -> dict[str, list[str]] | None:
        """Find which inputs of a denoiser were equal in two steps, and which other ones, single numbers, say the time."""
        if len(self.calls.get(name, ())) < 2:
            return None
        (_, first), (_, second) = self.calls[name][:2]
        found: dict[str, list[str]] = {"conditions": [], "time": []}
        for key, value in first.items():
            other = second.get(key)
            if is_equal(value, other):
                found["conditions"] += [key] if has_numbers(value) else []
            elif is_time(value) and is_time(other):
                found["time"].append(key)
        return found if any(found.values()) else None


def describe_form(call: Any) -> str:
    """Describe the form of a call: shapes and dtypes of its tensors, and its settings; numbers, which may say the time, by
    their kind."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype
        return leaf if isinstance(leaf, bool) else type(leaf)

    return repr(pytree.tree_map_only((Tensor, int, float), describe, call))


def note_groups(module: TracedModule, groups: Mapping[str, list[str]] | None) -> None:
    """Note in a module's meta which of its inputs stay and which say the time, where anything does."""
    inputs = [str(node.target).lstrip("*") for node in module.graph.nodes if node.op == "placeholder"]
    found = {group: [name for name in names if name in inputs] for group, names in (groups or {}).items()}
    if any(found.values()):
        module.meta[META] = found


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two inputs are the same, tensors by their values."""
    a, b = list_leaves(one), list_leaves(other)
    if len(a) != len(b) or any(type(x) is not type(y) for x, y in zip(a, b, strict=True)):
        return False
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


def has_values(value: Any) -> bool:
    """Return whether an argument is more than a setting: a tensor, or numbers in a structure."""
    return any(isinstance(leaf, Tensor) for leaf in list_leaves(value)) or isinstance(value, (list, tuple))


def has_numbers(value: Any) -> bool:
    """Return whether an input has a tensor or a number in it."""
    leaves = list_leaves(value)
    return any(isinstance(leaf, (Tensor, int, float)) and not isinstance(leaf, bool) for leaf in leaves)


def is_time(value: Any) -> bool:
    """Return whether an input is one number, or the same for each sample."""
    leaves = list_leaves(value)
    if len(leaves) != 1 or isinstance(leaves[0], bool):
        return False
    number = leaves[0]
    if not isinstance(number, Tensor):
        return isinstance(number, (int, float))
    return number.dim() < 2 and number.numel() > 0 and bool((number == number.flatten()[0]).all())
