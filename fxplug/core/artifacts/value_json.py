"""Plain values and names as JSON, and back, checked against closed lists."""

from __future__ import annotations

import contextlib
import enum
import importlib
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import fx

from ..errors import DEFAULT, ArtifactError, Limits, did_you_mean, quote
from ..ir import functions

IMPORT_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)


def check_name(text: Any, what: str) -> str:
    """Return `text` if it is a plain identifier; raise ArtifactError otherwise."""
    if type(text) is not str or not text.isidentifier() or not text.isascii() or keyword.iskeyword(text):
        raise ArtifactError(f"graph.json: {quote(text)} is not a valid {what}: it must be a plain identifier")
    return text


def check_path(text: Any, what: str) -> str:
    """Return `text` if it is a dotted path of identifiers, numbers and keys such as `2-1`; raise ArtifactError otherwise."""
    if type(text) is not str:
        raise ArtifactError(f"graph.json: {quote(text)} is not a valid {what}")
    for part in text.split("."):
        # the code has what is no identifier as `self.blocks[0]` or `self.blocks['2-1']`
        if not functions.PATH_KEY.match(part):
            signs = "letters, digits and any of _-+:/@=,"
            raise ArtifactError(f"graph.json: {quote(text)} is not a valid {what}: {quote(part)} must be {signs}")
        if part.startswith("__"):
            raise ArtifactError(f"graph.json: {what} {quote(text)} uses '{part}', a name that Python reserves")
    return text


def is_allowed(module: str, allow: Sequence[str]) -> bool:
    """Return whether `module` is one of `allow` or below one."""
    return any(module == name or module.startswith(f"{name}.") for name in allow)


def is_import_path(text: Any) -> bool:
    """Return whether `text` is `package.module:Class`, without private names."""
    return type(text) is str and IMPORT_PATH.match(text) is not None and "__" not in text


def import_class(path: str, allow: Sequence[str]) -> type:
    """Import the class `package.module:Class`, only if `allow` covers its module."""
    if not is_import_path(path):
        raise ArtifactError(f"graph.json: {quote(path)} is not an import path 'package.module:Class'")
    module, _, qualname = path.partition(":")
    if not is_allowed(module, allow):
        top = module.partition(".")[0]
        raise ArtifactError(
            f"the artifact needs the class {qualname} of {module}, which is not allowed: load(folder, allow=['{top}'])"
        )
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ArtifactError(f"the artifact needs the class {qualname} of {module}; it cannot be imported: {error}") from error
    for part in qualname.split("."):
        found = vars(found).get(part)
        if found is None:
            raise ArtifactError(f"{module} has no class {qualname}, which the artifact needs")
    if not isinstance(found, type) or found.__module__ != module:
        raise ArtifactError(f"{qualname} is not a class that {module} defines")
    return found


def get_function_name(function: Any) -> str | None:
    """Return the public name of a function that a graph may call, or None."""
    try:
        return functions.name_functions().get(function)
    except TypeError:
        return None


def find_function(name: Any) -> Callable[..., Any]:
    """Return the function of a public name. Raises ArtifactError for one that is not in the closed list."""
    table = functions.list_functions()
    if type(name) is not str or name not in table:
        raise ArtifactError(
            f"graph.json: the function {quote(name)} is not one that a graph may call{did_you_mean(name, table)}"
        )
    return table[name]


TORCH_NAMES: dict[type, dict[str, Any]] = {
    kind: {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, kind)}
    for kind in (torch.dtype, torch.memory_format, torch.layout)
}
DEVICES = ("cpu", "cuda", "mps", "xpu", "meta", "hpu", "mtia")  # that a graph may name
TYPES = {"int": int, "float": float, "bool": bool}


