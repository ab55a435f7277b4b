"""Exported programs: sizes stay free, the model's library is not needed, and a file is whole or not there."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import unets
from torch import nn

import fxplug
from fxplug.core import writing
from fxplug.core.reading import make_reporter
from fxplug.core.writing import replace_file
from fxplug.exports import exporter
from fxplug.exports.exporter import export


class Guarded(nn.Module):
    """Branches on its size, switches gradients off, pads like Conv2dSame, and runs in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5))

    def forward(self, image: torch.Tensor, scale: float = 2.0, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        if image.shape[0] >= 64 or image.shape[-1] % 2 != 0:
            raise ValueError("size")
        with torch.no_grad():
            image = image - self.mean
        extra = math.ceil(image.shape[-1] / 4) * 4 - image.shape[-1] + math.floor(image.shape[-2] * 0.5)
        x = nn.functional.pad(image, [0, extra])
        x = self.norm(self.conv(x)).flatten(2).mean(-1) * scale
        return x if shift is None else x + shift


class Two(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Pairs(nn.Module):
    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> Two:
        return Two(x + 1, x * more["scale"])


@pytest.mark.slow
def test_sizes_stay_free(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gm = fxplug.trace(Guarded().eval(), torch.randn(1, 3, 8, 8), {"shift": torch.randn(1, 4)})
    result = export(gm, tmp_path / "model", torch.randn(1, 3, 8, 8), {"shift": torch.randn(1, 4)})
    assert result.path == tmp_path / "model.pt2" and result.kept == "all" and result.seconds > 0
    assert result.dynamic == {"image": [0, 2, 3], "shift": [0]}
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]
    program = torch.export.load(result.path)
    assert set(program.state_dict) == set(gm.state_dict())
    for batch, side in ((2, 8), (5, 10), (3, 14)):
        image, shift = torch.randn(batch, 3, side, side), torch.randn(batch, 4)
        torch.testing.assert_close(program.module()(image, shift=shift), gm(image, shift=shift), rtol=0, atol=1e-6)
    for batch, side in ((64, 8), (2, 9)):  # the decisions of the trace are still held
        with pytest.raises((RuntimeError, AssertionError)):
            program.module()(torch.randn(batch, 3, side, side), shift=torch.randn(batch, 4))


def test_result_classes_become_plain(tmp_path: Path) -> None:
    x, more = torch.randn(2, 4), {"scale": torch.randn(2, 4)}
    gm = fxplug.trace(Pairs(), (x, more))
    result = export(gm, tmp_path, (x, more))
    assert result.path == tmp_path / "model.pt2" and result.notes == ("the result is a tuple instead of a Two",)
    out = torch.export.load(result.path).module()(torch.ones(7, 4), {"scale": torch.ones(7, 4)})
    assert type(out) is tuple and torch.equal(out[0], torch.full((7, 4), 2.0))


def given(unet: nn.Module, batch: int = 1, side: int = 16) -> dict[str, torch.Tensor]:
    text = torch.randn(batch, 5, unet.config.cross_attention_dim)
    return {"sample": torch.randn(batch, 4, side, side), "timestep": torch.arange(batch), "encoder_hidden_states": text}


@pytest.mark.slow
def test_unet(tmp_path: Path) -> None:
    unet = unets.sd15_model(levels=1)
    gm = fxplug.trace(unet, kwargs=(kwargs := given(unet)))
    result = export(gm, tmp_path / "model.pt2", (), kwargs)
    program = torch.export.load(result.path).module()
    assert all(0 in dims for dims in result.dynamic.values())
    kwargs = given(unet, batch=3, side=24)
    with torch.no_grad():
        out, wanted = program(**kwargs), gm(**kwargs)
    torch.testing.assert_close(out["sample"], wanted.sample, rtol=0, atol=1e-5)


def test_adapters_keep_their_names(tmp_path: Path) -> None:
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).eval(), torch.randn(2, 4))
    new = fxplug.apply(gm, fxplug.load_pass("lora", rank=2))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.1)
    program = torch.export.load(export(new, tmp_path / "lora", torch.randn(2, 4)).path)
    assert set(program.state_dict) == set(new.state_dict())
    assert any(name.startswith("lora.") for name in program.state_dict)
    x = torch.randn(5, 4)
    torch.testing.assert_close(program.module()(x), new(x), rtol=0, atol=1e-6)


def test_a_loaded_artifact_exports(tmp_path: Path) -> None:
    gm = fxplug.trace(Pairs(), (torch.randn(2, 4), {"scale": torch.randn(2, 4)}))
    fxplug.save(gm, tmp_path / "out")
    again = fxplug.load(tmp_path / "out")
    result = export(again, tmp_path / "out", (torch.randn(2, 4), {"scale": torch.randn(2, 4)}), free="batch")
    assert result.kept == "batch" and (tmp_path / "out" / "model.pt2").is_file()
    fxplug.load(tmp_path / "out")  # an exported program beside it does no harm
    fxplug.save(again, tmp_path / "out")
    assert (tmp_path / "out" / "model.pt2").is_file()


