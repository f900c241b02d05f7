"""The findings as other programs read them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from dshealthd.collectors.gpu import ENERGY, FAULT, INFO, UP, VISIBLE
from dshealthd.collectors.gpu_bus import EXPECTED
from dshealthd.collectors.job_hang import HANG, OVERDUE
from dshealthd.collectors.kernel import UPTIME
from dshealthd.collectors.kernel_log import LAST_XID
from dshealthd.collectors.nvlink_domain import MANAGER_RUNNING
from dshealthd.collectors.training import STEP, WORK_SECONDS
from dshealthd.core import documents, schema
from dshealthd.core.collector import Fault, Reason, Sample
from dshealthd.core.documents import LeftOut
from dshealthd.core.result import CollectionOutcome, CollectionResult, failed, not_available
from dshealthd.core.snapshot import Snapshot
from dshealthd.findings.episodes import Episodes
from dshealthd.findings.finding import Verdict
from dshealthd.findings.gpu_history import GpuHistory
from dshealthd.findings.judgement import judge, series_of
from dshealthd.findings.overview import overview
from dshealthd.findings.series import Series
from tests.jobs.standstills import standstills
from tests.snapshots import snapshot
from tests.status_documents import NOT_JSON

DOCUMENT = Path(__file__).parents[2] / "docs/status-api.md"
NOW, WALL = 100.0, 1_800_000_000.0
FORM = schema.of(GpuHistory)


def verdict(results: dict[str, CollectionResult | None], now: float = NOW) -> Verdict:
    """Judge a node called node-17 by these results; None is a collector that has not run yet."""
    made = snapshot(results, NOW, WALL)
    return judge(made, series_of(made, ()), node="node-17", name="", monotonic=now, wall=WALL)


def gpus(*samples: object) -> dict[str, CollectionResult | None]:
    """Return the results of a node with two GPUs, with these samples beside."""
    usual = (UP(1, "0", "GPU-a"), VISIBLE(2), *samples)
    return {
        "gpu": CollectionResult(CollectionOutcome.OK, usual),  # type: ignore[arg-type] # samples
        "gpu_bus": CollectionResult(CollectionOutcome.OK, (EXPECTED(2),)),
    }


def test_the_example_is_real() -> None:
    """The documentation's example is what an agent answers; its table has every field."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    judged = verdict(gpus(FAULT(1, "3", "GPU-d", "gpu_lost")))
    episodes = Episodes()
    episodes.update(judged.findings, NOW, WALL)
    found = episodes.update(judged.findings, NOW + 15, WALL + 15).document()
    assert json.loads(example) == found
    (table,) = re.findall(r"A finding:\n\n(.*?)\n\n", text, re.DOTALL)
    assert set(
        re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()))
    ) == set(found["findings"][0])


def test_jobs_and_their_ranks() -> None:
    """The document's table of jobs has every field; a rank is compared with those of its role."""
    work = {("0", "stage 0"): 1.0, ("1", "stage 0"): 1.5, ("2", "stage 1"): 4.0}
    samples = [STEP(7.0, "bert", rank) for rank, _ in work]
    for (rank, role), seconds in work.items():
        samples.append(WORK_SECONDS(seconds, "bert", rank, role, "host"))
    (job,) = overview(Series(samples), "")
    assert [rank["work_ratio"] for rank in job["ranks"]] == [1.0, 1.5, None]
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("\n## Jobs\n")[2].partition("\n## ")[0]
    assert set(job) | set(job["ranks"][0]) <= set(re.findall(r"`(\w+)`", table))


def test_ok() -> None:
    """A node of which everything was read and nothing is wrong is ok."""
    assert verdict(gpus()).document() == {
        "schema": 1,
        "verdict": "ok",
        "findings": [],
        "watched": [],
    }


def test_unknown_is_neither_ok_nor_a_warning() -> None:
    """What is not read, cannot be read or is too old makes the node unknown, and is named."""
    for results, now in (
        ({**gpus(), "ecc": None}, NOW),
        ({**gpus(), "ecc": failed(Reason.IO_ERROR, "it does not answer")}, NOW),
        (
            {
                **gpus(),
                "ecc": CollectionResult(
                    CollectionOutcome.OK, (), (Fault("gpu 1", Reason.IO_ERROR, "x"),)
                ),
            },
            NOW,
        ),
    ):
        found = verdict(results, now)
        assert found.state == "unknown"
        assert [finding.origins for finding in found.findings] == [("ecc",)]
        assert all(finding.runbook == "/runbooks/collector-failing" for finding in found.findings)
    assert verdict(gpus(), NOW + 20).state == "unknown"


def test_starting_is_one_finding() -> None:
    """An agent that has just started says so once, and names what it has not read."""
    (finding,) = verdict(dict.fromkeys(("gpu", "ecc", "memory"))).findings
    assert (finding.severity, finding.detail) == ("unknown", "no result yet: ecc, gpu, memory")


