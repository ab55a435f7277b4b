"""Settings of a training are used as documented, or refused with their place before anything is written."""

from __future__ import annotations

import itertools
import math

import diffusers
import fuzz_settings
import pytest
import runs
import small
import torch
import yaml
from diffusers.training_utils import EMAModel
from runs import Digits
from torch import nn
from torch.utils.data import DataLoader

import fxplug
from fxplug.core.errors import FxplugError, SpecError, TrainError
from fxplug.training import train_section
from fxplug.training.param_groups import Ema, make_scheduler
from fxplug.training.train_section import Train, Use

LORA = {"lora": {"at": "blocks.*.attn.*", "rank": 2}}


def module(dtype=None, passes=(LORA,)):
    return fxplug.rewrite(fxplug.load_config(runs.config(dtype=dtype, passes=list(passes)))).module


def trainer(gm=None, data=None, test=None, task=None, **given):
    common = {"steps": 6, "batch": 8, "device": "cpu", "quiet": True, "log": {"tensorboard": False}, **given}
    if "epochs" in given:
        del common["steps"]
    task = {"classify": {"augment": "none"}} if task is None else task
    return fxplug.Trainer(module() if gm is None else gm, task, Digits() if data is None else data, test, **common)


# --- schedules and optimizers


def rates(options, steps=6, name="cosine", per_epoch=2):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler, _ = make_scheduler(Use(name, options), optimizer, steps, per_epoch)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_warmup_below_one_is_a_share_of_the_steps():
    for share, steps in ((0.1, 20), (0.5, 7), (0.25, 8), (0.99, 10), (0.01, 10)):
        for name in ("constant", "linear", "cosine"):
            assert rates({"warmup": share}, steps, name) == rates({"warmup": round(share * steps)}, steps, name)
    assert rates({"warmup": 0.5, "per": "epoch"}, 8) == rates({"warmup": 2, "per": "epoch"}, 8)  # of four epochs
    assert rates({"warmup": 1.0}) == rates({"warmup": 1})
    assert rates({"warmup": 10**6}, 3) == pytest.approx([1e-6, 2e-6, 3e-6])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_no_rate_is_above_one_or_below_zero(name):
    for warmup, floor in itertools.product((0, 0.1, 0.5, 0.999, 1, 3, 50), (0, 0.3, 1)):
        assert all(0 <= rate <= 1 for rate in rates({"warmup": warmup, "floor": floor}, 12, name))


BAD = [-1, -0.1, math.nan, math.inf, -math.inf, "2", "", None, True, [], {}]


