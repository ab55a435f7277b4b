"""Rows of images over processes: every operation that reads its neighbours, real VAEs and UNets, uneven and hostile sizes."""

from __future__ import annotations

import functools
import random
from itertools import pairwise

import fuzz_rows
import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from small import Call
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core.ir.comparison import measure_distance
from fxplug.core.ir.containers import list_leaves
from fxplug.parallel.runtime import layouts
from fxplug.parallel.runtime.collectives import Split, record_traffic
from fxplug.parallel.runtime.halos import Fetch, Reach
from fxplug.parallel.runtime.mesh import fill_degrees
from fxplug.parallel.runtime.norm_statistics import Norm
from fxplug.parallel.runtime.pretended import run_simulated

CLOSE = 1e-6
CASES = {case.name: case for case in zoo.cases("diffusers/")}


class Net(nn.Module):
    """An operation between two convolutions that leave the rows as they are."""

    def __init__(self, middle, given=3, gives=3) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(2, given, 3, padding=1), nn.Conv2d(gives, 2, (1, 3), padding=(0, 1))
        self.middle = middle

    def forward(self, x):
        return self.after(self.middle(self.before(x)))


def compared(model, x, rows, why=None, close=CLOSE, **options):
    """The plan of a model in rows, whose outputs and gradients are those of one process."""
    gm = fxplug.trace(model, (x,)).eval()
    plan = fxplug.parallel_plan(gm, (x,), rows=rows, check=False, **options)
    if why is not None:
        assert list(plan.stages[0].found.why.values()) == why
    same_as_one(model, plan, x, close)
    return gm, plan


def same_as_one(model, plan, x, close=CLOSE):
    given = [x.clone().requires_grad_(), *model.parameters()]
    one = model(given[0])
    weights = torch.randn_like(one)
    wanted = torch.autograd.grad((one * weights).sum(), given, allow_unused=True)

    def run(rank):
        mine = [x.clone().requires_grad_(), *given[1:]]
        out = plan.written(mine[0])
        return out, torch.autograd.grad((out * weights).sum(), mine, allow_unused=True)

    found = run_simulated(plan.ways, run)
    for out, _ in found:
        assert measure_distance(one, out) < close
    most = max(float(w.abs().max()) for w in wanted if w is not None)
    for index, want in enumerate(wanted):
        if want is not None:  # the mean over the processes
            off = sum(gradients[index] for _, gradients in found) / len(found) - want
            assert float(off.abs().max()) < 2e-5 * max(float(want.abs().max()), 1e-2 * most)


# --- operations that read rows of their neighbours, of random geometry


