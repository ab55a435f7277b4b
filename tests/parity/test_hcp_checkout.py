"""HCP-Diffusion's own code and configurations against what they convert to, in a checkout: SEEDS is the folder that has it."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType

import pytest
import small
import torch
from checkouts import checkout_of
from torch import nn

import fxplug
from fxplug.compat.hcp.checkpoints import load_checkpoint, save_checkpoint
from fxplug.compat.hcp.convert_file import PARTS, convert
from fxplug.core.spec.yaml_source import parse_yaml, read_yaml

CHECKOUT = checkout_of("hcpdiff/__init__.py")
pytestmark = pytest.mark.skipif(not CHECKOUT.is_dir(), reason="SEEDS names no folder with a checkout of HCP-Diffusion")
SECTIONS = {key: part for part, keys in PARTS.items() for key in keys}


def configs():
    """Its configurations with plugins or low-rank updates, each with the part that it has them for."""
    for file in sorted(CHECKOUT.glob("cfgs/**/*.yaml")):
        data = read_yaml(file).data or {}
        for part in sorted({SECTIONS[key] for key in data if key in SECTIONS and data[key]}):
            yield pytest.param(file, part, id=f"{file.relative_to(CHECKOUT)}-{part}")


@pytest.fixture(scope="module")
def theirs():
    """Imports its modules one by one: its packages import trainers and more, and two libraries that are not installed here."""
    before = dict(sys.modules)
    for name in ("hcpdiff", "hcpdiff.models", "hcpdiff.utils", "hcpdiff.ckpt_manager"):
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(CHECKOUT / name.replace(".", "/"))]
    sys.modules["omegaconf"] = omegaconf = ModuleType("omegaconf")
    omegaconf.OmegaConf = omegaconf.ListConfig = type("Unused", (), {})
    sys.modules["einops"] = einops = ModuleType("einops")
    einops.einsum = lambda *values: torch.einsum(values[-1].replace(" ", ""), *values[:-1])
    einops.rearrange = einops.repeat = None
    yield lambda name: importlib.import_module(f"hcpdiff.{name}")
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("hcpdiff", "omegaconf", "einops"):
            del sys.modules[name]


@pytest.mark.parametrize("file, part", list(configs()))
def test_every_configuration_converts(file, part):
    passes = parse_yaml(convert(file, part=part).text).data["passes"]
    assert passes
    if part == "unet" and "plugin" not in file.name:
        unet, data = small.unet(), [e for entry in passes for e in entry.items()]
        for name, given in data:
            assert fxplug.find(unet.gm, fxplug.load_pass(name, **given))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.body = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 2)])
        self.head = nn.Linear(2, 10, bias=False)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2).contiguous()
        for layer in self.body:
            x = layer(x).tanh()
        return self.head(x)


OPTIONS = [{"rank": 2}, {"rank": 0.3, "alpha": 2.0}, {"rank": 4, "alpha": 0.7, "alpha_auto_scale": False}]
HALVES = {"p": (0.5, 1), "n": (0, 0.5)}  # set by its make_hcpdiff, up to 0.7
CASES = [  # the file of its classes, what each entry has besides, and the layers; its LoHa fails when it is made
    ("lora_layers", [{}], ["conv", "body", "head"]),
    ("lora_layers", [{"branch": "p"}], ["conv", "body", "head"]),
    ("lora_layers", [{"branch": "p"}, {"branch": "n"}], ["conv", "body", "head"]),
    ("lora_layers_patch", [{}], ["conv", "body", "head"]),
    ("lora_layers_patch", [{"type": "dapp", "branch": "p"}, {"type": "dapp", "branch": "n"}], ["body"]),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("file, entries, layers", CASES, ids=str)
def test_low_rank_updates_are_equal_in_value_and_gradient(theirs, tmp_path, file, entries, layers, options):
    model, x = small.seeded(Layers).eval(), small.seeded(lambda: torch.randn(5, 3, 8, 8))
    (tmp_path / "a.yaml").write_text(json.dumps({"lora_unet": [{"layers": layers, **options, **more} for more in entries]}))
    new, same = fxplug.trace(model, x), []
    for entry in parse_yaml(convert(tmp_path / "a.yaml").text).data["passes"]:
        ((name, given),) = entry.items()
        new = fxplug.apply(new, fxplug.load_pass(name, **given))
    hooked = small.seeded(Layers).eval()
    for number, more in enumerate(entries):
        for path, block in on_hooks(theirs(f"models.{file}"), hooked, number, layers, {**options, **more}):
            same += weights(block.layer, put_at(new, f"lora_block_{number}.{path}"))
    torch.manual_seed(1)
    for their, own in same:
        nn.init.normal_(their, std=0.3)
        own.data.copy_(their.data)
    expected, found = hooked(x), new(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for out in (expected, found):
        out.square().mean().backward()
    for their, own in same:
        torch.testing.assert_close(own.grad, their.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("file", ["lora_layers", "lora_layers_patch"])
@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_a_file_that_it_writes_and_one_that_it_reads(theirs, tmp_path, file, suffix):
    model, x = small.seeded(Layers).eval(), small.seeded(lambda: torch.randn(5, 3, 8, 8))
    (tmp_path / "a.yaml").write_text(json.dumps({"lora_unet": [{"layers": ["body", "head"], "rank": 2, "alpha": 3.0}]}))
    ((name, given),) = parse_yaml(convert(tmp_path / "a.yaml").text).data["passes"][0].items()
    new, hooked = fxplug.apply(fxplug.trace(model, x), fxplug.load_pass(name, **given)), small.seeded(Layers).eval()
    blocks = dict(on_hooks(theirs(f"models.{file}"), hooked, 0, ["body", "head"], {"rank": 2, "alpha": 0.5}))
    for parameter in (p for block in blocks.values() for p in block.parameters()):
        nn.init.normal_(parameter, std=0.3)
    write = theirs("ckpt_manager.ckpt_safetensor" if suffix == ".safetensors" else "ckpt_manager.ckpt_pkl")
    manager = write.CkptManagerSafe() if suffix == ".safetensors" else write.CkptManagerPKL()
    group = theirs("models.plugin").PluginGroup(blocks)
    manager._save_ckpt({"lora": group.state_dict()}, save_path=str(tmp_path / f"a{suffix}"))
    load_checkpoint(new, tmp_path / f"a{suffix}")
    torch.testing.assert_close(new(x), hooked(x), rtol=1e-5, atol=1e-5)
    save_checkpoint(new, tmp_path / f"b{suffix}")
    read = manager.load_ckpt(str(tmp_path / f"b{suffix}"))["lora"]
    if file == "lora_layers_patch":
        assert read.keys() == group.state_dict().keys()
        assert all(torch.equal(read[key], value) for key, value in group.state_dict().items())


def on_hooks(module, model, number, layers, options):
    """Their blocks at a model, each with the path of its layer."""
    for layer in layers:
        given = {"parent_block": model, "host_name": layer, **options} if "patch" in module.__name__ else options
        kind = module.lora_layer_map[options.get("type", "lora")]
        for path, block in kind.wrap_model(number, model.get_submodule(layer), **given).items():
            if "patch" not in module.__name__ and "branch" in options:
                block.set_mask(HALVES[options["branch"]])
            yield f"{layer}.{path}".strip("."), block


def put_at(new, path):
    """The block that the pass put at a layer."""
    below = f"{path}."
    names = [name for name, _ in new.named_modules() if name.startswith(below) and "." not in name.removeprefix(below)]
    block = new.get_submodule(names[0])
    return getattr(block, "lora", block)


def weights(theirs, own):
    """Their parameters, each with ours that is the same."""
    down = theirs.W_down if hasattr(theirs, "W_down") else theirs.lora_down.weight
    up = theirs.W_up if hasattr(theirs, "W_up") else theirs.lora_up.weight
    return [(down, own.down.weight), (up, own.up.weight)]
