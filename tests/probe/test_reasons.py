"""Reasons from other nodes become labels, so they are a closed list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dshealthd.core import schema
from dshealthd.core.schema import SchemaError
from dshealthd.probe import node, policy
from dshealthd.probe.metrics import (
    CLOCK_OFFSET,
    DISAGREES,
    DURATION,
    MEMBER,
    OPERATION,
    ROUND_TRIP,
    SKIPS,
    UNTIMED_ROUNDS,
    RoundMetrics,
)
from dshealthd.probe.observation import (
    Backend,
    Observation,
    Outcome,
    RoundKind,
    RoundPlan,
    Stage,
    Timing,
)
from dshealthd.probe.peers.fields import OTHER, REASONS, KnownReason
from dshealthd.probe.peers.messages import METHODS
from dshealthd.probe.peers.protocol import DEFECT, TIMED_OUT, Rejection
from dshealthd.probe.rounds import conclusion
from dshealthd.probe.rounds.active_round import Decline, RoundReport
from dshealthd.probe.workers import fork_server, job, store, worker

PROBE = Path(node.__file__).parent
PLAN = RoundPlan(
    epoch=1, kind=RoundKind.LIGHT, backend=Backend.AGENT, members=("a", "b"), digest=""
)


def light(outcome: Outcome = Outcome.OK, **given: Any) -> Observation:
    """Return a round of two nodes, an echo unless it is `given` otherwise."""
    stage = Stage.DONE if outcome is Outcome.OK else Stage.INVITE
    usual: dict[str, Any] = {"epoch": 1, "kind": RoundKind.LIGHT, "backend": "agent"}
    usual |= {"members": ("a", "b"), "outcome": outcome, "stage": stage}
    return Observation(**(usual | given))


def count(metrics: RoundMetrics, seen: Observation, *, led: bool = True, **given: Any) -> None:
    """Have the metrics of `a` count a round."""
    metrics.add(RoundReport(seen, PLAN, 0.1, led=led, **given), "a")


def written() -> Iterator[str]:
    """Yield the reasons that appear in the source as text."""
    for file in PROBE.rglob("*.py"):
        for found in ast.walk(ast.parse(file.read_text())):
            match found:
                case (
                    ast.Call(
                        func=ast.Name("PeerError" | "Refusal" | "ForkServerError")
                        | ast.Attribute(attr="becomes" | "skip" | "conclude"),
                        args=arguments,
                    )
                    | ast.Tuple(elts=[ast.Attribute(ast.Name("Outcome")), *_] as arguments)
                ):
                    for argument in arguments[-2:]:
                        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                            yield argument.value
                case ast.Dict(keys=[ast.Constant("failed"), *_], values=[ast.Constant(text), *_]):
                    yield str(text)


def test_every_reason_of_ours_is_known() -> None:
    """Every reason that this release sends is in the list."""
    ours = {
        *Rejection,
        *(value for name, value in vars(Decline).items() if name.isupper()),
        *(getattr(policy, name) for name in ("NEVER", "BUSY", "UNKNOWN", "RELEASED")),
        policy.DUTY,
        *(node.NO_PYTHON, node.WARMING_UP, node.NO_CUDA, node.GPUS_DIFFER),
        *(conclusion.SILENT, conclusion.IMPLAUSIBLE),
        *(store.TIMED_OUT, store.NOT_DONE, TIMED_OUT, DEFECT),
        *(fork_server.DEADLINE, fork_server.PARENT),
        *job.OWN,
        *(slug for slug, _ in worker.REASONS),
    }
    literal = {text for text in written() if text and text not in set(Outcome)}
    assert {"connect_timeout", "bad_answer", "no_torch", "resting", "wrong_data"} <= literal
    assert (ours | literal) - REASONS == set()


@pytest.mark.parametrize(("said", "read"), [("", ""), ("busy_gpu", "busy_gpu"), ("gpu_7", OTHER)])
def test_unknown_reasons_are_other(said: str, read: str) -> None:
    """An unknown reason becomes `other` wherever a peer gives one."""
    assert KnownReason().read(said, "the reason") == read
    rank = {"rank": 0, "outcome": "failed", "stage": "init", "reason": said}
    message = {"round": "x", "ranks": [rank], "timings": []}
    assert METHODS["result"].request.read(message)["ranks"][0].reason == read


def test_operations_are_a_closed_list() -> None:
    """A peer cannot invent timed operations."""
    with pytest.raises(SchemaError, match=r"\.op is not a valid Op"):
        schema.of(Timing).read({**asdict(Timing("all_reduce", 8, 1.0, 1.0)), "op": "all_reduce_7"})


def test_series_are_bounded() -> None:
    """A member that declines for a thousand reasons creates one series; of those that disagree, and
    of clocks, the last 32 are told.
    """
    metrics = RoundMetrics()
    for number in range(1000):
        reason = KnownReason().read(f"because_{number}", "the reason")
        count(metrics, light(Outcome.DECLINED, reason=reason))
    skips = [sample for sample in metrics.samples(()) if sample.metric is SKIPS]
    assert [(sample.labels, sample.value) for sample in skips] == [((OTHER,), 1000.0)]
    for number in range(100):
        members = "a", f"n{number % 40}"
        seen = light(Outcome.DECLINED, reason="members_differ", members=members)
        count(metrics, seen, offset=float(number))
    found = [one.labels[0] for one in metrics.samples(()) if one.metric is DISAGREES]
    assert found == [f"n{number % 40}" for number in range(68, 100)]
    offsets = [one.value for one in metrics.samples(()) if one.metric is CLOCK_OFFSET]
    assert offsets == [68.0, 83.5, 99.0]
    assert len(metrics.rounds) == 20


def test_durations() -> None:
    """From an echo's to that of a round which hangs."""
    metrics = RoundMetrics()
    count(metrics, light())
    bounds = [one.labels[1] for one in metrics.samples(()) if one.metric is DURATION]
    assert " ".join(bounds[:-3]) == "0.01 0.025 0.05 0.1 0.25 0.5 1.0 2.5 5.0 10.0 30.0"


