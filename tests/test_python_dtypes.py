"""Python's own `int` and `float` as dtypes, in a file that has them: in the traced model, and in other threads meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from exact import difference
from torch import nn

import fxplug


class Apply(nn.Module):
    """A model of this file: what it calls is replaced here while it is traced."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(int) + torch.ones(x.shape[0], 1, dtype=int),
        lambda x: x.to(float) + torch.tensor([1, 2], dtype=float).sum() + torch.ones(1, dtype=bool),
        lambda x: x + torch.from_numpy(np.arange(4).astype(int)) + torch.tensor(np.zeros(1, dtype=float)),
    ],
)
def test_pythons_own_types_may_be_dtypes(function, tmp_path):
    model, x = Apply(function), torch.randn(3, 4) * 9
    fxplug.save(fxplug.trace(model, torch.randn(2, 4)), tmp_path)
    assert difference(model(x), fxplug.load(tmp_path)(x)) is None


def test_other_threads_have_pythons_own_types_while_a_model_is_traced():
    errors, done = [], threading.Event()

    def work():
        while not done.is_set():
            try:
                found = torch.zeros(2, dtype=int).dtype, int("3"), torch.Tensor(2, 3).shape, torch.LongTensor([1]).tolist()
                assert found == (torch.int64, 3, (2, 3), [1])
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            fxplug.trace(Apply(lambda x: x * int(x.shape[0] * 1.5) + torch.Tensor(1).zero_()), torch.randn(2, 4))
    finally:
        done.set()
        thread.join()
    assert errors == []
