"""A change of adapters is all or nothing, wherever it ends, and what was computed before one is right or an error."""

from __future__ import annotations

import copy
import linecache
import signal
import sys
import threading

import fuzz_switching as fuzz
import pytest
import torch
from sweeps import sweep
from torch.utils.checkpoint import checkpoint

import fxplug
from fxplug.adapters import banks, slots
from fxplug.core import locks
from fxplug.core.errors import FxplugError, SpecError
from fxplug.lowerings.merging import live

FILES = {module.__file__ for module in (banks, slots, live, locks)}
FORMS = ["eager", "live merge"]
CHANGES = {
    "use": lambda adapters: adapters.use({"a": 0.5, "b": -0.7}),
    "load": lambda adapters: adapters.load("c", fuzz.adapter(3)),
    "replace": lambda adapters: adapters.load("a", fuzz.adapter(4), replace=True),
    "unload": lambda adapters: adapters.unload("a"),
}


def loaded(form):
    module = fuzz.FORMS[form]().call
    for seed, name in enumerate("ab"):
        module.adapters.load(name, fuzz.adapter(seed))
    module.adapters.use("a")
    return module


@torch.no_grad()
def seen(module):
    """All that can be seen of a module's state."""
    state = [tensor.clone() for tensor in module.state_dict().values()]
    return [*state, module(fuzz.example()), module.adapters.names, module.adapters.active]


def same(a, b):
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


def is_closed_to_signals(frame):
    """Whether a line event is one at which a trace can raise and no signal can: the end of `with _lock:` before `__exit__`, and
    the first line of a `finally`, where no call has ended since the `try` did.
    """
    before, line = (linecache.getline(frame.f_code.co_filename, frame.f_lineno - back).strip() for back in (1, 0))
    return before == "finally:" or (line.startswith("with ") and locks._lock._is_owned())


