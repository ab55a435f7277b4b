"""Layers of a graph looked up by the names in an adapter file, or by shape and order where it has none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core.errors import ArtifactError
from .layer_names import SWAPPED, map_first_names, map_fused_names
from .updates import AdapterFile, Entry

Home = tuple[str, ...]  # the layers of an entry, as `map_first_names` gives them; none for an entry without one


@dataclass(frozen=True)
class NameMatches:
    """The layers of each entry under one reading of the names."""

    homes: Sequence[Home]
    good: int

    @property
    def is_complete(self) -> bool:
        """Return whether every entry has a layer that it fits."""
        return self.good == len(self.homes)

    @property
    def named(self) -> int:
        """Number of entries that have a layer, fitting or not."""
        return sum(bool(home) for home in self.homes)

    def rank(self) -> tuple[int, int]:
        """Return a sort key: more that fit is better, then more that have a layer."""
        return self.good, self.named


@dataclass(frozen=True)
class LayerFinder:
    """Looks layers up among `shapes`, under the graph's own names and, with `old`, under those of its family's code."""

    file: AdapterFile
    shapes: Mapping[str, tuple[int, ...]]
    old: bool = False

    @cached_property
    def flat(self) -> Mapping[str, Sequence[str]]:
        """Paths of layers by the same with underscores for dots."""
        made: dict[str, list[str]] = {}
        for path in self.shapes:
            made.setdefault(path.replace(".", "_"), []).append(path)
        return made

    @cached_property
    def fused(self) -> Mapping[str, tuple[str, Home]]:
        """Fused layer that the model calls instead of each of the layers it consists of, and all of these."""
        here = {name: paths for name, paths in map_fused_names(self.shapes).items() if name in self.shapes}
        same = {name: paths for name, paths in here.items() if self.joint_shape(paths) == tuple(self.shapes[name])}
        return {path: (name, paths) for name, paths in same.items() for path in paths}

    @cached_property
    def names(self) -> Mapping[str, Home]:
        """Layers by the names that they have in their family's own code; none without `old`."""
        found = {**map_fused_names(self.shapes), **map_first_names(self.shapes, also=True)} if self.old else {}
        return found | {name.replace(".", "_"): home for name, home in found.items()}

    def joint_shape(self, home: Home) -> tuple[int, ...]:
        """Return the shape of the weight that the layers of an entry have together."""
        of = [self.shapes[path.removesuffix(SWAPPED)] for path in home]
        return (sum(shape[0] for shape in of), *of[0][1:])

    def pieces(self, entry: Entry, home: Home) -> Iterator[tuple[str, Entry]]:
        """Yield the part of an entry for each of its layers."""
        start = 0
        for path in home:
            bare = path.removesuffix(SWAPPED)
            width = self.shapes[bare][0]
            piece = entry.outputs(start, width) if len(home) > 1 else entry
            yield bare, piece.swapped() if path.endswith(SWAPPED) else piece
            start += width

    def match_by_name(self, entries: Sequence[Entry]) -> NameMatches:
        """Return the best of the readings that need no guess."""
        names = [e.name for e in entries]
        readings = names, [name.removeprefix("base_model.model.") for name in names], [e.path for e in entries]
        return max((self.match_names(entries, reading) for reading in readings), key=NameMatches.rank)

    def deep(self, entries: Sequence[Entry], inside: Mapping[str, Any]) -> NameMatches:
        """Return the first reading under which every entry fits a layer: fewest components removed, or some added."""
        if hits := self.shortened(entries, "."):
            return hits
        first = entries[0].path
        starts = sorted({path.removesuffix(first) for path in inside if path.endswith(f".{first}")})
        readings = (self.match_names(entries, [start + e.path for e in entries]) for start in starts)
        found = [hits for hits in readings if hits.is_complete]
        if len(found) > 1:
            where = " or ".join(f"'{hits.homes[0][0]}'" for hits in found[:3])
            raise ArtifactError(f"{self.file.source}: '{entries[0].name}' may be {where}: name the layers as the graph does")
        flat = [entry.path.replace(".", "_") for entry in entries]
        return found[0] if found else self.shortened(entries, "_") or self.match_names(entries, flat)

    def shortened(self, entries: Sequence[Entry], dot: str) -> NameMatches | None:
        """Return the layers of all entries without the first components that their paths share, between dots or underscores."""
        parts = [entry.path.replace(".", dot).split(dot) for entry in entries]
        for n in range(1, len(parts[0])):
            if len({tuple(own[:n]) for own in parts}) > 1:
                return None  # what begins otherwise may be of another model
            if (hits := self.match_names(entries, [dot.join(own[n:]) for own in parts])).is_complete:
                return hits
        return None

    def match_names(self, entries: Sequence[Entry], names: Sequence[str]) -> NameMatches:
        """Return the layers of entries by such names."""
        homes = [self.home(entry, name) for entry, name in zip(entries, names, strict=True)]
        good = sum(bool(home) and self.takes(home, e) for e, home in zip(entries, homes, strict=True))
        return NameMatches(homes, good)

    def takes(self, home: Home, entry: Entry) -> bool:
        """Return whether an entry has the shape of the layers' weight, or as many numbers as that has outputs."""
        shape = self.joint_shape(home)
        return entry.fits(shape if entry.param == "weight" else shape[:1])

    def home(self, entry: Entry, name: str) -> Home:
        """Return the layers that a name means: the graph's own, or by the name in the family's code, whichever fits."""
        own: Home = (name,) if name in self.shapes else ()
        if "." not in name and (entry.flat or not own):
            own = self.underscored(entry, name) or own
        if own and self.takes(own, entry):
            return own
        old = self.names.get(name) or self.names.get(name.removesuffix(".scale"), ())  # what norms' own code calls the weight
        return old if old and (not own or self.takes(old, entry)) else own

    def underscored(self, entry: Entry, name: str) -> Home:
        """Return the layer whose path equals `name` with underscores for dots. Raises ArtifactError if two fit."""
        paths = self.flat.get(name, ())
        fitting = [path for path in paths if entry.fits(self.shapes[path])] if len(paths) > 1 else paths
        if len(fitting) > 1:
            raise ArtifactError(f"{self.file.source}: '{entry.name}' may be '{fitting[0]}' or '{fitting[1]}'")
        return tuple(fitting[:1])


def match_by_order(entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]], source: str) -> NameMatches:
    """Match entries to layers by order: those of one shape first to first, if there are as many.

    Entries are sorted by the numbers in their names, layers are in the order of `shapes`. Raises ArtifactError if a shape has
    another number of layers than of entries, with the shapes.
    """
    homes: dict[int, tuple[str, ...]] = {}
    left = dict(sorted(enumerate(entries), key=lambda pair: make_number_key(pair[1].name)))
    for shape in dict.fromkeys(shapes.values()):
        paths = [path for path, of in shapes.items() if of == shape]
        fitting = [n for n, entry in left.items() if entry.fits(shape)]
        if not fitting:
            continue
        if len(fitting) != len(paths):
            raise ArtifactError(
                f"{source} names no layers of this model, and they cannot be matched by order: {len(fitting)} updates fit "
                f"{len(paths)} layers of {list(shape)}; match the same number with at="
            )
        for n, path in zip(fitting, paths, strict=True):
            homes[n] = (path,)
            del left[n]
    return NameMatches([homes.get(n, ()) for n in range(len(entries))], len(homes))


def make_number_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key of a name: numbers by their value, the rest by letters."""
    return [(0, int(text), "") if text.isdecimal() else (1, 0, text) for text in re.split(r"(\d+)", name) if text]
