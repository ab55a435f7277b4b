"""ZhiJian's lines in use: add-ins made for each place, trained, saved, read from a configuration, in the example."""

from __future__ import annotations

import copy
import functools
import json
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import small
import torch
from test_blitz import EXAMPLES, LINE, Own, mlp_addin, narrow_mlp, quiet
from test_blitz_lists import PROMPTS
from torch import nn
from zhijian.manual import LINES, MLPAddin

import fxplug
from fxplug.config.schema import make_schema
from fxplug.core.errors import FxplugError, SpecError


@pytest.fixture(scope="module")
def net():
    return narrow_mlp()


@pytest.mark.parametrize(
    "addin",
    [Own, functools.partial(Own, start=3), {"use": "test_blitz:Own", "options": {"start": 3, "config": {"a": {"b": 1}}}}],
)
def test_what_makes_an_add_in_makes_one_for_each_place(net, addin):
    _, gm, image = net
    new = fxplug.apply(gm, fxplug.blitz("(Own.adapt): (fc1){inout1}->(fc2){inout2}", addin))
    start = 0.5 if addin is Own else 3.0
    gains = {name: p for name, p in new.named_parameters() if name.startswith("blitz.")}
    assert list(gains) == [f"blitz.fc{n}.Addin.addin.gain" for n in (1, 2)]
    assert all(p.item() == start for p in gains.values())
    make = functools.partial(MLPAddin, SimpleNamespace(mlp_addin_output_size=None), SimpleNamespace(hidden_size=256))
    made = fxplug.apply(gm, fxplug.blitz("(MLPAddin.adapt_output): (fc1){inout1}->(fc2){inout2}", make))
    assert not torch.equal(*(made.get_parameter(f"blitz.fc{n}.Addin.addin.fc1.weight") for n in (1, 2)))


def test_what_cannot_make_an_add_in_is_refused(net):
    for addin, finding in (
        ({"use": "test_blitz:Own", "options": {"gain": 1}}, "Own cannot be built with the options gain"),
        ({"use": "test_blitz:Onw"}, "did you mean 'Own'?"),
    ):
        name = addin["use"].rpartition(":")[2]
        with pytest.raises(FxplugError) as error:
            fxplug.apply(net[1], fxplug.blitz(f"({name}.adapt): (fc1){{inout1}}", addin))
        assert finding in str(error.value)


