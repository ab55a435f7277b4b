"""Answers of dry runs that are kept: word for word those that are made anew, and never given where anything has changed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import diffusers
import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

import fxplug.flow
from fxplug.__main__ import app
from fxplug.cli import answers, ending
from fxplug.files import entries, reading
from fxplug.spec.run_config import load_config

OPTIONS = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "num_classes": 3}
VIT = {"model": {"timm": "vit_tiny_patch16_224", "options": OPTIONS}}
LORA = {"passes": [{"mine.yaml": {"rank": 2}}]}
PASS = """\
params: {at: "blocks.*.attn.*", rank: 4}
rules:
  - match: {path: $at, module: Linear}
    use: fxplug.blocks:Lora
    options: {rank: $rank}
"""
UNET = {
    "block_out_channels": [8, 8], "norm_num_groups": 4, "sample_size": 8, "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 8, "attention_head_dim": 4,
}  # fmt: skip
QUESTIONS = ["sites", "sites --all", "diff", "diff --all", "show", "show --modules", "show --code", "rewrite --dry-run --all"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A cache and a working folder of its own. The tests' own files are loaded, which would keep all from being kept."""
    monkeypatch.setenv("FXPLUG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(entries, "users_modules", list)
    monkeypatch.setattr(entries, "BEGAN", time.time_ns() + 10**12)
    monkeypatch.setattr(entries, "_under", {"files": {}, "packages": {}})
    monkeypatch.setattr(entries, "_warned", type("Forgetful", (set,), {"add": lambda *_: None})())
    monkeypatch.setattr(answers, "at_once", lambda: None)
    monkeypatch.syspath_prepend(str(tmp_path))  # is left as it was
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write("mine.yaml", PASS)
    write("c.yaml", {**VIT, **LORA})
    return tmp_path / "cache" / "traces"


@pytest.fixture
def asked(monkeypatch):
    """Runs a verb; the answer, and whether it was made now."""
    made = []
    run = fxplug.flow.rewrite

    def counted(*args, **how):
        made.append(args)
        return run(*args, **how)

    monkeypatch.setattr(fxplug.flow, "rewrite", counted)

    def ask(*words, code=0):
        made.clear()
        before = list(sys.path)
        result = CliRunner().invoke(app, words, prog_name="fxplug")
        sys.path[:] = before
        assert result.exit_code == code, result.output
        return (result.stderr if code else result.stdout), bool(made)

    return ask


def write(path, data):
    Path(path).write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False))


def given(asked, *words):
    """The answer to these words, which is kept by now, and right."""
    text, made = asked(*words)
    assert not made
    assert asked(*words, "--no-cache") == (text, True)
    return text


def made_anew(asked, *words, why=None):
    """The answer to these words, which is not the kept one, and right; a warning says why, where there is one."""
    with pytest.warns(entries.NotKept, match=why) if why else nullcontext():
        text, made = asked(*words)
    assert made
    assert asked(*words, "--no-cache") == (text, True)
    return text


def refused(asked, *words, why):
    """What goes to stderr where a kept answer is not given, and none can be made."""
    with pytest.warns(entries.NotKept, match=why):
        return asked(*words, code=1)[0]


def test_each_question_has_its_answer_word_for_word(asked):
    texts = {question: asked(*question.split(), "c.yaml") for question in QUESTIONS}
    assert all(made for _, made in texts.values())
    assert [asked(*question.split(), "c.yaml") for question in QUESTIONS] == [(text, False) for text, _ in texts.values()]
    assert len({text for text, _ in texts.values()}) == len(QUESTIONS)


def test_no_cache_neither_reads_nor_keeps(asked, place):
    asked("sites", "c.yaml", "--no-cache")
    assert not place.exists()


