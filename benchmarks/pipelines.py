"""Diffusers' own test pipelines: observed and confirmed, or refused in words; and what is confirmed, checked by other means.

    python benchmarks/pipelines.py CHECKOUT [NAME...] [--limit SECONDS] [--out FILE]

CHECKOUT is one of diffusers of the version that is installed, NAME a part of a file's path below its `tests/pipelines`. Each
file has a process of its own, two at a time. What these tests take from the hub (tokenizers, text encoders) is made here.

A pipeline that is confirmed is then called with a third prompt and picture, another seed and another number of steps, and its
denoiser by hand, on the maps of what the scheduler had: the result is compared with what the scheduler got. The same is done
with a batch of two, whose call is joined from those of its samples. These checks share no code with `confirm`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import inspect
import json
import logging
import multiprocessing
import signal
import sys
import time
import traceback
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxplug
from fxplug.pipelines.conditions import find_batching
from fxplug.pipelines.latent_maps import flatten_tensors
from fxplug.pipelines.observation import Observation, confirm, find_denoisers, observe
from fxplug.pipelines.recorded_run import call_pipeline

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
import record  # noqa: E402
import stand_ins  # noqa: E402
import tiny_pipelines  # noqa: E402

PROMPTS = (
    "a red ball", "two old green boats on a lake", "a ball", "a white cat in a blue box", "a black dog on a red ball",
)  # fmt: skip
OWN = ("num_inference_steps", "output_type", "generator", "callback_on_step_end", "return_dict", "latents")
CLOSE = 1e-4  # of the largest value: what rounding of times may do to what a denoiser gives
AT_A_TIME = 2
Measure = Callable[[Any], dict[str, Any]]  # what becomes of one test's pipeline


class Late(BaseException):
    """The time of a pipeline is over."""


class Decoded(BaseException):
    """The pipeline decodes: the steps are over."""


# --- another condition of the same form


def variant(call: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a call with another prompt, other pictures and other embeddings, of the same sizes; 0 is the call itself."""
    rng = np.random.default_rng(number)
    return {name: _other(name, value, number, rng) for name, value in call.items()} if number else dict(call)


def _other(name: str, value: Any, number: int, rng: np.random.Generator) -> Any:
    if name.startswith("prompt") and isinstance(value, str):
        return PROMPTS[number]
    if name == "class_labels":
        return [each + number for each in value]
    if name.startswith("negative") or "attention_mask" in name or name.endswith(("_mask_embeds", "_ids")):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_other(name, each, number, rng) for each in value)
    if isinstance(value, PIL.Image.Image):
        pixels = np.asarray(value)
        made = _rectangle(pixels) if "mask" in name else rng.integers(0, 256, pixels.shape).astype(np.uint8)
        return PIL.Image.fromarray(made)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fu" and value.ndim > 1:
        made = _rectangle(value) if "mask" in name else rng.random(value.shape) * (255 if value.dtype.kind == "u" else 1)
        return made.astype(value.dtype)
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
        if "mask" in name:
            return torch.from_numpy(_rectangle(value.numpy()))
        low, high = value.amin(), value.amax()
        return torch.from_numpy(rng.random(value.shape)).to(value) * (high - low) + low
    return value


