"""Which places a match finds, and which it does not."""

from __future__ import annotations

import copy
import re

import pytest
import small
import torch
from torch import nn

import fxplug
from fxplug.blocks.base import Block
from fxplug.core.ir.graph import change, copy_graph, get_meta, insert, move, replace
from fxplug.core.ir.regions import Regions, find_regions
from fxplug.core.rewriter.matcher import find
from fxplug.core.spec.pass_file import Match, Pass, Rule


class Identity(Block):
    """Gives its first argument back."""

    neutral = True

    def forward(self, value, *rest):
        return value


class Attn(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask
        return self.proj(scores.softmax(-1) @ v)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attn(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm(x), mask=mask)
        return x + self.mlp(x), (x, {"deep": x * 2})


class Net(nn.Module):
    """Two layers, an activation called twice, a module nobody calls; a nested result."""

    def __init__(self, width=4):
        super().__init__()
        self.blocks = nn.ModuleList([Layer(width), Layer(width)])
        self.act, self.spare = nn.GELU(), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x, mask=None):
        kept = []
        for block in self.blocks:
            x, (early, _) = block(x, mask=mask)
            kept.append(early)
        return {"out": self.head(self.act(x)), "kept": (self.act(kept[0]), kept[1])}


@pytest.fixture(scope="module")
def net():
    return small.traced(small.seeded(Net), torch.randn(2, 5, 4), mask=torch.zeros(5, 5)).gm


def one(use=Identity, name="p", **keys):
    """A pass of one rule; the keys of its match are among those of the rule."""
    match = Match(**{k: keys.pop(k) for k in ("path", "module", "op", "within") if k in keys})
    return Pass(name, [Rule(match, use, **{"args": ["value"], **keys})])


def paths(gm, **keys):
    return [s.node or s.path for s in find(gm, one(expect=">=0", **keys))]


LINEARS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")] + ["head"]


