"""One plan for many processes: found for models that nobody listed, exact on pretended and on real processes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import warnings

import processes
import pytest
import small
import torch
import torch.nn.functional as F
import zoo
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core.ir.comparison import measure_distance
from fxplug.parallel.planning.streams import OperationRefused
from fxplug.parallel.planning.trials import ShardTrials
from fxplug.parallel.runtime import layouts
from fxplug.parallel.runtime.attention import Attention
from fxplug.parallel.runtime.collectives import AllReduce, Gather, GlobalSize, Split, record_traffic
from fxplug.parallel.runtime.halos import Cut, Extent, Fetch
from fxplug.parallel.runtime.mesh import fill_degrees
from fxplug.parallel.runtime.norm_statistics import Norm
from fxplug.parallel.runtime.pretended import run_simulated

CLOSE = 1e-6
CASES = {case.name: case for case in zoo.cases("diffusers/")}


# --- the operations


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_parts_are_even_within_one_and_cover_the_whole(world):
    for size in range(1, 40):
        lengths = [layouts.count(size, rank, world) for rank in range(world)]
        assert sum(lengths) == size and max(lengths) - min(lengths) <= 1
        found = torch.cat([layouts.list_positions([size, 7], [rank], world) for rank in range(world)])
        assert sorted(found.tolist()) == list(range(size + 7))


@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("sizes", [[8], [7], [4, 9], [5, 4, 6]])
@pytest.mark.parametrize("outer", [1, 2])
def test_what_is_split_and_gathered_is_what_it_was(sizes, inner, outer):
    ways = fill_degrees({"ulysses": 4})
    x = torch.randn(3, outer * sum(sizes) * inner, 2, requires_grad=True)
    split, gather, whole = (kind(ways, "sequence", 1) for kind in (Split, Gather, GlobalSize))
    split.inner = gather.inner = inner
    weights = torch.randn_like(x)

    def run(rank):
        part = split(x, *sizes)
        again = gather(part, *sizes)
        (gradient,) = torch.autograd.grad((again * weights).sum(), x)
        return part.shape[1], again, whole(part, *sizes), gradient

    found = run_simulated(ways, run)
    assert sum(length for length, *_ in found) == x.shape[1]
    assert all(torch.equal(again, x) and size == x.shape[1] for _, again, size, _ in found)
    torch.testing.assert_close(sum(gradient for *_, gradient in found) / 4, weights)


WAYS = [{"ulysses": 2}, {"ulysses": 3}, {"ring": 2}, {"ring": 3}, {"ulysses": 2, "ring": 2}]
MASKS = {
    "none": lambda heads, n: None,
    "causal": lambda heads, n: None,
    "keys": lambda heads, n: (torch.arange(n) % 3 > 0)[None, None, None].expand(2, 1, 1, n),
    "rows": lambda heads, n: torch.randn(n, n),
    "heads": lambda heads, n: torch.randn(2, heads, n, n),
}


@pytest.mark.parametrize("mask", MASKS)
@sweep("ways", WAYS, 0, 2, ids=str)
def test_attention_of_parts_and_its_gradients(ways, mask):
    ways = fill_degrees(ways)
    torch.manual_seed(0)
    for sizes, (heads, held) in itertools.product(([12], [5, 8]), ((4, 4), (4, 2), (5, 5), (1, 1))):
        n = sum(sizes)
        given = [torch.randn(2, h, n, 6, requires_grad=True) for h in (heads, held, held)]
        bias, causal = MASKS[mask](heads, n), mask == "causal"
        one = F.scaled_dot_product_attention(*given, attn_mask=bias, is_causal=causal, enable_gqa=heads != held)
        weights = torch.randn_like(one)
        wanted = torch.autograd.grad((one * weights).sum(), given)
        split, gather = (kind(ways, "sequence", 2) for kind in (Split, Gather))
        attention = Attention(ways, len(sizes), causal)

        def run(rank, parts=(given, bias, sizes, weights, split, gather, attention)):
            given, bias, sizes, weights, split, gather, attention = parts
            out = gather(attention(*(split(t, *sizes) for t in given), bias, None, *sizes, *sizes), *sizes)
            return out, torch.autograd.grad((out * weights).sum(), given)

        found = run_simulated(ways, run)
        for out, _ in found:
            torch.testing.assert_close(out, one, rtol=1e-5, atol=1e-5)
        for index, gradient in enumerate(wanted):  # the mean over the processes
            torch.testing.assert_close(sum(g[index] for _, g in found) / len(found), gradient, rtol=1e-4, atol=1e-5)


RINGS = {
    "plain": {}, "double": {"dtype": torch.float64}, "half": {"dtype": torch.bfloat16}, "values": {"features": 5},
    "learned": {"bias": (2, 3, 11, 11)}, "heads": {"bias": (3, 11, 11)}, "keys": {"bias": (2, 1, 1, 11)},
    "blind": {"blind": True}, "few": {"n": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_of_three(name):
    """Kernels, plain products where there is none, learned masks, rows that see nothing, processes without keys."""
    wanted = {"dtype": torch.float32, "features": 8, "bias": None, "blind": False, "n": 11, **RINGS[name]}
    n, dtype = wanted["n"], wanted["dtype"]
    torch.manual_seed(0)
    given = [torch.randn(2, 3, n, f, dtype=dtype, requires_grad=True) for f in (8, 8, wanted["features"])]
    mask = torch.randn(wanted["bias"], requires_grad=True) if wanted["bias"] else None
    if wanted["blind"]:
        mask = torch.rand(n, n) < 0.5
        mask[3], mask[:, 4:8] = False, False
    leaves = [*given, *([mask] if wanted["bias"] else [])]
    high = [t.detach().double().requires_grad_() for t in given]
    one = F.scaled_dot_product_attention(*high, attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.double())
    weights = torch.randn_like(one)
    want = torch.autograd.grad((one * weights).sum(), [*high, *leaves[3:]])
    split, gather = (kind(fill_degrees({"ring": 3}), "sequence", 2) for kind in (Split, Gather))
    attention = Attention(fill_degrees({"ring": 3}))

    def run(rank):
        out = gather(attention(*(split(t, n) for t in given), mask, None, n, n), n)
        return out, torch.autograd.grad((out * weights).sum(), leaves)

    close = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    found = run_simulated(fill_degrees({"ring": 3}), run)
    for out, _ in found:
        assert out.dtype == dtype and torch.allclose(out.double(), one.nan_to_num(), rtol=close, atol=close)
    for index, gradient in enumerate(want):
        mean = sum(g[index].double() for _, g in found) / 3
        assert torch.allclose(mean, gradient.double().nan_to_num(), rtol=close, atol=close), index


def test_sums_and_their_gradients():
    ways = fill_degrees({"ulysses": 2})
    x = torch.randn(4, 3, requires_grad=True)
    total = AllReduce(ways, "sequence")
    for out, (gradient,) in run_simulated(ways, lambda rank: ((y := total(x * (rank + 1))), torch.autograd.grad(y.sum(), x))):
        torch.testing.assert_close(out, 3 * x)
        assert gradient.shape == x.shape


WAYS = [{"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}, {"batch": 2}, {"tensor": 2}, {"batch": 2, "ulysses": 2}]


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("how", ["einsum", "sdpa"])
def test_the_mean_over_processes_is_the_gradient_of_inputs_and_of_parameters(how, ways):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 24), Attend(how), nn.GELU(), nn.Linear(24, 24)).eval(), torch.randn(2, 8, 24)
    gm = fxplug.trace(model, x)
    plan = fxplug.parallel_plan(gm, x, check=False, **ways)
    new = fxplug.parallelize(gm, plan)
    weights, ends = torch.randn(2, 8, 24), [*model.parameters()]

    def gradients(module, parameters):
        given = x.clone().requires_grad_()
        return torch.autograd.grad((module(given) * weights).sum(), [given, *parameters])

    wanted = gradients(model, ends)
    names = [name for name, _ in model.named_parameters()]
    found = run_simulated(plan.ways, lambda rank: gradients(new, [dict(new.named_parameters())[name] for name in names]))
    for index, gradient in enumerate(wanted):
        mean = sum(each[index] for each in found) / len(found)
        torch.testing.assert_close(mean, gradient, rtol=1e-4, atol=1e-5, msg=["input", *names][index])


# --- models that nobody listed


class Attend(nn.Module):
    """Self-attention written in one of the ways that people write it."""

    def __init__(self, how: str, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.how, self.heads = how, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        if self.how == "einsum":
            q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).unbind(2)
            a = torch.einsum("bnhd,bmhd->bhnm", q, k).mul((c // self.heads) ** -0.5).softmax(-1)
            return self.out(torch.einsum("bhnm,bmhd->bnhd", a, v).reshape(b, n, c))
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        if self.how == "bmm":
            q, k, v = (t.reshape(b * self.heads, n, -1) for t in (q, k, v))
            a = torch.bmm(q, k.transpose(1, 2)) * (c // self.heads) ** -0.5
            y = torch.bmm(torch.softmax(a, dim=-1), v).view(b, self.heads, n, -1)
        elif self.how == "softmax":
            a = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5
            a = (a - a.amax(-1, keepdim=True)).exp()
            y = (a / a.sum(-1, keepdim=True)) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


class OwnDiT(nn.Module):
    """A diffusion transformer as one might write it: patches, positions, modulation by the step, a head, pictures again."""

    def __init__(self, how: str, depth: int = 3, width: int = 24) -> None:
        super().__init__()
        self.patch, self.step = nn.Conv2d(4, width, 2, 2), nn.Linear(8, 6 * width)
        self.position = nn.Parameter(torch.randn(1, 256, width) * 0.1)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width), "attn": Attend(how, width), "again": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, 16)

    def forward(self, x, step):
        b, _, h, w = x.shape
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.position[:, : x.shape[1]]
        shift, scale, gate, more, wide, last = self.step(step).unsqueeze(1).chunk(6, -1)
        for block in self.blocks:
            x = x + gate * block["attn"](block["norm"](x) * (1 + scale) + shift)
            x = x + last * block["mlp"](block["again"](x) * (1 + wide) + more)
        x = self.head(x).view(b, h // 2, w // 2, 4, 2, 2)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(b, 4, h, w)


HOWS = ("sdpa", "einsum", "bmm", "softmax")


@functools.cache
def own(how):
    model = small.seeded(lambda: OwnDiT(how)).eval()
    return fxplug.trace(model, own_inputs()).eval()


def own_inputs(batch=2, height=8, width=12):
    return small.seeded(lambda: (torch.randn(batch, 4, height, width), torch.randn(batch, 8)))


@pytest.mark.parametrize("how", HOWS)
def test_a_diffusion_transformer_that_no_library_has(how):
    gm = own(how)
    plan = fxplug.parallel_plan(gm, own_inputs(), ulysses=2)
    assert plan.share > 0.8 and plan.check() < CLOSE
    kinds = [m["block"] for n in plan.written.graph.nodes if (m := n.meta.get("pass"))]
    assert (kinds.count("Attention") == 3) is (how == "sdpa")


def test_the_plan_is_printed():
    text = str(fxplug.parallel_plan(own("sdpa"), own_inputs(), ulysses=2))
    for line in (
        "ulysses 2",
        "of the work is split",
        "stream 0: 24 from 'flatten', dimension 2, in parts of [12, 12]",
        "3 Attention",
        "whole at 'view': it mixes tokens",
        "collectives of process 0 send",
    ):
        assert line in text, text


NAMES = {
    "DiTTransformer2DModel": 0.7, "PixArtTransformer2DModel": 0.7, "SD3Transformer2DModel": 0.9, "FluxTransformer2DModel": 0.9,
    "AuraFlowTransformer2DModel": 0.9, "CogVideoXTransformer3DModel": 0.9, "WanTransformer3DModel": 0.8,
    "LTXVideoTransformer3DModel": 0.8, "QwenImageTransformer2DModel": 0.9, "HunyuanDiT2DModel": 0.5,
    "SanaTransformer2DModel": 0.4, "HunyuanVideoTransformer3DModel": 0.9,
}  # fmt: skip


@functools.cache
def case(name):
    found = CASES[f"diffusers/{name}"]
    args, kwargs = found.inputs(2)
    return fxplug.trace(found.build().eval(), args, kwargs, check=False).eval(), args, kwargs


@sweep("name", NAMES, "DiTTransformer2DModel", "SD3Transformer2DModel")
def test_the_transformers_of_diffusers(name):
    gm, args, kwargs = case(name)
    plan = fxplug.parallel_plan(gm, args, kwargs, ulysses=2, check=False)
    assert plan.share >= NAMES[name] and plan.check() < CLOSE


@pytest.mark.parametrize("ways", [*WAYS[2:], {"ulysses": 4}, {"batch": 2}, {"batch": 2, "ulysses": 2}], ids=str)
@sweep("name", ["DiTTransformer2DModel", "SD3Transformer2DModel"], "DiTTransformer2DModel")
def test_ways_and_their_combinations(name, ways):
    gm, args, kwargs = case(name)
    plan = fxplug.parallel_plan(gm, args, kwargs, **ways)
    assert plan.check() < CLOSE


@pytest.mark.slow
def test_tokens_that_are_too_few_stay_together():
    """Its text comes from 3 layers, which meet in attention as tokens do."""
    gm, args, kwargs = case("Krea2Transformer2DModel")
    plan = fxplug.parallel_plan(gm, args, kwargs, ulysses=2, ring=2, check=False)
    assert plan.share > 0.5 and plan.check() < CLOSE


def test_a_mistake_of_our_own_is_no_operation_that_refuses(monkeypatch):
    def mistaken(self, module):
        raise KeyError("ours")

    monkeypatch.setattr(ShardTrials, "module", mistaken)
    with pytest.raises(KeyError, match="ours"):
        fxplug.parallel_plan(own("sdpa"), own_inputs(), ulysses=2, check=False)


# --- as every other module


@pytest.mark.parametrize(("ways", "name"), [({"ulysses": 2}, "sequence_parallel"), ({"tensor": 4}, "tensor_parallel")])
def test_collectives_are_nodes_of_a_pass_that_is_saved(ways, name, tmp_path):
    """One artifact serves all: with whole weights and no rank."""
    gm = own("sdpa")
    plan = fxplug.parallel_plan(gm, own_inputs(), **ways)
    new = fxplug.parallelize(gm, plan)
    assert name in fxplug.diff(gm, new) and f"{name}.{'attention' if 'ulysses' in ways else 'allreduce'}1(" in fxplug.show(new)
    assert dict(new.state_dict()).keys() == dict(gm.state_dict()).keys()
    fxplug.save(new, tmp_path / "saved")
    again = fxplug.load(tmp_path / "saved")
    assert [n.format_node() for n in again.graph.nodes] == [n.format_node() for n in new.graph.nodes]
    given = own_inputs(3, 12, 8)
    want = gm(*given)
    for out in run_simulated(plan.ways, lambda rank: again(*given)):
        assert measure_distance(want, out) < CLOSE


def test_one_process_has_the_graph_that_it_had():
    gm = own("sdpa")
    plan = fxplug.parallel_plan(gm, own_inputs())
    assert plan.share == 1 and plan.bytes() == 0 and fxplug.parallelize(gm, plan) is gm


def test_a_plan_needs_shapes_only():
    with torch.device("meta"):
        model, inputs = OwnDiT("sdpa", width=768, depth=4).eval(), (torch.empty(1, 4, 32, 32), torch.empty(1, 8))
    plan = fxplug.parallel_plan(fxplug.trace(model, inputs).eval(), inputs, ulysses=2, ring=2)
    assert plan.share > 0.95


# --- real processes


def learn(new):
    """Losses of a few steps, and what was learned."""
    x, step = own_inputs()
    losses = processes.learned(new, lambda: (new(x, step) - x).square().mean(), torch.optim.SGD(new.parameters(), 1e-2), 4)
    return losses, [p.detach().clone() for p in new.parameters()]


def process(rank, folder):
    gm = own("sdpa")
    plan = fxplug.parallel_plan(gm, own_inputs(), check=False, batch=2, ulysses=2)
    new = fxplug.parallelize(gm, plan)
    with torch.no_grad(), record_traffic() as sent:
        out = new(*own_inputs())
    assert sum(sent) == plan.bytes(rank) > 0 and measure_distance(gm(*own_inputs()), out) < CLOSE
    new = fxplug.load(folder)  # saved by one process, with no rank in it
    assert measure_distance(gm(*own_inputs()), new(*own_inputs())) < CLOSE
    with pytest.raises(fxplug.SpecError, match="the plan is for 2 processes .ulysses 2., and there are 4"):
        fxplug.parallelize(gm, fxplug.parallel_plan(gm, own_inputs(), ulysses=2, check=False))
    losses, weights = learn(new)
    torch.save((losses, weights), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_four_processes_give_and_learn_what_one_does(tmp_path):
    gm = own("sdpa")
    plan = fxplug.parallel_plan(gm, own_inputs(), ulysses=2, ring=2)
    fxplug.save(fxplug.parallelize(gm, plan), tmp_path / "saved")
    processes.group(process, str(tmp_path / "saved"), world=4)
    again = fxplug.trace(small.seeded(lambda: OwnDiT("sdpa")).eval(), own_inputs()).eval()
    losses, weights = learn(again)
    for rank in range(4):
        found, learned = torch.load(tmp_path / "saved" / f"{rank}.pt")
        assert found == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, learned, strict=True))
    assert os.path.exists(tmp_path / "saved")


def compiling(rank, backend):
    for ways in ({"ulysses": 2}, {"ring": 2}):
        compiled_serves(ways, backend)


def compiled_serves(ways, backend):
    gm = fxplug.trace(small.seeded(lambda: OwnDiT("sdpa", depth=1)).eval(), own_inputs()).eval()
    gm = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.mlp.0", rank=2, slots=2))
    new = fxplug.parallelize(gm, fxplug.parallel_plan(gm, own_inputs(), check=False, **ways))
    compiled = torch.compile(new, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for index, size in enumerate([(2, 12, 20), (2, 20, 12), (4, 16, 10), (3, 10, 14)]):
            for name, tensor in gm.state_dict().items():
                if name.startswith("lora.") and tensor.is_floating_point():  # another adapter in the slots
                    tensor.normal_(generator=torch.Generator().manual_seed(index))
            assert measure_distance(gm(*own_inputs(*size)), compiled(*own_inputs(*size))) < CLOSE


@pytest.mark.slow
def test_one_compiled_graph_serves_sizes_batches_and_adapters():
    processes.group(compiling, "aot_eager")


# --- what a call leaves, and draws


class Drawing(nn.Module):
    """Attention with dropout, a batch norm and labels that are dropped by chance: another graph in training."""

    def __init__(self, attend="plain", norm=True):
        super().__init__()
        self.attend, self.attn, self.fc = attend, Attend("sdpa"), nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24) if norm else nn.Identity()

    def forward(self, x, label):
        if self.training:
            label = torch.where(torch.rand(label.shape) < 0.5, 0.0, label)
        x = self.attn(x + label[:, None])
        if self.attend == "hidden":
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3 * self.training)
        return self.fc(F.dropout(self.norm(x.mT).mT, 0.3, self.training))


def drawing(**options):
    inputs = small.seeded(lambda: (torch.randn(4, 12, 24), torch.randn(4, 24)))
    return fxplug.trace(small.seeded(lambda: Drawing(**options)), inputs, check=False), inputs


@sweep("ways", [{"ulysses": 2}, {"ring": 2}, {"batch": 2}], 0, ids=str)
@pytest.mark.parametrize("attend", ["plain", "hidden"])
@pytest.mark.parametrize("training", [False, True])
def test_random_numbers_are_the_first_process_s(training, attend, ways):
    gm, inputs = drawing(attend=attend)
    gm.train(training)
    plan = fxplug.parallel_plan(gm, inputs, **ways)
    assert plan.away < CLOSE and len(plan.written.graphs) == 2
    written = plan.written.train()
    drawn = [n for n in written.graph.nodes if (m := n.meta.get("pass")) and m["block"] == "Broadcast"]
    assert len(drawn) == 2 + (attend == "hidden") and "it draws random numbers" in str(plan.stages[0].modes[True].why)
    outs = run_simulated(plan.ways, lambda rank: written(*inputs))
    assert torch.equal(outs[0], outs[1])


def test_a_plan_changes_nothing():
    gm, inputs = drawing()
    gm.train()
    before, draws = {k: v.clone() for k, v in gm.state_dict().items()}, torch.get_rng_state()
    print(plan := fxplug.parallel_plan(gm, inputs, ulysses=2))
    plan.check()
    assert gm.training and torch.equal(draws, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in gm.state_dict().items())


def test_a_mode_that_cannot_be_split_is_told(monkeypatch):
    gm, inputs = drawing()
    found = fxplug.parallel.plan.plan_axis

    def only_evaluation(gm, mode, *rest):
        if mode:
            raise fxplug.parallel.plan.Unsplittable("'dropout' stands in the way")
        return found(gm, mode, *rest)

    monkeypatch.setattr(fxplug.parallel.plan, "plan_axis", only_evaluation)
    plan = fxplug.parallel_plan(gm.eval(), inputs, ulysses=2)
    assert "no graph for training: 'dropout' stands in the way" in str(plan)
    new = fxplug.parallelize(gm, plan)
    with pytest.raises(fxplug.TraceError, match="no graph for training, .*: 'dropout' stands in the way"):
        new.train()
    with pytest.raises(fxplug.SpecError, match="nothing of this model can be split along 'sequence': 'dropout'"):
        fxplug.parallel_plan(gm.train(), inputs, ulysses=2)


# --- what cannot be


HOSTILE = [
    (Split, ({"ulysses": 2}, "tokens", 1), "a collective must run along one of"),
    (Split, ({"ulysses": 2}, None, 1), "a collective must run along one of"),
    (Split, ([2], "sequence", 1), "a collective must run along one of"),
    (Split, ({"ulysses": "2"}, "sequence", 1), "ulysses must be a whole number"),
    (Split, ({"evil": 2}, "sequence", 1), "no axis 'evil'"),
    (Split, ({}, "sequence", "1"), "dim must be a whole number"),
    (Split, ({}, "sequence", 1, 0), "inner must be a whole number, 1 or more"),
    (Gather, ({}, "sequence", 1, -3), "inner must be a whole number, 1 or more"),
    (Gather, ({}, "sequence", -1), "dim must be a whole number, 0 or more"),
    (GlobalSize, ({}, "sequence", 1.5), "dim must be a whole number"),
    (Attention, ({}, 0), "queries must be a whole number, 1 or more"),
    (Attention, ({}, True), "queries must be a whole number"),
    (Fetch, ({}, "rows", 1, 1, 1, (1, 1)), "a halo must be a list of five or more whole numbers"),
    (Fetch, ({}, "rows", 1, 1, 1, (1, 1, 0, 0, "1")), "a halo must be a list of five or more whole numbers"),
    (Cut, ({}, "rows", 1, 1, 1, (0, 1, 0, 0, 1)), "are not valid numbers of a halo"),
    (Cut, ({}, "rows", 1, 1, 1, (2, 1, 0, 0, 1, 0)), "are not valid numbers of a halo"),
    (Fetch, ({}, "rows", 1, 0, 1, (1, 1, 0, 0, 1)), "inner must be a whole number, 1 or more"),
    (Extent, ({}, "columns", 1, (1, 1, 0, 0, 1, 0)), "a collective must run along one of"),
    (Norm, ({}, "rows", 0, 1e-5), "groups must be a whole number, 1 or more"),
]


@pytest.mark.parametrize(("kind", "args", "text"), HOSTILE, ids=range(len(HOSTILE)))
def test_collectives_that_are_none(kind, args, text):
    with pytest.raises(fxplug.SpecError, match=text):
        kind(*args)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: r.update(arguments=None), "may have constructor arguments only"),
        (lambda r: r["attributes"].update(dim="1"), "may have constructor arguments only"),
        (lambda r: r["arguments"].update(dim="1"), "dim must be a whole number"),
        (lambda r: r["arguments"].update(world=3), "has no argument 'world'"),
    ],
)
def test_a_file_s_collectives_are_checked(tmp_path, change, text):
    gm = own("sdpa")
    fxplug.save(fxplug.parallelize(gm, fxplug.parallel_plan(gm, own_inputs(), ulysses=2)), tmp_path)
    (file,) = tmp_path.glob("graph.json")
    document = json.loads(file.read_text())
    change(document["modules"]["sequence_parallel.split1"])
    file.write_text(json.dumps(document))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    data = file.read_bytes()
    manifest["files"]["graph.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(fxplug.ArtifactError, match=text):
        fxplug.load(tmp_path)


def test_wrong_calls_are_told():
    gm, inputs = own("sdpa"), own_inputs()
    for given, text in [
        ({"ulysses": 0}, "ulysses must be a whole number, 1 or more, not 0"),
        ({"ring": True}, "ring must be a whole number"),
        ({"ulysses": 32}, r"24 tokens \('flatten', dimension 2\) cannot be split over 32 processes: use fewer"),
        ({"batch": 3}, r"2 samples \('x', dimension 0\) cannot be split over 3 processes"),
        ({"ulysses": 2, "split": {"flaten": 1}}, "split: no node 'flaten' .did you mean 'flatten'"),
        ({"ulysses": 2, "split": {"flatten": 7}}, "'flatten' has no dimension 7"),
    ]:
        with pytest.raises(fxplug.SpecError, match=text):
            fxplug.parallel_plan(gm, inputs, **given)
    with pytest.raises(fxplug.SpecError, match="takes a traced module, not OwnDiT"):
        fxplug.parallel_plan(OwnDiT("sdpa"), inputs, ulysses=2)
    with pytest.raises(fxplug.SpecError, match="does not take these example inputs: missing a required argument: 'step'"):
        fxplug.parallel_plan(gm, inputs[:1], ulysses=2)
    with pytest.raises(fxplug.SpecError, match="nothing of this model can be split along 'sequence': no attention"):
        fxplug.parallel_plan(fxplug.trace(nn.Linear(3, 3), torch.randn(2, 3)), torch.randn(2, 3), ulysses=2)


def test_what_is_called_otherwise_than_planned_is_told():
    gm, inputs = own("sdpa"), own_inputs()
    plan = fxplug.parallel_plan(gm, inputs, ulysses=2)
    new = fxplug.parallelize(gm, plan)
    with pytest.raises(fxplug.SpecError, match="runs on 2 processes, and there is no process group: start with torchrun"):
        new(*inputs)
    with pytest.raises(fxplug.SpecError, match="the plan is for another graph"):
        fxplug.parallelize(fxplug.apply(gm, fxplug.load_pass("lora", at="head", rank=2)), plan)
    with pytest.raises(fxplug.SpecError, match="is parallel already"):
        fxplug.parallel_plan(new, inputs, ulysses=2)
    few = own_inputs(1, 2, 2)
    with pytest.raises(fxplug.GuardError, match=r"1 tokens .dimension 2 of \(1, 24, 1\). cannot be split over 2 processes"):
        run_simulated(plan.ways, lambda rank: new(*few))


def test_fewer_samples_than_processes_are_computed_whole():
    """Guidance off in a pipeline that was planned with it: each process has the one sample, and its gradients."""
    gm, plan = own("sdpa"), fxplug.parallel_plan(own("sdpa"), own_inputs(), batch=2)
    x, step = own_inputs(1)
    given = list(gm.parameters())
    one = gm(x, step)
    wanted = torch.autograd.grad(one.square().sum(), given)

    def run(rank):
        out = plan.written(x, step)
        return out, torch.autograd.grad(out.square().sum(), given)

    with pytest.warns(UserWarning, match="1 samples are fewer than the 2 processes along 'batch': each computes all of them"):
        found = run_simulated(plan.ways, run)
    for out, gradients in found:
        assert torch.equal(out, one) and all(map(torch.equal, gradients, wanted))
    both = fxplug.parallel_plan(gm, own_inputs(), batch=2, ulysses=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for out in run_simulated(both.ways, lambda rank: both.written(x, step)):
            assert measure_distance(gm(x, step), out) < CLOSE


def test_fewer_samples_than_processes_are_refused_where_one_draws_for_all():
    model = small.Call(lambda x, layer: F.dropout(layer(x), 0.5, True), nn.Linear(3, 3))
    plan = fxplug.parallel_plan(fxplug.trace(model, torch.randn(4, 3)), torch.randn(4, 3), batch=2, check=False)
    with pytest.raises(fxplug.GuardError, match=r"1 samples .dimension 0 of \(1, 3\). cannot be split over 2 processes"):
        run_simulated(plan.ways, lambda rank: plan.written(torch.ones(1, 3)))


def test_attention_is_tried_on_as_many_values_as_keys():
    """A fused kernel takes fewer values, reads what lies behind them, and may find there what was split off."""
    gm = fxplug.trace(Attends(), [torch.randn(1, 2, 8, 32)] * 3)
    tries = ShardTrials(gm, 0)
    node = next(n for n in gm.graph.nodes if n.target is F.scaled_dot_product_attention)
    values = torch.randn(1, 2, 40, 32)
    assert tries.call(node, (values, values, values), {}).shape == values.shape
    with pytest.raises(OperationRefused, match="size"):
        tries.call(node, (values, values, values[:, :, :24].clone()), {})


class Attends(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.slow
def test_layers_that_a_plan_has_opened_are_named():
    new = fxplug.apply(own("sdpa"), fxplug.load_pass("lora", at="**", rank=2))
    plan = fxplug.parallel_plan(new, own_inputs(), tensor=2)
    layers = [name for name, module in new.named_modules() if isinstance(module, nn.Linear) and "lora" not in name]
    with pytest.raises(fxplug.MatchError, match="is no single operation any more: another pass has opened it"):
        for path in layers:
            fxplug.find(plan.written, fxplug.load_pass("skip", **{"from": layers[0], "to": path}))
