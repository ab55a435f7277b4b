"""What an export calls free is: the sizes that its compiler or exporter fixed, or decided by, are guarded by name."""

from __future__ import annotations

import exports_made
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._sympy.functions import Mod as TorchMod

import fxplug
from fxplug.core.errors import GuardError
from fxplug.core.torch_internals.exporting import Condition

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
SIZES = [
    (2, 3, 12, 12), (1, 3, 12, 12), (5, 3, 12, 12), (2, 3, 24, 24), (3, 3, 17, 25), (2, 3, 5, 9), (2, 4, 12, 12),
    (20, 3, 12, 40),
]  # fmt: skip
OPERATIONS = {
    "average pool": lambda x: F.adaptive_avg_pool2d(x, 3),
    "maximum pool": lambda x: F.adaptive_max_pool2d(x, 2),
    "pyramid": lambda x: sum(F.interpolate(F.adaptive_avg_pool2d(x, n), x.shape[2:]) for n in (1, 2, 3)),
    "area": lambda x: F.interpolate(x, scale_factor=0.5, mode="area"),
    "antialias": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
    "chunk": lambda x: x.chunk(2, 2)[0] + 1,
    "pixels": lambda x: F.pixel_unshuffle(x, 2),
    "convolution": lambda x: F.conv2d(x, x.new_ones(4, 3, 3, 3), padding=1),
    "sorted": lambda x: x.flatten(1).sort(-1)[0],
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}
OPTIONS = {"aoti": exports_made.QUICK}
FREE = ["convolution", "sorted", "attention"]  # of every size
PACKAGES = {  # what is in one of AOTInductor together, as g++ is slow
    "all free": FREE, "pyramid": ["pyramid"], "pools": ["average pool", "maximum pool"], "resized": ["area", "antialias"],
    "halves": ["chunk", "pixels"],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_registry():
    with exports_made.one_registry():
        yield


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.function(x * self.scale)


def operation(name):
    if name in OPERATIONS:
        return OPERATIONS[name]
    return lambda x: torch.cat([OPERATIONS[one](x).flatten() for one in PACKAGES[name]])


def exported(name, to, folder):
    gm = fxplug.trace(Of(operation(name)).eval(), X)
    made = fxplug.export(gm, folder, X, to=to, options=OPTIONS.get(to))
    return made, fxplug.load_onnx(made.path) if to == "onnx" else fxplug.load_package(made.path, trusted=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "name"),
    [
        *(("onnx", name) for name in OPERATIONS),
        *(pytest.param("aoti", name, marks=pytest.mark.slow) for name in PACKAGES),
    ],
)
def test_other_sizes_are_right_or_refused_by_name(name, to, tmp_path):
    made, model = exported(name, to, tmp_path)
    taken = 0
    for size in SIZES:
        x = X.flatten().repeat(40)[: torch.Size(size).numel()].view(size)
        try:
            found = model(x)
        except GuardError as error:
            assert "x" in str(error) and size != SIZES[0]
            continue
        torch.testing.assert_close(torch.as_tensor(found), operation(name)(x), rtol=1e-4, atol=1e-4)
        taken += 1
    assert taken >= (3 if 0 in made.dynamic["x"] else 1)
    if name in (*FREE, "all free"):
        assert {0, 2, 3} <= {*made.dynamic["x"]} and taken >= 5  # a decision for speed alone is no condition


@pytest.mark.slow
@pytest.mark.parametrize("small", [1e-8, 1e-9, 1e-12])
def test_onnx_keeps_small_constants(small, tmp_path):
    gm = fxplug.trace(Of(lambda x: (x + small).log() * (1 + 1e-6) - 1e-8).eval(), X.abs())
    model = fxplug.load_onnx(fxplug.export(gm, tmp_path, X.abs(), to="onnx").path)
    for x in (torch.zeros_like(X), torch.full_like(X, small), X.abs()):
        torch.testing.assert_close(torch.as_tensor(model(x)), gm(x), rtol=1e-6, atol=1e-6)


def test_a_size_that_stays_is_that_of_the_example(tmp_path):
    gm = fxplug.trace(Of(OPERATIONS["average pool"]).eval(), X[:1])
    made = fxplug.export(gm, tmp_path, X[:1], to="onnx")
    model = fxplug.load_onnx(made.path)
    for x in (X[:1], X):  # torch.export is shown two samples where the example has one
        try:
            torch.testing.assert_close(torch.as_tensor(model(x)), gm(x))
        except GuardError:
            assert len(x) == 2
    assert any("they stay as in the example" in note for note in made.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("to", "dims"), [
    ("onnx", (0,)), ("onnx", ()),
    pytest.param("aoti", (), marks=pytest.mark.slow),  # of all dimensions: 0 is one of them
])  # fmt: skip
def test_what_is_squeezed_is_not_1_where_it_was_not(dims, to, tmp_path):
    gm = fxplug.trace(Of(lambda x: x.squeeze(*dims)).eval(), X)
    model = exports_made.LOAD[to](fxplug.export(gm, tmp_path, X, to=to, options=OPTIONS.get(to)).path)
    torch.testing.assert_close(torch.as_tensor(model(X[:, :, :5].repeat(2, 1, 1, 1))), gm(X[:, :, :5].repeat(2, 1, 1, 1)))
    with pytest.raises(GuardError, match=r"for inputs with x.shape\[0\] != 1"):
        model(X[:1])


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", pytest.param("aoti", marks=pytest.mark.slow)])
def test_a_tensor_that_is_given_twice_and_one_within_a_dict(to, tmp_path):
    gm = fxplug.trace(Pooled().eval(), (X, X), {"more": {"y": X}})
    made = fxplug.export(gm, tmp_path, (X, X), {"more": {"y": X}}, to=to, options=OPTIONS.get(to))
    model = fxplug.load_onnx(made.path) if to == "onnx" else fxplug.load_package(made.path, trusted=True)
    torch.testing.assert_close(torch.as_tensor(model(X, X, more={"y": X})), gm(X, X, more={"y": X}))
    with pytest.raises(GuardError, match=r"more\['y'\]"):
        model(X, X, more={"y": X[:, :, :7, :7]})


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, a, b, more):
        return F.adaptive_avg_pool2d(a * self.scale, 3).mean() + b.sum() + F.adaptive_max_pool2d(more["y"], 2).mean()


def test_a_condition_whose_sizes_would_be_negative_does_not_hold():
    size = sympy.Symbol("s0", integer=True, positive=True)
    condition = Condition("(s0 - 3) % 2 == 1", frozenset({"s0"}), frozenset({2, 3}), sympy.Eq(TorchMod(size - 3, 2), 1))
    assert condition.holds({"s0": 6}) and not condition.holds({"s0": 2})
