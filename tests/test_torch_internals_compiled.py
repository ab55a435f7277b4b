"""What we need of torch that it does not promise, where it computes, compiles and packs: what would show late."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxplug.core.torch_internals import exporting, modules, tensors

# --- kernels


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_attention_gives_its_denominators(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, 2, 8, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    given = q.detach(), k.detach(), v.detach()
    if device == "cpu":
        out, weight = tensors.flash_cpu(*given, scale=0.25)
    else:
        out, weight, *extra = tensors.flash_cuda(*given, scale=0.25)
    near = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    said = "parts of a ring would be merged with wrong weights"
    torch.testing.assert_close(weight, (q @ k.mT * 0.25).float().logsumexp(-1), **near, msg=lambda m: f"{said}: {m}")
    wanted = F.scaled_dot_product_attention(q, k, v, scale=0.25)
    torch.testing.assert_close(out, wanted, **near)
    grad = torch.ones_like(out)
    if device == "cpu":
        back = tensors.flash_cpu_backward(grad, *given, out, weight, 0.0, False, attn_mask=None, scale=0.25)
    else:
        firsts, lasts, most, _, state, unused, *_ = extra
        more = firsts, lasts, most, 8, 0.0, False, state, unused
        back = tensors.flash_cuda_backward(grad, *given, out, weight, *more, scale=0.25)
    for mine, other in zip(back[:3], torch.autograd.grad(wanted, (q, k, v), grad), strict=True):
        torch.testing.assert_close(mine, other, **near)


def test_attention_on_a_gpu_is_there():
    found = {a.name for a in tensors.schema(tensors.flash_cuda_backward.default).arguments}
    assert {"logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "scale"} <= found
    assert [r.name for r in tensors.schema(tensors.flash_cuda.default).returns][:2] == ["output", "logsumexp"]


# --- compiling


class Graphs:
    """A backend that counts what it is given."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph, inputs):
        self.seen.append([node.target for node in graph.graph.nodes if node.op in ("call_function", "call_method")])
        return graph.forward


def inner(x):
    return torch.relu(x)


def left(x):
    kept.append(torch.compiler.is_dynamo_compiling())
    return inner(torch.neg(x))


kept: list = []


def test_a_frame_that_is_left_runs_as_it_stands_and_what_it_calls_is_compiled():
    modules.leave_frame(left.__code__)
    torch._dynamo.reset()
    graphs_of = Graphs()
    torch.compile(left, backend=graphs_of)(torch.ones(2))
    assert kept == [False] and graphs_of.seen == [[torch.relu]], (
        "the wrapper around a traced module's forward would be compiled with it, with what keeps its calls in turn: "
        "every change of an adapter would compile again"
    )


# --- packaging


class Guarded(nn.Module):
    def forward(self, x):
        if x.shape[0] > 3:
            return x * 2
        return x


def test_the_guards_of_a_program_are_told():
    program = torch.export.export(Guarded(), (torch.ones(5, 2),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    guards = exporting.list_guards(program)
    assert any("x" in text and "[0]" in text and any(digit in text for digit in "34") for text in guards), (
        f"a program that holds for more than 3 rows says {guards}: a package would take other inputs and compute wrong results"
    )


# --- onnx


class Eigen(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x + x.mT)


@pytest.mark.slow
def test_what_onnx_lacks_is_told_with_its_line():
    program = torch.export.export(Eigen(), (torch.ones(2, 2),))
    with pytest.raises(RuntimeError) as caught:
        exporting.translate(program, exporting.DEFAULT)
    ((operation, stack),), reason = exporting.find_untranslated(program, exporting.DEFAULT, caught.value)
    assert str(operation) == "aten._linalg_eigh.default" and "eigvalsh" in stack and "No ONNX function" in reason, (
        "an operation that ONNX lacks would be told without its place in the model"
    )
