"""The models of a pipeline, traced with what one real call gives them, and the pipeline saved with what was made of these."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.artifacts.artifact import load
from ..core.artifacts.document import MANIFEST
from ..core.capture.tracer import trace
from ..core.errors import ArtifactError, TraceError, did_you_mean
from ..core.ir.containers import map_leaves
from ..core.ir.traced_module import TracedModule
from ..core.ir.variants import LIMIT
from ..core.torch_internals.modules import replace_forward
from .control import META, SettingsProxy, controlnet_of, join, make_stub, read_settings
from .diffusers_types import PipelinePart, pipeline_part
from .pipeline_errors import is_own_error
from .recorded_run import EndOfRecording
from .step_inputs import StepInputs, note_groups


def trace_pipeline(
    pipe: Callable[..., Any],
    *args: Any,
    parts: Iterable[str] | None = None,
    variants: int | None = None,
    join: bool = False,
    **call: Any,
) -> dict[str, nn.Module]:
    """Trace the models of a pipeline, by their names in it: what `pipe(*args, **call)` calls, each as it is called first.

    The pipeline is called once without gradients, as far as the first call of the last of its models, and is left as it was:
    put the results in (`pipe.unet = ...`) yourself. Parts that are traced modules already come back as they are.

    Args:
        pipe: Any object with models in its attributes, or with diffusers' `components`.
        *args: The arguments of one call of the pipeline.
        parts: Which to trace; None is all that are called by their `forward`, which leaves out an autoencoder of which the
            pipeline calls `decode`.
        variants: How many graphs a part may get for other forms in which the pipeline calls it later, such as another dtype, as
            `fxplug.variants` says; None is 8.
        join: Whether the UNet of a pipeline of diffusers and its ControlNet, or several, are one graph, "unet"; "controlnet" is
            then what hands it what the network is called with (`controlnet_of`), so that the pipeline runs as ever with both
            put in.
        **call: The arguments of one call of the pipeline by name.

    Returns:
        The parts, by their names.

    Raises:
        TraceError: A part is not there or is not called; and what the pipeline raises.
    """
    return trace_parts(pipe, args, call, parts=parts, variants=variants, join=join)


def trace_parts(
    pipe: Any,
    args: tuple[Any, ...],
    call: dict[str, Any],
    *,
    parts: Iterable[str] | None = None,
    variants: int | None = None,
    join: bool = False,
    inputs: StepInputs | None = None,
) -> dict[str, nn.Module]:
    """Trace as `trace_pipeline`. With `inputs` the run goes on to a second step, and parts have the groups of their inputs."""
    if join:
        pipe = _joined(pipe)
    models = find_models(pipe)
    wanted = list(models) if parts is None else [parts] if isinstance(parts, str) else list(parts)
    for name in wanted:
        if name not in models:
            raise TraceError(f"the pipeline has no model '{name}'{did_you_mean(name, models)}; it has {', '.join(models)}")
    calls = record_first_calls(pipe, {name: models[name] for name in wanted}, args, call, parts is not None, inputs)
    if missing := [name for name in wanted if name not in calls and parts is not None]:
        raise TraceError(
            f"this call of the pipeline does not call {', '.join(missing)}; it calls {', '.join(calls) or 'none'}: give "
            "arguments with which it does"
        )
    made: dict[str, nn.Module] = {}
    for name, (given, named) in calls.items():
        model = models[name]
        try:
            with torch.no_grad():
                if not isinstance(model, TracedModule):
                    model = pipeline_part(trace(model, given, named), model, LIMIT if variants is None else variants)
                made[name] = model
            if inputs is not None and isinstance(model, TracedModule):
                note_groups(model, inputs.find_groups(name))
        except TraceError as error:
            raise TraceError(f"{name}: {error}") from error
    if join and isinstance(unet := made.get("unet"), TracedModule):
        unet.meta[META] = read_settings(models["unet"].get_submodule("controlnet"))
        made["controlnet"] = controlnet_of(unet)
    return made


def _joined(pipe: Any) -> Any:
    """Return the pipeline with one model for its UNet and its ControlNet. Raises TraceError."""
    if hasattr(pipe, "_blocks"):
        raise TraceError(f"join: {type(pipe).__name__} is a modular pipeline, whose blocks call both: rewrite them apart")
    unet, network = (getattr(pipe, name, None) for name in ("unet", "controlnet"))
    if unet is None or network is None:
        raise TraceError(f"join: {type(pipe).__name__} must have both 'unet' and 'controlnet'")
    found = copy.copy(pipe)
    found.unet = join(unet, network)
    found.controlnet = make_stub(**read_settings(network), dtype=network.dtype, device=network.device)
    return found


def save_pipeline(pipe: Any, folder: str | os.PathLike[str]) -> Path:
    """Do as `pipe.save_pretrained(folder)` of diffusers: traced modules are artifacts in the folders of their names.

    They are made parts of the pipeline before, as `pipeline_part` does, where they are none.

    Args:
        pipe: The pipeline.
        folder: The folder to write.

    Returns:
        The folder.

    Raises:
        ArtifactError: As `save`.
    """
    for name, model in find_models(pipe).items():
        if isinstance(model, TracedModule) and not isinstance(model, PipelinePart):
            setattr(pipe, name, pipeline_part(model))
    modular = {"overwrite_modular_index": True} if hasattr(pipe, "_blocks") else {}  # so that its index names the folder
    pipe.save_pretrained(os.fspath(folder), **modular)
    return Path(folder)


def load_pipeline(folder: str | os.PathLike[str], *, allow: Sequence[str] = (), **options: Any) -> Any:
    """Load the pipeline of a folder that was saved with traced modules in it; diffusers' own `from_pretrained` reads it, too.

    Args:
        folder: The folder.
        allow: As in `load`.
        **options: Those of diffusers' `from_pretrained`.

    Returns:
        The pipeline.

    Raises:
        ArtifactError: An artifact cannot be read; and what diffusers raises for the rest.
    """
    from diffusers import DiffusionPipeline

    folder = Path(folder)
    if (folder / "modular_model_index.json").is_file():
        raise ArtifactError(
            f"{folder} is a modular pipeline, which diffusers loads on its blocks: pipe = blocks.init_pipeline('{folder}'), "
            "pipe.load_components()"
        )
    if not (folder / "model_index.json").is_file():
        raise ArtifactError(f"{folder} is not a pipeline: it has no model_index.json; fxplug.load reads an artifact")
    parts = {path.parent.name: pipeline_part(load(path.parent, allow=allow)) for path in sorted(folder.glob(f"*/{MANIFEST}"))}
    return DiffusionPipeline.from_pretrained(folder, **{**parts, **options})


def find_models(pipe: Any) -> dict[str, nn.Module]:
    """Return the models of a pipeline by their names in it. Raises TraceError if it has none."""
    found = getattr(pipe, "components", None)
    named = found if isinstance(found, dict) else getattr(pipe, "__dict__", {})
    models = {k: v for k, v in named.items() if isinstance(v, nn.Module) and not isinstance(v, SettingsProxy)}
    if not models:
        raise TraceError(f"{type(pipe).__name__} has no models: trace_pipeline takes a pipeline, such as those of diffusers")
    return models


def record_first_calls(
    pipe: Any, models: dict[str, nn.Module], args: Any, call: Any, enough: bool, inputs: StepInputs | None = None
) -> dict[str, Any]:
    """Call a pipeline and return the arguments of the first call of each of these models that it calls, by name.

    With `enough` the call ends where the last of them is called; with `inputs` as well, where denoisers were seen in two steps.
    """
    calls: dict[str, Any] = {}

    def noting(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def noted(*given: Any, **named: Any) -> Any:
            if name not in calls:
                calls[name] = map_leaves((given, named), lambda tensor, _: tensor.detach().clone())
                if inputs is None and enough and len(calls) == len(models):
                    raise EndOfRecording
            if inputs is None:
                return forward(*given, **named)
            inputs.note(name, forward, given, named)
            if not enough or len(calls) < len(models):
                return forward(*given, **named)
            if inputs.is_complete(models):
                raise EndOfRecording
            return inputs.answer(name, forward, given, named)

        return noted

    with contextlib.ExitStack() as stack:
        for name, model in models.items():
            stack.enter_context(replace_forward(model, noting(name, model.forward)))
        watched = contextlib.nullcontext() if inputs is None else inputs.watch(pipe)
        with torch.no_grad(), contextlib.suppress(EndOfRecording), watched:
            try:
                pipe(*args, **call)
            except Exception as error:  # of a pipeline, which may mind results that are not a model's
                if inputs is None or not enough or len(calls) < len(models) or is_own_error(error):
                    raise
    return calls