@pytest.mark.slow
def test_training_moves_the_add_in_only_and_a_saved_one_needs_no_class(net, tmp_path):
    model, gm, image = net
    before = {key: value.clone() for key, value in model.state_dict().items()}
    new = copy.deepcopy(fxplug.apply(gm, quiet(LINES[5], mlp_addin(), lr=1e-2)))  # the model is other tests' as well
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(name.startswith("blitz."))
    optimizer = torch.optim.Adam([p for p in new.parameters() if p.requires_grad], lr=1e-2)
    target = torch.arange(5)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(new(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    fxplug.save(new, tmp_path / "saved")
    torch.save((image, new(image).detach()), tmp_path / "expected.pt")
    program = f"""
import sys, torch, fxplug
gm = fxplug.load({str(tmp_path / "saved")!r})
image, expected = torch.load({str(tmp_path / "expected.pt")!r}, weights_only=True)
assert "zhijian" not in sys.modules and "fxplug.compat.zhijian" not in sys.modules, "a class of the add-in was imported"
print(torch.equal(gm(image), expected))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert run.stdout == "True\n", run.stderr


def test_a_rewritten_model_is_one_graph(net):
    _, gm, image = net
    new = fxplug.apply(gm, quiet(LINES[3], mlp_addin()))
    compiled = torch.compile(new, fullgraph=True, backend="eager")
    assert torch.equal(compiled(image), new(image))


CONFIG = {
    "model": {"timm": "vit_tiny_patch16_224", "options": {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}},
    "inputs": {"x": [2, 3, 32, 32]},
}


def configured(entry):
    return {**CONFIG, "passes": [{"blitz": entry}]}


@pytest.mark.slow
def test_a_configuration_names_lines_and_add_ins():
    entry = {
        "line": [
            "(LoRA.adapt): ...->(blocks[0:2].attn.qkv){inout1}->...",
            "(MLPAddin.adapt_output): ...->(blocks[i].mlp){inout1}",
        ],
        "addin": {
            "LoRA": "test_blitz_graphs:LoRA",
            "MLPAddin": {
                "use": "zhijian.manual:MLPAddin",
                "options": {"config": {"mlp_addin_output_size": None}, "model_config": {"hidden_size": 48}},
            },
        },
        "name": "mine",
        "lr": 1e-3,
        "weight_decay": 0.1,
        "train": False,
    }
    result = fxplug.rewrite(json.loads(json.dumps(configured(entry))))
    (p,) = result.config.passes
    assert (p.name, p.lr, p.weight_decay, p.train) == ("mine", 1e-3, 0.1, False)
    assert [len(sites) for sites in result.sites.values()] == [4]
    names = {name.rpartition(".addin.")[0] for name, _ in result.module.named_parameters() if name.startswith("mine.")}
    assert names == {f"mine.blocks.{n}.{m}.Addin" for n in (0, 1) for m in ("attn.qkv", "mlp")}
    assert result.report.ok


def test_a_configuration_runs_dry_from_the_command_line_and_is_saved(tmp_path):
    file = tmp_path / "run.yaml"
    entry = {"line": "(Own.adapt): ...->(blocks[i].mlp){inout1}->...", "addin": "test_blitz:Own"}
    file.write_text(json.dumps(configured(entry)))
    ran = small.command("sites", file)
    assert ran.exit_code == 0 and "blitz: 2 sites" in ran.output and "blocks.{0,1}.mlp" in ran.output
    result = fxplug.rewrite(file, out=tmp_path / "out", set=["passes.0.blitz.lr=0.5"], verify=False)
    saved = fxplug.load_config(tmp_path / "out" / "config.yaml")
    assert saved.passes[0].lr == 0.5 and saved.passes[0].rules == result.config.passes[0].rules
    again, image = fxplug.load(tmp_path / "out"), torch.randn(2, 3, 32, 32)
    assert torch.equal(again(image), result.module(image))


@pytest.mark.slow
def test_a_configuration_has_entries_as_lines(tmp_path):
    model = {"timm": "vit_tiny_patch16_224", "options": {"img_size": 32, "depth": 3, "embed_dim": 24, "num_heads": 2}}
    blitz = {"line": [PROMPTS, "(Fits.adapt): (blocks[0].mlp){inout1}"]}
    blitz["addin"] = {"Prompts": "test_blitz_lists:Prompts", "Fits": "test_blitz_lists:Fits"}
    config = {"model": model, "inputs": {"x": [2, 3, 32, 32]}, "passes": [{"blitz": blitz}]}
    result = fxplug.rewrite(config, out=tmp_path / "out")
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(fxplug.load(tmp_path / "out")(image), result.module(image))


def test_the_schema_knows_lines():
    made = make_schema()["properties"]["passes"]["items"]["anyOf"][1]["properties"]["blitz"]
    assert list(made["properties"]) == ["line", "addin", "name", "lr", "weight_decay", "train", "expect"]
    assert made["required"] == ["line", "addin"] and made["additionalProperties"] is False


@pytest.mark.parametrize(
    ("entry", "finding"),
    [
        ("(Own.adapt): (head){inout1}", "passes[0].blitz: must be a mapping with 'line' and 'addin'"),
        ({"line": LINE}, "passes[0].blitz: missing key 'addin'"),
        ({"line": LINE, "addin": "a:Own", "lnie": 1}, "unknown key 'lnie' (did you mean 'line'?)"),
        ({"line": 3, "addin": "a:Own"}, "passes[0].blitz.line: must be a line or a list of lines, not 3"),
        ({"line": LINE, "addin": "a.Own"}, "passes[0].blitz.addin.use: must look like"),
        ({"line": LINE, "addin": "a:Own", "lr": -1}, "passes[0].blitz.lr: must be a number"),
        ({"line": "(Own.adapt): (head){inout}", "addin": "a:Own"}, "passes[0].blitz.line: a point must be '{inout1}'"),
    ],
)
def test_a_configuration_that_is_wrong_says_where(entry, finding):
    with pytest.raises(SpecError) as error:
        fxplug.load_config(configured(entry))
    assert finding in str(error.value)


@pytest.mark.slow
def test_the_example_runs(capsys):
    pytest.importorskip("skimage")
    runpy.run_path(str(EXAMPLES / "zhijian_mlp.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("(MLPAddin")] == LINES
    assert text.count("(with a warning)") == 3 and "base weights untouched: True" in text
