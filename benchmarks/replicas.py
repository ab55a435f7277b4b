"""Replicas of a server on two nodes of Ray on this machine, with a small pipeline; run by hand, needs `fxplug[ray]`.

python benchmarks/replicas.py [route] [cost] [--requests N] [--adapters N] [--slots N] [--json FILE]

route      requests in waves of eight, each for one or two adapters by Zipf's law: the share whose replica held all of them,
           and how many adapters the replicas have read, by the server's choice and by replicas in turn
cost       seconds of a request by HTTP, by a replica and by an engine in the server, in turn
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
HERE = Path(__file__).resolve().parent.parent
TINY = str(HERE / "examples/tiny")
sys.path[:0] = [str(HERE / "tests"), TINY]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])

import ray  # noqa: E402
import record  # noqa: E402
import tiny  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from test_server import ASK, MADE, Client  # noqa: E402

from fxplug.serving.server.application import Server  # noqa: E402
from fxplug.serving.server.replicas import ReplicaSet  # noqa: E402
from fxplug.serving.server.server_config import ServerConfig, load_server_config  # noqa: E402
from fxplug.serving.server.service import Service  # noqa: E402

CONFIG = """
model: served:make
device: cpu
adapters: {folder: adapters, at: ["**.to_q", "**.to_v"], rank_max: 4}
engine: {rows: 8}
http: {port: 0}
warm: {sizes: [32x32]}
call: {num_inference_steps: 2}
"""
WAVE = 8


def write_folder(folder: Path, count: int) -> list[str]:
    """Write what is served, and adapters; return their names."""
    (folder / "adapters").mkdir()
    (folder / "served.py").write_text(textwrap.dedent(MADE.format(tiny=TINY)))
    (folder / "serve.yaml").write_text(CONFIG)
    file = tiny.lora(tiny.pipeline("StableDiffusionPipeline"), "replicas", unet=["to_q", "to_v"])
    names = [f"a{n}" for n in range(count)]
    for name in names:
        shutil.copy(file / "pytorch_lora_weights.safetensors", folder / f"adapters/{name}.safetensors")
    return names


def start(service: Any, replicas: int = 1) -> Client:
    """Serve, and wait until all are ready."""
    client = Client(Server(service, None))
    while service.count_replicas() < replicas or not service.ready.wait(0.1):
        if service.find_fault():
            raise SystemExit(service.find_fault())
        time.sleep(0.1)
    return client


def measure_route(config: ServerConfig, names: list[str], count: int, in_turn: bool) -> dict[str, Any]:
    """Return the shares of requests by where their adapters were, and the adapters that replicas have read."""
    service = ReplicaSet(config)
    client = start(service, 2)
    if in_turn:
        turns = cycle(service.alive)
        service._choose = lambda names: next(turns)  # type: ignore[method-assign]
    rng = random.Random(0)
    weights = [1 / (n + 1) for n in range(len(names))]
    for _ in range(count // WAVE):
        wanted = [rng.choices(names, weights, k=rng.choice([1, 1, 2])) for _ in range(WAVE)]
        bodies = [ASK | {"adapters": dict.fromkeys(each, 0.5)} for each in wanted]
        threads = [threading.Thread(target=client.send, args=("/v1/images/generations", body)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    time.sleep(1)
    total = sum(service.routed.values())
    found = {held: round(number / total, 3) for held, number in sorted(service.routed.items())}
    made = {"requests": total, **found, "read": [len(one.state.names) for one in service.alive]}
    made["calls"] = [one.state.calls[0] for one in service.alive]
    client.end()
    return made


def measure_cost(config: ServerConfig, count: int) -> dict[str, Any]:
    """Return the medians of the seconds of a request, one after the other."""
    clients = {"replicas": start(ReplicaSet(config), 2), "engine": start(Service(config))}
    times: dict[str, list[float]] = {name: [] for name in clients}
    for seed in range(count):
        for name, client in clients.items():
            begin = time.perf_counter()
            assert client.send("/v1/images/generations", ASK | {"seed": seed}).status == 200
            times[name].append(time.perf_counter() - begin)
    for client in clients.values():
        client.end()
    return {name: round(median(each), 4) for name, each in times.items()}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["route", "cost"])
    for name, value in (("requests", 400), ("adapters", 40), ("slots", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    small: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    for _ in range(2):
        cluster.add_node(num_cpus=1, **small)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        names = write_folder(Path(folder), given.adapters)
        config = load_server_config(Path(folder) / "serve.yaml", [f"adapters.slots={given.slots}", "ray.gpus=0"])
        if "route" in given.what:
            for way, in_turn in (("chosen", False), ("in turn", True)):
                found[way] = measure_route(config, names, given.requests, in_turn)
                print(way, json.dumps(found[way]), flush=True)
        if "cost" in given.what:
            found["cost"] = measure_cost(config, 60)
            print("cost", json.dumps(found["cost"]), flush=True)
    ray.shutdown()
    cluster.shutdown()
    if given.json:
        record.write(given.json, found)


if __name__ == "__main__":
    main()
