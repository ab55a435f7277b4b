"""Modes while a model is traced: gradient and autocast regions as nodes, checks of what is read, and torch's calls replaced."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn, overrides

from ..errors import TraceError
from ..ir import functions, ops
from ..torch_internals import COMPILER
from ..torch_internals.modules import autocast_settings, set_grad_enabled
from ..torch_internals.tensors import NATIVE
from .fake_tensors import list_tensor_classes, wrap_math
from .graph_builder import Recording
from .isolation import restore_after
from .module_state import MISSING, Journal, State
from .reads import KINDS_REPLACED, PLAIN, STAND_INS
from .user_code import find_calling_frame, find_names, has_builtin_dtypes, is_foreign

Patch = tuple[Any, str, Any]
NAMES = frozenset(STAND_INS)


def grad_patches(recording: Recording) -> Iterator[Patch]:
    """Yield replacements for the methods of torch's context managers during one run: class, name and function."""
    grad, modes = torch.autograd.grad_mode, (ops.enter_grad, ops.exit_grad)
    yield from _switches(recording, torch.autocast, "__enter__", (ops.enter_autocast, ops.exit_autocast))
    yield from _switches(recording, grad.no_grad, "__enter__", modes)
    yield from _switches(recording, grad.enable_grad, "__enter__", modes)
    # it switches when it is made, and stays so if nobody enters it
    yield from _switches(recording, grad.set_grad_enabled, "__init__", modes)
    yield from _switches(recording, grad.inference_mode, "__enter__", modes)


def _switches(recording: Recording, kind: type, first: str, nodes: tuple[Callable[..., Any], ...]) -> Iterator[Patch]:
    """Yield replacements for the methods that enter and leave a context manager."""
    begin, end = getattr(kind, first), kind.__exit__  # type: ignore[attr-defined]
    infers = kind is torch.inference_mode

    def enter(context: Any, *args: Any, **kwargs: Any) -> Any:
        if not recording.recording_here():
            return begin(context, *args, **kwargs)
        if infers:
            recording.inference.append(bool(context.mode))
            if not context.mode:
                return None
        # one manager switches by making another, which is no switch of its own
        out = _unrecorded(recording, _enter_without_gradients if infers else begin, context, *args, **kwargs)
        given: tuple[Any, ...] = (torch.is_grad_enabled(),)
        if kind is torch.autocast:
            device = recording.dynamic_device(torch.device(context.device))
            name = device if isinstance(device, fx.Node) else context.device
            given = (name, context.fast_dtype, *autocast_settings(context))
        context.__dict__.setdefault("_fxplug", []).append(_switch(recording, nodes[0], given))
        return out

    def leave(context: Any, *error: Any) -> Any:
        if not recording.recording_here():
            return end(context, *error)
        if opened := context.__dict__.get("_fxplug"):
            _switch(recording, nodes[1], (opened.pop(),))
        if infers:
            recording.inference.pop()
            if not context.mode:
                return None
        return _unrecorded(recording, _leave_without_gradients if infers else end, context, *error)

    yield kind, first, enter
    yield kind, "__exit__", leave


def _unrecorded(recording: Recording, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    recording.paused = True
    try:
        return function(*args, **kwargs)
    finally:
        recording.paused = False


def _switch(recording: Recording, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    recording.switched += 1
    return recording.node("call_function", function, args, {}, recording.named(function.__name__), effect=True)


# the graph's results must be usable outside it, so inference mode in it means no gradients
def _enter_without_gradients(context: Any) -> None:
    context._fxplug_before = torch.is_grad_enabled()
    set_grad_enabled(False)


def _leave_without_gradients(context: Any, *error: Any) -> None:
    set_grad_enabled(context._fxplug_before)


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
    torch.autograd.graph.saved_tensors_hooks: {"__enter__": "changes what autograd saves for the backward pass"},
}
# torch keeps these lists of its functions for good: made within a trace they would have what stands for functions there
LISTS = (
    overrides.get_ignored_functions, overrides.get_default_nowrap_functions, overrides.get_testing_overrides,
    overrides.get_overridable_functions, lambda: overrides.is_tensor_method_or_property(len),
)  # fmt: skip


def mode_patches(recording: Recording) -> Iterator[Patch]:
    """Yield replacements for functions of torch during one run: owner, name and value.

    They are replaced where they are defined, and in the source files of the model's packages that import them by name.
    References that a class or a closure kept from before are not seen.
    """
    for listed in (*LISTS, functions.name_functions):
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
        if KINDS_REPLACED.isdisjoint(space):
            file = getattr(module, "__file__", None) or ""
            found = STAND_INS if recording.stand_ins and not has_builtin_dtypes(file) else PLAIN
            yield from ((module, name, found[name]) for name in find_names(file, NAMES) if name in found and name not in space)


def _flex(recording: Recording, original: Any) -> Any:
    """Wrap a function of flex attention, which takes Python functions, to record its calls."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recording.recording_here():
            return original(*args, **kwargs)
        from . import flex  # for few models

        return getattr(flex, original.__name__)(recording, original, args, kwargs)

    return call


def _replaced(recording: Recording) -> Iterator[Patch]:
    if (owner := sys.modules.get("torch.nn.attention.flex_attention")) is not None:
        for name in ("create_block_mask", "flex_attention"):
            yield owner, name, _flex(recording, getattr(owner, name))
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
    """Return the Python modules of the packages that define the model's classes."""
    classes = {type(m) for m in recording.model.modules()}
    packages = frozenset(c.__module__.partition(".")[0] for kind in classes for c in kind.__mro__ if not is_foreign(c))
    known = _imported(packages, len(sys.modules), next(reversed(sys.modules)))
    return [m for name in known if isinstance(m := sys.modules.get(name), ModuleType)]


@functools.lru_cache(maxsize=64)
def _imported(packages: frozenset[str], count: int, last: str) -> list[str]:
    """Return the names of the imported modules of some packages; cached while the number of imports is the same."""
    starts = tuple(f"{p}." for p in packages)
    return [name for name in list(sys.modules) if name.startswith(starts) or name in packages]


def _asks(recording: Recording) -> bool:
    """Return whether the model's own code called a replaced function, two frames above this one."""
    return recording.recording_here() and find_calling_frame(sys._getframe(2)) is not None


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
                f"{recording.place()}: {does} ({name}), which a graph cannot repeat at each call; do it outside of forward, or "
                f"{recording.way_out()}"
            )
        return original(*args, **kwargs)

    return refuse


