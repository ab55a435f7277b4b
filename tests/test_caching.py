"""Step caches: DeepCache and the first-block cache as graphs that take what an earlier step has kept."""

from __future__ import annotations

import copy
import inspect
from functools import cache

import numpy
import processes
import pytest
import small
import torch
import unets
import zoo
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core.ir.containers import list_leaves
from fxplug.lowerings.regions.nested import nest
from fxplug.parallel.runtime.pretended import run_simulated
from fxplug.step_cache.cache import StepCache
from fxplug.step_cache.policies import Every, TeaCache, Threshold

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
    "sd15": (small.unet, "deepcache", {}),
    "sd15-branch-2": (small.unet, "deepcache", {"branch": 2}),
    "sdxl": (unets.sdxl, "deepcache", {}),
    "own": (own, "deepcache", {"at": "**"}),
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
    return all(map(torch.equal, list_leaves(one), list_leaves(two)))


def close(one, two):
    for a, b in zip(list_leaves(one), list_leaves(two), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


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


@sweep("name", CASES, "own", "sd15")
def test_a_full_step_is_the_model_and_a_shallow_one_on_fresh_values_too(name):
    base, _, cache = cached(name)
    want = run(base.gm, base)
    result, kept = run(cache.full, base)
    assert type(result) is type(want) and same(result, want)
    assert list(kept) == ["kept"]
    again = run(cache.shallow, base, **kept)
    if CASES[name][1] == "deepcache":
        assert same(again, want)
    close(again, want)
    assert same(run(cache.full, base)[1], kept)  # what is kept is nobody's to write to


@sweep("name", CASES, "own", "sd15", "pixart")
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
    assert list(inspect.signature(cache.forward).parameters) == signature  # which modular pipelines read
    with pytest.raises(fxplug.GuardError, match="needs the input 'kept'"):
        run(cache.shallow, base)


def test_deepcache_computes_what_its_paper_computes():
    """In a branch of 0: the first convolution and the last layer on the way up, with what these are told."""
    _, _, cache = cached("sd15")
    ran = [str(n.target) for n in cache.shallow.graph.nodes if n.op == "call_module"]
    tops = {".".join(name.split(".")[: 4 if "blocks" in name else 1]) for name in ran}
    layer = {name for name in tops if "blocks" in name}
    assert tops - layer == {"time_embedding", "conv_in", "conv_norm_out", "conv_act", "conv_out"}
    assert layer and all(name.startswith(("up_blocks.1.resnets.1", "up_blocks.1.attentions.1")) for name in layer)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][1] == "first_block_cache"])
def test_a_gauged_step_is_decided_behind_the_first_block(name):
    base, _, cache = cached(name)
    gauges, carried = run(cache.first, base)
    assert all(isinstance(v, torch.Tensor) for v in list_leaves((gauges, carried)))  # sizes are read again, not carried
    assert not any("blocks_1" in n or "single_transformer" in n for n in computed(cache.first.graph))
    with torch.no_grad():
        result, kept = cache.rest(**carried)
        again = cache.short(**carried, **kept)
    want = run(base.gm, base)
    assert type(result) is type(want) and same(result, want)
    close(again, want)
    assert not computed(cache.first.graph) & computed(cache.rest.graph)
    assert not any("blocks" in n for n in computed(cache.short.graph))


# --- a run


def steps(cache, base, times):
    """Which of the calls at these times were in full."""
    found = []
    for t in times:
        before = cache.counts["full"]
        cache(base.args[0], torch.tensor([t, t], dtype=torch.float32))
        found.append(cache.counts["full"] > before)
    return found


def ticking(policy):
    base, new, _ = cached("own")
    return base, StepCache(new, policy, clock="t")


def test_every_step_of_an_interval_and_those_at_the_start():
    base, cache = ticking(Every(3))
    assert steps(cache, base, [9.0, 8, 7, 6, 5, 4, 3]) == [True, False, False, True, False, False, True]
    base, cache = ticking(Every(2, start=3))
    assert steps(cache, base, [9.0, 8, 7, 6, 5, 4]) == [True, True, True, False, True, False]
    with pytest.raises(fxplug.SpecError, match="1 or more"):
        Every(0)


