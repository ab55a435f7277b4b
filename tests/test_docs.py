"""Every command and block of code in the documentation is run, or says why not; every name in its text exists."""

from __future__ import annotations

import re
import warnings

import doc_blocks
import pytest
import typer
from doc_blocks import PAGES, ROOT, blocks

import fxplug
from fxplug.__main__ import app

VERBS = typer.main.get_command(app)
NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}
LANGUAGES = {name: {block.language for block in blocks(page.read_text("utf-8"))} for name, page in NAMES.items()}
WITH_CODE = [  # those that only have YAML are read in no time
    pytest.param(name, marks=[pytest.mark.slow] * bool(languages - {"yaml"}))
    for name, languages in LANGUAGES.items() if languages & {*doc_blocks.RUN}
]  # fmt: skip
FOUND_IN = {"Adapters", "TracedModule", "Site", "OnnxModel", "Package", "Page", "Run", "Result"}  # what another function gives


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_code_of_a_page_runs_and_prints_what_is_shown(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of diffusers, PEFT and torch, which are not ours to mend
        doc_blocks.run(NAMES[name])


def test_every_public_name_has_its_entry_and_an_example_below_it():
    api = [page.read_text("utf-8") for page in PAGES if page.parent.name == "api" or page.name == "errors.md"]
    entries = re.findall(r"^::: (\S+)$", "\n".join(api), re.MULTILINE)
    assert sorted(name.removeprefix("fxplug.") for name in entries if name.count(".") == 1) == sorted(fxplug.__all__)
    for text in api:
        for group in re.findall(r"(?:^::: \S+\n+)+(?:(?!^:::)[\s\S])*", text, re.MULTILINE):
            names = [name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", group, re.MULTILINE)]
            code = "\n".join(block.code for block in blocks(group))
            assert code and any(name in code or name in FOUND_IN for name in names), names


def test_what_is_not_run_is_listed_with_its_reason(golden):
    left = [f"{name}: {b.not_run}: {b.code.strip().splitlines()[0]}" for name, page in NAMES.items()
            for b in blocks(page.read_text("utf-8")) if b.not_run]  # fmt: skip
    golden("docs_not_run", "\n".join(left) + "\n")


@pytest.mark.parametrize("text", [
    "```python\nprint(1)\n```\n```text\n2\n```\n",
    "```python\nunknown\n```\n",
    "```console\n$ fxplug rewrit x\n```\n",
    "```console\n$ rm x\n```\n",
    "```console\n$ fxplug show no_such_configuration\n```\n",
    "<!-- fails: of itself -->\n```console\n$ fxplug passes lora\n```\n",
    "```console\n$ fxplug passes lora\nloha\n```\n",
    "```yaml\npasses: [{lora: {rnk: 3}}]\n```\n",
    "```rust\nfn\n```\n",
    "<!-- not run: slow -->\n```python\ndef (\n```\n",
])  # fmt: skip
def test_a_page_that_is_wrong_fails(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    with pytest.raises(AssertionError, match=r"page.md:[12]"):
        doc_blocks.run(page)


LAYERS = {path.stem for path in (ROOT / "fxplug").iterdir()}


def inline(name):
    """The pieces of code within the text of a page."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->", "", NAMES[name].read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_names_in_the_text_exist(name):
    for code in inline(name):
        for path in re.findall(r"\bfxplug\.(\w+)", code):
            # config, base: keys of metadata; extensions: the group of entry points
            assert path in {*fxplug.__all__, *LAYERS, "base", "config", "extensions", "NAME"}, f"{name}: `{code}`"
        verb = re.match(r"fxplug (\w+)(.*)", code)
        if verb and verb[1] not in ("VERB", "halve"):  # any; one of the package in guides/extending.md
            command = VERBS.get_command(None, verb[1])
            assert command, f"{name}: `{code}`: no such verb"
            if hasattr(command, "commands"):
                continue
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            assert set(re.findall(r"(?<!\S)\[?(-{1,2}[a-z][\w-]*)", verb[2])) <= known, f"{name}: `{code}`"


def test_the_citation_is_of_this_version():
    assert f"\nversion: {fxplug.__version__}\n" in (ROOT / "CITATION.cff").read_text()
