"""Listings and diffs as a terminal has them: in its width, coloured unless NO_COLOR is set. Elsewhere they are plain."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.ir.traced_module import TracedModule

STYLES = {"+": "green", "-": "red", "@": "cyan"}


def print_rows(listing: str) -> None:
    """Print a listing of sites; on a terminal its columns stand below each other, or each place has a line of its own."""
    if not sys.stdout.isatty():
        print(listing)
        return
    width = shutil.get_terminal_size().columns
    rows = [line.strip().split("  ", 1) for line in listing.split("\n") if line.startswith("  ")]
    first = max((len(row[0]) for row in rows), default=0)
    fits = 4 + first + max((len(row[-1]) for row in rows), default=0) <= width
    for line in listing.split("\n"):
        name, _, rest = line.strip().partition("  ")
        if line.startswith("  ") and rest:
            line = f"  {name:<{first}}  {rest}" if fits else f"  {name}\n      {rest}"
        print(line)


def make_diff(diff: str, module: TracedModule, whole: bool) -> list[str]:
    """Return a diff, with repeated parts once unless `whole`, and a one-line summary."""
    from ...core.ir.text import fold_diff, summarize_diff

    passes = [entry["name"] for entry in module.meta.get("passes", [])]
    return [diff if whole else fold_diff(diff), summarize_diff(diff, passes)]


def format_modules(module: TracedModule) -> str:
    """Return the tree of a module's modules."""
    from ...core.ir.text import show_modules

    return show_modules(module)


def print_diff(texts: list[str], whole: bool) -> None:
    """Print what `make_diff` gives."""
    text, total = texts
    if not sys.stdout.isatty():
        print(text, end="")
        print(total)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=whole)
    for line in text.splitlines():
        console.print(Text(line, style=STYLES.get(line[:1], "")), overflow="ignore" if whole else "ellipsis", no_wrap=True)
    console.print(Text(total, style="bold"))
