"""Which form a layer with its low-rank update takes: what was measured fastest, else the stock one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import fx, nn

from . import products
from .errors import SpecError, did_you_mean

# stock: as the pass put it in. fused: one function, on a CPU the cheaper of the next two at each call. added: into the base's
# fresh output. remerge: into the weight. kernel: one Triton kernel, on GPUs.
FORMS = ("stock", "fused", "remerge")


class Case(NamedTuple):
    """What a form's time depends on. `rows` is what the trace had: batch times tokens; `slots` 0 is a plain `Lora`."""

    device: str
    dtype: str
    rows: int
    inner: int
    outer: int
    rank: int
    slots: int


def check(how: str) -> None:
    """Raises SpecError unless `how` is a form or `auto`."""
    if how != "auto" and how not in FORMS:
        known = ["auto", *FORMS]
        raise SpecError(f"fuse has no form {how!r}{did_you_mean(str(how), known)}; it has {', '.join(known)}")


def case_of(node: fx.Node, layer: nn.Linear, block: Any) -> Case:
    """The case of a linear layer that `node` calls, with the `Lora` behind it."""
    outer, inner = layer.weight.shape
    rows = math.prod((node.meta.get("shape") or (0,))[:-1])
    dtype = str(layer.weight.dtype).removeprefix("torch.")
    return Case(layer.weight.device.type, dtype, int(rows), inner, outer, block.rank, block.slots)


def choose(case: Case) -> str:
    """The form for a case."""
    return "fused"


def function(form: str, slots: bool) -> Any:
    """What stands in the graph for a layer and its `Lora` in this form."""
    return {"fused": products.bank_linear if slots else products.lora_linear}[form]
