"""Tensors that come later: whatever is done with them, views, writes and what was computed before, is as with ordinary ones."""

from __future__ import annotations

import random

import pytest
import torch

from fxplug.parallel.pipelines.deferred import DeferredComputation, DeferredTensor

X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
MADE = {
    "doubled": lambda x: x * 2,
    "of itself": lambda x: x + x.sigmoid(),
    "clone": lambda x: x.clone(),
    "detached": lambda x: x.detach(),
    "first": lambda x: x[:1],
    "half": lambda x: x.chunk(2, -1)[1],
    "turned": lambda x: x.transpose(0, -1),
    "flat": lambda x: x.reshape(-1),
    "whole": lambda x: x.view(x.shape),
    "mean": lambda x: x - x.mean(),
}
WRITTEN = {
    "scaled": lambda x: x.mul_(3),
    "zeroed": lambda x: x.zero_(),
    "a part": lambda x: x[:1].fill_(7),
    "by an index": lambda x: x.__setitem__((..., 0), 5),
    "through a view": lambda x: x.view(-1).add_(1) if x.is_contiguous() else x.add_(1),
}


def later(x):
    recipe = DeferredComputation()
    recipe.found["value", 0] = x.clone()
    return DeferredTensor(x, x.device, recipe, lambda recipe, like, why: recipe.at("value", 0))


def plain(x):
    return x.settled() if isinstance(x, DeferredTensor) else x


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_give_what_ordinary_tensors_give(seed):
    rng = random.Random(seed)
    pairs = [(X.clone(), later(X))]
    for _ in range(rng.randint(2, 9)):
        one, other = rng.choice(pairs)
        if rng.random() < 0.65:
            name, do = rng.choice(list(MADE.items()))
            pairs.append((do(one), do(other)))
        else:
            name, do = rng.choice(list(WRITTEN.items()))
            do(one), do(other)
        if rng.random() < 0.2:
            found, given = rng.choice(pairs)
            assert torch.equal(found, plain(given)), name
    for wanted, found in rng.sample(pairs, len(pairs)):
        assert torch.equal(wanted, plain(found)) and not plain(found).requires_grad


def test_numbers_and_arrays_are_those_of_the_whole():
    made = later(X) * 2
    assert made[0, 0].tolist() == (X * 2)[0, 0].tolist() and (made.numpy() == (X * 2).numpy()).all()
    assert made.sum().item() == (X * 2).sum().item() and not made.requires_grad
