"""The log of a run as JSON lines and TensorBoard events. A killed run leaves both readable, a resumed one goes on with them."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard.summary import image

from ..core.writing import new_file

NO_NUMBERS = ("nan", "inf", "-inf")  # how a log has them: JSON has no word for them


class Lines:
    """A file of JSON lines, each whole in the file before `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. Numbers that JSON lacks are written as text (`"nan"`), tensors of one element as numbers.

        Raises OSError when the disk is full. What was written of the line is taken back then: the file stays readable, and a
        later write may succeed.
        """
        _append(self.path, json.dumps(plain(record)).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """All records; a last line that a killed process did not finish is left out."""
        text = self.path.read_bytes() if self.path.is_file() else b""
        records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
        return [{key: float(v) if v in NO_NUMBERS else v for key, v in record.items()} for record in records]

    def rewind(self, step: int) -> None:
        """Drop the records of later steps, and a last line that is not whole; all at once or not at all."""
        if self.path.is_file():
            kept = [record for record in self.read() if record.get("step", 0) <= step and step > 0]
            with new_file(self.path) as beside:
                beside.write_text("".join(json.dumps(plain(record)) + "\n" for record in kept))


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def plain(value: Any) -> Any:
    """A value that JSON has."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (bool, int, str, type(None))) else str(value)


class Events:
    """TensorBoard's event file, written at once: SummaryWriter writes from a thread, where a full disk is nobody's error.

    `begin` is the step that the run goes on from; TensorBoard then drops what earlier files have of later steps.
    """

    def __init__(self, folder: Path, begin: int = 0) -> None:
        self.path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._write(event_pb2.Event(file_version="brain.Event:2"))
        if begin:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(step=begin + 1, session_log=start))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        _append(self.path, record.getvalue())

    def scalars(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        """Numbers under `prefix/name`. Raises OSError."""
        numbers = {name: plain(value) for name, value in values.items()}
        shown = [
            summary_pb2.Summary.Value(tag=f"{prefix}/{name}", simple_value=value)
            for name, value in numbers.items()
            if isinstance(value, (int, float))
        ]
        self._write(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=shown)))

    def image(self, tag: str, picture: torch.Tensor, step: int) -> None:
        """A uint8 image [c, h, w]. Raises OSError."""
        self._write(event_pb2.Event(step=step, summary=image(tag, picture, dataformats="CHW")))  # type: ignore[no-untyped-call]
