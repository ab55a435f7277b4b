"""The task `denoise` on a stock pipeline of diffusers: all that is particular to its model is seen in the pipeline itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import SpecError, did_you_mean, prefix_path, quote
from ...core.ir.traced_module import TracedModule
from ...core.ir.variants import Variants, choose_module
from ...core.spec.yaml_source import validate
from ...pipelines.denoiser_call import SampleCondition
from ...pipelines.observation import PROMPTS
from ...pipelines.recorded_run import get_components
from ..distributed import find_largest
from ..encoded_cache import EncodedCache
from ..image_encoding import check_still_readable, encode_batch, encode_images
from ..random_draws import Draws, preserve_random_state
from ..task_section import DenoiseOptions
from ..train_section import Use, read_use
from ..trigger import replace_trigger, with_trigger
from .added_inputs import AddedInputs, take_samples
from .denoise import TESTED, FixedDraws, take_rows
from .losses import MSE, add_offset, compute_huber_delta, compute_losses, compute_mean, read_loss
from .noise import draw_positions, read_density
from .pipeline_conditions import Store, group
from .pipeline_encoders import Size, draw_sample, get_pictures, get_size
from .pipeline_samples import PipelineSamples, make_sample_arguments
from .preservation import without_training
from .sized_parts import SizedPart, SizedParts
from .task import Batch, Task, TaskInfo, Totals

AS_SAMPLED = "as_sampled"
# options of the task for other models, and where a pipeline has what they say
ELSEWHERE = {
    "scheduler": "the noise is that of the pipeline's own scheduler: change scheduler/scheduler_config.json in its folder",
    "prediction": "the pipeline's own scheduler says it: change prediction_type in scheduler/scheduler_config.json",
    "vae": "pictures are encoded by the pipeline's own VAE: change it in the pipeline's folder",
    "text": "captions are encoded by the pipeline's own text encoders: change them in the pipeline's folder",
    "call": "what the denoiser is called with is seen in the pipeline: its own arguments are set in model: {call: ...}",
    "null_label": "a pipeline is called with captions, and an empty one is that of a dropped caption: set 'dropout'",
    "time_scale": "how the time is given to the denoiser is seen in the pipeline",
    "train_guidance": "it is learnt with 'text' by a model without a pipeline: model: {diffusers: ...}",
}

class PipelineDenoise(Task):
    """Trains the denoiser of a stock pipeline on pictures with captions, with no line about its model.

    What the pipeline does around its denoiser is found by running it (`observe`), and confirmed, before anything is trained:
    how pictures become latents, what the denoiser is given of them, how it is told the time, what the scheduler gets. The
    noise is that of the pipeline's scheduler, whose steps are proved to lead a denoiser without errors to the data.

    density is `uniform`, `logit_normal`, `mode`, or `as_sampled`: the amounts of noise that the pipeline itself has for
    pictures of this size. dropout, snr_gamma and weighting are those of `Denoise`, and so are samples and sample_steps; the
    pipeline draws them, with the arguments of `call`, and the scale of `guidance` where it is given.
    """

    reads = ("loss_scale", "cond_dropout", "loss_mask", "prior")

    def __init__(
        self,
        pipe: Any,
        call: Mapping[str, Any] | None = None,
        part: str | None = None,
        *,
        density: Any = "uniform",
        dropout: float = 0.0,
        snr_gamma: float | None = None,
        weighting: str = "none",
        loss: Any = "mse",
        noise_offset: float = 0.0,
        samples: int | list[str] = 8,
        sample_steps: int = 20,
        guidance: float | None = None,
        negative: str = "",
        preserve: str | None = None,
        preserve_weight: float = 1.0,
        store: Store | None = None,
        latents: Callable[[nn.Module], EncodedCache | None] | None = None,
        **others: Any,
    ) -> None:
        """Take a pipeline and what it is called with.

        Args:
            pipe: The pipeline of diffusers. It stays as it is; its models are moved to the device of the run.
            call: Arguments of the pipeline's call that do not come from the data, such as `num_frames`.
            part: Which denoiser trains; None is the one that is called.
            density: How often each amount of noise is drawn.
            dropout: The share of samples that are trained with the empty caption.
            snr_gamma: Min-SNR weights (arXiv 2303.09556); None has none.
            weighting: Weights of flow matching.
            loss: `mse`, `huber` or `smooth_l1`, with options.
            noise_offset: A number that a sample's noise has in all of a channel of what the VAE decodes, of this deviation.
            samples: How many pictures are drawn, or their captions.
            sample_steps: Steps of a picture.
            guidance: The scale of guidance of pictures; None is that of the call.
            negative: The caption that guidance leads away from.
            preserve: A class: with it in the place of the trigger in captions, the model learns what it gave before.
            preserve_weight: The weight of that in the loss.
            store: Where encoded captions are kept beside the memory, which has 2 GiB of them; None is nowhere.
            latents: What opens the cache of what a VAE makes; None has none, and pictures are encoded in each step.
            **others: Options of `Denoise` that a pipeline does not have: an error says where each is set instead.

        Raises:
            SpecError: An option is wrong.
        """
        _check_options(others)
        given: dict[str, Any] = {"density": density, "dropout": dropout, "snr_gamma": snr_gamma, "weighting": weighting}
        given |= {"samples": samples, "sample_steps": sample_steps, "negative": negative}
        given |= {"loss": loss, "noise_offset": noise_offset, "preserve": preserve, "preserve_weight": preserve_weight}
        validate(DenoiseOptions, {**given, **({} if guidance is None else {"guidance": guidance})})
        if isinstance(samples, list) and not all(isinstance(caption, str) for caption in samples):
            raise SpecError("must be captions: a pipeline is not called with labels", path=("samples",))
        self.pipe, self.given, self.wanted_part = pipe, dict(call or {}), part
        self.density = read_density(read_use(density), more=(AS_SAMPLED,))
        self.loss_kind, self.noise_offset = read_loss(read_use(loss)), noise_offset
        self.dropout, self.snr_gamma, self.weighting = dropout, snr_gamma, weighting
        self.wanted, self.sample_steps, self.guidance, self.negative = samples, sample_steps, guidance, negative
        self.store, self.open_latents = store, latents
        self.latents: EncodedCache | None = None
        self.preserve, self.preserve_weight = preserve, preserve_weight
        self.part, self.batch = part or "", 2

    # --- what is seen before the training

    def setup(self, module: nn.Module, info: TaskInfo) -> None:
        self.info, self.device = info, info.device
        if not hasattr(self.pipe, "to") or not get_components(self.pipe):
            raise SpecError(f"must be a pipeline of diffusers, not {quote(self.pipe, 80)}", path=("model", "pipeline"))
        if self.pipe.device.type != info.device.type:
            self.pipe.to(info.device)
        example = info.examples(1) if info.examples is not None else {}
        known = list(info.sizes) or ([info.size] if all(info.size) else [])
        first = get_size(example) if example else ()
        sizes = dict.fromkeys([*([first] if first else []), *((*first[:-2], *size) for size in known)])
        if not sizes:
            raise SpecError("the size of the pictures is not known: set 'size'", path=("data", "size"))
        weights = {"snr_gamma": self.snr_gamma, "weighting": self.weighting}
        as_sampled = self.density.name == AS_SAMPLED
        self.sized = SizedParts(
            self.pipe, self.given, self.wanted_part, self.store, self.device, as_sampled=as_sampled, **weights
        )
        self.added = AddedInputs(module, info.device)
        self.added.check(example)
        self.sized.take_condition(example, self.added.names)
        self.size: Size = next(iter(sizes))
        self.sample_call = make_sample_arguments(self.pipe, self.given, self.guidance, self.negative)
        for size in sizes:
            self.sized.of(size, check=True)
            self.part = self.sized.part
            if isinstance(module, Variants):
                self._trace_form(module, size)
        if self.preserve is None and self.preserve_weight != 1:
            raise SpecError("has no effect without 'preserve'", path=("preserve_weight",))
        if self.preserve is not None:
            with prefix_path("preserve"):
                if info.trigger is None:
                    raise SpecError("needs 'trigger' in the section data, the word in whose place the class stands")
                self.untrained = without_training(module)
        noisy = self.sized.of(self.size).call.observation.noisy
        self.sampler = PipelineSamples(self.pipe, self.part, self.sized.encoders, noisy)
        if self.open_latents is not None:
            self.latents = self.open_latents(get_components(self.pipe)[self.sized.of(self.size).call.observation.vae])

    def _trace_form(self, module: Variants, size: Size) -> None:
        """Let a module that takes several forms of call have that of the training, of this size."""
        one = self.sized.of(size)
        condition = one.conditions.one(PROMPTS[0], self.sized.example_arguments(size))
        for count in dict.fromkeys((self.batch, 1)) if one.call.batching.lists else (self.batch,):
            x = torch.zeros(count, *one.call.shape, device=self.device)
            time = one.noise.time(one.steps[:1].expand(count)).to(self.device)
            choose_module(module, (), {**one.call([condition] * count, x, time), **self.added.example(count, size)})

    def check_batch(self, size: int) -> None:
        self.batch = max(self.batch, size)

    # --- training

    @property
    def caption_dropout(self) -> float:
        return self.dropout

    def set_caption_dropout(self, share: float) -> None:
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise SpecError(f"conditional_dropout must be from 0 to 1, not {quote(share)}")
        self.dropout = float(share)

    def parts(self) -> dict[str, Any]:
        found = get_components(self.pipe)
        names = ("scheduler", "vae", "text_encoder", "tokenizer")
        return {name: found[name] for name in names if found.get(name) is not None}

    def loss(self, module: nn.Module, batch: Batch, draw: Draws) -> Tensor:
        image = get_pictures(batch)
        density = Use("uniform", {}) if self.density.name == AS_SAMPLED else self.density
        position = draw_positions(density, len(image), draw)
        own = batch.get("cond_dropout")
        dropout = self.dropout if own is None else torch.where(own.isnan(), self.dropout, own)
        preserve = self.preserve is not None
        if preserve and draw.world > 1:
            raise SpecError("is for one process", path=("train", "task", "denoise", "preserve"))
        losses = self._losses(module, batch, draw, position, dropout, alike=draw.world > 1, preserve=preserve)
        return compute_mean(losses, batch)

    @torch.no_grad()
    def test(self, module: nn.Module, batches: Iterable[Batch]) -> Totals:
        """Return the mean loss at fixed noise levels; each sample has its own noise, the same in every test."""
        total, count = 0.0, 0
        for batch in batches:
            for place in TESTED:
                count_of_batch = len(get_pictures(batch))
                draw = FixedDraws({"index": torch.arange(count_of_batch), **batch}, self.device)
                position = torch.full((count_of_batch,), place, device=self.device)
                losses = self._losses(module, batch, draw, position, 0.0, alike=not isinstance(module, TracedModule))
                total, count = total + float(losses.double().sum()), count + len(losses)
        return {"loss": (total, count)}

    def _losses(
        self,
        module: nn.Module,
        batch: Batch,
        draw: Any,
        position: Tensor,
        dropout: float | Tensor,
        alike: bool,
        preserve: bool = False,
    ) -> Tensor:
        """Return the weighted loss of each sample, float32 [b]; `alike` says that processes call the module equally often."""
        one = self.sized.of(get_size(batch))
        mask = self._mask(batch)
        x = self._latents(batch, draw, one)
        noise = draw.like(x)
        if self.noise_offset:
            noise = one.call.as_latents(add_offset(one.call.as_decoded(noise), draw, self.noise_offset))
        steps = one.steps.to(position.device)
        index = steps[(position * len(steps)).long().clamp(0, len(steps) - 1)]
        dropped = draw.uniform(len(x)) < dropout
        batch["timesteps"] = one.noise.time(index)
        noisy, target = one.noise.noisy(x, noise, index), one.noise.target(x, noise, index)
        conditions = one.conditions.of(batch, self._captions(batch, dropped))
        added = self.added.of(batch)
        groups = group(conditions, alone=bool(one.call.batching.lists))
        if len(groups) == 1 and not alike:
            losses = self._of_group(module, one, conditions, noisy, index, target, mask, added)
        else:
            losses = torch.zeros(len(x), device=x.device)
            for number in range(find_largest(len(groups)) if alike else len(groups)):
                rows = groups[min(number, len(groups) - 1)]
                part = {name: value[rows] for name, value in mask.items()}
                own = [conditions[n] for n in rows]
                pictures = take_samples(added, rows)
                found = self._of_group(module, one, own, noisy[rows], index[rows], target[rows], part, pictures)
                # a process with fewer groups than others calls the module as often
                losses = losses.index_add(0, torch.tensor(rows, device=x.device), found * float(number < len(groups)))
        losses = losses * one.noise.weight(index)
        return losses + self.preserve_weight * self._preserved(module, one, batch, noisy, index) if preserve else losses

    def _preserved(self, module: nn.Module, one: SizedPart, batch: Batch, noisy: Tensor, index: Tensor) -> Tensor:
        """Return the squared distance of each sample's prediction, float32 [b], from that of the model without what trains, and
        with the class in the place of the trigger (ostris' ai-toolkit calls it differential output preservation)."""
        captions = [replace_trigger(text, str(self.info.trigger), str(self.preserve)) for text in batch["caption"]]
        conditions, added = one.conditions.of(batch, captions), self.added.of(batch)
        kept = torch.zeros(len(noisy), device=noisy.device)
        for rows in group(conditions, alone=bool(one.call.batching.lists)):
            call = one.call([conditions[n] for n in rows], noisy[rows], one.noise.time(index[rows]))
            call |= take_samples(added, rows)
            new = one.call.predictions(module(**call), len(rows))
            with torch.no_grad():
                before = one.call.predictions(self.untrained(**call), len(rows))
            kept = kept.index_add(0, torch.tensor(rows, device=kept.device), compute_losses(new, before, {}, MSE))
        return kept

    def _of_group(
        self,
        module: nn.Module,
        one: SizedPart,
        conditions: list[SampleCondition],
        noisy: Tensor,
        index: Tensor,
        target: Tensor,
        batch: Batch,
        added: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the loss of samples whose conditions have one form, float32 [n]; `added` has what passes take beside."""
        call = {**one.call(conditions, noisy, one.noise.time(index)), **(added or {})}
        found = one.call.predictions(module(**call), len(noisy))
        delta = None
        if self.loss_kind.name != "mse":
            delta = compute_huber_delta(self.loss_kind, one.noise.share(index), one.noise.ratio(index))
        if "loss_mask" in batch:
            return compute_losses(one.call.as_decoded(found), one.call.as_decoded(target), batch, self.loss_kind, delta)
        return compute_losses(found, target.flatten(1), batch, self.loss_kind, delta)

    def _captions(self, batch: Batch, dropped: Tensor) -> list[str]:
        """Return the captions of a batch, empty where they are dropped; all are without captions in the data."""
        captions = batch.get("caption") or [""] * len(dropped)
        return ["" if out else str(text) for text, out in zip(captions, dropped.tolist(), strict=True)]

    def _latents(self, batch: Batch, draw: Any, one: SizedPart) -> Tensor:
        """Return the scheduler's latents of the pictures of a batch, float32."""
        rows = encode_batch(batch, self.latents, functools.partial(self.sized.encoders.latents, seen=one.call.observation))
        return one.call.latents(draw_sample(rows, draw, self.device))

    def _mask(self, batch: Batch) -> Batch:
        """Return the masks of a batch as `loss_mask`, float32 [b, 1, h, w] in [0, 1]; nothing without masks."""
        masks = batch.get("loss_mask")
        if masks is None or isinstance(masks, Tensor):
            return {} if masks is None else {"loss_mask": masks}
        with check_still_readable():
            return {"loss_mask": torch.stack([mask.read() for mask in masks]).to(self.device)}

    # --- what is encoded before the training

    @contextlib.contextmanager
    def prepared(self, data: Any, tests: Any, quiet: bool) -> Iterator[None]:
        """Encode pictures and captions of the loaders into the caches, before the steps; what encodes them is then on the CPU
        until something is to be encoded or drawn.

        Args:
            data: The loader of the training data.
            tests: That of the test data; None without.
            quiet: Whether nothing is printed.

        Yields:
            Nothing.

        Raises:
            TrainError: More samples cannot be read than `max_corrupt` says.
        """
        seen, encoders = self.sized.of(self.size).call.observation, self.sized.encoders
        encode = functools.partial(encoders.latents, seen=seen)
        with preserve_random_state():
            whole = [encode_images(loader, self.latents, encode, each=self._encode_conditions, quiet=quiet)
                     for loader in (data, tests) if loader is not None]  # fmt: skip
        if all(whole) and self.latents is not None and self.latents.writable:
            encoders.leave(seen.part)
        try:
            yield
        finally:
            encoders.bring_back()

    def _encode_conditions(self, batch: Batch) -> None:
        """Encode the conditions that a sample, as a batch of one, may have in the training."""
        one, own = self.sized.of(get_size(batch)), batch.get("cond_dropout")
        dropout = self.dropout if own is None else float(torch.where(own.isnan(), self.dropout, own).max())
        views = [batch]
        if "flipped" in batch and "condition" in batch:
            pictures = [key for key in ("image", "video", "condition") if key in batch]
            views.append({**batch, **{key: [image.mirrored() for image in batch[key]] for key in pictures}})
        for view in views:
            for dropped in (False, True) if dropout else (False,):
                one.conditions.of(view, self._captions(view, torch.tensor([dropped])))

    # --- pictures

    def samples(self, module: nn.Module, draw: Draws | None = None) -> Tensor | None:
        """Draw what the option `samples` lists, by the pipeline with the module in it, always from the same noise."""
        batch = self._sample_batch()
        return self.draw(module, batch) if batch["caption"] else None

    def check_samples(self, module: nn.Module) -> bool:
        batch = self._sample_batch()
        if batch["caption"]:
            few = {key: value[:1] for key, value in batch.items()}
            self.draw(module, few, steps=2)
            if self.sample_steps != 2:
                self._check_steps()
        return bool(batch["caption"])

    def _check_steps(self) -> None:
        """Raise SpecError for a number of steps that the pipeline does not take."""
        from ...pipelines.observation import call_pipeline

        seen = self.sized.of(self.size).call.observation
        try:
            call_pipeline(self.pipe, seen.call, steps=self.sample_steps, first_call=seen.part)
        except SpecError as error:
            raise SpecError(f"the pipeline does not take {self.sample_steps} steps: {error.finding}",
                            path=("sample_steps",)) from error  # fmt: skip

    def beside_samples(self) -> tuple[Tensor | None, list[str]]:
        batch = self._sample_batch()
        image = batch.get("image", batch.get("video"))
        if image is not None and image.dim() == 5:
            image = image[:, :, 0]
        return None if image is None else (image.float() / 2 + 0.5).clamp(0, 1), batch["caption"]

    @torch.no_grad()
    def draw(self, module: nn.Module, given: Batch, *, steps: int | None = None, seed: int = 0) -> Tensor:
        """Draw by the pipeline with a module in its denoiser's place.

        Args:
            module: What stands for the denoiser.
            given: Captions, `caption`, and pictures beside them, `condition`, where the pipeline or a pass takes them.
            steps: The number of steps; None is that of the task.
            seed: The seed of the first sample's noise; the others have the following ones.

        Returns:
            Pictures float32 [n, c, h, w], or videos [n, f, c, h, w], in [0, 1].

        Raises:
            SpecError: The pipeline does not draw them.
        """
        added = self.added.of(given)
        return torch.stack([
            self.sampler(module, arguments, steps=steps or self.sample_steps, seed=seed + number,
                         added=take_samples(added, [number]))
            for number, arguments in enumerate(self.sample_calls(given))
        ])  # fmt: skip

    def sample_calls(self, given: Batch) -> list[dict[str, Any]]:
        """Return the arguments of the pipeline for each sample of a batch."""
        one = self.sized.of(self.size)
        seen = one.call.observation
        size: dict[str, Any] = {name: seen.call[name] for name in ("height", "width", "num_frames") if name in seen.call}
        calls = []
        for caption, pictures in zip(given["caption"], one.conditions.pictures(given, len(given["caption"])), strict=True):
            call = {**size, **self.sample_call, **one.conditions.picture_arguments(pictures)}
            if "prompt" in seen.call:
                call["prompt"] = self.info.prompt(caption)
            calls.append(call)
        return calls

    def last_sample(self) -> tuple[dict[str, Any], int, dict[str, Tensor]]:
        """Return the arguments and the seed of the last sample, also where none is drawn: then of the first of the data; and
        what passes take beside."""
        batch = self._sample_batch(at_least=1)
        last = {key: value[-1:] for key, value in batch.items()}
        return self.sample_calls(last)[0], len(batch["caption"]) - 1, self.added.of(last)

    def _sample_batch(self, at_least: int = 0) -> Batch:
        """Return the batch for the samples: the listed captions, else those of the first of the data."""
        count = max(self.wanted if isinstance(self.wanted, int) else len(self.wanted), at_least)
        batch: Batch = self.info.examples(count) if self.info.examples is not None and count else {}
        if batch:
            batch = take_rows(batch, [row % len(get_pictures(batch)) for row in range(count)])
        if isinstance(self.wanted, list) and self.wanted:
            batch["caption"] = [with_trigger(caption, self.info.trigger) for caption in self.wanted]
        batch.setdefault("caption", [""] * count)
        return batch


def check_options(use: Use) -> None:
    """Check the options of a task `denoise` for a pipeline, as far as that goes without one.

    Args:
        use: The task with its options.

    Raises:
        SpecError: There is an option that a pipeline does not have; it says where that is set instead.
    """
    with prefix_path("train", "task", use.name):
        _check_options(use.options, DenoiseOptions.model_fields)


def _check_options(options: Mapping[str, Any], known: Collection[str] = ()) -> None:
    for name in options:
        if name in ELSEWHERE:
            raise SpecError(f"is not an option of denoise on a pipeline: {ELSEWHERE[name]}", path=(name,))
        if name not in known:
            there = [key for key in DenoiseOptions.model_fields if key not in ELSEWHERE]
            finding = f"denoise has no option '{name}'{did_you_mean(name, there)}; it has {', '.join(there)}"
            raise SpecError(finding, path=(name,))


def make_pipeline_task(
    pipe: Any, call: Mapping[str, Any] | None, part: str | None, use: Use, **caches: Any
) -> PipelineDenoise:
    """Make the task of a configuration whose model is a pipeline's.

    Args:
        pipe: The pipeline.
        call: The arguments of the section model.
        part: The denoiser.
        use: The task with its options.
        **caches: `store` and `latents` of `PipelineDenoise`.

    Returns:
        The task.

    Raises:
        SpecError: An option is wrong.
    """
    with prefix_path("train", "task", use.name):
        return PipelineDenoise(pipe, call, part, **caches, **use.options)
