"""Adapter files of any common layout, read into low-rank updates by layer.

PEFT, diffusers (its old attention processors too), kohya and LyCORIS, ai-toolkit, and fxplug's own. `read` needs no model: it
gives what each layer of the file gets, under the names that fxplug's blocks have. `fit` finds those layers in a graph.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ArtifactError, did_you_mean
from .fitting import PARTS, Fit, fit, split_part
from .updates import AdapterFile, Entry

__all__ = ["AdapterFile", "Entry", "Fit", "fit", "read"]
SAFE, PICKLED = (".safetensors",), (".bin", ".pt", ".pth", ".ckpt")


def read(
    source: str | Path | Mapping[str, Any], *, adapter: str | None = None, config: Mapping[str, Any] | None = None
) -> AdapterFile:
    """Read an adapter: a file (.safetensors; .bin, .pt, .pth as plain tensors), a folder, or a state dict.

    A folder is one that PEFT, diffusers or `fxplug.save` wrote. `adapter` names one of several in a file (PEFT's adapter names,
    or slots). `config` is PEFT's `adapter_config.json` for a source that has none beside it: it says alpha and rank; without
    it, and without `.alpha` in the file, the scale is 1. A state dict may hold `.alpha` as numbers.

    Raises ArtifactError for what is no adapter, half pairs, numbers that are not finite or not floating point, saying the key.
    """
    if isinstance(source, Mapping):
        where, state = "the state dict", dict(source)
        about: dict[str, Any] = {}
    else:
        file = _find(Path(source))
        where = str(file)
        state, about = _load(file)
        beside = file.parent / "adapter_config.json"
        if config is None and file.stem == "adapter_model" and beside.is_file():
            config = _json(beside.read_text(encoding="utf-8"), str(beside))
    reader = _Reader(where, config, about)
    return reader.read(state, adapter)


def _find(path: Path) -> Path:
    """The file that holds the tensors of a file or folder. Raises ArtifactError."""
    if path.is_file():
        return path
    if not path.is_dir():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ArtifactError(f"no adapter file or folder '{path}'{did_you_mean(path.name, near)}")
    for stem in ("adapter_model", "pytorch_lora_weights"):
        for suffix in (*SAFE, *PICKLED):
            if (path / f"{stem}{suffix}").is_file():
                return path / f"{stem}{suffix}"
    files = sorted(p for p in path.iterdir() if p.suffix in SAFE)
    if (path / "manifest.json").is_file():  # what `fxplug.save` wrote: the model's own weights are no adapter
        files = [p for p in files if p.name != "model.safetensors"]
    if len(files) != 1:
        inner = sorted(p.name for p in path.iterdir() if p.is_dir() and (p / "adapter_config.json").is_file())
        if inner and not files:
            raise ArtifactError(f"'{path}' has the adapters {', '.join(inner)}: give the folder of one")
        names = f": give one of {', '.join(p.name for p in files[:6])}" if files else ""
        raise ArtifactError(f"the folder '{path}' has {len(files) or 'no'} files of weights{names}")
    return files[0]


def _load(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a file on the CPU, and what it says of itself. Nothing but tensors is unpickled."""
    if file.suffix in SAFE:
        try:
            with safe_open(file, framework="pt") as opened:
                about = dict(opened.metadata() or {})
                return {key: opened.get_tensor(key) for key in opened.keys()}, about  # noqa: SIM118  (no mapping)
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"{file} cannot be read: {error}") from None
    if file.suffix not in PICKLED:
        raise ArtifactError(f"{file}: an adapter is a file that ends in {', '.join((*SAFE, *PICKLED))}, or a folder")
    try:
        found = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever a damaged or hostile pickle raises
        raise ArtifactError(f"{file} cannot be read as plain tensors: {str(error).splitlines()[0]}") from None
    while isinstance(found, Mapping) and "state_dict" in found and isinstance(found["state_dict"], Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping):
        raise ArtifactError(f"{file} is a {type(found).__name__} and names no layers: save a dict of tensors by layer")
    return dict(found), {}


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{where} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ArtifactError(f"{where} is no JSON object")
    return found


