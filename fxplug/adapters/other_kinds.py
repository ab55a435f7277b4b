"""What the tensors of a layer are in files of methods that are no low-rank product, as rows of `methods.METHODS`.

What PEFT's configuration must say for them, and which of its methods have no home here, and why, stands in `peft_config`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ArtifactError, shown
from .peft_config import METHODS

Tensors = Mapping[str, Tensor]
# changes of a parameter, and what is read in its place
WHOLE = {"diff": "weight", "w_norm": "weight", "diff_b": "bias", "b_norm": "bias", "beft_bias": "bias"}
SET = {"set_weight": "weight", "whole_weight": "weight", "whole_bias": "bias"}
TERMS = 64  # the most of a series: later ones are nothing where it has a sum at all
INTEGERS = (
    "shira_indices", "on_input", "reshape_weight", "scaled_oft", "vblora_logits_A_topk_indices", "vblora_logits_B_topk_indices",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What one parameter of a layer gets; see `updates.Entry`."""

    kind: str
    method: str
    tensors: Tensors
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    rank: int = 0
    param: str = "weight"
    optional: bool = False  # only where the layer has that parameter


@dataclass(frozen=True)
class Said:
    """What a file says beside the tensors of a layer: `where` is the file, `layer` its layer.

    `onetrainer` says that OneTrainer wrote it, whose OFT is PEFT's with choices of its own.
    """

    where: str
    layer: str
    config: Mapping[str, Any] | None
    alpha: float | None
    shared: Tensors
    onetrainer: bool = False

    def get(self, kind: str, key: str, kinds: type | tuple[type, ...]) -> Any:
        """A value of PEFT's configuration of a method. Raises ArtifactError without one, and for a value of another type."""
        if self.config is None:
            raise self.error(f"needs PEFT's configuration, which says its {key}: give config=, or the folder with it")
        value = self.config.get(key, METHODS[kind][key])
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.error(f"has a configuration with {key}: {shown(value)}, which cannot be")
        return value

    def error(self, finding: str) -> ArtifactError:
        """What is said of the layer."""
        return ArtifactError(f"{self.where}: '{self.layer}' {finding}")


def parameters_of(said: Said, tensors: dict[str, Tensor]) -> list[Row]:
    """The whole changes among a layer's tensors, which are taken out. Raises ArtifactError for one of nothing."""
    rows = []
    for role in tensors.keys() & (WHOLE.keys() | SET.keys()):
        if not tensors[role].numel() or not 1 <= tensors[role].dim() <= 5:
            raise said.error(f"has a {role} of {list(tensors[role].shape)}, which is no parameter's")
    for role in [role for role in tensors if role in WHOLE]:
        value = tensors.pop(role)
        rows.append(Row("delta", "diff", {"delta": value.flatten() if role == "beft_bias" else value}, param=WHOLE[role]))
    for role in [role for role in tensors if role in SET]:
        rows.append(Row("delta", "whole", {"whole": tensors.pop(role)}, param=SET[role]))
    return rows


def rows_of(tensors: Tensors, said: Said) -> list[Row] | None:
    """The rows of a layer with these tensors; None where they are no method's here. Raises ArtifactError."""
    for mark, (needed, more, make) in _MAKERS.items():
        if mark not in tensors:
            continue
        if lacks := sorted(set(needed) - tensors.keys()):
            raise said.error(f"is half an update: it has {mark} and no {', '.join(lacks)}")
        if extra := sorted(tensors.keys() - {mark, *needed, *more}):
            raise said.error(f"is whole without {', '.join(extra)}, which cannot be applied as well")
        for key, tensor in tensors.items():
            low, high = _DIMS.get(key, (1, 5))
            if not low <= tensor.dim() <= high or (not tensor.numel() and key not in INTEGERS):
                raise said.error(f"has a {key} of {list(tensor.shape)}, which is no {key}'s")
        return make(tensors, said)
    return None


