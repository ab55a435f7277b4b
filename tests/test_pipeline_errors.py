"""What a pipeline raises while it is looked at: its own errors are suppressed or explained, a mistake of fxplug is neither."""

from __future__ import annotations

import json

import pytest
import tiny_pipelines as tiny
import torch

from fxplug.core.errors import SpecError
from fxplug.pipelines import step_inputs
from fxplug.pipelines.example_call import ExampleCall, call_arguments
from fxplug.pipelines.opening import open_pipeline
from fxplug.pipelines.pipeline_errors import catch_pipeline_errors, is_own_error
from fxplug.pipelines.recorded_run import call_pipeline

SIZED = {"height": tiny.SIZE, "width": tiny.SIZE}


@pytest.fixture(scope="module")
def sdxl():
    return tiny.make("sdxl")


def example(pipe):
    return ExampleCall(pipe, "unet", call_arguments(pipe, {}, (tiny.SIZE, tiny.SIZE)))


def raised(function):
    with pytest.raises(Exception) as caught:  # noqa: PT011 whose it is, is what is tested
        function()
    return caught.value


def broken(*_args, **_named):
    raise KeyError("theirs")


@pytest.mark.slow
@pytest.mark.parametrize(("function", "own"), [
    (broken, False), (lambda: torch.nn.Linear(2, 3)(torch.zeros(1, 4)), False), (lambda: example(None).first(), True),
    (lambda: step_inputs.StepInputs().find_groups([]), True), (lambda: call_arguments(broken, 1, None), True),
])  # fmt: skip
def test_whose_an_error_is(function, own):
    assert is_own_error(raised(function)) is own


def test_the_error_of_a_pipeline_is_suppressed_and_a_mistake_of_ours_is_not(sdxl, monkeypatch):
    with catch_pipeline_errors():
        broken()
    monkeypatch.setattr(sdxl.scheduler, "step", broken)
    assert len(example(sdxl).step_calls()) == 1, "what was seen before the error is there"
    monkeypatch.setattr(step_inputs, "MOST_STEPS", None)  # as a mistake of ours would be
    for look in (example(sdxl).step_calls, example(sdxl).find_input_groups, lambda: [*example(sdxl).forms()]):
        with pytest.raises(TypeError, match="NoneType"):
            look()


@pytest.mark.parametrize(("missing", "said"), [
    ("tokenizer tokenizer_2 text_encoder text_encoder_2", "has no tokenizer and tokenizer_2, which its call needs"),
    ("tokenizer_2", "has no tokenizer_2, which its call needs"), ("text_encoder_2", "has no text_encoder_2, which its call"),
    ("tokenizer", "the pipeline has no tokenizer, which its call may need"), ("vae", "has no vae, which its call needs"),
])  # fmt: skip
def test_a_part_that_is_none_is_named(sdxl, missing, said, monkeypatch):
    for name in missing.split():
        monkeypatch.setattr(sdxl, name, None)
    with pytest.raises(SpecError, match=said):
        call_pipeline(sdxl, {"prompt": "a ball", **SIZED}, steps=2, first_call="vae")
    if missing != "vae":  # which a call as far as its denoiser does not need
        with pytest.raises(SpecError, match=said):
            example(sdxl).example()


def test_a_call_that_fails_otherwise_says_nothing_of_parts_that_may_be_none():
    pipe = tiny.make("sd15")  # without image_encoder and safety_checker
    with pytest.raises(SpecError) as caught:
        call_pipeline(pipe, {"prompt": "a ball", **SIZED, "guidance_scale": "much"}, steps=2)
    assert "has no" not in str(caught.value)


@pytest.mark.parametrize("entry", [3, None, ["diffusers"], ["diffusers", 4], {"a": 1}, "UNet2DConditionModel"])
def test_a_wrong_entry_of_an_index_is_named(entry, tmp_path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline", "unet": entry}))
    with pytest.raises(SpecError, match="model_index.json' must name the library and the class of 'unet', not "):
        open_pipeline(tmp_path)
