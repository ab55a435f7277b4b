"""Traces that are kept on disk: the same as one made anew, and never used where anything of what made them has changed."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
import warnings

import diffusers  # noqa: F401  # it sets variables of the environment
import pytest
import timm  # noqa: F401

import fxplug
from fxplug import diff, rewrite, show
from fxplug.files import entries
from fxplug.flow import _kept
from fxplug.spec.run_config import load_config

MODELS = {
    "vit": {"model": {"timm": "vit_tiny_patch16_224", "options": {"depth": 2, "embed_dim": 24, "num_heads": 3}}},
    "batch norms": {"model": {"timm": "resnet10t"}, "mode": "train", "dtype": "float16"},
    "rope": {"model": {"timm": "vit_small_patch16_rope_224", "options": {"depth": 1}}},
    "windows": {"model": {"timm": "swin_tiny_patch4_window7_224", "options": {"depths": [1, 1], "num_heads": [2, 2]}}},
    "unet": {
        "model": {
            "diffusers": {
                "_class_name": "UNet2DConditionModel", "block_out_channels": [8, 16], "norm_num_groups": 4,
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"], "layers_per_block": 1,
                "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
                "cross_attention_dim": 8, "attention_head_dim": 4,
            }
        },
        "inputs": {"sample": [1, 4, 8, 8], "timestep": {"value": 3}, "encoder_hidden_states": [1, 5, 8]},
    },
}  # fmt: skip
WHILE_TRACING = ("line", "value", "result", "nn_module_stack")  # what only the tracer reads, and classes
USERS = entries.users_modules
LORA = {"passes": [{"lora": {"at": "**", "rank": 2}}]}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A cache of its own; the tests' own files are loaded, which would keep everything from being kept."""
    monkeypatch.setenv("FXPLUG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(entries, "users_modules", list)
    monkeypatch.setattr(entries, "_under", {"files": {}, "packages": {}})
    monkeypatch.setattr(entries, "_warned", type("Forgetful", (set,), {"add": lambda *_: None})())
    return tmp_path / "cache" / "traces"


def dry(config, steps=None):
    def step(text):
        (steps if steps is not None else []).append(text)
        return warnings.catch_warnings()

    return rewrite({**config, **LORA}, dry_run=True, verify=False, cache=True, progress=step)


def told(result):
    base = result.base
    metas = [
        {key: str(value) for key, value in node.meta.items() if key not in WHILE_TRACING}
        for graph in base.graphs.values()
        for node in graph.nodes
    ]
    tensors = [(k, v.shape, v.dtype, v.requires_grad, v.device) for k, v in (*base.named_parameters(), *base.named_buffers())]
    modes = [(name, m.training) for name, m in base.named_modules()]
    inputs = {key: (value.shape, value.dtype) if hasattr(value, "shape") else value for key, value in result.inputs[1].items()}
    texts = [result.listing, diff(result.base, result.module), show(base), show(result.module)]
    code = [line for line in base.code.splitlines() if "Output" not in line and "Record" not in line]
    return metas, tensors, modes, inputs, list(base.state_dict()), texts, code


@pytest.mark.parametrize("name", MODELS)
def test_a_kept_trace_is_the_one_that_is_made_anew(name, place):
    steps = []
    made, kept = dry(MODELS[name]), dry(MODELS[name], steps)
    assert steps[0] == "read the kept trace" and "trace" not in steps and len(os.listdir(place)) == 1
    for mine, theirs in zip(told(kept), told(made), strict=True):
        assert mine == theirs


def found_stale(config=MODELS["vit"]):
    with pytest.warns(UserWarning, match="not used, and made again") as caught:
        steps = []
        rewrite({**config, **LORA}, dry_run=True, verify=False, cache=True)
    dry(config, steps)
    assert "trace" not in steps, "it is said once"
    return str(caught[0].message)


def test_a_damaged_entry_is_made_again(place):
    dry(MODELS["vit"])
    (file,) = place.iterdir()
    whole = file.read_bytes()
    head = whole.partition(b"\n")[0]
    changed = whole.replace(b"call_module", b"call_method", 1)
    for broken in (b"", b"{}\n{}", whole[:-9], whole[:99], head, changed, b"\xff" * 99, b"[" * 9999):
        file.write_bytes(broken)
        assert "damaged" in found_stale()
        assert file.read_bytes().partition(b"\n")[2] == whole.partition(b"\n")[2]


def test_an_entry_ends_with_what_it_was_made_with(place, tmp_path, monkeypatch):
    dry(MODELS["vit"])
    source = tmp_path / "library.py"
    source.write_text("x = 1\n")
    monkeypatch.setattr(entries, "_loaded", lambda: [("library.part", str(source))])
    monkeypatch.setattr(entries, "BEGAN", time.time_ns() + 10**12)  # nothing changes while this runs
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    assert "its environment is another now" in found_stale()
    source.write_text("x = 22\n")
    assert "library.py has changed" in found_stale()
    now = entries.environment()
    monkeypatch.setattr(entries, "environment", lambda: {**now, "version of fxplug": "other"})
    assert "version of fxplug" in found_stale()


def test_what_another_user_could_have_written_is_not_read(place):
    dry(MODELS["vit"])
    place.chmod(0o777)
    with pytest.warns(UserWarning, match="others can write it"):
        rewrite({**MODELS["vit"], **LORA}, dry_run=True, verify=False, cache=True)


def test_the_own_code_of_a_user_is_traced_each_time(place, monkeypatch):
    assert _kept(load_config({"model": {"call": "torchvision.models:resnet18"}, "inputs": {"x": [1, 3, 32, 32]}})) is None
    monkeypatch.setattr(entries, "users_modules", lambda: ["mine"])
    steps = []
    dry(MODELS["vit"], steps)
    assert "trace" in steps and not place.exists()


def test_what_runs_is_a_users_own_but_for_the_command(monkeypatch):
    scripts = sysconfig.get_path("scripts")
    ours = [os.path.join(scripts, "fxplug"), os.path.join(os.path.dirname(fxplug.__file__), "__main__.py")]
    for file in (*ours, os.path.join(scripts, "pytest"), "/elsewhere/fxplug", "script.py", None):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
        assert ("__main__" in USERS()) == (file not in ours), file


def test_another_configuration_has_another_place():
    def name(**changes):
        config = load_config({**MODELS["unet"], **changes})
        return _kept(config).name

    inputs = MODELS["unet"]["inputs"]
    changed = [
        {}, {"mode": "train"}, {"dtype": "float16"}, {"seed": 7}, {"leaf": ["mid_block"]},
        {"inputs": {**inputs, "timestep": {"value": 3.0}}}, {"inputs": {**inputs, "timestep": {"value": True}}},
        {"inputs": {**inputs, "return_dict": {"value": False}}}, {"inputs": dict(reversed(inputs.items()))},
    ]  # fmt: skip
    assert len({name(**each) for each in changed}) == len(changed)
    assert name() == name()


def test_writers_and_readers_at_once_tear_nothing(place, monkeypatch):
    monkeypatch.setattr(entries, "loaded_sources", lambda: {"files": {}, "packages": {}})
    made_with, failures = entries.environment(), []

    def work(number):
        try:
            for turn in range(12):
                entries.write("one.json", made_with, bytes([65 + number]) * 9999)
                body = entries.read("one.json", made_with, 1 << 20)
                assert body is not None and len(set(body)) == 1 and len(body) == 9999, turn
        except BaseException as error:  # for the main thread to see
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and os.listdir(place) == ["one.json"]


def test_the_oldest_go_when_there_are_too_many_and_nothing_else(place, monkeypatch):
    monkeypatch.setattr(entries, "BOUND", 25_000)
    made_with = entries.environment()
    monkeypatch.setattr(entries, "loaded_sources", lambda: {"files": {}, "packages": {}})
    names = [entries.name_of(number) for number in range(4)]
    place.mkdir(mode=0o700, parents=True)
    (place / "thesis.json").write_bytes(b"x" * 30_000)
    os.utime(place / "thesis.json", (1, 1))
    os.symlink("thesis.json", place / (link := f"{'f' * 64}.json"))
    for number, name in enumerate(names):
        entries.write(name, made_with, b"x" * 9_000)
        os.utime(place / name, (number, number))
        if number == 1:
            entries.read(names[0], made_with, 1 << 20)  # it is used: the time of now
    assert sorted(os.listdir(place)) == sorted([names[0], names[3], "thesis.json", link])
