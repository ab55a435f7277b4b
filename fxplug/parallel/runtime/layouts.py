"""How the dimension of a tensor lies over processes: streams of tokens behind each other, each in parts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def find_start(size: int, rank: int, world: int) -> int:
    """Return where the part of a rank begins; parts differ by one at most, and no size is a special case."""
    return size * rank // world


def count(size: int, rank: int, world: int) -> int:
    """Return the length of the part of a rank."""
    return find_start(size, rank + 1, world) - find_start(size, rank, world)


def count_all(sizes: Sequence[int], world: int) -> list[int]:
    """Return the total length of all streams' parts in each rank."""
    return [sum(count(size, rank, world) for size in sizes) for rank in range(world)]


def compute_global_size(x: Tensor, dim: int, sizes: Sequence[int], rank: int, world: int) -> int:
    """Return the whole size of a dimension of which a rank has a part."""
    return x.shape[dim] // count_all(sizes, world)[rank] * sum(sizes)


def list_spans(sizes: Sequence[int], rank: int, world: int, inner: int = 1) -> list[tuple[int, int]]:
    """Return start and length of a rank's part in each of the streams, which are concatenated."""
    found, before = [], 0
    for size in sizes:
        found.append(((before + find_start(size, rank, world)) * inner, count(size, rank, world) * inner))
        before += size
    return found


def narrow(x: Tensor, dim: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return these spans of a dimension, concatenated."""
    parts = [x.narrow(dim, first, length) for first, length in spans]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def list_positions(sizes: Sequence[int], ranks: Sequence[int], world: int, device: torch.device | None = None) -> Tensor:
    """Return the positions in the whole of some ranks' parts, concatenated: int64 (their tokens)."""
    every = [span for rank in ranks for span in list_spans(sizes, rank, world)]
    return torch.cat([torch.arange(first, first + length, device=device) for first, length in every])


class Layout(NamedTuple):
    """What a split dimension holds: `outer` times the streams behind each other, each token with `inner` elements."""

    streams: tuple[int, ...]
    outer: int = 1
    inner: int = 1

    def total(self, sizes: Sequence[int]) -> int:
        """Return the size of the dimension for these sizes of the streams."""
        return self.outer * self.inner * sum(sizes[stream] for stream in self.streams)

    def runs(self) -> Iterator[tuple[int, ...]]:
        """Yield all runs of consecutive streams."""
        for first, last in itertools.combinations(range(len(self.streams) + 1), 2):
            yield self.streams[first:last]

    @functools.lru_cache(1024)  # noqa: B019  (of tuples of numbers)
    def rows(self, bounds: tuple[tuple[int, int, int], ...]) -> Tensor:
        """Return the indices, int64, of one process's part; `bounds` has start, length and size of each stream's part."""
        found, before = [], 0
        for stream in self.streams:
            first, length, size = bounds[stream]
            found.append(torch.arange(before + first, before + first + length))
            before += size
        tokens = torch.cat(found)
        elements = (tokens[:, None] * self.inner + torch.arange(self.inner)).reshape(-1)
        return (torch.arange(self.outer)[:, None] * (before * self.inner) + elements).reshape(-1)
