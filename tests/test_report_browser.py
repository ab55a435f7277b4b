"""The page in a real browser: it opens, folds, finds and follows links, says what its contents say, and nothing else runs."""

from __future__ import annotations

import json

import browser
import pytest
import small
import torch
import unets
from diffusers import DiTTransformer2DModel
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from test_report import named  # noqa: F401  (a fixture)

import fxplug
from fxplug.reporting.reports import as_json

pytestmark = browser.needed
MODELS = ["vit", "sd15", "dit"]


def vit():
    base = small.plain_vit()
    return base, [fxplug.load_pass("lora", at="blocks.*.attn.*", rank=4)]


def sd15():
    base = unets.sd15()
    return base, [fxplug.load_pass("controlnet", network=unets.control(base.model))]


def dit():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "sample_size": 8, "num_layers": 3}
    model = small.seeded(lambda: DiTTransformer2DModel(**sizes, num_embeds_ada_norm=8)).eval()
    call = {"timestep": torch.tensor([5, 5]), "class_labels": torch.tensor([1, 2]), "return_dict": False}
    base = small.traced(model, small.seeded(lambda: torch.randn(2, 4, 8, 8)), **call)
    return base, [fxplug.load_pass("lora", at="transformer_blocks.*.attn1.*"), fxplug.load_pass("first_block_cache")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of three models, each with its contents as JSON beside it; one was verified."""
    folder = tmp_path_factory.mktemp("pages")
    for name, make in {"vit": vit, "sd15": sd15, "dit": dit}.items():
        base, passes = make()
        new = fxplug.apply(base.gm, *passes)
        checks = fxplug.verify(base.gm, new, base.args, base.kwargs, compile=False) if name == "vit" else None
        page = fxplug.report(base.gm, new, folder / f"{name}.html", checks=checks)
        (folder / f"{name}.json").write_text(as_json(page))
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def opened(driver, pages):
    """Opens one of the pages, and after all that a test does there the console must have said nothing."""
    def go(name, path=""):
        driver.get("about:blank")
        driver.get_log("browser")
        browser.size(driver, 1280)
        driver.get((pages / f"{name}.html").as_uri() + (f"#{path}" if path else ""))
        return json.loads((pages / f"{name}.json").read_text())

    yield go
    assert driver.get_log("browser") == []


def text(driver, css):
    return driver.find_element(By.CSS_SELECTOR, css).text


def texts(driver, css):
    return [found.text for found in driver.find_elements(By.CSS_SELECTOR, css)]


def soon(driver, holds):
    """What a link leads to is there when the browser has told that it was followed."""
    WebDriverWait(driver, 10, ignored_exceptions=[StaleElementReferenceException]).until(lambda _: holds())


def click(driver, css):
    element = driver.find_element(By.CSS_SELECTOR, css)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_says_what_its_contents_say(opened, driver, name):
    page = opened(name)
    number = "{:,}".format
    assert text(driver, "#n-sites") == str(len(page["sites"])) and text(driver, "#n-passes") == str(len(page["passes"]))
    assert text(driver, "#n-base") == number(page["base"]) and text(driver, "#n-all") == number(page["parameters"])
    assert len(driver.find_elements(By.CSS_SELECTOR, "#rows tr")) == len(page["sites"])
    assert texts(driver, "#checks b") == [check["name"] for check in page["checks"] or []]
    root = page["kinds"][page["root"]]
    assert len(driver.find_elements(By.CSS_SELECTOR, "#region .picture .box")) == len(root["boxes"])
    asked = ["What is it?", "What changed?", "Where?", "How much?", "Was it checked?"]
    assert texts(driver, ".card h2") == asked
    bottom = driver.execute_script("return Math.max(...[...document.querySelectorAll('main > .cards p.big')].map(e => "
                                   "e.getBoundingClientRect().bottom))")  # fmt: skip
    assert bottom < 900, "the five are answered on the first screen"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_sticks_out(opened, driver, name, dark):
    opened(name)
    for width in (1280, 400):
        browser.size(driver, width, dark=dark)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert driver.execute_script("""
            const scrolls = '.drawing, .scroll, pre, svg, #tree, .views';
            return [...document.querySelectorAll('main *')].filter(e => e.getClientRects().length && !e.closest(scrolls)
              && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))""") == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_can_be_read(opened, driver, dark):
    """Contrast of at least 4.5 to 1 (WCAG 2, AA), wherever a text stands."""
    opened("vit", "blocks.0.attn")
    browser.size(driver, 1280, dark=dark)
    driver.execute_script("document.querySelector('details').open = true")
    low = driver.execute_script("""
        const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
        const rgb = text => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
          return canvas.getImageData(0, 0, 1, 1).data; };
        const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
        const under = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
          if (c[3] === 255) return c; } return rgb('white'); };
        const found = [];
        for (const e of document.querySelectorAll('main *, header *')) {
          if (!e.getClientRects().length || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
          if (e.tagName === 'title' || e.closest('title')) continue;
          const svg = e.tagName === 'text', box = svg && e.parentElement.querySelector('rect:not(.back)');
          const ink = rgb(getComputedStyle(e)[svg ? 'fill' : 'color']);
          let paper = under(e.closest('svg') ? e.closest('svg').parentElement : e);
          if (box) { const c = rgb(getComputedStyle(box).fill); if (c[3] === 255) paper = c; }
          const [a, b] = [light(ink), light(paper)], contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
          if (contrast < 4.5) found.push([contrast.toFixed(2), e.textContent.trim().slice(0, 40), e.className]);
        }
        return found;""")
    assert low == []


def test_regions_fold_and_unfold(opened, driver):
    page = opened("vit")
    rows = len(driver.find_elements(By.CSS_SELECTOR, "#tree .row"))
    click(driver, "#tree [data-path=blocks] button")
    assert len(driver.find_elements(By.CSS_SELECTOR, "#tree .row")) > rows
    assert driver.find_element(By.CSS_SELECTOR, "#tree [data-path=blocks] button").get_attribute("aria-expanded") == "true"
    click(driver, "#tree [data-path=blocks] button")
    assert len(driver.find_elements(By.CSS_SELECTOR, "#tree .row")) == rows
    box = next(i for i, b in enumerate(page["kinds"][page["root"]]["boxes"]) if b["name"] == "blocks")
    click(driver, f"#region a[data-box='{box}']")
    soon(driver, lambda: text(driver, ".path").endswith("blocks"))
    assert driver.current_url.endswith("#blocks")
    driver.back()
    soon(driver, lambda: text(driver, ".path") == page["title"])


def test_a_link_leads_to_its_region_or_layer(opened, driver):
    opened("vit", "blocks.1.attn")
    assert text(driver, ".path").split("›") == ["VisionTransformer", "blocks", "1", "attn"]
    assert text(driver, "#tree .here a").startswith("attn")
    driver.execute_script("location.hash = 'blocks.1.attn.qkv'")
    soon(driver, lambda: "qkv · Linear" in text(driver, ".about"))
    assert driver.find_elements(By.CSS_SELECTOR, ".picture .chosen")
    for wrong in ("blocks.1.atn", "%E0%A4%A"):
        driver.execute_script("location.hash = arguments[0]", wrong)
        soon(driver, lambda wrong=wrong: f"There is no region '{wrong}'" in text(driver, ".about"))


def test_before_and_after_are_shown_alone(opened, driver):
    opened("vit", "blocks.0.attn")

    def shown(css):
        return sum(found.is_displayed() for found in driver.find_elements(By.CSS_SELECTOR, f"#region .picture {css}"))

    assert shown(".box.added") == 2 and shown("path.gone")
    click(driver, ".views label:nth-of-type(1)")
    assert not shown(".added") and shown("path.gone")
    click(driver, ".views label:nth-of-type(3)")
    assert shown(".box.added") == 2 and not shown(".gone")


def test_it_finds_by_path_class_and_pass(opened, driver):
    opened("dit")
    field = driver.find_element(By.ID, "search")
    first = "transformer_blocks.0.attn1"
    both = f"{first} Attention · lora"
    for asked, wanted in (("attn1.to_q", f"{first}.to_q"), ("layernorm", "LayerNorm"), ("lora attention", both)):
        field.clear()
        field.send_keys(asked)
        assert wanted in texts(driver, "#found li")[0]
    field.send_keys(Keys.ENTER)
    soon(driver, lambda: "#transformer_blocks" in driver.current_url)
    field.send_keys("zzzz")
    assert texts(driver, "#found li") == ["nothing found"]
    field.send_keys(Keys.ESCAPE)
    assert not driver.find_element(By.ID, "found").is_displayed()


def test_sites_are_sorted_and_filtered(opened, driver):
    page = opened("sd15")
    paths = [site["path"] or "(model)" for site in page["sites"]]
    assert texts(driver, "#rows td:first-child") == paths
    driver.find_element(By.ID, "filter").send_keys("up_blocks")
    left = [path for path in paths if "up_blocks" in path]
    shown = [row for row in driver.find_elements(By.CSS_SELECTOR, "#rows tr") if row.is_displayed()]
    assert len(shown) == len(left) and text(driver, "#shown") == f"{len(left)} of {len(paths)}"
    click(driver, "#sites th button")
    click(driver, "#sites th button")
    assert driver.find_element(By.CSS_SELECTOR, "#sites th").get_attribute("aria-sort") == "descending"
    assert texts(driver, "#rows td:first-child")[0] in left or not shown


def test_it_is_worked_by_keys_alone(opened, driver):
    opened("vit")
    body = driver.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    assert driver.switch_to.active_element.text == "To the model"
    seen = set()
    for _ in range(60):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        active = driver.switch_to.active_element
        seen.add(active.get_attribute("id") or active.get_attribute("name") or active.tag_name)
        if active.get_attribute("data-box"):
            active.send_keys(Keys.ENTER)
            break
    assert {"search", "view"} <= seen
    soon(driver, lambda: text(driver, ".path") != "VisionTransformer")
    assert driver.execute_script("""
        return [...document.querySelectorAll('a[href], button, input')].filter(e => e.getClientRects().length
          && !e.textContent.trim() && !e.getAttribute('aria-label') && !e.labels?.length).map(e => e.outerHTML)""") == []


def test_it_prints_what_it_shows(opened, driver):
    opened("vit", "blocks")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not driver.find_element(By.ID, "search").is_displayed()
    assert driver.find_element(By.CSS_SELECTOR, ".picture").is_displayed()
    assert driver.execute_cdp_cmd("Page.printToPDF", {})["data"]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_regions_of_any_name_are_opened_and_nothing_of_a_name_runs(driver, named):  # noqa: F811
    """Names hold tags and script; so does a link that is followed."""
    driver.get((named / "x.html").as_uri())
    for row, name in enumerate(texts(driver, "#tree ul a")):
        driver.execute_script("document.querySelectorAll('#tree ul a')[arguments[0]].click()", row)
        soon(driver, lambda name=name: name.startswith(text(driver, ".path").split("›")[-1]))
        assert "There is no region" not in text(driver, ".about")
    driver.execute_script("location.hash = arguments[0]", "</script><img src=x onerror=\"document.title='owned'\">")
    soon(driver, lambda: "There is no region" in text(driver, ".about"))
    driver.find_element(By.ID, "search").send_keys("img")
    assert row == 5 and driver.title != "owned" and driver.find_elements(By.TAG_NAME, "img") == []
    assert len(driver.find_elements(By.TAG_NAME, "script")) == 2 and driver.get_log("browser") == []


@pytest.mark.slow
def test_the_page_of_sdxl_answers_at_once(driver, tmp_path):
    gm, *_ = unets.sdxl_full_traced()
    page = fxplug.report(gm, fxplug.apply(gm, fxplug.load_pass("lora", rank=16)), tmp_path / "x.html")
    browser.size(driver, 1280)
    driver.get((tmp_path / "x.html").as_uri())
    took = []
    for path in ("down_blocks.2", "down_blocks.2.attentions.0.transformer_blocks.9.attn1", "", "up_blocks.0.attentions.2"):
        took.append(driver.execute_async_script("""
            const done = arguments[1], start = performance.now(), end = () => done(performance.now() - start);
            addEventListener('hashchange', () => requestAnimationFrame(() => setTimeout(end)), { once: true });
            location.hash = arguments[0];""", path))  # fmt: skip
    found = driver.execute_async_script("""
        const done = arguments[0], field = document.getElementById('search'), start = performance.now();
        field.value = 'attn1 to_q lora'; field.dispatchEvent(new Event('input'));
        const end = () => done([performance.now() - start, document.querySelectorAll('#found li').length]);
        requestAnimationFrame(() => setTimeout(end));""")
    opening = driver.execute_script("return performance.timing.domComplete - performance.timing.navigationStart")
    assert len(page.sites) == 794 and found[1] > 50
    assert max(took) < 200 and found[0] < 200 and opening < 2000, (took, found, opening)
