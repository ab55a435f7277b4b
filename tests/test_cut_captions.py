"""Captions that are longer than a pipeline's tokenizers take: each tokenizer is named once, with how many tokens it takes."""

from __future__ import annotations

import re
import warnings

import pytest
import tiny_pipelines as tiny
import torch

from fxplug.training.tasks.pipeline_encoders import Encoders

LONG = "a red ball on a box " * 5  # of 30 words and an end


def encode(pipe, encoders, caption):
    """Encode a caption as its pipeline does, and return what is warned of."""
    kinds = {part: type(value) for part, value in pipe.components.items()}
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        with encoders.cut.watch(caption):
            text = pipe.encode_prompt(caption, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False)
    assert {part: type(value) for part, value in pipe.components.items()} == kinds
    return text, [str(each.message) for each in seen if "tokens in" in str(each.message)]


def test_each_tokenizer_that_cuts_a_caption_is_named_once():
    pipe = tiny.make("sdxl")
    encoders = Encoders(pipe, torch.device("cpu"))
    assert encode(pipe, encoders, "a red ball")[1] == []
    text, said = encode(pipe, encoders, LONG)
    want = r"a caption has 31 tokens in (tokenizer|tokenizer_2), which takes 16: the rest has no effect there, .*: 'a red ball"
    assert {re.match(want, line)[1] for line in said} == {"tokenizer", "tokenizer_2"} and len(said) == 2
    again, said = encode(pipe, encoders, LONG)
    assert said == [] and torch.equal(text[0], again[0])
    first = encode(pipe, encoders, " ".join(LONG.split()[:15]))[0]
    assert torch.equal(text[0], first[0])  # which is why it is said


@pytest.mark.parametrize(("name", "cut"), [("flux", 50), ("z_image", 600)])
def test_a_text_is_counted_with_what_a_pipeline_puts_around_it(name, cut):
    pipe = tiny.make(name)
    encoders = Encoders(pipe, torch.device("cpu"))
    caption = "ball " * cut
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        for each in ("a red ball", caption, caption):
            with encoders.cut.watch(each):
                pipe.encode_prompt(each, **({"prompt_2": None} if name == "flux" else {}), max_sequence_length=512)
    said = [str(each.message) for each in seen if "tokens in" in str(each.message)]
    assert len(said) == 1 and int(re.search(r"has (\d+) tokens in tokenizer, which", said[0])[1]) > cut
