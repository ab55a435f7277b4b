"""Random models, eager against traced: the same outputs, gradients and state in every way of calling, or a refusal.

A verdict is one of
  equal    traced, and no difference at any call that its guards admit
  guarded  the same, and at least one call was turned away by a GuardError
  said     a difference that docs/guides/tracing.md names: gradients of values kept of weights, writes through `x.data`, the
           rounding of a kernel that `sdpa_kernel` chooses
  looser   the same, but for calls that the model itself fails on
  refused  trace raised a TraceError
  invalid  the model itself fails on its example
and the misses: `silent` (a difference), `raw` (an error that is not fxplug's own where the model has none), `useless` (a
guard turns away the very call that was traced), `dirty` (the trace changed the model or the process), `hang`.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import random
import re
import signal
import threading
import traceback
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import random_models
import torch
import torch._dynamo  # it wraps torch.manual_seed when a checkpoint, or a compiler, first imports it
from torch import nn

import fxplug

MISSES = ("silent", "raw", "useless", "dirty", "hang")
SECONDS = 60  # one model
# what docs/guides/tracing.md says of these steps: part of a name, and of what is found then
SAID = {
    "first_call_of": ": one instead of none", "input_data": "has been modified by an inplace operation",
    "sdpa_kernel": " differs by ",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of calling a model."""

    name: str
    shape: str = "example"
    training: bool = False
    layout: str = ""
    grad: bool = True  # torch.is_grad_enabled()
    inputs_require: bool = False
    backward: bool = False
    calls: int = 1
    around: str = ""
    before: str = ""  # what is done to the model first
    given: str = ""  # other arguments


WAYS = [
    Way("as traced"),
    Way("as traced, twice", calls=2),
    Way("no_grad", grad=False, calls=3),
    Way("backward", backward=True, inputs_require=True),
    Way("train", training=True, backward=True, calls=3),
    Way("train no_grad", training=True, grad=False),
    Way("inference", grad=False, around="inference"),
    Way("batch 1", "batch1", grad=False),
    Way("batch 3", "batch3", backward=True),
    Way("batch 5", "batch5", training=True),
    Way("taller", "tall", backward=True, inputs_require=True),
    Way("wider", "wide", grad=False),
    Way("odd", "odd", training=True, backward=True),
    Way("channels last", layout="last", grad=False),
    Way("transposed", layout="transposed", backward=True),
    Way("expanded", layout="expanded", grad=False),
    Way("a slice", layout="slice", inputs_require=True, backward=True),
    Way("an offset", layout="offset"),
    Way("every second", layout="second", training=True),
    Way("autocast", around="autocast", backward=True),
    Way("autocast no_grad", around="autocast", grad=False),
    Way("frozen", before="frozen", inputs_require=True, backward=True),
    Way("half frozen", before="half", training=True, backward=True),
    Way("double", before="double", grad=False),
    Way("default double", around="double", grad=False),
    Way("parts in other modes", before="modes", training=True, backward=True, calls=2),
    Way("other parts in other modes", before="more modes", grad=False),
    Way("weight grads", before="grads", backward=True),
    Way("other values", given="values", grad=False),
    Way("scale", given="scale", grad=False),
    Way("flag", given="flag", grad=False),
    Way("mask", given="mask", grad=False),
    Way("a dict in another order", given="order", grad=False),
    Way("keywords in another order", given="keywords", grad=False),
    Way("another kind of dict", given="kind", grad=False),
    Way("a float for an int", given="float", grad=False),
    Way("input not leaf", given="not leaf", backward=True),
    Way("tensor attribute", given="attribute", grad=False),
    Way("parameter as input", given="parameter", backward=True),
    Way("the same twice", given="same", backward=True, inputs_require=True),
    Way("views of one", given="view", grad=False),
    Way("sparse", given="sparse", grad=False),
]
SIZES = {
    "image": {"example": (2, 8, 8), "tall": (2, 12, 8), "wide": (2, 8, 10), "odd": (2, 9, 7)},
    "tokens": {"example": (2, 8), "tall": (2, 12), "wide": (2, 10), "odd": (2, 7)},
}


