"""What Python can see of a call beside its numbers is guarded: numbers of parts, dimensions, arguments, dtypes, texts."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import fxplug
from fxplug import GuardError, TraceError
from fxplug.core.ir import ops


class Function(nn.Module):
    """A function as a module, with flags."""

    flag: ClassVar[bool] = False
    on: ClassVar[bool] = True
    nothing: ClassVar[None] = None

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, x, *args):
        return self.function(self, x, *args)


def equal_or_guarded(model: nn.Module, gm: nn.Module, args: Any, kwargs: Any = None) -> None:
    """A call gives what the model gives, or is a GuardError."""
    wanted = model(*args, **(kwargs or {}))
    try:
        got = gm(*args, **(kwargs or {}))
    except GuardError:
        return
    assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def weighed(parts: Any) -> torch.Tensor:
    return sum(part.sum() * (index + 1) for index, part in enumerate(parts))


aten = torch.ops.aten
PARTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "chunk, keywords in another order": lambda x: x.chunk(dim=0, chunks=3),
    "chunk by name": lambda x: torch.chunk(dim=0, input=x, chunks=2),
    "chunk that is counted": lambda x: [x * len(x.chunk(3))],
    "unsafe_split": lambda x: x.unsafe_split(2),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 3),
    "split by name": lambda x: torch.split(tensor=x, split_size_or_sections=2),
    "split_copy": lambda x: torch.split_copy(x, 2),
    "unbind_copy": lambda x: torch.unbind_copy(x),
    "unbind, negative": lambda x: x.unbind(dim=-2),
    "aten.split.Tensor": lambda x: aten.split.Tensor(x, 2),
    "aten.split": lambda x: aten.split(x, 2, 0),
    "aten.chunk.default": lambda x: aten.chunk.default(x, 3),
    "aten.unbind.int": lambda x: aten.unbind.int(x),
    "aten.tensor_split.sections": lambda x: aten.tensor_split.sections(x, 3),
    "reversed": reversed,
    "iterated": iter,
    "starred": lambda x: [*x],
    "squeeze by name": lambda x: [torch.squeeze(input=x[:, :1]).flatten() * torch.squeeze(input=x[:, :1]).dim()],
    "aten.squeeze.default": lambda x: [x * aten.squeeze.default(x).dim()],
    "aten.squeeze.dims": lambda x: [x * aten.squeeze.dims(x, [0, 1]).dim()],
    "squeeze_copy": lambda x: [x * torch.squeeze_copy(x).dim()],
    "squeeze_": lambda x: [x * x.clone().squeeze_().ndim],
    "cov": lambda x: [x * x.cov().dim()],
    "corrcoef": lambda x: [x * len(torch.corrcoef(x).shape)],
}


@pytest.mark.parametrize("name", PARTS)
def test_numbers_of_parts_and_dimensions(name: str) -> None:
    model = Function(lambda s, x: weighed(PARTS[name](x)))
    gm = fxplug.trace(model, torch.rand(6, 2))
    for rows in (6, 1, 2, 4, 5, 7):
        equal_or_guarded(model, gm, (torch.arange(2.0 * rows).view(rows, 2),))
    assert torch.equal(gm(torch.ones(6, 2)), model(torch.ones(6, 2)))


def test_parts_that_python_counts_itself_are_not_guarded() -> None:
    def halves(s, x):
        a, b = x.chunk(2, -1)
        return a * b

    gm = fxplug.trace(Function(halves), torch.rand(2, 8))
    assert not gm.graph.find_nodes(op="call_function", target=ops.guard)
    assert gm(torch.rand(2, 6)).shape == (2, 3)


class Leaf(nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Pair(NamedTuple):
    a: Any
    b: Any


LEAVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a list by size": (lambda x: list(x.unbind(0)), weighed),
    "a tuple by size": (lambda x: x.split(2), weighed),
    "None, then a tensor": (lambda x: (x, x.mean() if len(x) > 2 else None), lambda o: o[0].sum() if o[1] is None else o[1]),
    "another rank": (lambda x: x.squeeze(), lambda o: o.sum() * o.dim()),
    "another type": (lambda x: [x] if len(x) > 2 else (x,), lambda o: o[0] * (2 if isinstance(o, list) else 3)),
    "a named tuple": (lambda x: Pair(x, x) if len(x) > 2 else (x, x), lambda o: o[0] * (2 if hasattr(o, "a") else 3)),
    "other keys": (
        lambda x: {"a" if len(x) > 2 else "b": x},
        lambda o: o.get("a", o.get("b")) * len("a" if "a" in o else "bb"),
    ),
    "a text": (lambda x: (x, "many" if len(x) > 2 else "few"), lambda o: o[0] * len(o[1])),
}


@pytest.mark.parametrize("name", LEAVES)
def test_results_of_leaves(name: str) -> None:
    inner, outer = LEAVES[name]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Leaf(inner)

        def forward(self, x):
            return outer(self.part(x))

    model = Model()
    gm = fxplug.trace(model, torch.rand(2, 3), leaf=["part"])
    assert torch.equal(gm(torch.ones(2, 3)), model(torch.ones(2, 3)))
    with pytest.raises(GuardError, match="structure_of"):
        gm(torch.rand(1, 3) if name == "another rank" else torch.rand(5, 3))


t, u = torch.ones(3), torch.full((3,), 5.0)
OD = collections.OrderedDict
by_place = lambda s, x, o: x + sum(v * (i + 1) for i, v in enumerate(o.values()))  # noqa: E731
first = lambda s, x, o: x * o[0]  # noqa: E731
CALLS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "a dict in another order": (by_place, {"a": t, "b": u}, {"b": u, "a": t}),
    "a dict within a list": (lambda s, x, o: by_place(s, x, o[0]), [{"a": t, "b": u}], [{"b": u, "a": t}]),
    "plain numbers in another order": (by_place, {"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "list, then tuple": (lambda s, x, o: x * (2 if isinstance(o, list) else 3), [t], (t,)),
    "tuple, then list, of numbers": (lambda s, x, o: x * (2 if isinstance(o, list) else 3), (1, 2), [1, 2]),
    "dict, then OrderedDict": (lambda s, x, o: x * (2 if isinstance(o, OD) else 3), {"a": t}, OD(a=t)),
    "numbers, dict, then OrderedDict": (lambda s, x, o: x * (2 if isinstance(o, OD) else 3), {"a": 1}, OD(a=1)),
    "named tuple, then tuple": (lambda s, x, o: x * (2 if hasattr(o, "a") else 3), Pair(t, u), (t, u)),
    "2, then 2.0": (first, [2], [2.0]),
    "1, then True": (first, [1], [True]),
    "within two containers": (lambda s, x, o: x * o["a"][0], {"a": [2]}, {"a": [2.0]}),
    "keys 1 and True": (lambda s, x, o: x * (2 if isinstance(next(iter(o)), bool) else 3), {1: 2}, {True: 2}),
    "0.0, then -0.0": (lambda s, x, o: x / o[0], [0.0], [-0.0]),
    "a float, then numpy's": (lambda s, x, o: x * o[0] * (2 if isinstance(o[0], np.generic) else 3), [2.0], [np.float64(2)]),
    "a size, then a tuple": (lambda s, x, o: x * (2 if isinstance(o, torch.Size) else 3), torch.Size([2]), (2,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_order_and_types_of_arguments(name: str) -> None:
    function, given, another = CALLS[name]
    x = torch.ones(2, 3, dtype=torch.long)
    gm = fxplug.trace(Function(function), (x, given))
    assert torch.equal(gm(x, given), function(None, x, given))
    with pytest.raises(GuardError, match=r"argument 'args"):
        gm(x, another)


class Named(nn.Module):
    def forward(self, x, a=None, b=None, **rest):
        return x + a - b + sum(v * (i + 1) for i, v in enumerate(rest.values()))


def test_keywords() -> None:
    """Named arguments may come in any order; the order of those in `**rest` can be seen by forward."""
    x, v = torch.ones(3), torch.full((3,), 7.0)
    model = Named()
    gm = fxplug.trace(model, x, {"a": t, "b": u, "c": v, "d": x})
    for order in ("abcd", "bacd", "cadb", "cbda"):
        values = {"a": t, "b": u, "c": v, "d": x}
        assert torch.equal(gm(x, **{k: values[k] for k in order}), model(x, **{k: values[k] for k in order}))
    with pytest.raises(GuardError, match="argument 'rest' had its members in the order"):
        gm(x, a=t, b=u, d=x, c=v)


def test_plain_arguments_of_odd_types() -> None:
    """NaN and sizes can be arguments; numpy's numbers are refused with what to give in their place."""
    x = torch.ones(2)
    for value in (float("nan"), [float("nan"), 1.0], torch.Size([2, 3]), (torch.Size([2]), 1), 1j):
        gm = fxplug.trace(Function(lambda s, x, o: x * 1), (x, value))
        assert torch.equal(gm(x, value), x)
    with pytest.raises(TraceError, match=r"argument .args. is a tuple with a float64 \(give float"):
        fxplug.trace(Function(lambda s, x, o: x * o), (x, np.float64(2)))


DTYPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a long list": lambda x: torch.tensor([0.1] * 17),
    "a long list of complex numbers": lambda x: torch.as_tensor([0.1j] * 17),
    "a table": lambda x: torch.tensor([[0.1] * 9] * 2),
    "torch.Tensor of a list": lambda x: torch.Tensor([0.1]),
    "torch.Tensor of sizes": lambda x: torch.Tensor(2).zero_(),
    "torch.Tensor of nothing": lambda x: torch.cat([torch.Tensor(), x]),
    "finfo": lambda x: x * torch.finfo().eps,
    "result_type": lambda x: x.long().to(torch.result_type(x.long(), 1.0)),
    "a short list": lambda x: torch.tensor([0.1]),
    "another dtype": lambda x: torch.tensor([0.1] * 17, dtype=torch.float32),
    "whole numbers": lambda x: torch.tensor([1] * 17),
    "numpy": lambda x: torch.as_tensor(np.ones(17)),
}


@pytest.mark.parametrize("name", DTYPES)
def test_default_dtype(name: str) -> None:
    model = Function(lambda s, x: DTYPES[name](x))
    gm = fxplug.trace(model, torch.ones(2))
    assert gm(torch.ones(2)).dtype == model(torch.ones(2)).dtype
    torch.set_default_dtype(torch.float64)
    try:
        x = torch.ones(2, dtype=torch.float32)
        equal_or_guarded(model, gm, (x,))
        if name in ("another dtype", "whole numbers", "numpy", "a short list"):
            gm(x)
    finally:
        torch.set_default_dtype(torch.float32)


