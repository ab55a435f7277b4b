"""ONNX models: they compute what the module does, their adapters are live, and a file that was changed since is told."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import re
import resource
import shutil
import threading
import warnings
from pathlib import Path

import exports_made
import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import small
import torch
from exports_made import CLOSE, adapter, check_model, inputs, same
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError, FxplugError, SpecError
from fxplug.core.reading import make_reporter
from fxplug.core.writing import replace_file
from fxplug.exports import onnx_file, onnx_writer
from fxplug.exports.onnx_file import METADATA, is_data_of, seal
from fxplug.exports.onnx_model import OnnxModel


@pytest.fixture(scope="module", autouse=True)
def one_registry():
    with exports_made.one_registry():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A rewritten model with an adapter in use, and its ONNX file."""
    return exports_made.made("onnx", tmp_path_factory.mktemp)


@pytest.fixture
def pair(tmp_path_factory):
    """The module and its model, both as they were exported."""
    yield from exports_made.pair_of("onnx", tmp_path_factory.mktemp)


def arrays(value):
    return {key: arrays(each) for key, each in value.items()} if isinstance(value, dict) else value.numpy()


# --- calls


@pytest.mark.slow
def test_arrays_of_numpy(pair):
    _, model = pair
    (image, ids, more), shift = inputs(2, 8), torch.randn(2, 6)
    wanted = model(image, ids, more, shift=shift)["y"]
    given = [image.numpy(), ids.numpy(), arrays(more)]
    out = model(*given, shift=shift.numpy())
    assert type(out["y"]) is type(out["pair"][1][0]) is np.ndarray and np.array_equal(out["y"], wanted.numpy())
    assert type(model(*given, shift=shift)["y"]) is torch.Tensor  # some of torch's
    turned = np.flip(np.flip(given[0], -1).copy(), -1)
    turned.flags.writeable = False
    assert np.array_equal(model(turned, *given[1:], shift=shift.numpy())["y"], wanted.numpy())
    for odd in (image.numpy().astype(">f4"), np.array([["a"]]), np.array([object()])):
        with pytest.raises(FxplugError, match="an array of .* cannot be converted to a tensor"):
            model(odd, *given[1:], shift=shift.numpy())


def test_what_fails_within_a_call_and_what_a_result_lies_in(pair):
    _, model = pair
    (image, ids, more), shift = inputs(), torch.randn(2, 6)
    with pytest.raises(FxplugError, match="the model failed in this call: .*out of data bounds, idx=9"):
        model(image, ids * 0 + 9, more, shift=shift)
    with pytest.raises(FxplugError, match="an array of float32 is|image is torch.float64"):
        model(image.double().numpy(), ids.numpy(), arrays(more), shift=shift.numpy())
    model(image, ids, more, shift=shift)["pair"][0].zero_()
    assert more["scale"].all()  # a result has memory of its own


# --- adapters


def test_adapters_change_in_one_session(pair, tmp_path):
    module, model = pair
    session = model.session
    assert model.adapters.names == ["old"] and model.adapters.active == {"old": 0.5}
    ink = adapter(tmp_path / "ink.safetensors", 2)
    for adapters in (module.adapters, model.adapters):
        adapters.load("ink", ink)
        adapters.use("ink")
    assert model.session is session
    with model.adapters.hold():
        same(model, module)


def test_a_session_without_fxplug_has_the_adapters_of_the_export_or_those_it_is_given(made, pair):
    module, model = pair
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(made[1], options, providers=["CPUExecutionProvider"])
    (image, ids, more), shift = inputs(3), torch.randn(3, 6)
    feeds = dict(zip(model.manifest["inputs"], arrays({1: image, 2: ids, 3: more["scale"], 4: shift}).values(), strict=True))
    assert [each.name for each in session.get_inputs()] == model.manifest["inputs"]
    for weights in (None, {"old": -1.5}):
        if weights:
            for adapters in (module.adapters, model.adapters):
                adapters.use(weights)
            feeds["lora.gates.table.weights"] = model.tensors["lora.gates.table.weights"].numpy()
        wanted = module(image, ids, more, shift=shift)["y"].detach()
        torch.testing.assert_close(torch.from_numpy(session.run(None, feeds)[0]), wanted, **CLOSE)


