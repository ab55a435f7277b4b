"""Reader-writer locks: state that modules share is read by many calls at once, or changed by one.

A call sees the state as it is at its start until its end. A change waits for the calls that run, and calls that come later wait
for it, in the order in which they came, so that neither starves. A thread never waits for itself: a call within a call goes on,
also while a change waits, and a change within a call is an error. No thread waits for a lock while it changes something, so
that threads which hold several of them cannot wait for each other in a circle, but by changing one thing within a call of
another; that circle is found, and its last one gets an error.

A change belongs to the asyncio task that makes it, too: where it awaits in the middle, what another task of its thread calls,
reads or changes is an error, as waiting there would stop both.

Calls may have a choice of their own, which `use_choices` sets for the code of one thread or asyncio task. The tensors hold one
choice at a time: calls with the same one run together, others wait for them, in the order in which they came. The first call
writes its choice, and the last one to leave puts back what was there.

Whatever ends a call, an exception or a KeyboardInterrupt at any place, ends its request: `dict.pop` is one step for the
interpreter, and nothing comes between the end of a `try` and the first such step of its `finally`. That somebody is woken may
get lost then, and those who wait look again by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from .errors import FxplugError, SpecError

WAIT = 0.05  # seconds until one who waits looks again, should nobody have woken him
F = TypeVar("F", bound=Callable[..., Any])
NO_CHOICE: Mapping[Any, Any] = {}


class Choice(Protocol):
    """What calls take instead of the state that is there. Equal ones write the same."""

    def write(self, locks: StateLock) -> None:
        """Write it into the tensors of one state."""

    def backup(self, locks: StateLock) -> Callable[[], None]:
        """A function that writes into these tensors what they hold now."""


class StateLock:
    """The lock of one state. Modules that share the state of their slots have the same one, a copy has its own.

    `changes` counts the changes that were begun. `fault` says why the state cannot be used, if so: calls raise it. `choice` is
    the choice of calls that the tensors hold; `restore` puts back what they held before, None where they do. `written` is what
    the change that is under way has written, None where there is none: each tensor with its old values.
    """

    is_runtime_state = True  # which no artifact has
    changes = 0
    fault = ""
    choice: Choice | None = None
    restore: Callable[[], None] | None = None
    written: list[tuple[Tensor, Tensor]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> StateLock:
        made = memo[id(self)] = StateLock()
        made.changes, made.fault = self.changes, self.fault
        return made


class LockRequest:
    """One call, read, hold or change: of which states, by which thread, in which order, and whether it goes on or waits.

    A read is a call that takes the state itself, whatever is chosen; a hold keeps changes away and reads nothing. `task` is
    the asyncio task that makes a change.
    """

    __slots__ = ("active", "choices", "kind", "locks", "number", "task", "thread")

    def __init__(self, locks: tuple[StateLock, ...], kind: str, choices: Mapping[StateLock, Choice] = NO_CHOICE) -> None:
        self.locks, self.kind, self.choices = locks, kind, choices
        self.thread, self.number, self.active = threading.get_ident(), next(_numbers), True
        self.task = _current_task() if kind == "change" else None

    def concerns(self, other: LockRequest) -> bool:
        """Whether both are of the same state, and in different threads."""
        return self.thread != other.thread and any(mine in other.locks for mine in self.locks)

    def differs(self, other: LockRequest) -> bool:
        """Whether both read the same state, and take different choices of it."""
        if not (self.choices or other.choices) or "hold" in (self.kind, other.kind):
            return False
        return any(one in other.locks and self.choices.get(one) != other.choices.get(one) for one in self.locks)


def _current_task() -> Any:
    """The asyncio task that runs in this thread; None where none does."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return None


_numbers = itertools.count()
_lock = threading.RLock()  # for moments; a signal's handler may come while its own thread has it
_writing = threading.RLock()  # while the tensors get another choice
_chosen: ContextVar[Mapping[StateLock, Choice]] = ContextVar("_chosen", default=NO_CHOICE)
_calls: dict[LockRequest, None] = {}  # calls, reads and holds
_changes: dict[LockRequest, None] = {}
_sleepers: list[Any] = []


