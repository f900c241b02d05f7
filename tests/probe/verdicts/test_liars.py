"""Members that lie with valid credentials: the accusations that they cause concern only the liars.

`bench/probe_liars.py` runs the same for longer, with more seeds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bench.probe_liars import play
from dshealthd.probe.observation import Kind, Observation, Outcome, Stage, Timing
from dshealthd.probe.options import BaselineOptions
from dshealthd.probe.verdicts.baseline import Baselines, TimingClass
from tests.probe.verdicts.test_detector import ME, Answer, Scene, settled, silences, well

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ECHO = TimingClass("light", "agent", "echo", 0, "", far=False)
USUAL = 0.0004
"""Seconds of an echo."""


@pytest.mark.parametrize(
    ("nodes", "strategy"),
    [
        *((4, "frame"), (8, "frame"), (8, "silence"), (8, "poison"), (16, "collude")),
        *((4, "slander"), (8, "slander"), (16, "slander in pairs")),
    ],
)
def test_liars_are_believed_of_themselves_alone(nodes: int, strategy: str) -> None:
    """Nobody accuses a healthy node, GPU, NIC or leaf, or the link between two honest members."""
    made = play(nodes, strategy, 6.0, 2)
    assert made.wrong() == set()
    assert strategy == "silence" or made.forged > 100


@pytest.mark.parametrize("nodes", [4, 8])
def test_a_cut_link_is_named_beside_a_liar(nodes: int) -> None:
    """A liar that cannot reach its ends either, as it says, does not hide it."""
    made = play(nodes, "slander", 6.0, 2)
    assert made.fault is not None
    honest = {suspect.component for _, _, suspect, node in made.log if node not in made.liars}
    assert made.component(made.fault) in honest


def test_a_liar_is_seen() -> None:
    """A liar's effect on its victim is visible as a fault between the two of them."""
    made = play(8, "frame", 4.0, 2)
    (liar,) = (made.names[number] for number in made.liars)
    accused = {suspect.component for _, began, suspect, _ in made.log if began}
    assert accused
    assert all(liar in component for component in accused)


def forged(scene: Scene, leader: str, outcome: Outcome) -> None:
    """Let a member lead a round with this node that nobody asked for."""
    scene.now += 1
    scene.observe(Kind.RAIL, (leader, ME), Answer(outcome=outcome, stage=Stage.SIZES), extra=True)


def test_rounds_that_others_lead_open_no_case() -> None:
    """If two members lead bad round after bad round, this node is not accused."""
    scene = settled()
    for _ in range(10):
        for liar in ("b1", "c1"):
            forged(scene, liar, Outcome.HUNG)
        scene.run(well)
        assert scene.detector.suspects() == ()
        assert scene.detector.score() == pytest.approx(1.0, abs=0.1)


def test_two_that_fall_silent_in_turns_are_not_this_node() -> None:
    """Short outages of only two members may be their own doing."""
    scene = settled()
    assert silences(scene, ("a1", "b2", "a1", "b2", "a1", "b2")) == set()


def test_more_rounds_in_a_slot_do_not_teach() -> None:
    """A member that leads round after round in the same slot does not influence the baselines."""
    scene = Scene(dict.fromkeys(("a0", "a1", "a2", "a3"), ""), parts="")
    before = len(scene.baselines)
    for turn in range(40):
        scene.now += 0.5
        scene.detector.observe(
            Observation(
                scene.epoch + turn // 20,
                Kind.LIGHT,
                "agent",
                ("a1", ME),
                Outcome.OK,
                Stage.DONE,
                (Timing("echo", 0, 2e-6, 0.0),),
                at=scene.now,
            )
        )
    assert len(scene.baselines) <= before + 1
    assert scene.baselines.ratio(ECHO, USUAL) is None


def learned(values: Sequence[tuple[float, str]]) -> Baselines:
    """Return baselines that know the usual time of an echo and have then learnt the given ones."""
    known = Baselines(BaselineOptions())
    for turn in range(64):
        known.update(ECHO, USUAL * (1 + 0.02 * (turn % 5 - 2)), turn * 10.0, f"b{turn % 7}")
    for turn, (seconds, peer) in enumerate(values):
        known.update(ECHO, seconds, 1e6 + turn * 1000.0, peer)
    return known