def _rectangle(pixels: np.ndarray) -> np.ndarray:
    """Return a mask with a rectangle in its other two largest dimensions."""
    made = np.zeros_like(pixels)
    full = 255 if pixels.dtype == np.uint8 else 1
    sides = sorted(np.argsort(pixels.shape)[-2:])
    made[tuple(slice(n // 4, 3 * n // 4) if d in sides else slice(None) for d, n in enumerate(pixels.shape))] = full
    return made


def together(one: Any, two: Any) -> Any:
    """Return an argument for two samples."""
    if isinstance(one, (str, PIL.Image.Image)):
        return [one, two]
    if isinstance(one, Tensor) and one.is_floating_point() and one.dim() > 1:
        return torch.cat([one, two])
    if isinstance(one, (list, tuple)) and one and isinstance(one[0], (str, int)):
        return [*one, *two]
    return one


# --- a real call, seen by hooks


def see(pipe: Any, part: str, vae: str, call: dict[str, Any], steps: int, seed: int) -> tuple[list[dict[str, Any]], Any, Any]:
    """Return each step (sample, time, prediction, and arguments of the denoiser), the last latents, and what is decoded."""
    pipe, scheduler = copy.copy(pipe), copy.deepcopy(pipe.scheduler)
    vars(pipe)["scheduler"] = scheduler
    if getattr(pipe, "guider", None) is not None:
        vars(pipe)["guider"] = copy.deepcopy(pipe.guider)
        pipe.guider.disable()
    seen: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    denoiser, decoder = getattr(pipe, part), getattr(pipe, vae)
    own_step, own_scale, own_decode = scheduler.step, getattr(scheduler, "scale_model_input", None), decoder.decode

    def called(module: nn.Module, args: Any, named: Any) -> None:
        state["given"] = pytree.tree_map_only(Tensor, Tensor.clone, bind(module, args, named))

    def step(*args: Any, **named: Any) -> Any:
        given = inspect.signature(own_step).bind(*args, **named).arguments
        output, when, sample = (list(given.values()))[:3]
        sample = given.get("sample", sample)
        if "given" in state:
            seen.append({"sample": state.pop("scaled", sample).clone(), "time": given.get("timestep", when),
                         "prediction": given.get("model_output", output).clone(), "given": state.pop("given")})  # fmt: skip
        result = own_step(*args, **named)
        state["final"] = result[0] if isinstance(result, tuple) else result.prev_sample
        return result

    def scale(*args: Any, **named: Any) -> Any:
        state["scaled"] = own_scale(*args, **named)  # type: ignore[misc]
        return state["scaled"]

    def decode(*args: Any, **named: Any) -> Any:
        state["decoded"] = args[0] if args else next(iter(named.values()))
        raise Decoded

    scheduler.step = step
    if own_scale is not None:
        scheduler.scale_model_input = scale
    decoder.decode = decode
    hook = denoiser.register_forward_pre_hook(called, with_kwargs=True)
    try:
        torch.manual_seed(seed)
        with torch.no_grad(), contextlib.suppress(Decoded):
            pipe(**call, num_inference_steps=steps)
    finally:
        hook.remove()
        del decoder.decode
        assert decoder.decode == own_decode
    return seen, state.get("final"), state.get("decoded")


def bind(module: nn.Module, args: Any, named: Any) -> dict[str, Any]:
    signature = inspect.signature(type(module).forward)
    given = dict(signature.bind(module, *args, **named).arguments)
    given.pop("self")
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    return given


def told(observation: Observation, condition: dict[str, Any], when: Any) -> dict[str, Any]:
    """Return the denoiser's times in the form that they have in a call."""
    value = float(observation.model_time(torch.as_tensor(when).double().flatten()[0]))
    times = {name: condition[name] for name in (observation.time, *observation.also)}
    return pytree.tree_map(lambda x: torch.full_like(x, value) if isinstance(x, Tensor) else type(x)(value), times)


def run_denoiser(pipe: Any, observation: Observation, call: dict[str, Any]) -> Any:
    module = getattr(pipe, observation.part)
    with torch.no_grad():
        return module(**pytree.tree_map_only(Tensor, Tensor.clone, call))


def off(found: Any, right: Any) -> float:
    """Return the largest difference over the largest value, infinity for other shapes."""
    one, two = (flatten_tensors(x).double() for x in (found, right))
    if one.shape != two.shape:
        return float("inf")
    return float((one - two).abs().max() / two.abs().max().clamp(min=1e-6))


def is_same(one: Tensor, two: Tensor) -> bool:
    """Return whether tensors are close; one that samples share may be there once for all of them."""
    shared = one.dim() == two.dim() and one.shape[1:] == two.shape[1:] and 1 in (*one.shape[:1], *two.shape[:1])
    return (one.shape == two.shape or shared) and torch.allclose(one.double(), two.double(), 1e-4, 1e-5)


def differing(one: dict[str, Any], two: dict[str, Any], but: set[str]) -> list[str]:
    """Return the names of arguments that are not close."""
    names = []
    for name in (one.keys() | two.keys()) - but:
        left, right = (pytree.tree_flatten(call.get(name)) for call in (one, two))
        same = left[1] == right[1] and all(
            is_same(a, b) if isinstance(a, Tensor) else a == b
            for a, b in zip(left[0], right[0], strict=True)
        )
        names += [] if same else [name]
    return sorted(names)


def check_steps(pipe: Any, observation: Observation, call: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Compare what the scheduler gets in a real call with the denoiser by hand on what was observed."""
    run = call_pipeline(pipe, call, steps=steps, seed=seed, first_call=observation.part)
    condition = run.steps[-1].calls[-1][1]
    seen, final, decoded = see(pipe, observation.part, observation.vae, call, steps, seed)
    assert seen, "the denoiser was not seen"
    result: dict[str, Any] = {"steps": len(seen), "input": 0.0, "prediction": 0.0}
    for step in seen:
        mapped = observation.to_input(step["sample"], condition[observation.noisy])
        when = told(observation, condition, step["time"])
        made = run_denoiser(pipe, observation, {**condition, observation.noisy: mapped, **when})
        result["input"] = max(result["input"], off(mapped, step["given"][observation.noisy]))
        made = observation.to_output(flatten_tensors(made))
        result["prediction"] = max(result["prediction"], off(made, step["prediction"]))
        if names := differing(condition, step["given"], {observation.noisy, *when}):
            result["condition"] = names
    result["decoder"] = off(observation.to_decoder(final), decoded)
    return result


def check_batch(pipe: Any, observation: Observation, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare a real call of two samples with the two calls joined, on what was observed."""
    many = {name: together(calls[0][name], calls[1][name]) for name in calls[0]}
    seen, _, _ = see(pipe, observation.part, observation.vae, many, 3, 5)
    extra = {n: v for n, v in calls[0].items() if n not in observation.call or n != "prompt"}
    batching = find_batching(pipe, observation, **extra)
    conditions = [
        call_pipeline(pipe, call, steps=3, first_call=observation.part).steps[-1].calls[-1][1] for call in calls
    ]
    again = call_pipeline(pipe, calls[0], steps=3, seed=1, first_call=observation.part).steps[-1].calls[-1][1]
    zeros = [observation.to_input(torch.zeros(observation.shape), c[observation.noisy]) for c in (conditions[0], again)]
    if off(*zeros) > CLOSE:
        return {"unlike": "it adds noise to its picture, and draws other noise for two than for one"}
    if drawn := differing(conditions[0], again, {observation.noisy}):
        return {"unlike": f"it draws {', '.join(drawn)} anew, and others for two than for one"}
    if batching.form(conditions[0]) != batching.form(conditions[1]):
        return {"unlike": "the two have other forms"}
    result: dict[str, Any] = {"input": 0.0, "prediction": 0.0}
    for step in seen:
        rows = step["sample"].chunk(2)
        if rows[0].shape != observation.shape:
            return {"unlike": f"latents of two are {list(step['sample'].shape)}, of one {list(observation.shape)}"}
        own = [
            {**c, observation.noisy: observation.to_input(row, c[observation.noisy]), **told(observation, c, step["time"])}
            for row, c in zip(rows, conditions, strict=True)
        ]  # fmt: skip
        joined = batching.join(own)
        made = run_denoiser(pipe, observation, joined)
        result["input"] = max(result["input"], off(joined[observation.noisy], step["given"][observation.noisy]))
        if names := differing(joined, step["given"], {observation.noisy, observation.time, *observation.also}):
            result["condition"] = names
        halves = [pytree.tree_map_only(Tensor, lambda t, n=n: t.chunk(2)[n], made) for n in (0, 1)]
        first = made[0] if isinstance(made, tuple) else next(iter(made.values())) if hasattr(made, "values") else made
        if isinstance(first, list):
            halves = [[first[n]] for n in (0, 1)]
        predictions = torch.cat([observation.to_output(flatten_tensors(half)) for half in halves])
        result["prediction"] = max(result["prediction"], off(predictions, step["prediction"]))
    return result


# --- a pipeline


def build(case: Any) -> tuple[Any, dict[str, Any]]:
    """Return a test's pipeline, its weights none of them zero, and what it is called with."""
    torch.manual_seed(0)
    parts = case.get_dummy_components()
    pipe = case.pipeline_class(**parts)
    pipe.set_progress_bar_config(disable=True)
    words = len(tiny_pipelines.VOCABULARY) + 16
    for part in parts.values():
        stand_ins.take_tokens(part)
        embedding = None
        if hasattr(part, "resize_token_embeddings"):
            with contextlib.suppress(NotImplementedError):  # of a model within a model
                embedding = part.get_input_embeddings()
        if isinstance(embedding, nn.Embedding) and embedding.num_embeddings < words:
            part.resize_token_embeddings(words)
        for parameter in part.eval().parameters() if isinstance(part, nn.Module) else ():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.05)
    device = {"device": "cpu"} if "device" in inspect.signature(case.get_dummy_inputs).parameters else {}
    call = {name: value for name, value in case.get_dummy_inputs(**device).items() if name not in OWN}
    return pipe, {name: value for name, value in call.items() if not name.startswith("negative_prompt")}


def measure(case: Any) -> dict[str, Any]:
    """Return what becomes of one test's pipeline."""
    try:
        pipe, call = build(case)
        with torch.no_grad():
            takes = inspect.signature(pipe.__call__).parameters
            short = {k: v for k, v in {"num_inference_steps": 2, "output_type": "latent"}.items() if k in takes}
            torch.manual_seed(0)
            pipe(**call, **short)
    except (Exception, SystemExit) as error:
        return {"result": "cannot be built", "text": say(error)}
    try:
        parts = find_denoisers(pipe, call)
        rows = [measure_part(pipe, call, part if len(parts) > 1 else None) for part in parts or [None]]
    except fxplug.FxplugError as error:
        return {"result": "refused", "text": str(error)}
    first = next((row for row in rows if row["result"] != "confirmed"), rows[0])
    return {**first, "parts": rows} if len(rows) > 1 else first


def measure_part(pipe: Any, call: dict[str, Any], part: str | None) -> dict[str, Any]:
    """Return what becomes of one denoiser of a pipeline."""
    seen = observe(pipe, call, part)
    shown = {"part": seen.part, "describe": seen.describe()}
    call = seen.call
    worst = confirm(pipe, seen, (variant(call, 1), variant(call, 2)))
    row: dict[str, Any] = {"result": "confirmed", "difference": worst, **shown}
    row["check"] = check_steps(pipe, seen, variant(call, 3), 4, 11)
    try:
        with modes_of_posteriors():
            row["batch"] = check_batch(pipe, seen, [variant(call, 3), variant(call, 4)])
    except Exception as error:
        row["batch"] = {"not called": say(error)}
    checks = [row["check"], {k: v for k, v in row["batch"].items() if k not in ("not called", "unlike")}]
    if any(value > CLOSE for check in checks for key, value in check.items() if isinstance(value, float)) or any(
        "condition" in check for check in checks
    ):
        row["result"] = "misread"
    return row


@contextlib.contextmanager
def modes_of_posteriors() -> Iterator[None]:
    """Let encoders give the mode where a pipeline draws: two samples together draw other numbers than each alone."""
    kind = diffusers.models.autoencoders.vae.DiagonalGaussianDistribution
    before = kind.sample
    kind.sample = lambda self, generator=None: self.mode()
    try:
        yield
    finally:
        kind.sample = before


def needs_arguments(function: Any) -> bool:
    """Return whether a test's function has arguments that a class derived of it gives."""
    first, *rest = inspect.signature(function).parameters.values()
    return any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in rest)


def say(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:240]}"


def measure_file(checkout: Path, file: str, limit: int, measure: Measure, sink: Any) -> None:
    """Put a row into the sink for each pipeline of a test file."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    stand_ins.install()
    sys.path.insert(0, str(checkout))
    path, file = file, file.removeprefix("tests/pipelines/")

    def late(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGPROF, late)
    try:
        module = importlib.import_module(path[: -len(".py")].replace("/", "."))
    except (Exception, unittest.SkipTest) as error:
        sink.put({"file": file, "pipeline": "", "result": "cannot be built", "text": say(error)})
        return
    done = set()
    for kind in list(vars(module).values()):
        if not (isinstance(kind, type) and kind.__module__ == module.__name__ and "get_dummy_components" in dir(kind)):
            continue
        owner = vars(kind).get("pipeline_class") or getattr(kind, "pipeline_class", None)
        if not isinstance(owner, type) or owner in done or needs_arguments(kind.get_dummy_components):
            continue
        done.add(owner)
        row = {"file": file, "pipeline": owner.__name__}
        sink.put({**row, "result": "stopped", "text": "the process ended, or its time"})  # until it is known better
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, limit)  # of the processor: what else runs on the machine is not in it
        try:
            found = measure(kind())
        except Late:
            found = {"result": "stopped", "text": f"longer than {limit} s"}
        except BaseException as error:
            found = {"result": "fault", "text": say(error), "trace": traceback.format_exc(limit=-5)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.put({**row, **found, "seconds": round(time.process_time() - start, 1)})


def keep(out: Path | None, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write what is known so far."""
    if out:
        kept = [rows[key] for key in sorted(rows)]
        record.write(out, {"counts": Counter(row["result"] for row in kept), "rows": kept})


def main(arguments: list[str], measure: Measure = measure, about: str | None = __doc__) -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=int, default=150, help="seconds of CPU time for one pipeline")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--new", action="store_true", help="measure those files alone of which --out has nothing")
    given = parser.parse_intermixed_args(arguments)
    files = sorted(str(f.relative_to(given.checkout)) for f in (given.checkout / "tests/pipelines").rglob("test_*.py")
                   if "get_dummy_components" in f.read_text())  # fmt: skip
    files = list(dict.fromkeys(f for name in given.names or [""] for f in files if name in f))  # in the order of the names
    context = multiprocessing.get_context("fork")
    sink, rows, running = context.Queue(), dict[tuple[str, str], dict[str, Any]](), dict[Any, float]()
    if given.out and given.out.is_file():  # what is not measured anew stays
        rows = {(row["file"], row["pipeline"]): row for row in json.loads(given.out.read_text())["rows"]}
    if given.new:
        files = [file for file in files if all(file.removeprefix("tests/pipelines/") != known for known, _ in rows)]
    while files or running or not sink.empty():
        while files and len(running) < AT_A_TIME:
            job = context.Process(target=measure_file, args=(given.checkout, files.pop(0), given.limit, measure, sink))
            job.start()
            running[job] = time.monotonic()
        while not sink.empty():
            row = sink.get()
            rows[row["file"], row["pipeline"]] = row
            if row["result"] != "stopped" or "longer" in row["text"]:
                what = {k: v for k, v in row.items() if k not in ("file", "pipeline", "result", "describe")}
                print(row["pipeline"] or row["file"], row["result"], what, flush=True)
                keep(given.out, rows)
        for job, begun in list(running.items()):
            if time.monotonic() - begun > 40 * given.limit:  # it waits for something
                job.kill()
            if not job.is_alive():
                job.join()
                del running[job]
        time.sleep(0.05)
    keep(given.out, rows)
    print(dict(Counter(row["result"] for row in rows.values())))


if __name__ == "__main__":
    main(sys.argv[1:])
