"""The sections of `gpu_trial.py`: what they find, in a file, and the processes that they run in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Trial:
    """What was found, also by earlier sections, where it is kept, and until when a section may take."""

    def __init__(self, file: Path, minutes: float, join: bool = False) -> None:
        self.begun, self.file = time.monotonic(), file
        self.until = self.begun + 60 * minutes
        self.found: dict[str, Any] = json.loads(file.read_text()) if join and file.is_file() else {}
        self.before = self.found.pop("seconds", 0.0)

    def over(self) -> bool:
        return time.monotonic() > self.until

    def say(self, *text: Any) -> None:
        print(f"[{self.before + time.monotonic() - self.begun:4.0f} s]", *text, flush=True)
        self.keep()

    def fail(self, section: str, why: str) -> None:
        self.found.setdefault("failed", {})[section] = why
        self.say(section, "failed:", why)

    def keep(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_name(f"{self.file.name}.new")  # whoever is killed meanwhile leaves the old one
        new.write_text(json.dumps({**self.found, "seconds": self.before + time.monotonic() - self.begun}, indent=1) + "\n")
        new.replace(self.file)


def start(program: str, *arguments: Any) -> subprocess.Popen[bytes]:
    """A program with these arguments, in a session of its own."""
    return subprocess.Popen([sys.executable, "-W", "ignore", program, *map(str, arguments)], start_new_session=True)


def finish(child: subprocess.Popen[bytes], until: float) -> int | None:
    """How a process ended; None if it had to be killed, with those that it started."""
    try:
        return child.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return None
