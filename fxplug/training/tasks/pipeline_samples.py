"""Pictures and videos that a stock pipeline draws with the trained module in its denoiser's place."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor

from ...core.errors import FxplugError, SpecError, get_first_line
from ...core.ir.traced_module import TracedModule
from ...core.torch_internals.modules import replace_forward
from ...pipelines.diffusers_types import pipeline_part
from ...pipelines.example_call import RESULTS
from ...pipelines.opening import call_parameters
from ...pipelines.recorded_run import call_pipeline, get_components, hide_warnings
from .pipeline_encoders import Encoders, compute_in_precision, get_dtype
from .task import TrainedPart
from .validation_prompts import ValidationPrompt

GUIDANCES = ("true_cfg_scale", "guidance_scale")  # which argument guides, if a pipeline has the first, the second tells


class PipelineSamples:
    """Draws with a copy of a pipeline, in which a module stands for its denoiser, and others for further models of it."""

    def __init__(
        self, pipe: Any, part: str, encoders: Encoders, others: Mapping[str, TrainedPart], noisy: Mapping[str, str]
    ) -> None:
        """Take the pipeline, the name of the denoiser in it, the other models, which are fetched for the drawing, those that
        train beside the denoiser, and for each denoiser the name of its argument for latents."""
        self.pipe, self.part, self.encoders, self.others, self.noisy = pipe, part, encoders, others, noisy
        self.made: dict[str, tuple[nn.Module, nn.Module]] = {}  # by name the module that was put in last, and it as a part

    def __call__(
        self,
        module: nn.Module,
        call: Mapping[str, Any],
        *,
        steps: int,
        seed: int = 0,
        added: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Draw one sample.

        Args:
            module: What stands for the denoiser.
            call: The arguments of the pipeline.
            steps: The number of steps.
            seed: The seed of its noise.
            added: What the module takes beside what the pipeline gives it, for one sample: [1, ...] by name.

        Returns:
            A picture [c, h, w] or a video [f, c, h, w], float32 in [0, 1], on the CPU.

        Raises:
            SpecError: The pipeline raises something else, which is quoted.
        """
        device = self.encoders.device.type
        with self._with_module(module, device, torch.is_autocast_enabled(device), added or {}) as pipe:
            return self._drawn(pipe, call, steps, seed)

    def stock(self, call: Mapping[str, Any], *, steps: int, seed: int = 0, pipe: Any = None) -> Tensor:
        """Draw one sample by the pipeline as it is, from the same noise.

        Args:
            call: The arguments of the pipeline.
            steps: The number of steps.
            seed: The seed of its noise.
            pipe: Another pipeline instead, with the same models.

        Returns:
            As when a module stands for the denoiser.

        Raises:
            SpecError: The pipeline raises something else, which is quoted.
        """
        return self._drawn(self.pipe if pipe is None else pipe, call, steps, seed)

    def _drawn(self, pipe: Any, call: Mapping[str, Any], steps: int, seed: int) -> Tensor:
        known, kind = call_parameters(pipe), type(pipe).__name__
        given = {"num_inference_steps": steps, "output_type": "pt", "generator": torch.Generator().manual_seed(seed)}
        given = {name: value for name, value in given.items() if name in known}
        try:
            off = torch.autocast(self.encoders.device.type, enabled=False)
            with self.encoders.present(), hide_warnings(), off, torch.no_grad():
                return as_samples(pipe(**{**call, **given}))[0]
        except FxplugError:
            raise
        except Exception as error:  # the pipeline's
            finding = f"{kind} cannot draw with {', '.join(call)}: {type(error).__name__}: {get_first_line(error)}"
            raise SpecError(finding, path=("model", "call")) from error

    @contextlib.contextmanager
    def _with_module(self, module: nn.Module, device: str, autocast: bool, added: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield a copy of the pipeline with the modules in it, which compute in the precision of the run; denoisers are given
        what is `added`."""
        pipe, own = copy.copy(self.pipe), get_components(self.pipe)
        with contextlib.ExitStack() as stack:
            for name, one in {self.part: module, **{name: other.module for name, other in self.others.items()}}.items():
                if name not in self.made or self.made[name][0] is not one:
                    made = pipeline_part(one, own[name]) if isinstance(one, TracedModule) else _stand_in(one, own[name])
                    self.made[name] = (one, made)
                part = vars(pipe)[name] = self.made[name][1].eval()
                if added and name in self.noisy:
                    stack.enter_context(_give_inputs(part, type(own[name]), self.noisy[name], added))
                if autocast:
                    encodes = name in self.others and self.others[name].encodes
                    dtype, result = torch.get_autocast_dtype(device), get_dtype(own[name]) if encodes else None
                    stack.enter_context(compute_in_precision(part, device, dtype, result))
            yield pipe


@contextlib.contextmanager
def _give_inputs(part: nn.Module, kind: Any, noisy: str, added: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a denoiser, in a context, be called with further inputs, [1, ...], wherever its pipeline calls it."""
    forward, signature = part.forward, inspect.signature(kind.forward)

    @functools.wraps(forward)
    def with_inputs(*args: Any, **named: Any) -> Any:
        # guidance calls it with one sample several times, which has one picture
        count = len(signature.bind_partial(part, *args, **named).arguments[noisy])
        return forward(*args, **named, **{name: value.expand(count, *value.shape[1:]) for name, value in added.items()})

    with replace_forward(part, with_inputs):
        yield


def _stand_in(module: nn.Module, own: nn.Module) -> nn.Module:
    """Return the pipeline's denoiser with the forward of a module that is no traced one, as where weights are sharded."""
    made, signature = copy.copy(own), inspect.signature(type(own).forward)
    vars(made)["_parameters"], vars(made)["_modules"] = dict(own._parameters), dict(own._modules)

    def forward(*args: Any, **named: Any) -> Any:
        known = {name: named.pop(name) for name in [*named] if name in signature.parameters}
        bound = {**signature.bind(own, *args, **known).arguments, **named}  # what is left passes have added
        bound.pop("self", None)
        return module(**bound)

    vars(made)["forward"] = forward
    return made


def as_samples(result: Any) -> list[Tensor]:
    """Return what a pipeline of diffusers has drawn, in any of its types: pictures [c, h, w] or videos [f, c, h, w] in
    [0, 1]."""
    if isinstance(state := getattr(result, "values", None), dict):  # of a modular pipeline
        drawn = next(state[name] for name in RESULTS if state.get(name) is not None)
    else:
        drawn = result[0] if not isinstance(result, Mapping) else next(iter(result.values()))
    return [_tensor(each) for each in drawn]


def _tensor(value: Any) -> Tensor:
    if isinstance(value, (list, tuple)):
        frames = torch.stack([_tensor(each) for each in value])
        return frames[0] if len(frames) == 1 else frames
    if isinstance(value, np.ndarray):  # [..., h, w, c]
        value = torch.from_numpy(value).movedim(-1, -3)
    elif not isinstance(value, Tensor):
        value = pil_to_tensor(value).float() / 255
    found = value.detach().float().cpu()
    found = found[0] if found.dim() == 4 and len(found) == 1 else found
    return torch.nan_to_num(found).clamp(0, 1)


def make_sample_arguments(pipe: Any, call: Mapping[str, Any], guidance: float | None, negative: str) -> dict[str, Any]:
    """Return the arguments that samples are drawn with beside prompt and size.

    Args:
        pipe: The pipeline.
        call: What the user calls it with.
        guidance: The scale of guidance instead of that of the call; None leaves that.
        negative: The caption that guidance leads away from.

    Returns:
        The arguments.

    Raises:
        SpecError: The pipeline takes no guidance, or no negative prompt.
    """
    known, made = call_parameters(pipe), dict(call)
    kind = type(pipe).__name__
    if guidance is not None:
        name = next((name for name in GUIDANCES if name in known), None)
        if name is None:
            raise SpecError(f"{kind} takes no guidance_scale: leave it out", path=("guidance",))
        made[name] = guidance
        if name == "true_cfg_scale":  # which guides where there is a negative prompt
            made.setdefault("negative_prompt", negative or " ")
    if negative:
        if "negative_prompt" not in known:
            raise SpecError(f"{kind} takes no negative_prompt: leave it out", path=("negative",))
        made["negative_prompt"] = negative
    return made


def check_steps(pipe: Any, call: Mapping[str, Any], part: str, steps: int) -> None:
    """Raise SpecError for a number of steps that a pipeline does not take."""
    try:
        call_pipeline(pipe, call, steps=steps, first_call=part)
    except SpecError as error:
        raise SpecError(f"the pipeline does not take {steps} steps: {error.finding}", path=("sample_steps",)) from error


def make_prompt_arguments(
    pipe: Any, call: Mapping[str, Any], one: ValidationPrompt, guidance: float | None, negative: str
) -> dict[str, Any]:
    """Return the arguments that a prompt's picture is drawn with beside the prompt; guidance and negative are the task's.

    Raises SpecError for what the pipeline does not take.
    """
    scale, without = guidance if one.guidance is None else one.guidance, negative if one.negative is None else one.negative
    made = make_sample_arguments(pipe, call, scale, without)
    if one.size is not None:
        if not {"height", "width"} <= {*call_parameters(pipe)}:
            raise SpecError(f"{type(pipe).__name__} takes no height and width: leave it out", path=("size",))
        made |= dict(zip(("height", "width"), one.size, strict=True))
    return made
