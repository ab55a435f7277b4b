"""Adapter files as other tools write and read them: scales without metadata, magnitudes, groups, folders."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fxplug
from fxplug.adapters import files
from fxplug.adapters.base_weights import digest_of
from fxplug.core.errors import ArtifactError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.conv = nn.Embedding(9, 4), nn.Conv2d(4, 8, 3, padding=1)
        self.to_q, self.to_k = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, words):
        x = self.conv(self.words(words).movedim(-1, 1)).movedim(1, -1)
        return self.to_k(self.to_q(x).relu())


WORDS = torch.arange(8).view(1, 2, 4)


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().eval()


def trained(name, **options):
    torch.manual_seed(1)
    new = fxplug.apply(fxplug.trace(net(), WORDS), fxplug.load_pass(name, **options))
    with torch.no_grad():
        for key, parameter in new.named_parameters():
            if key.startswith(f"{name}."):
                parameter += 0.3 * torch.randn(parameter.shape)
    return new


# --- a scale that a reader without metadata sees

SCALED = {
    "a high alpha": ("lora", {"at": ["to_q", "to_k"], "rank": 2, "alpha": 16}),
    "a low one, of a convolution": ("lora", {"at": "conv", "rank": 4, "alpha": 1}),
    "rslora": ("lora", {"at": ["to_q", "conv"], "rank": 4, "alpha": 3, "rslora": True}),
    "a bias": ("lora", {"at": ["to_q", "to_k"], "rank": 2, "alpha": 5, "bias": True}),
    "an embedding": ("lora", {"at": ["words", "to_q"], "rank": 2, "alpha": 6}),
    "dora": ("dora", {"at": ["to_q", "to_k"], "rank": 2, "alpha": 7}),
    "lokr": ("lokr", {"at": ["to_q", "to_k"], "rank": 1, "alpha": 3, "decompose_both": True}),
}


@pytest.mark.parametrize("case", SCALED)
def test_a_file_of_diffusers_means_the_same_without_its_metadata(case, tmp_path):
    name, options = SCALED[case]
    new = trained(name, **options)
    fxplug.save_adapter(new, tmp_path / "it.safetensors", as_="diffusers", part="unet")
    with safe_open(tmp_path / "it.safetensors", "pt") as file:
        said = json.loads(file.metadata()["lora_adapter_metadata"])
    assert {said.get("unet.lora_alpha", said.get("unet.alpha"))} == {said["unet.r"]}  # who reads both scales once
    for source in (load_file(tmp_path / "it.safetensors"), tmp_path / "it.safetensors"):
        gm = fxplug.trace(net(), WORDS)
        again = fxplug.apply(gm, fxplug.pass_for(source, gm, slots=1))
        again.adapters.load("it", source)
        again.adapters.use("it")
        torch.testing.assert_close(again(WORDS), new(WORDS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["convert", "resize", "merge"])
def test_files_are_edited_with_their_scale(how, tmp_path):
    state = {"lora_unet_to_q.lora_down.weight": torch.randn(2, 8), "lora_unet_to_q.lora_up.weight": torch.randn(12, 2)}
    state["lora_unet_to_q.alpha"] = torch.tensor(7.0)
    want = 3.5 * state["lora_unet_to_q.lora_up.weight"] @ state["lora_unet_to_q.lora_down.weight"]
    first = fxplug.convert_adapter(state, tmp_path / "first.safetensors", as_="diffusers", model=net()).path
    if how == "resize":
        first = fxplug.resize_adapter(first, tmp_path / "small.safetensors", rank=2, energy=1.0).path
    if how == "merge":
        first = fxplug.merge_adapters({str(first): 0.5}, tmp_path / "half.safetensors").path
        want = want / 2
    bare = load_file(first)
    torch.testing.assert_close(bare["transformer.to_q.lora_B.weight"] @ bare["transformer.to_q.lora_A.weight"], want)


# --- DoRA of other tools


@pytest.mark.parametrize("end", [".magnitude", ".magnitude.weight", ".lora_magnitude_vector", ".lora_magnitude_vector.weight"])
@pytest.mark.parametrize("halves", [("lora_A", "lora_B"), ("lora_down", "lora_up")])
def test_a_magnitude_under_any_name_is_doras(end, halves):
    base = net()
    down, up = torch.randn(2, 8), torch.randn(12, 2)
    magnitude = base.to_q.weight.detach().norm(dim=1) * 1.5
    state = {f"diffusion_model.to_q.{halves[0]}.weight": down, f"diffusion_model.to_q.{halves[1]}.weight": up}
    state |= {f"diffusion_model.to_q{end}": magnitude, "diffusion_model.to_q.alpha": torch.tensor(4.0)}
    gm = fxplug.trace(base, WORDS)
    new = fxplug.apply(gm, fxplug.pass_for(state, gm, slots=1))
    new.adapters.load("it", state)
    new.adapters.use("it")
    changed = base.to_q.weight.detach() + 2 * up @ down
    want = copy.deepcopy(base)
    want.to_q.weight.data = magnitude[:, None] * changed / changed.norm(dim=1, keepdim=True)
    torch.testing.assert_close(new(WORDS), want(WORDS))


# --- folders


@pytest.mark.parametrize("name", ["both.safetensors", "both.pt", "both.bin", "sub/both.ckpt", "both.pth"])
@pytest.mark.parametrize("how", ["merge", "save", "convert"])
def test_no_folder_has_the_name_of_a_file(how, name, tmp_path):
    torch.manual_seed(0)
    new, target = trained("lora", at="to_q", rank=2), tmp_path / name
    fxplug.save_adapter(new, tmp_path / "peft")
    with pytest.raises(ArtifactError, match="ends as a file does, and an adapter of peft is a folder: give the name of a"):
        if how == "merge":
            fxplug.merge_adapters({str(tmp_path / "peft"): 0.8}, target)
        elif how == "save":
            fxplug.save_adapter(new, target)
        else:
            fxplug.convert_adapter(tmp_path / "peft", target, as_="peft", model=net())
    assert not target.exists()
    if name != "both.safetensors":
        with pytest.raises(ArtifactError, match="an adapter of diffusers is a folder: .* or a name that ends in .safetensors"):
            fxplug.save_adapter(new, target, as_="diffusers")


# --- the base that a file names


def on(base, **options):
    gm = fxplug.trace(base, WORDS)
    return fxplug.apply(gm, fxplug.load_pass("lora", at=["to_q", "to_k", "conv"], rank=4, **options))


@pytest.mark.parametrize("as_", ["peft", "diffusers", "kohya", "comfy", "lycoris", "fxplug"])
def test_a_file_names_its_base_and_another_warns(as_, tmp_path):
    path = tmp_path / "it" if as_ == "peft" else tmp_path / "it.safetensors"
    fxplug.save_adapter(trained("lora", at=["to_q", "to_k"], rank=2), path, as_=as_)
    again = fxplug.apply(on(net(), slots=2), fxplug.load_pass("scale", at="to_q"))  # other passes do not matter
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.adapters.load("it", path)
        fxplug.load_adapter(on(net()), path)
    again.adapters.save("it", tmp_path / "second.safetensors", as_="kohya")
    other = net()
    with torch.no_grad():
        other.conv.weight += 1  # of no layer of the file
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on(other, slots=1).adapters.load("it", tmp_path / "second.safetensors")
    with torch.no_grad():
        other.to_k.weight += 1e-3
    for load in (on(other, slots=1).adapters.load, lambda _, file: fxplug.load_adapter(on(other), file)):
        with pytest.warns(UserWarning, match=r"beside weights with the digest 'sha256:(\w{64})', and .* have sha256:(?!\1)"):
            load("it", path)


def test_a_base_in_another_dtype_is_another_and_one_without_values_has_no_digest(tmp_path):
    new = trained("lora", at=["to_q", "to_k"], rank=2)
    fxplug.save_adapter(new, tmp_path / "it.safetensors", as_="fxplug")
    with pytest.warns(UserWarning, match="another base model, or the same in another dtype"):
        on(net().double(), slots=1).adapters.load("it", tmp_path / "it.safetensors")
    rows = {"to_q.weight": torch.ones(4, 4), "int.weight": torch.ones(4, 4).int()}
    rows["meta.weight"] = torch.ones(4, 4, device="meta")
    known = digest_of(["to_q"], rows.get)
    assert known and known == digest_of(["to_q"], {"to_q.weight": torch.ones(4, 4).t()}.get)  # whatever its memory is like
    assert known != digest_of(["to_q"], {"to_q.weight": torch.ones(2, 8)}.get)
    assert not any(digest_of(["to_q", name], rows.get) for name in ("meta", "int", "absent"))
    both = {**rows, "b.weight": torch.ones(1)}.get
    assert digest_of(["to_q", "b"], both) == digest_of(["b", "to_q"], both) != known


# --- convolutions in groups


@pytest.mark.parametrize(
    ("groups", "width", "rank", "kernel"), [(2, 8, 4, 3), (4, 8, 4, 1), (8, 8, 8, 3), (2, 4, 2, 5), (2, 16, 8, 1)]
)
def test_a_lora_of_groups_that_reads_all_channels_is_refused_with_the_reason(groups, width, rank, kernel):
    """As PEFT has it, whose rank is that of all groups together."""
    state = {"conv.lora_A.weight": torch.ones(rank, width, kernel, kernel)}
    state["conv.lora_B.weight"] = torch.ones(16, rank // groups, 1, 1)
    file = files.read(state, config={"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    assert file.entries[0].rank == rank and file.entries[0].scale == 1
    with pytest.raises(ArtifactError, match=f"the layer has {groups} groups, and PEFT's LoRA of it reads all channels"):
        files.fit(file, {"conv": (16, width // groups, kernel, kernel)}).check()
