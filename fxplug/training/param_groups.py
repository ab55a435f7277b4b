"""What trains: parameters of the passes, chosen ones of the base, the optimizer's groups, and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..core.errors import SpecError, TrainError, did_you_mean
from ..core.ir.traced_module import BEFORE_TRAINING, TRAINED, TracedModule
from ..core.quantised import is_packed
from ..core.spec.addresses import is_pattern, select
from ..core.spec.pass_file import accepted_arguments, check_known
from ..core.spec.train_section import Train, Use
from ..core.torch_internals.tensors import lerp_all
from .tasks.task import Task, construct, imported

HALVES = (torch.float16, torch.bfloat16)
SHAPES = ("constant", "linear", "cosine")
BASE = "base"  # the group of what trains of the base
KEPT = 1 << 30  # bytes: of more than that no copy is kept for formats that hold differences


def choose(module: TracedModule, settings: Train, *, others: bool = False) -> list[dict[str, Any]]:
    """Set `requires_grad` of every parameter, and give the optimizer's groups: `name`, `params`, `names`, `lr`, `weight_decay`,
    and the `dtypes` that the parameters had.

    A pass is one group with its own `lr` and `weight_decay`, else the run's; one that says `train: false` is frozen. Of the
    base, what `trainable` names is one group. In fp16 and bf16 runs, half-precision parameters that train become float32, as
    PEFT and diffusers have it: the forward casts them, the optimizer keeps their small changes. Raises TrainError when
    nothing trains, here or among `others`, SpecError for a pattern that names no parameter.
    """
    groups = _groups(module, settings.trainable, others)
    named = dict(module.named_parameters())
    for group in groups:
        for key, own in (("lr", settings.lr), ("weight_decay", settings.weight_decay)):
            group.setdefault(key, own)
        group["dtypes"] = [named[name].dtype for name in group["names"]]
        for name in group["names"]:
            if settings.precision != "fp32" and named[name].dtype in HALVES:
                named[name].data = named[name].data.float()
    return _trained(module, groups)


def trainable(module: TracedModule, *base: str) -> list[dict[str, Any]]:
    """Freeze a rewritten module but for what its passes put in, for a training loop of one's own.

    `torch.optim.AdamW(fxplug.trainable(new), lr=1e-3)`: the groups are torch's, `params` with a `name`, and the `lr` and
    `weight_decay` of a pass that says its own. `base` names what trains beside that, as `trainable` of a configuration does:
    paths and patterns of parameters or of modules around them (`"norm"`, `"blocks.11.**"`). Raises TrainError when nothing
    trains, for a module that was lowered, and for slots; SpecError for a pattern that names no parameter.
    """
    return [{key: value for key, value in group.items() if key != "names"} for group in _trained(module, _groups(module, base))]


def _trained(module: TracedModule, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with their parameters, which train, and nothing else does; the module notes those of the base.

    `save_adapter` writes what is noted, so that it is kept once a name is there: it may have been trained before.
    """
    named = dict(module.named_parameters())
    base = [name for group in groups if group["name"] == BASE for name in group["names"]]
    module.meta[TRAINED] = [*dict.fromkeys([*module.meta.get(TRAINED, []), *base])]
    before = vars(module).setdefault(BEFORE_TRAINING, {})
    new = {name: named[name] for name in base if name not in before and not named[name].is_meta}
    if sum(value.nbytes for value in new.values()) <= KEPT:
        before |= {name: value.detach().cpu().clone() for name, value in new.items()}
    for parameter in named.values():
        parameter.requires_grad_(False)
    for group in groups:
        group["params"] = [named[name].requires_grad_(True) for name in group["names"]]
    return groups


