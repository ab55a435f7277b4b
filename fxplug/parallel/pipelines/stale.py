"""Tokens split over processes whose exchange is a step late: DistriFusion (Li et al. 2024, arXiv 2402.19481)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.errors import SpecError
from ...core.ir.traced_module import TracedModule
from .pipeline import ImageRun, PipeFusion
from .stages import Stages


class StaleSequence(PipeFusion):
    """A denoiser each of whose processes runs its patch of the tokens, with what the others had at the step before.

    What a step gives for others is on its way while the next is computed; only its result is waited for. The steps in one piece
    run everywhere. One process without others runs all patches, with the same values.
    """

    by_stages = False

    def __init__(self, gm: TracedModule, stages: Stages, *options: Any) -> None:
        if stages.others:
            raise SpecError(
                f"'{stages.others[0]}' is computed from patches of different steps and affects the result: use pipefusion"
            )
        super().__init__(gm, stages, *options)

    def forget(self) -> None:
        """Wait for pending transfers, and clear the state of an image's calls."""
        for wait, *_ in getattr(self, "waiting", {}).values():
            wait()
        super().forget()
        self.waiting: dict[int, Any] = {}  # by the run's identity: what is on its way

    def step(self, run: ImageRun, inputs: list[Any], entire: bool) -> Any:
        """Return the result for all tokens: in one piece, or by patches with the cached values of the others."""
        if entire:
            self.arrive(run)
            return super().step(run, inputs, True)
        self.arrive(run)
        (stage,) = self.plan.stages
        fixed = [run.fixed[name] for name in stage.fixed_used]
        early, cells = self.early(0, run, inputs), [run.cells[row.node] for row in stage.kept]
        ranks = range(self.patches) if self.peers is None else [self.peers.rank]
        parts = {rank: stage.late(rank, self.patches, *early, *fixed, *cells)[1] for rank in ranks}
        now = {row.node for row in self.plan.wholes}
        rows = {at_once: [i for i, row in enumerate(stage.kept) if (row.node in now) is at_once] for at_once in (True, False)}
        for at_once, indices in rows.items():
            sizes = [part[1:] for part in (parts[ranks[0]][i] for i in indices)]
            wait: Any = tuple  # nothing
            if self.peers is None:
                found = [[parts[rank][i][0] for i in indices] for rank in ranks]
            else:
                self.peers.device = self.device
                wait, found = self.peers.swap([parts[ranks[0]][i][0] for i in indices], (run.shapes, at_once))
            self.waiting[id(run)] = wait, found, indices, sizes
            if at_once:
                self.arrive(run)
        return self.ended(run, inputs, run.cells, [])

    def arrive(self, run: ImageRun) -> None:
        """Store the values of pending transfers."""
        wait, found, indices, sizes = self.waiting.pop(id(run), (tuple, [], [], []))
        wait()
        kept = self.plan.stages[0].kept
        for patch, values in enumerate(found):
            for i, value, size in zip(indices, values, sizes, strict=True):
                tensor: Tensor = value
                self.put(run, kept[i], tensor, patch, self.patches, list(size))
