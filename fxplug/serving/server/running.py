"""A server on its port, until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...core.errors import SpecError
from .application import Server
from .keys import ApiKey, read_keys
from .replicas import ReplicaSet
from .server_config import HttpSettings, ServerConfig
from .service import Service, freeze_objects

LOG = logging.getLogger("fxplug.serving")
LOOK = 0.5  # seconds between two looks at the engine
LAST = 5  # seconds that open connections have at the end
HEAD = 1 << 16  # bytes of a request that are not of its body


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which by itself reads the head of a request, and what follows its body, however long they are."""

    _head = 0  # bytes that came since a request began or a part of its body came, without those that came with it

    def data_received(self, data: bytes) -> None:
        """Read what has come, and refuse a head that is too long."""
        self._head += len(data)
        super().data_received(data)
        if self._head > HEAD and not self.transport.is_closing():
            self.send_400_response(f"The head of the request has more than {HEAD} bytes.")

    def on_message_begin(self) -> None:
        """Count from here."""
        self._head = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Count from here."""
        self._head = 0
        super().on_body(body)


class QuietServer(uvicorn.Server):
    """uvicorn without its handlers of signals, which end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def bind(http: HttpSettings) -> socket.socket:
    """Bind the port. Raises SpecError where it is taken, or the address is none of this machine."""
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((http.host, http.port))
        made.listen()  # who comes before the models are there waits
    except OSError as error:
        made.close()
        finding = f"port {http.port} of {http.host} cannot be used: {error.strerror or error}; give another 'http.port'"
        raise SpecError(finding, path=("http",)) from None
    return made


def make_loop() -> asyncio.AbstractEventLoop:
    """Make the loop of a server: uvloop's where there is one."""
    factory = uvicorn.Config("", log_config=None).get_loop_factory()
    return factory() if factory is not None else asyncio.new_event_loop()


@contextmanager
def show_log() -> Iterator[None]:
    """Show the log of the server on stderr, from INFO on, as long as the block runs."""
    handler, level, propagate = logging.StreamHandler(sys.stderr), LOG.level, LOG.propagate
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        LOG.propagate = propagate


@show_log()
def run_server(config: ServerConfig, ray: bool = False) -> int:
    """Serve until SIGTERM or SIGINT; what is accepted by then is finished, as far as `http.drain_s` allows.

    Args:
        config: The configuration.
        ray: Whether replicas of Ray make the pictures; else this process does.

    Returns:
        The exit code: 0, or 1 where the engine or the warm-up has failed.

    Raises:
        FxplugError: Where it cannot begin.
    """
    keys: list[ApiKey] | None = read_keys(config.base / config.http.keys) if config.http.keys else None
    port = bind(config.http)

    def freeze_when_ready() -> None:
        server.service.ready.wait()
        freeze_objects()

    async def run() -> int:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        threading.Thread(target=freeze_when_ready, daemon=True).start()
        return await serve(server, port, stop)

    try:
        server = Server(ReplicaSet(config) if ray else Service(config), keys)
        with asyncio.Runner(loop_factory=make_loop) as runner:
            return runner.run(run())
    finally:
        port.close()


def check_server(config: ServerConfig) -> list[tuple[str, str, str]]:
    """Make pictures alone and jointly, without a port.

    Args:
        config: The configuration.

    Returns:
        The forms of the calls of models, as `CallForms.list_forms`.

    Raises:
        FxplugError: Where the pipeline cannot be opened.
        Exception: What the pipeline raised.
    """
    service = Service(config)
    try:
        return service.check()
    finally:
        service.close(0)


async def serve(server: Server, port: socket.socket, stop: asyncio.Event) -> int:
    """Serve on a port until an event is set, or the engine or the warm-up fails.

    Args:
        server: The server.
        port: The bound port.
        stop: The event.

    Returns:
        The exit code, as `run_server`.
    """
    service, seconds = server.service, server.config.http.drain_s
    settings = uvicorn.Config(
        server.make_application(), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=LAST,
        http=BoundedProtocol,
    )  # fmt: skip
    http = QuietServer(settings)
    running = asyncio.ensure_future(http.serve(sockets=[port]))
    LOG.info("listening on http://%s:%d", *port.getsockname()[:2])
    service.start()
    while not stop.is_set() and not running.done():
        if service.find_fault():
            break
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK)
    LOG.info("ending: what is accepted is finished within %g s", seconds)
    await asyncio.to_thread(service.close, seconds)
    await server.finish()
    http.should_exit = True
    await running
    return 1 if service.find_fault() else 0
