"""What a configuration says is used or refused: 0, "", false and [] are values, and each number has bounds."""

import math
import types
from typing import Annotated, Union, get_args, get_origin

import pytest
import small
from PIL import Image

import fxplug
from fxplug.config.model_section import WeightsSpec
from fxplug.config.run_config import make_config_model
from fxplug.core.errors import SpecError
from fxplug.core.spec.yaml_source import Section, validate
from fxplug.parallel.plan_options import PlanOptions
from fxplug.training import train_section
from fxplug.training.data.sidecars import ImageSettings, Subset
from fxplug.training.tasks.classify import Classify, Transform
from fxplug.training.tasks.denoise import Denoise

SECTIONS = [
    *(c for c in vars(train_section).values() if isinstance(c, type) and issubclass(c, Section) and c is not Section),
    make_config_model(), WeightsSpec, PlanOptions, ImageSettings, Subset,
]  # fmt: skip
FIELDS = [(section, name) for section in SECTIONS for name in section.model_fields]


def alone(section, name):
    """A section of one field, which may be left out."""
    field = section.model_fields[name]
    default = None if field.is_required() else field.default
    return type("Alone", (Section,), {"__annotations__": {name: field.rebuild_annotation()}, name: default})


def kinds(annotation):
    """The plain types that an annotation allows, and the bounds beside each."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return [(kind, [*bounds, *more]) for kind, bounds in kinds(inner)]
    if get_origin(annotation) in (Union, types.UnionType):
        return [found for part in get_args(annotation) for found in kinds(part)]
    return [(annotation, [])]


@pytest.mark.parametrize(("section", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_an_empty_value_is_that_value_or_an_error(section, name):
    made = alone(section, name)
    for value in (0, "", [], False):
        try:
            found = getattr(validate(made, {name: value}), name)
        except SpecError as error:
            assert error.path[:1] == (name,)
            assert "not " in error.finding
        else:
            assert found == value or list(found) == value
            assert found is not None


@pytest.mark.parametrize(("section", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_each_number_has_bounds(section, name):
    field = section.model_fields[name]
    for kind, bounds in kinds(field.rebuild_annotation()):
        if kind in (int, float):
            bounds = [bound for one in [*bounds, *field.metadata] for bound in getattr(one, "metadata", [one])]
            read = any(hasattr(bound, "func") for bound in bounds)  # a function that reads it, with bounds of its own
            assert read or any(hasattr(bound, "ge") or hasattr(bound, "gt") for bound in bounds), name
            for value in (math.nan, math.inf, -math.inf):
                with pytest.raises(SpecError):
                    validate(alone(section, name), {name: value})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"images": ""}, "data.images: must not be empty"),
        ({"images": []}, "data.images: must not be empty"),
        ({"images": ["a", ""]}, "data.images: must not be empty"),
        ({"images": ".", "test": ""}, "data.test.images: must not be empty"),
        ({"classes": ""}, "data.classes: must be a text that is not empty"),
        ({"images": ".", "workers": 65}, "data.workers: must be 64 or less, not 65"),
        ({"images": ".", "size": 10**9}, "data.size: must be a side in pixels or .*, 1 to 65536 each"),
        ({"images": ".", "size": 65536}, "data.size: must have at most 268435456 pixels, height times width, not 4294967296"),
        ({"images": ".", "size": [1, 65536], "crop": "x"}, "data.crop: must be one of center, random"),
        ({"images": ".", "background": "snowish"}, "data.background: must be a colour"),
        ({"images": ".", "background": [0, 0, 256]}, "data.background: must be a colour"),
    ],
)
def test_data_that_names_nothing(data, message):
    with pytest.raises(SpecError, match=message):
        fxplug.load_config({"model": "resnet18", "data": data})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": ""}, "device: must be a text that is not empty"),
        ({"weights": {"file": ""}}, "weights.file: must be a text that is not empty"),
        ({"train": {"task": "classify", "steps": 1, "lr": math.inf}}, "train.lr: must be a finite number"),
        ({"train": {"task": "classify", "steps": 1, "checkpointing": ""}}, "train.checkpointing: must not be empty"),
        ({"train": {"task": "classify", "steps": 1, "trainable": [""]}}, r"train.trainable\[0\]: must be a text that is not"),
        ({"export": {"device": ""}}, "export.device: must be a text that is not empty"),
        ({"passes": [{"lora": {"lr": math.nan}}]}, "lr: must be a finite number, 0 or more"),
    ],
)
def test_settings_that_say_nothing(given, message):
    with pytest.raises(SpecError, match=message):
        fxplug.load_config({"model": "resnet18", **given})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smoothing": math.nan}, "smoothing.*must be a finite number, not nan"),
        ({"mixup": math.inf}, "mixup.*must be a finite number"),
        ({"cutmix": "0.1"}, "cutmix.*must be a number, not '0.1'"),
        ({"preprocess": {"mean": []}}, "mean.*not an empty list"),
        ({"preprocess": {"mean": ""}}, "mean.*must be a number, not ''"),
        ({"preprocess": {"std": 0}}, "std.*must be a number, above 0, not 0"),
        ({"preprocess": {"crop_pct": 0}}, "crop_pct.*must be a number, above 0"),
        ({"preprocess": {"interpolation": ""}}, "interpolation.*must be one of nearest, bilinear"),
        ({"preprocess": {"crop_mode": "middle"}}, "crop_mode.*must be one of center"),
    ],
)
def test_options_of_classify(options, message):
    with pytest.raises(SpecError) as caught:
        Classify(**options)
    assert __import__("re").search(message, f"{'.'.join(map(str, caught.value.path))}: {caught.value.finding}")


@pytest.mark.parametrize("mean", [0, 0.25, [0.1, 0.2, 0.3]])
def test_a_mean_is_the_mean(mean):
    from fxplug.training.tasks.classify import _preprocessing, _settings

    found = _settings(None, None, 3, _preprocessing({"mean": mean, "std": 0.5}))
    assert found["mean"] == (tuple(mean) if isinstance(mean, list) else (mean,) * 3)
    grey = Image.new("RGB", (8, 8), (128, 128, 128))
    seen = Transform({**found, "crop_pct": 1.0}, 3, train=False)(grey, (8, 8))
    assert seen[:, 0, 0].tolist() == pytest.approx([(128 / 255 - m) / 0.5 for m in found["mean"]], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"dropout": math.nan}, "dropout"),
        ({"snr_gamma": 0}, "snr_gamma"),
        ({"guidance": math.inf}, "guidance"),
        ({"time_scale": 0}, "time_scale"),
        ({"sample_steps": 10**9}, "sample_steps"),
        ({"samples": -1}, "samples"),
        ({"samples": True}, "samples"),
        ({"null_label": -1}, "null_label"),
        ({"train_guidance": math.nan}, "train_guidance"),
        ({"density": {"logit_normal": {"std": math.nan}}}, "std"),
        ({"density": {"logit_normal": {"std": 0}}}, "std"),
    ],
)
def test_options_of_denoise(options, key):
    with pytest.raises(SpecError, match="must be .*not ") as caught:
        Denoise(**options)
    assert caught.value.path[-1] == key


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [1.0, math.nan]])
@pytest.mark.parametrize(
    ("name", "key"), [("lora", "alpha"), ("bottleneck", "scale"), ("vera", "d_initial"), ("adapter", "strength")]
)
def test_a_number_of_a_pass_is_finite(name, key, value):
    with pytest.raises(SpecError, match=f"{key}.*must be a"):
        fxplug.load_pass(name, **{"file": "a.safetensors"} if name == "adapter" else {}, **{key: value})


def test_options_of_a_rule_are_finite():
    with pytest.raises(SpecError, match=r"options.a\[1\]: must be a finite number, not nan"):
        fxplug.Rule(fxplug.Match(), use="a:B", options={"a": [1.0, math.nan]})


@pytest.mark.parametrize("name", ["lora", "loha", "lokr", "dora", "lora_weight"])
@pytest.mark.parametrize("rank_max", [0, "", [], 1.5, 8])
def test_the_highest_rank_is_one_of_slots(name, rank_max):
    gm = small.vit().gm
    with pytest.raises(SpecError, match="rank_max is for adapters in slots"):
        fxplug.apply(gm, fxplug.load_pass(name, at="blocks.0.attn.qkv", rank_max=rank_max))
    if rank_max != 8:
        with pytest.raises(SpecError, match="rank_max must be a whole number, 1 or more"):
            fxplug.apply(gm, fxplug.load_pass(name, at="blocks.0.attn.qkv", rank_max=rank_max, slots=2))


@pytest.mark.parametrize("eps", [-1, 0.1, 1.5])
def test_the_least_norm_is_small(eps):
    with pytest.raises(SpecError, match="eps must be at least 0 and below 0.1"):
        fxplug.apply(small.vit().gm, fxplug.load_pass("spectral_norm", at="blocks.0.attn.qkv", eps=eps))
