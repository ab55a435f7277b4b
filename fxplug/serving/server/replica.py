"""A replica: a pipeline and its engine in a process of Ray's, which draws the orders that the server sends it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import OutOfMemoryError

from ...core.errors import FxplugError
from ..adapter_index import AdapterInfo
from ..tickets import ENDS, Ticket, TicketState
from .bodies import PictureOrder
from .keys import ANYBODY
from .orders import AcceptedOrder
from .pictures import list_pictures
from .server_config import ServerConfig
from .service import Service, freeze_objects

KEPT = ("scheduler", "_blocks")  # of a pipeline, for whoever reads requests for it


@dataclass(frozen=True)
class OpenedReplica:
    """What the server needs to read requests: the pipelines by task without their models, and the folder of adapters."""

    pipes: dict[str, Any]
    folder: Path | None


@dataclass(frozen=True)
class ReplicaState:
    """How a replica is.

    `infos` are None where the server knows this version of them; `names` are the adapters in slots or host memory.
    """

    fault: str
    requests: tuple[int, int]
    calls: tuple[int, int]
    version: int
    infos: list[AdapterInfo] | None
    in_slots: frozenset[str]
    names: frozenset[str]


@dataclass(frozen=True)
class OrderPlace:
    """An order is taken; `place` says where its adapters were: "in slots", "in memory", or "not" all here."""

    place: str


@dataclass(frozen=True)
class MadePreview:
    """A preview is drawn."""

    number: int
    picture: Image.Image


@dataclass(frozen=True)
class TicketChange:
    """A picture of an order has another state or step; at its end its frames or its error are there."""

    at: int
    state: TicketState
    step: int
    of: int
    denoises: bool
    pictures: list[list[Image.Image]] | None = None
    error: BaseException | None = None


class Replica:
    """What Ray runs: a service without HTTP."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.orders: dict[str, AcceptedOrder] = {}
        self.version, self.infos = 0, list[AdapterInfo]()

    async def open(self) -> OpenedReplica:
        """Open the pipeline. Raises FxplugError where it cannot be."""
        self.service = await asyncio.to_thread(Service, self.config)
        self.service.engine.start()
        store = self.service.store
        pipes = {task: _make_outline(pipe) for task, pipe in self.service.pipes.items()}
        return OpenedReplica(pipes, store.folder if store is not None else None)

    async def warm(self) -> None:
        """Warm up. Raises whatever the pipeline raises."""
        await asyncio.to_thread(self.service.warm)
        freeze_objects()

    async def look(self, known: int = -1, refresh: bool = False) -> ReplicaState:
        """Return how it is.

        Args:
            known: The version of `infos` that the server knows.
            refresh: Whether to look at the folder of adapters first.

        Returns:
            The state.
        """
        service, engine, store = self.service, self.service.engine, self.service.store
        if store is not None and refresh:
            await asyncio.to_thread(store.refresh)
        infos = store.list() if store is not None else []
        plain = [replace(info, in_slot=False) for info in infos]
        if plain != self.infos:
            self.version, self.infos = self.version + 1, plain
        return ReplicaState(
            service.find_fault(), engine.count_requests(), engine.count_denoiser_calls(), self.version,
            None if known == self.version else plain, frozenset(info.name for info in infos if info.in_slot),
            store.names_in_memory if store is not None else frozenset(),
        )  # fmt: skip

    async def draw(self, name: str, order: PictureOrder, names: frozenset[str]) -> AsyncIterator[list[Any]]:
        """Draw an order.

        Args:
            name: By which it may be cancelled.
            order: The order.
            names: Its adapters.

        Yields:
            What has happened since: `OrderPlace`, `MadePreview` and `TicketChange`, the last of which is the end of a picture.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def show(number: int, picture: Image.Image) -> None:
            loop.call_soon_threadsafe(news.put_nowait, MadePreview(number, picture))

        async def follow(at: int, ticket: Ticket) -> None:
            async for event in ticket.events():
                if event.state not in ENDS:
                    news.put_nowait(TicketChange(at, event.state, event.step, event.of, ticket.denoises))
            pictures, error = await asyncio.to_thread(_read_result, ticket)
            news.put_nowait(TicketChange(at, ticket.state, ticket.step, ticket.of, ticket.denoises, pictures, error))

        news.put_nowait(OrderPlace(self._find_place(names)))
        accepted = self.orders[name] = self.service.submit(order, ANYBODY, 1, show)
        try:
            left = {asyncio.ensure_future(follow(at, ticket)) for at, ticket in enumerate(accepted.tickets)}
            while any(not one.done() for one in left) or not news.empty():
                items = [await news.get()]
                while not news.empty():
                    items.append(news.get_nowait())
                yield items
        finally:  # the server is gone, or all is drawn
            accepted.cancel()
            del self.orders[name]

    def _find_place(self, names: frozenset[str]) -> str:
        store = self.service.store
        if store is None or names <= {info.name for info in store.list() if info.in_slot}:
            return "in slots"
        return "in memory" if names <= store.names_in_memory else "not"

    async def cancel(self, name: str, at: int) -> None:
        """Cancel a picture of an order; one that is not there is done."""
        if (order := self.orders.get(name)) is not None:
            order.tickets[at].cancel()


def _make_outline(pipe: Any) -> Any:
    """Return a pipeline of the same class, of which nothing is left but what says how it is called."""
    made = object.__new__(type(pipe))
    vars(made).update({name: part for name, part in vars(pipe).items() if name in KEPT})
    return made


def _read_result(ticket: Ticket) -> tuple[list[list[Image.Image]] | None, BaseException | None]:
    """Return the pictures of a ticket that has ended, or its error as one that can be sent."""
    ticket.wait(60)  # its state is told a moment before its result is there
    try:
        return list_pictures(ticket.result(0)), None
    except Exception as error:  # of the pipeline
        if isinstance(error, FxplugError):
            return None, error
        made = (MemoryError if isinstance(error, (MemoryError, OutOfMemoryError)) else RuntimeError)(str(error))
        made.add_note("".join(traceback.format_exception(error)))  # of a class that the server may not have
        return None, made
