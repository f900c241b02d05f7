"""How training processes are found, at what cost, and what happens to those that cannot be seen."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.core.collector import Fault, Reason
from dshealthd.jobs import processes
from dshealthd.jobs.processes import ProcessTable, Unseen
from dshealthd.linux.process import parse_stat
from tests.jobs.machines import TORCH, Machine, environ, stat_line

ENVIRON_LIMIT = 2 << 20
SWEEP_LIMIT = 32 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with nothing but its first process."""
    return Machine(tmp_path / "proc")


class Table(ProcessTable):
    """A process table whose sweeps are counted by the test, and whose looks at environments are
    noted.
    """

    def __init__(self, machine: Machine, blocked: str = "") -> None:
        self.looks: list[str] = []
        self.context = machine.context(self._approached)
        self.blocked = blocked
        super().__init__(self.context)

    def _approached(self, part: str) -> Fault | None:
        self.looks.append(part.removeprefix("process "))
        return Fault(part, Reason.TIMEOUT, "hung") if part == self.blocked else None

    def sweep(self) -> list[int]:
        """Return the training processes of a new sweep."""
        self.looks.clear()
        self.context.sweep += 1
        return [process.pid for process in self.refresh()]


@given(st.binary(max_size=64))
def test_stat_is_found_behind_any_name(comm: bytes) -> None:
    """A process may call itself anything."""
    stat = parse_stat(stat_line(7, comm=comm, state="R", parent=5, flags=64, start=12345, image=99))
    assert (stat.state, stat.parent, stat.flags) == ("R", 5, 64)
    assert stat.image == (stat.start, stat.environment) == (12345, 99)


def test_training_process(machine: Machine) -> None:
    """A process is told with its job, its place, its start and its parent."""
    machine.process(50, {**TORCH, "SLURM_JOB_ID": "9", "SECRET": "x"}, parent=40, start=77)
    table = Table(machine)
    table.sweep()
    (process,) = table.refresh()
    assert (process.pid, process.parent, process.start) == (50, 40, 77)
    assert (process.job, process.launch.rank) == ("slurm-9", 3)
    assert process.environment == {**TORCH, "SLURM_JOB_ID": "9"}


def test_once_a_sweep(machine: Machine) -> None:
    """Collectors that share the table in one sweep share one look at `/proc`."""
    table = Table(machine)
    table.sweep()
    machine.process(50, TORCH)
    assert table.refresh() == []
    assert table.sweep() == [50]


def test_ten_thousand_processes(machine: Machine) -> None:
    """Each environment is read once; the second sweep over 10,000 processes reads none, and checks
    a bounded share (fault 21).
    """
    for pid in range(1000, 10_999):
        machine.process_quickly(pid)
    machine.process(50, TORCH)
    table = Table(machine)
    assert table.sweep() == [50]
    assert len(table.looks) == 10_001
    # From now on, environments that are read would be found out: there are none.
    (machine.root / "50" / "environ").unlink()
    for pid in range(1000, 10_999):
        (machine.root / str(pid) / "environ").unlink()
    assert table.sweep() == [50]
    assert table.looks == []
    assert table.unseen == dict.fromkeys(Unseen, 0)
    assert [len([*table._turn(many)]) for many in (16, 1600, 10_000)] == [8, 100, 256]


def test_new_process_alone_is_read(machine: Machine) -> None:
    """A sweep reads the environments of new processes only."""
    machine.process(50, TORCH)
    table = Table(machine)
    table.sweep()
    machine.process(60, TORCH)
    assert table.sweep() == [50, 60]
    assert table.looks == ["60"]


def test_reused_pid(machine: Machine) -> None:
    """A pid that another process has taken is told by its start time, in either direction (fault
    22).
    """
    machine.process(50, TORCH, start=100)
    machine.process(60, {}, start=100)
    table = Table(machine)
    assert table.sweep() == [50]
    machine.process(50, {}, start=200)
    machine.process(60, TORCH, start=200)
    assert table.sweep() == [60]


