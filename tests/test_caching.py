"""Step caches: DeepCache and the first-block cache as graphs that take what an earlier step has kept."""

from __future__ import annotations

import copy
import inspect
import operator
from functools import cache

import pytest
import small
import torch
import unets
import zoo
from torch import nn

import fxplug
from fxplug.caching import Every, StepCache, Threshold
from fxplug.structure import leaves

PICTURE = {"first": "transformer_blocks.0:out[1]", "last": "transformer_blocks.{-1}:out[1]"}


class Own(nn.Module):
    """A UNet of somebody's own: skips come first, activations work in place, one join adds, and a scope stands around it."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, stride=2)])
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)])

    def forward(self, x, t):
        with torch.no_grad():
            first = self.down[0](x + t.view(-1, 1, 1, 1))
            second = self.down[1](first).relu()
            deep = self.middle(second)
            deep = self.up[0](torch.cat([second, deep], 1))
            deep = nn.functional.interpolate(deep, size=first.shape[-2:])
            deep += first
            return self.up[1](deep.relu_())


@cache
def own():
    t = torch.tensor([4.0, 4.0])
    return small.traced(small.seeded(Own).eval(), small.seeded(lambda: torch.randn(2, 3, 9, 9)), t)


def dit(kind, config, inputs):
    import diffusers

    model = small.seeded(lambda: getattr(diffusers, kind)(**config)).eval()
    return small.traced(model, **small.seeded(inputs))


@cache
def pixart():
    config = zoo._DIT | {
        "num_layers": 3, "cross_attention_dim": 8, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 8,
        "use_additional_conditions": False, "norm_elementwise_affine": False, "norm_eps": 1e-6, "caption_channels": 12,
    }  # fmt: skip
    return dit("PixArtTransformer2DModel", config, lambda: {
        "hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([5, 5]),
        "encoder_hidden_states": torch.randn(2, 7, 12),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "return_dict": False,
    })  # fmt: skip


@cache
def flux():
    config = zoo._FLUX | {"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True}
    more = {"pooled_projections": torch.ones(2, 32), "guidance": torch.ones(2)}
    return dit("FluxTransformer2DModel", config, lambda: zoo._flux(2, 4, **more))


@cache
def sd3():
    config = {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
        "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 16,
        "out_channels": 4, "pos_embed_max_size": 24, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    }  # fmt: skip
    return dit("SD3Transformer2DModel", config, lambda: {
        "hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 12, 32),
        "timestep": torch.tensor([5, 5]), "pooled_projections": torch.randn(2, 16),
    })  # fmt: skip


CASES = {
    "sd15": (unets.sd15, "deepcache", {}),
    "sd15-branch-4": (unets.sd15, "deepcache", {"branch": 4}),
    "sdxl": (unets.sdxl, "deepcache", {}),
    "own": (own, "deepcache", {"at": "**", "branch": 0}),
    "own-added": (own, "deepcache", {"at": "**", "op": "add_"}),
    "pixart": (pixart, "first_block_cache", {}),
    "sd3": (sd3, "first_block_cache", PICTURE),
    "flux": (flux, "first_block_cache", PICTURE | {"last": "single_transformer_blocks.{-1}:out[1]"}),
}


@cache
def cached(name):
    """A model with its marks, and a step cache on it that has not run."""
    model, pass_name, params = CASES[name]
    base = model()
    new = fxplug.apply(base.gm, fxplug.load_pass(pass_name, **params))
    return base, new, StepCache(new, clock=None)


def run(module, base, **more):
    with torch.no_grad():
        return module(*base.args, **{**base.kwargs, **more})


def same(one, two):
    return all(map(torch.equal, leaves(one), leaves(two)))


def changed(base, by=0.5, seed=3):
    """The same call with another picture."""
    noise = torch.Generator().manual_seed(seed)
    key = next((k for k in base.kwargs if k in ("sample", "hidden_states")), None)
    if key is None:
        x = base.args[0]
        return small.Traced(base.model, base.gm, (x + by * torch.randn(x.shape, generator=noise), *base.args[1:]))
    x = base.kwargs[key]
    kwargs = {**base.kwargs, key: x + by * torch.randn(x.shape, generator=noise)}
    return small.Traced(base.model, base.gm, base.args, kwargs)


def computed(graph):
    return {n.name for n in graph.nodes if n.op == "call_module"}


@pytest.mark.parametrize("name", CASES)
def test_a_full_step_is_the_model_and_a_shallow_one_on_fresh_values_too(name):
    base, _, cache = cached(name)
    want = run(base.gm, base)
    result, kept = run(cache.full, base)
    assert type(result) is type(want) and same(result, want)
    assert list(kept) == ["kept"]
    again = run(cache.shallow, base, **kept)
    if CASES[name][1] == "deepcache":
        assert same(again, want)
    for a, b in zip(leaves(again), leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert same(run(cache.full, base)[1], kept)  # what is kept is nobody's to write to


@pytest.mark.parametrize("name", CASES)
def test_a_shallow_step_takes_what_it_is_given(name):
    """It differs from the model where the kept values are old, and runs less of it; inputs stay those of the model."""
    base, _, cache = cached(name)
    other = changed(base)
    _, kept = run(cache.full, base)
    assert not same(run(cache.shallow, other, **kept), run(base.gm, other))
    assert not same(run(cache.shallow, other, **kept), run(cache.shallow, base, **kept))
    graph = next(iter(cache.shallow.graphs.values()))
    ours, theirs = computed(graph), computed(next(iter(base.gm.graphs.values())))
    assert ours < theirs
    signature = list(inspect.signature(base.gm.forward).parameters)
    assert list(inspect.signature(cache.shallow.forward).parameters) == [*signature, "kept"]
    with pytest.raises(fxplug.GuardError, match="needs the input 'kept'"):
        run(cache.shallow, base)


def test_deepcache_computes_what_its_paper_computes():
    """Of SD 1.5 a branch of 0 leaves the first convolution, the last layer on the way up and what they are told."""
    base, _, cache = cached("sd15")
    tops = {n.removeprefix("time_").split("_blocks_")[0] + ("_" + n.split("_blocks_")[1][0] if "_blocks_" in n else "")
            for n in computed(cache.shallow.graph)}  # fmt: skip
    assert {t for t in tops if t[:2] in ("do", "mi", "up")} == {"up_3"}
    assert not any("resnets_0" in n or "resnets_1" in n for n in computed(cache.shallow.graph))
    assert "conv_in" in computed(cache.shallow.graph)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][1] == "first_block_cache"])
def test_a_gauged_step_is_decided_behind_the_first_block(name):
    base, _, cache = cached(name)
    gauges, carried = run(cache.first, base)
    assert all(isinstance(v, torch.Tensor) for v in leaves((gauges, carried)))  # sizes are read again, not carried
    assert not any("blocks_1" in n or "single" in n for n in computed(cache.first.graph))
    with torch.no_grad():
        result, kept = cache.rest(**carried)
        again = cache.short(**carried, **kept)
    want = run(base.gm, base)
    assert type(result) is type(want) and same(result, want)
    for a, b in zip(leaves(again), leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not computed(cache.first.graph) & computed(cache.rest.graph)
    assert not any("blocks" in n for n in computed(cache.short.graph))
