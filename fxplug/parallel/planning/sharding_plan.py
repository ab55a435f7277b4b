"""What planning finds: which values are split, along what, and what is exchanged for each operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ...core.errors import format_fields
from .streams import ArgumentSplit, Leaf, Placement, StreamNumber
from .trials import ShardTrials, list_leaves
from .walk import Unsplittable as Unsplittable
from .walk import Walk


@dataclass(frozen=True)
class PlanSettings:
    """How a plan is made of its starts.

    With `one` all starts are of one stream. A start that is a placement is of the streams with the sizes `streams`, which are
    constants in the model's code: heads, features. `grains` are a token's elements at the others. `planner` is a class that may
    know more ways to run an operation.
    """

    one: bool = False
    streams: Sequence[int] = ()
    grains: Mapping[fx.Node, int] = field(default_factory=dict)
    planner: type[Any] | None = None


@dataclass
class ShardingPlan:
    """A plan for one graph: steps by node, where streams begin, and how every value lies."""

    walk: Walk
    tries: ShardTrials
    starts: dict[fx.Node, int | Placement]
    steps: dict[fx.Node, ArgumentSplit] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    origins: list[tuple[fx.Node, int]] = field(default_factory=list)  # of each stream: a whole value, and its dimension
    why: dict[fx.Node, str] = field(default_factory=dict)  # what had to be gathered, and for what
    sizes: list[int] = field(default_factory=list)  # of each stream
    grains: dict[fx.Node, int] = field(default_factory=dict)  # elements of a token, of starts that have not one
    derived: set[int] = field(default_factory=set)  # streams whose size follows from that of another
    forced: set[fx.Node] = field(default_factory=set)  # nodes that run on what is whole, as a later one writes into it
    divisor: int = 1  # tokens are so many times this, and the rest, wherever the plan holds
    rest: int = 0
    settings: PlanSettings = field(default_factory=PlanSettings)  # with which it was planned, beside starts

    __repr__ = format_fields

    def place(self, node: fx.Node) -> Placement | None:
        """Return how a value that is one tensor is split, None if it is whole."""
        value = self.values.get(node)
        return value.place if isinstance(value, Leaf) else None

    def is_split(self, node: fx.Node) -> bool:
        """Return whether a tensor of a value is split."""
        return any(isinstance(leaf, Leaf) and leaf.place for leaf in list_leaves(self.values.get(node)))

    def hangs_on_sizes(self, node: fx.Node) -> bool:
        """Return whether a value has numbers that depend on the sizes of streams."""
        return any(isinstance(leaf, StreamNumber) for leaf in list_leaves(self.values.get(node)))

    def share(self) -> float:
        """Return the share of the work in products, convolutions and attention that is done on parts."""
        done = sum(n for node, n in self.walk.work.items() if self.on_parts(node))
        return done / max(1, sum(self.walk.work.values()))

    def rank(self) -> tuple[float, int]:
        """Return a sort key that is greater for a better plan: the share of the work, then fewer gathers."""
        return round(self.share(), 3), -sum(len(step.gathers) for step in self.steps.values())

    def on_parts(self, node: fx.Node) -> bool:
        """Return whether a node computes from parts."""
        return self.summed(node) or (self.is_split(node) and not self.cut(node))

    def cut(self, node: fx.Node) -> bool:
        """Return whether a value is computed as a whole, and then split."""
        return self.steps.get(node, ArgumentSplit()).cut is not None

    def samples_are_apart(self) -> bool:
        """Return whether there is one stream, and no process reduces values with others or takes their random numbers."""
        together = any(s.add or s.same or s.mean or s.once or s.special for s in self.steps.values())
        return len(self.sizes) == 1 and not together

    def summed(self, node: fx.Node) -> bool:
        """Return whether the processes compute summands of a value."""
        return bool(self.steps.get(node, ArgumentSplit()).add)
