"""One engine for many requests of stock pipelines: calls of models that are alike are one call, whoever makes them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..core.errors import SpecError, did_you_mean, quote
from ..pipelines.pipeline_model import list_denoisers
from .active import ActiveRequest
from .checks import check_pipeline, find_scheduler, list_models, read_buckets
from .forms import CallForms
from .joint_calls import ModelCaller
from .learning import CALLBACKS, LearntKind, ReadOnlyCallback, classify_request, learn_request
from .model_state import find_change, list_state
from .parked import Cancelled, OwnDraws, RequestThread, check_outside, copy_pipeline, make_stand_in
from .regions import RegionGroup, check_regions, fold_regions, make_region_requests
from .requests import Request, check_call, list_generators, make_call
from .store import AdapterStore
from .tickets import QueueFull, Ticket
from .weight_updates import check_weights, write_weights

LOG = logging.getLogger("fxplug.serving")
WAIT = 0.05  # seconds that a step waits, where all that is missing is an adapter that is being read
ROWS, QUEUE = 16, 64


class Engine:
    """Many requests at once, each a call of an unmodified pipeline of diffusers, with calls of models that are made jointly.

    Each request runs the pipeline in a thread of its own, one of which runs at a time, with a scheduler of its own. Its calls
    of models wait until `step` makes one joint call of those that are alike: of one model, with tensors of the same sizes and
    dtypes and the same other arguments. Requests join and leave at any call. Where a model has slots, each sample has the
    adapters of its request.

    Which tensors have the samples first is learnt from two short runs of the pipeline for each kind of request, and the first
    joint call of each form is made apart too and compared; a form that differs is never made jointly, which the log of
    `fxplug.serving` says. A pipeline that writes into its models while it runs is refused.
    """

    def __init__(
        self,
        pipe: Any,
        *,
        also: Mapping[str, Any] | None = None,
        store: AdapterStore | None = None,
        rows: int = ROWS,
        queue: int = QUEUE,
        buckets: Sequence[int] | None = None,
        compile: bool = False,
        models: Sequence[str] | None = None,
    ) -> None:
        """Make an engine; the pipelines stay as they are.

        Args:
            pipe: The pipeline.
            also: Further pipelines of the same models, such as `from_pipe` makes, by the task that requests name.
            store: Adapters in files, which are put into slots as requests need them; None for those that are loaded.
            rows: The most rows of a joint call. Requests are taken in until twice as many wait.
            queue: The most requests that wait to be taken in.
            buckets: Row counts up to which calls are padded, so that the bits of a row do not depend on who else is there; None
                pads none, or with `compile` powers of two.
            compile: Whether models are called by `torch.compile`.
            models: Names of the models whose calls are made jointly; None is all but VAEs, whose `decode` waits like a call.

        Raises:
            SpecError: For what is no pipeline of diffusers, numbers below 1, a bucket below 2, an unknown model, and a store
                for other models.
        """
        self.pipes = {"": pipe, **(also or {})}
        for task, one in self.pipes.items():
            check_pipeline(task, one)
        for name, value in (("rows", rows), ("queue", queue)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"{name} must be a whole number, 1 or more, not {quote(value)}", path=(name,))
        self.rows, self.queue, self.store = rows, queue, store
        self.forms = CallForms()
        self.models = list_models(self.pipes, models)
        for name, module in store.modules.items() if store is not None else ():
            if all(module is not model for model in self.models.values()):
                raise SpecError(f"the store's '{name}' is not one of the engine's models: {', '.join(self.models)}")
        self.caller = ModelCaller(self.forms, [*self.models.values()], read_buckets(buckets, rows, compile), compile)
        self.stand_ins = {
            id(model): make_stand_in(model, ("decode",) if hasattr(model, "decode") else ("__call__",))
            for model in self.models.values()
        }
        self.learnt: dict[Any, LearntKind] = {}
        self._denoisers = {id(model) for pipe in self.pipes.values() for model in list_denoisers(pipe).values()}
        self.calls = 0  # joint ones, and those that were made alone
        self._queued: deque[Ticket] = deque()
        self._active: list[ActiveRequest] = []
        self._lock = threading.RLock()  # of a step
        self._queue_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._news = threading.Event()
        self._draining = False
        self.fault: BaseException | None = None  # by which the engine's own thread has ended

    def __repr__(self) -> str:
        queued, running = self.count_requests()
        return f"Engine({', '.join(self.models)}; {queued} queued, {running} running, {self.calls} calls)"

    # --- requests

    def submit(self, request: Request) -> Ticket:
        """Accept a request. Never waits: its pipeline is called by later steps.

        Args:
            request: The request.

        Returns:
            Its ticket.

        Raises:
            QueueFull: Where as many wait already as the queue holds, and after `drain`.
            SpecError: For an unknown task, argument, scheduler or adapter, with the nearest name.
        """
        if not isinstance(request, Request):
            raise SpecError(f"a request must be a fxplug.serving.Request, not {quote(request)}")
        if request.task not in self.pipes:
            raise SpecError(
                f"no task {quote(request.task)}{did_you_mean(request.task, self.pipes)}; there are "
                f"{', '.join(map(repr, self.pipes))}", path=("task",),
            )  # fmt: skip
        pipe = self.pipes[request.task]
        check_call(request, pipe)
        check_regions(request, pipe)
        request = fold_regions(request, [*self.caller.slots.values()])
        find_scheduler(request.scheduler, pipe)
        for one in self._list_runs(request):
            self._check_adapters(one)
        self._check_generators(request)
        ticket = Ticket(request, self._step_by_hand)
        if request.deadline_s is not None:
            ticket.deadline = time.monotonic() + request.deadline_s
        with self._queue_lock:
            if self.fault is not None:
                raise QueueFull(f"the engine has ended by an error, and takes no more: {self.fault}")
            if self._draining:
                raise QueueFull("the engine is being drained, and takes no more")
            if len(self._queued) >= self.queue:
                raise QueueFull(f"{len(self._queued)} requests wait already: the queue holds {self.queue}")
            self._queued.append(ticket)
        self._news.set()
        return ticket

    def _check_adapters(self, request: Request) -> None:
        if self.store is not None:
            self.store.check(request.adapters)
            return
        self.caller.check_adapters(request.adapters)

    def _check_generators(self, request: Request) -> None:
        """Refuse a generator that another request draws from: which numbers each gets would depend on who comes first."""
        if not list_generators(request.call):
            return
        with self._queue_lock:
            others = [*self._queued, *(one.ticket for one in self._active)]
        taken = {id(each) for other in others for each in list_generators(other.request.call)}
        if any(id(each) in taken for each in list_generators(request.call)):
            raise SpecError(
                "another request that has not ended has this generator: give each its own, or a seed",
                path=("call",), key="generator",
            )  # fmt: skip

    def generate(self, requests: Iterable[Request]) -> Iterator[Ticket]:
        """Run requests, as many at once as fit, and give their tickets as they end; failed and cancelled ones, too.

        Args:
            requests: The requests. They are read as there is room for them.

        Yields:
            The tickets.

        Raises:
            SpecError: As `submit`, at the first request that is wrong.
        """
        waiting, open_ = iter(requests), list[Ticket]()
        more = True
        while more or open_:
            while more and len(self._queued) < self.queue:
                request = next(waiting, None)
                more = request is not None
                if request is not None:
                    open_.append(self.submit(request))
            if not self._step_by_hand() and open_:
                open_[0].wait(WAIT)
            ended = [ticket for ticket in open_ if ticket.has_ended()]
            open_ = [ticket for ticket in open_ if not ticket.has_ended()]
            yield from ended

    def count_requests(self) -> tuple[int, int]:
        """Count the requests that wait to be taken in, and those that run."""
        return len(self._queued), sum(not one.is_region for one in self._active)

    def count_denoiser_calls(self) -> tuple[int, int]:
        """Count the calls of denoisers, joint ones and others, and the samples in them."""
        made, rows = self.caller.made, self.caller.rows
        return sum(made[key] for key in self._denoisers), sum(rows[key] for key in self._denoisers)

    @property
    def has_thread(self) -> bool:
        """Whether a thread makes the steps."""
        return self._thread is not None

    # --- steps

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._queued and not self._active

    def step(self) -> list[Ticket]:
        """Take requests in, make one joint call, and let those whose call it was go on to their next one.

        Waits at most 50 ms, where all that is missing is an adapter that is being read.

        Returns:
            The tickets that have ended.

        Raises:
            SpecError: Within a request, as in a callback of it; so do `generate`, `drain`, `update` and a ticket's `result`.
        """
        check_outside()
        with self._lock:
            for one in [*self._active]:  # as an interrupt has left them
                if one.thread.done:
                    self._end(one, one.thread.error)
                elif one.thread.call is None:
                    self._resume(one)
            ended = self._cancel() + self._take_in()
            if not self._active:
                if self._queued and not ended:
                    time.sleep(WAIT)
                return ended
            group = self._choose()
            self.calls += 1
            form = self.forms.form_of(group[0].thread.call)
            form.called = self.calls
            with group[0].thread.draws if len(group) == 1 else nullcontext():
                self.caller.make([(one.thread.call, one.mixture(one.thread.call.model)) for one in group])
            return ended + [ticket for one in group for ticket in self._answer(one)]

    def _step_by_hand(self) -> bool:
        """Make a step unless a thread does."""
        check_outside()
        if self._thread is not None:
            return False
        self.step()
        return True

    def _cancel(self) -> list[Ticket]:
        now, ended = time.monotonic(), []
        with self._queue_lock:
            for ticket in [t for t in self._queued if t.why_cancelled(now)]:
                self._queued.remove(ticket)
                ticket.finish(error=Cancelled(ticket.why_cancelled(now)))
                ended.append(ticket)
        for one in [a for a in self._active if not a.is_region and a.ticket.why_cancelled(now)]:
            one.thread.cancel()
            ended += self._end(one, Cancelled(one.ticket.why_cancelled(now)))
        return ended

    def _take_in(self) -> list[Ticket]:
        """Start requests while there is room; who waits for a slot keeps nobody else."""
        ended: list[Ticket] = []
        at = 0
        while sum(one.rows for one in self._active) < 2 * self.rows:
            with self._queue_lock:
                if at >= len(self._queued):
                    break
                ticket = self._queued[at]
            resources = ExitStack()
            try:
                names = {name: None for one in self._list_runs(ticket.request) for name in one.adapters}
                if self.store is not None and names:
                    if (lease := self.store.lease(names)) is None:
                        ticket.move("waiting")
                        at += 1
                        continue
                    resources.callback(lease.end)
                with self._queue_lock:
                    self._queued.remove(ticket)
                runs = self._start(ticket, resources)
            except Exception as error:  # what the adapters' files or the pipeline's first run raise
                with self._queue_lock:
                    if ticket in self._queued:
                        self._queued.remove(ticket)
                resources.close()
                ticket.finish(error=error)
                ended.append(ticket)
                continue
            except BaseException:  # an interrupt: it waits as before
                resources.close()
                with self._queue_lock:
                    if ticket not in self._queued:
                        self._queued.appendleft(ticket)
                raise
            self._active += runs
            ended += [each for one in runs for each in self._resume(one)]
        return ended

    def _start(self, ticket: Ticket, resources: ExitStack) -> list[ActiveRequest]:
        """Make the runs of a request: its own, and one of each region."""
        request, pipe = ticket.request, self.pipes[ticket.request.task]
        scheduler = find_scheduler(request.scheduler, pipe)
        group = RegionGroup(request, pipe) if request.regions else None
        runs: list[ActiveRequest] = []
        for each in self._list_runs(request):
            adapters = resources.enter_context(self.caller.pin(each.adapters))
            if (learnt := self.learnt.get(kind := classify_request(each))) is None:
                learnt = self.learnt[kind] = learn_request(
                    each, pipe, self.stand_ins, self.forms, scheduler, partial(self._note_call, ticket)
                )
            rows = learnt.check()
            used = {name for key, names in adapters.items() if key in learnt.models for name in names}
            if idle := [name for name in each.adapters if name not in used]:
                raise SpecError(
                    f"{type(pipe).__name__} calls no model that has {', '.join(idle)} in a way that is seen, so nothing would "
                    "come of it: leave it out", path=("adapters",),
                )  # fmt: skip
            call = make_call(each)
            own, count = copy_pipeline(pipe, self.stand_ins, scheduler)
            draws = OwnDraws() if group is not None or list_generators(call) else nullcontext()
            thread = RequestThread(partial(own, **call), self.forms.describe, draws)
            if group is not None:
                group.runs.append((thread, count))
            runs.append(ActiveRequest(ticket, each, thread, own, count, rows, resources, adapters, group, is_region=bool(runs)))
        ticket.move("running")
        return runs

    def _list_runs(self, request: Request) -> list[Request]:
        return [request, *make_region_requests(request)]

    def _note_call(self, ticket: Ticket, model: nn.Module) -> None:
        ticket.denoises |= id(model) in self._denoisers

    def _answer(self, one: ActiveRequest) -> list[Ticket]:
        """Let a run go on with the result of its call; with regions once those of a denoiser are blended."""
        if one not in self._active or one.group is None or id(one.thread.call.model) not in self._denoisers:
            return self._resume(one)
        try:
            if not one.group.collect(one.thread):
                return []
        except Exception as error:  # of the call, or of runs that are not in step
            return self._end(one, error)
        return [ticket for each in [a for a in self._active if a.group is one.group] for ticket in self._resume(each)]

    def _resume(self, one: ActiveRequest) -> list[Ticket]:
        """Let a run go on to its next call; gives its ticket if it has ended."""
        if one not in self._active:  # another run of its request has ended it
            return []
        callbacks = [one.request.call.get(name) for name in CALLBACKS]
        foreign = any(each is not None and not isinstance(each, ReadOnlyCallback) for each in callbacks)
        watched = self.models.values() if foreign else ()
        before = [(model, list_state(model)) for model in watched if not hasattr(model, "decode")]
        one.thread.resume()
        for model, state in before:
            if (path := find_change(state, list_state(model))) is not None:
                one.thread.cancel()
                error = SpecError(
                    f"a callback writes into {type(model).__name__}.{path}, which other requests use: change what the request "
                    "has for itself, and give adapters by Request(adapters=...)", path=("call",),
                )  # fmt: skip
                LOG.error("request %s: %s; pictures that are made now may be wrong", one.ticket.id[:8], error)
                return self._end(one, error)
        if one.is_region and not one.thread.done and one.thread.call.method == "decode":  # its picture is not asked for
            one.thread.cancel()
        if not one.is_region:
            one.ticket.move("running", one.count.steps, one.steps)
        if one.thread.done:
            return self._end(one, one.thread.error)
        self._note_call(one.ticket, one.thread.call.model)
        one.rows = max(one.rows, one.thread.call.rows)
        self._active = [*(a for a in self._active if a is not one), one]  # who waits longest is first
        one.parked = self.calls
        return []

    def _end(self, one: ActiveRequest, error: BaseException | None) -> list[Ticket]:
        """End a request; where a region has its picture the others go on."""
        if one not in self._active:
            return []
        if one.is_region and error is None:
            self._active.remove(one)
            return []
        for each in [a for a in self._active if a.ticket is one.ticket]:
            each.thread.cancel()
        one.resources.close()
        one.ticket.finish(None if one.is_region else one.thread.result, error)
        self._active = [a for a in self._active if a.ticket is not one.ticket]
        self._news.set()
        return [one.ticket]

    def _choose(self) -> list[ActiveRequest]:
        """Choose whose calls are made: those of the form whose turn was longest ago, and of these the oldest.

        Texts go first, which are short: so who has come together goes on together.
        """
        forms = self.forms

        def get_priority(one: ActiveRequest) -> tuple[bool, int]:
            call = one.thread.call
            if call.key is None:
                return True, one.parked
            return id(call.model) in self._denoisers, forms.form_of(call).called

        waiting = [one for one in self._active if one.group is None or not one.group.is_waiting(one.thread)]
        head = min(waiting, key=get_priority)
        call, form = head.thread.call, forms.form_of(head.thread.call)
        group, rows = [head], call.rows
        most = self.caller.limit(self.rows, call, form)
        for one in waiting:
            other = one.thread.call
            if one is not head and not form.refused and other.key == call.key and rows + other.rows <= most:
                group.append(one)
                rows += other.rows
        return group

    # --- a thread of its own

    def start(self) -> None:
        """Start a thread that makes the steps, until `drain`."""
        with self._queue_lock:
            if self._thread is None:
                self._draining = False
                self._thread = threading.Thread(target=self._run, name="fxplug engine", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        try:
            while not (self._draining and self.is_idle):
                self._news.clear()
                self.step()
                if self.is_idle and not self._draining:
                    self._news.wait(WAIT)
        except BaseException as error:  # of whatever is called within a step
            LOG.exception("the engine's thread ends by an error")
            self.fault = error
            self._end_all(error)

    def drain(self, seconds: float = 60.0) -> None:
        """Take no more requests, finish those that are accepted, and cancel what is left. No thread is left then.

        Args:
            seconds: How long it may take.
        """
        check_outside()
        self._draining = True
        end = time.monotonic() + seconds
        self._news.set()
        while not self.is_idle and time.monotonic() < end and self.fault is None:
            if not self._step_by_hand():
                time.sleep(WAIT / 5)
        with self._lock:
            self._end_all(Cancelled(f"the engine was drained, and the request did not end within {seconds:g} s"))
        if (thread := self._thread) is not None:
            thread.join()
            self._thread = None

    def _end_all(self, error: BaseException) -> None:
        with self._queue_lock:
            queued = [self._queued.popleft() for _ in range(len(self._queued))]
        for ticket in queued:
            ticket.finish(error=error)
        for one in [a for a in self._active if not a.is_region]:
            one.thread.cancel()
            self._end(one, error)

    # --- weights

    def update(self, state: Mapping[str, Tensor]) -> None:
        """Put new weights into the models between two steps, all or none, as a training of a policy does.

        Requests that run go on with them.

        Args:
            state: Tensors by the model's name and theirs in its state dict: "unet.conv_in.weight".

        Raises:
            SpecError: For a model or tensor that there is not, with the nearest name, for another shape, values that the tensor
                cannot take, and a table of slots; nothing is changed then.
        """
        check_outside()
        pairs = check_weights(self.models, state)
        with self._lock:
            write_weights(pairs)
