"""The models of `make matrix`: an entry each, small and with random weights, none of which is zero.

An entry says how a model is made, how it is called, and only those places of passes that are not found by `places` below.
A class that is not in the table is taken from the test zoo by its case's name (`zoo:diffusers/...`); nothing is said of it.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxplug
from fxplug.core.ir.containers import map_leaves

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import zoo

ZOO = "zoo:"
DEVICE = os.environ.get("MATRIX_DEVICE", "cpu")  # of all models and inputs; in the environment, as workers are processes
ACTIVATIONS = (nn.GELU, nn.SiLU, nn.ReLU, nn.Mish, nn.Hardswish)
Params = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Entry:
    """A model, what it is called with, and the options of passes that it needs others for than the rest."""

    what: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Params]
    options: dict[str, Params] = field(default_factory=dict)


@dataclass(eq=False)
class Subject:
    """A model, its trace and an example call, on tensors that nothing else has."""

    name: str
    model: nn.Module
    gm: Any
    kwargs: Params
    options: dict[str, Params]


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _class(name: str) -> Any:
    return getattr(importlib.import_module("diffusers"), name)


def _vit() -> nn.Module:
    import timm

    sizes = {"img_size": 32, "depth": 3, "num_classes": 10, "embed_dim": 48, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def _convnet() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(num_classes=10, depths=(1, 2, 1, 1), dims=(8, 16, 24, 32))


def _unet() -> nn.Module:
    import unets

    return unets.sd15_model()


def _latents(shape: tuple[int, ...], words: int = 0, width: int = 0, **more: Any) -> Params:
    text = {"encoder_hidden_states": torch.randn(2, words, width)} if words else {}
    return {"hidden_states": torch.randn(2, *shape), **text, "timestep": torch.tensor([500, 500]), "return_dict": False, **more}


# the joint blocks of SD3 give text and image
JOINT = {
    "first_block_cache": {"first": "transformer_blocks.0:out[1]", "last": "transformer_blocks.{-1}:out[1]"},
    "teacache": {
        "at": "transformer_blocks.0.attn:in.hidden_states",
        "first": "transformer_blocks.0:in.hidden_states",
        "last": "transformer_blocks.{-1}:out[1]",
    },
    "ditfastattn": {"at": "transformer_blocks.*.attn"},
}
FIRST = {"teacache": {"at": "blocks.0.attn1", "first": "blocks.0:in", "last": "blocks.{-1}"}}
BLOCKS = {
    "first_block_cache": {"first": "blocks.0", "last": "blocks.{-1}"},
    "teacache": {"at": "blocks.0.attn", "first": "blocks.0:in", "last": "blocks.{-1}"},
    "ditfastattn": {"at": "blocks.*.attn"},
}
MODELS: dict[str, Entry] = {
    "vit": Entry("a ViT of timm, 3 blocks", _vit, lambda: {"x": torch.randn(2, 3, 32, 32)}, BLOCKS),
    "convnet": Entry("a ConvNeXt of timm, 4 stages", _convnet, lambda: {"x": torch.randn(2, 3, 64, 64)}),
    "unet": Entry(
        "a UNet of diffusers as Stable Diffusion has it, 2 levels",
        _unet,
        lambda: {
            "sample": torch.randn(2, 4, 16, 16),
            "timestep": torch.tensor(500),
            "encoder_hidden_states": torch.randn(2, 5, 12),
            "return_dict": False,
        },
    ),
    "dit": Entry(
        "a DiT of diffusers, 3 blocks",
        lambda: _class("DiTTransformer2DModel")(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=3, patch_size=2,
            sample_size=8, norm_type="ada_norm_zero", num_embeds_ada_norm=1000, activation_fn="gelu-approximate",
        ),
        lambda: _latents((4, 8, 8), class_labels=torch.tensor([3, 7])),
    ),
    "mmdit": Entry(
        "the joint transformer of Stable Diffusion 3, 4 blocks",
        lambda: _class("SD3Transformer2DModel")(
            sample_size=16, patch_size=2, in_channels=4, num_layers=4, attention_head_dim=8, num_attention_heads=4,
            caption_projection_dim=32, joint_attention_dim=24, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=24,
        ),
        lambda: _latents((4, 8, 8), 8, 24, pooled_projections=torch.randn(2, 16)),
        JOINT,
    ),
    "video": Entry(
        "the video transformer of Wan, 3 blocks",
        lambda: _class("WanTransformer3DModel")(
            patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
            freq_dim=32, ffn_dim=32, num_layers=3, cross_attn_norm=True, rope_max_seq_len=32, qk_norm="rms_norm_across_heads",
        ),
        lambda: _latents((4, 2, 8, 8), 8, 16),
        BLOCKS | FIRST | {"ditfastattn": {"at": "blocks.*.attn1"}},
    ),
}  # fmt: skip


def entry_of(name: str) -> Entry:
    """An entry of the table, or what the zoo says of a class."""
    if not name.startswith(ZOO):
        return MODELS[name]
    (case,) = (c for c in zoo.cases() if c.name == name.removeprefix(ZOO))

    def inputs() -> Params:
        args, kwargs = case.inputs(batch=2)
        return {**named(args, case), **kwargs}

    return Entry(case.name, case.build, inputs)


def named(args: tuple[Any, ...], case: Any) -> Params:
    """Positional inputs under their names."""
    return dict(zip(inspect.signature(case.build().forward).parameters, args, strict=False)) if args else {}


@cache
def traced(name: str) -> tuple[nn.Module, Any, Params]:
    """A model, its trace and its call: made once in a process, and copied for each use."""
    entry = entry_of(name)
    torch.manual_seed(0)
    model = (entry.build().eval() if name.startswith(ZOO) else zoo._make(entry.build).eval()).to(DEVICE)
    kwargs = map_leaves(seeded(entry.inputs, 1), lambda value, _: value.to(DEVICE) if isinstance(value, Tensor) else value)
    return model, fxplug.trace(model, kwargs=kwargs).eval(), kwargs


def subject(name: str) -> Subject:
    """A model and its trace on weights of their own."""
    try:
        model, gm, kwargs = copy.deepcopy(traced(name))
    except RuntimeError:  # torch copies no model whose weights are computed, as its old weight_norm does
        model, gm, kwargs = traced.__wrapped__(name)
    return Subject(name, model, gm, kwargs, entry_of(name).options)


@cache
def recent(count: int = 20) -> tuple[str, ...]:
    """The newest classes of diffusers in the zoo, by name: the licence of their file has the newest year, and a holder beside
    Hugging Face, as the files of new families have (the year alone is also that of files that were changed).
    """
    known = {type(entry.build()).__name__ for entry in MODELS.values()}
    found: dict[str, int] = {}
    for case in zoo.cases("diffusers/"):
        kind = getattr(importlib.import_module("diffusers"), case.name.partition("/")[2], None)
        if kind is not None and kind.__name__ not in known:
            licence = Path(inspect.getfile(kind)).read_text().partition("\n")[0]
            year = re.search(r"Copyright (?:\(c\) )?(20\d\d) (?!The HuggingFace (?:Inc\. )?[Tt]eam\.)", licence)
            found[ZOO + case.name] = int(year[1]) if year else 0
    return tuple(sorted(sorted(found), key=lambda name: -found[name])[:count])


# --- where passes act on a model that nobody described


@cache
def places(name: str) -> dict[str, Params]:
    """Options of the passes that need a place: found by looking at the modules and at one call."""
    model, _, kwargs = traced(name)
    modules = dict(model.named_modules())
    found: dict[str, Params] = {}
    layers = [path for path, module in modules.items() if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    middle = [path for path in layers if path.count(".") > 1] or layers
    activation = next((type(m).__name__ for m in modules.values() if type(m) in ACTIVATIONS), None)
    linear = [path for path in middle if isinstance(modules[path], nn.Linear)]
    if activation:
        found["replace"] = {"at": "**", "module": activation, "with": "PReLU"}
    elif linear:
        found["replace"] = {"at": linear[len(linear) // 2], "module": "Linear", "with": "Linear"}
    shapes: dict[str, tuple[int, ...]] = {}

    def look(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            if isinstance(result, Tensor) and result.ndim > 2:
                shapes[path] = tuple(result.shape)

        return hook

    handles = [modules[path].register_forward_hook(look(path)) for path in middle]
    with torch.no_grad():
        model(**copy.deepcopy(kwargs))
    for handle in handles:
        handle.remove()
    order = list(shapes)
    pairs = [(a, b) for a in order for b in reversed(order) if order.index(a) < order.index(b) and shapes[a] == shapes[b]]
    if pairs:
        found["skip"] = dict(zip(("from", "to"), pairs[0], strict=True))
    return found
