"""What the body of a request asks for, checked: fields of OpenAI's interface, and those of `Request` under their names."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_type_hints

from pydantic import Field

from ...adapters.strengths import Schedule, Strength
from ...core.errors import SpecError, did_you_mean, format_path, prefix_path, quote
from ...core.reading import parse_json
from ...core.spec.yaml_source import Section, check_finite, validate
from ...pipelines.opening import call_parameters
from ..regions import check_regions
from ..requests import Region, Request, check_strength
from .errors import RequestError, convert_spec_error
from .keys import ApiKey
from .picture_files import decode_base64, decode_picture, read_mask
from .server_config import ServerConfig, Size, parse_size

IGNORED = ("quality", "style", "background", "moderation", "output_compression", "user")  # of OpenAI's
OWN = (  # arguments of pipelines that the server sets, or that are no plain values
    "height", "width", "num_images_per_prompt", "num_videos_per_prompt", "generator", "latents", "output_type", "return_dict",
    "callback", "callback_steps", "callback_on_step_end", "callback_on_step_end_tensor_inputs", "cross_attention_kwargs",
    "joint_attention_kwargs", "attention_kwargs", "timesteps", "sigmas", "prompt", "strength",
)  # fmt: skip
STEPS = ("num_inference_steps",)
WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
SEEDS = 2**63
DRAWN = 2**53  # what a program that reads all numbers as floating-point ones still has exactly
TEXT = 20_000  # characters of a text


class RegionBody(Section):
    """A part of a picture, with prompts and adapters of its own."""

    mask: Any
    adapters: dict[str, Any] = Field(default_factory=dict)
    call: dict[str, Any] = Field(default_factory=dict)


class ImageBody(Section):
    """The body of a request for pictures."""

    prompt: str | None = None
    n: int = Field(default=1, ge=1)
    size: str = "auto"
    model: str = "base"
    response_format: Literal["b64_json", "url"] = "b64_json"
    stream: bool = False
    partial_images: int = Field(default=0, ge=0, le=8)
    output_format: Literal["png", "jpeg", "webp"] = "png"
    call: dict[str, Any] = Field(default_factory=dict)
    adapters: dict[str, Any] = Field(default_factory=dict)
    scheduler: str | None = None
    seed: int | None = Field(default=None, ge=0, lt=SEEDS)
    regions: list[RegionBody] = Field(default_factory=list)
    deadline_s: float | None = Field(default=None, gt=0)


@dataclass(frozen=True)
class PictureOrder:
    """What is asked for: a request for each picture, with its seed, and how the answer looks."""

    requests: list[Request]
    seeds: list[int]
    size: Size | None
    format: str
    as_url: bool
    stream: bool
    previews: int


def read_order(data: bytes, config: ServerConfig, pipe: Any, adapters: Sequence[str], key: ApiKey) -> PictureOrder:
    """Read a body of JSON.

    Args:
        data: The body.
        config: That of the server.
        pipe: The pipeline.
        adapters: The names of the adapters that there are.
        key: That of the client.

    Returns:
        What it asks for.

    Raises:
        RequestError: 400 with the field, 404 for an adapter.
    """
    value = parse_json(data, lambda finding: RequestError(f"the body {finding}"))
    if not isinstance(value, Mapping):
        raise RequestError(f"the body must be an object of JSON, not {quote(value)}")
    return make_order(value, config, pipe, adapters, key)


def make_order(
    fields: Mapping[str, Any],
    config: ServerConfig,
    pipe: Any,
    adapters: Sequence[str],
    key: ApiKey,
    task: str = "",
    pictures: Mapping[str, Any] = MappingProxyType({}),
) -> PictureOrder:
    """Make an order of the fields of a body.

    Args:
        fields: The fields.
        config: That of the server.
        pipe: The pipeline of the task.
        adapters: The names of the adapters that there are.
        key: That of the client.
        task: The engine's name of the pipeline.
        pictures: Further arguments of its call: what it draws from.

    Returns:
        What is asked for.

    Raises:
        RequestError: 400 with the field, 404 for an adapter.
    """
    given = {name: item for name, item in fields.items() if item is not None and name not in IGNORED}
    try:
        body = validate(ImageBody, given)
        check_finite(dict(body.call), "call")
        names = _read_adapters({**_read_model(body.model, adapters, key), **body.adapters}, adapters, key)
        call, size = _make_call(body, config, pipe, bool(pictures))
        regions = _read_regions(body.regions, config, pipe, size, adapters, key)
        for mixture in (names, *({**names, **region.adapters} for region in regions)):
            if len(mixture) > config.limits.adapters:
                found = f"{len(mixture)} adapters, and a request may have {config.limits.adapters}"
                raise SpecError(found, path=("adapters",))
        scheduler = _read_scheduler(body.scheduler, config, pipe)
        if body.stream and body.n > 1:
            raise SpecError("one picture is streamed at a time: leave n out", path=("n",))
        if body.n > (most := min(config.limits.n, config.engine.queue)):
            raise SpecError(f"must be {most} or less, not {body.n}", path=("n",))
        first = secrets.randbelow(DRAWN - body.n) if body.seed is None else body.seed
        if first + body.n > SEEDS:
            raise SpecError("is so large that the seeds of further pictures are too large", path=("seed",))
        seeds = list(range(first, first + body.n))
        seconds = min(config.limits.seconds, body.deadline_s or config.limits.seconds)
        takes_seed = "generator" in call_parameters(pipe)
        requests = [
            Request(
                call={**call, **pictures}, adapters=names, scheduler=scheduler, seed=seed if takes_seed else None,
                deadline_s=seconds, regions=regions, task=task,
            )
            for seed in seeds
        ]  # fmt: skip
        check_regions(requests[0], pipe)
    except SpecError as error:
        raise convert_spec_error(error) from None
    return PictureOrder(
        requests, seeds, size, body.output_format, body.response_format == "url", body.stream,
        body.partial_images if body.stream else 0,
    )  # fmt: skip


def read_strength(value: Any, *path: str | int) -> Any:
    """Read the strength of an adapter.

    Args:
        value: A number; `value`, `blocks` and `rest` of a `Strength`; or `knots`, `over` and `between` of a `Schedule`.
        *path: Where it stands.

    Returns:
        What a request takes.

    Raises:
        SpecError: For anything else.
    """
    if not isinstance(value, Mapping):
        return value
    known = ("knots", "over", "between") if "knots" in value else ("value", "blocks", "rest")
    if (wrong := next((name for name in value if name not in known), None)) is not None:
        near = f"{did_you_mean(wrong, known)}; there are {', '.join(known)}"
        raise SpecError(f"unknown key {quote(wrong)}{near}", path=path, key=wrong)
    with prefix_path(*path):
        if "knots" not in value:
            return Strength(**value)
        knots = value["knots"]
        pairs = isinstance(knots, list) and all(isinstance(knot, list) and len(knot) == 2 for knot in knots)
        made = [[place, read_strength(each, "knots", at)] for at, (place, each) in enumerate(knots)] if pairs else knots
        return Schedule(**{**value, "knots": made})


def _read_model(model: str, adapters: Sequence[str], key: ApiKey) -> dict[str, float]:
    base, colon, name = model.partition(":")
    if base != "base" or (colon and not name):
        known = ["base", *(f"base:{one}" for one in key.filter(adapters))]
        raise RequestError(f"no model {quote(model)}{did_you_mean(model, known)}", 404, param="model", code="model_not_found")
    return {name: 1.0} if colon else {}


def _read_adapters(given: Mapping[str, Any], adapters: Sequence[str], key: ApiKey, *path: str | int) -> dict[str, Any]:
    """Read the strengths of adapters that this client may use."""
    check_finite(dict(given), *path, "adapters")
    known, found = key.filter(adapters), {}
    for name, value in given.items():
        if name not in known:
            near = did_you_mean(name, known) if known else "; there are none"
            where = format_path((*path, "adapters", name))
            raise RequestError(f"no adapter {quote(name)}{near}", 404, param=where, code="adapter_not_found")
        found[name] = read_strength(value, *path, "adapters", name)
        check_strength(found[name], *path, "adapters", name)
    return found


def _read_regions(
    bodies: Sequence[RegionBody], config: ServerConfig, pipe: Any, size: Size | None, adapters: Sequence[str], key: ApiKey
) -> list[Region]:
    if len(bodies) > config.limits.regions:
        raise SpecError(f"{len(bodies)} regions, and a request may have {config.limits.regions}", path=("regions",))
    kind: type = type(pipe)
    allowed = find_plain_arguments(kind) | ({"prompt": [str]} if "prompt" in call_parameters(pipe) else {})
    found = []
    for at, body in enumerate(bodies):
        with prefix_path("regions", at):
            check_finite(dict(body.call), "call")
            with prefix_path("mask"):
                picture = decode_picture(decode_base64(body.mask), 16 * config.limits.pixels)
                if size is not None and picture.size != size:
                    sides = "x".join(map(str, picture.size))
                    raise SpecError(f"is {sides}, and the picture {size[0]}x{size[1]}: send one of its size")
            call = _read_arguments(body.call, allowed, pipe)
        names = _read_adapters(body.adapters, adapters, key, "regions", at)
        found.append(Region(mask=read_mask(picture), adapters=names, call=call))
    return found


def _read_scheduler(name: str | None, config: ServerConfig, pipe: Any) -> str | None:
    own = type(getattr(pipe, "scheduler", None)).__name__
    if name is None or name == own:
        return None
    if name not in config.engine.schedulers:
        known = [own, *config.engine.schedulers]
        near = f"{did_you_mean(name, known)}; there are {', '.join(known)}"
        raise SpecError(f"no scheduler {quote(name)} here{near}", path=("scheduler",))
    return name


def _make_call(body: ImageBody, config: ServerConfig, pipe: Any, sized: bool) -> tuple[dict[str, Any], Size | None]:
    """Make the arguments of the pipeline, and the size of the picture, None where it is the pipeline's own.

    `sized` says that what is drawn from has this size.
    """
    known = call_parameters(pipe)
    call = {name: value for name, value in config.call.items() if name in known}
    kind: type = type(pipe)
    call |= _read_arguments(body.call, find_plain_arguments(kind), pipe)
    if body.prompt is not None:
        if "prompt" not in known:
            raise SpecError(f"{type(pipe).__name__} takes no prompt: leave it out", path=("prompt",))
        _check_plain(body.prompt, "prompt")
        call["prompt"] = body.prompt
    elif known.get("prompt", False) or ("prompt" in known and not any("embeds" in name for name in call)):
        raise SpecError("missing key 'prompt': the text of the picture", path=("prompt",))
    for name in STEPS:
        if (steps := call.get(name)) is not None and not (type(steps) is int and 1 <= steps <= config.limits.steps):
            raise SpecError(f"must be a whole number from 1 to {config.limits.steps}, not {quote(steps)}", path=("call", name))
    size = _read_size(body.size, config)
    if size is not None:
        if "width" in known and "height" in known:
            call["width"], call["height"] = size
        elif not sized:
            raise SpecError(f"{type(pipe).__name__} takes no size: leave it out", path=("size",))
    return call, size


def _read_arguments(given: Mapping[str, Any], allowed: Mapping[str, list[type]], pipe: Any) -> dict[str, Any]:
    """Read plain arguments of the pipeline's call; null is as if it were not there."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in allowed:
            why = ", which is set by the server" if name in OWN and name in call_parameters(pipe) else ""
            near = f"{did_you_mean(name, allowed)}; a request can give {', '.join(allowed)}"
            finding = f"{type(pipe).__name__} is not called with {quote(name)}{why}{near}"
            raise SpecError(finding, path=("call",), key=name)
        if value is None:
            continue
        kinds = allowed[name]
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            raise SpecError(f"must be {' or '.join(WORDS[kind] for kind in kinds)}, not {quote(value)}", path=("call", name))
        _check_plain(value, "call", name)
        found[name] = value
    return found


