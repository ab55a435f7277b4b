"""A module that was saved answers the calls of its pipeline where it is loaded again, without the model."""

import pytest
import tiny_pipelines
import torch

import fxplug
from fxplug.core.ir import context_managers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' own schedulers


@pytest.mark.parametrize("as_part", [False, True])
def test_a_loaded_module_is_put_in_and_opens_the_context_managers_of_its_class(as_part, tmp_path):
    pipe = tiny_pipelines.make("flux")  # its call opens `transformer.cache_context`
    drawn = tiny_pipelines.draw(pipe, "flux")
    traced = fxplug.trace_pipeline(pipe, parts="transformer", prompt="a cat", height=64, width=64)["transformer"]
    assert traced.meta[context_managers.NAMES] == ["cache_context"]
    if as_part:  # as of an artifact of before, which does not have the names
        del traced.meta[context_managers.NAMES]
    fxplug.save(traced, tmp_path / "part")
    loaded = fxplug.load(tmp_path / "part")
    pipe.transformer = fxplug.pipeline_part(loaded) if as_part else loaded
    assert torch.equal(tiny_pipelines.draw(pipe, "flux"), drawn)
    with pytest.raises(AttributeError, match="enable_cache"):  # which is none, and would do something
        loaded.enable_cache()


def test_names_of_context_managers_that_a_file_has_wrong_are_not_used():
    gm = fxplug.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    for odd in (None, 3, "cache_context", {"cache_context": 1}):
        gm.meta[context_managers.NAMES] = odd
        with pytest.raises(AttributeError, match="has no attribute 'cache_context'"):
            _ = gm.cache_context
