"""Several changes of adapters are one: for errors, for asyncio, for processes. And choices that fit no call, or no number."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import threading
from decimal import Decimal
from pathlib import Path

import fuzz_switching as fuzz
import pytest
import torch
from small import command
from test_changes import loaded, same, seen
from torch import nn

import fxplug
from fxplug.adapters.file_passes import make_adapter_pass
from fxplug.core import locks
from fxplug.core.errors import FxplugError, SpecError

FORMS = ["eager", "fused", "live merge", "outlined", "step cache", "compile()"]
ENDS = {  # what ends a change half-way
    "a file that is not there": lambda adapters: adapters.load("film", "not_there.safetensors"),
    "an unknown name": lambda adapters: adapters.use("nothing"),
    "no free slot": lambda adapters: [adapters.load(name, fuzz.adapter(5)) for name in "xyzw"],
    "an error of the caller's": lambda adapters: 1 // 0,
    "an interrupt": lambda adapters: (_ for _ in ()).throw(KeyboardInterrupt),
    "an error within a change within": lambda adapters: _nested(adapters),
}


def _nested(adapters):
    with adapters.change():
        adapters.use({"b": 2.0})
        adapters.unload("nothing")


CASES = [*zip(FORMS, ENDS, strict=True), ("eager", "an interrupt"), ("live merge", "no free slot")]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "end"), CASES)
def test_a_change_that_fails_half_way_is_undone(form, end):
    module = loaded(form)
    before = seen(module)
    with pytest.raises((FxplugError, ZeroDivisionError, KeyboardInterrupt)), module.adapters.change():
        module.adapters.unload("a")
        module.adapters.load("film", fuzz.adapter(7))
        module.adapters.use({"film": 0.5, "b": 1.0})
        ENDS[end](module.adapters)
    assert same(seen(module), before)


def test_the_guides_example_of_several_changes():
    gm = fxplug.trace(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="0", rank=2, slots=2))
    new.adapters.load("film", {"0.lora_A.weight": torch.ones(2, 8), "0.lora_B.weight": torch.ones(8, 2)})
    new.adapters.use("film")
    with pytest.raises(FxplugError, match="no adapter file"), new.adapters.change():
        new.adapters.unload("film")
        new.adapters.load("film", "not_there.safetensors")
    assert new.adapters.names == ["film"] and new.adapters.active == {"film": 1.0}


def test_a_change_within_that_fails_leaves_what_the_change_around_it_did():
    module = loaded("eager")
    with module.adapters.change():
        module.adapters.use("b")
        with contextlib.suppress(SpecError):
            _nested(module.adapters)
        assert module.adapters.active == {"b": 1.0}
    assert module.adapters.active == {"b": 1.0} and module.adapters.locks[0].written is None


@pytest.mark.parametrize("kind", ["dora", "loha", "lora_weight"])
def test_all_kinds_of_slots_and_blocks_without_slots_are_put_back(kind):
    gm = fuzz.base()
    banks = fxplug.load_pass(kind, at="blocks.**.q", rank=2, slots=2)
    plain = fxplug.load_pass("lora", at="blocks.**.v", rank=2)
    new = fxplug.apply(gm, banks, plain)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    ours = {"blocks.0.v.lora_A.weight": torch.ones(2, 16), "blocks.0.v.lora_B.weight": torch.ones(16, 2)}
    theirs = {name.replace(".v.", ".q."): value for name, value in ours.items()}
    source = {
        "lora_weight": theirs,
        "dora": {**theirs, "blocks.0.q.lora_magnitude_vector": torch.ones(16)},
        "loha": {f"blocks.0.q.hada_w{n}_{h}": torch.ones(16, 2) if h == "a" else torch.ones(2, 16) for n in "12" for h in "ab"},
    }[kind]
    with pytest.raises(ZeroDivisionError), new.adapters.change():
        fxplug.load_adapter(new, ours)
        new.adapters.load("a", source)
        new.adapters.use("a")
        changed = {name for name, value in new.state_dict().items() if not torch.equal(value, before[name])}
        assert any(".v." in name for name in changed) and any(".q." in name for name in changed)
        _ = 1 // 0
    assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())


# --- other tasks


OTHERS = {
    "a call": lambda module: module(fuzz.example()),
    "a choice": lambda module: module.adapters.use("b"),
    "a change": lambda module: module.adapters.change().__enter__(),
    "a reading of names": lambda module: module.adapters.names,
    "a copy": copy.deepcopy,
    "a hold": lambda module: module.adapters.hold().__enter__(),
}


@pytest.mark.parametrize("what", OTHERS)
def test_no_other_task_sees_the_middle_of_a_change(what):
    module, x = loaded("eager"), fuzz.example()
    wanted, found = module(x), []

    async def changes():
        with module.adapters.change():
            module.adapters.use("b")
            assert not torch.equal(module(x), wanted)  # its own task does
            await asyncio.sleep(0.02)
            module.adapters.use("a")

    async def other():
        await asyncio.sleep(0.005)
        with pytest.raises(SpecError, match=r"another asyncio task .* in the middle of a change .*; leave that block"):
            OTHERS[what](module)
        await asyncio.sleep(0.03)
        found.append(module(x))

    async def main():
        await asyncio.gather(changes(), other())

    asyncio.run(main())
    assert torch.equal(found[0], wanted) and not locks._requests


def test_a_thread_waits_for_a_change_that_awaits_and_a_task_without_one_goes_on():
    module, x, found = loaded("eager"), fuzz.example(), {}
    other = loaded("eager")

    async def main():
        with module.adapters.change():
            module.adapters.use("b")
            thread = threading.Thread(target=lambda: found.setdefault("thread", module(x)))
            thread.start()
            await asyncio.create_task(asyncio.sleep(0.02))
            assert "thread" not in found and torch.equal(await asyncio.create_task(_called(other, x)), other(x))
            module.adapters.use("a")
        thread.join()

    wanted = module(x)
    asyncio.run(main())
    assert torch.equal(found["thread"], wanted)


async def _called(module, x):
    return module(x)


# --- other processes


def test_loads_into_one_folder_at_once_are_all_there(tmp_path):
    folder, count = tmp_path / "art", 5
    pass_ = fxplug.load_pass("lora", at="blocks.**", within=["Linear"], rank=4, slots=count)
    fxplug.save(fxplug.apply(fuzz.base(), pass_), folder)
    ready = {"blocks.0.q.lora_A.weight": torch.ones(2, 16), "blocks.0.q.lora_B.weight": torch.ones(16, 2)}
    torch.save(ready, tmp_path / "x.bin")
    (folder / "notes.txt").write_text("kept")
    done = []

    def load(name):  # the lock is of an open file, so threads exclude each other as processes do
        from fxplug.adapters.verbs import load_adapter

        with contextlib.redirect_stdout(io.StringIO()):
            load_adapter(folder, name, tmp_path / "x.bin")
        done.append(name)

    threads = [threading.Thread(target=load, args=(f"n{i}",)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == count and sorted(fxplug.load(folder).adapters.names) == sorted(done)
    assert (folder / "notes.txt").read_text() == "kept"


def test_a_folder_that_was_saved_anew_meanwhile_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "art"
    fxplug.save(fuzz.slotted(), folder)
    ready = {"blocks.0.q.lora_A.weight": torch.ones(2, 16), "blocks.0.q.lora_B.weight": torch.ones(16, 2)}
    torch.save(ready, tmp_path / "x.bin")
    from fxplug.adapters import slots

    real = slots.Adapters.load

    def slow(self, *args, **kwargs):
        fxplug.save(fuzz.slotted(), folder)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(slots.Adapters, "load", slow)
    done = command("adapters", "load", folder, "ink", tmp_path / "x.bin")
    assert done.exit_code == 1 and "was saved again by another process meanwhile: run this command again" in done.stderr


# --- choices that fit no call


SIZES = [("eager", 3), ("fused", 1), ("outlined", 4), ("step cache", 3), ("compile()", 5), ("in a Sequential", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "batch"), SIZES)
def test_another_number_of_entries_than_samples_is_said_before_the_call(form, batch):
    subject = fuzz.FORMS[form]()
    subject.adapters.load("a", fuzz.adapter(0))
    x = torch.randn(batch, 3, fuzz.WIDTH)
    text = rf"use\(\) got 2 entries but the batch has {batch} samples: give one entry per sample\. With guidance the pipeline"
    subject.adapters.use(["a", None])
    with torch.no_grad():
        with pytest.raises(SpecError, match=text):
            subject.call(x)
        subject.adapters.use("a")
        wanted = subject.call(x)
        with subject.adapters.using(["a", None]), pytest.raises(SpecError, match=text):
            subject.call(x)
        subject.adapters.use(["a"] * batch)
        assert torch.allclose(subject.call(x), wanted, atol=1e-5) and not wanted.isnan().any()


def test_samples_are_counted_in_the_input_that_has_them():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, table, x, *, more):
            return self.layer(x) + self.layer(table).sum() + more["y"][0]

    args, kwargs = (torch.randn(7, 4), torch.randn(2, 4)), {"more": {"y": [torch.randn(2, 4)]}}
    gm = fxplug.trace(Two(), args, kwargs)
    state = {"layer.lora_A.weight": torch.ones(1, 4), "layer.lora_B.weight": torch.ones(4, 1)}
    for samples in ("x", "more.y[0]", "more['y'][0]"):
        try:
            new = fxplug.apply(gm, fxplug.load_pass("lora", at="layer", rank=1, slots=2, samples=samples))
        except SpecError:
            assert samples != "x"
            continue
        new.adapters.load("a", state)
        new.adapters.use(["a", None, "a"])
        with pytest.raises(SpecError, match="3 entries but the batch has 2 samples"):
            new(*args, **kwargs)


def test_what_the_gpu_would_be_asked_is_asked_once():
    """A table that is not on the CPU is read when it was written, and not at each call."""
    from fxplug.blocks.base import read_count

    class There:  # what is asked of a tensor on a GPU
        is_cpu = is_meta = False
        reads, _version = 0, 0

        def is_inference(self):
            return False

        def __int__(self):
            self.reads += 1
            return 3

    import fxplug.blocks.base as base

    entries, known = There(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "Tensor", There)
        assert [read_count(entries, known) for _ in range(3)] == [3, 3, 3] and entries.reads == 1
        entries._version = 1
        assert read_count(entries, known) == 3 and entries.reads == 2


# --- what is no number, and no file


@pytest.mark.parametrize(
    "weight",
    [10**400, -(10**400), torch.nan, torch.inf, -torch.inf, True, "1", Decimal("0.5"), torch.tensor(1.0), None, 1j, 1e39],
    ids=lambda weight: f"{type(weight).__name__} {str(weight)[:8]}",
)
def test_a_strength_is_a_finite_number(weight):
    module = loaded("eager")
    text = "the weight of 'a' must be a finite number, not|a weight is out of range for torch.f"
    for use in (module.adapters.use, lambda what: module.adapters.using(what).__enter__()):
        for what in ({"a": weight}, [{"a": weight}, None]):
            with pytest.raises(SpecError, match=text):
                use(what)
    assert module.adapters.active == {"a": 1.0}
    if weight != 1e39:
        with pytest.raises(SpecError, match="must be a finite number"):
            fxplug.merge_adapters({"x.safetensors": weight}, "y.safetensors")
        with pytest.raises(SpecError, match="strength.*must be a finite number|must be a finite number.*strength"):
            make_adapter_pass({"file": "x.safetensors", "strength": weight})


@pytest.mark.parametrize("source", [None, io.BytesIO(b""), b"ink.safetensors", 3, 1.5, ["ink"], torch.ones(2), object()])
def test_a_source_is_a_file_or_tensors(source):
    module = loaded("eager")
    text = "an adapter must be a file, a folder or a dict of tensors, not "
    plain = fxplug.apply(fuzz.base(), fxplug.load_pass("lora", at="blocks.0.q", rank=2))
    for load in (lambda: module.adapters.load("c", source), lambda: fxplug.load_adapter(plain, source)):
        with pytest.raises(SpecError, match=text):
            load()
    with pytest.raises(SpecError, match="config must be PEFT's adapter configuration as a dict, not 3"):
        module.adapters.load("c", Path("x.safetensors"), config=3)


# --- backward through a live merge


@pytest.mark.parametrize("between", ["use", "load", "unload", "using nothing", "change undone"])
def test_a_backward_pass_of_a_live_merge_is_right_or_says_why(between):
    module = loaded("live merge")
    x = fuzz.example().requires_grad_()
    (wanted,) = torch.autograd.grad(module(x).sum(), x)
    out = module(x)
    if between == "use":
        module.adapters.use({"b": 1.0})
    elif between == "load":
        module.adapters.load("a", fuzz.adapter(9), replace=True)
    elif between == "unload":
        module.adapters.unload("a")
    elif between == "using nothing":
        module.adapters.use("a")  # what was used already: no weight is written
    else:
        with contextlib.suppress(SpecError), module.adapters.change():
            module.adapters.use("nothing")
    if between in ("using nothing", "change undone"):
        out.sum().backward()
        assert torch.equal(x.grad, wanted)
    else:
        with pytest.raises(SpecError, match="a live merge were changed between a forward pass and its backward pass"):
            out.sum().backward()
