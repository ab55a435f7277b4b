"""HCP-Diffusion's configurations over several files: `_base_`, and `${...}` as OmegaConf reads it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import DEFAULT, SpecError, did_you_mean, format_path
from ...core.spec.yaml_source import Source, quote_yaml, read_yaml

REMOVED = "---"  # a value that takes a key of a `_base_` file away
BASES = {  # what HCP-Diffusion's own files for `_base_` set, for those who have not got them
    "train_base.yaml": "train (train_steps, loss, optimizer, scheduler, ...), seed, mixed_precision, model, logger",
    "tuning_base.yaml": "tokenizer_pt, and the sections of plugins and layers as empty",
    "_dataset.yaml": "data (batch_size, bucket, source, ...)",
}
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
REFERENCE = re.compile(r"(\.*)([\w-]+(?:(?:\.[\w-]+)|(?:\[[\w-]+\]))*)")

Path_ = tuple[str | int, ...]


def read_files(file: Path, notes: list[str]) -> Source:
    """Read a file merged over the files that its `_base_` names, the first of them over the next, as HCP-Diffusion merges them.

    Mappings are merged by key, lists and plain values replaced. A `_base_` path is searched in the folder of the file and its
    parents, then in the working folder; one that is not found is added to `notes`. Raises SpecError for circular `_base_`.
    """
    source = _read(file, notes, (), {})
    if isinstance(source.data, Mapping):
        source.data = _without_removed(source.data)
    return source


def _read(file: Path, notes: list[str], around: tuple[Path, ...], known: dict[Path, Source]) -> Source:
    here = file.resolve()
    if here in known:
        return known[here]
    source = read_yaml(file)
    if not isinstance(source.data, Mapping) or not source.data.get("_base_"):
        return known.setdefault(here, source)
    bases = source.data["_base_"]
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise source.error(f"must be a list of files, not {quote_yaml(bases)}", "_base_")
    merged = source
    for index, base in enumerate(bases):
        found = find_file(base, here)
        if found is None:
            keys = next((f"; HCP-Diffusion's sets {keys}" for name, keys in BASES.items() if base.endswith(name)), "")
            found_none = f"_base_: '{base}' is in no folder around {file.name}"
            notes.append(f"{found_none}: it is not read, so the keys that it sets are missing{keys}")
            continue
        if found in (*around, here):
            chain = " -> ".join(path.name for path in (*around, here, found))
            raise source.error(f"'{base}' includes this file itself: {chain}", "_base_", index)
        merged = _merged(_read(found, notes, (*around, here), known), merged)
    return known.setdefault(here, merged)


def find_file(base: str, file: Path) -> Path | None:
    """Return a file that another one names: in its folder or those above it, or in the working folder. None if it is in
    none."""
    folders = (*file.parents, Path.cwd())
    return next((path.resolve() for folder in folders if (path := folder / base).is_file()), None)


def _merged(base: Source, over: Source) -> Source:
    """Return `over` merged into `base`, with the lines of both."""

    def merge(one: Any, other: Any) -> Any:
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return other
        return {**one, **{key: merge(one[key], value) if key in one else value for key, value in other.items()}}

    if not isinstance(base.data, Mapping):
        raise SpecError(f"must be a mapping, not {quote_yaml(base.data)}", where=base.where())
    data = merge({k: v for k, v in base.data.items() if k != "_base_"}, over.data)
    return Source(data, over.file, {**base.lines, **over.lines})


def _without_removed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_removed(member) for key, member in value.items() if member != REMOVED}
    return [_without_removed(member) for member in value] if isinstance(value, list) else value


class References:
    """The values of a configuration with what their `${...}` stand for."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.left = DEFAULT.entries  # so many values are looked at: references to references may stand for very many

    def value(self, *path: str | int, asked: tuple[Path_, ...] = ()) -> Any:
        """Return the value at `path`. Raises SpecError, with its place, for a reference to nothing, to itself or to a resolver.

        `asked` has the places whose references led here.
        """
        self.left -= 1
        if self.left < 0:
            raise self.source.error(f"its references expand to more than {DEFAULT.entries} values", *path)
        here = _at(self.source.data, path)
        if isinstance(here, Mapping):
            return {key: self.value(*path, key, asked=asked) for key in here}
        if isinstance(here, list):
            return [self.value(*path, index, asked=asked) for index in range(len(here))]
        if not isinstance(here, str) or "${" not in here:
            return here
        if path in asked:
            chain = " -> ".join(format_path(place) for place in (*asked[asked.index(path) :], path))
            raise self.source.error(f"{quote_yaml(here)} refers to itself: {chain}", *path)
        return self.text(here, path, (*asked, path))

    def text(self, text: str, path: Path_, asked: tuple[Path_, ...]) -> Any:
        """Replace the references in a text, the innermost first; a text that is only a reference may become any value."""
        while found := INNERMOST.search(text):
            value = self.value(*self.target(found[1].strip(), text, path), asked=asked)
            if found[0] == text:
                return value
            if isinstance(value, (Mapping, list)):
                what = f"'{found[1]}' is {quote_yaml(value)}, which cannot be part of a text"
                raise self.source.error(f"{quote_yaml(text)}: {what}", *path)
            text = text[: found.start()] + str(value) + text[found.end() :]
            if len(text) > DEFAULT.text:
                raise self.source.error(f"its references expand to a text of more than {DEFAULT.text} characters", *path)
        if "${" in text:
            raise self.source.error(f"{quote_yaml(text)}: '${{' without its '}}'", *path)
        return text

    def target(self, reference: str, text: str, path: Path_) -> Path_:
        """Return the path that `a.b[0]` means from the top, or `..a` from its own place: each leading dot is one mapping up."""
        if ":" in reference:
            name = reference.partition(":")[0]
            what = f"uses the resolver '{name}', which is not supported: write its value"
            raise self.source.error(f"{quote_yaml(text)} {what}", *path)
        read = REFERENCE.fullmatch(reference)
        if read is None or len(read[1]) > len(path):
            raise self.source.error(f"{quote_yaml(text)}: '{reference}' is not a path of the configuration", *path)
        found: Path_ = path[: len(path) - len(read[1])] if read[1] else ()
        for key in re.findall(r"[\w-]+", read[2]):
            around = _at(self.source.data, found)
            if isinstance(around, str) and "${" in around:
                place = format_path(found)
                raise self.source.error(f"{quote_yaml(text)}: '{place}' is a reference: name its target instead", *path)
            step: str | int = int(key) if isinstance(around, list) and key.isdigit() else key
            known = around if isinstance(around, Mapping) else range(len(around)) if isinstance(around, list) else ()
            if step not in known:
                hint = did_you_mean(step, around) if isinstance(around, Mapping) else ""
                place = format_path((*found, step))
                raise self.source.error(f"{quote_yaml(text)}: no '{place}' here or in a _base_ file{hint}", *path)
            found = (*found, step)
        return found


def _at(data: Any, path: Path_) -> Any:
    for key in path:
        data = data[key]
    return data
