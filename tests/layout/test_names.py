"""Names: a class name stands for one thing, and functions and classes are not called by participles that say nothing."""

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path

import pytest

import fxplug

ROOT = Path(fxplug.__file__).parent
# participles, pronouns and idioms that name no thing and no action
HABITS = set(
    "told said asked answered held given found again whole mine undone forgotten restored turns births standing wearing lies"
    " blamed excused hindered hindrance gone taken".split()
)


def _definitions():
    for file in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for owner in [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]:
            for node in owner.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    path = file.relative_to(ROOT).as_posix()
                    yield path, f"{owner.name}.{node.name}" if isinstance(owner, ast.ClassDef) else node.name, node


# with which no sentence begins that says what to do
NO_VERBS = set("a an all another as at both called calls each every for from how in it its no of one same the this".split())
NO_VERBS |= set("what when where whether which while whose with".split())


def summaries():
    """The first line of what documents each public function, and each method of a public class, by name; what torch names so
    is documented there."""
    for name in fxplug.__all__:
        thing = getattr(fxplug, name)
        members = vars(thing) if isinstance(thing, type) else {"": thing}
        for key, member in members.items():
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            inherited = key in ("extra_repr", "graphs_of")
            if inspect.isfunction(function) and not key.startswith("_") and not inherited:
                yield f"{name}.{key}".rstrip("."), (function.__doc__ or "").strip().partition("\n")[0]


def _words(name):
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2]).lower().strip("_").split("_")


def collisions(definitions):
    """The files of each class name, without the underscore that says it is private, that stands for several classes."""
    files = defaultdict(list)
    for path, name, node in definitions:
        if isinstance(node, ast.ClassDef):
            files[node.name.lstrip("_")].append(f"{path} {name}")
    return {name: places for name, places in files.items() if len(places) > 1}


def habits(definitions):
    """The functions and classes whose name is a habit, or ends in one."""
    return [f"{path} {name}" for path, name, _ in definitions if _words(name)[-1] in HABITS or _words(name) == ["same"]]


def test_a_class_name_stands_for_one_thing():
    assert collisions(_definitions()) == {}


def test_no_name_is_a_habit():
    assert habits(_definitions()) == []


def test_a_public_function_is_documented_by_what_it_does():
    found = dict(summaries())
    assert len(found) > 100
    assert {name: line for name, line in found.items() if line.partition(" ")[0].lower() in {"", *NO_VERBS}} == {}


@pytest.mark.parametrize("code", ["class Plan: pass\nclass _Plan: pass", "class A:\n    def told(self): pass"])
def test_what_breaks_the_rules_is_seen(code, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(code)
    assert collisions(_definitions()) or habits(_definitions())