def test_a_run_ends_when_time_goes_back_in_either_direction():
    base, cache = ticking(Every(9))
    assert steps(cache, base, [3.0, 2, 1, 3, 2, 1]) == [True, False, False, True, False, False]
    cache.reset()
    assert steps(cache, base, [1.0, 2, 3, 1, 2]) == [True, False, False, True, False]
    assert steps(cache, base, [3.0]) == [False]
    cache.reset()
    assert steps(cache, base, [4.0]) == [True]


def test_calls_at_one_time_are_kept_apart():
    """Conditional and unconditional calls one after the other: each takes what its own earlier call kept."""
    base, cache = ticking(Every(2))
    other = changed(base)
    wanted = []
    for t in (3.0, 2.0):
        time = torch.tensor([t, t])
        wanted = [cache(base.args[0], time), cache(other.args[0], time)]
    assert cache.counts == {"full": 2, "shallow": 2}
    for one, want in zip((base, other), wanted, strict=True):
        _, kept = cache.full(one.args[0], torch.tensor([3.0, 3.0]))
        assert torch.equal(cache.shallow(one.args[0], torch.tensor([2.0, 2.0]), **kept), want)


def test_a_call_of_another_shape_begins_a_run():
    base, cache = ticking(Every(9))
    assert steps(cache, base, [9.0, 8]) == [True, False]
    cache(base.args[0][:1], torch.tensor([7.0]))
    assert cache.counts == {"full": 2, "shallow": 1}


def test_a_policy_is_any_function_of_the_step():
    seen = []
    base, cache = ticking(lambda step: seen.append((step.index, step.since)) or step.index in (1, 4))
    assert steps(cache, base, [9.0, 8, 7, 6, 5]) == [True, True, False, False, True]
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 2)]  # nobody is asked about the first step: nothing is kept yet


def test_a_threshold_goes_by_what_the_first_block_changes():
    base, new, _ = cached("pixart")
    cache = StepCache(new, Threshold(0.2, at_most=2), clock=None)
    near, far = changed(base, 0.01), changed(base, 3.0)
    gauge = [run(cache.first, b)[0][0] for b in (base, near, far)]
    change = [((g - gauge[0]).abs().mean() / gauge[0].abs().mean()).item() for g in gauge]
    assert change[0] == 0 < change[1] < 0.2 < change[2]
    found = []
    for one in (base, near, near, near, far, far):
        found.append(run(cache, one))
    assert cache.counts == {"full": 3, "shallow": 3}  # the fourth as two were not full, the fifth as it is far
    assert same(found[3], run(base.gm, near)) and same(found[4], run(base.gm, far)) and not same(found[1], run(base.gm, near))
    assert StepCache(new).policy == Threshold() and cached("own")[2].policy == Every()


def test_steps_are_those_of_diffusers_first_block_cache():
    from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

    base, new, _ = cached("flux")
    theirs = copy.deepcopy(base.model)
    apply_first_block_cache(theirs, FirstBlockCacheConfig(threshold=0.15))
    cache = StepCache(new, Threshold(0.15), clock=None)
    for by in (0.0, 0.05, 0.1, 1.5, 1.55, 0.0):
        one = changed(base, by)
        with theirs.cache_context("cond"):
            want = run(theirs, one)
        with cache.cache_context("cond"):  # as a pipeline does
            ours = run(cache, one)
        close(ours, want)
    assert cache.counts == {"full": 3, "shallow": 3}


TEA = {
    "pixart": (pixart, {}),
    "sd3": (sd3, {
        "at": "transformer_blocks.0.attn:in.hidden_states", "first": "transformer_blocks.0:in.hidden_states",
        "last": PICTURE["last"],
    }),
    "flux": (flux, {
        "at": "transformer_blocks.0.attn:in.hidden_states", "first": "transformer_blocks.0:in.hidden_states",
        "last": "single_transformer_blocks.{-1}:out[1]",
    }),
}  # fmt: skip


