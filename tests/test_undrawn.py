"""Models whose weights come from files are made without random numbers, and are what they would have been."""

from __future__ import annotations

import sys

import pytest
import timm
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn

from fxplug.core.errors import SpecError
from fxplug.core.models.factory import Undrawn, build
from fxplug.core.spec.run_config import load_config

UNET = {
    "block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1, "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip
TIMM = {
    "vit_tiny_patch16_224": {"depth": 1}, "swin_tiny_patch4_window7_224": {"depths": (1, 1, 1, 1)}, "convnext_atto": {},
    "levit_128": {}, "eva02_tiny_patch14_224": {"depth": 1}, "vit_small_patch14_dinov2": {"depth": 1},
}  # fmt: skip


class Derived(nn.Module):
    """Keeps, beside its weight, what it computed of the random numbers in it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        reads = {
            "norm": lambda w: w.norm(), "data": lambda w: w.data.abs().sum(), "view": lambda w: w[0].detach().clone(),
            "cat": lambda w: torch.cat([w, w]).detach(), "out": lambda w: torch.zeros(4, 4).copy_(w.detach()),
            "state": lambda w: next(iter(self.layer.state_dict().values())) + 0, "after": lambda w: w.detach().mul(2),
            "numpy": lambda w: float(w.detach().numpy().sum()),
        }  # fmt: skip
        found = reads[how](self.layer.weight)
        found = found.detach() if isinstance(found, torch.Tensor) else torch.tensor(found)
        self.register_buffer("kept", found, persistent=False)


def made(make, state=None):
    """A model as the factory makes it, and whether it was made again."""
    with Undrawn() as mode:
        model = make()
    again = mode.read
    model = make() if again else model
    if state is not None:
        model.load_state_dict(state)
    return model, again


def alike(a: nn.Module, b: nn.Module) -> bool:
    rows = zip((*a.named_parameters(), *a.named_buffers()), (*b.named_parameters(), *b.named_buffers()), strict=True)
    return all(n == m and torch.equal(x, y) and x.requires_grad == y.requires_grad for (n, x), (m, y) in rows)


@pytest.mark.parametrize("name", TIMM)
def test_a_model_of_timm_is_what_it_would_have_been(name):
    plain = timm.create_model(name, **TIMM[name])
    assert alike(made(lambda: timm.create_model(name, **TIMM[name]), plain.state_dict())[0], plain)


@pytest.mark.parametrize("how", ["norm", "data", "view", "cat", "out", "state", "numpy", "after"])
def test_what_is_computed_of_random_numbers_has_them(how):
    _, again = made(lambda: Derived(how))
    assert again


def test_nothing_is_drawn_that_the_file_replaces(tmp_path):
    plain = UNet2DConditionModel(**UNET)
    before = torch.random.get_rng_state()
    model, again = made(lambda: UNet2DConditionModel(**UNET), plain.state_dict())
    assert not again and torch.equal(before, torch.random.get_rng_state()) and alike(model, plain)


def test_a_configuration_with_weights_draws_nothing_and_one_without_draws(tmp_path):
    plain = UNet2DConditionModel(**UNET)
    plain.save_pretrained(tmp_path / "unet")
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    vit = {"timm": "vit_tiny_patch16_224", "options": {"depth": 1}}
    for given, wanted in (
        ({"model": str(tmp_path / "unet")}, plain), ({"model": vit, "weights": str(tmp_path / "vit.safetensors")}, model)
    ):  # fmt: skip
        before = torch.random.get_rng_state()
        assert alike(build(load_config(given)), wanted.eval())
        assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(0)
    drawn = timm.create_model("vit_tiny_patch16_224", depth=1)
    torch.manual_seed(0)
    assert alike(build(load_config({"model": vit})), drawn.eval())


def test_a_library_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator nms is not there')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    file = tmp_path / "run.yaml"
    file.write_text("model: {timm: vit_tiny_patch16_224}")
    with pytest.raises(SpecError, match="importing timm failed: RuntimeError: operator nms is not there; .*pip install"):
        build(load_config(file))
