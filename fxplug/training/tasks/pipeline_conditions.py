"""What the denoiser of a pipeline is called with for the samples of a batch: captions, pictures beside them, sizes."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from ...core.errors import SpecError
from ...pipelines.denoiser_call import DenoiserCall, SampleCondition
from ...pipelines.opening import call_parameters
from ..data.image_sources import PlacedImage
from ..image_encoding import check_still_readable
from .pipeline_encoders import Encoders, get_pictures
from .pipeline_text import TrainedText
from .task import Batch

# the arguments of pipelines that take a picture beside the caption, the likeliest first
PICTURES = ("image", "control_image", "mask_image", "video", "control_video", "mask", "reference_images", "image_reference")
FRAMES = ("video", "control_video")  # which take a list of pictures
MASK, MASKED = "mask_image", "image"  # of inpainting: the mask is the condition, and what it is of the picture itself
LIMIT = 2 << 30  # bytes of encoded conditions that are kept in memory
# arguments in which a pipeline is told of a picture's own size and place, by what the data calls these
SIZES = {"original_size": "original_size", "crops_coords_top_left": "crop"}
Picture = Image.Image | PlacedImage


class Store(Protocol):
    """Place where values of tensors and plain data are kept by a key, such as a cache on the disk."""

    def get(self, key: Any) -> Any:
        """Return the value of a key, None if it is not there."""

    def put(self, key: Any, value: Any) -> Any:
        """Keep a value."""


class MemoryStore:
    """Conditions in the memory of the process, up to `limit` bytes: those used longest ago go first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.size = limit, 0
        self.kept: OrderedDict[str, SampleCondition] = OrderedDict()

    def get(self, key: str) -> SampleCondition | None:
        """Return the condition of a key, None if it is not there."""
        found = self.kept.get(key)
        if found is not None:
            self.kept.move_to_end(key)
        return found

    def put(self, key: str, value: SampleCondition) -> None:
        """Keep a condition, unless it is larger than the limit."""
        if key in self.kept or value.nbytes > self.limit:
            return
        self.kept[key] = value
        self.size += value.nbytes
        while self.size > self.limit:
            self.size -= self.kept.popitem(last=False)[1].nbytes


