"""What an adapter file is, and what of it fits a model: read from its header, without its weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import DEFAULT, ArtifactError, Limits, make_printable, quote
from .contents import list_layers
from .file_metadata import BASES
from .file_passes import FormPlan, make_plan
from .files import AdapterFile, Source, read
from .formats import find_format
from .layer_matching import Fit
from .layer_names import guess_family
from .loading import fit_to
from .slots import Adapters
from .tables import FORMATS, read_table

SHOWN = 5  # so many of a kind are listed
TRAINED = ("ss_network_dim", "ss_network_alpha", "ss_network_args", "ss_steps", "ss_epoch", "ss_learning_rate", "ss_optimizer")
TITLES = ("modelspec.title", "ss_output_name", "name", "title")
SAID = {"base model": BASES, "title": TITLES, "trigger": ("modelspec.trigger_phrase",), "license": ("modelspec.license",)}


@dataclass(frozen=True)
class Inspection:
    """An adapter file without its weights: the `file`, and for a model its `plan`, or `why` it has none.

    `layers` is how many layers of the model have a weight; `slots` where the file goes in the slots that the model has
    already. `str` is the whole report.
    """

    file: AdapterFile
    plan: FormPlan | None = None
    why: str = ""
    layers: int = 0
    slots: Fit | None = None

    @property
    def kinds(self) -> Mapping[str, int]:
        """Number of layers by the kind of their update."""
        return Counter(entry.kind for entry in self.file.entries)

    @property
    def ranks(self) -> Mapping[int, int]:
        """Number of layers by the rank of their update."""
        return Counter(entry.rank for entry in self.file.entries)

    @property
    def alphas(self) -> Mapping[float, int]:
        """Number of layers by alpha, of those with a known scale."""
        return Counter(float(f"{e.scale * e.rank:.6g}") for e in self.file.entries if not e.assumed)

    @property
    def dtypes(self) -> Mapping[str, int]:
        """Number of tensors by dtype."""
        found = (t.dtype for entry in self.file.entries for t in entry.tensors.values())
        return Counter(str(dtype).removeprefix("torch.") for dtype in found)

    @property
    def size(self) -> int:
        """Bytes of the updates' tensors."""
        return sum(t.numel() * t.itemsize for entry in self.file.entries for t in entry.tensors.values())

    @property
    def tool(self) -> str:
        """Tool that wrote the file, if it says so; else the tool whose names it has."""
        about = self.file.about
        software = about.get("software")
        if isinstance(software, str) and software:
            try:
                said = json.loads(software)
            except ValueError:
                said = software
            name = said.get("name") if isinstance(said, dict) else said
            if isinstance(name, str) and name:
                version = said.get("version") if isinstance(said, dict) else None
                return make_printable(f"{name} {version}" if version else name)[:80]
        for key, start, tool in read_table("formats")["marks"]:
            if str(about.get(key, "\0")).startswith(start) and key in about:
                return str(tool)
        known = Counter(as_ for entry in self.file.entries if (as_ := find_format(entry)))
        return f"unknown, with names like those of {FORMATS[known.most_common(1)[0][0]]['tool']}" if known else "unknown"

    @property
    def family(self) -> str:
        """Models whose own layers have such names, if they can be identified; else ""."""
        return guess_family(entry.path for entry in self.file.entries)

    @property
    def is_placed(self) -> bool:
        """Whether any of it fits the model."""
        return self.plan is not None and any(found.placed for found in self.plan.fits)

    def describe(self) -> dict[str, Any]:
        """Return the report as plain values; `model` is None without one."""
        parts = Counter(entry.part for entry in self.file.entries)
        made = {
            "file": str(self.file.source), "kinds": self.kinds, "bytes": self.size, "dtypes": self.dtypes, "tool": self.tool,
            "ranks": self.ranks, "alphas": {f"{a:g}": n for a, n in self.alphas.items()}, "family": self.family, "parts": parts,
            "layers": [entry.name for entry in self.file.entries], "beside": list(self.file.rest),
            "metadata": {key: value for key, value in self.file.about.items() if isinstance(value, str)},
        }  # fmt: skip
        return {**made, "model": self._describe_fit() if self.plan is not None or self.why else None}

    def _describe_fit(self) -> dict[str, Any]:
        fits = self.plan.fits if self.plan is not None else ()
        forms = self.plan.forms if self.plan is not None else {}
        return {
            "fits": sorted(path for found in fits for path in found.placed), "layers": self.layers,
            "missing": [entry.name for found in fits for entry in found.missing],
            "mismatched": {path: why for found in fits for path, why in found.mismatched.items()},
            "other_parts": {part: len(entries) for found in fits for part, entries in found.others.items()},
            "no_slot": dict(self.plan.unheld) if self.plan is not None else {},
            "passes": [{"name": form.name, "rank": form.rank or None, "at": list(paths)} for form, paths in forms.items()],
            "why": self.why or "; ".join(text for found in fits for text in found.findings()),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.file.source}", *(f"  {key:<11} {text}" for key, text in self._rows())]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str]]:
        file, about = self.file, self.file.about
        count = sum(len(entry.tensors) for entry in file.entries)
        rows = [
            ("kind", _counted(self.kinds)),
            ("size", f"{_bytes(self.size)} in {count} tensors: {_counted(self.dtypes)}"),
            ("written by", self.tool),
            *((name, text) for name, keys in SAID.items() if (text := _metadata(about, keys))),
            ("ranks", _counted(self.ranks)),
            ("alphas", _counted({f"{a:g}": n for a, n in self.alphas.items()}) or "not given, the scale is taken as 1"),
        ]
        if trained := _metadata(about, TRAINED, all_=True):
            rows.append(("trained", trained))
        for part in file.parts:
            some = [entry for entry in file.entries if entry.part == part]
            rows.append(("part", f"{part or '(no name)'}: {len(some)} layers, such as {quote(some[0].name)}"))
        if (family := self.family) and not self.is_placed:
            rows.append(("names", f"those of {family}"))
        if file.rest:
            rows.append(("beside", f"{len(file.rest)} tensors are not part of an update: "
                                   f"{_listed([quote(key) for key in file.rest])}"))
        return rows + self._fit_rows()

    def _fit_rows(self) -> list[tuple[str, str]]:
        if self.plan is None:
            return [("fits", self.why)] if self.why else []
        rows: list[tuple[str, str]] = []
        for found in self.plan.fits:
            others = sum(len(entries) for entries in found.others.values())
            own = len(found.file.entries) - others
            gone = own - len(found.missing) - len({*found.mismatched}) - len(found.outside)
            rows.append(("fits", f"{gone} of {own} layers, {_share(gone, own)}"))
            share = _share(len(found.placed), self.layers)
            rows.append(("covers", f"{len(found.placed)} of the model's {self.layers} layers, {share}"))
            for part, entries in found.others.items():
                rows.append(("other part", f"{len(entries)} layers are for {part or '(no name)'}"))
            rows += [("not here", make_printable(text)) for text in found.findings()]
            if found.assumed:
                rows.append(("assumed", f"no scale is given for {len(found.assumed)} layers, it is taken as 1"))
        if self.slots is not None:
            found, gone = self.slots, len({e.name for e in self.slots.placed.values()})
            lacks = f", {len(found.outside)} layers have none: {_listed([*found.outside])}" if found.outside else ""
            rows.append(("slots", f"{gone} updates have slots here{lacks}"))
        for path, why in list(self.plan.unheld.items())[:SHOWN]:
            rows.append(("no slot", make_printable(f"'{path}' {why}")))
        if len(self.plan.unheld) > SHOWN:
            rows.append(("no slot", f"and {len(self.plan.unheld) - SHOWN} more"))
        for name in dict.fromkeys(form.name for form in self.plan.forms):
            ranks = Counter[int]()
            for form, paths in self.plan.forms.items():
                ranks[form.rank] += len(paths) if form.name == name else 0
            ranks = +ranks
            rows.append(("pass", f"{name} at {sum(ranks.values())} layers, of rank {_counted(ranks)}"))
        if self.plan.forms:
            rows.append(("in a file", f"- adapter: {{file: {self.file.source}}}"))
        return rows


