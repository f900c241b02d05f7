"""How soon four agents name a fault from rounds of two, where who leads is drawn.

    python -m bench.light_rounds

Simulated: the real schedule and verdicts, and made-up times; see the tests that the clusters are
taken from. `alone` counts the clusters in which nothing else was accused until the fault was named,
and it was within 30 epochs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bench.processes import table
from dshealthd.probe.observation import Part, Suspect
from tests.probe.verdicts.test_busy_cpus import BusyCompany
from tests.probe.verdicts.test_light_rounds import KNOWN, SHUT, SLOW, Company

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCHS = 30


def slow(start: int, untimed: float, *, bounded: bool) -> Company:
    """Return a cluster with a slow link, that share of whose echoes does not count."""
    company = known(Company(start))
    company.slow_pair, company.untimed, company.bounded = True, untimed, bounded
    return company


def slow_node(start: int, untimed: float) -> Company:
    """Return a cluster with a node whose echoes are all slow."""
    company = known(Company(start))
    company.slow, company.untimed, company.bounded = True, untimed, True
    return company


def busy(start: int) -> Company:
    """Return a cluster with a link that is slower by far than what busy CPUs make slow."""
    company = known(BusyCompany(start))
    company.slow_pair = True
    return company


def shut(start: int) -> Company:
    """Return a cluster with a node that refuses all calls, and calls others."""
    company = Company(start)
    company.told(KNOWN // 10)
    company.shut = True
    return company


def known(company: Company) -> Company:
    """Return the cluster once its nodes know what is usual."""
    company.told(KNOWN)
    return company


def epochs(company: Company, right: Suspect) -> int | None:
    """Return after how many epochs a fault is named; None if not, or something else before."""
    for number, found in enumerate(company.told(EPOCHS), 1):
        if found - {right}:
            return None
        if found:
            return number
    return None


def main() -> None:
    """Print a table of faults."""
    pair = Suspect(Part.LINK, "n0--n1", "slow")
    cases: list[tuple[str, int, Callable[[int], Company], Suspect]] = [
        (
            f"slow link, {untimed:.0%} of times do not count, bounds {bounds}",
            60,
            partial(slow, untimed=untimed, bounded=bounds == "known"),
            pair,
        )
        for untimed in (0.0, 0.4, 1.0)
        for bounds in ("unknown", "known")
    ]
    cases += [
        (
            f"slow node, {untimed:.0%} of times do not count, bounds known",
            100,
            partial(slow_node, untimed=untimed),
            Suspect(Part.NODE, SLOW, "slow"),
        )
        for untimed in (0.0, 0.4, 1.0)
    ]
    cases += [
        ("slow link among collectives on busy CPUs", 48, busy, pair),
        ("node that refuses all calls", 200, shut, Suspect(Part.NODE, SHUT, "refused")),
    ]
    rows: list[list[object]] = []
    for name, trials, cluster, right in cases:
        found = [epochs(cluster(1000 * number), right) for number in range(1, trials + 1)]
        alone = sorted(number for number in found if number is not None)
        p50, p95 = (alone[int(len(alone) * share)] if alone else "-" for share in (0.5, 0.95))
        rows.append([name, trials, len(alone), p50, p95])
    print(table(["fault", "clusters", "alone", "p50 epochs", "p95 epochs"], rows))


if __name__ == "__main__":
    main()
