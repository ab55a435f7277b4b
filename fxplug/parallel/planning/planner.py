"""A plan: what every node does on parts, found node by node from where tokens are born."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from ...core.ir import ops
from ...core.ir.functions import bind_attention
from ...core.ir.graph import ENTRY
from ...core.torch_internals import modules as pytree
from ..runtime.layouts import Layout
from .sharding_plan import PlanSettings, ShardingPlan, Unsplittable
from .short_inputs import shorten_inputs
from .streams import ArgumentSplit, Leaf, Placement, StreamNumber
from .trials import (
    ShardTrials,
    get_name,
    get_norm_arguments,
    is_placed,
    is_plain_result,
    list_leaves,
    make_leaf,
    make_signature,
    map_numbered,
)  # fmt: skip
from .walk import Walk, make_label

CHECKS = (*ENTRY, ops.guard, ops.check_added, ops.check_state)
FACTS = (ops.device_of, ops.dtype_of, ops.autograd_query)  # of a tensor, the same for its parts
MOST = 4  # inputs that are split together in one try
MANY = 12  # choices of numbers that are scaled
CUTS, LEAST, FARTHEST = ("getitem", "narrow", "tril", "triu"), 8, 4096  # at the last number nothing is cut


class NeedsGather(Exception):
    """A value that must be whole, found when the graph had gone on from it."""


def make_plan(
    walk: Walk,
    tries: ShardTrials,
    starts: Mapping[fx.Node, int | Placement],
    settings: PlanSettings | None = None,
    *,
    like: ShardingPlan | None = None,
) -> ShardingPlan:
    """Return a plan from these starts: values that are split along a dimension from there on.

    Raises Unsplittable, also if a plan is not `like` another one.
    """
    settings = settings or PlanSettings()
    forced: set[fx.Node] = set() if like is None else set(like.forced)
    while True:
        tries.streams.clear()
        tries.streams.true[:] = settings.streams
        found = ShardingPlan(walk, tries, dict(starts), grains=dict(settings.grains), forced=forced, settings=settings)
        for stream in range(len(settings.streams)):
            here = ((n, p.dim) for n, p in starts.items() if isinstance(p, Placement) and stream in p.layout.streams)
            found.origins.append(next(here))
        try:
            found = (settings.planner or Planner)(found, settings.one, like).run()
            found.sizes = list(tries.streams.true)
            return found
        except NeedsGather as error:
            (node,) = error.args
            more = walk.roots(node) | {node}
            if more <= forced or len(forced) > 40:
                raise Unsplittable(f"{make_label(node)} is written in place with a value that is split differently") from None
            forced |= more


def replan(found: ShardingPlan, tries: ShardTrials) -> None:
    """Make a plan once more, with other random values. Raises Unsplittable if it differs."""
    make_plan(found.walk, tries, found.starts, found.settings, like=found)


class Planner:
    """Finds the plan of one graph, node by node: how each value lies, by running its operation on small parts."""

    means = False  # over tokens are believed: they are tried on tokens that differ

    def __init__(self, found: ShardingPlan, one: bool, like: ShardingPlan | None = None) -> None:
        self.found, self.forced, self.one, self.like = found, found.forced, one, like
        self.walk, self.tries, self.values = found.walk, found.tries, found.values
        self.tries.writes = self.walk.writes
        self.counted = len(found.tries.streams.true)  # streams that numbers in the model's code count

    def run(self) -> ShardingPlan:
        """Return the plan. Raises Unsplittable."""
        for node in self.walk.graph.nodes:
            if node.op == "output":
                break
            self.tries.streams.more = self.tokens_left_alone(node)
            self.values[node] = self.value(node)
            if node in self.found.starts and node not in self.forced:
                if self.found.is_split(node):
                    del self.found.starts[node]  # tokens have come to it
                else:
                    self.begin_split(node, self.found.starts[node])
            if self.like is not None and self.found.steps.get(node) != self.like.steps.get(node):
                raise Unsplittable(f"what {make_label(node)} does depends on random values")
        return self.found

    def tokens_left_alone(self, node: fx.Node) -> int:
        """Return so many tokens that an operation which truncates at a number in its arguments truncates none of them."""
        if get_name(node) not in CUTS or any(self.found.hangs_on_sizes(n) for n in node.all_input_nodes):
            return 0
        numbers = [0]
        fx.node.map_aggregate((node.args, node.kwargs), lambda v: numbers.append(abs(v)) if type(v) is int else None)
        hidden = min(self.tries.streams.small, default=FARTHEST) <= (most := max(numbers)) < FARTHEST
        return -(-most // LEAST) * LEAST if hidden else 0

    def full_value(self, node: fx.Node) -> Any:
        """Return the value of a node that each process has in full."""
        return pytree.tree_map(lambda v: Leaf(v, None) if isinstance(v, Tensor) else v, self.walk.values[node])

    def begin_split(self, node: fx.Node, dim: int | Placement) -> None:
        """Split a value from here on, along a dimension or as a placement says. Raises Unsplittable for an invalid one."""
        value = self.values[node]
        if isinstance(dim, Placement):
            self.values[node] = Leaf(value.tensor, dim)
            return
        if not isinstance(value, Leaf) or not -value.tensor.dim() <= dim < value.tensor.dim():
            raise Unsplittable(f"'{node.name}' has no dimension {dim}")
        dim %= value.tensor.dim()
        inner = self.found.grains.get(node, 1)
        layout = Layout((self.stream(node, dim, value.tensor.shape[dim] // inner),), 1, inner)
        self.values[node] = Leaf(value.tensor, Placement(dim, layout))

    def stream(self, node: fx.Node, dim: int, size: int) -> int:
        """Return the stream that begins at a dimension; with `one` any of its size; else a new one. Raises Unsplittable."""
        for index, origin in enumerate(self.found.origins):
            if origin == (node, dim) or (self.one and size == self.tries.streams.true[index]):
                return index
        self.found.origins.append((node, dim))
        try:
            return self.tries.streams.new(size)
        except NotImplementedError as error:
            raise Unsplittable(str(error)) from None

    def value(self, node: fx.Node) -> Any:
        """Return how the value of a node is split; record in the plan what is done with its inputs."""
        inputs = node.all_input_nodes
        split = [i for i, n in enumerate(inputs) if self.found.is_split(n)]
        sized = [i for i, n in enumerate(inputs) if self.found.hangs_on_sizes(n)]
        true = self.walk.values[node]
        if node in self.walk.random:
            return self.random_value(node, split)
        if node.op in ("placeholder", "get_attr") or not (split or sized) or node.target in FACTS:
            return self.full_value(node)
        passes_on = node.target is ops.check_added and self.found.is_split(inputs[0])  # the value that it checks
        if node.target in CHECKS and not passes_on:
            self.found.steps[node] = ArgumentSplit(whole_numbers=True)
            return self.full_value(node)
        everything = ArgumentSplit(gathers=tuple(split), whole_numbers=True)
        if node in self.forced or not is_plain_result(true):
            return self.gathered(node, everything, "its result cannot be split" if node not in self.forced else "")
        if (value := self.attention(node)) is not None:
            return value
        outcome = self.result(node, split, sized)
        if outcome is None:
            for one in self.walk.writes.get(node, ()):
                if self.found.is_split(one):
                    raise NeedsGather(one)  # what is written must be the memory itself, not what is gathered of it
            return self.mixed(node, everything)
        step, kinds, written = outcome
        for index in written:
            self.check_mutation(inputs[index])
        if step != ArgumentSplit():
            self.found.steps[node] = step
        if step.gathers:
            self.found.why[node] = "one of its inputs must be complete"
        leaves, tree = pytree.tree_flatten(true)
        return pytree.tree_unflatten([make_leaf(leaf, kind) for leaf, kind in zip(leaves, kinds, strict=True)], tree)

    def random_value(self, node: fx.Node, split: list[int]) -> Any:
        """Return the value of a random operation: that of the first process, split again if tokens were split."""
        roots = {root for one in self.walk.writes.get(node, ()) for root in self.walk.roots(one)}
        mine, behind = {node}, itertools.dropwhile(lambda n: n is not node, self.walk.graph.nodes if roots else ())
        for later in itertools.islice(behind, 1, None):
            if any(one not in mine and self.walk.roots(one) & roots for one in later.all_input_nodes):
                raise Unsplittable(
                    f"{make_label(node)} writes random numbers into a value that is read later: return a new tensor"
                )
            if not mine.isdisjoint(later.all_input_nodes):
                mine.add(later)
        if not isinstance(self.walk.values[node], Tensor):
            raise Unsplittable(
                f"{make_label(node)} draws random numbers and returns more than one tensor: make dropout a separate layer"
            )
        step = ArgumentSplit(gathers=tuple(split), whole_numbers=True, same=True)
        return self.gathered(node, step, "it draws random numbers, which all processes take from the first", again=True)

    def gathered(self, node: fx.Node, step: ArgumentSplit, why: str, again: bool = False) -> Any:
        """Return the value of a node that runs on whole inputs, and record why; split `again` if as long as an input."""
        if again:
            inputs, shape = [node.all_input_nodes[index] for index in step.gathers], self.walk.values[node].shape
            lengths = ((self.found.place(one), getattr(self.walk.values[one], "shape", ())) for one in inputs)
            fits = (p for p, own in lengths if p is not None and len(own) == len(shape) and own[p.dim] == shape[p.dim])
            step = step._replace(cut=next(fits, None))
        self.found.steps[node] = step
        if step.gathers or step.same:
            self.found.why[node] = why or "it is written in place"
        return Leaf(self.walk.values[node], step.cut) if step.cut else self.full_value(node)

    def mixed(self, node: fx.Node, everything: ArgumentSplit) -> Any:
        """Return the value of an operation that no repair makes run on parts; samples are split again after it."""
        again = self.one and isinstance(self.walk.values[node], Tensor) and node not in self.walk.writes
        return self.gathered(node, everything, "it mixes tokens", again)

    def key(self, node: fx.Node) -> Any:
        """Return a key that is equal for two operations which do the same on parts."""
        names = {n: i for i, n in enumerate(node.all_input_nodes)}
        form = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: f"<{names[n]}>"))
        target: Any = node.target
        if node.op == "call_module":
            module = self.tries.gm.get_submodule(str(node.target))
            training = tuple(one.training for one in module.modules())
            state = tuple((k, v.shape, v.dtype) for k, v in module.state_dict().items())
            target = (type(module), repr(module), training, state)
        try:
            streams = (*self.tries.streams.true, *self.tries.streams.parts)
            key = (node.op, target, form, streams, tuple(make_signature(self.values[n]) for n in names))
            hash(key)
        except TypeError:
            return None
        return key

    def result(self, node: fx.Node, split: list[int], sized: list[int]) -> Any:
        """Return the result of `outcome`, computed once for all operations that do the same."""
        key = self.key(node)
        if key is not None and key in self.tries.known:
            return self.tries.known[key]
        before = len(self.tries.streams.true)
        outcome = self.outcome(node, split, sized)
        if key is not None and len(self.tries.streams.true) == before:  # else streams begin here
            self.tries.known[key] = outcome
        return outcome

    def outcome(self, node: fx.Node, split: list[int], sized: list[int]) -> Any:
        """Return the first step that works, the placements of the leaves of the result, and whether an input is written."""
        if self.counted and (done := self.feature_norm(node, split)) is not None:
            return done
        steps = list(self.repairs(node, split, sized))
        less = shorten_inputs(self.walk, self.tries, self.values, node) if split and not sized else None
        if less is not None:
            for step in steps:
                if not step.gathers and (got := self.attempt(node, step, split, *less)) is not None:
                    return got
        for step in steps:
            if (got := self.attempt(node, step, split, self.values, self.walk.values[node])) is not None:
                return got
        return None

    def attempt(self, node: fx.Node, step: ArgumentSplit, split: list[int], values: dict[fx.Node, Any], true: Any) -> Any:
        """Run a step of a node and return the result of `outcome`; None if parts do not give what the whole gives.

        `values` are those of its inputs, and `true` is its result on them.
        """
        inputs, used = node.all_input_nodes, self.tries.used
        if step.whole_numbers and len(step.gathers) < len(split) and self.may_cut(node):
            return None
        result = self.tries.run_parts(node, values, step)
        if result is None:
            return None
        whole, parts, given = result
        layouts = [place.layout for _, place in step.splits]
        for index in split:
            if index not in step.gathers:
                layouts += [leaf.place.layout for leaf in list_leaves(self.values[inputs[index]]) if is_placed(leaf)]
        sizes = layouts or [Layout((stream,)) for stream in range(len(self.tries.streams.true))]
        from_parts = bool(step.splits) or len(step.gathers) < len(split)
        from_sizes = not step.whole_numbers and any(self.found.hangs_on_sizes(n) for n in inputs)
        ratio = bool(step.scaled) and not split  # of features to heads: the same everywhere
        layouts = list(dict.fromkeys(sizes))
        found = self.tries.placed(true, whole, parts, layouts, from_parts, from_sizes and not ratio)
        if found is None or (ratio and any(isinstance(leaf, StreamNumber) for leaf in list_leaves(found[0]))):
            return None
        if isinstance(found[1], tuple) and not (self.counted or (self.means and not step.gathers and not step.splits)):
            return None  # a mean over tokens, by chance
        if from_parts and not self.tries.is_local(node, values, step, found[0], parts, used):
            return None
        written = []
        for index, one in enumerate(inputs):
            state = self.tries.mutated_inputs(given[one], values[one])
            if state is None or (state and (index in step.gathers or index in dict(step.splits))):
                raise NeedsGather(one)  # it writes into what would be a copy, or what it writes lies otherwise
            written += [index] * state
        value, add = found
        kinds = [leaf.place if isinstance(leaf, Leaf) else leaf for leaf in list_leaves(value)]
        return step._replace(add=bool(add), mean=add if isinstance(add, tuple) else ()), kinds, written

    def may_cut(self, node: fx.Node) -> bool:
        """Return whether an operation truncates at a number that is not the number of its own tokens.

        On parts it has no effect, and it may seem to have none on the whole if that has no more tokens in a trial.
        """
        if get_name(node) not in CUTS:
            return False
        numbers = [n for n in node.all_input_nodes if self.found.hangs_on_sizes(n)]
        own = {self.values[n].place.layout for n in node.all_input_nodes if is_placed(self.values[n])}
        asked = [self.found.place(n.all_input_nodes[0]) if n.target == "size" else None for n in numbers]
        return any(place is None or place.layout not in own for place in asked)

    def check_mutation(self, value: fx.Node) -> None:
        """Raise Unsplittable for a write into memory that the graph shares and a plan does not, such as a gathered copy."""
        step = self.found.steps.get(value, ArgumentSplit())
        if value in self.walk.views and not step.same:  # what was drawn is read through this value alone (`drawn`)
            if step.gathers or step.splits:
                raise Unsplittable(f"{make_label(value)} is written in place, and shares memory with another value")
            for one in value.all_input_nodes:
                self.check_mutation(one)

    def repairs(self, node: fx.Node, split: list[int], sized: list[int]) -> Iterator[ArgumentSplit]:
        """Yield repairs, the cheapest first."""
        inputs = node.all_input_nodes
        numbers = self.scaled(node, split) if self.counted else []
        if not split:
            yield from (ArgumentSplit(scaled=some) for some in numbers)
        yield ArgumentSplit()
        if sized:
            yield ArgumentSplit(whole_numbers=True)
        if split:
            yield from (ArgumentSplit(scaled=some) for some in numbers)
        wholes = [
            i for i, n in enumerate(inputs) if isinstance(self.values[n], Leaf) and self.values[n].place is None
        ]  # fmt: skip
        if get_name(node) in ("cat", "concat", "concatenate") and split:
            yield from self.joined(node, split, wholes)
        sizes: dict[int, tuple[Layout, int]] = {}
        true = self.tries.streams.true
        for index in split:
            value = self.values[inputs[index]]
            if isinstance(value, Leaf) and value.place:
                from_end = value.place.dim - value.tensor.dim()
                sizes.setdefault(value.place.layout.total(true), (value.place.layout, from_end))
        choices: list[list[tuple[int, Placement]]] = []
        for index in wholes:
            tensor = self.values[inputs[index]].tensor
            fits = [(d, *sizes[n]) for d, n in enumerate(tensor.shape) if n in sizes and n > 1]
            dims = tensor.dim()
            fits.sort(key=lambda fit, dims=dims: fit[0] - dims != fit[2])  # type: ignore[misc]
            if self.counted and not fits:  # as many groups of other size, as grouped queries have them
                for layout, end in sizes.values():
                    times, rest = divmod(tensor.shape[end] if -end <= dims else 1, sum(true[s] for s in layout.streams))
                    fits += [(end + dims, Layout(layout.streams, 1, times), end)] if times and not rest else []
            if fits:
                choices.append([(index, Placement(d, layout)) for d, layout, _ in fits[:2]])
        flags = [False, True] if sized else [False]
        if 0 < len(choices) <= MOST:
            for flag in flags:
                for picked in itertools.product(*choices):
                    yield ArgumentSplit(splits=tuple(picked), whole_numbers=flag)
                    yield from (ArgumentSplit(splits=tuple(picked), whole_numbers=flag, scaled=some) for some in numbers)
                if len(choices) > 1:
                    yield from (ArgumentSplit(splits=(one,), whole_numbers=flag) for one in itertools.chain(*choices))
        if self.counted and split:
            for odd in choices if 2 < len(choices) <= MOST else ():  # such as a mask, which is for all heads
                rest = itertools.product(*(choice for choice in choices if choice is not odd))
                yield from (ArgumentSplit(splits=tuple(picked), whole_numbers=flag) for picked in rest for flag in flags)
            for one in itertools.chain(*choices[:MOST]):
                yield from (ArgumentSplit(splits=(one,), once=(index,)) for index in wholes if index != one[0])
        if len(split) > 1:
            for index in reversed(split):
                yield from (ArgumentSplit(gathers=(index,), whole_numbers=flag) for flag in flags)

    def scaled(self, node: fx.Node, split: list[int]) -> list[tuple[tuple[int, tuple[int, ...]], ...]]:
        """Return which numbers in a node's arguments may count heads or features of this process: single ones first."""
        inputs = [node.all_input_nodes[index] for index in split]
        leaves = [leaf for one in inputs for leaf in list_leaves(self.values[one]) if is_placed(leaf)]
        runs = dict.fromkeys(run for leaf in leaves for run in leaf.place.layout.runs())
        sizes = self.tries.streams.true
        choices: list[list[tuple[int, tuple[int, ...]]]] = []

        def look(position: int, leaf: Any) -> Any:
            value = self.values[leaf] if isinstance(leaf, fx.Node) else leaf
            if type(value) is int and value > 1:
                fits = [run for run in runs or ((s,) for s in range(self.counted)) if value % sum(sizes[s] for s in run) == 0]
                fits.sort(key=lambda run: -sum(sizes[s] for s in run))
                choices.append([(position, run) for run in fits[:2]])
            return leaf

        map_numbered((node.args, node.kwargs), look)
        choices = [choice for choice in choices if choice]
        found = [(pick,) for pick in sorted(itertools.chain(*choices), key=lambda p: p[1])]
        some: list[Any] = [*found, *itertools.islice(itertools.product(*choices), 4)] if len(choices) > 1 else found
        return some[:MANY]

    def joined(self, node: fx.Node, split: list[int], wholes: list[int]) -> Iterator[ArgumentSplit]:
        """Yield the step that splits a value concatenated to tokens as a stream of its own."""
        inputs = node.all_input_nodes
        value = self.values[inputs[split[0]]]
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        if not isinstance(value, Leaf) or value.place is None or not isinstance(dim, int):
            return
        if dim % value.tensor.dim() == value.place.dim and wholes:
            at = value.place.dim
            splits = []
            for index in wholes:
                tensor = self.values[inputs[index]].tensor
                splits.append((index, Placement(at, Layout((self.stream_of(inputs[index], at, tensor.shape[at]),)))))
            yield ArgumentSplit(splits=tuple(splits))

    def stream_of(self, node: fx.Node, dim: int, size: int) -> int:
        """Return the stream of a whole value: one with the same source of tokens, as keys and queries have, or a new one."""
        mine = self.token_sources(node, size)
        for index, (origin, _) in enumerate(self.found.origins):
            if self.tries.streams.true[index] == size and mine & self.token_sources(origin, size):
                return index
        return self.stream(node, dim, size)

    def token_sources(self, node: fx.Node, size: int) -> set[fx.Node]:
        """Return a value and those it is computed from, as long as all have a dimension of this size."""
        found: set[fx.Node] = set()
        todo = [node]
        while todo:
            one = todo.pop()
            value = self.walk.values[one]
            if one not in found and one.op != "get_attr" and isinstance(value, Tensor) and size in value.shape:
                found.add(one)
                todo += one.all_input_nodes
        return found

    def feature_norm(self, node: fx.Node, split: list[int]) -> Any:
        """Return the outcome for a norm over split features, whose statistics are sums."""
        given = get_norm_arguments(node)
        if given is None or not isinstance(given["input"], fx.Node):
            return None
        leaf, inputs = self.values[given["input"]], node.all_input_nodes
        if not is_placed(leaf) or leaf.place.dim != leaf.tensor.dim() - 1 or len(given["normalized_shape"]) != 1:
            return None
        place = Placement(0, leaf.place.layout)
        weights = [inputs.index(given[key]) for key in ("weight", "bias") if given[key] is not None]
        if any(index in split and self.values[inputs[index]].place != place for index in weights):
            return None
        splits = tuple((index, place) for index in weights if index not in split)
        return ArgumentSplit(splits=splits, special="features"), [leaf.place], []

    def attention(self, node: fx.Node) -> Any:
        """Return the outcome for attention whose queries, keys and values are split along their tokens."""
        if get_name(node) != "scaled_dot_product_attention":
            return None
        given = bind_attention(node)
        if given["dropout_p"] or not isinstance(given["is_causal"], bool):
            return None
        nodes = [given[name] for name in ("query", "key", "value")]
        if not all(isinstance(n, fx.Node) for n in nodes):
            return None
        places = [self.found.place(n) for n in nodes]
        dims = [self.values[n].tensor.dim() - 2 for n in nodes if isinstance(self.values[n], Leaf)]
        if len(dims) < 3 or any(p is None or p.dim != d or p.layout[1:] != (1, 1) for p, d in zip(places, dims, strict=True)):
            return None
        if places[1] != places[2]:
            return None  # keys and values in different orders: they are gathered
        mask, inputs = given["attn_mask"], node.all_input_nodes
        masks = (inputs.index(mask),) if isinstance(mask, fx.Node) and self.found.is_split(mask) else ()
        self.found.steps[node] = ArgumentSplit(gathers=masks, special="attention")
        return Leaf(self.walk.values[node], places[0])