def test_calls_and_changes_from_threads(pair):
    module, model = pair
    args, shift = inputs(3), torch.randn(3, 6)
    choices = [None, "old", {"old": -1.0}, ["old", None, {"old": 2.0}]]
    wanted = []
    for what in choices:
        module.adapters.use(what)
        wanted.append(module(*args, shift=shift)["y"].detach())
    found, ends = [], []

    def calls():
        while not ends:
            found.append(model(*args, shift=shift)["y"])

    threads = [threading.Thread(target=calls) for _ in range(3)]
    model.adapters.use(None)
    for thread in threads:
        thread.start()
    for i in range(200):
        model.adapters.use(choices[i % len(choices)])
    ends.append(1)
    for thread in threads:
        thread.join()
    near = [[torch.allclose(out, one, **CLOSE) for one in wanted] for out in found]
    assert all(any(row) for row in near) and len({row.index(True) for row in near}) > 1


# --- models


@pytest.mark.slow
def test_vit(tmp_path):
    gm, args, kwargs = small.plain_vit()
    check_model(gm, (args, kwargs), [((torch.randn(n, 3, 32, 32),), {}) for n in (3, 5)], tmp_path, "onnx")


@pytest.mark.slow
@pytest.mark.parametrize("name, size", exports_made.FAMILIES.items())
def test_diffusers(tmp_path, name, size):
    assert exports_made.check_family(name, size, tmp_path, "onnx").kept == "all"


@pytest.mark.slow
def test_half_precision(tmp_path):
    _, args, _ = small.plain_vit()
    gm = fxplug.trace(copy.deepcopy(small.plain_vit().model).half(), args[0].half())
    others = [((torch.randn(3, 3, 32, 32).half(),), {})]
    check_model(gm, ((args[0].half(),), {}), others, tmp_path, "onnx", {"rtol": 0.02, "atol": 0.02})


# --- what is exported


@dataclasses.dataclass
class Out:
    a: torch.Tensor
    rest: dict
    none: torch.Tensor | None = None


