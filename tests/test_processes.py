"""Several processes: the same losses as one, and errors that all of them end with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import run, trained

import fxplug
from fxplug.training.checkpoint import found

HERE = Path(__file__).parent
SCRIPT = """
import json, sys
sys.path.insert(0, {here!r})
import torch
torch.set_num_threads(1)
from runs import run, trained
changed = json.loads(sys.argv[1])
rank = int(__import__("os").environ["RANK"])
changed.update(json.loads(sys.argv[2]) if rank else {{}})
try:
    done = run(sys.argv[3], **changed)
except Exception as error:
    print(f"rank {{rank}}: {{type(error).__name__}}: {{error}}", file=sys.stderr)
    sys.exit(3)
if rank == 0:
    json.dump([[record["loss"], record["grad_norm"]] for record in done.history], open(sys.argv[4], "w"))
torch.distributed.destroy_process_group()
"""


def launched(tmp_path, changed, second=None, processes=2):
    """Run in processes under torchrun; gives what is printed, and the losses where the run came to its end."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(HERE)))
    answer = tmp_path / "losses.json"
    answer.unlink(missing_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    args = [str(script), json.dumps(changed), json.dumps(second or {}), str(tmp_path / "run"), str(answer)]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *args], capture_output=True, text=True, cwd=HERE, env=env, timeout=300)
    return done, json.loads(answer.read_text()) if answer.is_file() else None


def pairs(done):
    """Losses and norms of the gradients; the norms show a scale that AdamW does not."""
    return [pytest.approx([record["loss"], record["grad_norm"]], rel=1e-5) for record in done.history]


PLAIN = {"passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 4}}], "train__steps": 6}


@pytest.mark.parametrize(
    "changed",
    [
        {"train__batch": 8, "train__clip": 0.5, "train__save": {"every": 3}},
        pytest.param(
            {"train__batch": 4, "train__accumulate": 2, "train__task": {"classify": {"augment": "none", "mixup": 0.5}}},
            marks=pytest.mark.slow,
        ),
        {
            "train__batch": 8,
            "train__shard": True,
            "train__checkpointing": True,
            "train__ema": 0.9,
            "data__test": {"call": {"runs:Digits": {"count": 17}}},  # a batch more in one process than in the other
        },
    ],
    ids=["ddp", "accumulated", "sharded"],
)
def test_two_processes_give_the_losses_of_one(tmp_path, changed):
    single = {**changed, "train__batch": 2 * changed["train__batch"], "train__shard": False}
    whole = run(tmp_path / "one", **PLAIN, **single)
    done, losses = launched(tmp_path, {**PLAIN, **changed})
    assert losses is not None, done.stderr[-3000:]
    assert losses == pairs(whole)
    again = fxplug.load(tmp_path / "run" / "module")
    for name, value in trained(whole.module).items():
        assert (dict(again.named_parameters())[name] - value).abs().max() < 1e-4


@pytest.mark.slow
def test_a_sharded_run_is_resumed_by_one_process_and_the_other_way(tmp_path):
    common = {**PLAIN, "train__ema": 0.9}
    shard = {**common, "train__batch": 8, "train__shard": True}
    whole = run(tmp_path / "one", **{**common, "train__batch": 16})
    for first in (3, 5):  # sharded to step 3, alone to step 5, sharded to the end
        one = {**common, "train__batch": 16, "train__steps": first}
        if first == 3:
            done, losses = launched(tmp_path, {**shard, "train__steps": first})
        else:
            losses = run(tmp_path / "run", resume=True, **one).history
        assert losses, done.stderr[-3000:]
    done, losses = launched(tmp_path, {**shard, "resume": True})
    assert losses is not None, done.stderr[-3000:]
    assert losses == pairs(whole)


def test_an_interrupt_of_one_process_stops_both(tmp_path):
    """Rank 1 alone is told to stop; rank 0 stops after the same step, and a checkpoint is there."""
    plugin = {"train__plugins": ["test_processes:StopsOne"]}
    done, losses = launched(tmp_path, {**PLAIN, **plugin, "train__batch": 8, "device": None})
    assert losses is None and "KeyboardInterrupt" in done.stderr
    assert [path.name for path in found(tmp_path / "run" / "checkpoints")] == ["step-00000003", "step-00000004"]


class StopsOne:
    def on_step_start(self, global_step):
        if global_step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)


def test_processes_with_different_configurations_say_what_differs(tmp_path):
    done, losses = launched(tmp_path, PLAIN, {"train__lr": 0.5})
    assert losses is None and done.returncode != 0
    for rank, other in ((0, 1), (1, 0)):
        assert f"rank {rank}: TrainError: processes {rank} and {other} have different configurations" in done.stderr
    assert "train.lr: 0.003 here, 0.5 in process 1" in done.stderr
