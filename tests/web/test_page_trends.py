"""The last hour on the page: lines with gaps and marks, in words for whoever does not see them."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from dshealthd.collectors.gpu import MEMORY_USED, POWER, TEMPERATURE, UP, UTILIZATION
from dshealthd.collectors.infiniband import ERRORS, FLAPS, RECEIVE_BYTES, TRANSMIT_BYTES
from dshealthd.collectors.infiniband import UP as PORT_UP
from dshealthd.collectors.training import STEP_SECONDS
from dshealthd.core.collector import Sample
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.findings.entry import Entry
from dshealthd.findings.finding import State
from tests.findings.test_trends import STEP, WALL
from tests.findings.test_trends import Node as Past
from tests.web.accessible import SPECIFICATION, violations
from tests.web.browser import CHROMIUM, PHONE, Visit
from tests.web.serving import serving
from tests.web.test_page_findings import JOB, snapshot

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
GPUS, LOST = 8, 7
PORTS = ("mlx5_0", "mlx5_1")
LAST = 240
"""Readings of an hour."""


def gpu(at: int, number: int, hot: int | None = 2) -> Iterator[Sample]:
    """Yield what a GPU reads, as its training has it; one of them becomes `hot` at last."""
    id = (str(number), f"GPU-{number}")
    wave = math.sin(at / 9 + number)
    more = max(0, at - 200) * 0.5 if number == hot else 0.0
    yield TEMPERATURE(61 + number + round(2 * wave) + more, *id, "core")
    yield TEMPERATURE(69 + number + round(2 * wave), *id, "memory")
    yield POWER(600 + 40 * wave, *id)
    yield UTILIZATION((93 + 5 * wave) / 100, *id)
    yield MEMORY_USED(71.6e9 + number * 37e6, *id)


def lived(lost: int | None = LOST, hot: int | None = 2) -> Past:
    """Return the hour of a node that trains; one GPU was lost half an hour ago, one is hot."""
    past = Past()
    for at in range(LAST):
        shown = [
            one
            for number in range(GPUS)
            if number != lost or at < 120
            for one in gpu(at, number, hot)
        ]
        past.read("gpu", *shown, seconds=0)
        total = at * 15 * 20e9
        ports = [
            sample
            for device in PORTS
            for sample in (
                TRANSMIT_BYTES(total, device, "1"), RECEIVE_BYTES(total, device, "1"),
                ERRORS(float(at // 100), device, "1", "symbol"),
            )
        ]  # fmt: skip
        past.read("infiniband", *ports, seconds=0)
        past.read("training", STEP_SECONDS(4 + (at > 200), "bert-large", "0"))
    return past


def status(past: Past) -> Any:
    """Return a snapshot of that node as it is now."""
    ups = [UP(float(number != LOST), str(number), f"GPU-{number}") for number in range(GPUS)]
    now = [one for number in range(GPUS) if number != LOST for one in gpu(LAST - 1, number)]
    made = snapshot(*ups[1:], *now, *JOB)
    made.expect("infiniband", 3600)
    ports = [kind(one, device, "1") for device in PORTS for kind, one in ((PORT_UP, 1), (FLAPS, 0))]
    made.put("infiniband", CollectionResult(CollectionOutcome.OK, tuple(ports)))
    assert past.document()["lines"]
    return made


@contextlib.contextmanager
def shown(browser: Browser, past: Past, *begun: Entry, **look: Any) -> Iterator[Visit]:
    """Open the page of that node."""
    with serving(
        status(past), trends=lambda: past.trends.document("n1", WALL, begun), guarded=False
    ) as served:
        visit = Visit(browser, f"http://127.0.0.1:{served.port}/", **look)
        visit.page.wait_for_selector(".trend")
        visit.wait(".gpus > li", "GPU 6")
        yield visit
        assert visit.complaints == []
        visit.page.close()


LOSS = Entry(
    "finding", "GpuLost", "A GPU is lost to the driver", WALL - 1800, None, f"GPU {LOST}",
    severity=State.CRITICAL,
)  # fmt: skip


@pytest.fixture(scope="module")
def past() -> Past:
    """The node's last hour, made once."""
    return lived()


def titles(visit: Visit, selector: str) -> list[str]:
    """Return what the lines in a part of the page are called."""
    found = visit.page.locator(f"{selector} .trend title").evaluate_all(
        "(all) => all.map((one) => one.textContent)"
    )
    return list(map(str, found))


