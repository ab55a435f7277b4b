"""Measured forms: what is measured, how it is kept, and when it is taken."""

from __future__ import annotations

import itertools
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxplug
from fxplug.lowerings.linear import forms, measurement, operators
from fxplug.lowerings.linear.forms import Case
from fxplug.lowerings.pipeline import form_table

CPU = torch.device("cpu")
BRIEF = measurement._brief  # as it is: tests/conftest.py has another for all tests
MODES = [(grad, compiled) for grad in (0, 1) for compiled in (0, 1)]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale=2.0):
        return self.second(self.first(x) * scale)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FXPLUG_CACHE", str(tmp_path / "cache"))
    forms.say.cache_clear()
    forms.read.cache_clear()
    measurement.MEASURED.clear()
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def new():
    return fxplug.apply(fxplug.trace(Two().eval(), torch.randn(3, 5, 8)), fxplug.load_pass("lora", at="*", rank=2))


def entries(**chosen):
    """Measurements of the first layer, by rows, the same in all modes."""
    return {
        Case("float32", int(rows[1:]), 8, 16, 2, 0, *mode): {"form": form, "ratios": {"stock": [1, 1], form: [0.25, 0.5]}}
        for rows, form in chosen.items()
        for mode in MODES
    }


@pytest.fixture
def clockwork(monkeypatch):
    """Measures with a clock that says what each form takes: `clockwork(fused=0.5)`, 1 without a word; how many were timed."""
    seconds, timed = {}, []

    def calls(device, case):
        names = ["stock", "fused", *(["blas"] if case.rank else [])]
        return {name: (name, case) for name in names}

    def spent(device, call, repeats):
        timed.append(call)
        found = seconds.get(call[0], 1.0)
        return found(call[1]) if callable(found) else found

    monkeypatch.setattr(measurement, "_brief", BRIEF)
    monkeypatch.setattr(measurement, "calls_of", calls)
    monkeypatch.setattr(measurement, "_time", spent)
    monkeypatch.setattr(measurement, "BUSY", math.inf)

    def told(**given):
        seconds.clear()
        seconds.update(given)
        timed.clear()
        return timed

    return told


def first_form(module):
    return fxplug.fuse(module).meta["forms"]["first"].partition(" ")[0]


def functions(module):
    return {str(n.target): n.target for n in module.graph.nodes if n.op == "call_module"}


def test_each_shape_is_measured_once_and_kept(new, folder):
    found = measurement.tune(new, turns=3)
    assert [(t.case, t.layers) for t in found.timings] == [
        (Case("float32", 15, 8, 16, 2, 0), ["first"]), (Case("float32", 15, 16, 8, 2, 0), ["second"])
    ]  # fmt: skip
    for timing in found.timings:
        assert set(timing.milliseconds) == {"stock", "fused", "blas"}
        assert timing.ratios["stock"] == (1, 1)
        assert timing.form == "stock" or timing.ratios[timing.form][0] < measurement.FASTER
    assert found.file.parent == folder and "15 rows, 8 -> 16, rank 2, float32: 1 layers" in str(found)
    assert {case: entry["form"] for case, entry in forms.measured(CPU).items()} == {t.case: t.form for t in found.timings}
    measurement.tune(new, torch.randn(1, 7, 8), turns=1)
    assert sorted({case.rows for case in forms.measured(CPU)}) == [7, 15]


def test_a_form_is_taken_only_where_most_turns_were_faster(monkeypatch):
    def measured(**seconds):
        spent = {form: iter(values) for form, values in seconds.items()}
        monkeypatch.setattr(measurement, "calls_of", lambda *_: {form: form for form in seconds})
        monkeypatch.setattr(measurement, "_ready", lambda call, compiled: call)
        monkeypatch.setattr(measurement, "_time", lambda device, call, repeats: next(spent[call]))
        return measurement.measure(CPU, Case("float32", 1, 1, 1, 1, 0), [], 4).form

    assert measured(stock=[1.0] * 5, fused=[0.9] * 5, blas=[0.8] * 5) == "blas"
    assert measured(stock=[1.0] * 5, fused=[0.98] * 5) == "stock"  # too little
    assert measured(stock=[1.0] * 5, fused=[0.5, 0.5, 0.5, 2.0, 2.0]) == "stock"  # too often slower


@pytest.mark.parametrize("rows, form", [
    ({}, "fused"), ({"r15": "stock"}, "stock"), ({"r15": "blas", "r14": "stock", "r16": "stock"}, "blas"),
    ({"r8": "blas", "r64": "blas"}, "blas"), ({"r8": "blas", "r64": "stock"}, "fused"),
    ({"r8": "blas"}, "fused"),
], ids=str)
def test_the_measured_form_is_taken_at_and_between_measured_rows(new, rows, form):
    forms.write(CPU, entries(**rows))
    assert first_form(new) == form


