"""Reader-writer locks: many calls read the state that modules share, or one change writes it.

A call sees the state as it is at its start until its end. A change waits for the calls that run, and calls that come later wait
for it, in the order in which they came. A thread never waits for itself: a call within a call goes on, also while a change
waits, and a change within a call is an error, as is what another asyncio task of a thread does in the middle of its change.

Calls may have a choice of their own, which `use_choices` sets for the code of one thread or asyncio task. The tensors hold one
choice at a time: calls with the same one run together, others wait for them. The first call writes its choice, and the last one
to leave puts back what was there.

Nothing finds threads that wait for each other in a circle, as two do that each change, within a call, what the other one calls.
A process that forks while another thread has a lock passes it on to the child, where nobody gives it back.

Whatever ends a call, a KeyboardInterrupt at any place, too, ends its request: `dict.pop` is one step for the interpreter, and
nothing comes between the end of a `try` and the first such step of its `finally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from .errors import FxplugError, SpecError

WAIT = 0.05  # seconds until one who waits looks again, should an interrupt have kept `done` from being released
F = TypeVar("F", bound=Callable[..., Any])
NO_CHOICE: Mapping[Any, Any] = {}


class Choice(Protocol):
    """What calls take instead of the state that is there. Equal ones write the same."""

    def write(self, locks: StateLock) -> None:
        """Write it into the tensors of one state."""

    def backup(self, locks: StateLock) -> Callable[[], None]:
        """Return a function that writes into these tensors what they hold now."""


class StateLock:
    """The lock of one state. Modules that share the state of their slots have the same one, a copy has its own.

    `changes` counts the changes that were begun. `fault` says why the state cannot be used, if so: calls raise it. `choice` is
    the choice of calls that the tensors hold; `restore` puts back what they held before, None where they do. `written` is what
    the change that is under way has written, None where there is none: each tensor with its old values. `pins` counts by name
    what may not be taken away, `filling` has the slots that somebody writes.
    """

    is_runtime_state = True  # which no artifact has
    changes = 0
    fault = ""
    choice: Choice | None = None
    restore: Callable[[], None] | None = None
    written: list[tuple[Tensor, Tensor]] | None = None

    def __init__(self) -> None:
        self.pins: dict[str, int] = {}
        self.filling: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateLock:
        copied = memo[id(self)] = StateLock()
        copied.changes, copied.fault = self.changes, self.fault
        return copied


class LockRequest:
    """One "call", "hold", "change" or "fill": of which states, by which thread, and whether it is inside or waits.

    A hold keeps changes away and reads nothing. A fill writes what nobody reads: it keeps away only a change of the `whole`
    state, which may write or move any tensor, and other changes, calls and fills go on beside it.
    `task` is the asyncio task that makes a change; `done` is released at the end.
    """

    __slots__ = ("choices", "done", "inside", "kind", "locks", "task", "thread", "whole")

    def __init__(
        self, locks: tuple[StateLock, ...], kind: str, choices: Mapping[StateLock, Choice] = NO_CHOICE, whole: bool = False
    ) -> None:
        self.locks, self.kind, self.choices, self.whole = locks, kind, choices, whole
        self.thread, self.inside, self.done = threading.get_ident(), False, threading.Lock()
        self.done.acquire()
        self.task = _current_task() if kind == "change" else None

    def shares(self, other: LockRequest) -> bool:
        """Return whether both requests are for the same state."""
        return any(lock in other.locks for lock in self.locks)

    def differs(self, other: LockRequest) -> bool:
        """Return whether both are calls with different choices for the same state."""
        if not (self.choices or other.choices) or self.kind != "call" or other.kind != "call":
            return False
        return any(lock in other.locks and self.choices.get(lock) != other.choices.get(lock) for lock in self.locks)

    def excludes(self, other: LockRequest) -> bool:
        """Return whether the two requests, of different threads, exclude each other."""
        if self.thread == other.thread:
            return False
        if "fill" in (self.kind, other.kind):
            return (self.whole or other.whole) and self.shares(other)
        return self.shares(other) if "change" in (self.kind, other.kind) else self.differs(other)


def _current_task() -> Any:
    """Return the asyncio task that runs in this thread; None where none does."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return None