_DIMS = {
    "oft_blocks": (3, 4), "oft_R": (2, 2), "boft_R": (4, 4), "ia3_l": (2, 4), "hra_u": (2, 2), "miss_block": (2, 3),
    "c3a_kernel": (3, 3), "shira_indices": (2, 2), "trainable_tokens_delta": (2, 2), "hira_A": (2, 2), "hira_B": (2, 2),
    "delora_A": (2, 2), "delora_B": (2, 2), "gralora_A": (3, 3), "gralora_B": (3, 3), "vera_lambda_b": (1, 1),
    "vera_lambda_d": (1, 1), "randlora_lambda": (2, 2), "randlora_gamma": (2, 2), "a1": (2, 5), "a2": (2, 5), "b1": (2, 5),
    "b2": (2, 5), "bm": (3, 5), "vblora_logits_A": (3, 3), "vblora_logits_B": (3, 3), "fourierft_spectrum": (1, 1),
    "down": (2, 2), "up": (2, 2), "on_input": (0, 1), "scaled_oft": (0, 1), "lora_E": (2, 2), "reshape_weight": (1, 1),
}  # fmt: skip


# --- LyCORIS


def _lycoris_oft(t: Tensors, said: Said) -> list[Row]:
    blocks = t["oft_blocks"]
    if blocks.shape[-1] != blocks.shape[-2] or (blocks.dim() == 4 and blocks.shape[-1] % 2):
        raise said.error(f"has oft_blocks of {list(blocks.shape)}, which are no square blocks")
    options = {"constraint": said.alpha or 0.0}
    if "rescale" in t and t["rescale"].numel() != blocks.shape[-3] * blocks.shape[-1]:
        raise said.error(f"has {t['rescale'].numel()} factors in rescale, and {blocks.shape[-3] * blocks.shape[-1]} outputs")
    return [Row("delta", "diag-oft" if blocks.dim() == 3 else "butterfly oft", dict(t), options)]


def _glora(t: Tensors, said: Said) -> list[Row]:
    rank = len(t["a2"])
    one = {name: tensor.shape[:2] for name, tensor in t.items()}
    if "bm" in t and one["bm"] != (rank, rank) or not rank == one["a1"][1] == one["b1"][1] == one["b2"][0]:
        raise said.error(f"has a1, a2, b1 and b2 that do not go together: {', '.join(str(list(s)) for s in one.values())}")
    return [Row("delta", "glora", dict(t), {"scale": (said.alpha or rank) / rank}, rank=rank)]


def _lycoris_ia3(t: Tensors, said: Said) -> list[Row]:
    side = "input" if bool(t["on_input"].flatten()[:1].any()) else "output"
    return [Row("delta", "gate", {"gate": t["weight"].flatten().float() + 1}, {"side": side})]


# --- PEFT: what is a low-rank product after all


def _adalora(t: Tensors, said: Said) -> list[Row]:
    down, up, factors = t["down"], t["up"], t["lora_E"]
    if not len(down) == up.shape[1] == len(factors) == factors.numel():
        raise said.error("has lora_A, lora_B and lora_E that do not go together")
    alpha = said.get("ADALORA", "lora_alpha", (int, float))
    rank = len(down)
    # all in one factor, so that the scale says the rest
    return [Row("lora", "", {"down": down * factors.to(down.dtype), "up": up}, scale=alpha / (rank + 1e-5), rank=rank)]


def _vera(t: Tensors, said: Said) -> list[Row]:
    rank = len(t["vera_lambda_d"])
    own = {"lambda_b": t["vera_lambda_b"], "lambda_d": t["vera_lambda_d"]}
    if {"vera_A", "vera_B"} <= said.shared.keys():
        a, b = said.shared["vera_A"], said.shared["vera_B"]
        if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank or len(b) < len(own["lambda_b"]):
            raise said.error(f"has vera_lambda_d of {rank}, and the file projections of {list(a.shape)} and {list(b.shape)}")
        return [Row("lora", "vera", {**own, "A": a, "B": b}, rank=rank)]
    return [Row("lora", "vera", own, {"key": said.get("VERA", "projection_prng_key", int)}, rank=rank)]


