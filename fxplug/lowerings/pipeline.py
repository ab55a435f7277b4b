"""The lowerings together: what makes a rewritten module faster and leaves its results as they were."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import torch

from ..core.errors import MatchError, SpecError, did_you_mean, quote
from ..core.extensions import DERIVATION
from ..core.ir.traced_module import TracedModule
from ..core.locks import with_read_lock
from .hoist.groups import read_groups
from .hoist.hoisted import HoistedModule
from .linear import forms, fused
from .lowering import LoweredForm, undo_lowering
from .merging import fold, live
from .regions import nested

MERGES = ("fold", "live", "auto")


@overload
def lower(
    gm: TracedModule,
    *,
    merge: str | bool | None = None,
    fuse: str | bool | None = "auto",
    hoist: Literal[False] | None = False,
    outline: str | bool | Sequence[str] | None = None,
) -> TracedModule:
    """Lower without hoisting."""


@overload
def lower(
    gm: TracedModule,
    *,
    merge: str | bool | None = None,
    fuse: str | bool | None = "auto",
    hoist: Literal[True] | Mapping[str, Sequence[str]],
    outline: str | bool | Sequence[str] | None = None,
) -> HoistedModule:
    """Lower and hoist."""


@with_read_lock
def lower(
    gm: TracedModule,
    *,
    merge: str | bool | None = None,
    fuse: str | bool | None = "auto",
    hoist: bool | Mapping[str, Sequence[str]] | None = False,
    outline: str | bool | Sequence[str] | None = None,
) -> TracedModule | HoistedModule:
    """Make a faster form of a rewritten module: merged, fused, hoisted, outlined, in this order; `gm` stays as it is.

    The result shares parameters, and the state of slots, with `gm`, but for what is merged. `meta["forms"]` says which form
    each layer has, `meta["source"]` is what save keeps: `gm`, or what was folded.

    Args:
        gm: The rewritten module.
        merge: None leaves the adapters beside their layers; "fold" or True folds them into copies of the weights for good, as
            `fold.merge`; "live" folds what is in the slots and again whenever that changes, as `live.merge_live`. "auto" is the
            stated default of a module that is served: passes with slots are merged live, unless samples have entries of their
            own now, and the others are folded as far as they are functions of weights.
        fuse: The form in which layers and their updates are joined: the one of a rule for its sizes ("auto"), one for all, or
            none (None, False); see `fused.fuse`.
        hoist: Which inputs stay while an image is drawn, and which say the time, by their names in `forward`:
            `{"conditions": ["encoder_hidden_states"], "time": ["timestep"]}`. What needs no other input is computed once, and
            kept as long as all that it was computed from is the same. True takes what the run of `rewrite_pipeline` has noted,
            or what the module was hoisted with when it was saved. See `hoist.hoisted.HoistedModule`.
        outline: The repeated regions that are compiled once: "auto" where there are some, True finds them too and raises where
            there are none, a list names them; see `nested.nest`. Of a hoisted module those of its step.

    Returns:
        The lowered module; `gm` itself where nothing was done. With `hoist` a `HoistedModule`, which stands for it.

    Raises:
        SpecError: A value is none of these, or the module is lowered already; nothing can be hoisted, with the node that is in
            the way; and as the lowerings do.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # what is made here is written later
            return lower(gm, merge=merge, fuse=fuse, hoist=hoist, outline=outline)  # type: ignore[arg-type]
    if hoist is not None and hoist is not False:
        _checked(gm, merge, fuse, outline)
        groups = read_groups(gm, hoist)
        return _outlined(HoistedModule(lower(gm, merge=merge, fuse=fuse), groups), outline)
    again = partial(lower, merge=merge, fuse=fuse, outline=outline)
    merge, fuse, regions = _checked(gm, merge, fuse, outline)
    source = made = gm
    if merge == "auto":
        source = made = _folded(gm, fold.find_foldable(gm, [n for n in _names(gm) if n not in fold.find_slotted(gm)]))
        slotted = fold.find_slotted(made)
        if slotted and not _mixed(made) and len(fold.find_foldable(made, slotted)) == len(slotted):
            merge = "live"
    if merge == "fold":
        source = made = _folded(gm, None)
    elif merge == "live":
        made = live.merge_live(made)
    if fuse:
        made = _with_form_notes(made, fused.fuse(made, str(fuse)))
    if regions is not False:
        try:
            made = _with_form_notes(made, nested.nest(made, regions))
        except MatchError:
            if outline != "auto":
                raise
    if made is not source:
        made.meta["source"] = source
        alike = "auto" if outline is True else outline  # a pass may leave no regions that are alike
        made.meta[DERIVATION] = RepeatableLowering(None if merge == "fold" else merge, fuse, alike)
    return made if made is gm else made.made_by(again, gm)


