"""Stages that do not wait at the end of a step: results are promised, and what becomes of them is computed patch by patch.

Between two calls of a denoiser somebody's pipeline combines conditions and takes a step of its scheduler, elementwise as a
rule. The last stage does so with each patch as soon as it has it, and hands the patch of the next step's input to the first
stage, which need not wait for the other patches. Where a step is no elementwise one, the next call says what it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.errors import SpecError
from ...core.torch_internals import modules as pytree
from ..runtime.checksums import check_together
from .deferred import DeferredComputation, DeferredTensor, find_owners
from .patches import put_patch, take_patch
from .pipeline import ImageRun, PipeFusion


@dataclass
class _Promise:
    """A call of which the last stage has not run its patches."""

    run: ImageRun
    inputs: list[Any]
    laters: dict[int, DeferredTensor]
    results: list[DeferredComputation]


@dataclass
class _PromisedRun:
    """What is known of a run that promises: what its calls give, and as far as they are known here, its inputs."""

    outline: Any
    marks: list[list[Tensor]]  # by patch, of each result
    inputs: dict[int, Tensor] = field(default_factory=dict)


class OverlappingPipeFusion(PipeFusion):
    """PipeFusion over processes that promises its results (see the module). In one process nothing is promised."""

    promise: _Promise | None = None

    def forget(self) -> None:
        """Run the deferred call, and clear the state of an image's calls."""
        self.finish()  # nobody may have asked for the last result: what was sent is taken
        super().forget()
        self.known: dict[int, _PromisedRun] = {}  # by the run's identity
        self.owned: dict[Any, list[Tensor]] = {}  # the elements of an input, by patch
        self.waited = ""  # the operation that needed a whole

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the next step of an image; the result is deferred in a step that runs by patches.

        Raises GuardError for a call that the model does not take, and SpecError if a step in between needed a whole tensor.
        """
        if self.links is None:
            return super().forward(*args, **kwargs)
        inputs = self.bound(args, kwargs)
        run = self.begin(inputs)
        if self.waited:
            raise SpecError(
                f"the scheduler's step cannot run patch by patch: {self.waited} needs the whole output of the model; use a "
                "scheduler that works element by element, or set overlap=False, which waits at each step"
            )
        # of what is promised nothing is known but how it will look
        looks = lambda v: f"{v.dtype} {tuple(v.shape)}" if isinstance(v, DeferredTensor) else v  # noqa: E731
        self.compare(run, pytree.tree_map(looks, inputs))
        entire = self.is_full_step(run)
        if not entire:
            return self.promised(run, inputs)
        inputs = pytree.tree_map(lambda v: v.settled() if isinstance(v, DeferredTensor) else v, inputs)
        self.finish()
        result = self.step(run, inputs, True)
        self.learn(run, inputs, result)
        return result

    def learn(self, run: ImageRun, inputs: list[Any], result: Any) -> None:
        """Find the elements of a result that each patch owns: the code after the last stage runs with all others set to NaN."""
        marks = []
        for patch in range(self.patches):
            cells = {}
            for row in self.plan.wholes:
                kept, sizes = run.cells[row.node], run.sizes[row.node]
                own = take_patch(kept, patch, self.patches, row.dim, row.inner, False, *sizes)
                empty = torch.full_like(kept, torch.nan)
                cells[row.node] = put_patch(own, empty, patch, self.patches, row.dim, row.inner, *sizes)
            found = self.ended(run, inputs, cells, run.others)
            marks.append([t for t in pytree.tree_leaves(found) if isinstance(t, Tensor)])
        for rows in zip(*marks, strict=True):
            if find_owners(rows) is None:
                raise SpecError(
                    "the code after the last stage mixes patches, so it cannot run patch by patch: set overlap=False"
                )
        self.known[id(run)] = _PromisedRun(result, marks)

    # --- a call whose result is promised

    def promised(self, run: ImageRun, inputs: list[Any]) -> Any:
        """Return a call's deferred result.

        The last stage runs the call deferred before and passes on the patches of these inputs; the others run this call.
        """
        leaves, tree = pytree.tree_flatten(inputs)
        laters = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, DeferredTensor)}
        for i, later in laters.items():
            self.record_patch_elements(i, later)
        known = self.known[id(run)]
        places = [i for i, value in enumerate(inputs) for _ in pytree.tree_leaves(value)]
        for i, leaf in enumerate(leaves):
            if i in laters:
                old = known.inputs.get(i)
                empty = torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.device)
                leaves[i] = empty if old is None else empty.copy_(old)  # what was given is somebody's
            if isinstance(leaf, Tensor):
                known.inputs[i] = leaves[i]
        inputs = pytree.tree_unflatten(leaves, tree)
        last = len(self.plan.stages) - 1
        needed = {s: [i for i in laters if places[i] in self.read(s)] for s in range(last + 1)}
        results = [DeferredComputation() for _ in known.marks[0]]
        assert self.links is not None
        if self.links.rank == last:
            for patch in range(self.patches):
                self.fulfil(patch)
                for i, later in laters.items():
                    value = later.recipe.at("value", patch)
                    for stage in range(last):
                        if i in needed[stage]:
                            owned = self.owned[i, later.shape][patch]
                            self.links.send(stage, value.reshape(-1)[owned], ("back", i, later.shape, later.dtype, patch))
            self.promise = _Promise(run, inputs, {i: laters[i] for i in needed[last]}, results)
        else:
            early: Any = None
            for patch in range(self.patches):
                for i in needed[self.links.rank]:
                    key = ("back", i, laters[i].shape, laters[i].dtype, patch)
                    leaves[i].reshape(-1)[self.owned[i, laters[i].shape][patch]] = self.links.receive(last, key)
                if early is None or needed[self.links.rank]:
                    early = {self.links.rank: self.early(self.links.rank, run, inputs)}
                self.patch(self.links.rank, run, inputs, early, patch, self.patches, {})
        for i, later in laters.items():
            later.recipe.forget(self.owned[i, later.shape], later.shape)
        return self.of(known, results)

    def read(self, stage: int) -> set[int]:
        """Return the positions of the arguments that a stage reads; for the last one those of the tail too."""
        last = len(self.plan.stages) - 1
        return self.plan.stages[stage].reads | (self.plan.reads if stage == last else set())

    def record_patch_elements(self, i: int, later: DeferredTensor) -> None:
        """Record the elements of an input that each patch owns, at its first deferred value."""
        if (i, later.shape) in self.owned:
            return
        found = find_owners([later.recipe.at("mark", patch) for patch in range(self.patches)])
        if found is None:
            raise SpecError("the code between two calls mixes patches, so it cannot run patch by patch: set overlap=False")
        self.owned[i, later.shape] = found

    def of(self, known: _PromisedRun, results: list[DeferredComputation]) -> Any:
        """Return a call's result with deferred tensors in place of tensors."""
        leaves, tree = pytree.tree_flatten(known.outline)
        rows = iter(enumerate(results))
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                i, recipe = next(rows)
                recipe.found = {**{("mark", patch): marks[i] for patch, marks in enumerate(known.marks)}, **recipe.found}
                leaves[k] = DeferredTensor(leaf, self.device, recipe, self.settle)
        return pytree.tree_unflatten(leaves, tree)

    def fulfil(self, patch: int) -> None:
        """Run a patch of the deferred call, in the last stage."""
        promise = self.promise
        if promise is None:
            return
        last, leaves = len(self.plan.stages) - 1, pytree.tree_leaves(promise.inputs)
        for i, later in promise.laters.items():
            owned = self.owned[i, later.shape][patch]
            leaves[i].reshape(-1)[owned] = later.recipe.at("value", patch).reshape(-1)[owned]
        values: dict[str, Any] = {}
        if patch == 0 or promise.laters:
            self.first = {last: self.early(last, promise.run, promise.inputs)}
        self.patch(last, promise.run, promise.inputs, self.first, patch, self.patches, values)
        result = self.ended(promise.run, promise.inputs, promise.run.cells, [values[name] for name in self.plan.others])
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        for recipe, tensor in zip(promise.results, tensors, strict=True):
            recipe.found["value", patch] = tensor
        if patch == self.patches - 1:
            self.promise = None

    def finish(self) -> None:
        """Run the rest of the deferred call."""
        if self.promise is not None:
            for patch in range(self.patches):
                self.fulfil(patch)

    def settle(self, recipe: DeferredComputation, like: Tensor, why: str) -> Tensor:
        """Return the whole of a deferred tensor, broadcast by the last stage."""
        assert self.links is not None
        last, found = len(self.plan.stages) - 1, None
        if self.links.world is not None:
            check_together(self.links.world, f"{why or 'the next step'}, which needs all of a result")
        self.waited = self.waited or why
        if self.links.rank == last:
            self.finish()
            for patch in range(self.patches):
                value, mark = recipe.at("value", patch), recipe.at("mark", patch)
                found = value.clone() if found is None else torch.where(mark.isnan(), found, value)
        whole: Tensor = self.links.share(last, found, ("settle", like.shape, like.dtype))
        return whole
