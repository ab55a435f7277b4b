"""The loss of the task on a pipeline is that of diffusers' own training scripts, with the same noise, times and VAE samples.

The scripts are those in examples/dreambooth and examples/text_to_image of diffusers: train_dreambooth_lora_flux, _sd3 (without
precondition_outputs), _qwen_image and _z_image, train_text_to_image_lora and _sdxl. What they compute is written down here.
"""

from __future__ import annotations

import pytest
import tiny_pipelines as tiny
import torch
from diffusers import DDPMScheduler

from fxplug.training.random_draws import Draws
from fxplug.training.tasks.pipeline_denoise import PipelineDenoise
from fxplug.training.tasks.task import TaskInfo

CAPTIONS = ["a red ball", "a blue cat"]


def picture(seed=1):
    return torch.rand(2, 3, tiny.SIZE, tiny.SIZE, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def task_of(name, pipe, **options):
    task = PipelineDenoise(pipe, tiny.CALLS[name], samples=0, **options)
    task.setup(torch.nn.Identity(), TaskInfo((tiny.SIZE, tiny.SIZE)))
    return task


class Drawn:
    """What a step draws, in the order in which the task draws it."""

    def __init__(self, pipe, image):
        draw = Draws(3, 1)
        self.u = draw.uniform(2)
        found = pipe.vae.encode(image[:, :, None] if hasattr(pipe.vae.config, "latents_mean") and pipe.vae.config.get("z_dim")
                                else image).latent_dist  # fmt: skip
        self.encoded = found.mean + found.std * draw.like(found.mean)
        self.draw = draw

    def noise(self, x):
        return self.draw.like(x)


def flow_step(pipe, drawn, x0):
    """Noise, noisy latents, times and target, as the scripts of flow matching take them of the scheduler."""
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    index = (drawn.u * scheduler.config.num_train_timesteps).long()
    sigma = scheduler.sigmas[index].reshape(-1, *[1] * (x0.dim() - 1))
    noise = drawn.noise(x0)
    return (1.0 - sigma) * x0 + sigma * noise, scheduler.timesteps[index], noise - x0


def flux(pipe, drawn):
    z = (drawn.encoded - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    x, time, target = flow_step(pipe, drawn, pipe._pack_latents(z, 2, *z.shape[1:]))
    ids = pipe._prepare_latent_image_ids(2, z.shape[2] // 2, z.shape[3] // 2, "cpu", torch.float32)
    words, pooled, text_ids = pipe.encode_prompt(CAPTIONS, CAPTIONS)
    pred = pipe.transformer(
        hidden_states=x, timestep=time / 1000, guidance=torch.full((2,), 3.5), pooled_projections=pooled,
        encoder_hidden_states=words, txt_ids=text_ids, img_ids=ids, return_dict=False,
    )[0]  # fmt: skip
    return pred, target


def sd3(pipe, drawn):
    z = (drawn.encoded - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    x, time, target = flow_step(pipe, drawn, z)
    words, _, pooled, _ = pipe.encode_prompt(CAPTIONS, CAPTIONS, CAPTIONS, do_classifier_free_guidance=False)
    given = {"encoder_hidden_states": words, "pooled_projections": pooled, "return_dict": False}
    return pipe.transformer(hidden_states=x, timestep=time, **given)[0], target


def qwen_image(pipe, drawn):
    mean = torch.tensor(pipe.vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = 1.0 / torch.tensor(pipe.vae.config.latents_std).view(1, -1, 1, 1, 1)
    z = ((drawn.encoded - mean) * std).permute(0, 2, 1, 3, 4)
    channels, height, width = z.shape[2:]
    x, time, target = flow_step(pipe, drawn, pipe._pack_latents(z, 2, channels, height, width))
    words, mask = pipe.encode_prompt(CAPTIONS)
    shapes = [[(1, height // 2, width // 2)]] * 2
    given = {"encoder_hidden_states": words, "encoder_hidden_states_mask": mask, "img_shapes": shapes, "return_dict": False}
    return pipe.transformer(hidden_states=x, timestep=time / 1000, **given)[0], target


def z_image(pipe, drawn):
    z = (drawn.encoded - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    x, time, target = flow_step(pipe, drawn, z)
    words, _ = pipe.encode_prompt(CAPTIONS, do_classifier_free_guidance=False)
    found = pipe.transformer(list(x.unsqueeze(2).unbind(0)), (1000 - time) / 1000, words, return_dict=False)[0]
    return -torch.stack(found).squeeze(2), target


def diffusion_step(pipe, drawn):
    scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    x0 = drawn.encoded * pipe.vae.config.scaling_factor
    noise, time = drawn.noise(x0), (drawn.u * scheduler.config.num_train_timesteps).long()
    v = scheduler.get_velocity(x0, noise, time)
    return scheduler.add_noise(x0, noise, time), time, noise if scheduler.config.prediction_type == "epsilon" else v


def sd15(pipe, drawn):
    x, time, target = diffusion_step(pipe, drawn)
    tokens = pipe.tokenizer(CAPTIONS, padding="max_length", truncation=True, max_length=16, return_tensors="pt").input_ids
    return pipe.unet(x, time, pipe.text_encoder(tokens)[0], return_dict=False)[0], target


def sdxl(pipe, drawn):
    x, time, target = diffusion_step(pipe, drawn)
    words, _, pooled, _ = pipe.encode_prompt(CAPTIONS, do_classifier_free_guidance=False)
    sizes = torch.tensor([[tiny.SIZE, tiny.SIZE, 0, 0, tiny.SIZE, tiny.SIZE]] * 2, dtype=torch.float32)
    added = {"time_ids": sizes, "text_embeds": pooled}
    return pipe.unet(x, time, words, added_cond_kwargs=added, return_dict=False)[0], target


SCRIPTS = {"flux": flux, "sd3": sd3, "qwen_image": qwen_image, "z_image": z_image, "sd15": sd15, "sdxl": sdxl}


@pytest.mark.parametrize("name", SCRIPTS)
@torch.no_grad()
def test_the_loss_is_that_of_the_script(name):
    pipe = tiny.make(name)
    task = task_of(name, pipe)
    loss = task.loss(getattr(pipe, task.part), {"image": picture(), "caption": CAPTIONS}, Draws(3, 1))
    pred, target = SCRIPTS[name](pipe, Drawn(pipe, picture()))
    wanted = (pred.float() - target.float()).square().mean()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)


@torch.no_grad()
def test_the_loss_is_that_of_the_script_with_a_velocity_and_min_snr():
    pipe = tiny.make("sd15")
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, prediction_type="v_prediction")
    loss = task_of("sd15", pipe, snr_gamma=5.0).loss(pipe.unet, {"image": picture(), "caption": CAPTIONS}, Draws(3, 1))
    drawn = Drawn(pipe, picture())
    pred, target = sd15(pipe, drawn)
    kept = DDPMScheduler.from_config(pipe.scheduler.config).alphas_cumprod[(drawn.u * 1000).long()]
    snr = kept / (1 - kept)
    weights = snr.clamp(max=5.0) / (snr + 1)  # compute_snr, and snr_gamma of a velocity
    wanted = ((pred - target).square().mean((1, 2, 3)) * weights).mean()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
