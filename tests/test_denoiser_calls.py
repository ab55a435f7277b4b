"""Calls of a denoiser as training makes them: what random pipelines give their schedulers, and outputs split by samples."""

from __future__ import annotations

import pytest
import torch
from fuzz_denoiser_calls import TRAITS, Pipeline, check, fuzz_denoiser_calls, observe_at_random

from fxplug.pipelines.denoiser_call import split_samples


@pytest.mark.parametrize(
    ("shape", "one", "dim"),
    [((3, 4, 2), (1, 4, 2), 0), ((4, 3, 2), (4, 1, 2), 1), ((6, 5), (2, 5), 0), ((3, 4, 2), (4, 2), 0), ((4, 2), (4, 2), None),
     ((4, 6), (4, 2), 1), ((6, 8), (2, 4), None), ((3, 4), (1, 4, 1), None), ((2, 6), (3, 2), None)],
)  # fmt: skip
def test_an_output_is_split_where_its_samples_are(shape, one, dim):
    tensor = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    found = split_samples(tensor, torch.Size(one), 3)
    if dim is None:
        assert found is None
    else:
        assert torch.equal(found, torch.stack([part.flatten() for part in tensor.chunk(3, dim)]))


@pytest.mark.slow
def test_denoisers_are_called_as_in_their_pipelines():
    assert fuzz_denoiser_calls(14, 30) == []


def test_no_prompt_is_left_out_where_guidance_is_off():
    def make(rng, _):
        return Pipeline(rng, "zero is without")

    assert observe_at_random(2, 0, TRAITS, make, check) == []


@pytest.mark.slow
def test_many_denoisers_are_called_as_in_their_pipelines():
    assert fuzz_denoiser_calls(50, 2000) == []
