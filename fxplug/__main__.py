"""The command line: `fxplug rewrite | train | sites | diff | show | adapters | tune | passes | schema | export | convert`.

torch is imported by the verbs that need it, when they run: `--help`, `passes` and `schema` answer at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .errors import FxplugError, SpecError, did_you_mean, printable
from .reading import reported

if TYPE_CHECKING:
    from .config import Config
    from .flow import Result
    from .module import TracedModule

DEBUG = "fxplug.debug"
PATIENCE = 1.0  # seconds before progress is shown


class _Verbs(TyperGroup):
    """Turns errors into one message and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        noise = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of what is raised anyway
        noise.disabled = True
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, BrokenPipeError) or type(error).__module__.startswith(("typer", "click")):
                raise  # typer's own: the reader went away, the call is wrong, or --help is done
            print(traceback.format_exc() if ctx.meta.get(DEBUG) else _message(error), end="", file=sys.stderr)
            raise typer.Exit(1) from None
        finally:
            noise.disabled = False


def _message(error: BaseException) -> str:
    if isinstance(error, FxplugError):
        return f"{error}\n"
    if isinstance(error, OSError) and error.strerror:
        return printable(f"{error.filename}: {error.strerror}\n" if error.filename else f"{error.strerror}\n")
    notes = "".join(f"  {note}\n" for note in getattr(error, "__notes__", []))
    return printable(f"{type(error).__name__}: {error}\n{notes}  (--debug shows where)\n")


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or value
    return value


def _print_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of an error.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a value first: passes.0.lora.rank=8. Repeatable."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="MODULE", help="A module whose blocks an artifact may use. Repeatable."),
]
ConfigArg = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped one.")]
Subject = Annotated[str, typer.Argument(metavar="CONFIG_OR_DIR", help="A configuration, or the folder of a saved rewrite.")]


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Change a PyTorch model by rewriting its graph."""


@app.command()
def rewrite(
    config: ConfigArg,
    out: Annotated[Path | None, typer.Option("--out", help="The folder to save the result in.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List every site and write nothing.")] = False,
    set: Set = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not check the result.")] = False,
    debug: Debug = False,
) -> None:
    """Build, trace, rewrite and verify a model, and save the result."""
    verify = False if no_verify else None
    result = _run(config, set, out=out, dry_run=dry_run, verify=verify)
    if dry_run:
        print(result)
        print("dry run: nothing written")
        return
    for name, sites in result.sites.items():
        print(f"{name}: {len(sites)} site{'s' * (len(sites) != 1)}")
    print(result.report or f"{_parameters(result)}\nnot verified")
    print(f"saved in {out}" if out else "not saved: --out DIR saves it")


@app.command()
def train(
    config: ConfigArg,
    out: Annotated[Path | None, typer.Option("--out", help="The folder of the run; out/NAME-TIME otherwise.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="CHECKPOINT", help="Go on from this checkpoint, or another run's newest.")
    ] = None,
    set: Set = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    debug: Debug = False,
) -> None:
    """Rewrite a model and train what its passes added, as the sections train and data say."""
    read = _read(config, set)
    from .training.run import train as run

    done = run(read, out=out, name=Path(config).stem, resume=start or resume, quiet=quiet, progress=_progress)
    last = f", loss {done.history[-1]['loss']:.4g}" if done.history else ""
    print(f"{len(done.history)} steps{last}")
    for key, value in done.metrics.items():
        print(f"{key} {value:.4g}")
    print(f"saved in {done.out}")


@app.command()
def sites(config: ConfigArg, set: Set = None, debug: Debug = False) -> None:
    """List where the passes of a configuration act, with shapes and the parameters they add."""
    print(_run(config, set, dry_run=True, verify=False))


@app.command()
def diff(subject: Subject, set: Set = None, allow: Allow = None, debug: Debug = False) -> None:
    """Print what the passes changed, as a diff of the graph."""
    if Path(subject).is_dir():
        module = _load(subject, set, allow)
        from .flow import saved_diff

        print(saved_diff(subject, module), end="")
        return
    result = _run(subject, set, dry_run=True, verify=False)
    from .printing import diff as compare

    print(compare(result.base, result.module), end="")


@app.command()
def show(
    subject: Subject,
    modules: Annotated[bool, typer.Option("--modules", help="The tree of modules instead of the graph.")] = False,
    code: Annotated[bool, typer.Option("--code", help="The generated Python instead of the graph.")] = False,
    forms: Annotated[bool, typer.Option("--forms", help="Which form each layer takes when it is lowered.")] = False,
    merge: Annotated[str | None, typer.Option("--merge", help="With --forms: fold, live, remerge or auto.")] = None,
    pack: Annotated[bool, typer.Option("--pack", help="With --forms: products that read one value become one.")] = False,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Print a rewritten model: its graph, its modules, its code, or the forms of its layers."""
    if modules + code + forms > 1:
        raise typer.BadParameter("--modules, --code and --forms exclude each other")
    saved = Path(subject).is_dir()
    dry = not forms  # live merge reads weights
    module = _load(subject, set, allow) if saved else _run(subject, set, dry_run=dry, verify=False).module
    if forms:
        from .lowerings.lowering import form_table, lower

        print(form_table(lower(module, merge=merge, pack=pack)), end="")
        return
    from . import printing

    text = printing.modules(module) if modules else module.code.strip() + "\n" if code else printing.show(module)
    print(text, end="")


