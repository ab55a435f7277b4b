"""Calls and changes take turns: what shares state is called by many at once, or changed by one.

A call sees the state as it is at its start until its end. A change waits for the calls that run, and calls that come later wait
for it, in the order in which they came, so that neither starves. A thread never waits for itself: a call within a call goes on,
also while a change waits, and a change within a call is an error. No thread waits for a lock while it changes something, so
that threads which hold several of them cannot wait for each other in a circle, but by changing one thing within a call of
another; that circle is found, and its last one gets an error.

Calls may have a choice of their own, which `choosing` sets for the code of one thread or asyncio task. The tensors hold one
choice at a time: calls with the same one run together, others wait for them, in the order in which they came. The first call
writes its choice, and the last one to leave puts back what was there.

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
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from torch import nn

from .errors import FxplugError, SpecError

WAIT = 0.05  # seconds until one who waits looks again, should nobody have woken him
F = TypeVar("F", bound=Callable[..., Any])
NO_CHOICE: Mapping[Any, Any] = {}


class Choice(Protocol):
    """What calls take instead of the state that is there. Equal ones write the same."""

    def write(self, turns: Turns) -> None:
        """Write it into the tensors of one state."""

    def backup(self, turns: Turns) -> Callable[[], None]:
        """A function that writes into these tensors what they hold now."""


class Turns:
    """What calls and changes take turns at. Modules that share the state of their slots hold the same one; a copy is another.

    `changes` counts the changes that were begun. `fault` says why the state cannot be used, if so: calls raise it. `choice` is
    the choice of calls that the tensors hold; `restore` puts back what they held before, None where they do.
    """

    is_runtime_state = True  # which no artifact has
    changes = 0
    fault = ""
    choice: Choice | None = None
    restore: Callable[[], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Turns:
        made = memo[id(self)] = Turns()
        made.changes, made.fault = self.changes, self.fault
        return made


class Turn:
    """One call, read, hold or change: of what, by which thread, in which order it came, and whether it goes on or waits.

    A read is a call that takes the state itself, whatever is chosen; a hold keeps changes away and reads nothing.
    """

    __slots__ = ("active", "choices", "kind", "number", "thread", "turns")

    def __init__(self, turns: tuple[Turns, ...], kind: str, choices: Mapping[Turns, Choice] = NO_CHOICE) -> None:
        self.turns, self.kind, self.choices = turns, kind, choices
        self.thread, self.number, self.active = threading.get_ident(), next(_numbers), True

    def meets(self, other: Turn) -> bool:
        """Whether both are about the same state, and in different threads."""
        return self.thread != other.thread and any(mine in other.turns for mine in self.turns)

    def differs(self, other: Turn) -> bool:
        """Whether both read the same state, and take different choices of it."""
        if not (self.choices or other.choices) or "hold" in (self.kind, other.kind):
            return False
        return any(one in other.turns and self.choices.get(one) != other.choices.get(one) for one in self.turns)


_numbers = itertools.count()
_lock = threading.RLock()  # for moments; a signal's handler may come while its own thread has it
_writing = threading.RLock()  # while the tensors get another choice
_chosen: ContextVar[Mapping[Turns, Choice]] = ContextVar("_chosen", default=NO_CHOICE)
_calls: dict[Turn, None] = {}  # calls, reads and holds
_changes: dict[Turn, None] = {}
_sleepers: list[Any] = []


def turns_of(module: nn.Module) -> tuple[Turns, ...]:
    """What calls and changes of a module take turns at: nothing where no module in it has switchable state."""
    found = (m.__dict__.get("turns") for m in module.modules())
    return tuple(dict.fromkeys(turns for turns in found if isinstance(turns, Turns)))


def during(turns: tuple[Turns, ...], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` as a call: what shares these turns is not changed meanwhile.

    Raises FxplugError where a change left half of its work, until another one succeeds; SpecError within a call of this thread
    that takes another choice.
    """
    turn = Turn(turns, "call", choices_of(turns))
    try:
        with _lock:
            free = not (_changes or turn.choices or any(other.choices for other in list(_calls)))
            if free:
                _calls[turn] = None
        if not free:
            _await(turn, _calls)
        _write_choice(turn)
        for one in turns:
            if one.fault:
                raise FxplugError(one.fault)
        return function(*args, **kwargs)
    finally:
        _calls.pop(turn, None)
        _restore(turns)
        if _sleepers:
            _wake()


