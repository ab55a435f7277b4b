"""What a run is at the end of a step: all that a resumed one needs and nothing else, checked before it is taken."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.capture.isolation import get_random_state
from ..core.errors import TrainError
from ..core.torch_internals.modules import tree_map
from ..core.torch_internals.tensors import version
from .param_groups import Ema, fill, move_like
from .progress import Progress
from .schedule import RateSchedule

State = dict[str, Any]


class TrainState:
    """How far a run is, and what it has learnt.

    `trained` are the parameters that train, by name (sharded ones as DTensors), `buffers` those of the module that runs. A
    checkpoint has the buffers that have changed since the run began. `last_random` is where the generators stood after the
    last whole step.
    """

    def __init__(
        self,
        trained: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        schedule: RateSchedule,
        progress: Progress,
        *,
        ema: Ema | None = None,
        scaler: Any = None,
    ) -> None:
        self.trained, self.buffers = dict(trained), dict(buffers)
        self.optimizer, self.schedule, self.progress, self.ema, self.scaler = optimizer, schedule, progress, ema, scaler
        self.first_buffers = {name: buffer.detach().clone() for name, buffer in self.buffers.items()}
        self._last_buffers = dict(self.first_buffers)
        self._written: set[str] | None = None  # the buffers that steps write; None before the first
        self._versions = {name: version(buffer) for name, buffer in self.buffers.items()}
        self.last_random = get_random_state()

    # --- steps

    def end_step(self) -> None:
        """Record the end of a step, to which `roll_back` returns."""
        self.last_random = get_random_state()
        counted = {name for name, buffer in self.buffers.items() if version(buffer) != self._versions[name]}
        if self._written is None or counted - self._written:  # what norms write is not counted: all are compared then
            changed = {name for name, buffer in self.buffers.items() if not torch.equal(buffer, self._last_buffers[name])}
            self._written = (self._written or set()) | counted | changed
        for name in self._written:
            self._last_buffers[name] = self.buffers[name].detach().clone()
            self._versions[name] = version(self.buffers[name])

    @torch.no_grad()
    def roll_back(self) -> None:
        """Restore buffers, and drop gradients, as at the end of the last complete step; weights have not changed since."""
        fill(self.buffers, self._last_buffers)
        for parameter in self.trained.values():
            parameter.grad = None

    # --- checkpoints

    def state_dict(self) -> State:
        """Return the whole state on the CPU: `weights`, `ema`, `optimizer`, `scheduler`, `scaler` and `progress`.

        Sharded tensors are gathered, so every process calls it.
        """
        changed = {n: b for n, b in self.buffers.items() if not torch.equal(b, self.first_buffers[n])}
        averages = self.ema.average if self.ema else {}
        steps = {"ema_steps": self.ema.steps} if self.ema else {}
        return {
            "weights": _on_cpu({**self.trained, **changed}),
            "ema": _on_cpu(averages),
            "optimizer": tree_map(gather_full, self.optimizer.state_dict()),
            "scheduler": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else {},
            "progress": {**self.progress.state_dict(), **steps},
        }

    def load_state_dict(self, state: State) -> None:
        """Load all of a `state_dict`. Raises TrainError that names the entry, with nothing changed, if one is missing,
        unexpected, of another shape, or out of range."""
        self.check(state)
        progress = dict(state["progress"])
        if self.ema is not None:
            self.ema.steps = progress.pop("ema_steps")
        self.progress.load_state_dict(progress)
        self.load_weights(state)
        self.load_optimizer(state)
        self.schedule.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.end_step()

    def load_optimizer(self, state: State) -> None:
        """Load only the optimizer's part of a `state_dict`."""
        optimizer = copy.deepcopy(state["optimizer"])
        for index, parameter in enumerate(self.trained.values()):
            of = optimizer["state"].get(index, {})
            of.update({key: move_like(value, parameter) for key, value in of.items()})
        self.optimizer.load_state_dict(optimizer)

    def load_weights(self, state: State) -> None:
        """Load only the weights, buffers and averages of a `state_dict`."""
        fill(self.buffers, self.first_buffers)
        fill({**self.buffers, **self.trained}, state["weights"])
        if self.ema is not None:
            fill(self.ema.average, state["ema"])

    def check(self, state: State) -> None:
        """Raise TrainError that names the entry of a `state_dict` that is missing, unexpected, of another shape, or out of
        range."""
        for key in ("weights", "ema", "optimizer", "scheduler", "scaler", "progress"):
            if not isinstance(state.get(key), dict):
                raise TrainError(f"'{key}' is missing")
        _check_tensors("weights", state["weights"], self.trained, {**self.buffers, **self.trained})
        averages = self.ema.average if self.ema else {}
        _check_tensors("ema", state["ema"], averages, averages)
        self.progress.check(state["progress"])
        _check_optimizer(state["optimizer"], self.optimizer.state_dict())
        if missing := self.schedule.state_dict().keys() - state["scheduler"].keys():
            raise TrainError(f"'scheduler' has no entry '{min(missing)}'")


def _check_optimizer(state: State, own: State) -> None:
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
        raise TrainError("'optimizer' lacks 'param_groups' or 'state'")
    if [group.get("params") for group in groups] != [group["params"] for group in own["param_groups"]]:
        raise TrainError("'optimizer' has other groups of parameters than this run")


def _check_tensors(what: str, given: Mapping[str, Any], needed: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
    """Raise TrainError if a needed tensor is missing, or one is unknown or of another shape."""
    for name in needed:
        if name not in given:
            raise TrainError(f"'{what}' has no tensor '{name}', which trains")
    for name, value in given.items():
        if name not in known:
            raise TrainError(f"'{what}' has a tensor '{name}', and the run has none of that name")
        if not isinstance(value, Tensor) or value.shape != known[name].shape:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TrainError(f"'{what}' has '{name}' as {found}, and the run as {list(known[name].shape)}")


def gather_full(value: Any) -> Any:
    """Gather a sharded tensor from all processes; return anything else as it is."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = tree_map(lambda t: gather_full(t).detach().to("cpu", copy=True).contiguous(), dict(tensors))
    return found
