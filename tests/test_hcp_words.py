"""Learned words of HCP-Diffusion in a CLIP text encoder of transformers."""

from __future__ import annotations

import pytest
import small
import torch
import transformers

import fxplug
from fxplug.compat.hcp.words import word_vectors
from fxplug.core.errors import SpecError

TOKENS, WORDS = 20, 9


@pytest.fixture(scope="module")
def clip():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPTextConfig(vocab_size=TOKENS, max_position_embeddings=WORDS, eos_token_id=1, **sizes)
    model = small.seeded(lambda: transformers.CLIPTextModel(config)).eval()
    ids = torch.randint(2, TOKENS, (3, WORDS))
    return model, fxplug.trace(model, (ids,))


def path_of(model):
    return next(name for name, m in model.named_modules() if isinstance(m, torch.nn.Embedding) and "token" in name)


def inserted(ids, table, words):
    """EmbeddingPTHook.forward with one repeat."""
    rows = []
    for text in ids:
        found = [words[int(t)] if int(t) in words else table[int(t)][None] for t in text]
        middle = torch.cat(found)[1 : len(text) - 1]
        rows.append(torch.cat([table[text[0]][None], middle, table[text[-1]][None]]))
    return torch.stack(rows)


def test_learned_words_stand_where_their_tokens_are(clip, tmp_path):
    model, gm = clip
    words = {TOKENS: torch.randn(3, 16), TOKENS + 1: torch.randn(1, 16)}
    new = fxplug.apply(gm, word_vectors(words, path_of(model)))
    ids = torch.tensor([[0, 5, 20, 7, 21, 8, 1, 1, 1], [0, 5, 6, 7, 8, 9, 10, 20, 1], [0, 20, 20, 20, 4, 5, 6, 7, 1]])
    table = model.get_submodule(path_of(model))
    handle = table.register_forward_pre_hook(lambda host, x: (x[0].clip(0, TOKENS - 1),))
    other = table.register_forward_hook(lambda host, x, y: inserted(ids, host.weight, words))
    try:
        expected = model(ids)[0]
    finally:
        handle.remove()
        other.remove()
    found = new(ids)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.square().mean().backward()
    (vectors,) = [p for name, p in new.named_parameters() if name.startswith("words.")]
    assert bool((vectors.grad.abs().sum(1) > 0).all())
    fxplug.save(new, tmp_path / "saved")
    assert torch.equal(fxplug.load(tmp_path / "saved")(ids)[0], found)
    plain = torch.randint(2, TOKENS, (2, WORDS))
    assert torch.equal(new(plain)[0], model(plain)[0])


@pytest.mark.parametrize(
    "words, message",
    [({3: torch.zeros(1, 16)}, "must follow those of the table, from "
                               "20 on"), ({20: torch.zeros(1, 4)}, "the table's are 16 wide")],
)
def test_words_that_do_not_fit(clip, words, message):
    with pytest.raises(SpecError, match=message):
        fxplug.apply(clip[1], word_vectors(words, path_of(clip[0])))