def inputs(first: str, way: Way, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call, new ones each time."""
    sizes = SIZES["image" if first == "image" else "tokens"]
    n, *space = sizes.get(way.shape, sizes["example"])
    if way.shape.startswith("batch"):
        n = int(way.shape[5:])
    g = torch.Generator().manual_seed(seed + 100 * (way.given == "values"))
    if first == "ids":
        x = torch.randint(0, 16, (n, *space), generator=g)
    else:
        x = torch.randn(n, *([8, *space] if first == "image" else [*space, 8]), generator=g, dtype=torch.float32)
    if way.before == "double" and x.is_floating_point():
        x = x.double()
    with torch.no_grad():
        x = _laid(x, way.layout)
    if x.is_floating_point():
        if way.given == "not leaf":
            x = x.requires_grad_() * 1.0
        elif way.given == "parameter":
            x = nn.Parameter(x)
        elif way.inputs_require:
            x.requires_grad_()
    with torch.no_grad():
        other = torch.randn(n, *space, 8, generator=g) if first == "ids" else x[:] if way.given == "view" else x * 0.5
    other = x if way.given == "same" and first != "ids" else other
    extra = {"bias": torch.full((1,), 0.25, dtype=torch.float32), "gain": 2, "other": other}
    kwargs: dict[str, Any] = {"extra": extra}
    if way.given == "scale":
        kwargs["scale"] = 0.5
    if way.given == "flag":
        kwargs["flag"] = True
    if way.given == "mask":
        kwargs["mask"] = torch.arange(x.shape[1] * n).view(n, -1) % 3 == 0
    if way.given == "order":
        kwargs["extra"] = dict(reversed(extra.items()))
    if way.given == "kind":
        kwargs["extra"] = collections.OrderedDict(extra)
    if way.given == "float":
        extra["gain"] = 2.0
    if way.given == "keywords":
        kwargs = {"flag": False, **kwargs, "mask": None, "scale": 1.0}
    if way.given == "attribute":
        x.mark = 2.0  # type: ignore[attr-defined]
    if way.given == "sparse":
        x = x.to_sparse()
    return (x,), kwargs


def _laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "last":
        return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return x[:1].expand_as(x)
    if layout == "slice":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    if layout == "offset":
        return torch.cat([x, x])[x.shape[0] :]
    if layout == "second":
        return torch.stack([x, x], -1)[..., 0]
    return x


@contextlib.contextmanager
def around(way: Way) -> Iterator[None]:
    """The state of the process in which a call is made; all of it is as before afterwards."""
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(way.grad))
        if way.around == "inference":
            stack.enter_context(torch.inference_mode())
        if way.around == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        try:
            if way.around == "double":
                torch.set_default_dtype(torch.float64)
            yield
        finally:
            torch.set_default_dtype(dtype)


def prepare(model: nn.Module, way: Way) -> None:
    """What a user does to a model, traced or not, before this way of calling it."""
    model.train(way.training)
    if way.before == "frozen":
        model.requires_grad_(False)
    elif way.before == "half":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(len(name) % 2 == 0)
    elif way.before == "double":
        model.double()
    elif way.before.endswith("modes"):
        mix_modes(model, len(way.before))
    elif way.before == "grads":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)


def mix_modes(model: nn.Module, number: int) -> None:
    """Put parts into other modes than the model, by their names; another number chooses others."""
    for name, module in model.named_modules():
        if name and (zlib.crc32(name.encode()) + number) % 3:
            module.train(not module.training)


@dataclasses.dataclass
class Outcome:
    """What some calls of a model gave and left behind."""

    results: list[Any] = dataclasses.field(default_factory=list)
    given: list[Any] = dataclasses.field(default_factory=list)
    gradients: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    random: Any = None
    error: Exception | None = None
    lost: str = ""  # where an error came from


# at its third call an optimized script may have other gradients than at its first
torch._C._set_graph_executor_optimize(False)


def play(model: nn.Module, first: str, way: Way, seed: int) -> Outcome:
    """Some calls in a row. Never raises."""
    out = Outcome()
    try:
        prepare(model, way)
        with around(way):
            # the call that was traced is made again as it was; elsewhere each call has other values
            calls = [inputs(first, way, seed + i * (not way.name.startswith("as traced"))) for i in range(way.calls)]
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
            for args, kwargs in calls:
                result = model(*args, **kwargs)
                out.results.append(plain(result))
                if way.backward and way.grad and not torch.is_inference_mode_enabled():
                    terms = [t for t in tensors(result) if t.requires_grad and t.is_floating_point()]
                    if terms:
                        sum((t.double() * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in terms).backward()
            out.random = torch.get_rng_state(), hash(random.getstate())
        out.given = plain([(a, k) for a, k in calls])
        for index, (args, _) in enumerate(calls):
            for t in tensors(args):
                out.gradients[f"input {index}"] = plain(t.grad) if t.is_leaf else None
    except Exception as error:
        out.error = error
        out.lost = where(error)
    out.gradients.update({k: plain(p.grad) for k, p in model.named_parameters()})
    out.state = {k: t.detach().clone() for k, t in model.state_dict().items()}
    return out


def where(error: BaseException) -> str:
    """File and line that an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def plain(value: Any) -> Any:
    """A copy that later calls leave alone; classes by name, as each model has its own."""
    if isinstance(value, torch.Tensor):
        kept = value.detach().clone()
        return (kept, value.requires_grad) if not value.is_inference() else (kept, False)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return value


def unequal(a: Any, b: Any, close: float = 0.0) -> str | None:
    """The first difference between two plain values."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return f"{b.dtype} {tuple(b.shape)} {b.layout} instead of {a.dtype} {tuple(a.shape)} {a.layout}"
        a, b = a.to_dense(), b.to_dense()
        if torch.equal(a, b):
            return None
        x, y = a.double().nan_to_num(7e5, 8e5, 9e5), b.double().nan_to_num(7e5, 8e5, 9e5)
        off = (x - y).abs().max().item()
        # what should be zero is rounding of other values
        return None if off <= close * max(x.abs().max().item(), 1e-9) else f"differs by {off:.1e}"
    if type(a) is not type(b):
        return f"{_told(b)} instead of {_told(a)}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"keys {list(b)} instead of {list(a)}"
        return next((f"{k}: {d}" for k in a if (d := unequal(a[k], b[k], close))), None)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{len(b)} members instead of {len(a)}"
        return next((f"[{i}] {d}" for i, (x, y) in enumerate(zip(a, b, strict=True)) if (d := unequal(x, y, close))), None)
    same = a is b or a == b or (a != a and b != b)
    return None if same else f"{_told(b)} instead of {_told(a)}"


def _told(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]


def differences(eager: Outcome, traced: Outcome, way: Way) -> str | None:
    """What the traced model did otherwise than the model."""
    found = unequal(eager.results, traced.results)
    if found:
        return f"output {found}"
    if found := unequal(eager.given, traced.given):
        return f"inputs afterwards {found}"
    close = 2e-2 if way.around == "autocast" else 1e-6
    for name, gradient in eager.gradients.items():
        ours = traced.gradients.get(name)
        if (gradient is None) != (ours is None):
            if float((gradient or ours)[0].double().abs().sum()) == 0:
                continue
            return f"gradient of {name}: {'none' if ours is None else 'one'} instead of {'one' if ours is None else 'none'}"
        if gradient is not None and (found := unequal(gradient[0], ours[0], close)):
            return f"gradient of {name} {found}"
    if found := unequal(eager.state, traced.state):
        return f"state {found}"
    return f"random state {found}" if (found := unequal(eager.random, traced.random)) else None


# --- the model as it was


def picture(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Everything that can be read of a model, by value: attributes, hooks, tensors with their attributes and flags."""
    seen = {} if seen is None else seen
    if isinstance(value, (int, float, str, bytes, type(None), torch.dtype, complex)):
        return value
    if id(value) in seen:
        return f"#{seen[id(value)]}"
    seen[id(value)] = len(seen)
    if isinstance(value, nn.parameter.UninitializedTensorMixin):
        return "uninitialised"
    if isinstance(value, torch.Tensor):
        hooks = value._backward_hooks
        return [
            "tensor", value.detach().clone() if value.layout is torch.strided else None, tuple(value.stride()),
            value.requires_grad, value.is_leaf, value._version, None if value.grad is None else value.grad.clone(),
            len(hooks or ()), {k: picture(v, seen) for k, v in vars(value).items()},
        ]  # fmt: skip
    if isinstance(value, torch.Generator):
        return ["generator", value.get_state()]
    if isinstance(value, random.Random):
        return ["random", value.getstate()]
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if k != "__warningregistry__"}  # Python's own, of every file that warns
        keys = [k if isinstance(k, (int, str)) else str(type(k)) for k in value]
        return dict(zip(keys, [picture(v, seen) for v in list(value.values())], strict=True))
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return [type(value).__name__, *(picture(v, seen) for v in value)]
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
        return [value.__qualname__, picture(value.__defaults__, seen), picture(vars(value), seen), picture(cells, seen)]
    if isinstance(value, types.MethodType):
        return [value.__func__.__qualname__, picture(value.__self__, seen)]
    if isinstance(value, type):
        if not value.__module__.startswith("random_model_"):
            return value.__qualname__
        return [value.__qualname__, {k: picture(v, seen) for k, v in vars(value).items() if not k.startswith("__")}]
    if isinstance(value, types.ModuleType):
        return value.__name__
    own = getattr(value, "__dict__", None)
    slots = [s for c in type(value).__mro__ for s in getattr(c, "__slots__", ()) if isinstance(s, str)]
    parts = {**(own if isinstance(own, dict) else {}), **{s: getattr(value, s) for s in slots if hasattr(value, s)}}
    skip = ("lock", "_weakref", "__weakref__")
    if type(value).__module__.startswith(("random_model_", "torch.nn")):
        return [type(value).__qualname__, {k: picture(v, seen) for k, v in parts.items() if k not in skip}]
    return type(value).__qualname__


