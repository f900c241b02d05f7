"""`dshealthd probe`: the local probe as a process, and the matrix of pairs through running
agents.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dshealthd.cli import main as cli
from dshealthd.config.config import Config
from dshealthd.core.options import ConfigError
from dshealthd.probe.cli import local, pairs, report
from dshealthd.probe.cli.command import parse_steps
from dshealthd.probe.observation import Outcome, RoundKind, Timing
from dshealthd.probe.options import MembershipOptions
from dshealthd.probe.workers.job import RankResult, WorkerJob
from dshealthd.probe.workers.worker_pool import WorkerPool
from tests.command_line import dshealthd
from tests.doctor.machine import Machine
from tests.probe.peering import may_block
from tests.probe.services import NAMES, Agent, agents
from tests.waiting import eventually


def test_local() -> None:
    """Without configuration it runs here, names its stages, and prints one JSON document, with
    seconds and bytes per second, whose table has nccl-tests' columns.
    """
    done = dshealthd("probe", "--size", "8,32K,1M", "--repetitions", "5", "--json")
    assert done.returncode == 0, done.stderr
    stages = [line for line in done.stderr.splitlines() if line.startswith("stage ")]
    assert stages == [
        f"stage {stage}"
        for stage in ("import", "store", "init", "warm_up", *["sizes"] * 3, "verify")
    ]
    document = json.loads(done.stdout)
    assert (document["outcome"], document["kind"], document["ranks"]) == ("ok", "local", 2)
    assert document["versions"]["torch"]
    assert [(one["op"], one["size"], one["count"]) for one in document["timings"]] == [
        ("all_reduce", 8, 2),
        ("all_reduce", 32768, 8192),
        ("all_reduce", 1048576, 262144),
    ]
    timing = document["timings"][-1]
    assert timing["algbw"] == pytest.approx(1048576 / timing["seconds"])
    assert timing["busbw"] == pytest.approx(timing["algbw"], rel=0.01)  # 2(n-1)/n is 1 for two
    assert document["units"]["algbw"] == document["units"]["busbw"] == "bytes/s"
    lines = local.show_local(document).splitlines()
    microseconds, algorithm, _ = map(float, next(x for x in lines if " 1048576 " in x).split()[6:])
    assert algorithm == pytest.approx(1048576 / microseconds / 1e3, rel=0.01)
    assert {"# outcome: ok", "# Out of bounds values : 0 OK"} <= set(lines)
    assert any(re.fullmatch(r"# Avg bus bandwidth    : \d+\.\d{3} GB/s", line) for line in lines)


def test_no_torch() -> None:
    """An interpreter without torch is reported by name, with an exit status and no traceback."""
    done = dshealthd("probe", "--probe.python", "/nonexistent/python")
    assert done.returncode == 1
    assert "# outcome: failed, no_python" in done.stdout
    assert "/nonexistent/python" in done.stdout
    assert "such as --probe.python /opt/train/bin/python" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("processes", "gpus", "status", "said"),
    [
        ("4711:1000000", "idle", 3, "# outcome: declined, busy_gpu"),
        ("", "idle", 1, "# outcome: failed, no_python"),
        ("4711:1000000", "always", 1, "# outcome: failed, no_python"),
        ("", "never", 3, "# outcome: declined, policy_never"),
    ],
)
def test_no_collectives_beside_a_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    processes: str,
    gpus: str,
    status: int,
    said: str,
) -> None:
    """On GPUs that compute for somebody, nothing starts that could take their memory, unless the
    configuration says so; the message says where.
    """
    machine = Machine(tmp_path, monkeypatch, capsys, gpus=2)
    (machine.dev / "nvidiactl").touch()
    machine.simulator.set(1, "processes", processes)
    machine.config.write_text(f'[probe.policy]\ngpus = "{gpus}"\n', encoding="ascii")
    monkeypatch.setattr(local, "PATIENCE", 0.0)
    given: list[list[float]] = []
    run = WorkerPool.run

    async def kept(pool: WorkerPool, job: WorkerJob, *more: Any) -> list[RankResult]:
        given.append([*job.deadlines.values()])
        return await run(pool, job, *more)

    monkeypatch.setattr(WorkerPool, "run", kept)
    assert cli.main(["probe", *machine.paths, "--probe.python", "/nonexistent"]) == status
    output = capsys.readouterr().out
    assert said in output
    assert ("probe.policy.gpus" in output) is (status == 3)
    assert given == ([] if status == 3 else [[120.0, *[60.0] * 5]]), "nobody else waits"


@pytest.mark.parametrize(("flags", "message"), [
    (("--size", "8,x"), '--size: "x" is not a number of bytes up to 1G, such as 8, 32K or 64M'),
    (("--size", "2G"), '--size: "2G" is not'),
    (("--size", ",".join(["8"] * 33)), "--size: 33 sizes; must be at most 32"),
    (("--repetitions", "0"), "--repetitions: must be from 1 to 1000"),
    (("--repetitions", "1001"), "--repetitions: must be from 1 to 1000"),
    (("--kind", "pair"), "--kind: pair needs a hostfile, or members in the configuration"),
    (
        ("--hostfile", "/nonexistent"),
        "probe.peer: probes between nodes need the agents' key and address",
    ),
    (("--kind", "local", "--hostfile", "/nonexistent"), "--kind: local probes this machine alone"),
])  # fmt: skip
def test_bad_usage(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A usage error is reported in one line, with status 2."""
    assert cli.main(["probe", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "repetitions", "steps"),
    [
        (
            None, None,
            ((8, 20), (1024, 20), (32768, 20), (2**20, 20), (2**24, 5), (2**26, 5)),
        ),
        ("1, 2k,3MB ,1G", None, ((1, 20), (2048, 20), (3 * 2**20, 5), (2**30, 5))),
        ("8,1G", 1000, ((8, 1000), (2**30, 1000))),
    ],
)  # fmt: skip
def test_sizes(
    sizes: str | None, repetitions: int | None, steps: tuple[tuple[int, int], ...]
) -> None:
    """By default small ones twenty times, large ones five."""
    assert parse_steps(sizes, repetitions) == steps


