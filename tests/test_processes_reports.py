"""Two processes are one: numbers by name, parameters without gradient, and what differs at the start."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from fuzz_runs import Net, Pictures
from runs import launched
from torch import nn

import fxplug


class Named(fxplug.Task):
    """Reports numbers that the processes do not have in common."""

    def loss(self, module, batch, draw):
        own = {"cat": 1.0, "both": 2.0} if draw.rank == 0 else {"dog": 3.0, "both": 4.0}
        return nn.functional.cross_entropy(module(batch["image"]), batch["label"]), own


class Extra(Net):
    """Has a layer that nothing calls, and one whose result no loss reads."""

    def __init__(self) -> None:
        super().__init__(False)
        self.extra, self.unread = nn.Linear(4, 4), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.unread(x.mean((2, 3)).repeat(1, 2))


class First(fxplug.Task):
    def loss(self, module, batch, draw):
        return nn.functional.cross_entropy(module(batch["image"])[0], batch["label"])


def fit(out, kind, seed=0):
    torch.manual_seed(seed if os.environ.get("RANK") == "1" else 0)
    net, task = (Net(False), Named()) if kind == "named" else (Extra(), First())
    gm = fxplug.trace(net, torch.randn(2, 3, 6, 6))
    given = {"trainable": ["**"], "steps": 3, "batch": 4, "log": {"tensorboard": False}, "device": "cpu", "quiet": True}
    trainer = fxplug.Trainer(gm, task, Pictures(24), **given)
    trainer.fit()
    if kind == "named":
        for record in trainer.history:
            assert (record["cat"], record["dog"], record["both"]) == (1.0, 3.0, 3.0)
    return trainer


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    cases = [("named", {"kind": "named"}, {}), ("extra", {"kind": "extra"}, {}), ("differ", {"kind": "named", "seed": 5}, {})]
    return launched(tmp_path_factory.mktemp("reports"), fit, *cases)


@pytest.mark.slow
def test_numbers_are_averaged_by_name_over_the_processes_that_report_them(answers):
    assert all(isinstance(one["named"], list) and len(one["named"]) == 3 for one in answers), answers


@pytest.mark.slow
def test_a_parameter_without_gradient_is_as_in_one_process(answers, tmp_path):
    assert all(isinstance(one["extra"], list) for one in answers), answers
    assert answers[0]["extra"] == answers[1]["extra"]


@pytest.mark.slow
def test_weights_that_differ_at_the_start_are_an_error_in_both(answers):
    for one in answers:
        assert one["differ"].startswith("TrainError: processes") and "weights at the start" in one["differ"]