def process() -> Any:
    """What a trace must leave alone in the process."""
    return [
        torch.get_rng_state(), hash(random.getstate()), torch.is_grad_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"), nn.Module._call_impl, nn.Module.__setattr__, torch.rand, torch.manual_seed,
        torch.is_grad_enabled, torch.autocast.__enter__, random.random, "training" in vars(nn.Module),
        threading.active_count(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
    ]  # fmt: skip


# --- one case


@dataclasses.dataclass
class Verdict:
    """What came of one model."""

    kind: str
    what: str = ""
    guards: tuple[str, ...] = ()  # ways that a guard turned away
    ways: int = 0
    lines: bool = True  # a refusal names file and line


class _Late(BaseException):
    pass


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise _Late

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(model: random_models.Program, ways: list[Way] | None = None) -> Verdict:
    """Trace a model and call both in each of these ways; when not given, the first of WAYS and some that its seed draws."""
    if ways is None:
        ways = WAYS[:5] + random.Random(model.seed).sample(WAYS[5:], 12)
    kept = torch.get_rng_state()
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _judge(model, ways)
    except _Late:
        return Verdict("hang", f"more than {SECONDS} s")
    finally:
        torch.set_rng_state(kept)


def _judge(program: random_models.Program, ways: list[Way]) -> Verdict:
    file = random_models.write(random_models.source(program))
    first, seed = program.first, program.seed
    example = Way("as traced", training=program.training, given=program.given)

    @contextlib.contextmanager
    def fresh() -> Iterator[tuple[Any, nn.Module]]:
        with random_models.built(file, seed) as (space, model):
            if program.warm:
                args, kwargs = inputs(first, example, seed)
                torch.default_generator.manual_seed(seed)
                with torch.no_grad():
                    model(*args, **kwargs)
            yield space, model.train(program.training)

    try:
        with fresh() as (_, model):
            error = play(model, first, example, seed).error
    except Exception as failed:
        error = failed
    if error is not None:
        return Verdict("invalid", f"{type(error).__name__}: {error}")
    with fresh() as (space, model):
        args, kwargs = inputs(first, example, seed)
        random.seed(seed)  # as `play` does
        torch.default_generator.manual_seed(seed)
        before = picture([model, vars(space), args, kwargs]), process()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                gm: Any = fxplug.trace(model, args, kwargs, real=program.real)
            except Exception as error:
                gm = error
        found = _touched(before, picture([model, vars(space), args, kwargs]))
        if isinstance(gm, Exception) and not isinstance(gm, fxplug.FxplugError):
            return Verdict("raw", f"trace: {type(gm).__name__}: {gm}")
        if found:
            return Verdict("dirty", f"{found}{f' (after {gm})' if isinstance(gm, Exception) else ''}")
        if isinstance(gm, Exception):
            return Verdict("refused", str(gm), lines=re.search(r"\.py:\d+", str(gm)) is not None)
        verdict = _compare(gm, fresh, first, seed, program, ways)
        names = " ".join(program.names())
        if verdict.kind in MISSES and any(name in names and what in verdict.what for name, what in SAID.items()):
            return dataclasses.replace(verdict, kind="said")
        return verdict


def _touched(before: Any, model: Any) -> str | None:
    found = unequal(before[0], model)
    if found:
        return f"the model after the trace: {found}"
    found = unequal(before[1], process())
    return f"the process after the trace: {found}" if found else None


def _compare(
    gm: nn.Module, fresh: Callable[[], Any], first: str, seed: int, program: random_models.Program, ways: list[Way]
) -> Verdict:
    kept = [(t, t.detach().clone(), t.requires_grad) for t in [*gm.parameters(), *gm.buffers()]]
    guards: list[str] = []
    lost = ""
    for way in ways:
        if way.name.startswith("as traced"):
            way = dataclasses.replace(way, training=program.training, given=program.given)
        with fresh() as (_, model):
            eager = play(model, first, way, seed)
            exposed = {k: v for k, v in vars(model).items() if not k.startswith("_")}
        theirs = copy.deepcopy(gm) if way.before == "double" else gm  # converting replaces the buffers
        if eager.error is not None:
            traced = play(theirs, first, way, seed)
            if traced.error is None:
                lost = f"{way.name}: no error where the model has {type(eager.error).__name__}: {eager.error}"
        else:
            traced = play(theirs, first, way, seed)
            if isinstance(traced.error, fxplug.GuardError):
                if way.name == "as traced":
                    return Verdict("useless", f"{way.name}: {traced.error}")
                guards.append(way.name)
            elif isinstance(traced.error, fxplug.FxplugError):
                guards.append(f"{way.name} ({type(traced.error).__name__})")
            elif traced.error is not None:
                return Verdict("raw", f"{way.name}: {type(traced.error).__name__}: {traced.error} at {traced.lost}")
            elif found := differences(eager, traced, way) or _stale(exposed, gm):
                return Verdict("silent", f"{way.name}: {found}")
        with torch.no_grad():
            for t, value, requires in kept:
                t.requires_grad_(requires)
                t.grad = None
                t.copy_(value)
    return Verdict("looser" if lost else "guarded" if guards else "equal", lost, tuple(guards), len(ways))


def _stale(exposed: dict[str, Any], gm: nn.Module) -> str | None:
    """An attribute that the traced model shows, but not as the model has it after these calls."""
    for name, value in exposed.items():
        if isinstance(value, (int, float, str, torch.Tensor, list, type(None))) and name not in ("training", "odd"):
            try:
                ours = getattr(gm, name)
            except AttributeError:
                continue
            if found := unequal(plain(value), plain(ours)):
                return f"attribute {name}: {found}"
    return None


# --- many


def case(seed: int) -> random_models.Program:
    """The model of a seed: every second one is hostile."""
    return random_models.program(seed, hostile=seed % 2 == 1)


def shrink(program: random_models.Program, kind: str, tries: int = 60) -> tuple[random_models.Program, Verdict]:
    """Fewer steps that still give this kind of miss."""
    best, verdict = program, judge(program)
    dropped: set[int] = set()
    for number in [*reversed(program.numbers())]:
        if (tries := tries - 1) < 0:
            break
        smaller = program.without(dropped | {number})
        found = judge(smaller)
        if found.kind == kind:
            dropped, best, verdict = dropped | {number}, smaller, found
    return best, verdict


def fuzz_models(cases: int, seed: int, shrinks: bool = True) -> list[str]:
    """Judge this many random models, from this seed on; print what differs. A line for each miss."""
    counts: dict[str, collections.Counter[str]] = {
        "ordinary": collections.Counter(), "hostile": collections.Counter(), "ways": collections.Counter(),
    }  # fmt: skip
    misses: list[str] = []
    for number in range(seed, seed + cases):
        program = case(number)
        verdict = judge(program)
        counts["hostile" if number % 2 else "ordinary"][verdict.kind] += 1
        counts["ways"].update({way.partition(" (")[0]: 1 for way in verdict.guards})
        if verdict.kind in MISSES:
            misses.append(f"{number}: {verdict.kind}: {verdict.what}")
            small, again = shrink(program, verdict.kind) if shrinks else (program, verdict)
            print(f"\n{verdict.kind}: {verdict.what}\n  again: python tests/fuzz.py models --cases 1 --seed {number}")
            print(f"  shrunk to {', '.join(small.names())}: {again.what}", flush=True)
            if cases == 1:
                text = random_models.source(small)
                print(text[len(random_models.HEADER) :])
        elif cases == 1:
            print(verdict)
    for kind, found in counts.items():
        print(f"{'turned away by a guard' if kind == 'ways' else kind}: {dict(sorted(found.items()))}")
    return misses
