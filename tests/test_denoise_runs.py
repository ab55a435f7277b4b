"""Diffusion fine-tuning end to end: photographs with captions, a ControlNet and LoRA in one file, from YAML to pictures."""

from __future__ import annotations

import pytest
import runs
import torch
import yaml
from PIL import Image, ImageFilter
from skimage import data

import fxplug

UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": [16, 32],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")
CONFIG = {
    "model": {"diffusers": UNET},
    "inputs": {
        "sample": [2, 3, 16, 16],
        "timestep": {"shape": [2], "dtype": "int64", "low": 0, "high": 1000},
        "encoder_hidden_states": [2, 1, 16],
        "return_dict": False,
    },
    "passes": [
        {"lora": {"at": "**.to_?", "rank": 4, "lr": 1e-2}},
        {"controlnet": {"lr": 2e-3, "options": {"conditioning_embedding_out_channels": [16]}}},  # of the image's own size
    ],
    "train": {
        "task": {
            "denoise": {
                "scheduler": {"DDPMScheduler": {"prediction_type": "v_prediction"}},
                "text": "test_denoise_runs:words",
                "dropout": 0.1,
                "snr_gamma": 5.0,
                "samples": 4,
                "sample_steps": 3,
                "guidance": 2.0,
            }
        },
        "steps": 15,
        "batch": 8,
        "log": {"samples": 6},
        "save": {"every": 10},
        "test": {"every": 3},
    },
    "data": {
        "images": "photos",
        "conditions": "test_denoise_runs:edges",
        "size": 16,
        "crop": "random",
        "flip": True,
        "test": "photos",
    },
    "device": "cpu",
    "verify": False,
}


def words(captions):
    """A fixed vector for each caption: (captions, 1, 16)."""
    seeds = [sum(map(ord, caption)) for caption in captions]
    return torch.stack([torch.randn(1, 16, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def edges(image):
    return image.filter(ImageFilter.FIND_EDGES)


@pytest.fixture
def folder(tmp_path):
    """Two crops of each of four photographs, with captions in text files."""
    (tmp_path / "photos").mkdir()
    for name in PHOTOS:
        photo = Image.fromarray(getattr(data, name)())
        for index in range(2):
            photo.crop((40 * index, 0, 40 * index + 300, 300)).resize((32, 32)).save(tmp_path / "photos" / f"{name}{index}.png")
            (tmp_path / "photos" / f"{name}{index}.txt").write_text(f"a picture of {name}")
    return tmp_path


ONE_LEVEL = {"block_out_channels": [16], "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
SMALL = {
    "model": {"diffusers": UNET | ONE_LEVEL},
    "passes": CONFIG["passes"][:1],
    "data": {key: value for key, value in CONFIG["data"].items() if key != "conditions"},
}


def start(folder, out, **changed):
    made = {**CONFIG, **changed}
    (folder / "run.yaml").write_text(yaml.safe_dump(made))
    return fxplug.train(folder / "run.yaml", out=folder / out, quiet=True)


@pytest.mark.slow  # in small: test_denoise has a ControlNet's loss and gradients, and a run of LoRA that makes pictures
def test_a_controlnet_and_lora_learn_to_draw_photographs(folder):
    run = start(folder, "run")
    tests = [line["test"]["loss"] for line in runs.logged(run.out) if "test" in line]
    assert len(tests) == 5 and tests == sorted(tests, reverse=True) and tests[-1] < 0.9 * tests[0]
    moved = {name.split(".")[0] for name, p in run.module.named_parameters() if p.requires_grad}
    assert moved == {"lora", "controlnet"}
    pictures = sorted(path.name for path in (run.out / "samples").iterdir())
    assert pictures == ["captions.txt", "data.png", *(f"step-{n:08d}.png" for n in (0, 6, 12, 15))]
    assert (run.out / "samples" / "captions.txt").read_text().count("a picture of") == 4
    assert run.use.startswith("import fxplug") and not (run.out / "adapter").exists(), "diffusers has no file for a ControlNet"
    assert all(path.stat().st_size > 200 for path in (run.out / "samples").glob("*.png"))
    assert (run.out / "loss.png").is_file()
    again = fxplug.load(run.out / "module")
    sample, time, text = torch.randn(2, 3, 16, 16), torch.tensor([10, 500]), words(["a", "b"])
    condition = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        mine, read = (m(sample, time, text, cond=condition, return_dict=False)[0] for m in (run.module.eval(), again.eval()))
    assert torch.equal(mine, read)


@pytest.mark.slow
def test_the_samples_do_not_disturb_the_run_and_it_resumes_to_the_bit(folder):
    plain = {**CONFIG["train"], "steps": 4, "save": {"every": 2, "keep": 9}, "test": {"every": 0}}
    with_pictures = start(folder, "a", **SMALL, train={**plain, "log": {"samples": 1}})
    without = start(folder, "b", **SMALL, train={**plain, "log": {"samples": 0}})
    assert [r["loss"] for r in with_pictures.history] == [r["loss"] for r in without.history]
    second = folder / "b" / "checkpoints" / "step-00000002"
    resumed = fxplug.train(folder / "run.yaml", out=folder / "c", resume=second, quiet=True)
    tail = [record["loss"] for record in resumed.history if record["step"] > 2]
    assert tail == [r["loss"] for r in without.history][2:]


@pytest.mark.slow
def test_a_corrupt_photograph_is_named_and_the_run_goes_on(folder, capfd):
    (folder / "photos" / "coffee0.png").write_text("no picture at all")
    run = start(folder, "run", **SMALL, train={**CONFIG["train"], "steps": 3, "batch": 4, "log": {"samples": 0}})
    assert len(run.history) == 3
    assert "1 images could not be read: coffee0.png" in capfd.readouterr().err
    assert any("coffee0.png" in note for note in runs.notes(run.out))


def test_missing_captions_and_an_empty_folder_are_errors(folder):
    (folder / "photos" / "rocket1.txt").unlink()
    with pytest.raises(fxplug.FxplugError, match=r"rocket1\.png"):
        start(folder, "run")
    (folder / "nothing").mkdir()
    with pytest.raises(fxplug.FxplugError, match="run.yaml:.*nothing"):
        start(folder, "run", data={**CONFIG["data"], "images": "nothing"})
    assert not (folder / "run" / "checkpoints").exists()
