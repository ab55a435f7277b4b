"""The options of what ships with fxplug and is chosen by name in the section `train`: schedules and tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, field_validator, model_validator

from ..config.model_section import Dtype
from ..core.errors import SpecError
from ..core.spec.yaml_source import (
    Section,
    Text,
    check_finite,
    check_number,
    convert_error,
    declare,
    make_validator,
    quote_yaml,
    validate,
)

LEAST = 1e-3  # alpha of a beta distribution
LONGEST_SIDE = 65536  # of a picture, pixels
MOST = 10_000  # of pictures, and of the steps that make one


class ScheduleOptions(Section):
    """Options of `constant`, `linear` and `cosine`."""

    warmup: float = declare(
        0, "steps in which the rate rises to `lr`; below 1: a share of all steps; with `per: epoch`: epochs", 100, ge=0
    )
    floor: float = declare(0.0, "the share of the rate that is left at the end", 0.1, ge=0, le=1)
    per: Literal["step", "epoch"] = declare("step", "whether the rate changes with each step or with each epoch", "epoch")

    @model_validator(mode="after")
    def _check_warmup(self) -> ScheduleOptions:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            finding = f"must be a whole number of steps, or a share of them below 1, not {quote_yaml(self.warmup)}"
            raise convert_error(SpecError(finding, path=("warmup",)))
        return self


def _read_call(value: Any) -> Any:
    if value is not None and not isinstance(value, Mapping):
        raise SpecError(f"must be a mapping of the inputs of the model, not {quote_yaml(value)}")
    check_finite(value)
    return value


def _read_named(value: Any) -> Any:
    """Read a name, or one name with its options."""
    if value == "" or (isinstance(value, (Mapping, list, tuple)) and not value):
        raise SpecError(f"must not be empty, not {quote_yaml(value)}")
    check_finite(value)
    return value


def _read_samples(value: Any) -> Any:
    if not isinstance(value, list):
        check_number(value, least=0, most=MOST, whole=True)
        return value
    texts = all(isinstance(item, str) for item in value)
    if not texts and not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
        raise SpecError("must be a number of pictures, a list of captions, or a list of labels, 0 or more")
    if len(value) > MOST:
        raise SpecError(f"must be a list of at most {MOST}, not of {len(value)}")
    return value


def _read_size(value: Any) -> Any:
    for number in value if isinstance(value, list) else [value]:
        check_number(number, least=1, most=LONGEST_SIDE, whole=True)
    if isinstance(value, list) and len(value) != 2:
        raise SpecError(f"must be a side in pixels, or height and width, not {quote_yaml(value)}")
    return value


def _read_prompts(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value):
        return value
    if not isinstance(value, list) or not value:
        raise SpecError(f"must be a list of prompts, or the name of a file of them, not {quote_yaml(value)}")
    if len(value) > MOST:
        raise SpecError(f"must be a list of at most {MOST}, not of {len(value)}")
    for number, entry in enumerate(value):
        validate(PromptOptions, {"prompt": entry} if isinstance(entry, str) else entry, number)
    return value


Named = Annotated[Any, make_validator(_read_named, str | dict[str, Any] | None)]
Calls = Annotated[Any, make_validator(_read_call, dict[str, Any] | None)]


class ClassifyOptions(Section):
    """Options of the task `classify`."""

    smoothing: float = declare(0.0, "smoothing of the labels (arXiv 1512.00567)", 0.1, ge=0, lt=1)
    mixup: float = declare(0.0, "alpha of mixup (arXiv 1710.09412); 0: none", 0.2, ge=0, le=1e3)
    cutmix: float = declare(0.0, "alpha of cutmix (arXiv 1905.04899); 0: none", 1.0, ge=0, le=1e3)
    augment: Named = declare("auto", "`auto` for timm's defaults, `none`, or options of timm's create_transform", "none")
    preprocess: Named = declare(
        None, "mean, std, interpolation and crop, or a timm model that has them; null: the model's own", "resnet18"
    )
    criterion: Named = declare(
        None, "instead of cross entropy a function (outputs, labels), by import path, with options", "my_losses:Focal"
    )
    call: Calls = declare(None, "the value for each input whose name does not tell it", {"x": "image"})

    @field_validator("mixup", "cutmix")
    @classmethod
    def _check_alpha(cls, value: float) -> float:
        if 0 < value < LEAST:  # numpy's beta distribution gives NaN for some
            raise convert_error(SpecError(f"must be 0, or {LEAST} or more, not {quote_yaml(value)}"))
        return value


class PromptOptions(Section):
    """Options of a prompt of `prompts`."""

    prompt: str = declare(..., "the caption", "a cat in the snow")
    negative: str | None = declare(None, "the caption that guidance leads away from; null: `negative` of the task", "blurry")
    seed: int | None = declare(None, "the seed of its noise; null: its place in the list, from 0 on", 42, ge=0, lt=2**63)
    size: Annotated[Any, make_validator(_read_size, int | list[int] | None)] = declare(
        None, "a side in pixels, or height and width; null: as in the data", [768, 512]
    )
    guidance: float | None = declare(None, "its guidance; null: as in the task", 4.0, ge=-1e4, le=1e4)
    steps: int | None = declare(None, "its steps; null: `sample_steps`", 28, ge=1, le=MOST)


class DenoiseOptions(Section):
    """Options of the task `denoise`."""

    scheduler: Named = declare(
        "DDPMScheduler", "a scheduler of diffusers, with options, or a folder of one", "FlowMatchEulerDiscreteScheduler"
    )
    prediction: Literal["epsilon", "v_prediction", "sample", "flow"] | None = declare(
        None, "what the model predicts; null: as in the scheduler", "v_prediction"
    )
    vae: Named = declare(None, "a model as `model` has it; null: the model works on pixels", "sd15/vae")
    text: Named = declare(
        None,
        "a function of captions by import path, or a folder with a text encoder; on a pipeline its text encoders that train",
        "sd15",
    )
    dropout: float = declare(0.0, "the share of samples trained without caption or label", 0.1, ge=0, lt=1)
    null_label: int | None = declare(
        None, "the label that means none; null: the last row of the model's embedding", 1000, ge=0
    )
    snr_gamma: float | None = declare(None, "min-SNR weights (arXiv 2303.09556); null: none", 5.0, gt=0)
    density: Named = declare(
        "uniform",
        "how often each amount of noise is drawn: `uniform`, `logit_normal`, `mode`; on a pipeline also `as_sampled`",
        {"logit_normal": {"std": 1.0}},
    )
    loss: Named = declare(
        "mse",
        "`mse`, `huber` or `smooth_l1`, these two with `delta` and its `schedule`: `constant`, `exponential`, `snr`",
        {"huber": {"delta": 0.1, "schedule": "snr"}},
    )
    noise_offset: float = declare(0.0, "standard deviation of noise that is constant over a channel; 0: none", 0.05, ge=0, le=1)
    weighting: Text = declare("none", "weights of flow matching: `none`, `sigma_sqrt`, `cosmap`", "cosmap")
    time_scale: float = declare(1.0, "the factor of the times of flow matching", 0.001, gt=0, le=1e6)
    call: Calls = declare(None, "the value for each input whose name does not tell it", {"x": "noisy"})
    samples: Annotated[Any, make_validator(_read_samples, int | list[str] | list[int])] = declare(
        8, "how many pictures, or a list of their captions or labels", ["a dog", "a cat"]
    )
    prompts: Annotated[Any, make_validator(_read_prompts, str | list[Any] | None)] = declare(
        None,
        "your own prompts instead of `samples`, each text or a mapping; or a file of them: .txt, .yaml or .json",
        [{"prompt": "a cat", "seed": 42, "guidance": 4.0}],
    )
    guidance: float = declare(1.0, "guidance of the pictures (arXiv 2207.12598); 1: none", 4.0, ge=-1e4, le=1e4)
    sample_steps: int = declare(20, "sampling steps per picture", 50, ge=1, le=MOST)
    train_guidance: float | None = declare(
        None, "guidance that the model learns, as in DreamArtist (arXiv 2211.11337); null: none", 3.0, ge=-1e4, le=1e4
    )
    negative: str = declare("", "the caption that guidance leads away from", "blurry")
    preserve: Text | None = declare(
        None, "the class word that `data.trigger` replaces: the model keeps its output for it; null: preserve nothing", "dog"
    )
    preserve_weight: float = declare(1.0, "the weight of the preservation loss", 0.5, gt=0, le=1e4)


class TextOptions(Section):
    """Options of a text encoder from a folder."""

    max_length: int | None = declare(
        None, "tokens per caption; null: the most that tokenizer and encoder take", 77, ge=1, le=65536
    )
    layer: int = declare(-1, "the hidden state that is taken; -2 for the one before the last", -2, ge=-1000, le=1000)
    dtype: Dtype | None = declare(None, "the dtype of its weights; null: unchanged", "bfloat16")
    trainable: list[Text] = declare([], "patterns of its parameters that train", ["embeddings"])
    passes: list[Any] | None = declare(None, "passes that train in it, as the `passes` of a configuration", ["lora"])
    lr: float | None = declare(None, "the learning rate of its weights; null: as in the section train", 1e-5, ge=0)
    weight_decay: float | None = declare(None, "its weight decay; null: as in the section train", 0.01, ge=0)


class PipelineTextOptions(Section):
    """Options of a text encoder of a pipeline that trains beside its denoiser."""

    passes: list[Any] = declare(..., "passes that train in it, as the `passes` of a configuration", ["lora"])
    lr: float | None = declare(None, "the learning rate of its weights; null: as in the section train", 1e-5, ge=0)
    weight_decay: float | None = declare(None, "its weight decay; null: as in the section train", 0.01, ge=0)


TASKS: dict[str, type[BaseModel]] = {"classify": ClassifyOptions, "denoise": DenoiseOptions}
SCHEDULES: dict[str, type[BaseModel]] = {"constant": ScheduleOptions, "linear": ScheduleOptions, "cosine": ScheduleOptions}
