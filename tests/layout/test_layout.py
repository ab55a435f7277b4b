"""What the source looks like: imports point one way, graphs are edited in one place, nothing is unpickled."""

from __future__ import annotations

import ast
import configparser
import functools
import importlib
import inspect
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from fxplug.core.spec.pass_file import folder, list_shipped, open_pass

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fxplug"
PATHS = {".".join(f.relative_to(PACKAGE).with_suffix("").parts): f for f in sorted(PACKAGE.rglob("*.py"))}
# The folders and files at the top, from the ground up: each imports only from those before it, and no imports go round.
LAYERS = """
    core.errors core.extensions core.locks core.torch_internals core.clock core.orientation core.reading core.writing
    core.hub_names core.weight_files core.spec core.quantised core.ir core.capture
    blocks core.rewriter core.artifacts core.verifier
    config adapters hub step_cache lowerings parallel pipelines serving exports reporting training compat __main__
""".split()
# what writes a graph: torch.fx's own operations, and attributes of nodes that are set
EDITS = set("""
    create_node call_function call_module call_method get_attr placeholder output node_copy graph_copy inserting_before
    inserting_after prepend append erase_node replace_all_uses_with replace_input_with insert_arg update_arg update_kwarg
    eliminate_dead_code
""".split())  # noqa: SIM905
EDITED = {"target", "args", "kwargs"}
LONGEST = 500
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def files():
    """The syntax tree of each file: read by the process that runs these tests, not by each that collects them."""
    return {name: ast.parse(file.read_text()) for name, file in PATHS.items()}


@functools.cache
def walk(tree):
    """All nodes of a tree, found once for all tests."""
    return list(ast.walk(tree))


def calls(name):
    for node in walk(files()[name]):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def type_checks(tree):
    return [node for node in walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]


def functions(tree):
    return [node for node in walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def not_at_the_top(tree):
    return type_checks(tree) + functions(tree)


@functools.cache
def imported(name, outside=type_checks):
    """The package's own modules that a file imports, anywhere but in these parts of it."""
    tree, found = files()[name], []
    left_out = {inner for node in outside(tree) for inner in walk(node)}
    for node in walk(tree):
        if node in left_out or not isinstance(node, ast.ImportFrom):
            continue
        if node.level or (node.module or "").startswith("fxplug"):
            path = (node.module or "").removeprefix("fxplug").strip(".")
            inside = name.split(".")[: -node.level] if node.level else []
            path = ".".join(filter(None, [*inside, path]))
            named = [".".join(filter(None, [path, alias.name])) for alias in node.names]
            found += [path] if path in PATHS else [each for each in named if each in PATHS]
    return found


def layer(name):
    return ".".join(name.split(".")[: 2 if name.startswith("core.") else 1])


def test_every_folder_and_file_at_the_top_is_a_layer():
    assert sorted(LAYERS) == sorted({layer(name) for name in PATHS} - {"__init__", "core.__init__"})


def test_imports_point_down():
    upward = [f"{n} imports {m}" for n in PATHS if not n.endswith("__init__") for m in imported(n)
              if LAYERS.index(layer(m)) > LAYERS.index(layer(n))]
    assert upward == []


# for type checking alone, and still to go: nothing is added here
ROUND = {("adapters.contents", "adapters.slots")}


@pytest.mark.parametrize("outside", [type_checks, functions])
def test_no_imports_go_round(outside):
    """Neither where types are left out, nor where they are there and what a function imports when it runs is not."""
    arrows = {
        name: [m for m in imported(name, outside) if m != name and (name, m) not in ROUND]
        for name in PATHS if not name.endswith("__init__")
    }  # fmt: skip
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_few_imports_are_inside_functions():
    """Such an import saves loading, or is of what may be missing; a function that needs one for another reason is misplaced."""
    inside = [(name, m) for name in PATHS for m in {*imported(name)} - {*imported(name, not_at_the_top)}]
    assert len(inside) <= 40, inside


OTHER_SYSTEMS = re.compile(r"hcp|zhijian|everydream|fxplug\.compat", re.IGNORECASE)


def named(tree):
    """The names in a file, and its texts but for docstrings."""
    said = {id(node.body[0].value) for node in walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)}
    for node in walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value
        for field in ("id", "attr", "arg", "name", "module"):
            yield str(getattr(node, field, None) or "")


def test_other_systems_are_known_on_the_outside_only():
    """What brings their plugins is reached by import paths in passes; the command line has verbs about it."""
    inside = [name for name in PATHS if layer(name) not in ("__init__", "core.__init__", "compat", "config", "__main__")]
    assert [f"{n} imports {m}" for n in inside for m in imported(n) if layer(m) == "compat"] == []
    inside.remove("core.spec.pass_file")  # which has the names that files of earlier versions say
    assert [f"{n}: {text}" for n in inside for text in named(files()[n]) if OTHER_SYSTEMS.search(text)] == []