@cache
def tea(name):
    model, params = TEA[name]
    base = model()
    return base, fxplug.apply(base.gm, fxplug.load_pass("teacache", **params))


def entered(base, one):
    """What enters the first block, modulated, as a hook on the model sees it."""
    block = base.model.transformer_blocks[0]
    found = []
    hook = getattr(block, "attn1", None) or block.attn
    handle = hook.register_forward_pre_hook(
        lambda _, args, kwargs: found.append((args or [kwargs["hidden_states"]])[0]), with_kwargs=True
    )
    try:
        run(base.model, one)
    finally:
        handle.remove()
    return found[0]


@pytest.mark.parametrize("name", TEA)
def test_steps_are_those_of_teacache(name):
    """Its rule, written here once more: accumulated, rescaled change of the modulated input; first and last step in full."""
    base, new = tea(name)
    coefficients, limit = (90.0, -20.0, 3.0, 0.01), 0.15
    calls = [changed(base, by) for by in (0.0, 0.03, 0.06, 0.3, 0.33, 0.36, 0.0, 0.02)]
    wanted, total, before = [], 0.0, None
    for index, one in enumerate(calls):
        now = entered(base, one)
        full = index in (0, len(calls) - 1)
        if not full:
            total += float(numpy.poly1d(coefficients)(((now - before).abs().mean() / before.abs().mean()).item()))
            full = not total < limit
        total, before = 0.0 if full else total, now
        wanted.append(full)
    assert 3 < sum(wanted) < len(wanted)
    cache = StepCache(new, TeaCache(limit, coefficients, steps=len(calls)), clock=None)
    found, took = in_turn(cache, calls)
    assert took == wanted
    for one, out, full in zip(calls, found, took, strict=True):
        assert same(out, run(base.gm, one)) is full


@pytest.mark.parametrize("name", TEA)
def test_teacache_takes_the_change_of_all_blocks(name):
    base, new = tea(name)
    cache = StepCache(new, TeaCache(), clock=None)
    _, carried = run(cache.first, base)
    with torch.no_grad():
        result, kept = cache.rest(**carried)
        again = cache.short(**carried, **kept)
    assert same(result, run(base.gm, base))
    close(again, result)
    assert not any("blocks" in n for n in computed(cache.short.graph))
    assert not any("attn" in n for n in computed(cache.first.graph))


def test_a_polynomial_is_fitted_to_what_is_measured():
    base, new = tea("sd3")
    cache = StepCache(new, TeaCache(limit=9.0), clock=None)
    calls = [changed(base, by) for by in (0.0, 0.1, 0.15, 0.45, 0.5, 0.9)]
    with cache.measured() as changes:
        for one in calls:
            run(cache, one)
    assert cache.counts["full"] == len(calls) and len(changes) == len(calls) - 1
    for (move, turn), one, then in zip(changes, calls[1:], calls, strict=False):
        pairs = [(entered(base, c), list_leaves(run(base.gm, c))[0]) for c in (one, then)]
        for got, now, old in zip((move, turn), *pairs, strict=True):
            assert got == pytest.approx(((now - old).abs().sum() / old.abs().sum()).item(), rel=1e-4)
    policy = TeaCache.fitted(changes, 0.2, degree=2, steps=9)
    want = numpy.polyfit(*zip(*changes, strict=True), 2)
    assert policy.coefficients == pytest.approx(want, rel=1e-6) and (policy.limit, policy.steps) == (0.2, 9)
    exact = TeaCache.fitted([(x / 50, 300 * (x / 50) ** 3 - x / 50 + 0.2) for x in range(1, 9)], degree=3)
    assert exact.coefficients == pytest.approx((300.0, 0.0, -1.0, 0.2), abs=1e-6)
    assert exact.rescaled(0.1) == pytest.approx(0.4)
    for given in (changes[:2], [], [(0.1, 0.2)] * 9, [(float("nan"), 0.1)] * 9):
        with pytest.raises(fxplug.SpecError, match="needs at least 3 different values, and there are [0-2]: measure more"):
            TeaCache.fitted(given, degree=2)
    with pytest.raises(fxplug.SpecError, match="does not use a gauge: measure with a policy "
                                               "that does"), cached("own")[2].measured():
        pass
    run(cache, base)
    run(cache, base)
    assert cache.counts["shallow"] == 1  # as before


