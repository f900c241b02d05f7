"""When the pace of ranks is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.core.state_writer import wait_until_written
from dshealthd.jobs.hangs.pace import Pace
from dshealthd.jobs.hangs.silence import SilenceBaseline
from dshealthd.jobs.hangs.watch import SavedRank

RANKS = [SavedRank(1, 1, 0, 0.0, 0.0, SilenceBaseline.begin(0.0, 1, 0))]


@pytest.mark.parametrize(("calls", "written"), [
    # every ten seconds, and at the end
    ([(100.0, RANKS, False), (109.0, RANKS, False), (110.0, RANKS, False)], [100, 110]),
    ([(100.0, RANKS, False), (109.0, RANKS, True)], [100, 109]),
    # once without ranks: an earlier agent may have left some
    ([(100.0, [], False), (110.0, [], False), (120.0, RANKS, False)], [100, 120]),
    ([(100.0, RANKS, False), (110.0, [], False), (120.0, [], True)], [100, 110]),
])  # fmt: skip
def test_writes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[tuple[float, list[SavedRank], bool]],
    written: list[float],
) -> None:
    """A node without trainings writes nothing."""
    pace, found = Pace(tmp_path, Host()), []
    for now, ranks, at_once in calls:
        monkeypatch.setattr(pace._file, "save", lambda _, now=now: found.append(now))
        pace.keep(ranks, now, at_once=at_once)
    assert found == written


async def test_what_is_read(tmp_path: Path) -> None:
    """An agent knows the ranks of this boot that the one before it has written, if any: as many as
    are watched at a time.
    """
    pace = Pace(tmp_path, Host())
    assert await pace.load() == []
    pace.keep(257 * RANKS, 100.0)
    assert await wait_until_written(60) == []
    assert await pace.load() == 256 * RANKS
    place = tmp_path / "job_hang.json"
    place.write_text(place.read_text().replace(pace._boot_id, "another"))
    assert await pace.load() == []