def test_each_line_is_said_in_words(browser: Browser, past: Past) -> None:
    """Five figures of each GPU, three of each port, a job's step time: what a screen reader reads,
    and who points at a line.
    """
    with shown(browser, past, LOSS) as visit:
        visit.page.wait_for_function("document.querySelectorAll('.gpus .trend').length === 40")
        third = titles(visit, ".gpus > li:nth-child(4)")
        assert [one.partition(":")[0].removeprefix("GPU 2 ") for one in third] == [
            "core temperature", "memory temperature", "memory", "utilization", "power",
        ]  # fmt: skip
        assert re.search(
            r"61 to \d+(\.\d)? °C in the last hour, now [\d.]+, rising \d.*K/min", third[0]
        )
        ports = titles(visit, "section[aria-label='InfiniBand and RoCE'] tr:last-child")
        assert ports[0] == "mlx5_1/1 sends: 160 Gb/s in the last hour"
        assert "errors: 0 to 4 per minute in the last hour, now 0" in ports[2]
        (job,) = titles(visit, ".job")
        assert "bert-large step time: 4 to 5 s in the last hour, now 5" in job


def test_a_lost_gpu_keeps_its_line_with_a_gap_and_a_mark(browser: Browser, past: Past) -> None:
    """The line ends where nothing was read any more, the finding stands there, by a shape and not
    by its color alone, and both are said.
    """
    with shown(browser, past, LOSS) as visit:
        row = ".gpus > li:last-child"
        visit.page.wait_for_selector(f"{row} .trend")
        (first, *_) = titles(visit, row)
        assert "unknown for 30 min" in first
        assert first.endswith("; failure 30 min ago: A GPU is lost to the driver")
        assert "0" not in visit.text(row)
        found = visit.page.locator(f"{row} .trend").first.locator("path")
        mark, line = (found.nth(at).get_attribute("d") or "" for at in range(2))
        assert mark == "M60.0 0V26"
        assert found.nth(0).get_attribute("class") == "bad"
        steps = re.findall(r"[ML](\d+) ", line)
        assert steps == [str(at) for at in range(60)]
        assert "M60.0" not in (
            visit.page.locator(".gpus > li:nth-child(4) .trend").first.inner_html()
        )


def test_a_gap_in_a_line(browser: Browser) -> None:
    """The pen is lifted where nothing is known, and nothing is drawn at 0."""
    past = Past()
    for at in range(LAST):
        if at // 40 % 2 == 0:
            past.read("gpu", *gpu(at, 0), seconds=0)
        past.now += STEP / 2
    past.read("gpu", *gpu(LAST, 0))
    with shown(browser, past) as visit:
        line = visit.page.locator(".gpus .trend path").first.get_attribute("d") or ""
        assert line.count("M") == 4
        assert all(3 <= float(y) <= 23 for y in re.findall(r"(?:[ML]\d+ |V)([\d.]+)", line))


def test_an_agent_that_has_just_started_or_has_no_trends(browser: Browser) -> None:
    """The page is the same without lines, and asks for them twice a minute, not with each
    status.
    """
    with serving(snapshot(*JOB), guarded=False) as served:
        visit = Visit(browser, f"http://127.0.0.1:{served.port}/")
        for _ in range(3):
            with visit.page.expect_response("**/api/v1/status"):
                pass
        assert visit.page.locator(".trend").count() == 0
        assert sum("api/v1/trends" in url for url in visit.requests) == 1
        assert visit.complaints == []
        visit.page.close()


def test_weight(past: Past) -> None:
    """What a browser receives of the lines of eight GPUs is a tenth of what the page itself has."""
    with serving(trends=lambda: past.trends.document("n1", WALL, (LOSS,)), guarded=False) as served:
        packed, body = served.ask("/api/v1/trends", {"Accept-Encoding": "gzip"})
        assert packed.headers["Content-Encoding"] == "gzip"
        assert len(body) < 12_000
        plain, whole = served.ask("/api/v1/trends")
        assert plain.headers["Cache-Control"] == "no-store"
        assert len(json.loads(whole)["lines"]) == 8 * 5 + 2 * 3 + 1
        assert len(whole) < 80_000


@pytest.mark.skipif(SPECIFICATION is None, reason="axe-playwright-python is not installed")
def test_accessible_and_within_its_window(browser: Browser, past: Past) -> None:
    """With a lost GPU: axe finds nothing, nothing sticks out on a phone."""
    with shown(browser, past, LOSS, size=PHONE, scheme="dark") as visit:
        visit.page.wait_for_function("document.querySelectorAll('.gpus .trend').length === 40")
        assert violations(visit.page) == []
        assert visit.is_as_wide_as_its_window()
