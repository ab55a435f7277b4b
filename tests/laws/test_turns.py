"""Calls and changes take turns: a call sees one state, nobody starves or waits for ever, and what ends a call ends its turn."""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import signal
import threading
import time

import fuzz_switching
import pytest
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core import locks as queue
from fxplug.core.errors import SpecError
from fxplug.core.locks import Turns, change, during, hold, turns_of

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
    return [turn for line in (queue._calls, queue._changes) for turn in list(line) if not turn.active]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not queue._calls and not queue._changes


class Call:
    """A call in a thread of its own that lasts until `leave`."""

    def __init__(self, *turns, note=lambda: None):
        self.inside, self.out, self.note = threading.Event(), threading.Event(), note
        self.threads = started(lambda: during(turns, self.body))

    def body(self):
        self.inside.set()
        assert self.out.wait(LONG)
        self.note()

    def leave(self):
        self.out.set()
        ended(self.threads)


# --- the order


def test_a_change_waits_for_calls_and_calls_for_a_change():
    one, order = (Turns(),), []
    call = Call(*one, note=lambda: order.append("call"))
    assert call.inside.wait(LONG)
    during(one, order.append, "beside")

    def changes():
        with change(one), change(one):
            order.append("change")

    threads = started(changes)
    until(waiting)
    threads += started(lambda: during(one, order.append, "late"))
    until(lambda: len(waiting()) == 2)
    during((Turns(),), order.append, "other state")
    call.leave()
    ended(threads)
    assert order == ["beside", "other state", "call", "change", "late"]


@pytest.mark.parametrize("many", ["calls", "changes"])
def test_nobody_starves(many):
    """One that comes among threads which do nothing else gets its turn."""
    one, stop = (Turns(),), threading.Event()

    def calls():
        while not stop.is_set():
            during(one, lambda: None)

    def changes():
        while not stop.is_set():
            with change(one):
                pass

    threads = started(*[calls if many == "calls" else changes] * 3)
    for _ in range(20):
        with change(one) if many == "calls" else hold(one):
            pass
    stop.set()
    ended(threads)


# --- threads and themselves


def test_a_call_within_a_call_goes_on_while_a_change_waits():
    one, threads = (Turns(),), []

    def outer():
        threads.extend(started(changes))
        until(waiting)
        return during(one, lambda: 5)

    def changes():
        with change(one):
            pass

    assert during(one, outer) == 5
    ended(threads)


@pytest.mark.parametrize("way", ["call", "hold"])
def test_a_change_within_a_call_is_an_error(way):
    one = (Turns(),)

    def changes():
        with pytest.raises(SpecError, match="this thread is in a call of the module or holds its adapters"), change(one):
            pass
        with change((Turns(),)):
            pass

    if way == "call":
        during(one, changes)
    else:
        with hold(one):
            changes()
    with change(one), hold(one):
        during(one, lambda: None)
    with change(one):
        pass


def test_a_circle_of_threads_is_an_error_for_its_last_one():
    turns, errors, both = [Turns(), Turns()], [], threading.Barrier(2)

    def crossed(mine, other):
        def body():
            both.wait(LONG)
            try:
                with change((other,)):
                    pass
            except SpecError as error:
                errors.append(str(error))

        during((mine,), body)

    ended(started(*(functools.partial(crossed, *pair) for pair in (turns, turns[::-1]))))
    assert len(errors) == 1 and "would wait for ever" in errors[0]


def test_threads_that_work_for_a_holder_go_on():
    """As autograd's threads do, which compute activations again."""
    one = (Turns(),)

    def changes():
        with change(one):
            pass

    with hold(one):
        threads = started(changes)
        until(waiting)
        ended(started(lambda: during(one, lambda: None)))
        assert waiting()
    ended(threads)


def test_tasks_of_one_thread():
    """A task that holds may wait; another one's change is an error then, as it would stop both."""
    one, found = (Turns(),), []

    async def holds(entered, leave):
        with hold(one):
            entered.set()
            await leave.wait()

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(holds(entered, leave))
        await entered.wait()
        found.append(during(one, lambda: "call"))
        with pytest.raises(SpecError, match="between calls"), change(one):
            pass
        leave.set()
        await task
        with change(one):
            found.append("change")

    asyncio.run(main())
    assert found == ["call", "change"]


