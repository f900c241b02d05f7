"""Which samples a tier has."""

from __future__ import annotations

import pytest

from dshealthd.core.collector import Buckets, gauge, histogram
from dshealthd.core.exposition import Matcher, Selector, Tier, chooser, parse_selectors
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.core.snapshot import Snapshot
from dshealthd.findings.judge import JUDGED

CLOCK = gauge("dshealthd_x_clock_hertz", "Clock.", "gpu", "domain")
OTHER = gauge("dshealthd_x_other", "Other.")


@pytest.mark.parametrize(("selector", "chosen"), [
    ("dshealthd_x_clock_hertz", {"sm", "memory", ""}),
    ('dshealthd_x_clock_hertz{domain="sm"}', {"sm"}),
    ('dshealthd_x_clock_hertz{domain!="sm"}', {"memory", ""}),
    ('dshealthd_x_clock_hertz{domain=~"s|mem.+"}', {"memory"}),
    ('dshealthd_x_clock_hertz{domain!~"s.",gpu="0"}', {"memory", ""}),
    ('dshealthd_x_clock_hertz{gpu="1"}', set()),
    ('dshealthd_x_clock_hertz{leaf!="",domain="sm"}', {"sm"}),
    ('dshealthd_x_clock_hertz{domain="sm"}\ndshealthd_x_clock_hertz{domain=""}', {"sm", ""}),
])  # fmt: skip
def test_selectors_choose_as_prometheus_does(selector: str, chosen: set[str]) -> None:
    """Patterns match the whole value, several selectors of a family are alternatives, and a label
    that only targets have leaves nothing out.
    """
    chooses = chooser(parse_selectors(selector))
    domains = {domain for domain in ("sm", "memory", "") if chooses(CLOCK(1.0, "0", domain))}
    assert domains == chosen
    assert not chooses(OTHER(1.0))


def test_a_histogram_is_chosen_whole() -> None:
    """The name of a family stands for its buckets, its count and its sum."""
    took = histogram("dshealthd_x_took_seconds", "Took.", "kind")
    buckets = Buckets((1.0, 2.0))
    chooses = chooser(parse_selectors("dshealthd_x_took_seconds"))
    assert [*map(chooses, buckets.samples(took, "a"))] == [True] * 5


def test_selectors_are_written_as_they_are_read() -> None:
    """What a generated line says is what the agent reads, whatever the value holds."""
    selector = Selector("a_b", (Matcher("c", "=~", r'"x\.y",{}|\\'), Matcher("d", "!=", "")))
    assert parse_selectors(f"# comment\n\n{selector}\na_c\n") == (selector, Selector("a_c"))
    for line in ("a c", 'a{b="1" c="2"}'):
        with pytest.raises(ValueError, match="is not a selector"):
            parse_selectors(line)


@pytest.mark.parametrize("line", ['a{b="c"', "a b", "a{b=c}", 'a{b="c"d="e"}', "{}"])
def test_a_line_that_is_no_selector_is_refused(line: str) -> None:
    """A damaged file is an error, not a tier that lacks something."""
    with pytest.raises(ValueError, match="is not a selector"):
        parse_selectors(line)


def test_each_tier_is_rendered_and_cached_by_itself() -> None:
    """A result is filtered once for each tier; everything stays everything."""
    snapshot = Snapshot(lambda: 0.0, lambda: 0.0)
    snapshot.expect("c", 9.0)
    samples = (JUDGED(7.0), OTHER(1.0))
    snapshot.put("c", CollectionResult(CollectionOutcome.OK, samples))
    body = snapshot.body(tuple, Tier.VERDICT)
    assert b"dshealthd_findings_judged_timestamp_seconds 7.0\n" in body
    assert b"dshealthd_x_other" not in body
    assert b"dshealthd_collector" not in body
    assert snapshot.body(tuple, Tier.VERDICT) is body
    everything = snapshot.body(tuple)
    assert b"dshealthd_x_other 1.0\n" in everything
    assert b"dshealthd_collector_up" in everything
    snapshot.put("c", CollectionResult(CollectionOutcome.OK, (JUDGED(8.0),)))
    assert b"seconds 8.0\n" in snapshot.body(tuple, Tier.VERDICT)
