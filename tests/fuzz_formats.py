"""Random adapters in each format, read by PEFT, diffusers and LyCORIS from the file and from its tensors: the same numbers.

Kinds, ranks, scales, dtypes and types of layers vary. LyCORIS reads kohya's and ComfyUI's files, whose tensors are its own,
under its names of layers.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from diffusers.loaders.peft import PeftAdapterMixin
from lycoris import create_lycoris_from_weights
from safetensors.torch import load_file
from torch import Tensor, nn

from fxplug.adapters.contents import AdapterContents, list_layers
from fxplug.adapters.files import Entry, fit, read
from fxplug.adapters.tables import FORMATS
from fxplug.adapters.writing import About, FileOptions, make_content, write
from fxplug.core.errors import ArtifactError

COST = 4
STARTS = {"kohya": "lora_unet_", "comfy": "diffusion_model.", "lycoris": "lycoris_"}
ENDS = re.compile(r"\.(lora_|hada_|lokr_|dora_scale$|alpha$|diff_b$)")
KINDS = ("lora", "lora", "lora", "lora+bias", "dora", "loha", "lokr")
SCALES = ([1.0], [0.5], [0.75], [3 / 7, 2.0, 1.0], [-0.3, 1.0], [4 / math.sqrt(3), 0.01], [1 / 4096])
# how far a number that was rounded to a dtype may move the result, as a share of what the adapter changes
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Net(nn.Module, PeftAdapterMixin):
    """A layer of each type that updates are of; some names end as others do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"to_q": nn.Linear(8, 8), "proj_out": nn.Linear(8, 8)}) for _ in range(2))
        self.wide = nn.Linear(8, 12, bias=False)
        self.series = nn.Conv1d(12, 12, 3, padding=1)
        self.conv = nn.Conv2d(12, 8, 3, padding=1)
        self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.point = nn.Conv2d(8, 4, 1)
        self.proj_out = nn.Linear(4, 8)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.words(indices)
        for block in self.blocks:
            x = torch.tanh(block["proj_out"](x + block["to_q"](x)))
        x = torch.tanh(self.series(self.wide(x).mT))[..., None, :]
        return self.proj_out(self.point(self.groups(torch.tanh(self.conv(x)))).movedim(1, -1))


INDICES = torch.arange(10).reshape(2, 5)


@cache
def net() -> Net:
    """The model, in float64: what differs is what a file says, and no arithmetic."""
    torch.manual_seed(0)
    return Net().eval().double()


# which layers a kind is put at; PEFT has no LoKr of a Conv1d, and several of these none of groups or of an Embedding
LAYERS = {name: layer for name, layer in net().named_modules() if isinstance(getattr(layer, "weight", None), Tensor)}
NOT_AT = {
    "lora": [], "lora+bias": ["words", "wide", "groups"], "dora": ["words", "groups"], "loha": ["words", "groups"],
    "lokr": ["words", "groups", "series"],
}  # fmt: skip


