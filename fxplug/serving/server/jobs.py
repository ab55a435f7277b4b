"""Jobs: orders whose client asks for the result later, and pictures that are fetched by their URL."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import FxplugError
from ...core.reading import read_json
from ...core.writing import write_text
from .errors import RequestError
from .keys import ApiKey
from .orders import AcceptedOrder
from .server_config import JobSettings

LOG = logging.getLogger("fxplug.serving")
ENDS = ("done", "failed", "cancelled")
RESTARTED = "restarted: the server ended before the job did"
NAME = re.compile(r"[0-9a-f]{32}")
SEEN = 10_000  # events of a job that are kept
BYTES = 1 << 30  # of results that are kept in memory


class JobError(FxplugError):
    """The file of a job cannot be written or read."""


@dataclass(eq=False)
class PictureJob:
    """An order that a client asks for again: its state, its events from the beginning, and its result.

    `data` is as in the answer to a request that waits, or `error` what went wrong.
    """

    id: str
    owner: str  # hexadecimal digest of the key
    created: float
    state: str = "queued"
    step: int = 0
    of: int = 0
    data: list[dict[str, Any]] | None = None
    error: dict[str, Any] | None = None
    ended: float | None = None
    size: int = 0  # bytes of the result
    accepted: AcceptedOrder | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def describe(self) -> dict[str, Any]:
        """Return it as clients see it."""
        found: dict[str, Any] = {key: getattr(self, key) for key in ("id", "state", "step", "of")}
        found["created"] = int(self.created)
        return found | ({"data": self.data} if self.data is not None else {}) | ({"error": self.error} if self.error else {})

    def add_event(self, kind: str) -> None:
        """Add an event, and tell whoever listens."""
        event: dict[str, Any] = {"type": kind, "step": self.step, "of": self.of}
        if kind == "failed":
            event["error"] = self.error
        if len(self.events) < SEEN or kind in ENDS:
            self.events.append(event)
        self.news.set()
        self.news = asyncio.Event()


@dataclass(frozen=True)
class StoredPicture:
    """A picture that is fetched by its URL."""

    raw: bytes
    mime: str
    owner: str


class Jobs:
    """The jobs of a server, and its pictures with a URL, for a time; with a folder, jobs outlive the server."""

    def __init__(self, settings: JobSettings, base: Path) -> None:
        """Make them; with a folder, read what is there: a job that had not ended has failed.

        Args:
            settings: How long and how many are kept.
            base: What the folder is relative to.

        Raises:
            JobError: For a folder that cannot be used.
        """
        self.settings = settings
        self.folder = base / settings.dir if settings.dir else None
        self.jobs: dict[str, PictureJob] = {}
        self.pictures: dict[str, StoredPicture] = {}
        self._ended: dict[str, tuple[float, int]] = {}  # of jobs and pictures, the oldest first: when, and the bytes kept
        self._bytes = 0
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                files = sorted(self.folder.glob("*.json"))
            except OSError as error:
                raise JobError(f"the folder of jobs '{self.folder}' cannot be used: {error.strerror}") from None
            for file in files:
                self._restore(file)
            for job in sorted(self.jobs.values(), key=lambda job: job.ended or 0.0):
                self._keep(job)

    def _restore(self, file: Path) -> None:
        try:
            found = read_json(file, JobError)
            if not isinstance(found, Mapping) or not NAME.fullmatch(file.stem):
                raise JobError("is not a job")
            job = PictureJob(
                file.stem, str(found["owner"]), float(found["created"]), str(found["state"]), int(found["step"]),
                int(found["of"]), found.get("data"), found.get("error"), float(found.get("ended") or found["created"]),
                _count_bytes(found.get("data")),
            )  # fmt: skip
        except (AttributeError, FxplugError, KeyError, TypeError, ValueError) as error:
            LOG.warning("the job '%s' is left out: %s", file.name, error)
            return
        if job.state not in ENDS:
            job.state, job.ended = "failed", time.time()
            job.error = {"message": RESTARTED, "type": "server_error", "param": None, "code": "restarted"}
        job.add_event(job.state)
        self.jobs[job.id] = job
        self.save(job)

    def add(self, owner: str) -> PictureJob:
        """Make a job for a client, and save it; the oldest that have ended make room for it.

        Args:
            owner: The digest of the client's key.

        Returns:
            The job.

        Raises:
            RequestError: 429 where as many run as are kept, 503 where it cannot be saved.
        """
        self.forget()
        while len(self.jobs) >= self.settings.keep:
            oldest = next((job for job in self.jobs.values() if job.state in ENDS), None)
            if oldest is None:
                raise RequestError(f"{len(self.jobs)} jobs run already", 429, code="queue_full", retry=10)
            self.drop(oldest)
        job = PictureJob(uuid.uuid4().hex, owner, time.time())
        try:
            self.save(job, strict=True)
        except JobError as error:
            raise RequestError(f"the job cannot be kept: {error}", 503, code="no_space", retry=60) from None
        self.jobs[job.id] = job
        return job

    def find(self, name: str, key: ApiKey) -> PictureJob:
        """Find a job of a client. Raises RequestError, 404, for none, and for another client's."""
        self.forget()
        job = self.jobs.get(name)
        if job is None or job.owner != key.digest.hex():
            raise RequestError(f"no job {name[:64]!r}", 404, code="job_not_found")
        return job

    def store_picture(self, raw: bytes, mime: str, key: ApiKey) -> str:
        """Keep a picture for a time, and return the name by which it is fetched."""
        self.forget()
        while len(self.pictures) >= self.settings.keep:
            self._drop(next(iter(self.pictures)))
        name = uuid.uuid4().hex
        self.pictures[name] = StoredPicture(raw, mime, key.digest.hex())
        self._ended[name] = time.time(), len(raw)
        self._bytes += len(raw)
        return name

    def find_picture(self, name: str, key: ApiKey) -> StoredPicture:
        """Find a client's picture. Raises RequestError, 404, for none, and for another client's."""
        self.forget()
        found = self.pictures.get(name)
        if found is None or found.owner != key.digest.hex():
            raise RequestError("no such picture, or it is no longer kept", 404, code="picture_not_found")
        return found

    def forget(self) -> None:
        """Forget what has been kept long enough, and the oldest while all takes too much memory."""
        end = time.time() - self.settings.keep_s
        while self._ended:
            name, (ended, _) = next(iter(self._ended.items()))
            if ended >= end and self._bytes <= BYTES:
                break
            self._drop(name)

    def drop(self, job: PictureJob) -> None:
        """Forget a job."""
        self._drop(job.id)

    def _keep(self, job: PictureJob) -> None:
        self._ended[job.id] = job.ended or 0.0, job.size
        self._bytes += job.size

    def _drop(self, name: str) -> None:
        self._bytes -= self._ended.pop(name, (0.0, 0))[1]
        if self.pictures.pop(name, None) is None and self.jobs.pop(name, None) is not None and self.folder is not None:
            try:
                (self.folder / f"{name}.json").unlink(missing_ok=True)
            except OSError as error:  # whoever asks for something now has nothing to do with that
                LOG.warning("the job %s is not deleted: %s", name, error.strerror)

    def finish(self, job: PictureJob, state: str, data: list[dict[str, Any]] | None, error: dict[str, Any] | None) -> None:
        """End a job with its result, or with what went wrong."""
        job.state, job.data, job.error, job.ended, job.accepted = state, data, error, time.time(), None
        job.size = _count_bytes(data)
        self._keep(job)
        self.save(job)
        job.add_event(state)

    def save(self, job: PictureJob, strict: bool = False) -> None:
        """Save a job in the folder, if there is one. Raises JobError if `strict`; else the log says that it failed."""
        if self.folder is None:
            return
        kept = {**job.describe(), "created": job.created, "owner": job.owner, "ended": job.ended}
        try:
            write_text(self.folder / f"{job.id}.json", json.dumps(kept), JobError)
        except JobError as error:
            if strict:
                raise
            LOG.warning("the job %s is not kept: %s", job.id, error)


def _count_bytes(data: list[dict[str, Any]] | None) -> int:
    return sum(len(row.get("b64_json", "")) for row in data or ())


async def follow(job: PictureJob) -> AsyncIterator[dict[str, Any]]:
    """Iterate over the events of a job from its beginning to its end.

    Args:
        job: The job.

    Yields:
        The events: `progress` with the steps, and last `done`, `failed` or `cancelled`.
    """
    at = 0
    while True:
        news = job.news
        while at < len(job.events):
            event = job.events[at]
            at += 1
            yield event
            if event["type"] in ENDS:
                return
        await news.wait()


def encode_base64(raw: bytes) -> str:
    """Encode bytes as text of base64."""
    return base64.b64encode(raw).decode("ascii")
