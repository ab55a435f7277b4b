"""What many processes do when one of them has something else, does not come or dies; and plans that cannot be."""

from __future__ import annotations

import contextlib
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fxplug
from fxplug.parallel.comparison import check_pretended
from fxplug.parallel.runtime import faults
from fxplug.parallel.runtime.mesh import fill_degrees
from fxplug.parallel.runtime.pretended import PRETENDED, run_simulated

SECONDS = 4  # the timeout of the group


class Tokens(nn.Module):
    """Three layers of attention over tokens, and a head."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.head = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        b, n, c = x.shape
        for layer in self.layers:
            q, k, v = layer(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        return self.head(x * self.scale)


def tokens(seed=0, batch=2, size=9):
    return torch.randn(batch, size, 16, generator=torch.Generator().manual_seed(seed))


def traced(seed=0):
    torch.manual_seed(seed)
    return fxplug.trace(Tokens().eval(), tokens()).eval()


def parallel(seed=0, **ways):
    gm = traced(seed)
    return fxplug.parallelize(gm, fxplug.parallel_plan(gm, tokens(), check=False, **(ways or {"ulysses": 2})))


# --- something else


def by_rank(gm, change, ways=None):
    """The text of the error that every pretended process has, where `change(rank, module)` gives its module and input."""
    ways = ways or {"ulysses": 2}
    plan = fxplug.parallel_plan(gm, tokens(), check=False, **ways)

    def run(rank):
        module, x = change(rank, fxplug.parallelize(gm, plan))
        with pytest.raises(fxplug.GuardError) as found, torch.no_grad():
            module(x)
        return str(found.value)

    return run_simulated(plan.ways, run)


@pytest.mark.slow
def test_other_inputs_weights_and_buffers_are_told_at_the_first_call():
    gm, theirs, changed = traced(), parallel(ulysses=2, ring=2), parallel(batch=2, ulysses=2)
    changed.scale.mul_(2)

    def other_input(rank, module):
        return module, tokens(seed=int(rank == 2))

    def other_weight(rank, module):
        if rank == 3:
            module = theirs
            with torch.no_grad():
                module.get_parameter("layers.1.weight")[0, 0] += 1e-6
        return module, tokens()

    def other_buffer(rank, module):
        return changed if rank in (1, 2) else module, tokens()

    found = by_rank(gm, other_input, {"ulysses": 2, "ring": 2})
    assert len(set(found)) == 1 and "the input 0 of process 2 differs from process 0: pass the same weights" in found[0]
    found = by_rank(gm, other_weight, {"ulysses": 2, "ring": 2})
    assert len(set(found)) == 1 and "the weight 'layers.1.weight' of process 3 differs from process 0" in found[0]
    found = by_rank(gm, other_buffer, {"batch": 2, "ulysses": 2})
    assert len(set(found)) == 1 and "the buffer 'scale' of processes 1, 2 differs from process 0" in found[0]


def test_other_inputs_and_weights_are_told_at_every_call():
    gm = traced()
    plan = fxplug.parallel_plan(gm, tokens(), check=False, ulysses=2)
    makes = {
        "of process 1 differs from process 0 (torch.float32 (2, 10, 16) and": lambda rank, new: tokens(size=9 + rank),
        "the input 0 of process 1 differs from process 0: ": lambda rank, new: tokens().flip(rank) if rank else tokens(),
        "the weight 'head.bias' of process 1": lambda rank, new: new.head.bias.add_(rank) is None or tokens(),
        "the buffer 'scale' of process 1": lambda rank, new: setattr(new, "scale", new.scale + rank) or tokens(),
    }
    for text, change in makes.items():
        modules = [parallel(), parallel()]

        def run(rank, modules=modules, change=change):
            new = modules[rank]
            with torch.no_grad():
                for seed in (0, 1):
                    new(tokens(seed=seed))
                x = change(rank, new)
                with pytest.raises(fxplug.GuardError) as found:
                    new(x)
            return str(found.value)

        found = run_simulated(plan.ways, run)
        assert text in found[0] and found[0] == found[1]


def test_other_modes_are_told_before_anything_travels():
    """Processes in autocast send another dtype, and those without gradients come to no backward pass."""
    casting, free = torch.autocast("cpu", torch.bfloat16), torch.no_grad()
    for mode, text in ((casting, "autocast torch.bfloat16 on cpu"), (free, "(no gradients and gradients)")):
        new = parallel()

        def run(rank, new=new, mode=mode):
            with mode if rank else contextlib.nullcontext(), pytest.raises(fxplug.GuardError) as found:
                new(tokens())
            return str(found.value)

        found = run_simulated(fill_degrees({"ulysses": 2}), run)
        assert "the mode of process 1 differs from process 0" in found[0] and text in found[0] and found[0] == found[1]


def test_other_plans_are_told_at_the_first_call():
    one, two = parallel(), fxplug.parallelize(traced(), fxplug.parallel_plan(traced(), tokens(), split={"x": 1}, ulysses=2))
    more = fxplug.trace(nn.Sequential(Tokens(), nn.Tanh()).eval(), tokens()).eval()
    more = fxplug.parallelize(more, fxplug.parallel_plan(more, tokens(), ulysses=2))
    assert len(set(by_rank(traced(), lambda rank, _: ([one, more][rank], tokens())))) == 1
    found = by_rank(traced(), lambda rank, _: ([one, more][rank], tokens()))
    assert "the plan of process 1 differs from process 0" in found[0]
    same = run_simulated(fill_degrees({"ulysses": 2}), lambda rank: [one, two][rank](tokens()))
    assert torch.equal(*same)


def test_the_weights_of_all_calls_are_summed_once(monkeypatch):
    from fxplug.parallel.runtime import checksums

    seen = []
    real = checksums._hash
    monkeypatch.setattr(checksums, "_hash", lambda t: seen.append(t) or real(t))
    gm, new = traced(), parallel()

    def run(rank):
        return [new(tokens()), new(tokens(1))]

    for outs in run_simulated(fxplug.parallel_plan(gm, tokens(), check=False, ulysses=2).ways, run):
        assert torch.allclose(outs[1], gm(tokens(1)), atol=1e-5)
    weights = len(new.state_dict())
    assert weights + 4 <= len(seen) <= 2 * weights + 4 and PRETENDED.get() is None


def plans(rank):
    ways = {"ulysses": 2} if rank == 0 else {"ring": 2}
    with pytest.raises(fxplug.SpecError, match="process 0 has a plan for ulysses 2, and process 1 one for ring 2: make"):
        parallel(**ways)
    new = parallel()
    with torch.no_grad():
        new(tokens())
        with pytest.raises(fxplug.GuardError, match="the input 0 of process 1 differs from process 0"):
            new(tokens(size=9 + rank))
        with pytest.raises(fxplug.GuardError, match="the input 0 of process 1 differs from process 0"):
            new(tokens(seed=rank))
        new(tokens())


@pytest.mark.slow
def test_real_processes_with_other_plans_and_sizes_go_on():
    processes.group(plans)


# --- real processes


class Grown(nn.Module):
    """What kills or stops its process in the middle of a model."""

    def __init__(self, how, told):
        super().__init__()
        self.how, self.told = how, told

    def forward(self, x):
        if self.how == "die":
            os._exit(7)
        end = time.monotonic() + 10 * SECONDS
        while not self.told.exists() and time.monotonic() < end:  # a file that the other one writes
            time.sleep(0.1)
        return x


def process(rank, how, folder):
    torch.set_num_threads(1)
    faults.GRACE = 3.0
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))
    new, x = parallel(), tokens()
    if how == "input":
        x = tokens(seed=rank)
    start = time.monotonic()
    try:
        with torch.no_grad():
            new(tokens()) if how != "input" else None
            if rank == 1 and how in ("die", "hang"):
                fault = Grown(how, Path(folder) / "0.txt")
                new.layers[1].register_forward_pre_hook(lambda module, given: fault(None))
            new(x)
    except fxplug.FxplugError as error:
        with open(f"{folder}/{rank}.txt", "w") as file:
            file.write(f"{type(error).__name__} {time.monotonic() - start:.1f} {error}")
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


LOST = "process 1 has died or did not reach the collective; process 0 waits at 'scaled_dot_product_attention_1_parallel' ("


@sweep(
    ("how", "text"),
    [
        ("die", LOST),
        ("hang", LOST),
        ("input", "the input 0 of process 1 differs from process 0"),
    ], 2,
)
def test_one_process_fails_and_the_other_says_so(how, text, tmp_path):
    started = [processes.CONTEXT.Process(target=process, args=(rank, how, str(tmp_path))) for rank in range(2)]
    for one in started:
        one.start()
    for one in started:
        one.join(240)
    assert not any(one.is_alive() for one in started)
    told = (tmp_path / "0.txt").read_text()
    assert text in told and told.startswith("GuardError"), told


def late(rank, world, ways, folder):
    """A process that does not come for the second call, on a mesh of two axes or as a stage."""
    torch.set_num_threads(1)
    faults.GRACE = 2.0
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
    if "stages" in ways:
        new = fxplug.pipefusion(traced(), tokens(), **ways, patches=3, clock=None, check=False)
    else:
        new = parallel(**ways)
    with torch.no_grad():
        for _ in range(3):
            new(tokens())
        dist.barrier()
        start = time.monotonic()
        if rank == world - 1:
            if "stages" in ways:
                os._exit(0)
            others = [Path(folder, f"{other}.txt") for other in range(rank)]
            while not all(file.exists() for file in others) and time.monotonic() < start + 5 * SECONDS:
                time.sleep(0.1)
            return
        with pytest.raises(fxplug.GuardError, match=f"process {world - 1} has died or did not reach the collective") as error:
            while True:
                new(tokens())
    assert time.monotonic() - start < 2 * SECONDS + 3 * faults.GRACE
    Path(folder, f"{rank}.txt").write_text(str(error.value))


@pytest.mark.slow
@pytest.mark.parametrize("ways", [{"batch": 2, "ulysses": 2}, {"ulysses": 2, "ring": 2}, {"stages": 2}], ids=str)
def test_a_process_that_does_not_come_is_named_within_the_timeout(ways, tmp_path):
    world = math.prod(ways.values())
    started = [processes.CONTEXT.Process(target=late, args=(rank, world, ways, str(tmp_path))) for rank in range(world)]
    for one in started:
        one.start()
    for one in started:
        one.join(240)
    assert not any(one.is_alive() for one in started)
    assert all((tmp_path / f"{rank}.txt").exists() for rank in range(world - 1))


# --- plans that cannot be


def test_a_saved_module_on_fewer_processes(tmp_path):
    fxplug.save(parallel(ulysses=2, ring=2), tmp_path / "saved")
    again = fxplug.load(tmp_path / "saved")
    with pytest.raises(fxplug.SpecError, match="runs on 4 processes, and there is no process group: start with torchrun"):
        again(tokens())
    with processes.alone():
        with pytest.raises(fxplug.SpecError, match=r"for 4 processes .ring 2 x ulysses 2., and there are 1: start that number"):
            again(tokens())
        one = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("ulysses",))
        with pytest.raises(fxplug.SpecError, match="the mesh has 1 processes along 'r?u?"):
            fxplug.parallelize(traced(), fxplug.parallel_plan(traced(), tokens(), ulysses=2, check=False), one)
    assert check_pretended(again, (tokens(),), {}) < 1e-5


def test_a_model_of_which_nothing_can_be_split_says_what_stands_in_the_way():
    class Mixing(nn.Module):
        def forward(self, x):
            y = torch.cumsum(x, 1)
            return y @ y.transpose(1, 2)

    gm = fxplug.trace(Mixing(), tokens())
    with pytest.raises(fxplug.SpecError, match=r"can be split along 'sequence': '\w+' .*faults.py:\d+.: it mixes tokens"):
        fxplug.parallel_plan(gm, tokens(), ulysses=2, split={"x": 1})


class Own(torch.Tensor):
    """A subclass without a rule of its own, as torchvision's and fastai's are."""


PAIRS = {  # what a sum of bits times their place takes for one
    "labels": (torch.tensor([1, 2]), torch.tensor([3, 1])),
    "more labels": (torch.tensor([1, 2]), torch.tensor([4, 1])),
    "one-hot rows": (torch.eye(4)[[0, 1]], torch.eye(4)[[1, 0]]),
    "signs": (torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0])),
    "halves": (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([2.0, 1.0], dtype=torch.bfloat16)),
    "booleans": (torch.tensor([True, False, True]), torch.tensor([False, True, True])),
    "complex": (torch.tensor([1 + 2j]), torch.tensor([2 + 1j])),
    "a subclass": (torch.ones(3).as_subclass(Own), torch.zeros(3).as_subclass(Own)),
    "classes": (torch.ones(3).as_subclass(Own), torch.ones(3)),
    "wrapped": (TwoTensor(torch.ones(3), torch.ones(3)), TwoTensor(torch.ones(3), torch.zeros(3))),
    "strides": (torch.ones(3, 4), torch.ones(4, 3).T),
    "shapes": (torch.ones(12), torch.ones(3, 4)),
    "dtypes": (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
    "far apart": (torch.arange(3_000_000) == 5, torch.arange(3_000_000) == 2_900_005),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_between_processes_is_told_apart(name):
    from fxplug.parallel.runtime import checksums

    rows = [repr(checksums._table(torch.nn.Identity(), (each,), {})) for each in PAIRS[name]]
    again = [repr(checksums._table(torch.nn.Identity(), (each.clone(),), {})) for each in PAIRS[name] if name != "strides"]
    assert rows[0] != rows[1] and again == rows[: len(again)]


def test_small_whole_numbers_have_hashes_of_their_own():
    from fxplug.parallel.runtime import checksums

    rows = torch.cartesian_prod(*[torch.arange(12)] * 4)
    assert len({int(checksums._hash(row)) for row in rows}) == len(rows)
