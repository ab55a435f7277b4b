"""A server on several machines: replicas that Ray starts and starts again, and orders that each go to one of them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...core.errors import FxplugError, SpecError, did_you_mean, get_first_line, quote
from ..adapter_index import CONFIG, LAST, AdapterInfo
from ..parked import Cancelled
from ..tickets import QueueFull, Ticket
from .bodies import PictureOrder
from .errors import RequestError
from .orders import OrderTaker, PreviewShown
from .replica import MadePreview, OpenedReplica, OrderPlace, Replica, ReplicaState, TicketChange
from .server_config import ServerConfig

LOG = logging.getLogger("fxplug.serving")
LOOK = 0.5  # seconds between two looks at a replica
POLL = 0.1  # seconds between two looks at what is cancelled or late
DEAF = 60.0  # seconds after which a replica that does not answer is given up
TRIES = 3  # replicas that end by one order, or at the start before any is ready
LONGEST = 15.0  # seconds between two tries


class RemoteReplica:
    """What the server knows of a replica: its actor, how it was when it was last looked at, and what was sent to it."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.opening = actor, actor.open.remote()
        self.state = ReplicaState("", (0, 0), (0, 0), 0, None, frozenset(), frozenset())
        self.sent: dict[str, tuple[int, frozenset[str]]] = {}  # pictures and adapters of orders that are not answered
        self.lost = ""  # why it is given up

    @property
    def load(self) -> int:
        """Number of pictures that were sent and are not answered."""
        return sum(count for count, _ in self.sent.values())

    @property
    def names(self) -> frozenset[str]:
        """Adapters that it has in slots or host memory, or is about to read."""
        return self.state.names.union(*(names for _, names in self.sent.values()))


class RemoteFolder:
    """The adapters of a folder that all machines see, as replicas have found them."""

    def __init__(self, folder: Path, replicas: list[RemoteReplica]) -> None:
        self.folder, self._replicas = folder, replicas
        self._infos: list[AdapterInfo] = []

    def note(self, state: ReplicaState) -> None:
        """Note what a replica tells."""
        if state.infos is not None:
            self._infos = state.infos

    def list(self) -> list[AdapterInfo]:
        """List the adapters; one is in a slot where any replica has it in one."""
        slots = frozenset[str]().union(*(one.state.in_slots for one in [*self._replicas]))
        return [replace(info, in_slot=info.name in slots) for info in self._infos]

    def get_path(self, name: str) -> Path:
        """Return the file or folder of an adapter. Raises SpecError for a name that there is not."""
        names = [info.name for info in self._infos]
        if name not in names:
            raise SpecError(f"no adapter {quote(name)}{did_you_mean(name, names)}", path=("adapters",), key=name)
        folder = self.folder / name
        return folder if (folder / CONFIG).is_file() else self.folder / f"{name}{LAST}"

    def refresh(self) -> None:
        """Let all replicas look at the folder now; one that ends meanwhile need not. Raises RequestError where none has."""
        import ray

        looked, why = 0, "none is ready"
        for state in [one.actor.look.remote(refresh=True) for one in [*self._replicas]]:
            try:
                self.note(ray.get(state, timeout=DEAF))
                looked += 1
            except ray.exceptions.RayError as error:
                why = _describe(error)
        if not looked:
            raise RequestError(f"no replica could look at the adapters: {why}", 503, code="no_replica", retry=10)

    def check(self, adapters: Mapping[str, Any]) -> None:
        """Check that adapters are there and fit. Raises SpecError if not."""
        self.refresh()
        for name in adapters:
            self.get_path(name)
            if error := next(info.error for info in self._infos if info.name == name):
                raise SpecError(error, path=("adapters",), key=name)


