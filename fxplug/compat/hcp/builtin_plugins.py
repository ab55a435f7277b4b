"""What comes with HCP-Diffusion, as fxplug's own passes: its ControlNet, its LoRA and LoHa."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ...core.errors import SpecError, did_you_mean, prefix_path
from ...core.spec.yaml_source import Section, make_validator, quote_yaml, validate
from .hosts import OPTIONS, Host, Number, make_patterns, read_common, read_number, take_key
from .layer_patterns import read_layers, read_paths

LORA = re.compile(
    r"hcpdiff\.models(\.lora_base|\.lora_layers|\.lora_base_patch|\.lora_layers_patch)?\.(LoraBlock|LoraLayer|LohaLayer|DAPPLayer)"
    r"(\.wrap_model)?"
)
CONTROLNET = ("hcpdiff.models.controlnet.ControlNetPlugin", "hcpdiff.models.ControlNetPlugin")
HALVES = {"p": "second", "n": "first"}  # DreamArtist++ (arXiv 2211.11337): the negative prompt's samples come first in a batch
MASKS = {(0, 0.5): "n", (0.5, 1): "p", (0, 1): None}


def convert_built_in(
    target: str, common: dict[str, Any], given: dict[str, Any], host: Host, notes: list[str]
) -> dict[str, Any]:
    """Return the pass that is equivalent to a plugin of HCP-Diffusion itself. Raises SpecError if there is none."""
    path = target.removesuffix(".wrap_model")
    kind = path.rpartition(".")[2]
    if LORA.fullmatch(path):
        defaults = {"type": {"LohaLayer": "loha", "DAPPLayer": "dapp"}.get(kind, "lora"), "dropout": 0.1 * (path == target)}
        return _low_rank(common, {**defaults, **given}, host, notes)
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
    """Return the pass for HCP-Diffusion's ControlNet, which adds to skips and middle as diffusers' does (arXiv 2302.05543)."""
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


def read_half(mask: Any) -> str | None:
    """Return the half of the batch that a `mask` of HCP-Diffusion selects, first or second; None for all of it. Raises
    SpecError."""
    if mask is not None and (not isinstance(mask, (list, tuple)) or tuple(mask) not in list(MASKS)):
        raise SpecError(f"{quote_yaml(mask)}: an update must be for the whole batch or for one half of it")
    branch = None if mask is None else MASKS[tuple(mask)]
    return None if branch is None else HALVES[branch]


def _rank(rank: Any) -> Any:
    whole = isinstance(rank, int) and not isinstance(rank, bool)
    if not (rank >= 1 if whole else isinstance(rank, float) and 0 < rank <= 1):
        share = "a share of each layer's width, above 0 and at most 1.0"
        raise SpecError(f"{quote_yaml(rank)} is neither a whole number, 1 or more, nor {share}")
    return rank


class LowRankSection(Section):
    """An entry of `lora_unet`, or what a plugin of these classes is given, beside the keys that all plugins have."""

    layers: Annotated[Any, make_validator(read_paths)] = Field(description="a list of layers")
    type: Literal["lora", "loha", "dapp", "p", "n"] = "lora"
    branch: Literal["p", "n"] | None = None
    mask: Annotated[Any, make_validator(read_half)] = None
    rank: Annotated[Any, make_validator(_rank)] = 1
    rank_groups: Literal[2] = Field(2, description="2: a LoHa has two factors")
    alpha: Number = 1.0
    alpha_auto_scale: bool = True
    dropout: Annotated[float, make_validator(lambda value: read_number(value, (), least=0.0, below=1.0))] = 0.0
    bias: bool = False
    svd_init: Literal[False] = Field(False, description="false: fxplug's low-rank update has no such start")
    inplace: Any = None  # where a sum is stored, which a graph decides itself

    @property
    def half(self) -> str | None:
        """Half of the batch it acts on, from its `branch`, `mask` or type; None for all of it."""
        branch = self.branch or (self.type if self.type in HALVES else "p" if self.type == "dapp" else None)
        return self.mask if branch is None else HALVES[branch]


def make_lora_pass(name: str, entry: Any, host: Host, notes: list[str]) -> dict[str, Any]:
    """Return the pass of one entry of `lora_unet`. Raises SpecError."""
    if not isinstance(entry, Mapping):
        raise SpecError(f"must be a mapping with 'layers', not {quote_yaml(entry)}")
    given = {key: value for key, value in entry.items() if key not in OPTIONS}
    return _low_rank(read_common(name, entry, notes), given, host, notes)


def _low_rank(common: dict[str, Any], given: Mapping[str, Any], host: Host, notes: list[str]) -> dict[str, Any]:
    own, name, found = validate(LowRankSection, given), common["name"], list[str]()
    if own.branch and own.type != "dapp":
        found.append("branch is read as in HCP-Diffusion 0.7 and earlier; from 0.9 on only type: dapp has it")
    made: dict[str, Any] = {"rank": own.rank, "alpha": own.alpha}
    if not own.alpha_auto_scale:
        made["alpha_auto_scale"] = False
    if own.type == "loha":
        if own.half or own.bias:
            what = "'bias'" if own.bias else "update of half of the batch, as it changes a weight that all samples share"
            raise SpecError(f"a LoHa has no {what}")
        if isinstance(own.rank, float) or own.rank % 2:
            raise SpecError(f"a LoHa has two factors of one rank, so rank {own.rank} is not possible", path=("rank",))
        if own.dropout:
            found.append(f"a dropout of {own.dropout} is ignored, because HCP-Diffusion's LohaLayer never applies it")
        # its rank is shared by the factors (arXiv 2108.06098): the scale is alpha / (2 * rank of one) there, here alpha / that
        made |= {"rank": own.rank // 2, "alpha": own.alpha / 2 if own.alpha_auto_scale else own.alpha}
    else:
        made["dropout"] = own.dropout
        if own.dropout:
            found.append("dropout is applied to the input of the update; in HCP-Diffusion it is applied to its result")
        if own.bias:
            made["bias"] = True
            found.append("the bias of the update is initialised to zero; in HCP-Diffusion it is random")
    notes += [f"{name}: {note}" for note in found]
    with prefix_path("layers"):
        host.places(own.layers)
    kind = "hcp/loha" if own.type == "loha" else "hcp/half_lora" if own.half else "hcp/lora"
    return {kind: {**common, "at": make_patterns(own.layers), **made, **({"half": own.half} if own.half else {})}}
