"""Passes taken out again, alone and from among others."""

from __future__ import annotations

import itertools

import pytest
import small
import torch
import unets
from sweeps import sweep

import fxplug

PASSES = {
    "lora": {"at": "blocks.*.attn.qkv", "rank": 2},
    "ssf": {"at": "blocks.*.attn.qkv"},
    "scale": {"at": ["blocks.*.attn.qkv", "blocks.*.mlp"]},
    "ia3": {"at": "blocks.*.attn.qkv", "feedforward": "blocks.*.mlp.fc2"},
    "vpt": {},
    "skip": {"from": "blocks.0.mlp", "to": "blocks.1:in", "place": "before"},
    "bitfit": {"at": "blocks.*.attn.proj"},
}


def changed(gm, names):
    new = fxplug.apply(gm, *(fxplug.load_pass(name, **PASSES[name]) for name in names))
    torch.manual_seed(4)
    with torch.no_grad():
        for name in sorted(names):
            for p in new.get_submodule(name).parameters():
                p.add_(0.1 * torch.randn_like(p, device="cpu"))
    return new


@sweep("pair", list(itertools.permutations(PASSES, 2)), ("lora", "ssf"), ("ssf", "lora"), ("vpt", "lora"), ("skip", "ia3"))
@pytest.mark.parametrize("loaded", [False, True])
def test_the_other_pass_alone_is_left(pair, loaded, tmp_path):
    gm, args, _ = small.plain_vit()
    new = changed(gm, pair)
    if loaded:
        new = fxplug.load(fxplug.save(new, tmp_path / "it"))
    for gone, kept in (pair, pair[::-1]):
        again = fxplug.remove(new, gone)
        alone = fxplug.apply(gm, fxplug.load_pass(kept, **PASSES[kept]))
        alone.load_state_dict(again.state_dict())
        assert list(again.state_dict()) == list(alone.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(again(*args), alone(*args))
        if "bitfit" not in pair:
            assert fxplug.diff(alone, again).strip() == ""
        back = fxplug.remove(again, kept)
        with torch.no_grad():
            torch.testing.assert_close(back(*args), gm(*args))


@pytest.mark.parametrize("name", ["dora", "loha", "oft", "bitfit"])
def test_a_layer_whose_parameter_was_changed_stays_written_out(name):
    """What the docstring of `remove` says is left: functions on the same weights, equal results, places that passes find."""
    gm, args, _ = small.plain_vit()
    qkv = {"at": "blocks.0.attn.qkv"}
    back = fxplug.remove(fxplug.apply(gm, fxplug.load_pass(name, **qkv)), name)
    left = fxplug.diff(gm, back)
    assert "-blocks_0_attn_qkv = blocks.0.attn.qkv(" in left and "+blocks_0_attn_qkv_linear = linear(" in left
    assert list(back.state_dict()) == list(gm.state_dict()) and torch.equal(back(*args), gm(*args))
    assert torch.equal(fxplug.apply(back, fxplug.load_pass("lora", **qkv, rank=2))(*args), gm(*args))
    with pytest.raises(fxplug.SpecError, match=r"a hook on 'blocks\.0\.attn\.qkv' has no effect"):
        back.get_submodule("blocks.0.attn.qkv").register_forward_hook(lambda *_: None)


def test_what_stands_in_the_way_is_named():
    gm, _, _ = unets.sd15()
    controlnet = fxplug.load_pass("controlnet", options={"conditioning_embedding_out_channels": [4, 4, 4, 8]})
    new = fxplug.apply(gm, controlnet, fxplug.load_pass("lora", at="controlnet.cn.**.to_q"))
    with pytest.raises(fxplug.SpecError, match="'controlnet' cannot be removed: pass 'lora' reads '.*remove 'lora' first"):
        fxplug.remove(new, "controlnet")
    again = fxplug.remove(fxplug.remove(new, "lora"), "controlnet")
    assert fxplug.diff(gm, again).strip() == "" and list(again.state_dict()) == list(gm.state_dict())
    with pytest.raises(fxplug.SpecError, match="no pass 'lore' is applied here .did you mean 'lora'"):
        fxplug.remove(new, "lore")


def test_slots_are_taken_out_and_a_lowered_module_is_lowered_again():
    gm, args, _ = small.plain_vit()
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="qkv", rank=2, slots=2))
    assert fxplug.diff(gm, fxplug.remove(new, "lora")).strip() == ""
    fused = fxplug.lower(changed(gm, ["lora", "scale"]), fuse=True)
    again = fxplug.remove(fused, "lora")
    assert [entry["name"] for entry in again.meta["source"].meta["passes"]] == ["scale"]
    with pytest.raises(fxplug.SpecError, match="'lora' is merged into the weights: remove it from what fxplug.unmerge"):
        fxplug.remove(fxplug.lower(changed(gm, ["lora"]), merge=True), "lora")
