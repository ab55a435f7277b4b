"""Videos in folders: a folder of frames, an animated picture, or a video file."""

from __future__ import annotations

import io
import os
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image, ImageSequence

from ...core.errors import SpecError, format_fields
from .batch_order import Size
from .files import FileItems, list_image_suffixes, make_sort_key, walk_folders
from .image_files import WHITE, Unreadable, check_readable, prepare, read_image, read_size
from .image_sources import ImageSource, compute_digest, compute_file_digest, make_unreadable, remember

VIDEOS = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"})  # which the package av reads
ANIMATED = frozenset({".gif", ".webp", ".apng", ".avif", ".png"})  # which may have several pictures
SLACK = 1e-6  # seconds by which rounded times of frames may be off
Shown = tuple[float, Image.Image]  # how long a frame is shown, seconds


@dataclass(frozen=True)
class VideoFile(ImageSource):
    """The first `frames` frames of a video: of `files`, which are one picture each, or of the one file that `files` has.

    `fps` is how many of a second are taken, None for all there are; a file of a folder is one frame whatever it says.
    """

    files: tuple[Path, ...]
    name: str
    frames: int
    fps: float | None = None
    in_folder: bool = False
    channels: int = 3
    background: tuple[int, int, int] = WHITE

    __repr__ = format_fields

    @property
    def settings(self) -> tuple[Any, ...]:
        return (self.channels, *self.background, self.frames, None if self.in_folder else self.fps)

    def content(self) -> str:
        try:
            return _digest([compute_file_digest(file) for file in self.files[: self.frames]])
        except (OSError, ValueError) as error:
            raise make_unreadable(self.name, error) from error

    def size(self) -> Size:
        file = self.files[0]
        try:
            size: Size = remember(file, "size", file.stat(), self._size)
            return size
        except (OSError, ValueError, Unreadable):
            return (0, 0)

    def _size(self) -> Size:
        if self.files[0].suffix.lower() not in VIDEOS:
            return read_size(self.files[0])
        with check_readable(self.name):
            _, first = next(_decoded(self.files[0]))
            return first.height, first.width
        return (0, 0)

    def read_known(self) -> tuple[list[Image.Image], str]:
        try:
            data = [file.read_bytes() for file in self.files[: self.frames]]
        except (OSError, ValueError) as error:
            raise make_unreadable(self.name, error) from error
        digest = _digest([compute_digest(part) for part in data])
        if self.in_folder:
            found = [
                read_image(part, f"{self.name} ({file.name})", self.channels, self.background)
                for part, file in zip(data, self.files, strict=False)
            ]
        else:
            with check_readable(self.name, data[0]):
                read = _decoded if self.files[0].suffix.lower() in VIDEOS else _animated
                chosen = self._select_frames(read(io.BytesIO(data[0])))
                found = [prepare(image, self.channels, self.background) for image in chosen]
        if len(found) < self.frames:
            at = f" at {self.fps:g} a second" if self.fps is not None and not self.in_folder else ""
            raise Unreadable(self.name, f"it has {len(found)} frames{at}, and 'frames' is {self.frames}")
        if others := [image for image in found if image.size != found[0].size]:
            sizes = f"{found[0].height}x{found[0].width} and {others[0].height}x{others[0].width}"
            raise Unreadable(self.name, f"its frames have several sizes: {sizes}")
        return found, digest

    def _select_frames(self, frames: Iterable[Shown]) -> Iterator[Image.Image]:
        """Yield those frames that are taken: all, or those that are shown at each `fps`-th of a second."""
        end, taken = 0.0, 0
        for length, image in frames:
            end += length
            if self.fps is None:
                taken += 1
                yield image
            while self.fps is not None and taken < self.frames and taken / self.fps < end - SLACK:
                taken += 1
                yield image
            if taken == self.frames:
                return


def _digest(digests: list[str]) -> str:
    return digests[0] if len(digests) == 1 else compute_digest("".join(digests).encode())


