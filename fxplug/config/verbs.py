"""The verbs that need no other extension: `rewrite`, `sites`, `diff`, `show`, `passes` and `schema`.

torch is imported by the verbs that need it, when they run: `--help`, `passes` and `schema` answer at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fxplug

from ..core.errors import SpecError
from ..core.extensions import need_hook
from ..core.spec.pass_file import REQUIRED, list_shipped, open_pass
from ..core.spec.rules import NUMERICS
from . import schema as json_schema
from .cli.json_output import Json, print_json
from .cli.terminal import format_modules, make_diff, print_diff, print_rows
from .cli.verbs import (
    Allow,
    ConfigArg,
    Debug,
    Set,
    Subject,
    complete_pass,
    format_parameters,
    load_saved,
    read_config,
    run_rewrite,
    show_progress,
)

if TYPE_CHECKING:
    from .flow import Result


def rewrite(
    config: ConfigArg,
    out: Annotated[Path | None, typer.Option("--out", help="The folder to save the result in.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the sites; write nothing.")] = False,
    set: Set = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the checks.")] = False,
    all_: Annotated[bool, typer.Option("--all", help="With --dry-run: one line per site.")] = False,
    page: Annotated[Path | None, typer.Option("--report", metavar="PAGE.html", help="Also write a report page.")] = None,
    debug: Debug = False,
) -> None:
    """Build, trace, rewrite and verify a model, and save the result."""
    verify = False if no_verify else None
    if page is not None and page.is_dir():
        raise SpecError(f"'{page}' is a folder, and the page is one file: write --report {page / 'page.html'}")
    found = read_config(config, set)
    if out is None and not dry_run:
        print("nothing will be saved: --out DIR saves the result", file=sys.stderr)
    result = run_rewrite(found, out=out, dry_run=dry_run, verify=verify)
    if page is not None:
        write_page = need_hook("report_of_result", "reporting")
        with show_progress("report"):
            write_page(result, page)
    if dry_run:
        _print_sites(result, all_)
        print("dry run: nothing written")
        return
    for part, one in result.by_part.items():
        _print_part(part, result)
        for name, sites in one.sites.items():
            print(f"{name}: {sites.summary}")
        print(one.report.listing if one.report else f"{format_parameters(one)}\nnot verified")
    print(f"saved in {out}" if out else "not saved: --out DIR saves it")


def sites(
    config: ConfigArg,
    all_: Annotated[bool, typer.Option("--all", help="One line per site; do not fold repeated sites.")] = False,
    set: Set = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the layers that the passes of a configuration change, with shapes and added parameters."""
    result = run_rewrite(read_config(config, set), dry_run=True, verify=False)
    if as_json:
        print_json({"models": [one.describe() for one in result.by_part.values()]})
    else:
        _print_sites(result, all_)


def _print_sites(result: Result, all_: bool) -> None:
    for part, one in result.by_part.items():
        _print_part(part, result)
        print_rows(one.listing if all_ else one.folded)


def _print_part(part: str, result: Result) -> None:
    """Print the name of one of several models before what is said of it."""
    if result.beside:
        print(f"{part} ({result.by_part[part].module.classes[0]})")


