"""The hooks of a training run, as a pluggy specification: a method a hook, whose parameters are the data it gets.

A new hook is one method here and one `plugins.call("its_name", ...)` where it happens. Hooks that begin with `on_` also get
`project_name` (the name of the output folder), `log_folder` (its path, as text), `data_root` (the folder of the training data)
and `ed_state` (see fxplug/training/plugin_state.py).

The names and what they count are those of EveryDream2trainer (github.com/victorchall/EveryDream2trainer): one batch is one
step, whether or not the optimizer steps after it (`accumulate`). `epoch`, `local_step` and `global_step` count from 0;
`global_step` is the number of batches that were done before, the same at the start and the end of a step. `batch` is the
dict that is trained on, on the device: what a plugin changes in it before the forward pass is what the model sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from .plugin_state import State

PROJECT = "fxplug"
hook = pluggy.HookspecMarker(PROJECT)


class Hooks:
    """What a plugin may do. A plugin has any of these methods, each with any of the parameters, or `**kwargs`."""

    @hook
    def on_model_load(
        self,
        module: nn.Module,
        config: dict[str, Any],
        optimizer_config: dict[str, Any],
        resume_ckpt: str | None,
        disable_unet_training: bool,
        disable_textenc_training: bool,
        project_name: str,
        log_folder: str,
        data_root: str | None,
        ed_state: State,
    ) -> None:
        """The rewritten model is there, with the weights it starts from; on a resume the checkpoint is read next.

        There is no optimizer yet: tokens that a plugin adds to the text encoder are among what trains. `optimizer_config` says
        what the optimizer will be; `resume_ckpt` is the folder of the text encoder; the last two, what does not train.
        """

    @hook
    def on_training_start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        config: dict[str, Any],
        steps: int,
        epochs: int,
        global_step: int,
        project_name: str,
        log_folder: str,
        data_root: str | None,
        ed_state: State,
    ) -> None:
        """Everything is made and the first step comes next. After a resume `global_step` is not 0."""

    @hook
    def on_epoch_start(
        self,
        epoch: int,
        global_step: int,
        epoch_length: int,
        arg_update_callback: Callable[[str, Any], None],
        module: nn.Module,
        project_name: str,
        log_folder: str,
        data_root: str | None,
        ed_state: State,
    ) -> None:
        """An epoch begins; it has `epoch_length` batches.

        `arg_update_callback("grad_accum", 4)` sets `accumulate` from the next start of an epoch on: this one.
        """

    @hook
    def on_epoch_end(
        self,
        epoch: int,
        global_step: int,
        loss: float,
        metrics: dict[str, float],
        arg_update_callback: Callable[[str, Any], None],
        module: nn.Module,
        project_name: str,
        log_folder: str,
        data_root: str | None,
        ed_state: State,
    ) -> None:
        """An epoch is over: its mean loss, and what the test after it gave (empty when there was none)."""

    @hook
    def on_step_start(
        self,
        epoch: int,
        global_step: int,
        local_step: int,
        batch: dict[str, Any],
        module: nn.Module,
        project_name: str,
        log_folder: str,
        data_root: str | None,
        ed_state: State,
    ) -> None:
        """A batch comes next, the `local_step`-th of its epoch."""

    @hook
    def on_backpropagation(
        self,
        loss: Tensor,
        epoch: int,
        global_step: int,
        local_step: int,
        batch: dict[str, Any],
        module: nn.Module,
        project_name: str,
        log_folder: str,
        data_root: str | None,
        ed_state: State,
    ) -> Mapping[str, Tensor | None] | None:
        """After the backward pass of each batch, before the optimizer: gradients may be changed in place.

        Gradients that are returned, by the parameters' names, take the place of those that are there. They are those of all
        batches since the last step of the optimizer, in fp16 times the loss scale. `loss` is a scalar without its graph.
        """

    @hook
    def on_step_end(
        self,
        epoch: int,
        global_step: int,
        local_step: int,
        batch: dict[str, Any],
        loss: float,
        lr: float,
        seconds: float,
        module: nn.Module,
        project_name: str,
        log_folder: str,
        data_root: str | None,
        ed_state: State,
    ) -> None:
        """A batch is done, and the optimizer has stepped if it was the last that it waited for.

        `loss` is the mean over what the optimizer stepped on, else that of the batch; `seconds` is how long it took.
        """

    @hook
    def on_model_save(
        self,
        path: Path,
        save_folder: str,
        diffusers_save_path: str,
        epoch: int,
        global_step: int,
        module: nn.Module,
        project_name: str,
        log_folder: str,
        data_root: str | None,
        ed_state: State,
    ) -> None:
        """A checkpoint or the trained model was written to the folder `path`, which has two more names."""

    @hook
    def on_training_end(
        self,
        module: nn.Module,
        global_step: int,
        project_name: str,
        log_folder: str,
        data_root: str | None,
        ed_state: State,
    ) -> None:
        """The last step is done and the trained model is saved."""

    @hook
    def transform_caption(self, caption: str) -> str:
        """Gives the caption that the model is to see. Runs where data are loaded, perhaps in a worker process."""
        return caption

    @hook
    def transform_pil_image(self, img: np.ndarray[Any, Any], pil: Image) -> np.ndarray[Any, Any] | Image:
        """Gives the image that the model is to see. Runs where data are loaded, perhaps in a worker process.

        `img` is an array uint8 [h, w, 3] ([h, w] of images with one channel), cropped, resized and mirrored already; a plugin
        with an argument `pil` gets it as a PIL image. What it gives is either, or floats from 0 to 1, of the same size. Where
        the task crops by itself (classify), it is the whole image, and any size may be given.
        """
        return img

    @hook
    def modify_sample_prompt(self, prompt: str) -> str:
        """Gives the caption that a sample image is made with."""
        return prompt
