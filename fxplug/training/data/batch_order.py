"""Which samples are in which batch: a function of seed, epoch and process, of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..random_draws import mixed


class Request(NamedTuple):
    """One batch of one process: samples of one group (a bucket, or all there are)."""

    epoch: int
    group: int
    indices: Sequence[int]


class Order:
    """Batches of samples that come in groups; a batch is of one group.

    Global batch k of a group is the k-th run of `world * batch` of its samples, in an order drawn from (seed, epoch,
    group), and process `rank` has the rank-th part of it. With several groups the order of the batches is drawn as well.
    When training, a group's last incomplete batch is left out, so less than a global batch of each group; in tests it is
    kept and split evenly.
    """

    def __init__(
        self, groups: Sequence[Sequence[int]], batch: int, *, seed: int, rank: int, world: int, train: bool, shuffle: bool
    ) -> None:
        self.groups, self.batch, self.seed, self.rank, self.world, self.train, self.shuffle = (
            groups,
            batch,
            seed,
            rank,
            world,
            train,
            shuffle,
        )

    def __len__(self) -> int:
        """The batches of this process in an epoch."""
        return sum(len(group) // (self.batch * self.world) for group in self.groups) if self.train else len(self.requests(0))

    def requests(self, epoch: int) -> list[Request]:
        """The batches of this process in an epoch, in order."""
        size, requests = self.batch * self.world, []
        for number, group in enumerate(self.groups):
            order = [group[i] for i in self._drawn(len(group), epoch, number)] if self.shuffle else group
            used = len(group) // size * size if self.train else len(group)
            parts = [order[at : at + size] for at in range(0, used, size)]
            requests += [Request(epoch, number, self._share(part)) for part in parts]
        if self.shuffle and len(self.groups) > 1:
            requests = [requests[i] for i in self._drawn(len(requests), epoch, len(self.groups))]
        return [request for request in requests if request.indices]

    def _share(self, part: Sequence[int]) -> list[int]:
        """The contiguous part of a global batch that is this process's; of an uneven one the first have one more."""
        each, more = divmod(len(part), self.world)
        start = self.rank * each + min(self.rank, more)
        return list(part[start : start + each + (self.rank < more)])

    def _drawn(self, length: int, epoch: int, number: int) -> list[int]:
        generator = torch.Generator().manual_seed(mixed(self.seed, epoch, number))
        drawn: list[int] = torch.randperm(length, generator=generator).tolist()
        return drawn
