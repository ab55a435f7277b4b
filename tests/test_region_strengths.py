"""Adapters in regions of a picture, in one call: what each layer adds where, against numbers made by hand."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import small
import tiny
import torch
import torch.nn.functional as F
import unets
import zoo
from fuzz_regions import fuzz_regions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxplug
from fxplug import Schedule, SpecError, Strength
from fxplug.blocks.places import LOST, NONE, find_places
from fxplug.blocks.regions import make_masks, make_token_masks

LEFT = torch.zeros(8, 8)
LEFT[:, :4] = 1


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sd15(batch=2, height=8, width=8):
    return {"sample": noise(batch, 4, height, width), "timestep": torch.arange(batch) * 100 + 5,
            "encoder_hidden_states": noise(batch, 8, 12, seed=1), "return_dict": False}  # fmt: skip


def sd3(batch=2, height=8, width=8):
    return {"hidden_states": noise(batch, 4, 2 * height, 2 * width), "timestep": torch.arange(batch) * 100.0,
            "encoder_hidden_states": noise(batch, 5, 12, seed=1), "pooled_projections": noise(batch, 8, seed=2),
            "return_dict": False}  # fmt: skip


def flux(batch=2, height=8, width=8):
    sides = torch.zeros(1), torch.arange(float(height)), torch.arange(float(width))
    return {"hidden_states": noise(batch, height * width, 16), "timestep": torch.arange(batch) / batch,
            "encoder_hidden_states": noise(batch, 5, 12, seed=1), "pooled_projections": noise(batch, 8, seed=2),
            "txt_ids": torch.zeros(5, 3), "img_ids": torch.cartesian_prod(*sides), "return_dict": False}  # fmt: skip


PIPELINES = {"sd15": ("StableDiffusionPipeline", "unet", sd15), "sd3": ("StableDiffusion3Pipeline", "transformer", sd3),
             "flux": ("FluxPipeline", "transformer", flux)}  # fmt: skip
ZOO = {"pixart": "PixArtTransformer2DModel", "sana": "SanaTransformer2DModel", "cogview3": "CogView3PlusTransformer2DModel"}
FAMILIES = [*PIPELINES, *ZOO]


@cache
def host(family):
    """A model, its graph, and a call of it."""
    if family in ZOO:
        case = next(case for case in zoo.cases() if case.name == f"diffusers/{ZOO[family]}")
        args, kwargs = case.inputs(batch=2)
        return case.build().eval(), fxplug.trace(case.build().eval(), args, kwargs), (args, kwargs)
    kind, part, call = PIPELINES[family]
    model = getattr(tiny.pipeline(kind), part).eval()
    return model, fxplug.trace(model, kwargs=call()), ((), call())


def adapter(family, seed):
    """LoRA for 0 and 1, DoRA for 2, (IA)3 for 3, on every layer."""
    gen, made = torch.Generator().manual_seed(seed), {}
    for name, layer in host(family)[1].named_modules():
        w = getattr(layer, "weight", None)
        if not isinstance(layer, (nn.Linear, nn.Conv2d)):
            continue
        if seed == 3:
            made[f"{name}.ia3_l"] = 1 + 0.3 * torch.randn(w.shape[0], *[1] * (w.dim() - 1), generator=gen)
            continue
        rank = 2 if getattr(layer, "groups", 1) == 1 else 1
        made[f"{name}.lora_A.weight"] = torch.randn(rank, *w.shape[1:], generator=gen) * 0.3
        made[f"{name}.lora_B.weight"] = torch.randn(w.shape[0], rank, *[1] * (w.dim() - 2), generator=gen) * 0.3
        if seed == 2:
            made[f"{name}.lora_magnitude_vector.weight"] = w.flatten(1).norm(dim=1) * (1 + torch.rand(len(w), generator=gen))
    return made


@cache
def slotted(family, kind="lora", regions=True, at="**", names=2, **options):
    options = {"rank": 2, "slots": 4, "per_sample": 2, "regions": regions, **options}
    new = fxplug.apply(host(family)[1], fxplug.load_pass(kind, at=at if isinstance(at, str) else list(at), **options)).eval()
    for number in range(names):
        config = {"peft_type": "IA3", "feedforward_modules": []} if number == 3 else None
        new.adapters.load(f"a{number}", adapter(family, number), partial=at != "**", config=config)
    return new


@torch.no_grad()
def run(module, what, call):
    args, kwargs = call
    with module.adapters.using(what):
        found = module(*args, **kwargs)
    return found[0] if isinstance(found, tuple) else found.sample if hasattr(found, "sample") else found


def inside(what, region, rest="share"):
    return {name: Strength(value, region=region, rest=rest) for name, value in what.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_ones_are_the_plain_adapter_and_zeros_none(family, kind):
    names = 2 if kind == "lora" else 4
    new, plain, call = slotted(family, kind, names=names), slotted(family, kind, False, names=names), host(family)[2]
    base = run(new, None, call)
    for what in ({"a0": 1.0, "a1": 0.7}, *([{"a2": 0.8, "a0": 0.5}, {"a3": 1.0, "a2": -0.4}] if kind == "dora" else [])):
        wanted = run(plain, what, call)
        assert not torch.equal(wanted, base) and torch.equal(run(new, what, call), wanted)
        for rest in ("share", "full"):
            assert torch.equal(run(new, inside(what, torch.ones(9, 9), rest), call), wanted)
        for rest in ("share", "none"):
            assert torch.equal(run(new, inside(what, torch.zeros(5, 5), rest), call), base)
        assert not torch.equal(run(new, inside(what, torch.zeros(5, 5), "full"), call), base)
        halves = run(new, [inside(what, LEFT), what], call)
        torch.testing.assert_close(halves[1], wanted[1], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(halves[0], wanted[0])


@pytest.mark.parametrize(("family", "first"), [("sd15", "conv_in"), ("sd3", "transformer_blocks.0.attn.to_q"),
                                               ("flux", "transformer_blocks.0.attn.to_q")])  # fmt: skip
@torch.no_grad()
def test_left_and_right_are_the_single_runs_at_the_first_layer(family, first):
    at = (("conv_in", "**.to_q", "**.conv1") if family == "sd15" else ("transformer_blocks.*.attn.to_q", "**.ff.net.2"))
    new, call, seen = slotted(family, at=at), host(family)[2], []
    block = new.get_submodule(f"lora.{first}.GatheredLora")
    hook = block.register_forward_hook(lambda module, args, result: seen.append(result.clone()))
    for what in ("a0", "a1", {**inside({"a0": 1.0}, LEFT), **inside({"a1": 1.0}, 1 - LEFT)}):
        run(new, [what] * 2, call)
    hook.remove()
    one, two, both = (value.flatten(2).transpose(1, 2) if value.dim() == 4 else value for value in seen)
    left = LEFT.flatten().bool()
    assert torch.equal(both[:, left], one[:, left]) and torch.equal(both[:, ~left], two[:, ~left])
    assert not torch.allclose(one, two)


def expect(layer, x, y, parts, share):
    """What a layer gives with adapters in regions, each as the change of its weight at each place."""
    call = {nn.Linear: lambda w, b: F.linear(x, w, b),
            nn.Conv2d: lambda w, b: F.conv2d(x, w, b, layer.stride, layer.padding, layer.dilation, layer.groups)}  # fmt: skip
    compute, made = call[nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear], y.clone()
    for state, name, strength in parts:
        w, b = layer.weight, layer.bias
        if f"{name}.ia3_l" in state:
            gain = state[f"{name}.ia3_l"].flatten().reshape(-1, *[1] * (y.dim() - 2 if y.dim() == 4 else 0))
            changed = y * gain
        else:
            down, up = state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"]
            new = w + (up.flatten(1) @ down.flatten(1)).view(w.shape)
            if (size := state.get(f"{name}.lora_magnitude_vector.weight")) is not None:
                new = new * (size / new.flatten(1).norm(dim=1)).view(-1, *[1] * (w.dim() - 1))
            changed = compute(new, b)
        made = made + share(strength, y) * (changed - y)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd15", "sd3", "flux"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@torch.no_grad()
def test_each_layer_adds_what_is_computed_by_hand(family, kind):
    new, call = slotted(family, kind, names=2 if kind == "lora" else 4), host(family)[2]
    gen = torch.Generator().manual_seed(3)
    names = ("a0", "a1") if kind == "lora" else ("a2", "a3")
    row = {name: Strength(0.8, region=torch.rand(8, 8, generator=gen), rest=rest)
           for name, rest in zip(names, ("share", "none"), strict=True)}  # fmt: skip
    rest = {"share": lambda mask: mask.mean(), "none": lambda mask: 0.0}

    def share(strength, y):
        mask, tail = strength.region, rest[strength.rest](strength.region)
        for side in (8, 4):
            small = F.interpolate(mask[None, None], (side, side), mode="area").flatten()
            if y.dim() == 4 and y.shape[-2:] == (side, side):
                return strength.value * small.view(1, 1, side, side)
            if y.dim() == 3 and y.shape[1] == side * side:
                return strength.value * small[None, :, None]
            if y.dim() == 3 and y.shape[1] == 5 + side * side and family == "flux":  # words are first
                return strength.value * torch.cat([torch.full((5,), float(tail)), small])[None, :, None]
        return strength.value * tail

    checked = []

    def hook(module, args, result, name):
        x, y, layer = args[0], args[1], new.get_submodule(name)
        wanted = expect(layer, x, y, [(adapter(family, int(one[1])), name, row[one]) for one in names], share)
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
        checked.append((name, module.level, module.text))

    hooks = []
    for name, module in new.named_modules():
        if hasattr(module, "level"):
            path = name.removeprefix(f"{kind}.").rpartition(".")[0]
            hooks.append(module.register_forward_hook(lambda m, a, r, path=path: hook(m, a, r, path)))
    run(new, row, call)
    for one in hooks:
        one.remove()
    levels = {(level, text) for _, level, text in checked}
    assert levels == {"sd15": {(0, ""), (1, ""), (2, "")}, "sd3": {(0, ""), (1, "")},
                      "flux": {(0, ""), (1, ""), (1, "before")}}[family]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd15", "sd3", "flux"])
def test_other_sizes_than_traced(family):
    new, plain, make = slotted(family), slotted(family, regions=False), PIPELINES[family][2]
    for height, width in ((8, 12), (16, 8), (10, 6)):
        call, left = ((), make(2, height, width)), torch.zeros(height, width)
        left[:, : width // 2] = 1
        what = {"a0": 1.0, "a1": 0.7}
        wanted = run(plain, what, call)
        assert torch.equal(run(new, inside(what, torch.ones(height, width)), call), wanted)
        assert torch.equal(run(new, inside(what, left * 0), call), run(plain, None, call))
        assert not torch.allclose(run(new, inside(what, left), call), wanted)
    if family == "flux":
        for mask in (torch.rand(8, 12), torch.rand(10, 7)):
            with pytest.raises((SpecError, RuntimeError), match="proportions"):
                run(new, inside(what, mask), ((), make(2, 8, 8)))


def test_tokens_that_may_have_height_and_width_exchanged_are_refused():
    mask = LEFT.repeat_interleave(8, 0).repeat_interleave(8, 1)
    for ratio, sides in ((65 / 64, (65, 64)), (64 / 65, (64, 65)), (1.0, None)):
        made, fits = make_token_masks(mask[None, None], torch.tensor([[ratio]]), 64 * 65)
        assert bool(fits) == (sides is not None)
        if sides:
            assert torch.equal(made[0, 0], make_masks(mask, *sides).flatten())


@pytest.mark.slow
@torch.no_grad()
def test_odd_sizes_by_a_further_graph():
    unet = small.seeded(lambda: unets.sd15_model(levels=3))
    gm = fxplug.variants(fxplug.trace(unet, kwargs=unets.inputs(unet)), unet)
    at, state = ["conv_in", "**.conv1", "**.to_q"], {}
    for name, layer in unet.named_modules():
        if name == "conv_in" or name.endswith(("conv1", "to_q")):
            state[f"{name}.lora_A.weight"] = noise(2, *layer.weight.shape[1:])
            state[f"{name}.lora_B.weight"] = noise(layer.weight.shape[0], 2, *[1] * (layer.weight.dim() - 2), seed=1)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at=at, rank=2, slots=1, per_sample=1, regions=True)).eval()
    new.adapters.load("a0", state)
    for height, width in ((13, 9), (7, 8)):
        call = ((), {**unets.inputs(unet), "sample": noise(2, 4, height, width)})
        assert torch.equal(run(new, inside({"a0": 1.0}, torch.ones(3, 3)), call), run(new, "a0", call))
        assert torch.equal(run(new, inside({"a0": 1.0}, torch.zeros(3, 3)), call), run(new, None, call))
    assert len(new.variants) == 1


@pytest.mark.slow
@torch.no_grad()
def test_masks_change_without_recompiling():
    new, count = slotted("sd3"), 0

    def backend(graph, example):
        nonlocal count
        count += 1
        return graph.forward

    compiled = torch.compile(new, backend=backend, fullgraph=True, dynamic=True)
    call = sd3()
    for seed, what in enumerate([None, "a0", *[{"a0": 1.0, "a1": 0.5}] * 4]):
        gen = torch.Generator().manual_seed(seed)
        rows = inside(what, torch.rand(8, 8, generator=gen), ("share", "full")[seed % 2]) if isinstance(what, dict) else what
        new.adapters.use(rows)
        torch.testing.assert_close(compiled(**call)[0], new(**call)[0])
    assert count == 1


@pytest.mark.slow
def test_a_saved_module_has_its_regions(tmp_path):
    new, call = slotted("sd15", groups="block"), host("sd15")[2]
    row = {"a0": Strength(0.8, {"up_blocks": 0.3}, region=LEFT, rest="none"), "a1": Strength(1.0, region=1 - LEFT)}
    wanted = run(new, row, call)
    new.adapters.use(row)
    fxplug.save(new, tmp_path / "saved")
    loaded = fxplug.load(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(loaded(**call[1])[0], wanted)
    active = loaded.adapters.active
    assert active["a0"].rest == "none" and active["a1"].rest == "share" and f"{active['a1']:g}" == "1 in a region"
    assert torch.equal(run(loaded, active, call), wanted)
    with pytest.raises(SpecError, match="regions of the picture"):
        fxplug.merge(loaded)
    loaded.adapters.use("a0")
    fxplug.merge(loaded)
    live = fxplug.lower(loaded, merge="live")
    with pytest.raises(SpecError, match="regions of the picture"):
        live.adapters.use(row)
    new.adapters.use(None)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rest", ["share", "full", "none"])
def test_active_has_the_rest_in_any_dtype(dtype, rest):
    new = copy.deepcopy(slotted("sd15")).to(dtype)
    for seed in range(8):
        mask = torch.rand(7, 5, generator=torch.Generator().manual_seed(seed))
        new.adapters.use({"a0": Strength(1.0, region=mask, rest=rest)})
        assert new.adapters.active["a0"].rest == rest


@pytest.mark.slow
def test_rows_go_on_with_their_regions_where_adapters_come_and_go():
    new, call = slotted("sd15", slots=3), host("sd15")[2]
    rows = [{"a0": Strength(1.0, region=LEFT), "a1": Strength(0.5, region=1 - LEFT)}, {"a1": Strength(1.0, region=LEFT)}]
    new.adapters.use(rows)
    before = run(new, rows, call)
    new.adapters.load("a1", adapter("sd15", 1), replace=True)
    with torch.no_grad():
        assert torch.equal(new(**call[1])[0], before)
        new.adapters.unload("a0")
        assert new.adapters.active[0].keys() == {"a1"}
        assert torch.equal(new(**call[1])[0], run(new, [{"a1": rows[0]["a1"]}, rows[1]], call))
    new.adapters.load("a0", adapter("sd15", 0))
    new.adapters.use(None)


@st.composite
def mixtures(draw):
    names = draw(st.lists(st.sampled_from(["a0", "a1", "a2", "a3"]), unique=True, max_size=2))
    row = {}
    for name in names:
        value = draw(st.sampled_from([1.0, -0.5, 0.3, 0.0]))
        seed = draw(st.integers(0, 5))
        mask = (torch.rand(draw(st.integers(1, 9)), 7, generator=torch.Generator().manual_seed(seed)) * 1.3).clamp(max=1)
        row[name] = Strength(value, region=mask, rest=draw(st.sampled_from(["full", "share", "none"]))) if seed else value
    return row


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(mixtures(), min_size=3, max_size=3), at=st.integers(0, 2),
       other=st.lists(mixtures(), min_size=3, max_size=3))  # fmt: skip
def test_a_row_depends_on_no_neighbour(rows, at, other):
    new, call = slotted("sd15", "dora", names=4), ((), sd15(3))
    other[at] = rows[at]
    one, two = run(new, rows, call)[at], run(new, other, call)[at]
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    alone = run(new, [rows[at]] * 3, call)[at]
    torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-4)


def test_wrong_regions_are_refused():
    new = slotted("sd15")
    for mask in (torch.ones(3), torch.full((2, 2), 1.5), torch.full((2, 2), math.nan), torch.ones(0, 3), [[1.0]], "left",
                 torch.ones(1, 2, 2), torch.full((2, 2), -0.1)):  # fmt: skip
        with pytest.raises(SpecError, match=r"region must be a tensor \(height, width\) of numbers in \[0, 1\]"):
            Strength(1.0, region=mask)
    with pytest.raises(SpecError, match="rest must be full, share or none, not 'half'"):
        Strength(1.0, region=LEFT, rest="half")
    with pytest.raises(SpecError, match=r"apply the pass with per_sample and regions=True"):
        slotted("sd15", regions=False).adapters.use({"a0": Strength(1.0, region=LEFT)})
    with pytest.raises(SpecError, match="requires 'per_sample'"):
        fxplug.load_pass("lora", at="**", rank=2, slots=2, regions=True)
    with pytest.raises(SpecError, match="true or false"):
        fxplug.load_pass("lora", at="**", rank=2, slots=2, per_sample=1, regions="yes")
    with pytest.raises(SpecError, match="at most 127 different regions, not 128"):
        new.adapters.use([{"a0": Strength(1.0, region=torch.full((2, 2), n / 140))} for n in range(128)])
    with pytest.raises(SpecError, match="a weight at all"):
        fxplug.merge(new, adapters={"a0": Strength(1.0, region=LEFT)})
    with pytest.raises(SpecError, match="one region and rest"):
        Schedule([(0, Strength(1.0, region=LEFT)), (1, 0.5)], between="linear")
    line = Schedule([(0, Strength(1.0, region=LEFT)), (1, Strength(0.0, region=LEFT))], between="linear")
    assert line.at(0.25) == Strength(0.75, region=LEFT) != Strength(0.75, region=1 - LEFT)


def test_without_regions_nothing_is_added():
    plain = slotted("sd15", regions=False)
    assert {name for name, _ in plain.lora.gates.table.named_buffers()} == {"weights", "entries", "names", "which"}
    assert not [node for node in plain.graph.nodes if "places" in node.name]


class Odd(nn.Module):
    """Layers whose places are plain, none, or not to be known."""

    def __init__(self):
        super().__init__()
        self.first, self.pooled, self.text = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4), nn.Linear(5, 4)
        self.rolled, self.windowed, self.mixed = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(64, 64)
        self.twice, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, words):
        x = self.first(x)
        pooled, words = self.twice(self.pooled(x.mean((2, 3)))), self.text(words)
        tokens = x.flatten(2).transpose(1, 2)
        joint = torch.cat([tokens, words], 1)
        tokens = tokens + self.rolled(tokens.roll(1, 1))
        parts = tokens.unflatten(1, (2, 4, 2, 4)).transpose(2, 3).flatten(1, 2).flatten(2, 3)
        tokens = tokens + self.windowed(parts.flatten(1, 2))
        tokens = tokens + self.mixed(tokens.transpose(1, 2)).transpose(1, 2)
        return self.after(tokens) + self.twice(joint)[:, 64:].mean(1, keepdim=True) + pooled[:, None]


def test_a_layer_whose_places_are_not_known_is_refused():
    gm = fxplug.trace(small.seeded(Odd).eval(), (noise(2, 3, 8, 8), noise(2, 64, 5)))
    found = find_places(gm.graph, gm, "x")
    layers = {str(node.target): found.get(node.name) for node in gm.graph.nodes if node.op == "call_module"}
    assert {name for name, one in layers.items() if one == LOST} == {"rolled", "windowed", "mixed"}
    assert layers["pooled"] == NONE and layers["text"] is None and layers["first"].dims == (2, 3)
    assert layers["after"].dims == (1,)

    def make(*at):
        return fxplug.apply(gm, fxplug.load_pass("lora", at=list(at), rank=1, slots=1, per_sample=1, regions=True))

    for name in ("rolled", "windowed", "mixed"):
        with pytest.raises(SpecError, match=f"{name}: where its result .* has the places of the picture is not known"):
            make(name)
    with pytest.raises(SpecError, match="twice: with regions each call of a layer has to be at the same places"):
        make("twice")
    new = make("first", "pooled", "text", "after")
    assert [new.get_submodule(f"lora.{n}.GatheredLora").level for n in ("first", "pooled", "text", "after")] == [1, 0, 0, 1]


class Joint(nn.Module):
    """Blocks over the tokens of a picture and words behind them, or before."""

    def __init__(self, first):
        super().__init__()
        self.__dict__["first"] = first
        self.conv, self.blocks = nn.Conv2d(3, 8, 2, 2), nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x, words):
        tokens = self.conv(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([words, tokens] if self.first else [tokens, words], 1)
        for block in self.blocks:
            tokens = tokens + block(tokens)
        return tokens[:, words.shape[1] :] if self.first else tokens[:, : -words.shape[1]]


@pytest.mark.parametrize(("name", "first", "more"), [
    ("vpt", False, {"prefix": 0, "tokens": 3}),
    ("tome", True, {"at": r"re:(?P<site>(?P<block>blocks\.\d+)\.0)$", "grid": ":in.x", "prefix": 40, "max_downsample": 2}),
])  # fmt: skip
def test_a_pass_that_changes_the_number_of_tokens_is_refused(name, first, more):
    gm = fxplug.trace(small.seeded(lambda: Joint(first)).eval(), (noise(2, 3, 16, 16), noise(2, 40, 8)))
    other = fxplug.load_pass(name, **more)
    regions = fxplug.load_pass("lora", at="blocks.*.0", rank=1, slots=1, per_sample=1, regions=True)
    with pytest.raises(SpecError, match="it changes the number of tokens, and a pass with regions has masks"):
        fxplug.apply(fxplug.apply(gm, regions), other)
    with pytest.raises(SpecError, match="where its result .* has the places of the picture is not known"):
        fxplug.apply(fxplug.apply(gm, other), regions)


MOVERS = {
    "adjoint": lambda x, words: x.adjoint(),
    "pad": lambda x, words: F.pad(x, (0, 0, 1, -1)),
    "channel_shuffle": lambda x, words: F.channel_shuffle(x[..., None], 4).squeeze(3),
    "cdist": lambda x, words: torch.cdist(words, x),
    "linear": lambda x, words: F.linear(words, x[0]),
    "addbmm": lambda x, words: words + torch.addbmm(words[0], words, x),
    "matmul": lambda x, words: words @ x,
    "baddbmm": lambda x, words: torch.baddbmm(x, words, words),
}


class Moved(nn.Module):
    """Tokens of 4 x 4 places, as many as there are channels and words, in a function and then a layer."""

    def __init__(self, name):
        super().__init__()
        self.function, self.first, self.layer = MOVERS[name], nn.Conv2d(16, 16, 1), nn.Linear(16, 16)

    def forward(self, x, words):
        tokens = self.first(x).flatten(2).transpose(1, 2)
        return tokens + self.layer(self.function(tokens, words))


@pytest.mark.parametrize("name", MOVERS)
def test_a_layer_behind_a_function_that_moves_places_is_refused(name):
    gm = fxplug.trace(small.seeded(lambda: Moved(name)).eval(), (noise(2, 16, 4, 4), noise(2, 16, 16)))
    with pytest.raises(SpecError, match="layer: where its result .* has the places of the picture is not known"):
        fxplug.apply(gm, fxplug.load_pass("lora", at="layer", rank=1, slots=1, per_sample=1, regions=True))


def write_half(model, tokens, words):
    both = torch.cat([words, words], 1)
    first, second = torch.chunk(both, 2, 1)
    first.copy_(tokens)
    second.copy_(words)
    return both


def write_view(model, tokens, words):
    both = words.clone()
    flat = both.flatten(2)
    both[:, :8] = tokens[:, 8:]
    return flat


def write_out(model, tokens, words):
    made = tokens.clone()
    torch.add(tokens.flip(1), words, out=made)
    return made


HIDDEN = {
    "a layer called by keyword": lambda model, tokens, words: model.mixed(input=tokens.transpose(1, 2)).transpose(1, 2),
    "written into a part": write_half,
    "written where a view is": write_view,
    "written as out": write_out,
    "resized to one pixel": lambda model, tokens, words: F.interpolate(
        F.avg_pool2d(tokens.transpose(1, 2).unflatten(2, (4, 4)), 2), scale_factor=0.5
    ).flatten(2).transpose(1, 2),
    "rounded up": lambda model, tokens, words: torch.cat(
        [words, model.pool(tokens.transpose(1, 2).unflatten(2, (4, 4))).flatten(2).transpose(1, 2)], 1
    ),
}


class Hidden(nn.Module):
    """A layer behind what hides that places were moved, mixed, or have another number at other sizes."""

    def __init__(self, name):
        super().__init__()
        self.function, self.first = HIDDEN[name], nn.Conv2d(16, 16, 1)
        self.layer, self.mixed = nn.Linear(16, 16), nn.Linear(16, 16)
        self.pool = nn.AvgPool2d(2, ceil_mode=True)

    def forward(self, x, words):
        tokens = self.first(x).flatten(2).transpose(1, 2)
        return tokens + self.layer(self.function(self, tokens, words)).mean(1, keepdim=True)


@pytest.mark.parametrize("how", ["view", "unflatten"])
def test_windows_that_were_one_in_the_example_are_refused(how):
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = nn.Conv2d(3, 4, 1), nn.Linear(4, 4)

        def forward(self, x):
            x, (batch, _, height, width) = self.first(x), x.shape
            if how == "view":
                x = x.view(batch, 4, height // 4, 4, width // 4, 4)
            else:
                x = x.unflatten(2, (height // 4, 4)).unflatten(-1, (-1, 4))
            return self.layer(x.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, 4))

    gm = fxplug.trace(small.seeded(Windows).eval(), noise(2, 3, 4, 4))
    with pytest.raises(SpecError, match="layer: where its result .* has the places of the picture is not known"):
        fxplug.apply(gm, fxplug.load_pass("lora", at="layer", rank=1, slots=1, per_sample=1, regions=True))


@pytest.mark.parametrize("name", HIDDEN)
def test_a_layer_behind_what_hides_its_places_is_refused(name):
    gm = fxplug.trace(small.seeded(lambda: Hidden(name)).eval(), (noise(2, 16, 4, 4), noise(2, 16, 16)))
    with pytest.raises(SpecError, match="layer: where its result .* has the places of the picture is not known"):
        fxplug.apply(gm, fxplug.load_pass("lora", at="layer", rank=1, slots=1, per_sample=1, regions=True))


def test_a_list_of_channels_moves_no_places():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = nn.Conv2d(4, 4, 1), nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.first(x)[:, [3, 2, 1, 0]])  # the width alone is mixed

    gm = fxplug.trace(small.seeded(Listed).eval(), noise(2, 4, 4, 4))
    with pytest.raises(SpecError, match="layer: where its result .* has the places of the picture is not known"):
        fxplug.apply(gm, fxplug.load_pass("lora", at="layer", rank=1, slots=1, per_sample=1, regions=True))


def test_a_mean_over_channels_has_the_places():
    class Means(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = nn.Conv2d(3, 4, 1), nn.Conv2d(1, 4, 1)

        def forward(self, x):
            return self.layer(torch.mean(self.first(x), axis=1, keepdim=True))

    gm = fxplug.trace(small.seeded(Means).eval(), noise(2, 3, 8, 8))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="layer", rank=1, slots=1, per_sample=1, regions=True))
    assert new.get_submodule("lora.layer.GatheredLora").level == 1


@pytest.mark.slow
def test_words_have_no_places_and_videos_are_refused():
    words = fxplug.trace(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)).eval(), torch.arange(6).view(2, 3))
    new = fxplug.apply(words, fxplug.load_pass("lora", at="1", rank=1, slots=1, per_sample=1, regions=True))
    new.adapters.load("a0", {"1.lora_A.weight": torch.ones(1, 4), "1.lora_B.weight": torch.ones(4, 1)})
    half, whole, none = (run(new, what, ((torch.arange(6).view(2, 3),), {})) for what in
                         (inside({"a0": 1.0}, LEFT), {"a0": 0.5}, inside({"a0": 1.0}, LEFT, "none")))  # fmt: skip
    assert torch.equal(half, whole) and not torch.equal(half, none)
    case = next(case for case in zoo.cases() if case.name == "diffusers/LTXVideoTransformer3DModel")  # packed in tokens
    packed = fxplug.trace(case.build().eval(), *case.inputs(batch=2))
    with pytest.raises(SpecError, match="'hidden_states', is .* as of a video"):
        fxplug.apply(packed, fxplug.load_pass("lora", at="**.to_q", rank=1, slots=1, per_sample=1, regions=True))
    case = next(case for case in zoo.cases() if case.name == "diffusers/Ideogram4Transformer2DModel")
    mixed = fxplug.trace(case.build().eval(), *case.inputs(batch=2))
    with pytest.raises(SpecError, match="'hidden_states', is .* with words among the tokens"):
        fxplug.apply(mixed, fxplug.load_pass("lora", at="**.to_q", rank=1, slots=1, per_sample=1, regions=True))
    video = fxplug.trace(nn.Conv3d(2, 2, 3, padding=1).eval(), noise(1, 2, 4, 6, 6))
    with pytest.raises(SpecError, match="as of a video"):
        fxplug.apply(video, fxplug.load_pass("lora", at="**", rank=1, slots=1, per_sample=1, regions=True))
    with pytest.raises(SpecError, match="name the latents, .* with 'samples'"):
        slotted("sd15", samples="encoder_hidden_states")


@pytest.mark.slow
def test_layers_of_random_models_take_the_mask_of_their_places_or_are_refused():
    assert fuzz_regions(40, 30) == []
