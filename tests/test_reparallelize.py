"""Passes on a module that is split: they go to what it was made from, and that is split again; no plan hangs on weights."""

from __future__ import annotations

import gc
import threading
import weakref

import processes
import pytest
import small
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core.ir.comparison import measure_difference
from fxplug.core.ir.graph import insert
from fxplug.parallel.runtime.pretended import run_simulated

CONDITION = {
    "name": "condition",
    "inputs": {"x": {"shape": ["n", "m", "c"]}, "cond": {"shape": ["n", "m", "c"]}, "strength": {"shape": []}},
    "rules": [{"match": {"path": "up"}, "place": "before", "use": "fxplug.blocks:Add", "args": ["x", "cond", "strength"]}],
}
WAYS = [{"batch": 2}, {"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"batch": 2, "tensor": 2}]
each_way = sweep("ways", WAYS, 0, 3, ids=str)  # samples and tensors are split in two ways of their own; the rest is as these


class Block(nn.Module):
    """Attention and a branch whose last layer is zeros when it is new."""

    def __init__(self, zeros=False):
        super().__init__()
        self.qkv, self.out, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        if zeros:
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)
            nn.init.zeros_(self.out.bias)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        return x + self.down(F.gelu(self.up(x)))


def x(batch=4, tokens=12):
    return torch.randn(batch, tokens, 16, generator=torch.Generator().manual_seed(0))


def traced(**options):
    return fxplug.trace(small.seeded(lambda: Block(**options)).eval(), x())


def split(gm, ways):
    return fxplug.parallelize(gm, fxplug.parallel_plan(gm, x(), **ways, check=False))


def lora(name="lora", **options):
    return fxplug.load_pass("lora", name=name, at="**", rank=2, **options)


def fill(gm, name):
    with torch.no_grad():
        for key, p in gm.named_parameters():
            if key.startswith(f"{name}."):
                p.normal_(generator=torch.Generator().manual_seed(len(key)))


def same(gm, new, ways, value=None):
    value = x() if value is None else value
    with torch.no_grad():
        want = gm(value)
        for found in run_simulated(ways, lambda rank: new(value)):
            assert measure_difference(found, want).times <= 1


@pytest.mark.slow
@each_way
def test_a_pass_on_what_is_split_is_that_pass_split(ways):
    gm = traced()
    new = split(gm, ways)
    graph = str(new.graph)
    for name in ("lora", "second"):
        gm, new = fxplug.apply(gm, lora(name)), fxplug.apply(new, lora(name))
        fill(gm, name), fill(new, name)
        same(gm, new, new.meta["plan"].ways)
    names = [entry["name"] for entry in new.meta["passes"]]
    assert names[:2] == ["lora", "second"] and len(names) == 2 + len(ways)
    assert str(split(traced(), ways).graph) == graph


@pytest.mark.slow
@each_way
def test_what_is_split_without_a_pass_is_split_again(ways):
    gm = fxplug.apply(traced(), lora(), lora("second"))
    fill(gm, "lora"), fill(gm, "second")
    new = fxplug.remove(split(gm, ways), "lora")
    same(fxplug.remove(gm, "lora"), new, new.meta["plan"].ways)
    assert [entry["name"] for entry in new.meta["passes"]][0] == "second"


def test_weights_and_adapters_are_those_that_the_split_module_has():
    gm = split(fxplug.apply(traced(), lora(slots=2)), {"batch": 2})
    one = fxplug.apply(traced(), lora(slots=2), lora("second"))
    gm.adapters.load("a", adapter())
    gm.half().float()  # into other tensors
    one.adapters.load("a", adapter())
    one.half().float()
    new = fxplug.apply(gm, lora("second"))
    for module in (new, one):
        fill(module, "second")
        module.adapters.use("a")
    same(one, new, new.meta["plan"].ways)


def test_marks_of_a_step_cache_go_into_the_split_graph_itself(tmp_path):
    """As the model of a module that was loaded is not there, and marks do not change a value."""
    fxplug.save(split(traced(), {"batch": 2}), tmp_path / "new")
    rule = {"match": {"path": "up"}, "use": "fxplug.blocks:Gauge", "args": ["y", "y"]}
    marks = {"name": "marks", "rules": [rule]}
    new = fxplug.apply(fxplug.load(tmp_path / "new"), fxplug.load_pass(marks))
    assert [entry["name"] for entry in new.meta["passes"]] == ["batch_parallel", "marks"]


def test_passes_of_a_split_module_are_merged_by_name():
    """What splits it is no function of weights."""
    gm = fxplug.apply(traced(), lora())
    fill(gm, "lora")
    new = split(gm, {"batch": 2})
    with pytest.raises(fxplug.SpecError, match="batch_parallel cannot be merged; merge the others: passes=..lora"):
        fxplug.merge(new)
    same(gm, fxplug.merge(new, passes=["lora"]), new.meta["plan"].ways)


def test_adapters_of_a_split_module_are_saved_by_name(tmp_path):
    gm = fxplug.apply(traced(), lora())
    new = split(gm, {"batch": 2})
    fill(gm, "lora")
    with pytest.raises(fxplug.ArtifactError, match="batch_parallel has a Split there, which no adapter format can represent"):
        fxplug.save_adapter(new, tmp_path / "all.safetensors", as_="kohya")
    for name, module in {"one": gm, "split": new}.items():
        fxplug.save_adapter(module, tmp_path / f"{name}.safetensors", passes=["lora"], as_="kohya")
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "split"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("check", [False, True])
def test_a_plan_is_checked_again_where_the_first_one_was(check):
    plan = fxplug.parallel_plan(traced(), x(), batch=2, check=check)
    new = fxplug.apply(fxplug.parallelize(traced(), plan), lora())
    assert (new.meta["plan"].away is not None) is check


def process(rank):
    gm, second = fxplug.apply(traced(), lora()), lora("second")
    one = fxplug.apply(gm, second)
    new = fxplug.apply(fxplug.parallelize(gm, fxplug.parallel_plan(gm, x(), batch=2)), second)
    for name in ("lora", "second"):
        fill(one, name), fill(new, name)
    with torch.no_grad():
        assert measure_difference(new(x()), one(x())).times <= 1
    gm = traced()
    whole = weakref.ref(gm.get_submodule("up").weight)
    tensor = split(gm, {"tensor": 2})
    del gm
    gc.collect()
    assert whole() is None  # each process has only its part
    with pytest.raises(fxplug.SpecError, match="keeps only its part of some weights"):
        fxplug.apply(tensor, second)


@pytest.mark.slow
def test_two_processes_take_a_pass_afterwards():
    processes.group(process)


def adapter():
    gm = fxplug.apply(traced(), lora())
    fill(gm, "lora")
    return {key: value for key, value in gm.state_dict().items() if key.startswith("lora.")}


@pytest.mark.slow
@each_way
def test_adapters_for_each_sample_that_are_loaded_into_what_is_split(ways):
    """When the plan was made the slots were empty: what hangs on their rows could not be seen from the values."""
    gm = fxplug.apply(traced(), lora(slots=2))
    new = split(gm, ways)
    new.adapters.load("a", adapter())  # into the slots of both: `parallelize` copies no weights
    new.adapters.use(["a", None, "a", None])
    same(gm, new, new.meta["plan"].ways)


@pytest.mark.slow
@each_way
def test_a_plan_for_weights_that_are_zeros_holds_for_others(ways):
    """A bias that two processes add, or a layer that only one of them computes, shows with other weights only."""
    gm = traced(zeros=True)
    new = split(gm, ways)
    assert str(new.graph) == str(split(traced(), ways).graph)
    with torch.no_grad():
        for p in gm.parameters():
            p.normal_(generator=torch.Generator().manual_seed(p.numel()))
    same(gm, new, new.meta["plan"].ways)


def test_what_cannot_be_split_again_is_refused(tmp_path):
    new = split(traced(), {"batch": 2})
    fxplug.save(new, tmp_path / "new")
    with pytest.raises(fxplug.SpecError, match="split over processes and was loaded, or changed.*apply the pass to that"):
        fxplug.apply(fxplug.load(tmp_path / "new"), lora())
    insert(new.graph, "call_function", torch.neg, (next(iter(new.graph.nodes)),), after=next(iter(new.graph.nodes)))
    with pytest.raises(fxplug.SpecError, match="split over processes and was loaded, or changed.*apply the pass to that"):
        fxplug.apply(new, lora())
    with pytest.raises(fxplug.SpecError, match="split over processes and was loaded, or changed.*or remove it of that"):
        fxplug.remove(fxplug.load(tmp_path / "new"), "lora")
    with pytest.raises(fxplug.SpecError, match="features: this module was lowered or split"):
        fxplug.features(new, "up")
    with pytest.raises(fxplug.SpecError, match="cannot be split as before: .*'cond'.*make the plan of the module that"):
        fxplug.apply(split(traced(), {"batch": 2}), fxplug.load_pass(CONDITION))


class Kept(nn.Linear):
    """A layer whose bias is zeros, with an attribute that cannot be copied."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lock = threading.Lock()
        nn.init.zeros_(self.bias)


def test_a_layer_that_cannot_be_copied_is_planned():
    def make():
        block = Block()
        block.up = Kept(16, 32)
        return block

    gm = fxplug.trace(small.seeded(make).eval(), x(), leaf=["up"])
    new = split(gm, {"batch": 2})
    same(gm, new, new.meta["plan"].ways)
    assert not gm.get_submodule("up").bias.any()  # only the trials took other values
