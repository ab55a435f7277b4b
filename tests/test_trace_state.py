"""State that forward reads and writes: the graph has it, call after call, or the trace says where it is written."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import random
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core.capture.isolation import freeze_value, get_random_state, has_equal_contents, is_alike
from fxplug.core.ir.comparison import describe_difference
from fxplug.core.torch_internals.modules import get_modes


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Holding(nn.Module):
    """One of each thing that a model can keep, and a forward that is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.count, self.last, self.flag = 0, None, False
        self.items: list[Any] = []
        self.table: dict[Any, Any] = {}
        self.plain = torch.zeros(4)
        self.array = np.zeros(4, dtype=np.float32)
        self.space = types.SimpleNamespace(count=0)
        self.slotted = Slotted()
        self.generator = torch.Generator().manual_seed(0)
        self.random = random.Random(0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def X(*shape: int) -> torch.Tensor:  # noqa: N802
    shape = shape or (3, 4)
    return torch.arange(1.0, 1.0 + math.prod(shape)).reshape(shape) / math.prod(shape)


# --- what is recorded


def ema(m: Any, x: Any) -> Any:
    m.ema = m.ema * 0.9 + x.mean(0) * 0.1
    return m.drop(m.fc(x)) + m.ema


def the_old_value_too(m: Any, x: Any) -> Any:
    old = m.ema
    m.ema = old + x.mean(0)
    return x + old, old, m.ema


def assigned_twice(m: Any, x: Any) -> Any:
    m.ema = m.ema + 1
    m.ema = m.ema * 2
    return x * m.ema


def written_then_assigned(m: Any, x: Any) -> Any:
    m.ema.add_(1)
    m.ema = m.ema * x.mean(0)
    return x + m.ema


def registered(m: Any, x: Any) -> Any:
    m.register_buffer("ema", m.ema + x.sum(0))
    return m.fc(x)


def in_the_table(m: Any, x: Any) -> Any:
    m._buffers["ema"] = m.ema + 1
    return x + m.ema


def swapped(m: Any, x: Any) -> Any:
    m.ema, m.var = m.var * 2, m.ema + 1
    return x + m.ema


def in_training_only(m: Any, x: Any) -> Any:
    if m.training:
        m.ema = m.ema + x.mean(0)
    return x + m.ema


def in_place(m: Any, x: Any) -> Any:
    m.ema.mul_(0.5).add_(x.mean(0))
    m.ema[:2] += 1
    return x + m.ema


def view_of_a_buffer(m: Any, x: Any) -> Any:
    m.ema.view(2, 2)[:, 0].fill_(float(x.shape[0]))
    return x + m.ema


def plain_tensor(m: Any, x: Any) -> Any:
    m.plain.add_(1)
    return x + m.plain


def unused_statistics(m: Any, x: Any) -> Any:
    F.batch_norm(x, m.ema, m.var, training=m.training)
    F.instance_norm(x.T.reshape(1, 4, -1), m.ema, m.var)
    return m.fc(x)


def input_in_place(m: Any, x: Any) -> Any:
    x[:, 0] = 0
    x.t()[1].mul_(2)
    return m.fc(x)


# --- what makes no difference


def kept_output(m: Any, x: Any) -> Any:
    m.last = m.fc(x)
    m.table["last"] = [m.last]
    return m.last * 2


def lazy_table(m: Any, x: Any) -> Any:
    if x.shape[1] not in m.table:
        m.table[x.shape[1]] = torch.arange(float(x.shape[1]))
    return x + m.table[x.shape[1]]


def lazy_buffer(m: Any, x: Any) -> Any:
    if not hasattr(m, "lazy"):
        m.register_buffer("lazy", torch.ones(4), persistent=False)
    return x + m.lazy


def a_size_noted(m: Any, x: Any) -> Any:
    m.count = int(x.shape[1])
    return x * m.count


def hook_installed(m: Any, x: Any) -> Any:
    if not m.flag:
        m.fc.register_forward_hook(lambda module, args, out: out * 2)
        m.flag = True
    return m.fc(x)


def forward_replaced(m: Any, x: Any) -> Any:
    if not m.flag:
        old = m.fc.forward
        m.fc.forward = lambda value: old(value) + 1
        m.flag = True
    return m.fc(x)


RECORDED = [
    ema, the_old_value_too, assigned_twice, written_then_assigned, registered, in_the_table, swapped, in_training_only,
    in_place, view_of_a_buffer, plain_tensor, unused_statistics, input_in_place, kept_output, lazy_table,
    lazy_buffer, a_size_noted, hook_installed, forward_replaced,
]  # fmt: skip


# --- what a graph cannot say


def counter(m: Any, x: Any) -> Any:
    m.count += 1
    return m.fc(x)


def counter_that_decides_late(m: Any, x: Any) -> Any:
    m.count += 1
    return x * 2 if m.count > 50 else x


def kept_and_read(m: Any, x: Any) -> Any:
    y = x if m.last is None else x + m.last
    m.last = x * 1
    return y


def first_call_calibrates(m: Any, x: Any) -> Any:
    if m.last is None:
        m.last = x.mean(0)
    return x - m.last


def list_that_grows(m: Any, x: Any) -> Any:
    m.items.append(x.sum())
    return x * len(m.items)


def dictionary(m: Any, x: Any) -> Any:
    m.table["n"] = m.table.get("n", 0) + 1
    return x


def plain_tensor_anew(m: Any, x: Any) -> Any:
    m.plain = m.plain + 1
    return x + m.plain


def array(m: Any, x: Any) -> Any:
    m.array += 1
    return x + torch.from_numpy(m.array)


def object_with_slots(m: Any, x: Any) -> Any:
    m.slotted.count += 1
    return x * m.slotted.count


def namespace(m: Any, x: Any) -> Any:
    m.space.count += 1
    return x


REFUSED = [
    counter, counter_that_decides_late, kept_and_read, first_call_calibrates, list_that_grows, dictionary, plain_tensor_anew,
    array, object_with_slots, namespace,
]  # fmt: skip


# --- writes of parameters, which nothing may write but training


def parameter(m: Any, x: Any) -> Any:
    with torch.no_grad():
        m.fc.weight.mul_(0.5)  # HERE
    return m.fc(x)


def parameter_by_data(m: Any, x: Any) -> Any:
    m.fc.weight.data.mul_(0.5)  # HERE
    return m.fc(x)


def parameter_detached(m: Any, x: Any) -> Any:
    m.fc.weight.detach().t()[0] = 1.0  # HERE
    return m.fc(x)


def parameter_flattened(m: Any, x: Any) -> Any:
    x = x + m.fc.weight.detach().flatten()[:4]
    m.fc.weight.detach().flatten()[:4].add_(1)  # HERE
    return m.fc(x)


def parameter_as_out(m: Any, x: Any) -> Any:
    with torch.no_grad():
        torch.add(m.fc.bias, 1, out=m.fc.bias)  # HERE
    return m.fc(x)


def parameters_in_a_list(m: Any, x: Any) -> Any:
    with torch.no_grad():
        torch._foreach_mul_([m.fc.weight, m.fc.bias], 0.5)  # HERE
    return m.fc(x)


def parameter_initialised(m: Any, x: Any) -> Any:
    nn.init.zeros_(m.fc.bias)  # HERE
    return m.fc(x)


def parameter_of_a_submodule(m: Any, x: Any) -> Any:
    class Writer(nn.Module):
        def forward(self, weight: Any) -> None:
            weight.detach()[0].zero_()  # HERE

    m.table.setdefault("writer", Writer())(m.fc.weight)
    return m.fc(x)


def rows_of_an_embedding(m: Any, x: Any) -> Any:
    return F.embedding(x.long(), m.fc.weight, max_norm=0.1)  # HERE


def parameter_anew(m: Any, x: Any) -> Any:
    m.fc.weight = nn.Parameter(m.fc.weight * 0.5)
    return m.fc(x)


def parameter_deleted(m: Any, x: Any) -> Any:
    m.fc.bias = None
    return m.fc(x)


def parameter_made(m: Any, x: Any) -> Any:
    if not hasattr(m, "gain"):
        m.gain = nn.Parameter(torch.ones(4))
    return m.fc(x) * m.gain


def buffer_made(m: Any, x: Any) -> Any:
    if not hasattr(m, "gain"):
        m.register_buffer("gain", torch.ones(4))
    return m.fc(x) * m.gain


def child_made(m: Any, x: Any) -> Any:
    if not hasattr(m, "late"):
        m.late = nn.Linear(4, 4)
    return m.late(x)


WRITTEN = [
    parameter, parameter_by_data, parameter_detached, parameter_flattened, parameter_as_out, parameters_in_a_list,
    parameter_initialised, parameter_of_a_submodule, rows_of_an_embedding,
]  # fmt: skip
EXCHANGED = [parameter_anew, parameter_deleted, parameter_made, buffer_made, child_made]


# --- what is not a function of anything that is known


def own_generator(m: Any, x: Any) -> Any:
    return x * m.random.random()


def settings(m: Any, x: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return x * 2


ODD = [own_generator, settings]


def fingerprint(model: nn.Module) -> Any:
    """All that a model holds, where it is, and the state of the process."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {n: {k: freeze_value(v) if k != "function" else None for k, v in vars(m).items()} for n, m in model.named_modules()}
    places = {
        n: (id(t), t.data_ptr(), t.stride(), t.requires_grad, t._version, id(t.grad), sorted(vars(t)))
        for n, t in tensors.items()
    }
    patched = [nn.Module._call_impl, math.floor, torch.no_grad.__enter__, torch.autocast.__enter__, torch.from_numpy]
    patched += [vars(torch.autograd.Function)["apply"], "training" in vars(nn.Module)]
    values = {n: freeze_value(t.detach()) for n, t in tensors.items()}
    return values, kept, places, freeze_value(get_random_state()), get_modes(), patched


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    fxplug.trace(nn.Linear(4, 4), X())  # torch imports more of itself, which adds filters of warnings


def assert_left(before: Any, model: nn.Module) -> None:
    after = fingerprint(model)
    assert all(is_alike(a, b) for a, b in zip(before[:2], after[:2], strict=True))
    assert is_alike(before[3], after[3])
    assert before[2] == after[2] and before[4:] == after[4:]


def three_calls(model: nn.Module, gm: nn.Module) -> None:
    for step in range(3):
        x = X(3, 4) * (step + 1)
        mine, other = x.clone(), x.clone()
        torch.manual_seed(step)
        a = model(mine)
        torch.manual_seed(step)
        b = gm(other)
        assert describe_difference(a, b, has_equal_contents) is None, f"call {step}"
        assert torch.equal(mine, other)
        buffers = dict(gm.named_buffers())
        for name, value in [*model.state_dict().items(), ("plain", model.plain)]:
            assert torch.equal(value, gm.state_dict().get(name, buffers.get(name, value))), name


@pytest.mark.parametrize("real", [None, True])
@pytest.mark.parametrize("function", RECORDED, ids=lambda f: f.__name__)
def test_state_that_a_graph_has(function: Callable[..., Any], real: bool | None) -> None:
    model = Holding(function)
    x = X()
    before = fingerprint(model)
    gm = fxplug.trace(model, x, real=real)
    assert_left(before, model)
    assert torch.equal(x, X())
    for mode in (False, True):
        with torch.no_grad():
            three_calls(copy.deepcopy(model).train(mode), copy.deepcopy(gm).train(mode))


def line_of(function: Callable[..., Any]) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, text in enumerate(lines) if "# HERE" in text)


@pytest.mark.parametrize("real", [None, True])
@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_state_that_a_graph_cannot_have(function: Callable[..., Any], real: bool | None) -> None:
    model = Holding(function)
    before = fingerprint(model)
    with pytest.raises(fxplug.TraceError, match=r"forward stores Holding\..*register_buffer"):
        fxplug.trace(model, X(), real=real)
    assert_left(before, model)


@pytest.mark.parametrize("where", ["values", "real", "meta"])
@pytest.mark.parametrize("function", WRITTEN, ids=lambda f: f.__name__)
def test_a_parameter_that_forward_writes(function: Callable[..., Any], where: str) -> None:
    model, x = Holding(function), X()
    if where == "meta":
        model, x = model.to("meta"), x.to("meta")
    before = fingerprint(model)
    with pytest.raises(fxplug.TraceError, match=rf"test_trace_state.py:{line_of(function)}: .*writes the parameter 'fc\."):
        fxplug.trace(model, x, real=True if where == "real" else None, check=False)
    assert_left(before, model)


@pytest.mark.parametrize("where", ["values", "real", "meta"])
@pytest.mark.parametrize("function", EXCHANGED, ids=lambda f: f.__name__)
def test_a_tensor_of_the_state_dict_that_forward_exchanges(function: Callable[..., Any], where: str) -> None:
    model, x = Holding(function), X()
    if where == "meta":
        model, x = model.to("meta"), x.to("meta")
    before = fingerprint(model)
    with pytest.raises(fxplug.TraceError, match=r"'(fc\.weight|fc\.bias|gain|late)'|that torch does not dispatch"):
        fxplug.trace(model, x, real=True if where == "real" else None, check=False)
    assert_left(before, model)


def test_copies_of_parameters_may_be_written() -> None:
    def forward(m: Any, x: Any) -> Any:
        weight = m.fc.weight.detach().clone().mul_(2)
        weight[0] = m.fc.bias.to(torch.float64).mul_(0.5).float()
        with torch.no_grad():
            return F.linear(x, weight.t().contiguous().add_(1)) + (m.fc.bias + 1).mul_(2)

    model = Holding(forward)
    for real in (None, True):
        three_calls(model, fxplug.trace(model, X(), real=real))


def test_a_leaf_may_write_its_own() -> None:
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=0.1))
    gm = fxplug.trace(model, torch.arange(4))
    assert torch.equal(copy.deepcopy(gm)(torch.arange(4)), copy.deepcopy(model)(torch.arange(4)))


@pytest.mark.parametrize("function", ODD, ids=lambda f: f.__name__)
def test_what_is_no_function_of_inputs_and_state(function: Callable[..., Any]) -> None:
    model = Holding(function)
    before = fingerprint(model)
    with pytest.raises(fxplug.TraceError):
        fxplug.trace(model, X())
    assert_left(before, model)


@pytest.mark.parametrize("function", [counter, list_that_grows, dictionary], ids=lambda f: f.__name__)
def test_state_is_refused_without_values(function: Callable[..., Any]) -> None:
    model = Holding(function).to("meta")
    with pytest.raises(fxplug.TraceError, match="for its next call"):
        fxplug.trace(model, X().to("meta"))
    assert fxplug.trace(model, X().to("meta"), check=False)


@pytest.mark.parametrize("function", [counter, kept_and_read, list_that_grows], ids=lambda f: f.__name__)
def test_a_module_kept_whole_keeps_what_it_keeps(function: Callable[..., Any]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Holding(function)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)

    model = Outer()
    with pytest.raises(fxplug.TraceError, match=r"leaf: \[inner\]"):
        fxplug.trace(model, X())
    gm = fxplug.trace(model, X(), leaf="inner")
    for step in range(3):
        assert torch.equal(gm(X() * step), model(X() * step))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("real", [None, True])
@pytest.mark.parametrize("calls", range(1, 6))
def test_an_error_at_any_call_leaves_nothing(error: type[BaseException], real: bool | None, calls: int) -> None:
    left = threading.local()  # counts over all runs of one trace, as nothing of it is put back
    left.calls = calls

    def function(m: Any, x: Any) -> Any:
        m.ema = m.ema + 1
        m.var.add_(1)
        m.last = m.fc(x)
        left.calls -= 1
        with torch.no_grad():
            if left.calls == 0:
                raise error("on purpose")
        return m.drop(m.last)

    model = Holding(function)
    before = fingerprint(model)
    with contextlib.suppress(error, fxplug.TraceError):
        fxplug.trace(model, X(), real=real)
    assert_left(before, model)
    assert torch.is_grad_enabled()


def test_a_deepcopy_of_model_and_result_after_a_trace() -> None:
    model = Holding(kept_output)
    gm = fxplug.trace(model, X(), real=True)
    for again in (copy.deepcopy(model), copy.deepcopy(gm), copy.deepcopy(copy.deepcopy(gm))):
        assert torch.equal(again.eval()(X()), model.eval()(X()))


@functools.lru_cache
def table(n: int) -> torch.Tensor:
    return torch.ones(n)


def kept_outside_of_exports(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `lru_cache_unless_export` of diffusers."""
    cached = functools.lru_cache(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args) if torch.compiler.is_exporting() else cached(*args)

    wrapper.cached = cached  # type: ignore[attr-defined]
    return wrapper


class Tables:
    @functools.lru_cache  # noqa: B019
    def table(self, n: int) -> torch.Tensor:
        return torch.ones(n)

    @kept_outside_of_exports
    def wrapped(self, n: int) -> torch.Tensor:
        return torch.ones(n)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_functions_that_keep_their_results_keep_none_of_a_trace(device: str) -> None:
    with torch.device(device):
        model, x = Holding(lambda m, x: x + table(4) + m.tables.table(4) + m.tables.wrapped(4)), X().to(device)
    model.tables = Tables()
    gm = fxplug.trace(model, x)
    for function in (table, Tables.table, Tables.wrapped.cached):
        assert function.cache_info().currsize == 0
    if device == "cpu":
        assert torch.equal(gm(x), model(x))


def test_the_default_generator_may_be_handed_on() -> None:
    model = Holding(lambda m, x: x + torch.rand(3, 4, generator=torch.default_generator))
    gm = fxplug.trace(model, X())
    torch.manual_seed(3)
    expected = model(X())
    torch.manual_seed(3)
    assert torch.equal(gm(X()), expected)


class Monitor(threading.Thread):
    """Counts all the time, as tqdm's thread notes when it woke."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.woken, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(1e-4):
            self.woken += 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_another_thread_keeps_is_its_own(device: str) -> None:
    with torch.device(device):
        model, x = Holding(lambda m, x: m.fc(x)), torch.randn(2, 4)
    model.monitor = Monitor()
    model.monitor.start()
    try:
        assert [fxplug.trace(model, x) for _ in range(3)]
    finally:
        model.monitor.over.set()
        model.monitor.join()


@pytest.mark.parametrize("base", [dict, OrderedDict, list, set, deque])
def test_containers_whose_methods_do_more_are_left_alone(base: type) -> None:
    def refuse(self: Any, *args: Any) -> Any:
        raise RuntimeError("this container was asked")

    names = ("__iter__", "__getitem__", "__len__", "items", "keys", "values", "copy")
    strange = type("Strange", (base,), dict.fromkeys(names, refuse))
    model = Holding(lambda m, x: m.fc(x))
    model.strange = strange()
    assert torch.equal(fxplug.trace(model, X())(X()), model(X()))


class Link:
    def __init__(self, next: Any) -> None:
        self.next = next


NESTED = {"list": lambda x: [x], "dict": lambda x: {"x": x}, "tuple": lambda x: (x, [x]), "chain": Link}


@sweep("wrap", NESTED.values(), 0, 3, ids=NESTED)
def test_a_model_may_hold_what_nests_deep(wrap: Callable[[Any], Any]) -> None:
    def deep_counter(m: Any, x: Any) -> Any:
        m.end.append(1)
        return m.fc(x) * len(m.end)

    for function in (kept_output, deep_counter):
        model = Holding(function)
        model.deep = model.end = []
        for _ in range(5000):
            model.deep = wrap(model.deep)
        if function is kept_output:
            assert torch.equal(fxplug.trace(model, X(), real=True)(X()), model(X()))
        else:
            with pytest.raises(fxplug.TraceError, match=r"stores .*(end|deep).* for its next call"):
                fxplug.trace(model, X())


def test_the_check_can_be_left_out() -> None:
    gm = fxplug.trace(Holding(counter), X(), check=False)
    assert torch.equal(gm(X()), gm(X()))


def test_the_modes_that_a_model_gives_its_parts_itself() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    model = Frozen().eval()
    gm, before = fxplug.trace(model, X()), model.norm.running_mean.clone()
    assert torch.equal(gm.train()(X()), model(X())) and not gm.norm.training  # as its own `train` does
    assert torch.equal(before, model.norm.running_mean)


# --- threads and processes


class Slow(nn.Module):
    def __init__(self, hook: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.hook = hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hook()
        return self.net(x) * math.floor(x.shape[0] / 2)


def patches() -> list[Any]:
    return [nn.Module._call_impl, math.floor, math.sqrt, torch.no_grad.__enter__, "training" in vars(nn.Module)]


def test_traces_in_threads_take_turns() -> None:
    before, wrong = patches(), []

    def work() -> None:
        for _ in range(3):
            model = Slow()
            if not torch.equal(fxplug.trace(model, X())(X(5, 4)), model(X(5, 4))):
                wrong.append(model)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and patches() == before


class Modal(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 3 if self.training else self.inner(x)


def test_the_first_calls_of_many_threads_run_the_graph_of_the_mode() -> None:
    """Code is written at the first call, here in a mode that the module was put into without `train`."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for _ in range(10):
        gm, start, found = fxplug.trace(Modal(model).eval(), (x,)), threading.Barrier(6), []
        vars(gm)["training"] = True

        def work(gm: Any = gm, start: Any = start, found: list[bool] = found) -> None:
            start.wait()
            found.append(torch.equal(gm(x), model(x) * 3))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 6
        vars(gm)["training"] = False
        assert torch.equal(gm(x), model(x))


def test_a_thread_that_forward_starts_calls_the_model_on_values_of_its_own() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: self.fc(torch.ones(1, 4)))
        thread.start()
        thread.join()
        return self.fc(x)

    model = Holding(forward).eval()
    x = torch.randn(2, 4)
    assert torch.equal(fxplug.trace(model, x)(x), model(x))


def test_a_trace_ends_that_waits_for_a_thread_that_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes the trace for somebody else's: it fails, and the model is traced with its own weights."""
    monkeypatch.setattr("fxplug.core.capture.edges.PATIENCE", 0.2)
    x = torch.randn(2, 4)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            pool.submit(self.fc, torch.ones(1, 4)).result()
            return self.fc(x)

        model = Holding(forward).eval()
        assert torch.equal(fxplug.trace(model, x)(x), model(x))


def test_the_model_itself_is_called_in_another_thread_meanwhile() -> None:
    model, stop, wrong = Slow(), threading.Event(), []
    right = model(X())

    def work() -> None:
        while not stop.is_set():
            out = model(X())
            if type(out) is not torch.Tensor or not torch.equal(out, right):
                wrong.append(out)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            fxplug.trace(model, X())
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_calls_of_other_models_go_past_a_trace() -> None:
    call, inside = nn.Module.__call__, []
    traced = Slow(lambda: inside.append((nn.Module.__call__ is call, nn.Module._call_impl, other._compiled_call_impl)))
    other, before = nn.Linear(4, 4), nn.Module._call_impl
    fxplug.trace(traced, X())
    assert set(inside) == {(True, before, None)} and "_compiled_call_impl" not in vars(traced.net)


def test_a_thread_that_works_for_the_trace_is_not_kept_waiting() -> None:
    """It was there before the trace, and is given what the model computes: no graph has that, and nothing waits for ever."""
    model = Slow()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()
        model.net.forward = lambda x: pool.submit(model.net[0], x).result()
        with pytest.raises(fxplug.TraceError, match="a function that torch does not dispatch"):
            fxplug.trace(model, X())
    model.net.forward = lambda x: model.net[0](x)
    assert fxplug.trace(model, X())


def test_a_trace_inside_a_trace_is_refused() -> None:
    before, inner, x = patches(), nn.Linear(4, 4), X()
    with pytest.raises(fxplug.TraceError, match="during a trace"):
        fxplug.trace(Slow(lambda: fxplug.trace(inner, x)), X())
    assert patches() == before and fxplug.trace(Slow(), X())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_gradient_mode_stays(mode: Callable[[], Any]) -> None:
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        fxplug.trace(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), torch.randn(2, 3))
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before


