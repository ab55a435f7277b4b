"""What a stock pipeline does around its denoiser, found by running it, and confirmed on real steps: no line about a model.

A pipeline is run with a scheduler that returns coded latents and a denoiser that returns coded values. What arrives at the
denoiser, the scheduler and the VAE tells four maps: the scheduler's latents to the denoiser's input, its output to the
scheduler's, the last latents to what the VAE decodes, and the scheduler's time to the denoiser's. All else that the denoiser is
called with is a condition, the same in each step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import SpecError, did_you_mean, format_fields, quote
from ..core.torch_internals import trees as pytree
from .latent_maps import LatentMap, MapError, flatten_tensors, make_codes, solve_map
from .model_times import fit_time_line, group_by_value
from .opening import call_parameters
from .recorded_run import STEPS, PipelineRun, RecordedStep, call_pipeline, check_arguments, get_components, refuse
from .several_latents import find_picture_place, is_predicted_alone, list_settings, switch_scales_off
from .step_inputs import has_numbers, has_values

MOST_STEPS = 24  # where a denoiser is called in few of them, as the first one of two
PROMPTS = "a red ball", "two old green boats on a lake"
ROUNDED = 1e-5  # how much a factor may seem to change with the time, where latents are added to a prediction and taken away
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of what is confirmed, over the largest value; of others 1e-5
CHANGED = (
    "the pipeline changes them between two steps, as inpainting does with a mask: not what the scheduler returned is what it "
    "is given next"
)


@dataclass(frozen=True)
class Observation:
    """What a pipeline does around its denoiser, for one size of picture.

    `part` is the denoiser's name, `noisy` and `time` the names of its arguments for latents and time. `to_input`, `to_output`
    and `to_decoder` are the maps of the scheduler's latents to `noisy`, of the denoiser's output to what the scheduler is
    given, and of the latents to what `vae` decodes. The denoiser's time is `slope * t + offset` of the scheduler's. `shape`
    is that of the scheduler's latents of one sample, `call` what the pipeline is called with, `condition` the arguments of the
    denoiser's call for it, and `schedule` what the scheduler's `set_timesteps` got beside the steps. `others` are the names of
    further denoisers, which are called at other times; in a run of so many `steps` this one is called more than twice.

    `also` are the names of further arguments that are told the same time, and `outputs` are the shapes of the tensors of the
    denoiser's output for one sample. Where the denoiser has several latents, as of a video and its sound, all this is of those
    that a picture becomes, whose step is number `place` after a call. `beside` are then the arguments for the other latents and
    their times: called with `settings`, as the pipeline does in a call of each step, the denoiser predicts these latents
    without them.
    """

    part: str
    noisy: str
    time: str
    to_input: LatentMap
    to_output: LatentMap
    to_decoder: LatentMap
    vae: str
    slope: float
    offset: float
    shape: torch.Size
    call: dict[str, Any]
    condition: dict[str, Any]
    schedule: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    steps: int = STEPS
    also: tuple[str, ...] = ()
    outputs: tuple[torch.Size, ...] = ()
    place: int = 0
    beside: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    __repr__ = format_fields

    def model_time(self, time: Tensor) -> Tensor:
        """Return the denoiser's times for those of the scheduler, in the same dtype."""
        divisor = 1 / self.slope if self.slope else 1.0
        if abs(divisor - round(divisor)) < 1e-6 * abs(divisor) and abs(divisor) > 1:
            return time / round(divisor) + self.offset
        return time * self.slope + self.offset

    @property
    def input_groups(self) -> dict[str, list[str]]:
        """Arguments of the denoiser that stay the same in each step, and those that say the time, for `lower(hoist=True)`."""
        times = [self.time, *self.also]
        stay = [name for name in self.condition if name not in (self.noisy, *times, *self.beside)]
        return {"conditions": [name for name in stay if has_numbers(self.condition[name])], "time": times}

    def list_facts(self) -> dict[str, str]:
        """Return what was observed, in words by what it is about."""
        line = "the scheduler's" if (self.slope, self.offset) == (1, 0) else f"{self.slope:g} x the scheduler's"
        line += f" + {self.offset:g}" if self.offset else ""
        own = sorted(set(self.condition) - {self.noisy, self.time, *self.also, *self.beside})
        facts = {
            "denoiser": self.part + (f", and at other times {', '.join(self.others)}" if self.others else ""),
            "input": f"{self.noisy} = latents {self.to_input.describe()}",
            "output": f"the scheduler's prediction = {self.part}'s output {self.to_output.describe()}",
            "decoder": f"{self.vae} decodes latents {self.to_decoder.describe()}",
            "time": f"{' = '.join((self.time, *self.also))} = {line}",
            "condition": ", ".join(name for name in own if has_values(self.condition[name])) or "nothing",
        }
        if self.beside:
            how = ", ".join(f"{name}={quote(value)}" for name, value in self.settings.items())
            facts["apart"] = f"without {', '.join(self.beside)}, of other latents" + (f", by {how}" if how else "")
        return facts

    def describe(self) -> str:
        """Describe the observation in lines of words."""
        return "\n".join(f"{name:11} {text}" for name, text in self.list_facts().items())


