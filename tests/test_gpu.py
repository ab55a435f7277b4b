"""Training on a GPU: the same runs as on a CPU, in each precision, and back on a CPU afterwards."""

from __future__ import annotations

import pytest
import torch
from runs import run

import fxplug

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PLAIN = {"passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 4}}], "train__steps": 6}


def losses(done):
    return [record["loss"] for record in done.history]


@pytest.mark.parametrize("precision, close", [("fp32", 1e-3), ("bf16", 0.05), ("fp16", 0.02)])
def test_losses_are_those_of_a_cpu(tmp_path, precision, close):
    known = {**PLAIN, "passes": [{"ssf": {"at": "blocks.*.attn.*"}}]}  # begins with ones and zeros: LoRA is drawn on the device
    expected = losses(run(tmp_path / "cpu", **known))
    done = run(tmp_path / "gpu", **known, device="cuda", train__precision=precision)
    assert losses(done) == pytest.approx(expected, rel=close)
    assert {p.device.type for p in done.module.parameters()} == {"cuda"}
    assert {p.device.type for p in fxplug.load(done.out / "module").parameters()} == {"cpu"}


@pytest.mark.parametrize("how", [{"train__compile": True}, {"train__checkpointing": True}, {"train__fuse": False}])
def test_lowered_runs(tmp_path, how):
    expected = losses(run(tmp_path / "a", **PLAIN, device="cuda"))
    assert losses(run(tmp_path / "b", **PLAIN, **how, device="cuda")) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("how", [{}, {"train__checkpointing": True}, {"train__precision": "bf16"}])
def test_blocks_are_swapped(tmp_path, how):
    vit = {"timm": "vit_tiny_patch16_224", "options": {"img_size": 16, "patch_size": 8, "depth": 6, "num_classes": 10}}
    known = {**PLAIN, **how, "model": vit, "device": "cuda"}
    plain, done = run(tmp_path / "a", **known), run(tmp_path / "b", **known, train__blocks_to_swap=4)
    assert losses(done) == pytest.approx(losses(plain), rel=1e-3)  # not all of a GPU's sums are in the same order again
    saved, expected = (fxplug.load(each.out / "module").state_dict() for each in (done, plain))
    assert all(torch.equal(saved[key], expected[key]) for key in expected if key.startswith("blocks."))
    swap = done.trainer.swap
    assert 0 < swap.most_bytes <= 2 * max(swap.bytes_of_blocks) and swap.bytes_on_device == 0
    assert all(each.host.is_pinned() and each.tensor.device.type == "cpu" for block in swap.weights for each in block)


def test_a_run_is_resumed_with_its_loss_scale(tmp_path):
    half = {**PLAIN, "device": "cuda", "train__precision": "fp16", "train__save": {"every": 3}}
    run(tmp_path / "a", **{**half, "train__steps": 3})
    again = run(tmp_path / "a", resume=True, **half)
    whole = run(tmp_path / "b", **half)
    assert losses(again) == pytest.approx(losses(whole), rel=1e-3)
    assert again.trainer.accelerator.scaler.get_scale() == whole.trainer.accelerator.scaler.get_scale()


def test_the_choice_of_the_device_is_left_to_accelerate(tmp_path):
    from runs import config

    left = {key: value for key, value in config(**PLAIN).items() if key != "device"}
    done = fxplug.train(left, out=tmp_path, quiet=True)
    assert next(done.module.parameters()).is_cuda
