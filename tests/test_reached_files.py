"""PEFT's files for what is no layer: MultiheadAttention, parameters by name, and experts."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import torchvision
import transformers
from safetensors.torch import load_file
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


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.inner = Bare(), Holder()

    def forward(self, x):
        return self.part(x) + self.inner(x)


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


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.enc(x))


class Widths(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True, kdim=8)

    def forward(self, x):
        return self.attn(x, x[..., :8], x, need_weights=False)[0]


def vit():
    vit = torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=3)
    nn.init.normal_(vit.heads.head.weight)
    return vit


def inputs(model):
    if isinstance(model, transformers.PreTrainedModel):
        return {"input_ids": torch.randint(0, 60, (2, 5))}
    return {"x": torch.randn(2, 3, 16, 16) if hasattr(model, "conv_proj") else torch.randn(2, 5, 16)}


def run(module, kwargs):
    with torch.no_grad():
        found = module(**kwargs)
    return found if isinstance(found, torch.Tensor) else found.logits


FILES = {
    "attention": (Attention, {"target_modules": ["attn"]}),
    "attention of another rank": (
        Attention, {"target_modules": ["attn", "fc"], "rank_pattern": {"attn": 3}, "alpha_pattern": {"attn": 4}},
    ),
    "attention and a layer": (Attention, {"target_modules": ["attn", "fc"], "use_rslora": True}),
    "one parameter": (Holder, {"target_modules": [], "target_parameters": ["part.q"]}),
    "parameters": (Holder, {"target_modules": ["lin"], "target_parameters": ["part.w", "part.q"]}),
    "router": (
        qwen,
        {
            "target_modules": [], "target_parameters": ["gate.weight", "q_proj.weight"],
            "rank_pattern": {"0.mlp.gate.weight": 3}, "alpha_pattern": {"gate.weight": 200},
        },
    ),
    "qwen": (qwen, {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 3}}),
    "gpt": (gpt, {"target_modules": [], "target_parameters": EXPERTS, "alpha_pattern": {"experts.down_proj": 3}}),
    "mixtral": (mixtral, {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_peft_computes_what_peft_does(name, tmp_path):
    make, options = FILES[name]
    torch.manual_seed(0)
    model = make().eval()
    kwargs = inputs(model)
    config = peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **options)
    theirs = peft.get_peft_model(copy.deepcopy(model), config).eval()
    theirs.save_pretrained(tmp_path / "f")

    wanted, plain = run(theirs, kwargs), run(model, kwargs)
    gm = fxplug.trace(model, kwargs=kwargs, real=True)
    trained = fxplug.apply(gm, fxplug.pass_for(tmp_path / "f", gm, slots=0))
    fxplug.load_adapter(trained, tmp_path / "f")
    slots = fxplug.apply(gm, fxplug.pass_for(tmp_path / "f", gm))
    slots.adapters.load("a", tmp_path / "f")
    torch.testing.assert_close(run(slots, kwargs), plain, rtol=1e-5, atol=1e-5)
    slots.adapters.use("a")
    for found in (trained, slots, fxplug.merge(trained), fxplug.merge(slots)):
        torch.testing.assert_close(run(found, kwargs), wanted, rtol=1e-5, atol=2e-5)
    assert (wanted - plain).abs().max() > 1e-2
    slots.adapters.unload("a")
    torch.testing.assert_close(run(slots, kwargs), plain, rtol=1e-5, atol=1e-5)


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


def weights(**options):
    return fxplug.load_pass("lora_weight", rank=2, alpha=3.0, **options)


WRITTEN = {  # the model and the passes without slots
    "attention": (Attention, [weights(at=["attn", "attn.out_proj"], param="*weight")]),
    "in_proj": (Attention, [weights(at="attn", param="in_proj_weight")]),
    "out_proj": (Attention, [weights(at="attn.out_proj")]),
    "two ranks": (
        Attention,
        [
            weights(at="attn", param="in_proj_weight", name="a"),
            fxplug.load_pass("lora_weight", at="attn.out_proj", rank=3, alpha=5.0, name="b"),
            fxplug.load_pass("lora", at="fc", rank=1),
        ],
    ),
    "widths": (Widths, [weights(at="attn", param="*proj_weight")]),
    "encoder": (
        Encoder,
        [
            weights(at=["enc.self_attn", "enc.self_attn.out_proj"], param="*weight"),
            fxplug.load_pass("lora", at=["enc.linear1", "enc.linear2", "head"], rank=2),
        ],
    ),
    "vit": (
        vit,
        [
            weights(at=["**.self_attention", "**.self_attention.out_proj"], param="*weight"),
            fxplug.load_pass("lora", at="**.mlp.*", rank=3),
        ],
    ),
    "bare": (Holder, [weights(at="part", param="?"), fxplug.load_pass("lora", at="part.lin", rank=1)]),
    "qwen": (qwen, [weights(at="**.experts", param="*proj"), fxplug.load_pass("lora", at="**.q_proj", rank=4)]),
    "router": (qwen, [weights(at="**.mlp.gate"), weights(at="**.experts", param="down_proj", name="more")]),
    "gpt": (gpt, [weights(at="**.experts", param="*proj")]),
    "mixtral": (mixtral, [weights(at="**.experts", param="gate_up_proj")]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_computes_the_same_in_peft_and_here(name, tmp_path):
    make, passes = WRITTEN[name]
    torch.manual_seed(0)
    model = make().eval()
    kwargs = inputs(model)
    gm = fxplug.trace(model, kwargs=kwargs, real=True)
    new = fxplug.apply(gm, *passes)
    own = [value for key, value in new.named_parameters() if key.partition(".")[0] in {p.name for p in passes}]
    with torch.no_grad():
        for value in own:
            value.normal_(std=0.3)
    plain, wanted = run(model, kwargs), run(new, kwargs)
    assert (wanted - plain).abs().max() > 1e-2
    saved = fxplug.save_adapter(new, tmp_path / "f")
    assert not saved.left_out

    again = fxplug.apply(gm, *passes)
    fxplug.load_adapter(again, tmp_path / "f")
    torch.testing.assert_close(run(again, kwargs), wanted, rtol=1e-5, atol=1e-5)
    made = fxplug.apply(gm, fxplug.pass_for(tmp_path / "f", gm, slots=0))
    fxplug.load_adapter(made, tmp_path / "f")
    torch.testing.assert_close(run(made, kwargs), wanted, rtol=1e-5, atol=1e-5)
    slots = fxplug.apply(gm, fxplug.pass_for(tmp_path / "f", gm))
    slots.adapters.load("a", tmp_path / "f")
    slots.adapters.save("a", tmp_path / "g")
    fxplug.save_adapter(made, tmp_path / "h")

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which reads the weights of the base, also in PEFT
    try:
        for folder in "fgh":
            theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / folder).eval()
            torch.testing.assert_close(run(theirs, kwargs), wanted, rtol=1e-4, atol=3e-5)
            keys = peft.get_peft_model_state_dict(theirs).keys()
            assert keys == load_file(tmp_path / folder / "adapter_model.safetensors").keys()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize(("make", "passes", "finding"), [
    (Attention, [weights(at="attn.out_proj"), fxplug.load_pass("loha", at="attn", param="in_proj_weight", rank=2)],
     "'attn.*' is loha of a parameter that no called layer has, for which PEFT supports only LoRA"),
    (Attention, [fxplug.load_pass("dora", at="attn.out_proj", rank=2)], "'attn.out_proj' is dora of a parameter"),
    (Widths, [weights(at="attn.out_proj")], "'attn.out_proj' is in a MultiheadAttention with kdim or vdim"),
    (Attention, [weights(at="attn", param="in_proj_weight"), fxplug.load_pass("lora", at="fc", rank=1, bias=True)],
     "'attn.in_proj_weight' is an update of a parameter, and others have a bias"),
    (Twice, [weights(at="part", param="q")], "'part.q' has a name that ends 'inner.part.q', which PEFT would change as well"),
])  # fmt: skip
def test_what_peft_has_no_form_for_is_refused(make, passes, finding, tmp_path):
    torch.manual_seed(0)
    new = fxplug.apply(fxplug.trace(make().eval(), torch.randn(2, 5, 16)), *passes)
    with torch.no_grad():
        for p in passes:
            for value in new.get_submodule(p.name).parameters():
                value.normal_()
    with pytest.raises(fxplug.ArtifactError, match=finding):
        fxplug.save_adapter(new, tmp_path / "f")


@pytest.mark.parametrize("as_", ["diffusers", "kohya", "comfy", "lycoris"])
def test_other_formats_refuse_them_by_name(as_, tmp_path):
    torch.manual_seed(0)
    gm = fxplug.trace(Attention().eval(), torch.randn(2, 5, 16))
    new = fxplug.apply(gm, *WRITTEN["attention"][1])
    with pytest.raises(fxplug.ArtifactError, match=f"'attn.in_proj_weight' is an update of in_proj_weight.* no {as_} file"):
        fxplug.save_adapter(new, tmp_path / "f.safetensors", as_=as_)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "two ranks", "vit", "bare", "qwen"])
def test_fxplugs_own_file_has_them(name, tmp_path):
    make, passes = WRITTEN[name]
    torch.manual_seed(0)
    model = make().eval()
    kwargs = inputs(model)
    gm = fxplug.trace(model, kwargs=kwargs, real=True)
    new = fxplug.apply(gm, *passes)
    with torch.no_grad():
        for p in passes:
            for value in new.get_submodule(p.name).parameters():
                value.normal_(std=0.3)
    fxplug.save_adapter(new, tmp_path / "f.safetensors", as_="fxplug")
    again = fxplug.apply(gm, *passes)
    fxplug.load_adapter(again, tmp_path / "f.safetensors")
    assert torch.equal(run(again, kwargs), run(new, kwargs))
