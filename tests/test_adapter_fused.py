"""Adapter files on the layers that diffusers' fuse_qkv_projections makes one, and files for these on a model without them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import zoo

import fxplug
from fxplug.adapters import files
from fxplug.adapters.layer_names import FUSED, map_fused_names
from fxplug.core.errors import ArtifactError

FAMILIES = [
    "SD3Transformer2DModel", "FluxTransformer2DModel", "WanTransformer3DModel", "UNet2DConditionModel-sd15",
    "PixArtTransformer2DModel", "HunyuanDiT2DModel", "AuraFlowTransformer2DModel",
]  # fmt: skip


def built(name):
    (case,) = (each for each in zoo.cases() if each.name == f"diffusers/{name}")
    return case.build().eval(), *case.inputs(batch=2)


@functools.cache
def traced(name):
    """A model, its inputs, and what is traced of it unfused and fused."""
    model, args, kwargs = built(name)
    fused = copy.deepcopy(model)
    fused.fuse_qkv_projections()
    return model, args, kwargs, fused, [fxplug.trace(target, args, kwargs) for target in (copy.deepcopy(model), fused)]


def lora(model, path):
    """A LoRA of rank 2 of a layer of a model, or of one whose outputs are all of several's."""
    shapes = [model.get_submodule(each).weight.shape for each in path]
    torch.manual_seed(len(path[0]))
    return torch.randn(2, shapes[0][1]) * 0.3, torch.randn(sum(shape[0] for shape in shapes), 2) * 0.3


def result(module, args, kwargs):
    with torch.no_grad():
        found = module(*args, **kwargs)
    return found[0] if isinstance(found, tuple) else found.sample


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("form", ["one layer's name", "usual names"])
def test_files_fit_the_fused_and_the_unfused_model(name, form):
    model, args, kwargs, fused, graphs = traced(name)
    called = {path for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    made = {path for path, _ in fused.named_modules() if path.rpartition(".")[2] in FUSED}
    rows = {one: paths for one, paths in map_fused_names(called).items() if one in made}
    assert rows
    state, merged = {}, copy.deepcopy(model)
    for one, paths in list(rows.items())[:3]:
        for keys in [(one, paths)] if form == "one layer's name" else [(path, [path]) for path in paths[::2]]:
            down, up = lora(model, list(keys[1]))
            state |= {f"transformer.{keys[0]}.lora_A.weight": down, f"transformer.{keys[0]}.lora_B.weight": up}
            widths = [merged.get_submodule(each).weight.shape[0] for each in keys[1]]
            for each, part in zip(keys[1], up.split(widths), strict=True):
                merged.get_submodule(each).weight.data += part @ down
    want = result(merged, args, kwargs)
    assert not torch.allclose(want, result(model, args, kwargs))
    for gm in graphs:
        new = fxplug.apply(gm, fxplug.pass_for(state, gm, slots=1))
        new.adapters.load("it", state)
        new.adapters.use("it")
        torch.testing.assert_close(result(new, args, kwargs), want, rtol=1e-4, atol=1e-5)


ATTENTION = {f"block.{name}": (8, 8) for name in ("to_q", "to_k", "to_v")}


def test_several_updates_of_one_layer_are_one_of_their_ranks():
    halves = (("A", (2, 8)), ("B", (8, 2)))
    file = files.read({f"block.{n}.lora_{half}.weight": torch.randn(s) for n in ("to_q", "to_v") for half, s in halves})
    shapes = {**ATTENTION, "block.to_qkv": (24, 8)}
    ((path, entry),) = files.fit(file, shapes).check().placed.items()
    assert path == "block.to_qkv" and entry.rank == 4
    assert not entry.update((24, 8))[8:16].any()
    slots = {"block.to_qkv": (24, 8)}
    assert list(files.fit(file, slots, model=lambda: shapes).check().placed) == ["block.to_qkv"]
    other = {**ATTENTION, "block.to_qkv": (16, 8)}  # of another size: not these three
    assert set(files.fit(file, other).check().placed) == {"block.to_q", "block.to_v"}


@pytest.mark.parametrize("keys", [{"dora_scale": (8, 1)}, {"diff": (8, 8)}, {"lora_B.bias": (8,)}, {"all": (24, 2)}])
def test_what_cannot_be_joined_is_refused(keys):
    shapes, state = {**ATTENTION, "block.to_qkv": (24, 8)}, {}
    if "diff" not in keys:
        state = {"block.to_q.lora_A.weight": torch.ones(2, 8), "block.to_q.lora_B.weight": torch.ones(8, 2)}
    for key, shape in keys.items():
        if key == "all":
            state |= {"block.to_qkv.lora_A.weight": torch.ones(2, 8), "block.to_qkv.lora_B.weight": torch.ones(24, 2)}
        else:
            state[f"block.to_q.{key}"] = torch.ones(shape)
    with pytest.raises(ArtifactError, match=r"'block.to_qkv' is block.to_q, .* in one, and .*: trace the model after unfuse"):
        files.fit(files.read(state), shapes).check()
