"""Losses of `denoise` beside the squared error: numbers by hand, and as diffusers' and kohya's scripts compute them."""

from __future__ import annotations

import math
import re

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from test_denoise import SIDE, batch, drawn, ready, traced, unet

from fxplug.core.errors import SpecError
from fxplug.training.random_draws import Draws
from fxplug.training.tasks.denoise import Denoise
from fxplug.training.tasks.losses import add_offset, compute_huber_delta, compute_losses, compute_mean, read_loss
from fxplug.training.tasks.task import compute_means
from fxplug.training.train_section import Use


def huber(name="huber", **options):
    return read_loss(Use(name, options))


# --- the kind of the loss


def test_losses_of_three_numbers_by_hand():
    predicted, target = torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    assert compute_losses(predicted, target, {}, huber("mse")).tolist() == [12.5, 0.0]
    d = torch.tensor([4.0, 4.0])  # sqrt(9 + 16) = 5, sqrt(16 + 16) = 5.656854
    assert compute_losses(predicted, target, {}, huber(), d).tolist() == pytest.approx([4 * (1 + 1.656854), 0.0])
    assert compute_losses(predicted, target, {}, huber("smooth_l1"), d).tolist() == pytest.approx([1 + 1.656854, 0.0])


def test_small_differences_are_squared_and_large_ones_are_not():
    small, large = torch.full((1, 4), 1e-2), torch.full((1, 4), 1e3)
    zero, d = torch.zeros(1, 4), torch.tensor([0.5])
    assert compute_losses(small, zero, {}, huber(), d).item() == pytest.approx(1e-4, rel=1e-3)
    assert compute_losses(large, zero, {}, huber(), d).item() == pytest.approx(2 * 0.5 * (1e3 - 0.5), rel=1e-3)


def test_delta_by_schedule():
    share, ratio = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 1.0, math.inf])
    assert compute_huber_delta(huber(delta=0.25), share, ratio).tolist() == [0.25] * 3
    assert compute_huber_delta(huber(delta=0.25, schedule="exponential"), share, ratio).tolist() == [1.0, 0.5, 0.25]
    by_snr = compute_huber_delta(huber(delta=0.2, schedule="snr"), share, ratio)
    assert by_snr.tolist() == pytest.approx([1.0, 0.8 / 4 + 0.2, 0.2])


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
@pytest.mark.parametrize("name", ["huber", "smooth_l1"])
def test_huber_of_a_diffusion_model(name, schedule):
    """The formulas of diffusers' and kohya's scripts, written out over the alphas of the scheduler."""
    module, b = traced(), batch()
    got = ready(module, loss={name: {"delta": 0.1, "schedule": schedule}}).loss(module, b, Draws(0, 7))
    scheduler = DDPMScheduler()
    u, noise = drawn(4, (3, SIDE, SIDE))
    timesteps = (u * 1000).long()
    difference = unet()(scheduler.add_noise(b["image"], noise, timesteps), timesteps, None, return_dict=False)[0] - noise
    kept = scheduler.alphas_cumprod[timesteps]
    sigmas = ((1 - kept) / kept) ** 0.5
    c = {"constant": torch.full((4,), 0.1), "exponential": torch.exp(math.log(0.1) / 1000 * timesteps),
         "snr": 0.9 / (1 + sigmas) ** 2 + 0.1}[schedule].view(-1, 1, 1, 1)  # fmt: skip
    wanted = 2 * (c if name == "huber" else 1) * (torch.sqrt(difference**2 + c**2) - c)
    torch.testing.assert_close(got, wanted.mean(), rtol=1e-5, atol=0)
    assert got.item() != pytest.approx(difference.square().mean().item(), rel=1e-3)


def test_huber_of_flow_matching():
    module, b = traced(), batch()
    loss = {"huber": {"delta": 0.3, "schedule": "exponential"}}
    got = ready(module, scheduler="FlowMatchEulerDiscreteScheduler", loss=loss).loss(module, b, Draws(0, 7))
    scheduler = FlowMatchEulerDiscreteScheduler()
    u, noise = drawn(4, (3, SIDE, SIDE))
    index = (u * 1000).long()
    sigma = scheduler.sigmas[index].view(-1, 1, 1, 1)
    noisy = (1 - sigma) * b["image"] + sigma * noise
    difference = unet()(noisy, scheduler.timesteps[index], None, return_dict=False)[0] - (noise - b["image"])
    c = 0.3**sigma
    torch.testing.assert_close(got, (2 * c * (torch.sqrt(difference**2 + c**2) - c)).mean(), rtol=1e-5, atol=0)


