"""How good samples are: what a classifier of the real images takes them for, and whether they have the edges asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from garments import CLASSES, outline
from PIL import Image
from torch import Tensor, nn

from fxplug import Task

BATCH = 60  # the graph has the branch of diffusers' upsampling that is for fewer than 64


@torch.no_grad()
def sampled(
    task: Task, module: nn.Module, captions: Sequence[str], condition: Tensor | None = None, strength: float = 1.0
) -> Tensor:
    """Images [n, 1, 28, 28] in [0, 1] of the captions, with the edges `condition` of that shape; always from the same noise."""
    module.eval()
    call, made = module, []
    if condition is not None:
        call = functools.partial(module, strength=torch.tensor(strength, device=task.info.device))
    for at in range(0, len(captions), BATCH):
        given = {"caption": list(captions[at : at + BATCH])}
        if condition is not None:
            given["condition"] = condition[at : at + BATCH]
        made.append(task.generate(call, given, seed=at).cpu())
    return torch.cat(made)


@torch.no_grad()
def recognised(classifier: nn.Module, images: Tensor, captions: Sequence[str]) -> dict[str, float]:
    """For each class among the captions the share of its images that the classifier takes for it."""
    device = next(classifier.parameters()).device
    found = torch.cat([classifier(part.to(device) * 2 - 1).argmax(1).cpu() for part in images.split(250)])
    right = found == torch.tensor([CLASSES.index(caption) for caption in captions])
    names = np.array(captions)
    return {name: right[names == name].float().mean().item() for name in dict.fromkeys(captions)}


def listed(shares: dict[str, float]) -> str:
    """The mean of such shares, and each, as text."""
    each = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return f"{sum(shares.values()) / len(shares):.1%} recognised; {each}"


def agreement(images: Tensor, condition: Tensor) -> float:
    """How well images have the edges of their condition, both [n, 1, h, w] in [0, 1]: the mean F1 of edge pixels.

    1 is every pixel of them and no other; one that is a pixel away counts as wrong.
    """
    made, wanted = torch.from_numpy(outline(images.numpy())), condition > 0.5
    both, all_of_them = (made & wanted).sum((1, 2, 3)), made.sum((1, 2, 3)) + wanted.sum((1, 2, 3))
    return (2 * both / all_of_them.clamp(min=1)).mean().item()


def sheet(rows: Sequence[Tensor], file: str) -> None:
    """A picture with a row for each [n, 1, 28, 28], in twice its size."""
    joined = torch.cat([torch.cat(list(row[:, 0]), 1) for row in rows])
    picture = Image.fromarray((joined * 255).round().byte().numpy())
    picture.resize((picture.width * 2, picture.height * 2), Image.Resampling.NEAREST).save(file)
