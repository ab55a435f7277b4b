"""Strengths by block and by step: as diffusers has them, in one graph, and refused where they leave a gap."""

from __future__ import annotations

import math
import warnings
from functools import cache

import pytest
import tiny
import torch

import fxplug
from fxplug import Schedule, SpecError, Strength

AT = ["**.to_q", "**.to_v", "**.conv1"]
CHOICES = [
    {"down": 0.5, "mid": 2.0, "up": 0.0}, {"up": {"block_1": 0.3}}, {"down": {"block_0": [0.7]}}, {"mid": 0.0}, 0.4, None,
]  # fmt: skip


@cache
def unet():
    return tiny.pipeline("StableDiffusionPipeline").unet


def call(seed=0, batch=2):
    gen = torch.Generator().manual_seed(seed)
    return {"sample": torch.randn(batch, 4, 8, 8, generator=gen), "timestep": torch.tensor([5, 900] * (batch // 2)),
            "encoder_hidden_states": torch.randn(batch, 8, 12, generator=gen)}  # fmt: skip


@cache
def traced():
    return fxplug.trace(unet(), kwargs=call())


def adapter(seed):
    gen, made = torch.Generator().manual_seed(seed), {}
    for name, layer in unet().named_modules():
        if name.rpartition(".")[2] in ("to_q", "to_v", "conv1"):
            w, tail = layer.weight, [1] * (layer.weight.dim() - 2)
            made[f"{name}.lora_A.weight"] = torch.randn(2, *w.shape[1:], generator=gen)
            made[f"{name}.lora_B.weight"] = torch.randn(w.shape[0], 2, *tail, generator=gen) * 0.3
    return made


def slotted(**options):
    new = fxplug.apply(traced(), fxplug.load_pass("lora", at=AT, rank=2, slots=3, per_sample=2, groups="block", **options))
    for number in range(2):
        new.adapters.load(f"a{number}", adapter(number))
    return new


@pytest.mark.slow
@torch.no_grad()
def test_a_dictionary_of_blocks_is_taken_as_by_diffusers():
    theirs, new = tiny.pipeline("StableDiffusionPipeline").unet, slotted()
    theirs.load_state_dict(unet().state_dict())
    for number in range(2):
        with warnings.catch_warnings(action="ignore"):  # PEFT's, of a second adapter
            theirs.load_lora_adapter(adapter(number), adapter_name=f"a{number}", prefix=None)
    ours = fxplug.pipeline_part(new, unet())
    wanted = []
    for one in CHOICES:
        theirs.set_adapters(["a0", "a1"], [one, 0.6])
        wanted.append(theirs(**call()).sample)
        ours.set_adapters(["a0", "a1"], [one, 0.6])
        torch.testing.assert_close(ours(**call()).sample, wanted[-1], rtol=1e-5, atol=1e-5)
    assert all(not torch.equal(one, two) for one, two in zip(wanted, wanted[1:], strict=False))
    rows, mixed = [], []
    for number, one in enumerate(CHOICES[:2]):  # in one batch
        ours.set_adapters(["a0", "a1"], [one, 0.6])
        rows.append(ours.adapters.active)
        mixed.append(wanted[number][number])
    assert f"{rows[0]['a0']:g}" == "1 by block"
    ours.adapters.use(rows)
    torch.testing.assert_close(ours(**call()).sample, torch.stack(mixed), rtol=1e-5, atol=1e-5)
    assert ours.adapters.active == rows
    for given, message in (({"dwn": 1.0}, "no part 'dwn'"),
                           ({"down": {"block_7": 1.0}}, "has no block_7"), ({"mid": "much"}, "not a number"),
                           ({"": 1.0}, "no part ''"), ({"mid": None}, "not a number"),
                           ({"up": {"block_1": [1.0] * 7}}, "7 scales are given")):  # fmt: skip
        with pytest.raises(SpecError, match=message):
            ours.set_adapters("a0", given)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"down_blocks.9": 0.5}, "no layer with adapters is at 'down_blocks.9'.*down_blocks"),
        ({"**.to_q": 0.5}, "are in one group of the pass"),
        ({"mid_block": math.nan}, "finite number"),
        ({"mid_block": "much"}, "finite number"),
        ({3: 0.5}, "patterns of paths"),
        ("mid_block", "patterns of paths"),
    ],
)
def test_blocks_that_are_no_groups_are_refused(blocks, message):
    new = _shared()
    before = new.adapters.active
    with pytest.raises(SpecError, match=message):
        new.adapters.use([{"a0": Strength(1.0, blocks)}])
    assert new.adapters.active == before


