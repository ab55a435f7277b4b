"""What modules have computed from their weights in earlier calls, and keep: a trace does without it, as new weights would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

PLAIN = (dict, list, set)
TABLES = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def forgotten(model: nn.Module) -> Iterator[None]:
    """The model without what its modules drop when their mode changes, or when they are cast; it gets that back afterwards.

    timm's LeViT, TinyViT and EfficientFormer keep the biases of their attention so. A graph that had taken those for constants
    would go on with them when the weights have changed. What is asked to drop it are the modules' own `train` and `_apply`, on
    weights without values, and nothing but what is empty or None afterwards is taken from them.
    """
    own = [module for module in model.modules() if _drops(module)]
    if not own:
        yield
        return
    places = [vars(module) for module in model.modules()]
    before = [{key: (value, _contents(value)) for key, value in place.items() if key not in TABLES} for place in places]
    try:
        with contextlib.suppress(Exception), _without_values(model):  # the model's own code
            for module in own:
                mode = module.training
                module.train(not mode)
                module.train(mode)
                module.to("meta")
        for place, known in zip(places, before, strict=True):
            _put_back(place, known, dropped=True)
        yield
    finally:
        for place, known in zip(places, before, strict=True):
            _put_back(place, known, dropped=False)


def _drops(module: nn.Module) -> bool:
    """Whether a class that is not torch's own says what happens to a module that changes its mode, or is cast."""
    for name in ("train", "_apply"):
        home = next(cls for cls in type(module).__mro__ if name in vars(cls))
        if home.__module__.partition(".")[0] != "torch":
            return True
    return False


@contextlib.contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """The model on tensors of the meta device."""
    tables = [getattr(module, name) for module in model.modules() for name in TABLES[:2]]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            for key, value in table.items():
                if value is not None:
                    made = value.detach().to("meta")
                    table[key] = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
        yield
    finally:
        for table, known in zip(tables, before, strict=True):
            table.clear()
            table.update(known)


def _contents(value: Any) -> Any:
    return value.copy() if type(value) in PLAIN else None


def _put_back(place: dict[str, Any], known: dict[str, tuple[Any, Any]], dropped: bool) -> None:
    """Give a module its attributes back, but for those that are empty now, if they may stay `dropped`."""
    for key in [key for key in place if key not in known and key not in TABLES]:
        del place[key]
    for key, (value, contents) in known.items():
        now = place.get(key)
        empty = now is None or (type(now) in PLAIN and not now)
        if dropped and empty and key in place:
            continue
        place[key] = value
        if contents is not None and not _same(value, contents):
            _fill(value, contents)


def _same(value: Any, contents: Any) -> bool:
    if isinstance(value, dict):
        return len(value) == len(contents) and all(key in contents and contents[key] is item for key, item in value.items())
    if isinstance(value, list):
        return len(value) == len(contents) and all(a is b for a, b in zip(value, contents, strict=True))
    return bool(value == contents)


def _fill(value: Any, contents: Any) -> None:
    value.clear()
    value.extend(contents) if isinstance(value, list) else value.update(contents)
