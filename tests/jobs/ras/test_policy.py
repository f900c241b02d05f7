"""Which releases are asked."""

from __future__ import annotations

import pytest

from dshealthd.jobs.ras.policy import AskReason, Decision, decide, strictest


@pytest.mark.parametrize(("version", "reason"), [
    ("2.18.5", AskReason.WITHOUT_RAS),
    ("2.23.4", AskReason.WITHOUT_RAS),
    ("2.24.3", AskReason.WITHOUT_JSON),
    ("2.25.1", AskReason.WITHOUT_JSON),
    ("2.26.0", AskReason.UNSAFE),
    ("2.26.2", AskReason.UNSAFE),
    ("2.27.7", AskReason.UNSAFE),
    ("2.28.3", AskReason.UNSAFE),
    ("2.28.6", AskReason.UNSAFE),
    ("2.28.7", AskReason.SAFE),
    ("2.28.9", AskReason.SAFE),
    ("2.28.10", AskReason.UNKNOWN),
    ("2.29.0", AskReason.UNKNOWN),
    ("2.29.1", AskReason.UNKNOWN),
    ("2.29.2", AskReason.SAFE),
    ("2.29.3", AskReason.SAFE),
    ("2.29.4", AskReason.UNKNOWN),
    ("2.29.7", AskReason.SAFE),
    ("2.30.2", AskReason.UNKNOWN),
    ("2.30.3", AskReason.SAFE),
    ("2.30.4", AskReason.SAFE),
    ("2.30.5", AskReason.UNKNOWN),
    ("2.30.7", AskReason.SAFE),
    ("2.31.2", AskReason.SAFE),
    ("2.31.3", AskReason.UNKNOWN),
    ("2.32.3", AskReason.UNKNOWN),
    ("3.0.0", AskReason.UNKNOWN),
    ("2.30.7-custom", AskReason.UNKNOWN),
    ("2.27.7-custom", AskReason.UNSAFE),
    ("2.30", AskReason.UNKNOWN),
    ("", AskReason.UNKNOWN),
    (None, AskReason.UNKNOWN),
])  # fmt: skip
def test_release(version: str | None, reason: AskReason) -> None:
    """Each release, and those beside each bound; after 2.28.9 none that nobody has read."""
    assert decide(version).reason is reason


def test_only_the_faulty_loop_is_bound_to_ipv4() -> None:
    """2.28.7 to 2.28.9 walk the data with the faulty loop in JSON too; it is harmless on IPv4."""
    versions = ("2.28.7", "2.28.9", "2.29.2")
    assert [decide(version).ipv4_only for version in versions] == [True, True, False]


@pytest.mark.parametrize(("versions", "expected"), [
    (("2.30.7", "2.27.7"), Decision(AskReason.UNSAFE)),
    (("2.30.7", None), Decision(AskReason.UNKNOWN)),
    ((None, "2.27.7"), Decision(AskReason.UNSAFE)),
    (("2.24.3", "2.30.7"), Decision(AskReason.WITHOUT_JSON)),
    (("2.28.9", "2.30.7"), Decision(AskReason.SAFE, ipv4_only=True)),
    (("2.29.2", "2.30.7"), Decision(AskReason.SAFE)),
    ((), Decision(AskReason.UNKNOWN)),
])  # fmt: skip
def test_mixed_job(versions: tuple[str | None, ...], expected: Decision) -> None:
    """The strictest release of a job decides."""
    assert strictest(versions) == expected


def test_operator_permits_unknown_alone() -> None:
    """With the operator's word an unknown release is asked, and one known to be unfit never."""
    permitted = Decision(AskReason.SAFE, ipv4_only=True)
    assert strictest([None], permit_unknown=True) == permitted
    assert not strictest([None, "2.27.7"], permit_unknown=True).is_asked
    assert not strictest(["2.22.3", "2.24.3"], permit_unknown=True).is_asked
