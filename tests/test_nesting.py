"""Repeated regions as calls of shared code: found by structure, compiled once, and nothing else changes."""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor

import processes
import pytest
import small
import timm
import torch
from diffusers import PixArtTransformer2DModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxplug
from fxplug.core.torch_internals.modules import is_listening
from fxplug.lowerings.regions.nested import nest

# torch reads it of what a region is given, and hides the warning unless it is an error
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def vit(**options):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 48, "num_classes": 5} | options
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
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


def operations(graph):
    return sum(n.op in ("call_function", "call_module", "call_method") for n in graph.nodes)


def counted(module, backend="eager", **options):
    """The compiled module, and the operations of each program that it was compiled to, nested ones apart."""
    seen = []

    def counting(graph, example):
        inner = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        seen.append([operations(m.graph) for m in inner])
        return torch._dynamo.lookup_backend(backend)(graph, example)

    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=counting, **options), seen


@pytest.mark.slow
@torch.no_grad()
def test_equal_blocks_are_one_program(traced):
    model, gm, args = traced
    nested = nest(gm)
    assert nested.meta["nested"] == {"nested.Block": [f"blocks.{i}" for i in range(4)]}
    assert nested.state_dict().keys() == gm.state_dict().keys() and torch.equal(nested(*args), model(*args))
    call, seen = counted(gm)
    call(*args)
    for call, parts in (counted(nested), counted(copy.deepcopy(nested))):
        assert torch.equal(call(*args), model(*args))
        assert len(parts) == 1 and len(parts[0]) == 1 and parts[0][0] < 0.4 * seen[0][0]
    assert torch.equal(nested(torch.cat([*args, *args])), model(torch.cat([*args, *args])))


@torch.no_grad()
def test_what_is_compiled_around_is_one_graph_with_nested_regions(traced):
    model, gm, args = traced
    call, seen = counted(nn.Sequential(nest(gm), nn.Identity()))
    assert torch.equal(call(*args), model(*args))
    assert len(seen) == 1 and len(seen[0]) >= 2


