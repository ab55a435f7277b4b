"""Runs end to end: what they leave, that they go on where they stopped, and what stops them."""

from __future__ import annotations

import copy
import functools
import os
import re
import resource
import signal
from pathlib import Path

import processes
import pytest
import test_denoise_runs
import test_parallel_training
import torch
import yaml
from runs import VIT, Digits, config, logged, notes, plugin, run, same, sharing, trained
from small import net
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core.errors import SpecError
from fxplug.training.checkpoint import list_checkpoints, read


def losses(history):
    return [record["loss"] for record in history]


def message(error, *args, **kwargs):
    with pytest.raises(error) as caught:
        run(*args, **kwargs)
    return str(caught.value)


# --- what a run does and leaves


@pytest.mark.slow
def test_a_run_learns_and_leaves_all_that_it_says(tmp_path):
    done = run(
        tmp_path / "run",
        drawn=True,
        train__epochs=12,
        train__log={"tensorboard": True},
        train__ema=0.9,
        data__test={"call": {"runs:Digits": {"train": False}}},
        verify=True,
    )
    assert [set(r) >= {"step", "epoch", "loss", "lr", "seconds", "grad_norm"} for r in done.history] == [True] * 72
    assert sum(losses(done.history)[-6:]) < 0.6 * sum(losses(done.history)[:6])
    assert done.metrics["acc1"] > 45 and done.metrics["acc5"] > done.metrics["acc1"]
    out = done.out
    assert yaml.safe_load((out / "config.yaml").read_text())["train"]["batch"] == 16
    assert [line["loss"] for line in logged(out) if "lr" in line] == losses(done.history)
    assert (out / "loss.png").stat().st_size > 1000 and list((out / "tensorboard").iterdir())
    again = fxplug.load(out / "module")
    assert same(trained(done.module), {n: p for n, p in again.named_parameters() if n in trained(done.module)})
    images = torch.stack([Digits()[i][0] for i in range(4)])
    with torch.no_grad():
        assert torch.equal(done.module.eval()(images), again.eval()(images))
    averaged = dict(fxplug.load(out / "ema").named_parameters())
    assert not same(trained(done.module), {n: averaged[n] for n in trained(done.module)})
    assert (out / "module" / "lora.safetensors").is_file()


def test_the_base_keeps_every_bit(tmp_path):
    config_ = fxplug.load_config(config(train__trainable=[]))
    base = fxplug.rewrite(config_).module.state_dict()
    done = run(tmp_path, train__trainable=[])
    state = done.module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in base.items() if not name.startswith("lora."))
    assert any(not torch.equal(state[name], value) for name, value in base.items() if name.startswith("lora."))
    assert not any(p.requires_grad for n, p in done.module.named_parameters() if not n.startswith("lora."))


RESNET = {"model": {"timm": "resnet10t", "options": {"num_classes": 10}}, "inputs": {"x": [2, 3, 16, 16]}}


@pytest.mark.slow
def test_batch_norms_of_a_frozen_base_keep_their_statistics(tmp_path):
    changed = {
        **RESNET,
        "passes": [{"lora": {"at": "re:layer.*conv1$", "rank": 2}}],
        "train__trainable": [],
        "train__steps": 2,
    }
    base = fxplug.rewrite(fxplug.load_config(config(**changed))).module.state_dict()
    state = run(tmp_path, **changed).module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in base.items() if not name.startswith("lora."))


@pytest.mark.slow
def test_groups_have_the_rates_of_their_passes(tmp_path):
    passes = [
        {"lora": {"at": "blocks.0.attn.qkv", "lr": 1e-2, "weight_decay": 0.1}},
        {"scale": {"at": "blocks.1", "name": "gate", "train": False}},
        {"lora": {"at": "blocks.1.attn.qkv", "name": "late"}},
    ]
    trainer = run(tmp_path, passes=passes, train__steps=1, train__trainable=["head", "blocks.{-1}.norm?"]).trainer
    groups = {g["name"]: (g["lr"], g["weight_decay"], len(g["params"])) for g in trainer.optimizer.param_groups}
    assert groups == {"lora": (1e-2, 0.1, 2), "late": (3e-3, 0.0, 2), "base": (3e-3, 0.0, 6)}


