"""The laws that every file in passes/ is held to. A new pass is tested by being there.

A pass whose parameters have defaults needs no entry in CASES: it is applied to the ViT as it is.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache

import pytest
import small
import torch
from torch import nn

import fxplug
from fxplug.spec import shipped
from fxplug.structure import leaves

CASES = {
    "lora": [
        ("vit", {"at": "blocks.{i}.attn.qkv", "rank": 2}),
        ("unet", {"at": ["re:mid_block.*attn1.to_[qk]$", "conv_in", "conv_out"], "rank": 2}),
        ("layers", {"rank": 2, "alpha": 3}),
        ("lite", {"at": ["conv_stem", "blocks.1.0.conv_dw", "classifier"], "rank": 2}),
    ],
    "replace": [
        ("vit", {"module": "GELU", "with": "PReLU"}),
        ("unet", {"at": "mid_block.**", "module": "SiLU", "with": "PReLU"}),
        ("lite", {"at": "blocks.0.0.bn1.act", "module": "ReLU6", "with": "PReLU"}),
    ],
    "scale": [
        ("vit", {"at": "blocks.*.mlp"}),
        ("unet", {"at": "mid_block.**.conv1"}),
    ],
    "skip": [
        ("vit", {"from": "blocks.0", "to": "blocks.1.mlp"}),
        ("vit", {"from": "blocks.0.mlp", "to": "blocks.1:in", "place": "before"}),
        ("unet", {"from": "conv_in", "to": "up_blocks.1.resnets.0.conv1"}),
    ],
}
# Both on one model, where their places meet. A pass without an entry takes its defaults.
TOGETHER = {
    "lora": {"at": "blocks.*.mlp.fc1", "rank": 2},
    "replace": {"at": "blocks.*.mlp.act", "module": "GELU", "with": "PReLU"},
    "scale": {"at": "blocks.*.mlp.*"},
    "skip": {"from": "blocks.0.mlp.act", "to": "blocks.1.mlp.act"},
}
REFUSED = {  # pairs that cannot be, and why; a glob passes over a replaced module, so replace-scale works
    ("scale", "replace"): "'blocks.0.mlp.act' has a block of pass 'scale'",
    ("skip", "replace"): "'blocks.1.mlp.act' has a block of pass 'skip'",
    ("replace", "skip"): "'blocks.1.mlp.act' is gone: pass 'replace' replaced 'blocks.1.mlp.act'",
}


@dataclass(frozen=True)
class Case:
    """A pass applied to a model."""

    name: str
    base: small.Traced
    made: fxplug.Pass
    new: nn.Module

    @property
    def added(self):
        return {k: p for k, p in self.new.named_parameters() if k.startswith(f"{self.made.name}.")}

    @property
    def call(self):
        return self.base.args, self.base.kwargs


def rows():
    for name in shipped("passes"):
        for index, (model, _) in enumerate(cases_of(name)):
            yield pytest.param((name, index), id=f"{name}-{model}" + f"-{index}" * (index > 0))


def cases_of(name):
    return CASES.get(name, [("vit", {})])


@cache
def made_once(name, index):
    model, params = cases_of(name)[index]
    base, made = getattr(small, model)(), fxplug.load_pass(name, **params)
    torch.manual_seed(1)
    return Case(name, base, made, fxplug.apply(base.gm, made))


@pytest.fixture(params=list(rows()))
def case(request):
    """A case to look at: tests that train it, or change its mode, take `fresh`."""
    return made_once(*request.param)


@pytest.fixture
def fresh(case):
    torch.manual_seed(1)
    return Case(case.name, case.base, case.made, fxplug.apply(case.base.gm, case.made))


def run(module, base, seed=3):
    torch.manual_seed(seed)
    with torch.no_grad():
        return leaves(module(*base.args, **base.kwargs))


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def steps(case, optimizer, count):
    """Train what the pass added; the losses on the way."""
    torch.manual_seed(5)
    goal = [t + 0.1 * torch.randn_like(t) for t in run(case.base.gm, case.base)]
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        out = leaves(case.new(*case.base.args, **case.base.kwargs))
        loss = sum((a - b).square().mean() for a, b in zip(out, goal, strict=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    case.base.model.zero_grad()
    return losses


def trainable(case):
    if not case.added:
        pytest.skip("it adds no parameters")
    return list(case.added.values())


def test_the_edit_is_the_one_we_read(case, golden, request):
    text = fxplug.diff(case.base.gm, case.new)
    golden(request.node.callspec.id, re.sub("^@@.*", "@@", text, flags=re.M))  # without line numbers


def test_its_sites_can_be_read(case):
    sites = fxplug.find(case.base.gm, case.made)
    assert sites
    for site in sites:
        assert site.path in str(site) and site.classes[0] in str(site) and "->" in str(site)


def test_a_neutral_pass_changes_no_output_and_another_does(case):
    assert same(run(case.new, case.base), run(case.base.gm, case.base)) == case.new.meta["passes"][-1]["neutral"]


def test_both_modes_are_rewritten(case):
    assert set(case.new.graphs) == set(case.base.gm.graphs)
    for graph in case.new.graphs.values():
        assert sum("pass" in n.meta for n in graph.nodes) >= len(case.new.meta["passes"][-1]["sites"])


def test_a_neutral_pass_changes_no_output_in_training_and_another_does(fresh):
    buffers = {k: b.clone() for k, b in fresh.base.gm.named_buffers()}
    results = []
    for module in (fresh.base.gm, fresh.new):
        for k, b in fresh.base.gm.named_buffers():
            b.copy_(buffers[k])  # running statistics are shared
        results.append(run(module.train(), fresh.base))
        module.eval()
    for k, b in fresh.base.gm.named_buffers():
        b.copy_(buffers[k])
    assert same(*results) == fresh.new.meta["passes"][-1]["neutral"]


def test_the_given_graph_is_not_touched(case):
    base = case.base
    before, out, keys = fxplug.show(base.gm), run(base.gm, base), list(base.gm.state_dict())
    fxplug.apply(base.gm, case.made)
    assert fxplug.show(base.gm) == before and same(run(base.gm, base), out)
    assert list(base.gm.state_dict()) == keys
    assert same(out, run(base.model, base))


def test_the_base_stays_the_same_objects_and_bits_while_the_pass_is_trained(fresh):
    base = dict(fresh.base.model.state_dict(keep_vars=True))
    ours = dict(fresh.new.state_dict(keep_vars=True))
    assert all(ours[k] is v for k, v in base.items())
    assert all(k.startswith(f"{fresh.made.name}.") for k in ours if k not in base)
    before = {k: v.detach().clone() for k, v in base.items()}
    steps(fresh, torch.optim.SGD(trainable(fresh), 0.1), 3)
    assert all(torch.equal(before[k], v) for k, v in base.items())


def test_every_new_parameter_moves_and_the_loss_falls(fresh):
    start = {k: p.detach().clone() for k, p in fresh.added.items()}
    losses = steps(fresh, torch.optim.Adam(trainable(fresh), 1e-3), 8)
    assert losses[-1] < losses[0]
    assert [k for k, p in fresh.added.items() if torch.equal(p, start[k])] == []


def test_weights_round_trip(fresh):
    with torch.no_grad():
        for p in trainable(fresh):
            p.add_(0.1 * torch.randn_like(p))
    weights = {k: v for k, v in fresh.new.state_dict().items() if k.startswith(f"{fresh.made.name}.")}
    again = fxplug.apply(fresh.base.gm, fresh.made)
    missing, unexpected = again.load_state_dict(weights, strict=False)
    assert not unexpected and not [k for k in missing if k.startswith(f"{fresh.made.name}.")]
    assert same(run(again, fresh.base), run(fresh.new, fresh.base))


def test_verify_finds_nothing_and_one_graph_is_captured(case):
    whole = case.made.name == "lora" or case.base is small.vit()  # capture takes seconds
    report = fxplug.verify(case.base.gm, case.new, *case.call, compile=whole)
    status = {c.name: c.status for c in report.checks}
    neutral = "ok" if case.new.meta["passes"][-1]["neutral"] else "skipped"
    assert status == {"lint": "ok", "base": "ok", "shapes": "ok", "neutral": neutral} | ({"one graph": "ok"} if whole else {})


def test_it_exports(case):
    program = torch.export.export(case.new, *case.call, strict=False)
    ours = run(program.module(check_guards=False), case.base)
    for a, b in zip(ours, run(case.new, case.base), strict=True):
        torch.testing.assert_close(a, b)
    if case.added:
        assert set(case.added) <= {k for k, _ in program.named_parameters()}


def test_applying_it_twice_is_refused_but_under_another_name(case):
    with pytest.raises(fxplug.ClashError, match=f"'{case.made.name}' is already applied here"):
        fxplug.apply(case.new, case.made)
    if case.new.meta["passes"][-1]["neutral"]:
        second = fxplug.load_pass(case.made, name="second")
        both = fxplug.apply(case.new, second)
        assert same(run(both, case.base), run(case.new, case.base))
        assert [entry["name"] for entry in both.meta["passes"]] == [case.made.name, "second"]


def test_it_applies_to_a_module_loaded_from_an_artifact(case, tmp_path):
    fxplug.save(case.base.gm, tmp_path / "base")
    loaded = fxplug.load(tmp_path / "base")
    new = fxplug.apply(loaded, case.made)
    assert fxplug.diff(loaded, new).replace("Record(", "UNet2DConditionOutput(") == fxplug.diff(case.base.gm, case.new)
    new.load_state_dict(case.new.state_dict())
    assert same(run(new, case.base), run(case.new, case.base))


@pytest.mark.parametrize(
    "first, second", [pytest.param(*pair, id="-".join(pair)) for pair in itertools.permutations(shipped("passes"), 2)]
)
def test_two_passes_on_one_model_work_or_say_why_not(first, second):
    base = small.vit()
    passes = [fxplug.load_pass(name, **TOGETHER.get(name, {})) for name in (first, second)]
    if (first, second) in REFUSED:
        with pytest.raises(fxplug.FxplugError, match=REFUSED[first, second]) as caught:
            fxplug.apply(base.gm, *passes)
        assert f"{second}: " in str(caught.value)
        return
    new = fxplug.apply(base.gm, *passes)
    report = fxplug.verify(base.gm, new, base.args, compile=False)
    assert report.ok
    case = Case(f"{first}-{second}", base, passes[1], new)
    case.new.train()
    torch.manual_seed(0)
    steps(case, torch.optim.SGD([p for k, p in new.named_parameters() if k.startswith((first, second))], 0.1), 1)
    with torch.no_grad():
        one_by_one = fxplug.apply(fxplug.apply(base.gm, passes[0]), passes[1])
    assert fxplug.show(one_by_one) == fxplug.show(new.eval())
