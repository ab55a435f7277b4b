"""Calls and changes take turns: what shares state is called by many at once, or changed by one.

A call sees the state as it is at its start until its end. A change waits for the calls that run, and calls that come later wait
for it, in the order in which they came, so that neither starves. A thread never waits for itself: a call within a call goes on,
also while a change waits, and a change within a call is an error. No thread waits for a lock while it changes something, so
that threads which hold several of them cannot wait for each other in a circle, but by changing one thing within a call of
another; that circle is found, and its last one gets an error.

Whatever ends a call, an exception or a KeyboardInterrupt at any place, ends its turn: `dict.pop` is one step for the
interpreter, and nothing comes between the end of a `try` and the first such step of its `finally`. That somebody is woken may
get lost then, and those who wait look again by themselves.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from .errors import FxplugError, SpecError

WAIT = 0.05  # seconds until one who waits looks again, should nobody have woken him
F = TypeVar("F", bound=Callable[..., Any])


class Turns:
    """What calls and changes take turns at. Modules that share the state of their slots hold the same one; a copy is another.

    `changes` counts the changes that were begun. `fault` says why the state cannot be used, if so: calls raise it.
    """

    changes = 0
    fault = ""


class Turn:
    """One call, hold or change: of what, by which thread, in which order it came, and whether it goes on or waits."""

    __slots__ = ("active", "kind", "number", "thread", "turns")

    def __init__(self, turns: tuple[Turns, ...], kind: str) -> None:
        self.turns, self.kind = turns, kind
        self.thread, self.number, self.active = threading.get_ident(), next(_numbers), True

    def meets(self, other: Turn) -> bool:
        """Whether both are about the same state, and in different threads."""
        return self.thread != other.thread and any(mine in other.turns for mine in self.turns)


_numbers = itertools.count()
_lock = threading.RLock()  # for moments; a signal's handler may come while its own thread has it
_calls: dict[Turn, None] = {}  # calls and holds
_changes: dict[Turn, None] = {}
_sleepers: list[Any] = []


def turns_of(module: nn.Module) -> tuple[Turns, ...]:
    """What calls and changes of a module take turns at: nothing where no module in it has switchable state."""
    found = (m.__dict__.get("turns") for m in module.modules())
    return tuple(dict.fromkeys(turns for turns in found if isinstance(turns, Turns)))


def during(turns: tuple[Turns, ...], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` as a call: what shares these turns is not changed meanwhile.

    Raises FxplugError where a change left half of its work, until another one succeeds.
    """
    turn = Turn(turns, "call")
    try:
        with _lock:
            free = not _changes
            if free:
                _calls[turn] = None
        if not free:
            _await(turn, _calls)
        for one in turns:
            if one.fault:
                raise FxplugError(one.fault)
        return function(*args, **kwargs)
    finally:
        _calls.pop(turn, None)
        if _sleepers:
            _wake()


@contextlib.contextmanager
def hold(turns: tuple[Turns, ...]) -> Iterator[None]:
    """Keep changes of other threads away; one of this thread is an error. Calls of all threads go on."""
    if not turns:
        yield
        return
    turn = Turn(turns, "hold")
    try:
        _await(turn, _calls)
        yield
    finally:
        _calls.pop(turn, None)
        _wake()


@contextlib.contextmanager
def change(turns: tuple[Turns, ...]) -> Iterator[None]:
    """Be alone with the state: after the calls that run, before those that come. A change within a change is part of it.

    Raises SpecError within a call or hold of the same thread, and where threads would wait for each other for ever.
    """
    turn = Turn(turns, "change")
    own = [other for other in (*list(_changes), *list(_calls)) if other.thread == turn.thread and other.active]
    if any(other.kind == "change" and set(turns) <= set(other.turns) for other in own):
        yield
        return
    if any(other.kind != "change" and not set(turns).isdisjoint(other.turns) for other in own):
        raise SpecError(
            "adapters are changed between calls, and this thread is in a call of the module or holds its adapters: change them "
            "before or after it"
        )
    try:
        _await(turn, _changes)
        for one in turns:
            one.changes += 1
        yield
    finally:
        _changes.pop(turn, None)
        _wake()


def inside(turns: tuple[Turns, ...]) -> bool:
    """Whether this thread is in a call, hold or change of these."""
    me = threading.get_ident()
    return any(turn.thread == me and not set(turns).isdisjoint(turn.turns) for turn in (*list(_calls), *list(_changes)))


def held(function: F) -> F:
    """A function that reads the state of the modules that it is given as a whole."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        modules = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        with hold(tuple(turns for module in modules for turns in turns_of(module))):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# --- waiting


def _await(turn: Turn, line: dict[Turn, None]) -> None:
    turn.active = False
    line[turn] = None
    while True:
        with _lock:
            others = _before(turn)
            if not others:
                turn.active = True
                return
            if _in_a_circle(turn, others):
                raise SpecError(
                    "adapters are changed between calls: this thread is in a call or change that another one waits for, which "
                    "is itself in a call or change that this one waits for, so that both would wait for ever"
                )
            gate = threading.Lock()
            gate.acquire()
            _sleepers.append(gate)
        gate.acquire(timeout=WAIT)


def _before(turn: Turn) -> list[Turn]:
    """Those that a turn waits for. The tables are copied, as a turn that ends leaves them without the lock."""
    calls, changes = list(_calls), list(_changes)
    if turn.kind == "change":
        return [o for o in (*calls, *changes) if turn.meets(o) and (o.active or o.number < turn.number)]
    changes = [c for c in changes if turn.meets(c)]
    # who has a turn goes on, as those who wait may wait for him; and so does a thread that works for one who holds
    if any(o.thread == turn.thread and o.active for o in (*calls, *list(_changes))) or (
        turn.kind == "call" and any(o.kind == "hold" and o.active and o.meets(c) for o in calls for c in changes)
    ):
        return [c for c in changes if c.active]
    return [c for c in changes if c.active or c.number < turn.number]


def _in_a_circle(turn: Turn, others: list[Turn]) -> bool:
    """Whether those that a turn waits for wait for its thread."""
    seen, todo = set(), list(others)
    while todo:
        other = todo.pop()
        if other.thread == turn.thread:
            return True
        if other.thread not in seen:
            seen.add(other.thread)
            waiting = [o for o in (*list(_calls), *list(_changes)) if o.thread == other.thread and not o.active]
            todo.extend(o for one in waiting for o in _before(one))
    return False


def _wake() -> None:
    with _lock:
        while _sleepers:
            _sleepers.pop().release()


# --- a process that forks: the child has the forking thread alone, whole state, and no turn of any other thread


def _before_fork() -> None:
    me = threading.get_ident()
    while True:
        _lock.acquire()
        if not any(turn.active and turn.thread != me for turn in list(_changes)):
            return
        gate = threading.Lock()
        gate.acquire()
        _sleepers.append(gate)
        _lock.release()
        gate.acquire(timeout=WAIT)


def _after_fork_in_parent() -> None:
    _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock, me = threading.RLock(), threading.get_ident()
    _sleepers.clear()
    for line in (_calls, _changes):
        for turn in [turn for turn in line if turn.thread != me]:
            del line[turn]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
