"""What a task is told before a run, what it makes of an image, and what it trains beside the module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..config.run_config import check_settings, read_passes
from ..core.errors import FxplugError, SpecError, prefix_path
from ..core.ir.traced_module import TracedModule
from ..core.rewriter.applying import apply
from ..core.rewriter.matcher import find
from .evaluation import move
from .plugins import Plugins
from .tasks.task import Task, TaskInfo
from .train_section import Train

ASSISTANT = "assistant"  # the name of the pass


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
    """Set the task up, and give the loaders its image transforms. Raises SpecError with its place."""
    loader = tests or data
    info = TaskInfo(
        size=data.size or (0, 0),
        device=device,
        classes=data.classes,
        timm=timm,
        base=base,
        examples=lambda count: move(loader.first(count), device),
        prompt=plugins.modify_sample_prompt,
        seed=seed,
        trigger=getattr(getattr(data, "spec", None), "trigger", None),
        sizes=tuple(dict.fromkeys(
            size for one in (data, tests) for size in getattr(one, "sizes", ()) if size is not None
        )),
    )  # fmt: skip
    for one, part in ((data, ("data",)), (tests, ("data", "test"))):
        for key, read, kind in (("masks", "loss_mask", "masks"), ("prior", "prior", "prior images")):
            if getattr(getattr(one, "spec", None), key, None) is not None and read not in task.reads:
                raise SpecError(f"has no effect: the loss of {type(task).__name__} reads no {kind}", path=(*part, key))
    try:
        task.setup(module, info)
    except SpecError as error:
        if error.path[:1] in (("train",), ("data",), ("model",)):
            raise
        with prefix_path("train", "task", name):
            raise
    for one, train in ((data, True), (tests, False)):
        if one is not None and one.transform is None:
            one.transform = task.transform(train)
            spec = getattr(one, "spec", None)
            if one.transform and spec and not spec.conditions and (spec.flip or spec.crop == "random"):
                finding = "has no effect: the task crops and flips itself (classify: augment)"
                raise SpecError(finding, path=("data", "flip" if spec.flip else "crop"))


def with_assistant(module: TracedModule, settings: Train, base: Path) -> TracedModule:
    """Return the module that steps train: with the frozen adapter of `assistant`, if there is one, else the module itself.

    It is another graph on the same weights: the module, of which pictures, tests and files are, stays without it. Such an
    adapter undoes the distillation of a model, as long as another one learns beside it. Raises SpecError.
    """
    if settings.assistant is None:
        return module
    with prefix_path("train", "assistant"):
        if settings.shard or settings.parallel is not None:
            raise SpecError("is for runs without 'shard' and 'parallel'")
        given = {"file": settings.assistant, "slots": 0, "train": False, "name": ASSISTANT}
        try:
            (found,) = read_passes([{"adapter": given}], base)
            made = apply(module, find(module, found))
        except FxplugError as error:
            raise SpecError(f"'{settings.assistant}' cannot be put beside what trains: {error}") from error
    for name, parameter in made.named_parameters():
        if name.startswith(f"{ASSISTANT}."):
            parameter.requires_grad_(False)
    return made.to(next(module.parameters()).device)


def list_trained_beside(task: Task, settings: Train, processes: int) -> list[dict[str, Any]]:
    """List the groups of the text encoder's parameters that train. Raises SpecError where that is not possible."""
    if not task.trains or task.encoder is None:
        return []
    if processes > 1 or settings.shard or settings.parallel is not None:
        finding = "a text encoder trains in one process only, without 'shard' and 'parallel'"
        raise SpecError(finding, path=("train", "task", settings.task.name, "text"))
    return task.encoder.groups(settings)


def list_rewritten_parts(module: TracedModule, task: Task) -> dict[str, TracedModule]:
    """List the modules of a run that passes are in, by what the names of their parameters begin with: "" or `text_encoder.`.

    Raises SpecError for a module with a part or pass of the encoder's name, as two parameters could have one name then.
    """
    encoder = task.encoder.traced if task.encoder is not None else None
    if encoder is not None and "text_encoder" in dict(module.named_children()):
        finding = "the module has a part or a pass 'text_encoder', and so is the text encoder named in a run: rename it"
        raise SpecError(finding, path=("passes",))
    return {"": module} | ({} if encoder is None else {"text_encoder.": encoder})


def check_task_settings(task: Any, given: Mapping[str, Any]) -> Train:
    """Return the `train` section of keyword arguments. Raises SpecError for what a configuration would not take either."""
    known = {"task": type(task).__name__, "epochs": None if "steps" in given else 1, **given}
    made: Train = check_settings(Train, known, "train")
    return made
