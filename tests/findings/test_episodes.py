"""When a sign becomes a finding, and when it ends."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dshealthd.core import schema
from dshealthd.findings.episodes import Episodes
from dshealthd.findings.finding import Finding, State
from tests.status_documents import finding


def sign(part: str = "GPU 3", *, hold: float = 10.0, keep: float = 0.0, **fields: Any) -> Finding:
    """Return what a rule sees of a part."""
    usual = finding(part=part, reason="", since=None, hold_seconds=hold, keep_seconds=keep)
    made: Finding = schema.of(Finding).read(usual)
    return dataclasses.replace(made, **fields)


def parts(episodes: Episodes) -> list[str]:
    """Return the parts with findings."""
    return [finding.part for finding in episodes.verdict().findings]


@pytest.fixture
def episodes() -> Episodes:
    """Return the findings of an agent that has seen nothing yet."""
    return Episodes()


def test_interrupted_sign_begins_anew(episodes: Episodes) -> None:
    """A judgement without the sign restarts its hold, and the time since when it lasts."""
    episodes.update([sign()], 0.0, 1000.0)
    episodes.update([], 5.0, 1005.0)
    episodes.update([sign()], 8.0, 1008.0)
    episodes.update([sign()], 17.0, 1017.0)
    assert parts(episodes) == []
    episodes.update([sign()], 18.0, 1018.0)
    assert episodes.verdict().findings[0].since == 1008.0


def test_a_sign_is_watched_until_it_is_a_finding(episodes: Episodes) -> None:
    """What is held is told with the time since when it is seen, the first to be a finding first,
    and decides nothing; once it is a finding, or gone, it is watched no more.
    """
    episodes.update([sign("GPU 3", hold=30), sign("GPU 4", hold=60)], 0.0, 1000.0)
    episodes.update([sign("GPU 3", hold=30), sign("GPU 5", hold=10, since=7.0)], 12.0, 1012.0)
    watched = episodes.watched(13.0, 1013.0)
    assert [(one.part, one.since, one.hold_seconds) for one in watched] == [
        ("GPU 5", 1012.0, 10.0),
        ("GPU 3", 1000.0, 30.0),
    ]
    assert episodes.verdict().state is State.OK
    episodes.update([sign("GPU 3", hold=30)], 30.0, 1030.0)
    assert (parts(episodes), episodes.watched(30.0, 1030.0)) == (["GPU 3"], ())


def test_twenty_signs_are_shown(episodes: Episodes) -> None:
    """Those that are findings first; the others are no less counted once they are."""
    signs = [sign(f"GPU {n}", hold=100.0 - n) for n in range(21)]
    episodes.update(signs, 0.0, 1000.0)
    assert [one.part for one in episodes.watched(1.0, 1001.0)] == [
        f"GPU {n}" for n in range(20, 0, -1)
    ]
    episodes.update(signs, 100.0, 1100.0)
    assert len(parts(episodes)) == 21


@pytest.mark.parametrize(("limit", "worst"), [(None, 9.0), (1.0, 9.0), (20.0, 2.0)])
def test_the_worst_value(episodes: Episodes, limit: float | None, worst: float) -> None:
    """The highest, below a limit the lowest; without a value the last one that had one counts."""
    for now, value in enumerate((3.0, 9.0, None, 2.0)):
        episodes.update([sign(hold=0, value=value, limit=limit)], float(now), 1000.0 + now)
    episodes.update([], 10.0, 1010.0)
    assert [episode.worst for episode in episodes.closed] == [worst]


def test_unknown_is_shown_at_once_and_reported_after_its_hold(episodes: Episodes) -> None:
    """A node that cannot be read is not healthy while the hold of the ticket runs."""
    for now, firing in ((0.0, 0), (299.0, 0), (300.0, 1)):
        episodes.update([sign(severity=State.UNKNOWN, hold=300)], now, 1000.0 + now)
        assert episodes.verdict().state is State.UNKNOWN
        assert len(episodes.firing) == firing


def test_job_and_reason_stay_with_the_finding(episodes: Episodes) -> None:
    """A lost GPU ends its job and may change its reason; the page stays one, with that job."""
    first = sign(hold=0, training_job="llama", reason="gpu_lost")
    episodes.update([first], 0.0, 1000.0)
    episodes.update([sign(hold=0, reason="not_found", detail="still lost")], 5.0, 1005.0)
    (finding,) = episodes.verdict().findings
    assert (finding.training_job, finding.reason, finding.detail) == (
        "llama",
        "gpu_lost",
        "still lost",
    )


def test_job_that_starts_on_a_broken_part_is_named(episodes: Episodes) -> None:
    """A ticket becomes a page when a job begins to use the part."""
    episodes.update([sign(hold=0)], 0.0, 1000.0)
    episodes.update([sign(hold=0, training_job="llama")], 5.0, 1005.0)
    assert episodes.verdict().findings[0].training_job == "llama"


def test_findings_outlive_the_agent() -> None:
    """A restart ends no finding, begins none anew, and loses no time of its keep."""
    episodes, later = Episodes(), Episodes()
    episodes.update([sign(hold=0, keep=30, value=2.0, since=990.0), sign("GPU 4")], 5.0, 1005.0)
    document = json.loads(json.dumps(episodes.document()))
    later.restore(document, 8.0, 100.0, lambda _alert: True)
    assert parts(later) == ["GPU 3"]
    later.update([], 101.0, 1101.0, lambda _finding: False)
    later.update([sign(hold=0, keep=30)], 102.0, 1102.0)
    assert later.verdict().findings[0].since == 990.0
    later.update([], 131.0, 1131.0)
    assert parts(later) == ["GPU 3"]
    later.update([], 132.0, 1132.0)
    assert parts(later) == []


def test_a_boot_ends_what_is_not_seen_again() -> None:
    """What is kept because it is logged once is over with the boot; what is still seen is not."""
    episodes, later = Episodes(), Episodes()
    signs = [sign(hold=0, keep=3600), sign("GPU 4", hold=0, keep=3600)]
    episodes.update(signs, 0.0, 1000.0)
    document = json.loads(json.dumps(episodes.document()))
    later.restore(document, 0.0, 100.0, lambda _alert: True, booted=True)
    assert parts(later) == ["GPU 3", "GPU 4"]
    later.update(signs[:1], 101.0, 1101.0, lambda _finding: False)
    assert parts(later) == ["GPU 3", "GPU 4"]  # what cannot be read has not healed
    later.update(signs[:1], 102.0, 1102.0)
    assert parts(later) == ["GPU 3"]
    later.update([], 103.0, 1103.0)
    assert parts(later) == ["GPU 3"]


def test_findings_that_a_release_does_not_know_are_forgotten() -> None:
    """After an upgrade that renames a finding, its old name does not last for ever."""
    episodes, later = Episodes(), Episodes()
    episodes.update([sign(hold=0)], 0.0, 1000.0)
    later.restore(episodes.document(), 0.0, 0.0, lambda _alert: False)
    assert parts(later) == []


@pytest.mark.parametrize(
    "document", [[{}], [{"finding": {}}], ["x"], [None], [{"finding": {"slug": 1}, "keep": 0}]]
)
def test_invalid_document_restores_nothing(document: list[object], episodes: Episodes) -> None:
    """A state file with other content is refused as a whole."""
    with pytest.raises((KeyError, TypeError, ValueError)):
        episodes.restore(document, 0.0, 0.0, lambda _alert: True)
    assert parts(episodes) == []


def test_changes_are_told_once(episodes: Episodes) -> None:
    """The state is written when a finding begins or ends, not at each judgement."""
    episodes.update([sign(hold=0)], 0.0, 1000.0)
    assert episodes.changed
    episodes.document()
    changes = []
    for now, signs in enumerate(([sign(hold=0)], [])):
        episodes.update(signs, now + 1.0, 1001.0 + now)
        changes.append(episodes.changed)
    assert changes == [False, True]


def test_ticket_becomes_a_page(episodes: Episodes) -> None:
    """A finding is a warning until its sign has lasted long enough, also over a restart."""
    for now in (0.0, 10.0, 29.0):
        episodes.update([sign(page_seconds=30.0)], now, 1000 + now)
    assert [one.severity for one in episodes.firing] == [State.WARNING]
    assert episodes.verdict().state is State.WARNING
    assert episodes.due(29.0) == 1.0
    later = Episodes()
    later.restore(json.loads(json.dumps(episodes.document())), 29.0, 500.0, lambda _alert: True)
    assert later.verdict().state is State.WARNING
    later.update([sign(page_seconds=30.0)], 500.5, 1029.5)
    assert later.verdict().state is State.WARNING
    later.update([sign(page_seconds=30.0)], 501.0, 1030.0)
    assert later.verdict().state is State.CRITICAL
    assert [one.severity for one in later.firing] == [State.CRITICAL]
    last = Episodes()
    last.restore(json.loads(json.dumps(later.document())), 501.0, 900.0, lambda _alert: True)
    assert last.verdict().state is State.CRITICAL


def test_certain_evidence_is_a_page_at_once(episodes: Episodes) -> None:
    """What looked like a pause is a page as soon as a sign is certain, and remains one."""
    episodes.update([sign(hold=30.0, page_seconds=30.0)], 0.0, 1000.0)
    assert episodes.verdict().state is State.OK
    episodes.update([sign(hold=0.0, page_seconds=0.0)], 1.0, 1001.0)
    episodes.update([sign(hold=30.0, page_seconds=30.0)], 2.0, 1002.0)
    assert episodes.verdict().state is State.CRITICAL


def test_reason_is_settled_when_the_finding_begins(episodes: Episodes) -> None:
    """What a sign says may become clearer during its hold; later its labels stay."""
    for now, reason in ((0.0, "killed"), (5.0, "out of memory"), (10.0, "out of memory")):
        episodes.update([sign(reason=reason)], now, 1000 + now)
    episodes.update([sign(reason="killed")], 11.0, 1011.0)
    assert [one.reason for one in episodes.verdict().findings] == ["out of memory"]


def test_another_severity_has_a_reason_of_its_own(episodes: Episodes) -> None:
    """A page says why it is one, and not why there was a ticket before."""
    for now, reason, severity in (
        (0.0, "not found", State.WARNING),
        (10.0, "malformed", State.WARNING),
        (15.0, "I/O error", State.CRITICAL),
        (20.0, "read-only", State.CRITICAL),
    ):
        episodes.update([sign(hold=0.0, reason=reason, severity=severity)], now, 1000 + now)
        (finding,) = episodes.verdict().findings
        assert finding.severity is severity
        assert finding.reason == ("not found" if severity is State.WARNING else "I/O error")


@pytest.mark.parametrize(("moved", "since"), [(-3600.0, 5400.0), (59.0, 9000.0), (61.0, 9061.0)])
def test_a_clock_that_is_set_changes_no_age(episodes: Episodes, moved: float, since: float) -> None:
    """What was seen for 20 s has lasted so long, whatever day it is now. A minute is no step: NTP
    slews.
    """
    episodes.update([sign(hold=0)], 0.0, 9000.0)
    episodes.update([sign(hold=0)], 10.0, 9010.0)
    for now in (20.0, 30.0):
        episodes.update([sign(hold=0)], now, 9000.0 + now + moved)
        assert episodes.verdict().findings[0].since == since


def test_what_comes_again_is_no_younger(episodes: Episodes) -> None:
    """A finding began when its first Xid was seen at the latest, whenever the last one came."""
    for last, since in ((990.0, 990.0), (1004.0, 1000.0)):
        episodes.update([sign(hold=0, since=last)], last - 990.0, last + 10.0)
        assert episodes.verdict().findings[0].since == since
