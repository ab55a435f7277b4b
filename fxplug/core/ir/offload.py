"""accelerate's offloading of a traced module, or of parts of it, which are not called: the root loads their weights around its
own call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from ..errors import SpecError
from .containers import HOOKED, LOADED, TracedPart, module_at


def with_parts_loaded(forward: Callable[..., Any], parts: list[nn.Module]) -> Callable[..., Any]:
    """A forward of a root in which the weights of these parts are where accelerate's hooks bring them."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for part in parts:
                if (hook := vars(part).get(HOOKED)) is not None:
                    hook.pre_forward(part)
                    stack.callback(hook.post_forward, part, None)
            return forward(self, *args, **kwargs)

    return call


def offloaded_parts(root: nn.Module) -> list[nn.Module]:
    """The parts of a root that accelerate has put hooks on, and that no graph calls. Raises SpecError as `_parts`."""
    now, parts = root.__dict__.get(LOADED, (0, []))
    if now != TracedPart.hooks_set:
        now, parts = root.__dict__[LOADED] = TracedPart.hooks_set, _parts(root)
    found: list[nn.Module] = parts
    return found


def _parts(root: Any) -> list[nn.Module]:
    """The parts that have a hook and are not called. Raises SpecError where hooks are for several devices."""
    modules = getattr(root, "modules_by_form", ())  # the plain module of an export has none
    graphs = [graph for module in modules for graph in module.graphs.values()]
    called = {str(node.target) for graph in graphs for node in graph.find_nodes(op="call_module")}
    called = {path for path in called if not _is_ours(module_at(root, path))}  # blocks read weights of layers in them
    found: list[nn.Module] = []
    devices: set[str] = set()
    for path, part in root.named_modules():
        if not path or vars(part).get(HOOKED) is None:
            continue
        hook = vars(part)[HOOKED]
        found_on = (getattr(each, "execution_device", None) for each in getattr(hook, "hooks", (hook,)))
        devices.update(str(device) for device in found_on if device is not None)
        steps = path.split(".")
        if called.isdisjoint(".".join(steps[: n + 1]) for n in range(len(steps))):
            found.append(part)
    if len(devices) > 1:
        raise SpecError(
            f"accelerate's hooks compute parts of this traced module on several devices ({', '.join(sorted(devices))}), and a "
            "graph has no calls of parts between which values move: offload it to one device, or use fxplug.parallelize"
        )
    return found


def _is_ours(module: nn.Module | None) -> bool:
    return type(module).__module__.startswith("fxplug.")
