"""A number or a text of one user, one job or one member costs only itself, wherever it goes: from
each field of each message to the judgement, the documents, the metrics and the evidence.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import pickle
import struct
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dshealthd.collectors.nccl_inspector import BANDWIDTH, SECONDS
from dshealthd.collectors.nccl_ras import _samples as ras_samples
from dshealthd.collectors.training import Training
from dshealthd.core import documents, schema
from dshealthd.core.collector import CollectorOptions, Context
from dshealthd.core.documents import LeftOut
from dshealthd.core.exposition import render
from dshealthd.core.host import Host
from dshealthd.core.result import attempt
from dshealthd.core.snapshot import Snapshot
from dshealthd.core.wire import Decoder, Encoder
from dshealthd.evidence import summary as evidence
from dshealthd.evidence.findings import CollectedEvidence, HangCase, RankEvidence
from dshealthd.explain.flight_recorder import MalformedDump, digest
from dshealthd.explain.group_verdicts import judge_dumps
from dshealthd.findings.finding import Verdict
from dshealthd.findings.judge import Judge
from dshealthd.findings.judgement import series_of
from dshealthd.findings.overview import overview
from dshealthd.fleet import jobs as fleet_jobs
from dshealthd.fleet.summary import summary
from dshealthd.http.document import parse
from dshealthd.jobs.nccl import inspector
from dshealthd.jobs.own_work import Course
from dshealthd.jobs.ras.evaluation import JobProgress, check
from dshealthd.jobs.ras.from_json import parse_json
from dshealthd.jobs.ras.status import MalformedAnswer
from dshealthd.jobs.service import Jobs
from dshealthd.nvrx.fitness import fitness
from dshealthd.probe.peers import fields, messages
from dshealthd.probe.peers.messages import METHODS
from dshealthd.status import text
from dshealthd.status.paint import Paint
from dshealthd.status.query import AgentAnswer
from dshealthd.training.message import DeviceMemory, Message, Totals, decode, encode
from dshealthd.web import status
from tests.collectors.test_training import entry
from tests.evidence.test_dump import entry as recorded
from tests.jobs.nccl import inspector_plugin
from tests.jobs.ras import server
from tests.trees import changed, places

FIGURES = (
    *(0.0, -0.0, 5e-324, 1e-300, 1e-9, 1e-6, 1.0, 1e7, 1e9, 2.0**53, 2.0**63, 1e300, 1.7e308),
    *(-5e-324, -1.0, -1e300, math.nan, math.inf, -math.inf),
)
COUNTS = (0, 1, 2**31, 2**32, 10**12, 2**53, 2**63, 2**64 - 1)
TEXTS = (
    *(
        "",
        " ",
        "\0",
        "\x1b[2J",
        "\n",
        "\r\n",
        "\u202e",
        "\ud800",
        "NaN",
        "Infinity",
        "-1",
        "\u0663",
    ),
    *("x" * 100_000, "9" * 5000, '"}], "verdict": "ok"', "<script>", "../../etc/passwd", "{value}"),
)
NUMBERS: tuple[Any, ...] = (*FIGURES, *COUNTS, -1, -(2**63), 10**30, True, None, [], {})
SHOWN = 15
"""Jobs of a node besides one that the other members show."""
NOW, WALL = 5000.0, 1_800_000_000.0
WELL = Message(
    step=100, sent=NOW, last_seconds=1.0, mean_seconds=1.0, input_seconds=0.1,
    skipped=1, loss_finite=True, finite_step=1, loss_scale=65536.0, gradient_norm=1.0,
    memory=DeviceMemory(1 << 30, 1 << 31, 1 << 31), communication_seconds=5.0, wait_seconds=0.2,
    work_seconds=0.8, pipeline_stage=0, forward_pass=1, forward_passes=2,
    totals=Totals(100, 100, 80.0, 20.0),
)  # fmt: skip


def strict(body: str | bytes) -> Any:
    """Return a document as any other program parses it, which knows no Infinity."""
    return json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def sent(message: Message) -> Message | None:
    """Return a message as the agent reads it; None if its sender is refused, or cannot say it."""
    try:
        return decode(encode(message))
    except (ValueError, struct.error):
        return None


class Node:
    """A node with a job that is well, and others that send what they like, over some minutes."""

    def __init__(self) -> None:
        """Start with nothing read."""
        self.now = NOW
        self._courses: dict[tuple[str, int], Course] = {}
        self.snapshot = Snapshot(lambda: self.now, lambda: WALL + self.now)
        self.snapshot.expect("training", 3600.0)
        self.judge = Judge(
            self.snapshot,
            lambda: (),
            lambda: ("n1", "n1"),
            None,
            lambda: self.now,
            lambda: WALL + self.now,
        )

    def hear(self, *odd: Sequence[Message | None]) -> None:
        """Collect the last messages: two ranks of a job that is well, and those of the others."""
        ranks = {("well", rank): WELL for rank in (0, 1)}
        ranks |= {
            (f"odd-{job}", rank): one
            for job, messages in enumerate(odd)
            for rank, one in enumerate(messages)
            if one is not None
        }
        heard = {
            place: [(entry(50 + place[1], 100, rank=str(place[1]))[0], self.sender(place, message))]
            for place, message in ranks.items()
        }
        jobs: Any = Jobs.__new__(Jobs)
        jobs.heartbeats = lambda: SimpleNamespace(rejected=0, unidentified={}, ranks=lambda: heard)
        context = Context(host=Host(), monotonic=lambda: self.now, services=(jobs,))
        result = attempt(Training(CollectorOptions(), context), lambda: self.now)
        # As from a worker, where other collectors of what users write run.
        metrics = {"training": {one.metric.name: one.metric for one in result.samples}}
        frame = Encoder().pack("training", result)[4:]
        self.snapshot.put("training", Decoder(metrics).unpack(strict(frame)))
        self.judge.judge()
        self.now += 15.0

    def sender(self, place: tuple[str, int], message: Message) -> SimpleNamespace:
        """Return the sender of a rank that is there since the node is, and has just sent this."""
        course = self._courses.setdefault(place, Course())
        course.add(message, self.now)
        return SimpleNamespace(
            message=message, heard=WALL + self.now, looked=self.now, course=course
        )

    def documents(self) -> tuple[Any, Verdict, str]:
        """Return the status document as its readers have it, the verdict, and the metrics."""
        verdict, left_out = self.judge.verdict, LeftOut()
        series = series_of(self.snapshot, ())
        body = status.document(
            self.snapshot,
            self.judge.samples(),
            node="n1",
            started=WALL,
            begun=0.0,
            monotonic=self.now,
            wall=WALL + self.now,
            ready=not self.judge.unready,
            sections={**verdict.document(), "jobs": overview(series, "", left_out)},
            left_out=left_out,
        )
        strict(body)
        return parse(body), verdict, self.snapshot.body(self.judge.samples).decode()


def everywhere(*odd: Sequence[Message | None]) -> Any:
    """Follow heartbeats of jobs through everything that shows them; return what is said of the job
    that is well on this node.
    """
    node = Node()
    for _ in range(40):
        node.hear(*odd)
    document, verdict, metrics = node.documents()
    assert document["ready"]
    assert not node.judge._broken
    # What is exported can be scraped, and what a scraper reads is what the evidence shows.
    assert list(text_string_to_metric_families(metrics))
    case = HangCase(job="odd-0", reason="process")
    found = CollectedEvidence(
        case=case,
        node="n1",
        begun=WALL,
        ranks=[RankEvidence("odd-0", 0, 50)],
        jobs=document["jobs"],
        moved=evidence.changed_metrics(metrics, metrics),
    )
    assert evidence.write(found)
    assert list(text.node(AgentAnswer("n1", "", document), Paint(color=False)))
    assert fitness(verdict).fit
    # The other members see the node, and can show it.
    answer = METHODS["summary"].answer
    told = schema.loads(schema.dumps(summary(verdict, document["jobs"]), answer), answer)
    left_out = LeftOut()
    fleet = strict(
        documents.whole({"jobs": fleet_jobs.merge_jobs([("n1", told)], [], left_out)}, left_out)
    )
    assert not fleet["left_out"]
    assert not document["left_out"]
    shown = {job["job"]: job for job in document["jobs"]}
    shown["well"]["ranks"] = [rank | {"heartbeat": None} for rank in shown["well"]["ranks"]]
    assert "well" in {job["job"] for job in fleet["jobs"]}
    assert {one.training_job.partition("-")[0] for one in verdict.findings} <= {"odd", ""}
    return shown["well"]


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """What is said of that job without another."""
    return everywhere()


@pytest.mark.parametrize("field", sorted(set(Message._fields) - {"collective"}))
def test_heartbeat_costs_only_its_own_job(field: str, undisturbed: Any) -> None:
    """Whatever a rank sends in whatever field, another job of the node is shown as without it, and
    the node, its documents and its metrics are there for everybody.
    """
    usual = getattr(WELL, field)
    values: tuple[Any, ...] = FIGURES
    if isinstance(usual, DeviceMemory):
        values = tuple(DeviceMemory(*(count,) * 3) for count in COUNTS)
    elif isinstance(usual, Totals):
        values = tuple(Totals(count, count, 80.0, 20.0) for count in COUNTS)
        values += tuple(Totals(100, 100, seconds, seconds) for seconds in FIGURES)
    elif isinstance(usual, int):
        values = COUNTS
    odd = [(sent(WELL._replace(**{field: value})), sent(WELL)) for value in values]
    for begin in range(0, len(odd), SHOWN):
        assert everywhere(*odd[begin : begin + SHOWN]) == undisturbed


def test_extreme_heartbeats_beside_each_other(undisturbed: Any) -> None:
    """Ranks of one job may differ by any factor: figures that are compared are divided."""
    seconds = ("last_seconds", "mean_seconds", "wait_seconds", "work_seconds")
    pairs = ((5e-324, 1e308), (1e-9, 1e7), (1e-300, 1e300), (0.0, 1e7), (1e-6, 1e7))
    figures = [[dict.fromkeys(seconds, value) for value in pair] for pair in pairs]
    odd = [[sent(WELL._replace(**one)) for one in pair] for pair in figures]  # type: ignore[arg-type]
    assert everywhere(*odd) == undisturbed


def example(kind: schema.Type) -> Any:
    """Return a value that a type of messages allows."""
    if isinstance(kind, schema.Integer):
        return max(kind.minimum, min(1, kind.maximum))
    if isinstance(kind, schema.Number):
        return max(kind.minimum, min(1.0, kind.maximum))
    if isinstance(kind, schema.Flag):
        return True
    if isinstance(kind, schema.Choice):
        return next(iter(kind.values)).value
    if isinstance(kind, schema.Array):
        return [example(kind.item) for _ in range(max(1, kind.minimum))]
    if isinstance(kind, schema.Record):
        return {name: example(one) for name, one in {**kind.fields, **kind.optional}.items()}
    if isinstance(kind, schema.Form):
        return example(kind.fields)
    if isinstance(kind, schema.OrNull):
        return example(kind.kind)
    if isinstance(kind, schema.Row):
        return [example(one) for one in kind.items]
    if isinstance(kind, fields.Ratios):
        return {"n1": 1.0}
    return {fields.NodeName: "n1", fields.KnownReason: "busy", messages.Data: "AA=="}.get(
        type(kind), "text"
    )


def plain(value: Any) -> Any:
    """Return what a message holds, without bytes, enumerations and records."""
    if dataclasses.is_dataclass(value):
        return plain({one.name: getattr(value, one.name) for one in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return (
        value.decode("latin-1")
        if isinstance(value, bytes)
        else str(value)
        if isinstance(value, enum.Enum)
        else value
    )


RECORDS = {
    f"{name} {side}": record
    for name, method in METHODS.items()
    for side, record in (("request", method.request), ("answer", method.answer))
    if record.fields or record.optional
}


@pytest.mark.parametrize("name", RECORDS)
def test_peer_message_is_refused_or_can_be_shown(name: str) -> None:
    """Each field of each message between agents, with each value: it does not fit, or what passes
    is JSON for everybody, and short.
    """
    record = RECORDS[name]
    usual = example(record)
    assert schema.loads(json.dumps(usual).encode(), record)
    for path in places(usual):
        for value in (*NUMBERS, *TEXTS):
            body = json.dumps(changed(usual, path, value)).encode(errors="replace")
            try:
                passed = schema.loads(body, record)
            except schema.SchemaError:
                continue
            strict(documents.dumps(plain(passed)))


def test_summary_of_a_member_costs_only_its_own_job() -> None:
    """Whatever a member says of a job, the fleet is shown with all other jobs."""
    answer = METHODS["summary"].answer
    usual = example(answer) | {"jobs": [example(messages.JOB) | {"job": "odd"}]}
    well = example(answer) | {"jobs": [example(messages.JOB) | {"job": "well"}]}
    other = schema.loads(json.dumps(well).encode(), answer)

    def fleet(*odd: Any) -> Any:
        left_out = LeftOut()
        jobs = fleet_jobs.merge_jobs([("n1", other), *(("n2", one) for one in odd)], [], left_out)
        return strict(documents.whole({"jobs": jobs}, left_out))

    (expected,) = fleet()["jobs"]
    for path in places(usual):
        for value in (*NUMBERS, *TEXTS):
            body = json.dumps(changed(usual, path, value)).encode(errors="replace")
            try:
                odd = schema.loads(body, answer)
            except schema.SchemaError:
                continue
            shown = fleet(odd)
            assert shown["left_out"] == []
            assert next(job for job in shown["jobs"] if job["job"] == "well") == expected
    # Two members that each keep to the bounds are divided by each other.
    for most, least in ((1e7, 1e-9), (1e-9, 1e7)):
        work = example(messages.OWN_WORK) | {"over": "30s", "slow": most, "usual": least}
        odd = usual | {"jobs": [usual["jobs"][0] | {"own_work": [work]}]}
        assert len(fleet(schema.loads(json.dumps(odd).encode(), answer))["jobs"]) == 2


def test_ras_answer_costs_only_its_own_job() -> None:
    """Each number of an answer of NCCL's RAS, with each value, is refused or can be exported."""
    ranks = [server.Rank(number, pid=4000 + number, gpu=number) for number in range(2)]
    gone = server.Rank(2, pid=4002, flags=("unresponsive",))
    usual = json.loads(server.document(server.Communicator(ranks, [gone])))
    refused = 0
    for path in places(usual):
        for value in (*NUMBERS, *TEXTS):
            data = json.dumps(changed(usual, path, value)).encode(errors="replace")
            try:
                parsed = parse_json(data)
                check(parsed, (), None)
            except MalformedAnswer:
                refused += 1
                continue
            progress = JobProgress()
            progress.update(parsed)
            progress.update(parsed)
            samples = list(ras_samples("run-1", parsed, progress, None))
            assert list(text_string_to_metric_families(render(samples)))
            assert all(math.isfinite(sample.value) for sample in samples)
    assert refused > 1000


