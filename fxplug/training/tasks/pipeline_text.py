"""Text encoders of a pipeline that train beside its denoiser: passes in them, and captions encoded with gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config.run_config import read_passes
from ...core.capture.tracer import trace
from ...core.errors import FxplugError, SpecError, did_you_mean, prefix_path
from ...core.ir.traced_module import TracedModule
from ...core.spec.yaml_source import quote_yaml, validate
from ...core.torch_internals import trees as pytree
from ...pipelines.denoiser_call import DenoiserCall, SampleCondition
from ...pipelines.diffusers_types import pipeline_part
from ...pipelines.example_call import ExampleCall, call_arguments, encode_once
from ...pipelines.opening import list_loaded_parts
from ...pipelines.recorded_run import get_components
from ..random_draws import mix, seed_within
from ..task_section import PipelineTextOptions
from .conditioning import ENCODER, apply_passes
from .pipeline_encoders import compute_in_precision, get_dtype
from .task import TrainedPart


class TrainedText:
    """The text encoders that train, in a copy of their pipeline, `pipe`: `parts` are the pipeline's own with passes in them."""

    def __init__(self, pipe: Any, parts: Mapping[str, TrainedPart], device: torch.device) -> None:
        """Put the encoders into a copy of the pipeline; `device` is where the run is."""
        self.parts, self.device = dict(parts), device
        self.dtypes = {name: get_dtype(get_components(pipe)[name]) for name in parts}
        self.pipe = copy.copy(pipe)
        vars(self.pipe).update({name: part.module for name, part in parts.items()})

    def encode(self, call: DenoiserCall, arguments: Mapping[str, Any]) -> SampleCondition:
        """Encode the condition of one sample, with gradients where they are on.

        Args:
            call: The calls of the denoiser, made with the pipeline.
            arguments: The arguments of the pipeline that differ from its observed call.

        Returns:
            The condition, on the device of the pipeline.

        Raises:
            SpecError: The pipeline does not take the arguments.
        """
        kind, own = self.device.type, copy.copy(call)
        own.pipe = self.pipe
        with contextlib.ExitStack() as stack:
            if torch.is_autocast_enabled(kind):  # what passes added is float32 beside an encoder of any dtype
                for name, part in self.parts.items():
                    dtype = torch.get_autocast_dtype(kind)
                    stack.enter_context(compute_in_precision(part.module, kind, dtype, self.dtypes[name]))
            stack.enter_context(torch.autocast(kind, enabled=False))
            # of dropout: the run's own generator, which a resumed run has as it was
            seed = int(torch.randint(2**62, ())) if torch.is_grad_enabled() else None
            return own.encode(seed, **arguments)

    def check_gradients(self, call: DenoiserCall, arguments: Mapping[str, Any]) -> None:
        """Raise SpecError for an encoder that no gradient of a caption's condition reaches: it is not used, or the pipeline
        switches gradients off where it encodes."""
        with torch.enable_grad():
            condition = self.encode(call, arguments)
            leaves = [leaf for leaf in pytree.tree_leaves(condition.call) if isinstance(leaf, Tensor) and leaf.requires_grad]
            total = torch.stack([leaf.float().sum() for leaf in leaves]).sum() if leaves else None
        kind = type(self.pipe).__name__
        for name, part in self.parts.items():
            parameters = [p for p in part.module.parameters() if p.requires_grad]
            found = [None] if total is None else torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
            if all(gradient is None for gradient in found):
                why = "it encodes captions without gradients" if total is None else "the denoiser does not use its result"
                raise SpecError(f"{name} cannot be trained in {kind}: {why}: leave it out", path=("text", name))


def read_text(pipe: Any, given: Any) -> dict[str, PipelineTextOptions]:
    """Read the option `text` of the task denoise on a pipeline: text encoders by name, each with its passes.

    Args:
        pipe: The pipeline.
        given: The value of the option.

    Returns:
        The options by the name of the encoder.

    Raises:
        SpecError: There is no such encoder, an option is wrong, or the pipeline loads no adapter of the encoder.
    """
    example = "text: {text_encoder: {passes: [...]}}"
    if not isinstance(given, Mapping) or not given:
        finding = f"names the text encoders of the pipeline that train, {example}, not {quote_yaml(given)}"
        raise SpecError(f"{finding}: captions are encoded by the pipeline's own", path=("text",))
    kind, loaded = type(pipe).__name__, list_loaded_parts(pipe)
    there = [name for name, part in get_components(pipe).items() if name.startswith(ENCODER) and part is not None]
    read = {}
    for name, options in given.items():
        if name not in there:
            finding = f"{kind} has no text encoder '{name}'{did_you_mean(str(name), there)}; it has "
            raise SpecError(finding + (", ".join(there) or "none"), path=("text", name))
        if name not in loaded:
            reads = f"reads {', '.join(loaded)} alone" if loaded else "is not there"
            finding = f"load_lora_weights of {kind} {reads}, so it would not load what {name} learns: leave it out"
            raise SpecError(finding, path=("text", name))
        read[str(name)] = validate(PipelineTextOptions, options, "text", name)
    return read


def apply_to_encoders(
    pipe: Any, call: Mapping[str, Any], size: tuple[int, int], text: Mapping[str, PipelineTextOptions], base: Path, seed: int
) -> dict[str, TrainedPart]:
    """Trace text encoders of a pipeline and apply passes to them.

    Args:
        pipe: The pipeline, which stays as it is.
        call: What it is called with.
        size: Height and width of its pictures.
        text: What `read_text` has read.
        base: The folder that paths in passes are relative to.
        seed: What new blocks are initialised with.

    Returns:
        The encoders with passes, by name; what the passes added requires gradients, and nothing else.

    Raises:
        SpecError: A pass cannot be applied, or an encoder cannot be traced.
    """
    made = {}
    for number, (name, options) in enumerate(text.items()):
        model = get_components(pipe)[name]
        with prefix_path("text", name, "passes"):
            passes = read_passes(options.passes, base)
        with encode_once(pipe), prefix_path("text", name):
            arguments = call_arguments(pipe, call, size)
            args, kwargs = ExampleCall(pipe, name, arguments, size=size).first()
            try:
                module: TracedModule = pipeline_part(trace(model, args, kwargs), model)
            except FxplugError as error:
                raise SpecError(f"the text encoder cannot be traced: {error}") from error
            with prefix_path("passes"), seed_within(mix(seed, number)):
                module = apply_passes(module, passes)
        trained = {entry["name"] for entry in module.meta.get("passes", []) if entry["train"]}
        for key, parameter in module.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and key.partition(".")[0] in trained)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise SpecError("no pass of it has parameters that train", path=("text", name, "passes"))
        rates = {key: value for key, value in (("lr", options.lr), ("weight_decay", options.weight_decay)) if value is not None}
        made[name] = TrainedPart(module.eval(), True, {"trainable": [], **rates})
    return made
