"""An adapter that is on in training steps alone, as of models whose distillation must not be learnt away."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from test_train_state import Pictures, kept, made, trainer

import fxplug
from fxplug.core.errors import SpecError, TrainError


def adapter(folder, scale=1.0):
    """A file with a LoRA of both layers of the body, and the module that has it."""
    torch.manual_seed(5)
    module = fxplug.apply(made(norm=True), fxplug.load_pass("lora", at="body.*", rank=3))
    with torch.no_grad():
        for p in module.lora.parameters():
            p.copy_(scale * torch.randn(p.shape))
    shutil.rmtree(folder / "assistant", ignore_errors=True)
    fxplug.save_adapter(module, folder / "assistant")
    return module


def started(folder, **given):
    return trainer(lr=1e-2, fuse=False, base=folder, assistant="assistant", **given)


@pytest.mark.slow
def test_steps_have_it_and_tests_pictures_and_files_have_not(tmp_path):
    adapter(tmp_path)
    data = Pictures(24)
    run = started(tmp_path, steps=1, batch=24, out=tmp_path / "out", test={"every": 0, "data": data})
    plain = trainer(lr=1e-2, fuse=False, steps=1, batch=24)
    before = F.cross_entropy(run.module(data.x), data.y).item()
    run.fit(), plain.fit()
    assert plain.history[0]["loss"] == pytest.approx(before, rel=1e-5)
    assert abs(run.history[0]["loss"] - before) > 1e-3
    assert run.metrics["loss"] == pytest.approx(F.cross_entropy(run.module.eval()(data.x), data.y).item(), rel=1e-5)
    saved = fxplug.load(tmp_path / "out" / "module")
    for module in (run.module, saved):
        assert [entry["name"] for entry in module.meta["passes"]] == ["lora"]
        assert not any("assistant" in name for name in module.state_dict())
    assert torch.equal(saved.eval()(data.x), run.module(data.x))


def test_it_is_frozen_and_has_the_tensors_of_the_file(tmp_path):
    with_it = adapter(tmp_path)
    run = started(tmp_path, steps=1, batch=24)
    base = {name: p for name, p in run.module.named_parameters() if not name.startswith("lora.")}
    theirs = dict(with_it.named_parameters())
    run.fit()
    frozen = {name: p.detach().clone() for name, p in run.learner.named_parameters() if name.startswith("assistant.")}
    assert len(frozen) == 4 and not any(p.requires_grad for n, p in run.learner.named_parameters() if n in frozen)
    assert {tuple(p.shape) for p in frozen.values()} == {tuple(p.shape) for n, p in theirs.items() if n.startswith("lora.")}
    assert base and all(p.grad is None for p in base.values())


def test_it_goes_on_to_the_bit_and_another_file_is_another_run(tmp_path):
    adapter(tmp_path)
    given = {"steps": 6, "save": {"every": 3, "keep": 9}}
    whole = started(tmp_path, **given, out=tmp_path / "out")
    whole.fit()
    last = started(tmp_path, **given, out=tmp_path / "out")
    last.fit(resume=kept(tmp_path / "out", 3))
    assert all(torch.equal(a, b) for a, b in zip(whole.module.parameters(), last.module.parameters(), strict=True))
    adapter(tmp_path, 2.0)
    with pytest.raises(TrainError, match="base weights"):
        started(tmp_path, **given, out=tmp_path / "out").fit(resume=tmp_path / "out")


def test_what_it_cannot_be_is_said(tmp_path):
    with pytest.raises(SpecError, match=r"train.assistant: 'assistant' cannot be added to this module"):
        started(tmp_path)
    adapter(tmp_path)
    with pytest.raises(SpecError, match="is for runs without 'shard'"):
        started(tmp_path, shard=True)
