"""EveryDream2trainer's plugins: look-alikes in our own words, and its own where SEEDS names a folder of checkouts."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import runs
import torch
from checkouts import checkout_of
from PIL import Image
from sweeps import sweep

import fxplug
from fxplug.compat.everydream import BasePlugin
from fxplug.compat.everydream.plugins import LoadedPlugins
from fxplug.compat.everydream.state import Optimizers
from fxplug.core.errors import TrainError
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import open_items
from fxplug.training.train_section import Data

THEIRS = checkout_of("doc/PLUGINS.md")
theirs = pytest.mark.skipif(not THEIRS.is_dir(), reason="SEEDS names no folder with a checkout of EveryDream2trainer")
DATA = {"data__call": {"runs:Digits": {"count": 64}}, "passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 4}}]}


def named(plugin):
    """The import path of a class that a test made."""
    if isinstance(plugin, type):
        setattr(sys.modules[__name__], plugin.__name__, plugin)
        return f"{__name__}:{plugin.__name__}"
    return plugin


def train(out, *plugins, **changed):
    """A run of 4 batches an epoch."""
    return runs.run(out, **{"train__epochs": 2, **DATA, "train__plugins": [named(plugin) for plugin in plugins], **changed})


class Records(BasePlugin):
    """What each hook about steps was told."""

    def __init__(self):
        self.steps, self.ends, self.epochs = [], [], []

    def on_step_start(self, epoch, local_step, global_step, batch, ed_state, log_folder, **kwargs):
        assert isinstance(log_folder, str) and ed_state.optimizer is not None and ed_state.unet is kwargs["module"]
        self.steps.append((epoch, local_step, global_step))

    def on_step_end(self, epoch, local_step, global_step, batch, **kwargs):
        self.ends.append((epoch, local_step, global_step))

    def on_epoch_start(self, epoch, epoch_length, global_step, **kwargs):
        self.epochs.append((epoch, epoch_length, global_step))


# what the hooks do


class Masked(BasePlugin):
    """No gradient for the LoRA of the first block."""

    returned = False

    def on_backpropagation(self, module, loss, **kwargs):
        assert not loss.requires_grad
        held = {n: p for n, p in module.named_parameters() if n.startswith("lora.blocks.0") and p.grad is not None}
        assert len(held) > 1 and any(p.grad.any() for p in held.values())
        if self.returned:
            return {name: torch.zeros_like(p) for name, p in held.items()}
        for parameter in held.values():
            parameter.grad.zero_()


class Returned(Masked):
    returned = True


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [Masked, Returned])
def test_a_gradient_that_a_plugin_takes_away_trains_nothing(tmp_path, plugin):
    plain, masked = train(tmp_path / "a"), train(tmp_path / "b", f"test_everydream:{plugin.__name__}")
    changed = [runs.trained(run.module) for run in (plain, masked)]
    ups = [name for name in changed[0] if name.startswith("lora.") and "up" in name]
    assert all(changed[0][name].any() for name in ups)
    assert [name for name in ups if not changed[1][name].any()] == [name for name in ups if ".blocks.0." in name]


WRONG = {
    "a float": (lambda self, **kwargs: 1.0, "TypeError: it returned a float, but must return nothing, or gradients"),
    "a name": (lambda self, **kwargs: {"lroa": None}, "a gradient of 'lroa', which is not a parameter"),
    "a shape": (lambda self, **kwargs: {"head.bias": torch.ones(3)}, r"it returned \[3\] as the gradient of 'head.bias'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_gradient_is_told(tmp_path, case):
    method, text = WRONG[case]
    with pytest.raises(TrainError, match=r"plugin Mine raised in on_backpropagation \(epoch 0, global_step 0\): .*" + text):
        train(tmp_path / "run", type("Mine", (), {"on_backpropagation": method}))


def test_each_batch_is_a_step(tmp_path):
    run = train(tmp_path / "run", "test_everydream:Records", train__accumulate=3, train__save={"every": 1, "keep": 9})
    (seen,) = run.trainer.plugins._plugins.values()
    expected = [(epoch, local, 4 * epoch + local) for epoch in (0, 1) for local in range(4)]
    assert seen.steps == seen.ends == expected and seen.epochs == [(0, 4, 0), (1, 4, 4)]
    assert len(run.history) == 4
    resumed = train(tmp_path / "run", "test_everydream:Records", train__accumulate=3, train__save={"every": 1, "keep": 9},
                    resume=tmp_path / "run" / "checkpoints" / "step-00000001")  # fmt: skip
    (seen,) = resumed.trainer.plugins._plugins.values()
    assert seen.steps == expected[3:] and runs.same(runs.trained(run.module), runs.trained(resumed.module))


class Larger(BasePlugin):
    """A step takes twice the batches from the second epoch on, four times from the third on."""

    def on_epoch_start(self, epoch, arg_update_callback, **kwargs):
        if epoch == 1:
            arg_update_callback("grad_accum", 2)

    def on_epoch_end(self, epoch, arg_update_callback, **kwargs):
        if epoch == 1:
            arg_update_callback("grad_accum", 4)


def test_a_plugin_changes_how_many_batches_a_step_takes(tmp_path):
    run = train(tmp_path / "run", "test_everydream:Larger", train__epochs=3, train__save={"every": 1, "keep": 99})
    assert [record["epoch"] for record in run.history] == [0, 0, 0, 0, 1, 1, 2]
    assert "from epoch 1 on a step takes 2 batches: 2 steps per epoch" in runs.notes(tmp_path / "run")
    resumed = train(tmp_path / "run", "test_everydream:Larger", train__epochs=3, train__save={"every": 1, "keep": 99},
                    resume=tmp_path / "run" / "checkpoints" / "step-00000005")  # fmt: skip
    assert len(resumed.history) == 7 and runs.same(runs.trained(run.module), runs.trained(resumed.module))


@pytest.mark.parametrize("given", [("grad_acum", 2), ("grad_accum", 0), ("grad_accum", 1.5)], ids=str)
def test_what_cannot_be_changed_is_told(tmp_path, given):
    plugin = type("Mine", (), {"on_epoch_start": lambda self, arg_update_callback: arg_update_callback(*given)})
    with pytest.raises(TrainError, match=r"plugin Mine raised in on_epoch_start \(epoch 0, global_step 0\): ValueError: "):
        train(tmp_path / "run", plugin)


def test_a_key_that_a_batch_has_not(tmp_path):
    plugin = type("Mine", (), {"on_step_end": lambda self, batch: batch["loss_scal"]})
    text = r"KeyError: 'loss_scal' \(did you mean 'loss_scale'\?\); the hook .*, and its batch has runt_size, .*loss_scale"
    with pytest.raises(TrainError, match=text):
        train(tmp_path / "run", plugin)


class Freezes(BasePlugin):
    """Freezes what is in the first block, and says in the end what has changed since."""

    seen: ClassVar[dict[str, bool]] = {}

    def freeze(self, ed_state, global_step=2, **kwargs):
        if global_step < 2 or hasattr(self, "before"):
            return
        self.model, self.before = ed_state.unet, {}
        for name, parameter in self.model.named_parameters():
            self.before[name] = parameter.detach().clone()
            if "blocks.0." in name:
                parameter.requires_grad_(False)

    def on_training_end(self, **kwargs):
        self.seen.update((name, torch.equal(p, self.before[name])) for name, p in self.model.named_parameters())


class AtLoad(Freezes):
    def on_model_load(self, ed_state, **kwargs):
        self.freeze(ed_state)


class AtStart(Freezes):
    def on_training_start(self, ed_state, **kwargs):
        self.freeze(ed_state)


class AtStep(Freezes):
    on_step_start = Freezes.freeze


@pytest.mark.parametrize("plugin", [AtLoad, AtStart, AtStep])
@sweep("changed", [{}, {"train__trainable": ["**"]}, {"train__accumulate": 2, "train__ema": 0.9}], 0, ids=str)
def test_what_a_plugin_freezes_stays_as_it_was(tmp_path, plugin, changed):
    Freezes.seen.clear()
    train(tmp_path / "run", plugin, **changed)
    frozen = {name: same for name, same in Freezes.seen.items() if "blocks.0." in name}
    others = {name for name, same in Freezes.seen.items() if name not in frozen and not same}
    assert len(frozen) > 10 and all(frozen.values()), "weight decay and momentum do not move them either"
    assert "lora.blocks.1.attn.qkv.Lora.up.weight" in others
    assert any(name.startswith("blocks.1.") for name in others) == ("train__trainable" in changed)


class Swaps(BasePlugin):
    """Puts other values into the weights at the end, as EveryDream saves afterwards."""

    def on_training_end(self, module, **kwargs):
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(2).add_(1)


ENDS = [{}, {"train__ema": 0.9}, {"train__precision": "bf16", "dtype": "bfloat16"}, {"train__trainable": ["**"]},
        {"data__test": "runs:Digits", "train__test": {"every": 1, "best": True}}, {"train__fuse": False}]  # fmt: skip


@pytest.mark.slow
@sweep("changed", ENDS, 2, ids=str)
def test_what_a_plugin_does_to_the_weights_in_the_end_is_saved(tmp_path, changed):
    plain, run = train(tmp_path / "a", **changed), train(tmp_path / "b", Swaps, **changed)
    before, now = runs.trained(plain.module), runs.trained(run.module)
    saved = dict(fxplug.load(tmp_path / "b" / "module").named_parameters())
    assert before and all(torch.equal(now[name], value * 2 + 1) for name, value in before.items())
    assert all(torch.equal(saved[name], value) for name, value in now.items())


class Sees(torch.nn.Module):
    """A denoiser that is told words."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 1)

    def forward(self, sample, timestep, encoder_hidden_states):
        return self.conv(sample) + encoder_hidden_states.mean(1)[:, :, None, None] + timestep[:, None, None, None] * 0


