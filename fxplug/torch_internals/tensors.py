"""Tensors and their memory: how often one was written, which memory is the same, and functions without a public name."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

__all__ = [
    *("as_parameter", "assert_later", "check", "gradient_hooks", "lerp_all", "memory_id", "set_gradient_hooks"),
    *("set_version", "version"),
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


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """What `register_hook` has put on a tensor, by number; we need them all, and no order."""
    return dict(tensor._backward_hooks or {})


def set_gradient_hooks(tensor: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Leave a tensor these of its hooks."""
    for number in [number for number in tensor._backward_hooks or {} if number not in hooks]:
        del tensor._backward_hooks[number]  # type: ignore[union-attr]


def set_version(tensor: torch.Tensor, number: int) -> None:
    """Give a tensor back the version that it had; we need that autograd believes it."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (number,))


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that counts as an nn.Parameter, itself; we need that `isinstance` asks for this mark on any tensor."""
    tensor._is_param = True
    return tensor
