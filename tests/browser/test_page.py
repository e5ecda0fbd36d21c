"""The live page in headless Chromium, served by the real app over a scripted supernode."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service as ChromeService
from selenium.webdriver.common.by import By

from k3ray.errors import SupernodeError
from tests.support.endpoint import Endpoint, running_endpoint, start_endpoint
from tests.support.scripted_router import ScriptedRouter

pytestmark = pytest.mark.browser

NUM_LAYERS, NUM_EXPERTS = 3, 8


class PageRouter(ScriptedRouter):
    """A scripted supernode with a status document that tests change."""

    document: dict[str, Any]
    fails = False

    async def status(self) -> dict[str, Any]:
        if self.fails:
            raise SupernodeError("no controller answers", remedy="wait")
        copy: dict[str, Any] = json.loads(json.dumps(self.document))
        return copy


def status_document() -> dict[str, Any]:
    def actor(role: str, name: str, pid: int, **fields: Any) -> dict[str, Any]:
        return {
            "role": role, "id": name, "node": "10.0.0.1", "pid": pid, "term": 1, "state": "ready",
            "plan": 4, "version": "main@40-0123456789ab", "experts": {}, **fields,
        }  # fmt: skip

    halves = [
        {str(layer): list(range(first, first + 4)) for layer in range(1, NUM_LAYERS + 1)}
        for first in (0, 4)
    ]
    return {
        "name": "k3", "model": "k3-nano", "line": "main", "state": "ready", "reason": "",
        "plan_version": 4,
        "versions": [
            {"version": "main@20-aaaaaaaaaaaa", "latest": False, "active": True, "pins": 1},
            {"version": "main@40-0123456789ab", "latest": True, "active": True, "pins": 2},
        ],
        "actors": [
            actor("controller", "controller", 100),
            actor("expert_group", "group-0", 101, experts=halves[0]),
            actor("expert_group", "group-1", 102, experts=halves[1]),
            actor("attention_stack", "stack-0", 103, running=3, waiting=2),
            actor("ingress", "ingress-0", 104),
        ],
        "leases": [],
        "decisions": [
            {"time": 1000.0, "command": "SwitchPlan", "reason": "group-1 is back <b>whole</b>"}
        ],
        "training": {
            "main": {
                "step": 40, "committed_step": 40, "loss": 2.25,
                "loss_history": [[step, 5.0 - step / 20] for step in range(1, 41)],
            }
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=ChromeService(executable_path=driver))
    chrome.set_page_load_timeout(60)
    yield chrome
    chrome.quit()


@pytest.fixture
def router() -> PageRouter:
    router = PageRouter()
    router.document = status_document()
    return router


@pytest.fixture
def endpoint(router: PageRouter) -> Iterator[Endpoint]:
    with running_endpoint(router) as running:
        yield running


def until(condition: Callable[[], Any], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "the page did not show it in time"
        time.sleep(0.05)


def text(browser: webdriver.Chrome, selector: str) -> str:
    """Text of an element; the page may redraw it between finding and reading."""
    while True:
        try:
            return browser.find_element(By.CSS_SELECTOR, selector).text
        except StaleElementReferenceException:
            time.sleep(0.02)


def figure(browser: webdriver.Chrome, label: str) -> str:
    return text(browser, f'[data-figure="{label}"]')


def open_page(browser: webdriver.Chrome, url: str) -> None:
    browser.set_window_size(1280, 1000)
    browser.get(f"{url}/ui")
    until(lambda: text(browser, "#state") == "ready")


def test_everything_is_shown(browser: webdriver.Chrome, endpoint: Endpoint) -> None:
    open_page(browser, endpoint.url)
    assert browser.title == "k3: ready"
    assert text(browser, "#name") == "k3"
    assert text(browser, "#model") == "k3-nano"
    assert figure(browser, "plan version") == "4"
    assert figure(browser, "weight version") == "main@40-0123456789ab"
    assert (figure(browser, "requests running"), figure(browser, "requests waiting")) == ("3", "2")
    rows = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#actors tr")]
    assert len(rows) == 5
    assert "group-0 expert group ready 1 101 10.0.0.1" in rows[1]
    versions = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#versions tr")]
    assert versions == ["main@20-aaaaaaaaaaaa live 1", "main@40-0123456789ab latest 2"]
    cells = browser.find_elements(By.CSS_SELECTOR, "#experts i")
    assert len(cells) == NUM_LAYERS * NUM_EXPERTS
    assert cells[5].get_attribute("title") == "expert 5: group-1 (ready)"
    assert "12 experts" in text(browser, "#groups")
    assert "loss 2.2500" in text(browser, "#training")
    curve = browser.find_element(By.CSS_SELECTOR, "#training svg")
    assert "from 4.950 at step 1, lowest 3.000" in (curve.get_attribute("aria-label") or "")
    assert "5 actors" in text(browser, "#nodes")
    assert "group-1 is back <b>whole</b>" in text(browser, "#decisions"), "text, not markup"


def test_changes_arrive_without_a_reload(
    browser: webdriver.Chrome, endpoint: Endpoint, router: PageRouter
) -> None:
    open_page(browser, endpoint.url)
    group = router.document["actors"][2]
    group.update(state="starting", term=2, pid=0)
    router.document.update(state="rebuilding", reason="waiting for ['group-1']", plan_version=5)
    until(lambda: text(browser, "#state").startswith("rebuilding: waiting"))
    assert figure(browser, "plan version") == "5"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#experts i.down")) == NUM_LAYERS * 4
    assert "group-1 #2" in text(browser, "#groups")
    httpx.post(
        f"{endpoint.url}/v1/completions", json={"model": "k3", "prompt": "hi", "max_tokens": 30}
    )
    until(lambda: figure(browser, "tokens served") == "30")


def test_a_missing_controller_is_said(
    browser: webdriver.Chrome, endpoint: Endpoint, router: PageRouter
) -> None:
    open_page(browser, endpoint.url)
    router.fails = True
    until(lambda: "no controller answers" in text(browser, "#alert"))
    assert text(browser, "#state") == "no controller"
    router.fails = False
    until(lambda: text(browser, "#state") == "ready")
    assert not browser.find_element(By.ID, "alert").is_displayed()


def test_an_unreachable_endpoint_is_said(browser: webdriver.Chrome, router: PageRouter) -> None:
    endpoint = start_endpoint(router)
    open_page(browser, endpoint.url)
    endpoint.stop()
    until(lambda: "The endpoint does not answer." in text(browser, "#alert"))
    assert text(browser, "#state") == "unreachable"
    assert "s old" in text(browser, "#alert")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#actors tr")) == 5, "the last state stays"


def test_narrow_screens_do_not_scroll_sideways(
    browser: webdriver.Chrome, endpoint: Endpoint, tmp_path: Path
) -> None:
    open_page(browser, endpoint.url)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        width = browser.execute_script("return document.documentElement.scrollWidth")
        assert width <= 360
        assert browser.get_screenshot_as_file(str(tmp_path / "narrow.png"))
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_is_accessible_and_self_contained(
    browser: webdriver.Chrome, endpoint: Endpoint
) -> None:
    open_page(browser, endpoint.url)
    script = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert all(name.startswith(endpoint.url) for name in browser.execute_script(script))
    complaints = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert [message for message in complaints if endpoint.url in message] == []
    assert browser.execute_script("return document.documentElement.lang") == "en"
    labelled = (
        "return [...document.querySelectorAll('section')]"
        ".every(s => document.getElementById(s.getAttribute('aria-labelledby')))"
    )
    assert browser.execute_script(labelled)
    headers = "return [...document.querySelectorAll('th')].every(h => h.scope)"
    assert browser.execute_script(headers)
    policy = httpx.get(f"{endpoint.url}/ui/").headers["content-security-policy"]
    assert "default-src 'self'" in policy


@pytest.mark.parametrize("path", ["/ui/../pyproject.toml", "/ui/%2e%2e%2fapp.js", "/ui/x.js"])
def test_only_the_page_files_are_served(endpoint: Endpoint, path: str) -> None:
    assert httpx.get(f"{endpoint.url}{path}").status_code == 404
