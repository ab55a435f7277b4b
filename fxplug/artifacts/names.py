"""Names in a file: checked against closed lists, never looked up in what happens to be imported."""

from __future__ import annotations

import importlib
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import ArtifactError, did_you_mean, shown
from ..ir import functions

PATH_KEY = re.compile(r"^[\w\-+:/@=,]+\Z", re.ASCII)
IMPORT_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)


def check_name(text: Any, what: str) -> str:
    """`text` if it is a plain identifier, else ArtifactError."""
    if type(text) is not str or not text.isidentifier() or not text.isascii() or keyword.iskeyword(text):
        raise ArtifactError(f"graph.json: {shown(text)} is no {what}: it must be a plain identifier")
    return text


def check_path(text: Any, what: str) -> str:
    """`text` if it is a dotted path of identifiers, numbers and keys such as `2-1`, else ArtifactError."""
    if type(text) is not str:
        raise ArtifactError(f"graph.json: {shown(text)} is no {what}")
    for part in text.split("."):
        # the code has what is no identifier as `self.blocks[0]` or `self.blocks['2-1']`
        if not PATH_KEY.match(part):
            signs = "letters, digits and any of _-+:/@=,"
            raise ArtifactError(f"graph.json: {shown(text)} is no {what}: {shown(part)} must be {signs}")
        if part.startswith("__"):
            raise ArtifactError(f"graph.json: {what} {shown(text)} reaches for '{part}', a name of Python's own")
    return text


def only_keys(data: Any, known: Iterable[str], where: str) -> dict[str, Any]:
    """`data` if it is an object with no other keys than `known`, else ArtifactError."""
    if type(data) is not dict:
        raise ArtifactError(f"graph.json: {where} is no object")
    known = list(known)
    for key in data:
        if key not in known:
            raise ArtifactError(f"graph.json: {where} has an unexpected entry {shown(key)}{did_you_mean(key, known)}")
    return data


def allowed(module: str, allow: Sequence[str]) -> bool:
    """Whether `module` is one of `allow` or lies below one."""
    return any(module == name or module.startswith(f"{name}.") for name in allow)


def is_import_path(text: Any) -> bool:
    """Whether `text` is `package.module:Class`, with names that are nobody's private matter."""
    return type(text) is str and IMPORT_PATH.match(text) is not None and "__" not in text


def import_class(path: str, allow: Sequence[str]) -> type:
    """The class `package.module:Class`, imported only if `allow` covers its module."""
    if not is_import_path(path):
        raise ArtifactError(f"graph.json: {shown(path)} is no import path 'package.module:Class'")
    module, _, qualname = path.partition(":")
    if not allowed(module, allow):
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
        raise ArtifactError(f"{qualname} is no class that {module} defines")
    return found


def function_name(function: Any) -> str | None:
    """The public name of a function that a graph may call, or None."""
    try:
        return functions.names().get(function)
    except TypeError:
        return None


def find_function(name: Any) -> Callable[..., Any]:
    """The function of a public name. Raises ArtifactError for one that is not in the closed list."""
    table = functions.functions()
    if type(name) is not str or name not in table:
        raise ArtifactError(
            f"graph.json: the function {shown(name)} is not one that a graph may call{did_you_mean(name, table)}"
        )
    return table[name]
