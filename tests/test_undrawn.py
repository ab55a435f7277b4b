"""Models of diffusers whose weights come from files are made without random numbers; a library that fails is named."""

from __future__ import annotations

import sys

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn

from fxplug.config.models.factory import build
from fxplug.config.run_config import load_config
from fxplug.core.errors import SpecError

UNET = {
    "block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1, "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip


def alike(a: nn.Module, b: nn.Module) -> bool:
    rows = zip((*a.named_parameters(), *a.named_buffers()), (*b.named_parameters(), *b.named_buffers()), strict=True)
    return all(n == m and torch.equal(x, y) and x.requires_grad == y.requires_grad for (n, x), (m, y) in rows)


@pytest.mark.slow
def test_a_model_of_diffusers_with_weights_draws_nothing_and_one_without_draws(tmp_path):
    plain = UNet2DConditionModel(**UNET)
    plain.save_pretrained(tmp_path / "unet")
    before = torch.random.get_rng_state()
    assert alike(build(load_config({"model": str(tmp_path / "unet")})), plain.eval())
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(0)
    drawn = UNet2DConditionModel(**UNET)
    torch.manual_seed(0)
    assert alike(build(load_config({"model": {"diffusers": {"_class_name": "UNet2DConditionModel", **UNET}}})), drawn.eval())


def test_a_library_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator nms is not there')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    file = tmp_path / "run.yaml"
    file.write_text("model: {timm: vit_tiny_patch16_224}")
    with pytest.raises(SpecError, match="importing timm failed: RuntimeError: operator nms is not there; .*pip install"):
        build(load_config(file))
