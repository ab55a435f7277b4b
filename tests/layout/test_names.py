"""Names: a class name stands for one thing, functions that other files use begin with a verb, and classes are nouns."""

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


# with which a function begins that another file uses
VERBS = set(
    "add admit align allow apply assemble bind block bound break build call change check choose collect compile"
    " complete compute convert copy count cut declare decode decompose delete describe detach disable divide draw drop encode"
    " erase escape expand explain fill find fit fold forbid format freeze get guard guess has hold import insert is"
    " join keep learn leave limit list load locate lock log make map match may measure move multiply name need nest note open"
    " parse patch pause place plan pop prefix prepare print put quote raise read rebuild record redirect refuse rename"
    " repeat replace report resolve restore retrace rewire rotate run save select separate set shorten show silence sort"
    " split strip summarize swap switch trace translate trim unwrap update use validate view visit warn wrap write".split()
)
VERBS |= set(
    "assign attend average begin catch classify collate compare confirm construct create crop define digest dump"
    " end evaluate exchange export flatten fuse gather give group hide merge mix narrow observe outline pair pick"
    " predict preserve prove quantize rebase remake remember replan rescale seal seed shard share silence simulate"
    " solve start take try undo unflatten unpack walk".split()
)
VERBS |= {"as", "with", "without"}  # a changed copy, as `with_suffix` and `as_posix` of pathlib are
KEPT = {
    "serving.parked.Cancelled",  # an exception, named as that of concurrent.futures
    "core.errors.did_you_mean",  # the text that it gives
    "core.verifier.Unsupported", "core.rewriter.probe.Unchecked", "core.capture.self_check.ValueNotSaved",  # exceptions
    "core.capture.graph_builder.Recording",  # a noun
    "compat.zhijian.addin_factory.settings", "compat.zhijian.imports.stand_in", "compat.zhijian.reuse.model_config",
    "compat.zhijian.reuse.reuse_keys",  # ZhiJian's words, which its users import
    "exports.blockers.CompileRefused", "parallel.planning.streams.OperationRefused", "pipelines.recorded_run.EndOfRecording",
}  # fmt: skip
# what no rule holds yet; core.ir.ops has the targets of graphs, whose names are in saved files
NOT_HELD = ("core.ir.ops", "adapters.writing.Saved", "step_cache.steps.Stepped")


def used_elsewhere():
    """Yield the dotted path and node of each function and class of a module that another file of ours imports."""
    trees = {".".join(f.relative_to(ROOT).with_suffix("").parts): ast.parse(f.read_text()) for f in sorted(ROOT.rglob("*.py"))}
    kinds = (ast.FunctionDef, ast.ClassDef)
    defined = {f"{name}.{n.name}": n for name, tree in trees.items() for n in tree.body if isinstance(n, kinds)}
    used = set()
    for name, tree in trees.items():
        modules = {}  # by the name that they have in this file
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fxplug")):
                start = name.split(".")[: -node.level] if node.level else []
                path = ".".join(filter(None, [*start, (node.module or "").removeprefix("fxplug").strip(".")]))
                for alias in node.names:
                    used.add(f"{path}.{alias.name}".strip("."))
                    modules[alias.asname or alias.name] = ".".join(filter(None, [path, alias.name]))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                used.add(f"{modules[node.value.id]}.{node.attr}")
    for path, node in defined.items():
        if path.replace(".__init__", "") in used and not node.name.startswith("_"):
            yield path, node


def unlike_words(names):
    """The functions that begin with no verb, and the classes that are participles."""
    wrong = []
    for path, node in names:
        public = node.name in fxplug.__all__ or path in KEPT
        held = not any(f"{path}.".startswith(f"{other}.") for other in NOT_HELD)
        fits = not node.name.endswith(("ed", "ing")) if isinstance(node, ast.ClassDef) else node.name.split("_")[0] in VERBS
        wrong += [path] if held and not public and not fits else []
    return wrong


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


def test_a_function_that_other_files_use_begins_with_a_verb_and_a_class_is_a_noun():
    names = list(used_elsewhere())
    assert len(names) > 1000
    assert unlike_words(names) == []


def test_each_verb_and_each_exception_is_needed():
    names = [(path, node) for path, node in used_elsewhere() if isinstance(node, ast.FunctionDef)]
    assert VERBS - {node.name.split("_")[0] for _, node in names} == set()
    assert KEPT - {path for path, _ in used_elsewhere()} == set()


def test_a_public_function_is_documented_by_what_it_does():
    found = dict(summaries())
    assert len(found) > 100
    assert {name: line for name, line in found.items() if line.partition(" ")[0].lower() in {"", *NO_VERBS}} == {}


@pytest.mark.parametrize("code", ["def leaves(): pass", "class Joined: pass"])
def test_an_imported_name_that_is_no_verb_is_seen(code, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(code)
    name = ast.parse(code).body[0].name
    for line in (f"from .module import {name}", f"from . import module\nmodule.{name}"):
        (tmp_path / "other.py").write_text(line)
        assert unlike_words(used_elsewhere()) == [f"module.{name}"]


@pytest.mark.parametrize("code", ["class Plan: pass\nclass _Plan: pass", "class A:\n    def told(self): pass"])
def test_what_breaks_the_rules_is_seen(code, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(code)
    assert collisions(_definitions()) or habits(_definitions())
