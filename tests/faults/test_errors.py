"""What a mistake in a pass is told: where, what was found, what comes nearest, what to do."""

from __future__ import annotations

import pytest
import small
import torch
from test_edit import Add
from test_match import Net, one
from torch import nn

import fxplug
from fxplug.blocks.base import Block
from fxplug.blocks.scale import Scale
from fxplug.core.spec.pass_file import Match, Pass, Rule


@pytest.fixture(scope="module")
def net():
    return small.traced(small.seeded(Net), torch.randn(2, 5, 4), mask=torch.zeros(5, 5))


class Loud(Block):
    """Says that it is neutral, and is not."""

    neutral = True

    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, value):
        return value * 1.5


class Wide(Block):
    """Gives one feature more than it got."""

    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, value):
        return torch.cat([value, value[..., :1]], -1)


class Unused(Loud):
    """Has a parameter that its result does not depend on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, value):
        return value


class Broken(Block):
    @classmethod
    def at(cls, site):
        raise KeyError("width")


class Guessing(Block):
    @classmethod
    def at(cls, site):
        return cls(site.value.shape)


def lora(**params):
    return fxplug.load_pass("lora", **params)


def skip(source, target, **params):
    return fxplug.load_pass("skip", **{"from": source, "to": target}, **params)


def rules(*keys):
    return Pass("p", [Rule(Match(**m), Add, **{"args": ["value"], **rest}) for m, rest in keys])


MISTAKES = {
    "a path that is not there": (
        one(path="blocks.0.atn"),
        fxplug.MatchError,
        "p: 'blocks.0.atn' matched 0 places, expected >=1\n  no region 'blocks.0.atn' (did you mean 'blocks.0.attn'?)",
    ),
    "a path behind a class that is there": (
        one(path="layers.*", module="LayerNorm"),
        fxplug.MatchError,
        "p: 'layers.*' matched 0 places, expected >=1\n"
        "  the path does not match: 2 places match the other conditions, for example\n"
        "    blocks.1.norm\n    blocks.0.norm",
    ),
    "a container where one value is needed": (
        one(path="head", args=["value", "blocks"]),
        fxplug.MatchError,
        "p: 'blocks' (ModuleList) is never called by the model, so it is not a region; regions inside it: blocks.0, "
        "blocks.0.norm, blocks.0.attn, blocks.0.attn.qkv, blocks.0.attn.proj, blocks.0.mlp, blocks.0.mlp.0, "
        "blocks.0.mlp.1, blocks.0.mlp.2, blocks.1, ... (18)",
    ),
    "one of several paths": (
        one(path=["head", "blocks.*.atn"]),
        fxplug.MatchError,
        "p: 'blocks.*.atn', one of 2 paths, matched 0 places, expected >=1\n  the model has 21 regions, for example\n"
        "    blocks.1.attn\n    blocks.0.attn\n    blocks.1.attn.qkv\n    blocks.0.attn.qkv\n    blocks.1.attn.proj\n"
        "  (with expect: '>=0' it may match nothing)",
    ),
    "a module that is never called": (
        one(path="spare"),
        fxplug.MatchError,
        "p: 'spare' matched 0 places, expected >=1\n  'spare' (Linear) is never called by the model, so it is not a region",
    ),
    "a class that is not there": (
        one(module="Linaer"),
        fxplug.MatchError,
        "p: '**' matched 0 places, expected >=1\n  nothing here is a Linaer (did you mean 'Linear'?); "
        "the classes here are Attn, GELU, Layer, LayerNorm, Linear, Sequential",
    ),
    "a class that is elsewhere": (
        one(path="blocks.*.mlp", module="Linear"),
        fxplug.MatchError,
        "p: 'blocks.*.mlp' matched 0 places, expected >=1\n"
        "  the class does not match: 2 places match the path, for example\n"
        "    blocks.0.mlp (Sequential)\n    blocks.1.mlp (Sequential)\n"
        "  inside of these there are some: 'blocks.*.mlp.**' matches 4 places\n"
        "  of that class there are: blocks.0.attn.qkv, blocks.0.attn.proj, blocks.0.mlp.0, blocks.0.mlp.2, "
        "blocks.1.attn.qkv, blocks.1.attn.proj, blocks.1.mlp.0, blocks.1.mlp.2, head",
    ),
    "an operation that is not there": (
        one(op="sofmax"),
        fxplug.MatchError,
        "p: '**' matched 0 places, expected >=1\n  no operation sofmax here (did you mean 'softmax'?); "
        "there are add, chunk, getitem, matmul, mul, softmax, transpose",
    ),
    "an operation that is elsewhere": (
        one(path="**.mlp", op="softmax"),
        fxplug.MatchError,
        "p: '**.mlp' matched 0 places, expected >=1\n  the path does not match: the operation is at "
        "blocks_0_attn_softmax, blocks_1_attn_softmax",
    ),
    "a wrong count": (
        one(path="blocks.*.mlp", expect="==3"),
        fxplug.MatchError,
        "p: 'blocks.*.mlp' matched 2 places, expected ==3\n  blocks.0.mlp\n  blocks.1.mlp",
    ),
    "two rules at one place": (
        rules(({"path": "head"}, {}), ({"module": "Linear"}, {})),
        fxplug.ClashError,
        "p: two rules put a block after 'head'; narrow the pattern of one of them",
    ),
    "a rule inside a region that another replaces": (
        rules(({"path": "blocks.0.mlp"}, {"place": "replace"}), ({"path": "blocks.*.mlp.0"}, {})),
        fxplug.ClashError,
        "p: one rule replaces 'blocks.0.mlp' and another puts a block after 'blocks.0.mlp.0'; narrow the "
        "pattern of one of them",
    ),
    "a port that is not there": (
        one(path="blocks.0:in[2]", place="before"),
        fxplug.MatchError,
        "p: 'blocks.0:in[2]' is not an input of 'blocks.0'; there are 'blocks.0:in.x', 'blocks.0:in.mask'",
    ),
    "a result that is several": (
        one(path="blocks.0"),
        fxplug.MatchError,
        "p: 'blocks.0' has no single result 'blocks.0'; there are 'blocks.0:out[0]', 'blocks.0:out[1][0]', "
        "'blocks.0:out[1][1].deep': name one",
    ),
    "an input changed after": (
        one(path="head:in"),
        fxplug.MatchError,
        "p: 'head:in' is the input of a region, which place 'after' does not change; write place: before",
    ),
    "an argument that is not there": (
        one(path="head", args=["value", "blocks.0.atn"]),
        fxplug.MatchError,
        "p: no region 'blocks.0.atn' (did you mean 'blocks.0.attn'?)",
    ),
    "an address that is none": (
        one(path="head", args=["value", "head:inn"]),
        fxplug.SpecError,
        "'head:inn' is not an address of a value: write 'path', 'path:in', 'path:in[1]', 'path:in.name', "
        "'path:out[1][0]' or 'path:param.weight'",
    ),
    "patterns that pair unequally": (
        one(path="**.mlp", args=["value", "**.attn.*"]),
        fxplug.MatchError,
        "p: '**.attn.*' matches 4 places and '**.mlp' 2; they are paired in order, so the numbers must be equal\n"
        "  from: blocks.0.attn.qkv, blocks.0.attn.proj, blocks.1.attn.qkv, blocks.1.attn.proj\n"
        "  to:   blocks.0.mlp, blocks.1.mlp",
    ),
    "a skip backward": (
        skip("blocks.1.mlp", "blocks.0.mlp"),
        fxplug.MatchError,
        "skip.yaml:5: skip: the value 'blocks.1.mlp' cannot flow to 'blocks.0.mlp': 'blocks.0.mlp' runs first, and "
        "'blocks.1.mlp' depends on it, so it would flow backward; a value can only flow to what runs later",
    ),
    "a skip of another length": (
        skip("blocks.0.attn:in.mask", "head"),
        fxplug.SpecError,
        "skip.yaml:5: skip: head: a skip from blocks.0.attn:in.mask [5, 5] to head [2, 5, 3]: only the widths "
        "(dimension -1) may differ; use a block of your own that reshapes",
    ),
    "a class without at": (
        one(nn.Linear, path="head"),
        fxplug.SpecError,
        "block class 'Linear' has no classmethod 'at(site, **options)', which makes a block for a site",
    ),
    "no class": (
        one("operator:add", path="head"),
        fxplug.SpecError,
        "'operator:add' is not a module class: a block is an nn.Module",
    ),
    "a class that does not exist": (
        one("fxplug.blocks:Lroa", path="head"),
        fxplug.SpecError,
        "module 'fxplug.blocks' has no attribute 'Lroa' (did you mean 'Lora'?)",
    ),
    "an option that is unknown": (
        one("fxplug.blocks:Lora", path="head", args=["x", "y"], options={"rnk": 3}),
        fxplug.SpecError,
        "p: head: Lora takes no option 'rnk' (did you mean 'rank'?); it takes rank, alpha, dropout, bias, rslora, "
        "alpha_auto_scale, slots, rank_max",
    ),
    "a rank of none": (
        lora(at="head", rank=0),
        fxplug.SpecError,
        "lora.yaml:24: lora: head: rank must be a whole number, 1 or more, not 0",
    ),
    "a dropout of all": (
        lora(at="head", dropout=1.0),
        fxplug.SpecError,
        "lora.yaml:24: lora: head: dropout must be at least 0 and below 1, not 1.0",
    ),
    "LoRA where it does not fit": (
        one("fxplug.blocks:Lora", path="act", args=["x", "y"]),
        fxplug.SpecError,
        "p: act: act is a GELU; a low-rank update fits Linear, Conv1d, Conv2d, Conv3d, Embedding and layers derived from them",
    ),
    "a module class that torch.nn has not": (
        fxplug.load_pass("replace", at="act", module="GELU", **{"with": "PRelu"}),
        fxplug.SpecError,
        "replace.yaml:5: replace: act: torch.nn has no module class 'PRelu' (did you mean 'PReLU'?)",
    ),
    "a parameter that is not there": (
        one(path="head", place="param", port="wieght"),
        fxplug.MatchError,
        "p: 'head' (Linear) has no parameter 'wieght'; it has weight, bias",
    ),
    "a parameter that no region has": (
        one(path="blocks.*", place="param", port="gamma"),
        fxplug.MatchError,
        "p: 'blocks.*' matched 0 places, expected >=1\n  none of 2 regions has a parameter 'gamma'; they have\n"
        "    blocks.0: none\n    blocks.1: none",
    ),
    "the name of a module": (
        one(Add, "head", path="blocks.0.mlp"),
        fxplug.ClashError,
        "the model has a module, method or attribute 'head' of its own; give the pass another name (name: ...)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(net, mistake):
    made, kind, text = MISTAKES[mistake]
    before = fxplug.show(net.gm)
    with pytest.raises(kind) as caught:
        fxplug.apply(net.gm, made)
    told = str(caught.value)
    assert told.partition("passes/")[2] == text if ".yaml:" in text else told == text
    assert fxplug.show(net.gm) == before


def test_lists_of_unequal_length_are_refused_when_read():
    with pytest.raises(fxplug.SpecError, match=r"args\[1\]: 1 ports for 2 path patterns: they are paired in order"):
        skip(["blocks.0"], ["blocks.1", "head"])


def test_a_region_is_replaced_once_and_an_extended_one_not_at_all(net):
    replaced = fxplug.apply(net.gm, one(Add, path="blocks.0.mlp", place="replace"))
    again = one(Add, "q", path="blocks.*.mlp", place="replace")
    with pytest.raises(fxplug.ClashError) as caught:
        fxplug.apply(replaced, again)
    assert str(caught.value) == (
        "q: 'blocks.0.mlp' is replaced by pass 'p' already: narrow the pattern of one of the two passes, or combine them in "
        "the rule, with combine: sum (their sum) or combine: chain (one after the other)"
    )
    scaled = fxplug.apply(replaced, one(Scale, "q", path="blocks.*.mlp", args=["y"]))  # its place is there
    assert [s["path"] for s in scaled.meta["passes"][-1]["sites"]] == ["blocks.0.mlp", "blocks.1.mlp"]
    with pytest.raises(fxplug.MatchError, match="the class does not match"):
        fxplug.find(replaced, one(Scale, "q", path="blocks.0.mlp", module="Sequential"))
    gone = fxplug.apply(net.gm, one(Add, path="blocks.0.mlp", place="replace", args=["x"]))
    with pytest.raises(fxplug.MatchError) as caught:
        fxplug.apply(gone, lora(at="blocks.0.mlp.0"))
    assert str(caught.value).endswith("\n  'blocks.0.mlp.0' is no longer in the graph: pass 'p' replaced 'blocks.0.mlp'")
    inner = fxplug.apply(net.gm, lora(at="blocks.0.mlp.0"))
    with pytest.raises(fxplug.ClashError) as caught:
        fxplug.apply(inner, one(Add, path="blocks.0.mlp", place="replace"))
    assert str(caught.value) == (
        "p: 'blocks.0.mlp.0' has a block of pass 'lora' (after) and cannot be replaced: narrow the pattern of one of the two "
        "passes"
    )


def test_applying_twice(net):
    with pytest.raises(fxplug.ClashError) as caught:
        fxplug.apply(net.gm, lora(at="head"), lora(at="blocks.0.mlp.0"))
    assert str(caught.value) == (
        "pass 'lora' is already applied here; give the second one a name of its own (name: lora_2) if both are wanted"
    )


def test_only_traced_modules_are_rewritten(net):
    with pytest.raises(fxplug.SpecError, match="apply takes a traced module, not Net: fxplug.trace"):
        fxplug.apply(net.model, lora(at="head"))


def test_a_failing_constructor_is_told_with_its_place_and_its_error(net):
    with pytest.raises(fxplug.SpecError, match=r"^p: head: Broken.at failed: KeyError: ") as caught:
        fxplug.apply(net.gm, one(Broken, path="head"))
    assert type(caught.value.__cause__) is KeyError
    with pytest.raises(fxplug.SpecError, match="'Site' object has no attribute 'value'; a site has x and y, .*parameter"):
        fxplug.apply(net.gm, one(Guessing, path="head"))


def refused(net, made, **options):
    with pytest.raises(fxplug.VerifyError) as caught:
        fxplug.verify(net.gm, fxplug.apply(net.gm, made), net.args, net.kwargs, compile=False, **options)
    assert not caught.value.report.ok
    return str(caught.value)


def test_a_wrong_width_is_found_at_its_line_with_both_shapes(net, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rule = "{match: {path: blocks.0.mlp.1}, use: 'test_errors:Wide', args: [y]}"
    (tmp_path / "wide.yaml").write_text(f"about: A feature more.\nrules:\n  - {rule}\n")
    assert refused(net, fxplug.load_pass("wide.yaml")).startswith(
        "wide.yaml:3: wide: block Wide at 'blocks.0.mlp.1' returns [2, 5, 9] where [2, 5, 8] was, and 'blocks_0_mlp_2' cannot "
        "take it (wide_blocks_0_mlp_1_Wide [2, 5, 9]): "
    )


def test_a_pass_that_is_not_neutral_is_found_at_its_first_region(net):
    text = refused(net, one(Loud, path="blocks.*.mlp"))
    head, _, rest = text.partition("\n")
    assert head.startswith("p says it is neutral, but outputs differ by ")
    first, hint = rest.splitlines()
    assert first == "  first region to differ: blocks.0.mlp (Loud)"
    assert "verify the module as apply gave it" in hint


def test_a_parameter_without_gradient_is_found(net):
    text = refused(net, one(Unused, path="head"))
    assert text == "no gradient reaches p.head.Unused.weight: the model's output does not depend on their result"


def test_verify_says_when_inputs_do_not_fit(net):
    new = fxplug.apply(net.gm, lora(at="head"))
    with pytest.raises(fxplug.VerifyError, match="does not take these example inputs: missing a required argument: 'x'"):
        fxplug.verify(net.gm, new, ())