def test_nothing_that_is_kept_holds_on_to_a_gradient():
    base, cache = ticking(Every(2))
    base.args[0].requires_grad_(True)
    try:
        cache(*base.args)
    finally:
        base.args[0].requires_grad_(False)
    assert all(not v.requires_grad for stream in cache._streams.values() for v in stream.kept.values())


# --- it stands for the module


@cache
def slotted(order):
    """PixArt with its marks and two adapters, and the results of all ways to use them."""
    base = pixart()
    passes = [
        fxplug.load_pass("lora", at="re:.*attn1.to_[qv]$", rank=2, slots=2),
        fxplug.load_pass("first_block_cache"),
    ]
    new = fxplug.apply(base.gm, *(passes if order == "before" else reversed(passes)))
    seeds = torch.Generator().manual_seed(5)
    layers = [f"transformer_blocks.{i}.attn1.to_{k}" for i in range(3) for k in "qv"]
    for name in ("ink", "film"):
        state = {}
        for layer in layers[: 4 if name == "ink" else None]:
            state[f"{layer}.lora_A.weight"] = torch.randn(2, 8, generator=seeds)
            state[f"{layer}.lora_B.weight"] = torch.randn(8, 2, generator=seeds)
        new.adapters.load(name, state)
    wanted = []
    for use in (None, "ink", {"ink": 0.5, "film": 0.3}, ["film", None]):
        new.adapters.use(use)
        wanted.append((use, run(new, base)))
    assert same(wanted[0][1], run(base.gm, base)) and not same(wanted[-1][1], wanted[0][1])
    return base, new, wanted


def check_switches(cache, base, wanted):
    for use, want in wanted:
        cache.adapters.use(use)
        cache.reset()
        for _ in range(2):
            close(run(cache, base), want)
    assert cache.counts == {"full": len(wanted), "shallow": len(wanted)}


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_are_switched_between_steps(order):
    base, new, wanted = slotted(order)
    check_switches(StepCache(new, Every(2), clock=None), base, wanted)
    check_switches(StepCache(new, Threshold(), clock=None), base, wanted)


@pytest.mark.slow
def test_adapters_are_switched_under_compiled_steps():
    base, new, wanted = slotted("after")
    cache = StepCache(new, Threshold(), clock=None)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    cache.compile(backend="aot_eager")
    check_switches(cache, base, wanted)
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]


@pytest.mark.parametrize("options", [{"merge": "live"}, {"fuse": "auto"}], ids=["live", "fused"])
def test_a_lowered_module_has_steps_too(options):
    base, new, wanted = slotted("after")
    new.adapters.use(None)
    cache = StepCache(fxplug.lower(new, **options), Threshold(), clock=None)
    check_switches(cache, base, wanted[:3] if "merge" in options else wanted)


def test_marks_stay_when_all_passes_are_merged():
    base, new, wanted = slotted("after")
    new.adapters.use("ink")
    cache = StepCache(fxplug.lower(new, merge="fold"), Threshold(), clock=None)
    for _ in range(2):
        close(run(cache, base), wanted[1][1])
    assert cache.counts == {"full": 1, "shallow": 1}
    marked = fxplug.apply(base.gm, fxplug.load_pass("first_block_cache"))
    with pytest.raises(fxplug.SpecError, match="only marks where the graph may be cut"):
        fxplug.merge(marked)


@pytest.mark.slow
def test_compiling_the_whole_compiles_each_graph():
    base, new, _ = cached("own")
    cache = StepCache(new, Every(3), clock="t")
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    whole = torch.compile(cache, fullgraph=True, backend="aot_eager")
    for t in (9.0, 8.0, 7.0, 6.0):
        call = base.args[0], torch.tensor([t, t])
        out = whole(*call)
    torch.testing.assert_close(out, base.gm(*call))
    assert counters["stats"]["unique_graphs"] == 2 and cache.counts == {"full": 2, "shallow": 2}


