"""The pages about the shipped passes say what the passes do: `make pages` writes them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from sweeps import sweep

from fxplug.config.cli.pages import make_page
from fxplug.config.schema import PARAMETERS
from fxplug.core.spec.pass_file import list_shipped, open_pass

PAGES = Path(__file__).parents[2] / "docs/reference/passes"


@sweep("name", list_shipped("passes"), "lora", "skip", "vpt")
def test_the_page_that_is_kept_is_the_one_that_is_made(name):
    assert (PAGES / f"{name}.md").read_text() == make_page(name)


@pytest.mark.parametrize("name", list_shipped("passes"))
def test_every_parameter_is_explained(name):
    data = open_pass(name).source.data
    assert [key for key in data.get("params", {}) if key not in {**PARAMETERS, **data.get("help", {})}] == []


def test_there_is_a_page_for_every_pass_and_no_other():
    pages = sorted(p.relative_to(PAGES).with_suffix("").as_posix() for p in PAGES.rglob("*.md"))
    assert pages == sorted(list_shipped("passes"))


def test_the_pages_about_keys_verbs_and_passes_are_those_that_are_made():
    made = runpy.run_path(str(PAGES.parents[2] / ".ci/reference.py"))["pages"]()
    assert {name: (PAGES.parent / name).read_text() for name in made} == made
