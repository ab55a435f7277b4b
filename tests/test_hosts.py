"""What a block gets to see of the model it is made for: its parts by their names, and nothing that it could change."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

import fxplug


class Attention(nn.Module):
    """A part with code of its own."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.heads = 2

    def forward(self, x):
        return self.proj(x) * self.heads


class Model(nn.Module):
    """Parts that a graph keeps whole, and one whose code is in it."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(4), Attention()
        self.register_buffer("scale", torch.ones(4))
        self.marks = {"a": [1]}

    def forward(self, x):
        return self.attn(self.norm(x)) * self.scale


class Host(nn.Module):
    """A block that does something with the part it is made for."""

    do = staticmethod(lambda host, root: None)
    inline = False
    neutral = False

    def __init__(self, host, root):
        super().__init__()
        type(self).do(host, root)

    @classmethod
    def at(cls, site):
        return cls(site.module, site.root)

    def forward(self, x, y):
        return y


def put(gm, path, do, **more):
    kind = type("Doing", (Host,), {"do": staticmethod(do), **more})
    return fxplug.apply(gm, fxplug.Pass("p", rules=[fxplug.Rule(fxplug.Match(path=path), use=kind)]))


@pytest.fixture
def gm():
    torch.manual_seed(0)
    return fxplug.trace(Model().eval(), torch.randn(2, 4))



CHANGES = {
    "eps": lambda host, root: setattr(host, "eps", 0.5),
    "note": lambda host, root: setattr(host, "note", [root]),
    "_forward_pre_hooks": lambda host, root: host.register_forward_pre_hook(lambda *_: None),
    "_forward_hooks": lambda host, root: host.register_forward_hook(lambda *_: None),
    "_parameters": lambda host, root: setattr(host, "weight", nn.Parameter(torch.zeros(4))),
    "_modules": lambda host, root: host.add_module("more", nn.Linear(1, 1)),
    "_buffers": lambda host, root: host.register_buffer("seen", torch.zeros(1)),
    "forward": lambda host, root: setattr(host, "forward", lambda x: x),
    "training": lambda host, root: host.train(),
    "elementwise_affine": lambda host, root: delattr(host, "elementwise_affine"),
    "__class__": lambda host, root: setattr(host, "__class__", type("Other", (nn.LayerNorm,), {})),
}
WRITES = {
    "in place": torch.no_grad()(lambda host, root: host.weight.mul_(2)),
    "behind autograd": lambda host, root: host.weight.data.zero_(),
    "through a view": lambda host, root: host.weight.detach()[1:3].fill_(7),
    "from an initialiser": lambda host, root: nn.init.normal_(host.weight),
    "of another dtype": lambda host, root: host.half(),
    "elsewhere": lambda host, root: setattr(host.weight, "data", torch.ones(4)),
    "frozen": lambda host, root: host.weight.requires_grad_(False),
    "a hook": lambda host, root: host.weight.register_hook(lambda grad: grad * 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_block_that_changes_its_host_is_refused_and_nothing_stays_of_it(gm, name):
    x, state = torch.randn(3, 4), {k: repr(v) for k, v in vars(gm.norm).items()}
    want = gm(x)
    with pytest.raises(fxplug.SpecError, match=rf"p: Doing changes the model .*: {name} of 'norm'; "):
        put(gm, "norm", CHANGES[name])
    assert {k: repr(v) for k, v in vars(gm.norm).items()} == state and torch.equal(gm(x), want)
    assert put(gm, "norm", lambda host, root: None) is not None


@pytest.mark.parametrize("name", WRITES)
def test_weights_that_a_block_writes_are_refused_and_are_as_they_were(gm, name):
    x, weight = torch.randn(3, 4), gm.norm.weight
    want, place = gm(x), weight.data_ptr()
    with pytest.raises(fxplug.SpecError, match="Doing changes .*: weight"):
        put(gm, "norm", WRITES[name])
    assert torch.equal(gm(x), want) and gm.norm.weight is weight and weight.data_ptr() == place
    gm(x).sum().backward()
    assert weight.grad.count_nonzero()


def test_what_a_block_writes_of_its_own_stays(gm):
    class Own(Host):
        def __init__(self, host, root):
            super().__init__(host, root)
            self.like = nn.Parameter(host.weight.detach().clone().mul_(3))
            self.kept = nn.Parameter(torch.from_numpy(np.ones(4, "f4")).mul_(5))

        def forward(self, x, y):
            return y * self.like + self.kept

    x = torch.randn(3, 4)
    new = fxplug.apply(gm, fxplug.Pass("p", rules=[fxplug.Rule(fxplug.Match(path="norm"), use=Own)]))
    assert torch.equal(new.p.norm.Own.kept, torch.full((4,), 5.0)) and torch.equal(new.p.norm.Own.like, torch.full((4,), 3.0))
    assert torch.equal(new(x), gm.attn.proj(gm.norm(x) * 3 + 5) * 2)


def test_what_lies_deeper_in_a_host_is_seen_as_well(gm):
    with pytest.raises(fxplug.SpecError, match="changes .*: marks of ''"):
        put(gm, "norm", lambda host, root: root.marks["a"].append(2))
    assert gm.marks == {"a": [1]}


def test_a_block_that_changes_another_part_or_fails_meanwhile_is_refused_as_well(gm):
    with pytest.raises(fxplug.SpecError, match="p: norm: 'attn.heads' of a traced Attention was 2 "):
        put(gm, "norm", lambda host, root: setattr(root.attn, "heads", 7))
    with pytest.raises(fxplug.SpecError, match="p: norm: Doing.at failed: ZeroDivisionError: ") as caught:
        put(gm, "norm", lambda host, root: (setattr(host, "eps", 0.5), 1 / 0))
    assert type(caught.value.__cause__) is ZeroDivisionError
    assert gm.norm.eps == 1e-5 and gm.attn.heads == 2


class Lazy(nn.Module):
    """A part with an attribute that is worked out when it is first asked for."""

    @functools.cached_property
    def wide(self):
        return [8]

    def forward(self, x):
        return x + 1


def test_a_block_may_ask_a_host_for_what_it_works_out():
    gm = fxplug.trace(nn.Sequential(Lazy()), torch.randn(2, 4), leaf=["0"])
    seen = []
    put(gm, "0", lambda host, root: seen.append(host.wide))
    assert seen == [[8]] and "wide" not in vars(gm[0])


def test_a_host_has_the_name_of_its_class(gm):
    seen = []
    new = put(gm, "attn", lambda host, root: seen.append((type(host).__name__, host.heads, type(copy.deepcopy(host)).__name__)))
    assert seen == [("Attention", 2, "Attention")] and repr(new.attn).startswith("Attention(")
    assert type(fxplug.apply(new, fxplug.load_pass("lora", at="attn.proj")).attn).__name__ == "Attention"


def test_a_part_whose_code_is_in_the_graph_is_not_called_by_itself(gm, tmp_path):
    def call(host, root):
        host(torch.zeros(1, 4))

    def call_a_copy(host, root):
        copy.deepcopy(root.attn)(torch.zeros(1, 4))

    class Calls(Host):
        inline = True

        def __init__(self, host, root):
            super().__init__(host, root)
            self.part = copy.deepcopy(host)

        def forward(self, x, y):
            return self.part(y)

    for do in (call, call_a_copy):
        with pytest.raises(fxplug.SpecError, match=r"p: a block calls Attention \(attn\), .* leaf: \['attn'\]"):
            put(gm, "attn", do)
    made = fxplug.Pass("p", rules=[fxplug.Rule(fxplug.Match(path="attn"), use=Calls)])
    with pytest.raises(fxplug.SpecError, match=r"p: a block calls Attention \(attn\), .* leaf: \['attn'\]"):
        fxplug.apply(gm, made)
    model, x = Model().eval(), torch.randn(2, 4)
    whole = fxplug.trace(model, x, leaf=["attn"])
    new = fxplug.apply(whole, made)
    assert torch.equal(new(x), model.attn(model.attn(model.norm(x))) * model.scale)
