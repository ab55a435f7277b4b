"""In which shipped passes, and of which rank, the updates of adapter files have a place: layer by layer."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArtifactError, SpecError
from ..low_rank import lokr_shapes
from ..spec.pass_file import load_pass
from ..spec.rules import Pass, Rule
from .files import AdapterFile, Fit, fit
from .held import Layer, layers_of
from .updates import Entry

LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding")
PATTERN = frozenset("*?{}[]:@")  # of a path with one of these a pattern has to be made that means it alone


@dataclass(frozen=True)
class Form:
    """A shipped pass that holds an update of one layer: its name, its rank, and its further parameters."""

    name: str
    rank: int
    rest: tuple[tuple[str, Any], ...] = ()


def form_of(entry: Entry, layer: Layer, called: bool) -> Form | str:
    """The pass with slots that holds an update as it is, or why there is none; `called` says that the layer is."""
    if not called:
        return "is never called, the module around it reads its weight: no slot can stand there"
    if layer.kind not in LAYERS:
        return f"is a {layer.kind or 'layer of its own class'}, and slots stand at {', '.join(LAYERS)}"
    if entry.kind == "lora":
        return Form("lora", entry.rank)
    if entry.kind == "loha":
        return Form("loha", entry.tensors["hada_w1_b"].shape[0], (("tucker", "hada_t1" in entry.tensors),))
    if entry.kind == "lokr":
        return _lokr(entry, layer)
    return f"is {entry.kind}, which no pass with slots holds"


def _lokr(entry: Entry, layer: Layer) -> Form | str:
    """LoKr with the factors of a file: by the `factor` that splits both widths so, else by the sizes of the first."""
    there = {name: tuple(t.shape) for name, t in entry.tensors.items()}
    both, tucker, full = "lokr_w1_a" in there, "lokr_t2" in there, {"lokr_w1", "lokr_w2"} <= there.keys()
    a, c = there["lokr_w1"] if "lokr_w1" in there else (there["lokr_w1_a"][0], there["lokr_w1_b"][1])
    factors = dict.fromkeys((-1, a, c, layer.shape[0] // a, layer.shape[1] // c))
    ways: list[dict[str, Any]] = [{"factor": factor} for factor in factors if factor]
    split = (both, "lokr_w2_a" in there)
    for way in [*ways, *({**way, "split": split} for way in (*ways, {"first": (a, c)}))]:
        if lokr_shapes(layer.shape, entry.rank, **way, both=both, cores=tucker, full=full) == there:
            rest = {**way, "decompose_both": both, "tucker": tucker, "full_matrix": full}
            return Form("lokr", entry.rank, tuple(rest.items()))
    some = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(there.items()))
    return f"has the factors {some}, which are none that a rank of {entry.rank} gives"


@dataclass(frozen=True)
class Plan:
    """Which layers of a module get which forms for some adapters; `unheld` says by layer why it gets none."""

    forms: Mapping[Form, Sequence[str]]
    fits: Sequence[Fit]
    unheld: Mapping[str, str]

    def as_pass(self, slots: int, name: str = "adapter", samples: str | None = None) -> Pass:
        """The pass with so many slots. Raises ArtifactError or SpecError where there is nothing to hold."""
        if not self.forms:
            for found in self.fits:
                found.check()
            raise SpecError("nothing in these files has a place in a pass with slots")
        rules: list[Rule] = []
        for form, paths in self.forms.items():
            at = [f"re:{_escaped(path)}" if PATTERN & {*path} else path for path in paths]
            rest: Any = {key: list(value) if isinstance(value, tuple) else value for key, value in form.rest}
            made = load_pass(form.name, at=at, slots=slots, rank=form.rank, **rest)
            rules += made.rules
        about = f"Slots for the adapters of {', '.join(Path(found.file.source).name for found in self.fits)}."
        return Pass(name, rules, about, slots=slots, samples=samples)


def _escaped(path: str) -> str:
    return "".join(f"\\{c}" if not (c.isalnum() or c == "_") else c for c in path)


def plan_for(
    files: Iterable[tuple[AdapterFile, Mapping[str, Any]]], module: Any, called: Container[str] | None = None
) -> Plan:
    """Where the adapters of some files go in a module, and as what; beside each file its `part`, `partial` and `guess`.

    `called` are the layers that are called, rather than read by another; None is all.

    Raises ArtifactError for layers that are not here and for updates that no pass with slots holds, but with `partial`.
    """
    layers = layers_of(module)
    shapes = {path: layer.shape for path, layer in layers.items()}
    ranks: dict[tuple[str, str, tuple[tuple[str, Any], ...]], int] = {}
    fits: list[Fit] = []
    unheld: dict[str, str] = {}
    for file, ways in files:
        found = fit(file, shapes, ways.get("part"), guess=bool(ways.get("guess")))
        if not ways.get("partial"):
            found.check()
        fits.append(found)
        for path, entry in found.placed.items():
            form = form_of(entry, layers[path], called is None or path in called)
            if isinstance(form, str):
                unheld[path] = form
                if not ways.get("partial"):
                    raise ArtifactError(f"{file.source}: '{path}' {form} (partial leaves it out)")
                continue
            key = (form.name, path, form.rest)
            ranks[key] = max(form.rank, ranks.get(key, 0))
    forms: dict[Form, list[str]] = {}
    for (name, path, rest), rank in ranks.items():
        forms.setdefault(Form(name, rank, rest), []).append(path)
    return Plan(dict(sorted(forms.items(), key=lambda item: (item[0].name, -item[0].rank))), fits, unheld)
