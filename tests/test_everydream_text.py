"""What EveryDream2trainer's plugins see and change of captions, tokens, images and the text encoder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import runs
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits
from sweeps import sweep
from test_everydream import THEIRS, theirs

import fxplug
from fxplug.compat.everydream import BasePlugin
from fxplug.core.errors import SpecError, TrainError

UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": [8],
    "down_block_types": ["CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz*,!_0123456789"
EMBEDDINGS = {"clip": {"trainable": ["embeddings.token_embedding"], "lr": 0.05}}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with `photos`, digits with captions, and `clip`, a text encoder."""
    folder = tmp_path_factory.mktemp("everydream")
    (folder / "photos").mkdir()
    images, labels = load_digits(return_X_y=True)
    for index in range(8):
        Image.fromarray((images[index].reshape(8, 8) * 15).astype("uint8")).convert("RGB").save(folder / f"photos/{index}.png")
        (folder / f"photos/{index}.txt").write_text(f"hat* {labels[index]}, cat")
    names = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS), "at</w>", "cat</w>"]
    tokenizer = transformers.CLIPTokenizer(
        vocab={name: number for number, name in enumerate(names)}, merges=[("a", "t</w>"), ("c", "at</w>")], model_max_length=12
    )
    tokenizer.save_pretrained(folder / "clip/tokenizer")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 4}
    tokens = {"vocab_size": len(names), "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes, **tokens)).save_pretrained(folder / "clip/text_encoder")
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def draw(folder, out, *plugins, text="clip", **changed):
    """A run that learns to draw: 4 batches of 2 an epoch."""
    config = {
        "model": {"diffusers": UNET},
        "inputs": {
            "sample": [2, 3, 8, 8],
            "timestep": {"shape": [2], "dtype": "int64", "low": 0, "high": 1000},
            "encoder_hidden_states": [2, 12, 8],
            "return_dict": False,
        },
        "passes": [{"lora": {"at": "**.to_?", "rank": 2}}],
        "train": {"task": {"denoise": {"text": text, "dropout": 0.2, "samples": 1, "sample_steps": 1}}, "epochs": 1, "batch": 2,
                  "plugins": list(plugins), "log": {"tensorboard": False}},
        "data": {"images": "photos"},
        "device": "cpu",
        "verify": False,
    }  # fmt: skip
    for part in ("photos", "clip"):
        if not (Path.cwd() / part).exists():
            (Path.cwd() / part).symlink_to(folder / part)
    with runs.sharing():
        return fxplug.train(runs.with_values(config, **changed), out=out, quiet=True)


class Sees(BasePlugin):
    """What is there of a batch and of the state, as train.py has them."""

    def __init__(self):
        self.batches, self.images, self.prompts = [], [], []

    def on_model_load(self, ed_state, optimizer_config, disable_unet_training, disable_textenc_training, resume_ckpt, **kwargs):
        assert ed_state.optimizer is None and not disable_unet_training and disable_textenc_training
        assert optimizer_config["text_encoder_freezing"]["freeze_embeddings"] and Path(resume_ckpt).name == "clip"
        assert ed_state.text_encoder.text_model.get_input_embeddings() is ed_state.text_encoder.get_input_embeddings()
        assert ed_state.tokenizer.tokenize("cat") == ["cat</w>"] and ed_state.scheduler.config.num_train_timesteps == 1000

    def on_step_start(self, batch, **kwargs):
        assert "timesteps" not in batch

    def on_step_end(self, batch, **kwargs):
        self.batches.append(batch)

    def transform_pil_image(self, img):
        self.images.append(img)
        return img

    def modify_sample_prompt(self, prompt):
        self.prompts.append(prompt)
        return prompt


@pytest.mark.slow
def test_batches_images_and_prompts_are_as_they_are_there(pictures, tmp_path):
    plain = draw(pictures, tmp_path / "plain")
    run = draw(pictures, tmp_path / "run", "test_everydream_text:Sees")
    assert [record["loss"] for record in run.history] == [record["loss"] for record in plain.history]
    (seen,) = run.trainer.plugins._plugins.values()
    for batch in seen.batches:
        assert batch["captions"] == batch["caption"] and batch["runt_size"] == 0
        assert batch["tokens"].shape == (2, 12) and batch["tokens"].dtype == torch.int64
        assert batch["loss_scale"].tolist() == [1, 1] and batch["timesteps"].shape == (2,)
    assert {(image.shape, str(image.dtype)) for image in seen.images} == {((8, 8, 3), "uint8")} and len(seen.images) == 8
    assert seen.prompts == ["hat* 0, cat"]


class Blank(BasePlugin):
    """The model sees what a plugin makes of a batch."""

    def on_step_start(self, batch, ed_state, **kwargs):
        batch["tokens"][:] = ed_state.tokenizer("cat", padding="max_length", max_length=12, return_tensors="pt").input_ids


@pytest.mark.slow
def test_changed_tokens_are_what_is_trained_on(pictures, tmp_path):
    tokens = draw(pictures, tmp_path / "tokens", "test_everydream_text:Blank")
    captions = draw(pictures, tmp_path / "captions", runs.plugin("OneCaption", transform_caption=lambda self, caption: "cat"))
    plain = draw(pictures, tmp_path / "plain")
    losses = [[record["loss"] for record in run.history] for run in (tokens, captions, plain)]
    assert losses[0] == losses[1] != losses[2]


class Word(BasePlugin):
    """A new word is learnt, and nothing else of the text encoder."""

    def on_model_load(self, ed_state, optimizer_config, **kwargs):
        assert optimizer_config["text_encoder_freezing"] == {
            "freeze_embeddings": False, "freeze_position_embeddings": True, "freeze_final_layer_norm": True,
            "unfreeze_last_n_layers": 0,
        }  # fmt: skip
        ed_state.tokenizer.add_tokens(["hat*"])
        ed_state.text_encoder.resize_token_embeddings(len(ed_state.tokenizer))
        self.number = ed_state.tokenizer.convert_tokens_to_ids("hat*")
        self.before = ed_state.text_encoder.get_input_embeddings().weight.detach().clone()

    def on_backpropagation(self, ed_state, **kwargs):
        gradient = ed_state.text_encoder.get_input_embeddings().weight.grad
        gradient[torch.arange(len(gradient)) != self.number] = 0

    def on_model_save(self, ed_state, save_folder, **kwargs):
        torch.save(ed_state.text_encoder.get_input_embeddings().weight[self.number], Path(save_folder) / "word.bin")


@pytest.mark.slow
def test_a_word_is_learnt(pictures, tmp_path):
    how = {"text": EMBEDDINGS, "passes": [], "train__weight_decay": 0.0, "train__ema": 0.9}
    run = draw(pictures, tmp_path / "run", "test_everydream_text:Word", **how)
    (plugin,) = run.trainer.plugins._plugins.values()
    after = run.trainer.plugins.state.text_encoder.get_input_embeddings().weight.detach()
    changed = (after != plugin.before).any(1).nonzero().flatten().tolist()
    assert changed == [plugin.number]
    assert torch.load(tmp_path / "run/module/word.bin").equal(after[plugin.number])
    again = transformers.CLIPTextModel.from_pretrained(tmp_path / "run/text/text_encoder")
    assert again.get_input_embeddings().weight.equal(after)
    with pytest.raises(SpecError, match=r"'embedings' names no parameter of the text encoder \(did you mean 'embeddings'"):
        draw(pictures, tmp_path / "wrong", text={"clip": {"trainable": ["embedings"]}})


@theirs
def test_its_textual_inversion_learns_a_word(pictures, tmp_path):
    (tmp_path / "plugins").mkdir()
    shutil.copy(THEIRS / "plugins/textual_inversion.py", tmp_path / "plugins")
    words = {"tokens": [{"token": "hat*", "initializer_word": "cat"}]}
    (tmp_path / "plugins/textual_inversion.json").write_text(json.dumps(words))
    name = "plugins.textual_inversion.TextualInversionPlugin"
    with pytest.raises(TrainError, match="raised in on_model_load: RuntimeError: Misconfigured optimizer config"):
        draw(pictures, tmp_path / "frozen", name)
    # it puts back the words of each batch: with momentum, those of earlier batches move on, there as here
    run = draw(pictures, tmp_path / "run", name, text=EMBEDDINGS, train__optimizer="sgd")
    (plugin,) = run.trainer.plugins._plugins.values()
    after = run.trainer.plugins.state.text_encoder.get_input_embeddings().weight.detach()
    changed = (after != plugin.original_text_embeddings).any(1).nonzero().flatten().tolist()
    assert changed == plugin.training_token_ids and after[changed[0]].isfinite().all()
    (saved,) = torch.load(tmp_path / "run/module/textual_inversions/hat.bin").values()
    assert saved.equal(after[changed[0]])


def fails(self, caption):
    if caption.startswith("hat* 3"):
        raise RuntimeError("out of ink")
    return caption


@pytest.mark.slow
@sweep("workers", [0, 1], 0)
def test_a_plugin_that_raises_where_data_are_loaded(pictures, tmp_path, workers):
    text = r"plugin Fails raised in transform_caption \(epoch 0, 3.png\): RuntimeError: out of ink"
    with pytest.raises(TrainError, match=text):
        draw(pictures, tmp_path / "run", runs.plugin("Fails", transform_caption=fails), data__workers=workers)


IMAGES = {
    "Larger": (lambda self, img: img.repeat(2, 0), "png: transform_pil_image returned an image of 16x8 of one of 8x8"),
    "Unscaled": (lambda self, img: img * 1.0, "it returned floats from 0 to 240; floats go from 0 to 1, uint8 to 255"),
    "OfPil": (lambda self, img: img.point(lambda value: 255 - value), "has no attribute .point.; img is a numpy array"),
}


@sweep("name", IMAGES, 0)
def test_what_is_no_image_is_told(pictures, tmp_path, name):
    changes, text = IMAGES[name]
    with pytest.raises(TrainError, match=text):
        draw(pictures, tmp_path / "run", runs.plugin(name, transform_pil_image=changes))


def bright(self, img, pil):
    assert img.shape == (pil.height, pil.width, 3)
    return (img / 255) ** 0.5


@pytest.mark.slow
def test_images_may_come_back_as_pil_and_as_floats(pictures, tmp_path):
    grey = runs.plugin("Grey", transform_pil_image=lambda self, pil: pil.convert("L"))
    run = draw(pictures, tmp_path / "run", grey, runs.plugin("Bright", transform_pil_image=bright), "test_everydream_text:Sees")
    seen = [*run.trainer.plugins._plugins.values()][-1]
    assert {(image.shape, str(image.dtype)) for image in seen.images} == {((8, 8, 3), "uint8")}
    assert min(image.max() for image in seen.images) >= 240  # 225 as they are


@pytest.mark.slow
def test_images_have_a_share_of_the_loss_and_of_the_dropout(pictures, tmp_path):
    shutil.copytree(pictures / "photos", tmp_path / "photos")
    plain = draw(pictures, tmp_path / "plain")
    (tmp_path / "photos" / "loss_scale.txt").write_text("0.5")
    half = draw(pictures, tmp_path / "half")
    assert half.history[0]["loss"] == pytest.approx(plain.history[0]["loss"] / 2)
    (tmp_path / "photos" / "loss_scale.txt").unlink()
    (tmp_path / "photos" / "cond_dropout.txt").write_text("1.0")
    none = draw(pictures, tmp_path / "none")
    blank = runs.plugin("NoCaption", transform_caption=lambda self, caption: "")
    empty = draw(pictures, tmp_path / "empty", blank, data__captions="required")
    assert [r["loss"] for r in none.history] == [r["loss"] for r in empty.history] != [r["loss"] for r in plain.history]
