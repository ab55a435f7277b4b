"""`--json`: what a verb finds, on stdout, and an error, on stderr, each as one JSON value for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import IO, Annotated, Any

import typer

from ...core import find_extra
from ...core.errors import SpecError, find_suggestion, format_path, make_printable

OPTION = "--json"
_stdout: ContextVar[IO[str] | None] = ContextVar("stdout", default=None)

Json = Annotated[bool, typer.Option(OPTION, help="Print the result as JSON on stdout, and errors as JSON on stderr.")]


@contextmanager
def hide_output(kept: IO[str]) -> Iterator[None]:
    """Keep off stdout and stderr what is printed, for `print_json` alone to write to the first."""
    token = _stdout.set(sys.stdout)
    try:
        with redirect_stdout(kept), redirect_stderr(kept):
            yield
    finally:
        _stdout.reset(token)


def print_json(value: Any) -> None:
    """Print the result of a verb as JSON."""
    print(_dump(value), file=_stdout.get() or sys.stdout, flush=True)


def print_error(error: BaseException, log: str = "", trace: str = "") -> None:
    """Print an error as JSON to stderr; `log` is what was printed before it, `trace` its traceback."""
    more = {"log": make_printable(log).splitlines(), "traceback": trace}
    print(_dump({**describe_error(error), **{key: text for key, text in more.items() if text}}), file=sys.stderr, flush=True)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values.

    `error` is its class, `message` its whole text. As far as it has them: `where` a file with its line, a path within the data
    or an option, `key` the key there, `found` what is wrong, `nearest` the nearest name that exists, `do` a command that helps,
    and `notes`.
    """
    text = error.format_message() if hasattr(error, "format_message") else str(error)  # click's errors have the first
    made: dict[str, Any] = {"error": type(error).__name__, "message": make_printable(text)}
    if isinstance(error, SpecError):
        where = ": ".join(filter(None, [error.where, format_path(error.path)]))
        made |= {"where": where, "key": error.key, "found": error.finding}
    elif isinstance(error, OSError):
        made |= {"where": error.filename and str(error.filename), "found": error.strerror}
    elif isinstance(error, ModuleNotFoundError) and (extra := find_extra(error.name or "")):
        made |= {"found": f"{error.name} is not installed", "do": f"pip install 'fxplug[{extra}]'"}
    elif (context := getattr(error, "ctx", None)) is not None:  # click's: a wrong call
        parameter = getattr(error, "param", None)
        name = getattr(error, "option_name", None) or (parameter and max(parameter.opts, key=len))
        made |= {"where": name, "do": f"{context.command_path} --help"}
    near = find_suggestion(made["message"]) or next(iter(getattr(error, "possibilities", None) or ()), "")
    made |= {"nearest": near, "notes": [make_printable(note) for note in getattr(error, "__notes__", [])]}
    return {key: value for key, value in made.items() if value}


def _dump(value: Any) -> str:
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """Convert a value to what JSON can represent; a number that is not finite becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
