"""The fleet page, over real agents that ask each other by the authenticated channel of the
probes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from bench.processes import free_port
from tests.agents import RunningAgent, running
from tests.waiting import until
from tests.web.accessible import SPECIFICATION, violations
from tests.web.browser import CHROMIUM, PHONE, Visit, chromium

Open = Callable[..., Page]
"""Opens the fleet page, by default with the agent's own answer."""
NODES = ("127.0.0.51", "127.0.0.52", "127.0.0.53")
# Other tests train on this machine meanwhile, and no round runs beside ranks.
CONFIG = """
[collectors.job_environment]
enabled = false
[probe]
period = "2s"
[probe.members]
nodes = {nodes}
name = "{name}"
[probe.peer]
listen_address = "{name}:{port}"
key_file = "{key}"
off_file = "{key}.off"
"""


@contextlib.contextmanager
def cluster(directory: Path, live: int) -> Iterator[list[RunningAgent]]:
    """Run the first agents of three members; the others are down."""
    key = directory / "key"
    with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as secret:
        secret.write("0123456789abcdef" * 4 + "\n")
    port = free_port()
    with contextlib.ExitStack() as stack:
        agents = []
        for name in NODES[:live]:
            place = directory / name
            place.mkdir()
            text = CONFIG.format(name=name, port=port, key=key, nodes=json.dumps(NODES))
            agents.append(stack.enter_context(running(place, text)))
        yield agents


def fleet(agent: RunningAgent) -> dict[str, Any]:
    """Return what an agent says of the fleet; nothing while it is not known."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", agent.port)) as client:
        client.request("GET", "/api/v1/fleet")
        answer = client.getresponse()
        return dict(json.loads(answer.read())) if answer.status == http.client.OK else {}


def states(agent: RunningAgent) -> dict[str, str]:
    """Return each node's state."""
    return {node["name"]: node["state"] for node in fleet(agent).get("nodes", ())}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent without probes."""
    with running(tmp_path_factory.mktemp("alone")) as agent:
        yield agent


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium for all tests."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with chromium() as started:
        yield started


def document(**given: Any) -> dict[str, Any]:
    """Return an answer of `/api/v1/fleet`."""
    answer = {"schema": 1, "node": "n1", "time": time.time(), "asking": False, "suspects": []}
    sizes = {"members": sum(given["states"].values()), "leaves": [], "jobs": [], "jobs_left_out": 0}
    return {**answer, **sizes, **given}


def job(name: str, **given: Any) -> dict[str, Any]:
    """Return a job in such an answer, of a node of eight ranks."""
    known = {"job": name, "loss": "finite", "nodes": ["n1"], "ranks": 8, "world_size": 8, "step": 7}
    unknown: dict[str, Any] = {
        "steps_per_minute": None,
        "pause": None,
        "culprits": [],
        "slow": [],
    }
    return {**known, "step_highest": 7, **unknown, **given}


@pytest.fixture
def opened(browser: Browser, alone: RunningAgent) -> Iterator[Open]:
    """Return a function that opens the fleet page of an agent, with an answer in the place of its
    own.
    """
    pages = []

    def page_of(answer: dict[str, Any] | None = None) -> Page:
        pages.append(page := browser.new_page())
        if answer is not None:
            page.route("**/api/v1/fleet", lambda route: route.fulfill(json=answer))
        page.goto(f"http://127.0.0.1:{alone.port}/fleet")
        return page

    yield page_of
    for page in pages:
        page.close()


def test_members_are_asked(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A member that answers has a verdict of its own, one that is down is unreachable."""
    verdicts = {"ok", "warning", "unknown", "critical"}
    with cluster(tmp_path, 2) as (agent, other):
        until(
            lambda: (
                set(states(agent).values()) & {"unreachable"} != set()
                and states(agent)[NODES[1]] in verdicts
            )
        )
        assert states(agent)[NODES[2]] == "unreachable"
        assert fleet(agent)["node"] == NODES[0]
        assert fleet(agent)["nodes"][1]["version"]
        calls = "dshealthd_probe_peer_requests_total"
        assert other.scrape().value(calls, method="summary", result="ok") is not None
        if CHROMIUM is None:
            return
        browser = request.getfixturevalue("browser")
        visit = Visit(browser, f"http://127.0.0.1:{agent.port}/fleet", PHONE)
        visit.wait(".verdict", "1 unreachable")
        assert NODES[2] in visit.text(".verdict")
        assert visit.page.locator(".squares a").count() == len(NODES)
        assert "training job" in visit.panel("Jobs")  # of this machine, whatever runs on it
        assert visit.is_as_wide_as_its_window()
        assert visit.complaints == []
        assert {url.split("/")[2] for url in visit.requests if url.startswith("http")} == {
            f"127.0.0.1:{agent.port}"
        }
        if SPECIFICATION is not None:
            assert violations(visit.page) == []
        visit.page.goto(f"http://127.0.0.1:{agent.port}/")
        visit.page.wait_for_selector("header a")
        visit.page.click("header a")
        visit.page.wait_for_url("**/fleet")
        visit.page.close()