@contextlib.contextmanager
def choosing(choices: Mapping[Turns, Choice]) -> Iterator[None]:
    """Calls within take these choices of the states that they name: those of this thread, or of this asyncio task.

    Raises SpecError at its end where the choice is another one then: a generator has no context of its own, so what comes
    between its steps may change the choice, and each step may be in another thread.
    """
    before = _chosen.get()
    own = {**before, **choices}
    try:
        _chosen.set(own)
        yield
        if _chosen.get() is not own:
            raise SpecError(
                "calls in this block may have taken the choice of another one: it was not the last to begin, or goes on in "
                "another context, as with a 'yield' within; end the block before each yield, and begin it again after it"
            )
    finally:
        now = _chosen.get()
        _chosen.set(before if now is own or now is before else NO_CHOICE)


def choices_of(turns: tuple[Turns, ...]) -> Mapping[Turns, Choice]:
    """The choices that a call takes here, by state."""
    chosen = _chosen.get()
    return {one: chosen[one] for one in turns if one in chosen} if chosen else NO_CHOICE


def has_choice() -> bool:
    """Whether some state's calls take a choice here; compiled code may ask."""
    return _chosen.get() is not NO_CHOICE


@contextlib.contextmanager
def hold(turns: tuple[Turns, ...], kind: str = "hold") -> Iterator[None]:
    """Keep changes of other threads away; one of this thread is an error. Calls of all threads go on.

    With `kind` "read" the tensors hold no choice of any call meanwhile, and calls within take none. Raises SpecError within a
    call that has one.
    """
    if not turns:
        yield
        return
    turn, before = Turn(turns, kind), _chosen.get()
    try:
        _await(turn, _calls)
        if kind == "read":
            _write_choice(turn)
            _chosen.set({one: choice for one, choice in before.items() if one not in turns} or NO_CHOICE)
        yield
    finally:
        if kind == "read":  # a hold may end in another thread
            _chosen.set(before)
        _calls.pop(turn, None)
        _restore(turns)
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
            "before or after it, or let calls take others with adapters.using(...)"
        )
    try:
        _await(turn, _changes)
        _write_choice(turn)
        for one in turns:
            one.changes += 1
        yield
    finally:
        _changes.pop(turn, None)
        _restore(turns)
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
        with hold(tuple(turns for module in modules for turns in turns_of(module)), "read"):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# --- what the tensors hold


def _write_choice(turn: Turn) -> None:
    """Let the tensors hold what a turn takes. Whatever interrupts this, what is written down of them is no more than is so."""
    if not turn.choices and all(one.restore is None for one in turn.turns):
        return
    with _writing:
        for one in turn.turns:
            choice = turn.choices.get(one)
            if choice is None and one.restore is not None:
                one.choice = None
                one.restore()
                one.restore = None
            elif choice is not None and choice != one.choice:
                one.choice = None
                one.restore = one.restore or choice.backup(one)
                choice.write(one)
                one.choice = choice


def _restore(turns: tuple[Turns, ...]) -> None:
    """Put back what the tensors held, unless somebody is there who does that himself, or reads them as they are."""
    if all(one.restore is None for one in turns):
        return
    turn = Turn(turns, "read")
    try:
        with _lock:
            if any(one in other.turns for other in (*_calls, *_changes) if other.kind != "hold" for one in turns):
                return
            _calls[turn] = None
        _write_choice(turn)
    finally:
        _calls.pop(turn, None)


# --- waiting


def _await(turn: Turn, line: dict[Turn, None]) -> None:
    if any(other.thread == turn.thread and other.active and turn.differs(other) for other in list(_calls)):
        raise SpecError(
            "this is within a call of the module that takes other adapters, by adapters.using(...): call the module, copy it "
            "or read its adapters before or after that call"
        )
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
    others = [o for o in (*changes, *calls) if turn.meets(o) and (o.kind == "change" or turn.differs(o))]
    # who has a turn goes on, as those who wait may wait for him; and so does a thread that works for one who holds
    if any(o.thread == turn.thread and o.active for o in (*calls, *list(_changes))) or (
        turn.kind == "call" and any(o.kind == "hold" and o.active and o.meets(c) for o in calls for c in others)
    ):
        return [o for o in others if o.active]
    return [o for o in others if o.active or o.number < turn.number]


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
    global _lock, _writing
    _lock, _writing, me = threading.RLock(), threading.RLock(), threading.get_ident()
    _sleepers.clear()
    for line in (_calls, _changes):
        for turn in [turn for turn in line if turn.thread != me]:
            del line[turn]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
