"""accelerate's offloading of a traced module, or of parts of it, which are not called: the root loads their weights around its
own call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from ..errors import SpecError
from ..torch_internals.modules import without_compiler
from .containers import HOOKED, find_module


@without_compiler
def with_parts_loaded(forward: Callable[..., Any], root: nn.Module) -> Callable[..., Any]:
    """Wrap a root's forward so that accelerate's hooks load the weights of its offloaded parts.

    Raises SpecError if hooks are for several devices, and if one would remove weights that the graph reads.
    """
    parts = _hooked(root)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for part in parts:
                hook = vars(part)[HOOKED]
                hook.pre_forward(part)
                stack.callback(hook.post_forward, part, None)
            return forward(self, *args, **kwargs)

    return call if parts else forward


def _hooked(root: Any) -> list[nn.Module]:
    modules = getattr(root, "modules_by_form", ())  # the plain module of an export has none
    graphs = [graph for module in modules for graph in module.graphs.values()]
    called, read = (
        {str(node.target) for graph in graphs for node in graph.find_nodes(op=op)} for op in ("call_module", "get_attr")
    )
    called = {path for path in called if not _is_ours(find_module(root, path))}  # blocks read weights of layers in them
    read = {name.rpartition(".")[0] for name in read}
    found: list[nn.Module] = []
    devices: set[str] = set()
    for path, part in root.named_modules():
        if not path or vars(part).get(HOOKED) is None:
            continue
        hook = vars(part)[HOOKED]
        hooks = getattr(hook, "hooks", (hook,))
        devices.update(str(each.execution_device) for each in hooks if getattr(each, "execution_device", None) is not None)
        steps = path.split(".")
        if called.isdisjoint(".".join(steps[: n + 1]) for n in range(len(steps))):
            found.append(part)
        elif path in read and any(getattr(each, "offload", False) for each in hooks):
            raise SpecError(
                f"accelerate has offloaded '{path}', which the graph calls and whose weights it reads elsewhere too: after the "
                "call they are gone. Leave that layer where it is computed, or offload the whole module at once "
                "(accelerate.cpu_offload_with_hook, pipe.enable_model_cpu_offload)"
            )
    if len(devices) > 1:
        raise SpecError(
            f"accelerate's hooks compute parts of this traced module on several devices ({', '.join(sorted(devices))}), and a "
            "graph has no calls of parts between which values move: offload it to one device, or use fxplug.parallelize"
        )
    return found


def _is_ours(module: nn.Module | None) -> bool:
    return type(module).__module__.startswith("fxplug.")
