"""The pack lowering: layers that read one value as one product, with their names, their memory and their updates."""

from __future__ import annotations

import copy

import pytest
import small
import torch
import torch.nn.functional as F
from torch import nn

import fxplug
from fxplug.blocks.lora_weight import LoraWeight
from fxplug.errors import SpecError
from fxplug.lowerings.linear.fused import fuse
from fxplug.lowerings.linear.packed import Packed, groups, pack
from fxplug.lowerings.merging.live import live
from fxplug.lowerings.regions.submodules import outline


class Block(nn.Module):
    """Attention over a text too and a gated network, written as users do: a view over merged dimensions among it."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=i != 1) for i in range(3))
        self.key, self.value = nn.Linear(6, width), nn.Linear(6, width)
        self.gate = nn.Parameter(torch.randn(10, width) * 0.3)
        self.up, self.down = nn.Linear(width, 10, bias=False), nn.Linear(10, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, text):
        b, t, c = x.shape
        score = self.q(x) @ self.k(x).transpose(1, 2)
        x = x + score.softmax(-1) @ self.v(x).view(b, t * c).view(b, t, c)  # not in one piece behind a packed product
        x = x + (x @ self.key(text).transpose(1, 2)).softmax(-1) @ self.value(text)
        return x + self.down(F.dropout(F.silu(F.linear(x, self.gate)) * self.up(x), 0.5, self.training))


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x, text):
        for block in self.blocks:
            x = block(x, text)
        return x


def near(found, wanted):
    """Equal to 1e-5 of the largest number."""
    assert found.shape == wanted.shape and (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def traced():
    inputs = (torch.randn(2, 3, 8), torch.randn(2, 5, 6))
    return fxplug.trace(Model().eval(), inputs), inputs


def loud(gm):
    """With values in what begins as zeros."""
    with torch.no_grad():
        for name, p in gm.named_parameters():
            if "Lora" in name:
                p.normal_(std=0.3)
    return gm


def found(gm, **options):
    return [[m.path for m in g.members] for g in groups(gm.graphs[False], gm, **options)]


def tied(gm):
    """Whether every part of a packed weight lies in it, and how many there are."""
    count = 0
    for module in gm.modules():
        if isinstance(module, Packed):
            for whole, names in ((module.weight, module.weights), (module.bias, module.biases)):
                for name, start in names.items():
                    part = gm.get_parameter(name)
                    assert part.data_ptr() == whole[start].data_ptr() and part.dtype == whole.dtype
                    count += 1
    return count


def test_layers_are_found_by_the_value_they_read_block_by_block():
    gm, _ = traced()
    one = [["q", "k", "v"], ["key", "value"], ["", "up"]]
    assert found(gm) == [[f"blocks.{i}.{n}".rstrip(".") for n in names] for i in range(2) for names in one]
    texts = [f"blocks.{i}.{n}" for i in range(2) for n in ("key", "value")]
    assert texts in found(gm, across=True)


@pytest.mark.parametrize("across", [False, True])
def test_a_packed_module_computes_the_same(across):
    gm, inputs = traced()
    packed = pack(gm, across=across)
    assert len(gm.graphs) == 2 and sum(isinstance(m, Packed) for m in packed.modules()) == (5 if across else 6)
    names = {str(n.target).rpartition(".")[2] for g in packed.graphs.values() for n in g.nodes if n.op == "call_module"}
    assert not names & {"q", "k", "v", "key", "value", "up"} and "down" in names
    with torch.no_grad():
        near(packed(*inputs), gm(*inputs))
        larger = torch.randn(3, 7, 8), torch.randn(3, 4, 6)
        near(packed(*larger), gm(*larger))
    for module in (gm, packed):
        module.train()
    results = []
    for module in (gm, packed):
        torch.manual_seed(3)
        results.append(module(*inputs))
    near(*results)


def test_gradients_reach_the_parameters_and_the_inputs():
    gm, inputs = traced()
    gradients = []
    for module in (gm, pack(gm)):
        x = inputs[0].clone().requires_grad_()
        module.zero_grad()
        module(x, inputs[1]).square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in module.parameters())])
    assert len(gradients[1]) == 1 + len(list(gm.parameters()))
    near(*(torch.cat([g.flatten() for g in found]) for found in gradients))


def test_names_values_and_memory_stay_what_they_were():
    gm, _ = traced()
    before = {name: value.clone() for name, value in gm.state_dict().items()}
    packed = pack(gm)
    assert list(packed.state_dict()) == list(before)
    for module in (gm, packed):
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    everything = [*gm.parameters(), *packed.parameters(), *packed.buffers()]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in everything}
    padding = 2 * (7 * 8 + 7) * 4  # at most so many rows beside each group's weight and bias
    assert sum(memory.values()) <= sum(v.numel() * 4 for v in before.values()) + 6 * padding
    assert tied(packed) == 2 * (3 + 2 + 2 + 2 + 2)
    assert packed.meta["source"] is gm and "one product of 3 layers" in packed.meta["forms"]["blocks.1.q"]


def changed_by_hand(packed, other):
    with torch.no_grad():
        for p, q in zip(packed.parameters(), other.parameters(), strict=True):
            p.copy_(q)
    return packed


CHANGES = {
    "load": lambda packed, other: packed.load_state_dict(other.state_dict()) and packed,
    "assign": lambda packed, other: packed.load_state_dict(other.double().state_dict(), assign=True) and packed.float(),
    "by hand": changed_by_hand,
    "copy": lambda packed, other: changed_by_hand(copy.deepcopy(packed), other),
    "move": lambda packed, other: changed_by_hand(packed.half().float(), other),
    "empty": lambda packed, other: changed_by_hand(packed.to_empty(device="cpu"), other),
    "from meta": lambda packed, other: changed_by_hand(packed.to("meta").to_empty(device="cpu"), other),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_into_parameters_reaches_the_product(change):
    (gm, inputs), (other, _) = traced(), traced()
    packed = CHANGES[change](pack(gm), other)
    assert tied(packed) == 22
    with torch.no_grad():
        near(packed(*inputs), other.float()(*inputs))


def test_half_precision():
    model, inputs = Model().eval().bfloat16(), (torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 5, 6).bfloat16())
    gm = fxplug.trace(model, inputs)
    packed = pack(gm)
    with torch.no_grad():
        torch.testing.assert_close(packed(*inputs), gm(*inputs), rtol=2e-2, atol=2e-2)
    gm, inputs = traced()
    packed = pack(gm)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(packed(*inputs), gm(*inputs), rtol=2e-2, atol=2e-2)
    packed.half()
    assert tied(packed) == 22 and gm.get_parameter("blocks.0.q.weight").dtype == torch.float16


# --- updates


def adapted(gm, **options):
    """Updates on some of the layers, and a second one on one of them."""
    first = fxplug.load_pass("lora", at="re:.*\\.(q|v|key|up|down)$", rank=3, **options)
    second = fxplug.load_pass("lora", at="re:.*\\.(v|value)$", rank=2, alpha=5, name="second")
    return loud(fxplug.apply(gm, first, second))


def test_updates_are_packed_with_their_layers():
    gm, inputs = traced()
    new = adapted(gm)
    packed = pack(new)
    assert sum(isinstance(m, Packed) for m in packed.modules()) == 6
    assert [g.ranks for g in groups(new.graphs[False], new)][:3] == [[3, 3, 2], [3, 2], [3]]
    assert list(packed.state_dict()) == list(new.state_dict())
    assert tied(packed) == 2 * (11 + 6)
    with torch.no_grad():
        want = new(*inputs)
        assert not torch.allclose(want, gm(*inputs), rtol=1e-2)
        near(packed(*inputs), want)
        new.get_submodule("lora.blocks.0.q.Lora").scale.fill_(0.3)
        near(packed(*inputs), new(*inputs))
    near(packed(*inputs), new(*inputs))
    gradients = []
    for module in (new, packed):
        module.zero_grad()
        module(*inputs).square().sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
    near(*(torch.cat([g.flatten() for g in found]) for found in gradients))


def test_updates_that_cannot_be_packed_stay_beside_the_product():
    gm, inputs = traced()
    new = adapted(gm, dropout=0.2)
    packed = pack(new)
    assert [g.ranks for g in groups(new.graphs[False], new)][:3] == [[], [2], []]
    with torch.no_grad():
        near(packed(*inputs), new(*inputs))


def test_banks_with_slots_are_packed():
    gm, inputs = traced()
    new = loud(fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*\\.(q|v|key|up)$", rank=2, slots=3)))
    packed = pack(new)
    assert [g.ranks for g in groups(new.graphs[False], new)][:3] == [[6, 6], [6], [6]]
    table = new.get_submodule("lora.gates.table")
    with torch.no_grad():
        plain = packed(*inputs)
        near(plain, gm(*inputs))
        table.weights.copy_(torch.tensor([0.5, 0.0, 2.0]))
        near(packed(*inputs), new(*inputs))
        assert not torch.allclose(packed(*inputs), plain, rtol=1e-2)
        table.weights[:2] = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.7]])
        table.entries.fill_(2)
        near(packed(*inputs), new(*inputs))
        loud(new)  # other adapters
        near(packed(*inputs), new(*inputs))


def test_adapters_are_switched_beside_and_in_a_packed_weight():
    gm, inputs = traced()
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*\\.(q|v|key|up|down)$", rank=2, slots=2))
    plain = loud(fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*\\.(q|v|key|down)$", rank=2)))
    one = {name: value.clone() for name, value in plain.state_dict().items() if name.startswith("lora.")}
    two = {name: value * 2 for name, value in one.items() if "blocks.0" in name and "scale" not in name}
    two.update({name: one[name] for name in one if "blocks.0" in name and "scale" in name})
    beside, inside = pack(new), pack(live(new))
    modules = [new, beside, inside]
    held = [(list(m.weights), m.bias) for m in inside.modules() if isinstance(m, Packed)]
    assert held == [([f"blocks.{i}.q.weight", f"blocks.{i}.v.weight"], None) for i in range(2)]  # `beside` has the others
    with torch.no_grad():
        first = gm(*inputs)
        for module in (new, inside):  # `beside` shares its banks with `new`
            module.adapters.load("one", one)
            module.adapters.load("two", two)
            module.adapters.use({"one": 0.5, "two": -1.0})
        results = [module(*inputs) for module in modules]
        assert not torch.allclose(results[0], first, rtol=1e-2)
        near(results[1], results[0])
        near(results[2], results[0])
        new.adapters.use(["one", None])
        mixed = new(*inputs)
        near(beside(*inputs), mixed)
        near(mixed[1], first[1])


@pytest.mark.slow
def test_one_graph_under_compile_and_with_the_other_lowerings():
    gm, inputs = traced()
    new = adapted(gm)
    packed = fuse(pack(new))
    torch._dynamo.reset()
    graphs = []

    def count(graph, example):
        graphs.append([n.target for n in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(packed, fullgraph=True, backend=count)
    with torch.no_grad():
        near(compiled(*inputs), new(*inputs))
        loud(new)
        near(compiled(*inputs), new(*inputs))
        regions = outline(pack(new), ["blocks.*"])
        near(regions(*inputs), new(*inputs))
        regions = regions.half().float()
        loud(new)
    assert len(graphs) == 1
    program = torch.export.export(pack(new), inputs)
    near(program.module()(*inputs), new(*inputs))


# --- what stays apart


class Siblings(nn.Module):
    """Two layers on one value; `how` comes between or after them."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(4, 4), (nn.Linear(4, 4) if how != "derived" else Derived(4, 4))

    def forward(self, x):
        x, how = x * 2, self.how
        a = self.a(x)
        if how == "value changed":
            x.view(-1)[0] = 3.0
        if how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                b = self.b(x)
        elif how == "weight made":
            b = F.linear(x, self.b.weight * 1)
        else:
            b = self.b(x)
        if how == "result changed":
            b.mul_(2)
        if how == "a view of it changed":
            b.unsqueeze(0).mul_(2)
        if how == "memory read":
            b = b.view_as(x)
        return (a * 1, b) if how == "result" else a * b