@cache
def find_plain_arguments(kind: type) -> dict[str, list[type]]:
    """Find the arguments of a pipeline's call that are numbers, texts or truth values, by its annotations or else its defaults.

    Args:
        kind: The class of the pipeline.

    Returns:
        The types of each argument.
    """
    function: Any = kind.__call__
    try:
        hints = get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError):  # a name that is imported for type checking alone
        hints = {}
    found: dict[str, list[type]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, type(parameter.default))
        parts = get_args(hint) or (hint,)
        plain = [part for part in WORDS if part in parts]
        if plain and name not in OWN:
            found[name] = plain
    return found


def _check_plain(value: Any, *path: str) -> None:
    if isinstance(value, str):
        if len(value) > TEXT:
            raise SpecError(f"has {len(value)} characters; the limit is {TEXT}", path=path)
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise SpecError("is not Unicode text: it has half a pair of surrogates", path=path)
    elif isinstance(value, int) and abs(value) >= SEEDS:
        raise SpecError(f"must be below 2^63, not {quote(value)}", path=path)


def _read_size(text: str, config: ServerConfig) -> Size | None:
    if text == "auto":
        return parse_size(config.warm.sizes[0]) if config.warm.sizes else None
    try:
        width, height = parse_size(text)
    except SpecError as error:
        raise SpecError(error.finding, path=("size",)) from None
    multiple, most = config.limits.multiple, config.limits.pixels
    if width % multiple or height % multiple:
        near = "x".join(str(max(multiple, round(side / multiple) * multiple)) for side in (width, height))
        raise SpecError(f"width and height must be multiples of {multiple}: use {near}, not {text}", path=("size",))
    if width * height > most:
        raise SpecError(f"has {width * height} pixels; the limit is {most}", path=("size",))
    return width, height
