"""How a call finds its function: modes, subclasses of tensors, operators and their schemas."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "NATIVE",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "disabled_torch_function",
    "function_modes",
    "is_operator",
    "is_watched",
    "name_of",
    "schema",
    "wrapper_of",
]

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


def name_of(operator: OpOverload) -> str:
    """The "library::name" of an operator, without its overload."""
    return f"{operator.namespace}::{operator._opname}"


def is_operator(name: str) -> bool:
    """Whether there is an operator "library::name"; we need that asking for one that is missing is no error."""
    return bool(torch._C._jit_get_schemas_for_operator(name))


def is_watched() -> bool:
    """Whether something but autograd sees the calls that are made now: a mode, a transform of torch.func, a compiler or tracer.

    We need that each of them is known to torch while it looks on.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    transforms = torch._C._functorch.peek_interpreter_stack()
    return transforms is not None or bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