def geometry(seed):
    """A random operation of each kind: its module, the channels it gives, and what it is."""
    pick = random.Random(seed)
    kernel, stride, dilation = pick.randint(1, 5), pick.randint(1, 3), pick.randint(1, 2)
    padding, half, ceil = pick.randint(0, 3), pick.randint(0, kernel // 2), pick.random() < 0.5
    sides = [pick.randint(0, 3) for _ in range(4)]
    border = pick.choice(["constant", "reflect", "replicate"])
    scale = pick.choice([2.0, 3.0, 0.5, (2.0, 1.0)])
    strides = (stride, 1)
    return {
        "convolution": nn.Conv2d(3, 3, kernel, stride, padding, dilation),
        "its borders": nn.Conv2d(3, 3, kernel, 1, padding, dilation, padding_mode=pick.choice(["reflect", "replicate"])),
        "padded": Call(lambda x, c: F.conv2d(F.pad(x, sides, border), c.weight, None, strides), nn.Conv2d(3, 3, (kernel, 1))),
        "same": nn.Conv2d(3, 3, kernel, padding="same", dilation=dilation),
        "grouped": nn.Conv2d(3, 3, (kernel, 3), (stride, 1), (padding, 1), groups=3),
        "transposed": nn.ConvTranspose2d(3, 3, kernel, stride, min(half, (kernel - 1) // 2), pick.randint(0, stride - 1)),
        "largest": nn.MaxPool2d(kernel, stride, half, 1, ceil_mode=ceil),
        "mean": nn.AvgPool2d(kernel, stride, half, ceil, pick.random() < 0.5),
        "nearest": nn.Upsample(scale_factor=scale),
        "bilinear": nn.Upsample(scale_factor=scale, mode="bilinear"),
        "bicubic": nn.Upsample(scale_factor=scale, mode="bicubic"),
        "three": nn.Sequential(nn.Conv2d(3, 3, 3, 2, 1), nn.ReLU(), nn.Conv2d(3, 3, kernel, stride, kernel // 2)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(geometry(0)))
@sweep("seed", range(4), 0)
def test_an_operation_on_fetched_rows(kind, seed):
    torch.manual_seed(seed)
    pick = random.Random(f"{kind} {seed}")
    x = torch.randn(2, 2, pick.randint(11, 21), pick.randint(7, 9))
    model = Net(geometry(f"{kind} {seed}")[kind])
    rows = min(pick.randint(2, 5), model(x).shape[2])
    compared(model, x, rows, why=[])


OTHERS = {
    "shuffle": (Call(lambda x: F.pixel_shuffle(x, 2)), 8, 2, 9),
    "unshuffle": (Call(lambda x: F.pixel_unshuffle(x, 2)), 3, 12, 12),
    "space to depth": (Call(lambda x: x.unflatten(2, (-1, 2)).permute(0, 1, 3, 2, 4).flatten(1, 2)), 3, 6, 14),
    "up by a view": (
        Call(lambda x, a: a(x.unflatten(1, (3, 2)).permute(0, 1, 3, 2, 4).flatten(2, 3)), nn.Conv2d(3, 3, 3, 1, 1)), 6, 3, 9,
    ),
    "slice": (Call(lambda x: x[:, :, 1:-2]), 3, 3, 13),
    "every other": (Call(lambda x: x[:, :, ::2]), 3, 3, 13),
    "group norm": (nn.GroupNorm(2, 4), 4, 4, 11),
    "function": (Call(lambda x: F.group_norm(x, 2, eps=1e-3) + F.instance_norm(x)), 4, 4, 11),
    "instance norm": (nn.InstanceNorm2d(4, affine=True), 4, 4, 11),
    "squeeze": (Call(lambda x: x * x.mean((2, 3), keepdim=True) + F.adaptive_avg_pool2d(x, 1)), 4, 4, 11),
    "sum": (Call(lambda x: x / (1 + x.pow(2).sum((2, 3), keepdim=True))), 4, 4, 11),
    "down and up": (
        Call(lambda x, a, b: x + F.interpolate(b(a(x).relu()), scale_factor=2.0), nn.Conv2d(3, 5, 3, 2, 1), nn.Conv2d(5, 3, 1)),
        3, 3, 14,
    ),
    "down and up to": (
        Call(lambda x, a: x + F.interpolate(a(x), size=x.shape[2:]), nn.Conv2d(3, 3, 4, 2, 1)), 3, 3, 12,
    ),
}  # fmt: skip


@sweep("rows", [2, 3], 1)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_operations_on_rows(kind, rows):
    torch.manual_seed(1)
    middle, given, gives, size = OTHERS[kind]
    compared(Net(middle, given, gives), torch.randn(2, 2, size, 8), rows, why=[])


WHOLE = {
    "around": nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"),
    "corners": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "turned": Call(lambda x: x.flip(2)),
    "rolled": Call(lambda x: x.roll(1, 2)),
    "deviation": Call(lambda x: x / x.std((2, 3), keepdim=True)),
    "softmax": Call(lambda x: x.flatten(2).softmax(-1).unflatten(2, x.shape[2:]) * 100),
    "largest of all": Call(lambda x: x / x.amax((2, 3), keepdim=True)),
    "running": Call(lambda x: x.cumsum(2) * 0.1),
    "each in its place": Call(lambda x: x + torch.arange(x.shape[2])[:, None] * 0.1),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_reads_all_rows_is_right_all_the_same(kind):
    torch.manual_seed(2)
    _, plan = compared(Net(WHOLE[kind]), torch.randn(2, 2, 11, 7), 3, close=3e-6)
    assert plan.share > 0.4  # the convolutions beside it


def test_the_mean_of_parts_that_differ_is_that_of_all():
    """Random parts have equal means, as those of an image have not."""
    x = torch.randn(1, 2, 9, 6) + torch.arange(9.0)[:, None] * 3
    for model in (Net(nn.GroupNorm(1, 3)), Net(Call(lambda x: x - x.mean((2, 3), keepdim=True)))):
        compared(model, x, 2, why=[])


# --- the blocks


@pytest.mark.parametrize("world", [2, 3, 5])
def test_rows_that_are_fetched_from_wherever_they_are(world):
    ways = fill_degrees({"rows": world})
    pick = random.Random(world)
    for _ in range(25):
        reach = Reach(pick.randint(1, 3), pick.randint(1, 2), pick.randint(0, 6), pick.randint(-1, 6), pick.randint(1, 8))
        inner, tokens = pick.randint(1, 2), pick.randint(world, 12)
        total = tokens * inner // reach.period * reach.gives
        if total < world:
            continue
        x = torch.randn(2, tokens * inner, 3, requires_grad=True)
        weights = torch.randn_like(x)
        split, fetch = Split(ways, "rows", 1, inner), Fetch(ways, "rows", 1, inner, 1, reach.numbers())

        def run(rank, reach=reach, x=x, total=total, weights=weights, split=split, fetch=fetch, tokens=tokens):
            first, last = layouts.find_start(total, rank, world), layouts.find_start(total, rank + 1, world)
            begin, end = reach.window(first, last, x.shape[1])
            with record_traffic() as sent:
                got = fetch(split(x, tokens), tokens, total)
            assert torch.equal(got, x[:, begin:end])
            return sum(sent), end - begin, torch.autograd.grad((got * weights[:, begin:end]).sum(), x)[0], (begin, end)

        found = run_simulated(ways, run)
        want = sum(torch.zeros_like(x).index_add(1, torch.arange(*w), weights[:, slice(*w)]) for *_, w in found)
        torch.testing.assert_close(sum(gradient for _, _, gradient, _ in found), want)
        starts = [layouts.find_start(tokens, r, world) * inner for r in range(world + 1)]
        own = list(pairwise(starts))
        foreign = sum(len(set(range(*w)) - set(range(*mine))) for (*_, w), mine in zip(found, own, strict=True))
        assert sum(sent for sent, *_ in found) == foreign * 2 * 3 * 4  # what a process has is not sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_parts_far_from_zero(dtype):
    torch.manual_seed(0)
    ways = fill_degrees({"rows": 3})
    x = (torch.randn(2, 6, 7, 5) * 2 + torch.linspace(900, 1100, 7)[:, None]).to(dtype)
    weight, bias = torch.randn(6), torch.randn(6)
    exact = F.group_norm(x.double(), 3, weight.double(), bias.double())
    native = float((F.group_norm(x, 3, weight.to(dtype), bias.to(dtype)).double() - exact).abs().max())
    norm, split = Norm(ways, "rows", 3, 1e-5), Split(ways, "rows", 2)
    parts = run_simulated(ways, lambda rank: norm(split(x, 7), weight.to(dtype), bias.to(dtype), 7))
    assert parts[0].dtype == dtype
    assert float((torch.cat(parts, 2).double() - exact).abs().max()) < 2 * native + 1e-5


# --- models


@functools.cache
def vae(part, sizes=(16, 32)):
    import diffusers

    torch.manual_seed(0)
    levels = len(sizes)
    model = diffusers.AutoencoderKL(
        block_out_channels=sizes, down_block_types=("DownEncoderBlock2D",) * levels, norm_num_groups=8, layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * levels, latent_channels=4,
    )  # fmt: skip
    return getattr(model, part).eval()


VAES = [("decoder", (1, 4, 9, 6)), ("encoder", (1, 3, 26, 12)), ("encoder", (2, 3, 25, 12))]


@pytest.mark.slow
@sweep(("part", "shape"), VAES, 0, ids=str)
def test_a_vae_in_uneven_rows_with_its_gradients(part, shape):
    model = vae(part)
    gm, plan = compared(model, torch.randn(shape), 3, close=2e-6)
    assert plan.share > 0.999
    assert set(plan.stages[0].found.why.values()) <= {"one of its inputs must be complete"}  # keys and values
    for size in ((1, shape[1], 12, shape[3]), (2, shape[1], 2 * shape[2], shape[3])):  # another height than planned, and batch
        if part == "decoder" or size[2] % 2 == shape[2] % 2:
            x = torch.randn(size)
            for out in run_simulated(plan.ways, lambda rank, x=x: plan.written(x)):
                assert measure_distance(model(x), out) < 2e-6


@pytest.mark.slow
def test_rows_that_cannot_be_split_are_told():
    gm = fxplug.trace(vae("encoder"), (torch.randn(1, 3, 8, 8),)).eval()
    with pytest.raises(fxplug.SpecError, match=r"4 rows \('sample', dimension 2\) cannot be split over 5 processes"):
        fxplug.parallel_plan(gm, (torch.randn(1, 3, 8, 8),), rows=5)
    plan = fxplug.parallel_plan(gm, (torch.randn(1, 3, 8, 8),), rows=4)
    with pytest.raises(fxplug.GuardError, match=r"dimension 2 of \(1, 3, 9, 8\) must be 4 times 2, as in the plan"):
        run_simulated(plan.ways, lambda rank: plan.written(torch.ones(1, 3, 9, 8)))
    with pytest.raises(fxplug.GuardError, match="3 tokens .* cannot be split over 4 processes"):
        run_simulated(plan.ways, lambda rank: plan.written(torch.ones(1, 3, 6, 8)))
    with pytest.raises(fxplug.GuardError, match=r"the dimensions of \(1, 3, 8, 6\) after dimension 2 must be \[8\], as"):
        run_simulated(plan.ways, lambda rank: plan.written(torch.ones(1, 3, 8, 6)))
    with pytest.raises(fxplug.SpecError, match="no node 'sampel' .did you mean 'sample'"):
        fxplug.parallel_plan(gm, (torch.randn(1, 3, 8, 8),), rows=2, split={"sampel": 2})
    with pytest.raises(fxplug.SpecError, match="'sample' has no dimension 7"):
        fxplug.parallel_plan(gm, (torch.randn(1, 3, 8, 8),), rows=2, split={"sample": 7})
    with pytest.raises(fxplug.SpecError, match="nothing of this model can be split along 'rows'"):
        fxplug.parallel_plan(fxplug.trace(nn.Linear(3, 3), (torch.randn(2, 3),)), (torch.randn(2, 3),), rows=2)


@pytest.mark.slow
def test_columns_are_split_where_one_asks_for_them():
    model, x = vae("decoder"), torch.randn(1, 4, 5, 9)
    _, plan = compared(model, x, 2, split={"sample": 3}, close=2e-6)
    assert plan.stages[0].found.origins[0][1] == 3 and plan.share > 0.999


def test_a_plan_in_rows_needs_shapes_only():
    with torch.device("meta"):
        model, x = Net(nn.Sequential(nn.Conv2d(3, 3, 3, 2, 1), nn.GroupNorm(1, 3))), torch.empty(1, 2, 64, 64)
    plan = fxplug.parallel_plan(fxplug.trace(model, (x,)), (x,), rows=4)
    sent = 4 * 4 * (2 * 64 * 1 + 3 * 64 * 1)  # what process 0 gives its neighbour: a row for each convolution
    assert plan.share == 1.0 and plan.bytes() >= sent / 4


MODELS = ("AutoencoderKL-flux", "AutoencoderTiny", "UNet2DModel")


@sweep("name", MODELS, "AutoencoderTiny")
def test_models_of_diffusers_in_rows(name):
    one = CASES[f"diffusers/{name}"]
    torch.manual_seed(0)
    model, (args, kwargs) = one.build().eval(), one.inputs(1)
    gm = fxplug.trace(model, args, kwargs).eval()
    plan = fxplug.parallel_plan(gm, args, kwargs, rows=3)
    assert plan.share > 0.99 and plan.away < 3e-6


@pytest.mark.slow
def test_a_model_in_rows_is_saved_without_a_rank(tmp_path):
    model, x = vae("encoder"), torch.randn(1, 3, 26, 12)
    gm = fxplug.trace(model, (x,)).eval()
    plan = fxplug.parallel_plan(gm, (x,), rows=2)
    new = fxplug.parallelize(gm, plan)
    assert "spatial_parallel.fetch1(" in fxplug.show(new)
    fxplug.save(new, tmp_path / "saved")
    again = fxplug.load(tmp_path / "saved")
    assert [n.format_node() for n in again.graph.nodes] == [n.format_node() for n in new.graph.nodes]
    for out in run_simulated(plan.ways, lambda rank: again(x)):
        assert measure_distance(gm(x), out) < 2e-6


# --- real processes


def process(rank):
    torch.manual_seed(0)  # the same weights and images in each
    middle = nn.Conv2d(3, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.Upsample(scale_factor=2), nn.Conv2d(4, 3, 5, 1, 2)
    model, x = Net(nn.Sequential(*middle)), torch.randn(1, 2, 13, 6)
    gm = fxplug.trace(model, (x,)).eval()
    plan = fxplug.parallel_plan(gm, (x,), rows=2, check=False)
    new = fxplug.parallelize(gm, plan)
    with torch.no_grad(), record_traffic() as sent:
        out = new(x)
    assert sum(sent) == plan.bytes(rank) > 0
    assert all(measure_distance(a, b) < 2e-6 for a, b in zip(list_leaves(model(x)), list_leaves(out), strict=True))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((model(x) * weights).sum(), list(model.parameters()))
    for want, got in zip(wanted, torch.autograd.grad((new(x) * weights).sum(), list(new.parameters())), strict=True):
        dist.all_reduce(got)
        assert float((got / 2 - want).abs().max()) < 1e-4 * max(1e-2, float(want.abs().max()))
    with torch.no_grad():
        assert measure_distance(new(x), torch.compile(new, fullgraph=True, backend="eager")(x)) < CLOSE


@pytest.mark.slow
def test_two_processes_decode_as_one():
    processes.group(process)


# --- other heights than planned


def halved_and_repeated(x):
    return x[:, :, ::2].repeat_interleave(2, 2)[:, :, : x.shape[2]]


ANY = {
    "corners": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
    "bicubic corners": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=True),
    "nearest 1.3": lambda x: F.interpolate(x, scale_factor=1.3),
    "rolled": lambda x: x.roll(2, 2),
    "cropped": lambda x: x[:, :, :28],
    "from the end": lambda x: x[:, :, -28:],
    "narrowed": lambda x: x.tril(20),
    "plain": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
}
SOME = {
    "halved and repeated": halved_and_repeated,
    "halved corners": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=True),
}


@pytest.mark.parametrize("kind", [*ANY, *SOME])
def test_at_other_heights_rows_are_right_or_refused_by_all(kind):
    torch.manual_seed(3)
    model = Net(Call({**ANY, **SOME}[kind]))
    gm = fxplug.trace(model, (torch.randn(1, 2, 16, 6),)).eval()
    plan = fxplug.parallel_plan(gm, (torch.randn(1, 2, 16, 6),), rows=2)
    for height in (16, 17, 24, 31, 32, 64, 96):
        x, refused = torch.randn(1, 2, height, 6), []

        def run(rank, x=x, refused=refused):
            try:
                return plan.written(x)
            except fxplug.GuardError:
                refused.append(rank)

        found = run_simulated(plan.ways, run)
        if refused:
            assert kind in SOME and height % 8 and sorted(refused) == [0, 1]
        else:
            assert all(measure_distance(model(x), out) < CLOSE for out in found)


@sweep("seed", range(40), 0)
def test_random_operations_at_other_heights(seed):
    assert fuzz_rows.miss(seed) == ""
