"""Where samples come from: one protocol for folders, Hugging Face data sets on disk, and any torch data set."""

from __future__ import annotations

import contextlib
import operator
import os
import traceback
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from ...core.errors import FxplugError, SpecError, TrainError, did_you_mean, prefix_path, quote
from ..import_paths import construct, import_function, import_name
from ..random_draws import preserve_random_state
from ..train_section import Data, Use
from .files import FileItems, Items, check_folder, open_files
from .image_files import Unreadable, convert_image, get_stored, read_size
from .image_sources import IMAGES, ImageFile
from .videos import VideoItems

NAMES = {
    "image": ("image", "img"),
    "caption": ("caption", "text"),
    "label": ("label", "labels", "fine_label"),
    "condition": ("condition", "conditioning", "conditioning_image"),
}
# the features that columns of Hugging Face have, the surest first
KINDS = {"image": ("image",), "label": ("class", "int", "text"), "caption": ("text",), "condition": ("image",)}


def open_items(spec: Data, base: Path, *, test: bool = False, prior: bool = False) -> Items:
    """Open the samples that a `data` section names, or its section `test` or `prior`; paths are relative to `base`.

    `test` and `prior` only set how errors call the section, and `test` the default split of a data set. Raises SpecError, whose
    path begins with `data`, or with the file and line of metadata that is wrong.
    """
    with prefix_path("data", *["test"] * test, *["prior"] * prior):
        if spec.conditions and ":" in spec.conditions.name:
            import_function(spec.conditions, ("conditions",))
        elif spec.conditions and (spec.dataset or spec.call):
            kind = "dataset" if spec.dataset else "call"
            finding = f"a folder of conditions is only for image files; with '{kind}' each sample has its own 'condition'"
            raise SpecError(finding, path=("conditions",))
        if spec.dataset is not None:
            return open_dataset(spec, base, "test" if test else "train")
        if spec.call is not None:
            return open_call(spec)
        return open_files(spec, base, FileItems if spec.videos is None else VideoItems)


def match_test_items(test: Items, train: Items) -> Items:
    """Map the labels of test items to those of the training data, which may have more classes and so another order.

    A note of the training data says where both have the same files. Raises SpecError for a class that the training data do not
    have, and for labels that are names in one and numbers in the other.
    """
    if shared := _shared_files(test, train):
        finding = f"{len(shared)} of {len(test)} test images are trained on too, such as '{shared[0]}'"
        train.notes = [*train.notes, finding]
    names, classes = test.classes, train.classes
    both = isinstance(test, OwnItems) and isinstance(train, OwnItems) and test.root is train.root is None
    kinds = {_kind_of_labels(test), _kind_of_labels(train)}
    if kinds == {"names", "numbers"} and not both:
        which = ("test", "training") if names is not None else ("training", "test")
        named = (names or classes or [""])[0]
        finding = f"the labels of the {which[0]} data are names, such as '{named}', those of the {which[1]} data are numbers"
        raise SpecError(f"{finding}: they cannot be matched; write both in one way", path=("data", "test"))
    if classes is None or names is None or names == classes:
        return test
    for one, kind in ((classes, "training"), (names, "test")):
        if twice := [name for name, count in Counter(one).items() if count > 1]:
            finding = f"the classes of both cannot be matched by name: the {kind} data have two called '{twice[0]}'"
            raise SpecError(finding, path=("data", "test"))
    unknown = [name for name in names if name not in classes]
    if unknown:
        hint = did_you_mean(unknown[0], classes)
        more = f" and {len(unknown) - 1} more" * (len(unknown) > 1)
        finding = f"the class '{unknown[0]}'{more} is not among the {len(classes)} of the training data{hint}"
        raise SpecError(finding, path=("data", "test"))
    test.numbers = [classes.index(name) for name in names]
    return test