def test_fused_graphs_have_what_was_measured(new):
    forms.write(CPU, entries(r15="blas"))
    fused = fxplug.fuse(new)
    assert [n.args[6:] for n in fused.graph.nodes if n.target is operators.lora_linear] == [("blas",), ()]
    forms.write(CPU, entries(r15="stock"))
    assert "first" in functions(fxplug.fuse(new))


def test_the_fastest_form_is_taken_for_each_way_of_running(new, clockwork):
    clockwork(fused=lambda case: 0.4 if case.grad else 2.0, blas=0.8)
    made = fxplug.lower(new)
    assert made.meta["forms"]["first"] == (
        "blas (eager x0.80, compiled x0.80), fused (eager with gradients x0.40, compiled with gradients x0.40)"
    )
    node = next(n for n in made.graph.nodes if n.target is operators.lora_linear)
    assert node.args[-1] == "blas,fused,blas,fused"
    assert form_table(made).startswith("2 blas, fused\n")
    x, wanted = torch.randn(3, 5, 8), {}
    for compiled in (False, True):
        call = torch.compile(made, backend="aot_eager", fullgraph=True) if compiled else made
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                wanted[compiled, grad] = call(x)
    for found in wanted.values():
        torch.testing.assert_close(found, new(x), rtol=1e-5, atol=1e-6)


def test_where_nothing_is_clearly_faster_a_module_stays_bit_for_bit(new, clockwork):
    clockwork(fused=0.98, blas=lambda case: 1.05)
    made = fxplug.lower(new)
    assert functions(made).keys() == functions(new).keys() and set(made.meta["forms"].values()) == {"stock"}
    x = torch.randn(3, 5, 8)
    assert torch.equal(made(x), new(x))


def test_what_was_measured_is_not_measured_again(new, clockwork, folder):
    timed = clockwork(fused=0.5)
    assert first_form(new) == "fused" and timed
    timed.clear()
    assert first_form(new) == "fused" and not timed
    measurement.MEASURED.clear()  # as another process
    assert first_form(new) == "fused" and not timed
    assert len(list(folder.iterdir())) == 1
    next(folder.iterdir()).write_text("{")
    with pytest.warns(UserWarning, match="is damaged"):
        assert first_form(new) == "fused" and timed  # measured anew, and the file is whole again
    assert json.loads(next(folder.iterdir()).read_text())["cases"]


def test_a_form_that_is_faster_only_at_times_is_not_taken_and_is_measured_again(new, clockwork):
    spent = itertools.cycle([0.2, 0.2, 2.0])
    timed = clockwork(fused=lambda case: next(spent), blas=1.1)
    with pytest.warns(UserWarning, match="not certain for every shape"):
        assert first_form(new) == "stock"
    assert not forms.measured(CPU)
    timed.clear()
    assert first_form(new) == "stock" and timed
    timed = clockwork(fused=0.5)
    assert first_form(new) == "fused" and timed
    assert {entry["form"] for entry in forms.measured(CPU).values()} == {"fused"}


def test_nothing_is_kept_of_a_time_in_which_others_had_the_processor(new, clockwork, monkeypatch):
    clockwork(fused=0.5)
    ticks = itertools.count(1)
    slow = SimpleNamespace(perf_counter=lambda: 2.0 * next(ticks), thread_time=lambda: float(next(ticks)))
    monkeypatch.setattr(measurement, "time", slow)
    monkeypatch.setattr(measurement, "BUSY", 1.2)
    with pytest.warns(UserWarning, match="not certain for every shape"):
        assert first_form(new) == "fused"
    assert not forms.measured(CPU)


def test_a_shape_gets_as_many_turns_as_its_form_needs(new, clockwork, monkeypatch):
    monkeypatch.setattr(measurement, "BUDGET", 1e9)
    timed = clockwork(fused=0.5)
    first_form(new)
    few = len(timed)
    forms.cache_file(CPU).unlink()
    measurement.MEASURED.clear()
    spent = itertools.cycle([0.94, 1.0, 1.06, 0.97, 1.1])
    timed = clockwork(fused=lambda case: next(spent))
    first_form(new)
    assert len(timed) > few


def test_forms_are_chosen_where_nothing_can_be_kept(new, clockwork, folder):
    folder.write_text("a file in the folder's place")
    timed = clockwork(fused=0.5)
    with pytest.warns(UserWarning, match="used in this process only: .*cannot be written"):
        assert first_form(new) == "fused"
    timed.clear()
    assert first_form(new) == "fused" and not timed