def test_a_member_answers_by_the_name_that_others_link_to(tmp_path: Path) -> None:
    """The list of members may name it as its host name does not, such as for another network."""
    key = tmp_path / "key"
    with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as secret:
        secret.write("0123456789abcdef" * 4 + "\n")
    name, nodes = "node-7.fabric", json.dumps(["node-7.fabric", NODES[1]])
    text = CONFIG.format(name=name, port=free_port(), key=key, nodes=nodes)
    text = text.replace(f'listen_address = "{name}', f'listen_address = "{NODES[0]}')
    browser = {"Host": f"{name}:10061", "User-Agent": "Mozilla/5.0"}
    with running(tmp_path, text) as agent:
        until(lambda: agent.status()["probe"].get("name") == name)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", agent.port)) as client:
            client.request("GET", "/", headers=browser)
            assert client.getresponse().status == http.client.OK


def test_off_without_probes(alone: RunningAgent) -> None:
    """Without probes nobody is asked, and the answer says that there are none."""
    assert fleet(alone) == {}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", alone.port)) as client:
        client.request("GET", "/api/v1/fleet")
        answer = client.getresponse()
        assert answer.status == http.client.SERVICE_UNAVAILABLE
        assert b"no probes are configured" in answer.read()


def test_old_answers_are_gray(opened: Open) -> None:
    """A page that shows old answers is not green: it says how old they are, and neither a fault nor
    a job's pace is shown as the present one.
    """
    now = time.time()
    old = {"name": "n2", "leaf": "", "state": "out of date", "time": now - 540, "last": "critical"}
    answer = document(
        states={"ok": 1, "out of date": 1},
        nodes=[{"name": "n1", "leaf": "", "state": "ok", "time": now}, old],
        jobs=[job("bert", state="out of date", loss="unknown", step=None, step_highest=None)],
        left_out=[{"part": "n1, job gpt", "reason": "ValueError: odd"}],
    )
    page = opened(answer)
    page.wait_for_selector(".verdict.quiet")
    assert "1 not asked lately" in page.inner_text(".verdict")
    left_out = page.inner_text("section[aria-label='Left out']")
    assert "n1, job gpt: ValueError: odd" in left_out
    assert "n2" in page.inner_text(".squares li:last-child a")
    titles = [found.get_attribute("title") for found in page.locator(".squares a").all()]
    assert titles == ["n1: healthy", "n2: critical 9 min ago, not asked since"]
    assert page.locator(".squares a.quiet").count() == 1
    row = page.inner_text("section[aria-label='Jobs'] tbody tr")
    assert "out of date" in row
    assert page.locator("tbody .good, tbody .bad").count() == 0


def test_fleet_that_is_well(opened: Open) -> None:
    """It is said once, and nothing was left out."""
    nodes = [{"name": "n1", "leaf": "", "state": "ok", "time": time.time()}]
    page = opened(document(states={"ok": 1}, nodes=nodes, left_out=[]))
    page.wait_for_selector(".verdict.good")
    assert page.inner_text(".verdict h2").endswith("All nodes healthy")
    assert page.locator("section[aria-label='Left out']").count() == 0


def test_a_failed_job_is_as_bad_as_on_its_nodes_page(opened: Open) -> None:
    """A job that has failed is no grayer than one that has only stalled."""
    levels = {
        "failed": "bad",
        "stalled": "warn",
        "suspended": "warn",
        "silent": "warn",
        "paused": "good",
        "training": "good",
        "no heartbeats": "quiet",
    }
    answer = document(
        states={"ok": 1, "unreachable": 2},
        nodes=[
            {"name": "n1", "leaf": "", "state": "ok", "time": time.time()},
            {"name": "n2", "leaf": "", "state": "unreachable", "problem": "refused"},
            {"name": "n3", "leaf": "", "state": "unreachable", "problem": "unreachable: no_route"},
        ],
        jobs=[
            job(state, state=state, pause=state == "paused" and "checkpoint") for state in levels
        ],
    )
    page = opened(answer)
    page.wait_for_selector("tbody tr")
    for state, level in levels.items():
        row = page.locator("tbody tr", has=page.locator("th", has_text=state))
        assert row.locator(f"th .{level}").count() == 1, row.inner_html()
    paused = page.locator("tbody tr", has=page.locator("th", has_text="paused"))
    assert paused.locator("td").first.inner_text() == "checkpoint"
    said = page.locator(".verdict li div").all_inner_texts()
    assert said == ["unreachable: refused", "unreachable: no route"]


