"""Where tokens are born: from attention back, operation by operation, as long as one dimension carries them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, fx

from ...core.ir import ops
from ...core.ir.functions import bind_attention
from ..runtime.layouts import Layout
from .backward import Backward
from .planner import make_plan
from .sharding_plan import ShardingPlan, Unsplittable
from .streams import Placement
from .trials import ShardTrials, count_elements, get_name
from .walk import Walk

SOFTMAX = ("softmax", "_softmax")
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "__matmul__")


def sites(walk: Walk) -> list[tuple[fx.Node, fx.Node, int]]:
    """Return where tokens of one kind interact: the node, the value with the queries, and their dimension in it. the node, the
    value with the queries, and their dimension in it.

    `scaled_dot_product_attention`, or a softmax or a product with as many columns as there are rows.
    """
    found, products = [], []
    for node in walk.graph.nodes:
        name = get_name(node)
        if name == "scaled_dot_product_attention":
            given = bind_attention(node)
            query, key = given["query"], given["key"]
            if isinstance(query, fx.Node) and isinstance(key, fx.Node):
                n = walk.values[query].shape[-2]
                if n == walk.values[key].shape[-2] and n > 1:
                    found.append((node, query, walk.values[query].dim() - 2))
        elif name in SOFTMAX or (node.op == "call_module" and "softmax" in str(node.target).lower()):
            scores = node.all_input_nodes[0]
            shape: tuple[int, ...] = tuple(getattr(walk.values[scores], "shape", ()))
            if len(shape) >= 3 and shape[-1] == shape[-2] > 1:
                found.append((node, scores, len(shape) - 2))
        elif name in PRODUCTS:
            shape = tuple(walk.values[node].shape)
            if len(shape) >= 3 and shape[-1] == shape[-2] > 1:
                products.append((node, node, len(shape) - 2))
    return found + products


class OriginSearch(Backward):
    """Follows a dimension back to the values where it begins."""

    numbers_count = False

    def __init__(self, walk: Walk, tries: ShardTrials) -> None:
        super().__init__(walk, tries)
        self.seen: set[tuple[fx.Node, int]] = set()

    def of(self, node: fx.Node, dim: int) -> dict[fx.Node, int]:
        """Return the starts of the tokens along a dimension of a value."""
        found: dict[fx.Node, int] = {}
        todo: list[tuple[fx.Node, int, tuple[fx.Node, int], fx.Node | None]] = [(node, dim, (node, dim), None)]
        while todo:
            value, at, reader, held = todo.pop()
            if (value, at) in self.seen:
                continue
            self.seen.add((value, at))
            if value not in self.fed:  # a table, which is split where tokens meet it
                continue
            if self.walk.written & self.walk.roots(value):  # it is written in parts: tokens may be born where it is read first
                found.pop(held, None)  # type: ignore[arg-type]
                held, found[reader[0]] = reader
            else:
                held = None
            if before := self.before(value, self.tokens(value, at)):
                todo += [(one, place.dim, (value, at), held) for one, place in before]
            else:
                found[value] = at
        return found

    def tokens(self, node: fx.Node, dim: int) -> Placement:
        """Return a placement with all of a dimension as one stream."""
        return Placement(dim, Layout((self.stream(self.walk.values[node].shape[dim]),)))

    def before(self, node: fx.Node, wanted: Placement) -> list[tuple[fx.Node, Placement]] | None:
        """Return the inputs as `Backward` does; for attention the queries."""
        if get_name(node) != "scaled_dot_product_attention":
            return super().before(node, wanted)
        query = bind_attention(node)["query"]
        return [(query, wanted)] if isinstance(query, fx.Node) and wanted.dim == self.walk.values[node].dim() - 2 else None

    def guesses(self, node: fx.Node, wanted: Placement) -> Iterator[tuple[int, Placement]]:
        """Yield dimensions of the same size, the same one first."""
        size = wanted.layout.total(self.sizes)
        for index, one in enumerate(node.all_input_nodes):
            dims = (dim for dim, n in enumerate(getattr(self.walk.values[one], "shape", ())) if n == size > 1)
            yield from ((index, wanted._replace(dim=dim)) for dim in sorted(dims, key=lambda dim: dim != wanted.dim))

    def joined(self, node: fx.Node, wanted: Placement) -> list[tuple[fx.Node, Placement]]:
        """Return the inputs of a concatenation, each with tokens of its own."""
        rank, dim = self.walk.values[node].dim(), wanted.dim
        parts = [n for n in node.all_input_nodes if getattr(self.walk.values[n], "ndim", 0) == rank]
        return [(n, self.tokens(n, dim)) for n in parts if self.walk.values[n].shape[dim] > 1]


def blocks(walk: Walk) -> list[tuple[fx.Node, int]]:
    """Return the inputs of the first of repeated blocks, along their second dimension: for models whose tokens interact in
    other ways."""
    paths = {str(node.meta["port"].path) for node in walk.graph.nodes if "port" in node.meta}
    found = []
    for node in walk.graph.nodes:
        port = node.meta.get("port")
        if port is None or port.side != "in" or node.target is not ops.edge:
            continue
        owner, _, last = port.path.rpartition(".")
        shape: tuple[int, ...] = tuple(getattr(walk.values[node], "shape", ()))
        if last == "0" and f"{owner}.1" in paths and len(shape) == 3 and shape[1] > 1:
            found.append((node, 1))
    return found


def find_samples(walk: Walk) -> dict[fx.Node, int]:
    """Return the inputs with the batch size of the first of them with three dimensions or more: along the first dimension."""
    given = [node for node in walk.inputs if isinstance(walk.values[node], Tensor) and walk.values[node].dim()]
    first = next((n for n in given if walk.values[n].dim() > 2), next(iter(given), None))
    if first is None:
        raise Unsplittable("no input is a tensor with a dimension of samples")
    batch = walk.values[first].shape[0]
    return {node: 0 for node in given if walk.values[node].shape[0] == batch}


def find_best(tries: ShardTrials, walk: Walk, ways: int = 1) -> ShardingPlan:
    """Return the plan that splits most work, then with few gathers, from a minimal set of starts.

    Streams with fewer than `ways` tokens stay whole, unless there are no others. Raises Unsplittable if no plan splits
    anything.
    """
    found: ShardingPlan | None = None
    failed: Unsplittable | None = None
    for rows in ([(query, dim) for _, query, dim in sites(walk)], blocks(walk)):
        for value, dim in rows:
            if found is not None and found.is_split(value):
                continue
            born = OriginSearch(walk, tries).of(value, dim)
            more = {node: dim for node, dim in born.items() if walk.values[node].shape[dim] >= ways}
            if len(more) < len(born) and not more:
                continue
            try:
                found = _better(walk, tries, found, more)
            except Unsplittable as error:
                failed = error
        if found is not None and found.share() > ENOUGH:
            break
    if found is None and ways > 1:
        return find_best(tries, walk)
    if found is None:
        raise failed or Unsplittable("no attention among tokens of one kind, and no repeated blocks of tokens")
    return found


ENOUGH = 0.5  # of the work: other places to begin are not looked for
ALMOST = 0.95  # of the work: nothing better is looked for
FEW = 16  # what is as many times smaller than the largest value that is born holds no tokens


def _better(walk: Walk, tries: ShardTrials, before: ShardingPlan | None, starts: dict[fx.Node, int]) -> ShardingPlan:
    """Return the best of a given plan and those from its starts and some of these: each time the one that adds most."""
    found, left = before, dict(starts)
    most = max((count_elements(walk.values[node]) for node in starts), default=0)
    with contextlib.suppress(Unsplittable):  # tokens themselves, and not where they stand or whether they count
        large = {node: dim for node, dim in starts.items() if count_elements(walk.values[node]) * FEW >= most}
        tokens = make_plan(walk, tries, large)
        if tokens.share() > ALMOST:
            return tokens
    while left and (found is None or found.share() < ALMOST):
        trials = []
        for node, dim in left.items():
            with contextlib.suppress(Unsplittable):
                trials.append(make_plan(walk, tries, {**(found.starts if found else {}), node: dim}))
                if trials[-1].share() > ALMOST:
                    break
        best = max(trials, key=ShardingPlan.rank, default=None)
        if best is None or (found is not None and best.rank() <= found.rank()):
            break
        found = best
        left = {node: dim for node, dim in left.items() if node not in best.starts}
    if found is None:
        return make_plan(walk, tries, starts)
    return found
