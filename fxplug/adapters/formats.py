"""Formats of adapter files: what each calls the layers of a model and the tensors of an update, and PEFT's configuration.

A layer has its path, or the name that the first code bases gave it, several as one. PEFT and diffusers have `lora_A`, `lora_B`
and say alpha in a configuration; kohya's tools, ComfyUI and LyCORIS have `lora_down`, `lora_up` and `alpha` as a tensor; LoHa
and LoKr have LyCORIS' names everywhere.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..blocks.base import UpdateKind
from ..blocks.low_rank import choose_lokr_shapes
from .contents import ModelLayer
from .file_keys import INNER
from .layer_names import SWAPPED, map_first_names
from .tables import FORMATS, PARTS
from .updates import Entry, has_lokr_of_3_dims, join
from .wrapped import OUT_PROJ

CONFIGURED = ("peft", "diffusers")  # what says ranks and alphas in a configuration
OF_IA3 = ("Linear", "TransposedLinear", "Conv2d", "Conv3d")  # kinds of layers that PEFT's (IA)3 is for
SCALED = (".query_norm", ".key_norm")  # norms of Flux's own code, whose weight is called scale


# --- names of layers


def find_part(classes: Sequence[str]) -> str:
    """Return the pipeline component (unet, text_encoder or transformer) of a model, judged by the names of its classes."""
    name = next(iter(classes), "")
    if "UNet" in name:
        return "unet"
    return "text_encoder" if any(word in name for word in ("Text", "T5", "CLIP", "Llama", "Gemma")) else "transformer"


def start_of(as_: str, part: str) -> str:
    """Return a format's prefix for the layer names of a pipeline component."""
    row = FORMATS[as_]
    return str(row.get("parts", {}).get(part, row["start"])).replace("{part}", part)


def find_format(entry: Entry) -> str:
    """Return the format that the name of an update's layer belongs to; "" if several formats share it."""
    if entry.flat:
        return "" if ":" in entry.name else "lycoris" if entry.name.startswith(start_of("lycoris", "")) else "kohya"
    named = next((as_ for as_ in ("peft", "comfy") if entry.name.startswith(start_of(as_, "unet"))), "")
    return named or ("diffusers" if entry.part in PARTS else "")


def name_layers(
    entries: Sequence[Entry], as_: str, layers: Mapping[str, ModelLayer], part: str
) -> tuple[list[tuple[str, Entry]], dict[str, str]]:
    """Return each update with its layer's name in the format, and the ones without such a name, by path, with the reason."""
    start = start_of(as_, part)
    if as_ in ("peft", "diffusers"):
        return [(start + entry.options.get("key", entry.path), entry) for entry in entries], {}
    if as_ == "lycoris":
        return _flat([(entry.path, entry) for entry in entries], start)
    # kohya's tools have diffusers' names for the UNets of Stable Diffusion 1 and 2, and the first names for all later models
    early = part == "unet" and "add_embedding.linear_1" not in layers
    rows, left = ([(e.path, e) for e in entries], {}) if as_ == "kohya" and early else _first(entries, layers)
    if part.startswith("text_encoder"):  # of CLIP's, whose outer module newer versions of transformers have no more
        rows = [(f"text_model.{name}" if name.startswith("encoder.layers.") else name, entry) for name, entry in rows]
    if as_ == "comfy":  # which has a parameter that is not called weight by its whole name
        return [(f"{start}{name}{'.scale' if e.method and name.endswith(SCALED) else ''}", e) for name, e in rows], left
    made, same = _flat(rows, start)
    return made, left | same


def _flat(rows: Sequence[tuple[str, Entry]], start: str) -> tuple[list[tuple[str, Entry]], dict[str, str]]:
    """Names with underscores for dots; what two layers would both be called is left out."""
    made: dict[tuple[str, str, str], tuple[str, Entry]] = {}
    left = {}
    for name, entry in rows:
        key = start + name.replace(".", "_")
        _, first = made.setdefault((key, entry.param, entry.method), (key, entry))
        if first is not entry:
            left[entry.path] = f"has the same name as '{first.path}' when dots become underscores"
    return list(made.values()), left