def inspect_adapter(
    source: Source,
    model: Any = None,
    *,
    adapter: str | None = None,
    part: str | None = None,
    config: Mapping[str, Any] | None = None,
    guess: bool = False,
    limits: Limits = DEFAULT,
) -> Inspection:
    """Say what an adapter file is, and with a model what of it fits, and the pass for it.

    The weights of a file are not read, so that a large one takes as long as a small one, and numbers that are not finite are
    not seen.

    Args:
        source: The adapter, as `adapters.load` takes it.
        model: Any module, on the meta device too; None looks at the file alone.
        adapter: Which of several adapters in the file.
        part: Which part of a pipeline the model is.
        config: PEFT's adapter configuration, where none is beside the file.
        guess: Whether layers may be taken by shape and order.
        limits: Bounds of what is read.

    Returns:
        The method, tool, ranks, layers and dtypes of the file, and what fits; it prints as text.

    Raises:
        ArtifactError: The file cannot be read, or is of no kind that is known.
    """
    file = read(source, adapter=adapter, config=config, meta=True, limits=limits)
    if model is None:
        return Inspection(file)
    layers = len(list_layers(model))
    try:
        plan = make_plan([(file, {"part": part, "partial": True, "guess": guess})], model)
    except ArtifactError as error:
        return Inspection(file, why=f"it does not fit: {error}", layers=layers)
    return Inspection(file, plan, layers=layers, slots=_in_slots(file, model, part, guess))


def _in_slots(file: AdapterFile, model: Any, part: str | None, guess: bool) -> Fit | None:
    if not any(entry.get("slots") for entry in getattr(model, "meta", {}).get("passes", [])):
        return None
    held = Adapters(model)
    return fit_to(file, held.banks, model, held.shapes, part, guess)


def _metadata(about: Mapping[str, Any], keys: Sequence[str], all_: bool = False) -> str:
    """Format a file's metadata under some keys: the first one present, or all with their names."""
    found = {key: about[key] for key in keys if about.get(key) not in (None, "", "None", "{}")}
    if all_:
        return ", ".join(f"{key.removeprefix('ss_')} {quote(value)}" for key, value in found.items())
    return ", ".join(f"{quote(value)} ({key})" for key, value in found.items())


def _counted(counts: Mapping[Any, int]) -> str:
    """Format counts, the most frequent first: `16 (160 layers), 8 (32)`; only the value if there is one."""
    if len(counts) == 1:
        return str(next(iter(counts)))
    rows = sorted(counts.items(), key=lambda row: -row[1])
    return _listed([f"{value} ({n})" for value, n in rows], 8)


def _listed(texts: Sequence[str], most: int = SHOWN) -> str:
    return ", ".join(texts[:most]) + (f", and {len(texts) - most} more" if len(texts) > most else "")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"


def _bytes(size: int) -> str:
    power = min(int(math.log(max(size, 1), 1000)), 3)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"

