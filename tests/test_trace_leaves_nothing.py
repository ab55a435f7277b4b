"""A trace, also one that is refused, leaves a model and its inputs as they were: the same keys, the same objects."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import zoo
from sweeps import sweep
from torch import nn

import fxplug

CASES = {c.name: c for c in zoo.cases()}
# with tensors that are neither parameter nor buffer: attributes (QwenImage, Z-Image), in lists (Lumina2), in dicts (LeViT)
PLAIN = [
    "diffusers/QwenImageTransformer2DModel",
    "diffusers/FluxTransformer2DModel",
    "diffusers/Lumina2Transformer2DModel",
    "diffusers/ZImageTransformer2DModel",
    "timm/levit_conv_128s",
    "timm/efficientformer",
    "timm/eva02_tiny_patch14_224",
]


@functools.cache
def built(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model that was called, so that it keeps what it keeps, and its inputs."""
    case = CASES[name]
    model, (args, kwargs) = case.build().eval(), case.inputs()
    with torch.no_grad():
        model(*args, **kwargs)
    return model, args, kwargs


def held(value: Any, path: str = "", seen: dict[int, Any] | None = None) -> dict[str, Any]:
    """By path, every attribute and member that can be reached by way of a model or of inputs: the objects themselves."""
    seen = {} if seen is None else seen
    found = {path: value}
    if id(value) in seen:
        return found
    seen[id(value)] = value
    if isinstance(value, dict):
        members = [(f"{path}[{key!r}]", member) for key, member in value.items()]
    elif isinstance(value, (list, tuple, set)):
        members = [(f"{path}[{key}]", member) for key, member in enumerate(value)]
    else:
        attributes = {} if isinstance(value, type) or callable(value) and not isinstance(value, nn.Module) else value
        members = [(f"{path}.{key}", member) for key, member in getattr(attributes, "__dict__", {}).items()]
    for where, member in members:
        found.update(held(member, where, seen))
    return found


def assert_left(before: dict[str, Any], *now: Any) -> None:
    after = held(now)
    assert before.keys() - {""} == after.keys() - {""}
    assert not [path for path in after if path and before[path] is not after[path]]


def ways_out(model: nn.Module) -> None:
    """What copies and writes whole models, which a mark that holds a graph would follow into that."""
    copy.deepcopy(model)
    pickle.dumps(model)
    torch.save(model, io.BytesIO())


class Refuse(Exception):
    pass


@sweep("name", PLAIN, "diffusers/FluxTransformer2DModel", "timm/eva02_tiny_patch14_224")
def test_a_trace_leaves_nothing_in_a_model(name: str) -> None:
    model, args, kwargs = built(name)
    inputs = list(args), kwargs
    before = held((model, inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fxplug.trace(model, args, kwargs, check=False)
    assert_left(before, model, inputs)
    ways_out(model)


@sweep("name", PLAIN, "diffusers/FluxTransformer2DModel", "timm/eva02_tiny_patch14_224")
@pytest.mark.parametrize("real", [None, True])
def test_a_trace_that_fails_leaves_nothing_in_a_model(name: str, real: bool | None) -> None:
    model, args, kwargs = built(name)

    def refuse(*_: Any) -> None:
        raise Refuse

    late = [m for m in model.modules() if not list(m.children())][-1].register_forward_pre_hook(refuse)
    try:
        inputs = list(args), kwargs
        before = held((model, inputs))
        with pytest.raises(Refuse), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fxplug.trace(model, args, kwargs, real=real)
        assert_left(before, model, inputs)
    finally:
        late.remove()
    ways_out(model)
