"""What a model reads of its process while it is traced: an answer that a check of the graph holds, or a refusal."""

from __future__ import annotations

import builtins
import concurrent.futures
import datetime
import functools
import io
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.backends
from torch import overrides

from ..errors import TraceError
from ..ir import ops
from ..torch_internals.dispatch import NATIVE
from .code_names import foreign
from .graph_builder import StandIn
from .numbers import Number
from .recorder import Recording
from .user_code import asker, is_importing

Patch = tuple[Any, str, Any]
MISSING = object()
DEFAULT_GENERATOR = torch.default_generator
HASHES: tuple[Any, ...] = (object.__hash__, torch.nn.Module.__hash__)  # of an address
SEED, STATE, CLOCK = "sets a random seed", "reads or sets the state of a random generator", "reads the clock"
FUNCTIONS = "transforms a function"
# what answers otherwise at every call, or changes what other calls get, by where it is defined
REFUSED: dict[Any, dict[str, str]] = {
    torch: {
        **dict.fromkeys(("manual_seed", "seed"), SEED),
        **dict.fromkeys(("initial_seed", "get_rng_state", "set_rng_state"), STATE),
        "load": "reads a file", "vmap": FUNCTIONS,
    },
    torch.random: {
        **dict.fromkeys(("manual_seed", "seed"), SEED),
        **dict.fromkeys(("initial_seed", "get_rng_state", "set_rng_state", "fork_rng"), STATE),
    },
    torch.cuda: {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), SEED),
        **dict.fromkeys(("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all", "initial_seed"), STATE),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), "asks for memory"),
        "mem_get_info": "asks for memory",
    },
    torch.func: dict.fromkeys("vmap grad grad_and_value vjp jvp jacrev jacfwd hessian linearize".split(), FUNCTIONS),  # noqa: SIM905
    time: dict.fromkeys(
        """time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns thread_time
        thread_time_ns gmtime localtime ctime asctime strftime""".split(),  # noqa: SIM905
        CLOCK,
    ),
    threading.Thread: {"start": "starts a thread"},
    concurrent.futures.ThreadPoolExecutor: {"submit": "gives work to a thread"},
    torch.autograd.graph.saved_tensors_hooks: {"__enter__": "changes what autograd saves"},
    os: {"urandom": "draws random bytes", "getenv": "reads the environment", "getpid": "asks for the number of the process"},
    random: {
        "_urandom": "draws random bytes",
        **dict.fromkeys(
            """random randint randrange uniform choice choices sample shuffle gauss normalvariate betavariate triangular
            expovariate getrandbits randbytes seed getstate setstate""".split(),  # noqa: SIM905
            "draws from Python's 'random'",
        ),
    },
    np.random: dict.fromkeys(
        """rand randn randint random random_sample uniform normal standard_normal choice permutation shuffle beta binomial
        exponential gamma poisson seed get_state set_state""".split(),  # noqa: SIM905
        "draws from 'numpy.random'",
    ),
    uuid: dict.fromkeys(("uuid1", "uuid4"), "makes a random name"),
    io: {"open": "opens a file"},
    builtins: {"open": "opens a file"},
}  # fmt: skip


# torch keeps these lists of its functions for good: made within a trace they would have what stands for functions there
LISTS = (
    overrides.get_ignored_functions, overrides.get_default_nowrap_functions, overrides.get_testing_overrides,
    overrides.get_overridable_functions, lambda: overrides.is_tensor_method_or_property(len),
)  # fmt: skip


def patches(recording: Recording) -> Iterator[Patch]:
    """What stands for functions of torch and of the standard library during one run: owner, name and value.

    They are replaced where they are defined, and in the source files of the model's packages that import them by name. What
    a class or a closure has kept of them before is not seen.
    """
    for listed in LISTS:
        listed()
    new: dict[int, Any] = {}
    for owner, name, value in _replaced(recording):
        original = vars(owner).get(name)
        if original is not None:
            new[id(original)] = value
            yield owner, name, value
    named = {"type": Type, "hash": _hash(recording), "id": _id(recording)}
    for module in _sources(recording):
        space = vars(module)
        for name in [n for n, v in space.items() if id(v) in new]:
            yield module, name, new[id(space[name])]
        yield from ((module, name, value) for name, value in named.items() if name not in space)


