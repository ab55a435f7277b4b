"""Hooks of `make docs`: navigation by what is in the folders, and links to files outside docs/ as plain code text."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
API = ("core", "adapters", "lowering", "exports", "training", "pipelines", "step_caches", "parallel", "more")
GUIDES = """
    configurations passes training pipelines adapters hub exports step_caches parallel report tracing
    coming-from hcp zhijian extending
""".split()  # noqa: SIM905
SECTIONS: dict[str, list[Any]] = {
    "Tutorials": ["tutorials/*.ipynb"],
    "Guides": [f"guides/{name}.md" for name in GUIDES],
    "Reference": [
        "reference/verbs.md", "reference/keys.md", {"Passes": ["reference/passes.md", "reference/passes/**/*.md"]},
        {"Python": [f"reference/api/{name}.md" for name in API]}, "reference/errors.md", "reference/adapter_files.md",
    ],
}  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Fill the empty sections of `nav` with the files that are there; one without files goes."""
    for section in [each for each in config.nav if isinstance(each, dict)]:
        ((title, pages),) = section.items()
        pages += _files(SECTIONS[title])
        if not pages:
            config.nav.remove(section)
    return config


def _files(patterns: list[Any]) -> list[Any]:
    found: list[Any] = []
    for pattern in patterns:
        if isinstance(pattern, dict):
            found += [{title: _files(inner)} for title, inner in pattern.items()]
        else:
            found += [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.glob(pattern))]
    return found


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
