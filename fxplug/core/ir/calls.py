"""A call of a traced module: the steps around the code of its graphs, from the outside in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from .. import locks
from ..errors import GuardError
from ..extensions import DistributedPart
from ..locks import call_with_read_lock, get_locks
from ..torch_internals.modules import (
    CONTEXT_VARIABLES,
    break_graph,
    call_uncompiled,
    is_listening,
    leave_frame,
    leave_module,
    without_compiler,
)
from .containers import HOOKED, WATCHED
from .graph import check_tied, find_samples, find_tables, get_graph, list_targets

Code = Callable[..., Any]  # of a graph: takes the module, and what the module takes
CHECKPOINTING = "checkpointing"  # where a module has the view of it whose regions are computed again in the backward pass


def make_forward(code: Code) -> Any:
    """Make the forward of a traced module of the code of its graphs, with the signature of that.

    What is compiled around the module has the code alone in it. A compiler that is given the module leaves this frame and those
    of the steps as they stand, and compiles the code.
    """

    @functools.wraps(code)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if CONTEXT_VARIABLES and locks.has_choice() and any("state_lock" in vars(module) for module in self.modules()):
                break_graph(AROUND)
            return code(self, *args, **kwargs)
        return self._call_code(code, args, kwargs)

    return forward


def call_code(module: fx.GraphModule, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the code of a module's graphs, with the steps around it.

    Processes compare what they are called with; names of one tensor are still of one; while the slots are not changed, the
    number of samples is checked, and weights that an offloader keeps elsewhere are brought; of outlined regions are compiled,
    where a compiler is given the module, and what is around them is not. Raises GuardError and SpecError.
    """
    own = vars(module)
    if "_locks" not in own:
        _note_steps(module)
    if (comparer := own.get("_block")) is not None:
        _compare_call(comparer, module, args, kwargs)
    if "_tied" in own:
        check_tied(module)
    if "nested" in module.meta and is_listening():
        code = functools.partial(call_uncompiled, max(map(len, module.meta["nested"].values())), code)
    if has_hooks(module):
        from .offload import with_parts_loaded  # for few modules

        code = with_parts_loaded(code, module)
    if not own["_locks"]:
        return code(module, *args, **kwargs)
    return call_with_read_lock(own["_locks"], _call_with_slots, module, code, args, kwargs)