adapters = typer.Typer(
    cls=_Verbs, no_args_is_help=True, help="Load, use and unload the adapters in the slots of a saved rewrite.",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.add_typer(adapters, name="adapters")
Saved = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a saved rewrite.")]
Named = Annotated[str, typer.Argument(metavar="NAME", help="What the adapter is called.")]


@adapters.command("list")
def list_adapters(folder: Saved, allow: Allow = None, debug: Debug = False) -> None:
    """List the adapters that are loaded, and how much of each is used."""
    with _changed(folder, allow, save=False) as module:
        held = module.adapters
        rows = held.active if isinstance(held.active, list) else [held.active]
        for name in held.names:
            weights = dict.fromkeys(f"{row.get(name, 0.0):g}" for row in rows)
            print(f"{name}  {', '.join(weights)}{' by sample' if len(rows) > 1 else ''}")
        print(f"{len(held.names)} of {held.slots} slots are taken")


@adapters.command("load")
def load_adapter(
    folder: Saved,
    name: Named,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="The adapter: a file, or a folder.")],
    adapter: Annotated[str | None, typer.Option("--adapter", help="Which of several in the file.")] = None,
    part: Annotated[str | None, typer.Option("--part", help="The part of a pipeline that this model is.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Leave out layers that are not here.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Take the slot of the adapter of that name.")] = False,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Put an adapter into a free slot of a saved rewrite; `adapters use` lets it take part."""
    with _changed(folder, allow) as module:
        found = module.adapters.load(name, source, adapter=adapter, part=part, partial=partial, replace=replace)
    print(f"{name}: {len(found.placed)} layers")
    for other, entries in found.others.items():
        print(f"left out: {len(entries)} layers of {other}")
    if found.missing or found.mismatched:
        print(f"left out: {len(found.missing) + len(found.mismatched)} layers that are not here")


@adapters.command("use")
def use_adapters(
    folder: Saved,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME[=WEIGHT] ...]", help="The adapters that take part; none without any.")
    ] = None,
    by_sample: Annotated[bool, typer.Option("--by-sample", help="One entry for each sample of a batch; - is none.")] = False,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Say which adapters of a saved rewrite take part, and how much: ink=0.8 film=0.3."""
    entries = [_weight(text) for text in names or []]
    with _changed(folder, allow) as module:
        module.adapters.use([dict([e]) if e[0] != "-" else None for e in entries] if by_sample else dict(entries))
    print(f"in use: {' '.join(names or []) or 'none'}")


@adapters.command("unload")
def unload_adapter(folder: Saved, name: Named, allow: Allow = None, debug: Debug = False) -> None:
    """Free the slot of an adapter."""
    with _changed(folder, allow) as module:
        module.adapters.unload(name)
    print(f"{name} is unloaded")


@contextmanager
def _changed(folder: Path, allow: list[str] | None, save: bool = True) -> Iterator[TracedModule]:
    """A saved rewrite with slots, saved again after it was changed."""
    if not folder.is_dir():
        raise SpecError(f"no folder '{folder}': fxplug rewrite CONFIG --out DIR writes one")
    module = _load(str(folder), None, allow)
    from .adapting.switching import Adapters

    Adapters(module)  # which says so where there are no slots
    yield module
    if save:
        from .artifact import save as write
        from .flow import saved_config

        write(module, folder, config=saved_config(folder))


