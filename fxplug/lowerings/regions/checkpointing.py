"""Gradient checkpointing switched on in a traced module, by the methods that diffusers, transformers and timm have for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn

from ...core.errors import MatchError, SpecError
from ...core.ir.containers import Container
from ...core.ir.traced_module import TracedModule
from .submodules import outline

# the attribute in which the models of diffusers and transformers, and of timm, keep whether it is on
ATTRIBUTES = ("gradient_checkpointing", "grad_checkpointing")


def checkpointed(gm: TracedModule) -> TracedModule:
    """Return the module with checkpointed repeated regions, on the same layers and tensors as `gm`.

    Later changes of these (a mode, hooks, another device) affect both. Raises SpecError if no regions are alike.
    """
    try:
        made = outline(gm, checkpoint=True)
    except MatchError:
        raise SpecError(
            "gradient checkpointing computes repeated regions again, and the model has none: name regions yourself, "
            "train.checkpointing: [patterns], or put torch.utils.checkpoint around the module"
        ) from None
    for part in made.modules():
        if isinstance(part, TracedModule):
            _share(part, gm)
    return made


def _share(part: nn.Module, gm: nn.Module) -> None:
    """Share the layers of another tree at the same paths, and the tensor tables of the modules around them."""
    for table in ("_parameters", "_buffers"):
        vars(part)[table] = vars(gm)[table]
    for name, child in list(part._modules.items()):
        twin = gm._modules.get(name)
        if twin is None:
            continue  # the home of the regions
        if isinstance(child, Container):
            _share(child, twin)
        else:
            part._modules[name] = twin


def _switch(gm: TracedModule, on: bool) -> None:
    gm.set_checkpointing(checkpointed(gm) if on else None)
    for module in gm.modules():
        for name in ATTRIBUTES:
            if name in vars(module):
                vars(module)[name] = on


def enable(gm: TracedModule) -> Callable[..., None]:
    """Return the method that enables checkpointing: `enable_gradient_checkpointing()`, `gradient_checkpointing_enable()`."""

    def method(*args: Any, **kwargs: Any) -> None:
        """Recompute repeated regions in the backward pass, if gradients are computed; as `train.checkpointing` does.

        Arguments of other libraries, such as which regions and how, are ignored.
        """
        _switch(gm, True)

    return method


def disable(gm: TracedModule) -> Callable[[], None]:
    """Return the method that disables checkpointing."""
    return lambda: _switch(gm, False)


def switch(gm: TracedModule) -> Callable[..., None]:
    """Return the method of timm, `set_grad_checkpointing(enable=True)`."""
    return lambda enable=True: _switch(gm, bool(enable))
