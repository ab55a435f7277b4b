"""A graph in the words of other tools: Model Explorer's graphs, dot, and a picture of one region."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core.errors import SpecError, did_you_mean
from ..core.writing import write_text
from .contents import Page, RegionKind
from .gather import gather_contents
from .page import find_region, write_svg
from .pictures import format_shape
from .records import GraphText, NodeText, make_listing

FORMATS = ("model-explorer", "dot", "svg")


def show_to(module: Any, to: str, region: str, out: Path | None) -> None:
    """Write a module's graph for another tool, to stdout if no file is given. Raises SpecError."""
    if to not in FORMATS:
        raise SpecError(f"no format '{to}'{did_you_mean(to, FORMATS)}; there are {', '.join(FORMATS)}")
    if region and to == "model-explorer":
        raise SpecError("--region is not for model-explorer, which shows the whole graph: leave it out")
    text = written(gather_contents(None, module), make_listing(module), to, region)
    if out is None:
        print(text, end="")
        return
    write_text(out, text, lambda finding: SpecError(f"{out} {finding}; give the file to write with --out"))
    print(f"saved in {out}")


def written(page: Page, after: GraphText, to: str, path: str = "") -> str:
    """Write a module as text in a format: all of it for Model Explorer, the region at a path ("" is the model) for the others.
    all of it for Model Explorer, the region at a path ("" is the model) for the others.

    Raises SpecError for a path that is no region.
    """
    if to == "model-explorer":
        return json.dumps(model_explorer(page.title, after), indent=1, ensure_ascii=False) + "\n"
    kind = find_region(page, path)
    return dot(kind, path or page.title) if to == "dot" else write_svg(page, kind, f"{path or page.title}: {kind.label}")


def model_explorer(title: str, after: GraphText) -> dict[str, Any]:
    """Return the graph as Model Explorer loads it (github.com/google-ai-edge/model-explorer, its JSON of graph collections):
    regions are namespaces, shapes are at outputs, and passes with their sites are attributes of nodes."""
    shown = {name: record for name, record in after.records.items() if record.kind != "note"}
    nodes = [_node(record, after, shown) for record in shown.values()]
    return {"label": title, "graphs": [{"id": title, "nodes": nodes}]}


def _node(record: NodeText, after: GraphText, shown: dict[str, NodeText]) -> dict[str, Any]:
    attributes = {"name": record.name, "path": record.path, "pass": record.owner, "site": record.site, "code": record.line}
    sources = [name for name in record.reads if name in shown]
    outputs = [{"key": "tensor_shape", "value": f"{record.dtype}{list(record.shape)}"}] if record.shape is not None else []
    return {
        "id": record.name,
        "label": record.label,
        "namespace": "/".join(_space(outer, inner, after) for outer, inner in pairwise(record.level)),
        "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
        "incomingEdges": [
            {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(index)}
            for index, name in enumerate(sources)
        ],
        "outputsMetadata": [{"id": "0", "attrs": outputs}],
    }


def _space(outer: str, inner: str, after: GraphText) -> str:
    outer = outer.partition("@")[0]
    name = inner[len(outer) + 1 :] if outer and inner.startswith(f"{outer}.") else inner
    return f"{name} ({after.classes.get(inner, 'Module')})".replace("/", "_")


def dot(kind: RegionKind, name: str) -> str:
    """Write one region for Graphviz."""
    styles = {"kept": "solid", "added": "bold", "gone": "dashed"}
    lines = [f"digraph {_quoted(name)} {{", '  node [shape=box, style=rounded, fontname="sans-serif"];']
    for index, box in enumerate(kind.boxes):
        times = f"{len(box.members)} × {box.label}" if box.kind == "repeat" else box.label
        text = "\n".join(filter(None, [box.name, times, format_shape(box.shape), box.owner and f"({box.owner})"]))
        lines.append(f"  n{index} [label={_quoted(text)}, style={_quoted('rounded,' + styles[box.state])}];")
    lines += [f"  n{arrow.source} -> n{arrow.target} [style={styles[arrow.state]}];" for arrow in kind.arrows]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