# how a key ends -> what the tensor is; {a} may be an adapter's name
_ADAPTER = r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?"
_FORMS = [
    (re.compile(form.replace("{a}", _ADAPTER)), role)
    for form, role in [
        (r"\.lora_(?P<half>A|B){a}\.(?P<what>weight|bias)$", ""),
        (r"\.lora_embedding_(?P<half>A|B){a}$", "embedding"),
        (r"\.lora_magnitude_vector{a}(?:\.weight)?$", "magnitude"),
        (r"\.lora_(?P<half>down|up|mid)\.(?P<what>weight|bias)$", ""),
        (r"(?:\.lora|\.lora_linear_layer|(?P<old>_lora))\.(?P<half>down|up)\.(?P<what>weight|bias)$", ""),
        (r"\.(?P<name>hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)){a}$", "factor"),
        (r"\.dora_scale$", "magnitude"),
        (r"\.alpha$", "alpha"),
    ]
]
_OWN = re.compile(
    r"^(?P<layer>.*)\.(?P<block>(?P<cls>Lora|LoraWeight|Dora|Loha|Lokr)(?:_\d+)?)\."
    r"(?P<name>(?:down|up)(?:\.weight)?|up\.bias|scale|magnitude|hada_\w+|lokr_\w+)$"
)
_HALVES = {"A": "down", "down": "down", "B": "up", "up": "up", "mid": "mid"}
_GATES = re.compile(r"^(?P<owner>.+)\.gates\.table\.(?P<name>weights|entries|names)$")
_NUMBERED = re.compile(r"^(?:\w+:\d+:(?:up|down)|w_[ab]_\d+)$")


@dataclass
class _Layer:
    """The keys of one layer while a file is read: canonical name -> key, and the numbers beside them."""

    name: str
    keys: dict[str, str] = field(default_factory=dict)
    embedding: bool = False
    own: str = ""
    group: str = ""  # of a block of ours, the pass