def _call_with_slots(module: fx.GraphModule, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the code of a module with slots, whose blocks look at what comes in and what goes out."""
    graph, known = vars(module).get("_graph"), vars(module).get("_slots")
    if graph is None:  # the plain module of an export
        return code(module, *args, **kwargs)
    if known is None or known[0] is not graph:
        known = vars(module)["_slots"] = _find_slots(module)
    _, tables, watchers = known
    for table in tables:
        if table.count_entries():
            check_samples(module, args, kwargs)
            break
    out = code(module, *args, **kwargs)
    for watcher in watchers:
        watcher.after_call(out)
    return out


@without_compiler
def _compare_call(
    part: DistributedPart[Any], module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Let processes compare what they are called with: none of that is for a compiler."""
    part.before_call(module, args, kwargs)


@without_compiler
def _note_steps(module: fx.GraphModule) -> None:
    """Note what the steps of a module's calls need: its locks, and the first block that does something before a call."""
    vars(module)["_block"] = next((m for m in module.modules() if isinstance(m, DistributedPart)), None)
    vars(module)["_locks"] = get_locks(module)


# --- accelerate's hooks


def has_hooks(root: nn.Module) -> bool:
    """Whether accelerate has put a hook on a part or layer whose code or weights the graphs have themselves."""
    for parts, name in vars(root).get(WATCHED) or _watch(root):
        if (part := parts.get(name)) is not None and HOOKED in part.__dict__:
            return True
    return False


@without_compiler
def _watch(root: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Note these, and in whose `_modules` they are: a layer may be replaced."""
    graphs = list(getattr(root, "graphs", {}).values())
    called, read = list_targets(graphs, "call_module"), {name.rpartition(".")[0] for name in list_targets(graphs, "get_attr")}
    vars(root)[WATCHED] = found = [
        (module._modules, name)
        for path, module in root.named_modules()
        for name in (module._modules if isinstance(module._modules, dict) else ())  # a scripted module's is not
        if (at := f"{path}.{name}" if path else name) not in called or at in read
    ]
    return found


# --- samples that have adapters of their own


class ResultWatcher:
    """A part of a module with slots that looks at the result of each call."""

    def after_call(self, result: Any) -> None:
        """Look at the result of a call, before the caller has it."""
        raise NotImplementedError


@without_compiler
def _find_slots(module: fx.GraphModule) -> tuple[fx.Graph, list[Any], list[Any]]:
    """Return the graph, the blocks in it that may have an entry for each sample, and those that look at a result."""
    graph = vars(module)["_graph"]
    tables = [module.get_submodule(str(node.target)) for node in find_tables(graph, module)]
    return graph, tables, [m for m in module.modules() if isinstance(m, ResultWatcher)]


@without_compiler
def check_samples(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises SpecError where blocks have an entry for each sample, and a call has another number of samples."""
    graph = get_graph(module)
    known: Any = vars(module).get("_samples")
    if known is None or known[0] is not graph:
        known = vars(module)["_samples"] = graph, *find_samples(graph, module)
    _, tables, inputs = known
    if inputs is None:
        return
    try:
        values = inputs(*args, **kwargs)
    except (TypeError, LookupError, AttributeError):  # of a call that the graph does not take, as it says itself
        return
    for table, value in zip(tables, values, strict=True):
        table.check_samples(value)


# --- the code of one graph among those of a module


def choose_by_mode(only: Code, both: bool) -> Code:
    """Choose the graph of the mode that a module and its parts are in; `only` is the code for all, or of `both`."""

    def code(self: Any, *args: Any, **kwargs: Any) -> Any:
        for part in self._parts:
            if part.training != self.training:
                mixed = self._mixed.get((self.training, *[each.training for each in self._parts]))
                if mixed is None:
                    if torch.compiler.is_dynamo_compiling():
                        break_graph(AROUND_PARTS)
                    mixed = self._forward_of_parts()
                return mixed(self, *args, **kwargs)
        if not both:
            return only(self, *args, **kwargs)
        return self._forward_train(*args, **kwargs) if self.training else self._forward_eval(*args, **kwargs)

    code.__signature__ = inspect.signature(only)  # type: ignore[attr-defined]
    return code


def choose_by_gradients(plain: Code) -> Code:
    """Choose the view that computes regions again in the backward pass where there will be one, else this code."""

    def code(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_exporting():
            if any(part.training != self.training for part in self.__dict__.get("_parts") or ()):
                raise GuardError(MIXED_CHECKPOINTS)
            return vars(self)[CHECKPOINTING](*args, **kwargs)
        return plain(self, *args, **kwargs)

    code.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    return code


AROUND = (
    "a program that is compiled around a module with slots does not see adapters.using(...): compile the module itself, or "
    "remove fullgraph=True"
)
AROUND_PARTS = "a program that is compiled around a module whose parts are in mixed modes: call the module once before"
MIXED_CHECKPOINTS = (
    "gradient checkpointing computes whole regions again in one mode, and a part of this module is in another mode than the "
    "module: call disable_gradient_checkpointing(), or train() or eval() of the module"
)
FORWARD = make_forward(nn.Module.forward).__code__  # the code of the forward of every traced module
for _code in (FORWARD, *(f.__code__ for f in (call_code, _call_with_slots, has_hooks))):
    leave_frame(_code)  # these frames are not compiled, what they call is
for _choose in (choose_by_mode(nn.Module.forward, True), choose_by_gradients(nn.Module.forward)):
    leave_frame(_choose.__code__)
leave_module(locks)
