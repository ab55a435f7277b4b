"""The noise that a pipeline's scheduler takes away is that which training adds, or is refused."""

from __future__ import annotations

import diffusers
import pytest
import tiny_pipelines as tiny
import torch
from torch import nn

from fxplug.core.errors import SpecError
from fxplug.pipelines.observation import observe
from fxplug.training.tasks.pipeline_denoise import PipelineDenoise
from fxplug.training.tasks.pipeline_noise import check_scheduler, list_part_steps, open_scheduler, shares
from fxplug.training.tasks.task import TaskInfo

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's, of some schedulers
SIZE = (tiny.SIZE, tiny.SIZE)


def set_up(task, sizes=(SIZE,)):
    task.setup(nn.Identity(), TaskInfo(sizes[0], sizes=sizes))
    return task


BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULERS = {
    "DDPMScheduler": {}, "PNDMScheduler": {"skip_prk_steps": True}, "EulerDiscreteScheduler": {"use_karras_sigmas": True},
    "EulerAncestralDiscreteScheduler": {"prediction_type": "v_prediction"}, "LCMScheduler": {}, "HeunDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++"}, "CogVideoXDDIMScheduler": {},
    "UniPCMultistepScheduler": {"prediction_type": "sample"},
    "DPMSolverSinglestepScheduler": {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
    "DDIMScheduler": {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_denoiser_that_knows_the_data_leads_the_scheduler_to_them(name):
    pipe = tiny.make("sd15")
    pipe.scheduler = scheduler = getattr(diffusers, name)(**BETAS, **SCHEDULERS[name])
    seen = observe(pipe, {"height": SIZE[0], "width": SIZE[1]})
    assert check_scheduler(pipe, seen, open_scheduler(scheduler)) < 0.03


@pytest.mark.parametrize("wrong", ["prediction", "alphas", "sigmas"])
def test_other_noise_than_the_schedulers_is_seen(wrong):
    pipe = tiny.make("flux" if wrong == "sigmas" else "sd15")
    seen = observe(pipe, {"height": SIZE[0], "width": SIZE[1]})
    noise = open_scheduler(pipe.scheduler)
    if wrong == "prediction":
        noise.prediction = "v_prediction"
    elif wrong == "alphas":
        noise.take_alphas(noise.scheduler.alphas_cumprod ** 1.2)
    else:
        noise.sigmas = noise.sigmas**1.2
    with pytest.raises(SpecError, match="scheduler"):
        check_scheduler(pipe, seen, noise)


OTHERS = {
    "EDMEulerScheduler": {}, "IPNDMScheduler": {},
    "EulerDiscreteScheduler": {**BETAS, "timestep_type": "continuous", "prediction_type": "v_prediction"},
    "DPMSolverMultistepScheduler": {"prediction_type": "epsilon", "use_flow_sigmas": True, "flow_shift": 3.0},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_schedulers_of_another_kind_are_refused(name):
    pipe = tiny.make("sd15")
    pipe.scheduler = getattr(diffusers, name)(**OTHERS[name])
    with pytest.raises(SpecError, match="scheduler"):
        set_up(PipelineDenoise(pipe, {}, samples=0))


def test_a_scheduler_with_flow_matching_as_an_option_shifts_as_it_says():
    noise = open_scheduler(diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    ))  # fmt: skip
    u = torch.linspace(1, 1 / 1000, 1001)[:-1]
    assert torch.allclose(noise.sigmas, 5 * u / (1 + 4 * u), atol=2e-6)
    assert noise.times.dtype == torch.int64


def test_as_sampled_has_the_sigmas_of_the_pipeline_for_the_size():
    task = set_up(PipelineDenoise(tiny.make("flux"), {}, samples=0, density="as_sampled"), sizes=(SIZE, (128, 128)))
    means = [float(one.noise.sigmas.mean()) for one in task.sized.made.values()]
    assert means[0] < means[1]  # larger pictures have more noise
    one = task.sized.of(SIZE)
    mu = one.call.observation.schedule["mu"]
    shifted = torch.tensor(mu).exp()
    u = torch.linspace(1, 1 / 1000, 1000)
    assert torch.allclose(one.noise.sigmas, shifted * u / (1 + (shifted - 1) * u), atol=1e-5)


def test_one_of_two_denoisers_is_trained_at_its_own_times():
    pipe = tiny.make("wan22")
    found = {}
    for part in ("transformer", "transformer_2"):
        seen = observe(pipe, {"height": SIZE[0], "width": SIZE[1], "num_frames": 1}, part)
        noise = open_scheduler(pipe.scheduler)
        found[part] = noise.time(list_part_steps(noise, pipe, seen))
    assert found["transformer"].min() >= 870 and found["transformer_2"].max() <= 880
    assert len(found["transformer"]) + len(found["transformer_2"]) == pytest.approx(1000, abs=10)


def test_the_shares_of_a_step_are_the_schedulers():
    noise = open_scheduler(diffusers.DDIMScheduler(**BETAS))
    kept = noise.scheduler.alphas_cumprod[300]
    assert shares(noise, 300) == pytest.approx((float(kept.sqrt()), float((1 - kept).sqrt())), rel=1e-5)
    assert shares(open_scheduler(diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)), 250.0) == pytest.approx((0.75, 0.25))
