"""Artifacts and import paths of earlier versions load for ever: tests/data has what version 0.1.0 wrote, format 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fxplug
from fxplug.core.artifacts.modules import block_classes
from fxplug.core.spec.pass_file import import_target, present

KEPT = Path(__file__).parents[1] / "data/kept"
BLOCKS = (KEPT / "blocks.txt").read_text().split()


@pytest.mark.parametrize("name", ["methods", "slots", "step_cache"])
def test_an_artifact_of_format_1_gives_what_it_gave(name):
    """`methods` has a block of each way to change a layer, `slots` a bank of adapters, `step_cache` marks."""
    module, call = fxplug.load(KEPT / name), load_file(KEPT / f"{name}.safetensors")
    torch.testing.assert_close(module.eval()(call["x"]), call["out"], rtol=1e-5, atol=1e-6)
    base = {name for name, _ in module.named_parameters() if name.startswith("blocks.0.attn.qkv")}
    assert base == {"blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias"}


def test_slots_of_format_1_give_back_what_they_are_given_now(tmp_path):
    """They came without what slots keep of a file, and have it once they are read."""
    module = fxplug.load(KEPT / "slots")
    state = {}
    for bank in (bank for banks in module.adapters.banks.values() for bank in banks):
        state[f"base_model.model.{bank.path}.lora_A.weight"] = torch.randn(bank.rank, *bank.shape[1:])
        state[f"base_model.model.{bank.path}.lora_B.weight"] = torch.randn(bank.shape[0], bank.rank)
    module.adapters.load("ink", state, config={"r": 2, "lora_alpha": 0.7})
    fxplug.save(module, tmp_path / "again")
    saved = load_file(fxplug.load(tmp_path / "again").adapters.save("ink", tmp_path / "ink").path / "adapter_model.safetensors")
    assert saved.keys() == state.keys() and all(torch.equal(saved[key], state[key]) for key in state)


@pytest.mark.parametrize(("name", "kind"), [("parallel", "Attention"), ("tensor", "AllReduce")])
def test_a_parallel_artifact_of_format_1(name, kind):
    module = fxplug.load(KEPT / name)
    assert kind in {type(block).__name__ for block in module.modules()}


@pytest.mark.parametrize("path", BLOCKS)
def test_a_block_has_its_old_import_path_for_ever(path):
    assert block_classes()[present(path)].__qualname__ == present(path).partition(":")[2]
    assert present(present(path)) == present(path)


def test_what_is_saved_again_has_the_import_paths_of_today(tmp_path):
    fxplug.save(fxplug.load(KEPT / "methods"), tmp_path / "again")
    text = (tmp_path / "again/graph.json").read_text()
    assert "fxplug.blocks:Loha" in text and not [path for path in BLOCKS if present(path) != path and f'"{path}"' in text]


def test_a_pass_may_name_a_block_by_an_old_path():
    assert import_target("fxplug.weights:Loha") is import_target("fxplug.blocks:Loha")
