"""Stock pipelines with random surroundings of their denoiser: what is confirmed is what a run with hooks shows, on another
prompt, seed and number of steps, or the pipeline is refused.

Random are the scheduler (kind, what is predicted, spacing of times, shift, betas, inverted sigmas), factors, shifts, means and
deviations of the VAE, size and frames, and guidance. The run with hooks shares no code with observation.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from typing import Any

import diffusers
import tiny_pipelines as tiny
import torch

from fxplug.core.errors import SpecError
from fxplug.pipelines.latent_maps import flatten_tensors
from fxplug.pipelines.observation import confirm, observe

COST = 20
WORDS = "a red ball cat dog and on the gold box photo of blue".split()
DIFFUSION = ("sd15", "sdxl", "pixart")
FLOW = ("sd3", "flux", "qwen_image", "z_image", "sana", "wan", "ltx")
CLOSE = 1e-4  # of the largest value: what rounding of times may do


class Decoded(BaseException):
    """The steps are over."""


def draw_scheduler(draw: random.Random, name: str) -> Any:
    """A scheduler that a pipeline of this family may have."""
    if name in DIFFUSION:
        kinds = ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "PNDMScheduler",
                 "LMSDiscreteScheduler", "HeunDiscreteScheduler", "UniPCMultistepScheduler", "LCMScheduler")  # fmt: skip
        options = {
            "prediction_type": draw.choice(("epsilon", "v_prediction", "sample")), "beta_start": draw.choice((1e-4, 8.5e-4)),
            "timestep_spacing": draw.choice(("leading", "trailing", "linspace")), "steps_offset": draw.choice((0, 1)),
            "beta_schedule": draw.choice(("linear", "scaled_linear", "squaredcos_cap_v2")),
            "beta_end": draw.choice((0.012, 0.02)),
            "rescale_betas_zero_snr": draw.random() < 0.2, "use_karras_sigmas": draw.random() < 0.2, "clip_sample": False,
            "skip_prk_steps": draw.random() < 0.8,
        }  # fmt: skip
    else:
        kinds = ("FlowMatchEulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler",
                 "DPMSolverMultistepScheduler", "FlowMatchHeunDiscreteScheduler")  # fmt: skip
        options = {
            "shift": draw.choice((1.0, 3.0, 0.5, 7.3)), "invert_sigmas": draw.random() < 0.1, "use_flow_sigmas": True,
            "use_dynamic_shifting": draw.random() < 0.3, "flow_shift": draw.choice((1.0, 5.0)),
            "prediction_type": "flow_prediction", "stochastic_sampling": draw.random() < 0.2,
            "shift_terminal": draw.choice((None, None, 0.1)),
        }  # fmt: skip
    kind = getattr(diffusers, draw.choice(kinds))
    return kind(**{key: value for key, value in options.items() if key in inspect.signature(kind).parameters})


def change_vae(draw: random.Random, vae: Any) -> None:
    """Give a VAE other statistics of latents, where it has any."""
    config = dict(vae.config)
    for key in ("scaling_factor", "shift_factor"):
        if config.get(key) is not None:
            config[key] = draw.uniform(0.1, 3.0)
    for key, low in (("latents_mean", -1.0), ("latents_std", 0.3)):
        if isinstance(config.get(key), (list, tuple)):
            config[key] = [draw.uniform(low, 2.0) for _ in config[key]]
            if key in dict(vae.named_buffers()):
                vae.get_buffer(key).copy_(torch.tensor(config[key]))
    vae.register_to_config(**{key: value for key, value in config.items() if not key.startswith("_")})


def record(pipe: Any, seen: Any, call: dict[str, Any]) -> tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]:
    """Each step of a run (denoiser's arguments and output, what the scheduler got), the last latents, and what is decoded."""
    rows, state, scheduler = list[dict[str, Any]](), dict[str, Any](), copy.deepcopy(pipe.scheduler)
    kept, pipe.scheduler = pipe.scheduler, scheduler
    denoiser, vae = getattr(pipe, seen.part), getattr(pipe, seen.vae)
    step, scale, decode = scheduler.step, getattr(scheduler, "scale_model_input", None), vae.decode

    def called(module: Any, args: Any, named: Any, output: Any) -> None:
        given = inspect.signature(type(module).forward).bind(module, *args, **named).arguments
        state["call"] = (copy.deepcopy(dict(given, self=None)), copy.deepcopy(output))

    def stepped(model_output: Any, timestep: Any, sample: Any, *args: Any, **named: Any) -> Any:
        given, output = state["call"]
        rows.append({"given": given, "output": output, "prediction": model_output.clone(), "time": float(timestep),
                     "sample": state.pop("scaled", sample).clone()})  # fmt: skip
        made = step(model_output, timestep, sample, *args, **named)
        state["final"] = made[0] if isinstance(made, tuple) else made.prev_sample
        return made

    def scaled(*args: Any, **named: Any) -> Any:
        state["scaled"] = scale(*args, **named)
        return state["scaled"]

    def decoded(z: Any, *args: Any, **named: Any) -> Any:
        state["decoded"] = z
        raise Decoded

    scheduler.step, vae.decode = stepped, decoded
    if scale is not None:
        scheduler.scale_model_input = scaled
    hook = denoiser.register_forward_hook(called, with_kwargs=True)
    try:
        with torch.no_grad():
            pipe(**call)
    except Decoded:
        pass
    finally:
        hook.remove()
        del vae.decode
        assert vae.decode == decode
        pipe.scheduler = kept
    return rows, state["final"], state["decoded"]


def measure_difference(found: Any, right: Any) -> float:
    """The largest difference over the largest value."""
    one, two = flatten_tensors(found).double(), flatten_tensors(right).double()
    return float("inf") if one.shape != two.shape else float((one - two).abs().max() / two.abs().max().clamp(min=1e-6))


def check(pipe: Any, name: str, draw: random.Random, call: dict[str, Any]) -> str | None:
    """What is wrong with an observation of a pipeline; None where it is right. Raises SpecError where it is refused."""
    seen = observe(pipe, call)
    confirm(pipe, seen)
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))
    torch.manual_seed(draw.randrange(1000))
    rows, final, decoded = record(pipe, seen, {**seen.call, "prompt": text, "num_inference_steps": draw.randint(3, 7)})
    first = rows[0]["given"]
    for row in rows:
        when = float(seen.model_time(torch.tensor(row["time"], dtype=torch.float64)))
        told = [float(t.flatten()[0]) if isinstance(t, torch.Tensor) else float(t) for t in [row["given"][seen.time]]]
        off = {
            "input": measure_difference(seen.to_input(row["sample"], first[seen.noisy]), row["given"][seen.noisy]),
            "output": measure_difference(seen.to_output(flatten_tensors(row["output"])), row["prediction"]),
            "time": abs(when - told[0]) / max(1e-3, abs(told[0])) / 10,  # of the schedulers that round times
        }
        if wrong := {what: value for what, value in off.items() if not value < CLOSE}:
            return f"{wrong} of {name}: {seen.describe()}"
    off_decoder = measure_difference(seen.to_decoder(final), decoded)
    return None if off_decoder < CLOSE else f"decoder {off_decoder:.1e} of {name}: {seen.describe()}"


