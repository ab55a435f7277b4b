"""AOTInductor packages: what was compiled once runs without the model's code, checks its calls, and takes other adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import exports_made
import pytest
import small
import torch
import unets
from exports_made import CLOSE, QUICK, adapter, inputs, same
from safetensors.torch import load_file, save_file
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError, FxplugError, SpecError
from fxplug.exports import aoti_writer, machines
from fxplug.exports import package as packages
from fxplug.exports.exporter import export
from fxplug.exports.package import load_package
from fxplug.exports.package_file import MANIFEST


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return exports_made.made("aoti", tmp_path_factory.mktemp)


@pytest.fixture
def pair(tmp_path_factory):
    """The model and a package of it in the state in which it was compiled."""
    yield from exports_made.pair_of("aoti", tmp_path_factory.mktemp)


def fill(module):
    """Adapters into all slots, half of the second for everybody; what a package has to be told."""
    state = {name: tensor for name, tensor in module.state_dict().items() if name.startswith("lora.")}
    with torch.no_grad():
        for name, tensor in state.items():
            if name.endswith("weight"):
                tensor.normal_(std=0.3)
        state["lora.gates.table.weights"].copy_(torch.tensor([0.0, 0.5, 1.0]))
    return state


@pytest.mark.slow
def test_adapters_that_were_zero_are_live(pair):
    module, package = pair
    before = same(package, module)["y"]
    state = fill(module)
    package.update(state)
    assert not torch.allclose(same(package, module)["y"], before)


@pytest.mark.slow
def test_every_constant_can_be_changed(pair, tmp_path):
    module, package = pair
    state = module.state_dict()
    assert set(package.state()) == set(state)
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.uniform_(0.1, 1)  # small, uniform and zero ones as well: nothing was worked out at compile time
    package.update({name: state[name] for name in package.state()})
    same(package, module)
    save_file({"lin.bias": torch.zeros(6, dtype=torch.float64)}, tmp_path / "bias.safetensors")
    package.update(tmp_path / "bias.safetensors")
    state["lin.bias"].zero_()
    torch.save([torch.ones(6)], tmp_path / "bias.pt")
    (tmp_path / "short.safetensors").write_bytes((tmp_path / "bias.safetensors").read_bytes()[:-1])
    for said in ("bias.pt must contain a dict of tensors", "short.safetensors is truncated", "no.pt does not exist"):
        with pytest.raises(ArtifactError, match=said):
            package.update(tmp_path / said.partition(" ")[0])
    same(package, module)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, message",
    [
        ({"lin.bas": torch.zeros(6)}, r"no constant 'lin.bas' \(did you mean 'lin.bias'\?\)"),
        ({"lin.bias": torch.zeros(5)}, r"lin.bias has the shape \(6,\) in the package, not \(5,\)"),
        ({"lin.bias": torch.full((6,), torch.nan)}, "lin.bias has values that are not finite"),
    ],
)
def test_wrong_updates_change_nothing(pair, given, message):
    module, package = pair
    with pytest.raises(FxplugError, match=message):
        package.update({"conv.bias": torch.ones(4), **given})
    same(package, module)


@pytest.mark.slow
def test_an_adapter_is_saved_as_it_was_loaded(pair, tmp_path):
    ink = adapter(tmp_path / "ink.safetensors", 2)
    for name, one in zip(("module", "package"), pair, strict=True):
        one.adapters.load("ink", ink)
        folder = one.adapters.save("ink", tmp_path / name).path
        saved, wanted = load_file(folder / "adapter_model.safetensors"), load_file(ink)
        assert saved.keys() == wanted.keys() and all(torch.equal(saved[key], wanted[key]) for key in wanted)


@pytest.mark.slow
def test_a_machine_without_model_and_compiler(made, tmp_path):
    module, path = made
    args, shift = inputs(), torch.randn(2, 6)
    torch.save((args, shift, module(*args, shift=shift)["y"].detach()), tmp_path / "call.pt")
    code = (
        "import sys, torch; from fxplug.exports.package import load_package\n"
        "package = load_package(sys.argv[1], trusted=True); args, shift, wanted = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(package(*args, shift=shift)['y'], wanted, rtol=1e-5, atol=1e-5)\n"
        "assert not {'fxplug.core.capture.tracer', 'torch._inductor', 'diffusers', 'timm'} & set(sys.modules)\n"
    )
    root = str(Path(fxplug.__file__).parent.parent)
    env = {"PATH": str(tmp_path), "PYTHONPATH": root, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", code, str(path), str(tmp_path / "call.pt")]
    done = subprocess.run(run, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def changed(path, target, **facts):
    """The package again with other entries in its manifest; `file=None` leaves the manifest out."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith(MANIFEST):
                if "file" in facts:
                    continue
                data = json.dumps({**json.loads(data), **facts}).encode()
            new.writestr(name, data)
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    "facts, message",
    [
        ({"torch": "1.13.1+cu117"}, r"by torch 1.13.1\+cu117, and this is torch .*: its code works with that version only"),
        ({"features": ["AVX9000"]}, "for a CPU with AVX9000, which this one does not have: export it again here"),
        ({"machine": "riscv64"}, "was compiled for linux riscv64, and this is linux"),
        ({"format": 2, "fxplug": "9.9"}, "has format 2, written by fxplug 9.9; this version reads up to 1"),
        ({"format": "x"}, "the format 'x', which is not a version"),
        ({"signature": {"parameters": 3}}, "the signature in the package cannot be read"),
        ({"constants": {"gone": {"dtype": "int8", "shape": [1]}}}, "the program does not have gone"),
        ({"operators": ["fxplug::product", "nowhere::fast"]}, "calls the operator nowhere::fast, which is not registered"),
        ({"banks": {"lora": [{"path": "x"}]}}, "banks.lora.0.block in its manifest is not valid"),
        ({"file": None}, "it has compiled code and no manifest; torch._inductor.aoti_load_package reads"),
    ],
)
def test_packages_for_elsewhere(made, tmp_path, facts, message):
    with pytest.raises(ArtifactError, match=message):
        load_package(changed(made[1], tmp_path / "other.pt2", **facts), trusted=True)


