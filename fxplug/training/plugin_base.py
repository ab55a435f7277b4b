"""The base class that a plugin may have.

A class written for `from plugins.plugins import BasePlugin` is used as it is: where a run loads its plugins, that import gives
this module unless the run's own `plugins` folder has a `plugins.py`. The names are those of `plugins/plugins.py`
(github.com/victorchall/EveryDream2trainer); the data that its trainer gives to each hook come under the same names, see
fxplug/training/plugin_hooks.py. A method that a class does not override is never called.
"""

from __future__ import annotations

from typing import Any


class BasePlugin:
    """All hooks, doing nothing."""

    def on_model_load(self, **kwargs: Any) -> None:
        """The rewritten model is there, with the weights it starts from."""

    def on_training_start(self, **kwargs: Any) -> None:
        """Everything is made and the first step comes next."""

    def on_training_end(self, **kwargs: Any) -> None:
        """The last step is done and the trained model is saved."""

    def on_epoch_start(self, **kwargs: Any) -> None:
        """An epoch begins."""

    def on_epoch_end(self, **kwargs: Any) -> None:
        """An epoch is over."""

    def on_step_start(self, **kwargs: Any) -> None:
        """A batch comes next."""

    def on_step_end(self, **kwargs: Any) -> None:
        """A batch is done."""

    def on_backpropagation(self, **kwargs: Any) -> Any:
        """The backward pass of a batch is done; gradients, by the parameters' names, may be returned."""

    def on_model_save(self, **kwargs: Any) -> None:
        """A checkpoint or the trained model was written."""

    def transform_caption(self, caption: Any) -> Any:
        """Gives the caption that the model is to see: here the one it was given."""
        return caption

    def transform_pil_image(self, img: Any) -> Any:
        """Gives the image that the model is to see: here the one it was given."""
        return img

    def modify_sample_prompt(self, prompt: Any) -> Any:
        """Gives the caption that a sample image is made with: here the one it was given."""
        return prompt
