"""Models of transformers, tiny and with their default attention: traced, and the same to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from exact import difference
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core.ir.containers import list_leaves

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, **TEXT, "num_key_value_heads": 2}
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) * 7 % 40 + 3


def images(batch: int) -> torch.Tensor:
    return torch.linspace(-1, 1, batch * 3 * 32 * 32).reshape(batch, 3, 32, 32).sin()


def text(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(batch, length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def translation(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(batch, length), "decoder_input_ids": ids(batch, length - 2)}


def speech(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_features": images(batch)[:, 0, :8], "decoder_input_ids": ids(batch, length)}


def image(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": images(batch)}


def image_and_text(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": images(batch), "input_ids": ids(batch, length)}


def _whisper(heads: int = 4) -> dict[str, Any]:
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", heads))}
    wide = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "decoder_start_token_id": 1}
    return {**TEXT, **sides, **wide, "max_source_positions": 16, "max_target_positions": 32}


T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {"text_config": {**SIZES, **TEXT}, "vision_config": IMAGES}
# class, class and arguments of its configuration, inputs of a batch and a length
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[int, int], dict[str, torch.Tensor]]]] = {
    "llama": ("LlamaModel", "LlamaConfig", GROUPED, text),
    "llama, for causal": ("LlamaForCausalLM", "LlamaConfig", GROUPED, text),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, text),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 4}, text),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}, text),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, text),
    "bert": ("BertModel", "BertConfig", {**SIZES, **TEXT}, text),
    "t5": ("T5Model", "T5Config", T5, translation),
    "whisper": ("WhisperModel", "WhisperConfig", _whisper(), speech),
    "clip": ("CLIPModel", "CLIPConfig", {**BOTH, "projection_dim": 8}, image_and_text),
    "siglip": ("SiglipModel", "SiglipConfig", BOTH, image_and_text),
    "dinov2": ("Dinov2Model", "Dinov2Config", IMAGES, image),
}


def small(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model with random weights, in evaluation, and one call of it, without a cache of keys and values."""
    cls, config, arguments, inputs = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, cls)(getattr(transformers, config)(**arguments)).eval()
    cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return model, {**inputs(2, 7), **cache}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.* was traced on its real tensors.*float32:UserWarning")  # Mixtral on torch before 2.15
def test_a_model_of_transformers_is_traced(name: str) -> None:
    model, call = small(name)
    gm = fxplug.trace(model, kwargs=call)
    for batch, length in ((2, 7), (3, 9)):
        other = {**call, **MODELS[name][3](batch, length)}
        assert difference(model(**other), gm(**other)) is None


@pytest.mark.parametrize("name", ["llama, for causal", "t5"])
def test_a_cache_that_a_model_returns_is_refused_with_the_way_out(name: str) -> None:
    model, call = small(name)
    with pytest.raises(fxplug.TraceError, match=r"returns a \w+Cache \('past_key_values'\).*use_cache=False"):
        fxplug.trace(model, kwargs={key: value for key, value in call.items() if key != "use_cache"})


# the layers that get LoRA, where PEFT's "all-linear" takes parameters of experts too, or layers that are never called
LAYERS = {"mixtral": r".*self_attn\.[qkvo]_proj", "siglip": r".*(self_attn\.[a-z]+_proj|fc[12])"}


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in list_leaves(value) if isinstance(leaf, torch.Tensor)]


def tuned(model: nn.Module, config: peft.PeftConfig) -> nn.Module:
    """A copy of a model with what PEFT adds to it, as a training leaves that."""
    made: nn.Module = peft.get_peft_model(copy.deepcopy(model), config)  # type: ignore[arg-type]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return made.eval()