class ReplicaSet(OrderTaker):
    """Replicas of a service on the machines of a Ray cluster.

    An order goes to the replica that holds most of its adapters, unless that has a joint call's rows more to do than another.
    It stays accepted until it is answered: where its replica ends, another makes it, from the same seeds.
    """

    store: RemoteFolder | None

    def __init__(self, config: ServerConfig) -> None:
        """Join the Ray cluster of this machine, or start one, and open the pipeline in replicas.

        Args:
            config: The configuration.

        Raises:
            FxplugError: What opening the pipeline raises in a replica, and where all replicas end while they open it.
            ModuleNotFoundError: Without ray.
        """
        import ray

        super().__init__(config.model_copy())
        self.config._folder = config.base.absolute()  # a replica runs in a folder of Ray's
        sys.path.insert(0, str(self.config.base))  # for classes of pipelines in modules there
        self._owns = not ray.is_initialized()
        if self._owns:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            before = signal.getsignal(signal.SIGTERM)
            ray.init(include_dashboard=False, logging_level=logging.WARNING)
            signal.signal(signal.SIGTERM, before)  # Ray's own handler ends the process with 1
        self.alive: list[RemoteReplica] = []
        self._made: set[RemoteReplica] = set()  # also those that are not ready
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._past: Counter[str] = Counter()  # calls and rows of replicas that have ended
        self._opening = [self._make() for _ in range(config.ray.replicas)]
        try:
            opened = self._wait_for_first()
        except BaseException:  # what a replica raised, or an interrupt
            self._leave()
            raise
        self.pipes, self.pipe = opened.pipes, opened.pipes[""]
        self.store = RemoteFolder(opened.folder, self.alive) if opened.folder is not None else None

    def _make(self) -> RemoteReplica:
        import ray

        gpus = self.config.ray.gpus
        if gpus is None:
            gpus = float(self.config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)
        options = ray.remote(num_cpus=self.config.ray.cpus, num_gpus=gpus, scheduling_strategy="SPREAD", max_restarts=0)
        made = RemoteReplica(options(Replica).remote(self.config))
        self._made.add(made)
        return made

    def _wait_for_first(self) -> OpenedReplica:
        """Wait until a replica has opened the pipeline; the error of the first that cannot is that of all."""
        import ray

        left, why = [one.opening for one in self._opening], ""
        while left:
            done, left = ray.wait(left, timeout=10)
            if not done:
                free = {key: ray.available_resources().get(key, 0) for key in ("CPU", "GPU")}
                LOG.info("a replica opens the pipeline, or waits for a node: Ray has %(CPU)g CPUs and %(GPU)g GPUs free", free)
            for each in done:
                try:
                    opened: OpenedReplica = ray.get(each)
                    return opened
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    why = get_first_line(error)
        raise FxplugError(f"all replicas ended while they opened the pipeline: {why}")

    # --- replicas

    def start(self) -> None:
        """Let replicas warm up, and start others where they end."""
        self._loop = asyncio.get_running_loop()
        for one in self._opening:
            self._keep(self._supervise(one))

    def _keep(self, work: Any) -> None:
        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:  # Ray itself has ended
                self.fault = self.fault or _describe(error)
                LOG.error("%s", self.fault)

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(end)

    async def _supervise(self, one: RemoteReplica) -> None:
        """Keep a replica running: this one, and those after it."""
        from ray.exceptions import RayTaskError

        failures = 0
        while True:
            try:
                await one.opening
                await one.actor.warm.remote()
                await self._look(one)
                self.alive.append(one)
                self.ready.set()
                LOG.info("ready: %d of %d replicas", len(self.alive), self.config.ray.replicas)
                failures = 0
                while not one.lost and not one.state.fault:
                    await asyncio.sleep(LOOK)
                    await self._look(one)
                self._lose(one, one.state.fault)
            except Exception as error:  # of Ray, or of the pipeline while it opens or warms up
                failures += 1
                self._lose(one, _describe(error))
                if not self.alive and not self._past and (isinstance(error, RayTaskError) or failures == TRIES):
                    self.fault = f"no replica can be started: {one.lost}"
                    LOG.error("%s", self.fault)
                    return
            LOG.warning("a replica has ended, and Ray starts another: %s", one.lost)
            await asyncio.sleep(min(LONGEST, 2.0**failures - 1))  # Ray sees late that a node is gone
            one = self._make()

    async def _look(self, one: RemoteReplica) -> None:
        try:
            one.state = await asyncio.wait_for(one.actor.look.remote(one.state.version), DEAF)
        except TimeoutError:
            raise TimeoutError(f"it does not answer for {DEAF:g} s") from None
        if self.store is not None:
            self.store.note(one.state)

    def _lose(self, one: RemoteReplica, why: str) -> None:
        """Give a replica up: whoever waits for it goes to another."""
        import ray

        if one in self.alive:
            self.alive.remove(one)
            self._past.update(replicas=1, calls=one.state.calls[0], rows=one.state.calls[1])
        if not self.alive:
            self.ready.clear()
        self._made.discard(one)
        one.lost = one.lost or why
        ray.kill(one.actor)

    # --- orders

    def _take(self, order: PictureOrder, show: PreviewShown | None) -> list[Ticket]:
        if not self.alive:
            raise RequestError("no replica is ready: Ray starts one", 503, code="no_replica", retry=10)
        waiting = sum(ticket.state in ("queued", "waiting") for one in self._open for ticket in one.tickets)
        if waiting + len(order.requests) > self._count_room():
            raise QueueFull(f"{waiting} requests wait already: the queues hold {self._count_room()}")
        tickets = [Ticket(request, lambda: False) for request in order.requests]
        for ticket in tickets:
            seconds = ticket.request.deadline_s
            ticket.deadline = time.monotonic() + seconds if seconds is not None else None
        self._keep(self._draw(order, tickets, show))
        return tickets

    async def _draw(self, order: PictureOrder, tickets: list[Ticket], show: PreviewShown | None) -> None:
        """Draw an order until each of its pictures has ended once, whichever replicas end meanwhile."""
        from ray.exceptions import RayError, RayTaskError

        parts: list[Any] = [each for request in order.requests for each in (request, *request.regions)]
        names = frozenset(name for each in parts for name in each.adapters)
        lost = shown = 0

        def show_once(number: int, picture: Any) -> None:
            nonlocal shown
            if show is not None and number >= shown:
                shown = number + 1
                show(number, picture)

        try:
            while left := [at for at, ticket in enumerate(tickets) if not ticket.has_ended()]:
                self._end_late(tickets)
                one = self._choose(names)
                if one is None:
                    await asyncio.sleep(POLL)
                    continue
                part = replace(order, requests=[order.requests[at] for at in left], seeds=[order.seeds[at] for at in left])
                try:
                    await self._follow(one, part, [tickets[at] for at in left], names, show_once)
                except RayTaskError as error:
                    if not isinstance(error.cause, RequestError):  # else it is full, or ends: another time
                        raise error.cause from None
                    await asyncio.sleep(POLL)
                except (RayError, TimeoutError) as error:
                    self._lose(one, _describe(error))
                    lost += 1
                    if lost == TRIES:
                        finding = f"{lost} replicas ended while they drew this: it is not sent to another"
                        raise RequestError(finding, 500, code="failed") from None
        except Exception as error:  # of the order, or a mistake of ours: nobody waits for ever
            for ticket in tickets:
                ticket.finish(error=error)

    def _choose(self, names: frozenset[str]) -> RemoteReplica | None:
        """Choose a replica: of those that have not much more to do than another the one that holds most adapters."""
        least = min((one.load for one in self.alive), default=0)
        near = [one for one in self.alive if one.load < least + self.config.engine.rows]

        def get_cost(one: RemoteReplica) -> tuple[int, ...]:
            return -len(names & one.names), -len(names & one.state.in_slots), one.load, len(one.names)

        return min(near, key=get_cost, default=None)

    async def _follow(
        self,
        one: RemoteReplica,
        order: PictureOrder,
        tickets: Sequence[Ticket],
        names: frozenset[str],
        show: PreviewShown,
    ) -> None:
        """Send an order to a replica, and tell its tickets what comes of it."""
        name = uuid.uuid4().hex
        one.sent[name] = len(tickets), names
        told: set[int] = set()
        stream = aiter(one.actor.draw.options(num_returns="streaming").remote(name, order, names))
        step: asyncio.Future[list[Any] | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(_get_next(stream))
                while not step.done():
                    await asyncio.wait({step}, timeout=POLL)
                    self._end_late(tickets)
                    for at, ticket in enumerate(tickets):
                        if ticket.has_ended() and at not in told:
                            told.add(at)
                            one.actor.cancel.remote(name, at)
                    if one.lost and not step.done():
                        raise TimeoutError(one.lost)
                if (items := step.result()) is None:
                    return
                for item in items:
                    if isinstance(item, TicketChange):
                        _move(tickets[item.at], item)
                        told |= {item.at} if tickets[item.at].has_ended() else set()
                    elif isinstance(item, OrderPlace):
                        self.routed[item.place] += 1
                    elif isinstance(item, MadePreview):
                        show(item.number, item.picture)
        finally:
            del one.sent[name]
            if step is not None:
                step.cancel()

    def _end_late(self, tickets: Sequence[Ticket]) -> None:
        now = time.monotonic()
        for ticket in tickets:
            if not ticket.has_ended() and (why := ticket.why_cancelled(now)):
                ticket.finish(error=Cancelled(why))

    # --- what operators ask for

    def count_replicas(self) -> int:
        """Count the replicas that are ready."""
        return len(self.alive)

    def count_requests(self) -> tuple[int, int]:
        """Count the requests that wait, and those that run, by what replicas have told."""
        states = [ticket.state for one in self._open for ticket in one.tickets if not ticket.has_ended()]
        return len(states) - states.count("running"), states.count("running")

    def count_denoiser_calls(self) -> tuple[int, int]:
        """Count the calls of all replicas, also of those that have ended."""
        calls, rows = ([one.state.calls[at] for one in self.alive] for at in (0, 1))
        return sum(calls) + self._past["calls"], sum(rows) + self._past["rows"]

    def close(self, seconds: float) -> None:
        """End: finish what is accepted, within some seconds, cancel the rest, and end the replicas."""
        self.draining = True
        end = time.monotonic() + seconds
        while not self.fault and time.monotonic() < end and any(not one.has_ended() for one in self._open):
            time.sleep(POLL)
        for ticket in (ticket for one in self._open for ticket in one.tickets):
            ticket.finish(error=Cancelled(f"the replicas were drained, and the request did not end within {seconds:g} s"))
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result(DEAF)
        self._leave()

    async def _end_tasks(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self) -> None:
        import ray

        for one in self._made:
            ray.kill(one.actor)
        if self._owns:
            ray.shutdown()


def _describe(error: BaseException) -> str:
    """Describe an error of Ray's, or the one that was raised in a replica."""
    cause = getattr(error, "cause", None) or error
    return get_first_line(cause) if isinstance(cause, FxplugError) else f"{type(cause).__name__}: {get_first_line(cause)}"


async def _get_next(stream: Any) -> list[Any] | None:
    """Return the next items of a stream of references; None at its end."""
    reference = await anext(stream, None)
    return None if reference is None else await reference


def _move(ticket: Ticket, item: TicketChange) -> None:
    """Move a ticket on; one whose order was sent again stays where it was until that is further."""
    ticket.denoises |= item.denoises
    if item.pictures is not None:
        ticket.finish(SimpleNamespace(images=item.pictures))
    elif item.error is not None:
        ticket.finish(error=item.error)
    elif item.step >= ticket.step and (item.state == "running" or ticket.state != "running"):
        ticket.move(item.state, item.step, item.of)