SAID: list[str] = []


def words(captions):
    SAID.extend(captions)
    return torch.tensor([[[float(len(caption))] * 3] for caption in captions])


def denoising(value, hook="on_training_start", own=None, attribute="conditional_dropout", dropout=0.0):
    """The captions of the 4 samples of the epoch after `hook`, as the text encoder gets them."""
    gm = fxplug.trace(Sees(), (torch.randn(2, 3, 4, 4), torch.tensor([1, 2]), torch.randn(2, 1, 3)))

    def act(self, ed_state, **kwargs):
        setattr(ed_state.train_batch, attribute, value)
        assert ed_state.train_batch.conditional_dropout == value and ed_state.train_batch.steps == 2
        SAID.clear()

    own = {} if own is None else {"cond_dropout": own}
    data = [{"image": torch.rand(3, 4, 4), "caption": f"disc {n}", **own} for n in range(4)]
    task = {"denoise": {"samples": 0, "text": "test_everydream:words", "dropout": dropout}}
    plugin = type("Sets", (), {hook: act})
    fxplug.Trainer(gm, task, data, epochs=2, batch=2, trainable=["**"], plugins=[plugin], quiet=True).fit()
    return SAID[:4]


@pytest.mark.parametrize(
    "value, given, dropped",
    [
        (1.0, {}, 4),
        (1, {"hook": "on_epoch_start"}, 4),
        (0.0, {"dropout": 0.99}, 0),
        (1.0, {"own": 0.0}, 0),
        (0.0, {"own": 1.0}, 4),
        (0.0, {}, 0),
    ],
)
def test_the_share_of_captions_that_is_dropped_is_what_a_plugin_sets(value, given, dropped):
    said = denoising(value, **given)
    assert [text == "" for text in said] == [True] * dropped + [False] * (4 - dropped)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"value": 1.5}, "conditional_dropout must be from 0 to 1, not 1.5"),
        ({"value": "many"}, "conditional_dropout must be from 0 to 1, not 'many'"),
        ({"value": 0.1, "attribute": "conditional_dropot"}, r"conditional_dropot .*did you mean 'conditional_dropout'"),
        ({"value": True, "attribute": "shuffle_tags"}, "train_batch.shuffle_tags cannot be set by a plugin.*section 'data'"),
        ({"value": 3, "attribute": "seed"}, "train_batch.seed cannot be set by a plugin"),
    ],
)  # fmt: skip
def test_what_a_plugin_cannot_set_of_the_data_is_an_error(given, text):
    with pytest.raises(TrainError, match=text):
        denoising(**given)


