"""What forward reads of process and tensors is a node, a guard or a refusal: never silently an answer of the traced call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import difference
from torch import is_grad_enabled, nn

import fxplug


class Model(nn.Module):
    """A model whose forward is one function of it and an image."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(4, 4)
        self.on, self.off, self.none = True, False, None
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.fc(x))


class Raw(Model):
    """The same, where the function gets the input itself."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def image() -> torch.Tensor:
    return torch.arange(96, dtype=torch.float32).reshape(2, 3, 4, 4) / 50


# --- states that a call can be in, and the trace before it


@contextlib.contextmanager
def flag(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def setting(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


PLAIN: Callable[[], Any] = contextlib.nullcontext
STATES: dict[str, Callable[[], Any]] = {
    "plain": PLAIN,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast for another device": lambda: torch.autocast("cuda", torch.bfloat16),
    "float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "precision": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "benchmark": lambda: flag(torch.backends.cudnn, "benchmark", True),
    "tf32": lambda: flag(torch.backends.cuda.matmul, "allow_tf32", True),
    "fastpath": lambda: setting(torch.backends.mha.set_fastpath_enabled, False, True),
    "flash": lambda: setting(torch.backends.cuda.enable_flash_sdp, False, True),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "device": lambda: torch.device("meta"),
    "warnings": lambda: setting(torch.set_warn_always, True, False),
}


def of(question: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], Any]:
    """A function that goes one way or another by an answer."""
    return lambda self, x: x * 2 if question(self, x) else x + 1


READS: dict[str, tuple[Any, ...]] = {
    "is_grad_enabled": (of(lambda self, x: torch.is_grad_enabled()), "no_grad", "inference"),
    "is_grad_enabled by name": (of(lambda self, x: is_grad_enabled()), "no_grad", "inference"),
    "is_grad_enabled, is True": (of(lambda self, x: torch.is_grad_enabled() is True), "no_grad"),
    "is_grad_enabled of torch._C": (of(lambda self, x: torch._C.is_grad_enabled()), "no_grad"),
    "is_grad_enabled and more": (of(lambda self, x: torch.is_grad_enabled() and self.on), "no_grad"),
    "is_grad_enabled and nothing": (of(lambda self, x: torch.is_grad_enabled() and self.off), "no_grad"),
    "is_grad_enabled or more": (of(lambda self, x: torch.is_grad_enabled() or self.off), "no_grad"),
    "is_grad_enabled as a number": (lambda self, x: x * torch.is_grad_enabled(), "no_grad"),
    "is_grad_enabled as a result": (lambda self, x: (x, torch.is_grad_enabled()), "no_grad"),
    "is_grad_enabled in a helper": (of(lambda self, x: _grad_is_on()), "no_grad"),
    "its own no_grad": (lambda self, x: _in_no_grad(x), "no_grad", "inference"),
    "its own inference_mode": (lambda self, x: _in_inference(x), "no_grad", "inference"),
    "grad mode kept and put back": (lambda self, x: _kept(x), "no_grad"),
    "is_inference_mode_enabled": (of(lambda self, x: torch.is_inference_mode_enabled()), "inference"),
    "is_inference": (of(lambda self, x: x.is_inference()), "inference"),
    "torch.is_inference": (of(lambda self, x: torch.is_inference(x)), "inference"),
    "is_autocast_enabled": (of(lambda self, x: torch.is_autocast_enabled()), "autocast"),
    "is_autocast_enabled of a device": (of(lambda self, x: torch.is_autocast_enabled("cpu")), "autocast"),
    "is_autocast_enabled of its device": (of(lambda self, x: torch.is_autocast_enabled(x.device.type)), "autocast"),
    "is_autocast_cpu_enabled": (of(lambda self, x: torch.is_autocast_cpu_enabled()), "autocast"),
    "autocast dtype": (lambda self, x: x.to(torch.get_autocast_dtype("cpu")), "autocast", "autocast float16"),
    "autocast dtype by keyword": (lambda self, x: x.to(torch.get_autocast_dtype(device_type="cpu")), "autocast float16"),
    "its own autocast": (lambda self, x: _in_autocast(x), "autocast"),
    "default dtype": (lambda self, x: x.to(torch.get_default_dtype()), "float64"),
    "default device": (of(lambda self, x: torch.get_default_device().type == "meta"), "device"),
    "deterministic": (of(lambda self, x: torch.are_deterministic_algorithms_enabled()), "deterministic"),
    "deterministic debug mode": (of(lambda self, x: torch.get_deterministic_debug_mode()), "deterministic"),
    "matmul precision": (of(lambda self, x: torch.get_float32_matmul_precision() == "highest"), "precision"),
    "cudnn.benchmark": (of(lambda self, x: torch.backends.cudnn.benchmark), "benchmark"),
    "allow_tf32": (of(lambda self, x: torch.backends.cuda.matmul.allow_tf32), "tf32"),
    "fastpath": (of(lambda self, x: torch.backends.mha.get_fastpath_enabled()), "fastpath"),
    "flash_sdp_enabled": (of(lambda self, x: torch.backends.cuda.flash_sdp_enabled()), "flash"),
    "anomaly": (of(lambda self, x: torch.is_anomaly_enabled()), "anomaly"),
    "warn always": (of(lambda self, x: torch.is_warn_always_enabled()), "warnings"),
    "requires_grad of a computed tensor": (of(lambda self, x: x.requires_grad), "no_grad", "inference"),
    "requires_grad, getattr": (of(lambda self, x: getattr(x + 1, "requires_grad")), "no_grad"),  # noqa: B009
    "requires_grad after detach": (of(lambda self, x: x.detach().requires_grad), "no_grad"),
    "requires_grad of any": (of(lambda self, x: any(t.requires_grad for t in (x, x + 1))), "no_grad"),
    "grad_fn": (of(lambda self, x: x.grad_fn is not None), "no_grad", "inference"),
    "grad_fn as a truth": (of(lambda self, x: x.grad_fn), "no_grad"),
    "is_leaf": (of(lambda self, x: x.is_leaf), "no_grad", "inference"),
    "requires_grad of a weight": (of(lambda self, x: self.fc.weight.requires_grad), "no_grad"),
    "requires_grad of all": (of(lambda self, x: all(p.requires_grad for p in self.parameters())), "no_grad"),
}


def _grad_is_on() -> bool:
    return torch.is_grad_enabled()


def _in_no_grad(x: torch.Tensor) -> Any:
    with torch.no_grad():
        x = x * 2 if torch.is_grad_enabled() else x * 3
    return x + 1


def _in_inference(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        y = x * 2 if torch.is_inference_mode_enabled() else x * 3
        with torch.inference_mode(False):
            y = y + 1 if torch.is_inference_mode_enabled() else y + 2
        return y * 2 if torch.is_grad_enabled() else y * 3


def _in_autocast(x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x * (2 if torch.is_autocast_enabled("cpu") else 3)
    with torch.autocast("cpu", enabled=False):
        return y.float() * (5 if torch.is_autocast_enabled("cpu") else 7)


def _kept(x: torch.Tensor) -> Any:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(before)
    return x + y


def outcome(model: nn.Module, x: torch.Tensor) -> Any:
    try:
        with torch.random.fork_rng(devices=[]):
            return model(x)
    except fxplug.GuardError as error:
        assert "test_reads.py:" in str(error) and "when traced" in str(error), error
        return None


def traced(model: nn.Module, x: torch.Tensor) -> Any:
    """The graph, or None where tracing refuses and says where."""
    try:
        return fxplug.trace(model, x)
    except fxplug.TraceError as error:
        assert "test_reads.py:" in str(error), error
        return None


def held(model: nn.Module, gm: Any, x: torch.Tensor, always: bool = False) -> bool:
    """Whether the graph takes this call; what it gives must be what the model gives."""
    want = model(x)
    got = outcome(gm, x)
    assert got is not None or not always
    assert got is None or difference(want, got) is None, difference(want, got)
    return got is not None


@pytest.mark.parametrize("name", READS)
def test_a_read_of_state_holds_in_every_state(name: str) -> None:
    function, *others = READS[name]
    model, x = Model(function).eval(), image()
    for before in ("plain", *others):
        with STATES[before]():
            gm = None if before == "device" else traced(model, x)
        for state in ("plain", *others) if gm is not None else ():
            with STATES[state]():
                held(model, gm, x, always=state == before)


@pytest.mark.parametrize("name", READS)
def test_a_guard_on_state_is_saved(name: str, tmp_path: Path) -> None:
    function, *others = READS[name]
    model, x = Model(function).eval(), image()
    gm = traced(model, x)
    if gm is None:
        return
    fxplug.save(gm, tmp_path)
    again = fxplug.load(tmp_path)
    for state in ("plain", *others):
        with STATES[state]():
            assert held(model, again, x) == (outcome(gm, x) is not None)
