"""The page in a real Chromium, over a real agent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from bench.processes import free_port
from tests.agents import RunningAgent, running
from tests.web.browser import CHROMIUM, DESK, PHONE, Visit
from tests.web.node import Node, node

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, RunningAgent]]:
    """A node with eight simulated GPUs at work, and its agent."""
    with node(tmp_path_factory.mktemp("node")) as made:
        made.train(0)
        with made.agent() as agent:
            agent.wait(
                lambda scrape: (
                    len(scrape.all("dshealthd_nvlink_up")) == 8 * 18
                    and scrape.all("dshealthd_infiniband_port_up")
                )
            )
            yield made, agent


def address(agent: RunningAgent) -> str:
    """Return the address of an agent's page."""
    return f"http://127.0.0.1:{agent.port}/"


def test_page_shows_this_machine(browser: Browser, tmp_path: Path) -> None:
    """On this machine the page shows its memory, says what it does not have in one line, logs no
    error and asks only the agent.
    """
    with running(tmp_path) as agent:
        agent.wait(lambda scrape: scrape.value("dshealthd_memory_total_bytes"))
        visit = Visit(browser, address(agent))
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            total = int(meminfo.readline().split()[1]) / 2**20
        visit.wait("section[aria-label='Memory']", f"of {total:.1f} GiB")
        visit.wait(".absent", "infiniband")
        assert visit.page.query_selector("section[aria-label='InfiniBand and RoCE']") is None
        assert visit.page.query_selector("section[aria-label='GPUs']") is None
        assert json.loads(agent.get("/api/v1/status"))["node"] == visit.text("h1")
        visit.page.wait_for_timeout(2500)
        assert visit.complaints == []
        assert len(visit.requests) >= 5
        assert all(url.startswith((visit.url, "data:")) for url in visit.requests), visit.requests
        visit.page.close()


def test_page_shows_the_gpus_and_what_changes(
    browser: Browser, simulated: tuple[Node, RunningAgent]
) -> None:
    """Each GPU is shown with its values and limits; a change shows without a reload. A lost GPU is
    unknown, not zero.
    """
    made, agent = simulated
    visit = Visit(browser, address(agent))
    rows = visit.page.locator(".gpus > li:not(.heads)")
    assert rows.count() == 8
    assert "8 of 8 answer" in visit.panel("GPUs")
    temperature = round(float(made.nvml.value(3, "temperature")))
    assert f"{temperature} °C" in rows.nth(3).inner_text()
    assert f"GPU 3 core {temperature} °C" in str(
        rows.nth(3).locator(".bar").first.get_attribute("aria-label")
    )
    assert "slows down at 89 °C, shuts down at 95 °C" in str(
        rows.nth(3).locator(".bar").first.get_attribute("aria-label")
    )
    made.nvml.set(3, "temperature", 91)
    made.nvml.set(4, "remapped_failure", 1)
    made.nvml.fault("fail", 15, gpu=6)
    visit.wait(".gpus > li", "91 °C")
    visit.wait(".verdict li", "A GPU or NVSwitch must be reset, or its node rebooted")
    visit.wait(".gpus > li", "gpu lost \u2013 its values are unknown")
    assert "0" not in rows.nth(6).inner_text().replace("GPU 6", "")
    assert "7 of 8 answer" in visit.panel("GPUs")
    made.nvml.clear_faults()
    made.nvml.set(4, "remapped_failure", 0)
    made.train(0)
    visit.page.wait_for_selector(".gpus .bad", state="detached")
    assert visit.complaints == []
    visit.page.close()


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_page_fits_its_window(
    browser: Browser, simulated: tuple[Node, RunningAgent], size: tuple[int, int]
) -> None:
    """On a phone and a desk nothing has to be scrolled sideways and nothing is cut off."""
    visit = Visit(browser, address(simulated[1]), size)
    assert visit.page.locator(".gpus > li:not(.heads)").count() == 8
    assert visit.is_as_wide_as_its_window()
    visit.page.close()


def test_page_says_when_the_agent_is_gone(browser: Browser, tmp_path: Path) -> None:
    """When the agent stops answering, the page says so and since when, and no longer looks live.
    When it is back, that goes away.
    """
    port = free_port()  # one that no other process is given while the agent is gone
    with running(tmp_path, port=port) as agent:
        visit = Visit(browser, address(agent))
        visit.page.wait_for_selector("#banner", state="hidden")
        assert "live" in visit.text("header")
    visit.page.wait_for_selector("#banner", state="visible")
    assert "No data from the agent since " in visit.text("#banner")
    assert "not answering, last seen" in visit.text("header")
    assert visit.page.title().startswith("✖")
    with running(tmp_path, port=port):
        visit.page.wait_for_selector("#banner", state="hidden")
        assert "live" in visit.text("header")
    visit.page.close()


def test_page_without_scripts_leads_on(
    browser: Browser, simulated: tuple[Node, RunningAgent]
) -> None:
    """Without JavaScript the page says so and leads to what can be read without."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address(simulated[1]))
    assert "needs JavaScript" in page.inner_text("main")
    page.click("main a[href='metrics']")
    assert "dshealthd_gpu_temperature_celsius" in page.inner_text("body")
    context.close()
