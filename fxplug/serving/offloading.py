"""Models that wait on the CPU while another one is called, for a device that cannot hold them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

HOOK = "_hf_hook"  # where diffusers looks for the device of a pipeline, and what its VAEs call before `encode` and `decode`


class ModelOffload:
    """Keeps the model that is called on a device, and the others on the CPU, as diffusers' model offloading does.

    A model stays on the device until another one is called. Its parameters and buffers stay the same objects, and their
    versions too: what is written into them meanwhile is kept.
    """

    def __init__(self, models: Iterable[nn.Module], device: torch.device) -> None:
        """Move the models to the CPU.

        Args:
            models: The models.
            device: Where each is called.
        """
        self.execution_device = device
        self._models = {id(vars(model)): model for model in models}
        for model in self._models.values():
            _move(model, torch.device("cpu"))
            vars(model)[HOOK] = self

    def pre_forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Move a model, or the one that it stands for, to the device, and the others to the CPU.

        Args:
            model: The model.
            args: The arguments of its call by place.
            kwargs: Those by name.

        Returns:
            The arguments as they are.
        """
        called = self._models[id(vars(model))]
        for other in self._models.values():
            if other is not called:
                _move(other, torch.device("cpu"))
        _move(called, self.execution_device)
        return args, kwargs


def load_for_call(model: nn.Module) -> None:
    """Move a model to its device, if it waits on the CPU.

    Args:
        model: The model.
    """
    hook = vars(model).get(HOOK)
    if isinstance(hook, ModelOffload):
        hook.pre_forward(model)


def _move(model: nn.Module, device: torch.device) -> None:
    for tensor in _list_tensors(model):
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def _list_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
