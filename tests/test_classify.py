"""The classification task: timm's mixing and transforms, deterministic; Acc@1, Acc@5, and labels that do not fit."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import small
import timm
import timm.data
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import fxplug
from fxplug.core.errors import SpecError
from fxplug.training.random_draws import Draws, preserve_random_state
from fxplug.training.tasks.classify import Classify
from fxplug.training.tasks.task import Task, TaskInfo, compute_means, make_task
from fxplug.training.train_section import Use

SIDE = 32


def ready(module=None, *, classes=None, timm=None, **options):
    task = Classify(**options)
    task.setup(module or small.vit().gm, TaskInfo((SIDE, SIDE), classes=classes, timm=timm))
    return task


def batch(n=8, classes=10):
    made = torch.Generator().manual_seed(3)
    return {"image": torch.randn(n, 3, SIDE, SIDE, generator=made), "label": torch.arange(n) % classes,
            "index": torch.arange(n), "name": [f"{i}.png" for i in range(n)]}  # fmt: skip


def photograph(mode="RGB", size=(60, 40)):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.slow
def test_the_loss_is_cross_entropy():
    vit, b = small.vit().gm.eval(), batch()
    expected = F.cross_entropy(vit(b["image"]), b["label"]).detach()
    torch.testing.assert_close(ready().loss(vit, b, Draws(0, 1)), expected)
    smooth = F.cross_entropy(vit(b["image"]), b["label"], label_smoothing=0.1)
    torch.testing.assert_close(ready(smoothing=0.1).loss(vit, b, Draws(0, 1)), smooth)
    assert compute_means(ready(smoothing=0.1).test(vit, [b]))["loss"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("criterion", [
    nn.CrossEntropyLoss(label_smoothing=0.2), {"torch.nn:CrossEntropyLoss": {"label_smoothing": 0.2}},
    {"torch.nn.functional:cross_entropy": {"label_smoothing": 0.2}},
    {"timm.loss:LabelSmoothingCrossEntropy": {"smoothing": 0.2}},
])  # fmt: skip
def test_the_criterion_can_be_any(criterion):
    vit, b = small.vit().gm.eval(), batch()
    expected = F.cross_entropy(vit(b["image"]), b["label"], label_smoothing=0.2)
    torch.testing.assert_close(ready(criterion=criterion).loss(vit, b, Draws(0, 1)), expected)


@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0)])
def test_neighbours_are_mixed_by_timm(alphas, monkeypatch):
    """With a batch of two, first with last and neighbours are the same; timm's own numbers are read off its labels."""
    seen, seed, real = [], [], np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda number: (seed.append(number), real(number)))
    b = {**batch(2), "label": torch.tensor([1, 4])}
    model = small.vit().gm.eval()
    loss = ready(mixup=alphas[0], cutmix=alphas[1]).loss(lambda x, **more: (seen.append(x), model(x))[1], b, Draws(0, 1))
    with preserve_random_state():
        real(seed[0])
        images, labels = timm.data.Mixup(*alphas, label_smoothing=0.0, num_classes=10)(b["image"].clone(), b["label"])
    assert torch.equal(seen[0], images) and not torch.equal(images, b["image"])
    torch.testing.assert_close(loss, F.cross_entropy(model(images), labels))


def test_mixing_is_drawn_from_the_step_and_the_same_on_two_processes():
    vit, b = small.vit().gm.eval(), batch()
    task = ready(mixup=0.8, cutmix=1.0, smoothing=0.1)
    np.random.seed(0)
    torch.manual_seed(0)
    first = [task.loss(vit, b, Draws(0, step)).item() for step in range(6)]
    again = [task.loss(vit, b, Draws(0, step)).item() for step in range(6)]
    assert first == again and len(set(first)) == 6
    halves = [{k: v[i : i + 4] for k, v in b.items()} for i in (0, 4)]
    for step in range(6):
        parts = [task.loss(vit, half, Draws(0, step, rank=rank, world=2)).item() for rank, half in enumerate(halves)]
        assert sum(parts) / 2 == pytest.approx(first[step], rel=1e-5)
    kept = b["image"].clone()
    task.loss(vit, b, Draws(0, 0))
    assert torch.equal(kept, b["image"])
    with pytest.raises(SpecError, match="train.batch: mixup and cutmix need an even batch size, not 7"):
        task.loss(vit, batch(7), Draws(0, 0))


