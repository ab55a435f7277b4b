"""The few functions of our own that stand in a traced graph: edges, guards, checks of inputs and state, autocast."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch

from ..errors import GuardError, format_brief
from ..torch_internals import modules as torch_modes
from ..torch_internals.tensors import check
from .containers import list_members

# functions that answer about the modes of torch, and whose answer may be another one at the next call
READERS = """is_grad_enabled is_inference_mode_enabled is_autocast_enabled is_autocast_cpu_enabled is_autocast_cache_enabled
get_autocast_dtype get_autocast_gpu_dtype get_autocast_cpu_dtype get_default_dtype get_default_device
are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled get_deterministic_debug_mode
get_float32_matmul_precision get_num_threads get_num_interop_threads is_anomaly_enabled is_anomaly_check_nan_enabled
is_warn_always_enabled cuda.current_device distributed.is_initialized distributed.get_rank distributed.get_world_size
distributed.get_backend backends.cuda.flash_sdp_enabled backends.cuda.mem_efficient_sdp_enabled
backends.cuda.math_sdp_enabled backends.cuda.cudnn_sdp_enabled backends.mha.get_fastpath_enabled""".split()  # noqa: SIM905


def _known(name: str) -> bool:
    try:
        operator.attrgetter(name)(torch)
    except AttributeError:  # this torch has no such state
        return False
    return True


STATES: dict[str, Callable[..., Any]] = {f"torch.{name}": operator.attrgetter(name)(torch) for name in READERS if _known(name)}
# what stands for a number while it is compiled or exported
SYMBOLS: dict[str, type] = {"int": torch.SymInt, "float": torch.SymFloat}
# what autograd knows of a tensor
QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is not None,  # in earlier versions' artifacts
    "is_parameter": lambda x: isinstance(x, torch.nn.Parameter),
}


def edge(x: Any) -> Any:
    """Return `x` as it crosses the edge of a region: an identity that is left out of the generated code."""
    return x


ANOTHER_INPUT = "trace again with an input like this"
ANOTHER_STATE = "call it in the state in which it was traced, or trace it again in this one"
Decision = tuple[str, str, str]  # what Python code decided on: its file and line, the source there, and the value's name


def guard(value: Any, expected: Any, decision: Decision | str) -> None:
    """Raise GuardError unless `value` is still `expected`, as when tracing decided on it.

    The error has the decision, a text in files of earlier versions; under compile and export this becomes an assertion of the
    program.
    """
    if torch.compiler.is_compiling():
        # a SymBool is not compared: torch.export cannot solve `(s >= 64) == False`, and sympy takes no `(s == 64) == True`.
        # While dynamo traces, only `is` tells it from a bool.
        if value is True or value is False or not isinstance(expected, bool):
            _assert(value == expected, expected, decision, ANOTHER_INPUT)
        else:
            check(value if expected else torch.sym_not(value))
    elif value != expected:
        raise GuardError(f"{_describe(decision, expected)}; now it is {format_brief(value)}: {ANOTHER_INPUT}")


def _assert(holds: Any, expected: Any, decision: Decision | str, todo: str) -> None:
    """Assert a condition in a program; if the compiler knows that it is false, raise GuardError with the decision."""
    if holds is False:
        raise GuardError(f"{_describe(decision, expected)}; now it is another: {todo}")
    check(holds)


def check_state(name: str, args: tuple[Any, ...], expected: Any, decision: Decision | str) -> None:
    """Raise GuardError unless a function of torch about the process, one of `STATES`, still returns `expected`.

    The error has the decision; a compiled program raises if the value is another one.
    """
    value = STATES[name](*args)
    if torch.compiler.is_compiling():
        _assert(value == expected, expected, decision, ANOTHER_STATE)
    elif value != expected:
        raise GuardError(f"{_describe(decision, expected)}; now it is {format_brief(value)}: {ANOTHER_STATE}")


def _describe(decision: Decision | str, expected: Any) -> str:
    if isinstance(decision, str):
        return decision
    where, line, what = decision
    plain = " (Python's len() gives a plain number; use x.shape[0] for any size)"
    hint = plain if re.search(r"\blen\(", line) and ".size(" in what else ""
    return f"{where}: '{line}' depends on {what}, which was {format_brief(expected, 40)} when traced{hint}"


def autograd_query(x: torch.Tensor, question: str) -> bool:
    """Return one of autograd's facts about a tensor, one of `QUESTIONS`; `grad_fn` is whether there is one."""
    return bool(QUESTIONS[question](x))


