"""A pipeline that is served: opened, given slots, warmed up; and orders of clients as requests of its engine."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from ...core.errors import FxplugError, SpecError, did_you_mean, quote
from ...core.spec.pass_file import import_target, load_pass
from ...pipelines.opening import call_parameters, open_pipeline, quantize_part
from ...pipelines.pipeline_model import list_denoisers
from ...pipelines.recorded_run import get_components
from ...pipelines.rewriting import rewrite_pipeline
from ..checks import find_scheduler
from ..engine import Engine
from ..learning import ReadOnlyCallback
from ..offloading import ModelOffload
from ..requests import Request
from ..store import AdapterStore, Lease
from ..tickets import QueueFull, Ticket
from .bodies import PictureOrder
from .errors import RequestError
from .keys import ApiKey
from .pictures import Preview, list_pictures
from .server_config import ServerConfig, Size, parse_size
from .tasks import make_tasks

LOG = logging.getLogger("fxplug.serving")
STEPS = 4  # of a call that warms up
WORDS = ("", ", seen from above")  # of two calls that are made at once, which prove something only where they differ
TRIGGERS = ("modelspec.trigger_phrase", "trigger_words", "trigger_word")
LONGEST_WORDS = 1_000
PATIENCE = 600.0  # seconds for adapters that are kept

PreviewShown = Callable[[int, Image.Image], None]


@dataclass(eq=False)
class AcceptedOrder:
    """An order that the engine has accepted: a ticket for each picture, whose it is, and when it came."""

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


class Service:
    """A pipeline behind an engine, with the adapters of a folder.

    `ready` is set once the warm-up is done, and `fault` says why it failed.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Open the pipeline, and give its models slots.

        Args:
            config: The configuration.

        Raises:
            SpecError: For a pipeline, model, adapter or scheduler that is not there.
            ArtifactError: For a folder of adapters that cannot be read.
        """
        self.config = config
        self.pipe = open_served(config)
        for name in config.engine.schedulers:
            find_scheduler(name, self.pipe)
        tasks = make_tasks(self.pipe, {name: config.base / folder for name, folder in config.controls.items()})
        self.pipes = {"": self.pipe, **tasks}
        self.store = _make_store(config, self.pipe)
        if config.offload:
            parts = (part for pipe in self.pipes.values() for part in get_components(pipe).values())
            ModelOffload((part for part in parts if isinstance(part, torch.nn.Module)), _find_device(config))
        engine = config.engine
        self.engine = Engine(
            self.pipe, also=tasks, store=self.store, rows=engine.rows, queue=engine.queue, buckets=engine.buckets,
            compile=engine.compile,
        )  # fmt: skip
        self.ready = threading.Event()
        self.fault = ""
        self.previews: dict[Size | None, Preview] = {}
        self.draining = False
        self._kept: Lease | None = None
        self._lock = threading.Lock()
        self._open: list[AcceptedOrder] = []
        self.mean_s = 1.0  # of requests that ended lately

    def adapter_names(self) -> list[str]:
        """Return the names of the adapters that can be used."""
        return [info.name for info in self.store.list() if not info.error] if self.store else []

    # --- orders

    def submit(self, order: PictureOrder, key: ApiKey, keys: int = 1, show: PreviewShown | None = None) -> AcceptedOrder:
        """Accept an order: all of its pictures, or none.

        Args:
            order: The order.
            key: That of the client.
            keys: How many keys there are, which share the queue.
            show: What is called with the number and the picture of each preview, in the engine's thread.

        Returns:
            What is accepted.

        Raises:
            RequestError: 429 where the queue, or the share of this key, is full; 503 once the server ends.
            SpecError: As `Engine.submit`.
        """
        if self.draining:
            raise RequestError("the server is being shut down", 503, code="shutting_down", retry=10)
        requests = [self._with_previews(one, order, show) for one in order.requests] if show is not None else order.requests
        tickets: list[Ticket] = []
        with self._lock:
            self._open = [one for one in self._open if not one.has_ended()]
            waiting = sum(t.state in ("queued", "waiting") for one in self._open if one.key is key for t in one.tickets)
            share = max(order_size := len(requests), self.config.engine.queue // keys)
            if waiting + order_size > share:
                raise self._full(f"{waiting} pictures of this key wait already, and its share of the queue is {share}")
            try:
                for request in requests:
                    tickets.append(self.engine.submit(request))
            except BaseException as error:  # all or none, an interrupt, too
                for ticket in tickets:
                    ticket.cancel()
                if isinstance(error, QueueFull):
                    raise self._full(str(error)) from None
                raise
            accepted = AcceptedOrder(order, tickets, key)
            self._open.append(accepted)
        return accepted

    def _full(self, text: str) -> RequestError:
        waiting = max(1, len(self._open) // max(1, self.config.engine.rows))
        return RequestError(text, 429, code="queue_full", retry=max(1, min(60, round(self.mean_s * waiting))))

    def _with_previews(self, request: Request, order: PictureOrder, show: PreviewShown) -> Request:
        """Add to a request what draws its previews, where the pipeline tells its latents at each step."""
        if not order.previews or "callback_on_step_end" not in call_parameters(self.pipes[request.task]):
            return request
        preview = self.previews.get(order.size) or next(iter(self.previews.values()), None)
        size = order.size or next(iter(size for size in self.previews if size), None)
        made = 0

        def draw(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            nonlocal made
            steps = len(pipe.scheduler.timesteps)
            due = {-(-number * steps // order.previews) for number in range(1, order.previews + 1)}
            if step + 1 in due and isinstance(latents := kwargs.get("latents"), Tensor):
                width, height = size or (latents.shape[-1] * 8, latents.shape[-2] * 8)
                picture = preview.draw(latents, (width, height)) if preview else None
                show(made, picture or Image.new("RGB", (width, height), "grey"))
                made += 1
            return {}

        return request.model_copy(update={"call": {**request.call, "callback_on_step_end": ReadOnlyCallback(draw)}})

    # --- the warm-up

    def warm(self) -> None:
        """Make a picture alone and two at once in each size, so that later requests wait for no learning and no compiler.

        Raises:
            FxplugError: Where a picture could not be made, and where two at once differ from one alone.
            Exception: What the pipeline raised.
        """
        config = self.config
        if self.store and config.adapters.keep:
            self._kept = _lease(self.store, config.adapters.keep)
        sizes: list[Size | None] = [parse_size(size) for size in config.warm.sizes] or [None]
        for size in sizes:
            (alone,) = self._run([self._make_call(size, WORDS[0])])
            self._run([self._make_call(size, words) for words in WORDS])
            latents, picture = alone
            if config.http.previews == "linear" and latents is not None and (found := Preview.learn(latents, picture)):
                self.previews[size or picture.size] = found
                self.previews.setdefault(None, found)
        self.ready.set()

    def _make_call(self, size: Size | None, words: str) -> tuple[Request, list[Tensor]]:
        known, call, seen = call_parameters(self.pipe), dict(self.config.call), list[Tensor]()
        if "prompt" in known and not any("embeds" in name for name in call):
            call["prompt"] = self.config.warm.prompt + words
        if "num_inference_steps" in known:
            call["num_inference_steps"] = min(STEPS, self.config.limits.steps)
        if size is not None:
            call |= {"width": size[0], "height": size[1]}
        if "callback_on_step_end" in known:

            def look(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
                seen[:] = [kwargs["latents"]] if isinstance(kwargs.get("latents"), Tensor) else []
                return {}

            call["callback_on_step_end"] = ReadOnlyCallback(look)
        return Request(call=call, seed=0 if "generator" in known else None), seen

    def _run(self, calls: Sequence[tuple[Request, list[Tensor]]]) -> list[tuple[Tensor | None, Image.Image]]:
        tickets = [self.engine.submit(request) for request, _ in calls]
        found = []
        patience = PATIENCE if self.engine.has_thread else None
        for ticket, (_, seen) in zip(tickets, calls, strict=True):
            picture = list_pictures(ticket.result(patience))[0][0]
            found.append((seen[0] if seen else None, picture))
        return found

    def check(self) -> list[tuple[str, str, str]]:
        """Make pictures alone and joined, and list the forms of the calls of models, as `CallForms.list_forms` does."""
        self.warm()
        return list(self.engine.forms.list_forms(self.engine.models))

    def read_trigger_words(self, name: str) -> str:
        """Read the trigger words in the metadata of an adapter's file; "" where it has none."""
        if self.store is None:
            return ""
        path = self.store.get_path(name)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        for file in files[:1]:
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata() or {}
            return next((metadata[key][:LONGEST_WORDS] for key in TRIGGERS if metadata.get(key)), "")
        return ""

    def close(self, seconds: float) -> None:
        """End: finish what is accepted, within some seconds, and cancel the rest."""
        self.draining = True
        self.engine.drain(seconds)
        if self._kept is not None:
            self._kept.end()
        if self.store is not None:
            self.store.close()


