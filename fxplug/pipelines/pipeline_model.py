"""The model that a configuration names as a part of a pipeline: opened, quantised, and with the first call that it gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..config.models.built_model import BuiltModel
from ..config.models.factory import find_device
from ..config.models.state_dict import load_weights
from ..config.run_config import Config
from ..core.errors import FxplugError, SpecError, did_you_mean
from ..core.ir.traced_module import TracedModule
from .call_forms import FORMS, add_call_forms
from .diffusers_types import pipeline_part
from .example_call import ExampleCall, call_arguments, encode_once
from .opening import call_parameters, open_pipeline, quantize_part, silence_libraries
from .pipeline_errors import is_own_error
from .step_inputs import note_groups
from .tracing import find_models, record_first_calls

NAMES = ("unet", "transformer", "prior", "decoder")  # how the names of denoisers begin


def build_pipeline_model(config: Config, *, device: str | None = None) -> BuiltModel:
    """Open the pipeline of a configuration, and take the parts of it that the configuration names, or its one denoiser.

    It is opened on real tensors for a dry run too, as what the part is called with is seen in a call.

    Args:
        config: The configuration, whose `model` has `pipeline`.
        device: As in `build`.

    Returns:
        The part with the arguments of its first call, and the pipeline, which has the part in it; the first of several parts,
        with the others beside it.

    Raises:
        SpecError: There is no such pipeline or part; the pipeline cannot be called as the configuration says.
    """
    spec, pipe, target = config.model, open_config_pipeline(config), find_device(config)
    data = getattr(config, "data", None)
    size = data.size if data is not None else None
    size = (size, size) if isinstance(size, int) else size
    arguments = call_arguments(pipe, spec.arguments, size)
    parts = _parts(pipe, spec.part, arguments)
    if config.weights is not None:
        if len(parts) > 1:
            finding = f"are those of one model, and 'part' names {', '.join(parts)}: name one part, or leave 'weights' out"
            raise SpecError(finding, path=("weights",))
        load_weights(pipe.components[parts[0]], config.weights, config.base)
    for name in {*parts, *list_denoisers(pipe)} if spec.quantize else ():
        quantize_part(pipe.components[name], spec.quantize or "", target)
    pipe.to(target)
    sized = size is not None and not set(spec.arguments).intersection(("height", "width"))
    made = {}
    for part in parts:
        where = ("data", "size") if sized else ("model", "call")
        made[part] = _built(ExampleCall(pipe, part, arguments, where, size or (512, 512)), config.mode, meta=device == "meta")
    first = made.pop(parts[0])
    first.beside = made
    return first


def _built(call: ExampleCall, mode: str, meta: bool) -> BuiltModel:
    """Return a part of a pipeline with the arguments of its first call; `meta` traces it for that form of call alone, and
    notes no groups of its inputs."""
    pipe, model = call.pipe, call.pipe.components[call.part]
    with encode_once(pipe):
        inputs = call.example()
    model.train(mode == "train")

    def complete(traced: TracedModule) -> TracedModule:
        made = pipeline_part(traced, model, FORMS)
        with encode_once(pipe):
            if not meta:
                add_call_forms(made, call)
                note_groups(made, call.find_input_groups())
        return made

    return BuiltModel(model, inputs, pipe, complete, call.part)


def open_config_pipeline(config: Config) -> Any:
    """Open the pipeline that a configuration names, on the CPU. Raises SpecError."""
    spec = config.model
    if find_device(config).type == "meta":
        finding = "a pipeline is called once for its model's inputs, which needs values: give another device"
        raise SpecError(finding, path=("device",))
    named = config.base / spec.target
    return open_pipeline(
        named if named.exists() else spec.target,
        config=None if spec.config is None else config.base / spec.config,
        dtype=None if config.dtype is None else getattr(torch, config.dtype),
        options=spec.options,
    )


def list_denoisers(pipe: Any) -> dict[str, nn.Module]:
    """Return the models of a pipeline that denoise, as far as their class and their name tell, by name."""
    from diffusers import ModelMixin

    models = {name: part for name, part in find_models(pipe).items() if isinstance(part, ModelMixin)}
    models = {name: part for name, part in models.items() if not hasattr(part, "decode")}
    return {name: part for name, part in models.items() if name.startswith(NAMES)} or models


def _parts(pipe: Any, wanted: Any, arguments: dict[str, Any]) -> list[str]:
    """Return the names of the parts: those that are wanted, or the one denoiser that is called. Raises SpecError."""
    denoisers, models = list_denoisers(pipe), find_models(pipe)
    names = list(wanted) if isinstance(wanted, list) else [] if wanted is None else [wanted]
    for name in names:
        if name not in models:
            others = [each for each in models if each not in denoisers]
            finding = f"{type(pipe).__name__} has no model '{name}'{did_you_mean(name, models)}; it has "
            raise SpecError(finding + ", ".join([*denoisers, *others]), path=("model", "part"))
        if names.count(name) > 1:
            raise SpecError(f"'{name}' is listed {names.count(name)} times: list each part once", path=("model", "part"))
    if names:
        return [str(name) for name in names]
    called = list(denoisers)
    if len(called) > 1:
        few = {"num_inference_steps": 2, "output_type": "latent"}
        known = {name: value for name, value in few.items() if name in call_parameters(pipe)}
        try:
            with silence_libraries():
                called = list(record_first_calls(pipe, denoisers, (), {**arguments, **known}, True))
        except FxplugError:
            raise
        except Exception as error:  # the pipeline's is reported when it is called for its part
            if is_own_error(error):
                raise
            called = list(denoisers)
    if len(called) != 1:
        found = ", ".join(called or models)
        finding = f"{type(pipe).__name__} has {'several denoisers' if called else 'no denoiser that is known as one'}, {found}"
        raise SpecError(f"{finding}: choose with 'part'", path=("model", "part"))
    return called
