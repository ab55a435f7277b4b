"""Tensors, their memory, and what a call goes through: modes, subclasses, schemas, fakes, symbolic sizes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DataDependentOutputException", "DisableTorchDispatch", "DisableTorchFunction", "DynamicOutputShapeException",
    "FakeTensor", "FakeTensorMode", "NATIVE", "Node", "OpOverload", "OpOverloadPacket", "TorchDispatchMode", "as_parameter",
    "assert_later", "check", "disabled_torch_function", "flash_cpu", "flash_cpu_backward", "flash_cuda",
    "flash_cuda_backward", "function_modes", "get_gradient_hooks", "get_qualified_name", "get_size_name",
    "is_error_of_dynamo", "is_operator", "is_transforming", "is_watched", "lerp_all", "list_fake_attributes",
    "make_fake_tensor", "make_flop_counter", "memory_id", "onednn_linear", "pack_padded_sequence", "pad_packed_sequence",
    "pad_sequence", "schema", "set_gradient_hooks", "set_version", "unset_fake_temporarily", "version", "weight_norm",
    "without_duck_sizes", "wrapper_of",
]

# how often a tensor's memory was written; we need that operations in place count, and promise no number. Not in inference mode
version: Callable[[torch.Tensor], int] = attrgetter("_version")
# a number that two storages share if they are one memory, on the meta device too, where addresses are all 0
memory_id: Callable[[Any], int] = attrgetter("_cdata")
# in eager code an error where a value is not truth, and in a compiled or exported program a check in it
check: Callable[..., None] = torch._check
# an error when the tensor of one truth value is false; on a GPU nothing waits for it
assert_later: Callable[[torch.Tensor, str], None] = torch._assert_async
# every tensor of a list moves towards that of another by a weight, in few kernels
lerp_all: Any = torch._foreach_lerp_


def is_transforming() -> bool:
    """Return whether a transform of torch.func or forward-mode differentiation is active; we need functorch's stack and the
    level."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def get_gradient_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Return the hooks that `register_hook` added to a tensor, by number; we need them all, and no order."""
    return dict(tensor._backward_hooks or {})


def set_gradient_hooks(tensor: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Leave a tensor these of its hooks."""
    for number in [number for number in tensor._backward_hooks or {} if number not in hooks]:
        del tensor._backward_hooks[number]  # type: ignore[union-attr]


def set_version(tensor: torch.Tensor, number: int) -> None:
    """Give a tensor back the version that it had; we need that autograd believes it."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (number,))


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as an nn.Parameter and return it; we need that `isinstance` checks this mark on any tensor."""
    tensor._is_param = True
    return tensor


# under it no mode and no subclass sees a torch function; unlike DisableTorchFunctionSubclass it holds for modes too
DisableTorchFunction: Any = torch._C.DisableTorchFunction
# under it no mode and no subclass sees an operator
DisableTorchDispatch: Any = torch._C._DisableTorchDispatch
# a `__torch_function__` for subclasses that want to see operators only
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
# the modes of torch functions that listen now; we need that one which is handling a call is none of them
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
# a tensor of a subclass with sizes, dtype and device and without memory
wrapper_of: Any = torch.Tensor._make_wrapper_subclass
# the schema of an OpOverload: `arguments` with name, default_value and alias_info.is_write, `returns`, `is_mutable`
schema: Callable[[Any], Any] = attrgetter("_schema")
# the module in which torch's C functions lie; some of them are asked for there too
NATIVE: Any = torch._C


def get_qualified_name(operator: OpOverload) -> str:
    """Return the "library::name" of an operator, without its overload."""
    return f"{operator.namespace}::{operator._opname}"


def is_operator(name: str) -> bool:
    """Return whether an operator "library::name" exists; we need that the query is no error if it does not."""
    return bool(torch._C._jit_get_schemas_for_operator(name))


def is_watched() -> bool:
    """Return whether a mode, a transform of torch.func, a compiler or tracer sees the calls that are made now.

    We need that each of them is known to torch while it is active.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    transforms = torch._C._functorch.peek_interpreter_stack()
    return transforms is not None or bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


# of FakeTensor we need `fake_device` and `constant`; of FakeTensorMode that real tensors may go in; of the two errors that they
# are raised for a number read from data and for a size that hangs on data; of the last that real tensors are made under it
def make_fake_tensor(geometry: tuple[Any, ...], mode: FakeTensorMode, constant: Any = None) -> FakeTensor:
    """Return a fake tensor of (size, stride, dtype, device) made without a dispatch; we need the constructor, and promise no
    view of it."""
    size, stride, dtype, device = geometry
    with DisableTorchFunction(), DisableTorchDispatch():
        shadow = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, shadow, device, constant=constant)


@cache
def list_fake_attributes() -> frozenset[str]:
    """Return the names of the attributes that torch itself keeps in the `__dict__` of a fake tensor."""
    return frozenset(vars(make_fake_tensor(((1,), (1,), torch.float32, torch.device("cpu")), FakeTensorMode())))


def is_error_of_dynamo(error: BaseException) -> bool:
    """Return whether dynamo raised an error; we need one base class of its errors, in a file that it imports before it raises
    any."""
    # nothing plainer: importing dynamo takes a second
    dynamo = sys.modules.get("torch._dynamo.exc")
    return dynamo is not None and isinstance(error, dynamo.TorchDynamoException)


