"""One training step with LoRA of rank 16 on all attention: fxplug's graph and PEFT's modules, in one run.

python benchmarks/train_step.py [--json FILE] [--turns N] [--only vit|unet] [--eager] [--dtype fp32|bf16|fp16] [--batch N]

vit   timm's ViT-S/16 at 224, on attn.qkv and attn.proj
unet  a UNet in the style of Stable Diffusion: 128, 256 and 256 channels, latents of 32x32, 77 words of width 768, on
      to_q, to_k, to_v and to_out.0
A step is forward, backward and torch.optim.AdamW, on the same weights and data. The ways take turns, and a ratio is over
PEFT's step, eager or compiled, of the same turn: in time of this process on a CPU, by CUDA's events on a GPU.

fxplug   the graph as `apply` leaves it
auto     the same after `fuse`, in the forms measured fastest
fused, blas              in one form for all: through oneDNN on a CPU, and by torch's own products
*_last   PEFT and fused with the base's convolutions in channels_last (UNet only)
*_checkpointed           PEFT with diffusers' own gradient checkpointing, and fxplug's outlined regions (UNet only)

Memory: `saved` is what autograd keeps for an eager backward pass, parameters apart; `peak` the most that a step takes beyond
what lay there before it, as torch's allocator counts: what the resident set grows by depends on what malloc kept.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import peft
import timm
import torch
import torch.nn.functional as F
from record import write
from timing import shown, turns
from torch import Tensor, nn

import fxplug
from fxplug.lowerings.regions.submodules import outline

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TARGETS = {"vit": ["attn.qkv", "attn.proj"], "unet": ["to_q", "to_k", "to_v", "to_out.0"]}
BATCH = {"vit": 4, "unet": 2} if DEVICE == "cpu" else {"vit": 64, "unet": 32}
FORMS = ["peft", "fxplug", "auto", "fused", "blas"]
EAGER = {"vit": FORMS, "unet": [*FORMS, "peft_last", "fused_last", "peft_checkpointed", "fxplug_checkpointed"]}
COMPILED = ["peft", "fxplug", "auto", "fused"]
Step = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--only", choices=list(TARGETS))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="autocast's, with float32 parameters")
    parser.add_argument("--batch", type=int)
    options = parser.parse_args()
    rows = {kind: measure(kind, options) for kind in ([options.only] if options.only else TARGETS)}
    if options.json:
        write(options.json, {"dtype": options.dtype, "rows": rows})


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"batch": options.batch or BATCH[kind]}
    for how, ways in (("eager", EAGER[kind]), ("compiled", [] if options.eager else COMPILED)):
        steps, first = {}, {}
        for way in ways:
            if way == "blas" and DEVICE != "cpu":
                continue
            steps[way] = step_of(kind, way, how == "compiled", options)
            begun = time.perf_counter()
            steps[way]()
            first[way] = time.perf_counter() - begun
        row[how] = turns(steps, options.turns, "peft") if steps else {}
        for way, found in row[how].items():
            found["first_step_seconds"] = first[way]
            found["peak"] = peak(steps[way])
            if how == "eager":
                found["saved"] = saved(steps[way])
            needs = {k: found[k] / row[how]["peft"][k] for k in ("peak", "saved") if k in found}
            found.update({f"{k}_ratio": value for k, value in needs.items()})
            more = "".join(f"  {k} x{value:.3f}" for k, value in needs.items())
            print(f"{kind}  {how:8}  {way:10}  {found['milliseconds']:8.1f} ms  {shown(found['ratio'])}{more}", flush=True)
    return row


# --- the models


def step_of(kind: str, way: str, compiled: bool, options: argparse.Namespace) -> Step:
    torch.manual_seed(0)
    batch = options.batch or BATCH[kind]
    module, last = base(kind).train(), way.endswith("_last")
    if last:
        module = module.to(memory_format=torch.channels_last)
    inputs, target = example(kind, batch)
    if last:
        inputs["sample"] = inputs["sample"].to(memory_format=torch.channels_last)
    checkpointed = way.endswith("_checkpointed")
    if way.startswith("peft"):
        if checkpointed:
            module.enable_gradient_checkpointing()
        config = peft.LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS[kind])
        module = peft.get_peft_model(module, config).to(DEVICE).train()
    else:
        module = ours(kind, module, inputs, way.partition("_")[0])
        module = outline(module, checkpoint=True) if checkpointed else module
    call = torch.compile(module, fullgraph=True) if compiled else module
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, DTYPES[options.dtype], enabled=options.dtype != "fp32"):
            out = call(**inputs)
        loss = F.cross_entropy(out, target) if kind == "vit" else F.mse_loss(out[0].float(), target)
        loss.backward()
        optimizer.step()
        return loss

    return step


def ours(kind: str, module: nn.Module, inputs: dict[str, Any], way: str) -> nn.Module:
    names = "|".join(name.replace(".", r"\.") for name in TARGETS[kind])
    made = fxplug.load_pass("lora", at=rf"re:.*\.({names})$", rank=16)
    new = fxplug.apply(fxplug.trace(module, kwargs=inputs), made)
    for key, parameter in new.named_parameters():
        parameter.requires_grad_(key.startswith("lora."))
    new = new.to(DEVICE).train()
    return new if way == "fxplug" else fxplug.fuse(new, way)


def base(kind: str) -> nn.Module:
    if kind == "vit":
        return timm.create_model("vit_small_patch16_224", num_classes=10)
    return models.MAKERS["unet"]("unet", 1)[0]


def example(kind: str, batch: int) -> tuple[dict[str, Any], Tensor]:
    if kind == "vit":
        return {"x": torch.randn(batch, 3, 224, 224, device=DEVICE)}, torch.arange(batch, device=DEVICE) % 10
    with torch.device(DEVICE):
        return models.denoised(batch, 32, 768), torch.randn(batch, 4, 32, 32)


# --- memory


def saved(step: Step) -> int:
    """Bytes that autograd keeps for one backward pass, parameters apart."""
    gc.collect()
    own = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is nn.Parameter}
    kept: dict[int, Tensor] = {}  # the tensors stay alive, so that no memory is counted twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def peak(step: Step) -> int:
    """The most bytes that a step takes beyond what lay there before it."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


if __name__ == "__main__":
    main()
