"""The traced module of what was recorded: its tree, without the code of the model's classes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .. import quantised
from ..ir import ops
from ..ir.containers import RESERVED, Container, plain_attributes
from ..ir.graph import Graph
from ..ir.traced_module import TracedModule, class_names
from .module_state import Place

COPIED = (list, dict, set, deque, OrderedDict)


class Recorded(NamedTuple):
    """What one run gives."""

    graph: Graph
    constants: dict[str, torch.Tensor]
    called: set[str]
    reads_training: bool
    written: list[Place]
    checkpointed: str  # where code is recorded that the model's backward runs again
    inlined: str  # where a function of autograd's with a backward of its own is recorded as its forward

    def text(self, without: tuple[fx.Node, ...] = ()) -> str:
        """What the graph does, for comparing two of them."""
        return "\n".join(node.format_node() or "" for node in self.graph.nodes if node not in without)

    def asks_for_gradients(self) -> tuple[fx.Node, ...]:
        """The checks that gradients are enabled, or are not."""
        checks = self.graph.find_nodes(op="call_function", target=ops.check_state)
        return tuple(node for node in checks if node.args[0] == "torch.is_grad_enabled")


def assemble(model: nn.Module, recordings: dict[bool, Recorded], twin_error: str | None) -> TracedModule:
    """The module tree of the model with its leaves, weights and constants around the recorded graphs."""
    leaves = set().union(*(r.called for r in recordings.values()))
    constants: dict[str, torch.Tensor] = {}
    for recording in recordings.values():
        constants.update(recording.constants)
    copies: dict[int, nn.Module] = {}
    places = [place for recording in recordings.values() for place in recording.written]
    # an attribute that forward writes would stay what it was before the trace
    stale = {(id(place.owner), place.key) for place in places}
    owners = {id(place.owner) for place in places if place.key is None or isinstance(place.owner, dict)}

    def kept(module: nn.Module, attributes: dict[str, Any]) -> dict[str, Any]:
        space = id(vars(module))
        return {k: v for k, v in attributes.items() if (space, k) not in stale and id(v) not in owners}

    def copy_tree(module: nn.Module, path: str, whole: bool) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if whole or path in leaves:
            new = object.__new__(type(module))
            # containers as well: an LSTM keeps its weights in a list and changes it in place
            new.__dict__ = {k: v.copy() if type(v) in COPIED else v for k, v in vars(module).items()}
            whole = True
        else:
            new = Container(class_names(module), kept(module, plain_attributes(module)))
            new.__dict__["training"] = module.training
            new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        copies[id(module)] = new
        for table in ("_parameters", "_buffers"):
            new.__dict__[table] = dict(getattr(module, table))
        if whole and quantised.is_own_layer(new):
            quantised.settle(new)
        new.__dict__["_modules"] = {
            key: None if child is None else copy_tree(child, f"{path}.{key}" if path else key, whole)
            for key, child in module._modules.items()
        }
        return new

    tree = copy_tree(model, "", False)
    for name, value in constants.items():
        owner, _, key = name.rpartition(".")
        tree.get_submodule(owner).register_buffer(key, value, persistent=False)
    gm = TracedModule(tree, {mode: r.graph for mode, r in recordings.items()}, type(model), kept(model, extras(model)))
    gm.twin_error, gm._steps = twin_error, ()
    return gm


def extras(model: nn.Module) -> dict[str, Any]:
    """The root's public attributes that are neither tensors nor modules: what a pipeline reads, `config` among them."""
    found = {
        k: v
        for k, v in vars(model).items()
        if not k.startswith("_") and not isinstance(v, (torch.Tensor, nn.Module)) and k not in RESERVED
    }
    with contextlib.suppress(Exception):  # a property of the model's
        found["config"] = model.config
    found.pop("forward", None)
    found.pop("training", None)
    return found