def find_denoisers(pipe: Any, call: Mapping[str, Any]) -> list[str]:
    """Return the names of the models that denoise in the steps of a pipeline: the last one of each step, and those of its class
    that are called beside it, as where another model tells what is without a caption."""
    return list(dict.fromkeys(name for names in _list_denoisers(pipe, call, {}) for name in names))


def _list_denoisers(pipe: Any, call: Mapping[str, Any], results: dict[str, Any]) -> list[list[str]]:
    """Return the names of the denoisers of each step, and fill results by the form of their arguments."""
    run, parts = call_pipeline(pipe, call, results=results), get_components(pipe)
    called = [[name for name, _, _ in step.calls] for step in run.steps if step.calls]
    return [[name for name in names if type(parts[name]) is type(parts[names[-1]])] for names in called]


def observe(pipe: Any, call: Mapping[str, Any] | None = None, part: str | None = None) -> Observation:
    """Find what a pipeline does around its denoiser. The denoiser itself runs once.

    Guidance is switched off by a value of the arguments `*guidance_scale` and `*cfg_scale` with which the denoiser sees each
    sample once: as given, else 1, else 0.

    Args:
        pipe: A pipeline of diffusers, of any of its kinds.
        call: What it is called with: a prompt is chosen where none is given.
        part: Which denoiser, for a pipeline with several; None is the one there is.

    Returns:
        The observation, not confirmed yet.

    Raises:
        SpecError: The pipeline is not understood; the text says which of time, input, output, latents, VAE, scheduler, guidance
            or condition, and why, and quotes what the pipeline itself raised.
    """
    call = dict(call or {})
    check_arguments(pipe, call)
    _check_one_sample(call)
    known = call_parameters(pipe)
    if "prompt" in known and not any(name.startswith("prompt") for name in call):
        call["prompt"] = PROMPTS[0]
    if "num_inference_steps" not in known:
        raise refuse(pipe, "scheduler", "it has no num_inference_steps, so its steps are not the scheduler's")
    results: dict[str, Any] = {}
    found = _list_denoisers(pipe, call, results)
    names = list(dict.fromkeys(name for each in found for name in each))
    if not names:
        raise refuse(pipe, "scheduler", "no model is called between two of its steps")
    if part is not None and part not in names:
        raise SpecError(
            f"this call of {type(pipe).__name__} has no denoiser '{part}'{did_you_mean(part, names)}; it calls "
            f"{', '.join(names)}",
            path=("model", "part"),
        )
    if part is None and len(names) > 1:
        raise SpecError(f"this call of {type(pipe).__name__} has {len(names)} denoisers: set 'part' to one of "
                        f"{', '.join(names)}", path=("model", "part"))  # fmt: skip
    part = part or names[0]
    reused = frozenset(name for each in found if part in each for name in each if name != part)
    others = tuple(name for name in names if name != part and name not in reused)
    scales = [n for n in known if n.endswith(("guidance_scale", "cfg_scale")) and not n.startswith("pag_")]
    unscaled = dict.fromkeys([n for n in known if n.endswith("guidance_rescale")], 0.0)
    failures: list[SpecError] = []
    for value in (None, 1.0, 0.0) if scales else (None,):
        tried = call if value is None else {**call, **dict.fromkeys(scales, value), **unscaled}
        try:
            tried = switch_scales_off(pipe, tried, part, scales, frozenset(names), results)
            return _observe_once(pipe, tried, part, others, reused, results, call)
        except SpecError as error:
            failures.append(error)
    raise next((error for error in failures if not error.finding.startswith("guidance")), failures[0])


