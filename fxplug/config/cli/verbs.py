"""What the verbs of the command line share: their options, errors as one message, and what takes long.

torch is imported by what needs it, when it runs.
"""

from __future__ import annotations

import gc
import glob
import io
import logging
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import fxplug

from ...core import extensions, find_extra
from ...core.errors import FxplugError, SpecError, make_printable
from ...core.spec.pass_file import list_recipes, list_shipped
from ...core.torch_internals import FAKE_TENSOR_LOG
from ..run_config import Config, load_config
from .json_output import OPTION, hide_output, print_error

if TYPE_CHECKING:
    from ...core.ir.traced_module import TracedModule
    from ..flow import Result

DEBUG = "fxplug.debug"
PATIENCE = 1.0  # seconds before progress is shown
HELP = {"help_option_names": ["-h", "--help"]}


class Verbs(TyperGroup):
    """Turns errors into one message and exit code 1; an interrupt into one sentence and the code that shells give it."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse what stands before a verb; note whether it is called for a program, which a wrong call is told as JSON, too."""
        ctx.meta[OPTION] = ctx.meta.get(OPTION) or OPTION in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. Raises typer.Exit with the code of a failure."""
        if ctx.parent is not None:
            return super().invoke(ctx)  # of verbs below a verb: this is around both
        noise = logging.getLogger(FAKE_TENSOR_LOG)  # prints a traceback of what is raised anyway
        noise.disabled = True
        try:
            return self._invoke_for_program(ctx) if ctx.meta[OPTION] else self._invoke_verb(ctx)
        except Exception as error:  # of all there is: this is the end of a command
            if _is_typers(error):
                if str(getattr(error, "message", "")).startswith("Got unexpected extra argument") and "--set" in sys.argv:
                    advice = ". A shell expands braces and splits at spaces: quote the value of --set with single quotes"
                    error.message += advice  # type: ignore[attr-defined]
                raise  # the reader went away, the call is wrong, or --help is done
            print(traceback.format_exc() if ctx.meta.get(DEBUG) else message(error), end="", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt as end:  # what a run that is stopped leaves is in its note
            print(*getattr(end, "__notes__", [str(end) or "interrupted"])[-1:], file=sys.stderr)
            raise typer.Exit(128 + getattr(end, "signal", signal.SIGINT)) from None
        finally:
            noise.disabled = False

    def _invoke_verb(self, ctx: Any) -> Any:
        """Run a verb. Raises FxplugError if code of a model or library exits: the verb has not done what it was asked for."""
        try:
            return super().invoke(ctx)
        except SystemExit as end:
            if isinstance(end.code, int) and end.code > 128:  # by a signal
                raise
            at = traceback.extract_tb(end.__traceback__)[-1]
            raise FxplugError(f"{at.filename}:{at.lineno} called sys.exit({end.code!r}): remove that call") from end

    def _invoke_for_program(self, ctx: Any) -> Any:
        """Run a verb with `--json`: nothing but JSON is on stdout, and on stderr where it fails."""
        kept, failed, trace = io.StringIO(), None, ""
        try:
            with hide_output(kept):
                return self._invoke_verb(ctx)
        except Exception as error:  # of all there is, as above
            if _is_typers(error) and not hasattr(error, "format_message"):
                raise  # the reader went away, or it is done
            failed, trace = error, traceback.format_exc() if ctx.meta.get(DEBUG) else ""
        finally:
            if failed is None:
                print(kept.getvalue(), end="", file=sys.stderr)
        print_error(failed, kept.getvalue(), trace)
        raise typer.Exit(getattr(failed, "exit_code", 1) if _is_typers(failed) else 1)


def _is_typers(error: BaseException) -> bool:
    return isinstance(error, BrokenPipeError) or type(error).__module__.startswith(("typer", "click"))


class RootVerbs(Verbs):
    """The verbs of `fxplug`: its own, and those of extensions, imported when they are called or listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs. Raises ClashError if two extensions define the same name."""
        return [*super().list_commands(ctx), *sorted(extensions.list_parts("verbs"))]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return the verb of that name. Raises SpecError for an unknown one if an extension cannot be used."""
        command = super().get_command(ctx, name)
        if command is None and (verb := extensions.import_part("verbs", name)) is not None:
            if not isinstance(verb, typer.Typer):
                app = typer.Typer(add_completion=False)
                app.command(name)(verb)
                verb = app
            command = self.commands[name] = typer.main.get_command(verb)
            command.name = name
        if command is None and (note := extensions.describe_unusable()):
            raise SpecError(f"there is no verb '{name}'{note}")
        return command