@pytest.mark.parametrize("options", [
    *({"warmup": value} for value in [*BAD, 1.5, 2.0001, 10**400]), *({"floor": value} for value in [*BAD, 1.01, 2]),
    *({"per": value} for value in (0, "", "steps", None, [])), {"warm_up": 1}, {"warmup": 1, "flor": 0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("how", ["file", "python"])
def test_options_of_a_schedule(tmp_path, options, how):
    if how == "python":
        with pytest.raises(SpecError, match="train.scheduler.cosine"):
            trainer(scheduler={"cosine": options})
        return
    if any(isinstance(value, int) and value > 10**100 for value in options.values()):
        return  # which no file may hold
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(runs.config(train__scheduler={"cosine": options}), sort_keys=False))
    with pytest.raises(SpecError, match=r"c\.yaml:\d+: train\.scheduler\.cosine"):
        fxplug.load_config(file)


@pytest.mark.parametrize(("optimizer", "message"), [
    ({"adamw": {"lr": 0.5}}, "optimizer.adamw.lr: has no effect, as each group .* set train.lr"),
    ({"SGD": {"momentum": 0.9, "weight_decay": 0.1}}, "optimizer.SGD.weight_decay: has no effect, .* set train.weight_decay"),
    ({"torch.optim:Adam": {"lr": 0}}, "optimizer.torch.optim:Adam.lr: has no effect"),
    ({"adamw": {"eps": math.nan}}, "optimizer.adamw.eps: must be a finite number, not nan"),
    ({"adamw": {"betas": [0.9, math.inf]}}, r"optimizer.adamw.betas\[1\]: must be a finite number"),
    ({"torch.optim:AdamW": {"eps": math.nan}}, "optimizer.torch.optim:AdamW.eps: must be a finite number"),
    ({"adamw": {"betas": [0.9]}}, "optimizer.adamw: adamw cannot be built: IndexError"),
    ({"adamw": {"betas": []}}, "optimizer.adamw: adamw cannot be built"),
    ({"adamw": {"capturable": True}}, "optimizer.adamw: adamw fails in its first step: AssertionError"),
    ({"adamw": {"params": []}}, "optimizer.adamw: adamw has no option 'params'"),
    ({"SparseAdam": {}}, "optimizer.SparseAdam: SparseAdam fails in its first step: RuntimeError: SparseAdam does not"),
    ("", "optimizer: must be a name"),
    ([], "optimizer: must be a name"),
    (0, "optimizer: must be a name"),
], ids=str)  # fmt: skip
def test_options_of_an_optimizer(optimizer, message):
    with pytest.raises(SpecError, match=f"train.{message}"):
        trainer(optimizer=optimizer)


@pytest.mark.parametrize(("scheduler", "message"), [
    ({"StepLR": {"step_size": 0}}, "scheduler.StepLR: StepLR fails after step 1: ZeroDivisionError"),
    ({"ExponentialLR": {"gamma": -1}}, "scheduler.ExponentialLR: ExponentialLR makes the learning rate -0.0001 after step 1"),
    ({"ExponentialLR": {"gamma": 1e300}}, "scheduler.ExponentialLR: ExponentialLR makes the learning rate inf after step 2"),
    ({"ExponentialLR": {"gamma": math.nan}}, "scheduler.ExponentialLR.gamma: must be a finite number"),
    ({"OneCycleLR": {"total_steps": 3}}, "scheduler.OneCycleLR: OneCycleLR fails after step 4: ValueError"),
    ({"CosineAnnealingLR": {"T_max": 0}}, "scheduler.CosineAnnealingLR: .*ZeroDivisionError"),
    ({"StepLR": {"step_size": 2, "per": "epochs"}}, "scheduler.StepLR.per: must be step or epoch, not 'epochs'"),
], ids=str)  # fmt: skip
def test_options_of_a_scheduler_of_torch(scheduler, message):
    with pytest.raises(SpecError, match=f"train.{message}"):
        trainer(scheduler=scheduler)


@pytest.mark.slow
def test_those_that_work_are_taken():
    for scheduler in ("ReduceLROnPlateau", "OneCycleLR", {"CyclicLR": {"base_lr": 1e-5, "cycle_momentum": False}},
                      {"CosineAnnealingLR": {"eta_min": 1e-6}}, {"StepLR": {"step_size": 2, "per": "epoch"}}):  # fmt: skip
        trainer(scheduler=scheduler)
    trainer(optimizer={"SGD": {"momentum": 0.9}}, scheduler={"CyclicLR": {"base_lr": 1e-5, "max_lr": 1e-3}})


def test_a_scheduler_that_was_made_elsewhere_is_of_the_optimizer():
    gm = module()
    own = torch.optim.AdamW(fxplug.trainable(gm), lr=1e-3)
    decay = torch.optim.lr_scheduler.ExponentialLR(own, 0.1)
    with pytest.raises(TrainError, match="scheduler is of another optimizer, and would have no effect: pass that one too"):
        trainer(gm, scheduler=decay)
    with pytest.raises(TrainError, match="of another optimizer.*make it with the optimizer that is passed"):
        trainer(gm, scheduler=decay, optimizer=torch.optim.AdamW(fxplug.trainable(gm), lr=1e-3))
    rows = trainer(gm, optimizer=own, scheduler=decay, batch=48, epochs=3).fit()
    assert [row["lr"] for row in rows[::2]] == pytest.approx([1e-3, 1e-4, 1e-5])
    both = torch.optim.lr_scheduler.SequentialLR(own, [decay, torch.optim.lr_scheduler.ConstantLR(own)], [1])
    trainer(gm, optimizer=own, scheduler=both)


@pytest.mark.parametrize(("given", "message"), [
    ({"lr": 1e-2}, "train.lr: has no effect beside an optimizer that was made elsewhere: set it there"),
    ({"weight_decay": 0.1}, "train.weight_decay: has no effect beside an optimizer"),
    ({"passes": [{"lora": {"at": "attn.qkv", "lr": 0.1}}]}, "'lora' says lr: 0.1, and the optimizer has 0.001"),
    ({"passes": [{"lora": {"at": "attn.qkv", "weight_decay": 0.3}}]}, "'lora' says weight_decay: 0.3"),
], ids=str)  # fmt: skip
def test_settings_beside_an_optimizer_that_was_made_elsewhere(given, message):
    gm = module(passes=given.pop("passes", [LORA]))
    with pytest.raises(FxplugError, match=message):
        own = torch.optim.AdamW([p for n, p in gm.named_parameters() if n.startswith("lora.")], 1e-3)
        trainer(gm, optimizer=own, **given)
    with pytest.raises(FxplugError):
        own = torch.optim.AdamW(fxplug.trainable(gm), lr=1e-3)
        trainer(gm, optimizer=own, trainable=["head"])  # which it lacks


def test_the_groups_of_trainable_are_taken_with_their_own_rates():
    gm = module(passes=[{"lora": {"at": "blocks.0.attn.*", "rank": 2, "lr": 0.1, "weight_decay": 0.0}}])
    own = torch.optim.AdamW(fxplug.trainable(gm), lr=1e-3)
    trainer(gm, optimizer=own, scheduler=torch.optim.lr_scheduler.LinearLR(own))


# --- settings that nothing would use


@pytest.mark.parametrize(("given", "message"), [
    ({"test": {"every": 1}}, "train.test.every: has no effect without test data"),
    ({"save": {"every": 2}}, "train.save.every: has no effect, because the run writes nothing: pass out=..."),
    ({"save": {"keep": 5}}, "train.save.keep: has no effect, because the run writes nothing"),
    ({"log": {"samples": 2, "tensorboard": False}}, "train.log.samples: has no effect, because the run writes nothing"),
    ({"log": {"every": 5}}, "train.log.every: has no effect, because the run writes nothing"),
    ({"settings": Train(task="classify", steps=1)}, "steps, batch, log would have no effect beside settings=...: set it there"),
    ({"data": DataLoader(Digits(), 4)}, "train.batch: has no effect, because the batches of the DataLoader have 4 samples"),
    ({"data": DataLoader(Digits(count=91), 8), "task": {"classify": {"augment": "none", "cutmix": 1.0}}},
     "the last batch of an epoch has 3 samples: mixup and cutmix need an even batch size, not 3; set drop_last=True"),
    ({"batch": 3, "task": {"classify": {"augment": "none", "mixup": 0.2}}}, "train.batch: mixup and cutmix need an even"),
    ({"batch": 1, "task": {"classify": {"augment": "none", "mixup": 0.2}}}, "train.batch: mixup and cutmix need an even"),
])  # fmt: skip
def test_what_would_have_no_effect_in_python(given, message):
    with pytest.raises(FxplugError, match=message):
        trainer(**given)


def test_what_asks_for_nothing_needs_no_folder():
    trainer(save={"every": 0}, log={"tensorboard": False, "samples": 0}, test={"every": 0})
    trainer(data=DataLoader(Digits(), 8), task={"classify": {"augment": "none", "mixup": 0.2}})
    trainer(data=DataLoader(Digits(count=91), 8, drop_last=True), task={"classify": {"augment": "none", "mixup": 0.2}})


@pytest.mark.parametrize(("changed", "message"), [
    ({"train__test": {"every": 2}}, "train.test.every: has no effect without test data"),
    ({"train__log": {"samples": 2, "tensorboard": False}}, "train.log.samples: has no effect, because the task draws no"),
    ({"data": {"call": "runs:Digits", "split": "train"}}, "data.split: has no effect with 'call': it is for 'dataset'"),
    ({"data": {"call": "runs:Digits", "repeats": "folders"}}, "data.repeats: has no effect with 'call': it is for 'images'"),
    ({"data": {"classes": "a", "columns": {"image": "x"}}}, "data.columns: has no effect with 'classes': it is for"),
    ({"data": {"classes": "a", "captions": "filename"}}, "data.captions: has no effect with 'classes'"),
    ({"data": {"images": "a", "crop": "random"}}, "data.crop: has no effect without 'size': images stay as they are"),
    ({"data": {"images": "a", "test": {"classes": "b", "captions": "none"}}}, "data.test.captions: has no effect"),
], ids=str)  # fmt: skip
def test_what_would_have_no_effect_in_a_configuration(tmp_path, changed, message):
    file, out = tmp_path / "c.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(runs.config(**changed), sort_keys=False))
    with pytest.raises(FxplugError, match=rf"c\.yaml:\d+: {message}"):
        fxplug.train(file, out=out, quiet=True)
    assert not out.exists()


def test_test_data_of_another_kind_do_not_inherit_what_they_cannot_use():
    data = {"images": "a", "captions": "none", "repeats": "folders", "test": {"classes": "b"}}
    assert fxplug.load_config({"model": "resnet18", "data": data}).data.test.captions == "required"


# --- what failed at the end


@pytest.fixture(scope="module")
def unet():
    return fuzz_settings.denoiser()


@pytest.mark.parametrize(("options", "message"), [
    ({"sample_steps": 2000}, "sample_steps: DDIMScheduler does not take 2000 steps: ValueError"),
    ({"samples": [5]}, "samples: the model has 5 rows for classes, 0 to 4, and none for 5"),
    ({"samples": [0, 99]}, "samples: the model has 5 rows for classes, 0 to 4, and none for 99"),
    ({"samples": [True]}, "samples: must be a number of pictures, a list of captions, or a list of labels"),
    ({"samples": [1, "a"]}, "samples: must be a number of pictures"),
    ({"samples": [-1]}, "samples: must be a number of pictures"),
    ({"samples": ["a dog"]}, "samples: are captions, and the model is given none"),
    ({"samples": [0] * 10_001}, "samples: must be a list of at most 10000"),
    ({"null_label": 99}, "null_label: the model has 5 rows for classes, 0 to 4, and none for 99"),
    ({"negative": "blurry"}, "negative"),
    ({"scheduler": {"DDPMScheduler": {"beta_start": -1.0}}}, "scheduler: the betas of the scheduler must be"),
    ({"scheduler": {"DDPMScheduler": {"beta_end": math.nan}}}, "scheduler.DDPMScheduler.beta_end: must be a finite number"),
    ({"scheduler": {"DDPMScheduler": {"num_train_timesteps": 0}}}, "scheduler"),
    ({"scheduler": {"FlowMatchEulerDiscreteScheduler": {"shift": -1.0}}}, "scheduler: the sigmas of the scheduler must be"),
    ({"scheduler": ""}, "scheduler: must not be empty"),
    ({"text": ""}, "text: must not be empty"),
    ({"vae": {}}, "vae: must not be empty"),
    ({"prediction": ""}, "prediction: must be one of epsilon, v_prediction, sample, flow, not ''"),
    ({"weighting": ""}, "weighting: must be a text that is not empty"),
    ({"density": []}, "density: must not be empty"),
    ({"call": {"sample": math.nan}}, "call.sample: must be a finite number"),
], ids=str)  # fmt: skip
def test_pictures_that_cannot_be_drawn(unet, tmp_path, options, message):
    options = {"sample_steps": 2, **options}
    with pytest.raises(SpecError, match=f"train.task.[dD]enoise.{message}"):
        trainer(unet, fuzz_settings.Pictures(), task={"denoise": options}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def fails(captions):
    if "broken" in captions:
        raise KeyError("no such token")
    return torch.zeros(len(captions), 4, 8)


@pytest.mark.slow
def test_prompts_that_cannot_be_encoded(tmp_path):
    parts = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",), "layers_per_block": 1}
    parts |= {"block_out_channels": (8,), "norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 4}
    parts |= {"mid_block_type": "UNetMidBlock2DCrossAttn", "in_channels": 3, "out_channels": 3, "sample_size": 8}
    net = small.seeded(lambda: diffusers.UNet2DConditionModel(**parts))
    inputs = {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 5])}
    inputs["encoder_hidden_states"] = torch.randn(2, 4, 8)
    gm = fxplug.apply(fxplug.trace(net, (), inputs), fxplug.load_pass("lora", at="mid_block.**", rank=2))
    data = [{"image": torch.randn(3, 8, 8), "caption": "a dog"}] * 8

    def go(**options):
        return trainer(gm, data, task={"denoise": {"text": "test_run_checks:fails", "sample_steps": 2, **options}}, steps=1)

    with pytest.raises(SpecError, match="enoise.samples: the sample pictures cannot be drawn: KeyError: 'no such token'"):
        go(samples=["a dog", "broken"])
    with pytest.raises(SpecError, match="enoise.negative: has no effect without guidance"):
        go(negative="blurry")
    with pytest.raises(SpecError, match="samples: the sample pictures cannot be drawn: KeyError"):
        go(samples=["a dog"], negative="broken", guidance=3.0)
    with pytest.raises(SpecError, match="enoise.samples: are labels, and the call of the model uses none"):
        go(samples=[0, 1])
    with pytest.raises(SpecError, match="enoise.null_label: has no effect"):
        go(null_label=2)
    go(samples=["a dog"], guidance=2.0, negative="blurry").fit()
    go(samples=[]).fit()


@pytest.mark.parametrize(("options", "message"), [
    ({"augment": {"hflip": math.nan}}, "augment.hflip: must be a finite number"),
    ({"augment": {"color_jitter": -1}}, "augment: timm's create_transform fails with these options"),
    ({"augment": {"interpolation": "bicubik"}}, "augment: timm's create_transform fails with these options"),
    ({"augment": {"re_prob": "often"}}, "augment: timm's create_transform fails with these options"),
    ({"augment": ""}, "augment: must not be empty"),
    ({"augment": []}, "augment: must not be empty"),
    ({"preprocess": ""}, "preprocess: must not be empty"),
    ({"criterion": ""}, "criterion: must not be empty"),
    ({"mixup": 10**9}, "mixup: must be 1000.0 or less"),
    ({"mixup": 1e-320}, "mixup: must be 0, or 0.001 or more, not "),
    ({"call": "x"}, "call: must be a mapping of the inputs of the model, not 'x'"),
    ({"call": 1}, "call: must be a mapping of the inputs of the model, not 1"),
    ({"call": {"x": "label.x"}}, "call.x: no value 'label.x'"),
], ids=str)  # fmt: skip
def test_options_of_classify_are_tried(options, message):
    with pytest.raises(SpecError, match=f"train.task.[cC]lassify.{message}"):
        trainer(task={"classify": options})


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "run"):
        with pytest.raises(TrainError, match="is not a folder"):
            trainer(out=out)
    monkeypatch.setattr("os.access", lambda *given: False)
    with pytest.raises(TrainError, match="no permission to write in"):
        trainer(out=tmp_path / "run")
    assert file.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["file"]


# --- half precision


WAYS = {
    "stock": {"fuse": False},
    "fused": {"fuse": "fused"},
    "checkpointed": {"fuse": "fused", "checkpointing": ["blocks.*"]},
    "compiled": {"fuse": "fused", "compile": True},
}


class Rounded(Digits):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image.bfloat16(), label


@pytest.mark.parametrize("way", ["stock", "fused", pytest.param("checkpointed", marks=pytest.mark.slow),
                                 pytest.param("compiled", marks=pytest.mark.slow)])  # fmt: skip
def test_what_trains_of_a_model_in_half_precision_is_float32(way):
    data = DataLoader(Rounded(), 8)
    gm, plain = module("bfloat16"), module("bfloat16")
    for one in (gm, plain):
        small.seeded(lambda one=one: [nn.init.normal_(p, std=0.1) for n, p in one.named_parameters() if "up.weight" in n])
    seen = []

    class Watch:
        def on_step_end(self, module):
            seen.append({p.dtype for p in module.parameters() if p.requires_grad})

    made = trainer(gm, data, trainable=["head"], plugins=[Watch()], lr=1e-4, **WAYS[way])
    assert made.settings.precision == "bf16" and "the run computes as with precision: bf16" in made.notes[0]
    losses = [row["loss"] for row in made.fit()]
    assert seen == [{torch.float32}] * 6
    assert {p.dtype for p in gm.parameters()} == {torch.bfloat16}  # and the module can be called again
    gm(torch.randn(2, 3, 16, 16, dtype=torch.bfloat16))

    masters = {n: p for n, p in plain.named_parameters() if n.startswith(("lora.", "head."))}
    plain.requires_grad_(False)
    for p in masters.values():
        p.data = p.data.float()
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(masters.values(), 1e-4, weight_decay=0.0)
    found = []
    for image, label in itertools.islice(data, 6):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(plain.train()(image).float(), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    close = {"stock": 0.0, "compiled": 2e-2}.get(way, 5e-3)
    assert losses == pytest.approx(found, abs=close, rel=0)
    if way == "stock":
        assert all(torch.equal(p, masters[n].bfloat16()) for n, p in gm.named_parameters() if n in masters)
        assert all(torch.equal(made.trained[n].float(), masters[n].bfloat16().float()) for n in masters)


@pytest.mark.slow
def test_small_steps_are_not_lost_in_half_precision():
    gm = module("bfloat16")
    start = gm.get_parameter("head.weight").detach().clone()
    trainer(gm, DataLoader(Rounded(), 8), trainable=["head"], lr=1e-5, epochs=5).fit()
    moved = (gm.get_parameter("head.weight") - start).abs()
    assert (moved > 0).float().mean() > 0.5  # a bfloat16 weight loses nearly all of these steps


def test_other_dtypes_and_precisions():
    with pytest.raises(TrainError, match="the trained parameters are float16, which needs loss scaling and so a GPU"):
        trainer(module("float16"))
    made = trainer(module("float16"), DataLoader(Rounded(), 8), precision="bf16", steps=1)  # the base is cast where it is read
    assert {p.dtype for p in made.trained.values()} == {torch.float32}
    assert trainer(module("float64"), DataLoader([(i.double(), n) for i, n in Digits()], 8)).settings.precision == "fp32"
    mixed = module()
    mixed.get_submodule("head").bfloat16()
    assert trainer(mixed, trainable=["blocks"], steps=1).settings.precision == "fp32"  # nothing in half precision trains
    mixed.get_submodule("norm").half()
    with pytest.raises(SpecError, match="train.precision: the trained parameters are float16 and bfloat16"):
        trainer(mixed, trainable=["head", "norm"])


class Asks(nn.Module):
    """Asks for the dtype of what a layer gives, as the upsamplers of diffusers do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3 * 16 * 16, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.second(x.relu() if x.dtype == torch.float32 else x * 2)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_graph_that_does_not_hold_under_autocast_is_said_before_the_first_step(precision):
    gm = fxplug.apply(fxplug.trace(Asks(), (torch.randn(8, 3, 16, 16),)), fxplug.load_pass("lora", at="first", rank=2))
    if precision == "fp32":
        trainer(gm)
        return
    text = r"does not hold under autocast \(precision: bf16\): (.|\n)*\(dtype: bfloat16; .*or set precision: fp32"
    with pytest.raises(TrainError, match=text):
        trainer(gm, precision="bf16")


# --- the average of the weights


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999, 0.9999])
def test_the_average_is_that_of_diffusers(decay):
    weight = nn.Parameter(torch.randn(4, 4))
    ours, theirs = Ema({"weight": weight}, decay), EMAModel([weight], decay=decay)
    for step in range(50):
        with torch.no_grad():
            weight.add_(torch.randn(4, 4))
        ours.update()
        theirs.step([weight])
        torch.testing.assert_close(ours.average["weight"], theirs.shadow_params[0], rtol=1e-6, atol=1e-6)
        if step == 0:
            assert torch.equal(ours.average["weight"], weight)


# --- each setting with values that nobody means


ODD = [0, -1, -0.5, 0.5, 1, 10**12, 10**400, math.nan, math.inf, -math.inf, "text", "", [], {}, None, True, [""], [math.nan]]
NESTED = {"save": train_section.Save, "log": train_section.Log, "test": train_section.Test}
KEYS = [(key,) for key in Train.model_fields if key not in NESTED]
KEYS += [(key, name) for key, section in NESTED.items() for name in section.model_fields]


@pytest.fixture(scope="module")
def small_vit():
    return module()


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_a_setting_is_used_or_refused_before_anything_is_written(tmp_path, small_vit, key):
    before = {name: value.clone() for name, value in small_vit.state_dict().items()}
    for number, value in enumerate(ODD):
        small_vit.load_state_dict(before)
        out, given = tmp_path / str(number), {key[0]: value if len(key) == 1 else {key[1]: value}}
        if key[0] in ("steps", "epochs", "batch", "accumulate") and isinstance(value, int) and value > 1:
            continue  # a long run, and a fine one
        if key == ("compile",) and value == 1:
            continue  # which takes long, and is tested elsewhere
        if key[0] == "log" and key != ("log", "tensorboard"):
            given["log"]["tensorboard"] = False
        length = {} if key[0] in ("steps", "epochs") else {"steps": 1}
        try:
            made = fxplug.Trainer(small_vit, given.pop("task", "classify"), Digits(count=16), out=out, quiet=True, device="cpu",
                                  **{"log": {"tensorboard": False}, **length, **given})  # fmt: skip
        except FxplugError as error:
            text = str(error)
            assert f"train.{'.'.join(key)}" in text or f"'{key[0]}'" in text or key[0] == "task", (value, text)
            assert not out.exists(), (value, text)
        else:
            rows = made.fit()
            assert all(math.isfinite(row["loss"]) and 0 <= row["lr"] < math.inf for row in rows), value
    small_vit.load_state_dict(before)


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(48, 10), function

    def forward(self, x):
        return self.function(self.linear(x.flatten(1)[:, :48]))


def test_a_module_that_could_not_be_written_at_the_end_is_refused_at_the_start(tmp_path):
    net = nn.Sequential(Called(lambda x: x.relu()), nn.Linear(10, 10))
    module = fxplug.apply(fxplug.trace(net, torch.randn(2, 3, 16, 16), leaf=["0"]), fxplug.load_pass("lora", at="1", rank=2))
    with pytest.raises(TrainError, match=r"module/ could not be written at the end .*: '0' \(Called\) cannot be rebuilt"):
        trainer(module, out=tmp_path / "run", steps=1)
    assert not (tmp_path / "run").exists()
    assert len(trainer(module, steps=1).fit()) == 1


@pytest.mark.slow
def test_random_settings_are_used_or_refused():
    assert fuzz_settings.fuzz_settings(40, 0) == []
