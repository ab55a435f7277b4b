"""Hooks of `make docs`: navigation by what is in the folders, and links to files outside docs/ as plain code text."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
API = ("core", "adapters", "lowering", "exports", "training", "pipelines", "step_caches", "parallel", "more")
TUTORIALS = (  # in the order of learning
    "vision_head", "diffusion_lora", "from_other_files", "many_adapters", "controlnet", "own_method", "two_processes",
)  # fmt: skip
SECTIONS: dict[str, list[Any]] = {
    "Tutorials": [f"tutorials/{name}.ipynb" for name in TUTORIALS],
    "Train": ["guides/training.md", "guides/methods.md", "guides/other-trainers.md"],
    "Models": ["families/index.md", "families/*.md"],
    "Adapters": ["guides/adapters.md", "guides/hub.md"],
    "Pipelines": ["guides/pipelines.md", "guides/step_caches.md"],
    "Export and ship": ["guides/exports.md", "guides/parallel.md"],
    "Write a method": [f"guides/{name}.md" for name in ("configurations", "passes", "extending", "tracing", "report")],
    "Come from": [f"guides/{name}.md" for name in ("coming-from", "hcp", "zhijian")],
    "Reference": [
        "reference/verbs.md", "reference/keys.md", {"Passes": ["reference/passes.md", "reference/passes/**/*.md"]},
        {"Python": [f"reference/api/{name}.md" for name in API]}, "reference/errors.md", "reference/adapter_files.md",
        "skill.md",
    ],
    "Results": ["measured.md", "matrix.md"],
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
    return [page for n, page in enumerate(found) if page not in found[:n]]


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
