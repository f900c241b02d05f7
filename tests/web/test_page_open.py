"""A page that stays open: over a sleep of its computer, another agent behind its address, an agent
of another release, a proxy. What it shows as live is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Route

from dshealthd.collectors.infiniband import TRANSMIT_BYTES
from dshealthd.collectors.infiniband import UP as PORT_UP
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.findings.past import DAY
from tests.status_documents import finding, job
from tests.web.browser import CHROMIUM, Visit
from tests.web.serving import Served, serving
from tests.web.test_page_findings import snapshot

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
STATUS = "**/api/v1/status"
BEAT = "header .live"


@pytest.fixture
def more() -> dict[str, Any]:
    """Return what replaces parts of the status document."""
    return {}


@pytest.fixture
def served(more: dict[str, Any]) -> Iterator[Served]:
    """Serve a healthy node."""
    with serving(snapshot(), more=more, guarded=False) as server:
        yield server


@pytest.fixture
def visit(browser: Browser, served: Served) -> Iterator[Visit]:
    """Open its page."""
    opened = Visit(browser, f"http://127.0.0.1:{served.port}/")
    opened.wait(BEAT, "live, last seen")
    yield opened
    opened.page.close()


def test_old_data_is_not_live_while_the_agent_is_asked_again(
    browser: Browser, served: Served
) -> None:
    """Whoever comes back after three days sees of which day the data is, and no accusation of an
    agent that nobody has asked; that it does not answer is said once.
    """
    day = time.localtime()
    url = f"http://127.0.0.1:{served.port}/"
    visit = Visit(browser, url, prepare=lambda page: page.clock.install())
    visit.page.route(STATUS, lambda _route: None)
    visit.page.clock.fast_forward(int(3 * DAY * 1000))
    visit.wait(BEAT, "asking, last seen ")
    assert visit.page.locator("body.lost").count() == 1
    assert not visit.page.is_visible("#banner")
    visit.page.wait_for_selector("#banner", state="visible")
    said = visit.text("#banner")
    assert f"since {time.strftime('%b', day)} {day.tm_mday}, " in said
    assert said.endswith("what is shown is from then. (timed out)")
    assert visit.page.title().startswith("✖")
    with visit.page.expect_event("requestfailed"):
        pass
    assert visit.text("#banner") == said
    visit.page.close()


def test_an_answer_that_cannot_be_shown_is_none(more: dict[str, Any], visit: Visit) -> None:
    """As of an agent of another release: the page does not freeze with what it showed before."""
    more["workers"] = None
    visit.page.wait_for_selector("#banner", state="visible")
    assert "its answer cannot be shown" in visit.text("#banner")
    assert "not answering" in visit.text(BEAT)
    del more["workers"]
    visit.page.wait_for_selector("#banner", state="hidden")
    assert "live" in visit.text(BEAT)


@pytest.mark.parametrize(
    ("body", "said"),
    [("<html><h1>Bad Gateway</h1></html>", "502 Bad Gateway"), ("busy\n", "(busy)")],
)
def test_why_there_is_no_answer(visit: Visit, body: str, said: str) -> None:
    """The agent's own text, or the status of a proxy, whose page is no text to read."""
    visit.page.route(STATUS, lambda route: route.fulfill(status=502, body=body))
    visit.page.wait_for_selector("#banner", state="visible")
    assert said in visit.text("#banner")
    assert "<" not in visit.text("#banner")
    visit.complaints.clear()


def test_another_agent_behind_the_address(more: dict[str, Any], visit: Visit) -> None:
    """As behind a tunnel that now leads to another node: nothing of the first one remains, such as
    its history or its counters.
    """
    for name, value in (("node", "n2"), ("version", "9.9.9")):
        more[name] = value
        with visit.page.expect_navigation():
            pass
        visit.page.wait_for_selector(".verdict")
        assert value in visit.text("header")


def test_a_rate_is_that_between_two_samples(browser: Browser) -> None:
    """Not between two answers, which come at any time after them: of one sample it is unknown, and
    it does not exceed the link's.
    """
    made = snapshot()
    made.expect("infiniband", 3600)
    ports = (PORT_UP(1, "mlx5_0", "1"), TRANSMIT_BYTES(0.0, "mlx5_0", "1"))
    made.put("infiniband", CollectionResult(CollectionOutcome.OK, ports))
    with serving(made, guarded=False) as served:
        whole = json.loads(served.ask("/api/v1/status")[1])
        (source,) = [one for one in whole["collectors"] if one["name"] == "infiniband"]
        sent = whole["metrics"][TRANSMIT_BYTES.name]["samples"][0]
        begun = whole["time"]
        # Seconds of the answer, age of its sample, and bytes: a sample every 15 s.
        answers = [(14.0, 14.0, 0), (23.0, 8.0, 75e9), (31.0, 1.0, 150e9)]
        shown: list[str] = []

        def answer(route: Route) -> None:
            after, source["age_seconds"], sent["value"] = answers[min(len(shown), 2)]
            whole["time"] = begun + after
            route.fulfill(json=whole)

        page = browser.new_page()
        page.route(STATUS, answer)
        page.goto(f"http://127.0.0.1:{served.port}/")
        cell = page.locator("section[aria-label='InfiniBand and RoCE'] td .flow").nth(1)
        for expected in ("unknown", "40.0 Gb/s", "40.0 Gb/s"):
            with page.expect_response(STATUS):
                pass
            page.wait_for_timeout(300)
            shown.append(cell.inner_text())
            assert expected in shown[-1]
        page.close()


def test_what_was_closed_or_is_in_focus_stays_so(more: dict[str, Any], visit: Visit) -> None:
    """A job or finding that comes before another takes over neither what a reader has closed of it
    nor the focus.
    """
    page = visit.page
    more |= {"jobs": [job(job="b")], "verdict": "critical", "findings": [finding(part="GPU 3")]}
    visit.wait("section[aria-label='Jobs'] h3", "b training")
    page.click("section[aria-label='Jobs'] summary")
    page.focus(".verdict li a")
    others = [finding(part="GPU 1"), finding(part="GPU 3"), finding(part="GPU 5")]
    more |= {"jobs": [job(job="a"), job(job="b")], "findings": others}
    visit.wait("section[aria-label='Jobs'] h3", "a training")
    opened = page.eval_on_selector_all(".job details", "all => all.map((one) => one.open)")
    assert opened == [True, False]
    focused = "document.activeElement.closest('li')?.querySelector('b').textContent"
    assert page.evaluate(focused) == "GPU 3"
    more |= {"jobs": [job(job="b")], "findings": others[1:2]}
    page.wait_for_selector("section[aria-label='Jobs'] h3:has-text('a training')", state="detached")
    assert page.evaluate(focused) == "GPU 3"
    assert page.locator(".verdict li").count() == 1


def test_no_name_hides_or_reverses_what_is_beside_it(more: dict[str, Any], visit: Visit) -> None:
    """A user names a job: what reverses text is shown as `dshealthd status` shows it."""
    more["jobs"] = [job(job="run\u202e1\u200b")]
    visit.wait("section[aria-label='Jobs'] h3", "training")
    assert "run\\u202e1\\u200b training" in visit.panel("Jobs")


def test_ranks_that_are_not_listed_are_told(more: dict[str, Any], visit: Visit) -> None:
    """Of 200 ranks on a node, 64 are listed."""
    ranks = job()["ranks"] * 64
    more["jobs"] = [job(ranks=ranks, ranks_here=200, followed={"heartbeat": 200})]
    visit.wait("section[aria-label='Jobs'] summary", "64 of 200 ranks")
