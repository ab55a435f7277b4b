"""Kinds of updates: what a block says of its kind is all that files, slots, merges and passes made of files know of it."""

from __future__ import annotations

from itertools import product

import pytest
import small
import torch
from safetensors.torch import load_file
from torch import nn

import fxplug
from fxplug.adapters import files
from fxplug.blocks import list_update_kinds
from fxplug.blocks.base import UpdateKind, get_kind
from fxplug.blocks.weight_update import Update
from fxplug.core.errors import ArtifactError, SpecError

AT = "blocks.*.attn.qkv"
PASS = """
about: Waves of low rank added to each matched weight.
params: {at: "**", rank: 2, slots: 0}
slots: $slots
rules:
  - match: {path: $at, module: [Linear]}
    use: test_update_kinds:Wave
    place: param
    port: weight
    options: {rank: $rank, slots: $slots}
"""


PACKAGE = """
from fxplug.blocks.base import UpdateKind
from fxplug.blocks.weight_update import Update


class Ripple(Update):
    update_kind = UpdateKind(
        name="ripple", forms=({"ripple_up": "o r", "ripple_down": "r i"},), neutral={"ripple_up": 0},
        delta=lambda own, shape: 2 * own["ripple_up"] @ own["ripple_down"],
    )
"""


class Wave(Update):
    """value + scale * left @ sin(right): a kind of update that fxplug has not."""

    update_kind = UpdateKind(
        name="wave",
        forms=({"left": "o r", "right": "r i"},),
        neutral={"left": 0},
        delta=lambda own, shape: (own["left"] @ own["right"].sin()).reshape(*shape),
        formats={"comfy": {"left": "wave_up", "right": "wave_down"}},
    )
    asks = "a wave"

    def __init__(self, shape, rank=2, alpha=None, rslora=False, alpha_auto_scale=True, slots=0):
        super().__init__(shape, rank, alpha, rslora, alpha_auto_scale, slots)
        self.left = nn.Parameter(torch.zeros(shape[0], rank))
        self.right = nn.Parameter(torch.randn(rank, shape[1]))
        self.banked()


class Ripple(Wave):
    """One that says no kind of its own."""


@pytest.fixture
def wave(tmp_path):
    file = tmp_path / "wave.yaml"
    file.write_text(PASS)
    return lambda **given: fxplug.load_pass(file, at=AT, **given)


def learned(gm, p):
    """A module whose updates have learned something."""
    torch.manual_seed(0)
    new = fxplug.apply(gm, p)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith(f"{p.name}."):
                parameter.normal_(std=0.1)
    return new


def test_a_kind_is_one_class_and_a_pass(wave, tmp_path):
    gm, (x,), _ = small.plain_vit()
    assert fxplug.verify(gm, fxplug.apply(gm, wave()), (x,)).ok
    new = learned(gm, wave())
    wanted = new(x)
    assert not torch.allclose(wanted, gm(x))
    fxplug.save(new, tmp_path / "artifact")
    assert torch.equal(fxplug.load(tmp_path / "artifact", allow=["test_update_kinds"])(x), wanted)
    torch.testing.assert_close(fxplug.merge(new)(x), wanted)


@pytest.mark.parametrize("as_", ["fxplug", "comfy"])
def test_a_file_of_the_kind_goes_into_blocks_and_slots_and_a_change_of_the_whole(as_, wave, tmp_path):
    gm, (x,), _ = small.plain_vit()
    new = learned(gm, wave())
    wanted = new(x)
    path = fxplug.save_adapter(new, tmp_path / "it.safetensors", as_=as_).path
    ends = {key.rpartition(".")[2] for key in load_file(path)}
    assert ends == ({"left", "right", "scale"} if as_ == "fxplug" else {"wave_up", "wave_down", "alpha"})
    assert {(entry.kind, entry.rank) for entry in files.read(path).entries} == {("wave", 2)}

    other = fxplug.apply(gm, wave())
    fxplug.load_adapter(other, path)
    assert torch.equal(other(x), wanted)
    slots = fxplug.apply(gm, wave(slots=2, rank=3))  # whose tensors are padded along the rank
    small.load_and_use(slots, path)
    torch.testing.assert_close(slots(x), wanted)
    torch.testing.assert_close(fxplug.merge(slots)(x), wanted)
    again = slots.adapters.save(slots.adapters.names[0], tmp_path / "again.safetensors", as_=as_).path
    assert {entry.rank for entry in files.read(again).entries} == {2}
    slots.adapters.load("again", again)
    slots.adapters.use("again")
    torch.testing.assert_close(slots(x), wanted)
    whole = fxplug.apply(gm, fxplug.pass_for(path, gm))  # no pass of that name is installed
    small.load_and_use(whole, path)
    torch.testing.assert_close(whole(x), wanted)