def fuzz_surroundings(cases: int, seed: int) -> list[str]:
    """Observe stock pipelines with random surroundings, and compare what is confirmed with a run."""
    found = []
    for n in range(seed, seed + cases):
        draw = random.Random(n)
        name = draw.choice((*DIFFUSION, *FLOW))
        pipe = tiny.make(name, seed=n)
        pipe.scheduler = draw_scheduler(draw, name)
        change_vae(draw, pipe.vae)
        call = {**tiny.CALLS[name], "height": 32 * draw.randint(1, 3), "width": 32 * draw.randint(1, 3)}
        call |= draw.choice(({}, {}, {"guidance_scale": draw.choice((0.0, 1.0, 3.5, 7.0))}))
        about = f"case {n} ({name}, {type(pipe.scheduler).__name__} {dict(pipe.scheduler.config)}, {call})"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if (wrong := check(pipe, name, draw, call)) is not None:
                    found.append(f"{about}: {wrong}")
            except SpecError as error:
                if len(str(error)) < 40 or "Traceback" in str(error):
                    found.append(f"{about}: says nothing: {error}")
                REFUSALS.append(f"{about}: {error}")
            except Exception as error:
                found.append(f"{about}: {type(error).__name__}: {error}")
    return found


REFUSALS: list[str] = []
