"""Rules that match operations, and ports of regions: what `port` names is changed, and nothing else."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxplug
from fxplug.blocks import Block
from fxplug.core.ir.functions import get_short_name
from fxplug.core.ir.regions import list_operands


class Ten(Block):
    def forward(self, v):
        return v * 10


class Plus(Block):
    def forward(self, a, b):
        return a + b


class Call(nn.Module):
    """A model that is one function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def at(op, **rule):
    return fxplug.Pass("p", rules=[fxplug.Rule(fxplug.Match(path="**", op=op), **{"use": Ten, "args": ["value"], **rule})])


def tensors(count, *shape):
    torch.manual_seed(0)
    return [torch.randn(*shape) for _ in range(count)]


OPERANDS = {
    "scaled_dot_product_attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), 3, (1, 1, 3, 4)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w[:, :, :1, :1], b[0, :, 0, 0]), 3, (3, 3, 4, 4)),
    "cat": (lambda a, b, c: torch.cat([a, b, c], -1), 3, (2, 3)),
    "baddbmm": (lambda a, b, c: torch.baddbmm(a, b, c, beta=2), 3, (2, 3, 3)),
    "addmm": (lambda a, b, c: torch.addmm(a, b, mat2=c), 3, (3, 3)),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), 2, (3, 3)),
    "lerp": (lambda a, b, w: a.lerp(b, weight=w), 3, (3, 3)),
    "stack": (lambda a, b: torch.stack((a, b, a)), 2, (3,)),
}


@pytest.mark.parametrize("op", OPERANDS)
def test_a_port_is_one_operand(op):
    function, count, shape = OPERANDS[op]
    inputs = tensors(count, *shape)
    model = Call(function)
    gm = fxplug.trace(model, inputs)
    (node,) = (n for n in gm.graph.nodes if get_short_name(n.target) == op)
    read = len(list_operands((node.args, node.kwargs)))
    for index in range(read):
        new = fxplug.apply(gm, at(op, place="before", port=f"x[{index}]"))
        changed = next(n for n in new.graph.nodes if n.name == node.name)
        given = list_operands((changed.args, changed.kwargs))
        assert ["pass" in n.meta for n in given] == [i == index for i in range(read)]
        new(*inputs)
    with pytest.raises(fxplug.MatchError, match=rf"has no tensor 'x\[{read}\]'; it reads x\[0\]"):
        fxplug.find(gm, at(op, place="before", port=f"x[{read}]"))


def test_operands_one_by_one_and_together():
    q, k, v = tensors(3, 1, 1, 3, 4)
    model = Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    gm = fxplug.trace(model, (q, k, v))
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        rules = [at("scaled_dot_product_attention", place="before", port=f"x[{i}]").rules[0] for i in chosen]
        new = fxplug.apply(gm, fxplug.Pass("p", rules=rules))
        want = model(*(t * 10 if i in chosen else t for i, t in enumerate((q, k, v))))
        assert torch.equal(new(q, k, v), want)


def test_an_operand_by_name():
    x, mask = torch.randn(1, 1, 3, 4), torch.randn(3, 3)
    model = Call(lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask))
    gm = fxplug.trace(model, (x, mask))
    new = fxplug.apply(gm, at("scaled_dot_product_attention", place="before", port="x.attn_mask"))
    assert torch.equal(new(x, mask), model(x, mask * 10))
    with pytest.raises(fxplug.MatchError, match=r"it reads x\[0\], x\[1\], x\[2\], x\[3\], x.attn_mask"):
        fxplug.find(gm, at("scaled_dot_product_attention", place="before", port="x.mask"))


def test_a_tensor_that_is_read_twice_is_two_operands():
    x = torch.randn(1, 1, 3, 4)
    gm = fxplug.trace(Call(lambda x: F.scaled_dot_product_attention(x, x, x)), (x,))
    for index in range(3):
        new = fxplug.apply(gm, at("scaled_dot_product_attention", place="before", port=f"x[{index}]"))
        given = [x * 10 if i == index else x for i in range(3)]
        assert torch.equal(new(x), F.scaled_dot_product_attention(*given))
    plus = at("scaled_dot_product_attention", use=Plus, place="before", port="x[1]", args=["value", "x[2]"])
    assert torch.equal(fxplug.apply(gm, plus)(x), F.scaled_dot_product_attention(x, x + x, x))


