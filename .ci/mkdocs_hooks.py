"""Hooks of `make docs`: navigation, links to files outside docs/ as code text, and what programs read.

Beside each page is its text, `guides/training.md` beside `guides/training.html`, and `llms.txt` lists all (llmstxt.org).
"""

from __future__ import annotations

import importlib
import inspect
import json
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
    "Adapters": ["guides/adapters.md", "guides/strengths.md", "guides/hub.md"],
    "Pipelines": ["guides/pipelines.md", "guides/step_caches.md", "guides/serving.md", "guides/serve.md"],
    "Export and ship": ["guides/exports.md", "guides/parallel.md"],
    "Write a method": [f"guides/{name}.md" for name in ("configurations", "passes", "extending", "tracing", "report")],
    "Come from": [f"guides/{name}.md" for name in ("coming-from", "hcp", "zhijian")],
    "Reference": [
        "reference/verbs.md", "reference/keys.md", "reference/server.md",
        {"Passes": ["reference/passes.md", "reference/passes/**/*.md"]},
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


def on_nav(nav: Any, config: Any, **_: Any) -> Any:
    """Keep the navigation for `on_post_build`, which is not given it."""
    config.extra["pages"] = nav
    return nav


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write a link that leaves docs/ as what it names: a site in a folder has no sources beside it."""
    return _name_sources(markdown, page.file.src_uri)


def _name_sources(markdown: str, source: str) -> str:
    def rewrite(match: re.Match[str]) -> str:
        picture, text, link, _ = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if picture or "://" in link or not target.startswith("../"):
            return match[0]
        name = target.removeprefix("../")
        if not (DOCS.parent / name).exists():
            logging.getLogger("mkdocs.hooks").warning("%s: %s leads nowhere", source, link)
        plain = text.replace("\\_", "_").strip("`")
        return f"`{name}`" if plain in name else f"{text} (`{name}`)"

    return LINK.sub(rewrite, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Write `llms.txt`, and beside each page the text that it is made of."""
    site, about = Path(config.site_dir), _first_sentence(_read(DOCS / "index.md", "index.md"))
    lines, heading = [f"# {config.site_name}", "", f"> {about}"], ""
    for item in config.extra["pages"].items:
        title = "Pages" if item.is_page else item.title
        if title != heading:
            lines += ["", f"## {title}", ""]
            heading = title
        for page in [item] if item.is_page else _pages_below(item):
            name = page.file.src_uri
            text = _read(DOCS / name, name)
            twin = (site / name).with_suffix(".md")
            twin.write_text(text, "utf-8")
            title = text.splitlines()[0].lstrip("# ")
            lines.append(f"- [{title}]({twin.relative_to(site).as_posix()}): {_first_sentence(text)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def _pages_below(section: Any) -> list[Any]:
    return [page for child in section.children for page in ([child] if child.is_page else _pages_below(child))]


def _read(path: Path, name: str) -> str:
    """Read a page as plain Markdown: cells of a notebook, docstrings in the places of `::: name`, links between the texts."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        text = "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    text = re.sub(r"\A---\n.*?^---\n|<!--.*?-->\n?", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^::: (\S+)$", lambda match: _docstring(match[1]), _name_sources(text, name), flags=re.MULTILINE)
    return re.sub(r"(\]\([^)\s:]+)\.ipynb([#)])", r"\1.md\2", text).strip() + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    said = "".join("".join(output.get("text", [])) for output in cell.get("outputs", []))
    return f"```python\n{source}\n```" + (f"\n\n```text\n{said.rstrip()}\n```" if said else "")


def _docstring(path: str) -> str:
    """Return heading, signature and docstring of what an import path names."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for n, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:n]))
        found = getattr(found, part)
    try:
        signature = str(inspect.signature(found)).replace("'", "")
    except (TypeError, ValueError):
        signature = ""
    return f"### {parts[-1]}\n\n```python\n{parts[-1]}{signature}\n```\n\n{inspect.getdoc(found) or ''}\n"


def _first_sentence(text: str) -> str:
    """Return the first sentence of the first paragraph, without links."""
    paragraphs = (part for part in text.split("\n\n") if part.strip() and part.lstrip()[0] not in "#|`-<!>")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(next(paragraphs, "").split()))
    return plain.partition(". ")[0].removesuffix(".").removesuffix(":") + "." if plain else ""
