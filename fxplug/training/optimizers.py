"""The optimizer of a run, by name, by import path or of the user's own, and the weights that it evaluates with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..core.errors import SpecError, TrainError
from ..core.spec.pass_file import get_arguments
from ..core.spec.yaml_source import quote_yaml
from .import_paths import construct, import_name
from .param_groups import check_scheduler, fill, find_by_name
from .train_section import Train, Use

PATH = ("train", "optimizer")


class LibraryOptimizer(NamedTuple):
    """An optimizer of another library: its import path, and the package that pip installs."""

    target: str
    package: str


LIBRARY_OPTIMIZERS = {
    "adamw8bit": LibraryOptimizer("bitsandbytes.optim:AdamW8bit", "bitsandbytes"),  # arXiv 2110.02861
    "prodigy": LibraryOptimizer("prodigyopt:Prodigy", "prodigyopt"),  # arXiv 2306.06101
    "schedule_free": LibraryOptimizer("schedulefree:AdamWScheduleFree", "schedulefree"),  # arXiv 2405.15682
}


def open_optimizer(
    given: Any, scheduler: Any, groups: list[dict[str, Any]], settings: Train
) -> torch.optim.Optimizer:
    """Return the optimizer of a run: the user's own, where one is `given`, else that of the settings.

    Raises SpecError and TrainError for one that does not fit the run, or the user's own scheduler.
    """
    if given is not None:
        check_optimizer(given, groups, settings)
    check_scheduler(scheduler, given)
    made: torch.optim.Optimizer = given or make_optimizer(settings.optimizer, groups)
    if settings.ema and has_own_weights(made):
        raise SpecError(f"{type(made).__name__} averages the weights itself: leave 'ema' out", path=("train", "ema"))
    return made


def make_optimizer(use: Use, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make an optimizer of torch.optim or of `LIBRARY_OPTIMIZERS`, by name in any case, or of an import path, over the groups
    of `choose`.

    Raises SpecError for an unknown name, a package that is not installed, and options that the optimizer does not take.
    """
    kind = _kind_of(use)
    given = [{"params": g["params"], "name": g["name"], "lr": g["lr"], "weight_decay": g["weight_decay"]} for g in groups]
    if "weight_decay" not in get_arguments(kind).names:
        for group in given:
            if group.pop("weight_decay"):
                raise SpecError(f"{kind.__name__} has no weight_decay", path=("train", "weight_decay"))
    made = construct(kind, use, PATH, given)
    if not isinstance(made, torch.optim.Optimizer):
        raise SpecError(f"'{use.name}' returned a {type(made).__name__}, not a torch optimizer", path=PATH)
    if "closure" in get_arguments(made.step).required:
        finding = f"{use.name} computes the loss several times per step, which is not supported: use another optimizer"
        raise SpecError(finding, path=PATH)
    if ":" not in use.name:
        _try_optimizer(kind, use, given)
    return made


def _kind_of(use: Use) -> Any:
    """Return the class or function that a name or an import path stands for. Raises SpecError."""
    if (library := LIBRARY_OPTIMIZERS.get(use.name.lower())) is not None:
        if find_spec(library.package) is None:
            raise SpecError(f"needs the package '{library.package}': pip install {library.package}", path=(*PATH, use.name))
        return import_name(library.target, PATH)
    known = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim) if _is_optimizer(getattr(torch.optim, name))}
    return find_by_name(use, known, "optimizer", tuple(LIBRARY_OPTIMIZERS))


def _try_optimizer(kind: Any, use: Use, groups: list[dict[str, Any]]) -> None:
    """Raise SpecError for options and rates that an optimizer accepts but fails with in its first step.

    The trial has a parameter for each group, since some optimizers (Prodigy) take one rate for all groups only.
    """
    device = groups[0]["params"][0].device if groups and groups[0]["params"] else None
    tried = [nn.Parameter(torch.zeros(2, 2, device=device)) for _ in groups]
    for parameter in tried:
        parameter.grad = torch.ones_like(parameter)
    rows = zip(groups, tried, strict=True)
    made = construct(kind, use, PATH, [{**group, "params": [parameter]} for group, parameter in rows])
    try:
        begin_training(made)
        made.step()
    except Exception as error:  # the optimizer's, of what it was given
        finding = f"{use.name} fails in its first step: {type(error).__name__}: {error}"
        raise SpecError(finding, path=(*PATH, use.name)) from error
    if not all(parameter.isfinite().all() for parameter in tried):
        raise SpecError(f"{use.name} makes weights that are not finite", path=(*PATH, use.name))


def check_optimizer(optimizer: Any, groups: list[dict[str, Any]], settings: Train) -> None:
    """Raise TrainError for an optimizer of the user's that lacks a trainable parameter or has another rate than its pass;
    SpecError for what is no optimizer, and for settings that it replaces."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        finding = f"must be a name, one name with its options, or a torch optimizer, not {quote_yaml(optimizer)}"
        raise SpecError(finding, path=PATH)
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for group in groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            if id(parameter) not in of:
                finding = f"the optimizer does not have '{name}', which trains"
                raise TrainError(
                    f"{finding}: create it with the parameters of the rewritten module, or set it in the configuration"
                )
            for key in group["said"]:
                found = of[id(parameter)].get(f"initial_{key}", of[id(parameter)].get(key))
                if found != group[key]:
                    text = f"'{group['name']}' says {key}: {group[key]}, and the optimizer has {found} for '{name}'"
                    raise TrainError(f"{text}: create it with fxplug.trainable(module), which has it")
    for key in ("lr", "weight_decay", "optimizer", "groups"):
        if getattr(settings, key) != Train.model_fields[key].default:
            raise SpecError("has no effect beside an optimizer that was made elsewhere: set it there", path=("train", key))


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def with_loss_scale(optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> Any:
    """Return an optimizer as accelerate wraps it for a loss scale; the optimizer itself where there is none.

    The wrapper looks for further packages on sys.path in each step, which takes as long as a small optimizer's step.
    """
    return optimizer if accelerator.scaler is None else accelerator.prepare_optimizer(optimizer, device_placement=False)


# --- optimizers that train other weights than they evaluate with


def has_own_weights(optimizer: Any) -> bool:
    """Return whether an optimizer fills the parameters with other weights in `eval()` than in `train()`, as those of
    schedulefree do (arXiv 2405.15682)."""
    return callable(getattr(optimizer, "eval", None)) and any("train_mode" in group for group in optimizer.param_groups)


def begin_training(optimizer: Any) -> None:
    """Fill the parameters with the weights that an optimizer trains."""
    if has_own_weights(optimizer):
        optimizer.train()


def end_training(optimizer: Any) -> None:
    """Fill the parameters with the weights that an optimizer evaluates with, until training begins again."""
    if has_own_weights(optimizer):
        optimizer.eval()


@contextmanager
def use_evaluation_weights(optimizer: Any, trained: Mapping[str, Tensor]) -> Iterator[None]:
    """Fill the trained parameters with the weights that an optimizer evaluates with, inside the context.

    After it they are as before, to the bit. The optimizer's own `train()` computes them from the others, and rounds.
    """
    if not has_own_weights(optimizer):
        yield
        return
    kept = {name: parameter.detach().clone() for name, parameter in trained.items()}
    modes = [group["train_mode"] for group in optimizer.param_groups]
    optimizer.eval()
    try:
        yield
    finally:
        for group, mode in zip(optimizer.param_groups, modes, strict=True):
            group["train_mode"] = mode
        fill(trained, kept)
