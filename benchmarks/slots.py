"""Cost of a call with slots, over that of the plain model: the bank that computes all slots in use, and the gathered ones.

`python benchmarks/slots.py` measures a small UNet of diffusers in CPU time, interleaved in one process, and how long `use`,
`load`, `put` and `unload` take; `--fashion` the UNet of examples/fashion; `--regions` what regions add, eager and compiled.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel

import fxplug
from fxplug.adapters import state
from fxplug.blocks.gathered import GatheredDora

FASHION = Path(__file__).resolve().parent.parent / "examples/fashion"
ROWS, RANK, TURNS = 16, 8, 5


def build() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    if "--fashion" in sys.argv:
        model = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(FASHION / "unet")).eval()
    else:
        model = build_small()
    call = {
        "sample": torch.randn(ROWS, 4, 14, 14), "timestep": torch.rand(ROWS) * 1000,
        "encoder_hidden_states": torch.randn(ROWS, 2, 64), "return_dict": False,
    }  # fmt: skip
    return fxplug.trace(model, kwargs=call), call


def build_small() -> Any:
    return UNet2DConditionModel(
        sample_size=14, in_channels=4, out_channels=4, layers_per_block=2, block_out_channels=(64, 128), norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64, attention_head_dim=8,
    ).eval()  # fmt: skip


def make_adapter(gm: Any, magnitudes: bool = False) -> dict[str, torch.Tensor]:
    """Return an adapter of the highest rank on all layers: LoRA, or DoRA."""
    known = [(name, m) for name, m in gm.named_modules() if getattr(m, "weight", None) is not None]
    state = {}
    for name, layer in [(name, m) for name, m in known if m.weight.dim() in (2, 4)]:
        w, tail = layer.weight, [1] * (layer.weight.dim() - 2)
        state[f"{name}.lora_A.weight"] = torch.randn(RANK, *w.shape[1:]) / w[0].numel() ** 0.5
        state[f"{name}.lora_B.weight"] = torch.randn(w.shape[0], RANK, *tail) * 0.1
        if magnitudes:
            norm = torch.linalg.vector_norm(w.detach().flatten(1), dim=1) * 1.1
            state[f"{name}.lora_magnitude_vector.weight"] = norm if w.dim() == 2 else norm.view(1, -1, *tail)
    return state


def slotted(gm: Any, slots: int, name: str = "lora", magnitudes: bool = False, **options: Any) -> Any:
    new = fxplug.apply(gm, fxplug.load_pass(name, at="**", rank=RANK, slots=slots, **options))
    for number in range(slots):
        new.adapters.load(f"a{number}", make_adapter(gm, magnitudes))
    return new


@contextlib.contextmanager
def timed_changes() -> Iterator[list[float]]:
    """Note the seconds for which each change of the slots keeps calls out."""
    found: list[float] = []
    original = state.write_lock

    @contextlib.contextmanager
    def noted(*args: Any) -> Iterator[None]:
        with original(*args):
            start = time.thread_time()
            yield
            found.append(time.thread_time() - start)

    state.write_lock = noted
    try:
        yield found
    finally:
        state.write_lock = original


def measure_changes(gm: Any, new: Any, kind: str) -> None:
    """Print what `use` takes, and how long changes keep calls out, least of several tries each."""
    names = new.adapters.names
    entries = [{names[i % len(names)]: 0.5, names[(i + 5) % len(names)]: 0.6} for i in range(32)]
    rows = new.adapters.rows(entries)

    def least(function: Any, *args: Any) -> float:
        times = []
        for _ in range(30):
            start = time.thread_time()
            function(*args)
            times.append(1000 * (time.thread_time() - start))
        return min(times)

    spent = f"Rows of 32 {least(new.adapters.use, rows):.3f} ms, a list of 32 {least(new.adapters.use, entries):.2f} ms"
    print(f"use with {kind} loaded: {spent}")
    new.adapters.use(None)
    file = make_adapter(gm, kind == "DoRA")
    held: dict[str, list[float]] = {"unload": [], "load": [], "put": []}
    ready = new.adapters.prepare("a0", file)
    for _ in range(5):
        for verb, change in (("unload", lambda: new.adapters.unload("a0")), ("load", lambda: new.adapters.load("a0", file)),
                             ("unload", lambda: new.adapters.unload("a0")), ("put", lambda: new.adapters.put(ready))):
            with timed_changes() as found:
                change()
            held[verb].append(1000 * sum(found))
    print("lock held: " + ", ".join(f"{verb} {min(found):.2f} ms" for verb, found in held.items()))


def measure(forms: dict[str, Any], call: dict[str, Any]) -> dict[str, float]:
    """Return the median CPU seconds of each form, measured in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    with torch.no_grad():
        for turn in range(TURNS + 1):
            for name, form in forms.items():
                start = time.process_time()
                form(**call)
                if turn:
                    seconds[name].append(time.process_time() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


def measure_regions(gm: Any, call: dict[str, Any]) -> None:
    """Print a call with two adapters in a half each over the same call everywhere, as the median of the ratios of turns."""
    left = torch.zeros(16, 16)
    left[:, :8] = 1
    for name, magnitudes in (("lora", False), ("dora", True)):
        plain, new = (slotted(gm, 4, name, magnitudes, per_sample=2, regions=regions) for regions in (False, True))
        plain.adapters.use({"a0": 1.0, "a1": 0.7})
        new.adapters.use({"a0": fxplug.Strength(1.0, region=left), "a1": fxplug.Strength(0.7, region=1 - left)})
        for compiled in (False, True):
            pair = [torch.compile(form) if compiled else form for form in (plain, new)]
            ratios = []
            with torch.no_grad():
                for turn in range(20):
                    times = []
                    for form in pair:
                        start = time.process_time()
                        form(**call)
                        times.append(time.process_time() - start)
                    ratios += [times[1] / times[0]] if turn > 2 else []
            print(f"regions, {name}, {'compiled' if compiled else 'eager'}: {statistics.median(ratios):.3f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    gm, call = build()
    if "--regions" in sys.argv:
        return measure_regions(gm, call)
    for each in (1, 2):
        forms: dict[str, Any] = {"plain": gm, "all slots in use, 16": slotted(gm, 16)}
        forms |= {f"gathered, {slots}": slotted(gm, slots, per_sample=each) for slots in (4, 64)}
        forms |= {"gathered, all 64 in use": slotted(gm, 64, per_sample=each)}
        forms |= {"dora, LoRA": slotted(gm, 16, "dora", per_sample=each)}
        forms |= {"dora, DoRA": slotted(gm, 16, "dora", True, per_sample=each)}
        for name, form in forms.items():
            if name != "plain":
                used = form.adapters.names[: 64 if "64 in use" in name else 4 if name.startswith("gathered") else 16]
                form.adapters.use([{used[(i + 5 * j) % len(used)]: 0.5 + 0.1 * j for j in range(each)} for i in range(ROWS)])
        found = measure(forms, call)
        print(f"{ROWS} rows, {each} adapters each:")
        for name, seconds in found.items():
            print(f"  {name}: {1000 * seconds:.0f} ms, {seconds / found['plain']:.2f} of plain")
        ratios = {name: found[name] / found["gathered, 4"] for name in found if name.startswith("gathered")}
        print("  over 4 slots: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
        form = forms["dora, LoRA"]
        with without_skip():
            paid = measure({"lora": forms["gathered, 64"], "dora": form}, call)
        print(f"  the gain computed where no adapter has one, as compiled code does: {paid['dora'] / paid['lora']:.3f} of lora")
    measure_changes(gm, forms["gathered, 64"], "LoRA")
    measure_changes(gm, forms["dora, DoRA"], "DoRA")


@contextlib.contextmanager
def without_skip() -> Iterator[None]:
    """Compute gains in eager code on a CPU also where no adapter in use has one."""
    original = GatheredDora.find_gains
    GatheredDora.find_gains = lambda self, which: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        GatheredDora.find_gains = original  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
