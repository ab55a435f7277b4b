"""What a task is told before a run, what it makes of an image, and what it trains beside the module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..config.run_config import check_settings, read_passes
from ..core.errors import FxplugError, SpecError, prefix_path
from ..core.ir.traced_module import TracedModule
from ..core.rewriter.applying import apply
from ..core.rewriter.matcher import find
from ..lowerings.regions.swapping import BlockSwap
from .distributed import prepare, set_mode
from .evaluation import move
from .param_groups import BASE, HALVES, choose, make_frozen_filter
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
    swap: BlockSwap | None = None,
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
        swap=swap,
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


def with_assistant(module: TracedModule, settings: Train, base: Path, device: torch.device) -> TracedModule:
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
            raise SpecError(f"'{settings.assistant}' cannot be added to this module: {error}") from error
    for name, parameter in made.named_parameters():
        if name.startswith(f"{ASSISTANT}."):
            parameter.requires_grad_(False)
    made.get_submodule(ASSISTANT).to(device)  # the others are where they are to be
    return made


def list_trained_beside(task: Task, settings: Train, processes: int) -> list[dict[str, Any]]:
    """List the groups of the parameters that train beside the module: those of a text encoder, and of further models of a
    pipeline. Raises SpecError where that is not possible."""
    if not task.trains or (task.encoder is None and not task.beside):
        return []
    denoisers = [name for name, part in task.beside.items() if not part.encodes]
    if processes > 1 or settings.shard or settings.parallel is not None:
        if denoisers:
            finding = f"{', '.join(denoisers)} trains beside another one in one process only, without 'shard' and 'parallel'"
            raise SpecError(f"{finding}: train each part by itself", path=("model", "part"))
        finding = "a text encoder trains in one process only, without 'shard' and 'parallel'"
        raise SpecError(finding, path=("train", "task", settings.task.name, "text"))
    if settings.assistant and denoisers:
        raise SpecError(f"is for one denoiser, and {denoisers[0]} trains beside it: train each part by itself",
                        path=("train", "assistant"))  # fmt: skip
    groups = task.encoder.groups(settings) if task.encoder is not None else []
    for name, part in task.beside.items():
        for group in choose(part.module, settings.model_copy(update=dict(part.settings)), others=True):
            if settings.precision == "fp32" and (half := next((dtype for dtype in group["dtypes"] if dtype in HALVES), None)):
                # where nothing of the module trains, whose dtype would say it
                wanted = {torch.float16: "fp16", torch.bfloat16: "bf16"}[half]
                finding = f"the trained parameters of {name} are {str(half).removeprefix('torch.')}: set {wanted}"
                raise SpecError(finding, path=("train", "precision"))
            group["name"] = name if group["name"] == BASE else f"{name}.{group['name']}"
            groups.append({**group, "names": [f"{name}.{each}" for each in group["names"]]})
    return groups


def list_rewritten_parts(module: TracedModule, task: Task) -> dict[str, TracedModule]:
    """List the modules of a run that passes are in, by what the names of their parameters begin with: "", `text_encoder.` or
    `transformer_2.`.

    Raises SpecError for a module with a part or pass of such a name, as two parameters could have one name then.
    """
    others = {name: part.module for name, part in task.beside.items()}
    if task.encoder is not None and task.encoder.traced is not None:
        others["text_encoder"] = task.encoder.traced
    if (taken := next((name for name in others if name in dict(module.named_children())), None)) is not None:
        what = "the text encoder" if taken.startswith("text_encoder") else "another model"
        finding = f"the module has a part or a pass '{taken}', and so is {what} named in a run: rename it"
        raise SpecError(finding, path=("passes",))
    return {"": module} | {f"{name}.": one for name, one in others.items()}


def list_whole_parts(parts: Mapping[str, TracedModule], task: Task) -> dict[str, TracedModule]:
    """List those of the rewritten parts of which a gradient must reach each block: pipelines leave out last layers of text
    encoders, as Stable Diffusion XL does."""
    encoders = {f"{name}." for name, part in task.beside.items() if part.encodes}
    return {before: one for before, one in parts.items() if before not in encoders}


def prepare_beside(task: Task, settings: Train, accelerator: Accelerator) -> None:
    """Make what steps run of the denoisers that train beside the module, as `prepare` makes it of the module. Raises
    SpecError."""
    for part in task.beside.values():
        if not part.encodes:
            names = {name for name, p in part.module.named_parameters() if p.requires_grad}
            frozen = make_frozen_filter(part.module, names, settings.trainable)
            part.runner, _ = prepare(part.module, settings, frozen, accelerator)


class Modes:
    """Modes of all that trains: of the `module`, what runs in its place, and the models beside it."""

    def __init__(self, runner: nn.Module, module: TracedModule, settings: Train, task: Task) -> None:
        self.runner, self.module, self.settings, self.task = runner, module, settings, task
        self.known: list[tuple[nn.Module, bool]] = []

    def set(self) -> None:
        """Put all that trains into its mode."""
        set_mode(self.runner, self.module, self.settings.mode)
        for part in self.task.beside.values():
            set_mode(part.runner, part.module, "eval" if part.encodes else self.settings.mode)
        runners = [self.runner, *(part.runner for part in self.task.beside.values())]
        self.known = [(each, each.training) for runner in runners for each in runner.modules()]

    def renew(self) -> None:
        """Put all that trains into its mode again, where a module has another one by now: to set each takes long."""
        if not self.known or any(each.training is not mode for each, mode in self.known):
            self.set()


def check_task_settings(task: Any, given: Mapping[str, Any]) -> Train:
    """Return the `train` section of keyword arguments. Raises SpecError for what a configuration would not take either."""
    known = {"task": type(task).__name__, "epochs": None if "steps" in given else 1, **given}
    made: Train = check_settings(Train, known, "train")
    return made
