"""What is asked of an engine: the call of a pipeline, and with which adapters, scheduler and seed it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import torch
from PIL.Image import Image
from pydantic import ConfigDict, Field, PlainValidator, ValidationError
from torch import Tensor

from ..adapters.strengths import Schedule, Strength
from ..core.errors import SpecError, did_you_mean, quote
from ..core.spec.yaml_source import Section, check_number, convert_error, list_findings
from ..pipelines.opening import call_parameters

OWN = {"generator": "seed", "scheduler": "scheduler"}  # arguments that fields of a request stand for


def _read_mask(value: Any) -> Tensor:
    if isinstance(value, Image):
        value = torch.from_numpy(np.array(value.convert("L"))) / 255
    mask = value.detach().to(torch.float32) if isinstance(value, Tensor) and not value.is_complex() else None
    if mask is None or mask.dim() != 2 or not mask.numel() or not bool(((mask >= 0) & (mask <= 1)).all()):
        found = f"a tensor of the shape {list(mask.shape)}" if mask is not None else quote(value)
        finding = f"must be a tensor (height, width) of values from 0 to 1, or a grey picture, not {found}"
        raise convert_error(SpecError(finding))
    return mask.clone()


class Region(Section):
    """A part of a picture with adapters and prompts of its own.

    Args:
        mask: Its share at each place: a tensor of the shape (height, width) with values in [0, 1], or a grey picture, white in
            the region. It has the proportions of the picture that is drawn.
        adapters: Strengths of adapters, beside the request's and instead of those of the same names.
        call: Arguments with `prompt` in their names, instead of the request's.

    Raises:
        SpecError: For an unknown field, with the nearest one, and a mask of other values or dimensions.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    mask: Annotated[Any, PlainValidator(_read_mask)]
    adapters: dict[str, Any] = Field(default_factory=dict)
    call: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, **given: Any) -> None:
        _validate(super().__init__, type(self), given)
        for name, strength in self.adapters.items():
            check_strength(strength, "adapters", name)

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the mask."""
        height, width = self.mask.shape
        return height, width


class Request(Section):
    """A picture, or several, that an engine shall make: a call of its pipeline, and how it is made.

    Args:
        call: What the pipeline's `__call__` takes: `prompt`, `image`, `guidance_scale` and others.
        adapters: The strength of each adapter, by name: a number, a `fxplug.Strength`, or a `fxplug.Schedule` over its steps.
        scheduler: The name of a class of diffusers that takes the configuration of the pipeline's scheduler; None is its own.
        seed: That of the CPU generator that the call gets; None is none.
        task: Which of the engine's pipelines is called, see `Engine`.
        regions: Parts of the picture with adapters and prompts of their own. Each is a run of the pipeline, with a row of its
            own in each call: at each call of the denoiser the results are blended by the masks. Where the slots have `regions`
            and regions change adapters alone, these act in the layers of one run instead, see `fxplug.Strength`.
        deadline_s: After so many seconds it is cancelled, at its next call of a model; None is never.

    Raises:
        SpecError: For an unknown field, with the nearest one, and a value of another type.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    call: dict[str, Any]
    adapters: dict[str, Any] = Field(default_factory=dict)
    scheduler: str | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    task: str = ""
    regions: list[Region] = Field(default_factory=list)
    deadline_s: float | None = Field(default=None, gt=0)

    def __init__(self, **given: Any) -> None:
        _validate(super().__init__, type(self), given)
        for name, strength in self.adapters.items():
            check_strength(strength, "adapters", name)


def _validate(make: Callable[..., None], kind: type[Section], given: Mapping[str, Any]) -> None:
    try:
        make(**given)
    except ValidationError as error:
        found = next(list_findings(error, kind))
        raise SpecError(found.text, path=found.path, key=found.key) from None


def check_strength(strength: Any, *path: str | int) -> None:
    """Check a strength of an adapter.

    Args:
        strength: What stands for it: a number, a `Strength` or a `Schedule`.
        *path: Where it stands.

    Raises:
        SpecError: If it is none.
    """
    if not isinstance(strength, (Strength, Schedule)):
        check_number(strength, *path)


