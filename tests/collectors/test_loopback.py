"""The agent's connection to itself, where it cannot work too; it leaves nothing behind."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dshealthd.collectors.loopback import CONNECTIONS, DURATION, UP
from dshealthd.core.result import CollectionOutcome, CollectionResult
from tests.collectors.bench import Bench, value, values
from tests.netns import network_namespace, ss
from tests.stopwatch import Stopwatch

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def outcomes(result: CollectionResult) -> dict[str, float]:
    """Return the counts of attempts that are not 0, by outcome."""
    found = values(result, CONNECTIONS)
    return {outcome: count for (outcome,), count in found.items() if count}


def reject(rule: str) -> None:
    """Filter the requests for a connection that come in over the loopback of this namespace."""
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed")
    text = (
        f"table inet t {{ chain c {{ type filter hook input priority 0; tcp flags & (syn | "
        f"ack) == syn {rule}; }}; }}"
    )
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True, timeout=60)


def test_a_working_loopback_is_up() -> None:
    """The connection is made before its deadline, and how long it took is told."""
    with network_namespace():
        agent = Bench("loopback")
        agent.clock = time.monotonic
        before = time.monotonic()
        result = agent.collect()
        passed = time.monotonic() - before
    assert result.outcome is CollectionOutcome.OK
    assert outcomes(result) == {"ok": 1}
    assert value(result, UP) == 1
    assert 0 < (value(result, DURATION) or 0) <= passed
    assert {outcome for (outcome,) in values(result, CONNECTIONS)} == {
        *("ok", "refused", "aborted", "reset", "timed_out", "unreachable", "no_port"),
        *("denied", "no_memory", "other"),
    }


def test_nothing_is_left_behind() -> None:
    """A hundred connections leave no socket in any state, and no descriptor."""
    with network_namespace():
        agent = Bench("loopback")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            result = agent.collect()
        assert outcomes(result) == {"ok": 100}
        assert len(os.listdir("/proc/self/fd")) == before
        assert not ss()


def used_up() -> None:
    """Leave one ephemeral port, which the listener takes."""
    RANGE.write_text("40000 40000")


@pytest.mark.parametrize(("prepare", "loopback", "outcome"), [
    (lambda: reject("reject with tcp reset"), True, "refused"),
    (lambda: None, False, "unreachable"),
    (lambda: subprocess.run(["ip", "address", "flush", "lo"], check=True), True, "unreachable"),
    (used_up, True, "no_port"),
])  # fmt: skip
def test_failure(prepare: Callable[[], object], outcome: str, *, loopback: bool) -> None:
    """A reset in answer, an interface that is down or has no address, and used up ports are
    told apart.
    """
    with network_namespace(loopback=loopback):
        prepare()
        result = Bench("loopback").collect()
        assert not ss()
    assert result.outcome is CollectionOutcome.OK
    assert outcomes(result) == {outcome: 1}
    assert (value(result, UP), value(result, DURATION)) == (0, None)


def test_timed_out() -> None:
    """Packets that vanish are told as timed out, within the deadline."""
    with network_namespace():
        reject("drop")
        before, watch = time.monotonic(), Stopwatch()
        result = Bench("loopback").collect()
        took, held_up = time.monotonic() - before, watch.seconds()
        assert not ss()
    assert outcomes(result) == {"timed_out": 1}
    assert took > 0.09
    assert held_up < 0.5


def test_the_agent_s_own_limit_is_no_finding() -> None:
    """Without descriptors nothing is known of the loopback."""
    agent = Bench("loopback")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    spare = [
        os.open("/dev/null", os.O_RDONLY) for _ in range(highest)
    ]  # no number below the limit stays free
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(spare), limits[1]))
        result = agent.collect()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in spare:
            os.close(descriptor)
    assert result.outcome is CollectionOutcome.ERROR
    assert "Too many open files" in result.detail
    assert outcomes(agent.collect()) == {"ok": 1}
