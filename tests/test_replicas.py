"""Replicas on two nodes of Ray: the pictures of one engine, and one answer to each request, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
from test_server import ASK, Client, free_port, write_folder

from fxplug.config.cli.verbs import message
from fxplug.serving.adapter_index import AdapterInfo
from fxplug.serving.parked import Cancelled
from fxplug.serving.server.application import Server
from fxplug.serving.server.bodies import read_order
from fxplug.serving.server.errors import RequestError
from fxplug.serving.server.keys import ANYBODY
from fxplug.serving.server.replica import MadePreview, Replica, ReplicaState, TicketChange
from fxplug.serving.server.replicas import RemoteFolder, ReplicaSet
from fxplug.serving.server.running import run_server
from fxplug.serving.server.server_config import load_server_config
from fxplug.serving.server.service import Service
from fxplug.serving.server.uploads import delete_adapter_file, put_file

SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}
SET = ["engine.rows=4", "engine.buckets=[8]", "engine.queue=64", "limits.steps=400", "ray.gpus=0"]  # one bucket: equal bits
NAMES = [f"a{n}" for n in range(20)]
LONG, SLOW = (ASK | {"call": {"num_inference_steps": steps}} for steps in (100, 400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("replicas")
    write_folder(made)
    for name in NAMES:
        shutil.copy(made / "adapters/ink.safetensors", made / f"adapters/{name}.safetensors")
    (made / "mortal.py").write_text(textwrap.dedent(MORTAL))
    return made


MORTAL = """
    import os
    from pathlib import Path

    import served
    from diffusers import StableDiffusionPipeline

    HERE = Path(__file__).parent

    class Mortal(StableDiffusionPipeline):
        def __call__(self, prompt=None, num_inference_steps=2, width=None, height=None, generator=None,
                     callback_on_step_end=None):
            warms = num_inference_steps == 4
            if prompt == "fail" or (warms and (HERE / "fail").exists()):
                raise RuntimeError("it fails")
            if prompt == "die" or (warms and (HERE / "die").exists()):
                (HERE / "die").unlink(missing_ok=True)
                os._exit(1)
            return super().__call__(prompt, num_inference_steps=num_inference_steps, width=width, height=height,
                                    generator=generator, callback_on_step_end=callback_on_step_end)

    def make():
        return Mortal(**served.make().components, requires_safety_checker=False)
