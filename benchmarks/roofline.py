"""What each form of the linear layers with LoRA should cost on a GPU: a model, computed without one.

python benchmarks/roofline.py [--only KIND ...] [--json FILE] [--write]

Layers are those that adapters are for (`models.py`), with the shapes that a trace on the meta device noted at their nodes.
A form is called on meta tensors, and each operation that reads or writes memory is noted with its FLOPs and bytes, each of
its tensors once: nothing about a form is written down here but how it is called. One operation is one kernel, which takes

    KERNEL + max(FLOPs / peak, bytes / bandwidth)

and a call takes the sum of its kernels, or DISPATCH for each of them where that is more: the host launches no faster. In a
CUDA graph it does (`graph`). Peaks are the vendors' for dense products of float16 and bfloat16, which cost the same, with
float32 sums; no kernel reaches them, and caches and half-filled waves of blocks are left out. Ratios are over the plain
layers, of those layers alone: the rest of a model costs what it did. `--write` puts the table into docs/measured.md.
`benchmarks/gpu_trial.py` measures forms on a GPU.

plain      the layer alone                     rewritten  with LoRA as `apply` leaves it
merged     the update added to its weight      fused      `fuse(how="fused")`
slots      four slots, all of which a GPU computes, in use or not, fused or not
one        no form of fxplug's: one kernel that does the products beside the weight and moves each tensor once, which is
           the least that a kernel of our own could cost
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import models
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fxplug.lowerings.linear import operators
from fxplug.lowerings.linear.forms import Case, make_case
from fxplug.lowerings.linear.layers import list_linear

PAGE = Path(__file__).parent.parent / "docs/measured.md"
KERNEL, DISPATCH = 2e-6, 5e-6  # seconds of a kernel beside its work, and of the host to launch one in eager mode
RANKS, SLOTS = (8, 16, 64), 4
FORMS = ["plain", "merged", "rewritten", "fused", "slots"]
# model and batch: pictures of 512 pixels with guidance, one and eight; of 1024, one with guidance and one; 64 photographs
SUBJECTS = {"sd15": (2, 16), "sdxl": (2,), "flux-whole-4k": (1,), "vit-large": (64,)}


class Device(NamedTuple):
    """A GPU by the end of the name that torch has for it: FLOPs and bytes per second."""

    name: str
    peak: float
    bandwidth: float


DEVICES = [
    Device("A100-SXM4-80GB", 312e12, 2039e9),
    Device("A100-SXM4-40GB", 312e12, 1555e9),
    Device("H100 80GB HBM3", 989e12, 3350e9),
    Device("RTX 4090", 165e12, 1008e9),
]


class Operation(NamedTuple):
    """One kernel: what it computes, and what it reads and writes."""

    name: str
    flops: int
    bytes: int


class Seconds(NamedTuple):
    """Time of a call as eager code launches it, and with its kernels launched ahead."""

    eager: float
    graph: float


class Operations(TorchDispatchMode):
    """The operations that run under it, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and name != "_unsafe_view":  # a view, too
            packet = getattr(torch.ops.aten, name.rstrip("_"))  # FLOPs in place are those of the other
            flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            if name == "addmm" and args[0].dim() == 2:  # which torch's CUDA kernel copies into the result, to add to it there
                self.seen.append(Operation("copy_", 0, 2 * args[0].nbytes))
            self.seen.append(Operation(name, flops, sum(t.nbytes for t in tensors)))
        return out


# --- layers and forms


def cases_of(kind: str, batch: int, dtype: torch.dtype = torch.bfloat16) -> Counter[Case]:
    """The shapes of a model's layers that adapters are for, without a rank, and how many layers have each."""
    of = models.subject(kind, batch, dtype, "meta")
    gm, wanted = models.traced(of), set(of.layers)
    found = [make_case(gm, layer) for layer in list_linear(gm.graph, gm) if str(layer.node.target) in wanted]
    return Counter(known[1] for known in found if known is not None)


