"""The server's paths, formats and headers, and what it does with requests that are none."""

from __future__ import annotations

import gzip
import json
import logging
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dshealthd.core.collector import Reason, Sample, gauge
from dshealthd.core.exposition import CONTENT_TYPE
from dshealthd.core.result import CollectionOutcome, CollectionResult, failed
from dshealthd.core.self_metrics import SelfMetrics
from dshealthd.core.snapshot import Snapshot
from dshealthd.nvrx.fitness import FailedCheck, Fitness, FitnessCheck
from dshealthd.web import server as web_server
from dshealthd.web.page_files import page_files
from dshealthd.web.server import REQUESTS, Server, _to_open
from tests.waiting import until
from tests.web.serving import VALUE, Served, options, received, serving, small_snapshot

PAGE_FILES = page_files()
PATHS = ("/metrics", "/api/v1/status", "/-/healthy", "/-/ready")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server over the small snapshot."""
    with serving(max_connections_per_address=64, header_timeout=60.0) as server:
        yield server


def test_metrics_are_prometheus_text(served: Served) -> None:
    """/metrics is Prometheus text with the samples, whatever else the client would accept."""
    answer, body = served.ask(
        "/metrics", {"Accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"}
    )
    assert (answer.status, answer.headers["Content-Type"]) == (200, CONTENT_TYPE)
    assert 'dshealthd_value{part="part-1"} 54.5\n' in body.decode()


def test_a_scrape_may_ask_for_a_tier(served: Served) -> None:
    """`tier=verdict` leaves out what no shipped rule reads; `all` is what comes without it."""
    assert b"dshealthd_value" in served.ask("/metrics?tier=all")[1]
    answer, body = served.ask("/metrics?tier=verdict")
    assert answer.status == 200
    assert b"dshealthd_value" not in body


@pytest.mark.parametrize(
    "query", ["tier=", "tier=Verdict", "teir=verdict", "tier=verdict&tier=all", "tier=all&x=1"]
)
def test_a_query_that_is_not_understood_is_refused(served: Served, query: str) -> None:
    """A typing error in a scrape's parameters would otherwise cost many times the series; the
    answer says what is possible.
    """
    answer, body = served.ask(f"/metrics?{query}")
    assert (answer.status, body) == (400, b"the only parameter is tier, once: all or verdict\n")


@pytest.mark.parametrize("path", [*PAGE_FILES, *PATHS])
def test_head_is_get_without_body(served: Served, path: str) -> None:
    """HEAD answers on every path with the length that GET has, and no body."""
    head, nothing = served.ask(path, method="HEAD")
    get, body = served.ask(path)
    assert head.status == get.status == 200
    assert nothing == b""
    if path not in {"/metrics", "/api/v1/status"}:  # these change from one to the next
        assert head.headers["Content-Length"] == str(len(body))


def test_answers_name_the_server_without_versions(served: Served) -> None:
    """The Server header tells no version, whatever the answer."""
    for path in ("/metrics", "/nothing", "/-/healthy"):
        assert served.ask(path)[0].headers["Server"] == "dshealthd"
    assert b"Server: dshealthd\r\n" in served.send(b"nonsense\r\n\r\n")


def test_other_paths_and_methods_are_plain_errors(served: Served) -> None:
    """What does not exist is 404, what is not read is 405 with the methods that there are. Both in
    plain text.
    """
    answer, body = served.ask("/nothing")
    assert (answer.status, body, answer.headers["Content-Type"]) == (
        404,
        b"Not Found\n",
        "text/plain; charset=utf-8",
    )
    answer, body = served.ask("/metrics", method="DELETE")
    assert (answer.status, body, answer.headers["Allow"]) == (
        405,
        b"Method Not Allowed\n",
        "GET, HEAD",
    )


@pytest.mark.parametrize(("path", "field", "fields"), [
    (4096, 1, 2), (2, 8100, 2), (2, 1, 64), (4097, 1, 2), (2, 8200, 2), (2, 1, 65),
])  # fmt: skip
def test_heads_of_requests_are_bounded(served: Served, path: int, field: int, fields: int) -> None:
    """The path to 4 KiB; header fields to 8190 bytes, with or without the name, and to 64."""
    heads = {f"X-{number}": "x" * field for number in range(fields - 2)} or {"Y": "x" * field}
    head = "\r\n".join(f"{name}: {value}" for name, value in (heads | {"Host": "x"}).items())
    request = f"GET /{'x' * (path - 1)} HTTP/1.1\r\n{head}\r\nConnection: close\r\n\r\n"
    status = 404 if path <= 4096 and field <= 8190 and fields <= 64 else 400
    assert int(served.send(request.encode()).split()[1]) == status


def test_ready_waits_for_every_collector() -> None:
    """/-/ready is 503 and names what is missing until every collector has a first result.
    /-/healthy is 200 from the start.
    """
    snapshot = Snapshot(time.monotonic, time.time)
    snapshot.expect("slow", 10.0)
    with serving(snapshot) as served:
        answer, body = served.ask("/-/ready")
        assert (answer.status, body) == (503, b"no result yet: slow\n")
        assert json.loads(served.ask("/api/v1/status")[1])["ready"] is False
        assert served.ask("/-/healthy")[0].status == 200
    with serving(small_snapshot()) as served:
        assert served.ask("/-/ready")[0].status == 200


def test_status_tells_states_reasons_and_samples(served: Served) -> None:
    """The status document has each collector's state with its reason, faults by part, and samples;
    NaN is text, as JSON has none.
    """
    answer, body = served.ask("/api/v1/status")
    document = json.loads(
        body, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON")
    )
    assert answer.headers["Content-Type"] == "application/json"
    collectors = {collector["name"]: collector for collector in document["collectors"]}
    assert {name: collector["state"] for name, collector in collectors.items()} == {
        "good": "ok",
        "bad": "failing",
        "absent": "not available",
    }
    assert collectors["bad"]["reason"] == "io_error"
    assert collectors["bad"]["detail"] == "cannot be read: ? Input/output error"
    assert collectors["bad"]["errors"] == {"io_error": 1}
    assert collectors["good"]["faults"] == [
        {"part": "part-2", "reason": "timeout", "detail": "no answer within 2 s"}
    ]
    assert collectors["absent"]["detail"] == "no such device on this machine"
    assert 0.0 <= collectors["good"]["age_seconds"] < 60.0
    assert document["metrics"]["dshealthd_value"] == {
        "kind": "gauge",
        "help": "A value.",
        "samples": [
            {"labels": {"part": "part-1"}, "value": 54.5},
            {"labels": {"part": "part-3"}, "value": "NaN"},
        ],
    }


def test_a_clock_that_is_set_does_not_make_the_agent_older(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that boots with a wrong clock has not been up for the years by which it was wrong."""
    began = time.monotonic()
    clocks = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + 1e9)
    with serving() as served:
        monkeypatch.setattr(web_server, "time", clocks)
        document = json.loads(served.ask("/api/v1/status")[1])
    assert document["uptime_seconds"] <= time.monotonic() - began


