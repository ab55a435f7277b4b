"""What nn.Module, torch.fx, dynamo and the modes of gradients and autocast keep to themselves, and nested values as leaves.

The tables `_parameters`, `_buffers`, `_modules` and `_non_persistent_buffers_set` are what a subclass of nn.Module lives by,
and every file may read them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.fx.node import _get_qualified_name
from torch.nn.modules import module as torch_module
from torch.utils._contextlib import _DecoratorContextManager
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from .tensors import DisableTorchDispatch, DisableTorchFunction

__all__ = [
    "BatchNorm", "CASTING", "COMPILED", "CONTEXT_VARIABLES", "ConvNd", "DecoratorContextManager", "DropoutNd", "GLOBAL_HOOKS",
    "InstanceNorm", "NormBase", "TABLES", "WEIGHT_LISTS", "admit_hooks", "as_listened", "autocast_settings", "backward_hooks",
    "break_graph", "call_uncompiled", "call_with_hooks", "conv_forward", "enter_autocast", "exit_autocast", "forward_hooks",
    "get_modes", "is_compiling", "is_erased", "is_hooked", "is_listening", "is_refusing_hooks", "keep_floats_constant",
    "leave_frame", "leave_module", "list_hook_tables", "list_weights", "qualified_name", "read_kernel_modes", "refuse_hooks",
    "replace_forward", "set_grad_enabled", "set_modes", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only",
    "tree_structure", "tree_unflatten", "treespec_dumps", "treespec_loads", "without_compiler", "without_watchers",
]

# where a module keeps its state; what else `nn.Module()` has are hooks and `training`
TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
# a call with its hooks, but not what `module.compile()` put around it; we need that `nn.Module.__call__` ends there
call_with_hooks: Callable[..., Any] = nn.Module._call_impl
# where a module has what `module.compile()` put around its call; we need that it is called in the stead of the module, that
# without it the call is the module's own, and that copies of the module are without
COMPILED = "_compiled_call_impl"
# what is called before and after a module's forward
forward_hooks: Callable[[nn.Module], tuple[Any, Any]] = attrgetter("_forward_hooks", "_forward_pre_hooks")
# what is called in a module's backward
backward_hooks: Callable[[nn.Module], tuple[Any, Any]] = attrgetter("_backward_hooks", "_backward_pre_hooks")
# where a module keeps what is called around its forward and its backward
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALL_HOOKS = attrgetter(*_HOOK_TABLES)
# the dicts of hooks that a module has; they are objects of its own
list_hook_tables: Callable[[nn.Module], tuple[Any, ...]] = _ALL_HOOKS
# hooks that all modules of a process have, by the name of the dict in which they are
GLOBAL_HOOKS = {
    name: value
    for name, value in vars(torch_module).items()
    if name.startswith("_global_") and type(value) in (dict, OrderedDict)
}
# bases of torch's own layers, of all numbers of dimensions; NormBase is the first of what tracks statistics
BatchNorm, InstanceNorm = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
NormBase, ConvNd, DropoutNd = nn.modules.batchnorm._NormBase, nn.modules.conv._ConvNd, nn.modules.dropout._DropoutNd
# the base of torch's context managers that are decorators as well, such as no_grad; they hold nothing of a model
DecoratorContextManager = _DecoratorContextManager
# the method of a convolution's class in which it convolves; we need that its forward is nothing but a call of it
conv_forward: Callable[[type[nn.Module]], Any] = attrgetter("_conv_forward")
# where a recurrent layer has its weights, by names and as a list; they follow from its constructor
WEIGHT_LISTS = ("_flat_weights_names", "_all_weights", "_flat_weights", "_flat_weight_refs")


def is_hooked(module: nn.Module) -> bool:
    """Return whether hooks are registered for a module's forward or backward; we need the four dicts of its hooks."""
    return any(_ALL_HOOKS(module))


class _NoHooks(OrderedDict):  # type: ignore[type-arg]
    refuse: Callable[[], None]

    def __setitem__(self, key: Any, hook: Any) -> None:
        self.refuse()


def refuse_hooks(layer: nn.Module, refuse: Callable[[], None]) -> None:
    """Let `refuse`, which raises, meet whoever sets a hook on this layer; we need that hooks are set in the four dicts."""
    hooks = _NoHooks()
    hooks.refuse = refuse
    vars(layer).update(dict.fromkeys(_HOOK_TABLES, hooks))


def is_refusing_hooks(layer: nn.Module | None) -> bool:
    """Return whether `refuse_hooks` was applied to a layer."""
    return any(isinstance(vars(layer).get(name), _NoHooks) for name in _HOOK_TABLES) if layer is not None else False


