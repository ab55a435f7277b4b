"""Noise and what is learnt from it: diffusers schedulers as targets, weights, times and a loop that makes samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from ...core.errors import SpecError, did_you_mean
from ...core.spec.pass_file import check_known, get_arguments
from ...core.spec.yaml_source import check_number, describe_missing
from ..random_draws import Draws
from ..train_section import Use

PREDICTIONS = ("epsilon", "v_prediction", "sample", "flow")
FILE = "scheduler_config.json"
Denoiser = Callable[[Tensor, Tensor], Tensor]


class Noise:
    """A way between data and noise in `steps` steps, and what a model predicts there.

    Kinds have `time(index)`, the timesteps [b] that the model is given; `noisy(x, noise, index)` and `target(x, noise, index)`,
    data with noise and what is to be predicted of it; `weight(index)` float32 [b] of each sample's loss; `share(index)`, how
    far it is from data (0) to noise (1), and `ratio(index)`, the deviation of noise over that of data, float32 [b]; and
    `sampler()`, a new diffusers scheduler. `index` int64 [b] is a step in the order of the scheduler: DDPM counts from little
    noise, flow matching from much.
    """

    prediction: str
    steps: int
    kind: Any
    config: dict[str, Any]

    def sampler(self) -> Any:
        """Return a new diffusers scheduler for sampling."""
        return self.kind.from_config(self.config)

    def sample(self, denoise: Denoiser, noise: Tensor, steps: int, seed: int = 0, *, trial: bool = False) -> Tensor:
        """Denoise pure noise [n, c, h, w] in so many steps; `denoise(x, time)` is the model's prediction.

        A `trial` ends after the first step. Raises SpecError for a number of steps that the scheduler does not take.
        """
        scheduler = self.sampler()
        tokens = noise.shape[-1] * noise.shape[-2] // 4
        options = {"mu": self._shift(scheduler.config, tokens)} if scheduler.config.get("use_dynamic_shifting") else {}
        try:
            scheduler.set_timesteps(steps, **options)
        except Exception as error:  # the scheduler's
            text = f"{type(scheduler).__name__} does not take {steps} steps: {type(error).__name__}: {error}"
            raise SpecError(text, path=("sample_steps",)) from error
        # what the loop itself draws, image by image
        own = [torch.Generator().manual_seed(seed + n) for n in range(len(noise))]
        drawn = {"generator": own} if "generator" in get_arguments(scheduler.step).names else {}
        x = noise * scheduler.init_noise_sigma if hasattr(scheduler, "init_noise_sigma") else noise
        for t in scheduler.timesteps[:1] if trial else scheduler.timesteps:
            given = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
            predicted = denoise(given, self.scaled(t.to(x.device)).expand(len(x)))
            x = scheduler.step(predicted, t, x, **drawn).prev_sample.to(noise.dtype)
        return x

    def scaled(self, time: Tensor) -> Tensor:
        """Return a scheduler's times as the model is given them: here unchanged."""
        return time

    @staticmethod
    def _shift(config: Mapping[str, Any], tokens: int) -> float:
        """Return the shift for so many tokens (Stable Diffusion 3, arXiv 2403.03206; diffusers' pipelines)."""
        slope = (config["max_shift"] - config["base_shift"]) / (config["max_image_seq_len"] - config["base_image_seq_len"])
        return float(config["base_shift"] + slope * (tokens - config["base_image_seq_len"]))


