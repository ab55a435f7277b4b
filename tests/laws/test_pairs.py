"""Every two shipped passes on one model, in both orders: they work together, or the second says why not."""

from __future__ import annotations

from functools import cache

import pytest
import small
import torch
import unets
from test_passes import TOME_ON_VIT, needed

import fxplug
from fxplug.core.ir.containers import list_leaves
from fxplug.core.spec.pass_file import open_pass

MLP, ATTN = "blocks.*.mlp.*", "blocks.*.attn"
# Where the places of the passes meet. A pass without an entry takes its example, else its defaults, on the ViT; on the UNet
# it takes part when it has one.
ON_VIT = {
    "lora": {"at": "blocks.*.mlp.fc1", "rank": 2},
    "lora_weight": {"at": "blocks.*.mlp.fc1", "rank": 2},
    "dora": {"at": MLP, "rank": 2},
    "loha": {"at": MLP, "rank": 2},
    "lokr": {"at": MLP, "rank": 2},
    "oft": {"at": MLP, "block_size": 8},
    "boft": {"at": MLP},
    "weight_norm": {"at": MLP},
    "spectral_norm": {"at": MLP},
    "adapter": {"bottleneck": 4},
    "parallel_adapter": {"at": "blocks.*.mlp", "bottleneck": 4},
    "vpt": {"tokens": 3},
    "replace": {"at": "blocks.*.mlp.act", "module": "GELU", "with": "PReLU"},
    "scale": {"at": MLP},
    "skip": {"from": "blocks.0.mlp.act", "to": "blocks.1.mlp.act"},
    "tome": TOME_ON_VIT,
}
MIDDLE = "mid_block.attentions.0.transformer_blocks.0"
LAYERS = {"at": f"{MIDDLE}.attn1.to_q", "rank": 2}
ON_UNET = {
    **dict.fromkeys(["lora", "lora_weight", "dora", "loha", "lokr", "hcp/lora", "hcp/loha"], LAYERS),
    **dict.fromkeys(["weight_norm", "spectral_norm", "bitfit", "ssf"], {"at": f"{MIDDLE}.ff.net.2"}),
    "oft": {"at": LAYERS["at"], "block_size": 4},
    "boft": {"at": LAYERS["at"], "block_size": 4},
    "ia3": {"at": LAYERS["at"]},
    "adapter": {"at": f"{MIDDLE}.ff", "bottleneck": 2},
    "parallel_adapter": {"at": f"{MIDDLE}.ff", "bottleneck": 2},
    "replace": {"at": "mid_block.resnets.0.nonlinearity", "module": "SiLU", "with": "PReLU"},
    "scale": {"at": f"{MIDDLE}.ff"},
    "skip": {"from": "mid_block.resnets.0.conv1", "to": "mid_block.resnets.1.conv1"},
    "tome": {},
    "hcp/half_lora": {**LAYERS, "half": "first"},
    "hcp/single": {"layers": LAYERS["at"]},
    "hcp/param": {"layers": LAYERS["at"]},
    "hcp/patch": {"layers": "mid_block.resnets.1.nonlinearity"},
    "hcp/patch_after": {"layers": f"{MIDDLE}.ff"},
    "hcp/patch_before": {"layers": f"{MIDDLE}.ff"},
    "hcp/pair": {"to": f"{MIDDLE}.attn1.to_v", "args": [f"{LAYERS['at']}:in[:]", f"{LAYERS['at']}:out[:]", "x[:]", "y[:]"]},
    "hcp/pair_before": {"to": f"{MIDDLE}.attn1.to_v", "args": [f"{LAYERS['at']}:in[:]", f"{LAYERS['at']}:out[:]", "x[:]"]},
    "hcp/multi": {
        "from_layers": [f"pre_hook:{MIDDLE}"],
        "to_layers": [f"{MIDDLE}.ff"],
        "values": [f"{MIDDLE}:in[:]", f"{MIDDLE}.ff:in[:]", f"{MIDDLE}.ff:out[:]"],
        "after": [f"{MIDDLE}.ff"],
        "after_values": ["plugin:out[0][:]"],
        "before": [],
        "before_values": [],
    },
    "controlnet": {},
    "t2i_adapter": {},
    "ip_adapter": {"image": ["n", 3, 12]},
    "freeu": {},
    "deepcache": {},
}
NEED_A_UNET = ["controlnet", "t2i_adapter", "t2i_adapter_xl", "ip_adapter", "freeu", "deepcache"]
REFUSED = {  # pairs that cannot be, and why
    ("scale", "replace"): "replace: 'blocks.0.mlp.act' has a block of pass 'scale' \\(after\\) and cannot be replaced",
    ("skip", "replace"): "replace: 'blocks.1.mlp.act' has a block of pass 'skip' \\(after\\) and cannot be replaced",
    ("scale", "hcp/patch"): "hcp_patch: 'blocks.0.mlp.act' has a block of pass 'scale' \\(after\\) and cannot be replaced",
    ("skip", "hcp/patch"): "hcp_patch: 'blocks.1.mlp.act' has a block of pass 'skip' \\(after\\) and cannot be replaced",
    ("hcp/patch", "replace"): "nothing here is a GELU; the classes here are .*PatchPlugin",
    ("vpt", "tome"): "7 tokens are not a grid of patches of an image of 32 x 32: check 'prefix'",
    **dict.fromkeys(
        [("vpt", "first_block_cache"), ("vpt", "teacache")],
        "a mark needs two values of one shape, not \\(2, 5, 96\\) and \\(2, 8, 96\\)",
    ),
    ("hcp/patch_after", "hcp/patch_before"): "has a patch of 'hcp_patch_after' already, and HCP-Diffusion puts both into one",
    ("hcp/patch_before", "hcp/patch_after"): "has a patch of 'hcp_patch_before' already, and HCP-Diffusion puts both into one",
    ("tome", "vpt"): "7 tokens are not a grid of patches of an image of 32 x 32: check 'prefix'",
}
PASSES = sorted(small.PASSES)


