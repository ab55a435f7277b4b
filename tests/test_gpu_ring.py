"""A ring's attention on a GPU."""

from __future__ import annotations

import pytest
import torch

from fxplug.parallel.runtime.attention import Attention
from fxplug.parallel.runtime.collectives import Gather, Split
from fxplug.parallel.runtime.mesh import fill_degrees
from fxplug.parallel.runtime.pretended import run_simulated


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_ring_gives_what_the_whole_gives(dtype):
    """On pretended processes: the flash kernels' parts and gradients, merged by their denominators."""
    ways = fill_degrees({"ring": 3})
    split, gather = (kind(ways, "sequence", 2) for kind in (Split, Gather))
    given = [torch.randn(2, 4, 77, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    weights = torch.randn_like(given[0])
    high = [t.detach().double().requires_grad_() for t in given]
    one = torch.nn.functional.scaled_dot_product_attention(*high)
    want = torch.autograd.grad((one * weights).sum(), high)

    def run(rank):
        out = gather(Attention(ways)(*(split(t, 77) for t in given), None, None, 77, 77), 77)
        return out, torch.autograd.grad((out * weights).sum(), given)

    close = 1e-4 if dtype == torch.float32 else 3e-2
    found = run_simulated(ways, run)
    assert all(torch.allclose(out.double(), one, rtol=close, atol=close) for out, _ in found)
    for index, gradient in enumerate(want):
        assert torch.allclose(sum(g[index].double() for _, g in found) / 3, gradient, rtol=close, atol=close)
