"""Single operations as ONNX models: right at other sizes and values than the example's, or refused in words."""

from __future__ import annotations

from collections import Counter

import exports_made
import fuzz_exports
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxplug
from fxplug.core.errors import FxplugError, GuardError

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


@pytest.fixture(scope="module", autouse=True)
def one_registry():
    with exports_made.one_registry():
        yield


def exported(module, inputs, folder):
    return fxplug.load_onnx(fxplug.export(fxplug.trace(module.eval(), inputs), folder, inputs, to="onnx").path)


def attention(**options):
    return lambda *x: F.scaled_dot_product_attention(x[0], x[1], x[1], *x[2:], **options)


X = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
WHOLE = torch.tensor([[0, 3, 2], [1, 1, 0]])
OPERATIONS = {
    "attention of three dimensions": (attention(), [X, X]),
    "attention of two": (attention(), [X[0], X[0]]),
    "causal": (attention(is_causal=True), [X, X]),
    "masked": (attention(), [X, X, torch.ones(2, 3, 3, dtype=torch.bool)]),
    "float mask": (attention(), [X, X, torch.zeros(2, 3, 3)]),
    "cumprod": (lambda x: x.cumprod(1), [X]),
    "cumprod of whole numbers": (lambda x: x.cumprod(-1, dtype=torch.float32), [WHOLE.int()]),
    "isin": (lambda x, y: torch.isin(x, y), [WHOLE, torch.tensor([0, 2])]),
    "isin a number": (lambda x: torch.isin(x, 2, invert=True), [WHOLE]),
    "embedding": (lambda x, y: F.embedding(y, x[0]), [X, WHOLE.int() // 2]),
    "index": (lambda x, y: x[y, y], [X, WHOLE.int() // 2]),
    "index_put": (lambda x, y: x.index_put((y,), x[:1] + 1), [X, torch.tensor([1, 0], dtype=torch.int32)]),
    "logsigmoid": (F.logsigmoid, [X * 100]),
    "cross entropy": (F.binary_cross_entropy_with_logits, [X * 100, X.sigmoid()]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_torch_onnx_alone_refuses_or_gets_wrong(name, tmp_path):
    function, inputs = OPERATIONS[name]
    model = exported(Of(function), tuple(inputs), tmp_path)
    for change in (torch.clone, torch.zeros_like, torch.neg, lambda t: t.repeat(2, *[1] * (t.dim() - 1))):
        given = [t if change is torch.neg and not t.is_floating_point() else change(t) for t in inputs]
        if change is torch.zeros_like and name == "index_put":
            continue  # of one place twice ONNX says nothing
        torch.testing.assert_close(model(*given), function(*given), **CLOSE)
    if name == "float mask":
        given = [*inputs[:2], torch.full((2, 3, 3), -torch.inf)]
        torch.testing.assert_close(model(*given), function(*given), **CLOSE)


@pytest.mark.parametrize("function", [torch.special.erfcx, torch.special.log_ndtr])
def test_what_overflows_is_refused(function, tmp_path):
    with pytest.raises(FxplugError, match="does not support aten.special_.* at the model itself"):
        exported(Of(function), (X,), tmp_path)


class Decoder(nn.Module):
    """A block of a language model: grouped heads, causal, and ids that are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.q, self.kv = nn.Embedding(9, 16), nn.RMSNorm(16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 9)

    def forward(self, ids, mask=None):
        x = self.table(ids)
        q, k, v = (self.norm(x) @ w.mT for w in (self.q.weight, *self.kv.weight.chunk(2)))
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        seen = None if mask is None else mask[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=mask is None, enable_gqa=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads_in_a_block_with_an_adapter(masked, tmp_path):
    torch.manual_seed(0)
    net, ids = Decoder().eval(), torch.randint(0, 9, (2, 6), dtype=torch.int32)
    inputs = (ids, torch.ones(2, 6, dtype=torch.bool)) if masked else (ids,)
    new = fxplug.apply(fxplug.trace(net, inputs), fxplug.load_pass("lora", at="out", rank=2, slots=2))
    made = fxplug.export(new, tmp_path, inputs, to="onnx")
    assert made.kept == "all" and made.dynamic["ids"] == [0, 1] and len(made.notes) == 1
    model = fxplug.load_onnx(made.path)
    ink = {"out.lora_A.weight": torch.randn(2, 16), "out.lora_B.weight": torch.randn(16, 2)}
    for adapters in (new.adapters, model.adapters):
        adapters.load("ink", ink)
        adapters.use("ink")
    for batch, length in [(2, 6), (1, 1), (3, 9)]:
        given = [torch.randint(0, 9, (batch, length), dtype=torch.int32)]
        if masked:
            given.append(torch.rand(batch, length) > 0.4)
            given[1][0] = False
        torch.testing.assert_close(model(*given), new(*given).detach(), **CLOSE)
    assert not torch.allclose(model(*given), net(*given), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pt2", "onnx", pytest.param("aoti", marks=pytest.mark.slow)])
def test_no_samples_are_right_or_refused(to, tmp_path):
    net, ids = Decoder().eval(), torch.randint(0, 9, (2, 6))
    options = exports_made.QUICK if to == "aoti" else None
    path = fxplug.export(fxplug.trace(net, ids), tmp_path, ids, to=to, options=options).path
    if to == "pt2":
        assert torch.export.load(path).module()(ids[:0]).shape == net(ids[:0]).shape == (0, 6, 9)
        return
    model = fxplug.load_onnx(path) if to == "onnx" else fxplug.load_package(path, trusted=True)
    with pytest.raises(GuardError, match="ids, dimension 0: the size is 0, and the .* for 1 or more"):
        model(ids[:0])


@pytest.mark.slow
def test_operations_of_every_kind():
    """`make fuzz` has as many as it is given."""
    counts: Counter[str] = Counter()
    assert fuzz_exports.fuzz_exports(16, 0, counts) == []
    assert counts["exported"] >= 12 and counts["calls"] >= 80, counts
