"""What forward reads of process and tensors is a node, a guard or a refusal: never silently an answer of the traced call."""

from __future__ import annotations

import contextlib
import copy
import datetime
import decimal
import fractions
import functools
import json
import logging
import pprint
import statistics
import string
import struct
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from exact import difference
from torch import is_grad_enabled, nn

import fxplug
from fxplug.core.ir import ops
from fxplug.core.torch_internals import SCRIPTED, modules


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


pytestmark = pytest.mark.filterwarnings("ignore:torch.is_autocast_cpu_enabled")
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
    "fastpath": (of(lambda self, x: torch.backends.mha.get_fastpath_enabled()), "fastpath"),
    "flash_sdp_enabled": (of(lambda self, x: torch.backends.cuda.flash_sdp_enabled()), "flash"),
    "anomaly": (of(lambda self, x: torch.is_anomaly_enabled()), "anomaly"),
    "warn always": (of(lambda self, x: torch.is_warn_always_enabled()), "warnings"),
    "requires_grad of a computed tensor": (of(lambda self, x: x.requires_grad), "no_grad", "inference"),
    "requires_grad, getattr": (of(lambda self, x: getattr(x + 1, "requires_grad")), "no_grad"),  # noqa: B009
    "requires_grad after detach": (of(lambda self, x: x.detach().requires_grad), "no_grad"),
    "requires_grad of any": (of(lambda self, x: any(t.requires_grad for t in (x, x + 1))), "no_grad"),
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
    torch.manual_seed(0)
    want = model(x)
    torch.manual_seed(0)
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
    if gm is None or name == "grad mode kept and put back":  # which an artifact may not do
        return
    fxplug.save(gm, tmp_path)
    again = fxplug.load(tmp_path)
    for state in ("plain", *others):
        with STATES[state]():
            assert held(model, again, x) == (outcome(gm, x) is not None)


COMPILED = ["is_grad_enabled", "is_autocast_enabled of a device", "default dtype", "requires_grad of a weight"]


@pytest.mark.parametrize("name", COMPILED)
def test_a_guard_on_state_is_compiled(name: str) -> None:
    function, other, *_ = READS[name]
    model, x = Model(function).eval(), image()
    compiled = torch.compile(traced(model, x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    with STATES[other]():
        want = model(x)
        try:
            got = compiled(x)
        except Exception:
            return  # the program is an error here, as the graph is
    assert torch.equal(got, want)


def test_a_guard_on_state_is_exported(tmp_path: Path) -> None:
    gm = traced(Model(READS["is_grad_enabled"][0]), image())
    fxplug.export(gm, tmp_path / "model.pt2", image())
    with torch.no_grad(), pytest.raises(fxplug.FxplugError):
        fxplug.export(gm, tmp_path / "other.pt2", image())


# --- what a call's tensors are


def transposed() -> torch.Tensor:
    return image().transpose(2, 3)


def cut() -> torch.Tensor:
    return torch.cat([image(), image()], 3)[..., 4:]


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": image,
    "channels_last": lambda: image().to(memory_format=torch.channels_last),
    "transposed": transposed,
    "cut": cut,
    "expanded": lambda: image()[:, :1].expand(2, 3, 4, 4),
    "requires_grad": lambda: image().requires_grad_(),
    "computed": lambda: image().requires_grad_() * 1,
    "in inference mode": lambda: _inferred(),
    "conjugated": lambda: image().to(torch.complex64).conj().imag,
}
ASKED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "is_contiguous": of(lambda self, x: x.is_contiguous()),
    "is_contiguous after an operation": of(lambda self, x: (x + 1).is_contiguous()),
    "is_contiguous of a part": of(lambda self, x: x[:, 0].is_contiguous()),
    "is_contiguous in channels_last": of(lambda self, x: x.is_contiguous(memory_format=torch.channels_last)),
    "not contiguous, so it is made": lambda self, x: _laid_out(x),
    "stride of a dimension": of(lambda self, x: x.stride(-1) == 1),
    "stride": of(lambda self, x: x.stride() == (48, 16, 4, 1)),
    "stride as numbers": lambda self, x: x + x.stride(0) * x.stride()[1],
    "stride as a result": lambda self, x: (x, x.stride()),
    "as_strided": lambda self, x: x.as_strided((2, 2), (x.stride(0), x.stride(-1)), x.storage_offset()),
    "storage_offset": of(lambda self, x: x.storage_offset() == 0),
    "is_conj, is_neg": of(lambda self, x: x.is_conj() or x.is_neg()),
    "is_shared": of(lambda self, x: x.is_shared()),
    "is_pinned": of(lambda self, x: x.is_pinned()),
    "is_inference": of(lambda self, x: x.is_inference()),
    "requires_grad": of(lambda self, x: x.requires_grad),
    "requires_grad, is True": of(lambda self, x: x.requires_grad is True),
    "is_leaf": of(lambda self, x: x.is_leaf),
    "grad": of(lambda self, x: x.grad is None),
    "version": of(lambda self, x: x._version == 0),
    "base": of(lambda self, x: x._base is None),
    "data_ptr": of(lambda self, x: x.data_ptr() % 128 == 0),
    "view or reshape": lambda self, x: x.view(2, -1) if x.is_contiguous() else x.reshape(2, -1) * 2,
}


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return image()


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    return x * 2


