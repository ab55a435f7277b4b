"""The core stands without its extensions: what it imports, and what is left when one of them is taken away."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap

import pytest
from test_layout import PATHS, files, imported, layer

from fxplug import extensions
from fxplug.extensions import Extension

CORE = """
    errors extensions limits turns versions torch_internals files spec low_rank rotations quantised ir capture blocks models
    rewriter artifacts verifier flow pages cli __main__
""".split()
LIMIT, LIMIT_WITH_VERIFY = 135, 143  # files of ours that the main job imports
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
BLOCKED = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name == {folder!r} or name.startswith({folder!r} + "."):
                raise ModuleNotFoundError(f"no module named {{name!r}}", name=name)

    sys.meta_path.insert(0, Blocked())
"""


def run(code, folder):
    path = os.pathsep.join(filter(None, [str(PATHS["errors"].parents[1]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


def _folder(name):
    return f"fxplug.compat.{name}" if name in ("hcp", "zhijian", "everydream") else f"fxplug.{name}"


def test_the_core_imports_no_extension():
    upward = [f"{n} imports {m}" for n in PATHS if layer(n) in CORE for m in imported(n) if layer(m) not in CORE]
    assert upward == []


def test_the_core_names_no_extension_in_a_text():
    outside = "|".join(sorted({layer(name) for name in PATHS} - set(CORE) - {"__init__"}))
    paths = re.compile(rf"^fxplug\.({outside})\b")
    # that file has names of earlier versions
    inside = [name for name in PATHS if layer(name) in CORE and name != "spec.import_path"]
    texts = [(name, node.value) for name in inside for node in ast.walk(files()[name]) if isinstance(node, ast.Constant)]
    assert [f"{name}: {text}" for name, text in texts if isinstance(text, str) and paths.match(text)] == []


def test_the_main_job_imports_few_files(tmp_path):
    before, verified = map(int, run(JOB, tmp_path).split())
    print(f"the main job imports {before} files, {verified} with verify")
    assert before < LIMIT and verified < LIMIT_WITH_VERIFY


@pytest.mark.parametrize("name", sorted(extensions.extensions()))
def test_the_main_job_runs_without(name, tmp_path):
    """With the folder of one extension unimportable: the main job, and an error that names it where a name of its is wanted."""
    run(BLOCKED.format(folder=_folder(name)) + JOB, tmp_path)
    one = extensions.extensions()[name]
    if _folder(name).startswith("fxplug.compat."):
        return
    wanted = next(iter(one.names), None)
    code = f"""
        import fxplug
        try:
            fxplug.{wanted}
        except AttributeError as error:
            print(error)
        from fxplug.extensions import extensions
        print(*extensions())
    """
    code = BLOCKED.format(folder=_folder(name)) + textwrap.indent(textwrap.dedent(code), "    ")
    text, usable = run(code, tmp_path).splitlines()
    assert f"the extension '{name}' cannot be used" in text and name not in usable.split()
    dependent = {each for each, other in extensions.extensions().items() if name in _all_bases(other)}
    assert set(usable.split()) == set(extensions.extensions()) - dependent - {name}


def _all_bases(one: Extension) -> set[str]:
    return {*one.bases, *(b for base in one.bases for b in _all_bases(extensions.extensions()[base]))}


def test_imports_between_extensions_are_bases():
    missing = set()
    for name in PATHS:
        own = layer(name)
        if own in CORE or own not in extensions.extensions():
            continue
        for other in {layer(m) for m in imported(name)} - set(CORE) - {own, "__init__"}:
            if other not in _all_bases(extensions.extensions()[own]):
                missing.add((own, other, name))
    assert sorted(missing) == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package of docs/extending.md, installed in a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    page = (PATHS["errors"].parents[1] / "docs/extending.md").read_text()
    for name, text in re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```", page, re.DOTALL):
        (source / name).write_text(text)
    assert sorted(path.name for path in source.iterdir()) == ["halve.py", "halve.yaml", "setup.cfg"]
    (source / "setup.py").write_text("import setuptools; setuptools.setup()")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


def run_with(site, code, folder):
    return run(f"import sys; sys.path.insert(0, {str(site)!r})\n" + textwrap.dedent(code), folder)


CONFIG = """
model: {timm: vit_tiny_patch16_224, options: {depth: 1}}
inputs: {x: [1, 3, 224, 224]}
passes: [{halve: {at: "blocks.*.mlp.fc1"}}]
"""


def test_a_package_of_one_file_brings_a_pass_a_verb_a_block_and_a_check(installed, tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    text = run_with(installed, """
        import fxplug, torch
        from fxplug.__main__ import app
        x = torch.randn(2, 4)
        gm = fxplug.trace(torch.nn.Sequential(torch.nn.Linear(4, 4)), x)
        new = fxplug.apply(gm, fxplug.load_pass("halve", at="0"))
        assert torch.equal(new(x), gm(x) / 2)
        print(fxplug.verify(gm, new, x))
        fxplug.save(new, "out")
        assert torch.equal(fxplug.load("out", allow=["halve"])(x), new(x))
        app(["--help"], standalone_mode=False)
        app(["halve", "run.yaml"], standalone_mode=False)
    """, tmp_path)  # fmt: skip
    assert "1 results are halved" in text and "Print how many results" in text and text.endswith("\n1\n")


@pytest.mark.parametrize(("change", "message"), [
    (("contract", 2), "it is written for contract 2 of fxplug's core, and this one has 1"),
    (("bases", ("missing",)), "it needs the extension 'missing', which cannot be used: it is not installed"),
])  # fmt: skip
def test_an_extension_that_does_not_fit_is_named(installed, tmp_path, change, message):
    text = run_with(installed, f"""
        import dataclasses, halve, fxplug
        halve.EXTENSION = dataclasses.replace(halve.EXTENSION, {change[0]}={change[1]!r})
        try:
            fxplug.load_pass("halve")
        except fxplug.SpecError as error:
            print(error)
        fxplug.load_pass("lora")
    """, tmp_path)  # fmt: skip
    assert "no pass named 'halve'" in text and message in text


@pytest.mark.parametrize(("code", "message"), [
    ("raise RuntimeError('out of order')", "importing 'halve:EXTENSION' failed: RuntimeError: out of order"),
    ("EXTENSION = 3", "'halve:EXTENSION' is a int, not a fxplug.Extension"),
])  # fmt: skip
def test_an_extension_that_is_broken_is_named_and_the_rest_goes_on(installed, tmp_path, code, message):
    (tmp_path / "halve.py").write_text(code)
    text = run_with(installed, """
        sys.path.insert(0, ".")
        import fxplug
        from fxplug.__main__ import app
        fxplug.load_pass("lora")
        fxplug.lower
        try:
            app(["halve", "run.yaml"], standalone_mode=False)
        except BaseException:
            pass
        try:
            fxplug.no_such_name
        except AttributeError as error:
            print(error)
    """, tmp_path)  # fmt: skip
    assert message in text


@pytest.mark.parametrize(("kind", "key", "use"), [
    ("verbs", "train", 'app(["train", "x"], standalone_mode=False)'), ("passes", "lora", 'fxplug.load_pass("lora")'),
    ("names", "lower", "fxplug.lower"), ("accessors", "adapters", "gm.adapters"),
])  # fmt: skip
def test_two_that_bring_the_same_are_named(installed, tmp_path, kind, key, use):
    text = run_with(installed, f"""
        import dataclasses, halve, torch, contextlib, io
        import fxplug
        from fxplug.__main__ import app
        halve.EXTENSION = dataclasses.replace(halve.EXTENSION, {kind}={{{key!r}: "halve:halve.yaml"}})
        gm = fxplug.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.randn(2))
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            try:
                {use}
            except BaseException as error:
                print(error)
        print(errors.getvalue())
    """, tmp_path)  # fmt: skip
    assert f"'{key}'" in text and "halve" in text and ("both bring" in text or "is one of fxplug's" in text)
