"""Eight nodes, healthy for long."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dshealthd.probe.members.schedule import Timetable
from tests.lab.probing import Probing, begun, history, suspects

pytestmark = pytest.mark.lab  # see test_probes.py


EXTRA = 6
"""Extra rounds a node may ask for in a minute, as shipped.

Eight nodes on two cores are slowed by chance; more of them leave no time for the scheduled rounds.
"""


@pytest.mark.timeout(420)
def test_eight_nodes(tmp_path: Path) -> None:
    """In 60 epochs of 8 healthy nodes every pair of the schedule meets and nobody is accused."""
    with Probing(tmp_path, 8, period=3.0, confirmations=EXTRA) as lab:
        begun(lab)
        names = [node.name for node in lab.nodes]
        begin, met = lab.epoch + 1, Counter[tuple[int, tuple[str, ...]]]()
        seen = dict[tuple[str, float], dict[str, Any]]()
        end = begin + 60
        while lab.epoch < end + 1:
            lab.until_epoch(lab.epoch + 4)
            found = lab.scrapes()
            assert not any(map(suspects, found.values())), lab.told(found)
            entries = [(node.name, entry) for node in lab.nodes for entry in history(node)]
            seen |= {(name, entry["time"]): entry for name, entry in entries}
            for _, entry in entries:
                good = entry["outcome"] == "ok" and entry["kind"] == "pair"
                if good and entry["epoch"] is not None:
                    met[entry["epoch"], tuple(sorted(entry["members"]))] += 1
        promised = {
            (epoch, group)
            for epoch in range(begin, end)
            for group in Timetable(names, {}).groups(epoch)
        }
        missed = {
            (epoch, group): [
                entry
                for (name, at), entry in sorted(seen.items())
                if name in group and -1 < at / lab.period - epoch < 2
            ]
            for epoch, group in promised - met.keys()
        }
        assert not missed, f"did not meet, and what they did instead: {missed}"