OLD = {"sse4_1": True, "avx2": True, "fma3": True, "avx512_f": False, "amx_tile": False, "cpu_name": "old", "l2_cache_size": 1}
NEW = {**OLD, "avx512_f": True, "avx512_vnni": True, "amx_tile": True, "clwb": True, "sse4a": True}


@pytest.mark.parametrize(
    "asked, made_on, native, needs, here, missing",
    [
        ("AVX2", OLD, True, ["avx2", "fma3", "sse4_1"], OLD, []),
        ("AVX2", OLD, True, ["avx2", "fma3", "sse4_1"], NEW, []),
        ("AVX2", NEW, True, ["avx2", "avx512_f", "avx512_vnni", "fma3", "sse4_1"], OLD, ["avx512_f", "avx512_vnni"]),
        ("AVX2", NEW, False, ["avx2"], OLD, []),  # compiled for other processors than the one it is compiled on
        ("AVX512 AVX512_VNNI AMX_TILE", NEW, False, ["amx_tile", "avx512_f", "avx512_vnni"], NEW, []),
        ("AVX512 AMX_TILE", NEW, False, ["amx_tile", "avx512_f"], OLD, ["amx_tile", "avx512_f"]),
        ("INVALID_VEC_ISA", OLD, False, [], OLD, []),
        ("INVALID_VEC_ISA", NEW, True, ["avx2", "avx512_f", "avx512_vnni", "fma3", "sse4_1"], NEW, []),
        ("ASIMD", {"neon": True, "sve": True, "lse": True, "sme2": True}, True, ["neon", "sve"], {"neon": True}, ["sve"]),
        ("VSX", {}, True, [], {}, []),
        ("AVX2", {}, True, ["avx2"], {}, []),  # a torch that does not say what a processor has
    ],
)
def test_what_code_needs_of_a_processor(asked, made_on, native, needs, here, missing):
    assert machines.list_needed_features(asked.split(), made_on, native) == needs
    assert machines.find_missing_features(needs, here) == missing


