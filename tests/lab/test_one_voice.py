"""A hang of a real job is the same hang wherever one looks: node page, `dshealthd status` and
`jobs`, evidence, and the page to the phone name the same rank, or none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import dshealthd
from tests.lab import jobs
from tests.lab.forward import forwarded
from tests.lab.job_trials import LEARNS, LEARNT, deepspeed
from tests.lab.node import Node
from tests.lab.paging import Paging
from tests.lab.receiver import FIRING, Alert
from tests.waiting import until
from tests.web.browser import CHROMIUM, Visit, chromium

CULPRIT = 2
"""The rank that skips a collective: on the second node, whose other rank waits in it."""
SECONDS = 180.0
"""In which everything has come: the page takes some 70 s, the evidence some 60 s."""
HELD = 600.0

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@dataclass
class Voices:
    """What is said of the hang, and where."""

    page: Alert
    status: dict[str, Any] = field(default_factory=dict)
    """`/api/v1/status` by node."""
    said: dict[str, str] = field(default_factory=dict)
    """Everything else that names ranks, by place."""


def named(text: str) -> set[int]:
    """Return the ranks that a text speaks of."""
    return {int(rank) for rank in re.findall(r"\brank (\d+)\b", text, re.IGNORECASE)}


def cause(node: Node) -> str:
    """Return what the summary of a node's evidence says of the cause; empty before its end."""
    evidence = node.status()["evidence"]
    if not evidence["bundles"]:
        return ""
    summary = Path(evidence["directory"]) / evidence["bundles"][0] / "summary.txt"
    with contextlib.suppress(FileNotFoundError):
        text = summary.read_text(encoding="utf-8")
        if "HAS NOT ENDED" not in text:
            section = text.partition("What shows the cause\n")[2].partition("\n\n")[0]
            # Where each rank is does not say which of them is the culprit.
            return re.sub(r"\n  heartbeats of .*", "", section)
    return ""


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Voices]:
    """Let one rank of a DeepSpeed training skip a collective, and listen."""
    directory = tmp_path_factory.mktemp("voice")
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Paging(directory, 2, gpus=2))
        lab.until_watched()
        nodes = lab.lab.nodes
        job = stack.enter_context(jobs.torchrun(directory / "job", nodes, *deepspeed(1)))
        job.until(LEARNT, LEARNS)
        stack.enter_context(job.mishap("collective-skipped", CULPRIT))

        def paged() -> Alert | None:
            told = [alert for alert in lab.receiver.told("page") if alert.status == FIRING]
            return next(
                (alert for alert in told if alert.labels["symptom"] == "training-hang"), None
            )

        found = Voices(until(paged, lab.pending, SECONDS))
        found.said["page to the phone"] = found.page.annotations["description"]
        second = job.node_of(CULPRIT)
        found.said[f"evidence of {second.name}"] = until(lambda: cause(second), seconds=SECONDS)
        for node in nodes:
            found.status[node.name] = node.status()
            way = stack.enter_context(forwarded(node.station, node.agent.port))
            for command in ("status", "jobs"):
                found.said[f"{command} {node.name}"] = dshealthd(command, way).stdout
            if CHROMIUM is not None:
                with chromium() as browser:
                    visit = Visit(browser, f"http://{way}/")
                    visit.wait("body", "Jobs", 60.0)
                    texts = [visit.text(".verdict"), visit.panel("Jobs").partition("started by")[0]]
                    found.said[f"page of {node.name}"] = "\n".join(texts)
                    visit.page.close()
        yield found


def test_the_page_names_the_rank(voices: Voices) -> None:
    """The rules see all nodes: they name the rank that skipped the collective, and its node."""
    labels = voices.page.labels
    assert (labels["rank"], labels["reason"]) == (str(CULPRIT), "ahead")
    assert named(voices.page.annotations["description"]) == {CULPRIT}


def test_no_other_rank_is_named_anywhere(voices: Voices) -> None:
    """Every place names that rank or none, above all not its neighbor that waits."""
    for place, text in voices.said.items():
        print(f"--- {place}\n{text}")
        assert named(text) <= {CULPRIT}, place
    for status in voices.status.values():
        for job in status["jobs"]:
            assert {
                culprit["rank"] for culprit in (job["hang"] or {"culprits": ()})["culprits"]
            } <= {CULPRIT}
        for finding in status["findings"]:
            assert named(finding["detail"]) <= {CULPRIT}


def test_the_node_of_the_culprit_says_what_it_does_not_see(voices: Voices) -> None:
    """Page, commands and evidence of the culprit's node show a hang, and why they name no rank."""
    status = voices.status[voices.page.labels["node"]]
    (job,) = (job for job in status["jobs"] if job["job"] == voices.page.labels["training_job"])
    assert (job["state"], job["hang"]["cause"], job["hang"]["culprits"]) == ("hung", "desync", [])
    (finding,) = (one for one in status["findings"] if one["alert"] == "DshealthdJobHang")
    assert finding["severity"] == "critical"
    words = "ranks on other nodes are not seen from this node, so none is named"
    assert words in finding["detail"]
    for place in ("status", "jobs", "evidence of", "page of"):
        text = voices.said.get(f"{place} {voices.page.labels['node']}")
        assert text is None or words in " ".join(text.split()), place


def test_the_other_node_may_be_in_a_pause(voices: Voices) -> None:
    """The node all of whose ranks wait between two steps shows no hang of its own yet, as a page
    for that alone would wait; it keeps no evidence.
    """
    (other,) = (name for name in voices.status if name != voices.page.labels["node"])
    status = voices.status[other]
    (job,) = (job for job in status["jobs"] if job["job"] == voices.page.labels["training_job"])
    assert (job["state"], job["hang"]) == ("stalled", None)
    assert job["stall"]["says"].endswith("between two steps")
    assert 0 < job["stall"]["hung_in_seconds"] < HELD
    assert status["evidence"]["bundles"] == []
    assert not [one for one in status["findings"] if one["alert"] == "DshealthdJobHang"]
