"""Repeated regions as nested compile regions: found by structure, compiled once, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from diffusers import PixArtTransformer2DModel
from torch import nn

import fxplug
from fxplug.lowerings.regions.nested import nest


def vit(depth=4):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=depth, embed_dim=48, num_classes=5)
    return model.eval(), (torch.randn(2, 3, 32, 32),)


@pytest.fixture(scope="module")
def traced():
    model, args = vit()
    return model, fxplug.trace(model, args), args


def slotted(gm):
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.**", within=["Linear"], rank=2, slots=2))
    draws = torch.Generator().manual_seed(3)
    for name, layers in (("ink", range(4)), ("film", (1,))):
        down, up = torch.randn(2, 48, generator=draws), torch.randn(144, 2, generator=draws)
        state = {f"blocks.{i}.attn.qkv.lora_A.weight": down for i in layers}
        new.adapters.load(name, state | {f"blocks.{i}.attn.qkv.lora_B.weight": up for i in layers})
    return new


def counted(module, **options):
    """The module compiled by a backend that only counts: operations of the whole graph, and of the code that is nested."""
    seen = []

    def backend(graph, _):
        inner = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        seen.append([sum(n.op in ("call_function", "call_module", "call_method") for n in m.graph.nodes) for m in inner])
        return graph

    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend, **options), seen


@torch.no_grad()
def test_equal_blocks_are_one_piece_of_code(traced):
    model, gm, args = traced
    nested = nest(gm)
    assert nested.meta["nested"] == {"nested.Block": [f"blocks.{i}" for i in range(4)]}
    assert nested.state_dict().keys() == gm.state_dict().keys() and torch.equal(nested(*args), model(*args))
    call, seen = counted(gm)
    call(*args)
    call, parts = counted(nested)
    assert torch.equal(call(*args), model(*args))
    assert len(parts) == 1 and len(parts[0]) >= 2 and sum(parts[0]) < 0.6 * sum(seen[0])
    assert torch.equal(nested(torch.cat([*args, *args])), model(torch.cat([*args, *args])))


@torch.no_grad()
def test_adapters_switch_in_nested_regions(traced):
    model, gm, args = traced
    new = slotted(gm)
    for options in ({}, {"fuse": None}, {"merge": "live"}, {"merge": "live", "pack": True}):
        new.adapters.use(None)
        nested = fxplug.lower(copy.deepcopy(new), outline="auto", **options)
        assert len(nested.meta["nested"]) == 1
        call, seen = counted(nested, dynamic=True)
        for use in (None, "ink", {"ink": 0.5, "film": -1.0}, "film", None):
            new.adapters.use(use)
            nested.adapters.use(use)
            torch.testing.assert_close(call(*args), new(*args), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(call(torch.cat([*args, *args])), new(torch.cat([*args, *args])), rtol=1e-5, atol=1e-5)
        assert len(seen) == 1


def test_gradients_are_the_same(traced):
    model, gm, args = traced
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.attn.qkv", rank=2)).train()
    nested = nest(new)
    weights = [p for name, p in new.named_parameters() if name.startswith("lora.")]
    for w in weights:
        nn.init.normal_(w, std=0.1)
    expected = torch.autograd.grad(new(*args).square().sum(), weights)
    for module in (nested, torch.compile(nested, fullgraph=True, backend="aot_eager")):
        found = torch.autograd.grad(module(*args).square().sum(), [nested.get_parameter(n) for n, p in new.named_parameters()
                                                                    if n.startswith("lora.")])  # fmt: skip
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_alike_is_what_computes_the_same_from_the_same_sizes():
    """Blocks of other widths or other code are of another kind, whatever their names."""
    class Pair(nn.Module):
        def __init__(self, width, act):
            super().__init__()
            self.one, self.act, self.two = nn.Linear(width, width), act, nn.Linear(width, width)

        def forward(self, x):
            y = self.two(self.act(self.one(x)))
            return ((x + y) * 0.5).tanh().sin().cos().exp().neg() + y.mean(-1, keepdim=True).sigmoid()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = nn.ModuleDict({"ann": Pair(8, nn.GELU()), "bob": Pair(8, nn.GELU()), "eve": Pair(8, nn.ReLU())})
            self.wide = nn.ModuleList([Pair(16, nn.GELU()), Pair(16, nn.GELU())])

        def forward(self, x):
            for name in ("ann", "eve", "bob"):
                x = self.odd[name](x)
            x = torch.cat([x, x], -1)
            return self.wide[1](self.wide[0](x))

    model, x = Net().eval(), torch.randn(3, 8)
    nested = nest(fxplug.trace(model, (x,)), ["odd.*", "wide.*"])
    assert sorted(map(sorted, nested.meta["nested"].values())) == [["odd.ann", "odd.bob"], ["wide.0", "wide.1"]]
    assert torch.equal(nested(x), model(x))


def test_what_cannot_be_nested_says_why(traced):
    _, gm, args = traced
    with pytest.raises(fxplug.MatchError, match="nothing would compile less often"):
        nest(fxplug.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),)))
    with pytest.raises(fxplug.MatchError, match="no region"):
        nest(gm, ["blokcs.*"])
    with pytest.raises(fxplug.SpecError, match=r"write \['blocks.\*'\]"):
        nest(gm, "blocks.*")
    with pytest.raises(fxplug.SpecError, match="outlined already"):
        nest(nest(gm))


@torch.no_grad()
def test_a_transformer_for_diffusion_at_other_sizes():
    torch.manual_seed(0)
    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=3, cross_attention_dim=16,
        sample_size=8, patch_size=2, caption_channels=16,
    ).eval()  # fmt: skip
    kwargs = {
        "hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 16),
        "timestep": torch.tensor([1, 2]), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "return_dict": False,
    }  # fmt: skip
    nested = nest(fxplug.trace(model, kwargs=kwargs))
    assert list(map(len, nested.meta["nested"].values())) == [3]
    call, seen = counted(nested, dynamic=True)
    for batch in (2, 3):
        kwargs |= {"hidden_states": torch.randn(batch, 4, 8, 8), "encoder_hidden_states": torch.randn(batch, 5, 16)}
        kwargs["timestep"] = torch.arange(batch)
        torch.testing.assert_close(call(**kwargs)[0], model(**kwargs)[0], rtol=1e-5, atol=1e-5)
    assert len(seen) == 1


def test_weights_that_share_memory_are_not_nested_apart():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            q, k, v = self.q(x), self.k(x), self.v(x)
            return x + self.o((q @ k.transpose(-1, -2) / 3).softmax(-1) @ v).tanh().sin().cos()

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Attention() for _ in range(3))).eval(), torch.randn(2, 4, 8)
    gm = fxplug.trace(model, (x,))
    packed = fxplug.lower(gm, pack=True, fuse=None, outline=["*"])
    with torch.no_grad():
        call, seen = counted(packed)
        torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(fxplug.SpecError, match="share memory since this module was packed"):
        nest(gm, ["*"])


def test_what_is_compiled_with_gradients_is_flat(traced):
    """torch 2.15 writes over what a nested region keeps for the backward pass: silently wrong gradients."""
    _, gm, args = traced
    call, seen = counted(nest(gm))
    call(*args)
    assert len(seen) == 1 and len(seen[0]) == 1


def test_results_are_no_views():
    """A compiled caller would write over one of them when it no longer needs the other."""

    class Part(nn.Module):
        def __init__(self, view):
            super().__init__()
            self.one, self.two, self.view = nn.Linear(6, 6), nn.Linear(6, 6), view

        def forward(self, x):
            y = self.two(self.one(x).tanh().sin().cos().exp().neg())
            return (y, x.chunk(2, -1)[0]) if self.view == "input" else (y, y[..., :3])

    class Net(nn.Module):
        def __init__(self, view):
            super().__init__()
            self.parts = nn.ModuleList([Part(view) for _ in range(3)])

        def forward(self, x):
            for part in self.parts:
                x, half = part(x)
                x = x + torch.cat([half, half], -1)
            return x

    for view, reason in (("input", "a view of what enters it"), ("result", "views of one tensor")):
        gm = fxplug.trace(Net(view).eval(), (torch.randn(2, 6),))
        with pytest.raises(fxplug.SpecError, match=f"'parts.0' .*{reason}.*: name a region around it"):
            nest(gm, ["parts.*"])
        with pytest.raises(fxplug.MatchError):
            nest(gm)