@pytest.mark.parametrize("value", FIGURES)
def test_inspector_file_costs_only_its_own_lines(value: float) -> None:
    """A figure that no NCCL measures is a malformed line; the others of the file count."""
    well = inspector_plugin.line(400.0, 1000.0)
    odd = inspector_plugin.line(value, value, operation="AllGather")
    content = inspector.parse(well + odd)
    shown = {operation.name: figures for operation, figures in content.operations.items()}
    assert shown.pop("AllReduce") == inspector.Figures(400e9, 0.001)
    for figures in shown.values():
        samples = [
            metric(figure, *("x" for _ in metric.dimensions))
            for metric, figure in ((BANDWIDTH, figures.bandwidth), (SECONDS, figures.seconds))
            if figure is not None
        ]
        assert all(0 < sample.value < 1e15 for sample in samples)


def test_flight_recorder_costs_only_itself() -> None:
    """Each value of a dump, whatever it is, gives a digest that is JSON and can be compared."""
    usual = {
        "version": "2.10",
        "entries": [recorded(1), recorded(2, state="completed")],
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": {"last_completed_collective": 1, "last_enqueued_collective": 2}},
    }
    well = digest(pickle.dumps(usual))
    plain_usual = json.loads(json.dumps(usual))
    for path in places(plain_usual):
        for value in (*NUMBERS, *TEXTS):
            try:
                odd = digest(pickle.dumps(changed(plain_usual, path, value)))
            except (MalformedDump, ValueError):
                continue
            strict(documents.dumps(odd))
            assert judge_dumps({0: well, 1: cast("Any", odd)}) is not None