class Derived(nn.Linear):
    pass


def siblings(how):
    x = torch.randn(3, 4)
    return fxplug.trace(Siblings(how).eval(), (x,), leaf=["b"] if how == "derived" else []), x


def test_siblings_are_packed():
    gm, x = siblings("plain")
    assert found(gm) == [["a", "b"]]
    with torch.no_grad():
        near(pack(gm)(x), gm(x))
        assert found(pack(gm)) == []


APART = ["value changed", "autocast", "weight made", "result changed", "a view of it changed", "memory read", "result"]


@pytest.mark.parametrize("how", [*APART, "derived"])
def test_what_cannot_be_one_product_stays_apart(how):
    gm, x = siblings(how)
    assert found(gm) == []
    with torch.no_grad():
        assert torch.equal(torch.cat(list(pack(gm)(x))), torch.cat(list(gm(x))))


def test_hooks_tied_weights_and_parameters_that_a_pass_changes_stay():
    gm, x = siblings("plain")
    new = fxplug.apply(gm, fxplug.load_pass("lora_weight", at="a", rank=2))
    assert any(isinstance(m, LoraWeight) for m in new.modules()) and found(new) == []
    gm.b.register_forward_hook(lambda *_: None)
    assert found(gm) == []
    gm, x = siblings("plain")
    gm.b.weight = nn.Parameter(gm.a.weight.data)  # the memory of another parameter
    assert found(gm) == []


