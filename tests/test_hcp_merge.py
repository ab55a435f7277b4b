"""`merge` sections of HCP-Diffusion on a UNet: what its loader computes, and what it lets pass in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import small
import torch
import unets
import yaml

import fxplug
from fxplug.compat.hcp.checkpoint_files import select_names
from fxplug.compat.hcp.convert_file import convert, convert_checkpoint
from fxplug.core.errors import ArtifactError, SpecError
from fxplug.core.spec.yaml_source import parse_yaml

CONFIG = {
    "model": f"{__name__}:seeded_sd15",
    "inputs": {
        "sample": [2, 4, 16, 16],
        "timestep": {"shape": [2], "dtype": "int64", "high": 99},
        "encoder_hidden_states": [2, 6, 12],
        "return_dict": False,
    },
    "verify": False,
}
LINEAR, CONV = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q", "down_blocks.0.resnets.0.conv1"
BASE = ["mid_block.resnets.0.norm1.weight", "conv_in.weight", "conv_in.bias", f"{LINEAR}.weight"]


def seeded_sd15():
    return small.seeded(unets.sd15_model)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(yaml.safe_dump(CONFIG))


@pytest.fixture(scope="module")
def model():
    return seeded_sd15()


def call():
    return small.seeded(lambda: (torch.randn(2, 4, 16, 16), torch.tensor([3, 70]), torch.randn(2, 6, 12)))


def lora_file(path, model, layers=(LINEAR, CONV), rank=2, old=False, **more):
    """Low-rank updates as HCP-Diffusion writes them, with an alpha that its own loader does not look at."""
    names = ("layer.lora_down.weight", "layer.lora_up.weight") if old else ("layer.W_down", "layer.W_up")
    between = ".lora_block." if old else ".___."
    state = {}
    for number, layer in enumerate(layers):
        torch.manual_seed(number + len(path) + rank)
        weight = model.get_submodule(layer).weight
        state[f"{layer}{between}{names[0]}"] = torch.randn(rank, *weight.shape[1:])
        state[f"{layer}{between}{names[1]}"] = torch.randn(weight.shape[0], rank, *[1] * (weight.dim() - 2))
        state[f"{layer}{between}alpha"] = torch.tensor(7.0)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"lora": {**state, **more}}, path)
    return state


def base_file(path, model, names=BASE):
    torch.manual_seed(len(path))
    state = {name: torch.randn_like(model.get_parameter(name)) for name in names}
    torch.save({"base": state}, path)
    return state


def merged_by_formula(model, parts=(), loras=()):
    """HCPModelLoader.load_part one after the other, and W + sum of alpha / rank * up @ down."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for found, base, alpha in parts:
        for name, value in found.items():
            state[name] = base * state[name] + alpha * value
    for found, scale in loras:
        for layer in {key.partition(".___.")[0].partition(".lora_block.")[0] for key in found}:
            mine = {key.rpartition(layer)[2]: value for key, value in found.items() if key.startswith(f"{layer}.")}
            down = next(v for k, v in mine.items() if "down" in k)
            up = next(v for k, v in mine.items() if "up" in k)
            weight = state[f"{layer}.weight"]
            state[f"{layer}.weight"] = weight + scale * (up.flatten(1) @ down.flatten(1)).view(weight.shape)
    made = seeded_sd15()
    made.load_state_dict(state)
    return made


def rewritten(text, **how):
    Path("infer.yaml").write_text(text)
    Path("out.yaml").write_text(convert("infer.yaml", model="base.yaml", out="out.yaml", **how).text)
    return fxplug.rewrite("out.yaml").module


