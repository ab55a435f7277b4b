"""The core stands without its extensions: what it imports, and what is left when one of them is taken away."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
from test_layout import PATHS, files, imported, walk

from fxplug.core import extensions
from fxplug.core.extensions import Extension

CORE = "core blocks __init__".split()  # noqa: SIM905
LIMIT, LIMIT_WITH_VERIFY = 60, 62  # files of ours that the main job imports; verify reads the table of each extension, too
JOB = """
    import sys
    import torch
    import fxplug

    def ours():
        return sum(name.partition(".")[0] == "fxplug" and getattr(module, "__file__", None) is not None
                   for name, module in list(sys.modules.items()))

    x = torch.randn(2, 4)
    gm = fxplug.trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), x)
    p = fxplug.load_pass("lora", at="0", rank=2)
    new = fxplug.apply(gm, fxplug.find(gm, p))
    fxplug.save(new, "out")
    again = fxplug.load("out")
    assert torch.equal(again(x), gm(x))
    before = ours()
    assert fxplug.verify(gm, new, x).ok
    print(before, ours())
"""


def folder_of(name):
    return name.split(".")[0]


BLOCKED = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if f"{{name}}.".startswith({folders!r}):
                raise ModuleNotFoundError(f"no module named {{name!r}}", name=name)

    sys.meta_path.insert(0, Blocked())
"""


# code runs in processes forked from one that has imported what takes long: a new Python takes seconds for that
FORKING = """
    import gc, json, os, pdb, sys, tempfile, traceback, warnings
    import networkx, numpy, pydantic.main, pytest, torch, torch._dynamo, torch.utils.tensorboard, typer.testing
    import diffusers.models.unets.unet_2d_condition, hypothesis, lycoris, peft, sklearn.datasets, timm, transformers
    import diffusers.pipelines.controlnet.pipeline_controlnet, diffusers.pipelines.flux.pipeline_flux

    warnings.simplefilter("error", UserWarning)
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))  # makes the compiler's tables
    gc.freeze()  # pytest collects garbage ten times, and each child would walk all of these libraries
    for line in sys.stdin:
        code, file = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.chdir(tempfile.mkdtemp(dir=os.path.dirname(file)))
            out = os.open(file, os.O_CREAT | os.O_WRONLY)
            os.dup2(out, 1), os.dup2(out, 2)
            status = 1
            try:
                exec(compile(code, "code", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        print(os.waitpid(pid, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def run():
    """Gives what each of some codes prints, in a process and a folder of its own. Fails where one of them fails."""
    path = os.pathsep.join(filter(None, [str(PATHS["core.errors"].parents[2]), os.environ.get("PYTHONPATH")]))
    command, env = [sys.executable, "-c", textwrap.dedent(FORKING)], {**os.environ, "PYTHONPATH": path}

    def run(codes, folder):
        found = []
        for index, code in enumerate(codes):
            file = folder / f"{index}.txt"
            forking.stdin.write(json.dumps([textwrap.dedent(code), str(file)]) + "\n")
            forking.stdin.flush()
            found.append((forking.stdout.readline(), file.read_text()))
        assert [text for status, text in found if status != "0\n"] == []
        return [text for _, text in found]

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as forking:
        yield run


def _folder(name):
    return f"fxplug.compat.{name}" if name in ("hcp", "zhijian", "everydream") else f"fxplug.{name}"


def _without(*names):
    """Code that makes the folders of these extensions unimportable."""
    return textwrap.dedent(BLOCKED.format(folders=tuple(f"{_folder(name)}." for name in names)))


def test_the_core_imports_no_extension():
    upward = [f"{n} imports {m}" for n in PATHS if folder_of(n) in CORE for m in imported(n) if folder_of(m) not in CORE]
    assert upward == []


def test_the_core_names_no_extension_in_a_text():
    outside = "|".join(sorted({folder_of(name) for name in PATHS} - set(CORE) - {"__init__"}))
    paths = re.compile(rf"^fxplug\.({outside})\b")
    # that file has names of earlier versions
    inside = [name for name in PATHS if folder_of(name) in CORE and name != "core.spec.pass_file"]
    texts = [(name, node.value) for name in inside for node in walk(files()[name]) if isinstance(node, ast.Constant)]
    assert [f"{name}: {text}" for name, text in texts if isinstance(text, str) and paths.match(text)] == []


def test_the_main_job_imports_few_files(run, tmp_path):
    before, verified = map(int, run([JOB], tmp_path)[0].split())
    print(f"the main job imports {before} files, {verified} with verify")
    assert before < LIMIT and verified - len(extensions.extensions()) < LIMIT_WITH_VERIFY


def test_the_main_job_runs_without_each_extension(run, tmp_path):
    """With the folder of one extension unimportable: the main job, and an error that names it where a name of its is wanted."""
    everything = extensions.extensions()
    codes = []
    for name, one in everything.items():
        asked = f"""
    try:
        fxplug.{next(iter(one.names), "nothing")}
    except (AttributeError, fxplug.FxplugError) as error:
        print(error)
    from fxplug.core.extensions import extensions
    print(*extensions())