MEMBERS = {
    "split": lambda x: x.split(1, -1),
    "chunk": lambda x: x.chunk(4, -1),
    "unbind": lambda x: x.unbind(-1),
    "topk": lambda x: (x.topk(2).values, x.topk(2).values),
    "max": lambda x: (x.max(-1).values, x.max(-1).values),
}


@pytest.mark.parametrize("op", MEMBERS)
@pytest.mark.parametrize("place", ["after", "replace"])
def test_a_port_is_one_member_of_the_result(op, place):
    x = torch.randn(2, 4)
    index = 0 if op in ("topk", "max") else 1
    gm = fxplug.trace(Call(lambda x: (MEMBERS[op](x)[index], x + 1)), (x,))
    new = fxplug.apply(gm, at(op, place=place, port=f"y[{index}]"))
    for got, want in zip(new(x), (MEMBERS[op](x)[index] * 10, x + 1), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(fxplug.MatchError, match=rf"has no 'y\[7\]' that is read; the model reads y\[{index}\] of it"):
        fxplug.find(gm, at(op, place=place, port="y[7]"))


@pytest.mark.parametrize("port", ["x[:]", "x[*]", "x[**]", "x[0][1]"])
def test_an_operation_takes_one_operand(port):
    gm = fxplug.trace(Call(torch.add), (torch.ones(2), torch.ones(2)))
    with pytest.raises(fxplug.FxplugError, match=r"name one of them|must|not 'x"):
        fxplug.find(gm, at("add", place="before", port=port))


class Bias(nn.Module):
    def forward(self, x, bias):
        return x * 2 + bias


class Outer(nn.Module):
    def __init__(self, inner, keyword):
        super().__init__()
        self.a, self.keyword = inner, keyword

    def forward(self, x, b):
        return self.a(x, bias=b) if self.keyword else self.a(x, b)


@pytest.mark.parametrize(
    ("keyword", "port", "path"),
    [
        (True, "x.bias", "a"),
        (True, None, "a:in.bias"),
        (False, "x.bias", "a"),
        (False, "x[1]", "a"),
        (False, None, "a:in.bias"),
        (False, None, "a:in[1]"),
    ],
)
def test_x_is_the_first_input_whatever_is_changed(keyword, port, path):
    x, b = torch.full((2,), 100.0), torch.ones(2)
    gm = fxplug.trace(Outer(Bias(), keyword), (x, b))
    for args, want in ((["value", "x"], 101.0), (["x", "value"], 101.0), (["value", "value"], 2.0), (["x", "x"], 200.0)):
        rule = fxplug.Rule(fxplug.Match(path=path), use=Plus, place="before", port=port, args=args)
        assert fxplug.apply(gm, fxplug.Pass("p", rules=[rule]))(x, b).tolist() == [200.0 + want] * 2
    default = fxplug.Rule(fxplug.Match(path=path), use=Ten, place="before", port=port)
    assert fxplug.apply(gm, fxplug.Pass("p", rules=[default]))(x, b).tolist() == [210.0] * 2


@pytest.mark.parametrize(
    ("match", "rule", "message"),
    [
        ({"op": "add"}, {"place": "param"}, "place 'param' changes a parameter of a layer"),
        ({"op": "add"}, {"place": "replace", "combine": "sum"}, "combines replacements of regions"),
        ({"op": "add", "path": "a:in[1]"}, {"place": "before"}, "is a port of one"),
        ({"op": "add", "path": "a:in"}, {"place": "before"}, "is a port of one"),
        ({"path": "a:in[1]"}, {"place": "before", "port": "x[0]"}, "names the value already"),
        ({"path": "a:param.weight"}, {"place": "param", "port": "bias"}, "names the value already"),
        ({"path": "a:out[1]"}, {"port": "y[0]"}, "names the value already"),
    ],
)
def test_a_key_without_effect_is_refused(match, rule, message):
    with pytest.raises(fxplug.SpecError, match=message):
        fxplug.Rule(fxplug.Match(**match), use=Ten, **rule)


def test_the_model_itself_takes_a_port():
    x, b = torch.full((2,), 3.0), torch.ones(2)
    gm = fxplug.trace(Bias(), (x, b))
    rule = fxplug.Rule(fxplug.Match(path=""), use=Ten, place="before", port="x.bias")
    assert fxplug.apply(gm, fxplug.Pass("p", rules=[rule]))(x, b).tolist() == [16.0, 16.0]
