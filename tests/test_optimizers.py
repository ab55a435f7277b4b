"""Optimizers of other libraries by name: they resume to the bit, and evaluate with the weights that they mean."""

from __future__ import annotations

import pytest
import torch
from test_train_state import Pictures, Worse, kept, made, trainer

import fxplug
from fxplug.core.errors import SpecError
from fxplug.training import optimizers
from fxplug.training.checkpoint import read
from fxplug.training.train_section import Train

OPTIMIZERS = {
    "adamw8bit": {"adamw8bit": {"min_8bit_size": 1}},  # else small tensors have states of 32 bits
    "prodigy": {"prodigy": {"d0": 1e-3}},
    "schedule_free": {"schedule_free": {"warmup_steps": 2}},
    "adafactor": "adafactor",
}
RATES = {"prodigy": {}}  # which has its own


def needed(name):
    """The settings of an optimizer; a test is skipped where its library is not installed."""
    if name in optimizers.LIBRARY_OPTIMIZERS:
        pytest.importorskip(optimizers.LIBRARY_OPTIMIZERS[name].package)
    return {"optimizer": OPTIMIZERS[name], **RATES.get(name, {"lr": 1e-2})}


def weights(run):
    return {name: p.detach().clone() for name, p in run.module.named_parameters()}


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def dtypes(tree):
    """The dtypes of the tensors of an optimizer's state, wherever they are."""
    if isinstance(tree, torch.Tensor):
        return {tree.dtype}
    return set().union(*map(dtypes, tree.values())) if isinstance(tree, dict) else set()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_to_the_bit_and_neither_tests_nor_checkpoints_disturb_it(tmp_path, name):
    given = {**needed(name), "epochs": 4, "batch": 8, "clip": 1.0}
    tests = {"every": 1, "data": Pictures(8)}
    whole = trainer(**given)
    before = weights(whole)
    whole.fit()
    assert not equal(before, weights(whole))
    given |= {"test": tests, "out": tmp_path, "save": {"every": 2, "keep": 9}}
    other = trainer(**given)
    other.fit()
    last = trainer(**given)
    last.fit(resume=kept(tmp_path, 4))
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in other.history] == [r["loss"] for r in last.history]
    assert equal(weights(whole), weights(other)) and equal(weights(whole), weights(last))
    state = read(kept(tmp_path, 4)).state["optimizer"]["state"]
    assert (torch.uint8 in dtypes(state)) == (name == "adamw8bit")


@pytest.mark.parametrize("name", sorted(optimizers.LIBRARY_OPTIMIZERS))
def test_a_missing_library_is_named_with_the_command(name, monkeypatch):
    monkeypatch.setattr(optimizers, "find_spec", lambda package: None)
    package = optimizers.LIBRARY_OPTIMIZERS[name].package
    with pytest.raises(SpecError, match=rf"needs the package '{package}': pip install {package}") as caught:
        trainer(optimizer=name)
    assert caught.value.path == ("train", "optimizer", name)


def test_a_name_that_is_nearly_right_is_said():
    with pytest.raises(SpecError, match="'adamw8bit'"):
        trainer(optimizer="adamw8bits")


# --- what evaluates with other weights than it trains


class Recorded(fxplug.Task):
    """Cross entropy, and the weights at each call."""

    def __init__(self):
        self.trained, self.tested, self.drawn = [], [], []

    def loss(self, module, batch, draw):
        self.trained += [_copy(module)] if any(True for _ in module.parameters()) else []  # else what looks at the call
        return torch.nn.functional.cross_entropy(module(batch["image"]), batch["label"])

    def test(self, module, batches):
        self.tested.append(_copy(module))
        return {"loss": (1.0, len(list(batches)))}

    def samples(self, module, draw):
        self.drawn.append(_copy(module))
        return torch.zeros(1, 3, 4, 4)


