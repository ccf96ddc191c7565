"""The chat page in headless Chromium (Debian's `chromium`, driven by selenium): send, stream, stop, reload, errors, keyboard."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slipstream.inference.core import Finish
from tests.inference.fake_engine import FakeEngine

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
MISSING = [
    *(name for name, path in (("chromium", CHROMIUM), ("chromedriver (Debian: chromium-driver)", DRIVER)) if path is None),
    *(name for name in ("selenium", "fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None),
]
pytestmark = [
    pytest.mark.alone,  # a browser and a server beside other lanes are too slow for its waits
    pytest.mark.skipif(bool(MISSING), reason=f"the page's test needs {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from tests.inference.test_server import serving

    with serving(FakeEngine(tick=0.02), api_keys=("sesame",)) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def page(browser: Any, address: str) -> Any:
    """A page without history, with its key."""
    browser.get(f"http://{address}/")
    browser.execute_script("localStorage.clear(); sessionStorage.setItem('slipstream.key', 'sesame')")
    browser.refresh()
    until(browser, "document.getElementById('model').textContent === 'fake/model'")
    return browser


def until(page: Any, condition: str) -> Any:
    end = time.monotonic() + 40
    while not (value := page.execute_script(f"return {condition}")):
        assert time.monotonic() < end, f"not within 40 s: {condition}; {page.get_log('browser')}"
        time.sleep(0.02)
    return value


def write(page: Any, text: str) -> None:
    page.find_element("id", "prompt").send_keys(text)


def press(page: Any, *keys: str) -> None:
    """Whatever has the focus."""
    from selenium.webdriver import ActionChains

    ActionChains(page).send_keys(*keys).perform()


def back(page: Any, times: int = 1) -> None:
    """Shift+Tab."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(page).key_down(Keys.SHIFT).send_keys(Keys.TAB * times).key_up(Keys.SHIFT).perform()


def has_chat(page: Any, *messages: dict[str, str]) -> None:
    """As if the page had been left with these."""
    page.execute_script(f"localStorage['slipstream.chat'] = {json.dumps(json.dumps(messages))}")
    page.refresh()


def answers(page: Any) -> list[str]:
    return [node.text for node in page.find_elements("css selector", ".assistant:not(.writing) .text")]


