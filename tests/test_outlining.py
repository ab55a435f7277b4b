"""Regions as submodules again: the same numbers, fewer saved activations, the same names."""

from __future__ import annotations

import copy

import pytest
import small
import timm
import torch
import torch.nn.functional as F
import unets
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks

import fxplug
from fxplug.blocks.lora import Lora
from fxplug.core.ir.containers import list_leaves
from fxplug.lowerings.regions.submodules import get_originals, outline

UNET = ["**.resnets.*", "**.attentions.*"]


def lora(base, at="**", **options):
    return small.seeded(lambda: fxplug.apply(base.gm, fxplug.load_pass("lora", at=at, rank=4, **options)))


def loud(gm):
    """Adapters that are not neutral any more, so that a lost one would show."""
    for name, parameter in gm.named_parameters():
        if name.startswith(("lora", "skip", "controlnet")) and not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return gm


def run(module, gm, base, call=None):
    """Results, gradients by the original names, and weights and buffers afterwards, which are put back."""
    before = {k: v.clone() for k, v in gm.state_dict().items()}
    for parameter in gm.parameters():
        parameter.grad = None
    torch.manual_seed(3)
    args, kwargs = ((), call) if call else (base.args, base.kwargs)
    out = [x for x in list_leaves(module(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    sum(x.square().mean() for x in out).backward()
    grads = {k: None if p.grad is None else p.grad.clone() for k, p in gm.named_parameters()}
    after = {k: v.clone() for k, v in gm.state_dict().items()}
    with torch.no_grad():
        for key, value in gm.state_dict().items():
            value.copy_(before[key])
    return {"out": dict(enumerate(out)), "grads": grads, "state": after}


def differences(ours, theirs):
    return [
        (kind, key)
        for kind in theirs
        for key, value in theirs[kind].items()
        if (value is None) != (ours[kind][key] is None) or (value is not None and not torch.equal(value, ours[kind][key]))
    ]


def hold_equal(gm, base, regions=None, call=None, modes=(True, False)):
    """Outlined and checkpointed give the bits of the module they come from; gives the checkpointed one."""
    theirs = {mode: run(gm.train(mode), gm, base, call) for mode in modes}
    for checkpoint in (False, True):
        made = outline(gm, regions, checkpoint=checkpoint)
        assert {id(p) for p in made.parameters()} == {id(p) for p in gm.parameters()}
        for mode in modes:
            gm.train(mode)
            made.train(mode)
            assert differences(run(made, gm, base, call), theirs[mode]) == []
    return made


def saved_bytes(call):
    """What autograd keeps for the backward pass, each memory once."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = call()
    return sum(kept.values()), out


# --- the same numbers


@pytest.mark.parametrize("regions", [["blocks.*"], ["blocks.*.attn", "blocks.{1:}.mlp"], ["re:blocks\\.1$", "norm"], None])
def test_a_vit_with_lora_and_dropout(regions):
    gm = loud(lora(small.vit(), dropout=0.1))
    made = hold_equal(gm, small.vit(), regions)
    assert len(gm.graphs) == 2 == len(made.graphs)


@pytest.fixture(scope="module")
def controlled():
    """A UNet with a ControlNet, LoRA, and a skip from one region to another, and a call of it."""
    base = unets.sd15_deep()
    network = small.seeded(lambda: unets.control(base.model))
    skip = fxplug.load_pass("skip", **{"from": "down_blocks.0.resnets.0", "to": "up_blocks.2.resnets.1"})
    passes = [fxplug.load_pass("controlnet", network=network), fxplug.load_pass("lora", at="**.attn*.*", rank=2), skip]
    call = {**base.kwargs, "cond": unets.picture(base), "strength": torch.tensor(0.6)}
    return loud(fxplug.apply(base.gm, *passes)).train(), base, call


@pytest.mark.parametrize(
    "regions",
    [
        pytest.param(UNET, marks=pytest.mark.slow),
        pytest.param(["**.transformer_blocks.*", "up_blocks.{1:}"], marks=pytest.mark.slow),
        ["controlnet.**.resnets.*"],
        pytest.param(None, marks=pytest.mark.slow),
    ],
)
def test_a_unet_with_lora_a_skip_and_a_controlnet(controlled, regions):
    gm, base, call = controlled
    found = hold_equal(gm, base, regions, call, modes=(True,)).meta["regions"]
    inner = [key for key in found if key.startswith("controlnet.")]
    # a pattern does not reach into a pass's network unless it says so
    assert len(found) > 3 and (len(inner) > 0) == (regions is None or regions[0].startswith("controlnet"))


@pytest.mark.slow
def test_sdxl_and_a_transformer():
    hold_equal(loud(lora(unets.sdxl(), at="**.attn*.to_q")), unets.sdxl(), modes=(True,))
    from diffusers import PixArtTransformer2DModel

    model = small.seeded(
        lambda: PixArtTransformer2DModel(
            sample_size=8, num_layers=3, patch_size=2, attention_head_dim=4, num_attention_heads=2, in_channels=4,
            cross_attention_dim=8, out_channels=8, caption_channels=8, dropout=0.1, use_additional_conditions=False)
    )  # fmt: skip
    words = torch.randn(2, 3, 8)
    base = small.traced(model, torch.randn(2, 4, 8, 8), encoder_hidden_states=words, timestep=torch.tensor([3, 400]))
    made = hold_equal(loud(lora(base, at="**.attn*.to_q")), base)
    assert list(made.meta["regions"]) == [f"transformer_blocks.{i}" for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("regions", [["blocks.*"], None])
def test_batch_norms_of_checkpointed_regions_move_once(regions):
    """The second run must neither see nor move statistics that the first has moved."""
    base = small.lite()
    gm = loud(lora(base, at="blocks.**"))
    made = hold_equal(gm, base, regions)
    gm.train()
    after, before = run(made.train(), gm, base)["state"], gm.state_dict()
    assert any("running_mean" in k and not torch.equal(v, before[k]) for k, v in after.items())


def test_blocks_that_write_buffers_write_once():
    passes = [fxplug.load_pass("spectral_norm", at="blocks.*.mlp.*"), fxplug.load_pass("dora", at="**.qkv")]
    gm = fxplug.apply(small.vit().gm, *passes)
    hold_equal(gm, small.vit(), ["blocks.*"])


class Odd(nn.Module):
    """A layer called twice, tied weights, autocast and no_grad inside a region, several results, a buffer read in two."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(3)])
        self.parts[2].one.weight = self.parts[0].one.weight
        self.again = Part()

    def forward(self, x):
        kept = []
        for part in self.parts:
            x, *more = part(x, scale=2)
            kept.append(more[0]["half"])
        return self.again(self.again(x)[0])[0] + sum(kept), kept[1].shape[0]


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x, scale=1):
        with torch.no_grad():
            mean = x.mean(-1, keepdim=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.one(x - mean)
        y = F.dropout(self.two(y.float()).mul_(scale) + self.shift, 0.2, self.training)
        return F.relu(y, inplace=True), {"half": y * 0.5}


@pytest.mark.parametrize("regions", [["parts.*", "again"], ["parts.{0}", "again@1"], ["**.two"], None])
def test_scopes_ties_second_calls_and_several_results(regions):
    base = small.traced(small.seeded(Odd), torch.randn(4, 8))
    made = hold_equal(loud(lora(base)), base, regions)
    if regions == ["parts.*", "again"]:
        assert list(made.meta["regions"]) == ["parts.0", "parts.1", "parts.2", "again"]


def test_names_signature_and_tree():
    import inspect

    gm = lora(small.vit())
    made = outline(gm, ["blocks.*"])
    assert inspect.signature(made.forward) == inspect.signature(gm.forward)
    assert set(get_originals(made)) == set(dict(gm.named_parameters())) | set(dict(gm.named_buffers()))
    assert all(value is gm.get_parameter(name) for name, value in get_originals(made).items() if "Lora.scale" not in name)
    region = made.get_submodule(made.meta["regions"]["blocks.1"])
    own = [name for name, _ in region.named_parameters()]
    assert "blocks.1.attn.qkv.weight" in own and "lora.blocks.1.attn.qkv.Lora.down.weight" in own
    assert not any(name.startswith(("blocks.0", "lora.blocks.0", "head")) for name in own)
    called = [n.target for n in made.graph.nodes if n.op == "call_module"]
    assert [target for target in called if target.startswith("regions.")] == list(made.meta["regions"].values())
    assert "blocks" not in dict(made.named_children())  # what a region uses lies in it alone
    twin = copy.deepcopy(made).eval()
    with torch.no_grad():
        assert torch.equal(twin(*small.vit().args), gm.eval()(*small.vit().args))
    assert not gm.meta.get("regions") and "blocks" in dict(gm.named_children())


# --- checkpoints


def test_checkpoints_keep_less_in_both_modes():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6, num_classes=10).eval()
    base = small.traced(model, torch.randn(2, 3, 64, 64))
    gm = lora(base)
    for name, parameter in gm.named_parameters():
        parameter.requires_grad_(name.startswith("lora."))
    plain, _ = saved_bytes(lambda: gm.train()(*base.args))
    made = outline(gm, checkpoint=True)
    assert list(made.meta["regions"]) == [f"blocks.{i}" for i in range(6)]
    kept, out = saved_bytes(lambda: made.train()(*base.args))
    assert kept < 0.4 * plain
    out.square().mean().backward()
    assert all(p.grad is not None for name, p in gm.named_parameters() if name.startswith("lora."))
    made.eval()
    for block in (m for m in made.modules() if isinstance(m, Lora)):
        block.train()  # a base as in evaluation, with blocks that train
    assert saved_bytes(lambda: made(*base.args))[0] < 0.4 * plain
    with torch.no_grad():
        assert torch.equal(made(*base.args), gm.eval()(*base.args))


def compiled(module, backend):
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, fullgraph=True)


def few_stages():
    """EfficientNet's first stages, by its own builder: what is compiled costs by the layer."""
    stages = [["ds_r1_k3_s1_e1_c8"], ["ir_r3_k3_s2_e2_c12"]]
    model = EfficientNet(decode_arch_def(stages), num_classes=5, stem_size=8, num_features=24, pad_type="same")
    return small.traced(model.eval(), torch.randn(2, 3, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vit", "unet", "lite"])
def test_gradients_under_compile(case):
    base = {"vit": small.vit, "unet": small.unet, "lite": lambda: small.seeded(few_stages)}[case]()
    gm = loud(lora(base, at="re:.*(attn|conv_pw).*")).train(case != "vit")  # its dropout would be drawn by another generator
    made = outline(gm, ["blocks.*"] if case == "vit" else None, checkpoint=True)
    theirs = run(compiled(gm, "aot_eager"), gm, base)
    assert differences(run(compiled(made, "aot_eager"), gm, base), theirs) == []


@pytest.mark.slow
def test_one_graph_with_a_checkpoint_a_region():
    base = small.vit()
    gm = lora(base, dropout=0.1)
    counter = CompileCounterWithBackend("eager")
    compiled(outline(gm, ["blocks.*"], checkpoint=True).train(), counter)(*base.args)
    wrapped = [n for n in counter.graphs[0].graph.nodes if "checkpoint" in str(n.target)]
    assert counter.frame_count == 1 and len(wrapped) == 2


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])

    def forward(self, x):
        x = x * 1
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_region_that_changes_its_input_cannot_be_checkpointed():
    base = small.traced(InPlace(), torch.randn(2, 4))
    gm = base.gm
    assert len(outline(gm, ["layers.*"]).meta["regions"]) == 3
    with pytest.raises(fxplug.SpecError, match="'layers.0' cannot be checkpointed, because '.*' changes its input in place"):
        outline(gm, ["layers.*"], checkpoint=True)
    with pytest.raises(fxplug.MatchError, match="the model has no repeated regions"):
        outline(gm, checkpoint=True)


def test_an_input_that_changes_after_the_region_ran():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            x = x * 2
            y = self.a(x)
            return y + x.add_(1)

    base = small.traced(Later(), torch.randn(2, 4))
    out = outline(base.gm, ["a"], checkpoint=True).train()(*base.args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch's own check, not a wrong gradient
        out.sum().backward()


# --- what is chosen


def test_regions_are_found_by_structure():
    found = list(outline(lora(unets.sdxl(), at="**.to_q")).meta["regions"])
    assert {key.split(".")[-2] for key in found} <= {"resnets", "attentions", "transformer_blocks"}
    assert sum("resnets" in key for key in found) == 11 and sum("attentions" in key for key in found) == 7
    found = list(outline(small.lite().gm).meta["regions"])
    assert {"blocks.3.1", "blocks.4.2", "blocks.5.3"} <= set(found)
    assert not any(a != b and f"{a}.".startswith(f"{b}.") for a in found for b in found)


@pytest.mark.slow
def test_sdxl_itself_is_outlined_as_fast_as_it_is_traced():
    import time

    model, call = unets.sdxl_full()
    begun = time.process_time()
    gm = fxplug.trace(model, (), call)
    traced = time.process_time()
    found = list(outline(gm, checkpoint=True).meta["regions"])
    assert time.process_time() - traced < 2 * (traced - begun)
    assert sum("transformer_blocks" in key for key in found) == 70 and sum("resnets" in key for key in found) == 17


# --- what is refused


@pytest.mark.parametrize(
    ("regions", "kind", "text"),
    [
        (["block.*"], fxplug.MatchError, "no region to outline matches 'block.*'\n.*\n    blocks.1"),
        (["blocks.0.atn"], fxplug.MatchError, "did you mean 'blocks.0.attn'"),
        (["blocks.{0:9}"], fxplug.MatchError, "goes up to 9, but 'blocks' has 2"),
        (["re:blocks[", "blocks.0"], fxplug.SpecError, "not a regular expression"),
        ("blocks.*", fxplug.SpecError, "write \\['blocks.\\*'\\]"),
    ],
)
def test_patterns_that_do_not_fit(regions, kind, text):
    with pytest.raises(kind, match=text):
        outline(small.vit().gm, regions)


def test_of_nested_regions_the_outer_one():
    assert list(outline(small.vit().gm, ["blocks.**", "blocks.1"]).meta["regions"]) == ["blocks.0", "blocks.1"]


class Side(nn.Module):
    def __init__(self, width=192):
        super().__init__()
        self.net = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.net(x))


def test_a_region_that_a_network_leaves_and_enters_again():
    rule = fxplug.Rule(fxplug.Match("blocks.0.mlp"), use="fxplug.blocks:Skip", args=["value", "side.net:out"])
    p = fxplug.Pass("side", [rule], networks={"net": {"use": Side(), "args": ["blocks.0.attn"]}})
    gm = fxplug.apply(small.vit().gm, p)
    with pytest.raises(fxplug.SpecError, match="'blocks.0' cannot be one unit: values leave it and come back into it"):
        outline(gm, ["blocks.*"])
    made = hold_equal(loud(gm), small.vit(), ["blocks.1", "blocks.0.*"])
    assert "blocks.0.attn" in made.meta["regions"]
    hold_equal(gm, small.vit())


def test_only_a_traced_module_and_only_once():
    with pytest.raises(fxplug.SpecError, match="takes a traced module, not Linear"):
        outline(nn.Linear(2, 2))
    with pytest.raises(fxplug.SpecError, match="outlined already"):
        outline(outline(small.vit().gm, ["blocks.*"]))


def test_passes_go_to_what_an_outlined_module_was_made_from():
    outlined, lora = outline(small.vit().gm, ["blocks.*"]), fxplug.load_pass("lora", at="blocks.*.attn.qkv")
    for call in (fxplug.find, fxplug.apply):
        with pytest.raises(fxplug.SpecError, match="regions as modules of their own: apply passes to the one it was made from"):
            call(outlined, lora)