def test_late_exec(machine: Machine) -> None:
    """A long-running process that starts training by exec is found, though its pid and start
    stay.
    """
    machine.process(50, {}, start=100, image=1)
    table = Table(machine)
    assert table.sweep() == []
    machine.process(50, TORCH, start=100, image=2)
    assert table.sweep() == [50]


@pytest.mark.parametrize(("start", "found"), [(999_801, [50]), (999_799, [])])
def test_young_process_is_looked_at_again(machine: Machine, start: int, found: list[int]) -> None:
    """A process seen between fork and exec, up to an age of two seconds, is read again in the next
    sweep, even if its addresses did not change; and then no more.
    """
    machine.process(50, {}, start=start)
    table = Table(machine)
    assert table.sweep() == []
    machine.process(50, TORCH, start=start)
    assert table.sweep() == found
    table.sweep()
    assert table.looks == []


def test_every_process_has_its_turn(machine: Machine) -> None:
    """Within sixteen sweeps every reuse among many processes is found out."""
    for pid in range(1000, 1400):
        machine.process_quickly(pid)
    table = Table(machine)
    table.sweep()
    for pid in range(1000, 1400):
        machine.process(pid, TORCH, start=999)
    found = [len(table.sweep()) for _ in range(20)]
    assert found[0] in {24, 25}  # process 1 has its turn, too
    assert found[14] < 400 == found[16]


def test_few_processes_have_their_turn_soon(machine: Machine) -> None:
    """Eight in each sweep at least."""
    for pid in range(100, 119):
        machine.process_quickly(pid)
    table = Table(machine)
    table.sweep()
    for pid in range(100, 119):
        machine.process(pid, TORCH, start=999)
    assert [len(table.sweep()) for _ in range(3)] in ([7, 15, 19], [8, 15, 19], [8, 16, 19])


def test_reading_is_bounded_in_a_sweep(machine: Machine) -> None:
    """Of huge environments, what is too much for one sweep waits for its turn (fault 22)."""
    crowd = SWEEP_LIMIT // ENVIRON_LIMIT + 4
    for pid in range(100, 100 + crowd):
        machine.process(pid, environ(TORCH) + b"X=" + b"x" * ENVIRON_LIMIT)
    table = Table(machine)
    first = table.sweep()
    assert 0 < len(first) < crowd
    assert (
        crowd <= len(first) + table.unseen[Unseen.DEFERRED] <= crowd + 1
    )  # the first process may wait, too
    assert len(table.sweep()) == crowd
    assert table.unseen[Unseen.DEFERRED] == 0