class Diffusion(Noise):
    """Noise by the betas of DDPM (arXiv 2006.11239) and its relatives; predicts epsilon, v (arXiv 2202.00512) or the sample.

    Min-SNR weights (arXiv 2303.09556) where `snr_gamma` is given.
    """

    def __init__(self, kind: type, config: dict[str, Any], prediction: str | None, snr_gamma: float | None) -> None:
        self.prediction = prediction or config.get("prediction_type", "epsilon")
        own = kind.from_config(config).config  # type: ignore[attr-defined]
        config = {**_shared(kind, own), "prediction_type": self.prediction}
        if config.get("rescale_betas_zero_snr") and self.prediction == "epsilon":
            raise SpecError(
                "rescale_betas_zero_snr makes the last step pure noise, where epsilon has no information about the image: use "
                "prediction: v_prediction or sample (arXiv 2305.08891)",
                path=("prediction",),
            )
        # every scheduler of this family has the noise of these betas, but only DDPM's adds it without a loop set up first
        self.scheduler: Any = diffusers.DDPMScheduler.from_config(_shared(diffusers.DDPMScheduler, config))
        self.kind, self.config, self.snr_gamma = kind, config, snr_gamma
        self.steps = int(self.scheduler.config.num_train_timesteps)
        kept = self.scheduler.alphas_cumprod
        if not len(kept) or not ((kept >= 0) & (kept <= 1)).all():  # which NaN is not
            raise SpecError("the betas of the scheduler must be one or more, from 0 to 1", path=("scheduler",))
        self.sampler()

    def take_alphas(self, alphas: Tensor) -> None:
        """Take the products of alphas, [steps], of a scheduler that makes others of its betas than DDPM does."""
        self.scheduler.alphas_cumprod = alphas.detach().clone().float().cpu()
        self.steps = len(alphas)

    def time(self, index: Tensor) -> Tensor:
        """Return the steps themselves."""
        return index

    def noisy(self, x: Tensor, noise: Tensor, index: Tensor) -> Tensor:
        """Add the noise of the steps to data."""
        made: Tensor = self.scheduler.add_noise(x, noise, index)
        return made

    def target(self, x: Tensor, noise: Tensor, index: Tensor) -> Tensor:
        """Return the noise, the velocity or the data, as `prediction` says."""
        if self.prediction == "v_prediction":
            velocity: Tensor = self.scheduler.get_velocity(x, noise, index)
            return velocity
        return noise if self.prediction == "epsilon" else x

    def weight(self, index: Tensor) -> Tensor:
        """Return 1, or Min-SNR's weight with `snr_gamma`; float32 [b]."""
        if self.snr_gamma is None:
            return torch.ones(len(index), device=index.device)
        kept = self._get_alphas_cumprod(index)
        snr = kept / (1 - kept)
        if self.prediction == "epsilon":
            return (self.snr_gamma / snr).clamp(max=1.0)
        clamped = snr.clamp(max=self.snr_gamma)
        return clamped / (snr + 1) if self.prediction == "v_prediction" else clamped

    def share(self, index: Tensor) -> Tensor:
        """Return the share of the steps that are done, float32 [b]."""
        return index.float() / self.steps

    def ratio(self, index: Tensor) -> Tensor:
        """Return the deviation of noise over that of data, float32 [b]; infinite where there is noise alone."""
        kept = self._get_alphas_cumprod(index)
        return ((1 - kept) / kept).sqrt()

    def _get_alphas_cumprod(self, index: Tensor) -> Tensor:
        kept: Tensor = self.scheduler.alphas_cumprod.to(index.device, torch.float32)[index]
        return kept

    def sampler(self) -> Any:
        """Return the configured scheduler; for DDPM a DDIM scheduler with trailing timesteps."""
        if self.kind is not diffusers.DDPMScheduler:
            return super().sampler()
        # DDIM takes few steps where DDPM takes all; with "trailing" the first is the last of the training (arXiv 2305.08891)
        config = {**self.config, "timestep_spacing": "trailing"}
        return diffusers.DDIMScheduler.from_config(_shared(diffusers.DDIMScheduler, config))


