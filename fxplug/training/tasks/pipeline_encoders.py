"""The models of a pipeline that encode, on the device of a run only while it needs them; and what its VAE makes of pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import SpecError, get_first_line
from ...pipelines.observation import Observation
from ...pipelines.recorded_run import get_components
from ..data.image_sources import PlacedImage
from .model_call import find_tensor, get_images
from .task import Batch

Size = tuple[int, ...]  # height and width; frames, height and width of videos


class Encoders:
    """The models of a pipeline beside the one that trains, which wait on the CPU while a run on another device does without."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        """Take a pipeline whose models are on the device of the run."""
        self.pipe, self.device = pipe, device
        self.away: tuple[str, ...] = ()

    def leave(self, part: str) -> None:
        """Move all models but `part` to the CPU, those that can be moved; a run on the CPU moves none."""
        if self.device.type != "cpu":
            parts = get_components(self.pipe)
            held = {id(parameter) for parameter in parts[part].parameters()}
            others = [name for name, other in parts.items() if name != part and _can_move(other, held)]
            self._move_away(others)

    def _move_away(self, names: Iterable[str]) -> None:
        self.away = tuple(names)
        for name in self.away:
            get_components(self.pipe)[name].to("cpu")

    def bring_back(self) -> None:
        """Move what has left to the device of the run, where it stays."""
        parts, away = get_components(self.pipe), self.away
        self.away = ()
        for name in away:
            parts[name].to(self.device)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Have all models on the device of the run inside the context."""
        away = self.away
        self.bring_back()
        try:
            yield
        finally:
            self._move_away(away)

    @torch.no_grad()
    def latents(self, image: Tensor, seen: Observation) -> dict[str, Tensor]:
        """Encode one picture or video by the pipeline's VAE.

        Args:
            image: Float32 [1, c, h, w], or [1, c, f, h, w] of a video, in [-1, 1].
            seen: What is known of the pipeline.

        Returns:
            `mean` and `std` of the distribution that the VAE gives, or its `latents` where it gives none: float32 [c, ...], on
            the CPU.

        Raises:
            SpecError: It does not encode pictures of this size.
        """
        if seen.vae in self.away:
            self.bring_back()
        vae = get_components(self.pipe)[seen.vae]
        frames = find_tensor([seen.to_decoder.like]).dim() == 5
        dtype = next((p.dtype for p in vae.parameters()), torch.float32)
        image = image.to(self.device)
        with torch.autocast(self.device.type, enabled=False):
            try:
                found = vae.encode((image[:, :, None] if frames and image.dim() == 4 else image).to(dtype))
            except RuntimeError as error:
                sides = "x".join(str(side) for side in image.shape[2:])
                raise SpecError(f"{seen.vae} does not encode pictures of {sides}: {get_first_line(error)}",
                                path=("data", "size")) from error  # fmt: skip
            inside = getattr(found, "latent_dist", found)
            if hasattr(inside, "mean") and hasattr(inside, "std") and not isinstance(inside, Tensor):
                made = {"mean": inside.mean, "std": inside.std}
            else:
                made = {"latents": find_tensor(inside)}
        return {name: value[0].float().cpu() for name, value in made.items()}


def _can_move(part: Any, held: set[int]) -> bool:
    """Return whether a part is a model that may be moved: not one whose packed weights stay, that moves by itself, or that
    shares a parameter with what trains, whose ids are `held`."""
    if not isinstance(part, nn.Module) or any(getattr(part, name, None) for name in ("hf_quantizer", "_hf_hook")):
        return False
    return not any(id(parameter) in held for parameter in part.parameters())


def draw_sample(rows: Sequence[Mapping[str, Tensor]], draw: Any, device: torch.device) -> Tensor:
    """Draw a sample of what a VAE has made of each picture.

    Args:
        rows: What `Encoders.latents` gave.
        draw: What the samples come from; nothing is drawn where there are latents.
        device: Where the result is.

    Returns:
        Latents [b, c, ...] as the VAE has them, float32.
    """
    made = {name: torch.stack([row[name] for row in rows]).to(device, non_blocking=True) for name in rows[0]}
    if "latents" in made:
        return made["latents"]
    drawn: Tensor = made["mean"] + made["std"] * draw.like(made["mean"])
    return drawn


def get_pictures(batch: Batch) -> Tensor | list[PlacedImage]:
    """Return the pictures or videos of a batch, decoded or not. Raises SpecError for data without."""
    found: Tensor | list[PlacedImage] = batch["video"] if "video" in batch and "image" not in batch else get_images(batch)
    return found


def get_size(batch: Batch) -> Size:
    """Return the size of the pictures or videos of a batch. Raises SpecError for data without."""
    found = get_pictures(batch)
    return tuple(found.shape[2:]) if isinstance(found, Tensor) else found[0].sides