def test_a_hold_may_end_in_another_thread_and_an_abandoned_one_ends():
    one = (Turns(),)
    held = hold(one)
    held.__enter__()
    ended(started(lambda: held.__exit__(None, None, None)))

    def yields():
        with hold(one):
            yield 1

    generator = yields()
    next(generator)
    del generator
    with change(one):
        pass


# --- what ends a call


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_errors_end_turns(error):
    one = (Turns(),)

    def fails():
        raise error

    def in_a_thread():
        with pytest.raises(error):
            during(one, fails)

    in_a_thread()
    ended(started(in_a_thread))
    for context in (hold(one), change(one)):
        with pytest.raises(error), context:
            fails()
    assert not queue._calls and not queue._changes


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_interrupts_at_any_place_end_turns():
    """A timer interrupts calls, holds and changes wherever they are, while another thread does the same."""
    one, stop, times = (Turns(),), threading.Event(), 0

    def interrupt(*_):
        raise KeyboardInterrupt

    def others():
        while not stop.is_set():
            during(one, lambda: None)
            with change(one):
                pass

    def work():
        while True:
            during(one, during, one, lambda: None)
            with change(one):
                pass
            with hold(one):
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@sweep("meanwhile", ["call", "hold", "change"], "change")
def test_a_child_process_has_no_turns_of_threads_that_it_does_not_have(meanwhile):
    """It is forked during a call or hold of another thread, or in the middle of many changes, which it sees none half of."""
    one, stop, state = (Turns(),), threading.Event(), [0, 0]

    def changes():
        while not stop.is_set():
            with change(one):
                state[0] += 1
                time.sleep(0)
                state[1] += 1

    def holds():
        with hold(one):
            stop.wait(LONG)

    begin = {"call": lambda: during(one, stop.wait, LONG), "hold": holds, "change": changes}[meanwhile]
    threads = started(begin)
    until(lambda: queue._calls or queue._changes or state[0])
    for _ in range(5):
        with hold(one):  # the child's own, which it keeps
            child = os.fork()
            if not child:
                code = 1
                try:
                    signal.alarm(LONG)
                    code = 0 if state[0] == state[1] and queue.inside(one) and len(queue._calls) == 1 else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.alarm(LONG)
                with change(one):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stop.set()
    ended(threads)


# --- modules


def test_who_takes_turns_with_whom(tmp_path):
    """What shares the tensors of the slots takes turns, copies have their own."""
    new = fuzz_switching.slotted()
    mine = turns_of(new)
    fuzz = fuzz_switching
    shared = [
        fxplug.fuse(new), fuzz.outline(new, ["blocks.*"]),
        fxplug.apply(new, fxplug.load_pass("ssf", at="blocks.0.q")), nn.Sequential(new), copy.copy(new.lora.gates.table),
        fxplug.trace(nn.Sequential(new), fuzz.example()),
    ]  # fmt: skip
    assert len(mine) == 1 and all(turns_of(module) == mine for module in shared)
    fxplug.save(new, tmp_path / "out")
    apart = [copy.deepcopy(new), fxplug.lower(new, merge="live"), fxplug.load(tmp_path / "out"), fuzz.slotted()]
    assert all(len(turns_of(module)) == 1 and turns_of(module) != mine for module in apart)
    two = fxplug.apply(new, fxplug.load_pass("lora", name="second", at="blocks.0.q", rank=2, slots=2))
    assert len(turns_of(two)) == 2 and set(mine) < set(turns_of(two))
    assert len(set(turns_of(copy.deepcopy(two))) - set(turns_of(two))) == 2
    assert turns_of(fuzz.base()) == () == turns_of(fxplug.merge(new))
    assert fxplug.Adapters(new).turns == new.adapters.turns == mine


@sweep("form", fuzz_switching.FORMS, "eager", "live merge", "fused")
def test_calls_see_one_state(form):
    row = fuzz_switching.stress(fuzz_switching.FORMS[form], 40, seed=3, changes=12)
    assert row["calls"] == 40 and row["beside a change"] and not row["torn"], row


@sweep("form", ["eager", "live merge", "compiled"], "eager")
def test_without_turns_calls_are_torn(form, monkeypatch):
    """What is tried above can fail."""
    monkeypatch.setattr("fxplug.core.ir.graph.during", lambda turns, function, *args, **kwargs: function(*args, **kwargs))
    row = fuzz_switching.stress(fuzz_switching.FORMS[form], 20_000, seed=3, until_torn=True, changes=12)
    assert row["torn"]
