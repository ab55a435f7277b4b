"""Bodies and adapter files of strangers, sent to a server: each is answered, with a picture or a 4xx, and logs no error.

`fuzz_server(cases, seed)` returns a line for each miss.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples/tiny"))
import torch
from PIL import Image
from test_edits import MASK, PICTURE, edit, encode
from test_server import ASK, Client, make_body, upload, write_folder

from fxplug.serving.server.application import Server
from fxplug.serving.server.keys import read_keys
from fxplug.serving.server.server_config import load_server_config
from fxplug.serving.server.service import Service


class Errors(logging.Handler):
    """Keeps what is logged at level error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[-400:])


def spoil(raw: bytes, rng: random.Random) -> bytes:
    """A file with other bytes, most of them in its header, or an end that is missing."""
    made = bytearray(raw)
    for _ in range(rng.choice([1, 1, 3, 30])):
        made[rng.randrange(min(rng.choice([12, 400, len(made)]), len(made)))] = rng.randrange(256)
    return bytes(made[: rng.choice([len(made), len(made), rng.randrange(len(made))])])


def make_edit(rng: random.Random) -> tuple[dict[str, bytes], dict[str, object]]:
    """Files and fields of an edit, of which some are others, broken, or not there."""
    mask = encode(MASK.convert(rng.choice(["L", "1", "RGBA", "P"])))
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = rng.randrange(12), "x" * rng.randrange(9)
    about = exif.tobytes() if rng.random() < 0.5 else spoil(exif.tobytes(), rng)
    files = {"image": encode(PICTURE, rng.choice(["PNG", "JPEG", "WEBP"]), exif=about), "mask": mask}
    for name in list(files):
        way = rng.random()
        if way < 0.3:
            files[name] = spoil(files[name], rng)
        elif way < 0.5:
            del files[name]
    region = json.dumps([{"mask": base64.b64encode(mask).decode()}])
    fields: dict[str, object] = {"prompt": "a cat", "strength": 0.9, "size": "32x32"}
    values = [1, 0, -1, "x", "", "true", "canny", region, "{", "[]", '{"ink": 1}', "nan", "64x32", "auto", 1e400]
    for name in rng.sample(["seed", "n", "control", "regions", "adapters", "call", "stream", "size", "strength", "mask"], 2):
        fields[name] = rng.choice(values)
    return files, fields


def fuzz_server(cases: int, seed: int) -> list[str]:
    torch.set_num_threads(1)
    found, errors = [], Errors()
    logging.getLogger("fxplug.serving").addHandler(errors)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_folder(folder)
        client = Client(Server(Service(load_server_config(folder / "serve.yaml")), read_keys(folder / "keys.txt")))
        client.key, file = "boss", (folder / "adapters/ink.safetensors").read_bytes()
        for n in range(seed, seed + cases):
            rng = random.Random(n)
            if (way := rng.random()) < 0.3:
                files, fields = make_edit(rng)
                status = edit(client, files, **fields).status
            elif way < 0.8:
                status = client.send("/v1/images/generations", make_body(rng)).status
            else:
                status, _ = upload(client, "spoilt", spoil(file, rng))
                if status == 201:  # numbers alone are other ones
                    status, _ = client.json("/v1/images/generations", ASK | {"adapters": {"spoilt": 1}})
                    client.send("/v1/adapters/spoilt", method="DELETE")
            if not (200 <= status < 500 or status == 504) or errors.lines:  # 504: its own deadline has passed
                found.append(f"seed {n}: {status} {errors.lines}")
                errors.lines.clear()
        if client.end() != 0:
            found.append("the server ended with an error")
    logging.getLogger("fxplug.serving").removeHandler(errors)
    return found