_requests: dict[LockRequest, None] = {}  # in the order in which they came
_lock = threading.RLock()  # for moments; what frees memory may end a hold while its own thread has it
_writing = threading.RLock()  # while the tensors get another choice
_chosen: ContextVar[Mapping[StateLock, Choice]] = ContextVar("_chosen", default=NO_CHOICE)


def get_locks(module: nn.Module) -> tuple[StateLock, ...]:
    """Return the locks of a module's states: none where no module in it has switchable state."""
    found = (m.__dict__.get("state_lock") for m in module.modules())
    return tuple(dict.fromkeys(locks for locks in found if isinstance(locks, StateLock)))


def call_with_read_lock(locks: tuple[StateLock, ...], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`: the states of these locks are not changed meanwhile.

    Raises FxplugError where a change left half of its work, until another one succeeds; SpecError within a call of this thread
    that takes another choice.
    """
    if not locks:
        return function(*args, **kwargs)
    request = LockRequest(locks, "call", get_choices(locks))
    try:
        _enter(request)
        for lock in locks:
            if lock.fault:
                raise FxplugError(lock.fault)
        return function(*args, **kwargs)
    finally:
        _requests.pop(request, None)
        _leave(request)


@contextlib.contextmanager
def use_choices(choices: Mapping[StateLock, Choice]) -> Iterator[None]:
    """Let calls within take these choices of the states that they name: those of this thread, or of this asyncio task.

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


def get_choices(locks: tuple[StateLock, ...]) -> Mapping[StateLock, Choice]:
    """Return the choices that a call takes here, by state."""
    chosen = _chosen.get()
    return {lock: chosen[lock] for lock in locks if lock in chosen} if chosen else NO_CHOICE


def has_choice() -> bool:
    """Return whether calls have a choice for some state here; compiled code may call this."""
    return _chosen.get() is not NO_CHOICE


@contextlib.contextmanager
def read_lock(locks: tuple[StateLock, ...], reads: bool = False) -> Iterator[None]:
    """Keep changes of other threads away; one of this thread is an error. Calls of all threads go on.

    Where it `reads`, the tensors hold no choice of any call meanwhile, and calls within take none. Raises SpecError within a
    call that has one.
    """
    if not locks:
        yield
        return
    request, before = LockRequest(locks, "call" if reads else "hold"), _chosen.get()
    try:
        _enter(request)
        if reads:
            _chosen.set({lock: choice for lock, choice in before.items() if lock not in locks} or NO_CHOICE)
        yield
    finally:
        try:
            if reads:  # a hold may end in another thread
                _chosen.set(before)
        finally:
            _requests.pop(request, None)
            _leave(request)


@contextlib.contextmanager
def fill_lock(locks: tuple[StateLock, ...]) -> Iterator[None]:
    """Keep away changes of the whole state, while this thread writes what no call reads; calls and other changes go on."""
    request = LockRequest(locks, "fill")
    try:
        _enter(request)
        yield
    finally:
        _requests.pop(request, None)
        _leave(request)


def check_change(locks: tuple[StateLock, ...]) -> bool:
    """Return whether this thread is in a change of these states already. Raises SpecError as `write_lock` would."""
    request = LockRequest(locks, "change")
    _check_own(request)
    return any(other.kind == "change" for other in _own(request))


@contextlib.contextmanager
def write_lock(locks: tuple[StateLock, ...], whole: bool = True) -> Iterator[None]:
    """Be alone with the state: after the calls that run, before those that come. A change within a change is part of it.

    One that is not of the `whole` state writes tables alone, and waits for nobody who fills a slot.

    Raises SpecError within a call or hold of the same thread, and during a change of another asyncio task of this thread.
    """
    request = LockRequest(locks, "change", whole=whole)
    _check_own(request)
    if any(other.kind == "change" and set(locks) <= set(other.locks) for other in _own(request)):
        yield
        return
    try:
        _enter(request)
        for lock in locks:
            lock.changes += 1
        yield
    finally:
        _requests.pop(request, None)
        _leave(request)


def has_lock(locks: tuple[StateLock, ...]) -> bool:
    """Return whether this thread is in a call, hold or change of one of these states."""
    return bool(_own(LockRequest(locks, "hold")))


def with_read_lock(function: F) -> F:
    """Decorate a function: no state of the modules among its arguments is changed while it runs."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        modules = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        with read_lock(tuple(locks for module in modules for locks in get_locks(module)), reads=True):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# --- going in and out


def _own(request: LockRequest) -> list[LockRequest]:
    """Return the requests of the same thread that are inside the same states."""
    mine = [o for o in list(_requests) if o.thread == request.thread and o.inside and o.kind != "fill"]
    return [o for o in mine if o.shares(request)]


def _check_own(request: LockRequest) -> None:
    """Raises SpecError for a request that would wait for its own thread."""
    own = _own(request)
    changes = [other for other in own if other.kind == "change"]
    if changes:
        task = _current_task()
        if any(other.task is not task for other in changes):
            raise SpecError(
                "another asyncio task of this thread is in the middle of a change of these adapters: it awaits within "
                "adapters.change(); leave that block before 'await', or choose adapters for its own calls with "
                "adapters.using(...)"
            )
    if request.kind == "change" and any(other.kind != "change" for other in own) and not changes:
        raise SpecError(
            "adapters cannot be changed during a call: this thread is in a call of the module, or in hold(); change them "
            "before or after it, or choose others for some calls with adapters.using(...)"
        )
    if any(request.differs(other) for other in own):
        raise SpecError(
            "this is inside a call that uses other adapters, by adapters.using(...): call the module, copy it or read its "
            "adapters before or after that call"
        )


def _enter(request: LockRequest) -> None:
    """Wait until a request can be inside, and let the tensors hold what it takes."""
    if _requests:
        _check_own(request)
    _requests[request] = None
    while (other := _admit(request)) is not None:
        if other.done.acquire(timeout=WAIT):
            other.done.release()
    if request.kind not in ("hold", "fill"):
        _write_choices(request)


def _admit(request: LockRequest) -> LockRequest | None:
    """Let a request be inside, or return one that it has to wait for: who excludes it and is inside, or came before it.

    Those who wait keep nobody out whose thread is inside, nor calls beside a hold, which threads may make that work for it.
    """
    with _lock:
        others = list(_requests)
        urgent = any(
            o.inside and (o.thread == request.thread or (o.kind == "hold" and request.kind == "call" and o.shares(request)))
            for o in others
        )
        earlier = not urgent
        for other in others:
            if other is request:
                earlier = False
            elif (other.inside or earlier) and other.excludes(request):
                return other
        request.inside = True
    return None


def _leave(request: LockRequest) -> None:
    """Put back what the tensors held, unless somebody is inside who reads them."""
    request.done.release()
    if any(lock.restore is not None for lock in request.locks):
        with _writing:
            with _lock:
                inside = [o for o in list(_requests) if o.inside and o.kind not in ("hold", "fill")]
            for lock in request.locks:
                if not any(lock in other.locks for other in inside):
                    _restore(lock)


def _write_choices(request: LockRequest) -> None:
    """Let the tensors hold what a request takes. Whatever interrupts this, what is noted of them is no more than is so."""
    if not request.choices and all(lock.restore is None for lock in request.locks):
        return
    with _writing:
        for lock in request.locks:
            choice = request.choices.get(lock)
            if choice is None:
                _restore(lock)
            elif choice != lock.choice:
                lock.choice = None
                lock.restore = lock.restore or choice.backup(lock)
                choice.write(lock)
                lock.choice = choice


def _restore(lock: StateLock) -> None:
    lock.choice = None
    if lock.restore is not None:
        lock.restore()
        lock.restore = None
