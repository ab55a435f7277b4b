"""What import paths in a configuration name: classes and functions, made with the options beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..core.errors import FxplugError, SpecError, prefix_path
from ..core.spec.pass_file import check_options, get_arguments, import_target
from .train_section import Use


def import_name(name: str, path: tuple[str, ...]) -> Any:
    """Import what a path names. Raises SpecError, at its place in a configuration, for what does not exist."""
    with prefix_path(*path):
        return import_target(name)


def construct(kind: Callable[..., Any], use: Use, path: tuple[str, ...] = (), *given: Any) -> Any:
    """Call `kind` with values and options.

    Raises SpecError for an option that it lacks, with the nearest, for a missing one, and for what it raises itself.
    """
    path = (*path, use.name) if use.options else path
    check_options(get_arguments(kind, len(given)), use.options, use.name, path=path)
    with prefix_path(*path):
        try:
            return kind(*given, **use.options)
        except FxplugError:
            raise
        except Exception as error:  # of anybody's class or function
            raise SpecError(f"{use.name} cannot be built: {type(error).__name__}: {error}") from error


def import_function(use: Use, path: tuple[str, ...] = (), given: int = 1) -> Any:
    """Import a function and bind its options, or make an object of a class. Later calls give `given` values.

    Raises SpecError for what cannot be imported or called so.
    """
    target = import_name(use.name, path)
    if isinstance(target, type):
        return construct(target, use, path)
    if not callable(target):
        raise SpecError(f"'{use.name}' is not a function, but a {type(target).__name__}", path=path)
    check_options(get_arguments(target, given), use.options, use.name, path=path)
    return functools.partial(target, **use.options) if use.options else target
