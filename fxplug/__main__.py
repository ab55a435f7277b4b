"""The command line: `fxplug rewrite | train | sites | diff | show | parallel | adapters | tune | ...`.

torch is imported by the verbs that need it, when they run: `--help`, `passes` and `schema` answer at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli.adapters import adapters
from .cli.convert import convert
from .cli.doctor import doctor
from .cli.files import TO_TOOLS, export_to_tool
from .cli.launched import started, together
from .cli.parallel import parallel
from .cli.reports import report, show_to
from .cli.terminal import diff_texts, print_diff, print_rows
from .cli.verbs import (
    HELP,
    Allow,
    ConfigArg,
    Debug,
    NoCache,
    Set,
    Subject,
    Verbs,
    complete_pass,
    load_saved,
    parameters,
    print_version,
    progress,
    read_config,
    rewritten,
    users_logs,
)
from .errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from .flow import Result

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
app.add_typer(adapters, name="adapters")
app.command()(parallel)
app.command()(convert)
app.command()(report)
app.command()(doctor)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
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
    all_: Annotated[bool, typer.Option("--all", help="With --dry-run: a line for every site.")] = False,
    page: Annotated[Path | None, typer.Option("--report", metavar="PAGE.html", help="Write a page about it, too.")] = None,
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """Build, trace, rewrite and verify a model, and save the result."""
    verify = False if no_verify else None
    if page is not None and page.is_dir():
        raise SpecError(f"'{page}' is a folder, and the page is one file: --report {page / 'page.html'}")
    found = read_config(config, set)
    if out is None and not dry_run:
        print("nothing will be saved: --out DIR saves the result", file=sys.stderr)
    result = rewritten(found, out=out, dry_run=dry_run, verify=verify)
    if page is not None:
        from .reporting.reports import report_of

        with progress("report"):
            report_of(result, page)
    if dry_run:
        print_rows(_rows(result, all_))
        print("dry run: nothing written")
        return
    for name, sites in result.sites.items():
        print(f"{name}: {sites.summary}")
    print(result.report.listing if result.report else f"{parameters(result)}\nnot verified")
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
    found = read_config(config, set)
    from .training.run import train as run

    with users_logs():
        done = run(found, out=out, name=Path(config).stem, resume=start or resume, quiet=quiet, progress=progress)
    last = f", loss {done.history[-1]['loss']:.4g}" if done.history else ""
    print(f"{len(done.history)} steps{last}")
    for key, value in done.metrics.items():
        print(f"{key} {value:.4g}")
    print(f"saved in {done.out}")
    if done.use:
        print(f"\n{done.use}")


@app.command()
def sites(
    config: ConfigArg,
    all_: Annotated[bool, typer.Option("--all", help="A line for every site, also for those that are alike.")] = False,
    set: Set = None,
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """List where the passes of a configuration act, with shapes and the parameters they add."""
    print_rows(_rows(rewritten(read_config(config, set), dry_run=True, verify=False), all_))


def _rows(result: Result, all_: bool) -> str:
    return result.listing if all_ else result.folded


@app.command()
def diff(
    subject: Subject,
    all_: Annotated[bool, typer.Option("--all", help="Every place, also those that are alike, and every line whole.")] = False,
    set: Set = None,
    allow: Allow = None,
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """Print what the passes changed, as a diff of the graph."""
    if Path(subject).is_dir():
        module = load_saved(subject, set, allow)
        from .flow import saved_diff

        print_diff(diff_texts(saved_diff(subject, module), module, all_), all_)
        return

    found = rewritten(read_config(subject, set), dry_run=True, verify=False)
    from .ir.text import diff as compare

    print_diff(diff_texts(compare(found.base, found.module), found.module, all_), all_)


@app.command()
def show(
    subject: Subject,
    modules: Annotated[bool, typer.Option("--modules", help="The tree of modules instead of the graph.")] = False,
    code: Annotated[bool, typer.Option("--code", help="The generated Python instead of the graph.")] = False,
    forms: Annotated[bool, typer.Option("--forms", help="Which form each layer takes when it is lowered.")] = False,
    merge: Annotated[str | None, typer.Option("--merge", help="With --forms: fold, live, remerge or auto.")] = None,
    pack: Annotated[bool, typer.Option("--pack", help="With --forms: products that read one value become one.")] = False,
    to: Annotated[str | None, typer.Option("--to", help="For other tools: model-explorer, dot, or svg.")] = None,
    region: Annotated[str, typer.Option("--region", metavar="PATH", help="With --to dot or svg: which region.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="With --to: the file to write.")] = None,
    set: Set = None,
    allow: Allow = None,
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """Print a rewritten model: its graph, its modules, its code, or the forms of its layers; or write it for other tools."""
    if modules + code + forms + (to is not None) > 1:
        raise typer.BadParameter("--modules, --code, --forms and --to exclude each other")
    if to is None and (region or out):
        raise typer.BadParameter("--region and --out are for --to")
    dry = not forms  # live merge reads weights
    if Path(subject).is_dir():
        module = load_saved(subject, set, allow)
    else:
        module = rewritten(read_config(subject, set), dry_run=dry, verify=False).module
    if forms:
        from .lowerings.pipeline import form_table, lower

        print(form_table(lower(module, merge=merge, pack=pack)), end="")
        return
    if to is not None:
        show_to(module, to, region, out)
        return
    from .ir import text

    print(text.modules(module) if modules else module.code.strip() + "\n" if code else text.show(module), end="")


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
    from .lowerings.linear.measuring import tune as run
    from .models.example_inputs import example_inputs

    if Path(subject).is_dir():
        module = load_saved(subject, set, allow)
        args, kwargs = saved_inputs(subject, module)
    else:
        result = rewritten(read_config(subject, set), verify=False)
        module = result.module
        args, kwargs = example_inputs(read_config(subject, set), module)
    with progress("measure"):
        done = run(module, args, kwargs, compiled=compiled, turns=turns)
    print(done.listing)


@app.command()
def passes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One pass: its parameters.", autocompletion=complete_pass)
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="All about one pass, as Markdown: also what it changes.")] = False,
    pages: Annotated[Path | None, typer.Option("--pages", metavar="DIR", help="Write the pages of all passes.")] = None,
    debug: Debug = False,
) -> None:
    """List the passes that come with fxplug, or the parameters of one."""
    from .spec.pass_file import REQUIRED, open_pass
    from .spec.shipped import shipped

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
    from .spec.json_schema import parameters as explained

    draft = open_pass(name)
    print(draft.source.data.get("about", draft.name))
    told = {key: "required" if default == REQUIRED else json.dumps(default) for key, default, _, _ in explained(draft)}
    rows = [(key, told[key], text) for key, _, text, _ in explained(draft)]
    keys, defaults = (max(len(row[column]) for row in rows) for column in (0, 1))
    for key, default, said in rows:
        print(f"  {key:{keys}}  {default:{min(defaults, 40)}}  {said}".rstrip())


@app.command()
def schema(
    page: Annotated[bool, typer.Option("--page", help="Every key as Markdown instead.")] = False, debug: Debug = False
) -> None:
    """Print the JSON Schema of a configuration, for editors, or its keys as a page."""
    from .spec import json_schema

    print(json_schema.page() if page else json.dumps(json_schema.schema(), indent=2), end="" if page else "\n")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a saved rewrite.")],
    to: Annotated[str | None, typer.Option("--to", help=f"pt2 (else), aoti or onnx; for tools {', '.join(TO_TOOLS)}.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; DIR.pt2 otherwise.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="Where compiled code will run: cpu or cuda.")] = None,
    free: Annotated[str | None, typer.Option("--free", help="Which sizes stay free: all (else), batch or none.")] = None,
    opset: Annotated[int | None, typer.Option("--opset", help="The version of ONNX's operations, for onnx.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", help="For tools: which adapter in the slots.")] = None,
    passes: Annotated[list[str] | None, typer.Option("--pass", help="For tools: which pass without slots. Repeatable.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="For tools: leave out what the format cannot hold.")] = False,
    part: Annotated[str | None, typer.Option("--part", help="For tools: the part of a pipeline that this is.")] = None,
    merge: Annotated[
        str | None, typer.Option("--merge", metavar="ink=0.8,film=0.3", help="For tools: the model, these merged into it.")
    ] = None,
    first_names: Annotated[bool, typer.Option("--first-names", help="With safetensors: the first code base's names.")] = False,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Export a saved rewrite: a program of torch.export's, a package (aoti) or model (onnx) with live adapters, or for tools.

    What is not given is as the section export of its configuration says.
    """
    if not folder.is_dir():
        raise SpecError(f"no folder '{folder}'")
    tools = {"adapter": adapter, "passes": passes, "partial": partial, "part": part, "merge": merge, "first_names": first_names}
    if to in TO_TOOLS:
        export_to_tool(folder, to, out, allow=allow, **tools)  # type: ignore[arg-type]
        return
    if given := next((name for name, value in tools.items() if value), None):
        raise SpecError(f"--{given.replace('_', '-').replace('passes', 'pass')} is for --to {', '.join(TO_TOOLS)}")
    from .exports.exporter import FORMATS
    from .exports.exporter import export as run
    from .flow import saved_export, saved_inputs

    if to is not None and to not in FORMATS:
        known = (*FORMATS, *TO_TOOLS)
        raise SpecError(f"there is no export to '{to}'{did_you_mean(to, known)}; there is {', '.join(known)}")
    how = saved_export(folder, to=to, free=free, device=device)
    if opset is not None and how.to != "onnx":
        raise SpecError(f"--opset is for onnx, and this is an export to {how.to}")
    with progress("load"):
        module = load_saved(str(folder), None, allow, how.device)
        args, kwargs = saved_inputs(folder, module)
    with progress(f"export to {how.to}"):
        options = None if opset is None else {"opset": opset}
        path = out or folder.parent / f"{folder.name}.{how.to}"
        report = run(module, path, args, kwargs, to=how.to, free=how.free, options=options)
    for name, dims in report.dynamic.items():
        print(f"{name}: {'dimensions ' + ', '.join(map(str, dims)) + ' are free' if dims else 'of fixed size'}")
    for note in report.notes:
        print(note)
    print(f"saved in {report.path}")


MANY = {"--check", "measured", "--link=measured"}  # what `parallel` needs all processes for


def main() -> None:
    """The `fxplug` command."""
    if started():
        verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        many = verb == "train" or (verb == "parallel" and bool(MANY & {*sys.argv}))
        together(lambda: app(prog_name="fxplug"), everywhere=many)
    app(prog_name="fxplug")


if __name__ == "__main__":
    main()
