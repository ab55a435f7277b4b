"""Live merge, and the lowerings together: the same results, switched without a recompile, saved as what they came from."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import small
import torch
import unets
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fxplug
from fxplug.lowerings.lowering import undo_lowering
from fxplug.lowerings.merging.fold import merge
from fxplug.lowerings.merging.live import merge_live
from fxplug.lowerings.pipeline import form_table, list_layer_forms, lower

LAYERS = {"table": (11, 12), "conv1": (8, 12, 3), "conv2": (8, 2, 3, 3), "conv3": (4, 1, 2, 2, 2), "out": (5, 4)}


@cache
def slots(name="lora"):
    """One layer of each kind with slots; never written, so that tests may share it."""
    return fxplug.apply(small.layers().gm, fxplug.load_pass(name, rank=4, slots=3))


def adapter(seed, rank=2, layers=tuple(LAYERS)):
    """A state dict in PEFT's layout."""
    gen = torch.Generator().manual_seed(seed)
    found = {}
    for path in layers:
        out, inner, *kernel = LAYERS[path]
        if path == "table":  # the file of an Embedding has its halves the other way round
            found[f"base_model.model.{path}.lora_embedding_A"] = torch.randn(rank, out, generator=gen)
            found[f"base_model.model.{path}.lora_embedding_B"] = torch.randn(inner, rank, generator=gen)
            continue
        found[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank, inner, *kernel, generator=gen) * 0.3
        found[f"base_model.model.{path}.lora_B.weight"] = torch.randn(out, rank, *[1] * len(kernel), generator=gen) * 0.3
    return found


def loaded(gm):
    gm.adapters.load("ink", adapter(1))
    gm.adapters.load("film", adapter(2, 4, ["conv1", "out"]))
    return gm


@torch.no_grad()
def run(gm, base=None):
    base = base or small.layers()
    return gm(*base.args, **base.kwargs)


