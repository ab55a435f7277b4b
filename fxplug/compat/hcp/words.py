"""Learned words of HCP-Diffusion in a text encoder: one token of the text, and as many vectors as were learned for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...blocks.base import Block
from ...core.errors import SpecError
from ...core.spec.rules import Match, Pass, Rule

if TYPE_CHECKING:
    from ...core.rewriter.sites import Site


class WordVectors(Block):
    """In the place of a token embedding: tokens beyond its table stand for words with several vectors each.

    Called with token ids int64 (batch, n) and the table (tokens, width). The vectors of a learned word stand in the place of
    its token, what follows moves back, and the text is cut to n again: the first and the last place keep the vectors that the
    first and the last token have (begin and end of a text). As `EmbeddingPTHook` of HCP-Diffusion
    (hcpdiff/models/text_emb_ex.py) with one repeat computes it.
    """

    inline: ClassVar[bool] = True
    lengths: Tensor
    starts: Tensor

    def __init__(self, counts: list[int], tokens: int, width: int) -> None:
        """Make the vectors: `counts` has the number of vectors of each learned word; word number k is the token `tokens` +
        k."""
        super().__init__()
        self.counts, self.tokens, self.width = list(counts), tokens, width
        self.vectors = nn.Parameter(torch.zeros(sum(counts), width))
        lengths, starts = torch.tensor(counts), torch.tensor(counts).cumsum(0) - torch.tensor(counts)
        self.register_buffer("lengths", lengths)
        self.register_buffer("starts", starts + tokens)

    @classmethod
    def at(cls, site: Site, words: Mapping[int, Tensor]) -> WordVectors:
        """Make the block; `words` has the vectors (count, width) of each token id. Raises SpecError for ids or widths that do
        not fit."""
        table: Any = site.module
        tokens, width = table.num_embeddings, table.embedding_dim
        ids = sorted(words)
        if ids != list(range(tokens, tokens + len(ids))):
            raise SpecError(f"the ids of learned words must follow those of the table, from {tokens} on; found {ids[:4]}")
        for token, vectors in words.items():
            if vectors.dim() != 2 or vectors.shape[1] != width or not len(vectors):
                raise SpecError(f"the word {token} has vectors {list(vectors.shape)}, and the table's are {width} wide")
        block = cls([len(words[token]) for token in ids], tokens, width)
        with torch.no_grad():
            block.vectors.copy_(torch.cat([words[token] for token in ids]))
        return block

    def forward(self, ids: Tensor, table: Tensor) -> Tensor:
        own = ids >= self.tokens
        word = (ids - self.tokens).clamp(min=0)
        length = torch.where(own, self.lengths[word], torch.ones_like(ids))
        start = torch.where(own, self.starts[word], ids)
        ends = length.cumsum(1)
        places = torch.zeros_like(ids).add(1).cumsum(1) - 1
        token = torch.searchsorted(ends, places, right=True)
        inside = places - (ends - length).gather(1, token)
        rows = start.gather(1, token) + inside
        rows = torch.cat([rows[:, :-1], ids[:, -1:].clamp(max=self.tokens - 1)], 1)
        return F.embedding(rows, torch.cat([table, self.vectors.to(table.dtype)]))


def word_vectors(words: Mapping[int, Tensor], at: str, name: str = "words", train: bool = True) -> Pass:
    """Make a pass that adds learned words to the token embedding `at`: vectors (count, width) by the word's token id.

    The ids follow those of the table, as in a tokenizer to which the words were added. The vectors are trained.
    """
    rule = Rule(
        Match(path=at, module=["Embedding"]), WordVectors, place="replace", args=["x", f"{at}:param.weight"],
        options={"words": dict(words)}, expect="==1",
    )  # fmt: skip
    return Pass(name, [rule], about="Learned words in a text encoder (textual inversion, arXiv 2208.01618)", train=train)
