"""Measured forms: what is measured, how it is kept, and when it is taken."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fxplug
from fxplug.lowerings.linear import forms, measuring, operators
from fxplug.lowerings.linear.forms import Case

CPU = torch.device("cpu")


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
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def new():
    return fxplug.apply(fxplug.trace(Two().eval(), torch.randn(3, 5, 8)), fxplug.load_pass("lora", at="*", rank=2))


def entries(**chosen):
    """Measurements of the first layer, by rows."""
    return {Case("float32", int(rows[1:]), 8, 16, 2, 0): {"form": form} for rows, form in chosen.items()}


def first_form(module):
    return fxplug.fuse(module).meta["forms"]["first"]


def test_each_shape_is_measured_once_and_kept(new, folder):
    found = measuring.tune(new, turns=3)
    assert [(t.case, t.layers) for t in found.timings] == [
        (Case("float32", 15, 8, 16, 2, 0), ["first"]), (Case("float32", 15, 16, 8, 2, 0), ["second"])
    ]  # fmt: skip
    for timing in found.timings:
        assert set(timing.milliseconds) == {"stock", "fused", "remerge"} and timing.ratios["stock"] == (1, 1)
        assert timing.form == "stock" or timing.ratios[timing.form][0] < measuring.FASTER
    assert found.file.parent == folder and "15 rows, 8 -> 16, rank 2, float32: 1 layers" in str(found)
    assert forms.measured(CPU) == {t.case: t.form for t in found.timings}
    measuring.tune(new, (torch.randn(1, 7, 8),), turns=1)
    assert sorted({case.rows for case in forms.measured(CPU)}) == [7, 15]


def test_a_form_is_taken_only_where_most_turns_were_faster(monkeypatch):
    def measured(**seconds):
        spent = {form: iter(values) for form, values in seconds.items()}
        monkeypatch.setattr(measuring, "calls_of", lambda *_: {form: form for form in seconds})
        monkeypatch.setattr(measuring, "_ready", lambda call, compiled: call)
        monkeypatch.setattr(measuring, "_time", lambda device, call, repeats: next(spent[call]))
        return measuring.measure(CPU, Case("float32", 1, 1, 1, 1, 0), [], False, 4).form

    assert measured(stock=[1.0] * 5, fused=[0.9] * 5, remerge=[0.8] * 5) == "remerge"
    assert measured(stock=[1.0] * 5, fused=[0.98] * 5) == "stock"  # too little
    assert measured(stock=[1.0] * 5, fused=[0.5, 0.5, 0.5, 2.0, 2.0]) == "stock"  # too often slower


@pytest.mark.parametrize("rows, form", [
    ({}, "fused"), ({"r15": "stock"}, "stock"), ({"r15": "remerge", "r14": "stock", "r16": "stock"}, "remerge"),
    ({"r8": "remerge", "r64": "remerge"}, "remerge"), ({"r8": "remerge", "r64": "stock"}, "fused"),
    ({"r8": "remerge"}, "fused"),
], ids=str)
def test_the_measured_form_is_taken_at_and_between_measured_rows(new, rows, form):
    forms.write(CPU, entries(**rows))
    assert first_form(new) == form


def test_fused_graphs_have_what_was_measured(new):
    forms.write(CPU, entries(r15="remerge"))
    fused = fxplug.fuse(new)
    assert [n.target for n in fused.graph.nodes if n.target in (operators.remerged_linear, operators.lora_linear)] == [
        operators.remerged_linear, operators.lora_linear
    ]  # fmt: skip
    forms.write(CPU, entries(r15="stock"))
    assert "first" in {str(n.target) for n in fxplug.fuse(new).graph.nodes}


@pytest.mark.parametrize("change, said", [
    (lambda d: d["versions"].update(torch="1.0"), "are from torch 1.0, .* ignored: run 'fxplug tune' again"),
    (lambda d: d.update(format=99), "are ignored"),
    (lambda d: d["cases"].update({"float32 1": {"form": "stock"}}), "is damaged"),
    (lambda d: d["cases"].update({"float32 1 2 3 4 0": {"form": "eager"}}), "is damaged .ValueError: no form 'eager'"),
    (lambda d: d.update(cases=3), "is damaged"),
    (None, "is damaged"),
])
def test_a_file_that_cannot_be_used_is_ignored_and_that_is_said_once(new, change, said):
    file = forms.write(CPU, entries(r15="remerge"))
    document = json.loads(file.read_text())
    if change is not None:
        change(document)
    file.write_text(json.dumps(document) if change is not None else "{")
    with pytest.warns(UserWarning, match=said) as warned:
        assert first_form(new) == first_form(new) == "fused"
    assert len(warned) == 1
    forms.write(CPU, entries(r15="remerge"))  # a new one takes its place
    assert first_form(new) == "remerge"


def test_a_module_without_updates_has_nothing_to_tune():
    with pytest.raises(fxplug.SpecError, match="nothing to tune"):
        measuring.tune(fxplug.trace(Two(), torch.randn(3, 8)))