def error(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def own(gm):
    """A module of the same graph with slots of its own, as `gm`'s are shared by tests."""
    return copy.deepcopy(gm)


CHOICES = ["ink", {"ink": 0.8, "film": -0.3}, "film", None, {"film": 2.0}]


def test_a_live_merge_is_switched_without_recompiling_and_has_the_bits_of_a_merge():
    base = small.layers()
    gm = loaded(own(slots()))
    made = merge_live(gm)
    assert made.code == base.gm.code
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    for choice in CHOICES:
        made.adapters.use(choice)
        gm.adapters.use(choice)
        ours = compiled(*base.args)
        assert error(ours, run(gm)) < 1e-5
        assert torch.equal(ours, run(merge(gm)))
    small.load_and_use(made, adapter(3, 1), "third")
    assert error(compiled(*base.args), run(base.gm)) > 1e-2
    made.adapters.unload("third")
    assert torch.equal(compiled(*base.args), run(base.gm))
    assert counter.frame_count == 1


def test_a_switch_makes_only_those_weights_anew_that_it_concerns():
    made = merge_live(loaded(own(slots())))
    weights = {name: p for name, p in made.named_parameters() if name.rpartition(".")[0] in LAYERS}

    def written(change):
        before = {name: p._version for name, p in weights.items()}
        change()
        return {name.partition(".")[0] for name, p in weights.items() if p._version != before[name]}

    assert written(lambda: made.adapters.use("film")) == {"conv1", "out"}
    assert written(lambda: made.adapters.use("film")) == set()
    assert written(lambda: made.adapters.use({"film": 1.0, "ink": 0.5})) == set(LAYERS)
    assert written(lambda: made.adapters.load("third", adapter(3))) == set()
    assert written(lambda: made.adapters.use("film")) == set(LAYERS)
    assert written(lambda: made.adapters.load("film", adapter(4, 1, ["out"]), replace=True)) == {"conv1", "out"}


def test_no_drift_and_no_base_weight_is_written():
    gm = loaded(own(slots())).bfloat16()
    before = {name: p.clone() for name, p in gm.named_parameters()}
    made = merge_live(gm)
    storages = {name: p.data_ptr() for name, p in made.named_parameters()}
    made.adapters.use({"ink": 0.7, "film": -0.2})
    wanted = {name: p.clone() for name, p in made.named_parameters()}
    for index in range(100):
        made.adapters.use([{"ink": 0.1 * index}, "film", None, {"film": -1.0, "ink": 3.0}][index % 4])
    made.adapters.use({"ink": 0.7, "film": -0.2})
    assert all(torch.equal(p, wanted[name]) for name, p in made.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in gm.named_parameters())
    assert storages == {name: p.data_ptr() for name, p in made.named_parameters()}
    merged = merge(undo_lowering(made))
    assert all(torch.equal(p, made.get_parameter(name)) for name, p in merged.named_parameters())


def test_entries_for_each_sample_are_refused_and_change_nothing():
    made = merge_live(loaded(own(slots())))
    made.adapters.use("film")
    before = run(made)
    with pytest.raises(fxplug.SpecError, match="per-sample adapters are not supported with merge='live'"):
        made.adapters.use(["ink", "film"])
    assert made.adapters.active == {"film": 1.0}
    assert torch.equal(run(made), before)
    made.adapters.use(["ink", "ink"])
    assert error(run(made), before) > 1e-3


@pytest.mark.parametrize("name", ["lora_weight", "loha", "lokr"])
def test_what_maps_a_parameter_is_merged_live(name):
    gm = own(slots(name))
    with torch.no_grad():
        for p in gm.get_submodule(name).parameters():
            p.normal_(std=0.1)
    made = merge_live(gm)
    for weights in ([1.0, 0.0, 0.0], [0.5, -2.0, 0.0], [0.0, 0.0, 0.0]):
        for module in (gm, made):
            table = module.get_submodule(f"{name}.gates.table")
            with module.adapters.change():
                table.weights.copy_(torch.tensor(weights).expand_as(table.weights))
        assert torch.equal(run(made), run(gm))
    assert made.code == small.layers().gm.code


def test_a_live_merge_beside_other_passes_and_in_both_modes():
    base = small.vit()
    passes = [fxplug.load_pass("lora", at="**.qkv", rank=2, slots=2), fxplug.load_pass("adapter", at="**.attn.proj")]
    gm = fxplug.apply(base.gm, *passes, fxplug.load_pass("loha", at="**.qkv", rank=2))
    rank = torch.randn(2, 192), torch.randn(576, 2)
    file = {"blocks.0.attn.qkv.lora_A.weight": rank[0], "blocks.0.attn.qkv.lora_B.weight": rank[1]}
    with torch.no_grad():
        for p in [*gm.adapter.parameters(), *gm.loha.parameters()]:
            p.add_(torch.randn_like(p) * 0.02)
    made = merge_live(gm)
    for module in (gm, made):
        module.adapters.load("ink", file)
        module.adapters.use({"ink": 0.1})
    assert "lora" not in made.code and "adapter" in made.code and "loha" in made.code
    for mode in (False, True):
        torch.manual_seed(1)
        theirs = run(gm.train(mode), base)
        torch.manual_seed(1)
        assert error(run(made.train(mode), base), theirs) < 1e-5
    with pytest.raises(fxplug.SpecError, match="no pass here has slots"):
        merge_live(fxplug.apply(base.gm, passes[1]))


def test_a_lowered_module_is_saved_as_what_it_came_from(tmp_path):
    gm = loaded(own(slots()))
    gm.adapters.use("ink")
    fused = lower(gm)
    assert fused.meta["source"] is gm
    again = fxplug.load(fxplug.save(fused, tmp_path / "fused"))
    assert torch.equal(run(again), run(gm)) and again.adapters.names == ["ink", "film"]
    made = lower(gm, merge="live", fuse=None)
    small.load_and_use(made, adapter(3), "third")
    again = fxplug.load(fxplug.save(made, tmp_path / "live"))
    assert again.adapters.names == ["ink", "film", "third"] and gm.adapters.names == ["ink", "film"]
    assert torch.equal(run(merge_live(again)), run(made))
    other = copy.deepcopy(made)
    other.adapters.use("film")
    assert error(run(other), run(made)) > 1e-3 and made.adapters.active == {"third": 1.0}
    assert undo_lowering(other).adapters.active == {"film": 1.0}
    merged = lower(gm, merge="fold")
    again = fxplug.load(fxplug.save(merged, tmp_path / "merged"))
    assert "passes" not in again.meta and error(run(again), run(gm)) < 1e-5


def test_a_live_merge_of_many_layers_is_copied():
    """What it keeps of its plan are names: nodes would bring the graph, and copy it node by node."""
    unet = small.seeded(unets.sd15_model).eval()
    gm = fxplug.trace(unet, kwargs=small.seeded(lambda: unets.inputs(unet)))
    made = lower(fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=2, slots=2, train=False)), merge="live", fuse=None)
    copied = copy.deepcopy(made)
    assert copied.state_dict().keys() == made.state_dict().keys()


