"""Which adapters of a run share one pass of the base, and which take their steps in turn: a rule of sizes, never of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.errors import prefix_path
from ..core.ir.traced_module import TracedModule
from .adapter_modules import find_left_out, find_parameter, list_adapter_passes
from .adapter_settings import PATH
from .train_section import Train

FEW = 4  # fewer at once have too little to share beside layers that are computed for each
STEPS = 10  # of a turn, at most
LARGE = 2**18  # numbers of a weight: those of all adapters at once leave the cache of a processor


def choose_separate_passes(module: TracedModule, settings: Train, room: Mapping[str, int]) -> list[str]:
    """Choose the adapters that take their steps in turn, each with a pass of its own.

    Layers are computed once for all where blocks stand beside them. A layer whose weight is changed is computed for each
    adapter anyway, and one pass for all holds every such weight until its backward pass: it gains only where many adapters
    share small layers.

    Args:
        module: The module with slots.
        settings: Those of the run: its adapters, and `in_turn`.
        room: How many adapters can train at once in each pass with slots.

    Returns:
        For each adapter why it takes its steps in turn; "" for one that shares a pass.
    """
    entries = list_adapter_passes(module)
    if settings.in_turn is not None:
        return ["in_turn says so" if settings.in_turn else ""] * len(settings.adapters)
    chosen = []
    for index, one in enumerate(settings.adapters):
        with prefix_path(*PATH, index):
            left_out = find_left_out(module, one.passes)
        chosen.append([entry for entry in entries if entry["name"] not in left_out])
    free, together = dict(room), 0
    for own in chosen:
        names = [entry["name"] for entry in own if entry["name"] in free]
        if all(free[name] for name in names):
            free |= {name: free[name] - 1 for name in names}
            together += 1
    found = []
    for own in chosen:
        largest = max((_find_largest(module, entry) for entry in own), default=0)
        if largest > LARGE:
            found.append(f"a weight of {largest:,} numbers is changed, and one pass would hold that of each adapter")
        elif largest and together < FEW:
            found.append(f"weights are changed, so that layers are computed for each, and {together} train at once")
        else:
            found.append("")
    return found


def count_steps_of_turn(every: int) -> int:
    """Count the steps that an adapter takes in its turn: at most ten, so that all are even where a checkpoint is written.

    Args:
        every: Steps between checkpoints, or 0.

    Returns:
        The number.
    """
    return max(steps for steps in range(1, STEPS + 1) if every % steps == 0)


def _find_largest(module: TracedModule, entry: Mapping[str, object]) -> int:
    """Return the size of the largest weight that the blocks of a pass change; 0 for blocks beside layers, and of vectors."""
    sites: Sequence[Mapping[str, str]] = entry["sites"]  # type: ignore[assignment]
    values = [find_parameter(module, site) for site in sites if site["place"] == "param"]
    return max((value.numel() for value in values if value is not None and value.dim() > 1), default=0)
