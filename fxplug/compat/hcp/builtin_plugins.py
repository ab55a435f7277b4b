"""What comes with HCP-Diffusion, as fxplug's own passes; and what all entries of its files share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...errors import SpecError, did_you_mean
from ...spec.addresses import identifier, select
from ...spec.yaml_source import shown
from .layer_patterns import Layer, Place, places, read_layers

RATE = 1e-5  # HCP-Diffusion's learning rate for a plugin that has none
OPTIONS = ("_target_", "_partial_", "lr", "train")
LORA = re.compile(
    r"hcpdiff\.models(\.lora_base|\.lora_layers|\.lora_base_patch|\.lora_layers_patch)?\.(LoraBlock|LoraLayer|LohaLayer)"
    r"(\.wrap_model)?"
)
CONTROLNET = ("hcpdiff.models.controlnet.ControlNetPlugin", "hcpdiff.models.ControlNetPlugin")
SYMBOL = re.compile(r"[A-Za-z_]\w*")


class Host:
    """The model that plugins go into, when it is known, and the shapes of their inputs."""

    def __init__(self, model: nn.Module | None, inputs: dict[str, Sequence[Any]], part: str) -> None:
        self.model = model
        self.inputs = inputs
        self.part = part
        self.used: set[str] = set()
        self.modules = dict(model.named_modules()) if model is not None else {}
        self.classes = {path: type(m).__name__ for path, m in self.modules.items()}

    def places(self, layers: Sequence[Layer]) -> list[Place] | None:
        """The layers that are meant, or None where that cannot be known without the model."""
        if self.model is not None:
            return places(layers, self.classes)
        if any(layer.regex or layer.kind for layer in layers):
            return None
        return places(layers, dict.fromkeys((layer.path for layer in layers), ""))

    def symbols(self, name: str) -> set[str]:
        """The names that stand for sizes in the shape of an input."""
        return {s for size in self.inputs[name] for s in SYMBOL.findall(str(size))}

    def binds(self, name: str) -> bool:
        """Whether an input names sizes that an input of a plugin uses."""
        wanted = {s for used in self.used for s in self.symbols(used)}
        return bool(self.symbols(name) & wanted)


def common_of(name: str, entry: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The keys that every pass has, from an entry: `name`, `lr`, and `train` where it is given."""
    common: dict[str, Any] = {"name": pass_name(name, notes), "lr": entry.get("lr", RATE)}
    if "train" in entry:
        common["train"] = entry["train"]
    return common


def taken(given: dict[str, Any], key: str) -> Any:
    """Take a key out of what was given. Raises SpecError where it is missing."""
    if key not in given:
        raise SpecError(f"missing key '{key}'{did_you_mean(key, given)}")
    return given.pop(key)


def patterns(layers: Sequence[Layer]) -> list[str]:
    """Path patterns; where an expression matches the empty path, the model itself is named beside it, as HCP-Diffusion does."""
    found: dict[str, None] = {}
    for layer in layers:
        if layer.regex and select(f"re:{layer.path}", [""]):
            found[""] = None
        found[layer.pattern] = None
    return list(found)


@contextmanager
def at_key(key: str) -> Iterator[None]:
    """Errors raised inside without a place have this key as their path."""
    try:
        yield
    except SpecError as error:
        raise SpecError(error.finding, path=error.path or (key,)) from None


def pass_name(name: str, notes: list[str]) -> str:
    """A plugin's name as a pass's, which is a Python name."""
    new = identifier(name)
    if new != name:
        notes.append(f"plugin '{name}' is called {new} here, as names are of letters, digits and '_'")
    return new


# --- what HCP-Diffusion brings along


def built_in(target: str, common: dict[str, Any], given: dict[str, Any], host: Host, notes: list[str]) -> dict[str, Any]:
    """The pass that does the same as a plugin that comes with HCP-Diffusion. Raises SpecError where there is none."""
    path = target.removesuffix(".wrap_model")
    kind = path.rpartition(".")[2]
    if LORA.fullmatch(path):
        dropout = 0.0 if path != target else 0.1
        return _loha(common, given, host, notes) if kind == "LohaLayer" else _lora(common, given, host, notes, dropout)
    if target in CONTROLNET:
        return _controlnet(common, given, host, notes)
    raise SpecError(
        f"'{target}' is HCP-Diffusion's own and has no equal among fxplug's passes; a copy of its class with the bases of "
        "fxplug.compat.hcp can be used as any other plugin",
        path=("_target_",),
    )


