"""DiTFastAttn: attention in a window with its residual, shared between steps and between halves, and the search for which."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import small
import test_caching as caching
import torch
import torch.nn.functional as F
from test_caching import changed, close, pixart, run, same

import fxplug
from fxplug.blocks.windowed_attention import windowed
from fxplug.core.ir.containers import list_leaves
from fxplug.core.torch_internals import tensors as kernels
from fxplug.step_cache.attention_forms import METHODS
from fxplug.step_cache.fast_attention import FastAttention


@cache
def marked(window=2, model=pixart, at="transformer_blocks.*.attn1"):
    base = model()
    return base, fxplug.apply(base.gm, fxplug.load_pass("ditfastattn", at=at, window=window))


@cache
def dit():
    config = caching.zoo._DIT | {"num_layers": 3, "norm_type": "ada_norm_zero", "num_embeds_ada_norm": 8}
    return caching.dit("DiTTransformer2DModel", config, lambda: {
        "hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([5, 5]), "class_labels": torch.tensor([1, 2]),
        "return_dict": False,
    })  # fmt: skip


def halves_alike(base):
    """The same call whose halves of the batch are equal."""
    kwargs = {k: torch.cat([v[:1]] * 2) if isinstance(v, torch.Tensor) else v for k, v in base.kwargs.items()}
    return small.Traced(base.model, base.gm, base.args, kwargs)


def every(fast, method, steps=3):
    return [{}, *[dict.fromkeys(fast.places, method)] * (steps - 1)]


# --- the window


@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize("window", [0, 1, 3, 6, 15, 40])
def test_a_window_is_attention_under_a_band(window, tokens):
    torch.manual_seed(0)
    for lead, held in (((2, 4), (2, 4)), ((2, 4), (2, 2)), ((3,), (3,)), ((2, 1, 3), (2, 1, 3))):
        query = torch.randn(*lead, tokens, 5)
        key, value = (torch.randn(*held, tokens, size) for size in (5, 6))
        away = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs()
        full = [t.repeat_interleave(lead[-1] // held[-1], -3) for t in (key, value)]
        want = F.scaled_dot_product_attention(query, *full, attn_mask=away <= window, scale=0.3)
        torch.testing.assert_close(windowed(query, key, value, window, 0.3), want, rtol=1e-5, atol=1e-6)


def test_a_window_computes_what_it_says():
    query = torch.randn(1, 2, 64, 4)

    def flops(window):
        with kernels.make_flop_counter() as counter:
            windowed(query, query, query, window)
        return counter.get_total_flops()

    assert [flops(w) / flops(64) for w in (4, 8, 16)] == [pytest.approx(3 * w / 64) for w in (4, 8, 16)]


# --- the methods


@pytest.mark.parametrize("model", [pixart, dit])
def test_marks_change_nothing_and_nor_does_a_schedule_of_full_steps(model):
    base, new = marked(model=model)
    fast = FastAttention(new, clock=None)
    assert same(run(new, base), run(base.gm, base)) and same(run(fast, base), run(base.gm, base))
    assert list(fast.places) == [f"transformer_blocks.{i}.attn1" for i in range(3)]
    assert list(fast.state_dict()) == list(base.gm.state_dict())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [pixart, dit])
def test_a_step_with_the_inputs_of_the_last_is_exact(model, method):
    """What earlier steps gave is what this one would compute, and halves that are equal may be shared."""
    base, new = marked(model=model)
    one = halves_alike(base)
    fast = FastAttention(new, every(FastAttention(new, clock=None), method), clock=None)
    for _ in range(4):
        close(run(fast, one), run(base.gm, one))


@pytest.mark.parametrize("method", METHODS[1:3])
def test_a_window_that_holds_all_is_exact(method):
    base, new = marked(window=15)
    fast = FastAttention(new, every(FastAttention(new, clock=None), method), clock=None)
    for by in (0.0, 0.5, 1.0):
        one = halves_alike(changed(base, by))
        close(run(fast, one), run(base.gm, one))


def test_each_method_takes_what_it_says():
    """One attention, by hand: its own module's parts around each method."""
    base, new = marked(window=3)
    key = "transformer_blocks.1.attn1"
    calls = [base, changed(base, 0.4), changed(base, 0.8)]
    attn = copy.deepcopy(base.model.transformer_blocks[1].attn1)

    def by_hand(x, kept, method):
        def qkv(x):
            return [layer(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for layer in (attn.to_q, attn.to_k, attn.to_v)]

        def out(y):
            return attn.to_out[0](y.transpose(1, 2).flatten(2))

        if method == "step":
            return kept["output"]
        x = x.chunk(2)[1] if method.endswith("half") else x
        q, k, v = qkv(x)
        if method.startswith("window"):
            rest = kept["residual"].chunk(2)[1] if method.endswith("half") else kept["residual"]
            y = out(windowed(q, k, v, 3) + rest)
        else:
            full = F.scaled_dot_product_attention(q, k, v)
            y = out(full)
            kept["residual"] = full - windowed(q, k, v, 3)
        y = torch.cat([y, y]) if method.endswith("half") else y
        kept["output"] = y
        return y

    for method in METHODS:
        fast = FastAttention(new, [{}, {key: method}, {key: method}], clock=None)
        model, kept, now = copy.deepcopy(base.model), {}, []
        model.transformer_blocks[1].attn1.register_forward_hook(
            lambda module, args, out, kept=kept, now=now: by_hand(args[0], kept, now[-1])
        )
        for index, one in enumerate(calls):
            now.append(method if index else "full")
            close(run(fast, one), run(model, one))


def test_a_row_may_differ_from_place_to_place():
    base, new = marked()
    first, second, third = FastAttention(new, clock=None).places
    again = {first: "step", second: "full half", third: "window half"}
    schedule = [{}, {first: "step", third: "window"}, again, {third: "step"}]
    fast = FastAttention(new, schedule, clock=None)
    for one in [halves_alike(base)] * 5:
        close(run(fast, one), run(base.gm, one))
    names = [n.target for n in fast.part(1).graph.nodes if n.op == "placeholder" and "transformer_blocks" in n.target]
    assert names == ["transformer_blocks_0_attn1_output_0", "transformer_blocks_2_attn1_residual_0"]
    assert not any("blocks.0.attn1.to_" in str(n.target) for n in fast.part(1).graph.nodes)
    with pytest.raises(fxplug.GuardError, match="needs the input 'transformer_blocks_0_attn1_output_0'"):
        run(fast.part(1), base)


def flops(fast, calls):
    found = []
    for one in calls:
        with kernels.make_flop_counter() as counter:
            run(fast, one)
        found.append(counter.get_total_flops())
    return found


def test_what_is_saved_is_counted():
    """16 tokens, width 8, batch 2, 3 layers: 4 projections of 2 * 2 * 16 * 8 * 8 each, products of 2 * 2 * 2 * 16 * 16 * 8."""
    base, new = marked(window=2)
    projections, products, near = (3 * n for n in (4 * 4096, 16384, 16384 * 3 * 2 / 16))
    plain = flops(base.gm, [base])[0]
    for method, saved in {
        "step": projections + products,
        "window half": projections / 2 + products - near / 2,
        "window": products - near,
        "full half": (projections + products) / 2,
    }.items():
        fast = FastAttention(new, every(FastAttention(new, clock=None), method), clock=None)
        first, second, third = flops(fast, [base] * 3)
        assert first == plain + (near if "window" in method else 0) and second == third == plain - saved


@pytest.mark.slow
def test_several_results_are_one_place():
    base, new = marked(model=caching.sd3, at="transformer_blocks.0.attn:out[*]")
    (place,) = FastAttention(new, clock=None).places.values()
    assert len(place.marks) == 2 and place.windowed
    one = halves_alike(base)
    for method in METHODS:
        fast = FastAttention(new, every(FastAttention(new, clock=None), method), clock=None)
        for _ in range(3):
            close(run(fast, one), run(base.gm, one))


# --- the search

SEARCHED = pytest.mark.parametrize("model", [pixart, pytest.param(dit, marks=pytest.mark.slow)])  # every method on every layer


def search(fast, calls, threshold, **more):
    with fast.calibrating(threshold, **more):
        found = [run(fast, one) for one in calls]
    return found


@pytest.mark.slow
@SEARCHED
def test_no_threshold_leaves_all_in_full(model):
    base, new = marked(model=model)
    fast = FastAttention(new, clock=None)
    calls = [changed(base, by) for by in (0.0, 0.1, 0.2)]
    for out, one in zip(search(fast, calls, 0.0), calls, strict=True):
        assert same(out, run(base.gm, one))
    assert fast.schedule == [{}, {}, {}] and not fast._parts.keys() - {"", *fast._rows}


@pytest.mark.slow
@SEARCHED
def test_thresholds_buy_work_for_difference(model):
    base, new = marked(model=model)
    calls = [changed(base, by) for by in (0.0, 0.1, 0.2)]
    want = [list_leaves(run(base.gm, one))[0] for one in calls]
    plain, work, off = sum(flops(base.gm, calls)), [], []
    for threshold in (0.001, 0.03, 2.0):
        fast = FastAttention(new, clock=None)
        found = search(fast, calls, threshold)
        again = FastAttention(new, fast.schedule, clock=None)  # the schedule is all there is to it
        for a, one in zip(found, calls, strict=True):
            close(run(again, one), a)
        work.append(sum(flops(FastAttention(new, fast.schedule, clock=None), calls)))
        off.append(max(float((list_leaves(f)[0] - w).abs().sum() / w.abs().sum()) for f, w in zip(found, want, strict=True)))
    assert work == sorted(work, reverse=True) and plain > work[-1] == min(work)
    assert off[0] < 0.002 and off[-1] == max(off) and all(m == "step" for row in fast.schedule[1:] for m in row.values())


@pytest.mark.slow
def test_a_method_must_do_for_all_calls_and_runs():
    """Two calls at one time, and then a run in which more changes: the least that serves all."""
    base, new = marked()
    fast = FastAttention(new, clock="timestep")

    def go(*bys):
        for index, by in enumerate(bys):
            for seed in (3, 4):
                one = changed(base, by, seed)
                run(fast, small.Traced(one.model, one.gm, (), one.kwargs | {"timestep": torch.tensor([9 - index] * 2)}))

    with fast.calibrating(0.05, halves=False):
        go(0.0, 0.01)
        assert set(fast.schedule[1].values()) == {"step"}
        go(0.0, 3.0)
        assert set(fast.schedule[1].values()) != {"step"} and not any("half" in m for m in fast.schedule[1].values())
        later = dict(fast.schedule[1])
        go(0.0, 0.01)
        assert fast.schedule[1] == later


@pytest.mark.slow
def test_processes_find_one_schedule():
    from fxplug.parallel.runtime.pretended import run_simulated

    base, new = marked()
    plan = fxplug.parallel_plan(new, base.args, base.kwargs, ulysses=2)
    par = fxplug.parallelize(new, plan)
    calls = [changed(base, by) for by in (0.0, 0.05, 0.6)]

    def find(module):
        fast = FastAttention(module, clock=None)
        found = search(fast, calls, 0.03)
        return fast.schedule, found, any(place.windowed for place in fast.places.values())

    one = find(new)
    first, second = run_simulated(plan.ways, lambda rank: find(par))
    assert first[0] == second[0] and not first[2] and one[2]  # of parts of tokens there is no window
    for a, b in zip(list_leaves(first[1]), list_leaves(second[1]), strict=True):
        assert torch.equal(a, b)
    fast = FastAttention(new, first[0], clock=None)
    for out, call in zip(first[1], calls, strict=True):
        close(out, run(fast, call))


@pytest.mark.slow
def test_it_is_compiled_part_by_part_and_adapters_are_switched():
    base = pixart()
    passes = fxplug.load_pass("lora", at="re:.*attn1.to_[qv]$", rank=2, slots=1), fxplug.load_pass("ditfastattn", window=2)
    new = fxplug.apply(base.gm, *passes)
    layers = [f"transformer_blocks.{i}.attn1.to_q" for i in range(3)]
    state = {f"{n}.lora_{k}.weight": torch.ones(s) for n in layers for k, s in (("A", (2, 8)), ("B", (8, 2)))}
    new.adapters.load("ink", state)
    new.adapters.use(None)
    fast = FastAttention(new, every(FastAttention(new, clock=None), "step", 4), clock=None)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    fast.compile(backend="aot_eager")
    for use in (None, None, "ink", "ink"):
        fast.adapters.use(use)  # the step behind a change is in full
        close(run(fast, base), run(new, base))
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= 4


# --- what cannot be


def test_wrong_schedules_and_calls_are_told():
    base, new = marked()
    with pytest.raises(fxplug.SpecError, match="no attention is marked here: apply the pass ditfastattn"):
        FastAttention(base.gm)
    with pytest.raises(fxplug.SpecError, match="window must be a whole number, 0 or more, not -1"):
        fxplug.apply(base.gm, fxplug.load_pass("ditfastattn", window=-1))
    for schedule, text in [
        ([{}, {"transformer_blocks.0.attn": "step"}], "schedule, step 1: '.*.0.attn' is not marked .did you mean"),
        ([{}, {"transformer_blocks.0.attn1": "steps"}], "step 1: '.*.0.attn1': no method 'steps': there are step"),
        ([{"transformer_blocks.0.attn1": "step"}], "step 0: .*the first step must be full"),
    ]:
        with pytest.raises(fxplug.SpecError, match=text):
            FastAttention(new, schedule, clock=None)
    with pytest.raises(fxplug.SpecError, match="side must be 0 or 1, not 2"):
        FastAttention(new, side=2, clock=None)
    crossed = fxplug.apply(base.gm, fxplug.load_pass("ditfastattn", at="transformer_blocks.*.attn2"))
    with pytest.raises(fxplug.SpecError, match="has no self-attention without a mask"):
        FastAttention(crossed, [{}, {"transformer_blocks.0.attn2": "window"}], clock=None)
    odd = FastAttention(new, [{"transformer_blocks.0.attn1": "full half"}], clock=None)
    three = {k: torch.cat([v, v[:1]]) if isinstance(v, torch.Tensor) else v for k, v in base.kwargs.items()}
    with pytest.raises(fxplug.GuardError, match="a batch of 3 cannot be split into halves"):
        odd(**three)
