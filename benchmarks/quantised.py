"""One training step with LoRA of rank 16 on a quantised ViT-S: fxplug's graph and PEFT's modules on the same base, in one run.

python benchmarks/quantised.py [--json FILE] [--turns N] [--only BASE] [--compiled] [--batch N]

plain         float32 weights
nf4, int8     bitsandbytes: Linear4bit (QLoRA's, with nested scales), Linear8bitLt
ao_int8, ao_float8, ao_int4
              torchao, weights only: int8, float8, and 4-bit values in int8
All linear layers of timm's ViT-S/16 at 224 are quantised and get LoRA. A step is forward, backward and torch.optim.AdamW, on
the same weights and data. The two take turns, and a ratio is over PEFT's step on that base in the same turn: in time of this
process on a CPU, by CUDA's events on a GPU. `over plain` is over PEFT's step on float32 weights, by medians.

Memory: `weights` is what the linear layers hold, `saved` what autograd keeps for the backward pass, parameters apart, `peak`
the most that a step takes beyond what lay there before it. `apart` is the largest difference of the two's results before the
first step, over the largest result, and of the gradients of the adapters, over their largest.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import record
import timm
import torch
import torch.nn.functional as F
import train_step
from timing import difference, shown, turns
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

import fxplug
from fxplug.core.artifacts.tensor_records import parts_of
from fxplug.core.quantised import is_packed

TARGETS = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
PATTERN = r"re:.*\.(attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)$"
DEVICE = train_step.DEVICE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", choices=list(BASES), nargs="*")
    parser.add_argument("--compiled", action="store_true", help="torch.compile both")
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows: dict[str, Any] = {}
    for name in options.only or BASES:
        rows[name] = measure(name, options)
        print(line(name, rows[name], rows.get("plain")), flush=True)
    if options.json:
        record.PACKAGES += ("bitsandbytes", "torchao")
        record.write(options.json, {"compiled": options.compiled, "batch": options.batch, "rows": rows})


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    base = BASES[name](vit())
    x, target = torch.randn(options.batch, 3, 224, 224, device=DEVICE), torch.arange(options.batch, device=DEVICE) % 10
    row: dict[str, Any] = {"weights": weights(base)}
    theirs, ours = pair(base, x)
    row["apart"] = apart(theirs, ours, x, target)
    steps = {way: step_of(module, x, target, options.compiled) for way, module in (("peft", theirs), ("fxplug", ours))}
    row.update(turns(steps, options.turns, "peft"))
    for way, step in steps.items():
        row[way].update(peak=train_step.peak(step))
        if not options.compiled:
            row[way]["saved"] = train_step.saved(step)
    return row


def line(name: str, row: dict[str, Any], plain: dict[str, Any] | None) -> str:
    text = f"{name:10}  peft {row['peft']['milliseconds']:8.1f} ms  fxplug {shown(row['fxplug']['ratio'])}"
    if plain is not None:
        text += f"  over plain x{row['fxplug']['milliseconds'] / plain['peft']['milliseconds']:.2f}"
        text += f"  weights x{row['weights'] / plain['weights']:.3f}"
    for key in ("peak", "saved"):
        if key in row["peft"]:
            text += f"  {key} x{row['fxplug'][key] / row['peft'][key]:.3f} ({row['fxplug'][key] / 2**20:.0f} MiB)"
    return text + "  apart {:.0e}, {:.0e}".format(*row["apart"])


# --- the models


def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_small_patch16_224", num_classes=10).requires_grad_(False)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear) and path.startswith("blocks.")}


def replaced(kind: Callable[..., nn.Module], **options: Any) -> Callable[[nn.Module], nn.Module]:
    """What puts layers of bitsandbytes in the place of a model's."""

    def quantised(model: nn.Module) -> nn.Module:
        for path, layer in linears(model).items():
            made = kind(layer.in_features, layer.out_features, layer.bias is not None, **options)
            made.load_state_dict(layer.state_dict())
            owner, _, key = path.rpartition(".")
            setattr(model.get_submodule(owner), key, made)
        return model.to(DEVICE).requires_grad_(False)

    return quantised


def torchao(config: Any) -> Callable[[nn.Module], nn.Module]:
    def quantised(model: nn.Module) -> nn.Module:
        model = model.to(DEVICE)
        quantize_(model, config, filter_fn=lambda m, path: isinstance(m, nn.Linear) and path.startswith("blocks."))
        return model.requires_grad_(False)

    return quantised


BASES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model.to(DEVICE),
    "nf4": replaced(bnb.nn.Linear4bit, compute_dtype=torch.float32, quant_type="nf4"),
    "int8": replaced(bnb.nn.Linear8bitLt, has_fp16_weights=False),
    "ao_int8": torchao(Int8WeightOnlyConfig()),
    "ao_float8": torchao(Float8WeightOnlyConfig()),
    "ao_int4": torchao(IntxWeightOnlyConfig(weight_dtype=torch.int4)),
}


def pair(base: nn.Module, x: Tensor) -> tuple[nn.Module, nn.Module]:
    """PEFT's and fxplug's LoRA on one base, with the same weights, in training."""
    made = fxplug.load_pass("lora", at=PATTERN, rank=16)
    ours = fxplug.apply(fxplug.trace(copy.deepcopy(base).train(), (x,)), made).to(DEVICE).train()
    config = peft.LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that PEFT cannot merge into a layer of torchao
        theirs = peft.get_peft_model(base, config).to(DEVICE).train()
    own = dict(ours.named_parameters())
    with torch.no_grad():
        for theirs_name, name in names(theirs).items():
            given = dict(theirs.named_parameters())[theirs_name]
            own[name].copy_(given.normal_(std=0.02) if "lora_B" in theirs_name else given)
    return theirs, ours


def names(theirs: nn.Module) -> dict[str, str]:
    """The names of the adapters' parameters, PEFT's and ours."""
    found = {}
    for name, _ in theirs.named_parameters():
        if ".lora_" in name:
            path = name.removeprefix("base_model.model.").partition(".lora_")[0]
            found[name] = f"lora.{path}.Lora.{'down' if 'lora_A' in name else 'up'}.weight"
    return found


def step_of(module: nn.Module, x: Tensor, target: Tensor, compiled: bool) -> Callable[[], Tensor]:
    call = torch.compile(module, fullgraph=True) if compiled else module
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-4)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(call(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return step


# --- what they hold and give


def weights(base: nn.Module) -> int:
    """Bytes of the linear layers' weights and of what stands beside them."""
    total = 0
    for layer in linears(base).values():
        weight = layer.weight
        held = parts_of(layer, weight)[1].values() if is_packed(weight) else [weight]
        total += sum(tensor.nbytes for tensor in held)
    return total


def apart(theirs: nn.Module, ours: nn.Module, x: Tensor, target: Tensor) -> tuple[float, float]:
    """How far results and the adapters' gradients differ, over their largest."""
    outs = []
    for module in (theirs, ours):
        module.zero_grad()
        outs.append(module(x))
        F.cross_entropy(outs[-1], target).backward()
    given, own = dict(theirs.named_parameters()), dict(ours.named_parameters())
    gradients = [difference(own[name].grad, given[theirs_name].grad) for theirs_name, name in names(theirs).items()]
    return difference(outs[1].detach(), outs[0].detach()), max(gradients)


if __name__ == "__main__":
    main()
