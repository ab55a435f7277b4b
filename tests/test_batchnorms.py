"""Frozen batch norms are held: training writes no base tensor, and what is not frozen trains as before."""

from __future__ import annotations

import pytest
import small
import torch
import torchvision
from torch import nn

import fxplug
from fxplug.lowerings.frozen_norms import freeze_norms
from fxplug.lowerings.regions.submodules import outline


def bits(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(before, module):
    return [key for key, value in module.state_dict().items() if not torch.equal(value, before[key])]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["held", "outlined", "checkpointed"])
def test_three_steps_leave_every_base_tensor(how):
    base = small.lite()
    gm = small.seeded(lambda: fxplug.apply(base.gm, fxplug.load_pass("lora", rank=4)))
    module = freeze_norms(gm, lambda name: not name.startswith("lora."))
    if how != "held":
        module = outline(module, checkpoint=how == "checkpointed")
    before = bits(base.gm)
    own = {key: p for key, p in gm.named_parameters() if key.startswith("lora.")}
    optimizer = torch.optim.AdamW(own.values(), 1e-3)
    module.train()
    for step in range(3):
        optimizer.zero_grad()
        out = module(*base.args)
        with torch.no_grad():
            expected = gm.eval()(*base.args)
        assert torch.equal(out, expected), step  # nothing else differs between the modes here
        out.square().mean().backward()
        optimizer.step()
    assert same(before, base.gm) == []
    assert all(p.grad is not None for p in own.values())
    names = [str(n.target) for n in freeze_norms(gm, lambda name: True).graphs[True].nodes]
    assert not any(name.endswith("num_batches_tracked") for name in names)
    assert any(str(n.target).endswith("num_batches_tracked") for n in gm.graphs[True].nodes)  # the given one is as it was


def test_norms_that_are_kept_whole_and_only_those_that_are_frozen():
    model = small.seeded(lambda: torchvision.models.resnet18(num_classes=5)).eval()
    base = small.traced(model, torch.randn(2, 3, 32, 32))
    frozen = {key for key, _ in model.named_parameters() if not key.startswith("layer4.1.bn2")}
    module, before = freeze_norms(base.gm, frozen), bits(model)
    with torch.no_grad():
        assert torch.equal(module.eval()(*base.args), model(*base.args)) and not same(before, model)
        module.train()(*base.args)
    assert {key.rpartition(".")[0] for key in same(before, model)} == {"layer4.1.bn2"}
    model.load_state_dict(before)
    free, plain = freeze_norms(base.gm, ()), base.gm
    with torch.no_grad():
        ours = free.train()(*base.args)
        model.load_state_dict(before)
        assert torch.equal(ours, plain.train()(*base.args))


class Norms(nn.Module):
    """Norms without parameters, an instance norm that tracks, one that does not, one inside a pass's reach."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False))
        self.b = nn.Sequential(nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
        self.c = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False))

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def test_norms_without_parameters_go_by_what_is_around_them():
    base = small.traced(small.seeded(Norms).train(), torch.randn(4, 3, 12, 12))
    before = bits(base.model)

    def moved(frozen, gm=base.gm):
        with torch.no_grad():
            freeze_norms(gm, frozen).train()(*base.args)
        found = {key.rpartition(".")[0] for key in same(before, base.model)}
        base.model.load_state_dict(before)
        return found

    assert moved(lambda name: True) == set()
    assert moved(lambda name: False) == {"a.1", "b.1", "c.1"}
    assert moved(lambda name: not name.startswith("b.")) == {"b.1"}
    tuned = fxplug.apply(base.gm, fxplug.load_pass("bitfit", at="**"))  # it opens the norms
    assert moved(lambda name: not name.startswith("bitfit."), tuned) == set()


def test_names_that_are_none():
    with pytest.raises(fxplug.SpecError, match="no parameter is called 'bn1.wieght' \\(did you mean 'bn1.weight'"):
        freeze_norms(small.lite().gm, ["bn1.wieght"])
    with pytest.raises(fxplug.SpecError, match="takes a traced module, not Linear"):
        freeze_norms(nn.Linear(2, 2), ())