def locks_of(module: nn.Module) -> tuple[StateLock, ...]:
    """The locks of a module's states: none where no module in it has switchable state."""
    found = (m.__dict__.get("state_lock") for m in module.modules())
    return tuple(dict.fromkeys(locks for locks in found if isinstance(locks, StateLock)))


def call_with_read_lock(locks: tuple[StateLock, ...], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` as a call: the states of these locks are not changed meanwhile.

    Raises FxplugError where a change left half of its work, until another one succeeds; SpecError within a call of this thread
    that takes another choice.
    """
    request = LockRequest(locks, "call", choices_of(locks))
    try:
        with _lock:
            free = not (_changes or request.choices or any(other.choices for other in list(_calls)))
            if free:
                _calls[request] = None
        if not free:
            _await(request, _calls)
        _write_choice(request)
        for one in locks:
            if one.fault:
                raise FxplugError(one.fault)
        return function(*args, **kwargs)
    finally:
        _calls.pop(request, None)
        _restore(locks)
        if _sleepers:
            _wake()


@contextlib.contextmanager
def use_choices(choices: Mapping[StateLock, Choice]) -> Iterator[None]:
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
                "calls in this block may have used the adapters of another using() block: blocks must end in the reverse order "
                "in which they began, in the same context; leave the block before a 'yield', and enter it again after it"
            )
    finally:
        now: Mapping[StateLock, Choice] = own
        try:  # an interrupt may come behind each call, the first in a `finally`, too
            now = _chosen.get()
        finally:
            _chosen.set(before if now is own or now is before else NO_CHOICE)


def choices_of(locks: tuple[StateLock, ...]) -> Mapping[StateLock, Choice]:
    """The choices that a call takes here, by state."""
    chosen = _chosen.get()
    return {one: chosen[one] for one in locks if one in chosen} if chosen else NO_CHOICE


def has_choice() -> bool:
    """Whether some state's calls take a choice here; compiled code may ask."""
    return _chosen.get() is not NO_CHOICE


@contextlib.contextmanager
def read_lock(locks: tuple[StateLock, ...], kind: str = "hold") -> Iterator[None]:
    """Keep changes of other threads away; one of this thread is an error. Calls of all threads go on.

    With `kind` "read" the tensors hold no choice of any call meanwhile, and calls within take none. Raises SpecError within a
    call that has one.
    """
    if not locks:
        yield
        return
    request, before = LockRequest(locks, kind), _chosen.get()
    try:
        _await(request, _calls)
        if kind == "read":
            _write_choice(request)
            _chosen.set({one: choice for one, choice in before.items() if one not in locks} or NO_CHOICE)
        yield
    finally:
        try:
            if kind == "read":  # a hold may end in another thread
                _chosen.set(before)
        finally:
            _calls.pop(request, None)
            _restore(locks)
            _wake()


@contextlib.contextmanager
def write_lock(locks: tuple[StateLock, ...]) -> Iterator[None]:
    """Be alone with the state: after the calls that run, before those that come. A change within a change is part of it.

    Raises SpecError within a call or hold of the same thread, during a change of another asyncio task of this thread, and where
    threads would wait for each other for ever.
    """
    request = LockRequest(locks, "change")
    _check_task(locks)
    own = [other for other in (*list(_changes), *list(_calls)) if other.thread == request.thread and other.active]
    if any(other.kind == "change" and set(locks) <= set(other.locks) for other in own):
        yield
        return
    if any(other.kind != "change" and not set(locks).isdisjoint(other.locks) for other in own):
        raise SpecError(
            "adapters cannot be changed during a call: this thread is in a call of the module, or in hold(); change them "
            "before or after it, or choose others for some calls with adapters.using(...)"
        )
    try:
        _await(request, _changes)
        _write_choice(request)
        for one in locks:
            one.changes += 1
        yield
    finally:
        _changes.pop(request, None)
        _restore(locks)
        _wake()


def holds_lock(locks: tuple[StateLock, ...]) -> bool:
    """Whether this thread is in a call, hold or change of one of these states."""
    me = threading.get_ident()
    requests = (*list(_calls), *list(_changes))
    return any(request.thread == me and not set(locks).isdisjoint(request.locks) for request in requests)


def with_read_lock(function: F) -> F:
    """Decorate a function: no state of the modules among its arguments is changed while it runs."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        modules = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        with read_lock(tuple(locks for module in modules for locks in locks_of(module)), "read"):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# --- what the tensors hold


def _write_choice(request: LockRequest) -> None:
    """Let the tensors hold what a request takes. Whatever interrupts this, what is noted of them is no more than is so."""
    if not request.choices and all(one.restore is None for one in request.locks):
        return
    with _writing:
        for one in request.locks:
            choice = request.choices.get(one)
            if choice is None and one.restore is not None:
                one.choice = None
                one.restore()
                one.restore = None
            elif choice is not None and choice != one.choice:
                one.choice = None
                one.restore = one.restore or choice.backup(one)
                choice.write(one)
                one.choice = choice


def _restore(locks: tuple[StateLock, ...]) -> None:
    """Put back what the tensors held, unless somebody is there who does that himself, or reads them as they are."""
    if all(one.restore is None for one in locks):
        return
    request = LockRequest(locks, "read")
    try:
        with _lock:
            if any(one in other.locks for other in (*_calls, *_changes) if other.kind != "hold" for one in locks):
                return
            _calls[request] = None
        _write_choice(request)
    finally:
        _calls.pop(request, None)


# --- waiting


def _check_task(locks: tuple[StateLock, ...]) -> None:
    """Raises SpecError where another asyncio task of this thread is in the middle of a change of these states."""
    me = threading.get_ident()
    found = [o for o in list(_changes) if o.thread == me and o.active and not set(locks).isdisjoint(o.locks)]
    if found:
        task = _current_task()
        if any(other.task is not task for other in found):
            raise SpecError(
                "another asyncio task of this thread is in the middle of a change of these adapters: it awaits within "
                "adapters.change(); leave that block before 'await', or choose adapters for its own calls with "
                "adapters.using(...)"
            )


def _await(request: LockRequest, line: dict[LockRequest, None]) -> None:
    if _changes:
        _check_task(request.locks)
    if any(other.thread == request.thread and other.active and request.differs(other) for other in list(_calls)):
        raise SpecError(
            "this is inside a call that uses other adapters, by adapters.using(...): call the module, copy it or read its "
            "adapters before or after that call"
        )
    request.active = False
    line[request] = None
    while True:
        with _lock:
            others = _before(request)
            if not others:
                request.active = True
                return
            if _in_a_circle(request, others):
                raise SpecError(
                    "deadlock: this thread and another one each wait until the other has finished its call or its change of "
                    "adapters; change adapters between calls"
                )
            gate = threading.Lock()
            gate.acquire()
            _sleepers.append(gate)
        gate.acquire(timeout=WAIT)


def _before(request: LockRequest) -> list[LockRequest]:
    """Those that a request waits for. The tables are copied, as a request that ends leaves them without the lock."""
    calls, changes = list(_calls), list(_changes)
    if request.kind == "change":
        return [o for o in (*calls, *changes) if request.concerns(o) and (o.active or o.number < request.number)]
    others = [o for o in (*changes, *calls) if request.concerns(o) and (o.kind == "change" or request.differs(o))]
    # whose request was granted goes on, as those who wait may wait for him; and so does a thread that works for one who holds
    if any(o.thread == request.thread and o.active for o in (*calls, *list(_changes))) or (
        request.kind == "call" and any(o.kind == "hold" and o.active and o.concerns(c) for o in calls for c in others)
    ):
        return [o for o in others if o.active]
    return [o for o in others if o.active or o.number < request.number]


def _in_a_circle(request: LockRequest, others: list[LockRequest]) -> bool:
    """Whether those that a request waits for wait for its thread."""
    seen, todo = set(), list(others)
    while todo:
        other = todo.pop()
        if other.thread == request.thread:
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


# --- a process that forks: the child has the forking thread alone, whole state, and no request of any other thread


def _before_fork() -> None:
    me = threading.get_ident()
    while True:
        _lock.acquire()
        if not any(request.active and request.thread != me for request in list(_changes)):
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
        for request in [request for request in line if request.thread != me]:
            del line[request]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
