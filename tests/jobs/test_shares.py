"""Who gets a place: users and jobs take turns, and age decides only among equals."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from dshealthd.jobs.shares import jobs_with_places, share_places
from tests.jobs.machines import training_process

MAX_JOBS = 16


class Entry(NamedTuple):
    """One that wants a place."""

    user: int
    job: str
    start: int


def chosen(entries: list[Entry], places: int) -> list[Entry]:
    """Return who gets one."""
    return share_places(entries, places, lambda entry: entry)


def test_an_idle_job_does_not_keep_out_the_same_users_next() -> None:
    """Of one user the jobs take turns."""
    idle = [Entry(1, "idle", start) for start in range(64)]
    new = [Entry(1, "new", 1000 + rank) for rank in range(8)]
    assert set(new) <= set(chosen(idle + new, 64))


def test_jobs_of_processes() -> None:
    """Sixteen old `sleep` of one user leave another user's job its series."""
    processes = [
        training_process(pid, start=pid, job=f"sleep-{pid}", user=1)
        for pid in range(2, 2 + MAX_JOBS)
    ]
    processes.append(training_process(90, start=90, job="run", user=2))
    found = jobs_with_places(processes)
    assert "run" in found
    assert len(found) == MAX_JOBS


def test_a_job_is_as_old_as_its_first_process() -> None:
    """A job that starts another process keeps its place among its user's."""
    jobs = [(f"sleep-{pid}", pid) for pid in range(2, 2 + MAX_JOBS)]
    processes = [
        training_process(pid, start=pid, job=job, user=1)
        for job, pid in [("run", 90), *jobs, ("run", 1)]
    ]
    assert "run" in jobs_with_places(processes)


@given(
    st.lists(
        st.builds(Entry, st.integers(0, 4), st.sampled_from(["a", "b", "c"]), st.integers(0, 1000)),
        max_size=60,
    ),
    st.integers(0, 40),
)
def test_nobody_has_two_more_than_who_wants_more(entries: list[Entry], places: int) -> None:
    """All places are given, and no user has two more than another one who got less than all."""
    found = chosen(entries, places)
    assert len(found) == min(places, len(entries))
    wanted, got = Counter(one.user for one in entries), Counter(one.user for one in found)
    assert all(got[user] <= wanted[user] for user in got)
    short = [got[user] for user in wanted if got[user] < wanted[user]]
    if short:
        assert max(got.values(), default=0) <= min(short) + 1
