"""Masks that weigh the loss: read beside the images, cropped with them, resized to the predictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from test_data import folder, loaded, picture
from test_denoise import VAE, batch, ready, traced

import fxplug
from fxplug.core.errors import SpecError, TrainError
from fxplug.core.spec.yaml_source import validate
from fxplug.training.data.loader import Loader
from fxplug.training.data.sources import open_items
from fxplug.training.identity import describe_samples
from fxplug.training.random_draws import Draws
from fxplug.training.tasks.losses import compute_losses
from fxplug.training.tasks.task import compute_means
from fxplug.training.train_section import Data, Use

MSE = Use("mse", {})


def masks(top, count=4, size=(20, 24), suffix=".png"):
    """Masks whose left half is white."""
    top.mkdir(parents=True)
    for i in range(count):
        half = np.zeros(size, np.uint8)
        half[:, : size[1] // 2] = 255
        Image.fromarray(half).save(top / f"{i}{suffix}")
    return top


# --- the loss


@pytest.mark.slow
def test_the_loss_of_each_place_is_multiplied_by_the_mask():
    predicted = torch.arange(8.0).reshape(1, 2, 2, 2)
    mask = torch.tensor([[1.0, 0.0], [0.5, 0.0]])[None, None]
    got = compute_losses(predicted, torch.zeros_like(predicted), {"loss_mask": mask}, MSE)
    assert got.tolist() == [(0 + 16 + 0.5 * (4 + 36)) / 8]


def test_a_mask_is_resized_as_means_over_areas():
    predicted = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 2, 2)
    mask = torch.zeros(1, 1, 4, 4)
    mask[0, 0, :2, :2] = 1.0  # all of the first place
    mask[0, 0, 3, 3] = 1.0  # a quarter of the last
    got = compute_losses(predicted, torch.zeros_like(predicted), {"loss_mask": mask}, MSE)
    assert got.tolist() == [(1 + 16 / 4) / 4]
    frames = compute_losses(predicted[:, :, None], torch.zeros(1, 1, 1, 2, 2), {"loss_mask": mask}, MSE)
    assert frames.tolist() == got.tolist()


def test_a_white_mask_changes_no_bit_and_a_black_one_leaves_nothing():
    module, b = traced(), batch()
    task = ready(module)
    plain = task.loss(module, dict(b), Draws(0, 7))
    for value in (1.0, 0.0):
        masked = task.loss(module, {**b, "loss_mask": torch.full((4, 1, 16, 16), value)}, Draws(0, 7))
        assert torch.equal(masked, plain * value)


def test_only_what_is_white_has_gradients():
    """The prediction at a black place does not count: the loss is that of the rest over all places."""
    module, b = traced(), batch()
    mask = torch.zeros(4, 1, 16, 16)
    mask[..., :8] = 1
    task = ready(module)
    seen = {}

    class Kept(torch.nn.Module):
        def forward(self, **given):
            (seen["out"],) = module(**given)
            seen["out"].retain_grad()
            return (seen["out"],)

    task.loss(Kept(), {**b, "loss_mask": mask}, Draws(0, 7)).backward()
    grad = seen["out"].grad
    assert grad[..., 8:].abs().max() == 0 and (grad[..., :8] != 0).all()


def test_latents_have_a_mask_in_their_size():
    module = traced(4)
    task = ready(module, 32, vae={"diffusers": VAE})
    b = batch(2, 32)
    losses = [task.loss(module, {**b, "loss_mask": m}, Draws(0, 7)) for m in (torch.ones(2, 1, 32, 32), _half(2, 32))]
    assert 0 < losses[1] < losses[0]


def _half(n, size):
    mask = torch.zeros(n, 1, size, size)
    mask[..., : size // 2] = 1
    return mask


def test_a_test_has_the_masks_of_its_data():
    module, b = traced(), batch()
    task = ready(module)
    found = [compute_means(task.test(module, [{**b, **more}]))["loss"] for more in ({}, {"loss_mask": _half(4, 16)})]
    assert 0 < found[1] < found[0]


@pytest.mark.parametrize(("mask", "message"), [
    (torch.ones(4, 16, 16), r"'loss_mask' must be \[4, 1, height, width\]"),
    (torch.ones(4, 3, 16, 16), r"not \[4, 3, 16, 16\]"),
    (torch.ones(2, 1, 16, 16), r"not \[2, 1, 16, 16\]"),
])  # fmt: skip
def test_a_mask_of_another_shape_is_said(mask, message):
    module = traced()
    with pytest.raises(SpecError, match=message):
        ready(module).loss(module, {**batch(), "loss_mask": mask}, Draws(0, 7))
    with pytest.raises(SpecError, match="no height and width"):
        compute_losses(torch.ones(4, 9, 8), torch.ones(4, 9, 8), {"loss_mask": torch.ones(4, 1, 3, 3)}, MSE)


# --- the files


def test_masks_are_matched_by_name_and_cropped_with_their_images(tmp_path):
    top = folder(tmp_path / "a", 4)
    masks(tmp_path / "m", suffix=".bmp")
    for i in range(4):  # an image that is its mask: what is cropped alike stays equal
        Image.open(tmp_path / "m" / f"{i}.bmp").convert("RGB").save(top / f"{i}.png")
    spec = {"images": "a", "masks": "m", "size": [16, 12], "crop": "random", "flip": True}
    flipped = set()
    for epoch in range(3):
        for b in loaded(tmp_path, epoch=epoch, **spec):
            assert b["loss_mask"].shape == (2, 1, 16, 12) and b["loss_mask"].dtype == torch.float32
            torch.testing.assert_close(b["image"] / 2 + 0.5, b["loss_mask"].expand(2, 3, 16, 12), atol=1 / 255, rtol=0)
            flipped |= {bool(m[0, 0, 0] < 0.5) for m in b["loss_mask"]}
    assert flipped == {True, False}


def test_masks_go_along_with_conditions_that_a_function_makes(tmp_path):
    folder(tmp_path / "a", 4, size=(20, 24))
    masks(tmp_path / "m")
    folder(tmp_path / "c", 4, captions=False)
    for conditions in ("test_masks:inverted", "c"):
        b = loaded(tmp_path, images="a", masks="m", conditions=conditions, size=[10, 6], crop="random", flip=True)[0]
        assert b["condition"].shape == (2, 3, 10, 6) and b["loss_mask"].shape == (2, 1, 10, 6)
    with_function = loaded(tmp_path, images="a", masks="m", conditions="test_masks:inverted", size=[10, 6], crop="random")
    without = loaded(tmp_path, images="a", masks="m", size=[10, 6], crop="random")
    assert all(torch.equal(a["loss_mask"], b["loss_mask"]) for a, b in zip(with_function, without, strict=True))


def inverted(image):
    return Image.eval(image, lambda value: 255 - value)


def test_a_folder_of_masks_below_the_images_is_left_out_of_them(tmp_path):
    folder(tmp_path / "a", 4)
    masks(tmp_path / "a" / "m")
    items = open_items(Data(images="a", masks="a/m"), tmp_path)
    assert len(items) == 4 and any("it has the masks" in note for note in items.notes)


class Masked(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return {"image": picture(i, (8, 8)), "loss_mask": Image.new("RGB", (8, 8), "white"), "caption": "a"}


def test_a_data_set_has_masks_of_its_own(tmp_path):
    b = loaded(tmp_path, call="test_masks:Masked")[0]
    assert torch.equal(b["loss_mask"], torch.ones(2, 1, 8, 8))


def test_another_mask_is_another_run(tmp_path):
    folder(tmp_path / "a", 4)
    masks(tmp_path / "m")

    def digest():
        spec = Data(images="a", masks="m")
        return describe_samples(Loader(open_items(spec, tmp_path), spec, 2), 0)["digest"]

    before = digest()
    assert digest() == before
    Image.new("L", (24, 20), 7).save(tmp_path / "m" / "2.png")
    assert digest() != before


def test_masks_that_are_wrong_are_said(tmp_path):
    folder(tmp_path / "a", 4)
    masks(tmp_path / "m", 3)
    for data, message in (
        ({"images": "a", "masks": "m"}, r"masks: no mask for '3.png' in '.*m'"),
        ({"images": "a", "masks": "n"}, r"masks: no such folder"),
        ({"call": "test_masks:Masked", "masks": "m"}, "masks: has no effect with 'call'"),
        ({"images": "a", "masks": ""}, "masks: must be a text that is not empty"),
    ):
        with pytest.raises(SpecError, match=message):
            open_items(validate(Data, data), tmp_path)
    masks(tmp_path / "wide", 4, (20, 48))
    with pytest.raises(TrainError, match="is 20x24, its mask 20x48: they must have one shape"):
        loaded(tmp_path, images="a", masks="wide", size=16)
    assert Data(images="a", masks="m", test="b").test.masks is None


def test_a_task_that_reads_no_masks_refuses_them(tmp_path):
    for name in ("cat", "dog"):
        folder(tmp_path / "a" / name, 4, captions=False)
        masks(tmp_path / "m" / name)
    config = {"model": {"timm": "vit_tiny_patch16_224", "options": {"img_size": 16, "depth": 1, "num_classes": 2}},
              "passes": [{"lora": {"rank": 2}}], "train": {"task": "classify", "steps": 1, "batch": 2},
              "data": {"classes": str(tmp_path / "a"), "size": 16, "masks": str(tmp_path / "m")}, "verify": False}  # fmt: skip
    with pytest.raises(SpecError, match="data.masks: has no effect: the loss of Classify reads no masks"):
        fxplug.train(config, out=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
