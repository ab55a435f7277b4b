"""What a task is told before a run, and what it makes of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..core.errors import SpecError, below
from ..core.ir.traced_module import TracedModule
from .evaluation import moved
from .plugins import Plugins
from .tasks.task import Task, TaskInfo


def set_up_task(
    task: Task,
    module: TracedModule,
    data: Any,
    tests: Any,
    *,
    name: str,
    device: torch.device,
    base: Path,
    timm: str | None,
    plugins: Plugins,
    seed: int,
) -> None:
    """Tell the task what there is, and the loaders what the task makes of an image. Raises SpecError with its place."""
    loader = tests or data
    info = TaskInfo(
        size=data.size or (0, 0),
        device=device,
        classes=data.classes,
        timm=timm,
        base=base,
        examples=lambda count: moved(loader.first(count), device),
        prompt=plugins.modify_sample_prompt,
        seed=seed,
    )
    try:
        task.setup(module, info)
    except SpecError as error:
        if error.path[:1] in (("train",), ("data",)):
            raise
        with below("train", "task", name):
            raise
    for one, train in ((data, True), (tests, False)):
        if one is not None and one.transform is None:
            one.transform = task.transform(train)
            spec = getattr(one, "spec", None)
            if one.transform and spec and not spec.conditions and (spec.flip or spec.crop == "random"):
                finding = "has no effect: the task crops and flips itself (classify: augment)"
                raise SpecError(finding, path=("data", "flip" if spec.flip else "crop"))
