"""The pages about the shipped passes say what the passes do: `make pages` writes them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from sweeps import sweep

from fxplug.config.cli.pages import make_page
from fxplug.config.schema import PARAMETERS
from fxplug.core.spec.pass_file import list_recipes, list_shipped, open_pass

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


FAMILIES = runpy.run_path(str(PAGES.parents[2] / ".ci/families.py"))


def test_the_page_of_a_family_is_the_one_that_is_made():
    assert (PAGES.parents[1] / "families/vit.md").read_text() == FAMILIES["make_page"]("vit")[0]


def test_every_recipe_is_on_the_page_of_its_family():
    shown = {recipe: name for name, family in FAMILIES["FAMILIES"].items() for recipe in family.recipes}
    assert set(shown) == set(list_recipes())
    for recipe, name in shown.items():
        lines = list_recipes()[recipe].read_text("utf-8").splitlines(keepends=True)
        text = (PAGES.parents[1] / f"families/{name}.md").read_text("utf-8")
        assert f"]({name}.md) | `{recipe}` |" in (PAGES.parents[1] / "families/index.md").read_text("utf-8")
        assert "```yaml\n" + "".join(line for line in lines if not line.startswith("#")) + "```" in text
