"""Which samples are in which batch: aspect-ratio buckets, and an order of seed, epoch and process, of nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch

from ...core.errors import SpecError
from ..random_draws import mix
from ..train_section import Buckets

Size = tuple[int, int]


class BatchRequest(NamedTuple):
    """One batch of one process: samples of one group (a bucket, or all there are).

    `views` counts how often the epoch has had each before, in whichever process; none where it has each once.
    """

    epoch: int
    group: int
    indices: Sequence[int]
    views: Sequence[int] = ()


@dataclass(eq=False, repr=False)
class Order:
    """Batches of samples that come in groups; a batch is of one group.

    Global batch k of a group is the k-th run of `world * batch` of its samples, in an order drawn from (seed, epoch,
    group), and process `rank` has the rank-th part of it. With several groups the order of the batches is drawn as well.
    When training, a group's last incomplete batch is left out, so less than a global batch of each group; in tests it is
    kept and split evenly. Without `shuffle` the samples come in their order, and an epoch begins where the one before ended.

    `repeats` says how often an epoch has each sample. Of a fraction, as many of the group as it amounts to are drawn anew in
    each epoch.
    """

    groups: Sequence[Sequence[int]]
    batch: int
    _: KW_ONLY
    seed: int
    rank: int
    world: int
    train: bool
    shuffle: bool
    repeats: Sequence[float] | None = None

    def __len__(self) -> int:
        """Return the number of batches of this process in an epoch."""
        whole = self.batch * self.world
        return sum(self.count(group) // whole for group in self.groups) if self.train else len(self.requests(0))

    def count(self, group: Sequence[int]) -> int:
        """Return the number of samples that an epoch has of a group, repeats included."""
        if self.repeats is None:
            return len(group)
        return sum(int(self.repeats[i]) for i in group) + round(sum(self.repeats[i] % 1 for i in group))

    def requests(self, epoch: int) -> list[BatchRequest]:
        """Return the batches of this process in an epoch, in order."""
        size, requests = self.batch * self.world, []
        for number, members in enumerate(self.groups):
            group = self._members(members, epoch, number)
            used = len(group) // size * size if self.train else len(group)
            if self.shuffle:
                order: Sequence[int] = self._draw_order(len(group), epoch, number)
            else:
                start = epoch * used % max(len(group), 1)  # where the epoch before ended
                order = [*range(start, len(group)), *range(start)]
            views = _views(group) if self.repeats is not None else None
            for at in range(0, used, size):
                own = self._share(order[at : at + size])
                seen = [views[i] for i in own] if views is not None else ()
                requests.append(BatchRequest(epoch, number, [group[i] for i in own], seen))
        if self.shuffle and len(self.groups) > 1:
            requests = [requests[i] for i in self._draw_order(len(requests), epoch, len(self.groups))]
        return [request for request in requests if request.indices]

    def _members(self, group: Sequence[int], epoch: int, number: int) -> Sequence[int]:
        """Return the samples of a group, each as often as the epoch has it."""
        if self.repeats is None:
            return group
        whole = [i for i in group for _ in range(int(self.repeats[i]))]
        if len(whole) == self.count(group):
            return whole
        generator = torch.Generator().manual_seed(mix(self.seed, epoch, -1 - number))
        parts = torch.tensor([self.repeats[i] % 1 for i in group])
        drawn = torch.multinomial(parts, self.count(group) - len(whole), generator=generator)
        return whole + [group[i] for i in drawn.tolist()]

    def _share(self, part: Sequence[int]) -> Sequence[int]:
        """Return the contiguous part of a global batch for this process; of an uneven batch the first processes get one
        more."""
        each, more = divmod(len(part), self.world)
        start = self.rank * each + min(self.rank, more)
        return part[start : start + each + (self.rank < more)]

    def _draw_order(self, length: int, epoch: int, number: int) -> list[int]:
        generator = torch.Generator().manual_seed(mix(self.seed, epoch, number))
        drawn: list[int] = torch.randperm(length, generator=generator).tolist()
        return drawn


def _views(group: Sequence[int]) -> list[int]:
    """Return for each position how often the same sample occurs before it."""
    seen: Counter[int] = Counter()
    views = []
    for i in group:
        views.append(seen[i])
        seen[i] += 1
    return views


def list_bucket_sizes(size: Size, buckets: Buckets) -> list[Size]:
    """Return the sizes (h, w) with sides that are multiples of `step` from `min` to `max`, from the tallest to the widest.

    For each height the width is the largest whose area is not above that of `size`, and the other way round: the buckets of
    NovelAI's "Improvements on Stable Diffusion" (2022), kohya's sd-scripts and EveryDream2trainer. `min` is by default half the
    side of the square of that area, `max` twice. Raises SpecError where no size fits.
    """
    area, step = size[0] * size[1], buckets.step
    side = math.isqrt(area)
    least = -(-(buckets.min or max(side // 2, 1)) // step) * step
    most = (buckets.max or side * 2) // step * step
    found = set()
    for one in range(least, most + 1, step):
        other = min(area // one // step * step, most)
        if other >= least:
            found |= {(one, other), (other, one)}
    square = side // step * step
    if least <= square <= most and square:
        found.add((square, square))
    if not found:
        finding = f"size {size[0]}x{size[1]} is too small for buckets with sides of {least} to {most} in steps of {step}"
        raise SpecError(f"{finding}: set a larger 'size' or a smaller 'step', which is {step}", path=("data", "buckets"))
    return sorted(found, key=lambda s: (s[1] / s[0], s))


def assign(images: Sequence[Size], sizes: Sequence[Size], fill: int = 1) -> list[Size]:
    """Return the bucket of each image (h, w): the nearest aspect ratio on a log scale, the largest of equal ones.

    The images of a bucket with fewer than `fill`, which would never make a batch, go to the nearest bucket that remains.
    """
    kept = list(sizes)
    while True:
        nearest = {image: _nearest(image, kept) for image in {*images}}
        used = Counter(nearest[image] for image in images)
        smallest = min(used, key=lambda s: (used[s], s), default=None)
        if smallest is None or used[smallest] >= fill or len(used) == 1:
            return [nearest[image] for image in images]
        kept = [s for s in kept if s in used and s != smallest]


def _nearest(image: Size, sizes: Sequence[Size]) -> Size:
    ratio = math.log(image[1] / image[0])
    return min(sizes, key=lambda s: (round(abs(math.log(s[1] / s[0]) - ratio), 9), -s[0] * s[1], s))