"""


# --- without Ray


def test_without_ray(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        run_server(load_server_config(folder / "serve.yaml"), ray=True)
    assert message(caught.value) == "this needs ray, which is not installed: pip install 'fxplug[ray]'\n"
    log = logging.getLogger("fxplug.serving")  # is shown as long as a server runs
    assert log.propagate and not log.handlers


@pytest.mark.parametrize(
    ("held", "loads", "names", "chosen"),
    [
        (["", "ab"], [0, 0], "a", 1),  # who holds it
        (["a", "ab"], [0, 3], "ab", 1),  # most of a mixture
        (["a", "ab"], [0, 4], "ab", 0),  # unless it has a joint call's rows more to do
        (["ab", ""], [0, 0], "c", 1),  # of equal ones who holds less
        (["", "b"], [2, 1], "", 1),  # who has less to do
        ([], [], "a", None),
    ],
)
def test_the_choice_of_a_replica(held, loads, names, chosen):
    made = ReplicaSet.__new__(ReplicaSet)
    made.config = SimpleNamespace(engine=SimpleNamespace(rows=4))
    state = SimpleNamespace(in_slots=frozenset())
    made.alive = [SimpleNamespace(names=frozenset(h), load=n, state=state) for h, n in zip(held, loads, strict=True)]
    assert made._choose(frozenset(names)) is (None if chosen is None else made.alive[chosen])


@pytest.mark.slow
def test_a_replica_draws_orders(folder):
    """Its items are plain values that can be sent; what was cancelled, or cannot be drawn, is told in the same way."""

    async def ask(replica, body, cancel=False):
        config, opened = replica.config, replica.outline
        order = read_order(json.dumps(ASK | body).encode(), config, opened.pipes[""], ["ink"], ANYBODY)
        found = []
        async for items in replica.draw("1", order, frozenset(order.requests[0].adapters)):
            found += pickle.loads(pickle.dumps(items))
            if cancel:
                await replica.cancel("1", 0)
        return found

    async def run():
        replica = Replica(load_server_config(folder / "serve.yaml", SET))
        replica.outline = pickle.loads(pickle.dumps(await replica.open()))
        try:
            stream = {"stream": True, "partial_images": 2, "adapters": {"ink": 1}}
            drawn = [await ask(replica, body) for body in (stream, stream, {"n": 2}, {"call": {"clip_skip": 9}})]
            states = [await replica.look(), await replica.look(1)]
            return drawn, await ask(replica, LONG, cancel=True), states
        finally:
            replica.service.close(0)

    (first, second, two, wrong), cancelled, states = asyncio.run(run())
    assert first[0].place == "not" and second[0].place == "in slots"
    assert [item.number for item in first if isinstance(item, MadePreview)] == [0, 1]
    assert first[-1].pictures[0][0].tobytes() == second[-1].pictures[0][0].tobytes()
    assert sorted(item.at for item in two if isinstance(item, TicketChange) and item.pictures) == [0, 1]
    assert isinstance(wrong[-1].error, Exception) and not wrong[-1].denoises and "clip" in str(wrong[-1].error.__notes__)
    assert isinstance(cancelled[-1].error, Cancelled) and cancelled[-1].step < 100
    assert len(states[0].infos) == 24 and states[1].infos is None and states[1].in_slots == {"ink"}


# --- with Ray, slow


@pytest.fixture(scope="module")
def cluster():
    """A head without room for replicas, and two nodes with room for one each."""
    pytest.importorskip("ray.cluster_utils", reason="needs ray: pip install 'fxplug[ray]', then `make ray`")
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
    nodes = [made.add_node(num_cpus=1, **SMALL) for _ in range(2)]
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    yield made, nodes
    ray.shutdown()
    made.shutdown()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="module")
def pair(cluster, folder):
    """A server with two replicas, and one with an engine of its own."""
    config = load_server_config(folder / "serve.yaml", SET)
    made = [Client(Server(kind(config), None)) for kind in (ReplicaSet, Service)]
    wait_for(lambda: made[1].send("/ready").status == 200)
    wait_for(lambda: count(made[0]) == 2)
    yield made
    assert [one.end() for one in made] == [0, 0]


def wait_for(told, seconds=120):
    end = time.monotonic() + seconds
    while not told():
        assert time.monotonic() < end
        time.sleep(0.05)


def count(client):
    assert client.send("/health").status == 200
    return client.server.service.count_replicas()


def run_all(calls):
    """Make calls at once; return their threads and, as they come, their answers."""
    answers = []
    threads = [threading.Thread(target=lambda call=call: answers.append(call())) for call in calls]
    for each in threads:
        each.start()
    return threads, answers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of a scheduler
def test_pictures_are_those_of_one_engine(pair, folder):
    """To the bit, also where the other replica draws them; so are streams, jobs and edits."""
    ours, other = pair
    bodies = [{}, {"adapters": {"ink": 0.7}}, {"model": "base:film"}, {"n": 3}, {"adapters": {"ink": 1, "film": 0.5}}]
    bodies += [{"adapters": {"secret": {"knots": [[0, {"value": 2, "blocks": {"mid_block": 0}}], [0.5, 1]]}}}]
    bodies += [{"scheduler": "EulerDiscreteScheduler", "seed": n} for n in range(6)]
    for body in bodies:
        drawn = [client.json("/v1/images/generations", ASK | body) for client in pair]
        assert [status for status, _ in drawn] == [200, 200], [found.get("error") for _, found in drawn]
        assert drawn[0][1]["data"] == drawn[1][1]["data"]
    assert all(one.state.calls[0] for one in ours.server.service.alive)
    asked = ASK | {"stream": True, "partial_images": 2, "call": {"num_inference_steps": 4}}
    events = [client.events("/v1/images/generations", asked) for client in pair]
    assert [[(e["type"], e["b64_json"]) for e in one] for one in events][0] == [(e["type"], e["b64_json"]) for e in events[1]]
    for client in pair:
        job = client.json("/v1/jobs", ASK)[1]["id"]
        assert client.events(f"/v1/jobs/{job}/events")[-1]["type"] == "done"
        assert client.json("/v1/adapters/ink")[1]["in_slot"] in (True, False)
    for body, status in (({"call": {"clip_skip": 9}}, 400), ({"adapters": {"inc": 1}}, 404), ({"sise": 1}, 400)):
        drawn = [client.json("/v1/images/generations", ASK | body) for client in pair]
        assert drawn[0] == drawn[1] and drawn[0][0] == status
    text = ours.send("/metrics").raw.decode()
    assert "fxplug_replicas 2.0" in text and "fxplug_running 0.0" in text


@pytest.mark.slow
def test_who_leaves_takes_no_more_steps(pair):
    """Whoever closes the connection, cancels a job, or is late is cancelled in the replica."""
    ours, _ = pair
    running = lambda: sum(sum(one.state.requests) for one in ours.server.service.alive)  # noqa: E731
    job = ours.json("/v1/jobs", SLOW)[1]["id"]
    body = json.dumps(SLOW)
    with socket.create_connection(ours.address) as raw:
        head = f"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(f"{head}{body}".encode())
        wait_for(lambda: running() == 2)
    ours.send(f"/v1/jobs/{job}", method="DELETE")
    assert ours.events(f"/v1/jobs/{job}/events")[-1]["type"] == "cancelled"
    assert ours.json("/v1/images/generations", SLOW | {"deadline_s": 0.3})[0] == 504
    before = time.monotonic()
    wait_for(lambda: running() == 0)
    assert time.monotonic() - before < 5


@pytest.mark.slow
def test_requests_go_to_a_replica_that_holds_their_adapters(pair, folder):
    """Of 160 requests for 20 adapters by Zipf's law, some for two, at least 70 % find theirs in slots or host memory."""
    ours, _ = pair
    rng = random.Random(0)
    ours.server.service.store.refresh()
    ours.server.service.routed.clear()
    for _ in range(20):
        wanted = [rng.choices(NAMES, [1 / (n + 1) for n in range(len(NAMES))], k=rng.choice([1, 1, 2])) for _ in range(8)]
        bodies = [ASK | {"adapters": dict.fromkeys(names, 0.5)} for names in wanted]
        threads, answers = run_all([lambda body=body: ours.send("/v1/images/generations", body).status for body in bodies])
        for each in threads:
            each.join()
        assert answers == [200] * 8
    routed, replicas = ours.server.service.routed, ours.server.service.alive
    assert sum(routed.values()) == 160 and routed["not"] <= 48
    ours.server.service.store.refresh()
    time.sleep(1)
    read = [len(one.state.names.intersection(NAMES)) for one in replicas]
    assert min(read) > 5 and sum(read) <= 30  # by turns they read 37