def test_it_has_the_models_weights_modes_and_attributes():
    base, new, _ = cached("pixart")
    new = copy.deepcopy(new)
    cache = StepCache(new)
    assert list(cache.state_dict()) == list(base.gm.state_dict()) and cache.config == base.gm.config
    assert [n for n, _ in cache.named_modules()] == [n for n, _ in new.named_modules()]
    cache.train()
    assert new.training and cache.full.training and cache.short.training and not cache.eval().rest.training
    cache.to(torch.float64)
    assert cache.dtype == torch.float64 and {p.dtype for p in cache.short.parameters()} == {torch.float64}
    assert all(a is b for a, b in zip(cache.buffers(), cache.rest.buffers(), strict=True))
    assert "shallow: " in repr(cache)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cache.nothing  # noqa: B018


@sweep("name", ["own", "flux"], "own")
def test_marks_and_parts_are_saved(name, tmp_path):
    base, new, cache = cached(name)
    fxplug.save(new, tmp_path / "marked")
    again = StepCache(fxplug.load(tmp_path / "marked"), clock=None)
    values = {}
    for module in (cache, again):
        out, values[module] = run(module.full, base)
        assert same(out, run(base.gm, base))
    parts = ("full", "shallow", *(("first", "rest", "short") if name == "flux" else ()))
    for part in parts:
        assert fxplug.show(getattr(again, part)) == fxplug.show(getattr(cache, part))
        if part in ("full", "shallow"):
            fxplug.save(getattr(cache, part), tmp_path / part)
    full, shallow = (fxplug.load(tmp_path / part) for part in ("full", "shallow"))
    other, kept = changed(base), run(full, base)[1]
    assert same(run(shallow, other, **kept), run(cache.shallow, other, **values[cache]))


def test_each_part_may_be_lowered():
    base = pixart()
    cache = StepCache(fxplug.apply(base.gm, fxplug.load_pass("first_block_cache")), Threshold(), clock=None)
    seen = []
    cache.map(lambda part: seen.append(part.meta["part"]) or (nest(part) if seen[-1] == "rest" else fxplug.fuse(part)))
    assert seen == ["first", "rest", "short"]
    assert sum(cache.rest.meta["nested"].values(), []) == ["transformer_blocks.1", "transformer_blocks.2"]  # alike as ever
    for _ in range(2):
        close(run(cache, base), run(base.gm, base))


# --- over processes


def parallel(name, **ways):
    base, new, _ = cached(name)
    plan = fxplug.parallel_plan(new, base.args, base.kwargs, **ways)
    return base, fxplug.parallelize(new, plan), plan.ways


def in_turn(cache, calls):
    """What the steps give, and which of them are in full."""
    found, full = [], []
    for one in calls:
        before = cache.counts["full"]
        found.append(run(cache, one))
        full.append(cache.counts["full"] > before)
    return found, full


@pytest.mark.slow
@pytest.mark.parametrize("ways", [{"ulysses": 2}, {"batch": 2, "ulysses": 2}], ids=str)
@sweep("name", ["pixart", "flux", "sd15"], "pixart")
def test_processes_take_the_steps_that_one_does(name, ways):
    base, new, ways = parallel(name, **({"batch": 2} if name == "sd15" else ways))
    calls = [changed(base, by) for by in (0.0, 0.05, 0.1, 3.0, 3.05, 0.0)]
    policy = Every(2) if name == "sd15" else Threshold(0.15, at_most=1)
    want, steps = in_turn(StepCache(cached(name)[1], policy, clock=None), calls)
    assert 1 < sum(steps) < len(steps)
    for found, took in run_simulated(ways, lambda rank: in_turn(StepCache(new, policy, clock=None), calls)):
        assert took == steps
        close(found, want)


