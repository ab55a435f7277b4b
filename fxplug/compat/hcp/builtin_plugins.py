"""What comes with HCP-Diffusion, as fxplug's own passes: its ControlNet, its LoRA and LoHa."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...core.errors import SpecError, below, did_you_mean
from ...core.spec.yaml_source import shown
from .hosts import OPTIONS, Host, common_of, number, patterns, take_key
from .layer_patterns import read_layers

LORA = re.compile(
    r"hcpdiff\.models(\.lora_base|\.lora_layers|\.lora_base_patch|\.lora_layers_patch)?\.(LoraBlock|LoraLayer|LohaLayer|DAPPLayer)"
    r"(\.wrap_model)?"
)
CONTROLNET = ("hcpdiff.models.controlnet.ControlNetPlugin", "hcpdiff.models.ControlNetPlugin")
HALVES = {"p": "second", "n": "first"}  # DreamArtist++ (arXiv 2211.11337): the negative prompt's samples come first in a batch
MASKS = {(0, 0.5): "n", (0.5, 1): "p", (0, 1): None}
SORTS = ("lora", "loha", "dapp", *HALVES)


def built_in(target: str, common: dict[str, Any], given: dict[str, Any], host: Host, notes: list[str]) -> dict[str, Any]:
    """The pass that does the same as a plugin that comes with HCP-Diffusion. Raises SpecError where there is none."""
    path = target.removesuffix(".wrap_model")
    kind = path.rpartition(".")[2]
    if LORA.fullmatch(path):
        dropout = 0.0 if path != target else 0.1
        sort = {"LohaLayer": "loha", "DAPPLayer": "dapp"}.get(kind, "lora")
        return _low_rank(sort, common, given, host, notes, dropout)
    if target in CONTROLNET:
        return _controlnet(common, given, host, notes)
    if kind == "EmbeddingPTHook":
        raise SpecError(
            f"'{target}' cannot be converted, because it needs the token ids of a tokenizer: make the pass in Python with "
            "fxplug.compat.hcp.words.word_vectors",
            path=("_target_",),
        )
    raise SpecError(
        f"'{target}' is part of HCP-Diffusion, and fxplug has no pass for it: copy its class, with the base classes of "
        "fxplug.compat.hcp, and use it like any other plugin",
        path=("_target_",),
    )


STOCK = {
    # until 0.2 it ran before the UNet; later before conv_in, to be within autocast: the same values
    "from_layers": (["pre_hook:", "pre_hook:conv_in"], ["pre_hook:"]),
    "to_layers": ([*(f"down_blocks.{i}" for i in range(4)), "mid_block", "pre_hook:up_blocks.3.resnets.2"],),
}


def _controlnet(common: dict[str, Any], given: dict[str, Any], host: Host, notes: list[str]) -> dict[str, Any]:
    """Its hooks add to the skips and the middle what diffusers' ControlNet adds there (arXiv 2302.05543)."""
    for key, stock in STOCK.items():
        layers = read_layers(take_key(given, key), key)
        if ["pre_hook:" * layer.pre_hook + layer.pattern for layer in layers] not in stock:
            raise SpecError(f"the ControlNet of HCP-Diffusion is supported with {stock[0]} only", path=(key,))
    channels = given.pop("cond_block_channels", [3, 16, 32, 96, 256, 320])
    for key in ("layers_per_block", "block_out_channels"):
        if given.pop(key, None) is not None:
            notes.append(f"{common['name']}: {key} is ignored, because the ControlNet is built like the UNet")
    for key in given:
        known = ["cond_block_channels", "layers_per_block", "block_out_channels", *OPTIONS]
        raise SpecError(f"unknown key '{key}'{did_you_mean(key, known)}", key=key)
    options = {"conditioning_channels": channels[0], "conditioning_embedding_out_channels": list(channels[1:-1])}
    return {"controlnet": {**common, "channels": channels[0], "options": options}}


# --- lora_unet and lora_text_encoder


def lora_passes(name: str, entry: Any, host: Host, notes: list[str]) -> dict[str, Any]:
    """The pass of one entry of `lora_unet`. Raises SpecError."""
    if not isinstance(entry, Mapping):
        raise SpecError(f"must be a mapping with 'layers', not {shown(entry)}")
    given = {key: value for key, value in entry.items() if key not in OPTIONS}
    sort = given.pop("type", "lora")
    if sort not in SORTS:
        raise SpecError(f"no pass for the type {shown(sort)}{did_you_mean(sort, SORTS)}", path=("type",))
    return _low_rank(sort, common_of(name, entry, notes), given, host, notes, 0.0)


