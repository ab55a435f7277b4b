"""How a result is kept: a dated JSON file with the command, the commit, the device and the versions it was measured with."""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "diffusers", "timm", "peft", "lycoris-lora")
# asked at the start: commits made while it measures are not what is measured
COMMIT = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def write(file: Path, results: dict[str, Any]) -> None:
    """Write results with their surroundings."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    document = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": COMMIT,
        "device": f"{device}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), **{n: version(n) for n in PACKAGES}},
        **results,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


def processor() -> str:
    """The name of the processor."""
    name, info = platform.machine(), Path("/proc/cpuinfo")
    line = re.search(r"^model name\s*:\s*(.+)$", info.read_text(errors="replace"), re.MULTILINE) if info.is_file() else None
    return f"{name} {line[1].strip()}" if line else name