def test_since() -> None:
    """A finding is dated by its source, or by when it was seen first."""
    history = Episodes()
    lost = verdict(gpus(FAULT(1, "1", "GPU-b", "gpu_lost")))
    logged = verdict(gpus(LAST_XID(WALL - 60, "1", "0000:02:00", "79")))
    for later in (0, 5):
        dated = history.update(logged.findings, NOW + later, WALL + later)
        assert dated.findings[0].since == WALL - 60
    history = Episodes()
    for later in (5, 50):
        dated = history.update(lost.findings, NOW + later, WALL + later)
    assert dated.findings[0].since == WALL + 5


def test_what_is_not_there_is_well() -> None:
    """A source that this machine does not have is no finding."""
    absent = {name: not_available("no GPU") for name in ("gpu", "gpu_bus", "ecc")}
    assert verdict({**absent}).state == "ok"


def test_the_worst_comes_first() -> None:
    """Critical findings stand before what is unknown, and make the verdict."""
    results = {**gpus(FAULT(1, "1", "GPU-b", "gpu_lost")), "ecc": failed(Reason.IO_ERROR, "x")}
    found = verdict(results)
    assert [finding.severity for finding in found.findings] == ["critical", "unknown"]
    assert found.state == "critical"


@pytest.mark.parametrize(
    ("collector", "part"),
    [("nccl_ras", "job x"), ("job_threads", "job x"), ("job_checkpoint", "checkpoints of x")],
)
def test_users_parts_leave_the_node_known(collector: str, part: str) -> None:
    """A part of a user's job that cannot be read does not make the node unknown."""
    result = CollectionResult(CollectionOutcome.OK, (), (Fault(part, Reason.MALFORMED, "odd"),))
    assert verdict({**gpus(), collector: result}).state == "ok"


def test_a_part_is_named_once() -> None:
    """A GPU that is lost is not also a part that could not be read."""
    fault = Fault("gpu 1", Reason.GPU_LOST, "GPU is lost")
    results = gpus(FAULT(1, "1", "GPU-b", "gpu_lost"))
    results["ecc"] = CollectionResult(CollectionOutcome.OK, (), (fault,))
    assert [finding.part for finding in verdict(results).findings] == ["GPU 1"]


@pytest.mark.parametrize(("parts", "named"), [("1", ["GPU 1"]), ("12", ["GPU 1", "ecc", "gpu 2"])])
def test_a_source_of_which_each_part_is_named(parts: str, named: list[str]) -> None:
    """It has failed as a whole, and needs no finding of its own."""
    faults = tuple(Fault(f"gpu {part}", Reason.GPU_LOST, "GPU is lost") for part in parts)
    results = gpus(FAULT(1, "1", "GPU-b", "gpu_lost"))
    results["ecc"] = dataclasses.replace(failed(Reason.GPU_LOST, "x"), faults=faults)
    assert [finding.part for finding in verdict(results).findings] == named


@pytest.mark.parametrize(("running", "says"), [
    ((0, 0), "nvlsm, the subnet manager of NVLink, and Fabric Manager are not running"),
    ((0, 1), "nvlsm, the subnet manager of NVLink, is not running"),
])  # fmt: skip
def test_daemons_that_do_not_run(running: tuple[int, int], says: str) -> None:
    """Each is named, first the one that the other waits for."""
    nvlsm, manager = running
    samples = MANAGER_RUNNING(nvlsm, "nvlsm"), MANAGER_RUNNING(manager, "nv-fabricmanager")
    result = CollectionResult(CollectionOutcome.OK, samples)
    (finding,) = verdict({**gpus(), "nvlink_domain": result}).findings
    assert finding.reason == says


def test_texts_are_bounded() -> None:
    """A long or broken error of a driver does not break the document."""
    detail = "\ud800" + "x" * 100_000
    document = verdict({**gpus(), "ecc": failed(Reason.IO_ERROR, detail)}).document()
    assert len(json.dumps(document).encode()) < 5000


PCI = "0000:02:00.0"
HANGS = (UP(0, "1", "GPU-b"), FAULT(1, "1", "GPU-b", "timeout"))
READ = (UP(1, "1", "GPU-b"), INFO(1, "1", "GPU-b", "H100", PCI, "", "", ""))


def after_xid(past: GpuHistory, age: float, *samples: Sample) -> set[str]:
    """Return the alerts of which there are findings, with an Xid 79 of GPU 1 that is so old."""
    faults = (Fault("gpu 1", Reason.TIMEOUT, "no answer"),) if samples == HANGS else ()
    gpu = CollectionResult(
        CollectionOutcome.OK, (UP(1, "0", "GPU-a"), VISIBLE(2), *samples), faults
    )
    log = CollectionResult(CollectionOutcome.OK, (LAST_XID(WALL - age, "1", PCI, "79"),))
    return alerts(past, snapshot({**gpus(), "gpu": gpu, "kernel_log": log}, NOW, WALL))


