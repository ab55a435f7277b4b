"""What is printed stays short: every public object, every error, and torch's own logs, on models of thousands of nodes."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import pkgutil
import threading
from types import SimpleNamespace

import pytest
import small
import torch
import unets
from torch import nn

import fxplug
from fxplug.core.capture.fake_tensors import silence_torch
from fxplug.core.errors import LONGEST, FxplugError, cut_lines, format_brief
from fxplug.core.torch_internals import FAKE_TENSOR_LOG

MOST = 2000  # bytes of a text
BIG = {f"key {i}": torch.zeros(40, 40) for i in range(500)}
LONG = [dict(list(BIG.items())[:10])] * 50  # each tensor becomes an input of the graph that is tried
CLASSES = {name: value for name in fxplug.__all__ if isinstance(value := getattr(fxplug, name), type)}


def short(value):
    for text in (repr(value), str(value)):
        assert len(text.encode()) < MOST, f"{type(value).__name__}: {len(text.encode())} bytes: {text[:200]}"
        assert "tensor([" not in text and "\n    return " not in text


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What public functions return for a UNet with every layer rewritten, by the name of its class."""
    folder = tmp_path_factory.mktemp("made")
    gm, _, kwargs = unets.sd15()
    sites = fxplug.find(gm, fxplug.load_pass("lora", at="all-linear", rank=2))
    new = fxplug.apply(gm, sites)
    slots = fxplug.apply(gm, fxplug.load_pass("lora", at="all-linear", rank=2, slots=3))
    saved = fxplug.save_adapter(new, folder / "ink.safetensors", as_="kohya", part="unet")
    fit = slots.adapters.load("ink", folder / "ink.safetensors")
    config = {"model": {"timm": "vit_tiny_patch16_224"}, "device": "meta", "passes": [{"lora": {}}]}
    result = fxplug.rewrite(config, dry_run=True)
    vit, images, _ = small.plain_vit()
    found = [gm, sites, sites[0], sites[0].x, sites.p, sites.p.rules[0], new, slots, slots.adapters, saved, fit, fit.file]
    found += [fit.file.entries[0], result, result.config, result.module, fxplug.merge(new), fxplug.lower(new)]
    found += [fxplug.verify(vit, vit, images, compile=False), fxplug.parallel_plan(vit, images, batch=2, check=False)]
    found += [fxplug.training.run.Run(new, [BIG] * 1000, None, BIG, None)]
    return found


@pytest.mark.slow
def test_what_public_functions_return_is_short(made):
    for value in made:
        short(value)
    assert len(made[1]) > 20 and "not matched" not in repr(made[1])
    assert repr(made[0]) == str(made[0]) and repr(made[6]).startswith("TracedModule(UNet2DConditionModel: ")
    assert "passes lora (" in repr(made[6]) and "tensor(" not in repr(made[10])


@pytest.mark.slow
def test_the_largest_models_are_short_too():
    gm, _, kwargs = unets.sdxl_full_traced()
    sites = fxplug.find(gm, fxplug.load_pass("lora", at="all-linear"))
    new = fxplug.apply(gm, sites)
    for value in (gm, new, sites, sites[0], new.graph.owning_module):
        short(value)
    with pytest.raises(fxplug.GuardError) as caught:
        new(**{**kwargs, "added_cond_kwargs": BIG})
    short(caught.value)


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_class_is_short_whatever_it_holds(name):
    kind = CLASSES[name]
    if issubclass(kind, FxplugError):
        for error in (kind("short"), kind("\n".join(map(str, range(9999)))), kind("\x1b[1m" * 5000), kind("\n\n" * 5000)):
            short(error)
        return
    value = object.__new__(kind)
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            object.__setattr__(value, field.name, BIG)
        assert name == "Limits" or len(repr(value).encode()) < MOST  # which are twenty numbers
    elif issubclass(kind, nn.Module):
        nn.Module.__init__(value)
        value.module = unets.sd15().gm
        assert len(nn.Module.__repr__(value.module)) > 5 * MOST > len(repr(value.module))
    elif "__repr__" in vars(kind):
        many = [f"pass{i}" * 20 for i in range(500)]
        held = {"names": many, "slots": 500, "manifest": {"module": "A" * 200, "passes": many, "opset": 20}, "device": "cpu"}
        held |= {"rows": [{name: 1.0} for name in many], "single": False}
        stand_in = SimpleNamespace(**held)
        stand_in._described = lambda more: kind._described(stand_in, more)
        assert len(kind.__repr__(stand_in)) < MOST