def message(error: BaseException) -> str:
    """Return the text for stderr about an error: its message and notes; with the class if the error is not ours."""
    notes = "".join(f"  {note}\n" for note in getattr(error, "__notes__", []))
    if isinstance(error, FxplugError):
        return f"{error}\n{make_printable(notes)}"
    if isinstance(error, OSError) and error.strerror:
        return make_printable(f"{error.filename}: {error.strerror}\n" if error.filename else f"{error.strerror}\n")
    if isinstance(error, ModuleNotFoundError) and (extra := find_extra(error.name or "")):
        return f"this needs {error.name}, which is not installed: pip install 'fxplug[{extra}]'\n"
    return make_printable(f"{type(error).__name__}: {error}\n{notes}  (--debug shows where)\n")


LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[2]))


def _is_users(file: str) -> bool:
    """Return whether the source of a log record is a file of the user's, neither a library's nor compiled."""
    return Path(file).is_file() and not file.startswith(LIBRARIES)


@contextmanager
def show_user_logs() -> Iterator[None]:
    """Show log records of the user's own files from INFO on, and warnings of all others."""
    handler, root = logging.StreamHandler(), logging.getLogger()
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or _is_users(record.pathname))
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    before = root.level
    root.addHandler(handler)
    root.setLevel(min(before, logging.INFO))
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or value
    return value


def print_version(value: bool) -> None:
    """For --version: print it and end the command. Raises typer.Exit."""
    if value:
        print(fxplug.__version__)
        raise typer.Exit


Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of an error.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a value: passes.0.lora.rank=8. Repeatable."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="MODULE", help="Let a saved rewrite import this module. Repeatable."),
]


def _shipped(kind: str) -> list[str]:
    return list(list_shipped(kind) if kind == "passes" else {**list_recipes(), **list_shipped(kind)})


def complete_config(incomplete: str) -> list[str]:
    """Return the shell completions for a configuration: the names of shipped ones, and existing files and folders."""
    folder, _, last = incomplete.rpartition("/")
    here = sorted(Path(folder or ".").glob(f"{glob.escape(last)}*")) if Path(folder or ".").is_dir() else []
    files = [f"{path}/" if path.is_dir() else str(path) for path in here if path.is_dir() or path.suffix in (".yaml", ".yml")]
    return [*(name for name in _shipped("configs") if name.startswith(incomplete)), *files]


def complete_pass(incomplete: str) -> list[str]:
    """Return the shell completions for a pass: the names of shipped ones."""
    return [name for name in _shipped("passes") if name.startswith(incomplete)]


ConfigArg = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A YAML file, or a shipped configuration's name.", autocompletion=complete_config),
]
Subject = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG_OR_DIR", help="A configuration, or the folder of a saved rewrite.", autocompletion=complete_config
    ),
]


def read_config(config: str, set: list[str] | None) -> Config:
    """Read a configuration before torch is imported. Modules that it imports may lie beside it, as with a script."""
    found = load_config(config, set or [])
    sys.path.insert(0, str(found.base.absolute()))
    return found


def run_rewrite(config: Config, **how: Any) -> Result:
    """Run a configuration's rewrite with progress shown, and return the result."""
    with uncollected():
        rewrite = fxplug.rewrite  # which imports torch
    with uncollected() if how.get("dry_run") else nullcontext():
        return rewrite(config, progress=show_progress, **how)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which takes a fifth of what imports large libraries and soon ends."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def load_saved(folder: str, set: list[str] | None, allow: list[str] | None, device: str | None = None) -> TracedModule:
    """Load the module from the folder of a saved rewrite. Raises typer.BadParameter if `set` changes something."""
    if set:
        raise typer.BadParameter("--set changes a configuration, and this is the folder of a saved rewrite: leave it out")
    return fxplug.load(folder, allow=allow or (), device=device)


def make_saved_call(folder: str | Path, module: TracedModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make example inputs for a saved rewrite, as the configuration in its folder has them."""
    from ..flow import make_saved_inputs

    return make_saved_inputs(folder, module)


def format_parameters(result: Result) -> str:
    """Return the number of parameters of a result's module, and how many each pass added, as text."""
    from ...core.ir.containers import count_pass_parameters as counted

    return counted(result.module)


@contextmanager
def show_progress(text: str) -> Iterator[None]:
    """Show on stderr what is going on once it takes longer than a second, and in the end how long it took."""
    shown = threading.Event()
    terminal = sys.stderr.isatty()
    status: Any = None

    def begin() -> None:
        nonlocal status
        shown.set()
        if not terminal:
            print(f"{text} ...", end="", file=sys.stderr, flush=True)
            return
        from rich.console import Console

        status = Console(stderr=True).status(f"{text} ...")
        status.start()

    start = time.perf_counter()
    timer = threading.Timer(PATIENCE, begin)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            if status is not None:
                status.stop()
                print(f"{text} ...", end="", file=sys.stderr)
            print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
