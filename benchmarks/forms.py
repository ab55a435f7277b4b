"""The forms of linear layers with LoRA on a CPU, the constants of the rule that takes one of them, and what the rule loses.

python benchmarks/forms.py [--keep FILE] [--turns N] [--threads N] [--fit] [--write] [--json FILE]

Each layer is measured in each mode (inference, training, slots with one adapter, slots mixed by sample, no adapter) and dtype:
its forms take turns, and a form's time is the median of its ratios over the layer as rewritten. `--keep` writes each case as it
is measured and does not measure it again. What the rule loses is the time of the form that it takes over that of the fastest
one: the geometric mean and the worst, on the layers that `--fit` looks at (ViT-S, Stable Diffusion, a wide DiT, random ones)
and on other random ones. `--fit` looks for constants that lose less there, and `--write` writes them into the package.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PRODUCTS = 1.2e9  # multiplications of a random layer, at most
MODES = ("inference", "training", "slots", "mixed", "plain")
GRID: dict[str, list[int]] = {
    "heavy": [0, 1 << 19, 1 << 20, 1 << 21, 3_500_000, 1 << 22],
    "least": [1 << power for power in (22, 23, 24, 25, 28, 31, 34)], "wide": [0, 256, 384, 512, 768, 1024],
    "banks": [1 << power for power in (21, 22, 23, 24, 25)],
    "narrow": [0, 256, 384, 512, 768, 1024, 1 << 30], "long": [0, 256, 512, 700, 1024, 2048],
}  # fmt: skip


def layers() -> Iterator[tuple[str, int, int, int]]:
    """Where a layer is of, its rows, and its features in and out."""
    for batch, (inner, outer) in itertools.product((1, 4, 16), ((384, 1152), (384, 384), (384, 1536), (1536, 384))):
        yield "vit", 197 * batch, inner, outer
    for rows, width in ((2048, 320), (512, 640), (128, 1280), (32, 1280)):
        yield from (("sd", rows, width, outer) for outer in (width, 8 * width))
        yield "sd", rows, 4 * width, width
        yield "sd", 154, 768, width
    yield from (("dit", rows, inner, outer) for rows, inner, outer in ((4096, 512, 2048), (4096, 2048, 512), (4608, 512, 3584)))
    for name, seed, count in (("random", 1, 30), ("other", 2, 30)):
        draw, found = random.Random(seed), 0
        while found < count:
            one = round(2 ** draw.uniform(4.5, 11.8)), 32 * draw.randint(3, 64), 32 * draw.randint(3, 96)
            if 4e6 < math.prod(one) < PRODUCTS:
                found += 1
                yield name, *one


def case_of(mode: str, rows: int, inner: int, outer: int, dtype: str) -> Any:
    from fxplug.lowerings.linear.forms import Case

    slots = 4 if mode in ("slots", "mixed") else 0
    return Case(dtype, rows, inner, outer, 0 if mode == "plain" else 16, slots, int(mode == "training"))


def calls(mode: str, case: Any) -> dict[str, Callable[[], Any]]:
    """A call of each form; in training, of the gradients of input and update, too."""
    import torch
    import torch.nn.functional as F

    from fxplug.blocks.low_rank import compute_update
    from fxplug.lowerings.linear import operators

    dtype, draws, samples = getattr(torch, case.dtype), torch.Generator().manual_seed(0), 4 if mode == "mixed" else 1
    width, each = case.rank * max(case.slots, 1), -(-case.rows // samples)

    def new(*shape: int, trained: bool = False) -> Any:
        made = (torch.randn(shape, generator=draws) * shape[-1] ** -0.5).to(dtype)
        return made.requires_grad_(trained and mode == "training")

    x, weight, bias = new(samples, each, case.inner, trained=True), new(case.outer, case.inner), new(case.outer)
    down, up = (new(width, case.inner, trained=True), new(case.outer, width, trained=True)) if width else (x, x)
    gates, more, run = torch.ones(()), (), operators.run_lora_linear
    if case.slots:
        chosen = torch.eye(4)[:samples] * torch.tensor([1.0, 1.0, 1.0, 0.0])
        gates, more, run = chosen.repeat_interleave(case.rank, 1), (case.slots, 0), operators.run_bank_linear
    g, wanted = new(samples, each, case.outer), [x, down, up]

    def call(form: str) -> Any:
        if mode == "plain":
            return F.linear(x, weight, bias) if form == "stock" else operators.run_linear(x, weight, bias)
        if form == "stock":
            y = torch.add(F.linear(x, weight, bias), compute_update(x, down, up, gates))
        else:
            y = run(x, weight, bias, down, up, gates, *more, form)  # type: ignore[operator]
        return torch.autograd.grad(y, wanted, g) if mode == "training" else y

    own = ["fused"] if dtype == torch.float32 or mode == "plain" else []
    return {form: functools.partial(call, form) for form in ("stock", *own, *(["blas"] if mode != "plain" else []))}


def measured(mode: str, case: Any, turns: int) -> dict[str, float]:
    """The median of each form's time over that of the layer as rewritten."""
    import torch

    from fxplug.lowerings.linear import measurement

    with torch.set_grad_enabled(bool(case.grad)):
        times = measurement.measure_calls(torch.device("cpu"), calls(mode, case), turns, 0.01)
    return {form: statistics.median(a / b for a, b in zip(each, times["stock"], strict=True)) for form, each in times.items()}