@pytest.mark.parametrize("name", ASKED)
def test_a_question_to_a_tensor_holds_for_every_tensor(name: str) -> None:
    model = Raw(ASKED[name]).eval()
    for before in ("plain", "channels_last", "requires_grad"):
        gm = traced(model, INPUTS[before]())
        for kind, make in INPUTS.items() if gm is not None else ():
            taken = held(model, gm, make(), always=kind == before)
            assert taken or name != "not contiguous, so it is made"


def test_the_user_freezes_a_weight() -> None:
    model = Raw(lambda self, x: self.fc(x) * 2 if self.fc.weight.requires_grad else self.fc(x))
    gm = fxplug.trace(model, image())
    model.fc.weight.requires_grad_(False)
    with pytest.raises(fxplug.GuardError, match=r"fc.*requires_grad, which was True when traced"):
        gm(image())


# --- sizes that become text, keys, or arguments of what takes Python's own numbers only


def _caught(x: torch.Tensor) -> str:
    try:
        raise KeyError(f"{x.shape[-1] * 3}")
    except KeyError as error:
        return str(error)


def _matched(n: int) -> int:
    match n:
        case 4:
            return 2
        case int():
            return 3
    return 5


def info(text: str) -> str:
    return text


class Talk:
    said: str = ""

    def info(self, text: str) -> None:
        self.said = text


def _said(x: torch.Tensor) -> int:
    talk = Talk()
    talk.info(f"{x.shape[-1] * 3}")
    return len(talk.said)


@functools.singledispatch
def _kind(n: object) -> int:
    return 1


@_kind.register
def _(n: int) -> int:
    return 2


SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "Decimal": lambda x: float(decimal.Decimal(x.shape[-1]) / 3),
    "Decimal in a helper": lambda x: (lambda n: float(decimal.Decimal(n)))(x.shape[-1]),
    "Fraction": lambda x: float(fractions.Fraction(x.shape[-1], 3)),
    "mean": lambda x: float(statistics.mean(x.shape)),
    "median": lambda x: float(statistics.median(x.shape)),
    "stdev": lambda x: statistics.stdev(x.shape),
    "json of a shape": lambda x: len(json.dumps(x.shape)),
    "json of a dict": lambda x: len(json.dumps({"sizes": list(x.shape), "n": x.shape[-1] * 25})),
    "json, indented": lambda x: len(json.dumps([x.shape[-1] * 3], indent=2)),
    "json key": lambda x: len(json.dumps({x.shape[-1] * 3: 1})),
    "struct": lambda x: struct.pack("i", x.shape[-1])[0],
    "bytes": lambda x: len(bytes(x.shape[-1])),
    "pprint": lambda x: len(pprint.pformat(x.shape[-1] * 3)),
    "Template": lambda x: len(string.Template("$n").substitute(n=x.shape[-1] * 3)),
    "Formatter": lambda x: len(string.Formatter().format("{}", x.shape[-1] * 3)),
    "dedent": lambda x: len(textwrap.dedent(str(x.shape[-1] * 3))),
    "join": lambda x: len("x".join(map(str, (x.shape[-1] * 3, 1)))),
    "list of text": lambda x: len(str([x.shape[-1] * 3])),
    "text in a call of its own": lambda x: len(info(f"{x.shape[-1] * 3}")),
    "text kept by what only looks like a log": _said,
    "text of an error that is caught": lambda x: len(_caught(x)),
    "timedelta": lambda x: datetime.timedelta(seconds=x.shape[-1]).seconds,
    "type is int": lambda x: 2 if type(x.shape[-1]) is int else 3,
    "type in": lambda x: 2 if type(x.shape[-1] / 2) in (int, bool) else 3,
    "type of a type": lambda x: 2 if isinstance(type(x), type) and type(type(x)) is not None else 3,
    "is True": lambda x: 2 if (x.shape[-1] > 3) is True else 3,
    "is False": lambda x: 2 if (x.shape[-1] == 4) is not False else 3,
    "match": lambda x: _matched(x.shape[-1]),
    "singledispatch": lambda x: _kind(x.shape[-1]),
    "bisect": lambda x: np.searchsorted([1, 4, 9], x.shape[-1]).item(),
    "hash of a tuple": lambda x: hash((x.shape[-1], 1)) % 7,
    "isclose": lambda x: 2 if np.isclose(x.shape[-1], 4) else 3,
    "and a flag": lambda x: 2 if x.shape[-1] > 4 and x.requires_grad else 3,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_leaves_for_python_is_held(name: str) -> None:
    model = Raw(lambda self, x: x * SIZES[name](x))
    gm = fxplug.trace(model, image())
    for width in (4, 1, 3, 5, 40):
        held(model, gm, torch.ones(2, 3, 4, width), always=width == 4)