def test_sample_that_cannot_be_shown_costs_itself() -> None:
    """The document has the other samples of its collector, and names the one that it lacks."""
    snapshot = Snapshot(time.monotonic, time.time)
    snapshot.expect("good", 10.0)
    odd = gauge("dshealthd_odd", "Another.", "part")
    samples = (VALUE(1.0, "a"), Sample(odd, ("b", "too many"), 2.0), VALUE(3.0, "c"))
    snapshot.put("good", CollectionResult(CollectionOutcome.OK, samples))
    with serving(snapshot) as served:
        document = json.loads(served.ask("/api/v1/status")[1])
    shown = document["metrics"][VALUE.name]["samples"]
    assert [sample["value"] for sample in shown] == [1.0, 3.0]
    (lacking,) = document["left_out"]
    assert lacking["part"] == "sample of dshealthd_odd"


def test_texts_of_a_status_are_bounded() -> None:
    """Of an error of a driver or a file system, the first 500 characters are enough."""
    snapshot = Snapshot(time.monotonic, time.time)
    snapshot.expect("bad", 10.0)
    snapshot.put("bad", failed(Reason.IO_ERROR, 499 * "x" + "yz"))
    with serving(snapshot) as served:
        (bad,) = json.loads(served.ask("/api/v1/status")[1])["collectors"]
    assert bad["detail"] == 499 * "x" + "y"