class Flow(Noise):
    """Straight lines from data to noise, whose slope is predicted (arXiv 2210.02747, 2209.03003).

    `weighting` is that of Stable Diffusion 3 (arXiv 2403.03206): none, sigma_sqrt or cosmap.
    """

    prediction = "flow"

    def __init__(self, kind: type, config: dict[str, Any], weighting: str, time_scale: float) -> None:
        self.kind, self.config, self.weighting, self.time_scale = kind, config, weighting, time_scale
        scheduler = self.sampler()
        if not hasattr(kind, "scale_noise"):  # has flow matching as one of its options, and sigmas of another one before
            dynamic = {"mu": 0.0} if config.get("use_dynamic_shifting") else {}  # which shifts nothing
            scheduler.set_timesteps(int(scheduler.config.num_train_timesteps), **dynamic)
        self.take_schedule(scheduler)
        if not self.steps or not ((self.sigmas >= 0) & (self.sigmas <= 1)).all() or not self.times.isfinite().all():
            raise SpecError("the sigmas of the scheduler must be one or more, from 0 to 1", path=("scheduler",))

    def take_schedule(self, scheduler: Any) -> None:
        """Take the timesteps and sigmas of a scheduler as it is set."""
        self.times: Tensor = scheduler.timesteps.detach().clone().cpu()
        self.steps = len(self.times)
        self.sigmas: Tensor = scheduler.sigmas.detach().clone().cpu()[: self.steps]  # without the last one, 0

    def time(self, index: Tensor) -> Tensor:
        """Return the scheduler's timesteps at these steps, scaled."""
        return self.scaled(self.times.to(index.device)[index])

    def scaled(self, time: Tensor) -> Tensor:
        """Return a scheduler's times multiplied by `time_scale`."""
        return time * self.time_scale

    def sigma(self, index: Tensor, like: Tensor) -> Tensor:
        """Return the share of noise at the steps `index` int64 [b], in the dtype of `like` [b, ...] and shaped to multiply
        it."""
        return self.sigmas.to(index.device, like.dtype)[index].reshape(-1, *[1] * (like.dim() - 1))

    def noisy(self, x: Tensor, noise: Tensor, index: Tensor) -> Tensor:
        """Return the point between data and noise where the noise's share is sigma."""
        sigma = self.sigma(index, x)
        return (1.0 - sigma) * x + sigma * noise

    def target(self, x: Tensor, noise: Tensor, index: Tensor) -> Tensor:
        """Return the slope of the line: noise less data."""
        return noise - x

    def weight(self, index: Tensor) -> Tensor:
        """Return the weight of `weighting`, float32 [b]."""
        sigma = self.share(index)  # diffusers.training_utils has the same, and imports all of its models, PEFT and quantisers
        if self.weighting == "sigma_sqrt":
            return sigma**-2.0
        if self.weighting == "cosmap":
            return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
        return torch.ones_like(sigma)

    def share(self, index: Tensor) -> Tensor:
        """Return the share of noise, float32 [b]."""
        return self.sigmas.to(index.device, torch.float32)[index]

    def ratio(self, index: Tensor) -> Tensor:
        """Return the deviation of noise over that of data, float32 [b]; infinite where there is noise alone."""
        sigma = self.share(index)
        return sigma / (1 - sigma)


DENSITIES: dict[str, dict[str, float]] = {"uniform": {}, "logit_normal": {"mean": 0.0, "std": 1.0}, "mode": {"scale": 1.29}}


def read_density(use: Use, more: Collection[str] = ()) -> Use:
    """Return the density of the noise levels, with all its parameters; `more` are names without any. Raises SpecError for an
    unknown one."""
    known = {**DENSITIES, **{name: {} for name in more}}
    if use.name not in known:
        hint = f"{did_you_mean(use.name, known)}; there are {', '.join(known)}"
        raise SpecError(f"no density '{use.name}'{hint}", path=("density",))
    check_known(use.options, known[use.name], f"{use.name} has no option", path=("density",))
    for key, value in use.options.items():
        check_number(value, "density", use.name, key, above=0 if key == "std" else -math.inf)
    return Use(use.name, {**known[use.name], **use.options})


def draw_positions(density: Use, count: int, draw: Draws) -> Tensor:
    """Draw positions float32 [count] from 0 to 1 in a scheduler's order, as Stable Diffusion 3 draws them (arXiv
    2403.03206)."""
    if density.name == "logit_normal":
        return torch.sigmoid(draw.normal(count) * density.options["std"] + density.options["mean"])
    u = draw.uniform(count)
    if density.name == "mode":
        u = 1 - u - density.options["scale"] * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)
    return u


