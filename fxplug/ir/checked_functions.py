"""Functions of torch that trust their callers, behind checks of what they trust: on odd arguments they end the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..errors import GuardError
from ..torch_internals import kernels
from ..torch_internals.dispatch import DisableTorchFunction
from ..torch_internals.fakes import FakeTensor


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`v` of any shape with the norms `g` along `dim`; with `dim` -1 it is one norm. Raises GuardError."""
    fits = 0 <= dim < v.dim() and g.numel() == v.shape[dim] or dim == -1 and v.dim() > 0 and g.numel() == 1
    if not fits or g.device != v.device:
        raise GuardError(
            f"the norms of {tuple(v.shape)} along dimension {dim} cannot be {tuple(g.shape)} on {g.device}, not {v.device}"
        )
    return kernels.weight_norm(v, g, dim)  # type: ignore[no-any-return]


def pad_packed_sequence(data: Tensor, batch_sizes: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The sequences of a packed one, padded, and their lengths. Raises GuardError."""
    _check_sizes(batch_sizes, data)
    padded, lengths = kernels.pad_packed_sequence(data, batch_sizes, *args, **kwargs)
    return padded, lengths


def packed_sequence(data: Tensor, batch_sizes: Tensor | None = None, *args: Any, **kwargs: Any) -> PackedSequence:
    """A packed sequence of the rows `data`. Raises GuardError."""
    if batch_sizes is not None:
        _check_sizes(batch_sizes, data)
    return PackedSequence(data, batch_sizes, *args, **kwargs)


def recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer's function, which takes rows and batch sizes in the place of a padded input too."""

    @wraps(function)
    def checked(data: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes = kwargs.get("batch_sizes", args[0] if args else None)
        if isinstance(sizes, Tensor) and not sizes.is_floating_point():
            _check_sizes(sizes, data)
        return function(data, *args, **kwargs)

    return checked


def _check_sizes(sizes: Tensor, data: Tensor) -> None:
    """Batch sizes never grow from step to step, and their sum is the number of rows: else memory is read that is not there."""
    if sizes.dim() != 1 or sizes.dtype != torch.int64 or sizes.device.type != "cpu":
        raise GuardError(f"batch sizes are int64, one dimension, on the CPU; these are {sizes.dtype} {tuple(sizes.shape)}")
    if torch.compiler.is_compiling() or isinstance(sizes, FakeTensor):
        return
    with DisableTorchFunction():
        found = sizes.tolist()
        rows = data.shape[0] if data.dim() else 0
    if not found or found[-1] < 1 or found != sorted(found, reverse=True) or sum(found) != rows:
        raise GuardError(f"batch sizes from step to step, {found[:8]}, do not grow, and their sum is that of the {rows} rows")