def lora_passes(name: str, entry: Any, host: Host, notes: list[str]) -> dict[str, Any]:
    """The pass of one entry of `lora_unet`. Raises SpecError."""
    if not isinstance(entry, Mapping):
        raise SpecError(f"must be a mapping with 'layers', not {shown(entry)}")
    given = {key: value for key, value in entry.items() if key not in OPTIONS}
    sort = given.pop("type", "lora")
    common = common_of(name, entry, notes)
    if sort == "loha":
        return _loha(common, given, host, notes)
    if sort != "lora":
        raise SpecError(f"no pass for the type {shown(sort)}{did_you_mean(sort, ['lora', 'loha'])}", path=("type",))
    return _lora(common, given, host, notes, 0.0)


def _low_rank(given: dict[str, Any]) -> tuple[list[Layer], int, float, bool]:
    """The layers, the rank, alpha, and whether the update is scaled by alpha / rank; refuses what fxplug's have not."""
    layers = read_layers(taken(given, "layers"), "layers")
    if any(layer.pre_hook or layer.kind for layer in layers):
        raise SpecError("only re: stands before a layer here", path=("layers",))
    rank, alpha = given.pop("rank", 1), given.pop("alpha", 1.0)
    if not isinstance(rank, int) or isinstance(rank, bool):
        finding = f"{shown(rank)} is a share of each layer's width; a pass has one rank: write a whole number"
        raise SpecError(finding, path=("rank",))
    given.pop("inplace", None)  # where a sum is stored, which a graph decides itself
    for key, plain in (("bias", False), ("svd_init", False), ("mask", None)):
        if given.pop(key, plain) != plain:
            raise SpecError(f"the low-rank update of fxplug has no '{key}'", path=(key,))
    return layers, rank, alpha, given.pop("alpha_auto_scale", True)


def _nothing_left(given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        raise SpecError(f"unknown key '{key}'{did_you_mean(key, [*known, 'lr', 'train'])}", key=key)


def _lora(common: dict[str, Any], given: dict[str, Any], host: Host, notes: list[str], dropout: float) -> dict[str, Any]:
    layers, rank, alpha, scaled = _low_rank(given)
    dropout = given.pop("dropout", dropout)
    _nothing_left(given, ("layers", "rank", "alpha", "dropout"))
    if dropout:
        notes.append(f"{common['name']}: dropout is of what goes into the update; in HCP-Diffusion it is of its result")
    with at_key("layers"):
        host.places(layers)
    alpha = alpha if scaled else alpha * rank
    return {"hcp/lora": {**common, "at": patterns(layers), "rank": rank, "alpha": alpha, "dropout": dropout}}


def _loha(common: dict[str, Any], given: dict[str, Any], host: Host, notes: list[str]) -> dict[str, Any]:
    """HCP-Diffusion's rank is shared by its groups, of which LoHa (arXiv 2108.06098) has two."""
    layers, rank, alpha, scaled = _low_rank(given)
    groups, dropout = given.pop("rank_groups", 2), given.pop("dropout", 0.0)
    _nothing_left(given, ("layers", "rank", "alpha", "dropout", "rank_groups"))
    if groups != 2 or rank % 2:
        raise SpecError(f"a LoHa has two factors of one rank: rank {rank} in {groups} groups is none", path=("rank_groups",))
    with at_key("layers"):
        host.places(layers)
    if dropout:
        notes.append(f"{common['name']}: a dropout of {dropout} is left out, as HCP-Diffusion's LohaLayer never applies it")
    # there the scale is alpha / (2 * rank of a factor), here alpha / rank of a factor
    scale = {"alpha": alpha / 2} if scaled else {"alpha": alpha, "alpha_auto_scale": False}
    return {"hcp/loha": {**common, "at": patterns(layers), "rank": rank // 2, **scale}}


STOCK = {
    "from_layers": ["pre_hook:", "pre_hook:conv_in"],
    "to_layers": [*(f"down_blocks.{i}" for i in range(4)), "mid_block", "pre_hook:up_blocks.3.resnets.2"],
}


def _controlnet(common: dict[str, Any], given: dict[str, Any], host: Host, notes: list[str]) -> dict[str, Any]:
    """Its hooks add to the skips and the middle what diffusers' ControlNet adds there (arXiv 2302.05543)."""
    for key, stock in STOCK.items():
        layers = read_layers(taken(given, key), key)
        if ["pre_hook:" * layer.pre_hook + layer.pattern for layer in layers] != stock:
            raise SpecError(f"HCP-Diffusion's ControlNet is wired for {stock}; another wiring has no equal", path=(key,))
    channels = given.pop("cond_block_channels", [3, 16, 32, 96, 256, 320])
    for key in ("layers_per_block", "block_out_channels"):
        if given.pop(key, None) is not None:
            notes.append(f"{common['name']}: {key} is left out, as the ControlNet is made like the UNet")
    _nothing_left(given, ("cond_block_channels", "layers_per_block", "block_out_channels"))
    options = {"conditioning_channels": channels[0], "conditioning_embedding_out_channels": list(channels[1:-1])}
    return {"controlnet": {**common, "channels": channels[0], "options": options}}
