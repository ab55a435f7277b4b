"""What forms should cost on a GPU (`benchmarks/roofline.py`), and the trial on one (`benchmarks/gpu_trial.py`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fxplug.lowerings.linear import forms
from fxplug.lowerings.linear.forms import Case

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu_trial
import roofline

BENCHMARKS = Path(gpu_trial.__file__).parent

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


# --- the trial on a device


def trial(*arguments, **environment):
    """How the program ends and what it says, at tiny sizes."""
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    run = [sys.executable, "-W", "ignore", BENCHMARKS / "gpu_trial.py", *map(str, arguments)]
    done = subprocess.run(run, env=told, capture_output=True, text=True, cwd=BENCHMARKS)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_trial_runs_without_the_package():
    code = "import gpu_trial, sys; print([n for n in ('networkx', 'diffusers', 'timm', 'fxplug.core.ir') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=BENCHMARKS)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_the_trial_at_tiny_sizes(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    code, text = trial("--json", tmp_path / "a.json", TRITON_INTERPRET="1")
    assert code == 0, text
    found = json.loads((tmp_path / "a.json").read_text())
    assert max(found["off"].values()) < 1e-6 and len(found["off"]) == 4
    assert {row["mode"] for row in found["layers"]} == {"inference", "mixed", "training"}
    for name, rows in found["models"].items():
        assert rows["failed"] == {} and {"plain", "stock", "triton"} <= set(rows["eager"]), name
        assert all(way.get("off", 0) < 1e-5 for how in ("eager", "compiled") for way in rows[how].values()), name


WRONG = """
import gpu_trial, sys
right = gpu_trial.operators.run_lora_linear
gpu_trial.operators.run_lora_linear = lambda *given: right(*given) * (1.001 if given[-1] == "triton" else 1)
sys.exit(gpu_trial.main(["--sections", "check", "--json", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_the_trial_finds_kernels_that_are_wrong(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    run = [sys.executable, "-W", "ignore", "-c", WRONG, tmp_path / "a.json"]
    assert subprocess.run(run, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, cwd=BENCHMARKS).returncode == 1
    wrong = {line.partition(":")[0] for line in json.loads((tmp_path / "a.json").read_text())["wrong"]}
    assert wrong == {f"float32, {mode}, triton" for mode in ("inference", "training")}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_section_that_crashes_or_hangs_ends_itself_alone(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    last = "import json, sys; new = json.load(open(sys.argv[1])) | {'done': ['layers']}; json.dump(new, open(sys.argv[1], 'w'))"
    programs = {"check": "import os; os.abort()", "tiles": "import time; time.sleep(60)", "layers": last}

    def start(program, *given):
        return subprocess.Popen([sys.executable, "-c", programs[given[-1]], file], start_new_session=True)

    monkeypatch.setattr(gpu_trial, "start", start)
    monkeypatch.setattr(gpu_trial, "GRACE", 0)
    begun = time.monotonic()
    assert gpu_trial.run_apart(["check", "tiles", "layers"], file, begun + 9) == 1
    assert time.monotonic() - begun < 40
    found = json.loads(file.read_text())
    assert found["failed"] == {"check": "the process ended with code -6", "tiles": "its time was over"}
    assert found["done"] == ["layers"]


def test_what_a_trial_found_becomes_the_tables_of_the_package(tmp_path, monkeypatch, own_rule):
    """Where another form is never the fastest, the rule no longer takes it."""
    sizes = json.loads(Path(gpu_trial.devices.__file__).with_name("tiles.json").read_text())["capabilities"]
    for name in ("limits.json", "tiles.json"):
        shutil.copy(Path(gpu_trial.devices.__file__).with_name(name), tmp_path)
    monkeypatch.setattr(gpu_trial.devices, "__file__", str(tmp_path / "devices.py"))
    page = tmp_path / "page.md"
    page.write_text("<!-- trial -->\nold\n<!-- end of trial -->\n")
    monkeypatch.setattr(roofline, "PAGE", page)
    spent = {form: {"eager": 2.0 if form == "fused" else 1.0, "graph": 1.0} for form in ("plain", "stock", "fused", "triton")}
    layers = [{"mode": "inference", "shape": shape, "microseconds": spent} for shape in ([12608, 1024, 1024], [4096, 512, 512])]
    found = {
        "device": "A Device", "torch": "2", "triton": "3", "dtype": "bfloat16", "layers": layers,
        "tiles": {"list": [[64, 64, 64, 4, 4]]}, "table": {"vit": {"inference, graph": {"stock": 1.5}}},
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(found))
    assert gpu_trial.main(["--write", str(tmp_path / "a.json")]) == 0
    limits = json.loads((tmp_path / "limits.json").read_text())
    assert limits["cuda"]["about"] == "measured on A Device, torch 2" and limits["cpu"] == forms.LIMITS["cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(forms.LIMITS, "cuda", limits["cuda"])
        assert forms.choose_form(Case("bfloat16", 4096, 512, 512, 16, 0), "cuda") == "stock"
        assert forms.choose_form(Case("bfloat16", 1 << 20, 1 << 10, 1 << 10, 16, 0), "cuda") == "fused"
    tiles = json.loads((tmp_path / "tiles.json").read_text())
    assert tiles["devices"] == {"A Device": [[64, 64, 64, 4, 4]]} and tiles["capabilities"] == sizes
    assert "| vit | inference, graph | 1.50 |" in page.read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_trial_on_a_gpu(tmp_path):
    code, text = trial("--json", tmp_path / "a.json", "--sections", "check", "--minutes", "1")
    assert code == 0, text