def lost(row: dict[str, Any], limits: dict[str, Any], here: str) -> float:
    """What the rule loses in one case, on a class of devices."""
    from fxplug.lowerings.linear import forms

    before, forms.LIMITS[here] = forms.LIMITS[here], limits
    try:
        form = forms.choose_form(case_of(*row["case"]), here)
    finally:
        forms.LIMITS[here] = before
    found = row["ratios"]
    return float(found.get(form, found["stock"]) / min(found.values()))


def mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def fitted(rows: list[dict[str, Any]], limits: dict[str, Any], here: str) -> dict[str, Any]:
    """The limits that lose least on these rows, looked for one after the other until none is better."""
    best, least = dict(limits), mean([lost(row, limits, here) for row in rows])
    for key in [key for key in [*GRID, *GRID] if limits[key] is not None]:
        for value in GRID[key]:
            tried = {**best, key: value}
            if (loss := mean([lost(row, tried, here) for row in rows])) < least - 1e-5:
                best, least = tried, loss
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, default=Path("out/forms.jsonl"))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--every", type=int, default=1, help="Measure each so many-th layer alone.")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    from record import processor, write

    from fxplug.lowerings.linear import forms

    torch.set_num_threads(options.threads)
    rows = [json.loads(line) for line in options.keep.read_text().splitlines()] if options.keep.exists() else []
    known = {tuple(row["case"]) for row in rows}
    options.keep.parent.mkdir(parents=True, exist_ok=True)
    for dtype, mode, (name, *sizes) in itertools.product(options.dtypes, MODES, list(layers())[:: options.every]):
        if (mode, *sizes, dtype) not in known:
            found = measured(mode, case_of(mode, *sizes, dtype), options.turns)
            rows.append({"of": name, "case": [mode, *sizes, dtype], "ratios": found})
            with options.keep.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(name, mode, *sizes, dtype, {form: round(ratio, 3) for form, ratio in found.items()}, flush=True)
    here = forms.classify("cpu")
    limits = {"now": forms.LIMITS[here]}
    if options.fit:
        limits["fitted"] = fitted([row for row in rows if row["of"] != "other"], forms.LIMITS[here], here)
    found: dict[str, Any] = {}
    for which, each in limits.items():
        print(which, {key: each[key] for key in GRID})
        for dtype, mode, other in itertools.product(options.dtypes, MODES, (False, True)):
            kind = [row for row in rows if (row["case"][0], row["case"][-1]) == (mode, dtype)]
            some = [lost(row, each, here) for row in kind if (row["of"] == "other") is other]
            if some:
                text = f"{dtype} {mode}{', other layers' * other}"
                found[f"{which} {text}"] = {"mean": mean(some), "worst": max(some), "cases": len(some)}
                print(f"  {text}: {len(some)} cases, {mean(some):.3f} of the fastest form, at worst {max(some):.2f}")
    if options.json:
        write(options.json, {"limits": limits, "lost": found})
    if options.write:
        file = Path(forms.__file__).with_name("limits.json")
        about = f"measured on {processor()}, torch {torch.__version__.partition('+')[0]}"
        document = {**forms.LIMITS, here: {**limits.get("fitted", limits["now"]), "about": about}}
        file.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {file}")


if __name__ == "__main__":
    main()