def test_gradients_stay_with_a_copy() -> None:
    model = Holding(lambda m, x: (copy.deepcopy(m.fc)(x), copy.deepcopy(m.fc.weight)))
    gm = fxplug.trace(model, X())
    for fixed in (False, True):
        model.fc.weight.requires_grad_(not fixed)
        for module in (model, gm):
            (out, weight) = module(X())
            assert weight.requires_grad is not fixed and weight.is_leaf and weight is not model.fc.weight
            out.sum().backward()
            assert model.fc.weight.grad is None and model.fc.bias.grad is None


class Tagged(nn.Module):
    """A weight and a buffer with attributes, which code may read and may not write."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3))
        self.weight.scale, self.weight.count, self.table.kind = 2.0, 0, "added"  # type: ignore[attr-defined]
        self.body = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def reads(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * self.weight * self.weight.scale


def asks(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.table if getattr(self.table, "kind", None) == "added" else x - self.table


def leaves_one(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.weight.total = x.sum()
    return x + self.weight.total


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.weight.count += 1
    return x * self.weight.count


@pytest.mark.parametrize("real", [None, True])
@pytest.mark.parametrize("forward", [reads, asks, leaves_one])
def test_attributes_of_weights_are_read(forward: Callable[..., Any], real: bool | None) -> None:
    model, x = Tagged(forward), torch.randn(2, 3)
    before = dict(vars(model.weight))
    gm = fxplug.trace(model, torch.ones(2, 3), real=real)
    assert vars(model.weight) == before
    assert torch.equal(gm(x), Tagged(forward)(x))


@pytest.mark.parametrize(("forward", "operation"), [(reads, "mul_1"), (asks, "add")])
def test_attributes_of_weights_without_values_are_read(forward: Callable[..., Any], operation: str) -> None:
    with torch.device("meta"):
        gm = fxplug.trace(Tagged(forward), torch.ones(2, 3))
    assert operation in [node.name for node in gm.graph.nodes]


@pytest.mark.parametrize("real", [None, True])
def test_an_attribute_of_a_weight_that_forward_counts_up_is_refused(real: bool | None) -> None:
    model = Tagged(counts)
    with pytest.raises(fxplug.TraceError, match=r"forward stores Tagged\.weight\.count for its next call"):
        fxplug.trace(model, torch.ones(2, 3), real=real)
    assert vars(model.weight)["count"] == 0


# --- what modules have computed from their weights before


class Cached(nn.Module):
    """Keeps what it made of its weight, until its mode changes, as timm's LeViT does."""

    def __init__(self, how="train"):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.how, self.merged, self.kept, self.table, self.calls = how, False, None, {}, [1]

    def _drop(self):
        self.kept = None
        self.table.clear()

    def train(self, mode=True):
        if self.how == "raises":
            raise RuntimeError("not now")
        if self.how == "merges":  # as loralib's layers do
            self.weight.data.mul_(3.0 if self.merged else 1 / 3.0)
            self.merged = not self.merged
        super().train(mode)
        self._drop()
        return self

    def forward(self, x):
        if self.training:
            return x @ self.weight.softmax(0)
        if self.kept is None:
            self.kept = self.weight.softmax(0)
        if "b" not in self.table:
            self.table["b"] = self.weight.sum(0)
        return x @ self.kept + self.table["b"]


