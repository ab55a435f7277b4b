"""Files for ComfyUI and kohya's tools have a name for every layer that ComfyUI has it by: none is `lora key not loaded`."""

from __future__ import annotations

import math

import pytest
from comfyui_layers import DATA, ENDS, layers_in_comfyui, of_all_layers

from fxplug.adapters.file_layouts import read_model

# kohya's tools have diffusers' names for Stable Diffusion 1, and ComfyUI takes these, too (comfy/utils.py, unet_to_diffusers)
CASES = [("comfy", family) for family in DATA] + [("kohya", family) for family in DATA if family != "sd1"]


@pytest.mark.parametrize(("as_", "family"), CASES)
def test_each_key_is_a_layer_of_comfyuis(as_, family):
    made = of_all_layers(read_model(None, family), as_)
    assert all(ENDS.search(key) for key in made.tensors) and not made.left_out
    found = {ENDS.sub("", key) for key in made.tensors}
    own = layers_in_comfyui(family)
    names = {f"diffusion_model.{name}" if as_ == "comfy" else f"lora_unet_{name.replace('.', '_')}": name for name in own}
    assert found == names.keys()
    for key, name in names.items():
        up, down = (made.tensors[f"{key}.lora_{half}.weight"] for half in ("up", "down"))
        assert len(up) == own[name][0] and math.prod(down.shape[1:]) == math.prod(own[name][1:]), name