MERGE = """
alpha_all: 0.8
merge:
  exp_dir: one
  group1:
    type: unet
    base_model_alpha: 0.4
    part:
      - {path: 'part.ckpt', alpha: 0.6}
      - {path: 'part2.ckpt', alpha: 0.3, layers: [conv_in, 're:mid.*attn1']}
    lora:
      - {path: 'exps/${merge.exp_dir}/a.ckpt', alpha: '${alpha_all}', layers: all}
      - {path: 'b.ckpt', alpha: -0.65, layers: ['re:.*\\.to_q$'], alpha_auto_scale: false}
  group2:
    type: TE
    lora: [{path: te.ckpt}]
"""


@pytest.mark.slow
def test_parts_and_low_rank_updates_are_merged_as_its_loader_does(model):
    one, two = base_file("part.ckpt", model), base_file("part2.ckpt", model)
    a, b = lora_file("exps/one/a.ckpt", model), lora_file("b.ckpt", model, old=True, rank=3)
    new = rewritten(MERGE)
    chosen = {name: value for name, value in two.items() if "norm1" not in name}
    to_q = {key: value for key, value in b.items() if key.startswith(LINEAR)}
    expected = merged_by_formula(model, [(one, 0.4, 0.6), (chosen, 0.4, 0.3)], [(a, 0.8 / 2), (to_q, -0.65)])
    args = call()
    with torch.no_grad():
        found = new(*args, return_dict=False)[0]
        torch.testing.assert_close(found, expected(*args, return_dict=False)[0], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(found, model(*args, return_dict=False)[0], atol=1e-2)


@pytest.mark.slow
def test_halves_of_the_batch_have_updates_of_their_own(model):
    p, n = lora_file("p.ckpt", model), lora_file("n.ckpt", model, rank=1)
    items = "{path: p.ckpt, alpha: 0.7, mask: [0.5, 1]}, {path: n.ckpt, alpha: 0.5, mask: [0, 0.5]}"
    new = rewritten("merge: {g: {type: unet, base_model_alpha: 1.0, lora: [" + items + "]}}")
    args = call()
    with torch.no_grad():
        expected = torch.cat(
            [
                merged_by_formula(model, [], [(n, 0.5)])(*args, return_dict=False)[0][:1],
                merged_by_formula(model, [], [(p, 0.35)])(*args, return_dict=False)[0][1:],
            ]
        )
        torch.testing.assert_close(new(*args, return_dict=False)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_is_merged_is_saved_without_its_files(model, tmp_path):
    lora_file("a.ckpt", model)
    new = rewritten("merge: {g: {type: unet, lora: [{path: a.ckpt}]}}")
    fxplug.save(new, "saved")
    Path("a.ckpt").unlink()
    args = call()
    again = fxplug.load("saved")
    assert torch.equal(again(*args, return_dict=False)[0], new(*args, return_dict=False)[0])
    assert {entry["neutral"] for entry in again.meta["passes"]} == {False}
    one = fxplug.merge(again)
    torch.testing.assert_close(one(*args, return_dict=False)[0], new(*args, return_dict=False)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "text, place, message",
    [
        ("g: {type: unt, lora: []}", "type", "must be one of unet, TE, not 'unt' .did you mean 'unet'"),
        ("g: {lora: [{path: a.ckpt}]}", "g", "missing key 'type'"),
        ("g: {type: unet, lroa: []}", "g", "unknown key 'lroa' .did you mean 'lora'"),
        ("g: {type: unet, lora: {path: a}}", "lora", "must be a list of files"),
        ("g: {type: unet, lora: [{pth: a}]}", "lora", "unknown key 'pth' .did you mean 'path'"),
        ("g: {type: unet, lora: [{alpha: 1}]}", "lora", "missing key 'path'"),
        ("g: {type: unet, lora: [{path: a, alpha: x}]}", "alpha", "must be a number"),
        ("g: {type: unet, lora: [{path: a, mask: [0, 0.3]}]}", "mask", "for the whole batch or for one half"),
        ("g: {type: unet, lora: [{path: a, layers: ['re:(']}]}", "layers", "not a regular expression"),
        ("g: {type: unet, lora: [{path: a, mask: [{a: 1}, 1]}]}", "mask", "for the whole batch or for one half"),
        ("g: {type: unet, lora: [{path: a, alpha: .nan}]}", "alpha", "must be a number"),
        ("g: {type: [unet], lora: [{path: a}]}", "type", "must be one of unet, TE, not a list"),
        ("load_ema: 'yes', g: {type: unet, lora: [{path: a}]}", "load_ema", "must be true or false"),
        ("plugin_cfg: {plugin_unet: [1]}, g: {type: unet, plugin: {}}", "plugin_cfg", "must be a mapping of plugins"),
        ("g: {type: unet, part: [{path: a}]}", "part", "missing key 'alpha'"),
        ("g: {type: unet, base_model_alpha: a, part: [{path: a, alpha: 1}]}", "base_model_alpha", "must be a number"),
        ("g: {type: unet, lora: [{path: '${nothing.here}'}]}", "path", "no 'nothing' here or in a _base_ file"),
        ("g: {type: unet, lora: [{path: '${merge.g.lora[0].path}'}]}", "path", "refers to itself"),
        ("plugin_cfg: no.yaml, g: {type: unet, lora: []}", "plugin_cfg", "'no.yaml' is in no folder around"),
        ("g: {type: unet, plugin: {cn: {path: a.ckpt}}}", "plugin", "plugin_cfg has no plugin 'cn'"),
        ("g: 3", "", "has neither 'plugin_unet' nor 'lora_unet'"),
    ],
)
def test_what_is_wrong_in_a_group(text, place, message):
    Path("infer.yaml").write_text("merge: {" + text + "}\n")
    with pytest.raises(SpecError, match=message) as error:
        convert("infer.yaml")
    assert "infer.yaml:1" in str(error.value) or not place
    assert place in str(error.value)


def test_weights_of_plugins_are_told_the_verb_that_puts_them_in():
    Path("plugins.yaml").write_text(
        "plugin_unet:\n  gain: {_target_: 'fxplug.compat.hcp.sample_plugins.Gain', _partial_: true, layers: [mid_block]}\n"
    )
    group = "{type: unet, plugin: {gain: {path: g.ckpt, layers: all, strength: 2}}}"
    Path("infer.yaml").write_text("merge: {plugin_cfg: plugins.yaml, g: " + group + "}\n")
    done = convert("infer.yaml")
    assert parse_yaml(done.text).data["passes"][0]["hcp/single"]["name"] == "gain"
    notes = " ".join(done.notes)
    assert "fxplug convert hcp g.ckpt --into DIR --pass gain" in notes and "set_hyper_params({'strength': 2})" in notes


@pytest.mark.slow
def test_a_file_of_another_model_says_which_and_how_many(model):
    sdxl = "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_k"
    state = {f"{sdxl}.___.layer.W_down": torch.zeros(2, 2048), f"{sdxl}.___.layer.W_up": torch.zeros(640, 2)}
    lora_file("a.ckpt", model, **state)
    with pytest.raises(fxplug.FxplugError, match="to_k"):
        rewritten("merge: {g: {type: unet, lora: [{path: a.ckpt}]}}")
    base_file("p.ckpt", model)
    torch.save({"base": {f"text_model.encoder.layers.{n}.fc1.weight": torch.zeros(2) for n in range(12)}}, "te.ckpt")
    with pytest.raises(SpecError, match="12 of 12 weights in te.ckpt are not in this model: 'text_model"):
        rewritten("merge: {g: {type: unet, part: [{path: p.ckpt, alpha: 1}, {path: te.ckpt, alpha: 1}]}}")
    torch.save({"base": {"conv_in.weight": torch.zeros(3, 3)}}, "te.ckpt")
    with pytest.raises(SpecError, match=r"'conv_in.weight' is \[3, 3\] in te.ckpt"):
        rewritten("merge: {g: {type: unet, part: [{path: te.ckpt, alpha: 1}]}}")


def test_layers_are_chosen_by_whole_names():
    names = ["layers.1.fc", "layers.10.fc", "head"]
    assert select_names(names, ["layers.1"], "a") == ["layers.1.fc"]  # HCP-Diffusion takes the beginning of a name: both
    assert select_names(names, [r"re:layers\.\d$", "head"], "a") == ["layers.1.fc", "head"]
    assert select_names(names, ["re:"], "a") == select_names(names, "all", "a") == names
    with pytest.raises(SpecError, match="'layers.2' is not a layer that a has weights of .did you mean"):
        select_names(names, ["layers.2"], "a")


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "missing key 'file'"),
        ({"file": "no.ckpt"}, "no such file.*relative to the working folder"),
        ({"file": "a.ckpt", "alhpa": 1}, "unknown key 'alhpa' .did you mean 'alpha'"),
        ({"file": "a.ckpt", "alpha": float("nan")}, "must be a number"),
        ({"file": "a.ckpt", "ema": True}, "has none of the sections 'base_ema', 'lora_ema'"),
        ({"file": "a.ckpt", "layers": ["up_blocks"]}, "is not a layer that a.ckpt has weights of"),
        ({"file": "text.ckpt"}, "cannot be read"),
        ({"file": "kohya.pt"}, "an adapter file of kohya's scripts"),
        ({"file": "half.ckpt"}, "lacks the up half of"),
        ({"file": "two.ckpt"}, "has its down.weight twice, under the names of two versions"),
        ({"file": "loha.ckpt"}, "is a LoHa of HCP-Diffusion"),
        ({"file": "nan.ckpt"}, "not finite"),
    ],
)
def test_a_pass_that_cannot_be_read(model, given, message):
    lora_file("a.ckpt", model)
    Path("text.ckpt").write_text("hello")
    torch.save({"lora_unet_mid.lora_down.weight": torch.zeros(1)}, "kohya.pt")
    torch.save({"lora": {"mid.___.layer.W_down": torch.zeros(2, 2)}}, "half.ckpt")
    two = {"mid.___.layer.W_down": torch.zeros(2, 2), "mid.lora_block.layer.lora_down.weight": torch.zeros(2, 2)}
    torch.save({"lora": two}, "two.ckpt")
    torch.save({"lora": {"mid.___.layer.W_down": torch.zeros(2, 2, 2)}}, "loha.ckpt")
    torch.save({"lora": {"mid.___.layer.W_down": torch.full((2, 2), torch.nan)}}, "nan.ckpt")
    with pytest.raises(SpecError, match=f"(?s){message}"):
        fxplug.load_pass("hcp/checkpoint", **given)