def test_what_has_no_form_or_no_room_is_named(wave, tmp_path):
    gm, _, _ = small.plain_vit()
    new = learned(gm, wave())
    with pytest.raises(ArtifactError, match="has wave, which kohya cannot represent"):
        fxplug.save_adapter(new, tmp_path / "it.safetensors", as_="kohya")
    path = fxplug.save_adapter(new, tmp_path / "it.safetensors", as_="comfy").path
    lora = fxplug.apply(gm, fxplug.load_pass("lora", at=AT, rank=4, slots=1))
    with pytest.raises(SpecError, match="is wave, which is more than a low-rank update, .*: apply the pass wave or delta"):
        lora.adapters.load("it", path)


def test_a_derived_class_is_of_no_kind_unless_it_says_so():
    assert get_kind(Wave([4, 4])) is list_update_kinds()["test_update_kinds:Wave"]
    assert get_kind(Ripple([4, 4])) is None and get_kind(nn.Linear(2, 2)) is None
    assert torch.equal(Ripple([4, 4])(torch.ones(4, 4)), torch.ones(4, 4))


def test_a_kind_says_what_takes_the_scale():
    with pytest.raises(SpecError, match="'wave' has no tensor that is zero in a new one, which takes the scale"):
        UpdateKind(name="wave", forms=({"left": "o r", "right": "r i"},))


def test_slots_of_a_class_that_is_not_imported():
    bank = fxplug.adapters.banks.Bank("a", "wave.a", "elsewhere:Wave", 1, 2, (4, 4))
    with pytest.raises(SpecError, match="the slots at 'a' are of 'elsewhere:Wave', whose module is not imported"):
        bank.names  # noqa: B018


def test_a_package_of_an_extension_brings_its_kinds(tmp_path, monkeypatch):
    (tmp_path / "waves.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fxplug.blocks, "list_block_packages", lambda: ["waves"])
    fxplug.blocks._with_all_imported.cache_clear()
    up, down = torch.randn(4, 2), torch.randn(2, 6)
    entry, *_ = files.read({"layer.ripple_up": up, "layer.ripple_down": down, "layer.alpha": 2.0}).entries
    assert (entry.kind, entry.rank, entry.scale) == ("ripple", 2, 1.0)
    torch.testing.assert_close(entry.update((4, 6)), 2 * up @ down)
    fxplug.blocks._with_all_imported.cache_clear()
    del list_update_kinds()["waves:Ripple"]


def test_each_kind_says_what_its_block_has():
    """Of every block of ours: its tensors are those of one of the forms, and a new one has the neutral values."""
    shape, made = (6, 8), {}
    for key, (tucker, both, full) in product(list_update_kinds(), product((False, True), repeat=3)):
        cls = getattr(fxplug.blocks, key, None) if ":" not in key else None
        kind = cls and cls.update_kind
        if not kind or kind.place != "param":
            continue
        given = {"decompose_both": both, "full_matrix": full, "tucker": tucker} if kind.name == "lokr" else {}
        given = {"tucker": tucker} if kind.name == "loha" else given
        size = (*shape, 3, 3) if tucker else shape
        options = {"rank": 2, **given} if kind.ranked else {"block_size": 4} if kind.slots == "" else {}
        block = cls(size, **options)
        own = dict(block.named_parameters())
        assert kind.form(own).keys() == own.keys()
        assert all(torch.equal(own[name], torch.full_like(own[name], value)) for name, value in kind.neutral.items()
                   if name in own and not callable(value))  # fmt: skip
        if kind.is_product:
            assert kind.rank(own) == (2 if "lokr_w1" not in own or "lokr_w2" not in own else min(own["lokr_w1"].shape))
        if kind.is_product and not kind.is_plain:
            out, inner = kind.sizes(own)
            assert out == 6 and inner in ((8,), (8, 3, 3), (72,))
            assert kind.delta(own, size).shape == size
        made[key] = block
    assert made.keys() >= {"LoraWeight", "Dora", "Loha", "Lokr", "Delta", "Oft", "Boft"}
