"""What a rewrite computes, held to the same model with hooks, and what it leaves alone."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import small
import timm
import torch
from test_match import Net, one
from torch import nn

import fxplug
from fxplug.blocks.base import Block
from fxplug.blocks.lora import Lora
from fxplug.blocks.scale import Scale
from fxplug.blocks.skip import Skip
from fxplug.core.ir.graph import without_edges
from fxplug.core.spec.pass_file import Match, Pass, Rule


class Add(Block):
    """The value, all other arguments, and a number that is learned."""

    def __init__(self, amount=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(amount)))

    @classmethod
    def at(cls, site, amount=1.0):
        return cls(amount)

    def forward(self, value, *rest):
        return sum(rest, value + self.weight)


@contextlib.contextmanager
def hooked(model, path, after=None, before=None):
    """A copy of the model with a function of the result, or of the first argument, of one of its modules."""
    model = copy.deepcopy(model)
    module = model.get_submodule(path)
    if after:
        handle = module.register_forward_hook(lambda m, args, out: after(out, *args))
    else:
        handle = module.register_forward_pre_hook(lambda m, args: (before(args[0]), *args[1:]))
    with handle:
        yield model


@pytest.fixture(scope="module")
def net():
    return small.traced(small.seeded(Net), torch.randn(2, 5, 4), mask=torch.zeros(5, 5))


def flat(value):
    return fxplug.core.ir.containers.list_leaves(value)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


def added(new, old):
    return len(without_edges(new.graph).nodes) - len(without_edges(old.graph).nodes)


def call(module, traced):
    with torch.no_grad():
        return module(*traced.args, **traced.kwargs)


@pytest.mark.parametrize("path", ["head", "blocks.0.attn", "blocks.1.mlp", "blocks.1.mlp.1"])
@pytest.mark.parametrize("place", ["before", "after", "replace"])
def test_a_block_at_each_place(net, path, place):
    new = fxplug.apply(net.gm, one(Add, path=path, place=place, args=["value"]))
    change = {"before": {"before": lambda x: x + 1}}.get(place, {"after": lambda y, *_: y + 1})
    with hooked(net.model, path, **change) as model:
        assert same(call(new, net), call(model, net))
    if place != "replace":
        assert added(new, net.gm) == 1


@pytest.mark.parametrize("path", ["blocks.0.attn", "blocks.1.mlp", "blocks.1.mlp.1"])
def test_a_replaced_region_is_gone_when_nothing_reads_it(net, path):
    new = fxplug.apply(net.gm, one(Add, path=path, place="replace", args=["x"]))
    with hooked(net.model, path, after=lambda y, x: x + 1) as model:
        assert same(call(new, net), call(model, net))
    assert not [n for n in new.graph.nodes if n.op == "call_module" and str(n.target).startswith(path)]
    assert added(new, net.gm) <= 0 and path in dict(new.named_modules())


def test_a_replaced_region_stays_while_its_result_is_an_argument(net):
    new = fxplug.apply(net.gm, one(Add, path="head", place="replace", args=["y"]))
    assert added(new, net.gm) == 1


@pytest.mark.parametrize("expected, keys", [
    ("x", {"path": "blocks.1:in", "place": "before"}),
    ("x", {"path": "blocks.1:in[0]", "place": "before"}),
    ("x", {"path": "blocks.1:in.x", "place": "before"}),
    ("mask", {"path": "blocks.1:in.mask", "place": "before"}),
])  # fmt: skip
def test_an_argument_by_number_or_name(net, expected, keys):
    new = fxplug.apply(net.gm, one(Add, args=["value"], **keys))

    def change(module, args, kwargs):
        return ((args[0] + 1,), kwargs) if expected == "x" else (args, {"mask": kwargs["mask"] + 1})

    with net.model.blocks[1].register_forward_pre_hook(change, with_kwargs=True):
        assert same(call(new, net), call(net.model, net))


def test_an_input_of_the_model(net):
    new = fxplug.apply(net.gm, one(Add, path=":in.x", place="before", args=["value"]))
    expected = net.model(net.args[0] + 1, **net.kwargs)
    assert same(call(new, net), expected)


def test_a_result_of_the_model(net):
    new = fxplug.apply(net.gm, one(Add, path=":out.kept[1]", args=["value"]))
    base, ours = call(net.model, net), call(new, net)
    assert torch.equal(ours["kept"][1], base["kept"][1] + 1)
    assert same([ours["out"], ours["kept"][0]], [base["out"], base["kept"][0]])


def test_one_member_of_a_nested_result(net):
    new = fxplug.apply(net.gm, one(Add, path="blocks.1:out[1][0]", args=["value"]))
    base, ours = call(net.model, net), call(new, net)
    assert torch.equal(ours["kept"][1], base["kept"][1] + 1)
    assert same([ours["out"], ours["kept"][0]], [base["out"], base["kept"][0]])


def test_both_calls_of_a_module_share_a_block(net):
    new = fxplug.apply(net.gm, one(Add, path="act", args=["value"]))
    with hooked(net.model, "act", after=lambda y, x: y + 1) as model:
        assert same(call(new, net), call(model, net))
    assert [k for k in new.state_dict() if k.startswith("p.")] == ["p.act.Add.weight"]
    assert added(new, net.gm) == 2


def test_one_call_of_a_module_alone(net):
    new = fxplug.apply(net.gm, one(Add, path="act@1", args=["value"]))
    base, ours = call(net.model, net), call(new, net)
    assert torch.equal(ours["kept"][0], base["kept"][0] + 1)
    assert same([ours["out"], ours["kept"][1]], [base["out"], base["kept"][1]])
    assert list(new.state_dict())[-1] == "p.act_call1.Add.weight"


def test_two_rules_and_two_ports_have_blocks_of_their_own(net):
    both = [Rule(Match("blocks.0.mlp"), Add, place=p, args=["value"], options={"amount": a}) for p, a in
            (("before", 2), ("after", 3))]  # fmt: skip
    new = fxplug.apply(net.gm, Pass("p", both))
    weights = {k: v.item() for k, v in new.state_dict().items() if k.startswith("p.")}
    assert weights == {"p.blocks.0.mlp.Add.weight": 2, "p.blocks.0.mlp.Add_2.weight": 3}
    ports = fxplug.apply(net.gm, one(Add, path=["blocks.0:out[0]", "blocks.0:out[1][0]"], args=["value"]))
    assert sum(k.startswith("p.") for k in ports.state_dict()) == 2


def test_operations(net):
    new = fxplug.apply(net.gm, one(Add, path="blocks.{i}.attn", op="softmax", args=["value"]))
    assert added(new, net.gm) == 2
    assert [k for k in new.state_dict() if k.startswith("p.")] == [f"p.blocks.{i}.attn.softmax.Add.weight" for i in "01"]
    first = fxplug.apply(net.gm, one(Add, path="blocks.0.attn", op="softmax", place="before", args=["value"]))
    assert not same(call(new, net), call(net.gm, net)) and added(first, net.gm) == 1


def test_edits_in_a_row_see_each_other(net):
    passes = [one(Add, name, path="head", args=["value"], options={"amount": a}) for name, a in (("p", 1), ("q", 2))]
    with hooked(net.model, "head", after=lambda y, x: y + 1 + 2) as model:
        assert same(call(fxplug.apply(net.gm, *passes), net), call(model, net))
    inner = one(Add, path="blocks.0.mlp.2", args=["value"])
    outer = one(Scale, "q", path="blocks.0.mlp", args=["value"])
    for order in ((inner, outer), (outer, inner)):
        new = fxplug.apply(net.gm, *order)
        with torch.no_grad():
            new.get_parameter("q.blocks.0.mlp.Scale.weight").fill_(3)
        with hooked(net.model, "blocks.0.mlp", after=lambda y, x: (y + 1) * 3) as model:
            assert same(call(new, net), call(model, net))


def test_arguments_that_were_put_in_out_of_order(net):
    """Two blocks behind one value and a third that reads both: nothing is read before it is made."""

    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.q(x) + self.k(x) + self.v(x)

    base = small.traced(Three(), torch.randn(2, 4))
    rules = [Rule(Match(path), Add, place="before", args=["value"]) for path in "qk"]
    for read in (["q:in", "k:in"], ["k:in", "q:in"]):
        last = Rule(Match("v"), Add, place="before", args=["value", *read])
        new = fxplug.apply(base.gm, Pass("p", [*rules, last]))
        x, m = base.args[0], base.model
        with torch.no_grad():
            expected = m.q(x + 1) + m.k(x + 1) + m.v((x + 1) + (x + 1) + (x + 1))
            torch.testing.assert_close(new(x), expected)


class Same(nn.Module):
    """A region that gives back what it got."""

    def forward(self, x):
        return x


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Same(), nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x), self.head(x), x


def test_a_region_that_returns_its_input_changes_only_what_went_through_it():
    base = small.traced(Passing(), torch.randn(2, 4))
    for place in ("before", "after"):
        new = fxplug.apply(base.gm, one(Add, path="inner", place=place, args=["value"]))
        a, b, c = call(new, base)
        x, y, z = call(base.model, base)
        assert torch.equal(a, x + 1) and torch.equal(b, y) and torch.equal(c, z)


@pytest.mark.slow
def test_one_tensor_at_two_ports_of_a_unet_block():
    """A down block returns its hidden state and, as its last skip, the same tensor."""
    base = small.unet()
    new = fxplug.apply(base.gm, one(Add, path="down_blocks.0:out[1][1]", args=["value"]))

    def change(module, args, out):
        hidden, skips = out
        assert hidden is skips[-1]
        return hidden, (*skips[:-1], skips[-1] + 1)

    last = len(base.model.down_blocks[1].resnets)
    name = f"down_blocks.1:out[1][{last - 1}]"
    new = fxplug.apply(base.gm, one(Add, path=name, args=["value"]))
    with base.model.down_blocks[1].register_forward_hook(change):
        assert torch.equal(call(new, base).sample, call(base.model, base).sample)
    assert not torch.equal(call(new, base).sample, call(base.gm, base).sample)


def test_tied_weights_stay_tied_and_are_adapted_where_asked():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, words):
            x = self.table(words)
            return x, self.head(x)

    base = small.traced(Tied(), torch.arange(6)[None])
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at="head", rank=2))
    assert new.head.weight is new.table.weight is base.model.table.weight
    nn.init.ones_(new.lora.head.Lora.up.weight)
    assert torch.equal(call(new, base)[0], call(base.model, base)[0])
    assert not torch.equal(call(new, base)[1], call(base.model, base)[1])


def test_a_pass_may_give_the_model_a_new_argument(net):
    made = Pass("p", [Rule(Match("blocks.{i}.mlp"), Add, args=["value", "strength"])], inputs=["strength"])
    new = fxplug.apply(net.gm, made)
    strength = torch.tensor(2.0)
    out = new(*net.args, **net.kwargs, strength=strength)
    with hooked(net.model, "blocks.0.mlp", after=lambda y, x: y + 3) as half:
        with hooked(half, "blocks.1.mlp", after=lambda y, x: y + 3) as model:
            torch.testing.assert_close(out, call(model, net))
    assert fxplug.verify(net.gm, new, net.args, {**net.kwargs, "strength": strength}).ok
    with pytest.raises(fxplug.ClashError, match="has an argument 'mask' already; give the input another name"):
        fxplug.apply(net.gm, Pass("p", [Rule(Match("head"), Add, args=["value", "mask"])], inputs=["mask"]))


def test_a_skip_between_blocks(net):
    new = fxplug.apply(net.gm, fxplug.load_pass("skip", **{"from": "blocks.0.attn", "to": "blocks.1.mlp"}))
    kept = []
    with torch.no_grad():
        new.skip.blocks[1].mlp.Skip.weight.fill_(2)
    with hooked(net.model, "blocks.0.attn", after=lambda y, *_: kept.append(y)) as half:
        with hooked(half, "blocks.1.mlp", after=lambda y, x: y + kept[0] * 2) as model:
            assert same(call(new, net), call(model, net))
    assert isinstance(new.skip.blocks[1].mlp.Skip, Skip)


def test_a_skip_along_a_dimension_that_follows_the_input_is_refused_at_other_sizes():
    gm = fxplug.trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), torch.randn(2, 3, 5))
    new = fxplug.apply(gm, fxplug.load_pass("skip", **{"from": "0", "to": "1", "dim": -1}))
    with pytest.raises(fxplug.GuardError, match=r"from width 5 to 5 \(dimension -1\) got \(2, 3, 7\) and \(2, 3, 7\)"):
        new(torch.randn(2, 3, 7))


def test_inserted_nodes_know_where_they_come_from(net):
    new = fxplug.apply(net.gm, fxplug.load_pass("lora", at="head", rank=2))
    (node,) = (n for n in new.graph.nodes if "pass" in n.meta)
    told = node.meta["pass"]
    assert {k: told[k] for k in ("name", "site", "place", "block")} == {
        "name": "lora", "site": "head", "place": "after", "block": "Lora",
    }  # fmt: skip
    file, line = told["where"].rsplit(":", 1)
    assert file.endswith("passes/lora.yaml")
    assert "- match:" in (Path(__file__).parents[1] / "passes/lora.yaml").read_text().splitlines()[int(line) - 1]
    assert isinstance(new.get_submodule(node.target), Lora)


def test_a_second_pass_on_a_loaded_rewrite_goes_behind_the_first(net, tmp_path):
    first, second = fxplug.load_pass("lora", at="head", rank=2), fxplug.load_pass("scale", at="head")
    new = fxplug.apply(net.gm, first)
    fxplug.save(new, tmp_path / "one")
    again = fxplug.apply(fxplug.load(tmp_path / "one"), second)
    assert fxplug.show(again) == fxplug.show(fxplug.apply(new, second))
    with pytest.raises(fxplug.ClashError):
        fxplug.apply(again, first)


# --- tokens: passes that change sizes, and a graph that adapts


class Prompt(Block):
    """Learned tokens in front of the others."""

    def __init__(self, count, width):
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.randn(count, width))

    @classmethod
    def at(cls, site, count=10):
        return cls(count, site.x.shape[-1])

    def forward(self, x):
        return torch.cat([self.weight.expand(x.shape[0], -1, -1), x], 1)


class Drop(Block):
    """The tokens behind the first `count`."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    @classmethod
    def at(cls, site, count=10):
        return cls(count)

    def forward(self, y):
        return y[:, self.count :]


