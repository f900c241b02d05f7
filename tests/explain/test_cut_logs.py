"""Genuine logs of hangs, cut as rotation and early copies cut them: nobody is accused for a gap.

A rank whose log lacks the time of the hang looks like one that never reached the collective. The
logs are those of `tests/nccl/pytorch/record.py`; the seeds are fixed.
"""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.explain import command
from dshealthd.explain import input as logs
from dshealthd.explain.finding import Finding
from dshealthd.explain.recognition import Recognizer
from dshealthd.explain.templates import Templates
from tests.explain.explaining import explained_paths
from tests.explain.test_collectives import dump_of
from tests.explain.test_genuine_nccl import RUNS
from tests.explain.test_layers import CAUGHT
from tests.nccl.pytorch.record import CULPRIT, SIZE

CUTS = 40
"""Random cuts of each run in each form."""
STEPS = "".join(f"step {step} | loss {2.5 - step / 10}\n" for step in range(3))
"""What each rank prints before it hangs."""
CONSOLE = "torchrun.log"
FINDER = Templates()
"""What all explanations here have learned together."""

Files = dict[str, str]


def explained(files: Files) -> Finding:
    """Explain some files."""
    recognizer = Recognizer()
    recognizer.find = FINDER
    for name, text in files.items():
        statistics = recognizer.found.statistics
        stream = io.BytesIO(text.encode())
        recognizer.add(name, logs.read(name, FINDER, statistics, stream))
    return command.conclude(recognizer)


def per_rank(files: Files) -> Files:
    """Return a log of each rank, and torchrun's own, as `--redirects=3` has them."""
    if CONSOLE not in files:
        return files
    parts = {f"rank{rank}.log": STEPS for rank in range(SIZE)} | {CONSOLE: ""}
    for line in files[CONSOLE].splitlines(keepends=True):
        if match := re.match(r"\[rank(\d+)\]:", line):
            parts[f"rank{match[1]}.log"] += line
        elif not line.startswith("step "):
            parts[CONSOLE] += line
    return parts


def in_order(files: Files) -> Files:
    """Return all lines in one log, each in its time."""
    if CONSOLE in files:
        return files
    timed = []
    for text in files.values():
        for line in text.splitlines(keepends=True):
            match = re.search(r"\d\d:\d\d:\d\d\.\d+", line)
            timed.append((match[0] if match else "", line))
    return {"job.out": "".join(line for _, line in sorted(timed, key=lambda item: item[0]))}


def forms(run: str) -> Iterator[tuple[str, Files]]:
    """Return what a run printed as one log, as one of each rank, and without the launcher's."""
    files = RUNS[run]
    separate = per_rank(files)
    yield "one log", in_order(files)
    yield "a log of each rank", separate
    yield "no console", {name: text for name, text in separate.items() if name != CONSOLE}
    if len(files) > 1:
        yield "one after another", {"job.out": "".join(files.values())}


def cut(files: Files, chance: random.Random) -> tuple[str, Files]:
    """Cut or drop one, some or all files, at the end of a line or within one; say how."""
    kind = chance.choice(("head", "tail", "both", "dropped"))
    names = list(files)
    if kind == "dropped" and len(names) > 1:
        gone = chance.sample(names, chance.randrange(1, len(names)))
        return f"{gone} dropped", {name: files[name] for name in names if name not in gone}
    chosen = {
        "one": [chance.choice(names)],
        "some": [name for name in names if chance.random() < 0.5],
        "all": names,
    }[chance.choice(("one", "some", "all"))]
    found = dict(files)
    within_lines = chance.random() < 0.5
    for name in chosen:
        units = list(files[name]) if within_lines else files[name].splitlines(keepends=True)
        start = 0 if kind == "tail" else chance.randrange(len(units) + 1)
        end = len(units) if kind == "head" else chance.randrange(start, len(units) + 1)
        found[name] = "".join(units[start:end])
    return f"{kind} of {chosen} cut", found


def is_symmetric(run: str) -> bool:
    """Tell whether no rank of a run is at fault."""
    return run.endswith("symmetric")


def outcome(run: str, finding: Finding) -> str:
    """Return right, unclear or wrong; wrong is an innocent rank, or a fabric that works."""
    blames_fabric = "fabric or a GPU may be the culprit" in finding.statement
    if is_symmetric(run):
        return "wrong" if finding.ranks else "right" if blames_fabric else "unclear"
    if set(finding.ranks) - {CULPRIT} or (blames_fabric and "unless" not in finding.statement):
        return "wrong"
    return "right" if finding.ranks else "unclear"


