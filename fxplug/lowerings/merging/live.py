"""Live merge: layers read shadow weights, which are made anew from base and banks when the adapters in use change."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks.base import Table, check_values
from ...blocks.gathered import GatheredDora
from ...blocks.lora import Lora
from ...blocks.low_rank import view_slot
from ...blocks.scale import Scale
from ...blocks.weight_update import Update
from ...core.errors import SpecError
from ...core.extensions import DERIVATION
from ...core.ir.calls import ResultWatcher
from ...core.ir.comparison import is_equal
from ...core.ir.containers import list_leaves
from ...core.ir.traced_module import TracedModule
from ...core.locks import with_read_lock
from ...core.spec.rules import GATES
from ...core.torch_internals.modules import without_compiler
from ..lowering import KeptBases, LoweredForm, find_source_tensor
from .fold import FoldPlan, check_no_regions, check_unlowered, choose_gates, find_slotted, get_uniform_gates
from .updates import ParameterUse, add_lora, choose_accumulator, fold_gains, get_weight, map_parameter, multiply_layer

HOME = "shadows"  # where the base weights lie in the module tree
Parts = list[tuple[float, int, list[Tensor]]]  # of a bank: how much of which slot, and what that holds


@with_read_lock
def merge_live(gm: TracedModule) -> TracedModule:
    """Return the module with the adapters of its slots in the weights: as fast as a merged one, and switched as before.

    Each layer with slots has its own weight that nothing trains, base and updates summed in float32 and rounded once; the graph
    runs no side path. `adapters.load`, `use` and `unload` of the result rewrite the weights of those layers that the old or the
    new adapters update, in place, so that nothing recompiles; always from the base, so that errors do not accumulate. That
    costs memory for one copy of these layers, and while it runs for one layer in float32.

    Banks and tables are copies, so `gm`'s adapters and those of the result are switched separately. The base weights are shared
    and are below `shadows`. Entries for each sample cannot be in one weight: `use` refuses them. Raises SpecError for a module
    without slots, a lowered one, and if a block cannot be folded into a weight, as `fold.merge` does.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # what is made here is written later
            return merge_live(gm)
    check_unlowered(gm, "a live merge")
    names = find_slotted(gm)
    if not names:
        raise SpecError("no pass here has slots, so there is nothing to switch: use merge='fold'")
    plan = FoldPlan(gm, set(names))
    plan.check()
    for name in names:
        if _table(gm, name).weights.is_meta:
            raise SpecError(
                "merge='live' computes weights, and the meta device has no values: move the module to another device first"
            )
    tree = plan.tree
    tree._modules.update({name: copy.deepcopy(gm.get_submodule(name)) for name in names})
    home = HOME
    while home in tree._modules or hasattr(gm, home):
        home += "_"
    shadows, made = Shadows(names), {}
    for use in plan.changed():
        if (after := next((step for step in use.steps if step.via), None)) is not None:
            raise SpecError(
                f"'{after.block}' reads what '{after.via}' scales, which merge='live' cannot keep in a weight: use 'fold'"
            )
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
    forms = {row.name.rpartition(".")[0]: "live merge" for row in shadows.rows}
    forms = {**gm.meta.get("forms", {}), **forms}
    new = gm.derived(tree, plan.graphs, source=gm, banks=names, forms=forms, **{DERIVATION: LoweredForm()})
    shadows.switched(new)
    return new


@dataclass
class Row:
    """A shadow weight: its name, that of its base among the shadows' parameters, and the banks that go into it."""

    name: str
    base: str
    kind: str  # of its layer
    steps: list[tuple[str, str, str]]  # where a bank acts, its path, and the name of its pass


def _shadow(root: nn.Module, row: Row) -> nn.Parameter:
    return root.get_parameter(getattr(root, "meta", {}).get("originals", {}).get(row.name, row.name))


