"""Training with samples that several processes share: the losses and weights of one process, and what cannot be."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch
import yaml
from runs import Digits, launched, trained, with_values
from torch.utils.data import DataLoader, DistributedSampler

import fxplug


def dit():
    """A DiT of diffusers that draws digits at 16 x 16."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=3, num_layers=2, patch_size=2, sample_size=16,
        norm_type="ada_norm_zero", num_embeds_ada_norm=10, activation_fn="gelu-approximate",
    )  # fmt: skip


CONFIG = {
    "model": {"call": "test_parallel_training:dit"},
    "inputs": {
        "hidden_states": [2, 3, 16, 16],
        "timestep": {"shape": [2], "dtype": "int64", "high": 1000},
        "class_labels": {"shape": [2], "dtype": "int64", "high": 10},
        "return_dict": False,
    },
    "passes": [{"lora": {"at": "transformer_blocks.*.attn1.*", "rank": 4}}],
    "train": {
        "task": {"denoise": {"samples": 0}}, "steps": 20, "batch": 8, "lr": 3e-3, "mode": "eval",
        "save": {"every": 10, "keep": 9}, "log": {"tensorboard": False},
    },
    "data": {"call": "runs:Digits"},
    "device": "cpu",
    "verify": False,
}  # fmt: skip


def run(out, resume=False, **changed):
    if changed.pop("sampler", False):  # one that counts processes, not groups of them
        return sampled(changed)
    return fxplug.train(with_values(CONFIG, **changed), out=out, resume=resume, quiet=True)


def sampled(settings):
    torch.manual_seed(0)
    gm = fxplug.trace(dit(), (torch.randn(2, 3, 16, 16), torch.tensor([1, 2]), torch.tensor([1, 2])), {"return_dict": False})
    new = fxplug.apply(gm.eval(), fxplug.load_pass("lora", at="**.to_q", rank=2))
    data = Digits()
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, 2, int(os.environ["RANK"])))
    task = {"denoise": {"samples": 0}}
    return fxplug.Trainer(new, task, loader, steps=2, mode="eval", device="cpu", quiet=True, **settings)


def pairs(done):
    return [pytest.approx([record["loss"], record["grad_norm"]], rel=1e-5) for record in done.history]


