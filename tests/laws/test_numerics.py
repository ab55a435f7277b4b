"""What passes say of their numerics, on models of six families: exact to the bit, rounding of sums, or an approximation."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import small
import torch
import zoo
from torch import nn
from torch.nn.utils import parametrize

import fxplug
from fxplug.core.errors import SpecError
from fxplug.core.ir.containers import list_leaves
from fxplug.core.spec.pass_file import list_shipped, open_pass
from fxplug.core.spec.rules import NUMERICS
from fxplug.parallel.runtime.pretended import run_simulated

FAMILIES = {
    "a ViT": "timm/vit_tiny_patch16_224", "a ConvNet": "", "a UNet": "diffusers/UNet2DConditionModel-sd15",
    "Flux": "diffusers/FluxTransformer2DModel", "Wan": "diffusers/WanTransformer3DModel",
    "PixArt": "diffusers/PixArtTransformer2DModel",
}  # fmt: skip
SAID = {name: open_pass(name).source.data["numerics"] for name in list_shipped("passes")}
# one block beside each layer, or on its parameter, with what fits narrow layers
BLOCKS = {
    "lora": {"rank": 2, "alpha": 3}, "lora_weight": {"rank": 2}, "dora": {"rank": 2}, "loha": {"rank": 2}, "lokr": {"rank": 1},
    "oft": {"block_size": 2}, "boft": {"block_size": 2}, "bitfit": {}, "delta": {"param": "weight"},
    "weight_norm": {}, "spectral_norm": {},
    "ssf": {}, "scale": {}, "bottleneck": {"bottleneck": 2}, "parallel_adapter": {"bottleneck": 2},
}  # fmt: skip


@cache
def case(family):
    if not FAMILIES[family]:
        convs = [layer for n in range(4) for layer in (nn.Conv2d(4 if n == 0 else 8, 8, 3, padding=1), nn.GELU())]
        return small.traced(small.seeded(lambda: nn.Sequential(*convs)).eval(), small.seeded(lambda: torch.randn(2, 4, 8, 8)))
    (found,) = (each for each in zoo.cases() if each.name == FAMILIES[family])
    args, kwargs = found.inputs(batch=2)
    return small.traced(found.build().eval(), *args, **kwargs)


@cache
def some(family):
    """A few layers of a model: linear ones and convolutions that are called once each, with a bias."""
    model = case(family).model
    kinds = [(n, m) for n, m in model.named_modules() if type(m) in (nn.Linear, nn.Conv2d) and m.bias is not None]
    plain = [(n, m) for n, m in kinds if getattr(m, "groups", 1) == 1 and getattr(m, "stride", (1, 1)) == (1, 1)]
    fit = [n for n, m in plain if m.weight.shape[0] % 4 == 0 and m.weight.shape[1] % 4 == 0]
    return fit[:: max(1, len(fit) // 4)][:4]


def result(module, base):
    torch.manual_seed(0)
    with torch.no_grad():
        return [value for value in list_leaves(module(*base.args, **base.kwargs)) if isinstance(value, torch.Tensor)]


def by_hand(base, new, args):
    """The model with the same blocks as parametrizations and forward hooks, torch's own ways to put them there."""
    model = copy.deepcopy(base.model)
    for site in new.meta["passes"][0]["sites"]:
        path, block = site["path"].partition(":")[0], new.get_submodule(site["block"])
        layer = model.get_submodule(path)
        if site["place"] == "param":
            parametrize.register_parametrization(layer, site.get("param", "weight"), copy.deepcopy(block), unsafe=True)
        else:
            layer.register_forward_hook(lambda _, x, y, block=block: block(*({"x": x[0], "y": y}[name] for name in args)))
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_an_exact_pass_does_what_it_says_to_the_bit(name, family):
    base, made = case(family), fxplug.load_pass(name, at=some(family), **BLOCKS[name])
    assert made.numerics == SAID[name] == "exact"
    torch.manual_seed(1)
    new = fxplug.apply(base.gm, made)
    entry = new.meta["passes"][0]
    assert len(entry["sites"]) == len(some(family)) == 4
    if entry["neutral"]:
        assert all(map(torch.equal, result(new, base), result(base.model, base)))
    with torch.no_grad():  # as if trained
        for key, parameter in new.named_parameters():
            if key.startswith(f"{entry['name']}."):
                parameter += 0.05 * torch.randn(parameter.shape)
    found, want = result(new, base), result(by_hand(base, new, made.rules[0].args), base)
    assert all(map(torch.equal, found, want))
    assert not all(map(torch.equal, found, result(base.model, base)))


@pytest.mark.parametrize("family", ["a ViT", "Flux", "PixArt"])
@pytest.mark.parametrize(("name", "ways"), [("sequence_parallel", {"ulysses": 2}), ("batch_parallel", {"batch": 2})])
def test_a_pass_that_rounds_is_as_near_as_another_order_of_sums(name, ways, family):
    assert SAID[name] == "rounding"
    base = case(family)
    plan = fxplug.parallel_plan(base.gm, base.args, base.kwargs, **ways)
    new = fxplug.parallelize(base.gm, plan)
    want = result(base.model, base)
    for found in run_simulated(plan.ways, lambda rank: result(new, base)):
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_lossy_pass_is_further_away():
    base = case("a UNet")
    assert SAID["tome"] == "lossy"
    found, want = result(fxplug.apply(base.gm, fxplug.load_pass("tome")), base), result(base.model, base)
    assert (found[0] - want[0]).abs().max() > 1e-3 * want[0].abs().max()


def test_every_pass_says_its_numerics():
    assert set(SAID.values()) == set(NUMERICS)
    assert {name for name, said in SAID.items() if said == "lossy"} == {
        "deepcache", "ditfastattn", "first_block_cache", "pipefusion", "teacache", "tome",
    }  # fmt: skip
    assert all(said == "rounding" for name, said in SAID.items() if name.endswith("_parallel"))
    listed = small.command("passes").stdout
    assert all(any(line.split()[:2] == [name, said] for line in listed.splitlines()) for name, said in SAID.items())
    assert "numerics: lossy (an approximation" in small.command("passes", "tome").stdout


@pytest.mark.parametrize("value", ["exakt", "", 3, True, ["exact"]])
def test_another_word_is_refused_and_none_is_no_promise(value, tmp_path):
    rule = {"match": {"path": "**"}, "use": "fxplug.blocks:Scale"}
    with pytest.raises(SpecError, match=r"numerics.*must be one of exact, rounding, lossy, not "):
        fxplug.load_pass({"name": "own", "rules": [rule], "numerics": value})
    assert fxplug.load_pass({"name": "own", "rules": [rule]}).numerics is None
    (tmp_path / "own.yaml").write_text('numerics: lossless\nrules: [{match: {path: "**"}, use: "fxplug.blocks:Scale"}]\n')
    with pytest.raises(SpecError, match=r"own\.yaml:1.*must be one of exact, rounding, lossy, not 'lossless'"):
        fxplug.load_pass(tmp_path / "own.yaml")
