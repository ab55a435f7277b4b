"""What a run tells plugins, and asks them: here of none, which costs nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ..core import extensions
from ..core.errors import SpecError, brief_fields
from ..core.ir.traced_module import TracedModule
from ..core.spec.train_section import Train
from .tasks.task import Task


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

    __repr__ = brief_fields


class Plugins:
    """The plugins of a run that has none. An extension overrides what they answer.

    `note` is told in a line of text what goes wrong while a run goes on; `sample` names the one that is transformed.
    """

    transforms = False  # whether any plugin changes what is loaded; a loader needs the others not
    sample = ""

    def __init__(self) -> None:
        self.note: Callable[[str], object] = logging.getLogger(__name__).warning

    def has(self, hook: str) -> bool:
        """Whether a plugin has this hook, so that its data need not be made for nobody."""
        return False

    def call(self, hook: str, **data: Any) -> None:
        """Tell every plugin that has the hook, in the written order."""

    def begin(self, run: RunStart) -> None:
        """See the module of a run, before it is lowered, so that hooks on it are kept; there is no optimizer yet."""

    def begin_steps(self, optimizer: Any) -> None:
        """See the optimizer, once it is made."""

    def see_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch on the device, with what plugins expect beside it."""
        return batch

    def transform_caption(self, caption: str) -> str:
        """The caption that the model is to see."""
        return caption

    def transform_pil_image(self, img: Image.Image) -> Image.Image:
        """The image that the model is to see."""
        return img

    def modify_sample_prompt(self, prompt: str) -> str:
        """The caption that a sample image is made with."""
        return prompt

    def summary(self, total: float) -> list[str]:
        """List what is to be said at the end of a run of `total` seconds."""
        return []


def load_plugins(specs: Sequence[Any], *, base: str | Path | None, on_error: str) -> Plugins:
    """Load the plugins that a run names. Raises SpecError at the place of one that is none."""
    if isinstance(specs, (list, tuple)) and not specs:
        return Plugins()
    load = extensions.import_part("hooks", "training_plugins")
    if load is None:
        raise SpecError(f"no extension is there that loads plugins{extensions.unusable_note()}", path=("train", "plugins"))
    made: Plugins = load(specs, base=base, on_error=on_error)
    return made
