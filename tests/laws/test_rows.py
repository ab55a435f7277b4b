"""Rows that are used often, adapters that are put beside calls, and pins."""

from __future__ import annotations

import copy
import threading

import fuzz_switching as fuzz
import pytest
import torch

import fxplug
from fxplug.adapters import state
from fxplug.core.errors import SpecError

X = fuzz.example()
X8 = torch.randn(2, 8)


def loaded():
    new = fuzz.slotted()
    for seed, name in enumerate("ab"):
        new.adapters.load(name, fuzz.adapter(seed + 1))
    return new


def test_rows_name_adapters_and_not_slots():
    new = loaded()
    rows = new.adapters.rows([{"a": 0.5}, "b"])
    new.adapters.use([{"a": 0.5}, "b"])
    wanted = new(X)
    new.adapters.use(None)
    new.adapters.unload("a")
    with pytest.raises(SpecError, match="no adapter 'a'"):
        new.adapters.use(rows)
    with pytest.raises(SpecError, match="no adapter 'a'"), new.adapters.using(rows):
        pass
    new.adapters.load("c", fuzz.adapter(9))  # in the slot that a had
    with pytest.raises(SpecError, match="no adapter 'a'"):
        new.adapters.use(rows)
    new.adapters.load("a", fuzz.adapter(1))
    new.adapters.use(rows)
    assert torch.equal(new(X), wanted) and new.adapters.active == [{"a": 0.5}, {"b": 1.0}]
    copied = fxplug.apply(fuzz.slotted(), fxplug.load_pass("delta", at="blocks.0.q"))
    with pytest.raises(SpecError, match="no adapter 'a'"):  # of another module: by their names, too
        copied.adapters.use(rows)
    other = copy.deepcopy(new).to(torch.float16)  # of other tables
    other.adapters.use(rows)
    assert other.adapters.active == [{"a": 0.5}, {"b": 1.0}]


@pytest.mark.parametrize("options", [{"rank": 2, "slots": 4}, {"rank": 8, "slots": 1}, {"rank": 4, "slots": 3}], ids=str)
def test_what_was_prepared_for_other_slots_is_refused(options):
    """Tensors of as many numbers would take it, in the rows of several slots."""
    plain = fxplug.trace(torch.nn.Sequential(torch.nn.Linear(8, 8)), (X8,))
    made = fxplug.apply(plain, fxplug.load_pass("lora", at="0", rank=4, slots=2))
    file = {"0.lora_A.weight": torch.randn(2, 8), "0.lora_B.weight": torch.randn(8, 2)}
    ready = made.adapters.prepare("a", file)
    other = fxplug.apply(plain, fxplug.load_pass("lora", at="0", **options))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(SpecError, match="'a' was prepared for other slots than the pass 'lora' has at '0'"):
        other.adapters.put(ready)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    copy.deepcopy(made).adapters.put(ready)


def test_what_is_prepared_in_a_call_is_put_often_and_only_its_name_is_written_under_the_lock(monkeypatch):
    new = loaded()
    with new.adapters.hold():
        ready = new.adapters.prepare("c", fuzz.adapter(3))
        with pytest.raises(SpecError, match="cannot be changed during a call"):
            new.adapters.put(ready)
    inside = []
    write_lock, fill = state.write_lock, state.SlotState._fill
    held = [0]

    class Counted:
        def __init__(self, *args, **kwargs):
            self.lock = write_lock(*args, **kwargs)

        def __enter__(self):
            self.lock.__enter__()
            held[0] += 1

        def __exit__(self, *args):
            held[0] -= 1
            return self.lock.__exit__(*args)

    monkeypatch.setattr(state, "write_lock", Counted)
    monkeypatch.setattr(state.SlotState, "_fill", lambda *args: (inside.append(held[0]), fill(*args))[1])
    new.adapters.use("a")
    before = new(X)
    assert new.adapters.put(ready) is ready.fit and ready.bytes > 0
    with pytest.raises(SpecError, match="'c' is loaded already"):
        new.adapters.put(ready)
    assert torch.equal(new(X), before)
    with pytest.raises(SpecError, match="all 3 slots"):
        new.adapters.put(new.adapters.prepare("d", fuzz.adapter(4)))
    with pytest.raises(SpecError, match="'a' is in use"):
        new.adapters.put(new.adapters.prepare("d", fuzz.adapter(4)), instead="a")
    with pytest.raises(SpecError, match="no adapter 'x'"):
        new.adapters.put(new.adapters.prepare("d", fuzz.adapter(4)), instead="x")
    new.adapters.put(new.adapters.prepare("d", fuzz.adapter(4)), instead="c")
    assert new.adapters.names == ["a", "b", "d"] and inside == [0, 0]
    new.adapters.use("d")
    now, other = new(X), fuzz.slotted()
    other.adapters.load("d", fuzz.adapter(4))
    other.adapters.use("d")
    assert torch.equal(now, other(X))
    with pytest.raises(SpecError, match="prepare it again"):
        copy.deepcopy(new).half().adapters.put(ready, instead="b")
    assert new.adapters.names == ["a", "b", "d"]


def test_pins_count_and_keep_adapters_where_they_are():
    new, ready = loaded(), loaded().adapters.prepare("c", fuzz.adapter(3))
    with pytest.raises(SpecError, match="no adapter 'x'"), new.adapters.pin("a", "x"):
        pass
    with new.adapters.pin("a"), new.adapters.pin("a", "b"):
        pass
    first = new.adapters.pin("a")
    with new.adapters.pin("a", "b"):
        first.__enter__()
    for refused in (
        lambda: new.adapters.unload("a"),
        lambda: new.adapters.put(ready, instead="a"),
        lambda: new.adapters.load("a", fuzz.adapter(5), replace=True),
    ):
        with pytest.raises(SpecError, match="'a' is pinned"):
            refused()
    new.adapters.unload("b")
    first.__exit__(None, None, None)
    new.adapters.unload("a")
    assert new.adapters.names == []


@pytest.mark.slow
def test_calls_beside_threads_that_put_and_unload_have_the_same_bits():
    new = loaded()
    rows = new.adapters.rows(["a", {"b": 0.3}])
    new.adapters.use(rows)
    wanted, errors, end = new(X), [], threading.Event()
    kept = {key: value.clone() for key, value in new.state_dict().items()}

    def change(name, seed):
        ready = new.adapters.prepare(name, fuzz.adapter(seed))
        while not end.is_set():
            try:
                new.adapters.put(ready)
                new.adapters.unload(name)
            except SpecError as error:  # the other one has the last slot, or the state that was loaded has no such name
                if "all 3 slots" not in str(error) and "no adapter" not in str(error):
                    errors.append(error)

    threads = [threading.Thread(target=change, args=(name, seed)) for name, seed in (("x", 5), ("y", 6))]
    for thread in threads:
        thread.start()
    try:
        for turn in range(24):
            assert torch.equal(new(X), wanted)
            if turn % 8 == 5:
                new.load_state_dict(kept)  # of the whole state: it waits for those that fill, and they for it
            new.adapters.use(rows)
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert not errors and new.adapters.names == ["a", "b"]
    assert all(torch.equal(value, kept[key]) for key, value in new.state_dict().items() if "table" not in key)