class Plain(Block):
    @classmethod
    def at(cls, site):
        return cls()


class Halve(Plain):
    """Every second token, and what is needed to put the others back."""

    def forward(self, x):
        return x[:, ::2], x


class Restore(Plain):
    """Each result twice, cut to the number of tokens there were."""

    def forward(self, y, before):
        return y.repeat_interleave(2, 1)[:, : before.shape[1]]


@pytest.fixture(scope="module")
def vit():
    make = lambda: timm.create_model(  # noqa: E731
        "vit_tiny_patch16_224", img_size=32, depth=3, num_classes=5, dynamic_img_size=True, global_pool="avg"
    )
    return small.traced(small.seeded(make).eval(), torch.randn(1, 3, 48, 48))  # other than the table of positions


@pytest.mark.parametrize("drop", [True, False])
def test_prompt_tokens_in_a_vit_and_nothing_traced_again(vit, drop):
    rules = [Rule(Match("blocks.0"), Prompt, place="before", options={"count": 10})]
    if drop:
        rules.append(Rule(Match("blocks.2"), Drop, args=["y"], options={"count": 10}))
    new = fxplug.apply(vit.gm, Pass("prompt", rules))
    assert fxplug.verify(vit.gm, new, vit.args, compile=False).ok and added(new, vit.gm) == 1 + drop
    weight = new.get_parameter("prompt.blocks.0.Prompt.weight")
    with hooked(vit.model, "blocks.0", before=lambda x: torch.cat([weight.expand(x.shape[0], -1, -1), x], 1)) as one_hook:
        with hooked(one_hook, "blocks.2", after=lambda y, *_: y[:, 10:] if drop else y) as model:
            for batch, side in ((1, 48), (3, 48), (2, 64), (1, 96)):
                x = torch.randn(batch, 3, side, side)
                with torch.no_grad():
                    assert torch.equal(new(x), model(x))


