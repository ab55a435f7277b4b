"""The call of a pipeline by which a model of it is traced: its arguments checked, texts and pictures filled in, its size."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..core.errors import SpecError, did_you_mean, quote
from ..core.ir.containers import list_leaves, map_leaves
from .opening import call_parameters, is_modular, quote_error, silence_libraries
from .pipeline_errors import catch_pipeline_errors, describe_lacking_texts, explain_lacking_parts, is_own_error
from .step_inputs import StepInputs
from .tracing import record_first_calls

PROMPT = "a photo"  # where a call says nothing
SIDES = ("height", "width")
COUNTS = (*SIDES, "num_frames", "num_inference_steps")  # of which 0 would be the pipeline's default
PICTURES = ("image", "control_image", "mask_image", "init_image")  # grey, where a pipeline does not run without
GUIDANCE = ("guidance_scale", "true_cfg_scale")
RESULTS = ("images", "videos")  # what modular pipelines call what they draw
LONGER = "{}, in every detail, in front of a large house"  # a text of another length
TEXTS = (1, 2, 3, 4)  # so many at a time, of which one may be longer
STEPS = {"height": (8, 16, 32, 64), "width": (8, 16, 32, 64), "num_frames": (4, 8)}  # to the next larger size
FARTHEST = 256  # so many pixels from a size that cannot be drawn the next one is looked for


@dataclass
class ExampleCall:
    """A pipeline, the `part` of it that is looked at, and the arguments that it is called with.

    `size` is that of pictures, [height, width], where the arguments have none, and `where` its place in a configuration, for
    errors.
    """

    pipe: Any
    part: str
    arguments: dict[str, Any]
    where: tuple[str, ...] = ("model", "call")
    size: tuple[int, int] = (512, 512)
    names: frozenset[str] = field(init=False)
    results: dict[str, Any] = field(default_factory=dict, init=False)  # of the part, by the forms of its calls

    def __post_init__(self) -> None:
        self.names = frozenset(call_parameters(self.pipe))

    def first(self, count: int = 1, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call the pipeline as far as the first call of the part, with each text `count` times, and return the arguments of
        that call. Raises SpecError for a part that is not called, and whatever the pipeline raises."""
        call = self._arguments(count, changes)
        with silence_libraries():
            found = record_first_calls(self.pipe, {self.part: self.pipe.components[self.part]}, (), call, True)
        if self.part not in found:
            finding = f"this call of {type(self.pipe).__name__} does not call '{self.part}'"
            raise SpecError(f"{finding}: give 'call' arguments with which it does, or another 'part'", path=("model", "part"))
        given: tuple[tuple[Any, ...], dict[str, Any]] = found[self.part]
        return given

    def find_input_groups(self) -> dict[str, list[str]] | None:
        """Find which inputs of the part stay the same in two steps of the pipeline, and which say the time, as `StepInputs`.

        The part runs once. None for one that is called in fewer steps.
        """
        return self._two_steps(1).find_groups(self.part)

    def step_calls(self, count: int = 1, **changes: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of the part's calls in a step of the pipeline, one of each form: a step may call it again for
        guidance, with other settings or numbers of samples. The part runs once in each form that it has not run in.

        Raises SpecError for a part that is not called, and what the pipeline raises before that.
        """
        found = list(self._two_steps(count, **changes).forms.get(self.part, {}).values())
        return found or [self.first(count, **changes)]

    def _two_steps(self, count: int, **changes: Any) -> StepInputs:
        """Return what is seen in two steps of the pipeline."""
        latent = {"output_type": "latent"} if "output_type" in self.names else {}
        seen = StepInputs(results=self.results)
        with catch_pipeline_errors(), silence_libraries():  # which its first call did not raise
            call = {**self._arguments(count, changes), **latent}
            record_first_calls(self.pipe, {self.part: self.pipe.components[self.part]}, (), call, True, seen)
        return seen

    def _arguments(self, count: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with each text so many times."""
        call = {name: copy.copy(value) for name, value in {**self.arguments, **changes}.items()}  # some write into lists
        texts = {name: [value] * count for name, value in call.items() if _is_text(name, value) and count > 1}
        return {**call, **texts}

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the part is traced with: of two texts, so that any number of samples fits, where the
        pipeline takes a list of them. Pictures that it does not run without are grey ones, from here on.

        Raises SpecError where the pipeline cannot be called so; what it raised is quoted.
        """
        try:
            self.first()
        except SpecError:
            raise
        except Exception as error:  # the pipeline's, about a call without pictures
            if is_own_error(error):
                raise
            if not self._give_pictures():
                raise self._failed(error) from error
        self.check_size()
        try:
            return self.first(2)
        except Exception as error:  # the pipeline's: two texts may be too many
            if is_own_error(error):
                raise
            return self.first()  # it takes one text alone

    def forms(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield what the part is called with in the forms in which it may be called, each once, by the sizes of its tensors and
        its other values: calls for one text and for two, with guidance and without; for more texts, of the same length or not,
        where samples are in lists; and in the sizes next to the call's own. Where a step has calls of several forms, all of
        them, else the first."""
        guided: list[dict[str, Any]] = [{}]
        for name in self.names.intersection(GUIDANCE):
            negative = {"negative_prompt": ""} if "negative_prompt" in self.names else {}
            guided += [{name: 0.0}, {name: 1.0}, {name: 4.0, **negative}]
        listed = isinstance(self._sizes({}), tuple) and any(isinstance(v, list) for v in self._sizes({})[1].values())
        counts = TEXTS if listed else TEXTS[:2]
        longer = {name: LONGER.format(value) for name, value in self.arguments.items() if _is_text(name, value)}
        seen, several = set(), False
        for count, changes in (
            *((count, changes) for count in counts[:2] for changes in guided), *((count, {}) for count in counts[2:]),
            *((1, {n: [self.arguments[n]] * (count - 1) + [text] for n, text in longer.items()}) for count in counts[1:]),
            *((count, changes) for changes in self._other_sizes() for count in counts[: 1 + listed]),
        ):  # fmt: skip
            with catch_pipeline_errors():  # about a value that it does not take
                looked_at = several or (count == 1 and changes in guided)
                calls = self.step_calls(count, **changes) if looked_at else [self.first(count, **changes)]
                several = several or len(calls) > 1
                for given in calls:
                    form = repr(map_leaves(given, lambda tensor, _: (tuple(tensor.shape), tensor.dtype)))
                    if form not in seen:
                        seen.add(form)
                        yield given

    def _other_sizes(self) -> Iterator[dict[str, int]]:
        """Yield arguments for the sizes next to the call's own, for which Python decides otherwise most often: a side is that
        of the example, or is even."""
        larger: dict[int, dict[str, int]] = {0: {}, 1: {}}
        here = self._sizes({})
        for name, steps in STEPS.items():
            own = self.arguments.get(name)
            if isinstance(own, int) and name in self.names:
                # the next one that the pipeline takes, and one with this one's factors of 2, which its model takes, too
                found = (own + n for n in steps if self._sizes({name: own + n}) not in (None, here))
                for n, side in enumerate((next(found, own), own + min(own & -own, steps[-1]))):
                    larger[n][name] = side
        for changes in larger.values():
            yield from ({name: side} for name, side in changes.items())
            yield changes

    def check_size(self) -> None:
        """Raise SpecError for a height or a width that the pipeline would round to another one, which it draws.

        A side is its own where one pixel less is another call of the part, or none. Where it is the same call, the picture is
        drawn in two steps, and measured: some pipelines draw another size and bring it to that which is asked for.
        """
        for name in SIDES:
            side = self.arguments.get(name)
            if not isinstance(side, int) or side < 2 or self._sizes({name: side - 1}) != self._sizes({}):
                continue
            drawn = self._drawn(name)
            if drawn != side:
                finding = f"{type(self.pipe).__name__} makes {drawn} of {name} {side}"
                more = next((n for n in range(1, FARTHEST) if self._sizes({name: side + n}) != self._sizes({})), 0)
                hint = f"a multiple of {side + more - drawn}, such as {drawn} or {side + more}" if more else f"such as {drawn}"
                raise SpecError(f"{finding}: give {hint}", path=self.where)

    def _give_pictures(self) -> bool:
        """Give the call grey pictures where that is what it lacks."""
        from PIL import Image

        height, width = (int(self.arguments.get(name) or side) for name, side in zip(SIDES, self.size, strict=True))
        free = [name for name in PICTURES if name in self.names and name not in self.arguments]
        for names in dict.fromkeys([(name,) for name in free] + [tuple(free)]) if free else ():
            given: dict[str, Any] = {name: Image.new("RGB", (width, height), "grey") for name in names}
            with catch_pipeline_errors():  # it was something else that it lacks
                self.first(**given)
                self.arguments.update(given)
                return True
        return False

    def _failed(self, error: Exception) -> SpecError:
        """Return the error for a call that the pipeline refuses: with the argument that it is, and the sizes that it takes."""
        if lacking := explain_lacking_parts(self.pipe, error):
            return lacking
        kind = type(self.pipe).__name__
        said = ", ".join(f"{name}={quote(value, 40)}" for name, value in self.arguments.items())
        finding = f"{kind} cannot be called with {said}: {quote_error(error)}{describe_lacking_texts(self.pipe)}"
        sides = [side for name in SIDES if isinstance(side := self.arguments.get(name), int)]
        taken = self._accepted(max(sides)) if sides else []
        if len(taken) == 2 and any(side % (step := taken[1] - taken[0]) for side in sides):
            size = " x ".join(map(str, sides))
            return SpecError(f"{finding}; {size} must be multiples of {step}, such as {taken[0]}", path=self.where)
        for name, value in self.arguments.items():
            rest = {key: other for key, other in self.arguments.items() if key != name}
            if name != "prompt" and replace(self, arguments=rest)._sizes({}) is not None:
                finding = f"{kind} cannot take {quote(value, 40)} as '{name}': {quote_error(error)}"
                return SpecError(finding, path=self.where if name in SIDES else ("model", "call", name))
        return SpecError(finding, path=("model", "call"))

    def _accepted(self, start: int) -> list[int]:
        """Find the next two sides from `start` on of squares that the pipeline takes, and that are two sizes to it."""
        found: list[int] = []
        before: Any = None
        for side in range(start, start + FARTHEST):
            sizes = self._sizes(dict.fromkeys(SIDES, side))
            if sizes is not None and sizes != before:
                found, before = [*found, side], sizes
            if len(found) == 2:
                break
        return found

    def _sizes(self, changes: Mapping[str, Any]) -> Any:
        """Return shapes and numbers of the part's first call; None if the pipeline refuses the call."""
        try:
            return map_leaves(self.first(**changes), lambda tensor, _: tuple(tensor.shape))
        except Exception as error:  # the pipeline's, about sizes
            if is_own_error(error):
                raise
            return None

    def _drawn(self, name: str) -> int:
        """Return the height or width that the pipeline really draws."""
        steps = {"num_inference_steps": 2} if "num_inference_steps" in self.names else {}
        kind = {"output_type": "pt"} if "output_type" in self.names else {}
        with silence_libraries(), torch.no_grad():
            made = self.pipe(**{**self.arguments, **steps, **kind})
        results = [made.get(key) for key in RESULTS] if is_modular(self.pipe) else list(made.values())
        picture = next((leaf for leaf in list_leaves(results) if isinstance(leaf, torch.Tensor)), None)
        if picture is None or picture.dim() < 2:
            return int(self.arguments[name])
        return int(picture.shape[SIDES.index(name) - 2])


def call_arguments(pipe: Any, given: Mapping[str, Any], size: tuple[int, int] | None) -> dict[str, Any]:
    """Check the arguments of a configuration, and complete them: with a text, and a height and a width where `size` says them.

    Raises SpecError for an argument that the pipeline does not take, and for one that it needs and that is not there.
    """
    parameters = call_parameters(pipe)
    for name in given:
        if name not in parameters:
            hint = did_you_mean(name, parameters) or f"; it has {', '.join(parameters)}"
            raise SpecError(f"{type(pipe).__name__} takes no argument '{name}'{hint}", path=("model", "call", name))
        if name in COUNTS and (type(given[name]) is not int or given[name] < 1):
            raise SpecError(f"must be a whole number above 0, not {quote(given[name])}", path=("model", "call", name))
    call = dict(given)
    if "prompt" in parameters and not any("prompt" in name and "negative" not in name for name in call):
        call["prompt"] = PROMPT
    for name, side in zip(SIDES, size, strict=True) if size is not None else ():
        if name in parameters:
            call.setdefault(name, side)
    if lacking := [name for name, needed in parameters.items() if needed and name not in (*call, *PICTURES)]:
        finding = f"{type(pipe).__name__} must be called with '{lacking[0]}'"
        raise SpecError(f"{finding}: give it in 'call'", path=("model", "call"))
    return call


@contextlib.contextmanager
def encode_once(pipe: Any) -> Iterator[None]:
    """Let the pipeline encode each text once inside, where it does so in a method of that name: encoders are large."""
    encode, kept = getattr(pipe, "encode_prompt", None), dict[str, Any]()
    if encode is None or "encode_prompt" in vars(pipe):
        yield
        return

    def encode_once(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, (torch.Tensor, nn.Module)) for leaf in list_leaves((args, kwargs))):
            return encode(*args, **kwargs)
        key = repr((args, kwargs))
        if key not in kept:
            kept[key] = encode(*args, **kwargs)
        return kept[key]

    vars(pipe)["encode_prompt"] = encode_once
    try:
        yield
    finally:
        del vars(pipe)["encode_prompt"]


def _is_text(name: str, value: Any) -> bool:
    return "prompt" in name and isinstance(value, str)
