"""ComfyUI's own reader and arithmetic on what is written for it, as a checkout of Fooocus has them: SEEDS is its folder.

That copy is of January 2024, and knows no DoRA; of names it has those of Stable Diffusion's UNets with underscores. Later
versions take every weight's own name as well, which stands here for what they would look up.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
import unets
import zoo
from checkouts import checkout_of
from safetensors.torch import load_file

import fxplug
from fxplug.adapters.layer_names import SWAPPED, map_first_names

CHECKOUT = checkout_of("ldm_patched/modules/lora.py")
pytestmark = pytest.mark.skipif(not CHECKOUT.is_dir(), reason="SEEDS names no folder with a checkout of Fooocus")


@pytest.fixture(scope="module")
def comfy():
    """Its modules for LoRAs and patches, without what looks for devices."""
    before = dict(sys.modules)
    management = ModuleType("ldm_patched.modules.model_management")
    management.cast_to_device = lambda tensor, device, dtype, copy=False: tensor.to(device=device, dtype=dtype)
    sys.modules["ldm_patched.modules.model_management"] = management
    sys.path.insert(0, str(CHECKOUT))
    sys.modules["ldm_patched.modules.checkpoint_pickle"] = ModuleType("ldm_patched.modules.checkpoint_pickle")
    found = tuple(importlib.import_module(f"ldm_patched.modules.{name}") for name in ("lora", "model_patcher"))
    sys.modules["ldm_patched.modules"].model_management = management
    yield found
    sys.path.remove(str(CHECKOUT))
    for name in sys.modules.keys() - before.keys():
        if name.startswith("ldm_patched"):
            del sys.modules[name]


def sdxl():
    return unets.sdxl()


def flux():
    (case,) = (case for case in zoo.cases() if case.name == "diffusers/FluxTransformer2DModel")
    model = case.build().eval()
    args, kwargs = case.inputs(batch=2)
    return fxplug.trace(model, args, kwargs), args, kwargs


def under_first_names(state, shapes, kind):
    """The tensors of a model by the names of its first code base, where several layers are one."""
    made = {}
    for name, paths in map_first_names(shapes).items():
        rows = [state.get(f"{path.removesuffix(SWAPPED)}.{kind}") for path in paths]
        if all(row is not None for row in rows):
            whole = torch.cat(rows)
            made[f"diffusion_model.{name}.{kind}"] = torch.cat(whole.chunk(2)[::-1]) if paths[0].endswith(SWAPPED) else whole
    return made


@pytest.mark.parametrize(
    ("model", "kind", "options"),
    [
        (sdxl, "lora", {"at": ["**.to_*", "**.to_out.0", "**.conv1", "**.proj_in"], "rank": 3, "alpha": 2.0}),
        (sdxl, "loha", {"at": ["**.to_q", "**.conv1"], "rank": 2, "tucker": True}),
        (sdxl, "lokr", {"at": ["**.to_q", "**.conv1"], "rank": 2, "factor": 4}),
        (sdxl, "delta", {"at": ["**.to_q", "**.conv1", "**.norm1"]}),
        (flux, "lora", {"at": ["**.to_q", "**.to_k", "**.to_v", "**.proj_out"], "rank": 3}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:8]),
)
def test_its_weights_are_ours(comfy, model, kind, options, tmp_path):
    lora, patcher = comfy
    gm, *_ = model()
    new = fxplug.apply(gm, fxplug.load_pass(kind, expect=">=1", **options))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith(f"{kind}."):
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    written = fxplug.save_adapter(new, tmp_path / "ink.safetensors", as_="comfy")
    shapes = {name.removesuffix(".weight"): tuple(p.shape) for name, p in gm.named_parameters() if name.endswith(".weight")}
    base, merged = ({} for _ in range(2))
    for part in ("weight", "bias"):
        base |= under_first_names(gm.state_dict(), shapes, part)
        merged |= under_first_names(fxplug.merge(new).state_dict(), shapes, part)
    state = load_file(written.path)
    names = {name.removesuffix(".weight"): name for name in base if name.endswith(".weight")}
    patches = lora.load_lora(state, names)
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == patches.keys() and changed
    for name, patch in patches.items():
        theirs = patcher.ModelPatcher.calculate_weight(None, [(1.0, patch, 1.0)], base[name].clone(), name)
        torch.testing.assert_close(theirs, merged[name], rtol=1e-5, atol=1e-5)
