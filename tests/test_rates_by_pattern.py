"""Rates of parameters by pattern, such as LoRA+ (arXiv 2402.12354)."""

from __future__ import annotations

import pytest
import torch
from test_train_state import kept, made, trainer

import fxplug
from fxplug.core.errors import SpecError
from fxplug.core.spec.yaml_source import validate
from fxplug.training.train_section import Train


def rates(run):
    """The rate and the decay of each parameter that trains."""
    name_of = {id(p): name for name, p in run.module.named_parameters()}
    return {name_of[id(p)]: (g["lr"], g["weight_decay"]) for g in run.optimizer.param_groups for p in g["params"]}


def test_the_second_factor_learns_by_a_ratio():
    """The first step of Adam moves each number by its rate, whatever the gradient."""
    run = trainer(steps=1, lr=1e-3, optimizer="adam", groups={"**.up": {"lr_ratio": 16}}, batch=24)
    before = {name: p.detach().clone() for name, p in run.module.named_parameters()}
    run.fit()
    moved = {name: (p - before[name]).abs().max().item() for name, p in run.module.named_parameters() if p.requires_grad}
    ups = [value for name, value in moved.items() if ".up." in name]
    assert ups == pytest.approx([16e-3] * 2, rel=1e-3) and len(moved) == 4
    assert [g["name"] for g in run.groups] == ["lora", "lora **.up"]
    assert run.history[0]["lr"] == 1e-3


def test_patterns_are_of_pass_and_base_and_the_last_one_counts():
    module = fxplug.apply(made(), fxplug.load_pass("lora", at="head", rank=2, name="other", lr=0.5, weight_decay=0.1))
    groups = {"**.up": {"lr_ratio": 2}, "other.**": {"weight_decay": 0.0}, "lora.body.0.Lora.up.weight": {"lr": 0}}
    groups["conv"] = {"lr": 7}
    found = rates(trainer(module, lr=0.01, weight_decay=0.2, groups=groups, trainable=["conv"]))
    assert found == {
        "lora.body.0.Lora.down.weight": (0.01, 0.2),
        "lora.body.2.Lora.down.weight": (0.01, 0.2),
        "lora.body.0.Lora.up.weight": (0, 0.2),
        "lora.body.2.Lora.up.weight": (0.02, 0.2),
        "other.head.Lora.down.weight": (0.5, 0.0),
        "other.head.Lora.up.weight": (0.5, 0.0),
        "conv.weight": (7, 0.2),
        "conv.bias": (7, 0.2),
    }


@pytest.mark.slow
def test_divided_groups_follow_the_schedule_and_go_on_to_the_bit(tmp_path):
    given = {"steps": 6, "lr": 1e-2, "scheduler": "cosine", "groups": {"**.up": {"lr_ratio": 4}}}
    whole = trainer(**given)
    whole.fit()
    trainer(**given, out=tmp_path, save={"every": 3, "keep": 9}).fit()
    last = trainer(**given, out=tmp_path, save={"every": 3, "keep": 9})
    last.fit(resume=kept(tmp_path, 3))
    pairs = zip(whole.module.parameters(), last.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    first, second = (group["lr"] for group in last.optimizer.param_groups)
    assert second == pytest.approx(4 * first)
    with pytest.raises(fxplug.FxplugError, match=r"groups.lora \*\*.up"):
        trainer(**{**given, "groups": {"**.up": {"lr_ratio": 5}}}, out=tmp_path).fit(resume=tmp_path)


def test_what_names_nothing_that_trains_is_said():
    for pattern in ("**.upp", "conv", "lora.body.0.Lora.u"):
        with pytest.raises(SpecError, match="names no parameter of the trained part") as caught:
            trainer(groups={pattern: {"lr": 1}})
        assert caught.value.path == ("train", "groups", pattern)
    with pytest.raises(SpecError, match="no effect beside an optimizer") as caught:
        module = made()
        trainer(module, optimizer=torch.optim.Adam(fxplug.trainable(module)), groups={"**.up": {"lr_ratio": 2}})
    assert caught.value.path == ("train", "groups")


@pytest.mark.parametrize(("groups", "message"), [
    ({"**.up": {}}, "has no effect"),
    ({"**.up": {"lr": 1, "lr_ratio": 2}}, "give either"),
    ({"**.up": {"lr_ratio": 0}}, "must be above 0"),
    ({"**.up": {"lr": -1}}, "must be 0.0 or more"),
    ({"**.up": {"ratio": 2}}, "unknown key 'ratio'"),
    ({"**.up": 16}, "must be a mapping"),
    ({"": {"lr": 1}}, "must be a text that is not empty"),
    (["**.up"], "must be a mapping"),
])  # fmt: skip
def test_values_that_are_no_rates(groups, message):
    with pytest.raises(SpecError, match=message):
        validate(Train, {"task": "classify", "steps": 1, "groups": groups})
