"""What a run of many adapters is at the end of a step: the state of each, in one checkpoint that is written whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import TrainError
from .adapter_run import AdapterRun
from .checkpoint import Checkpoint
from .random_draws import make_random_state, read_random_state

TENSORS = ("weights", "ema")  # of a state: by name, in files of their own
OTHERS = ("optimizer", "scheduler")


class AdapterStates:
    """The states of adapters that train together, and of how many steps of the whole they are: `rounds`."""

    def __init__(self, runs: Sequence[AdapterRun]) -> None:
        self.runs = list(runs)
        self.rounds = 0
        self.checked = False

    def make_checkpoint(self, described: dict[str, Any], log_length: int) -> Checkpoint:
        """Make a checkpoint of all adapters; names of tensors begin with that of the adapter."""
        state: dict[str, Any] = {key: {} for key in (*TENSORS, *OTHERS, "scaler", "progress")}
        adapters, random = {}, {}
        for one in self.runs:
            one.trainer.progress.log_length = one.trainer.watch.log_length
            own = one.trainer.state.state_dict()
            for key in TENSORS:
                state[key] |= {f"{one.name}/{name}": value for name, value in own[key].items()}
            for key in OTHERS:
                state[key][one.name] = own[key]
            adapters[one.name] = {**own["progress"], "ended": one.ended, "failed": one.failed}
            random[one.name] = make_random_state(one.trainer.state.last_random)
        state["progress"] = {"step": self.rounds, "log_length": log_length, "adapters": adapters}
        return Checkpoint(state, described, [random])

    def load_checkpoint(self, kept: Checkpoint) -> int:
        """Restore all adapters from a checkpoint, and return the length that the log had. The adapters then train in the order
        that they had in it. Raises TrainError, with nothing changed."""
        progress = kept.state["progress"]
        known = progress.get("adapters")
        if not isinstance(known, dict) or known.keys() != {one.name for one in self.runs}:
            raise TrainError("it is not a checkpoint of these adapters")
        states: dict[str, dict[str, Any]] = {}
        for one in self.runs:
            own = {key: value for key, value in known[one.name].items() if key not in ("ended", "failed")}
            state: dict[str, Any] = {"progress": own, "scaler": {}}
            start = f"{one.name}/"
            for key in TENSORS:
                named = kept.state[key].items()
                state[key] = {name.removeprefix(start): value for name, value in named if name.startswith(start)}
            for key in OTHERS:
                state[key] = kept.state[key][one.name]
            try:
                one.trainer.state.check(state)
            except TrainError as error:
                raise TrainError(f"adapter '{one.name}': {error}") from error
            states[one.name] = state
        self.runs.sort(key=lambda one: list(known).index(one.name))
        for one in self.runs:
            own = known[one.name]
            one.ended, one.failed = own["ended"], own["failed"]
            one.trainer.state.load_state_dict(states[one.name])
            one.trainer.take_step.checked = own["step"] > 0
            one.trainer.state.last_random = read_random_state(kept.random[0][one.name])
            if one.trainer.progress.step < one.trainer.steps and not one.failed:
                one.ended = False  # the run was made longer
        self.rounds = int(progress["step"])
        return int(progress["log_length"])
