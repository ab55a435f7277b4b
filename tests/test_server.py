"""A pipeline behind HTTP: its pictures, and what clients are told that ask for others, leave, or come too many."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import http.client
import io
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from diffusers import ControlNetModel
from PIL import Image
from safetensors.torch import load_file, save_file

from fxplug.core.errors import SpecError
from fxplug.serving import Engine, Region, Request
from fxplug.serving.offloading import ModelOffload
from fxplug.serving.parked import Cancelled
from fxplug.serving.server.application import Server
from fxplug.serving.server.errors import RequestError
from fxplug.serving.server.jobs import RESTARTED, Jobs
from fxplug.serving.server.keys import ANYBODY, read_keys
from fxplug.serving.server.pictures import Preview, encode_picture
from fxplug.serving.server.running import bind, make_loop, serve
from fxplug.serving.server.server_config import JobSettings, load_server_config
from fxplug.serving.server.service import Service, freeze_objects
from fxplug.serving.tickets import Ticket

CONFIG = """
model: served:make
device: cpu
adapters: {folder: adapters, at: ["**.to_q", "**.to_v"], slots: 2, per_sample: 2, rank_max: 4, groups: block}
controls: {canny: canny}
engine: {rows: 4, queue: 6, schedulers: [EulerDiscreteScheduler]}
limits: {steps: 60, pixels: 4096, body_mib: 1, n: 3, adapters: 2}
http: {port: 0, uploads: true}
warm: {sizes: [32x32]}
call: {num_inference_steps: 2}
"""
MADE = """
    import sys
    sys.path.insert(0, {tiny!r})
    import tiny

    def make():
        return tiny.pipeline("StableDiffusionPipeline")
"""
ASK = {"prompt": "a cat", "size": "32x32", "seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a configuration: adapters, one of which is broken, and keys."""
    made = tmp_path_factory.mktemp("server")
    with contextlib.chdir(tmp_path_factory.mktemp("tiny")):  # where `tiny` writes
        write_folder(made)
    return made


def write_folder(made):
    (made / "adapters").mkdir()
    for seed, name in enumerate(("ink", "film", "secret")):
        file = tiny.lora(tiny.pipeline("StableDiffusionPipeline"), f"server_{name}", seed=seed, unet=["to_q", "to_v"])
        shutil.copy(file / "pytorch_lora_weights.safetensors", made / f"adapters/{name}.safetensors")
    (made / "adapters/broken.safetensors").write_bytes(b"\x10" * 40)
    ControlNetModel.from_unet(tiny.unet()).save_pretrained(made / "canny")
    (made / "served.py").write_text(textwrap.dedent(MADE.format(tiny=str(Path(tiny.__file__).parent))))
    (made / "serve.yaml").write_text(CONFIG)
    (made / "keys.txt").write_text("# who\nboss admin\nguest adapters=[!s]*\n")


class Client:
    """A server in a thread, and what speaks to it."""

    def __init__(self, server):
        self.server, self.key = server, None
        self.port = bind(server.config.http)
        self.address = self.port.getsockname()
        self.loop, started = make_loop(), threading.Event()
        self.stop = None

        async def run():
            self.stop = asyncio.Event()
            started.set()
            self.code = await serve(server, self.port, self.stop)

        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(run()), daemon=True)
        self.thread.start()
        started.wait()

    def send(self, path, body=None, method=None, headers=()):
        raw = json.dumps(body) if isinstance(body, dict) else body
        connection = http.client.HTTPConnection(*self.address, timeout=120)
        keys = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, {**keys, **dict(headers)})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return SimpleNamespace(status=answer.status, headers=answer.headers, raw=content)

    def json(self, path, body=None, **how):
        answer = self.send(path, body, **how)
        return answer.status, json.loads(answer.raw)

    def events(self, path, body=None):
        parts = self.send(path, body).raw.decode().strip().split("\n\n")
        return [json.loads(part.partition("data: ")[2]) for part in parts]

    def end(self):
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join()
        self.loop.close()
        self.port.close()
        return self.code


@pytest.fixture(scope="module")
def client(folder):
    made = Client(Server(Service(load_server_config(folder / "serve.yaml")), None))
    while made.send("/ready").status != 200:
        assert made.send("/health").status == 200
        time.sleep(0.05)
    yield made
    assert made.end() == 0


