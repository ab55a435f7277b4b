"""Reader-writer locks: a call sees one state, nobody starves, and what ends a call ends its request."""

from __future__ import annotations

import asyncio
import copy
import signal
import threading
import time

import fuzz_switching
import pytest
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core import locks
from fxplug.core.errors import SpecError
from fxplug.core.locks import StateLock, call_with_read_lock, get_locks, read_lock, write_lock
from fxplug.core.torch_internals.modules import leave_frame

LONG = 60  # seconds that no test needs, so that one that hangs ends


def started(*functions):
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def ended(threads):
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def waiting():
    return [one for one in list(locks._requests) if not one.inside]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not locks._requests


class Call:
    """A call in a thread of its own that lasts until `leave`."""

    def __init__(self, *locks, note=lambda: None):
        self.inside, self.out, self.note = threading.Event(), threading.Event(), note
        self.threads = started(lambda: call_with_read_lock(locks, self.body))

    def body(self):
        self.inside.set()
        assert self.out.wait(LONG)
        self.note()

    def leave(self):
        self.out.set()
        ended(self.threads)


# --- the order


def test_a_change_waits_for_calls_and_calls_for_a_change():
    one, order = (StateLock(),), []
    call = Call(*one, note=lambda: order.append("call"))
    assert call.inside.wait(LONG)
    call_with_read_lock(one, order.append, "beside")

    def changes():
        with write_lock(one), write_lock(one):
            order.append("change")

    threads = started(changes)
    until(waiting)
    threads += started(lambda: call_with_read_lock(one, order.append, "late"))
    until(lambda: len(waiting()) == 2)
    call_with_read_lock((StateLock(),), order.append, "other state")
    call.leave()
    ended(threads)
    assert order == ["beside", "other state", "call", "change", "late"]


@pytest.mark.parametrize("many", ["calls", "changes"])
def test_nobody_starves(many):
    """One that comes among threads which do nothing else gets its turn."""
    one, stop = (StateLock(),), threading.Event()

    def calls():
        while not stop.is_set():
            call_with_read_lock(one, lambda: None)

    def changes():
        while not stop.is_set():
            with write_lock(one):
                pass

    threads = started(*[calls if many == "calls" else changes] * 3)
    for _ in range(20):
        with write_lock(one) if many == "calls" else read_lock(one):
            pass
    stop.set()
    ended(threads)


# --- threads and themselves


def test_a_call_within_a_call_goes_on_while_a_change_waits():
    one, threads = (StateLock(),), []

    def outer():
        threads.extend(started(changes))
        until(waiting)
        return call_with_read_lock(one, lambda: 5)

    def changes():
        with write_lock(one):
            pass

    assert call_with_read_lock(one, outer) == 5
    ended(threads)


@pytest.mark.parametrize("way", ["call", "hold"])
def test_a_change_within_a_call_is_an_error(way):
    one = (StateLock(),)

    def changes():
        with pytest.raises(SpecError, match="this thread is in a call of the module, or in hold"), write_lock(one):
            pass
        with write_lock((StateLock(),)):
            pass

    if way == "call":
        call_with_read_lock(one, changes)
    else:
        with read_lock(one):
            changes()
    with write_lock(one), read_lock(one):
        call_with_read_lock(one, lambda: None)
    with write_lock(one):
        pass


def test_threads_that_work_for_a_holder_go_on():
    """As autograd's threads do, which compute activations again."""
    one = (StateLock(),)

    def changes():
        with write_lock(one):
            pass

    with read_lock(one):
        threads = started(changes)
        until(waiting)
        ended(started(lambda: call_with_read_lock(one, lambda: None)))
        assert waiting()
    ended(threads)


def test_tasks_of_one_thread():
    """A task that holds may wait; another one's change is an error then, as it would stop both."""
    one, found = (StateLock(),), []

    async def holds(entered, leave):
        with read_lock(one):
            entered.set()
            await leave.wait()

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(holds(entered, leave))
        await entered.wait()
        found.append(call_with_read_lock(one, lambda: "call"))
        with pytest.raises(SpecError, match="during a call"), write_lock(one):
            pass
        leave.set()
        await task
        with write_lock(one):
            found.append("change")

    asyncio.run(main())
    assert found == ["call", "change"]


