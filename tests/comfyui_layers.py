"""ComfyUI's names of layers with the shapes of their weights (tests/data/comfyui_layers.yaml), and adapters of all layers."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import torch
import yaml

from fxplug.adapters.contents import AdapterContents
from fxplug.adapters.updates import Entry
from fxplug.adapters.writing import make_content

DATA = yaml.safe_load((Path(__file__).parent / "data" / "comfyui_layers.yaml").read_text())
# how keys end that ComfyUI looks up behind the name of a layer (comfy/lora.py, comfy/weight_adapter)
ENDS = re.compile(r"\.(?:lora_(?:up|down|mid)\.weight|alpha|dora_scale|(?:hada|lokr)_\w+|diff|diff_b|w_norm|b_norm)$")


def _numbers(text):
    ends = [part.partition("-") for part in text.split(",")]
    return [str(n) for first, _, last in ends for n in range(int(first), int(last or first) + 1)]


def layers_in_comfyui(family):
    """The shapes of a family's weights by ComfyUI's names."""
    made = {}
    for name, shape in DATA[family].items():
        texts = re.split(r"\{([\d,-]+)\}", name)
        for numbers in itertools.product(*map(_numbers, texts[1::2])):
            made["".join(itertools.chain(*itertools.zip_longest(texts[::2], numbers, fillvalue="")))] = tuple(shape)
    return made


def of_all_layers(about, as_, scale=0.5):
    """A LoRA of rank 1 of every layer of a model, in a format."""
    entries = []
    for path, layer in about.layers.items():
        if layer.kind != "Embedding":
            out, inner, *kernel = layer.shape
            tensors = {"down": torch.randn(1, inner, *kernel), "up": torch.randn(out, 1, *[1] * len(kernel))}
            entries.append(Entry(path, path, "", "lora", tensors, scale, 1))
    return make_content(AdapterContents(tuple(entries), {}), as_, about)
