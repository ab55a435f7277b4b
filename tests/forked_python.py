"""A Python that begins at once: its programs run in processes forked from one that has the libraries, whose imports take a new
Python six seconds. Not for tests of what a program imports.

`python()` is the path of a program that takes what `python` takes: a file, `-m module` or `-c code`, after -u and -W; for other
options it becomes the real Python. `torchrun` lies beside it. To its programs it is `sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from multiprocessing import util
from pathlib import Path

import processes
import torch

ROOT = Path(__file__).parents[1]
MORE = ("ipykernel.kernelapp", "IPython.core.magics", "peft", "transformers", "torchvision", "torch.distributed.run")
CLIENT = """#!{real} -IS
import json, os, signal, socket, sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
words = sys.argv[1:]
if os.path.basename(sys.argv[0]) == "torchrun":
    words = ["-m", "torch.distributed.run", *words]
at = 0
while at < len(words) and words[at] in ("-u", "-W"):
    at += 1 + (words[at] == "-W")
if at >= len(words) or words[at] not in ("-m", "-c") and words[at].startswith("-"):
    os.execv({real!r}, [{real!r}, *words])
given = json.dumps([words, at, dict(os.environ), os.getcwd()]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(given).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(given)
    code = int.from_bytes(server.recv(4), "big", signed=True)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def python() -> str:
    """Start the server, and give the path of the program."""
    folder = tempfile.TemporaryDirectory()  # whose path is short enough for a socket
    address, program = f"{folder.name}/socket", Path(folder.name, "python")
    server = processes.CONTEXT.Process(target=serve, args=(address, str(program)))
    server.start()
    atexit.register(folder.cleanup)
    atexit.register(server.kill)
    program.write_text(CLIENT.format(real=sys.executable, address=address))
    program.chmod(0o755)
    program.with_name("torchrun").symlink_to(program)
    while not os.path.exists(address):
        assert server.is_alive(), "the server of forked_python.py has ended"
        time.sleep(0.01)
    return str(program)


def serve(address: str, program: str) -> None:
    """Fork a process for each program that connects; who no longer waits for it kills it."""
    for name in MORE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.executable = program
    multiprocessing.set_start_method(None, force=True)  # the server itself came from a forkserver
    gc.freeze()
    parent = multiprocessing.parent_process()
    assert parent is not None
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)
        selector.register(listener, selectors.EVENT_READ, lambda: _begin(listener, selector))
        selector.register(parent.sentinel, selectors.EVENT_READ, sys.exit)
        while True:
            for key, _ in selector.select():
                if selector.get_map().get(key.fd) is key:  # one that has ended is no longer there
                    key.data()


def _begin(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    connection = listener.accept()[0]
    size, files, *_ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as stream:
        text = stream.read(int.from_bytes(size, "big"))
    if not text or len(text) < int.from_bytes(size, "big"):  # killed before it had said all
        connection.close()
        return
    given = json.loads(text)
    if (pid := os.fork()) == 0:
        for key in [*selector.get_map().values()]:
            os.close(key.fd)
        connection.close()
        os._exit(_run(files, *given))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)

    def end() -> None:
        os.kill(pid, signal.SIGKILL)  # of no effect on one that has ended
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        selector.unregister(connection), selector.unregister(ended)
        os.close(ended)
        with connection, contextlib.suppress(OSError):  # where nobody waits
            connection.sendall(code.to_bytes(4, "big", signed=True))

    for file in (connection, ended):
        selector.register(file, selectors.EVENT_READ, end)


def _run(files: list[int], words: list[str], at: int, environment: dict[str, str], folder: str) -> int:
    """Run a program in this process as Python does, and give the code that it ends with."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.default_generator.seed()  # as a new process has another each time
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if "-W" in words[:at]:
        warnings.simplefilter(words[words.index("-W") + 1])  # type: ignore[arg-type]
    code = 1
    try:
        _run_main(words[at:])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        util._exit_function()  # type: ignore[attr-defined]
    with contextlib.suppress(OSError, ValueError):  # nobody reads it, or the program has closed it
        sys.stdout.flush(), sys.stderr.flush()
    return code & 255


def _run_main(words: list[str]) -> None:
    own = [str(ROOT / name) for name in ("tests", "examples")]
    rest = [path for path in sys.path if path and not path.startswith(tuple(own))]
    first = {"-c": "", "-m": os.getcwd()}.get(words[0], str(Path(words[0]).resolve().parent))
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *rest]
    importlib.invalidate_caches()
    sys.argv = words if words[0] not in ("-m", "-c") else ["-c", *words[2:]]
    if words[0] == "-m":
        package = importlib.util.find_spec(words[1])
        main = f"{words[1]}.__main__" if package and package.submodule_search_locations else words[1]
        sys.modules.pop(main, None)  # it runs as another
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        runpy.run_path(words[0], run_name="__main__")
