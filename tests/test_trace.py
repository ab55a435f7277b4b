"""Tracing: exact in every way of calling, honest about what it cannot do, and without traces in the model."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exact import difference
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxplug
from fxplug.core.ir import ops
from fxplug.core.ir.containers import list_leaves
from fxplug.core.torch_internals import SCRIPTED

pytestmark = pytest.mark.filterwarnings("ignore:.*a checkpoint saves memory in the model, and not in its graph")


class Model(nn.Module):
    """A model whose forward is a function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Net(nn.Module):
    """A small region of its own: not a leaf."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).relu()


def X(*shape: int) -> torch.Tensor:  # noqa: N802
    return torch.randn(*shape or (2, 4), generator=torch.Generator().manual_seed(0))


def same(model: nn.Module, gm: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Both give the same bits; the result."""
    torch.manual_seed(3)
    want = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    torch.manual_seed(3)
    got = gm(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    assert difference(want, got) is None, difference(want, got)
    return got


def traced_same(model: nn.Module, *args: Any, leaf: Any = (), real: bool | None = None, **kwargs: Any) -> Any:
    gm = fxplug.trace(model, args, kwargs, leaf=leaf, real=real)
    same(model, gm, *args, **kwargs)
    return gm


def targets(gm: Any) -> list[Any]:
    return [n.target for n in gm.graph.nodes]


# --- ways of calling


class Signature(nn.Module):
    def forward(self, a: Any, /, b: Any, *rest: Any, scale: float = 2.0, extra: Any = None, **more: Any) -> Any:
        out = a * scale + (b if extra is None else extra["x"][0] + extra["y"])
        return {"sum": out + sum(rest), "more": [more[k] + 1 for k in sorted(more)], "plain": (scale, None, "text")}


def test_every_kind_of_parameter() -> None:
    model = Signature()
    call = (X(), X(2, 1), X(1), X(4)), {"scale": 3.0, "extra": {"x": [X()], "y": X()}, "m": X(), "k": X(1)}
    gm = fxplug.trace(model, *call)
    same(model, gm, *call[0], **call[1])
    for kwargs in ({**call[1], "scale": 2.0}, {k: v for k, v in call[1].items() if k != "extra"}):
        with pytest.raises(fxplug.GuardError, match="argument '(scale' was|extra' had)"):
            gm(*call[0], **kwargs)
    with pytest.raises(fxplug.GuardError, match="argument 'rest' had 2 members .*now it has 3"):
        gm(*call[0], X(), **call[1])
    with pytest.raises(fxplug.TraceError, match="does not take these example inputs"):
        fxplug.trace(model, ())


def test_keyword_only_arguments_and_defaults() -> None:
    class Keywords(nn.Module):
        def forward(self, *, sample: torch.Tensor, mask: torch.Tensor | None = None, mode: str = "a") -> torch.Tensor:
            return sample + 1 if mask is None else sample * mask

    gm = traced_same(Keywords(), sample=X())
    with pytest.raises(fxplug.GuardError, match="argument 'mask'"):
        gm(sample=X(), mask=X())
    traced_same(Keywords(), sample=X(), mask=X())


def test_a_wrapped_forward_sees_the_call_as_the_user_wrote_it() -> None:
    class Wrapped(nn.Module):
        def run(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return x * scale

        @functools.wraps(run)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs) + ("scale" in kwargs)

    traced_same(Wrapped(), X(), scale=2.0)
    traced_same(Wrapped(), X(), 2.0)
    traced_same(Wrapped(), X())


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Result:
    sample: Any
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    sample: Any


@pytest.mark.parametrize("kind", [Pair, Result, lambda a, b: Frozen(a), lambda a, b: [(a, {"b": b})], lambda a, b: a.shape])
def test_kinds_of_result(kind: Callable[..., Any]) -> None:
    inner = Model(lambda self, x: kind(x * 2, x + 1))
    traced_same(inner, X())
    traced_same(Model(lambda self, x: self.inner(x), inner=inner), X())


def test_a_result_that_no_graph_can_make() -> None:
    class Odd:
        pass

    with pytest.raises(fxplug.TraceError, match="returns a Odd"):
        fxplug.trace(Model(lambda self, x: Odd()), X())


def test_inputs_of_a_foreign_class() -> None:
    class Cache:
        def __init__(self) -> None:
            self.k = X()

    with pytest.raises(fxplug.TraceError, match="'args.0.' is a Cache|'args' is a|Cache"):
        fxplug.trace(Model(lambda self, c: c.k), (Cache(),))


def test_a_generator_is_an_input() -> None:
    model = Model(lambda self, x, g: x + torch.randn(x.shape, generator=g))
    generator = torch.Generator().manual_seed(5)
    gm = fxplug.trace(model, (X(), generator))
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(5).get_state())
    for seed in (1, 2):
        want, got = (m(X(3, 4), torch.Generator().manual_seed(seed)) for m in (model, gm))
        assert torch.equal(want, got)
    with pytest.raises(fxplug.GuardError):
        gm(X(), None)


def _puts(self: Any, x: torch.Tensor, given: Any) -> torch.Tensor:
    given["new"] = [x * 2, x.shape[0]]
    return x + given.pop("old")


def _replaces(self: Any, x: torch.Tensor, given: Any) -> torch.Tensor:
    given["old"] = given["old"] + x
    return x * 2


def _appends(self: Any, x: torch.Tensor, given: Any) -> torch.Tensor:
    given[0].append(x.shape)
    given.insert(0, x.sum())
    return x * 2


def _sorts(self: Any, x: torch.Tensor, given: Any) -> torch.Tensor:
    given.append("c")
    given.sort()
    return x * 2