class At:
    """Raises an error at the n-th line that runs in fxplug's own files of this thread."""

    def __init__(self, error, number=None):
        self.error, self.number, self.lines = error, number, 0

    def trace(self, frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.lines += 1
            if self.number and self.lines >= self.number and not is_closed_to_signals(frame):
                self.number = None
                raise self.error
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


@sweep("form", FORMS, "eager")
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_is_broken_off_changes_nothing(form, what):
    """At many lines, by an interrupt or for want of memory: the state is as before, or (at the end) as it was to be."""
    module = loaded(form)
    before, whole = seen(module), copy.deepcopy(module)
    CHANGES[what](whole.adapters)
    after = seen(whole)
    assert not same(before, after)
    adapters = copy.deepcopy(module).adapters
    with At(None) as count:
        CHANGES[what](adapters)
    total, undone = count.lines, 0
    for step in range(1, 10):
        error = (KeyboardInterrupt, MemoryError)[step % 2]
        subject = copy.deepcopy(module)
        adapters = subject.adapters
        with pytest.raises(error), At(error, max(1, total * step // 10)):
            CHANGES[what](adapters)
        now = seen(subject)
        assert same(now, before) or (same(now, after) and step > 7), step
        undone += same(now, before)
        CHANGES[what](adapters) if same(now, before) else None  # nothing is left locked, and it can be done again
        assert same(seen(subject), after)
    assert undone > 6 and not locks._requests


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
@torch.no_grad()
def test_interrupts_at_any_time(monkeypatch):
    """A timer interrupts switches of a live merge, many of them while another change is being undone."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # of one that met a generator being freed
    module, wanted, times, x = loaded("live merge"), {}, 0, fuzz.example()
    for name in ("a", "b", "a"):
        module.adapters.use(name)
        wanted[name] = module(x)

    def interrupt(_, frame):
        while frame is not None:
            if frame.f_code.co_filename in FILES:
                raise KeyboardInterrupt
            frame = frame.f_back

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        while times < 40:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-3 + times * 1e-4, 2e-3)
                while True:
                    for name in "ba":
                        module.adapters.use(name)
                        module(x)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                times += 1
            try:
                found = module(x)
            except FxplugError as error:  # an interrupt between two tries to undo: told, and mended by the next change
                assert "left the weights of this module incomplete" in str(error)
                module.adapters.use("a")
                found = module(x)
            ((name, weight),) = module.adapters.active.items()
            assert weight == 1 and torch.equal(found, wanted[name])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_live_merge_without_memory_is_whole_or_says_so(at, lasts, monkeypatch):
    module, real, calls = loaded("live merge"), live.add_lora, 0
    before = seen(module)

    def scarce(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at or (lasts and calls > at):
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(live, "add_lora", scarce)
    with pytest.raises(MemoryError):
        module.adapters.use("b")
    if lasts:
        with pytest.raises(FxplugError, match=r"left the weights of this module incomplete .*\(MemoryError\): adapters.use"):
            module(fuzz.example())
        with pytest.raises(FxplugError, match="left the weights of this module incomplete"):
            copy.deepcopy(module)(fuzz.example())
        monkeypatch.undo()
        module.adapters.use("a")
    assert same(seen(module), before)


@pytest.mark.slow
def test_a_reading_beside_changes_is_of_one_state(tmp_path):
    """Copies, files, merged modules, names and choices, while another thread goes from one state to another and back."""
    module, stop = loaded("eager"), threading.Event()
    states = [seen(module)]
    module.adapters.load("a", fuzz.adapter(4), replace=True)
    states.append(seen(module))
    sources = [fuzz.adapter(0), fuzz.adapter(4)]

    def change():
        while not stop.is_set():
            for source in sources:
                module.adapters.load("a", source, replace=True)

    def saved(gm):
        fxplug.save(gm, tmp_path / "out")
        return fxplug.load(tmp_path / "out")

    ways = {"deepcopy": copy.deepcopy, "save": saved, "live": live.merge_live, "merge": fxplug.merge}
    module.adapters.load("a", sources[0], replace=True)
    wanted = {name: [] for name in ways}
    for source in sources:
        module.adapters.load("a", source, replace=True)
        for name, way in ways.items():
            wanted[name].append(way(module)(fuzz.example()))
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for name, way in ways.items():
            for _ in range(4):
                out = way(module)(fuzz.example())
                assert any(torch.equal(out, one) for one in wanted[name]), name
                assert module.adapters.names == ["a", "b"] and module.adapters.active == {"a": 1.0}
    finally:
        stop.set()
        thread.join()


def test_several_calls_see_one_choice_and_several_changes_are_one():
    module, x, out = loaded("eager"), fuzz.example(), []
    entered, threads = threading.Event(), []

    def change():
        entered.set()
        with module.adapters.change():
            module.adapters.use("b")
            module.adapters.unload("a")

    with module.adapters.hold():
        threads.append(threading.Thread(target=change))
        threads[0].start()
        entered.wait()
        out = [module(x) for _ in range(3)]
        with pytest.raises(SpecError, match="during a call"):
            module.adapters.use("b")
        module.to(torch.float32)  # as an offloader does in the middle of a run
    threads[0].join()
    assert all(torch.equal(one, out[0]) for one in out) and not torch.equal(module(x), out[0])
    assert module.adapters.names == ["b"]
    with pytest.raises(SpecError, match="during a call"), module.adapters.hold():
        module.load_state_dict(module.state_dict())


# --- backward


@pytest.mark.parametrize(
    ("form", "way"),
    [
        *((form, "use") for form in ("eager", "fused", "live merge", "checkpointed")),
        *((form, "replace") for form in ("eager", "fused", "live merge", "checkpointed")),
        pytest.param("compiled", "replace", marks=pytest.mark.slow),
    ],
)
def test_a_backward_pass_after_a_change_is_right_or_an_error(form, way):
    if form == "checkpointed":
        module = fuzz.outline(fuzz.slotted(), ["blocks.*"], checkpoint=True)
        subject = fuzz.plain(module)
    else:
        subject = fuzz.FORMS[form]()
    adapters = subject.adapters
    for seed, name in enumerate("ab"):
        adapters.load(name, fuzz.adapter(seed))

    def gradient(between):
        adapters.load("a", fuzz.adapter(0), replace=True)
        adapters.use("a")
        x = fuzz.example().requires_grad_()
        loss = subject.call(x).pow(2).sum()
        if between:
            CHANGES[way](adapters)
        loss.backward()
        return x.grad

    wanted = gradient(False)
    assert torch.equal(gradient(False), wanted)
    try:
        found = gradient(True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    except FxplugError as error:
        assert "between a forward pass and its backward pass" in str(error)
    else:
        assert torch.equal(found, wanted)


def test_held_adapters_are_those_of_the_backward_pass():
    module, x = loaded("eager"), fuzz.example().requires_grad_()
    module(x).sum().backward()
    wanted, x.grad, entered = x.grad, None, threading.Event()

    def change():
        entered.set()
        module.adapters.use("b")

    thread = threading.Thread(target=change)
    with module.adapters.hold():
        loss = checkpoint(module, x, use_reentrant=False).sum()
        thread.start()
        entered.wait()
        loss.backward()
    thread.join()
    assert torch.equal(x.grad, wanted)