def open_served(config: ServerConfig) -> Any:
    """Open the pipeline of a configuration, and give its models the slots and passes that it names.

    Args:
        config: The configuration.

    Returns:
        The pipeline.

    Raises:
        SpecError: It cannot be opened, or has no such model.
    """
    device = torch.device("cpu") if config.offload else _find_device(config)
    dtype = getattr(torch, config.dtype) if config.dtype else None
    path = config.base / config.model
    if ":" in config.model and not path.exists():
        sys.path.insert(0, str(config.base.absolute()))
        make: Any = import_target(config.model)
        pipe = make()
        if not get_components(pipe):
            raise SpecError(f"'{config.model}' gave {quote(pipe)}, not a pipeline of diffusers", path=("model",))
        pipe.to(device, *([dtype] if dtype else []))
    else:
        pipe = open_pipeline(path if path.exists() else config.model, dtype=dtype, device=device)
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    models = {name: part for name, part in get_components(pipe).items() if isinstance(part, torch.nn.Module)}
    denoisers = [name for name in models if name in list_denoisers(pipe)]
    if config.quantize:
        for name in denoisers:
            quantize_part(models[name], config.quantize, device)
    passes: dict[str, list[Any]] = {name: list(own) for name, own in config.passes.items()}
    if config.adapters.folder is not None:
        for name in config.adapters.models or denoisers:
            passes.setdefault(name, []).append(_make_slots(config))
    if (wrong := next((name for name in passes if name not in models), None)) is not None:
        raise SpecError(f"the pipeline has no model {quote(wrong)}{did_you_mean(wrong, models)}; it has {', '.join(models)}")
    if passes:
        size = parse_size(config.warm.sizes[0]) if config.warm.sizes else None
        sides = {"width": size[0], "height": size[1]} if size else {}
        pipe = rewrite_pipeline(pipe, passes, **_example_call(pipe, config, sides))
    return pipe