def picture():
    """The layers as a table: what each is, and which it stands on."""
    rows = ["| layer | what it is | stands on |", "|---|---|---|"]
    for name in reversed(LAYERS):
        path = PACKAGE.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        what = " ".join(ast.get_docstring(ast.parse(file.read_text())).partition("\n\n")[0].replace("|", "\\|").split())
        below = {layer(m) for n in PATHS if layer(n) == name for m in imported(n)} - {name}
        where = f"../fxplug/{file.relative_to(PACKAGE)}".removesuffix("/__init__.py")
        stands = " ".join(n for n in reversed(LAYERS) if n in below and n not in ("core.errors", "core.locks"))
        rows.append(f"| [{name}]({where}) | {what} | {stands} |")
    return "\n".join(rows) + "\n"


def test_the_picture_of_the_layers_is_that_of_the_code(request):
    page = ROOT / "docs/contributing.md"
    before, _, rest = page.read_text().partition("<!-- layers -->\n")
    _, _, after = rest.partition("<!-- /layers -->\n")
    wanted = f"{before}<!-- layers -->\n{picture()}<!-- /layers -->\n{after}"
    if request.config.getoption("--golden"):
        page.write_text(wanted)
    assert page.read_text() == wanted, "run pytest --golden tests/layout/test_layout.py"


def test_the_page_quotes_the_files_that_it_leads_to():
    """A newcomer's questions: each row has a file, and what its first line says."""
    page = (ROOT / "docs/contributing.md").read_text()
    rows = re.findall(r"^\| .*? \| \[.*?\]\(\.\./(.*?)\) \| (.*?) \|$", page, re.MULTILINE)
    assert len(rows) >= 10
    for file, quoted in rows:
        if file.endswith(".py"):
            assert (ROOT / file).read_text().startswith(f'"""{quoted}'), file


def test_the_public_face_imports_torch_only_when_asked():
    assert list(imported("__init__")) == ["core.extensions"]


def test_what_users_write_is_read_without_torch():
    code = "import sys, pkgutil, importlib, fxplug.core.spec as s\n"
    code += "[importlib.import_module(f'fxplug.core.spec.{m.name}') for m in pkgutil.iter_modules(s.__path__)]\n"
    code += "print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def names_of_nodes(tree):
    """The names in a function that stand for nodes: what is said to be one, and what goes through the nodes of a graph."""
    for node in walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation and ast.unparse(node.annotation) == "fx.Node":
            yield node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
        elif isinstance(node, (ast.For, ast.comprehension)) and re.search(r"\.nodes\W*$", ast.unparse(node.iter)):
            yield ast.unparse(node.target)


def edits(tree):
    """The operations of torch.fx that a file edits graphs with, and what it sets of nodes."""
    functions = [(node, set(names_of_nodes(node))) for node in walk(tree) if isinstance(node, ast.FunctionDef)]
    nodes = {id(part): names for function, names in functions for part in walk(function)}
    for node in walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EDITS:
            of = ast.unparse(node.func.value)
            is_node = of in nodes.get(id(node), ()) or re.search(r"\b(node|nodes\[.*\])$", of)
            if of != "super()" and (is_node or node.func.attr != "append"):  # an interpreter's method; a list's
                yield node.func.attr
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and node.attr in EDITED and ast.unparse(node.value) != "self":
            yield node.attr


def test_graphs_are_edited_in_one_place():
    found = {name: sorted(set(edits(tree))) for name, tree in files().items() if name != "core.ir.graph"}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize("code", [
    *(f"graph.{name}(x)" for name in sorted(EDITS - {"append"})), "node.append(x)", "cut.nodes[0].append(x)",
    "def f(value: fx.Node): value.append(x)", "def f(graph):\n for one in reversed(list(graph.nodes)): one.append(x)",
    "node.args = ()", "one.args, one.kwargs = pair", "self.node.target = x", "node.args += (x,)",
])  # fmt: skip
def test_an_edit_is_seen(code):
    assert list(edits(ast.parse(code)))


