"""The Triton kernels compiled for devices that are not there: python kernels_compiled.py [quick] [broken].

Each launch that the rule can make is recorded on tensors without values and compiled for its device; registers, bytes spilled
and shared memory are printed. `broken` breaks the kernels in each of `FAULTS` and fails where one is not found; with `quick` in
the first four, one for each check.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from kernels_loaded import load
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxplug.lowerings.linear import devices

CACHE = tempfile.TemporaryDirectory()  # what was compiled before proves nothing
os.environ["TRITON_CACHE_DIR"] = CACHE.name
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a block may have
PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
RANKS = (16, 64, 128)
QUICK = (89, 90, 100)  # one device of each kind of tensor cores, with the largest rank, which needs most
FAULTS = {
    "a shrink that loads each tile when it needs it": (("num_warps=4, num_stages=4", "num_warps=4, num_stages=1"), {}),
    "float32 without tensor cores": (('input_precision="tf32"', 'input_precision="ieee"'), {}),
    "a tile with more memory than there is": (("", ""), {"80": [[128, 128, 64, 8, 8]]}),
    "all of a rank at once": (("BR=16, num_warps", "BR=_block(width // slots), num_warps"), {}),
    "a tile with more registers than there are": (("", ""), {"80": [[128, 256, 64, 4, 3]]}),
    "tiles without stages": (("", ""), {"90": [[128, 128, 64, 8, 1]]}),
}


class Recorded:
    """A kernel whose launches are kept in `calls` and not made."""

    calls: list = []

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *given, **more: self.calls.append((self.kernel, given, more))


def launches(kernels, tile, rank, slots, dtype, backward):
    """What a layer launches with a tile: of its forward, or of its backward, where the weights are turned round."""
    meta = {"device": "meta", "dtype": dtype}
    x, weight, bias = torch.empty(1000, 1024, **meta), torch.empty(2048, 1024, **meta), torch.empty(2048, **meta)
    down, up = torch.empty(slots * rank, 1024, **meta), torch.empty(2048, slots * rank, **meta)
    gates = torch.empty(10, slots * rank, device="meta") if slots > 1 else torch.empty((), device="meta")
    devices.tiles_of, kernels.wrap_triton, Recorded.calls = lambda device: ([tile], 1), Recorded, []
    if backward:
        kernels.lora(torch.empty(1000, 2048, **meta), weight.t(), None, up.t(), down.t(), gates, slots, 100)
    else:
        kernels.lora(x, weight, bias, down, up, gates, slots, 100)
        kernels.merge(weight, down, up, gates) if slots == 1 else None
    return Recorded.calls


def source_of(kernel, given, more):
    """The kernel as Triton specialises it for these arguments, and its options."""
    options = {name: more[name] for name in ("num_warps", "num_stages") if name in more}
    signature, values, known = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given[i] if i < len(given) else more[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name], known[(i,)] = f"*{NAMES[value.dtype]}", [["tt.divisibility", 16]]
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], values[(i,)] = "constexpr", value
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                known[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, values, known), options


def compiled(capability, source, options):
    """Registers, bytes spilled, KiB shared, and what is wrong."""
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        said = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    ptx, wrong = made.asm["ptx"], []
    if spilled:
        wrong.append("spills")
    if made.metadata.shared > SHARED[capability] * 1024:
        wrong.append(f"needs {made.metadata.shared} bytes of shared memory")
    if PRODUCTS[capability] not in ptx and "mma.sync" not in ptx:
        wrong.append("has no tensor cores")
    if made.metadata.name != "_merge" and "cp.async" not in ptx:
        wrong.append("has no asynchronous copies")
    if made.metadata.name == "_expand" and PRODUCTS[capability] not in ptx:
        wrong.append(f"has no {PRODUCTS[capability]}")
    return registers, spilled, made.metadata.shared / 1024, wrong


def check(kernels, capabilities=tuple(SHARED), show=print, ranks=RANKS):
    """What is wrong with the launches of the rule on these devices."""
    done = set()
    for capability in capabilities:
        ways = itertools.product(devices.tiles_for(capability), ranks, (1, 4), (torch.bfloat16, torch.float32), (False, True))
        for tile, rank, slots, dtype, backward in ways:
            for kernel, given, more in launches(kernels, tile, rank, slots, dtype, backward):
                # each program of a shrink has one slot; of float32 the expansion that takes more registers is enough
                if kernel.fn.__name__ == ("_shrink" if slots > 1 else "_expand" if dtype == torch.float32 else ""):
                    continue
                source, options = source_of(kernel, given, more)
                key = capability, source.hash(), str(options)
                if key in done:
                    continue
                done.add(key)
                registers, spilled, shared, wrong = compiled(capability, source, options)
                way = "backward" if backward else "forward"
                name = f"{source.name} sm_{capability} {NAMES[dtype]} {way} rank {rank} x {slots}"
                sizes = {key: value for key, value in more.items() if key.startswith(("B", "num"))}
                show(f"{name}: {registers} registers, {spilled} spilled, {shared:.0f} KiB shared {sizes}", flush=True)
                yield from (f"{name} {sizes} {fault}" for fault in wrong)


def main(*how):
    torch.set_float32_matmul_precision("high")
    if "broken" in how:
        missed, known = [], dict(devices.TILES["capabilities"])
        for name, ((old, new), tiles) in list(FAULTS.items())[: 4 if "quick" in how else None]:
            devices.TILES["capabilities"] = {**known, **tiles}
            try:
                devices_of = tuple(map(int, tiles)) or (89,)
                fault = next(check(load(old, new), devices_of, lambda *said, **more: None, RANKS[::-1]), None)
            except Exception as error:
                fault = error
            print(f"{name}: {fault}", flush=True)
            missed += [name] if fault is None else []
        sys.exit(f"not found: {missed}" if missed else 0)
    faults = check(load(), QUICK, ranks=RANKS[-1:]) if "quick" in how else check(load())
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
