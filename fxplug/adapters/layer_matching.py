"""Which layers of a graph an adapter file is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import ArtifactError, did_you_mean
from .layer_names import SWAPPED, first_names
from .updates import AdapterFile, Entry

# the parts of a pipeline by how their layers' names begin: dotted, or with kohya's underscores
PARTS = ("unet", "transformer", "transformer_2", "diffusion_model", "prior", "text_encoder", "text_encoder_2", "text_encoder_3")
FLAT_PARTS = {
    "lora_unet_": "unet", "lora_transformer_": "transformer", "lora_te_": "text_encoder", "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2", "lora_te3_": "text_encoder_3", "lora_prior_unet_": "prior", "lycoris_": "", "lora_": "",
}  # fmt: skip
EMBEDDED = ("<", "emb_params", "bundle_emb.", "string_to_param")  # learned words lie beside the layers in some files


def split_part(name: str) -> tuple[str, str, str]:
    """A layer's name as what says the part of a pipeline, the part, and the path in it."""
    start = "base_model.model." if name.startswith("base_model.model.") else ""
    inner = name.removeprefix(start)
    for prefix, part in FLAT_PARTS.items():
        if inner.startswith(prefix):
            return start + prefix, part, inner.removeprefix(prefix)
    head, dot, tail = inner.partition(".")
    return (f"{start}{head}.", head, tail) if head in PARTS and dot else (start, "", inner)


@dataclass(frozen=True)
class Fit:
    """Where the entries of a file go in a graph: `placed` by layer path, shaped as the layer's weight is.

    `missing` are entries without a layer, `mismatched` says by layer path what does not agree, `others` are the entries for
    other parts of a pipeline (text encoders), `layers` all that could have been met.
    """

    file: AdapterFile
    layers: Mapping[str, tuple[int, ...]]
    placed: Mapping[str, Entry]
    missing: tuple[Entry, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)

    @property
    def rest(self) -> list[str]:
        """The keys of the file that are no low-rank update and may belong to this graph."""
        return [key for key in self.file.rest if not key.startswith(EMBEDDED) and split_part(key)[1] not in self.others]

    def check(self) -> Fit:
        """This, if every entry has its place. Raises ArtifactError that says how many have none, and the nearest layers."""
        found = []
        if self.missing:
            some = [f"'{e.name}'{did_you_mean(e.path, self._alike(e))}" for e in self.missing[:3]]
            of = len(self.missing) + len(self.placed) + len(self.mismatched)
            found.append(f"{len(self.missing)} of {of} layers are not in the graph: {_listed(some, len(self.missing))}")
        if self.mismatched:
            some = [f"'{path}' {text}" for path, text in list(self.mismatched.items())[:3]]
            found.append(f"{len(self.mismatched)} layers have other shapes: {_listed(some, len(self.mismatched))}")
        if self.rest:
            some = [f"'{key}'" for key in self.rest[:3]]
            found.append(f"{len(self.rest)} tensors are no low-rank update: {_listed(some, len(self.rest))}")
        if found:
            raise ArtifactError(f"{self.file.source}: {'; '.join(found)}")
        return self

    def _alike(self, entry: Entry) -> Iterable[str]:
        return (path.replace(".", "_") for path in self.layers) if entry.flat else self.layers


def _listed(some: Sequence[str], number: int) -> str:
    return ", ".join(some) + (", ..." if number > len(some) else "")



def fit(
    file: AdapterFile,
    layers: Mapping[str, Sequence[int]],
    part: str | None = None,
    model: Callable[[], Mapping[str, Sequence[int]]] | None = None,
) -> Fit:
    """Find the layer of each entry among `layers`, which has the weight's shape by path.

    Tried in this order: the path as it is; without what says the part of a pipeline, kohya's with underscores; the first names
    of a diffusers model (see renaming); the path without further components at its beginning, or with more, if all entries
    of the part then have a layer.
    Parts of which nothing fits are others', once another part fits. `part` names the one to take. `model` gives all weights
    of the model by path, where `layers` are only some: blocks are counted for the first names.

    Raises ArtifactError for a part that the file has not, and where more than one layer or entry could be meant.
    """
    shapes = {path: tuple(int(n) for n in shape) for path, shape in layers.items()}
    flat: dict[str, list[str]] = {}
    for layer in shapes:
        flat.setdefault(layer.replace(".", "_"), []).append(layer)
    if part is not None and part not in file.parts:
        known = ", ".join(name or "(no name)" for name in file.parts)
        raise ArtifactError(f"{file.source} has nothing for '{part}'{did_you_mean(part, file.parts)}; it has {known}")
    groups: dict[str, list[Entry]] = {}
    for entry in file.entries:
        groups.setdefault(entry.part, []).append(entry)
    wanted = [p for p in groups if part in (None, p)]
    finder = _Finder(file, shapes, flat)
    found = {p: finder.known(groups[p]) for p in wanted}
    if not any(hits.named for hits in found.values()):
        whole = shapes | {path: tuple(shape) for path, shape in (model() if model else {}).items()}
        groups |= {p: finder.renamed(groups[p], whole) for p in wanted}
        found = {p: finder.known(groups[p]) for p in wanted}
    if not any(hits.good for hits in found.values()):
        found = {p: max(found[p], finder.deep(groups[p]), key=lambda h: (h.good, h.named)) for p in wanted}
    some = any(hits.good for hits in found.values())
    taken = [p for p in wanted if found[p].good or not some]
    if not some and any(found[p].named for p in taken):
        taken = [p for p in taken if found[p].named]  # right names, wrong sizes: say that
    elif not some and len(taken) > 1:
        taken = [p for p in taken if not p.startswith("text_encoder")] or taken
    placed: dict[str, Entry] = {}
    missing: list[Entry] = []
    mismatched: dict[str, str] = {}
    owner: dict[str, Entry] = {}
    for p in taken:
        for entry, path in zip(groups[p], found[p].paths, strict=True):
            if path is None:
                missing.append(entry)
                continue
            if path in owner:
                both = f"'{owner[path].name}' and '{entry.name}' are both for '{path}'"
                choose = "" if entry.part == owner[path].part else f"; give part= one of {', '.join(taken)}"
                raise ArtifactError(f"{file.source}: {both}{choose}")
            owner[path] = entry
            if entry.fits(shapes[path]):
                placed[path] = entry.shaped(shapes[path])
            else:
                mismatched[path] = f"is {list(shapes[path])}, and '{entry.name}' is for {_for(entry)}"
    others = {p: tuple(entries) for p, entries in groups.items() if p not in taken}
    return Fit(file, shapes, placed, tuple(missing), mismatched, others)


