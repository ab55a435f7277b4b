"""The versions that the tests run on: one table, and setup.cfg and the files of constraints say the same."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fxplug import core as versions
from fxplug.__main__ import app
from fxplug.core import LIBRARIES, Library, is_tested

ROOT = Path(__file__).parents[1]
RANGES = {name: library for name, library in LIBRARIES.items() if library.oldest}


def requirements():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for lines in (config["options"]["install_requires"], *config["options.extras_require"].values()):
        yield from (line for line in lines.splitlines() if line)


def pins(file):
    return dict(re.findall(r"^([\w.-]+)==([^,\s]+)", (ROOT / file).read_text().lower().replace("_", "-"), re.MULTILINE))


def test_floors_are_those_of_the_table():
    floors = dict(re.findall(r"^([\w-]+)>=([\d.]+)$", "\n".join(requirements()), re.MULTILINE))
    assert {name: floors.get(name) for name in RANGES} == {name: library.oldest for name, library in RANGES.items()}


def test_the_oldest_environment_has_the_floors():
    found = pins(".ci/oldest.txt")
    for name, library in RANGES.items():
        padded = (library.oldest + ".0")[: len(found[name])] if library.oldest.count(".") == 1 else library.oldest
        assert found[name] == padded, name


def test_the_newest_versions_are_those_of_the_constraints():
    found = pins("constraints.txt")
    assert not {"torch", "torchvision", "triton"} & found.keys()
    for name, library in RANGES.items():
        if name != "torch":
            assert found[name].startswith(library.newest), name


def test_every_requirement_is_pinned():
    names = {re.split(r"[>=[;]", requirement)[0].lower() for requirement in requirements()} - {"torch", "torchvision", "fxplug"}
    assert {name.replace("_", "-") for name in names} <= {name.replace("_", "-") for name in pins("constraints.txt")}


@pytest.mark.parametrize("found, tested", [
    ("2.12.1", False), ("2.13.0", True), ("2.13.0+cpu", True), ("2.14.1+cu130", True), ("2.15.3", True),
    ("2.16.0.dev20261101", False), ("3.0", False),
])  # fmt: skip
def test_a_version_is_in_the_range_or_not(found, tested, monkeypatch, recwarn):
    monkeypatch.setitem(LIBRARIES, "torch", Library("", "torch", "2.13", "2.15"))
    monkeypatch.setattr(versions, "find_version", lambda name: found)
    assert is_tested("torch", found) == tested
    versions.warn_if_untested("torch")
    assert [str(w.message).partition(":")[0] for w in recwarn] == [] if tested else [
        f"torch {found} is installed, and fxplug is tested with torch 2.13 to 2.15"
    ]


@pytest.mark.slow
def test_an_untested_torch_is_one_warning_and_no_error(tmp_path):
    (tmp_path / "torch-9.1.dist-info").mkdir()
    (tmp_path / "torch-9.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.1\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fxplug; fxplug.load_pass('lora'); fxplug.TracedModule"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("torch 9.1 is installed, and fxplug is tested with torch") == 1


def doctor(monkeypatch, libraries):
    monkeypatch.setattr("fxplug.config.cli.doctor.LIBRARIES", libraries)
    monkeypatch.setattr("fxplug.core.LIBRARIES", libraries)
    return CliRunner().invoke(app, ["doctor"])


def test_doctor_names_what_is_found_missing_untested_and_broken(tmp_path, monkeypatch):
    for name, text in (("sound", ""), ("broken", "raise OSError('libgone.so: cannot open\\nshared object')")):
        (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / f"{name}-1.2.dist-info").mkdir()
        (tmp_path / f"{name}-1.2.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = doctor(monkeypatch, {
        "sound": Library("all", "sound", "1.0", "1.2"), "broken": Library("kernels", "broken", extra="onnx"),
        "absent": Library("files", "absent", "1.0", "2.0", extra="onnx"),
    })  # fmt: skip
    assert found.exit_code == 0
    assert re.search(r"sound +1\.2 +1\.0 to 1\.2 +all", found.output)
    assert re.search(r"broken +1\.2, broken +kernels; its import fails: OSError: libgone.so: cannot open shared", found.output)
    assert re.search(r"absent +missing +1\.0 to 2\.0 +files \(pip install fxplug\[onnx\]\)", found.output)
    untested = doctor(monkeypatch, {"sound": Library("all", "sound", "1.3", "1.4")})
    assert untested.exit_code == 0 and "1.2, untested" in untested.output
    required = doctor(monkeypatch, {"absent": Library("files", "absent")})
    assert required.exit_code == 1 and "absent missing, which fxplug requires" in required.output
