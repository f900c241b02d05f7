"""The flight recorder of a rank, asked through its FIFO.

With real processes of the rank's user, some of which play tricks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.evidence import flight_recorder
from dshealthd.linux.forked import Ended
from tests.evidence.set_user_id import MIXED_RIGHTS, set_user_id_program
from tests.evidence.steps import take
from tests.stopwatch import Stopwatch

MAX_DUMP = 32 << 20

RANK_USER = 4321
RANK = """
import os, sys, time
pipe, dump, text = sys.argv[1:4]
if pipe:
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while True:
    try:
        asked = pipe and os.read(reader, 128)
    except BlockingIOError:
        asked = b""
    if asked:
        with open(dump, "w") as file:
            file.write(text)
    time.sleep(0.05)
"""


def give(path: Path) -> None:
    """Make it the rank's user's, where the tests run as root."""
    if os.geteuid() == 0:
        os.chown(path, RANK_USER, RANK_USER)


@pytest.fixture
def place(public_path: Path) -> Path:
    """A directory of the rank's user."""
    found = public_path / "user"
    found.mkdir()
    give(found)
    return found


@contextlib.contextmanager
def rank(place: Path, *, pipe: bool = True, text: str = "the dump") -> Iterator[int]:
    """Run a process that does as torch does, as a user of its own where the tests run as root, and
    give its pid.
    """
    arguments = [str(place / "fr_3.pipe") if pipe else "", str(place / "dump_3"), text]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", RANK, *arguments],
        stdout=subprocess.PIPE,
        cwd="/",
        # the environment of the tests may be out of the user's reach
        executable="/usr/bin/python3",
        user=RANK_USER if os.geteuid() == 0 else None,
        group=RANK_USER if os.geteuid() == 0 else None,
        extra_groups=[] if os.geteuid() == 0 else None,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            process.kill()


def recorded(pid: int, place: Path, **others: str) -> tuple[Ended, dict[str, bytes]]:
    """Ask the rank as a collection does."""
    environment = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{place}/fr_",
        "TORCH_FR_DUMP_TEMP_FILE": f"{place}/dump_",
        **others,
    }
    function = functools.partial(
        flight_recorder.collect, host=Host(), pid=pid, rank=3, environment=environment
    )
    return take(function, 60.0, MAX_DUMP + 1)


@pytest.mark.parametrize("old", ["", "old"])
def test_a_rank_dumps_when_it_is_asked(place: Path, old: str) -> None:
    """A byte in the FIFO makes the rank write its dump, which is taken, and not one that lies there
    from before; the rank goes on.
    """
    if old:
        (place / "dump_3").write_text(old)
        give(place / "dump_3")
    with rank(place) as pid:
        step, files = recorded(pid, place)
        assert Path(f"/proc/{pid}/stat").exists()
    assert step.problem == ""
    assert abs(step.value.pop("written") - time.time()) < 60
    assert step.value == {"file": f"rank-3-{pid}.flight-recorder.pickle", "note": ""}
    assert files == {f"rank-3-{pid}.flight-recorder.pickle": b"the dump"}


def test_another_job_s_rank_is_not_asked(place: Path) -> None:
    """Torch removes the FIFO of an earlier job with the same prefix, whose rank reads on; the one
    at its place is the later job's, which would dump for nothing and tell of itself.
    """
    with rank(place) as pid:
        (place / "fr_3.pipe").unlink()
        with rank(place):
            step, files = recorded(pid, place)
            assert step.problem == f"another process than the rank reads {place}/fr_3.pipe"
            assert files == {}
            time.sleep(0.5)
            assert not (place / "dump_3").exists()


@pytest.mark.parametrize(("newer", "older"), [("", "{}/dump_"), ("./{}/dump_", "")])
def test_a_rank_s_environment_says_where_dumps_go(place: Path, newer: str, older: str) -> None:
    """Torch before 2.8 knows TORCH_NCCL_DEBUG_INFO_TEMP_FILE; a relative prefix starts at the
    rank's working directory.
    """
    variables = {
        "TORCH_FR_DUMP_TEMP_FILE": newer.format(place),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": older.format(place),
    }
    with rank(place) as pid:
        step, _ = recorded(pid, place, **variables)
    assert step.problem == ""


def test_a_rank_that_is_stopped_leaves_its_old_dump_and_a_word(place: Path) -> None:
    """Who cannot answer may have dumped at the timeout: that dump is taken, and said to be old."""
    with rank(place) as pid:
        step, _ = recorded(pid, place)
        assert step.problem == ""
        os.kill(pid, signal.SIGSTOP)
        watch = Stopwatch()
        step, files = recorded(pid, place)
        assert watch.seconds() < flight_recorder.PATIENCE + 2
    assert step.problem == ""
    assert files == {f"rank-3-{pid}.flight-recorder.pickle": b"the dump"}
    assert step.value["note"].endswith("UTC, stale: no new dump")


