"""Streams of tokens of small sizes, and how a value is made of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..runtime.layouts import Layout

# small sizes of streams in one process and in the two that are pretended: unequal, so that no size is right by accident
PARTS = ((7, 4), (8, 5), (10, 7), (11, 8), (13, 10), (16, 13), (17, 12), (19, 12), (20, 17), (23, 18))
Scaled = tuple[tuple[int, tuple[int, ...]], ...]  # positions of numbers, and the streams that each counts


class OperationRefused(Exception):
    """An operation takes no such values; its own error is the cause."""


class Placement(NamedTuple):
    """A tensor is split: along which dimension, and what lies there."""

    dim: int
    layout: Layout


class StreamNumber(NamedTuple):
    """A number that hangs on the size of a stream: as it is, in small sizes, and in each pretended process."""

    true: Any
    small: Any
    parts: tuple[Any, ...]


class Leaf(NamedTuple):
    """A tensor of a node's value as one process has it, meta or not, and how it is split; None: each process has all of it."""

    tensor: Tensor
    place: Placement | None


class ArgumentSplit(NamedTuple):
    """What is done with the arguments of a node, by their position among its inputs, before it runs on parts."""

    splits: tuple[tuple[int, Placement], ...] = ()
    gathers: tuple[int, ...] = ()
    whole_numbers: bool = False
    special: str = ""  # "attention": its keys and values travel; "near": rows of neighbours; "norm": statistics do
    add: bool = False  # what each process gives is a summand
    same: bool = False  # the first process's result is everybody's
    mean: tuple[int, ...] = ()  # it is the mean over its tokens of these streams, and a summand with their share
    once: tuple[int, ...] = ()  # given in the first process alone, zeros in the others: a summand like the rest
    scaled: Scaled = ()  # numbers, by position in the arguments, that count these streams
    near: Any = None  # which rows of which input are fetched, and where those of the result lie
    cut: Placement | None = None  # the result is whole, and split from there on


class Streams:
    """The dimensions along which tokens lie: their true and their small sizes."""

    def __init__(self) -> None:
        self.true: list[int] = []
        self.own: dict[int, tuple[int, int]] = {}  # parts that are others than the usual
        self.more = 0  # tokens in each part, for an operation that does something to the tokens behind so many

    def new(self, size: int, small: int | None = None) -> int:
        """Add a stream of this size; `small` is set for one whose small size follows from those of other streams."""
        if small is None and len(self.true) >= len(PARTS):
            raise NotImplementedError(f"more than {len(PARTS)} streams of tokens")
        if small is not None:
            first = min(small * 3 // 5 | 1, small - 1)  # odd: what takes them in pairs takes no part
            self.own[len(self.true)] = first, small - first
        self.true.append(size)
        return len(self.true) - 1

    def clear(self) -> None:
        """Remove all streams."""
        self.true.clear()
        self.own.clear()

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Sizes of the parts of each stream in the two simulated processes."""
        usual = [self.own[n] if n in self.own else PARTS[n] for n in range(len(self.true))]
        return [(first + self.more, second + self.more) for first, second in usual]

    @property
    def small(self) -> list[int]:
        """Size of each stream in which operations are tried."""
        return [sum(parts) for parts in self.parts]

    def bounds(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Return start, length and size of each stream's part in a simulated process."""
        return tuple((0 if rank == 0 else parts[0], parts[rank], sum(parts)) for parts in self.parts)
