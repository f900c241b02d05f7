"""One failure in the many forms in which loggers, collectors and people hand it on."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dshealthd.explain import answer
from dshealthd.explain import input as logs
from dshealthd.explain.finding import Finding, decide
from dshealthd.explain.recognition import Recognizer
from tests.explain.explaining import explained_paths, explained_text

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/srv/train.py", line 7, in step',
    "    loss.backward()",
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
        "capacity of 79.15 GiB"
    ),
)


def explained(folder: Path, text: str) -> Finding:
    """Explain one log."""
    finding = explained_text(folder, text)
    lines = text.split("\n")
    for place in finding.proof:
        assert place.quote in lines[place.line - 1]
    return finding


@pytest.mark.parametrize("form", ["[rank3]: {}\n", "\x1b[36m[rank3]:\x1b[0m {}\n"])
def test_docker_writes_one_record_a_line(form: str, tmp_path: Path) -> None:
    """As `docker logs` has them on disk, and as Kubernetes does with Docker; colors are in them as
    JSON writes them.
    """
    text = "".join(
        json.dumps({"log": form.format(line), "time": "2026-01-05T10:00:00.123456789Z"}) + "\n"
        for line in TRACEBACK
    )
    finding = explained(tmp_path, text)
    assert (finding.slug, finding.ranks) == ("cuda-oom", (3,))
    assert finding.time == 1767607200.123456


def test_a_record_may_hold_a_whole_traceback(tmp_path: Path) -> None:
    """Structured loggers put all lines into one message; the proof is that line of the file."""
    records = [
        {"timestamp": "2026-01-05T10:00:00+01:00", "level": "INFO", "message": "step 3 loss 2.0"},
        {"ts": 1767607200.5, "host": "gpu-7", "msg": "\n".join(("it failed", *TRACEBACK))},
    ]
    finding = explained(tmp_path, "\n".join(map(json.dumps, records)) + "\n")
    assert (finding.slug, finding.host, finding.proof[0].line) == ("cuda-oom", "gpu-7", 2)


@pytest.mark.parametrize("key", ["error", "err", "reason"])
def test_a_record_has_its_reason_in_a_field_of_its_own(key: str, tmp_path: Path) -> None:
    """What a message is about is said behind it."""
    record = {"level": "error", "msg": "job failed", key: "deadline exceeded: waiting for worker-3"}
    text = "step 1 | loss 2\n" * 20 + json.dumps(record) + "\n"
    assert explained_text(tmp_path, text).statement == "deadline exceeded: waiting for worker-3"


def test_the_journal_as_json(tmp_path: Path) -> None:
    """`journalctl -o json` has microseconds, and bytes as numbers where they are no UTF-8."""
    message = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, GPU has fallen off the bus."
    for value in (message, [*message.encode(), 255]):
        record = {
            "__REALTIME_TIMESTAMP": "1767607200000000",
            "_HOSTNAME": "gpu-7",
            "MESSAGE": value,
        }
        finding = explained(tmp_path, json.dumps(record) + "\n")
        assert (finding.slug, finding.host, finding.time) == ("gpu-lost", "gpu-7", 1767607200.0)


@pytest.mark.parametrize(
    "text",
    [
        '{"loss": 2.0, "step": 3}',
        '{"message": 7}',
        '{"message": "cut',
        '{"MESSAGE": [1, 256]}',
        '{"message"' + "[" * 100_000,
    ],
)
def test_what_is_no_record_stays_a_line(text: str) -> None:
    """Metrics, half a record, and a message that is no text."""
    assert logs.lines(text) == [text]


@pytest.mark.parametrize("source", ["raylet", "raylet, ip=10.42.3.17", "pid=211, ip=10.42.3.17"])
def test_a_line_that_ray_forwards_has_its_own_time_and_host(tmp_path: Path, source: str) -> None:
    """Not the time of the line before: Ray's daemons and workers without a name write theirs."""
    text = (
        "[2026-01-05 09:00:00,001] [INFO] step 3\n"
        f"({source}) [2026-01-05 10:00:00,731 E 211 211] (raylet) node_manager.cc:3277: 1 Workers "
        "(tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed\n"
    )
    finding = explained(tmp_path, text)
    host = source.partition("ip=")[2] or None
    found = finding.slug, finding.time, finding.host
    assert found == ("host-memory-pressure", 1767607200.731, host)


def test_a_time_that_is_none_is_left_out() -> None:
    """A counter or a word in the place of a time does no harm."""
    for value in ("yesterday", True, None, 1e300, {"a": 1}):
        assert len(logs.lines(json.dumps({"msg": "a\nb", "time": value}))) == 2


