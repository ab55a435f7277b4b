"""Random numbers of a step: the same on any number of processes, others at another step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxplug.training.random_draws import Draws


def drawn(draws, batch):
    return [
        draws.normal(batch, 3, 2),
        draws.uniform(batch),
        draws.integers(1000, batch),
        draws.like(torch.empty(batch, 2, dtype=torch.float64)),
        torch.rand(2, generator=draws.once()).expand(batch, 2),
    ]


@given(st.integers(0, 2**64), st.integers(0, 10**6), st.sampled_from([1, 2, 3, 4]), st.integers(1, 4))
def test_processes_share_the_draws_of_one(seed, step, world, batch):
    whole = drawn(Draws(seed, step), world * batch)
    parts = [drawn(Draws(seed, step, rank=rank, world=world), batch) for rank in range(world)]
    for one, *several in zip(whole, *parts, strict=True):
        assert torch.equal(one, torch.cat(several))


@pytest.mark.parametrize("other", [(1, 7, 0), (0, 8, 0), (0, 7, 1), (7, 0, 0)])
def test_any_other_seed_step_or_micro_step_draws_other_numbers(other):
    assert not torch.equal(Draws(0, 7, 0).normal(64), Draws(*other).normal(64))


def test_neighbouring_steps_are_unrelated():
    rows = torch.stack([Draws(0, step).normal(256) for step in range(64)])
    correlations = torch.corrcoef(rows) - torch.eye(64)
    assert correlations.abs().max() < 0.35 and correlations.abs().mean() < 0.08
