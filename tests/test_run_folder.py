"""The folder of a run: its own or empty, one run at a time, and nothing of anybody's is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import yaml
from fuzz_runs import Pictures
from runs import run
from sweeps import sweep
from test_train_state import trainer

import fxplug
from fxplug.training.run_folder import RunFolder
from fxplug.training.train_section import Save


def folder(path, notes=None):
    return RunFolder(path, Save(), (notes if notes is not None else []).append)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@sweep(
    "name",
    ["config.yaml", "log.jsonl", "samples/step-1.png", "best/my.txt", "module/my.txt", "run.jso", ".hidden", "checkpoints/a"],
    3,
)  # fmt: skip
def test_files_of_others_are_refused_and_stay(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    for start in (lambda: run(tmp_path, train__steps=1), lambda: trainer(out=tmp_path, steps=1).fit()):
        with pytest.raises(fxplug.TrainError, match="which no run wrote: give a new or an empty folder"):
            start()
    assert contents(tmp_path) == {name: b"mine"}


def test_a_configuration_that_lies_in_the_folder_stays(tmp_path):
    text = "# my notes\n" + yaml.safe_dump(runs.config(train__steps=1))
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(fxplug.TrainError, match="has config.yaml, which no run wrote"):
        fxplug.train(tmp_path / "config.yaml", out=tmp_path, quiet=True)
    assert contents(tmp_path) == {"config.yaml": text.encode()}


def test_an_older_checkpoint_drops_nothing(tmp_path):
    given = {"save": {"every": 1, "keep": 9}, "out": tmp_path, "log": {"tensorboard": False}}
    trainer(steps=4, **given).fit()
    before = contents(tmp_path / "checkpoints")
    trainer(steps=3, **given).fit(resume=tmp_path / "checkpoints" / "step-00000002")
    (moved,) = (tmp_path / "earlier").iterdir()
    assert sorted(path.name for path in (moved / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    for name, data in contents(moved / "checkpoints").items():
        assert before[name] == data
    dropped = [json.loads(line) for line in (moved / "log.later.jsonl").read_text().splitlines()]
    assert [record["step"] for record in dropped if "loss" in record] == [3, 4]
    assert any(f"moved to '{moved}'" in note for note in runs.notes(tmp_path))
    assert [record["step"] for record in runs.logged(tmp_path) if "loss" in record] == [1, 2, 3]


def test_what_a_run_without_a_checkpoint_left_is_moved_aside(tmp_path):
    first = folder(tmp_path / "run")
    first.open(resumes=False)
    (tmp_path / "run" / "log.jsonl").write_text("{}\n")
    first.close()
    notes: list[str] = []
    second = folder(tmp_path / "run", notes)
    second.open(resumes=False)
    second.close()
    (moved,) = (tmp_path / "run" / "earlier").iterdir()
    assert (moved / "log.jsonl").read_text() == "{}\n" and len(notes) == 1 and "log.jsonl: moved to" in notes[0]


def test_a_second_run_is_told_who_writes_into_the_folder(tmp_path):
    first = folder(tmp_path)
    first.open(resumes=False)
    with pytest.raises(fxplug.TrainError, match=rf"a run that is not over: process {os.getpid()} on \S+, which began at"):
        folder(tmp_path).open(resumes=False)
    first.close()
    second = folder(tmp_path)
    second.open(resumes=False)
    second.close()


HOLDS = """
import sys, time
from pathlib import Path
from fxplug.training.train_section import Save
from fxplug.training.run_folder import RunFolder
one = RunFolder(Path(sys.argv[1]), Save(), print)
one.open(resumes=False)
import os
if os.fork() == 0:  # a worker that outlives the run
    time.sleep(60)
print("open", flush=True)
time.sleep(60)
"""


@pytest.mark.slow  # a program that imports torch
def test_a_run_that_was_killed_is_in_nobody_s_way(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(fxplug.__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(fxplug.TrainError, match=f"process {other.pid} on"):
            folder(tmp_path).open(resumes=False)
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        mine = folder(tmp_path)
        mine.open(resumes=False)
        mine.close()
        os.killpg(other.pid, signal.SIGKILL)


def test_a_folder_that_cannot_be_is_told_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(fxplug.TrainError, match="is not a folder"):
        trainer(out=tmp_path / "file", data=Pictures(8))
    assert (tmp_path / "file").read_text() == "x"