class Odd(nn.Module):
    """Two kinds of layers, numbers and flags among the inputs, and results of every kind, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out, self.free = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.table = nn.Embedding(7, 8)

    def forward(self, x, ids, timestep=0.5, *, mask=None, steps: int = 2):
        y = self.lin(x).squeeze(0) * timestep + self.table(ids).sum(1)
        for _ in range(steps):
            y = self.out(y)
        y = y if mask is None else torch.where(mask[:, None], y, 0.0)
        more = {"twice": (y, y), "ids": ids, "free": self.free, "big": y > 0, "half": y.half(), "i8": y.to(torch.int8)}
        return Out(y, {**more, "count": x.shape[0], "share": x.shape[0] * 0.5, "flag": True, "text": "t", "d": y.double()})


def odd_inputs(batch=2):
    return (torch.randn(batch, 8), torch.randint(0, 7, (batch, 3))), {"mask": torch.rand(batch) > 0.5, "steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 2])
def test_a_forward_that_takes_any_arguments(more, tmp_path):
    def forward(self, x, *others, scale=None, **options):
        return sum(others, self.layer(x))

    args = [torch.randn(2, 4) for _ in range(1 + more)]
    gm = fxplug.trace(small.net(forward, layer=nn.Linear(4, 4)).eval(), args)
    fxplug.export(gm, tmp_path / "model.onnx", args, to="onnx")
    model = fxplug.load_onnx(tmp_path / "model.onnx")
    torch.testing.assert_close(model(*args), gm(*args))
    with pytest.raises((FxplugError, TypeError)):
        model(*args, args[0])


@pytest.mark.slow
def test_odd_inputs_and_results_and_three_passes_with_slots(tmp_path):
    torch.manual_seed(0)
    args, kwargs = odd_inputs()
    gm = fxplug.trace(Odd().eval(), args, kwargs)
    passes = [fxplug.load_pass("lora", at="lin", rank=2, slots=2), fxplug.load_pass("lora_weight", at="out", rank=2, slots=2)]
    new = fxplug.apply(gm, *passes, fxplug.load_pass("ia3", at="lin", slots=2))
    result = fxplug.export(new, tmp_path / "odd.onnx", args, kwargs, to="onnx", options={"opset": 18})
    model = fxplug.load_onnx(result.path)
    assert model.manifest["opset"] == 18 and result.notes[0] == "the result is a dict instead of a Out"
    sizes = [(f"{name}.lora_{half}.weight", size) for name in ("lin", "out") for half, size in (("A", (1, 8)), ("B", (8, 1)))]
    halves, gates = {name: torch.randn(size) for name, size in sizes}, torch.randn(8, 1)
    for adapters in (new.adapters, model.adapters):
        adapters.load("ink", halves)
        adapters.load("gates", {"base_model.model.lin.ia3_l": gates}, config={"peft_type": "IA3"})
    for what in (None, "ink", {"ink": -0.3}, "gates", {"ink": 1.0, "gates": -0.3}):
        for adapters in (new.adapters, model.adapters):
            adapters.use(what)
        args, kwargs = odd_inputs(5)
        out, wanted = model(*args, **kwargs), new(*args, **kwargs)
        torch.testing.assert_close(out["a"], wanted.a.detach(), **CLOSE)
        rest = out["rest"]
        dtypes = {"ids": torch.int64, "free": torch.float32, "big": torch.bool, "half": torch.float16, "i8": torch.int8}
        assert all(rest[name].dtype == dtype for name, dtype in dtypes.items()) and rest["d"].dtype == torch.float64
        assert (rest["count"], rest["share"], rest["flag"], rest["text"]) == (5, 2.5, True, "t") and "none" not in out
        assert torch.equal(rest["twice"][0], rest["twice"][1]) and torch.equal(rest["ids"], args[1])
        assert rest["ids"].data_ptr() != args[1].data_ptr()
    with pytest.raises(SpecError, match="lora_weight.* change weights .* which all samples of a batch share"):
        model.adapters.use(["ink", None])
    with pytest.raises(FxplugError, match="timestep is 7; this model was exported with 0.5 for it: export it again"):
        model(*args, 7, **kwargs)
    with pytest.raises(FxplugError, match="steps is 2; this model was exported with 3"):
        model(*args, **{**kwargs, "steps": 2})


class Eigen(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x @ x.mT)


def test_an_operation_that_onnx_lacks_is_told_with_its_place(tmp_path):
    x = torch.randn(2, 4, 4)
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Eigen()), nn.Linear(4, 4)).eval(), x)
    (tmp_path / "old.onnx").write_bytes(b"as it was")
    said = r"ONNX \(opset 20\) does not support aten._linalg_eigh.default at '1.0': replace .*to aoti or pt2"
    with pytest.raises(FxplugError, match=said):
        fxplug.export(gm, tmp_path / "old.onnx", x, to="onnx")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("old.onnx", b"as it was")]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)


class Nothing(nn.Module):
    def forward(self, x):
        return {"three": 3}


@pytest.mark.parametrize(
    "model, message",
    [
        (Counting(), "a call of this module changes count, and an ONNX model cannot"),
        (Spectrum(), "is torch.complex64, and ONNX has no complex numbers"),
        (Nothing(), "this module returns no tensors"),
    ],
)
def test_what_no_onnx_model_does(tmp_path, model, message):
    x = torch.randn(2, 4)
    gm = fxplug.trace(model.eval(), x)
    with pytest.raises(FxplugError, match=message):
        fxplug.export(gm, tmp_path, x, to="onnx")
    assert not list(tmp_path.iterdir()) and not dict(gm.named_buffers()).get("count", torch.zeros(1)).any()


def test_what_cannot_be_exported(tmp_path, monkeypatch, made):
    x = torch.randn(2, 4)
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4)).eval(), x)
    for options, message in [({"opset": 17}, "opset must be 18 to 23, not 17"), ({"opsets": 18}, "no option 'opsets'")]:
        with pytest.raises(FxplugError, match=message):
            fxplug.export(gm, tmp_path, x, to="onnx", options=options)
    with pytest.raises(FxplugError, match="the module is in training mode, .* export module.eval()"):
        fxplug.export(fxplug.trace(nn.Linear(4, 4).train(), x), tmp_path, x, to="onnx")
    with torch.device("meta"):
        meta = fxplug.trace(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    with pytest.raises(FxplugError, match="on the meta device and has no values"):
        fxplug.export(meta, tmp_path, torch.randn(2, 4, device="meta"), to="onnx")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FxplugError, match=r"export to onnx needs onnx, which is not installed: pip install 'fxplug\[onnx\]'"):
        fxplug.export(gm, tmp_path, x, to="onnx")
    with pytest.raises(FxplugError, match=r"load_onnx needs onnxruntime, which is not installed: pip install 'fxplug\[onnx\]'"):
        fxplug.load_onnx(made[1])
    assert not list(tmp_path.iterdir())


class Short(nn.Module):
    def forward(self, x):
        return x.float().mul(2).bfloat16()


@pytest.mark.slow
def test_numbers_that_numpy_does_not_have(tmp_path):
    x = torch.randn(3, 4).bfloat16()
    model = fxplug.load_onnx(fxplug.export(fxplug.trace(Short().eval(), x), tmp_path, x, to="onnx").path)
    assert torch.equal(model(x[:2]), Short()(x[:2]))
    model = fxplug.load_onnx(fxplug.export(fxplug.trace(Short().eval(), x.float()), tmp_path, x.float(), to="onnx").path)
    assert torch.equal(model(x.float().numpy()), Short()(x))


def test_a_mistake_in_the_translation_is_told(tmp_path, monkeypatch):
    x = torch.randn(2, 4)
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4)).eval(), x)
    translated = onnx_writer.translate

    def mistaken(*args):
        model = translated(*args)
        (matrix,) = (value for name, value in model.graph.initializers.items() if name.endswith("weight"))
        matrix.const_value = onnx_ir.tensor(np.zeros((4, 4), np.float32), name=matrix.name)
        return model

    monkeypatch.setattr(onnx_writer, "translate", mistaken)
    with pytest.raises(FxplugError, match="the ONNX model differs from the module by .*, in result 0 for the example inputs"):
        fxplug.export(gm, tmp_path, x, to="onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_example_that_does_not_fit_the_choice_of_adapters(pair, tmp_path):
    module, _ = pair
    module.adapters.use(["old", None, "old"])
    result = fxplug.export(module, tmp_path, inputs(), {"shift": torch.randn(2, 6)}, to="onnx")
    assert result.notes[-1].startswith("it was not checked, because the module fails on the example inputs: adapters")
    same(fxplug.load_onnx(result.path), module, batch=3)


# --- files


def changed(path, target, **facts):
    """The model again with other metadata and a right seal, as somebody would make it who means harm."""
    model = onnx.load(path)
    kept = {entry.key: entry.value for entry in model.metadata_props}
    text = facts.pop("text", None) or json.dumps({**json.loads(kept[METADATA]), **facts})
    del model.metadata_props[:]
    model.metadata_props.add(key=METADATA, value=text)
    target.write_bytes(seal(model.SerializeToString()))
    return target


BANK = {"path": "lin", "block": "lora.lin.Lora", "kind": "Linear", "slots": 3, "rank": 2, "groups": 1, "shape": [6, 4]}


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"format": 2, "fxplug": "9.9"}, "has format 2, written by fxplug 9.9; this version reads up to 1"),
        ({"signature": {"parameters": 3}}, "the signature in the package cannot be read"),
        ({"inputs": ["image"]}, "its metadata and its graph differ in"),
        ({"inputs": ["image", "image", "ids", "more_scale", "shift"]}, "it has 5 inputs, and its signature 4"),
        ({"inputs": [1, 2]}, "in its manifest is not valid"),
        ({"outputs": ["add_5"]}, "its metadata and its graph differ in"),
        ({"outputs": []}, "in its manifest is not valid"),
        ({"live": ["conv.weight"]}, "its metadata and its graph differ in|is at 'lora"),
        ({"live": ["nowhere"]}, "it has no 'nowhere', which its metadata lists"),
        ({"names": {}}, "in its manifest is not valid"),
        ({"names": {"lora": ["a"]}}, "the table of 'lora' must have"),
        ({"names": {"lora": ["a" * 129, "", ""]}}, "in its manifest is not valid"),
        ({"names": {"lora": ["\ud800", "", ""]}}, "in its manifest is not valid"),
        ({"banks": {"lora": [BANK | {"slots": 10**12}]}}, "the slots in the package cannot be read"),
        ({"banks": {"lora": [BANK | {"block": "../x"}]}}, "the slots in the package cannot be read"),
        ({"banks": {"lora": [{"path": "x"}]}}, "banks.lora.0.block in its manifest is not valid"),
        ({"where": {"lora.lin.Lora.up.weight": "gone"}}, "is at 'gone', which is not among its tensors"),
        ({"views": {"x": {"of": "gone", "shape": [2], "stride": [1], "start": 0}}}, "views in its manifest is not valid"),
        ({"data": {"name": "../../secret.data", "sha256": "0" * 64}}, "in its manifest is not valid"),
        ({"data": {"name": "model.data", "sha256": "0" * 64}}, "model.data does not exist"),
        ({"text": "[" * 100_000}, "is not JSON, or nested more than 64 deep"),
        ({"text": '{"format": 1, "format": 1}'}, "has the key 'format' twice"),
        ({"text": "{}"}, "has the format .*, which is not a version"),
        ({"text": '{"format": NaN}'}, "has NaN, which is not JSON"),
    ],
)
def test_hostile_metadata(made, tmp_path, facts, message):
    with pytest.raises(ArtifactError, match=message) as caught:
        fxplug.load_onnx(changed(made[1], tmp_path / "other.onnx", **facts))
    assert "other.onnx" in str(caught.value) or "model.data" in str(caught.value)


def test_metadata_that_is_huge(made, tmp_path):
    file = changed(made[1], tmp_path / "huge.onnx", text=" " * (1 << 20))
    with pytest.raises(ArtifactError, match="the limit is 65536; fxplug.Limits can raise it"):
        fxplug.load_onnx(file, limits=fxplug.Limits(json=1 << 16))


def test_a_file_that_is_not_as_it_was_exported(made, tmp_path):
    data, file = made[1].read_bytes(), tmp_path / "other.onnx"
    rng = np.random.default_rng(0)
    for at in (0, 1, 8, len(data) - 1, len(data) - 70, *rng.integers(0, len(data), 40)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(flipped)
        with pytest.raises(ArtifactError, match="other.onnx"):
            fxplug.load_onnx(file)
    for end in (0, 1, 100, len(data) // 2, len(data) - 83, len(data) - 1):
        file.write_bytes(data[:end])
        with pytest.raises(ArtifactError, match="other.onnx"):
            fxplug.load_onnx(file)
    file.write_bytes(data + b"\0")
    with pytest.raises(ArtifactError, match="other.onnx"):
        fxplug.load_onnx(file)
    model = onnx.load(made[1])
    (bias,) = (each for each in model.graph.initializer if each.name == "lin.bias")
    bias.raw_data = bytes(len(bias.raw_data))
    onnx.save(model, file)
    with pytest.raises(ArtifactError, match="has changed since it was exported, or is damaged: export it again"):
        fxplug.load_onnx(file)
    del model.metadata_props[:]
    onnx.save(model, file)
    with pytest.raises(ArtifactError, match="it lacks fxplug's metadata; run it with onnxruntime.InferenceSession"):
        fxplug.load_onnx(file)


def test_onnxruntime_does_not_take_it(made, tmp_path):
    model = onnx.load(made[1])
    model.graph.node[0].op_type = "Nonsense"
    kept = next(entry.value for entry in model.metadata_props if entry.key == METADATA)
    del model.metadata_props[:]
    model.metadata_props.add(key=METADATA, value=kept)
    (tmp_path / "odd.onnx").write_bytes(seal(model.SerializeToString()))
    with pytest.raises(ArtifactError, match="odd.onnx cannot be run by onnxruntime .*Nonsense"):
        fxplug.load_onnx(tmp_path / "odd.onnx")


def test_providers_and_options_of_onnxruntime(made):
    with pytest.raises(FxplugError, match=r"no execution provider 'CPUExecutionProvidr' here"):
        fxplug.load_onnx(made[1], providers=["CPUExecutionProvidr"])
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    for _ in range(2):
        model = fxplug.load_onnx(made[1], providers=[("CPUExecutionProvider", {})], options=options)
        assert model.session.get_session_options().intra_op_num_threads == 1


# --- weights beside


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.two(self.one(x).relu())


@pytest.fixture(scope="module")
def wide_module():
    torch.manual_seed(0)
    x = torch.randn(2, 32)
    new = fxplug.apply(fxplug.trace(Wide().eval(), x), fxplug.load_pass("lora", rank=8, slots=3))
    return new, x, {"one.lora_A.weight": torch.randn(4, 32) * 0.1, "one.lora_B.weight": torch.randn(64, 4) * 0.1}


@pytest.fixture
def wide(wide_module):
    return copy.deepcopy(wide_module)


def write_wide(wide, folder, scale=1.0):
    new, x, _ = wide
    with torch.no_grad():
        new.one.weight.mul_(scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_writer, "INLINE", 0)
        return fxplug.export(new, folder / "wide.onnx", x, to="onnx").path


@pytest.fixture(scope="module")
def written(wide_module, tmp_path_factory):
    return write_wide(wide_module, tmp_path_factory.mktemp("wide"))


@pytest.fixture
def path(written, tmp_path):
    """A model with its weights beside it."""
    shutil.copytree(written.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / written.name


@pytest.mark.slow
def test_weights_beside_the_model(wide, path, tmp_path, monkeypatch):
    new, x, ink = wide
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 2 and names[0] == "wide.onnx" == path.name and is_data_of(names[1], "wide.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    model = fxplug.load_onnx(path)
    for adapters in (new.adapters, model.adapters):
        adapters.load("ink", ink)
        adapters.use(["ink", None, "ink"])
    x = torch.randn(3, 32)
    torch.testing.assert_close(model(x), new(x).detach(), **CLOSE)
    new.adapters.use(None)
    new.adapters.unload("ink")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "l.onnx").symlink_to(path)
    torch.testing.assert_close(fxplug.load_onnx(tmp_path / "link" / "l.onnx")(x), new(x).detach(), **CLOSE)
    monkeypatch.chdir(tmp_path)
    torch.testing.assert_close(fxplug.load_onnx("wide.onnx")(x), new(x).detach(), **CLOSE)
    # another export leaves nothing of the first, and what was loaded goes on
    write_wide(wide, tmp_path, scale=2.0)
    again = sorted(p.name for p in tmp_path.iterdir() if p.is_file())
    assert len(again) == 2 and again[1] != names[1]
    torch.testing.assert_close(fxplug.load_onnx(path)(x), new(x).detach(), **CLOSE)
    assert model(x).isfinite().all()


def test_weights_that_are_not_those_of_the_export(path, tmp_path):
    (data,) = (p for p in tmp_path.iterdir() if p.suffix == ".data")
    whole = data.read_bytes()
    for other in (whole[:-1], whole + b"\0", b"", bytes([whole[0] ^ 1]) + whole[1:], whole[:-1] + bytes([whole[-1] ^ 128])):
        data.write_bytes(other)
        with pytest.raises(ArtifactError, match=r"\.data has changed since it was exported, is damaged"):
            fxplug.load_onnx(path)
    data.rename(tmp_path / "renamed.data")
    with pytest.raises(ArtifactError, match=r"wide.onnx.*\.data does not exist: no such file"):
        fxplug.load_onnx(path)
    data.mkdir()
    with pytest.raises(ArtifactError, match=r"\.data cannot be read: it is a folder"):
        fxplug.load_onnx(path)


def test_an_export_that_ends_in_the_middle_leaves_the_old_model(path, tmp_path, monkeypatch):
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    replace = os.replace

    def killed(source, target):
        if str(target).endswith("wide.onnx"):
            raise KeyboardInterrupt
        replace(source, target)

    def put(text):
        with replace_file(path, make_reporter(path), onnx_writer.put) as name:
            name.write_text(text)
            name.with_name(onnx_file.make_data_name("wide.onnx", text * 16)).write_text(text)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        put("a")
    monkeypatch.setattr(os, "replace", replace)
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before and len(after) == 3  # the new weights are whole, and nobody's
    fxplug.load_onnx(path)
    (tmp_path / "wide.onnx.notes.data").touch()
    put("b")
    left = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert left == {"wide.onnx": "b", f"wide.onnx.{'b' * 16}.data": "b", "wide.onnx.notes.data": ""}


@pytest.mark.slow
def test_a_disk_that_is_full(wide, path, tmp_path):
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, hard))
    try:
        with pytest.raises(FxplugError, match="wide.onnx cannot be written: the file would be too large"):
            write_wide(wide, tmp_path, scale=0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_weights_of_the_slots_are_said_to_be_elsewhere(path, tmp_path):
    lies = [("offset", "99999999"), ("offset", "-1"), ("offset", "1" * 30), ("length", "4"), ("location", "../x.data")]
    for key, value in lies:
        model = onnx.load(path, load_external_data=False)
        each = next(e for e in model.graph.initializer if e.name.startswith("lora.") and e.external_data)
        next(entry for entry in each.external_data if entry.key == key).value = value
        kept = next(entry.value for entry in model.metadata_props if entry.key == METADATA)
        del model.metadata_props[:]
        model.metadata_props.add(key=METADATA, value=kept)
        (tmp_path / "other.onnx").write_bytes(seal(model.SerializeToString()))
        with pytest.raises(ArtifactError, match="other.onnx cannot be read: .*'lora"):
            fxplug.load_onnx(tmp_path / "other.onnx")


def test_the_seal_is_metadata_for_every_reader_of_onnx(made):
    data = made[1].read_bytes()
    entries = {entry.key: entry.value for entry in onnx.load_from_string(data).metadata_props}
    assert entries["fxplug.sha256"] == hashlib.sha256(data[: -len(seal(b""))]).hexdigest() and METADATA in entries
    assert str(Path(fxplug.__file__).parent.parent) not in data.decode("latin1")  # nothing of the machine


class Masked(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.q, self.o, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x, mask):
        if self.kind == "softmax":
            scores = (x @ x.transpose(-1, -2)).masked_fill(~mask[:, None], torch.finfo(x.dtype).min)
            return self.o(scores.softmax(-1) @ x)
        x = self.q(x)[:, None]
        return self.o(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, None])[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ours", "torch.onnx's"])
@pytest.mark.parametrize("kind", ["attention", "softmax"])
def test_a_sample_that_sees_nothing_is_tried(kind, form, tmp_path, monkeypatch):
    torch.manual_seed(0)
    if form == "torch.onnx's":
        monkeypatch.setattr(onnx_writer, "decompose", lambda program: program)
    net, x, mask = Masked(kind).eval(), torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)
    gm = fxplug.trace(net, (x, mask))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exported = fxplug.export(gm, tmp_path / "masked.onnx", (x, mask), to="onnx")
    model = fxplug.load_onnx(tmp_path / "masked.onnx")
    torch.testing.assert_close(torch.as_tensor(model(x, mask)), net(x, mask))
    mask[1] = False
    equal = torch.allclose(torch.as_tensor(model(x, mask)), net(x, mask), atol=1e-5)
    said = [str(w.message) for w in caught if "nothing but False in 'mask'" in str(w.message)]
    assert bool(said) is not equal and equal is (kind == "softmax" or form == "ours")
    assert equal or any(said[0] in note for note in exported.notes)


def test_a_sample_that_sees_nothing_may_be_what_onnxruntime_fails_on(tmp_path, monkeypatch):
    x, mask, calls, run = torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool), [], OnnxModel.__call__

    def call(self, *args):
        calls.append(args)
        if not args[1].all():
            raise ArtifactError("NaN in Softmax")
        return run(self, *args)

    monkeypatch.setattr(OnnxModel, "__call__", call)
    gm = fxplug.trace(Masked("softmax").eval(), (x, mask))
    with pytest.warns(UserWarning, match="it fails where a sample has nothing but False in 'mask'.*NaN in Softmax"):
        exported = fxplug.export(gm, tmp_path / "masked.onnx", (x, mask), to="onnx")
    assert sum(not given[1].all() for given in calls) == 1 and exported.notes


class Ids(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids, x):
        return self.out(self.table(ids) * x)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda ids, x: not x.any(), "by .* where all numbers are 0"),
        (lambda ids, x: ids.max() == 8 and ids.min() == 0, "by .* where 'ids' has the numbers of the first and the last row"),
        (lambda ids, x: False, ""),
    ],
)
def test_other_values_are_tried(wrong, said, tmp_path, monkeypatch):
    ids, x, run = torch.tensor([[1, 2, 3]]), torch.randn(2, 3, 4), OnnxModel.__call__
    monkeypatch.setattr(OnnxModel, "__call__", lambda self, *args: run(self, *args) + (1 if wrong(*args) else 0))
    gm = fxplug.trace(Ids().eval(), (ids, x))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        notes = fxplug.export(gm, tmp_path, (ids, x), to="onnx").notes[1:]
    assert [str(w.message) for w in caught if "differs from the module" in str(w.message)] == list(notes)
    assert len(notes) == bool(said) and all(re.fullmatch(f"it differs from the module {said}: do not .*", n) for n in notes)
