"""What the keys of adapter files say: of which layer a tensor is, and which part of its update. One table for all layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..blocks import list_update_kinds
from ..blocks.base import UpdateKind
from ..blocks.head import WRAPPED
from .file_kinds import FORMS, WHOLE, WHOLE_OF
from .layer_names import rename_processor

# how a key ends -> what the tensor is; {a} may be an adapter's name
_ADAPTER = r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?"
_BEHIND = r"(?<=processor\.qkv_lora)|(?<=processor\.proj_lora)|(?<=_lora1)|(?<=_lora2)"
# of methods that are no low-rank product
_ROLES = {*WHOLE, "set_weight", "reshape_weight", *(role for form in FORMS for role in (*form.needed, *form.more))}
_NAMES = "|".join(role for role in sorted(_ROLES) if "_" in role or role in ("diff", "rescale", "ranknum"))
_GLORA = ("a1", "a2", "b1", "b2", "bm")
SHARED = re.compile(r"^(?:base_model\.)?(?P<name>vera_[AB]|randlora_[AB]|vblora_vector_bank)(?:\.(?P<adapter>[^.]+))?$")
_FORMS = [
    (re.compile(form.replace("{a}", _ADAPTER)), role)
    for form, role in [
        (r"\.lora_(?P<half>A|B){a}\.(?P<what>weight|bias)$", ""),
        (r"\.lora_embedding_(?P<half>A|B){a}$", "embedding"),
        (r"\.lora_magnitude_vector{a}(?:\.weight)?$", "magnitude"),
        (r"\.lora_(?P<half>down|up|mid)\.(?P<what>weight|bias)$", ""),
        # x-flux by XLabs, where a processor has LoRAs of several layers
        (rf"(?:{_BEHIND})\.(?P<half>down|up)\.(?P<what>weight|bias)$", ""),
        (r"(?:\.lora|\.lora_linear_layer|(?P<old>_lora))\.(?P<half>down|up)\.(?P<what>weight|bias)$", ""),
        (r"\.dora_scale$|\.magnitude(?:\.weight)?$", "magnitude"),  # LyCORIS', and ai-toolkit's
        (r"(?<=query_norm)\.scale$|(?<=key_norm)\.scale$", "set_weight"),  # of Flux, as its control LoRAs have them
        (r"\.oft_R\.(?P<name>scaled_oft)$", "other"),
        (r"(?:\.token_adapter)?\.(?P<name>" + _NAMES + r"){a}(?:\.weight)?$", "other"),
        (r"\.lora_(?P<half>A|B){a}$", ""),  # AdaLoRA's
        (r"\.alpha$", "alpha"),
    ]
]
INNER = ".base_layer.out_proj"  # of a MultiheadAttention, within PEFT's wrapper around that
TABLES = "fxplug.tables"  # in a file's metadata: which of its layers are Embeddings, a line each, as square halves do not tell
_OFT_PART = re.compile(r"^(?P<layer>.+)\.oft_blocks\.(?P<number>\d+)$")  # networks/oft_flux.py of sd-scripts: q, k, v by number
_NUMBERED = re.compile(r"^(?P<part>\w*):(?P<number>\d+):(?P<half>up|down)$")  # lora by cloneofsimo, 2022: layers by number
_HALVES = {"A": "down", "down": "down", "B": "up", "up": "up", "mid": "mid"}


@dataclass(frozen=True)
class KindKeys:
    """How keys of some kinds of updates end: in our own files, behind the name of a block (`own`), and in those of others."""

    own: re.Pattern[str]
    blocks: Mapping[str, UpdateKind]
    states: Mapping[str, str]  # the name of a tensor in a block's state -> its own
    factor: re.Pattern[str]
    names: Mapping[str, str]  # its name in files -> its own

    @classmethod
    def of(cls, kinds: Sequence[UpdateKind]) -> KindKeys:
        """Make them of those of these kinds that are no methods."""
        kinds = [kind for kind in kinds if kind.forms and not kind.method]
        blocks = {kind.block: kind for kind in kinds}
        states = {kind.state.get(name, name): name for kind in kinds for name in {*kind.tensors, *kind.state}}
        states["scale"] = "scale"
        factors = [kind for kind in kinds if kind.is_product and not kind.is_plain]
        names = {row.get(name, name): name for kind in factors for row in (*kind.formats.values(), {}) for name in kind.tensors}
        one_of = ["|".join(map(re.escape, some)) for some in (blocks, states, names)]
        own = rf"^(?P<layer>.*)\.(?P<block>(?P<cls>{one_of[0]})(?:_\d+)?)\.(?P<name>{one_of[1]})$"
        return cls(re.compile(own), blocks, states, re.compile(rf"\.(?P<name>{one_of[2]}){_ADAPTER}$"), names)


@cache
def keys_of(*kinds: UpdateKind) -> KindKeys:
    """Give how keys of these kinds of updates end, made once."""
    return KindKeys.of(kinds)


@dataclass
class LayerKeys:
    """The keys of one layer while a file is read: canonical name -> key, and the numbers beside them."""

    name: str
    keys: dict[str, str] = field(default_factory=dict)
    embedding: bool = False
    own: UpdateKind | None = None
    group: str = ""  # of a block of ours, the pass


def place_key(key: str, state: Mapping[str, Any], adapter: str | None, adapters: set[str]) -> LayerKeys | None:
    """Return the layer of a file's key with the key's role; an empty one for a key of another adapter; None for any other key.

    `state` is the whole file, and `adapter` the requested one. Names of adapters that are found are added to `adapters`.
    """
    kinds = keys_of(*list_update_kinds().values())
    own = kinds.own.match(key if "." in key else "")
    if own:
        group, _, name = own["layer"].partition(".")
        last = "" if own["block"] == own["cls"] else f".{own['block']}"
        role, kind = kinds.states[own["name"]], kinds.blocks[own["cls"]]
        return LayerKeys(f"{group}.{name}{last}" if name else group, {role: key}, own=kind, group=group)
    if numbered := _NUMBERED.match(key):
        return LayerKeys(f"{numbered['part']}:{numbered['number']}", {numbered["half"]: key})
    if key.endswith(".alpha") and f"{key.removesuffix('.alpha')}.oft_blocks.0" in state:
        return LayerKeys("")  # each of its parts has it
    if part := _OFT_PART.match(key):
        several, alpha = f"{part['layer']}.oft_blocks.1" in state, f"{part['layer']}.alpha"
        keys = {"oft_blocks": key, **({"alpha": alpha} if alpha in state else {})}
        return LayerKeys(f"{part['layer']}_{part['number']}" if several else part["layer"], keys)
    for form, role in ((kinds.factor, "factor"), *_FORMS):
        found = form.search(key)
        if found is None:
            continue
        parts = found.groupdict()
        if parts.get("adapter"):
            adapters.add(parts["adapter"])
            if adapter is not None and parts["adapter"] != adapter:
                return LayerKeys("")
        layer = key[: found.start()]
        # diffusers' network_alphas are of a tensor, not of a layer
        if role == "alpha" and layer in state and not layer.endswith(".alpha"):
            of = place_key(layer, state, adapter, adapters)
            return of and LayerKeys(of.name, {"alpha": key} if of.keys else {})
        layer = layer.replace(".base_layer", "")  # PEFT's own wrapper around a layer within another
        if parts.get("old"):
            layer = rename_processor(layer)
        if parts.get("half"):
            half = _HALVES[parts["half"]]
            if parts.get("what") == "bias":
                return LayerKeys(layer, {"bias": key}) if half == "up" else None
            return LayerKeys(layer, {half: key}, embedding=role == "embedding")
        name = parts.get("name") or role
        return LayerKeys(layer, {kinds.names.get(name, name): key})
    owner, _, last = key.rpartition(".")
    path, _, name = owner.rpartition(".")
    if last == "weight" and f"{owner}.on_input" in state:  # LyCORIS' (IA)3
        return LayerKeys(owner, {last: key})
    if last == "weight" and name in _GLORA and {f"{path}.{one}.weight" for one in _GLORA[:4]} <= state.keys():
        return LayerKeys(path, {name: key})
    return None


def _saved_beside(param: str, owners: Sequence[str], config: Mapping[str, Any]) -> bool:
    """Return whether PEFT saves a weight or bias whole for another reason than `modules_to_save`."""
    bias = config.get("bias")
    return (
        (param == "bias" and isinstance(bias, str) and bias != "none")
        or owners[-1] in ("ln_tuning_layers", "base_layer")
        # a layer tied to one of those that are named
        or (bool(config.get("modules_to_save")) and bool(config.get("ensure_weight_tying")))
    )


def find_saved_module(key: str, config: Mapping[str, Any], state: Mapping[str, Any]) -> LayerKeys | None:
    """Return the layer of a parameter that PEFT saved whole, by its configuration; None for another key, an empty one for a
    copy.

    These are the modules in `modules_to_save`, biases with `bias`, normalisations of LN tuning, and the base's own embedding.
    With `bias` PEFT adds copies of the biases of `modules_to_save` under its wrapper's names: the new one, and the base's.
    """
    plain = WRAPPED.sub("", key)
    if ".original_module." in key or (plain != key and plain in state):
        return LayerKeys("")
    path, _, param = plain.removeprefix("base_model.model.").rpartition(".")
    owners = path.split(".")
    saved = config.get("modules_to_save")
    ends = {".".join(owners[start:stop]) for stop in range(1, len(owners) + 1) for start in range(stop)}
    named = isinstance(saved, (list, tuple)) and not ends.isdisjoint(one for one in saved if isinstance(one, str))
    if not named and not (param in ("weight", "bias") and _saved_beside(param, owners, config)):
        return None
    inner = ".".join(owners[:-1] if owners[-1] in ("ln_tuning_layers", "base_layer") else owners)
    if param == "num_batches_tracked":
        return LayerKeys("")  # a count, of which no result depends
    return LayerKeys(f"base_model.model.{inner}", {f"{WHOLE_OF}{param}": key})
