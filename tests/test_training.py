"""What a training loop of one's own trains of a rewritten module."""

from __future__ import annotations

import pytest
import small
import torch

import fxplug


def test_what_a_loop_of_ones_own_trains():
    gm, args, _ = small.vit()
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="qkv", rank=2, lr=5e-3), fxplug.load_pass("head", classes=3))
    groups = fxplug.trainable(new, "norm")
    optimizer = torch.optim.SGD(groups, lr=1e-2)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"lora": 5e-3, "new_head": 1e-2, "base": 1e-2}
    before = {name: p.detach().clone() for name, p in new.named_parameters()}
    new(*args).square().sum().backward()
    optimizer.step()
    changed = {name for name, p in new.named_parameters() if not torch.equal(before[name], p)}
    assert changed == {name for name in before if name.startswith(("new_head.", "norm.")) or name.endswith("up.weight")}
    assert {name for name, p in new.named_parameters() if p.grad is not None} >= changed
    assert not any(p.requires_grad for name, p in new.named_parameters() if name.startswith("blocks."))
    frozen = [p.requires_grad for p in new.parameters()]
    for given, error in (([new, "nrm"], "nrm"), ([gm], "nothing trains"), ([fxplug.lower(new, fuse=True)], "lowered")):
        with pytest.raises(fxplug.FxplugError, match=error):
            fxplug.trainable(*given)
    assert frozen == [p.requires_grad for p in new.parameters()]
