"""`dshealthd evidence`: takes a bundle now, of a job that need not be hung."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.config.flags import EXIT_FAILURE
from dshealthd.core.collector import reason_in_words
from dshealthd.core.text import plural, print_lines, printable
from dshealthd.evidence import members
from dshealthd.evidence.bundle import SUMMARY
from dshealthd.evidence.findings import HangCase, NodeMembers
from dshealthd.evidence.options import EvidenceOptions
from dshealthd.evidence.service import Evidence, log_sources
from dshealthd.http.client import Access, local
from dshealthd.http.exchange import Unreachable

if TYPE_CHECKING:
    from dshealthd.config.config import Config


def evidence(loaded: Config, access: Access, *, job: str | None) -> int:
    """Take evidence of one job of this node, or of all; print the summary and the bundle's path.

    Return status 0 if a bundle was made.
    """
    step = members.search(loaded.path.host, job or "")
    if step.problem:
        print_lines(
            f"cannot inspect the processes of this node: {printable(step.problem)}", error=True
        )
        return EXIT_FAILURE
    found: NodeMembers = members.MEMBERS.read(step.value)
    if not found.ranks:
        print_lines(_nobody(job, found), error=True)
        return EXIT_FAILURE
    if not loaded.path.state.is_dir():
        print_lines(
            f"path.state: {loaded.path.state} is not a directory; set another place for the "
            "bundle with --path.state",
            error=True,
        )
        return EXIT_FAILURE
    job = job or only(found.jobs)
    document, metrics = _from_agent(loaded, access)
    print_lines(
        f"inspecting {plural(len(found.ranks), 'rank')}; this takes 10 to "
        f"{loaded.section(EvidenceOptions).deadline:.0f} s",
        error=True,
    )
    taker = Evidence(
        loaded.section(EvidenceOptions),
        loaded.path.state,
        loaded.path.host,
        metrics=metrics,
        document=lambda: document,
        monotonic=time.monotonic,
        wall=time.time,
    )
    taker.logs = log_sources(loaded)
    taken = asyncio.run(taker.collect(HangCase(job=job or "", reason="requested", always_ask=True)))
    if not taken.bundle:
        print_lines(
            f"no evidence was taken, {taken.outcome}: {printable(taken.detail)}", error=True
        )
        return EXIT_FAILURE
    place = taker.directory / taken.bundle
    try:
        print_lines((place / SUMMARY).read_text(encoding="utf-8"))
    except OSError as error:
        print_lines(f"{place / SUMMARY}: {error.strerror}", error=True)
    print_lines(f"{taken.outcome}: {place}")
    return 0


def only(jobs: Sequence[str]) -> str | None:
    """Return the node's only job, the default of `dshealthd evidence`; None if there are more."""
    return jobs[0] if len(jobs) == 1 else None


def _from_agent(loaded: Config, access: Access) -> tuple[Mapping[str, Any], Callable[[], str]]:
    """Return the running agent's status document, and a function that reads its exposition.

    Both are empty if it does not answer.
    """
    try:
        agent = local(loaded, access)
        document = agent.status()
    except Unreachable as error:
        problem = f"agent unreachable: {error}; steps, metrics and probe rounds will be missing"
        print_lines(problem, error=True)
        return {}, str

    def metrics() -> str:
        try:
            return agent.get("/metrics").decode(errors="replace")
        except Unreachable:  # the summary says that there are none
            return ""

    return document, metrics


def _nobody(job: str | None, found: NodeMembers) -> str:
    lines = [f"no job {job} on this node" if job else "no training process on this node"]
    if found.jobs:
        lines.append(f"jobs here: {', '.join(found.jobs)}")
    lines += [
        f"{plural(count, 'process', 'processes')} could not be inspected: {reason_in_words(reason)}"
        for reason, count in found.unseen.items()
    ]
    if os.geteuid() != 0:
        lines.append("run as root to see those of other users")
    return "; ".join(lines)
