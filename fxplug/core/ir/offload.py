"""accelerate's offloading of a traced module, whose parts are not called: the root loads their weights around its own call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from ..errors import SpecError
from .containers import HOOKED, LOADED


def with_parts_loaded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of a root that accelerate has hooked, in which the weights of its parts are where the hooks bring them."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = self.__dict__.get(LOADED)
        if parts is None:
            parts = self.__dict__[LOADED] = _parts(self)
        with ExitStack() as stack:
            for part in parts:
                if (hook := vars(part).get(HOOKED)) is not None:
                    hook.pre_forward(part)
                    stack.callback(hook.post_forward, part, None)
            return forward(self, *args, **kwargs)

    return call


def _parts(root: Any) -> list[nn.Module]:
    """The parts that have a hook and are not called. Raises SpecError where hooks are for several devices."""
    graphs = [graph for module in root.modules_by_form for graph in module.graphs.values()]
    called = {str(node.target) for graph in graphs for node in graph.find_nodes(op="call_module")}
    found: list[nn.Module] = []
    devices: set[str] = set()
    for path, part in root.named_modules():
        if not path or vars(part).get(HOOKED) is None:
            continue
        hook = vars(part)[HOOKED]
        devices.update(str(getattr(each, "execution_device", None)) for each in getattr(hook, "hooks", (hook,)))
        steps = path.split(".")
        if called.isdisjoint(".".join(steps[: n + 1]) for n in range(len(steps))):
            found.append(part)
    if len(devices) > 1:
        raise SpecError(
            f"accelerate's hooks compute parts of this traced module on several devices ({', '.join(sorted(devices))}), and a "
            "graph has no calls of parts between which values move: offload it to one device, or use fxplug.parallelize"
        )
    return found
