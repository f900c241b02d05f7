"""axe finds nothing wrong with the page, in every state: light on a desk, dark on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from dshealthd.core.collector import Reason
from dshealthd.core.result import failed
from tests.web.accessible import SPECIFICATION, violations
from tests.web.browser import CHROMIUM, DESK, PHONE, Visit
from tests.web.node import node
from tests.web.serving import serving
from tests.web.test_page_findings import HANGING, JOB, snapshot

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
    pytest.mark.skipif(SPECIFICATION is None, reason="axe-playwright-python is not installed"),
]


LOOKS: tuple[tuple[tuple[int, int], Literal["light", "dark"]], ...] = (
    (DESK, "light"),
    (PHONE, "dark"),
)


GROUND = "() => Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
"""How red the ground is, of 255."""


def test_a_simulated_node(browser: Browser, tmp_path: Path) -> None:
    """Eight GPUs of which some ail, InfiniBand, Xids: every panel and every mark; the ground is as
    light or dark as the scheme.
    """
    grounds = []
    with node(tmp_path) as made:
        made.train(0)
        made.ail()
        with made.agent() as agent:
            for size, scheme in LOOKS:
                visit = Visit(browser, f"http://127.0.0.1:{agent.port}/", size, scheme)
                visit.page.wait_for_selector(".verdict.bad")
                assert violations(visit.page) == []
                grounds.append(visit.page.evaluate(GROUND))
                visit.page.close()
    light, dark = grounds
    assert light > 200
    assert dark < 60


def test_hung_unknown_and_lost(browser: Browser) -> None:
    """A hung job, a source that cannot be read, and an agent that has gone."""
    made = snapshot(*JOB, *HANGING)
    made.expect("ecc", 3600)
    made.put("ecc", failed(Reason.PERMISSION_DENIED, "may not"))
    with serving(made, guarded=False) as served:
        visit = Visit(browser, f"http://127.0.0.1:{served.port}/", PHONE, "dark")
        assert violations(visit.page) == []
    visit.page.wait_for_selector("#banner", state="visible")
    assert violations(visit.page) == []
    visit.page.close()
