"""What repeats in a row: runs of the same few things, found from their keys alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

LONGEST = 12  # so many things at most are one period
LEAST = 3  # so often at least a period is there


def runs(keys: Sequence[Hashable | None]) -> list[tuple[int, int, int]]:
    """The places where a period of keys is there `LEAST` times or more in a row: its start, its length, and how often.

    Runs do not overlap; the one that covers most begins first, of several the one with the shortest period. None is like
    nothing.
    """
    found, start = [], 0
    while start < len(keys):
        best = (0, 0, 0)
        for period in range(1, min(LONGEST, (len(keys) - start) // LEAST) + 1):
            end = start + period
            while end < len(keys) and keys[end] is not None and keys[end] == keys[end - period]:
                end += 1
            times = (end - start) // period
            if times >= LEAST and keys[start] is not None and times * period > best[0] and None not in keys[start:end]:
                best = (times * period, period, times)
        if best[0]:
            found.append((start, best[1], best[2]))
        start += best[0] or 1
    return found
