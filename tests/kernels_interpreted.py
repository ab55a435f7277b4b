"""The Triton kernels' values and gradients beside float64, in Triton's interpreter: a program of its own, see test_kernels.py.

    TRITON_INTERPRET=1 python kernels_interpreted.py [quick | broken]

`broken` breaks the kernels in each of `FAULTS` and prints which of these nothing found.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import warnings

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from kernels_loaded import load
from torch import nn
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

import fxplug
from fxplug.blocks.low_rank import compute_update
from fxplug.lowerings.linear import operators

NEW_EMPTY = torch.Tensor.new_empty
LIMITS = {torch.float32: 4e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
TAKEN = "if tl.max((take != 0).to(tl.int32), 0) != 0:\n"
FAULTS = {
    "a gate that is not taken": ("total *= take[:, None]", "total *= 1.0"),
    "a sample that is another one": ("(m // tokens) % batch", "m % batch"),
    "samples of one entry each": ("(m // tokens) % batch", "m // tokens"),
    "a slot that is left out": ("for slot in range(0, slots)", "for slot in range(0, 1)"),
    "a slot that nobody takes, expanded": (f"{TAKEN}            for", "if True:\n            for"),
    "a slot that nobody takes, shrunk": (f"{TAKEN}        x_at", "if True:\n        x_at"),
    "x beyond its features": ("(m[:, None] < M) & (k[None, :] < K - first)", "(m[:, None] < M)"),
    "a weight beyond its features": ("columns[None, :] & (k[:, None] < K - first)", "columns[None, :]"),
    "a weight beyond its rows": ("columns[None, :] & (k[:, None] < K - first)", "(k[:, None] < K - first)"),
    "down beyond its rank": ("(r[None, :] < R) & (k[:, None] < K - first)", "(k[:, None] < K - first)"),
    "the next slot's rank": ("columns[None, :] & (r[:, None] < R)", "columns[None, :]"),
    "rows that are not there, shrunk": ("mask=(m[:, None] < M) & (r[None, :] < R))", "mask=(r[None, :] < R))"),
    "rows that are not there, expanded": ("mask=rows & columns[None, :])", "mask=columns[None, :])"),
    "columns that are not there": ("mask=rows & columns[None, :])", "mask=rows)"),
    "a tile that does not divide": ("WHOLE=k % tile.k == 0", "WHOLE=True"),
    "half of a high rank": ("range(0, R, BR, num_stages=1)", "range(0, BR, BR, num_stages=1)"),
    "a group of tiles": ("programs - begin, 8)", "programs - begin, 7)"),
    "no bias": ("BIAS=bias is not None", "BIAS=False"),
    "a weight that is not turned": ("torch.ops.fxplug.triton_lora(g, weight.t()", "torch.ops.fxplug.triton_lora(g, weight"),
    "factors that change places": ("None, up.t(), down.t(), *rest)", "None, down, up, *rest)"),
    "a merge without its gate": ("* tl.load(gate).to(tl.float32)", ""),
    "a merge beyond the weight": ("out.dtype.element_ty), mask=inside)", "out.dtype.element_ty), mask=k[None, :] < K)"),
    "a merge beyond its rank": ("mask=(n[:, None] < N) & (r[None, :] < R)", "mask=(n[:, None] < N)"),
    "a merge that rounds twice": ("    total += tl.load(w", "    total = total.to(tl.bfloat16)\n    total += tl.load(w"),
}  # fmt: skip


def rounded(data, source, target, mode, convert=interpreter._convert_float):
    """The interpreter's conversion of numbers, to nearest where it would cut, and quick where it is slow."""
    if (source, target) == (tl.float32, tl.bfloat16):
        return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()
    if (source, target) == (tl.bfloat16, tl.float32):
        return data.astype(np.uint32) << 16
    return convert(data, source, target, mode)


interpreter._convert_float = rounded


class Launch:
    """A kernel as `wrap_triton` gives it, which may read and write only what lies in the tensors that it is given."""

    count = 0
    spans = ()

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def run(*given, **more):
            tensors = [t for t in given if isinstance(t, torch.Tensor)]
            ends = [sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1 for t in tensors]
            Launch.spans = [(t.data_ptr(), t.data_ptr() + end * t.itemsize) for t, end in zip(tensors, ends, strict=True)]
            Launch.count += 1
            self.kernel[grid](*given, **more)

        return run


