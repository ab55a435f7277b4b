"""torch's flex_attention and create_block_mask, which are given Python functions, in traced models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from sweeps import sweep
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

import fxplug
from fxplug.core.ir.comparison import describe_difference

# torch says that it is slow where it is not compiled
pytestmark = [pytest.mark.filterwarnings("ignore:flex_attention called"), pytest.mark.filterwarnings("ignore:return_lse is")]
if torch.__version__ < "2.14":  # whose own compiler warns of its own code
    warns = ("Dynamo does not know how to trace the builtin", "<class 'torch.autograd.function.Function'> should not be")
    pytestmark += [pytest.mark.filterwarnings(f"ignore:{text}") for text in warns]


BROKEN = "after an error within flex_attention, torch 2.13 fails in every later call of it that is not compiled"


class Heads(nn.Module):
    """Attention of two heads, with what `attend` makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.bias = nn.Linear(16, 48), nn.Linear(16, 16), nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out: torch.Tensor = self.out(self.attend(x, q, k, v).transpose(1, 2).flatten(2))
        return out

    def attend(self, x: Any, q: Any, k: Any, v: Any) -> Any:
        raise NotImplementedError


class Causal(Heads):
    def attend(self, x: Any, q: Any, k: Any, v: Any) -> Any:
        n = x.shape[1]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=x.device, BLOCK_SIZE=16)
        return flex_attention(q, k, v, block_mask=mask)


class Window(Heads):
    def attend(self, x: Any, q: Any, k: Any, v: Any) -> Any:
        (b, n, _), shown = x.shape, x[..., 0] > 0
        width = n // 2

        def near(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (((i - j).abs() < width) & shown[b, j]) | (i == j)

        mask = flex.create_block_mask(near, B=b, H=None, Q_LEN=n, KV_LEN=n, device=x.device)
        return flex.flex_attention(q, k, v, block_mask=mask)


class Score(Heads):
    def attend(self, x: Any, q: Any, k: Any, v: Any) -> Any:
        bias, half = self.bias * 2, x.shape[1] / 2

        def moved(score: Any, b: Any, h: Any, i: Any, j: Any, scale: Any = half) -> Any:
            return score + bias[h] * (i - j) / scale

        out, sums = flex_attention(q, k, v, moved, return_lse=True)
        return out + sums.mean()


class Both(Heads):
    """A function for the scores beside a mask, whose block size is read."""

    def attend(self, x: Any, q: Any, k: Any, v: Any) -> Any:
        n, weight = x.shape[1], self.bias
        mask = create_block_mask(lambda b, h, i, j: i + n // 4 >= j, None, 2, n, n, x.device)
        options: Any = {"BLOCK_M": mask.BLOCK_SIZE[0]}
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * weight[h], mask, kernel_options=options)


class Twice(Heads):
    """The same function made again in a loop, around another value each time."""

    def attend(self, x: Any, q: Any, k: Any, v: Any) -> Any:
        n = x.shape[1]
        for back in (2, 7):
            mask = create_block_mask(lambda b, h, i, j, back=back: (i - j).abs() < back, None, None, n, n, x.device)
            v = flex_attention(q, k, v, block_mask=mask)
        return v


class Layer(Heads):
    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        assert isinstance(mask, BlockMask)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """A mask for all layers, made outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=x.device)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x


@pytest.mark.slow
@sweep("kind", [Causal, Window, Score, Both, Twice, Stack], 0, 3)
@pytest.mark.parametrize("training", [False, True])
def test_a_model_with_flex_attention_gives_what_it_gives(kind: type[nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model = kind().train(training)
    gm = fxplug.trace(model, (torch.randn(2, 32, 16),))
    with torch.no_grad():
        for size in ((2, 32, 16), (3, 48, 16), (1, 130, 16)):
            x = torch.randn(size)
            assert torch.equal(gm(x), model(x))


@sweep("kind", [Causal, Window, Score], 2)
def test_it_compiles_as_one_graph(kind: type[nn.Module]) -> None:
    model, x = kind().eval(), torch.randn(2, 32, 16)
    gm = fxplug.trace(model, (x,))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(gm, backend="eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("kind", [Window, Stack])
def test_a_model_on_the_meta_device_is_traced(kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        model = kind().eval()
    gm = fxplug.trace(model, (torch.randn(2, 32, 16, device="meta"),))
    assert [n.target.__name__ for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "create_block_mask"]


def test_a_graph_with_a_function_of_python_is_not_saved(tmp_path: Any) -> None:
    gm = fxplug.trace(Causal().eval(), (torch.randn(2, 32, 16),))
    with pytest.raises(fxplug.ArtifactError, match="calls torch.nn.attention.flex_attention.create_block_mask, which"):
        fxplug.save(gm, tmp_path / "model.fxplug")


class Own(nn.Module):
    """Around a module whose attention is made by `make`."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Made(make)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + 1


class Made(nn.Module):
    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make, self.window = make, 3

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self, x, x.shape[1])


