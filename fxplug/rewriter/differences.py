"""How values differ, in words, and at which block of a graph a difference begins."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..ir.pytree import children, leaves
from .probe import Probe, flows


def is_differentiable(value: Any) -> bool:
    """Whether a value is a tensor of numbers that a gradient can have."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def unlike(a: Any, b: Any, place: str = "") -> str | None:
    """How `b` differs from `a`, nested values of tensors, in words; None where it does not."""
    at = f" at {place}" if place else ""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensor_unlike(a, b, at)
    inner, other = children(a), children(b)
    if type(a) is not type(b):
        return f"in kind{at}: a {type(b).__name__} instead of a {type(a).__name__}"
    if inner is None or other is None:
        return None if a is b or a == b or (a != a and b != b) else f"{'in value' + at}: {b!r} instead of {a!r}"
    ours, theirs = dict(inner), dict(other)
    if list(ours) != list(theirs):
        return f"in structure{at}: members {list(theirs)} instead of {list(ours)}"
    rows = (unlike(ours[key], theirs[key], f"{place}[{key!r}]") for key in ours)
    return next((row for row in rows if row is not None), None)


def _tensor_unlike(a: torch.Tensor, b: torch.Tensor, at: str) -> str | None:
    for what in ("shape", "dtype", "device", "layout"):
        before, now = getattr(a, what), getattr(b, what)
        if before != now:
            shown = [list(v) if what == "shape" else v for v in (now, before)]
            return f"in {what}{at}: {shown[0]} instead of {shown[1]}"
    if equal(a, b):
        return None
    if not is_differentiable(a) or a.layout != torch.strided:
        return f"in value{at}"
    if not torch.equal(a.isnan(), b.isnan()):
        return f"in {int((a.isnan() != b.isnan()).sum())} places{at} that are NaN in one of them"
    gaps = (a - b).abs()
    return f"by {gaps[gaps.isfinite() | (gaps == torch.inf)].max().item():.1e}{at}"


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal, where NaN equals NaN and infinities only themselves."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and a.layout == torch.strided and bool(((a == b) | (a.isnan() & b.isnan())).all())


# --- who it was


def _digest(value: Any) -> Any:
    """What tells values of a node apart without keeping them: shapes, dtypes and a checksum, in which 0 and -0 are one."""
    rows = []
    for t in leaves(value):
        if isinstance(t, torch.Tensor):
            plain = t.detach()
            plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
            plain = plain if plain.dtype == torch.bool else plain + 0
            held = plain.cpu().contiguous().flatten().view(torch.uint8).numpy()
            rows.append((tuple(t.shape), t.dtype, zlib.crc32(held.data)))
    return rows


class Record(Probe):
    """Runs the model and notes a digest of each node's value."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, call: Any, into: dict[str, Any]) -> None:
        super().__init__(module, graph, call)
        self.garbage_collect_values = False
        self.into = into

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and keep a digest of what it gives by its name."""
        out = super().run_node(n)
        if n.op.startswith("call"):
            self.into[n.name] = _digest(out)
        return out


class Watch(Probe):
    """Runs the rewritten model and notes the first node of the model whose value is another, and what blocks did before."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, call: Any, before: Mapping[str, Any]) -> None:
        super().__init__(module, graph, call)
        self.before = before
        self.first: fx.Node | None = None
        self.writers: list[fx.Node] = []
        self.cutters: list[fx.Node] = []
        self.louder: set[fx.Node] = set()

    def inserted(self, node: fx.Node) -> bool:
        """Whether a node calls something and the model has none of its name."""
        return node.op.startswith("call") and node.name not in self.before

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and compare what it gives, or what a block did to its inputs, up to the first difference."""
        if self.first is not None or not self.before:
            return super().run_node(n)
        if not self.inserted(n):
            out = super().run_node(n)
            if n.name in self.before and _digest(out) != self.before[n.name]:
                self.first = n
            return out
        given = [self.env[a] for a in n.all_input_nodes if isinstance(self.env.get(a), torch.Tensor)]
        digests = [_digest(t) for t in given]
        functions = [t.grad_fn if t.grad_fn is not None else t for t in given]
        out = super().run_node(n)
        if "pass" not in n.meta:
            return out
        if [_digest(t) for t in given] != digests:
            self.writers.append(n)
        results = [t for t in leaves(out) if isinstance(t, torch.Tensor)]
        same = [i for i, d in enumerate(digests) for t in results[:1] if _digest(t) == d]
        if n.op == "call_module" and not same:
            self.louder.add(n)
        if any(given[i].requires_grad and not flows(results[0], functions[i]) for i in same):
            self.cutters.append(n)
        return out

    def blamed(self) -> fx.Node | None:
        """The block behind the difference: the first above it whose result is none of its inputs, else the nearest one."""
        if self.first is None:
            return next(iter([*self.cutters, *self.writers]), None)
        seen, todo = {self.first}, [self.first]
        while todo:
            fresh = [a for a in todo.pop().all_input_nodes if a not in seen and self.inserted(a)]
            seen.update(fresh)
            todo.extend(fresh)
        above = sorted(n for n in seen - {self.first} if "pass" in n.meta)
        loud = [n for n in above if n in self.louder]
        blocks = [n for n in above if n.op == "call_module"]
        return next(iter([*loud, *self.writers, *reversed(blocks), *reversed(above)]), None)
