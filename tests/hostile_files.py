"""What random attacks on files share: an audit hook, a clock, and values that no file should have."""

from __future__ import annotations

import encodings.cp437
import encodings.unicode_escape  # noqa: F401  (messages and zipfile ask for them, now and then for the first time)
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from fxplug.core.errors import FxplugError

SECONDS = 1.0  # of CPU time
SLACK = 100 << 10  # KiB of memory beyond the file
ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    8,
    3.5,
    1e300,
    -1e300,
    1e-320,
    float("nan"),
    float("inf"),
    10**400,
    "",
    "8",
    "x" * 5000,
    [],
    {},
    [1],
    {"a": 1},
    [[[[]]]],
    "\x1b[31m",
    "\ud800",
    "../../etc/passwd",
    2**63,
    -(2**63),
]
PATTERNS = [
    "(a+)+",
    "(a|a)*b",
    "(a|aa)+$",
    "a{100000}",
    "((((a{1,100}){1,100}){1,100}){1,100})",
    "(?=(.+)+!)",
    r"(.*)\1\1!",
    "(",
    "[",
    "*",
    ".*.*.*.*.*.*.*.*!",
    "(?i)" + "[\u0100-\uffff]" * 40,
    "\0",
    "x" * 5000,
    "^.*",
    "to_q|to_k",
    "?" * 50,
    "(?P<a>x)(?P<a>y)",
]
WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "shutil.")
RUNS = ("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.", "socket.", "ctypes.dlopen", "pickle.")
_seen: list[str] | None = None


def _hook(event, args):
    if _seen is None:
        return
    if (
        event == "open"
        and not isinstance(args[0], int)
        and (set(str(args[1] or "")) & set("wax+") or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    ):
        _seen.append(f"open {args}")
    elif event == "import" and args[0] not in sys.modules and not args[0].startswith("encodings."):
        _seen.append(f"import {args[0]}")
    elif event.startswith((*WRITES, *RUNS)) and event != "pickle.find_class":
        _seen.append(f"{event} {args}"[:200])


class Hang(BaseException):
    pass


def _stop(*_):
    raise Hang


@contextmanager
def watched():
    """A list that gets what happens inside and should not."""
    global _seen
    if not getattr(sys, "_hostile_hook", False):
        sys.addaudithook(_hook)
        sys._hostile_hook = True
    found: list[str] = []
    before = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, 8)
    _seen = found
    try:
        yield found
    finally:
        _seen = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def spent() -> tuple[float, int]:
    """CPU seconds of this process, and the most memory it has had, in KiB."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_maxrss


def attacked(call, size: int = 0):
    """Run one case: its result or None, its error of ours or None, and what is wrong with that (an empty text is nothing)."""
    start, most = spent()
    result, refused, wrong = None, None, ""
    with watched() as seen:
        try:
            result = call()
        except FxplugError as error:
            refused = error
        except Hang:
            wrong = "hangs"
        except Exception as error:
            wrong = f"raw {type(error).__name__}: {error}"[:300]
    end, now = spent()
    text = "" if refused is None else str(refused)
    if seen:
        wrong = f"does what it should not: {seen[0]}"
    elif not wrong and refused is not None and end - start > SECONDS:
        wrong = f"refused after {end - start:.1f} s: {text[:100]}"
    elif not wrong and refused is not None and now - most > SLACK + 2 * size // 1024:
        wrong = f"refused with {(now - most) >> 10} MiB: {text[:100]}"
    elif not text.isprintable() and not text.replace("\n", "").isprintable():
        wrong = f"a message with control characters: {text!r}"[:200]
    elif len(text) > 12_000:
        wrong = f"a message of {len(text)} characters"
    return result, refused, wrong


def attacks(name: str, one, cases: int, seed: int) -> list[str]:
    """Run `one(seed, folder)`, which tells the outcome and what is wrong, so many times; a line for each miss."""
    counts: Counter[str] = Counter()
    misses: list[str] = []
    with tempfile.TemporaryDirectory() as top:
        for number in range(-20, cases):  # the first ones import what is needed later
            folder = Path(top) / "case"
            folder.mkdir()
            outcome, wrong = one(str(seed + number if number >= 0 else f"first-{number}"), folder)
            shutil.rmtree(folder)
            if number < 0:
                continue
            counts[outcome] += 1
            if wrong:
                misses.append(f"{seed + number}: {wrong}")
                print(f"{name} {misses[-1]}", flush=True)
    print(f"{name}: {cases} cases, {dict(counts)}, {len(misses)} misses")
    return misses