def test_nothing_is_hooked_unpickled_or_run_from_text():
    forbidden = ("eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "yaml.load")
    for name in PATHS:
        for text, node in calls(name):
            last = text.rpartition(".")[2]
            hooked = last.startswith("register_") and last.endswith("_hook")
            # plugins on plugins, until traced; and fused optimizers, whose steps leave weights at the version they had
            assert not hooked or name in ("compat.hcp.base_classes", "lowerings.hoist.stamps"), f"{name}: {text}"
            # of the names of a function's own variables: what is made of them is no file's text, and is never saved
            assert text not in forbidden or (name, text) == ("core.ir.ops", "compile"), f"{name}: {text}"
            if text == "torch.load":
                assert {k.arg: ast.unparse(k.value) for k in node.keywords}["weights_only"] == "True", name


PRIVATE = re.compile(r"_[^_]")
TABLES = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}  # what subclasses of nn.Module live by
ELSEWHERE = {"_getframe", "_current_frames", "_exit", "_replace", "_fields"}  # documented, of sys, os and of named tuples
ELSEWHERE |= {"_shared_state", "_reset_state", "_ParameterKind", "_run_exitfuncs"}  # of accelerate, inspect, atexit
ELSEWHERE |= {"_blocks"}  # of a modular pipeline of diffusers, which has no other name for them
ELSEWHERE |= {"_lora_loadable_modules"}  # which models a loader of diffusers reads layers of: it says so nowhere else
# what else of torch a file may name; tests/test_torch_internals.py holds these as well
REACHED = {
    # its class is a GraphModule, and keeps one of each for each mode; the others are its own, set by name
    "core.ir.traced_module": {"_graph", "_code", "_apply", "_codes"},
    "core.ir.calls": {"_forward_train", "_forward_eval"},
    "core.ir.graph": {"_graph"},  # the same graph in another GraphModule, which is not to be its owner
    "lowerings.hoist.hoisted": {"_apply"},
    "step_cache.cache": {"_apply"},
    "step_cache.steps": {"_apply"},  # a module that hands `to` and its kin on
    "lowerings.merging.live": {"_load_from_state_dict"},  # a module that is loaded otherwise
    # their own, though tensors have one of the name
    "exports.package_file": {"_root"},
    "core.rewriter.graft": {"_base"},
    "config.run_config": {"_base"},
    "compat.kept_state": {"_watched"},
}
# names in files that strangers wrote, which are read and never followed
WRITTEN = {"core.ir.functions"}


@functools.cache
def ours():
    """The private names that we define ourselves, of which some may be torch's too."""
    found = set()
    for tree in files().values():
        for node in walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


@functools.cache
def torchs():
    """The private names of what torch gives us."""
    kinds = (nn.Module, fx.GraphModule, fx.Graph, fx.Node, torch.Tensor, torch.UntypedStorage, torch.autocast, ExportedProgram)
    made = nn.Module(), fx.GraphModule(nn.Module(), fx.Graph()), fx.Graph(), torch.autocast("cpu"), torch.ops.aten.add.Tensor
    return {name for value in (*kinds, *made) for name in dir(value)}


def reached(name):
    """The private names of torch that a file imports, reads or asks for by a string."""
    tree, roots = files()[name], {"torch"}
    for node in walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
            module = getattr(node, "module", None)
            for alias in node.names:
                path = ".".join(filter(None, [module, alias.name]))
                if path.partition(".")[0] == "torch":
                    roots.add(alias.asname or alias.name.partition(".")[0])
                    yield from (part for part in path.split(".") if PRIVATE.match(part))
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
            root = ast.unparse(node).partition(".")[0]
            if root in roots or node.attr not in ours() or node.attr in torchs():
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "getattr_static"
        ):
            asked = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            yield from (word for word in asked if PRIVATE.match(word) and (word not in ours() or word in torchs()))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and name not in WRITTEN:
            yield from re.findall(r"^torch(?:\.\w+)*\._\w+(?:\.\w+)*$", node.value)


def test_private_parts_of_torch_are_named_in_one_place():
    """A new torch may change what it does not promise: then one folder is to be mended, and its tests say which line."""
    outside = [name for name in PATHS if layer(name) != "core.torch_internals"]
    found = {name: sorted(set(reached(name)) - TABLES - ELSEWHERE - REACHED.get(name, set())) for name in outside}
    named = {name: parts for name, parts in found.items() if parts}
    assert named == {}, "put these into fxplug/core/torch_internals, with a test"


def test_what_was_found_is_not_told_by_its_truth():
    """What `next` finds may be false itself, as an empty name is: None says that nothing was found."""
    for name, tree in files().items():
        found = [node.test for node in walk(tree) if isinstance(node, (ast.If, ast.IfExp, ast.While))]
        first = [test.value for test in found if isinstance(test, ast.NamedExpr) and isinstance(test.value, ast.Call)]
        calls = [ast.unparse(call) for call in first if ast.unparse(call.func) == "next"]
        assert [call for call in calls if call.endswith(", None)")] == [], name


BROAD = {"Exception", "BaseException"}