@pytest.mark.slow
def test_a_replica_that_ends_keeps_nobody_from_adding_adapters(cluster, tmp_path):
    """The others say whether a file fits; where there are none, it is not kept. One is deleted in any case."""
    import ray

    state = ReplicaState("", (0, 0), (0, 0), 1, [AdapterInfo("new")], frozenset(), frozenset())

    class Looker:
        def look(self, refresh):
            return state

    here, gone = (SimpleNamespace(actor=ray.remote(num_cpus=0)(Looker).remote()) for _ in range(2))
    ray.kill(gone.actor)
    put_file(io.BytesIO(b"x"), "new", RemoteFolder(tmp_path, [gone, here]))
    (tmp_path / "new.safetensors").unlink()
    for left in ([gone], []):
        with pytest.raises(RequestError, match="no replica could look") as caught:
            put_file(io.BytesIO(b"x"), "new", RemoteFolder(tmp_path, left))
        assert caught.value.status == 503 and not [*tmp_path.iterdir()]
        (tmp_path / "new.safetensors").touch()
        known = RemoteFolder(tmp_path, left)
        known.note(state)
        for _ in range(2):  # the list is an old one until there is a replica
            delete_adapter_file(known, "new")
        assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_node_that_dies_loses_no_request(pair, cluster):
    """Requests, a stream with previews and a job that run while a node is killed: each is answered once, with its picture."""
    ours, other = pair
    made, nodes = cluster
    service = ours.server.service
    service.routed.clear()
    job = ours.json("/v1/jobs", SLOW | {"seed": 50})[1]["id"]
    streamed = SLOW | {"stream": True, "partial_images": 8}
    streams = [lambda n=n: (n, ours.events("/v1/images/generations", streamed | {"seed": n})) for n in (60, 61, 62)]
    bodies = [LONG | {"seed": n, "adapters": {("ink", "film")[n % 2]: 1}} for n in range(20)]
    calls = [lambda body=body: (body["seed"], ours.json("/v1/images/generations", body)) for body in bodies]
    early, answers = run_all(streams)
    wait_for(lambda: len(service._open) == 4 and all(one.steps[0] > 110 for one in service._open))  # of 400: two previews
    threads, others = run_all(calls)
    wait_for(lambda: all(one.load > 6 for one in service.alive))
    assert not any(one.has_ended() for one in service._open)
    made.remove_node(nodes.pop(), allow_graceful=False)
    wait_for(lambda: count(ours) == 1)
    for each in [*early, *threads]:
        each.join(300)
    answers += others
    assert len(answers) == 23 and sum(service.routed.values()) > 24  # some were sent again
    seen = dict(answers)
    for body in bodies:
        expected = other.json("/v1/images/generations", body)[1]["data"]
        assert seen[body["seed"]][0] == 200 and seen[body["seed"]][1]["data"] == expected
    for n in (60, 61, 62):
        assert [event.get("partial_image_index") for event in seen[n]] == [*range(8), None]
        expected = other.json("/v1/images/generations", SLOW | {"seed": n})[1]["data"][0]
        assert seen[n][-1]["b64_json"] == expected["b64_json"]
    events = ours.events(f"/v1/jobs/{job}/events")
    assert [event["type"] for event in events].count("done") == 1
    steps = [event["step"] for event in events]
    assert steps == sorted(steps)
    # and both
    waits, late = run_all([lambda: ours.json("/v1/images/generations", LONG | {"seed": 70})])
    wait_for(lambda: service.alive[0].load)
    made.remove_node(nodes.pop(), allow_graceful=False)
    wait_for(lambda: count(ours) == 0)
    answer = ours.send("/v1/images/generations", ASK)
    assert answer.status == 503 and int(answer.headers["Retry-After"]) > 0 and ours.send("/ready").status == 503
    nodes += [made.add_node(num_cpus=1, **SMALL) for _ in range(2)]
    waits[0].join(300)
    assert late[0][0] == 200
    wait_for(lambda: count(ours) == 2)