def admit_hooks(layer: nn.Module) -> None:
    """Undo `refuse_hooks`, if it was done."""
    vars(layer).update({name: OrderedDict() for name in _HOOK_TABLES if isinstance(vars(layer)[name], _NoHooks)})


def list_weights(layer: nn.RNNBase) -> None:
    """Let a recurrent layer compute with the weights that it has now; we need this after its table was written."""
    layer._init_flat_weights()


# the name under which generated code calls a function
qualified_name: Callable[..., str] = _get_qualified_name
# whether a node was taken out of its graph
is_erased: Callable[[fx.Node], bool] = attrgetter("_erased")


# switches gradients; unlike torch.set_grad_enabled it makes no object. We need that modes of torch functions see it called
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# enters an autocast region (kind of device, dtype, enabled, cache) and gives what leaves it; compilers know both
enter_autocast: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
exit_autocast: Callable[[Any], Any] = torch.amp.autocast_mode._exit_autocast
# of a torch.autocast that was entered: whether it is enabled, and whether it keeps casted weights
autocast_settings: Callable[[Any], tuple[bool, bool]] = attrgetter("_enabled", "_cache_enabled")


F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
CONTEXT_VARIABLES = torch.__version__ >= "2.14"  # whether compiled code may read one, and is compiled anew for another value
_AS_IT_STANDS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)

# what dynamo has set to be given each frame that begins, None where it compiles nothing
_listener = torch._C._dynamo.eval_frame.get_eval_frame_callback
_listen = torch._C._dynamo.eval_frame.set_eval_frame
_set_aside = threading.local()


def leave_frame(code: CodeType) -> None:
    """Let frames of this code run as they stand, in compiled code too; we need that what they call is compiled."""
    set_code_exec_strategy(code, _AS_IT_STANDS)


def leave_module(module: ModuleType) -> None:
    """Let the functions of a Python file, and the methods of its classes, run as they stand; what they call is compiled."""
    todo = [function.__code__ for function in _functions(vars(module), module.__name__)]
    while todo:
        code = todo.pop()
        leave_frame(code)
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _functions(names: Mapping[str, Any], home: str) -> Iterator[FunctionType]:
    for value in names.values():
        if isinstance(value, type) and value.__module__ == home:
            yield from _functions(vars(value), home)
        else:
            found = inspect.unwrap(value) if callable(value) else value
            if isinstance(found, FunctionType) and found.__module__ == home:
                yield found


def without_compiler(function: F) -> F:
    """Wrap a function so that no compiler traces it or what it calls, as `torch.compiler.disable` does, which imports
    dynamo."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        plain = torch.compiler.disable(function) if is_listening() else function  # type: ignore[no-untyped-call]
        return plain(*args, **kwargs)

    leave_frame(wrapper.__code__)  # type: ignore[attr-defined]
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]  # what dynamo asks of a function that it meets
    return wrapper  # type: ignore[return-value]


def break_graph(message: str) -> None:
    """End the graph that is compiled here, an error with this message where it has to be one; for code that is compiled."""
    torch._dynamo.graph_break(msg=message)


def without_watchers(function: F) -> F:
    """Wrap a function so that compilers, modes, transforms and autograd do not see it; we need that all of them are restored in
    order."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        listener = _listen(None)
        try:
            with temporarily_clear_interpreter_stack(), DisableTorchFunction(), DisableTorchDispatch(), torch.no_grad():
                return function(*args, **kwargs)
        finally:
            _listen(listener)

    leave_frame(wrapper.__code__)  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


@functools.cache
def keep_floats_constant() -> Any:
    """Return a context in which the numbers of layers (`eps`, `p`) are constants of a compiled program, also with
    `dynamic=True`.

    We need that compiled code may enter it, as torch 2.15 cannot pass inputs of the program on to a nested region. Torch's own
    list of settings that such code may change does not have this one.
    """
    from torch._dynamo import config
    from torch._dynamo.decorators import DynamoConfigPatchProxy

    return DynamoConfigPatchProxy(config.patch(specialize_float=True))


def is_listening() -> bool:
    """Return whether frames that begin now are compiled; we need that dynamo has then set a callback, and neither None nor
    False."""
    return callable(_listener())


