"""A graph and the difference between two, as stable text: one line a node, in the words of the pass language."""

from __future__ import annotations

import difflib
import operator
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from . import functions, ops
from .graph import without_edges
from .traced_module import TracedModule, class_names


def show(module: fx.GraphModule) -> str:
    """The graph as text: `name = target(arguments)`, modules by path, edges of regions left out; its variants, a line each."""
    more = module.variants if isinstance(module, TracedModule) else []
    return "\n".join([*_lines(module.graph), *(f"# variant: {label}" for label in more)]) + "\n"


def diff(before: fx.GraphModule, after: fx.GraphModule, context: int = 1) -> str:
    """What changed between two graphs, as a unified diff without its header; empty when nothing did."""
    old, new = _lines(before.graph), _lines(after.graph)
    rows: list[str] = []
    for group in _Alike(None, old, new).get_grouped_opcodes(context):
        spans = ((group[0][1], group[-1][2]), (group[0][3], group[-1][4]))
        rows.append("@@ -{} +{} @@".format(*(_span(*span) for span in spans)))
        for tag, start, end, first, last in group:
            if tag == "equal":
                rows += [f" {line}" for line in old[start:end]]
            else:
                rows += [f"-{line}" for line in old[start:end]] + [f"+{line}" for line in new[first:last]]
    return "\n".join(rows) + "\n"


class _Alike(difflib.SequenceMatcher[str]):
    """Lines that two texts share: at once where they are in one order in both, as a rewrite leaves them. difflib's own search
    takes time with the square of their number."""

    a: Sequence[str]
    b: Sequence[str]

    def get_matching_blocks(self) -> list[difflib.Match]:
        places = dict(zip(_numbered(self.b), range(len(self.b)), strict=True))
        pairs = [(i, places[key]) for i, key in enumerate(_numbered(self.a)) if key in places]
        if any(two[1] < one[1] for one, two in pairwise(pairs)):
            return super().get_matching_blocks()
        blocks: list[difflib.Match] = []
        for i, j in pairs:
            last = blocks[-1] if blocks else difflib.Match(-1, -1, 0)
            if last.size and (last.a + last.size, last.b + last.size) == (i, j):
                blocks[-1] = last._replace(size=last.size + 1)
            else:
                blocks.append(difflib.Match(i, j, 1))
        return [*blocks, difflib.Match(len(self.a), len(self.b), 0)]


def _numbered(lines: Sequence[str]) -> list[tuple[str, int]]:
    """Each line and how often it was there before."""
    counts: Counter[str] = Counter()
    found = []
    for line in lines:
        found.append((line, counts[line]))
        counts[line] += 1
    return found


def _span(start: int, end: int) -> str:
    """Lines from 0 on as a unified diff counts them."""
    return f"{start + 1}" if end - start == 1 else f"{start + (end > start)},{end - start}"


def modules(module: nn.Module) -> str:
    """The module tree: path, class and parameters of everything that has some, or was called."""
    rows = []
    for path, child in module.named_modules():
        own = sum(p.numel() for p in child.parameters(recurse=False))
        if path and (own or not len(list(child.children()))):
            rows.append(f"{path}  {class_names(child)[0]}" + (f"  {own:,}" if own else ""))
    return "\n".join(rows) + "\n"


def _lines(graph: fx.Graph) -> list[str]:
    return [text for node in without_edges(graph).nodes if (text := line(node))]


def line(node: fx.Node) -> str:
    """A node as one line of text; an empty one for what is left out."""
    if node.op == "placeholder":
        default = f" = {node.args[0]!r}" if node.args else ""
        return f"input {node.target}{default}"
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if node.op == "get_attr":
        return f"{node.name} = {node.target}"
    args = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    if node.target is operator.getitem and node.op == "call_function":
        index = node.args[1]
        inside = ", ".join(map(_text, index)) if isinstance(index, tuple) and len(index) > 1 else args[1]
        return f"{node.name} = {args[0]}[{inside}]"
    if node.op == "call_method":
        return f"{node.name} = {args[0]}.{node.target}({', '.join(args[1:])})"
    if node.target is ops.guard:
        return f"guard {args[0]} is {args[1]}"
    if node.target is ops.same:
        pairs = zip(node.args[2], node.args[1], strict=True)  # type: ignore[arg-type]
        return "constant " + ", ".join(f"{name}={value!r}" for name, value in pairs)
    if node.target is ops.check_inputs:
        ranks = zip(node.args[3], node.args[1], strict=True)  # type: ignore[arg-type]
        return "check " + ", ".join(f"{name}: {rank}-d" for name, rank in ranks)
    if node.target is ops.check_numbers:
        kinds = zip(node.args[2], node.args[1], strict=True)  # type: ignore[arg-type]
        return "check " + ", ".join(f"{name}: {kind}" for name, kind in kinds)
    if node.target is ops.check_added:
        return f"{node.name} = check {args[0]}: {node.args[3] or 'any shape'}"
    if node.target in (ops.check_members, ops.check_generator):
        return f"check {node.args[2]}: {args[1]}"
    stands_for = node.meta.get("result", {}).get("result", "").rpartition(":")[2]  # of a class that was not there to be read
    name = node.target if node.op == "call_module" else stands_for or functions.names().get(node.target)
    name = name or getattr(node.target, "__qualname__", str(node.target))
    short = str(name).removeprefix("fxplug.ops.").removeprefix("torch.nn.functional.").removeprefix("operator.")
    return f"{node.name} = {short}({', '.join(args)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, slice):
        start, stop = ("" if v is None else _text(v) for v in (value.start, value.stop))
        return f"{start}:{stop}" + (f":{_text(value.step)}" if value.step is not None else "")
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(value)