class Settings(dict[str, Any]):
    """The configuration of a model whose library is not there: read-only, its entries by key or attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no entry '{name}'{did_you_mean(name, self)}") from None

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("the configuration of a traced model is read-only")

    __setattr__ = __setitem__ = __delitem__ = __delattr__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> Any:
        return Settings, (dict(self),)


class Unportable(Exception):
    """A value that has no JSON form."""


def encode(value: Any, kinds: Mapping[str, ValueKind] | None = None) -> Any:
    """Encode a plain value as JSON: scalars and lists as they are, anything else as an object with one key, its kind.

    Raises Unportable for anything that is not data, of none of the `kinds`, by default those of a graph.
    """
    kinds = KINDS if kinds is None else kinds
    if isinstance(value, enum.Enum) and "member" not in kinds:
        value = value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)) and not isinstance(value, enum.Enum):
        return _base(value)
    if isinstance(value, fx.Node):
        return {"node": value.name}

    def write(member: Any) -> Any:
        return encode(member, kinds)

    if isinstance(value, list):
        return list(map(write, value))
    for name, kind in kinds.items():
        if isinstance(value, kind.cls) and (written := kind.write(value, write)) is not None:
            return {name: written}
    raise Unportable(f"a {type(value).__qualname__} is not a plain value")


def _base(value: float | str) -> int | float | str:
    """Convert a number or text of a subclass to Python's own class."""
    return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else str.__str__(value)


def encode_portable(values: dict[str, Any]) -> dict[str, Any]:
    """Encode the entries of `values` that have a JSON form; of a configuration, its entries that have one."""
    found = {}
    for key, value in values.items():
        try:
            found[key] = encode(value)
        except Unportable:
            if callable(inside := getattr(value, "to_dict", None)):
                with contextlib.suppress(Exception):  # whatever a stranger's `to_dict` raises
                    value = inside()
            if isinstance(value, dict):
                inner = encode_portable({k: v for k, v in value.items() if isinstance(k, str)})
                found[key] = {"settings": [[k, v] for k, v in inner.items()]}
    return found


def decode(
    data: Any,
    nodes: Mapping[str, fx.Node] | None = None,
    limits: Limits = DEFAULT,
    kinds: Mapping[str, ValueKind] | None = None,
) -> Any:
    """Decode a value from `encode`. Nodes are looked up in `nodes`; None refuses them. Raises ArtifactError."""
    kinds = KINDS if kinds is None else kinds
    kind = type(data)
    if data is None or kind is bool or kind is int:
        return data
    if kind is str:
        if len(data) > limits.string:
            raise ArtifactError(f"graph.json: a text of {len(data)} characters; the limit is {limits.string}")
        return data
    if kind is float:
        if not math.isfinite(data):
            raise ArtifactError("graph.json: a number is too large for a float")
        return data
    if kind is list:
        return [decode(v, nodes, limits, kinds) for v in data]
    if kind is not dict or len(data) != 1:
        raise ArtifactError(f"graph.json: {quote(data)} is not an encoded value")
    ((name, body),) = data.items()
    if name == "node":
        if nodes is None:
            raise ArtifactError("graph.json: only a plain value is allowed here, not a node")
        if type(body) is not str or body not in nodes:
            raise ArtifactError(f"graph.json: an argument refers to the node {quote(body)}, which is not defined before it")
        return nodes[body]
    if name not in kinds:
        raise ArtifactError(f"graph.json: no type of value is called {quote(name)}{did_you_mean(name, kinds)}")
    form, read = kinds[name][-2:]
    if form is not object and type(body) is not form:
        raise ArtifactError(f"graph.json: {quote(data)} is not a valid {name}")
    try:
        return read(body, lambda v: decode(v, nodes, limits, kinds), limits)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ArtifactError(f"graph.json: {quote(data)} is not a valid {name}: {quote(str(error))}") from None


Read = Callable[[Any], Any]
Write = Callable[[Any], Any]


def _dict(body: list[Any], read: Read, limits: Limits) -> dict[Any, Any]:
    made = {decode(k, None, limits): read(v) for k, v in body}
    if len(made) < len(body):
        raise ValueError("it has the same key twice")
    return made


