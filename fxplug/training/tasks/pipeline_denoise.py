"""The task `denoise` on a stock pipeline of diffusers: all that is particular to its model is seen in the pipeline itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import SpecError, format_fields, prefix_path, quote
from ...core.ir.traced_module import TracedModule
from ...core.ir.variants import Variants
from ...core.spec.yaml_source import validate
from ...pipelines.denoiser_call import SampleCondition
from ...pipelines.observation import PROMPTS
from ...pipelines.recorded_run import get_components
from ..distributed import find_largest
from ..encoded_cache import EncodedCache
from ..image_encoding import check_still_readable, encode_batch, encode_images
from ..random_draws import Draws, preserve_random_state
from ..swapped_blocks import move_module
from ..task_section import DenoiseOptions
from ..train_section import Use, read_use
from ..trigger import replace_trigger, with_trigger
from .added_inputs import AddedInputs, take_samples
from .denoise import TESTED
from .fixed_draws import FixedDraws
from .losses import MSE, add_offset, compute_huber_delta, compute_losses, compute_mean, read_loss
from .noise import draw_positions, read_density
from .pipeline_conditions import Store, group
from .pipeline_encoders import Size, draw_sample, get_pictures, get_size, move_parts
from .pipeline_options import AS_SAMPLED, check_names
from .pipeline_samples import PipelineSamples, check_steps, make_prompt_arguments, make_sample_arguments
from .pipeline_text import TrainedText, apply_to_encoders, read_text
from .preservation import without_training
from .sized_parts import SizedPart, SizedParts
from .task import Batch, Task, TaskInfo, Totals, TrainedPart, take_rows
from .validation_prompts import join_pictures, list_forms, list_prompts, open_prompts


@dataclass(frozen=True)
class NoisyBatch:
    """Samples of a batch: their conditions, noisy latents, the steps of the noise, what is to be predicted, masks of the loss,
    and what passes take beside."""

    conditions: list[SampleCondition]
    noisy: Tensor
    index: Tensor
    target: Tensor
    mask: Batch
    added: dict[str, Tensor]

    __repr__ = format_fields

    def take(self, rows: list[int]) -> NoisyBatch:
        """Return some of the samples, in order."""
        mask = {name: value[rows] for name, value in self.mask.items()}
        own = [self.conditions[n] for n in rows]
        return NoisyBatch(own, self.noisy[rows], self.index[rows], self.target[rows], mask, take_samples(self.added, rows))


class PipelineDenoise(Task):
    """Trains the denoiser of a stock pipeline, or several, on pictures with captions, with no line about its model.

    What the pipeline does around its denoiser is found by running it (`observe`), and confirmed, before anything is trained:
    how pictures become latents, what the denoiser is given of them, how it is told the time, what the scheduler gets. The
    noise is that of the pipeline's scheduler, whose steps are proved to lead a denoiser without errors to the data.

    density is `uniform`, `logit_normal`, `mode`, or `as_sampled`: the amounts of noise that the pipeline itself has for
    pictures of this size. dropout, snr_gamma and weighting are those of `Denoise`, and so are samples and sample_steps; the
    pipeline draws them, with the arguments of `call`, and the scale of `guidance` where it is given.

    Of several denoisers each is trained in each step, on the same pictures and noise at its own times; the loss is the sum of
    theirs. So each learns what it would learn alone. Text encoders with passes, in `text`, train with them: captions are then
    encoded in each step.
    """

    reads = ("loss_scale", "cond_dropout", "loss_mask", "prior")

    def __init__(
        self,
        pipe: Any,
        call: Mapping[str, Any] | None = None,
        part: str | None = None,
        *,
        beside: Mapping[str, TracedModule] | None = None,
        text: Any = None,
        density: Any = "uniform",
        dropout: float = 0.0,
        snr_gamma: float | None = None,
        weighting: str = "none",
        loss: Any = "mse",
        noise_offset: float = 0.0,
        samples: int | list[str] = 8,
        prompts: str | list[Any] | None = None,
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
            beside: Further denoisers that train, rewritten, by their names in the pipeline.
            text: Text encoders of the pipeline that train, by name, each with `passes`, and `lr` and `weight_decay`.
            density: How often each amount of noise is drawn.
            dropout: The share of samples that are trained with the empty caption.
            snr_gamma: Min-SNR weights (arXiv 2303.09556); None has none.
            weighting: Weights of flow matching.
            loss: `mse`, `huber` or `smooth_l1`, with options.
            noise_offset: A number that a sample's noise has in all of a channel of what the VAE decodes, of this deviation.
            samples: How many pictures are drawn, or their captions.
            prompts: In their place prompts with seeds, sizes and guidance, or a file of them.
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
        check_names(others)
        given: dict[str, Any] = {"density": density, "dropout": dropout, "snr_gamma": snr_gamma, "weighting": weighting}
        given |= {"samples": samples, "prompts": prompts, "sample_steps": sample_steps, "negative": negative}
        given |= {"loss": loss, "noise_offset": noise_offset, "preserve": preserve, "preserve_weight": preserve_weight}
        validate(DenoiseOptions, {**given, **({} if guidance is None else {"guidance": guidance})})
        if isinstance(samples, list) and not all(isinstance(caption, str) for caption in samples):
            raise SpecError("must be captions: a pipeline is not called with labels", path=("samples",))
        self.pipe, self.given, self.wanted_part = pipe, dict(call or {}), part
        self.density = read_density(read_use(density), more=(AS_SAMPLED,))
        self.loss_kind, self.noise_offset = read_loss(read_use(loss)), noise_offset
        self.dropout, self.snr_gamma, self.weighting = dropout, snr_gamma, weighting
        self.wanted, self.sample_steps, self.guidance, self.negative = samples, sample_steps, guidance, negative
        self.store, self.open_latents, self.given_prompts = store, latents, prompts
        self.latents: EncodedCache | None = None
        self.preserve, self.preserve_weight, self.part, self.batch = preserve, preserve_weight, part or "", 2
        self.wanted_text = {} if text is None else read_text(pipe, text)
        self.beside = {name: TrainedPart(module) for name, module in (beside or {}).items()}
        self.trains = bool(self.beside or self.wanted_text)

    # --- what is seen before the training

    def setup(self, module: nn.Module, info: TaskInfo) -> None:
        self.info, self.device = info, info.device
        if not hasattr(self.pipe, "to") or not get_components(self.pipe):
            raise SpecError(f"must be a pipeline of diffusers, not {quote(self.pipe, 80)}", path=("model", "pipeline"))
        if self.pipe.device.type != info.device.type:
            move_parts(self.pipe, info.device, info.swap)
        self.beside = {name: part for name, part in self.beside.items() if not part.encodes}
        if self.beside and info.swap is not None:
            raise SpecError("is for one denoiser: name one in 'part'", path=("train", "blocks_to_swap"))
        for part in self.beside.values():
            move_module(part.module, info.device)
        example = info.examples(1) if info.examples is not None else {}
        known = list(info.sizes) or ([info.size] if all(info.size) else [])
        first = get_size(example) if example else ()
        sizes = dict.fromkeys([*([first] if first else []), *((*first[:-2], *size) for size in known)])
        if not sizes:
            raise SpecError("the size of the pictures is not known: set 'size'", path=("data", "size"))
        self.added = AddedInputs(module, info.device)
        self.added.check(example)
        self.sized = self._open_denoiser(self.wanted_part, example)
        self.size: Size = next(iter(sizes))
        make_sample_arguments(self.pipe, self.given, self.guidance, self.negative)  # an error before all else
        self.prompts, self.wanted = open_prompts(self.given_prompts, self.wanted, info.base)
        self.sized.of(self.size, check=True)
        self.part = self.sized.part
        others = {name: self._open_denoiser(name, example, self.sized) for name in self.beside}
        self.denoisers = {self.part: self.sized, **others}
        if self.part in self.beside:
            raise SpecError(f"'{self.part}' trains already: it cannot be beside itself", path=("model", "part"))
        modules = {self.part: module, **{name: part.module for name, part in self.beside.items()}}
        for name, denoiser in self.denoisers.items():
            for size in sizes:
                denoiser.of(size, check=name == self.part)
            if isinstance(one := modules[name], Variants):
                denoiser.trace_forms(one, sizes, self.batch, self.added)
        said = dict.fromkeys(denoiser.say_unreached() for denoiser in self.denoisers.values())
        self.unreached = "; ".join(filter(None, said))
        if self.preserve is None and self.preserve_weight != 1:
            raise SpecError("has no effect without 'preserve'", path=("preserve_weight",))
        if self.preserve is not None:
            with prefix_path("preserve"):
                if info.trigger is None:
                    raise SpecError("needs 'trigger' in the section data, the word that the class replaces")
                self.untrained = {name: without_training(one) for name, one in modules.items()}
        if self.wanted_text:
            self._open_text()
        noisy = {name: denoiser.of(self.size).call.observation.noisy for name, denoiser in self.denoisers.items()}
        self.sampler = PipelineSamples(self.pipe, self.part, self.sized.encoders, self.beside, noisy)
        if self.open_latents is not None:
            self.latents = self.open_latents(get_components(self.pipe)[self.sized.of(self.size).call.observation.vae])

    def _open_denoiser(self, part: str | None, example: Batch, first: SizedParts | None = None) -> SizedParts:
        weights = {"snr_gamma": self.snr_gamma, "weighting": self.weighting}
        as_sampled, common = self.density.name == AS_SAMPLED, (self.pipe, self.given, part, self.store, self.device)
        made = SizedParts(
            *common, as_sampled=as_sampled, first=first, swap=self.info.swap, **weights  # type: ignore[arg-type]
        )
        made.take_condition(example, self.added.names)
        return made

    def _open_text(self) -> None:
        """Rewrite the text encoders that train, and let them encode captions, with gradients that reach each of them."""
        for name, model in get_components(self.pipe).items():
            if isinstance(model, nn.Module) and name not in self.denoisers:  # gradients are for what passes add
                model.requires_grad_(requires_grad=False)
        one, size = self.sized.of(self.size), (self.size[-2], self.size[-1])
        parts = apply_to_encoders(self.pipe, self.given, size, self.wanted_text, self.info.base, self.info.seed)
        text = TrainedText(self.pipe, parts, self.device)
        text.check_gradients(one.call, {**one.stock.prompt(PROMPTS[0]), **self.sized.example_arguments(self.size)})
        self.beside = {**self.beside, **parts}
        for denoiser in self.denoisers.values():
            denoiser.take_text(text)

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

    def loss(self, module: nn.Module, batch: Batch, draw: Draws) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        image = get_pictures(batch)
        density = Use("uniform", {}) if self.density.name == AS_SAMPLED else self.density
        position = draw_positions(density, len(image), draw)
        own = batch.get("cond_dropout")
        dropout = self.dropout if own is None else torch.where(own.isnan(), self.dropout, own)
        preserve = self.preserve is not None
        if preserve and draw.world > 1:
            raise SpecError("is for one process", path=("train", "task", "denoise", "preserve"))
        modules = {self.part: module, **{name: part.runner for name, part in self.beside.items()}}
        losses = self._losses(modules, batch, draw, position, dropout, alike=draw.world > 1, preserve=preserve)
        means = {name: compute_mean(each, batch) for name, each in losses.items()}
        total = torch.stack([*means.values()]).sum() if len(means) > 1 else means[self.part]
        return (total, {f"loss_{name}": mean for name, mean in means.items()}) if len(means) > 1 else total

    @torch.no_grad()
    def test(self, module: nn.Module, batches: Iterable[Batch]) -> Totals:
        """Return the mean loss at fixed noise levels; each sample has its own noise, the same in every test."""
        total, count = 0.0, 0
        modules = {self.part: module, **{name: part.module.eval() for name, part in self.beside.items()}}
        for batch in batches:
            for place in TESTED:
                count_of_batch = len(get_pictures(batch))
                draw = FixedDraws({"index": torch.arange(count_of_batch), **batch}, self.device)
                position = torch.full((count_of_batch,), place, device=self.device)
                losses = self._losses(modules, batch, draw, position, 0.0, alike=not isinstance(module, TracedModule))
                total += sum(float(each.double().sum()) for each in losses.values())
                count += count_of_batch
        return {"loss": (total, count)}

    def _losses(
        self,
        modules: Mapping[str, nn.Module],
        batch: Batch,
        draw: Any,
        position: Tensor,
        dropout: float | Tensor,
        alike: bool,
        preserve: bool = False,
    ) -> dict[str, Tensor]:
        """Return the weighted loss of each sample, float32 [b], by denoiser; `alike` says that processes call the module
        equally often."""
        one, mask = self.sized.of(get_size(batch)), self._mask(batch)
        x = self._latents(batch, draw, one)
        noise = draw.like(x)
        if self.noise_offset:
            noise = one.call.as_latents(add_offset(one.call.as_decoded(noise), draw, self.noise_offset))
        dropped = draw.uniform(len(x)) < dropout
        losses, added = {}, self.added.of(batch)
        for name, denoiser in self.denoisers.items():
            one = denoiser.of(get_size(batch))
            steps = one.steps.to(position.device)
            index = steps[(position * len(steps)).long().clamp(0, len(steps) - 1)]
            if name == self.part:
                batch["timesteps"] = one.noise.time(index)
            noisy, target = one.noise.noisy(x, noise, index), one.noise.target(x, noise, index)
            conditions = one.conditions.of(batch, self._captions(batch, dropped))
            given = NoisyBatch(conditions, noisy, index, target, mask, added)
            found = self._compute_losses(modules[name], one, given, alike)
            kept = self.preserve_weight * self._preserved(modules[name], name, batch, noisy, index) if preserve else 0.0
            losses[name] = found * one.noise.weight(index) + kept
        return losses

    def _compute_losses(self, module: nn.Module, one: SizedPart, given: NoisyBatch, alike: bool) -> Tensor:
        """Return the loss of each sample, float32 [b]: those whose conditions have one form are in one call."""
        groups = group(given.conditions, alone=bool(one.call.batching.lists))
        if len(groups) == 1 and not alike:
            return self._compute_group(module, one, given)
        losses = torch.zeros(len(given.noisy), device=given.noisy.device)
        for number in range(find_largest(len(groups)) if alike else len(groups)):
            rows = groups[min(number, len(groups) - 1)]
            found = self._compute_group(module, one, given.take(rows))
            # a process with fewer groups than others calls the module as often
            losses = losses.index_add(0, torch.tensor(rows, device=losses.device), found * float(number < len(groups)))
        return losses

    def _preserved(self, module: nn.Module, name: str, batch: Batch, noisy: Tensor, index: Tensor) -> Tensor:
        """Return the squared distance of each sample's prediction, float32 [b], from that of the model without what trains, and
        with the class in the place of the trigger (ostris' ai-toolkit calls it differential output preservation)."""
        captions = [replace_trigger(text, str(self.info.trigger), str(self.preserve)) for text in batch["caption"]]
        one, added = self.denoisers[name].of(get_size(batch)), self.added.of(batch)
        conditions, stock = one.conditions.of(batch, captions), one.stock.of(batch, captions)
        kept = torch.zeros(len(noisy), device=noisy.device)
        for rows in group(conditions, alone=bool(one.call.batching.lists)):
            x, time, pictures = noisy[rows], one.noise.time(index[rows]), take_samples(added, rows)
            new = one.call.predictions(module(**one.call([conditions[n] for n in rows], x, time), **pictures), len(rows))
            with torch.no_grad():
                before = self.untrained[name](**one.call([stock[n] for n in rows], x, time), **pictures)
                old = one.call.predictions(before, len(rows))
            kept = kept.index_add(0, torch.tensor(rows, device=kept.device), compute_losses(new, old, {}, MSE))
        return kept

    def _compute_group(self, module: nn.Module, one: SizedPart, given: NoisyBatch) -> Tensor:
        """Return the loss of samples whose conditions have one form, float32 [n]."""
        call = {**one.call(given.conditions, given.noisy, one.noise.time(given.index)), **given.added}
        found = one.call.predictions(module(**call), len(given.noisy))
        delta, index, target = None, given.index, given.target
        if self.loss_kind.name != "mse":
            delta = compute_huber_delta(self.loss_kind, one.noise.share(index), one.noise.ratio(index))
        if "loss_mask" in given.mask:
            return compute_losses(one.call.as_decoded(found), one.call.as_decoded(target), given.mask, self.loss_kind, delta)
        return compute_losses(found, target.flatten(1), given.mask, self.loss_kind, delta)

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
            encoders.leave(self.part, *self.beside)
        try:
            yield
        finally:
            encoders.bring_back()

    def _encode_conditions(self, batch: Batch) -> None:
        """Encode the conditions that a sample, as a batch of one, may have in the training."""
        own = batch.get("cond_dropout")
        dropout = self.dropout if own is None else float(torch.where(own.isnan(), self.dropout, own).max())
        views = [batch]
        if "flipped" in batch and "condition" in batch:
            pictures = [key for key in ("image", "video", "condition") if key in batch]
            views.append({**batch, **{key: [image.mirrored() for image in batch[key]] for key in pictures}})
        parts = [denoiser.of(get_size(batch)) for denoiser in self.denoisers.values()]
        for view in [] if self.wanted_text else views:
            for dropped in (False, True) if dropout else (False,):
                for one in parts:
                    one.conditions.of(view, self._captions(view, torch.tensor([dropped])))

    # --- pictures

    def samples(self, module: nn.Module, draw: Draws | None = None) -> Tensor | None:
        """Draw what the option `samples` lists, by the pipeline with the module in it, always from the same noise."""
        batch = self._sample_batch()
        return self.draw(module, batch) if batch["caption"] else None

    def check_samples(self, module: nn.Module) -> bool:
        batch = self._sample_batch()
        prompts, calls = list_prompts(batch), self.sample_calls(batch)
        for row in list_forms(prompts) if calls else ():
            with prefix_path(*(("prompts", row, "size") if prompts[row].size else ())):
                self.draw(module, {key: value[row : row + 1] for key, value in batch.items()}, steps=2)
        seen = self.sized.of(self.size).call.observation
        for steps in {one.steps or self.sample_steps for one in prompts} - {2}:
            check_steps(self.pipe, seen.call, seen.part, steps)
        return bool(calls)

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
            Pictures float32 [n, c, h, w], or videos [n, f, c, h, w], in [0, 1]; smaller ones are padded to the largest.

        Raises:
            SpecError: The pipeline does not draw them.
        """
        added, calls = self.added.of(given), self.sample_calls(given)
        return join_pictures([
            self.sampler(module, arguments, steps=steps or one.steps or self.sample_steps,
                         seed=seed + number if one.seed is None else one.seed, added=take_samples(added, [number]))
            for number, (arguments, one) in enumerate(zip(calls, list_prompts(given), strict=True))
        ])  # fmt: skip

    def sample_calls(self, given: Batch) -> list[dict[str, Any]]:
        """Return the arguments of the pipeline for each sample of a batch."""
        one = self.sized.of(self.size)
        seen = one.call.observation
        size: dict[str, Any] = {name: seen.call[name] for name in ("height", "width", "num_frames") if name in seen.call}
        calls = []
        pictures = one.conditions.pictures(given, len(given["caption"]))
        for number, prompt in enumerate(list_prompts(given)):
            caption = given["caption"][number]
            with prefix_path("prompts", number):
                own = make_prompt_arguments(self.pipe, self.given, prompt, self.guidance, self.negative)
            call = {**size, **own, **one.conditions.picture_arguments(pictures[number])}
            if "prompt" in seen.call:
                call["prompt"] = self.info.prompt(caption)
            calls.append(call)
        return calls

    def last_sample(self) -> tuple[dict[str, Any], int, dict[str, Tensor]]:
        """Return the arguments and the seed of the last sample, also where none is drawn: then of the first of the data; and
        what passes take beside."""
        batch = self._sample_batch(at_least=1)
        last = {key: value[-1:] for key, value in batch.items()}
        seed = list_prompts(last)[0].seed
        return self.sample_calls(last)[0], len(batch["caption"]) - 1 if seed is None else seed, self.added.of(last)

    def _sample_batch(self, at_least: int = 0) -> Batch:
        """Return the batch for the samples: the listed captions, else those of the first of the data."""
        count = max(self.wanted if isinstance(self.wanted, int) else len(self.wanted), at_least)
        batch: Batch = self.info.examples(count) if self.info.examples is not None and count else {}
        if batch:
            batch = take_rows(batch, [row % len(get_pictures(batch)) for row in range(count)])
        if isinstance(self.wanted, list) and self.wanted:
            batch["caption"] = [with_trigger(caption, self.info.trigger) for caption in self.wanted]
        batch.setdefault("caption", [""] * count)
        return {**batch, "prompts": self.prompts} if self.prompts else batch
