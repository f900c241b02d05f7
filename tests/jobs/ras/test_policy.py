"""Which releases are asked, and how."""

from __future__ import annotations

import pytest

from dshealthd.jobs.ras.policy import RULES, AskReason, Decision, Form, decide, strictest


@pytest.mark.parametrize(
    ("version", "form", "reason"),
    [
        ("2.18.5", None, AskReason.WITHOUT_RAS),
        ("2.23.4", None, AskReason.WITHOUT_RAS),
        ("2.24.3", Form.TEXT, AskReason.SAFE),
        ("2.25.1", Form.TEXT, AskReason.SAFE),
        ("2.26.0", None, AskReason.UNSAFE),
        ("2.26.2", None, AskReason.UNSAFE),
        ("2.27.7", None, AskReason.UNSAFE),
        ("2.28.3", None, AskReason.UNSAFE),
        ("2.28.6", None, AskReason.UNSAFE),
        ("2.28.7", Form.JSON, AskReason.SAFE),
        ("2.28.9", Form.JSON, AskReason.SAFE),
        ("2.28.10", None, AskReason.UNKNOWN),
        ("2.29.0", None, AskReason.UNKNOWN),
        ("2.29.1", None, AskReason.UNKNOWN),
        ("2.29.2", Form.JSON, AskReason.SAFE),
        ("2.30.7", Form.JSON, AskReason.SAFE),
        ("2.32.3", Form.JSON, AskReason.SAFE),
        ("3.0.0", None, AskReason.UNKNOWN),
        ("2.30.7-custom", None, AskReason.UNKNOWN),
        ("2.27.7-custom", None, AskReason.UNSAFE),
        ("2.30", None, AskReason.UNKNOWN),
        ("", None, AskReason.UNKNOWN),
        (None, None, AskReason.UNKNOWN),
    ],
)
def test_release(version: str | None, form: Form | None, reason: AskReason) -> None:
    """Each release, and those beside each bound."""
    decision = decide(version)
    assert (decision.form, decision.reason) == (form, reason)


def test_only_json_of_the_faulty_loop_is_bound_to_ipv4() -> None:
    """2.28.7 to 2.28.9 walk the data with the faulty loop in JSON too; it is harmless on IPv4."""
    versions = ("2.24.3", "2.28.7", "2.28.9", "2.29.2")
    assert [decide(version).ipv4_only for version in versions] == [False, True, True, False]


def test_rules_rise_and_have_sources() -> None:
    """Each rule holds from its release to the next one's, and says why."""
    assert [rule.since for rule in RULES] == sorted({rule.since for rule in RULES})
    assert all(rule.source for rule in RULES)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (("2.30.7", "2.27.7"), Decision(None, AskReason.UNSAFE)),
        (("2.30.7", None), Decision(None, AskReason.UNKNOWN)),
        ((None, "2.27.7"), Decision(None, AskReason.UNSAFE)),
        (("2.24.3", "2.30.7"), Decision(None, AskReason.UNKNOWN)),
        (("2.28.9", "2.30.7"), Decision(Form.JSON, AskReason.SAFE, ipv4_only=True)),
        (("2.29.2", "2.30.7"), Decision(Form.JSON, AskReason.SAFE)),
        ((), Decision(None, AskReason.UNKNOWN)),
    ],
)
def test_mixed_job(versions: tuple[str | None, ...], expected: Decision) -> None:
    """The strictest release of a job decides."""
    assert strictest(versions) == expected


def test_operator_permits_unknown_alone() -> None:
    """With the operator's word an unknown release is asked in JSON, and an unsafe one never."""
    permitted = Decision(Form.JSON, AskReason.SAFE, ipv4_only=True)
    assert strictest([None], permit_unknown=True) == permitted
    assert strictest([None, "2.27.7"], permit_unknown=True).form is None
    assert strictest(["2.22.3"], permit_unknown=True).form is None