def _copy(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def schedule_free(**given):
    pytest.importorskip("schedulefree")
    return trainer(task=Recorded(), optimizer="schedule_free", lr=1e-2, fuse=False, **given)


def test_tests_pictures_and_the_module_have_the_averages_and_steps_do_not(tmp_path):
    """x = y + (1 - 1 / beta1) (z - y), as of schedulefree's `eval`; y are the weights of the steps."""
    done = schedule_free(epochs=2, batch=8, test={"every": 1, "data": Pictures(8)}, log={"samples": 2, "tensorboard": False},
                         save={"every": 3, "keep": 9}, out=tmp_path)  # fmt: skip
    done.fit()
    checkpoint = read(tmp_path / "checkpoints" / "step-00000003")
    y = {name: checkpoint.state["weights"][name] for name in done.task.trained[0]}
    assert equal(y, done.task.trained[-3]), "a checkpoint has the weights that train, and those of the next step are the same"
    z = [checkpoint.state["optimizer"]["state"][n]["z"] for n in range(len(y))]
    x = {name: value.lerp(end, 1 - 1 / 0.9) for (name, value), end in zip(y.items(), z, strict=True)}
    assert equal(x, done.task.tested[0]) and not equal(x, y)
    assert [len(found) for found in (done.task.tested, done.task.trained)] == [2, 6]
    final = done.task.tested[-1]
    assert equal(final, done.task.drawn[-1])
    assert all(torch.equal(final[name], dict(done.module.named_parameters())[name]) for name in final)
    saved = dict(fxplug.load(tmp_path / "module").named_parameters())
    assert all(torch.equal(final[name], saved[name]) for name in final)


def test_what_a_broken_run_leaves_has_the_averages_and_goes_on_to_the_bit(tmp_path):
    whole = schedule_free(steps=6, batch=8, out=tmp_path / "a")
    whole.fit()
    broken = schedule_free(steps=6, batch=8, out=tmp_path / "b")
    loss, calls = broken.task.loss, []

    def breaks(*given):
        calls.append(given)
        if len(calls) == 4:
            raise RuntimeError("it broke")
        return loss(*given)

    broken.task.loss = breaks
    with pytest.raises(RuntimeError, match="it broke"):
        broken.fit()
    three = schedule_free(steps=3, batch=8)
    three.fit()
    saved = dict(fxplug.load(tmp_path / "b" / "module").named_parameters())
    assert all(torch.equal(p, saved[name]) for name, p in three.module.named_parameters())
    broken.task.loss = loss
    broken.fit(resume=tmp_path / "b")
    assert equal(weights(whole), weights(broken))


@pytest.mark.parametrize("folder", [True, False])
def test_the_best_module_has_the_averages_of_its_test(tmp_path, folder):
    pytest.importorskip("schedulefree")
    given = {"optimizer": "schedule_free", "lr": 0.01, "batch": 8, "trainable": ["head"]}
    best = trainer(task=Worse(), epochs=3, test={"every": 1, "best": True, "data": Pictures(8)}, **given,
                   **({"out": tmp_path} if folder else {}))  # fmt: skip
    best.fit()
    first = trainer(task=Worse(), epochs=1, test={"every": 1, "data": Pictures(8)}, **given)
    first.fit()
    assert equal(weights(best), weights(first))


def test_two_averages_are_refused():
    with pytest.raises(SpecError, match="AdamWScheduleFree averages the weights itself") as caught:
        schedule_free(ema=0.9)
    assert caught.value.path == ("train", "ema")


# --- Prodigy's one rate


def test_the_rate_of_prodigy_is_one_unless_it_is_said():
    for use in ("prodigy", "Prodigy", {"prodigy": {"d_coef": 2.0}}):
        assert Train(task="classify", steps=1, optimizer=use).lr == 1.0
    assert Train(task="classify", steps=1, optimizer="prodigy", lr=0.5).lr == 0.5
    assert Train(task="classify", steps=1, optimizer="adamw").lr == 1e-4


def test_several_rates_of_prodigy_are_refused_before_the_run():
    pytest.importorskip("prodigyopt")
    module = fxplug.apply(made(), fxplug.load_pass("lora", at="head", rank=2, name="other", lr=0.5))
    with pytest.raises(SpecError, match="different lr values") as caught:
        trainer(module, optimizer="prodigy")
    assert caught.value.path == ("train", "optimizer", "prodigy")
    trainer(module, optimizer="prodigy", lr=0.5)
