"""The hooks of a training run, as a pluggy specification: a method a hook, whose parameters are the data it gets.

A new hook is one method here and one `plugins.call("its_name", ...)` where it happens. Hooks that begin with `on_` also get
`project_name` (the name of the output folder), `log_folder` (its path) and `data_root` (the folder of the training data).
`epoch` counts from 0. `global_step` is the number of optimizer steps that were done before: it is the same at the start and the
end of a step, as in EveryDream2trainer (github.com/victorchall/EveryDream2trainer), whose plugins get the same names here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn
    from torch.optim import Optimizer

PROJECT = "fxplug"
hook = pluggy.HookspecMarker(PROJECT)


class Hooks:
    """What a plugin may do. A plugin has any of these methods, each with any of the parameters, or `**kwargs`."""

    @hook
    def on_model_load(
        self, module: nn.Module, config: dict[str, Any], project_name: str, log_folder: Path, data_root: str | None
    ) -> None:
        """The rewritten model is there, with the weights it starts from; on a resume the checkpoint is read next."""

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
        log_folder: Path,
        data_root: str | None,
    ) -> None:
        """Everything is made and the first step comes next. After a resume `global_step` is not 0."""

    @hook
    def on_epoch_start(
        self,
        epoch: int,
        global_step: int,
        epoch_length: int,
        module: nn.Module,
        project_name: str,
        log_folder: Path,
        data_root: str | None,
    ) -> None:
        """An epoch begins; it has `epoch_length` optimizer steps."""

    @hook
    def on_epoch_end(
        self,
        epoch: int,
        global_step: int,
        loss: float,
        metrics: dict[str, float],
        module: nn.Module,
        project_name: str,
        log_folder: Path,
        data_root: str | None,
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
        log_folder: Path,
        data_root: str | None,
    ) -> None:
        """An optimizer step begins, the `local_step`-th of its epoch; `batch` is its first micro batch, on the device."""

    @hook
    def on_backpropagation(
        self,
        loss: Tensor,
        epoch: int,
        global_step: int,
        module: nn.Module,
        project_name: str,
        log_folder: Path,
        data_root: str | None,
    ) -> None:
        """Before the backward pass of each micro batch. The loss is a scalar with its graph, to be read, not changed."""

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
        log_folder: Path,
        data_root: str | None,
    ) -> None:
        """The optimizer has stepped; `batch` is the last micro batch, `seconds` how long the step took."""

    @hook
    def on_model_save(
        self,
        path: Path,
        epoch: int,
        global_step: int,
        module: nn.Module,
        project_name: str,
        log_folder: Path,
        data_root: str | None,
    ) -> None:
        """A checkpoint or the trained model was written to the folder `path`."""

    @hook
    def on_training_end(
        self, module: nn.Module, global_step: int, project_name: str, log_folder: Path, data_root: str | None
    ) -> None:
        """The last step is done and the trained model is saved."""

    @hook
    def transform_caption(self, caption: str) -> str:
        """Gives the caption that the model is to see. Runs where data are loaded, perhaps in a worker process."""
        return caption

    @hook
    def transform_pil_image(self, img: Image) -> Image:
        """Gives the image that the model is to see, before it is cropped and normalised. Runs where data are loaded."""
        return img
