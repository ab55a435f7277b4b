"""Where images are listed: folders, JSON lists of files, and the `.toml` data sets of kohya's sd-scripts."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import SpecError, did_you_mean, shown
from ...files import reading
from ...limits import DEFAULT
from ...spec.yaml_source import Where
from .sidecars import Settings, Sidecars, read_number

Below = Callable[[Path], list[str]]
# what is read of what a subset may say
TOML = {"image_dir", "num_repeats", "caption_extension", "class_tokens", "shuffle_caption", "keep_tokens", "flip_aug"}
TOML.add("caption_dropout_rate")


@dataclass
class Listed:
    """An image file, with what its list says about it. None: what lies beside it says it."""

    file: Path
    settings: Settings | None = None


def from_json(file: Path, sidecars: Sidecars) -> list[Listed]:
    """The images of a JSON list: mappings of `image`, a path relative to the file, and what a YAML sidecar may have; or such
    paths alone, beside which the captions lie."""
    where = Where(str(file))
    found = reading.read_json(file, lambda finding: SpecError(finding, where=where))
    if not isinstance(found, list):
        raise SpecError(f"must be a list of images, not {shown(found)}", where=where)
    listed = []
    for number, entry in enumerate(found):
        alone = isinstance(entry, str)
        entry = {"image": entry} if alone else entry
        if not isinstance(entry, Mapping) or not isinstance(entry.get("image"), str):
            raise SpecError(f"[{number}] needs 'image', the path of a file; it is {shown(entry)}", where=where)
        image = file.parent / entry["image"]
        if not image.is_file():
            raise SpecError(f"[{number}] '{image}' {reading.missing(image)}", where=where)
        caption = entry.get("caption")
        beside = file.parent / caption if isinstance(caption, str) and caption.endswith((".txt", ".caption")) else None
        if beside is not None and beside.is_file():
            text = reading.text(beside, DEFAULT.caption, lambda finding: SpecError(finding, where=where))
            entry = {**entry, "caption": text}
        listed.append(Listed(image, None if alone else sidecars.parsed(entry, where)))
    return listed


def from_toml(file: Path, below: Below, notes: list[str]) -> list[Listed]:
    """The images of the subsets of a data set of kohya's: `image_dir` is relative to the file."""
    where = Where(str(file))
    try:
        data = tomllib.loads(reading.text(file, DEFAULT.json, lambda finding: SpecError(finding, where=where)))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"not valid TOML: {error}", where=where) from None
    listed, unread = [], set()
    for said in _subsets(data, where):
        if not isinstance(said.get("image_dir"), str):
            raise SpecError("a subset needs 'image_dir', a folder", where=where)
        folder = file.parent / said["image_dir"]
        if not folder.is_dir():
            raise SpecError(f"no such folder '{folder}'", where=where)
        unread |= said.keys() - TOML
        # as there: a subset has the images of its folder, not of those below it
        listed += [_of_subset(folder / name, said, where) for name in below(folder) if "/" not in name]
    if not listed:
        raise SpecError("it names no images", where=where)
    if unread:
        names = ", ".join(f"{key}{did_you_mean(key, TOML)}" for key in sorted(unread))
        notes.append(f"{file}: {names} are not read: 'size', 'buckets' and 'train' say such things here")
    return listed


def _subsets(data: Mapping[str, Any], where: Where) -> Iterator[dict[str, Any]]:
    """Each subset with what is said above it."""
    general = _tables(data, "general", where)
    for dataset in _tables(data, "datasets", where):
        whole = {key: value for key, value in dataset.items() if key != "subsets"}
        for subset in _tables(dataset, "subsets", where):
            yield {**(general[0] if general else {}), **whole, **subset}


def _tables(data: Mapping[str, Any], key: str, where: Where) -> list[dict[str, Any]]:
    """The tables under a key; [general] is one, the others are lists. Raises SpecError for anything else."""
    found = data.get(key, [])
    tables = [found] if key == "general" and isinstance(found, dict) else found
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        wanted = "[general]" if key == "general" else f"a list of tables, [[{key}]]"
        raise SpecError(f"'{key}' must be {wanted}, not {shown(found)}", where=where)
    return tables


def _of_subset(image: Path, said: Mapping[str, Any], where: Where) -> Listed:
    beside = image.with_suffix(str(said.get("caption_extension", ".caption")))
    caption = said.get("class_tokens")
    if os.path.lexists(beside):
        caption = reading.text(beside, DEFAULT.caption, lambda finding: SpecError(finding, where=Where(str(beside)))).strip()
    try:
        settings = Settings(
            plain=caption,
            multiply=read_number(said.get("num_repeats", 1), "multiply", where),
            flip_p=0.5 if said.get("flip_aug") else None,
            cond_dropout=read_number(said[rate], "cond_dropout", where) if (rate := "caption_dropout_rate") in said else None,
            shuffle_tags=bool(said.get("shuffle_caption")) or None,
        )
        keep = int(said.get("keep_tokens", 0))
    except (TypeError, ValueError) as error:
        raise SpecError(f"a subset has a value of the wrong kind: {error}", where=where) from None
    if settings.shuffle_tags and caption:
        parts = [part.strip() for part in caption.split(",")]
        tags = tuple((part, 1.0) for part in parts[keep:])
        settings = replace(settings, plain=None, prompt=", ".join(parts[:keep]), tags=tags)
    return Listed(image, settings)
