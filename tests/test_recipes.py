"""The recipes that ship: each trains its twin of a few layers, and is counted at its full size, where nothing has values."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import diffusers
import full_size
import pytest
import recipe_twins
import runs
import transformers
import yaml
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from safetensors.torch import load_file
from sweeps import sweep
from typer.testing import CliRunner

import fxplug
from fxplug.__main__ import app
from fxplug.core.errors import SpecError
from fxplug.core.spec.pass_file import list_recipes, list_shipped

BACKBONES = {
    "vit": {"timm": "vit_tiny_patch16_224", "options": {"img_size": 32, "depth": 2, "num_classes": 2}},
    "dino": {"timm": "vit_small_patch14_dinov2", "options": {"img_size": 28, "depth": 2, "num_classes": 2}},
    "convnext": {"timm": "convnext_tiny", "options": {"depths": [1, 1, 1, 1], "dims": [8] * 4, "num_classes": 2}},
    "swin": {"timm": "swin_tiny_patch4_window7_224",
             "options": {"img_size": 56, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2], "num_classes": 2}},
}  # fmt: skip
# which tiny pipeline stands for which
FAMILIES = {
    "sd15": "sd15", "sdxl": "sdxl", "sd35": "sd3", "flux1": "flux", "flux2": "flux2", "qwen_image": "qwen_image",
    "sana": "sana", "z_image": "z_image", "z_image_turbo": "z_image", "krea2": "krea2", "wan22": "wan22", "pixart": "pixart",
    "controlnet": "sd15", "qwen_image_edit": "qwen_image_edit", "ideogram4": "ideogram4", "flux3": "flux3",
    "ltx2": "ltx2",
}  # fmt: skip
# what is another number in a tiny twin, beside sizes
SMALLER = {
    "controlnet": ["passes=[{controlnet: {options: {conditioning_embedding_out_channels: [4, 8, 8, 16]}}}]",
                   "train.accumulate=1"],
    "flux3": ["model.call={text_encoder_out_layers: [1, 2]}"],
}  # fmt: skip
NETWORK = {"controlnet": "ControlNetModel"}  # whose adapter/ is a model of diffusers
PROVED = ("sd15", "sdxl", "sd35", "flux1", "qwen_image", "sana", "wan22", "ltx2")  # whose log has the proof
SIDES = {"dino": 28, "swin": 56}


def cli(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args), prog_name="fxplug")
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def sections(name: str) -> dict[str, Any]:
    return yaml.safe_load(list_recipes()[name].read_text("utf-8"))


def photos(folder: Path, side: int = 32) -> Path:
    for n, label in enumerate(("cat", "cat", "dog", "dog")):
        path = folder / label / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side), (60 * n, 200 - 40 * n, 90)).save(path)
    return folder


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_is_short_and_says_how_to_use_it(name):
    text = list_recipes()[name].read_text("utf-8")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    rest = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert text.isascii() and text.endswith("\n") and max(map(len, text.splitlines())) <= 127
    assert len(rest) <= 12 and all(rest) and set(sections(name)) >= {"model", "passes", "train", "data"}
    assert re.search(r"\d GB", comments[0])
    assert f"#   fxplug recipes {name} > mine.yaml" in comments
    assert any(line.startswith("#   fxplug train mine.yaml") for line in comments)


def test_names_of_recipes_are_taken_bare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = fxplug.load_config("vit")
    assert config.base == tmp_path == fxplug.load_config("train/vit").base
    assert fxplug.load_config("vit", base=tmp_path.parent).base == tmp_path.parent
    assert set(list_recipes()).isdisjoint(list_shipped("configs"))
    with pytest.raises(SpecError, match="no config named 'convnet'.*did you mean 'convnext'"):
        fxplug.load_config("convnet")
    with pytest.raises(SpecError, match="no pass named 'vit'"):
        fxplug.load_pass("vit")


def test_the_verb_lists_and_prints():
    listed = cli("recipes").splitlines()
    assert [line.split()[0] for line in listed] == list(list_recipes())
    for line, path in zip(listed, list_recipes().values(), strict=True):
        text = path.read_text("utf-8")
        assert line.split(maxsplit=1)[1] == text.splitlines()[0].removeprefix("# ")
        assert cli("recipes", path.stem) == text == cli("recipes", f"train/{path.stem}")


def test_a_wrong_name_has_the_nearest_and_all():
    said = cli("recipes", "convnet", code=1)
    assert "no recipe or folder named 'convnet' (did you mean 'convnext'?); there are " in said and ", vit" in said


def test_a_copy_of_a_recipe_is_said_to_be_a_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(cli("recipes", "sd15"))
    for name in ("mine.yaml", "./mine.yaml", str(tmp_path / "mine.yaml")):
        said = cli("recipes", name, code=1)
        assert f"'{name}' is a configuration, not a pipeline: train it with 'fxplug train {name}'" in said


@pytest.mark.slow
def test_a_pipeline_is_described_and_confirmed_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe_twins.save("wan22", tmp_path / "wan22")  # the name of a recipe, which --size shows to be a folder
    said = cli("recipes", "wan22", "--size", "64", "--call", "num_frames=1")
    for part, other in (("transformer", "transformer_2"), ("transformer_2", "transformer")):
        assert re.search(rf"^denoiser +{part}, and at other times {other}$", said, re.M)
    assert len(re.findall(r"^time  ", said, re.M)) == 2
    worst = re.findall(r"^confirmed on real steps \((.*)\)$", said, re.M)
    assert len(worst) == 2 and all(float(number) < 1e-5 for number in worst)
    one = cli("recipes", "./wan22", "--size", "64x64", "--call", "num_frames=1", "--part", "transformer_2")
    assert one.splitlines() == said.splitlines()[len(said.splitlines()) // 2 :]
    other = ["--part", "transformer_3", "--call", "num_frames=1"]
    wrong = {
        "has no denoiser 'transformer_3' (did you mean 'transformer_2'?)": other,
        "takes no argument 'num_frame' (did you mean 'num_frames'?)": ["--call", "num_frame=1"],
    }
    for text, options in wrong.items():
        assert text in cli("recipes", "./wan22", "--size", "64", *options, code=1)
    assert "wan22/vae' is not a pipeline" in cli("recipes", "wan22/vae", code=1)
    assert "--size must be a side" in cli("recipes", "./wan22", "--size", "64x", code=2)


@sweep("name", BACKBONES, "vit")
def test_a_backbone_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    side = SIDES.get(name, 32)
    photos(tmp_path / "photos", side)
    changes = [f"model={json.dumps(BACKBONES[name])}", f"data.size={side}", "data.workers=0", "train.batch=2"]
    trained(name, changes)


@sweep("name", ["clip", "siglip"])
def test_a_backbone_of_transformers_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos")
    family = {"clip": "CLIP", "siglip": "Siglip"}[name]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": 8}
    config = getattr(transformers, f"{family}Config")(
        vision_config={**sizes, "image_size": 32, "patch_size": 8}, text_config={**sizes, **words}
    )
    getattr(transformers, f"{family}ForImageClassification")(config).save_pretrained(tmp_path / "tiny")
    changes = ["model.options.pretrained_model_name_or_path=tiny", "model.options.num_labels=2"]
    trained(name, [*changes, "inputs.pixel_values=[2, 3, 32, 32]", "data.size=32", "data.workers=0", "train.batch=2"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:PixArtSigmaPipeline has no load_lora_weights")  # as its recipe says
@sweep("name", FAMILIES, "sana")
def test_a_pipeline_trains_and_its_adapter_is_that_of_the_stock_one(name, tmp_path, monkeypatch):
    """The tiny pipeline has the family's own layers, so patterns of the passes, and of checkpointing, must find some."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for constant, value in (("VAE_IMAGE_SIZE", 64 * 64), ("CONDITION_IMAGE_SIZE", 56 * 56)):
        monkeypatch.setattr(pipeline_qwenimage_edit_plus, constant, value)  # a megapixel takes minutes
    data = sections(name)["data"]
    for folder in (data["images"], data.get("conditions")):
        for n, caption in enumerate(("a red ball", "a blue cat") if folder else ()):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new("RGB", (64, 64), (60 * n, 90, 200)).save(tmp_path / folder / f"{n}.png")
            (tmp_path / folder / f"{n}.txt").write_text(caption)
    recipe_twins.save(FAMILIES[name], tmp_path / "tiny")
    few = "train.task={denoise: {samples: 1, sample_steps: 2}}"
    run = trained(name, ["model.pipeline=tiny", "data.size=64", few, *SMALLER.get(name, [])])
    part, adapter = sections(name)["model"]["part"], tmp_path / "run" / "adapter"
    if name in NETWORK:
        made = getattr(diffusers, NETWORK[name]).from_pretrained(adapter)
        assert made.config.cross_attention_dim == 12 and NETWORK[name] in run.use
        return
    if name in PROVED:
        assert "adapter/ in the stock pipeline: equal" in (tmp_path / "run" / "log.jsonl").read_text()
    folders = {one: adapter / one for one in part} if isinstance(part, list) else {part: adapter}
    for one, folder in folders.items():
        (file,) = folder.glob("*.safetensors")
        assert all(key.startswith(f"{one}.") for key in load_file(file))