def _groups(module: TracedModule, base: Sequence[str], others: bool = False) -> list[dict[str, Any]]:
    """What trains, by name: the passes, and of the base what is named; `lr` and `weight_decay` where a pass says them."""
    named = dict(module.named_parameters())
    canonical = {id(parameter): name for name, parameter in named.items()}
    entries = module.meta.get("passes", [])
    owner = {name: entry["name"] for entry in entries for name in named if name.startswith(f"{entry['name']}.")}
    groups: list[dict[str, Any]] = []
    if "source" in module.meta:
        raise TrainError(
            "this module is lowered, and a lowered module cannot be trained: train the one that it was made from, "
            "meta['source']"
        )
    slotted = [entry["name"] for entry in entries if entry.get("slots") and entry["train"]]
    if slotted:
        raise TrainError(
            f"pass '{slotted[0]}' has slots, which cannot be trained: train the pass without slots and load the saved adapter, "
            "or set train: false"
        )
    for entry in entries:
        names = [name for name in named if owner.get(name) == entry["name"] and named[name].is_floating_point()]
        groups += _of_pass(entry, names)
    every = module.named_parameters(remove_duplicate=False)
    aliases = {name: canonical[id(p)] for name, p in every if p.is_floating_point() and not is_packed(p)}
    chosen = named_by(base, {a: name for a, name in aliases.items() if name not in owner}, "the base", ("train", "trainable"))
    if chosen:
        groups.append({"name": BASE, "names": chosen})
    if not groups and not others:
        frozen = ", ".join(entry["name"] for entry in entries if not entry["train"])
        why = f"{frozen} has train: false" if frozen else "no pass has parameters" if entries else "there is no pass"
        raise TrainError(f"nothing trains: {why}; 'trainable' names parameters of the base ('**' is all of it)")
    return groups


