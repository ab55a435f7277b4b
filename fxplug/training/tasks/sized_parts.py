"""The denoiser of a pipeline for each size of picture: observed, confirmed, and ready to be called for batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...core.errors import SpecError, format_fields, quote
from ...core.ir.variants import Variants, choose_module
from ...lowerings.regions.swapping import BlockSwap
from ...pipelines.call_forms import add_size_forms
from ...pipelines.denoiser_call import DenoiserCall, make_denoiser_call
from ...pipelines.example_call import ExampleCall, call_arguments, encode_once
from ...pipelines.observation import PROMPTS, Observation, confirm, observe
from ...pipelines.opening import call_parameters
from ...pipelines.recorded_run import get_components
from ...pipelines.step_inputs import META, note_groups
from ..random_draws import Draws
from .added_inputs import AddedInputs
from .model_call import find_tensor
from .noise import Diffusion, Flow
from .pipeline_conditions import Conditions, MemoryStore, Store, as_pictures, find_picture_argument, make_picture_arguments
from .pipeline_encoders import Encoders, Size, draw_sample, with_swapped_weights
from .pipeline_noise import check_scheduler, list_part_steps, open_scheduler, take_sampled
from .pipeline_text import TrainedText
from .task import Batch


@dataclass(frozen=True)
class SizedPart:
    """A denoiser as it is trained on pictures of one size: its call, its samples' conditions, its noise, and which `steps`
    of it. `stock` are the conditions by the pipeline as it is: others where text encoders train."""

    call: DenoiserCall
    conditions: Conditions
    stock: Conditions
    noise: Diffusion | Flow
    steps: Tensor

    __repr__ = format_fields


class SizedParts:
    """The `SizedPart` of each size that pictures have.

    `part` is the denoiser's name, known with the first size; `condition` is the argument for pictures beside the captions,
    and `added` are inputs of the denoiser that get these instead.
    """

    def __init__(
        self,
        pipe: Any,
        call: Mapping[str, Any],
        part: str | None,
        store: Store | None,
        device: torch.device,
        *,
        as_sampled: bool,
        first: SizedParts | None = None,
        swap: BlockSwap | None = None,
        **weights: Any,
    ) -> None:
        """Take a pipeline, what it is called with, and where batches are; `as_sampled` takes the pipeline's own amounts of
        noise, `weights` are those of `open_scheduler`. `first` is that of another denoiser of the same pipeline; `swap` has
        weights of the denoiser on the host."""
        self.swap = swap
        self.pipe, self.given, self.wanted, self.store, self.device = pipe, dict(call), part, store, device
        self.as_sampled, self.weights = as_sampled, weights
        self.memory: MemoryStore = MemoryStore() if first is None else first.memory
        self.encoders: Encoders = Encoders(pipe, device) if first is None else first.encoders
        self.made: dict[Size, SizedPart] = {}
        self.part = part or ""
        self.condition: str | None = None
        self.added: tuple[str, ...] = ()
        self.text: TrainedText | None = None  # which encodes captions instead of the pipeline's own
        self._searches = False  # for a size that is drawn as it is

    def take_condition(self, example: Batch, added: tuple[str, ...] = ()) -> None:
        """Find the argument for the pictures beside captions, where a batch of the data has such.

        Args:
            example: The batch.
            added: Inputs of the denoiser that get these pictures, as passes have added them: the pipeline then gets none.

        Raises:
            SpecError: The pipeline takes no such picture.
        """
        self.condition, self.added = None, added
        if added:
            return
        argument = find_picture_argument(self.pipe, self.given)
        if "condition" not in example:
            return
        if argument is None:
            kind = type(self.pipe).__name__
            finding = f"has no effect: {kind} takes no picture as a condition beside the caption"
            raise SpecError(f"{finding}, or 'call' gives it already", path=("data", "conditions"))
        self.condition = argument

    def example_arguments(self, size: Size, seed: int = 0) -> dict[str, Any]:
        """Return the arguments of a picture of random colours as the condition, for a pipeline that gets one.

        Args:
            size: The size of the pictures.
            seed: The seed of the colours.

        Returns:
            The arguments by name; none without conditions.
        """
        if self.condition is None:
            return {}
        generator = torch.Generator().manual_seed(seed)
        picture, own = as_pictures(torch.rand(2, 3, *size[-2:], generator=generator))
        return make_picture_arguments(self.condition, picture, own)

    def of(self, size: Size, check: bool = False) -> SizedPart:
        """Return the denoiser for pictures of a size, observed and confirmed when it is asked for first.

        Args:
            size: The size of the pictures.
            check: Whether the scheduler is proved to lead to the data.

        Returns:
            The denoiser.

        Raises:
            SpecError: The pipeline is not understood for this size, or cannot draw it.
        """
        if size in self.made:
            return self.made[size]
        self.encoders.bring_back()
        with torch.autocast(self.device.type, enabled=False), with_swapped_weights(self.swap, self.pipe):
            seen = self._observation(size)
            calls = tuple({**seen.call, **({"prompt": prompt} if "prompt" in seen.call else {}),
                           **self.example_arguments(size, seed)} for seed, prompt in enumerate(PROMPTS))  # fmt: skip
            confirm(self.pipe, seen, (calls[0], calls[1]))
            call = make_denoiser_call(self.pipe, seen, self.device, **self.example_arguments(size))
            noise = open_scheduler(get_components(self.pipe)["scheduler"], **self.weights)
            if check:
                check_scheduler(self.pipe, seen, noise)
            steps = list_part_steps(noise, self.pipe, seen)
            if self.as_sampled:
                sampled = take_sampled(noise, self.pipe, seen)
                steps = list_part_steps(noise, self.pipe, seen) if seen.others else sampled
            self.part = seen.part
            self._check_latents(size, call)
        stock = Conditions(self.pipe, call, self.condition, self.memory, self.store, self.device, self.encoders)
        self.made[size] = SizedPart(call, stock.with_text(self.text), stock, noise, steps.cpu())
        return self.made[size]

    def say_unreached(self) -> str:
        """Say why the loss does not reach layers, where of several latents those of pictures alone are trained."""
        for seen in (one.call.observation for one in self.made.values()):
            if seen.beside:
                how = ", ".join(f"{name}={quote(value)}" for name, value in seen.settings.items())
                without = f"{', '.join(seen.beside)}{how and f', by {how}'}"
                return f"{seen.noisy} is trained without {without}, of which pictures have nothing"
        return ""

    def take_text(self, text: TrainedText) -> None:
        """Encode captions by text encoders that train, from here on."""
        self.text = text
        self.made = {size: replace(one, conditions=one.stock.with_text(text)) for size, one in self.made.items()}

    def trace_forms(self, module: Variants, sizes: Iterable[Size], count: int, added: AddedInputs) -> None:
        """Let a module that takes several forms of call have those of the training, of these sizes and of so many samples with
        what passes take beside, and those in which its pipeline draws."""
        for size in sizes:
            one = self.of(size)
            if META not in module.meta:
                note_groups(module, one.call.observation.input_groups)
            condition = one.stock.one(PROMPTS[0], self.example_arguments(size))
            for number in dict.fromkeys((count, 1)) if one.call.batching.lists else (count,):
                x = torch.zeros(number, *one.call.shape, device=self.device)
                time = one.noise.time(one.steps[:1].expand(number)).to(self.device)
                choose_module(module, (), {**one.call([condition] * number, x, time), **added.example(number, size)})
        if added.names:  # which a pipeline does not give
            return
        calls = []
        with encode_once(self.pipe):
            for size in sizes:
                seen = self.of(size).call.observation.call
                given: dict[str, Any] = {name: seen[name] for name in ("height", "width", "num_frames") if name in seen}
                given |= {**self.given, **self.example_arguments(size)}
                calls.append(ExampleCall(self.pipe, self.part, call_arguments(self.pipe, given, None)))
            add_size_forms(module, calls)

    def _observation(self, size: Size) -> Observation:
        """Observe the pipeline for pictures of a size. Raises SpecError, of a condition where one is lacking."""
        known, call = call_parameters(self.pipe), dict(self.given)
        for name, value in zip(("num_frames", "height", "width")[-len(size) :], size, strict=True):
            if name in call and call[name] != value:
                finding = f"is {quote(call[name])}, and the size of the pictures says {value}: leave it out"
                raise SpecError(finding, path=("model", "call", name))
            if name in known:
                call[name] = value
        call |= self.example_arguments(size)
        try:
            return observe(self.pipe, call, self.wanted)
        except SpecError as error:
            if "divisible" in error.finding and not self._searches:
                self._searches = True
                try:
                    hint = self._multiple(size)
                finally:
                    self._searches = False
                raise SpecError(f"{error.finding}: take a size that is {hint}", path=("data", "size")) from error
            argument = find_picture_argument(self.pipe, self.given)
            if argument is None or self.condition is not None or error.path != ("model", "call"):
                raise
            if self.added:
                finding = f"{type(self.pipe).__name__} may need a condition too, its argument '{argument}', and those of "
                hint = f"'conditions' go into '{self.added[0]}' of the pass: give it in 'call'"
                raise SpecError(f"{finding}{hint}; {error.finding}", path=("model", "call")) from error
            finding = f"{type(self.pipe).__name__} needs a condition beside the caption, its argument '{argument}': set "
            raise SpecError(f"{finding}'conditions' in the section data, a folder with pictures of the same names; "
                            f"{error.finding}", path=("data", "conditions")) from error  # fmt: skip

    def _check_latents(self, size: Size, call: DenoiserCall) -> None:
        """Raise SpecError for a size of which the VAE makes other latents than the pipeline decodes."""
        found = self._encoded_shape(size, call.observation)
        wanted = find_tensor([call.observation.to_decoder.like]).shape[1:]
        if found != wanted:
            height, width = size[-2:]
            finding = f"of {height}x{width} {call.observation.vae} makes latents of {[*found]}, and the pipeline decodes "
            raise SpecError(f"a picture {finding}{[*wanted]}: take a size that is {self._multiple(size)}",
                            path=("data", "size"))  # fmt: skip

    def _encoded_shape(self, size: Size, seen: Observation) -> torch.Size:
        empty = torch.zeros(1, 3, *size, device=self.device)
        return self.encode(empty, Draws(0, 0, device=self.device), seen).shape[1:]

    def _multiple(self, size: Size) -> str:
        """Say of what number sides must be multiples: the first power of two of which an odd multiple is drawn as it is."""
        for factor in (8, 16, 32, 64, 128):
            sides = [max(1, side // factor - (side // factor + 1) % 2) * factor for side in size[-2:]]
            try:
                seen = self._observation((*size[:-2], *sides))
                if self._encoded_shape((*size[:-2], *sides), seen) == find_tensor([seen.to_decoder.like]).shape[1:]:
                    return f"a multiple of {factor}, such as {sides[0]}x{sides[1]}"
            except SpecError:
                continue
        return "one that the pipeline takes"

    def encode(self, image: Tensor, draw: Any, seen: Observation) -> Tensor:
        """Return a sample of what the VAE makes of pictures, each encoded by itself.

        Args:
            image: Pictures [b, c, h, w] or videos [b, c, f, h, w] in [-1, 1].
            draw: What the sample comes from.
            seen: What is known of the pipeline.

        Returns:
            Latents as the VAE has them, float32; of one without a distribution what it makes.

        Raises:
            SpecError: It does not encode pictures of this size.
        """
        return draw_sample([self.encoders.latents(row[None], seen) for row in image], draw, self.device)