def test_memory_that_another_packing_holds_is_left_there():
    gm, inputs = traced()
    first = pack(gm, across=True)
    second = pack(gm)
    assert tied(first) == 22 and tied(second) == 22
    third = pack(gm, worth=lambda group: group.in_features == 6)
    assert tied(third) == 8
    gm.blocks[0].q.weight.data = torch.randn(8, 8)  # no longer beside the others
    fourth = pack(gm)
    assert not any("blocks.0.q.weight" in m.weights for m in fourth.modules() if isinstance(m, Packed))
    with torch.no_grad():
        near(fourth(*inputs), gm(*inputs))


def test_many_rows_stay_apart_on_a_cpu(monkeypatch):
    """Where whole models were measured slower with one product."""
    gm, _ = traced()
    rows = sorted(g.tokens for g in groups(gm.graphs[False], gm))
    assert 0 < rows[0] < rows[-1] and sum(isinstance(m, Packed) for m in pack(gm).modules()) == len(rows) == 6
    monkeypatch.setattr("fxplug.lowerings.linear.groups.FEW", rows[0])
    assert sum(isinstance(m, Packed) for m in pack(traced()[0]).modules()) == rows.count(rows[0])


def test_what_is_no_traced_module():
    with pytest.raises(SpecError, match="pack takes a traced module, not Linear"):
        pack(nn.Linear(2, 2))


def test_a_unet():
    gm, args, kwargs = small.unet()
    new = loud(fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*to_(q|k|v|out\\.0)$", rank=4)))
    packed = pack(copy.deepcopy(new))
    kinds = [g.widths for g in groups(new.graphs[False], new)]
    assert len(kinds) == 8 and {len(widths) for widths in kinds} == {2, 3}
    with torch.no_grad():
        near(packed(*args, **kwargs).sample, new(*args, **kwargs).sample)