def test_send_stream_and_reload(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    write(page, "one")
    write(page, Keys.SHIFT + Keys.ENTER)
    page.find_element("id", "prompt").send_keys("two", Keys.ENTER)
    until(page, "document.querySelector('.writing .text')?.textContent.includes('one')")  # before it is complete
    until(page, "!document.querySelector('.writing') && document.querySelectorAll('.assistant').length === 1")
    assert answers(page)[0].startswith("<user>one two <user>one two")
    assert page.find_element("css selector", ".user .text").text == "one\ntwo"
    page.refresh()
    until(page, "document.querySelectorAll('.assistant').length === 1")
    until(page, "document.getElementById('cache').textContent === '25.0 %'")
    severe = [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE" and "401" not in entry["message"]]
    assert severe == []


def test_stop_keeps_what_was_written(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    write(page, "forever" + Keys.ENTER)
    until(page, "document.querySelector('.writing .text')?.textContent.includes('more more')")
    assert page.find_element("id", "send").text == "Stop"
    write(page, Keys.ESCAPE)
    until(page, "document.querySelector('.foot')?.textContent.includes('stopped')")
    assert answers(page)[0].startswith("more more")
    assert page.find_element("id", "send").text == "Send"


def test_error_and_retry(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    write(page, "full" + Keys.ENTER)
    until(page, "document.querySelector('[role=alert]')?.textContent.includes('the queue is full')")
    page.execute_script("const chat = JSON.parse(localStorage['slipstream.chat']); window.before = chat.length")
    page.find_element("css selector", "[role=alert] button").click()
    until(page, "document.querySelector('[role=alert]')?.textContent.includes('the queue is full')")
    assert page.execute_script("return JSON.parse(localStorage['slipstream.chat']).length === window.before")


def test_error_in_the_middle_of_an_answer(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    write(page, "explode" + Keys.ENTER)
    until(page, "document.querySelector('[role=alert]')?.textContent.includes('met a NaN')")
    assert "explode" in answers(page)[0]  # what came is kept
    page.find_element("css selector", "[role=alert] button").click()
    until(page, "document.querySelector('.writing')")
    until(page, "document.querySelector('[role=alert]')?.textContent.includes('met a NaN')")
    assert len(answers(page)) == 1


def test_left_before_the_answer(page: Any) -> None:
    has_chat(page, {"role": "user", "content": "one"})
    until(page, "document.querySelector('[role=alert]')?.textContent.includes('no answer')")
    page.find_element("css selector", "[role=alert] button").click()
    assert page.execute_script("return document.activeElement.id") == "prompt"  # and not nowhere
    until(page, "document.querySelectorAll('.assistant:not(.writing)').length === 1 && !document.querySelector('.error')")


def test_server_that_is_gone(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    from tests.inference.test_server import serving

    with serving(FakeEngine()) as address:
        browser.get(f"http://{address}/")
        until(browser, "document.getElementById('model').textContent === 'fake/model'")
    write(browser, "anybody?" + Keys.ENTER)
    until(browser, "document.querySelector('[role=alert]')?.textContent.includes('cannot be reached')")
    until(browser, "document.getElementById('model').textContent === 'offline'")
    browser.get_log("browser")


def test_keyboard_only(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    focus = "document.activeElement.id || document.activeElement.textContent"
    press(page, "one", Keys.ENTER)  # the message field has the focus
    until(page, "document.querySelector('.foot')")
    page.execute_script("window.first = document.querySelectorAll('.turn')")
    press(page, "two, later", Keys.ENTER)
    until(page, "document.querySelectorAll('.foot').length === 2")
    # A screen reader is not made to read all of it again.
    assert page.execute_script("return [...first].every((node, i) => node === document.querySelectorAll('.turn')[i])")
    assert page.execute_script("return document.getElementById('log').ariaBusy") == "false"
    assert page.execute_script("return document.getElementById('status').textContent") == "Answer complete"
    back(page)
    assert page.execute_script(f"return {focus}") == "Regenerate"
    press(page, Keys.ENTER)
    assert page.execute_script(f"return {focus}") == "prompt"
    press(page, Keys.ESCAPE)  # before or after the first token
    until(page, "document.querySelectorAll('.foot')[1]?.textContent.includes('stopped')")
    press(page, Keys.TAB, Keys.TAB, Keys.ARROW_RIGHT)  # Send is disabled; system prompt, temperature
    assert page.execute_script("return JSON.parse(localStorage['slipstream.settings']).temperature") == "0.75"
    press(page, Keys.ESCAPE)
    page.execute_script("document.getElementById('toggle').focus()")
    press(page, Keys.ENTER)
    assert page.execute_script("return document.getElementById('panel').hidden")
    press(page, Keys.SPACE)
    assert not page.execute_script("return document.getElementById('panel').hidden")
    back(page, 2)
    press(page, Keys.ENTER)  # New chat
    until(page, "document.querySelector('.hello')")
    assert page.execute_script(f"return {focus}") == "prompt"


def test_stopped_before_the_first_token(page: Any) -> None:
    escape = "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
    # One turn of the page's loop, so that nothing of the answer can have come.
    page.execute_script(
        f"const prompt = document.getElementById('prompt'); prompt.value = 'forever'; prompt.form.requestSubmit(); {escape}"
    )
    until(page, "document.querySelector('.foot')?.textContent.includes('stopped')")
    turns = json.loads(page.execute_script("return localStorage['slipstream.chat']"))
    assert [(turn["role"], turn["content"]) for turn in turns] == [("user", "forever"), ("assistant", "")]
    page.execute_script("document.querySelector('.foot .again').click()")
    until(page, "document.querySelector('.turn.assistant')?.textContent.includes('more more')")
    page.execute_script(escape)
    until(page, "document.querySelector('.foot')?.textContent.includes('stopped')")


def test_charts_live(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    write(page, "forever" + Keys.ENTER)
    until(page, "Number(document.getElementById('speed').textContent) > 0")
    for name in ("speed", "cache"):
        has_pixels = "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v))"
        until(page, f"{has_pixels}(document.getElementById('{name}-chart'))")
    write(page, Keys.ESCAPE)


def test_asks_for_a_key(browser: Any, address: str) -> None:
    browser.get(f"http://{address}/")
    browser.execute_script("localStorage.clear(); sessionStorage.clear()")
    browser.refresh()
    until(browser, "!document.getElementById('access').hidden")
    browser.find_element("id", "key").send_keys("mellon\n")
    until(browser, "document.getElementById('wrong').textContent.includes('rejects this API key')")
    assert browser.execute_script("return document.activeElement.id") == "key"
    browser.find_element("id", "key").clear()
    browser.find_element("id", "key").send_keys("sesame")
    browser.find_element("id", "unlock").click()
    until(browser, "document.getElementById('model').textContent === 'fake/model' && document.getElementById('access').hidden")


def test_what_the_model_says_is_text(page: Any) -> None:
    content = "<img src=x onerror=alert(1)> **bold** `<b>`\n```html\n<script>alert(2)</script>\n```"
    has_chat(page, {"role": "assistant", "content": content})
    until(page, "document.querySelectorAll('.assistant strong').length === 1")
    assert page.execute_script("return document.querySelectorAll('#log img, #log script, #log b').length") == 0
    assert "<script>alert(2)</script>" in page.find_element("css selector", ".block pre").text


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_reasoning_is_apart(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    write(page, "think" + Keys.ENTER)
    until(page, "document.querySelector('.writing details.thought')?.open")  # while there is no answer
    until(page, "document.querySelector('.foot')")
    assert answers(page) == ["So be it"]
    assert not page.execute_script("return document.querySelector('details.thought').open")
    page.find_element("css selector", ".thought summary").click()
    assert page.find_element("css selector", ".thought p").text == "I wonder."
    page.refresh()
    until(page, "document.querySelectorAll('details.thought').length === 1")
    write(page, "and now?" + Keys.ENTER)
    until(page, "document.querySelectorAll('.foot').length === 2")


def test_tool_calls_and_their_results(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    page.execute_script(f"localStorage['slipstream.settings'] = {json.dumps(json.dumps({'tools': json.dumps(TOOLS)}))}")
    page.refresh()
    write(page, "use a tool" + Keys.ENTER)
    until(page, "document.querySelector('form.results')")
    assert "Sure." in answers(page)[0] and 'calls add\nCopy\n{\n  "a": 7\n}' in answers(page)[0]
    page.refresh()  # the call is kept
    until(page, "document.querySelector('form.results textarea')").send_keys("forty <b>two</b>")
    page.find_element("css selector", ".results button").click()
    until(page, "document.querySelectorAll('.foot').length === 2")
    assert page.find_element("css selector", ".turn.tool pre").text == "forty <b>two</b>"
    assert "<tool>forty" in answers(page)[1], "it is in the prompt"
    assert not page.find_element("css selector", "form.results").is_displayed()
    page.execute_script("document.querySelector('.turn:last-child .again').click()")
    until(page, "!document.querySelector('.writing') && document.querySelectorAll('.foot').length === 2")
    page.execute_script(
        "const tools = document.getElementById('tools'); tools.value = '[{'; tools.dispatchEvent(new Event('input'))"
    )
    write(page, "more" + Keys.ENTER)
    until(page, "document.querySelector('[role=alert]')?.textContent.includes('Settings, Tools: ')")


@contextmanager
def phone(page: Any, width: int) -> Iterator[None]:
    metrics = {"width": width, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.refresh()
        yield
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_several_models(browser: Any) -> None:
    """On a phone: each is chosen from a menu and loaded when it is asked; Stop ends the request in the engine."""
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    from tests.inference.test_several_models import Source, served

    names = ["first-model-7b", "somebody/a-name-that-is-longer-than-a-phone-is-wide-instruct"]
    sources = [Source(name, slow=True) for name in names]
    for source in sources:
        source.says = "a long answer " * 10
    with served(*sources, max_loaded=1) as address:
        browser.get(f"http://{address}/")
        browser.execute_script("localStorage.clear()")
        with phone(browser, 390):
            until(browser, "document.querySelectorAll('#models option').length === 2")
            until(browser, f"document.getElementById('model').textContent === '{names[0]} (unloaded)'")
            until(browser, "document.getElementById('cache').textContent === '0.0 %'")
            for turn, name in enumerate((*names, names[0])):
                Select(browser.find_element("id", "models")).select_by_value(name)
                until(browser, f"document.getElementById('models').value === '{name}'")
                source = sources[names.index(name)]
                source.allowed.clear()
                write(browser, f"question {turn}" + Keys.ENTER)
                until(browser, f"document.getElementById('model').textContent === '{name} (loading)'")
                assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
                boxes = "[...document.querySelectorAll('header > :not([hidden])')].map(node => node.getBoundingClientRect().right)"
                assert max(browser.execute_script(f"return {boxes}")) <= 390
                source.allowed.set()
                source.steps.release(3)
                until(browser, "document.querySelector('.writing .text')?.textContent.includes('a l')")
                until(browser, f"document.getElementById('model').textContent === '{name}'")
                until(browser, "document.getElementById('running').textContent === '1'")
                browser.find_element("id", "send").click()
                until(browser, "!document.querySelector('.writing')")
                while browser.execute_script("return document.getElementById('running').textContent") != "0":
                    source.steps.release(1)  # the forward in which it is, and few more
                    time.sleep(0.1)
                assert source.engine.stats().finished[Finish.CANCELLED] == 1, "and not at its end"
                foot = browser.find_elements("css selector", ".foot")[turn].text
                assert foot.startswith(name) and "stopped" in foot
            assert [source.opens for source in sources] == [2, 1]
        for source in sources:
            source.steps.release(1000)


def test_fits_a_phone(page: Any) -> None:
    with phone(page, 360):
        until(page, "document.getElementById('panel').hidden")
        assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        page.find_element("id", "toggle").click()
        until(page, "document.getElementById('temperature').getBoundingClientRect().width > 100")
        assert page.execute_script("return document.activeElement.id") == "panel"
        page.find_element("id", "toggle").click()  # is not under the panel
        until(page, "document.getElementById('panel').hidden")
