"""When a process dies or hangs: the others end within the timeout of their group, and say which one, and at which node.

A thread of each process looks into the store of torch.distributed now and then. When a collective fails somewhere, every
process that lives writes there where it stands, and the first that failed says what it found, for all.
"""

from __future__ import annotations

import atexit
import linecache
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.capture.user_code import is_user_code, short_path
from ...core.errors import GuardError
from ...core.torch_internals.distributed import default_store

PERIOD = 0.5  # seconds between two looks into the store
GRACE = 5.0  # seconds for those that live to answer
SIGNS = ("timed out", "timeout", "closed by peer", "connection", "broken pipe", "reset by peer", "nccl")
WAITS = "waits at "


def guarded(call: Callable[[], Tensor]) -> Tensor:
    """What a collective gives. Raises GuardError where a process died or does not come, with its rank and the node."""
    if torch.compiler.is_compiling():
        return call()
    try:
        return call()
    except RuntimeError as error:  # of torch's backends, which know connections and no processes
        if not any(sign in str(error).lower() for sign in SIGNS):
            raise
        text = str(error).splitlines()[0]
        # nothing plainer: the error is raised in generated code, and only the frame knows the node that it stands at
        raise GuardError(f"{_collect_reports(_place(sys._getframe()))} ({text.rpartition('] ')[2][:120]})") from error


def watch() -> None:
    """Let this process answer the others from now on. Once for each process group."""
    store = default_store()
    if _RankMonitor.current is None or _RankMonitor.current.of is not store:
        if _RankMonitor.current is not None:
            _RankMonitor.current.end()
        _RankMonitor.current = _RankMonitor(store)


class _RankMonitor:
    current: _RankMonitor | None = None

    def __init__(self, store: Any) -> None:
        self.of, self.rank, self.world = store, dist.get_rank(), dist.get_world_size()
        self.main, self.ended = threading.get_ident(), threading.Event()
        self.store = store.clone()  # a connection of its own: others may wait with theirs
        self.thread = threading.Thread(target=self.look, name="fxplug-watch", daemon=True)
        self.thread.start()
        atexit.register(self.end)

    def look(self) -> None:
        while not self.ended.wait(PERIOD):
            try:
                if self.store.check(["fxplug/fault"]):
                    frame = sys._current_frames().get(self.main)
                    self.store.set(f"fxplug/at/{self.rank}", "has ended" if frame is None else _place(frame))
                    return
            except Exception:  # torch's own: the store is gone with the process that had it
                return

    def end(self) -> None:
        self.ended.set()
        if self.thread is not threading.current_thread():
            self.thread.join(2 * PERIOD)


def _collect_reports(place: str) -> str:
    """What the processes say of themselves; the one that asks first asks for all."""
    me = _RankMonitor.current
    if me is None:
        return f"another process died or did not reach the collective; this one {place}"
    try:
        store = me.of.clone()
        if int(store.add("fxplug/fault", 1)) > 1:
            return str(_query(store, "fxplug/found", 3 * GRACE) or f"another process failed; process {me.rank} {place}")
        store.set(f"fxplug/at/{me.rank}", place)
        end = time.monotonic() + GRACE
        answers = {r: _query(store, f"fxplug/at/{r}", end - time.monotonic()) for r in range(me.world)}
        text = _report(me.rank, answers)
        store.set("fxplug/found", text)
        return text
    except Exception:  # torch's own: the store is gone
        return (
            f"process 0, which runs the store of torch.distributed, does not answer and must have died; process {me.rank} "
            f"{place}"
        )


def _report(rank: int, answers: dict[int, str | None]) -> str:
    lost = [r for r, text in answers.items() if text is None]
    away = [r for r, text in answers.items() if text is not None and not text.startswith(WAITS)]
    mine = f"process {rank} {answers[rank]}"
    if lost:
        many = len(lost) > 1
        names = ", ".join(map(str, lost))
        return f"process{'es' * many} {names} {'do' if many else 'does'} not answer and must have died; {mine}"
    if away:
        return "; ".join([*(f"process {r} did not reach the collective: it {answers[r]}" for r in away), mine])
    return "the processes wait for each other: " + "; ".join(f"process {r} {text}" for r, text in answers.items())


def _query(store: Any, key: str, seconds: float) -> str | None:
    end = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
    return str(store.get(key).decode())


def _place(frame: FrameType | None) -> str:
    """Where a thread stands: at a node of a graph, in a collective or not; or in somebody's own code."""
    waits, line = False, ""
    while frame is not None:
        code = frame.f_code
        waits = waits or code is guarded.__code__
        if code.co_filename.startswith("<eval_with_key>"):
            text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals)
            name = text.partition("=")[0].strip()
            return f"{WAITS if waits else 'is at '}'{name}'" if name.isidentifier() else f"{WAITS if waits else 'is at '}a node"
        if not line and is_user_code(frame):
            line = f"{short_path(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{WAITS if waits else 'is at '}{line or 'an unknown place'}"