def _replaced(recording: Recording) -> Iterator[Patch]:
    for name, function in ops.STATES.items():
        path, _, last = name.rpartition(".")
        if name.removeprefix("torch.") in ops.READERS:
            read = _reader(recording, name, function)
            yield functools.reduce(getattr, path.split(".")[1:], torch), last, read
            if vars(NATIVE).get(last) is function:
                yield NATIVE, last, read
    for owner, names in REFUSED.items():
        for name, does in names.items():
            if hasattr(owner, name):
                yield owner, name, _refusing(recording, getattr(owner, name), f"{owner.__name__}.{name}", does)
    yield os, "environ", _Environment(recording, os.environ)
    yield random.Random, "__init__", _unseeded(recording, random.Random.__init__)
    yield torch, "default_generator", _default_generator(recording)
    yield datetime, "datetime", _clock(recording, datetime.datetime, ("now", "utcnow", "today"))
    yield datetime, "date", _clock(recording, datetime.date, ("today",))
    yield torch.backends.ContextProp, "__get__", _flag(recording, torch.backends.ContextProp.__get__)
    matmul: Any = type(torch.backends.cuda.matmul)
    yield matmul, "__getattr__", _matmul(recording, matmul.__getattr__)


def _sources(recording: Recording) -> list[ModuleType]:
    """The modules of Python that belong to the packages which the model's classes are from."""
    classes = {type(m) for m in recording.model.modules()}
    packages = frozenset(c.__module__.partition(".")[0] for kind in classes for c in kind.__mro__ if not foreign(c.__module__))
    known = _imported(packages, len(sys.modules), next(reversed(sys.modules)))
    return [m for name in known if isinstance(m := sys.modules.get(name), ModuleType)]


@functools.lru_cache(maxsize=64)
def _imported(packages: frozenset[str], count: int, last: str) -> list[str]:
    """The modules of some packages, while as many are imported."""
    starts = tuple(f"{p}." for p in packages)
    return [name for name in list(sys.modules) if name.startswith(starts) or name in packages]


def _asks(recording: Recording, above: int = 2) -> bool:
    """Whether the model's own code has called what stands for a function, so many frames above this one."""
    return recording.recording_here() and (asked := asker(sys._getframe(above))) is not None and not is_importing(asked)