def test_text_for_people_holds_nothing() -> None:
    log = logging.getLogger("reads")

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        log.info(f"{x.shape}")
        logging.getLogger("reads").debug("%s", f"{x.shape[0]}")
        torch._assert(True, f"{x.shape}")
        if x.dim() == 9:
            raise ValueError(f"{x.shape}")
        return x * 2

    gm = fxplug.trace(Raw(forward), image())
    assert not gm.graph.find_nodes(op="call_function", target=ops.guard)


# --- what no graph can say


def _forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + torch.rand(4)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    x.data = x * 2
    return x


def _hooked(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda g: g * 2)
    return y


def _kept_grad(y: torch.Tensor) -> torch.Tensor:
    y.retain_grad()
    return y


def _backward(y: torch.Tensor) -> torch.Tensor:
    y.sum().backward(retain_graph=True)
    return y


CANNOT: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "manual_seed": lambda self, x: (torch.manual_seed(0), x + torch.rand(4))[1],
    "seed": lambda self, x: x * torch.seed(),
    "fork_rng": lambda self, x: _forked(x),
    "get_rng_state": lambda self, x: x * torch.get_rng_state()[0],
    "set_rng_state": lambda self, x: (torch.set_rng_state(torch.get_rng_state()), x)[1],
    "a generator of its own": lambda self, x: x + torch.rand(4, generator=torch.Generator().manual_seed(0)),
    "vmap": lambda self, x: torch.vmap(self.fc)(x),
    "func.grad": lambda self, x: torch.func.grad(lambda t: self.fc(t).sum())(x),
    "cond": lambda self, x: torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t * 3, (x,)),
    "data": lambda self, x: _scaled(x),
    "grad_fn": lambda self, x: x * (2 if self.fc(x).grad_fn is None else 3),
    "register_hook": lambda self, x: _hooked(self.fc(x)),
    "retain_grad": lambda self, x: _kept_grad(self.fc(x)),
    "backward": lambda self, x: _backward(self.fc(x)),
    "numpy": lambda self, x: x * float(self.fc(x).mean().detach().numpy()),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_no_graph_can_say_is_refused_with_the_line(name: str) -> None:
    with pytest.raises(fxplug.TraceError, match=r"test_reads\.py:\d+") as caught:
        fxplug.trace(Raw(CANNOT[name]), image())
    assert "branches on" not in str(caught.value)
    assert "type" not in globals()


def test_what_is_not_the_models_own_question_is_no_matter() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        y = torch.utils.checkpoint.checkpoint(self.fc, x, use_reentrant=False)
        logging.getLogger("reads").warning("torch and the log read clocks, random states and modes")
        seen = {id(x): 1}
        return F.multi_head_attention_forward(
            y[:, 0], y[:, 0], y[:, 0], 4, 1, torch.ones(12, 4), None, None, None, False, 0.0, self.fc.weight, None
        )[0] * seen[id(x)]

    model = Raw(forward).eval()
    gm = fxplug.trace(model, image())
    for state in ("plain", "no_grad"):
        with STATES[state]():
            assert held(model, gm, image(), always=True)
    assert not gm.graph.find_nodes(op="call_function", target=ops.check_state)


def test_a_graph_that_is_the_same_with_gradients_and_without_holds_for_both() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(self.fc, x, use_reentrant=False)
        return self.fc(x)

    model = Raw(forward)
    gm = fxplug.trace(model, image())
    for state in ("plain", "no_grad", "inference"):
        with STATES[state]():
            assert held(model, gm, image(), always=True)


# --- what a graph can say


