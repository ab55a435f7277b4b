"""Golden files, one seed for every test, and one form for all layers."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
from pathlib import Path

import hypothesis  # noqa: F401  (before the libraries: it collects garbage while it is imported)
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers costs each process more than it gives

import torch  # noqa: E402  (offline must be set before any library reads it)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell has started us in the background, and children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
GOLDEN = Path(__file__).parent / "golden"
gc.set_threshold(500_000, 20, 20)  # a graph is thousands of objects, and few of them die in cycles
atexit.register(gc.unfreeze)  # a library counts at the end what is left of it
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


def pytest_addoption(parser):
    parser.addoption("--golden", action="store_true", help="write the golden files anew instead of comparing")


# files with the longest tests: they begin first, or one process would wait for another at the end
LONG = ("test_tutorials.py", "test_examples.py", "test_packages.py", "test_extensions.py", "test_roofline.py",
        "test_part_modes.py", "test_kernels.py", "test_parallel_faults.py")  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True, scope="session")
def small_layers(tmp_path_factory):
    """`fuse` takes the fused form for all layers: those of tests are too small for it to be the faster one."""
    from fxplug.core.extensions import extensions

    with pytest.MonkeyPatch.context() as patch:
        # PEFT tries to build a kernel there, and waits for ever behind the lock of a process that was killed at it
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        if "lowerings" not in extensions():  # which a test takes away
            yield None
            return
        from fxplug.lowerings.linear import forms

        rule = forms.choose_form
        patch.setattr(forms, "choose_form", lambda case, device: "fused")
        yield rule


@pytest.fixture
def own_rule(small_layers, monkeypatch):
    """The rule as it is, which other processes of a test go by."""
    from fxplug.lowerings.linear import forms

    monkeypatch.setattr(forms, "choose_form", small_layers)
    return small_layers


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What is there before a file's tests stays: the garbage collector need not walk a million objects of libraries again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    """As torch.manual_seed(0), which keeps a traceback of each call for every kind of device that is not in use yet."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def modes():
    """No test leaves torch in another mode: an autocast that does not end keeps old casts of weights for every later test."""
    from fxplug.core.torch_internals.modules import get_modes, set_modes

    before = get_modes()
    yield
    after = get_modes()
    if after != before:
        set_modes(before)
        changed = {name: (before[name], value) for name, value in after.items() if value != before[name]}
        pytest.fail(f"modes of torch before and after: {changed}")


@pytest.fixture(autouse=True)
def logs():
    """No test leaves a log of fxplug's silent or loud: later tests read what is logged."""
    before = _read_logs()
    yield
    after = _read_logs()
    for name, (level, propagate, disabled, handlers) in before.items():
        log = logging.getLogger(name)
        log.setLevel(level)
        log.propagate, log.disabled, log.handlers = propagate, disabled, [*handlers]
    assert after == before, f"logs before and after: {before}, {after}"


def _read_logs():
    found = {name: logging.getLogger(name) for name in ("fxplug", "fxplug.serving", "fxplug.serving.requests")}
    return {name: (log.level, log.propagate, log.disabled, tuple(log.handlers)) for name, log in found.items()}


@pytest.fixture(autouse=True)
def compilers():
    """PEFT's BOFT sets these to gcc for a kernel, and where that cannot be built they stay so: C++ is then linked without its
    library, by every process that a later test starts."""
    before = {name: os.environ.get(name) for name in ("CC", "CXX")}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def golden(request):
    """`golden(name, text)` holds text to tests/golden/<name>.txt; `pytest --golden` writes it."""

    def check(name, text):
        file = GOLDEN / f"{name}.txt"
        if request.config.getoption("--golden"):
            GOLDEN.mkdir(exist_ok=True)
            file.write_text(text)
        assert file.is_file(), f"no golden file {file.name}: read this, then run pytest --golden\n{text}"
        assert text == file.read_text(), f"{file.name} differs: read the difference, then run pytest --golden"

    return check
