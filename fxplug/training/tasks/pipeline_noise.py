"""The noise that a pipeline's own scheduler takes away, and a proof on the scheduler itself that training adds the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import SpecError, get_first_line
from ...pipelines.observation import Observation
from ...pipelines.recorded_run import call_pipeline, get_components
from .noise import PREDICTIONS, Diffusion, Flow, make_noise

FLOWS = ("flow", "flow_prediction")
DENSE = 200  # steps that find the times of one of two denoisers
LEFT = 0.06  # of the noise that may be left at the end: some schedulers end at the first of their steps
NEAR = 0.03, 0.25  # how much an amount of noise may be off, of a scheduler that adds none of its own and of one that does


def open_scheduler(scheduler: Any, *, snr_gamma: float | None = None, weighting: str = "none") -> Diffusion | Flow:
    """Open the noise of a scheduler of diffusers as it is configured.

    Args:
        scheduler: The scheduler of a pipeline.
        snr_gamma: As in `Diffusion`.
        weighting: As in `Flow`.

    Returns:
        The noise, with the scheduler's own products of alphas, or sigmas.

    Raises:
        SpecError: What its denoiser predicts is none of epsilon, v_prediction, sample and flow.
    """
    kind, config = type(scheduler), {k: v for k, v in dict(scheduler.config).items() if not k.startswith("_")}
    if config.get("sigma_data") is not None:
        raise refused(scheduler, "its input and output are preconditioned with 'sigma_data' (EDM, arXiv 2206.00364)")
    given = config.get("prediction_type", "epsilon")
    flow = hasattr(kind, "scale_noise") or given in FLOWS or bool(config.get("use_flow_sigmas"))
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if not flow and (given not in PREDICTIONS[:3] or not isinstance(alphas, Tensor) or alphas.dim() != 1):
        found = f"the prediction '{given}'" if given not in PREDICTIONS else "no products of alphas"
        raise refused(scheduler, f"it has {found}, and training knows {', '.join(PREDICTIONS)}")
    try:
        made = make_noise(kind, config, flow, snr_gamma=snr_gamma, weighting=weighting)
    except SpecError:
        raise
    except Exception as error:  # the scheduler's
        raise refused(scheduler, f"its noise cannot be made: {type(error).__name__}: {get_first_line(error)}") from error
    if isinstance(made, Diffusion) and isinstance(alphas, Tensor):
        own = made.scheduler.alphas_cumprod
        if own.shape != alphas.shape or not torch.equal(own, alphas.to(own)):
            made.take_alphas(alphas)
    return made


def refused(scheduler: Any, why: str) -> SpecError:
    """Return the error of a scheduler that cannot be trained with."""
    return SpecError(f"the scheduler {type(scheduler).__name__} cannot be trained with: {why}", path=("model", "pipeline"))


def take_sampled(noise: Diffusion | Flow, pipe: Any, observation: Observation) -> Tensor:
    """Take the amounts of noise that a pipeline draws with, and return which steps of `noise` these are, int64 [n].

    Args:
        noise: The noise; that of flow matching gets the sigmas of the pipeline's schedule for this size.
        pipe: The pipeline.
        observation: What it does around its denoiser.

    Returns:
        The steps, one for each of the pipeline's with the largest number of them.

    Raises:
        SpecError: The pipeline does not take so many steps.
    """
    run = call_pipeline(pipe, observation.call, steps=noise.steps, first_call=observation.part)
    if isinstance(noise, Flow):
        noise.take_schedule(run.scheduler)
        return torch.arange(noise.steps)
    steps: Tensor = run.scheduler.timesteps.detach().cpu().round().long()
    return steps.clamp(0, noise.steps - 1)


def list_part_steps(noise: Diffusion | Flow, pipe: Any, observation: Observation) -> Tensor:
    """Return the steps of `noise` at whose times a pipeline with several denoisers calls this one, int64 [n]."""
    if not observation.others:
        return torch.arange(noise.steps)
    names = frozenset({observation.part, *observation.others})
    run = call_pipeline(pipe, observation.call, steps=DENSE, results={}, latents=torch.zeros_like,
                        outputs=torch.zeros_like, denoisers=names)  # fmt: skip
    seen = {name: [float(torch.as_tensor(s.time)) for s in run.steps if s.calls and s.calls[-1][0] == name] for name in names}
    own, others = seen[observation.part], [t for name, ts in seen.items() if name != observation.part for t in ts]
    # between the last time of one and the first of the other either is right
    low = max([t for t in others if t < min(own)], default=-math.inf)
    high = min([t for t in others if t > max(own)], default=math.inf)
    times = noise.time(torch.arange(noise.steps)).double()
    found = ((times >= (low + min(own)) / 2) & (times <= (high + max(own)) / 2)).nonzero().flatten()
    if not len(found):
        raise SpecError(f"time of {type(pipe).__name__}: {observation.part} is never called at a time that training uses",
                        path=("model", "part"))  # fmt: skip
    return found


def shares(noise: Diffusion | Flow, time: float) -> tuple[float, float]:
    """Return the factors of data and noise at a scheduler's time, also between two steps."""
    if isinstance(noise, Flow):
        order = torch.argsort(noise.times.double(), stable=True)
        sigma = float(np.interp(time, noise.times.double()[order].numpy(), noise.sigmas.double()[order].numpy()))
        return 1 - sigma, sigma
    kept = noise.scheduler.alphas_cumprod.double().clamp(1e-12, 1 - 1e-12)
    logarithm = float(np.interp(time, np.arange(len(kept)), ((1 - kept) / kept).log().numpy() / 2))
    scale = 1 / math.sqrt(1 + math.exp(2 * logarithm))
    return scale, math.exp(logarithm) * scale


