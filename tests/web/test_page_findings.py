"""The page shows what the agent found: jobs, unknown sources, runbooks. It does not judge."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from dshealthd.collectors.gpu import UP, VISIBLE
from dshealthd.collectors.gpu_bus import EXPECTED
from dshealthd.collectors.infiniband import UP as PORT_UP
from dshealthd.collectors.job_hang import BOUND, CULPRIT, HANG, OVERDUE, PHASE_SECONDS
from dshealthd.collectors.job_logs import FAILURE
from dshealthd.collectors.open_files import LIMIT, LOCKED, LOCKED_LIMIT, OPEN
from dshealthd.collectors.rendezvous import LISTENERS
from dshealthd.collectors.tcp import SOCKETS
from dshealthd.collectors.training import HEARD, INFO, LOSS_FINITE, PHASE, STEP, STEP_SECONDS
from dshealthd.core.collector import Fault, Reason, Sample
from dshealthd.core.result import CollectionOutcome, CollectionResult, failed, not_available
from dshealthd.core.snapshot import Snapshot
from dshealthd.web import server
from tests.status_documents import finding, job
from tests.web.browser import CHROMIUM, DESK, PHONE, Visit
from tests.web.serving import serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
PAGE = Path(server.__file__).parent / "page"
GPUS = (UP(1, "0", "GPU-a"), VISIBLE(1), EXPECTED(1))
JOB = (
    *(STEP(1246, "bert-large", str(rank)) for rank in range(4)),
    *(STEP_SECONDS(4.0, "bert-large", str(rank)) for rank in range(4)),
    *(LOSS_FINITE(1, "bert-large", str(rank)) for rank in range(4)),
)
HANGING = (
    HANG(1, "bert-large", "process"),
    CULPRIT(1, "bert-large", "2", "process", "stopped"),
    *(OVERDUE(75, "bert-large", str(rank)) for rank in range(4)),
)


def snapshot(*samples: Sample) -> Snapshot:
    """Return what an agent has that collected these samples."""
    made = Snapshot(time.monotonic, time.time)
    made.expect("gpu", 3600)
    made.put("gpu", CollectionResult(CollectionOutcome.OK, (*GPUS, *samples)))
    return made


@contextlib.contextmanager
def shown(
    browser: Browser, made: Snapshot, size: tuple[int, int] = DESK, **more: Any
) -> Iterator[Visit]:
    """Open the page of an agent with this snapshot, which complains of nothing."""
    with serving(made, more=more, guarded=False) as served:
        visit = Visit(browser, f"http://127.0.0.1:{served.port}/", size)
        yield visit
        assert visit.complaints == []
        visit.page.close()


def test_a_job_that_trains(browser: Browser) -> None:
    """A job is shown with launcher, ranks, step and pace, and the page is green."""
    launched = INFO(1, "bert-large", "deepspeed", "4")
    with shown(browser, snapshot(*JOB, launched)) as visit:
        panel = visit.panel("Jobs")
        for text in ("bert-large", "training", "1,246", "15.0", "finite", "deepspeed", "4 of 4"):
            assert text in panel
        assert visit.page.locator(".verdict.good").count() == 1
        assert "Healthy" in visit.text(".verdict")
        assert "Hung" not in panel


def test_a_job_that_no_rank_is_heard_of(browser: Browser) -> None:
    """It is not shown as training, but for how long no step was made, and from when that is
    judged.
    """
    heard = (HEARD(time.time() - 4000, "bert-large", str(rank)) for rank in range(4))
    with shown(browser, snapshot(*JOB, *heard, BOUND(7200, "bert-large", "0"))) as visit:
        assert re.search(r"no step for \d+ min, judged from 2 h on", visit.panel("Jobs"))


def test_what_was_left_out_is_told(browser: Browser) -> None:
    """Where the jobs could not be shown, the page does not look as if there were none."""
    with shown(browser, snapshot(), jobs=[float("inf")]) as visit:
        assert "jobs: ValueError: " in visit.panel("Left out")
    with shown(browser, snapshot()) as visit:
        assert visit.page.locator("section[aria-label='Left out']").count() == 0


def test_a_listener_whose_parent_ended_is_detached(browser: Browser) -> None:
    """A listener without its parent is called detached, as torchrun with nohup is, and no orphan.
    The page stays green: by itself that is no fault.
    """
    found = (SOCKETS(3, "time_wait"), LISTENERS(1, "false"), LISTENERS(2, "true"))
    made = snapshot()
    for name in ("tcp", "rendezvous"):
        made.expect(name, 3600)
    made.put("tcp", CollectionResult(CollectionOutcome.OK, found[:1]))
    made.put("rendezvous", CollectionResult(CollectionOutcome.OK, found[1:]))
    with shown(browser, made) as visit:
        panel = visit.panel("Sockets")
        assert "2 detached (parent process ended)" in panel
        assert "orphan" not in panel.lower()
        assert visit.page.locator(".verdict.good").count() == 1
        made.put("rendezvous", CollectionResult(CollectionOutcome.OK, (LISTENERS(3, "false"),)))
        visit.page.wait_for_selector("text=parent process ended", state="detached")


def test_a_job_that_failed_shows_why(browser: Browser) -> None:
    """What its log tells stands with the job."""
    told = FAILURE(1, "bert-large", "cuda-oom", "3", "n7", "Out of memory")
    with shown(browser, snapshot(*JOB, told)) as visit:
        assert "cuda-oom on rank 3 (n7)" in visit.panel("Jobs")


def test_a_hung_job_turns_the_page_red(browser: Browser) -> None:
    """A hang is at the top and with the job, with cause and culprit, and a link to its runbook."""
    made = snapshot(*JOB)
    with shown(browser, made, PHONE) as visit:
        made.put("gpu", CollectionResult(CollectionOutcome.OK, (*GPUS, *JOB, *HANGING)))
        visit.page.wait_for_selector(".verdict.bad")
        panel = visit.panel("Jobs")
        assert "no progress for 75 s longer than expected" in panel
        assert "Cause: a rank's process is stopped or has ended" in panel
        assert "Rank 2 is stopped (SIGSTOP)" in panel
        assert "bert-large" in visit.text(".verdict li")
        assert visit.page.title().startswith("(1)")
        assert visit.is_as_wide_as_its_window()
        assert visit.complaints == []
        visit.page.click(".verdict a")
        visit.page.wait_for_url("**/runbooks/training-hang")
        assert "## Remedy" in visit.text()
        visit.complaints.clear()  # a text has no icon, for which the browser asks


def test_the_ranks_of_a_hung_job_are_open(browser: Browser) -> None:
    """Where there is room a job's ranks are open, and where it hangs; whoever closes them is not
    contradicted.
    """
    many = tuple(STEP(7, "bert-large", str(rank)) for rank in range(20))
    made = snapshot(*many)
    with shown(browser, made) as visit:
        visit.wait("details summary", "20 ranks")
        opened = visit.page.locator("section[aria-label='Jobs'] details[open]")
        assert opened.count() == 0
        made.put("gpu", CollectionResult(CollectionOutcome.OK, (*GPUS, *many, *HANGING)))
        visit.page.wait_for_selector("section[aria-label='Jobs'] details[open]")
        visit.page.click("section[aria-label='Jobs'] details summary")
        later = (STEP(1246, "bert-large", str(rank)) for rank in range(20))
        made.put("gpu", CollectionResult(CollectionOutcome.OK, (*GPUS, *later, *HANGING)))
        visit.page.wait_for_selector("text=1,246")
        assert opened.count() == 0


def test_a_stall_names_whom_ranks_wait_for(browser: Browser) -> None:
    """By its name, as `dshealthd jobs` does."""
    says = "between two steps: rank 3 waits for head_node:8000"
    stall = {"cause": "between_steps", "says": says, "silent_seconds": 45, "hung_in_seconds": None}
    with shown(browser, snapshot(), jobs=[job(state="stalled", stall=stall)]) as visit:
        assert f"{says} for 45 s" in visit.panel("Jobs")


def test_a_marked_pause_is_said(browser: Browser) -> None:
    """A checkpoint is neither training nor a fault, and has no pace; what is unknown of a rank's
    work is no figure.
    """
    pause = (PHASE(1, "bert-large", "0", "checkpoint"), PHASE_SECONDS(45, "bert-large", "0"))
    with shown(browser, snapshot(*JOB, *pause)) as visit:
        panel = visit.panel("Jobs")
        assert "checkpoint for 45 s" in panel
        assert "bert-large training" not in panel
        assert "15.0" not in panel
        cells = visit.page.locator("section[aria-label='Jobs'] tbody tr").first.locator("td")
        assert cells.all_inner_texts()[-3:] == ["\u2013"] * 3
        assert visit.page.locator(".verdict.good").count() == 1


def test_unknown_is_not_green(browser: Browser) -> None:
    """A source that cannot be read makes the page neither green nor red, and is named. So does an
    agent without a verdict.
    """
    made = snapshot()
    made.expect("ecc", 3600)
    made.put("ecc", failed(Reason.PERMISSION_DENIED, "may not"))
    made.expect("mig", 3600)
    made.put("mig", not_available("no GPU has MIG"))
    without: dict[str, Any] = {"schema": 9, "verdict": None, "findings": []}
    for more in ({}, without):
        with shown(browser, made, **more) as visit:
            assert visit.page.locator(".verdict.unknown").count() == 1
            assert "State unknown" in visit.text(".verdict")
            assert more or "1 source not readable" in visit.text(".verdict")
            assert "1 not applicable or disabled: mig" in visit.text(".absent")


def test_an_agent_that_starts_has_no_broken_source(browser: Browser) -> None:
    """What it has not read yet is not called unreadable."""
    made = snapshot()
    made.expect("ecc", 3600)
    with shown(browser, made) as visit:
        heading = visit.text(".verdict h2")
        assert "State unknown: not all sources read yet" in heading
        assert "not readable" not in heading


def test_a_sign_that_is_no_finding_yet_is_quiet(browser: Browser) -> None:
    """What is watched is said with its time and its hold, and the page stays as green as it is."""
    down = {"part": "mlx5_1/1", "summary": "A fabric port is down", "hold_seconds": 30.0}
    now = time.time()
    watched = [finding(**down, since=now - 12)]
    with shown(browser, snapshot(), watched=watched, time=now) as visit:
        assert visit.page.locator(".verdict.good").count() == 1
        assert "Healthy so far" in visit.text(".verdict h2")
        said = visit.text(".verdict p.quiet")
        assert "Watched: mlx5_1/1: A fabric port is down, for 12 s" in said
        assert "a finding after 30 s" in said
        assert not visit.page.title().startswith("(")


def test_a_failing_collector_has_its_reason_in_its_panel(browser: Browser) -> None:
    """Nothing of what cannot be read is shown as a number; the reason goes with the fault."""
    made = snapshot()
    made.put("gpu", failed(Reason.PERMISSION_DENIED, "may not"))
    with shown(browser, made) as visit:
        assert "gpu: permission denied \u2013 may not" in visit.panel("GPUs")
        assert "\u00b0C" not in visit.panel("GPUs")
        assert "permission denied" in visit.text(".collectors")
        made.put("gpu", CollectionResult(CollectionOutcome.OK, GPUS))
        visit.page.wait_for_selector("section[aria-label='GPUs'] .fault", state="detached")


def test_what_could_not_be_read_is_not_absent(browser: Browser) -> None:
    """Neither interfaces nor paths nor a limit; a GPU whose NVLinks were not read may have some."""
    made = snapshot()
    for name in ("network", "filesystem", "nvlink"):
        made.expect(name, 3600)
        made.put(name, failed(Reason.IO_ERROR, "broken"))
    made.expect("open_files", 3600)
    locked: tuple[Sample, ...] = (OPEN(7, "job", "bert"), LOCKED(2**30, "bert", "locked"))
    made.put("open_files", CollectionResult(CollectionOutcome.OK, locked))
    with shown(browser, made) as visit:
        assert "no physical interface" not in visit.panel("Network")
        assert "no paths configured" not in visit.panel("Disks")
        assert "NVLink unknown" in visit.panel("GPUs")
        assert "1.0 GiB of unknown" in visit.panel("Open files")
        locked += (LOCKED_LIMIT(math.inf, "bert"),)
        made.put("open_files", CollectionResult(CollectionOutcome.OK, locked))
        for name in ("network", "filesystem", "nvlink"):
            made.put(name, CollectionResult(CollectionOutcome.OK, ()))
        visit.wait("section[aria-label='Network']", "no physical interface")
        assert "no paths configured" in visit.panel("Disks")
        assert "no NVLink" in visit.panel("GPUs")
        assert "1.0 GiB of unlimited" in visit.panel("Open files")


def test_long_names_fit_a_phone(browser: Browser) -> None:
    """A job, its script and its evidence may have names as long as a label, without a place to
    break them.
    """
    name = "x" * 128
    made = snapshot()
    made.expect("open_files", 3600)
    files = (OPEN(7, "job", name), LIMIT(1024, "job", name), LOCKED(7, name, "locked"))
    made.put("open_files", CollectionResult(CollectionOutcome.OK, files))
    long = job(job=name, script=name, user=name, pid=7, evidence=name)
    with shown(browser, made, PHONE, jobs=[long]) as visit:
        assert name in visit.panel("Open files")
        assert visit.is_as_wide_as_its_window()


def test_the_page_does_not_judge(browser: Browser) -> None:
    """What the API finds is shown, whatever the samples say: no limit is left in the page."""
    text = {"part": "GPU 0", "summary": "made up", "detail": "`made` up <b>"}
    now = time.time()
    warning = finding(severity="warning", **text, source="", since=now - 180)
    with shown(browser, snapshot(), verdict="warning", findings=[warning], time=now) as visit:
        assert "1 problem found" in visit.text(".verdict")
        assert "made up <b>" in visit.text(".verdict")
        assert "for 3 min" in visit.text(".verdict")
        assert visit.page.locator(".gpus .mark.warn").count() == 1
    with shown(browser, snapshot(UP(0, "1", "GPU-b")), verdict="ok", findings=[]) as visit:
        assert "Healthy" in visit.text(".verdict")


def test_text_is_never_markup(browser: Browser) -> None:
    """Whatever a device, a path or an error says stays text."""
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    faults = (Fault(evil, Reason.IO_ERROR, evil),)
    made = snapshot()
    for name, result in (
        ("infiniband", CollectionResult(CollectionOutcome.OK, (PORT_UP(0, evil, evil),), faults)),
        ("memory", not_available(evil)),
    ):
        made.expect(name, 3600)
        made.put(name, result)
    with shown(browser, made) as visit:
        assert visit.text().count("<script>document.title='owned'</script>") >= 4
        assert visit.page.query_selector("main img, main script") is None
        assert "owned" not in visit.page.title()


def test_size() -> None:
    """All files of the page together stay below 150 KiB."""
    assert sum(file.stat().st_size for file in PAGE.iterdir()) < 150 << 10
