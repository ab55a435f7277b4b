"""A call read before it runs: what stands for the values of each stage, and why nothing is kept of it, if so."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...blocks.base import Table
from ...core.extensions import DistributedPart
from ...core.ir.calls import has_hooks
from ...core.ir.containers import find_tensor, list_leaves
from ...core.ir.entry_checks import find_refusal, get_signature
from ...core.ir.functions import is_random_layer
from ...core.ir.traced_module import TracedModule
from ...core.torch_internals.tensors import memory_id, version
from .cut import StageCut
from .groups import InputGroups
from .kept import KeepLimits, KeptValues, Key
from .plans import CallBinder, CallForm, CallPlan, fill_times, find_sizes
from .sameness import CONDITIONS, NUMBERS, TIME, Call, KnownConditions, is_observed, read_bytes, read_call
from .schedules import Times
from .stamps import WeightWatch
from .weights import list_homes, list_layers, list_places

FORMS = 64  # of calls (shapes, plain values, modes) that are known at once
IN_TURN = 8  # so many calls in turn with new conditions are said once


class CallPlanner:
    """Reader of the calls of a hoisted module: what is known of those before, and what is kept of them.

    `kept` has the values of stages, `known` the sets of conditions, `watch` looks at weights. Who changes any of these has the
    `guard`. `bring` moves weights that are away to where the model computes.
    """

    def __init__(self, module: TracedModule, groups: InputGroups, cut: StageCut, bring: Callable[[], None]) -> None:
        self.module, self.groups, self.cut, self._bring = module, groups, cut, bring
        self._by_input = groups.by_input
        self._stages = {stage.name: stage for stage in cut.stages}
        self._early = [(s.name, CONDITIONS in s.needs, TIME in s.needs, s.slotted) for s in cut.stages[:-1]]
        self._list_layers()
        self._slotted = any(stage.slotted for stage in cut.stages)
        self._tables = [part for part in module.modules() if isinstance(part, Table)]
        self._split = next((part for part in module.modules() if isinstance(part, DistributedPart)), None)
        written = [home for home in cut.flow.writers if isinstance(home, str) or home.op == "placeholder"]
        self._written = [home for home in written if isinstance(home, str)]  # tensors of the module that the step writes
        self._writes_inputs = len(written) > len(self._written)
        self._binder = CallBinder(get_signature(module))
        self.names = {node.name: str(node.target).lstrip("*") for node in cut.inputs}
        self.guard = threading.RLock()
        self._warned = False
        self.limits = KeepLimits()
        self.reset()

    def _list_layers(self) -> None:
        """List the layers and weights that stages read, and forget all that is kept."""
        self.places = {stage.name: list_places(self.cut, stage) for stage in self.cut.stages}
        self._layers = {stage.name: list_layers(self.cut, stage) for stage in self.cut.stages[:-1]}
        early = [layer for layers in self._layers.values() for layer in layers]
        self._drawing = list(dict.fromkeys(layer for layer in early if is_random_layer(layer, True)))
        self._homes = list_homes(self.cut)
        self._modules = [table.get(key) for table, key in self._homes]
        self.kept = KeptValues()
        self.watch = WeightWatch({name: self.places[name] for name in self._layers}, self._layers)

    def reset(self) -> None:
        """Forget all that is known of calls, and all that is kept."""
        self._list_layers()
        self.known = KnownConditions(self.limits.conditions)
        self._forms: OrderedDict[Any, CallForm] = OrderedDict()
        self._slots: tuple[Any, bytes, list[Tensor]] = (None, b"", [])

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan | str:
        """Return what a call takes; why nothing is kept for it otherwise."""
        module = self.module
        if module.training or self._drawing and any(layer.training for layer in self._drawing):
            return "it is in training: call eval()"
        if torch.is_grad_enabled():
            return "gradients are enabled: call it within torch.no_grad()"
        if is_observed():
            return "a mode of torch or a hook for all modules watches what is computed"
        if has_hooks(module) or module.has_mixed_modes:
            return "a part of it has a hook, or is in another mode"
        try:
            values = self._binder.bind(args, kwargs)
        except TypeError as error:
            return str(error)
        call = read_call(values, self._by_input)
        if call is None:
            return "an input is not a plain tensor, number or text, so that it cannot be compared between calls"
        if (self._writes_inputs or self._written) and self._has_shared_memory(values):
            return "inputs share memory, and the model writes an input or a buffer of its own"
        with self.guard:
            form = self._find_form(call, args, kwargs)
            if form.refused:
                return form.refused
            if not self.check_weights():
                return "a layer has a hook, or weights that were made in inference mode, whose writes torch does not count"
            plan = self._place(call, form)
            plan.find_values(self.kept)
            return plan

    def list_plans(self, plan: CallPlan, times: Times) -> list[CallPlan]:
        """Return the plans of calls that differ in their time alone."""
        found = []
        for time in times:
            call = read_call({**plan.call.values, **fill_times(plan.call.values, time)}, self._by_input)
            if call is not None and call.form == plan.call.form:
                found.append(self._place(call, plan.form, plan))
        return found

    def check_weights(self) -> bool:
        """Drop what was computed from other weights or layers. Returns whether a change of these could be seen."""
        if not all(map(is_, [table.get(key) for table, key in self._homes], self._modules)):
            self._list_layers()
        changed = self.watch.find_changes()
        for name in changed or ():
            above = {other.name for other in self.cut.stages if self._stages[name].needs <= other.needs}
            self.kept.drop(lambda key, above=above: key.stage in above)  # type: ignore[misc]
        return changed is not None

    def _has_shared_memory(self, values: dict[str, Any]) -> bool:
        """Return whether what the model writes may be the memory of an input, or of another one: the order of reads counts."""
        written = [tensor for name in self._written if (tensor := find_tensor(self.module, name)) is not None]
        own = {memory_id(tensor.untyped_storage()) for tensor in written}
        leaves = [leaf for leaf in list_leaves([*values.values()]) if isinstance(leaf, Tensor)]
        found = [memory_id(leaf.untyped_storage()) for leaf in leaves]
        return not own.isdisjoint(found) or self._writes_inputs and len(set(found)) < len(found)

    def _find_form(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallForm:
        key = call.form if self._split is None else (call.form, *self._split.get_ranks().items())
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = CallForm(next(NUMBERS), find_refusal(self.module, args, kwargs) or "")
            if not form.refused and self.cut.late:
                self._bring()
                with self._split.without_exchange() if self._split else nullcontext():  # nobody waits for the others here
                    find_sizes(self.cut, form, [call.values[name] for name in self.names.values()])
            if len(self._forms) > FORMS:
                _, gone = self._forms.popitem(last=False)
                self.kept.drop(lambda key: key.form == gone.number)
        self._forms.move_to_end(key)
        return form

    def _place(self, call: Call, form: CallForm, like: CallPlan | None = None) -> CallPlan:
        """Find what stands for the values of a call; `like` is one with the same conditions."""
        conditions = like.conditions if like else 0
        if like is None and self.groups.conditions:
            conditions, gone = self.known.find(call, form.number)
            if gone:
                self.kept.drop(lambda key: key.conditions in gone)
            self._warn_of_changes()
        time: Any = (call.numbers[TIME], read_bytes(t for _, t in call.tensors[TIME])) if self.groups.time else 0
        slots = like.slots if like else self._read_slots()
        keys = {
            name: Key(name, form.number, conditions if of_conditions else 0, time if of_time else 0, slots if slotted else 0)
            for name, of_conditions, of_time, slotted in self._early
        }
        return CallPlan(call, form, conditions, slots, keys)

    def _read_slots(self) -> bytes:
        """Read which adapters are in use, and how much of each: all numbers of the tables, but names."""
        if not self._slotted:
            return b""
        numbers = [[tensor for name, tensor in t._buffers.items() if name != "names"] for t in self._tables]
        tensors = [tensor for row in numbers for tensor in row if tensor is not None]
        if any(tensor.is_inference() for tensor in tensors):
            return read_bytes(tensors)
        state = [(id(tensor), tensor.data_ptr(), version(tensor)) for tensor in tensors]
        if state != self._slots[0]:
            self._slots = state, read_bytes(tensors), tensors  # held, so that no other gets the identity of one that is gone
        return self._slots[1]

    def _warn_of_changes(self) -> None:
        names = [] if self._warned else self.known.list_changing(IN_TURN)
        if names:
            self._warned = True
            warnings.warn(
                f"hoist: the condition {', '.join(map(repr, names))} changed in each of the last {IN_TURN} calls, so nothing "
                "that depends on it could be reused: leave it out of the conditions if it changes at every step",
                stacklevel=2,
            )
