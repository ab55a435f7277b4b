"""Which form a layer with its low-rank update takes: what was measured fastest for its shape, or none.

Measurements are those of `measurement`, kept in one JSON file for each device, in the folder that FXPLUG_CACHE names, else in
`fxplug` of the user's cache folder.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...core import reading
from ...core.errors import FxplugError, SpecError, did_you_mean, shown
from ...core.writing import write_text
from . import operators

FORMS = {
    "stock": "as the pass put it in",
    "fused": "one function: base and update, on a CPU by oneDNN, the cheaper of side path and weight at each call",
    "blas": "the same by torch's own products",
}
EARLIER = {"remerge": "fused", "remerge:blas": "blas", "kernel": "fused"}  # names of forms that went, and what is taken
FORMAT = 4


class Case(NamedTuple):
    """What a form's time depends on. `rows` is batch times tokens; `slots` 0 is a plain `Lora`, `rank` 0 a layer without one;
    `grad` and `compiled` are 1 for calls with gradients and in compiled code.
    """

    dtype: str
    rows: int
    inner: int
    outer: int
    rank: int
    slots: int
    grad: int = 0
    compiled: int = 0

    def __str__(self) -> str:
        return " ".join(map(str, self))


def form_named(how: str) -> str:
    """The form of this name, or `auto`; for the name of an earlier one what took its place. Raises SpecError."""
    known = ["auto", *FORMS]
    if how in EARLIER:
        say(f"form '{how}' was never faster than '{EARLIER[how]}', which is used instead")
        return EARLIER[how]
    if how not in known:
        raise SpecError(f"fuse must be one of {', '.join(known)}, not {shown(how)}{did_you_mean(str(how), known)}")
    return how


def choose(found: Mapping[Case, Any], case: Case) -> str | None:
    """The form that was measured fastest for a case; between the rows of two measurements stands what both found."""
    if case in found:
        return str(found[case]["form"])
    alike = sorted((other.rows, entry["form"]) for other, entry in found.items() if other._replace(rows=case.rows) == case)
    below = [form for rows, form in alike if rows < case.rows][-1:]
    above = [form for rows, form in alike if rows > case.rows][:1]
    return below[0] if below and below == above else None


def function(form: str, slots: bool) -> tuple[Any, tuple[Any, ...]]:
    """What stands in the graph for a layer and its `Lora` in this form, and its last arguments."""
    return (operators.bank_linear if slots else operators.lora_linear), () if form == "fused" else (form,)


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
    try:
        return {"torch": torch.__version__, "fxplug": version("fxplug")}
    except PackageNotFoundError:
        return {"torch": torch.__version__, "fxplug": None}


def measured(device: torch.device) -> dict[Case, dict[str, Any]]:
    """What was measured on a device, each with the fastest `form`: {} without a file, and where it does not hold any more.

    A file that another version of torch or fxplug wrote, or a damaged one, is ignored with one warning.
    """
    file = cache_file(device)
    try:
        stamp = file.stat().st_mtime_ns
    except OSError:
        return {}
    return dict(read(file, stamp))


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
            if entry["form"] not in FORMS:
                raise ValueError(f"unknown form {entry['form']!r}")
            dict(entry["ratios"])
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
    write_text(file, json.dumps(document, indent=1) + "\n", reading.about(file, SpecError))
    return file
