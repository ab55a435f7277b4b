"""Hooks of `make docs`: navigation by what is in the folders, and links to files outside docs/ as plain code text."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = {
    "Tutorials": ["tutorials/*.ipynb"],
    "Guides": [f"guides/{name}.md" for name in (
        "configurations", "passes", "training", "pipelines", "adapters", "exports", "step_caches", "parallel", "report",
        "tracing", "coming-from", "hcp", "zhijian", "extending",
    )],
    "Reference": ["reference/verbs.md", "reference/keys.md", "reference/passes.md", "reference/passes/**/*.md",
                  "reference/api/*.md", "reference/errors.md", "reference/adapter_files.md"],
}  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Fill the empty sections of `nav` with the files that are there; one without files goes."""
    for section in list(config.nav):
        ((title, pages),) = section.items() if isinstance(section, dict) else ((section, None),)
        if title in SECTIONS:
            found = [path for pattern in SECTIONS[title] for path in sorted(DOCS.glob(pattern))]
            pages += [path.relative_to(DOCS).as_posix() for path in found]
            if not pages:
                config.nav.remove(section)
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write a link that leaves docs/ as what it names: a site in a folder has no sources beside it."""

    def rewrite(match: re.Match[str]) -> str:
        picture, text, link, _ = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link))
        if picture or "://" in link or not target.startswith("../"):
            return match[0]
        name = target.removeprefix("../")
        if not (DOCS.parent / name).exists():
            logging.getLogger("mkdocs.hooks").warning("%s: %s leads nowhere", page.file.src_uri, link)
        plain = text.replace("\\_", "_").strip("`")
        return f"`{name}`" if plain in name else f"{text} (`{name}`)"

    return LINK.sub(rewrite, markdown)
