"""Prior images (DreamBooth, arXiv 2208.12242): as many in each batch as samples, with a weight of their own."""

from __future__ import annotations

import pytest
import runs
import torch
import yaml
from test_data import folder, picture
from test_denoise import batch, ready, traced
from test_denoise_runs import CONFIG, SMALL
from test_masks import masks

import fxplug
from fxplug.core.errors import SpecError, TrainError
from fxplug.core.spec.yaml_source import validate
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import open_items
from fxplug.training.random_draws import Draws
from fxplug.training.run import _open_prior
from fxplug.training.tasks.losses import compute_mean
from fxplug.training.train_section import Data


def opened(base, batch=2, *, rank=0, world=1, **spec):
    spec = validate(Data, spec)
    prior = _open_prior(spec, base, 0, None)
    return Loader(open_items(spec, base), spec, batch, rank=rank, world=world, prior=prior)


def pairs(loader, epochs=1):
    """The names of samples, and of the prior images beside them, by epoch and number of the sample."""
    found = {}
    for epoch in range(epochs):
        for b in loader.epoch(epoch):
            assert b["prior"].tolist() == [False, True] * (len(b["name"]) // 2)
            for place in range(0, len(b["name"]), 2):
                found.setdefault((epoch, b["name"][place]), []).append(b["name"][place + 1])
    return found


@pytest.fixture
def base(tmp_path):
    folder(tmp_path / "own", 4, size=(20, 24))
    for i in range(7):
        (tmp_path / "class").mkdir(exist_ok=True)
        picture(90 + i, (30, 16)).save(tmp_path / "class" / f"c{i}.png")
        (tmp_path / "class" / f"c{i}.txt").write_text("a dog")
    return tmp_path


SPEC = {"images": "own", "size": [16, 12], "prior": "class"}


# --- the loss


def test_the_loss_is_that_of_dreambooth():
    """loss + prior_loss_weight * prior_loss, each the mean over its half, as in diffusers' train_dreambooth.py."""
    module, b = traced(), batch(4)
    b |= {"prior": torch.tensor([False, True] * 2), "loss_scale": torch.tensor([1.0, 0.25] * 2)}
    task = ready(module)
    each = task._losses(module, dict(b), (draw := Draws(0, 7)), draw.uniform(4), 0.0)
    got = task.loss(module, b, Draws(0, 7))
    assert got.item() == pytest.approx((each[::2].mean() + 0.25 * each[1::2].mean()).item(), rel=1e-6)


def test_the_mean_by_hand():
    b = {"prior": torch.tensor([False, True, False, True]), "loss_scale": torch.tensor([1.0, 0.5, 2.0, 0.5])}
    assert compute_mean(torch.tensor([1.0, 2.0, 3.0, 4.0]), b).item() == (1 + 1 + 6 + 2) / 2


# --- the batches


def test_a_batch_has_as_many_prior_images_in_the_size_of_its_samples(base):
    loader = opened(base, prior_weight=0.5, **SPEC)
    for b in loader.epoch(0):
        assert b["image"].shape == (4, 3, 16, 12) and b["loss_scale"].tolist() == [1.0, 0.5] * 2
        assert b["caption"][1::2] == ["a dog"] * 2 and all(text.startswith("picture") for text in b["caption"][::2])
    assert loader.steps == 2 and "prior" not in loader.first(2)


def test_all_prior_images_come_in_turn(base):
    found = [name for names in pairs(opened(base, **SPEC), 7).values() for name in names]
    assert sorted(found) == sorted(f"c{i}.png" for i in range(7) for _ in range(4))
    assert len({tuple(found[n : n + 7]) for n in range(0, 28, 7)}) > 1


def test_the_same_prior_image_however_samples_are_divided(base):
    whole = pairs(opened(base, 4, **SPEC), 2)
    assert pairs(opened(base, 2, **SPEC), 2) == pairs(opened(base, 1, **SPEC), 2) == whole
    parts = [pairs(opened(base, 2, rank=rank, world=2, **SPEC), 2) for rank in range(2)]
    assert {**parts[0], **parts[1]} == whole
    assert pairs(opened(base, 2, workers=1, **{**SPEC, "prior": {"images": "class", "workers": 1}}), 2) == whole


def test_samples_are_as_without_prior_images(base):
    with_prior = [b["image"][::2] for b in opened(base, crop="random", flip=True, **SPEC).epoch(1)]
    without = [b["image"] for b in opened(base, images="own", size=[16, 12], crop="random", flip=True).epoch(1)]
    assert all(torch.equal(a, b) for a, b in zip(with_prior, without, strict=True))


def test_repeats_and_buckets(base):
    (base / "own" / "multiply.txt").write_text("2")
    (base / "class" / "multiply.txt").write_text("3")
    found = pairs(opened(base, 2, **SPEC), 3)
    names = [name for some in found.values() for name in some]
    assert len(names) == 24 and {names.count(f"c{i}.png") for i in range(7)} <= {3, 4, 5} and len(names) == len(found) * 2
    picture(5, (24, 48)).save(base / "own" / "0.png"), picture(6, (24, 48)).save(base / "own" / "1.png")
    sizes = {tuple(b["image"].shape[2:]) for b in opened(base, 2, **{**SPEC, "size": 16, "buckets": {"step": 4}}).epoch(0)}
    assert len(sizes) == 2


def test_what_the_trigger_and_scales_are_of(base):
    (base / "own" / "loss_scale.txt").write_text("3")
    (base / "class" / "cond_dropout.txt").write_text("0.5")
    b = next(opened(base, trigger="ohwx", prior_weight=2.0, **SPEC).epoch(0))
    assert b["caption"][1] == "a dog" and b["caption"][0].startswith("ohwx, picture")
    assert b["loss_scale"].tolist() == [3.0, 2.0] * 2
    assert b["cond_dropout"].isnan().tolist() == [True, False] * 2


def test_prior_images_without_masks_count_everywhere(base):
    masks(base / "m")
    b = next(opened(base, masks="m", **SPEC).epoch(0))
    assert b["loss_mask"].shape == (4, 1, 16, 12)
    assert (b["loss_mask"][1::2] == 1).all() and (b["loss_mask"][::2] == 0).any()


def test_an_unreadable_prior_image_is_replaced_and_named(base):
    (base / "class" / "c3.png").write_text("no image")
    loader = opened(base, **SPEC)
    names = [name for some in pairs(loader, 2).values() for name in some]
    assert len(names) == 8 and "c3.png" not in names and [*loader.skipped] == ["c3.png"]


# --- the section


@pytest.mark.parametrize(("data", "message"), [
    ({"images": "own", "prior_weight": 0.5}, "prior_weight: has no effect without 'prior'"),
    ({"images": "own", "prior": "class", "prior_weight": 0}, "prior_weight: must be above 0"),
    ({"images": "own", "prior": {"captions": "none"}}, "prior: needs one of 'images'"),
    ({"images": "own", "prior": {"images": "class", "test": "own"}}, "prior.test: has no effect"),
    ({"images": "own", "prior": {"images": "class", "trigger": "a"}}, "prior.trigger: has no effect"),
    ({"images": "own", "prior": {"images": "class", "size": 8}}, "prior.size: has no effect"),
    ({"images": "own", "test": {"images": "own", "prior": "class"}}, "test.prior: has no effect"),
    ({"classes": "own", "prior": "class"}, "prior: must be images with captions"),
    ({"images": "own", "prior": "missing"}, "data.prior.images: no such folder"),
    ({"images": "own", "prior": ""}, "prior.images: must not be empty"),
])  # fmt: skip
def test_what_is_wrong_is_said(base, data, message):
    with pytest.raises(SpecError, match=message):
        _open_prior(validate(Data, data), base, 0, None)


def test_prior_images_below_the_others_are_none_of_them(base):
    (base / "class").rename(base / "own" / "class")
    loader = opened(base, **{**SPEC, "prior": "own/class"})
    assert loader.total == 4 and any("it has the prior images" in note for note in loader.items.notes)


def test_samples_and_prior_images_must_have_the_same_keys(base):
    for i in range(7):
        (base / "class" / f"c{i}.txt").unlink()
    with pytest.raises(TrainError, match="has 'caption' and c.* does not"):
        next(opened(base, **{**SPEC, "prior": {"images": "class", "captions": "none"}}).epoch(0))


# --- a run


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_other_prior_images_are_another_run(base):
    train = {**CONFIG["train"], "steps": 4, "batch": 2, "save": {"every": 2, "keep": 9}, "test": {}, "log": {}}
    data = {**SPEC, "size": 16, "flip": True, "prior_weight": 0.5}
    config = {**CONFIG, **SMALL, "train": train, "data": data}
    (base / "run.yaml").write_text(yaml.safe_dump(config))
    with runs.sharing():
        whole = fxplug.train(base / "run.yaml", out=base / "a", quiet=True)
        last = fxplug.train(base / "run.yaml", out=base / "b", resume=base / "a" / "checkpoints" / "step-00000002", quiet=True)
        assert [r["loss"] for r in whole.history][2:] == [r["loss"] for r in last.history]
        divided = fxplug.train(base / "run.yaml", set=["train.batch=1", "train.accumulate=2"], out=base / "c", quiet=True)
        assert [r["loss"] for r in divided.history] == pytest.approx([r["loss"] for r in whole.history], rel=1e-5)
        picture(1, (30, 16)).save(base / "class" / "c1.png")
        with pytest.raises(TrainError, match="samples.prior.digest"):
            fxplug.train(base / "run.yaml", out=base / "a", resume=base / "a" / "checkpoints" / "step-00000002", quiet=True)