def _of_pass(entry: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The groups of a pass whose parameters have these names: one, and one more for each part with a rate of its own."""
    parts = {f"{site['block']}.{part}.": own for site in entry["sites"] for part, own in site.get("rates", {}).items()}
    groups: dict[str, dict[str, Any]] = {}
    for name in names:
        part = next((part for part in parts if name.startswith(part)), "")
        said = {"train": entry["train"], "lr": entry["lr"], "weight_decay": entry["weight_decay"], **parts.get(part, {})}
        if said.pop("train"):
            called = f"{entry['name']}.{part[:-1].rpartition('.')[2]}" if part else entry["name"]
            own = {key: value for key, value in said.items() if value is not None}
            groups.setdefault(called, {"name": called, "names": [], **own})["names"].append(name)
    return list(groups.values())


def trained_beside(task: Task, settings: Train, processes: int) -> list[dict[str, Any]]:
    """The groups of what trains beside the module: of the text encoder. SpecError where that is not possible."""
    if not task.trains or task.encoder is None:
        return []
    if processes > 1 or settings.shard or settings.parallel is not None:
        finding = "a text encoder trains in one process only, without 'shard' and 'parallel'"
        raise SpecError(finding, path=("train", "task", settings.task.name, "text"))
    return task.encoder.groups(settings)


def rewritten_parts(module: TracedModule, task: Task) -> dict[str, TracedModule]:
    """The modules of a run that passes are in, by what the names of their parameters begin with: nothing, or `text_encoder.`.

    Raises SpecError for a module with a part or pass of the encoder's name, as two parameters could have one name then.
    """
    encoder = task.encoder.traced if task.encoder is not None else None
    if encoder is not None and "text_encoder" in dict(module.named_children()):
        finding = "the module has a part or a pass 'text_encoder', and so is the text encoder named in a run: rename it"
        raise SpecError(finding, path=("passes",))
    return {"": module} | ({} if encoder is None else {"text_encoder.": encoder})


def optimizer_config(task: Task, settings: Train) -> dict[str, Any]:
    """What trains and how, in the form of EveryDream2trainer's optimizer.json."""
    base = {"optimizer": settings.optimizer.name, **settings.optimizer.options}
    base |= {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if task.encoder is None:
        return {"base": base}
    rates = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    overrides = task.encoder.rates(settings) if task.trains else rates
    return {"base": base, "text_encoder_overrides": overrides, "text_encoder_freezing": task.encoder.freezing()}


def named_by(patterns: Sequence[str], names: Mapping[str, str], whose: str, path: tuple[str, ...]) -> list[str]:
    """The parameters that patterns name, themselves or by a module around them; `names` has each under all its names.

    SpecError, at the pattern's place below `path`, for one that names no parameter.
    """
    around = {alias: _prefixes(alias) for alias in names}
    known = {part for parts in around.values() for part in parts}
    chosen: set[str] = set()
    for index, pattern in enumerate(patterns):
        hits = set(select(pattern, sorted(known))) if is_pattern(pattern) else {pattern} & known
        if not hits:
            finding = f"'{pattern}' names no parameter of {whose}{did_you_mean(pattern, known)}"
            raise SpecError(finding, path=(*path, index))
        chosen.update(names[alias] for alias, parts in around.items() if hits.intersection(parts))
    return [name for name in dict.fromkeys(names.values()) if name in chosen]


def _prefixes(name: str) -> list[str]:
    """The modules around a parameter, the outermost first, and itself."""
    return [*accumulate(name.split("."), "{}.{}".format)]


def make_optimizer(use: Use, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of torch.optim by name in any case, or of an import path, over the groups of `choose`."""
    known = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim) if _is_optimizer(getattr(torch.optim, name))}
    kind = _find(use, known, "optimizer")
    given = [{"params": g["params"], "name": g["name"], "lr": g["lr"], "weight_decay": g["weight_decay"]} for g in groups]
    if "weight_decay" not in accepted_arguments(kind).names:
        for group in given:
            if group.pop("weight_decay"):
                raise SpecError(f"{kind.__name__} has no weight_decay", path=("train", "weight_decay"))
    made = construct(kind, use, ("train", "optimizer"), given)
    if not isinstance(made, torch.optim.Optimizer):
        raise SpecError(f"'{use.name}' returned a {type(made).__name__}, not a torch optimizer", path=("train", "optimizer"))
    if "closure" in accepted_arguments(made.step).required:
        finding = f"{use.name} computes the loss several times per step, which is not supported: use another optimizer"
        raise SpecError(finding, path=("train", "optimizer"))
    return made


def check_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """TrainError for an optimizer, made elsewhere, that lacks a parameter which trains."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for group in groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            if id(parameter) not in held:
                finding = f"the optimizer does not have '{name}', which trains"
                raise TrainError(
                    f"{finding}: create it with the parameters of the rewritten module, or set it in the configuration"
                )


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def make_scheduler(use: Use | None, optimizer: torch.optim.Optimizer, steps: int, per_epoch: int) -> tuple[Any, bool]:
    """A learning-rate scheduler, and whether it is stepped once an epoch (`per: epoch`) instead of once a step.

    `constant`, `linear` and `cosine` take `warmup` steps and fall to `floor` of the rate at the end; any of
    torch.optim.lr_scheduler goes by its name, any other by import path. A length that such a one needs (T_max, total_steps) is
    the run's own when it is not given.
    """
    options = dict(use.options) if use else {}
    per = options.pop("per", "step")
    if per not in ("step", "epoch"):
        raise SpecError(f"per must be step or epoch, not '{per}'", path=("train", "scheduler"))
    length = max(1, math.ceil(steps / per_epoch)) if per == "epoch" else steps
    if use is None or use.name in SHAPES:
        shape = _shape(use.name if use else "constant", length, options)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, shape), per == "epoch"
    package = torch.optim.lr_scheduler
    known = {name.lower(): getattr(package, name) for name in package.__all__ if name != "LRScheduler"}
    kind = _find(use, known, "scheduler", SHAPES)
    wanted = accepted_arguments(kind).names
    own = {"T_max": length, "total_steps": length, "max_lr": [group["lr"] for group in optimizer.param_groups]}
    replaced_by = {"total_steps": {"epochs", "steps_per_epoch"}}
    filled = {
        key: value
        for key, value in own.items()
        if key in wanted and key not in options and not replaced_by.get(key, set()) & options.keys()
    }
    made = construct(kind, Use(use.name, {**filled, **options}), ("train", "scheduler"), optimizer)
    return made, per == "epoch"


def _shape(name: str, length: int, options: Mapping[str, Any]) -> Callable[[int], float]:
    check_known(options, ("warmup", "floor", "per"), f"{name} has no option", path=("train", "scheduler", name))
    warmup, floor = options.get("warmup", 0), options.get("floor", 0.0)

    def rate(step: int) -> float:
        if step < warmup:
            return float((step + 1) / warmup)
        done = min(1.0, (step - warmup) / max(1, length - warmup))
        fall = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[name]
        return float(floor + (1 - floor) * fall)

    return rate


def _find(use: Use, known: Mapping[str, Any], what: str, more: tuple[str, ...] = ()) -> Any:
    if use.name.lower() in known:
        return known[use.name.lower()]
    if ":" not in use.name:
        names = [*more, *(kind.__name__ for kind in known.values())]
        near = did_you_mean(use.name, names) or did_you_mean(use.name.lower(), known)
        finding = f"torch has no {what} '{use.name}'{near}; for another one write 'package.module:Class'"
        raise SpecError(finding, path=("train", what))
    return imported(use.name, ("train", what))


def check_gradients(modules: Mapping[str, TracedModule], groups: list[dict[str, Any]]) -> list[str]:
    """After the first backward pass: TrainError for a block with a parameter that no gradient reached.

    Gives what of networks and of the base no gradient reached.

    A block is where a pass put one (`lora.blocks.0.attn.qkv.Lora`). A pass's network counts as a whole, since some have layers
    that their model never uses; so does each parameter of the base. What a plugin has frozen since is left out. `modules` are
    those that passes are in, by what their names begin with.
    """
    blocks, networks = set[str](), set[str]()
    for before, module in modules.items():
        blocks |= {f"{before}{name}" for name, part in module.named_modules() if getattr(part, "is_block", False)}
        entries = module.meta.get("passes", [])
        networks |= {f"{before}{entry['name']}.{network}" for entry in entries for network in entry["networks"]}
    held: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for group in groups:
        rows = zip(group["names"], group["params"], strict=True)
        for name, parameter in ((name, parameter) for name, parameter in rows if parameter.requires_grad):
            holder = next((prefix for prefix in _prefixes(name) if prefix in blocks | networks), name)
            held.setdefault(holder, []).append((name, parameter))
    lost = {holder: [name for name, p in inside if p.grad is None] for holder, inside in held.items()}
    whole = {holder for holder, inside in held.items() if len(lost[holder]) == len(inside)}
    wrong = whole if len(whole) == len(held) else {holder for holder in held if holder in blocks or holder in networks & whole}
    bad = [name for holder in held if holder in wrong for name in lost[holder]]
    if bad:
        more = f" and {len(bad) - 5} more" * (len(bad) > 5)
        raise TrainError(
            f"no gradient reached {', '.join(bad[:5])}{more} in the first step, because the loss does not depend on them: "
            "narrow the pattern of the pass, or set train: false"
        )
    return [name for names in lost.values() for name in names]


class Ema:
    """An exponential moving average in float32 of named parameters (Polyak averaging; the ramp is that of diffusers' EMAModel).

    After step t the average is `d * average + (1 - d) * weights` with d = min(decay, (1 + t) / (10 + t)).
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.parameters, self.decay, self.steps = dict(parameters), decay, 0
        self.average = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of this moment in."""
        self.steps += 1
        weight = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        now = [p.detach().float() for p in self.parameters.values()]
        lerp_all(list(self.average.values()), now, weight)

    def applied(self) -> AbstractContextManager[None]:
        """The parameters hold the average inside, and their own values again after."""
        return filled(self.parameters, self.average)


@contextmanager
def filled(held: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Tensors hold other values inside, and their own again after."""
    kept = {name: held[name].detach().clone() for name in values}
    try:
        fill(held, values)
        yield
    finally:
        fill(held, kept)


@torch.no_grad()
def fill(held: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give tensors the values of their names."""
    for name, value in values.items():
        held[name].copy_(spread(value, held[name]))


def spread(value: Any, like: Tensor) -> Any:
    """A whole tensor as `like` has it: on its device and, where that is sharded and of its shape, sharded."""
    if not isinstance(value, Tensor) or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
