"""What adapter files say of themselves: ModelSpec's fields, as they are given and as a model tells them; the same each time."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

import fxplug
from fxplug.adapters.contents import AdapterContents, ModelLayer
from fxplug.adapters.tables import FORMATS
from fxplug.adapters.updates import Entry
from fxplug.adapters.writing import About, FileOptions, make_content, write
from fxplug.core.errors import SpecError

GIVEN = {"title": "Ink", "author": "A. N.", "license": "CC-BY-4.0", "trigger_phrase": "in ink", "date": "2026-07-16T18:13:38Z"}
LAYERS = {"blocks.0.to_q": ModelLayer("Linear", (8, 8))}


def made(as_, kind="Net", config=None, **options):
    entry = Entry("", "blocks.0.to_q", "", "lora", {"down": torch.ones(2, 8), "up": torch.ones(8, 2)}, 0.5, 2)
    about = About(LAYERS, (kind,), config or {})
    return make_content(AdapterContents((entry,), {}), as_, about, FileOptions(part="unet", **options))


def metadata(path):
    (file,) = path.glob("*.safetensors") if path.is_dir() else [path]
    with safe_open(file, "pt") as opened:
        return opened.metadata()


@pytest.mark.parametrize("as_", FORMATS)
def test_fields_that_are_given_are_in_each_format(as_, tmp_path):
    about = {**GIVEN, "resolution": "1024x768", "my.note": "first", "ss_tag": "x"}
    said = metadata(write(made(as_, metadata=about), tmp_path / "ink", as_).path)
    assert {key: said[f"modelspec.{key}"] for key in (*GIVEN, "resolution")} == {**GIVEN, "resolution": "1024x768"}
    assert said["my.note"] == "first" and said["ss_tag"] == "x" and "title" not in said


def test_what_is_not_known_of_a_model_is_left_out(tmp_path):
    said = metadata(write(made("kohya"), tmp_path / "ink", "kohya").path)
    own = {key.removeprefix("modelspec.") for key in said if key.startswith("modelspec.")}
    assert own == {"sai_model_spec", "implementation", "title"}


UNET = {"in_channels": 4, "sample_size": 64}
KNOWN = [
    ("UNet2DConditionModel", {**UNET, "cross_attention_dim": 768}, "stable-diffusion-v1/lora"),
    ("UNet2DConditionModel", {**UNET, "cross_attention_dim": 768, "in_channels": 9}, None),
    ("UNet2DConditionModel", {**UNET, "cross_attention_dim": 1024}, "stable-diffusion-v2-512/lora"),
    ("UNet2DConditionModel", {**UNET, "cross_attention_dim": 1024, "sample_size": 96}, "stable-diffusion-v2-768-v/lora"),
    ("FluxTransformer2DModel", {"guidance_embeds": True}, "flux-1-dev/lora"),
    ("FluxTransformer2DModel", {"guidance_embeds": False}, "flux-1-schnell/lora"),
    ("QwenImageTransformer2DModel", {}, "Qwen-Image/lora"),
]


@pytest.mark.parametrize(("kind", "config", "architecture"), KNOWN)
@pytest.mark.parametrize("as_", ["diffusers", "comfy"])
def test_a_model_tells_its_architecture(as_, kind, config, architecture):
    about = made(as_, kind, config).about
    assert about.get("modelspec.architecture") == architecture and about["modelspec.sai_model_spec"] == "1.0.1"
    size = config.get("sample_size")
    assert about.get("modelspec.resolution") == (size and f"{8 * size}x{8 * size}")
    assert any(key.startswith("ss_") for key in about) is (as_ == "comfy")


@pytest.mark.parametrize(("about", "finding"), [
    ({"licence": "MIT"}, r"no field 'licence' \(did you mean 'license'\?\); there are title"),
    ({"resolution": "1024"}, "resolution in metadata must be width and height, as 1024x768, not '1024'"),
    ({"modelspec.date": "yesterday"}, "date in metadata must be of ISO 8601, as 2026-07-16, not 'yesterday'"),
    ({"title": 3}, "text to text, and 'title' is not text"),
])  # fmt: skip
def test_what_is_no_such_field_is_refused(about, finding):
    with pytest.raises(SpecError, match=finding):
        made("kohya", metadata=about)


@pytest.mark.parametrize("as_", FORMATS)
def test_two_files_of_one_adapter_are_the_same_bytes(as_, tmp_path):
    paths = [write(made(as_, metadata={**GIVEN, "my.ünïcode\x1f": "\u2028 \"/\\"}), tmp_path / name, as_).path for name in "ab"]
    files = [next(path.glob("*.safetensors")) if path.is_dir() else path for path in paths]
    first, second = (file.read_bytes() for file in files)
    assert first == second
    said = json.loads(first[8 : 8 + int.from_bytes(first[:8], "little")])["__metadata__"]
    assert list(said) == sorted(said) and len(said) > 6 and said == metadata(files[0])


def test_a_converted_file_keeps_what_its_maker_said(tmp_path):
    path = write(made("peft", metadata={**GIVEN, "resolution": "512x512"}), tmp_path / "peft", "peft").path
    done = fxplug.convert_adapter(path, tmp_path / "diffusers", as_="diffusers").path
    said = metadata(done)
    assert {key: said[f"modelspec.{key}"] for key in GIVEN} == GIVEN and said["modelspec.resolution"] == "512x512"
    again = metadata(fxplug.convert_adapter(done, tmp_path / "named", as_="diffusers", name="Other").path)
    assert again["modelspec.title"] == "Other" and again["modelspec.license"] == GIVEN["license"]
    report = str(fxplug.inspect_adapter(done))
    assert "'in ink' (modelspec.trigger_phrase)" in report and "'CC-BY-4.0' (modelspec.license)" in report