def test_packages_of_earlier_versions_say_what_they_need_in_words_of_aotinductor():
    assert machines.find_missing_features(["AVX512", "AVX512_VNNI", "AMX_TILE"], NEW) == []
    assert machines.find_missing_features(["AVX512", "AVX512_VNNI", "AMX_TILE"], {**NEW, "amx_tile": False}) == ["AMX_TILE"]
    assert machines.find_missing_features(["INVALID_VEC_ISA"], OLD) == []


@pytest.mark.slow
def test_a_package_runs_where_it_was_made(pair):
    _, package = pair
    assert machines.find_missing_features(package.manifest["features"], machines.list_capabilities()) == []


@pytest.mark.slow
def test_files_that_are_no_packages(made, tmp_path, monkeypatch):
    _, path = made
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArtifactError, match="was compiled for cpu and cannot run on cuda"):
        load_package(path, device="cuda", trusted=True)
    with pytest.raises(ArtifactError, match="was compiled for cuda, and this machine has no CUDA device"):
        load_package(changed(path, tmp_path / "cuda.pt2", device="cuda"), trusted=True)
    with pytest.raises(ArtifactError, match="none.pt2 does not exist: no such file"):
        load_package(tmp_path / "none.pt2", trusted=True)
    with pytest.raises(FxplugError, match="runners must be a whole number, 1 or more, not 0"):
        load_package(path, runners=0, trusted=True)
    data = bytearray(path.read_bytes())
    (tmp_path / "short.pt2").write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match="is damaged, or not a zip archive"):
        load_package(tmp_path / "short.pt2", trusted=True)
    data[len(data) // 2] ^= 255
    (tmp_path / "flipped.pt2").write_bytes(data)
    with pytest.raises(ArtifactError, match="is damaged: .*so' has changed since it was written"):
        load_package(tmp_path / "flipped.pt2", trusted=True)
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    program = export(gm, tmp_path / "program", torch.randn(2, 4)).path
    with pytest.raises(ArtifactError, match="it is an exported program without compiled code; torch.export.load reads it"):
        load_package(program, trusted=True)


@pytest.mark.slow
def test_other_values_than_the_examples_are_tried(tmp_path, monkeypatch):
    run, x, mask = packages.Package.__call__, torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)

    def wrong(self, x, mask):
        return run(self, x, mask) + (0 if x.any() and mask.any(-1).all() else 1)

    gm = fxplug.trace(small.net(lambda self, x, mask: self.lin(x * mask), lin=nn.Linear(4, 4)).eval(), (x, mask))
    monkeypatch.setattr(packages.Package, "__call__", wrong)
    with pytest.warns(UserWarning) as caught:
        notes = export(gm, tmp_path, (x, mask), to="aoti", options=QUICK).notes
    for note, said in zip(notes, ("all numbers are 0", "a sample has nothing but False in 'mask'"), strict=True):
        assert f"where {said}: do not give it such values" in note and any(note == str(w.message) for w in caught)


@pytest.mark.slow
def test_a_package_is_trusted_by_a_word(made):
    for given in ({}, {"trusted": False}, {"trusted": 1}, {"trusted": None}):
        with pytest.raises(ArtifactError, match=r"aoti.pt2 contains machine code.* use load_package\(path, trusted=True\)"):
            load_package(made[1], **given)


@pytest.mark.slow
def test_what_is_checked_is_what_runs(made, tmp_path, monkeypatch):
    module, path = made
    file, other = tmp_path / "swapped.pt2", tmp_path / "other.pt2"
    file.write_bytes(path.read_bytes())
    other.write_bytes(b"another file")
    check = packages.check_machine

    def swap(*args):
        check(*args)
        os.replace(other, file)

    monkeypatch.setattr(packages, "check_machine", swap)
    same(load_package(file, trusted=True), module)
    with pytest.raises(ArtifactError, match="swapped.pt2 is damaged, or not a zip archive"):
        load_package(file, trusted=True)

    def write(*args):
        check(*args)
        with file.open("r+b") as opened:
            opened.truncate(100)

    monkeypatch.setattr(packages, "check_machine", write)
    file.write_bytes(path.read_bytes())
    with pytest.raises(ArtifactError, match="swapped.pt2 is damaged: .* has changed since it was written"):
        load_package(file, trusted=True)