@pytest.mark.parametrize("run", RUNS)
def test_no_cut_has_an_innocent_rank_named(run: str) -> None:
    """Heads, tails and whole logs, of one rank, some or all: the culprit is named or nobody."""
    outcomes: Counter[str] = Counter()
    wrong = []
    for form, files in forms(run):
        for seed in range(CUTS):
            how, left = cut(files, random.Random(f"{run} {form} {seed}"))
            finding = explained(left)
            outcomes[outcome(run, finding)] += 1
            if outcome(run, finding) == "wrong":
                wrong.append(f"{form} {seed}, {how}: {finding.ranks} {finding.statement}")
    print(run, dict(outcomes))
    assert wrong == []
    assert outcomes["right"] >= 0.1 * outcomes.total()


@pytest.mark.parametrize("run", RUNS)
def test_no_end_of_a_line_is_a_place_where_a_cut_misleads(run: str) -> None:
    """One log with all ranks, rotated or copied at each line of a watchdog."""
    (text,) = in_order(RUNS[run]).values()
    lines = text.splitlines(keepends=True)
    wrong = []
    for number, line in enumerate(lines):
        if line.startswith("[rank"):
            for how, part in (("before", lines[:number]), ("after", lines[number:])):
                finding = explained({"job.out": "".join(part)})
                if outcome(run, finding) == "wrong":
                    wrong.append(f"{how} line {number}: {finding.ranks} {finding.statement}")
    assert wrong == []


@pytest.mark.parametrize("run", RUNS)
def test_a_cut_that_takes_nothing_of_the_hang_changes_nothing(run: str) -> None:
    """Steps from before the hang, and what the launcher prints of its own end."""
    for form, files in forms(run):
        cuts: list[Files] = []
        for name, text in files.items():
            if name == CONSOLE and form == "a log of each rank":
                lines = text.splitlines(keepends=True)
                cuts += [files | {name: "".join(lines[:5])}]
                continue
            started = text.splitlines(keepends=True)
            cuts += [files | {name: "".join(started[number:])} for number in (1, 2)]
            # All ranks are told to end; of a rank that alone says anything, the summary tells that
            # there are others.
            if name == CONSOLE and not run.endswith("silent-driver"):
                end = text.index("Traceback (most recent call last)")
                cuts.append(files | {name: text[:end]})
        for left in (files, *cuts):
            finding = explained(left)
            assert outcome(run, finding) == "right", (form, finding.statement)


@pytest.mark.parametrize("run", ["absent", "other-size", "other-operation"])
@pytest.mark.parametrize("gone", [rank for rank in range(SIZE) if rank != CULPRIT])
def test_what_the_culprit_itself_tells_needs_no_log_of_a_victim(run: str, gone: int) -> None:
    """It says which collective it last enqueued, or another operation than most of the others."""
    files = per_rank(RUNS[f"torchrun {run}"])
    del files[f"rank{gone}.log"]
    assert explained(files).ranks == (CULPRIT,)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (None, "rank 3 has no log here"),
        ("", "rank 3 has a log that begins after the hang"),
        (STEPS, "rank 3 has a log that may end before the hang"),
    ],
)
def test_an_unclear_answer_says_whose_log_is_missing(kept: str | None, reason: str) -> None:
    """All entered the same collective; the log of one of them lacks its report."""
    files = per_rank(RUNS["torchrun symmetric"])
    text = files.pop("rank3.log")
    if kept is not None:
        end = text[text.index("\n", text.index("last completed work")) + 1 :]
        files["rank3.log"] = kept or end
    finding = explained(files)
    assert finding.ranks == ()
    assert "unclear" in finding.statement
    assert reason in finding.statement
    assert any(reason in missing for missing in finding.missing)


@pytest.mark.parametrize(
    ("is_ended", "others", "is_missing"),
    [(False, 0, True), (True, 0, False), (True, 1, True)],
)
def test_the_only_log_with_its_launcher_s_summary_is_that_of_the_whole_job(
    *, is_ended: bool, others: int, is_missing: bool
) -> None:
    """Where only one rank has reported, nothing else tells its own log from that."""
    report = f"{CAUGHT.format(0)}\n"
    text = f"[rank0]: WORLD_SIZE=2\n[rank0]: step 9 | loss 2\n{report}"
    text += report.replace("Watch", "what(): Watch")
    if is_ended:
        text += "Failures:\nRoot Cause (first observed failure):\n  rank : 0 (local_rank: 0)\n"
        text += "  exitcode : -6 (pid: 7)\n====="
    finding = explained({"job.out": text, **dict.fromkeys(["other.out"] * others, "hello\n")})
    assert ("rank 1 has no log here" in finding.statement) is is_missing