@cache
def unchanged(base):
    return list_leaves(base.gm(*base.args, **base.kwargs))


def check(base, first, second, begun=None):
    """Two passes on a traced model: it runs, is what it was where both are neutral, and gradients reach what they added."""
    new = fxplug.apply(base.gm, first, second) if begun is None else fxplug.apply(begun, second)
    extra = needed(new)
    entries = new.meta["passes"]
    assert [entry["name"] for entry in entries] == [first.name, second.name] and all(entry["sites"] for entry in entries)
    ours, before = list_leaves(new(*base.args, **base.kwargs, **extra)), unchanged(base)
    assert all(t.isfinite().all() for t in ours)
    if all(entry["neutral"] for entry in entries):
        assert all(map(torch.equal, ours, before))
    elif not any(entry["neutral"] for entry in entries):
        assert not all(map(torch.equal, ours, before))
    sum(t.square().mean() for t in ours).backward()
    base.model.zero_grad()
    added = {k: p for k, p in new.named_parameters() if k.startswith((f"{first.name}.", f"{second.name}."))}
    assert [k for k, p in added.items() if p.grad is None] == []


def of(name, params):
    given = (open_pass(name).source.data.get("example") or {}).get("with") or {}
    if name.startswith("hcp/"):  # two of them have the names of other passes
        return fxplug.load_pass(name, name=name.replace("/", "_"), **{**given, **params.get(name, {})})
    return fxplug.load_pass(name, **params.get(name, given))


@cache
def on_vit(name):
    return of(name, ON_VIT)


ON_A_VIT = [p for p in PASSES if p not in NEED_A_UNET]
# one of each way to stand in a graph; the others of its kind go with the rest in the slow tests
KINDS = {"lora", "lora_weight", "scale", "replace", "skip", "ia3", "adapter", "vpt", "tome", "hcp/pair", "hcp/multi"}


def quick(first, second):
    return {first, second} <= KINDS or (first, second) in REFUSED


def both_on_a_vit(first, seconds):
    begun = fxplug.apply(small.plain_vit().gm, on_vit(first))
    for second in seconds:
        if (first, second) in REFUSED:
            with pytest.raises(fxplug.FxplugError, match=REFUSED[first, second]):
                check(small.plain_vit(), on_vit(first), on_vit(second), begun)
        else:
            check(small.plain_vit(), on_vit(first), on_vit(second), begun)


@pytest.mark.parametrize("first", [p for p in ON_A_VIT if p in KINDS or any(p == first for first, _ in REFUSED)])
def test_each_two_passes_on_a_vit(first):
    both_on_a_vit(first, [p for p in ON_A_VIT if p != first and quick(first, p)])


@pytest.mark.slow
@pytest.mark.parametrize("first", ON_A_VIT)
def test_each_two_other_passes_on_a_vit(first):
    both_on_a_vit(first, [p for p in ON_A_VIT if p != first and not quick(first, p)])