def list_strengths(adapters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List strengths of a request's adapters that stand for all that it has over its steps.

    Args:
        adapters: The strengths of a request.

    Returns:
        Mappings of numbers and `Strength`, of which each knot of a `Schedule` is in one.
    """
    values = {n: [s for _, s in v.knots] if isinstance(v, Schedule) else [v] for n, v in adapters.items()}
    count = max(map(len, values.values()), default=1)
    return [{name: each[min(index, len(each) - 1)] for name, each in values.items()} for index in range(count)]


def get_strengths(adapters: Mapping[str, Any], share: float, find_sigma: Callable[[], float]) -> dict[str, Any]:
    """Get the strengths of a request's adapters at a step.

    Args:
        adapters: The strengths of a request.
        share: The share of its steps that are done, 0 to 1.
        find_sigma: What gives the sigma of the step.

    Returns:
        Numbers and `Strength` by name.

    Raises:
        SpecError: As `find_sigma`, where a `Schedule` is over sigma.
    """
    return {
        name: value.at(share if value.over == "share" else find_sigma()) if isinstance(value, Schedule) else value
        for name, value in adapters.items()
    }


def find_sigma(scheduler: Any, step: int) -> float:
    """Find the sigma of a step of a scheduler: the ratio of noise to signal, or the share of noise in flow matching.

    Args:
        scheduler: A scheduler of diffusers that has its timesteps.
        step: How many steps it has made.

    Returns:
        The sigma; that of the first step where there are no timesteps yet.

    Raises:
        SpecError: For a scheduler that has neither sigmas nor `alphas_cumprod`.
    """
    times = getattr(scheduler, "timesteps", ())
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is not None and len(sigmas) >= len(times) > 0:
        return float(sigmas[min(step, len(times) - 1)])
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None or not len(times):
        raise SpecError(f"{type(scheduler).__name__} has no sigmas: use a Schedule over 'share'", path=("adapters",))
    alpha = float(alphas[int(times[min(step, len(times) - 1)])])
    return float(((1 - alpha) / alpha) ** 0.5)


def check_call(request: Request, pipe: Any) -> None:
    """Check the arguments of a request's call.

    Args:
        request: The request.
        pipe: The pipeline that is called.

    Raises:
        SpecError: For an argument that the pipeline does not have, with the nearest one, one that is missing, and a generator
            beside a seed.
    """
    known = call_parameters(pipe)
    for name in request.call:
        if name not in known:
            listed = f"{did_you_mean(name, known)}; it takes {', '.join(known)}"
            raise SpecError(f"{type(pipe).__name__} is not called with {quote(name)}{listed}", path=("call",), key=name)
    if lacking := [name for name, needed in known.items() if needed and name not in request.call]:
        raise SpecError(f"{type(pipe).__name__} needs {', '.join(lacking)}", path=("call",))
    if request.seed is None:
        return
    if request.call.get("generator") is not None:
        raise SpecError("seed and generator are both given: leave one of them out", path=("call",), key="generator")
    if "generator" not in known:
        raise SpecError(f"{type(pipe).__name__} takes no generator, and so no seed: leave it out", path=("seed",))


def make_call(request: Request) -> dict[str, Any]:
    """Make the arguments of a request's call, each time anew.

    Args:
        request: The request.

    Returns:
        The arguments.
    """
    given = {name: copy_value(value) for name, value in request.call.items()}
    return given if request.seed is None else {**given, "generator": torch.Generator().manual_seed(request.seed)}


def copy_value(value: Any) -> Any:
    """Copy lists, dictionaries and tensors of a call's argument: some pipelines write into what they are given.

    Args:
        value: The argument.

    Returns:
        The copy; anything else as it is.
    """
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(copy_value, value))
    if type(value) is dict:
        return {key: copy_value(each) for key, each in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def list_generators(call: Mapping[str, Any]) -> list[torch.Generator]:
    """List the generators that a call is given.

    Args:
        call: Its arguments.

    Returns:
        The generators.
    """
    given = call.get("generator")
    return [each for each in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(each, torch.Generator)]
