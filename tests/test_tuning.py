"""Forms by rule: what a layer takes, that nothing is timed or kept for it, and what `tune` measures beside it."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxplug
from fxplug.lowerings.linear import forms, measurement, operators
from fxplug.lowerings.linear.forms import Case
from fxplug.lowerings.pipeline import form_table

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def rule(monkeypatch, own_rule):
    """As it is, on a CPU of one class."""
    monkeypatch.setattr(forms, "classify", lambda device: device)


class Two(nn.Module):
    def __init__(self, inner=8, outer=16):
        super().__init__()
        self.first, self.second = nn.Linear(inner, outer), nn.Linear(outer, inner)

    def forward(self, x, scale=2.0):
        return self.second(self.first(x) * scale)


def rewritten(*shape, outer=16, **more):
    return fxplug.apply(
        fxplug.trace(Two(shape[-1], outer).eval(), torch.randn(*shape)), fxplug.load_pass("lora", at="*", rank=2, **more)
    )  # fmt: skip


@pytest.fixture(scope="module")
def new():
    return rewritten(3, 5, 8)


@pytest.fixture(scope="module")
def large():
    """Layers of which the first is wide, and both read much."""
    return rewritten(4, 200, 768, outer=1024)


@pytest.mark.parametrize(("case", "inference", "training"), [
    # rows, inner, outer, rank, slots; where it was measured (an AMD EPYC), these were the fastest, or nearly
    ((197, 384, 1536, 16, 0), "fused", "fused"),
    ((3152, 384, 384, 16, 0), "blas", "fused"),
    ((3152, 1536, 384, 16, 0), "blas", "blas"),
    ((154, 768, 320, 16, 0), "blas", "stock"),
    ((128, 1280, 10240, 16, 0), "fused", "stock"),
    ((2048, 320, 320, 16, 4), "blas", "stock"),
    ((3152, 384, 1536, 0, 0), "fused", "stock"),
    ((3152, 1536, 384, 0, 0), "stock", "stock"),
    ((64, 64, 64, 16, 0), "stock", "stock"),
    ((2, 320, 1280, 16, 4), "stock", "stock"),
])  # fmt: skip
def test_a_layer_takes_a_form_by_its_sizes(case, inference, training):
    found = [forms.choose_form(Case("float32", *case, grad), "cpu") for grad in (0, 1)]
    assert found == [inference, training]


def test_half_precision_has_torchs_own_products_on_a_cpu():
    sizes, flags = (10, 1000, 9000), [(0, 16), (0, 4), (0, 1)]
    every = itertools.product(("float16", "bfloat16", "float64"), sizes, (64, 2048), (64, 2048), *flags)
    assert {forms.choose_form(Case(*one), "cpu") for one in every} == {"stock", "blas"}


def test_every_class_of_devices_has_the_same_limits():
    assert {"cpu", "cpu with mkl", "cuda"} == forms.LIMITS.keys()
    assert len({tuple(sorted(each)) for each in forms.LIMITS.values()}) == 1
    assert "inferred" in forms.LIMITS["cuda"]["about"]


@pytest.mark.parametrize("device", ["cpu", "cpu with mkl", "cuda", "mps", "xpu", "meta", "nothing"])
def test_any_shape_dtype_and_device_gets_a_form(device):
    sizes = [0, 1, 7, 4096, 10**9]
    for dtype, rows, inner, outer in itertools.product(("float32", "complex64", "int8"), sizes, sizes, sizes):
        for rank, slots, grad in ((0, 0, 0), (16, 0, 0), (16, 0, 1), (3, 5, 0), (3, 5, 1)):
            form = forms.choose_form(Case(dtype, rows, inner, outer, rank, slots, grad), device)
            assert form in forms.FORMS and (form == "stock" or (device in forms.LIMITS and dtype == "float32"))


def test_nothing_is_timed_or_kept_and_the_same_forms_are_taken_again(large, monkeypatch, tmp_path):
    for name in ("perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(time, name, lambda: pytest.fail("something is timed"))
    monkeypatch.setenv("FXPLUG_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads, found = torch.get_num_threads(), []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for count in (1, 2, 1):
                torch.set_num_threads(count)
                found.append(fxplug.lower(large, fuse="auto").meta["forms"])
    finally:
        torch.set_num_threads(threads)
    assert found == [dict.fromkeys(("first", "second"), "fused, blas (with gradients)")] * 3
    assert not list(tmp_path.iterdir())


def test_each_way_of_running_has_its_form(large):
    made = fxplug.lower(large)
    assert [n.args[-1] for n in made.graph.nodes if n.target is operators.run_lora_linear] == ["fused,blas,fused,blas"] * 2
    assert form_table(made).startswith("2 fused, blas\n")
    x = torch.randn(4, 200, 768)
    for compiled in (False, True):
        call = torch.compile(made, backend="aot_eager", fullgraph=True) if compiled else made
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(call(x), large(x), rtol=1e-5, atol=1e-5)


def test_compiled_code_of_a_gpu_has_the_update_on_the_weight_where_rows_are_many():
    def taken(rows, **more):
        return forms.choose_forms(Case("bfloat16", rows, 1024, 1024, 16, 0)._replace(**more), "cuda")

    assert taken(12608)[0] == "fused,fused,fused,stock" and taken(12608)[1] == "fused, stock (compiled, with gradients)"
    assert taken(512)[0] == "fused,fused,stock,stock"  # less than 2 * 1024 * 1024 / 2048 rows
    assert taken(12608, slots=4)[0] == "stock"


def operations(call, *shapes, dtype=torch.bfloat16):
    """What a compiler is given of a call, by the number of times; tensors on the meta device stand for those of a GPU."""
    given = [torch.empty(shape, dtype=dtype if shape else torch.float32, device="meta") for shape in shapes]
    graph = make_fx(call)(*given)
    return Counter(str(n.target).split(".")[1] for n in graph.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("rows", [16, 2, 40])
def test_the_code_for_a_gpu_has_no_pass_over_rows_for_the_update(rows, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    shapes = (rows, 197, 64), (96, 64), (96,), (16, 64), (96, 16), ()

    def call(form, *given):
        with torch.no_grad():
            return operators.run_lora_linear(*given, form)

    assert operations(functools.partial(call, "fused"), *shapes).keys() & {"mm", "addmm", "add", "mul"} == {"addmm", "mul"}
    assert operations(functools.partial(call, "stock"), *shapes)["add"] == 1
    assert operations(functools.partial(operators.run_lora_linear, form="fused"), *shapes)["add"] == 0

    def trained(x, *rest):
        return operators.run_lora_linear(x.detach().requires_grad_(), *rest)

    assert operations(trained, *shapes)["add"] == 1


def test_small_layers_stay_bit_for_bit(new):
    made, x = fxplug.lower(new), torch.randn(3, 5, 8)
    assert set(made.meta["forms"].values()) == {"stock"} and torch.equal(made(x), new(x))
    first, second = ({n.target for n in gm.graph.nodes if n.op == "call_module"} for gm in (made, new))
    assert first == second


def test_forms_are_measured_beside_the_one_that_is_taken(new, large):
    found = measurement.tune(new, turns=3)
    assert [(t.case, t.layers, t.form) for t in found.timings] == [
        (Case("float32", 15, 8, 16, 2, 0), ["first"], "stock"), (Case("float32", 15, 16, 8, 2, 0), ["second"], "stock")
    ]  # fmt: skip
    for timing in found.timings:
        assert set(timing.milliseconds) == {"stock", "fused", "blas"} and timing.ratios["stock"] == (1, 1)
    assert "15 rows, 8 -> 16, rank 2, float32: 1 layers" in str(found) and str(found).count("<- taken") == 2
    assert [t.case.rows for t in measurement.tune(new, torch.randn(1, 7, 8), turns=1).timings] == [7, 7]
    assert {t.form for t in measurement.tune(large, turns=1).timings} == {"fused"}


def test_a_module_without_updates_has_nothing_to_tune():
    with pytest.raises(fxplug.SpecError, match="nothing to tune"):
        measurement.tune(fxplug.trace(Two(), torch.randn(3, 8)))


@pytest.mark.parametrize("turns", [-1, 0, 10_001, 1.5, True, "3"])
def test_the_number_of_turns_has_bounds(turns):
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4))
    with pytest.raises(fxplug.SpecError, match="turns must be a whole number from 1 to 10000, not"):
        measurement.tune(gm, turns=turns)