@cache
def on_unet(name, xl):
    """A pass on the UNet: networks are made once, with weights of which no result is zero."""
    base = small.unet_xl() if xl else unets.sd15()
    given = dict(ON_UNET.get(name, {}))
    if name.startswith("t2i_adapter"):
        given["network"] = small.seeded(lambda: small.features(base.gm, "full_adapter_xl" if xl else "full_adapter"))
    if name == "t2i_adapter" and xl:
        given["at"] = open_pass("t2i_adapter_xl").params["at"]
    if name == "controlnet":
        given["network"] = small.seeded(lambda: unets.control(base.model))
    if name == "ip_adapter":
        given["image"] = ["n", 3, base.model.config.cross_attention_dim]
    return of(name, {name: given})


@cache
def applied(name, xl):
    """A UNet with one pass on it."""
    base = small.unet_xl() if xl else unets.sd15()
    return small.Traced(base.model, fxplug.apply(base.gm, on_unet(name, xl)), base.args, base.kwargs)


ALIKE = ("t2i_adapter_xl", "freeu", "deepcache")  # the others do what these do, and more: one of each kind will do with them


def others(first):
    for second in PASSES if first not in ALIKE else [p for p in PASSES if p in KINDS or p in NEED_A_UNET]:
        known = second in ON_UNET or second in ("vpt", "t2i_adapter_xl")
        if known and second != first and not (second in NEED_A_UNET and second < first):
            yield second, "t2i_adapter_xl" in (first, second)


def then(first, seconds):
    for second, xl in others(first):
        if second not in seconds:
            continue
        if second == "vpt":
            with pytest.raises(fxplug.MatchError, match=r"vpt: 'blocks.\{0\}' matched 0 places"):
                fxplug.apply(applied(first, xl).gm, on_unet(second, xl))
        else:
            check(small.unet_xl() if xl else unets.sd15(), on_unet(first, xl), on_unet(second, xl), applied(first, xl).gm)


@pytest.mark.slow
@pytest.mark.parametrize("first", NEED_A_UNET)
def test_a_pass_for_a_unet_and_then_any_other(first):
    then(first, PASSES)


@pytest.mark.slow  # the network is traced anew for each pair
@pytest.mark.parametrize("second", NEED_A_UNET)
def test_one_of_each_kind_and_then_one_for_a_unet(second):
    """`make matrix` has every two; the other order, which costs no trace of a network, is tried with all above."""
    for first, xl in others(second):
        if first not in KINDS and first not in NEED_A_UNET:
            continue
        if (first, second) == ("freeu", "deepcache"):  # FreeU takes the place of what joins, as the page of deepcache says
            with pytest.raises(fxplug.MatchError, match=r"deepcache: 'up_blocks.\*' matched 0 places"):
                check(unets.sd15(), on_unet(first, xl), on_unet(second, xl))
        elif first != "vpt":
            check(small.unet_xl() if xl else unets.sd15(), on_unet(first, xl), on_unet(second, xl))


@pytest.mark.parametrize("path, make", [
    ("0", lambda: small.traced(torch.nn.Sequential(torch.nn.Linear(8, 8)).eval(), torch.randn(2, 8))),
    ("blocks.1.mlp.fc2", small.vit),
    ("blocks.0.attn.proj", small.plain_vit),
], ids=["linear", "fc2", "proj"])  # fmt: skip
def test_what_goes_before_a_layer_reaches_what_an_earlier_pass_put_beside_it(path, make, tmp_path):
    traced, (x,), _ = make()
    beside = fxplug.load_pass("lora", at=path, rank=2)
    before = fxplug.load_pass("ia3", at=[], feedforward=path)

    def filled(module):
        with torch.no_grad():
            for name, tensor in module.named_parameters():
                if name.startswith(("lora.", "ia3.")):
                    tensor.copy_(torch.linspace(-1, 2, tensor.numel()).view_as(tensor))
        return module

    orders = {"lora first": [beside, before], "gate first": [before, beside]}
    one = {name: filled(fxplug.apply(fxplug.apply(traced, a), b)) for name, (a, b) in orders.items()}
    both = filled(fxplug.apply(traced, beside, before))
    wanted = one["gate first"](x)
    assert not torch.allclose(wanted, traced(x))
    for found in (one["lora first"], both):
        torch.testing.assert_close(found(x), wanted)
    fxplug.save(one["lora first"], tmp_path / "saved")
    torch.testing.assert_close(fxplug.load(tmp_path / "saved")(x), wanted)
