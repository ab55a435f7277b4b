"""Merge and unmerge: the same numbers without the adapters, the model's own graph, and no bit of a base weight written."""

from __future__ import annotations

from functools import cache

import pytest
import small
import torch
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.lowerings.merging.fold import merge, unmerge


def loud(gm):
    """Adapters that are not neutral any more, so that a lost one would show."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for entry in gm.meta["passes"]:
            for p in gm.get_submodule(entry["name"]).parameters():
                p.add_(torch.randn_like(p) * 0.1)
    return gm


def put(base, *names, **options):
    """The passes of these names, all with the same parameters; `lora:second` is a lora named second."""
    passes = [fxplug.load_pass(n.partition(":")[0], **{"at": "**", **options}) for n in names]
    named = [fxplug.Pass(n.partition(":")[2] or p.name, p.rules, params=p.params) for n, p in zip(names, passes, strict=True)]
    return loud(small.seeded(lambda: fxplug.apply(base.gm, *named)))


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


@torch.no_grad()
def error(ours, theirs, base):
    a, b = (first(m(*base.args, **base.kwargs)) for m in (ours, theirs))
    return ((a - b).abs().max() / b.abs().max()).item()


def hold(gm, base, passes=None, tolerance=1e-5):
    """Merged gives what un-merged gives, which is not what the base gives; and nothing of `gm` is written."""
    before = {k: v.clone() for k, v in gm.state_dict().items()}
    merged = merge(gm, passes)
    assert error(merged, gm, base) < tolerance
    assert error(base.gm, gm, base) > 1e-4
    assert all(torch.equal(v, before[k]) for k, v in gm.state_dict().items())
    assert unmerge(merged) is gm
    return merged


def hold_gone(merged, base):
    """No trace: the graphs, modules and record of the model that no pass was applied to."""
    for mode, graph in base.gm.graphs.items():
        assert str(merged.graphs[mode]) == str(graph)
        assert not any("pass" in n.meta for n in merged.graphs[mode].nodes)
    assert merged.code == base.gm.code
    assert list(merged.state_dict()) == list(base.gm.state_dict())
    assert "passes" not in merged.meta


MAPS = ["loha", "lokr", "lora_weight", "dora", "weight_norm", "spectral_norm", "bitfit"]


@pytest.mark.parametrize("name", MAPS)
def test_what_maps_a_parameter_is_folded_bit_for_bit(name):
    base = small.layers()
    gm = loud(fxplug.apply(base.gm, fxplug.load_pass(name)))
    hold_gone(hold(gm, base, tolerance=1e-12), base)


@sweep("name", ["layers", "vit", "unet", "lite"], "layers", "vit")
def test_low_rank_updates_are_folded_beside_every_kind_of_layer(name):
    """Linear, convolutions in groups and with padding of their own, Embedding; one graph and two."""
    base = getattr(small, name)()
    hold_gone(hold(put(base, "lora", rank=2), base), base)


def test_passes_on_one_layer_are_folded_in_their_order():
    base = small.layers()
    hold_gone(hold(put(base, "lora", "loha"), base), base)
    hold_gone(hold(put(base, "loha", "lora", "loha:two"), base), base)
    scaled = [put(base, *names) for names in (["lora", "ssf"], ["ssf", "lora"], ["lora", "dora", "ssf", "lora:two"])]
    assert all(hold(gm, base) for gm in scaled)


def test_scales_before_and_behind_layers_and_norms_are_folded():
    base = small.vit()
    passes = [
        fxplug.load_pass("ia3", at="**.attn.qkv", feedforward="**.mlp.fc2"),
        fxplug.load_pass("lora", rank=2),
        fxplug.load_pass("ssf"),
    ]
    hold_gone(hold(loud(fxplug.apply(base.gm, *passes)), base), base)


class Norms(nn.Module):
    """Norms called whole and written out; with and without a weight, a bias."""

    def __init__(self):
        super().__init__()
        self.batch, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.layer, self.root = nn.LayerNorm(6, bias=False), nn.RMSNorm(6)
        self.own = nn.Parameter(torch.rand(6))

    def forward(self, x):
        x = self.group(self.batch(x)) + nn.functional.batch_norm(x, None, None, self.batch.weight, training=True)
        return self.root(self.layer(x)) + nn.functional.rms_norm(x, (6,), self.own)


def behind(block, path):
    """A pass that puts a block behind one layer, on the last dimension."""
    match = fxplug.Match(path=path)
    return fxplug.Pass("behind", [fxplug.Rule(match, use=f"fxplug.{block}", args=["y"], options={"dim": -1})])


def test_scales_of_norms_of_every_kind_are_folded():
    base = small.traced(small.seeded(Norms).eval(), torch.randn(2, 4, 5, 6))
    hold_gone(hold(put(base, "scale", at=["group", "layer"]), base), base)
    hold_gone(hold(put(base, "ssf", at="group"), base), base)
    hold_gone(hold(loud(fxplug.apply(base.gm, behind("blocks:Scale", "root"))), base), base)
    assert "layer.bias" in hold(loud(fxplug.apply(base.gm, behind("adapters:Ssf", "layer"))), base).state_dict()
    for gm, found in (
        (fxplug.apply(base.gm, behind("adapters:Ssf", "root")), "'root' adds no bias"),
        (fxplug.apply(base.gm, behind("blocks:Scale", "group")), "scales dimension -1, not the layer's channels"),
        (put(base, "ssf", at="batch"), "'batch.weight' is also read by 'batch_norm' without it"),
    ):
        with pytest.raises(fxplug.SpecError, match=found):
            merge(gm)


def test_an_update_with_a_bias_gives_one_to_a_layer_that_has_none():
    base = small.layers()
    with_bias = fxplug.load_pass("lora", bias=True)
    for passes in ([with_bias], [fxplug.load_pass("loha"), with_bias]):
        merged = hold(loud(fxplug.apply(base.gm, *passes)), base)
        assert set(merged.state_dict()) - set(base.gm.state_dict()) == {"conv3.bias"}
        assert merged.code == base.gm.code


def test_one_of_two_passes():
    base = small.layers()
    gm = put(base, "lora", "loha")
    for name, kept in (("lora", "loha"), ("loha", "lora")):
        merged = hold(gm, base, [name])
        assert [e["name"] for e in merged.meta["passes"]] == [kept]
        assert not any(key.startswith(f"{name}.") for key in merged.state_dict())
        again = merge(merged)
        hold_gone(again, base)
        assert error(again, gm, base) < 1e-5
        assert unmerge(unmerge(again)) is gm


def test_a_second_pass_finds_its_layer_behind_what_stayed():
    """The first update goes; a scale that comes later still acts on the result of the second."""
    base = small.layers()
    merged = merge(put(base, "lora", "lora:two"), ["lora"])
    scale = fxplug.load_pass("scale", at="out")
    ours = loud(fxplug.apply(merged, scale))
    theirs = loud(fxplug.apply(put(base, "lora", "lora:two"), scale))
    with torch.no_grad():
        ours.scale.out.Scale.weight.copy_(theirs.scale.out.Scale.weight)
        ours.two.load_state_dict(theirs.two.state_dict())
        theirs.lora.load_state_dict(put(base, "lora", "lora:two").lora.state_dict())
    assert error(ours, theirs, base) < 1e-5


@pytest.mark.slow
def test_a_thousand_adapters_leave_no_drift():
    base = half(8)
    gm = fxplug.apply(base.gm, fxplug.load_pass("lora", rank=2))
    before = {k: v.clone() for k, v in base.gm.state_dict().items()}
    blocks = gm.lora
    for _ in range(1000):
        with torch.no_grad():
            for p in blocks.parameters():
                p.normal_()
        gm = unmerge(merge(gm))
    assert all(torch.equal(v, before[k]) for k, v in base.gm.state_dict().items())
    assert all(torch.equal(v, before[k]) for k, v in gm.state_dict().items() if k in before)


def test_a_half_precision_weight_is_rounded_once():
    base = half(64)
    gm = put(base, "lora", "lora:two", "loha")
    exact = {k: v.double() for k, v in gm.state_dict().items()}
    wanted = exact["0.weight"]
    for name in ("lora", "two"):
        block = f"{name}.0.Lora"
        wanted = wanted + exact[f"{block}.scale"] * exact[f"{block}.up.weight"] @ exact[f"{block}.down.weight"]
    loha = {k.rpartition(".")[2]: v for k, v in exact.items() if k.startswith("loha.")}
    product = (loha["hada_w1_a"] @ loha["hada_w1_b"]) * (loha["hada_w2_a"] @ loha["hada_w2_b"])
    wanted = wanted + loha["scale"] * product
    merged = merge(gm)
    assert merged[0].weight.dtype == torch.bfloat16
    assert (merged[0].weight != wanted.to(torch.bfloat16)).float().mean() < 1e-3


def test_a_merged_weight_lies_in_memory_as_the_base_does():
    model = small.seeded(lambda: nn.Sequential(nn.Conv2d(4, 6, 3))).to(memory_format=torch.channels_last)
    base = small.traced(model, torch.randn(2, 4, 7, 7))
    merged = hold(put(base, "lora", rank=2), base)
    assert merged[0].weight.stride() == base.gm[0].weight.stride() != merged[0].weight.contiguous().stride()


def half(width):
    model = small.seeded(lambda: nn.Sequential(nn.Linear(width, width))).bfloat16()
    return small.traced(model, torch.randn(2, width, dtype=torch.bfloat16))


class Tied(nn.Module):
    """A table that is also the output layer, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.table, self.head, self.twice = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False), nn.Linear(6, 6)
        self.head.weight = self.table.weight

    def forward(self, words):
        return self.head(self.twice(self.twice(self.table(words)).relu()))