def diff(
    subject: Subject,
    all_: Annotated[bool, typer.Option("--all", help="Show repeated parts and long lines in full.")] = False,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Print the changes of the passes as a diff of the graph. Passes freeze no weights; call fxplug.trainable to do so."""
    if Path(subject).is_dir():
        from .flow import read_saved_diff

        module = load_saved(subject, set, allow)
        print_diff(make_diff(read_saved_diff(subject, module), module, all_), all_)
        return

    found = run_rewrite(read_config(subject, set), dry_run=True, verify=False)
    for part, one in found.by_part.items():
        _print_part(part, found)
        print_diff(make_diff(fxplug.diff(one.base, one.module), one.module, all_), all_)


def show(
    subject: Subject,
    modules: Annotated[bool, typer.Option("--modules", help="Print the module tree instead of the graph.")] = False,
    code: Annotated[bool, typer.Option("--code", help="Print the generated code instead.")] = False,
    digest: Annotated[bool, typer.Option("--digest", help="Print a saved rewrite's digest, for load(digest=...).")] = False,
    forms: Annotated[bool, typer.Option("--forms", help="Print how `lower` computes each layer.")] = False,
    merge: Annotated[str | None, typer.Option("--merge", help="With --forms: how to merge: fold, live or auto.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Write the graph as model-explorer, dot or svg.")] = None,
    region: Annotated[str, typer.Option("--region", metavar="PATH", help="With --to dot or svg: draw this submodule.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="With --to: the file to write.")] = None,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Print the graph, modules or code of a rewritten model, or write the graph for other tools."""
    if modules + code + digest + forms + (to is not None) > 1:
        raise typer.BadParameter("use only one of --modules, --code, --digest, --forms and --to")
    if to is None and (region or out):
        raise typer.BadParameter("--region and --out are only for --to")
    if digest:
        print(fxplug.digest(subject))
        return
    dry = not forms  # live merge reads weights
    if Path(subject).is_dir():
        module = load_saved(subject, set, allow)
    else:
        module = run_rewrite(read_config(subject, set), dry_run=dry, verify=False).module
    if forms:
        print(need_hook("table_of_forms", "lowerings")(module, merge=merge), end="")
        return
    if to is not None:
        need_hook("show_to", "reporting")(module, to, region, out)
        return
    print(format_modules(module) if modules else module.code.strip() + "\n" if code else fxplug.show(module), end="")


def passes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="List the parameters of this pass.", autocompletion=complete_pass)
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="Print the page of the pass (Markdown).")] = False,
    pages: Annotated[Path | None, typer.Option("--pages", metavar="DIR", help="Write the pages of all passes.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the shipped passes, or the parameters of one."""
    if as_json and (page or pages is not None):
        raise typer.BadParameter("--json is not for --page and --pages, which write Markdown")
    if pages is not None:
        from .cli.pages import write

        print(f"wrote {len(write(pages))} pages in {pages}")
        return
    if page:
        if name is None:
            raise typer.BadParameter("--page needs the name of a pass")
        from .cli.pages import make_page as text

        print(text(name), end="")
        return

    if as_json:
        if name is None:
            print_json({"passes": [_describe_pass(each, path) for each, path in list_shipped("passes").items()]})
        else:
            print_json({**_describe_pass(name, name), "parameters": _describe_parameters(name)})
        return
    if name is None:
        for each, path in list_shipped("passes").items():
            data = open_pass(path).source.data
            print(f"{each:18} {data.get('numerics', ''):8}  {data.get('about', '')}")
        return
    draft = open_pass(name)
    print(draft.source.data.get("about", draft.name))
    if numerics := draft.source.data.get("numerics"):
        print(f"numerics: {numerics} ({NUMERICS[numerics]})")
    rows = [
        (key, "required" if default == REQUIRED else json.dumps(default), text)
        for key, default, text, _ in json_schema.list_parameters(draft)
    ]
    keys, defaults = (max(len(row[column]) for row in rows) for column in (0, 1))
    for key, default, said in rows:
        print(f"  {key:{keys}}  {default:{min(defaults, 40)}}  {said}".rstrip())


def _describe_pass(name: str, source: str | Path) -> dict[str, Any]:
    data = open_pass(source).source.data
    return {"name": name, "numerics": data.get("numerics"), "about": data.get("about")}


def _describe_parameters(name: str) -> list[dict[str, Any]]:
    rows = json_schema.list_parameters(open_pass(name))
    return [
        {"name": key, "required": default == REQUIRED, "default": None if default == REQUIRED else default, "about": text}
        for key, default, text, _ in rows
    ]


def schema(
    page: Annotated[bool, typer.Option("--page", help="Print all keys as Markdown instead.")] = False, debug: Debug = False
) -> None:
    """Print the JSON Schema of a configuration, for use in editors."""
    print(json_schema.make_page() if page else json.dumps(json_schema.make_schema(), indent=2), end="" if page else "\n")
