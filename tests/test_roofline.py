"""What forms should cost on a GPU (`benchmarks/roofline.py`), and the command that measures them (`benchmarks/gpu.py`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu
import roofline

from fxplug.lowerings.linear import operators
from fxplug.lowerings.linear.forms import Case

# so few rows that the update goes beside the weight, and so many that it goes into it
FEW, MANY = (Case("bfloat16", rows, 320, 640, 8, 0) for rows in (100, 1000))
H100 = next(device for device in roofline.DEVICES if device.name.startswith("H100"))


def test_operations_are_those_that_a_gpu_runs():
    found = {form: [op.name for op in operations] for form, operations in roofline.costs(FEW).items()}
    assert found["plain"] == found["merged"] == ["addmm"]
    assert found["rewritten"] == ["addmm", "mm", "mul", "mm", "add"]
    assert found["fused"] == ["addmm", "mm", "mul_", "addmm_"]
    assert [op.name for op in roofline.costs(MANY)["fused"]] == ["mul", "copy_", "addmm", "addmm"]


def test_flops_and_bytes_are_those_of_the_products():
    plain, fused, slots = (roofline.costs(FEW)[form] for form in ("plain", "fused", "slots"))
    assert plain == [("addmm", 2 * 100 * 320 * 640, 2 * (100 * 320 + 320 * 640 + 640 + 100 * 640))]
    assert fused[1] == ("mm", 2 * 100 * 320 * 8, 2 * (100 * 320 + 320 * 8 + 100 * 8))
    assert fused[3] == ("addmm_", 2 * 100 * 640 * 8, 2 * (100 * 8 + 8 * 640 + 2 * 100 * 640))
    assert slots[1].flops == 4 * fused[1].flops
    one = roofline.costs(FEW)["one"]
    assert one[0].flops == plain[0].flops + fused[1].flops + fused[3].flops


def test_time_is_that_of_the_work_or_of_launching_it():
    work = [roofline.Operation("mm", 989 * 10**9, 0), roofline.Operation("add", 0, 3350 * 10**6)]
    assert roofline.seconds(work, H100) == pytest.approx((2e-3 + 2 * roofline.KERNEL,) * 2)
    short = [roofline.Operation("add", 0, 0)] * 3
    assert roofline.seconds(short, H100) == pytest.approx((3 * roofline.DISPATCH, 3 * roofline.KERNEL))


@pytest.mark.slow
def test_layers_are_read_off_a_trace():
    cases = roofline.cases_of("small", 2)
    assert cases.total() == 32
    assert cases[Case("bfloat16", 2 * 77, 768, 64, 0, 0)] > 0  # what reads the words


def test_a_table_goes_between_its_markers(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- gpu -->\nold\n<!-- end of gpu -->\nb\n")
    monkeypatch.setattr(roofline, "PAGE", page)
    roofline.put("gpu", roofline.table([["x", "y"], ["1", "2"]]))
    assert page.read_text() == "a\n<!-- gpu -->\n| x | y |\n|---|---|\n| 1 | 2 |\n<!-- end of gpu -->\nb\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_cuda_it_says_so(capsys):
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_only_a_gpu_that_is_known_is_compared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert gpu.known_device("cuda", None)[1:] == H100[1:]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    assert gpu.known_device("cuda", [756, 2000])[1:] == (756e12, 2000e9)
    with pytest.raises(SystemExit, match="'NVIDIA H100 PCIe' are not known .*--peak TFLOPS GBS"):
        gpu.known_device("cuda", None)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_the_command_on_a_cpu(tmp_path, monkeypatch, capsys, broken):
    monkeypatch.setattr(roofline, "RANKS", (16,))
    if broken:
        right = operators.lora_linear
        monkeypatch.setattr(operators, "lora_linear", lambda *args: right(*args) * (1.5 if args[-1] == "fused" else 1))
    assert gpu.main(["--device", "cpu", "--turns", "2", "--json", str(tmp_path / "a.json")]) == int(broken)
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(row["model"], row["dtype"]) for row in found["rows"]] == [("small", "bfloat16"), ("small", "float16")]
    for row in found["rows"]:
        assert set(row["forms"]) == set(roofline.FORMS) and row["forms"]["plain"]["ratio"] == 1
        assert all(isinstance(form["confirmed"], bool) for form in row["forms"].values())
    text = capsys.readouterr().out
    assert ("fused is" in text) is broken and ("all values agree" in text) is not broken
    assert text.count("| small (1), 32 |") == 2


@pytest.mark.slow
def test_shapes_that_time_did_not_suffice_for_are_counted(capsys, monkeypatch):
    monkeypatch.setattr(roofline, "RANKS", (16,))
    assert gpu.main(["--device", "cpu", "--turns", "2", "--minutes", "0"]) == 0
    assert "shapes were not measured in the time allowed" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_command_on_a_gpu(capsys):
    assert gpu.main(["--only", "sd15", "--turns", "3", "--peak", "100", "1000"]) == 0
    assert "all values agree" in capsys.readouterr().out
