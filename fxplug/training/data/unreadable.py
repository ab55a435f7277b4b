"""What several processes could not read, told to the first of them, which says it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch.distributed as dist

from ...core.torch_internals.distributed import default_store

_KEY = "fxplug/unreadable"


def _shared() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def report_to_first(data: str, skipped: Mapping[str, str]) -> None:
    """Report images of some data that this process cannot read, with the reasons, to the first process. Does not wait."""
    if not skipped or not _shared() or not dist.get_rank():
        return
    store = default_store()
    number = store.add(f"{_KEY}/{data}", 1)
    store.set(f"{_KEY}/{data}/{number}", json.dumps(dict(skipped)))


def collect_reports(data: str) -> dict[str, str]:
    """Return the images that other processes have reported to the first one so far; an empty dict in the others."""
    found: dict[str, str] = {}
    if not _shared() or dist.get_rank():
        return found
    store = default_store()
    for number in range(1, store.add(f"{_KEY}/{data}", 0) + 1):
        if store.check([f"{_KEY}/{data}/{number}"]):  # it is counted before it is there
            found |= json.loads(store.get(f"{_KEY}/{data}/{number}"))
    return found
