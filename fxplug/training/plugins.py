"""What a run tells plugins, and asks them: here of none, which costs nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ..core import extensions
from ..core.errors import SpecError, format_fields
from ..core.ir.traced_module import TracedModule
from .tasks.task import Task
from .train_section import Train


@dataclass(frozen=True)
class RunStart:
    """A run as plugins see it before its first step.

    `data` is the loader of the training data, `out` the folder of the run, None where it writes nothing; `trains` says whether
    parameters of the module train. `keep_at` writes a checkpoint of the moment to a folder.
    """

    module: TracedModule
    task: Task
    data: Any
    settings: Train
    config: Mapping[str, Any]
    out: Path | None
    trains: bool
    keep_at: Callable[[Path], None]

    __repr__ = format_fields


class Plugins:
    """The plugins of a run that has none. An extension overrides what they answer.

    `note` is told in a line of text what goes wrong while a run goes on; `sample` names the one that is transformed.
    """

    transforms = False  # whether any plugin changes what is loaded; a loader needs the others not
    sample = ""

    def __init__(self) -> None:
        self.note: Callable[[str], object] = logging.getLogger(__name__).warning

    def has(self, hook: str) -> bool:
        """Return whether a plugin has this hook, so that unused data need not be made."""
        return False

    def call(self, hook: str, **data: Any) -> None:
        """Call the hook of every plugin that has it, in the order of the configuration."""

    def begin(self, run: RunStart) -> None:
        """Receive the module of a run, before it is lowered, so that hooks on it are kept; there is no optimizer yet."""

    def begin_steps(self, optimizer: Any) -> None:
        """Receive the optimizer, once it is made."""

    def see_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch on the device, with the further entries that plugins expect."""
        return batch

    def transform_caption(self, caption: str) -> str:
        """Return the caption that the model is given."""
        return caption

    def transform_pil_image(self, img: Image.Image) -> Image.Image:
        """Return the image that the model is given."""
        return img

    def modify_sample_prompt(self, prompt: str) -> str:
        """Return the caption that a sample image is made with."""
        return prompt

    def summary(self, total: float) -> list[str]:
        """List the lines to print at the end of a run of `total` seconds."""
        return []


def load_plugins(specs: Sequence[Any], *, base: str | Path | None, on_error: str) -> Plugins:
    """Load the plugins that a run names. Raises SpecError at the place of an entry that is no plugin."""
    if isinstance(specs, (list, tuple)) and not specs:
        return Plugins()
    load = extensions.import_part("hooks", "training_plugins")
    if load is None:
        raise SpecError(f"no installed extension loads plugins{extensions.describe_unusable()}", path=("train", "plugins"))
    made: Plugins = load(specs, base=base, on_error=on_error)
    return made
