"""What is asked of an engine: the call of a pipeline, and with which adapters, scheduler and seed it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor

from ..core.errors import SpecError, did_you_mean, quote
from ..core.spec.yaml_source import Section, check_number, list_findings
from ..pipelines.opening import call_parameters

OWN = {"generator": "seed", "scheduler": "scheduler"}  # arguments that fields of a request stand for


class Request(Section):
    """A picture, or several, that an engine shall make: a call of its pipeline, and how it is made.

    Args:
        call: What the pipeline's `__call__` takes: `prompt`, `image`, `guidance_scale` and others.
        adapters: The strength of each adapter, by name.
        scheduler: The name of a class of diffusers that takes the configuration of the pipeline's scheduler; None is its own.
        seed: That of the CPU generator that the call gets; None is none.
        task: Which of the engine's pipelines is called, see `Engine`.
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
    deadline_s: float | None = Field(default=None, gt=0)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            found = next(list_findings(error, type(self)))
            raise SpecError(found.text, path=found.path, key=found.key) from None
        for name, strength in self.adapters.items():
            check_strength(strength, "adapters", name)


def check_strength(strength: Any, *path: str | int) -> None:
    """Check a strength of an adapter.

    Args:
        strength: What stands for it.
        *path: Where it stands.

    Raises:
        SpecError: If it is none.
    """
    check_number(strength, *path)


def get_strengths(adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Give the strengths of a request's adapters at a step."""
    return dict(adapters)


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