@pytest.fixture
def pictures(client):
    def make(**more):
        status, found = client.json("/v1/images/generations", ASK | more)
        assert status == 200, found
        return [Image.open(io.BytesIO(base64.b64decode(row["b64_json"]))) for row in found["data"]]

    return make


def alone(client, seed=5, adapters=None):
    """The picture of the pipeline itself."""
    pipe = client.server.service.pipe
    call = {"prompt": "a cat", "num_inference_steps": 2, "width": 32, "height": 32}
    with pipe.unet.adapters.using(adapters):
        return pipe(**call, generator=torch.Generator().manual_seed(seed)).images[0]


@pytest.mark.slow
def test_a_picture_is_that_of_the_pipeline(client, pictures):
    """Alone to the byte, several within a last bit, and each with the seed that is said."""
    assert np.array_equal(pictures()[0], alone(client))
    first, second = (client.send("/v1/images/generations", ASK | {"adapters": {"ink": 0.7}}).raw for _ in range(2))
    assert json.loads(first)["data"] == json.loads(second)["data"]
    knots = {"knots": [[0, {"value": 2, "blocks": {"mid_block": 0}}], [0.5, 1]]}
    assert not np.array_equal(pictures(adapters={"ink": knots})[0], pictures()[0])
    (inked,) = pictures(model="base:ink")
    assert np.array_equal(inked, alone(client, adapters={"ink": 1.0})) and not np.array_equal(inked, pictures()[0])
    for seed, picture in enumerate(pictures(n=3), 5):
        assert np.abs(np.asarray(picture, int) - np.asarray(alone(client, seed), int)).max() <= 1
    status, found = client.json("/v1/images/generations", {"prompt": "a", "size": "32x32", "output_format": "jpeg"})
    assert status == 200 and 0 <= found["data"][0]["seed"] < 2**53
    status, found = client.json("/v1/images/generations", ASK | {"response_format": "url", "output_format": "webp"})
    answer = client.send(found["data"][0]["url"])
    assert answer.headers["Content-Type"] == "image/webp" and Image.open(io.BytesIO(answer.raw)).size == (32, 32)


