"""DoRA and (IA)3 by sample, beside LoRA, LoHa and LoKr in one bank: as the weights of each sample alone, in all forms."""

from __future__ import annotations

import random
from functools import cache

import fuzz_mixtures
import pytest
import torch
from fuzz_mixtures import KINDS, draw_adapter, draw_call, draw_rows, load, measure
from torch import nn

import fxplug
from fxplug.core.errors import FxplugError, SpecError

NAMES = [f"a{number}" for number in range(len(KINDS))]


@cache
def model():
    torch.manual_seed(0)
    return fuzz_mixtures.Mixed(random.Random(3)).eval()


@cache
def traced():
    return fxplug.trace(model(), draw_call(4, 0, torch.float32))


@cache
def adapters():
    return {name: draw_adapter(model(), kind, 50 + seed) for seed, (name, kind) in enumerate(zip(NAMES, KINDS, strict=True))}


def slotted(gm=None, names=NAMES, **options):
    options = {"rank": fuzz_mixtures.RANK, "slots": len(names) + 2, "per_sample": 3, **options}
    new = fxplug.apply(gm or traced(), fxplug.load_pass("dora", at="**", **options))
    load(new, {name: adapters()[name] for name in names}, torch.float32)
    return new


def far(module, rows, seed=0, call=None):
    call = call or draw_call(len(rows), seed, torch.float32)
    return measure(module(*call), model(), rows, adapters(), call)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_random_kinds_ranks_and_mixtures_are_as_alone(seed):
    assert fuzz_mixtures.miss(1000 + seed) == ""


@pytest.mark.slow
@torch.no_grad()
def test_forms_of_the_module_give_the_same(tmp_path):
    new, rng, calls = slotted(groups=fuzz_mixtures.GROUPS), random.Random(0), 0
    call = draw_call(4, 0, torch.float32)
    assert torch.equal(new(*call), traced()(*call))

    def backend(graph, example):
        nonlocal calls
        calls += 1
        return graph.forward

    compiled = torch.compile(new, backend=backend, fullgraph=True)
    fxplug.save(new, tmp_path / "saved")
    forms = [compiled, fxplug.load(tmp_path / "saved"), fxplug.lower(new, fuse="fused")]
    schedule = fxplug.Schedule([(0, fxplug.Strength(1.0, {"picture": 0.5})), (0.5, 0.25)], between="linear")
    for turn in range(6):
        rows = draw_rows(rng, NAMES, 4, groups=True)
        rows[0] = {"a1": schedule.at(turn / 5), "a3": -1.0}
        for form in forms:
            with form.adapters.using(rows) if form is not compiled else new.adapters.using(rows):
                assert far(form, rows, turn) < 1e-5
    assert calls == 1  # over kinds, mixtures, strengths and steps of a schedule
    mixed = {"a1": fxplug.Strength(0.5, {"picture": 2.0, "vector": 0.0}), "a5": -1.0, "a0": fxplug.Strength(2.0, {"**": 0.5})}
    new.adapters.use(mixed)
    assert far(fxplug.merge(new), [mixed] * 4) < 1e-5
    assert far(fxplug.merge(new, adapters=mixed), [mixed] * 4) < 1e-5
    live = fxplug.lower(new, merge="live")
    assert far(live, [mixed] * 4) < 1e-5
    live.adapters.unload("a1")
    load(live, {"a1": adapters()["a1"]}, torch.float32)  # whose gain is that of the base, not of what is merged
    live.adapters.use(mixed)
    assert far(live, [mixed] * 4) < 1e-5


@torch.no_grad()
def test_repeated_regions_are_one():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x = torch.randn(3, 5, 8)
    new = fxplug.apply(fxplug.trace(blocks, x), fxplug.load_pass("dora", at="*.0", rank=2, slots=2, per_sample=1))
    state = {f"{n}.0.lora_A.weight": torch.randn(2, 8) for n in range(3)}
    state |= {f"{n}.0.lora_B.weight": torch.randn(8, 2) for n in range(3)}
    state |= {f"{n}.0.lora_magnitude_vector.weight": torch.rand(8) + 1 for n in range(3)}
    new.adapters.load("a", state)
    one = fxplug.lower(new, fuse=None, outline=["*"])
    assert [len(regions) for regions in one.meta["nested"].values()] == [3]
    rows = ["a", None, {"a": 0.5}]
    for module in (new, one):
        module.adapters.use(rows)
    assert torch.equal(one(x), new(x))
    with torch.no_grad():
        blocks[1][0].weight.mul_(2)
    for module in (new, one):
        module.adapters.use(rows)
    assert torch.equal(one(x), new(x))