def temporary():
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(packages.TEMPORARY)}


@pytest.mark.slow
def test_nothing_is_left_of_a_load(made, monkeypatch):
    module, path = made
    monkeypatch.setattr(tempfile, "tempdir", str(path.parent))  # others may load at the same time
    package = load_package(path, trusted=True)
    assert not temporary()
    same(package, module)
    load, seen = packages.LOADER, []

    def archives_only(place, *args):
        """As torch's loader was before it took folders."""
        seen.append(place)
        if os.path.isdir(place):
            raise RuntimeError("Failed to initialize zip archive: file open failed")
        return load(place, *args)

    monkeypatch.setattr(packages, "LOADER", archives_only)
    same(load_package(path, trusted=True), module)
    assert len(seen) == 2 and not temporary()

    def broken(*args):
        raise RuntimeError("undefined symbol")

    monkeypatch.setattr(packages, "LOADER", broken)
    with pytest.raises(ArtifactError, match="the program in .*aoti.pt2 cannot be loaded: undefined symbol"):
        load_package(path, trusted=True)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ArtifactError, match="aoti.pt2 cannot be unpacked into a temporary folder: the disk is full"):
        load_package(path, trusted=True)
    assert not temporary()


def test_what_cannot_be_compiled(tmp_path, monkeypatch):
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    with pytest.raises(FxplugError, match="the module and the example inputs are on cpu and meta"):
        export(gm, tmp_path, torch.randn(2, 4, device="meta"), to="aoti")
    with pytest.raises(FxplugError, match="options are for inductor, and pt2 is not compiled"):
        export(gm, tmp_path, torch.randn(2, 4), options=QUICK)
    with pytest.raises(FxplugError, match=r"no export format 'aot' \(did you mean 'aoti'\?\)"):
        export(gm, tmp_path, torch.randn(2, 4), to="aot")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FxplugError, match="compiled on a machine with a CUDA device, and this one has none"):
        aoti_writer.check_compiler(torch.device("cuda"))

    def none():
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    with pytest.raises(FxplugError, match="needs a C\\+\\+ compiler .* install g\\+\\+.*CXX \\(No working"):
        export(gm, tmp_path, torch.randn(2, 4), to="aoti")
    assert not os.listdir(tmp_path)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x)[:, None] for layer in (self.q, self.k, self.v))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])


def check_switching(new, path, example, options=QUICK):
    """A package whose adapter comes, is used by some samples, and goes, beside the module that it was made of."""
    result = export(new, path, example, to="aoti", options=options)
    package, x = load_package(result.path, trusted=True), torch.cat([example, example.flip(0), example])
    ranks = {name: (torch.randn(3, 32) * 0.2, torch.randn(32, 3) * 0.2) for name in ("q", "v", "out")}
    state = {f"{n}.lora_{half}.weight": t.cpu() for n, pair in ranks.items() for half, t in zip("AB", pair, strict=True)}
    outputs = []
    for what in (None, "ink", ["ink", None, None, {"ink": 0.5}, "ink", None]):
        for adapters in (new.adapters, package.adapters):
            if what is not None and not adapters.names:
                adapters.load("ink", state)
            adapters.use(what)
        outputs.append(package(x))
        torch.testing.assert_close(outputs[-1], new(x).detach(), **CLOSE)
    assert not torch.allclose(outputs[0], outputs[1]) and torch.equal(outputs[2][1], outputs[0][1])
    package.adapters.unload("ink")
    assert package.adapters.names == []
    return package


@pytest.mark.slow
def test_a_fused_module(tmp_path):
    example = torch.randn(2, 7, 32)
    gm = fxplug.trace(Attention().eval(), example)
    new = fxplug.apply(gm, fxplug.load_pass("lora", rank=3, slots=2))
    check_switching(fxplug.lower(new), tmp_path / "lowered", example)


