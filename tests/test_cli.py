"""The command line: what each verb prints, what goes to stderr, and the exit codes."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import runs
import torch
import yaml
from safetensors.torch import save_file
from sweeps import sweep
from torch import nn
from typer.testing import CliRunner

import fxplug
from fxplug.__main__ import app
from fxplug.config.flow import read_saved_config
from fxplug.core.spec.pass_file import list_shipped
from fxplug.exports.export_section import Export
from fxplug.exports.exporter import FORMATS, FREE


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 4)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


class Broken(Net):
    def forward(self, x):
        return self.two(x[:, :3])


class Wide(nn.Module):
    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, y):
        return torch.cat([y, y], -1)


class NoAt(nn.Module):
    pass


CONFIG = """\
model: test_cli:Net
inputs: {x: [2, 8]}
passes:
  - lora: {rank: 2}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)


def run(*args, code=0):
    result = CliRunner().invoke(app, list(args), prog_name="fxplug")
    assert result.exit_code == code, result.output
    if code:
        assert result.stdout == ""
    return result.stderr if code else result.stdout


def refused(*args):
    """The one message of a user's error; nothing was written."""
    before = {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()}
    text = run(*args, code=1)
    assert {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()} == before
    assert "Traceback" not in text and text.endswith("\n")
    return text


# --- verbs


class Logs:
    """A plugin that says something at each step."""

    def on_step_end(self, global_step):
        logging.getLogger(__name__).info("step %d of mine", global_step)
        logging.info("plainly %d", global_step)


@pytest.mark.slow
def test_train_shows_what_the_users_files_log(monkeypatch):
    monkeypatch.setitem(sys.modules, "test_cli", sys.modules[__name__])
    Path("t.yaml").write_text(yaml.safe_dump(runs.config(train__steps=2, train__plugins=["test_cli:Logs"])))
    before = logging.getLogger().level, list(logging.getLogger().handlers)
    result = CliRunner().invoke(app, ["train", "t.yaml", "--out", "run", "--quiet"], prog_name="fxplug")
    assert result.exit_code == 0, result.output
    told = [f"INFO {name}: {text} {step}" for step in (0, 1) for name, text in (("test_cli", "step"), ("root", "plainly"))]
    assert [line for line in result.stderr.replace(" of mine", "").splitlines() if line.startswith("INFO")] == told
    assert (logging.getLogger().level, logging.getLogger().handlers) == before


def test_rewrite():
    text = run("rewrite", "c.yaml", "--out", "out")
    lines = text.splitlines()
    assert lines[0] == "lora: 2 sites" and lines[-1] == "saved in out"
    assert any(line.startswith("ok      neutral     outputs are torch.equal (lora)") for line in lines)
    assert lines[-2] == "164 parameters: base 108, lora +56 (51.85%)"
    assert fxplug.load("out").meta["passes"][0]["params"]["rank"] == 2


def test_rewrite_without_a_folder_says_so():
    assert run("rewrite", "c.yaml", "--no-verify").splitlines()[-2:] == [
        "not verified", "not saved: --out DIR saves it"
    ]  # fmt: skip
    assert [p.name for p in Path().iterdir()] == ["c.yaml"]


def test_rewrite_changes_values_first():
    run("rewrite", "c.yaml", "--out", "out", "--no-verify", "--set", "passes.0.lora.rank=3", "--set", "seed=4")
    assert fxplug.load("out").get_submodule("lora.one.Lora").rank == 3
    assert "seed: 4" in Path("out/config.yaml").read_text()


def test_dry_run_writes_nothing():
    text = run("rewrite", "c.yaml", "--out", "out", "--dry-run")
    assert [p.name for p in Path().iterdir()] == ["c.yaml"]
    assert text == run("sites", "c.yaml") + "dry run: nothing written\n"
    assert text == (
        "lora: 2 sites, 56 parameters\n"
        "  one  Linear  [2, 8] -> [2, 8]  Lora +32\n"
        "  two  Linear  [2, 8] -> [2, 4]  Lora +24\n"
        "164 parameters: base 108, lora +56 (51.85%)\n"
        "dry run: nothing written\n"
    )