def test_users_take_turns(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts any number of processes with large environments does not keep those of another
    user from being read.
    """
    monkeypatch.setattr(processes, "SWEEP_LIMIT", 64 << 10)
    crowd = range(100, 148)
    for pid in crowd:
        machine.process(pid, environ(TORCH) + b"X=" + b"x" * 4096)
    for pid in range(50, 60):
        machine.process(pid, TORCH)

    class Users(Table):
        def _user(self, pid: str) -> int:
            return int(int(pid) in crowd)

    assert {*range(50, 60)} < {*Users(machine).sweep()}


def test_many_variables_are_bounded_in_a_sweep(machine: Machine) -> None:
    """Environments of so many empty variables, which cost more than their length, cannot hold up a
    sweep either.
    """
    for pid in range(100, 105):
        machine.process(pid, environ(TORCH) + b"\0" * 260_000)
    table = Table(machine)
    assert len(table.sweep()) == 2
    assert table.unseen[Unseen.DEFERRED] > 0
    for _ in range(5):
        found = table.sweep()
    assert len(found) == 5


def test_replaced_while_it_is_read(machine: Machine) -> None:
    """If another process took the pid between the reads, nothing is told of either until the next
    sweep.
    """
    machine.process(50, TORCH, start=100)

    class Replaced(Table):
        def _approached(self, part: str) -> Fault | None:
            if part == "process 50" and not self.looks.count("50"):
                machine.process(50, TORCH, start=300)
            return super()._approached(part)

    table = Replaced(machine)
    assert table.sweep() == []
    assert table.sweep() == [50]


def test_known_process_stays_known_while_it_hangs(machine: Machine) -> None:
    """A training process that comes to hang is still told: nothing of it needs to be read."""
    machine.process(50, TORCH)
    table = Table(machine)
    table.sweep()
    machine.process(50, TORCH, state="D")
    assert table.sweep() == [50]


@pytest.mark.parametrize(("content", "stat", "unseen"), [
    # A kernel thread and a zombie have no environment.
    ({}, {"flags": 0x00208040}, None),
    ({}, {"state": "Z"}, None),
    # To read that of a process that hangs in a driver may hang as well.
    ({}, {"state": "D"}, Unseen.BLOCKED),
    # Read in part only, without a launcher in it.
    ({"environ": b"X=" + b"x" * ENVIRON_LIMIT + b"\0" + environ(TORCH)}, {}, Unseen.UNREADABLE),
    ({"stat": b"50 (python) S 1\n"}, {}, Unseen.UNREADABLE),
    # It ends between the listing and any of the reads (fault 22).
    ({"environ": None}, {}, None),
    ({"environ": None, "stat": None}, {}, None),
])  # fmt: skip
def test_process_without_a_readable_environment(
    machine: Machine,
    content: dict[str, bytes | None],
    stat: dict[str, object],
    unseen: Unseen | None,
) -> None:
    """It is unseen where it may train, with the reason, and otherwise no training; the others are
    told. It is not looked at again in vain, and found once it can be read.
    """
    machine.process(60, TORCH)
    directory = machine.process(50, TORCH, **stat)  # type: ignore[arg-type] # handed through
    for name, data in content.items():
        (directory / name).write_bytes(data) if data else (directory / name).unlink()
    table = Table(machine)
    assert table.sweep() == [60]
    assert {reason for reason, count in table.unseen.items() if count} == {unseen} - {None}
    assert ("50" in table.looks) == ("environ" in content and "stat" not in content)
    table.sweep()
    assert table.looks == ["50"] * (content == {"environ": None})
    machine.process(50, TORCH, start=300)
    assert sorted(table.sweep()) == [50, 60]


@pytest.mark.parametrize(
    ("error", "unseen"),
    [(errno.EPERM, Unseen.PERMISSION_DENIED), (errno.EIO, Unseen.UNREADABLE)],
)
def test_process_whose_state_cannot_be_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: int, unseen: Unseen
) -> None:
    """As where `/proc` is mounted with hidepid=1; it is told apart from a defect."""

    def refuse(*_: object) -> None:
        raise OSError(error, "refused")

    table = Table(machine)
    monkeypatch.setattr(processes, "read_stat", refuse)
    assert table.sweep() == []
    assert {reason for reason, count in table.unseen.items() if count} == {unseen}


def test_quarantined_process(machine: Machine) -> None:
    """In a worker, a process at which it hung is left out and unseen; the others are told."""
    machine.process(50, TORCH)
    machine.process(60, TORCH)
    table = Table(machine, blocked="process 50")
    assert table.sweep() == [60]
    assert table.unseen[Unseen.BLOCKED] == 1


def test_hidepid(machine: Machine) -> None:
    """A `/proc` that does not even show the first process hides others."""
    table = Table(machine)
    table.sweep()
    assert not table.hidden
    shutil.rmtree(machine.root / "1")
    table.sweep()
    assert table.hidden


def test_no_permission() -> None:
    """Without privileges, other users' processes are counted as unseen; they are never "no job"."""
    program = """
import os
from dshealthd.core.collector import Context
from dshealthd.core.host import Host
from dshealthd.jobs.processes import ProcessTable, Unseen
table = ProcessTable(Context(host=Host()))
os.setgid(65534)
os.setuid(65534)
table.refresh()
print(table.unseen[Unseen.PERMISSION_DENIED])
"""
    if os.getuid() != 0:
        pytest.skip("takes root, to become nobody")
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, timeout=60
    )
    assert int(answer.stdout) >= 1