def test_wrong_calls(tmp_path: Path) -> None:
    gm = fxplug.trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    with pytest.raises(fxplug.FxplugError, match=r"no export format 'pt' \(did you mean 'pt2'\?\)"):
        export(gm, tmp_path / "x", torch.randn(2, 4), to="pt")
    with pytest.raises(fxplug.FxplugError, match="free must be one of .*, not 'al'"):
        export(gm, tmp_path / "x", torch.randn(2, 4), free="al")
    with pytest.raises(fxplug.FxplugError, match="torch.export fails for this module: with all dimensions free"):
        export(gm, tmp_path / "x", torch.randn(2, 4, 4))
    assert not list(tmp_path.iterdir())


# --- the file


@pytest.fixture
def linear():
    x = torch.randn(2, 64)
    return fxplug.trace(nn.Sequential(nn.Linear(64, 64)), x), x


def test_a_disk_that_is_full(tmp_path: Path, linear) -> None:
    (tmp_path / "old.pt2").write_bytes(b"as it was")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(fxplug.FxplugError, match="old.pt2 cannot be written: the file would be too large"):
            export(linear[0], tmp_path / "old.pt2", linear[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("old.pt2", b"as it was")]


def test_places_that_cannot_be_written(tmp_path: Path, linear) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.pt2")
    for path, finding in [
        (tmp_path / "file" / "x.pt2", "cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written: the name is too long"),
        (tmp_path / "a\0b.pt2", "cannot be written: this is not a valid file name"),
        (tmp_path / "pipe.pt2", "is a pipe, which is not overwritten by a file"),
        (Path("/proc/x.pt2"), "cannot be written"),
    ]:
        with pytest.raises(fxplug.FxplugError, match=finding):
            export(linear[0], path, linear[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "pipe.pt2"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path, linear) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "real.pt2").write_bytes(b"old")
    (tmp_path / "link.pt2").symlink_to("there/real.pt2")
    result = export(linear[0], tmp_path / "link.pt2", linear[1])
    assert result.path == tmp_path / "link.pt2" and (tmp_path / "link.pt2").is_symlink()
    torch.testing.assert_close(torch.export.load(tmp_path / "there" / "real.pt2").module()(linear[1]), linear[0](linear[1]))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["link.pt2", "real.pt2", "there"]
    new = tmp_path / "new"
    new.touch()
    assert (tmp_path / "there" / "real.pt2").stat().st_mode == new.stat().st_mode


def test_two_writers_at_once(tmp_path: Path) -> None:
    target = tmp_path / "model.pt2"
    texts = [bytes([65 + i]) * 100_000 for i in range(4)]
    torn = []

    def write(text: bytes) -> None:
        for _ in range(25):
            with replace_file(target, make_reporter(target)) as name:
                name.write_bytes(text)
            if target.read_bytes() not in texts:
                torn.append(text[:1])

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn and [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


# without torch, so that it starts soon
HOLDER = """
import sys, time
from pathlib import Path
from fxplug.core.writing import open_temporary_folder
with open_temporary_folder(".model.pt2.exporting-", Path(sys.argv[1])) as work:
    (work / "model.pt2").write_bytes(b"half")
    print(work, flush=True)
    while True:  # a signal that comes right before a sleep is seen after it
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_ends_in_the_middle(tmp_path: Path, number: signal.Signals) -> None:
    root = str(Path(fxplug.__file__).parent.parent)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert Path(process.stdout.readline().strip()).is_dir()
        with writing.open_temporary_folder(".model.pt2.exporting-", tmp_path):
            assert len(list(tmp_path.iterdir())) == 2  # one that is in use is left alone
        process.send_signal(number)
        assert process.wait() != 0
    left = [p.name for p in tmp_path.iterdir()]
    assert len(left) == (number is signal.SIGKILL)
    (tmp_path / ".model.pt2.backup").mkdir()  # somebody else's
    with writing.open_temporary_folder(".model.pt2.exporting-", tmp_path) as work:
        assert sorted(tmp_path.iterdir()) == sorted([tmp_path / ".model.pt2.backup", work])


def test_a_handler_of_the_programs_own_stays() -> None:
    def handler(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with writing.raise_on_sigterm():
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    with writing.raise_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_mistake_of_our_own_is_no_reason_for_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def mistaken(graph: torch.fx.Graph) -> None:
        tries.append(1)
        raise KeyError("ours")

    monkeypatch.setattr(exporter, "_write_out_rounding", mistaken)
    with pytest.raises(KeyError, match="ours"):
        export(fxplug.trace(nn.Linear(4, 4), torch.randn(1, 4)), tmp_path / "model", torch.randn(1, 4))
    assert tries == [1] and list(tmp_path.iterdir()) == []