def test_half_the_tokens_inside_attention_and_nothing_traced_again(vit):
    rules = [
        Rule(Match("blocks.{i}.attn"), Halve, place="before", name="all.{i}", args=["x"]),
        Rule(Match("blocks.{i}.attn"), Restore, args=["y", "all.{i}"]),
    ]
    new = fxplug.apply(vit.gm, Pass("halve", rules))
    assert fxplug.verify(vit.gm, new, vit.args).ok
    model = copy.deepcopy(vit.model)
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda m, args: (args[0][:, ::2], *args[1:]))
        block.norm1.register_forward_hook(lambda m, args, out, a=block.attn: setattr(a, "tokens", out.shape[1]))
        block.attn.register_forward_hook(lambda m, args, out: out.repeat_interleave(2, 1)[:, : m.tokens])
    for batch, side in ((1, 48), (2, 64), (3, 96)):
        x = torch.randn(batch, 3, side, side)
        with torch.no_grad():
            assert torch.equal(new(x), model(x))


def test_what_a_later_rule_keeps_cannot_be_used(vit):
    rules = [
        Rule(Match("blocks.{i}.attn"), Restore, args=["y", "all.{i}"]),
        Rule(Match("blocks.{i}.attn"), Halve, place="before", name="all.{i}", args=["x"]),
    ]
    with pytest.raises(fxplug.MatchError, match=r"halve: 'all.0' is used before the rule that names it: put that rule first"):
        fxplug.apply(vit.gm, Pass("halve", rules))