@pytest.mark.parametrize(
    ("lines", "when"),
    [
        (["[E0102 23:00:00.5 a.cpp:1] {}"], "2027-01-02T23:00:00"),
        (["[E0103 01:00:00.5 a.cpp:1] {}"], "2026-01-03T01:00:00"),
        (["Dec 30 10:00:00 gpu-7 train[7]: {}"], "2026-12-30T10:00:00"),
        (["2024-12-31 23:59:50,1 step 9", "[E0101 00:00:10.5 a.cpp:1] {}"], "2025-01-01T00:00:10"),
        (["9999-12-31T23:59:59-05:00 gpu-7 train[7]: {}"], None),
    ],
)
def test_a_stamp_without_a_year_is_near_one_that_has_it(lines: list[str], when: str | None) -> None:
    """Else of the last year, up to half a day ahead of this clock: a log of December is read in
    January, too.
    """
    recognizer = Recognizer()
    text = "OSError: [Errno 28] No space left on device: '/a'"
    raw = [logs.Raw(number, line.format(text)) for number, line in enumerate(lines, 1)]
    recognizer.add("job.out", raw)
    finding = decide(recognizer.found, now=datetime(2027, 1, 2, 12, tzinfo=UTC).timestamp())
    assert answer.document(finding, recognizer.found, [])["time"] == when


def test_torchrun_prints_its_own_error_as_json(tmp_path: Path) -> None:
    """`error_handler` of torch 1.9 to 2.13, over several lines."""
    text = (
        "[ERROR] 2026-01-05 10:00:00,678 error_handler: {\n"
        '  "message": {\n'
        '    "message": "RendezvousConnectionError: The connection to the C10d store has '
        'failed.",\n'
        '    "extraInfo": {}\n'
    )
    assert explained(tmp_path, text).slug == "rendezvous-unreachable"


def test_an_abort_follows_from_the_exception_that_nobody_caught(tmp_path: Path) -> None:
    """C++ prints the exception, then the process aborts, then the shell says so."""
    text = (
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  NCCL "
        "Error 1: unhandled cuda error\nFatal Python error: Aborted\n./run.sh: line 12:  4242 "
        "Aborted                 (core dumped) python train.py\n"
    )
    assert explained(tmp_path, text).slug == "nccl-all-reduce-failed"
    alone = explained(tmp_path, "Fatal Python error: Aborted\n")
    assert alone.outcome == "undecided"
    assert alone.proof[0].quote == "Fatal Python error: Aborted"


@pytest.mark.parametrize(
    "text",
    [
        (
            "Installed CUDA version 11.5 does not match the version torch was compiled with 11.8 "
            "but since the APIs are compatible, accepting this combination\n"
            "Time to load cpu_adam op: 2.3 seconds\n"
        ),
        (
            "gpu1:1:2 [0] misc/ibvwrap.cc:212 NCCL WARN Call to ibv_open_device failed\n"
            "gpu1:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>\n"
            + "".join(f"step {number} | loss 2.{number}\n" for number in range(20))
        ),
        (
            "gpu1:1:2 [0] NCCL INFO Call to ibv_modify_qp failed with 110 Connection timed out, on "
            "dev mlx5_0:1, retrying 1/34 after 100 msec of sleep\n"
        ),
        (
            "[rank1]:[W1122 04:44:59.499 TCPStore.cpp:125] [c10d] recvValue failed on "
            "SocketImpl(fd=67, addr=[localhost]:52684, remote=[localhost]:29500): failed to recv, "
            "got 0 bytes\ntraining finished\n"
        ),
        (
            "[  +0.000005] pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data "
            "Link Layer\n"
        ),
    ],
)
def test_what_only_sounds_like_a_failure(tmp_path: Path, text: str) -> None:
    """Notices and retries of builds, adapters and stores that end nothing."""
    assert explained(tmp_path, text).outcome == "nothing"


def test_the_error_file_that_torchrun_keeps(tmp_path: Path) -> None:
    """One record that holds the whole traceback, beside the logs."""
    stack = (
        "Traceback (most recent call last):\n"
        '  File "/job/train.py", line 7, in main\n'
        "    save()\n"
        "OSError: [Errno 28] No space left on device: '/ckpt/a'\n"
    )
    error = {"message": "OSError: …", "extraInfo": {"py_callstack": stack, "timestamp": "1"}}
    path = tmp_path / "attempt_0" / "1" / "error.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"message": error}))
    finding = explained_paths(path)
    assert (finding.slug, finding.ranks) == ("disk-full", (1,))
    assert finding.root is not None
    assert "/job/train.py:7" in finding.root.says
