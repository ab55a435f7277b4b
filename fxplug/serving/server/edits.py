"""Edits: a picture, a mask and fields in a multipart body, as an order for the pipeline of their task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from PIL import Image, ImageChops
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ...core.errors import SpecError, did_you_mean, prefix_path, quote
from ...core.reading import parse_json
from ...pipelines.opening import call_parameters
from .bodies import PictureOrder, make_order
from .errors import RequestError, convert_spec_error
from .keys import ApiKey
from .orders import OrderTaker
from .picture_files import READER, decode_picture
from .server_config import Size, parse_size
from .tasks import CONTROL, IMAGE, INPAINT, find_picture_argument

PICTURES = ("image", "image[]", "mask")
NUMBERS = ("n", "seed", "partial_images", "deadline_s", "strength")
OBJECTS = ("call", "adapters", "regions")
FIELDS = 40  # of a form


async def read_edit(raw: bytes, headers: Headers, service: OrderTaker, key: ApiKey) -> PictureOrder:
    """Read a multipart body: `image`, `mask` and `control` beside the fields of other requests.

    Args:
        raw: The body.
        headers: Those of the request.
        service: The service.
        key: That of the client.

    Returns:
        What it asks for.

    Raises:
        RequestError: 400 with the field, 404 for an adapter.
    """
    form = await _parse_form(raw, headers)
    try:
        files = await _read_files(form)
        return await asyncio.get_running_loop().run_in_executor(READER, _make_edit, form, service, key, files)
    except SpecError as error:
        raise convert_spec_error(error) from None
    finally:
        await form.close()


async def _parse_form(raw: bytes, headers: Headers) -> FormData:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield raw

    kind = headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise RequestError(f"an edit is sent as multipart/form-data, not {quote(kind)}")
    try:
        parser = MultiPartParser(headers, stream(), max_files=4, max_fields=FIELDS, max_part_size=len(raw) + 1)
        return await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError, ValueError) as error:
        raise RequestError(f"the body is not multipart/form-data: {getattr(error, 'message', error)}") from None


async def _read_files(form: FormData) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            where = "image" if name == "image[]" else name
            if name not in PICTURES:
                raise SpecError(f"unknown file {quote(name)}{did_you_mean(name, PICTURES)}", path=(name,))
            if where in found:
                raise SpecError("is there twice: send one picture", path=(where,))
            found[where] = await value.read()
    if "image" not in found:
        raise SpecError("missing field 'image': the picture, as a file", path=("image",))
    return found


def _make_edit(form: FormData, service: OrderTaker, key: ApiKey, files: Mapping[str, bytes]) -> PictureOrder:
    given = _read_fields(form)
    control, strength = given.pop("control", None), given.pop("strength", None)
    task = _choose_task(control, "mask" in files, service)
    pipe = service.pipes[task]
    limits = service.config.limits
    with prefix_path("image"):
        picture = decode_picture(files["image"], 16 * limits.pixels)
    size = _find_size(given, picture, limits.multiple)
    given["size"] = "x".join(map(str, size))
    name = find_picture_argument(task, pipe)
    pictures: dict[str, Any] = {name: _flatten(picture).resize(size, Image.Resampling.LANCZOS)}
    if task == INPAINT:
        with prefix_path("mask"):
            mask = decode_picture(files["mask"], 16 * limits.pixels)
            if mask.size != picture.size:
                sides = (f"{one.size[0]}x{one.size[1]}" for one in (mask, picture))
                raise SpecError("is {}, and the picture {}: send one of its size".format(*sides))
        pictures["mask_image"] = read_edit_mask(mask).resize(size, Image.Resampling.NEAREST)
    if strength is not None:
        if "strength" not in call_parameters(pipe):
            raise SpecError(f"{type(pipe).__name__} takes no strength: leave it out", path=("strength",))
        if not isinstance(strength, (int, float)) or not 0 < strength <= 1:
            raise SpecError(f"must be a number above 0 and up to 1, not {quote(strength)}", path=("strength",))
        pictures["strength"] = float(strength)
    return make_order(given, service.config, pipe, service.adapter_names(), key, task, pictures)


def _read_fields(form: FormData) -> dict[str, Any]:
    """Read the fields, which are texts: numbers, truth values and objects of JSON where such are meant."""
    given: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            continue
        if name in given:
            raise SpecError("is there twice", path=(name,))
        given[name] = value
        if name in OBJECTS:

            def refuse(finding: str, name: str = name) -> SpecError:
                return SpecError(finding, path=(name,))

            given[name] = parse_json(value.encode("utf-8", "surrogatepass"), refuse)
        elif name in NUMBERS:
            try:
                given[name] = json.loads(value)
            except ValueError:
                raise SpecError(f"must be a number, not {quote(value)}", path=(name,)) from None
        elif name == "stream":
            given[name] = {"true": True, "false": False}.get(value.lower(), value)
    if (wrong := next((name for name in given if name in PICTURES), None)) is not None:
        raise SpecError("must be a file", path=(wrong,))
    return given


def _choose_task(control: Any, has_mask: bool, service: OrderTaker) -> str:
    if control is not None:
        known = [name.removeprefix(CONTROL) for name in service.pipes if name.startswith(CONTROL)]
        if control not in known:
            there = f"{did_you_mean(control, known)}; there are {', '.join(known)}" if known else "; there are none"
            raise SpecError(f"no control {quote(control)}{there}", path=("control",))
        if has_mask:
            raise SpecError("a control image and a mask are not taken at once: leave one out", path=("mask",))
        return f"{CONTROL}{control}"
    task = INPAINT if has_mask else IMAGE
    if task not in service.pipes:
        how, path = ("within a mask", ("mask",)) if has_mask else ("from a picture", ("image",))
        raise SpecError(f"diffusers has no pipeline of {type(service.pipe).__name__} that draws {how}", path=path)
    return task


def _find_size(given: Mapping[str, Any], picture: Image.Image, multiple: int) -> Size:
    """Find the size that is drawn: the one asked for, or the picture's, down to the next multiples."""
    text = given.get("size", "auto")
    if text != "auto":
        with prefix_path("size"):
            return parse_size(text)
    width, height = (side // multiple * multiple for side in picture.size)
    if not width or not height:
        raise SpecError(f"is {picture.size[0]}x{picture.size[1]}, and each side must be {multiple} or more", path=("image",))
    return width, height


def _flatten(picture: Image.Image) -> Image.Image:
    """Put what is transparent on white."""
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    full = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", full.size, "white"), full).convert("RGB")


def read_edit_mask(picture: Image.Image) -> Image.Image:
    """Read the mask of an edit: white is drawn anew, or where anything is transparent that, as OpenAI has it.

    Args:
        picture: A picture of any mode of eight bits.

    Returns:
        A grey picture.
    """
    alpha = picture.convert("RGBA").getchannel("A")
    return ImageChops.invert(alpha) if alpha.getextrema() != (255, 255) else picture.convert("L")