@pytest.mark.slow
def test_processes_measure_and_decide_by_teacache_as_one():
    base, marked = tea("flux")
    plan = fxplug.parallel_plan(marked, base.args, base.kwargs, ulysses=3)
    new = fxplug.parallelize(marked, plan)
    calls = [changed(base, by) for by in (0.0, 0.05, 0.1, 0.6, 0.65, 1.5, 0.0)]

    def both(module):
        cache = StepCache(module, TeaCache(), clock=None)
        with cache.measured() as changes:
            in_turn(cache, calls)
        cache.policy = TeaCache.fitted(changes, 0.3, degree=2)
        return cache.policy.coefficients, in_turn(cache, calls)[1]

    (coefficients, steps), (first, *others) = both(marked), run_simulated(plan.ways, lambda rank: both(new))
    assert all(found == first for found in others) and first[1] == steps and 1 < sum(steps) < len(steps)
    assert first[0] == pytest.approx(coefficients, rel=1e-2)


@pytest.mark.slow
@sweep("ways", [{"ulysses": 2}, {"ulysses": 3}, {"batch": 2}], {"batch": 2}, ids=str)
def test_a_decision_is_everybodys(ways):
    """Only one part of the picture changes, by just the limit; then inputs differ by rounding between processes."""
    base, new, ways = parallel("pixart", **ways)
    part = changed(base, 0.0)
    part.kwargs["hidden_states"] = part.kwargs["hidden_states"].clone()
    part.kwargs["hidden_states"][0, :, :3] += 0.5
    one = cached("pixart")[2]
    now, then = (run(one.first, b)[0][0] for b in (part, base))
    limit = float((now - then).abs().sum() / then.abs().sum())
    for off in (-1e-2, -1e-7, 0.0, 1e-7, 1e-2):

        def steps(rank, limit=limit * (1 + off)):
            calls = [base, *[changed(one, rank * 1e-7, seed=4) for one in (part, base, part)]]
            return in_turn(StepCache(new, Threshold(limit), clock=None), calls)[1]

        first, *others = run_simulated(ways, steps)
        assert all(took == first for took in others)
        assert abs(off) < 1e-3 or first == ([True] * 4 if off < 0 else [True, False, False, False])


@pytest.mark.slow
def test_a_step_that_is_in_full_anywhere_is_so_everywhere():
    base, new, ways = parallel("pixart", ulysses=2)
    for policy in (Threshold(0.5), Every(9)):

        def steps(rank, policy=policy):
            cache = StepCache(new, policy, clock=None)
            first = in_turn(cache, [base, base])[1]
            if rank:
                cache.reset()
            return first + in_turn(cache, [base, base])[1]

        assert run_simulated(ways, steps) == [[True, False, True, False]] * 2


