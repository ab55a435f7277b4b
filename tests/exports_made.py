"""A small model with everything an export must carry, and what it becomes as a package and as an ONNX model, made once."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

import fxplug

QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0"}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LOAD = {"onnx": fxplug.load_onnx, "aoti": functools.partial(fxplug.load_package, trusted=True)}


class Model(nn.Module):
    """Every kind of layer that takes an update, a guard, a constant of its own, nested inputs and a nested result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.emb, self.lin = nn.Conv2d(3, 4, 3, padding=1), nn.Embedding(5, 4), nn.Linear(4, 6)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5))
        self.register_buffer("zeros", torch.zeros(1))

    def forward(self, image, ids, more, flag=True, shift=None):
        if image.shape[0] >= 64 or image.shape[-1] % 2 != 0:
            raise ValueError("size")
        x = self.conv(image - self.mean).mean((2, 3)) + self.emb(ids) * more["scale"]
        y = self.lin(x) + self.zeros
        y = y if shift is None else y + shift
        return {"y": y, "none": None, "three": 3, "pair": (more["scale"], [y + 1])}


def inputs(batch=2, side=8):
    return torch.randn(batch, 3, side, side), torch.randint(0, 5, (batch,)), {"scale": torch.rand(batch, 1)}


def adapter(path, rank, layers=("conv", "emb", "lin")):
    """An adapter in PEFT's layout, made by hand."""
    sizes = {"conv": ((rank, 3, 3, 3), (4, rank, 1, 1)), "emb": ((rank, 5), (4, rank)), "lin": ((rank, 4), (6, rank))}
    state = {}
    for layer in layers:
        names = ("lora_embedding_A", "lora_embedding_B") if layer == "emb" else ("lora_A.weight", "lora_B.weight")
        for name, size in zip(names, sizes[layer], strict=True):
            state[f"base_model.model.{layer}.{name}"] = torch.randn(size)
    save_file(state, path)
    return path


@contextlib.contextmanager
def one_registry():
    """torch makes its table of translations anew for each export, which is half the time of a small one."""
    make = ONNXRegistry.from_torchlib
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(make)))
        yield


@functools.cache
def made(to, new_folder):
    """The model with slots, and its file in a new temporary folder; in the ONNX model an adapter is in use."""
    torch.manual_seed(0)
    folder = new_folder(to)
    gm = fxplug.trace(Model().eval(), inputs(), {"shift": torch.randn(2, 6)})
    new = fxplug.apply(gm, fxplug.load_pass("lora", rank=2, slots=3))
    if to == "onnx":
        new.adapters.load("old", adapter(new_folder("old") / "old.safetensors", 1))
        new.adapters.use({"old": 0.5})
    options = QUICK if to == "aoti" else None
    result = fxplug.export(new, folder / "model", inputs(), {"shift": torch.randn(2, 6)}, to=to, options=options)
    assert result.kept == "all" and list(folder.iterdir()) == [result.path]
    assert result.dynamic == {"image": [0, 2, 3], "ids": [0], "more_scale": [0], "shift": [0]}
    checked = [note for note in result.notes if note.startswith("onnxruntime") and "differs from the module by" in note]
    assert len(checked) == len(result.notes) == (to == "onnx")
    return new, result.path


def pair_of(to, new_folder):
    """For a fixture: the module and its export, both as they were exported; the module is put back after."""
    module, path = made(to, new_folder)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    yield module, LOAD[to](path)
    module.load_state_dict(state)


def same(exported, module, batch=3, side=6):
    args, shift = inputs(batch, side), torch.randn(batch, 6)
    out, wanted = exported(*args, shift=shift), module(*args, shift=shift)
    torch.testing.assert_close(out["y"], wanted["y"].detach(), **CLOSE)
    return out
