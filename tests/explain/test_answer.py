"""The answer as JSON, as its documentation has it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from dshealthd.explain import answer, command
from dshealthd.explain.events import listed
from dshealthd.explain.facts import Recognized
from dshealthd.explain.patterns import load
from tests.explain.explaining import explained
from tests.explain.watchdogs import Group, Rank, printed

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
STORE = (
    "[rank{}]:[W729 10:15:17.5 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=76, "
    "addr=[localhost]:60950, remote=[localhost]:29500): Connection reset by peer"
)
PAGE = Path(__file__).parents[2] / "docs" / "explain.md"


def test_the_schema_is_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of the answer is on the page and no other; so are those of its parts."""
    ranks = [Rank(rank, rank, 8, 8, 7) for rank in range(3)]
    ranks[1] = Rank(1, 1, None, 7, 7)
    lines = printed("2.9", Group(0, "default_pg", ranks), random.Random(1))
    (tmp_path / "job.out").write_text("".join(f"{text}\n" for *_, text in sorted(lines)))
    assert command.main(["--json", str(tmp_path)]) == command.EXIT_FOUND
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == [1]
    page = PAGE.read_text("utf-8")
    table = page.partition("## JSON")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(told)
    assert f"| `schema` | {answer.SCHEMA} |" in table
    parts = {
        **told["exclude"],
        **told["groups"][0],
        **told["read"],
        **told["proof"][0],
        **told["chain"][0],
    }
    words = set(re.findall(r"`(\w+)`", table.rpartition("|\n")[2]))
    assert set(parts) <= words
    assert words - set(parts) == {
        "behind", "stuck", "missing", "mismatch", "symmetric", "unknown", "chain", "read",
        "exclude",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "when"),
    [
        (["2026-01-05 10:00:00 step 3 loss 2.0", "[rank3]: ValueError: no labels"],
         "after 2026-01-05T10:00:00"),
        (["2026-01-05 10:00:00 step 3 loss 2.0", "2026-01-05 10:09:00 ERROR ValueError: no labels"],
         "2026-01-05T10:09:00"),
        (["ChildFailedError:", "Root Cause (first observed failure):", "[0]:",
          "  time      : 2026-01-05_10:09:00", "  host      : gpu-7",
          "  rank      : 3 (local_rank: 3)", "  exitcode  : -11 (pid: 7)", "=" * 60],
         "2026-01-05T10:09:00"),
    ],
)  # fmt: skip
def test_a_time_of_an_earlier_line_is_said_to_be_one(lines: list[str], when: str) -> None:
    """An exception has none of its own: it may come minutes after the last line that has."""
    told = answer.text(explained(*lines), Recognized(), [])
    assert re.findall(r"^WHEN +(.*)", told, re.MULTILINE) == [when]


