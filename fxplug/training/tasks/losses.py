"""Losses of predictions and their targets, one for each sample: what the tasks of denoisers share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import SpecError, did_you_mean, quote
from ...core.spec.pass_file import check_known
from ...core.spec.yaml_source import check_number
from ..train_section import Use
from .task import Batch

HUBER: dict[str, Any] = {"delta": 0.1, "schedule": "constant"}
LOSSES: dict[str, dict[str, Any]] = {"mse": {}, "huber": HUBER, "smooth_l1": HUBER}
MSE = Use("mse", {})
SCHEDULES = ("constant", "exponential", "snr")


def read_loss(use: Use) -> Use:
    """Return the kind of the loss, with all its options. Raises SpecError for an unknown one."""
    if use.name not in LOSSES:
        hint = f"{did_you_mean(use.name, LOSSES)}; there are {', '.join(LOSSES)}"
        raise SpecError(f"no loss '{use.name}'{hint}", path=("loss",))
    check_known(use.options, LOSSES[use.name], f"{use.name} has no option", path=("loss",))
    found = {**LOSSES[use.name], **use.options}
    if found:
        check_number(found["delta"], "loss", use.name, "delta", above=0, most=1e4)
        if found["schedule"] not in SCHEDULES:
            near = did_you_mean(found["schedule"], SCHEDULES) if isinstance(found["schedule"], str) else ""
            finding = f"must be one of {', '.join(SCHEDULES)}, not {quote(found['schedule'])}{near}"
            raise SpecError(finding, path=("loss", use.name, "schedule"))
    return Use(use.name, found)


def compute_huber_delta(loss: Use, share: Tensor, ratio: Tensor) -> Tensor:
    """Return where the loss of each sample turns from a square to an absolute value, float32 [b] (arXiv 2403.16728).

    Args:
        loss: What `read_loss` gave of `huber` or `smooth_l1`.
        share: How far each sample is from data (0) to noise (1), float32 [b].
        ratio: The deviation of its noise over that of its data, float32 [b].

    Returns:
        `delta` itself; with `exponential` delta to the power of the share; with `snr` what falls from 1 to delta with the
        ratio.
    """
    constant = torch.full_like(share, loss.options["delta"])
    if loss.options["schedule"] == "exponential":
        return constant**share
    return (1 - constant) / (1 + ratio) ** 2 + constant if loss.options["schedule"] == "snr" else constant


def compute_losses(predicted: Tensor, target: Tensor, batch: Batch, loss: Use, delta: Tensor | None = None) -> Tensor:
    """Compute the loss of each sample: the mean over all but its first dimension.

    Where the batch has a `loss_mask`, [b, 1, h, w] in [0, 1], it is resized to the height and width of the predictions, as
    means over areas, and multiplies the loss of each place before the mean, as kohya's scripts have it.

    `huber` is the pseudo-Huber loss 2 d (sqrt(x^2 + d^2) - d) of the differences x, which is x^2 for small ones; `smooth_l1`
    the same without its first d, as diffusers' training scripts and kohya's have them.

    Args:
        predicted: What the model gave, [b, ...].
        target: What it should give, [b, ...].
        batch: The batch.
        loss: What `read_loss` gave.
        delta: d of each sample, float32 [b]; for `huber` and `smooth_l1`.

    Returns:
        Float32 [b].

    Raises:
        SpecError: There is a mask of another shape, or the predictions have no height and width.
    """
    difference = predicted.float() - target.float()
    each = difference.square()
    if loss.name != "mse" and delta is not None:
        d = delta.reshape(-1, *[1] * (each.dim() - 1))
        each = 2 * ((each + d**2).sqrt() - d)
        each = each * d if loss.name == "huber" else each
    if "loss_mask" in batch:
        each = each * _resized(batch["loss_mask"], each)
    return each.flatten(1).mean(1)


def _resized(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask [b, 1, h, w] in the height and width of predictions [b, c, ..., h, w], and shaped to multiply them."""
    if mask.dim() != 4 or mask.shape[:2] != (len(like), 1):
        finding = f"'loss_mask' must be [{len(like)}, 1, height, width] for {len(like)} samples, not {list(mask.shape)}"
        raise SpecError(finding, path=("data",))
    if like.dim() < 4:
        finding = f"predictions of shape {list(like.shape)} have no height and width, to which a mask could be resized"
        raise SpecError(finding, path=("data", "masks"))
    resized = F.interpolate(mask.float(), like.shape[-2:], mode="area")
    return resized.reshape(len(like), *[1] * (like.dim() - 3), *like.shape[-2:])


def add_offset(noise: Tensor, draw: Any, offset: float) -> Tensor:
    """Add to noise [b, c, ...] one number for each sample and channel, drawn with the deviation `offset`.

    A model that has learnt with it draws pictures that are darker and brighter as a whole (Guttenberg 2023, "Diffusion With
    Offset Noise"; `noise_offset` of diffusers' training scripts). With 0 nothing is drawn.
    """
    if not offset:
        return noise
    every = (slice(None), slice(None), *[slice(1)] * (noise.dim() - 2))
    drawn: Tensor = draw.like(noise[every])
    return noise + offset * drawn


def compute_mean(losses: Tensor, batch: Batch) -> Tensor:
    """Return the mean over the samples of a batch, weighted by its `loss_scale` where it has one.

    Samples that are prior images (`prior`, bool [b]) count beside the others: the sum of both is divided by the number of the
    others. With the weight w in `loss_scale` that is mean(own) + w * mean(prior), as in DreamBooth (arXiv 2208.12242).

    Args:
        losses: The loss of each sample, float32 [b].
        batch: The batch.

    Returns:
        A scalar.
    """
    losses = losses * batch["loss_scale"] if "loss_scale" in batch else losses
    return losses.sum() / (~batch["prior"]).sum() if "prior" in batch else losses.mean()