def _vblora(t: Tensors, said: Said) -> list[Row]:
    if "vblora_vector_bank" not in said.shared:
        raise said.error("needs vblora_vector_bank, which the file has not")
    bank, topk = said.shared["vblora_vector_bank"].float(), said.get("VBLORA", "topk", int)

    def made(half: str) -> Tensor:
        if {f"{half}_topk_indices", f"{half}_topk_weights"} <= t.keys():
            at, weights = t[f"{half}_topk_indices"].long(), t[f"{half}_topk_weights"].float()
            weights = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], -1)
        elif half in t:
            logits, at = t[half].float().topk(min(max(topk, 1), t[half].shape[-1]), dim=-1)
            weights = torch.softmax(logits, -1)
        else:
            raise said.error(f"is half an update: it has no {half}")
        good = bank.dim() == 2 and at.shape == weights.shape and at.dim() == 3 and at.numel() > 0
        if not good or (not at.is_meta and (int(at.max()) >= len(bank) or int(at.min()) < 0)):
            raise said.error(f"has {half} that do not go with the bank of {len(bank)} vectors")
        return (weights.unsqueeze(-1) * bank[at]).sum(-2)

    a, b = made("vblora_logits_A"), made("vblora_logits_B")
    down, up = a.flatten(1), b.transpose(1, 2).flatten(0, 1)
    if up.shape[1] != len(down):
        raise said.error(f"has logits for ranks of {len(down)} and {up.shape[1]}")
    return [Row("lora", "", {"down": down, "up": up}, rank=len(down))]


def _miss(t: Tensors, said: Said) -> list[Row]:
    block = t["block"] if "block" in t else t.get("miss_block", t.get("bone_block"))
    assert block is not None
    if block.dim() == 3:
        if block.shape[1] != block.shape[2]:
            raise said.error(f"has a block of {list(block.shape)}, which is no square's")
        return [Row("delta", "bat", {"block": block}, rank=block.shape[2])]
    mini = said.config is not None and said.config.get("init_weights") == "mini"
    return [Row("lora", "miss", {"block": block}, {"mini": mini}, rank=len(block))]


# --- PEFT: the others


def _oft(t: Tensors, said: Said) -> list[Row]:
    rotation = t["oft_R"]
    size = (1 + math.isqrt(1 + 8 * rotation.shape[1])) // 2
    if size * (size - 1) // 2 != rotation.shape[1]:
        raise said.error(f"has an oft_R of {list(rotation.shape)}, which is above no square's diagonal")
    if said.onetrainer:  # OneTrainer's modules/module/LoRAModule.py: always five terms, and no configuration in the file
        scaled = "scaled_oft" in t and bool(t["scaled_oft"].any())
        rotation = rotation / (2 * math.sqrt(size - 1)) if scaled else rotation
        own = {"size": size, "terms": 5, "share": len(rotation) == 1, "kernel_forwards": True}
        return [Row("oft", "oft", {"rotation": rotation}, own, rank=len(rotation))]
    share = said.get("OFT", "block_share", bool)
    if share and len(rotation) != 1:
        raise said.error(f"has an oft_R of {len(rotation)} blocks, and a configuration with block_share, which is one for all")
    series = said.get("OFT", "use_cayley_neumann", bool)
    version = re.match(r"(\d+)\.(\d+)", str((said.config or {}).get("peft_version")))
    if series and "use_cayley_neumann" in (said.config or {}) and (not version or (int(version[1]), int(version[2])) < (0, 18)):
        raise said.error(
            "has a configuration with use_cayley_neumann of PEFT before 0.18, whose series was another and is "
            "read by no later one: merge it with that version (merge_and_unload) and take the difference with fxplug.extract"
        )
    terms = said.get("OFT", "num_cayley_neumann_terms", int) if series else 0
    if terms and not 3 <= terms <= TERMS:
        raise said.error(f"has a configuration with num_cayley_neumann_terms: {terms}; 3 to {TERMS} are read")
    if said.get("OFT", "coft", bool):  # as PEFT bounds them when it reads them
        most = said.get("OFT", "eps", (int, float)) / math.sqrt(len(rotation))
        norms = rotation.float().norm(dim=1, keepdim=True) * math.sqrt(2)
        rotation = torch.where(norms <= most, rotation, (rotation * (most / norms)).to(rotation.dtype))
    options = {"size": size, "terms": max(terms, 4) if terms else 0, "share": share}
    return [Row("oft", "oft", {"rotation": rotation}, options, rank=len(rotation))]


def _boft(t: Tensors, said: Said) -> list[Row]:
    rotation, magnitude = t["boft_R"], t["boft_s"]
    levels, count, size, other = rotation.shape
    if size != other or (levels > 1 and (size % 2 or count % 2 ** (levels - 1))):
        raise said.error(f"has a boft_R of {list(rotation.shape)}, which is no butterflies of squares")
    return [Row("boft", "boft", {"rotation": rotation, "magnitude": magnitude.reshape(-1, 1)}, rank=count)]


