"""The site of `make docs`: built with warnings as errors, and opened from its folder in a browser without a network."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import browser
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from test_docs_search import QUESTIONS

ROOT = Path(__file__).parents[1]
MISSING = not all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings", "mkdocs_jupyter"))
# where tests are run by a machine none of them may be missing
installed = pytest.mark.skipif(MISSING and not os.environ.get("CI"), reason="make docs installs what builds the site")
pytestmark = [pytest.mark.slow, installed]
PAGES = """
    index.html start.html concepts.html reference/api/core.html reference/passes/lora.html guides/report.html
""".split()  # noqa: SIM905


def build(root, site):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(root / ".ci/mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run([*command, "--site-dir", str(site)], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_every_page_is_there_and_names_nothing_of_the_internet(site):
    sources = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb") and ".ipynb_" not in str(path)]
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in sources]
    assert [str(page) for page in pages if not (site / page).is_file()] == []
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text("utf-8"))
        assert [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)] == [], page


def test_the_text_of_every_page_is_there_and_every_link_resolves(site):
    sources = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb") and ".ipynb_" not in str(path)]
    names = {str(path.relative_to(ROOT / "docs").with_suffix(".md")) for path in sources}
    texts = {name: (site / name).read_text("utf-8") for name in names}
    listed = (site / "llms.txt").read_text("utf-8")
    assert sorted(re.findall(r"^- \[.*?\]\(([^)]+)\): \S", listed, re.MULTILINE)) == sorted(names)
    dead = []
    for name, text in {**texts, "llms.txt": listed}.items():
        prose = re.sub(r"^( *)```.*?^\1```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
        links = [link for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", prose) if "://" not in link]
        dead += [f"{name}: {link}" for link in links if not (site / name).parent.joinpath(link).is_file()]
    assert dead == []
    assert "```python\ntrace(" in texts["reference/api/core.md"] and "<!--" not in "".join(texts.values())


@browser.needed
@pytest.mark.parametrize("page", PAGES)
def test_a_page_opens_from_its_folder(site, driver, page):
    driver.get("about:blank")
    driver.get_log("browser")
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["http://*", "https://*"]})  # which the console would say
    browser.size(driver, 1280)
    driver.get((site / page).as_uri())
    assert driver.find_element(By.CSS_SELECTOR, "h1").text
    assert driver.execute_script("return document.styleSheets.length && !!window.__md_scope")
    broken = "return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    assert driver.execute_script(broken) == []
    assert driver.get_log("browser") == []


@browser.needed
def test_the_search_finds_without_a_server(site, driver):
    browser.size(driver, 1280)
    driver.get((site / "index.html").as_uri())
    driver.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("GuardError")
    results = WebDriverWait(driver, 20).until(lambda d: d.find_elements(By.CSS_SELECTOR, ".md-search-result__link"))
    assert any("errors.html" in result.get_attribute("href") for result in results)


@pytest.mark.skipif(not shutil.which("node") and not os.environ.get("CI"), reason="no node: apt-get install nodejs")
def test_the_search_of_the_site_answers_the_questions(site):
    """Among the first three sections by the score of the site's own worker is one that answers."""
    command = ["node", str(ROOT / "tests/site_search.js"), str(site), json.dumps([*QUESTIONS, "xyzzyqux"])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {question: [html.unescape(name) for name in names] for question, names in json.loads(done.stdout).items()}
    assert found.pop("xyzzyqux") == []
    assert {q: names[:3] for q, names in found.items() if not set(names[:3]) & set(QUESTIONS[q])} == {}


def test_a_build_with_faults_fails_and_names_each(tmp_path):
    """A dead link, a dead anchor, a page that no one leads to, and a source file that is not there."""
    for path in ROOT.iterdir():
        copy = shutil.copytree if path.name in ("docs", ".ci") else os.symlink
        copy(path, tmp_path / path.name)
    page = tmp_path / "docs/concepts.md"
    links = "[a](nowhere.md) [b](start.md#nowhere) ![c](drawings/nowhere.svg) [d](../fxplug/nowhere.py)"
    page.write_text(f"{page.read_text()}\n{links}\n")
    (tmp_path / "docs/stray.md").write_text("# Stray\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for fault in ("nowhere.md", "#nowhere", "drawings/nowhere.svg", "../fxplug/nowhere.py leads nowhere", "stray.md"):
        assert fault in done.stderr, fault
