"""Hugging Face data sets that were saved to disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import SpecError, TrainError, did_you_mean
from ...spec.train_section import Data
from .files import existing
from .image_files import as_image, read_image, read_size

NAMES = {
    "image": ("image", "img"),
    "caption": ("caption", "text"),
    "label": ("label", "labels", "fine_label"),
    "condition": ("condition", "conditioning", "conditioning_image"),
}


class HubItems:
    """Rows of a Hugging Face data set; `columns` says which column each key is, `numbers` which label a text is."""

    def __init__(
        self, dataset: Any, columns: dict[str, str], spec: Data, classes: list[str] | None, numbers: dict[str, int] | None
    ) -> None:
        self.dataset, self.columns, self.channels, self.captions = dataset, columns, spec.channels, spec.captions
        self.classes, self.numbers = classes, numbers
        self.root: str | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """The columns under their keys, and `name`. Raises Unreadable."""
        row, name = self.dataset[i], f"dataset[{i}]"
        item: dict[str, Any] = {key: row[column] for key, column in self.columns.items()}
        if self.numbers is not None:
            item["label"] = self.numbers[item["label"]]
        if item.get("caption", "") is None:
            if self.captions == "required":
                raise TrainError(f"{name} has no caption; give it one, or say 'captions: optional'")
            item["caption"] = ""
        for key in ("image", "condition"):
            if key in item:
                item[key] = self._read(item[key], name)
        return {**item, "name": name}

    def _read(self, value: Any, name: str) -> Any:
        if isinstance(value, dict):  # an Image column that is not decoded
            return read_image(_source(value), name, self.channels)
        return as_image(value, name, self.channels)

    @cached_property
    def sizes(self) -> list[tuple[int, int]] | None:
        """(h, w) of each image, from the headers; None where images are arrays."""
        name = self.columns["image"]
        if type(self.dataset.features[name]).__name__ != "Image":
            return None
        rows = self.dataset.select_columns([name])
        values = (rows[i][name] for i in range(len(rows)))
        return [(0, 0) if value is None else read_size(_source(value)) for value in values]


def open_dataset(spec: Data, base: Path, split: str = "train") -> HubItems:
    """A data set of `save_to_disk`; `split` is the one taken where `spec.split` does not say.

    Columns are found by their features first (Image, ClassLabel), by their names second; `columns` overrules both and adds
    others. A text label is numbered by the sorted texts. Raises SpecError for a folder that is none, splits and columns that
    do not exist or cannot be told apart.
    """
    folder = existing(base / (spec.dataset or ""), "dataset")
    try:
        import datasets
    except ImportError:
        raise SpecError("needs the package 'datasets': pip install datasets", path=("dataset",)) from None
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # datasets', about files of anybody's
        finding = f"'{folder}' is no data set written by save_to_disk: {error}"
        raise SpecError(finding, path=("dataset",)) from error
    dataset: Any = loaded
    if isinstance(loaded, datasets.DatasetDict):
        split = spec.split or split
        if split not in loaded:
            finding = f"no split '{split}'{did_you_mean(split, loaded)}; '{folder}' has {', '.join(loaded)}"
            raise SpecError(finding, path=("split",))
        dataset = loaded[split]
    elif spec.split not in (None, str(dataset.split)):
        raise SpecError(f"'{folder}' has no splits, it is one data set", path=("split",))
    if not len(dataset):
        raise SpecError(f"no rows in '{folder}'", path=("dataset",))
    features = {name: _kind(feature) for name, feature in dataset.features.items()}
    columns = _columns(features, spec, folder)
    for name in {column for key, column in columns.items() if features[column] == "image"}:
        dataset = dataset.cast_column(name, datasets.Image(decode=False))
    classes, numbers = None, None
    if label := columns.get("label"):
        feature = dataset.features[label]
        if features[label] == "class":
            classes = list(feature.names)
        elif features[label] == "text":
            classes = sorted(set(dataset[label]))
            numbers = {name: i for i, name in enumerate(classes)}
    items = HubItems(dataset, columns, spec, classes, numbers)
    items.root = str(folder)
    return items


def _columns(features: dict[str, str], spec: Data, folder: Path) -> dict[str, str]:
    columns = dict(spec.columns)
    for key, column in columns.items():
        if column not in features:
            near = did_you_mean(column, features)
            raise SpecError(f"no column '{column}'{near}; '{folder}' has {', '.join(features)}", path=("columns", key))
    for key, kinds in (("image", ["image"]), ("label", ["class", "int", "text"]), ("caption", ["text"])):
        if key not in columns and not (key == "caption" and spec.captions == "none"):
            free = {name: kind for name, kind in features.items() if name not in columns.values()}
            if chosen := _find(key, kinds, free, folder):
                columns[key] = chosen
    for name in NAMES["condition"]:
        if "condition" not in columns and features.get(name) == "image" and name not in columns.values():
            columns["condition"] = name
    found = ", ".join(f"{name} ({kind})" for name, kind in features.items())
    if columns.get("label") and features[columns["label"]] not in ("class", "int", "text"):
        finding = f"column '{columns['label']}' is no label: it has {features[columns['label']]}, not whole numbers or text"
        raise SpecError(finding, path=("columns", "label"))
    if "image" not in columns:
        finding = f"no image column in '{folder}', it has {found}; name it with columns: {{image: ...}}"
        raise SpecError(finding, path=("dataset",))
    if spec.captions == "required" and not {"caption", "label"} & columns.keys():
        raise SpecError(
            f"no caption and no label column in '{folder}', it has {found}; name one with columns: {{caption: ...}}, "
            "or say 'captions: none'",
            path=("dataset",),
        )
    return columns


def _find(key: str, kinds: Sequence[str], features: dict[str, str], folder: Path) -> str | None:
    """The column of a key: the only one whose feature tells, else the one that is called so, else the only text."""
    named = [name for name in NAMES[key] if name in features and (features[name] in kinds or key == "image")]
    sure = [name for name, kind in features.items() if kind == kinds[0]]
    if named and (key == "caption" or len(sure) != 1):
        return next((name for name in named if name in sure), named[0])
    if len(sure) > 1 and key == "image":
        finding = f"{len(sure)} columns of '{folder}' may be the {key}: {', '.join(sure)}"
        raise SpecError(f"{finding}; say which with columns: {{{key}: ...}}", path=("dataset",))
    return sure[0] if len(sure) == 1 else None


def _kind(feature: Any) -> str:
    name, dtype = type(feature).__name__, str(getattr(feature, "dtype", ""))
    if name in ("Image", "ClassLabel"):
        return {"Image": "image", "ClassLabel": "class"}[name]
    if name == "Value" and dtype in ("string", "large_string"):
        return "text"
    return "int" if name == "Value" and "int" in dtype else (dtype if name == "Value" else name)


def _source(value: dict[str, Any]) -> bytes | Path:
    return value["bytes"] if value["bytes"] is not None else Path(value["path"])
