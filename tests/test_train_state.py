"""What a checkpoint holds of a run: enough to go on as if nothing had happened, and nothing that is not checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fuzz_runs
import pytest
import safetensors.torch as safetensors
import torch
from fuzz_runs import Adapting, Net, Pictures  # noqa: F401  # by its import path, too
from sweeps import sweep
from torch.utils.data import DataLoader

import fxplug
from fxplug.training.checkpoint import Checkpoint, list_checkpoints, read
from fxplug.training.identity import check_same_run
from fxplug.training.random_draws import Drawn, Draws
from fxplug.training.train_section import Data, Train

TASK: dict[str, Any] = {"classify": {"augment": "none"}}


def made(norm: bool = False, **changed: Any) -> fxplug.TracedModule:
    torch.manual_seed(0)
    gm = fxplug.trace(Net(norm), torch.randn(2, 3, 6, 6))
    torch.manual_seed(1)
    return gm if norm else fxplug.apply(gm, fxplug.load_pass("lora", at="body.*", rank=2))


def trainer(module: Any = None, data: Any = None, task: Any = TASK, **given: Any) -> fxplug.Trainer:
    given = {"log": {"tensorboard": False}, "batch": 4, **({} if "epochs" in given else {"steps": 4}), **given}
    module = made() if module is None else module
    return fxplug.Trainer(module, task, Pictures(24) if data is None else data, quiet=True, device="cpu", **given)


def kept(out: Path, step: int) -> Path:
    """The checkpoint of a step, as the newest of a run that was killed after it."""
    for path in list_checkpoints(out / "checkpoints"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return out / "checkpoints" / f"step-{step:08}"


# --- a run made longer


@sweep(
    "scheduler",
    ["cosine", "linear", {"cosine": {"warmup": 3, "floor": 0.1}}, {"linear": {"per": "epoch"}}, "cosineannealinglr",
     "reducelronplateau", {"OneCycleLR": {"max_lr": 0.01}}, {"StepLR": {"step_size": 2}}], 3,
)  # fmt: skip
def test_a_longer_run_has_the_rates_of_one_that_was_always_so_long(tmp_path, scheduler):
    given = {"scheduler": scheduler, "lr": 1e-3, "optimizer": "adam"}
    trainer(out=tmp_path, steps=4, **given).fit()
    longer, whole = trainer(out=tmp_path, steps=9, **given), trainer(steps=9, **given)
    rates = [[record["lr"] for record in one.fit(**how)][4:] for one, how in ((longer, {"resume": tmp_path}), (whole, {}))]
    assert rates[0] == rates[1] and len(rates[0]) == 5


def test_what_an_optimizer_keeps_in_its_groups_stays(tmp_path):
    given = {"scheduler": "cosine", "optimizer": "test_train_state:Adapting"}
    trainer(out=tmp_path, steps=4, **given).fit()
    longer, whole = trainer(out=tmp_path, steps=8, **given), trainer(steps=8, **given)
    longer.fit(resume=tmp_path), whole.fit()
    assert longer.optimizer.param_groups[0]["d"] == whole.optimizer.param_groups[0]["d"] == pytest.approx(1.01**8)


# --- divided otherwise


@sweep("then, now", [((4, 2), (8, 1)), ((8, 1), (4, 2)), ((2, 4), (8, 1)), ((1, 8), (4, 2)), ((4, 2), (1, 8))], 2)
def test_each_sample_of_the_epoch_once_whatever_the_division(tmp_path, then, now):
    seen: list[list[int]] = []

    class Watch:
        def on_step_start(self, batch):
            seen.append(batch["index"].tolist())

    common = {"data": Pictures(32), "out": tmp_path, "epochs": 2, "plugins": [Watch()], "scheduler": "linear"}
    first = trainer(batch=then[0], accumulate=then[1], save={"every": 1, "keep": 99}, **common)
    first.fit()
    kept(tmp_path, 2)
    before = seen[: 2 * then[1]]
    seen.clear()
    again = trainer(batch=now[0], accumulate=now[1], **common)
    again.fit(resume=tmp_path)
    assert sorted(i for b in (*before, *seen[: 2 * now[1]]) for i in b) == list(range(32))
    assert [r["step"] for r in again.history] == list(range(1, 9))
    for one, other in zip(first.history, again.history, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6) and one["lr"] == other["lr"]


def test_what_does_not_divide_is_refused_with_both_numbers(tmp_path):
    trainer(data=Pictures(24), out=tmp_path, batch=2, accumulate=3, epochs=1, save={"every": 1, "keep": 9}).fit()
    start = tmp_path / "checkpoints" / "step-00000001"
    with pytest.raises(fxplug.TrainError, match="samples of a step: 6 then, 8 now"):
        trainer(data=Pictures(24), batch=8, epochs=1).fit(resume=start)
    with pytest.raises(fxplug.TrainError, match="an epoch had 24 samples then, and has 20 now in batches of 5"):
        five = trainer(data=Pictures(24), batch=5, epochs=1)
        five.progress.check({**read(start).state["progress"]})
    with pytest.raises(fxplug.TrainError, match="6 samples of the epoch are done, which is not a multiple of the batch"):
        trainer(data=Pictures(24), batch=4, epochs=1).progress.check({**read(start).state["progress"]})


def test_draws_are_of_samples_and_not_of_how_a_step_is_divided():
    whole = Draws(3, 7)
    expected = [whole.normal(8, 5), whole.uniform(8), whole.integers(10, 8)]
    for micros, world in ((2, 1), (1, 2), (2, 2), (8, 1)):
        rows, drawn = 8 // (micros * world), [Drawn(3, 7) for _ in range(world)]
        parts = [Draws(3, 7, m, micros, rank=r, world=world, drawn=drawn[r]) for m in range(micros) for r in range(world)]
        found = [[d.normal(rows, 5), d.uniform(rows), d.integers(10, rows)] for d in parts]
        assert all(torch.equal(torch.cat(one), other) for one, other in zip(zip(*found, strict=True), expected, strict=True))


def test_samples_of_a_short_batch_weigh_as_the_others():
    data, net = Pictures(10), made()
    given = {"accumulate": 3, "epochs": 1, "lr": 1.0, "optimizer": "sgd", "trainable": ["head"]}
    start = net.get_parameter("head.bias").detach().clone()
    goal = made()
    loss = torch.nn.functional.cross_entropy(goal(data.x), data.y)
    (gradient,) = torch.autograd.grad(loss, goal.get_parameter("head.bias"))
    done = trainer(net, data=DataLoader(data, batch_size=4), **given)
    done.fit()
    torch.testing.assert_close(start - net.get_parameter("head.bias").detach(), gradient, rtol=1e-5, atol=1e-6)
    assert done.history[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)


# --- a step that fails


class Boom:
    def __init__(self, at: int) -> None:
        self.left = at

    def on_backpropagation(self, **given: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("boom")


NORMS: dict[str, Any] = {
    "BatchNorm2d": torch.nn.BatchNorm2d,
    "SyncBatchNorm": torch.nn.SyncBatchNorm,
    "InstanceNorm2d": lambda n: torch.nn.InstanceNorm2d(n, track_running_stats=True),
}


@sweep("norm", [*NORMS], 1)
def test_a_step_that_fails_leaves_the_statistics_of_the_last_whole_one(tmp_path, norm):
    def one():
        torch.manual_seed(0)
        net = Net(True)
        net.norm = NORMS[norm](6)
        return fxplug.trace(net, torch.randn(2, 3, 6, 6))

    given = {"trainable": ["**"], "lr": 1e-2, "steps": 6}
    whole, again = one(), one()
    trainer(whole, **given).fit()
    with pytest.raises(fxplug.TrainError, match="boom"):
        trainer(one(), out=tmp_path, plugins=[Boom(3)], **given).fit()
    trainer(again, out=tmp_path, **given).fit(resume=tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_the_same_trainer_goes_on_after_a_step_that_failed(tmp_path):
    whole, net = made(True), made(True)
    given = {"trainable": ["**"], "lr": 1e-2, "steps": 6}
    trainer(whole, **given).fit()
    done = trainer(net, plugins=[Boom(4)], **given)
    with pytest.raises(fxplug.TrainError, match="boom"):
        done.fit()
    assert done.progress.step == 3 and all(p.grad is None for p in done.trained.values())


def test_statistics_of_a_batch_that_is_nan_are_kept_nowhere(tmp_path):
    data = Pictures(24)
    data.x[5] = float("nan")
    with pytest.raises(fxplug.TrainError, match="the loss is nan"):
        trainer(made(True), data=data, out=tmp_path, trainable=["**"], epochs=3).fit()
    tensors = [*fxplug.load(tmp_path / "module").state_dict().values()]
    for path in list_checkpoints(tmp_path / "checkpoints"):
        tensors += read(path).state["weights"].values()
    assert tensors and all(bool(t.float().isfinite().all()) for t in tensors)


# --- what is no checkpoint of this run


def _tensors(change, file="weights.safetensors"):
    def do(path):
        read = safetensors.load_file(path / file)
        change(read)
        safetensors.save_file(read, path / file)

    return do


def _state(change):
    def do(path):
        state = torch.load(path / "state.pt", weights_only=False)
        change(state["state"])
        torch.save(state, path / "state.pt")

    return do


def _progress(**changed):
    def do(path):
        said = json.loads((path / "progress.json").read_text())
        said["progress"].update(changed)
        (path / "progress.json").write_text(json.dumps(said))

    return do


TAMPERED = {
    "a weight lacks": (_tensors(lambda w: w.pop(min(w))), r"weights\.lora\.body\.0\.Lora\.down\.weight: float32 \[2, 6\]"),
    "a weight is [1]": (_tensors(lambda w: w.update({min(w): torch.ones(1)})), r"float32 \[1\] now"),
    "a weight too many": (_tensors(lambda w: w.update(foo=torch.ones(1))), r"weights\.foo: nothing as it was written"),
    "a weight of another dtype": (_tensors(lambda w: w.update({min(w): w[min(w)].double()})), r"float64 \[2, 6\] now"),
    "averages lack": (lambda path: (path / "ema.safetensors").unlink(), r"ema\.lora"),
    "moments lack": (_state(lambda s: s["optimizer"]["state"].pop(0)), r"optimizer\.state\.0\.exp_avg"),
    "a moment of another shape": (_state(lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.ones(3))), "exp_avg"),
    "the optimizer lacks": (_state(lambda s: s.pop("optimizer")), r"optimizer\.state"),
    "groups lack": (_state(lambda s: s["optimizer"]["param_groups"].pop()), "'optimizer' has other groups of parameters"),
    "the scheduler lacks": (_state(lambda s: s.pop("scheduler")), "'scheduler' is missing"),
    "step is -5": (_progress(step=-5), r"'progress\.step' must be a whole number, 0 or more, not -5"),
    "step is text": (_progress(step="x"), r"'progress\.step' must be a whole number"),
    "epoch is a float": (_progress(epoch=1.5), r"'progress\.epoch' must be a whole number"),
    "the sum of losses is text": (_progress(total="nan"), r"'progress\.total' must be a number, not 'nan'"),
    "the sum of losses is NaN": (_progress(total=float("nan")), "has NaN, which is not JSON"),
    "more steps than the run": (_progress(step=900), "900 steps were taken, and the run ends after [0-9]+: set 'steps' to 900"),
    "done is beyond the epoch": (_progress(done=4096), r"'progress\.done' is 4096, and an epoch has 24 samples"),
    "of an earlier version": (lambda path: _format(path, 1), "is a checkpoint of an earlier version"),
    "no JSON": (lambda path: (path / "progress.json").write_text("{"), "resume from another one"),
}


def _format(path, number):
    said = json.loads((path / "progress.json").read_text())
    (path / "progress.json").write_text(json.dumps({**said, "format": number}))


@pytest.fixture(scope="module")
def run_of_four(tmp_path_factory):
    out = tmp_path_factory.mktemp("four")
    trainer(out=out, ema=0.9, save={"every": 2, "keep": 9}).fit()
    return out


@sweep("name", [*TAMPERED], 5)
def test_a_checkpoint_that_was_changed_is_refused_by_the_entry(run_of_four, tmp_path, name):
    change, expected = TAMPERED[name]
    path = tmp_path / "step-00000002"
    shutil.copytree(run_of_four / "checkpoints" / path.name, path)
    change(path)
    new = made()
    before = {key: value.clone() for key, value in new.state_dict().items()}
    with pytest.raises(fxplug.TrainError, match=expected) as caught:
        trainer(new, ema=0.9).fit(resume=path)
    assert str(path) in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in new.state_dict().items())


def _scaled(module):
    with torch.no_grad():
        for name, p in module.named_parameters():
            if not name.startswith("lora"):
                p.flatten()[4:].mul_(3)


def _moved_by_little(module):
    module.get_parameter("head.bias").data.add_(1e-4)


OTHERS: dict[str, Any] = {
    "all but the first four values": ({}, _scaled, "base weights: "),
    "one bias": ({}, _moved_by_little, "base weights: "),
    "smoothing": ({"task": {"classify": {"augment": "none", "smoothing": 0.9}}}, None, r"task\.classify\.smoothing"),
    "clip": ({"clip": 0.01}, None, r"train\.clip: None then, 0\.01 now"),
    "mode": ({"mode": "eval"}, None, r"train\.mode: train then, eval now"),
    "ema": ({"ema": 0.8}, None, r"train\.ema: 0\.9 then, 0\.8 now"),
    "a sample more": ({"data": Pictures(25)}, None, r"samples\.count: 24 then, 25 now"),
    "a DataLoader": ({"data": DataLoader(Pictures(24), 4)}, None, r"samples\.batches"),
    "seed": ({"seed": 3}, None, r"seed: 0 then, 3 now"),
    "optimizer": ({"optimizer": "sgd"}, None, "optimizer"),
}


@sweep("name", [*OTHERS], 4)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(run_of_four, name):
    given, change, expected = OTHERS[name]
    new = made()
    if change is not None:
        change(new)
    with pytest.raises(fxplug.TrainError, match=expected) as caught:
        trainer(new, **{"ema": 0.9, **given}).fit(resume=run_of_four / "checkpoints" / "step-00000002")
    assert "is a checkpoint of another run" in str(caught.value)


FREE: dict[str, Any] = {
    "longer": {"steps": 9},
    "save": {"save": {"every": 1}},
    "fuse": {"fuse": False},
    "log": {"log": {"tensorboard": True}},
    "plugins": {"plugins": [Boom(99)]},
}


@sweep("name", [*FREE], 2)
def test_what_changes_no_result_may_differ(run_of_four, tmp_path, name):
    done = trainer(**{"ema": 0.9, "out": tmp_path, **FREE[name]})
    done.fit(resume=run_of_four / "checkpoints" / "step-00000002")
    assert done.progress.step == FREE[name].get("steps", 4)


# --- the best test


def test_the_module_is_what_tested_best_with_averages_too(tmp_path):
    tests = {"every": 1, "best": True, "data": Pictures(40)}
    done = trainer(test=tests, out=tmp_path, epochs=3, lr=0.3, ema=0.9, trainable=["head"])
    done.fit()
    for module in (done.module, fxplug.load(tmp_path / "module"), fxplug.load(tmp_path / "ema")):
        loss = torch.nn.functional.cross_entropy(module.eval()(tests["data"].x), tests["data"].y)
        assert loss.item() == pytest.approx(done.metrics["loss"], rel=1e-4)


class Worse(fxplug.Task):
    """Each test is worse than the one before."""

    best = None

    def __init__(self) -> None:
        self.tests = 0

    def loss(self, module, batch, draw):
        return torch.nn.functional.cross_entropy(module(batch["image"]), batch["label"])

    def test(self, module, batches):
        self.tests += 1
        return {"loss": (float(self.tests), 1)}


def test_what_tested_best_goes_along_to_another_folder(tmp_path):
    common = {"test": {"every": 1, "best": True, "data": Pictures(8)}, "lr": 0.01, "trainable": ["head"]}
    trainer(task=Worse(), out=tmp_path / "a", epochs=2, **common).fit()
    best = fxplug.load(tmp_path / "a" / "module").state_dict()["head.weight"]
    done = trainer(task=Worse(), out=tmp_path / "b", epochs=4, **common)
    done.fit(resume=tmp_path / "a")
    assert torch.equal(best, fxplug.load(tmp_path / "b" / "module").state_dict()["head.weight"])
    assert done.metrics == {"loss": 1.0}


def test_a_test_is_in_the_log_once(tmp_path):
    common = {"test": {"every": 1, "data": Pictures(8)}, "epochs": 3, "save": {"every": 6, "keep": 9}, "out": tmp_path}
    trainer(**common).fit()
    kept(tmp_path, 6)
    trainer(**common).fit(resume=tmp_path)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "test" in r] == [6, 12, 18]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 19))


# --- random runs


@pytest.mark.slow
def test_random_runs_go_on_as_if_nothing_had_happened():
    """`make fuzz` has as many as it is given."""
    assert fuzz_runs.fuzz_runs(3, 1000) == []


def test_settings_that_were_added_since_a_checkpoint_count_as_their_defaults(tmp_path):
    run = {"train": Train(task="classify", epochs=1, batch=2).model_dump(), "data": Data(images="a").model_dump(), "seed": 0}
    kept = Checkpoint({}, {**run, **{key: dict(run[key]) for key in ("train", "data")}})
    for section, key in (("train", "assistant"), ("data", "trigger"), ("data", "prior_weight")):
        del kept.run[section][key]
    check_same_run(kept, run, tmp_path)
    run["data"]["trigger"] = "ohwx"
    with pytest.raises(fxplug.TrainError, match=r"data\.trigger: nothing then, ohwx now"):
        check_same_run(kept, run, tmp_path)
