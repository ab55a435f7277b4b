"""Losses beside those of kohya's sd-scripts, whose functions are taken from a checkout and run: nothing of it is imported."""

from __future__ import annotations

import ast
import itertools
import math
import types
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from checkouts import checkout_of
from diffusers import DDPMScheduler

from fxplug.training.tasks.losses import compute_huber_delta, compute_losses, compute_mean, read_loss
from fxplug.training.tasks.noise import open_noise
from fxplug.training.train_section import Use

FILE = checkout_of("library/train_util.py") / "library" / "train_util.py"
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="needs a checkout of kohya-ss/sd-scripts below SEEDS")
SCHEDULES = ("constant", "exponential", "snr")
BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def theirs(*names: str) -> Any:
    """Functions of the file, run without what else it imports."""
    tree = ast.parse(FILE.read_text("utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    made: dict[str, Any] = {"torch": torch, "math": math, "Optional": Optional}
    exec(compile(tree, str(FILE), "exec"), made)
    return types.SimpleNamespace(**{name: made[name] for name in names})


def noise_of(name: str, **options: Any) -> Any:
    rest: dict[str, Any] = {"prediction": None, "latents": True, "snr_gamma": None, "weighting": "none", "time_scale": 1.0}
    return open_noise(Use(name, options), Path(), **rest)


@pytest.mark.parametrize(("name", "schedule"), [*itertools.product(("huber", "smooth_l1"), SCHEDULES)])
def test_huber_and_its_schedules(name, schedule):
    peer = theirs("get_huber_threshold_if_needed", "conditional_loss")
    scheduler = DDPMScheduler(**BETAS)
    noise = noise_of("DDPMScheduler", **BETAS)
    draw = torch.Generator().manual_seed(3)
    for delta in (0.05, 0.1, 0.7):
        times = torch.randint(0, 1000, (6,), generator=draw)
        times[:2] = torch.tensor([0, 999])
        predicted, target = torch.randn(2, 6, 4, 5, 5, generator=draw).unbind()
        loss = read_loss(Use(name, {"delta": delta, "schedule": schedule}))
        ours = compute_huber_delta(loss, noise.share(times), noise.ratio(times))
        args = types.SimpleNamespace(loss_type=name, huber_schedule=schedule, huber_c=delta, huber_scale=1.0)
        limit = peer.get_huber_threshold_if_needed(args, times, scheduler)
        torch.testing.assert_close(ours, limit.float(), rtol=2e-6, atol=0)
        each = peer.conditional_loss(predicted, target, name, "none", limit).mean([1, 2, 3])
        torch.testing.assert_close(compute_losses(predicted, target, {}, loss, ours), each.float(), rtol=1e-5, atol=1e-7)


def test_an_exponential_schedule_of_flow_matching():
    """Whose times are a thousand times the share of noise; a schedule by signal to noise they have of betas alone."""
    peer = theirs("get_huber_threshold_if_needed")
    noise = noise_of("FlowMatchEulerDiscreteScheduler", shift=3.0)
    index = torch.tensor([0, 10, 400, 999])
    args = types.SimpleNamespace(loss_type="huber", huber_schedule="exponential", huber_c=0.2, huber_scale=1.0)
    scheduler = types.SimpleNamespace(config=types.SimpleNamespace(num_train_timesteps=1000))
    limit = peer.get_huber_threshold_if_needed(args, noise.time(index).float(), scheduler)
    loss = read_loss(Use("huber", {"delta": 0.2, "schedule": "exponential"}))
    torch.testing.assert_close(compute_huber_delta(loss, noise.share(index), noise.ratio(index)), limit, rtol=2e-6, atol=0)


def test_mean_squares_are_theirs_and_the_prior_is_that_of_dreambooth():
    """In their batches images of the class and others are one list, divided by its length: ours, of pairs, is twice that."""
    peer = theirs("conditional_loss")
    draw = torch.Generator().manual_seed(4)
    predicted, target = torch.randn(2, 6, 4, 5, 5, generator=draw).unbind()
    each = peer.conditional_loss(predicted, target, "l2", "none").mean([1, 2, 3])
    ours = compute_losses(predicted, target, {}, read_loss(Use("mse", {})))
    torch.testing.assert_close(ours, each, rtol=1e-6, atol=0)
    prior, weight = torch.tensor([False, True] * 3), 0.3
    scales = torch.where(prior, weight, 1.0)
    mean = compute_mean(ours, {"prior": prior, "loss_scale": scales})
    torch.testing.assert_close(mean, 2 * (each * scales).mean(), rtol=1e-6, atol=0)
    # as diffusers' train_dreambooth.py adds the two means
    torch.testing.assert_close(mean, each[~prior].mean() + weight * each[prior].mean(), rtol=1e-6, atol=0)
