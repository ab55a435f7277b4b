"""The page of a module, of a saved rewrite, or of a run, written where it is wanted."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..config.flow import Result
from ..core.artifacts.artifact import load
from ..core.errors import FxplugError, SpecError
from ..core.ir.traced_module import TracedModule
from ..core.verifier import Report
from ..core.writing import write_text
from ..lowerings.hoist.hoisted import HoistedModule
from .contents import Page
from .gather import gather_contents, make_error_page, make_stage_table, read_manifest
from .page import write_html
from .run_log import read_run


def report(
    base: TracedModule | None,
    new: TracedModule | HoistedModule,
    out: str | os.PathLike[str] | None = None,
    *,
    checks: Report | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Page:
    """Write a page about a module: what it is, what its passes changed and where, what they add, and how that was checked.

    `base` is the module before the rewrite; None uses what a rewrite saved with its module. `checks` is the report of `verify`,
    None uses the saved one, too. `folder` is where the module was saved, or the folder of its training run: the page then has
    the hashes of its files, and the run. `out` is the file to write: HTML, or the page's contents as JSON if it ends with
    `.json`. Returns the contents. Nothing is run and no value of a weight is read.

    Args:
        base: The module before the rewrite; None takes what a rewrite kept with a saved one.
        new: The rewritten module, or what `lower(hoist=...)` made of it: the page then has the table of its stages.
        out: The file to write: HTML, or the page's contents as JSON where it ends with `.json`; None writes nothing.
        checks: What `verify` gave; None takes what was kept with the module.
        folder: Where the module was saved, or the folder of its training run: the page then has the hashes of its files, and
            the run.

    Returns:
        The contents of the page.

    Raises:
        SpecError: A module is no traced one, the file is of another kind, or it cannot be written.
    """
    hoisted = new if isinstance(new, HoistedModule) else None
    traced: TracedModule = new.module if isinstance(new, HoistedModule) else new
    for what, module in (("base", base), ("new", traced)):
        if not isinstance(module, TracedModule) and not (module is None and what == "base"):
            raise SpecError(f"report takes traced modules, and {what} is a {type(module).__name__}: use fxplug.trace first")
    if out is not None:
        check_kind(out)
    home = None if folder is None else Path(folder)
    saved = home and _find_saved(home)
    page = gather_contents(base, traced, checks=checks, manifest=read_manifest(saved) if saved else None)
    if hoisted is not None:
        page.tables.append(make_stage_table(hoisted))
    if home is not None:
        page.run = read_run(home)
    if out is not None:
        write(page, out)
    return page


def report_of(result: Result, out: str | os.PathLike[str]) -> Page:
    """Write the page of a rewrite that was just made; a saved one gives the same page."""
    return report(result.base if result.out is None else None, result.module, out, checks=result.report, folder=result.out)


def report_folder(
    folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, allow: Sequence[str] = ()
) -> Page:
    """Write the page of a saved rewrite or a training run; for one that does not load, a page with the error.

    Raises SpecError for a folder that is neither, and for a file that cannot be written.
    """
    if out is not None:
        check_kind(out)
    home = Path(folder)
    saved = _find_saved(home)
    run = read_run(home)
    if saved is None and run is None:
        kind = "is not a folder" if home.exists() else "does not exist"
        why = kind if not home.is_dir() else "has no manifest.json and no log.jsonl"
        raise SpecError(f"{home} {why}: give a configuration, or the folder of a saved rewrite or training run")
    if saved is None:
        page = Page(title=home.absolute().name, trouble="This run has no saved module yet: module/ is written at its end.")
    else:
        try:
            manifest = read_manifest(saved) or {}
        except FxplugError as error:
            manifest, page = {}, make_error_page(home.absolute(), {}, error)
        else:
            try:
                page = gather_contents(None, load(saved, allow=allow), manifest=manifest)
            except Exception as error:  # of whatever a stranger's folder brings: the page tells it
                page = make_error_page(home.absolute(), manifest, error)
    page.run = run
    if out is not None:
        write(page, out)
    return page


def _find_saved(home: Path) -> Path | None:
    """Return the folder of the saved module in that of a run, or itself; the first of several models of a pipeline."""
    return next((path.parent for path in (home / "module" / "manifest.json", home / "manifest.json",
                                          *sorted(home.glob("module/*/manifest.json"))) if path.is_file()), None)  # fmt: skip


KINDS = ("", ".html", ".htm", ".json")  # the endings of what can be written


def check_kind(out: str | os.PathLike[str]) -> Path:
    """Return the file to write. Raises SpecError if its suffix is not that of HTML or JSON."""
    target = Path(out)
    if target.suffix.lower() not in KINDS:
        raise SpecError(
            f"'{target}' ends with {target.suffix}, and a page is HTML or JSON: write {target.with_suffix('.html')}"
            f"{', and print it from a browser' if target.suffix.lower() == '.pdf' else ''}"
        )
    return target


def write(page: Page, out: str | os.PathLike[str]) -> None:
    """Write a page as HTML, or its contents as JSON if the name ends with `.json`. Raises SpecError if the file cannot be
    written."""
    target = check_kind(out)
    text = as_json(page) if target.suffix.lower() == ".json" else write_html(page)
    safe = text.encode("utf-8", "backslashreplace").decode()
    write_text(target, safe, lambda finding: SpecError(f"{target} {finding}; give the file to write with --out"))


def as_json(page: Page) -> str:
    """Return the contents as JSON."""
    return json.dumps(asdict(page), indent=1, ensure_ascii=False) + "\n"
