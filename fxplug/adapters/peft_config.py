"""What PEFT's configuration of an adapter says beyond alpha and rank: known, without meaning for the weights, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ArtifactError, did_you_mean, shown

KINDS = ("LORA", "LOHA", "LOKR")
# how an adapter was chosen, initialised and trained: the file has the outcome
TRAINING = {
    "alpha", "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "decompose_both",
    "decompose_factor", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "init_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "modules_to_save", "module_dropout", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_dropout", "rank_dropout_scale", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type",
    "trainable_token_indices", "use_dora", "use_effective_conv2d", "use_rslora", "velora_config",
}  # fmt: skip
# what makes the same tensors mean something else
REFUSED = {
    "alora_invocation_tokens": "the adapter acts behind certain words only",
    "arrow_config": "it chooses among adapters by what a layer reads",
    "fan_in_fan_out": "its layers hold their weights transposed, as transformers' Conv1D does",
    "kasa_config": "its updates are diagonal in the singular vectors of the base's weights",
    "layer_replication": "it is for a model some of whose layers were repeated",
    "monteclora_config": "its updates are drawn at random",
    "target_parameters": "it changes parameters of modules that are no layers",
    "use_bdlora": "its halves are block diagonal",
    "use_qalora": "it pools what its layers read",
}
# initialisations after which the base is another one: what is trained is the difference to it
OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
PLAIN = (True, False, None, "gaussian", "orthogonal", "eva", "mica", "lycoris", "default")


def check(config: Mapping[str, Any], where: str) -> None:
    """Raise ArtifactError for a configuration with which the tensors of a file do not mean what they do by themselves.

    Honoured elsewhere: `r`, `lora_alpha`, `alpha`, their patterns and `use_rslora`; `use_dora` and `lora_bias` say what the
    file must have. The names are those of PEFT 0.21's LoraConfig, LoHaConfig and LoKrConfig.
    """
    kind = config.get("peft_type")
    if kind is not None and kind not in KINDS:
        raise ArtifactError(f"{where}: its peft_type is {shown(kind)}; read are {', '.join(KINDS)}")
    for key, why in REFUSED.items():
        if config.get(key):
            raise ArtifactError(f"{where} says {key}: {shown(config[key])}: {why}, which is not read here")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(OTHER_BASE):
        raise ArtifactError(
            f"{where} says init_lora_weights: {shown(init)}: it was trained beside weights that are not the base model's. Save "
            "it as a plain LoRA with PEFT, save_pretrained(path, path_initial_model_for_weight_conversion=<the adapter as it "
            "was initialised>)"
        )
    if init not in PLAIN:
        raise ArtifactError(f"{where} says init_lora_weights: {shown(init)}, an initialisation that is not known here")
    unknown = sorted(k for k, v in config.items() if v and k not in TRAINING and k not in REFUSED and k != "init_lora_weights")
    if unknown:
        key = unknown[0]
        raise ArtifactError(
            f"{where} says {key}: {shown(config[key])}, which is not known here{did_you_mean(key, TRAINING | REFUSED.keys())}: "
            "if it does not change what the weights mean, give config= without it"
        )