def test_a_task_that_drops_nothing_says_so(tmp_path):
    def sets(self, ed_state):
        ed_state.train_batch.conditional_dropout = 1

    plugin = type("Mine", (), {"on_training_start": sets})
    with pytest.raises(TrainError, match="conditional_dropout is for the task denoise; Classify drops no captions or labels"):
        train(tmp_path / "run", plugin)


def test_the_image_is_seen_before_its_caption(tmp_path):
    calls = []

    class Order(BasePlugin):
        def transform_caption(self, caption):
            calls.append("caption")
            return f"{caption} after {len(calls)}"

        def transform_pil_image(self, img):
            calls.append("image")
            return img

    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a square")
    spec = Data(images=str(folder), captions="required", size=8)
    batches = Loader(open_items(spec, tmp_path), spec, 1, hooks=LoadedPlugins([Order])).epoch(0)
    captions = [caption for batch in batches for caption in batch["caption"]]
    assert calls == ["image", "caption"] * 3 and captions == [f"a square after {n}" for n in (2, 4, 6)]


# what plugins import

IMPORTS = """
import os, shutil
from colorama import Fore
from plugins.plugins import BasePlugin
from train import EveryDreamTrainingState, save_model
from utils.sample_generator import clean_filename


class Rolling(BasePlugin):
    last = None

    def on_step_end(self, **kwargs):
        state: EveryDreamTrainingState = kwargs["ed_state"]
        assert isinstance(state, EveryDreamTrainingState) and Fore.RED is not None
        path = os.path.join(kwargs["log_folder"], "kept", clean_filename("a/b*1"))
        save_model(path, ed_state=state, global_step=kwargs["global_step"], save_ckpt_dir=None, yaml_name=None)
        self.last = path
"""


