"""When a process dies or hangs: the others end within the timeout of their group, and say which one, and at which node.

A process whose collective fails writes into the store of torch.distributed where it waits, and reads there where the others do.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...core.capture.user_code import is_user_code, shorten_path
from ...core.errors import GuardError
from ...core.torch_internals.distributed import default_store, group_of_name

GRACE = 5.0  # seconds for the others to fail too
T = TypeVar("T")
SIGNS = ("timed out", "timeout", "closed by peer", "connection", "broken pipe", "reset by peer", "nccl")


def run_guarded(call: Callable[[], T], group: str, what: str = "") -> T:
    """Run a collective of a group. Raises GuardError, with rank and node, if a process died or does not reach it.

    `what` names what is waited for, if the node does not.
    """
    if torch.compiler.is_compiling():
        return call()
    try:
        return call()
    except RuntimeError as error:  # of torch's backends, which know connections and no processes
        if not any(sign in str(error).lower() for sign in SIGNS):
            raise
        text = str(error).splitlines()[0]
        # nothing plainer: the error is raised in generated code, and only the frame knows the node that it stands at
        place = f"{what and f'for {what} '}at {_place(sys._getframe())}"
        raise GuardError(f"{_report(place, group)} ({text.rpartition('] ')[2][:120]})") from error


def _report(place: str, group: str) -> str:
    """Report which processes of a group do not wait in a collective, or where each does."""
    rank = dist.get_rank()
    try:
        store = default_store().clone()
        store.set(f"fxplug/at/{rank}", place)
        end = time.monotonic() + GRACE
        others = [other for other in dist.get_process_group_ranks(group_of_name(group)) if other != rank]
        places = {other: _query(store, f"fxplug/at/{other}", end) for other in others}
        lost = [str(other) for other, there in places.items() if there is None]
        store.set(f"fxplug/lost/{rank}", ", ".join(lost))
        if not lost:  # another group of theirs may have lost one
            known = [_query(store, f"fxplug/lost/{other}", end + GRACE) for other in others]
            lost = sorted({one for text in known if text for one in text.split(", ")} - {str(rank)})
    except Exception:  # torch's own: the store is gone
        return (
            "process 0, which runs the store of torch.distributed, does not answer and must have died; "
            f"process {rank} waits {place}"
        )
    if lost:
        return f"process {', '.join(lost)} has died or did not reach the collective; process {rank} waits {place}"
    rows = sorted({**places, rank: place}.items())
    return "the processes wait for each other: " + "; ".join(f"process {other} waits {there}" for other, there in rows)


def _query(store: Any, key: str, end: float) -> str | None:
    while not store.check([key]):
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
    return str(store.get(key).decode())


def _place(frame: FrameType | None) -> str:
    """Return where a thread is: at a node of a graph, or in the user's code."""
    line = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<eval_with_key>"):
            text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals)
            name = text.partition("=")[0].strip()
            return f"'{name}'" if name.isidentifier() else "a node"
        if not line and is_user_code(frame):
            line = f"{shorten_path(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return line or "an unknown place"