def trained(name: str, changes: list[str], **more: Any) -> Any:
    """Run two steps of a recipe, the rest of its file as it is."""
    steps = ["train.epochs=null"] if "epochs" in sections(name)["train"] else []
    config = fxplug.load_config(name, [*changes, *steps, "train.steps=2", "train.log.tensorboard=false"])
    with runs.sharing():
        run = fxplug.train(config, out="run", quiet=True, **more)
    assert [row["step"] for row in run.history] == [1, 2]
    assert all(row["loss"] == row["loss"] and row["loss"] < 1e6 for row in run.history)
    return run


@pytest.mark.slow
@sweep("name", list_recipes(), "vit", "flux1")
def test_a_recipe_at_its_full_size(name):
    """What the recipe's own passes find and add on the architecture itself; the comment says the memory of the formula."""
    found = full_size.count(name)
    assert found.text == full_size.EXPECTED[name]
    assert abs(found.parameters / found.published - 1) < 0.02
    said = re.search(r": (\d+) GB", list_recipes()[name].read_text("utf-8").splitlines()[0])
    assert said is not None and int(said[1]) == found.gigabytes


def test_every_recipe_is_trained_and_counted():
    assert set(list_recipes()) == {*BACKBONES, *FAMILIES, "clip", "siglip"} == set(full_size.MODELS) == set(full_size.EXPECTED)