@functools.cache
def applied(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the call of an autograd.Function with its own backward, under the name of its class."""

    def apply(*args: Any) -> Any:
        return cls.apply(*args)

    apply.__name__, apply.__qualname__, apply.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    apply.of = cls  # type: ignore[attr-defined]
    return apply


def with_functions(function: Callable[..., Any], given: tuple[tuple[int | str, FunctionType], ...]) -> Callable[..., Any]:
    """Return a call of `function` some of whose arguments, by position or name, are Python functions.

    In their places it takes the values of their free variables and defaults, with which it recreates them. It is the same
    object for all functions of one code.
    """
    key = (function, tuple((at, f.__code__, id(f.__globals__), len(f.__defaults__ or ())) for at, f in given))
    if key not in _CALLS:
        makers = [(at, _maker(own)) for at, own in given]

        def call(*args: Any, **kwargs: Any) -> Any:
            into = list(args)
            for at, make in makers:
                if isinstance(at, int):
                    into[at] = make(*into[at])
                else:
                    kwargs[at] = make(*kwargs[at])
            return function(*into, **kwargs)

        call.__name__ = call.__qualname__ = function.__name__  # and no module of torch's, under which FX would look it up
        call.of = key  # type: ignore[attr-defined]
        _CALLS[key] = call
    return _CALLS[key]


_CALLS: dict[Any, Callable[..., Any]] = {}


def _maker(function: FunctionType) -> Callable[..., Any]:
    """Return a factory that recreates a function from its free variables and defaults, in code that torch.compile supports."""
    own, free = function.__code__, ", ".join(function.__code__.co_freevars)
    given = [f"default_{n}_" for n in range(len(function.__defaults__ or ()))]
    names, defaults = ", ".join(filter(None, (free, *given))), ", ".join(f"{name}={name}" for name in given)
    # the inner function has the same free variables and defaults as ours, whose code goes in its place
    module = compile(f"def make({names}):\n def made({defaults}): return [{free}]\n return made", "<function>", "exec")
    outer = next(c for c in module.co_consts if isinstance(c, CodeType))
    outer = outer.replace(co_consts=tuple(own if isinstance(c, CodeType) else c for c in outer.co_consts))
    return FunctionType(outer, function.__globals__)


def is_applied(function: Any) -> bool:
    """Return whether `applied` or `with_functions` has made a function."""
    of = getattr(function, "of", None)
    return of is not None and (_CALLS.get(of) if isinstance(of, tuple) else applied(of)) is function


def dtype_of(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of a tensor at this call."""
    return x.dtype


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are one object."""
    return a is b


def same_dtype(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have one dtype at this call."""
    return a.dtype == b.dtype


def number_of_parts(parts: Any) -> int:
    """Return how many tensors a function that splits a tensor returned at this call."""
    return len(parts)


def number_of_distinct(*values: Any) -> int:
    """Return how many of some numbers are different, `len(set(values))`."""
    return len(set(values))


def structure_of(value: Any) -> Any:
    """Return what Python can see of a result besides numbers: dimensions; types, keys and members of containers; None,
    texts."""
    if isinstance(value, torch.Tensor):
        return value.dim()
    found = list_members(tuple(value) if isinstance(value, torch.Size) else value)
    if found is None:
        return value if value is None or isinstance(value, str) else type(value).__name__
    return (type(value).__name__, *((key, structure_of(member)) for key, member in found))


def tried(x: Any) -> None:
    """Keep an operation that the model's code has in a `try`: if it fails, the model goes on, and the graph must not."""


# FX has lists and dicts of its own
KINDS = {"immutable_list": "list", "immutable_dict": "dict"}


def kind_of(value: Any) -> Any:
    """Return the type of a plain value, and for a container the types of its members in their order: (type, key, type, ...)."""
    name = KINDS.get(type(value).__name__, type(value).__name__)
    if isinstance(value, dict):
        return (name, *[x for key, member in value.items() for x in (type(key).__name__, key, kind_of(member))])
    if isinstance(value, (tuple, list)):
        return (name, *[kind_of(member) for member in value])
    return name


def _is_alike(value: Any, old: Any) -> bool:
    """Return whether two plain values of one kind are equal; NaN equals NaN, and -0.0 does not equal 0.0."""
    if isinstance(old, dict):
        return all(_is_alike(value[key], member) for key, member in old.items())
    if isinstance(old, (tuple, list)):
        return all(_is_alike(a, b) for a, b in zip(value, old, strict=True))
    if isinstance(old, float):
        return old != old and value != value or value == old and math.copysign(1.0, value) == math.copysign(1.0, old)
    return bool(value == old)


def check_constants(
    values: tuple[Any, ...], expected: tuple[Any, ...], names: tuple[str, ...], kinds: tuple[Any, ...] | None = None
) -> None:
    """Raise GuardError unless the arguments that are no tensors have the values they were traced with.

    `kinds` has the `kind_of` of each; artifacts of earlier versions have none.
    """
    for index, (value, old, name) in enumerate(zip(values, expected, names, strict=True)):
        kind = kind_of(old) if kinds is None else kinds[index]
        if isinstance(value, torch.Tensor) or kind_of(value) != kind or not _is_alike(value, old):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else format_brief(value)
            if got == format_brief(old):
                got += f" of the kind {format_brief(kind_of(value))} instead of {format_brief(kind)}"
            raise GuardError(
                f"argument '{name}' was {format_brief(old)} when the model was traced and is part of the graph; "
                f"now it is {got}: trace again with that value"
            )


def check_inputs(
    values: tuple[Any, ...],
    ranks: tuple[int, ...],
    dtypes: tuple[Any, ...],
    names: tuple[str, ...],
    firsts: tuple[int, ...] | None = None,
) -> None:
    """Raise GuardError unless input tensors have the number of dimensions and, if the model reads it, the dtype they were
    traced with.

    A dtype of None is not checked. `firsts` says which of them were one and the same tensor, as `first_of_each` does, for
    models to which that matters.
    """
    if firsts is not None and (now := first_of_each(values)) != firsts:
        index = next(i for i, (a, b) in enumerate(zip(now, firsts, strict=True)) if a != b)
        pair = f"'{names[index]}' and '{names[min(now[index], firsts[index])]}'"
        was, is_now = ("two tensors", "one") if now[index] != index else ("one tensor", "two")
        raise GuardError(
            f"arguments {pair} were {was} when the model was traced; now they are {is_now}: trace again with arguments like "
            "these"
        )
    for value, rank, dtype, name in zip(values, ranks, dtypes, names, strict=True):
        if not isinstance(value, torch.Tensor):
            other = format_brief(value)
            raise GuardError(f"argument '{name}' was a tensor when the model was traced; now it is {other}: trace again")
        if kind := other_kind(value):
            raise GuardError(f"argument '{name}' was dense when the model was traced; now it is {kind}: {TO_DENSE}")
        if value.dim() != rank:
            raise GuardError(
                f"argument '{name}' had {rank} dimensions when the model was traced; now its shape is {tuple(value.shape)}: "
                "trace again with an input like this"
            )
        if dtype is not None and value.dtype != dtype:
            raise GuardError(
                f"argument '{name}' was {dtype} when the model was traced, and the graph depends on it; "
                f"now it is {value.dtype}: convert the input, or trace again in that dtype"
            )
        if own := attributes(value):
            raise GuardError(
                f"argument '{name}' is a tensor with {own}, which the model may read and the graph does not: pass a tensor "
                "without it"
            )


def first_of_each(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Return for each value the index of the first that is the same object."""
    if torch.compiler.is_compiling():
        return tuple([next(j for j in range(i + 1) if values[j] is values[i]) for i in range(len(values))])
    seen: dict[int, int] = {}
    return tuple([seen.setdefault(id(value), index) for index, value in enumerate(values)])


TO_DENSE = "make it dense (to_dense(), to_padded_tensor() or dequantize())"


def other_kind(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor that is not dense, and whose shape or values torch may not return: a layout, nested, or
    quantised."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    return "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else ""


def attributes(value: torch.Tensor) -> str:
    """Describe the attributes that somebody has set on a tensor; names that begin with an underscore are torch's own."""
    if torch.compiler.is_compiling() or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return ""
    found = [name for name in vars(value) if not name.startswith("_")]
    return f"the attribute {', '.join(map(repr, sorted(found)[:3]))}" if found else ""


def check_numbers(values: tuple[Any, ...], kinds: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raise GuardError unless numbers among the arguments are of their kind, "int" or "float"; a bool is neither."""
    for value, kind, name in zip(values, kinds, names, strict=True):
        if (type(value).__name__ if type(value) in (int, float) else "") != kind and not isinstance(value, SYMBOLS[kind]):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise GuardError(f"argument '{name}' was a {kind} when the model was traced; now it is {got}: trace again")


def check_members(value: Any, keys: tuple[Any, ...], name: str, kind: str | None = None) -> None:
    """Raise GuardError unless a list, tuple or dict argument has its type and the members it was traced with, in their order.

    A `kind` of None, in artifacts of earlier versions, is not checked.
    """
    found = tuple(value) if isinstance(value, dict) else tuple(range(len(value))) if isinstance(value, (tuple, list)) else None
    if found is None or set(found) != set(keys):
        got = format_brief(value) if found is None else f"{len(found)}: {format_brief(list(found))}"
        had = f"argument '{name}' had {len(keys)} members when the model was traced: {format_brief(list(keys))}"
        raise GuardError(f"{had}; now it has {got}: trace again")
    if found != keys and kind is not None:
        raise GuardError(
            f"argument '{name}' had its members in the order {format_brief(list(keys))} when the model was traced; now it has "
            f"them in the order {format_brief(list(found))}, which forward can see: give them in the order of the trace, or "
            "trace again"
        )
    own = KINDS.get(type(value).__name__, type(value).__name__)
    if kind is not None and own != kind:
        raise GuardError(
            f"argument '{name}' was a {kind} when the model was traced; now it is a {own}, which forward can see: give it as "
            f"{kind}, or trace again"
        )


def put_members(value: Any, members: Any) -> None:
    """Replace the members of a list or dict argument."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(members)


def check_generator(value: Any, kind: str, name: str) -> None:
    """Raise GuardError unless a random generator argument is of its kind of device."""
    if not isinstance(value, torch.Generator) or value.device.type != kind:
        got = value.device if isinstance(value, torch.Generator) else format_brief(value)
        raise GuardError(f"argument '{name}' was a generator on {kind} when the model was traced; now it is {got}: trace again")


def device_of(x: torch.Tensor) -> torch.device:
    """Return the device that the graph runs on: that of its first input tensor."""
    return x.device


def enter_autocast(device: torch.device | str, dtype: torch.dtype, enabled: bool, cache: bool) -> Any:
    """Enter an autocast region that the model's own code opened; the result goes to `exit_autocast`."""
    kind = device if isinstance(device, str) else device.type
    return torch_modes.enter_autocast(kind, dtype, enabled, cache)


def exit_autocast(state: Any) -> None:
    """Leave the autocast region that `enter_autocast` opened."""
    torch_modes.exit_autocast(state)


def any_gradients(*tensors: torch.Tensor) -> bool:
    """Return whether gradients are enabled and one of these tensors requires them, as the results of an autograd.Function then
    do."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def enter_grad(enabled: bool) -> bool:
    """Enable or disable gradients as the model's own code does; the result, the mode before, goes to `exit_grad`."""
    before = torch.is_grad_enabled()
    torch_modes.set_grad_enabled(enabled)
    return before


def exit_grad(before: bool) -> None:
    """Restore the gradient mode before `enter_grad`."""
    torch_modes.set_grad_enabled(before)


class Record(dict[str, Any]):
    """Stands for a result class of a library that is not there: its fields by name, attribute or position."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the result has no field '{name}', only {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __getitem__(self, key: Any) -> Any:
        return self.to_tuple()[key] if isinstance(key, (int, slice)) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the fields that are not None, in their order."""
        return tuple(value for value in self.values() if value is not None)


def input_or_default(value: Any, held: torch.Tensor) -> Any:
    """Return an input if it is given, else the module's default for it."""
    return held if value is None else value


def _is_batch(size: Any) -> bool:
    """Return whether a size is the batch size of another input."""
    return isinstance(size, tuple) and tuple(size[1:]) == (0, 1)


class AddedInput(GuardError):
    """An input that a pass added does not fit: no other way of calling the model has another."""


def check_added(
    value: Any, name: str, expected: tuple[Any, ...] | None, text: str, required: bool, dtype: Any, like: Any
) -> Any:
    """Check the shape of an input that a pass added: numbers, or (input, dimension, factor) for sizes of another input.

    A number becomes a tensor of this dtype, on the device of the input `like`; one condition is that of a whole batch. Raises
    AddedInput; a compiled program only checks that it is there, as its own operations fail on other sizes.
    """
    if value is None and required:
        raise AddedInput(f"the rewritten model needs the input '{name}' {text}: give it by name, {name}=...")
    if isinstance(value, (bool, int, float)) and dtype is not None:
        value = torch.full((), value, dtype=dtype, device=like.device if isinstance(like, torch.Tensor) else None)
    if expected is None or not isinstance(value, torch.Tensor) or torch.compiler.is_compiling():
        return value
    if value.dim() != len(expected):
        raise AddedInput(f"input '{name}' must have the shape {text}; it has {list(value.shape)}")
    sizes = [e[0].shape[e[1]] * e[2] if isinstance(e, tuple) else e for e in expected]
    if sizes and value.shape[0] == 1 != sizes[0] and _is_batch(expected[0]):
        value = value.expand(sizes[0], *value.shape[1:])
    if any(s is not None and s != n for s, n in zip(sizes, value.shape, strict=True)):
        shown = ["any" if s is None else int(s) for s in sizes]
        raise AddedInput(f"input '{name}' must have the shape {text}, here {shown}; it has {list(value.shape)}")
    return value