@sweep(
    "optimizer, scheduler, first, last",
    [
        ("sgd", None, 3e-3, 3e-3),
        ({"AdamW": {"betas": [0.8, 0.9]}}, {"cosine": {"warmup": 2}}, 1.5e-3, None),
        ("torch.optim:RMSprop", {"linear": {"floor": 0.5}}, 3e-3, 3e-3 * (0.5 + 0.5 / 8)),
        ("adagrad", {"CosineAnnealingLR": {"per": "epoch"}}, 3e-3, 3e-3 / 2),
        ("adam", "OneCycleLR", 3e-3 / 25, None),
        ("adam", {"steplr": {"step_size": 4}}, 3e-3, 3e-4),
        ("adam", {"ReduceLROnPlateau": {"patience": 0, "threshold": 10.0}}, 3e-3, None),
    ], 1, 6,
)
def test_any_optimizer_and_scheduler(tmp_path, optimizer, scheduler, first, last):
    done = run(tmp_path, train__optimizer=optimizer, train__scheduler=scheduler, train__steps=8)
    rates = [record["lr"] for record in done.history]
    assert rates[0] == pytest.approx(first) and (last is None or rates[-1] == pytest.approx(last))
    assert scheduler is None or len(set(rates)) > 1


@pytest.mark.slow
def test_accumulated_steps_are_those_of_the_large_batch(tmp_path):
    plain = {"passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 4}}], "data__shuffle": False, "train__optimizer": "sgd"}
    whole = run(tmp_path / "a", **plain, train__batch=16)
    parts = run(tmp_path / "b", **plain, train__batch=4, train__accumulate=4)
    assert losses(whole.history) == pytest.approx(losses(parts.history), rel=1e-5)
    norms = [[record["grad_norm"] for record in done.history] for done in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.slow
def test_bf16_trains_float32_weights(tmp_path):
    done = run(tmp_path, train__precision="bf16", dtype="bfloat16", train__trainable=[], train__steps=6)
    assert losses(done.history)[-1] < losses(done.history)[0]
    kept = read(list_checkpoints(tmp_path / "checkpoints")[-1]).state["weights"]
    assert {p.dtype for p in kept.values()} == {torch.float32}
    assert {p.dtype for p in done.module.parameters()} == {torch.bfloat16}  # and can be called, here and loaded
    image = torch.randn(2, 3, 16, 16, dtype=torch.bfloat16)
    assert torch.equal(done.module(image), fxplug.load(tmp_path / "module").eval()(image))


@pytest.mark.slow
@sweep("how", ["compile", "regions", "inductor", "checkpointing"], "regions", "checkpointing")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks, and hides that
def test_lowered_runs_give_the_same_losses(tmp_path, how, monkeypatch):
    if how in ("compile", "regions"):
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    kind, how = how, {"inductor": "compile", "regions": "compile"}.get(how, how)
    depth = 4 if kind == "regions" else 2
    small = {**VIT, "options": {**VIT["options"], "depth": depth, "embed_dim": 24, "num_heads": 2}}
    plain = {"model": small, "passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 4}}], "train__steps": 3}
    expected = losses(run(tmp_path / "a", **plain).history)
    again = run(tmp_path / "b", **plain, **{f"train__{how}": "regions" if kind == "regions" else True})
    found = losses(again.history)
    assert found == (expected if how == "checkpointing" else pytest.approx(expected, rel=1e-4))
    parts = [type(part).__name__ for part in again.trainer.runner.modules()]
    assert {"compile": "OptimizedModule", "checkpointing": "CheckpointedRegion"}[how] in parts
    assert ("Nested" in parts) == (kind == "regions")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"train__checkpointing": True}, "'compile: regions' and 'checkpointing' cannot be used together"),
        ({"model": {**VIT, "options": {**VIT["options"], "depth": 1}}}, "the model has no repeated regions, .* write 'compile: "
                                                                        "true'"),
        ({"train__compile": "region"}, "must be one of true, false, regions, not 'region' .did you mean 'regions'"),
        ({"train__fuse": "fusd"}, "must be one of true, false, auto, .*did you mean 'fused'"),
    ],
)
def test_regions_that_cannot_be_compiled_by_kinds(tmp_path, changed, text):
    with pytest.raises(SpecError, match=text):
        run(tmp_path, **{"train__compile": "regions", **changed})


def test_the_python_trainer_takes_loaders_and_objects(tmp_path):
    """As in ZhiJian's tutorial: model, loaders, optimizer, scheduler and criterion are the user's own."""
    new = fxplug.rewrite(fxplug.load_config(config())).module
    loader = torch.utils.data.DataLoader(Digits(), batch_size=32, shuffle=True)
    tests = torch.utils.data.DataLoader(Digits(train=False), batch_size=32)
    parameters = [p for n, p in new.named_parameters() if n.startswith(("lora.", "head."))]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4, eta_min=1e-4)
    given = {"optimizer": optimizer, "scheduler": scheduler, "epochs": 4, "trainable": ["head"]}
    trainer = fxplug.Trainer(new, "classify", loader, tests, **given, device="cpu", quiet=True)
    history = trainer.fit()
    assert len(history) == 12 and len({record["lr"] for record in history}) == 4
    assert trainer.test()["acc1"] > 15 and not list(tmp_path.iterdir())