def test_one_fast_peer_does_not_move_the_usual() -> None:
    """Echoes of 2 µs with one member for a quarter of a day do not make this node slow."""
    known = learned([(2e-6, "b1")] * 24)
    reading = known.ratio(ECHO, USUAL)
    assert reading is not None
    assert reading.ratio == pytest.approx(1.0, abs=0.05)


def test_faster_with_several_peers_is_learnt() -> None:
    """A node that has become faster with everybody is compared with the faster times."""
    known = learned([(USUAL / 5, f"b{turn % 4}") for turn in range(24)])
    reading = known.ratio(ECHO, USUAL)
    assert reading is not None
    assert reading.ratio == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, -1.0, float("inf"), float("nan")])
def test_what_no_transport_can_do_is_not_learnt(seconds: float) -> None:
    """An impossibly short time is not learnt, not even as the first of a class."""
    known = Baselines(BaselineOptions())
    for turn in range(64):
        known.update(ECHO, seconds, float(turn))
    assert len(known) == 0


def restarted(known: Baselines, directory: Path) -> Baselines:
    """Return the baselines of the next run of the agent."""
    path = directory / "probe-baselines.json"
    path.write_bytes(known.document())
    loaded = Baselines(BaselineOptions())
    assert loaded.load(path)
    return loaded


def usual(known: Baselines) -> float:
    """Return how an honest echo compares with what is known."""
    reading = known.ratio(ECHO, USUAL)
    assert reading is not None
    return reading.ratio


def test_restarts_do_not_help_one_fast_peer(tmp_path: Path) -> None:
    """What was learnt survives each restart unchanged, and no restart makes a forged time count
    that would not have counted without it.
    """
    known = learned([(2e-6, "b1")] * 24)
    begin = 1e6 + 24 * 1000.0
    for restart in range(40):
        before = usual(known)
        known = restarted(known, tmp_path)
        assert usual(known) == pytest.approx(before, rel=1e-6)
        for turn in range(8):
            forged_time = USUAL / 2 if turn % 2 else 2e-6
            known.update(ECHO, forged_time, begin + restart * 20.0 + turn, "b1")
    assert usual(known) == pytest.approx(1.0, abs=0.01)
    for turn in range(96):
        known.update(ECHO, USUAL, begin + 1000.0 + turn * 900.0, f"b{turn % 7}")
    assert usual(known) == pytest.approx(1.0, abs=0.01)


def test_a_low_usual_is_forgotten_over_restarts(tmp_path: Path) -> None:
    """A usual that two members have forged is no lower after a restart, and honest rounds recover
    it in a month, though the agent restarts every day. A restart alone forgives nothing.
    """
    known = learned([(USUAL / 2, f"b{turn % 2}") for turn in range(96)])
    low = usual(known)
    assert low == pytest.approx(2.0, rel=0.05)
    begin, day = 1e6 + 96 * 1000.0, 86400.0
    ratios = []
    for restart in range(40):
        before = usual(known)
        known = restarted(known, tmp_path)
        assert usual(known) == pytest.approx(before, rel=1e-6)
        for turn in range(96):
            at = begin + restart * day + turn * 900.0
            known.update(ECHO, USUAL * (1 + 0.001 * (turn % 5 - 2)), at, f"b{turn % 7}")
        ratios.append(usual(known))
    creep = 1 + BaselineOptions().creep_ratio
    assert ratios[9] == pytest.approx(low / creep, rel=0.01)  # the lowest counts for 15 days
    assert ratios[-1] == pytest.approx(1.0, abs=0.01)


def test_peers_word_is_about_itself() -> None:
    """A member that reports others as unreachable convinces nobody who reaches them."""
    scene = Scene()
    said = {f"b1--{name}": 1000.0 for name in scene.leaves} | {
        f"b1->{name}": 1000.0 for name in scene.leaves
    }

    def slandered(peers: tuple[str, ...], kind: Kind) -> Answer:
        return replace(well(peers, kind), told=said if "b1" in peers else {})

    assert scene.run(slandered, 12) == ()