def find_picture_argument(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Return the argument in which a pipeline takes the picture that a sample has beside its caption.

    Args:
        pipe: The pipeline.
        call: What it is called with already.

    Returns:
        `image`, or the only one of `PICTURES` that the pipeline takes and the call does not give; the mask of one that paints
        into a picture, which is then the sample's own; None for none.

    Raises:
        SpecError: There are several.
    """
    free = [name for name in PICTURES if name in call_parameters(pipe) and name not in call]
    if MASK in free and MASKED in free:
        return MASK
    if "image" in free or len(free) < 2:
        return free[0] if free else None
    raise SpecError(f"a condition of {type(pipe).__name__} could be its {' or '.join(free)}: give all but one in 'call'",
                    path=("model", "call"))  # fmt: skip


def as_pictures(condition: Tensor) -> list[Image.Image]:
    """Return the pictures of a batch of conditions [b, c, h, w] in [0, 1]."""
    whole = (condition.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    rows = (row.permute(1, 2, 0).numpy() for row in whole)
    return [Image.fromarray(row[:, :, 0] if row.shape[2] == 1 else row[:, :, :3]).convert("RGB") for row in rows]


def make_picture_arguments(argument: str | None, picture: Image.Image, own: Image.Image | None = None) -> dict[str, Any]:
    """Return the arguments of a pipeline for a sample's condition.

    Args:
        argument: What `find_picture_argument` has found.
        picture: The condition.
        own: The sample's own picture, for a mask.

    Returns:
        The arguments by name.
    """
    if argument is None:
        return {}
    if argument == MASK:
        return {MASK: picture.convert("L"), MASKED: own}
    return {argument: [picture] if argument in FRAMES else picture}


class Conditions:
    """The conditions of samples of one size, each encoded once by the pipeline itself; anew each time where its text encoders
    train."""

    def __init__(
        self,
        pipe: Any,
        call: DenoiserCall,
        argument: str | None,
        memory: MemoryStore,
        store: Store | None,
        device: torch.device,
        encoders: Encoders,
    ) -> None:
        """Take the calls' form; `argument` is that for pictures, `device` where batches are. What is in `store` is there in
        later runs, too."""
        self.pipe, self.call, self.argument, self.device, self.encoders = pipe, call, argument, device, encoders
        self.memory, self.store = memory, store
        self.text: TrainedText | None = None
        known = call_parameters(pipe)
        given = call.observation.call
        self.sizes = {name: key for name, key in SIZES.items() if name in known and name not in given}
        own = ("prompt", argument, *([MASKED] if argument == MASK else []))  # what each sample has of its own
        kept = sorted((name, _named(value)) for name, value in given.items() if name not in own)
        self.prefix = f"{type(pipe).__name__} {call.observation.part} {kept}"

    def with_text(self, text: TrainedText | None) -> Conditions:
        """Return the conditions as text encoders that train make them, which encode instead of the pipeline's own."""
        made = copy.copy(self)
        made.text = text
        return made

    def of(self, batch: Batch, captions: Sequence[str]) -> list[SampleCondition]:
        """Return the condition of each sample of a batch.

        Args:
            batch: The batch, with `condition` where the pipeline takes pictures, decoded or not.
            captions: Their captions.

        Returns:
            The conditions, on the device of the batches.

        Raises:
            SpecError: The pipeline does not take them.
            TrainError: A picture's file cannot be read any more.
        """
        rows, pictures = self._arguments(batch, len(captions)), self.pictures(batch, len(captions))
        return [self.one(caption, row, own) for caption, row, own in zip(captions, rows, pictures, strict=True)]

    def one(self, caption: str, arguments: Mapping[str, Any], pictures: Sequence[Picture] = ()) -> SampleCondition:
        """Return the condition of a caption, and of what the pipeline is called with beside it.

        Args:
            caption: The caption.
            arguments: Arguments of the pipeline.
            pictures: The sample's condition and, for a mask, its own picture. They are decoded only where the condition is not
                known yet.

        Returns:
            The condition, on the device of the batches.

        Raises:
            SpecError: The pipeline does not take them.
            TrainError: A picture's file cannot be read any more.
        """
        if self.text is not None:
            self.encoders.bring_back()
            given = {**self.prompt(caption), **arguments, **self.picture_arguments(pictures)}
            with self.encoders.cut.watch(caption):
                return self.text.encode(self.call, given).to(self.device)
        parts = [self.prefix, caption]
        for name, value in arguments.items():
            parts.append(f"{name} {_named(value)}")
        parts += [f"{self.argument} {_named(picture)}" for picture in pictures]
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        found = self.memory.get(key)
        if found is None:
            kept = self.store.get(["condition", key]) if self.store is not None else None
            if kept is not None:
                found = SampleCondition(**kept)
            else:
                self.encoders.bring_back()
                given = {**self.prompt(caption), **arguments, **self.picture_arguments(pictures)}
                with torch.autocast(self.device.type, enabled=False), self.encoders.cut.watch(caption):
                    found = self.call.encode(**given).to(torch.device("cpu"))
                if self.store is not None:
                    self.store.put(["condition", key], {"call": found.call, "form": found.form, "own": found.own})
            self.memory.put(key, found)
        return found if self.device.type == "cpu" else found.to(self.device)

    def prompt(self, caption: str) -> dict[str, Any]:
        """Return the argument of a caption; none where the pipeline takes no captions."""
        return {"prompt": caption} if "prompt" in self.call.observation.call else {}

    def _arguments(self, batch: Batch, count: int) -> list[dict[str, Any]]:
        """Return what the pipeline is called with for each sample beside its caption."""
        rows: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, key in self.sizes.items():
            if key in batch:
                for row, value in zip(rows, batch[key].tolist(), strict=True):
                    row[name] = tuple(int(number) for number in value)
        return rows

    def picture_arguments(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """Return the arguments of the pipeline for the pictures of a sample. Raises TrainError for one that cannot be read any
        more."""
        return make_picture_arguments(self.argument, *map(_opened, pictures)) if pictures else {}

    def pictures(self, batch: Batch, count: int) -> list[Sequence[Picture]]:
        """Return the condition of each sample, with its own picture where that is a mask; none without conditions."""
        if self.argument is None or "condition" not in batch:
            return [()] * count
        given = [batch["condition"], *([get_pictures(batch)] if self.argument == MASK else [])]
        scaled = [value / 2 + 0.5 if place and isinstance(value, Tensor) else value for place, value in enumerate(given)]
        each = [as_pictures(value) if isinstance(value, Tensor) else value for value in scaled]
        return list(zip(*each, strict=True))


def _named(value: Any) -> str:
    """Return a text that differs for other arguments: of pictures for other pixels. Raises TrainError."""
    if isinstance(value, PlacedImage):
        with check_still_readable():
            return json.dumps(value.key, sort_keys=True)
    if isinstance(value, Image.Image):
        return f"{value.mode} {value.size} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return f"[{', '.join(map(_named, value))}]" if isinstance(value, list) else repr(value)


def _opened(picture: Picture) -> Image.Image:
    """Return a picture with its pixels. Raises TrainError where it cannot be read any more."""
    if not isinstance(picture, PlacedImage):
        return picture
    with check_still_readable():
        pixels = picture.read()[None]
    return as_pictures(pixels if picture.kind == "condition" else pixels / 2 + 0.5)[0]


def group(conditions: Sequence[SampleCondition], alone: bool = False) -> list[list[int]]:
    """Group samples whose conditions have one form.

    Args:
        conditions: Those of the samples of a batch.
        alone: Whether a part of a batch is one sample: a graph holds for one number of entries in a list.

    Returns:
        The numbers of the samples of each group, in order of the first of each form.
    """
    groups: dict[str, list[int]] = {}
    for number, condition in enumerate(conditions):
        groups.setdefault(condition.form, []).append(number)
    if alone and len(groups) > 1:
        return [[number] for number in range(len(conditions))]
    return list(groups.values())