@pytest.mark.parametrize(
    "match, found",
    [
        ({"path": "head"}, ["head"]),
        ({"path": "blocks.*", "place": "before"}, ["blocks.0", "blocks.1"]),
        ({"path": "blocks.*.attn"}, ["blocks.0.attn", "blocks.1.attn"]),
        ({"path": "blocks.{i}.attn"}, ["blocks.0.attn", "blocks.1.attn"]),
        ({"path": "**.attn"}, ["blocks.0.attn", "blocks.1.attn"]),
        ({"path": "**.head"}, ["head"]),
        ({"path": "blocks.0.**", "module": "Linear"}, LINEARS[:4]),
        ({"path": "re:.*(qkv|mlp)$"}, ["blocks.0.attn.qkv", "blocks.0.mlp", "blocks.1.attn.qkv", "blocks.1.mlp"]),
        ({"path": r"re:blocks\.(?P<n>\d)\.mlp$"}, ["blocks.0.mlp", "blocks.1.mlp"]),
        ({"path": ["head", "blocks.1.mlp"]}, ["head", "blocks.1.mlp"]),
        ({"path": ["head", "**", "head"], "module": "Linear"}, ["head", *LINEARS[:-1]]),
        ({"module": "Linear"}, LINEARS),
        ({"module": nn.Linear}, LINEARS),
        ({"module": Attn}, ["blocks.0.attn", "blocks.1.attn"]),
        ({"module": ["Attn", "LayerNorm"]}, [f"blocks.{i}.{n}" for i in (0, 1) for n in ("norm", "attn")]),
        ({"path": "act"}, ["act", "act@1"]),
        ({"path": "act@1"}, ["act@1"]),
        ({"path": "*@1"}, ["act@1"]),
        ({"op": "softmax"}, ["blocks_0_attn_softmax", "blocks_1_attn_softmax"]),
        ({"path": "blocks.1.**", "op": torch.softmax}, ["blocks_1_attn_softmax"]),
        ({"path": "**.attn", "op": ["chunk", "matmul"]}, None),
        ({"path": ":in.x", "place": "before"}, [""]),
        ({"path": "blocks.*:in.mask", "place": "before"}, ["blocks.0", "blocks.1"]),
        ({"path": "blocks.*:out[1][1].deep"}, ["blocks.0", "blocks.1"]),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_a_match_finds(net, match, found):
    if found is None:
        assert len(paths(net, **match)) == 6
    else:
        assert sorted(paths(net, **match)) == sorted(found)


@pytest.mark.parametrize(
    "match",
    [
        {"path": "hea"},
        {"path": "*.head"},
        {"path": "blocks.2"},
        {"path": "spare"},
        {"path": "re:attn$"},
        {"path": "Head"},
        {"module": "linear"},
        {"module": "Conv2d"},
        {"path": "head", "module": "LayerNorm"},
        {"op": "sigmoid"},
        {"path": "head", "op": "softmax"},
        {"path": "act@2"},
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_a_match_does_not_find(net, match):
    assert paths(net, **match) == []


def test_a_container_that_is_never_called_means_what_is_in_it(net):
    inner = ["blocks.0", "blocks.1"]
    assert paths(net, path="blocks", place="before") == paths(net, path="re:bl.*s$", place="before") == inner
    assert paths(net, path="blocks", module="Linear") == []
    linears = paths(net, path="blocks.**", module="Linear")
    assert paths(net, path="blocks", within="Linear") == linears and len(linears) == 8
    assert [site.path for site in find(net, one(path=["blocks", "head"], within="Linear"))] == [*linears, "head"]
    with pytest.raises(fxplug.MatchError, match=r"'blocks.0' has no single result .* name one"):
        find(net, one(path="blocks"))


@pytest.mark.parametrize("place", ["after", "before", "param", "op"])
def test_each_pattern_of_a_list_matches_or_is_told(net, place):
    more = {"op": "softmax"} if place == "op" else {"place": place}
    path, taken = ("blocks.*.attn", "blocks.0.attn") if place == "op" else ("re:head", "head")
    with pytest.raises(fxplug.MatchError, match=r"(?s)'blocks\.\*\.atn', one of 2 paths, matched 0 .* blocks.1.attn.*>=0"):
        find(net, one(path=[path, "blocks.*.atn"], **more))
    found = find(net, one(path=path, **more))
    assert found and len(find(net, one(path=[path, "blocks.*.atn"], expect=">=0", **more))) == len(found)
    assert len(find(net, one(path=[path, taken], **more))) == len(found), "what another has taken matches all the same"


def test_a_site_says_what_and_where(net):
    site = find(net, one(path="blocks.{i}.attn.qkv", module="Linear"))[1]
    assert str(site) == "blocks.1.attn.qkv  Linear  [2, 5, 4] -> [2, 5, 12]  i=1"
    assert site.caught == {"i": "1"} and site.classes == ("Linear",) and site.port.side == "out"
    assert (site.x.shape, site.y.shape) == ((2, 5, 4), (2, 5, 12)) and site.y.dtype == torch.float32
    assert site.module is net.get_submodule("blocks.1.attn.qkv")


def test_a_region_with_several_results_has_no_y_of_its_own(net):
    site = find(net, one(path="blocks.0", place="before"))[0]
    assert site.x.shape == (2, 5, 4) and site.y is None
    assert find(net, one(path="blocks.0:out[1][0]"))[0].y.address == "blocks.0:out[1][0]"


def test_base_classes_are_found_by_name():
    gm = small.lite().gm
    assert "Conv2dSame" in gm.get_submodule("conv_stem").classes
    every, same = paths(gm, module="Conv2d"), paths(gm, module="Conv2dSame")
    assert "conv_stem" in same and set(same) < set(every)


def test_patterns_and_arguments_pair_by_order(net):
    made = one(path=["blocks.1.mlp", "head"], args=["value", ["blocks.0.mlp", "blocks.0.attn:in"]])
    assert [[a.address for a in s.args] for s in find(net, made)] == [
        ["blocks.1.mlp", "blocks.0.mlp"],
        ["head", "blocks.0.attn:in"],
    ]
    made = one(path="**.mlp", args=["value", "**.attn"])
    assert [s.args[1].address for s in find(net, made)] == ["blocks.0.attn", "blocks.1.attn"]
    made = one(path="blocks.{i}.mlp", args=["value", "blocks.{i}.attn:in.mask"])
    assert [s.args[1].address for s in find(net, made)] == ["blocks.0.attn:in.mask", "blocks.1.attn:in.mask"]


@pytest.mark.parametrize("expect, good", [("==2", True), (2, True), (">=3", False), ("<2", False), ("!=0", True)])
def test_expect_counts_sites(net, expect, good):
    made = one(path="blocks.*", place="before", expect=expect)
    if good:
        assert len(find(net, made)) == 2
    else:
        with pytest.raises(fxplug.MatchError, match="matched 2 places, expected"):
            find(net, made)


def test_finding_changes_nothing(net):
    before = fxplug.show(net)
    find(net, one(module="Linear"))
    assert fxplug.show(net) == before


class Scaled(nn.Module):
    """Multiplies once, and once more in training."""

    def forward(self, x):
        if self.training:
            x = x * 3
        return (x * 2).relu()


def test_operations_of_the_model_itself():
    gm = small.traced(Scaled().eval(), torch.randn(2, 3)).gm
    assert paths(gm, op="relu") == ["relu"]


def test_operations_that_differ_between_the_modes_are_refused():
    gm = small.traced(Scaled().eval(), torch.randn(2, 3)).gm
    with pytest.raises(fxplug.MatchError, match="'the model' has a different number of these operations in training and in "
                                                "evaluation"):
        find(gm, one(op="mul"))


EDITS = {
    "insert": lambda graph, a, b: insert(
        graph, "call_function", torch.relu, (a,), after=a, meta=get_meta(a, "nn_module_stack")
    ),
    "erase": lambda graph, a, b: replace(a, a.args[0]),
    "move": lambda graph, a, b: move(b, before=a),
    "change": lambda graph, a, b: change(a, target=torch.tanh),
    "fx inserts": lambda graph, a, b: graph.call_function(torch.relu, (a,)),
    "fx erases": lambda graph, a, b: (a.replace_all_uses_with(b), graph.erase_node(a)),
    "fx moves": lambda graph, a, b: a.prepend(b),
    "fx changes": lambda graph, a, b: setattr(a, "target", torch.tanh),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_regions_are_kept_as_long_as_a_graph_has_the_same_nodes(edit):
    gm = small.traced(small.Call(lambda x: torch.relu(x) + torch.sigmoid(x)), torch.randn(2, 3)).gm
    (regions,), (again,) = find_regions(gm), find_regions(gm)
    assert again.by_key is regions.by_key
    a, b = regions.by_key[""].nodes[:2]
    edit(gm.graph, a, b)
    (now,) = find_regions(gm)
    assert now.by_key is not regions.by_key
    names = [node.name for node in Regions(copy_graph(gm.graph), gm).by_key[""].nodes]
    assert [node.name for node in now.by_key[""].nodes] == names


def test_a_walk_that_fails_leaves_no_half_of_the_regions(net):
    wanted = [*find_regions(net)[0].by_key]
    gm = copy.deepcopy(net)
    last = next(reversed(gm.graph.nodes))
    last.meta["pass"] = {}
    with pytest.raises(KeyError):
        find_regions(gm)
    del last.meta["pass"]
    assert [*find_regions(gm)[0].by_key] == wanted


def test_modules_of_regions_are_asked_anew(net):
    net = copy.deepcopy(net)
    (regions,) = find_regions(net)
    path = next(path for path in regions.ran if "Linear" in regions.classes(path))
    net.set_submodule(path, nn.Identity())
    assert find_regions(net)[0].classes(path)[0] == "Identity"