def _animated(file: io.BytesIO) -> Iterator[Shown]:
    with Image.open(file) as image:
        for frame in ImageSequence.Iterator(image):
            frame.load()  # which is what sets how long it is shown
            yield frame.info.get("duration", 0) / 1000 or 0.1, frame.copy()


def _decoded(file: Path | io.BytesIO) -> Iterator[Shown]:
    """Yield the frames of a video file, upright."""
    import av

    with av.open(str(file) if isinstance(file, Path) else file) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        stream = container.streams.video[0]
        usual = 1 / float(stream.average_rate or stream.guessed_rate or 25)
        before: tuple[float, Image.Image] | None = None
        for frame in container.decode(stream):
            image = frame.to_image()
            if frame.rotation % 360:
                image = image.rotate(frame.rotation, expand=True)
            if before is not None:
                yield (usual if frame.time is None else frame.time - before[0]), before[1]
            start = frame.time if frame.time is not None else before[0] + usual if before is not None else 0.0
            before = (start, image)
        if before is not None:
            yield usual, before[1]


class VideoItems(FileItems):
    """Videos below `top`, with the values of each."""

    def sample(self, i: int) -> dict[str, Any]:
        """Return `video`, `name` (relative to the folder), and the known values."""
        return {"video": self._video(i), "name": self.names[i], **self.values[i]}

    def _video(self, i: int) -> VideoFile:
        path, frames = self.top / self.names[i], self.spec.frames or 1
        given = (self.names[i], frames, self.spec.fps, os.path.isdir(path), self.channels, self.background)
        return VideoFile(tuple(self.files(i)), *given)

    def files(self, i: int) -> list[Path]:
        """Return the files of item `i`: of a folder its frames in natural order."""
        path = self.top / self.names[i]
        return [path / name for name in _stills(path)] if os.path.isdir(path) else [path]

    @cached_property
    def sizes(self) -> list[Size]:
        """(h, w) of the frames of each video."""
        return [self._video(i).size() for i in range(len(self))]

    @staticmethod
    def below(top: Path, skip: Container[str] = (), notes: list[str] | None = None) -> list[str]:
        """Return the videos below a folder as relative paths in natural order: video files, animated pictures, and folders
        of pictures. Raises SpecError for a video file where the package `av` is missing."""
        names = list[str]()
        for folder, folders, shown in walk_folders(top, skip):
            whole = [name for name in shown if _suffix(name) in VIDEOS or _is_animated(folder / name)]
            stills = [name for name in shown if _suffix(name) in list_image_suffixes() and name not in whole]
            place = folder.relative_to(top)
            if stills and not whole and folder != top:
                names.append(place.as_posix())
                folders.clear()
            else:
                names += [(place / name).as_posix() for name in whole]
                if stills and notes is not None:
                    notes.append(f"'{folder / stills[0]}' and {len(stills) - 1} more pictures are not in a video's folder")
        if filed := [name for name in names if _suffix(name) in VIDEOS and not os.path.isdir(top / name)]:
            _check_av(filed[0])
        return sorted(names, key=make_sort_key)


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _stills(folder: Path) -> list[str]:
    """Return the pictures directly in a folder, in natural order."""
    names = (name for name in os.listdir(folder) if not name.startswith(".") and _suffix(name) in list_image_suffixes())
    return sorted(names, key=make_sort_key)


def _is_animated(file: Path) -> bool:
    """Return whether a picture's file has several pictures; a broken one of such a format counts, and is told when it is
    read."""
    if _suffix(file.name) not in ANIMATED & list_image_suffixes():
        return False
    try:
        with file.open("rb") as opened, Image.open(opened) as image:
            return bool(getattr(image, "is_animated", False))
    except Exception:  # a decoder's, about files of anybody's
        return _suffix(file.name) != ".png"


def _check_av(name: str) -> None:
    try:
        import av  # noqa: F401
    except ImportError:
        raise SpecError(f"'{name}' needs the package 'av': pip install av", path=("videos",)) from None
