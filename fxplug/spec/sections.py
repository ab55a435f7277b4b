"""What is written as a mapping, held to a model of its keys; and pydantic's findings in the words of all other errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from ..errors import LONGEST, SpecError, brief, cut, did_you_mean
from .yaml_source import shown

_KINDS = {
    "bool_type": "true or false",
    "string_type": "text",
    "int_type": "a whole number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "float_type": "a number",
}
_BOUNDS = {"greater_than_equal": "{} or more", "greater_than": "above {}", "less_than": "below {}"}


class Section(BaseModel):
    """What all sections share: an unknown key and a value of another type are errors, and what was read does not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def __repr__(self) -> str:
        given = (f"{name}={brief(getattr(self, name, None), 160)}" for name in type(self).model_fields)
        return cut(f"{type(self).__name__}({', '.join(given)})", LONGEST)

    __str__ = __repr__


S = TypeVar("S", bound=BaseModel)


class Finding(NamedTuple):
    """What is wrong, where below the section, and the key that is meant where that is not the last part of the way."""

    text: str
    path: tuple[str | int, ...]
    key: str | None = None


def located(error: SpecError) -> PydanticCustomError:
    """A SpecError as pydantic takes it, which adds the way to the value."""
    return PydanticCustomError("spec", "{finding}", {"finding": error.finding, "path": list(error.path)})


def checked(read: Callable[[Any], Any]) -> PlainValidator:
    """A function that reads a value, or raises SpecError, as the validator of a field."""

    def validate(value: Any) -> Any:
        try:
            return read(value)
        except SpecError as error:
            raise located(error) from None

    return PlainValidator(validate)


def whole(least: int, *others: Any) -> PlainValidator:
    """The validator of a whole number of at least so many, or of one of some other values."""

    def read(value: Any) -> Any:
        if value not in others and (type(value) is not int or value < least):
            raise SpecError(f"must be a whole number, {least} or more, not {shown(value)}")
        return value

    return checked(read)


def number(value: Any) -> Any:
    """A number or None. Raises SpecError for anything else."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise SpecError(f"must be a number, not {shown(value)}")
    return value


def held(section: type[S], given: Any, *path: str | int) -> S:
    """What was given at `path`, held to a section. Raises SpecError about the first thing that is wrong."""
    if not isinstance(given, (Mapping, section)):
        keys = ", ".join(_written(section))
        raise SpecError(f"must be a mapping of {keys}, not {shown(given)}", path=path)
    try:
        return section.model_validate(dict(given) if isinstance(given, Mapping) else given)
    except ValidationError as error:
        found = list(findings(error, section))
        first = next((one for one in found if one.key), found[0])  # a key that is written wrong may be the one that is missing
        raise SpecError(first.text, path=(*path, *first.path), key=first.key) from None


def findings(error: ValidationError, section: type[BaseModel]) -> Iterator[Finding]:
    """What pydantic found in a section, in our words."""
    for item in error.errors():
        path, kind, value = item["loc"], item["type"], item["input"]
        if kind == "spec":
            yield Finding(item["ctx"]["finding"], (*path, *item["ctx"]["path"]))
        elif kind == "extra_forbidden":
            name = str(path[-1])
            yield Finding(f"unknown key '{name}'{did_you_mean(name, fields(section, path[:-1]))}", path[:-1], name)
        elif kind == "missing":
            what = fields(section, path[:-1])[str(path[-1])].description
            yield Finding(f"missing key '{path[-1]}'{f': {what}' if what else ''}", path[:-1])
        elif kind == "literal_error":
            found = list(_choices(fields(section, path[:-1])[str(path[-1])].annotation))
            choices = [str(one).lower() if isinstance(one, bool) else one for one in found]
            text = f"must be one of {', '.join(map(str, choices))}, not {shown(value)}"
            yield Finding(text + did_you_mean(value, [one for one in found if isinstance(one, str)]), path)
        elif kind in _BOUNDS:
            ((_, bound),) = item["ctx"].items()
            yield Finding(f"must be {_BOUNDS[kind].format(bound)}, not {shown(value)}", path)
        else:
            known = fields(section, path[:-1])
            expected = (known[str(path[-1])].description if str(path[-1]) in known else None) or _KINDS.get(kind)
            yield Finding(f"must be {expected}, not {shown(value)}" if expected else f"{shown(value)} does not fit", path)


def fields(section: type[BaseModel], path: Sequence[str | int]) -> dict[str, Any]:
    """The fields of the section at `path` below another, by the names they are written with; none where no section is."""
    found = _written(section)
    for key in path:
        parts = _choices(found[str(key)].annotation, type) if key in found else ()
        found = next((_written(part) for part in parts if issubclass(part, BaseModel)), {})
    return found


def _written(section: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _choices(annotation: Any, kind: type = str) -> Iterator[Any]:
    """What of a kind an annotation admits: the words of a Literal, the classes of a union."""
    for part in get_args(annotation) or [annotation]:
        if isinstance(part, kind) or (kind is str and isinstance(part, int)):
            yield part
        elif part is not annotation:
            yield from _choices(part, kind)