def test_the_test_counts_hits():
    def first(count):
        return small.net(lambda self, x: x.flatten(1)[:, :count])

    scores = torch.tensor([[9, 8, 7, 6, 5, 4, 3.0], [3, 4, 5, 6, 7, 8, 9], [9, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 9, 8, 7]])
    b = {"image": scores.view(4, 7, 1, 1), "label": torch.tensor([0, 2, 1, 6]), "name": list("abcd")}
    task, module = ready(first(7)), first(7)
    totals = task.test(module, [{k: v[:3] for k, v in b.items()}, {k: v[3:] for k, v in b.items()}])
    assert totals["acc1"] == (100.0, 4) and totals["acc5"][1] == 4
    assert compute_means(totals)["acc1"] == 25.0 and compute_means(totals)["acc5"] == 75.0 and task.best == "acc1"
    few = compute_means(ready(first(3)).test(first(3), [{**b, "label": torch.tensor([0, 2, 1, 0])}]))
    assert few["acc1"] == 50.0 and few["acc5"] == 100.0


def test_labels_out_of_range_are_said_before_the_loss():
    vit = small.vit().gm
    b = {**batch(), "label": torch.tensor([0, 3, 10, 1, 12, 0, 0, 0])}
    said = "'2.png' has the label 10, and the model has 10 outputs, 0 to 9; 2 such labels in this batch"
    for call in (lambda task: task.loss(vit, b, Draws(0, 1)), lambda task: task.test(vit, [b])):
        with pytest.raises(SpecError, match=said):
            call(ready())
    with pytest.raises(SpecError, match="the data has 12 classes, and the model has 10 outputs: none for 'k'"):
        ready(classes=list("abcdefghijkl")).loss(vit, batch(), Draws(0, 1))
    with pytest.raises(SpecError, match="the data has no labels; it has image"):
        ready().loss(vit, {"image": batch()["image"]}, Draws(0, 1))
    with pytest.raises(SpecError, match="a label must be a whole number, not torch.float32"):
        ready().loss(vit, {**b, "label": torch.rand(8)}, Draws(0, 1))


@pytest.mark.parametrize("how", ["named", "own"])
def test_preprocessing_is_that_of_the_model(how):
    name = "tf_efficientnet_lite0"
    config = timm.data.resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    assert config["mean"] == (0.5, 0.5, 0.5) and config["interpolation"] == "bicubic"
    model = small.vit().gm
    task = ready(model, timm=name) if how == "own" else ready(model, preprocess=name, timm="vit_tiny_patch16_224")
    theirs = timm.data.create_transform(**{**config, "input_size": (3, 48, SIDE)})
    assert torch.equal(task.transform(False)(photograph(), (48, SIDE)), theirs(photograph()))


def test_training_images_are_augmented_as_asked():
    image, size = photograph(), (SIDE, SIDE)
    plain = ready(augment="none", preprocess={"mean": [0, 0, 0], "std": [1, 1, 1], "interpolation": "bilinear"})
    sent = pickle.loads(pickle.dumps(plain.transform(True)))
    assert torch.equal(sent(image, size), plain.transform(True)(image, size))
    auto = ready(timm="vit_tiny_patch16_224").transform(True)
    torch.manual_seed(0)
    first = auto(image, size)
    assert first.shape == (3, SIDE, SIDE) and not torch.equal(first, auto(image, size))
    random = ready(augment={"auto_augment": "rand-m9-mstd0.5", "re_prob": 0.5, "scale": [0.5, 1.0]}).transform(True)
    assert random(image, (SIDE, 2 * SIDE)).shape == (3, SIDE, 2 * SIDE)
    assert random(photograph("L"), size).shape == (3, SIDE, SIDE)


