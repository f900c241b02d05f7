"""The service of jobs: it keeps its socket open, says why it cannot, and hands hangs on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dshealthd.core.collector import NotAvailable, Reason, SourceError
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.jobs.hangs.detector import HangDetector
from dshealthd.jobs.hangs.judge import Standstill
from dshealthd.jobs.heartbeats.receiver import Receiver
from dshealthd.jobs.options import HangOptions, HeartbeatOptions
from dshealthd.jobs.service import Jobs
from dshealthd.training.message import Message
from tests.jobs.heartbeats.senders import STRANGER, sending
from tests.jobs.machines import TORCH
from tests.jobs.service import configured, jobs

OFTEN = Duration(0.1)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something to be so."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_removed_socket_is_made_again(tmp_path: Path) -> None:
    """A socket that somebody removed is back at the next turn, without a collection."""
    path = tmp_path / "h.sock"
    async with jobs(configured(HeartbeatOptions(socket=str(path), interval=OFTEN))):
        assert path.is_socket()
        path.unlink()
        await until(path.is_socket)
    assert not path.exists()


async def test_every_user_may_report(tmp_path: Path) -> None:
    """The socket is open to every user, as trainings run as any."""
    path = tmp_path / "h.sock"
    async with jobs(configured(HeartbeatOptions(socket=str(path)))):
        assert path.stat().st_mode & 0o777 == 0o666


async def test_the_socket_comes_with_its_directory(tmp_path: Path) -> None:
    """What was missing at the start is found later; until then the status says what is missing."""
    path = tmp_path / "later" / "h.sock"
    async with jobs(configured(HeartbeatOptions(socket=str(path), interval=OFTEN))) as (service, _):
        status = service.status()
        assert status["state"] == "off"
        assert str(path.parent) in status["detail"]
        path.parent.mkdir()
        await until(path.is_socket)
        assert service.status() == {"state": "ok"}


async def test_a_reload_keeps_senders(tmp_path: Path) -> None:
    """New options of the hangs leave the receiver and its senders alone."""
    heartbeats = HeartbeatOptions(socket=str(tmp_path / "h.sock"))
    async with jobs(configured(heartbeats, HangOptions())) as (service, _):
        receiver = service.heartbeats().receiver
        detector = service.hangs()
        with sending(tmp_path / "h.sock", TORCH) as sender:
            sender.tell(Message(step=1, sent=time.monotonic()))
            await until(lambda: receiver.received == 1)
            await service.apply(configured(heartbeats, HangOptions(floor=Duration(9.0))))
            assert service.heartbeats().receiver is receiver
            assert receiver.connections == 1
            assert service.hangs() is not detector
            detector = service.hangs()
            other = dataclasses.replace(heartbeats, interval=Duration(1.0))
            await service.apply(configured(other, HangOptions(floor=Duration(9.0))))
            assert service.heartbeats().receiver is not receiver
            assert service.hangs() is detector
        disabled = dataclasses.replace(heartbeats, enabled=False)
        await service.apply(configured(disabled, HangOptions(enabled=False)))
        assert not (tmp_path / "h.sock").exists()
        for ask in (service.heartbeats, service.hangs):
            with pytest.raises(NotAvailable):
                ask()


async def test_a_service_that_never_ran_can_be_closed() -> None:
    """An agent that fails to start closes all that it has."""
    await Jobs(time.monotonic, time.time).close()


async def test_hangs_that_are_watched_no_longer_are_over(tmp_path: Path) -> None:
    """Who is called is called at each look, and when the watch is switched off once more with none:
    a hang that nobody sees any more is not evidence of one.
    """
    calls: list[list[Standstill]] = []
    heartbeats = HeartbeatOptions(socket=str(tmp_path / "h.sock"))

    def on_look(hangs: Iterable[Standstill]) -> None:
        calls.append(list(hangs))

    watching = configured(heartbeats, HangOptions(interval=OFTEN))
    async with jobs(watching, on_look) as (service, _):
        await until(lambda: len(calls) > 1)
        await service.apply(configured(heartbeats))
        await asyncio.sleep(0)
        before = len(calls)
        await asyncio.sleep(0.3)
        assert len(calls) == before
        assert calls[-1] == []


async def test_suspicions_are_handed_on(tmp_path: Path) -> None:
    """A rank that is stopped makes its job suspected, once and once more, and that is all."""
    heartbeats = HeartbeatOptions(socket=str(tmp_path / "h.sock"))
    watching = configured(heartbeats, HangOptions(interval=OFTEN))
    told: list[str] = []
    service = Jobs(time.monotonic, time.time, on_suspicion=told.append)
    await service.apply(watching)
    with sending(tmp_path / "h.sock", TORCH) as sender:
        sender.tell(Message(step=1, sent=time.monotonic()))
        await until(lambda: bool(service.hangs().jobs))
        looks = service.hangs().jobs
        await until(lambda: service.hangs().jobs is not looks)
        assert told == []
        os.kill(sender.pid, signal.SIGSTOP)
        await until(lambda: len(told) == 2)
        assert set(told) == set(service.hangs().jobs)
    await service.close()


def show(proc: Path, pid: int, cgroup: str) -> None:
    """Let a machine have a process, in a control group of that name."""
    place = proc / str(pid)
    place.mkdir()
    for name in ("stat", "status", "environ", "schedstat"):
        (place / name).symlink_to(f"/proc/{pid}/{name}")
    (place / "cgroup").write_text(cgroup)


@pytest.mark.skipif(os.geteuid() != 0, reason="runs processes of other users")
@pytest.mark.parametrize("rank", ["3", "0"])
async def test_a_claim_before_the_job(tmp_path: Path, public_path: Path, rank: str) -> None:
    """Another user's process that reports as a rank of a job before the job does gives the name up
    once a process reports that the scheduler has put there: the job keeps its name and its step,
    and the silence of the other is no hang of it.
    """
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "self").symlink_to(str(os.getpid()))
    heartbeats = HeartbeatOptions(socket=str(public_path / "h.sock"))
    options = HangOptions(interval=OFTEN, floor=Duration(3.0))
    watching = configured(heartbeats, options, Host(procfs=proc))
    variables = {**TORCH, "SLURM_JOB_ID": "5000"}
    job, other = "slurm-5000", f"slurm-5000-uid{STRANGER}"
    async with jobs(watching) as (service, _):

        def steps() -> dict[tuple[str, int], int]:
            return {
                place: sender.message.step
                for place, senders in service.heartbeats().ranks().items()
                for _, sender in senders
                if sender.message is not None
            }

        def users() -> list[int | None]:
            return [state.user for state in service.hangs().jobs.get(job, ())]

        with contextlib.ExitStack() as stack:
            stranger = stack.enter_context(
                sending(public_path / "h.sock", {**variables, "RANK": rank}, user=STRANGER)
            )
            show(proc, stranger.pid, "0::/user.slice/job_5000\n")
            stranger.tell(Message(step=100, sent=time.monotonic()))
            await until(lambda: steps() == {(job, int(rank)): 100})
            await until(lambda: users() == [STRANGER])
            owner = stack.enter_context(
                sending(public_path / "h.sock", variables, user=STRANGER + 1)
            )
            show(proc, owner.pid, "0::/system.slice/slurmstepd.scope/job_5000/step_0\n")
            owner.tell(Message(step=1, sent=time.monotonic()))
            await until(lambda: steps() == {(job, 3): 1, (other, int(rank)): 100})
            await until(lambda: users() == [STRANGER + 1])
            # Past its first steps, so that it may soon be said to hang.
            stranger.tell(Message(step=200, sent=time.monotonic()))
            end, step = time.monotonic() + 120, 1
            while other not in service.hangs().standstills:
                step += 1
                owner.tell(Message(step=step, sent=time.monotonic()))
                await asyncio.sleep(0.1)
                assert job not in service.hangs().standstills
                assert users() == [STRANGER + 1]
                assert time.monotonic() < end, "the other's silence is no hang of its own"
            await until(lambda: steps()[job, 3] == step)


@pytest.mark.parametrize(("broken", "name"), [(Receiver, "refresh"), (HangDetector, "check")])
async def test_a_defect_is_not_health(
    tmp_path: Path, broken: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a turn that ended by a defect what was known before is not shown as if it were of now.

    The next turn that works ends it.
    """
    heartbeats = HeartbeatOptions(socket=str(tmp_path / "h.sock"), interval=OFTEN)
    raised: list[str] = []

    def defect(*_: object) -> None:
        message = "a defect"
        raise RuntimeError(message)

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(str(context["exception"])))
    async with jobs(configured(heartbeats, HangOptions(interval=OFTEN))) as (service, _):
        ask = service.heartbeats if broken is Receiver else service.hangs
        ask()
        with monkeypatch.context() as patched:
            patched.setattr(broken, name, defect)
            await until(lambda: bool(raised))
            with pytest.raises(SourceError) as caught:
                ask()
            assert caught.value.reason is Reason.INTERNAL
        before = len(os.listdir("/proc/self/fd"))
        await until(lambda: _answers(ask))
        assert len(os.listdir("/proc/self/fd")) == before


def _answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except SourceError:
        return False
    return True