@pytest.mark.slow
def test_the_first_qwen_image_edit_trains_on_pairs(tmp_path, monkeypatch):
    """It has no recipe of its own: another pipeline class, which brings its picture to a megapixel by a function."""
    resize = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: resize(area // 256, ratio))
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        for n, caption in enumerate(("a red ball", "a blue cat")):
            Image.new("RGB", (64, 64), (60 * n, 90, 200)).save(tmp_path / folder / f"{n}.png")
            (tmp_path / folder / f"{n}.txt").write_text(caption)
    recipe_twins.save("qwen_image_edit_first", tmp_path / "tiny")
    config = {
        "model": {"pipeline": str(tmp_path / "tiny")}, "passes": [{"lora": {"at": "to_q", "rank": 2}}], "device": "cpu",
        "train": {"task": {"denoise": {"samples": 1, "sample_steps": 2}}, "steps": 2, "batch": 2},
        "data": {"images": str(tmp_path / "after"), "conditions": str(tmp_path / "before"), "size": 64, "cache": False},
    }  # fmt: skip
    with runs.sharing():
        done = fxplug.train(config, out=tmp_path / "run", quiet=True)
    assert len(done.history) == 2 and all(math.isfinite(row["loss"]) for row in done.history)
    assert any(note.startswith("adapter/ in the stock pipeline: equal") for note in runs.notes(tmp_path / "run"))