def test_a_rank_that_is_stopped_and_never_dumped_is_said_to_be(place: Path) -> None:
    """Who cannot dump is not waited for as long as one who may."""
    with rank(place) as pid:
        os.kill(pid, signal.SIGSTOP)
        step, files = recorded(pid, place)
    assert (step.problem, files) == ("the process is stopped by a signal and cannot dump", {})


def test_a_rank_without_the_variables_is_said_to_be(place: Path) -> None:
    """Most trainings set nothing; that is a reason, not an error."""
    with rank(place, pipe=False) as pid:
        step, _ = recorded(
            pid, place, TORCH_NCCL_DEBUG_INFO_PIPE_FILE="", TORCH_FR_DUMP_TEMP_FILE=""
        )
        assert step.problem == (
            "its environment sets neither TORCH_NCCL_DEBUG_INFO_PIPE_FILE nor "
            "TORCH_FR_DUMP_TEMP_FILE"
        )
        step, _ = recorded(pid, place, TORCH_FR_DUMP_TEMP_FILE="")
        assert (
            step.problem
            == "its environment does not say where dumps go: TORCH_FR_DUMP_TEMP_FILE is not set"
        )


def test_a_link_in_the_fifo_s_place_is_not_followed(place: Path) -> None:
    """Not even to another FIFO of the same user."""
    with rank(place) as pid:
        (place / "fr_3.pipe").rename(place / "real")
        (place / "fr_3.pipe").symlink_to(place / "real")
        step, _ = recorded(pid, place)
    assert "fr_3.pipe" in step.problem
    assert not (place / "dump_3").exists()


def test_a_dump_that_is_a_link_is_not_followed(place: Path, public_path: Path) -> None:
    """A dump linked to a file that only the agent can read gets nothing of it into the bundle."""
    secret = public_path / "secret"
    secret.write_text("of the agent")
    secret.chmod(0o600)
    (place / "dump_3").symlink_to(secret)
    with rank(place, pipe=False) as pid:
        step, files = recorded(pid, place)
    assert step.problem
    assert files == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="takes files of several users")
def test_a_way_through_a_link_has_the_rank_s_own_rights_only(
    place: Path, public_path: Path
) -> None:
    """A folder that is a link leads no further than the rank's user gets, though the agent is
    root.
    """
    secrets = public_path / "secrets"
    secrets.mkdir(mode=0o700)
    (secrets / "dump_3").write_text("of the agent")
    (place / "way").symlink_to(secrets)
    with rank(place, pipe=False) as pid:
        step, files = recorded(pid, place, TORCH_FR_DUMP_TEMP_FILE=f"{place}/way/dump_")
    assert "Permission denied" in step.problem
    assert files == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="runs a set-user-id program")
def test_a_rank_with_root_s_rights_has_no_dump_taken(place: Path) -> None:
    """A rank that executes a set-user-id program gets no file read with that program's rights."""
    (place / "dump_3").write_text("of root")
    (place / "dump_3").chmod(0o600)
    os.mkfifo(place / "fr_3.pipe")
    reader = os.open(place / "fr_3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    with set_user_id_program(place, RANK_USER) as pid:
        step, files = recorded(pid, place)
    asked = os.read(reader, 128)
    os.close(reader)
    assert step.problem == f"[Errno 1] {MIXED_RIGHTS}"
    assert (step.value, files, asked) == (None, {}, b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="takes files of several users")
def test_a_dump_of_another_user_is_refused(place: Path) -> None:
    """What the rank's user did not write is no dump of the rank."""
    (place / "dump_3").write_text("of root")
    with rank(place, pipe=False) as pid:
        step, files = recorded(pid, place)
    assert step.problem == f"{place}/dump_3 belongs to user 0, and the process to {RANK_USER}"
    assert files == {}


def endless(place: Path) -> None:
    """Make a dump longer than any that is taken."""
    with (place / "dump_3").open("wb") as file:
        file.truncate(100 << 20)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        # and not, after PATIENCE, that no dump appeared
        (lambda place: os.mkfifo(place / "fr_3.pipe"), "no process reads {}/fr_3.pipe"),
        (lambda place: (place / "fr_3.pipe").write_text("precious"), "{}/fr_3.pipe is not a FIFO"),
        (lambda place: (place / "dump_3").mkdir(), "{}/dump_3 is not a regular file"),
        (lambda place: os.mkfifo(place / "dump_3"), "{}/fr_3.pipe: No such file or directory"),
        (endless, "its dump is longer than 32 MiB"),
    ],
    ids=["FIFO without reader", "no FIFO", "directory", "dump that never begins", "endless dump"],
)
def test_what_torch_did_not_make_is_left(
    place: Path, make: Callable[[Path], object], problem: str
) -> None:
    """In the place of FIFO or dump it is told, neither waited for, written to nor taken."""
    make(place)
    (made,) = place.iterdir()
    give(made)
    before = made.stat().st_size
    with rank(place, pipe=False) as pid:
        step, files = recorded(pid, place)
    assert (step.problem, files) == (problem.format(place), {})
    assert made.stat().st_size == before