@torch.no_grad()
def test_gains_are_those_of_the_base_as_it_is():
    own = fxplug.trace(fuzz_mixtures.Mixed(random.Random(3)).eval(), draw_call(4, 0, torch.float32))
    own.load_state_dict(traced().state_dict())
    new = slotted(own, ["a1", "a4", "a5"])
    rows = [{"a1": 1.0}, {"a4": 0.5, "a1": 1.0}, {"a5": 1.0}]
    using = new.adapters.rows(rows)

    def check(seed):
        call = draw_call(3, seed, torch.float32)
        theirs = fuzz_mixtures.Mixed(random.Random(3)).eval()
        theirs.load_state_dict({name: value for name, value in new.state_dict().items() if not name.startswith("dora.")})
        assert measure(new(*call), theirs, rows, adapters(), call) < 1e-5

    new.adapters.use(using)
    check(0)
    weights = [layer.weight for _, layer in own.named_modules() if isinstance(getattr(layer, "weight", None), nn.Parameter)]
    with new.adapters.change():
        for weight in weights:
            weight.data.mul_(1.5)  # which no version counts
    check(1)
    new.load_state_dict({name: value * 0.5 for name, value in traced().state_dict().items()}, strict=False)
    check(2)
    for turn, choose in enumerate((new.adapters.use, new.adapters.using)):
        for weight in weights:
            weight.add_(0.1)  # as an optimizer does, outside of a change
        done = choose(using)
        if done is None:
            check(3 + turn)
        else:
            with done:
                check(3 + turn)
    with new.adapters.change():  # a factor that a user writes
        up = new.get_submodule("dora.vector.GatheredDora").up.weight
        up.mul_(1.0)
    check(9)


@torch.no_grad()
def test_adapters_come_back_out_of_their_slots(tmp_path):
    new = slotted()
    for name, kind in zip(NAMES[1:], KINDS[1:], strict=True):
        new.adapters.save(name, tmp_path / name, as_="peft" if kind == "ia3" else "lycoris")
    again = fxplug.apply(traced(), fxplug.load_pass("dora", at="**", rank=fuzz_mixtures.RANK, slots=8, per_sample=3))
    for name in NAMES[1:]:
        again.adapters.load(name, next(tmp_path.glob(f"{name}*")))
    rows = [{name: 1.0} for name in NAMES[1:]]
    again.adapters.use(rows)
    assert far(again, rows) < 1e-5
    new.adapters.unload("a1")
    block = new.get_submodule("dora.vector.GatheredDora")
    assert all(not value[1].any() for value in (block.magnitude, block.gain))


@torch.no_grad()
def test_a_row_has_the_same_bits_whoever_is_beside_it():
    new, rng, seen = slotted(), random.Random(1), set()
    first = draw_call(4, 0, torch.float32)
    for turn in range(24):
        rows, call, at = draw_rows(rng, NAMES, 4), draw_call(4, turn + 1, torch.float32), rng.randrange(4)
        rows = rows if turn % 3 else [None] * 4
        rows[at] = {"a2": 0.5, "a0": 1.0}  # without a gain, beside some with one and none
        for value, own in zip(call, first, strict=True):
            value[at] = own[0]
        with new.adapters.using(rows):
            seen.add(new(*call)[at].numpy().tobytes())
    assert len(seen) == 1


@torch.no_grad()
def test_bf16_and_embeddings_of_its_own_layout(tmp_path):
    half = fuzz_mixtures.Mixed(random.Random(3)).eval().to(torch.bfloat16)
    new = slotted(fxplug.trace(half, draw_call(4, 0, torch.bfloat16)))
    new.load_state_dict(traced().state_dict(), strict=False)
    rows = [{"a1": 1.0}, {"a5": 1.0}, {"a4": 0.5, "a0": 1.0}, {}]
    call = draw_call(4, 0, torch.bfloat16)
    new.adapters.use(rows)
    assert measure(new(*call), model(), rows, adapters(), call) < 0.1
    trained = fxplug.apply(traced(), fxplug.load_pass("dora", at=["table", "tokens"], rank=2))
    torch.manual_seed(1)
    for name, value in trained.named_parameters():
        if name.startswith("dora."):
            value.add_(0.3 * torch.randn_like(value))
    fxplug.save_adapter(trained, tmp_path / "own.safetensors", as_="fxplug")
    other = slotted(names=["a0"])
    other.adapters.load("own", tmp_path / "own.safetensors")
    other.adapters.use("own")
    call = draw_call(4, 0, torch.float32)
    torch.testing.assert_close(other(*call), trained(*call), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"by": "input"}, "by='input' has magnitudes of the inputs"), ({"param": "bias"}, "leave param out, or per_sample")],
)
def test_what_acts_on_no_result_is_refused(options, message):
    with pytest.raises(SpecError, match=message):
        fxplug.apply(traced(), fxplug.load_pass("dora", at="**", slots=2, per_sample=1, **options))