def _first(entries: Sequence[Entry], layers: Mapping[str, ModelLayer]) -> tuple[list[tuple[str, Entry]], dict[str, str]]:
    """Updates under the first names of their layers; their paths where there are none."""
    known: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, paths in map_first_names(layers).items():
        for path in paths:
            known.setdefault(path.removesuffix(SWAPPED), (name, paths))
    groups: dict[Any, dict[str, Entry]] = {}  # a layer may have a change of its weight, and one of its bias
    for entry in entries:
        layer = known.get(entry.path, (entry.path, (entry.path,)))
        groups.setdefault((*layer, entry.param, entry.method), {})[entry.path] = entry
    made: list[tuple[str, Entry]] = []
    left: dict[str, str] = {}
    for (name, paths, *_), found in groups.items():
        own = {path.removesuffix(SWAPPED): path for path in paths}
        turned = {path: entry.swapped() if own[path].endswith(SWAPPED) else entry for path, entry in found.items()}
        if len(paths) == 1:
            made.append((name, turned[next(iter(own))]))
            continue
        odd = next((e for e in found.values() if e.kind != "lora"), None)
        if odd is not None:
            why = (
                f"is one of {len(paths)} layers that are one layer '{name}' in that format, and {odd.kind} of a part cannot be "
                "written for the whole"
            )
            left |= dict.fromkeys(found, why)
            continue
        widths = {path: layers[path].shape[0] for path in own}
        made.append((name, join(turned, widths)))
    return made, left


# --- tensors by key


def explain_refusal(entry: Entry, as_: str, layer: ModelLayer | None) -> str:
    """Why a format cannot hold an update; an empty text where it can."""
    if entry.method == "diff":
        return "" if _has_form(as_, entry) else f"has a whole change of its {entry.param}, which {as_} cannot represent"
    if entry.kind == "ia3" and layer is not None:
        if as_ != "peft":
            return f"is (IA)3, which {as_} cannot represent here: peft can"
        return "" if layer.kind in OF_IA3 else f"is (IA)3 of a layer that PEFT has none for: it has {', '.join(OF_IA3)}"
    if entry.method:
        if entry.method == "whole":
            return f"is a whole parameter, which {as_} cannot represent: peft and fxplug can"
        return f"is {entry.method}, which cannot be converted without its model: load the file, and save the adapter"
    if entry.param != "weight" and as_ == "peft" and "key" in entry.options:
        return ""
    if entry.param != "weight":
        what = f"is an update of {entry.param}, which is not the weight of a layer"
        return f"{what}, and fxplug writes no {as_} file of it: save the module"
    if layer is None:
        return "is not a layer with a weight"
    if not entry.fits(layer.shape) and not (layer.kind == "Embedding" and entry.fits(layer.shape[::-1])):
        return f"has an update of another shape than its weight, which is {list(layer.shape)}"
    if as_ == "fxplug":
        return ""
    if layer.kind == OUT_PROJ and as_ == "diffusers":
        return "is the out_proj of a MultiheadAttention, which reads its weight itself, so that diffusers' update has no effect"
    if layer.kind == "Embedding" and (as_ not in CONFIGURED or entry.kind != "lora"):
        return f"is an embedding with {entry.kind}, which {as_} cannot represent"
    if layer.groups > 1 and "down" in entry.tensors and as_ in CONFIGURED:
        return f"is a convolution in {layer.groups} groups, whose low-rank updates {as_} cannot represent"
    if as_ in CONFIGURED and has_lokr_of_3_dims(entry.tensors):
        return "is a LoKr of a Conv1d, whose factors PEFT combines in another order"
    return "" if _has_form(as_, entry) else f"has {entry.kind}, which {as_} cannot represent"


def _names(as_: str, kind: UpdateKind) -> Mapping[str, str] | None:
    """Return a format's names of an update's tensors if they differ from its own; None if the format does not have this
    kind."""
    return kind.state if as_ == "fxplug" else kind.formats.get(as_)


