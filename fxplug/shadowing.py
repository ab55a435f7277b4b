"""Live merge: layers read shadow weights, which are made anew from base and banks when the adapters in use change."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Lora
from .deltas import Step, Use, accumulator, changed, mapped
from .errors import SpecError
from .folding import Plan, check_unlowered, slotted, uniform
from .gates import Table
from .module import TracedModule
from .networks import GATES
from .weights import Update

HOME = "shadows"  # where the base weights lie in the module tree


def live(gm: TracedModule) -> TracedModule:
    """The module with the adapters of its slots in the weights: as fast as a merged one, and switched as before.

    Each layer with slots has a weight of its own that nothing trains, base and updates summed in float32 and rounded once;
    the graph runs no side path. `adapters.load`, `use` and `unload` of the result write the weights of those layers anew that
    an adapter of the old or the new choice has a part in, in place, so that nothing recompiles; every time from the base, so
    that nothing drifts. That costs memory for one copy of these layers, and while it runs for one layer in float32.

    Banks and tables are copies, so `gm`'s adapters and those of the result are switched apart. The base weights are shared
    and lie below `shadows`. Entries for each sample cannot be in one weight: `use` refuses them. Raises SpecError for a module
    without slots, a lowered one, and where a block cannot go into a weight, as `folding.merge` says.
    """
    check_unlowered(gm, "a live merge")
    names = slotted(gm)
    if not names:
        raise SpecError("no pass here has slots, so there is nothing to switch: merge='fold' folds what is there for good")
    plan = Plan(gm, set(names))
    tree = plan.tree
    for name in names:
        tree._modules[name] = copy.deepcopy(gm.get_submodule(name))
    home = HOME
    while home in tree._modules or hasattr(gm, home):
        home += "_"
    shadows, made = Shadows(names), {}
    for use in plan.changed():
        owner, _, last = use.name.rpartition(".")
        module = tree.get_submodule(owner)
        base = module._parameters[last]
        assert base is not None  # slots have no bias, so that none is new
        key = (id(base), use.steps)
        if key not in made:
            made[key] = nn.Parameter(base.detach().clone(), requires_grad=False)
            shadows.add(use, base, {step.block: plan.path(step) for step in use.steps})
        module._parameters[last] = made[key]
    shadows.training = tree.training
    tree._modules[home] = shadows
    new = TracedModule(tree, plan.graphs, gm._origin, gm._extras)
    new.twin_error = gm.twin_error
    forms = {row.name.rpartition(".")[0]: "live merge" for row in shadows.rows}
    new.meta = {**gm.meta, "source": gm, "forms": {**gm.meta.get("forms", {}), **forms}}
    shadows.switched(new)
    return new


@dataclass
class Row:
    """A shadow weight: its name, that of its base among the shadows' parameters, and the banks that go into it."""

    name: str
    base: str
    use: Use
    steps: list[tuple[Step, str, str]]  # with the path of the bank and the name of its pass


class Shadows(nn.Module):
    """The base weights of a live merge, and what is needed to make the layers' own of them.

    `switched(root)` is called after each change of the adapters of `root`, the module that all this is a part of.
    """

    def __init__(self, passes: list[str]) -> None:
        super().__init__()
        self.passes = list(passes)
        self.rows: list[Row] = []
        self.state: dict[str, Any] = {}  # what each shadow was made of
        self.filled: dict[str, Any] = {}  # which slots of a bank hold something, and for which content that was found
        self.accepted: dict[str, tuple[Tensor, int]] = {}  # the last choice that one weight could hold

    def add(self, use: Use, base: nn.Parameter, paths: dict[str, str]) -> None:
        """Keep the base of one weight."""
        name = f"base_{len(self.rows)}"
        self.register_parameter(name, base)
        steps = [(step, paths[step.block], paths[step.block].partition(".")[0]) for step in use.steps]
        self.rows.append(Row(use.name, name, use, steps))

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError("shadows hold weights; call the model")

    @torch.no_grad()
    def switched(self, root: nn.Module) -> None:
        """Make those weights anew that another choice or another content of the slots concerns.

        Raises SpecError where samples of a batch differ; the choice before is in force again then.
        """
        gates = self.choice(root)
        for row in self.rows:
            now = tuple(self.content(root, path, gates[name]) for _, path, name in row.steps)
            if self.state.get(row.name) != now:
                self.make(root, row, gates)
                self.state[row.name] = now

    def choice(self, root: nn.Module) -> dict[str, list[float]]:
        """What is taken of each slot, by pass."""
        try:
            gates = {name: uniform(root, name) for name in self.passes}
        except SpecError:
            for name, (weights, entries) in self.accepted.items():
                table = _table(root, name)
                table.weights.copy_(weights.expand_as(table.weights))
                table.entries.fill_(entries)
            raise SpecError(
                "entries for each sample do not go with a live merge, where all samples have one weight; nothing was changed: "
                "use one choice for all, or lower with merge=None for mixed batches"
            ) from None
        for name, row in gates.items():
            self.accepted[name] = row, int(_table(root, name).entries)
        return {name: row.tolist() for name, row in gates.items()}

    def content(self, root: nn.Module, path: str, gates: list[float]) -> Any:
        """What a bank gives with these gates: those of the slots that hold something, and which content that is."""
        block = root.get_submodule(path)
        now = tuple((p.data_ptr(), p._version) for p in block.parameters())
        known = self.filled.get(path)
        if known is None or known[0] != now:
            known = self.filled[path] = now, _filled(block)
        used = tuple(gate if full else 0.0 for gate, full in zip(gates, known[1], strict=True))
        return (used, now) if any(used) else None

    def make(self, root: nn.Module, row: Row, gates: dict[str, list[float]]) -> None:
        """Write one shadow weight, from its base."""
        name = getattr(root, "meta", {}).get("originals", {}).get(row.name, row.name)
        shadow = root.get_parameter(name)
        base = self.get_parameter(row.base)
        value = base.detach().to(accumulator(base))
        for step, path, name in row.steps:
            block, weights = root.get_submodule(path), torch.tensor(gates[name], dtype=torch.float32)
            if step.place == "param":
                assert isinstance(block, Update)
                value = mapped(value, block, weights)
            else:
                value = changed(value, block, step, row.use, weights)
        shadow.copy_(value)


def _table(root: nn.Module, name: str) -> Table:
    found = root.get_submodule(f"{name}.{GATES}.table")
    assert isinstance(found, Table)
    return found


def _filled(block: nn.Module) -> list[bool]:
    """Which slots of a bank hold an adapter: one that is free is all zeros."""
    assert isinstance(block, (Lora, Update))
    if isinstance(block, Lora):
        up: Any = block.up.weight
        rows = torch.unflatten(up.flatten(1), 1, (block.slots, -1)).transpose(0, 1)
        return [bool(full) for full in rows.flatten(1).any(1).tolist()]
    rows = torch.stack([p.flatten(1).any(1) for p in block.parameters()]).any(0)
    return [bool(full) for full in rows.tolist()]