"""
        codes.append(_without(name) + textwrap.dedent(JOB + asked))
    for (name, one), text in zip(everything.items(), run(codes, tmp_path), strict=True):
        *_, error, usable = text.splitlines()
        if _folder(name).startswith("fxplug.compat."):  # of which the table lies in the folder above
            continue
        assert f"the extension '{name}' cannot be used" in error, one
        dependent = {each for each, other in everything.items() if name in _all_bases(other)}
        assert set(usable.split()) == set(everything) - dependent - {name}


def _all_bases(one: Extension) -> set[str]:
    return {*one.bases, *(b for base in one.bases for b in _all_bases(extensions.extensions()[base]))}


# of each extension and of the core: tests that need no more than it and its bases
TESTS = {
    "config": "test_config.py::test_paths_are_relative_to_the_file",
    "adapters": "test_adapter_passes.py::test_each_layer_has_the_rank_of_its_update",
    "step_cache": "test_fastattention.py::test_a_window_computes_what_it_says",
    "lowerings": "test_folding.py::test_passes_on_one_layer_are_folded_in_their_order",
    "parallel": "test_parallel_rows.py::test_an_operation_on_fetched_rows[0-padded]",
    "exports": "test_export.py::test_a_link_stays_and_what_it_leads_to_is_replaced",
    "reporting": "test_report.py::test_a_module_without_passes_is_a_plain_picture",
    "training": "test_draws.py",
    "pipelines": "test_in_pipelines.py::test_a_part_that_cannot_be_traced_so",
    "hub": "test_hub.py::test_a_folder_of_that_name_goes_first",
    "serving": "test_adapter_store.py::test_what_is_in_a_folder_and_what_is_refused",
    "hcp": "test_hcp_words.py::test_words_that_do_not_fit",
    "zhijian": "test_blitz_convert.py::test_a_configuration_names_a_module_as_it_is",
    "everydream": "test_everydream.py::test_what_a_plugin_cannot_set_of_the_data_is_an_error",
}
CORES = ["test_match.py", "test_edit.py", "test_low_rank.py", "test_options.py"]


def _passing(tests):
    """Code that runs tests, all of which pass."""
    here = PATHS["core.errors"].parents[2] / "tests"
    command = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not [adapter]",
               "-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow and not gpu"]  # fmt: skip
    files = [str(here / test) for test in tests]
    return f"import pytest\nassert pytest.main({[*command, '-c', str(here.parent / 'setup.cfg'), *files]}) == 0\n"


HELPERS = {"step_cache": ("lowerings", "parallel")}  # what the helpers of a test import


@pytest.mark.slow
def test_the_core_passes_its_tests_without_any_extension_and_each_with_its_bases_alone(run, tmp_path):
    everything = extensions.extensions()
    assert set(TESTS) == set(everything)
    codes = [_without(*everything) + _passing(CORES)]
    for name in everything:
        wanted = [name, *HELPERS.get(name, ())]
        there = {*wanted, *(base for each in wanted for base in _all_bases(everything[each]))}
        codes.append(_without(*everything.keys() - there) + _passing([TESTS[name]]))
    for name, text in zip(["none", *everything], run(codes, tmp_path), strict=True):
        assert "[100%]" in text and "FAILED" not in text, (name, text)


def test_imports_between_extensions_are_bases():
    missing = set()
    for name in PATHS:
        own = folder_of(name)
        if own in CORE or own not in extensions.extensions():
            continue
        for other in {folder_of(m) for m in imported(name)} - set(CORE) - {own, "__init__"}:
            if other not in _all_bases(extensions.extensions()[own]):
                missing.add((own, other, name))
    assert sorted(missing) == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package of docs/guides/extending.md, installed in a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    page = (PATHS["core.errors"].parents[2] / "docs/guides/extending.md").read_text()
    for name, text in re.findall(r'```\w+ title="(\S+)"\n(.*?)```', page, re.DOTALL):
        (source / name).write_text(text)
    assert sorted(path.name for path in source.iterdir()) == ["halve.py", "halve.yaml", "setup.cfg"]
    assert "\nfxplug.extensions =\n" in (source / "setup.cfg").read_text()  # a name that other people's packages go by
    (source / "setup.py").write_text("import setuptools; setuptools.setup()")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


CONFIG = """
model: {timm: vit_tiny_patch16_224, options: {depth: 1}}
inputs: {x: [1, 3, 224, 224]}
passes: [{halve: {at: "blocks.*.mlp.fc1"}}]
"""
USED = f"""
    import fxplug, torch
    from fxplug.__main__ import app
    open("run.yaml", "w").write({CONFIG!r})
    x = torch.randn(2, 4)
    gm = fxplug.trace(torch.nn.Sequential(torch.nn.Linear(4, 4)), x)
    new = fxplug.apply(gm, fxplug.load_pass("halve", at="0"))
    assert torch.equal(new(x), gm(x) / 2)
    print(fxplug.verify(gm, new, x))
    fxplug.save(new, "out")
    assert torch.equal(fxplug.load("out", allow=["halve"])(x), new(x))
    app(["--help"], standalone_mode=False)
    app(["halve", "run.yaml"], standalone_mode=False)
