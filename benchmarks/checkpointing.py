"""Training memory and step time with gradient checkpointing: outlined regions beside diffusers' own.

An SD-style UNet with LoRA of rank 16 on its attention layers takes a whole training step (forward, backward, AdamW): ours
through `outline(checkpoint=True)`, theirs through PEFT's adapter and `enable_gradient_checkpointing()`. Both are also run
without checkpoints. Steps alternate in one run; ratios are ours to theirs. Memory is the peak of live tensor bytes in one
step beyond what is there before it, and what is live between forward and backward: counted at each operation on a CPU, told
by the allocator on a GPU.

    python benchmarks/checkpointing.py --json benchmarks/results/DATE-DEVICE-checkpointing.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import weakref
from pathlib import Path
from typing import Any

import models
import torch
from peft import LoraConfig
from record import write
from timing import by_the_clock, ratios, taken
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxplug
from fxplug.lowerings.regions.submodules import outline

BATCH = {"unet": 2, "sd15": 4}  # of the models of models.py
LAYERS = ["to_q", "to_k", "to_v", "to_out.0"]
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", choices=list(BATCH))
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    names = [options.only] if options.only else list(BATCH) if cuda else ["unet"]
    rows = {name: measure(name, options.pairs) for name in names}
    if options.json:
        write(options.json, rows)


def measure(name: str, pairs: int) -> dict[str, Any]:
    of = models.subject(name, BATCH[name], torch.float32)
    base, inputs = of.module, of.inputs
    theirs, theirs_plain = adapted(base), adapted(base)
    theirs.enable_gradient_checkpointing()
    gm = fxplug.trace(copy.deepcopy(base), (), inputs)
    ours_plain = fxplug.apply(gm, fxplug.load_pass("lora", at=r"re:.*attn\d\.to_(q|k|v|out\.0)$", rank=RANK))
    for key, parameter in ours_plain.named_parameters():
        parameter.requires_grad_(key.startswith("lora."))
    begun = time.perf_counter()
    ours = outline(ours_plain, checkpoint=True)
    seconds = time.perf_counter() - begun
    regions = list(ours.meta["regions"])
    modules = {"ours": ours, "theirs": theirs, "ours_plain": ours_plain, "theirs_plain": theirs_plain}
    steps = {who: Step(model.train(), inputs) for who, model in modules.items()}
    counts = {who: sum(p.numel() for p in step.own) for who, step in steps.items()}
    assert len(set(counts.values())) == 1, counts
    times = taken(steps, pairs, 2, by_the_clock)
    memory = {who: step.memory() for who, step in steps.items()}
    row: dict[str, Any] = {
        "batch": BATCH[name], "rank": RANK, "trainable": counts["ours"], "outline_seconds": seconds, "regions": regions,
        "milliseconds": {who: statistics.median(found[who] for found in times) for who in steps}, "memory": memory,
        "ratio": {
            "time": ratios(times, "ours", "theirs"),
            "time_plain": ratios(times, "ours_plain", "theirs_plain"),
            "time_ours_to_plain": ratios(times, "ours", "ours_plain"),
            "time_theirs_to_plain": ratios(times, "theirs", "theirs_plain"),
            "peak": memory["ours"]["peak"] / memory["theirs"]["peak"],
            "peak_plain": memory["ours_plain"]["peak"] / memory["theirs_plain"]["peak"],
            "peak_ours_to_plain": memory["ours"]["peak"] / memory["ours_plain"]["peak"],
            "peak_theirs_to_plain": memory["theirs"]["peak"] / memory["theirs_plain"]["peak"],
            "saved": memory["ours"]["saved"] / memory["theirs"]["saved"],
        },
        "times": times,
    }  # fmt: skip
    print(f"{name}  {len(regions)} regions, outlined in {seconds:.2f} s")
    for who in steps:
        mib = {k: f"{v / 2**20:.1f} MiB" for k, v in memory[who].items()}
        print(f"{name}  {who:12}  {row['milliseconds'][who]:8.1f} ms   " + "   ".join(f"{k} {v}" for k, v in mib.items()))
    for what, ratio in row["ratio"].items():
        print(f"{name}  {what:22} {ratio['median'] if isinstance(ratio, dict) else ratio:.3f}", flush=True)
    return row


def adapted(base: nn.Module) -> Any:
    """The UNet with PEFT's adapter, as diffusers' training scripts make it."""
    model: Any = copy.deepcopy(base)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=LAYERS))
    return model


class Step:
    """One training step of a model."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self.own = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.own, 1e-4)
        self.target = torch.randn_like(inputs["sample"])

    def __call__(self, between: Any = None) -> None:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(**self.inputs)[0], self.target)
        if between is not None:
            between()
        loss.backward()
        self.optimizer.step()

    def memory(self) -> dict[str, int]:
        """Bytes beyond what is live before the step: saved for the backward pass, and at the peak."""
        found: dict[str, int] = {}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self(lambda: found.update(saved=torch.cuda.memory_allocated() - before))
            return {**found, "peak": torch.cuda.max_memory_allocated() - before}
        with Live() as live:
            self(lambda: found.update(saved=live.now))
        return {**found, "peak": live.peak}


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that were made inside it and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                if storage not in self.known:
                    self.known.add(storage)
                    self.change(storage.nbytes())
                    weakref.finalize(storage, self.change, -storage.nbytes())
        return out

    def change(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


if __name__ == "__main__":
    main()