def check(given: nn.Module, wanted: nn.Module, call: Mapping[str, Any]) -> None:
    for one, other in zip(tensors(given(**call)), tensors(wanted(**call)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


QUICK = {(name, False) for name in MODELS} - {("t5", False), ("whisper", False), ("siglip", False)} | {("gpt2", True)}
KINDS = [(name, dora) for dora in (False, True) for name in MODELS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dora"), [pytest.param(*kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in KINDS]
)
@pytest.mark.filterwarnings("ignore")
def test_lora_is_that_of_peft_and_its_files_go_both_ways(name: str, dora: bool, tmp_path: Path) -> None:
    model, call = small(name)
    if name != "mixtral":  # whose grouped product has no float64, in which sums are without rounding to speak of
        model.double()
        call = {key: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for key, v in call.items()}
    at = LAYERS.get(name, "all-linear")
    theirs = tuned(model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=at, use_dora=dora))
    theirs.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    gm = fxplug.trace(model, kwargs=call)
    kind = "dora" if dora else "lora"
    new = fxplug.apply(gm, fxplug.load_pass(kind, at=at if at == "all-linear" else f"re:{at}$", rank=4))
    fit = fxplug.load_adapter(new, tmp_path / "theirs")
    assert not (fit.missing or fit.outside or fit.homeless)
    check(new, theirs, call)
    ours = {n.split(f"{kind}.", 1)[1]: p for n, p in new.named_parameters() if n.startswith(f"{kind}.")}
    loss = [sum(t.square().mean() for t in tensors(m(**call)) if t.is_floating_point()) for m in (new, theirs)]
    for value in loss:
        value.backward()  # type: ignore[union-attr]
    halves = {"A": "down", "B": "up", "magnitude_vector": "magnitude"}
    seen = 0
    for key, parameter in theirs.named_parameters():
        path, _, rest = key.removeprefix("base_model.model.").partition(".lora_")
        if rest:
            half = halves[rest.partition(".")[0]]
            grad = ours[f"{path}.Dora.{half}" if dora else f"{path}.Lora.{half}.weight"].grad
            assert grad is not None and parameter.grad is not None
            torch.testing.assert_close(grad.reshape(parameter.shape), parameter.grad, rtol=1e-6, atol=1e-6)
            seen += 1
    assert seen == len(ours)
    fxplug.save_adapter(new, tmp_path / "ours", as_="peft")
    check(peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours").eval(), theirs, call)  # type: ignore[arg-type]
    banked = fxplug.apply(gm, fxplug.pass_for(tmp_path / "theirs", gm))
    banked.adapters.load("ink", tmp_path / "theirs")
    banked.adapters.use("ink")
    check(banked, theirs, call)
    for made in (fxplug.merge(new), fxplug.merge(banked), fxplug.lower(banked, merge="live")):
        check(made, theirs, call)


TIED = {
    "embeddings": {"target_modules": ["E"]},
    "output": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["E", "lm_head"]},
    "both, tied": {"target_modules": ["E", "lm_head"], "ensure_weight_tying": True},
    "whole": {"modules_to_save": ["E"]},
    "whole, tied": {"modules_to_save": ["E"], "ensure_weight_tying": True},
    "whole output": {"modules_to_save": ["lm_head"]},
    "both whole": {"modules_to_save": ["E", "lm_head"]},
    "both whole, tied": {"modules_to_save": ["E", "lm_head"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": {"E": [3, 5]}},
}


def tied_model(name: str) -> tuple[nn.Module, dict[str, Any], str]:
    model, call = small(name)
    model.tie_weights()  # type: ignore[operator]
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    model.config.tie_word_embeddings = True
    model.lm_head.weight = embeddings.weight
    return model, call, "wte" if name == "gpt2" else "embed_tokens"


@pytest.mark.slow
@pytest.mark.parametrize("slots", [False, True], ids=["train", "slots"])
@pytest.mark.parametrize("case", TIED)
@sweep("name", ["llama, for causal", "gpt2"], 0)
@pytest.mark.filterwarnings("ignore")
def test_files_for_tied_embeddings_go_both_ways(name: str, case: str, slots: bool, tmp_path: Path) -> None:
    model, call, own = tied_model(name)
    asked: dict[str, Any] = {"target_modules": ["q_proj", "c_attn"], **TIED[case]}
    renamed = {k: [own if one == "E" else one for one in v] if isinstance(v, list) else v for k, v in asked.items()}
    if case == "tokens":
        renamed["trainable_token_indices"] = {own: [3, 5]}
    theirs = tuned(model, peft.LoraConfig(r=4, lora_alpha=6, **renamed))
    theirs.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    gm = fxplug.trace(model, kwargs=call)
    new = fxplug.apply(gm, fxplug.pass_for(tmp_path / "theirs", gm, slots=int(slots)))
    if slots:
        new.adapters.load("ink", tmp_path / "theirs")
        new.adapters.use("ink")
        new.adapters.save("ink", tmp_path / "ours", as_="peft")
    else:
        fxplug.load_adapter(new, tmp_path / "theirs")
        fxplug.save_adapter(new, tmp_path / "ours", as_="peft")
    check(new, theirs, call)
    check(peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours").eval(), theirs, call)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_trained_tokens_of_tied_embeddings_ask_for_both_and_another_base_is_refused(tmp_path: Path) -> None:
    model, call, own = tied_model("llama, for causal")
    gm = fxplug.trace(model, kwargs=call)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={own: [3]})
    tuned(model, config).save_pretrained(tmp_path / "tokens")  # type: ignore[operator]
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="q_proj"), fxplug.load_pass("delta", at=own, param="weight"))
    with pytest.raises(fxplug.SpecError, match="trained tokens, and '.*' shares its weight with 'lm_head'"):
        fxplug.load_adapter(new, tmp_path / "tokens")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[3] += 1
    tuned(other, peft.LoraConfig(r=4, target_modules=["lm_head"])).save_pretrained(tmp_path / "other")  # type: ignore[operator]
    with pytest.raises(fxplug.SpecError, match="with which its update was trained, and the model's weight differs"):
        fxplug.load_adapter(fxplug.apply(gm, fxplug.load_pass("lora", at="lm_head")), tmp_path / "other")


def test_a_square_weight_of_a_transposed_layer_is_taken_for_what_it_is(tmp_path: Path) -> None:
    model, call = small("gpt2")
    gm = fxplug.trace(model, kwargs=call)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="attn.c_proj", rank=2))
    nn.init.normal_(new.get_parameter("lora.transformer.h.0.attn.c_proj.Lora.up.weight"))
    fxplug.save_adapter(new, tmp_path / "ink")
    mapped = fxplug.apply(gm, fxplug.load_pass("lora_weight", at="attn.c_proj", rank=2))
    fxplug.load_adapter(mapped, tmp_path / "ink")
    check(mapped, new, call)
    fxplug.save(mapped, tmp_path / "module")
    torch.testing.assert_close(fxplug.load(tmp_path / "module")(**call).logits, new(**call).logits)
    with pytest.raises(fxplug.SpecError, match=r"stored as \(in, out\).*lora_weight or dora"):
        fxplug.load_adapter(fxplug.apply(gm, fxplug.load_pass("delta", at="attn.c_proj", param="weight")), tmp_path / "ink")
