"""Adapter files for layers that share a weight: each pass reads what it wrote, into slots too, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError

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
