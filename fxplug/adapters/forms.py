"""In which shipped passes, and of which rank, the updates of adapter files have a place: layer by layer."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..blocks.low_rank import lokr_shapes
from ..core.errors import ArtifactError, SpecError
from ..core.spec.pass_file import load_pass
from ..core.spec.rules import Pass, Rule
from .contents import ModelLayer, layers_of
from .files import AdapterFile, Fit, fit
from .loading import tied
from .saved_heads import without_heads
from .updates import Entry

LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding")
PATTERN = frozenset("*?{}[]:@")  # of a path with one of these a pattern has to be made that means it alone


@dataclass(frozen=True)
class Form:
    """A shipped pass that holds an update of one layer: its name, its rank, and its further parameters."""

    name: str
    rank: int
    rest: tuple[tuple[str, Any], ...] = ()


def forms_of(entry: Entry, layer: ModelLayer | None, called: bool, slots: bool) -> list[Form] | str:
    """The passes that hold an update as it is, or why there are none; `called` says that its layer is.

    What is no low-rank product of a layer's weight is a change of the whole parameter, as the bias beside a LoRA is in slots.
    """
    if not called:
        return "is never called, because the module around it reads its weight directly, so no pass can change it"
    kind, *more = entry.kind.split("+")
    if entry.param != "weight" or layer is None or layer.kind not in LAYERS or any("dora" in one for one in more):
        return [Form("delta", 0, (("param", entry.param),))]
    if kind == "lora":
        of_all = layer.groups > 1 and len(entry.tensors["down"]) == entry.rank  # one product, of any rank, for all groups
        plain, bias = Form("lora_weight" if of_all else "lora", entry.rank), Form("delta", 0, (("param", "bias"),))
        if "bias" not in more:
            return [plain]
        return [plain, bias] if slots or of_all else [Form("lora", entry.rank, (("bias", True),))]
    if kind in ("dora", "dora by input"):
        return [Form("dora", entry.rank, (("by", kind.rpartition(" ")[2] if " " in kind else "output"),))]
    if kind == "loha":
        return [Form("loha", entry.tensors["hada_w1_b"].shape[0], (("tucker", "hada_t1" in entry.tensors),))]
    if kind == "lokr":
        return [_lokr(entry, layer) or Form("delta", 0, (("param", "weight"),))]
    return [Form("delta", 0, (("param", entry.param),))]


def _lokr(entry: Entry, layer: ModelLayer) -> Form | None:
    """LoKr by the sizes of a file's first factor, and by which of both are decomposed; None where no block has such factors."""
    there = {name: tuple(t.shape) for name, t in entry.tensors.items()}
    first = there["lokr_w1"] if "lokr_w1" in there else (there["lokr_w1_a"][0], there["lokr_w1_b"][1])
    split, cores = ("lokr_w1_a" in there, "lokr_w2_a" in there), "lokr_t2" in there
    if lokr_shapes(layer.shape, entry.rank, cores=cores, first=first, split=split) != there:
        return None
    return Form("lokr", entry.rank, (("first", first), ("decompose", split), ("tucker", cores)))


@dataclass(frozen=True)
class FormPlan:
    """Which layers of a module get which forms for some adapters; `unheld` says by layer why it gets none.

    Those `apart` are tied to another layer that gets an update of its own, and need a rule of their own, for a block.
    """

    forms: Mapping[Form, Sequence[str]]
    fits: Sequence[Fit]
    unheld: Mapping[str, str]
    apart: Collection[str] = ()

    def as_pass(self, slots: int, name: str = "adapter", samples: str | None = None) -> Pass:
        """The pass with so many slots. Raises ArtifactError or SpecError where there is nothing to hold."""
        if not self.forms:
            for found in self.fits:
                found.check()
            raise SpecError("these files have nothing that a pass with slots can take")
        rules: list[Rule] = []
        groups = [(form, [path for path in paths if path not in self.apart]) for form, paths in self.forms.items()]
        groups += [(form, [path]) for form, paths in self.forms.items() for path in paths if path in self.apart]
        for form, paths in groups:
            if not paths:
                continue
            at = [f"re:{_escaped(path)}" if PATTERN & {*path} else path for path in paths]
            rest: Any = {key: list(value) if isinstance(value, tuple) else value for key, value in form.rest}
            if form.rank:
                rest["rank"] = form.rank
            made = load_pass(form.name, at=at, slots=slots, **rest)
            rules += made.rules
        about = f"Slots for the adapters of {', '.join(Path(found.file.source).name for found in self.fits)}."
        return Pass(name, rules, about, slots=slots, samples=samples, expect=">=1")  # what is left has no update in the files


def _escaped(path: str) -> str:
    return "".join(f"\\{c}" if not (c.isalnum() or c == "_") else c for c in path)


def parameters_of(module: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a module's parameters by name, without those that passes put in."""
    added = {entry["name"] for entry in getattr(module, "meta", {}).get("passes", [])}
    return {name: tuple(p.shape) for name, p in module.named_parameters() if name.partition(".")[0] not in added}


def plan_for(
    files: Iterable[tuple[AdapterFile, Mapping[str, Any]]],
    module: Any,
    called: Container[str] | None = None,
    slots: bool = True,
) -> FormPlan:
    """Where the adapters of some files go in a module, and as what; beside each file its `part`, `partial` and `guess`.

    `called` are the layers that are called, rather than read by another; None is all. `slots` says that the passes will have
    some.

    Raises ArtifactError for layers that are not here and for updates that no pass with slots holds, but with `partial`.
    """
    layers = layers_of(module)
    named = parameters_of(module)
    weights = {name.removesuffix(".weight"): shape for name, shape in named.items() if name.endswith(".weight")}
    weights |= {path: layer.shape for path, layer in layers.items()}
    others = {name: shape for name, shape in named.items() if not name.endswith(".weight")}
    ranks: dict[tuple[str, str, tuple[tuple[str, Any], ...]], int] = {}
    fits: list[Fit] = []
    unheld: dict[str, str] = {}
    same = tied(module)
    apart: set[str] = set()
    for whole, ways in files:
        file, _ = without_heads(whole, module)
        found = fit(file, weights, ways.get("part"), None, bool(ways.get("guess")), others, set(named))
        if not ways.get("partial"):
            found.check()
        fits.append(found)
        for key, entry in found.placed.items():
            path = key if entry.param == "weight" else key.removesuffix(entry.param).removesuffix(".")
            made = forms_of(entry, layers.get(path), called is None or path in called, slots)
            if slots and entry.kind == "lora+bias" and f"{path}.bias" not in named:
                made = "has a bias beside its LoRA and the layer has none, which slots do not support; use lora without slots"
            if isinstance(made, str):
                unheld[key] = made
                if not ways.get("partial"):
                    raise ArtifactError(f"{file.source}: '{key}' {made} (partial leaves it out)")
                continue
            others_of = [name for name in same.get(path, ()) if entry.param == "weight"]
            for form in made:
                for one in (path, *(others_of if entry.method == "tokens" else ())):
                    ranks[form.name, one, form.rest] = max(form.rank, ranks.get((form.name, one, form.rest), 0))
            if entry.method != "tokens" and any(name in found.placed and name not in apart for name in others_of):
                apart.add(path)
    forms: dict[Form, list[str]] = {}
    for (name, path, rest), rank in ranks.items():
        forms.setdefault(Form(name, rank, rest), []).append(path)
    return FormPlan(dict(sorted(forms.items(), key=lambda item: (item[0].name, -item[0].rank))), fits, unheld, apart)