def test_the_last_24_hours_of_each_node(opened: Open) -> None:
    """Each node has a strip: a bar for an hour, as high as it was bad, and in words. What is not
    watched is no bar, and a node that sends none, or nonsense, is not shown as healthy.
    """
    hours = {"n1": "." * 24, "n2": " " * 12 + "." * 6 + "wwC?C.", "n3": "x" * 24, "n4": None}
    nodes = [
        {"name": name, "leaf": "", "state": "ok", "time": time.time()}
        | ({"hours": text} if text else {})
        for name, text in hours.items()
    ]
    page = opened(document(states={"ok": 4}, nodes=nodes))
    strips = page.locator("section[aria-label='Last 24 hours'] .days")
    strips.first.wait_for()
    assert strips.count() == 3
    said = [strips.nth(at).get_attribute("aria-label") or "" for at in range(3)]
    assert said[0] == "n1, last 24 hours: no findings"
    assert re.fullmatch(
        r"n2, last 24 hours: failures on \d\d h, \d\d h; warnings on \d\d h, \d\d h; "
        r"unreadable on \d\d h; not watched on 12 hours", said[1]
    )  # fmt: skip
    assert "no findings" not in said[2]
    assert "not known of 1 node" in page.inner_text("section[aria-label='Last 24 hours']")
    heights = page.evaluate(
        "() => ['bad', 'warn', 'none'].map((level) =>"
        " document.querySelector(`.hours .${level}`).getBoundingClientRect().height)"
    )
    assert heights[0] > heights[1] > heights[2] == 0
    assert SPECIFICATION is None or violations(page) == []


def test_the_last_24_hours_of_many_nodes(opened: Open) -> None:
    """Of more nodes than have names, those with a finding are drawn, once somebody opens them."""
    nodes = [
        {"name": f"n{at}", "leaf": "", "state": "ok", "hours": "." * 23 + ("C" if at < 2 else ".")}
        for at in range(300)
    ]
    page = opened(document(states={"ok": 300}, nodes=nodes))
    page.locator("#hours summary").wait_for()
    assert page.locator(".hours li").count() == 0
    # They do not wait for another answer, nor for the page to give that up.
    page.evaluate("AbortSignal.timeout = () => new AbortController().signal")
    page.route("**/api/v1/fleet", lambda _route: None)
    page.click("#hours summary")
    page.locator(".hours li").first.wait_for()
    assert page.locator(".hours li").count() == 2


def test_the_page_without_probes(opened: Open) -> None:
    """The page opens, and says why there is nothing on it."""
    page = opened()
    page.wait_for_selector("#banner", state="visible")
    assert "no probes are configured" in page.inner_text("#banner")


def test_a_large_fleet_is_shown_by_leaf(opened: Open) -> None:
    """Of 10,000 members, those in trouble are named and each leaf is one square, as bad as its
    worst node; what is left out is counted.
    """
    sick = {"name": "n77", "leaf": "leaf-2", "state": "critical", "time": time.time()}
    well = ({"leaf": f"leaf-{n}", "states": {"ok": 32}} for n in range(312) if n != 2)
    answer = document(
        members=10_000,
        states={"ok": 9939, "critical": 61},
        leaves=[*well, {"leaf": "leaf-2", "states": {"ok": 31, "critical": 1}}],
        nodes=[sick | {"problems": 1}],
        jobs_left_out=7,
    )
    page = opened(answer)
    page.wait_for_selector(".verdict.bad")
    assert "61 critical of 10000 nodes" in page.inner_text(".verdict")
    assert "and 11 more" in page.inner_text(".verdict")
    assert page.locator(".squares li").count() == 312
    assert page.locator(".squares .bad").get_attribute("title") == "leaf-2: 1 critical"
    assert page.title().startswith("(61) ")
    assert "7 training jobs" in page.inner_text("section[aria-label='Jobs']")
    strips = page.inner_text("section[aria-label='Last 24 hours']")
    assert "not known of 1 node" in strips  # and not of those that are well
    assert "of 0 nodes with findings now" in strips