def _reader(recording: Recording, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        if not _asks(recording):
            return original(*args, **kwargs)
        if name == "torch.is_inference_mode_enabled" and len(recording.inference) > 1:
            return recording.inference[-1]  # the model's own mode
        given = (*args, *kwargs.values())
        value = recording.inference[0] if name == "torch.is_inference_mode_enabled" else original(*given)
        return recording.state(name, given, value)

    return read


def _refusing(recording: Recording, original: Callable[..., Any], name: str, does: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _asks(recording):
            _refuse(recording, name, does)
        return original(*args, **kwargs)

    return refuse


def _refuse(recording: Recording, name: str, does: str) -> NoReturn:
    raise TraceError(
        f"{recording.place()}: {does} ({name}), which a graph cannot do anew at each call; do it outside of forward, or "
        f"{recording.way_out()}"
    )


def _clock(recording: Recording, original: type, names: tuple[str, ...]) -> type:
    """A class of `datetime` that does not tell the time."""

    class Same(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

    def telling(name: str) -> Any:
        def tell(cls: type, *args: Any, **kwargs: Any) -> Any:
            if _asks(recording):
                _refuse(recording, f"{original.__name__}.{name}", f"reads {CLOCK}")
            return getattr(original, name)(*args, **kwargs)

        return classmethod(tell)

    return Same(original.__name__, (original,), {name: telling(name) for name in names})


class _Environment:
    """Stands for `os.environ`."""

    def __init__(self, recording: Recording, original: Any) -> None:
        self.recording, self.original = recording, original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._read()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._read()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> Any:
        if _asks(self.recording, 3):
            _refuse(self.recording, "os.environ", "reads the environment")
        return self.original


class _Generator(StandIn):
    """Stands for `torch.default_generator`: may be handed on to a torch function, and tells nothing."""

    recording: Recording


def _silent(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def ask(self: _Generator, *args: Any) -> Any:
        if _asks(self.recording):
            _refuse(self.recording, f"torch.default_generator.{name}", STATE)
        return original(DEFAULT_GENERATOR, *args)

    return ask


for _name in ("manual_seed", "seed", "initial_seed", "get_state", "set_state", "clone_state"):
    setattr(_Generator, _name, _silent(_name, getattr(torch.Generator, _name)))


def _default_generator(recording: Recording) -> _Generator:
    generator = _Generator()
    generator.recording = recording
    return generator


def _unseeded(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for the constructor of `random.Random`, which draws a seed where it is given none."""

    def init(self: Any, x: Any = None) -> None:
        if x is None and _asks(recording):
            _refuse(recording, "random.Random", "draws a random seed")
        original(self, x)

    return init


def _flag(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def get(prop: Any, owner: Any, kind: Any = None) -> Any:
        value = original(prop, owner, kind)
        return _told(recording, _flags().get(id(prop), ""), value) if _asks(recording) else value

    return get


@functools.cache
def _flags() -> dict[int, str]:
    """The settings under torch.backends by the properties that read them."""
    return {
        id(prop): f"{module.__name__}.{name}"
        for module in vars(torch.backends).values()
        for name, prop in vars(type(module)).items()
        if isinstance(prop, torch.backends.ContextProp)
    }


def _matmul(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def get(owner: Any, name: str) -> Any:
        value = original(owner, name)
        return _told(recording, f"torch.backends.cuda.matmul.{name}", value) if _asks(recording) else value

    return get


def _told(recording: Recording, name: str, value: Any) -> Any:
    if name not in ops.STATES:
        _refuse(recording, name, "reads a setting of torch")
    return recording.state(name, (), value)


class _Type(type):
    """The class of what stands for `type`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], Number):
            return type(args[0].value)
        return type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, value: Any) -> bool:
        return issubclass(value, type)


class Type(type, metaclass=_Type):
    """Stands for `type` in the model's source files, where `type(x.shape[0]) is int` must be true."""


class Address(int):
    """What `id` gives: good for telling one object from another, and for nothing else."""

    recording: Recording


def _no_number(name: str) -> Callable[..., Any]:
    def refuse(self: Address, *args: Any) -> Any:
        if self.recording.active and asker(sys._getframe(1)) is not None:
            _refuse(self.recording, "id", "calculates with the address of an object")
        return getattr(int, name)(self, *args)

    return refuse


for _name in "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow and rand or ror xor rxor".split():  # noqa: SIM905
    setattr(Address, f"__{_name}__", _no_number(f"__{_name}__"))
for _name in "rshift lshift neg float lt le gt ge str repr format bool".split():  # noqa: SIM905
    setattr(Address, f"__{_name}__", _no_number(f"__{_name}__"))


def _id(recording: Recording) -> Callable[[Any], int]:
    """What stands for `id` in the model's source files."""

    def identity(value: Any) -> int:
        if not recording.recording_here():
            return id(value)
        address = Address(id(value))
        address.recording = recording
        return address

    return identity


def _hash(recording: Recording) -> Callable[[Any], int]:
    """What stands for `hash` in the model's source files."""

    def hashed(value: Any) -> int:
        by_address = isinstance(value, torch.Tensor) or type(value).__hash__ in HASHES
        if by_address and recording.recording_here():
            _refuse(recording, "hash", "calculates with the address of an object")
        return hash(value)

    return hashed
