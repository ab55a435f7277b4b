"""What trains: parameters of the passes, chosen ones of the base, the optimizer's groups, and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..core.errors import SpecError, TrainError, did_you_mean, prefix_path
from ..core.ir.traced_module import BEFORE_TRAINING, TRAINED, TracedModule
from ..core.quantised import is_packed
from ..core.spec.addresses import is_pattern, select
from ..core.spec.pass_file import get_arguments
from ..core.spec.yaml_source import quote_yaml, validate
from ..core.torch_internals.tensors import lerp_all
from .import_paths import construct, import_name
from .task_section import ScheduleOptions
from .train_section import GroupRates, Train, Use

HALVES = (torch.float16, torch.bfloat16)
SHAPES = ("constant", "linear", "cosine")
TRIED = 1000  # so many steps of a scheduler of torch's are tried before the first
BASE = "base"  # the group of what trains of the base
KEPT = 1 << 30  # bytes: of more than that no copy is kept for formats that hold differences


def choose(module: TracedModule, settings: Train, *, others: bool = False) -> list[dict[str, Any]]:
    """Set `requires_grad` of every parameter, and return the optimizer's groups: `name`, `params`, `names`, `lr`,
    `weight_decay`, and the `dtypes` that the parameters had.

    A pass is one group with its own `lr` and `weight_decay`, by default the run's; a pass with `train: false` is frozen. The
    base parameters that `trainable` names are one group. Trainable half-precision parameters become float32, as PEFT and
    diffusers have it: autocast casts them in the forward (see `find_precision`), the optimizer keeps their small changes.
    Raises TrainError when nothing trains, here or among `others`, SpecError for a pattern that names no parameter.
    """
    groups = _groups(module, settings.trainable, others)
    named = dict(module.named_parameters())
    for group in groups:
        group["said"] = [key for key in ("lr", "weight_decay") if key in group]
        for key, own in (("lr", settings.lr), ("weight_decay", settings.weight_decay)):
            group.setdefault(key, own)
        group["dtypes"] = [named[name].dtype for name in group["names"]]
        for name in group["names"]:
            if named[name].dtype in HALVES:
                named[name].data = named[name].data.float()
    return _trained(module, groups)


def find_precision(module: TracedModule, settings: Train, *, others: bool = False) -> str:
    """Return the precision that a run computes in: with `fp32`, the dtype of trainable half-precision parameters if there are
    any.

    Trainable parameters are float32, and only autocast lets them meet a base in half precision. Raises SpecError for two such
    dtypes.
    """
    if settings.precision != "fp32":
        return settings.precision
    named = dict(module.named_parameters())
    trained = [named[name].dtype for group in _groups(module, settings.trainable, others) for name in group["names"]]
    halves = [name for name, dtype in zip(("fp16", "bf16"), HALVES, strict=True) if dtype in trained]
    if len(halves) == 2:
        finding = "the trained parameters are float16 and bfloat16: set precision to bf16 or fp16"
        raise SpecError(finding, path=("train", "precision"))
    return halves[0] if halves else "fp32"


def make_frozen_filter(module: TracedModule, trained: Collection[str], patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate on names of parameters: whether it is none of the `trained` ones, under any of its names.

    A name that no parameter has is frozen unless it is in a pass that trains, or in a module that one of the `patterns` of
    `trainable` names, itself or through a module around it.
    """
    canonical = {id(parameter): name for name, parameter in module.named_parameters()}
    named = {name: canonical[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    passes = tuple(f"{entry['name']}." for entry in module.meta.get("passes", []) if entry["train"])

    def frozen(name: str) -> bool:
        if name in named:
            return named[name] not in trained
        around = _prefixes(name)[:-1] or [name]
        chosen = (select(pattern, around) if is_pattern(pattern) else pattern in around for pattern in patterns)
        return not (name.startswith(passes) or any(chosen))

    return frozen


def trainable(module: TracedModule, *base: str) -> list[dict[str, Any]]:
    """Freeze a rewritten module but for what its passes put in, for a training loop of one's own.

    `torch.optim.AdamW(fxplug.trainable(new), lr=1e-3)`: the groups are torch's, `params` with a `name`, and the `lr` and
    `weight_decay` of a pass that says its own.

    Args:
        module: The rewritten module.
        *base: What trains beside that, as `trainable` of a configuration: paths and patterns of parameters or of modules around
            them (`"norm"`, `"blocks.11.**"`).

    Returns:
        The groups, for an optimizer of torch.

    Raises:
        TrainError: Nothing trains, the module was lowered, or it has slots.
        SpecError: A pattern names no parameter.
    """
    return [{key: value for key, value in group.items() if key != "names"} for group in _trained(module, _groups(module, base))]


def _trained(module: TracedModule, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make the parameters of the groups trainable and all others frozen; record those of the base in the module.

    `save_adapter` writes the recorded ones, so a name stays recorded: it may have been trained before.
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
    """Return the trainable parameters by name, as groups: one per pass and one for the base, with the `lr` and `weight_decay`
    of a pass that sets them."""
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
            "or set train: false; train.adapters trains several for slots at once"
        )
    for entry in entries:
        names = [name for name in named if owner.get(name) == entry["name"] and named[name].is_floating_point()]
        groups += _of_pass(entry, names)
    every = module.named_parameters(remove_duplicate=False)
    aliases = {name: canonical[id(p)] for name, p in every if p.is_floating_point() and not is_packed(p)}
    tracked = {name.removesuffix(".running_mean") for name, _ in module.named_buffers() if name.endswith(".running_mean")}
    known = {a: name for a, name in aliases.items() if name not in owner}
    chosen = find_parameters(base, known, "the base", ("train", "trainable"), beside=tracked)
    if chosen:
        groups.append({"name": BASE, "names": chosen})
    if not groups and not others:
        frozen = ", ".join(entry["name"] for entry in entries if not entry["train"])
        why = f"{frozen} has train: false" if frozen else "no pass has parameters" if entries else "there is no pass"
        raise TrainError(f"nothing trains: {why}; 'trainable' names parameters of the base ('**' is all of it)")
    return groups


def _of_pass(entry: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the groups of a pass whose parameters have these names: one, and one more for each part with its own rate."""
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


def find_parameters(
    patterns: Sequence[str], names: Mapping[str, str], whose: str, path: tuple[str, ...], *, beside: Collection[str] = ()
) -> list[str]:
    """Return the parameters that patterns name, themselves or through a module around them; `names` maps all their names.

    Raises SpecError, at the pattern's place below `path`, for a pattern that names no parameter, and none of the modules
    `beside` them.
    """
    around = {alias: _prefixes(alias) for alias in names}
    known = {part for parts in around.values() for part in parts} | set(beside)
    chosen: set[str] = set()
    for index, pattern in enumerate(patterns):
        hits = set(select(pattern, sorted(known))) if is_pattern(pattern) else {pattern} & known
        if not hits:
            finding = f"'{pattern}' names no parameter of {whose}{did_you_mean(pattern, known)}"
            raise SpecError(finding, path=(*path, index))
        chosen.update(names[alias] for alias, parts in around.items() if hits.intersection(parts))
    return [name for name in dict.fromkeys(names.values()) if name in chosen]


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a parameter, the outermost first, and its own."""
    return [*accumulate(name.split("."), "{}.{}".format)]


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise TrainError for a scheduler of the user's that changes the rates of another optimizer than the run's."""
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        finding = f"must be a name, one name with its options, or a scheduler of torch, not {quote_yaml(scheduler)}"
        raise SpecError(finding, path=("train", "scheduler"))
    own = getattr(scheduler, "optimizer", None)
    if own is not None and own is not optimizer:
        hint = "pass that one too (optimizer=)" if optimizer is None else "make it with the optimizer that is passed"
        raise TrainError(f"the scheduler is of another optimizer, and would have no effect: {hint}")


def make_scheduler(use: Use | None, optimizer: torch.optim.Optimizer, steps: int, per_epoch: int) -> tuple[Any, bool]:
    """Make a learning-rate scheduler, and return whether it is stepped once an epoch (`per: epoch`) instead of once a step.

    `constant`, `linear` and `cosine` take `warmup` steps, or a share of the run below 1, and fall to `floor` of the rate at the
    end; those of torch.optim.lr_scheduler are given by name, any other by import path. A required length (T_max, total_steps)
    is by default the run's own. Raises SpecError for options that the scheduler does not take, or fails with.
    """
    use = use or Use("constant", {})
    options = dict(use.options)
    per = options.pop("per", "step")
    length = max(1, math.ceil(steps / per_epoch)) if per == "epoch" else steps
    if use.name in SHAPES:
        shape = _shape(use.name, length, validate(ScheduleOptions, use.options, "train", "scheduler", use.name))
        return torch.optim.lr_scheduler.LambdaLR(optimizer, shape), per == "epoch"
    package = torch.optim.lr_scheduler
    known = {name.lower(): getattr(package, name) for name in package.__all__ if name != "LRScheduler"}
    kind = find_by_name(use, known, "scheduler", SHAPES)
    wanted = get_arguments(kind).names
    own = {"T_max": length, "total_steps": length, "max_lr": [group["lr"] for group in optimizer.param_groups]}
    replaced_by = {"total_steps": {"epochs", "steps_per_epoch"}}
    filled = {
        key: value
        for key, value in own.items()
        if key in wanted and key not in options and not replaced_by.get(key, set()) & options.keys()
    }
    given = Use(use.name, {**filled, **options})
    if ":" not in use.name:
        _try_schedule(kind, given, optimizer, length)
    return construct(kind, given, ("train", "scheduler"), optimizer), per == "epoch"


def _try_schedule(kind: Any, use: Use, optimizer: torch.optim.Optimizer, length: int) -> None:
    """Raise SpecError for options with which a scheduler of torch fails in its first steps, or gives a rate that is no
    number."""
    tried = torch.optim.SGD([{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in optimizer.param_groups])
    tried.defaults = {**tried.defaults, **optimizer.defaults}  # in which CyclicLR looks for a momentum
    scheduler = construct(kind, use, ("train", "scheduler"), tried)
    by_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    with prefix_path("train", "scheduler", use.name):
        for step in range(1, min(length, TRIED) + 1):
            try:
                tried.step()
                scheduler.step(*[1.0] * by_loss)
            except Exception as error:  # torch's, of what it was given
                raise SpecError(f"{use.name} fails after step {step}: {type(error).__name__}: {error}") from error
            rates = [float(group["lr"]) for group in tried.param_groups]
            if not all(0 <= rate < math.inf for rate in rates):
                raise SpecError(f"{use.name} makes the learning rate {min(rates):.6g} after step {step}")


def _shape(name: str, length: int, options: ScheduleOptions) -> Callable[[int], float]:
    warmup = options.warmup if options.warmup >= 1 else round(options.warmup * length)

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, length - warmup))
        fall = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[name]
        return options.floor + (1 - options.floor) * fall

    return rate


def divide_groups(groups: list[dict[str, Any]], rates: Mapping[str, GroupRates]) -> list[dict[str, Any]]:
    """Divide the optimizer's groups where a pattern gives some of their parameters rates of their own.

    Of several patterns that name a parameter the last one counts. What no pattern names stays the first part of its group.
    LoRA+ (arXiv 2402.12354) is one pattern with a ratio. Raises SpecError for a pattern that names nothing that trains.
    """
    names = {name: name for group in groups for name in group["names"]}
    pattern_of: dict[str, str] = {}
    for given in rates:
        try:
            pattern_of |= dict.fromkeys(find_parameters([given], names, "the trained part", ()), given)
        except SpecError as error:
            raise SpecError(error.finding, path=("train", "groups", given)) from None
    divided = []
    for group in groups:
        chosen = [pattern_of.get(name) for name in group["names"]]
        for pattern in [key for key in (None, *rates) if key in chosen]:
            rows = [index for index, key in enumerate(chosen) if key == pattern]
            part = {**group, **{key: [group[key][row] for row in rows] for key in ("names", "params", "dtypes")}}
            if pattern is not None:
                own = rates[pattern]
                rate = group["lr"] * own.lr_ratio if own.lr_ratio is not None else own.lr
                changed = {"name": f"{group['name']} {pattern}", "lr": rate, "weight_decay": own.weight_decay}
                part |= {key: value for key, value in changed.items() if value is not None}
            divided.append(part)
    return divided


def find_by_name(use: Use, known: Mapping[str, Any], what: str, more: tuple[str, ...] = ()) -> Any:
    """Return what is `known` by a name in any case, or import it. Raises SpecError; `more` are further names for its hint."""
    if use.name.lower() in known:
        return known[use.name.lower()]
    if ":" not in use.name:
        names = [*more, *(kind.__name__ for kind in known.values())]
        near = did_you_mean(use.name, names) or did_you_mean(use.name.lower(), known)
        finding = f"torch has no {what} '{use.name}'{near}; for another one write 'package.module:Class'"
        raise SpecError(finding, path=("train", what))
    return import_name(use.name, ("train", what))


def check_gradients(
    modules: Mapping[str, TracedModule], groups: list[dict[str, Any]], unreached: str = ""
) -> list[str]:
    """Raise TrainError, after the first backward pass, for a block with a parameter that no gradient reached.

    Returns the networks and base parameters that no gradient reached.

    A block is where a pass put one (`lora.blocks.0.attn.qkv.Lora`). A pass's network counts as a whole, since some have layers
    that their model never uses; so does each parameter of the base. What a plugin has frozen since is left out. `modules` are
    those with passes, by the prefix of their names. Where a task says why layers are `unreached`, there must be others.
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
    if bad and (not unreached or len(whole) == len(held)):
        more = f" and {len(bad) - 5} more" * (len(bad) > 5)
        raise TrainError(
            f"no gradient reached {', '.join(bad[:5])}{more} in the first step, because the loss does not depend on them: "
            "narrow the pattern of the pass, or set train: false"
        )
    return [name for names in lost.values() for name in names]


class Ema:
    """An exponential moving average in float32 of named parameters (Polyak averaging; the ramp is that of diffusers' EMAModel).

    After step t the average is `d * average + (1 - d) * weights` with d = min(decay, t / (9 + t)), and 0 after the first: the
    weights that the run began with are not in it.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.parameters, self.decay, self.steps = dict(parameters), decay, 0
        self.average = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        self.steps += 1
        weight = 1 - min(self.decay, self.steps / (9 + self.steps)) if self.steps > 1 else 1.0
        now = [p.detach().float() for p in self.parameters.values()]
        lerp_all(list(self.average.values()), now, weight)

    def applied(self) -> AbstractContextManager[None]:
        """Return a context manager in which the parameters hold the average; their own values are restored after it."""
        return fill_within(self.parameters, self.average)


@contextmanager
def fill_within(held: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Fill tensors with other values inside the context, and restore their own after it."""
    kept = {name: held[name].detach().clone() for name in values}
    try:
        fill(held, values)
        yield
    finally:
        fill(held, kept)


@torch.no_grad()
def fill(held: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into the tensors of the same names."""
    for name, value in values.items():
        held[name].copy_(move_like(value, held[name]))


def move_like(value: Any, like: Tensor) -> Any:
    """Move a whole tensor to the device of `like` and, where that is sharded and of its shape, shard it the same way."""
    if not isinstance(value, Tensor) or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
