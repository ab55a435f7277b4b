"""Triton kernels without a GPU: what they give, what is made of them, and what is said where they do not run."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fxplug
from fxplug import core
from fxplug.lowerings.linear import devices, forms

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def proved(program, *how, **environment):
    """Runs one of the programs beside this file, in a process of its own: Triton asks how it runs when it is imported."""
    if core.find_version("triton") is None:
        pytest.skip("Triton is not installed")
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name(program), *how], env=told, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow  # float32 in each mode is tried by the quick tests of the trial (test_roofline.py)
def test_kernels_give_the_values_and_gradients_of_float64():
    """Each dtype and kind once; `make kernels` draws more of each."""
    proved("kernels_interpreted.py", "quick", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_compilers_take_the_kernels_into_their_programs():
    proved("kernels_in_programs.py")


@pytest.mark.slow
def test_kernels_compile_without_spilling():
    """On one device of each kind of tensor cores; `make kernels` has each device and each rank."""
    proved("kernels_compiled.py", "quick")


@pytest.mark.slow
@pytest.mark.parametrize("program, how", [
    ("kernels_interpreted.py", ["broken"]), ("kernels_in_programs.py", ["broken"]),
    ("kernels_compiled.py", ["broken", "quick"]),  # `make kernels` breaks more that the same checks find
], ids=["interpreted", "in_programs", "compiled"])  # fmt: skip
def test_a_kernel_that_is_broken_is_found(program, how):
    proved(program, *how, TRITON_INTERPRET=str(int(program == "kernels_interpreted.py")))


# --- where they do not run

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


def with_lora(rank=2, quantise=lambda net: None, **options):
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()
    quantise(net)
    new = fxplug.apply(fxplug.trace(net, X), fxplug.load_pass("lora", at="*", rank=rank, **options))
    with torch.no_grad():
        for key, parameter in new.named_parameters():
            if key.startswith("lora."):
                parameter.normal_()
    return new


def lowered(new):
    """The module in this form, and the warnings that name Triton."""
    forms.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        low = fxplug.lower(new, fuse="triton")
    return low, [str(warning.message) for warning in said if "Triton" in str(warning.message)]


@pytest.fixture
def asked():
    """What was asked of devices is asked again."""
    devices._unfit_device.cache_clear()
    yield
    devices._unfit_device.cache_clear()


@pytest.fixture
def fit(monkeypatch):
    """A device that has the kernels."""
    monkeypatch.setattr(devices, "_unfit_device", lambda device, in_python: None)


@pytest.fixture(params=["set_float32_matmul_precision", "fp32_precision"])
def tf32(request):
    """torch multiplies float32 in TF32, as set in its older and its newer way."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if request.param == "fp32_precision":
        matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = before


def stays(new, reason):
    low, (said,) = lowered(new)
    assert reason in said
    assert set(low.meta["forms"].values()) == {"stock"}
    with torch.no_grad():
        assert torch.equal(low(X), new(X))
    return said


@pytest.mark.parametrize("options", [{}, {"slots": 3}], ids=["one", "slots"])
def test_a_cpu_runs_the_stock_form_and_says_so(options, asked, monkeypatch):
    monkeypatch.delitem(sys.modules, "fxplug.lowerings.linear.kernels", raising=False)  # of another test
    said = stays(with_lora(**options), "Triton's kernels run on CUDA, and the layer is on cpu")
    assert said.startswith("fuse='triton' leaves layers in their stock form: 0 and 1 more: ")
    assert "fxplug.lowerings.linear.kernels" not in sys.modules


@pytest.mark.parametrize("found, reason", [
    (None, "Triton is not installed"), ("3.7.1", "Triton 3.7.1 is older than 3.8, the oldest that is tested"),
])  # fmt: skip
def test_triton_is_missing_or_old(found, reason, asked, monkeypatch):
    monkeypatch.setattr(devices, "find_version", lambda name: found)
    stays(with_lora(), reason)


def test_a_table_of_another_version(asked, monkeypatch):
    monkeypatch.setitem(devices.TILES, "format", 2)
    stays(with_lora(), "the table of Triton's tiles has format 2, not 1")


def test_float32_where_torch_multiplies_it_exactly(fit):
    stays(with_lora(), "Triton's kernels multiply float32 in TF32, and torch does not")


def test_dtypes_and_ranks_that_no_kernel_has(fit, tf32):
    stays(with_lora(rank=129), "Triton's kernels hold ranks up to 128, and there are 129")
    said = lowered(with_lora().double())[1]
    assert "Triton's kernels take float16, bfloat16 and float32, not float64" in said[0] and len(said) == 1


def test_float32_under_autocast_is_that_of_autocast(fit):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, said = lowered(with_lora())
    assert said == [] and "triton" in low.meta["forms"]["0"]


def test_a_layer_that_is_quantised(fit, tf32):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    new = with_lora(quantise=lambda net: quantization.quantize_(net[0], quantization.Int8WeightOnlyConfig()))
    low, (said,) = lowered(new)
    assert said.endswith("0: Triton's kernels read numbers, and its weight is quantised")
    assert low.meta["forms"]["0"] == "stock" and low.meta["forms"]["2"].startswith("triton")


@pytest.mark.parametrize("capability, hip, reason", [
    ((7, 5), None, "Triton's kernels need CUDA capability 8.0, and A Device has 7.5"),
    ((8, 0), "6.4", "Triton's kernels run on CUDA, and the layer is on ROCm"), ((8, 0), None, None), ((12, 1), None, None),
])  # fmt: skip
def test_devices_that_have_the_kernels(capability, hip, reason, asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Device")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(devices, "find_version", lambda name: "3.8.0")
    assert devices.explain_unfit(CUDA, torch.bfloat16, 16) == reason
    assert "xpu" in devices.explain_unfit(torch.device("xpu"), torch.bfloat16, 16)


def test_the_rule_never_takes_them(own_rule):
    for device in (*forms.LIMITS, "xpu"):
        for case in (forms.Case("bfloat16", 12608, 1024, 3072, 16, slots, grad) for slots in (0, 4) for grad in (0, 1)):
            assert "triton" not in own_rule(case, device)


# --- tiles

H100 = "NVIDIA H100 80GB HBM3"


def test_a_tile_is_the_largest_that_keeps_all_of_a_device_busy(monkeypatch):
    monkeypatch.setattr(devices, "tiles_of", lambda device: (devices.tiles_for(90), 132))
    chosen = {rows: devices.choose_tile(rows, 1024, CUDA, torch.bfloat16)[:2] for rows in (12608, 4096, 64)}
    assert chosen == {12608: (128, 256), 4096: (128, 128), 64: (64, 64)}
    assert devices.choose_tile(12608, 64, CUDA, torch.bfloat16).n == 64
    assert devices.choose_tile(12608, 1024, CUDA, torch.float32).k == 32


def test_a_table_of_a_device_goes_before_that_of_its_capability(monkeypatch):
    assert devices.tiles_for(86) == devices.tiles_for(89) == devices.tiles_for(80)
    assert devices.tiles_for(121) == devices.tiles_for(120) != devices.tiles_for(103) == devices.tiles_for(100)
    monkeypatch.setitem(devices.TILES, "devices", {H100: [[64, 64, 64, 4, 4]]})
    assert devices.tiles_for(90, H100) == [devices.Tile(64, 64, 64, 4, 4)] != devices.tiles_for(90, "another")
