"""`--json`: one value on stdout, and an error as one object on stderr, whatever else a verb or a model prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import fxplug
from fxplug.__main__ import app
from fxplug.config.cli import doctor
from fxplug.config.cli.json_output import describe_error, print_json
from fxplug.core.errors import SpecError
from fxplug.core.spec.pass_file import list_recipes, list_shipped


class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        print("a model that prints")
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


class Failing(Loud):
    def forward(self, x):
        raise OSError(5, "the disk is gone", "weights.bin")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"model": "test_json_output:Loud", "inputs": {"x": [2, 8]}, "passes": [{"lora": {"rank": 2}}]}
    Path("c.yaml").write_text(yaml.safe_dump(config))


def called(*args, code=0):
    done = CliRunner().invoke(app, [*args, "--json"], prog_name="fxplug")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if done.stdout or not code else None, done.stderr


def failed(*args, code=1):
    """The object of an error; nothing is on stdout, and nothing else on stderr."""
    value, said = called(*args, code=code)
    assert value is None and "\x1b" not in said
    return json.loads(said)


@pytest.mark.slow
def test_sites():
    found, said = called("sites", "c.yaml")
    (model,) = found["models"]
    (entry,) = model.pop("passes")
    assert model == {"part": "", "model": "Loud", "parameters": 164, "base_parameters": 108}
    assert [site["where"] for site in entry["sites"]] == ["one", "two"] and entry["parameters"] == 56
    assert entry["sites"][1] == {
        "where": "two", "path": "two", "class": "Linear", "caught": {}, "input": [2, 8], "output": [2, 4],
        "block": "lora.two.Lora", "parameters": 24,
    }  # fmt: skip
    assert "a model that prints" in said  # and not between the JSON


def test_passes_and_recipes():
    listed = called("passes")[0]["passes"]
    assert [one["name"] for one in listed] == list(list_shipped("passes")) and all(one["about"] for one in listed)
    rank = next(one for one in called("passes", "lora")[0]["parameters"] if one["name"] == "rank")
    assert rank == {"name": "rank", "required": False, "default": 8, "about": "the rank of the update"}
    assert [one["name"] for one in called("recipes")[0]["recipes"]] == list(list_recipes())
    one = called("recipes", "sd15")[0]
    assert one["config"] == yaml.safe_load(Path(one["file"]).read_text()) and "Stable Diffusion 1.5" in one["about"]


def test_doctor(monkeypatch):
    monkeypatch.setattr(doctor, "_import_fault", lambda module: None)
    found = called("doctor")[0]
    assert found["fxplug"] == fxplug.__version__ and found["devices"][0]["device"] == "cpu"
    assert {"library", "found", "tested", "used for"} == set(found["libraries"][0])
    monkeypatch.setattr(doctor, "find_version", lambda name: None if name == "timm" else "9")
    found, said = called("doctor", code=1)
    assert found["libraries"][2]["found"] == "missing"
    assert json.loads(said)["message"] == "timm missing, which fxplug requires: pip install fxplug"


def test_adapters(capsys):
    gm = fxplug.trace(Loud().eval(), torch.ones(2, 8))
    new = fxplug.apply(gm, fxplug.load_pass("lora", rank=2, slots=3))
    file = {f"one.lora_{half}.weight": torch.ones(shape) for half, shape in (("A", (2, 8)), ("B", (8, 2)))}
    save_file(file, "ink.safetensors")
    save_file({key.replace("one", "transformer.blocks.0.three"): value for key, value in file.items()}, "other.safetensors")
    new.adapters.load("ink", file)
    new.adapters.use({"ink": 0.5})
    fxplug.save(new, "saved")
    assert called("adapters", "list", "saved")[0] == {
        "slots": 3, "by_sample": False, "adapters": [{"name": "ink", "weights": [0.5]}]
    }  # fmt: skip
    alone = called("adapters", "inspect", "ink.safetensors")[0]
    assert alone["model"] is None and alone["ranks"] == {"2": 1} and alone["layers"] == ["one"]
    found = called("adapters", "inspect", "ink.safetensors", "c.yaml")[0]["model"]
    assert found["fits"] == ["one"] and found["layers"] == 2 and found["passes"] == [{"name": "lora", "rank": 2, "at": ["one"]}]

    found, said = called("adapters", "inspect", "other.safetensors", "c.yaml", code=1)
    assert found["model"]["fits"] == [] and "nothing of other.safetensors fits c.yaml" in json.loads(said)["message"]
    plain = CliRunner().invoke(app, ["adapters", "inspect", "other.safetensors", "c.yaml"], prog_name="fxplug")
    assert plain.exit_code == 1 and "fits        " in plain.stdout


@pytest.mark.parametrize(
    ("args", "code", "holds"),
    [
        (("sites", "c.yml"), 1, {"error": "SpecError", "where": "c.yml", "nearest": "c.yaml"}),
        (("sites", "c.yaml", "--set", "passes.0.lora.rnk=1"), 1, {"key": "rnk", "nearest": "rank"}),
        (("sites", "c.yaml", "--set", "model=test_json_output:Failing"), 1, {"where": "weights.bin"}),
        (("passes", "lorra"), 1, {"error": "SpecError", "nearest": "lora"}),
        (("recipes", "sdx"), 1, {"nearest": "sdxl"}),
        (("adapters", "list", "nowhere"), 1, {"error": "SpecError"}),
        (("adapters", "inspect", "nowhere"), 1, {"error": "ArtifactError"}),
        (("passes", "--page"), 2, {"do": "fxplug passes --help"}),
        (("sites",), 2, {"error": "MissingParameter", "do": "fxplug sites --help"}),
        (("sites", "c.yaml", "--se"), 2, {"where": "--se", "nearest": "--set"}),
        (("adapters", "lst"), 2, {"nearest": "list"}),
        (("stes", "c.yaml"), 2, {"error": "UsageError", "do": "fxplug --help"}),
    ],
)
def test_an_error_is_one_object(args, code, holds):
    error = failed(*args, code=code)
    assert {key: error.get(key) for key in holds} == holds and error["message"]
    assert set(error) <= {"error", "message", "where", "key", "found", "nearest", "do", "notes", "log", "traceback"}
    if args[0] == "sites" and "Failing" in args[-1]:
        assert error["log"][0] == "a model that prints"
        assert "Traceback" in failed(*args, "--debug")["traceback"]


def test_odd_values_are_json(capsys):
    print_json({"a": float("nan"), 1: (torch.float32, {2}), "\x1b": [True, None, -float("inf")]})
    said = capsys.readouterr().out
    assert json.loads(said, parse_constant=pytest.fail) == {
        "a": "nan", "1": ["torch.float32", [2]], "\x1b": [True, None, "-inf"]
    }  # fmt: skip
    assert "\x1b" not in said
    error = SpecError("no 'x'", path=("rules", 0), where="p.yaml:3")
    error.add_note("\x1b[31mred")
    assert describe_error(error) == {
        "error": "SpecError", "message": "p.yaml:3: rules[0]: no 'x'", "where": "p.yaml:3: rules[0]", "found": "no 'x'",
        "notes": ["\\x1b[31mred"],
    }  # fmt: skip


def test_code_that_exits_is_an_error():
    Path("leaving.py").write_text("raise SystemExit(0)\n")
    Path("leaving.yaml").write_text("{model: 'leaving:model'}")
    assert failed("sites", "leaving.yaml")["message"].endswith("leaving.py:1 called sys.exit(0): remove that call")
