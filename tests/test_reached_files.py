"""PEFT's files for what is no layer: MultiheadAttention, parameters by name, and experts."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers
from torch import nn

import fxplug

SMALL = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "num_experts_per_tok": 2,
    "use_cache": False, "attn_implementation": "eager", "experts_implementation": "eager",
}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.fc = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(self.attn(x, x, x, need_weights=False)[0])


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.q = nn.Parameter(torch.randn(3, 5, 16)), nn.Parameter(torch.randn(5, 16))
        self.lin = nn.Linear(16, 16)

    def forward(self, x):
        return torch.einsum("bti,eoi->beto", self.lin(x), self.w).sum(1) + x @ self.q.T


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Bare()

    def forward(self, x):
        return self.part(x)


def qwen():
    config = transformers.Qwen3MoeConfig(**SMALL, intermediate_size=32, moe_intermediate_size=8, num_experts=4)
    return transformers.Qwen3MoeForCausalLM(config)


def gpt():  # whose experts are (experts, in, out), and gate_up_proj square
    config = transformers.GptOssConfig(
        **SMALL, intermediate_size=8, num_local_experts=4, layer_types=["full_attention", "sliding_attention"]
    )
    return transformers.GptOssForCausalLM(config)


def mixtral():
    given = {key: value for key, value in SMALL.items() if key != "head_dim"}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**given, intermediate_size=8, num_local_experts=4))


FILES = {
    "attention": (Attention, {"target_modules": ["attn"]}),
    "attention and a layer": (Attention, {"target_modules": ["attn", "fc"], "use_rslora": True}),
    "one parameter": (Holder, {"target_modules": [], "target_parameters": ["part.q"]}),
    "parameters": (Holder, {"target_modules": ["lin"], "target_parameters": ["part.w", "part.q"]}),
    "qwen": (qwen, {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 3}}),
    "gpt": (gpt, {"target_modules": [], "target_parameters": EXPERTS, "alpha_pattern": {"experts.down_proj": 3}}),
    "mixtral": (mixtral, {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_peft_computes_what_peft_does(name, tmp_path):
    make, options = FILES[name]
    torch.manual_seed(0)
    model, kwargs = make().eval(), {"x": torch.randn(2, 5, 16)}
    if isinstance(model, transformers.PreTrainedModel):
        kwargs = {"input_ids": torch.randint(0, 60, (2, 5))}
    config = peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **options)
    theirs = peft.get_peft_model(copy.deepcopy(model), config).eval()
    theirs.save_pretrained(tmp_path / "f")

    def run(module):
        with torch.no_grad():
            found = module(**kwargs)
        return found if isinstance(found, torch.Tensor) else found.logits

    wanted, plain = run(theirs), run(model)
    gm = fxplug.trace(model, kwargs=kwargs, real=True)
    trained = fxplug.apply(gm, fxplug.pass_for(tmp_path / "f", gm, slots=0))
    fxplug.load_adapter(trained, tmp_path / "f")
    slots = fxplug.apply(gm, fxplug.pass_for(tmp_path / "f", gm))
    slots.adapters.load("a", tmp_path / "f")
    torch.testing.assert_close(run(slots), plain, rtol=1e-5, atol=1e-5)
    slots.adapters.use("a")
    for found in (trained, slots, fxplug.merge(trained), fxplug.merge(slots)):
        torch.testing.assert_close(run(found), wanted, rtol=1e-5, atol=2e-5)
    assert (wanted - plain).abs().max() > 1e-2
    slots.adapters.unload("a")
    torch.testing.assert_close(run(slots), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("change", "finding"), [
    ({"target_parameters": ["part.w"]}, "has 2 updates by target_parameters, which name 1"),
    ({"target_parameters": "part.w"}, "target_parameters of its configuration must be a list"),
    ({"r": 4}, r"the tensors of 'part\.\w' are .*, which are not of rank 4"),
    ({"rank_pattern": {"part.w": 1}}, "'part.w' is .*is for another shape"),
])  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused(change, finding, tmp_path):
    torch.manual_seed(0)
    model, x = Holder().eval(), torch.randn(2, 5, 16)
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=[], target_parameters=["part.w", "part.q"])
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    state, said = peft.get_peft_model_state_dict(theirs), {**config.to_dict(), **change}
    gm = fxplug.trace(model, x)
    new = fxplug.apply(gm, fxplug.load_pass("lora_weight", at="part", param="?", rank=2))
    with pytest.raises(fxplug.FxplugError, match=finding):
        fxplug.load_adapter(new, state, config=said)
