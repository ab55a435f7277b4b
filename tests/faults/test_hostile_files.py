"""Files from strangers: a fixed sample of the random attacks, and each way in which a file is none."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import zipfile
from pathlib import Path

import fuzz_adapters
import fuzz_configs
import fuzz_files
import pytest
import small
import torch
from hostile_files import attacked
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fxplug
from fxplug import Limits
from fxplug.core import reading, weight_files
from fxplug.core.errors import ArtifactError, FxplugError, SpecError, did_you_mean
from fxplug.core.spec.addresses import match_endings
from fxplug.core.spec.yaml_source import parse_yaml


@pytest.mark.parametrize("attack", [fuzz_adapters.fuzz_adapters, fuzz_configs.fuzz_configs, fuzz_files.fuzz_files])
def test_a_sample_of_the_attacks(attack, capsys):
    assert attack(50, 7) == [], capsys.readouterr().out


def nested(value):
    if isinstance(value, dict):
        return {key: nested(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [nested(inner) for inner in value]
    return (value.dtype, value.stride(), value.float().tolist()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("new", [True, False], ids=["archive", "stream"])
def test_what_torch_saves_is_read_as_torch_reads_it(new, tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    value = {
        "view": base.t()[1:],
        "base": base,
        "parameter": torch.nn.Parameter(torch.ones(2).bfloat16()),
        "none": torch.zeros(0, 3),
        "plain": [1, -2, 2**70, 2.5, None, True, "x" * 300, (1, (2,))],
        "size": torch.Size([2, 3]),
        "scalar": torch.tensor(3),
        "state": torch.nn.BatchNorm1d(2).state_dict(),
        "optimizer": optimizer.state_dict(),
        "bool": torch.tensor([True, False]),
    }
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    found, _ = weight_files.read(tmp_path / "a.pt")
    assert nested(found) == nested(torch.load(tmp_path / "a.pt", weights_only=True))
    assert found["view"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()
    shapes, _ = weight_files.read(tmp_path / "a.pt", most=-1)
    assert shapes["view"].is_meta and shapes["view"].shape == found["view"].shape


def test_safetensors_are_read_as_the_library_reads_them(tmp_path):
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8]
    save_file(
        {str(d): torch.ones(2, 3).to(d) for d in dtypes} | {"e": torch.zeros(0, 2), "s": torch.tensor(1.0)},
        tmp_path / "a.safetensors",
    )
    found, _ = weight_files.read(tmp_path / "a.safetensors")
    assert nested(found) == nested(load_file(tmp_path / "a.safetensors"))


class Reduced:
    def __init__(self, *how):
        self.how = how

    def __reduce__(self):
        return self.how


def archive(data, name="a/data.pkl"):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(name, data)
    return made.getvalue()


def saved(value, method=zipfile.ZIP_STORED, pickled=lambda data: data, tensor=lambda data: data):
    """What `torch.save` writes of a value, compressed, or with another pickle or other bytes of tensors."""
    plain, made = io.BytesIO(), io.BytesIO()
    torch.save(value, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(made, "w", method) as new:
        for name in old.namelist():
            change = pickled if name.endswith("data.pkl") else tensor if "/data/" in name else lambda data: data
            new.writestr(name, change(old.read(name)))
    return made.getvalue()


def cyclic():
    value = [1]
    value.append(value)
    return value


def header(text):
    return struct.pack("<Q", len(text)) + text


FILES = {
    "a call": pickle.dumps(Reduced(os.system, ("true",)), 2),
    "a call in an archive": saved({"a": Reduced(os.system, ("true",))}),
    "compressed": saved({"a": torch.zeros(10**6)}, zipfile.ZIP_DEFLATED),
    "a shape of gigabytes": saved({"a": torch.ones(5, 3)}, pickled=lambda data: data.replace(b"K\5K\3", b"J\0\0\0\x0fK\3")),
    "a shape below zero": saved({"a": torch.ones(5, 3)}, pickled=lambda data: data.replace(b"K\5K\3", b"J\0\0\0\xffK\3")),
    "a list in itself": saved(cyclic()),
    "a sparse tensor": saved({"a": torch.eye(2).to_sparse()}),
    "a pickle that ends": saved({"a": torch.ones(5)}, pickled=lambda data: data[:-20]),
    "an archive that ends": saved({"a": torch.ones(500)})[:-700],
    "is outside": archive(b"x", name="../../a/data.pkl"),
    "no data.pkl": archive(b"x", name="a/b"),
    "many brackets": header(b"[" * 10**6),
    "many objects": header(b'{"a":[' + b"{}," * 1_000_000 + b"{}]}"),
    "digits": header(b'{"a":' + b"9" * 10**6 + b"}"),
    "a header of exabytes": struct.pack("<Q", 2**63) + b"{}",
    "a shape of exabytes": header(b'{"a":{"dtype":"F32","shape":[1000000000,1000000000],"data_offsets":[0,4]}}') + b"\0" * 4,
    "no bytes for a shape": header(b'{"a":{"dtype":"F32","shape":[0,4611686018427387904,9],"data_offsets":[0,0]}}'),
    "twice": header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}') + b"\0" * 4,
    "overlap": header(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    + b"\0" * 4,
    "gzip": b"\x1f\x8b" + b"\0" * 99,
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "HTML": b"<!DOCTYPE html><html>",
    "empty": b"",
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_no_weights(name, suffix, tmp_path):
    file = tmp_path / f"a{suffix}"
    file.write_bytes(FILES[name])
    for _ in range(2):  # what is imported once is there the second time
        _, refused, wrong = attacked(lambda: weight_files.read(file), len(FILES[name]))
    assert isinstance(refused, ArtifactError) and not wrong, wrong
    assert str(file) in str(refused)


@pytest.mark.parametrize("expanded", [torch.zeros(1).expand(10**6, 10**6), [torch.zeros(10**6).view(-1)] * 1])
def test_tensors_have_no_more_elements_than_bytes(expanded, tmp_path):
    torch.save({"a": expanded, "b": [torch.zeros(1)] * 3}, tmp_path / "a.pt")
    if isinstance(expanded, list):
        assert weight_files.read(tmp_path / "a.pt")
        return
    with pytest.raises(ArtifactError, match="more elements than the file"):
        weight_files.read(tmp_path / "a.pt")


@pytest.mark.parametrize("most", [float("inf"), 8192])
def test_a_file_whose_tensors_are_shorter_than_it_says_is_refused(most, tmp_path):
    (tmp_path / "a.pt").write_bytes(saved({"a": torch.ones(5000)}, tensor=lambda data: data[:100]))
    with pytest.raises(ArtifactError, match="a.pt cannot be read: it is truncated or damaged"):
        weight_files.read(tmp_path / "a.pt", most=most)


def test_what_was_read_is_independent_of_the_file(tmp_path):
    for most in (float("inf"), 8192):
        torch.save({"a": torch.ones(5)}, tmp_path / "a.pt")
        found, _ = weight_files.read(tmp_path / "a.pt", most=most)
        (tmp_path / "a.pt").write_bytes(b"")
        assert torch.equal(found["a"], torch.ones(5)) and not found["a"].requires_grad


def test_values_in_many_places_are_taken_once(tmp_path):
    value = [torch.ones(2)]
    for _ in range(60):
        value = [value, value]
    torch.save(value, tmp_path / "a.pt")
    found, _ = weight_files.read(tmp_path / "a.pt")
    assert found[0] is found[1]


def test_what_is_no_regular_file_is_not_opened(tmp_path, monkeypatch):
    made = {
        "folder": os.mkdir,
        "pipe": os.mkfifo,
        "loop": lambda p: os.symlink(p, p),
        "zero": lambda p: os.symlink("/dev/zero", p),
    }
    for name, make in made.items():
        make(tmp_path / name)
        with pytest.raises(ArtifactError, match=f"{name} cannot be read"):
            reading.read_bytes(tmp_path / name, 100)
    for name in ("nul\0", "x" * 5000, "none", "folder/none"):
        with pytest.raises(ArtifactError):
            reading.read_bytes(tmp_path / name, 100)
    (tmp_path / "file").write_bytes(b"x" * 101)
    with pytest.raises(ArtifactError, match="101 bytes; the limit is 100"):
        reading.read_bytes(tmp_path / "file", 100)
    with pytest.raises(ArtifactError, match="changed while it was read"), reading.open_regular_file(tmp_path / "file"):
        (tmp_path / "file").write_bytes(b"y")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ArtifactError, match="file cannot be read: permission denied"):
        reading.read_bytes(tmp_path / "file", 100)


@pytest.mark.parametrize(
    "text",
    [
        "(((.+)+)+)+!", ".*" * 12 + "!", "(a|a)(a|aa)" * 30 + "!", "(?i)" + "[\u0100-\uffff]" * 400, "(",
        "a{9" + "9" * 20 + "}", "(?x)(a+) +!", "(?x)(a+)\n*!", "(a+)(?#c)+!", "(?x:(a+) +!)", "(?-x:(?sx:(a+) +))!",
    ],
)  # fmt: skip
def test_a_pattern_of_a_strangers_file_ends(text):
    _, refused, wrong = attacked(lambda: match_endings([{text: 1}], ["a" * 60, "blocks.0.attn"], ArtifactError))
    assert not wrong, wrong
    assert isinstance(refused, ArtifactError)


@pytest.mark.parametrize(
    "text", [r".*blocks.*attn.*to_q", r"^(?!.*blocks\.0).*to_q$", r"(?P<x>.*)\.to_(?:q|k)", r".*(attn1|attn2)\.to_q"]
)
def test_a_pattern_as_people_write_them_is_read(text):
    blocks = [f"down_blocks.{i}.attentions.{j}.transformer_blocks.{k}" for i in range(9) for j in range(8) for k in range(10)]
    names = [f"{block}.attn1.to_q" for block in blocks]
    wanted = {name for name in names if re.fullmatch(text, name)}
    assert wanted and match_endings([{text: 1}], names, ArtifactError)[0].keys() == wanted


def test_limits_can_be_raised():
    text = "- 1\n" * 20
    with pytest.raises(SpecError, match="more than 10 values"):
        parse_yaml(text, limits=Limits(entries=10))
    assert len(parse_yaml(text, limits=Limits(entries=50)).data) == 20


def test_the_nearest_name_is_found_in_bounded_time():
    assert not attacked(lambda: did_you_mean("a" * 10**6, ["a" * 10**6] * 3))[2]
    assert not attacked(lambda: did_you_mean("ab" * 80, ["ba" * 80 + str(i) for i in range(10_000)]))[2]
    assert did_you_mean("blocks.7.attn.to_qq", [f"blocks.{i}.attn.to_{x}" for i in range(500) for x in "qkv"]) == (
        " (did you mean 'blocks.7.attn.to_q'?)"
    )


def test_every_limit_is_told_in_security_md():
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (Path(__file__).parents[2] / "SECURITY.md").read_text(), re.M))
    del told["Limits"]
    code = (Path(__file__).parents[2] / "fxplug" / "core" / "errors.py").read_text()
    assert told == dict(re.findall(r"^    (\w+): \w+ = (.+?)  #", code, re.M))


def test_tensors_come_by_their_names_wherever_their_bytes_are(tmp_path):
    """The names are in the order of the header, and a byte that is neither 0 nor 1 is no odd bool."""
    header = b'{"late":{"dtype":"I16","shape":[2],"data_offsets":[3,7]},'
    header += b'"none":{"dtype":"F32","shape":[0],"data_offsets":[3,3]},'
    header += b'"flags":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}'
    data = struct.pack("<Q", len(header)) + header + bytes([0, 1, 255]) + struct.pack("<2h", -7, 9)
    (tmp_path / "odd.safetensors").write_bytes(data)
    found, _ = weight_files.read(tmp_path / "odd.safetensors")
    assert list(found) == ["late", "none", "flags"] and found["late"].tolist() == [-7, 9] and found["none"].shape == (0,)
    assert torch.equal(found["flags"], torch.tensor([False, True, True])) and bytes(found["flags"].numpy()) == b"\0\1\1"
    head = weight_files.read_header(io.BytesIO(data), reading.make_reporter("odd"))
    assert [name for name, _ in head.in_file()] == ["flags", "none", "late"]
    pieces: list[bytes] = []
    file = io.BytesIO(data)
    head = weight_files.read_header(file, reading.make_reporter("odd"))
    tensors = weight_files.read_tensors(file, head, reading.make_reporter("odd"), lambda piece: pieces.append(bytes(piece)))
    assert len(list(tensors)) == 3
    assert head.start + b"".join(pieces) == data
    file = io.BytesIO(data)
    head = weight_files.read_header(file, reading.make_reporter("odd"))
    file.truncate(len(data) - 1)
    with pytest.raises(ArtifactError, match="odd was truncated while it was read"):
        list(weight_files.read_tensors(file, head, reading.make_reporter("odd")))


def test_what_the_reader_of_safetensors_gets_wrong(tmp_path):
    """Why there is one of our own: a loaded tensor is the file's memory there, and a name that is there twice is taken."""
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    with safe_open(file, "pt") as opened:
        theirs = opened.get_tensor("a")
    ours = weight_files.read(file)[0]["a"]
    with file.open("r+b") as out:
        out.seek(-4, os.SEEK_END)
        out.write(struct.pack("<f", 7.0))
    assert theirs.tolist() == [0, 0, 0, 7] and ours.tolist() == [0, 0, 0, 0]
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with safe_open(file, "pt") as opened:
        assert list(opened.keys()) == ["a"]
    with pytest.raises(ArtifactError, match="twice"):
        weight_files.read(file)


