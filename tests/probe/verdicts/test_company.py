"""Whom a node chooses for an extra round."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import RoundKind
from dshealthd.probe.verdicts.company import Company, Met
from dshealthd.probe.verdicts.signals import ObservedRound


@pytest.mark.parametrize(("age", "first"), [(59.0, True), (61.0, False)])
def test_who_was_well_within_a_minute_comes_first(age: float, *, first: bool) -> None:
    """A member with a good round in the last minute is chosen before those that come first."""
    company = Company("a0", dict.fromkeys([f"a{number}" for number in range(9)], ""), 1.07)

    def chosen() -> str | None:
        return company.choose(near=None, asked={}, ill=(), now=1000.0)

    usual = chosen()
    other = next(name for name in company.leaves if name not in {"a0", usual})
    round = ObservedRound(
        number=1,
        epoch=1,
        at=1000.0 - age,
        kind=RoundKind.LIGHT,
        peer=other,
        near=False,
        extra=False,
        led=True,
        told=None,
    )
    company.log.append(Met(round, light=True, ratio=1.0, bad=False, silent=False))
    assert chosen() == (other if first else usual)