class Shadows(ResultWatcher, KeptBases):
    """The base weights of a live merge, and what is needed to make the layers' own of them.

    `switched(root)` is called after each change of the adapters of `root`, the module that all this is a part of.
    """

    def __init__(self, passes: list[str]) -> None:
        super().__init__()
        self.passes = list(passes)
        self.rows: list[Row] = []
        self.state: dict[str, list[Parts]] = {}  # what each shadow was made of, by banks
        self.writes = 0  # of all shadows

    def add(self, use: ParameterUse, base: nn.Parameter, paths: dict[str, str]) -> None:
        """Store the base of one weight."""
        name = f"base_{len(self.rows)}"
        self.register_parameter(name, base)
        steps = [(step.place, paths[step.block], paths[step.block].partition(".")[0]) for step in use.steps]
        self.rows.append(Row(use.name, name, use.kind, steps))

    def bases(self, root: TracedModule) -> dict[int, nn.Parameter]:
        return {id(find_source_tensor(root, row.name)): self.get_parameter(row.base) for row in self.rows}

    def find_base(self, root: nn.Module, name: str) -> nn.Parameter | None:
        """Return the base of a weight of the module that this is a part of; None where that is no merged one."""
        originals = getattr(root, "meta", {}).get("originals", {})
        row = next((row for row in self.rows if originals.get(row.name, row.name) == name), None)
        return None if row is None else self.get_parameter(row.base)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.state.clear()  # the weights may have been loaded too

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError("this module only has merged weights: call the model")

    @without_compiler
    def after_call(self, result: Any) -> None:
        """Check that a backward pass through the result of a call reads the weights of that call."""
        if torch.is_grad_enabled():
            for value in list_leaves(result):
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    value.grad_fn.register_prehook(functools.partial(self._check_unchanged, self.writes))

    def _check_unchanged(self, writes: int, _: Any) -> None:
        if writes != self.writes:
            raise SpecError(
                "the adapters of a live merge were changed between a forward pass and its backward pass, which reads the "
                "merged weights too: call backward() before use(...), or lower without merge='live'"
            )

    @torch.no_grad()
    def switched(self, root: nn.Module) -> None:
        """Recompute the weights that another choice or other contents of the slots affect.

        Raises SpecError if samples of a batch differ, and on the meta device. A weight that was not finished is recomputed by
        the next call.
        """
        gates = self.choice(root)
        for module in (self, *(root.get_submodule(path) for row in self.rows for _, path, _ in row.steps)):
            for parameter in module.parameters():
                check_values(parameter)
        for row in self.rows:
            check_values(_shadow(root, row))
        for row in self.rows:
            old = self.state.pop(row.name, None)
            blocks = [(root.get_submodule(path), gates[name]) for _, path, name in row.steps]
            now = [_parts(block, choose_gates(block, own).tolist()) for block, own in blocks]
            if old is None or not is_equal(old, now):
                self.make(root, row, now, gates)
                old = [[(gate, slot, [t.clone() for t in tensors]) for gate, slot, tensors in parts] for parts in now]
            self.state[row.name] = old

    def choice(self, root: nn.Module) -> dict[str, Tensor]:
        """Return the gates of each slot, by pass."""
        for name in self.passes:
            check_no_regions(root, name)
        try:
            return {name: get_uniform_gates(root, name) for name in self.passes}
        except SpecError:
            raise SpecError(
                "per-sample adapters are not supported with merge='live', where all samples share one weight (nothing was "
                "changed): use the same adapters for all samples, or lower with merge=None for mixed batches"
            ) from None

    def make(self, root: nn.Module, row: Row, now: list[Parts], gates: dict[str, Tensor]) -> None:
        """Write one shadow weight, from its base and its current updates."""
        self.writes += 1
        shadow = _shadow(root, row)
        base = self.get_parameter(row.base)
        parts = [part for part, state in zip(row.steps, now, strict=True) if state]
        if not parts:
            shadow.copy_(base)
            return
        value = base.detach().to(choose_accumulator(base))
        for index, (place, path, name) in enumerate(parts):
            block = root.get_submodule(path)
            weights = choose_gates(block, gates[name])
            if place == "param":
                value = map_parameter(value, block, weights)
                continue
            if isinstance(block, Scale):
                value = multiply_layer(value, block.combine(weights), place, row.kind)
                continue
            if isinstance(block, GatheredDora):
                value = fold_gains(value, block, weights, value.dim() == 1, row.kind)
                continue
            assert isinstance(block, Lora)
            last = index == len(parts) - 1 and value.dtype == shadow.dtype and shadow.is_contiguous()
            turned = row.kind == "TransposedLinear"
            value = add_lora(value, block, weights, shadow.detach() if last else None, turned)
        if value.data_ptr() != shadow.data_ptr():
            shadow.copy_(value)


def _table(root: nn.Module, name: str) -> Table:
    found = root.get_submodule(f"{name}.{GATES}.table")
    assert isinstance(found, Table)
    return found


def _slot(block: nn.Module, slot: int) -> list[Tensor]:
    """Return the contents of one slot of a bank; the last tensor is nonzero if there are any."""
    if isinstance(block, Update):
        parts = [p.detach()[slot] for p in block.parameters()]
        return [*parts, torch.stack([part.any() for part in parts])]
    if isinstance(block, Scale):
        return [block.weight.detach()[slot]]
    assert isinstance(block, Lora)
    down, up = get_weight(block.down).detach(), get_weight(block.up).detach()
    groups = 0 if block.kind == "Embedding" else block.geometry.get("groups", 1)
    halves = [view_slot(down, slot, block.slots, groups), view_slot(up, slot, block.slots)]
    if isinstance(block, GatheredDora):
        parts = [*halves, *(getattr(block, name).detach()[slot] for name in block.gains[: 1 + block.biased])]
        return [*parts, torch.stack([part.any() for part in parts])]
    return halves


def _parts(block: nn.Module, gates: list[float]) -> Parts:
    """Return the used parts of a bank, without free slots, which are all zeros."""
    found = [(gate, slot, _slot(block, slot)) for slot, gate in enumerate(gates) if gate]
    return [part for part in found if part[2][-1].any()]
