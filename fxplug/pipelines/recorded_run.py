"""One call of a pipeline, step by step: what scheduler, denoiser and VAE are given, with other values in their place."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import SpecError, did_you_mean, format_fields
from ..core.torch_internals import trees as pytree
from .latent_maps import flatten_tensors, unflatten_tensors
from .opening import call_parameters, silence_libraries

Code = Callable[[Tensor], Tensor]
_LOCK = threading.RLock()  # methods of models are replaced for the time of a run: one run at a time


class EndOfRecording(BaseException):  # noqa: N818
    """All that is wanted was seen: the call need not go on. No Exception, of which modular pipelines log the traceback."""


@dataclass
class RecordedStep:
    """One step of the scheduler: the calls of models before it (name, arguments by name, result), the `time`, the `sample`
    as it was scaled for the denoiser, and the model's `prediction`."""

    calls: list[tuple[str, dict[str, Any], Any]]
    time: Any
    sample: Tensor
    prediction: Any

    __repr__ = format_fields


@dataclass
class PipelineRun:
    """What was seen of a call: its `steps`, the `final` latents, whether latents `changed` between two steps, what the VAE was
    to decode (by the VAE's name), the scheduler, as it was set, and the arguments of `set_timesteps`."""

    steps: list[RecordedStep] = field(default_factory=list)
    decoded: dict[str, Tensor] = field(default_factory=dict)
    scheduler: Any = None
    schedule: dict[str, Any] = field(default_factory=dict)
    final: Tensor | None = None
    changed: bool = False

    __repr__ = format_fields


def get_components(pipe: Any) -> dict[str, Any]:
    """Return the parts of a pipeline of diffusers by name."""
    found = getattr(pipe, "components", None)
    return dict(found) if isinstance(found, Mapping) else {}


def check_arguments(pipe: Any, call: Mapping[str, Any]) -> None:
    """Raise SpecError for an argument that the pipeline does not have, naming the nearest."""
    known = call_parameters(pipe)
    for name in call:
        if name not in known:
            finding = f"{type(pipe).__name__} is not called with '{name}'{did_you_mean(name, known)}"
            raise SpecError(f"{finding}; it takes {', '.join(known)}", path=("model", "call"))