class _Reader:
    def __init__(self, where: str, config: Mapping[str, Any] | None, about: Mapping[str, Any]) -> None:
        self.where, self.about = where, about
        self.configs = {"": dict(config)} if config is not None else _packed(about, where)
        self.state: dict[str, Any] = {}
        self.slots: dict[str, tuple[int, int]] = {}  # pass -> which of how many slots
        self.kinds: dict[str, str | None] | None = None  # of our blocks, by path

    def read(self, state: Mapping[str, Any], adapter: str | None) -> AdapterFile:
        self.state = {str(key).replace("_orig_mod.", ""): value for key, value in state.items()}
        gates = {m["owner"]: key for key in self.state if (m := _GATES.match(key)) and m["name"] == "names"}
        adapters: set[str] = set()
        placed = {key: self.place(key, adapter, adapters) for key in self.state if not _GATES.match(key)}
        if adapter is None and len(adapters) > 1:
            raise ArtifactError(f"{self.where} has several adapters: give adapter= one of {', '.join(sorted(adapters))}")
        layers: dict[str, _Layer] = {}
        for found in placed.values():
            if found is None or not found.keys:
                continue  # no layer's, or another adapter's
            layer = layers.setdefault(found.name, found)
            for role, at in found.keys.items():
                if layer.keys.setdefault(role, at) != at:
                    raise ArtifactError(f"{self.where}: '{layer.keys[role]}' and '{at}' are the same of one layer")
        rest = {key: self.state[key] for key, found in placed.items() if found is None}
        if gates:
            self.choose(gates, adapter)
        elif adapter is not None and adapter not in adapters:
            has = f"; it has {', '.join(sorted(adapters))}" if adapters else ""
            raise ArtifactError(f"{self.where} names no adapter '{adapter}'{did_you_mean(adapter, adapters)}{has}")
        if not layers:
            raise ArtifactError(f"{self.where} {self.none()}")
        entries = [entry for layer in layers.values() if (entry := self.entry(layer)) is not None]
        return AdapterFile(self.where, tuple(entries), rest, self.configs.get("") or self.about)

    def none(self) -> str:
        """Why nothing was found."""
        keys = [str(key) for key in self.state]
        if keys and sum(bool(_NUMBERED.match(key)) for key in keys) > len(keys) / 2:
            named = "'<layer>.lora_A.weight' and '<layer>.lora_B.weight'"
            return f"numbers its layers ('{keys[0]}') and does not name them: give a state dict with keys {named}"
        kind = str(self.configs.get("", {}).get("peft_type", ""))
        kind = next((k for k in ("IA3", "OFT", "BOFT", "VERA") if f"{k.lower()}_" in (keys or [""])[0]), kind)
        found = f"its keys are like '{keys[0]}'" if keys else "it is empty"
        return f"has no layer of LoRA, DoRA, LoHa or LoKr{f' (it is {kind})' if kind else ''}: {found}"

    def place(self, key: str, adapter: str | None, adapters: set[str]) -> _Layer | None:
        """The layer of a key and what it is there; an empty one for a key of another adapter; None for any other key."""
        own = _OWN.match(key if "." in key else "")
        if own:
            group, _, name = own["layer"].partition(".")
            last = "" if own["block"] == own["cls"] else f".{own['block']}"
            role = "bias" if own["name"] == "up.bias" else own["name"].removesuffix(".weight")
            return _Layer(f"{group}.{name}{last}" if name else group, {role: key}, own=own["cls"], group=group)
        for form, role in _FORMS:
            found = form.search(key)
            if found is None:
                continue
            parts = found.groupdict()
            if parts.get("adapter"):
                adapters.add(parts["adapter"])
                if adapter is not None and parts["adapter"] != adapter:
                    return _Layer("")
            layer = key[: found.start()]
            if role == "alpha" and layer in self.state:  # diffusers' network_alphas: of a tensor, not of a layer
                of = self.place(layer, adapter, adapters)
                return of and _Layer(of.name, {"alpha": key} if of.keys else {})
            layer = layer.replace(".base_layer", "")  # PEFT's own wrapper around a layer within another
            if parts.get("old"):
                layer = _old_name(layer)
            if parts.get("half"):
                half = _HALVES[parts["half"]]
                if parts.get("what") == "bias":
                    return _Layer(layer, {"bias": key}) if half == "up" else None
                return _Layer(layer, {half: key}, embedding=role == "embedding")
            return _Layer(layer, {parts.get("name") or role: key})
        return None

    def choose(self, gates: Mapping[str, str], adapter: str | None) -> None:
        """Which slot of each pass to read."""
        for owner, key in gates.items():
            rows = self.state[key].tolist()
            names = [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in rows]
            known = [name for name in names if name]
            wanted = known[0] if adapter is None and len(known) == 1 else adapter
            if wanted is None or wanted not in known:
                what = "holds no adapter" if not known else f"has the adapters {', '.join(known)}: give adapter= one of them"
                raise ArtifactError(f"{self.where}: the pass '{owner}' {what}{did_you_mean(wanted, known) if wanted else ''}")
            self.slots[owner] = (names.index(wanted), len(names))

    def entry(self, layer: _Layer) -> Entry | None:
        """One layer whole; None for one that a slot has nothing for."""
        keys = dict(layer.keys)
        tensors = {role: self.tensor(key) for role, key in keys.items() if role not in ("alpha", "scale")}
        base = _base(tensors)
        wanted = next((need for need in _needs(base) if tensors.keys() >= need - {"alpha"}), None)
        if wanted is None:
            need = min(_needs(base), key=lambda n: len(n - tensors.keys()))
            lacks = ", ".join(sorted(need - tensors.keys()))
            raise ArtifactError(f"{self.where}: '{next(iter(keys.values()))}' is half an update: '{layer.name}' has no {lacks}")
        embedding = self.embedding(layer, tensors)
        if layer.own and embedding:
            tensors["down"] = tensors["down"].T
        slot = self.slots.get(layer.group)
        if slot is not None:
            cut = _cut(tensors, *slot, banked=layer.own == "Lora")
            if cut is None:
                return None
            tensors = cut
        if "mid" in tensors:  # a core between the two halves is the same as a larger down
            mid, low = tensors.pop("mid"), tensors["down"]
            tensors["down"] = torch.einsum("ij...,jn->in...", mid.float(), low.flatten(1).float()).to(low.dtype)
        self.check(layer, tensors)
        rank = _rank(tensors)
        part_path = (layer.group, layer.name.partition(".")[2]) if layer.own else split_part(layer.name)[1:]
        kind = base
        if "magnitude" in tensors:
            kind = {"lora": "dora"}.get(base, f"{base}+dora")
            if keys["magnitude"].endswith("dora_scale") and tensors["magnitude"].shape[0] == 1 < tensors["magnitude"].numel():
                kind = f"{kind} by input"  # LyCORIS has both
            tensors["magnitude"] = tensors["magnitude"].flatten()
        kind = f"{kind}+bias" if "bias" in tensors else kind
        scale = self.scale(layer, tensors, rank, part_path, slot is not None)
        flat = "." not in layer.name and not layer.own
        return Entry(layer.name, part_path[1], part_path[0], kind, tensors, scale, rank, embedding, flat)

    def embedding(self, layer: _Layer, tensors: Mapping[str, Tensor]) -> bool | None:
        """Whether it is an Embedding's, in whose `blocks.Lora` the rank is the last dimension of `down`; None: may be."""
        if layer.own != "Lora" or tensors["down"].dim() != 2:
            return layer.embedding
        (rows, columns), rank = tensors["down"].shape, tensors["up"].shape[1]
        if not rows == columns == rank:
            return columns == rank
        if self.kinds is None:  # only what the folder says of the block can tell
            graph = Path(self.where).parent / "graph.json"
            modules = _json(graph.read_text(encoding="utf-8"), str(graph)).get("modules", {}) if graph.is_file() else {}
            self.kinds = {name: of["arguments"].get("kind") for name, of in modules.items() if "arguments" in of}
        kind = self.kinds.get(layer.keys["down"].removesuffix(".down.weight"))
        return kind == "Embedding" if kind or layer.group in self.slots else None

    def tensor(self, key: str) -> Tensor:
        """The tensor of a key, checked."""
        value = self.state[key]
        if not isinstance(value, Tensor):
            raise ArtifactError(f"{self.where}: '{key}' is a {type(value).__name__}, not a tensor")
        if not value.is_floating_point():
            raise ArtifactError(f"{self.where}: '{key}' holds {value.dtype}; an adapter's weights are floating point")
        value, wide = value.detach(), torch.float64 if value.dtype == torch.float64 else torch.float32
        numbers = value if value.itemsize > 1 else value.float()
        # the sum tells in a seventh of the time, unless it is too large itself
        if not value.is_meta and not numbers.sum(dtype=wide).isfinite() and not numbers.isfinite().all():
            raise ArtifactError(f"{self.where}: '{key}' has numbers that are not finite (NaN or infinity)")
        return value

    def check(self, layer: _Layer, tensors: Mapping[str, Tensor]) -> None:
        """Raise ArtifactError unless the halves have one rank."""
        if "down" not in tensors:
            pairs = [(f"{p}_a", f"{p}_b") for p in ("hada_w1", "hada_w2", "lokr_w1", "lokr_w2") if f"{p}_a" in tensors]
            for a, b in pairs:
                core = tensors.get(b.replace("w", "t")[:-2])
                left = tensors[a].shape[-1] if core is None else tensors[a].shape[0]
                if tensors[a].dim() != 2 or tensors[b].dim() != 2 or left != tensors[b].shape[0]:
                    raise self.odd(layer, a, b, tensors)
            return
        down, up = tensors["down"], tensors["up"]
        pair = min(down.dim(), up.dim()) >= 2 and 0 < up.shape[1] == up.flatten(1).shape[1]
        if not pair or down.shape[0] % up.shape[1]:
            raise self.odd(layer, "down", "up", tensors)

    def odd(self, layer: _Layer, a: str, b: str, tensors: Mapping[str, Tensor]) -> ArtifactError:
        shapes = f"{list(tensors[a].shape)} and {list(tensors[b].shape)}"
        both = f"'{layer.keys[a]}' and '{layer.keys[b]}'"
        return ArtifactError(f"{self.where}: {both} do not go together: their shapes are {shapes}")

    def number(self, key: str) -> float:
        value = self.state[key]
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ArtifactError(f"{self.where}: '{key}' must be one finite number, not {value!r}")
        return float(value)

    def scale(self, layer: _Layer, tensors: Mapping[str, Tensor], rank: int, where: tuple[str, str], slots: bool) -> float:
        """What the product is multiplied by: the file's own word, alpha / rank, PEFT's configuration, or 1."""
        if "scale" in layer.keys:
            return 1.0 if slots else self.number(layer.keys["scale"])  # what lies in a slot is scaled already
        if "alpha" in layer.keys:
            if "lokr_w1" in tensors and "lokr_w2" in tensors:
                return 1.0  # LyCORIS: two full matrices are not scaled
            return (self.number(layer.keys["alpha"]) or rank) / rank
        part, path = where
        config = self.configs.get(part) or self.configs.get("")
        if not config:
            return 1.0
        names = [path, layer.name.removeprefix("base_model.model.")]
        alpha = _pattern(config.get("alpha_pattern"), names, config.get("lora_alpha", config.get("alpha")))
        r = _pattern(config.get("rank_pattern"), names, config.get("r"))
        rank = int(r) if "down" not in tensors and r is not None else rank
        if alpha is None:
            return 1.0
        return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _base(tensors: Mapping[str, Tensor]) -> str:
    if any(name.startswith("hada_") for name in tensors):
        return "loha"
    return "lokr" if any(name.startswith("lokr_") for name in tensors) else "lora"


