"""`dshealthd jobs --history` and `--report`: attempts merged over nodes, and what they print."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dshealthd.cli import main as cli
from dshealthd.findings.entry import Entry
from dshealthd.findings.record import NodeRecord
from dshealthd.jobs.goodput import Card, Slowest
from dshealthd.status.query import AgentAnswer
from dshealthd.status.runs import _attempt, runs
from tests.findings.test_record import fault
from tests.web.serving import serving

START = time.time() - 7200.0
WORK = {"work": 700.0, "wait": 200.0, "input": 50.0, "start": 50.0}


def attempt(number: int = 0, **other: Any) -> Entry:
    """Return an attempt of half an hour with two ranks on a node."""
    card = {
        "mark": number,
        "ranks": 2,
        "world_size": 4,
        "again": number > 0,
        "first_step": 90 * number,
        "times": WORK,
        "user": 1000,
        **other.pop("card", {}),
    }
    begin = START + 2000.0 * number
    given: dict[str, Any] = {
        "kind": "run",
        "what": "slurm-4711",
        "job": "slurm-4711",
        "says": "ended by itself",
        "reason": "ended",
        "begin": begin,
        "end": begin + 1800.0,
        "value": 100.0 + 100.0 * number,
    }
    return Entry(**given | other, card=Card(**card))


def slowest(rank: int, work: float, following: float) -> Slowest:
    """Return the slowest rank of a node, with steps of a second."""
    return Slowest(rank, work, 1.0, 0.5, following)


def test_an_attempt_is_merged_of_all_its_nodes() -> None:
    """From the first beginning to the last end; a step is made once the slowest node has made it,
    and takes as long as there. It runs while it does on one of them.
    """
    entries = [
        attempt(
            begin=START + at, end=START + 10 + at, value=100.0 - at,
            card={
                "again": at == 1, "first_step": 5 - at,
                "step_seconds": [1.0 + at, 9.0], "memory_peak_bytes": at,
            },
        )
        for at in (2, 1)
    ]  # fmt: skip

    def merged() -> dict[str, Any]:
        return _attempt([
            (AgentAnswer(f"n{at}", document={"entries": []}), entry, entry.card)
            for at, entry in enumerate(entries)
            if entry.card is not None
        ])  # fmt: skip

    found = merged()
    assert (found["begin"], found["end"]) == (START + 1, START + 12)
    assert (found["first_step"], found["step"]) == (3, 98.0)
    assert (found["step_seconds"], found["memory_peak_bytes"]) == ([3.0, 9.0], 2)
    assert (found["ranks"], found["nodes"], found["again"]) == (4, ["n0", "n1"], True)
    entries[1].end = None
    assert merged()["end"] is None
    entries[0].reason = "terminated"
    assert merged()["reason"] == "terminated"  # which ended the other one
    entries[0].reason = entries[1].reason = "hung"
    entries[0].part = "rank 3"
    assert merged()["part"] == "rank 3"  # not that nobody knows for whom the others wait
    for ranks, gain in ((1, None), (2, pytest.approx(0.2))):
        entries = [attempt(card={"ranks": ranks, "slowest": slowest(0, 0.8, 0.6)})]
        assert merged()["slowest"]["gain"] == gain


def test_what_is_one_attempt_of_several_nodes() -> None:
    """What begins while the run lasts on one of them, by its mark; another user's is another
    run.
    """

    def on(name: str, begin: float, end: float, **card: Any) -> AgentAnswer:
        entry = attempt(begin=START + begin, end=START + end, card=card)
        return AgentAnswer(name, document={"entries": [], "runs": [entry]})

    first = [on("n1", 0, 10), on("n2", 0, 100)]
    for late, attempts in (
        (on("n3", 100, 110), {"slurm-4711": 1}),
        (on("n3", 101, 110), {"slurm-4711": 2}),
        (on("n3", 50, 60, mark=7), {"slurm-4711": 2}),
        (on("n3", 50, 60, user=7), {"slurm-4711": 1, "slurm-4711 (uid 7)": 1}),
    ):
        found = runs([*first, late])
        assert {run: len(parts) for run, parts in found.items()} == attempts


def test_a_jobs_finding_belongs_to_the_attempt_in_which_it_began() -> None:
    """Not to the next one, into which a failure lasts, nor to the one that ended just before. What
    came back may be of either, and a broken part hits both.
    """
    attempts = [attempt(), attempt(1, begin=START + 1810.0, end=START + 3600.0)]
    for begin, seconds, other, expected in (
        (1809.0, 600.0, {}, [True, False]),
        (1810.0, 600.0, {}, [False, True]),
        (1809.0, 600.0, {"times": 2}, [True, True]),
        (1809.0, 600.0, {"part": "GPU 3"}, [True, True]),
        (1810.0, 600.0, {"part": "GPU 3"}, [True, True]),
    ):
        given = {"job": "slurm-4711", "part": "slurm-4711"} | other
        found = fault(START + begin, seconds, **given)
        made = AgentAnswer("n1", document={"entries": [found], "runs": attempts})
        (each,) = runs([made]).values()
        assert [bool(one["findings"]) for one in each] == expected


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Serve the records of two nodes: a rank of the second one failed first in the first attempt,
    whose GPU was lost, and the second attempt runs.
    """
    first, second = NodeRecord(None), NodeRecord(None)
    first.add(
        attempt(says="rank 0 failed", reason="failed", part="rank 0", card={"failed": START + 1790})
    )
    second.add(
        attempt(
            says="rank 3 was killed (SIGKILL)",
            reason="killed",
            part="rank 3",
            card={"failed": START + 1780},
        )
    )
    # As logs are read later, for two minutes after its end.
    second.add(fault(START + 1919, job="slurm-4711"))
    first.add(fault(START + 1919.5, part="GPU 7", job="slurm-4711"))
    second.add(fault(START + 1921, part="GPU 6", job="slurm-4711"))
    second.add(fault(START + 1779, part="GPU 5", job="slurm-9"))
    steps = {"step_seconds": [1.0, 1.1, 1.2, 9.0]}
    running = [
        attempt(
            1,
            end=None,
            says="runs",
            reason="",
            card=steps | {"slowest": slowest(rank, work, 0.6), "memory_peak_bytes": 71 << 30},
        )
        for rank, work in ((1, 0.7), (3, 0.8))
    ]
    for each in running:
        assert each.card is not None
        each.card.times = WORK | {"start": 0.0, "restart": 50.0}
    other = attempt(
        3,
        what="llama",
        job="slurm-5",
        end=START + 9e3,
        card={"times": {"unmeasured": 9.0}},
        says="hung: it waits",
        reason="hung",
        part="rank 1",
    )
    second.add(other)
    with (
        serving(history=lambda: first.document("n1", running[:1], time.time())) as one,
        serving(history=lambda: second.document("n2", running[1:], time.time())) as two,
    ):
        yield f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"