def test_jobs_of_nodes_that_are_silent_are_not_known(opened: Open) -> None:
    """That no job is known is not that there is none."""
    well: dict[str, Any] = {"name": "n1", "leaf": "", "state": "ok", "time": time.time()}
    gone: dict[str, Any] = {"name": "n2", "leaf": "", "state": "unreachable", "problem": "refused"}
    for nodes, said in (
        ([well], ["no training jobs"]),
        ([well, gone], ["no training jobs", "not known of 1 node"]),
        ([gone], ["not known of 1 node"]),
    ):
        states = Counter(node["state"] for node in nodes)
        page = opened(document(states=states, nodes=nodes))
        page.wait_for_selector("section[aria-label='Jobs']")
        assert page.locator("section[aria-label='Jobs'] p").all_inner_texts() == said


def test_a_member_that_is_an_address(opened: Open, alone: RunningAgent) -> None:
    """Its link leads there, also by IPv6; behind a proxy with a path there is none."""
    nodes = [{"name": name, "leaf": "", "state": "ok"} for name in ("fd00::7", "10.0.0.7")]
    answer = document(states={"ok": 2}, nodes=nodes)
    page = opened(answer)
    page.wait_for_selector(".squares a")
    hosts = page.eval_on_selector_all(".squares a", "all => all.map((one) => one.hostname)")
    assert hosts == ["[fd00::7]", "10.0.0.7"]
    own = f"http://127.0.0.1:{alone.port}"
    page.route(
        "**/gpu/**", lambda route: route.continue_(url=route.request.url.replace("/gpu/", "/"))
    )
    page.route("**/gpu/api/v1/fleet", lambda route: route.fulfill(json=answer))
    page.goto(f"{own}/gpu/fleet")
    page.wait_for_selector(".squares a")
    assert page.locator(".squares a[href]").count() == 0
    assert page.get_attribute("footer a", "href") == "./"


def test_a_tab_of_a_fleet_that_is_lost(opened: Open) -> None:
    """Its title is not that of a fleet that is well."""
    nodes = [{"name": "n1", "leaf": "", "state": "ok", "time": time.time()}]
    page = opened(document(states={"ok": 1}, nodes=nodes))
    page.wait_for_selector(".verdict.good")
    page.route("**/api/v1/fleet", lambda route: route.abort())
    page.evaluate("() => { const now = Date.now; Date.now = () => now() + 60000; }")
    page.wait_for_selector("#banner", state="visible")
    assert page.title().startswith("✖")
    assert "not answering" in page.inner_text("header")


def test_long_names_fit_a_phone(browser: Browser, alone: RunningAgent) -> None:
    """Of nodes, leaves, jobs and suspects, without a place to break them."""
    name = "x" * 120
    gone = {"name": name, "leaf": name, "state": "unreachable", "problem": name, "hours": "." * 24}
    suspect = {"kind": "link", "component": f"{name}--{name}", "reason": "slow"}
    hung = job(name, state="hung", culprits=[{"rank": 3, "node": name, "cause": "process"}])
    answer = document(
        states={"unreachable": 2},
        nodes=[gone, gone | {"name": "n2", "leaf": "b"}],
        suspects=[suspect],
        jobs=[hung],
    )
    visit = Visit(
        browser,
        f"http://127.0.0.1:{alone.port}/fleet",
        PHONE,
        prepare=lambda page: page.route(
            "**/api/v1/fleet", lambda route: route.fulfill(json=answer)
        ),
    )
    assert name in visit.text(".squares")
    assert visit.is_as_wide_as_its_window()
    visit.page.close()


def test_the_focus_stays_on_its_node(opened: Open) -> None:
    """Whoever is about to open a node does not open another one that has just fallen ill."""

    def answer(*ill: str) -> dict[str, Any]:
        nodes = [
            {"name": name, "leaf": "", "state": "critical" if name in ill else "ok"}
            for name in ("n1", "n2", "n3")
        ]
        return document(states=Counter(node["state"] for node in nodes), nodes=nodes)

    page = opened(answer("n2"))
    page.wait_for_selector(".verdict li a")
    page.focus(".verdict li a")
    page.unroute("**/api/v1/fleet")
    page.route("**/api/v1/fleet", lambda route: route.fulfill(json=answer("n1", "n2")))
    page.wait_for_selector(".verdict li a:has-text('n1')")
    assert page.evaluate("document.activeElement.textContent") == "n2"