class Mean(fxplug.Task):
    """A task of one's own: the mean of the outputs is to be `value`."""

    def __init__(self, value: float = 3.0) -> None:
        self.value = value

    def loss(self, module, batch, draw):
        mean = module(batch["image"]).mean()
        return (mean - self.value) ** 2, {"mean": mean}


@pytest.mark.slow
def test_a_task_of_ones_own(tmp_path):
    done = run(tmp_path, train__task={"test_trainer:Mean": {"value": 2.0}}, train__steps=30, train__lr=0.01)
    assert abs(done.history[-1]["mean"] - 2) < 0.5


# --- not losing work


@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_bit(tmp_path):
    common = {"train__ema": 0.9, "train__scheduler": "cosine", "train__task": {"classify": {"augment": "none", "mixup": 0.5}}}
    whole = run(tmp_path / "a", **common)
    first = run(tmp_path / "b", **common)  # the same, of which everything after step 3 is lost
    for path in list_checkpoints(tmp_path / "b" / "checkpoints")[1:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    again = run(tmp_path / "b", resume=True, **common)
    assert losses(first.history) == losses(whole.history) == losses(again.history)
    assert same(trained(again.module), trained(whole.module))
    assert all(torch.equal(again.trainer.ema.average[n], v) for n, v in whole.trainer.ema.average.items())
    assert [line["step"] for line in logged(tmp_path / "b") if "lr" in line] == list(range(1, 9))


@pytest.mark.slow
def test_trained_batch_norms_are_resumed_with_their_statistics(tmp_path):
    changed = {**RESNET, "passes": [], "train__trainable": ["**"], "train__ema": 0.5}
    whole = run(tmp_path / "a", **changed, train__steps=2).module.state_dict()
    run(tmp_path / "b", **changed, train__steps=1)
    again = run(tmp_path / "b", resume=True, **changed, train__steps=2).module.state_dict()
    assert [name for name, value in whole.items() if not torch.equal(value, again[name])] == []


def test_a_resume_gives_up_what_came_after(tmp_path):
    run(tmp_path, train__save={"every": 1, "keep": 9}, train__steps=5)
    first = list_checkpoints(tmp_path / "checkpoints")[1]
    run(tmp_path, resume=first, train__save={"every": 9, "keep": 1}, train__steps=4)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000004"]


@pytest.mark.slow
@sweep("scheduler", [None, "OneCycleLR", "CosineAnnealingLR", {"LinearLR": {"total_iters": 6}}], 0, 3)
def test_a_run_can_be_made_longer_under_any_scheduler(tmp_path, scheduler):
    whole = run(tmp_path / "a", train__steps=9, train__scheduler=scheduler)
    run(tmp_path / "b", train__steps=4, train__scheduler=scheduler)
    longer = run(tmp_path / "b", resume=True, train__steps=9, train__scheduler=scheduler)
    rates = [[record["lr"] for record in one.history[4:]] for one in (whole, longer)]
    assert (len(set(rates[0])) > 1) == (scheduler is not None) and rates[1] == pytest.approx(rates[0])
    if scheduler is None:
        assert losses(longer.history) == losses(whole.history) and same(trained(longer.module), trained(whole.module))


def acting(out, hook, act, **changed):
    """A run with a plugin that calls `act` at a hook."""
    acts = plugin("Acts", **{hook: lambda self, global_step, **kwargs: act(global_step)})
    return run(out, train__plugins=[acts], **changed)


def kills(out, hook, at, how):
    acting(out, hook, lambda step: os.kill(os.getpid(), how) if step == at else None)


def killed(tmp_path, hook, at, how=signal.SIGKILL):
    return processes.ended(kills, tmp_path / "run", hook, at, how, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("hook, step, kept", [("on_step_end", 4, [3]), ("on_model_save", 6, [3, 6])])
def test_kill_9_loses_at_most_the_steps_since_the_last_checkpoint(tmp_path, own_rule, hook, step, kept):
    done = killed(tmp_path, hook, step)
    assert done.codes == [-signal.SIGKILL]
    assert [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == kept
    again = run(tmp_path / "run", resume=True)
    whole = run(tmp_path / "whole")
    assert losses(again.history) == losses(whole.history) and same(trained(again.module), trained(whole.module))


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    run(tmp_path, train__steps=3)
    from fxplug.training import checkpoint

    def dies(*args):
        raise SystemExit

    monkeypatch.setattr(checkpoint, "save_file", lambda tensors, path: (Path(path).write_bytes(b"half"), dies()))
    with pytest.raises(SystemExit):
        run(tmp_path, resume=True, train__steps=6)
    monkeypatch.undo()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000003"]
    assert len(run(tmp_path, resume=True, train__steps=6).history) == 6


def test_checkpoints_rotate(tmp_path):
    run(tmp_path, train__save={"every": 1, "keep": 2})
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000007", "step-00000008"]


def fills(out):
    """The disk is full from step 3 to step 6, which is to be saved, and what is told goes on or stops."""

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def act(step):
        if step in (3, 6):
            limit(6000 if step == 3 else resource.RLIM_INFINITY)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for told in ("continue", "stop"):
            done = acting(out / told, "on_step_end", act, train__save={"every": 3, "keep": 9, "on_full_disk": told})
            print(len(done.history))
    finally:
        limit(resource.RLIM_INFINITY)  # what is printed goes into a file too


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """The file system refuses what is larger than a limit, as it does when there is no room."""
    done = processes.ended(fills, tmp_path, folder=tmp_path)
    steps = [[path.name for path in list_checkpoints(tmp_path / told / "checkpoints")] for told in ("continue", "stop")]
    assert steps == [["step-00000003", "step-00000008"], ["step-00000003"]], done.stderr[-2000:]
    assert done.stdout.split() == ["8"] and done.codes == [1]
    assert done.stderr.count("checkpoint of step 6 could not be written, the disk is full") >= 2
    assert "newest checkpoint is" in done.stderr and "the run continues" in done.stderr and "TrainError" in done.stderr


# --- what stops a run


def test_a_nan_names_step_batch_and_region(tmp_path):
    text = message(fxplug.TrainError, tmp_path, data__call={"runs:Digits": {"spoil": 5}}, data__shuffle=False)
    assert "step 1: the loss is nan" in text and "input 'x'" in text and "1 NaN of" in text
    assert "dataset[5]" in text


OWN = {"inputs": {"x": [2, 3, 16, 16]}, "passes": ["lora"], "train__trainable": []}  # of a model of one's own


def overflow():
    """Two layers, the second of which overflows once the first has grown."""
    parts = {"first": nn.Linear(768, 16), "second": nn.Linear(16, 16), "last": nn.Linear(16, 10)}
    deep = lambda self, x: self.second(self.first(x.flatten(1)).double().mul(1e30).pow(8).float())  # noqa: E731
    return net(lambda self, x: self.last(deep(self, x).relu()), **parts)


def test_an_overflow_names_the_first_region_and_keeps_the_weights(tmp_path):
    own = {"model": "test_trainer:overflow", **OWN, "passes": [{"lora": {"at": "first"}}]}
    text = message(fxplug.TrainError, tmp_path, **own)
    assert "step 1: the loss is nan" in text and "the first non-finite values are in" in text and "float returned" in text
    assert len(text.splitlines()) == 4 and "executing" not in text
    assert not (tmp_path / "module").exists()


def sized():
    """Takes the middle of images of one size, and other ones whole."""
    middle = lambda x: x if x.shape[-1] != 24 else x[..., 4:20, 4:20]  # noqa: E731
    return net(lambda self, x: self.lin(middle(x).flatten(1).to(self.lin.weight.dtype)), lin=nn.Linear(768, 10))


@pytest.mark.slow
def test_a_batch_that_does_not_fit_the_graph_names_the_key(tmp_path):
    own = {"model": "test_trainer:sized", **OWN, "inputs": {"x": [2, 3, 24, 24]}}
    text = message(fxplug.TrainError, tmp_path, **own)
    traced = re.escape("  traced: x [2, 3, 24, 24] float32\n  in a batch: image [16, 3, 16, 16] float32, label [16] int64")
    assert re.search(rf"(?s)^the model was traced with inputs that differ from those of the run: .*{traced}", text)
    assert text.endswith("\n  images are [16, 16] and inputs.x is [2, 3, 24, 24]: set the same size in data.size and inputs.x")
    dit = copy.deepcopy(test_parallel_training.CONFIG)
    dit["inputs"]["timestep"] = {"shape": [2], "dtype": "float32"}
    text = message(fxplug.TrainError, tmp_path, **{k: dit[k] for k in ("model", "inputs", "passes", "train")})
    assert "timestep [2] float32" in text and text.endswith("\n  write inputs.timestep.dtype: int64")
    assert not any(tmp_path.iterdir())  # before anything is made


class Captioned(Digits):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"image": image, "caption": str(label)}


@pytest.mark.slow
def test_what_the_first_batch_has_otherwise_is_said_with_its_way_out(tmp_path):
    unet = copy.deepcopy(test_denoise_runs.CONFIG)
    unet["inputs"]["encoder_hidden_states"], unet["model"]["diffusers"]["cross_attention_dim"] = [2, 1, 12], 12
    train = {key: value for key, value in unet["train"].items() if key != "test"}
    own = {"model": unet["model"], "inputs": unet["inputs"], "train": train, "passes": unet["passes"][:1]}
    text = message(fxplug.TrainError, tmp_path / "out", **own, data={"call": "test_trainer:Captioned"})
    assert (
        "has 16 numbers a word and in inputs.encoder_hidden_states 12: set the text encoder that the model was trained"
    ) in text
    assert "  called with: sample [8, 3, 16, 16] float32, timestep [8] int64, encoder_hidden_states [8, 1, 16] float32" in text
    assert not (tmp_path / "out").exists()


class Both(fxplug.Task):
    def loss(self, module, batch, draw):
        return module(batch["image"], text=batch["words"]).square().mean()


@pytest.mark.parametrize(
    "image, words, advice",
    [
        ((3, 5, 5), (6, 8), r"a text in text has 6 words and in inputs.text 4: write inputs.text: \[2, 6, 8\]"),
        ((4, 5, 5), (4, 8), "image has 4 channels and inputs.image 3: use data with that number of channels"),
        ((3, 5, 5), (8,), r"text has 2 dimensions and inputs.text 3: write inputs.text: \[8, 8\]"),
    ],
)
def test_words_channels_and_dimensions_are_named(image, words, advice):
    # text whose number of words is its own, and images of as many channels as the layer has
    forward = lambda self, image, text: self.conv(image).mean((2, 3)) + (text + self.place).mean(1)  # noqa: E731
    model = net(forward, place=nn.Parameter(torch.zeros(1, 4, 8)), conv=nn.Conv2d(3, 8, 1))
    new = fxplug.trace(model, (torch.randn(2, 3, 5, 5), torch.randn(2, 4, 8)))
    data = [{"image": torch.randn(image), "words": torch.randn(words)}] * 8
    with pytest.raises(fxplug.TrainError, match=advice):
        fxplug.Trainer(new, Both(), data, steps=1, batch=8, device="cpu", quiet=True, trainable=["conv"])


def test_a_trainer_says_it_before_it_trains():
    with pytest.raises(fxplug.TrainError, match=r"images are \[24, 24\] and inputs.x is \[1, 3, 16, 16\]: set the same size"):
        python_trainer()[1](data=[(torch.randn(3, 24, 24), 1)] * 8)


def test_nothing_is_read_or_run_twice_for_data_that_is_read_once():
    class Once(torch.utils.data.IterableDataset):
        def __len__(self):
            return 16

        def __iter__(self):
            yield from ((torch.randn(3, 16, 16), n % 10) for n in range(16))

    _, trainer = python_trainer()
    assert len(trainer(data=torch.utils.data.DataLoader(Once(), batch_size=8)).fit()) == 2


class Failing(fxplug.Task):
    """Fails by itself, which no word about the batch hides."""

    def loss(self, module, batch, draw):
        raise ZeroDivisionError("mine")


def test_what_a_task_raises_itself_is_told_as_it_is():
    new, _ = python_trainer()
    made = fxplug.Trainer(new, Failing(), Digits(), steps=1, batch=8, device="cpu", quiet=True, trainable=["head"])
    with pytest.raises(ZeroDivisionError, match="mine"):
        made.fit()


def detached():
    forward = lambda self, x: self.used(x.flatten(1)) + self.unused(x.flatten(1)).detach()  # noqa: E731
    return net(forward, used=nn.Linear(768, 10), unused=nn.Linear(768, 10))


def test_a_block_without_gradient_is_named(tmp_path):
    text = message(fxplug.TrainError, tmp_path, model="test_trainer:detached", **OWN)
    assert text.startswith("no gradient reached lora.unused.Lora.down.weight, lora.unused.Lora.up.weight in the first step")


@pytest.mark.slow
def test_a_checkpoint_of_another_run_says_what_differs(tmp_path):
    run(tmp_path / "a", train__steps=3)
    text = message(
        fxplug.TrainError,
        tmp_path / "b",
        resume=tmp_path / "a",
        passes=[{"lora": {"at": "blocks.*.attn.qkv", "rank": 2, "dropout": 0.1}}],
        train__batch=8,
    )
    assert "is a checkpoint of another run" in text
    assert "passes.lora.rank: 4 then, 2 now" in text and "samples of a step: 16 then, 8 now" in text
    assert text.endswith("\n  and 8 trained weights") and len(text.splitlines()) == 7
    wider = message(fxplug.TrainError, tmp_path / "b", resume=tmp_path / "a", train__trainable=["head", "blocks.*.norm*"])
    assert wider.endswith("trained weights") and len(wider.splitlines()) < 5
    other = message(fxplug.TrainError, tmp_path / "c", resume=tmp_path / "a", model={**VIT, "timm": "vit_small_patch16_224"})
    assert "model.timm: vit_tiny_patch16_224 then, vit_small_patch16_224 now" in other


@sweep(
    "first, then, expected",
    [
        ({}, {"train__lr": 1e-5}, "groups.lora[0]: 0.003 then, 1e-05 now"),
        ({}, {"seed": 1}, "base weights: "),
        ({}, {"dtype": "float64"}, "dtype: None then, float64 now"),
        ({}, {"data__shuffle": False}, "data.shuffle: True then, False now"),
    ], 0,
)
def test_what_else_must_be_the_same(tmp_path, first, then, expected):
    run(tmp_path / "a", train__steps=1, **first)
    then = {"train__steps": 2, **then}
    assert expected in message(fxplug.TrainError, tmp_path / "b", resume=tmp_path / "a", **then)


def python_trainer(**given):
    new = fxplug.rewrite(fxplug.load_config(config())).module
    common = {"steps": 2, "batch": 8, "trainable": ["head"], "device": "cpu", "quiet": True}
    return new, lambda **more: fxplug.Trainer(
        new, {"classify": {"augment": "none"}}, **{"data": Digits(), **common, **given, **more}
    )


def test_tests_are_said_as_in_a_configuration_in_python_too(monkeypatch):
    _, trainer = python_trainer(batch=48, steps=4)
    made, epochs = trainer(test={"every": 1, "data": Digits(train=False, count=16)}), []
    monkeypatch.setattr(made, "test", lambda: epochs.append(made.progress.epoch) or {})
    made.fit()
    assert epochs == [1, 2] and made.settings.test.every == 1
    with pytest.raises(fxplug.SpecError, match="train.test.every: has no effect without test data: set 'test'"):
        trainer(test={"every": 1})
    with pytest.raises(fxplug.SpecError, match=r"train.test: unknown key 'evry' \(did you mean 'every'\?\)"):
        trainer(test={"evry": 1})


def test_an_optimizer_that_lacks_what_trains_is_refused():
    new, trainer = python_trainer()
    optimizer = torch.optim.Adam(new.get_submodule("head").parameters(), 1e-3)
    with pytest.raises(fxplug.TrainError, match="the optimizer does not have 'lora.blocks.0.attn.qkv.Lora.down.weight', which"):
        trainer(optimizer=optimizer)
    with pytest.raises(fxplug.SpecError, match="Closed computes the loss several times per step"):
        trainer(optimizer="test_trainer:Closed")


class Closed(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


def test_names_stand_for_optimizer_and_scheduler_in_python_too():
    _, trainer = python_trainer()
    made = trainer(optimizer="sgd", scheduler={"linear": {"warmup": 1}})
    assert len(made.fit()) == 2 and made.fit() is made.history
    assert type(made.optimizer).__name__ == "SGD" and not made.schedule.by_epoch


class Looks:
    """A plugin that looks at a layer by a hook."""

    seen = 0

    def on_model_load(self, module):
        def look(*args):
            Looks.seen += 1

        module.get_submodule("blocks.0.attn.proj").register_forward_hook(look)


def test_a_hook_that_a_plugin_registers_is_called():
    Looks.seen = 0
    _, trainer = python_trainer(plugins=["test_trainer:Looks"])
    trainer().fit()
    assert Looks.seen == 2


def tied():
    first, head = nn.Linear(768, 10), nn.Linear(768, 10)
    head.weight = first.weight
    return net(lambda self, x: self.first(x.flatten(1)) + self.head(x.flatten(1)), first=first, head=head)


def test_a_tied_parameter_trains_under_either_name(tmp_path):
    own = {"model": "test_trainer:tied", **OWN, "passes": [], "train__trainable": ["head.weight"]}
    done = run(tmp_path, **own, train__steps=1)
    assert list(done.trainer.trained) == ["first.weight"]


def trap():
    """Is not a number in training alone."""

    def forward(self, x):
        y = self.head(self.drop(x.flatten(1)))
        return torch.log(-y.abs()) if self.training else y

    return net(forward, drop=nn.Dropout(0.5), head=nn.Linear(768, 10))


def test_the_diagnosis_is_of_training(tmp_path):
    assert ": log returned" in message(fxplug.TrainError, tmp_path, model="test_trainer:trap", **OWN)


class HalfLost(nn.Module):
    """A LoRA-like block of which one half takes no part."""

    is_block = True

    def __init__(self) -> None:
        super().__init__()
        self.used, self.lost = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, x, y):
        return y * self.used + self.lost.detach()


def test_half_a_block_without_gradient_is_named(tmp_path):
    half = fxplug.Pass("part", rules=[fxplug.Rule(fxplug.Match(path="blocks.0"), use=HalfLost)])
    base = fxplug.rewrite(fxplug.load_config(config(passes=[]))).module
    trainer = fxplug.Trainer(fxplug.apply(base, half), "classify", Digits(), steps=1, device="cpu", quiet=True)
    with pytest.raises(fxplug.TrainError, match=r"no gradient reached part\.blocks\.0\.HalfLost\.lost in the first step"):
        trainer.fit()


def test_best_results_are_those_of_the_task_s_own_metric(tmp_path):
    left = [3.0, 1.0]

    class Falls(Mean):
        def test(self, module, batches):
            list(batches)
            return {"loss": (left.pop(), 1)}

    new, _ = python_trainer()
    trainer = fxplug.Trainer(new, Falls(), Digits(), Digits(), steps=2, batch=96, device="cpu", quiet=True)
    trainer.fit()
    assert trainer.progress.best == {} and trainer.metrics == {"loss": 1.0}


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    run(tmp_path, train__steps=1)
    assert "has a run already: continue it" in message(fxplug.TrainError, tmp_path)


@pytest.mark.parametrize("verb", [fxplug.train, fxplug.rewrite])
def test_a_folder_that_cannot_be_is_told_before_the_model_is_built(tmp_path, verb):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, why in (("file", "file is not a folder"), ("file/out", "file is not a folder"), ("link", "is a broken link")):
        with pytest.raises(fxplug.FxplugError, match=why):
            verb(config(model="test_trainer:never_built"), out=tmp_path / name)
    assert (tmp_path / "file").read_text() == "" and len(list(tmp_path.iterdir())) == 2


def never_built():
    raise AssertionError("the folder comes first")


@pytest.mark.slow
def test_the_batches_that_are_left_make_a_short_step(tmp_path):
    done = run(tmp_path / "a", train__epochs=2, train__accumulate=4)
    assert len(done.history) == 4  # of 4, 2, 4 and 2 batches
    whole = run(tmp_path / "b", train__epochs=2, train__accumulate=9)
    assert len(whole.history) == 2 and whole.trainer.progress.done == 0
    assert "the last step of each epoch takes 6 batches, not 9: an epoch has 6" in notes(tmp_path / "b")


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({"passes": [], "train__trainable": []}, "nothing trains: there is no pass"),
        (
            {"passes": [{"lora": {"train": False}}], "train__trainable": []},
            "nothing trains: lora has train: false; 'trainable' names parameters of the base",
        ),
        ({"train__trainable": ["haed"]}, "train.trainable[0]: 'haed' names no parameter of the base (did you mean 'head'?)"),
        ({"train__optimizer": "adamww"}, "train.optimizer: torch has no optimizer 'adamww' (did you mean 'AdamW'?)"),
        ({"train__optimizer": {"sgd": {"momentun": 0.9}}}, "sgd has no option 'momentun' (did you mean 'momentum'?)"),
        ({"train__scheduler": "cosin"}, "train.scheduler: torch has no scheduler 'cosin' (did you mean 'cosine'?)"),
        ({"train__scheduler": {"cosine": {"warmpu": 3}}}, "cosine has no option 'warmpu' (did you mean 'warmup'?)"),
        ({"train__scheduler": {"StepLR": {}}}, "train.scheduler: StepLR needs the option 'step_size'"),
        ({"train__task": "clasify"}, "train.task: no task 'clasify' (did you mean 'classify'?)"),
        ({"train__task": "nowhere.at_all:Mine"}, "train.task: no module named 'nowhere'"),
        ({"train__optimizer": "nowhere.at_all:Adam"}, "train.optimizer: no module named 'nowhere'"),
        ({"train__batch": 97}, "a batch of 97 is larger than the data: 96 samples"),
        ({"train__precision": "fp16"}, "fp16 needs a GPU"),
        ({"train__shard": True}, "shard needs several processes"),
        ({"train__plugins": ["os.path.Joiner"]}, "train.plugins[0]:"),
        ({"train__task": {"classify": {"preprocess": "vit_tny"}}}, "train.task.classify"),
    ],
)
def test_bad_settings_are_told_before_anything_is_written(tmp_path, changed, expected):
    text = message(fxplug.FxplugError, tmp_path / "run", **changed)
    assert expected in text
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    "changed, text, expected",
    [
        ({"train__optimizer": "adamww"}, "  optimizer: adamww", r"train\.optimizer: torch has no optimizer"),
        ({"train__task": {"classify": {"preprocess": "vit_tny"}}}, "      preprocess: vit_tny", r"train\.task\.classify"),
    ],
)
def test_an_error_about_a_setting_has_the_line_of_the_file(tmp_path, changed, text, expected):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(config(**changed), sort_keys=False))
    line = file.read_text().splitlines().index(text) + 1
    with pytest.raises(fxplug.SpecError, match=rf"c\.yaml:{line}: {expected}"):
        fxplug.train(file, out=tmp_path / "run", quiet=True)


