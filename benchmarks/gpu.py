"""The forms of linear layers with LoRA on a GPU: values, times, and whether these are what `roofline.py` expects.

python benchmarks/gpu.py [--json FILE] [--write] [--only KIND ...] [--compiled] [--minutes N] [--peak TFLOPS GBS]
                         [--device cpu]

The layers of `roofline.py`'s models, one of each shape, in each rank, in float16 and bfloat16. Forms take turns on the same
tensors, timed by CUDA's events over several calls a turn, so that caches are warm; a ratio is the median over turns, over
the plain layer of the same turn, and a model's is that of its layers together. A prediction is confirmed where it is within
TENTH of what was measured. `off` is the largest difference of a form's result from the merged layer's in float32, and
`gradients off` that of the fused form's gradients; a form that is further off than LIMITS makes the command fail. The table
goes into docs/measured.md with `--write`. Of shapes that --minutes do not suffice for nothing is said, and how many they are.

--device cpu runs the same at small sizes, to try the command; its times mean nothing for a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import roofline
import torch
from roofline import FORMS, Device
from timing import Call, difference, turns

from fxplug.lowerings.linear.forms import Case
from fxplug.lowerings.linear.measurement import calls_of

TENTH = 0.1
TURN = 2e-3  # seconds of one turn of a form on a GPU, at least
LIMITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}
SMALL = {"small": (1,)}
Cases = dict[tuple[str, int], Counter[Case]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into docs/measured.md")
    parser.add_argument("--only", choices=list(roofline.SUBJECTS), nargs="+", default=list(roofline.SUBJECTS))
    parser.add_argument("--compiled", action="store_true", help="each form compiled by itself, in bfloat16 at rank 16")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--peak", type=float, nargs=2, metavar=("TFLOPS", "GBS"), help="of a GPU that roofline.py has not")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(arguments)
    until = time.monotonic() + 60 * options.minutes
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here, and nothing was measured: --device cpu tries the command at small sizes")
        return 2
    device = known_device(options.device, options.peak)
    subjects = SMALL if options.device == "cpu" else {kind: roofline.SUBJECTS[kind] for kind in options.only}
    cases: Cases = {(kind, batch): roofline.cases_of(kind, batch) for kind, batches in subjects.items() for batch in batches}
    ranks, dtypes = ((16,), ("bfloat16",)) if options.compiled else (roofline.RANKS, ("bfloat16", "float16"))
    wanted = [
        case._replace(rank=rank, dtype=dtype, compiled=int(options.compiled))
        for rank in sorted(ranks, key=lambda rank: rank != 16)  # what the table shows first
        for dtype in dtypes
        for case in dict.fromkeys(case for counted in cases.values() for case in counted)
    ]
    found: dict[Case, dict[str, Any]] = {}
    for case in wanted:
        if time.monotonic() > until and found:
            break
        found[case] = measure(case, options.device, options.turns)
    rows = [row for rank in ranks for dtype in dtypes for row in rows_of(cases, found, rank, dtype, device, options.compiled)]
    wrong = [f"{case}: {form} is {off:.1e} off" for case in found for form, off in too_far(case, found[case])]
    made = "\n\n".join([summary(rows, device, len(wanted) - len(found), wrong), roofline.table([HEAD, *map(line, rows)])])
    print(made)
    if options.json:
        from record import write

        shapes = [{**case._asdict(), **found[case]} for case in found]
        write(options.json, {"gpu": device._asdict(), "rows": rows, "shapes": shapes, "wrong": wrong})
    if options.write:
        roofline.put("gpu", made)
    return int(bool(wrong))


def known_device(kind: str, peak: list[float] | None) -> Device:
    """The GPU at hand with its peak and bandwidth, which are given or those of `roofline.py`."""
    name = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
    if peak:
        return Device(name, peak[0] * 1e12, peak[1] * 1e9)
    if kind == "cpu":
        return Device(name, 1e11, 1e10)
    for device in roofline.DEVICES:
        if name.endswith(device.name):
            return device._replace(name=name)
    known = ", ".join(device.name for device in roofline.DEVICES)
    raise SystemExit(f"the peak and bandwidth of '{name}' are not known ({known} are): give them as --peak TFLOPS GBS")


# --- one shape


def measure(case: Case, device: str, count: int) -> dict[str, Any]:
    """Times of the forms of a case, with ratios over the plain layer, and how far their values are off."""
    calls = roofline.calls(case, device)
    with torch.no_grad():
        exact = roofline.calls(case, device, torch.float32)
        plain, merged = exact["plain"](), exact["merged"]()  # torch's own products: no form is held to itself
        if case.compiled:
            torch._dynamo.reset()
            calls = {form: torch.compile(call, fullgraph=True, dynamic=False) for form, call in calls.items()}
        off = {form: difference(call(), plain if form == "plain" else merged) for form, call in calls.items()}
        found = turns(calls, count, "plain", clock=clock(calls, device))
    return {"forms": found, "off": {**off, **({} if case.compiled else {"gradients": gradients_off(case, device)})}}


def clock(calls: dict[str, Call], device: str) -> Callable[[Call], float]:
    """Milliseconds of a call: on a GPU by CUDA's events around as many as take TURN, so that they are launched ahead."""

    def several(call: Call, repeats: int) -> float:
        if device == "cpu":
            begun = time.perf_counter()
            for _ in range(repeats):
                call()
            return 1000 * (time.perf_counter() - begun) / repeats
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / repeats

    few = {call: several(call, 3) for call in calls.values()}  # the first of these loads kernels
    few = {call: several(call, 3) for call in few}
    repeats = {call: max(1, round(1000 * TURN / spent)) if device != "cpu" else 1 for call, spent in few.items()}
    return lambda call: several(call, repeats[call])