def call_uncompiled(times: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that is not compiled, nor what it calls, but for what goes through `as_listened`.

    That may be the same code up to so many `times`, for which it may be compiled as often as once for each as else for one. We
    need that what dynamo gives frames to is of one thread, can be taken away, and given back as it was.
    """
    from torch._dynamo import config

    outer, listener = getattr(_set_aside, "listener", None), _listen(None)
    _set_aside.listener = listener
    limits = {name: times * getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    try:
        with config.patch(limits):
            return function(*args, **kwargs)
    finally:
        _set_aside.listener = outer
        _listen(listener)


def is_compiling() -> bool:
    """Return whether code that goes through `as_listened` now is compiled."""
    return getattr(_set_aside, "listener", None) is not None


def as_listened(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function with the compiler that was listening when this thread entered `call_uncompiled`; else as any other."""
    listener = getattr(_set_aside, "listener", None)
    if listener is None:
        return function(*args, **kwargs)
    before = _listen(listener)
    try:
        return function(*args, **kwargs)
    finally:
        _listen(before)


for _function in (call_uncompiled, as_listened, is_compiling):
    leave_frame(_function.__code__)


@contextlib.contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute by another function inside the context, wherever it is called."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        vars(module).pop("forward", None)
        if own is not None:
            vars(module)["forward"] = own


# --- the modes of torch, as one value


def _casts(kind: str) -> bool:
    try:
        torch.is_autocast_enabled(kind)
    except RuntimeError:
        return False
    return True


# device types that torch has autocast for, whether there is such a device or not; every version of it has others
CASTING = tuple(filter(_casts, ["cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu", "privateuseone"]))


def get_modes() -> dict[str, Any]:
    """Return the modes of torch that code in forward, and a graph between its enter and exit nodes, can switch, by name."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "gradients": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "autocast's depth": depth,
        **{f"autocast on {kind}": (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in CASTING},
    }


def set_modes(before: dict[str, Any]) -> None:
    """Set the modes to a result of `get_modes`."""
    set_grad_enabled(before["gradients"])
    torch.set_default_dtype(before["the default dtype"])
    for kind in CASTING:
        enabled, dtype = before[f"autocast on {kind}"]
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(before["autocast's cache"])
    while get_modes()["autocast's depth"] > before["autocast's depth"]:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _list_settings(names: str) -> list[Callable[[], Any]]:
    return [getattr(torch._C, f"_get_{name}") for name in names.split() if hasattr(torch._C, f"_get_{name}")]


# the settings of kernels that torch keeps in C, each with a function that says it; a version has those that it has
_SETTINGS = _list_settings(
    "deterministic_algorithms cpu_allow_fp16_reduced_precision_reduction mkldnn_enabled mkldnn_deterministic nnpack_enabled "
    "qengine flash_sdp_enabled math_sdp_enabled mem_efficient_sdp_enabled math_sdp_allow_fp16_bf16_reduction "
    "overrideable_sdp_enabled"
)
_CUDA_SETTINGS = _list_settings(
    "blas_preferred_backend cublas_allow_bf16_reduced_precision_reduction cublas_allow_fp16_accumulation fa3_sdp_enabled "
    "cublas_allow_fp16_reduced_precision_reduction cudnn_benchmark cudnn_deterministic cudnn_enabled cudnn_sdp_enabled"
)
_PRECISION: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_OPERATIONS = ("matmul", "conv", "rnn") if _PRECISION else ()
_SMALLEST = sys.float_info.min
_EINSUM: Any = torch.backends.opt_einsum
_EINSUM_TABLES = vars(_EINSUM), vars(getattr(_EINSUM, "m", _EINSUM))  # of what stands for the module, and of the module


def read_kernel_modes() -> tuple[Any, ...]:
    """Return the modes of torch that kernels ask, which may compute other bits in another one; those of CUDA where it is used.

    We need of the functions in C that each says one setting. That small numbers are flushed to zero nothing says: a division
    tells it of this thread, which `torch.set_flush_denormal` sets.
    """
    own, inner = _EINSUM_TABLES
    found = [
        torch.is_inference_mode_enabled(), torch.get_num_threads(), torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.backends.mha.get_fastpath_enabled(),
        _SMALLEST / 2 == 0, *[own.get(name, inner.get(name)) for name in ("enabled", "strategy")],
        *[read() for read in _SETTINGS], *[_PRECISION("mkldnn", name) for name in _OPERATIONS],
    ]  # fmt: skip
    if not _OPERATIONS:
        found.append(torch.get_float32_matmul_precision())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found += [read() for read in _CUDA_SETTINGS]
        found += [_PRECISION("cuda", name) for name in _OPERATIONS]
        if not _OPERATIONS:
            found.append(torch.backends.cudnn.allow_tf32)
    return tuple(found)