def record_run(
    pipe: Any,
    call: Mapping[str, Any],
    *,
    steps: int,
    seed: int = 0,
    latents: Code | None = None,
    outputs: Code | None = None,
    predict: Callable[[Tensor, Tensor], Tensor] | None = None,
    denoisers: frozenset[str] = frozenset(),
    reused: frozenset[str] = frozenset(),
    results: dict[str, Any] | None = None,
    first_call: str | None = None,
    gradients: bool = False,
) -> PipelineRun:
    """Call a pipeline, as far as the VAE, and record it. The pipeline is left as it was.

    Threads that record take turns; nobody else calls its models meanwhile, who would get what the run has in their place.

    Args:
        pipe: A pipeline of diffusers.
        call: What it is called with.
        steps: The number of steps.
        seed: What torch's random numbers begin with.
        latents: What the scheduler returns instead of its own next latents, a function of the latents before.
        outputs: What the models in `denoisers` return instead of their results, a function of the flattened result.
        predict: What the scheduler is given instead of the pipeline's prediction, a function of the sample as it was scaled for
            the denoiser, and of the time.
        denoisers: Their names.
        reused: Further models that are not run again for arguments of the same form.
        results: Results by the form of arguments, which is filled: what is in `denoisers` is not run again for arguments of the
            same form, and without these no model after the first step. None runs each call.
        first_call: Stop at the first call of this model, whose result is then None.
        gradients: Whether gradients reach the parameters of models that the pipeline calls: its `__call__` without the
            decorator that switches them off. What methods of its own switch off stays so.

    Returns:
        What was seen.

    Raises:
        SpecError: The pipeline has no scheduler; and what the call raises.
    """
    parts = get_components(pipe)
    scheduler = parts.get("scheduler")
    if scheduler is None or not hasattr(scheduler, "step"):
        raise SpecError(f"{type(pipe).__name__} has no scheduler with steps", path=("model", "pipeline"))
    coded = latents is not None  # codes are told apart in float32, whatever the models compute in
    run, pending = PipelineRun(), list[tuple[str, dict[str, Any], Any]]()
    run.scheduler = watched = copy.deepcopy(scheduler)
    pipe = copy.copy(pipe)  # pipelines keep what they are called with
    vars(pipe)["scheduler"] = watched
    if (guider := parts.get("guider")) is not None and hasattr(guider, "prepare_inputs"):
        vars(pipe)["guider"] = _without_guidance(guider)
    scaled: list[Tensor] = []

    @functools.wraps(watched.step)
    def step(*args: Any, **named: Any) -> Any:
        bound = inspect.signature(original_step).bind(*args, **named)
        given = bound.arguments
        sample = scaled[-1] if latents is None and scaled else given["sample"]
        key = next((key for key in ("model_output", "noise_pred") if key in given), "")
        made = given.get(key)
        if predict is not None and isinstance(made, Tensor):
            made = given[key] = predict(sample, torch.as_tensor(given.get("timestep"))).to(made)
        run.steps.append(RecordedStep(list(pending), given.get("timestep"), sample.clone(), made))
        run.changed |= run.final is not None and not _are_equal(run.final, given["sample"])
        pending.clear()
        scaled.clear()
        if latents is None:
            result = original_step(*bound.args, **bound.kwargs)
            run.final = (result[0] if isinstance(result, tuple) else result.prev_sample).clone()
            return result
        run.final = following = latents(given["sample"])
        return type("Output", (), {"prev_sample": following})() if named.get("return_dict", True) else (following,)

    @functools.wraps(getattr(watched, "scale_model_input", copy.copy))
    def scale_model_input(sample: Tensor, *args: Any, **named: Any) -> Tensor:
        found: Tensor = sample if latents is not None else original_scale(sample, *args, **named)
        scaled.append(found)
        return found

    @functools.wraps(watched.set_timesteps)
    def set_timesteps(*args: Any, **named: Any) -> Any:
        given = inspect.signature(original_set).bind(*args, **named).arguments
        run.schedule = {**given, **given.pop("kwargs", {})} if isinstance(given.get("kwargs"), dict) else dict(given)
        return original_set(*args, **named)

    original_step, original_set = watched.step, watched.set_timesteps
    original_scale: Any = getattr(watched, "scale_model_input", None)
    watched.step, watched.set_timesteps = step, set_timesteps
    if original_scale is not None:
        watched.scale_model_input = scale_model_input

    def watch(name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)
        dtype = getattr(module, "dtype", None) if coded else None

        @functools.wraps(forward)
        def watched_forward(*args: Any, **named: Any) -> Any:
            given = dict(signature.bind(*args, **named).arguments)
            for rest in [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]:
                given |= given.pop(rest, {})
            kept = pytree.tree_map_only(Tensor, Tensor.clone, given)
            if name == first_call:
                pending.append((name, kept, None))
                run.steps.append(RecordedStep(list(pending), None, torch.empty(0), None))
                raise EndOfRecording
            key = f"{name} {pytree.tree_map_only(Tensor, lambda t: tuple(t.shape), given)}"
            again = name not in denoisers | reused if denoisers else not run.steps
            if results is None or again or (found := results.get(key)) is None:
                found = forward(*args, **named) if dtype is None else call_in(dtype, forward, *args, **named)
                if results is not None:
                    results[key] = found
            if coded:
                found = pytree.tree_map_only(Tensor, _widen, found)
            if name in denoisers and outputs is not None:
                found = unflatten_tensors(outputs(flatten_tensors(found)), found)
            pending.append((name, kept, found))
            return found

        return watched_forward

    def decode(name: str, *args: Any, **named: Any) -> Any:
        run.decoded[name] = args[0] if args else next(iter(named.values()))
        raise EndOfRecording

    models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    if compiled := next((name for name, part in models.items() if "_orig_mod" in part._modules), None):
        finding = f"{compiled} of {type(pipe).__name__} is compiled: put the model itself in, {compiled}._orig_mod"
        raise SpecError(finding, path=("model", "pipeline"))
    vaes = {name for name, part in models.items() if callable(getattr(part, "decode", None)) and hasattr(part, "encode")}
    with _LOCK, contextlib.ExitStack() as stack:
        for name, module in models.items():
            if name in vaes:
                stack.enter_context(_same_dtypes(module))
                stack.enter_context(_attribute(module, "decode", functools.partial(decode, name)))
                if coded:
                    encode: Any = module.encode
                    own = functools.partial(call_in, getattr(module, "dtype", torch.float32), encode)
                    stack.enter_context(_attribute(module, "encode", own))
            else:
                stack.enter_context(_attribute(module, "forward", watch(name, module, module.forward)))
            if coded:
                stack.enter_context(_pretend_float32(module))
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(seed)
        run_call = functools.partial(inspect.unwrap(type(pipe).__call__), pipe) if gradients else pipe
        with hide_warnings(), torch.set_grad_enabled(gradients), contextlib.suppress(EndOfRecording):
            run_call(**{**call, **({"num_inference_steps": steps} if "num_inference_steps" in call_parameters(pipe) else {})})
    return run


