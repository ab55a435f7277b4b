"""The page for those who come from another system: every line of it is run, or held to the code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path

import diffusers
import pipelines
import pytest
import small
import torch
import typer
import yaml

import fxplug
from fxplug.__main__ import app
from fxplug.config.run_config import make_config_model
from fxplug.core.spec.pass_file import check_options, get_arguments
from fxplug.training.optimizers import make_optimizer
from fxplug.training.param_groups import make_scheduler
from fxplug.training.tasks.conditioning import FolderText
from fxplug.training.tasks.noise import open_noise
from fxplug.training.tasks.task import make_task
from fxplug.training.train_section import read_use

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/coming-from.md").read_text()
VERBS = typer.main.get_command(app)
# what names in the code stand for; of an object the class, with what leads to it
ROOTS = {"fxplug": fxplug, "torch": torch}
OBJECTS = {"new.adapters": fxplug.Adapters, "pipe.vae": diffusers.AutoencoderKL, "pipe": diffusers.DiffusionPipeline}


def lines():
    """The pieces of code in the right columns, with the system whose section they stand in."""
    for section in PAGE.split("\n## ")[1:]:
        system = section.partition("\n")[0]
        for row in re.findall(r"^\| .*$", section, re.MULTILINE)[1:]:
            here = re.split(r"(?<!\\)\|", row)[2].replace("\\|", "|")
            yield from (pytest.param(system, code, id=f"{system}: {code[:50]}") for code in re.findall(r"`([^`]+)`", here))


def called(code):
    """Each call in a piece of Python is one that its function takes."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        held = next((path for path in OBJECTS if name.startswith(f"{path}.")), "")
        root, _, rest = name.partition(".")
        value = OBJECTS[held] if held else ROOTS[root]
        for part in (name.removeprefix(f"{held}.") if held else rest).split("."):
            value = getattr(value, part)
        own = [None] if held else []
        inspect.signature(value).bind(*own, *node.args, **{k.arg: k.value for k in node.keywords})


def typed(code):
    """A command is a verb with options and arguments that it takes."""
    _, verb, *words = code.split()
    command = VERBS.get_command(None, verb)
    if hasattr(command, "commands"):
        return
    known = {name for parameter in command.params for name in parameter.opts if name.startswith("-")}
    assert {word for word in words if word.startswith("-")} <= known
    required = [p for p in command.params if p.param_type_name == "argument" and p.required]
    assert len([w for w in words if not w.startswith("-")]) >= len(required)


@cache
def dit():
    """A diffusion transformer as its pipeline calls it."""
    found = pipelines.made("pixart")
    return fxplug.trace(found.pipe.transformer, *found.called_with())


def configured(data, base):
    """Keys of a configuration are read as one; what `train` names is made, as far as it is installed and no file is needed."""
    train = {"task": {"denoise": {}}, **data.get("train", {})}
    train |= {} if "epochs" in train else {"steps": 10}
    config = fxplug.load_config({"model": "resnet18", "data": {"images": "photographs"}, **data, "train": train}, base=base)
    task = make_task(config.train.task)
    if task.text_spec is not None:
        check_options(get_arguments(FolderText, 2), read_use(task.text_spec).options, "a text encoder")
    said = {key: getattr(task, key) for key in ("prediction", "snr_gamma", "weighting", "time_scale")}
    open_noise(task.scheduler, Path(), latents=True, **said)
    use = config.train.optimizer
    if ":" not in use.name or importlib.util.find_spec(use.name.partition(".")[0].partition(":")[0]):
        group = {"params": [torch.nn.Parameter(torch.ones(2))], "name": "all", "lr": config.train.lr, "weight_decay": 0.0}
        make_scheduler(config.train.scheduler, make_optimizer(use, [group]), 100, 10)


@pytest.mark.parametrize(("system", "code"), list(lines()))
def test_a_line_does_what_it_says(system, code, tmp_path):
    if code.startswith("- "):
        gm = dit() if system == "xDiT" else small.unet().gm if system == "diffusers" else small.vit().gm
        for entry in yaml.safe_load(code):
            ((name, given),) = entry.items() if isinstance(entry, dict) else ((entry, {}),)
            assert fxplug.find(gm, fxplug.load_pass(name, **given))
    elif code.partition(": ")[0] in make_config_model().model_fields:
        for folder in re.findall(r"diffusers: ([\w/]+)", code):
            (tmp_path / folder).mkdir(parents=True)
        configured(yaml.safe_load(code), tmp_path)
    elif code.startswith("fxplug "):
        typed(code)
    elif code.startswith("make: "):
        module, _, name = code.removeprefix("make: ").partition(":")
        assert callable(getattr(importlib.import_module(module), name))
    elif re.match(r"[\w.]+(\(| = )|from ", code):
        called(code)
    else:
        assert re.fullmatch(r"[\w.]+|-?-[\w-]+", code) or "/" in code, "a word: a key, a section, a file, an option"


def test_files_that_the_docs_name_are_there():
    files = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "examples/README.md"]
    texts = {file: file.read_text() for file in files}
    ours = re.compile(r"`((?:fxplug|tests|benchmarks|examples|passes|configs)/[\w./-]+)`")
    named = {(file.name, path) for file, text in texts.items() for path in ours.findall(text)}
    assert sorted((page, path) for page, path in named if not (ROOT / path).exists()) == []
