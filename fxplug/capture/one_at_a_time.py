"""One trace at a time in a process, and nothing of it in a child that is forked meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..errors import TraceError
from ..torch_internals.modules import CALL, COMPILED, call_with_hooks

MOMENT = 0.01  # seconds in which a thread ends the layer that it was in, and had not read its weights yet
PATIENCE = 600.0  # seconds that a call of a model waits for the trace of it that another thread runs


class _Turn:
    """Whose turn it is, and what is to be undone: for the whole process, or in the thread that traces alone."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread: int | None = None
        self.open: list[tuple[contextlib.ExitStack, bool]] = []
        self.call: Callable[..., Any] = call_with_hooks  # what a call of a module is while the trace lasts


_turn = _Turn()


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Hold the process's one lock for traces. A call of the model in another thread waits until the trace is over.

    Raises TraceError inside a trace of the same thread.
    """
    turn, me = _turn, threading.get_ident()
    if turn.thread == me:
        raise TraceError(
            "a trace was asked for inside a trace: forward, or something that it calls, traces a model; trace that one first "
            "and let forward call the result"
        )
    with turn.lock, undone() as stack:
        turn.thread = me
        stack.callback(setattr, turn, "thread", None)
        modules = {id(m) for m in model.modules()}
        # a thread that forward itself starts, and waits for, is part of the call
        others = {thread.ident for thread in threading.enumerate()} - {me}
        original = turn.call = getattr(nn.Module, CALL)
        for module in model.modules():
            if COMPILED in vars(module):  # the model's own code is what is traced
                stack.callback(vars(module).__setitem__, COMPILED, vars(module).pop(COMPILED))

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) in modules and threading.get_ident() in others and turn.thread == me:
                if not turn.lock.acquire(timeout=PATIENCE):
                    raise TraceError(f"another thread has been tracing this model for {PATIENCE:.0f} s")
                turn.lock.release()
            return turn.call(module, *args, **kwargs)

        stack.callback(setattr, nn.Module, CALL, original)
        setattr(nn.Module, CALL, call)
        if others:
            time.sleep(MOMENT)
        yield


@contextlib.contextmanager
def calls(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """For a time within a trace calls of modules are what `around` makes of torch's own."""
    turn = _turn
    original = turn.call
    turn.call = around(original)
    try:
        yield
    finally:
        turn.call = original


@contextlib.contextmanager
def undone(here: bool = False) -> Iterator[contextlib.ExitStack]:
    """A stack that is closed at the end, and in a child that is forked meanwhile; with `here` only where this thread forks,
    as what is on it is this thread's own.
    """
    turn = _turn
    stack = contextlib.ExitStack()
    entry = (stack, here)
    turn.open.append(entry)
    try:
        yield stack
    finally:
        try:
            stack.close()
        finally:
            if entry in turn.open:
                turn.open.remove(entry)


def _after_fork() -> None:
    global _turn
    old, _turn = _turn, _Turn()
    mine = old.thread == threading.get_ident()
    for stack, here in reversed(old.open):
        if mine or not here:
            with contextlib.suppress(Exception):  # torch's modes may be half left where the process was forked
                stack.close()
    old.open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
