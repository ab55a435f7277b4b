"""The hooks of a training run: when each comes, the data it gets by name, and the base class that a plugin may have.

A class written for `from plugins.plugins import BasePlugin` is used as it is: where a run loads its plugins, that import gives
this module. The names and what they count are those of
EveryDream2trainer (github.com/victorchall/EveryDream2trainer): one batch is one step, whether or not the optimizer steps after
it (`accumulate`). `epoch`, `local_step` and `global_step` count from 0; `global_step` is the number of batches that were done
before, the same at the start and the end of a step. `batch` is the dict that is trained on, on the device: what a plugin
changes in it before the forward pass is what the model sees.

Hooks that begin with `on_` also get COMMON: `project_name` (the name of the output folder), `log_folder` (its path, as text),
`data_root` (the folder of the training data) and `ed_state` (see fxplug/compat/everydream/state.py). A new hook is a line of
OFFERED, a method of BasePlugin, and one `plugins.call("its_name", ...)` where it happens.
"""

from __future__ import annotations

from typing import Any

COMMON = ("project_name", "log_folder", "data_root", "ed_state")
_RESUMED = ("resume_ckpt", "disable_unet_training", "disable_textenc_training")
_STEP = ("epoch", "global_step", "local_step", "batch")
_EPOCH = ("epoch", "global_step")
OFFERED: dict[str, tuple[str, ...]] = {
    "on_model_load": ("module", "config", "optimizer_config", *_RESUMED, *COMMON),
    "on_training_start": ("module", "optimizer", "config", "steps", "epochs", "global_step", *COMMON),
    "on_epoch_start": (*_EPOCH, "epoch_length", "arg_update_callback", "module", *COMMON),
    "on_epoch_end": (*_EPOCH, "loss", "metrics", "arg_update_callback", "module", *COMMON),
    "on_step_start": (*_STEP, "module", *COMMON),
    "on_backpropagation": ("loss", *_STEP, "module", *COMMON),
    "on_step_end": (*_STEP, "loss", "lr", "seconds", "module", *COMMON),
    "on_model_save": ("path", "save_folder", "diffusers_save_path", *_EPOCH, "module", *COMMON),
    "on_training_end": ("module", "global_step", *COMMON),
    "transform_caption": ("caption",),
    "transform_pil_image": ("img", "pil"),
    "modify_sample_prompt": ("prompt",),
}


class BasePlugin:
    """All hooks, doing nothing. A plugin has any of these methods, each with any of the data as parameters, or `**kwargs`.

    It need not be a subclass. A method that a subclass does not override is never called.
    """

    def on_model_load(self, **kwargs: Any) -> None:
        """Run when the rewritten model is built, with its initial weights; on a resume the checkpoint is read next.

        There is no optimizer yet: tokens that a plugin adds to the text encoder will train. `optimizer_config` has the settings
        of the optimizer; `resume_ckpt` is the folder of the text encoder; the last two are what does not train.
        """

    def on_training_start(self, **kwargs: Any) -> None:
        """Run before the first step, when everything is made. After a resume `global_step` is not 0."""

    def on_epoch_start(self, **kwargs: Any) -> None:
        """Run when an epoch of `epoch_length` batches begins.

        `arg_update_callback("grad_accum", 4)` sets `accumulate` from the next start of an epoch on: this one.
        """

    def on_epoch_end(self, **kwargs: Any) -> None:
        """Run after an epoch, with its mean loss, and the `metrics` of the test after it (empty when there was none)."""

    def on_step_start(self, **kwargs: Any) -> None:
        """Run before a batch, the `local_step`-th of its epoch."""

    def on_backpropagation(self, **kwargs: Any) -> Any:
        """Run after the backward pass of each batch, before the optimizer: gradients may be changed in place.

        Gradients that are returned, by the parameters' names, replace the current ones. They are those of all batches since the
        last step of the optimizer, in fp16 times the loss scale. `loss` is a scalar without its graph.
        """

    def on_step_end(self, **kwargs: Any) -> None:
        """Run after a batch, and after the optimizer's step if the batch was the last it waited for.

        `loss` is the mean over the batches of the optimizer's step, else that of the batch; `seconds` is how long it took.
        """

    def on_model_save(self, **kwargs: Any) -> None:
        """Run after a checkpoint or the trained model was written to the folder `path`, which has two more names."""

    def on_training_end(self, **kwargs: Any) -> None:
        """Run after the last step; `module/` is written next, with the plugin's changes to the weights."""

    def transform_caption(self, caption: Any) -> Any:
        """Return the caption that the model is given. Runs where data are loaded, possibly in a worker process."""
        return caption

    def transform_pil_image(self, img: Any) -> Any:
        """Return the image that the model is given. Runs where data are loaded, possibly in a worker process.

        `img` is an array uint8 [h, w, 3] ([h, w] of images with one channel), cropped, resized and mirrored already; a plugin
        with an argument `pil` gets it as a PIL image. It returns either, or floats from 0 to 1, of the same size. Where the
        task crops by itself (classify), it is the whole image, and the returned size is free.
        """
        return img

    def modify_sample_prompt(self, prompt: Any) -> Any:
        """Return the caption that a sample image is made with."""
        return prompt