def test_what_a_plugin_imports_is_there_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "rolling.py").write_text(IMPORTS)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "utils"]:
        monkeypatch.delitem(sys.modules, name)  # of the run that an earlier test has loaded
    before = {name: sys.modules.get(name) for name in ("train", "utils", "utils.sample_generator", "colorama")}
    run = train(tmp_path / "run", "plugins.rolling.Rolling")
    assert {name: sys.modules.get(name) for name in before} == before
    whole = runs.trained(run.module)
    resumed = train(tmp_path / "run", resume=tmp_path / "run" / "kept" / "ab1")
    assert len(resumed.history) == 8 and runs.same(whole, runs.trained(resumed.module))


def test_modules_beside_those_of_the_trainer_are_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "words.py").write_text("WORD = 'own'")
    (tmp_path / "train.py").write_text("raise ImportError('a trainer of its own')")
    (tmp_path / "plugins" / "a.py").write_text(
        "from train import save_model\nfrom utils.words import WORD\nfrom utils.sample_generator import clean_filename\n"
        "class A:\n    def transform_caption(self, caption):\n        return f'{WORD} {clean_filename(caption)}'\n"
    )
    monkeypatch.chdir(tmp_path)
    assert LoadedPlugins(["plugins.a.A"]).transform_caption("cat!") == "own cat"


# its own