def test_a_table_that_changes_when_it_is_read_is_refused():
    gm = fxplug.trace(nn.Sequential(nn.Embedding(5, 4, max_norm=1.0)), torch.arange(4)[:, None])
    with pytest.raises(SpecError, match="max_norm changes this Embedding whenever it is read"):
        fxplug.apply(gm, fxplug.load_pass("dora", at="0", slots=2, per_sample=1))
    fxplug.apply(gm, fxplug.load_pass("lora", at="0", slots=2, per_sample=1))


@torch.no_grad()
def test_files_that_no_gain_expresses_are_refused():
    new = slotted(names=["a0"])
    w = model().vector.weight
    halves = {"vector.hada_w1_a": w[:, :1], "vector.hada_w1_b": w[:1], "vector.hada_w2_a": w[:, :1], "vector.hada_w2_b": w[:1],
              "vector.alpha": torch.tensor(1.0)}  # fmt: skip
    with pytest.raises(FxplugError, match=r"lora, dora and ia3 of a layer's outputs"):
        new.adapters.load("b", {**halves, "vector.dora_scale": torch.ones(1, w.shape[1])})
    with pytest.raises(FxplugError, match=r"lora, dora and ia3 of a layer's outputs"):
        config = {"peft_type": "IA3", "feedforward_modules": ["vector"], "target_modules": ["vector"]}
        new.adapters.load("b", {"vector.ia3_l": torch.ones(1, w.shape[1])}, config=config)
    wide = {"vector.lora_A.weight": torch.ones(9, w.shape[1]), "vector.lora_B.weight": torch.ones(w.shape[0], 9)}
    with pytest.raises(SpecError, match="rank_max=6, the highest of them 9"):
        new.adapters.load("b", {**wide, "vector.lora_magnitude_vector.weight": torch.ones(w.shape[0])})
    assert new.adapters.names == ["a0"]


@pytest.mark.filterwarnings("ignore:.*was made beside weights with the digest:UserWarning")  # it is put on others here
@pytest.mark.parametrize("how", ["written", "loaded", "replaced", "other layer", "other memory"])
def test_gains_follow_a_base_that_is_written_or_replaced(how, tmp_path):
    torch.manual_seed(0)
    x, weight, dora = torch.randn(3, 8), torch.randn(8, 8), {"at": "0", "rank": 2}
    alone = fxplug.apply(fxplug.trace(nn.Sequential(nn.Linear(8, 8)), x), fxplug.load_pass("dora", **dora))
    with torch.no_grad():
        for name, value in alone.named_parameters():
            value.add_(torch.randn_like(value) * (0.3 if "dora" in name else 0))
    fxplug.save_adapter(alone, tmp_path / "a")
    base = nn.Sequential(nn.Linear(8, 8))
    gm = fxplug.apply(fxplug.trace(base, x), fxplug.load_pass("dora", **dora, slots=2, per_sample=1))
    gm.adapters.load("a", tmp_path / "a")
    gm.adapters.use("a")
    gm(x)
    layer = gm.get_submodule("0")
    if how == "loaded":
        gm.load_state_dict({**gm.state_dict(), "0.weight": weight.clone()}, assign=True)
    elif how == "replaced":
        layer.weight = nn.Parameter(weight.clone())
    elif how == "other layer":
        bias, layer = layer.bias, nn.Linear(8, 8)
        layer.weight, layer.bias = nn.Parameter(weight.clone()), bias
        gm.add_module("0", layer)
    elif how == "written":
        with torch.no_grad():
            layer.weight.copy_(weight)
    else:
        layer.weight.data = weight.clone()
    for changed in (True, False):
        assert gm.adapters.bases.find_changed(gm.adapters.module, gm.adapters.where, gm.adapters.there) == changed
        gm.adapters.use("a")
    with torch.no_grad():
        base[0].weight.copy_(weight)
        base[0].bias.copy_(layer.bias)
    right = fxplug.apply(fxplug.trace(base, x), fxplug.load_pass("dora", **dora))
    fxplug.load_adapter(right, tmp_path / "a")
    torch.testing.assert_close(gm(x), right(x), rtol=1e-5, atol=1e-5)
