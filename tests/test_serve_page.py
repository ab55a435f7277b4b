"""The page of a server in a real browser: what it asks for is what a request by hand gives, with a mask, regions and keys."""

from __future__ import annotations

import base64
import json

import browser
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from test_edits import MASK, PICTURE, draw, encode
from test_server import ASK, client, folder  # noqa: F401  (fixtures)

from fxplug.serving.server.keys import read_keys

pytestmark = browser.needed


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(driver, client):  # noqa: F811
    host, port = client.address
    driver.get(f"http://{host}:{port}/")
    WebDriverWait(driver, 20).until(lambda d: d.find_elements(By.CSS_SELECTOR, "#found button"))
    for name, value in (("width", 32), ("height", 32), ("steps", 2), ("seed", 5), ("prompt", "a cat")):
        write(driver, name, value)
    return driver


def write(driver, name, value):
    field = driver.find_element(By.ID, name)
    field.clear()
    field.send_keys(str(value), Keys.TAB)


def ask(driver, said="done"):
    driver.find_element(By.ID, "draw").click()
    WebDriverWait(driver, 120).until(lambda d: not d.find_element(By.ID, "cancel").is_enabled())
    assert driver.find_element(By.ID, "said").text == said
    found = driver.find_elements(By.CSS_SELECTOR, "#pictures figure")
    assert all(not line["message"].count("Content Security") for line in driver.get_log("browser"))
    return base64.b64decode(found[0].find_element(By.TAG_NAME, "img").get_attribute("src").partition(",")[2]) if found else None


def fill(driver, layer, left):
    driver.execute_script("document.getElementById('layer').selectedIndex = arguments[0]", layer)
    driver.execute_script("document.querySelector('#box input').value = arguments[0]; "
                          "document.querySelectorAll('#box input')[2].value = 100", left)  # fmt: skip
    driver.find_element(By.ID, "fill").click()


def by_hand(client, **more):  # noqa: F811
    status, found = client.json("/v1/images/generations", ASK | {"call": {"num_inference_steps": 2}} | more)
    assert status == 200, found
    return base64.b64decode(found["data"][0]["b64_json"])


def test_a_picture_with_adapters_that_are_searched_for(page, client):  # noqa: F811
    assert ask(page) == by_hand(client)
    page.find_element(By.ID, "search").send_keys("FI")
    (found,) = page.find_elements(By.CSS_SELECTOR, "#found button")
    found.send_keys(Keys.ENTER)
    strength = page.find_element(By.CSS_SELECTOR, "#chosen input[type=range]")
    strength.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert float(strength.get_attribute("value")) == 0.9
    assert ask(page) == by_hand(client, adapters={"film": 0.9})
    request = json.loads(page.execute_script("return document.querySelector('#pictures pre').textContent"))
    assert request["adapters"] == {"film": 0.9} and request["seed"] == 5
    write(page, "width", 31)
    ask(page, "size: width and height must be multiples of 8: use 32x32, not 31x32")


def test_regions_and_a_mask(page, client, tmp_path):  # noqa: F811
    page.find_element(By.ID, "add").click()
    page.find_element(By.CSS_SELECTOR, "#own input").send_keys("dog")
    fill(page, 1, 50)
    region = {"mask": base64.b64encode(encode(MASK)).decode(), "call": {"prompt": "dog"}}
    assert ask(page) == by_hand(client, regions=[region])
    page.find_element(By.ID, "drop").click()
    (tmp_path / "a.png").write_bytes(encode(PICTURE))
    page.find_element(By.ID, "picture").send_keys(str(tmp_path / "a.png"))
    WebDriverWait(page, 10).until(lambda d: d.execute_script("return photo !== null"))
    fill(page, 0, 50)
    made = ask(page)
    files = {"image": encode(PICTURE), "mask": encode(MASK)}
    assert made == encode_again(draw(client, files, strength=0.8, call='{"num_inference_steps": 2}', size="32x32"))


def encode_again(picture):
    from fxplug.serving.server.pictures import encode_picture

    picture.load()
    return encode_picture([picture.copy()], "png")[0]


def test_who_cancels_takes_no_more_steps(page, client):  # noqa: F811
    write(page, "steps", 60)
    # the page presses the button itself at the first preview: a driver that asks now and then can come too late
    page.execute_script("new MutationObserver(() => { if ($('said').textContent === 'drawing') $('cancel').click(); })"
                        ".observe($('said'), {childList: true})")  # fmt: skip
    page.find_element(By.ID, "draw").click()
    WebDriverWait(page, 60).until(lambda d: d.find_element(By.ID, "said").text == "cancelled")
    WebDriverWait(page, 30).until(lambda d: client.server.service.engine.is_idle)


def test_a_narrow_screen_and_a_key(page, client, folder):  # noqa: F811
    browser.size(page, 320)
    assert page.execute_script("return document.scrollingElement.scrollWidth") <= 320
    client.server.keys = read_keys(folder / "keys.txt")
    try:
        page.refresh()
        key = page.find_element(By.ID, "key")
        WebDriverWait(page, 10).until(lambda d: key.is_displayed())
        assert not page.find_elements(By.CSS_SELECTOR, "#found button")
        key.send_keys("guest", Keys.TAB)
        WebDriverWait(page, 10).until(lambda d: d.find_elements(By.CSS_SELECTOR, "#found button"))
        assert "secret" not in page.find_element(By.ID, "found").text
    finally:
        client.server.keys = None
