"""The page for those who come from another system: every line of it is run, or held to the code."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import small
import typer
import yaml

import fxplug
from fxplug.__main__ import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/coming-from.md").read_text()
VERBS = typer.main.get_command(app)
ROOTS = {"fxplug": fxplug, "new": fxplug.Adapters}  # what names in the code stand for; new.adapters is an Adapters


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
        names = ast.unparse(node.func).split(".")
        value = ROOTS[names[0]]
        for name in names[2:] if names[0] == "new" else names[1:]:
            value = getattr(value, name)
        own = [None] if names[0] == "new" else []
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


@pytest.mark.parametrize(("system", "code"), list(lines()))
def test_a_line_does_what_it_says(system, code):
    if code.startswith("- "):
        base = small.unet() if system == "diffusers" else small.vit()
        for entry in yaml.safe_load(code):
            ((name, given),) = entry.items() if isinstance(entry, dict) else ((entry, {}),)
            assert fxplug.find(base.gm, fxplug.load_pass(name, **given))
    elif code.startswith("fxplug "):
        typed(code)
    elif code.startswith("make: "):
        module, _, name = code.removeprefix("make: ").partition(":")
        assert callable(getattr(importlib.import_module(module), name))
    elif re.match(r"[\w.]+(\(| = )|from ", code):
        called(code)
    else:
        assert re.fullmatch(r"[a-z]+", code), "a word: a key, or a section"


def test_files_that_the_docs_name_are_there():
    files = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "examples/README.md"]
    texts = {file: file.read_text() for file in files}
    ours = re.compile(r"`((?:fxplug|tests|benchmarks|examples|passes|configs)/[\w./-]+)`")
    named = {(file.name, path) for file, text in texts.items() for path in ours.findall(text)}
    assert sorted((page, path) for page, path in named if not (ROOT / path).exists()) == []
