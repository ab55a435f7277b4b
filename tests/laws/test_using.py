"""`adapters.using`: calls of one block, thread or task have adapters of their own, and nobody else's calls see them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import fuzz_switching as fuzz
import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxplug
from fxplug.core import locks
from fxplug.core.errors import SpecError
from fxplug.core.torch_internals.modules import CONTEXT_VARIABLES

NAMES = "abc"
CHOICES = [None, *NAMES, {"a": 0.5, "c": -0.7}]
X = fuzz.example()


def load(adapters):
    for seed, name in enumerate(NAMES):
        adapters.load(name, fuzz.adapter(seed + 1))


def loaded(*more):
    new = fuzz.slotted(*more)
    load(new.adapters)
    return new


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def expected(subject, choices):
    """What each choice gives by `use`."""
    made = []
    with torch.no_grad():
        for choice in choices:
            subject.adapters.use(choice)
            made.append(subject.call(X))
    subject.adapters.use(None)
    assert len({str(y) for y in made}) == len(choices)
    return made


def serve(subject, choices, wanted, count, threads, most=None):
    """Requests by threads, each with a choice of its own, while another thread says `use` over and over; how many are wrong.

    It ends when so many are.
    """
    left, lock, errors, wrong, stop = list(range(count)), threading.Lock(), [], [], threading.Event()

    def work(seed):
        rng = random.Random(seed)
        with torch.no_grad():
            while True:
                with lock:
                    if not left or len(wrong) >= (most or count):
                        return
                    left.pop()
                n = rng.randrange(len(choices))
                with subject.adapters.using(choices[n]):
                    y = subject.call(X)
                if not torch.equal(y, wanted[n]):
                    wrong.append(n)

    def switch():
        while not stop.is_set():
            for name in (*NAMES, None):
                subject.adapters.use(name)

    def guarded(function, *args):
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    with torch.no_grad():
        subject.call(X)
    workers = [threading.Thread(target=guarded, args=(work, seed)) for seed in range(threads)]
    switcher = threading.Thread(target=guarded, args=(switch,))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in (switcher, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        stop.set()
        switcher.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors[0]
    return len(wrong)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not locks._requests


@pytest.fixture(scope="module")
def module():
    return loaded()


# --- who takes what


QUICK = ["eager", "fused", "step cache"]
FORMS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in fuzz.FORMS if "live" not in name]


@pytest.mark.parametrize("form", FORMS)
def test_requests_of_many_threads(form):
    subject = fuzz.FORMS[form]()
    load(subject.adapters)
    choices = [*CHOICES, ["a", None], ["c", "b"]] if subject.mixes else CHOICES
    wanted = expected(subject, choices)
    assert serve(subject, choices, wanted, 200, subject.callers) == 0
    assert subject.adapters.active == {} and torch.equal(subject.call(X), wanted[0])


@pytest.mark.slow
def test_without_a_choice_of_its_own_a_call_takes_another_ones(module, monkeypatch):
    """What is tried above can fail."""
    monkeypatch.setattr("fxplug.core.locks.LockRequest.differs", lambda *_: False)
    subject = fuzz.plain(module)
    assert serve(subject, CHOICES, expected(subject, CHOICES), 20_000, 4, most=1) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_nothing_recompiles(module, dynamic):
    compiles = []

    def backend(graph, _):
        compiles.append(graph)
        return graph

    torch._dynamo.reset()
    subject = fuzz.Subject(torch.compile(module, fullgraph=True, dynamic=dynamic, backend=backend), module.adapters)
    choices = [*CHOICES, ["a", None]]
    wanted = expected(subject, choices)
    for choice, y in zip(choices, wanted, strict=True):
        with torch.no_grad(), module.adapters.using(choice):
            assert torch.equal(subject.call(X), y)
    assert len(compiles) == 1


@torch.no_grad()
def test_blocks_are_nested_and_errors_end_them(module):
    wanted = dict(zip(map(str, CHOICES), expected(fuzz.plain(module), CHOICES), strict=True))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    adapters = module.adapters
    with adapters.using("a"):
        with adapters.using("b"):
            assert torch.equal(module(X), wanted["b"])
            with adapters.using(None):
                assert torch.equal(module(X), wanted["None"])
        assert torch.equal(module(X), wanted["a"])
        with pytest.raises(ValueError), adapters.using(torch.tensor([2, 2])):
            assert torch.equal(module(X), wanted["c"])
            raise ValueError
        with pytest.raises(RuntimeError, match="shapes"), adapters.using("b"):
            module(X[..., :1])  # a call that fails
        assert torch.equal(module(X), wanted["a"])
    assert torch.equal(module(X), wanted["None"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_generator_that_yields_in_a_block_is_told_and_leaves_no_choice(module):
    def steps(name, count):
        with module.adapters.using(name):
            for _ in range(count):
                yield module(X)

    usual = module(X)
    one, other = steps("a", 2), steps("b", 3)
    for generator in (one, other, one):
        next(generator)
    for generator in (one, other):
        with pytest.raises(SpecError, match="leave the block before a 'yield'"):
            list(generator)
        close(module(X), usual)
    one, other = steps("a", 2), steps("b", 2)
    next(one), next(other)
    one.close(), other.close()
    close(module(X), usual)


def test_what_cannot_be_used_is_an_error_of_the_block(module):
    for what, message in (
        ("d", "no adapter 'd'"),
        ([0, 7], "no adapter at position 7"),
        ({"a": float("nan")}, "finite"),
        ([], "use takes"),
    ):
        with pytest.raises(SpecError, match=message), module.adapters.using(what):
            raise AssertionError
    with pytest.raises(SpecError, match="using.* is not supported with "
                                        "merge='live'"), fuzz.live().adapters.using(None):
        raise AssertionError
    weights = fxplug.apply(fuzz.base(), fxplug.load_pass("lora_weight", at="blocks.**", within=["Linear"], rank=4, slots=3))
    load(weights.adapters)
    with pytest.raises(SpecError, match="all samples of a batch share"), weights.adapters.using(["a", "b"]):
        raise AssertionError
    wanted = expected(fuzz.plain(weights), CHOICES)
    for choice, y in zip(CHOICES, wanted, strict=True):
        with weights.adapters.using(choice), torch.no_grad():
            assert torch.equal(weights(X), y)


@torch.no_grad()
def test_what_is_loaded_meanwhile():
    module = loaded()
    adapters = module.adapters
    adapters.use("b")
    replaced = module(X)
    adapters.use("c")
    base = module(X)
    with adapters.using("a"):
        module(X)
        adapters.load("a", fuzz.adapter(2), replace=True)
        assert torch.equal(module(X), replaced)
        adapters.unload("a")
        with pytest.raises(SpecError, match="no adapter 'a'; there are b, c"):
            module(X)
        adapters.load("a", fuzz.adapter(2))
        assert torch.equal(module(X), replaced)
        with pytest.raises(SpecError, match=r"not allowed inside a block of adapters.using"):
            adapters.use("b")
        assert adapters.active == {"c": 1.0}
    assert torch.equal(module(X), base)


@torch.no_grad()
def test_several_passes_share_a_choice_and_earlier_modules_have_their_own():
    first = fuzz.slotted()
    both = fxplug.apply(first, fxplug.load_pass("lora", name="more", at="blocks.0.q", rank=4, slots=2))
    both.adapters.load("a", fuzz.adapter(1))
    both.adapters.use("a")
    wanted, alone = both(X), first(X)
    both.adapters.use(None)
    with both.adapters.using("a"):
        assert torch.equal(both(X), wanted) and torch.equal(first(X), alone)
    with first.adapters.using("a"):
        assert torch.equal(first(X), alone)
    assert both.adapters.active == {}


# --- where it holds


def test_tasks_and_threads(module):
    """A task has its own, and so has what `asyncio.to_thread` runs; a thread of an executor begins without one."""
    wanted = dict(zip(map(str, CHOICES), expected(fuzz.plain(module), CHOICES), strict=True))

    def call():
        with torch.no_grad():
            return module(X)

    def request(name):
        with module.adapters.using(name):
            return call()

    async def task(name, pool):
        with module.adapters.using(name):
            for _ in range(4):
                await asyncio.sleep(0)
                assert torch.equal(call(), wanted[name])
                assert torch.equal(await asyncio.to_thread(call), wanted[name])
                assert torch.equal(await asyncio.get_running_loop().run_in_executor(pool, call), wanted["None"])
                assert torch.equal(await asyncio.get_running_loop().run_in_executor(pool, request, "c"), wanted["c"])

    async def main():
        with ThreadPoolExecutor(2) as pool:
            await asyncio.gather(*(task(name, pool) for name in "abab"))

    asyncio.run(main())


@torch.no_grad()
def test_what_is_about_the_module_takes_what_use_said(tmp_path):
    module = loaded()
    module.adapters.use("b")
    wanted = module(X)
    with module.adapters.using("a"):
        fxplug.save(module, tmp_path / "out")
        others = [fxplug.load(tmp_path / "out"), copy.deepcopy(module), fxplug.merge(module)]
        others += [fxplug.lower(module, merge="live", fuse=None)]
        assert module.adapters.active == {"b": 1.0}
        for other in others:
            torch.testing.assert_close(other(X), wanted)
        assert not torch.allclose(module(X), wanted)
    assert torch.equal(module(X), wanted)


@torch.no_grad()
def test_a_call_within_a_call_takes_no_other_choice():
    module = loaded()
    found = []

    def hook(*_):
        for act in (lambda: module(X), lambda: copy.deepcopy(module), lambda: module.adapters.active):
            with (
                pytest.raises(SpecError, match="inside a call that uses other adapters"),
                module.adapters.using("b"),
            ):
                act()
                raise AssertionError
        found.append(1)

    handle = module.blocks[0].q.register_forward_hook(hook)
    with module.adapters.using("a"):
        module(X)
    handle.remove()
    assert found
    module(X)


@torch.no_grad()
def test_beside_a_hold_and_under_modes(module):
    wanted = expected(fuzz.plain(module), CHOICES)
    with module.adapters.hold(), module.adapters.using("a"):
        assert torch.equal(module(X), wanted[1])
        thread = threading.Thread(target=lambda: module.adapters.use("b"))
        thread.start()
        assert torch.equal(module(X), wanted[1])
    thread.join()
    module.adapters.use(None)
    with module.adapters.using("a"), torch.device("cpu"):
        with torch.inference_mode():
            close(module(X), wanted[1])
        close(torch.func.vmap(module)(X[None])[0], wanted[1])
        torch.func.grad(lambda x: module(x).sum())(X)
        again = fxplug.trace(nn.Sequential(module, nn.Identity()), X)
        close(again(X), wanted[1])
    assert torch.equal(module(X), wanted[0]) and torch.equal(again(X), wanted[0])


@pytest.mark.slow
def test_a_program_around_the_module():
    """Its calls have no turns: it is left at the module, or, where it must be one graph, refused."""
    module = loaded()
    wanted = expected(fuzz.plain(module), CHOICES)
    around = nn.Sequential(module, nn.Identity())
    torch._dynamo.reset()
    with torch.no_grad():
        call = torch.compile(around, backend="eager")
        assert torch.equal(call(X), wanted[0])
        if not CONTEXT_VARIABLES:
            return
        with module.adapters.using("a"):
            close(call(X), wanted[1])
        assert torch.equal(call(X), wanted[0])
        torch._dynamo.reset()
        call = torch.compile(around, backend="eager", fullgraph=True)
        with module.adapters.using("a"), pytest.raises(Exception, match="compile the module itself"):
            call(X)
        assert torch.equal(call(X), wanted[0])
        slotless = torch.compile(nn.Sequential(fuzz.base(), nn.Identity()), backend="eager", fullgraph=True)
        with module.adapters.using("a"):
            assert torch.equal(slotless(X), wanted[0])


@sweep("way", ["eager", "compiled", "checkpoint"], "eager")
def test_gradients_are_those_of_use(way):
    module = loaded(fxplug.load_pass("lora", name="mine", at="blocks.0.q", rank=2))
    torch._dynamo.reset()
    call = {
        "eager": module,
        "compiled": torch.compile(module, fullgraph=True, backend="aot_eager"),
        "checkpoint": lambda x: checkpoint(
            module, x, use_reentrant=False, context_fn=lambda: tuple(module.adapters.using("a") for _ in range(2))
        ),
    }[way]

    def grads(y):
        for parameter in module.parameters():
            parameter.grad = None
        y.sum().backward()
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    module.adapters.use("a")
    wanted = grads(module(X))
    module.adapters.use("b")
    with module.adapters.using("a"):
        y = call(X)
    found = grads(y)  # after the block, when others may have been used
    assert wanted.keys() == found.keys() and any("mine" in name for name in found)
    for name in wanted:
        close(found[name], wanted[name])


class InterruptedVariable:
    """A context variable behind whose call number `at` an interrupt comes."""

    def __init__(self, variable, at):
        self.variable, self.left = variable, at

    def __getattr__(self, name):
        def call(*args):
            result = getattr(self.variable, name)(*args)
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return result

        return call


@torch.no_grad()
@pytest.mark.parametrize("at", range(1, 9))
def test_an_interrupt_behind_any_step_leaves_what_use_said(module, at, monkeypatch):
    wanted = expected(fuzz.plain(module), CHOICES)
    with monkeypatch.context() as patch:
        patch.setattr(locks, "_chosen", InterruptedVariable(locks._chosen, at))
        for _ in range(2):  # the one that is interrupted, and what it leaves
            with contextlib.suppress(KeyboardInterrupt):
                with module.adapters.using("a"):
                    module(X)
                copy.deepcopy(module)
                module.adapters.use("a")
    assert not locks._requests and not locks.has_choice()
    module.adapters.use(CHOICES[0])
    assert torch.equal(module(X), wanted[0])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
@torch.no_grad()
def test_interrupts_at_any_place_leave_what_use_said(module):
    wanted, times = expected(fuzz.plain(module), CHOICES), 0

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while times < 200:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + times * 1e-5)
                while True:
                    for name in "ab":
                        with module.adapters.using(name):
                            module(X)
            except KeyboardInterrupt:
                times += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for n in (0, times % 3 + 1):
                with module.adapters.using(CHOICES[n]):
                    assert torch.equal(module(X), wanted[n])
            assert torch.equal(module(X), wanted[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
