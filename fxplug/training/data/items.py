"""Where samples come from: one protocol for folders, data sets on disk and import paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ...errors import SpecError
from ...settings import Data
from .files import open_classes, open_images
from .hub import open_dataset
from .own import condition_function, open_call


class Items(Protocol):
    """Samples by number.

    An item is a dict: `name`, and what there is of `image` and `condition` (PIL images, uint8 tensors [c, h, w], or float
    ones that are ready), `caption` (str), `label` (int), and other values that collate. An image that cannot be read raises
    `Unreadable`.
    """

    @property
    def sizes(self) -> list[tuple[int, int]] | None:
        """(h, w) of each image, found without decoding it, (0, 0) for one that is unreadable; None when unknown."""

    @property
    def root(self) -> str | None:
        """The folder that holds them, if one does."""

    @property
    def classes(self) -> list[str] | None:
        """The names of the labels; None when they have none."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, Any]: ...


def open_items(spec: Data, base: Path, *, test: bool = False) -> Items:
    """The samples that a `data` section names, or its `test` section; paths are relative to `base`.

    `test` only says how errors call the section, and which split of a data set is taken when none is given.
    Raises SpecError, whose path begins with `data`, or with the file and line of metadata that is wrong.
    """
    kinds = [kind for kind in ("images", "classes", "dataset", "call") if getattr(spec, kind) is not None]
    try:
        if len(kinds) != 1:
            raise SpecError(f"needs one of 'images', 'classes', 'dataset', 'call'; found {' and '.join(kinds) or 'none'}")
        if spec.conditions and ":" not in spec.conditions.name and kinds[0] in ("dataset", "call"):
            finding = f"a folder of them goes with files; with '{kinds[0]}' each sample has its own 'condition'"
            raise SpecError(finding, path=("conditions",))
        if spec.conditions and ":" in spec.conditions.name:
            condition_function(spec.conditions)
        if kinds == ["images"]:
            return open_images(spec, base)
        if kinds == ["classes"]:
            return open_classes(spec, base)
        return open_dataset(spec, base, "test" if test else "train") if kinds == ["dataset"] else open_call(spec)
    except SpecError as error:
        if error.path or error.finding == str(error):
            raise SpecError(error.finding, path=(*(("data", "test") if test else ("data",)), *error.path)) from error.__cause__
        raise
