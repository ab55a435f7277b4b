"""Where samples come from: one protocol for folders, data sets on disk and import paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ...errors import SpecError, did_you_mean
from ...spec.train_section import Data
from .files import open_classes, open_images
from .hub import open_dataset
from .user_dataset import condition_function, open_call


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


class Renumbered:
    """Items whose labels have the numbers of other `classes` of the same names."""

    def __init__(self, items: Items, classes: list[str]) -> None:
        self.items, self.classes = items, classes
        self._number = [classes.index(name) for name in items.classes or []]

    @property
    def sizes(self) -> list[tuple[int, int]] | None:
        """(h, w) of each image, as the items have them."""
        return self.items.sizes

    @property
    def root(self) -> str | None:
        """The folder of the items, if they have one."""
        return self.items.root

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Any]:
        item = self.items[i]
        return {**item, "label": self._number[item["label"]]} if "label" in item else item


def with_classes(items: Items, classes: list[str] | None) -> Items:
    """Test items with the label numbers of the training data, which may have more classes and so another order.

    Raises SpecError for a class that the training data do not have.
    """
    if classes is None or items.classes is None or items.classes == classes:
        return items
    unknown = [name for name in items.classes if name not in classes]
    if unknown:
        hint = did_you_mean(unknown[0], classes)
        more = f" and {len(unknown) - 1} more" * (len(unknown) > 1)
        finding = f"the class '{unknown[0]}'{more} is not among the {len(classes)} of the training data{hint}"
        raise SpecError(finding, path=("data", "test"))
    return Renumbered(items, classes)
