"""Inputs that a traced module keeps for callers who do not know of them: `bind(cond=image, strength=0.7)`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..errors import SpecError, did_you_mean, quote
from ..extensions import note_unrepeatable
from ..locks import get_locks, write_lock
from . import ops
from .containers import Container
from .graph import change, insert, redirect

if TYPE_CHECKING:
    from .traced_module import TracedModule


HOME = "bound"  # the child that holds them


def bind(module: TracedModule, inputs: Mapping[str, Any]) -> TracedModule:
    """See `TracedModule.bind`."""
    nodes = {str(node.target).lstrip("*"): node for node in module.graph.find_nodes(op="placeholder")}
    home = module._modules.get(HOME)
    if home is not None and not (isinstance(home, Container) and home.classes == (HOME,)):
        raise SpecError(f"bind: the model has a module '{HOME}' of its own, and that name is needed for its inputs")
    held = home._buffers if home is not None else {}
    values = {name: _value(module, name, value, nodes, held.get(name)) for name, value in inputs.items()}
    new = {name: value for name, value in values.items() if name not in held}
    made = _with(module, new) if new else module
    owner = made.get_submodule(HOME) if values else None
    with write_lock(get_locks(module)):
        for name, value in values.items():
            if owner is not None and name not in new:
                _set(owner._buffers, name, value)
    if not new:
        return made
    note_unrepeatable(made)  # what it was made from lacks these inputs
    return made.made_by(partial(bind, inputs=new), module)


def _set(held: dict[str, Any], name: str, value: torch.Tensor) -> None:
    """Another value in the place of one that is held: in its memory where it fits, as compiled programs know that."""
    before = held[name]
    if before.shape == value.shape:
        with torch.no_grad():
            before.copy_(value)
    else:
        held[name] = value.to(before.device, before.dtype if before.is_floating_point() else value.dtype)


def _value(
    module: TracedModule, name: str, value: Any, nodes: Mapping[str, fx.Node], held: torch.Tensor | None
) -> torch.Tensor:
    """Return the value of an input as a tensor. Raises SpecError."""
    if name not in nodes or str(nodes[name].target).startswith("*"):
        near = did_you_mean(name, nodes)
        raise SpecError(f"bind: the model has no input '{name}'{near}; it has {', '.join(nodes)}")
    if isinstance(value, (bool, int, float)) and held is not None and held.dim() == 0:
        return torch.full_like(held, value)
    checks = [node for node in nodes[name].users if node.target is ops.check_added]
    if isinstance(value, (bool, int, float)) and checks and isinstance(checks[0].args[5], torch.dtype):
        like = next(module.parameters(), None)
        return torch.full((), value, dtype=checks[0].args[5], device=None if like is None else like.device)
    if not isinstance(value, torch.Tensor):
        raise SpecError(
            f"bind: '{name}' is {quote(value)}, a {type(value).__name__}: only tensors can be bound, and numbers for inputs "
            "that a pass has added; for another value of any other input trace again"
        )
    return value.detach().clone()


def _with(module: TracedModule, values: Mapping[str, torch.Tensor]) -> TracedModule:
    """Return a copy of the module that contains further inputs."""
    made = module.copied()
    if HOME not in made._modules:
        made.add_module(HOME, Container((HOME,)))
    for name, value in values.items():
        made.get_submodule(HOME).register_buffer(name, value, persistent=False)
    for graph in made.graphs.values():
        for node in graph.find_nodes(op="placeholder"):
            if (name := str(node.target)) in values:
                _add_default(graph, node, name, values[name])
        _check_order(graph)
    return module.derived(made, made.graphs)  # type: ignore[arg-type]


def _add_default(graph: fx.Graph, node: fx.Node, name: str, value: torch.Tensor) -> None:
    meta: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "shape", "dtype") if key in node.meta}
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    held = insert(graph, "get_attr", f"{HOME}.{name}", after=last, name=f"{HOME}_{name}", meta=meta)
    given = insert(graph, "call_function", ops.input_or_default, (node, held), after=held, name=f"{name}_given", meta=meta)
    redirect(node, given)
    change(node, args=(None,))


def _check_order(graph: fx.Graph) -> None:
    """Raises SpecError where an input that has to be given by position stands behind one that is held."""
    seen = ""
    for node in graph.find_nodes(op="placeholder"):
        if node.args:
            seen = seen or str(node.target)
        elif seen and not str(node.target).startswith("*"):
            raise SpecError(f"bind: the input '{node.target}' comes after '{seen}' and has no default: bind it as well")
