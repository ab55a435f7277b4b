"""The options of the task `denoise` that a pipeline has, and where it has what the others say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...core.errors import SpecError, did_you_mean, prefix_path
from ..task_section import DenoiseOptions
from ..train_section import Use

AS_SAMPLED = "as_sampled"
# options of the task for other models, and where a pipeline has what they say
ELSEWHERE = {
    "scheduler": "the pipeline's own scheduler makes the noise: change scheduler/scheduler_config.json in its folder",
    "prediction": "the pipeline's own scheduler sets it: change prediction_type in scheduler/scheduler_config.json",
    "vae": "pictures are encoded by the pipeline's own VAE: change it in the pipeline's folder",
    "call": "fxplug sees in the pipeline how the denoiser is called: set the pipeline's arguments in model: {call: ...}",
    "null_label": "a pipeline takes captions, and a dropped caption is empty: set 'dropout'",
    "time_scale": "fxplug sees in the pipeline how the denoiser gets the time",
    "train_guidance": "a model without a pipeline learns it with 'text': model: {diffusers: ...}",
}


def check_options(use: Use) -> None:
    """Check the options of a task `denoise` for a pipeline, as far as that goes without one.

    Args:
        use: The task with its options.

    Raises:
        SpecError: There is an option that a pipeline does not have; it says where that is set instead.
    """
    with prefix_path("train", "task", use.name):
        check_names(use.options, DenoiseOptions.model_fields)


def check_names(options: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise SpecError for an option that is not `known`; it says where that is set instead, or which is the nearest."""
    if options.get("text") is not None and not isinstance(options["text"], Mapping):
        finding = "captions are encoded by the pipeline's own text encoders; it names those that train, text: {text_encoder: "
        raise SpecError(finding + "{passes: [...]}}", path=("text",))
    for name in options:
        if name in ELSEWHERE:
            raise SpecError(f"is not an option of denoise on a pipeline: {ELSEWHERE[name]}", path=(name,))
        if name not in known:
            there = [key for key in DenoiseOptions.model_fields if key not in ELSEWHERE]
            finding = f"denoise has no option '{name}'{did_you_mean(name, there)}; it has {', '.join(there)}"
            raise SpecError(finding, path=(name,))