@torch.no_grad()
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("how", ["train", "merges"])
def test_a_graph_reads_weights_and_not_what_was_made_of_them_before(how, called):
    model = nn.Sequential(Cached(how), nn.Linear(4, 2))
    for module in model.modules():
        module.__dict__["training"] = False
    x, weight = torch.randn(3, 4), model[0].weight
    if called:
        model(x)
    before, values = dict(vars(model[0])), weight.clone()
    kept, table = model[0].kept, dict(model[0].table)
    gm = fxplug.variants(fxplug.trace(model, (x,)), model)
    assert model[0].weight is weight and torch.equal(weight, values)
    assert vars(model[0]) == before and model[0].kept is kept and model[0].table == table
    weight.normal_()
    model[0]._drop()
    assert torch.equal(gm(x), model(x))
    model(x)
    other = copy.deepcopy(gm).double()
    for parameter in other.parameters():
        parameter.normal_()
    theirs = copy.deepcopy(model).double()
    for mine, parameter in zip(theirs.parameters(), other.parameters(), strict=True):
        mine.copy_(parameter)
    theirs[0]._drop()
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(other(x), theirs(x)), "a further graph is made on the copy's own weights"


@torch.no_grad()
def test_what_a_module_cannot_drop_it_keeps():
    model, x = Cached("raises"), torch.randn(3, 4)
    model.__dict__["training"] = False
    expected = model(x)
    assert torch.equal(fxplug.trace(model, (x,))(x), expected) and model.kept is not None and model.calls == [1]