@pytest.mark.slow
def test_operators_of_ours(tmp_path):
    from fxplug.lowerings.linear import operators  # noqa: F401  (which defines them)

    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return torch.ops.fxplug.product(x, self.weight, None)

    x = torch.randn(2, 8)
    gm = fxplug.trace(Maps().eval(), x)
    package = load_package(export(gm, tmp_path / "ops", x, to="aoti", options=QUICK).path, trusted=True)
    assert package.manifest["operators"] == ["fxplug::product"]
    torch.testing.assert_close(package(x), gm(x).detach())
    with pytest.raises(SpecError, match="no pass of this package has slots"):
        package.adapters.use(None)


@pytest.mark.slow
def test_unet(tmp_path):
    model = small.seeded(lambda: unets.sd15_model(levels=1)).eval()
    args, kwargs = (), {**small.seeded(lambda: unets.inputs(model)), "return_dict": True}
    gm = fxplug.trace(model, args, kwargs)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*attn.*to_[qkv]$", rank=4, slots=2))
    result = export(new, tmp_path / "unet", args, kwargs, to="aoti", options=QUICK)
    assert result.dynamic["sample"] == [0, 2, 3]
    package = load_package(result.path, runners=2, trusted=True)
    assert package.config.in_channels == gm.config["in_channels"] and package.dtype == torch.float32  # as a pipeline asks
    with pytest.raises(AttributeError, match="'enable_freeu': change the model before you export it"):
        package.enable_freeu()
    state = {name: tensor for name, tensor in new.state_dict().items() if name.startswith("lora.")}
    with torch.no_grad():
        for name, tensor in state.items():
            if name.endswith("weight"):
                tensor.normal_(std=0.05)
    wanted = []
    for weights in ([0.3, 1.0], [1.0, 0.0]):
        state["lora.gates.table.weights"].copy_(torch.tensor(weights))
        package.update(state)
        wanted.append(new(*args, **kwargs).sample.detach())
        torch.testing.assert_close(package(*args, **kwargs)["sample"], wanted[-1], **CLOSE)

    found = []

    def calls():
        for _ in range(20):
            found.append(package(*args, **kwargs)["sample"])

    threads = [threading.Thread(target=calls) for _ in range(2)]
    for thread in threads:
        thread.start()
    rows = [state["lora.gates.table.weights"].clone() for _ in range(2)]
    rows[0][:] = torch.tensor([0.3, 1.0])
    while any(thread.is_alive() for thread in threads):
        for table in rows:
            package.update({"lora.gates.table.weights": table})
    for thread in threads:
        thread.join()
    assert len(found) == 40  # each call has seen one state of all samples and layers
    assert all(any(torch.allclose(out, one, atol=1e-4) for one in wanted) for out in found)


@pytest.mark.slow
def test_vit(tmp_path):
    gm, args, kwargs = small.plain_vit()
    exports_made.check_model(gm, (args, kwargs), [((torch.randn(n, 3, 32, 32),), {}) for n in (1, 5)], tmp_path, "aoti")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "PixArtTransformer2DModel"])
def test_diffusers(tmp_path, name):
    """One of free sizes and one of a single size; `make fuzz` compiles each family, a whole UNet for minutes."""
    exports_made.check_family(name, exports_made.FAMILIES[name], tmp_path, "aoti")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype, close", [(torch.float32, CLOSE), (torch.bfloat16, {"rtol": 0.02, "atol": 0.05})])
def test_on_a_gpu(tmp_path, monkeypatch, dtype, close):
    monkeypatch.setitem(globals(), "CLOSE", close)
    example = torch.randn(2, 7, 32, device="cuda", dtype=dtype)
    gm = fxplug.trace(Attention().eval().to("cuda", dtype), example)
    new = fxplug.apply(gm, fxplug.load_pass("lora", rank=3, slots=2))
    package = check_switching(new, tmp_path / "gpu", example)
    assert package.device == torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(FxplugError, match=f"x is on cpu; this package runs on {package.device}"):
        package(example.cpu())
    with pytest.raises(ArtifactError, match="was compiled for cuda and cannot run on cpu"):
        load_package(tmp_path / "gpu.aoti.pt2", device="cpu", trusted=True)
