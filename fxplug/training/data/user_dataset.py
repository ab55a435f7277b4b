"""Any torch data set, made by an import path."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.utils.data import IterableDataset

from ...errors import SpecError, TrainError, did_you_mean, shown
from ...spec.import_path import import_target
from ...spec.train_section import Data, Use
from .hub import NAMES
from .image_files import Unreadable, as_image


class OwnItems:
    """The samples of a map-style data set as items.

    A sample is a mapping (`image` or `img`, `label`, `caption` or `text`, `condition`, and anything that collates), or a tuple
    (image, label) or (image, caption). `columns` gives keys other names. What counts as an image, `as_image` says. The data
    set's `classes`, and its `sizes` [(h, w), ...] which buckets need, are used where it has them.
    """

    def __init__(self, dataset: Any, spec: Data) -> None:
        self.dataset, self.columns, self.channels, self.captions = dataset, spec.columns, spec.channels, spec.captions
        classes = getattr(dataset, "classes", None)
        self.classes: list[str] | None = [str(name) for name in classes] if isinstance(classes, (list, tuple)) else None
        self.root: str | None = None
        self.sizes: list[tuple[int, int]] | None = getattr(dataset, "sizes", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """One sample. Raises Unreadable where the data set raises OSError, TrainError for any other error of it."""
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
        item = keyed(sample, name, self.columns)
        name = item.setdefault("name", name)
        for key in ("image", "condition"):
            if key in item:
                item[key] = as_image(item[key], name, self.channels)
        if "label" in item:
            item["label"] = self._label(item["label"], name)
        if "caption" in item and self.captions == "none":
            del item["caption"]
        return item

    def _label(self, label: Any, name: str) -> int:
        if isinstance(label, str) and self.classes is not None:
            if label not in self.classes:
                raise TrainError(f"{name}: no class '{label}'{did_you_mean(label, self.classes)}")
            return self.classes.index(label)
        try:
            return operator.index(label.item() if hasattr(label, "item") else label)
        except (TypeError, RuntimeError, ValueError):
            finding = f"{name}: a label must be a whole number, not {shown(label)}; text needs the data set to have 'classes'"
            raise TrainError(finding) from None


def keyed(sample: Any, name: str, columns: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """A sample, or a batch, with the keys of an item. Raises TrainError for one that is neither a mapping nor a pair."""
    if isinstance(sample, Mapping):
        item = dict(sample)
        for key, column in columns.items():
            if column not in item:
                found = ", ".join(map(str, item))
                raise TrainError(f"{name} has no '{column}'{did_you_mean(column, item)}, it has {found}")
            item[key] = item.pop(column)
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


def own_items(dataset: Any, spec: Data, name: str) -> OwnItems:
    """The items of a data set that is called `name`. Raises SpecError for one without length or numbers, or without samples."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        why = "an order that can be repeated and resumed needs samples that have a length and numbers"
        raise SpecError(f"{name} is a {type(dataset).__name__}, not a map-style data set: {why}", path=("call",))
    if not len(dataset):
        raise SpecError(f"{name} has no samples", path=("call",))
    return OwnItems(dataset, spec)


def open_call(spec: Data) -> OwnItems:
    """The data set that `call` names: a class or function, called with its options, or an object.

    Raises SpecError for what cannot be imported or called so, and for anything that has no length or no indices.
    """
    use = spec.call or Use("", {})
    try:
        made = import_target(use.name)
        dataset: Any = made(**use.options) if callable(made) else made
    except SpecError as error:
        raise SpecError(error.finding, path=("call",)) from None
    except Exception as error:  # the user's function
        finding = f"'{use.name}' raised {type(error).__name__}: {error}"
        raise SpecError(finding, path=("call", use.name)) from error
    return own_items(dataset, spec, f"what '{use.name}' gives")


def condition_function(use: Use) -> Any:
    """The function image -> condition image that `conditions: module:function` names; of a class, an instance."""
    try:
        made = import_target(use.name)
    except SpecError as error:
        raise SpecError(error.finding, path=("conditions",)) from None
    if isinstance(made, type):
        return made(**use.options)
    if callable(made):
        return partial(made, **use.options) if use.options else made
    raise SpecError(f"'{use.name}' is no function, but a {type(made).__name__}", path=("conditions",))