@pytest.mark.slow
@torch.no_grad()
def test_adapters_switch_in_nested_regions(traced):
    model, gm, args = traced
    new = slotted(gm)
    for options in ({}, {"fuse": None}, {"merge": "live"}):
        new.adapters.use(None)
        nested = fxplug.lower(copy.deepcopy(new), outline="auto", **options)
        assert len(nested.meta["nested"]) == 1
        call, seen = counted(nested)
        for use in (None, "ink", {"ink": 0.5, "film": -1.0}, "film", None):
            new.adapters.use(use)
            nested.adapters.use(use)
            torch.testing.assert_close(call(*args), new(*args), rtol=1e-5, atol=1e-5)
        assert len(seen) == 1
        for batch in (4, 6):
            x = torch.cat([*args] * (batch // 2))
            torch.testing.assert_close(call(x), new(x), rtol=1e-5, atol=1e-5)
        assert len(seen) == 2  # one for any batch


# --- gradients


def model_in_training(**options):
    """A model in training, with dropout, and LoRA that does something; outlined; their inputs."""
    torch.manual_seed(0)
    model, (x,) = vit(proj_drop_rate=0.3, **options)
    new = fxplug.apply(fxplug.trace(model.train(), (x,)), fxplug.load_pass("lora", at="attn.qkv", rank=2, dropout=0.2)).train()
    for name, parameter in new.named_parameters():
        if name.startswith("lora."):
            nn.init.normal_(parameter, std=0.1)
    return new, nest(new), x


@pytest.fixture(scope="module")
def trained():
    return model_in_training()


def learned(call, x, gm):
    """The result and the gradients of what trains, by name, with the same random numbers each time."""
    torch.manual_seed(5)
    names = [name for name, p in gm.named_parameters() if p.requires_grad]
    out = call(x)
    grads = torch.autograd.grad(out.square().sum(), [gm.get_parameter(name) for name in names])
    return out.detach(), dict(zip(names, grads, strict=True))


def hold_same(call, new, nested, x):
    (out, grads), (wanted, others) = learned(call, x, nested), learned(new, x, new)
    assert torch.equal(out, wanted) and grads.keys() == others.keys()
    assert [name for name in grads if not torch.equal(grads[name], others[name])] == []


@pytest.mark.slow
def test_gradients_are_the_same_with_dropout_other_batches_autocast_and_checkpoints(trained):
    new, nested, x = trained
    call, seen = counted(nested, "aot_eager")
    hold_same(call, new, nested, x)
    assert len(seen) == 1 and not torch.equal(call(x), call(x))
    for batch in (3, 5):
        hold_same(call, new, nested, torch.randn(batch, 3, 32, 32))
    assert len(seen) == 2  # one for any batch
    hold_same(lambda x: checkpoint(call, x, use_reentrant=False), new, nested, x)
    nested.eval(), new.eval()
    hold_same(call, new, nested, x)
    exact = learned(new, x, new)[1]
    with torch.autocast("cpu", torch.bfloat16):  # a compiled program casts, and so rounds, in other places
        (out, grads), (wanted, others) = learned(call, x, nested), learned(new, x, new)
    assert torch.equal(out, wanted) and out.dtype == torch.bfloat16
    ours, theirs = (sum(float((found[name] - exact[name]).square().sum()) for name in exact) for found in (grads, others))
    assert ours < 1.5 * theirs
    nested.train(), new.train()


@pytest.mark.slow
def test_layers_that_train_or_not_as_they_come(trained):
    """Kinds are told apart by what trains when they are made; what is frozen or not later makes programs, not an error."""
    new, nested, x = trained
    call, seen = counted(nested, "aot_eager")
    state = random.Random(0)
    try:
        for first in (4, 2, 0):
            for name, p in new.named_parameters():
                p.requires_grad_(not name.startswith("blocks.") or int(name.split(".")[1]) >= first)
            hold_same(call, new, nested, x)
        assert len(seen) == 2
        with torch._dynamo.config.patch(recompile_limit=2):  # for one call, and four are of this code
            for p in new.parameters():
                p.requires_grad_(state.random() < 0.5)
            hold_same(call, new, nested, x)
        assert len(seen) > 2
    finally:
        new.requires_grad_(True)


@pytest.mark.slow
def test_threads_and_errors_leave_the_compiler_as_it_was(trained):
    new, nested, _ = trained
    call, seen = counted(nested.eval(), "aot_eager")
    new.eval()
    with pytest.raises(fxplug.core.errors.GuardError):
        call(torch.randn(2, 3, 40, 32))
    assert not is_listening()
    inputs = [torch.full((2, 3, 32, 32), float(i)) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: learned(call, x, nested), inputs))
    for x, (out, grads) in zip(inputs, found, strict=True):
        wanted, others = learned(new, x, new)
        assert torch.equal(out, wanted) and all(torch.equal(grads[name], others[name]) for name in others)
    assert not is_listening() and 1 <= len(seen) <= 4
    nested.train(), new.train()


@pytest.mark.slow
def test_under_ddp(trained):
    new, nested, x = trained
    with processes.alone():
        call, seen = counted(nested, "aot_eager")
        runner = DistributedDataParallel(call)
        torch.manual_seed(5)
        runner(x).square().sum().backward()
        _, wanted = learned(new, x, new)
        assert all(torch.equal(nested.get_parameter(name).grad, value) for name, value in wanted.items())
        assert len(seen) == 1
    nested.zero_grad()


@pytest.mark.slow
def test_gradients_of_what_inductor_compiles():
    new, nested, x = model_in_training(depth=3)
    torch._dynamo.reset()
    nested.eval(), new.eval()
    wanted = learned(new, x, new)
    around = torch.compile(nn.Sequential(nested), fullgraph=True, backend="aot_eager")  # inductor gets the same program
    for call in (torch.compile(nested, fullgraph=True), around):
        out, grads = learned(call, x, nested)
        torch.testing.assert_close(out, wanted[0], rtol=1e-5, atol=1e-5)
        for name, value in wanted[1].items():
            torch.testing.assert_close(grads[name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="torch 2.15 gives the memory of what a nested region keeps for the backward pass away")
def test_torch_itself_computes_gradients_through_nested_regions():
    """docs/contributing.md tells why they are wrong. When this passes, `Nested` may be nested with gradients too."""

    def region(x, w):
        return x + x @ w

    def net(f, x, w):
        for _ in range(3):
            x = f(x, w)
        return x.sin()

    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = torch.randn(8, 8), (torch.randn(8, 8) / 3).requires_grad_()
    (wanted,) = torch.autograd.grad(net(region, x + 1, w).sum(), w)
    nested = torch.compiler.nested_compile_region(region)
    (found,) = torch.autograd.grad(torch.compile(lambda x, w: net(nested, x + 1, w), fullgraph=True)(x, w).sum(), w)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


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
    with pytest.raises(fxplug.MatchError, match="outlining saves no compilation"):
        nest(fxplug.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),)))
    with pytest.raises(fxplug.MatchError, match="no region"):
        nest(gm, ["blokcs.*"])
    with pytest.raises(fxplug.SpecError, match=r"write \['blocks.\*'\]"):
        nest(gm, "blocks.*")
    with pytest.raises(fxplug.SpecError, match="outlined already"):
        nest(nest(gm))