def _kind_of_labels(items: Items) -> str | None:
    if items.classes is not None or items.labels is not None:
        return "numbers" if items.classes is None else "names"
    if isinstance(items, OwnItems):
        with contextlib.suppress(FxplugError, Unreadable), preserve_random_state():  # told when it is trained on
            return "numbers" if "label" in items[0] else None
    return None


def _shared_files(test: Items, train: Items) -> list[str]:
    """Return the names of test images that are files of the training data."""
    if not (isinstance(test, FileItems) and isinstance(train, FileItems)):
        return []
    folders: dict[str, str] = {}

    def real(items: FileItems, name: str) -> str:
        folder, file = os.path.split(os.path.join(items.top, name))
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        path = os.path.join(folders[folder], file)
        return os.path.realpath(path) if os.path.islink(path) else path

    trained = {real(train, name) for name in train.names}
    return [name for name in test.names if real(test, name) in trained]


class OwnItems(Items):
    """The samples of a map-style data set as items.

    A sample is a mapping (`image` or `img`, `label`, `caption` or `text`, `condition`, and anything that collates), or a tuple
    (image, label) or (image, caption). `columns` gives keys other names. What counts as an image, `convert_image` says. The
    data set's `classes`, and its `sizes` [(h, w), ...] which buckets need, are used where it has them. `root` is the folder of
    a Hugging Face data set.
    """

    def __init__(self, dataset: Any, spec: Data, root: str | None = None) -> None:
        self.dataset, self.columns, self.channels, self.captions = dataset, spec.columns, spec.channels, spec.captions
        self.background = spec.background
        self.root, self.classes = root, get_classes(dataset)
        if root is None and self.classes is None:
            self.labels = get_labels(dataset)

    @property
    def has_files(self) -> bool:  # type: ignore[override]
        """Whether images, and conditions, are stored as files of a format of images."""
        columns = [self.columns[key] for key in IMAGES if key in self.columns]
        return self.root is not None and all(type(self.dataset.features[name]).__name__ == "Image" for name in columns)

    @cached_property
    def sizes(self) -> list[tuple[int, int]] | None:
        """(h, w) of each image, where the data set has them, or image files with headers; else None."""
        if self.root is None:
            return getattr(self.dataset, "sizes", None)
        name = self.columns["image"]
        if type(self.dataset.features[name]).__name__ != "Image":
            return None
        rows = self.dataset.select_columns([name])
        return [(0, 0) if (file := rows[i][name]) is None else read_size(get_stored(file)) for i in range(len(rows))]

    def __len__(self) -> int:
        return len(self.dataset)

    def sample(self, i: int) -> dict[str, Any]:
        """Return item `i`. Raises Unreadable where the data set raises OSError, TrainError for any other error of it."""
        name = f"dataset[{i}]"
        try:
            sample = self.dataset[i]
        except Unreadable:
            raise
        except OSError as error:
            raise Unreadable(name, str(error) or type(error).__name__) from error
        except Exception as error:  # the data set's, which is the user's
            at = traceback.extract_tb(error.__traceback__)[-1]
            finding = f"{name} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})"
            raise TrainError(finding) from error
        item = add_keys(sample, name, self.columns)
        if item.get("caption", "") is None:
            if self.captions == "required":
                raise TrainError(f"{name} has no caption: write one, or set 'captions: optional'")
            item["caption"] = ""
        name = item.setdefault("name", name)
        for key, channels in (("image", self.channels), ("condition", self.channels), ("loss_mask", 1)):
            if key in item:
                item[key] = self._image(item[key], name, channels)
        if "label" in item:
            item["label"] = self._label(item["label"], name)
            if self.root is not None and self.classes is not None and item["label"] == -1:
                del item["label"]  # a ClassLabel of none
        if "caption" in item and self.captions == "none":
            del item["caption"]
        return item

    def _image(self, value: Any, name: str, channels: int) -> Image.Image | Tensor | ImageFile:
        """Return an image of a sample; one that lies on the disk as a file of its own format is not decoded."""
        if self.root is None or not isinstance(value, dict):
            return convert_image(value, name, channels, self.background)
        known = f"{name} ({value['path']})" if value.get("path") else name
        return ImageFile(get_stored(value), known, channels, self.background)

    def _label(self, label: Any, name: str) -> int:
        if isinstance(label, str) and self.classes is not None:
            if label not in self.classes:
                raise TrainError(f"{name}: no class '{label}'{did_you_mean(label, self.classes)}")
            return self.classes.index(label)
        try:
            number = operator.index(label.item() if hasattr(label, "item") else label)
        except (TypeError, RuntimeError, ValueError):
            finding = f"{name}: a label must be a whole number, not {quote(label)}; for text the data set must have 'classes'"
            raise TrainError(finding) from None
        count = self.class_count
        if count is not None and not 0 <= number < count and (self.root is None or number != -1):
            raise TrainError(f"{name} has the label {quote(number)}, and its data set has {count} classes, 0 to {count - 1}")
        return number


