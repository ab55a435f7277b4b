"""What a run saves answers its stock pipeline's calls where it is loaded: other sizes, numbers of texts and lengths of them."""

import random

import pytest
import tiny_pipelines
import torch
from PIL import Image

import fxplug
from fxplug.config.run_config import load_config
from fxplug.pipelines import call_forms

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' own schedulers
WORDS = "a red ball cat dog and on the gold box photo of blue".split()
LISTS = ("qwen_image", "z_image")  # models that are given samples in lists: a graph for each number of texts
REFUSED = (*LISTS, "ltx2")  # whose model takes the sides as numbers: there is a graph for those next to the call's own
QUICK = ("pixart", "ltx")


def saved(name, folder, **data):
    """A module that was rewritten and loaded again, its pipeline, and the part that it is."""
    tiny_pipelines.save(name, folder / "pipe")
    part = "unet" if name in ("sd15", "sdxl") else "transformer"
    config = {
        "model": {"pipeline": "pipe", "part": part, "call": tiny_pipelines.CALLS[name]},
        "data": {"images": ".", "size": 64, **data}, "passes": [{"lora": {"at": ["to_q", "to_v"], "rank": 2}}],
    }  # fmt: skip
    result = fxplug.rewrite(load_config(config, base=folder), verify=False)
    with torch.no_grad():
        for key, weight in result.module.named_parameters():
            if key.startswith("lora."):  # an adapter that has an effect
                weight.normal_(std=0.2, generator=torch.Generator().manual_seed(len(key)))
    fxplug.save(result.module, folder / "out")
    result.pipeline.set_progress_bar_config(disable=True)
    return fxplug.load(folder / "out"), result, part


def draw_calls(name, seed, count=10):
    """Calls of random sizes, numbers of texts and lengths, with guidance or without; the sizes are multiples of 32."""
    draw = random.Random(seed)
    for _ in range(count):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(draw.choice([1, 1, 2, 2, 3, 4]))]
        more = draw.choice([{}, {}, tiny_pipelines.UNGUIDED[name]])
        frames = {"num_frames": draw.choice([1, 9, 17])} if "num_frames" in tiny_pipelines.CALLS[name] else {}
        yield {"prompt": texts, "height": 32 * draw.randint(1, 5), "width": 32 * draw.randint(1, 5), **more, **frames}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in tiny_pipelines.CALLS])
def test_a_loaded_module_draws_any_size_and_number_of_texts_or_says_what_to_do(name, tmp_path):
    loaded, result, part = saved(name, tmp_path)
    pipe, answered, wanted = result.pipeline, 0, []
    calls = list(draw_calls(name, seed=len(name)))
    for module in (result.module, loaded):
        tiny_pipelines.move_weights(module)
    for way in (result.module, loaded):  # the first makes the graphs that it lacks, as the model is at hand
        setattr(pipe, part, fxplug.pipeline_part(way))
        for n, call in enumerate(calls):
            if way is result.module:
                wanted.append(tiny_pipelines.draw(pipe, name, steps=2, **call))
                continue
            try:
                assert torch.equal(tiny_pipelines.draw(pipe, name, steps=2, **call), wanted[n]), call
                answered += 1
            except fxplug.GuardError as error:
                assert name in REFUSED, call
                assert "data.size, data.buckets or model.call" in str(error)
    assert answered >= {"ltx2": len(calls) // 3}.get(name, len(calls) // 2 if name in REFUSED else len(calls))


@pytest.mark.slow
def test_sizes_are_asked_within_the_graph_and_no_graph_is_made_twice(tmp_path):
    loaded, result, _ = saved("pixart", tmp_path)
    assert len(loaded.modules_by_form) == 3  # its size, another height, and another width alone
    before = len(result.module.modules_by_form)
    pipe = result.pipeline
    given = {**tiny_pipelines.CALLS["pixart"], "prompt": "a cat", "height": 96, "width": 64}
    call = call_forms.ExampleCall(pipe, "transformer", given)
    assert call_forms.has_graph_for(result.module, call.first())
    call_forms.add_size_forms(result.module, [call])
    assert len(result.module.modules_by_form) == before
    assert result.module._variants.retrace is not None


class Decides(torch.nn.Module):
    """Makes a tensor on the CPU, wherever its input is, before it decides by a size."""

    def forward(self, x):
        y = x.relu() + torch.arange(2)
        return y * 2 if y.shape[0] > 2 else y


def test_a_graph_with_tensors_of_another_device_is_asked_for_the_devices_at_hand():
    module = fxplug.variants(fxplug.trace(Decides(), torch.ones(3, 2)), Decides())
    assert [call_forms.has_graph_for(module, ((torch.ones(size, 2),), {})) for size in (3, 4, 2)] == [True, True, False]


@pytest.mark.slow
def test_a_run_saves_the_graphs_of_its_buckets(tmp_path):
    tiny_pipelines.save("z_image", tmp_path / "pipe")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for n, (width, height) in enumerate([(64, 64), (128, 32), (32, 128), (64, 64), (128, 32), (32, 128)]):
        Image.new("RGB", (width, height), (40 * n, 90, 200)).save(pictures / f"{n}.png")
        (pictures / f"{n}.txt").write_text("a red ball")
    config = {
        "model": {"pipeline": "pipe"}, "passes": [{"lora": {"at": ["to_q"], "rank": 2}}],
        "data": {"images": "pictures", "size": 64, "buckets": {"step": 32}},
        "train": {"task": "denoise", "steps": 1, "batch": 1},
    }  # fmt: skip
    fxplug.train(load_config(config, base=tmp_path), out=tmp_path / "run")
    loaded = fxplug.load(tmp_path / "run" / "module")
    pipe = tiny_pipelines.make("z_image")
    for texts in (["a cat"], ["a cat", "a dog"]):
        for height, width in ((64, 64), (32, 128), (128, 32)):
            pipe.transformer = loaded
            assert tiny_pipelines.draw(pipe, "z_image", texts, steps=1, height=height, width=width).isfinite().all()
