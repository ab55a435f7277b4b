"""The call of a denoiser for a batch: its samples' conditions, latents and times put together, its output taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import SpecError, format_fields
from ..core.torch_internals import trees as pytree
from .conditions import BatchDims, Call, encode_condition, find_batching
from .latent_maps import BatchedMap, flatten_tensors
from .observation import Observation


@dataclass(frozen=True)
class SampleCondition:
    """What the denoiser is called with for one sample, beside latents and time: the arguments in `call`.

    `form` is a text that conditions have in common if they can be in one batch; `own` float [n] are the elements of the input
    that are no latents, None where there are none.
    """

    call: Call
    form: str
    own: Tensor | None = None

    __repr__ = format_fields

    def to(self, device: torch.device) -> SampleCondition:
        """Return the condition on a device."""
        call = pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), self.call)
        return SampleCondition(call, self.form, None if self.own is None else self.own.to(device, non_blocking=True))

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensors."""
        tensors = [leaf for leaf in pytree.tree_leaves((self.call, self.own)) if isinstance(leaf, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


class DenoiserCall:
    """Calls of the denoiser of a pipeline, for batches of one size of picture.

    `observation` is what the pipeline does around its denoiser, `batching` says which parts of a call have samples.
    """

    def __init__(
        self, pipe: Any, observation: Observation, batching: BatchDims, device: torch.device, example: Call | None = None
    ) -> None:
        """Read the maps; `example` is a call in the dtypes that the pipeline has, where it was observed in others. Raises
        SpecError for latents, a time or an output that a batch cannot have."""
        example = observation.condition if example is None else example
        self.pipe, self.observation, self.batching, self.device = pipe, observation, batching, device
        self.to_input = BatchedMap(observation.to_input, device)
        self.to_output = BatchedMap(observation.to_output, device)
        self.to_decoder = BatchedMap(observation.to_decoder, device)
        self.shape = observation.shape[1:]
        decoded = pytree.tree_leaves(observation.to_decoder.like)
        self.decoded = next(leaf.shape[1:] for leaf in decoded if isinstance(leaf, Tensor))
        part, noisy = observation.part, observation.noisy
        if observation.shape[0] != 1:
            self._refuse("latents", f"those of one sample are {list(observation.shape)}, and the first size must be 1")
        if self.to_output.own is not None:
            self._refuse("output", f"part of the scheduler's input is not in the output of {part}")
        self.times = {name: torch.as_tensor(example[name]) for name in (observation.time, *observation.also)}
        for name, time in self.times.items():
            by_part = time.dim() == 2 and len(time) == 1 and batching.dims_of_arguments.get(name) == 0  # equal ones
            if time.shape not in ((), (1,)) and not by_part:
                self._refuse("time", f"{name} of {part} is {list(time.shape)} for one sample, and must be [1]")
        self.like = example[noisy]
        leaves = pytree.tree_flatten_with_path({noisy: self.like})[0]
        self.sizes = [leaf.numel() for _, leaf in leaves if isinstance(leaf, Tensor)]
        self.listed = noisy in batching.lists
        self.dims = [batching.dims.get(path) for path, leaf in leaves if isinstance(leaf, Tensor)]
        if not self.listed and None in self.dims:
            self._refuse("input", f"{noisy} of {part} has no dimension of samples")
        self.outputs = observation.outputs
        self.used: set[int] | None = None  # tensors of an output that are in what the scheduler is given

    def _refuse(self, what: str, why: str) -> None:
        raise SpecError(f"{what} of {type(self.pipe).__name__}: {why}", path=("model", "pipeline"))

    def encode(self, seed: int | None = None, /, **arguments: Any) -> SampleCondition:
        """Return the condition of one sample, by a call of the pipeline as far as its denoiser.

        Args:
            seed: As in `encode_condition`: with it gradients reach a text encoder that trains.
            **arguments: What differs from the observed call: a prompt, a picture.

        Returns:
            The condition, on the pipeline's device.

        Raises:
            SpecError: The pipeline does not take the arguments, or calls the denoiser in another form.
        """
        call = dict(encode_condition(self.pipe, self.observation, seed, **arguments))
        noisy, part = call.pop(self.observation.noisy, None), self.observation.part
        for name in self.times:
            call.pop(name, None)
        own = None
        if noisy is not None:
            own = flatten_tensors(noisy)
            if own.numel() != sum(self.sizes):
                what = f"{self.observation.noisy} of {part} has {own.numel()} elements for one sample and {sum(self.sizes)} for"
                self._refuse("condition", f"{what} another of the same size of picture")
        return SampleCondition(call, self.batching.form(call), own if self.to_input.own is not None else None)

    def __call__(self, conditions: Sequence[SampleCondition], x: Tensor, time: Tensor) -> Call:
        """Return the arguments of the denoiser by name.

        Args:
            conditions: Those of the samples, of one form.
            x: The latents as the scheduler scales them for the denoiser, [b, ...].
            time: The scheduler's times [b].

        Returns:
            The arguments by name.
        """
        call = self.batching.join([condition.call for condition in conditions])
        own = None if conditions[0].own is None else torch.stack([c.own for c in conditions if c.own is not None])
        call[self.observation.noisy] = self._structure(self.to_input(x, own))
        times = time if time.is_floating_point() else time.double()
        for name, like in self.times.items():
            told = self.observation.model_time(times).to(like.dtype)
            call[name] = told[:, None].expand(-1, like.shape[1]) if like.dim() == 2 else told  # of each token
        return call

    def _structure(self, rows: Tensor) -> Any:
        """Return the denoiser's input, of its elements [b, n]."""
        count, noisy = len(rows), self.observation.noisy
        leaves, form = pytree.tree_flatten(self.like)
        rows = rows.to(next(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)))
        parts = iter(torch.split(rows, self.sizes, 1))
        if self.listed:
            split = [next(parts).unbind() if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
            each = [
                pytree.tree_unflatten([p[n].reshape(leaf.shape) if isinstance(leaf, Tensor) else p[n]
                                       for p, leaf in zip(split, leaves, strict=True)], form)
                for n in range(count)
            ]  # fmt: skip
            return [entry for entries in each for entry in entries]
        made, dims = [], iter(self.dims)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                made.append(leaf)
                continue
            part, dim = next(parts), next(dims)
            if dim == 0:
                made.append(part.reshape(count * leaf.shape[0], *leaf.shape[1:]))
            else:
                assert dim is not None, noisy
                made.append(torch.cat([row.reshape(leaf.shape) for row in part], dim))
        return pytree.tree_unflatten(made, form)

    def predictions(self, output: Any, count: int) -> Tensor:
        """Return what the scheduler is given for the denoiser's output, [b, n] for b samples.

        Raises:
            SpecError: The output has another number of elements than the observed one.
        """
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        rows = torch.empty(0)
        if len(leaves) == len(self.outputs):
            split = [split_samples(leaf, shape, count) for leaf, shape in zip(leaves, self.outputs, strict=True)]
            each = [one for one in split if one is not None]
            if len(each) == len(leaves) > 0:
                rows = each[0] if len(each) == 1 else torch.cat(self._detach_unused(each), 1)
        elif len(leaves) == len(self.outputs) * count:
            rows = torch.stack([leaf.flatten() for leaf in leaves]).reshape(count, -1)
        if rows.dim() != 2 or rows.shape[1] != self.to_output.source.numel():
            found = f"{', '.join(str(list(leaf.shape)) for leaf in leaves)} for {count} samples"
            self._refuse("output", f"{self.observation.part} returns {found}, and was observed to return "
                         f"{self.to_output.source.numel()} elements for one")  # fmt: skip
        return self.to_output(rows)

    def _detach_unused(self, each: list[Tensor]) -> list[Tensor]:
        """Detach tensors of an output of which the scheduler is given nothing, such as a sound: else layers that only they
        depend on would get gradients of zeros."""
        ends = torch.tensor([rows.shape[1] for rows in each]).cumsum(0)
        index = self.observation.to_output.index
        used = set(torch.bucketize(index[index >= 0], ends, right=True).tolist()) if self.used is None else self.used
        self.used = used
        return [rows if place in used else rows.detach() for place, rows in enumerate(each)]

    def latents(self, encoded: Tensor) -> Tensor:
        """Return the scheduler's latents [b, ...] of what the VAE has made of pictures, [b, c, ...]."""
        return self.to_decoder.inverse(encoded).reshape(len(encoded), *self.shape)

    def as_decoded(self, latents: Tensor) -> Tensor:
        """Return values of latents [b, ...] in the places [b, c, ..., h, w] that the VAE decodes, as they are."""
        return self.to_decoder.rearranged(latents).reshape(len(latents), *self.decoded)

    def as_latents(self, decoded: Tensor) -> Tensor:
        """Return values in the places that the VAE decodes, [b, c, ..., h, w], in those of the latents [b, ...]."""
        return self.to_decoder.arranged_back(decoded).reshape(len(decoded), *self.shape)


def split_samples(tensor: Tensor, one: torch.Size, count: int) -> Tensor | None:
    """Split a tensor of a denoiser's output into its samples.

    Args:
        tensor: The tensor, for so many samples.
        one: The shape that it has for one.
        count: The number of samples.

    Returns:
        The elements of each sample, [b, n]; None for a tensor with samples in no dimension, or in several.
    """
    if tensor.shape == (count, *one) or (count == 1 and tensor.shape == one):
        return tensor.reshape(count, -1)
    grown = [dim for dim, (many, size) in enumerate(zip(tensor.shape, one, strict=False)) if many != size]
    if tensor.dim() != len(one) or len(grown) != 1 or tensor.shape[grown[0]] != count * one[grown[0]]:
        return None
    return torch.stack([sample.flatten() for sample in tensor.chunk(count, grown[0])])


def make_denoiser_call(pipe: Any, observation: Observation, device: torch.device, **arguments: Any) -> DenoiserCall:
    """Make the `DenoiserCall` of a pipeline.

    Args:
        pipe: The pipeline.
        observation: What it does around its denoiser.
        device: Where latents are.
        **arguments: What the pipeline needs beside, such as a picture.

    Returns:
        What makes calls of batches.

    Raises:
        SpecError: Batches are not possible.
    """
    example = encode_condition(pipe, observation, **arguments)
    return DenoiserCall(pipe, observation, find_batching(pipe, observation, **arguments), device, example)


def example_call(pipe: Any, observation: Observation, count: int = 2, **arguments: Any) -> Call:
    """Return the arguments of a denoiser for so many samples, as in training, to trace it with.

    Settings by which it predicts some of several latents alone are left out, so that all layers are called.

    Args:
        pipe: The pipeline.
        observation: What it does around its denoiser.
        count: The number of samples.
        **arguments: What the pipeline needs beside, such as a picture.

    Returns:
        The arguments by name.

    Raises:
        SpecError: Batches are not possible.
    """
    device = next((leaf.device for leaf in pytree.tree_leaves(observation.condition) if isinstance(leaf, Tensor)), None)
    made = make_denoiser_call(pipe, observation, device or torch.device("cpu"), **arguments)
    condition = made.encode(**arguments)
    dtype = next(leaf.dtype for leaf in pytree.tree_leaves(made.like) if isinstance(leaf, Tensor))
    x = torch.randn(count, *made.shape, generator=torch.Generator().manual_seed(0)).to(made.device, dtype)
    call = made([condition] * count, x, torch.linspace(300, 700, count).to(made.device))
    return {**call, **{name: observation.condition.get(name) for name in observation.settings}}