def _find_device(config: ServerConfig) -> torch.device:
    return torch.device(config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _example_call(pipe: Any, config: ServerConfig, sides: Mapping[str, int]) -> dict[str, Any]:
    known, call = call_parameters(pipe), {**config.call, **sides}
    if "prompt" in known and not any("embeds" in name for name in call):
        call.setdefault("prompt", config.warm.prompt or "a photo")
    return call


def _make_slots(config: ServerConfig) -> Any:
    adapters = config.adapters
    room: dict[str, Any] = {"slots": adapters.slots, "per_sample": adapters.per_sample, "groups": adapters.groups}
    return load_pass(adapters.pass_, at=adapters.at, rank=adapters.rank_max, **room)


def _make_store(config: ServerConfig, pipe: Any) -> AdapterStore | None:
    adapters = config.adapters
    if adapters.folder is None:
        return None
    names = adapters.models or [*list_denoisers(pipe)]
    modules = {name: get_components(pipe)[name] for name in names}
    return AdapterStore(
        config.base / Path(adapters.folder), modules, host_bytes=adapters.host_mib << 20, resize=adapters.resize,
        partial=adapters.partial,
    )  # fmt: skip


def _lease(store: AdapterStore, names: Sequence[str]) -> Lease:
    end = time.monotonic() + PATIENCE
    while (lease := store.lease(names)) is None:
        if time.monotonic() > end:
            raise FxplugError(f"the adapters {', '.join(names)} of adapters.keep do not fit into the slots, or cannot be read")
        time.sleep(0.05)
    return lease