def test_a_document_is_made_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most, however often it is asked for: that takes up to a thousand times as long as a
    scrape, and the agent reads heartbeats meanwhile.
    """
    now, made = [100.0], [0]
    clocks = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(web_server, "time", clocks)

    def make() -> bytes:
        made[0] += 1
        return b"%d" % made[0]

    async def make_later() -> bytes:
        return make()

    with serving(history=make, trends=make, targets=make_later) as served:
        for path in ("history", "trends", "targets"):
            before = made[0]
            for now[0], count in ((100.0, 1), (100.49, 1), (100.5, 2), (100.99, 2)):
                assert served.ask(f"/api/v1/{path}")[1] == b"%d" % (before + count)
        now[0] = 200.0
        first = served.ask("/api/v1/status")[1]
        for now[0], same in ((200.49, True), (200.5, False)):
            assert (served.ask("/api/v1/status")[1] == first) is same


def test_status_is_packed_for_who_wants_it(served: Served) -> None:
    """The status document comes compressed to a client that accepts gzip, and says the same.
    /metrics never does, as it would cost CPU.
    """
    answer, body = served.ask("/api/v1/status", {"Accept-Encoding": "gzip, deflate"})
    assert answer.headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(body))["metrics"]["dshealthd_value"]["kind"] == "gauge"
    assert "Content-Encoding" not in served.ask("/api/v1/status")[0].headers
    assert "Content-Encoding" not in served.ask("/metrics", {"Accept-Encoding": "gzip"})[0].headers


def test_page_names_no_outside_resource() -> None:
    """The page's files refer to nothing outside the agent, and have neither inline scripts nor
    markup made from data.
    """
    for name, (content, _) in PAGE_FILES.items():
        text = content.decode()
        assert not re.search(
            r"(?i)https?:|@import|url\((?!['\"]?data:)",
            text.replace("http://www.w3.org/2000/svg", ""),
        ), name
        assert not re.search(
            (
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|<script>"
                r"|\bon[a-z]+=|style="
            ),
            text,
        ), name


def test_page_forbids_outside_resources(served: Served) -> None:
    """The page's content security policy lets a browser load from the agent alone."""
    answer, _ = served.ask("/")
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in answer.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "deny"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        pytest.param(b"Content-Length: 5", b"hello", id="small"),
        pytest.param(b"Content-Length: 9999999999999", b"", id="absurd"),
        pytest.param(
            b"Transfer-Encoding: chunked",
            b"20000\r\n" + bytes(0x20000) + b"\r\n0\r\n\r\n",
            id="chunked",
        ),
        pytest.param(
            b"Content-Encoding: gzip\r\nContent-Length: 19460",
            gzip.compress(bytes(20_000_000))[:19460],
            id="bomb",
        ),
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_a_body_is_refused(served: Served, method: bytes, headers: bytes, body: bytes) -> None:
    """No path takes a body: it is refused unread, however small, and the connection ends."""
    request = method + b" /metrics HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n" + body
    answer = served.send(request + b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1") == 1
    until(lambda: served.metric("dshealthd_web_connections") == 0)


MALFORMED = {
    "no request": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "no version": b"GET /metrics\r\n\r\n",
    "bad version": b"GET /metrics HTTP/9.9\r\nHost: x\r\n\r\n",
    "bad method": b"G<T /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": (
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"
    ),
    "negative length": b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "signed length": b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\nhello",
    "length and chunked": (
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n0\r\n\r\n"
    ),
    "chunked twice": (
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"
    ),
    "unknown encoding": (
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"
    ),
    "space before colon": b"GET /metrics HTTP/1.1\r\nHost : x\r\n\r\n",
    "folded": b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "NUL": b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
    "bare return": b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: b\rc\r\n\r\n",
    "long line": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20000 + b"\r\n\r\n",
    "many headers": b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 500 + b"\r\n",
}


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED)
def test_malformed_request_is_refused(
    served: Served, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """What is malformed, oversized or made to be read in two ways gets 400 and the end of the
    connection, and no line in the log.
    """
    caplog.set_level(logging.INFO)
    answer = served.send(request_ + b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1."), answer
    assert b" 400 Bad Request\r\n" in answer.partition(b"\r\n")[0] + b"\r\n", answer
    assert answer.count(b"HTTP/1.") == 1, "what follows a malformed request was answered"
    assert caplog.records == []


def test_requests_are_counted_by_path_and_code(served: Served) -> None:
    """Requests are counted under their path if there is such a path, and all others together."""
    before = served.metric("dshealthd_web_requests_total", "/-/healthy", "200")
    served.ask("/-/healthy")
    served.ask("/made/up/" + "x" * 100)
    assert served.metric("dshealthd_web_requests_total", "/-/healthy", "200") == before + 1
    assert served.server is not None
    assert {
        sample.labels[0] for sample in served.server.samples() if sample.metric is REQUESTS
    } <= {"/", "/fleet", "/page/", *PATHS, "other"}


FRAGMENTS = (
    b"GET |POST |HEAD |CONNECT |PRI * "
    b"HTTP/2.0\r\n\r\nSM\r\n\r\n|/|/metrics|*|http://[::1|//|%00|?a=%zz| HTTP/1.1\r\n| "
    b"HTTP/1.0\r\n|"
    b"Host: x\r\n|"
    b"Host: [\r\n|\r\n|\n|\r|:|Content-Length: 3\r\n|Content-Length: "
    b"0\r\n|Transfer-Encoding: chunked\r\n|3\r\nabc\r\n0\r\n\r\n|"
    b"Expect: 100-continue\r\n|Connection: Upgrade\r\nUpgrade: websocket\r\n|Connection: "
    b"close\r\n|Authorization: Basic \xff\r\n|"
    b"Accept: \xff;;,=\r\n|Content-Encoding: deflate\r\n|Range: bytes=0-\r\n|Cookie: "
    b"a=\xf0\r\n|GET /metrics HTTP/1.1\r\nHost: x\r\n|"
    b"Content-Type: multipart/form-data; boundary=\r\n"
).split(b"|")
START = st.sampled_from(
    [
        b"",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
        b"POST /-/ready HTTP/1.1\r\nHost: x\r\n",
        b"HEAD / HTTP/1.0\r\n",
    ]
)
FRAGMENT = st.sampled_from([*FRAGMENTS, b"X: " + b"y" * 9000])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    start=START, parts=st.lists(st.one_of(FRAGMENT, FRAGMENT, st.binary(max_size=40)), max_size=12)
)
def test_no_bytes_upset_the_server(
    served: Served, caplog: pytest.LogCaptureFixture, start: bytes, parts: list[bytes]
) -> None:
    """Whatever bytes come: every answer is an HTTP answer, none is a server error, nothing is
    logged, and the next client is served.
    """
    caplog.set_level(logging.INFO)
    with served.connect("127.0.0.3") as connection:
        connection.sendall(start + b"".join(parts))
        answer = received(connection, 0.05)
    assert answer == b"" or re.match(rb"HTTP/1\.[01] [2345]\d\d ", answer), answer
    assert b"HTTP/1.1 500" not in answer
    assert b"HTTP/1.0 500" not in answer
    assert caplog.records == []
    assert served.ask("/-/healthy", source="127.0.0.2")[0].status == 200


@pytest.mark.parametrize(
    ("fitness", "code", "text"),
    [
        (Fitness((), ()), 200, "fit\n"),
        (Fitness((), ("gpu: timeout:\n no answer",)), 503, "unknown: gpu: timeout: no answer\n"),
        (
            Fitness((FailedCheck(FitnessCheck.GPU_LOST, "GPU 3", "x"),), ("gpu: timeout",)),
            503,
            "unfit: gpu_lost (GPU 3)\n",
        ),
        (
            Fitness(
                tuple(FailedCheck(FitnessCheck.GPU_LOST, f"GPU {n}", "x") for n in range(8)), ()
            ),
            503,
            "unfit: gpu_lost (GPU 0) and 7 more\n",
        ),
        (Fitness((), ("x" * 500,)), 503, f"unknown: {'x' * 71}\n"),
    ],
)
def test_fit_for_schedulers(fitness: Fitness, code: int, text: str) -> None:
    """Only a node that is known to be fit gives 200; the line says which of the two it is not."""
    snapshot = small_snapshot()
    server = Server(
        options(), snapshot, list, lambda: ("n1", ""), SelfMetrics(0), str, fitness=lambda: fitness
    )
    answer = server._fit(None)  # type: ignore[arg-type] # it asks nothing of the request
    assert (answer.status, answer.text) == (code, text)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("0.0.0.0:10061", "n1"),
        ("[::]:10061", "n1"),
        (":10061", "n1"),
        ("127.0.0.1:10061", "127.0.0.1"),
        ("[::1]:10061", "[::1]"),
    ],
)
def test_the_pages_address_is_one_to_open(address: str, host: str) -> None:
    """All addresses are none that a person could open: the host's name is."""
    assert _to_open(address, "n1") == host
