"""The weights that stages read, and those that leave the device while only the step runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.torch_internals.tensors import memory_id
from .cut import HoistStage, StageCut
from .reads import is_table
from .stamps import Place


def list_places(cut: StageCut, stage: HoistStage) -> list[Place]:
    """Return where the tensors stand that a stage reads, as tables of modules and keys in them; not those of slots' tables."""
    found: dict[tuple[int, str], Place] = {}
    for node in stage.nodes:
        if node.op == "get_attr":
            home, _, key = str(node.target).rpartition(".")
            owner = cut.root.get_submodule(home)
            found[id(owner), key] = (owner._parameters if key in owner._parameters else owner._buffers, key)
        elif node.op == "call_module" and not is_table(node, cut.root):
            for layer in cut.root.get_submodule(str(node.target)).modules():
                for table in (layer._parameters, layer._buffers):
                    found.update({(id(layer), key): (table, key) for key in table})
    return list(found.values())


def list_layers(cut: StageCut, stage: HoistStage) -> list[nn.Module]:
    """Return the layers that a stage calls, with those inside, but for the tables of slots."""
    called = [str(node.target) for node in stage.nodes if node.op == "call_module" and not is_table(node, cut.root)]
    return list(dict.fromkeys(layer for path in dict.fromkeys(called) for layer in cut.root.get_submodule(path).modules()))


def list_homes(cut: StageCut) -> list[tuple[dict[str, Any], str]]:
    """Return where the modules stand that stages before the step call, or read weights of, as tables of modules and keys."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    for node in dict.fromkeys(node for stage in cut.stages[:-1] for node in stage.nodes):
        if node.op not in ("get_attr", "call_module"):
            continue
        path, owner = str(node.target), cut.root
        for key in path.split(".")[: None if node.op == "call_module" else -1]:
            found[id(owner), key] = owner._modules, key
            owner = owner._modules[key]  # type: ignore[assignment]
        for inner in owner.modules() if node.op == "call_module" else ():
            found.update({(id(inner), key): (inner._modules, key) for key in inner._modules})
    return list(found.values())


def list_early(cut: StageCut) -> dict[str, list[Tensor]]:
    """Return for each stage but the step the tensors that it reads and no step does; one is listed with each of its stages.

    Tensors that share memory with one that the step reads are the step's.
    """
    step = _tensors(list_places(cut, cut.stages[-1]))
    storages = {memory_id(tensor.untyped_storage()) for tensor in step}
    found = {}
    for stage in cut.stages[:-1]:
        own = _tensors(list_places(cut, stage))
        found[stage.name] = [tensor for tensor in own if memory_id(tensor.untyped_storage()) not in storages]
    return found


def _tensors(places: Iterable[Place]) -> list[Tensor]:
    values = {id(value): value for table, key in places if (value := table.get(key)) is not None}
    return [value for value in values.values() if type(value) in (Tensor, nn.Parameter)]


class Offload:
    """Weights that no step reads, on another device while only steps run; `stages` has those of each stage."""

    def __init__(self, stages: dict[str, list[Tensor]], device: torch.device) -> None:
        self.stages, self.device = stages, device
        self.homes = {id(tensor): tensor.device for own in stages.values() for tensor in own}
        self.here = {id(tensor) for own in stages.values() for tensor in own}

    def bring(self) -> None:
        """Move all weights to where the model computes."""
        self._move(self.stages.values(), True)

    def send(self) -> None:
        """Move all weights away."""
        self._move(self.stages.values(), False)

    def visit(self, stage: str) -> None:
        """Move the weights of one stage to where the model computes, and the others away."""
        stays = {id(tensor) for tensor in self.stages[stage]}
        self._move([[t for t in own if id(t) not in stays] for own in self.stages.values()], False)
        self._move([self.stages[stage]], True)

    @torch.no_grad()
    def _move(self, stages: Iterable[Sequence[Tensor]], here: bool) -> None:
        for tensor in {id(t): t for own in stages for t in own}.values():
            if (id(tensor) in self.here) != here:
                tensor.data = tensor.data.to(self.homes[id(tensor)] if here else self.device)
                (self.here.add if here else self.here.discard)(id(tensor))

    def count_bytes(self) -> int:
        """Return how many bytes of weights that no step reads are where the model computes now."""
        tensors = {id(t): t for own in self.stages.values() for t in own}
        return sum(tensor.nbytes for key, tensor in tensors.items() if key in self.here)
