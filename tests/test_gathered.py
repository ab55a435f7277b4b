"""The gathered bank: each sample multiplies the factors of its own adapters, and gives what the bank of all slots gives."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError, SpecError
from fxplug.exports.package_file import check_slots

NAMES, SLOTS, RANK = [f"a{i}" for i in range(6)], 7, 4


class Layers(nn.Module):
    """A layer of each kind: tokens, folded tokens, vectors, convolutions (grouped, strided, pointwise, padded by circling)."""

    def __init__(self):
        super().__init__()
        # rows of 16 bytes or so many times that: MKL sums others on AMD's processors by their place in memory
        self.table, self.tokens, self.folded = nn.Embedding(11, 12), nn.Linear(12, 12), nn.Linear(12, 8, bias=False)
        self.first, self.grouped = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Conv2d(8, 12, 3, padding="same", groups=4)
        self.point, self.around = nn.Conv2d(12, 8, 1), nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
        self.line, self.vector = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.turned = nn.Linear(8, 8)

    def forward(self, x, index):
        tokens = self.folded(self.tokens(self.table(index)).flatten(0, 1)).unflatten(0, index.shape)
        picture = self.around(self.point(self.grouped(self.first(x))))
        line = self.line(picture.flatten(2))
        rest = self.turned(tokens.transpose(0, 1)).transpose(0, 1)
        return self.vector(line.mean(2)) + tokens.mean(1) + rest.sum(1)


@cache
def traced(dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fxplug.trace(Layers().eval().to(dtype), inputs(4, dtype=dtype))


def inputs(batch, seed=0, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 8, 8, generator=gen).to(dtype), torch.randint(0, 11, (batch, 5), generator=gen)


def adapter(seed):
    """An adapter of a rank of its own, on some layers."""
    gen, rng, made = torch.Generator().manual_seed(seed), random.Random(seed), {}
    rank = rng.randint(1, 3)
    for name, layer in traced().named_modules():
        weight = getattr(layer, "weight", None)
        if weight is not None and (rng.random() < 0.8 or seed == 0):
            if "table" in name:
                halves = torch.randn(rank, 11, generator=gen), torch.randn(12, rank, generator=gen)
                made |= dict(zip((f"{name}.lora_embedding_A", f"{name}.lora_embedding_B"), halves, strict=True))
                continue
            own = rank if "grouped" not in name else min(rank, 2)
            made[f"{name}.lora_A.weight"] = torch.randn(own, *weight.shape[1:], generator=gen)
            made[f"{name}.lora_B.weight"] = torch.randn(weight.shape[0], own, *[1] * (weight.dim() - 2), generator=gen) * 0.3
    return made


def slotted(dtype=torch.float32, slots=SLOTS, names=NAMES, **options):
    new = fxplug.apply(traced(dtype), fxplug.load_pass("lora", at="**", rank=RANK, slots=slots, **options))
    for name in names:
        new.adapters.load(name, adapter(int(name[1:])))
    return new


def draw(rng, batch, most=3):
    """Random rows: names with weights, one name, nothing."""
    some = [rng.sample(NAMES, rng.randint(0, most)) for _ in range(batch)]
    return [{name: rng.choice([1.0, -0.5, 0.3]) for name in row} for row in some]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_sample_gets_its_mixture(dtype):
    plain, new, rng = slotted(dtype), slotted(dtype, per_sample=3), random.Random(0)
    base = traced(dtype)
    assert torch.equal(new(*inputs(4, dtype=dtype)), base(*inputs(4, dtype=dtype)))
    for batch, what in [(b, draw(rng, b)) for b in (1, 2, 5)] + [(4, "a0"), (3, {"a1": 0.5, "a2": -1.0}), (2, None)]:
        x = inputs(batch, batch, dtype)
        plain.adapters.use(what)
        new.adapters.use(what)
        assert new.adapters.active == plain.adapters.active
        close = {"rtol": 2e-5, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 1.0}
        torch.testing.assert_close(new(*x), plain(*x), **close)
    with pytest.raises(SpecError, match=r"sample 1: 4 adapters, .* per_sample=4"):
        new.adapters.use([None, dict.fromkeys(NAMES[:4], 1.0)])


@torch.no_grad()
def test_bits_of_a_row_depend_on_no_neighbour_and_no_slot():
    new, other, rng = slotted(per_sample=2), slotted(per_sample=2, slots=30, names=NAMES[::-1]), random.Random(1)
    x = inputs(4)
    row = {"a3": 0.7, "a0": 1.0}
    seen = set()
    for turn in range(40):
        where, module = rng.randrange(4), (new, other)[turn % 2]
        rows, mixed = draw(rng, 4, 2), [value.clone() for value in inputs(4, turn + 1)]
        rows[where] = row
        for value, own in zip(mixed, x, strict=True):
            value[where] = own[0]
        module.adapters.use(rows)
        seen.add(module(*mixed)[where].numpy().tobytes())
    assert len(seen) == 1


@torch.no_grad()
def test_slots_that_are_emptied_and_filled_beside_rows(tmp_path):
    new = slotted(per_sample=2)
    x = inputs(3)
    rows = new.adapters.rows([{"a0": 1.0, "a1": 0.5}, "a2", None])
    new.adapters.use(rows)
    wanted = new(*x)
    assert new.adapters.slots == SLOTS and len(new.adapters.names) == 6
    new.adapters.load("b", adapter(9))
    with pytest.raises(SpecError, match="all 7 slots"):
        new.adapters.load("c", adapter(9))
    new.adapters.unload("a4")
    assert torch.equal(new(*x), wanted)
    fxplug.save(new, tmp_path / "saved")
    loaded = fxplug.load(tmp_path / "saved")
    assert torch.equal(loaded(*x), wanted) and loaded.adapters.active == new.adapters.active
    with new.adapters.using(["b", "b", None]):
        assert not torch.equal(new(*x), wanted)
    assert torch.equal(new(*x), wanted)
    new.adapters.load("a2", adapter(3), replace=True)
    assert not torch.equal(new(*x)[1], wanted[1]) and torch.equal(new(*x)[0], wanted[0])
    new.adapters.unload("a1")  # rows go on without it
    assert new.adapters.active == [{"a0": 1.0}, {"a2": 1.0}, {}]
    table = new.lora.gates.table
    assert table.which[0].tolist() == [table.which[0, 0].item(), SLOTS]
    with pytest.raises(SpecError, match="no adapter 'a1'"):
        new.adapters.use(rows)


@pytest.mark.slow
@torch.no_grad()
def test_other_forms_of_the_module_give_the_same():
    new, rng = slotted(per_sample=2), random.Random(2)
    x = inputs(4)
    calls = 0

    def backend(graph, example):
        nonlocal calls
        calls += 1
        return graph.forward

    compiled = torch.compile(new, backend=backend, fullgraph=True)
    forms = {how: fxplug.lower(new, fuse=how) for how in ("auto", "fused", "blas")}
    for _ in range(4):
        new.adapters.use(draw(rng, 4, 2))
        wanted = new(*x)
        torch.testing.assert_close(compiled(*x), wanted)
        for form in forms.values():
            torch.testing.assert_close(form(*x), wanted, rtol=1e-4, atol=1e-4)
    assert calls == 1
    new.adapters.use({"a0": 0.5, "a1": 1.0})
    torch.testing.assert_close(fxplug.merge(new)(*x), new(*x), rtol=1e-3, atol=1e-3)
    live = fxplug.lower(new, merge="live")
    for module in (new, live):
        module.adapters.unload("a0")
        module.adapters.load("b", adapter(9))
        module.adapters.use({"b": 0.5, "a2": 1.0})
    torch.testing.assert_close(live(*x), new(*x), rtol=1e-3, atol=1e-3)
    with pytest.raises(SpecError, match="per-sample adapters are not supported with merge='live'"):
        live.adapters.use(["b", None, None, None])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("to", ["onnx", pytest.param("aoti", marks=pytest.mark.slow)])
def test_exports_choose_by_sample(to, tmp_path):
    gm = fxplug.trace(nn.Sequential(nn.Linear(6, 5)).eval(), torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    new = fxplug.apply(gm, fxplug.load_pass("dora", at="**", rank=2, slots=5, per_sample=2, groups=["0"]))
    halves = [torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for name, (down, up) in zip("abc", halves, strict=True):
        new.adapters.load(name, {"0.lora_A.weight": down, "0.lora_B.weight": up[:, :5].T.contiguous()})
    gates = {"peft_type": "IA3", "feedforward_modules": [], "target_modules": ["0"]}
    dora = {"0.lora_A.weight": halves[0][0], "0.lora_B.weight": halves[1][1][:, :5].T.contiguous()}
    dora["0.lora_magnitude_vector.weight"] = torch.full((5,), 1.5)
    new.adapters.load("d", dora)
    new.adapters.load("e", {"0.ia3_l": torch.full((5, 1), 0.5)}, config=gates)
    half = fxplug.Strength(1.0, {"0": 0.5})
    new.adapters.use("a")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(9))
    path = fxplug.export(new, tmp_path, x, to=to).path
    exported = fxplug.load_onnx(path) if to == "onnx" else fxplug.load_package(path, trusted=True)
    exported.adapters.unload("c")
    for what in ("a", [{"a": 0.5, "b": 1.0}, "b", None, "a"], None, [{"d": half, "e": 1.0}, "e", None, {"d": half, "a": 2.0}]):
        new.adapters.use(what)
        exported.adapters.use(what)
        torch.testing.assert_close(exported(x), new(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(SpecError, match="no adapter 'c'"):
        exported.adapters.use("c")
    exported.adapters.load("c", {"0.ia3_l": torch.full((5, 1), 0.5)}, config=gates)
    new.adapters.use("e")
    exported.adapters.use("c")
    torch.testing.assert_close(exported(x), new(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(SpecError, match="needs the weight of '0', which this module does not have"):
        exported.adapters.load("f", dora)
    check_slots(new.adapters)
    new.dora.gates.table.which[0, 0] = 6
    with pytest.raises(ArtifactError, match="must have .6. slots"):
        check_slots(new.adapters)


def test_what_has_no_form_by_sample_is_refused():
    with pytest.raises(SpecError, match="per_sample"):
        fxplug.load_pass("lora", at="**", slots=2, per_sample=3)
    with pytest.raises(SpecError, match="per_sample"):
        fxplug.load_pass("lora", at="**", per_sample=1)