@pytest.mark.slow
def test_replicas_that_end_by_themselves(cluster, folder):
    """One that ends while it warms up is started again; an order that ends each is given up; a warm-up that fails is told."""
    changes = [*SET, "model=mortal:make", "ray.replicas=1", "ray.cpus=0", "controls={}"]
    config = load_server_config(folder / "serve.yaml", changes)
    (folder / "die").touch()
    client = Client(Server(ReplicaSet(config), None))
    assert client.send("/v1/images/generations", ASK).status == 503
    wait_for(lambda: client.send("/ready").status == 200)
    assert not (folder / "die").exists()
    status, found = client.json("/v1/images/generations", ASK | {"prompt": "die"})
    assert (status, found["error"]["code"]) == (500, "failed") and "3 replicas ended" in found["error"]["message"]
    wait_for(lambda: client.send("/ready").status == 200)
    assert client.json("/v1/images/generations", ASK | {"prompt": "fail"})[0] == 400
    assert client.json("/v1/images/generations", ASK)[0] == 200
    assert client.end() == 0
    (folder / "fail").touch()
    client = Client(Server(ReplicaSet(config), None))
    client.thread.join(120)
    assert client.code == 1 and client.server.service.fault == "no replica can be started: RuntimeError: it fails"
    (folder / "fail").unlink()
    client.loop.close()
    client.port.close()


@pytest.mark.slow
def test_a_server_of_replicas_that_ends(cluster, folder):
    """SIGTERM finishes what is accepted, and gives 0; what cannot be opened gives 1, and says why."""
    here = {**os.environ, "RAY_ADDRESS": cluster[0].address}
    port = free_port()
    command = [sys.executable, "-m", "fxplug", "serve", "serve.yaml", "--ray", "--port", str(port), "--set", "jobs.dir=jobs"]
    for change in (*SET, "ray.replicas=1", "ray.cpus=0"):
        command += ["--set", change]
    wrong = subprocess.run([*command, "--set", "model=served:mak"], cwd=folder, env=here, capture_output=True, text=True)
    assert wrong.returncode == 1 and wrong.stderr.endswith("module 'served' has no attribute 'mak' (did you mean 'make'?)\n")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=here, stdout=log, stderr=log)
    asked = Client.__new__(Client)
    asked.address, asked.key = ("127.0.0.1", port), None

    def is_ready():
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return asked.send("/ready").status == 200
        except OSError:
            return False

    wait_for(is_ready)
    job = asked.json("/v1/jobs", LONG)[1]["id"]
    waits, answers = run_all([lambda: asked.send("/v1/images/generations", LONG)])
    wait_for(lambda: "fxplug_running 2.0" in asked.send("/metrics").raw.decode())
    process.send_signal(signal.SIGTERM)
    waits[0].join()
    assert process.wait(60) == 0 and answers[0].status == 200, (folder / "log").read_text()
    assert json.loads((folder / f"jobs/{job}.json").read_text())["state"] == "done"