def test_a_parameter_is_not_mapped_by_what_it_makes(net):
    with pytest.raises(fxplug.MatchError, match="the value 'blocks.0.norm' cannot flow to 'blocks.0.norm:param.weight'"):
        fxplug.apply(net.gm, one(Add, path="blocks.0.norm", place="param", args=["value", "y"]))


def test_found_sites_are_applied(net):
    p = one(Add, path="blocks.*.attn.*", module="Linear", args=["value"])
    sites = fxplug.find(net.gm, p)
    assert same(call(fxplug.apply(net.gm, sites), net), call(fxplug.apply(net.gm, p), net))
    assert same(call(fxplug.apply(net.gm, sites), net), call(fxplug.apply(net.gm, p), net)), "sites can be applied again"
    for given in (list(sites), sites[:1], "lora", None):
        with pytest.raises(fxplug.SpecError, match=r"apply takes passes, or sites as find gave them, not .*sites\[:\] = "):
            fxplug.apply(net.gm, given)
    kept, sites[:] = sites[0], sites[1:]
    fewer = fxplug.apply(net.gm, sites)
    assert len(fewer.meta["passes"][0]["sites"]) == len(sites) == 3
    assert same(call(fewer, net), call(fxplug.apply(net.gm, one(Add, path=[s.path for s in sites], args=["value"])), net))
    with pytest.raises(fxplug.SpecError, match="p: these sites were found in another traced module .* or apply the pass"):
        fxplug.apply(fewer, sites)
    with pytest.raises(fxplug.SpecError, match="found in another traced module"):
        fxplug.apply(net.gm, sites, sites)
    with pytest.raises(fxplug.SpecError, match=rf"p: the site '{sites[0].path} .*' is in the list twice"):
        sites.append(sites[0])
        fxplug.apply(net.gm, sites)
    sites[-1] = fxplug.find(net.gm, p)[0]
    with pytest.raises(fxplug.SpecError, match=rf"p: the site '{kept.path} .*' was not found by this pass here"):
        fxplug.apply(net.gm, sites)


