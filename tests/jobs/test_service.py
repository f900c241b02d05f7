"""The service of jobs: what a reload keeps, who owns a job, and that hangs are handed on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
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
from dshealthd.jobs.heartbeats.reader import HeartbeatReader
from dshealthd.jobs.options import HangOptions
from dshealthd.jobs.service import Jobs
from dshealthd.training.message import Message
from tests.jobs.heartbeats.senders import STRANGER, own_pages, sending
from tests.jobs.machines import TORCH
from tests.jobs.service import OFTEN, configured, jobs
from tests.waiting import eventually

SOON = Duration(0.1)


async def test_a_reload_keeps_senders() -> None:
    """New options of the hangs leave the reader and its senders alone."""
    async with jobs(configured(OFTEN, HangOptions())) as (service, _):
        reader = service.heartbeats()
        detector = service.hangs()
        with sending(TORCH) as sender:
            sender.tell(Message(step=1, sent=time.monotonic()))
            await eventually(lambda: len(reader.ranks()) == 1)
            await service.apply(configured(OFTEN, HangOptions(floor=Duration(9.0))))
            assert service.heartbeats() is reader
            assert len(reader) == 1
            assert service.hangs() is not detector
            detector = service.hangs()
            other = dataclasses.replace(OFTEN, interval=Duration(1.0))
            await service.apply(configured(other, HangOptions(floor=Duration(9.0))))
            assert service.heartbeats() is not reader
            assert service.hangs() is detector
        disabled = dataclasses.replace(OFTEN, enabled=False)
        await service.apply(configured(disabled, HangOptions(enabled=False)))
        for ask in (service.heartbeats, service.hangs):
            with pytest.raises(NotAvailable):
                ask()


async def test_rest_without_ranks() -> None:
    """Ranks are looked at as configured while there are some, else with the search for them."""
    heartbeats = dataclasses.replace(OFTEN, interval=Duration(0.3))
    async with jobs(configured(heartbeats, HangOptions(interval=SOON))) as (service, _):
        looking = service._looking
        assert looking is not None
        await eventually(lambda: looking.interval == 0.3)
        with sending(TORCH) as sender:
            sender.tell(Message(step=1, sent=time.monotonic()))
            await eventually(lambda: looking.interval == 0.1)


async def test_a_service_that_never_ran_can_be_closed() -> None:
    """An agent that fails to start closes all that it has."""
    await Jobs(time.monotonic, time.time).close()


async def test_hangs_that_are_watched_no_longer_are_over() -> None:
    """Who is called is called at each look, and when the watch is switched off once more with none:
    a hang that nobody sees any more is not evidence of one.
    """
    calls: list[list[Standstill]] = []

    def on_look(hangs: Iterable[Standstill]) -> None:
        calls.append(list(hangs))

    watching = configured(OFTEN, HangOptions(interval=SOON))
    async with jobs(watching, on_look) as (service, _):
        await eventually(lambda: len(calls) > 1)
        await service.apply(configured(OFTEN))
        await asyncio.sleep(0)
        before = len(calls)
        await asyncio.sleep(0.3)
        assert len(calls) == before
        assert calls[-1] == []


async def test_suspicions_are_handed_on() -> None:
    """A rank that is stopped makes its job suspected, once and once more, and that is all."""
    watching = configured(OFTEN, HangOptions(interval=SOON))
    told: list[str] = []
    service = Jobs(time.monotonic, time.time, on_suspicion=told.append, pages=own_pages)
    await service.apply(watching)
    with sending(TORCH) as sender:
        sender.tell(Message(step=1, sent=time.monotonic()))
        await eventually(lambda: bool(service.hangs().jobs))
        looks = service.hangs().jobs
        await eventually(lambda: service.hangs().jobs is not looks)
        assert told == []
        os.kill(sender.pid, signal.SIGSTOP)
        await eventually(lambda: len(told) == 2)
        assert set(told) == set(service.hangs().jobs)
    await service.close()


def show(proc: Path, pid: int, cgroup: str) -> None:
    """Let a machine have a process, in a control group of that name."""
    place = proc / str(pid)
    place.mkdir()
    for name in ("stat", "status", "environ", "schedstat", "fd"):
        (place / name).symlink_to(f"/proc/{pid}/{name}")
    (place / "cgroup").write_text(cgroup)


@pytest.mark.skipif(os.geteuid() != 0, reason="runs processes of other users")
async def test_a_claim_before_the_job(tmp_path: Path) -> None:
    """Another user's process that reports as a rank of a job before the job does gives the name up
    once a process reports that the scheduler has put there: the job keeps its name and its step,
    and the silence of the other is no hang of it.
    """
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "self").symlink_to(str(os.getpid()))
    options = HangOptions(interval=SOON, floor=Duration(3.0))
    watching = configured(OFTEN, options, Host(procfs=proc))
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
            stranger = stack.enter_context(sending(variables, user=STRANGER))
            show(proc, stranger.pid, "0::/user.slice/job_5000\n")
            stranger.tell(Message(step=100, sent=time.monotonic()))
            await eventually(lambda: steps() == {(job, 3): 100})
            await eventually(lambda: users() == [STRANGER])
            owner = stack.enter_context(sending(variables, user=STRANGER + 1))
            show(proc, owner.pid, "0::/system.slice/slurmstepd.scope/job_5000/step_0\n")
            owner.tell(Message(step=1, sent=time.monotonic()))
            await eventually(lambda: steps() == {(job, 3): 1, (other, 3): 100})
            await eventually(lambda: users() == [STRANGER + 1])
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
            await eventually(lambda: steps()[job, 3] == step)


@pytest.mark.parametrize(
    ("broken", "name"), [(HeartbeatReader, "refresh"), (HangDetector, "check")]
)
async def test_a_defect_is_not_health(
    broken: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a turn that ended by a defect what was known before is not shown as if it were of now.

    The next turn that works ends it.
    """
    raised: list[str] = []

    def defect(*_: object) -> None:
        message = "a defect"
        raise RuntimeError(message)

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(str(context["exception"])))
    async with jobs(configured(OFTEN, HangOptions(interval=SOON))) as (service, _):
        ask = service.heartbeats if broken is HeartbeatReader else service.hangs
        ask()
        with monkeypatch.context() as patched:
            patched.setattr(broken, name, defect)
            await eventually(lambda: bool(raised))
            with pytest.raises(SourceError) as caught:
                ask()
            assert caught.value.reason is Reason.INTERNAL
        gc.collect()  # descriptors that other tests of this process have left
        before = len(os.listdir("/proc/self/fd"))
        await eventually(lambda: _answers(ask))
        assert len(os.listdir("/proc/self/fd")) == before


def _answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except SourceError:
        return False
    return True