def get_classes(dataset: Any) -> list[str] | None:
    """Return the names of a data set's classes, if it has them."""
    if isinstance(dataset, Subset):
        return get_classes(dataset.dataset)
    classes = getattr(dataset, "classes", None)
    return [str(name) for name in classes] if isinstance(classes, (list, tuple)) else None


def get_labels(dataset: Any) -> set[int] | None:
    """Return the labels of a data set that stores them all, as torchvision's and TensorDataset do; else None."""
    labels = _all_labels(dataset)
    return {*labels} if labels and all(type(label) is int for label in labels) else None


def _all_labels(dataset: Any) -> list[Any] | None:
    if isinstance(dataset, Subset):
        inner = _all_labels(dataset.dataset)
        return None if inner is None else [inner[i] for i in dataset.indices]
    found: Any = getattr(dataset, "targets", None) if getattr(dataset, "target_transform", None) is None else None
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        found = dataset.tensors[1]
    labels = found.tolist() if isinstance(found, (Tensor, np.ndarray)) else found
    return labels if isinstance(labels, list) and len(labels) == len(dataset) else None


def add_keys(sample: Any, name: str, columns: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return a sample, or a batch, with the keys of an item. Raises TrainError if it is neither a mapping nor a pair."""
    if isinstance(sample, Mapping):
        for column in columns.values():
            if column not in sample:
                found = ", ".join(map(str, sample))
                raise TrainError(f"{name} has no '{column}'{did_you_mean(column, sample)}, it has {found}")
        item = {key: value for key, value in sample.items() if key not in columns.values()}
        item |= {key: sample[column] for key, column in columns.items()}
        for key, others in NAMES.items():
            for other in others:
                if key not in item and other in item:
                    item[key] = item.pop(other)
        return item
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        second = sample[1]
        text = isinstance(second, str) or (isinstance(second, (tuple, list)) and second and isinstance(second[0], str))
        return {"image": sample[0], "caption" if text else "label": second}
    kind = f"a {type(sample).__name__}" + (f" of {len(sample)}" if isinstance(sample, (tuple, list)) else "")
    raise TrainError(f"{name} must be a mapping or a tuple (image, label), not {kind}")


def open_dataset(spec: Data, base: Path, split: str = "train") -> OwnItems:
    """Open a data set of `save_to_disk`; `split` is the default for `spec.split`.

    Columns are found by their features first (Image, ClassLabel), by their names second; `columns` overrides both and adds
    others. A text label is numbered by the sorted texts. Raises SpecError for a folder that is no data set, and for splits and
    columns that do not exist or are ambiguous.
    """
    folder = check_folder(base / (spec.dataset or ""), "dataset")
    try:
        import datasets
    except ImportError:
        raise SpecError("needs the package 'datasets': pip install datasets", path=("dataset",)) from None
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # datasets', about files of anybody's
        finding = f"'{folder}' is not a data set written by save_to_disk: {error}"
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
        values = set() if features[label] == "class" else set(dataset[label])
        if None in values:
            raise SpecError(f"column '{label}' of '{folder}' has rows without a label", path=("columns", "label"))
        if features[label] == "class":
            classes = list(feature.names)
        elif features[label] == "text":
            classes = sorted(values)
        else:
            numbers = values
    used = dataset.select_columns(list(dict.fromkeys(columns.values())))
    items = OwnItems(used, spec.model_copy(update={"columns": columns}), str(folder))
    items.classes, items.labels = classes, numbers
    return items


def _columns(features: dict[str, str], spec: Data, folder: Path) -> dict[str, str]:
    """Return the column of each key: from `columns`, else the only one with a fitting feature, or one with a fitting name."""
    columns = dict(spec.columns)
    for key, column in columns.items():
        if column not in features:
            near = did_you_mean(column, features)
            raise SpecError(f"no column '{column}'{near}; '{folder}' has {', '.join(features)}", path=("columns", key))
    found = ", ".join(f"{name} ({kind})" for name, kind in features.items())
    for key, kinds in KINDS.items():
        if key in columns or (key == "caption" and spec.captions == "none"):
            continue
        free = {name: kind for name, kind in features.items() if name not in columns.values()}
        sure = [name for name, kind in free.items() if kind == kinds[0] and key != "condition"]
        named = [name for name in NAMES[key] if name in free and (free[name] in kinds or key == "image")]
        if len(sure) != 1 or (named and key == "caption"):
            sure = sorted(named, key=lambda name: free[name] != kinds[0]) or (sure if key == "image" else [])
        if len(sure) > 1 and not named:
            finding = f"{len(sure)} columns of '{folder}' may be the {key}: {', '.join(sure)}"
            raise SpecError(f"{finding}; choose one with columns: {{{key}: ...}}", path=("dataset",))
        if sure:
            columns[key] = sure[0]
    if (label := columns.get("label")) and features[label] not in KINDS["label"]:
        finding = f"column '{label}' is not a label: it has {features[label]}, not whole numbers or text"
        raise SpecError(finding, path=("columns", "label"))
    if "image" not in columns:
        finding = f"no image column in '{folder}', it has {found}; name it with columns: {{image: ...}}"
        raise SpecError(finding, path=("dataset",))
    if spec.captions == "required" and not {"caption", "label"} & columns.keys():
        raise SpecError(
            f"no caption and no label column in '{folder}', it has {found}; name one with columns: {{caption: ...}}, or set "
            "'captions: none'",
            path=("dataset",),
        )
    return columns


def _kind(feature: Any) -> str:
    name, dtype = type(feature).__name__, str(getattr(feature, "dtype", ""))
    if name in ("Image", "ClassLabel"):
        return {"Image": "image", "ClassLabel": "class"}[name]
    if name == "Value" and dtype in ("string", "large_string"):
        return "text"
    return "int" if name == "Value" and "int" in dtype else (dtype if name == "Value" else name)


def make_items(dataset: Any, spec: Data, name: str) -> OwnItems:
    """Return the items of a data set named `name` in errors. Raises SpecError if it has no length, no indices or no samples."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        why = "it needs a length and an index, so that the order can be repeated and resumed"
        raise SpecError(f"{name} is a {type(dataset).__name__}, not a map-style data set: {why}", path=("call",))
    if not len(dataset):
        raise SpecError(f"{name} has no samples", path=("call",))
    return OwnItems(dataset, spec)


def open_call(spec: Data) -> OwnItems:
    """Open the data set that `call` names: a class or function, called with its options, or an object.

    Raises SpecError for what cannot be imported or called so, and for anything that has no length or no indices.
    """
    use = spec.call or Use("", {})
    made = import_name(use.name, ("call",))
    dataset = construct(made, use, ("call",)) if callable(made) else made
    return make_items(dataset, spec, f"what '{use.name}' gives")
