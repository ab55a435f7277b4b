"""What PEFT's configuration of an adapter says beyond alpha and rank: known, without meaning for the weights, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..core.errors import ArtifactError, did_you_mean, shown

PRODUCTS = (None, "LORA", "LOHA", "LOKR")  # whose patterns say ranks and alphas
# methods that are no low-rank products -> what their configurations say beyond `COMMON`: what is honoured, or only trains
OTHERS = {
    "ADALORA": "init_r target_r tinit tfinal deltaT beta1 beta2 orth_reg_weight total_step",
    "BEFT": "",
    "BOFT": "boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout",
    "BONE": "",
    "C3A": "block_size block_size_pattern",
    "DELORA": "delora_lambda lambda_pattern",
    "FOURIERFT": "n_frequency n_frequency_pattern random_loc_seed scaling",
    "GRALORA": "gralora_k hybrid_r gralora_dropout",
    "HIRA": "hira_dropout",
    "HRA": "apply_GS",
    "IA3": "feedforward_modules init_ia3_weights",
    "LN_TUNING": "",
    "MISS": "mini_r miss_dropout",
    "OFT": "block_share coft eps oft_block_size use_cayley_neumann num_cayley_neumann_terms",
    "RANDLORA": "randlora_alpha randlora_dropout projection_prng_key save_projection sparse very_sparse",
    "ROAD": "group_size variant",
    "SHIRA": "mask_type random_seed",
    "TRAINABLE_TOKENS": "token_indices",
    "VBLORA": "num_vectors vector_length topk vblora_dropout save_only_topk_weights init_logits_std init_vector_bank_bound",
    "VERA": "vera_dropout d_initial projection_prng_key save_projection",
}  # fmt: skip
KINDS = ("LORA", "LOHA", "LOKR", *OTHERS)
# what a configuration means that leaves a key out: no version of PEFT, up to 0.21, has had another default for one of these
DEFAULTS: dict[str | None, dict[str, Any]] = {
    "LORA": {"lora_alpha": 8}, "LOHA": {"alpha": 8}, "LOKR": {"alpha": 8, "r": 8}, "ADALORA": {"lora_alpha": 8},
    "FOURIERFT": {"random_loc_seed": 777, "scaling": 150.0}, "GRALORA": {"alpha": 64}, "HRA": {"apply_GS": False},
    "IA3": {"feedforward_modules": None},
    "OFT": {"block_share": False, "coft": False, "eps": 6e-5, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5},
    "RANDLORA": {"randlora_alpha": 640}, "ROAD": {"variant": "road_1", "group_size": 64}, "VBLORA": {"topk": 2},
    "VERA": {"projection_prng_key": 0},
}  # fmt: skip
_PROMPT = "it puts trained tokens before the words, and changes no weight"
_BASE = "it is read off the singular vectors of the base's weights, which PEFT works out anew"
# methods of PEFT that have no home here, and why
HOMELESS = {
    "ADAMSS": _BASE, "FROD": _BASE, "OSF": _BASE, "PSOFT": _BASE, "TINYLORA": _BASE,
    "ADAPTION_PROMPT": _PROMPT, "CARTRIDGE": _PROMPT, "CPT": _PROMPT, "MULTITASK_PROMPT_TUNING": _PROMPT,
    "P_TUNING": _PROMPT, "PREFIX_TUNING": _PROMPT, "PROMPT_TUNING": _PROMPT,
    "DEFT": "it takes directions out of the base's weights before it adds others",
    "GLORA": "its parts are paths of a search, each of another form",
    "LILY": "a router shares its halves among layers by what they read",
    "PEANUT": "it is a network with an activation, which is no function of the weight",
    "POLY": "a router chooses among its parts by the task",
    "PVERA": "its update is drawn from a distribution of what the layer reads",
    "SHADOW": "it runs a second network beside the model",
    "SUPERTUNING": "its elements are chosen by the size of the base's weights",
    "UNILORA": "its halves are drawn from one vector by indices that PEFT draws anew",
    "WAVEFT": "its elements are places in a wavelet transform that PEFT works out anew",
    "XLORA": "a classifier weighs its adapters by what the model reads",
}  # fmt: skip
WEIGHTS = (*(k for k, why in HOMELESS.items() if why is _BASE), "DEFT", "GLORA", "SUPERTUNING", "UNILORA", "WAVEFT")
# layouts of other tools by how their keys end, and why they have no home here
LAYOUTS = {
    "lambda_layer": ("T-LoRA", "how much of it acts depends on the step of the sampler"),
    "poly_router.module_logits": ("Poly", HOMELESS["POLY"]),
    "prompt_embeddings": ("prompt tuning", _PROMPT),
    "adaption_prompt": ("adaption prompts", _PROMPT),
    "oft_embedding_R": ("OFT of an embedding", "it turns what the embedding gives, by PEFT's own code"),
}
# how an adapter was chosen, initialised and trained: the file has the outcome
TRAINING = {
    "alpha", "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "decompose_both",
    "decompose_factor", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "module_dropout", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_dropout", "rank_dropout_scale", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "trainable_token_indices", "use_dora", "use_effective_conv2d", "use_rslora",
    "velora_config",
}  # fmt: skip
# what makes the same tensors mean something else
REFUSED = {
    "alora_invocation_tokens": "the adapter acts behind certain words only",
    "arrow_config": "it chooses among adapters by what a layer reads",
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

    Honoured elsewhere: `r`, `lora_alpha`, `alpha`, their patterns and `use_rslora`, what the rows of `other_kinds` ask for, and
    what says which tensors are whole parameters (`modules_to_save`, `bias`, `trainable_token_indices`); `use_dora` and
    `lora_bias` say what the file must have. The names are those of PEFT 0.21's configurations.
    """
    kind = config.get("peft_type")
    kind = str.__str__(kind) if isinstance(kind, str) else kind  # PEFT's own are members of an enum
    if isinstance(kind, str) and kind in HOMELESS:
        way = "; merge it with PEFT (merge_and_unload) and take the difference with fxplug.extract" if kind in WEIGHTS else ""
        raise ArtifactError(f"{where}: its peft_type is {kind}, which has no place here: {HOMELESS[kind]}{way}")
    if kind is not None and kind not in KINDS:
        near = did_you_mean(str(kind), KINDS)
        raise ArtifactError(f"{where}: its peft_type is {shown(kind)}{near}; read are {', '.join(KINDS)}")
    known = TRAINING | {*OTHERS.get(str(kind), "").split(), *(("init_weights", "module_dropout") if kind in OTHERS else ())}
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
    unknown = sorted(k for k, v in config.items() if v and k not in known and k not in REFUSED and k != "init_lora_weights")
    if unknown:
        key = unknown[0]
        raise ArtifactError(
            f"{where} says {key}: {shown(config[key])}, which is not known here{did_you_mean(key, known | REFUSED.keys())}: "
            "if it does not change what the weights mean, give config= without it"
        )


def check_layout(keys: Iterable[str], where: str) -> None:
    """Raise ArtifactError for keys of a method that has no home here."""
    for key in keys:
        for end, (name, why) in LAYOUTS.items():
            if re.search(rf"(?:^|[._]){re.escape(end)}(?:\.[^.]+)?(?:\.weight)?$", key):
                raise ArtifactError(f"{where}: '{key}' is of {name}, which has no place here: {why}")