def gradients_off(case: Case, device: str) -> float:
    """How far the fused form's gradients of input and update are from those of the layer as rewritten, at most."""
    plain, fused = (calls_of(torch.device(device), case._replace(grad=1))[form]() for form in ("stock", "fused"))
    return max(difference(a, b) for a, b in zip(fused, plain, strict=True))


def too_far(case: Case, found: dict[str, Any]) -> list[tuple[str, float]]:
    """The forms of a case whose values are not close enough to the ones expected."""
    return [(form, off) for form, off in found["off"].items() if not off <= LIMITS[case.dtype]]


# --- models, and what was expected


def rows_of(
    cases: Cases, found: dict[Case, dict[str, Any]], rank: int, dtype: str, device: Device, compiled: bool
) -> list[dict[str, Any]]:
    """Each model's layers together: ratios of the forms, beside those expected; none where a shape was not measured."""
    rows = []
    for (kind, batch), counted in cases.items():
        layers = {case._replace(rank=rank, dtype=dtype, compiled=int(compiled)): count for case, count in counted.items()}
        if not found.keys() >= layers.keys():
            continue
        expected = roofline.predict(counted, rank, device)
        plain = {case: count * found[case]["forms"]["plain"]["milliseconds"] for case, count in layers.items()}
        how, forms = "graph" if compiled else "eager", {}
        for form in FORMS:
            ratio = sum(ms * found[case]["forms"][form]["ratio"]["median"] for case, ms in plain.items()) / sum(plain.values())
            said = expected[form][how]["ratio"]
            forms[form] = {"ratio": ratio, "expected": said, "confirmed": abs(said / ratio - 1) <= TENTH}
        off = {form: max(found[case]["off"].get(form, 0.0) for case in layers) for form in (*FORMS, "gradients")}
        rows.append({
            "model": kind, "batch": batch, "rank": rank, "dtype": dtype, "compiled": compiled, "layers": counted.total(),
            "milliseconds": sum(plain.values()), "forms": forms, "off": off,
            "fastest": roofline.best({form: each["ratio"] for form, each in forms.items()}),
            "expected_fastest": roofline.best({form: each["expected"] for form, each in forms.items()}),
        })  # fmt: skip
    return rows


HEAD = ["layers (batch)", "rank", "dtype", "plain", *FORMS[1:], "faster (expected)", "off; gradients"]


def line(row: dict[str, Any]) -> list[str]:
    """A row of the table: ratios as measured, with those expected and what became of them."""
    cells = [
        f"{each['ratio']:.2f} ({each['expected']:.2f}, {'confirmed' if each['confirmed'] else 'refuted'})"
        for form, each in row["forms"].items()
        if form != "plain"
    ]
    off = max(value for form, value in row["off"].items() if form != "gradients")
    return [
        f"{row['model']} ({row['batch']}), {row['layers']}", str(row["rank"]), row["dtype"], f"{row['milliseconds']:.2f} ms",
        *cells, f"{row['fastest']} ({row['expected_fastest']})", f"{off:.0e}; {row['off']['gradients']:.0e}",
    ]  # fmt: skip


def summary(rows: list[dict[str, Any]], device: Device, left: int, wrong: list[str]) -> str:
    """What the table is of, and in one sentence what it says."""
    each = [form for row in rows for name, form in row["forms"].items() if name != "plain"]
    confirmed = sum(form["confirmed"] for form in each)
    said = f"{confirmed} of {len(each)} predictions are within {TENTH:.0%} of what was measured"
    what = f"{device.name}, torch {torch.__version__}, {device.peak / 1e12:.0f} TFLOP/s and {device.bandwidth / 1e9:.0f} GB/s"
    more = [f"{left} shapes were not measured in the time allowed"] if left else []
    return "; ".join([f"{what}: {said}", *more, *(wrong or ["all values agree with float32's"])]) + "."


if __name__ == "__main__":
    sys.exit(main())
