"""Edits over HTTP: those of the stock pipelines of the same models, and what is wrong told by field."""

from __future__ import annotations

import base64
import io
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting
from PIL import Image, ImageChops
from test_server import client, folder  # noqa: F401  (fixtures)

from fxplug.serving.server import edits
from fxplug.serving.server.edits import _find_size, read_edit_mask

NONE = dict[str, bytes]()  # not even a picture
RED = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
PICTURE, MASK = Image.fromarray(RED), Image.fromarray(np.repeat([[0] * 16 + [255] * 16], 32, 0).astype(np.uint8))


def encode(picture, kind="PNG", **more):
    file = io.BytesIO()
    picture.save(file, kind, **more)
    return file.getvalue()


def edit(client, files, **fields):  # noqa: F811
    parts = [(f'name="{name}"; filename="{name}.png"', raw) for name, raw in files.items()]
    parts += [(f'name="{name}"', str(value).encode()) for name, value in fields.items()]
    head = "--cut\r\nContent-Disposition: form-data; {}\r\n\r\n"
    body = b"".join(head.format(each).encode() + raw + b"\r\n" for each, raw in parts) + b"--cut--\r\n"
    return client.send("/v1/images/edits", body, headers={"Content-Type": "multipart/form-data; boundary=cut"})


def draw(client, files, **fields):  # noqa: F811
    answer = edit(client, files, **{"prompt": "a cat", "seed": 5, **fields})
    assert answer.status == 200, answer.raw
    return Image.open(io.BytesIO(base64.b64decode(json.loads(answer.raw)["data"][0]["b64_json"])))


@pytest.mark.slow
def test_edits_are_those_of_the_stock_pipelines(client):  # noqa: F811
    pipe = client.server.service.pipe
    call = {"prompt": "a cat", "num_inference_steps": 2, "image": PICTURE}
    image, inside = AutoPipelineForImage2Image.from_pipe(pipe), AutoPipelineForInpainting.from_pipe(pipe)

    def seed():
        return torch.Generator().manual_seed(5)

    files = {"image": encode(PICTURE)}
    plain = image(**call, strength=0.9, generator=seed()).images[0]
    assert np.array_equal(draw(client, files, strength=0.9), plain)
    masked = files | {"mask": encode(MASK)}
    drawn = draw(client, masked, strength=0.9, model="base:ink")  # after which the adapter is loaded
    with pipe.unet.adapters.using({"ink": 1.0}):
        inked = inside(**call, mask_image=MASK, strength=0.9, width=32, height=32, generator=seed()).images[0]
    assert np.array_equal(drawn, inked)
    control = client.server.service.pipes["control:canny"]
    along = control(**call, width=32, height=32, generator=seed()).images[0]
    assert np.array_equal(draw(client, {"image[]": encode(PICTURE)}, control="canny"), along)
    texts = [base64.b64encode(encode(mask)).decode() for mask in (MASK, ImageChops.invert(MASK))]
    regions = [json.dumps([{"mask": text, "adapters": {"ink": 1.0}}]) for text in texts]
    where_it_is_drawn, elsewhere = (draw(client, masked, strength=0.9, regions=region) for region in regions)
    assert np.array_equal(where_it_is_drawn, inked) and not np.array_equal(elsewhere, inked)
    assert np.array_equal(elsewhere, draw(client, masked, strength=0.9))
    events = edit(client, files, prompt="a cat", strength=1, stream="true", partial_images="2").raw.decode()
    assert events.count("event: image_edit.partial_image") == 2 and events.count("event: image_edit.completed") == 1


