"""Aspect-ratio buckets: a few sizes of about one area, so that an image is cropped little and a batch has one size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...errors import SpecError
from ...spec.train_section import Buckets

Size = tuple[int, int]


def bucket_sizes(size: Size, buckets: Buckets) -> list[Size]:
    """The sizes (h, w) with sides that are multiples of `step` from `min` to `max`, from the tallest to the widest.

    For each height the width is the largest whose area is not above that of `size`, and the other way round: the buckets
    of NovelAI's "Improvements on Stable Diffusion" (2022), kohya's sd-scripts and EveryDream2trainer. `min` is by default
    half the side of the square of that area, `max` twice. Raises SpecError where no size fits.
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
        raise SpecError(f"{finding}; take a larger 'size' or a smaller 'step', {step} now", path=("data", "buckets"))
    return sorted(found, key=lambda s: (s[1] / s[0], s))


def assign(images: Sequence[Size], sizes: Sequence[Size], fill: int = 1) -> list[Size]:
    """The bucket of each image (h, w): that of the nearest aspect ratio, on a log scale; of equal ones the largest.

    A bucket with fewer than `fill` images, which would never make a batch, gives them to the next nearest that stays.
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