VIT = {
    "model": {"timm": "vit_tiny_patch16_224", "options": {"img_size": 16, "patch_size": 8, "depth": 2, "num_classes": 10}},
    "inputs": {}, "passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 4}}],
    "train__task": {"classify": {"augment": "none", "mixup": 0.5}}, "train__trainable": ["head"], "train__mode": "train",
    "data__test": {"call": {"runs:Digits": {"count": 17}}},
}  # fmt: skip
SHORT = {"train__steps": 6}
ULYSSES = {"train__parallel": {"ulysses": 2}}
DROPOUT = [{"lora": {"at": "transformer_blocks.*.attn1.*", "rank": 4, "dropout": 0.1}}]
CASES = {
    "heads": ({}, ULYSSES),
    "draws": ({**SHORT, "train__mode": "train", "passes": DROPOUT}, ULYSSES),  # drops classes, and values
    "ring": (
        {**SHORT, "train__batch": 4, "train__accumulate": 2, "train__clip": 0.01, "train__checkpointing": True},
        {"train__parallel": {"ring": 2}},
    ),
    "sharded": (
        {**SHORT, "train__ema": 0.9, "data__test": {"call": {"runs:Digits": {"count": 17}}}},
        {**ULYSSES, "train__shard": True, "train__checkpointing": True},
    ),
}
CONVOLUTIONS = {
    "model": {"timm": "resnet10t"}, "inputs": {}, "passes": [{"lora": {"at": "fc", "rank": 2}}],
    "train__task": {"classify": {"augment": "none"}},
}  # fmt: skip
WRONG = {
    "world": ({"train__parallel": {"ulysses": 2, "ring": 2}}, "4 processes share each sample, and there are 2: start with"),
    "dropout": ({**ULYSSES, "passes": DROPOUT}, "train.parallel: 'lora_.*' draws random numbers although the model is in eval"),
    "no tokens": ({**ULYSSES, **CONVOLUTIONS}, "train.parallel: nothing of this model can be split along .sequence.: no att"),
    "sampler": ({"sampler": True, "parallel": {"ulysses": 2}}, "processes . and . share each sample, and got different"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return folder, launched(folder, run, *((name, {**changed, **split}, {}) for name, (changed, split) in CASES.items()))


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("refused"), run, *((name, changed, {}) for name, (changed, _) in WRONG.items()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_processes_that_share_samples_give_what_one_gives(name, answers, tmp_path):
    folder, found = answers
    whole = run(tmp_path, **CASES[name][0])
    assert found[0][name] == found[1][name] == pairs(whole)
    assert whole.history[0]["loss"] != whole.history[-1]["loss"]
    kinds = ("module", "ema") if whole.trainer.ema else ("module",)
    for kind in kinds:
        again, one = (dict(fxplug.load(at / kind).named_parameters()) for at in (folder / name, tmp_path))
        assert again.keys() == one.keys() and all((again[key] - one[key]).abs().max() < 1e-5 for key in one)
    if whole.metrics:
        logged = [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]
        assert logged[-1]["test"]["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_shared_is_told_in_every_process(name, refusals):
    for each in refusals:
        assert isinstance(each[name], str) and each[name].split(":")[0] in ("SpecError", "TrainError")
        assert re.search(WRONG[name][1], each[name]), each[name]


@pytest.mark.slow
def test_one_process_goes_on_where_two_were(answers, tmp_path):
    """A run is resumed with another number of processes: a sample that is shared is one sample."""
    shutil.copytree(answers[0] / "heads", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000020")
    resumed, (pairs_of_two, _) = run(tmp_path / "run", resume=True), answers[1]
    assert [record["step"] for record in resumed.history] == list(range(1, 21))
    assert pairs_of_two["heads"][10:] == pairs(resumed)[10:]
    whole = dict(fxplug.load(answers[0] / "heads" / "module").named_parameters())
    assert all((value - whole[key]).abs().max() < 1e-5 for key, value in trained(resumed.module).items())


def test_the_section_says_where_it_is_wrong(tmp_path):
    file = tmp_path / "run.yaml"
    made = json.loads(json.dumps(CONFIG))
    for given, text in [
        ({"ulyses": 2}, r"run.yaml:\d+: train.parallel: unknown key 'ulyses' \(did you mean 'ulysses'"),
        ({"ulysses": 0}, r"run.yaml:\d+: train.parallel.ulysses: must be 1 or more, not 0"),
        ({"ring": 3}, r"run.yaml:\d+: train.parallel: 3 processes share each sample, and there is 1: start with torchrun"),
    ]:
        made["train"]["parallel"] = given
        file.write_text(yaml.safe_dump(made))
        with pytest.raises(fxplug.SpecError, match=text):
            fxplug.train(file, out=tmp_path / "out", quiet=True)


@pytest.mark.slow
def test_groups_of_processes_share_samples_and_take_others_than_the_next_group(tmp_path):
    """Two groups of two, on a model whose training and evaluation are one graph, in float32 and bfloat16."""
    common = {**SHORT, **VIT}
    cases = [("plain", {}), ("sharded", {"train__shard": True}), ("half", {"train__precision": "bf16", "dtype": "bfloat16"})]
    found = launched(tmp_path, run, *((n, {**common, **c, **ULYSSES}, {}) for n, c in cases), world=4)
    for name, changed in cases:
        whole = run(tmp_path / f"one {name}", **{**common, **changed, "train__shard": False, "train__batch": 16})
        close = 1e-5 if name != "half" else 1e-2
        for each in found:
            assert each[name] == [pytest.approx([r["loss"], r["grad_norm"]], rel=close) for r in whole.history]
