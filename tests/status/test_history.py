"""`dshealthd history` against real servers, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dshealthd.cli import main as cli
from dshealthd.findings.entry import Entry
from dshealthd.findings.past import DAY
from dshealthd.findings.record import NodeRecord
from dshealthd.jobs.goodput import Card
from tests.findings.test_record import NOW, fault
from tests.web.serving import serving


def recorded() -> NodeRecord:
    """Return the record of a node with a crash, a lost GPU and a port that flapped a month ago."""
    made = NodeRecord(None)
    texts: dict[str, Any] = {"says": "A fabric port is down", "reason": "", "part": "mlx5_2/1"}
    made.add(fault(NOW - 40 * DAY, severity="warning", times=3, **texts))
    noon = NOW - 3 * DAY + 4 * 3600
    made.add(fault(noon, 7200, job="run\x1b[2J-1"))
    hang: dict[str, Any] = {
        "what": "JobHang",
        "says": "Training job is hung",
        "part": "run-2",
        "job": "run-2",
    }
    made.add(fault(noon + 8000, 300, reason="rank 2 is stopped (SIGSTOP)", **hang))
    made.begin(NOW - 60, ("a", 3600.0), crashed=True)
    return made


@pytest.fixture
def port() -> Iterator[int]:
    """Serve the record of a node, with a fault that lasts."""
    lasting = fault(NOW - 600, part="GPU 7")
    lasting.end = None
    document = recorded().document("n1", [lasting], NOW)
    with serving(history=lambda: document) as served:
        yield served.port


def run(*arguments: str) -> int:
    """Run the command line."""
    return cli.main(["history", *arguments])


def test_text(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A strip of 30 days, and each entry since then in words; what users name moves no cursor."""
    assert run(f"127.0.0.1:{port}") == 0
    head, strip, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("n1  record since ")
    assert strip.split("|")[1] == f"{'':26}C  C"
    assert [line.split("  ", 2)[2].strip() for line in lines] == [
        "CRITICAL  GPU 3: A GPU is lost to the driver (for 2 h, job run\\u001b[2J-1): Xid 79",
        "CRITICAL  run-2: Training job is hung (for 5 min): rank 2 is stopped (SIGSTOP)",
        "The node booted",
        "CRITICAL  GPU 7: A GPU is lost to the driver (for 10 min until now): Xid 79",
        "Agent 0.1.0 started after a crash",
    ]