def test_a_rank_that_was_aborted_first_is_not_at_fault_for_that() -> None:
    """Of the launcher's summary alone: watchdogs end the ranks that wait in the same way."""
    text = RUNS["torchrun absent"][CONSOLE]
    finding = explained({CONSOLE: text[text.index("W1123") :]})
    assert (finding.slug, finding.ranks) == ("child-failed", ())
    assert "rank 1" in finding.statement
    assert any("log of rank 1" in missing for missing in finding.missing)


def test_a_flight_recorder_that_is_missing_is_no_proof(tmp_path: Path) -> None:
    """Three ranks wait; of the fourth there is neither dump nor log, and it may wait as well."""
    for rank in range(SIZE - 1):
        data = dump_of(SIZE, number=42, behind=False)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)
    finding = explained_paths(tmp_path)
    assert finding.ranks == ()


@pytest.mark.parametrize(("ended", "end", "ranks"), [(3, "\n", (3,)), (2, "\n", ()), (3, "", ())])
def test_a_log_that_just_stops_is_proof_if_no_log_was_cut(
    tmp_path: Path, ended: int, end: str, ranks: tuple[int, ...]
) -> None:
    """As that of a stopped process does: not if a report lacks its end, or a line, since the logs
    may have been taken before the rank reported.
    """
    for rank in range(4):
        report = CAUGHT.format(rank)
        lines = [f"[rank{rank}]: WORLD_SIZE=4", f"[rank{rank}]: step 9 | loss 2.1"]
        lines += [report] * (rank < 3) + [report.replace("Watch", "what(): Watch")] * (rank < ended)
        (tmp_path / f"rank{rank}.log").write_text("\n".join(lines) + end)
    assert explained_paths(tmp_path).ranks == ranks


STATE = (
    "[rank0]:[E803 19:40:50.2 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank 0]  "
    "failure detected by watchdog at work sequence id: 7 PG status: last enqueued work: 7, last "
    "completed work: 6\n"
)
"""Of torch 2.5 and later, whose ranks report the time-outs of others."""


@pytest.mark.parametrize(
    ("code", "state", "ranks"),
    [(-15, "", (3,)), (-15, STATE, ()), (-6, "", ()), (1, STATE, (3,))],
)
def test_the_end_of_a_silent_rank_says_whether_its_log_is_whole(
    code: int, state: str, ranks: tuple[int, ...]
) -> None:
    """One that aborts has reported, and one that could be ended would have, if its torch does."""
    start = "[rank{0}]: WORLD_SIZE=4\n[rank{0}]: step 9 | loss 2.1\n"
    files = {f"rank{rank}.log": start.format(rank) for rank in range(4)}
    for rank in range(3):
        report = f"{CAUGHT.format(rank)}\n"
        files[f"rank{rank}.log"] += report + report.replace("Watch", "what(): Watch")
    files["rank0.log"] += state
    files[CONSOLE] = (
        "Failures:\nRoot Cause (first observed failure):\n  rank : 3 (local_rank: 3)\n"
        f"  exitcode : {code} (pid: 7)\n====="
    )
    assert explained(files).ranks == ranks


@pytest.mark.parametrize(
    ("last", "late", "ranks"),
    [
        ("40:50", "41:00.1", (3,)),
        ("40:50", "41:00.0", ()),
        ("41:10", "41:20.1", (3,)),
        ("41:10", "41:19.1", ()),
    ],
)
def test_silence_shows_ten_seconds_after_the_last_report(
    last: str, late: str, ranks: tuple[int, ...]
) -> None:
    """Of reports that lack their end, the log may lack another one."""
    reports = [CAUGHT.format(0), CAUGHT.format(1).replace("40:50", last), CAUGHT.format(2)]
    lines = ["WORLD_SIZE=4", *reports, f"2026-08-03 19:{late} [rank3]: up"]
    assert explained({"job.out": "\n".join(["step 1 | loss 2", *lines])}).ranks == ranks


def test_a_log_that_begins_within_a_line_is_of_no_rank_or_host() -> None:
    """What a torn line says may be half of a sentence; below another, it is of its rank."""
    known = "| distributed init (rank 2, local 2, world 8, node gpu-12)\n"
    line = "panic: the shard is of another size\n"
    for before, named in (("", ((), None)), ("step 1 | loss 2.5\n", ((2,), "gpu-12"))):
        finding = explained({"rank0.log": known, "rank2.log": before + line})
        assert (finding.outcome, finding.ranks, finding.host) == ("found", *named)
