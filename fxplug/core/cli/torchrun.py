"""One command that torchrun started several times: the first process prints, and all of them exit with the same code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

GRACE = 10.0  # seconds that the others have to fail too, once one has
LONG = 7 * 24 * 3600.0  # as long as work may take


def together(call: Callable[[], None], everywhere: bool) -> None:
    """Run a command in each of the processes that torchrun started, or `everywhere` False, in the first one alone.

    Exits with the largest exit code of any. An error that the first process has too is printed by it alone.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store()
    code, text = 0, ""
    if rank == 0:
        code = _code(call)
    elif everywhere:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _code(call)
        text = err.getvalue()
    store.set(f"fxplug/exit/{rank}", str(code))
    codes = {rank: code}
    for other in range(world) if rank == 0 or everywhere else [0]:
        if other != rank:
            found = _poll(store, f"fxplug/exit/{other}", GRACE if any(codes.values()) else LONG)
            codes[other] = 1 if found is None else int(found)
    if rank and code and not codes[0]:
        print("".join(f"process {rank}: {line}\n" for line in text.splitlines()), end="", file=sys.stderr, flush=True)
    sys.stdout.flush()
    raise SystemExit(max(codes.values()))


def started() -> bool:
    """Whether torchrun started this process, and others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _code(call: Callable[[], None]) -> int:
    try:
        call()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # the whole run's: this is the end of a process
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _store() -> Any:
    """torchrun's own, which lives until the last process ends."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads, grace = not hosted and os.environ["RANK"] == "0", timedelta(seconds=GRACE)
    store = dist.TCPStore(host, port, is_master=leads, timeout=grace)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)  # type: ignore[attr-defined]


def _poll(store: Any, key: str, seconds: float) -> bytes | None:
    try:
        store.wait([key], timedelta(seconds=seconds))
        found: bytes = store.get(key)
        return found
    except Exception:  # torch's own errors: it took too long, or the store is gone with the process that had it
        return None
