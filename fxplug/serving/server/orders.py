"""Orders of clients that are accepted, and what a server asks of whatever makes their pictures."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from ...core.errors import FxplugError
from ...core.reading import make_reporter, open_regular_file
from ...core.weight_files import read_header
from ..adapter_index import AdapterInfo
from ..tickets import QueueFull, Ticket
from .bodies import PictureOrder
from .errors import RequestError
from .keys import ApiKey
from .server_config import ServerConfig

TRIGGERS = ("modelspec.trigger_phrase", "trigger_words", "trigger_word")
LONGEST_WORDS = 1_000

PreviewShown = Callable[[int, Image.Image], None]


@dataclass(eq=False)
class AcceptedOrder:
    """An order that is accepted: a ticket for each picture, whose it is, and when it came."""

    order: PictureOrder
    tickets: list[Ticket]
    key: ApiKey
    created: float = field(default_factory=time.time)

    @property
    def steps(self) -> tuple[int, int]:
        """The steps of all pictures that are made, and how many there are."""
        return sum(ticket.step for ticket in self.tickets), sum(ticket.of for ticket in self.tickets)

    def cancel(self) -> None:
        """Cancel what has not ended."""
        for ticket in self.tickets:
            ticket.cancel()

    def has_ended(self) -> bool:
        """Return whether all pictures have ended."""
        return all(ticket.has_ended() for ticket in self.tickets)


class AdapterFolder(Protocol):
    """What a server asks of the adapters that there are; an `AdapterStore` is one."""

    folder: Path

    def list(self) -> Sequence[AdapterInfo]:
        """List the adapters, by name; those that cannot be used have an `error`."""

    def get_path(self, name: str) -> Path:
        """Return the file or folder of an adapter. Raises SpecError for a name that there is not."""

    def refresh(self) -> None:
        """Look at the folder again now."""

    def check(self, adapters: Mapping[str, Any]) -> None:
        """Check that a request may name these adapters. Raises SpecError if not."""


class OrderTaker(ABC):
    """Takes orders as far as there is room, each key its share of it, and makes their pictures.

    `ready` is set while pictures can be made, and `fault` says why they never will be. `pipes` are the pipelines by task, "" is
    `pipe`. `routed` counts orders by whether the replica that they went to held their adapters.
    """

    pipe: Any
    pipes: dict[str, Any]
    store: AdapterFolder | None

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.ready = threading.Event()
        self.fault = ""
        self.draining = False
        self.mean_s = 1.0  # of requests that ended lately
        self.routed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._open: list[AcceptedOrder] = []

    # --- of each kind

    @abstractmethod
    def start(self) -> None:
        """Begin, and warm up beside the loop that runs now; `ready` or `fault` say how that ends."""

    @abstractmethod
    def close(self, seconds: float) -> None:
        """End: finish what is accepted, within some seconds, and cancel the rest."""

    @abstractmethod
    def count_replicas(self) -> int:
        """Count the engines that make pictures."""

    @abstractmethod
    def count_requests(self) -> tuple[int, int]:
        """Count the requests that wait to be taken in, and those that run."""

    @abstractmethod
    def count_denoiser_calls(self) -> tuple[int, int]:
        """Count the calls of denoisers, joint ones and others, and the samples in them."""

    @abstractmethod
    def _take(self, order: PictureOrder, show: PreviewShown | None) -> list[Ticket]:
        """Take all pictures of an order, or none. Raises QueueFull, SpecError or RequestError."""

    # --- of all

    def submit(self, order: PictureOrder, key: ApiKey, keys: int = 1, show: PreviewShown | None = None) -> AcceptedOrder:
        """Accept an order: all of its pictures, or none.

        Args:
            order: The order.
            key: That of the client.
            keys: How many keys there are, which share the queue.
            show: What is called with the number and the picture of each preview, in any thread.

        Returns:
            What is accepted.

        Raises:
            RequestError: 429 where the queue, or the share of this key, is full; 503 once the server ends.
            SpecError: As `Engine.submit`.
        """
        if self.draining:
            raise RequestError("the server is being shut down", 503, code="shutting_down", retry=10)
        with self._lock:
            self._open = [one for one in self._open if not one.has_ended()]
            waiting = sum(t.state in ("queued", "waiting") for one in self._open if one.key is key for t in one.tickets)
            share = max(order_size := len(order.requests), self._count_room() // keys)
            if waiting + order_size > share:
                raise self._full(f"{waiting} pictures of this key wait already, and its share of the queue is {share}")
            try:
                accepted = AcceptedOrder(order, self._take(order, show), key)
            except QueueFull as error:
                raise self._full(str(error)) from None
            self._open.append(accepted)
        return accepted

    def _count_room(self) -> int:
        return self.config.engine.queue * max(1, self.count_replicas())

    def _full(self, text: str) -> RequestError:
        waiting = max(1, len(self._open) // (max(1, self.config.engine.rows) * max(1, self.count_replicas())))
        return RequestError(text, 429, code="queue_full", retry=max(1, min(60, round(self.mean_s * waiting))))

    def find_fault(self) -> str:
        """Return why no pictures are made any more; "" where they are."""
        return self.fault

    def adapter_names(self) -> list[str]:
        """Return the names of the adapters that can be used."""
        return [info.name for info in self.store.list() if not info.error] if self.store else []

    def read_trigger_words(self, name: str) -> str:
        """Read the trigger words of an adapter's file; "" where its metadata has none, and for one that was changed now."""
        if self.store is None:
            return ""
        path = self.store.get_path(name)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        for file in files[:1]:
            with suppress(FxplugError), open_regular_file(file) as opened:
                metadata = read_header(opened, make_reporter(file)).about
                return next((metadata[key][:LONGEST_WORDS] for key in TRIGGERS if metadata.get(key)), "")
        return ""