@pytest.mark.parametrize(
    ("forward", "given"),
    [
        (_puts, {"old": X()}),
        (_puts, OrderedDict(old=X(), other=1)),
        (_puts, defaultdict(list, old=X())),
        (_replaces, {"other": [1], "old": X()}),
        (_appends, [[X()], X()]),
        (_appends, [[1]]),
        (_sorts, ["d", "a"]),
    ],
)
def test_containers_that_are_given_are_left_as_the_model_leaves_them(forward: Any, given: Any, tmp_path: Path) -> None:
    model = Model(forward)
    gm = fxplug.trace(model, (X(), given))
    fxplug.save(gm, tmp_path / "saved")
    for graph in (gm, fxplug.load(tmp_path / "saved")):
        theirs, ours = copy.deepcopy(given), copy.deepcopy(given)
        assert difference(model(X(), theirs), graph(X(), ours)) is None
        assert difference(theirs, ours) is None and difference(theirs, given) is not None


def test_containers_that_hold_themselves_are_refused(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(500)  # each leaf on the way down costs as much as the calls around it are many

    def put(self: Any, x: torch.Tensor, given: Any) -> Any:
        given.append(given)
        return x * 2

    def deep(self: Any, x: torch.Tensor, given: Any) -> Any:
        return deep(self, x, given)

    endless: list[Any] = [X()]
    endless.append(endless)
    for model, given in [(Model(put), []), (Model(lambda self, x, given: endless), []), (Model(lambda self, x, g: x), endless)]:
        with pytest.raises(fxplug.TraceError, match="nested too deeply for a graph, or contains itself"):
            fxplug.trace(model, (X(), given))
    with pytest.raises(RecursionError):  # the model's own
        fxplug.trace(Model(deep), (X(), []))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_no_graph_can_put_into_an_argument_is_refused(device: str) -> None:
    def put(self: Any, x: torch.Tensor, given: Any) -> torch.Tensor:
        given["seen"] = object()
        return x * 2

    with pytest.raises(fxplug.TraceError, match=r"the argument 'args\[1\]', and a graph cannot do the same: it holds a obj"):
        fxplug.trace(Model(put), (X().to(device), {}))


def test_example_inputs_are_not_used_up() -> None:
    def consume(self: Any, xs: list[torch.Tensor], names: list[str]) -> torch.Tensor:
        names.pop()
        xs[0].add_(1)
        return xs.pop() + xs.pop()

    xs, names = [X(), X()], ["a", "b"]
    for real in (None, True):
        gm = fxplug.trace(Model(consume), (xs, names), real=real)
        assert len(xs) == 2 and names == ["a", "b"] and torch.equal(xs[0], X())
        same(Model(consume), gm, xs, names)


def test_fake_and_meta_inputs() -> None:
    model = Net()
    with FakeTensorMode():
        fake = torch.empty(2, 4)
    same(model, fxplug.trace(model, fake), X())
    same(model, fxplug.trace(model, X().to("meta")), X(7, 4))


def test_meta_weights_loaded_later() -> None:
    real = Model(lambda self, x: self.net(x) + self.table, net=Net())
    real.register_buffer("table", torch.arange(4.0))
    meta = copy.deepcopy(real).to("meta")
    gm = fxplug.trace(meta, X().to("meta"))
    gm.load_state_dict(real.state_dict(), assign=True)
    same(real, gm, X(3, 4))
    again = fxplug.trace(meta, X()).to_empty(device="cpu")
    again.load_state_dict(real.state_dict())
    same(real, again, X(3, 4))
    assert all(t.is_meta for t in meta.state_dict().values())


# --- precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    model = Model(lambda self, x: self.net(x).float() + x.to(self.net.fc.weight.dtype), net=Net().to(dtype))
    gm = traced_same(model, X().to(dtype))
    if dtype is not torch.float32:
        with pytest.raises(fxplug.GuardError, match="was torch"):
            gm(X())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_inside_forward(dtype: torch.dtype) -> None:
    def function(self: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            y = self.net(x)
            with torch.autocast("cpu", enabled=False):
                z = self.net(y.float())
        return y, z, self.net(x)

    gm = traced_same(Model(function, net=Net()), X())
    assert targets(gm).count(ops.enter_autocast) == targets(gm).count(ops.exit_autocast) == 2
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_outside_forward() -> None:
    model = Net()
    gm = fxplug.trace(model, X())
    with torch.autocast("cpu", torch.bfloat16):
        assert same(model, gm, X()).dtype is torch.bfloat16
        inside = fxplug.trace(model, X())
        same(model, inside, X())


# --- gradient modes


@torch.no_grad()
def detached(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def grad_contexts(self: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        a = self.net(x)
        with torch.enable_grad():
            b = self.net(x)
        c = self.net(x)
    with torch.set_grad_enabled(False):
        d = self.net(x)
    with torch.inference_mode():
        e = self.net(x)
    return a, b, c, d, detached(x), self.net(x), e


def test_gradient_modes_are_the_models_own() -> None:
    model = Model(grad_contexts, net=Net())
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            gm = fxplug.trace(model, X())
    assert targets(gm).count(ops.enter_grad) == targets(gm).count(ops.exit_grad) == 5
    x = X().requires_grad_()
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            out, want = gm(x), model(x)
            assert torch.is_grad_enabled() is mode
            assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))
            assert [t.requires_grad for t in out] == [t.requires_grad for t in want]
    assert [t.requires_grad for t in gm(x)] == [False, True, False, False, False, True, False]


def test_set_grad_enabled_as_a_call() -> None:
    def function(self: Any, x: torch.Tensor) -> Any:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        y = self.net(x)
        torch.set_grad_enabled(before)
        return y

    gm = fxplug.trace(Model(function, net=Net()), X())
    assert not gm(X()).requires_grad
    torch.set_grad_enabled(True)


def _nested_checkpoints(self: Any, x: torch.Tensor) -> torch.Tensor:
    def outer(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.fc(x)
        return checkpoint(self.net, self.fc(x), use_reentrant=True) + shift

    return checkpoint(outer, self.fc(x), use_reentrant=True)


def _checkpoint_under_autocast(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(self.net, self.fc(x), use_reentrant=True)


class Recomputing(torch.autograd.Function):
    """What libraries have for checkpointing: it is given code, runs it without gradients, and again in its backward."""

    @staticmethod
    def forward(ctx: Any, run: Any, factor: int, x: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.factor = run, factor
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.run(x), grad * ctx.factor)
        return None, None, x.grad


CHECKPOINTED = {
    "one": lambda self, x: checkpoint(self.net, self.fc(x), use_reentrant=True),
    "not reentrant": lambda self, x: checkpoint(self.net, self.fc(x), use_reentrant=False),
    "nested": _nested_checkpoints,
    "autocast": _checkpoint_under_autocast,
    "sequential": lambda self, x: checkpoint_sequential([self.net, self.fc], 2, self.fc(x), use_reentrant=True),
}


def gradients(module: nn.Module, model: nn.Module, x: torch.Tensor) -> list[Any]:
    """The gradients of an input and of a model's parameters, by one call of a module that may be its graph."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    module(x).float().pow(2).sum().backward()
    return [None if t.grad is None else t.grad.clone() for t in (x, *model.parameters())]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("real", [None, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointing(name: str, real: bool | None) -> None:
    model = Model(CHECKPOINTED[name], net=Net(), fc=nn.Linear(4, 4)).eval()
    gm = fxplug.trace(model, X(), real=real)
    assert torch.equal(model(X()), gm(X()))
    assert difference(gradients(model, model, X()), gradients(gm, model, X())) is None
    assert "net.fc" in targets(gm)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("result", ["tensor", "dict"])
@pytest.mark.parametrize("given", ["tensor", "in a tuple", "outside"])
@pytest.mark.parametrize("run", ["reentrant", "not reentrant"])
def test_a_checkpoint_has_the_gradients_that_the_model_has(run: str, given: str, result: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        def part(y: torch.Tensor, *more: Any) -> Any:
            out = self.net(y) * (x if given == "outside" else more[0][0] if more else 1)
            return out if result == "tensor" else {"a": out}

        args = (x.detach(), (x,)) if given == "in a tuple" else (x.detach() if given == "outside" else x,)
        out = checkpoint(part, *args, use_reentrant=run != "not reentrant")
        return out if result == "tensor" else out["a"]

    model = Model(forward, net=Net())
    gm = fxplug.trace(model, X())
    for x in (X(), X().requires_grad_()):
        outs = []
        for module in (model, gm):
            model.zero_grad()
            x.grad = None
            out = module(x)
            if out.requires_grad:
                out.sum().backward()
            outs.append((out.requires_grad, [None if t.grad is None else t.grad.clone() for t in (x, *model.parameters())]))
        assert outs[0][0] == outs[1][0]
        assert difference(outs[0][1], outs[1][1]) is None


class Moving(nn.Module):
    """Writes a buffer, which a checkpoint does once more in the backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "norm":
            return self.norm(x)
        if self.kind == "buffer":
            self.calls.add_(1)
            return x * self.calls.detach().clone()
        return F.dropout(x, 0.5, True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("kind", "left"), [("norm", "norm.running_mean"), ("buffer", "calls"), ("dropout", "gradients")])
def test_what_a_checkpoint_does_again_in_the_backward_is_refused(kind: str, left: str, reentrant: bool) -> None:
    model = Model(
        lambda self, x: checkpoint(self.net, x.sin(), use_reentrant=reentrant, preserve_rng_state=False), net=Moving(kind)
    )
    with pytest.raises(fxplug.TraceError, match=f"a checkpoint has its own backward.*{left}"):
        fxplug.trace(model, X().requires_grad_())
    gm = fxplug.trace(model.eval(), X()) if kind == "norm" else None
    if gm is not None:
        with pytest.raises(fxplug.FxplugError, match="a checkpoint"):
            gm.train()


def test_gradients_are_equal() -> None:
    model = Model(lambda self, x: (self.net(x) * x).sum(), net=Net())
    gm = fxplug.trace(model, X())
    model(X()).backward()
    want = model.net.fc.weight.grad.clone()
    model.zero_grad()
    gm(X()).backward()
    assert torch.equal(want, model.net.fc.weight.grad)


# --- regions


def test_a_module_called_twice_and_tied_weights() -> None:
    net = Net()
    model = Model(lambda self, x: self.a(self.b(self.a(x))) + F.linear(x, self.tied), a=net, b=net, tied=net.fc.weight)
    gm = traced_same(model, X())
    assert list(gm.state_dict()) == list(model.state_dict())
    ports = {str(n.meta["port"]) for n in gm.graph.nodes if "port" in n.meta}
    assert {"a", "a@1", "a@2"} <= ports
    assert gm.a is gm.b and gm.tied is gm.a.fc.weight


def test_a_region_that_returns_its_input_and_one_tensor_as_two_ports() -> None:
    class Skips(nn.Module):
        def forward(self, h: torch.Tensor) -> Any:
            h = h + 1
            return h, (h, h)

    model = Model(lambda self, x: self.s(self.i(x)), s=Skips(), i=Model(lambda self, x: x))
    gm = traced_same(model, X())
    ports = [str(n.meta["port"]) for n in gm.graph.nodes if "port" in n.meta]
    assert {"s:out[0]", "s:out[1][0]", "s:out[1][1]", "i"} <= set(ports)


def test_a_callee_changes_the_list_of_its_caller() -> None:
    class Appends(nn.Module):
        def forward(self, x: torch.Tensor, cache: list[Any], at: list[int], named: dict[str, Any]) -> torch.Tensor:
            old = cache[at[0]]
            cache[at[0]] = x * 2
            cache.append(x)
            named["new"] = x - 1
            at[0] += 1
            return x if old is None or old == "Rep" else x + old

    def function(self: Any, x: torch.Tensor) -> Any:
        cache, at, named = [x * 3, "Rep", None], [0], {"old": x}
        mine = cache[0]
        for _ in range(3):
            x = self.a(x, cache, at, named)
        return x, cache, at, named, mine

    traced_same(Model(function, a=Appends()), X())


def test_ports_inside_a_list_and_its_members_stay_the_callers() -> None:
    def function(self: Any, x: torch.Tensor) -> Any:
        skips = [x + 1, (x + 2,)]
        kept = list(skips)
        y = self.a(skips)
        assert skips[0] is kept[0] and skips[1][0] is kept[1][0]
        return y

    model = Model(function, a=Model(lambda self, skips: skips[0] * skips[1][0]))
    gm = traced_same(model, X())
    ports = {str(n.meta["port"]) for n in gm.graph.nodes if "port" in n.meta}
    assert {"a:in.arg0[0]", "a:in.arg0[1][0]"} <= ports


def test_a_result_that_the_callee_keeps() -> None:
    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor, store: list[Any]) -> list[Any]:
            store.append(x * 2)
            return store

    def function(self: Any, x: torch.Tensor) -> Any:
        store: list[Any] = []
        first = self.k(x, store)
        second = self.k(x + 1, store)
        assert first is second is store
        return store

    traced_same(Model(function, k=Keeps()), X())


def test_a_leaf_that_changes_a_list_is_refused() -> None:
    class Appends(nn.Module):
        def forward(self, x: torch.Tensor, cache: list[Any]) -> torch.Tensor:
            cache.append(x)
            return x

    model = Model(lambda self, x: (self.a(x, c := []), c[0])[1], a=Appends())
    with pytest.raises(fxplug.TraceError, match="leaf 'a' changes a list"):
        fxplug.trace(model, X(), leaf="a")


def test_hooks_run_and_are_recorded() -> None:
    model = Model(lambda self, x: self.net(x), net=Net())
    model.net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.net.fc.register_forward_hook(lambda module, args, out: out * 2)
    model.register_forward_hook(lambda module, args, out: out - 3)
    traced_same(model, X())


def test_weight_norm_and_parametrizations() -> None:
    with pytest.warns((FutureWarning, DeprecationWarning)):
        old = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), old, parametrizations.orthogonal(nn.Linear(4, 4)))
    gm = traced_same(model, X())
    assert list(gm.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        (nn.MultiheadAttention(4, 2, batch_first=True), lambda m, x: m(x, x, x, need_weights=False)[0]),
        (nn.MultiheadAttention(4, 2), lambda m, x: m(x, x, x)),
        (nn.LSTM(4, 4, num_layers=2, bidirectional=True), lambda m, x: m(x)),
        (nn.GRU(4, 4), lambda m, x: m(x)[1]),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda m, x: m(x)),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False), lambda m, x: m(x)),
        (nn.BatchNorm1d(3), lambda m, x: m(x)),
        (nn.BatchNorm1d(3, momentum=None), lambda m, x: m(x)),
    ],
)
def test_layers_of_torch(layer: nn.Module, call: Callable[..., Any]) -> None:
    model = Model(lambda self, x: call(self.m, x), m=layer).eval()
    gm = traced_same(model, X(2, 3, 4))
    kept = copy.deepcopy(model.state_dict())
    for module in (model, gm):
        module.train()
    torch.manual_seed(1)
    want = model(X(2, 3, 4))
    model.load_state_dict(kept)
    torch.manual_seed(1)
    assert difference(want, gm(X(2, 3, 4))) is None
    meta = fxplug.trace(copy.deepcopy(model).to("meta"), X(2, 3, 4).to("meta"))
    meta.load_state_dict(model.state_dict(), assign=True)
    same(model.eval(), meta.eval(), X(2, 3, 4))


