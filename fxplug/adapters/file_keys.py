"""What the keys of adapter files say: of which layer a tensor is, and which part of its update. One table for all layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .layer_names import new_name

# how a key ends -> what the tensor is; {a} may be an adapter's name
_ADAPTER = r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?"
_BEHIND = r"(?<=processor\.qkv_lora)|(?<=processor\.proj_lora)|(?<=_lora1)|(?<=_lora2)"
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
        (r"\.(?P<name>hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)){a}$", "factor"),
        (r"\.dora_scale$", "magnitude"),
        (r"\.alpha$", "alpha"),
    ]
]
_OWN = re.compile(
    r"^(?P<layer>.*)\.(?P<block>(?P<cls>Lora|LoraWeight|Dora|Loha|Lokr)(?:_\d+)?)\."
    r"(?P<name>(?:down|up)(?:\.weight)?|up\.bias|scale|magnitude|hada_\w+|lokr_\w+)$"
)
_NUMBERED = re.compile(r"^(?P<part>\w*):(?P<number>\d+):(?P<half>up|down)$")  # lora by cloneofsimo, 2022: layers by number
_HALVES = {"A": "down", "down": "down", "B": "up", "up": "up", "mid": "mid"}


@dataclass
class Layer:
    """The keys of one layer while a file is read: canonical name -> key, and the numbers beside them."""

    name: str
    keys: dict[str, str] = field(default_factory=dict)
    embedding: bool = False
    own: str = ""
    group: str = ""  # of a block of ours, the pass


def place(key: str, state: Mapping[str, Any], adapter: str | None, adapters: set[str]) -> Layer | None:
    """The layer of a key of a file and what it is there; an empty one for a key of another adapter; None for any other key.

    `state` is the whole file, and `adapter` the one that is wanted. The names of adapters that are met go into `adapters`.
    """
    own = _OWN.match(key if "." in key else "")
    if own:
        group, _, name = own["layer"].partition(".")
        last = "" if own["block"] == own["cls"] else f".{own['block']}"
        role = "bias" if own["name"] == "up.bias" else own["name"].removesuffix(".weight")
        return Layer(f"{group}.{name}{last}" if name else group, {role: key}, own=own["cls"], group=group)
    if numbered := _NUMBERED.match(key):
        return Layer(f"{numbered['part']}:{numbered['number']}", {numbered["half"]: key})
    for form, role in _FORMS:
        found = form.search(key)
        if found is None:
            continue
        parts = found.groupdict()
        if parts.get("adapter"):
            adapters.add(parts["adapter"])
            if adapter is not None and parts["adapter"] != adapter:
                return Layer("")
        layer = key[: found.start()]
        # diffusers' network_alphas are of a tensor, not of a layer
        if role == "alpha" and layer in state and not layer.endswith(".alpha"):
            of = place(layer, state, adapter, adapters)
            return of and Layer(of.name, {"alpha": key} if of.keys else {})
        layer = layer.replace(".base_layer", "")  # PEFT's own wrapper around a layer within another
        if parts.get("old"):
            layer = new_name(layer)
        if parts.get("half"):
            half = _HALVES[parts["half"]]
            if parts.get("what") == "bias":
                return Layer(layer, {"bias": key}) if half == "up" else None
            return Layer(layer, {half: key}, embedding=role == "embedding")
        return Layer(layer, {parts.get("name") or role: key})
    return None