def _has_form(as_: str, entry: Entry) -> bool:
    """Return whether a format can represent everything in an update."""
    kind = entry.update_kind
    names = _names(as_, kind)
    by_input = not entry.kind.endswith("by input") or bool(FORMATS[as_].get("by_input"))
    return names is not None and by_input and entry.tensors.keys() <= {*kind.tensors, *names}


def get_alpha(entry: Entry) -> float:
    """Return the alpha (scale times rank) of an update, to the precision of a float32."""
    return float(f"{entry.scale * entry.rank:.7g}")


# a change of a parameter, and whether its layer is a normalisation
_CHANGES = {("weight", False): "diff", ("bias", False): "diff_b", ("weight", True): "w_norm", ("bias", True): "b_norm"}


def find_lone_biases(entries: Sequence[Entry], as_: str) -> dict[str, str]:
    """Return the bias changes that LyCORIS would ignore because no other update is beside them, by place, with the reason."""
    whole = {entry.path for entry in entries if entry.method == "diff" and entry.param == "weight"}
    changes = [e for e in entries if e.method == "diff" and e.param != "weight"]
    why = f"has a change of a bias without a whole change of the weight, which tools ignore in {as_} files; use comfy"
    left = {e.key(e.path): why for e in changes if as_ in ("kohya", "lycoris") and e.path not in whole}
    odd = "has a change of a parameter other than weight and bias, which no format can represent"
    other = {e.key(e.path): odd for e in changes if e.param != "bias"}
    return left | other