def test_a_hold_may_end_in_another_thread_and_an_abandoned_one_ends():
    one = (StateLock(),)
    held = read_lock(one)
    held.__enter__()
    ended(started(lambda: held.__exit__(None, None, None)))

    def yields():
        with read_lock(one):
            yield 1

    generator = yields()
    next(generator)
    del generator
    with write_lock(one):
        pass


# --- what ends a call


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_errors_end_requests(error):
    one = (StateLock(),)

    def fails():
        raise error

    def in_a_thread():
        with pytest.raises(error):
            call_with_read_lock(one, fails)

    in_a_thread()
    ended(started(in_a_thread))
    for context in (read_lock(one), write_lock(one)):
        with pytest.raises(error), context:
            fails()
    assert not locks._requests


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_interrupts_at_any_place_end_requests():
    """A timer interrupts calls, holds and changes wherever they are, while another thread does the same."""
    one, stop, times = (StateLock(),), threading.Event(), 0

    def interrupt(*_):
        raise KeyboardInterrupt

    def others():
        while not stop.is_set():
            call_with_read_lock(one, lambda: None)
            with write_lock(one):
                pass

    def work():
        while True:
            call_with_read_lock(one, call_with_read_lock, one, lambda: None)
            with write_lock(one):
                pass
            with read_lock(one):
                pass

    threads = started(others)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while times < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + times * 3e-6)
                work()
            except KeyboardInterrupt:
                times += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    stop.set()
    ended(threads)


# --- modules


def test_who_shares_a_lock(tmp_path):
    """What shares the tensors of the slots shares their lock, copies have their own."""
    new = fuzz_switching.slotted()
    mine = get_locks(new)
    fuzz = fuzz_switching
    shared = [
        fxplug.fuse(new), fuzz.outline(new, ["blocks.*"]),
        fxplug.apply(new, fxplug.load_pass("ssf", at="blocks.0.q")), nn.Sequential(new), copy.copy(new.lora.gates.table),
        fxplug.trace(nn.Sequential(new), fuzz.example()),
    ]  # fmt: skip
    assert len(mine) == 1 and all(get_locks(module) == mine for module in shared)
    fxplug.save(new, tmp_path / "out")
    apart = [copy.deepcopy(new), fxplug.lower(new, merge="live"), fxplug.load(tmp_path / "out"), fuzz.slotted()]
    assert all(len(get_locks(module)) == 1 and get_locks(module) != mine for module in apart)
    two = fxplug.apply(new, fxplug.load_pass("lora", name="second", at="blocks.0.q", rank=2, slots=2))
    assert len(get_locks(two)) == 2 and set(mine) < set(get_locks(two))
    assert len(set(get_locks(copy.deepcopy(two))) - set(get_locks(two))) == 2
    assert get_locks(fuzz.base()) == () == get_locks(fxplug.merge(new))
    assert fxplug.Adapters(new).locks == new.adapters.locks == mine


@sweep("form", fuzz_switching.FORMS, "eager", "live merge", "fused")
def test_calls_see_one_state(form):
    row = fuzz_switching.stress(fuzz_switching.FORMS[form], 40, seed=3, changes=12)
    assert row["calls"] == 40 and row["beside a change"] and not row["torn"], row


@sweep("form", ["eager", "live merge", "compiled"], "eager")
def test_without_locks_calls_are_torn(form, monkeypatch):
    """What is tried above can fail."""

    def call_without_lock(_, call, *args, **kwargs):
        return call(*args, **kwargs)

    leave_frame(call_without_lock.__code__)  # as those of the locks
    monkeypatch.setattr("fxplug.core.ir.calls.call_with_read_lock", call_without_lock)
    row = fuzz_switching.stress(fuzz_switching.FORMS[form], 20_000, seed=3, until_torn=True, changes=12)
    assert row["torn"]