def check_scheduler(pipe: Any, observation: Observation, noise: Diffusion | Flow) -> float:
    """Prove that what is trained is what a pipeline's scheduler takes away: a denoiser that knows the data must lead to them.

    The pipeline runs with the answers that training asks for in place of its denoiser's: what is told from the data at each
    time. Then the amount of noise must be at each time what training adds there, and the end must be the data.

    Args:
        pipe: The pipeline.
        observation: What it does around its denoiser.
        noise: What is trained.

    Returns:
        How far the end is from the data, as a share of the noise at the start.

    Raises:
        SpecError: It is not so; the sentence says scheduler.
    """
    data = torch.rand(observation.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 1.6 - 0.8
    seen: list[tuple[float, Tensor]] = []

    def answer(sample: Tensor, time: Tensor) -> Tensor:
        at = float(time.double().flatten()[0])
        kept, added = shares(noise, at)
        found = (sample.double().cpu() - kept * data) / max(added, 1e-9)
        seen.append((at, found))
        targets = {"epsilon": found, "v_prediction": kept * found - added * data, "sample": data, "flow": found - data}
        return targets[noise.prediction].to(sample.device)

    names = frozenset({observation.part, *observation.others})
    run = call_pipeline(pipe, observation.call, steps=2 * observation.steps, results={}, predict=answer, denoisers=names,
                        place=observation.place)  # fmt: skip
    scheduler = get_components(pipe)["scheduler"]
    final = run.finals[observation.place] if seen else None
    if final is None or final.shape != data.shape:
        raise refused(scheduler, "its steps do not lead from latents to latents of the same shape")
    first = seen[0][1]
    for time, found in seen:
        own = float(_cosine(found, first)) < 0.999  # noise that the scheduler adds in its steps
        rounding = abs(math.log(shares(noise, time + 1)[1] + 1e-6) - math.log(shares(noise, max(time - 1, 0))[1] + 1e-6)) / 2
        ratio = float(found.square().mean().sqrt() / first.square().mean().sqrt())
        start = float(first.square().mean().sqrt())
        if not abs(ratio - 1) <= NEAR[own] + rounding or not 0.7 < start < 1.4:
            off = ratio if 0.7 < start < 1.4 else start
            raise refused(scheduler, f"at its time {time:g} latents have {off:.3g} times the noise that training adds there")
    end = final.double().cpu() - data
    left = float(end.square().mean().sqrt() / first.square().mean().sqrt())
    if not left <= LEFT:
        finding = f"a denoiser that predicts '{noise.prediction}' without an error leaves {left:.2g} of the noise"
        raise refused(scheduler, finding)
    return left


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0)