def test_since(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As far back as asked: what has ended before is left out, what lasts is not."""
    assert run(f"127.0.0.1:{port}", "--since", "90d") == 0
    assert "mlx5_2/1: A fabric port is down (3 times within 60 s)\n" in capsys.readouterr().out
    assert run(f"127.0.0.1:{port}", "--since", "5m") == 0
    printed = capsys.readouterr().out
    assert "GPU 3" not in printed
    assert "GPU 7" in printed
    assert run(f"127.0.0.1:{port}", "--since", "a week") == 3
    assert 'command line: --since: "a week" is' in capsys.readouterr().err


def test_json_and_a_node_that_does_not_answer(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record as the API gives it, cut as asked; a node without an answer has its error, and the
    exit status is 3.
    """
    assert run("--json", "--since", "1h", f"127.0.0.1:{port}", "127.0.0.1:1") == 3
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    node, gone = printed["nodes"]
    assert [entry["kind"] for entry in node["entries"]] == ["finding", "agent"]
    assert (node["error"], len(node["days"])) == (None, 30)
    assert "refused" in gone["error"]
    assert run("127.0.0.1:1") == 3
    assert "refused" in capsys.readouterr().out


def test_nodes_to_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of which a fault of their own has struck the job, whether it lasts or not: none for
    what struck another job, is the job's own or of what nodes share, or stops no job.
    """
    now, made = NOW, NodeRecord(None)
    job: dict[str, Any] = {"job": "slurm-4711"}
    made.add(fault(now - 900, what="JobHang", part="slurm-4711", **job))
    made.add(fault(now - 900, what="PathFailing", part="/ckpt", **job))
    made.add(fault(now - 900, what="GpuRepairDue", severity="warning", **job))
    made.add(fault(now - 900, job="slurm-4710"))

    def asked(*more: str) -> tuple[int, str, str]:
        return left_out(made, "slurm-4711", capsys, *more)

    assert asked() == (0, "\n", "")
    code, out, _ = asked("--json")
    none = {"nodes": [], "slurm": "", "kubernetes": "", "deepspeed": ""}
    assert (code, json.loads(out)["exclude"]) == (0, none)
    made.add(fault(now - 600, part="GPU 5", **job))
    assert asked() == (0, "n1\n", "")
    code, out, _ = asked("--json")
    assert code == 0
    assert [entry["part"] for entry in json.loads(out)["nodes"]["n1"]] == ["GPU 5"]
    assert json.loads(out)["exclude"] == {
        "nodes": ["n1"],
        "slurm": "--exclude=n1",
        "kubernetes": "kubernetes.io/hostname notin (n1)",
        "deepspeed": "--exclude=n1",
    }
    code, out, err = asked("127.0.0.1:1")
    assert (code, out) == (3, "n1\n")
    assert "127.0.0.1:1: " in err
    code, out, _ = asked("127.0.0.1:1", "--json")
    assert (code, json.loads(out)["nodes"]["127.0.0.1:1"]) == (3, None)  # unknown, not innocent


def test_nodes_to_leave_out_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A run is known by its name, too: its jobs' nodes are left out. Of an unknown one, nothing is
    known, which is not that no node is to blame.
    """
    now, made = NOW, NodeRecord(None)
    card = Card(mark=1, ranks=1, again=False, times={"work": 1.0})
    for number, run in ((4711, "llama"), (4712, "llama"), (4713, "other")):
        made.add(Entry("run", run, "ended", now - 900, now - 800, job=f"slurm-{number}", card=card))
    for job, code, out, err in (
        ("llama", 0, "\n", ""),
        ("lama", 3, "\n", "nothing is known of lama\n"),
        ("slurm-471", 3, "\n", "nothing is known of slurm-471\n"),
    ):
        assert left_out(made, job, capsys) == (code, out, err)
    made.add(fault(now - 850, job="slurm-4713"))
    assert left_out(made, "llama", capsys) == (0, "\n", "")
    made.add(fault(now - 840, job="slurm-4712"))
    assert left_out(made, "llama", capsys) == (0, "n1\n", "")
    assert left_out(made, "slurm-4712", capsys) == (0, "n1\n", "")


def left_out(
    made: NodeRecord, job: str, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str, str]:
    """Return status and output of `jobs --exclude` for a node with this record."""
    document = made.document("n1", (), NOW)
    with serving(history=lambda: document) as served:
        code = cli.main(["jobs", "--exclude", job, f"127.0.0.1:{served.port}", *more])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"schema": 2}',
        NodeRecord(None).document("n1", (), 5.0)[:-1] + b',"x":1',
    ],
)
def test_an_answer_that_is_no_record(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an error of that node."""
    with serving(history=lambda: body) as served:
        assert run(f"127.0.0.1:{served.port}") == 3
    assert f"127.0.0.1:{served.port}" in capsys.readouterr().out


def test_a_record_that_begins_anew_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """So does one with entries of the future; an empty one is not healthy."""
    made = NodeRecord(None)
    made.add(fault(NOW + 400 * DAY))
    made.problem = "the node's record begins anew: it is not JSON"
    document = made.document("n1", (), NOW)
    with serving(history=lambda: document) as served:
        assert run(f"127.0.0.1:{served.port}") == 0
    printed = capsys.readouterr().out
    assert "begins anew" in printed
    assert "1 entry is dated in the future and left out" in printed
    assert f"|{' ' * 30}|" in printed
    assert "nothing within 30 d" in printed