def _ia3(t: Tensors, said: Said) -> list[Row]:
    gate = t["ia3_l"]
    if gate.numel() != max(gate.shape):
        raise said.error(f"has an ia3_l of {list(gate.shape)}, which is no gate for each of its channels")
    if gate.dim() == 2:
        side = "output" if gate.shape[1] == 1 and gate.shape[0] > 1 else "input"
    else:  # a convolution's are alike
        feeding = said.get("IA3", "feedforward_modules", (list, str, type(None))) or []
        side = "input" if _feeds(said.layer, feeding) else "output"
    own = {"gate": gate.flatten()}
    rows = [Row("ia3", "gate", own, {"side": side})]
    return [*rows, Row("ia3", "gate", own, {"side": side}, param="bias", optional=True)] if side == "output" else rows


def _feeds(name: str, targets: Sequence[str] | str) -> bool:
    if isinstance(targets, str):
        raise ArtifactError(f"feedforward_modules of the configuration is an expression, {shown(targets)}: give the names")
    return any(isinstance(one, str) and (name == one or name.endswith(f".{one}")) for one in targets)


def _hra(t: Tensors, said: Said) -> list[Row]:
    return [Row("delta", "hra", {"u": t["hra_u"]}, {"gs": said.get("HRA", "apply_GS", bool)}, rank=t["hra_u"].shape[1])]


def _c3a(t: Tensors, said: Said) -> list[Row]:
    return [Row("delta", "c3a", {"kernel": t["c3a_kernel"]})]


def _fourier(t: Tensors, said: Said) -> list[Row]:
    options = {"seed": said.get("FOURIERFT", "random_loc_seed", int), "scale": said.get("FOURIERFT", "scaling", (int, float))}
    return [Row("delta", "fourierft", {"spectrum": t["fourierft_spectrum"]}, options)]


def _shira(t: Tensors, said: Said) -> list[Row]:
    at, values = t["shira_indices"], t["shira_weight"].flatten()
    if at.shape != (2, len(values)) or (not at.is_meta and int(at.min()) < 0):
        raise said.error(f"has {len(values)} numbers, and shira_indices of {list(at.shape)}")
    return [Row("delta", "shira", {"values": values, "at": at}, {"scale": 1.0})]


def _randlora(t: Tensors, said: Said) -> list[Row]:
    bases = {name: t.get(f"randlora_{name}", said.shared.get(f"randlora_{name}")) for name in "AB"}
    if any(base is None for base in bases.values()):
        raise said.error("needs randlora_A and randlora_B, which PEFT draws anew in 16 bits: save it with save_projection=True")
    lam, gamma = t["randlora_lambda"], t["randlora_gamma"]
    a, b = bases["A"], bases["B"]
    assert a is not None and b is not None
    good = a.dim() == b.dim() == 3 and a.shape[1] == 1 and len(a) == len(lam) == b.shape[2]
    if not good or lam.shape[1] != len(gamma) or len(gamma) > b.shape[1]:
        raise said.error("has randlora_lambda and randlora_gamma that do not go with the file's projections")
    options = {"scale": said.get("RANDLORA", "randlora_alpha", (int, float)) / len(lam)}
    return [Row("delta", "randlora", {"lambda": lam, "gamma": gamma, "A": a, "B": b}, options, rank=len(lam))]


def _hira(t: Tensors, said: Said) -> list[Row]:
    if len(t["hira_A"]) != t["hira_B"].shape[1]:
        raise said.error("has hira_A and hira_B of different ranks")
    return [Row("delta", "hira", {"A": t["hira_A"], "B": t["hira_B"]}, rank=len(t["hira_A"]))]


def _road(t: Tensors, said: Said) -> list[Row]:
    options = {"variant": said.get("ROAD", "variant", str), "group": said.get("ROAD", "group_size", int)}
    if options["variant"] not in ("road_1", "road_2", "road_4"):
        raise said.error(f"has a configuration with variant: {shown(options['variant'])}; known are road_1, road_2 and road_4")
    if t["road_theta"].shape != t["road_alpha"].shape or options["group"] < 2 or options["group"] % 2:
        raise said.error("has road_theta and road_alpha that do not go together with its group_size")
    own = {"theta": t["road_theta"].flatten(), "alpha": t["road_alpha"].flatten()}
    return [Row("delta", "road", own, options), Row("delta", "road", own, options, param="bias", optional=True)]