class Node:
    """What torch's own code asks the `node` of a SymInt; every answer is a decision about the value.

    We need that torch asks nothing else for an operation with such a number among its arguments.
    """

    constant = None
    shape_env = None

    def __init__(self, number: Any) -> None:
        self.number = number  # with its `value` and its `recorder`, which says whether it is `active`

    def guard_int(self, file: str = "", line: int = 0) -> int:
        """Return the decided value, for a line of torch."""
        return int(self.number)

    int_ = guard_int

    def guard_bool(self, file: str, line: int) -> bool:
        """Return whether the decided value is not zero, for a line of torch."""
        return bool(self.number)

    expect_true = guard_or_true = guard_or_false = guard_size_oblivious = guard_bool

    def guard_float(self, file: str, line: int) -> float:
        """Return the decided value, for a line of torch."""
        return float(self.number)

    def maybe_as_int(self) -> Any:
        """None while it is recorded, so that torch asks no shortcut; the value afterwards."""
        return None if self.number.recorder.active else self.number.value

    maybe_as_float = maybe_as_int

    def is_int(self) -> bool:
        """Return whether the value is an int."""
        return type(self.number.value) is int

    def is_float(self) -> bool:
        """Return whether the value is a float."""
        return type(self.number.value) is float

    def is_symbolic(self, *place: Any) -> bool:
        """Yes: it stands for more than its value, which is known; and a size is never below zero."""
        return True

    has_hint = expect_size = is_symbolic

    def is_constant(self) -> bool:
        """No: it may be another value at the next call; and conditions are numbers of 0 and 1 here."""
        return False

    is_nested_int = is_bool = is_constant

    @property
    def hint(self) -> Any:
        """Value for the example inputs."""
        return self.number.value

    def _graph_repr(self) -> str:
        return repr(self.number.value)


def get_size_name(size: torch.SymInt) -> int | str | None:
    """Return a number, the name of a dynamic size, or None for a size derived from others; we need this of an exported
    program."""
    known = size.node.maybe_as_int()
    if known is not None:
        return int(known)
    return str(size.node.expr) if size.node.expr.is_Symbol else None


# a (rows, inner) @ b (columns, inner).T + bias, the activation "none", its scalars and its algorithm; None without oneDNN
onednn_linear: Any = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None  # type: ignore[no-untyped-call]
# attention with the logarithm of its denominators; on a CPU that is 0 for rows that see nothing
flash_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# the same; with lengths (3), random state and an unused tensor, as its backward wants them
flash_cuda: Any = torch.ops.aten._scaled_dot_product_flash_attention
flash_cuda_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
# what torch.nn.utils calls and a trace therefore meets; these trust their callers
weight_norm: Any = torch._weight_norm
pack_padded_sequence: Any = torch._pack_padded_sequence
pad_packed_sequence: Any = torch._pad_packed_sequence
pad_sequence: Any = torch._C._nn.pad_sequence


def make_flop_counter() -> Any:
    """Return a FlopCounterMode that counts oneDNN's products, torch.nn's fast paths, and attention on a CPU (torch's from
    2.15)."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def flash(query: Any, key: Any, value: Any, *_: Any, **more: Any) -> int:
        return sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call, no-any-return]

    def product(x: Any, weight: Any, *_: Any, **more: Any) -> Any:
        return 2 * math.prod(x) * weight[0]

    def packed(query: Any, key: Any, value: Any, width: int, *_: Any, **more: Any) -> Any:
        batch, rows, columns = query[0], query[1], key[1]
        return 4 * batch * width * (width * (rows + columns) + rows * columns)

    def layer(source: Any, width: int, *given: Any, **more: Any) -> Any:
        hidden = next(shape for shape in given[10:] if shape is not None and len(shape) == 2)[0]
        return packed(source, source, source, width) + 4 * source[0] * source[1] * width * hidden

    def padded(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_nested or value.layout is not torch.strided:
            return value
        return torch.empty(value.size(0), *value._nested_tensor_size().amax(0).tolist(), device="meta")

    class Counter(FlopCounterMode):  # TransformerEncoder nests what is padded, and a nested tensor has no shape to count by
        def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
            super()._count_flops(func_packet, padded(out), [padded(arg) for arg in args], kwargs)  # type: ignore[no-untyped-call]
            return out

    fast = {torch.ops.aten._native_multi_head_attention: packed, torch.ops.aten._transformer_encoder_layer_fwd: layer}
    fast |= {} if onednn_linear is None else {onednn_linear: product}
    return Counter(display=False, custom_mapping={flash_cpu: flash, **fast})


class CallLimit(TorchFunctionMode):
    """A mode in which at most so many functions of torch are called: the next one raises `error`."""

    def __init__(self, calls: int, error: Exception) -> None:
        super().__init__()
        self.calls, self.error = calls, error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return func(*args, **(kwargs or {}))


def without_duck_sizes(wanted: bool = True) -> AbstractContextManager[Any]:
    """Compile programs, within a block, in which two sizes that are equal now may differ later; unless not `wanted`, as ever.

    Otherwise a batch of 8 samples and 8 tokens are one symbol, and a batch of 4 is compiled again.
    """
    import torch.fx.experimental._config as config  # after the compiler's own modules

    options: Any = config
    return options.patch(use_duck_shape=False) if wanted else nullcontext()
