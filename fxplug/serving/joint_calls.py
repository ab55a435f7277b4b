"""Models called for several requests at once, each sample with the adapters of its request."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..adapters.rows import Rows, check_name_known
from ..adapters.slots import Adapters
from ..adapters.strengths import Strength
from ..blocks.base import ROWS
from ..core.errors import SpecError, prefix_path
from ..core.ir.traced_module import TracedModule
from ..core.torch_internals.tensors import without_duck_sizes
from .forms import CallForms, FormState, ModelCall, join, split, use_modes
from .offloading import load_for_call
from .requests import list_strengths

LOG = logging.getLogger("fxplug.serving")
KEPT = 256  # rows that are made once, of groups of requests that come again and again
Mixture = Mapping[str, Any]  # the strength of each adapter
Asked = tuple[ModelCall, Mixture]


class ModelCaller:
    """Calls models: those that several requests wait for once, and the others as they came.

    With `buckets` all calls of forms that may be joined are padded to one of them, those of one request, too. `made` counts
    the calls of each model, by its `id`, and `rows` the rows that they were asked for.
    """

    def __init__(self, forms: CallForms, models: Sequence[nn.Module], buckets: Sequence[int] | None, compiled: bool) -> None:
        self.forms, self.buckets = forms, buckets
        self.slots = {id(model): get_slots(model) for model in models if _has_slots(model)}
        whole = [model for model in models if not hasattr(model, "decode")]
        self.compiled = {id(model): torch.compile(model, dynamic=True) for model in whole} if compiled else {}
        self.made = dict.fromkeys(map(id, models), 0)
        self.rows = dict.fromkeys(map(id, models), 0)
        self._made_rows: dict[Any, Rows] = {}

    @contextmanager
    def pin(self, adapters: Mapping[str, Any]) -> Iterator[dict[int, frozenset[str]]]:
        """Keep adapters in the slots of all models within a block.

        Args:
            adapters: The adapters of a request, with their strengths.

        Yields:
            The names of those that a model has, by its `id`.

        Raises:
            SpecError: For a name that no model has, and more adapters than a sample may have in one of them.
        """
        with ExitStack() as stack:
            found: dict[int, frozenset[str]] = {}
            for key, slots in self.slots.items() if adapters else ():
                found[key] = frozenset(adapters).intersection(slots.names)
                stack.enter_context(slots.pin(*found[key]))
            self.check_adapters(adapters)
            yield found

    def check_adapters(self, adapters: Mapping[str, Any]) -> None:
        """Check that the models have these adapters, and room for them in a sample.

        Args:
            adapters: The adapters of a request, with their strengths.

        Raises:
            SpecError: For a name that no model has, with the nearest one, and more adapters than the slots' `per_sample`.
        """
        if adapters and not self.slots:
            raise SpecError("none of the models has slots for adapters", path=("adapters",))
        known = {name: None for slots in self.slots.values() for name in slots.names}
        with prefix_path("adapters"):
            for name in adapters:
                check_name_known(name, known)
            for slots in self.slots.values() if adapters else ():
                here = slots.names
                for strengths in list_strengths(adapters):
                    slots.rows([{name: value for name, value in strengths.items() if name in here}])

    def limit(self, rows: int, call: ModelCall, form: FormState) -> int:
        """Return the most rows of a joint call of a form.

        Args:
            rows: The most of any.
            call: One of its calls.
            form: What is known of the form.

        Returns:
            The number.
        """
        found = [rows, *([form.limit] if form.limit else []), *([self.buckets[-1]] if self.buckets else [])]
        if id(call.model) in self.slots:
            found.append(ROWS)
        return min(found)

    def make(self, asked: Sequence[Asked]) -> None:
        """Make calls of one form, jointly where that is right, and set their results: values, or the errors of those that fail.

        Args:
            asked: The calls, each with the adapters of its request.
        """
        call, form = asked[0][0], self.forms.form_of(asked[0][0])
        if len(asked) == 1 or form.refused:
            for one in asked:
                self._make_alone(one, form)
            return
        apart: list[Any] = []
        if not form.proven:
            for one in asked:
                self._make_alone(one, form)
            asked = [one for one in asked if not isinstance(one[0].result, Exception)]
            apart = [one.result for one, _ in asked]
            if len(asked) < 2:
                return
        calls = [one for one, _ in asked]
        rows = [one.rows for one in calls]
        size = self._pad(sum(rows))
        try:
            joint = self._call_jointly(asked, size)
        except Exception as error:  # of the model
            self._make_after_error(asked, form, error, sum(rows))
            return
        if apart and not self.forms.prove(calls, apart, joint, size):
            if form.refused:
                LOG.warning("calls of %s are not made jointly: %s", type(call.model).__name__, form.refused)
            return
        for made, result in zip(calls, split(joint, rows, size, form.splits), strict=True):
            made.result = result

    def _make_after_error(self, asked: Sequence[Asked], form: FormState, error: Exception, rows: int) -> None:
        """Find out who fails alone. Where nobody does, the joint call was too large, or this form has none."""
        name = type(asked[0][0].model).__name__
        lacked = isinstance(error, torch.OutOfMemoryError)
        if lacked:
            form.limit = max(1, rows // 2)
            LOG.warning("out of memory for %d rows of %s: from now on at most %d are called at once", rows, name, form.limit)
        if not form.proven:  # each was made alone
            if not lacked:
                form.refused = f"the first one failed: {type(error).__name__}: {error}"
                LOG.warning("calls of %s are not made jointly: %s", name, form.refused)
            return
        if lacked:
            middle = (len(asked) + 1) // 2
            for half in (asked[:middle], asked[middle:]):
                self.make(half)
            return
        for one in asked:
            self._make_alone(one, form)
        failed = sum(isinstance(one.result, Exception) for one, _ in asked)
        if not failed:
            form.limit = max(1, rows // 2)
        LOG.warning(
            "a joint call of %s with %d rows failed, and %d of its %d requests fail alone too: %s: %s",
            name, rows, failed, len(asked), type(error).__name__, error,
        )  # fmt: skip

    def _make_alone(self, one: Asked, form: FormState) -> None:
        call, _ = one
        try:
            size = self._pad(call.rows)
            pads = self.buckets is not None and not form.refused and size <= self.buckets[-1]
            if pads and not form.padded:
                pads = self._prove_padding(one)
            if pads:
                (call.result,) = split(self._call_jointly([one], size), [call.rows], size, form.splits)
            else:
                call.result = self._call(one[0], call.args, call.kwargs, [one[1]] * call.rows)
        except Exception as error:  # of the model: its request gets it
            call.result = error

    def _prove_padding(self, one: Asked) -> bool:
        call, _ = one
        size = self._pad(call.rows + 1)
        alone = self._call(call, call.args, call.kwargs, [one[1]] * call.rows)
        try:
            more = self._call_jointly([one], size, different=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the model
            self.forms.form_of(call).refused = f"the first one failed: {type(error).__name__}: {error}"
            return False
        return self.forms.prove_padding(call, alone, more, size)

    def _pad(self, rows: int) -> int:
        return next((size for size in self.buckets or () if size >= rows), max(rows, 2))

    def _call_jointly(self, asked: Sequence[Asked], size: int, different: bool = False) -> Any:
        calls = [call for call, _ in asked]
        mixtures = [mixture for call, mixture in asked for _ in range(call.rows)]
        args, kwargs = join(calls, size, different)
        return self._call(calls[0], args, kwargs, mixtures + [{}] * (size - len(mixtures)))

    def _call(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], mixtures: list[Mixture]) -> Any:
        model = call.model
        self.made[id(model)] += 1
        self.rows[id(model)] += len(mixtures)
        load_for_call(model)
        function = self.compiled.get(id(model), model) if call.method == "__call__" else getattr(model, call.method)
        with torch.no_grad(), use_modes(call.modes), self._choose(model, mixtures), without_duck_sizes(bool(self.compiled)):
            return function(*args, **kwargs)

    @contextmanager
    def _choose(self, model: nn.Module, mixtures: list[Mixture]) -> Iterator[None]:
        """Use the adapters of each row within a block; in a model without slots nothing is chosen."""
        slots = self.slots.get(id(model))
        if slots is None:
            yield
        else:
            with slots.using(self._make_rows(slots, mixtures)):
                yield

    def _make_rows(self, slots: Adapters, mixtures: Sequence[Mixture]) -> Rows:
        """Make the rows of a group of requests, once for all calls that it makes together."""
        key = id(slots), tuple(frozenset((name, _freeze(value)) for name, value in mixture.items()) for mixture in mixtures)
        rows = self._made_rows.pop(key, None) or slots.rows(mixtures)
        while len(self._made_rows) >= KEPT:
            del self._made_rows[next(iter(self._made_rows))]
        self._made_rows[key] = rows  # the last
        return rows


def _freeze(value: Any) -> Any:
    """Return a value that is the same for equal strengths, and can be a key."""
    if not isinstance(value, Strength):
        return value
    return value.value, tuple((value.blocks or {}).items()), value.digest, value.rest


def _has_slots(model: nn.Module) -> bool:
    return isinstance(model, TracedModule) and any(entry.get("slots") for entry in model.meta.get("passes", []))


def get_slots(model: Any) -> Adapters:
    """Return the adapters of a model with slots."""
    found: Adapters = model.adapters
    return found