def _for(entry: Entry) -> str:
    out, inner = entry.sizes()
    return str([*inner, out] if entry.embedding else [out, *inner])


@dataclass(frozen=True)
class _Hits:
    """The layer of each entry under one reading of the names."""

    paths: Sequence[str | None]
    good: int

    @property
    def named(self) -> int:
        return sum(path is not None for path in self.paths)


@dataclass(frozen=True)
class _Finder:
    file: AdapterFile
    shapes: Mapping[str, tuple[int, ...]]
    flat: Mapping[str, Sequence[str]]

    def known(self, entries: Sequence[Entry]) -> _Hits:
        """The best of the readings that need no guess."""
        readings: list[Callable[[Entry], str | None]] = [
            lambda e: self.exact(e.name),
            lambda e: self.exact(e.name.removeprefix("base_model.model.")),
            lambda e: self.exact(e.path),
            lambda e: self.underscored(e, e.path.replace(".", "_")) if e.flat else None,
        ]
        return max((self.tried(entries, reading) for reading in readings), key=lambda hits: (hits.good, hits.named))

    def renamed(self, entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]]) -> list[Entry]:
        """Entries under the model's names where they have its first names; of several layers, one entry for each."""
        names = first_names(shapes)
        names |= {name.replace(".", "_"): paths for name, paths in names.items()}
        made = []
        for entry in entries:
            paths = names.get(entry.path, ())
            widths = [shapes[path.removesuffix(SWAPPED)][0] for path in paths]
            whole = (sum(widths), *shapes[paths[0].removesuffix(SWAPPED)][1:]) if paths else ()
            if not paths or not entry.fits(whole):
                paths, widths = paths[:1] or (entry.path,), [0]
            start = 0
            for path, width in zip(paths, widths, strict=True):
                part = entry.outputs(start, width) if len(paths) > 1 else entry
                part = part.swapped() if path.endswith(SWAPPED) else part
                made.append(replace(part, path=path.removesuffix(SWAPPED), flat=entry.flat and path == entry.path))
                start += width
        return made

    def deep(self, entries: Sequence[Entry]) -> _Hits:
        """The first reading under which every entry has a layer that it fits: fewest components taken away, or some added."""
        first = entries[0].path
        for n in range(1, first.count(".") + 1):
            if hits := self.all(entries, self.inside(n)):
                return hits
        starts = {path.removesuffix(first) for path in self.shapes if path.endswith(f".{first}")}
        found = [hits for start in sorted(starts) if (hits := self.all(entries, self.after(start)))]
        if len(found) > 1:
            where = " or ".join(f"'{hits.paths[0]}'" for hits in found[:3])
            raise ArtifactError(f"{self.file.source}: '{entries[0].name}' may be {where}: name the layers as the graph does")
        if found:
            return found[0]
        for n in range(1, first.count("_") + 1):
            if hits := self.all(entries, self.inside(n, "_")):
                return hits
        return self.tried(entries, self.inside(0, "_"))

    def after(self, start: str) -> Callable[[Entry], str | None]:
        return lambda e: self.exact(start + e.path)

    def inside(self, number: int, dot: str = ".") -> Callable[[Entry], str | None]:
        """Names without their first components; by underscores if that is what `dot` says."""

        def reading(entry: Entry) -> str | None:
            name = dot.join(entry.path.replace(".", dot).split(dot)[number:])
            return self.exact(name) if dot == "." else self.underscored(entry, name)

        return reading

    def tried(self, entries: Sequence[Entry], reading: Callable[[Entry], str | None]) -> _Hits:
        paths = [reading(entry) for entry in entries]
        return _Hits(paths, sum(p is not None and e.fits(self.shapes[p]) for e, p in zip(entries, paths, strict=True)))

    def all(self, entries: Sequence[Entry], reading: Callable[[Entry], str | None]) -> _Hits | None:
        """The layers of all entries, if each has one that it fits; given up at the first that has not."""
        paths = []
        for entry in entries:
            path = reading(entry)
            if path is None or not entry.fits(self.shapes[path]):
                return None
            paths.append(path)
        return _Hits(paths, len(paths))

    def exact(self, path: str) -> str | None:
        return path if path in self.shapes else None

    def underscored(self, entry: Entry, name: str) -> str | None:
        """The layer whose path has underscores for dots as `name` has. Raises ArtifactError if two fit alike."""
        paths = self.flat.get(name, ())
        fitting = [path for path in paths if entry.fits(self.shapes[path])] if len(paths) > 1 else paths
        if len(fitting) > 1:
            raise ArtifactError(f"{self.file.source}: '{entry.name}' may be '{fitting[0]}' or '{fitting[1]}'")
        return fitting[0] if fitting else None
