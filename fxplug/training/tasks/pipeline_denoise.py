"""The task `denoise` on a stock pipeline of diffusers: all that is particular to its model is seen in the pipeline itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import SpecError, below, brief_fields, did_you_mean, first_line, shown
from ...core.ir.traced_module import TracedModule
from ...core.ir.variants import Variants, module_for
from ...core.spec.task_section import DenoiseOptions
from ...core.spec.train_section import Use, read_use
from ...core.spec.yaml_source import validate
from ...pipelines.denoiser_call import Condition, DenoiserCall, denoiser_call
from ...pipelines.observation import PROMPTS, Observation, confirm, observe
from ...pipelines.recorded_run import arguments_of, components_of
from ..distributed import most_of_all
from ..random_draws import Draws
from .denoise import TESTED, FixedDraws, rows_of
from .model_call import first_tensor, image_of
from .noise import Diffusion, Flow, positions, read_density
from .pipeline_conditions import Conditions, MemoryStore, Store, as_pictures, grouped, picture_argument, picture_arguments
from .pipeline_noise import check_scheduler, open_scheduler, steps_of_part, take_sampled
from .pipeline_samples import PipelineSamples, sample_arguments
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
    "time_scale": "how the denoiser is told the time is seen in the pipeline",
    "train_guidance": "it is learnt with 'text' by a model without a pipeline: model: {diffusers: ...}",
}
Size = tuple[int, ...]  # height and width; frames, height and width of videos


@dataclass(frozen=True)
class SizedPart:
    """A denoiser as it is trained on pictures of one size: its call, its samples' conditions, its noise, and which `steps`
    of it."""

    call: DenoiserCall
    conditions: Conditions
    noise: Diffusion | Flow
    steps: Tensor

    __repr__ = brief_fields


class PipelineDenoise(Task):
    """Trains the denoiser of a stock pipeline on pictures with captions, with no line about its model.

    What the pipeline does around its denoiser is found by running it (`observe`), and confirmed, before anything is trained:
    how pictures become latents, what the denoiser is given of them, how it is told the time, what the scheduler gets. The
    noise is that of the pipeline's scheduler, whose steps are proved to lead a denoiser without errors to the data.

    density is `uniform`, `logit_normal`, `mode`, or `as_sampled`: the amounts of noise that the pipeline itself has for
    pictures of this size. dropout, snr_gamma and weighting are those of `Denoise`, and so are samples and sample_steps; the
    pipeline draws them, with the arguments of `call`, and the scale of `guidance` where it is given.
    """

    reads = ("loss_scale", "cond_dropout")

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
        samples: int | list[str] = 8,
        sample_steps: int = 20,
        guidance: float | None = None,
        negative: str = "",
        store: Store | None = None,
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
            samples: How many pictures are drawn, or their captions.
            sample_steps: Steps of a picture.
            guidance: The scale of guidance of pictures; None is that of the call.
            negative: The caption that guidance leads away from.
            store: Where encoded captions are kept; None is in memory, up to 2 GiB.
            **others: Options of `Denoise` that a pipeline does not have: an error says where each is set instead.

        Raises:
            SpecError: An option is wrong.
        """
        _check_options(others)
        given: dict[str, Any] = {"density": density, "dropout": dropout, "snr_gamma": snr_gamma, "weighting": weighting}
        given |= {"samples": samples, "sample_steps": sample_steps, "negative": negative}
        validate(DenoiseOptions, {**given, **({} if guidance is None else {"guidance": guidance})})
        if isinstance(samples, list) and not all(isinstance(caption, str) for caption in samples):
            raise SpecError("must be captions: a pipeline is not called with labels", path=("samples",))
        self.pipe, self.given, self.wanted_part = pipe, dict(call or {}), part
        self.density = read_density(read_use(density), more=(AS_SAMPLED,))
        self.dropout, self.snr_gamma, self.weighting = dropout, snr_gamma, weighting
        self.wanted, self.sample_steps, self.guidance, self.negative = samples, sample_steps, guidance, negative
        self.store: Store = store or MemoryStore()
        self.sized: dict[Size, SizedPart] = {}
        self.part, self.batch = part or "", 2
        self.within = False  # a search for a size that is drawn

    # --- what is seen before the training

    def setup(self, module: nn.Module, info: TaskInfo) -> None:
        self.info, self.device = info, info.device
        if not hasattr(self.pipe, "to") or not components_of(self.pipe):
            raise SpecError(f"must be a pipeline of diffusers, not {shown(self.pipe, 80)}", path=("model", "pipeline"))
        if self.pipe.device.type != info.device.type:
            self.pipe.to(info.device)
        example = info.examples(1) if info.examples is not None else {}
        known = list(info.sizes) or ([info.size] if all(info.size) else [])
        first = image_of(example).shape[2:] if example else ()
        sizes = dict.fromkeys(tuple(size) for size in ([tuple(first)] if first else []) + known)
        if not sizes:
            raise SpecError("the size of the pictures is not known: set 'size'", path=("data", "size"))
        self.condition = self._condition_argument(example)
        self.size: Size = next(iter(sizes))
        self.sample_call = sample_arguments(self.pipe, self.given, self.guidance, self.negative)
        self.sized.clear()
        for size in sizes:
            self._sized(size, check=True)
            if isinstance(module, Variants):
                self._trace_form(module, size)
        self.sampler = PipelineSamples(self.pipe, self.part)

    def _trace_form(self, module: Variants, size: Size) -> None:
        """Let a module that takes several forms of call have that of the training, of this size."""
        one = self.sized[size]
        condition = one.conditions.one(PROMPTS[0], self._example_arguments(size))
        for count in dict.fromkeys((self.batch, 1)) if one.call.batching.lists else (self.batch,):
            x = torch.zeros(count, *one.call.shape, device=self.device)
            time = one.noise.time(one.steps[:1].expand(count)).to(self.device)
            module_for(module, (), one.call([condition] * count, x, time))

    def check_batch(self, size: int) -> None:
        self.batch = max(self.batch, size)

    def _condition_argument(self, example: Batch) -> str | None:
        """Return the argument for the pictures beside captions, where the data have such. Raises SpecError without one."""
        argument = picture_argument(self.pipe, self.given)
        if "condition" not in example:
            return None
        if argument is None:
            kind = type(self.pipe).__name__
            finding = f"has no effect: {kind} takes no picture as a condition beside the caption"
            raise SpecError(f"{finding}, or 'call' gives it already", path=("data", "conditions"))
        return argument

    def _example_arguments(self, size: Size, seed: int = 0) -> dict[str, Any]:
        """Return a picture of random colours as the condition, for a pipeline that gets one."""
        if self.condition is None:
            return {}
        generator = torch.Generator().manual_seed(seed)
        picture, own = as_pictures(torch.rand(2, 3, *size[-2:], generator=generator))
        return picture_arguments(self.condition, picture, own)

    def _sized(self, size: Size, check: bool = False) -> SizedPart:
        """Return the denoiser for pictures of a size, observed and confirmed when the first ones come."""
        if size in self.sized:
            return self.sized[size]
        with torch.autocast(self.device.type, enabled=False):
            seen = self._observation(size)
            calls = tuple({**seen.call, **({"prompt": prompt} if "prompt" in seen.call else {}),
                           **self._example_arguments(size, seed)} for seed, prompt in enumerate(PROMPTS))  # fmt: skip
            confirm(self.pipe, seen, (calls[0], calls[1]))
            call = denoiser_call(self.pipe, seen, self.device, **self._example_arguments(size))
            noise = open_scheduler(components_of(self.pipe)["scheduler"], snr_gamma=self.snr_gamma, weighting=self.weighting)
            if check:
                check_scheduler(self.pipe, seen, noise)
            steps = steps_of_part(noise, self.pipe, seen)
            if self.density.name == AS_SAMPLED:
                sampled = take_sampled(noise, self.pipe, seen)
                steps = steps_of_part(noise, self.pipe, seen) if seen.others else sampled
            self.part = seen.part
            self._check_latents(size, call)
        made = SizedPart(call, Conditions(self.pipe, call, self.condition, self.store, self.device), noise, steps.cpu())
        self.sized[size] = made
        return made

    def _observation(self, size: Size) -> Observation:
        """Observe the pipeline for pictures of a size. Raises SpecError, of a condition where one is lacking."""
        known, call = arguments_of(self.pipe), dict(self.given)
        for name, value in zip(("num_frames", "height", "width")[-len(size) :], size, strict=True):
            if name in call and call[name] != value:
                finding = f"is {shown(call[name])}, and the size of the pictures says {value}: leave it out"
                raise SpecError(finding, path=("model", "call", name))
            if name in known:
                call[name] = value
        call |= self._example_arguments(size)
        try:
            return observe(self.pipe, call, self.wanted_part)
        except SpecError as error:
            if "divisible" in error.finding and not self.within:
                self.within = True
                try:
                    hint = self._multiple(size)
                finally:
                    self.within = False
                raise SpecError(f"{error.finding}: take a size that is {hint}", path=("data", "size")) from error
            argument = picture_argument(self.pipe, self.given)
            if argument is None or self.condition is not None or error.path != ("model", "call"):
                raise
            finding = f"{type(self.pipe).__name__} needs a condition beside the caption, its argument '{argument}': set "
            raise SpecError(f"{finding}'conditions' in the section data, a folder with pictures of the same names; "
                            f"{error.finding}", path=("data", "conditions")) from error  # fmt: skip

    def _check_latents(self, size: Size, call: DenoiserCall) -> None:
        """Raise SpecError for a size of which the VAE makes other latents than the pipeline decodes."""
        found = self._encoded_shape(size, call.observation)
        wanted = first_tensor([call.observation.to_decoder.like]).shape[1:]
        if found != wanted:
            height, width = size[-2:]
            finding = f"of {height}x{width} {call.observation.vae} makes latents of {[*found]}, and the pipeline decodes "
            raise SpecError(f"a picture {finding}{[*wanted]}: take a size that is {self._multiple(size)}",
                            path=("data", "size"))  # fmt: skip

    def _encoded_shape(self, size: Size, seen: Observation) -> torch.Size:
        empty = torch.zeros(1, 3, *size, device=self.device)
        return self._encode(empty, Draws(0, 0, device=self.device), seen).shape[1:]

    def _multiple(self, size: Size) -> str:
        """Say of what number sides must be multiples: the first power of two of which an odd multiple is drawn as it is."""
        for factor in (8, 16, 32, 64, 128):
            sides = [max(1, side // factor - (side // factor + 1) % 2) * factor for side in size[-2:]]
            try:
                seen = self._observation((*size[:-2], *sides))
                if self._encoded_shape((*size[:-2], *sides), seen) == first_tensor([seen.to_decoder.like]).shape[1:]:
                    return f"a multiple of {factor}, such as {sides[0]}x{sides[1]}"
            except SpecError:
                continue
        return "a multiple of what the pipeline says"

    # --- training

    @property
    def caption_dropout(self) -> float:
        return self.dropout

    def set_caption_dropout(self, share: float) -> None:
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise SpecError(f"conditional_dropout must be from 0 to 1, not {shown(share)}")
        self.dropout = float(share)

    def parts(self) -> dict[str, Any]:
        found = components_of(self.pipe)
        names = ("scheduler", "vae", "text_encoder", "tokenizer")
        return {name: found[name] for name in names if found.get(name) is not None}

    def loss(self, module: nn.Module, batch: Batch, draw: Draws) -> Tensor:
        image = image_of(batch)
        density = Use("uniform", {}) if self.density.name == AS_SAMPLED else self.density
        position = positions(density, len(image), draw)
        own = batch.get("cond_dropout")
        dropout = self.dropout if own is None else torch.where(own.isnan(), self.dropout, own)
        losses = self._losses(module, batch, draw, position, dropout, alike=draw.world > 1)
        return (losses * batch["loss_scale"] if "loss_scale" in batch else losses).mean()

    @torch.no_grad()
    def test(self, module: nn.Module, batches: Iterable[Batch]) -> Totals:
        """Return the mean loss at fixed noise levels; each sample has its own noise, the same in every test."""
        total, count = 0.0, 0
        for batch in batches:
            for place in TESTED:
                draw = FixedDraws(batch, self.device)
                position = torch.full((len(image_of(batch)),), place, device=self.device)
                losses = self._losses(module, batch, draw, position, 0.0, alike=not isinstance(module, TracedModule))
                total, count = total + float(losses.double().sum()), count + len(losses)
        return {"loss": (total, count)}

    def _losses(
        self, module: nn.Module, batch: Batch, draw: Any, position: Tensor, dropout: float | Tensor, alike: bool
    ) -> Tensor:
        """Return the weighted loss of each sample, float32 [b]; `alike` says that processes call the module equally often."""
        image = image_of(batch)
        one = self._sized(tuple(image.shape[2:]))
        x = self._latents(batch, draw, one)
        noise = draw.like(x)
        steps = one.steps.to(position.device)
        index = steps[(position * len(steps)).long().clamp(0, len(steps) - 1)]
        dropped = draw.uniform(len(x)) < dropout
        time = batch["timesteps"] = one.noise.time(index)
        noisy, target = one.noise.noisy(x, noise, index), one.noise.target(x, noise, index)
        conditions = one.conditions.of(batch, self._captions(batch, dropped))
        groups = grouped(conditions, alone=bool(one.call.batching.lists))
        if len(groups) == 1 and not alike:
            losses = self._of_group(module, one, conditions, noisy, time, target)
        else:
            losses = torch.zeros(len(x), device=x.device)
            for number in range(most_of_all(len(groups)) if alike else len(groups)):
                rows = groups[min(number, len(groups) - 1)]
                found = self._of_group(module, one, [conditions[n] for n in rows], noisy[rows], time[rows], target[rows])
                # a process with fewer groups than others calls the module as often
                losses = losses.index_add(0, torch.tensor(rows, device=x.device), found * float(number < len(groups)))
        return losses * one.noise.weight(index)

    def _of_group(
        self, module: nn.Module, one: SizedPart, conditions: list[Condition], noisy: Tensor, time: Tensor, target: Tensor
    ) -> Tensor:
        """Return the loss of samples whose conditions have one form, float32 [n]."""
        found = one.call.predictions(module(**one.call(conditions, noisy, time)), len(noisy))
        return (found.float() - target.float().flatten(1)).square().mean(1)

    def _captions(self, batch: Batch, dropped: Tensor) -> list[str]:
        """Return the captions of a batch, empty where they are dropped; all are without captions in the data."""
        captions = batch.get("caption") or [""] * len(dropped)
        return ["" if out else str(text) for text, out in zip(captions, dropped.tolist(), strict=True)]

    def _latents(self, batch: Batch, draw: Any, one: SizedPart) -> Tensor:
        """Return the scheduler's latents of the pictures of a batch, float32."""
        return one.call.latents(self._encode(image_of(batch), draw, one.call.observation))

    @torch.no_grad()
    def _encode(self, image: Tensor, draw: Any, seen: Observation) -> Tensor:
        """Return a sample of what the VAE makes of pictures, float32; of one without a distribution what it makes."""
        vae = components_of(self.pipe)[seen.vae]
        frames = first_tensor([seen.to_decoder.like]).dim() == 5
        dtype = next((p.dtype for p in vae.parameters()), torch.float32)
        with torch.autocast(image.device.type, enabled=False):
            try:
                found = vae.encode((image[:, :, None] if frames and image.dim() == 4 else image).to(dtype))
            except RuntimeError as error:
                sides = "x".join(str(side) for side in image.shape[2:])
                raise SpecError(f"{seen.vae} does not encode pictures of {sides}: {first_line(error)}",
                                path=("data", "size")) from error  # fmt: skip
            inside = getattr(found, "latent_dist", found)
            if hasattr(inside, "mean") and hasattr(inside, "std") and not isinstance(inside, Tensor):
                drawn: Tensor = inside.mean + inside.std * draw.like(inside.mean)
                return drawn.float()
            return first_tensor(inside).float()

    def encode_all(self, loader: Any) -> int:
        """Encode the captions and conditions of one epoch of a loader ahead, and move what encodes them off the device.

        Args:
            loader: Batches by its `epoch`.

        Returns:
            The number of conditions.
        """
        count = 0
        for batch in loader.epoch(0):
            one = self._sized(tuple(image_of(batch).shape[2:]))
            number = len(image_of(batch))
            for dropped in (False, True) if self.dropout else (False,):
                captions = self._captions(batch, torch.full((number,), dropped))
                count += len(one.conditions.of(batch, captions))
        for name, part in components_of(self.pipe).items():
            if isinstance(part, nn.Module) and name.startswith(("text_encoder", "image_encoder")):
                part.to("cpu")
        return count

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

        seen = self.sized[self.size].call.observation
        try:
            call_pipeline(self.pipe, seen.call, steps=self.sample_steps, first_call=seen.part)
        except SpecError as error:
            raise SpecError(f"the pipeline does not take {self.sample_steps} steps: {error.finding}",
                            path=("sample_steps",)) from error  # fmt: skip

    def beside_samples(self) -> tuple[Tensor | None, list[str]]:
        batch = self._sample_batch()
        image = batch.get("image")
        if image is not None and image.dim() == 5:
            image = image[:, :, 0]
        return None if image is None else (image.float() / 2 + 0.5).clamp(0, 1), batch["caption"]

    @torch.no_grad()
    def draw(self, module: nn.Module, given: Batch, *, steps: int | None = None, seed: int = 0) -> Tensor:
        """Draw by the pipeline with a module in its denoiser's place.

        Args:
            module: What stands for the denoiser.
            given: Captions, `caption`, and pictures beside them, `condition`, where the pipeline takes them.
            steps: The number of steps; None is that of the task.
            seed: The seed of the first sample's noise; the others have the following ones.

        Returns:
            Pictures float32 [n, c, h, w], or videos [n, f, c, h, w], in [0, 1].

        Raises:
            SpecError: The pipeline does not draw them.
        """
        return torch.stack([
            self.sampler(module, arguments, steps=steps or self.sample_steps, seed=seed + number)
            for number, arguments in enumerate(self.sample_calls(given))
        ])  # fmt: skip

    def sample_calls(self, given: Batch) -> list[dict[str, Any]]:
        """Return the arguments of the pipeline for each sample of a batch."""
        seen = self.sized[self.size].call.observation
        size: dict[str, Any] = {name: seen.call[name] for name in ("height", "width", "num_frames") if name in seen.call}
        pictures: list[dict[str, Any]] = [{}] * len(given["caption"])
        if self.condition is not None and "condition" in given:
            both = zip(as_pictures(given["condition"]), as_pictures(given["image"] / 2 + 0.5), strict=True)
            pictures = [picture_arguments(self.condition, picture, own) for picture, own in both]
        calls = []
        for number, caption in enumerate(given["caption"]):
            call = {**size, **self.sample_call, **pictures[number]}
            if "prompt" in seen.call:
                call["prompt"] = self.info.prompt(caption)
            calls.append(call)
        return calls

    def last_sample(self) -> tuple[dict[str, Any], int]:
        """Return the arguments and the seed of the last sample, also where none is drawn: then of the first of the data."""
        batch = self._sample_batch(at_least=1)
        count = len(batch["caption"])
        return self.sample_calls({key: value[-1:] for key, value in batch.items()})[0], count - 1

    def _sample_batch(self, at_least: int = 0) -> Batch:
        """Return the batch for the samples: the listed captions, else those of the first of the data."""
        count = max(self.wanted if isinstance(self.wanted, int) else len(self.wanted), at_least)
        batch: Batch = self.info.examples(count) if self.info.examples is not None and count else {}
        if batch:
            batch = rows_of(batch, [row % len(image_of(batch)) for row in range(count)])
        if isinstance(self.wanted, list) and self.wanted:
            batch["caption"] = list(self.wanted)
        batch.setdefault("caption", [""] * count)
        return batch


def check_options(use: Use) -> None:
    """Check the options of a task `denoise` for a pipeline, as far as that goes without one.

    Args:
        use: The task with its options.

    Raises:
        SpecError: There is an option that a pipeline does not have; it says where that is set instead.
    """
    with below("train", "task", use.name):
        _check_options(use.options, DenoiseOptions.model_fields)


def _check_options(options: Mapping[str, Any], known: Collection[str] = ()) -> None:
    for name in options:
        if name in ELSEWHERE:
            raise SpecError(f"is no option of denoise on a pipeline: {ELSEWHERE[name]}", path=(name,))
        if name not in known:
            there = [key for key in DenoiseOptions.model_fields if key not in ELSEWHERE]
            finding = f"denoise has no option '{name}'{did_you_mean(name, there)}; it has {', '.join(there)}"
            raise SpecError(finding, path=(name,))


def pipeline_task(pipe: Any, call: Mapping[str, Any] | None, part: str | None, use: Use) -> PipelineDenoise:
    """Make the task of a configuration whose model is a pipeline's.

    Args:
        pipe: The pipeline.
        call: The arguments of the section model.
        part: The denoiser.
        use: The task with its options.

    Returns:
        The task.

    Raises:
        SpecError: An option is wrong.
    """
    with below("train", "task", use.name):
        return PipelineDenoise(pipe, call, part, **use.options)
