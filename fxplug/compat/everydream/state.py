"""What plugins hold of a run, under the names that EveryDream2trainer's train.py has: its state, and the batch.

Where a run loads its plugins, `from train import ...` gives this module (see fxplug/compat/everydream/loader.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import did_you_mean
from ...training.tasks.task import Task
from ...training.train_section import Train


class Optimizers:
    """The optimizer of a run, which is one, under the names that EveryDream2trainer has for its two.

    What else is asked of it, it answers itself. `optimizer_te` is None, and the rate 0, where no text encoder is trained.
    """

    def __init__(self, optimizer: Any, text_encoder: Any = None) -> None:
        own = set() if text_encoder is None else set(map(id, text_encoder.parameters()))
        self.optimizer_unet, self._text = optimizer, [any(id(p) in own for p in g["params"]) for g in optimizer.param_groups]
        self.optimizer_te = optimizer if any(self._text) else None
        self.optimizers = [optimizer]

    def get_unet_lr(self) -> float:
        """Return the current rate of the first group that is not the text encoder's."""
        return self._rate(text=False)

    def get_textenc_lr(self) -> float:
        """Return the current rate of the text encoder's first group."""
        return self._rate(text=True)

    def _rate(self, text: bool) -> float:
        rows = zip(self.optimizer_unet.param_groups, self._text, strict=True)
        return next((float(group["lr"]) for group, own in rows if own == text), 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer_unet"], name)


class TrainBatch:
    """The loader of the training data, as plugins see it.

    It answers whatever the loader does. Of what EveryDream2trainer's plugins set there, `conditional_dropout` is the share of
    samples, from 0 to 1, that lose their caption or label from now on; a sample with a share of its own keeps that.
    """

    def __init__(self, loader: Any, task: Task) -> None:
        vars(self).update(_loader=loader, _trained_task=task)

    def __getattr__(self, name: str) -> Any:
        loader, task = vars(self)["_loader"], vars(self)["_trained_task"]
        return task.caption_dropout if name == "conditional_dropout" else getattr(loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "conditional_dropout":
            raise AttributeError(
                f"train_batch.{name} cannot be set by a plugin{did_you_mean(name, ['conditional_dropout'])}: the run would not "
                "use it; set what the data is read with in the section 'data', and change samples in transform_caption, "
                "transform_pil_image or on_step_start"
            )
        vars(self)["_trained_task"].set_caption_dropout(value)

    def __len__(self) -> int:
        return len(self._loader)


@dataclass(eq=False, repr=False)
class TrainingState:
    """`unet` is the module that trains, whatever it is. What a run does not have is None.

    `text_encoder`, `tokenizer`, `scheduler` (of noise) and `vae` are the task's; `optimizer` is None until it is made, and an
    `Optimizers` then; `train_batch` is the loader of the training data (`TrainBatch`). There are no models with averaged
    weights: `unet_ema` is None.
    """

    optimizer: Any = None
    train_batch: Any = None
    unet: Any = None
    text_encoder: Any = None
    tokenizer: Any = None
    scheduler: Any = None
    vae: Any = None
    unet_ema: Any = None
    text_encoder_ema: Any = None
    write_checkpoint: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        if self.text_encoder is not None and not hasattr(self.text_encoder, "text_model"):
            # transformers 5 has the layers on the encoder itself; as a plain attribute it is no submodule of its own
            object.__setattr__(self.text_encoder, "text_model", self.text_encoder)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint of the current state to the folder `path`, from which the run can be resumed."""
        if self.write_checkpoint is None:
            raise RuntimeError("this state does not belong to a run")
        self.write_checkpoint(Path(path))


def save_model(save_path: str | Path, ed_state: TrainingState, *args: Any, **options: Any) -> None:
    """Write a checkpoint of the run to `save_path`: all trained weights and the optimizer, whatever the options are."""
    ed_state.save(save_path)


def clean_filename(filename: str) -> str:
    """Return the letters, digits and spaces of a name."""
    return "".join(letter for letter in filename if letter.isalpha() or letter.isdigit() or letter == " ").rstrip()


class _NoColour:
    def __getattr__(self, name: str) -> str:
        if name.isupper():
            return ""
        raise AttributeError(name)


Fore, Back, Style = _NoColour(), _NoColour(), _NoColour()  # colorama's, for plugins that import it where it is not installed


def init(*args: Any, **options: Any) -> None:
    """Do nothing in place of colorama's `init`, as output is not coloured."""


def __getattr__(name: str) -> Any:
    if name.endswith("TrainingState"):
        return TrainingState
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def make_plugin_batch(batch: dict[str, Any], task: Task) -> dict[str, Any]:
    """Return a batch with the entries of EveryDream2trainer's: `captions`, `tokens` [b, n] if the task has a text encoder,
    `loss_scale` [b] and `runt_size`, 0, as no sample is repeated to fill it up. The loss adds `timesteps` [b]."""
    image = batch.get("image")
    found = {"runt_size": 0, **batch}
    if isinstance(image, Tensor):
        found.setdefault("loss_scale", torch.ones(len(image), device=image.device))
    if "caption" in batch:
        found["captions"] = batch["caption"]
        if task.encoder is not None:
            found["tokens"] = task.encoder.tokens(batch["caption"])
    return found


def describe_optimizer(task: Task, settings: Train) -> dict[str, Any]:
    """Describe what trains and how, in the form of EveryDream2trainer's optimizer.json."""
    rates = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    base = {"optimizer": settings.optimizer.name, **settings.optimizer.options, **rates}
    if task.encoder is None:
        return {"base": base}
    overrides = task.encoder.rates(settings) if task.trains else rates
    return {"base": base, "text_encoder_overrides": overrides, "text_encoder_freezing": task.encoder.freezing()}