class Scores(Mean):
    """Tests that give what a list says."""

    def __init__(self, losses):
        super().__init__()
        self.losses = list(losses)

    def test(self, module, batches):
        list(batches)
        return {"loss": (self.losses.pop(0), 1)}


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "memory"])
def test_a_run_ends_where_tests_are_no_better_and_leaves_the_best(folder, tmp_path):
    new, _ = python_trainer()
    seen = []
    task = Scores([3.0, 1.0, 2.0, 1.0, 9.0])
    tests = {"every": 1, "patience": 2, "best": True, "data": Digits(count=16)}
    out = tmp_path / "run" if folder else None
    trainer = fxplug.Trainer(new, task, Digits(), tests, out=out, epochs=9, batch=96, lr=0.01, device="cpu", quiet=True)
    test = trainer.test
    trainer.test = lambda: seen.append({n: p.detach().clone() for n, p in trainer.trained.items()}) or test()
    assert len(trainer.fit()) == 4 and len(seen) == 4
    assert trainer.metrics == {"loss": 1.0}  # those of the module, not of the last test
    assert same(trainer.trained, seen[1]) and not same(seen[1], seen[3])
    if folder:
        module = dict(fxplug.load(out / "module").named_parameters())
        assert same({name: module[name] for name in seen[1]}, seen[1])
        assert read(out / "best").step == 2 and list_checkpoints(out / "checkpoints")[-1].name.endswith("4")