@pytest.mark.slow
@torch.no_grad()
def test_attention_biases_that_timm_keeps_are_read_anew():
    model = timm.create_model("levit_128s", img_size=64, num_classes=3, embed_dim=(16, 16, 16), key_dim=4, num_heads=2).eval()
    x = torch.randn(2, 3, 64, 64)
    model(x)
    gm = fxplug.trace(model, (x,))
    for name, parameter in model.named_parameters():
        if "attention_bias" in name:
            parameter.normal_()
    model.train()
    model.eval()
    assert torch.equal(gm(x), model(x))


class Adapted(nn.Module):
    """Holds what is not a function of its weights, until its mode changes."""

    def __init__(self):
        super().__init__()
        self.line, self.shift, self.old = nn.Linear(4, 4), None, nn.Linear(4, 4)

    def train(self, mode=True):
        self.shift, self.line, self.old = None, self.old, self.line
        self.extra = nn.Linear(2, 2)
        self.register_buffer("made", torch.zeros(3))
        return super().train(mode)

    def forward(self, x):
        return self.line(x) if self.shift is None else self.line(x) + self.shift


@torch.no_grad()
def test_what_a_module_holds_beside_its_weights_stays_in_the_graph():
    model, x = Adapted(), torch.randn(2, 4)
    model.__dict__["training"], model.shift = False, torch.randn(4)
    lines, before, expected = (model.line, model.old), dict(vars(model)), model(x)
    gm = fxplug.variants(fxplug.trace(model, (x,)), model)
    assert torch.equal(gm(x), expected) and torch.equal(model(x), expected)
    assert (model.line, model.old) == lines and vars(model) == before and "made" not in model._buffers
    assert torch.equal(gm(x[0]), model(x[0])), "a further graph has it, too"


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*jit.script")
def test_a_model_with_a_script_module_has_its_weights_afterwards():
    model = nn.Sequential(Cached(), torch.jit.script(nn.Linear(4, 4)))
    for module in (model, model[0]):
        module.__dict__["training"] = False
    model[1].eval()
    x = torch.randn(2, 4)
    expected = model(x)
    with contextlib.suppress(fxplug.TraceError):
        assert torch.equal(fxplug.trace(model, (x,))(x), expected)
    assert torch.equal(model(x), expected)