def _outlined(hoisted: HoistedModule, outline: Any) -> HoistedModule:
    """Return a hoisted module with the repeated regions of its step outlined."""
    if outline not in (None, False):
        regions = None if outline in (True, "auto") else list(outline)
        try:
            hoisted.map_step(lambda step: nested.nest(step, regions))
        except MatchError:
            if outline != "auto":
                raise
    return hoisted


@dataclass(frozen=True)
class RepeatableLowering(LoweredForm):
    """That of what `lower` made with these arguments."""

    merge: str | None
    fuse: str | None
    outline: str | bool | Sequence[str] | None

    def rebuild(self, module: TracedModule, change: Callable[[TracedModule], TracedModule]) -> TracedModule:
        return lower(change(undo_lowering(module)), merge=self.merge, fuse=self.fuse, outline=self.outline)


def _checked(gm: Any, merge: Any, fuse: Any, outline: Any) -> tuple[str | None, str | None, Any]:
    """Return the arguments in canonical form. Raises SpecError."""
    fold.check_unlowered(gm, "lower")
    merge = "fold" if merge is True else None if merge is False else merge
    if merge is not None and merge not in MERGES:
        finding = f"merge={quote(merge)} is not known{did_you_mean(merge, MERGES)}"
        raise SpecError(f"{finding}; it must be None or one of {', '.join(MERGES)}")
    fuse = "auto" if fuse is True else fuse or None
    if fuse is not None:
        fuse = forms.find_form(fuse)
    if outline in (None, False):
        return merge, fuse, False
    if outline in (True, "auto"):
        return merge, fuse, None
    if isinstance(outline, str) or not isinstance(outline, Sequence) or not all(isinstance(p, str) for p in outline):
        raise SpecError(f"outline must be None, 'auto' or a list of path patterns, not {quote(outline)}")
    return merge, fuse, list(outline)


def _names(gm: TracedModule) -> list[str]:
    return [entry["name"] for entry in gm.meta.get("passes", [])]


def _folded(gm: TracedModule, passes: list[str] | None) -> TracedModule:
    """Return the module with these passes folded, None for all, and a note of the layers."""
    if passes == []:
        return gm
    taken = [entry for entry in gm.meta.get("passes", []) if passes is None or entry["name"] in passes]
    made = fold.merge(gm, passes)
    layers = {site["path"].partition("@")[0]: "merged" for entry in taken for site in entry["sites"]}
    made.meta["forms"] = {**gm.meta.get("forms", {}), **layers}
    return made


def _with_form_notes(before: TracedModule, made: TracedModule) -> TracedModule:
    """Return the module with the forms of earlier lowerings added to those of its layers."""
    old, new = before.meta.get("forms", {}), made.meta.get("forms", {})
    joined = {path: f"{old[path]}, {form}" if old.get(path, form) != form else form for path, form in new.items()}
    if joined:
        made.meta["forms"] = {**old, **joined}
    return made


def _mixed(gm: TracedModule) -> bool:
    """Return whether samples of a batch use different adapters."""
    try:
        for name in fold.find_slotted(gm):
            fold.get_uniform_gates(gm, name)
    except SpecError:
        return True
    return False


# --- what it came to


def list_layer_forms(module: TracedModule) -> dict[str, str]:
    """Return the current form of each layer with a block of a pass, by its path."""
    found = {}
    for entry in module.meta.get("passes", []):
        for site in entry["sites"]:
            if site["block"]:
                form = "mapped at each call" if site["place"] == "param" else "as its pass put it"
                found[site["path"].partition("@")[0]] = form
    return {**found, **module.meta.get("forms", {})}


def form_table(module: TracedModule) -> str:
    """Format the forms of a module's layers: how many have each, then layer by layer."""
    rows = list_layer_forms(module)
    if not rows:
        return "no layer has a block of a pass\n"
    kinds = Counter(re.sub(r" \([^()]*\)", "", form) for form in rows.values())  # without the names of single products
    counts = "; ".join(f"{count} {form}" for form, count in kinds.most_common())
    width = max(map(len, rows))
    return "\n".join([counts, *(f"  {path:{width}}  {form}" for path, form in rows.items())]) + "\n"


def table_of_forms(module: TracedModule, merge: str | None = None) -> str:
    """Return the table of the forms that a module's layers would take."""
    return form_table(lower(module, merge=merge))
