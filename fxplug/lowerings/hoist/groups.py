"""Which inputs of a model are its conditions and its time: named, or noted by the run of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import SpecError, did_you_mean, format_fields, quote
from ...core.ir.traced_module import TracedModule
from .sameness import CONDITIONS, TIME

META = "input_groups"  # the key in a module's meta where a run, or a hoisted module that was saved, notes the groups
WAY = 'name them, hoist={"conditions": ["encoder_hidden_states", ...], "time": ["timestep"]}'


@dataclass(frozen=True)
class InputGroups:
    """The inputs of a model that stay while an image is drawn, and those that say the time; all others change at every call."""

    conditions: tuple[str, ...]
    time: tuple[str, ...]

    __repr__ = format_fields

    @property
    def by_input(self) -> dict[str, str]:
        """The group of each input that has one."""
        return {**dict.fromkeys(self.conditions, CONDITIONS), **dict.fromkeys(self.time, TIME)}

    def as_data(self) -> dict[str, list[str]]:
        """Return the groups as plain values, as `hoist=` takes them and files keep them."""
        return {CONDITIONS: list(self.conditions), TIME: list(self.time)}


def list_inputs(gm: TracedModule) -> list[str]:
    """Return the names of the inputs of a traced module."""
    return [str(node.target).lstrip("*") for node in gm.graph.nodes if node.op == "placeholder"]


def read_groups(gm: TracedModule, hoist: Any) -> InputGroups:
    """Read the groups that `hoist` names, or with True those in the meta of a module. Raises SpecError."""
    if hoist is True:
        noted = gm.meta.get(META)
        if not noted:
            raise SpecError(
                f"hoist=True reads what the run of a pipeline has noted of its inputs, and there is nothing here: {WAY}, or "
                "rewrite the pipeline with fxplug.rewrite_pipeline, which notes it"
            )
        hoist = noted
    if not isinstance(hoist, Mapping):
        raise SpecError(f"hoist must be False, True, or a mapping of groups to inputs, not {quote(hoist)}: {WAY}")
    found: dict[str, tuple[str, ...]] = {CONDITIONS: (), TIME: ()}
    for group, names in hoist.items():
        if group not in found:
            raise SpecError(f"hoist: no group {quote(group)}{did_you_mean(group, found)}; there are {', '.join(found)}")
        found[group] = _read_names(gm, group, names)
    twice = set(found[CONDITIONS]) & set(found[TIME])
    if twice:
        raise SpecError(f"hoist: '{min(twice)}' is in both groups: an input is a condition or says the time")
    if not any(found.values()):
        raise SpecError(f"hoist: the groups name no input, so that nothing stays the same: {WAY}")
    return InputGroups(found[CONDITIONS], found[TIME])


def _read_names(gm: TracedModule, group: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise SpecError(f"hoist: '{group}' must be a list of inputs, not {quote(names)}")
    known = list_inputs(gm)
    for name in names:
        if name not in known:
            finding = f"hoist: the model has no input {quote(name)}{did_you_mean(name, known)}"
            raise SpecError(f"{finding}; it has {', '.join(known)}", path=("hoist", group))
    if not names:
        return ()
    return tuple(dict.fromkeys(names))
