"""The card with the node's record on its page: a strip of days, and the last entries in words."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from dshealthd.findings.past import DAY
from dshealthd.findings.record import NodeRecord
from tests.findings.test_record import NOW, fault
from tests.status_documents import finding
from tests.web.accessible import SPECIFICATION, violations
from tests.web.browser import CHROMIUM, PHONE, Visit
from tests.web.serving import serving
from tests.web.test_page_findings import snapshot

MAX_ENTRIES = 2_000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
STRIP = "section[aria-label='History'] .days"


def lived(*entries: Any) -> NodeRecord:
    """Return a record with these entries."""
    made = NodeRecord(None)
    for entry in entries:
        made.add(entry)
    return made


@contextlib.contextmanager
def shown(browser: Browser, made: NodeRecord, *lasting: Any, **look: Any) -> Iterator[Visit]:
    """Open the page of a healthy node with this record, at NOW."""
    record = made.document("n1", lasting, NOW)
    with serving(snapshot(), history=lambda: record, more={"time": NOW}, guarded=False) as served:
        visit = Visit(browser, f"http://127.0.0.1:{served.port}/", **look)
        visit.page.wait_for_selector(STRIP)
        yield visit
        assert visit.complaints == []
        visit.page.close()


def test_days_and_the_last_ten_in_words(browser: Browser) -> None:
    """The newest first, with part, what, how long, how often and the job; what each day was can be
    read without color, and is said.
    """
    old = [fault(NOW - 20 * DAY + 7300 * at, part=f"GPU {at}") for at in range(8)]
    flap = fault(NOW - 3 * DAY, what="FabricPortDown", severity="warning", job="run-1", times=3)
    made = lived(*old, flap)
    made.begin(NOW - 5000, ("a", 60.0), crashed=True)
    lasting = fault(NOW - 4000, part="GPU 7")
    lasting.end = None
    with shown(browser, made, lasting) as visit:
        panel = visit.panel("History")
        assert "GPU 7: A GPU is lost to the driver: Xid 79" in panel
        assert "for 67 min until now" in panel
        assert "3 times within 60 s, job run-1" in panel
        assert "started after a crash" in panel
        assert visit.page.locator(".past li").count() == 10
        assert "GPU 7" in visit.text(".past li:first-child")
        said = "failures on Dec 26, Jan 15; warnings on Jan 12; not watched on 27 days"
        assert visit.page.get_attribute(STRIP, "aria-label") == f"Last 30 days: {said}"
        heights = visit.page.evaluate(
            "() => ['bad', 'warn', 'none'].map((level) =>"
            " document.querySelector(`.days .${level}`).getBoundingClientRect().height)"
        )
        assert heights[0] > heights[1] > heights[2] == 0


def test_a_record_that_begins_anew_says_so(browser: Browser) -> None:
    """What is not known is not shown as healthy."""
    made = lived(fault(NOW + 400 * DAY))
    made.problem = "the node's record begins anew: history.json: it is not JSON"
    with shown(browser, made) as visit:
        panel = visit.panel("History")
        assert "begins anew" in panel
        assert "nothing yet" in panel
        assert "1 dated in the future" in panel
        assert "not watched on 30 days" in (visit.page.get_attribute(STRIP, "aria-label") or "")


def test_what_ends_is_shown_at_once(browser: Browser) -> None:
    """The record is asked for again when a finding begins or ends, or the agent has started, and
    otherwise rarely.
    """
    made, live = lived(), snapshot()
    more: dict[str, Any] = {}
    with serving(
        live, history=lambda: made.document("n1", (), time.time()), more=more, guarded=False
    ) as served:
        visit = Visit(browser, f"http://127.0.0.1:{served.port}/")
        visit.wait("section[aria-label='History']", "nothing yet")
        made.add(fault(time.time() - 60))
        for _ in range(3):
            with visit.page.expect_response("**/api/v1/status"):
                pass
        assert sum("api/v1/history" in url for url in visit.requests) == 1
        more |= {"verdict": "critical", "findings": [finding()]}
        visit.wait("section[aria-label='History']", "GPU 3: A GPU is lost to the driver")
        made.begin(time.time(), ("b", 60.0), crashed=False)
        more["started"] = time.time()
        visit.wait("section[aria-label='History']", "The node booted")
        visit.page.close()


@pytest.mark.skipif(SPECIFICATION is None, reason="axe-playwright-python is not installed")
def test_accessible_and_within_its_window(browser: Browser) -> None:
    """A full record, with long names: axe finds nothing, nothing sticks out."""
    made = lived(
        *(
            fault(NOW - 30 * DAY + 1200 * at, part=f"mlx5_{at}/1", job="run" * 60, severity=level)
            for at in range(MAX_ENTRIES // 4)
            for level in ("critical", "warning", "unknown")
        )
    )
    with shown(browser, made, size=PHONE, scheme="dark") as visit:
        assert violations(visit.page) == []
        assert visit.is_as_wide_as_its_window()


def test_the_form_of_an_entry(browser: Browser) -> None:
    """A job's own finding names it once, and its reason may have parentheses. Midnight is 00:00 of
    the day that begins.
    """
    year, month, day, *_ = time.localtime(NOW)
    night = time.mktime((year, month, day - 1, 0, 5, 0, 0, 0, -1))
    hang: dict[str, Any] = {
        "what": "JobHang",
        "says": "Training job is hung",
        "part": "run-2",
        "job": "run-2",
    }
    made = lived(fault(night, 300, reason="rank 2 is stopped (SIGSTOP)", **hang))
    with shown(browser, made) as visit:
        said = visit.text(".past li").splitlines()
    date = time.strftime("%b", time.localtime(night)) + f" {time.localtime(night).tm_mday}"
    assert said[-2:] == [
        "run-2: Training job is hung: rank 2 is stopped (SIGSTOP)",
        f"{date}, 00:05, for 5 min",
    ]