def test_sites_with_a_value_set():
    assert "lora: 1 site, 24 parameters" in run("sites", "c.yaml", "--set", "passes.0.lora.at=two")


def test_diff_of_a_configuration_and_of_what_it_saved():
    text = run("diff", "c.yaml")
    assert "+lora_one_Lora = lora.one.Lora(x, one)" in text.splitlines()
    run("rewrite", "c.yaml", "--out", "out", "--no-verify")
    assert run("diff", "out") == text


def test_show():
    graph = run("show", "c.yaml")
    assert graph.splitlines()[0] == "input x" and "lora_two_Lora = lora.two.Lora(relu, two)" in graph
    assert "lora.two.Lora.up  Linear  8" in run("show", "c.yaml", "--modules")
    assert run("show", "c.yaml", "--code").startswith("def forward(self, x):")
    run("rewrite", "c.yaml", "--out", "out", "--no-verify")
    assert run("show", "out") == graph


def test_passes():
    text = run("passes")
    assert [line.split()[0] for line in text.splitlines()] == list(list_shipped("passes"))
    text = run("passes", "replace")
    assert text.splitlines()[0].startswith("Another module") and re.search(r"  with +required +a class of torch.nn", text)
    Path("mine.yaml").write_text("params: {at: a}\nrules: [{match: {path: $at}, use: 'a:B'}]")
    assert re.match(r'mine\n  at +"a" +which layers: ', run("passes", "mine.yaml"))


def test_schema():
    assert json.loads(run("schema"))["required"] == ["model"]


@pytest.mark.slow
def test_export():
    run("rewrite", "c.yaml", "--out", "out", "--no-verify")
    assert run("export", "out", "--to", "pt2").splitlines()[-1] == "saved in out.pt2"
    run("export", "out", "--out", "other.pt2")
    x = torch.randn(5, 8)
    exported = torch.export.load("other.pt2").module()
    assert torch.equal(exported(x=x), fxplug.load("out")(x))


@pytest.mark.slow
def test_export_to_onnx():
    run("rewrite", "c.yaml", "--out", "out", "--no-verify")
    lines = run("export", "out", "--to", "onnx", "--opset", "18").splitlines()
    assert lines[-1] == "saved in out.onnx" and re.search("onnxruntime .* differs from the module by .* at most", lines[-2])
    model, x = fxplug.load_onnx("out.onnx"), torch.randn(3, 8)
    torch.testing.assert_close(model(x=x), fxplug.load("out")(x).detach(), rtol=1e-5, atol=1e-5)
    assert model.manifest["opset"] == 18
    assert "not 99" in refused("export", "out", "--to", "onnx", "--opset", "99")
    assert "--opset is for onnx, and this is an export to pt2" in refused("export", "out", "--opset", "18")


@pytest.mark.slow
def test_export_as_the_configuration_says():
    Path("c.yaml").write_text(CONFIG + "export: {free: batch}")
    run("rewrite", "c.yaml", "--out", "out", "--no-verify")
    assert run("export", "out").splitlines()[0] == "x: dimensions 0 are free"
    assert run("export", "out", "--free", "none").splitlines()[0] == "x: of fixed size"
    run("rewrite", "c.yaml", "--out", "cuda", "--no-verify", "--set", "export.device=nowhere")
    assert "nowhere" in refused("export", "cuda")
    run("export", "cuda", "--device", "cpu")


def test_an_older_section_export_does_not_stand_in_the_way():
    """It held anything once, and its artifacts are exported still."""
    run("rewrite", "c.yaml", "--out", "out", "--no-verify")
    old = fxplug.load("out")
    for section, finding in ({"opset": 17}, None), ({"to": 3}, "config.yaml: export.to: must be one of pt2, aoti, onnx, not 3"):
        fxplug.save(old, "old", config={**read_saved_config("out"), "export": section})
        if finding:
            assert finding in refused("export", "old")
        run("export", "old", "--to", "pt2")


def test_the_section_export_has_what_export_has():
    for key, known in ("to", FORMATS), ("free", FREE):
        assert list(get_args(Export.model_fields[key].annotation)) == list(known)
        assert Export.model_fields[key].default == inspect.signature(fxplug.exports.exporter.export).parameters[key].default


