"""Adapters of layers that share a weight, of tables, and of what has no samples: each reads what it wrote, or says why not."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError, SpecError

IDS = torch.arange(8).view(2, 4)
KINDS = {"lora": {}, "dora": {}, "loha": {}, "lokr": {}, "lora_weight": {}, "delta": {}}


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.e, self.l, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.e.weight

    def forward(self, x):
        return self.head(torch.tanh(self.l(self.e(x))))


def traced(tied=True):
    torch.manual_seed(0)
    return fxplug.trace(Tied(tied).eval(), IDS)


def trained(gm, kind, at="**"):
    new = fxplug.apply(gm, fxplug.load_pass(kind, at=at))
    for name, parameter in new.named_parameters():
        if name.startswith(f"{kind}."):
            parameter.data += torch.randn(parameter.shape) * 0.2
    return new


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_pass_goes_into_that_pass_and_into_its_slots(kind, tied, tmp_path):
    gm, file = traced(tied), tmp_path / "adapter.safetensors"
    new = trained(gm, kind)
    fxplug.save_adapter(new, file, as_="fxplug")
    again = fxplug.apply(gm, fxplug.load_pass(kind, at="**"))
    slotted = fxplug.apply(gm, fxplug.load_pass(kind, at="**", slots=2))
    fxplug.load_adapter(again, file)
    slotted.adapters.load("ink", file)
    slotted.adapters.use("ink")
    for module in (again, slotted):
        torch.testing.assert_close(module(IDS), new(IDS), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(new(IDS), gm(IDS), atol=1e-3)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("kind", ["loha", "lokr", "lora_weight", "delta"])
def test_one_weight_takes_no_two_updates(kind, slots, tmp_path):
    file = tmp_path / "adapter.safetensors"
    fxplug.save_adapter(trained(traced(tied=False), kind), file, as_="fxplug")  # of another head
    new = fxplug.apply(traced(), fxplug.load_pass(kind, at="**", **({"slots": slots} if slots else {})))
    load = (lambda source: new.adapters.load("ink", source)) if slots else (lambda source: fxplug.load_adapter(new, source))
    with pytest.raises(ArtifactError, match="updates of their own, and 'e' and 'head' share a weight.*apply the pass lora"):
        load(file)
    fxplug.save_adapter(trained(traced(tied=False), kind, at="head"), file, as_="fxplug")
    with pytest.raises(ArtifactError, match="1 layers have no slots here: 'head'"):
        load(file)  # which would change the table as well
    with pytest.raises(ArtifactError, match="1 layers have no slots here: 'head'"):
        load({"head.lora_A.weight": torch.randn(2, 6), "head.lora_B.weight": torch.randn(11, 2)})


# --- what has no samples


def text_models():
    common = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    yield transformers.CLIPTextModel(transformers.CLIPTextConfig(**common, max_position_embeddings=8, eos_token_id=2))
    yield transformers.BertModel(transformers.BertConfig(**common, max_position_embeddings=8))
    gpt2 = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, use_cache=False)
    yield transformers.GPT2Model(gpt2)


@pytest.mark.parametrize("fuse", [None, "fused"])
@pytest.mark.parametrize("model", list(text_models()), ids=lambda model: type(model).__name__)
def test_positions_have_no_adapters_of_samples(model, fuse, tmp_path):
    torch.manual_seed(0)
    ids, file = torch.randint(3, 32, (2, 6)), tmp_path / "adapter.safetensors"
    gm = fxplug.trace(model.eval(), ids)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="**", slots=3, rank=8))
    plain = {}
    places = {"whole": "**", "some": ["re:.*(fc1|query|c_attn)$"], "more": ["re:.*(fc2|value|c_proj)$"]}
    for name, at in places.items():
        plain[name] = fxplug.apply(gm, fxplug.load_pass("lora", at=at, rank=8))
        for key, parameter in plain[name].named_parameters():
            if key.startswith("lora."):
                parameter.data += torch.randn(parameter.shape) * 0.1
        fxplug.save_adapter(plain[name], file, as_="fxplug")
        new.adapters.load(name, file)
    module = new if fuse is None else fxplug.lower(new, fuse=fuse)
    for choice in (["whole", None], ["some", "whole"], [{"whole": 0.5}, "whole"]):
        with pytest.raises(SpecError, match=r"change '.*(position|wpe).*', whose input has no samples"):
            module.adapters.use(choice)
        with pytest.raises(SpecError, match="whose input has no samples"), module.adapters.using(choice):
            pass
    module.adapters.use(["some", "more"])
    for row, name in enumerate(("some", "more")):
        torch.testing.assert_close(module(ids)[0][row], plain[name](ids)[0][row], rtol=1e-4, atol=1e-5)
    module.adapters.use(["whole", "whole"])
    torch.testing.assert_close(module(ids)[0], plain["whole"](ids)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [4, 6, 8])
@pytest.mark.parametrize("rows", [6, 8])
@pytest.mark.parametrize("kind", ["lora", "lora_weight"])
def test_halves_that_are_square_are_read_as_they_were_written(kind, rows, rank, tmp_path):
    torch.manual_seed(0)
    gm = fxplug.trace(nn.Sequential(nn.Embedding(rows, 8)).eval(), IDS % rows)
    new = fxplug.apply(gm, fxplug.load_pass(kind, at="0", rank=rank))
    for name, parameter in new.named_parameters():
        if name.startswith(kind):
            parameter.data += torch.randn(parameter.shape)
    fxplug.save_adapter(new, tmp_path / "a.safetensors", as_="fxplug")
    for slots in ({}, {"slots": 1}):
        again = fxplug.apply(gm, fxplug.load_pass(kind, at="0", rank=rank, **slots))
        if slots:
            again.adapters.load("a", tmp_path / "a.safetensors")
            again.adapters.use("a")
        else:
            fxplug.load_adapter(again, tmp_path / "a.safetensors")
        torch.testing.assert_close(again(IDS % rows), new(IDS % rows))
