"""What nn.Module and torch's own layers keep to themselves: hooks, base classes, lists of weights.

The tables `_parameters`, `_buffers`, `_modules` and `_non_persistent_buffers_set` are what a subclass of nn.Module lives by,
and every file may read them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._contextlib import _DecoratorContextManager

__all__ = [
    "CALL",
    "COMPILED",
    "GLOBAL_HOOKS",
    "TABLES",
    "WEIGHT_LISTS",
    "BatchNorm",
    "ConvNd",
    "DecoratorContextManager",
    "DropoutNd",
    "InstanceNorm",
    "NormBase",
    "call_with_hooks",
    "conv_forward",
    "forward_hooks",
    "is_hooked",
    "list_weights",
]

# where a module keeps its state; what else `nn.Module()` has are hooks and `training`
TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
# a call with its hooks, but not what `module.compile()` put around it; we need that `nn.Module.__call__` ends there, and asks
# for it by this name: to set `__call__` itself makes Python go through all subclasses, thousands beside libraries of models
CALL = "_call_impl"
call_with_hooks: Callable[..., Any] = nn.Module._call_impl
# where a module has what `module.compile()` put around its call; we need that without it the call is the module's own
COMPILED = "_compiled_call_impl"
# what is called before and after a module's forward
forward_hooks: Callable[[nn.Module], tuple[Any, Any]] = attrgetter("_forward_hooks", "_forward_pre_hooks")
_ALL_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# hooks that all modules of a process have, by the name of the dict in which they are
GLOBAL_HOOKS = {
    name: value
    for name, value in vars(torch_module).items()
    if name.startswith("_global_") and type(value) in (dict, OrderedDict)
}
# bases of torch's own layers, of all numbers of dimensions; NormBase is the first of what tracks statistics
BatchNorm, InstanceNorm = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
NormBase, ConvNd, DropoutNd = nn.modules.batchnorm._NormBase, nn.modules.conv._ConvNd, nn.modules.dropout._DropoutNd
# the base of torch's context managers that are decorators as well, such as no_grad; they hold nothing of a model
DecoratorContextManager = _DecoratorContextManager
# the method of a convolution's class in which it convolves; we need that its forward is nothing but a call of it
conv_forward: Callable[[type[nn.Module]], Any] = attrgetter("_conv_forward")
# where a recurrent layer has its weights, by names and as a list; they follow from its constructor
WEIGHT_LISTS = ("_flat_weights_names", "_all_weights", "_flat_weights", "_flat_weight_refs")


def is_hooked(module: nn.Module) -> bool:
    """Whether something is called before or after a module's forward or backward; we need the four dicts of its hooks."""
    return any(_ALL_HOOKS(module))


def list_weights(layer: nn.RNNBase) -> None:
    """Let a recurrent layer compute with the weights that it has now; we need this after its table was written."""
    layer._init_flat_weights()
