"""What a denoiser is called with for captions and pictures: the pipeline's own first call, and such calls joined to a batch."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import SpecError, format_fields
from ..core.torch_internals import trees as pytree
from .latent_maps import flatten_tensors
from .observation import Observation
from .opening import call_parameters
from .recorded_run import call_pipeline

Call = dict[str, Any]
Path = tuple[Any, ...]


def encode_condition(pipe: Any, observation: Observation, seed: int | None = None, /, **arguments: Any) -> Call:
    """Return the arguments of the denoiser's first call, by name, when the pipeline is called with other arguments.

    Args:
        pipe: The pipeline.
        observation: What it does around its denoiser, whose first call may be behind those of another one.
        seed: What torch's random numbers begin with, such as those of dropout in a text encoder that trains, and then gradients
            reach the parameters of that; None is without gradients.
        **arguments: What differs from the observed call: a prompt, a picture.

    Returns:
        The arguments by name. The one for latents has the pipeline's own random latents, and what belongs to the condition.

    Raises:
        SpecError: The pipeline does not take the arguments.
    """
    options: dict[str, Any] = {} if seed is None else {"seed": seed, "gradients": True}
    if observation.others:  # which are called first: once, whatever the number of steps
        options |= {"results": {}, "denoisers": frozenset(observation.others)}
    run = call_pipeline(pipe, {**observation.call, **arguments}, first_call=observation.part, **options)
    name, given, _ = run.steps[-1].calls[-1] if run.steps and run.steps[-1].calls else ("", {}, None)
    if name != observation.part:
        raise SpecError(f"this call of {type(pipe).__name__} does not call {observation.part}", path=("model", "part"))
    return {**given, **observation.settings}


@dataclass(frozen=True)
class BatchDims:
    """Which parts of a denoiser's call belong to samples.

    `dims` has the dimension of samples of each tensor that has one, by its path, and `lists` the arguments that are lists with
    entries of each sample.
    """

    dims: Mapping[Path, int]
    lists: frozenset[str]

    __repr__ = format_fields

    @functools.cached_property
    def dims_of_arguments(self) -> dict[str, int]:
        """Return the dimension of samples of each argument that is a tensor, by name."""
        return {_argument(path): dim for path, dim in self.dims.items() if len(path) == 1}

    def form(self, call: Call) -> str:
        """Return a text that calls have in common if, and only if, they can be joined to one: shapes, and values that samples
        share."""
        parts: list[str] = []
        for path, leaf in pytree.tree_flatten_with_path(call)[0]:
            if isinstance(leaf, Tensor):
                shape = [size for dim, size in enumerate(leaf.shape) if dim != self.dims.get(path)]
                own = path in self.dims or _argument(path) in self.lists
                parts.append(f"{pytree.keystr(path)} {leaf.dtype} {shape} {'' if own else _digest(leaf)}")
            else:
                plain = leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))
                parts.append(f"{pytree.keystr(path)} {leaf!r}" if plain else f"{pytree.keystr(path)} {type(leaf)}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def join(self, calls: Sequence[Call]) -> Call:
        """Return the call of a batch: the samples of calls of one `form`, in order."""
        joined: Call = {}
        for name, value in calls[0].items():
            if name in self.lists:
                joined[name] = [entry for call in calls for entry in call[name]]
                continue
            if isinstance(value, Tensor):  # as most are, in each step: none of these is looked for in a structure
                dim = self.dims_of_arguments.get(name)
                joined[name] = value if dim is None else torch.cat([call[name] for call in calls], dim)
                continue
            rows = [pytree.tree_flatten_with_path({name: call[name]}) for call in calls]
            leaves = [
                torch.cat([row[0][place][1] for row in rows], self.dims[path]) if path in self.dims else leaf
                for place, (path, leaf) in enumerate(rows[0][0])
            ]
            joined[name] = pytree.tree_unflatten(leaves, rows[0][1])[name]
        return joined


def find_batching(pipe: Any, observation: Observation, **arguments: Any) -> BatchDims:
    """Find which parts of the denoiser's call have samples, by calling the pipeline for one sample and for two.

    Two are asked for by a prompt that is there twice, and where the pipeline does not take that beside its pictures, by the
    argument "num_images_per_prompt", or one of such a name, and by pictures that are there twice, too.

    Args:
        pipe: The pipeline.
        observation: What it does around its denoiser.
        **arguments: What the pipeline needs beside, such as a picture.

    Returns:
        The dimensions of samples.

    Raises:
        SpecError: A tensor has samples in no dimension, or in several.
    """
    one = encode_condition(pipe, observation, **arguments)
    failures: list[SpecError] = []
    for asked in _list_double_arguments(pipe, observation, arguments):
        try:
            two = encode_condition(pipe, observation, **{**arguments, **asked})
        except SpecError as error:
            failures.append(error)
            continue
        sizes = [flatten_tensors(call[observation.noisy]).numel() for call in (one, two)]
        if sizes[1] == 2 * sizes[0]:
            break
        # some pipelines ignore a number
        finding = f"{', '.join(asked) or 'nothing'} for two samples gives {sizes[1] / sizes[0]:g} of one"
        failures.append(SpecError(f"condition of {type(pipe).__name__}: {finding}", path=("model",)))
    else:
        raise failures[0]
    dims: dict[Path, int] = {}
    lists = {
        name for name, value in one.items()
        if isinstance(value, (list, tuple)) and value and len(two[name]) == 2 * len(value)
    }  # fmt: skip
    rest = [{name: value for name, value in call.items() if name not in lists} for call in (one, two)]
    pairs = [pytree.tree_flatten_with_path(call) for call in rest]
    if pairs[0][1] != pairs[1][1]:
        raise SpecError(f"condition of {type(pipe).__name__}: its form depends on the number of prompts", path=("model",))
    for (path, first), (_, second) in zip(pairs[0][0], pairs[1][0], strict=True):
        if not isinstance(first, Tensor) or first.shape == second.shape:
            continue
        growing = [dim for dim in range(first.dim()) if first.shape[dim] != second.shape[dim]]
        if len(growing) != 1 or second.shape[growing[0]] != 2 * first.shape[growing[0]]:
            finding = f"{pytree.keystr(path)} is {list(first.shape)} for one prompt, and {list(second.shape)} for two"
            raise SpecError(f"condition of {type(pipe).__name__}: {finding}", path=("model",))
        dims[path] = growing[0]
    return BatchDims(dims, frozenset(lists))


def _list_double_arguments(pipe: Any, observation: Observation, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return arguments that ask for two samples, in the order in which they are tried."""
    given = {**observation.call, **arguments}
    listed = {n: [v] if isinstance(v, str) else v for n, v in given.items() if n.startswith("prompt")}
    prompts = {n: v * 2 for n, v in listed.items() if isinstance(v, list)}
    pictures = {n: torch.cat([v, v]) if isinstance(v, Tensor) else [v, v] for n, v in given.items()
                if hasattr(v, "convert") or (isinstance(v, Tensor) and v.dim() > 2)}  # fmt: skip
    many = [{n: 2} for n in call_parameters(pipe) if n.startswith("num_") and n.endswith("_per_prompt")]
    return [prompts, *many, *([{**prompts, **pictures}] if pictures else [])]


def _argument(path: Path) -> str:
    return str(getattr(path[0], "key", path[0]))


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # one element may have a stride of 0
    return hashlib.sha256(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"").hexdigest()
