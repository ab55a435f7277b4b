"""Options for a callable, held to its signature before it is called: one that it does not take, and those that are missing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, did_you_mean


@dataclass(frozen=True)
class Taken:
    """What a callable takes by name: `required` has no default, and `free` says that it takes any other name as well."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    free: bool


def taken(target: Callable[..., Any], given: int = 0, leave: Collection[str] = ()) -> Taken:
    """What a callable takes; its first `given` parameters and those that `leave` names are none of a user's.

    A class that shows no signature, as one written in C, takes nothing.
    """
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    free = any(p.kind is p.VAR_KEYWORD for p in parameters)
    ours = [p for p in parameters[given:] if p.name not in leave and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = tuple(p.name for p in ours if p.default is p.empty)
    return Taken(tuple(p.name for p in ours if p.kind is not p.POSITIONAL_ONLY), required, free)


def check_options(
    target: Callable[..., Any],
    options: Collection[str],
    name: str,
    *,
    given: int = 0,
    leave: Collection[str] = (),
    says: str = "has no option",
    path: tuple[str, ...] = (),
    where: object = "",
) -> None:
    """SpecError, about `name`, where a callable does not take the options, or needs more; `given` and `leave` as of `taken`."""
    found = taken(target, given, leave)
    if not found.free:
        check_known(options, found.names, f"{name} {says}", path=path, where=where)
    missing = [f"'{option}'" for option in found.required if option not in options]
    if missing:
        raise SpecError(f"{name} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}", path=path, where=where)


def check_known(
    options: Iterable[str], known: Collection[str], says: str, *, path: tuple[str, ...] = (), where: object = ""
) -> None:
    """SpecError for an option that is not among the known ones, with the nearest: `says` begins it, `Lora has no option`."""
    for key in options:
        if key not in known:
            finding = f"{says} '{key}'{did_you_mean(key, known)}; it takes {', '.join(known) or 'none'}"
            raise SpecError(finding, path=path, key=key, where=where)
