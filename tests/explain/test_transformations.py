"""What keeps the truth keeps the answer: drawn jobs, and real logs as others would hand them in."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from dshealthd.explain import command
from dshealthd.explain.case import prepare
from dshealthd.explain.finding import Finding
from dshealthd.explain.input import Raw
from dshealthd.explain.recognition import Recognizer
from tests.explain.explaining import explained_files
from tests.explain.test_sureness import logs
from tests.explain.transformations import HOSTS, Files, drawn, renamed, transformed

DRAWN = 150
WANTED = 0.97
"""Share of drawn jobs whose cause, rank and host are right where their logs say them."""


def answer(finding: Finding) -> tuple[Any, ...]:
    """Return what an answer says."""
    root = finding.root.pattern if finding.root else ""
    return finding.outcome, root, finding.ranks, finding.host


def short(host: str | None) -> str | None:
    """Return a host's name without its domain."""
    is_name = host is not None and not host.replace(".", "").isdecimal()
    return host.partition(".")[0] if host is not None and is_name else host


def test_drawn_jobs_have_their_cause_rank_and_host() -> None:
    """Whatever says whose a line is, and whoever hands it in; and nobody else is ever named."""
    of: Counter[str] = Counter()
    right: Counter[str] = Counter()
    wrong = []
    for seed in range(DRAWN):
        job, chance = drawn(seed), random.Random(seed)
        how, files = chance.choice([("", job.files), *transformed(job.files, chance)])
        finding = explained_files(files)
        found = {"cause": finding.slug == job.slug and finding.outcome == "found"}
        if job.rank is not None:
            found["rank"] = finding.ranks == (job.rank,)
        if job.host is not None:
            found["host"] = short(finding.host) == short(job.host)
        found["no innocent"] = set(finding.ranks) <= {job.culprit} and (
            finding.host is None or job.host is None or short(finding.host) == short(job.host)
        )
        of.update(found.keys())
        right.update(name for name, is_right in found.items() if is_right)
        if not all(found.values()):
            wrong.append(f"{job.name}, {how}: {found} {answer(finding)}")
    print(dict(right), dict(of), *wrong, sep="\n")
    assert right["no innocent"] == DRAWN
    assert all(right[name] >= WANTED * of[name] for name in of), wrong
    assert min(of.values()) > DRAWN // 2


@pytest.mark.parametrize("number", logs())
def test_what_a_collector_or_a_person_does_to_a_log_changes_nothing(number: str) -> None:
    """No mark, record, head or healthy line says anything of the cause or of whose it is."""
    files = {"job.out": logs()[number]["log"].splitlines()}
    expected = answer(explained_files(files))
    wrong = {
        how: found
        for how, others in transformed(files, random.Random(number))
        if (found := answer(explained_files(others))) != expected
    }
    assert wrong == {}, expected


def known_hosts(files: Files) -> list[str]:
    """Return the hosts that logs are known to name."""
    recognizer = Recognizer()
    for name, lines in files.items():
        recognizer.add(name, [Raw(number, line) for number, line in enumerate(lines, 1)])
    host = command.conclude(recognizer).host
    names = prepare(recognizer.found, now=1.8e9).identities.names
    return sorted({*names, *([] if host is None else [host])})


@pytest.mark.parametrize("convention", HOSTS)
def test_hosts_of_another_convention_are_hosts(convention: str) -> None:
    """A site calls its nodes as it likes."""
    wrong = {}
    for number, label in logs().items():
        files = {"job.out": label["log"].splitlines()}
        if hosts := known_hosts(files):
            outcome, root, ranks, host = answer(explained_files(files))
            others, names = renamed(files, hosts, convention)
            found = answer(explained_files(others))
            if found != (outcome, root, ranks, names.get(host, host)):
                wrong[number] = found, host
    assert wrong == {}
