"""Pipelines of the same models for other tasks: from a picture, within a mask, and along a control image."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...core.errors import SpecError, get_first_line
from ...pipelines.opening import call_parameters

LOG = logging.getLogger("fxplug.serving")
IMAGE, INPAINT, CONTROL = "image", "inpaint", "control:"


def make_tasks(pipe: Any, controls: Mapping[str, Path]) -> dict[str, Any]:
    """Make the pipelines of other tasks that diffusers has for the models of a pipeline.

    Args:
        pipe: The pipeline.
        controls: Folders of ControlNets, by name.

    Returns:
        The pipelines: `image`, `inpaint` and `control:NAME`. One that diffusers does not have for this pipeline is left out.

    Raises:
        SpecError: For a folder without a ControlNet, and one that does not go with the pipeline.
    """
    from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting

    found = {}
    for task, kind in ((IMAGE, AutoPipelineForImage2Image), (INPAINT, AutoPipelineForInpainting)):
        try:
            found[task] = _derive(kind, pipe)
        except Exception as error:  # whatever a class raises for models that it is not for
            LOG.info("no task %s: %s", task, get_first_line(error))
    for name, folder in controls.items():
        found[f"{CONTROL}{name}"] = _make_control(pipe, name, folder)
    return found


def _derive(kind: Any, pipe: Any, **parts: Any) -> Any:
    """Make a pipeline of the same models, which keeps their dtype."""
    dtypes = {part.dtype for part in pipe.components.values() if isinstance(part, torch.nn.Module) and hasattr(part, "dtype")}
    more = {"torch_dtype": next(iter(dtypes))} if len(dtypes) == 1 else {}
    made = kind.from_pipe(pipe, **parts, **more)
    if hasattr(made, "set_progress_bar_config"):
        made.set_progress_bar_config(disable=True)
    return made


def _make_control(pipe: Any, name: str, folder: Path) -> Any:
    import diffusers
    from diffusers import AutoPipelineForText2Image

    path = ("controls", name)
    try:
        kind = getattr(diffusers, diffusers.ControlNetModel.load_config(folder)["_class_name"])
        control = kind.from_pretrained(folder, torch_dtype=pipe.dtype).to(pipe.device).eval()
    except Exception as error:  # whatever a folder of something else raises
        raise SpecError(f"'{folder}' has no ControlNet: {get_first_line(error)}", path=path) from None
    try:
        made = _derive(AutoPipelineForText2Image, pipe, controlnet=control)
    except Exception as error:  # whatever a class of diffusers raises for models that it is not for
        raise SpecError(f"diffusers has no pipeline of {type(pipe).__name__} with this ControlNet: {get_first_line(error)}",
                        path=path) from None  # fmt: skip
    if "controlnet" not in made.components:
        raise SpecError(f"diffusers has no pipeline of {type(pipe).__name__} with a ControlNet", path=path)
    return made


def find_picture_argument(task: str, pipe: Any) -> str:
    """Find the argument that a task's pipeline takes the picture, or the control image, by.

    Args:
        task: The task.
        pipe: Its pipeline.

    Returns:
        The name.
    """
    return "control_image" if task.startswith(CONTROL) and "control_image" in call_parameters(pipe) else "image"