def join_biases(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with each bias change beside a LoRA merged into the LoRA, where PEFT scales it along."""
    own = {e.path: e for e in entries if e.kind == "lora" and e.scale}
    biases = {e.path: e for e in entries if e.method == "diff" and e.param == "bias" and e.path in own}
    made = []
    for entry in entries:
        if own.get(entry.path) is entry and entry.path in biases:
            bias = (biases[entry.path].tensors["delta"].float() / entry.scale).to(entry.tensors["up"].dtype)
            entry = replace(entry, kind="lora+bias", tensors={**entry.tensors, "bias": bias})
        if biases.get(entry.path) is not entry:
            made.append(entry)
    return made


def split_biases(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with each LoRA's own bias as a bias change of its layer, for formats that only have the latter."""
    own = {entry.path for entry in entries if entry.kind == "lora+bias"}
    biases = {e.path: e for e in entries if e.method == "diff" and e.param == "bias" and e.path in own}
    made = []
    for entry in entries:
        if entry.kind == "lora+bias":
            tensors = dict(entry.tensors)
            bias = tensors.pop("bias")
            delta = bias.float() * entry.scale
            if entry.path in biases:
                delta = delta + biases[entry.path].tensors["delta"].float().reshape(delta.shape)
            more: dict[str, Any] = {"kind": "delta", "method": "diff", "param": "bias", "scale": 1.0, "rank": 0}
            made.append(replace(entry, **more, tensors={"delta": delta.to(bias.dtype)}))
            entry = replace(entry, kind="lora", tensors=tensors)
        if biases.get(entry.path) is not entry:
            made.append(entry)
    return made


def make_tensors(as_: str, key: str, entry: Entry, layer: ModelLayer, biased: bool = False) -> dict[str, Tensor]:
    """Return an update's tensors under the keys of a format, below `key`; `biased` means that each layer of the file has a
    bias."""
    t = dict(entry.tensors)
    if entry.method == "diff":
        return {f"{key}.{_CHANGES[entry.param, len(layer.shape) < 2]}": t["delta"]}
    if entry.method == "gate":
        gate, by_output = t["gate"], entry.options["side"] == "output"
        linear = (-1, 1) if by_output else (1, -1)
        return {f"{key}.ia3_l": gate.reshape(linear if len(layer.shape) == 2 else (1, -1, *[1] * (len(layer.shape) - 2)))}
    kind, around = entry.update_kind, [1] * (len(layer.shape) - 2)
    keys = _names(as_, kind) or {}
    if as_ == "fxplug":  # the names that the blocks of a pass have, or where these say less LyCORIS'
        if entry.kind.endswith("by input"):
            return make_tensors("comfy", key, entry, layer)
        key = f"{entry.part or 'adapter'}.{key}.{kind.block}"
    if as_ in CONFIGURED or as_ == "fxplug":
        if layer.kind == "Embedding" and "down" in t:
            t["down"], t["up"] = (t["down"], t["up"]) if entry.embedding else (t["up"].T, t["down"].T)
            if as_ == "fxplug":
                t["down"] = t["down"].T
            else:
                keys = {"down": "lora_embedding_A", "up": "lora_embedding_B"}
        elif biased and "down" in t:
            t.setdefault("bias", torch.zeros(t["up"].shape[0], dtype=t["up"].dtype))
        if "magnitude" in t and around:
            t["magnitude"] = t["magnitude"].reshape(1, -1, *around)
        scale = {f"{key}.scale": torch.tensor(entry.scale, dtype=torch.float32)} if as_ == "fxplug" else {}
    else:
        if _is_full_lokr(entry) and entry.scale != 1:  # no alpha scales two full matrices: these tools pass over it
            t["lokr_w1"] = (t["lokr_w1"].double() * entry.scale).to(t["lokr_w1"].dtype)
        if "magnitude" in t:
            t["magnitude"] = t["magnitude"].reshape(*((1, -1) if entry.kind.endswith("by input") else (-1, 1)), *around)
        alpha = full_lokr_rank(entry) if _is_full_lokr(entry) else get_alpha(entry)
        own = torch.tensor(alpha, dtype=next(iter(t.values())).dtype)
        scale = {f"{key}.alpha": own if own.item() == alpha else torch.tensor(alpha, dtype=torch.float32)}
    return {**{f"{key}.{keys.get(name, name)}": value for name, value in t.items()}, **scale}


def _is_full_lokr(entry: Entry) -> bool:
    """Return whether an update is a LoKr of two full matrices, which have no rank of their own."""
    return {"lokr_w1", "lokr_w2"} <= entry.tensors.keys()


# --- PEFT's configuration


def make_config(rows: Sequence[tuple[str, Entry]], layers: Mapping[str, ModelLayer]) -> dict[str, Any]:
    """Return the `adapter_config.json` for the updates by path, all of one kind."""
    base = next(iter(rows))[1].kind.partition("+")[0].replace("dora", "lora")
    if base == "ia3":
        return _make_ia3_config(rows, layers)
    ranks, alphas = {}, {}
    rows = [row for row in rows if not row[1].options.get("key", "").endswith(INNER)]  # has the settings of what is around
    targets = sorted(entry.options["target"] for _, entry in rows if "target" in entry.options)
    for path, entry in rows:
        path = entry.options.get("target", path)
        whole = "lokr_w2" in entry.tensors
        ranks[path] = full_lokr_rank(entry) if whole else entry.rank
        alphas[path] = entry.scale * ranks[path] if whole else get_alpha(entry)
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    made: dict[str, Any] = {
        "peft_type": base.upper(),
        "r": rank,
        "lora_alpha" if base == "lora" else "alpha": alpha,
        "rank_pattern": {_exactly(path): n for path, n in ranks.items() if n != rank},
        "alpha_pattern": {_exactly(path): n for path, n in alphas.items() if n != alpha},
        "target_modules": _targets([path for path, entry in rows if "target" not in entry.options], layers),
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "modules_to_save": None,
    }
    if targets:
        made["target_parameters"] = targets
    if base == "lora":
        kinds = {entry.kind for _, entry in rows}
        made |= {"use_dora": "dora" in kinds, "use_rslora": False, "lora_bias": any("bias" in kind for kind in kinds)}
        turned = all(path in layers and layers[path].transposed for path, _ in rows)
        made |= {"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": turned}
    else:
        cores = any(name in entry.tensors for _, entry in rows for name in ("hada_t1", "lokr_t2"))
        made |= {"use_effective_conv2d": cores}
    if base == "lokr":
        made |= _lokr_options(rows, layers)[0]
    return made


def _make_ia3_config(rows: Sequence[tuple[str, Entry]], layers: Mapping[str, ModelLayer]) -> dict[str, Any]:
    """Return PEFT's configuration of gates, of which those of inputs are the feed-forward ones."""
    feeding = [path for path, entry in rows if entry.options["side"] == "input"]
    return {
        "peft_type": "IA3",
        "target_modules": _targets([path for path, _ in rows], layers),
        "feedforward_modules": feeding,
        "fan_in_fan_out": all(path in layers and layers[path].transposed for path, _ in rows),
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "modules_to_save": None,
    }


def find_unlike(rows: Sequence[tuple[str, Entry]], layers: Mapping[str, ModelLayer]) -> dict[str, str]:
    """Return the updates that cannot share one PEFT configuration with the others, by path, with the reason."""
    if not rows:
        return {}
    left: dict[str, str] = {}
    bases = Counter(entry.kind.partition("+")[0] for _, entry in rows)
    base = bases.most_common(1)[0][0]
    for path, entry in rows:
        if not entry.kind.startswith(base):
            left[path] = f"has {entry.kind} and the other layers {base}, and a PEFT file can have only one of them"
    if base == "lokr":
        _, others = _lokr_options([(path, entry) for path, entry in rows if path not in left], layers)
        why = "has a LoKr whose factors differ from those that PEFT would make with the settings of the other layers"
        left |= dict.fromkeys(others, why)
    if base == "loha":
        cores = any("hada_t1" in entry.tensors for _, entry in rows)
        for path, entry in rows:
            spatial = math.prod(layers[path].shape[2:]) > 1
            if cores and spatial and "hada_t1" not in entry.tensors and path not in left:
                left[path] = "has no core, and other convolutions have one, for which PEFT has a single setting"
    return left


def full_lokr_rank(entry: Entry) -> int:
    """Return a rank at which PEFT and LyCORIS decompose no factor of a LoKr."""
    return max(n for name, tensor in entry.tensors.items() if name.startswith("lokr_w") for n in tensor.shape)


def _lokr_options(rows: Sequence[tuple[str, Entry]], layers: Mapping[str, ModelLayer]) -> tuple[dict[str, Any], list[str]]:
    """Return the options with which PEFT makes the factors of most of these LoKrs (peft.tuners.lokr), and the paths of the
    others."""
    made = {path: {name: tuple(tensor.shape) for name, tensor in entry.tensors.items()} for path, entry in rows}
    both, cores = (any(name in shapes for shapes in made.values()) for name in ("lokr_w1_a", "lokr_t2"))

    def others(factor: int) -> list[str]:
        ranks = {path: full_lokr_rank(entry) if "lokr_w2" in made[path] else entry.rank for path, entry in rows}
        return [p for p in made if choose_lokr_shapes(layers[p].shape, ranks[p], factor, both, cores) != made[p]]

    sides = {(shapes.get("lokr_w1") or shapes["lokr_w1_a"])[0] for shapes in made.values()}
    factor = min((-1, *sides), key=lambda factor: len(others(factor)))
    return {"decompose_both": both, "decompose_factor": factor}, others(factor)


def _exactly(path: str) -> str:
    """PEFT's pattern for one layer, and for none whose path only ends so."""
    return f"^{re.escape(path)}"


def _targets(paths: Sequence[str], layers: Mapping[str, ModelLayer]) -> list[str] | str:
    """Return `target_modules`: the layers' paths, or a regular expression if a path is the suffix of another layer's.

    PEFT would match that layer as well. It is also an expression if one is a MultiheadAttention, which is not among the
    layers.
    """
    others = set(layers) - set(paths)
    endings = {".".join(parts[at:]) for path in others for parts in [path.split(".")] for at in range(1, len(parts))}
    if endings.isdisjoint(paths) and (not layers or layers.keys() >= {*paths}):
        return sorted(paths)
    return f"^(?:{'|'.join(re.escape(path) for path in sorted(paths))})$"
