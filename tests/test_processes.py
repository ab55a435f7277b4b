"""Several processes: the same losses as one, and errors that all of them end with."""

from __future__ import annotations

import os
import signal

import pytest
from runs import launched, run, trained

import fxplug
from fxplug.training.checkpoint import list_checkpoints


def pairs(done):
    """Losses and norms of the gradients; the norms show a scale that AdamW does not."""
    return [pytest.approx([record["loss"], record["grad_norm"]], rel=1e-5) for record in done.history]


PLAIN = {"passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 4}}], "train__steps": 6}
CASES = {
    "ddp": {"train__batch": 8, "train__clip": 0.5, "train__save": {"every": 3}},
    "accumulated": {"train__batch": 4, "train__accumulate": 2, "train__task": {"classify": {"augment": "none", "mixup": 0.5}}},
    "sharded": {
        "train__batch": 8,
        "train__shard": True,
        "train__checkpointing": True,
        "train__ema": 0.9,
        "data__test": {"call": {"runs:Digits": {"count": 17}}},  # a batch more in one process than in the other
    },
}


class StopsOne:
    """Rank 1 alone is told to stop. No device is named here: two processes without a GPU work together on the CPU."""

    def on_step_start(self, global_step):
        if global_step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    cases = [(name, {**PLAIN, **changed}, {}) for name, changed in CASES.items()]
    stops = {**PLAIN, "train__plugins": ["test_processes:StopsOne"], "train__batch": 8, "device": None}
    return folder, launched(folder, run, *cases, ("stops", stops, {}), ("differ", PLAIN, {"train__lr": 0.5}))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_losses_of_one(name, answers, tmp_path):
    folder, found_losses = answers
    single = {**CASES[name], "train__batch": 2 * CASES[name]["train__batch"], "train__shard": False}
    whole = run(tmp_path, **PLAIN, **single)
    assert found_losses[0][name] == found_losses[1][name] == pairs(whole)
    again = dict(fxplug.load(folder / name / "module").named_parameters())
    for key, value in trained(whole.module).items():
        assert (again[key] - value).abs().max() < 1e-4


def test_an_interrupt_of_one_process_stops_both(answers):
    """Both stop after the same step, and a checkpoint is there."""
    folder, found_losses = answers
    assert [each["stops"] for each in found_losses] == ["KeyboardInterrupt: stopped after step 4"] * 2
    assert [path.name for path in list_checkpoints(folder / "stops" / "checkpoints")] == ["step-00000003", "step-00000004"]


def test_processes_with_different_configurations_say_what_differs(answers):
    _, found_losses = answers
    for rank, other in ((0, 1), (1, 0)):
        text = f"TrainError: processes {rank} and {other} have different configurations"
        assert found_losses[rank]["differ"].startswith(text)
    assert "train.lr: 0.003 here, 0.5 in process 1" in found_losses[0]["differ"]


@pytest.mark.slow
@pytest.mark.parametrize("shard", [True, False])
def test_a_run_is_resumed_by_one_process_and_the_other_way(shard, tmp_path):
    common = {**PLAIN, "train__ema": 0.9}
    both = {**common, "train__batch": 8, "train__shard": shard}
    whole = run(tmp_path / "one", **{**common, "train__batch": 16})
    launched(tmp_path, run, ("run", {**both, "train__batch": 4, "train__accumulate": 2, "train__steps": 3}, {}))
    run(tmp_path / "run", resume=True, **{**common, "train__batch": 16, "train__steps": 5})
    ended, _ = launched(tmp_path, run, ("end", {**both, "resume": True, "out": "run"}, {}))
    assert ended["end"] == pairs(whole)
    again = dict(fxplug.load(tmp_path / "run" / "module").named_parameters())
    for key, value in trained(whole.module).items():
        assert (again[key] - value).abs().max() < 1e-5