def _causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def _of_self(self: Any, x: Any, n: Any) -> Any:
    return flex_attention(x, x, x, lambda s, b, h, i, j: s * self.window)


def _of_functions(self: Any, x: Any, n: Any) -> Any:
    mask = create_block_mask(and_masks(_causal, lambda b, h, i, j: j > 2), None, None, x.shape[2], x.shape[2], x.device)
    return flex_attention(x, x, x, block_mask=mask)


HELD = create_block_mask(_causal, None, None, 16, 16, "cpu")


def _held(self: Any, x: Any, n: Any) -> Any:
    return flex_attention(x, x, x, block_mask=HELD)


def _size_read(self: Any, x: Any, n: Any) -> Any:
    mask = create_block_mask(_causal, None, None, x.shape[2], x.shape[2], x.device)
    return flex_attention(x, x, x, block_mask=mask) * mask.shape[-1]


def _member_read(self: Any, x: Any, n: Any) -> Any:
    mask = create_block_mask(_causal, None, None, x.shape[2], x.shape[2], x.device)
    return flex_attention(x, x, x, block_mask=mask) * mask.kv_num_blocks.sum()


def _assigned_later(self: Any, x: Any, n: Any) -> Any:
    back = 1
    mask = create_block_mask(lambda b, h, i, j: i >= j - back, None, None, x.shape[2], x.shape[2], x.device)
    back = 5
    return flex_attention(x, x, x, block_mask=mask)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_of_self, "calls, reads the variable 'self', a Made: only tensors and plain values"),
        (_of_functions, "reads the variable 'mask_mods', a tuple: only tensors and plain values"),
        (_held, "given a BlockMask that create_block_mask did not make in this forward"),
        (_size_read, "reads BlockMask.shape, which cannot be captured"),
        (_member_read, "reads BlockMask.kv_num_blocks, which cannot be captured"),
        (_assigned_later, "the variable 'back' that a mask_mod reads was assigned again"),
    ],
)
def test_what_a_graph_cannot_follow_is_refused_and_a_leaf_does_it(make: Callable[..., Any], words: str) -> None:
    model, x = Own(make).eval(), torch.randn(1, 2, 16, 8)
    with pytest.raises(fxplug.TraceError, match=words):
        fxplug.trace(model, (x,))
    if torch.__version__ < "2.14":
        pytest.skip(BROKEN)
    gm = fxplug.trace(model, (x,), leaf=["inner"], real=True)
    assert torch.equal(gm(x), model(x))


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.14", reason=BROKEN)
def test_a_model_of_diffusers_that_makes_its_mask_in_forward() -> None:
    case = next(c for c in zoo.cases() if c.name == "diffusers/AnyFlowFARTransformer3DModel")
    model = case.build().eval()
    with torch.no_grad():
        gm = fxplug.trace(model, *case.inputs())
        args, kwargs = case.inputs(2)
        assert describe_difference(model(*args, **kwargs), gm(*args, **kwargs)) is None
