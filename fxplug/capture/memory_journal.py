"""What a run on real tensors writes into memory that was there before it: the bytes before, to be put back."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.pytree import leaves
from ..torch_internals.dispatch import DisableTorchFunction, TorchDispatchMode, schema
from ..torch_internals.tensors import memory_id


class Journal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation as it is, and copies a tensor's memory before the first write into it.

    Memory that the run itself takes is left alone, so what is kept is only what outlives the run: buffers, inputs, tensors
    that the model holds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: set[int] = set()
        self.kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(schema(func).arguments):
            if _is_written(argument):
                for value in leaves(args[index] if index < len(args) else kwargs.get(argument.name)):
                    self.keep(value)
        out = func(*args, **kwargs)  # which a recording that listens still sees: a script function's operations come here only
        given = {memory_id(storage) for value in leaves((args, kwargs)) if (storage := storage_of(value)) is not None}
        for value in leaves(out):
            storage = storage_of(value)
            if storage is not None and memory_id(storage) not in given:
                self.made.add(memory_id(storage))
        return out

    def keep(self, value: Any) -> None:
        """Copy the memory of a tensor, once."""
        storage = storage_of(value)
        if storage is not None and memory_id(storage) not in self.made and memory_id(storage) not in self.kept:
            self.kept[memory_id(storage)] = (storage, storage.clone())  # type: ignore[no-untyped-call]

    def makes(self, tensor: torch.Tensor) -> bool:
        """Whether this run took the memory of a tensor."""
        storage = storage_of(tensor)
        return storage is not None and memory_id(storage) in self.made

    def forget(self, tensor: torch.Tensor) -> None:
        """A tensor counts as one that was there before the run."""
        storage = storage_of(tensor)
        if storage is not None:
            self.made.discard(memory_id(storage))

    def now(self) -> dict[int, torch.UntypedStorage]:
        """A copy of what stands now in all memory that was written."""
        return {key: storage.clone() for key, (storage, _) in self.kept.items()}  # type: ignore[no-untyped-call]

    def put_back(self, values: dict[int, torch.UntypedStorage] | None = None) -> None:
        """Give the memory the bytes that it had before the run, or those of `now()` at a time between."""
        for key, (storage, before) in self.kept.items():
            then = before if values is None else values.get(key, before)
            if storage.nbytes() != then.nbytes():
                storage.resize_(then.nbytes())
            storage.copy_(then)


def _is_written(argument: Any) -> bool:
    # batch norms do not say that they move their running statistics
    return bool(argument.alias_info and argument.alias_info.is_write) or argument.name.startswith("running_")


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """The memory of a tensor that has some."""
    if not isinstance(value, torch.Tensor):
        return None
    with DisableTorchFunction():
        if value.layout is not torch.strided or value.is_meta:
            return None
        try:
            return value.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a tensor of another kind, which has no memory of its own
            return None