def _low_rank(
    sort: str, common: dict[str, Any], given: dict[str, Any], host: Host, notes: list[str], dropout: float
) -> dict[str, Any]:
    if "branch" in given and sort != "dapp":
        notes.append(
            f"{common['name']}: branch is read as in HCP-Diffusion 0.7 and earlier; from 0.9 on only type: dapp has it"
        )
    half = _half(sort, given)
    layers = read_layers(take_key(given, "layers"), "layers")
    if any(layer.pre_hook or layer.kind for layer in layers):
        raise SpecError("only the prefix re: is allowed here", path=("layers",))
    given.pop("inplace", None)  # where a sum is stored, which a graph decides itself
    if given.pop("svd_init", False):
        raise SpecError("'svd_init' is not supported by fxplug's low-rank update", path=("svd_init",))
    options = {"rank": _rank(given.pop("rank", 1)), "alpha": number(given.pop("alpha", 1.0), ("alpha",))}
    if not given.pop("alpha_auto_scale", True):
        options["alpha_auto_scale"] = False
    if sort == "loha":
        if half:
            raise SpecError("an update of half of the batch cannot be a LoHa, which changes a weight that all samples share")
        options, kind = _loha(common, given, options, notes), "hcp/loha"
    else:
        options, kind = _lora(common, given, options, notes, dropout), "hcp/half_lora" if half else "hcp/lora"
    for key in given:
        known = ["layers", "alpha", "alpha_auto_scale", "dropout", "bias", "rank", "branch", "type", "lr", "train"]
        raise SpecError(f"unknown key '{key}'{did_you_mean(key, known)}", key=key)
    with below("layers"):
        host.places(layers)
    return {kind: {**common, "at": patterns(layers), **options, **({"half": half} if half else {})}}


def half_of(mask: Any) -> str | None:
    """Which half of the batch a `mask` of HCP-Diffusion chooses, first or second; None for all of it. Raises SpecError."""
    if mask is not None and (not isinstance(mask, (list, tuple)) or tuple(mask) not in list(MASKS)):
        raise SpecError(f"{shown(mask)}: an update must be for the whole batch or for one half of it")
    branch = None if mask is None else MASKS[tuple(mask)]
    return None if branch is None else HALVES[branch]


def _half(sort: str, given: dict[str, Any]) -> str | None:
    """Which half of the batch an entry acts on, from its `branch`, `mask` or type; None for all of it."""
    with below("mask"):
        masked = half_of(given.pop("mask", None))
    branch = given.pop("branch", None) or (sort if sort in HALVES else "p" if sort == "dapp" else None)
    if branch is not None and branch not in HALVES:
        raise SpecError(f"no branch {shown(branch)}: there are {', '.join(HALVES)}", path=("branch",))
    return masked if branch is None else HALVES[branch]


def _rank(rank: Any) -> Any:
    whole = isinstance(rank, int) and not isinstance(rank, bool)
    if not (rank >= 1 if whole else isinstance(rank, float) and 0 < rank <= 1):
        share = "a share of each layer's width, above 0 and at most 1.0"
        raise SpecError(f"{shown(rank)} is neither a whole number, 1 or more, nor {share}", path=("rank",))
    return rank


def _lora(
    common: Mapping[str, Any], given: dict[str, Any], options: dict[str, Any], notes: list[str], dropout: float
) -> dict[str, Any]:
    options["dropout"] = number(given.pop("dropout", dropout), ("dropout",), least=0.0, below=1.0)
    if options["dropout"]:
        notes.append(
            f"{common['name']}: dropout is applied to the input of the update; in HCP-Diffusion it is applied to its result"
        )
    if given.pop("bias", False):
        options["bias"] = True
        notes.append(f"{common['name']}: the bias of the update is initialised to zero; in HCP-Diffusion it is random")
    return options


def _loha(common: Mapping[str, Any], given: dict[str, Any], options: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """HCP-Diffusion's rank is shared by its groups, of which LoHa (arXiv 2108.06098) has two."""
    rank, groups = options["rank"], given.pop("rank_groups", 2)
    if groups != 2 or isinstance(rank, float) or rank % 2:
        raise SpecError(f"a LoHa has two factors of one rank, so rank {rank} in {groups} groups is not "
                        "possible", path=("rank_groups",))
    if given.pop("bias", False):
        raise SpecError("a LoHa has no 'bias'", path=("bias",))
    if dropout := given.pop("dropout", 0.0):
        notes.append(f"{common['name']}: a dropout of {dropout} is ignored, because HCP-Diffusion's LohaLayer never applies it")
    # there the scale is alpha / (2 * rank of a factor), here alpha / rank of a factor
    alpha = options["alpha"] if "alpha_auto_scale" in options else options["alpha"] / 2
    return {**options, "rank": rank // 2, "alpha": alpha}
