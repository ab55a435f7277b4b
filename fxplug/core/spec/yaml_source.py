"""Plain data from YAML, with the file and line of every value, and mappings held to a model of their keys. Imports no torch."""

from __future__ import annotations

import copy
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from .. import errors, reading
from ..errors import DEFAULT, LONGEST, Limits, SpecError, cut, did_you_mean, format_brief, format_fields

QUOTES = "; quote a text that begins with * or {, or has braces within [ ] or { }"


@dataclass(frozen=True)
class Where:
    """A place in a file. As text `passes/lora.yaml:3`, relative to the working folder when below it."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        shown, _ = _seen_from(os.getcwd(), self.file)
        return f"{shown}:{self.line}" if shown and self.line else shown

    @property
    def portable(self) -> str:
        """Place for a file that goes to other machines: for a path outside the working folder its last two parts."""
        shown, outside = _seen_from(os.getcwd(), self.file)
        return str(Where("/".join(Path(shown).parts[-2:]), self.line)) if outside else str(self)


@functools.lru_cache(1024)  # each node that a pass puts in says its place
def _seen_from(folder: str, file: str) -> tuple[str, bool]:
    """Return a path as it is shown in a folder, and whether it is an absolute one outside."""
    path = Path(file)
    if not path.is_absolute():
        return file, False
    return (str(path.relative_to(folder)), False) if path.is_relative_to(folder) else (file, True)


NOWHERE = Where()


@dataclass
class Source:
    """Plain data, and where each value of it stood: `lines[("rules", 0, "match")]`."""

    data: Any
    file: str = ""
    lines: dict[tuple[str | int, ...], Where] = field(default_factory=dict)

    __repr__ = format_fields

    def where(self, *path: str | int) -> Where:
        """Return the place of the value at `path`, or of the nearest one around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, Where(self.file))

    def error(self, finding: str, *path: str | int, key: str | None = None) -> SpecError:
        """Return the error `file:line: path: finding`; the line is that of `key` below `path` if given."""
        at = self.where(*path) if key is None else self.where(*path, key)
        return SpecError(finding, path=path, key=key, where=at)

    @contextmanager
    def inside(self, *path: str | int) -> Iterator[None]:
        """Add a place to errors raised without one: that of their path below `path`."""
        try:
            yield
        except SpecError as error:
            raise self.error(error.finding, *path, *error.path, key=error.key) from None

    def keys(self, known: Iterable[str], required: Iterable[str], *path: str | int) -> None:
        """Check that the value at `path` is a mapping with no unknown and no missing key."""
        value = self.data
        for step in path:
            value = value[step]
        if not isinstance(value, Mapping):
            raise self.error(f"must be a mapping, not {quote_yaml(value)}", *path)
        for key in value:
            if key not in known:
                raise self.error(f"unknown key '{key}'{did_you_mean(key, known)}", *path, key=key)
        for key in required:
            if key not in value:
                raise self.error(f"missing key '{key}'", *path)