@pytest.mark.parametrize("length", [128, 384, 640, 896])
def test_a_header_whose_length_begins_as_a_pickle_does_is_a_header(length, tmp_path):
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(length)
    (tmp_path / "a.safetensors").write_bytes(length.to_bytes(8, "little") + text + b"\0\0\x80\x3f")
    found, _ = weight_files.read(tmp_path / "a.safetensors")
    assert found["a"].item() == 1.0


class Wrapped(torch.Tensor):
    """A tensor with a dispatch of its own, as quantised and sharded ones have."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("not by these ways")


def ragged(value):
    return torch.nested.nested_tensor([value[0], value[1][:3]])


ODD_TENSORS = {
    "meta": (lambda t: t.to("meta"), "on the meta device and has no values"),
    "sparse": (torch.Tensor.to_sparse, "is sparse .torch.sparse_coo.: convert it with to_dense"),
    "rows": (torch.Tensor.to_sparse_csr, "is sparse .torch.sparse_csr.: convert it with to_dense"),
    "wrapped": (lambda t: t.as_subclass(Wrapped), "is a Wrapped, which is not a plain tensor: convert it with dequantize"),
    "nested": (ragged, "is a nested tensor"),
    "whole numbers": (torch.Tensor.int, "is torch.int32; an adapter's weights must be floating point"),
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_numbers_are_refused_in_every_place_and_change_nothing(kind, tmp_path):
    make, text = ODD_TENSORS[kind]
    gm, (x,), _ = small.plain_vit()
    sizes = {"A": (2, 96), "B": (288, 2)}
    state = {f"base_model.model.blocks.0.attn.qkv.lora_{half}.weight": make(torch.ones(size)) for half, size in sizes.items()}
    banked = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.attn.qkv", rank=2, slots=1))
    trained = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.attn.qkv", rank=2))
    with pytest.raises(FxplugError, match=text):
        banked.adapters.load("ink", state)
    with pytest.raises(FxplugError, match=text):
        fxplug.load_adapter(trained, state)
    if kind != "meta":  # shapes are all that these two read
        with pytest.raises(FxplugError, match=text):
            fxplug.pass_for(state, gm)
        with pytest.raises(FxplugError, match=text):
            fxplug.inspect_adapter(state, gm)
    assert banked.adapters.names == [] and torch.equal(banked(x), gm(x)) and torch.equal(trained(x), gm(x))
    trained.get_submodule("lora.blocks.0.attn.qkv.Lora.up")._parameters["weight"] = make(torch.ones(288, 2))
    with pytest.raises(FxplugError, match=text):
        fxplug.save_adapter(trained, tmp_path / "ink")
    assert not (tmp_path / "ink").exists()


def zipped():
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("lora.safetensors", b"1234")
    return made.getvalue()


# what people have where weights should be, and what it is called where it is met
KNOWN = {
    "gguf": (b"GGUF\3" + b"\0" * 99, "it is a GGUF file, whose weights are quantised: use the .safetensors"),
    "onnx": (b"\x08\x0a\x3a\x04\x12\x02me" + b"\0" * 40, "it is an ONNX file: load_onnx reads one that export wrote"),
    "zip": (zipped(), "a zip archive|a zip archive without a 'data.pkl'"),
    "text": (b"a note about the adapter\n" * 9, "it is text, not weights"),
    "json": (b'{"error": "Repository not found"}', "it is JSON text, such as a configuration or a server's error"),
    "html": (b"<!DOCTYPE html>\n<html><body>401</body></html>", "it is an HTML page: the download failed, or needs a login"),
    "pickle": (pickle.dumps({"a": [1, 2]}), "a file of pickle.dump|written by torch.save"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of git-lfs: .* 'git lfs pull'"),
    "picture": (b"\x89PNG\r\n\x1a\n" + b"\0" * 99, "it is a picture .PNG."),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".ckpt"])
@pytest.mark.parametrize("kind", KNOWN)
def test_a_file_of_another_kind_is_called_what_it_is(kind, suffix, tmp_path):
    data, text = KNOWN[kind]
    gm = small.plain_vit().gm
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.attn.qkv", rank=2, slots=1))
    file = tmp_path / f"ink{suffix}"
    file.write_bytes(data)
    for read in (
        lambda: new.adapters.load("ink", file), lambda: fxplug.pass_for(file, gm), lambda: fxplug.inspect_adapter(file),
        lambda: weight_files.read(file),
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match=text):
            read()
    with pytest.raises(ArtifactError, match="and load takes a folder that fxplug.save wrote"):
        fxplug.load(file)
    if kind not in ("onnx", "zip", "pickle"):
        with pytest.raises(ArtifactError, match=text):
            fxplug.load_onnx(file)
    if kind in ("html", "git-lfs", "picture"):
        fxplug.save(gm, tmp_path / "module")
        (tmp_path / "module" / "manifest.json").write_bytes(data)
        with pytest.raises(ArtifactError, match=f"manifest.json is not JSON.*{text if kind != 'picture' else ''}"):
            fxplug.load(tmp_path / "module")
