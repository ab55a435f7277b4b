"""Packages and ONNX models: what was exported runs at any size, checks its calls, and takes other adapters."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import exports_made
import pytest
import torch
from exports_made import LOAD, adapter, inputs, made, pair_of, same

import fxplug
from fxplug.core.errors import ArtifactError, FxplugError, GuardError, SpecError

KINDS = ["onnx", pytest.param("aoti", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", autouse=True)
def one_registry():
    with exports_made.one_registry():
        yield


@pytest.fixture(params=KINDS)
def pair(request, tmp_path_factory):
    yield from pair_of(request.param, tmp_path_factory.mktemp)


@pytest.mark.slow
def test_sizes_and_structures(pair):
    module, exported = pair
    for batch, side in ((1, 8), (2, 6), (5, 10)):
        out = same(exported, module, batch, side)
    assert out["none"] is None and out["three"] == 3 and type(out["pair"]) is tuple
    assert torch.equal(out["pair"][1][0], out["y"] + 1)
    (image, ids, more), shift = inputs(2, 8), torch.randn(2, 6)
    wanted = exported(image, ids, more, shift=shift)
    for other in (image.to(memory_format=torch.channels_last), image.mT.contiguous().mT, image.clone().requires_grad_()):
        assert torch.equal(exported(other, ids, more, shift=shift)["y"], wanted["y"])  # whatever way it lies in memory
    assert not wanted["y"].requires_grad


@pytest.mark.slow
def test_wrong_calls(pair):
    _, exported = pair
    (image, ids, more), shift = inputs(), torch.randn(2, 6)
    right = {"image": image, "ids": ids, "more": more, "shift": shift}
    elsewhere = {"scale": shift[:, :1].to("meta")}
    big, odd = dict(zip(right, (*inputs(64), torch.ones(64, 6)), strict=True)), inputs(2, 7)[0]
    made = "(package was compiled|model was exported)"
    for error, message, given in [
        (TypeError, "missing a required argument: 'more'", {"image": image, "ids": ids}),
        (FxplugError, f"shift is missing; this {made} with a tensor", {"image": image, "ids": ids, "more": more}),
        (FxplugError, f"flag is False; this {made} with True", {**right, "flag": False}),
        (FxplugError, "shift must be a tensor, not 3", {**right, "shift": 3}),
        (FxplugError, "more must be a dict with scale, not {'scal': 1}", {**right, "more": {"scal": 1}}),
        (FxplugError, f"image is torch.float64; this {made} for torch.float32", {**right, "image": image.double()}),
        (FxplugError, "more\\['scale'\\] is on meta; this (package|model) runs on cpu", {**right, "more": elsewhere}),
        (GuardError, "image has 3 dimensions, not 4", {**right, "image": image[0]}),
        (GuardError, f"image, dimension 1: the size is 2, and the {made} for 3 only", {**right, "image": image[:, :2]}),
        (GuardError, "size is 3, and image, dimension 0 has 2; the two must be equal", {**right, "shift": torch.ones(3, 6)}),
        (GuardError, "64, .* for 1 or more and 63 or less", big),
        (GuardError, r"\(image.shape\[3\] % 2\) == 0; these are image \(2, 3, 7, 7\), ids", {**right, "image": odd}),
    ]:
        with pytest.raises(error, match=message):
            exported(**given)


@pytest.mark.slow
def test_adapters_come_and_go(pair, tmp_path):
    module, exported = pair
    both = (module.adapters, exported.adapters)
    assert exported.adapters.names == module.adapters.names and exported.adapters.active == module.adapters.active
    same(exported, module)
    ink, film = adapter(tmp_path / "ink.safetensors", 2), adapter(tmp_path / "film.safetensors", 1, ("lin",))
    for adapters in both:
        for name in list(adapters.names):
            adapters.unload(name)
        adapters.load("ink", ink)
        adapters.load("film", film)
        assert adapters.names == ["ink", "film"]
    outputs = []
    for what in (None, "ink", {"ink": 0.8, "film": 0.3}, ["ink", None, "film"], "film"):
        for adapters in both:
            adapters.use(what)
        assert exported.adapters.active == module.adapters.active
        torch.manual_seed(2)
        outputs.append(same(exported, module)["y"])
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(outputs, 2))
    for adapters in both:
        adapters.unload("film")
    torch.manual_seed(2)
    torch.testing.assert_close(same(exported, module)["y"], outputs[0])
    with pytest.raises(SpecError, match=r"no adapter 'inc' \(did you mean 'ink'\?\)"):
        exported.adapters.use("inc")
    exported.adapters.load("third", adapter(tmp_path / "b.safetensors", 1))
    exported.adapters.load("fourth", adapter(tmp_path / "c.safetensors", 1))
    with pytest.raises(SpecError, match="all 3 slots of pass 'lora' are taken"):
        exported.adapters.load("fifth", ink)
    with pytest.raises(SpecError, match="rank_max=3"):
        exported.adapters.load("fourth", adapter(tmp_path / "d.safetensors", 3), replace=True)


@pytest.mark.slow
def test_entries_for_another_batch_are_told(pair, tmp_path):
    module, exported = pair
    ink = adapter(tmp_path / "ink.safetensors", 2)
    for adapters in (module.adapters, exported.adapters):
        adapters.load("ink", ink)
        adapters.use(["ink", None, {"ink": 2.0}])
    same(exported, module, batch=3)
    with pytest.raises(SpecError, match=r"use\(\) got 3 entries but the batch has 2 samples: give one entry per sample"):
        exported(*inputs(2), shift=torch.randn(2, 6))
    for adapters in (module.adapters, exported.adapters):
        adapters.use(None)
    same(exported, module, batch=2)


@pytest.mark.slow
@pytest.mark.parametrize("to", KINDS)
def test_a_module_that_no_export_can_follow(to, tmp_path, tmp_path_factory):
    live = fxplug.lower(made(to, tmp_path_factory.mktemp)[0], merge="live")
    with pytest.raises(FxplugError, match="adapters merged into its weights.* export what it was lowered from"):
        fxplug.export(live, tmp_path, inputs(), {"shift": torch.randn(2, 6)}, to=to)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("to", LOAD)
def test_files_that_cannot_be_read(to, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello" * 99)
    files = [tmp_path / name for name in ("pipe", "loop", "empty", "text", "gone", "gone/x", "a\0b", "x" * 300)]
    for file in (*files, tmp_path, Path("/dev/null")):
        with pytest.raises(ArtifactError) as caught:
            LOAD[to](file)
        assert str(caught.value).startswith(str(FxplugError(file)))
