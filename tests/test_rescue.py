"""A run that ends with an error keeps what it has learnt: a checkpoint of its last whole step, and the module."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import runs
import small
import torch
import yaml
from runs import run, same, trained
from sweeps import sweep

import fxplug
from fxplug.training.checkpoint import list_checkpoints

SAVE = {"train__save": {"every": 100, "keep": 9}}
AT: dict[str, int] = {}  # the hook that raises, and the step at which it does


class Raises:
    """A plugin that fails in one of its hooks."""

    def __getattribute__(self, name):
        if name not in AT or not name.startswith("on_"):
            return object.__getattribute__(self, name)
        return lambda global_step=0, **kwargs: self.fail() if global_step >= AT[name] else None

    def fail(self):
        raise ZeroDivisionError("mine")

    def on_step_start(self, module, global_step):
        if global_step == AT.get("spoil"):
            module.get_parameter("head.weight").data.fill_(float("inf"))

    def on_backpropagation(self, **kwargs): ...
    def on_step_end(self, **kwargs): ...
    def on_epoch_end(self, **kwargs): ...
    def on_model_save(self, **kwargs): ...
    def on_training_end(self, **kwargs): ...


class Breaks(runs.Digits):
    """Data of which one sample cannot be read once it is asked for the second time."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def __getitem__(self, index):
        self.asked += index == 5
        if self.asked > 1 and "data" in AT:
            raise OSError("gone")
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def nothing_raises():
    yield
    AT.clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return {call: run(tmp_path_factory.mktemp("whole"), **changed(call)) for call in ("runs:Digits", "test_rescue:Breaks")}


def changed(call="runs:Digits", **more):
    return {**SAVE, "train__plugins": ["test_rescue:Raises"], "data__call": call, "data__workers": 0, **more}


@sweep(
    "hook, at, step",
    [
        ("on_step_start", 4, 4),
        ("on_backpropagation", 4, 4),
        ("on_step_end", 4, 5),
        ("on_epoch_end", 0, 6),
        ("on_model_save", 0, 8),
        ("on_training_end", 0, 8),
        ("data", 6, 7),
    ], 2, 6,
)
def test_what_was_learnt_is_kept_and_the_run_goes_on_to_the_bit(tmp_path, whole, hook, at, step):
    AT[hook] = at
    call = "test_rescue:Breaks" if hook == "data" else "runs:Digits"
    with pytest.raises((fxplug.TrainError, OSError)) as caught:
        run(tmp_path, **changed(call))
    AT.clear()
    last = tmp_path / "checkpoints" / f"step-{step:08}"
    text = f"the run ended after step {step}: the training is saved in '{last}' (continue with --resume)"
    notes = [note for note in getattr(caught.value, "__notes__", []) if "ended after" in note]
    assert [note.startswith(text) for note in notes] == [True]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [f"step-{step:08}"]
    module = fxplug.load(tmp_path / "module")
    kept = {name: p for name, p in module.named_parameters() if name.startswith(("lora.", "head."))}
    shutil.rmtree(tmp_path / "module")
    again = run(tmp_path, resume=True, **changed(call))
    assert [one["loss"] for one in again.history] == [one["loss"] for one in whole[call].history]
    assert same(trained(again.module), trained(whole[call].module)) and (tmp_path / "module").is_dir()
    assert step < 8 or all(torch.equal(kept[name], p) for name, p in trained(again.module).items())


def test_a_loss_that_is_not_finite_keeps_the_weights_before_it(tmp_path, whole):
    with pytest.raises(fxplug.TrainError, match="step 6: the loss is nan") as caught:
        run(tmp_path, **changed(data__call={"runs:Digits": {"spoil": 90}}, data__shuffle=False))
    assert "the run ended after step 5: the training is saved in" in caught.value.__notes__[-1]
    values = dict(fxplug.load(tmp_path / "module").named_parameters())
    assert all(bool(p.isfinite().all()) for p in values.values()) and values["head.weight"].count_nonzero()
    assert runs.notes(tmp_path)[-1] == caught.value.__notes__[-1]


def test_weights_that_are_not_finite_are_not_kept(tmp_path):
    AT["spoil"] = 3
    with pytest.raises(fxplug.TrainError, match="the loss is nan") as caught:
        run(tmp_path, **changed(train__save={"every": 1, "keep": 2}))
    (note,) = caught.value.__notes__
    last = list_checkpoints(tmp_path / "checkpoints")[-1]
    assert last.name == "step-00000003" and note.endswith(f"the newest checkpoint is '{last}'")
    assert "and nothing of its training is saved, because its weights are not finite" in note
    assert not (tmp_path / "module").exists()


