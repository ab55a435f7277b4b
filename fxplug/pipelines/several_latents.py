"""Denoisers with several latents, as of a video and its sound: which a picture becomes, and how these are predicted alone."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import SpecError
from ..core.torch_internals import trees as pytree
from .latent_maps import LatentMap, flatten_tensors
from .opening import call_parameters
from .recorded_run import PipelineRun, call_pipeline, get_components, hide_warnings, is_vae_of_pictures, list_vaes, refuse

DRAWS = 2  # other values of other latents that must change nothing


def switch_scales_off(
    pipe: Any, call: Mapping[str, Any], part: str, scales: Iterable[str], denoisers: frozenset[str], results: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a pipeline with which it calls the denoiser the least often in a step.

    Beside scales of guidance a pipeline may have others, each of which adds a call where it is not 1, or not 0. They are found
    by their names' ends, those of one name for several latents together, and set where this takes calls away.

    Args:
        pipe: The pipeline.
        call: Its arguments.
        part: The denoiser.
        scales: Arguments that stay as they are.
        denoisers: All models that denoise in its steps.
        results: As in `record_run`.

    Returns:
        The arguments, as they were where the denoiser is called once in a step.

    Raises:
        SpecError: The pipeline cannot be called.
    """
    found = dict(call)
    least = _count_calls(pipe, found, part, denoisers, results)
    families: dict[str, list[str]] = {}
    for name in call_parameters(pipe) if least > 1 else ():
        if name.endswith("_scale") and name not in set(scales):
            families.setdefault("_".join(name.split("_")[-2:]), []).append(name)
    for names in families.values():
        for value in (1.0, 0.0):
            tried = {**found, **dict.fromkeys(names, value)}
            try:
                count = _count_calls(pipe, tried, part, denoisers, results)
            except SpecError:  # a scale of something else
                continue
            if count < least:
                found, least = tried, count
    return found


def _count_calls(
    pipe: Any, call: Mapping[str, Any], part: str, denoisers: frozenset[str], results: dict[str, Any]
) -> int:
    """Return how often the denoiser is called in a step, at most."""
    steps = _record_ones(pipe, call, denoisers, results).steps
    return max([sum(name == part for name, _, _ in step.calls) for step in steps if step.place == 0], default=0)


def _record_ones(pipe: Any, call: Mapping[str, Any], denoisers: frozenset[str], results: dict[str, Any]) -> PipelineRun:
    return call_pipeline(pipe, call, latents=torch.ones_like, outputs=torch.ones_like, results=results, denoisers=denoisers)


def find_picture_place(pipe: Any, ones: PipelineRun, moved: Mapping[int, PipelineRun]) -> int:
    """Find which of several latents are those that a picture becomes.

    Args:
        pipe: The pipeline.
        ones: A run in which all latents are ones.
        moved: For the place of each latents a run in which those alone are other ones.

    Returns:
        The place of those that the VAE decodes that takes pictures.

    Raises:
        SpecError: That is not one of the VAEs, or what it decodes is not of one of the latents.
    """
    if not ones.decoded:
        raise refuse(pipe, "VAE", "the call ends without decoding latents by `decode` of a part with `encode`")
    vaes, name = list_vaes(pipe), list(ones.decoded)[-1]
    taking = [each for each, vae in vaes.items() if any(is_vae_of_pictures(vae, dims) for dims in (4, 5))]
    if taking != [name] or len(vaes) < len(moved):
        why = f"{len(moved)} latents have steps, as of a video and its sound, and each must have a VAE, one for pictures: of "
        raise refuse(pipe, "VAE", f"{why}{', '.join(vaes)} those that encode pictures are {', '.join(taking) or 'none'}")
    seen = ones.decoded[name]
    places = [place for place, run in moved.items() if not torch.equal(run.decoded[name], seen)]
    if len(places) != 1:
        raise refuse(pipe, "VAE", f"what {name} decodes is made of {len(places)} of the {len(moved)} latents that have steps")
    return places[0]


def list_settings(
    pipe: Any,
    call: Mapping[str, Any],
    part: str,
    plain: Mapping[str, Any],
    denoisers: frozenset[str],
    results: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yield the settings of the denoiser in the calls that a pipeline makes in a step, as far as they are no tensors.

    Args:
        pipe: The pipeline.
        call: What it is called with, guidance and all.
        part: The denoiser.
        plain: The call of the denoiser that settings differ from.
        denoisers: All models that denoise in its steps.
        results: As in `record_run`.

    Yields:
        Nothing but what differs, by the argument's name; first no settings.

    Raises:
        SpecError: The pipeline cannot be called.
    """
    seen: list[dict[str, Any]] = [{}]
    yield {}
    for step in _record_ones(pipe, call, denoisers, results).steps:
        for name, given, _ in step.calls:
            found = {key: value for key, value in given.items() if name == part and _is_setting(value)
                     and _is_setting(plain.get(key)) and repr(value) != repr(plain.get(key))}  # fmt: skip
            if found not in seen:
                seen.append(found)
                yield found


def _is_setting(value: Any) -> bool:
    return all(leaf is None or isinstance(leaf, (bool, int, float, str)) for leaf in pytree.tree_leaves(value))


def is_predicted_alone(
    pipe: Any, part: str, call: Mapping[str, Any], noisy: str, beside: Iterable[str], to_output: LatentMap
) -> bool:
    """Return whether a denoiser predicts latents without others: the same to the bit, whatever values these have.

    Args:
        pipe: The pipeline.
        part: The denoiser, which is called four times.
        call: Its arguments.
        noisy: The argument for the latents.
        beside: Those for the others, and for their times.
        to_output: The map of the denoiser's output to what the scheduler is given for the latents.

    Returns:
        Whether that is so, and the latents themselves do change the prediction.
    """
    model, draw = get_components(pipe)[part], torch.Generator().manual_seed(0)

    def predict(names: Iterable[str]) -> Tensor:
        other = {name: pytree.tree_map_only((Tensor, float), functools.partial(_change, draw), call[name]) for name in names}
        with hide_warnings(), torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            output = flatten_tensors(model(**{**call, **other}))
        return output[to_output.index[to_output.index >= 0].to(output.device)]

    try:
        plain = predict(())
        alone = all(torch.equal(predict(tuple(beside)), plain) for _ in range(DRAWS))
        return alone and not torch.equal(predict((noisy,)), plain)
    except Exception:  # the denoiser's: settings of another call may need more than they
        return False


def _change(draw: torch.Generator, value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, Tensor):
        share = torch.rand(value.shape, generator=draw).to(value.device)
        return value * share.to(value.dtype) if value.is_floating_point() else (value * share).to(value.dtype)
    return value * 0.5
