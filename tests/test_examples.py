"""Every example runs and says what the README promises."""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import forked_python
import pipelines
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sweeps import sweep

import fxplug
from fxplug.compat.hcp.convert_file import convert
from fxplug.core.spec.pass_file import list_shipped
from fxplug.core.spec.yaml_source import parse_yaml, read_yaml

EXAMPLES = Path(__file__).parent.parent / "examples"


def output(name, capsys):
    """What an example prints; a program of its own may set the level of a log, which later tests of this process read."""
    logs = [logging.getLogger(name) for name in ("fxplug.serving", "diffusers")]
    levels = [log.level for log in logs]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
    return capsys.readouterr().out


@pytest.mark.slow
def test_every_example_is_tried_and_is_one_screen():
    assert {p.name for p in EXAMPLES.glob("*.py")} == {
        "controlnet.py", "controlnet_pipeline.py", "efficientnet_adapters.py", "fashion.py", "hcp_and_everydream.py",
        "hcp_plugins.py", "load.py", "lora_for_a_pipeline.py", "many_requests.py", "own_block.py", "parallel.py",
        "pipeline_adapters.py", "quickstart.py", "step_cache.py", "text_to_image.py", "trained_lora.py", "unet_in_pipeline.py",
        "zhijian_mlp.py", "zhijian_trainer.py",
    }  # fmt: skip
    assert all(len(p.read_text().splitlines()) <= 60 for p in EXAMPLES.glob("*.py"))


