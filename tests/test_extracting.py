"""Adapters extracted of the difference of two checkpoints: what they hold, what they lack, and that it is said."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import unets
from safetensors.torch import load_file, save_file
from small import load_and_use
from test_adapter_files import Net
from torch import nn
from typer.testing import CliRunner

import fxplug
from fxplug.__main__ import app
from fxplug.core import weight_files
from fxplug.core.errors import ArtifactError, SpecError


def pair(rank=2, seed=0):
    """A net, and one whose linear layers and convolutions have an update of that rank more."""
    torch.manual_seed(seed)
    base = Net()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for layer in tuned.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                flat = layer.weight.flatten(1)
                update = 0.3 * torch.randn(len(flat), rank) @ torch.randn(rank, flat.shape[1])
                layer.weight += update.reshape(layer.weight.shape)
    return base, tuned


def test_a_difference_of_low_rank_is_held_whole(tmp_path):
    base, tuned = pair()
    for name, model in (("base", base), ("tuned", tuned)):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    found = fxplug.extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", rank=2)
    assert set(found.errors) == {"blocks.0.to_q", "blocks.0.ff", "blocks.1.to_q", "blocks.1.ff", "conv", "point"}
    assert max(found.errors.values()) < 1e-5 and found.left_out == {} and found.same == 1  # the embedding
    gm = fxplug.trace(base, (indices := torch.arange(6).view(1, 2, 3),))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=2, slots=1))
    load_and_use(new, found.file, "ink")
    torch.testing.assert_close(new(indices), tuned(indices), rtol=1e-4, atol=1e-4)


def test_a_share_keeps_as_much_of_each_difference():
    base, tuned = pair(rank=6)
    found = fxplug.extract(base, tuned, rank=0.9)
    assert {entry.rank for entry in found.file.entries} - {6} and max(found.errors.values()) <= 0.1**0.5 + 1e-6
    assert max(fxplug.extract(base, tuned, rank=0.999999).errors.values()) < 1e-2
    one = fxplug.extract(base, tuned, rank=1)
    path = "conv"
    delta = (tuned.conv.weight - base.conv.weight).detach().flatten(1)
    s = torch.linalg.svdvals(delta)
    assert one.errors[path] == pytest.approx((s[1:].norm() / s.norm()).item(), rel=1e-4)  # the best of rank 1


def test_what_no_adapter_holds_is_said():
    base, tuned = pair()
    with torch.no_grad():
        tuned.conv.bias += 0.5
    found = fxplug.extract(base, tuned, rank=2, at="re:conv|point")
    assert set(found.errors) == {"conv", "point"}
    assert "differs by up to 0.5" in found.left_out["conv.bias"] and "conv.bias" in repr(found)
    state = {**tuned.state_dict(), "more.weight": torch.ones(2, 2)}
    assert fxplug.extract(base.state_dict(), state, rank=2).left_out["more.weight"] == "is only in the state dict"


def test_updates_have_the_dtype_of_the_tuned_weights():
    base, tuned = pair()
    found = fxplug.extract(base, tuned.to(torch.bfloat16), rank=2)
    assert {t.dtype for entry in found.file.entries for t in entry.tensors.values()} == {torch.bfloat16}
    assert 1e-4 < found.errors["conv"] < 2e-2  # what rounding takes counts


def test_checkpoints_of_other_dtypes_are_compared_in_float32():
    base, tuned = pair()
    state = {key: value.to(torch.float8_e4m3fn) for key, value in tuned.state_dict().items()}
    found = fxplug.extract(base.to(torch.float16), state, rank=2)
    assert found.file.entries[0].tensors["up"].dtype == torch.float8_e4m3fn


def test_folders_of_diffusers_with_shards(tmp_path):
    base = unets.sd15().model
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.conv_in.weight += 0.1 * torch.randn_like(tuned.conv_in.weight)
        tuned.mid_block.attentions[0].proj_in.weight.add_(0.1)
    base.save_pretrained(tmp_path / "base", max_shard_size="60KB")
    tuned.save_pretrained(tmp_path / "tuned")
    places = [str(tmp_path / "base"), str(tmp_path / "tuned"), "--out", str(tmp_path / "ink")]
    done = CliRunner().invoke(app, ["adapters", "extract", *places, "--rank", "0.99", "--as", "kohya"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("of the difference") == 2 and f"saved in {tmp_path / 'ink.safetensors'}" in done.stdout
    keys = {key.partition(".")[0] for key in load_file(tmp_path / "ink.safetensors")}
    assert keys == {"lora_unet_conv_in", "lora_unet_mid_block_attentions_0_proj_in"}


def test_files_are_read_layer_by_layer(tmp_path):
    """What is in memory is some times the largest layer, however many there are."""
    torch.manual_seed(0)
    base = {f"blocks.{i}.weight": torch.randn(128, 128) for i in range(64)}
    tuned = {key: value + (0.1 if key == "blocks.3.weight" else 0) for key, value in base.items()}
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    live, most, read = 0, 0, weight_files.read_tensors

    def counted(*args, **options):
        nonlocal live, most
        for name, value in read(*args, **options):
            size = 0 if value.is_meta else value.nbytes
            live += size
            most = max(most, live)
            weakref.finalize(value.untyped_storage(), lose, size)
            yield name, value

    def lose(size):
        nonlocal live
        live -= size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "read_tensors", counted)
        found = fxplug.extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", rank=1)
    assert list(found.errors) == ["blocks.3"] and found.same == 63
    assert most <= 4 * 128 * 128 * 4, most


WRONG = [
    ({"rank": 0}, SpecError, "rank must be a whole number, 1 or more, or a share between 0 and 1, not 0"),
    ({"rank": 1.5}, SpecError, "not 1.5"),
    ({"rank": True}, SpecError, "not True"),
    ({"rank": float("nan")}, SpecError, "not nan"),
    ({"at": "cnov"}, SpecError, r"'cnov' is not a layer of both models \(did you mean 'conv'\?\)"),
]


@pytest.mark.parametrize(("options", "kind", "text"), WRONG)
def test_what_is_wrong_says_so(options, kind, text):
    with pytest.raises(kind, match=text):
        fxplug.extract(*pair(), **options)


def test_checkpoints_that_do_not_go_together(tmp_path):
    base, tuned = pair()
    with pytest.raises(SpecError, match="no layer at '\\*\\*' differs"):
        fxplug.extract(base, base)
    with pytest.raises(ArtifactError, match=r"'conv.weight' is \[6, 12, 3, 3\] in the Net and \[1\] in the state dict"):
        fxplug.extract(base, {**tuned.state_dict(), "conv.weight": torch.ones(1)})
    with pytest.raises(ArtifactError, match="the Net and the Linear have no names in common"):
        fxplug.extract(base, nn.Linear(2, 2))
    bad = {**tuned.state_dict(), "conv.weight": torch.full((6, 12, 3, 3), torch.nan)}
    with pytest.raises(ArtifactError, match="'conv.weight' has numbers that are not finite"):
        fxplug.extract(base, bad)
    with pytest.raises(ArtifactError, match="no such file"):
        fxplug.extract(base, tmp_path / "none.safetensors")
    with pytest.raises(ArtifactError, match="has no .safetensors"):
        fxplug.extract(base, tmp_path)


def test_checkpoints_that_were_quantised_are_refused():
    base = {"a.weight": torch.randn(4, 4)}
    scaled = {"a.weight": base["a.weight"].to(torch.float8_e4m3fn), "a.scale_weight": torch.ones(1)}
    with pytest.raises(ArtifactError, match="the state dict has quantised weights, scaled by 'a.scale_weight'"):
        fxplug.extract(base, scaled)
    with pytest.raises(ArtifactError, match="'a.weight' is torch.float32 in the state dict and torch.int8 in the state dict"):
        fxplug.extract(base, {"a.weight": base["a.weight"].to(torch.int8)})
