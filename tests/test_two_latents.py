"""Pipelines with latents of a video and of its sound: those of pictures are seen and trained apart, or refused in words."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import runs
import tiny_pipelines as tiny
import torch
from fuzz_two_latents import TRAITS, Pipeline, check, fuzz_two_latents
from test_pipeline_denoise import SIZE, batch_of, config, set_up

import fxplug
from fxplug.core.errors import SpecError, TrainError
from fxplug.pipelines.observation import confirm, observe
from fxplug.training.random_draws import Draws
from fxplug.training.tasks.pipeline_denoise import PipelineDenoise

CALL = {**tiny.CALLS["ltx2"], "height": SIZE[0], "width": SIZE[1]}
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")


@pytest.fixture(autouse=True, scope="module")
def shared():
    """The runs of this file have what is traced and seen of a tiny pipeline in common; what is observed itself is not."""
    with runs.sharing():
        yield


@pytest.mark.slow
def test_what_is_said_of_a_denoiser_of_video_and_sound():
    pipe = tiny.make("ltx2")
    before = tiny.draw(pipe, "ltx2")
    seen = observe(pipe, CALL)
    text = seen.describe()
    assert "time        timestep = sigma = the scheduler's\n" in text
    assert "transformer's output [40] -> [1, 4, 8], in order, 32 of 40 elements taken" in text
    assert "apart       without audio_hidden_states, of other latents, by isolate_modalities=True" in text
    assert confirm(pipe, seen) < 1e-5
    assert torch.equal(tiny.draw(pipe, "ltx2"), before)


def test_the_times_of_both_latents_are_not_stepped_twice():
    """The pipeline copies its scheduler for the sound: each has its own steps in a recorded run."""
    from fxplug.pipelines.recorded_run import record_run

    call = {**CALL, "prompt": "a red ball", **tiny.UNGUIDED["ltx2"]}
    run = record_run(tiny.make("ltx2"), call, steps=3)
    assert [step.place for step in run.steps] == [0, 1] * 3 and not run.changed
    assert [run.steps[n].calls is run.steps[n + 1].calls for n in (0, 2, 4)] == [True] * 3
    assert float(run.scheduler.sigmas[run.scheduler.step_index]) == 0


@pytest.mark.slow
def test_the_loss_is_that_of_the_video_without_the_sound():
    """By hand: flow matching on normalised, packed latents; the model called with video and sound apart, whatever the sound."""
    pipe, batch = tiny.make("ltx2"), batch_of("a red ball", "a blue cat")
    task = set_up(PipelineDenoise(pipe, tiny.CALLS["ltx2"], samples=0))
    one, draw, vae, model = task.sized.of(SIZE), Draws(0, 1), pipe.vae, pipe.transformer
    with torch.no_grad():
        found = float(task.loss(model, dict(batch), Draws(0, 1)))
        position, losses = draw.uniform(2), []
        made = vae.encode(batch["image"][:, :, None]).latent_dist
        z = made.mean + made.std * draw.like(made.mean)
        z = (z - vae.latents_mean.view(1, -1, 1, 1, 1)) * vae.config.scaling_factor / vae.latents_std.view(1, -1, 1, 1, 1)
        x = z.flatten(2).transpose(1, 2)
        noise = draw.like(x)
        sigmas = one.noise.sigmas[one.steps[(position * len(one.steps)).long()]].float()
        for row, caption in enumerate(batch["caption"]):
            sigma, time = sigmas[row], sigmas[row : row + 1] * 1000
            text, mask = pipe.encode_prompt(caption, do_classifier_free_guidance=False)[:2]
            video_text, sound_text, mask = pipe.connectors(text, mask, padding_side="left")
            predicted, _ = model(
                hidden_states=(1 - sigma) * x[row : row + 1] + sigma * noise[row : row + 1],
                audio_hidden_states=torch.full((1, 1, 8), 3.3), encoder_hidden_states=video_text,
                audio_encoder_hidden_states=sound_text, timestep=time, sigma=time, encoder_attention_mask=mask,
                audio_encoder_attention_mask=mask, num_frames=1, height=2, width=2, audio_num_frames=1,
                isolate_modalities=True, use_cross_timestep=True, return_dict=False,
            )  # fmt: skip
            losses.append((predicted - (noise - x)[row : row + 1]).square().mean())
    assert found == pytest.approx(float(sum(losses) / 2), rel=1e-6)


@pytest.mark.slow
def test_without_a_call_that_keeps_them_apart_it_is_refused():
    off = {"modality_scale": 1.0, "audio_modality_scale": 1.0}
    with pytest.raises(SpecError, match="latents of LTX2Pipeline: .*depends on audio_hidden_states, .*no call of it that"):
        observe(tiny.make("ltx2"), {**CALL, **off})


@pytest.mark.slow
def test_layers_of_the_sound_alone_get_no_gradient(tmp_path):
    given = config(tmp_path, "ltx2", passes=[{"lora": {"at": ["audio_attn1.to_q"], "rank": 4}}])
    with pytest.raises(TrainError, match="not depend on any trained parameter: hidden_states is trained without audio_"):
        fxplug.train(given, out=tmp_path / "b", quiet=True)


@pytest.mark.slow
def test_what_a_run_saves_draws_in_the_stock_pipeline(tmp_path):
    """A loaded module has no model at hand; the pipeline asks its layers for positions, which it makes by its own settings, and
    calls it three times in a step, with other settings each time."""
    run = fxplug.train(config(tmp_path, "ltx2"), out=tmp_path / "run", quiet=True)
    log = (tmp_path / "run" / "log.jsonl").read_text()  # it says which layers got no gradient, and why
    assert "audio_attn1.to_q" in log
    assert "hidden_states is trained without audio_hidden_states, by isolate_modalities=True" in log
    pipes = [tiny.make("ltx2") for _ in range(3)]
    pipes[1].transformer = fxplug.pipeline_part(fxplug.load(tmp_path / "run" / "module"))
    pipes[2].load_lora_weights(str(Path(run.out) / "adapter"))
    for more in (tiny.UNGUIDED["ltx2"], {}, {"prompt": ["a cat", "a dog"]}):
        base, module, adapter = (tiny.draw(pipe, "ltx2", **more) for pipe in pipes)
        assert torch.allclose(module, adapter, atol=1e-5 * max(1, float(adapter.abs().max()))), more
        assert float((module - base).abs().max()) > 1e-3


@pytest.mark.slow
def test_videos_train_it_too(tmp_path):
    from PIL import Image

    for name in ("ball", "cat"):
        (tmp_path / "clips" / name).mkdir(parents=True)
        for frame in range(9):
            Image.new("RGB", SIZE, (20 * frame, 90, 200)).save(tmp_path / "clips" / name / f"{frame:02}.png")
        (tmp_path / "clips" / f"{name}.txt").write_text(f"a {name}")
    given = config(tmp_path, "ltx2")
    given["model"]["call"] = {}
    given["data"] = {"videos": str(tmp_path / "clips"), "frames": 9, "size": SIZE[0], "cache": False}
    run = fxplug.train(given, out=tmp_path / "run", quiet=True)
    assert [row["step"] for row in run.history] == [1, 2]
    assert "adapter/ in the stock pipeline: equal" in (tmp_path / "run" / "log.jsonl").read_text()


@pytest.mark.slow
def test_random_pipelines_of_two_latents_are_observed_as_they_are_or_refused():
    """`make fuzz` has as many as it is given."""
    assert fuzz_two_latents(16, 100) == []


@pytest.mark.slow
@pytest.mark.parametrize("trait", TRAITS)
def test_each_trait_by_which_a_picture_cannot_be_trained_alone_is_refused(trait):
    assert [check(Pipeline(random.Random(seed), trait)) for seed in range(2)] == [None] * 2
