"""What an artifact says of its passes, without a key or with another value: refused, or all that reads it still works."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import shutil
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError, FxplugError

MISSING = object()
INK = {f"base_model.model.blocks.0.mlp.fc1.lora_{h}.weight": torch.ones(size) for h, size in (("A", (2, 8)), ("B", (16, 2)))}


def places(value, at=()):
    """The paths of all values by name in what graph.json says below `meta`; of a list of several its first alone."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list) and at[-1:] == ("dict",):
        for index, (key, inner) in enumerate(value):
            yield (*at, index), key
            if key != "params":
                yield from places(inner, (*at, index, 1))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def changed(folder, to, document, path, value):
    """A copy of an artifact with another value at a path, and a manifest that lists it so."""
    document = copy.deepcopy(document)
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    if value is MISSING:
        del owner[path[-1]]
    else:
        owner[path[-1]][1] = value
    shutil.copytree(folder, to)
    data = json.dumps(document).encode()
    (to / "graph.json").write_bytes(data)
    manifest = json.loads((to / "manifest.json").read_text())
    manifest["files"]["graph.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (to / "manifest.json").write_text(json.dumps(manifest))
    return to


def used(module, folder):
    """All that reads what a module remembers of its passes."""
    assert repr(module) and str(module) and fxplug.show(module)
    for use in (
        lambda: fxplug.save(module, folder / "again"),
        lambda: fxplug.merge(module),
        lambda: fxplug.Adapters(module).active,
        lambda: fxplug.save_adapter(module, folder / "ink"),
        lambda: fxplug.pass_for(INK, module),
        lambda: fxplug.load_adapter(module, INK),
        lambda: fxplug.apply(module, fxplug.load_pass("scale", at="blocks.0.mlp")),
        lambda: fxplug.lower(module, fuse="fused"),
        lambda: fxplug.prune(module),
        lambda: fxplug.trainable(module),
    ):
        with contextlib.suppress(FxplugError):
            use()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    layers = {"attn.qkv": nn.Linear(8, 8), "mlp.fc1": nn.Linear(8, 16)}
    parts = ((*at.split("."), layer) for at, layer in layers.items())
    block = OrderedDict((owner, nn.Sequential(OrderedDict({name: layer}))) for owner, name, layer in parts)
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(nn.Sequential(block))))
    gm = fxplug.trace(model, torch.randn(2, 8))
    first = fxplug.load_pass("lora", at="blocks.0.attn.qkv", rank=2, slots=1)
    new = fxplug.apply(gm, first, fxplug.load_pass("lora", at="blocks.0.mlp.fc1", rank=2, name="second"))
    folder = tmp_path_factory.mktemp("saved") / "module"
    fxplug.save(new, folder)
    return folder, json.loads((folder / "graph.json").read_text())


@pytest.mark.slow
def test_a_key_that_is_missing_is_told_or_not_needed(saved, tmp_path):
    folder, document = saved
    needed = set()
    for number, (path, key) in enumerate(places({"meta": document["meta"]})):
        to = changed(folder, tmp_path / str(number), document, path, MISSING)
        try:
            used(fxplug.load(to), tmp_path / f"{number} used")
        except ArtifactError as error:
            assert f"missing key '{key}'" in str(error)
            needed.add(key)
    own = {"name", "sites", "inputs", "networks", "train", "neutral"}
    assert needed >= own | {"path", "place", "block"} | {"kind", "slots", "rank", "shape"}


@pytest.mark.parametrize("value", [None, 7, "no such thing", [], {"dict": []}], ids=str)
def test_another_value_is_told_or_does_no_harm(value, saved, tmp_path):
    folder, document = saved
    told = 0
    for number, (path, _) in enumerate(places({"meta": document["meta"]})):
        to = changed(folder, tmp_path / str(number), document, path, value)
        try:
            module = fxplug.load(to)
        except ArtifactError:
            told += 1
            continue
        used(module, tmp_path / f"{number} used")
    assert told >= 10
