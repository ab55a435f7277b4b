"""ControlNet as one graph: the same numbers as diffusers' two models, and all that one graph can do and two cannot."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import small
import torch
import unets
from diffusers import ControlNetModel, DDIMScheduler
from torch import nn
from unets import CONDITION, control, error, picture

import fxplug

OPTIONS = {"conditioning_embedding_out_channels": CONDITION}


def rewritten(base, network, **params):
    return fxplug.apply(base.gm, fxplug.load_pass("controlnet", network=network, **params))


@cache
def with_control(host):
    """A network that says something, and the host with it."""
    network = control(unets.HOSTS[host]().model)
    return network, rewritten(unets.HOSTS[host](), network)


def pair(base, network, cond, strength=1.0, guess_mode=False, unet=None):
    """What diffusers' own two models give."""
    call = base.kwargs
    down, middle = network(**call, controlnet_cond=cond, conditioning_scale=strength, guess_mode=guess_mode)
    unet = base.model if unet is None else unet
    return unet(**call, down_block_additional_residuals=down, mid_block_additional_residual=middle)[0]


@pytest.fixture(params=["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def host(request):
    return request.param


@pytest.fixture
def base(host):
    return unets.HOSTS[host]()


@pytest.mark.slow
def test_the_output_is_that_of_diffusers_two_models(base, host):
    (network, new), cond = with_control(host), picture(base)
    assert not new.meta["passes"][-1]["neutral"]
    with torch.no_grad():
        for strength in (1.0, 0.4, -0.5):
            ours = new(**base.kwargs, cond=cond, strength=torch.tensor(strength))[0]
            assert error(ours, pair(base, network, cond, strength)) < 1e-5
        assert error(new(**base.kwargs, cond=cond)[0], pair(base, network, cond)) < 1e-5
        assert error(ours, base.model(**base.kwargs)[0]) > 1e-2  # it does something
        assert torch.equal(new(**base.kwargs, cond=cond, strength=torch.tensor(0.0))[0], base.model(**base.kwargs)[0])


def test_the_gradients_are_those_of_diffusers_two_models(base, host):
    (network, new), found = with_control(host), []
    for run in (lambda cond: new(**base.kwargs, cond=cond, strength=torch.tensor(0.7))[0],
                lambda cond: pair(base, network, cond, 0.7)):  # fmt: skip
        cond = picture(base).requires_grad_()
        network.zero_grad()
        run(cond).square().mean().backward()
        found.append({"cond": cond.grad, **{k: p.grad.clone() for k, p in network.named_parameters() if p.grad is not None}})
    base.model.zero_grad()
    ours, theirs = found
    assert ours.keys() == theirs.keys() and len(ours) > 100
    scale = max(g.abs().max() for g in theirs.values())
    assert all((ours[k] - g).abs().max() <= 1e-4 * max(g.abs().max(), 1e-3 * scale) for k, g in theirs.items())


def test_a_new_controlnet_made_from_the_host_is_neutral(base):
    torch.manual_seed(0)
    new = rewritten(base, "diffusers:ControlNetModel.from_unet", options=OPTIONS)
    assert new.meta["passes"][-1]["neutral"]
    paths, levels = [s["path"] for s in new.meta["passes"][-1]["sites"]], base.model.up_blocks
    assert paths.count("mid_block") == 1 and len(paths) == 2 + sum(len(level.resnets) for level in levels)  # and the gate
    with torch.no_grad():
        assert torch.equal(new(**base.kwargs, cond=picture(base))[0], base.model(**base.kwargs)[0])
    made = {k.removeprefix("controlnet.cn."): v for k, v in new.state_dict().items() if k.startswith("controlnet.cn.")}
    copied = {k: v for k, v in base.model.state_dict().items() if k.startswith(("down_", "mid_", "conv_in", "time_", "add_"))}
    assert len(copied) > 100 and all(torch.equal(made[k], v) for k, v in copied.items())


@pytest.mark.slow
def test_it_loads_from_a_folder(tmp_path):
    base, (network, _) = unets.sd15(), with_control("sd15")
    network.save_pretrained(tmp_path / "cn")
    new, cond = rewritten(base, str(tmp_path / "cn")), picture(base)
    with torch.no_grad():
        assert error(new(**base.kwargs, cond=cond)[0], pair(base, network, cond)) < 1e-5


def test_guess_mode(base, host):
    (network, _), cond = with_control(host), picture(base)
    new = rewritten(base, network, guess_mode=True)
    with torch.no_grad():
        ours = new(**base.kwargs, cond=cond, strength=torch.tensor(0.8))[0]
        assert error(ours, pair(base, network, cond, 0.8, guess_mode=True)) < 1e-5
        assert error(ours, pair(base, network, cond, 0.8)) > 1e-3


def test_the_hidden_state_that_is_also_a_skip_is_not_changed():
    base = unets.sd15()  # its last level returns one tensor as result and as last skip
    network, cond = control(base.model), picture(base)
    with torch.no_grad():
        for block in (*network.controlnet_down_blocks[:-1], network.controlnet_mid_block):
            block.weight.zero_(), block.bias.zero_()
        new = rewritten(base, network)
        assert error(new(**base.kwargs, cond=cond)[0], pair(base, network, cond)) < 1e-5


@pytest.mark.slow
def test_a_host_in_half_precision_stays_there():
    unet = copy.deepcopy(unets.sd15().model).to(torch.bfloat16)
    call = dict(unets.sd15().kwargs)
    call.update({k: call[k].bfloat16() for k in ("sample", "encoder_hidden_states")})
    base = small.traced(unet, **call)
    network, cond = control(unets.sd15().model).to(torch.bfloat16), picture(base).bfloat16()
    new = rewritten(base, network)
    with torch.no_grad():
        for knobs in ({}, {"strength": 0.7}, {"strength": torch.tensor(0.7), "start": torch.tensor(0.1)}):
            ours = new(**call, cond=cond, **knobs)[0]
            theirs = pair(base, network, cond, 0.7 if knobs else 1.0)
            assert ours.dtype == torch.bfloat16 and error(ours.float(), theirs.float()) < 0.02


# --- when it acts


@pytest.mark.parametrize("spacing", ["trailing", "linspace"])
def test_the_gate_follows_the_schedule(spacing):
    base, (_, new) = unets.sd15(), with_control("sd15")
    cond, scheduler = picture(base), DDIMScheduler(timestep_spacing=spacing)
    scheduler.set_timesteps(10)
    window = {"start": torch.tensor(0.2), "end": torch.tensor(0.5)}
    acted, theirs = [], []
    with torch.no_grad():
        for i, t in enumerate(scheduler.timesteps):
            call = {**base.kwargs, "timestep": t, "cond": cond}
            on, gated, off = new(**call)[0], new(**call, **window)[0], base.model(**base.kwargs | {"timestep": t})[0]
            assert torch.equal(gated, on) or torch.equal(gated, off)
            acted.append(torch.equal(gated, on))
            assert acted[-1] == (0.2 - 1e-6 <= 1 - t.item() / 1000 <= 0.5 + 1e-6)
            theirs.append(i / 10 >= 0.2 and (i + 1) / 10 <= 0.5)  # as diffusers' pipelines count
    assert any(acted) and not all(acted)
    if spacing == "trailing":  # the same start, and the one step more that begins where theirs ends
        assert [i for i, a in enumerate(acted) if a] == [*[i for i, a in enumerate(theirs) if a], 5][: sum(acted)]


@pytest.mark.slow
def test_each_sample_of_a_batch_has_its_own_gate():
    base, (network, _) = unets.sd15(), with_control("sd15")
    cond = picture(base)
    call = {**base.kwargs, "timestep": torch.tensor([900, 100])}
    gm = fxplug.trace(base.model, (), call)
    new = fxplug.apply(gm, fxplug.load_pass("controlnet", network=network))
    with torch.no_grad():
        late = new(**call, cond=cond, start=torch.tensor(0.5))[0]
        assert error(late[:1], base.model(**call)[0][:1]) < 1e-6
        assert error(late[1:], new(**call, cond=cond)[0][1:]) < 1e-6


# --- together


@pytest.mark.slow
def test_two_controlnets_at_once():
    base = unets.sd15()
    first, second = control(base.model), control(base.model, seed=7)
    one, two = picture(base), picture(base, seed=8)
    new = fxplug.apply(
        base.gm,
        fxplug.load_pass("controlnet", network=first),
        fxplug.load_pass("controlnet", network=second, name="second"),
    )
    assert new.meta["passes"][-1]["inputs"] == ["second_cond", "second_strength", "second_start", "second_end"]
    with torch.no_grad():
        call = base.kwargs
        down, middle = first(**call, controlnet_cond=one, conditioning_scale=0.6)
        other, centre = second(**call, controlnet_cond=two, conditioning_scale=0.3)
        down = [a + b for a, b in zip(down, other, strict=True)]
        theirs = base.model(**call, down_block_additional_residuals=down, mid_block_additional_residual=middle + centre)[0]
        knobs = {"strength": torch.tensor(0.6), "second_strength": torch.tensor(0.3)}
        assert error(new(**call, cond=one, second_cond=two, **knobs)[0], theirs) < 1e-5


def test_lora_into_the_controlnet():
    base, (_, new) = unets.sd15(), with_control("sd15")
    lora = fxplug.load_pass("lora", at="controlnet.cn.**.attn1.to_q", rank=2)
    sites = fxplug.find(new, lora)
    assert len(sites) == 2 and all(s.path.startswith("controlnet.cn.") for s in sites)
    layers = [m for m in new.get_submodule("controlnet.cn").modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    assert len(fxplug.find(new, fxplug.load_pass("lora", at="controlnet.cn.**"))) == len(layers) > 50
    both, cond = fxplug.apply(new, lora), picture(base)
    assert torch.equal(both(**base.kwargs, cond=cond)[0], new(**base.kwargs, cond=cond)[0])
    both(**base.kwargs, cond=cond)[0].square().mean().backward()
    ups = [p for k, p in both.named_parameters() if k.endswith("attn1.to_q.Lora.up.weight")]
    assert len(ups) == 2 and all(p.grad.any() for p in ups)
    base.model.zero_grad()
    everywhere = fxplug.find(new, fxplug.load_pass("lora", at="**.attn1.to_q", rank=2))
    assert everywhere and not [s for s in everywhere if s.path.startswith("controlnet.")]


@pytest.mark.slow
def test_it_is_saved_and_loaded_with_its_network(tmp_path):
    base, (_, new) = unets.sd15(), with_control("sd15")
    cond = picture(base)
    fxplug.save(new, tmp_path / "out")
    again = fxplug.load(tmp_path / "out")
    with torch.no_grad():
        knobs = {"cond": cond, "strength": torch.tensor(0.3)}
        assert torch.equal(again(**base.kwargs, **knobs)[0], new(**base.kwargs, **knobs)[0])


# --- full size, and what is refused


@pytest.mark.slow
def test_the_full_size_is_one_graph():
    unet, gm, call = (base := unets.sdxl_full_traced()).model, base.gm, base.kwargs
    with torch.device("meta"):
        new = fxplug.apply(gm, fxplug.load_pass("controlnet"))
        side = 8 * unet.config.sample_size
        given = {**call, "cond": torch.empty(2, 3, side, side), "strength": torch.tensor(1.0)}
    assert [s["path"] for s in new.meta["passes"][0]["sites"]].count("mid_block") == 1
    residuals = len(unet.up_blocks) * len(unet.up_blocks[0].resnets)
    assert len(new.meta["passes"][0]["sites"]) == residuals + 2  # the middle, and the gate
    report = fxplug.verify(gm, new, (), given, compile=True)
    assert {c.name: c.status for c in report.checks}["one graph"] == "ok"


@pytest.mark.slow
def test_a_controlnet_for_another_model_is_refused_with_what_differs():
    base, other = unets.sd15(), unets.sdxl()
    with pytest.raises(fxplug.FxplugError, match="controlnet: the network was made for another model") as caught:
        rewritten(base, control(other.model))
    key = next(line.split()[0] for line in str(caught.value).splitlines() if line.endswith("in the model"))
    ours, theirs = (list(m.state_dict()[key].shape) for m in (base.model, other.model))
    assert f"  {key} is {theirs} in 'cn' and {ours} in the model" in str(caught.value)
    wide = ControlNetModel.from_unet(unets.sd15_model(block_out_channels=(8, 32)), **OPTIONS)
    with pytest.raises(fxplug.SpecError, match=r"controlnet: up_blocks.*\[2, 32, .*does not fit .*\[2, 16, "):
        rewritten(base, wide)
    long = ControlNetModel.from_unet(unets.sd15_model(layers_per_block=2), **OPTIONS)
    with pytest.raises(fxplug.MatchError, match=r"matches 6 places and .* 4; they are paired in order"):
        rewritten(base, long)


def test_a_condition_of_another_size_is_refused_when_called():
    base, (_, new) = unets.sd15(), with_control("sd15")
    with pytest.raises(fxplug.FxplugError, match=r"'cond' must have the shape \[n, 3, 8\*h, 8\*w\].* it has \[2, 3, 64, 64\]"):
        new(**base.kwargs, cond=torch.rand(2, 3, 64, 64))
    with pytest.raises(fxplug.FxplugError, match="cond"):
        new(**base.kwargs)
    with pytest.raises(fxplug.FxplugError, match="strength"):
        new(**base.kwargs, cond=picture(base), strength=torch.ones(3))