# --- Python that decides in odd ways


class Keeper(logging.Handler):
    def emit(self, record):
        LAST.append(record.getMessage())


LAST: list[str] = []
LOGGER = logging.getLogger("fxplug.test_guards")


def big_and(s, x):
    y = (big := x.shape[0] > 4) and s.flag
    return x * (2 if big or y else 1)


def big_not(s, x):
    if not (big := x.shape[0] > 4) and s.flag:
        pass
    return x * (2 if big else 1)


def big_while(s, x):
    while (big := x.shape[0] > 4) and s.flag:
        break
    return x * (2 if big else 1)


def big_assert(s, x):
    assert (big := x.shape[0] > 4) or s.on
    return x * (2 if big else 1)


def big_comprehension(s, x):
    any(0 for _ in range(2) if (big := x.shape[0] > 4) and s.flag)
    return x * (2 if [0 for _ in range(1) if (big := x.shape[0] > 4) and s.flag] or big else 1)


def big_lambda(s, x):
    found = (lambda: ((big := x.shape[0] > 4) and s.flag, big))()
    return x * (2 if found[1] else 1)


def big_layout(s, x):
    if big := x.shape[0] > 4:
        x = x.contiguous()
    return x * (2 if big else 1)


def kept_in_a_list(s, x):
    found: list[bool] = []
    if found.append(x.shape[0] > 4) or s.on:
        pass
    return x * (2 if found[0] else 1)


def value_of_and(s, x):
    n = (x.shape[0] - 3) and s.nothing
    return x if n is None else x * 2


def suppressed(s, x):
    fits = False
    with contextlib.suppress(RuntimeError):
        x.view(-1, 3, 4)
        fits = True
    return x * (2 if fits else 1)


@contextlib.contextmanager
def swallow() -> Iterator[None]:
    with contextlib.suppress(RuntimeError):
        yield


class Swallow:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


def swallowed(s, x):
    fits = False
    with torch.no_grad(), swallow():
        x.view(-1, 3, 4)
        fits = True
    return x * (2 if fits else 1)


def swallowed_by_a_class(s, x):
    fits, context = False, Swallow()
    with context:
        x.view(-1, 3, 4)
        fits = True
    return x * (2 if fits else 1)


def swallowed_by_a_stack(s, x):
    fits = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(swallow())
        x.view(-1, 3, 4)
        fits = True
    return x * (2 if fits else 1)


def printed(s, x):
    text = io.StringIO()
    print(f"{x.shape[0]}", file=text)
    return x * int(text.getvalue())


def formatted(s, x):
    text = io.StringIO()
    print("{}".format(x.shape[0]), file=text)  # noqa: UP032
    return x * int(text.getvalue())


def printed_elsewhere(s, x):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        _print(x)
    return x * int(text.getvalue())


def _print(x):
    print(f"{x.shape[0]}")


def logged(s, x):
    LOGGER.info(f"{x.shape[0]}")
    return x * int(LAST[-1])