def test_every_way_of_merging_gives_the_same_results():
    gm = loaded(own(slots()))
    gm.adapters.use({"ink": 0.5, "film": 1.5})
    wanted = run(gm)
    for way in (None, "fold", True, "live", "auto"):
        for fuse in (None, "auto"):
            assert error(run(lower(gm, merge=way, fuse=fuse)), wanted) < 1e-5, (way, fuse)
    assert lower(gm, fuse=None) is gm


class Cell(nn.Module):
    """Three layers."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.out(self.q(x).softmax(-1) * self.k(x).tanh()).relu().sin().cos()


def cells():
    return small.traced(small.seeded(lambda: nn.Sequential(*(Cell() for _ in range(6)))).eval(), torch.randn(3, 8))


@pytest.mark.parametrize("way", [None, "live"])
def test_all_lowerings_together_are_switched_without_recompiling(way, tmp_path):
    """The cells are compiled once."""
    base = cells()
    gm = fxplug.apply(base.gm, fxplug.load_pass("lora", rank=2, slots=2))
    made = lower(gm, merge=way, outline=["*"])
    assert len(made.meta["nested"]["nested.Cell"]) >= 5
    forms = list_layer_forms(made)
    assert len(forms) == 18 and len({form for path, form in forms.items() if path.endswith("out")}) == 1
    if way == "live":
        assert form_table(made).startswith("18 live merge\n")
    shapes = {"1.q.lora_A": (2, 8), "1.q.lora_B": (16, 2), "4.k.lora_A": (2, 8), "4.k.lora_B": (16, 2)}
    file = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    for module in (gm, made) if made.meta.get("banks") else (gm,):
        module.adapters.load("ink", file)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    programs = set()
    for choice in ({"ink": 0.5}, None, "ink"):
        gm.adapters.use(choice)
        made.adapters.use(choice)
        wanted = run(gm, base)
        assert error(run(compiled, base), wanted) < 1e-5 and error(run(made, base), wanted) < 1e-5
        programs.add(counter.frame_count)
    assert error(run(base.gm, base), wanted) > 1e-3
    kinds = len(made.meta["nested"])
    assert programs == {kinds}, "each kind of region is one program, whatever is in use"
    assert torch.equal(run(fxplug.load(fxplug.save(made, tmp_path)), base), wanted)


def test_outline_of_what_has_nothing_repeated():
    gm = slots()
    assert "nested" not in lower(gm, fuse=None, outline="auto").meta
    with pytest.raises(fxplug.MatchError, match="no repeated regions"):
        lower(gm, outline=True)


def test_the_default_of_a_served_module():
    """Slots live, the others folded where they are functions of weights; samples with entries of their own stay un-merged."""
    passes = [fxplug.load_pass("lora", at="out", rank=4, slots=3), fxplug.load_pass("loha", at=["conv1", "out"], rank=2)]
    gm = fxplug.apply(small.layers().gm, *passes, fxplug.load_pass("adapter", at="conv3"))
    made = lower(gm, merge="auto", fuse=None)
    assert [e["name"] for e in made.meta["passes"]] == ["lora", "adapter"]
    forms = list_layer_forms(made)
    assert forms == {"conv1": "merged", "out": "live merge", "conv3": "as its pass put it"}
    assert form_table(made).splitlines()[0] == "1 live merge; 1 as its pass put it; 1 merged"
    gm.adapters.load("ink", adapter(1, layers=["out"]))
    gm.adapters.use(["ink", None])
    mixed = lower(gm, merge="auto", fuse=None)
    assert "loha" not in mixed.code and "lora" in mixed.code
    assert error(run(mixed), run(gm)) < 1e-5
    assert form_table(small.layers().gm) == "no layer has a block of a pass\n"


def test_wrong_calls_are_told():
    gm = slots()
    for options, found in (
        ({"merge": "liev"}, "merge='liev' is not known .did you mean 'live'"),
        ({"merge": 1}, "merge=1 is not known"),
        ({"merge": "remerge"}, "merge='remerge' is not known"),
        ({"fuse": "fast"}, "fuse must be one of .*, not 'fast'"),
        ({"fuse": "remerge:blas"}, "fuse must be one of .*, not 'remerge:blas'"),
        ({"outline": "blocks.*"}, "outline must be None, 'auto' or a list"),
    ):
        with pytest.raises(fxplug.SpecError, match=found):
            lower(gm, **options)
    for call in (lower, merge, merge_live):
        with pytest.raises(fxplug.SpecError, match="lowered already: .* takes the one it was made from"):
            call(lower(gm))
        with pytest.raises(fxplug.SpecError, match="takes a traced module, not Linear"):
            call(nn.Linear(2, 2))


@torch.no_grad()
def test_what_a_state_dict_loads_is_not_taken_for_what_was_there():
    merged = merge_live(loaded(own(slots())))
    merged.adapters.use("film")
    state, film = copy.deepcopy(merged.state_dict()), run(merged)
    merged.adapters.use("ink")
    ink = run(merged)
    merged.load_state_dict(state)
    assert torch.equal(run(merged), film)
    merged.adapters.use("ink")
    assert torch.equal(run(merged), ink)


@torch.no_grad()
@pytest.mark.parametrize("how", [{"fuse": "fused"}, {"merge": "live"}])
def test_a_copy_of_a_lowered_module_is_saved_with_its_own_tensors(how, tmp_path):
    copied = copy.deepcopy(lower(loaded(own(slots())), **how))
    for name, tensor in copied.named_parameters():
        if not name.startswith("lora."):
            tensor.mul_(1.5)
    copied.adapters.use("ink")
    copied.adapters.unload("film")
    expected = run(copied)
    again = fxplug.load(fxplug.save(copied, tmp_path / "out"))
    assert again.adapters.names == ["ink"] and again.adapters.active == {"ink": 1.0}
    again.adapters.use("ink")
    if "merge" not in how:
        assert error(run(again), expected) < 1e-5


@torch.no_grad()
def test_a_live_merge_made_in_inference_mode_is_switched_outside():
    gm = loaded(own(slots()))
    with torch.inference_mode():
        merged = merge_live(gm)
        merged.adapters.use("ink")
    merged.adapters.use("film")
    gm.adapters.use("film")
    assert error(run(merged), run(gm)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("options", [{"fuse": "fused"}, {"merge": "live"}, {"merge": "fold", "fuse": "blas"}])
def test_a_pass_on_a_lowered_module_goes_to_what_it_was_made_from_and_that_is_lowered_again(options, tmp_path):
    gm, other = loaded(own(slots())), fxplug.load_pass("lora", name="other", at="out", rank=2)
    gm.adapters.use("ink")
    lowered = lower(gm, **{"fuse": None, **options})
    made, both = fxplug.apply(lowered, other), fxplug.apply(gm, other)
    for module in (made.meta["source"], both):
        torch.nn.init.constant_(module.get_parameter("other.out.Lora.up.weight"), 0.1)
        torch.nn.init.constant_(module.get_parameter("other.out.Lora.down.weight"), 0.1)
    assert error(run(made), run(both)) < 1e-5 < error(run(made), run(gm))
    assert torch.equal(run(lowered), run(lower(gm, **{"fuse": None, **options})))
    fxplug.save(made, tmp_path / "saved")
    assert "other" in [entry["name"] for entry in fxplug.load(tmp_path / "saved").meta["passes"]]


def test_what_was_made_of_a_lowered_module_is_not_lowered_again_without_it():
    base, other = unets.sd15(), fxplug.load_pass("lora", name="other", at="**.attn1.to_v", rank=2)
    network = small.seeded(lambda: unets.control(base.model))
    passes = fxplug.load_pass("controlnet", network=network), fxplug.load_pass("lora", at="**.attn1.to_q", rank=2)
    lowered = lower(fxplug.apply(base.gm, *passes), fuse="fused")
    assert lowered.bind() is lowered and fxplug.apply(lowered, other).meta["derivation"] == lowered.meta["derivation"]
    for made in (fxplug.pipeline_part(lowered), lowered.bind(cond=torch.zeros(2, 3, 128, 128))):
        with pytest.raises(fxplug.SpecError, match="this module is lowered: apply passes to the module it was made from"):
            fxplug.apply(made, other)
