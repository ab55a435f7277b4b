"""The models of a pipeline that encode, on the device of a run only while it needs them; and what its VAE makes of pictures."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import SpecError, get_first_line
from ...core.torch_internals import trees as pytree
from ...core.torch_internals.modules import replace_forward
from ...lowerings.regions.swapping import BlockSwap
from ...pipelines.observation import Observation
from ...pipelines.recorded_run import get_components
from ..data.image_sources import PlacedImage
from .cut_captions import CutCaptions
from .model_call import find_tensor, get_images
from .task import Batch

Size = tuple[int, ...]  # height and width; frames, height and width of videos


class Encoders:
    """The models of a pipeline beside the one that trains, which wait on the CPU while a run on another device does without."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        """Take a pipeline whose models are on the device of the run."""
        self.pipe, self.device, self.cut = pipe, device, CutCaptions(pipe)
        self.away: tuple[str, ...] = ()

    def leave(self, *kept: str) -> None:
        """Move all models but `kept`, which train, to the CPU, those that can be moved; a run on the CPU moves none."""
        if self.device.type != "cpu":
            parts = get_components(self.pipe)
            held = {id(parameter) for part in kept for parameter in parts[part].parameters()}
            others = [name for name, other in parts.items() if name not in kept and _can_move(other, held)]
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


@contextlib.contextmanager
def compute_in_precision(part: nn.Module, device: str, dtype: torch.dtype, result: torch.dtype | None = None) -> Iterator[None]:
    """Let a model compute under autocast in a context, wherever it is called.

    Args:
        part: The model.
        device: The type of the device, such as `cuda`.
        dtype: The dtype of autocast.
        result: The dtype that floating-point results are converted to; None leaves them.

    Yields:
        Nothing.
    """
    forward = part.forward

    @functools.wraps(forward)
    def in_precision(*args: Any, **named: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            found = forward(*args, **named)
        if result is None:
            return found
        return pytree.tree_map_only(Tensor, lambda t: t.to(result) if t.is_floating_point() else t, found)

    with replace_forward(part, in_precision):
        yield


def get_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model: that of its first floating-point parameter, float32 without any."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def move_parts(pipe: Any, device: torch.device, swap: BlockSwap | None) -> None:
    """Move the models of a pipeline to a device, but for the weights of one of them that a swap has on the host.

    Args:
        pipe: The pipeline.
        device: The device.
        swap: What has weights of a denoiser on the host; None where there are none.
    """
    if swap is None:
        pipe.to(device)
        return
    for part in get_components(pipe).values():
        if isinstance(part, nn.Module):
            swap.place(part)


@contextlib.contextmanager
def with_swapped_weights(swap: BlockSwap | None, pipe: Any) -> Iterator[None]:
    """Let the models of a pipeline fetch their weights from the host inside the context.

    Args:
        swap: What has the weights of one of them on the host; None where there are none.
        pipe: The pipeline.
    """
    parts = [part for part in get_components(pipe).values() if isinstance(part, nn.Module)]
    with contextlib.nullcontext() if swap is None else swap.fetching(*parts):
        yield


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