def _weight(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("=")
    try:
        return name, float(weight) if weight else 1.0
    except ValueError:
        raise SpecError(f"'{text}': the weight of an adapter is a number, such as {name}=0.8") from None


@app.command()
def tune(
    subject: Subject,
    compiled: Annotated[bool, typer.Option("--compiled", help="Measure the forms as torch.compile makes them.")] = False,
    turns: Annotated[int, typer.Option("--turns", help="How often each form is measured.")] = 15,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Measure which form each layer with an update takes on this device; `lower` then takes the fastest."""
    from .flow import saved_inputs
    from .lowerings.tuning import tune as run
    from .models import example_inputs

    if Path(subject).is_dir():
        module = _load(subject, set, allow)
        args, kwargs = saved_inputs(subject, module)
    else:
        result = _run(subject, set, verify=False)
        module = result.module
        args, kwargs = example_inputs(_read(subject, set), module)
    with _progress("measure"):
        done = run(module, args, kwargs, compiled=compiled, turns=turns)
    print(done)


@app.command()
def passes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One pass: its parameters.")] = None,
    page: Annotated[bool, typer.Option("--page", help="All about one pass, as Markdown: also what it changes.")] = False,
    pages: Annotated[Path | None, typer.Option("--pages", metavar="DIR", help="Write the pages of all passes.")] = None,
    debug: Debug = False,
) -> None:
    """List the passes that come with fxplug, or the parameters of one."""
    from .spec import REQUIRED, open_pass, shipped

    if pages is not None:
        from .pages import write

        print(f"wrote {len(write(pages))} pages in {pages}")
        return
    if page:
        if name is None:
            raise typer.BadParameter("--page is about one pass: name it")
        from .pages import page as text

        print(text(name), end="")
        return

    if name is None:
        for each, path in shipped("passes").items():
            print(f"{each:18} {open_pass(path).source.data.get('about', '')}")
        return
    draft = open_pass(name)
    print(draft.source.data.get("about", draft.name))
    for key, default in draft.params.items():
        print(f"  {key:10}{'required' if default == REQUIRED else json.dumps(default)}")


@app.command()
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of a configuration, for editors."""
    from .config import schema as make

    print(json.dumps(make(), indent=2))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a saved rewrite.")],
    to: Annotated[str, typer.Option("--to", help="The format: pt2, or aoti for compiled code.")] = "pt2",
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; DIR.pt2 otherwise.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="Where compiled code will run: cpu or cuda.")] = None,
    free: Annotated[str, typer.Option("--free", help="Which sizes stay free: all, batch or none.")] = "all",
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Export a saved rewrite: a program of torch.export's, or an AOTInductor package whose adapters stay live."""
    if not folder.is_dir():
        raise SpecError(f"no folder '{folder}'")
    from .exporting import export as run
    from .flow import saved_inputs

    with _progress("load"):
        module = _load(str(folder), None, allow, device)
        args, kwargs = saved_inputs(folder, module)
    with _progress(f"export to {to}"):
        report = run(module, out or folder.parent / f"{folder.name}.{to}", args, kwargs, to=to, free=free)
    for name, dims in report.dynamic.items():
        print(f"{name}: {'dimensions ' + ', '.join(map(str, dims)) + ' are free' if dims else 'of fixed size'}")
    for note in report.notes:
        print(note)
    print(f"saved in {report.path}")


@app.command()
def convert(
    system: Annotated[str, typer.Argument(metavar="SYSTEM", help="Where the file comes from: hcp (HCP-Diffusion).")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its YAML file with plugin_unet, plugin_TE or lora_unet.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The configuration to write.")],
    model: Annotated[
        str | None, typer.Option("--model", help="The model, as in a configuration; or a configuration that has it (.yaml).")
    ] = None,
    part: Annotated[str, typer.Option("--part", help="Whose plugins: unet or TE.")] = "unet",
    input: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=SIZES", help="What a plugin is fed: cond=n,3,8*h,8*w. Repeatable."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Turn the plugins of another system into a configuration; their classes are used as they are."""
    if system != "hcp":
        raise SpecError(f"no system '{system}'{did_you_mean(system, ['hcp'])}; there is hcp")
    from .compat.hcp_config import convert as run
    from .compat.hcp_config import read_input

    done = run(file, model=model, part=part, inputs=dict(map(read_input, input or [])), out=out)
    with reported(lambda finding: SpecError(f"{out} {finding}"), "cannot be written"):
        _write(out, done.text)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"saved in {out}" if model else f"saved in {out}; its model is left to write")


def _write(path: Path, text: str) -> None:
    """Write a file whole, or leave it as it was; into what is no file, such as a pipe, it is written straight."""
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
        return
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{os.getpid()}.tmp")
    try:
        beside.write_text(text, "utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _read(config: str, set: list[str] | None) -> Config:
    """A configuration, read before torch is imported. What it imports may lie beside it, as with a script."""
    from .config import load_config

    read = load_config(config, set or [])
    sys.path.insert(0, str(read.base.absolute()))
    return read


def _run(config: str, set: list[str] | None, **how: Any) -> Result:
    read = _read(config, set)
    from .flow import rewrite as run

    return run(read, progress=_progress, **how)


def _load(folder: str, set: list[str] | None, allow: list[str] | None, device: str | None = None) -> TracedModule:
    if set:
        raise typer.BadParameter("--set changes a configuration, and this is the folder of a saved rewrite")
    from .artifact import load

    return load(folder, allow=allow or (), device=device)


def _parameters(result: Result) -> str:
    from .printing import parameters

    return parameters(result.module)


@contextmanager
def _progress(text: str) -> Iterator[None]:
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


def main() -> None:
    """The `fxplug` command."""
    app(prog_name="fxplug")


if __name__ == "__main__":
    main()