def run(*arguments: str) -> int:
    """Run the command line."""
    return cli.main(["jobs", *arguments])


def test_history(nodes: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each attempt once for all its nodes, with the rank that failed first on any of them and what
    its nodes found of the job; of no other job.
    """
    assert run("--history", *nodes) == 0
    printed = capsys.readouterr().out
    head, first, found, later, second, _, llama, last = printed.splitlines()
    assert (head, llama) == ("slurm-4711  2 attempts", "llama  1 attempt")
    assert "for 30 min  steps 0-100  4 ranks on 2 nodes  70% own work" in first
    assert first.endswith("own work  rank 3 was killed (SIGKILL) (on n2)")
    assert found.strip().startswith("n2: GPU 3: A GPU is lost to the driver (for ")
    assert later.strip().startswith("n1: GPU 7: ")
    assert "steps 90-200" in second
    assert second.endswith("  runs")
    assert last.endswith("own work not measured  rank 1: hung: it waits")
    assert "GPU 5" not in printed
    assert "GPU 6" not in printed
    assert run("--history", nodes[1]) == 0
    assert "(on n2)" not in capsys.readouterr().out  # of a single node


def test_report(nodes: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Over all attempts and nodes: the shares add up to one, and what is lacking is said."""
    assert run("--report", "slurm-4711", *nodes) == 0
    printed = capsys.readouterr().out
    shares = [float(line[46:].strip(" %")) for line in printed.splitlines()[2:7]]
    assert shares[0] == 70.0
    assert sum(shares) == pytest.approx(100.0, abs=0.3)
    assert "slowest rank: 3 on n2, own work 0.8 s a step, 1.60 times the usual" in printed
    assert "without it the job would gain 10%" in printed
    assert "step time: median 1 s, 95 % within 1.1 s" in printed
    assert "memory at its highest: 71.0 GiB of a GPU" in printed
    assert "restarts, until the first step has ended" in printed
    assert "A GPU is lost" in printed
    assert run("--report", "llama", nodes[1]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"not measured +100\.0%", printed)
    for lack in ("own work and waits are not told apart", "step time: not measured", "unknown"):
        assert lack in printed


def test_json(nodes: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """The same as a document; a node that does not answer has its error, and the status is 3."""
    assert run("--report", "slurm-4711", "--json", *nodes, "127.0.0.1:1") == 3
    printed = json.loads(capsys.readouterr().out)
    ((first, second),) = (each["attempts"] for each in printed["runs"])
    assert (first["node"], first["part"], first["ranks"]) == ("n2", "rank 3", 4)
    assert (second["end"], second["slowest"]["gain"]) == (None, pytest.approx(0.1))
    assert first["times"]["work"] == 1400.0
    assert list(printed["errors"]) == ["127.0.0.1:1"]


def test_nothing_is_known(nodes: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of a job without an attempt; of a node without any."""
    assert run("--report", "slurm-1", nodes[0]) == 3
    assert "no attempt of slurm-1 is known" in capsys.readouterr().out
    assert run("--report", "slurm-1", "--json", nodes[0]) == 3
    assert json.loads(capsys.readouterr().out)["runs"] == []
    body = NodeRecord(None).document("n1", (), 5.0)
    with serving(history=lambda: body) as served:
        assert run("--history", f"127.0.0.1:{served.port}") == 0
    assert "no attempt is known" in capsys.readouterr().out
