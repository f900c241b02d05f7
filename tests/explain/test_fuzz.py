"""Any text whatever: an answer comes, each claim stands in the log, time and memory are bounded.

`DSHEALTHD_FUZZ_CASES=10000` has that many cases instead of a few.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dshealthd.explain import answer, command
from dshealthd.explain import input as logs
from dshealthd.explain.patterns import load
from dshealthd.explain.recognition import Recognizer
from dshealthd.explain.tail import Tail
from tests.explain.explaining import peak_memory

CASES = int(os.environ.get("DSHEALTHD_FUZZ_CASES", "30"))
PREFIXES = (
    "", "", "", "[rank{n}]: ", "[default{n}]:", "{n}: ", "gpu-{n}: ", "[{n}.000001] ",
    "2026-01-05T10:00:{n:02d}.123 gpu-{n} train[4{n}]: ", "Jan  5 10:00:{n:02d} gpu-{n} kernel: ",
    "[E1122 04:44:{n:02d}.1 a.cpp:1] ", "gpu-{n}:4{n}:5 [{n}] NCCL WARN ", "(Worker pid={n}) ",
    '{{"log": "', "[1,{n}]<stderr>: ", "2026-01-05 10:00:{n:02d},5 ",
)  # fmt: skip
OTHERS = (
    "Traceback (most recent call last):", '  File "/srv/train.py", line 7, in step',
    "During handling of the above exception, another exception occurred:", "Failures:",
    "Root Cause (first observed failure):", "[0]:", "  time      : 2026-01-05_10:00:00",
    "  host      : gpu-1", "  rank      : 3 (local_rank: 3)", "  exitcode  : -9 (pid: 7)",
    "  traceback : Signal 9", "=====", "step 7 | loss 2.0", "loss: nan", "", " ", "\r", "\0",
    "attempts left; will restart worker group", "KeyError: 4", "ValueError", "99999999999999999999",
    "[PG ID 0 PG GUID 0(default_pg) Rank 999999999] last enqueued work: -1, last completed work: 5",
    "world_size=999999", "rank 5 nranks 8 NCCL INFO rank 5 nranks 8",
)  # fmt: skip
EXAMPLES = tuple(text for pattern in load().every for text in (*pattern.match, *pattern.no_match))

lines = st.builds(
    lambda prefix, number, text: prefix.format(n=number) + text,
    st.sampled_from(PREFIXES),
    st.integers(0, 99),
    st.one_of(
        st.sampled_from(EXAMPLES),
        st.sampled_from(OTHERS),
        st.text(max_size=60),
        st.builds("{}{}".format, st.sampled_from(EXAMPLES), st.text(max_size=20)),
        st.builds(lambda text, place: text[place:], st.sampled_from(EXAMPLES), st.integers(0, 60)),
    ),
)
files = st.lists(
    st.tuples(
        st.sampled_from(("job.out", "rank3.log", "attempt_1/0/stderr.log", "slurm-7.out", "e.txt")),
        st.lists(lines, max_size=40).map(lambda found: "\n".join(found).encode(errors="replace")),
    ),
    min_size=1, max_size=3,
)  # fmt: skip


def check(recognizer: Recognizer, contents: dict[str, bytes]) -> None:
    """An answer comes, and what it claims is quoted from the line that it names."""
    finding = command.conclude(recognizer)
    assert finding.outcome in {"found", "undecided", "nothing"}
    told: dict[str, Any] = json.loads(json.dumps(answer.document(finding, recognizer.found, [])))
    assert answer.text(finding, recognizer.found, [])
    if finding.outcome == "found":
        assert told["proof"]
        assert told["title"]
    for claim in (*told["proof"], *told["chain"]):
        line = contents[claim["file"]].decode("utf-8", "replace").split("\n")[claim["line"] - 1]
        assert claim["quote"].strip() in line.replace("\0", "")


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(files, st.integers(1, 400))
def test_any_log_gets_an_answer_that_its_lines_prove(
    found: list[tuple[str, bytes]], piece: int
) -> None:
    """Read whole, and as it grows piece by piece, cut anywhere."""
    import io

    recognizer = Recognizer()
    contents = {}
    for number, (name, data) in enumerate(found):
        path = f"/logs/{number}/{name}"
        contents[path] = data
        stream = io.BufferedReader(io.BytesIO(data))
        items = logs.read(path, recognizer.find, recognizer.found.statistics, stream)
        recognizer.add(path, items)
    check(recognizer, contents)
    grown = Recognizer()
    for path, data in contents.items():
        descriptor = os.memfd_create("log")
        try:
            tail = Tail(grown, path, os.fstat(descriptor))
            for start in range(0, len(data), piece):
                os.pwrite(descriptor, data[start : start + piece], start)
                while tail.read(descriptor, piece):
                    while tail.is_busy:
                        tail.work(lambda: True)
        finally:
            os.close(descriptor)
    check(grown, contents)


HUGE = "9" * 5000
"""More digits than Python turns into a number."""


@pytest.mark.parametrize(
    "text",
    [
        (
            "[rank1]:[E1122 04:44:58.4 a.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank 999999999]  "
            "failure detected by watchdog at work sequence id: 5 PG status: last enqueued work: 5, "
            "last completed work: 4\n[Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=808, OpType=ALLREDUCE, Timeout(ms)=600000) ran"
        ),
        (
            "Failures:\n  rank      : 999999999 (local_rank: 0)\n  exitcode  : 1 (pid: 7)\n"
            "RuntimeError: pair.cc:553] Connection closed by peer [10.0.0.4]:8852."
        ),
        (
            "[rank6]:[E429 13:55:49.3 x.cpp:1] [PG 0 Rank 6] Heartbeat monitor timed out! Process "
            "will be terminated\nFailures:\n  rank      : 999999999 (local_rank: 0)\n"
            "  exitcode  : 1 (pid: 7)"
        ),
        f"Failures:\n  rank      : {HUGE} (local_rank: {HUGE})\n  exitcode  : {HUGE} (pid: {HUGE})",
        f"(Worker pid={HUGE}) KeyError: 4",
        f"gpu-1:{HUGE}:{HUGE} [{HUGE}] NCCL WARN Net : Call to recv failed : Broken pipe",
        f"[{HUGE}.000001] Out of memory: Killed process {HUGE} (python)",
        f"exits with return code = {HUGE}",
        f"[PG 0 Rank {HUGE}] last enqueued work: {HUGE}, last completed work: {HUGE}",
    ],
)
def test_numbers_that_nobody_has_are_no_harm(text: str) -> None:
    """A rank of a thousand million would be as many ranks that said nothing."""
    contents = {"job.out": text.encode()}
    recognizer = Recognizer()
    raw = [logs.Raw(number, line) for number, line in enumerate(text.split("\n"), 1)]
    start = time.thread_time()
    recognizer.add("job.out", raw)
    check(recognizer, contents)
    assert time.thread_time() - start < 5


def test_names_without_end_take_no_memory_without_end(tmp_path: Path) -> None:
    """Hundreds of thousands of ranks, hosts, pids, groups and errors in one log."""
    chance = random.Random(1)
    templates = (
        "[rank{n}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n} GiB.",
        "2026-01-05T10:00:00 host{n} train[{n}]: step {n} | loss 2.0",
        "host{n}:{n}:{n} [1] NCCL INFO comm 0x1 rank {n} nranks 9 commId 0x{n:x} - Init COMPLETE",
        (
            "[rank{n}]:[E1122 04:44:58.4 ProcessGroupNCCL.cpp:2271] [PG ID {n} PG GUID {n}(g{n}) "
            "Rank {n}]  failure detected by watchdog at work sequence id: {n} PG status: last "
            "enqueued work: {n}, last completed work: 1"
        ),
        "[rank{n}]: Traceback (most recent call last):",
        "  rank      : {n} (local_rank: {n})\n  exitcode  : 1 (pid: {n})",
        "Ranks {n}, 3 failed to pass monitoredBarrier in 5000 ms",
    )
    text = "Failures:\n" + "".join(
        chance.choice(templates).format(n=number) + "\n" for number in range(40_000)
    )
    (tmp_path / "job.out").write_text(text)
    (tmp_path / "empty.out").write_text("step 1\n")
    grown = peak_memory(tmp_path / "job.out") - peak_memory(tmp_path / "empty.out")
    assert grown < 64 << 20