@pytest.mark.parametrize(
    ("line", "nodes"),
    [
        (("Jan  5 10:00:00 gpu-7 kernel: NVRM: Xid (PCI:0000:dc:00): 79, GPU has fallen off the "
          "bus."), ["gpu-7"]),
        ("srun: error: gpu-3: task 17: Out Of Memory", []),
        ("gpu-7: RuntimeError: CUDA error: out of memory", []),
        ("Jan  5 10:00:00 gpu-7 kernel: NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, MMU Fault", []),
    ],
)  # fmt: skip
def test_only_nodes_whose_own_part_failed_are_excluded(line: str, nodes: list[str]) -> None:
    """A job that needs too much memory needs it on any node, and a bug in a kernel fails
    anywhere.
    """
    finding = explained(line)
    told = answer.document(finding, Recognized(), [])["exclude"]
    options = [f"--exclude={node}" for node in nodes]
    assert (told["nodes"], told["slurm"]) == (nodes, "".join(options))
    text = answer.text(finding, Recognized(), [])
    assert re.findall(r"^EXCLUDE +(.*)", text, re.MULTILINE) == options
    assert bool(told["kubernetes"]) == bool(nodes)


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ([("RuntimeError: Rank 1, node gpu-82, device 1: Unexpected result "
           "nan")], "rank 1, host gpu-82, GPU 1"),
        (["Name:  trainer-3", "Node:  gpu-15/192.0.2.15", ("Message:  The node was low on "
                                                           "resource: ephemeral-storage.")],
         "pod trainer-3, host gpu-15"),
        (["ActorDiedError: gone", "\tpid: 87687", "\tip: 192.0.2.5",
          "The actor is dead because its worker process has died."],
         "host 192.0.2.5, pid 87687"),
        (["ActorDiedError: gone", "\tpid: none", "\tip: 192.0.2.5",
          "The actor is dead because its worker process has died."], ""),
        (["Jan  5 10:00:00 gpu-7 kernel: NVRM: Xid (PCI:0000:dc:00): 79, pid=1, off the bus."],
         "host gpu-7, pid 1, GPU 0000:dc:00"),
        ([f"[rank{n}]: {OOM} GPU {n} has a total" for n in (0, 1)], "all ranks alike"),
        ([f"[rank0]: {OOM} GPU 0 has a total"], "rank 0, GPU 0"),
        ([("[rank6]:[E429 13:55:49.3 x.cpp:1] [PG 0 Rank 6] Heartbeat monitor timed out! Process "
           "will be terminated")],
         "reported by rank 6"),
        ([("ERROR: the pod didn't start on node 3 of v2.1 in file run.py:12: invalid host "
           "memory")], ""),
        ([("kernel: a[77]: segfault at 7f ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 in "
           "x.so[7f]")], "pid 77"),
    ],
)  # fmt: skip
def test_where_has_what_the_lines_name_and_nothing_else(lines: list[str], where: str) -> None:
    """A keyword, a release, a file or an address in memory is no host; the GPU of one rank is not
    that of all.
    """
    told = answer.document(explained(*lines), Recognized(), [])
    assert (told["where"] or "") == where


def test_an_answer_is_short() -> None:
    """It is read by somebody in a hurry, and JSON has more of it."""
    told: dict[str, str] = {}
    for pattern in load().every:
        if (pattern.role, pattern.layer, pattern.weak) == ("cause", "program", False):
            told.setdefault(pattern.slug, pattern.match[0])
    assert len(told) > 9
    assert len(explained(*told.values()).against) == 6
    own = answer.text(explained("[rank3]: ValueError: no labels"), Recognized(), [])
    assert own.startswith("POSSIBLE   ValueError: no labels (rank 3)\nPROOF ")
    caught = ("ValueError: a label", "KeyError: 7", "RuntimeError: a shard")
    steps = [f"step {number} | loss 2.1" for number in range(10)]
    assert len(explained(*caught, *steps, OOM).against) == 2
    lost = [STORE.format(rank) for rank in range(42)]
    finding = explained("WORLD_SIZE=64", *(f"[rank{rank}]: {OOM}" for rank in range(9)), *lost)
    assert (len(finding.chain), len(finding.proof)) == (40, 4)
    text = answer.text(finding, Recognized(), [])
    assert listed(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert f"({listed(range(8))} and 1 more alike)" in text
    assert (text.count("store (localhost"), "… and 28 more" in text) == (12, True)


@pytest.mark.parametrize(
    ("length", "told", "shown", "quoted"),
    [(180, 180, 180, 187), (181, 181, 180, 188), (293, 200, 180, 300), (294, 200, 180, 300)],
)
def test_a_long_line_is_cut(length: int, told: int, shown: int, quoted: int) -> None:
    """To what a terminal holds; what happened is said once."""
    finding = explained("fatal: " + "shard ".ljust(length, "x"))
    assert (len(finding.statement), len(finding.proof[0].quote)) == (told, quoted)
    lines = answer.text(finding, Recognized(), []).splitlines()
    (line,) = (line for line in lines if line[11:].startswith("shard"))
    assert (len(line) - 11, line.endswith("…")) == (shown, told > shown)


def test_a_runbook_is_printed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of an answer is a command that works; a wrong name is bad usage."""
    assert command.main(["--runbook", "cuda-oom"]) == command.EXIT_NOTHING
    assert "out of memory" in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        command.main(["--runbook", "none"])
    assert error.value.code == command.EXIT_USAGE
    assert "there are address-in-use, agent-gone, " in capsys.readouterr().err