@pytest.fixture
def checkout(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(THEIRS)
    return THEIRS


@theirs
def test_its_example_logs_what_an_epoch_is_told(checkout, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        train(tmp_path / "run", "plugins.example_plugin.ExampleLoggingPlugin")
    said = "\n".join(caplog.messages)
    assert said.count("on_epoch_start") == said.count("on_epoch_end") == 2
    assert "epoch_length: 4" in said and f"log_folder: {tmp_path / 'run'}" in said


@theirs
def test_its_accumulnator_changes_the_steps(checkout, tmp_path):
    plan = json.loads((checkout / "plugins/accumulnator.json").read_text())
    first = plan["begin_epoch"] + 1  # the first epoch whose steps take more than one batch
    run = train(tmp_path / "run", "plugins.accumulnator.Accumulnator", train__epochs=first + 1)
    counts = [sum(record["epoch"] == epoch for record in run.history) for epoch in range(first + 1)]
    assert counts == [4] * first + [1]


@theirs
def test_its_interruptible_keeps_a_rolling_checkpoint(checkout, tmp_path):
    kept = []

    class Looks:
        def on_epoch_start(self, log_folder):
            kept.append(sorted(path.name for path in Path(log_folder, "ckpts").glob("*")))
            if len(kept) == 3:
                shutil.copytree(Path(log_folder, "ckpts", kept[-1][0]), tmp_path / "copy")

    run = train(tmp_path / "run", Looks, "plugins.interruptible.InterruptiblePlugin", train__epochs=3)
    assert kept == [[], ["rolling-run-ep00-gs00003"], ["rolling-run-ep01-gs00007"]]
    assert not list((tmp_path / "run/ckpts").glob("*"))
    resumed = train(tmp_path / "again", train__epochs=3, resume=tmp_path / "copy")
    assert runs.same(runs.trained(run.module), runs.trained(resumed.module))


@theirs
def test_its_first_example(tmp_path, monkeypatch, capsys):
    (tmp_path / "plugins").mkdir()
    document = (THEIRS / "doc/PLUGINS.md").read_text()
    (tmp_path / "plugins/mine.py").write_text(document.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", "plugins.mine.MyPlugin")
    assert [line[-1] for line in capsys.readouterr().out.splitlines() if "end of epoch number" in line] == ["0", "1"]


class Rates(BasePlugin):
    """What EveryDream2trainer's log of rates asks of the optimizer."""

    def on_step_end(self, ed_state, global_step, **kwargs):
        optimizer = ed_state.optimizer
        assert optimizer.get_unet_lr() == optimizer.optimizer_unet.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert optimizer.optimizer_te is None and optimizer.get_textenc_lr() == 0
        RATES.append(optimizer.get_unet_lr())


RATES = []


def test_the_optimizer_has_the_names_that_it_has_there(tmp_path):
    RATES.clear()
    train(tmp_path / "run", Rates, train__lr=1e-3, train__scheduler={"linear": {}})
    assert pytest.approx([1e-3 * (1 - (step + 1) / 8) for step in range(8)]) == RATES, "each is that of the next step"


@pytest.mark.parametrize("at", ["", "any name", "repositories/EveryDream2"])
def test_a_checkout_is_found_by_what_is_in_it(at, tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDS", str(tmp_path))
    assert not checkout_of("doc/PLUGINS.md").exists()
    (tmp_path / at / "doc").mkdir(parents=True)
    (tmp_path / at / "doc/PLUGINS.md").touch()
    assert checkout_of("doc/PLUGINS.md") == tmp_path / at


def test_each_rate_is_that_of_its_own_model():
    unet, text = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = [{"params": [*text.parameters()], "lr": 0.25}, {"params": [*unet.parameters()], "lr": 0.5}]
    both = Optimizers(torch.optim.SGD(groups, lr=1.0), text)
    assert (both.get_unet_lr(), both.get_textenc_lr()) == (0.5, 0.25)
    assert both.optimizer_te is both.optimizer_unet and both.state_dict()["param_groups"][0]["lr"] == 0.25
