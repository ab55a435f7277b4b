"""Cost of a call with slots, over that of the plain model: the bank that computes all slots in use, and the gathered one.

`python benchmarks/slots.py` measures a small UNet of diffusers in CPU time, interleaved in one process.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from diffusers import UNet2DConditionModel

import fxplug

ROWS, RANK, TURNS = 16, 8, 5


def build() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=14, in_channels=4, out_channels=4, layers_per_block=2, block_out_channels=(64, 128), norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64, attention_head_dim=8,
    ).eval()  # fmt: skip
    call = {
        "sample": torch.randn(ROWS, 4, 14, 14), "timestep": torch.rand(ROWS) * 1000,
        "encoder_hidden_states": torch.randn(ROWS, 2, 64), "return_dict": False,
    }  # fmt: skip
    return fxplug.trace(model, kwargs=call), call


def slotted(gm: Any, slots: int, **options: Any) -> Any:
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=RANK, slots=slots, **options))
    known = [(name, m) for name, m in gm.named_modules() if getattr(m, "weight", None) is not None]
    layers = [(name, m) for name, m in known if m.weight.dim() in (2, 4)]
    for number in range(slots):
        state = {}
        for name, layer in layers:
            w, tail = layer.weight, [1] * (layer.weight.dim() - 2)
            state[f"{name}.lora_A.weight"] = torch.randn(RANK, *w.shape[1:]) / w[0].numel() ** 0.5
            state[f"{name}.lora_B.weight"] = torch.randn(w.shape[0], RANK, *tail) * 0.1
        new.adapters.load(f"a{number}", state)
    return new


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


def main() -> None:
    torch.set_num_threads(1)
    gm, call = build()
    for each in (1, 2):
        forms: dict[str, Any] = {"plain": gm, "all slots in use, 16": slotted(gm, 16)}
        forms |= {f"gathered, {slots}": slotted(gm, slots, per_sample=each) for slots in (4, 16, 64)}
        for name, form in forms.items():
            if name != "plain":
                used = form.adapters.names[: 4 if name.endswith("64") else 16]
                form.adapters.use([{used[(i + 5 * j) % len(used)]: 0.5 + 0.1 * j for j in range(each)} for i in range(ROWS)])
        found = measure(forms, call)
        print(f"{ROWS} rows, {each} adapters each:")
        for name, seconds in found.items():
            print(f"  {name}: {1000 * seconds:.0f} ms, {seconds / found['plain']:.2f} of plain")


if __name__ == "__main__":
    main()