class _Beyond(yaml.MarkedYAMLError):
    """YAML that may be valid, and is not read to its end."""


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2's plain values: `on` and `yes` are text, `1e-4` is a number, `1:30` and dates are text."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    limits = DEFAULT
    nodes = depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        self.depth += 1
        if self.nodes > self.limits.entries or self.depth > self.limits.depth:
            entries, depth = self.limits.entries, self.limits.depth
            finding = f"more than {entries} values" if self.nodes > entries else f"nested too deeply: more than {depth} levels"
            raise _Beyond(problem=finding, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in (
    ("null", r"(~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    ("bool", r"(true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    ("int", r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z", list("-+0123456789")),
    (
        "float",
        r"([-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z",
        list("-+.0123456789"),
    ),
):
    _YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def read_yaml(path: Path, limits: Limits = DEFAULT) -> Source:
    """Read the values of a YAML file with their lines. Raises SpecError for a missing or unreadable file, or one beyond
    `limits`."""

    def raises(finding: str) -> SpecError:
        return SpecError(finding, where=Where(str(path)))

    with reading.report_errors(raises):
        if not path.exists() and not path.is_symlink():
            raise raises(describe_missing(path))
    return parse_yaml(reading.read_text(path, limits.yaml, raises), str(path), limits)


def parse_yaml(text: str, file: str = "", limits: Limits = DEFAULT) -> Source:
    """Parse one YAML document; duplicate keys, tags and broken YAML raise SpecError with file and line."""
    source = _parse_once(text, file, limits) if len(text) <= SHORT else _parse(text, file, limits)
    return Source(copy.deepcopy(source.data), file, dict(source.lines))


def _parse(text: str, file: str, limits: Limits) -> Source:
    source = Source(None, file)
    loader = None
    try:
        loader = _YamlLoader(text)
        loader.limits = limits
        node = loader.get_single_node()
        if node is not None:
            source.data = _plain(node, (), source.lines, file, (), limits)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = Where(file, mark.line + 1 if mark else 0)
        what = "" if isinstance(error, _Beyond) else "not valid YAML: "
        line = text.splitlines()[mark.line : mark.line + 1] if what and mark else []
        hint = QUOTES if any(sign in one for one in line for sign in "*{}") else ""
        raise SpecError(f"{what}{cut(str(error.problem), 200)}{hint}", where=at) from None
    except yaml.YAMLError as error:
        raise SpecError(f"not valid YAML: {cut(str(getattr(error, 'reason', error)), 200)}", where=Where(file)) from None
    finally:
        if loader is not None:
            loader.dispose()
    return source


SHORT = 1 << 14  # characters of a text that is worth keeping: pass files are read again for each pass that is loaded
_parse_once = functools.lru_cache(64)(_parse)


def _plain(
    node: yaml.Node,
    path: tuple[str | int, ...],
    lines: dict[tuple[str | int, ...], Where],
    file: str,
    around: tuple[yaml.Node, ...],
    limits: Limits,
) -> Any:
    def refuse(finding: str, at: yaml.Node) -> SpecError:
        return SpecError(finding, where=Where(file, at.start_mark.line + 1))

    if node in around:
        raise refuse("an alias inside its own anchor: it would contain itself", node)
    if len(lines) > limits.entries:
        raise refuse(f"more than {limits.entries} values", node)
    if len(path) > limits.depth:
        raise refuse(f"nested too deeply: more than {limits.depth} levels", node)
    tag = node.tag.removeprefix("tag:yaml.org,2002:")
    if isinstance(node, yaml.MappingNode) and tag == "map":
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                named = f"'{cut(key.value, 200)}'" if isinstance(key, yaml.ScalarNode) else "here"
                raise refuse(f"key {named} is not text; put it in quotes", key)
            if key.value in mapping:
                raise refuse(f"key '{cut(key.value, 200)}' given twice", key)
            if len(key.value) > limits.text:
                raise refuse(f"a key of {len(key.value)} characters; the limit is {limits.text}", key)
            lines[*path, key.value] = Where(file, key.start_mark.line + 1)
            mapping[key.value] = _plain(value, (*path, key.value), lines, file, (*around, node), limits)
        return mapping
    if isinstance(node, yaml.SequenceNode) and tag == "seq":
        items = []
        for index, item in enumerate(node.value):
            lines[*path, index] = Where(file, item.start_mark.line + 1)
            items.append(_plain(item, (*path, index), lines, file, (*around, node), limits))
        return items
    if isinstance(node, yaml.ScalarNode) and tag in _SCALARS:
        if tag in ("int", "float") and len(node.value) > limits.digits:
            raise refuse(f"a number of {len(node.value)} digits; the limit is {limits.digits}", node)
        try:
            return _SCALARS[tag](node.value)
        except ValueError:
            raise refuse(f"'{cut(node.value, 200)}' does not fit its tag '!!{tag}'", node) from None
    name = cut(node.tag if tag == node.tag else f"!!{tag}", 200)
    raise refuse(f"tag '{name}' is not allowed: only plain YAML values are read", node)


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, 0 if text[:2] in ("0x", "0o") else 10),
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}


def describe_missing(path: Path) -> str:
    """Return `no such file` with the nearest name in that folder, or `no such folder`."""
    if not path.parent.is_dir():
        return f"no such folder '{path.parent}'"
    return "no such file" + did_you_mean(path.name, (p.name for p in path.parent.iterdir()))


def describe_braces(value: object) -> str:
    """Return a hint for a mapping that was meant as a text with braces, such as `{qkv,proj}`; else ""."""
    if not (isinstance(value, Mapping) and value and all(isinstance(k, str) and v is None for k, v in value.items())):
        return ""
    return f"; quote it in YAML to make it text: \"{{{','.join(map(str, value))}}}\""


def quote_yaml(value: object) -> str:
    """Format a value for a message: text in quotes, YAML's words for the rest."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, (str, int, float)):
        return errors.quote(value, 200)
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"


_KINDS = {
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "Unicode text",
    "invalid_key": "text",
    "int_type": "a whole number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_too_short": "a text that is not empty",
}
_EXPECTED = re.compile(r"'([^']*)'|\b(True|False|\d+)\b")  # what pydantic lists of a Literal
_BOUNDS = {
    "greater_than_equal": "{} or more",
    "greater_than": "above {}",
    "less_than": "below {}",
    "less_than_equal": "{} or less",
}


class Section(BaseModel):
    """What all sections share: an unknown key and a value of another type are errors, and what was read does not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def __repr__(self) -> str:
        given = (f"{name}={format_brief(getattr(self, name, None), 160)}" for name in type(self).model_fields)
        return cut(f"{type(self).__name__}({', '.join(given)})", LONGEST)

    __str__ = __repr__


def declare(default: Any, text: str, example: Any, **bounds: Any) -> Any:
    """Declare a field of a section that users write: its default (`...`: none), what it is, and an example other than the
    default."""
    return Field(default, description=text, examples=[example], **bounds)


Text = Annotated[str, Field(min_length=1)]  # a name, path or pattern
S = TypeVar("S", bound=BaseModel)


class Finding(NamedTuple):
    """What is wrong, where below the section, and the key that is meant where that is not the last part of the way."""

    text: str
    path: tuple[str | int, ...]
    key: str | None = None


def convert_error(error: SpecError) -> PydanticCustomError:
    """Convert a SpecError to pydantic's error, which adds the path of the value."""
    context = {"finding": error.finding, "path": list(error.path), "key": error.key}
    return PydanticCustomError("spec", "{finding}", context)


def make_validator(read: Callable[[Any], Any], written: Any = Any) -> PlainValidator:
    """Make a field validator of a function that reads a value, or raises SpecError; the schema has the type `written`."""

    def read_value(value: Any) -> Any:
        try:
            return read(value)
        except SpecError as error:
            raise convert_error(error) from None

    return PlainValidator(read_value, json_schema_input_type=written)


def read_number(value: Any) -> Any:
    """Return a number or None. Raises SpecError for anything else."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise SpecError(f"must be a number, not {quote_yaml(value)}")
    return value


def check_number(
    value: Any,
    *path: str | int,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    whole: bool = False,
) -> None:
    """Raise SpecError, with this path, unless a value is a finite number within these bounds, and `whole` where that is set."""
    kind = int if whole else (int, float)
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and least <= value <= most and above < value < below:
        return
    bounds = {"{:g} or more": least, "above {:g}": above, "at most {:g}": most, "below {:g}": below}
    text = " and ".join(word.format(bound) for word, bound in bounds.items() if math.isfinite(bound))
    named = "whole " * whole + "finite " * (is_number and not math.isfinite(value))
    raise SpecError(f"must be a {named}number{f', {text}' if text else ''}, not {quote_yaml(value)}", path=path)


def check_finite(value: Any, *path: str | int, infinite: bool = False) -> None:
    """Raise SpecError, with its path, for a number that is NaN or, unless `infinite`, infinite, in lists and mappings too."""
    if isinstance(value, float) and not (math.isfinite(value) or (infinite and not math.isnan(value))):
        raise SpecError(f"must be a finite number, not {quote_yaml(value)}", path=path)
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in pairs:
        check_finite(item, *path, key, infinite=infinite)


def validate(section: type[S], given: Any, *path: str | int) -> S:
    """Validate a value at `path` as a section. Raises SpecError about the first error."""
    if not isinstance(given, (Mapping, section)):
        keys = ", ".join(_written(section))
        raise SpecError(f"must be a mapping of {keys}, not {quote_yaml(given)}", path=path)
    try:
        return section.model_validate(dict(given) if isinstance(given, Mapping) else given)
    except ValidationError as error:
        found = list(list_findings(error, section))
        first = next((one for one in found if one.key), found[0])  # a key that is written wrong may be the one that is missing
        raise SpecError(first.text, path=(*path, *first.path), key=first.key) from None


def list_findings(error: ValidationError, section: type[BaseModel]) -> Iterator[Finding]:
    """Yield pydantic's errors of a section, in our words."""
    errors = error.errors()
    unknown = [item["loc"] for item in errors if item["type"] == "extra_forbidden"]
    for item in errors:
        path, kind, value = item["loc"], item["type"], item["input"]
        if kind == "spec":
            yield Finding(item["ctx"]["finding"], (*path, *item["ctx"]["path"]), item["ctx"]["key"])
        elif kind == "extra_forbidden":
            name = str(path[-1])
            yield Finding(f"unknown key '{name}'{did_you_mean(name, list_fields(section, path[:-1]))}", path[:-1], name)
        elif kind == "missing":
            if any(other[:-1] == path[:-1] and did_you_mean(other[-1], path[-1:]) for other in unknown):
                continue  # it is there, and written wrong
            known = list_fields(section, path[:-1])
            what = known[str(path[-1])].description if str(path[-1]) in known else ""
            yield Finding(f"missing key '{path[-1]}'{f': {what}' if what else ''}", path[:-1])
        elif kind == "literal_error":
            choices = [text or other.lower() for text, other in _EXPECTED.findall(item["ctx"]["expected"])]
            yield Finding(f"must be one of {', '.join(choices)}, not {quote_yaml(value)}{did_you_mean(value, choices)}", path)
        elif kind in _BOUNDS:
            ((_, bound),) = item["ctx"].items()
            yield Finding(f"must be {_BOUNDS[kind].format(bound)}, not {quote_yaml(value)}", path)
        else:
            # a field with an example says what it is for, and not what it must be
            named = list_fields(section, path[:-1]).get(str(path[-1])) if path else None
            expected = (named.description if named and not named.examples else None) or _KINDS.get(kind)
            yield Finding(f"must be {expected}, not {quote_yaml(value)}" if expected else f"{quote_yaml(value)} is not allowed "
                                                                                     "here", path)


def list_fields(section: type[BaseModel], path: Sequence[str | int]) -> dict[str, Any]:
    """Return the fields of the section at `path` below another, by their written names; empty if there is no section."""
    found = _written(section)
    for key in path:
        if key in found:  # and a position in a list, or a key of a mapping, leads to what each member is
            found = next((_written(part) for part in _classes(found[str(key)].annotation) if issubclass(part, BaseModel)), {})
    return found


def _written(section: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _classes(annotation: Any) -> Iterator[type]:
    """Yield the classes that an annotation names."""
    for part in get_args(annotation):
        yield from _classes(part)
    if isinstance(annotation, type):
        yield annotation