def _packed(self: Any, x: torch.Tensor) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(x[0], torch.tensor([4, 3, 2]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)


def _force(self: Any, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(self.fc(x).pow(2).sum(), x)[0]


SAID: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "randn_like": lambda self, x: x + torch.randn_like(x) + torch.rand_like(x) + torch.randint_like(x, 5),
    "is_causal": lambda self, x: F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[1] > 1),
    "packed": _packed,
    "ParameterList": lambda self, x: x + sum(p * i for i, p in enumerate(self.list)) + self.list[-1] * len(self.list),
    "ParameterDict": lambda self, x: x + sum(self.dict.values()) + self.dict["a"],
    "Size": lambda self, x: (x, x.shape, {"size": x.shape[1:]}),
    "autograd.grad": _force,
    "autograd.grad of a weight": lambda self, x: torch.autograd.grad(self.fc(x).pow(2).sum(), self.fc.weight)[0],
    "requires_grad_": lambda self, x: self.fc(x.clone().requires_grad_()),
    "functional_call": lambda self, x: torch.func.functional_call(self.fc, {"weight": self.fc.weight * 2}, (x,)),
    "functional_call with zeros": lambda self, x: torch.func.functional_call(self.fc, {"bias": torch.zeros(4)}, (x,)),
    "a seeded generator of numpy": lambda self, x: x * np.random.default_rng(0).random(),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_graph_can_say_is_exact_and_saved(name: str, tmp_path: Path) -> None:
    model = Raw(SAID[name]).eval()
    model.rnn = nn.LSTM(4, 4, batch_first=True)
    model.list = nn.ParameterList([nn.Parameter(torch.full((4,), float(i))) for i in range(3)])
    model.dict = nn.ParameterDict({"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(4))})
    gm = fxplug.trace(model, image())
    fxplug.save(gm, tmp_path)
    for each in (gm, copy.copy(gm), copy.deepcopy(gm), fxplug.load(tmp_path)):
        assert held(model, each, image(), always=True)
        held(model, each, image()[:1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_module_is_a_leaf() -> None:
    model = Raw(lambda self, x: self.script(self.fc(x)) + 1)
    model.script = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    gm = fxplug.trace(model, image())
    assert held(model, gm, image()[:1], always=True) and list(gm.state_dict()) == list(model.state_dict())
    assert type(model.script[0].weight) is nn.Parameter
    with pytest.raises(fxplug.TraceError, match="'script' is a torch.jit module"):
        fxplug.trace(model, image(), real=False)


def test_a_shallow_copy_has_its_own_mode() -> None:
    model = Raw(lambda self, x: F.dropout(self.fc(x), training=self.training)).eval()
    gm = fxplug.trace(model, image())
    other = copy.copy(gm)
    other.train()
    assert other.fc is gm.fc and not gm.training
    assert torch.equal(gm(image()), model(image()))
    model.train()
    assert held(model, other, image(), always=True)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_modes_are_given_back_on_every_error(kind: type[BaseException]) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.float16, cache_enabled=False), torch.no_grad():
            return self.fc(x)

    def fail(*_: Any) -> Any:
        raise kind

    gm = fxplug.trace(Raw(forward), image())
    gm.fc.forward = fail
    with torch.autocast("cpu", torch.bfloat16):
        before = modules.get_modes()
        with pytest.raises(kind):
            gm(image())
        assert modules.get_modes() == before


@pytest.mark.filterwarnings("ignore::UserWarning")  # there is no such device here
@pytest.mark.parametrize("device", [device for device in modules.CASTING if device != "privateuseone"])
def test_autocast_is_given_back_for_every_device_after_an_error(device: str) -> None:
    dtype = torch.bfloat16 if torch.get_autocast_dtype(device) is torch.float16 else torch.float16

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    state = graph.call_function(ops.enter_autocast, (device, dtype, True, False))
    y = graph.call_module("fc", (x,))
    graph.call_function(ops.exit_autocast, (state,))
    graph.output(y)
    gm = fxplug.trace(Raw(lambda self, x: self.fc(x)), image())
    gm.graph = graph
    gm.recompile()
    gm.fc.forward = fail
    before = modules.get_modes(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with pytest.raises(KeyboardInterrupt):
        gm(image())
    assert (modules.get_modes(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) == before


def test_torch_has_autocast_for_some_devices_and_not_for_all() -> None:
    assert {"cpu", "cuda", "xpu", "mps"} <= {*modules.CASTING} and "meta" not in modules.CASTING


TYPED = """
import torch
from torch import nn

class Typed(nn.Module):
    def forward(self, x):
        {}
"""


def typed(body, file):
    """A model whose code has no file, nor one of them a module that it names."""
    space = {} if file == "<text>" else {"__name__": "__main__"}
    exec(compile(TYPED.format(body.replace("\n", "\n        ")), file, "exec"), space)
    return space["Typed"]()


@pytest.mark.parametrize("file", ["<stdin>", "<text>", "<string>", "<ipython-input-3-5c8>"])
@pytest.mark.parametrize(
    "body, x",
    [
        ("return x.sin() if x.is_contiguous() else x.cos()", torch.ones(4, 3).T),
        ("return x.sin() if x.shape[0] == 3 else x.cos()", torch.ones(2, 4)),
        ("return x.sin() if torch.ops.aten.is_non_overlapping_and_dense(x) else x.cos()", torch.ones(3, 8)[:, ::2]),
    ],
)
def test_what_code_without_a_file_decides_is_held(body, x, file):
    gm = fxplug.trace(typed(body, file), torch.ones(3, 4))
    assert torch.equal(gm(torch.ones(3, 4)), torch.ones(3, 4).sin())
    with pytest.raises(fxplug.GuardError, match=f"{file}:7"):
        gm(x)


def test_a_value_that_code_without_a_file_may_not_branch_on():
    with pytest.raises(fxplug.TraceError, match="branches on a value that it computes"):
        fxplug.trace(typed("return x.sin() if x.sum() > 0 else x.cos()", "<stdin>"), torch.ones(3, 4))


def test_an_operation_that_is_tried_is_tried_by_the_graph():
    gm = fxplug.trace(Raw(lambda self, x: _tried(x)), image())
    assert torch.equal(gm(image()), _tried(image()))
    with pytest.raises(fxplug.GuardError, match="an operation of the graph fails, which the model may catch in a `try`: "
                                                ".RuntimeError: view size"):
        gm(transposed())
    with pytest.raises(fxplug.TraceError, match="an operation fails here and the code catches that"):
        fxplug.trace(Raw(lambda self, x: _tried(x)), transposed(), real=True)


def _tried(x: torch.Tensor) -> torch.Tensor:
    try:
        return x.view(-1)
    except RuntimeError:
        return x.reshape(-1) * 2


def test_code_without_a_file_may_have_with_and_finally():
    model = typed("with torch.no_grad():\n    y = x * 2\ntry:\n    y = y + 1\nfinally:\n    z = 1\nreturn y * z", "<stdin>")
    assert torch.equal(fxplug.trace(model, torch.ones(3, 4))(torch.ones(2, 2)), torch.full((2, 2), 3.0))


def _share(x: torch.Tensor) -> torch.Tensor:
    y = x / x.size(0)
    if x.size(1) > 3:
        y = y * 2
    return y.flatten(1).softmax(1).view(x.size(0), -1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("made", [torch.jit.script, torch.compile])
def test_a_function_for_a_compiler_is_recorded_as_its_python_code(made, tmp_path):
    model = Raw(lambda self, x: self.share(x))
    model.share = made(_share)
    gm = fxplug.trace(model, image(), real=False)
    fxplug.save(gm, tmp_path)
    for x in (image(), image()[:1], image().repeat(3, 1, 2, 1)):
        assert torch.equal(fxplug.load(tmp_path)(x), _share(x))
    with pytest.raises(fxplug.GuardError, match=r"size\(1\) > 3, which was False"):
        gm(image().repeat(1, 2, 1, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore:.*traced on its real tensors")
def test_sizes_that_code_without_python_reads_are_held(tmp_path):
    model = Raw(lambda self, x: self.share(x))
    model.share = torch.jit.script(_share)
    setattr(model.share, SCRIPTED, None)
    gm = fxplug.trace(model, image())
    assert torch.equal(gm(image() * 2), _share(image() * 2))
    for x in (image()[:1], image().repeat(1, 2, 1, 1)):
        with pytest.raises(fxplug.GuardError, match="when traced; now it is"):
            gm(x)


@pytest.mark.filterwarnings("ignore:.*traced on its real tensors")
def test_a_branch_on_weights_alone_is_held():
    model = Raw(lambda self, x: x * 2 if self.fc.weight.sum() > 0 else x)
    nn.init.ones_(model.fc.weight)
    gm = fxplug.trace(model, image())
    assert torch.equal(gm(image()[:1]), image()[:1] * 2)
    nn.init.constant_(model.fc.weight, -1.0)
    with pytest.raises(fxplug.GuardError, match="which was True when traced; now it is False"):
        gm(image())