@cache
def _shared():
    return slotted()


def test_groups_are_patterns_or_blocks_of_a_pass_by_sample():
    for options, message in (({"groups": ["nothing.*"]}, "nothing is at 'nothing"), ({"groups": "blocks"}, "'block'"),
                             ({"groups": ["mid_block"], "per_sample": 0}, "requires 'per_sample'")):  # fmt: skip
        with pytest.raises(SpecError, match=message):
            fxplug.apply(traced(), fxplug.load_pass("lora", at=AT, rank=2, slots=3, **{"per_sample": 2, **options}))
    own = fxplug.load_pass("lora", at=AT, rank=2, slots=1, per_sample=1, groups=["up_blocks", "**.to_q"])
    new = fxplug.apply(traced(), own)
    new.adapters.load("a0", adapter(0))
    new.adapters.use({"a0": Strength(1.0, {"up_blocks": 0.5, "down_blocks.*.**.to_q": 2.0, "mid_block.**.to_q": 2.0})})
    with pytest.raises(SpecError, match="are in one group"):
        new.adapters.use({"a0": Strength(1.0, {"mid_block": 0.5})})
    with pytest.raises(SpecError, match="needs groups of layers"):
        plain = fxplug.apply(traced(), fxplug.load_pass("lora", at=AT, rank=2, slots=1, per_sample=1))
        plain.adapters.load("a0", adapter(0))
        plain.adapters.use({"a0": Strength(1.0, {"up_blocks": 0.5})})


@pytest.mark.parametrize(
    ("knots", "options", "message"),
    [
        ([(0.1, 1.0)], {}, "a gap"), ([], {}, "knots must be pairs"), ([(0, 1.0), (0.5, 1.0), (0.5, 0.0)], {}, "a gap"),
        ([(0, 1.0), (0.6, 0.0), (0.3, 1.0)], {}, "a gap"), ([(0, math.nan)], {}, "a gap"),
        ([(0, 1.0), (1.5, 1.0)], {}, "a gap"),
        ([(math.inf, 1.0)], {"over": "sigma"}, "a gap"), ([(1.0, 1.0), (2.0, 0.0)], {"over": "sigma"}, "a gap"),
        ([(0, 1.0), 0.5], {}, "a gap"), ([(0, 1.0)], {"over": "steps"}, "share or sigma"), ([(0, "much")], {}, "a gap"),
        ([(1.0, 1.0), (-1.0, 0.0)], {"over": "sigma"}, "a gap"), ([(0, 1.0)], {"between": "cubic"}, "hold or linear"),
        ([(0, Strength(1, {"a": 1})), (1, Strength(1, {"b": 1}))], {"between": "linear"}, "name the same blocks"),
    ],
)  # fmt: skip
def test_a_schedule_with_gaps_is_refused(knots, options, message):
    with pytest.raises(SpecError, match=message):
        Schedule(knots, **options)


def test_a_schedule_gives_the_strength_of_a_step():
    held, line = Schedule([(0, 1.0), (0.6, 0.0)]), Schedule([(0, 1.0), (0.5, 0.0)], between="linear")
    assert [held.at(share) for share in (0, 0.5, 0.6, 1)] == [1.0, 1.0, 0.0, 0.0]
    assert [line.at(share) for share in (0, 0.25, 0.5, 1)] == [1.0, 0.5, 0.0, 0.0]
    sigma = Schedule([(10.0, 1.0), (2.0, 0.5), (0.0, 0.0)], over="sigma", between="linear")
    assert [sigma.at(value) for value in (14.6, 10.0, 6.0, 2.0, 1.0, 0.0)] == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    blocks = Schedule([(0, Strength(1.0, {"mid": 0.0})), (1, 0.5)], between="linear").at(0.5)
    assert blocks == Strength(1.0, {"**": 0.75, "mid": 0.25})
    with pytest.raises(SpecError, match=r"schedule.at"):
        _shared().adapters.use({"a0": held})
    with pytest.raises(SpecError, match="finite"):
        held.at(math.nan)