@pytest.mark.slow
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
    whole = torch.randn(16, 8)
    gm.get_submodule("0.q").weight.data, gm.get_submodule("0.k").weight.data = whole[:8], whole[8:]
    with pytest.raises(fxplug.SpecError, match="'0' cannot be outlined, because it reads two weights that share memory"):
        nest(gm, ["*"])


@pytest.mark.slow
def test_what_is_compiled_around_with_gradients_is_flat(traced):
    _, gm, args = traced
    call, seen = counted(nn.Sequential(nest(gm)))
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

    for view, reason in (("input", "a view of its input"), ("result", "views of one tensor")):
        gm = fxplug.trace(Net(view).eval(), (torch.randn(2, 6),))
        with pytest.raises(fxplug.SpecError, match=f"'parts.0' .*{reason}.*: name a region around it"):
            nest(gm, ["parts.*"])
        with pytest.raises(fxplug.MatchError):
            nest(gm)


class Weightless(nn.Module):
    def forward(self, x, sharp):
        y = torch.tanh(x)
        return (y * 2 + x).relu() * 0.5 if sharp else (y * 3 - x).relu() * 0.25


class Weighted(nn.Module):
    """A layer, and a table that is no buffer: a cast leaves it as it is."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), torch.arange(8.0) / 7

    def forward(self, x, sharp):
        y = self.layer(x)
        return x + (torch.sin(y) * y if sharp else y) + (y.float() * self.table).to(x.dtype)


class Drawing(nn.Module):
    """It draws before it looks at the dtype."""

    def forward(self, x, sharp):
        noise = torch.rand(8)
        return x * noise if x.dtype == torch.float32 else x - noise.to(x.dtype)


def repeated(kind):
    torch.manual_seed(0)
    parts = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x, sharp=False):
        x = self.first(x)
        for part in self.parts:
            x = part(x, sharp)
        return x

    return small.net(forward, first=nn.Linear(8, 8), parts=parts).eval(), torch.randn(2, 3, 8)


@pytest.mark.parametrize("kind", [Weightless, Weighted])
@torch.no_grad()
def test_another_form_of_call_has_regions_of_its_own(kind):
    model, x = repeated(kind)
    nested = fxplug.lower(fxplug.variants(fxplug.trace(model, x), model), fuse=None, outline=["parts.*"])
    for sharp in (False, True, False):
        assert torch.equal(nested(x, sharp=sharp), model(x, sharp=sharp))
    assert nested.variants == ["sharp=True"]
    again = copy.deepcopy(nested)
    assert all(torch.equal(again(x, sharp=sharp), model(x, sharp=sharp)) for sharp in (False, True))
    nested.bfloat16(), model.bfloat16()
    x = x.bfloat16()
    assert all(torch.equal(nested(x, sharp=sharp), model(x, sharp=sharp)) for sharp in (False, True))
    assert nested.variants == ["sharp=True", "x: bfloat16 of 3 dimensions", "sharp=True, x: bfloat16 of 3 dimensions"]
    compiled, _ = counted(nested)
    for sharp in (False, True):
        torch.testing.assert_close(compiled(x, sharp=sharp), model(x, sharp=sharp))


@torch.no_grad()
def test_a_region_decides_by_what_autocast_makes_of_its_input():
    model, x = repeated(Weighted)
    nested = fxplug.lower(fxplug.variants(fxplug.trace(model, x), model), fuse=None, outline=["parts.*"])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nested(x), model(x))
    assert torch.equal(nested(x), model(x))


@torch.no_grad()
def test_a_call_whose_regions_have_drawn_is_not_made_again():
    model, x = repeated(Drawing)
    nested = fxplug.lower(fxplug.variants(fxplug.trace(model, x), model), fuse=None, outline=["parts.*"])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fxplug.GuardError, match="now it is torch.bfloat16"):
        nested(x)


def test_what_the_code_of_a_region_holds_keeps_its_dtype():
    model, x = repeated(Weighted)
    gm = fxplug.trace(model, x)
    for module in (gm, nest(gm, ["parts.*"])):
        assert {b.dtype for b in module.bfloat16().buffers()} == {torch.float32}
