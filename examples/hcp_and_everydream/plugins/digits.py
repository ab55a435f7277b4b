"""Plugins for EveryDream2trainer, as they are."""

import logging

from plugins.plugins import BasePlugin


class NumberFirst(BasePlugin):
    """`a handwritten digit, seven` becomes `seven, a handwritten digit`: the text encoder reads the first two words."""

    def transform_caption(self, caption: str):
        return ", ".join(reversed(caption.split(", ")))


class Negative(BasePlugin):
    """Ink on paper becomes light on black."""

    def transform_pil_image(self, img):
        return 255 - img


class ExampleLoggingPlugin(BasePlugin):
    """What the hooks say, in the log."""

    def on_epoch_start(self, **kwargs):
        logging.info(f" ** epoch {kwargs['epoch']} of {kwargs['project_name']} begins at step {kwargs['global_step']}")

    def on_epoch_end(self, **kwargs):
        logging.info(f" ** epoch {kwargs['epoch']} is over after step {kwargs['global_step']}")