# --- state that matters to calls of other sizes, and what is made of weights once


def high_water_mark(m: Any, x: Any) -> Any:
    """As rotary embeddings of transformers do that grow with the longest input."""
    if x.shape[0] > m.largest:
        m.largest, m.scale = x.shape[0], x.shape[0] / 8
    return m.fc(x) * m.scale


def larger_buffer(m: Any, x: Any) -> Any:
    if x.shape[0] > m.largest:
        m.register_buffer("plain_scale", torch.full((4,), float(x.shape[0])), persistent=False)
        m.largest = x.shape[0]
    return m.fc(x) * m.plain_scale


def on_large_inputs(m: Any, x: Any) -> Any:
    if x.shape[0] > 4:
        m.flag = True
    return m.fc(x) * 2 if m.flag else m.fc(x)


def smallest(m: Any, x: Any) -> Any:
    m.flag = min(m.flag or 99, x.shape[0])
    return m.fc(x) * m.flag


def noted(m: Any, x: Any) -> Any:
    if m.largest != x.shape[0]:
        m.largest, m.last = x.shape[0], torch.arange(float(x.shape[0]))[:, None]
    return m.fc(x) * m.last


def sized(function: Callable[..., Any]) -> Holding:
    model = Holding(function).eval()
    model.largest, model.scale = 4, 0.5
    model.register_buffer("plain_scale", torch.ones(4), persistent=False)
    return model