def test_layers_of_several_versions_in_one_file_are_read(model):
    new = lora_file("new.ckpt", model, [LINEAR])
    lora_file("a.ckpt", model, [CONV], old=True, **new)
    p = fxplug.load_pass("hcp/checkpoint", file="a.ckpt")
    assert set(p.rules[0].match.path) == {LINEAR, CONV}


@pytest.mark.slow
def test_a_checkpoint_as_a_configuration_is_as_strong_as_it_was_trained(model):
    a = lora_file("a.ckpt", model)
    base = base_file("part.ckpt", model)
    torch.save({"base": base, "lora": a}, "both.ckpt")
    Path("out.yaml").write_text(convert_checkpoint("both.ckpt", model="base.yaml", out="out.yaml").text)
    args = call()
    with torch.no_grad():
        found = fxplug.rewrite("out.yaml").module(*args, return_dict=False)[0]
        expected = merged_by_formula(model, [(base, 0.0, 1.0)], [(a, 7.0)])(*args, return_dict=False)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.save({"plugin": {"mid.___.w": torch.zeros(1)}}, "plugin.ckpt")
    with pytest.raises(SpecError, match="weights of plugins: give the saved rewrite.*--into"):
        convert_checkpoint("plugin.ckpt")
    with pytest.raises(ArtifactError, match="no such file"):
        convert_checkpoint("nothing.ckpt")
