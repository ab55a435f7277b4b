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
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.errors import SpecError, did_you_mean, format_fields, get_first_line
from ..core.torch_internals import trees as pytree
from .latent_maps import flatten_tensors, unflatten_tensors
from .opening import call_parameters, silence_libraries
from .pipeline_errors import describe_lacking_texts, explain_lacking_parts

Code = Callable[[Tensor], Tensor]
STEPS = 6  # of a run with coded values, which costs little
SIDE = 128  # of an empty picture
_LOCK = threading.RLock()  # methods of models are replaced for the time of a run: one run at a time


class EndOfRecording(BaseException):  # noqa: N818
    """All that is wanted was seen: the call need not go on. No Exception, of which modular pipelines log the traceback."""


@dataclass
class RecordedStep:
    """One step of a scheduler: the calls of models before it (name, arguments by name, result), the `time`, the `sample` as it
    was scaled for the denoiser, and the model's `prediction`.

    After the same calls there may be steps of several latents, as of a video and its sound: `place` is the number of these.
    """

    calls: list[tuple[str, dict[str, Any], Any]]
    time: Any
    sample: Tensor
    prediction: Any
    place: int = 0

    __repr__ = format_fields


@dataclass
class PipelineRun:
    """What was seen of a call: its `steps`, the `finals`, which are the last latents of each place, whether latents `changed`
    between two steps, what a VAE was to decode (by the VAE's name), the scheduler, as it was set, and the arguments of
    `set_timesteps`."""

    steps: list[RecordedStep] = field(default_factory=list)
    decoded: dict[str, Tensor] = field(default_factory=dict)
    scheduler: Any = None
    schedule: dict[str, Any] = field(default_factory=dict)
    finals: list[Tensor] = field(default_factory=list)
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
    place: int | None = None,
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
        place: Which latents, of several that have steps, `latents` and `predict` are for: others get ones, and the pipeline's
            own prediction. None is all.

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
    pipe = copy.copy(pipe)  # pipelines keep what they are called with
    if (guider := parts.get("guider")) is not None and hasattr(guider, "prepare_inputs"):
        vars(pipe)["guider"] = _without_guidance(guider)
    spy = _SchedulerSpy(run, pending, latents, predict, place)
    for name, part in parts.items():
        if name == "scheduler" or (hasattr(part, "step") and hasattr(part, "set_timesteps")):
            vars(pipe)[name] = watched = copy.deepcopy(part)
            watched.__class__ = spy.watch(type(part))
            if name == "scheduler":
                run.scheduler = watched

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

    def decode(name: str, module: nn.Module, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        run.decoded[name] = args[0] if args else next(iter(named.values()))
        if len(run.finals) < 2 or is_vae_of_pictures(module, run.decoded[name].dim()):
            raise EndOfRecording
        key = f"decode {name} {pytree.tree_map_only(Tensor, lambda t: tuple(t.shape), (args, named))}"
        found = None if results is None else results.get(key)  # of a sound, before the video
        if found is None:
            own = getattr(module, "dtype", torch.float32)
            found = call_in(own, original, *args, **named) if coded else original(*args, **named)
        if results is not None:
            results[key] = found
        return found

    models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    if (compiled := next((name for name, part in models.items() if "_orig_mod" in part._modules), None)) is not None:
        finding = f"{compiled} of {type(pipe).__name__} is compiled: put the model itself in, {compiled}._orig_mod"
        raise SpecError(finding, path=("model", "pipeline"))
    vaes = list_vaes(pipe)
    with _LOCK, contextlib.ExitStack() as stack:
        for name, module in models.items():
            if name in vaes:
                stack.enter_context(_same_dtypes(module))
                original: Any = module.decode
                stack.enter_context(_attribute(module, "decode", functools.partial(decode, name, module, original)))
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


def refuse(pipe: Any, what: str, why: str) -> SpecError:
    """Return the error of a pipeline that is not understood: in what, and why."""
    return SpecError(f"{what} of {type(pipe).__name__}: {why}", path=("model", "pipeline"))


def call_pipeline(pipe: Any, call: Mapping[str, Any], *, steps: int = STEPS, **options: Any) -> PipelineRun:
    """Record a run of a pipeline.

    Args:
        pipe: The pipeline.
        call: What it is called with.
        steps: The number of steps.
        **options: Those of `record_run`.

    Returns:
        What was seen.

    Raises:
        SpecError: What the pipeline raises, quoted.
    """
    try:
        return record_run(pipe, call, steps=steps, **options)
    except SpecError:
        raise
    except Exception as error:  # the pipeline's, about any of its arguments
        if lacking := explain_lacking_parts(pipe, error):
            raise lacking from error
        if options.get("latents") is not None:
            why = f"it takes more of a step than the next latents: {type(error).__name__}: {get_first_line(error)}"
            raise refuse(pipe, "scheduler", why) from error
        named = next((name for name in call if f"`{name}`" in str(error) or f"'{name}'" in str(error)), None)
        given = f"this '{named}'" if named else ", ".join(call) or "nothing"
        what = f"a call of {type(pipe).__name__} with {given}, of {steps} steps of its scheduler, fails"
        finding = f"{what}: {type(error).__name__}: {get_first_line(error)}{describe_lacking_texts(pipe)}"
        raise SpecError(finding, path=("model", "call")) from error


class _SchedulerSpy:
    """What records the steps of schedulers in a run: of those in the pipeline, and of copies that it makes of them."""

    def __init__(
        self,
        run: PipelineRun,
        pending: list[tuple[str, dict[str, Any], Any]],
        latents: Code | None,
        predict: Callable[[Tensor, Tensor], Tensor] | None,
        wanted: int | None,
    ) -> None:
        """Take where to record, the calls of models since the last step, and what `record_run` was given."""
        self.run, self.pending, self.latents, self.predict, self.wanted = run, pending, latents, predict, wanted
        self.calls: list[tuple[str, dict[str, Any], Any]] = []  # those before the steps of all places
        self.scaled: list[tuple[Tensor, Tensor]] = []  # samples, and as they were scaled, since these calls began
        self.fresh: list[tuple[Tensor, Tensor]] = []  # since the last step
        self.place, self.rounds = 0, 0

    def watch(self, kind: type) -> type:
        """Return a class of schedulers whose steps are recorded. A class, so that a copy does its own steps, as for a sound."""
        spy, methods = self, dict[str, Any]()

        @functools.wraps(kind.step)  # type: ignore[attr-defined]
        def step(self: Any, *args: Any, **named: Any) -> Any:
            return spy.step(kind, self, *args, **named)

        @functools.wraps(kind.set_timesteps)  # type: ignore[attr-defined]
        def set_timesteps(self: Any, *args: Any, **named: Any) -> Any:
            original: Any = kind.set_timesteps  # type: ignore[attr-defined]
            given = inspect.signature(original).bind(self, *args, **named).arguments
            given = {**given, **given.pop("kwargs", {})} if isinstance(given.get("kwargs"), dict) else dict(given)
            if self is spy.run.scheduler:
                spy.run.schedule = {name: value for name, value in given.items() if value is not self}
            return original(self, *args, **named)

        def scale_model_input(self: Any, sample: Tensor, *args: Any, **named: Any) -> Tensor:
            # some pipelines ask for a scheduler's very class, which this is not, and take another for one that scales
            coded = spy.latents is not None or not hasattr(kind, "scale_model_input")
            found: Tensor = sample if coded else kind.scale_model_input(self, sample, *args, **named)  # type: ignore[attr-defined]
            spy.fresh.append((sample, found))
            return found

        methods |= {"step": step, "set_timesteps": set_timesteps, "scale_model_input": scale_model_input}
        return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})

    def step(self, kind: Any, scheduler: Any, *args: Any, **named: Any) -> Any:
        """Record a step, and do it, or return coded latents."""
        bound = inspect.signature(kind.step).bind(scheduler, *args, **named)
        given, run = bound.arguments, self.run
        self._find_place(given["sample"])
        wanted = self.wanted in (None, self.place)
        sample = given["sample"] if self.latents is not None else self._scaled(given["sample"])
        key = next((key for key in ("model_output", "noise_pred") if key in given), "")
        made = given.get(key)
        if self.predict is not None and isinstance(made, Tensor) and wanted:
            made = given[key] = self.predict(sample, torch.as_tensor(given.get("timestep"))).to(made)
        run.steps.append(RecordedStep(self.calls, given.get("timestep"), sample.clone(), made, self.place))
        if self.place < len(run.finals):
            run.changed |= not _are_equal(run.finals[self.place], given["sample"])
        else:
            run.finals.append(given["sample"])
        if self.latents is None:
            result = kind.step(*bound.args, **bound.kwargs)
            run.finals[self.place] = (result[0] if isinstance(result, tuple) else result.prev_sample).clone()
            return result
        following = self.latents(given["sample"]) if wanted else torch.ones_like(given["sample"])
        run.finals[self.place] = following
        return type("Output", (), {"prev_sample": following})() if named.get("return_dict", True) else (following,)

    def _find_place(self, sample: Tensor) -> None:
        """Find which latents a step is of: those of the next place, if no model was called since the last step.

        Others than in the first round there are none; and there a step that goes on from the last one is of the same latents.
        """
        if self.pending or not self.run.finals:
            self.calls, self.scaled, self.place = list(self.pending), self.fresh, 0
            self.fresh = []
            self.rounds += 1
            self.pending.clear()
            return
        known = self.place + 1 < len(self.run.finals)
        if known or (self.rounds == 1 and not _are_equal(self.run.finals[self.place], sample)):
            self.place += 1
        else:
            self.calls = []
        self.scaled += self.fresh
        self.fresh = []

    def _scaled(self, sample: Tensor) -> Tensor:
        """Return a sample as it was scaled for the denoiser."""
        own = [found for source, found in self.scaled if source is sample or _are_equal(source, sample)]
        last = [found for _, found in self.scaled] if self.place == 0 else []  # several samples together, for guidance
        return (own or last or [sample])[-1]


def list_vaes(pipe: Any) -> dict[str, nn.Module]:
    """Return the models of a pipeline that encode and decode, by name."""
    models = {name: part for name, part in get_components(pipe).items() if isinstance(part, nn.Module)}
    return {name: part for name, part in models.items() if callable(getattr(part, "decode", None)) and hasattr(part, "encode")}


@torch.no_grad()
def is_vae_of_pictures(vae: nn.Module, dims: int) -> bool:
    """Return whether a VAE whose latents have so many dimensions takes a picture, or a video of one frame."""
    empty, kind = torch.zeros(1, 3, *(1,) * (dims - 4), SIDE, SIDE), cast(Any, type(vae))
    first = next(vae.parameters(), empty)
    try:
        kind.encode(vae, empty.to(first.device, first.dtype))
    except Exception:  # the VAE's, about what is no spectrogram
        return False
    return True


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