def watched(access, place):
    """An access to memory that fails where it is to none of the tensors."""

    def call(builder, pointers, *rest):
        at = pointers.data[rest[place].data]
        assert np.logical_or.reduce([(begin <= at) & (at < end) for begin, end in Launch.spans]).all(), "beside the tensors"
        return access(builder, pointers, *rest)

    return call


for name, place in (("create_masked_load", 0), ("create_masked_store", 1)):  # where their mask is
    setattr(interpreter.InterpreterBuilder, name, watched(getattr(interpreter.InterpreterBuilder, name), place))


def put(values, wide=False):
    """A copy with NaN around it; `wide` has NaN between its rows too."""
    rows, columns = values.shape[:-1].numel(), values.shape[-1:].numel()
    whole = torch.full((rows + 2, columns + 8 * wide), torch.nan, dtype=values.dtype)
    inside = whole[1:-1, 4 * wide : columns + 4 * wide]
    inside = inside.unflatten(0, values.shape[:-1]) if values.dim() > 1 else inside[0] if values.dim() else inside[0, 0]
    return inside.copy_(values)


def unwritten(like, *shape, **more):
    """A result as NaN: what is not written is seen."""
    return NEW_EMPTY(like, *shape, **more).fill_(torch.nan)


def gates_of(kind, batch, slots, rank):
    """What each sample takes of each slot; a slot that nobody takes is the last one."""
    table = torch.zeros(batch, slots)
    for sample in range(batch):
        if kind == "one":
            table[sample, 0] = 1.5
        elif kind == "mixed" and sample % 3 < 2:
            table[sample, sample % (slots - 1)] = 0.5 + sample
        elif kind == "sums":
            table[sample, :-1] = 0.25 + sample
    return table.repeat_interleave(rank, 1)


