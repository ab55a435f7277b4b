"""What whoever asks an engine for pictures gets: its state, its steps and its result."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..core.errors import FxplugError
from .parked import Cancelled
from .requests import Request

TicketState = Literal["queued", "waiting", "running", "done", "failed", "cancelled"]
ENDS = ("done", "failed", "cancelled")


class QueueFull(FxplugError):  # noqa: N818
    """As many requests as the queue holds wait to be taken in: ask again later."""


@dataclass(frozen=True)
class TicketEvent:
    """A change of a ticket: its state, the steps that are made, and how many there are; 0 where that is not known."""

    state: TicketState
    step: int = 0
    of: int = 0


class Ticket:
    """A request that an engine has accepted.

    `state` is "queued" until it is taken in, "waiting" while its adapters are read or no slot is free, "running", and at the
    end "done", "failed" or "cancelled". `step` and `of` are the steps that its scheduler has made, and shall make; 0 before
    that is known.
    """

    def __init__(self, request: Request, step_engine: Callable[[], bool]) -> None:
        self.id = uuid.uuid4().hex
        self.request = request
        self.state: TicketState = "queued"
        self.step = self.of = 0
        self.cancels = False
        self.denoises = False  # whether its pipeline has called a denoiser
        self.deadline: float | None = None  # by `time.monotonic`
        self.taken: float | None = None  # when it began to run, by it
        self._step_engine = step_engine  # one step, where no thread of the engine's makes them; else false
        self._result: Any = None
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[TicketEvent], None]] = []

    def __repr__(self) -> str:
        return f"Ticket({self.id[:8]}, {self.state}, step {self.step} of {self.of})"

    def cancel(self) -> None:
        """Cancel the request: it ends at its next call of a model, and others go on. One that has ended stays as it is."""
        self.cancels = True

    def result(self, timeout: float | None = None) -> Any:
        """Return what the pipeline gave.

        Where the engine has no thread of its own and there is no timeout, it makes the steps itself.

        Args:
            timeout: Seconds to wait; None is until the end.

        Returns:
            The pipeline's result.

        Raises:
            TimeoutError: Where it is not ready.
            Cancelled: For a request that was cancelled.
            Exception: What the pipeline raised.
        """
        while timeout is None and not self._end.is_set() and self._step_engine():
            pass
        if not self._end.wait(timeout):
            raise TimeoutError(f"request {self.id[:8]} is {self.state} after {timeout:g} s: step {self.step} of {self.of}")
        if self._error is not None:
            raise self._error
        return self._result

    async def events(self, end_only: bool = False) -> AsyncIterator[TicketEvent]:
        """Iterate over the changes from now on: where it is, each step, and last the state in which it ended.

        Args:
            end_only: Whether, after where it is now, nothing but the end is told.

        Yields:
            The changes.
        """
        queue: asyncio.Queue[TicketEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(event: TicketEvent) -> None:
            if (event.state in ENDS or not end_only) and not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, event)

        with self._lock:
            self._listeners.append(listen)
            event = TicketEvent(self.state, self.step, self.of)
        try:
            yield event
            while event.state not in ENDS:
                event = await queue.get()
                yield event
        finally:
            with self._lock:
                self._listeners.remove(listen)

    def wait(self, seconds: float) -> bool:
        """Wait for the end; return whether it has come.

        Args:
            seconds: How long to wait at most.

        Returns:
            Whether it has a result or an error.
        """
        return self._end.wait(seconds)

    def has_ended(self) -> bool:
        """Tell whether it has a result or an error."""
        return self._end.is_set()

    # --- what the engine does

    def why_cancelled(self, now: float) -> str:
        """Say why the request shall end; "" if it shall go on.

        Args:
            now: The time, by `time.monotonic`.

        Returns:
            The reason.
        """
        if self.cancels:
            return f"request {self.id[:8]} was cancelled"
        late = self.deadline is not None and now > self.deadline
        return f"the deadline of {self.request.deadline_s:g} s of request {self.id[:8]} has passed" if late else ""

    def move(self, state: TicketState, step: int = 0, of: int = 0) -> None:
        """Set the state and the steps, and tell who listens.

        Args:
            state: The state; one that has ended stays.
            step: The steps that are made.
            of: The steps that there are.
        """
        with self._lock:
            if self.state in ENDS or (self.state, self.step, self.of) == (state, step, of):
                return
            if state == "running" and self.taken is None:
                self.taken = time.monotonic()
            self._tell(state, step, of)

    def _tell(self, state: TicketState, step: int, of: int) -> None:
        self.state, self.step, self.of = state, step, of
        if state in ENDS:
            self._end.set()  # before it is told, whereupon the result is asked for
        for listen in self._listeners:
            listen(TicketEvent(state, step, of))

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """End it with a result or an error, once.

        Args:
            result: What the pipeline gave.
            error: What it raised, or Cancelled.
        """
        state: TicketState = "done" if error is None else "cancelled" if isinstance(error, Cancelled) else "failed"
        with self._lock:  # of two that end it at once one says how, and with what
            if self.state not in ENDS:
                self._result, self._error = result, error
                self._tell(state, self.step, self.of)
