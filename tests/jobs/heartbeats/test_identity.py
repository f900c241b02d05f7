"""Who a pid is: what can be said of processes that vanish, are replaced, cannot be read, or hang
whoever reads them.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.environment import job_name
from dshealthd.jobs.heartbeats import identity
from dshealthd.jobs.heartbeats.identity import Identity, UnidentifiedSender, identify, same
from dshealthd.jobs.processes import TrainingProcess
from tests.jobs.heartbeats.senders import STRANGER, interpreter
from tests.jobs.machines import TORCH, Machine

ROOT = Path(__file__).parents[3]
BOOT = "8c0e2f0a-1111-2222-3333-444455556666"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with a rank, process 50 of user 1000."""
    machine = Machine(tmp_path / "proc")
    rank(machine)
    return machine


def rank(machine: Machine, *, user: int = 1000, start: int = 100, image: int = 7) -> None:
    """Make process 50 a rank of this user."""
    directory = machine.process(50, TORCH, start=start, image=image)
    (directory / "status").write_text(f"Name:\tpython\nUid:\t{user}\t0\t0\t0\nGid:\t0\t0\t0\t0\n")


def host(machine: Machine) -> Host:
    """Return the machine's roots."""
    return Host(procfs=machine.root)


def test_rank(machine: Machine) -> None:
    """A rank's job is named as everywhere; it is the same process until it ends."""
    found = identify(host(machine), 50, 1000)
    assert isinstance(found, Identity)
    process = found.process
    assert (process.job, process.launch.rank, process.start) == (job_name(TORCH, BOOT), 3, 100)
    assert same(host(machine), found)


def test_pid_of_another_user_by_now(machine: Machine) -> None:
    """The sender has ended and its pid is another user's: its messages are not that one's."""
    rank(machine, user=1001)
    assert identify(host(machine), 50, 1000) is UnidentifiedSender.GONE


@pytest.mark.parametrize(("start", "image"), [(101, 7), (100, 8)])
def test_pid_that_is_reused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, start: int, image: int
) -> None:
    """A process that started later, or runs another program, is not the one that was identified,
    nor the one that was just being read.
    """
    found = identify(host(machine), 50, 1000)
    assert isinstance(found, Identity)
    rank(machine, start=start, image=image)
    assert not same(host(machine), found)
    rank(machine)

    def read(*_: object) -> TrainingProcess:
        rank(machine, start=start, image=image)
        return found.process

    monkeypatch.setattr(identity, "read_process", read)
    assert identify(host(machine), 50, 1000) is UnidentifiedSender.GONE


def test_process_that_is_gone(machine: Machine) -> None:
    """A pid that is nobody's is gone, now and later."""
    found = identify(host(machine), 50, 1000)
    assert isinstance(found, Identity)
    machine.end(50)
    assert not same(host(machine), found)
    assert identify(host(machine), 50, 1000) is UnidentifiedSender.GONE


def test_no_launcher(machine: Machine) -> None:
    """A process without a launcher's variables has no rank."""
    (machine.root / "50/environ").write_bytes(b"HOME=/\0")
    assert identify(host(machine), 50, 1000) is UnidentifiedSender.NO_LAUNCHER


@pytest.mark.parametrize(
    ("file", "text"), [("stat", "garbage"), ("status", "Name:\tx\n"), ("status", "Uid:\tx\n")]
)
def test_answers_that_make_no_sense(machine: Machine, file: str, text: str) -> None:
    """What is not understood is unknown, and not a rank."""
    (machine.root / "50" / file).write_text(text)
    assert identify(host(machine), 50, 1000) is UnidentifiedSender.UNREADABLE


def test_environment_of_another_user() -> None:
    """Without privileges it is said that others' environments may not be read."""
    code = (
        "from dshealthd.core.host import Host; from dshealthd.jobs.heartbeats.identity "
        "import identify; print(identify(Host(), 1, 0))"
    )
    user = STRANGER if os.getuid() == 0 else None
    command = [interpreter(user), "-B", "-c", code]
    result = subprocess.run(
        command, user=user, group=user, cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert result.stdout == "permission_denied\n"
