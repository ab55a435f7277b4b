"""Artifacts and import paths of earlier versions load for ever: tests/data has what version 0.1.0 wrote, format 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_artifact import restamp
from torch import nn

import fxplug
from fxplug.core.artifacts.modules import block_classes
from fxplug.core.ir import functions, ops
from fxplug.core.spec.pass_file import import_target, update_path

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
    module = fxplug.load(KEPT / "slots")
    state = {}
    for bank in (bank for banks in module.adapters.banks.values() for bank in banks):
        state[f"base_model.model.{bank.path}.lora_A.weight"] = torch.randn(bank.rank, *bank.shape[1:])
        state[f"base_model.model.{bank.path}.lora_B.weight"] = torch.randn(bank.shape[0], bank.rank)
    module.adapters.load("ink", state, config={"r": 2, "lora_alpha": 0.7})
    fxplug.save(module, tmp_path / "again")
    saved = load_file(fxplug.load(tmp_path / "again").adapters.save("ink", tmp_path / "ink").path / "adapter_model.safetensors")
    assert saved.keys() == state.keys()
    for key in state:
        torch.testing.assert_close(saved[key], state[key] * (0.35 if key.endswith("lora_B.weight") else 1))


def test_what_slots_kept_of_files_is_left_out(tmp_path):
    """Artifacts of version 0.1 may have it beside a bank."""
    fxplug.save(fxplug.load(KEPT / "slots"), tmp_path / "old")
    document = json.loads((tmp_path / "old/graph.json").read_text())
    bank = next(name.removesuffix(".up.weight") for name in document["tensors"] if name.endswith(".up.weight"))
    file = tmp_path / f"old/{bank.partition('.')[0]}.safetensors"
    tensors = load_file(file)
    for key, tensor in (("said", torch.ones(2, 3, dtype=torch.int64)), ("lost", torch.ones(4, 4, dtype=torch.int8))):
        tensors[f"{bank}.{key}"] = tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        document["tensors"][f"{bank}.{key}"] = {"kind": "buffer", "shape": list(tensor.shape), "dtype": dtype}
    save_file(tensors, file)
    (tmp_path / "old/graph.json").write_text(json.dumps(document))
    restamp(tmp_path / "old")
    module, call = fxplug.load(tmp_path / "old"), load_file(KEPT / "slots.safetensors")
    torch.testing.assert_close(module.eval()(call["x"]), call["out"], rtol=1e-5, atol=1e-6)
    assert not [name for name in module.state_dict() if name.endswith((".said", ".lost"))]


@pytest.mark.parametrize(("name", "kind"), [("parallel", "Attention"), ("tensor", "AllReduce")])
def test_a_parallel_artifact_of_format_1(name, kind):
    module = fxplug.load(KEPT / name)
    assert kind in {type(block).__name__ for block in module.modules()}


@pytest.mark.parametrize("path", BLOCKS)
def test_a_block_has_its_old_import_path_for_ever(path):
    assert block_classes()[update_path(path)].__qualname__ == update_path(path).partition(":")[2]
    assert update_path(update_path(path)) == update_path(path)


def test_what_is_saved_again_has_the_import_paths_of_today(tmp_path):
    fxplug.save(fxplug.load(KEPT / "methods"), tmp_path / "again")
    text = (tmp_path / "again/graph.json").read_text()
    assert "fxplug.blocks:Loha" in text and not [path for path in BLOCKS if update_path(path) != path and f'"{path}"' in text]


def test_a_pass_may_name_a_block_by_an_old_path():
    assert import_target("fxplug.weights:Loha") is import_target("fxplug.blocks:Loha")
    assert import_target("fxplug.blocks.dora:Dora") is import_target("fxplug.blocks:Dora")  # its file is another one now


@pytest.mark.parametrize("old", functions.OLD_OPS)
def test_a_function_of_a_graph_is_read_under_its_old_name(old):
    assert functions.list_functions()[f"fxplug.ops.{old}"] is getattr(ops, functions.OLD_OPS[old])
    assert functions.name_functions()[getattr(ops, functions.OLD_OPS[old])] == f"fxplug.ops.{functions.OLD_OPS[old]}"


def test_an_artifact_with_old_names_of_functions_loads(tmp_path):
    class Net(nn.Module):
        def forward(self, x, flag=True):
            y = x if x.requires_grad else x * 2
            return y + 1 if flag else y

    x = torch.randn(2, 3)
    gm = fxplug.trace(Net(), x, {"flag": True})
    fxplug.save(gm, tmp_path / "saved")
    text = (tmp_path / "saved/graph.json").read_text()
    old = text
    for name, present_name in functions.OLD_OPS.items():
        old = old.replace(f'"fxplug.ops.{present_name}"', f'"fxplug.ops.{name}"')
    assert old != text
    (tmp_path / "saved/graph.json").write_text(old)
    restamp(tmp_path / "saved")
    assert torch.equal(fxplug.load(tmp_path / "saved")(x, flag=True), gm(x, flag=True))