def _delora(t: Tensors, said: Said) -> list[Row]:
    own = {name.removeprefix("delora_"): tensor for name, tensor in t.items()}
    own |= {name: own[name].flatten() for name in ("lambda", "w_norm")}
    if len(own["A"]) != own["B"].shape[1] or own["w_norm"].numel() != own["A"].shape[1] or own["lambda"].numel() != 1:
        raise said.error("has delora_A, delora_B, delora_lambda and delora_w_norm that do not go together")
    return [Row("delta", "delora", own, rank=len(own["A"]))]


def _gralora(t: Tensors, said: Said) -> list[Row]:
    own = {name.removeprefix("gralora_"): tensor for name, tensor in t.items()}
    rank = own["A"].shape[2]
    k, hybrid = len(own["A"]), own.keys() & {"A_general", "B_general"}
    if (k, rank) != tuple(own["B"].shape[:2]) or rank % k or len(hybrid) == 1:
        raise said.error("has gralora_A and gralora_B that do not go together")
    if hybrid:
        a, b, (_, inner, _), (_, _, out) = own["A_general"], own["B_general"], own["A"].shape, own["B"].shape
        if a.dim() != 2 or b.dim() != 2 or (a.shape[1], len(b)) != (k * inner, k * out) or len(a) != b.shape[1]:
            raise said.error("has gralora_A_general and gralora_B_general that do not go together")
    options = {"scale": said.get("GRALORA", "alpha", (int, float)) / (rank + len(own.get("A_general", ())))}
    return [Row("delta", "gralora", own, options, rank=rank)]


def _tokens(t: Tensors, said: Said) -> list[Row]:
    config = said.config or {}
    found = config.get("trainable_token_indices") or config.get("token_indices")
    if isinstance(found, dict):
        found = next((rows for name, rows in found.items() if _feeds(said.layer, [name])), None)
    rows = t["trainable_tokens_delta"]
    good = isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)
    if not good or not len({*found}) == len(found) == len(rows):  # type: ignore[misc, arg-type]
        raise said.error(f"has {len(rows)} trained tokens, and no configuration says trainable_token_indices for so many")
    return [Row("delta", "tokens", {"rows": rows}, {"rows": tuple(found or ())})]


_LOGITS = [f"vblora_logits_{half}{end}" for half in "AB" for end in ("", "_topk_indices", "_topk_weights")]
# by a tensor that only this method has: what it needs, what it may have, what it makes of them
_MAKERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Tensors, Said], list[Row]]]] = {
    "oft_blocks": ((), ("rescale",), _lycoris_oft),
    "a1": (("a2", "b1", "b2"), ("bm",), _glora),
    "on_input": (("weight",), (), _lycoris_ia3),
    "lora_E": (("down", "up"), ("ranknum",), _adalora),
    "vera_lambda_b": (("vera_lambda_d",), (), _vera),
    "vblora_logits_A": ((), tuple(_LOGITS), _vblora),
    "vblora_logits_A_topk_indices": ((), tuple(_LOGITS), _vblora),
    "miss_block": ((), (), _miss),
    "bone_block": ((), (), _miss),
    "oft_R": ((), ("scaled_oft",), _oft),
    "boft_R": (("boft_s",), (), _boft),
    "ia3_l": ((), (), _ia3),
    "hra_u": ((), (), _hra),
    "c3a_kernel": ((), (), _c3a),
    "fourierft_spectrum": ((), (), _fourier),
    "shira_weight": (("shira_indices",), (), _shira),
    "randlora_lambda": (("randlora_gamma",), ("randlora_A", "randlora_B"), _randlora),
    "hira_A": (("hira_B",), (), _hira),
    "road_theta": (("road_alpha",), (), _road),
    "delora_A": (("delora_B", "delora_lambda", "delora_w_norm"), (), _delora),
    "gralora_A": (("gralora_B",), ("gralora_A_general", "gralora_B_general"), _gralora),
    "trainable_tokens_delta": ((), (), _tokens),
}
