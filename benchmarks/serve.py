"""What HTTP adds to an engine, and what a server does at ten times its capacity; the garments of examples/fashion.

python benchmarks/serve.py [cost] [overload] [--rounds N] [--requests N] [--seconds S] [--json FILE]

cost       CPU time of this process for the same requests by `generate` of an engine without a thread and by HTTP, in turn:
           half of them by stream with two previews, a quarter as jobs, the rest at once; the client is another process
overload   requests at ten times the rate at which pictures were made, for some seconds: the answers by status, and memory
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import record
import torch

from fxplug.serving import Engine, Request
from fxplug.serving.server.application import Server
from fxplug.serving.server.running import bind, make_loop, serve
from fxplug.serving.server.server_config import ServerConfig, load_server_config
from fxplug.serving.server.service import Service, freeze_objects

HERE = Path(__file__).resolve().parent.parent / "examples/fashion"
sys.path.insert(0, str(HERE))
from garments import CLASSES  # noqa: E402

STEPS, ROWS, QUEUE = 8, 16, 64
CLIENT = """
import http.client, json, sys, threading, time
port, rate = int(sys.argv[1]), float(sys.argv[2])
def ask(method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(method, path, body)
    answer = connection.getresponse()
    raw = answer.read()
    connection.close()
    return answer.status, raw, answer.headers
lock, found = threading.Lock(), []
def run(path, body):
    try:
        status, raw, headers = ask("POST", path, json.dumps(body))
        if status == 202:
            job = json.loads(raw)["id"]
            ask("GET", f"/v1/jobs/{job}/events")
            status, raw, headers = ask("GET", f"/v1/jobs/{job}")
        told = status != 429 or int(headers["Retry-After"]) > 0
        whole = b"b64_json" in raw if status == 200 else told
    except Exception as error:
        status, whole = type(error).__name__, False
    with lock:
        found.append((status, whole))
threads, begin = [], time.monotonic()
for n, (path, body) in enumerate(json.load(sys.stdin)):
    threads.append(threading.Thread(target=run, args=(path, body)))
    if rate:
        time.sleep(max(0.0, begin + n / rate - time.monotonic()))
    threads[-1].start()
for thread in threads:
    thread.join()
print(json.dumps(found))
"""


class Running:
    """A server in a thread."""

    def __init__(self, config: ServerConfig) -> None:
        self.service = Service(config)
        self.port = bind(config.http)
        self._loop, self._stop = make_loop(), asyncio.Event()
        server = Server(self.service, None)
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(serve(server, self.port, self._stop)))
        self._thread.start()
        while not self.service.ready.wait(0.1):
            pass
        freeze_objects()  # as `run_server` does

    def ask(self, asked: list[tuple[str, dict[str, Any]]], rate: float = 0) -> list[tuple[Any, bool]]:
        """Send requests from another process; return the status of each, and whether its answer is whole."""
        command = [sys.executable, "-c", CLIENT, str(self.port.getsockname()[1]), str(rate)]
        made = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
        return [(status, whole) for status, whole in json.loads(made.stdout)]

    def end(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.port.close()


def make_bodies(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Make requests: half are streams with previews, a quarter jobs."""
    made = []
    for n in range(count):
        body: dict[str, Any] = {"prompt": CLASSES[n % 10], "seed": n, "call": {"num_inference_steps": STEPS}}
        path = "/v1/jobs" if n % 4 == 1 else "/v1/images/generations"
        made.append((path, body | ({"stream": True, "partial_images": 2} if n % 2 == 0 else {})))
    return made


def measure_cost(running: Running, rounds: int, count: int) -> dict[str, Any]:
    """Return the CPU times by way, in turn, and the median of their ratios."""
    bodies = make_bodies(count)
    asked = [Request(call={"prompt": b["prompt"], **b["call"]}, seed=b["seed"]) for _, b in bodies]
    engine = Engine(running.service.pipe, rows=ROWS, queue=QUEUE)
    times: dict[str, list[float]] = {"generate": [], "http": []}
    engines, calls = {"generate": engine, "http": running.service.engine}, dict[str, int]()
    for turn in range(rounds + 1):
        if turn == 1:
            calls = {way: one.calls for way, one in engines.items()}
        begin = time.process_time()
        assert all(ticket.state == "done" for ticket in engine.generate(asked))
        times["generate"].append(time.process_time() - begin)
        begin = time.process_time()
        answers = running.ask(bodies)
        assert all(answer == (200, True) for answer in answers), Counter(map(str, answers))
        times["http"].append(time.process_time() - begin)
    times = {way: values[1:] for way, values in times.items()}  # the first round learns
    ratios = [b / a for a, b in zip(times["generate"], times["http"], strict=True)]
    made = {way: (one.calls - calls[way]) / rounds for way, one in engines.items()}
    return {**times, "requests": count, "steps": STEPS, "calls": made, "ratio": median(ratios)}


def read_memory() -> float:
    """Return the resident memory of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def measure_overload(running: Running, seconds: float) -> dict[str, Any]:
    """Return what happens at ten times the rate at which pictures were made."""
    bodies = make_bodies(ROWS * 4)
    begin = time.monotonic()
    running.ask(bodies)
    rate = 10 * len(bodies) / (time.monotonic() - begin)
    before, most, over = read_memory(), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            most[0] = max(most[0], read_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    answers = running.ask(make_bodies(int(rate * seconds)), rate)
    over.set()
    watcher.join()
    return {
        "rate": rate, "answers": dict(Counter(str(status) for status, _ in answers)),
        "torn": sum(not whole for _, whole in answers), "left": running.service.engine.count_requests(),
        "mib": {"before": before, "most": most[0], "after": read_memory()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["cost", "overload"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    logging.getLogger("fxplug.serving").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve.yaml"
        config = {
            "model": "pipeline:load_pipeline", "device": "cpu", "engine": {"rows": ROWS, "queue": QUEUE},
            "http": {"port": 0}, "limits": {"multiple": 1},
        }  # fmt: skip
        file.write_text(json.dumps(config))
        running = Running(load_server_config(file))
        results: dict[str, Any] = {}
        try:
            if "cost" in given.what:
                results["cost"] = measure_cost(running, given.rounds, given.requests)
                print("cost", json.dumps(results["cost"]), flush=True)
            if "overload" in given.what:
                results["overload"] = measure_overload(running, given.seconds)
                print("overload", json.dumps(results["overload"]), flush=True)
        finally:
            running.end()
    if given.json:
        record.write(given.json, results)


if __name__ == "__main__":
    main()