@pytest.mark.parametrize("real", [None, True])
@pytest.mark.parametrize("function", [high_water_mark, larger_buffer, on_large_inputs, smallest], ids=lambda f: f.__name__)
def test_what_a_call_of_one_size_notes_for_others_is_refused(function: Callable[..., Any], real: bool | None) -> None:
    model, x = sized(function), X(8, 4)
    before = fingerprint(model)
    with pytest.raises(fxplug.TraceError, match=r"forward stores Holding\.(largest|flag)"):
        fxplug.trace(model, x, real=real)
    assert_left(before, model)
    gm = fxplug.trace(model, X(2, 4), real=real) if function is not smallest else None
    if gm is not None:  # what small inputs find is as it was, and large ones are refused
        for size in (2, 3, 8, 2):
            with contextlib.suppress(fxplug.GuardError):
                assert torch.equal(gm(X(size, 4)), copy.deepcopy(model)(X(size, 4)))
        with pytest.raises(fxplug.GuardError, match="when traced"):
            gm(X(8, 4))
    if function in (high_water_mark, larger_buffer):
        model(x)  # the way out: nothing grows any more
        gm = fxplug.trace(model, X(2, 4), real=real)
        assert all(torch.equal(gm(X(size, 4)), model(X(size, 4))) for size in (2, 8, 3))