def _check_one_sample(call: Mapping[str, Any]) -> None:
    """Raise SpecError for a call that draws several samples: what is seen is of one."""
    for name, value in call.items():
        several = name.startswith("prompt") and isinstance(value, (list, tuple)) and len(value) != 1
        if several or (name.startswith("num_") and name.endswith("_per_prompt") and value != 1):
            finding = f"asks for several samples ({quote(value)}), and a pipeline is observed with one: leave it out"
            raise SpecError(finding, path=("model", "call", name))


def _observe_once(
    pipe: Any,
    call: dict[str, Any],
    part: str,
    others: tuple[str, ...],
    reused: frozenset[str],
    results: dict[str, Any],
    given: dict[str, Any],
) -> Observation:
    """Observe a pipeline by a call in which the denoiser sees each sample once; `given` is the call as it is wanted, and
    `reused` are models of the denoiser's class that are called in the same steps."""
    coded: dict[str, Any] = {"results": results, "denoisers": frozenset({part, *others}), "reused": reused}
    for number in (STEPS, 2 * STEPS, MOST_STEPS):
        first = call_pipeline(pipe, call, steps=number, latents=torch.ones_like, outputs=torch.ones_like, **coded)
        ends = [_end_at(pipe, step, part) for step in first.steps if step.place == 0]
        times = {float(torch.as_tensor(step.time).flatten()[0]) for step in ends if step.calls and step.calls[-1][0] == part}
        if number == MOST_STEPS or not others or len(times) > 2:
            break
    coded["steps"] = number
    twos = make_codes(2)["twos"]
    moved = {place: call_pipeline(pipe, call, latents=twos, outputs=torch.ones_like, place=place, **coded)
             for place in range(len(first.finals)) if len(first.finals) > 1}  # fmt: skip
    place = find_picture_place(pipe, first, moved) if moved else 0
    steps = _list_steps(pipe, first, part, place)
    shape, sample = steps[0].sample.shape, steps[0].sample
    output = steps[0].calls[-1][2]
    codes = make_codes(max(sample.numel(), flatten_tensors(output).numel()))
    runs = {name: first if name == "ones" else call_pipeline(pipe, call, latents=code, outputs=code, place=place, **coded)
            for name, code in codes.items()}  # fmt: skip
    seen = {name: _list_steps(pipe, run, part, place) for name, run in runs.items()}
    for name, run in runs.items():
        later = run.steps[len(run.finals) :]
        coding = [codes[name] if step.place == place else torch.ones_like for step in later]
        if any(not torch.equal(step.sample, code(step.sample)) for step, code in zip(later, coding, strict=True)):
            raise refuse(pipe, "latents", CHANGED)
    call_of = steps[0].calls[-1][1]
    noisy = _list_changed(call_of, seen["twos"][0].calls[-1][1])
    beside = [name for other, run in moved.items() if other != place
              for name in _list_changed(call_of, _list_steps(pipe, run, part, place)[0].calls[-1][1])]  # fmt: skip
    if both := [name for name in noisy if name in beside]:
        raise refuse(pipe, "latents", f"{_join_names(both)} of {part} has several latents, as of a video and its sound")
    if call != given and isinstance(call.get("prompt"), str):
        other = {**call, "prompt": PROMPTS[call["prompt"] == PROMPTS[0]]}
        run = call_pipeline(pipe, other, latents=torch.ones_like, outputs=torch.ones_like, **coded)
        if not set(_list_changed(call_of, _list_steps(pipe, run, part, place)[0].calls[-1][1])).difference(noisy):
            raise refuse(pipe, "guidance", f"switched off it leaves out the prompt: no argument of {part} changes with that")
    before = list(dict.fromkeys(name for name, _, _ in steps[0].calls[:-1]))
    if len(noisy) != 1:
        why = f"{_join_names(noisy)} of {part} change with the latents, and must be one argument"
        if before:
            earlier = f"{_join_names(before)} is called before it in each step, such as a ControlNet"
            raise refuse(pipe, "input", f"{why}: {earlier}")
        raise refuse(pipe, "latents" if noisy else "input", why)
    noisy_name = noisy[0]
    if len({flatten_tensors(step.calls[-1][1][noisy_name]).numel() for step in steps}) > 1:
        raise refuse(pipe, "guidance", f"{part} sees each sample more than once in some of the steps")
    try:
        to_input = solve_map({n: s[0].calls[-1][1][noisy_name] for n, s in seen.items()}, shape)
        last = solve_map({n: s[-1].calls[-1][1][noisy_name] for n, s in seen.items()}, shape)
    except MapError as error:
        if str(error) == "an element of the latents is in it twice":
            raise refuse(pipe, "guidance", f"{part} sees each sample more than once in a step") from None
        raise refuse(pipe, "input", f"{noisy_name} of {part}: {error}") from None
    if not to_input.is_close(last, 0):
        raise refuse(pipe, "input", f"{noisy_name} of {part} depends on the time (as with the preconditioning of EDM)")
    if not to_input.covers:
        raise refuse(pipe, "input", f"{noisy_name} of {part} has a part of the latents only")
    try:
        to_output = solve_map({n: s[0].prediction for n, s in seen.items()}, _get_shape(output))
        final = solve_map({n: s[-1].prediction for n, s in seen.items()}, _get_shape(output))
    except MapError:
        why = "in an order, times factors, plus terms: it depends on the latents or the time, or is a sum"
        raise refuse(pipe, "output", f"the scheduler's input is not the output of {part} alone, {why}") from None
    if not to_output.is_close(final, ROUNDED):
        raise refuse(pipe, "output", f"the scheduler's input, made of {part}'s output, depends on the time or on the latents")
    if reused and to_output.term.any():
        raise refuse(pipe, "guidance", f"the scheduler's input also has a share of {_join_names(sorted(reused))}, too")
    prediction = steps[0].prediction
    if not isinstance(prediction, Tensor) or prediction.shape != shape:
        found = list(prediction.shape) if isinstance(prediction, Tensor) else f"a {type(prediction).__name__}"
        raise refuse(pipe, "output", f"the scheduler is given {found} for latents of {list(shape)}")
    vae, to_decoder = _find_decoder_map(pipe, runs, shape)
    timed = [name for name in _list_changed(call_of, steps[-1].calls[-1][1]) if name not in (noisy_name, *beside)]
    groups = group_by_value(timed, steps)
    if len(groups) != 1 and not moved:
        more = f": {_join_names(before)} is called before it in each step" if before else ": two times, or parts with own times"
        why = f"{_join_names(timed)} of {part} change with the time, and must be one argument{more}"
        raise refuse(pipe, "time", why)
    outputs = tuple(leaf.shape for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    schedule = {k: v for k, v in first.schedule.items() if k in ("mu",)}
    failures: list[SpecError] = []
    for names in groups:
        try:
            slope, offset = fit_time_line(pipe, part, names[0], steps)
        except SpecError as error:
            failures.append(error)
            continue
        apart = (*beside, *(name for name in timed if name not in names)) if moved else ()
        made = Observation(part, noisy_name, names[0], to_input, to_output, to_decoder, vae, slope, offset, shape, call,
                           call_of, schedule, others, number, names[1:], outputs, place, apart)  # fmt: skip
        if not moved:
            return made
        real = call_pipeline(pipe, call, steps=number, first_call=part, results={}, denoisers=frozenset(others))
        for settings in list_settings(pipe, given, part, call_of, reused.union((part, *others)), results):
            if is_predicted_alone(pipe, part, {**real.steps[-1].calls[-1][1], **settings}, noisy_name, apart, to_output):
                return replace(made, settings=settings)
        why = f"what {part} predicts for {noisy_name} depends on {_join_names(list(apart))}, other latents that have steps, as"
        failures.append(refuse(pipe, "latents", f"{why} of a sound: data are pictures, or videos without their sound, and in a "
                               "step of the pipeline there is no call of it that keeps them apart"))  # fmt: skip
    raise failures[0] if failures else refuse(pipe, "time", f"no argument of {part} changes with the time")


def _list_steps(pipe: Any, run: PipelineRun, part: str, place: int) -> list[RecordedStep]:
    """Return the steps of latents but the first that end with a call of the denoiser. Raises SpecError for another number of
    calls."""
    found = []
    for each in [step for step in run.steps if step.place == place][1:]:
        step = _end_at(pipe, each, part)
        called = [name for name, _, _ in step.calls]
        if called.count(part) > 1:
            why = f"{part} is called {called.count(part)} times in a step, for guidance or to fill a cache, but must be once"
            raise refuse(pipe, "guidance", why)
        if called and called[-1] == part:
            found.append(step)
    if len(found) < 2:
        raise refuse(pipe, "scheduler", f"{part} is called in {len(found)} of {len(run.steps)} steps, but must be in more")
    return found


def _end_at(pipe: Any, step: RecordedStep, part: str) -> RecordedStep:
    """Return a step without calls of models of the same class behind those of a part: of what they give nothing may be left."""
    names, parts = [name for name, _, _ in step.calls], get_components(pipe)
    end = max((n + 1 for n, name in enumerate(names) if name == part), default=0)
    alike = end and all(type(parts[name]) is type(parts[part]) for name in names[end:])
    return replace(step, calls=step.calls[:end]) if alike else step


def _list_changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that differ."""
    return [name for name in {**one, **other} if not _equal(one.get(name), other.get(name))]


def _equal(one: Any, other: Any) -> bool:
    left, right = pytree.tree_flatten(one), pytree.tree_flatten(other)
    if left[1] != right[1]:
        return False
    for a, b in zip(left[0], right[0], strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or not torch.equal(a, b):
                return False
        elif type(a) is not type(b) or (isinstance(a, (int, float, str, bool)) and a != b):
            return False
    return True


def _join_names(names: list[str]) -> str:
    return ", ".join(names) or "no arguments"


def _get_shape(output: Any) -> torch.Size:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return tensors[0].shape if len(tensors) == 1 else torch.Size([sum(t.numel() for t in tensors)])


def _find_decoder_map(pipe: Any, runs: Mapping[str, PipelineRun], shape: torch.Size) -> tuple[str, LatentMap]:
    names = {list(run.decoded)[-1] if run.decoded else "" for run in runs.values()}  # a sound may be decoded before
    if len(names) != 1 or "" in names:
        raise refuse(pipe, "VAE", "the call ends without decoding latents by `decode` of a part with `encode`")
    (name,) = names
    try:
        found = solve_map({key: run.decoded[name] for key, run in runs.items()}, shape)
    except MapError as error:
        raise refuse(pipe, "VAE", f"what {name} decodes of the latents: {error}") from None
    if not found.covers or found.keeps_own:
        taken = int((found.index >= 0).sum())
        own = f", and {len(found.index) - taken} others" if found.keeps_own else ""
        raise refuse(pipe, "VAE", f"{name} decodes {taken} of {found.source.numel()} elements of the latents{own}")
    return name, found


def confirm(pipe: Any, observation: Observation, calls: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None) -> float:
    """Compare what was observed with real runs of two steps on random latents, with two different conditions.

    The denoiser runs three times for each condition: beside the real steps once more for runs with random values in its place.

    Args:
        pipe: The pipeline.
        observation: What was observed.
        calls: The arguments of the two runs; None are those of the observation with two prompts.

    Returns:
        The largest difference, over the largest value there.

    Raises:
        SpecError: It differs; the text says where.
    """
    if calls is None:
        calls = tuple({**observation.call, **({"prompt": prompt} if "prompt" in observation.call else {})}
                      for prompt in PROMPTS)  # type: ignore[assignment]  # fmt: skip
        assert calls is not None
    worst = 0.0
    for seed, call in enumerate(calls):
        # another number of steps than what was observed: a time may count them
        run = call_pipeline(pipe, call, steps=observation.steps + 1 + seed if observation.others else 3, seed=seed + 1)
        worst = max(worst, _compare_run(pipe, observation, run))
        _check_alone(pipe, observation, run)
        # the same on random values, in float32: those of a few steps may be large all of them, or rounded
        code = functools.partial(_random_like, torch.Generator().manual_seed(seed))
        names = frozenset({observation.part, *observation.others})
        changed: dict[str, Any] = {"latents": code, "outputs": code, "denoisers": names, "results": {}}
        coded = call_pipeline(pipe, call, steps=observation.steps, seed=seed + 1, **changed)
        worst = max(worst, _compare_run(pipe, observation, coded))
    return worst


def _check_alone(pipe: Any, observation: Observation, run: PipelineRun) -> None:
    """Raise SpecError where latents are not predicted without others in a real run."""
    part, noisy, apart = observation.part, observation.noisy, observation.beside
    steps = [_end_at(pipe, step, part) for step in run.steps] if apart else []
    calls = [step.calls[-1][1] for step in steps if step.calls and step.calls[-1][0] == part]
    for given in calls[-1:]:
        if not is_predicted_alone(pipe, part, {**given, **observation.settings}, noisy, apart, observation.to_output):
            raise refuse(pipe, "latents", f"what {part} predicts for {noisy} depends on {', '.join(apart)}, in a real step")


def _random_like(draw: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=draw).to(like)


def _compare_run(pipe: Any, observation: Observation, run: PipelineRun) -> float:
    """Return the largest difference between a run and what was observed. Raises SpecError where it differs."""
    worst = 0.0
    if run.changed:
        raise refuse(pipe, "latents", CHANGED)
    own = [_end_at(pipe, step, observation.part) for step in run.steps if step.place == observation.place]
    taken = [step for step in own if step.calls and step.calls[-1][0] == observation.part]
    known = {observation.noisy, observation.time, *observation.also, *observation.beside}
    condition = taken[0].calls[-1][1] if taken else {}  # that of the first call is what training takes
    for step in taken:
        _, given, output = step.calls[-1]
        if changing := [n for n in _list_changed(condition, given) if n not in known]:
            raise refuse(pipe, "condition", f"{', '.join(changing)} of {observation.part} change from step to step")
        count, seen = flatten_tensors(given[observation.noisy]).numel(), observation.to_input.index.numel()
        if count != seen:
            why = f"{observation.noisy} of {observation.part} has {seen} elements in some steps, and {count} in another"
            raise refuse(pipe, "input", why)
        time = observation.model_time(torch.as_tensor(step.time).double().flatten()[0])
        mapped = observation.to_output(flatten_tensors(output))
        # latents that a pipeline adds to a prediction, for guidance, and takes away again round it
        worst = max(worst, _measure_difference(pipe, "output", mapped, step.prediction, beside=step.sample))
        mapped = observation.to_input(step.sample, condition[observation.noisy])
        worst = max(worst, _measure_difference(pipe, "input", mapped, given[observation.noisy]))
        ends = torch.stack([time - observation.offset, torch.as_tensor(observation.offset).double()])  # whose sum rounds
        for name in (observation.time, *observation.also):
            leaves = pytree.tree_leaves(given[name])
            told = torch.as_tensor(next(leaf for leaf in leaves if isinstance(leaf, (Tensor, float, int))))
            worst = max(worst, _measure_difference(pipe, "time", time.expand(told.numel()), told.flatten(), beside=ends))
    if own and observation.vae in run.decoded:
        mapped = observation.to_decoder(run.finals[observation.place])
        worst = max(worst, _measure_difference(pipe, "VAE", mapped, run.decoded[observation.vae]))
    return worst


def _measure_difference(pipe: Any, what: str, mapped: Any, real: Any, beside: Tensor | None = None) -> float:
    one, two = flatten_tensors(mapped).double(), flatten_tensors(real).double()
    if one.shape != two.shape:
        raise refuse(pipe, what, f"a real step has {two.numel()} elements where {one.numel()} were observed")
    dtypes = {leaf.dtype for leaf in pytree.tree_leaves([mapped, real]) if isinstance(leaf, Tensor)}
    largest = max(float(two.abs().max()), 1e-6, 0.0 if beside is None else float(beside.abs().max()))
    off = float((one - two).abs().max()) / largest
    if not off <= max(TOLERANCE.get(dtype, 1e-5) for dtype in dtypes):
        on = "the condition, the number of steps or a rounding" if what == "time" else "the condition, the time or the latents"
        found = f"a real step differs from what was observed by {off:.2g} of the largest value"
        raise refuse(pipe, what, f"{found}: it depends on {on}")
    return off
