"""What each adapter of a run that trains many has of its own, and the settings that such a run cannot have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from ..core.errors import SpecError
from ..core.spec.yaml_source import validate
from .train_section import KINDS, OF_ADAPTER, OF_KINDS, Data, Train, TrainedAdapter

PATH = ("train", "adapters")
OBJECTS = ("data", "test", "task")  # of an adapter in Python: no plain values
# settings of a run that would need something of the batch of all adapters, and why there is none
REFUSED: dict[str, str] = {
    "trainable": "all adapters share the base, which does not change",
    "assistant": "all adapters share the base, which does not change",
    "shard": "such a run uses one process",
    "parallel": "such a run uses one process",
    "compile": "the adapters of a batch change when one ends",
    "checkpointing": "the samples of each adapter are computed by its own blocks",
    "blocks_to_swap": "each adapter has a pass of its own through the blocks",
    "plugins": "a plugin sees one module, and each adapter has its own",
}


def read_adapters(given: Sequence[Mapping[str, Any] | TrainedAdapter]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide what Python gives for adapters into plain values, as in a configuration, and the `data`, `test` and `task` that
    are objects.

    Raises SpecError for what is no list of adapters.
    """
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        raise SpecError(f"must be a list of adapters, each with a name, not a {type(given).__name__}", path=PATH)
    plain, objects = [], []
    for index, one in enumerate(given):
        if isinstance(one, TrainedAdapter):
            one = one.model_dump(exclude_unset=True)
        if not isinstance(one, Mapping):
            raise SpecError(f"must be a mapping with a name, not a {type(one).__name__}", path=(*PATH, index))
        plain.append({key: value for key, value in one.items() if key not in OBJECTS})
        objects.append({key: one.get(key) for key in OBJECTS})
    return plain, objects


def make_adapter_settings(settings: Train, index: int, shares: bool = True) -> Train:
    """Return the settings of one adapter's run: those of the run, but for what it has of its own. One that `shares` a pass is
    not fused.

    Raises SpecError for what does not fit together.
    """
    one = settings.adapters[index]
    common = settings.model_dump(exclude={"adapters", "in_turn"}, exclude_unset=True)
    own = one.model_dump(exclude={*OF_ADAPTER}, exclude_unset=True)
    if own.get("steps") is not None or own.get("epochs") is not None:
        common = {key: value for key, value in common.items() if key not in ("steps", "epochs")}
    save = {**common.get("save", {}), "every": 0}  # one checkpoint is for all
    fuse = {"fuse": False} if shares else {}
    return validate(Train, {**common, **own, **fuse, "save": save}, *PATH, index)


def make_adapter_data(common: Data | None, one: TrainedAdapter, index: int) -> Data:
    """Return the section `data` of one adapter: the run's, but for what it has of its own. Raises SpecError."""
    path = (*PATH, index, "data")
    shared = {} if common is None else common.model_dump(exclude_unset=True)
    own = one.data
    if own is None:
        if common is None:
            raise SpecError("needs 'data', because there is no section 'data' for all adapters", path=(*PATH, index))
        return common
    kinds = [kind for kind in KINDS if shared.get(kind) is not None]
    if isinstance(own, str):
        if not kinds:
            raise SpecError(f"must say what '{own}' has, {', '.join(KINDS)}, as no section 'data' does", path=path)
        own = {kinds[0]: own}
    taken = [kind for kind in KINDS if own.get(kind) is not None] or kinds
    dropped = {*KINDS, *(key for key, of in OF_KINDS.items() if not {*of}.intersection(taken))} if taken != kinds else set()
    if any(own.get(kind) is not None for kind in KINDS):
        dropped |= {*KINDS}
    return validate(Data, {**{key: value for key, value in shared.items() if key not in dropped}, **own}, *path)


def check_adapter_settings(settings: Train, accelerator: Accelerator) -> None:
    """Raise SpecError for a setting that a run of many adapters cannot have, with the reason."""
    for key, why in REFUSED.items():
        default = Train.model_fields[key].get_default(call_default_factory=True)
        if getattr(settings, key) not in (default, None, False):
            raise SpecError(f"cannot be used with many adapters: {why}", path=("train", key))
    if settings.test.best:
        finding = "cannot be used with many adapters: each has the weights of its last step"
        raise SpecError(finding, path=("train", "test", "best"))
    if settings.precision == "fp16":
        finding = "cannot be used with many adapters, which would share one loss scale: set bf16 or fp32"
        raise SpecError(finding, path=("train", "precision"))
    if accelerator.num_processes > 1:
        finding = f"are trained in one process, and there are {accelerator.num_processes}: start it without torchrun"
        raise SpecError(finding, path=PATH)