def tensors_of(kind: str, layer: Any, rank: int) -> dict[str, Tensor]:
    """Random tensors of an update under the names that fxplug's blocks have."""
    weight = layer.weight.mT if isinstance(layer, nn.Embedding) else layer.weight
    out, inner, *kernel = weight.shape
    if kind == "loha":
        flat = weight[0].numel()
        return {f"hada_w{n}_{s}": 0.5 * torch.randn((out, rank) if s == "a" else (rank, flat)) for n in (1, 2) for s in "ab"}
    if kind == "lokr":
        if rank > 1 or kernel:
            return {"lokr_w1": torch.randn(2, 2), "lokr_w2": 0.3 * torch.randn(out // 2, inner // 2, *kernel)}
        halves = {"lokr_w2_a": torch.randn(out // 2, rank), "lokr_w2_b": 0.3 * torch.randn(rank, inner // 2)}
        return {"lokr_w1": torch.randn(2, 2), **halves}
    made = {"down": 0.3 * torch.randn(rank, inner, *kernel), "up": torch.randn(out, rank, *[1] * len(kernel))}
    if kind == "lora+bias":
        made["bias"] = torch.randn(out)
    if kind == "dora":
        made["magnitude"] = 1 + torch.rand(out)
    return made


def adapter(rng: random.Random) -> tuple[list[Entry], torch.dtype]:
    """Updates of one kind for some layers, as a file has them."""
    kind, dtype = rng.choice(KINDS), rng.choice([*ROUNDING])
    ranks, scales = rng.choice([[2], [1], [1, 2, 4]]), rng.choice(SCALES)
    homes = sorted(LAYERS.keys() - {*NOT_AT[kind]})
    entries = []
    for path in sorted(rng.sample(homes, rng.randint(1, len(homes)))):
        rank, scale = rng.choice(ranks), rng.choice(scales)
        tensors = {name: value.to(dtype) for name, value in tensors_of(kind, LAYERS[path], rank).items()}
        entries.append(Entry(path, path, "", kind, tensors, scale, rank, isinstance(LAYERS[path], nn.Embedding)))
    return entries, dtype


def result(updates: dict[str, Entry]) -> Tensor:
    """What the net gives with updates by place, by their definition and in float64."""
    model = copy.deepcopy(net())
    for place, entry in updates.items():
        layer: Any = model.get_submodule(place.removesuffix(".bias"))
        if entry.param == "bias":
            layer.bias += entry.scale * entry.tensors["delta"].double()
            continue
        wide = {name: value.double() for name, value in entry.tensors.items()}
        weight = layer.weight.mT if entry.embedding else layer.weight
        delta = entry.update_kind.delta
        product = wide["up"].flatten(1) @ wide["down"].flatten(1) if delta is None else delta(wide, weight.shape)
        weight += entry.scale * product.reshape(weight.shape)
        if "magnitude" in wide:
            norm = layer.weight.flatten(1).norm(dim=1)
            layer.weight *= (wide["magnitude"].flatten() / norm).reshape(-1, *[1] * (layer.weight.dim() - 1))
        if "bias" in wide:
            layer.bias += entry.scale * wide["bias"]
    return model(INDICES)


# --- readers


def of_peft(path: Path) -> Tensor:
    return peft.PeftModel.from_pretrained(copy.deepcopy(net()), path).eval()(INDICES)


def of_diffusers(source: Any) -> Tensor:
    model = copy.deepcopy(net())
    model.load_lora_adapter(source, prefix="unet", **({} if isinstance(source, dict) else {"use_safetensors": True}))
    return model(INDICES)


def of_lycoris(tensors: dict[str, Tensor], start: str) -> Tensor:
    model, renamed = copy.deepcopy(net()), {}
    for key, value in tensors.items():
        at = ENDS.search(key)
        assert at is not None, key
        layer, end = key[: at.start()].removeprefix(start), key[at.start() :]
        if end == ".diff_b":  # ComfyUI's alone
            model.get_submodule(layer).bias += value.double()
        else:
            renamed[f"lycoris_{layer.replace('.', '_')}{end}"] = value.double()
    network, _ = create_lycoris_from_weights(1.0, "adapter.safetensors", model, weights_sd=renamed)
    network.double().apply_to()
    return model(INDICES)


def of_fxplug(source: Any) -> Tensor:
    shapes = {name: tuple(layer.weight.shape) for name, layer in LAYERS.items()}
    biases = {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    return result(dict(fit(read(source), shapes, beside=biases).check().placed))


def readings(as_: str, path: Path, entries: list[Entry]) -> dict[str, Callable[[], Tensor]]:
    """The readers of a format, with its file and with its tensors alone.

    Without its metadata diffusers takes a LoKr's widths from two dimensions, its ranks for all names that end alike, and a
    LoRA's ranks from `lora_B`, which an Embedding has not. PEFT reads no tensors without its configuration.
    """
    own = {"fxplug": lambda: of_fxplug(path)}
    if as_ == "peft":
        return {**own, "PEFT": lambda: of_peft(path)}
    tensors = load_file(path / FORMATS[as_]["file"] if path.is_dir() else path)
    own["fxplug, tensors"] = lambda: of_fxplug(tensors)
    if as_ == "diffusers":
        own["diffusers"] = lambda: of_diffusers(path)
        kernels = any("lokr_w2" in entry.tensors and entry.tensors["lokr_w2"].dim() > 2 for entry in entries)
        uneven = entries[0].kind == "lokr" or any(entry.embedding for entry in entries)
        several = uneven and len({entry.rank for entry in entries}) > 1
        if not kernels and not several and not all(entry.embedding for entry in entries):
            own["diffusers, tensors"] = lambda: of_diffusers(dict(tensors))
    if as_ in STARTS:
        own["LyCORIS, tensors"] = lambda: of_lycoris(tensors, STARTS[as_])
    return own


def case(number: int) -> list[str]:
    rng = random.Random(number)
    torch.manual_seed(number)
    entries, dtype = adapter(rng)
    wanted = result({entry.path: entry for entry in entries})
    effect = (wanted - net()(INDICES)).abs().max()
    layers, lines = list_layers(net()), []
    written_in = rng.choice([None, None, *ROUNDING])
    what = f"{entries[0].kind} of {dtype} in {written_in}: {[(e.path, e.rank, e.scale) for e in entries]}"
    allowed = max(ROUNDING[dtype], ROUNDING[written_in or dtype])
    for as_ in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                how = FileOptions(part="unet", dtype=written_in)
                made = make_content(AdapterContents(tuple(entries), {}), as_, About(layers), how)
            except ArtifactError as error:
                if as_ == "fxplug" or not re.search("embedding|groups|loha|change of a bias", str(error)):
                    lines.append(f"{as_} refuses {what}: {error}")
                continue
            path = write(made, Path(folder) / "ink", as_).path
            for name, reader in readings(as_, path, entries).items():
                try:
                    off = float((reader() - wanted).abs().max() / effect)
                except Exception as error:  # noqa: BLE001 - whatever a reader raises, it does not take the file
                    lines.append(f"{as_} by {name}: {type(error).__name__} {error} for {what}")
                    continue
                if not off <= allowed:
                    lines.append(f"{as_} by {name} is off by {off:.1e} of the effect for {what}")
    return lines


@torch.no_grad()
def fuzz_formats(cases: int, seed: int) -> list[str]:
    """Write and read adapters; a line for each reader that gives other numbers."""
    warnings.simplefilter("ignore")
    logging.getLogger("LyCORIS").setLevel(logging.ERROR)
    return [f"seed {number}: {line}" for number in range(seed, seed + cases) for line in case(number)]