def test_a_hook_on_one_tree_is_none_on_another(net):
    new = fxplug.apply(net.gm, one(Add, path="head", args=["value"]))
    expected = call(net.gm, net)
    with net.model.head.register_forward_hook(lambda *_: 1 / 0), new.head.register_forward_hook(lambda *_: 1 / 0):
        assert same(call(net.gm, net), expected)


class Overwrites(torch.nn.Module):
    """Gives a tensor that it has written into after it was made."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.inner(x))


class Inner(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        y[:, 0] = y[:, 1]
        y.add_(1)
        return y


@pytest.mark.parametrize("name", ["adapter", "scale"])
def test_a_block_reads_what_a_region_has_written_last(name):
    model, x = Overwrites(), torch.randn(3, 4)
    gm = fxplug.trace(model, x)
    new = fxplug.apply(gm, fxplug.load_pass(name, at="inner"))
    assert torch.equal(new(x), model(x))
    with torch.no_grad():
        for key, p in new.named_parameters():
            if key.startswith(f"{name}."):
                p.normal_(generator=torch.Generator().manual_seed(1))
    with hooked(model, "inner", after=lambda y, x: new.get_submodule(name).inner._modules[block](*[y] * reads)) as other:
        (block,) = new.get_submodule(name).inner._modules
        reads = 2 if name == "adapter" else 1
        assert torch.allclose(new(x), other(x), atol=1e-6) and not torch.allclose(new(x), gm(x))


@torch.no_grad()
def test_what_is_made_of_a_compiled_module_is_not_the_program_of_before():
    base = small.plain_vit()
    gm = copy.copy(base.gm)
    gm.compile(backend="eager")
    before = gm(*base.args)
    for new in (
        fxplug.apply(gm, fxplug.load_pass("delta", at="norm")),
        copy.copy(fxplug.apply(gm, fxplug.load_pass("delta", at="norm"))),
    ):
        torch.nn.init.constant_(new.get_parameter(next(k for k, _ in new.named_parameters() if k.startswith("delta."))), 0.5)
        assert not torch.allclose(new(*base.args), before, atol=1e-3)
        assert torch.equal(new(*base.args), copy.deepcopy(new)(*base.args))
    assert torch.equal(gm(*base.args), before)


def test_lora_beside_a_convolution_that_is_given_other_dimensions():
    class Frames(nn.Conv2d):
        def forward(self, x):
            return super().forward(x.squeeze(2)).unsqueeze(2)

    model, x = nn.Sequential(Frames(3, 4, 3)).eval(), torch.randn(2, 3, 1, 8, 8)
    gm = fxplug.trace(model, x)
    with pytest.raises(fxplug.SpecError, match="0 is a Frames that is given 5 dimensions, .*: its own.*take lora_weight"):
        fxplug.apply(gm, fxplug.load_pass("lora", at="0", rank=2))
    assert torch.equal(fxplug.apply(gm, fxplug.load_pass("lora_weight", at="0", rank=2))(x), model(x))


@pytest.mark.parametrize("mode", [True, False])
def test_a_layer_in_another_mode_than_the_model_is_not_opened(mode):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.randn(6, 4)
    gm = fxplug.trace(model.train(mode), x)
    gm[1].train(not mode)
    delta = fxplug.load_pass("delta", at="1")
    with pytest.raises(fxplug.SpecError, match=r"'1' \(BatchNorm1d\), opened .* is in .* and the model in .*: put both"):
        fxplug.apply(gm, delta)
    torch.manual_seed(0)
    want = copy.deepcopy(gm.train(mode))(x)
    torch.manual_seed(0)
    assert torch.equal(fxplug.apply(gm, delta)(x), want)


def test_any_name_of_a_pass_works_or_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    model.scale, model.block = 2.0, "text"
    x = torch.randn(2, 4)
    gm = fxplug.trace(model.eval(), x)
    names = {*dir(gm), *vars(gm), *vars(type(gm)), "adapters", "x", "self", "torch", "shared", "originals", "regions", "_0"}
    works = []
    for name in sorted(names):
        try:
            new = fxplug.apply(gm, fxplug.load_pass("lora", at="0", rank=2, name=name))
        except fxplug.FxplugError as error:
            assert name in str(error)
        else:
            assert torch.equal(new(x), gm(x)) and len(list(new.named_parameters())) == 4 and new.eval() is new
            works.append(name)
    assert {"x", "self", "torch", "_0"} <= {*works}
    assert not {"scale", "block", "meta", "twin_error", "_codes", "_steps"} & {*works}