def test_other_threads_are_not_recorded() -> None:
    other, started, stop = nn.Sequential(Net(), nn.Dropout()), threading.Event(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            assert type(other(torch.ones(1, 4))) is torch.Tensor and other.training
            started.set()

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        started.clear()
        assert started.wait(10)
        return self.net(x)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        gm = fxplug.trace(Model(function, net=Net()), X())
    finally:
        stop.set()
        thread.join()
    assert sum(n.op == "call_module" for n in gm.graph.nodes) == 1 and len(gm.graphs) == 1


# --- in place, random, constants


def in_place(self: Any, x: torch.Tensor) -> Any:
    y = x.clone()
    y[0] = 1
    y[:, 1:] += 2
    y += x
    y *= 2
    y.add_(1).mul_(2)
    z = torch.empty_like(y)
    torch.add(y, 1, out=z)
    F.relu(y, True)
    F.relu(z, inplace=True)
    y.unsqueeze_(0)
    w = torch.zeros(x.shape)
    w[..., 0].fill_(x.shape[0])
    self.add(w)
    return y, z, w, y.shape[0]


def test_in_place_operations() -> None:
    model = Model(in_place, add=Model(lambda self, w: w.add_(1)))
    traced_same(model, X())
    same(model, fxplug.trace(model, X()), X(5, 3))


def test_a_reshape_in_place_of_an_argument_is_seen_by_the_caller() -> None:
    def function(self: Any, x: torch.Tensor) -> Any:
        y = x * 1
        self.a(y)
        return y * y.shape[0], y.dim()

    traced_same(Model(function, a=Model(lambda self, y: y.unsqueeze_(0))), X())


def test_buffers_that_forward_updates() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
        return x * self.count + self.mean

    model = Model(function)
    model.register_buffer("count", torch.tensor(0))
    model.register_buffer("mean", torch.tensor(0.0))
    gm = copy.deepcopy(fxplug.trace(model, X()))
    assert model.count == 0
    for _ in range(3):
        assert torch.equal(model(X()), gm(X()))
    assert model.count == gm.count == 3


def test_randomness_is_bit_equal_with_a_seed() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)  # takes from the generator although nobody uses it
        x = F.dropout(x, 0.5, self.training) + torch.randn_like(x) + torch.rand(x.shape[0], 1)
        return self.drop(x) + x.new_empty(x.shape).bernoulli_(0.5)

    model = Model(function, drop=nn.Dropout(0.5)).train()
    gm = fxplug.trace(model, X())
    for mode in (True, False):
        same(model.train(mode), gm.train(mode), X(3, 4))


