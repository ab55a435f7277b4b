"""What short runs of a pipeline tell: which tensors have the samples first, and whether it leaves its models as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import SpecError
from ..pipelines.opening import call_parameters
from .forms import CallForms, ModelCall
from .model_state import State, find_change, list_state
from .offloading import load_for_call
from .parked import OwnDraws, copy_pipeline, use_caller
from .requests import Request, copy_value

COUNTS = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
CALLBACKS = ("callback_on_step_end", "callback")
STEPS = 2  # of a short run


@dataclass(frozen=True)
class ReadOnlyCallback:
    """A callback of whoever runs the engine, which writes into no model: models are not compared before and after it."""

    function: Callable[..., dict[str, Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call it with what a pipeline gives at the end of a step."""
        return self.function(*args, **kwargs)


@dataclass
class LearntKind:
    """What is known of a kind of request: the rows of its largest call, the `id` of each model called, or why it is refused."""

    rows: int = 1
    refused: str = ""
    models: frozenset[int] = frozenset()

    def check(self) -> int:
        """Return the rows. Raises SpecError for a kind that is refused."""
        if self.refused:
            raise SpecError(self.refused)
        return self.rows


def classify_request(request: Request) -> tuple[Any, ...]:
    """Return what tells the kinds of requests apart that a pipeline may call its models differently for.

    Args:
        request: The request.

    Returns:
        The task, the scheduler, and which arguments there are: of numbers whether they are above 0 and above 1, as guidance is.
    """
    call = {name: value for name, value in request.call.items() if value is not None and name not in CALLBACKS}
    given = sorted((name, _kind_of_value(value)) for name, value in call.items())
    return request.task, request.scheduler, tuple(given)


def _kind_of_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float)):
        return f"{type(value).__name__} {value > 0} {value > 1}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {len(value) > 1}"
    return f"{type(value).__name__} {value.dim() if isinstance(value, Tensor) else ''}"


def learn_request(
    request: Request,
    pipe: Any,
    stand_ins: Mapping[int, nn.Module],
    forms: CallForms,
    scheduler: type | None,
    note: Callable[[nn.Module], None],
) -> LearntKind:
    """Run a request's call for one picture and for two, in few steps, to learn which of its tensors have the samples first.

    No callback of it is called, and its generator is not drawn from. Pipelines that cannot make two pictures at once, as some
    that are given embeddings, run twice for one: what has the samples first is then guessed, and proven later.

    Args:
        request: The request.
        pipe: The pipeline that it calls.
        stand_ins: What stands for a model, by the model's `id`.
        forms: What is known of calls, where it is kept.
        scheduler: The class of its scheduler, or None.
        note: What is called with each model that is called.

    Returns:
        What is known now.

    Raises:
        Exception: What the pipeline raises where it cannot make the call at all: a request that nobody has watched is not run.
    """
    known = call_parameters(pipe)
    call = {name: value for name, value in request.call.items() if name not in CALLBACKS}
    count = next((name for name in COUNTS if name in known), None)
    number = (call.get(count) if count else None) or 1
    models = _models_of(pipe, stand_ins)
    runs: list[list[ModelCall]] = []
    written = ""
    for times in (1, 2):
        before = [list_state(model) for model in models]  # of the second run with what models made at their first call
        tries = [call]
        if times == 2:
            doubled = _double(call)  # most pipelines repeat no embeddings for a number of pictures
            more = [call | {count: number * 2}] if count else []
            tries = [*([doubled] if doubled else []), *more, call]
        shortened = [each for one in tries for each in _shorten(one, known)]
        for arguments in shortened:
            try:
                calls, found = _observe_run(
                    pipe, arguments, known, stand_ins, scheduler, models, before, times == 2, note
                )
            except Exception:  # whatever a pipeline raises: the last is the call as it is
                if arguments is shortened[-1]:
                    raise
                continue
            runs.append(calls)
            written = written or found
            break
    if written:
        return LearntKind(refused=(
            f"{type(pipe).__name__} writes into its models while it runs ({written}), so that requests that run at once would "
            "get each other's: call it by itself"
        ))  # fmt: skip
    forms.learn(*runs)
    sized = [forms.describe(c.model, c.method, c.args, c.kwargs) for c in runs[0]]
    return LearntKind(max((one.rows for one in sized), default=1), models=frozenset(id(one.model) for one in runs[0]))


def _models_of(pipe: Any, stand_ins: Mapping[int, nn.Module]) -> list[nn.Module]:
    """List the models of a pipeline of which calls wait; a VAE, of which `decode` does, may write into itself."""
    parts = pipe.components.values()
    return [part for part in parts if id(part) in stand_ins and not hasattr(part, "decode")]


def _double(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a call with each of its prompts, embeddings and latents twice; None for one that is given no such tensor."""
    found = dict(call)
    for name, value in call.items():
        if isinstance(value, Tensor) and value.dim() > 1 and any(word in name for word in ("embeds", "latents", "prompt")):
            found[name] = torch.cat([value, value])
        elif "prompt" in name and isinstance(value, str):
            found[name] = [value, value]
    return found if any(found[name] is not value for name, value in call.items() if isinstance(value, Tensor)) else None


def _shorten(call: Mapping[str, Any], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a call with few steps, and the call as it is, for where the other fails."""
    steps = call.get("num_inference_steps")
    fixed = any(call.get(name) is not None for name in ("timesteps", "sigmas"))
    if "num_inference_steps" not in known or fixed or (isinstance(steps, int) and steps <= STEPS):
        return [dict(call)]
    return [{**call, "num_inference_steps": STEPS}, dict(call)]


def _observe_run(
    pipe: Any,
    call: dict[str, Any],
    known: Mapping[str, Any],
    stand_ins: Mapping[int, nn.Module],
    scheduler: type | None,
    models: Sequence[nn.Module],
    before: Sequence[State],
    additions: bool,
    note: Callable[[nn.Module], None],
) -> tuple[list[ModelCall], str]:
    """Run a pipeline; return its calls of models, and the path of what it wrote into one of them."""
    calls: list[ModelCall] = []
    written: list[str] = []

    def look(*some: nn.Module) -> None:
        for model, state in zip(models, before, strict=True):
            if not written and model in some and (path := find_change(state, list_state(model), additions)) is not None:
                written.append(f"{type(model).__name__}.{path}")

    def watch(model: nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        look(model)
        note(model)
        calls.append(CallForms().describe(model, method, args, kwargs))
        load_for_call(model)
        return getattr(model, method)(*args, **kwargs)

    call = {name: copy_value(value) for name, value in call.items()}
    if "generator" in known:
        call["generator"] = torch.Generator().manual_seed(0)
    own, _ = copy_pipeline(pipe, stand_ins, scheduler)
    if hasattr(own, "set_progress_bar_config"):
        own.set_progress_bar_config(disable=True)
    with OwnDraws(), use_caller(watch):
        try:
            own(**call)
        except SystemExit as error:  # which must not end the engine
            raise RuntimeError(f"the pipeline ended with SystemExit: {error}") from error
    look(*models)
    return calls, next(iter(written), "")
