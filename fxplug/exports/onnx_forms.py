"""Operations that torch.onnx has no form for, or one that is wrong for some values: by others that it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

aten = torch.ops.aten
SHORT = (torch.int8, torch.int16, torch.int32)
# torch.onnx writes a product of what overflows and what vanishes
WRONG = {aten.special_erfcx.default, aten.special_log_ndtr.default}


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Return the program with the operations of `FORMS` decomposed; unchanged if it has none, as this traces it all again."""
    if not any(_changes(node) for node in program.graph.nodes):
        return program
    torchs = torch.export.default_decompositions()
    forms = {op: _form(needed, form or torchs[op]) for op, (needed, form) in FORMS.items()}
    written: ExportedProgram = program.run_decompositions(forms)
    return written


def _changes(node: fx.Node) -> bool:
    if node.target not in FORMS:
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return FORMS[node.target][0](*args, **kwargs)


def _form(needed: Callable[..., bool], form: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: form(*args, **kwargs) if needed(*args, **kwargs) else NotImplemented


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _is_hard_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, enable_gqa: bool = False, **_: Any
) -> bool:
    """Return whether torch.onnx rejects it, or does not return 0 for fully masked rows, as torch does."""
    return query.dim() != 4 or attn_mask is not None or enable_gqa


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        key, value = (_for_heads(each, query.shape[-3]) for each in (key, value))
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT
    if is_causal:
        rows, columns = (torch.arange(size, device=query.device) for size in scores.shape[-2:])
        attn_mask = rows[:, None] >= columns
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        nothing = torch.full((), -math.inf, dtype=scores.dtype, device=scores.device)
        scores = torch.where(attn_mask, scores, nothing) if attn_mask.dtype == torch.bool else scores + attn_mask
        weights = torch.where((scores == nothing).all(-1, keepdim=True), 0.0, scores.softmax(-1))
    return torch.dropout(weights, dropout_p, True) @ value if dropout_p else weights @ value


def _for_heads(values: Tensor, heads: int) -> Tensor:
    """Repeat keys or values of grouped heads for each head of the queries."""
    rows = values.unsqueeze(-3)
    shape = [*rows.shape[:-3], heads // values.shape[-3], *rows.shape[-2:]]
    return rows.expand(shape).flatten(-4, -3)


def _has_short(values: Tensor, indices: Sequence[Tensor | None], *args: Any, **kwargs: Any) -> bool:
    return any(each is not None and each.dtype in SHORT for each in indices)


def _long(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [each.long() if each is not None and each.dtype in SHORT else each for each in indices]


def _index(values: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    found: Tensor = aten.index.Tensor(values, _long(indices))
    return found


def _index_put(values: Tensor, indices: Sequence[Tensor | None], new: Tensor, accumulate: bool = False) -> Tensor:
    found: Tensor = aten.index_put.default(values, _long(indices), new, accumulate)
    return found


def _cumprod(values: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    whole = not (values.is_floating_point() or values.is_complex())
    rows = values.to(dtype or (torch.int64 if whole else values.dtype)).movedim(dim, -1)
    places = torch.arange(rows.shape[-1], device=values.device)
    seen = torch.where(places[:, None] >= places, rows.unsqueeze(-2), torch.ones((), dtype=rows.dtype, device=rows.device))
    return seen.prod(-1).movedim(-1, dim)


def _isin(elements: Any, among: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    if isinstance(elements, Tensor) and isinstance(among, Tensor):
        found = (elements.unsqueeze(-1) == among.flatten()).any(-1)
    else:  # a number, of which a program would keep a tensor that torch 2.13 loses
        found = elements == among if isinstance(elements, Tensor) else (among == elements).any()
    return ~found if invert else found


# each with when it is needed; None is torch's own decomposition
FORMS: dict[Any, tuple[Callable[..., bool], Callable[..., Any] | None]] = {
    aten.scaled_dot_product_attention.default: (_is_hard_attention, _attention),
    aten.index.Tensor: (_has_short, _index),
    aten.index_put.default: (_has_short, _index_put),
    aten.cumprod.default: (_always, _cumprod),
    aten.isin.Tensor_Tensor: (_always, _isin),
    aten.isin.Tensor_Scalar: (_always, _isin),
    aten.isin.Scalar_Tensor: (_always, _isin),
    # torch.onnx takes the logarithm of a sigmoid, which may be 0
    aten.log_sigmoid.default: (_always, None),
    aten.log_sigmoid_forward.default: (_always, None),
    aten.binary_cross_entropy_with_logits.default: (_always, None),
}
