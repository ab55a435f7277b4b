"""The tiny pipelines that tests share are what they say: whole, the same again from a folder, and with captions that matter."""

import diffusers
import pytest
import tiny_pipelines
import torch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' own schedulers


@pytest.mark.parametrize("name", tiny_pipelines.CALLS)
def test_it_draws_by_its_caption_and_is_the_same_from_its_folder(name, tmp_path):
    pipe = tiny_pipelines.make(name)
    drawn = tiny_pipelines.draw(pipe, name)
    assert drawn.isfinite().all() and drawn.std() > 0.1
    for other in ("a gold ball", "a blue cat on the box, unheard"):
        assert not torch.equal(tiny_pipelines.draw(pipe, name, other), drawn), other
    call = {"height": tiny_pipelines.SIZE, "width": tiny_pipelines.SIZE, **tiny_pipelines.CALLS[name]}
    assert pipe(prompt="a cat", num_inference_steps=2, output_type="pt", **call)[0].shape[-2:] == (64, 64)
    again = diffusers.DiffusionPipeline.from_pretrained(tiny_pipelines.save(name, tmp_path), local_files_only=True)
    again.set_progress_bar_config(disable=True)
    for part in (part for part in again.components.values() if isinstance(part, torch.nn.Module)):
        tiny_pipelines.move_weights(part)
    assert torch.equal(tiny_pipelines.draw(again, name), drawn)