# --- errors


@pytest.mark.parametrize(
    "text, expected",
    [
        ("model: test_cli:Net\npases: x", "c.yaml:2: unknown key 'pases' (did you mean 'passes'?)"),
        ("model: a\nmodel: b", "c.yaml:2: not valid YAML|given twice"),
        ("model: test_cli:Net\nseed: x", "c.yaml:2: seed: must be a whole number, not 'x'"),
        ("model: test_cli:Net\npasses: [nothere.yaml]", "nothere.yaml: no such file"),
        ("model: test_cli:Net\nweights: nothere.pth", "c.yaml:2: weights: 'nothere.pth': no such file"),
        ("model: !!python/object:os.system x", "c.yaml:1: tag"),
        ("model: test_cli:Neet", "(did you mean 'Net'?)"),
        ("model: resnet10x", "timm has no model 'resnet10x' (did you mean 'resnet10t'?)"),
        ("model: test_cli:Net", "c.yaml:1: inputs: Net needs example inputs: a shape for each tensor"),
        (CONFIG + "      at: nowhere", "not valid YAML"),
        (CONFIG.replace("rank: 2", "at: nowhere"), "given at c.yaml:4"),
        (CONFIG.replace("rank: 2", "at: 're:('"), "is not a regular expression"),
        (CONFIG.replace("rank: 2", "rank: -1"), "rank must be a whole number, 1 or more, not -1"),
        (CONFIG.replace("lora: {rank: 2}", "skip: {from: two, to: one}"), "backward"),
        (CONFIG.replace("lora: {rank: 2}", "own.yaml: {block: Wide}"), "own.yaml:3: "),
        (CONFIG.replace("lora: {rank: 2}", "own.yaml: {block: NoAt}"), "has no classmethod 'at"),
        (CONFIG.replace("Net", "Broken"), "(--debug shows where)"),
        (CONFIG.replace("8]", "7]"), "(--debug shows where)"),
    ],
)  # fmt: skip
def test_what_a_configuration_gets_wrong(text, expected):
    Path("c.yaml").write_text(text)
    Path("own.yaml").write_text("params: {block: $required}\nrules:\n- {match: {path: one}, use: 'test_cli:$block', args: [y]}")
    message = refused("rewrite", "c.yaml", "--out", "out")
    assert any(part in message for part in expected.split("|")), message


@pytest.mark.parametrize(
    "args, expected",
    [
        (["rewrite", "nothere.yaml"], "nothere.yaml: no such file"),
        (["rewrite", "quickstrat"], "no config named 'quickstrat' (did you mean 'quickstart'?)"),
        (["sites", "c.yaml", "--set", "passes.0.lroa.rank=2"], "no such key"),
        (["passes", "lroa"], "no pass named 'lroa' (did you mean 'lora'?)"),
        (["export", "nothere"], "no folder 'nothere'"),
        (["show", "."], "manifest.json"),
        (["diff", "."], "manifest.json"),
        (["rewrite", "c.yaml", "--out", "c.yaml"], "c.yaml is not a folder"),
    ],
)
def test_what_a_call_gets_wrong(args, expected):
    assert expected in refused(*args)


def test_an_artifact_that_was_changed_is_refused():
    run("rewrite", "c.yaml", "--out", "out", "--no-verify")
    Path("out/graph.txt").write_text("other")
    assert "graph.txt" in refused("show", "out")


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["rewrit"],
        ["rewrite"],
        ["rewrite", "c.yaml", "--ot", "out"],
        ["show", "c.yaml", "--code", "--modules"],
    ],
)
def test_a_wrong_call_is_exit_code_2(args):
    result = CliRunner().invoke(app, args, prog_name="fxplug")
    assert result.exit_code == 2


def test_set_is_no_option_of_a_saved_rewrite():
    run("rewrite", "c.yaml", "--out", "out", "--no-verify")
    assert "--set changes a configuration" in run("show", "out", "--set", "seed=1", code=2)


@pytest.mark.parametrize("args", [["rewrite", "nothere.yaml", "--debug"], ["--debug", "rewrite", "nothere.yaml"]])
def test_debug_shows_the_traceback(args):
    text = run(*args, code=1)
    assert text.startswith("Traceback") and text.endswith("SpecError: nothere.yaml: no such file\n")


