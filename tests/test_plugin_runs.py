"""Plugins in whole training runs: EveryDream2trainer's document, from a configuration to trained weights."""

from __future__ import annotations

import json
import re
import time

import pytest
import runs
from PIL import Image
from sklearn.datasets import load_digits
from test_plugins import DOCUMENT
from torch.utils.data import Dataset

import fxplug
from fxplug.compat.everydream import BasePlugin
from fxplug.compat.everydream.hooks import OFFERED
from fxplug.core.errors import SpecError


class Captioned(Dataset):
    """Real digits as grey images, with captions as EveryDream2trainer's users write them."""

    def __init__(self):
        self.images, self.labels = load_digits(return_X_y=True)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        picture = Image.fromarray((self.images[index].reshape(8, 8) * 15).astype("uint8")).resize((16, 16)).convert("RGB")
        return {"image": picture, "label": int(self.labels[index]), "caption": f"digit {self.labels[index]}, ink, paper"}


class Records:
    """What every hook was called with."""

    calls: list = []  # noqa: RUF012


def _record(name):
    def method(self, **kwargs):
        self.calls.append((name, kwargs))

    return method


for _name in OFFERED:
    if _name.startswith("on_"):
        setattr(Records, _name, _record(_name))


class Slow:
    def on_step_end(self, global_step):
        if global_step == 1:
            time.sleep(0.51)  # longer than a step may take, whatever its share of the run


class Fails:
    def on_step_end(self, **kwargs):
        if kwargs["global_step"] == 4:
            raise RuntimeError("out of ink")


class Misspelt(BasePlugin):
    def on_epoch_strat(self, **kwargs):
        pass


class Empty(BasePlugin):
    pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "my_plugin.py").write_text(DOCUMENT)
    monkeypatch.chdir(tmp_path)
    Records.calls = []
    return tmp_path


def train(folder, *plugins, **changed):
    changed = {"train__epochs": 2, "data__call": "test_plugin_runs:Captioned", "train__plugins": list(plugins), **changed}
    return runs.run(folder / changed.pop("out", "run"), **changed)


def test_the_quick_example_of_the_document(folder, capsys):
    train(folder, "plugins.my_plugin.MyPlugin")
    lines = [f"hello world, this is a plugin at the end of epoch number: {epoch}" for epoch in (0, 1)]
    assert capsys.readouterr().out.splitlines() == lines


def test_every_hook_is_called_with_its_data(folder):
    run = train(folder, "test_plugin_runs:Records", data__test={"call": "test_plugin_runs:Captioned"})
    names = [name for name, _ in Records.calls]
    assert set(names) == {name for name in OFFERED if name.startswith("on_")}
    step = ["on_step_start", "on_backpropagation", "on_step_end"]
    epoch = ["on_epoch_start", *step * 3, "on_epoch_end"]
    assert [name for name in names if name != "on_model_save"] == [
        "on_model_load", "on_training_start", *epoch * 2, "on_training_end",
    ]  # fmt: skip
    for name, kwargs in Records.calls:
        assert kwargs.keys() == set(OFFERED[name])
        assert kwargs["project_name"] == "run" and str(kwargs["log_folder"]) == str(folder / "run")
    of = {name: [kwargs for called, kwargs in Records.calls if called == name] for name in names}
    assert [kwargs["global_step"] for kwargs in of["on_step_start"]] == list(range(6))
    assert [kwargs["global_step"] for kwargs in of["on_step_end"]] == list(range(6))
    assert [kwargs["local_step"] for kwargs in of["on_step_end"]] == [0, 1, 2] * 2
    assert [kwargs["loss"] for kwargs in of["on_step_end"]] == [record["loss"] for record in run.history]
    assert [kwargs["epoch"] for kwargs in of["on_epoch_end"]] == [0, 1] and of["on_epoch_start"][1]["global_step"] == 3
    assert of["on_epoch_end"][1]["metrics"] == run.metrics and "acc1" in run.metrics
    assert of["on_epoch_start"][0]["epoch_length"] == 3
    assert of["on_training_start"][0]["steps"] == 6 and of["on_training_start"][0]["epochs"] == 2
    assert all(kwargs["path"].is_dir() for kwargs in of["on_model_save"][-1:])


def test_a_plugin_that_raises_lets_the_run_go_on_when_told(folder):
    run = train(folder, "test_plugin_runs:Fails", train__on_plugin_error="continue")
    assert len(run.history) == 6
    said = "plugin Fails raised in on_step_end (epoch 1, global_step 4): RuntimeError: out of ink; the run continues"
    assert runs.notes(folder / "run")[0] == said
    assert any(note.startswith("plugin Fails raised 1 times") for note in runs.notes(folder / "run"))


def test_slow_plugins_are_named_at_the_end(folder):
    train(folder, "test_plugin_runs:Slow", "test_plugin_runs:Empty")
    (note,) = runs.notes(folder / "run")
    assert re.match(r"slow plugin: Slow\.on_step_end took [\d.]+ s, [\d.]+% of the run \(6 calls, the longest [\d.]+ s", note)


def test_a_misspelt_hook_is_found_before_training_with_its_line(folder):
    config = runs.config(train__plugins=["test_plugin_runs:Empty", "test_plugin_runs:Misspelt"])
    (folder / "train.json").write_text(json.dumps(config, indent=1))
    with pytest.raises(SpecError) as info:
        fxplug.train(folder / "train.json", out=folder / "run")
    lines = (folder / "train.json").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "Misspelt" in text)
    assert f"train.json:{line}: " in str(info.value)
    assert "no hook is called 'on_epoch_strat' (did you mean 'on_epoch_start'?)" in str(info.value)


def test_empty_plugins_change_nothing(folder):
    none, ten = (train(folder, *["test_plugin_runs:Empty"] * count, out=str(count)).history for count in (0, 10))
    assert [record["loss"] for record in none] == [record["loss"] for record in ten]
