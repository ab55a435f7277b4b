"""What a pass declares beside its rules: inputs, networks, and the keywords of a parallel plan, read and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ..errors import SpecError
from .sections import Section, checked, number, whole
from .yaml_source import shown

_SIZE = re.compile(r"\s*(\d+|[^\W\d]\w*)(\s*\*\s*(\d+|[^\W\d]\w*))*\s*")


def _sizes(value: Any) -> list[int | str] | None:
    if value is not None and not isinstance(value, (list, tuple)):
        raise SpecError(f"must be a list of sizes and names, not {shown(value)}")
    for size in value or ():
        if isinstance(size, bool) or not (isinstance(size, int) or (isinstance(size, str) and _SIZE.fullmatch(size))):
            raise SpecError(f"must be a number, a name, or numbers and names with '*', such as 8*h; not {shown(size)}")
    return value  # type: ignore[return-value]


def _tries(value: Any) -> dict[str, list[int]]:
    value = value or {}
    if not isinstance(value, Mapping) or not all(isinstance(sizes, (list, tuple)) for sizes in value.values()):
        raise SpecError(f"must be a mapping of names to lists of sizes, not {shown(value)}")
    return {name: list(sizes) for name, sizes in value.items()}


def _used(value: Any) -> Any:
    if value is None:
        raise SpecError("a network is a module, a folder, or 'package.module:function'")
    return value


def _arguments(value: Any) -> Any:
    if not isinstance(value, (Mapping, list, tuple)):
        raise SpecError(f"must be a mapping or a list, not {shown(value)}")
    return value


class Input(Section):
    """A new input of the model: its sizes, and what it is where it is not given."""

    shape: Annotated[Any, checked(_sizes)] = None
    dtype: Any = None
    default: Annotated[Any, checked(number)] = None
    tries: Annotated[Any, checked(_tries)] = Field(default={}, alias="try")


class Network(Section):
    """A network that is traced into the graph."""

    use: Annotated[Any, checked(_used)] = Field(description="a module, a folder, or 'package.module:function'")
    args: Annotated[Any, checked(_arguments)] = {}
    options: Any = None
    neutral: Any = None


class Plan(Section):
    """The keywords of a plan, as far as they can be checked without a model."""

    ulysses: Annotated[int, whole(1)] = 1
    ring: Annotated[int, whole(1)] = 1
    batch: Annotated[int, whole(1)] = 1
    rows: Annotated[int, whole(1)] = 1
    tensor: Annotated[int, whole(1)] = 1
    split: dict[str, int] | None = None
    at: str | None = Field(default=None, description="the path of a region")
    stages: Annotated[int | None, whole(1, None)] = None
    patches: Annotated[int | None, whole(1, None)] = None
    stale: bool = False
    warmup: Annotated[int | None, whole(1, None)] = None
    correct: Annotated[int | None, whole(0, None)] = None
    steps: Annotated[int | None, whole(1, None)] = None
    clock: str | None = Field(default=None, description="the name of an input")
