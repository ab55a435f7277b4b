"""What is known of the images of a folder: lines of `metadata.jsonl`, and captions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import SpecError, did_you_mean
from ...files import reading
from ...files.reading import parse_json
from ...limits import DEFAULT, Limits
from ...spec.yaml_source import Where, shown

METADATA = "metadata.jsonl"  # the form of Hugging Face's ImageFolder
OWN = ("image", "condition", "name", "index")  # keys of an item that the loader fills


@dataclass(frozen=True)
class Line:
    """The values that one line gives an image, and where it stands."""

    values: dict[str, Any]
    where: Where


def read_metadata(file: Path, top: Path, limits: Limits = DEFAULT) -> dict[str, Line]:
    """The lines of a `metadata.jsonl` by image, relative to `top`.

    `file_name` is relative to the file's folder; `text` or `caption` is the caption; other keys are kept, null is left out.
    There are none without the file. Raises SpecError with file and line.
    """
    lines: dict[str, Line] = {}
    if not os.path.lexists(file):
        return lines
    below = file.parent.relative_to(top)
    for number, text in enumerate(_text(file, limits.lines).split("\n"), 1):
        if not text.strip():
            continue
        where = Where(str(file), number)
        values = parse_json(text, lambda finding, where=where: SpecError(finding, where=where), limits)  # type: ignore[misc]
        if not isinstance(values, dict):
            raise SpecError(f"must be a mapping, not {shown(values)}", where=where)
        values = {key: value for key, value in values.items() if value is not None}
        name = values.pop("file_name", None)
        if not isinstance(name, str):
            hint = did_you_mean("file_name", values) if name is None else ""
            raise SpecError(f"needs 'file_name', the path of an image{hint}", where=where)
        name = (below / name).as_posix()
        if "text" in values and "caption" in values:
            raise SpecError("both 'text' and 'caption'", where=where)
        if "text" in values:
            values["caption"] = values.pop("text")
        if not isinstance(values.get("caption", ""), str):
            raise SpecError(f"the caption must be text, not {shown(values['caption'])}", where=where)
        if taken := [key for key in OWN if key in values]:
            raise SpecError(f"the key '{taken[0]}' is the loader's own; name it otherwise", where=where)
        if name in lines:
            raise SpecError(f"'{name}' again, after line {lines[name].where.line}", where=where)
        lines[name] = Line(values, where)
    return lines


def labels(names: Sequence[str], values: list[dict[str, Any]]) -> list[str] | None:
    """Turn labels that are text into numbers, in place, and give the classes: the texts, sorted. None without such labels.

    Raises SpecError where some images have a key and others do not, and for labels of several kinds.
    """
    for key in sorted({key for value in values for key in value if key != "caption"}):
        without = [name for name, value in zip(names, values, strict=True) if key not in value]
        if without:
            given = f"'{key}' for {len(names) - len(without)} of {len(names)} images"
            raise SpecError(f"{METADATA} gives {given}, not for '{without[0]}'", path=("images",))
    found = [value["label"] for value in values if "label" in value]
    kinds = {type(label) for label in found}
    if kinds <= {int}:
        return None
    if kinds != {str}:
        several = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise SpecError(f"labels in {METADATA} must all be whole numbers or all text, not {several}", path=("images",))
    classes = sorted(set(found))
    number = {name: i for i, name in enumerate(classes)}
    for value in values:
        value["label"] = number[value["label"]]
    return classes


def captions(
    names: Sequence[str], values: list[dict[str, Any]], law: Literal["required", "optional", "none", "filename"]
) -> None:
    """Hold the captions of images to the law, in place.

    `required`: an image without one, or with an empty one, is a SpecError, unless all images have labels and none a caption.
    `filename` is the same, and has found more captions. `optional`: it is "". `none`: there are no captions.
    """
    if law == "none":
        for value in values:
            value.pop("caption", None)
        return
    if law == "optional":
        for value in values:
            value.setdefault("caption", "")
        return
    missing = [name for name, value in zip(names, values, strict=True) if not value.get("caption")]
    if not missing:
        return
    if not (len(missing) == len(names) and all("label" in value for value in values)):
        first = ", ".join(f"'{name}'" for name in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise SpecError(
            f"{len(missing)} of {len(names)} images have no caption: {first}; put a .txt beside each or a line in {METADATA}, "
            "or say 'captions: optional', 'captions: filename' or 'captions: none'",
            path=("images",),
        )
    for value in values:
        value.pop("caption", None)


def _text(file: Path, limit: int) -> str:
    return reading.text(file, limit, lambda finding: SpecError(finding, where=Where(str(file))))