def test_every_dataclass_that_public_functions_return_is_short():
    seen = 0
    for found in pkgutil.walk_packages(fxplug.__path__, "fxplug."):
        if found.name.endswith("__main__") or ".compat." in found.name:
            continue
        for kind in vars(importlib.import_module(found.name)).values():
            own = isinstance(kind, type) and kind.__module__ == found.name and dataclasses.is_dataclass(kind)
            if own and vars(kind).get("__repr__") is fxplug.core.errors.format_fields:
                value = object.__new__(kind)
                for field in dataclasses.fields(kind):
                    object.__setattr__(value, field.name, BIG)
                assert len(repr(value)) <= LONGEST
                seen += 1
    assert seen > 25


@pytest.mark.parametrize(
    "value, text",
    [
        (torch.zeros(3, 4), "Tensor [3, 4] torch.float32"),
        (nn.Parameter(torch.zeros(2)), "Parameter [2] torch.float32"),
        (nn.Linear(2, 2), "Linear(...)"),
        ([torch.zeros(2)] * 9, "[" + "Tensor [2] torch.float32, " * 6 + "...]"),
        ({"a": {"b": {"c": {"d": 1}}}}, "{'a': {'b': {'c': {...}}}}"),
        ("x\x1b[1m", "'x\\x1b[1m'"),
        pytest.param(10**400, "a number of about 398 digits", id="number"),
    ],
)
def test_values_in_few_words(value, text):
    assert format_brief(value) == text


def test_a_value_whose_text_fails_is_named():
    class Odd:
        def __repr__(self):
            raise RuntimeError("no")

    class Shape:
        shape = property(lambda self: 1 / 0)
        dtype = None

    assert "Odd" in format_brief(Odd()) and "Shape" in format_brief(Shape())


def test_a_long_text_loses_its_middle():
    text = "\n".join(f"line {i}" for i in range(5000))
    assert cut_lines("short") == "short"
    assert cut_lines(text).startswith("line 0\n") and cut_lines(text).endswith("line 4999") and len(cut_lines(text)) <= LONGEST
    assert len(cut_lines("x" * 10**6)) <= LONGEST


@pytest.mark.parametrize("wrong", [BIG, LONG, torch.zeros(300, 300), "x" * 10**5], ids=["dict", "list", "tensor", "text"])
def test_a_wrong_argument_is_not_printed(wrong):
    gm, _, kwargs = unets.sd15()
    for name in ("timestep", "cross_attention_kwargs", "encoder_hidden_states"):
        if name == "cross_attention_kwargs" and isinstance(wrong, dict):
            continue  # which the model takes
        with pytest.raises(fxplug.GuardError) as caught:
            gm(**{**kwargs, name: wrong})
        short(caught.value)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("option", ["rank", "dropout", "slots", "at", "expect", "bias"])
def test_a_wrong_option_is_not_printed(option):
    with pytest.raises((FxplugError, TypeError)) as caught:
        fxplug.apply(unets.sd15().gm, fxplug.load_pass("lora", **{option: torch.zeros(300, 300)}))
    short(caught.value)


class Broken(nn.Module):
    def forward(self, x):
        return x @ x


def test_torch_logs_no_traceback_of_an_error_that_is_raised(caplog, capfd):
    with caplog.at_level(logging.DEBUG, logger=FAKE_TENSOR_LOG), pytest.raises(RuntimeError, match="reduction dim|shapes"):
        fxplug.trace(Broken(), (torch.zeros(3, 4),))
    assert not [record for record in caplog.records if record.name == FAKE_TENSOR_LOG and record.levelno >= logging.WARNING]
    assert "Traceback" not in capfd.readouterr().err


def test_only_the_thread_that_traces_is_quiet(caplog):
    log = logging.getLogger(FAKE_TENSOR_LOG)
    before = (log.level, list(log.filters))
    with caplog.at_level(logging.DEBUG, logger=FAKE_TENSOR_LOG):
        with silence_torch(), silence_torch():
            log.error("mine")
            other = threading.Thread(target=log.error, args=("another's",))
            other.start()
            other.join()
        log.error("after")
    assert [r.getMessage() for r in caplog.records if r.name == FAKE_TENSOR_LOG] == ["another's", "after"]
    assert (log.level, list(log.filters)) == before
