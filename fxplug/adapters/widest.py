"""Networks whose size is that of the layers that a pass matches: tensors that its blocks share."""

from __future__ import annotations

from collections.abc import Sequence

from ..blocks.vera import Projections
from ..core.ir.regions import find_regions
from ..core.ir.traced_module import TracedModule
from ..core.quantised import get_weight_shape
from ..core.rewriter.matches import find_hits
from ..core.spec.rules import Match


def projections(
    gm: TracedModule, at: str | Sequence[str], within: Sequence[str] = (), rank: int = 256, key: int = 0
) -> Projections:
    """Make VeRA's matrices for the widest of the linear layers at these paths. Raises SpecError for a rank below 1."""
    wanted = Match(path=at, module=["Linear", "TransposedLinear"], within=within)
    found = ((regions, hit) for regions in find_regions(gm) for hit in find_hits(regions, wanted))
    modules = [regions.module(hit.key.partition("@")[0]) for regions, hit in found]
    shapes = [get_weight_shape(module, module._parameters["weight"]) for module in modules]  # type: ignore[arg-type]
    out, inner = (max((shape[dim] for shape in shapes), default=1) for dim in (0, 1))  # of none, find says so
    return Projections(rank, inner, out, key)
