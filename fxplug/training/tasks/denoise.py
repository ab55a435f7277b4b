"""The task of diffusion and flow-matching models: to tell the noise in an image, or in its latents, from the image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import SpecError, prefix_path, quote
from ...core.spec.yaml_source import validate
from ..random_draws import Draws
from ..task_section import DenoiseOptions
from ..train_section import read_use
from ..trigger import replace_trigger, with_trigger
from .conditioning import Text, Vae
from .fixed_draws import FixedDraws
from .losses import MSE, add_offset, compute_huber_delta, compute_losses, compute_mean, read_loss
from .model_call import (
    ModuleCall,
    ModuleInput,
    check_labels,
    count_embedding_rows,
    format_inputs,
    get_images,
    list_inputs,
    make_default_call,
)
from .noise import draw_positions, open_noise, read_density
from .preservation import without_training
from .task import Batch, Task, TaskInfo, Totals, join_values, take_rows
from .validation_prompts import join_pictures, list_forms, list_prompts, open_prompts

TESTED = (0.125, 0.375, 0.625, 0.875)  # the places in the schedule at which a test takes the loss


class Denoise(Task):
    """Adds noise to a batch and learns what the scheduler's prediction says: epsilon, v, the sample, or the flow.

    scheduler: a class of diffusers, with its options below it, or a folder with scheduler_config.json. prediction: epsilon,
    v_prediction, sample or flow where it is not the scheduler's own. vae: what `model` is elsewhere; without it the model
    works on pixels. text: a function of captions or a folder of transformers (`conditioning.Text`). dropout: the share
    of samples that are trained without their caption or label, for guidance; without a label is `null_label`, else the last
    row of the model's embedding. snr_gamma: min-SNR weights (arXiv 2303.09556). density: how often each amount of noise is
    drawn: uniform, logit_normal or mode. loss: mse, huber or smooth_l1 (`losses`). noise_offset: a number that a sample's
    noise has in all of a channel, of this deviation. weighting, time_scale: of flow matching (`noise.Flow`; Flux takes times
    below 1, time_scale: 0.001). call: what the model is called with, where the names of its inputs do not say it. samples: how
    many sample images, or a list of their captions or labels; prompts: others in their place, with seeds, sizes and guidance of
    their own (`validation_prompts`); guidance (arXiv 2207.12598) and sample_steps are theirs.
    train_guidance: a scale; the batch then has each sample twice, first with the caption `negative`, and what is learnt is
    negative + scale * (own - negative), as in DreamArtist (arXiv 2211.11337). preserve: a class; the batch then has each sample
    twice, too, then with the class in the place of the trigger, where what the model predicts without what trains is learnt.

    `call` gives inputs the values noisy, time, text (text.NAME of several), label, condition, and whatever else the data
    has. The condition of a pass such as ControlNet goes where that pass wants it.
    """

    reads = ("loss_scale", "cond_dropout", "loss_mask", "prior")

    def __init__(
        self,
        scheduler: Any = "DDPMScheduler",
        prediction: str | None = None,
        vae: Any = None,
        text: Any = None,
        dropout: float = 0.0,
        null_label: int | None = None,
        snr_gamma: float | None = None,
        density: Any = "uniform",
        loss: Any = "mse",
        noise_offset: float = 0.0,
        weighting: str = "none",
        time_scale: float = 1.0,
        call: Mapping[str, Any] | None = None,
        samples: int | list[str] | list[int] = 8,
        prompts: str | list[Any] | None = None,
        guidance: float = 1.0,
        sample_steps: int = 20,
        train_guidance: float | None = None,
        negative: str = "",
        preserve: str | None = None,
        preserve_weight: float = 1.0,
    ) -> None:
        given = {"scheduler": scheduler, "prediction": prediction, "vae": vae, "text": text, "dropout": dropout}
        given |= {"null_label": null_label, "snr_gamma": snr_gamma, "density": density, "weighting": weighting}
        given |= {"loss": loss, "noise_offset": noise_offset, "time_scale": time_scale, "call": call, "samples": samples}
        given |= {"guidance": guidance, "negative": negative, "preserve": preserve, "preserve_weight": preserve_weight}
        given |= {"prompts": prompts, "sample_steps": sample_steps, "train_guidance": train_guidance}
        validate(DenoiseOptions, given)
        self.scheduler, self.density = read_use(scheduler), read_density(read_use(density))
        self.loss_kind, self.noise_offset = read_loss(read_use(loss)), noise_offset
        self.prediction, self.snr_gamma, self.weighting, self.time_scale = prediction, snr_gamma, weighting, time_scale
        self.vae_spec, self.text_spec, self.mapping = vae, text, call
        self.opened: dict[Any, Any] = {}  # frozen models, which the copies of this task for several adapters share
        self.dropout, self.null_label, self.guidance, self.sample_steps = dropout, null_label, guidance, sample_steps
        self.wanted, self.train_guidance, self.negative = samples, train_guidance, negative
        self.given_prompts = prompts
        self.preserve, self.preserve_weight = preserve, preserve_weight
        with prefix_path("text"):
            said = read_use(text).options if text is not None else {}
        self.trains = bool(said.get("trainable") or said.get("passes"))

    def setup(self, module: nn.Module, info: TaskInfo) -> None:
        self.info = info
        self.prompts, self.wanted = open_prompts(self.given_prompts, self.wanted, info.base)
        self.noise = open_noise(
            self.scheduler,
            info.base,
            prediction=self.prediction,
            latents=self.vae_spec is not None,
            snr_gamma=self.snr_gamma,
            weighting=self.weighting,
            time_scale=self.time_scale,
        )
        where = info.base, info.device
        self.vae = None
        if self.vae_spec is not None:
            place = ("vae", *map(str, where))
            self.vae = self.opened[place] = self.opened.get(place) or Vae(self.vae_spec, *where)
        self.text = None
        with prefix_path("text"):
            if self.text_spec is not None:
                place = ("text", *map(str, where))
                self.text = self.opened.get(place) or Text(self.text_spec, *where, info.seed)
                if self.text.encoder is not None and not self.trains:  # a function of one's own may have a state
                    self.opened[place] = self.text
        self.encoder = self.text.encoder if self.text is not None else None
        texts = self.text([""]) if self.text is not None else {}
        values = ["noisy", "time", *(["text"] if texts else []), *(f"text.{name}" for name in texts), "label", "condition"]
        inputs = list_inputs(module)
        self.call = ModuleCall(self.mapping if self.mapping is not None else make_default_call(inputs, texts), inputs, values)
        self._check_inputs(inputs)
        label = next((name for name, source in self.call.mapping.items() if source == "label"), None)
        self.rows = count_embedding_rows(module, label) if label else None
        self.takes_label = label is not None
        if label and (self.dropout or self.guidance != 1):
            self.null_label = self._null_label()
        if texts and not any(self.call.uses(name) for name in ("text", *(f"text.{name}" for name in texts))):
            found = f"the call of the model uses no text; there are {', '.join(texts)}"
            raise SpecError(f"{found}; {format_inputs(inputs)}", path=("text",))
        for option, idle in (("dropout", 0), ("guidance", 1)):
            if getattr(self, option) != idle and self.text is None and not label:
                raise SpecError(f"{option} needs captions or labels, and the call of the model uses none", path=(option,))
        if self.text is None and (self.train_guidance is not None or self.negative):
            key = "negative" if self.train_guidance is None else "train_guidance"
            raise SpecError(f"{key} needs captions: give 'text'", path=(key,))
        if self.text is None and info.trigger is not None:
            raise SpecError("has no effect: the task is given no captions; set its 'text'", path=("data", "trigger"))
        self._check_unused()
        if self.preserve is not None:
            with prefix_path("preserve"):
                self._check_preserved()
                self.untrained = without_training(module)
        self.shape = self._shape(inputs)

    def _check_preserved(self) -> None:
        if self.info.trigger is None:
            raise SpecError("needs 'trigger' in the section data, the word that the class replaces")
        if self.train_guidance is not None:
            raise SpecError("and 'train_guidance' both double the batch: leave one of them out")
        if self.trains:
            raise SpecError("needs the text encoder as it was, and this one trains")

    def _check_unused(self) -> None:
        """Raise SpecError for an option that would have no effect, and for a label that the model does not have."""
        if self.preserve is None and self.preserve_weight != 1:
            raise SpecError("has no effect without 'preserve'", path=("preserve_weight",))
        guided = self.guidance != 1 or any(one.guidance not in (None, 1) for one in self.prompts)
        if self.negative and self.train_guidance is None and not guided:
            raise SpecError("has no effect without guidance: set 'guidance' or 'train_guidance'", path=("negative",))
        listed_samples = self.wanted if isinstance(self.wanted, list) else []
        labels = [item for item in listed_samples if isinstance(item, int)]
        if labels and not self.takes_label:
            raise SpecError("are labels, and the call of the model uses none", path=("samples",))
        if listed_samples and not labels and self.text is None:
            key = "prompts" if self.prompts else "samples"
            raise SpecError("are captions, and the model is given none: set 'text', or a number of pictures", path=(key,))
        for number, one in enumerate(self.prompts):
            if one.negative and (self.guidance if one.guidance is None else one.guidance) == 1:
                raise SpecError("has no effect without guidance: set it, too", path=("prompts", number, "negative"))
        if self.null_label is not None and not self.takes_label:
            raise SpecError("has no effect: the call of the model uses no label", path=("null_label",))
        for key, values in (("null_label", [self.null_label or 0]), ("samples", labels)):
            if self.rows is not None and max(values, default=0) >= self.rows:
                finding = f"the model has {self.rows} rows for classes, 0 to {self.rows - 1}, and none for {max(values)}"
                raise SpecError(finding, path=(key,))

    @property
    def caption_dropout(self) -> float:
        return self.dropout

    def set_caption_dropout(self, share: float) -> None:
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise SpecError(f"conditional_dropout must be from 0 to 1, not {quote(share)}")
        if share and self.text is None and not self.takes_label:
            raise SpecError("conditional_dropout needs captions or labels, and the call of the model uses none")
        if share and self.takes_label:
            self.null_label = self._null_label()
        self.dropout = float(share)

    def parts(self) -> dict[str, Any]:
        scheduler = getattr(self.noise, "scheduler", None) or self.noise.sampler()
        found = {"scheduler": scheduler, "vae": self.vae.module if self.vae is not None else None}
        if self.encoder is None:
            return found
        return {**found, "text_encoder": self.encoder.model, "tokenizer": self.encoder.tokenizer}

    def loss(self, module: nn.Module, batch: Batch, draw: Draws) -> Tensor:
        position = draw_positions(self.density, len(get_images(batch)), draw)
        dropout = self._dropout(batch)
        if self.info.classes is None and self.null_label is not None and "label" in batch:
            self._check_no_class(batch)
        return compute_mean(self._losses(module, batch, draw, position, dropout, preserve=self.preserve is not None), batch)

    def _dropout(self, batch: Batch) -> float | Tensor:
        """Return the probability that a sample loses its caption or label: its own if it has one (not nan), else the task's."""
        own = batch.get("cond_dropout")
        if own is not None and self.takes_label and self.text is None and self.null_label is None:
            self.null_label = self._null_label()
        return self.dropout if own is None else torch.where(own.isnan(), self.dropout, own)

    @torch.no_grad()
    def test(self, module: nn.Module, batches: Iterable[Batch]) -> Totals:
        """Return the mean loss at fixed noise levels; each sample has its own noise, the same in every test."""
        total, count = 0.0, 0
        for batch in batches:
            if self.takes_label and self.rows is not None and "label" in batch:  # other data than those with the classes
                check_labels(batch, self.rows, None, "rows for classes")
            for place in TESTED:
                draw = FixedDraws(batch, self.info.device)
                position = torch.full((len(get_images(batch)),), place, device=self.info.device)
                losses = self._losses(module, batch, draw, position, 0.0)
                total, count = total + float(losses.double().sum()), count + len(losses)
        return {"loss": (total, count)}

    def samples(self, module: nn.Module, draw: Draws | None = None) -> Tensor | None:
        """Draw the images that the option `samples` or `prompts` lists, always with the same noise."""
        batch = self._sample_batch()
        return self._drawn(module, batch, range(len(batch["caption"]))) if self._draws(batch) else None

    def check_samples(self, module: nn.Module) -> bool:
        batch = self._sample_batch()
        if self._draws(batch):
            self._drawn(module, batch, list_forms(list_prompts(batch)), trial=True)
        return self._draws(batch)

    def _drawn(self, module: nn.Module, batch: Batch, rows: Sequence[int], trial: bool = False) -> Tensor:
        """Draw samples of a batch: all at once, or where there are prompts these `rows`, one by one."""
        if not self.prompts:
            return self.generate(module, batch, trial=trial)
        made = []
        for row in rows:
            one, given = self.prompts[row], {key: value[row : row + 1] for key, value in batch.items()}
            seed = row if one.seed is None else one.seed
            with prefix_path("prompts", row):
                shape = None if one.size is None else self._encoded_shape(one.size)
                how: dict[str, Any] = {"guidance": one.guidance, "steps": one.steps, "seed": seed, "negative": one.negative}
                made.append(self.generate(module, given, **how, shape=shape, trial=trial)[0])
        return join_pictures(made)

    def beside_samples(self) -> tuple[Tensor | None, list[str]]:
        batch = self._sample_batch()
        names = batch["caption"] if any(batch["caption"]) else batch.get("label", torch.empty(0)).tolist()
        return (batch["image"].float() / 2 + 0.5).clamp(0, 1) if "image" in batch else None, [str(name) for name in names]

    @torch.no_grad()
    def generate(
        self,
        module: nn.Module,
        given: Batch,
        *,
        guidance: float | None = None,
        steps: int | None = None,
        seed: int = 0,
        negative: str | None = None,
        shape: tuple[int, ...] | None = None,
        trial: bool = False,
    ) -> Tensor:
        """Generate images float32 [n, c, h, w] in [0, 1], by the scheduler's own loop, for n captions, labels or conditions.

        The noise of image i is that of the seed `seed` + i, whatever else is drawn. `guidance`, `negative`, the `shape` of the
        noise and `steps` are by default the task's; a `trial` ends the loop after its first step, and passes plugins, which may
        count, no caption. Further inputs go to the module itself: `functools.partial(module, strength=0.5)`.
        """
        count, scale = len(next(iter(given.values()))), self.guidance if guidance is None else guidance
        seeds = [torch.Generator().manual_seed(seed + n) for n in range(count)]
        noise = torch.stack([torch.randn(shape or self.shape, generator=seed) for seed in seeds]).to(self.info.device)
        given = {k: v.to(self.info.device) if isinstance(v, Tensor) else v for k, v in given.items()}
        if "caption" in given and not trial:
            given["caption"] = [self.info.prompt(caption) for caption in given["caption"]]
        nothing = torch.ones(count, dtype=torch.bool, device=self.info.device)
        wanted = self._conditions(given, ~nothing)
        unwanted = self._conditions(*self._without(given, nothing, negative)) if scale != 1 else {}

        def denoise(x: Tensor, time: Tensor) -> Tensor:
            if self.train_guidance is not None and scale != 1:
                return self._guided(module, x, time, unwanted, wanted, scale)
            predicted = self._predict(module, x, time, wanted)
            if scale == 1:
                return predicted
            free = self._predict(module, x, time, unwanted)
            return free + scale * (predicted - free)

        x = self.noise.sample(denoise, noise, steps or self.sample_steps, seed, trial=trial)
        return ((self.vae.decode(x) if self.vae is not None else x) / 2 + 0.5).clamp(0, 1)

    def _losses(
        self, module: nn.Module, batch: Batch, draw: Any, position: Tensor, dropout: float | Tensor, *, preserve: bool = False
    ) -> Tensor:
        """Return the weighted loss of each sample, float32 [b]."""
        image = batch["image"]
        x = self.vae.encode(image, draw) if self.vae is not None else image
        if x.dim() == 4 and x.shape[1] != self.shape[0]:
            finding = f"the images have {x.shape[1]} channels, and the model was traced with {self.shape[0]}"
            hint = "set 'channels' to read them differently, or 'vae' to make latents"
            raise SpecError(f"{finding}: {hint}", path=("data", "channels"))
        noise = add_offset(draw.like(x), draw, self.noise_offset)
        index = (position * self.noise.steps).long().clamp(0, self.noise.steps - 1)
        dropped = draw.uniform(len(x)) < dropout
        batch["timesteps"] = self.noise.time(index)
        noisy, target = self.noise.noisy(x, noise, index), self.noise.target(x, noise, index)
        time, conditions = self.noise.time(index), self._conditions(batch, dropped)
        if preserve:
            predicted, kept = self._preserved(module, batch, noisy, time, conditions)
        elif self.train_guidance is None:
            predicted = self._predict(module, noisy, time, conditions)
        else:
            without = self._conditions(*self._without(batch, torch.ones_like(dropped)))
            predicted = self._guided(module, noisy, time, without, conditions, self.train_guidance)
        if predicted.shape != target.shape:
            found = f"the model returns {list(predicted.shape)} for {list(x.shape)}"
            raise SpecError(f"{found}, but a prediction must have the shape of the noisy input")
        losses = compute_losses(predicted, target, batch, self.loss_kind, self._delta(index))
        losses = losses * self.noise.weight(index)
        return losses + self.preserve_weight * kept if preserve else losses

    def _delta(self, index: Tensor) -> Tensor | None:
        """Return the delta of a Huber loss at these steps; None for another loss."""
        if self.loss_kind.name == "mse":
            return None
        return compute_huber_delta(self.loss_kind, self.noise.share(index), self.noise.ratio(index))

    def _predict(self, module: nn.Module, x: Tensor, time: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        found = self.call(module, {"noisy": x, "time": time, **conditions})
        # the second half of twice the channels is a learned variance (arXiv 2102.09672), which has another loss
        return found[:, : x.shape[1]] if found.dim() == x.dim() and found.shape[1] == 2 * x.shape[1] else found

    def _guided(
        self, module: nn.Module, x: Tensor, time: Tensor, without: Mapping[str, Any], own: Mapping[str, Any], scale: float
    ) -> Tensor:
        """Predict with guidance from one batch, whose first half has the negative captions (DreamArtist, arXiv 2211.11337)."""
        both = {key: join_values(without[key], value) for key, value in own.items()}
        negative, positive = self._predict(module, torch.cat([x, x]), torch.cat([time, time]), both).chunk(2)
        return negative + scale * (positive - negative)

    def _preserved(
        self, module: nn.Module, batch: Batch, noisy: Tensor, time: Tensor, own: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Predict from one batch, in whose second half the class stands in the place of the trigger.

        Returns the prediction of the first half, and for the second the squared distance of each sample, float32 [b], from
        what the model predicts without what trains: ostris' ai-toolkit calls it differential output preservation.
        """
        captions = [replace_trigger(text, str(self.info.trigger), str(self.preserve)) for text in batch["caption"]]
        rest = {key: value for key, value in batch.items() if key != "tokens"}
        of_class = self._conditions({**rest, "caption": captions}, torch.zeros_like(time, dtype=torch.bool))
        both = {key: join_values(value, of_class[key]) for key, value in own.items()}
        predicted, new = self._predict(module, torch.cat([noisy, noisy]), torch.cat([time, time]), both).chunk(2)
        with torch.no_grad():
            before = self._predict(self.untrained, noisy, time, of_class)
        return predicted, compute_losses(new, before, {}, MSE)

    def _without(self, batch: Batch, every: Tensor, negative: str | None = None) -> tuple[Batch, Tensor]:
        """Return the batch with the negative caption for every sample, and which of its samples lose caption and label."""
        if not (text := self.negative if negative is None else negative):
            return batch, every
        rest = {key: value for key, value in batch.items() if key != "tokens"}
        return {**rest, "caption": [text] * len(every)}, ~every

    def _conditions(self, batch: Batch, dropped: Tensor) -> dict[str, Any]:
        """Return the model's conditions; samples that are `dropped` [b] lose caption and label."""
        values = {name: value for name, value in batch.items() if name not in ("image", "caption")}
        if "label" in batch and self.call.uses("label"):
            if self.rows is not None:
                check_labels(batch, self.rows, self.info.classes, "rows for classes")
            if self.null_label is not None:
                values["label"] = torch.where(dropped, self.null_label, batch["label"])
        if self.text is not None:
            if "caption" not in batch:
                raise SpecError("the data has no captions, and the task has 'text'", path=("data",))
            captions = ["" if out else text for text, out in zip(batch["caption"], dropped.tolist(), strict=True)]
            texts = self.text(captions, self._tokens(batch, dropped))
            values |= {"text": next(iter(texts.values())), **{f"text.{name}": value for name, value in texts.items()}}
        return values

    def _tokens(self, batch: Batch, dropped: Tensor) -> Tensor | None:
        """Return the tokens of a batch that has them, as plugins left them."""
        if self.encoder is None or "tokens" not in batch:
            return None
        return torch.where(dropped[:, None], self.encoder.tokens([""]), batch["tokens"])

    def _check_inputs(self, inputs: Mapping[str, ModuleInput]) -> None:
        if not self.call.uses("noisy"):
            raise SpecError(f"nothing in 'call' is 'noisy'; {format_inputs(inputs)}", path=("call",))
        for name, source in self.call.mapping.items():
            if source == "time" and inputs[name].shape == ():
                raise SpecError(
                    f"'{name}' was traced without dimensions, and in a batch each sample has a time of its own: "
                    f"write inputs: {{{name}: {{shape: [2], dtype: int64, high: 1000}}}} with the batch of the other inputs",
                    path=("inputs", name),
                )

    def _check_no_class(self, batch: Batch) -> None:
        """Raise SpecError for a sample whose label means "no class". For data with known classes this was checked before."""
        taken = (batch["label"] == self.null_label).nonzero().flatten().tolist()
        if taken and self.takes_label:
            name = batch["name"][taken[0]] if "name" in batch else f"sample {taken[0]} of the batch"
            of_rows = f" of the model's {self.rows} rows for classes, 0 to {self.rows - 1}," if self.rows is not None else ""
            finding = f"'{name}' has the label {self.null_label}, and {self.null_label}{of_rows} means \"no class\""
            hint = "build the model with one more row, or set 'null_label' to a row that no sample has"
            raise SpecError(f"{finding}: {hint}", path=("data",))

    def _null_label(self) -> int:
        classes = len(self.info.classes) if self.info.classes is not None else None
        if self.null_label is not None:
            if self.info.classes is not None and self.null_label < len(self.info.classes):
                finding = f"{self.null_label} means \"no class\", and the data has {classes} classes, from 0 on"
                hint = f"it is the label of '{self.info.classes[self.null_label]}'"
                raise SpecError(f"{finding}: {hint}", path=("null_label",))
            if self.rows is not None and self.null_label >= self.rows:
                finding = f"must be a row of the model's embedding of classes, 0 to {self.rows - 1}, not {self.null_label}"
                raise SpecError(finding, path=("null_label",))
            return self.null_label
        if self.rows is not None and classes is not None and self.rows <= classes:
            raise SpecError(
                f"training without a label needs one more row in the embedding of classes, and the model has {self.rows} for "
                f"{classes} classes: build it with {classes + 1}",
                path=("dropout",),
            )
        found = self.rows - 1 if self.rows is not None else classes
        if found is None:
            raise SpecError("the label that means \"no class\" is not known: set 'null_label'", path=("dropout",))
        return found

    def _shape(self, inputs: Mapping[str, ModuleInput]) -> tuple[int, ...]:
        """Return channels, height and width of the model's input; if no size is set, that of the first image."""
        seen = next(inputs[name].shape for name, source in self.call.mapping.items() if source == "noisy") or ()
        size: tuple[int, ...] = self.info.size
        if not all(size) and self.info.examples is not None:
            size = tuple(get_images(self.info.examples(1)).shape[2:])
        if self.vae is not None:
            latents = self._encoded_shape(size)
            if len(seen) == 4 and latents[0] != seen[1]:
                kind = type(self.vae.module).__name__
                finding = f"{kind} gives latents of {latents[0]} channels, and the model was traced with {seen[1]}"
                raise SpecError(finding, path=("vae",))
            return latents
        return (seen[1] if len(seen) == 4 else 3, *(size if all(size) else seen[2:]))

    def _encoded_shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return channels, height and width of what the model is given for a picture of this height and width."""
        if self.vae is None:
            return (self.shape[0], *size)
        channels = getattr(getattr(self.vae.module, "config", None), "in_channels", 3)
        empty = torch.zeros(1, channels, *size, device=self.info.device)
        return tuple(self.vae.encode(empty, Draws(0, 0, device=self.info.device)).shape[1:])

    def _draws(self, batch: Batch) -> bool:
        """Return whether the batch has what the samples need."""
        return bool(batch["caption"]) and (not self.call.uses("condition") or "condition" in batch)

    def _sample_batch(self) -> Batch:
        """Return the batch for the sample images: the listed captions or labels, else the first of the data, else each class.

        Other inputs of the model come from the first samples of the data, repeated if there are fewer.
        """
        count = self.wanted if isinstance(self.wanted, int) else len(self.wanted)
        batch = self.info.examples(count) if self.info.examples is not None and count else {}
        if batch:
            batch = take_rows(batch, [row % len(get_images(batch)) for row in range(count)])
        if isinstance(self.wanted, list):
            label = all(isinstance(item, int) for item in self.wanted)
            captions = [with_trigger(str(caption), self.info.trigger) for caption in self.wanted]
            batch |= {"label": torch.tensor(self.wanted)} if label else {"caption": captions}
        elif "condition" not in batch and self.call.uses("label"):
            known = len(self.info.classes or ()) or max(1, (self.rows or 1) - (self.null_label is not None))
            batch["label"] = torch.arange(count) % known
        return {"caption": [""] * count, **batch}
