"""The tables of methods say what is: numbers that train, merging, entries by sample and files of each method are tried.

What was measured is what was recorded."""

from __future__ import annotations

import importlib
import json
import re

import pytest
import timm
import torch
import yaml
from doc_blocks import ROOT

import fxplug

PAGE = (ROOT / "docs/guides/methods.md").read_text("utf-8")
FACTS = PAGE.partition("<!--")[0]
ROWS = {row[0].strip("`"): row for row in (
    [cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| `.*$", FACTS, re.MULTILINE))}  # fmt: skip
FORMATS = ("peft", "diffusers", "kohya", "lycoris", "comfy", "fxplug")
RANKED = ("lora", "lora_weight", "dora", "loha", "lokr", "vera")


@pytest.fixture(scope="module")
def gm():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=2).eval()
    return fxplug.trace(model, torch.randn(2, 3, 32, 32))


def make(gm, name, **more):
    rank = {"rank": 8} if name in RANKED else {}
    torch.manual_seed(0)
    new = fxplug.apply(gm, fxplug.load_pass(name, at="qkv", **rank, **more))
    for key, weight in new.named_parameters():
        if key.startswith(f"{name}."):
            torch.nn.init.normal_(weight, std=0.1)
    return new


def tried(function, *args, **kwargs):
    """Return what a call gives, or None where fxplug refuses it."""
    try:
        return function(*args, **kwargs)
    except fxplug.FxplugError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_true(gm, name, tmp_path):
    _, _, numbers, merges, by_sample, files, paper, _ = ROWS[name]
    new = make(gm, name)
    trains = sum(weight.numel() for key, weight in new.named_parameters() if key.startswith(f"{name}."))
    assert trains == int(numbers)
    assert (tried(fxplug.merge, new) is not None) == (merges == "yes")
    path = {each: tmp_path / (each if each == "peft" else f"{each}.safetensors") for each in FORMATS}
    written = [each for each in FORMATS if tried(fxplug.save_adapter, new, path[each], as_=each)]
    assert written == files.split()
    text = (ROOT / f"passes/{name}.yaml").read_text("utf-8")
    assert paper == "none" or f"arXiv {paper}" in text
    if "slots" not in yaml.safe_load(text)["params"]:
        assert by_sample == "no"
        return
    slots = make(gm, name, slots=2)
    assert (tried(use_both, slots, path[written[0]]) is not None) == (by_sample == "yes")


def use_both(slots, path):
    for name in ("ink", "film"):
        slots.adapters.load(name, path)
    slots.adapters.use(["ink", None])
    return slots(torch.randn(2, 3, 32, 32))


def test_the_page_has_what_was_recorded(monkeypatch):
    """Every method of the comparison has its row, or is named as missing."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    methods = importlib.import_module("methods")
    recorded = json.loads(max((ROOT / "benchmarks/results").glob("*-cpu-methods.json")).read_text("utf-8"))["rows"]
    assert methods.replace_table(PAGE, recorded) == PAGE
    table = PAGE.partition(methods.BEGIN)[2].partition(methods.END)[0]
    assert [name for name in methods.METHODS if f"`{name}`" not in table] == []
    assert "Not measured" not in methods.format_table(dict.fromkeys(["base", *methods.METHODS], recorded["lora"]))