def test_what_is_noted_and_matters_to_no_other_size_is_traced() -> None:
    model = sized(noted)
    gm = fxplug.variants(fxplug.trace(model, X(8, 4)), model)
    assert all(torch.equal(gm(X(size, 4)), copy.deepcopy(model)(X(size, 4))) for size in (8, 2, 9))


def lazily(m: Any, x: Any) -> Any:
    if m.last is None:
        m.last = m.fc.weight.softmax(0)
    return x @ m.last


def in_a_tuple(m: Any, x: Any) -> Any:
    if m.last is None:
        m.last = m.fc.weight.softmax(0), {"shift": [m.fc.bias * 2]}
    return x @ m.last[0] + m.last[1]["shift"][0]


def by_property(m: Any, x: Any) -> Any:
    return x @ m.soft


class Property(Holding):
    @functools.cached_property
    def soft(self) -> torch.Tensor:
        return self.fc.weight.softmax(0)

    def drop_all(self) -> None:
        self.last = None
        self.space, self.flag = types.SimpleNamespace(), False
        self.__dict__.pop("soft", None)
        self._buffers.pop("lazy", None)


def in_an_object(m: Any, x: Any) -> Any:
    if getattr(m.space, "soft", None) is None:
        m.space.soft = m.fc.weight.softmax(0)
    return x @ m.space.soft


def beside_a_flag(m: Any, x: Any) -> Any:
    if not m.flag:
        m.last, m.flag = m.fc.weight.softmax(0), True
    return x @ m.last


def in_a_lazy_buffer(m: Any, x: Any) -> Any:
    if not hasattr(m, "lazy"):
        m.register_buffer("lazy", m.fc.weight.softmax(0), persistent=False)
    return x @ m.lazy


def as_a_number(m: Any, x: Any) -> Any:
    if m.last is None:
        m.last = m.fc.weight.abs().max().item()
    return x * m.last


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("function", [lazily, by_property, in_a_tuple, in_an_object, beside_a_flag, in_a_lazy_buffer])
def test_what_is_made_of_weights_at_the_first_call_is_made_anew_by_the_graph(function: Any, mode: Any) -> None:
    with mode():
        model = Property(function).eval()
        if function is by_property:
            model(X())
        before = dict(vars(model)), dict(model.table)
        gm = fxplug.trace(model, X())
        assert (dict(vars(model)), dict(model.table)) == before
    with torch.no_grad():
        model.fc.weight.normal_()
    model.drop_all()
    assert torch.equal(gm(X()), model(X()))
    gm(X()).sum().backward()
    assert model.fc.weight.grad is not None


def test_a_number_that_is_made_of_weights_is_computed_by_the_graph() -> None:
    model = Property(as_a_number).eval()
    with pytest.warns(UserWarning, match="traced on its real tensors"):
        gm = fxplug.trace(model, X())
    with torch.no_grad():
        model.fc.weight.mul_(3)
    assert torch.equal(gm(X()), model(X()))


def test_what_a_model_kept_of_earlier_calls_is_a_constant_as_it_is_for_the_model() -> None:
    model = Property(lazily).eval()
    with torch.no_grad():
        model(X())
        gm = fxplug.trace(model, X())
        model.fc.weight.normal_()
        assert torch.equal(gm(X()), model(X()))
    model.drop_all()
    model(X())
    with pytest.raises(fxplug.TraceError, match="differs in gradients"):
        fxplug.trace(model, X())


