"""Pictures encoded before a run, into a cache: then its steps decode no files, and run no VAE."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from ..core.errors import TrainError
from .data.image_files import Unreadable
from .data.image_sources import PlacedImage
from .data.loader import Loader
from .encoded_cache import EncodedCache
from .tasks.task import Batch

MINUTE = 60.0  # seconds from one line of a log file to the next
Encode = Callable[[Tensor], Any]


@dataclass(frozen=True)
class AllEncoded:
    """Tells a loader which samples need no pixels: those whose image, or video, is in a cache; `others` looks at the rest."""

    cache: EncodedCache
    others: Callable[[dict[str, Any]], bool] | None = None

    def __call__(self, item: dict[str, Any]) -> bool:
        image: PlacedImage = item["image"] if "image" in item else item["video"]
        return self.cache.has(image.key) and (self.others is None or self.others(item))


def encode_images(
    loader: Any,
    cache: EncodedCache | None,
    encode: Encode,
    *,
    others: Callable[[dict[str, Any]], bool] | None = None,
    each: Callable[[Batch], object] | None = None,
    quiet: bool = False,
) -> bool:
    """Encode what a cache lacks of a loader's images or videos, and let the loader leave out the pixels of those in it.

    Each process does its part of the samples. From then on `image` (or `video`), and `condition`, of a batch are lists of
    `PlacedImage`, which `encode_batch` takes; also of those that could not be written.

    Args:
        loader: The loader. One whose pixels do not depend on files alone (`Loader.has_files`), or that has prior images, stays
            as it is.
        cache: The cache; None leaves the loader as it is.
        encode: What makes a value of pixels float32 [1, c, h, w], or [1, c, f, h, w] of a video. It is given one sample at a
            time, here and in `encode_batch`: models round differently in batches of other sizes.
        others: Whether the rest of a sample (its condition, its caption) needs no pixels either.
        each: What is called with each sample as a batch of one, such as what encodes captions.
        quiet: Whether nothing is printed.

    Returns:
        Whether the loader leaves out pixels.

    Raises:
        TrainError: More samples cannot be read than `max_corrupt` says.
    """
    if cache is None or not isinstance(loader, Loader) or not loader.has_files or loader.prior is not None:
        return False
    loader.skip_decoding = AllEncoded(cache, others)
    walk = loader.in_order()
    console = Console(stderr=True)
    progress = Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeRemainingColumn(compact=True), TextColumn("left")),
        console=console,
        transient=True,
        auto_refresh=False,  # its thread may hold a lock while a worker process is forked
        redirect_stdout=sys.stdout.isatty(),
        disable=quiet or not console.is_terminal,
    )
    with progress:
        shown, said, task = 0.0, time.monotonic(), progress.add_task("encoding", total=walk.steps)
        for batch in walk.epoch(0):
            for image in _images(batch):
                for view in (image, image.mirrored()) if "flipped" in batch else (image,):
                    if not cache.has(view.key):
                        cache.put(view.key, _encode(encode, view))
            if each is not None:
                each(batch)
            if not cache.writable:
                break  # the rest would be made for nothing
            progress.advance(task)
            if time.monotonic() - shown > 0.2:
                shown = time.monotonic()
                progress.refresh()
            if progress.disable and not quiet and time.monotonic() - said > MINUTE:
                said = time.monotonic()
                console.print(f"encoding {progress.tasks[task].completed:g}/{walk.steps}", highlight=False, soft_wrap=True)
    walk.close()
    return True


def encode_batch(batch: Batch, cache: EncodedCache | None, encode: Encode) -> list[Any]:
    """Return what `encode` makes of each image or video of a batch, from the cache where it is.

    Args:
        batch: With `image` or `video` as a list of `PlacedImage`, or as a tensor, which is encoded row by row.
        cache: The cache that `encode_images` filled; None where it left the loader as it was.
        encode: As there.

    Returns:
        A value for each sample.

    Raises:
        TrainError: A file has gone, or changed, since the loader looked at it.
    """
    images = _images(batch)
    if cache is None or isinstance(images, Tensor):
        return [encode(row[None]) if isinstance(row, Tensor) else _encode(encode, row) for row in images]
    return [cache.get_or_make(image.key, partial(_encode, encode, image)) for image in images]


def _encode(encode: Encode, image: PlacedImage) -> Any:
    with check_still_readable():
        return encode(image.read()[None])


@contextlib.contextmanager
def check_still_readable() -> Iterator[None]:
    """Raise TrainError, inside the context, for an image that could be read when the loader looked at it, and cannot now."""
    try:
        yield
    except Unreadable as error:
        raise TrainError(f"{error.name} cannot be read any more: {error.why}") from error


def _images(batch: Batch) -> Any:
    found: Sequence[PlacedImage] | Tensor = batch["image"] if "image" in batch else batch["video"]
    return found
