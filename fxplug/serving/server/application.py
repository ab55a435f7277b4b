"""The application: OpenAI's endpoints for pictures, jobs, models, adapters, and what operators ask for."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from PIL import Image
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import OutOfMemoryError

from ...core.errors import SpecError, did_you_mean, quote
from ..parked import Cancelled
from ..tickets import Ticket
from .bodies import PictureOrder, read_order
from .edits import read_edit
from .errors import RequestError, convert_spec_error
from .jobs import ENDS, Jobs, PictureJob, encode_base64, follow
from .keys import ApiKey, find_key
from .metrics import KIND, Metrics, log_request
from .orders import AcceptedOrder, OrderTaker
from .page import read_page
from .picture_files import READER
from .pictures import MIMES, encode_picture, list_pictures
from .uploads import add_adapter_file, delete_adapter_file

LOG = logging.getLogger("fxplug.serving")
ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
SEND = 30.0  # seconds in which a client must read what is sent, and send the next part of a body
SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Handler = Callable[["Server", Request, ApiKey], Awaitable[Response]]


class Server:
    """The endpoints of a service."""

    def __init__(self, service: OrderTaker, keys: list[ApiKey] | None) -> None:
        self.service, self.keys, self.config = service, keys, service.config
        self.jobs = Jobs(self.config.jobs, self.config.base)
        self.metrics = Metrics(service)
        self.tasks: set[asyncio.Task[None]] = set()
        self.uploading = asyncio.Lock()  # one client at a time changes the folder of adapters

    def make_application(self) -> Starlette:
        """Make the ASGI application."""
        routes = [
            Route("/v1/images/generations", self._wrap(Server.create_images), methods=["POST"]),
            Route("/v1/images/edits", self._wrap(Server.create_edits), methods=["POST"]),
            Route("/v1/pictures/{name}", self._wrap(Server.get_picture), methods=["GET"]),
            Route("/v1/jobs", self._wrap(Server.create_job), methods=["POST"]),
            Route("/v1/jobs/{name}", self._wrap(Server.get_job), methods=["GET"]),
            Route("/v1/jobs/{name}", self._wrap(Server.cancel_job), methods=["DELETE"]),
            Route("/v1/jobs/{name}/events", self._wrap(Server.follow_job), methods=["GET"]),
            Route("/v1/models", self._wrap(Server.list_models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._wrap(Server.get_model), methods=["GET"]),
            Route("/v1/adapters", self._wrap(Server.list_adapters), methods=["GET"]),
            Route("/v1/adapters", self._wrap(Server.add_adapter), methods=["POST"]),
            Route("/v1/adapters/{name}", self._wrap(Server.get_adapter), methods=["GET"]),
            Route("/v1/adapters/{name}", self._wrap(Server.remove_adapter), methods=["DELETE"]),
            Route("/health", self._get_health, methods=["GET"]),
            Route("/ready", self._get_ready, methods=["GET"]),
            Route("/metrics", self._wrap(Server.get_metrics), methods=["GET"]),
        ]
        if self.config.http.page:
            routes.append(Route("/", _get_page, methods=["GET"]))
        cors = self.config.http.cors
        middleware = [Middleware(CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"])] if cors else []
        handlers: Any = {404: _answer_unknown, 405: _answer_unknown}
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    def _wrap(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Add to an endpoint the key, the id of the request, the form of errors, and a line in the log."""

        async def endpoint(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            request.state.id = given if ID.fullmatch(given) else uuid.uuid4().hex
            request.state.facts = {}
            start = time.monotonic()
            try:
                key = find_key(self.keys, request.headers.get("authorization"))
                response = await handler(self, request, key)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:  # each has an answer
                response = self._answer_error(error, request)
            response.headers["X-Request-Id"] = request.state.id
            seconds = time.monotonic() - start
            if response.status_code >= 400 and "outcome" not in request.state.facts:
                self.metrics.note("refused", seconds)
            facts = {"status": response.status_code, "seconds": round(seconds, 3), **request.state.facts}
            log_request(id=request.state.id, method=request.method, path=request.url.path, **facts)
            return response

        return endpoint

    def _answer_error(self, error: Exception, request: Request) -> Response:
        error = self._convert_error(error, request.state.id)
        headers = {"Retry-After": str(error.retry)} if error.retry else {}
        return JSONResponse(error.describe(), error.status, headers)

    def _convert_error(self, error: BaseException, name: str, ticket: Ticket | None = None) -> RequestError:
        """Convert what was raised to what the client is told."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, Cancelled):
            if ticket is not None and self.service.draining and not ticket.cancels:
                return RequestError("the server was shut down before this was finished", 503, code="shutting_down", retry=10)
            late = ticket is not None and not ticket.cancels
            return RequestError(str(error), 504 if late else 499, code="deadline" if late else "cancelled")
        if isinstance(error, SpecError):
            asked = [] if ticket is None else [ticket.request.adapters, *(one.adapters for one in ticket.request.regions)]
            if gone := {name for adapters in asked for name in adapters} - {*self.service.adapter_names()}:
                text = f"the adapter {quote(min(gone))} was deleted before this was made, or cannot be read any more"
                return RequestError(text, 404, code="adapter_not_found")
            found = convert_spec_error(error)
            return RequestError(self._hide_folder(str(found)), found.status, param=found.param)
        ours = isinstance(error, (MemoryError, OutOfMemoryError)) or self.service.find_fault()
        if ticket is not None and not ticket.denoises and not ours:
            return RequestError(f"the pipeline refuses this: {self._hide_folder(str(error))}", code="refused_by_pipeline")
        LOG.error("request %s failed: %s", name, "".join(traceback.format_exception(error)))
        return RequestError(f"the server failed to make this; its log says why, under {name}", 500, code="failed")

    def _hide_folder(self, text: str) -> str:
        """Take the place of the adapters on this machine out of a text: clients know names alone."""
        store = self.service.store
        return text if store is None else text.replace(f"{store.folder}/", "").replace(f" in {store.folder}", "")

    # --- pictures

    async def _read_order(self, request: Request, key: ApiKey) -> PictureOrder:
        raw = await read_body(request, self.config.limits.body_mib << 20)
        given = raw, self.config, self.service.pipe, self.service.adapter_names(), key
        return await asyncio.get_running_loop().run_in_executor(READER, read_order, *given)

    async def create_images(self, request: Request, key: ApiKey) -> Response:
        """Answer a request for pictures, at once or as a stream."""
        return await self._draw(request, await self._read_order(request, key), key)

    async def create_edits(self, request: Request, key: ApiKey) -> Response:
        """Answer a request for pictures that are drawn from another one, within a mask, or along a control image."""
        raw = await read_body(request, self.config.limits.body_mib << 20)
        return await self._draw(request, await read_edit(raw, request.headers, self.service, key), key)

    async def _draw(self, request: Request, order: PictureOrder, key: ApiKey) -> Response:
        if order.stream:
            return self._stream(request, order, key)
        accepted = self.service.submit(order, key, self._count_keys())
        left = asyncio.ensure_future(_wait_for_end(request))
        ended = asyncio.ensure_future(self._wait(accepted))
        await asyncio.wait({left, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            accepted.cancel()
        left.cancel()
        await ended
        data = await self._collect(accepted, request.state.id, request.state.facts)
        return JSONResponse({"created": int(accepted.created), "data": data})

    def _count_keys(self) -> int:
        return len(self.keys) if self.keys else 1

    async def _wait(self, accepted: AcceptedOrder, tell: Callable[[], None] | None = None) -> None:
        """Wait until all pictures of an order have ended."""
        start = time.monotonic()

        async def follow_one(ticket: Ticket) -> None:
            async for _ in ticket.events(end_only=tell is None):
                if tell is not None:
                    tell()

        await asyncio.gather(*map(follow_one, accepted.tickets))
        seconds = time.monotonic() - start
        self.service.mean_s = 0.9 * self.service.mean_s + 0.1 * seconds
        for ticket in accepted.tickets:
            self.metrics.note(ticket.state, seconds, None if ticket.taken is None else max(0.0, ticket.taken - start))

    async def _collect(self, accepted: AcceptedOrder, name: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the pictures of an order that has ended. Raises RequestError for the first that failed."""
        request = accepted.order.requests[0]
        facts |= {"adapters": list(request.adapters), "pictures": len(accepted.tickets), "steps": accepted.steps[0]}
        facts["outcome"] = next((t.state for t in accepted.tickets if t.state != "done"), "done")
        rows: list[dict[str, Any]] = []
        for ticket, seed in zip(accepted.tickets, accepted.order.seeds, strict=True):
            try:
                result = ticket.result(0)
            except Exception as error:  # of the pipeline
                raise self._convert_error(error, name, ticket) from None
            for raw, kind in await asyncio.to_thread(_encode_all, result, accepted.order.format):
                rows.append({**self._give(raw, kind, accepted), "seed": seed})
        return rows

    def _give(self, raw: bytes, kind: str, accepted: AcceptedOrder) -> dict[str, Any]:
        if not accepted.order.as_url:
            return {"b64_json": encode_base64(raw)}
        return {"url": f"/v1/pictures/{self.jobs.store_picture(raw, MIMES[kind], accepted.key)}"}

    async def get_picture(self, request: Request, key: ApiKey) -> Response:
        """Answer a picture that was given as a URL."""
        found = self.jobs.find_picture(request.path_params["name"], key)
        return Response(found.raw, media_type=found.mime)

    def _stream(self, request: Request, order: PictureOrder, key: ApiKey) -> Response:
        loop = asyncio.get_running_loop()
        previews: asyncio.Queue[tuple[int, Image.Image] | None] = asyncio.Queue()

        def show(number: int, picture: Image.Image) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(previews.put_nowait, (number, picture))

        accepted = self.service.submit(order, key, self._count_keys(), show)
        kind = "image_edit" if order.requests[0].task else "image_generation"

        async def watch() -> None:
            await self._wait(accepted)
            previews.put_nowait(None)

        async def send() -> AsyncIterator[bytes]:
            task = self._keep(asyncio.ensure_future(watch()))
            facts: dict[str, Any] = {}
            try:
                try:
                    while (item := await previews.get()) is not None:
                        raw, _ = await asyncio.to_thread(encode_picture, [item[1]], order.format)
                        text = {"b64_json": encode_base64(raw), "partial_image_index": item[0], "created_at": int(time.time())}
                        yield _event(f"{kind}.partial_image", text)
                    await task
                    for row in await self._collect(accepted, request.state.id, facts):
                        yield _event(f"{kind}.completed", {**row, "created_at": int(accepted.created)})
                except Exception as error:  # each has an event
                    yield _event("error", self._convert_error(error, request.state.id).describe())
                log_request(id=request.state.id, path=request.url.path, event="end of stream", **facts)
            finally:  # whoever leaves
                accepted.cancel()

        return LimitedStream(send(), media_type="text/event-stream", headers=SSE)

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # --- jobs

    async def create_job(self, request: Request, key: ApiKey) -> Response:
        """Accept an order whose result is asked for later."""
        order = await self._read_order(request, key)
        if order.stream:
            raise RequestError("a job has events of its own: leave stream out", param="stream")
        job = self.jobs.add(key.digest.hex())
        try:
            job.accepted = self.service.submit(order, key, self._count_keys())
        except BaseException:  # a full queue, or that this task is ended: nobody knows the job
            self.jobs.drop(job)
            raise
        job.created = job.accepted.created
        request.state.facts["job"] = job.id
        self._keep(asyncio.ensure_future(self._run_job(job, job.accepted)))
        return JSONResponse(job.describe(), 202)

    async def _run_job(self, job: PictureJob, accepted: AcceptedOrder) -> None:
        def tell() -> None:
            states = {ticket.state for ticket in accepted.tickets}
            job.state = "running" if states - {"queued", "waiting"} else "queued"
            if (job.step, job.of) != accepted.steps:
                job.step, job.of = accepted.steps
                job.add_event("progress")

        facts: dict[str, Any] = {}
        try:
            await self._wait(accepted, tell)
            data = await self._collect(accepted, job.id, facts)
            self.jobs.finish(job, "done", data, None)
        except RequestError as error:
            state = "cancelled" if error.code == "cancelled" else "failed"
            self.jobs.finish(job, state, None, error.describe()["error"])
        except Exception as error:  # a mistake of ours: the client is told, and the log says which
            found = self._convert_error(error, job.id)
            self.jobs.finish(job, "failed", None, found.describe()["error"])
        log_request(job=job.id, state=job.state, seconds=round(time.time() - job.created, 3), **facts)

    async def get_job(self, request: Request, key: ApiKey) -> Response:
        """Answer the state of a job, and its result."""
        return JSONResponse(self.jobs.find(request.path_params["name"], key).describe())

    async def cancel_job(self, request: Request, key: ApiKey) -> Response:
        """Cancel a job."""
        job = self.jobs.find(request.path_params["name"], key)
        if job.accepted is not None:
            job.accepted.cancel()
        return JSONResponse(job.describe(), 202 if job.state not in ENDS else 200)

    async def follow_job(self, request: Request, key: ApiKey) -> Response:
        """Answer the events of a job, from its beginning."""
        job = self.jobs.find(request.path_params["name"], key)

        async def send() -> AsyncIterator[bytes]:
            async for event in follow(job):
                yield _event(event["type"], event)

        return LimitedStream(send(), media_type="text/event-stream", headers=SSE)

    # --- models and adapters

    def _infos(self, key: ApiKey) -> list[Any]:
        store = self.service.store
        return [info for info in store.list() if key.sees(info.name)] if store is not None else []

    async def list_models(self, request: Request, key: ApiKey) -> Response:
        """Answer the models: the base, and it with each adapter."""
        names = ["base", *(f"base:{info.name}" for info in self._infos(key) if not info.error)]
        return JSONResponse({"object": "list", "data": [_describe_model(name) for name in names]})

    async def get_model(self, request: Request, key: ApiKey) -> Response:
        """Answer one model."""
        name = request.path_params["name"]
        known = ["base", *(f"base:{info.name}" for info in self._infos(key) if not info.error)]
        if name not in known:
            raise RequestError(f"no model {quote(name)}{did_you_mean(name, known)}", 404, code="model_not_found")
        return JSONResponse(_describe_model(name))

    async def list_adapters(self, request: Request, key: ApiKey) -> Response:
        """Answer the adapters that the key sees."""
        return JSONResponse({"data": [self._describe_adapter(info) for info in self._infos(key)]})

    def _find_adapter(self, name: str, key: ApiKey) -> Any:
        infos = {info.name: info for info in self._infos(key)}
        if name not in infos:
            raise RequestError(f"no adapter {quote(name)}{did_you_mean(name, infos)}", 404, code="adapter_not_found")
        return infos[name]

    async def get_adapter(self, request: Request, key: ApiKey) -> Response:
        """Answer one adapter, with its trigger words where its file has them."""
        info = self._find_adapter(request.path_params["name"], key)
        words = await asyncio.to_thread(self.service.read_trigger_words, info.name)
        return JSONResponse(self._describe_adapter(info) | ({"trigger_words": words} if words else {}))

    def _describe_adapter(self, info: Any) -> dict[str, Any]:
        found = {"name": info.name, "kind": info.kind, "ranks": list(info.ranks), "coverage": dict(info.coverage)}
        error = self._hide_folder(info.error.replace("\n", " "))
        return found | {"in_slot": info.in_slot} | ({"error": error} if error else {})

    def _check_uploads(self, key: ApiKey) -> None:
        if not self.config.http.uploads or self.service.store is None:
            raise RequestError("this server takes no uploads: set http.uploads", 403, code="no_uploads")
        if not key.admin:
            raise RequestError("this needs an admin key", 403, code="no_admin")

    async def add_adapter(self, request: Request, key: ApiKey) -> Response:
        """Put the adapter of a multipart body (`file`, `name`) into the folder."""
        self._check_uploads(key)
        assert self.service.store is not None
        limit = self.config.limits.upload_mib << 20
        name = await add_adapter_file(request, self.service.store, limit, SEND, self.uploading)
        return JSONResponse(self._describe_adapter(self._find_adapter(name, key)), 201)

    async def remove_adapter(self, request: Request, key: ApiKey) -> Response:
        """Delete an adapter's file; who uses it now goes on."""
        self._check_uploads(key)
        info = self._find_adapter(request.path_params["name"], key)
        assert self.service.store is not None
        async with self.uploading:
            await asyncio.to_thread(delete_adapter_file, self.service.store, info.name)
        return JSONResponse({"id": info.name, "deleted": True})

    # --- operators

    async def _get_health(self, request: Request) -> Response:
        if fault := self.service.find_fault():
            return JSONResponse({"status": "failed", "error": fault[:400]}, 503)
        return JSONResponse({"status": "ok"})

    async def _get_ready(self, request: Request) -> Response:
        ready = self.service.ready.is_set() and not self.service.draining
        return JSONResponse({"ready": ready}, 200 if ready else 503, {} if ready else {"Retry-After": "5"})

    async def get_metrics(self, request: Request, key: ApiKey) -> Response:
        """Answer the counters for Prometheus."""
        return Response(self.metrics.render(), headers={"Content-Type": KIND})

    async def finish(self) -> None:
        """Wait until the tasks of jobs and streams have written what they have."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), SEND)


class LimitedStream(StreamingResponse):
    """A stream that ends where its client does not read."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the answer; whoever does not read it has left."""
        with suppress(ClientDisconnect):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Any) -> None:
        """Send the body, each part within `SEND` seconds."""

        async def limited(message: Any) -> None:
            async with asyncio.timeout(SEND):
                await send(message)

        try:
            await super().stream_response(limited)
        except TimeoutError:
            raise ClientDisconnect from None
        finally:
            if hasattr(self.body_iterator, "aclose"):
                await self.body_iterator.aclose()


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body of a request.

    Args:
        request: The request.
        limit: The most bytes.

    Returns:
        The bytes.

    Raises:
        RequestError: 413 for more, and 408 where nothing comes for some time.
    """
    refusal = RequestError(f"the body has more than {limit >> 20} MiB", 413, code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise refusal
    parts, size, stream = list[bytes](), 0, aiter(request.stream())
    try:
        while True:
            async with asyncio.timeout(SEND):
                part = await anext(stream, None)
            if part is None:
                break
            size += len(part)
            if size > limit:
                raise refusal
            parts.append(part)
    except TimeoutError:
        raise RequestError(f"no part of the body came for {SEND:g} s", 408, code="timeout") from None
    return b"".join(parts)


async def _get_page(request: Request) -> Response:
    text, headers = read_page()
    return HTMLResponse(text, headers=headers)


async def _wait_for_end(request: Request) -> None:
    """Wait until the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _encode_all(result: Any, kind: str) -> list[tuple[bytes, str]]:
    return [encode_picture(frames, kind) for frames in list_pictures(result)]


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _describe_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "fxplug"}


async def _answer_unknown(request: Request, error: Any) -> Response:
    status = error.status_code
    text = f"no {request.method} {request.url.path[:200]} here"
    found = RequestError(text, status, code="not_found")
    return JSONResponse(found.describe(), status, dict(error.headers or {}))