def _are_equal(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.equal(one.to(two), two)


def _without_guidance(guider: Any) -> Any:
    """Copy a guider of diffusers as one by which the denoiser sees the condition alone, and whose result is that prediction.

    It stays on: some pipelines fail where it is off, as they take what they then do not prepare.
    """
    from diffusers.guiders.guider_utils import GuiderOutput

    kind = type(guider)

    def one(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: method(*args, **named)[:1]  # of batches, of which the first is the condition's

    methods = {name: one(getattr(kind, name)) for name in ("prepare_inputs", "prepare_inputs_from_block_state")}
    result = {"__call__": lambda self, data: GuiderOutput(pred=data[0].noise_pred, pred_cond=data[0].noise_pred)}
    alone: Any = type(kind.__name__, (kind,), {**methods, **result, "__module__": kind.__module__})
    made = alone.__new__(alone)
    vars(made).update(copy.deepcopy(vars(guider)))
    return made


@contextlib.contextmanager
def hide_warnings() -> Iterator[None]:
    """Let libraries say nothing but errors in a context: in a run the same call is made for each sample."""
    with silence_libraries(), warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        yield


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object itself for a time."""
    own = vars(owner)
    missing = object()
    before = own.get(name, missing)
    own[name] = value
    try:
        yield
    finally:
        if before is missing:
            own.pop(name, None)
        else:
            own[name] = before


@contextlib.contextmanager
def _same_dtypes(module: nn.Module) -> Iterator[None]:
    """Give parameters back the dtypes that a pipeline changes before it decodes, and would itself give back afterwards."""
    before = {name: parameter.dtype for name, parameter in module.named_parameters()}
    try:
        yield
    finally:
        for name, parameter in module.named_parameters():
            if parameter.dtype != before.get(name, parameter.dtype):
                parameter.data = parameter.data.to(before[name])


def call_in(dtype: torch.dtype, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a function with its floating-point tensors in a dtype."""
    given = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, named))
    return function(*given[0], **given[1])


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@contextlib.contextmanager
def _pretend_float32(module: nn.Module) -> Iterator[None]:
    """Let a model in half precision say for a time that it is float32, which pipelines make latents and conditions by."""
    kind = type(module)
    if getattr(module, "dtype", None) not in (torch.float16, torch.bfloat16):
        yield
        return
    # Nothing plainer works: `dtype` is a property of the class, and pipelines read it of the model
    module.__class__ = type(kind.__name__, (kind,), {"dtype": torch.float32, "__module__": kind.__module__})
    try:
        yield
    finally:
        module.__class__ = kind