@pytest.mark.slow
def test_quickstart(tmp_path):
    pytest.importorskip("skimage")
    fxplug.rewrite("quickstart", out=tmp_path / "out", verify=False)
    command = [sys.executable, str(EXAMPLES / "quickstart.py"), str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert run.returncode == 0, run.stderr
    assert "loaded without timm" in run.stdout and run.stdout.count("torch.equal: True") == 3
    assert "cat" in run.stdout and "espresso" in run.stdout
    assert "+lora_conv_stem_Lora = lora.conv_stem.Lora(" in run.stdout


@pytest.mark.slow
def test_lora_for_a_pipeline(capsys, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    pipelines.stable_diffusion(tmp_path).save_pretrained(tmp_path / "pipe")
    (tmp_path / "photographs").mkdir()
    for name in ("cat", "dog"):
        Image.new("RGB", (64, 64), "red" if name == "cat" else "blue").save(tmp_path / "photographs" / f"{name}.png")
        (tmp_path / "photographs" / f"{name}.txt").write_text(name)
    size = json.loads((tmp_path / "pipe" / "unet" / "config.json").read_text())["cross_attention_dim"]
    less = ["train.steps=2", "train.batch=2", "train.lr=0.1", "data.size=64", "inputs.sample=[2,4,8,8]", "device=cpu"]
    less += [f"inputs.encoder_hidden_states=[2,8,{size}]"]
    folders = [str(tmp_path / name) for name in ("pipe", "photographs", "out")]
    monkeypatch.setattr(sys, "argv", ["lora_for_a_pipeline.py", *folders, *less])
    lines = output("lora_for_a_pipeline.py", capsys).splitlines()
    assert len(lines) == 3 and lines[2] == f"pipe.load_lora_weights('{tmp_path}/out/adapter')"
    space = {}
    exec("\n".join(lines), space)
    trained = fxplug.load(tmp_path / "out" / "module")
    call = {
        "sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([5, 900]), "encoder_hidden_states": torch.randn(2, 8, size),
    }  # fmt: skip
    with torch.no_grad():
        theirs, mine = space["pipe"].unet(**call)[0], trained(**call)[0]
        space["pipe"].disable_lora()
        assert (theirs - mine).abs().max() < 1e-5 < (space["pipe"].unet(**call)[0] - mine).abs().max()


@pytest.mark.slow
def test_unet_in_pipeline(capsys):
    pytest.importorskip("transformers")
    assert output("unet_in_pipeline.py", capsys) == (
        "LoRA on 48 projections\nsame picture while LoRA is new: True\nsame picture once its weights are not zero: False\n"
    )


@pytest.mark.slow
def test_parallel(tmp_path):
    """A model that no library has, without weights worth speaking of, by two processes and by stale patches."""
    command = [forked_python.python(), "-W", "ignore", str(EXAMPLES / "parallel.py"), "--quick"]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stderr
    exact = dict(re.findall(r"^(ulysses 2|ring 2|guidance 2) +(\S+) ", run.stdout, re.MULTILINE))
    assert len(exact) == 3 and all(float(away) < 1e-5 for away in exact.values())
    tables = re.split(r"^(?:2 stages, stale patches|no stages, stale gathers)", run.stdout, flags=re.MULTILINE)[1:]
    assert [len(re.findall(r"^\d patches, warm-up", table, re.MULTILINE)) for table in tables] == [2, 2]


@pytest.mark.slow
def test_step_cache(capsys):
    pytest.importorskip("transformers")
    every, same, third, away, inputs = output("step_cache.py", capsys).splitlines()
    assert every == "Every(interval=1, start=1), shallow: 35 of 493 operations" and third.startswith("Every(interval=3")
    assert same == "  9 steps in full, 0 shallow; picture 0.0000 away"
    assert away.startswith("  3 steps in full, 6 shallow; picture 0.0") and "0.0000" not in away
    assert inputs.startswith("inputs of a shallow step: sample, timestep, ") and inputs.endswith(", kept")


@pytest.mark.slow
def test_controlnet(capsys):
    text = output("controlnet.py", capsys)
    assert "6 places, new inputs cond, strength, start, end" in text and "graphs that were compiled: 1\n" in text
    away = [float(line.split()[-1]) if line.startswith("strength") else float(line.rpartition(":  ")[2].split()[0])
            for line in text.splitlines()[1:-1]]  # fmt: skip
    assert away[0] == away[1] == away[4] == 0 < away[2] < away[3]


def in_pipelines(name, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES / "tiny"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers' and PEFT's, of a second adapter
        return output(name, capsys)


@pytest.mark.slow
def test_controlnet_pipeline(capsys, monkeypatch):
    text = in_pipelines("controlnet_pipeline.py", capsys, monkeypatch)
    assert text.count("three models: True\n") == 4 and "saved and loaded as a pipeline: True\n" in text
    assert "LoRA at 16 places of the UNet and 16 of the ControlNets\n" in text


@pytest.mark.slow
def test_pipeline_adapters(capsys, monkeypatch):
    text = in_pipelines("pipeline_adapters.py", capsys, monkeypatch)
    away = [float(value) for value in re.findall(r"(\S+) away from diffusers", text)]
    assert len(away) == 3 and max(away) < 1e-5 and "unloaded, the base again: True\n" in text


@pytest.mark.slow
def test_text_to_image(capsys, monkeypatch):
    text = in_pipelines("text_to_image.py", capsys, monkeypatch)
    away = [float(value) for value in re.findall(r"(\S+) away from diffusers", text)]
    assert len(away) == 4 and max(away) < 1e-5 and text.count("two more strengths: 1\n") == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers' schedulers
@pytest.mark.parametrize(("name", "more", "found"), [
    ("many_requests.py", [], r"old classes 100.0%, of the new 100.0%\n10 requests of 40 steps in (\d+) calls"),
    ("load.py", ["--rate", "1000"], r"8 pictures, \S+ a CPU second; (\d+) calls of the denoiser"),
])  # fmt: skip
def test_an_engine_of_garments(name, more, found, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--quick", *more])  # at once: how many come later are joined is a matter of speed
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = output(name, capsys)
    assert int(re.search(found, text)[1]) <= 20, text  # one after the other 40 and more


@pytest.mark.slow
def test_own_block(capsys):
    text = output("own_block.py", capsys)
    assert "outputs are torch.equal (mixer)" in text
    assert "+mixer_blocks_0_mlp_TokenMixer = mixer.blocks.0.mlp.TokenMixer(blocks_0_mlp_drop2)" in text


@pytest.mark.slow
def test_hcp_plugins(capsys):
    text = output("hcp_plugins.py", capsys)
    assert "12 skips, same output while new: True\na gradient through one compiled graph: True\n" in text
    assert "count: the attribute 'self.calls' is read before this call has written it" in text


@pytest.mark.slow
def test_hcp_and_everydream_in_two_steps(tmp_path, monkeypatch, caplog):
    """The plugins of both kinds are there, and the passes are those of HCP-Diffusion's file."""
    parts = EXAMPLES / "hcp_and_everydream"
    monkeypatch.syspath_prepend(str(parts))
    monkeypatch.syspath_prepend(str(EXAMPLES / "fashion"))
    converted = convert(parts / "hcp.yaml", model=str(parts / "train.yaml"), out=parts / "out.yaml")
    assert parse_yaml(converted.text).data["passes"] == read_yaml(parts / "train.yaml").data["passes"]
    (tmp_path / "digits").mkdir()
    for index, word in enumerate(("zero", "one")):
        Image.new("L", (28, 28), 100 * index).save(tmp_path / "digits" / f"{index}.png")
        (tmp_path / "digits" / f"{index}.txt").write_text(f"a handwritten digit, {word}")
    less = [f"data.images={tmp_path / 'digits'}", "train.steps=2", "train.batch=2", "train.log.samples=0"]
    with caplog.at_level("INFO"):
        fxplug.train(parts / "train.yaml", out=tmp_path / "out", set=less, quiet=True)
    assert "epoch 0 of out begins at step 0" in caplog.text
    again = fxplug.load(tmp_path / "out" / "module", allow=["blocks"])
    assert {"skip", "lora_block_0"} <= {name.partition(".")[0] for name, _ in again.named_parameters()}


@pytest.mark.slow
def test_hcp_and_everydream(tmp_path):
    less = ["train.steps=3", "train.log.samples=0"]
    command = [forked_python.python(), str(EXAMPLES / "hcp_and_everydream.py"), str(tmp_path / "out"), *less]
    run = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert run.returncode == 0, run.stderr
    assert "epoch 0 of run begins at step 0" in run.stderr and "recognised: " in run.stdout


@pytest.mark.slow
def test_trained_lora(capsys):
    pytest.importorskip("skimage")
    text = output("trained_lora.py", capsys)
    assert "base weights untouched: True" in text and "loaded again, same answers: True" in text


@pytest.mark.slow
def test_efficientnet_adapters(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["efficientnet_adapters.py", "--steps", "1", "--digits", "50", "LoRA", "full"])
    heading, lora, *full = output("efficientnet_adapters.py", capsys).splitlines()
    assert heading.split() == ["method", "accuracy", "trainable", "CPU", "time", "of", "a", "step"]
    assert lora.split()[3:] == ["295,158", "1.0"] and [row.split()[3] for row in full] == ["3,383,818"]


@pytest.mark.slow
def test_zhijian_trainer(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zhijian_trainer.py", "1", "60"])
    runpy.run_path(str(EXAMPLES / "zhijian_trainer.py"), run_name="__main__")
    text = capsys.readouterr().err
    for counts in ("0.01M / 38.61M (0.02858%)", "0.16M / 22.21M (0.70625%)"):
        assert f"Trainable/total parameters of the model: {counts}" in text
    assert text.count("Acc@1 %    Acc@5 %") == 2 and text.count("Best so far: Acc@1 % ") == 4


@pytest.mark.slow
def test_the_weights_of_fashion_are_those_of_its_configurations(monkeypatch):
    """And the judge knows garments."""
    parts = EXAMPLES / "fashion"
    monkeypatch.syspath_prepend(str(parts))
    monkeypatch.setenv("FASHION_MNIST", str(parts / "few"))
    from garments import CLASSES, conditions
    from judge import recognised

    for name in ("lora", "controlnet", "classifier"):
        module = fxplug.rewrite(parts / f"{name}.yaml", verify=False).module.eval()
        weights = load_file(parts / f"{name}.safetensors")
        trained = {f"{p.name}." for p in fxplug.load_config(parts / f"{name}.yaml").passes}
        assert not module.load_state_dict(weights, strict=False).unexpected_keys
        assert not trained or all(any(key.startswith(t) for key in weights) for t in trained)
    _, captions, _ = found = conditions(CLASSES[:8], 2)
    assert sum(recognised(module, found[0], captions).values()) / 8 > 0.7


@pytest.mark.slow
def test_fashion(tmp_path):
    """Two steps of each training, then what the trained weights beside it are worth, on a few images."""
    command = [forked_python.python(), str(EXAMPLES / "fashion.py"), "--quick", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert run.returncode == 0, run.stderr
    share = {title: float(value) for title, value in re.findall(r"^  (.*): ([\d.]+)% recognised", run.stdout, re.M)}
    assert share["base, unseen classes"] < 20 and min(share["base"], share["LoRA"], share["LoRA, the old classes"]) > 70
    off, on = (float(value) for value in re.findall(r"F1 ([\d.]+)", run.stdout))
    assert on > off + 0.1
    assert (tmp_path / "samples.png").is_file()


@pytest.mark.slow
@sweep("name", [name for name in list_shipped("configs") if "/" not in name], "quickstart", "vit_lora")  # recipes: test_recipes
def test_shipped_configurations_find_their_sites(name):
    result = fxplug.rewrite(name, dry_run=True, verify=False)
    assert {n: len(sites) for n, sites in result.sites.items()} == {
        "quickstart": {"lora": 50},
        "vit_lora": {"lora": 24},
        "sd15_meta": {"lora": 128},
    }[name]
    assert all(p.is_meta for p in result.module.parameters())