@contextlib.contextmanager
def patch_torch(recording: Recording, training: bool | None, calls: Iterable[Patch]) -> Iterator[None]:
    """For the time of one run: `module.training`, autocast, gradient modes and `math` report to it, and those of `calls`."""

    def read_training(module: nn.Module) -> bool:
        own = bool(module.__dict__.get("training", True))
        if threading.get_ident() != recording.thread:
            return own
        if recording.paused:
            recording.results.reads_training = True
        else:
            recording.reads_training = True
            note(module)
        if recording.paused and recording.fake and type(module).__module__.startswith("torch."):
            return False  # shapes are the same, and no statistics are asked of fake tensors
        return own if training is None else training

    def note(module: nn.Module) -> None:
        reader = recording.modules[-1]
        if module is not reader and id(module) in recording.paths:
            recording.modes_read.add((recording.paths[id(reader)], recording.paths[id(module)]))

    def write_training(module: nn.Module, value: bool) -> None:
        if not recording.paused and recording.recording_here():
            note(module)
        module.__dict__["training"] = value

    patches = [
        *grad_patches(recording),
        *mode_patches(recording),
        *calls,
        *((math, name, wrap_math(name)) for name in functions.MATH),
        *list_tensor_classes(recording.recording_here, recording.reads_default_dtype),
        (nn.Module, "training", property(read_training, write_training)),
    ]
    before = []
    try:
        for owner, name, value in patches:
            before.append((owner, name, vars(owner).get(name, MISSING)))
            setattr(owner, name, value)
        # what the model compiles itself runs as it is written: its compiler would take the recording in
        eager = torch.compiler.set_stance("force_eager") if COMPILER in sys.modules else contextlib.nullcontext()
        with eager:
            yield
    finally:
        for owner, name, value in reversed(before):
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


# --- what modules drop when their mode changes

EMPTIED = (dict, list, set)
ANY_MODULES = frozenset(vars(nn.Module()))  # what every module has
Derived = list[tuple[nn.Module, str]]  # modules, and names of their attributes


def find_derived(model: nn.Module) -> Derived:
    """Return the values that modules drop when their mode changes, and those cached by a `functools.cached_property`.

    timm's LeViT, TinyViT and EfficientFormer cache the biases of their attention so. A graph with those as constants would keep
    them after the weights have changed. The model's mode is changed and changed back; whatever is None or empty in between was
    dropped; all is restored.
    """
    modules = list(model.modules())
    found = [(module, name) for module in modules for name in vars(module) if _is_cached_property(module, name)]
    if all(type(module).train is nn.Module.train for module in modules):
        return found
    kept = [(m, name) for m in modules for name, value in vars(m).items() if name not in ANY_MODULES and not _empty(value)]
    journal = Journal()  # layers that merge an update into their weight write it here
    try:
        with restore_after(State(model)), contextlib.suppress(Exception), journal:  # the model's own code
            for _ in range(2):
                model.train(not model.training)
            found += [(module, name) for module, name in kept if _empty(vars(module).get(name, MISSING))]
    finally:
        journal.put_back()
    return found


def drop(derived: Derived) -> None:
    """Take these out of the model; what was noted of it before gives them back."""
    for module, name in derived:
        if _is_cached_property(module, name):
            del vars(module)[name]
        else:
            value = vars(module)[name]
            setattr(module, name, type(value)() if type(value) in EMPTIED else None)


def _is_cached_property(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(type(module), name, None), functools.cached_property)


def _empty(value: Any) -> bool:
    return value is None or (type(value) in EMPTIED and not value)