def test_a_schedule_where_there_is_noise_alone_has_a_finite_loss():
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "rescale_betas_zero_snr": True}
    for scheduler in ({"DDPMScheduler": betas}, "FlowMatchEulerDiscreteScheduler"):
        flow = scheduler == "FlowMatchEulerDiscreteScheduler"
        loss = {"huber": {"schedule": "snr"}}
        task = ready(traced(), scheduler=scheduler, prediction=None if flow else "v_prediction", loss=loss)
        deltas = task._delta(torch.arange(task.noise.steps))
        assert deltas.min() == pytest.approx(0.1) and deltas.isfinite().all() and deltas.max() <= 1


def test_a_test_has_the_kind_of_the_loss():
    module, b = traced(), batch()
    losses = ("mse", {"smooth_l1": {"delta": 2.0}})
    found = [compute_means(ready(module, loss=loss).test(module, [dict(b)]))["loss"] for loss in losses]
    assert found[0] != found[1]


WRONG = {
    "loss: no loss 'hubert' (did you mean 'huber'?); there are mse, huber, smooth_l1": {"loss": "hubert"},
    "loss: mse has no option 'delta'": {"loss": {"mse": {"delta": 1}}},
    "loss: huber has no option 'detla' (did you mean 'delta'?)": {"loss": {"huber": {"detla": 1}}},
    "loss.huber.delta: must be a number, above 0": {"loss": {"huber": {"delta": 0}}},
    "loss.huber.schedule: must be one of constant, exponential, snr, not 'srn' (did you mean 'snr'?)":
        {"loss": {"huber": {"schedule": "srn"}}},
    "loss.huber.schedule: must be one of constant, exponential, snr, not ['snr']": {"loss": {"huber": {"schedule": ["snr"]}}},
    "loss: must not be empty": {"loss": ""},
    "noise_offset: must be 0.0 or more, not -0.1": {"noise_offset": -0.1},
    "noise_offset: must be a finite number": {"noise_offset": math.nan},
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_loss_is_said(text):
    with pytest.raises(SpecError, match=re.escape(text)):
        Denoise(**WRONG[text])


# --- noise with an offset


def test_offset_noise_is_one_number_a_sample_and_channel():
    for shape in ((4, 3, 5, 6), (2, 3, 2, 5, 6)):
        noise = Draws(0, 1).normal(*shape)
        moved = add_offset(noise, Draws(0, 2), 0.5) - noise
        drawn_here = 0.5 * Draws(0, 2).normal(*shape[:2], *[1] * (len(shape) - 2))
        torch.testing.assert_close(moved, drawn_here.expand(shape), rtol=0, atol=1e-6)
    assert add_offset(noise, None, 0.0) is noise


def test_offset_noise_is_what_is_added_and_learnt():
    """noise += offset * randn(b, c, 1, 1), as in diffusers' train_text_to_image.py."""
    module, b = traced(), batch()
    got = ready(module, noise_offset=0.1).loss(module, b, Draws(0, 7))
    draw = Draws(0, 7)
    u, noise = draw.uniform(4), draw.normal(4, 3, SIDE, SIDE)
    noise = noise + 0.1 * draw.normal(4, 3, 1, 1)
    timesteps = (u * 1000).long()
    noisy = DDPMScheduler().add_noise(b["image"], noise, timesteps)
    difference = unet()(noisy, timesteps, None, return_dict=False)[0] - noise
    torch.testing.assert_close(got, difference.square().mean(), rtol=1e-5, atol=0)


def test_without_options_the_draws_are_those_of_before():
    """Position, noise, and whether the caption is dropped, in this order."""
    drawn_here = []

    class Listed(Draws):
        def _rows(self, kind, draw, shape):
            drawn_here.append((kind, shape))
            return super()._rows(kind, draw, shape)

    module = traced()
    ready(module).loss(module, batch(), Listed(0, 7))
    assert drawn_here == [("uniform", (4,)), ("normal", (4, 3, SIDE, SIDE)), ("uniform", (4,))]


# --- the mean over a batch


def test_the_mean_of_a_batch_has_the_scales_of_its_samples():
    losses = torch.tensor([1.0, 3.0])
    assert compute_mean(losses, {}).item() == 2.0
    assert compute_mean(losses, {"loss_scale": torch.tensor([0.0, 2.0])}).item() == 3.0