@pytest.mark.parametrize(
    ("given", "status", "param", "text"),
    [
        ({"adapters": {"inc": 1}}, 404, "adapters.inc", "did you mean 'ink'?"),
        ({"adapters": {"broken": 1}}, 404, "adapters.broken", "no adapter 'broken'"),
        ({"adapters": {"../ink": 1}}, 404, "adapters.../ink", "no adapter"),
        ({"adapters": {"ink": True}}, 400, "adapters.ink", "must be a number"),
        ({"adapters": {"ink": 1, "film": 1, "secret": 1}}, 400, "adapters", "3 adapters"),
        ({"adapters": {"ink": {"valu": 1}}}, 400, "adapters.ink.valu", "did you mean 'value'?"),
        ({"adapters": {"ink": {"knots": [[0.5, 1]]}}}, 400, "adapters.ink.knots", "a gap"),
        ({"adapters": {"ink": {"knots": [[0, {"blocks": {"down_block": 1}}]]}}}, 400, "adapters.down_block", "did you mean"),
        ({"model": "base:inc"}, 404, "adapters.inc", "did you mean 'ink'?"),
        ({"model": "bass"}, 404, "model", "did you mean 'base'?"),
        ({"sise": "32x32"}, 400, "sise", "did you mean 'size'?"),
        ({"size": "32x31"}, 400, "size", "use 32x32"),
        ({"size": "4096x4096"}, 400, "size", "the limit is 4096"),
        ({"size": "٣x٣"}, 400, "size", "WIDTHxHEIGHT"),
        ({"n": 4}, 400, "n", "3 or less"),
        ({"n": "1"}, 400, "n", "a whole number"),
        ({"n": True}, 400, "n", "a whole number"),
        ({"seed": 2**63}, 400, "seed", "below"),
        ({"prompt": None}, 400, "prompt", "missing key 'prompt'"),
        ({"prompt": "\ud800"}, 400, "prompt", ""),
        ({"stream": True, "n": 2}, 400, "n", "one picture"),
        ({"scheduler": "EulerDiscretScheduler"}, 400, "scheduler", "did you mean 'EulerDiscreteScheduler'?"),
        ({"scheduler": "DDPMScheduler"}, 400, "scheduler", "no scheduler 'DDPMScheduler' here"),
        ({"call": {"guidance_scal": 1}}, 400, "call.guidance_scal", "did you mean 'guidance_scale'?"),
        ({"call": {"latents": 1}}, 400, "call.latents", "set by the server"),
        ({"call": {"ip_adapter_image": "x"}}, 400, "call.ip_adapter_image", "is not called with 'ip_adapter_image'"),
        ({"call": {"clip_skip": "1"}}, 400, "call.clip_skip", "must be a whole number"),
        ({"call": {"clip_skip": 9}}, 400, "", "the pipeline refuses this"),
        ({"call": {"num_inference_steps": 61}}, 400, "call.num_inference_steps", "from 1 to 60"),
        ({"call": {"guidance_scale": 10**30}}, 400, "call.guidance_scale", "below 2^63"),
    ],
)
def test_what_cannot_be_made_is_refused_in_words(client, given, status, param, text):
    found, error = client.json("/v1/images/generations", ASK | given, headers={"X-Request-Id": "mine"})
    assert (found, error["error"]["param"] or "") == (status, param) and text in error["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"[1]", b'{"a": NaN}', b'{"prompt": "a", "prompt": "b"}', b"[" * 10_000])
def test_a_body_that_is_none(client, raw):
    assert client.send("/v1/images/generations", raw).status == 400


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # of guidance that leaves no numbers
def test_bodies_at_random(client, caplog):
    """Whatever is asked for: a picture, or a 4xx; no line at level error."""
    rng = random.Random(0)
    with caplog.at_level(logging.ERROR, logger="fxplug.serving"):
        seen = {client.send("/v1/images/generations", make_body(rng)).status for _ in range(150)}
    assert (seen <= {200, 400, 404}, caplog.records) == (True, [])
    assert client.send("/v1/images/generations", b"x" * (2 << 20)).status == 413
    assert client.json("/v1/imagine", {})[0] == 404 and client.json("/v1/jobs")[0] == 405


def test_streams_and_jobs_tell_each_step(client):
    three = ASK | {"call": {"num_inference_steps": 3}}
    events = client.events("/v1/images/generations", three | {"stream": True, "partial_images": 2})
    assert [event["type"].rpartition(".")[2] for event in events] == ["partial_image", "partial_image", "completed"]
    assert [event.get("partial_image_index") for event in events] == [0, 1, None]
    last = Image.open(io.BytesIO(base64.b64decode(events[-1]["b64_json"])))
    assert last.size == Image.open(io.BytesIO(base64.b64decode(events[0]["b64_json"]))).size == (32, 32)
    status, job = client.json("/v1/jobs", three)
    assert status == 202 and job["state"] == "queued"
    early, late = (client.events(f"/v1/jobs/{job['id']}/events") for _ in range(2))
    assert early == late and [event["type"] for event in early] == ["progress"] * 3 + ["done"]
    found = client.json(f"/v1/jobs/{job['id']}")[1]
    assert found["data"][0]["b64_json"] == events[-1]["b64_json"] and (found["step"], found["of"]) == (3, 3)
    assert client.json("/v1/jobs/unknown")[0] == 404
    status, job = client.json("/v1/jobs", ASK | {"call": {"clip_skip": 9}})
    assert client.events(f"/v1/jobs/{job['id']}/events")[-1]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("previews", [0, 1])
def test_a_stream_whose_picture_cannot_be_sent_says_so(client, monkeypatch, previews):
    monkeypatch.setattr("fxplug.serving.server.application.encode_picture", lambda *_: 1 / 0)
    events = client.events("/v1/images/generations", ASK | {"stream": True, "partial_images": previews})
    assert [(event["type"], event["error"]["code"]) for event in events] == [("error", "failed")]


def test_who_leaves_or_cancels_takes_no_more_steps(client):
    long = json.dumps(ASK | {"call": {"num_inference_steps": 60}})
    status, job = client.json("/v1/jobs", long)
    client.send(f"/v1/jobs/{job['id']}", method="DELETE")
    assert client.events(f"/v1/jobs/{job['id']}/events")[-1]["type"] == "cancelled"
    before = client.server.service.engine.count_denoiser_calls()[0]
    for path, body in (("generations", long), ("generations", long[:-1] + ', "stream": true, "partial_images": 8}')):
        with socket.create_connection(client.address) as raw:
            head = f"POST /v1/images/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall(f"{head}{body}".encode())
            while client.server.service.engine.count_requests() == (0, 0):
                time.sleep(0.01)
    end = time.monotonic() + 60
    while client.server.service.engine.count_requests() != (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    assert client.server.service.engine.count_denoiser_calls()[0] - before < 80


def test_more_pictures_than_the_queue_holds_are_refused(client, monkeypatch):
    config = client.server.config
    engine = config.engine.model_copy(update={"queue": 2})
    monkeypatch.setattr(client.server, "config", config.model_copy(update={"engine": engine}))
    assert client.json("/v1/images/generations", ASK | {"n": 3})[1]["error"]["message"].endswith("must be 2 or less, not 3")


def test_more_than_the_queue_holds_is_told_to_come_again(client):
    """Each request that was accepted is answered."""
    answers, nine = [], ASK | {"call": {"num_inference_steps": 9}}
    ask = lambda: answers.append(client.send("/v1/images/generations", nine))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(24)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    full = [answer for answer in answers if answer.status == 429]
    assert {answer.status for answer in answers} == {200, 429}
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in full)
    text = client.send("/metrics").raw.decode()
    assert 'fxplug_requests_total{outcome="done"}' in text and "fxplug_running 0.0" in text


def test_a_key_sees_its_adapters_alone(client, folder):
    guarded = Server(client.server.service, read_keys(folder / "keys.txt"))
    there, client.server.keys = client.server.keys, guarded.keys
    try:
        for key, names in (("guest", ["broken", "film", "ink"]), ("boss", ["broken", "film", "ink", "secret"])):
            client.key = key
            assert [row["name"] for row in client.json("/v1/adapters")[1]["data"]] == names
            status, found = client.json("/v1/images/generations", ASK | {"adapters": {"secre": 1}})
            assert status == 404 and ("secret" in found["error"]["message"]) == (key == "boss")
            right = 200 if key == "boss" else 404
            assert client.json("/v1/images/generations", ASK | {"adapters": {"secret": 1}})[0] == right
            assert client.json("/v1/models/base:secret")[0] == right
        job = client.json("/v1/jobs", ASK)[1]["id"]
        client.key = "guest"
        assert client.json(f"/v1/jobs/{job}")[0] == 404
        assert client.json("/v1/adapters/ink", method="DELETE")[0] == 403
        for key in (None, "gues", "guest2", "", "boss admin"):
            client.key = key
            status, found = client.json("/v1/models")
            assert status == 401 and found["error"]["type"] == "authentication_error"
        assert client.send("/health").status == 200
    finally:
        client.server.keys, client.key = there, None


def test_results_that_are_kept_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("fxplug.serving.server.jobs.BYTES", 100)
    jobs = Jobs(JobSettings(keep=3), tmp_path)
    names = [jobs.store_picture(b"x" * 40, "image/png", ANYBODY) for _ in range(4)]
    jobs.forget()
    assert list(jobs.pictures) == names[-2:]
    job = jobs.add("")
    jobs.finish(job, "done", [{"b64_json": "x" * 90}], None)
    jobs.forget()
    assert list(jobs.jobs) == [job.id] and not jobs.pictures
    for _ in range(3):
        jobs.add("")
    with pytest.raises(RequestError, match="3 jobs run already"):
        jobs.add("")


def test_jobs_that_are_read_again_are_bounded_and_forgotten_in_turn(tmp_path, monkeypatch):
    jobs = Jobs(JobSettings(dir="jobs"), tmp_path)
    made = [jobs.add("") for _ in range(4)]
    for at, job in enumerate(reversed(made)):
        jobs.finish(job, "done", [{"b64_json": "x" * 40}], None)
        job.ended = time.time() - 100 * (4 - at)
        jobs.save(job)
    for text in ("[]", "{", '{"data": "x"}', json.dumps({**made[0].describe(), "owner": "", "data": ["x"]})):
        (tmp_path / "jobs" / f"{len(text):032x}.json").write_text(text)
    monkeypatch.setattr("fxplug.serving.server.jobs.BYTES", 120)
    again = Jobs(JobSettings(dir="jobs"), tmp_path)
    assert {*again.jobs} == {job.id for job in made}
    again.forget()
    assert {*again.jobs} == {job.id for job in made[:3]} and not (tmp_path / "jobs" / f"{made[3].id}.json").exists()
    later = Jobs(JobSettings(dir="jobs", keep_s=250), tmp_path)
    later.forget()
    assert {*later.jobs} == {job.id for job in made[:2]}


def test_a_job_whose_file_cannot_be_deleted_is_forgotten(tmp_path, caplog):
    jobs = Jobs(JobSettings(dir="jobs", keep_s=1e-9), tmp_path)
    job = jobs.add("")
    jobs.finish(job, "done", [], None)
    shutil.rmtree(tmp_path / "jobs")
    (tmp_path / "jobs").touch()
    jobs.store_picture(b"x", "image/png", ANYBODY)
    assert not jobs.jobs and "is not deleted" in caplog.text


def test_a_head_without_end_is_refused(client):
    """Also that of a further request; the bytes of bodies do not count."""
    large = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n" + b"x" * 900_000
    chunked = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    get = b"GET /health HTTP/1.1\r\n"
    for before, endless in ((get, b"X: y\r\n"), (get + b"X: ", b"y"), (large + get, b"X: y\r\n"), (chunked, b"X: y\r\n")):
        with socket.create_connection(client.address, timeout=10) as raw, pytest.raises(ConnectionError):
            raw.sendall(before)
            for _ in range(300):
                raw.sendall(endless * (100_000 // len(endless)))
    assert client.send("/v1/jobs", large[-900_000:]).status == 400
    assert client.send("/health", headers={"X": "y" * 30_000}).status == 200


@pytest.mark.slow
def test_a_body_that_does_not_come_and_a_stream_that_is_not_read(client, folder, monkeypatch):
    monkeypatch.setattr("fxplug.serving.server.application.SEND", 0.2)
    monkeypatch.setattr(client.server, "keys", read_keys(folder / "keys.txt"))
    for path, head in (("jobs", ""), ("adapters", "Content-Type: multipart/form-data; boundary=cut\r\n")):
        with socket.create_connection(client.address, timeout=10) as raw:
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer boss\r\nContent-Length: 9\r\n{head}\r\n-"
            raw.sendall(head.encode())
            assert raw.recv(99).startswith(b"HTTP/1.1 408")
    client.server.keys = None
    job = client.json("/v1/jobs", ASK)[1]["id"]
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    deaf.connect(client.address)
    many = [{"type": "progress", "step": 1, "of": 2, "text": "x" * 10_000}] * 2_000
    client.server.jobs.jobs[job].events[:0] = many
    deaf.sendall(f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    deaf.settimeout(60)
    time.sleep(1)
    size = 0
    while part := deaf.recv(1 << 16):
        size += len(part)
    deaf.close()
    assert size < 10_000_000
    client.events(f"/v1/jobs/{job}/events")


@pytest.mark.parametrize(("text", "finding"), [("", "has no key"), ("a b", "another word"), ("a\na admin", "there twice")])
def test_keys_that_are_none(tmp_path, text, finding):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(SpecError, match=finding):
        read_keys(tmp_path / "keys")


MASK = base64.b64encode(encode_picture([Image.new("L", (32, 32), 200)], "png")[0]).decode()
VALUES = [None, True, -1, 0, 1e308, 2**63, 10**300, "", "x" * 30_000, [], {}, {"a": 1}, "NaN", "1", 1.5, "a/../b", "1x1"]
VALUES += [{"knots": [[0, 1], [0.5, {"value": 2}]]}, {"knots": []}, {"blocks": {"": 1}}, {"": 1}, {"knots": [], "": 1}]
NAMES = (
    "num_inference_steps guidance_scale eta height width generator latents negative_prompt prompt_embeds clip_skip ink film"
    " broken __class__ ip_adapter_image guidance_rescale timesteps cross_attention_kwargs num_images_per_prompt output_type"
).split()


def make_body(rng):
    """A body in which a value is another one, and which may be cut or have other bytes."""
    body = ASK | {"call": {}, "adapters": {"ink": 0.5}, "n": 1, "model": "base", "scheduler": None, "deadline_s": 9}
    region = {"mask": MASK, "adapters": {}, "call": {}} | {rng.choice(["mask", "call", "cal"]): rng.choice([MASK, *VALUES])}
    body |= {"regions": [region]} if rng.random() < 0.2 else {}
    place = rng.choice([body, body["call"], body["adapters"], region["adapters"]])
    place[rng.choice(list(body) if place is body else NAMES)] = rng.choice(VALUES)
    raw = bytearray(json.dumps(body).encode())
    if rng.random() < 0.2:
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw[: rng.choice([99_999, 99_999, 99_999, 40])])


def upload(client, name, raw, filename="x.safetensors"):
    parts = [f'Content-Disposition: form-data; name="file"; filename="{filename}"'.encode() + b"\r\n\r\n" + raw]
    parts += [b'Content-Disposition: form-data; name="name"\r\n\r\n' + name.encode()] if name else []
    body = b"".join(b"--cut\r\n" + part + b"\r\n" for part in parts) + b"--cut--\r\n"
    return client.json("/v1/adapters", body, headers={"Content-Type": "multipart/form-data; boundary=cut"})


def test_no_answer_has_the_place_of_the_adapters(client, folder):
    """Of a broken file its name is told, and of one that is gone when it is read."""
    (broken,) = [row for row in client.json("/v1/adapters")[1]["data"] if row.get("error")]
    assert "broken.safetensors" in broken["error"] and str(folder) not in broken["error"]
    store = client.server.service.store
    error = client.server._convert_error(SpecError(f"no adapter file or folder '{store.folder}/ink.safetensors'"), "1")
    assert str(error) == "no adapter file or folder 'ink.safetensors'"
    with pytest.raises(SpecError) as caught:
        store.get_path("inc")
    assert str(client.server._convert_error(caught.value, "1")) == "no adapter 'inc' (did you mean 'ink'?)"


def test_what_ended_a_request_is_not_taken_for_what_it_asked(client, monkeypatch):
    """An adapter that is deleted before its turn, without a hint at others; and the end of the engine."""
    service, convert = client.server.service, client.server._convert_error
    region = Region(mask=torch.ones(4, 4), adapters={"gone": 1.0})
    for more in ({"adapters": {"gone": 1.0}}, {"regions": [region]}):
        ticket = Ticket(Request(call={}, **more), None)
        found = convert(SpecError("no adapter 'gone' (did you mean 'ink'?)"), "1", ticket)
        assert (found.status, found.code) == (404, "adapter_not_found") and "ink" not in str(found) and "'gone'" in str(found)
    ticket = Ticket(Request(call={}), None)
    assert convert(RuntimeError("no such argument"), "1", ticket).status == 400
    monkeypatch.setattr(service, "fault", "torn")
    assert convert(RuntimeError("torn"), "1", ticket).status == 500


def test_uploads(client, folder):
    raw = (folder / "adapters/ink.safetensors").read_bytes()
    assert upload(client, "new", raw)[0] == 403
    boss = read_keys(folder / "keys.txt")
    client.server.keys, client.key = boss, "boss"
    try:
        status, found = upload(client, "new", raw)
        assert status == 201 and found["name"] == "new"
        assert client.json("/v1/images/generations", ASK | {"adapters": {"new": 1}})[0] == 200
        assert upload(client, "new", raw)[0] == 409
        for name in ("../up", ".hidden", "a/b", "..", "a\\b", "x" * 300):
            assert upload(client, name, raw)[0] == 400
        status, found = upload(client, "torn", raw[:-50])
        assert status == 400 and "torn" in str(found) and str(folder) not in str(found)
        assert not (folder / "adapters/torn.safetensors").exists()
        assert upload(client, "", raw, "../../from.safetensors")[0] == 400
        assert client.json("/v1/adapters/new", method="DELETE") == (200, {"id": "new", "deleted": True})
        assert client.json("/v1/adapters/new")[0] == 404
    finally:
        client.server.keys, client.key = None, None
    outside = [*folder.glob("*.safetensors"), *folder.parent.glob("*.safetensors"), *folder.parent.parent.glob("*.safetensors")]
    assert outside == [] and sorted(path.name for path in (folder / "adapters").iterdir() if path.suffix != ".json") == [
        f"{name}.safetensors" for name in ("broken", "film", "ink", "secret")
    ]


def test_trigger_words_are_those_of_the_file(client, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(client.server, "keys", read_keys(folder / "keys.txt"))
    monkeypatch.setattr(client, "key", "boss")
    file, place = tmp_path / "worded.safetensors", folder / "adapters/worded.safetensors"
    save_file(load_file(folder / "adapters/ink.safetensors"), file, {"modelspec.trigger_phrase": "in ink"})
    assert upload(client, "worded", file.read_bytes())[0] == 201
    assert client.json("/v1/adapters/worded")[1]["trigger_words"] == "in ink"
    assert "trigger_words" not in client.json("/v1/adapters/ink")[1]
    monkeypatch.setattr(client.server.service.store, "_scanned", time.monotonic() + 1000)  # it looks at no file for a while
    for change in (lambda: place.write_bytes(b"\x10" * 40), place.unlink):
        change()
        status, found = client.json("/v1/adapters/worded")
        assert status == 200 and "trigger_words" not in found
    monkeypatch.undo()
    client.server.service.store.refresh()


def test_uploads_of_one_name_at_once(client, folder, monkeypatch):
    """Of several files one is taken, and whoever sent one that does not fit changes nothing of that."""
    monkeypatch.setattr(client.server, "keys", read_keys(folder / "keys.txt"))
    monkeypatch.setattr(client, "key", "boss")
    monkeypatch.setattr("starlette.formparsers.MultiPartParser.spool_max_size", 1)  # as large ones are
    good = (folder / "adapters/ink.safetensors").read_bytes()
    for _ in range(5):
        with ThreadPoolExecutor(3) as pool:
            answers = [status for status, _ in pool.map(partial(upload, client, "twin"), (good, good[:-50], good))]
        assert answers.count(201) == 1 and {*answers} <= {201, 400, 409}
        assert client.json("/v1/adapters/twin", method="DELETE")[0] == 200


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=cut", b"--cux\r\n\r\n"),
        ("multipart/form-data; boundary=cut", b"--cut\r\nContent-Disposition: form-data\r\n\r\nx\r\n--cut--\r\n"),
        ("application/x-www-form-urlencoded", b"a=1&" * 9),
    ],
)
def test_an_upload_that_is_no_form(client, folder, monkeypatch, kind, raw):
    monkeypatch.setattr(client.server, "keys", read_keys(folder / "keys.txt"))
    monkeypatch.setattr(client, "key", "boss")
    status, found = client.json("/v1/adapters", raw, headers={"Content-Type": kind})
    assert status == 400 and "is not multipart/form-data" in found["error"]["message"]


def test_the_client_of_openai(client):
    openai = pytest.importorskip("openai")
    user = openai.OpenAI(base_url="http://{}:{}/v1".format(*client.address), api_key="any", max_retries=0)
    try:
        found = user.images.generate(model="base:ink", prompt="a cat", n=2, size="32x32", quality="hd", extra_body={"seed": 5})
        assert len(found.data) == 2
        events = user.images.generate(model="base", prompt="a cat", size="32x32", stream=True, partial_images=1)
        assert [event.type for event in events] == ["image_generation.partial_image", "image_generation.completed"]
        assert "base:film" in [model.id for model in user.models.list()]
        with pytest.raises(openai.NotFoundError):
            user.images.generate(model="base:none", prompt="a")
    finally:
        user.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("http.prot=1", "did you mean 'port'"),
        ("model=served:mak", "did you mean 'make'"),
        ("adapters.models=[unett]", "did you mean 'unet'"),
        ("adapters.folder=adapter", "did you mean 'adapters'"),
        ("engine.schedulers=[EulerScheduler]", "no scheduler 'EulerScheduler'"),
        ('warm.sizes=["32"]', "WIDTHxHEIGHT"),
        ("http.keys=none.txt", "none.txt"),
        ("passes={unet: [{lorra: {}}]}", "did you mean 'lora'"),
        ("offload=true;quantize=int8", "leave out 'quantize' or 'offload'"),
    ],
)
def test_a_configuration_that_is_wrong(folder, change, text, monkeypatch):
    monkeypatch.setattr("fxplug.serving.server.service.rewrite_pipeline", lambda pipe, *_, **__: pipe)
    with pytest.raises(Exception, match=".*") as caught:
        config = load_server_config(folder / "serve.yaml", change.split(";"))
        if config.http.keys:
            read_keys(config.base / config.http.keys)
        Service(config)
    assert type(caught.value).__module__ == "fxplug.core.errors" and text in str(caught.value)


@pytest.mark.slow
def test_models_that_wait_on_the_cpu(client, folder):
    service = Service(load_server_config(folder / "serve.yaml", ["offload=true", "device=cpu:0"]))
    parts = {**service.pipe.components, **service.pipes["control:canny"].components}
    waiting = {name for name, part in parts.items() if isinstance(getattr(part, "_hf_hook", None), ModelOffload)}
    assert waiting == {"unet", "vae", "text_encoder", "controlnet"}
    call = {"prompt": "a cat", "num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
    (ticket,) = service.engine.generate([Request(call=call, seed=1)])
    (right,) = Engine(client.server.service.pipe).generate([Request(call=call, seed=1)])
    assert torch.equal(ticket.result().images, right.result().images)
    service.close(0)


def test_a_port_that_is_taken(client, folder):
    config = load_server_config(folder / "serve.yaml", [f"http.port={client.address[1]}"])
    with pytest.raises(SpecError, match=r"port \d+ of 127.0.0.1 cannot be used"):
        bind(config.http)


def test_previews_are_learnt_from_one_picture():
    """A picture that is linear in its latents is drawn as it is, also where places are a row."""
    latents = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([[0.1, 0, 0.05], [0, 0.1, 0], [0.02, 0, 0.1], [0, 0.03, 0]])
    colours = (latents[0].movedim(0, -1) @ weight + 0.5).clip(0, 1)
    picture = Image.fromarray((colours * 255).round().to(torch.uint8).numpy()).resize((64, 48), Image.Resampling.NEAREST)
    for values in (latents, latents.flatten(2).mT):
        drawn = Preview.learn(values, picture).draw(values, (8, 6))
        assert np.abs(np.asarray(drawn, float) - colours.numpy() * 255).max() < 2
    assert Preview.learn(torch.randn(1, 7, 4), picture) is None


@pytest.mark.slow
def test_a_server_that_ends(folder, tmp_path):
    """SIGTERM finishes what is accepted, and gives 0; a job that was killed is told that it has failed."""
    port = free_port()
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "fxplug", "serve", "serve.yaml", "--port", str(port), "--set", "jobs.dir=jobs"]
    process = subprocess.Popen(command, cwd=folder, env=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    asked = Client.__new__(Client)
    asked.address, asked.key = ("127.0.0.1", port), None
    while True:
        try:
            if asked.send("/ready").status == 200:
                break
        except OSError:
            assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    long, answers = ASK | {"call": {"num_inference_steps": 60}}, []
    waits = threading.Thread(target=lambda: answers.append(asked.send("/v1/images/generations", long)))
    job = asked.json("/v1/jobs", long)[1]["id"]
    shutil.copytree(folder / "jobs", tmp_path / "jobs")  # what is left where it is killed now
    waits.start()
    while "fxplug_running 2.0" not in asked.send("/metrics").raw.decode():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    waits.join()
    code, log = process.wait(60), process.stderr.read()
    assert answers[0].status == 200 and code == 0, log
    assert "ready" in log and "Started server process" not in log  # uvicorn's own
    process.stderr.close()
    for place, state in ((folder, "done"), (tmp_path, "failed")):
        found = Jobs(JobSettings(dir="jobs"), place).find(job, ANYBODY)
        assert found.state == state and (state == "done" or found.error["message"] == RESTARTED)


def test_what_serves_is_not_collected():
    try:
        freeze_objects()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_ticket_ends_once():
    """Of two that end it at once, one says how and with what."""
    for _ in range(10):
        ticket = Ticket(None, lambda: False)
        ends = [{"result": 1}, {"error": Cancelled("late")}]
        threads = [threading.Thread(target=ticket.finish, kwargs=end) for end in ends]
        with ticket._lock:
            for each in threads:
                each.start()
                time.sleep(0.005)
        for each in threads:
            each.join()
        found = ticket.state, ticket._result, ticket._error
        assert found in (("done", 1, None), ("cancelled", None, ends[1]["error"]))