@pytest.mark.parametrize(("files", "fields", "param", "text"), [
    (NONE, {}, "image", "missing field 'image'"),
    ({"image": b"GIF89a"}, {}, "image", "cannot be read as PNG"),
    ({"image": encode(PICTURE)[:300]}, {}, "image", "cannot be read as PNG"),
    ({"image": encode(Image.new("1", (300, 300)))}, {}, "image", "the limit is 65536"),
    ({"imag": encode(PICTURE)}, {}, "imag", "did you mean 'image'"),
    ({"mask": encode(MASK.resize((8, 8)))}, {}, "mask", "is 8x8, and the picture 32x32"),
    ({"mask": encode(MASK)}, {"control": "canny"}, "mask", "not taken at once"),
    ({}, {"control": "cany"}, "control", "did you mean 'canny'"),
    ({}, {"strength": "2"}, "strength", "up to 1"),
    ({}, {"strength": "nan"}, "strength", "must be a number"),
    ({}, {"strength": "NaN"}, "strength", "up to 1"),
    ({}, {"control": "canny", "strength": "0.5"}, "strength", "takes no strength"),
    ({}, {"n": "two"}, "n", "must be a number"),
    ({}, {"n": "true"}, "n", "a whole number"),
    ({}, {"stream": "maybe"}, "stream", "true"),
    ({}, {"call": "{"}, "call", ""),
    ({}, {"adapters": '{"inc": 1}'}, "adapters.inc", "did you mean 'ink'"),
    ({}, {"size": "31x32"}, "size", "use 32x32"),
    ({}, {"sise": "32x32"}, "sise", "did you mean 'size'"),
    ({}, {"mask": "text"}, "mask", "must be a file"),
    ({"image": encode(PICTURE.resize((4, 32)))}, {}, "image", "each side must be 8 or more"),
])  # fmt: skip
def test_what_is_wrong_is_told_by_field(client, files, fields, param, text):  # noqa: F811
    whole = files if files is NONE or "imag" in files else {"image": encode(PICTURE), **files}
    answer = edit(client, whole, **{"prompt": "a cat", **fields})
    error = json.loads(answer.raw)["error"]
    assert answer.status in (400, 404) and error["param"] == param and text in error["message"], error


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/form-data; boundary=other"])
def test_a_body_that_is_no_form(client, kind):  # noqa: F811
    answer = client.send("/v1/images/edits", b"\xff--cut\r\n", headers={"Content-Type": kind})
    assert answer.status == 400, answer.raw


def test_large_pictures_are_read_beside_the_loop_that_answers_others(client, monkeypatch):  # noqa: F811
    there, asked, real = threading.Event(), threading.Event(), edits.decode_picture

    def decode(*given):
        there.set()
        assert asked.wait(20), "nobody was answered meanwhile"
        return real(*given)

    monkeypatch.setattr(edits, "decode_picture", decode)
    sent = threading.Thread(target=draw, args=(client, {"image": encode(PICTURE)}))
    sent.start()
    assert there.wait(20) and client.send("/health").status == 200
    asked.set()
    sent.join()


def test_a_picture_is_turned_as_its_exif_says(client):  # noqa: F811
    exif = PICTURE.getexif()
    exif[0x0112] = 6
    turned, mask = (encode(one.transpose(Image.Transpose.ROTATE_90), exif=exif) for one in (PICTURE, MASK))
    assert np.array_equal(draw(client, {"image": turned}), draw(client, {"image": encode(PICTURE)}))
    files = {"image": encode(PICTURE), "mask": encode(MASK)}
    assert np.array_equal(draw(client, files), draw(client, {"image": turned, "mask": mask}))
    assert np.array_equal(draw(client, {"image": encode(PICTURE, exif=b"Exi")}), draw(client, {"image": encode(PICTURE)}))


def test_sizes_and_masks():
    some = SimpleNamespace(size=(50, 33))
    assert _find_size({}, some, 8) == (48, 32) and _find_size({"size": "64x8"}, some, 8) == (64, 8)
    clear = Image.merge("LA", (MASK, MASK))
    assert read_edit_mask(MASK.convert("RGBA")).getpixel((20, 0)) == 255  # as a browser's canvas writes it
    assert read_edit_mask(clear).getpixel((20, 0)) == 0 and read_edit_mask(MASK).getpixel((20, 0)) == 255


def test_the_client_of_openai_edits(client):  # noqa: F811
    openai = pytest.importorskip("openai")
    host, port = client.address
    asked = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none")
    files = {"image": ("a.png", encode(PICTURE)), "mask": ("m.png", encode(MASK))}
    found = asked.images.edit(**files, prompt="a cat", model="base", size="32x32")
    assert Image.open(io.BytesIO(base64.b64decode(found.data[0].b64_json))).size == (32, 32)
