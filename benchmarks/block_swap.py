"""Block swap (`train: {blocks_to_swap: N}`): is it right on this device, what does it cost there, and what would it save.

python benchmarks/block_swap.py [--json FILE]     steps of a model of 12 blocks beside the same without it
python benchmarks/block_swap.py --plan            bytes of FLUX.1's frozen weights on the device, by its configuration alone

The first says `wrong` where a result or gradient is not equal to the bit. Without CUDA it runs at a tiny size, and its times
and memory mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxplug
from fxplug.lowerings.regions.submodules import list_blocks, outline
from fxplug.lowerings.regions.swapping import BlockSwap, SwappedWeight, plan_swap

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
WIDTH, TOKENS, DEPTH, STEPS = (4096, 4096, 12, 5) if CUDA else (32, 16, 12, 2)
SWAPPED = (6, 10, 11)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def made() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(DEPTH)]).to(DTYPE)
    x = torch.randn(1, TOKENS, WIDTH, dtype=DTYPE)
    new = fxplug.apply(fxplug.trace(net, (x,)), fxplug.load_pass("lora", at="*.up", rank=16))
    for name, parameter in new.named_parameters():
        parameter.requires_grad_("lora" in name)
        if name.endswith("up.weight") and "lora" in name:
            nn.init.normal_(parameter, std=0.01)
    return new, x.to(DEVICE)


def steps(run: Any, module: Any, x: Tensor) -> tuple[list[Tensor], dict[str, float]]:
    """The result and gradients of the last of some steps, the seconds of one, and the most memory."""
    for count in range(STEPS + 1):
        if count == 1:
            _wait()
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
        module.zero_grad()
        result = run(x)
        result.float().square().mean().backward()
    _wait()
    spent = (time.perf_counter() - begun) / STEPS
    found = [result.detach().clone(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
    return found, {"seconds": spent, "bytes": torch.cuda.max_memory_allocated() if CUDA else 0}


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def measured() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    wrong = []
    for checkpoint in (False, True):
        module, x = made()
        module.to(DEVICE)
        wanted, row = steps(outline(module, list_blocks(module), checkpoint=checkpoint), module, x)
        rows[f"0{', checkpointing' * checkpoint}"] = row
        del module
        for count in SWAPPED:
            module, x = made()
            swap = plan_swap(module, count, DEVICE, checkpoint=checkpoint)
            swap.place(module)
            found, row = steps(swap.outline(module, checkpoint=checkpoint), module, x)
            how = f"{count}{', checkpointing' * checkpoint}"
            rows[how] = {**row, "weights": swap.most_bytes}
            if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
                wrong.append(f"blocks_to_swap {how}: results or gradients differ")
            if swap.most_bytes > swap.limit * max(swap.bytes_of_blocks) + 64 * 10 * DEPTH:
                wrong.append(f"blocks_to_swap {how}: more weights on the device than of {swap.limit} blocks")
            del module, swap
    return {"rows": rows, **({"wrong": wrong} if wrong else {})}


# --- what it saves


def flux() -> tuple[nn.Module, dict[str, Tensor]]:
    """FLUX.1 on the meta device, and its inputs at 1024 px."""
    import diffusers

    def half(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16).eval()
    call = {"hidden_states": half(1, 4096, 64), "encoder_hidden_states": half(1, 512, 4096), "timestep": half(1)}
    call |= {"pooled_projections": half(1, 768), "guidance": half(1), "img_ids": half(4096, 3), "txt_ids": half(512, 3)}
    return model, call


def plan() -> None:
    """Print a table: blocks that are swapped, gigabytes of weights on the device, and gigabytes that a step moves."""
    model, call = flux()
    gm = fxplug.trace(model, kwargs=call)
    units = outline(gm, list_blocks(gm))
    sizes = [sum(p.nbytes for p in units.get_submodule(path).parameters()) for path in units.meta["regions"].values()]
    whole = sum(p.nbytes for p in model.parameters())
    print(f"{len(sizes)} blocks, {whole / 1e9:.1f} GB of weights, {(whole - sum(sizes)) / 1e9:.2f} GB of them outside blocks")
    print("| blocks_to_swap | GB on the device | GB moved in a step |\n|---|---|---|")
    print(f"| 0 | {whole / 1e9:.1f} | 0 |")
    for count in (10, 20, 30, 40, 50, 55, 56):
        thousandths = [[SwappedWeight.of(torch.empty(size // 1000, dtype=torch.uint8), torch.device("cpu"))] for size in sizes]
        blocks = dict(zip(map(str, range(len(sizes))), thousandths, strict=True))
        swap = BlockSwap(blocks, len(sizes) - count, torch.device("cpu"))
        for _ in range(2):  # the first step fetches all
            moved, most = 0, 0
            for number, backward in [(n, False) for n in range(len(sizes))] + [(n, True) for n in reversed(range(len(sizes)))]:
                before = {*swap.present}
                swap.enter([number], backward=backward)
                moved += sum(sizes[n] for n in {*swap.present} - before)
                most = max(most, sum(sizes[n] for n in swap.present))
        print(f"| {count} | {(whole - sum(sizes) + most) / 1e9:.1f} | {moved / 1e9:.1f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plan", action="store_true")
    options = parser.parse_args()
    if options.plan:
        plan()
        return 0
    found = measured()
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found))
    return int("wrong" in found)


if __name__ == "__main__":
    sys.exit(main())
