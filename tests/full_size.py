"""The models of the recipes at their full size, on the meta device: what the passes of a recipe find and add, and the memory.

The memory of a training is, in GB: the weights, of the other models of the pipeline too, in the bytes that they have; 16 bytes
for each number that trains (itself, its gradient and two of AdamW, in float32); the results that the backward pass needs; and
one more for what the device itself keeps. With `checkpointing` the results are the last one of each block, and all within the
largest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import transformers
from torch import nn

import fxplug
from fxplug.core.spec.pass_file import recipes

BYTES = {None: 2.0, "int8": 1.0, "nf4": 0.55}  # of a weight; nf4 has scales beside its half a byte
# what gives no memory of its own, but another view of what is there
VIEWS = re.compile(
    "view|reshape|permute|transpose|flatten|expand|squeeze|chunk|split|unbind|getitem|edge|size|check|guard|contiguous"
)


@dataclass
class Model:
    """A model as published: how it is made, the call that it gets, its parameters and those of what is beside it, in 10^9."""

    make: Callable[[], nn.Module]
    call: dict[str, Any]
    published: float
    beside: float = 0.0


@dataclass
class Count:
    """What a recipe is at its full size."""

    text: str
    parameters: int
    published: float
    gigabytes: int


def backbone(name: str, published: float, side: int = 224, **options: Any) -> Model:
    return Model(lambda: timm.create_model(name, **options), {"x": empty(32, 3, side, side)}, published)


def tower(family: str, published: float, **sizes: Any) -> Model:
    def make() -> nn.Module:
        text = {"bos_token_id": 0, "eos_token_id": 1}
        given = {"vision_config": {"patch_size": 16, **sizes}, "text_config": text, "num_labels": 37}
        config = getattr(transformers, f"{family}Config")(**given)
        return getattr(transformers, f"{family}ForImageClassification")(config)  # type: ignore[no-any-return]

    return Model(make, {"pixel_values": empty(32, 3, 224, 224)}, published)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


MODELS: dict[str, Model] = {
    "vit": backbone("vit_base_patch16_224", 0.0864, num_classes=37),
    "dino": backbone("vit_base_patch14_dinov2", 0.0866, img_size=224, num_classes=37),
    "convnext": backbone("convnext_base", 0.0886, num_classes=37),
    "swin": backbone("swin_base_patch4_window7_224", 0.0878, num_classes=37),
    "clip": tower("CLIP", 0.0862, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12),
    "siglip": tower("Siglip", 0.0929),
}
# sites of each pass; numbers that are frozen and that train
EXPECTED = {
    "vit": "lora 48: 85.8 M frozen, 2.39 M train",
    "dino": "lora 48: 85.8 M frozen, 2.39 M train",
    "convnext": "lora 72: 87.6 M frozen, 2.93 M train",
    "swin": "lora 96: 86.8 M frozen, 3.12 M train",
    "clip": "lora 72: 85.8 M frozen, 2.68 M train",
    "siglip": "lora 72: 92.9 M frozen, 2.68 M train",
}


def count(name: str) -> Count:
    model, config = MODELS[name], fxplug.load_config(recipes()[name])
    with torch.device("meta"):
        made = model.make().eval()
        gm = fxplug.trace(made, kwargs=model.call)
        found = {}
        for each in config.passes:
            found[each.name] = len(fxplug.find(gm, each))
            gm = fxplug.apply(gm, each)
    assert config.train is not None
    total = sum(p.numel() for p in made.parameters())
    trains = sum(p.numel() for p in gm.parameters()) - total
    trains += sum(p.numel() for n, p in made.named_parameters() if n.startswith(tuple(f"{t}." for t in config.train.trainable)))
    of_pipeline = config.model.kind == "pipeline"
    quantize = getattr(config.model, "quantize", None)
    weights = total * (BYTES[quantize] if of_pipeline else 4.0) + model.beside * 1e9 * 2
    memory = weights + 16 * trains + results(gm, bool(config.train.checkpointing))
    text = ", ".join(f"{key} {n}" for key, n in found.items())
    text += f": {total / 1e6:.1f} M frozen, {trains / 1e6:.2f} M train"
    return Count(text, total, model.published * 1e9, math.ceil(memory / 1e9) + 1)


def results(gm: Any, checkpointing: bool) -> float:
    """Bytes of what the backward pass needs, in half precision."""
    groups: dict[str, list[int]] = {}
    for node in gm.graph.nodes:
        if node.op not in ("call_module", "call_function", "call_method") or "shape" not in node.meta:
            continue
        if VIEWS.search(str(getattr(node.target, "__name__", node.target))):
            continue
        path = next(reversed(node.meta["nn_module_stack"]))
        block = re.match(r"(.*?\.\d+)(\.|$)", str(path))
        groups.setdefault(block[1] if block else "", []).append(math.prod(node.meta["shape"]))
    outside = sum(groups.pop("", []))
    sums = [sum(sizes) for sizes in groups.values()]
    if not checkpointing:
        return 2.0 * (outside + sum(sums))
    return 2.0 * (outside + max(sums) + sum(sizes[-1] for sizes in groups.values()))
