"""Whose time an echo tells: the network's, or that for which an agent waited for a CPU."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.probe.metrics import UNTIMED_ROUNDS, RoundMetrics
from dshealthd.probe.observation import Outcome, RoundKind
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.rounds import light
from dshealthd.probe.rounds.plan import PAYLOAD
from tests.probe.company import NAMES, all_have, company, same

USUAL = 0.0005
"""Seconds of an echo, whatever its payload."""


class ScriptedPeer:
    """A peer on a clock of its own; both ends wait for a CPU as is set for each echo in turn.
    `before` and `after` is what the peer waits for before it reads its own time and while it sends
    its answer, `here` what this agent waits for.
    """

    def __init__(
        self,
        *,
        network: float = USUAL,
        here: Iterable[float] = (),
        before: Iterable[float] = (),
        after: Iterable[float] = (),
        tells: bool = True,
    ) -> None:
        self.now = self.here = self.there = 0.0
        self.calls = 0
        self._network = network
        self._tells = tells
        self._waits = [
            itertools.chain(waits, itertools.repeat(0.0)) for waits in (here, before, after)
        ]

    async def call(self, _peer: str, _method: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer an echo."""
        self.calls += 1
        here, before, after = map(next, self._waits)
        self.now += self._network + here + before + after
        self.here += here
        told = self.there + before
        self.there = told + after
        answer = {"clock": body["clock"], "payload": body["payload"]}
        return answer | {"waited": told} if self._tells else answer

    def measure(self, waited: Callable[[], float | None] | None = None) -> light.Echoes:
        """Return what echoes with it tell."""
        node: Any = SimpleNamespace(
            peers=self,
            monotonic=lambda: self.now,
            wall=lambda: self.now,
            waited=waited or (lambda: self.here),
        )
        return asyncio.run(light.measure(node, "b"))


def seconds(found: light.Echoes) -> list[float]:
    """Return the times that are known."""
    return [timing.seconds for timing in found.timings]


def test_nobody_waits() -> None:
    """On CPUs that are free five echoes do: one to begin with, the payload, three empty ones."""
    peer = ScriptedPeer()
    assert seconds(peer.measure()) == pytest.approx([USUAL, USUAL])
    assert peer.calls == 5


@pytest.mark.parametrize("network", [0.4, 1.5])
def test_slow_echoes_give_a_time(network: float) -> None:
    """Echoes of a node that loses packets take a second, and are timed all the same, but no more
    than needed are sent.
    """
    peer = ScriptedPeer(network=network)
    assert seconds(peer.measure()) == pytest.approx([network, network])
    assert peer.calls == 4


def waits(end: str, seconds: Any) -> ScriptedPeer:
    """Return a peer at which one end waits for so long in each echo."""
    return ScriptedPeer(**{end: seconds})


@pytest.mark.parametrize("end", ["here", "before", "after"])
def test_waits_now_and_then(end: str) -> None:
    """Echoes in which an end waited are left out, whichever end and at which moment of it."""
    peer = waits(end, (0.0, 0.02, 0.0, 0.03, 0.0, 0.0, 0.0))
    found = peer.measure()
    assert seconds(found) == pytest.approx([USUAL, USUAL])


@pytest.mark.parametrize("end", ["here", "before", "after"])
def test_always_waits(end: str) -> None:
    """Where an end waits each time, no time is known, and the echoes come to an end."""
    peer = waits(end, itertools.repeat(0.02))
    assert peer.measure().timings == ()
    assert peer.calls == 32 + 1


@pytest.mark.parametrize(("wait", "calls"), [(0.4, 4), (0.2, 5), (0.15, 7)])
def test_long_waits_end_early(wait: float, calls: int) -> None:
    """Echoes that take long are not tried again and again: for a second, but four of them."""
    peer = ScriptedPeer(here=itertools.repeat(wait))
    assert peer.measure().timings == ()
    assert peer.calls == calls


def test_slow_network() -> None:
    """A path that has become a hundred times slower is timed, also where an end waits a little."""
    peer = ScriptedPeer(network=100 * USUAL, here=itertools.repeat(0.005))
    found = peer.measure()
    assert seconds(found)[0] == pytest.approx(100 * USUAL + 0.005)
    assert [timing.size for timing in found.timings] == [0, len(PAYLOAD)]


def test_waiting_alone_is_not_slow() -> None:
    """The longest wait of an echo that counts does not make it three times the usual."""
    wait = USUAL * 0.25 / (1 - 0.25)
    found = ScriptedPeer(here=itertools.repeat(0.999 * wait)).measure()
    assert 0 < seconds(found)[0] < 1.5 * USUAL
    assert ScriptedPeer(here=itertools.repeat(1.001 * wait)).measure().timings == ()


@pytest.mark.parametrize("told", [(5.0, 3.0, 1.0), (1e9, 0.0, 1e9)])
def test_peer_that_tells_nonsense(told: tuple[float, ...]) -> None:
    """What a peer says of its waits makes its own times unknown at most, and none shorter."""

    class Liar(ScriptedPeer):
        async def call(self, *given: Any) -> dict[str, Any]:
            answer = await super().call(*given)
            return answer | {"waited": told[self.calls % len(told)]}

    for found in (Liar().measure(), Liar(here=itertools.repeat(0.02)).measure()):
        for timing in found.timings:
            assert timing.seconds >= USUAL * 0.999
    assert Liar(here=itertools.repeat(0.02)).measure().timings == ()


def test_a_payload_that_comes_back_changed() -> None:
    """It is no echo, however fast it was."""

    class Noisy(ScriptedPeer):
        async def call(self, *given: Any) -> dict[str, Any]:
            return await super().call(*given) | {"payload": b"?"}

    with pytest.raises(PeerError, match="corrupted: wrong_data"):
        Noisy().measure()


def test_kernel_that_does_not_tell() -> None:
    """Where neither end knows its waits, every time counts."""
    found = ScriptedPeer(here=itertools.repeat(0.02), tells=False).measure(lambda: None)
    assert seconds(found)[0] == pytest.approx(USUAL + 0.02)


@pytest.mark.parametrize("starved", [0, 1, None])
async def test_round_without_a_cpu(tmp_path: Path, starved: int | None) -> None:
    """A light round of which an end always waits for a CPU goes well, without a time to learn or to
    judge, and is counted; the root's as much as the member's.
    """
    ticks = itertools.count()
    async with company(
        tmp_path,
        2,
        workers=lambda _: None,
        waited=lambda name: (
            float(next(ticks)) if starved is not None and name == NAMES[starved] else 0.0
        ),
    ) as companions:
        root, member = companions
        report = await root.rounds.lead(root.plan(member.name).light())
        await all_have(companions)
        observation = same(companions)
        assert (observation.kind, observation.outcome) == (RoundKind.LIGHT, Outcome.OK)
        assert report is not None
        assert len(report.observation.timings) == (2 if starved is None else 0)
        assert report.offset is not None
        for companion in companions:
            metrics = RoundMetrics()
            metrics.add(companion.reports[0], companion.name)
            untimed = [s.value for s in metrics.samples(()) if s.metric is UNTIMED_ROUNDS]
            assert untimed == [float(starved is not None and companion is root)]
