"""How the dimension of a tensor lies over processes: streams of tokens behind each other, each in parts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def start(size: int, rank: int, world: int) -> int:
    """Where the part of a rank begins; parts differ by one at most, and no size is a special case."""
    return size * rank // world


def count(size: int, rank: int, world: int) -> int:
    """How long the part of a rank is."""
    return start(size, rank + 1, world) - start(size, rank, world)


def counts(sizes: Sequence[int], world: int) -> list[int]:
    """How much of all streams each rank has."""
    return [sum(count(size, rank, world) for size in sizes) for rank in range(world)]


def global_size(x: Tensor, dim: int, sizes: Sequence[int], rank: int, world: int) -> int:
    """The size that a dimension of a rank's part has in the whole."""
    return x.shape[dim] // counts(sizes, world)[rank] * sum(sizes)


def spans(sizes: Sequence[int], rank: int, world: int, inner: int = 1) -> list[tuple[int, int]]:
    """Where the part of a rank begins in each of the streams, which stand behind each other, and how long it is."""
    found, before = [], 0
    for size in sizes:
        found.append(((before + start(size, rank, world)) * inner, count(size, rank, world) * inner))
        before += size
    return found


def narrowed(x: Tensor, dim: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """These spans of a dimension, one behind the other."""
    parts = [x.narrow(dim, first, length) for first, length in spans]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def positions(sizes: Sequence[int], ranks: Sequence[int], world: int, device: torch.device | None = None) -> Tensor:
    """Where what some ranks have, one behind the other, stands in the whole: int64 (their tokens)."""
    every = [span for rank in ranks for span in spans(sizes, rank, world)]
    return torch.cat([torch.arange(first, first + length, device=device) for first, length in every])


class Layout(NamedTuple):
    """What a split dimension holds: `outer` times the streams behind each other, each token with `inner` elements."""

    streams: tuple[int, ...]
    outer: int = 1
    inner: int = 1

    def total(self, sizes: Sequence[int]) -> int:
        """The size of the dimension where the streams have these sizes."""
        return self.outer * self.inner * sum(sizes[stream] for stream in self.streams)

    def runs(self) -> Iterator[tuple[int, ...]]:
        """Streams that stand behind each other, from any to any."""
        for first, last in itertools.combinations(range(len(self.streams) + 1), 2):
            yield self.streams[first:last]

    @functools.lru_cache(1024)  # noqa: B019  (of tuples of numbers)
    def rows(self, bounds: tuple[tuple[int, int, int], ...]) -> Tensor:
        """The indices, int64, of what one process has; `bounds` gives start, length and size of each stream's part."""
        found, before = [], 0
        for stream in self.streams:
            first, length, size = bounds[stream]
            found.append(torch.arange(before + first, before + first + length))
            before += size
        tokens = torch.cat(found)
        elements = (tokens[:, None] * self.inner + torch.arange(self.inner)).reshape(-1)
        return (torch.arange(self.outer)[:, None] * (before * self.inner) + elements).reshape(-1)
