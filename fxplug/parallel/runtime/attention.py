"""Attention over tokens that are split: by heads (Ulysses), around a ring, or both.

Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv 2309.14509), Liu et al. 2023 (Ring Attention, arXiv 2310.01889), Fang and Zhao
2024 (USP, arXiv 2405.07719).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import layouts
from .collectives import Collective, check_integer, exchange, gather
from .mesh import SEQUENCE
from .ring import attend_ring


class Attention(Collective):
    """`scaled_dot_product_attention` of parts: forward(query, key, value, mask, scale, *sizes).

    query, key and value are (..., heads, tokens, features) or (batch, tokens, features), with tokens split over ring x
    ulysses. `mask` is whole: None, or what the function takes for the whole; `causal` is its is_causal. `sizes` are the whole
    sizes of the queries' streams, then, after the first `queries` of them, of the keys'.
    """

    def __init__(self, ways: dict[str, int], queries: int = 1, causal: bool = False) -> None:
        super().__init__(ways, SEQUENCE)
        self.queries, self.causal = check_integer("queries", queries, 1), bool(causal)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, *sizes: int
    ) -> Tensor:
        given, lead, dims = (sizes[: self.queries], sizes[self.queries :]), query.shape[:-3], query.dim()
        if dims > 4:
            if mask is not None and mask.dim() > 3:
                mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
            query, key, value = (t.flatten(0, -4) for t in (query, key, value))
        query, key, value = (t[(None,) * (4 - t.dim())] for t in (query, key, value))  # what is no head counts as one
        found = self.attend(query, key, value, mask, scale, *given)
        return found.reshape(*lead, *found.shape[1:]) if dims > 4 else found[(0,) * (4 - dims)]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
        queries: Sequence[int],
        keys: Sequence[int],
    ) -> Tensor:
        """Compute attention of (batch, heads, tokens, features)."""
        world = self.here()
        batch, heads = (max(t.shape[d] for t in (query, key, value)) for d in (0, 1))
        query = query.expand(batch, heads if query.shape[1] == 1 else -1, -1, -1)  # as the function itself does
        most = max(key.shape[1], value.shape[1])
        key, value = (t.expand(batch, most if t.shape[1] == 1 else -1, -1, -1) for t in (key, value))
        inner, ring = world.sizes["ulysses"], world.sizes["ring"]
        mine, column = world.ranks["ring"], world.ranks["ulysses"]
        everyone = inner * ring
        row = range(mine * inner, (mine + 1) * inner)  # the ranks whose tokens come together here
        by_heads = inner > 1 and heads >= inner
        if key.shape[1] != heads and (ring > 1 or key.shape[1] % inner or heads % inner):
            key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
        if inner > 1:
            asked, held = ([layouts.count_all(sizes, everyone)[rank] for rank in row] for sizes in (queries, keys))
            group = world.groups.get("ulysses")
            if by_heads:
                query = self.to_heads(query, asked, column, group)
                key, value = (self.to_heads(t, held, column, group) for t in (key, value))
            else:  # fewer heads than processes: keys and values of all
                key, value = (gather(t, 2, held, column, group) for t in (key, value))
        ours = row if by_heads or inner == 1 else [row[column]]
        mask = self.rows(mask, queries, ours, everyone, query, sum(keys))
        mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
        if mask is not None and mask.shape[1] > 1 and by_heads:
            mask = mask.narrow(1, layouts.find_start(heads, column, inner), query.shape[1])
        if ring == 1:
            if mask is not None:
                mask = self.columns(mask, keys, row, everyone)
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
            )
        else:
            ranks = [range(r * inner, (r + 1) * inner) for r in range(ring)]
            lengths = [sum(layouts.count_all(keys, everyone)[rank] for rank in there) for there in ranks]
            masks = [None if mask is None else self.columns(mask, keys, there, everyone) for there in ranks]
            out = attend_ring(query, key, value, masks, scale, lengths, mine, world.groups.get("ring"))
        return self.to_tokens(out, asked, column, heads, world.groups.get("ulysses")) if by_heads else out

    def rows(
        self, mask: Tensor | None, sizes: Sequence[int], ranks: Sequence[int], world: int, query: Tensor, keys: int
    ) -> Tensor | None:
        """Return the rows of a mask for the queries of this process."""
        if self.causal:
            at = layouts.list_positions(sizes, ranks, world, query.device)
            return torch.arange(keys, device=query.device) <= at[:, None]
        if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
            return mask
        return mask.index_select(-2, layouts.list_positions(sizes, ranks, world, mask.device))

    def columns(self, mask: Tensor, sizes: Sequence[int], ranks: Sequence[int], world: int) -> Tensor:
        """Return the columns of a mask for the keys of some ranks."""
        if mask.shape[-1] == 1:
            return mask
        return mask.index_select(-1, layouts.list_positions(sizes, ranks, world, mask.device))

    def to_heads(self, x: Tensor, counts: Sequence[int], rank: int, group: Any) -> Tensor:
        """Exchange some tokens of all heads for all tokens of some heads; (batch, heads, tokens, features)."""
        parts = layouts.count_all([x.shape[1]], len(counts))
        shapes = [(x.shape[0], parts[rank], n, x.shape[3]) for n in counts]
        return torch.cat(self.swapped(torch.split(x, parts, 1), shapes, rank, group), 2)

    def to_tokens(self, x: Tensor, counts: Sequence[int], rank: int, heads: int, group: Any) -> Tensor:
        """Exchange all tokens of some heads for some tokens of all heads."""
        parts = layouts.count_all([heads], len(counts))
        shapes = [(x.shape[0], n, counts[rank], x.shape[3]) for n in parts]
        tokens = [part.transpose(1, 2) for part in self.swapped(torch.split(x, list(counts), 2), shapes, rank, group)]
        return torch.cat(tokens, 2).transpose(1, 2)  # in memory as torch's kernels leave it: a view may follow

    def swapped(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], rank: int, group: Any) -> list[Tensor]:
        """Exchange one of `parts` with each rank; return the received ones, of these shapes."""
        give, take = [part.numel() for part in parts], [math.prod(shape) for shape in shapes]
        came = torch.split(exchange(torch.cat([part.reshape(-1) for part in parts]), give, take, rank, group), take)
        return [part.view(shape) for part, shape in zip(came, shapes, strict=True)]
