"""Fake tensors, which have sizes and no memory: made directly, and torch's errors where they lack values."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from .dispatch import DisableTorchDispatch

# of FakeTensor we need `fake_device` and `constant`; of FakeTensorMode that real tensors may go in; of the two errors that they
# are raised for a number read from data and for a size that hangs on data; of the last that real tensors are made under it
__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "fake_of",
    "is_error_of_dynamo",
    "kept_on_fakes",
    "unset_fake_temporarily",
]


def fake_of(geometry: tuple[Any, ...], mode: FakeTensorMode, constant: Any = None) -> FakeTensor:
    """A fake tensor of (size, stride, dtype, device) without a dispatch; we need the constructor, and promise no view of it."""
    size, stride, dtype, device = geometry
    with DisableTorchDispatch():
        shadow = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, shadow, device, constant=constant)


@cache
def kept_on_fakes() -> frozenset[str]:
    """The names of what torch itself keeps in the `__dict__` of a fake tensor."""
    return frozenset(vars(fake_of(((1,), (1,), torch.float32, torch.device("cpu")), FakeTensorMode())))


def is_error_of_dynamo(error: BaseException) -> bool:
    """Whether dynamo raised an error; we need one base class of its errors, in a file that it imports before it raises any."""
    dynamo = sys.modules.get("torch._dynamo.exc")
    return dynamo is not None and isinstance(error, dynamo.TorchDynamoException)