def config(agent: Agent, hostfile_name: str = "") -> Config:
    """Return the configuration of a running agent's node."""
    options = agent.service.options
    if hostfile_name:
        options = replace(options, members=MembershipOptions(name=hostfile_name))
    return Config().with_section(options)


def hostfile(directory: Path, names: tuple[str, ...]) -> str:
    """Write a hostfile."""
    path = directory / "hostfile"
    path.write_text("".join(f"{name} slots=8\n" for name in names), encoding="ascii")
    return str(path)


@may_block
async def test_matrix(tmp_path: Path) -> None:
    """Every pair of a hostfile is probed once and printed, and the matrix shows who is gone."""
    async with agents(tmp_path, 3) as (one, two, gone):
        await eventually(lambda: all(agent.value("probe_up") for agent in (one, two, gone)))
        await gone.service.close()
        told: list[str] = []
        names = NAMES[:3]
        document = await pairs.probe_pairs(
            config(one, one.name),
            "test",
            hostfile(tmp_path, names),
            RoundKind.PAIR,
            ((8, 3),),
            told.append,
        )
        found = {frozenset(entry["members"]): entry for entry in document["rounds"]}
        assert len(told) == len(found) == 3
        well = found[frozenset((one.name, two.name))]
        assert (well["outcome"], well["kind"], well["reason"]) == (
            Outcome.OK,
            RoundKind.LIGHT,
            "no_python",
        )
        assert {
            found[frozenset((name, gone.name))]["outcome"] for name in (one.name, two.name)
        } == {Outcome.REFUSED}
        assert all(gone.name in entry["late"] for pair, entry in found.items() if gone.name in pair)
        assert document["outcome"] is Outcome.REFUSED
        text = pairs.show_pairs(document)
        assert text.count("refused") >= 5
        assert "   2 127.0.0.22" in text
        json.dumps(document)


