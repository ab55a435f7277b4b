"""What is known of other tools, as data: formats.yaml of adapter files, families.yaml of the names of layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def read_table(name: str) -> Any:
    """Return the rows of a table, `formats` or `families`."""
    text = (Path(__file__).parent / f"{name}.yaml").read_text("utf-8")
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()


FORMATS: Mapping[str, Mapping[str, Any]] = read_table("formats")["formats"]  # that are written
PARTS: tuple[str, ...] = tuple(read_table("formats")["parts"])  # of a pipeline
