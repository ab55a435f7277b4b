"""A pipeline that is served: opened, given slots, warmed up; and orders of clients as requests of its engine."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
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
from ..tickets import Ticket
from .bodies import PictureOrder
from .orders import OrderTaker, PreviewShown
from .pictures import Preview, list_pictures
from .server_config import ServerConfig, Size, parse_size
from .tasks import make_tasks

LOG = logging.getLogger("fxplug.serving")
STEPS = 4  # of a call that warms up
WORDS = ("", ", seen from above")  # of two calls that are made at once, which prove something only where they differ
PATIENCE = 600.0  # seconds for adapters that are kept


class Service(OrderTaker):
    """A pipeline behind an engine, with the adapters of a folder."""

    store: AdapterStore | None

    def __init__(self, config: ServerConfig) -> None:
        """Open the pipeline, and give its models slots.

        Args:
            config: The configuration.

        Raises:
            SpecError: For a pipeline, model, adapter or scheduler that is not there.
            ArtifactError: For a folder of adapters that cannot be read.
        """
        super().__init__(config)
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
        self.previews: dict[Size | None, Preview] = {}
        self._kept: Lease | None = None

    # --- orders

    def _take(self, order: PictureOrder, show: PreviewShown | None) -> list[Ticket]:
        requests = [self._with_previews(one, order, show) for one in order.requests] if show is not None else order.requests
        tickets: list[Ticket] = []
        try:
            for request in requests:
                tickets.append(self.engine.submit(request))
        except BaseException:  # all or none, an interrupt, too
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets

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

    def start(self) -> None:
        """Start the engine's thread, and beside it the warm-up."""
        self.engine.start()
        threading.Thread(target=self._try_to_warm, name="fxplug warm-up", daemon=True).start()

    def _try_to_warm(self) -> None:
        try:
            self.warm()
            LOG.info("ready")
        except Exception as error:  # of the pipeline
            if not self.draining:
                kind = "" if isinstance(error, FxplugError) else f"{type(error).__name__}: "
                self.fault = f"the warm-up failed: {kind}{error}"
                LOG.error("%s", self.fault)

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

    # --- what operators ask for

    def find_fault(self) -> str:
        """Return why the warm-up failed, or by what the engine's thread has ended; "" where all is well."""
        return self.fault or (str(self.engine.fault) if self.engine.fault is not None else "")

    def count_replicas(self) -> int:
        """Count the engines: one."""
        return 1

    def count_requests(self) -> tuple[int, int]:
        """Count the requests of the engine."""
        return self.engine.count_requests()

    def count_denoiser_calls(self) -> tuple[int, int]:
        """Count the calls of the engine."""
        return self.engine.count_denoiser_calls()

    def close(self, seconds: float) -> None:
        """End: finish what is accepted, within some seconds, and cancel the rest."""
        self.draining = True
        self.engine.drain(seconds)
        if self._kept is not None:
            self._kept.end()
        if self.store is not None:
            self.store.close()


def freeze_objects() -> None:
    """Take what is there now out of Python's collections of garbage, for a process that serves and nothing else.

    A full one walks through all models and graphs, in which time nothing is answered; requests cause it.
    """
    gc.collect()
    gc.freeze()


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
    return load_pass(adapters.pass_, at=adapters.at, rank=adapters.rank_max, regions=adapters.regions, **room)


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