@may_block
async def test_light_on_demand(tmp_path: Path) -> None:
    """A light matrix gives no reason for being light."""
    async with agents(tmp_path, 3) as members:
        await eventually(lambda: all(agent.value("probe_up") for agent in members))
        light = await pairs.probe_pairs(
            config(members[0]), "test", None, RoundKind.LIGHT, (), lambda _: None
        )
        assert light["outcome"] is Outcome.OK
        assert all({"parts", "uplink", "pairs"} <= one["report"].keys() for one in light["rounds"])
        assert [entry["reason"] for entry in light["rounds"]] == [""] * 3


@may_block
async def test_no_member(tmp_path: Path) -> None:
    """On a machine that is not in the hostfile, the message says so."""
    async with agents(tmp_path, 2) as members:
        with pytest.raises(ConfigError, match="is not one of the 1 members"):
            await pairs.probe_pairs(
                config(members[0], NAMES[0]),
                "test",
                hostfile(tmp_path, (NAMES[1],)),
                RoundKind.PAIR,
                (),
                print,
            )


def test_exit_statuses() -> None:
    """Every outcome has its own status, other than bad usage; the worst of several counts."""
    by_status = "ok failed usage declined unreachable refused unauthorized hung corrupted"
    found = {str(outcome): status for outcome, status in report.EXIT.items()} | {"usage": 2}
    assert sorted(found, key=found.__getitem__) == [*by_status.split(), "inconclusive"]
    assert sorted(found.values()) == [*range(10)]
    assert report.worst([Outcome.OK, Outcome.DECLINED, Outcome.HUNG]) is Outcome.HUNG
    assert report.worst([]) is Outcome.OK


def test_gpus_alone_are_all_listed() -> None:
    """Each collective is listed once, by its slowest rank, a GPU's own steps once per GPU."""
    timings = (
        *(
            Timing("all_reduce", 8, seconds, 1.0, part)
            for part, seconds in (("0", 1e-5), ("1", 2e-5))
        ),
        *(Timing("matrix_product", 64, 1e-3, 1.0, part) for part in ("1", "0")),
    )
    found = report.timing_rows(timings)
    assert [(timing.op, timing.part, timing.seconds) for timing in found] == [
        ("all_reduce", "", 2e-5),
        ("matrix_product", "0", 1e-3),
        ("matrix_product", "1", 1e-3),
    ]


def test_an_operation_that_took_no_time() -> None:
    """A node that measures wrongly does not end the report on all others."""
    assert report.timing_fields(Timing("all_reduce", 8, 0.0, 0.0))["algbw"] == 8e6


def test_checksums_are_compared_among_gpus() -> None:
    """Of one GPU nothing is said."""
    one = {"gpu": "0", "library": "cuBLAS", "checksum": 7}
    assert local.checksums([one]) == []
    assert local.checksums([one, one])[0].endswith("equal on 2 GPUs")
    assert len(local.checksums([one, one | {"checksum": 8}])) == 3


def test_a_pair_is_shown_by_its_largest_collective() -> None:
    """In the matrix, in GB/s."""
    timings = [{"size": size, "busbw": size * 1e9} for size in (1, 3, 2)]
    entry = {"members": ["a", "b"], "kind": "pair", "outcome": "ok", "reason": "", "late": []}
    document = {"kind": "pair", "members": ["a", "b"], "outcome": "ok"}
    text = pairs.show_pairs(document | {"rounds": [entry | {"timings": timings}]})
    assert "at 3 bytes" in text
    rows = ["           1      2", "   1       -  3.000", "   2   3.000      -"]
    assert text.splitlines()[1:4] == rows


def test_torch_stays_out_of_the_command() -> None:
    """The command itself imports no torch; its workers do."""
    code = (
        "import sys, dshealthd.probe.cli.command, dshealthd.probe.service; print('torch' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