def test_nothing_is_written_before_the_first_step_and_what_cannot_be_is_told(tmp_path, monkeypatch):
    AT["on_step_start"] = 0
    with pytest.raises(fxplug.TrainError) as caught:
        run(tmp_path / "a", **changed())
    assert not hasattr(caught.value, "__notes__") and not (tmp_path / "a" / "module").exists()
    AT["on_step_start"] = 3

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fxplug.training.checkpoint.save_file", full)
    with pytest.raises(fxplug.TrainError, match="ZeroDivisionError: mine") as caught:
        run(tmp_path / "b", **changed())
    (note,) = caught.value.__notes__
    assert "nothing of its training is saved, because it cannot be written: " in note
    assert note.endswith("there is no checkpoint")


def test_a_module_that_cannot_be_written_does_not_deny_the_checkpoint(tmp_path, whole, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fxplug.training.run_outputs.save", full)
    with pytest.raises(fxplug.TrainError, match="the trained module could not be written, the disk is full") as caught:
        run(tmp_path, **changed())
    last = tmp_path / "checkpoints" / "step-00000008"
    (note,) = caught.value.__notes__
    begin = f"the run ended after step 8: the training is saved in '{last}' (continue with --resume)"
    assert note.startswith(f"{begin}; the module could not be written")
    monkeypatch.undo()
    assert same(trained(run(tmp_path, resume=True, **changed()).module), trained(whole["runs:Digits"].module))


def test_a_scheduler_that_ends_before_the_run_costs_no_step(tmp_path):
    options = {"max_lr": 0.01, "total_steps": 4}
    with pytest.raises(fxplug.SpecError, match="train.scheduler.OneCycleLR: OneCycleLR fails after step 5: ValueError: "):
        run(tmp_path, **changed(train__scheduler={"OneCycleLR": options}))
    assert not tmp_path.joinpath("log.jsonl").exists()
    own = {"torch.optim.lr_scheduler:OneCycleLR": options}  # which is not tried, as anybody's
    with pytest.raises(fxplug.TrainError, match="scheduler OneCycleLR raised after step 5: ValueError: ") as caught:
        run(tmp_path, **changed(train__scheduler=own))
    assert "the run ended after step 5: the training is saved in" in caught.value.__notes__[-1]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000005"]
    assert fxplug.load(tmp_path / "module").get_parameter("head.weight").isfinite().all()


@pytest.mark.slow
@sweep("moment, at", [("Ema.update", 5), ("Ema.applied", 2), ("Stepper.skipped", 9), ("Stepper.skipped", 10)], 2)
def test_a_checkpoint_has_the_weights_of_its_own_step_whenever_a_run_ends(tmp_path, monkeypatch, moment, at):
    from fxplug.training import optimizer_step, param_groups

    averaged = {"train__ema": 0.9, "train__save": {"every": 3, "keep": 9}}
    goal = run(tmp_path / "whole", **changed(**averaged))
    name, _, method = moment.partition(".")
    kind = getattr(param_groups if name == "Ema" else optimizer_step, name)
    real, calls = vars(kind)[method], []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return (real.fget if isinstance(real, property) else real)(self, *args)

    monkeypatch.setattr(kind, method, property(interrupted) if isinstance(real, property) else interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", **changed(**averaged))
    monkeypatch.undo()
    again = run(tmp_path / "a", resume=True, **changed(**averaged))
    assert [one["loss"] for one in again.history] == [one["loss"] for one in goal.history]
    assert same(trained(again.module), trained(goal.module))


class Stops:
    """Sends its own process a signal in the third step; a second one, where it is asked for, interrupts at once."""

    def __init__(self, number, times=1):
        self.number, self.times = number, times

    def on_step_start(self, global_step):
        for _ in range(self.times if global_step == 2 else 0):
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number, times, step", [(signal.SIGINT, 1, 3), (signal.SIGTERM, 1, 3), (signal.SIGINT, 2, 2)])
def test_the_command_says_in_one_sentence_where_a_stopped_run_is(tmp_path, number, times, step):
    plugin = {"test_rescue:Stops": {"number": int(number), "times": times}}
    text = yaml.safe_dump(runs.config(train__plugins=[plugin], train__save={"every": 0}))
    (tmp_path / "a.yaml").write_text(text)
    with runs.sharing():
        ended = small.command("train", tmp_path / "a.yaml", "--out", tmp_path / "out", "--quiet")
    assert ended.exit_code == 128 + number
    last = tmp_path / "out" / "checkpoints" / f"step-{step:08}"
    where = f"'{last}' (continue with --resume) and '{tmp_path / 'out' / 'module'}'"
    assert ended.stderr.splitlines()[-1] == f"stopped after step {step}: the training is saved in {where}"
    assert last.is_dir() and "Traceback" not in ended.stderr