def calls(case: Case, device: str = "meta", dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The forms of a layer with an update of the case's rank, as calls on the same tensors, computed in `dtype` if given."""
    stored, draws = getattr(torch, case.dtype), None if device == "meta" else torch.Generator(device).manual_seed(0)

    def new(*shape: int) -> Tensor:
        values = torch.randn(shape, device=device, generator=draws) * shape[-1] ** -0.5
        return values.to(stored).to(dtype or stored)

    x, weight, bias = new(1, case.rows, case.inner), new(case.outer, case.inner), new(case.outer)
    down, up = new(SLOTS * case.rank, case.inner), new(case.outer, SLOTS * case.rank)
    one = down[: case.rank].clone(), up[:, : case.rank].clone(), torch.ones((), device=device)
    gates = (torch.arange(SLOTS * case.rank, device=device) < case.rank).float()[None]  # the first slot is in use
    merged = torch.addmm(weight, one[1], one[0])
    return {
        "plain": lambda: F.linear(x, weight, bias),
        "merged": lambda: F.linear(x, merged, bias),
        "rewritten": lambda: operators.run_lora_linear(x, weight, bias, *one, "stock"),
        "fused": lambda: operators.run_lora_linear(x, weight, bias, *one, "fused"),
        "slots": lambda: operators.run_bank_linear(x, weight, bias, down, up, gates, SLOTS, 0, "fused"),
    }


# --- the model


@functools.cache
@torch.no_grad()
def costs(case: Case) -> dict[str, list[Operation]]:
    """The operations of each form, and of the kernel that there could be."""
    found = {}
    for form, call in calls(case).items():
        with Operations() as operations:
            call()
        found[form] = operations.seen
    rows, inner, outer, rank, size = case.rows, case.inner, case.outer, case.rank, getattr(torch, case.dtype).itemsize
    moved = rows * (inner + outer) + inner * outer + outer + rank * (inner + outer)
    found["one"] = [Operation("one", 2 * rows * (inner * outer + rank * (inner + outer)), size * moved)]
    return found


def seconds(operations: Iterable[Operation], device: Device) -> Seconds:
    """Time of a call by the model above."""
    kernels = [KERNEL + max(each.flops / device.peak, each.bytes / device.bandwidth) for each in operations]
    return Seconds(max(sum(kernels), DISPATCH * len(kernels)), sum(kernels))


def predict(cases: Counter[Case], rank: int, device: Device) -> dict[str, Any]:
    """Milliseconds of all layers in each form, and the ratio over the plain ones, eager and with kernels launched ahead."""
    total: dict[str, list[float]] = {}
    for case, count in cases.items():
        for form, operations in costs(case._replace(rank=rank)).items():
            spent = seconds(operations, device)
            total[form] = [a + 1000 * count * b for a, b in zip(total.get(form, [0.0, 0.0]), spent, strict=True)]
    return {
        form: {
            how: {"milliseconds": spent[i], "ratio": spent[i] / total["plain"][i]} for i, how in enumerate(Seconds._fields)
        }
        for form, spent in total.items()
    }


def best(ratios: dict[str, float]) -> str:
    """The faster of the forms that keep the update apart from the weight, or both."""
    apart = {form: ratios[form] for form in ("rewritten", "fused")}
    low, high = sorted(apart, key=apart.__getitem__)
    return "either" if apart[high] < 1.01 * apart[low] else f"{low}, by {100 * (1 - apart[low] / apart[high]):.0f} %"


# --- the table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=list(SUBJECTS), nargs="+", default=list(SUBJECTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into docs/measured.md")
    options = parser.parse_args()
    rows, lines = [], []
    for kind in options.only:
        for batch in SUBJECTS[kind]:
            cases = cases_of(kind, batch)
            shapes = [{**case._asdict(), "layers": count} for case, count in cases.items()]
            expected = {device.name: {rank: predict(cases, rank, device) for rank in RANKS} for device in DEVICES}
            rows.append({"model": kind, "batch": batch, "shapes": shapes, "gpus": expected})
            lines += [line(kind, batch, name, cases.total(), ranks) for name, ranks in expected.items() if name not in HIDDEN]
    made = table([HEAD, *lines])
    print(made)
    if options.json:
        from record import write

        gpus = [device._asdict() for device in DEVICES]
        write(options.json, {"kernel": KERNEL, "dispatch": DISPATCH, "slots": SLOTS, "gpus": gpus, "rows": rows})
    if options.write:
        put("roofline", made)


HIDDEN = ["A100-SXM4-40GB", "A100-SXM4-80GB", "RTX 4090"]  # in the JSON
HEAD = ["layers (batch)", "GPU", "plain", "rewritten", "fused", "4 slots", "one kernel", "launched ahead", "should win"]


def line(kind: str, batch: int, gpu: str, count: int, ranks: dict[int, dict[str, Any]]) -> list[str]:
    """A row of the table: in eager mode the plain layers and ratios over them at each rank, and what is without DISPATCH."""
    forms = ("rewritten", "fused", "slots", "one")
    cells = ["; ".join(f"{ranks[rank][form]['eager']['ratio']:.2f}" for rank in RANKS) for form in forms]
    ahead = "; ".join(f"{ranks[16][form]['graph']['ratio']:.2f}" for form in forms)
    plain = f"{ranks[16]['plain']['eager']['milliseconds']:.2f} ms"
    wins = best({form: ranks[16][form]["eager"]["ratio"] for form in forms})
    return [f"{kind} ({batch}), {count}", gpu, plain, *cells, ahead, wins]


def table(rows: list[list[str]]) -> str:
    """Rows as Markdown, the first as head."""
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *rest])


def put(name: str, made: str) -> None:
    """Write a table into docs/measured.md between its markers."""
    text, start, end = PAGE.read_text(), f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    PAGE.write_text(text[: text.index(start) + len(start)] + made + "\n" + text[text.index(end) :])


if __name__ == "__main__":
    main()