def test_a_model_of_one_channel_sees_grey():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 30 * 30, 3))
    task = ready(fxplug.trace(model, torch.randn(2, 1, SIDE, SIDE)), timm="vit_tiny_patch16_224")
    assert task.transform(False)(photograph(), (SIDE, SIDE)).shape == (1, SIDE, SIDE)
    assert task.settings["mean"] == (0.5,)


WRONG = {
    "augment: create_transform has no option 'colour_jitter' (did you mean 'color_jitter'?)":
        {"augment": {"colour_jitter": 0.1}},
    "augment: must be auto, none, or options of timm's create_transform, not 'some'": {"augment": "some"},
    "preprocess: no option 'men' (did you mean 'mean'?)": {"preprocess": {"men": [0.5]}},
    "preprocess: timm has no model 'vit_tiny_patch16_22'": {"preprocess": "vit_tiny_patch16_22"},
    "preprocess.mean: has 2 numbers, and the model has 3 input channels": {"preprocess": {"mean": [0.5, 0.5]}},
    "smoothing: must be below 1.0, not 1.0": {"smoothing": 1.0},
    "mixup: must be 0.0 or more, not -1": {"mixup": -1},
    "smoothing: is an option of cross entropy": {"smoothing": 0.1, "criterion": nn.MSELoss()},
    "no module named 'here'": {"criterion": "here:loss"},
    "CrossEntropyLoss: torch.nn:CrossEntropyLoss has no option": {"criterion": {"torch.nn:CrossEntropyLoss": {"smoothin": 1}}},
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_said(text):
    with pytest.raises(SpecError, match=re.escape(text)):
        ready(**WRONG[text])


def test_data_without_images_are_said():
    text = "data: the data has no 'image' (did you mean 'images'?); it has images, label; name it with columns: {image"
    b = batch()
    with pytest.raises(SpecError, match=re.escape(text)):
        ready().loss(small.vit().gm, {"images": b.pop("image"), **b}, Draws(0, 1))


class Mine(Task):
    def __init__(self, weight: float, power: int = 2) -> None:
        self.weight, self.power = weight, power

    def loss(self, module, batch, draw):
        return self.weight * module(batch["image"]).pow(self.power).mean(), {"seen": len(batch["image"])}


def test_a_task_of_ones_own():
    task = make_task({"test_classify:Mine": {"weight": 2.0}})
    loss, seen = task.loss(small.vit().gm, batch(), Draws(0, 1))
    assert loss > 0 and seen == {"seen": 8}
    assert task.test(small.vit().gm, []) == {} and task.samples(small.vit().gm, None) is None
    assert make_task(task) is task and isinstance(make_task(Use("classify", {})), Classify)
    for spec, text in (
        ("clasify", "train.task: no task 'clasify' (did you mean 'classify'?)"),
        ("pose", "no task 'pose'; there are classify, denoise, or 'package.module:Class' for one of your own"),
        ({"test_classify:Mine": {"weigth": 1}}, "Mine has no option 'weigth' (did you mean 'weight'?); it takes weight, power"),
        ("test_classify:Mine", "test_classify:Mine needs the option 'weight'"),
        ("test_classify:batch", "'test_classify:batch' is not a subclass of fxplug.Task"),
        ({"classify": {"mixup": -1}}, "train.task.classify.mixup: must be 0.0 or more, not -1"),
        ({"classify": {}, "denoise": {}}, "must be a name, or one name with its options below it, not 2 keys"),
    ):
        with pytest.raises(SpecError, match=re.escape(text)):
            make_task(spec)