def open_noise(
    use: Use, base: Path, *, prediction: str | None, latents: bool, snr_gamma: float | None, weighting: str, time_scale: float
) -> Diffusion | Flow:
    """Open the noise of a diffusers scheduler: a class with options, or a folder with scheduler_config.json. Raises
    SpecError."""
    kind, config = _scheduler(use, base)
    flow = hasattr(kind, "scale_noise")
    name = kind.__name__
    if not flow and not {"beta_schedule", "prediction_type"} <= {*get_arguments(kind).names}:
        raise SpecError(
            f"{name} has neither betas nor sigmas to train with: use DDPMScheduler or another with betas, or "
            "FlowMatchEulerDiscreteScheduler",
            path=("scheduler",),
        )
    given = str(config.get("prediction_type", "epsilon"))
    if flow and prediction not in (None, "flow"):
        text = f"{name} is for flow matching, where the prediction is 'flow' (noise - x0), not '{prediction}'"
        raise SpecError(f"{text}; DDPMScheduler has '{prediction}'", path=("prediction",))
    if not flow and (prediction or given) not in PREDICTIONS[:3]:
        text = f"{name} supports the predictions {', '.join(PREDICTIONS[:3])}, not '{prediction or given}'"
        if "flow" in (prediction or given):
            text += "; flow matching needs FlowMatchEulerDiscreteScheduler"
        raise SpecError(text, path=("prediction",))
    if latents and "clip_sample" in get_arguments(kind).names:
        config.setdefault("clip_sample", False)  # clipping is for pixels in [-1, 1]
    options = {"prediction": prediction, "snr_gamma": snr_gamma, "weighting": weighting, "time_scale": time_scale}
    return make_noise(kind, config, flow, **options)  # type: ignore[arg-type]


def make_noise(
    kind: type,
    config: dict[str, Any],
    flow: bool,
    *,
    prediction: str | None = None,
    snr_gamma: float | None = None,
    weighting: str = "none",
    time_scale: float = 1.0,
) -> Diffusion | Flow:
    """Return the noise of a class of schedulers with a configuration: of flow matching or not, with weights as
    `Diffusion` and `Flow` have them. Raises SpecError for an option that is the other one's."""
    name = kind.__name__
    if not flow:
        for key, value, wanted in (("weighting", weighting, "none"), ("time_scale", time_scale, 1.0)):
            if value != wanted:
                raise SpecError(f"{key} is for flow matching; {name} has min-SNR weights, snr_gamma", path=(key,))
        return Diffusion(kind, config, prediction, snr_gamma)
    if snr_gamma is not None:
        raise SpecError(f"min-SNR is for epsilon, v_prediction and sample; {name} has 'weighting'", path=("snr_gamma",))
    if weighting not in ("none", "sigma_sqrt", "cosmap"):
        known = ("none", "sigma_sqrt", "cosmap")
        raise SpecError(f"no weighting '{weighting}'{did_you_mean(weighting, known)}; {', '.join(known)}", path=("weighting",))
    return Flow(kind, config, weighting, time_scale)


def _scheduler(use: Use, base: Path) -> tuple[type, dict[str, Any]]:
    """Return the class of a scheduler, and its configuration."""
    name, config = use.name, {}
    folder = base / use.name
    if "/" in name or folder.is_dir():
        file = next((f for f in (folder / FILE, folder / "scheduler" / FILE) if f.is_file()), None)
        if file is None:
            missing = f"has no {FILE}" if folder.is_dir() else describe_missing(folder)
            raise SpecError(f"'{use.name}': {missing}", path=("scheduler",))
        config = diffusers.DDPMScheduler.load_config(file)
        name = str(config.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        known = [n for n in dir(diffusers) if n.endswith("Scheduler")]
        raise SpecError(f"diffusers has no scheduler '{name}'{did_you_mean(name, known)}", path=("scheduler",))
    check_known(use.options, get_arguments(kind).names, f"{name} has no option", path=("scheduler", use.name))
    config = {**_shared(kind, config), **use.options}
    try:
        kind.from_config(config)  # type: ignore[attr-defined]
    except Exception as error:  # the scheduler's, of diffusers or anybody's
        text = f"{name} cannot be built with these options: {type(error).__name__}: {error}"
        raise SpecError(text, path=("scheduler", use.name)) from error
    return kind, config


def _shared(kind: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a scheduler accepts."""
    known = get_arguments(kind).names
    return {key: value for key, value in config.items() if key in known}