def alerts(past: GpuHistory, made: Snapshot) -> set[str]:
    """Return the alerts of which there are findings, after this past."""
    series = series_of(made, ())
    past.settle(series, WALL)
    found = judge(made, series, node="node-17", name="", monotonic=NOW, wall=WALL)
    return {finding.alert for finding in found.findings}


def test_gpu_that_was_never_read_again_stays_lost() -> None:
    """A GPU on which NVML hangs since its Xid 79 is lost for as long as that lasts: one finding.

    Nor was it back where NVML read it within ten minutes only, as a dying GPU may answer for a
    while.
    """
    past = GpuHistory()
    assert after_xid(past, 60, *READ) == {"DshealthdGpuLost"}
    for age in (60, 3600):
        assert after_xid(past, age, *HANGS) == {"DshealthdGpuLost"}


@pytest.mark.parametrize(("up", "lost"), [(1, False), (0, True)])
def test_a_single_look_at_an_old_xid(up: int, *, lost: bool) -> None:
    """Without a past, as the doctor looks, a GPU is back if NVML reads it now."""
    log = CollectionResult(CollectionOutcome.OK, (LAST_XID(WALL - 3600, "1", PCI, "79"),))
    results = gpus(UP(up, "1", "GPU-b"), INFO(1, "1", "GPU-b", "H100", PCI, "", "", ""))
    found = verdict({**results, "kernel_log": log}).findings
    assert ("DshealthdGpuLost" in {finding.alert for finding in found}) is lost


def errors_after(past: GpuHistory, joules: float, uptime: float, xid_age: float = 60.0) -> set[str]:
    """Return the alerts of a node whose GPU 1 has logged an Xid 62 and used so much energy."""
    log = (LAST_XID(WALL - xid_age, "1", PCI, "62"),)
    gpu, kernel = (ENERGY(joules, "1", "GPU-b"),), (UPTIME(uptime),)
    return alerts(past, snapshot({"gpu": gpu, "kernel": kernel, "kernel_log": log}, NOW, WALL))


def test_reset_while_the_agent_was_away() -> None:
    """An Xid is over if its GPU was reset since, also while the agent did not run."""
    before = GpuHistory()
    assert errors_after(before, 9e6, uptime=90_000) == {"DshealthdGpuResetNeeded"}
    after = FORM.read(json.loads(json.dumps(FORM.write(before))))
    assert errors_after(after, 50, uptime=90_000) == set()


def test_boot_is_no_reset() -> None:
    """What the driver has logged since a boot, before the agent started, is not over."""
    before = GpuHistory()
    assert errors_after(before, 9e6, uptime=90_000) == {"DshealthdGpuResetNeeded"}
    after = FORM.read({**FORM.write(before), "settled": WALL - 600})
    assert errors_after(after, 50, uptime=120) == {"DshealthdGpuResetNeeded"}


def test_job_that_cannot_be_shown_costs_itself() -> None:
    """A rank or a job with a figure that JSON lacks is left out, and named; the others are
    shown.
    """
    samples = [STEP(7.0, job, rank) for job in ("first", "odd", "last") for rank in ("0", "1")]
    samples += [OVERDUE(math.inf, "odd", "1"), STEP(math.nan, "odd", "2")]
    samples += [HANG(1.0, "worst", "process"), OVERDUE(math.inf, "worst", "0")]
    left_out = LeftOut()
    series = Series(samples, standstills=standstills(samples))
    jobs = {job["job"]: job for job in overview(series, "", left_out)}
    assert set(jobs) == {"first", "odd", "last"}
    assert [rank["rank"] for rank in jobs["odd"]["ranks"]] == [0]
    assert [(one["part"], one["reason"]) for one in left_out.document()] == [
        ("job odd, rank 1", NOT_JSON),
        ("job odd, rank 2", "ValueError: cannot convert float NaN to integer"),
        ("job worst", NOT_JSON),
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e400, 10**400])
def test_figures_of_a_finding_that_json_lacks_are_null(value: float) -> None:
    """The finding is there, with its severity and its texts, whatever its figures are."""
    odd = dataclasses.replace(
        verdict(gpus(FAULT(1, "1", "GPU-b", "gpu_lost"))).findings[0],
        value=value,
        limit=value,
        since=value,
    )
    document = json.loads(documents.dumps(Verdict.of((odd,)).document()))
    (found,) = document["findings"]
    assert (document["verdict"], found["part"]) == ("critical", "GPU 1")
    assert [found[name] for name in ("value", "limit", "since")] == [None] * 3