def test_two_modes_are_two_graphs() -> None:
    def drop_path(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * x.new_empty(x.shape[0], 1).bernoulli_(0.7) / 0.7

    model = Model(lambda self, x: x + self.d(x), d=Model(drop_path)).eval()
    gm = fxplug.trace(model, X())
    assert len(gm.graphs) == 2
    assert model.training is False
    for mode in (True, False, True):
        same(model.train(mode), gm.train(mode), X(5, 4))
    same(model, copy.deepcopy(gm), X(5, 4))


def test_constants() -> None:
    table = torch.arange(4.0)

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        small = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        large = torch.tensor(list(range(40)), dtype=x.dtype).view(10, 4).sum(0)
        small += 1
        return x + self.plain + small + large + torch.from_numpy(np.arange(4)) + table + self.holder["t"][0]

    model = Model(function, plain=torch.ones(4), holder={"t": [torch.ones(4)]})
    gm = traced_same(model, X())
    same(model, gm, X(5, 4))
    same(model, gm, X(5, 4))
    assert list(gm.state_dict()) == list(model.state_dict()) == []
    assert gm.plain.device.type == "cpu"


TWO = np.float64(2.0)


def test_numpy_scalars() -> None:
    def function(self: Any, x: torch.Tensor, scale: Any = TWO) -> Any:
        return x * np.float64(0.5) + np.int64(2) * x.view(np.int64(-1)).sum() * np.sqrt(2), np.float32(1.5), scale

    gm = fxplug.trace(Model(function), X())
    assert torch.equal(gm(X())[0], function(None, X())[0]) and gm(X())[1] == 1.5


def test_a_negative_base() -> None:
    traced_same(Model(lambda self, x: (-1) ** torch.arange(4) * x + (-2.0) ** torch.arange(4)), X())


# --- values


def branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(x) + 1


def decide(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def test_a_branch_on_data_is_refused_with_a_way_out() -> None:
    model = Model(branch, b=Model(decide))
    with pytest.raises(fxplug.TraceError, match=r"test_trace\.py:\d+: return x \* 2 if .*leaf: \[b\]"):
        fxplug.trace(model, X())
    gm = fxplug.trace(model, X(), leaf=["b"])
    for x in (X(), -X(), X(3, 4)):
        same(model, gm, x)
    gm = fxplug.trace(model, X().abs(), real=True)
    same(model, gm, X(3, 4).abs())
    with pytest.raises(fxplug.GuardError, match=r"test_trace\.py:\d+: 'return x \* 2 if"):
        gm(-X().abs())
    with pytest.raises(fxplug.TraceError, match="leaf"):
        fxplug.trace(model, X(), real=False)


def test_a_model_that_reads_values_is_traced_on_real_tensors() -> None:
    def function(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        lengths = mask.sum(1).tolist()
        parts = [x[i, :n] for i, n in enumerate(lengths)]
        return torch.cat(parts).sum(0) * mask.sum().item() + x[mask].mean()

    mask = torch.tensor([[True, True, False], [True, False, False]])
    model = Model(function)
    gm = traced_same(model, X(2, 3, 4), mask)
    same(model, gm, X(2, 3, 4), ~mask)
    with pytest.raises(fxplug.GuardError):
        gm(X(3, 3, 4), torch.ones(3, 3, dtype=torch.bool))


def test_equality_of_tensors_is_a_guard() -> None:
    model = Model(lambda self, x, ids: x * 2 if torch.equal(ids, torch.zeros(2, dtype=torch.long)) else x)
    gm = traced_same(model, X(), torch.tensor([0, 0]))
    with pytest.raises(fxplug.GuardError):
        gm(X(), torch.tensor([0, 1]))


def test_numpy_of_data_is_held_by_a_guard() -> None:
    model = Model(lambda self, x, ids: x * int(np.cumsum(ids.numpy())[-1]))
    gm = traced_same(model, X(), torch.tensor([1, 2]))
    with pytest.raises(fxplug.GuardError):
        gm(X(), torch.tensor([1, 3]))
    with pytest.raises(fxplug.TraceError, match="converts a tensor to a value outside torch"):
        fxplug.trace(Model(lambda self, x: x * float(x.numpy().sum())), X(100, 10))


def test_what_does_not_report_to_torch_is_refused() -> None:
    def hidden(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # as an extension does
            return x * 2

    model = Model(lambda self, x: self.d(x) + 1, d=Model(hidden))
    for real in (None, True):
        with pytest.raises(fxplug.TraceError, match=r"leaf: \[d\]"):
            fxplug.trace(model, X(), real=real)
    traced_same(model, X(), leaf="d")


def test_what_fails_on_fake_tensors_is_tried_on_real_ones() -> None:
    with pytest.warns((FutureWarning, DeprecationWarning)):
        script = torch.jit.trace(lambda x: x * 2, X())
    setattr(script, SCRIPTED, None)  # as of a function that was loaded
    model = Model(lambda self, x: script(x) + 1)
    with pytest.warns(UserWarning, match=r"Model was traced on its real tensors: RuntimeError: .*TorchScript"):
        same(model, fxplug.trace(model, X()), X())
    with pytest.raises(fxplug.TraceError, match="fails only while it is traced: RuntimeError: .*Script.*remove real=False"):
        fxplug.trace(model, X(), real=False)


def test_what_fails_only_while_it_is_traced_is_told_as_a_trace_error() -> None:
    def nested(layout: torch.layout) -> Any:
        return lambda self, x: torch.nested.nested_tensor([row.detach() for row in x], layout=layout).to_padded_tensor(0.0)

    for layout, text in (
        (torch.strided, r"test_trace.py:\d+.* fails only while it is traced"),
        (torch.jagged, r"test_trace.py:\d+.* is a torch.jagged tensor, which a graph cannot hold"),
    ):
        with pytest.raises(fxplug.TraceError, match=text):
            fxplug.trace(Model(nested(layout)), X())
    with pytest.raises(ZeroDivisionError):  # the model's own
        fxplug.trace(Model(lambda self, x: x / (1 // 0)), X())


def test_a_sparse_tensor_that_a_module_holds_is_refused() -> None:
    eye = torch.eye(4).to_sparse()
    with pytest.raises(fxplug.TraceError, match=r"'eye' is a torch.sparse_coo tensor.*to_dense"):
        fxplug.trace(Model(lambda self, x: x @ self.eye.to_dense(), eye=eye), X())


def test_reading_values_is_told_and_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda self, x, n: x * n.item())
    with pytest.warns(UserWarning, match=r"its real tensors: Model reads a value from its data \(.*n\.item"):
        fxplug.trace(model, (X(), torch.tensor(2)))
    with warnings.catch_warnings(action="error"):
        fxplug.trace(model, (X(), torch.tensor(2)), real=True)
    runs: list[bool] = []
    tracer = fxplug.core.capture.tracer
    run = tracer._run
    monkeypatch.setattr(tracer, "_run", lambda job, on_fakes, *rest: runs.append(on_fakes) or run(job, on_fakes, *rest))

    def failing(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise self.error

    for error in (ValueError("on purpose"), RuntimeError("no such size"), NotImplementedError("later"), KeyError("a")):
        runs.clear()
        with pytest.raises(type(error)) as caught:
            fxplug.trace(Model(failing, error=error), X())
        assert caught.value is error and runs == [True]
        assert error.__notes__ and "on fake tensors" in error.__notes__[0]
    with pytest.raises(RuntimeError, match="same reduction dim"):
        fxplug.trace(Model(lambda self, x: x @ torch.zeros(9, 9)), X())


def test_where_real_tensors_do_not_help_both_errors_are_told() -> None:
    def twice(self: Any, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if n.item() == 0:
            return x
        raise ValueError("and then this")

    with pytest.raises(fxplug.TraceError, match=r"(?s)branches on a value.*on fake tensors, failed with: Model reads a value"):
        fxplug.trace(Model(decide), X())
    with pytest.raises(ValueError, match=r"(?s)and then this.*on fake tensors, failed with: Model reads a value"):
        fxplug.trace(Model(twice), (X(), torch.tensor(2)))


@pytest.mark.parametrize(
    "leaf",
    [
        lambda self, x: x * float(x.numpy().sum()),
        lambda self, x: x * x.sum().item(),
        lambda self, x: x * (2 if x.sum() > 0 else 3),
        lambda self, x: x * x.nonzero().shape[0],
        lambda self, x: x * len(x.tolist()),
        lambda self, x: x * float(np.asarray(x).sum()),
    ],
)
def test_a_leaf_may_read_values(leaf: Any) -> None:
    model = Model(lambda self, x: self.b(x) + 1, b=Model(leaf))
    same(model, fxplug.trace(model, X(), leaf="b"), X(5, 4))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.strength * grad, None


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.round(), x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        return grad


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.clamp_(-0.1, 0.1)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


BACKWARDS = {
    "reversed": lambda self, x: Reversed.apply(self.fc(x), x.shape[0] / 4),
    "straight through": lambda self, x: torch.cat(Straight.apply(self.fc(x) * 9)),
    "in place": lambda self, x: Clamped.apply(self.fc(x)) * 2,
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler of torch 2.13
@pytest.mark.parametrize("real", [None, True])
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_of_its_own_is_in_the_graph(name: str, real: bool | None, tmp_path: Path) -> None:
    model = Model(lambda self, x: self.d(x) + 1, d=Model(BACKWARDS[name], fc=nn.Linear(4, 4)))
    gm = fxplug.trace(model, X(), real=real)
    for each in (gm, copy.deepcopy(gm), torch.compile(gm, backend="eager", fullgraph=True)):
        for x in (X(), X(5, 4)):
            want = gradients(model, model, x)
            assert difference(model(x), each(x)) is None
            weights = each if isinstance(each, fxplug.TracedModule) else model
            assert difference(want, gradients(each, weights, x)) is None
    with pytest.raises(fxplug.ArtifactError, match=r"calls test_trace\.\w+, .*leaf: \[d\]"):
        fxplug.save(gm, tmp_path)


@pytest.mark.parametrize("real", [None, True])
def test_a_backward_of_its_own_that_is_given_code_is_refused(real: bool | None) -> None:
    model = Model(lambda self, x: self.d(x), d=Model(lambda self, x: Recomputing.apply(self.net, 2, x), net=Net())).eval()
    with pytest.raises(fxplug.TraceError, match=r"Recomputing has a backward of its own.*plain values.*leaf: \[d\]"):
        fxplug.trace(model, X(), real=real)


def test_what_fake_tensors_cannot_do_is_said_with_its_cause() -> None:
    def loads(self: Any, x: torch.Tensor) -> Any:
        self.a.load_state_dict(self.b.state_dict())
        return self.a(x)

    with pytest.raises((fxplug.TraceError, AttributeError), match="no attribute 'names'"):  # newer torch has none
        fxplug.trace(Model(lambda self, x: x * 2 if x.names[0] is None else x), X())
    with pytest.raises(fxplug.TraceError, match=r"Error\(s\) in loading state_dict for Linear: .*weight"):
        fxplug.trace(Model(loads, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), X())


def test_a_batch_norm_in_a_checkpoint_without_values_is_a_warning() -> None:
    def checked(self: Any, x: torch.Tensor) -> Any:
        return checkpoint(self.norm, x, use_reentrant=False)

    model = Model(checked, norm=nn.BatchNorm1d(4)).to("meta")
    with pytest.warns(UserWarning, match="a checkpoint runs its code again.*'norm'.*statistics twice"):
        fxplug.trace(model.train(), X().to("meta"))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb"])
def test_a_module_name_that_no_artifact_has_is_refused(name: str) -> None:
    model = Model(lambda self, x: self._modules[name](x), **{name: nn.Linear(4, 4)})
    with pytest.raises(fxplug.TraceError, match="the name .* of a module or tensor cannot be written"):
        fxplug.trace(model, X())


def test_pythons_random_numbers_are_refused() -> None:
    state = random.getstate()
    model = Model(lambda self, x: x * random.random())
    with pytest.raises(fxplug.TraceError, match="draws random numbers from Python's 'random'"):
        fxplug.trace(model, X())
    assert random.getstate() == state


# --- nothing is left behind


class Holder:
    def __init__(self) -> None:
        self.cache: dict[str, Any] = {}
        self.last: Any = None

    @functools.lru_cache  # noqa: B019
    def table(self, n: int) -> torch.Tensor:
        return torch.arange(float(n))


@functools.cache
def cached_table(n: int) -> torch.Tensor:
    return torch.arange(float(n))


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.holder = Holder()
        self.nested = {"a": [{"b": []}]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        self.latest = x
        self.holder.last = x
        self.holder.cache["x"] = [x]
        self.nested["a"][0]["b"].append(x)
        if not hasattr(self, "lazy"):
            self.register_buffer("lazy", torch.ones(4), persistent=False)
        return x + self.holder.table(4) + cached_table(4) + self.lazy


class Failing(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise ValueError("on purpose")


def test_a_compiled_model_is_told() -> None:
    with pytest.raises(fxplug.TraceError, match="a module from torch.compile: trace the model itself"):
        fxplug.trace(torch.compile(nn.Linear(2, 2), backend="eager"), (torch.ones(1, 2),))


def test_a_compiled_part_of_a_model_is_in_its_graph_and_stays_compiled() -> None:
    compiled: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), Model(lambda self, x: self.fc(x).relu(), fc=nn.Linear(4, 4)))
    model[1].compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
    model.compile(backend="eager")
    gm = fxplug.trace(model, X())
    assert [str(node.target) for node in gm.graph.nodes if node.op == "call_module"] == ["0", "1.fc"] and not compiled
    assert not [m for m in gm.modules() if vars(m).get("_compiled_call_impl")]
    assert torch.equal(model[1](X()), gm.get_submodule("1.fc")(X()).relu()) and len(compiled) == 1


@pytest.mark.parametrize("kind", [Stateful, Failing])
@pytest.mark.parametrize("real", [None, True])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(kind: type[Stateful], real: bool | None, training: bool) -> None:
    model = kind().train(training)
    model.net[2].eval()
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    values = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [m.training for m in model.modules()]
    random_state = torch.get_rng_state()
    call = nn.Module._call_impl, torch.autocast.__enter__, torch.no_grad.__enter__, torch.from_numpy
    if kind is Failing:
        with pytest.raises(ValueError, match="on purpose"):
            fxplug.trace(model, X(), real=real)
    else:
        with pytest.raises(fxplug.TraceError, match="forward stores .*nested.*b"):  # its list grows
            fxplug.trace(model, X(), real=real)
        gm = fxplug.trace(model, X(), real=real, check=False)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in values.items())
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(random_state, torch.get_rng_state())
    assert call == (nn.Module._call_impl, torch.autocast.__enter__, torch.no_grad.__enter__, torch.from_numpy)
    assert "training" not in vars(nn.Module)
    assert [model.holder.last, model.holder.cache, model.nested] == [None, {}, {"a": [{"b": []}]}]
    assert not any(isinstance(t, FakeTensor) for t in list_leaves([vars(m) for m in model.modules()]))
    assert type(cached_table(4)) is type(model.holder.table(4)) is torch.Tensor
    if kind is Stateful:
        same(model.eval(), gm.eval(), X())


def test_a_traced_module_can_be_copied() -> None:
    model = Model(lambda self, x: self.net(x) + self.plain, net=Net(), plain=torch.ones(4))
    gm = fxplug.trace(model, X())
    twin = copy.deepcopy(gm)
    same(gm, twin, X(3, 4))
    with torch.no_grad():
        twin.net.fc.weight.zero_()
    assert not torch.equal(gm(X()), twin(X()))


def test_the_users_errors_stay_theirs_and_say_where() -> None:
    def function(self: Any, x: torch.Tensor) -> Any:
        return x @ torch.ones(9, 9)

    with pytest.raises(RuntimeError) as caught:
        fxplug.trace(Model(lambda self, x: self.f(x), f=Model(function)), X())
    assert any("while tracing 'f' " in note for note in caught.value.__notes__)


def test_misuse() -> None:
    gm = fxplug.trace(Net(), X())
    for wrong, message in ((gm, "a traced module already"), (torch.ones(1), "takes an nn.Module")):
        with pytest.raises(fxplug.TraceError, match=message):
            fxplug.trace(wrong, X())
    with pytest.raises(fxplug.TraceError, match="names no module"):
        fxplug.trace(Net(), X(), leaf="fd")
    for function in (functools.partial(fxplug.trace, Net()), functools.partial(fxplug.verify, gm, gm)):
        with pytest.raises(fxplug.SpecError, match="this is a Tensor: give several positional arguments as one tuple"):
            function(X(), X())


class Between(nn.Module):
    """Decides on a size, and looks a module up by a name that is not an identifier, between no_grad and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(4, 4)})

    def forward(self, x):
        with torch.no_grad():
            assert x.shape[0] != 3, 'getattr(self.layers, "0")'
            y = self.layers["0"](x)
        return self.layers["0"](y)


def test_an_error_between_two_modes_gives_the_first_back():
    gm = fxplug.trace(Between(), torch.randn(2, 4))
    with pytest.raises(fxplug.GuardError):
        gm(torch.randn(3, 4))
    assert torch.is_grad_enabled()


def test_generated_code_looks_modules_up_by_index_and_leaves_text_alone():
    gm = fxplug.trace(Between(), torch.randn(2, 4))
    assert "self.layers[0](" in gm.code and """getattr(self.layers, "0")""" in gm.code.replace("\\", "")


class Unreported(nn.Module):
    mapped = staticmethod(torch.vmap(lambda v: v.sin()))

    def forward(self, x):
        return self.mapped(x)


class Masked(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Raising(nn.Module):
    def forward(self, x):
        raise ValueError("its own")


def test_errors_name_the_line_of_the_model_and_not_of_its_caller():
    with pytest.raises(fxplug.TraceError, match=r"^the result of Unreported: a tensor is from a function"):
        fxplug.trace(Unreported(), torch.randn(2, 3))
    with pytest.raises(fxplug.TraceError, match=r"test_trace\.py:\d+: return x\[x > 0\]"):
        fxplug.trace(Masked(), torch.randn(2, 3), real=False)
    with pytest.raises(ValueError, match="its own") as caught:
        fxplug.trace(Raising(), torch.randn(2, 3))
    assert 'raise ValueError("its own")' in caught.value.__notes__[0]


def test_a_constant_list_is_held_in_eager_and_in_an_interpreter():
    class Picks(nn.Module):
        def forward(self, x, picks):
            return sum(x[i] for group in picks for i in group)

    x, picks = torch.arange(4.0), [[1], [2, 3]]
    gm = fxplug.trace(Picks(), (x, picks))
    assert fxplug.verify(gm, gm, (x, picks), compile=False).ok
    assert torch.equal(gm(x, [[1], [2, 3]]), torch.tensor(6.0))
    with pytest.raises(fxplug.GuardError, match=r"argument 'picks' was \[\[1\], \[2, 3\]\]"):
        gm(x, [[1], [2]])


def test_sizes_that_depend_on_data_are_not_propagated_and_verify_says_so():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, mask):
            return self.fc(x[mask])

    x, mask = torch.randn(3, 4), torch.tensor([True, False, True])
    gm = fxplug.trace(Chosen(), (x, mask))
    new = fxplug.apply(gm, fxplug.load_pass("lora", rank=2))
    status = {c.name: (c.status, c.detail) for c in fxplug.verify(gm, new, (x, mask), compile=False).checks}
    assert status["shapes"] == ("skipped", "the model's sizes depend on its data, which fake tensors do not have")
    assert status["neutral"][0] == "ok" and torch.equal(new(x, ~mask), gm(x, ~mask))


def test_attributes_of_input_tensors_are_told() -> None:
    model = Model(lambda self, x: x * getattr(x, "mark", 1.0))
    gm, marked = fxplug.trace(model, X()), X()
    marked._own = 1  # of a library
    assert torch.equal(gm(marked), model(marked))
    marked.mark = 3.0
    with pytest.raises(fxplug.GuardError, match="argument 'args\\[0\\]' is a tensor with the attribute 'mark'"):
        gm(marked)
    with pytest.raises(fxplug.TraceError, match="is a tensor with the attribute 'mark', which a graph cannot read"):
        fxplug.trace(model, marked)


@pytest.mark.parametrize("name", ['a"b', "a\\", "\\n", "a\nb", "a@1", '"""'])
def test_a_name_that_no_code_can_have_is_refused(name: str) -> None:
    for put in (
        lambda m: m.add_module(name, nn.Linear(4, 4)), lambda m: m.register_buffer(name, torch.ones(4)),
        lambda m: m.register_parameter(name, nn.Parameter(torch.ones(4))),
    ):  # fmt: skip
        model = Model(lambda self, x: x * 2)
        put(model)
        with pytest.raises(fxplug.TraceError, match="the name .* cannot be written into a graph"):
            fxplug.trace(model, X())


@pytest.mark.parametrize("name", ["a.b", "", "e\u0301"])
def test_a_name_that_torch_itself_refuses_is_refused(name: str) -> None:
    for put in ("_modules", "_buffers"):
        model = Model(lambda self, x: x * 2)
        getattr(model, put)[name] = nn.Linear(4, 4) if put == "_modules" else torch.ones(4)
        with pytest.raises(fxplug.TraceError, match="the name .* cannot be written into a graph"):
            fxplug.trace(model, X())


@pytest.mark.parametrize("name", ["torch", "slice", "inf", "nan", "NoneType"])
def test_an_argument_that_hides_a_name_of_the_code_is_refused(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def forward(self, x, {name}=None): return x[:1] * 2", space)
    model = type("Hiding", (nn.Module,), {"forward": space["forward"]})()
    with pytest.raises(fxplug.TraceError, match=f"an argument '{name}', which hides a name .*: rename it"):
        fxplug.trace(model, X())


def test_what_an_operation_says_about_dtypes_is_held() -> None:
    for function in (
        lambda self, x: x * torch.result_type(x, 1.0).itemsize, lambda self, x: x * len(x.type()),
        lambda self, x: x.sin() if torch.can_cast(x.dtype, torch.float32) else x.cos(),
        lambda self, x: x.sin() if torch.promote_types(x.dtype, torch.float16) == torch.float32 else x.cos(),
    ):  # fmt: skip
        model = Model(lambda self, x, f=function: f(self, self.fc(x)), fc=nn.Linear(4, 4))
        gm = fxplug.trace(model, X())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            with contextlib.suppress(fxplug.GuardError):
                assert torch.equal(model(X()), gm(X()))


@pytest.mark.parametrize("name", ["contiguous", "to", "flatten", "dropout"])
def test_whether_an_operation_gives_its_argument_itself_is_held(name: str) -> None:
    operations = {
        "contiguous": lambda x: x.contiguous(), "to": lambda x: x.to(torch.float32), "flatten": lambda x: x.flatten(1),
        "dropout": lambda x: F.dropout(x, 0.5, False),
    }  # fmt: skip

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = operations[name](x)
        return x.sin() if y is x else y.cos()

    model = Model(forward)
    calls = X(), X(4, 4).t(), X(4, 4).double()
    for example in calls:
        gm = fxplug.trace(model, example)
        assert torch.equal(model(example), gm(example))
        for other in calls:
            try:
                assert torch.equal(model(other), gm(other))
            except fxplug.GuardError as error:
                assert other is not example, error


def test_whether_an_input_is_a_parameter_is_held() -> None:
    model = Model(lambda self, x: x.sin() if isinstance(x, nn.Parameter) else x.cos())
    gm = fxplug.trace(model, X())
    assert torch.equal(model(X()), gm(X()))
    with pytest.raises(fxplug.GuardError, match="depends on whether it is a parameter"):
        gm(nn.Parameter(X()))


def test_text_that_can_be_read_again_is_no_text_for_people() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn(f"size {x.shape[0]}", stacklevel=1)
        return x * len(str(caught[0].message))

    gm = fxplug.trace(Model(forward), X())
    assert torch.equal(Model(forward)(X()), gm(X()))
    with pytest.raises(fxplug.GuardError):
        gm(X(10, 4))
