"""`fxplug report`, and `fxplug show --to`: a module to look at, and its graph for other tools."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

import fxplug

from ..config.cli.verbs import Allow, Debug, Set, Subject, read_config, run_rewrite, show_progress
from ..core.errors import SpecError


def report(
    subject: Subject,
    out: Annotated[Path | None, typer.Option("--out", help="The .html or .json file to write (default: NAME.html).")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    set: Set = None,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Write a report page of a rewrite or training run: its model, changes, costs and checks."""
    from .reports import check_kind, report_folder

    path = Path(subject)
    target = out or Path(f"{path.absolute().name if path.is_dir() else path.stem}.html")
    if target.is_dir():
        raise SpecError(f"'{target}' is a folder, and the page is one file: write --out {target / 'page.html'}")
    check_kind(target)
    if path.is_dir():
        if set:
            raise typer.BadParameter("--set changes a configuration, and this is a folder")
        with show_progress("report"):
            page = report_folder(path, target, allow=allow or ())
    else:
        result = run_rewrite(read_config(subject, set), dry_run=True)
        with show_progress("report"):
            page = fxplug.report(result.base, result.module, target, checks=result.report)
    if page.trouble:
        print(f"{subject} cannot be shown; the page has the reason: {page.trouble.splitlines()[0]}", file=sys.stderr)
    print(f"saved in {target}")
    if open_ and not webbrowser.open(target.absolute().as_uri()):
        print(f"no browser was found: open {target} in one", file=sys.stderr)
