"""What the source looks like: imports point one way, graphs are edited in one place, nothing is unpickled."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

import pytest

from fxplug.spec import folder, open_pass, shipped

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fxplug"
PATHS = {".".join(f.relative_to(PACKAGE).with_suffix("").parts): f for f in sorted(PACKAGE.rglob("*.py"))}
FILES = {name: ast.parse(file.read_text()) for name, file in PATHS.items()}
# A module imports only from modules to its left.
ORDER = """
    errors limits turns reading source structure ops checked paths rules spec blitz_line blitz_pass sections settings config
    targets wording sizes fakes archives pickled weightfiles onnxfiles
    adapting.updates adapting.renaming adapting.fitting adapting.finding adapting.adapter_files adapting.switching
    alone journal spaces kinds state restore watching frozen
    module nodes dtypes recording regions modes entry surroundings selfcheck tracing printing
    grafting places networks misses match making slots samples channels
    blocks gates weights rotations norms adapters conditions merging frequencies
    edit lowerings.kernels lowerings.products lowerings.forms lowerings.fusing lowerings.remerging
    probe differing neutrality
    lowerings.deltas lowerings.absorbing lowerings.folding lowerings.shadowing
    cutting lowerings.packing lowerings.choosing lowerings.outlining lowerings.nesting slicing policies stepped caching
    attending fastattention
    lowerings.sharding lowerings.batchnorms lowerings.tuning lowerings.lowering
    parallel.faults parallel.layouts parallel.mesh parallel.pretending parallel.agreeing parallel.collectives
    parallel.ring parallel.attention parallel.shares parallel.moments parallel.neighbours
    parallel.opening parallel.trying parallel.reaching parallel.walking parallel.planning parallel.births parallel.features
    parallel.spatial parallel.writing parallel.localizing parallel.plan parallel.checking
    parallel.predicting parallel.plotting
    parallel.patches parallel.stages parallel.clock parallel.links parallel.pipeline
    parallel.deferred parallel.overlap parallel.stale parallel.fusion
    manifest temporary folders sinks snapshot values programs magnitudes serialize rebuild artifact
    machines expressions signatures packed packages exporting models checks flow pages parallel.running
    compat.zhijian compat.layers compat.calls compat.outcome compat.state compat.hcp compat.samples compat.making
    compat.drivers compat.builtin compat.entries compat.hcp_config compat.everydream
    training.draws
    training.hooks training.local training.loading training.plugins
    training.table training.pictures training.records training.watch
    training.tasks.calling training.tasks.task training.tasks.conditioning training.tasks.noise training.tasks.denoise
    training.tasks.classify
    training.data.reading training.data.seeding training.data.metadata training.data.files training.data.hub
    training.data.own training.data.items training.data.buckets training.data.order training.data.placing
    training.data.fetching training.data.given training.data.loader
    training.groups training.ema training.checkpoint training.diagnosis training.launch training.splitting
    training.stepping
    training.keeping
    training.trainer training.run
    launched verbs adapter_verbs parallel_verb __main__
""".split()
EDITS = {"inserting_before", "inserting_after", "erase_node", "replace_all_uses_with", "replace_input_with", "update_arg"}
# the rewrite layer; nodes writes the graph while a model runs, exporting readies a copy for torch.export
EDITORS = {
    "edit", "slots", "grafting", "networks", "nodes", "exporting", "lowerings.fusing", "cutting",
    "lowerings.outlining", "lowerings.batchnorms", "lowerings.remerging", "lowerings.packing", "lowerings.folding",
    "lowerings.shadowing", "lowerings.nesting", "slicing", "caching", "parallel.writing", "parallel.opening",
    "parallel.patches", "attending",
}
LONG: set[str] = set()  # files of more than 500 lines: to be split, none to be added


def calls(name):
    for node in ast.walk(FILES[name]):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imported(name, tree=None):
    """The package's own modules that a file imports, anywhere but for type checking."""
    for node in ast.iter_child_nodes(FILES[name] if tree is None else tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fxplug")):
            path = (node.module or "").removeprefix("fxplug").strip(".")
            inside = name.split(".")[: -node.level] if node.level else []
            path = ".".join(filter(None, [*inside, path]))
            named = [".".join(filter(None, [path, alias.name])) for alias in node.names]
            yield from [path] if path in FILES else [each for each in named if each in FILES]
        yield from imported(name, node)


def test_every_module_has_its_place():
    assert sorted(ORDER) == sorted(name for name in FILES if not name.endswith("__init__"))


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_to_the_left(name):
    left = ORDER[: ORDER.index(name)]
    assert [m for m in imported(name) if m not in left] == []


def test_the_public_face_imports_torch_only_when_asked():
    assert list(imported("__init__")) == []


@pytest.mark.parametrize("name", ORDER)
def test_graphs_are_edited_in_the_rewrite_layer_only(name):
    if name not in EDITORS:
        assert [text for text, _ in calls(name) if text.rpartition(".")[2] in EDITS] == []


@pytest.mark.parametrize("name", ORDER)
def test_nothing_is_hooked_unpickled_or_run_from_text(name):
    for text, node in calls(name):
        last = text.rpartition(".")[2]
        assert not (last.startswith("register_") and last.endswith("_hook")), text
        assert text not in ("eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "yaml.load"), text
        if text == "torch.load":
            assert {k.arg: ast.unparse(k.value) for k in node.keywords}["weights_only"] == "True"


BROAD = {"Exception", "BaseException"}


def broad(tree):
    """The lines on which whatever is raised is caught."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
            kinds = node.args
        else:
            continue
        if any(kind is None or ast.unparse(kind).rpartition(".")[2] in BROAD for kind in kinds):
            yield node.lineno


@pytest.mark.parametrize("name", ORDER)
def test_what_catches_everything_says_whose_code_may_raise(name):
    """Our own mistakes are no reason to try something else: a broad except is for code that is not ours, and says so."""
    lines = PATHS[name].read_text().splitlines()
    silent = [n for n in broad(FILES[name]) if "  # " not in lines[n - 1] and not lines[n - 2].strip().startswith("# ")]
    assert silent == []


def test_files_are_short():
    long = {name for name in FILES if len(PATHS[name].read_text().splitlines()) > 500}
    assert long <= LONG


@pytest.mark.parametrize("kind", ["passes", "configs"])
def test_the_outer_folders_hold_yaml_only(kind):
    files = [f for f in folder(kind).rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert files and [f.name for f in files if f.suffix != ".yaml"] == []


@pytest.mark.parametrize("name", shipped("passes"))
def test_every_pass_says_what_it_is_about(name):
    about = open_pass(name).source.data["about"]
    assert about[0].isupper() and about.endswith(".")


def test_every_file_says_what_it_is_for():
    assert [name for name, tree in FILES.items() if not ast.get_docstring(tree)] == []


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md", ROOT / "SECURITY.md"]


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
    assert len(text.encode()) <= 8192
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in text] == []


def test_what_is_installed_is_all_there_is():
    """An editable install would hide a folder that a wheel lacks."""
    told = configparser.ConfigParser()
    told.read(ROOT / "setup.cfg")
    packages = {name.strip() for name in told["options"]["packages"].split(",")}
    folders = {".".join(f.parent.relative_to(ROOT).parts) for f in PACKAGE.rglob("*.py")}
    assert packages == folders | {"fxplug.passes", "fxplug.configs"}