def check(dtype, shape, outer, rank, kind, batch_dim=0, bias=True, way="dense"):
    """The result and all gradients of one layer; raises AssertionError where one is too far."""
    torch.manual_seed(0)
    slots, inner = (1 if kind in ("scale", "weight") else 3), shape[-1]

    def new(*size, scale=1.0):
        return (torch.randn(size) * scale).to(dtype)

    weight, down = new(outer, inner, scale=inner**-0.5), new(slots * rank, inner, scale=inner**-0.5)
    up, g = new(outer, slots * rank, scale=rank**-0.5), new(*shape[:-1], outer)
    parts = [new(*shape), weight, new(outer) if bias else None, down, up]
    gates = torch.tensor(0.75) if slots == 1 else gates_of(kind, shape[batch_dim] // 2 or 1, slots, rank)
    exact = [p if p is None else p.double().requires_grad_() for p in parts]
    first = exact[0].transpose(0, batch_dim)  # where a sample may have several entries
    wanted = F.linear(*exact[:3]) + compute_update(first, *exact[3:], gates.double()).transpose(0, batch_dim)
    names = [n for n, p in zip("x weight bias down up".split(), parts, strict=True) if p is not None]
    wanteds = [wanted, *torch.autograd.grad(wanted, [p for p in exact if p is not None], g.double())]
    if slots > 1:  # of the last one nobody has anything, nor it of them
        for whole, dim in ((down, 0), (up, 1)):
            whole.narrow(dim, (slots - 1) * rank, rank).fill_(torch.nan)
    given = [p if p is None else put(p, way == "wide" and p.dim() > 1) for p in parts]
    if way == "turned":
        given = [p.t().contiguous().t() if p is not None and p.dim() == 2 else p for p in given]
    given = [p if p is None else p.requires_grad_(kind != "weight") for p in given]
    torch.Tensor.new_empty, Launch.count = unwritten, 0
    try:
        if slots > 1:
            y = operators.run_bank_linear(*given, put(gates), slots, batch_dim, "triton")
        else:
            y = operators.run_lora_linear(*given, put(gates), "triton:weight" if kind == "weight" else "triton")
        found = [y]
        if kind != "weight":
            found += torch.autograd.grad(y, [p for p in given if p is not None], put(g))
    finally:
        torch.Tensor.new_empty = NEW_EMPTY
    assert Launch.count == (1 if kind == "weight" else 4), f"{Launch.count} kernels ran"
    for name, got, want in zip(["y", *names], found, wanteds, strict=False):
        got, want = got.detach().double(), want.detach()
        off = float((got - want).norm() / want.norm().clamp_min(1e-30)) if want.norm() else float(got.norm())
        assert off <= LIMITS[dtype], f"{name} is {off:.1e} off"
        worst[dtype, name] = max(worst.get((dtype, name), 0.0), off)


worst = {}
# the batch and what is behind it, results, rank
SHAPES = [((4, 5, 40), 36, 5), ((6, 7, 3, 33), 65, 20), ((2, 1, 8), 8, 1), ((8, 10, 72), 264, 40), ((4, 2, 2, 3, 16), 24, 8)]
# the last has more rows than one group of tiles; in float32 its gradients, torch's own sums over them, are further off
LARGE = [((4, 100, 64), 128, 128), ((2, 150, 136), 130, 16), ((4, 160, 8), 8, 2)]


def cases(quick):
    """Each dtype with every kind of gates and dimension of samples; sizes and layouts are drawn."""
    draw = random.Random(0).choice
    for dtype, kind in itertools.product(LIMITS, ["scale", "weight", "one", "none", "mixed", "sums"]):
        for batch_dim in (0, 1) if kind not in ("scale", "weight") else (0,):
            for _ in range(1 if quick else 2):
                shape, outer, rank = draw(SHAPES)
                shape = (shape[1], shape[0], *shape[2:]) if batch_dim else shape
                yield dtype, shape, outer, rank, kind, batch_dim, draw([True, False]), draw(["dense", "wide", "turned"])
    for dtype, (shape, outer, rank), kind in itertools.product(LIMITS, LARGE, ["scale", "mixed", "weight"]):
        if (dtype, kind) == (torch.bfloat16, "mixed") or not (quick or (dtype == torch.float32 and rank == 2)):
            yield dtype, shape, outer, rank, kind, 0, True, "dense"


def check_others():
    """Calls that no kernel takes: no rows, no samples, and a rank that no tile holds; they give what stock gives."""
    Launch.count = 0
    weight, down, up = torch.randn(7, 12), torch.randn(6, 12), torch.randn(7, 6)
    wide = [torch.randn(200, 12), torch.randn(7, 200)]
    for shape, batch in [((0, 5, 12), 0), ((0, 5, 12), 4), ((4, 0, 12), 4), ((4, 5, 12), 0)]:
        x, rows = torch.randn(shape), torch.ones(batch, 6)
        got = operators.run_bank_linear(x, weight, None, down, up, rows, 3, 0, "triton")
        assert torch.equal(got, operators.run_bank_linear(x, weight, None, down, up, rows, 3, 0, "stock"))
    x, one = torch.randn(4, 5, 12), torch.ones(())
    for given in ((x, weight, None, *wide, one), (x[:0], weight, None, down, up, one)):
        assert torch.equal(operators.run_lora_linear(*given, "triton"), operators.run_lora_linear(*given, "stock"))
    got = operators.run_bank_linear(x, weight, None, down, up, torch.ones(3, 6), 3, -1, "triton")
    assert torch.equal(got, operators.run_bank_linear(x, weight, None, down, up, torch.ones(3, 6), 3, -1, "stock"))
    x = x.double()
    given = [t.double() for t in (weight, down, up)]
    assert operators.run_lora_linear(x, given[0], None, *given[1:], one, "triton").dtype == torch.float64
    assert not Launch.count


def check_gradients_of_gradients():
    """A gradient's size, differentiated by the input and the factors, for one number and for samples of their own."""
    gates = gates_of("mixed", 4, 3, 4)
    for slots, take in ((1, torch.tensor(0.75)), (3, gates)):
        sizes = (4, 5, 24), (36, 24), (36,), (slots * 4, 24), (36, slots * 4)
        parts = [torch.randn(size, generator=torch.Generator().manual_seed(i)) * 0.3 for i, size in enumerate(sizes)]
        found = []
        for form, given in (("triton", parts), ("stock", [part.double() for part in parts])):
            given = [part.clone().requires_grad_(i in (0, 3, 4)) for i, part in enumerate(given)]
            trained = [part for part in given if part.requires_grad]
            call, rest = (operators.run_lora_linear, ()) if slots == 1 else (operators.run_bank_linear, (slots, 0))
            y = call(*given, take.to(given[0].dtype), *rest, form).square().sum()
            first = torch.autograd.grad(y, trained, create_graph=True)
            found.append(torch.autograd.grad(sum(one.square().sum() for one in first), trained))
        for got, want in zip(*found, strict=True):
            off = float((got.double() - want).norm() / want.norm())
            assert off < 1e-5, f"a gradient of a gradient is {off:.1e} off"


class Model(nn.Module):
    """Two linear layers and a convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.second = nn.Linear(8, 24), nn.Conv1d(5, 5, 1), nn.Linear(24, 8)

    def forward(self, x):
        return self.second(self.mix(self.first(x)).relu())


def check_lowered():
    """Models lowered in this form: what each layer has, results, gradients, and adapters of their own for samples."""
    x = torch.randn(4, 5, 8)
    gm = fxplug.trace(Model().eval(), x)
    others = [(name, 2, "stock") for name in ("dora", "lokr", "loha")]  # by the rule, of small layers on a CPU
    for name, rank, first in [("lora", 2, "triton"), ("lora", 200, "stock"), *others]:
        new = fxplug.apply(gm, fxplug.load_pass("lora", at="mix", rank=2, name="conv"))
        new = fxplug.apply(new, fxplug.load_pass(name, at=["first", "second"], rank=rank))
        for key, parameter in new.named_parameters():
            nn.init.normal_(parameter, std=0.3) if "." in key.removeprefix(f"{name}.") else None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            low, again = fxplug.lower(new, fuse="triton"), fxplug.lower(new, fuse="triton")
        assert len([w for w in said if "Triton" in str(w.message)]) == (rank == 200), said
        assert low.meta["forms"] == again.meta["forms"], again.meta["forms"]
        found = {path: re.split("[:,]", form)[0] for path, form in low.meta["forms"].items()}
        assert found == {"first": first, "second": first, "mix": "stock"}, f"{name}: {low.meta['forms']}"
        Launch.count = 0
        got, want = (torch.autograd.grad(m(x).square().sum(), list(new.parameters())) for m in (low, new))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert Launch.count == (7 if first == "triton" else 0), Launch.count
        with torch.no_grad():
            torch.testing.assert_close(low(x), new(x), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(low(x[:0]), new(x[:0]))
    many = torch.randn(40, 5, 8)
    new = fxplug.apply(fxplug.trace(Model().eval(), many), fxplug.load_pass("lora", at=["first", "second"], rank=2, slots=3))
    for key, parameter in new.named_parameters():
        nn.init.normal_(parameter, std=0.3) if key.startswith("lora") else None
    table, low = new.get_submodule("lora.gates.table"), fxplug.lower(new, fuse="triton")
    with torch.no_grad():
        for rows in ([[0.0, 0, 0]], [[1, 0, 0]], [[1, 0, 0], [0, 0, 2], [0, 0, 0], [0.5, 0.5, 0]]):
            table.weights.zero_()
            table.weights[: len(rows)] = torch.tensor(rows)
            table.entries.fill_(len(rows) if len(rows) > 1 else 0)
            torch.testing.assert_close(low(x), new(x), rtol=1e-4, atol=1e-4)
    plain = fxplug.apply(fxplug.trace(Model().eval(), many), fxplug.load_pass("lora", at="*", rank=2))
    assert fxplug.lower(plain, fuse="triton").meta["forms"]["first"] == "triton:weight, triton (with gradients)"


def main(how=""):
    torch.set_float32_matmul_precision("high")
    if how == "broken":
        missed = []
        for name, (old, new) in FAULTS.items():
            load(old, new).wrap_triton = Launch
            try:
                for case in cases(True):
                    check(*case)
                missed.append(name)
            except Exception as error:
                print(f"{name}: {error}", flush=True)
        sys.exit(f"not found: {missed}" if missed else 0)
    load().wrap_triton = Launch
    for case in cases(how == "quick"):
        try:
            check(*case)
        except (AssertionError, InterpreterError) as error:
            sys.exit(f"{case}: {error}")
    check_others()
    check_gradients_of_gradients()
    check_lowered()
    for dtype in LIMITS:
        print(dtype, {name: f"{off:.1e}" for (of, name), off in worst.items() if of == dtype}, "at most", LIMITS[dtype])


if __name__ == "__main__":
    main(*sys.argv[1:])