def _range(body: list[Any], read: Read, limits: Limits) -> range:
    found = range(*map(check_integer, body))
    if -(-abs(found.stop - found.start) // abs(found.step)) > limits.members:
        raise ArtifactError(f"graph.json: {quote(found)} has more than {limits.members} members")
    return found


def _device(body: str, read: Read, limits: Limits) -> torch.device:
    if body.partition(":")[0] not in DEVICES:
        raise ArtifactError(f"graph.json: {quote(body)} is not a device of a graph{did_you_mean(body, DEVICES)}")
    return torch.device(body)


def check_integer(value: Any) -> int:
    """Return `value` if it is an integer; raise ArtifactError otherwise."""
    if type(value) is not int:
        raise ArtifactError(f"graph.json: {quote(value)} must be a whole number")
    return value


class ValueKind(NamedTuple):
    """A kind of value: its class and how its JSON is made (None: not of this kind), what that begins with and what reads it."""

    cls: type | tuple[type, ...]
    write: Callable[[Any, Write], Any]
    form: type
    read: Callable[[Any, Read, Limits], Any]


def _named_kind(name: str, cls: type | tuple[type, ...], table: Mapping[str, Any]) -> ValueKind:
    """Make the kind of values that have names in torch or Python."""
    names = {value: key for key, value in table.items()}

    def read(body: str, _: Read, limits: Limits) -> Any:
        if body not in table:
            raise ArtifactError(f"graph.json: {quote(body)} is not a valid {name} of torch{did_you_mean(body, table)}")
        return table[body]

    return ValueKind(cls, lambda value, write: names.get(value), str, read)


def _pairs(value: dict[Any, Any], write: Write) -> list[Any]:
    return [[encode(k), write(v)] for k, v in value.items()]


def _settings(value: dict[Any, Any], write: Write) -> list[Any] | None:
    # diffusers' FrozenDict cannot be imported here to ask for it
    return _pairs(value, write) if isinstance(value, Settings) or type(value).__name__ == "FrozenDict" else None


# the kinds of values that a graph has; of several that a value is of, the first
KINDS: dict[str, ValueKind] = {
    "size": ValueKind(
        torch.Size, lambda v, write: list(map(write, v)), list, lambda body, read, limits: torch.Size(map(check_integer, body))
    ),
    "tuple": ValueKind(tuple, lambda v, write: list(map(write, v)), list, lambda body, read, limits: tuple(map(read, body))),
    "settings": ValueKind(dict, _settings, list, lambda body, read, limits: Settings(_dict(body, read, limits))),
    "dict": ValueKind(dict, _pairs, list, _dict),
    "slice": ValueKind(
        slice, lambda v, write: [encode(n) for n in (v.start, v.stop, v.step)], list,
        lambda body, read, limits: slice(*map(read, body)),
    ),
    "range": ValueKind(range, lambda v, write: [v.start, v.stop, v.step], list, _range),
    "float": _named_kind("float", (), {text: float(text) for text in ("inf", "-inf", "nan")}),
    "complex": ValueKind(
        complex, lambda v, write: [write(v.real), write(v.imag)], list, lambda body, read, limits: complex(*map(read, body))
    ),
    "ellipsis": ValueKind(type(...), lambda v, write: True, bool, lambda body, read, limits: ...),
    "bytes": ValueKind(bytes, lambda v, write: v.hex(), str, lambda body, read, limits: bytes.fromhex(body)),
    "device": ValueKind(torch.device, lambda v, write: str(v), str, _device),
    "type": _named_kind("type", type, TYPES),
    **{cls.__name__: _named_kind(cls.__name__, cls, table) for cls, table in TORCH_NAMES.items()},
}  # fmt: skip


def check_size(value: Any, limit: int, what: str) -> None:
    """Raise ArtifactError for an integer beyond `limit` among the values of an argument."""
    if isinstance(value, int) and abs(value) > limit:
        raise ArtifactError(f"graph.json: {what} is {quote(value)}; the limit is {limit}")
    for member in value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ():
        check_size(member, limit, what)