def test_whatever_a_configuration_says_is_another_question(asked):
    first = asked("sites", "c.yaml")[0]
    assert "rank" not in first and "504" not in first
    for change in ("passes.0.mine.yaml.rank=3", "model.options.num_classes=5", "mode=train"):
        made_anew(asked, "sites", "c.yaml", "--set", change)
    write("mine.yaml", PASS.replace("attn.*", "mlp.*"))
    assert "mlp" in made_anew(asked, "sites", "c.yaml")
    write("c.yaml", {**VIT, "passes": ["mine.yaml"], "inputs": {"x": [3, 3, 32, 32]}})
    assert "[3, 5, 24]" in made_anew(asked, "sites", "c.yaml")
    write("mine.yaml", PASS)
    write("c.yaml", {**VIT, **LORA})
    assert given(asked, "sites", "c.yaml") == first


def test_the_same_words_in_another_folder_are_about_its_own_files(asked, monkeypatch):
    here = asked("sites", "c.yaml")[0]
    os.mkdir("other")
    write("other/c.yaml", {**VIT, **LORA})
    write("other/mine.yaml", PASS.replace("attn.*", "mlp.*"))
    assert made_anew(asked, "sites", "other/c.yaml") != here
    monkeypatch.chdir("other")
    assert made_anew(asked, "sites", "c.yaml") != here
    assert made_anew(asked, "sites", "../c.yaml") == here
    os.rename("mine.yaml", "real.yaml")
    os.symlink("real.yaml", "mine.yaml")
    assert "mlp" in given(asked, "sites", "c.yaml")
    os.unlink("mine.yaml")
    os.symlink("../mine.yaml", "mine.yaml")
    assert made_anew(asked, "sites", "c.yaml") == here


def test_a_file_of_weights_is_looked_at_each_time(asked):
    save_file(timm.create_model("vit_tiny_patch16_224", **OPTIONS).state_dict(), "w.safetensors")
    write("c.yaml", {**VIT, **LORA, "weights": "w.safetensors"})
    text = asked("sites", "c.yaml")[0]
    assert given(asked, "sites", "c.yaml") == text
    about = os.stat("w.safetensors")
    whole = Path("w.safetensors").read_bytes()
    Path("w.safetensors").write_bytes(whole.replace(b"blocks.0.attn.qkv.bias", b"blocks.0.attn.qkv.byes", 1))
    os.utime("w.safetensors", ns=(about.st_atime_ns, about.st_mtime_ns))  # of the same size and time
    assert "blocks.0.attn.qkv.byes" in refused(asked, "sites", "c.yaml", why="w.safetensors has changed")
    Path("w.safetensors").write_bytes(whole)
    made_anew(asked, "sites", "c.yaml")
    Path("other.safetensors").write_bytes(whole)
    os.unlink("w.safetensors")
    os.symlink("other.safetensors", "w.safetensors")
    made_anew(asked, "sites", "c.yaml", why="w.safetensors has changed")
    os.unlink("other.safetensors")
    assert "w.safetensors" in refused(asked, "sites", "c.yaml", why="w.safetensors has changed")


def test_a_folder_of_diffusers_is_looked_at_each_time(asked):
    diffusers.UNet2DConditionModel(**UNET).save_pretrained("unet")
    inputs = {"sample": [1, 4, 8, 8], "timestep": {"value": 3}, "encoder_hidden_states": [1, 5, 8]}
    write("c.yaml", {"model": "unet", "inputs": inputs, "passes": [{"lora": {"at": "**.to_q"}}]})
    asked("sites", "c.yaml")
    said = json.loads(Path("unet/config.json").read_text())
    Path("unet/config.json").write_text(json.dumps({**said, "attention_head_dim": 2}))
    made_anew(asked, "sites", "c.yaml", why="config.json has changed")
    os.rename("unet/diffusion_pytorch_model.safetensors", "unet/a.safetensors")
    made_anew(asked, "sites", "c.yaml")
    save_file({"x": torch.zeros(1)}, "unet/b.safetensors")
    assert "several weights" in asked("sites", "c.yaml", code=1)[0]