def process(rank, folder):
    base = pixart()
    cache = StepCache(fxplug.load(folder), Threshold(0.15), clock=None)
    torch.save(in_turn(cache, [changed(base, by) for by in (0.0, 0.05, 3.0)]), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_real_processes_decide_as_one(tmp_path):
    base, new, _ = parallel("pixart", ulysses=2)
    fxplug.save(new, tmp_path / "saved")
    processes.group(process, str(tmp_path / "saved"))
    cache = StepCache(cached("pixart")[1], Threshold(0.15), clock=None)
    want, steps = in_turn(cache, [changed(base, by) for by in (0.0, 0.05, 3.0)])
    for rank in range(2):
        found, took = torch.load(tmp_path / "saved" / f"{rank}.pt", weights_only=False)
        assert took == steps == [True, False, True]
        close(found, want)


def test_processes_with_other_inputs_are_told():
    base, new, ways = parallel("pixart", ulysses=2)
    with pytest.raises(fxplug.GuardError, match="the input hidden_states of process 1 differs from process 0"):
        run_simulated(ways, lambda rank: run(StepCache(new, Every(2), clock=None), changed(base, rank)))


def test_marks_may_come_after_the_collectives():
    base = pixart()
    plan = fxplug.parallel_plan(base.gm, base.args, base.kwargs, ulysses=2)
    new = fxplug.apply(fxplug.parallelize(base.gm, plan), fxplug.load_pass("first_block_cache"))
    calls = [changed(base, by) for by in (0.0, 0.02, 3.0)]
    want, steps = in_turn(StepCache(cached("pixart")[1], Threshold(0.2), clock=None), calls)
    for found, took in run_simulated(plan.ways, lambda rank: in_turn(StepCache(new, Threshold(0.2), clock=None), calls)):
        assert took == steps == [True, False, True]
        close(found, want)


# --- marks of one's own


def keep(path, place="after", name="mine", use="fxplug.step_cache.slices:Keep", **more):
    port = {"args": ["value"], **more}
    return fxplug.load_pass({"name": name, "rules": [{"match": {"path": path}, "use": use, "place": place, **port}]})


def test_all_that_a_shallow_step_needs_is_kept_and_nothing_else():
    base = sd3()
    both = StepCache(fxplug.apply(base.gm, keep("transformer_blocks.1", port="y[*]")), Every(2))
    want = run(base.gm, base)
    result, kept = run(both.full, base)
    assert list(kept) == ["kept_0", "kept_1"] and same(result, want)
    assert same(run(both.shallow, base, **kept), want)
    assert not any("blocks_0" in n or "blocks_1" in n for n in computed(both.shallow.graph))
    one = small.unet()
    twice = fxplug.apply(one.gm, fxplug.load_pass("deepcache", branch=2, name="deep"), fxplug.load_pass("deepcache"))
    kept = run(StepCache(twice).full, one)[1]
    assert list(kept) == ["kept"] and same(kept, run(cached("sd15")[2].full, one)[1])


# --- what cannot be


def test_marks_that_do_not_fit_are_refused():
    base = small.unet()
    with pytest.raises(fxplug.SpecError, match="no branch 4; it has marked 4 joins, counted 0 to 3 from the end"):
        StepCache(fxplug.apply(base.gm, fxplug.load_pass("deepcache", branch=4)))
    with pytest.raises(fxplug.SpecError, match="no value is marked"):
        StepCache(base.gm)
    with pytest.raises(fxplug.SpecError, match="takes a traced module, not UNet2DConditionModel"):
        StepCache(base.model)
    with pytest.raises(fxplug.SpecError, match="branch must be a whole number"):
        fxplug.apply(base.gm, fxplug.load_pass("deepcache", branch=-1))
    with pytest.raises(fxplug.MatchError, match="matched 0 places"):
        fxplug.apply(pixart().gm, fxplug.load_pass("deepcache"))
    with pytest.raises(fxplug.SpecError, match="saves nothing"):
        StepCache(fxplug.apply(small.vit().gm, keep("patch_embed", "before")), clock=None)


def test_a_first_block_of_several_values_needs_one_named():
    with pytest.raises(fxplug.MatchError, match=r"no single result.*transformer_blocks.0:out\[1\]"):
        fxplug.apply(flux().gm, fxplug.load_pass("first_block_cache"))
    text = {"first": "transformer_blocks.0:out[0]", "last": "transformer_blocks.{-1}:out[0]"}
    with pytest.raises(fxplug.SpecError, match="difference of two values of one shape"):
        fxplug.apply(flux().gm, fxplug.load_pass("first_block_cache", **text))


def test_a_gauge_behind_what_is_kept_is_refused():
    gauge = keep("transformer_blocks.1", args=["value", "x"], use="fxplug.step_cache.slices:Gauge", name="late")
    new = fxplug.apply(pixart().gm, keep("transformer_blocks.0"), gauge)
    with pytest.raises(fxplug.SpecError, match="computed before the gauge is read: mark a later block"):
        StepCache(new)
    StepCache(new, Every(2))


def test_a_policy_needs_its_gauge_and_a_clock_is_an_input():
    _, new, cache = cached("own")
    with pytest.raises(fxplug.SpecError, match="no pass has marked one"):
        StepCache(new, Threshold(), clock=None)
    with pytest.raises(fxplug.SpecError, match="no pass has marked one"):
        cache.first  # noqa: B018
    with pytest.raises(fxplug.SpecError, match="no input 'timestep'.*one of x, t as clock=, or clock=None"):
        StepCache(new)