def _needs(base: str) -> list[set[str]]:
    """The sets of tensors that an update is whole with."""
    if base == "loha":
        return [{"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}]
    if base == "lokr":
        return [
            {*(f"lokr_w1{end}" for end in first), *(f"lokr_w2{end}" for end in second)}
            for first in (("",), ("_a", "_b"))
            for second in (("",), ("_a", "_b"))
        ]
    return [{"down", "up"}]


def _rank(tensors: Mapping[str, Tensor]) -> int:
    """The rank that alpha is divided by."""
    if "up" in tensors:
        return tensors["up"].shape[1]
    for name in ("hada_w1_b", "lokr_w1_b", "lokr_w2_b"):
        if name in tensors:
            return tensors[name].shape[0]
    return min(tensors["lokr_w1"].shape)


def _cut(tensors: Mapping[str, Tensor], slot: int, slots: int, banked: bool) -> dict[str, Tensor] | None:
    """One slot of a block's, without what only pads its rank; None if it holds nothing.

    In `blocks.Lora` the slots follow each other in the inner channels, within each group; else they are the first dimension.
    """
    if banked:
        down, up = tensors["down"], tensors["up"]
        rank = up.shape[1] // slots
        down = down.reshape(-1, slots, rank, *down.shape[1:])[:, slot]  # (groups, rank, in, *kernel)
        up = up.reshape(up.shape[0], slots, rank, *up.shape[2:])[:, slot]
        used = down.transpose(0, 1).flatten(1).any(1) & up.transpose(0, 1).flatten(1).any(1)
        return {"down": down[:, used].flatten(0, 1), "up": up[:, used]} if used.any() else None
    made = {name: tensor[slot] for name, tensor in tensors.items()}
    if not all(tensor.any() for tensor in made.values()):
        return None
    if any("_t" in name for name in made):
        return made
    for a, b in (("up", "down"), *((f"{n}_a", f"{n}_b") for n in ("hada_w1", "hada_w2", "lokr_w1", "lokr_w2"))):
        if a in made:
            used = made[a].transpose(0, 1).flatten(1).any(1) & made[b].flatten(1).any(1)
            made[a], made[b] = made[a][:, used], made[b][used]
    return made


def _packed(about: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """The configurations that diffusers keeps in a file's metadata, by part of the pipeline."""
    text = about.get("lora_adapter_metadata")
    made: dict[str, dict[str, Any]] = {}
    for key, value in (_json(text, f"{where}: its lora_adapter_metadata") if isinstance(text, str) else {}).items():
        part, _, name = key.rpartition(".") if key.partition(".")[0] in PARTS else ("", "", key)
        made.setdefault(part, {})[name] = value
    return made


def _pattern(patterns: Any, names: Iterable[str], default: Any) -> Any:
    """The value of the first of PEFT's patterns that a layer's name matches."""
    for pattern, value in dict(patterns or {}).items():
        try:
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                return value
        except re.error as error:
            raise ArtifactError(f"adapter_config.json: '{pattern}' is no pattern: {error}") from None
    return default


def _old_name(layer: str) -> str:
    """`X.processor.to_q` as `X.to_q`: what diffusers' attention processors called their LoRAs is the layer they change."""
    owner, _, last = layer.removesuffix("_lora").rpartition(".")
    if owner.rpartition(".")[2] == "self_attn":  # a text encoder's
        last = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}.get(last, last)
    last = {"to_out": "to_out.0"}.get(last, last)
    return f"{owner.removesuffix('.processor')}.{last}" if owner else last