@pytest.mark.slow
def test_a_run_goes_on_from_its_best_test_to_the_bit(tmp_path):
    scores = {"train__task": {"test_trainer:Scores": {"losses": [3.0, 1.0, 2.0, 2.0]}}, "train__ema": 0.9}
    tests = {"train__test": {"every": 1, "best": True}, "data__test": {"call": "runs:Digits"}}
    common = {**tests, "train__epochs": 4, "train__batch": 48, "train__scheduler": "cosine"}
    whole = run(tmp_path / "a", **scores, **common)
    assert whole.metrics == {"loss": 1.0} and read(tmp_path / "a" / "best").step == 4
    last = read(list_checkpoints(tmp_path / "a" / "checkpoints")[-1])
    (tmp_path / "a").rename(tmp_path / "b")
    with sharing():  # without a folder of its own it is that of the run
        again = fxplug.train(config(**scores, **common), resume=tmp_path / "b" / "best", quiet=True)
    assert again.out == tmp_path / "b" and sorted(path.name for path in (again.out / "best").iterdir()) == [
        "ema.safetensors", "progress.json", "state.pt", "weights.safetensors",
    ]  # fmt: skip
    assert losses(again.history) == losses(whole.history)
    again_last = read(list_checkpoints(again.out / "checkpoints")[-1])
    assert same(again_last.state["weights"], last.state["weights"]) and again.metrics == whole.metrics


def test_what_would_be_compared_is_needed():
    new, _ = python_trainer()
    for key, value in (("patience", 2), ("best", True)):
        with pytest.raises(fxplug.TrainError, match=f"test.{key} compares tests: set test.every"):
            fxplug.Trainer(new, Mean(), Digits(), {"data": Digits(), key: value}, steps=2, device="cpu")
