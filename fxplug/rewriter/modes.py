"""A module in training or in evaluation for a while, and its buffers as they were."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import cache

import torch
from torch import nn

from ..ir.traced_module import TracedModule
from ..torch_internals.tensors import version

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

@contextlib.contextmanager
def in_mode(training: bool, *modules: TracedModule) -> Iterator[None]:
    """Training or evaluation for the time of a check; each module's own mode is given back. Raises TraceError as train()."""
    held = [(m, m.training) for root in modules for m in root.modules()]
    roots = [(root, root.training) for root in modules]
    try:
        for root in modules:
            root.train(training)
        yield
    finally:
        for root, before in roots:
            if root.training != before:
                root.train(before)
        for module, before in held:
            if not isinstance(module, TracedModule):
                module.training = before


def _knows_mode(module: TracedModule) -> bool:
    """Whether training can be another thing than evaluation: by its graph, or by the code of a module that it calls."""
    if len(module.graphs) > 1:
        return True
    called = {str(n.target) for n in module.graph.nodes if n.op == "call_module"}
    return any(_reads_mode(type(m)) and not _is_inert(m) for path in called for m in module.get_submodule(path).modules())  # type: ignore[arg-type]


def _is_inert(module: nn.Module) -> bool:
    """Whether a layer of torch's drops nothing, or has no running statistics: training and evaluation are the same then."""
    if isinstance(module, DROPOUTS):
        return module.p == 0
    return isinstance(module, NORMS) and module.running_mean is None


@cache
def _reads_mode(kind: type[nn.Module]) -> bool:
    """Whether the code of a class names `training`; anybody's may come by it otherwise."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        if base.__module__.partition(".")[0] not in ("torch", "fxplug"):
            return True
        functions = (value for value in vars(base).values() if inspect.isfunction(value))
        if any("training" in function.__code__.co_names for function in functions):
            return True
    return False


@contextlib.contextmanager
def buffers_restored(*modules: nn.Module) -> Iterator[None]:
    """Give the buffers of modules the values back that they have now: a block may write those that it keeps as its own."""
    values = [(b, b.detach().clone(), version(b)) for m in modules for b in m.buffers() if not (b.is_meta or b.is_inference())]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value, before in values:
                if version(buffer) != before or not torch.equal(buffer, value):  # batch norms write without a version
                    buffer.copy_(value)