# --- the process


def process(*args):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "importtime", "-m", "fxplug", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env)


@sweep("args", [["--help"], ["rewrite", "--help"], ["passes"], ["passes", "lora"], ["schema"], ["--version"]], 0, 2)
def test_quick_verbs_do_not_import_torch(args):
    done = process(*args)
    assert done.returncode == 0 and done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported and "torch" not in imported


def test_a_configuration_with_a_mistake_is_told_before_torch_is_imported():
    Path("c.yaml").write_text("modle: x")
    done = process("rewrite", "c.yaml")
    assert done.returncode == 1 and done.stdout == ""
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pydantic" in imported and "torch" not in imported


def test_progress_goes_to_stderr_when_something_takes_longer_than_a_second(capsys, monkeypatch):
    from fxplug.config.cli import verbs as cli

    monkeypatch.setattr(cli, "PATIENCE", 60)
    with cli.show_progress("quick"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(cli, "PATIENCE", 0)
    text = ""
    with cli.show_progress("slow"):
        while not text:
            text = capsys.readouterr().err
    shown = capsys.readouterr()
    assert shown.out == "" and re.fullmatch(r"slow \.\.\. [\d.]+ s\n", text + shown.err)


@pytest.mark.slow
def test_adapters_of_a_saved_rewrite():
    Path("c.yaml").write_text(CONFIG.replace("{rank: 2}", "{rank: 2, slots: 2}"))
    run("rewrite", "c.yaml", "--out", "out")
    state = {"one.lora_A.weight": torch.ones(1, 8), "one.lora_B.weight": torch.ones(8, 1)}
    save_file(state, "ink.safetensors")
    save_file({**state, "tow.lora_A.weight": torch.ones(1, 8), "tow.lora_B.weight": torch.ones(8, 1)}, "odd.safetensors")
    assert run("adapters", "load", "out", "ink", "ink.safetensors") == "ink: 1 layers\n"
    text = refused("adapters", "load", "out", "odd", "odd.safetensors")
    assert "1 of 2 layers are not in the graph: 'tow' (did you mean 'two'?)" in text
    text = run("adapters", "load", "out", "odd", "odd.safetensors", "--partial")
    assert text == "odd: 1 layers\nleft out: 1 layers that the model does not have\n"
    assert run("adapters", "use", "out", "ink=0.5", "odd") == "in use: ink=0.5 odd\n"
    assert run("adapters", "list", "out") == "ink  0.5\nodd  1\n2 of 2 slots are in use\n"
    run("adapters", "use", "out", "ink", "-", "ink=2", "--by-sample")
    assert run("adapters", "list", "out").startswith("ink  1, 0, 2 by sample\nodd  0 by sample\n")
    assert fxplug.load("out").adapters.active == [{"ink": 1.0}, {}, {"ink": 2.0}]
    assert Path("out/config.yaml").is_file()
    assert run("adapters", "unload", "out", "ink") == "ink is unloaded\n"
    text = refused("adapters", "use", "out", "ink")
    assert "no adapter 'ink'" in text and "there are odd" in text
    assert "such as odd=0.8" in refused("adapters", "use", "out", "odd=much")
    Path("d.yaml").write_text(CONFIG)
    run("rewrite", "d.yaml", "--out", "plain", "--no-verify")
    assert "no pass here has slots" in refused("adapters", "list", "plain")


def test_the_forms_of_a_lowered_model():
    Path("c.yaml").write_text(CONFIG.replace("{rank: 2}", "{rank: 2, slots: 2}"))
    text = run("show", "c.yaml", "--forms", "--merge", "live")
    assert "one" in text and "live" in text
    assert "did you mean 'live'" in refused("show", "c.yaml", "--forms", "--merge", "lvie")


def test_the_forms_of_a_model_are_measured():
    text = run("tune", "c.yaml", "--turns", "3")
    assert "2 rows, 8 -> 8, rank 2" in text and "<- taken" in text
    run("rewrite", "c.yaml", "--out", "out", "--no-verify")
    assert run("tune", "out", "--turns", "3").count("rank 2") == 2
