"""Images in folders: with captions beside them or in metadata.jsonl, or a folder for each class."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from ...errors import SpecError, did_you_mean
from ...spec.train_section import Data
from .image_files import read_image, read_size
from .metadata import METADATA, captions, labels, read_metadata


class FileItems:
    """Image files below `top` with what belongs to each; `conditions` are further images, one for each."""

    def __init__(
        self,
        top: Path,
        names: list[str],
        values: list[dict[str, Any]],
        channels: int = 3,
        classes: list[str] | None = None,
        conditions: list[Path] | None = None,
    ) -> None:
        self.top, self.root, self.names, self.values, self.channels = top, str(top), names, values, channels
        self.classes, self.conditions = classes, conditions

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """`image`, `name` (relative to the folder), and what is known of it. Raises Unreadable."""
        name = self.names[i]
        item = {"image": read_image(self.top / name, name, self.channels), "name": name, **self.values[i]}
        if self.conditions:
            item["condition"] = read_image(self.conditions[i], f"condition of {name}", self.channels)
        return item

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """(h, w) of each image, from the headers."""
        return [read_size(self.top / name) for name in self.names]


def open_images(spec: Data, base: Path) -> FileItems:
    """A folder of images and its sub-folders, in natural order (`2.png` before `10.png`).

    Captions and further values come from the `metadata.jsonl` nearest above an image, else the caption from a `.txt` beside it.
    Raises SpecError for a folder that is absent or empty, metadata that does not fit, and captions that are missing.
    """
    top = existing(base / (spec.images or ""), "images")
    conditions = condition_folder(spec, base)
    names = images_below(top, skip=conditions)
    if not names:
        raise SpecError(f"no images in '{top}'; {_found(top)}", path=("images",))
    values: list[dict[str, Any]] = [{} for _ in names]
    order = {name: i for i, name in enumerate(names)}
    folders = {folder for name in names for folder in Path(name).parents}
    for folder in sorted(folders, key=lambda f: (len(f.parts), f)):  # so that the nearest metadata is read last
        for name, line in read_metadata(top / folder / METADATA, top).items():
            if name not in order:
                raise SpecError(f"no image '{name}'{did_you_mean(name, names)}", where=line.where)
            values[order[name]] = line.values
    classes = labels(names, values)
    captions(top, names, values, spec.captions)
    found = same_stems(top, names, conditions) if conditions else None
    return FileItems(top, names, values, spec.channels, classes, found)


def open_classes(spec: Data, base: Path) -> FileItems:
    """A folder of class folders: the classes are their names, sorted; a class has all images at any depth below it.

    Raises SpecError for a folder that is absent, holds no class folders, an empty one, or images outside of them.
    """
    top = existing(base / (spec.classes or ""), "classes")
    conditions = condition_folder(spec, base)
    classes = sorted(p.name for p in top.iterdir() if p.is_dir() and not p.name.startswith(".") and p != conditions)
    if not classes:
        raise SpecError(f"no class folders in '{top}'; {_found(top)}", path=("classes",))
    names = images_below(top, skip=conditions)
    of = [name.partition("/")[0] for name in names]
    empty = sorted({*classes} - {*of})
    if empty:
        raise SpecError(f"no images in the class folder {few(empty, 'folder')} of '{top}'", path=("classes",))
    outside = [name for name in names if "/" not in name]
    if outside:
        raise SpecError(f"{few(outside, 'image')} outside of the class folders of '{top}'", path=("classes",))
    number = {name: i for i, name in enumerate(classes)}
    found = same_stems(top, names, conditions) if conditions else None
    return FileItems(top, names, [{"label": number[c]} for c in of], spec.channels, classes, found)


def existing(folder: Path, key: str) -> Path:
    """The folder, or a SpecError with the nearest name that exists."""
    if folder.is_dir():
        return folder
    if folder.exists():
        raise SpecError(f"must be a folder, '{folder}' is a file", path=(key,))
    if not folder.parent.is_dir():
        raise SpecError(f"no such folder '{folder}', nor '{folder.parent}'", path=(key,))
    near = did_you_mean(folder.name, (p.name for p in folder.parent.iterdir() if p.is_dir()))
    raise SpecError(f"no such folder '{folder}'{near}", path=(key,))


def images_below(top: Path, skip: Path | None = None) -> list[str]:
    """The images below a folder, as relative paths in natural order. Hidden files, and the folder `skip`, are left out."""
    known, names, seen = _suffixes(), [], set()
    for folder, folders, files in os.walk(top, followlinks=True):
        here = os.path.realpath(folder)
        if here in seen or (skip and here == os.path.realpath(skip)):
            folders.clear()
            continue
        seen.add(here)
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        kept = (f for f in files if os.path.splitext(f)[1].lower() in known and not f.startswith("."))
        names += [Path(folder, f).relative_to(top).as_posix() for f in kept]
    return sorted(names, key=natural)


def natural(name: str) -> list[tuple[int, str]]:
    """The key that sorts numbers in names by their value, folder by folder."""
    parts = re.split(r"(\d+)", name.replace("/", "\0"))
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts] + [(0, name)]


def condition_folder(spec: Data, base: Path) -> Path | None:
    """The folder of condition images, if conditions are given as one and not as `module:function`."""
    if spec.conditions is None or ":" in spec.conditions.name:
        return None
    if spec.conditions.options:
        raise SpecError("a folder has no options", path=("conditions", spec.conditions.name))
    return existing(base / spec.conditions.name, "conditions")


def same_stems(top: Path, names: Sequence[str], conditions: Path) -> list[Path]:
    """The condition image of each name: the same path below `conditions`, of any suffix. SpecError lists the missing ones."""
    found: dict[str, str] = {}
    for name in images_below(conditions):
        stem = os.path.splitext(name)[0]
        if stem in found:
            raise SpecError(f"'{found[stem]}' and '{name}' in '{conditions}' have the same stem", path=("conditions",))
        found[stem] = name
    missing = [name for name in names if os.path.splitext(name)[0] not in found]
    if missing:
        near = did_you_mean(os.path.splitext(missing[0])[0], found)
        raise SpecError(f"no condition image for {few(missing, 'image')} in '{conditions}'{near}", path=("conditions",))
    return [conditions / found[os.path.splitext(name)[0]] for name in names]


def few(names: Sequence[str], kind: str) -> str:
    """Names for a message: all of a few, else the first three and how many there are."""
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more {kind}s"


def _found(top: Path) -> str:
    suffixes = sorted({p.suffix or "no suffix" for p in top.rglob("*") if p.is_file()})
    return f"it has files with {', '.join(suffixes[:6])}" if suffixes else "it is empty"


@cache
def _suffixes() -> frozenset[str]:
    Image.init()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN)