"""
UNFIT = """
    import dataclasses, halve, fxplug
    halve.EXTENSION = dataclasses.replace(halve.EXTENSION, {change})
    try:
        fxplug.load_pass("halve")
    except fxplug.SpecError as error:
        print(error)
    fxplug.load_pass("lora")
"""
BROKEN = """
    open("halve.py", "w").write({code!r})
    sys.path.insert(0, ".")
    import fxplug
    fxplug.load_pass("lora")
    fxplug.lower
    try:
        fxplug.no_such_name
    except AttributeError as error:
        print(error)
"""
PARALLEL = """
import fxplug
try:
    fxplug.load_pass("sequence_parallel", ulysses=2)
except fxplug.SpecError as error:
    print(error)
"""
TWICE = """
    import dataclasses, halve, torch
    import fxplug
    from fxplug.__main__ import app
    halve.EXTENSION = dataclasses.replace(halve.EXTENSION, {kind}={{{key!r}: "halve:halve.yaml"}})
    gm = fxplug.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.randn(2))
    try:
        {use}
    except BaseException as error:
        print(error)
"""
SECTION = """
    import dataclasses, halve, json, fxplug
    from fxplug.config.run_config import resolve
    from fxplug.config.schema import make_page, make_schema
    from fxplug.config.sections import ConfigSection
    from fxplug.core.spec.yaml_source import Section, declare

    class Tile(Section):
        size: int = declare(8, "its side", 16, ge=1)

    halve.TILE = ConfigSection(Tile, declare(Tile(), "tiles", {{"size": 16}}), {{Tile: "`tile`"}})
    halve.EXTENSION = dataclasses.replace(halve.EXTENSION, sections={{{key!r}: "halve:TILE"}})
    try:
        config = fxplug.load_config({{"model": "resnet18"}}, set=["tile.size=3"])
        print(config.tile.size, resolve(config)["tile"], "tile" in make_schema()["properties"], "## `tile`" in make_page())
        assert resolve(fxplug.load_config(resolve(config))) == resolve(config)
        fxplug.load_config({{"model": "resnet18", "tile": {{"sise": 3}}}})
    except (fxplug.SpecError, fxplug.ClashError) as error:
        print(error)
"""
CASES = [
    (SECTION.format(key="tile"), ["3 {'size': 3} True True", "unknown key 'sise'", "did you mean 'size'"]),
    (SECTION.format(key="seed"), ["an extension brings 'seed', which is a key of every configuration"]),
    (SECTION.format(key="train"), ["'train'", "halve", "both define"]),
    (USED, ["1 results are halved", "Print how many results", "\n1\n"]),
    (_without("parallel") + PARALLEL, ["unknown key 'parallel'; the extension 'parallel' cannot be used"]),
    (UNFIT.format(change="contract=2"), ["no pass named 'halve'", "for version 2 of the extension interface, and this fxplug "
                                                                  "has 1"]),
    (UNFIT.format(change="bases=('missing',)"), ["it needs the extension 'missing', which cannot be used: it is not in"]),
    (BROKEN.format(code="raise RuntimeError('no order')"), ["importing 'halve:EXTENSION' failed: RuntimeError: no order"]),
    (BROKEN.format(code="EXTENSION = 3"), ["'halve:EXTENSION' is a int, not a fxplug.Extension"]),
    (TWICE.format(kind="verbs", key="train", use='app(["train", "x"])'), ["'train'", "halve", "both define"]),
    (TWICE.format(kind="passes", key="lora", use='fxplug.load_pass("lora")'), ["'lora'", "halve", "and so has fxplug"]),
    (TWICE.format(kind="names", key="lower", use="fxplug.lower"), ["'lower'", "halve", "both define"]),
    (TWICE.format(kind="accessors", key="adapters", use="gm.adapters"), ["'adapters'", "halve", "both define"]),
]


@pytest.mark.slow
def test_a_package_of_one_file_works_and_one_that_does_not_fit_is_named(installed, run, tmp_path):
    """It brings a pass, a block, a verb and a check. One that is broken, of another core, or brings what others do is named."""
    head = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
    texts = run([head + textwrap.dedent(code) for code, _ in CASES], tmp_path)
    assert [(part, text) for (_, parts), text in zip(CASES, texts, strict=True) for part in parts if part not in text] == []
