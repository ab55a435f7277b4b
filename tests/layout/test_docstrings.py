"""Docstrings name what is there: each name in backticks is one of the code, of a file, or of a library."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import fxplug

ROOT = Path(fxplug.__file__).parent
LIBRARIES = ("asyncio", "diffusers", "torch", "peft", "safetensors", "onnx", "timm", "transformers", "accelerate", "datasets")
# names of other libraries and languages, and parts of formulas, that ours only speak of
OTHERS = {
    "HCPModelLoader", "add_weighted_adapter", "compile_repeated_blocks", "finally", "load_lora_weights",
    "lora_A", "lora_B", "lora_down", "lora_up", "lru_cache_unless_export", "original0", "original1", "t1", "w_a", "w_b", "yes",
}  # fmt: skip
# whole examples of a name: of a file, of a layer or of a value
EXAMPLES = {
    "NAME.onnx.HASH.data", "Output", "layers.1", "layers.10", "lora.blocks.0.attn.qkv.Lora", "optimizer.state.0.exp_avg",
    "plugins.mine", "text.pooled",
}  # fmt: skip


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Parse each file of the package, once: each worker would pay for it while it collects."""
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text("utf-8")) for file in sorted(ROOT.rglob("*.py"))}


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield file, name and text of each docstring."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, getattr(node, "name", "<module>"), ast.get_docstring(node) or ""


def words_of(tree: ast.Module) -> set[str]:
    """Return all names and texts in the code of a file, its docstrings left out."""
    found: set[str] = set()
    fields = {"name", "id", "attr", "arg", "asname", "module"}
    for node in ast.walk(tree):
        for field in fields.intersection(node._fields):
            found.update(str(getattr(node, field) or "").split("."))
        if isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str) and not isinstance(node, ast.Expr):
                found.update([child.value, *re.findall(r"\w+(?:\.\w+)*", child.value)])
    return found


@functools.cache
def words() -> dict[str, set[str]]:
    """Return the words of each file."""
    return {file: words_of(tree) for file, tree in trees().items()}


@functools.cache
def known() -> set[str]:
    """Return all that a docstring may name without a dot."""
    files = [*ROOT.rglob("*.yaml"), *ROOT.parent.glob("passes/**/*.yaml"), *ROOT.parent.glob("configs/**/*.yaml")]
    data = {word for file in files for word in [file.name, file.stem, *re.findall(r"\w+", file.read_text("utf-8"))]}
    modules = {Path(file).parent.name if file.endswith("__init__.py") else Path(file).stem for file in trees()}
    modules |= {part for file in trees() for part in Path(file).parts[:-1]}
    names = {Path(file).name for file in trees()}
    return set().union(dir(builtins), dir(object), modules, names, data, OTHERS, *words().values())


def exists(name: str, file: str) -> bool:
    """Whether a name, dotted or not, in a file's docstring is one of the code or of a library."""
    if name in known() or name in EXAMPLES:
        return True
    first, *rest = name.split(".")
    if first in LIBRARIES:
        return in_library(name)
    modules = [other for other in trees() if Path(other).stem == first]
    if modules and rest and first not in words().get(file, ()):  # else it is a variable of that name
        return any(rest[0] in words()[other] for other in modules)
    return bool(rest) and all(part in known() for part in (first, *rest))


def in_library(name: str) -> bool:
    """Whether a library has a name, below its modules or in one."""
    module, _, attribute = name.rpartition(".")
    if not module:
        return True
    try:
        importlib.import_module(name)  # a module
    except ModuleNotFoundError:
        try:
            return hasattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError:
            owner, _, kind = module.rpartition(".")
            return bool(owner) and hasattr(getattr(importlib.import_module(owner), kind, None), attribute)
    return True


def stale(texts: Iterator[tuple[str, str, str]]) -> list[str]:
    """Return the names in backticks, and the errors that are said to be raised, that exist nowhere."""
    found = []
    for file, owner, text in texts:
        names = re.findall(r"(?<!`)`([A-Za-z_][\w.]*\w)(?:\([^`]*\))?`(?!`)", text)
        names += re.findall(r"\bRaises (?:an? )?([A-Z]\w+)", text)
        found += [f"{file} {owner}: {name}" for name in names if not exists(name, file)]
    return found


def test_the_names_in_docstrings_exist():
    assert stale(docstrings()) == []


def test_a_name_that_is_gone_is_seen():
    gone = "`TracedModule.derived` and `fold.merge`, not `slot_gates.Gates`, `torch.nowhere`, `no_such_name`. Raises Refused."
    names = [line.rpartition(" ")[2] for line in stale(iter([("a.py", "f", gone)]))]
    assert names == ["slot_gates.Gates", "torch.nowhere", "no_such_name", "Refused"]


def test_the_files_that_pages_beside_the_documentation_name_exist():
    for page in ("README.md", "SECURITY.md"):
        text = (ROOT.parent / page).read_text("utf-8")
        paths = re.findall(r"`((?:fxplug|docs|tests|passes|configs|examples|benchmarks)/[\w./-]+)`", text)
        assert [path for path in paths if not (ROOT.parent / path).exists()] == [], page


SECTION = re.compile(r"^(Args|Returns|Yields|Raises):\n((?: {4}.*\n?)+)", re.MULTILINE)


def public_functions():
    """Yield the name, function and sections of each public function, and of each method of a public class."""
    for name in fxplug.__all__:
        thing = getattr(fxplug, name)
        members = vars(thing) if isinstance(thing, type) else {"": thing}
        for key, member in members.items():
            if inspect.isfunction(member) and not key.startswith("_"):
                yield f"{name}.{key}".rstrip("."), member, dict(SECTION.findall(inspect.getdoc(member) or ""))


def test_a_public_function_documents_each_of_its_arguments_and_its_result():
    signs = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    wrong = []
    for name, function, sections in public_functions():
        signature = inspect.signature(function)
        given = [signs.get(p.kind, "") + p.name for p in signature.parameters.values() if p.name != "self"]
        listed = re.findall(r"^ {4}(\*{0,2}\w+): \S", sections.get("Args", ""), re.MULTILINE)
        gives = signature.return_annotation not in ("None", None) and not sections.keys() & {"Returns", "Yields"}
        if given and (given != listed or gives):
            wrong.append((name, given, listed))
    assert wrong == []