def broad(tree):
    """The lines on which whatever is raised is caught."""
    for node in walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
            kinds = node.args
        else:
            continue
        if any(kind is None or ast.unparse(kind).rpartition(".")[2] in BROAD for kind in kinds):
            yield node.lineno


def test_what_catches_everything_says_whose_code_may_raise():
    """Our own mistakes are no reason to try something else: a broad except is for code that is not ours, and says so."""
    for name, tree in files().items():
        lines = PATHS[name].read_text().splitlines()
        silent = [n for n in broad(tree) if "  # " not in lines[n - 1] and not lines[n - 2].strip().startswith("# ")]
        assert silent == [], name


def test_tolerances_are_in_one_table():
    found = [(name, function, {k.arg for k in node.keywords}) for name in PATHS for function, node in calls(name)]
    own = [name for name, function, keys in found if re.search(r"\b(allclose|isclose)$", function) or {"rtol", "atol"} & keys]
    assert own == [], "core/ir/comparison.py has a row for each purpose"


def test_files_are_short():
    assert {name for name in PATHS if len(PATHS[name].read_text().splitlines()) > LONGEST} == set()


@pytest.mark.parametrize("kind", ["passes", "configs"])
def test_the_outer_folders_hold_yaml_only(kind):
    files = [f for f in folder(kind).rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert files and [f.name for f in files if f.suffix != ".yaml"] == []


def test_every_pass_says_what_it_is_about():
    for name in list_shipped("passes"):
        about = open_pass(name).source.data["about"]
        assert about[0].isupper() and about.endswith("."), name


def test_every_file_says_what_it_is_for():
    assert [name for name, tree in files().items() if not ast.get_docstring(tree)] == []


def public(body):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def inherits_docstring(name, owner, member):
    """Whether a base class says what a method is, as torch's do of `forward` and `extra_repr`."""
    module = importlib.import_module(f"fxplug.{name}".removesuffix(".__init__"))
    return bool(inspect.getdoc(getattr(getattr(module, owner), member)))


def test_what_is_public_says_what_it_is():
    """All functions, classes and methods of classes, unless a base class has the method and says it."""
    silent = []
    for name, tree in files().items():
        for node in public(tree.body):
            silent += [] if ast.get_docstring(node) else [f"{name}.{node.name}"]
            methods = public(node.body) if isinstance(node, ast.ClassDef) else []
            bare = [m.name for m in methods if not ast.get_docstring(m)]
            silent += [f"{name}.{node.name}.{m}" for m in bare if not inherits_docstring(name, node.name, m)]
    assert silent == []


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        name, _, heading = link.partition("#")
        there = page.parent / name if name else page
        assert "://" in link or there.exists(), link
        if heading:
            headings = re.findall(r"(?m)^#+ (.*)$", there.read_text("utf-8"))
            assert heading in [re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings], link


def test_the_readme_is_short_and_leads_to_every_page():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.encode()) <= 8192 and len(text.splitlines()) <= 60
    reached, open_pages = set(), [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)[)#]", page.read_text("utf-8"))
        open_pages += {path for link in links if (path := (page.parent / link).resolve()).exists()} - reached - {*open_pages}
    assert [str(page) for page in (ROOT / "docs").rglob("*.md") if page not in reached] == []


def test_what_is_installed_is_all_there_is():
    """An editable install would hide a folder that a wheel lacks."""
    told = configparser.ConfigParser()
    told.read(ROOT / "setup.cfg")
    packages = set(told["options"]["packages"].split())
    folders = {".".join(f.parent.relative_to(ROOT).parts) for f in PACKAGE.rglob("*.py")}
    assert packages == folders | {"fxplug.passes", "fxplug.configs"}


MAGIC = {"_getframe", "currentframe", "f_back", "co_code", "settrace", "setprofile"}


def magic(tree):
    """Class assignment, frame inspection, what is done to `sys.modules`, and byte code."""
    for node in walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        stored = isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
        if stored or text == "sys.modules" or getattr(node, "attr", None) in MAGIC:
            yield node
        if isinstance(node, (ast.Import, ast.ImportFrom)) and any(alias.name == "dis" for alias in node.names):
            yield node


def test_magic_outside_the_tracer_says_why_nothing_plainer_works():
    silent = {name for name, tree in files().items() if any(magic(tree))
              and not re.search(r"#.*[nN]othing\s+(# )?plainer", PATHS[name].read_text()) and layer(name) != "core.capture"}
    assert silent == set()


def test_every_random_attack_can_be_run():
    files = sorted((ROOT / "tests").glob("fuzz_*.py"))
    trees = {f.stem: ast.parse(f.read_text("utf-8")) for f in files}
    names = {name: {getattr(node, "name", "") for node in tree.body} for name, tree in trees.items()}
    assert files and [name for name, functions in names.items() if name not in functions] == []