class Two(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 3 if self.asks and a is b else a + b


def test_whether_two_inputs_are_one_tensor_is_a_guard() -> None:
    one, other = X(), X() + 1
    gm = fxplug.trace(Two(True), (one, other))
    assert torch.is_grad_enabled()
    assert torch.equal(gm(one, other), one + other)
    with pytest.raises(fxplug.GuardError, match="'b' and 'a' were two tensors"):
        gm(one, one)
    with pytest.raises(fxplug.TraceError, match="and the model give different results"):
        fxplug.trace(Two(True), (one, one))
    for given in ((one, one), (one, other)):
        gm = fxplug.trace(Two(False), given)  # to this one it does not matter
        assert all(torch.equal(gm(*pair), sum(pair)) for pair in ((one, other), (one, one), (other, one)))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("asks", [lambda x: x.is_sparse, lambda x: x.layout == torch.sparse_coo, lambda x: x.is_sparse_csr])
def test_sparse_tensors_are_refused(asks: Any) -> None:
    model = Holding(lambda m, x: x.to_dense() * 2 if asks(x) else x * 3)
    gm = fxplug.trace(model, X())
    for sparse in (X().to_sparse(), X().to_sparse_csr()):
        with pytest.raises(fxplug.GuardError, match="argument 'x' was dense"):
            gm(sparse)
        with pytest.raises(fxplug.TraceError, match=r"argument 'x' is a torch.sparse_\w+ tensor.*to_dense"):
            fxplug.trace(model, sparse)
        model.register_buffer("mask", sparse)
        with pytest.raises(fxplug.TraceError, match=r"'mask' is a torch.sparse_\w+ tensor.*to_dense"):
            fxplug.trace(model, X())
        del model.mask


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:.*quantize_per_tensor")
@pytest.mark.parametrize(
    "other, kind",
    [
        (lambda x: torch.nested.nested_tensor([x[0], x[0, :1]]), "nested"),
        (lambda x: torch.nested.nested_tensor([x[0], x[0, :1]], layout=torch.jagged), "torch.jagged"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), "quantised"),
    ],
    ids=["nested", "jagged", "quantised"],
)
def test_nested_and_quantised_tensors_are_refused(other: Any, kind: str) -> None:
    model, odd = Holding(lambda m, x: x * 3), other(X())
    gm = fxplug.trace(model, X())
    refusals = {
        f"argument 'x' is a {kind} tensor": lambda: fxplug.trace(model, (odd,)),
        f"(was dense .* it is {kind}|was torch.float32 .* is torch.quint8|dimensions when)": lambda: gm(odd),
        f"an example input is a {kind} tensor": lambda: fxplug.verify(gm, gm, (odd,)),
        f"example input 'x' is a {kind} tensor": lambda: fxplug.parallel_plan(gm, (odd,), batch=2),
        "(was dense|was torch.float32|dimensions when)": lambda: fxplug.variants(gm, model)(odd),
    }
    for message, call in refusals.items():
        with pytest.raises(fxplug.FxplugError, match=message):
            call()
    model.register_buffer("mask", odd)
    with pytest.raises(fxplug.TraceError, match=f"'mask' is a {kind} tensor, which a graph cannot hold"):
        fxplug.trace(model, X())


def test_a_buffer_that_is_assigned_anew_has_the_dtype_that_the_model_gives_it() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.fc(x).mean(0).detach()
            return x + 1

    gm = fxplug.trace(Keeping(), torch.ones(2, 4))
    gm(torch.zeros(3, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fxplug.GuardError, match="to the buffer 'last' has the buffer's "
                                                                                       "dtype"):
        gm(torch.ones(2, 4))


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_draw_from_a_generator_that_the_model_seeds_itself_is_refused_or_right(draw: Callable[[], float]) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        random.seed(4)
        np.random.seed(4)
        return x * draw()

    model = Holding(forward)
    random.seed(5)
    np.random.seed(5)
    before = random.getstate()
    with pytest.raises(fxplug.TraceError, match="draws random numbers from Python's"):
        fxplug.trace(model, torch.ones(4))
    assert random.getstate() == before
    given = model(torch.ones(4))  # which leaves the generators as every call does
    assert torch.equal(fxplug.trace(model, torch.ones(4))(torch.ones(4)), given)


def test_a_trace_does_not_seed_the_generators_of_the_process() -> None:
    seen = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append((random.getstate(), np.random.get_state()[1].tolist()))
        return x * 2

    random.seed(6)
    np.random.seed(6)
    now = random.getstate(), np.random.get_state()[1].tolist()
    fxplug.trace(Holding(forward), torch.ones(4))
    assert len(seen) > 1 and all(state == now for state in seen)


def test_hooks_that_forward_puts_on_a_weight_are_gone_after_a_trace() -> None:
    class Hooking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.weight.register_hook(lambda g: g * 2)
            return x * self.weight + y

    model = Hooking()
    model.weight.register_hook(lambda g: g + 1)
    with pytest.raises(fxplug.TraceError, match="register_hook"):
        fxplug.trace(model, (torch.ones(4), torch.zeros(4)))
    model.weight.sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4,), 2.0))


def test_a_generator_that_is_set_back_is_refused_whatever_other_threads_there_are() -> None:
    class Back(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = torch.default_generator.get_state()
            y = torch.rand(1)
            torch.default_generator.set_state(state)
            return x + y

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(fxplug.TraceError, match="the random generators end in another state"):
            fxplug.trace(Back(), X())
    finally:
        stop.set()
        thread.join()


class KeepsTheFirstMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first = nn.Embedding(16, 8), None

    def forward(self, ids):
        x = self.words(ids)
        if self.first is None:
            self.first = x.detach().mean()
        return x + self.first


def test_what_the_first_integers_gave_is_kept_by_the_model_and_refused():
    """Other indices show that the value is not made of the weights alone."""
    with pytest.raises(fxplug.TraceError, match="first"):
        fxplug.trace(KeepsTheFirstMean(), torch.tensor([[3, 7, 15], [1, 8, 2]]))


def test_a_graph_that_a_module_keeps_is_not_copied_to_be_compared():
    """Its nodes hold each other: a copy of all that they hold would take minutes and gigabytes."""
    from fxplug.core.capture.isolation import freeze_value, is_alike

    graph = fxplug.trace(nn.Linear(2, 2), torch.randn(1, 2)).graph
    kept = freeze_value({"graph": graph, "blocks": [1, 2]})
    assert kept[1]["graph"] is graph and is_alike(kept, freeze_value({"graph": graph, "blocks": [1, 2]}))