@cache
def tied():
    return small.traced(small.seeded(Tied).eval(), torch.arange(6).reshape(2, 3))


def test_a_tied_weight_is_changed_where_the_pass_is_and_a_layer_called_twice_is_changed_once():
    base = tied()
    merged = hold(put(base, "lora", at="head"), base)
    assert merged.table.weight is base.gm.table.weight
    assert not torch.equal(merged.head.weight, merged.table.weight)
    hold_gone(hold(put(base, "lora", at="twice"), base), base)
    hold_gone(hold(put(base, "loha", at="twice"), base), base)
    both = hold(put(base, "loha", at=["table", "head"]), base)
    assert both.table.weight is both.head.weight


class Reads(nn.Module):
    """A model whose own code reads the weight of a layer that it also calls."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.one(x), self.one.weight.to(x.dtype))


def test_what_cannot_be_folded_is_refused_with_the_reason():
    base = small.layers()
    gm = put(base, "lora", "adapter", at="out")
    found = r"adapter cannot be merged; merge the others: passes=\['lora'\]\n.*Adapter at 'out'"
    with pytest.raises(fxplug.SpecError, match=found):
        merge(gm)
    hold(gm, base, ["lora"])
    with pytest.raises(fxplug.SpecError, match="'out' cannot be merged into a weight: there is no layer with a weight"):
        merge(put(base, "adapter", "lora", at="out"), ["lora"])
    with pytest.raises(fxplug.SpecError, match="loha cannot be merged.*\n.*a block of another pass"):
        merge(put(base, "dora", "loha", at="out"), ["loha"])
    with pytest.raises(fxplug.SpecError, match="'twice.weight' is also read by 'twice' without it"):
        merge(put(tied(), "lora", at="twice@1"))
    reads = small.traced(Reads().eval(), torch.randn(2, 4))
    with pytest.raises(fxplug.SpecError, match="'one.weight' is also read by '.*' without it"):
        merge(put(reads, "lora", at="one"))


@pytest.mark.parametrize("name", ["lora", "lora_weight", "loha", "lokr"])
def test_with_slots_the_adapters_in_use_are_folded(name):
    base = small.layers()
    gm = fxplug.apply(base.gm, fxplug.load_pass(name, rank=2, slots=3))
    table = gm.get_submodule(f"{name}.gates.table")
    with torch.no_grad():
        for p in gm.get_submodule(name).parameters():
            p.normal_(std=0.1)
        table.weights.copy_(torch.tensor([0.5, 0.0, -2.0]).expand_as(table.weights))
    hold_gone(hold(gm, base), base)
    table.entries.fill_(2)
    table.weights[1].zero_()
    with pytest.raises(fxplug.SpecError, match="samples of a batch use different adapters"):
        merge(gm)


@pytest.mark.parametrize("name", ["ssf", "scale", "lora"])
def test_what_stands_behind_a_bias_that_stays_mapped(name):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    x = torch.randn(3, 4)
    gm = fxplug.apply(fxplug.trace(model, x), fxplug.load_pass("bitfit", at="0"), fxplug.load_pass(name, at="0"))
    with torch.no_grad():
        for key, p in gm.named_parameters():
            if key.startswith(("bitfit.", f"{name}.")):
                p.normal_()
    if name == "lora":  # a sum, in whatever order
        assert torch.allclose(merge(gm, [name])(x), gm(x), atol=1e-6)
    else:
        with pytest.raises(fxplug.SpecError, match="after a block of another pass, which is not merged: merge that one too"):
            merge(gm, [name])
    assert torch.allclose(merge(gm)(x), gm(x), atol=1e-6)


def test_wrong_calls_are_told():
    base = small.layers()
    gm = put(base, "lora", at="out")
    with pytest.raises(fxplug.SpecError, match="no pass 'lor' is applied here .did you mean 'lora'"):
        merge(gm, ["lor"])
    with pytest.raises(fxplug.SpecError, match="nothing to merge"):
        merge(base.gm)
    with pytest.raises(fxplug.SpecError, match="write .'lora'."):
        merge(gm, "lora")
    with pytest.raises(fxplug.SpecError, match="passes is empty"):
        merge(gm, [])
    with pytest.raises(fxplug.SpecError, match="takes a traced module, not Linear"):
        merge(nn.Linear(2, 2))
    with pytest.raises(fxplug.SpecError, match="was not merged in this process"):
        unmerge(gm)
    with pytest.raises(fxplug.SpecError, match="loha was applied, which unmerge would lose"):
        unmerge(fxplug.apply(merge(gm), fxplug.load_pass("loha", at="out")))


def test_a_merged_module_is_saved_and_moved_as_any_other(tmp_path):
    base = small.traced(small.seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), torch.randn(2, 4))
    gm = put(base, "lora", at="0")
    merged = merge(gm)
    again = fxplug.load(fxplug.save(merged, tmp_path / "merged"))
    assert torch.equal(again(*base.args), merged(*base.args))
    assert "unmerged" not in again.meta and not list((tmp_path / "merged").glob("lora*"))
    before = gm[0].weight.clone()
    back = unmerge(merged.to(torch.float64))
    assert {p.dtype for p in back.parameters()} == {torch.float64}
    assert torch.equal(back[0].weight, before.double())