def test_every_file_that_a_dry_run_opens_is_looked_at(asked, monkeypatch):
    save_file(timm.create_model("vit_tiny_patch16_224", **OPTIONS).state_dict(), "w.safetensors")
    write("c.yaml", {**VIT, **LORA, "weights": "w.safetensors"})
    here, opened = os.getcwd(), set()
    watching = []

    def hook(event, args):
        if watching and event == "open" and isinstance(args[0], (str, os.PathLike)):
            opened.add(os.path.abspath(args[0]))

    sys.addaudithook(hook)
    kept = []
    monkeypatch.setattr(answers.KeptAnswer, "write", lambda self, answer, said, files: kept.extend(files))
    watching.append(True)
    asked("sites", "c.yaml")
    watching.clear()
    mine = {file for file in opened if file.startswith(here)}
    assert mine - {f"{here}/c.yaml", f"{here}/mine.yaml"} == {f"{here}/w.safetensors"} == {*kept}


def test_what_others_made_is_not_kept(asked, place, monkeypatch):
    def named(config, set=()):
        return answers.KeptAnswer(load_config({**VIT, **LORA, **config}, set), ["rows"]).name

    assert named({}) is not None
    assert named({"model": {"call": "torchvision.models:resnet18"}, "inputs": {"x": [1, 3, 32, 32]}}) is None
    for option in ({"pretrained": True}, {"checkpoint_path": "w.pth"}, {"pretrained_cfg_overlay": {"file": "w.pth"}}):
        assert named({"model": {"timm": "vit_tiny_patch16_224", "options": option}}) is None
    assert named({"device": "cuda"}) is None
    rule = {"match": {"path": "blocks.0"}, "use": "mine:Block"}
    write("local.yaml", {"rules": [rule]})
    write("wrapped.yaml", {"rules": [{**rule, "use": "fxplug.blocks:Replace", "options": {"module": "mine:Block"}}]})
    for one in ("local.yaml", "wrapped.yaml", "controlnet", "batch_parallel", {"blitz": {"lines": []}}):
        try:
            assert named({"passes": [one]}) is None, one
        except fxplug.SpecError:
            assert isinstance(one, dict)
    asked("sites", "c.yaml")
    monkeypatch.setattr(entries, "users_modules", lambda: ["mine"])
    made_anew(asked, "sites", "c.yaml")


def test_an_answer_out_of_a_kept_trace_ends_with_what_made_the_trace(asked, place, monkeypatch, tmp_path):
    source = tmp_path / "library.py"
    source.write_text("x = 1\n")
    loaded = entries._loaded
    monkeypatch.setattr(entries, "_loaded", lambda: [*loaded(), ("library.part", str(source))])
    asked("sites", "c.yaml")
    monkeypatch.setattr(entries, "_loaded", loaded)  # as in a process that takes the trace and need not import it
    monkeypatch.setattr(entries, "_under", {"files": {}, "packages": {}})
    made_anew(asked, "diff", "c.yaml")
    given(asked, "diff", "c.yaml")
    source.write_text("x = 2\n")
    made_anew(asked, "diff", "c.yaml", why="library.py has changed")


def test_the_environment_and_the_way_python_was_started_are_looked_at(asked, monkeypatch):
    asked("sites", "c.yaml")
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    monkeypatch.setattr(entries, "_warned", set())
    with pytest.warns(entries.NotKept) as caught:
        asked("sites", "c.yaml")
    assert ["its environment is another now" in str(one.message) for one in caught] == [True]  # of the trace, too
    given(asked, "sites", "c.yaml")
    for owner, name in ((sys, "warnoptions"), (sys, "path")):
        monkeypatch.setattr(owner, name, [*getattr(owner, name), "more"])
        made_anew(asked, "sites", "c.yaml")
    write("xformers.py", "")  # a library may look whether there is one
    made_anew(asked, "sites", "c.yaml")


def test_warnings_are_shown_again(asked, recwarn, monkeypatch):
    trace = fxplug.flow.trace

    def warning(*args, **how):
        warnings.warn("this graph has a backward of its own", stacklevel=1)
        return trace(*args, **how)

    monkeypatch.setattr(fxplug.flow, "trace", warning)
    for question, made in (("sites", True), ("sites", False), ("diff", True), ("diff", False)):
        recwarn.clear()
        assert asked(question, "c.yaml")[1] == made
        assert "has a backward of its own" in " ".join(str(one.message) for one in recwarn), question


