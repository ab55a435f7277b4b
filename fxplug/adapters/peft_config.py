"""What PEFT's configuration of an adapter says beyond alpha and rank: known, without meaning for the weights, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..core.errors import ArtifactError, did_you_mean, quote
from .tables import read_table

PRODUCTS = (None, "LORA", "LOHA", "LOKR")  # whose patterns say ranks and alphas
_PEFT: Any = read_table("formats")["peft"]
METHODS: Mapping[str | None, Mapping[str, Any]] = _PEFT["methods"]


def check(config: Mapping[str, Any], where: str) -> None:
    """Raise ArtifactError for a configuration that changes the meaning of a file's tensors.

    Used elsewhere: `r`, `lora_alpha`, `alpha`, their patterns and `use_rslora`, the keys of the kinds in `file_kinds`, and
    those that name whole parameters (`modules_to_save`, `bias`, `trainable_token_indices`); `use_dora` and `lora_bias` require
    tensors in the file. The names are those of PEFT 0.21's configurations.
    """
    kind = config.get("peft_type")
    kind = str.__str__(kind) if isinstance(kind, str) else kind  # PEFT's own are members of an enum
    for group, homeless in _PEFT["homeless"].items():
        if isinstance(kind, str) and kind in homeless:
            way = "; merge it with PEFT (merge_and_unload) and take the difference with fxplug.extract" * (group == "weights")
            raise ArtifactError(f"{where}: its peft_type is {kind}, which is not supported: {homeless[kind]}{way}")
    if kind is not None and not (isinstance(kind, str) and kind in METHODS):
        near = did_you_mean(str(kind), [*METHODS])
        raise ArtifactError(f"{where}: its peft_type is {quote(kind)}{near}; supported are {', '.join(map(str, METHODS))}")
    refused = _PEFT["refused"]
    known = {*_PEFT["training"], *METHODS.get(kind, ())}
    for key, why in refused.items():
        if config.get(key):
            raise ArtifactError(f"{where} has {key}: {quote(config[key])}: {why}, which is not supported")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(tuple(_PEFT["of_another_base"])):
        raise ArtifactError(
            f"{where} has init_lora_weights: {quote(init)}: it was trained with weights that differ from the base model's. "
            "Save it as a plain LoRA with PEFT, save_pretrained(path, path_initial_model_for_weight_conversion=<the adapter as "
            "it was initialised>)"
        )
    if init not in _PEFT["initialisations"]:
        raise ArtifactError(f"{where} has init_lora_weights: {quote(init)}, an initialisation that is not supported")
    unknown = sorted(k for k, v in config.items() if v and k not in known and k not in refused and k != "init_lora_weights")
    if unknown:
        key = unknown[0]
        raise ArtifactError(
            f"{where} has {key}: {quote(config[key])}, an unknown key{did_you_mean(key, known | refused.keys())}: if it does "
            "not change what the weights mean, give config= without it"
        )


def check_layout(keys: Iterable[str], where: str) -> None:
    """Raise ArtifactError for keys of a method that is not supported here."""
    for key in keys:
        for end, (name, why) in _PEFT["layouts"].items():
            if re.search(rf"(?:^|[._]){re.escape(end)}(?:\.[^.]+)?(?:\.weight)?$", key):
                raise ArtifactError(f"{where}: '{key}' is of {name}, which is not supported: {why}")
