"""Which form a layer with its low-rank update takes: what was measured fastest for its shape, else a stated default.

Measurements are those of `tuning`, kept in one JSON file for each device, in the folder that FXPLUG_CACHE names, else in
`fxplug` of the user's cache folder.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ...errors import FxplugError, SpecError, did_you_mean, shown
from ...files import reading
from . import kernels, operators

FORMS = {
    "stock": "as the pass put it in",
    "fused": "one function: base and update, on a CPU the cheaper of side path and weight at each call",
    "remerge": "the update goes into the weight at each call",
    "kernel": "one Triton kernel; kernel:1 and on have other tiles",
}
KERNELS = [f"kernel:{n}" if n else "kernel" for n in range(len(kernels.TILES))]
FORMAT = 1


class Case(NamedTuple):
    """What a form's time depends on. `rows` is batch times tokens; `slots` 0 is a plain `Lora`."""

    dtype: str
    rows: int
    inner: int
    outer: int
    rank: int
    slots: int

    def __str__(self) -> str:
        return " ".join(map(str, self))


def check(how: str) -> None:
    """Raises SpecError unless `how` is a form or `auto`."""
    known = ["auto", *FORMS, *KERNELS[1:]]
    if how not in known:
        raise SpecError(f"fuse has no form {shown(how)}{did_you_mean(str(how), known)}; it has {', '.join(known)}")


def case_of(layer: nn.Linear, block: Any, rows: int) -> Case:
    """The case of a linear layer with the `Lora` behind it that sees so many rows."""
    outer, inner = layer.weight.shape
    return Case(str(layer.weight.dtype).removeprefix("torch."), rows, inner, outer, block.rank, block.slots)


def rows_of(node: fx.Node) -> int:
    """The rows that a linear layer's call had in the trace; 0 where they are not known."""
    shape = node.meta.get("shape")
    return int(math.prod(shape[:-1])) if shape else 0


def choose(device: torch.device, case: Case) -> str:
    """The form that was measured fastest for a case, else `fused`, which is made of torch's own products.

    Between the rows of two measurements stands what both found.
    """
    found = measured(device)
    if case in found:
        return found[case]
    alike = sorted((other.rows, form) for other, form in found.items() if other._replace(rows=case.rows) == case)
    below = [form for rows, form in alike if rows < case.rows][-1:]
    above = [form for rows, form in alike if rows > case.rows][:1]
    return below[0] if below and below == above else "fused"


def function(form: str, slots: bool) -> tuple[Any, tuple[Any, ...]]:
    """What stands in the graph for a layer and its `Lora` in this form, and its last arguments."""
    if form == "fused":
        return (operators.bank_linear if slots else operators.lora_linear), ()
    return (operators.kernel_bank_linear if slots else operators.kernel_lora_linear), (KERNELS.index(form),)


def available(form: str, device: torch.device) -> str:
    """`form`, or `fused` where it is a kernel that this device has none of, which is said once."""
    if form not in KERNELS or kernels.INTERPRETED or (kernels.AVAILABLE and device.type == "cuda"):
        return form
    why = "triton is not installed" if not kernels.AVAILABLE else f"Triton has no kernels for a device of type '{device.type}'"
    say(f"form '{form}' is not available: {why}; 'fused' is taken, which is made of torch's own products")
    return "fused"


@functools.cache
def say(text: str) -> None:
    """A warning that is given once."""
    warnings.warn(text, stacklevel=4)


# --- the file of measurements


def device_name(device: torch.device) -> str:
    """The name that measurements on a device are kept under; a CPU's has the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    name, info = platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        line = re.search(r"^model name\s*:\s*(.+)$", info.read_text(errors="replace"), re.MULTILINE)
        name = f"{name} {line[1].strip()}" if line else name
    return f"{name}, {torch.get_num_threads()} threads"


def cache_file(device: torch.device) -> Path:
    """Where the measurements on a device are."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = os.environ.get("FXPLUG_CACHE") or Path(base) / "fxplug"
    return Path(folder) / f"forms-{re.sub(r'[^A-Za-z0-9]+', '-', device_name(device)).strip('-').lower()}.json"


def versions() -> dict[str, str | None]:
    """The versions of what a form's time depends on."""
    found: dict[str, str | None] = {"torch": torch.__version__}
    for name in ("triton", "fxplug"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def measured(device: torch.device) -> dict[Case, str]:
    """The fastest form of each case that was measured on a device: {} without a file, and where it does not hold any more.

    A file that another version of torch, triton or fxplug wrote, or a damaged one, is ignored with one warning.
    """
    file = cache_file(device)
    try:
        stamp = file.stat().st_mtime_ns
    except OSError:
        return {}
    return {case: entry["form"] for case, entry in read(file, stamp).items()}


@functools.lru_cache(maxsize=16)
def read(file: Path, stamp: int) -> Mapping[Case, dict[str, Any]]:
    """The entries of a file: form and ratios by case; {} with a warning for one that cannot be used."""
    try:
        document = reading.read_json(file)
        if document["format"] != FORMAT or document["versions"] != versions():
            old = ", ".join(f"{k} {v}" for k, v in dict(document["versions"]).items())
            say(f"{file}: the measurements are from {old} and are ignored: run 'fxplug tune' again")
            return {}
        entries = {_case(text): entry for text, entry in document["cases"].items()}
        for entry in entries.values():
            if entry["form"] not in [*FORMS, *KERNELS]:
                raise ValueError(f"no form {entry['form']!r}")
        return entries
    except (FxplugError, ValueError, TypeError, KeyError, AttributeError) as error:
        say(f"{file} is damaged ({type(error).__name__}: {error}) and is ignored: run 'fxplug tune' again, or delete it")
        return {}


def _case(text: str) -> Case:
    dtype, *numbers = text.split(" ")
    return Case(dtype, *map(int, numbers))


def write(device: torch.device, entries: Mapping[Case, dict[str, Any]]) -> Path:
    """Add entries to the device's file, whole or not at all; what other versions wrote goes."""
    file = cache_file(device)
    with warnings.catch_warnings(action="ignore"):
        old = read(file, file.stat().st_mtime_ns) if file.is_file() else {}
    cases = {str(case): entry for case, entry in sorted({**old, **entries}.items())}
    document = {"format": FORMAT, "device": device_name(device), "versions": versions(), "cases": cases}
    new = file.with_suffix(f".{os.getpid()}.tmp")
    with reading.reported(lambda finding: SpecError(f"{file} {finding}"), "cannot be written"):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
    return file
