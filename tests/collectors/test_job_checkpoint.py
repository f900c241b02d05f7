"""The checkpoints of running jobs, as a real process says where they are."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import dshealthd
from dshealthd.collectors import job_checkpoint
from dshealthd.collectors.job_checkpoint import JobCheckpoint
from dshealthd.core.collector import Reason, Sample
from dshealthd.core.result import CollectionResult
from tests.collectors.bench import Bench, named
from tests.collectors.bench import values as values_of
from tests.jobs.heartbeats.senders import interpreter
from tests.jobs.machines import TORCH, Machine, training_process

USER = 4321
SOURCE = Path(dshealthd.__file__).parent
JOB = f"slurm-{os.getpid()}"
WHOLE = {"missing": 0.0, "empty": 0.0, "cut_off": 0.0, "no_directory": 0.0}
FILE = b"PK\x03\x04" + b"weights" * 100 + b"PK\x05\x06" + bytes(18)
"""What begins and ends as torch writes it."""
CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from dshealthd.training.heartbeat import Heartbeat
heartbeat = Heartbeat()
heartbeat.step()
print("done", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="runs processes of another user")


class Rank(Bench):
    """A rank that does as it is told, and a collector that looks at it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__("job_checkpoint")
        self._process = process

    def do(self, line: str = "pass") -> None:
        """Have it run a line, and wait until it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def look(self, seconds: float = 30.0) -> CollectionResult:
        """Collect after so many seconds."""
        return self.collect(seconds)


@contextlib.contextmanager
def running(
    user: int | None = None, package: Path = SOURCE.parent, **variables: str
) -> Iterator[Rank]:
    """Run a rank of this test's job, with `dshealthd` below `package`."""
    process = subprocess.Popen(
        [interpreter(user), "-I", "-c", CODE, str(package)],
        env={**TORCH, "RANK": "0", "SLURM_JOB_ID": str(os.getpid()), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
    rank = Rank(process)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        yield rank
    finally:
        rank.collector.close()
        process.kill()
        process.communicate()


def package(place: Path) -> Path:
    """Return where any user can import what a training needs."""
    shutil.copytree(SOURCE / "training", place / "package/dshealthd/training")
    shutil.copy(SOURCE / "__init__.py", place / "package/dshealthd")
    return place / "package"


def save(directory: Path, tag: str, ranks: int = 2) -> Path:
    """Write a checkpoint as DeepSpeed does with ZeRO 2, `latest` last; return its folder."""
    folder = directory / tag
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mp_rank_00_model_states.pt").write_bytes(FILE)
    for rank in range(ranks):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(FILE)
    (directory / "latest").write_text(tag, encoding="ascii")
    return folder


def values(result: CollectionResult) -> dict[str, float]:
    """Return the values of the test's job by metric, without the prefix they share."""
    found = named(result, "job_checkpoint_")
    return {name: value for (name, *labels), value in found.items() if labels == [JOB]}


def problems(result: CollectionResult) -> dict[str, float]:
    """Return how many files have each problem."""
    found = values_of(result, job_checkpoint.PROBLEMS)
    return {problem: count for (job, problem), count in found.items() if job == JOB}


def faults(result: CollectionResult) -> list[Reason]:
    """Return why the checkpoints of this test's job cannot be looked at."""
    return [fault.reason for fault in result.faults if fault.part == f"checkpoints of {JOB}"]


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    """Nothing is known before the first save; then what the next one takes."""
    with running() as rank:
        assert values(rank.look()) == {}
        save(tmp_path, "global_step10")
        assert values(rank.look()) == {}
        rank.do(f"heartbeat.saved({str(tmp_path)!r}, deepspeed=True, optimizer_files=2)")
        result = rank.look()
        found, space = values(result), os.statvfs(tmp_path)
        assert found["next_bytes"] == 3 * len(FILE)
        assert 0 < found["free_bytes"] < space.f_blocks * space.f_frsize
        assert problems(result) == WHOLE
        assert faults(result) == []
        (save(tmp_path, "global_step20") / "more.pt").write_bytes(FILE)
        rank.do(f"heartbeat.saved({str(tmp_path)!r}, deepspeed=True, optimizer_files=2)")
        assert values(rank.look())["next_bytes"] == 4 * len(FILE)
        save(tmp_path, "global_step30")
        assert values(rank.look())["next_bytes"] == 4 * len(FILE)


def test_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    """Each problem is counted; one that is mended is looked at again, after a while."""
    folder = save(tmp_path, "global_step10", ranks=4)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(b"")
    (folder / "mp_rank_00_model_states.pt").write_bytes(FILE[:300])
    with running() as rank:
        rank.do(f"heartbeat.saved({str(tmp_path)!r}, deepspeed=True)")
        broken = {**WHOLE, "missing": 1.0, "empty": 1.0, "cut_off": 1.0}
        assert problems(rank.look()) == broken
        save(tmp_path, "global_step10", ranks=4)
        os.utime(tmp_path / "latest", (1, 1))
        assert problems(rank.look()) == WHOLE
        os.utime(tmp_path / "latest", (2, 2))
        (folder / "mp_rank_00_model_states.pt").unlink()
        assert problems(rank.look()) == {**WHOLE, "missing": 1.0}
        save(tmp_path, "global_step10", ranks=4)
        os.utime(tmp_path / "latest", (2, 2))
        assert problems(rank.look()) == {**WHOLE, "missing": 1.0}
        assert problems(rank.look(300.0)) == WHOLE


def test_fewer_files_than_the_training_was_to_write(tmp_path: Path) -> None:
    """The last ranks' files leave no gap; on disks of their own nodes they are not to be here."""
    save(tmp_path, "global_step10", ranks=2)
    with running() as rank:
        rank.do(f"heartbeat.saved({str(tmp_path)!r}, deepspeed=True, optimizer_files=8)")
        assert problems(rank.look()) == {**WHOLE, "missing": 6.0}
    with running() as rank:
        here = f"{str(tmp_path)!r}, deepspeed=True, optimizer_files=8"
        rank.do(f"heartbeat.saved({here}, node_local=True)")
        assert problems(rank.look()) == {key: 0.0 for key in WHOLE if key != "missing"}


def test_latest_names_nothing(tmp_path: Path) -> None:
    """The tag was deleted; what is no name at all is a fault, and nothing is said of it."""
    (tmp_path / "latest").write_text("global_step10", encoding="ascii")
    with running() as rank:
        rank.do(f"heartbeat.saved({str(tmp_path)!r}, deepspeed=True, optimizer_files=2)")
        assert problems(rank.look()) == {**WHOLE, "no_directory": 1.0}
        (tmp_path / "latest").write_text("../../etc", encoding="ascii")
        result = rank.look()
        assert (values(result), problems(result)) == ({}, {})
        assert faults(result) == [Reason.MALFORMED]


def test_nothing_is_looked_at_while_it_saves(tmp_path: Path) -> None:
    """What is written meanwhile is neither whole nor broken, and what was known stands."""
    folder = save(tmp_path, "global_step10")
    with running() as rank:
        rank.do(f"heartbeat.saved({str(tmp_path)!r}, deepspeed=True, optimizer_files=2)")
        before = rank.look()
        rank.do("heartbeat.enter('checkpoint')")
        (folder / "mp_rank_00_model_states.pt").write_bytes(b"")
        os.utime(tmp_path / "latest", (1, 1))
        during = rank.look(1000.0)
        assert (values(during), problems(during)) == (values(before), WHOLE)
        rank.do("heartbeat.step()")
        assert problems(rank.look()) == {**WHOLE, "empty": 1.0}


def test_a_training_without_deepspeed(tmp_path: Path) -> None:
    """There is the room, and nothing is said of files, whatever its own `latest` is: the name of a
    file, of a directory with its own files, a link to one.
    """
    (tmp_path / "model.pt").write_bytes(b"")
    (tmp_path / "step_10").mkdir()
    latest = tmp_path / "latest"
    with running() as rank:
        for text in (None, "model.pt", "step_10", "runs/step_10", ""):
            if text is not None:
                latest.write_text(text, encoding="utf-8")
            rank.do(f"heartbeat.saved({str(tmp_path)!r})")
            result = rank.look()
            assert (list(values(result)), problems(result)) == (["free_bytes"], {})
        latest.unlink()
        latest.symlink_to("step_10")
        result = rank.look()
        assert (list(values(result)), problems(result), faults(result)) == (["free_bytes"], {}, [])


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    """Whoever deletes it has no fault, and nothing is known."""
    directory = tmp_path / "checkpoints"
    save(directory, "global_step10")
    with running() as rank:
        rank.do(f"heartbeat.saved({str(directory)!r}, deepspeed=True, optimizer_files=2)")
        assert problems(rank.look()) == WHOLE
        directory.rename(tmp_path / "elsewhere")
        result = rank.look()
        assert (values(result), problems(result), faults(result)) == ({}, {}, [])


def test_only_the_node_of_rank_0_looks(tmp_path: Path) -> None:
    """A thousand nodes do not list one directory."""
    save(tmp_path, "global_step10")
    with running(RANK="8") as rank:
        rank.do(f"heartbeat.saved({str(tmp_path)!r}, deepspeed=True, optimizer_files=2)")
        result = rank.look()
        assert (values(result), problems(result)) == ({}, {})


def test_jobs_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the first may take all of the half second that a collection has for all."""
    machine = Machine(tmp_path / "proc")
    for job in (7, 8, 9):
        machine.process(10 + job, {**TORCH, "RANK": "0", "SLURM_JOB_ID": str(job)})
    node, looks = Bench("job_checkpoint", tmp_path), list[tuple[str, float]]()

    def look(_: object, job: str, _members: object, until: float) -> Iterator[Sample]:
        looks.append((job, until - node.collector.context.monotonic()))
        return iter(())

    monkeypatch.setattr(JobCheckpoint, "_job", look)
    for _ in range(3):
        node.collect(30.0)
    jobs = ["slurm-7", "slurm-8", "slurm-9"]
    assert looks == [(job, 0.5) for begin in (1, 2, 3) for job in jobs[begin:] + jobs[:begin]]


def test_so_many_processes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The four of rank 0 that started last, that one first."""
    searched: list[int] = []
    monkeypatch.setattr(job_checkpoint, "find_page", lambda _, pid: searched.append(pid))
    with contextlib.closing(Bench("job_checkpoint").collector) as collector:
        collector._reporter([training_process(pid, start=pid) for pid in range(10, 16)])
    assert searched == [15, 14, 13, 12]


@root_only
def test_read_with_the_rights_of_the_user(public_path: Path) -> None:
    """What the user may not read is a fault, and tells nothing of what lies there."""
    hidden = public_path / "hidden"
    save(hidden, "global_step10")
    hidden.chmod(0o700)
    with running(USER, package(public_path)) as rank:
        rank.do(f"heartbeat.saved({str(hidden)!r}, deepspeed=True, optimizer_files=2)")
        result = rank.look()
        assert (values(result), problems(result)) == ({}, {})
        assert faults(result) == [Reason.PERMISSION_DENIED]


@root_only
def test_no_fifo_and_no_device_is_opened(public_path: Path) -> None:
    """Whatever has the name of a checkpoint's file is opened only if it is one."""
    folder = save(public_path, "global_step10")
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    os.mkfifo(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").symlink_to("/dev/zero")
    with running(USER, package(public_path)) as rank:
        rank.do(f"heartbeat.saved({str(public_path)!r}, deepspeed=True, optimizer_files=3)")
        assert problems(rank.look()) == {**WHOLE, "missing": 2.0}
