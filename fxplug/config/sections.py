"""Sections of a configuration: what an extension brings as a key of it, as `train` and `export` are. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel

from ..core import extensions


@dataclass(frozen=True)
class ConfigSection:
    """A key of a configuration that an extension brings.

    An extension names it in `Extension.sections`, below the key.

    Args:
        annotation: What the value is: a pydantic model, alone or with None where the key may be left out.
        field: Its default, text and example, as `declare` makes it.
        headings: The models that are described on the page of keys, in their order, each with its heading.
        options: The models of options of what fxplug ships, by name, for a field of a model that is chosen by name.
    """

    annotation: Any
    field: Any
    headings: Mapping[type[BaseModel], str]
    options: Mapping[tuple[type[BaseModel], str], Mapping[str, type[BaseModel]]] = field(default_factory=dict)


@cache
def read_sections() -> dict[str, ConfigSection]:
    """Return what the extensions bring, by key. Raises ClashError where two bring one key, FxplugError for a failed import."""
    return {key: extensions.import_part("sections", key) for key in extensions.list_parts("sections")}
