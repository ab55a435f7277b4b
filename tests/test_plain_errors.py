"""Errors of other libraries, and of work that comes too late, are said in words before or instead."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fxplug
from fxplug.config.models.example_inputs import make_inputs
from fxplug.config.run_config import load_config
from fxplug.core.artifacts.artifact import check_savable
from fxplug.core.errors import ArtifactError, MatchError, SpecError


@pytest.mark.parametrize("spec", [
    "[100000000000000000000]", "[1000000000000000000, 1000]", "{shape: [2], dtype: int64, high: 100000000000000000000}",
    "{shape: [2], dtype: int8, fill: 100000000000000000000}",
])  # fmt: skip
def test_inputs_that_torch_cannot_make(tmp_path, spec):
    file = tmp_path / "c.yaml"
    file.write_text(f"model: torch.nn:Identity\ninputs:\n  input: {spec}\npasses: []\n")
    with pytest.raises(SpecError, match=r"c.yaml:3.*inputs.input: this input cannot be made"):
        make_inputs(load_config(file), nn.Identity())


def test_all_linear_without_a_linear():
    gm = fxplug.trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), (torch.randn(1, 3, 4, 4),))
    with pytest.raises(
        MatchError, match="the model calls no Linear that 'all-linear' could mean; the classes here are Conv2d, ReLU"
    ):
        fxplug.apply(gm, fxplug.load_pass("lora", at="all-linear"))


def test_a_model_without_layers_has_no_classes_to_list():
    class Plain(nn.Module):
        def forward(self, x):
            return x * 2

    gm = fxplug.trace(Plain(), (torch.randn(2),))
    with pytest.raises(MatchError, match="the classes here are none"):
        fxplug.apply(gm, fxplug.load_pass("lora", at="all-linear"))


@pytest.mark.parametrize("name", ["a b", "a'b", "a[0]", "*", "класс"])
def test_a_name_that_a_file_cannot_have_is_told_by_trace_and_refused_by_verify_and_save_alike(name, tmp_path):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="cannot be in an artifact; the graph runs, but cannot be saved: rename it"):
        gm = fxplug.trace(model, (torch.randn(2, 4),))
    for refuse in (check_savable, lambda module: fxplug.save(module, tmp_path / "module")):
        with pytest.raises(ArtifactError, match="is not a valid module path: .* must be letters, digits and any of"):
            refuse(gm)
    assert not (tmp_path / "module").exists()


def test_a_rewrite_that_is_not_saved_says_so_before_the_work(tmp_path):
    from fxplug.__main__ import app

    (tmp_path / "c.yaml").write_text("model: torch.nn:Identity\ninputs: {other: [1]}\npasses: []\n")
    done = CliRunner().invoke(app, ["rewrite", str(tmp_path / "c.yaml")])
    lines = done.stderr.splitlines()
    assert (
        done.exit_code == 1
        and lines[0] == "nothing will be saved: --out DIR saves the result"
        and "takes no input" in lines[-1]
    )


def test_a_shell_is_offered_passes_and_configurations(tmp_path):
    """And torch is not imported for it."""
    (tmp_path / "vit_mine.yaml").touch()
    (tmp_path / "notes.txt").touch()
    code = "import sys; from fxplug.config.cli.verbs import complete_config as c, complete_pass as p; "
    code += "print(p('lora'), c('vit_'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "'lora', 'lora_weight'" in done.stdout and done.stdout.endswith("False\n"), done.stdout
    assert "'vit_lora'" in done.stdout and "'vit_mine.yaml'" in done.stdout and "notes" not in done.stdout