def test_measuring_ends_and_leaves_the_process_as_it_was(new, monkeypatch):
    monkeypatch.setattr(measurement, "_brief", BRIEF)
    monkeypatch.setattr(measurement, "BUDGET", 0.05)
    monkeypatch.setattr(measurement, "CERTAIN", math.inf)
    monkeypatch.setattr(measurement, "BUSY", math.inf)
    before, torch_state = torch.get_rng_state(), (torch.is_grad_enabled(), torch.get_default_dtype())
    with torch.inference_mode():
        made = fxplug.lower(new)
    assert torch.equal(torch.get_rng_state(), before) and (torch.is_grad_enabled(), torch.get_default_dtype()) == torch_state
    known = forms.measured(CPU)
    assert len(known) == 4 and all(entry["ratios"]["stock"] == [1.0, 1.0] for entry in known.values())
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(made(x), new(x), rtol=1e-5, atol=1e-6)


def test_processes_that_measure_at_once_leave_a_whole_file(folder):
    def write(rows):
        for _ in range(10):
            forms.write(CPU, entries(**{f"r{rows}": "stock"}))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(1, 5)))
    assert {case.rows for case in forms.measured(CPU)} <= {1, 2, 3, 4} and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("change, said", [
    (lambda d: d["versions"].update(torch="1.0"), "are from torch 1.0, .* ignored: run 'fxplug tune' again"),
    (lambda d: d.update(format=99), "are ignored"),
    (lambda d: d["cases"].update({"float32 1": {"form": "stock"}}), "is damaged"),
    (lambda d: d["cases"].update({"float32 1 2 3 4 0 0 0": {"form": "stock"}}), "is damaged .KeyError: 'ratios'"),
    (lambda d: d["cases"].update({"float32 1 2 3 4 0 0 0": {"form": "stock", "ratios": 3}}), "is damaged"),
    (lambda d: d["cases"].update({"float32 1 2 3 4 0 0 0": {"form": "eager"}}), "is damaged .ValueError: unknown form 'eager'"),
    (lambda d: d.update(cases=3), "is damaged"),
    (None, "is damaged"),
])
def test_a_file_that_cannot_be_used_is_ignored_and_that_is_said_once(new, change, said):
    file = forms.write(CPU, entries(r15="blas"))
    document = json.loads(file.read_text())
    if change is not None:
        change(document)
    file.write_text(json.dumps(document) if change is not None else "{")
    with pytest.warns(UserWarning, match=said) as warned:
        assert first_form(new) == first_form(new) == "fused"
    assert len(warned) == 1
    forms.write(CPU, entries(r15="blas"))  # a new one takes its place
    assert first_form(new) == "blas"


def test_a_module_without_updates_has_nothing_to_tune():
    with pytest.raises(fxplug.SpecError, match="nothing to tune"):
        measurement.tune(fxplug.trace(Two(), torch.randn(3, 8)))


@pytest.mark.parametrize("case", [
    Case("float32", 5, 0, 4, 2, 0), Case("float32", 5, 4, 0, 0, 0), Case("float32", 0, 4, 4, 2, 0),
    Case("float64", 5, 4, 4, 2, 0), Case("complex64", 5, 4, 4, 2, 0), Case("bfloat16", 1, 1, 1, 1, 3),
    Case("float16", 2, 3, 1, 9, 0), Case("float32", 1, 4, 3, 0, 0),
], ids=str)  # fmt: skip
def test_any_shape_and_dtype_gets_a_form(case, monkeypatch):
    monkeypatch.setattr(measurement, "_brief", BRIEF)
    monkeypatch.setattr(measurement, "BUDGET", 0)
    monkeypatch.setattr(measurement, "CERTAIN", math.inf)
    monkeypatch.setattr(measurement, "BUSY", math.inf)
    form, text = measurement.chosen(measurement.settle({(CPU, case)})[CPU], case)
    assert set(re.sub(r" \([^()]*\)", "", text).split(", ")) == set(form.split(",")) <= set(forms.FORMS)


def test_many_and_large_shapes_are_measured_with_fewer_rows(monkeypatch, folder):
    asked = []

    def brief(device, fewer, until):
        asked.append(fewer)
        return {"form": "stock", "ratios": {}}, True

    monkeypatch.setattr(measurement, "_brief", brief)
    measurement.settle({(CPU, Case("float32", 10**7, 64 * n, 4096, 16, 0)) for n in range(1, 41)})
    kept = forms.measured(CPU)
    assert len(asked) == len(kept) == 80
    assert {case._replace(rows=1) for case in kept} == {fewer._replace(rows=1) for fewer in asked}
    assert sum(fewer.rows * fewer.inner * fewer.outer for fewer in asked) < 10 * measurement.PRODUCTS
    assert all(32 <= fewer.rows < 10**7 for fewer in asked)


@pytest.mark.parametrize("turns", [-1, 0, 10_001, 1.5, True, "3"])
def test_the_number_of_turns_has_bounds(turns):
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4))
    with pytest.raises(fxplug.SpecError, match="turns must be a whole number from 1 to 10000, not"):
        measurement.tune(gm, turns=turns)
