"""What a model asks torch's modes while it is traced is a check of the graph; what sets random states is refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import overrides

from ..errors import TraceError
from ..ir import ops
from ..torch_internals.dispatch import NATIVE
from .numbers import Number
from .recorder import Recording
from .user_code import asker, is_foreign

Patch = tuple[Any, str, Any]
SEED, STATE = "sets a random seed", "reads or sets the state of a random generator"
FUNCTIONS = "transforms a function"
# what changes the random numbers that other calls get, or runs code where no recording sees it, by where it is defined
REFUSED: dict[Any, dict[str, str]] = {
    torch: {
        **dict.fromkeys(("manual_seed", "seed"), SEED),
        **dict.fromkeys(("initial_seed", "get_rng_state", "set_rng_state"), STATE),
        "vmap": FUNCTIONS,
    },
    torch.random: {
        **dict.fromkeys(("manual_seed", "seed"), SEED),
        **dict.fromkeys(("initial_seed", "get_rng_state", "set_rng_state", "fork_rng"), STATE),
    },
    torch.cuda: {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), SEED),
        **dict.fromkeys(("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all", "initial_seed"), STATE),
    },
    torch.func: dict.fromkeys("vmap grad grad_and_value vjp jvp jacrev jacfwd hessian linearize".split(), FUNCTIONS),  # noqa: SIM905
    torch.autograd.graph.saved_tensors_hooks: {"__enter__": "changes what autograd saves"},
}
# torch keeps these lists of its functions for good: made within a trace they would have what stands for functions there
LISTS = (
    overrides.get_ignored_functions, overrides.get_default_nowrap_functions, overrides.get_testing_overrides,
    overrides.get_overridable_functions, lambda: overrides.is_tensor_method_or_property(len),
)  # fmt: skip


def patches(recording: Recording) -> Iterator[Patch]:
    """What stands for functions of torch during one run: owner, name and value.

    They are replaced where they are defined, and in the source files of the model's packages that import them by name. What
    a class or a closure has kept of them before is not seen.
    """
    for listed in LISTS:
        listed()
    new: dict[int, Any] = {}
    for owner, name, value in _replaced(recording):
        if name in vars(owner):
            new[id(vars(owner)[name])] = value
            yield owner, name, value
    for module in _sources(recording):
        space = vars(module)
        for name in [n for n, v in space.items() if id(v) in new]:
            yield module, name, new[id(space[name])]
        if "type" not in space:
            yield module, "type", Type


def _replaced(recording: Recording) -> Iterator[Patch]:
    for name, function in ops.STATES.items():
        path, _, last = name.rpartition(".")
        read = _reader(recording, name, function)
        yield functools.reduce(getattr, path.split(".")[1:], torch), last, read
        if vars(NATIVE).get(last) is function:
            yield NATIVE, last, read
    for owner, names in REFUSED.items():
        for name, does in names.items():
            if hasattr(owner, name):
                yield owner, name, _refusing(recording, getattr(owner, name), f"{owner.__name__}.{name}", does)


def _sources(recording: Recording) -> list[ModuleType]:
    """The modules of Python that belong to the packages which the model's classes are from."""
    classes = {type(m) for m in recording.model.modules()}
    packages = frozenset(c.__module__.partition(".")[0] for kind in classes for c in kind.__mro__ if not is_foreign(c))
    known = _imported(packages, len(sys.modules), next(reversed(sys.modules)))
    return [m for name in known if isinstance(m := sys.modules.get(name), ModuleType)]


@functools.lru_cache(maxsize=64)
def _imported(packages: frozenset[str], count: int, last: str) -> list[str]:
    """The modules of some packages, while as many are imported."""
    starts = tuple(f"{p}." for p in packages)
    return [name for name in list(sys.modules) if name.startswith(starts) or name in packages]


def _asks(recording: Recording) -> bool:
    """Whether the model's own code has called what stands for a function, two frames above this one."""
    return recording.recording_here() and asker(sys._getframe(2)) is not None


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
            raise TraceError(
                f"{recording.place()}: {does} ({name}), which a graph cannot do anew at each call; do it outside of forward, "
                f"or {recording.way_out()}"
            )
        return original(*args, **kwargs)

    return refuse


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
