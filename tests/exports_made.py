"""A small model with everything an export must carry, and what it becomes as a package and as an ONNX model, made once."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zoo
from safetensors.torch import save_file
from torch import nn
from torch._export import utils as export_utils
from torch.onnx._internal.exporter._registration import ONNXRegistry

import fxplug
from fxplug.core.ir.containers import list_leaves

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
    """torch makes its table of translations anew for each export, and looks up all of its operations thirty times: more than
    half the time of a small one. Operations that are added in between are seen."""
    make, look = ONNXRegistry.from_torchlib, export_utils._materialize_cpp_cia_ops
    seen = []

    def look_once():
        found = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if found not in seen:
            look()
            seen[:] = [found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(make)))
        patch.setattr(export_utils, "_materialize_cpp_cia_ops", look_once)
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


# --- models of libraries

# and which of their sizes in the zoo is another one than the first
FAMILIES = {
    "UNet2DConditionModel-sd15": 1,
    "DiTTransformer2DModel": 0,
    "FluxTransformer2DModel": 1,
    "PixArtTransformer2DModel": 0,  # its trace is for one size
}


def adapter_of(module, seed):
    """A small adapter for every layer that has slots."""
    torch.manual_seed(seed)
    banks = [bank for banks in module.adapters.banks.values() for bank in banks]
    sizes = [(bank.path, (("A", (3, bank.shape[1])), ("B", (bank.shape[0], 3)))) for bank in banks]
    return {f"{path}.lora_{half}.weight": torch.randn(size) * 0.1 for path, both in sizes for half, size in both}


def check_family(name, size, folder, to):
    case = next(case for case in zoo.cases() if case.name == f"diffusers/{name}")
    example = case.inputs(batch=2)
    gm = fxplug.trace(case.build(), *example)
    return check_model(gm, example, [case.inputs(batch=3), case.inputs(batch=4, size=size)], folder, to)


def check_model(gm, example, others, folder, to, close=CLOSE):
    """An export in a copy of its folder beside its module: other sizes, and adapters that are read, mixed and chosen by sample.

    Two threads call it at the end.
    """
    args, kwargs = example
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*attn.*(qkv|to_[qkv])$", rank=4, slots=2))
    (folder / "here").mkdir()
    result = fxplug.export(new, folder / "here", args, kwargs, to=to, options=QUICK if to == "aoti" else None)
    (folder / "here").rename(folder / "there")
    model = LOAD[to](folder / "there" / result.path.name)
    save_file(adapter_of(new, 1), folder / "ink.safetensors")
    for adapters in (new.adapters, model.adapters):
        adapters.load("ink", folder / "ink.safetensors")
        adapters.load("film", adapter_of(new, 2))
    calls = []
    for args, kwargs in [example, *others]:
        batch = next(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)).shape[0]
        mixed = [["ink", None, {"ink": 0.5, "film": -1.0}, "film"][i % 4] for i in range(batch)]
        for what in (mixed, None, "ink", {"ink": 0.8, "film": 0.3}):
            for adapters in (new.adapters, model.adapters):
                adapters.use(what)
            with torch.no_grad():
                (wanted,) = list_leaves(new(*args, **kwargs))
            (out,) = list_leaves(model(*args, **kwargs))
            torch.testing.assert_close(out, wanted, **close)
            calls.append((args, kwargs, wanted))
        seen = [wanted for _, _, wanted in calls[-4:]]
        assert batch == 1 or not any(torch.allclose(a, b, atol=1e-4) for i, a in enumerate(seen) for b in seen[:i])

    lasting = calls[3::4]  # with the adapters that are in use

    def again(n):
        args, kwargs, wanted = lasting[n % len(lasting)]
        return list_leaves(model(*args, **kwargs))[0], wanted

    with ThreadPoolExecutor(2) as pool:
        for out, wanted in pool.map(again, range(12)):
            torch.testing.assert_close(out, wanted, **close)
    return result