@pytest.mark.parametrize(
    ("led", "kind", "outcome", "timed", "counts"),
    [
        (True, RoundKind.LIGHT, Outcome.OK, False, True),
        (False, RoundKind.LIGHT, Outcome.OK, False, False),  # the leader tells
        (True, RoundKind.PAIR, Outcome.OK, False, False),
        (True, RoundKind.LIGHT, Outcome.HUNG, False, False),
        (True, RoundKind.LIGHT, Outcome.OK, True, False),
    ],
)
def test_echoes_that_give_no_time(
    kind: RoundKind, outcome: Outcome, *, led: bool, timed: bool, counts: bool
) -> None:
    """Light rounds that this node led in vain, as both hosts were busy, are counted."""
    metrics = RoundMetrics()
    timings = (Timing("echo", 0, 0.1, 0.0),) if timed else ()
    count(metrics, light(outcome, kind=kind, timings=timings), led=led)
    (found,) = [one.value for one in metrics.samples(()) if one.metric is UNTIMED_ROUNDS]
    assert found == counts


@pytest.mark.parametrize(
    ("kind", "size", "led", "counts"),
    [
        (RoundKind.LIGHT, 0, True, True),
        (RoundKind.LIGHT, 0, False, False),  # the leader tells
        (RoundKind.LIGHT, 47872, True, False),
        (RoundKind.PAIR, 0, True, False),
    ],
)
def test_round_trips(kind: RoundKind, size: int, *, led: bool, counts: bool) -> None:
    """Those of empty echoes that this node led."""
    metrics = RoundMetrics()
    count(metrics, light(kind=kind, timings=(Timing("echo", size, 0.1, 0.0),)), led=led)
    found = [one.value for one in metrics.samples(()) if one.metric is ROUND_TRIP]
    assert found == [0.1] * 3 * counts


@pytest.mark.parametrize(
    ("outcome", "reason", "told"),
    [
        (Outcome.DECLINED, "versions_differ", "versions_differ"),
        (Outcome.DECLINED, "wrong_receiver", "wrong_receiver"),
        (Outcome.DECLINED, "already_testing", ""),
        (Outcome.INCONCLUSIVE, "name_unknown", "name_unknown"),
        (Outcome.UNAUTHORIZED, "rejected", "key"),
        (Outcome.INCONCLUSIVE, "name_server", ""),
    ],
)
def test_how_two_nodes_differ(outcome: Outcome, reason: str, told: str) -> None:
    """What lies in their set-up is told with the peer, until they have a round."""
    metrics = RoundMetrics()
    count(metrics, light(outcome, reason=reason))
    found = [one.labels for one in metrics.samples(()) if one.metric is DISAGREES]
    assert found == [("b", told)] * bool(told)
    count(metrics, light())
    assert not [one for one in metrics.samples(()) if one.metric is DISAGREES]


def test_sizes_that_others_choose_are_no_series() -> None:
    """On-demand rounds of other sizes add no series, except among this node's own GPUs."""
    metrics = RoundMetrics()
    for size, kind in ((8, RoundKind.PAIR), (12345, RoundKind.PAIR), (12346, RoundKind.LOCAL)):
        timings = (Timing("all_reduce", size, 0.001, 1e6),)
        count(metrics, light(epoch=-1, kind=kind, backend="gloo", timings=timings))
    sizes = {sample.labels[-1] for sample in metrics.samples(()) if sample.metric is OPERATION}
    assert sizes == {"8", "12346"}


def test_the_member_of_the_last_round_is_named_while_it_succeeded() -> None:
    """Two agents give the same member the same hash; a round that fails or is skipped, and probes
    that do not run, name nobody.
    """
    metrics, theirs = RoundMetrics(), RoundMetrics()

    def hashes(of: RoundMetrics, me: str) -> dict[str, float]:
        return {one.labels[0]: one.value for one in of.samples((), me) if one.metric is MEMBER}

    count(metrics, light())
    met = hashes(metrics, "a")
    assert met == {"self": hashes(theirs, "a")["self"], "met": hashes(theirs, "b")["self"]}
    assert met["self"] == 73912390445837 != met["met"], "other releases name it so, too"
    assert hashes(metrics, "") == {}
    for is_skipped in (False, True):
        count(metrics, light())
        if is_skipped:
            metrics.skip("maintenance")
        else:
            count(metrics, light(Outcome.FAILED))
        assert hashes(metrics, "a").keys() == {"self"}