def logged_by_arguments(s, x):
    LOGGER.info("%d", x.shape[0])
    return x * int(LAST[-1])


ODD = [
    big_and, big_not, big_while, big_assert, big_comprehension, big_lambda, big_layout, kept_in_a_list, value_of_and,
    suppressed, swallowed, swallowed_by_a_class, swallowed_by_a_stack, printed, formatted, printed_elsewhere, logged,
    logged_by_arguments,
]  # fmt: skip


@pytest.mark.parametrize("function", ODD, ids=lambda f: f.__name__)
def test_python_that_decides_in_odd_ways(function: Callable[..., Any]) -> None:
    handlers, LOGGER.propagate = [Keeper()], False
    LOGGER.handlers, level = handlers, LOGGER.level
    LOGGER.setLevel(logging.INFO)
    try:
        model = Function(function)
        gm = fxplug.trace(model, torch.ones(3, 4))
        assert torch.equal(gm(torch.ones(3, 4)), model(torch.ones(3, 4)))
        with pytest.raises(GuardError):
            gm(torch.ones(5, 4))
    finally:
        LOGGER.handlers, LOGGER.propagate = [], True
        LOGGER.setLevel(level)


def test_texts_for_people_are_not_guarded() -> None:
    def tells(s, x):
        print(f"{x.shape[0]} rows")
        LOGGER.info(f"{x.shape[0]} rows")
        LOGGER.info("%d rows", x.shape[0])
        if x.shape[0] > 4 and s.flag:
            x = x * 2
        return x * 1

    gm = fxplug.trace(Function(tells), torch.ones(3, 4))
    assert torch.equal(gm(torch.ones(5, 4)), torch.ones(5, 4))


# --- numbers read out of tensors


def mask_of(rows: list[int], size: int = 16) -> torch.Tensor:
    return (torch.arange(size) < torch.tensor(rows)[:, None]).long()


def cut(s, x, mask):
    lengths = mask.sum(1).tolist()
    if len(set(lengths)) > 1:
        x = x * mask[..., None]
    out = x.new_zeros(x.shape[0], max(lengths), x.shape[2])
    for i, n in enumerate(lengths):
        out[i, :n] = x[i, :n]
    return out


def shortest(s, x, mask):
    return x[:, : min(mask.sum(1).tolist())] * 2


def several_kinds(s, x, mask):
    return x * len(set(mask.sum(1).tolist()))


def longest_of_two(s, x, mask):
    return x[:, : max(mask[0].sum().item(), mask[-1].sum().item())]


@pytest.mark.parametrize("function", [cut, shortest, several_kinds, longest_of_two], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_lengths_of_samples(function: Callable[..., Any], rows: int) -> None:
    """The guard holds whether the samples are of one length, and no length."""
    calls = [[n] * rows for n in (3, 5, 9)] + [[n, *range(n + 1, n + rows)] for n in (2, 4, 11)]
    model = Function(function)
    graphs = []
    for example in (calls[0], calls[-1]):
        graphs.append(fxplug.trace(model, (torch.randn(rows, 16, 4), mask_of(example)), real=True))
    taken = 0
    for lengths in calls:
        x, mask = torch.randn(rows, 16, 4), mask_of(lengths)
        for gm in graphs:
            try:
                got = gm(x, mask)
            except GuardError:
                continue
            assert torch.equal(got, model(x, mask))
            taken += 1
            break
    assert taken == len(calls)


def test_sets_of_numbers_that_are_used_otherwise_stay_sets() -> None:
    def listed(s, x, mask):
        lengths = mask.sum(1).tolist()
        return x * (sum(set(lengths)) + isinstance(set(lengths), set) + len({*lengths, 5}) + max(*lengths, key=lambda n: -n))

    model, x = Function(listed), torch.randn(2, 16, 4)
    gm = fxplug.trace(model, (x, mask_of([3, 4])), real=True)
    for rows in ([3, 4], [4, 3], [5, 5], [2, 5]):
        equal_or_guarded(model, gm, (x, mask_of(rows)))


# --- results


@pytest.mark.parametrize("kind", [dict, OD], ids=lambda k: k.__name__)
@pytest.mark.parametrize("key", ["out", "0", "a.b", "class", "res-2", 0, ""])
def test_results_with_keys_that_are_no_names(kind: type, key: Any) -> None:
    model, x = Function(lambda s, x: kind([(key, x + 1), ("pool", x)])), torch.randn(2, 4)
    found = fxplug.trace(model, x)(x)
    assert type(found) is kind and list(found) == [key, "pool"] and torch.equal(found[key], x + 1)