def test_whatever_is_damaged_the_answer_is_right(asked, place):
    text = asked("sites", "c.yaml")[0]
    file = max(place.iterdir(), key=lambda one: one.stat().st_mtime_ns)
    whole, draw = file.read_bytes(), random.Random(0)
    assert text.splitlines()[0].encode() in whole
    broken = [b"", b"\n", b"[]\n[]\n[]", whole[:-9], whole[64:], whole + b" ", b"\xff" * 99, b"[" * 99_999, b"0" * (65 << 20)]
    for _ in range(20):
        at = draw.randrange(len(whole))
        broken.append(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
    for number, content in enumerate(broken):
        file.write_bytes(content)
        kept = answers.KeptAnswer(load_config("c.yaml"), ["rows", False, False])
        kept.name = file.name
        with pytest.warns(entries.NotKept, match="damaged|has [0-9]+ bytes"):
            assert kept.read() is None, number
        assert not file.exists(), "it is said once"
    os.mkdir(file)
    assert made_anew(asked, "sites", "c.yaml", why="it cannot be read|Is a directory") == text
    os.rmdir(file)
    os.symlink(place / "elsewhere", file)
    assert made_anew(asked, "sites", "c.yaml", why="it cannot be read") == text
    assert given(asked, "sites", "c.yaml") == text


def test_code_that_changed_while_it_ran_keeps_nothing(asked, place, monkeypatch):
    monkeypatch.setattr(entries, "BEGAN", os.stat(torch.__file__).st_mtime_ns - 1)
    asked("sites", "c.yaml")
    assert not place.exists() or os.listdir(place) == []


def test_a_file_is_noted_as_it_was_when_it_was_opened(tmp_path):
    write(tmp_path / "a.json", "[1]")
    with reading.noted() as outer, reading.noted() as inner:
        reading.read_json(tmp_path / "a.json")
        before = os.stat(tmp_path / "a.json")
        write(tmp_path / "a.json", "[1, 2]")
    assert outer == inner and [entries.state(one) for one in inner.values()] == [entries.state(before)]
    assert reading._notes == []


PEEK = """\
import sys
sys.argv = ["fxplug", "sites", "c.yaml"]
from fxplug.cli.answers import KeptAnswer
from fxplug.cli.verbs import read_config
import fxplug.__main__
KeptAnswer(read_config("c.yaml", None), ["rows"]).read()
print({"torch", "numpy", "timm", "diffusers"} & {*sys.modules})
"""


def test_an_answer_is_looked_up_without_torch():
    assert subprocess.run([sys.executable, "-c", PEEK], capture_output=True, text=True, check=True).stdout == "set()\n"


ENDS = """\
import atexit, os, sys
from fxplug.cli import ending
class Late:
    def __del__(self): os.write(1, b"taken apart")
late = Late()
def command():
    atexit.register(print, "handler")
    if "at once" in sys.argv: ending.at_once()
    print("text")
    if "closed" in sys.argv: os.close(1)
    sys.exit(int(sys.argv[1]))
ending.ended(command)
"""


@pytest.mark.parametrize(
    "words, code, out",
    [
        ([0], 0, "text\nhandler\ntaken apart"),
        ([0, "at once"], 0, "text\nhandler\n"),
        ([3, "at once"], 3, "text\nhandler\ntaken apart"),
        ([0, "at once", "closed"], 120, ""),
    ],
)
def test_a_process_ends_at_once_after_all_its_exit_handlers(words, code, out):
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", ENDS, *map(str, words)], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (code, out)
    assert ending._state == {"at once": False, "code": 1}


@pytest.mark.slow
def test_the_command_gives_the_same_twice(tmp_path):
    environment = {**os.environ, "FXPLUG_CACHE": str(tmp_path / "mine")}

    def run():
        command = [sys.executable, "-X", "importtime", "-m", "fxplug", "sites", "c.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout, "torch._C" in done.stderr

    (first, imported), (second, again) = run(), run()
    assert first == second != "" and imported and not again
