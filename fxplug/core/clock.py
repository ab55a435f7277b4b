"""Where in a run a call of a denoiser is: which step, and which of several calls at one step."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import SpecError, did_you_mean
from .torch_internals.tensors import version

AT_ONCE = 8  # so many calls at one time are told apart
RELATED = 0.3  # the least correlation of a step's sample with the last step's; of unrelated pictures it is near 0
VARYING = re.compile(r"(?<!encoder_)hidden_states|sample|latent|residual")  # names of inputs that differ from step to step


@dataclass
class _Stream:
    """The calls of a run with one condition: the time and the inputs of the last one."""

    number: int
    time: float = math.nan
    went_on: bool = False  # at that time, with what was kept of an earlier one
    sample: Tensor | None = None
    others: list[tuple[str, Tensor, int]] = field(default_factory=list)  # name, value, and how often it was written
    fixed: list[bool] = field(default_factory=list)  # which of these must stay as they are

    def continues_run(self, sample: Tensor | None, others: list[tuple[str, Tensor, int]]) -> bool:
        """Return whether a call may be this stream's next one: its conditions are the same, and its sample is related to the
        last."""
        if [name for name, *_ in others] != [name for name, *_ in self.others] or not _are_related(self.sample, sample):
            return False
        same = [_is_same(*old[1:], *new[1:]) for old, new in zip(self.others, others, strict=True)]
        return all(equal for equal, fixed in zip(same, self.fixed, strict=True) if fixed)

    def note(self, time: float, sample: Tensor | None, others: list[tuple[str, Tensor, int]]) -> None:
        """Store the values that the next call is compared with. What was equal twice must stay so."""
        if len(self.others) == len(others):
            again = [_is_same(*old[1:], *new[1:]) for old, new in zip(self.others, others, strict=True)]
            self.fixed = [fixed or equal for fixed, equal in zip(self.fixed, again, strict=True)]
        else:
            self.fixed = [not _may_vary(name, value) for name, value, _ in others]
        self.went_on = not math.isnan(self.time)
        self.time, self.others = time, others
        self.sample = None if sample is None else sample.detach().clone()  # a sampler may write into it


class Clock:
    """Reads a run off the inputs of its calls: one of them, such as the timestep, says the time.

    A run begins with the first call, where the time goes back, and where a pipeline of diffusers that calls has begun one: its
    scheduler has another schedule. A run has streams, such as the calls with and without a condition at one time, which are
    told apart by their conditions. A call that goes on with no stream, as its conditions are others or its sample does not
    come from the last one, begins a stream. Where samples are not read, calls with the same conditions at one time begin a
    stream each time, as nothing says which is which. Without a name every call is the next step until somebody says that a run
    begins. Raises SpecError for a name that no input has, and for two such calls after one.
    """

    def __init__(self, name: str | None, names: Sequence[str], samples: bool = True) -> None:
        """Set the clock up. Without `samples` no input that differs from step to step is read, as a deferred one cannot be."""
        if name is not None and name not in names:
            raise SpecError(
                f"the model has no input '{name}', which would tell the step of a call{did_you_mean(name, names)}: give one of "
                f"{', '.join(names)} as clock=, or clock=None and call reset() or new_image() before each run"
            )
        self.name, self.position, self.names = name, -1 if name is None else list(names).index(name), list(names)
        self.samples = samples
        self.is_ambiguous = False  # whether nothing says which earlier call the last one goes on with
        self.reset()

    def reset(self) -> None:
        """Reset the position in a run: the next call of a clock with a name begins one."""
        self.time: float | None = None
        self.direction = 0.0
        self.schedule: Any = None
        self.streams: list[_Stream] = []
        self.begun = 0

    @property
    def numbers(self) -> set[int]:
        """Numbers of the streams that may continue."""
        return {stream.number for stream in self.streams} if self.name is not None else {0}

    @torch.no_grad()
    def tick(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, int]:
        """Return whether a run begins with this call, and the number of its stream, which is a new one if a stream begins."""
        if self.name is None:
            return False, 0
        value = args[self.position] if len(args) > self.position else kwargs.get(self.name)
        if value is None:
            raise SpecError(f"the call has no '{self.name}', which is needed to see where a run begins")
        now = float(value.flatten()[0]) if isinstance(value, Tensor) else float(value)
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tensors = [row for name, each in given.items() if name != self.name for row in _tensors(name, each)]
        at = next((i for i, (_, x, _) in enumerate(tensors) if x.is_floating_point() and x.dim() > 1), None)
        sample = None if at is None else tensors.pop(at)[1]
        if not self.samples:
            sample, tensors = None, [row for row in tensors if not _may_vary(*row[:2])]

        before, self.time, schedule = self.time, now, _schedule()
        moved = 0.0 if before is None or now == before else math.copysign(1.0, now - before)
        back = moved != 0 and self.direction != 0 and moved != self.direction
        crowded = moved == 0 and sum(stream.time == now for stream in self.streams) >= AT_ONCE
        begins = before is None or back or crowded or schedule is not self.schedule
        self.schedule = schedule
        if begins:
            self.streams, self.direction = [], 0.0
        elif moved:
            self.direction = moved
            self.streams = [stream for stream in self.streams if stream.time == before]
        alike = [stream for stream in self.streams if stream.continues_run(sample, tensors)]
        stream = next((stream for stream in alike if stream.time != now), None)
        self.is_ambiguous = not self.samples and len(alike) > 1
        if self.is_ambiguous:
            stream = None  # it begins anew
        if not self.samples and stream is None and any(one.time == now and one.went_on for one in alike):
            raise SpecError(
                f"two calls at {self.name} {now:g} have the same conditions, and there was one such call before: fxplug cannot "
                "tell which of them continues it. Call new_image() or reset() before the first call of each run"
            )
        if stream is None:
            stream, self.begun = _Stream(self.begun), self.begun + 1
            self.streams.append(stream)
        stream.note(now, sample, tensors)
        return begins, stream.number


def _schedule() -> Any:
    """Return the timesteps of the scheduler of the calling pipeline, which are a new tensor in each run; None without a
    pipeline."""
    return getattr(find_scheduler(), "timesteps", None)


def find_scheduler() -> Any:
    """Find the scheduler of the pipeline that calls, if it has timesteps; None without a pipeline."""
    frame = sys._getframe(1)  # nothing plainer: a pipeline tells its models nothing when a run begins
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__call__" and code.co_varnames[:1] == ("self",):
            scheduler = getattr(frame.f_locals["self"], "scheduler", None)
            if getattr(scheduler, "timesteps", None) is not None:
                return scheduler
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the tensors of an input with their names and version counters."""
    if isinstance(value, Tensor):
        yield name, value, -1 if value.is_inference() else version(value)
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _tensors(f"{name}.{key}", member)
    elif isinstance(value, (list, tuple)):
        for i, member in enumerate(value):
            yield from _tensors(f"{name}.{i}", member)


def _may_vary(name: str, value: Tensor) -> bool:
    """Return whether an input is no condition: samples, residuals of a ControlNet and single numbers are not."""
    return value.dim() > 3 or (value.dim() < 2 and value.is_floating_point()) or bool(VARYING.search(name))


def _is_same(old: Tensor, old_writes: int, new: Tensor, writes: int) -> bool:
    if old is new:
        return old_writes == writes
    alike = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    return alike and torch.equal(old, new)


def _are_related(old: Tensor | None, new: Tensor | None) -> bool:
    """Return whether a sample may come from another one: not if it is of another shape, or uncorrelated."""
    if old is None or new is None or (old.shape, old.device) != (new.shape, new.device):
        return old is new
    a, b = old.flatten().float(), new.flatten().float()
    product, norms = torch.stack([a @ b, a.norm() * b.norm()]).tolist()
    return not abs(product) < RELATED * norms  # zeros and NaN tell nothing
