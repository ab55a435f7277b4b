"""The tensors of an adapter file by key, and what PEFT's configuration says of them: one layout for each tool.

PEFT and diffusers have `lora_A`, `lora_B` and say alpha in a configuration; kohya's tools, ComfyUI and LyCORIS have
`lora_down`, `lora_up` and `alpha` as a tensor; LoHa and LoKr have LyCORIS' names everywhere.
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

from ..blocks.low_rank import lokr_shapes
from .held import Layer
from .tables import FORMATS
from .updates import Entry

CONFIGURED = ("peft", "diffusers")  # what says ranks and alphas in a configuration
OWN = {"lora": "Lora", "loha": "Loha", "lokr": "Lokr", "dora": "Dora"}


def refused(entry: Entry, as_: str, layer: Layer | None) -> str:
    """Why a format cannot hold an update; an empty text where it can."""
    if entry.method == "diff":
        known = entry.kind in FORMATS[as_]["kinds"]
        return "" if known else f"has a change of its {entry.param}, whole, for which {as_} has no form"
    if layer is None:
        return "is no layer with a weight"
    if not entry.fits(layer.shape) and not (layer.kind == "Embedding" and entry.fits(layer.shape[::-1])):
        return f"has an update of another parameter than its weight, which is {list(layer.shape)}"
    if as_ == "fxplug":
        return ""
    if layer.kind == "Embedding" and (as_ not in CONFIGURED or entry.kind != "lora"):
        return f"is an embedding, for whose {entry.kind} {as_} has no form"
    if layer.groups > 1 and "down" in entry.tensors:
        return f"is a convolution in {layer.groups} groups, for whose low-rank updates {as_} has no form"
    if entry.kind not in FORMATS[as_]["kinds"]:
        return f"has {entry.kind}, for which {as_} has no form"
    return ""


def alpha_of(entry: Entry) -> float:
    """The alpha of which an update's scale is the quotient by its rank, as it was written where rounding tells.

    Blocks have their scale in float32, files' readers in float64.
    """
    alpha, single = entry.scale * entry.rank, _single(entry.scale) == entry.scale
    for digits in (6, 9, 12, 15):
        near = float(f"{alpha:.{digits}g}")
        if (_single(near / entry.rank) if single else near / entry.rank) == entry.scale:
            return near
    return alpha


def _single(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def configured(key: str, entry: Entry, layer: Layer, biased: bool = False) -> dict[str, Tensor]:
    """A layer's tensors as PEFT and diffusers have them; `biased` says that each layer of the file has a bias."""
    t = dict(entry.tensors)
    if "down" not in t:
        return {f"{key}.{name}": value for name, value in t.items()}
    down, up = t.pop("down"), t.pop("up")
    if layer.kind == "Embedding":
        a, b = (down, up) if entry.embedding else (up.T, down.T)
        return {f"{key}.lora_embedding_A": a, f"{key}.lora_embedding_B": b}
    made = {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    if biased:
        made[f"{key}.lora_B.bias"] = t.pop("bias", torch.zeros(up.shape[0], dtype=up.dtype))
    if "magnitude" in t:
        shape = [1, -1, *[1] * (len(layer.shape) - 2)] if len(layer.shape) > 2 else [-1]
        made[f"{key}.lora_magnitude_vector"] = t.pop("magnitude").reshape(shape)
    return made


# a change of a parameter, and whether its layer is a normalisation
_CHANGES = {("weight", False): "diff", ("bias", False): "diff_b", ("weight", True): "w_norm", ("bias", True): "b_norm"}


def alone(entries: Sequence[Entry], as_: str) -> dict[str, str]:
    """The changes of biases that LyCORIS would not read, as it has none beside another update, by place, with the reason."""
    whole = {entry.path for entry in entries if entry.method == "diff" and entry.param == "weight"}
    changes = [e for e in entries if e.method == "diff" and e.param != "weight"]
    why = f"has a change of a bias without one of the whole weight, which the tools for {as_} files leave out; comfy has it"
    left = {e.key(e.path): why for e in changes if as_ in ("kohya", "lycoris") and e.path not in whole}
    odd = "has a change of another parameter than weight and bias, for which no format has a form"
    other = {e.key(e.path): odd for e in changes if e.param != "bias"}
    return left | other


def joined_biases(entries: Sequence[Entry]) -> list[Entry]:
    """A bias beside a LoRA as the LoRA's own, which PEFT scales with it."""
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


def with_alpha(key: str, entry: Entry, layer: Layer) -> dict[str, Tensor]:
    """A layer's tensors as kohya's tools, ComfyUI and LyCORIS have them."""
    made: dict[str, Tensor] = {}
    if entry.method == "diff":
        return {f"{key}.{_CHANGES[entry.param, len(layer.shape) < 2]}": entry.tensors["delta"]}
    tensors = dict(entry.tensors)
    if _is_whole(entry) and entry.scale != 1:  # no alpha scales two full matrices: these tools pass over it
        tensors["lokr_w1"] = (tensors["lokr_w1"].double() * entry.scale).to(tensors["lokr_w1"].dtype)
    for name, value in tensors.items():
        if name == "magnitude":
            around = [1] * (len(layer.shape) - 2)
            made[f"{key}.dora_scale"] = value.reshape(*((1, -1) if entry.kind.endswith("by input") else (-1, 1)), *around)
        else:
            made[f"{key}.lora_{name}.weight" if name in ("down", "up") else f"{key}.{name}"] = value
    return {**made, f"{key}.alpha": _alpha(entry)}


def _is_whole(entry: Entry) -> bool:
    """Whether an update is a LoKr of two full matrices, which have no rank of their own."""
    return {"lokr_w1", "lokr_w2"} <= entry.tensors.keys()


def _alpha(entry: Entry) -> Tensor:
    """In the dtype of the file where that holds it."""
    whole = _is_whole(entry)
    alpha = float(whole_rank(entry)) if whole else alpha_of(entry)
    made = torch.tensor(entry.scale * entry.rank, dtype=next(iter(entry.tensors.values())).dtype)
    if not whole and made.double().item() / entry.rank == entry.scale:
        return made
    made = made.new_tensor(alpha)
    return made if made.double().item() == alpha else torch.tensor(alpha, dtype=torch.float32)


def ours(entry: Entry, layer: Layer | None) -> dict[str, Tensor]:
    """A layer's tensors under the names that the blocks of a pass have, or LyCORIS', which say more."""
    if entry.method == "diff" or entry.kind.endswith("by input"):
        return with_alpha(entry.path, entry, layer or Layer("", entry.tensors["delta"].shape))
    kind = OWN[entry.kind.partition("+")[0]]
    t = dict(entry.tensors)
    embedding = layer is not None and layer.kind == "Embedding"
    if kind == "Dora" and "magnitude" in t and layer is not None and len(layer.shape) > 2:
        t["magnitude"] = t["magnitude"].reshape(1, -1, *[1] * (len(layer.shape) - 2))
    if kind == "Lora" and embedding:
        t["down"], t["up"] = (t["down"].T, t["up"]) if entry.embedding else (t["up"], t["down"].T)
    names = {"down": "down.weight", "up": "up.weight", "bias": "up.bias"} if kind == "Lora" else {}
    key = f"{entry.part or 'adapter'}.{entry.path}.{kind}"
    made = {f"{key}.{names.get(name, name)}": value for name, value in t.items()}
    return {**made, f"{key}.scale": torch.tensor(entry.scale, dtype=torch.float32)}


# --- PEFT's configuration


def config(rows: Sequence[tuple[str, Entry]], layers: Mapping[str, Layer], rslora: bool) -> dict[str, Any]:
    """What `adapter_config.json` says of the updates by path, all of one kind."""
    base = next(iter(rows))[1].kind.partition("+")[0].replace("dora", "lora")
    ranks, alphas = {}, {}
    for path, entry in rows:
        whole = "lokr_w2" in entry.tensors
        ranks[path] = whole_rank(entry) if whole else entry.rank
        alphas[path] = entry.scale * ranks[path] if whole else alpha_of(entry)
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    rslora = rslora and base == "lora" and len({*ranks.values()}) == len({*alphas.values()}) == 1  # PEFT takes no patterns then
    if rslora:
        alpha = float(f"{alpha / math.sqrt(rank):.9g}")
        alphas = {}
    made: dict[str, Any] = {
        "peft_type": base.upper(),
        "r": rank,
        "lora_alpha" if base == "lora" else "alpha": alpha,
        "rank_pattern": {_exactly(path): n for path, n in ranks.items() if n != rank},
        "alpha_pattern": {_exactly(path): n for path, n in alphas.items() if n != alpha},
        "target_modules": _targets([path for path, _ in rows], layers),
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "modules_to_save": None,
    }
    if base == "lora":
        kinds = {entry.kind for _, entry in rows}
        made |= {"use_dora": "dora" in kinds, "use_rslora": rslora, "lora_bias": any("bias" in kind for kind in kinds)}
        turned = all(path in layers and layers[path].transposed for path, _ in rows)
        made |= {"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": turned}
    else:
        cores = any(name in entry.tensors for _, entry in rows for name in ("hada_t1", "lokr_t2"))
        made |= {"use_effective_conv2d": cores}
    if base == "lokr":
        made |= {"decompose_both": any("lokr_w1_a" in e.tensors for _, e in rows), "decompose_factor": _factor(rows, layers)}
    return made


def unlike(rows: Sequence[tuple[str, Entry]], layers: Mapping[str, Layer]) -> dict[str, str]:
    """What of these updates one configuration of PEFT's cannot say with the others, by path, with the reason."""
    if not rows:
        return {}
    left: dict[str, str] = {}
    bases = Counter(entry.kind.partition("+")[0] for _, entry in rows)
    base = bases.most_common(1)[0][0]
    for path, entry in rows:
        if not entry.kind.startswith(base):
            left[path] = f"has {entry.kind}, and the other layers {base}, of which PEFT has one in a file"
    if base == "lokr":
        kept = [(path, entry) for path, entry in rows if path not in left]
        both = any("lokr_w1_a" in entry.tensors for _, entry in kept)
        cores = any("lokr_t2" in entry.tensors for _, entry in kept)
        factor = _factor(kept, layers)
        for path, entry in kept:
            if _lokr_shapes(entry, layers[path], factor, both, cores) != {n: tuple(t.shape) for n, t in entry.tensors.items()}:
                left[path] = "has a LoKr whose factors are others than PEFT would make with what it has for the other layers"
    if base == "loha":
        cores = any("hada_t1" in entry.tensors for _, entry in rows)
        for path, entry in rows:
            spatial = math.prod(layers[path].shape[2:]) > 1
            if cores and spatial and "hada_t1" not in entry.tensors and path not in left:
                left[path] = "has no core, and other convolutions have one, which PEFT says for all at once"
    return left


def whole_rank(entry: Entry) -> int:
    """A rank at which PEFT and LyCORIS decompose no factor of a LoKr."""
    return max(n for name, tensor in entry.tensors.items() if name.startswith("lokr_w") for n in tensor.shape)


def _factor(rows: Sequence[tuple[str, Entry]], layers: Mapping[str, Layer]) -> int:
    """The factor by which PEFT splits widths as most of these updates do."""
    sides = {(entry.tensors.get("lokr_w1", entry.tensors.get("lokr_w1_a"))).shape[0] for _, entry in rows}  # type: ignore[union-attr]
    both = any("lokr_w1_a" in e.tensors for _, e in rows)
    cores = any("lokr_t2" in e.tensors for _, e in rows)

    def agreeing(factor: int) -> int:
        made = [(_lokr_shapes(e, layers[path], factor, both, cores), e) for path, e in rows]
        return sum(shapes == {n: tuple(t.shape) for n, t in e.tensors.items()} for shapes, e in made)

    return max((-1, *sides), key=agreeing)


def _lokr_shapes(entry: Entry, layer: Layer, factor: int, both: bool, cores: bool) -> dict[str, tuple[int, ...]]:
    """The factors that PEFT makes for a layer, by its rule (peft.tuners.lokr)."""
    rank = whole_rank(entry) if "lokr_w2" in entry.tensors else entry.rank
    return lokr_shapes(layer.shape, rank, factor, both, cores)


def _exactly(path: str) -> str:
    """PEFT's pattern for one layer, and for none whose path only ends so."""
    return f"^{re.escape(path)}"


def _targets(paths: Sequence[str], layers: Mapping[str, Layer]) -> list[str] | str:
    """The layers' paths; as one expression where a path is the end of another layer's, which PEFT would take as well."""
    others = set(layers) - set(paths)
    endings = {".".join(parts[at:]) for path in others for parts in [path.split(".")] for at in range(1, len(parts))}
    if endings.isdisjoint(paths):
        return sorted(paths)
    return f"^(?:{'|'.join(re.escape(path) for path in sorted(paths))})$"
