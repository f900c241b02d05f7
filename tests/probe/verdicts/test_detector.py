"""What one agent concludes from its own rounds.

One detector, and a simulated world that answers the rounds that it asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dshealthd.probe.members.schedule import Timetable
from dshealthd.probe.observation import (
    Observation,
    Outcome,
    Part,
    PeerReport,
    RoundKind,
    Stage,
    Suspect,
    Timing,
)
from dshealthd.probe.options import BaselineOptions
from dshealthd.probe.verdicts.baseline import Baselines, TimingClass
from dshealthd.probe.verdicts.detector import Detector
from dshealthd.probe.verdicts.planner import Confirmation

ME = "a0"
FOUR_LEAVES = {f"{leaf}{number}": f"leaf-{leaf}" for leaf in "abcd" for number in range(4)}
PARTS = "0123"
USUAL = 0.01
HARD = 1000.0
SLOW = 1.3


@dataclass
class Answer:
    """How a round goes."""

    ratio: float = 1.0
    parts: str = PARTS
    """The parts whose timings have this ratio; the others are as usual."""
    outcome: Outcome = Outcome.OK
    stage: Stage = Stage.DONE
    late: tuple[str, ...] = ()
    told: dict[str, float] = field(default_factory=dict)
    """Scores in addition to a good one from every peer."""
    silent: bool = False


def reported(peer: str, scores: Mapping[str, float]) -> PeerReport | None:
    """Return what a peer reports: its own score, `PEER/PART` or `PEER/leaf`, and `PEER--OTHER`."""
    own = {key.removeprefix(peer): ratio for key, ratio in scores.items() if key.startswith(peer)}
    parts = {key[1:] for key in own if key.startswith("/")}
    pairs = {key[2:]: ratio for key, ratio in own.items() if key.startswith("--")}
    if not own:
        return None
    return PeerReport(own.get(""), tuple(parts - {"leaf"}), "leaf" in parts, pairs)


class Scene:
    """One detector, its schedule, and a clock."""

    def __init__(self, leaves: dict[str, str] | None = None, me: str = ME) -> None:
        self.me = me
        self.leaves = FOUR_LEAVES if leaves is None else leaves
        self.now = 1e9
        self.epoch = 1000
        self.baselines = Baselines(BaselineOptions())
        for number in range(64):
            for part in PARTS:
                value = USUAL * (1 + 0.01 * (number % 5 - 2))
                for far in (False, True):
                    self.baselines.update(
                        TimingClass("rail", "nccl", "all_reduce", 1, part, far), value, number
                    )
                self.baselines.update(
                    TimingClass("local", "nccl", "matrix_product", 1, part, far=False),
                    value,
                    number,
                )
        self.detector = Detector(me, self.leaves, self.baselines, lambda: self.now)
        self.asked: list[Confirmation] = []

    def round(
        self,
        members: Sequence[str],
        answer: Answer,
        *,
        extra: bool = False,
        kind: RoundKind = RoundKind.RAIL,
    ) -> tuple[Confirmation, ...]:
        """Let the detector observe one round."""
        self.now += 1
        peers = [member for member in members if member != self.me]
        op = "matrix_product" if kind is RoundKind.LOCAL else "all_reduce"
        timings = [
            Timing(op, 1, USUAL * (answer.ratio if part in answer.parts else 1), 0.0, part)
            for part in PARTS
            if answer.outcome is Outcome.OK and kind is not RoundKind.LIGHT
        ]
        scores = {} if answer.silent else {**dict.fromkeys(peers, 1.0), **answer.told}
        return self.observe(kind, members, answer, *timings, extra=extra, scores=scores)

    def observe(
        self,
        kind: RoundKind,
        members: Sequence[str],
        answer: Answer,
        *timings: Timing,
        extra: bool = False,
        scores: Mapping[str, float] = {},
    ) -> tuple[Confirmation, ...]:
        """Let the detector observe a round with these timings."""
        return self.detector.observe(
            Observation(
                -1 if extra else self.epoch,
                kind,
                "agent" if kind is RoundKind.LIGHT else "nccl",
                tuple(members),
                answer.outcome,
                answer.stage,
                timings,
                answer.late,
                told=reported(next((one for one in members[::-1] if one != self.me), ""), scores),
                at=self.now,
            )
        )

    def run(
        self, world: Callable[[tuple[str, ...], RoundKind], Answer], epochs: int = 1
    ) -> tuple[Suspect, ...]:
        """Run scheduled rounds and the extra ones asked for; return the suspects at the end."""
        for _ in range(epochs):
            self.epoch += 1
            self.now += 10
            group = Timetable(self.leaves, self.leaves).group_of(self.me, self.epoch)
            asked = (
                list(
                    self.round(
                        group, world(tuple(m for m in group if m != self.me), RoundKind.RAIL)
                    )
                )
                if group
                else []
            )
            for _ in range(20):
                if not asked:
                    break
                request = asked.pop()
                self.asked.append(request)
                peers = tuple(member for member in request.members if member != self.me)
                answer = world(peers, request.kind)
                if request.members[0] != self.me:
                    word = getattr(world, "word", Answer())
                    if word is None:
                        self.detector.withdraw(request)
                        continue
                    answer = word
                asked += self.round(request.members, answer, extra=True, kind=request.kind)
        return self.detector.suspects()


def well(_: tuple[str, ...], __: RoundKind) -> Answer:
    """A world in which nothing is wrong."""
    return Answer()


def always(
    answer: Answer, local: Answer | None = None
) -> Callable[[tuple[str, ...], RoundKind], Answer]:
    """A world in which every round between nodes goes the same way."""
    return lambda _, kind: (local or Answer()) if kind is RoundKind.LOCAL else answer


def with_peer(
    name: str, answer: Answer, others: Answer | None = None
) -> Callable[[tuple[str, ...], RoundKind], Answer]:
    """A world in which rounds with one peer go differently from all others."""
    return lambda peers, _: answer if name in peers else (others or Answer())


def partner(scene: Scene) -> str:
    """Return the next scheduled peer."""
    group = Timetable(scene.leaves, scene.leaves).group_of(scene.me, scene.epoch + 1)
    return next(name for name in group if name != scene.me)


def settled(*given: Any, **named: Any) -> Scene:
    """Return a scene in which all has been well for a few epochs."""
    scene = Scene(*given, **named)
    scene.run(well, 4)
    return scene


def met(*given: Any, **named: Any) -> tuple[Scene, str]:
    """Return such a scene, and its next scheduled peer."""
    scene = settled(*given, **named)
    return scene, partner(scene)


def test_single_spike_is_looked_at_and_dropped() -> None:
    """One slow round accuses nobody: the pair runs once more, and that is all."""
    scene, peer = met()
    scene.run(always(Answer(2.0, "1")))
    assert scene.run(well, 3) == ()
    assert [request.members for request in scene.asked] == [(ME, peer)]


def test_slow_node_is_named_after_two_rounds_and_confirmation() -> None:
    """A node that is slow on all rails with everybody, while its neighbors are well, is accused.
    The confirming rounds are all with different peers.
    """
    scene = settled()
    world = always(Answer(SLOW))
    assert scene.run(world) == ()
    assert scene.run(world) == (Suspect(Part.NODE, ME, "slow"),)
    peer_history = [request.members[1] for request in scene.asked if len(request.members) == 2]
    assert 3 <= len(set(peer_history)) <= 4
    assert {scene.leaves[name] == "leaf-a" for name in peer_history} == {True, False}
    assert scene.detector.report().node == pytest.approx(SLOW, rel=0.02)


def test_two_bad_rounds_with_one_peer_are_not_this_node() -> None:
    """Where a slow node's rounds are long, its peers meet nobody else in between. Two bad rounds
    with it in a row count once: none of them reports itself slow, nor do they blame the fabric.
    """
    scene = settled()
    for _ in range(2):
        scene.epoch += 1
        asked = scene.round((ME, "b1"), Answer(SLOW))
        assert all(request.members == (ME, "b1") for request in asked)
    assert scene.detector.score() == pytest.approx(1, abs=0.02)
    scene.epoch += 1
    assert scene.round((ME, "b2"), Answer(SLOW))
    assert scene.detector.score() == pytest.approx(SLOW, rel=0.02)


def test_cleared_when_it_is_over() -> None:
    """Three good rounds in a row end an accusation; one bad round does not restore it."""
    scene = settled()
    assert scene.run(always(Answer(SLOW)), 3)
    assert scene.run(well, 2) != ()
    assert scene.run(well) == ()
    assert scene.detector.score() == pytest.approx(1)
    assert scene.run(always(Answer(SLOW))) == ()


@pytest.mark.parametrize(("told", "named"), [
    ({}, Suspect(Part.NODE, ME, "slow")),
    (dict.fromkeys(("a1", "a2", "a3"), SLOW), Suspect(Part.LEAF, "leaf-a", "slow")),
    (dict.fromkeys(FOUR_LEAVES, SLOW), Suspect(Part.LEAF, "fabric", "ambiguous")),
])  # fmt: skip
def test_what_neighbors_say_later_corrects_an_accusation(
    told: dict[str, float], named: Suspect
) -> None:
    """A node is accused until most of its leaf find themselves slow, too, or all members."""
    scene = settled()
    assert scene.run(always(Answer(SLOW)), 2) == (Suspect(Part.NODE, ME, "slow"),)

    def world(peers: tuple[str, ...], _: RoundKind) -> Answer:
        return Answer(SLOW, told={peer: told[peer] for peer in peers if peer in told})

    assert scene.run(world, 16) == (named,)


@pytest.mark.parametrize(("ratio", "over"), [(1.041, True), (1.043, False)])
def test_cleared_well_below_the_limit(ratio: float, *, over: bool) -> None:
    """Rounds between what accuses, 1.07, and what clears, 1.042, leave an accusation as it is."""
    scene = settled()
    scene.run(always(Answer(SLOW)), 2)
    assert (scene.run(always(Answer(ratio)), 8) == ()) is over


@pytest.mark.parametrize(("seconds", "again"), [(29.0, False), (31.0, True)])
def test_extra_round_that_does_not_take_place(seconds: float, *, again: bool) -> None:
    """Half a minute after an extra round was asked for, it is given up, and asked for anew."""
    scene = settled()
    asked: tuple[Confirmation, ...] = ()
    while not asked:
        peer = partner(scene)
        scene.epoch += 1
        scene.now += 10
        asked = scene.round((ME, peer), Answer(SLOW))
    other = next(name for name in scene.leaves if name not in {*asked[0].members, peer})
    scene.now += seconds - 1
    scene.epoch += 1
    assert bool(scene.round((ME, other), Answer(SLOW))) is again


def test_slow_rail_is_the_adapter_when_the_gpu_is_well() -> None:
    """If one rail is slow and a local round finds the GPU normal, the adapter is accused."""
    scene = settled()
    assert scene.run(always(Answer(SLOW, "2")), 2) == (Suspect(Part.NIC, f"{ME}/nic2", "slow"),)
    assert Confirmation((ME,), RoundKind.LOCAL) in scene.asked
    assert scene.detector.report().parts == ("2",)


def test_rail_without_local_round_is_ambiguous() -> None:
    """If the GPU cannot be probed, the accusation of its adapter is ambiguous."""
    scene = settled()
    world = always(Answer(SLOW, "2"), local=Answer(outcome=Outcome.DECLINED))
    assert scene.run(world, 2) == (Suspect(Part.NIC, f"{ME}/nic2", "ambiguous"),)


def test_rail_of_a_gpu_without_a_baseline() -> None:
    """A local round that tells nothing of it is waited for, but no longer than a minute."""
    scene = settled()
    for known in (scene.baselines._classes, scene.baselines._families):
        for series in [one for one in known if one.kind == "local"]:
            known.pop(series)
    world = always(Answer(SLOW, "2"))
    assert scene.run(world, 2) == ()
    assert scene.run(world, 8) == (Suspect(Part.NIC, f"{ME}/nic2", "ambiguous"),)


def test_peer_that_takes_it_on_itself_explains_a_round() -> None:
    """Rounds with members that find themselves slow accuse nobody here, and ask for nothing."""
    scene = settled()

    def world(peers: tuple[str, ...], _: RoundKind) -> Answer:
        return Answer(SLOW, told=dict.fromkeys(peers, SLOW))

    assert (
        scene.run(lambda peers, kind: world(peers, kind) if scene.epoch % 2 else Answer(), 12) == ()
    )
    assert scene.asked == []


@pytest.mark.parametrize(("elsewhere", "component", "reason"), [
    ({}, "leaf-a", "slow"),
    (dict.fromkeys((f"{name}/leaf" for name in FOUR_LEAVES), SLOW), "fabric", "ambiguous"),
])  # fmt: skip
def test_way_out_of_a_leaf(elsewhere: dict[str, float], component: str, reason: str) -> None:
    """The leaf is accused if rounds inside it are normal, rounds with every other leaf are slow,
    and the neighbors report the same; the fabric, if others do too. Good rounds inside the leaf
    clear neither.
    """
    scene = settled()

    def world(peers: tuple[str, ...], _: RoundKind) -> Answer:
        if scene.leaves[peers[0]] == "leaf-a":
            return Answer(told={f"{peers[0]}/leaf": SLOW})
        return Answer(SLOW, told=elsewhere)

    assert scene.run(world, 5) == (Suspect(Part.LEAF, component, reason),)
    assert scene.detector.report().uplink
    for name in ("a1", "a2", "a3"):
        scene.round((ME, name), Answer())
    assert scene.detector.suspects()
    assert scene.run(well, 8) == ()


def agreeing(me: str, peer: str, ratio: float) -> dict[str, float]:
    """Return the scores of a peer that finds the pair slow and is well with others."""
    return {f"{peer}--{me}": ratio, f"{peer}--b0": 1.0, f"{peer}--c0": 1.0, f"{peer}--d3": 1.01}


@pytest.mark.parametrize("me", ["a0", "a1", "d2"])
def test_one_bad_pair_with_two_good_ends_is_a_link(me: str) -> None:
    """The link is accused if both ends are well with others and agree on the pair. It has the same
    name at either end, and rechecks clear it.
    """
    scene, peer = met(me=me)
    world = with_peer(peer, Answer(SLOW, told=agreeing(me, peer, SLOW)))
    link = Suspect(Part.LINK, "--".join(sorted((me, peer))), "slow")
    scene.run(world)
    assert scene.run(world) == (link,)
    assert scene.run(world, 10) == (link,)
    assert scene.run(well, 8) == ()


@pytest.mark.parametrize(("blamed", "links"), [("2", 1), (PARTS, 0)])
def test_a_peer_explains_only_the_rails_that_it_blames(blamed: str, links: int) -> None:
    """A peer that finds one of its rails slow, as by a spike, does not explain that all are."""
    scene, peer = met()
    told = agreeing(ME, peer, SLOW) | {f"{peer}/{part}": SLOW for part in blamed}
    found = scene.run(with_peer(peer, Answer(SLOW, told=told)), 4)
    assert found == (Suspect(Part.LINK, f"{ME}--{peer}", "slow"),) * links


@pytest.mark.parametrize(("ratio", "links"), [(1.0, 0), (1.06, 0), (1.08, 1)])
def test_pair_that_only_one_end_finds_slow_is_no_link(ratio: float, links: int) -> None:
    """What is slow for this node may be usual for a peer that has other GPUs, or is in another
    room: that is no fault, and takes one more round each time.
    """
    scene, peer = met()
    found = scene.run(with_peer(peer, Answer(SLOW, told=agreeing(ME, peer, ratio))), 4)
    assert found == (Suspect(Part.LINK, f"{ME}--{peer}", "slow"),) * links
    assert links or [request.members for request in scene.asked] == [(ME, peer)]


def test_an_accused_link_outlasts_a_round_that_its_other_end_finds_usual() -> None:
    """Its ends have agreed before: it takes good rounds to end the accusation."""
    scene, peer = met()
    told = agreeing(ME, peer, SLOW)
    link = scene.run(with_peer(peer, Answer(SLOW, told=told)), 2)
    assert link == (Suspect(Part.LINK, f"{ME}--{peer}", "slow"),)
    usual = Answer(SLOW, told=agreeing(ME, peer, 1.0))
    scene.round((ME, peer), usual, extra=True)
    assert scene.detector.suspects() == link


def test_members_in_maintenance_are_left_alone() -> None:
    """No extra round is asked of them, nor are they needed to tell that a node is gone; a link to
    one is no suspect any more.
    """
    scene, peer = met()
    absent = {name for name in FOUR_LEAVES if name[1] in "23" and name not in {ME, peer}}
    scene.detector._absent = lambda: absent
    gone = (Suspect(Part.NODE, peer, "unreachable"),)
    assert scene.run(vanished(peer, Outcome.UNREACHABLE, HARD), 2) == gone
    scene.run(well, 8)
    scene.run(always(Answer(SLOW)), 4)
    assert not absent & {name for request in scene.asked for name in request.members}
    assert Suspect(Part.NODE, ME, "slow") in scene.detector.suspects()


def test_one_other_is_enough_if_all_others_are_in_maintenance() -> None:
    """A node that neither this one nor the only other reaches is gone."""
    scene = settled(dict.fromkeys((ME, "a1", "a2", "a3"), ""))
    scene.detector._absent = lambda: {"a3"}
    found = scene.run(vanished("a1", Outcome.UNREACHABLE, HARD), 6)
    assert found == (Suspect(Part.NODE, "a1", "unreachable"),)
    assert not any("a3" in request.members for request in scene.asked)


def test_a_link_to_a_member_in_maintenance_is_no_suspect() -> None:
    """What is done to it there may slow its rounds."""
    scene, peer = met()
    world = with_peer(peer, Answer(SLOW, told=agreeing(ME, peer, SLOW)))
    assert scene.run(world, 2)
    scene.detector._absent = lambda: {peer}
    while partner(scene) == peer:
        scene.epoch += 1
    assert scene.run(well) == ()


def test_pair_is_not_ambiguous_before_the_other_end_has_met_others() -> None:
    """While extra rounds keep the other end from meeting others, nothing verifies it. Unknown is
    not the same as disagreement, so the pair is called ambiguous only in the end.
    """
    scene, peer = met()
    told = {f"{peer}--{ME}": SLOW, f"{peer}--b0": 1.0}
    alone = with_peer(peer, Answer(SLOW, told=told))
    assert scene.run(alone, 6) == ()
    agreed = with_peer(peer, Answer(SLOW, told=agreeing(ME, peer, SLOW)))
    assert scene.run(agreed) == (Suspect(Part.LINK, f"{ME}--{peer}", "slow"),)
    scene.run(well, 8)
    assert scene.run(alone, 24) == (Suspect(Part.LINK, f"{ME}--{peer}", "ambiguous"),)
    assert scene.run(agreed, 4) == (Suspect(Part.LINK, f"{ME}--{peer}", "slow"),)


def lost(*late: str, outcome: Outcome = Outcome.UNREACHABLE) -> Answer:
    """Return how a round goes that a peer does not take part in; it reports nothing."""
    return Answer(outcome=outcome, stage=Stage.INVITE, late=late, silent=True)


GONE = lost()


def reached(name: str) -> Answer:
    """Return what another member tells that has called a node: it is well with others."""
    return Answer(told={f"{name}--{other}": 1.0 for other in ("c0", "c1", "d0", "d1")})


def vanished(
    name: str, outcome: Outcome, opinion: float
) -> Callable[[tuple[str, ...], RoundKind], Answer]:
    """A world in which one node does not answer; others are asked whether they reach it."""
    world = with_peer(name, silent := lost(name, outcome=outcome))
    world.word = silent if opinion >= HARD else reached(name)  # type: ignore[attr-defined]
    return world


@pytest.mark.parametrize(("ratio", "links"), [(1.0, 1), (HARD, 0)])
def test_other_end_that_fails_inside_its_leaf_is_no_link(ratio: float, links: int) -> None:
    """A node that loses packets does so inside its leaf, too: its good rounds there say nothing of
    the way out of it, a failed one does.
    """
    scene, peer = met()
    while peer.startswith("a"):
        scene.run(well)
        peer = partner(scene)
    neighbor = f"{peer[0]}{(int(peer[1]) + 1) % 4}"
    cut = vanished(peer, Outcome.UNREACHABLE, 1.0)
    told = reached(peer).told | {f"{peer}--{neighbor}": ratio}
    cut.word = Answer(told=told)  # type: ignore[attr-defined] # as `vanished` sets it
    found = scene.run(cut, 10)
    assert found == (Suspect(Part.LINK, f"{ME}--{peer}", "unreachable"),) * links


@pytest.mark.parametrize("outcome", [Outcome.UNREACHABLE, Outcome.REFUSED])
def test_node_that_nobody_reaches(outcome: Outcome) -> None:
    """A node that answers neither this node nor its next peer is accused, with the reason. Echoes
    do to find that out.
    """
    scene, peer = met()
    world = vanished(peer, outcome, HARD)
    scene.run(world)
    assert scene.run(world) == (Suspect(Part.NODE, peer, str(outcome)),)
    assert scene.detector._unreached() == {peer}
    scene.round((ME, peer), lost(peer, outcome=outcome))
    assert not any(one.bad and one.round.peer == peer for one in scene.detector._company.log)
    assert {request.kind for request in scene.asked} == {RoundKind.LIGHT}
    left = []
    for _ in range(5):
        scene.round((ME, peer), Answer(outcome=Outcome.FAILED, stage=Stage.SIZES))
        scene.epoch += 1
        scene.round((ME,), Answer(), kind=RoundKind.LOCAL)
        left.append(bool(scene.detector.suspects()))
    assert left == [True, True, True, True, False], "a round that begins is no call in vain"


def test_a_link_has_the_reason_that_it_has_now() -> None:
    """If a peer refuses calls while its agent starts and its path is then cut, the reason is
    "unreachable".
    """
    scene, peer = met()
    scene.run(vanished(peer, Outcome.REFUSED, 1.0))
    found = scene.run(vanished(peer, Outcome.UNREACHABLE, 1.0), 3)
    assert found == (Suspect(Part.LINK, f"{ME}--{peer}", "unreachable"),)


@pytest.mark.parametrize(("kind", "suspected"), [(RoundKind.LIGHT, True), (RoundKind.RAIL, False)])
def test_a_root_that_has_waited_for_this_node(kind: RoundKind, *, suspected: bool) -> None:
    """A collective tells nothing of the two then; an echo may be lost on its way."""
    scene = settled()
    scene.round(("b1", ME), Answer(outcome=Outcome.HUNG, stage=Stage.SIZES, late=(ME,)), kind=kind)
    assert ("b1" in scene.detector._pairs) is suspected


def test_slow_pair_whose_other_end_is_gone() -> None:
    """What does not answer reports nothing."""
    scene, peer = met()
    scene.round((ME, peer), Answer(SLOW))
    scene.round((ME, peer), lost(peer))
    assert scene.detector._pairs[peer].unreached


@pytest.mark.parametrize(
    ("word", "left"),
    [(Answer(told={"b3": HARD}), False), (lost(outcome=Outcome.INCONCLUSIVE), True)],
)
def test_what_another_tells_of_an_unreached_node(word: Answer, *, left: bool) -> None:
    """No link is suspected to one that takes it on itself. A call of which nothing is known, as a
    name server did not answer, is no word.
    """
    scene, peer = met()
    assert peer == "b3"
    world = vanished(peer, Outcome.UNREACHABLE, 1.0)
    world.word = word  # type: ignore[attr-defined] # as `vanished` sets it
    scene.run(world, 2)
    assert any(ME not in request.members for request in scene.asked)
    pairs = scene.detector._pairs
    assert [pair.words for pair in pairs.values() if pair.peer == peer] == [{}] * left


@pytest.mark.parametrize(
    ("led", "pending", "requested", "opens"),
    [
        (True, False, False, True),
        (False, False, False, False),
        (True, True, False, False),
        (True, False, True, False),
    ],
)
def test_rounds_outside_the_schedule_that_begin_a_suspicion(
    *, led: bool, pending: bool, requested: bool, opens: bool
) -> None:
    """Those that this node leads of itself, as with the nodes of a hung job."""
    scene = settled()
    ends = (ME, "b1") if led else ("b1", ME)
    seen = Observation(
        -1, RoundKind.LIGHT, "agent", ends, Outcome.HUNG, Stage.SIZES, late=("b1",), at=scene.now
    )
    scene.detector._pending |= {(ME, "b1"): scene.now} if pending else {}
    scene.detector.observe(seen, requested=requested)
    assert ("b1" in scene.detector._pairs) is opens


def test_a_suspicion_lapses_without_rounds() -> None:
    """After six epochs in which the two have not met."""
    scene = settled()
    scene.round((ME, "b1"), lost("b1"))
    for later, is_there in ((6, True), (1, False)):
        scene.epoch += later
        scene.round((ME,), Answer(), kind=RoundKind.LOCAL)
        assert ("b1" in scene.detector._pairs) is is_there


def test_node_of_which_nobody_tells_is_ambiguous() -> None:
    """If nobody can be asked about a peer, there is no guess whether it is the node or the link."""
    scene, peer = met()
    world = vanished(peer, Outcome.UNREACHABLE, HARD)
    world.word = None  # type: ignore[attr-defined] # as `vanished` sets it
    assert scene.run(world, 6) == ()
    assert scene.run(world, 10) == (Suspect(Part.LINK, f"{ME}--{peer}", "ambiguous"),)


def test_node_that_calls_and_cannot_be_called() -> None:
    """A node that refuses all calls, those of others too, while its own calls succeed, is accused
    until a call to it succeeds.
    """
    scene = settled(dict.fromkeys(("a0", "a1", "a2", "a3"), ""))
    world = vanished("a1", Outcome.REFUSED, HARD)
    found: set[Suspect] = set()
    for _ in range(8):
        found.update(scene.run(world))
        scene.round(("a1", ME), Answer(), kind=RoundKind.LIGHT)
        found.update(scene.detector.suspects())
    assert found == {Suspect(Part.NODE, "a1", "refused")}
    assert scene.detector.suspects()
    scene.round((ME, "a1"), Answer(), extra=True, kind=RoundKind.LIGHT)
    assert scene.detector.suspects() == ()


@pytest.mark.parametrize("outcome", [Outcome.HUNG, Outcome.CORRUPTED, Outcome.FAILED])
def test_a_root_that_blames_this_node_accuses_nobody(outcome: Outcome) -> None:
    """One peer that calls its rounds with this node this node's fault: no other does."""
    scene = Scene()
    peer = partner(scene)
    blames = Answer(outcome=outcome, stage=Stage.SIZES, late=(ME,))
    assert scene.run(with_peer(peer, blames), 16) == ()


def test_who_refuses_is_not_asked_for_what_its_rounds_come_to() -> None:
    """A peer whose rounds failed and that then refuses all calls is called only a few times."""
    scene, peer = met()
    scene.run(with_peer(peer, Answer(outcome=Outcome.FAILED, stage=Stage.VERIFY)))
    scene.asked.clear()
    scene.run(with_peer(peer, lost(peer, outcome=Outcome.REFUSED)), 4)
    assert 0 < sum(request.members == (ME, peer) for request in scene.asked) <= 8


@pytest.mark.parametrize("outcome", [Outcome.DECLINED, Outcome.UNAUTHORIZED])
@pytest.mark.parametrize(("opinion", "part"), [(HARD, Part.NODE), (1.0, Part.LINK)])
def test_who_declines_is_there(opinion: float, part: Part, outcome: Outcome) -> None:
    """A node that was accused of refusing calls, and now declines a round, is cleared. That it
    calls, or that nobody knows why a call failed, clears it of nothing.
    """
    scene, peer = met()
    assert {suspect.part for suspect in scene.run(vanished(peer, Outcome.REFUSED, opinion), 3)} == {
        part
    }
    found = scene.detector.suspects()
    scene.round((ME, peer), lost(outcome=Outcome.INCONCLUSIVE))
    scene.round((peer, ME), lost(outcome=outcome))
    assert scene.detector.suspects() == found
    scene.round((ME, peer), lost(outcome=outcome))
    assert scene.detector.suspects() == ()


def silences(
    scene: Scene, names: Sequence[str], told: dict[str, float] | None = None
) -> set[Suspect]:
    """Let peers in turn not answer, and then answer; return who is accused meanwhile."""
    found: set[Suspect] = set()
    for name in names:
        scene.epoch += 1
        scene.round((ME, name), lost(name, outcome=Outcome.HUNG), kind=RoundKind.LIGHT)
        scene.epoch += 1
        scene.round((ME, name), Answer(told=told or {}), kind=RoundKind.LIGHT)
        found.update(scene.detector.suspects())
    return found


def test_short_outages_with_several_peers_are_this_node() -> None:
    """If three peers in turn are silent and answer soon after, this node loses packets."""
    scene = settled()
    assert silences(scene, ("a1", "b2", "a3")) == {Suspect(Part.NODE, ME, "intermittent")}
    assert scene.detector.score() == HARD
    assert scene.run(well, 6)
    assert scene.run(well, 6) == ()


@pytest.mark.parametrize(("names", "earlier"), [(["a1"], 1), (["a1", "b2", "a3"], 0)])
def test_outages_of_this_node_are_not_those_of_its_links(names: list[str], earlier: int) -> None:
    """Once it is cleared, a pair begins anew."""
    scene = settled()
    silences(scene, names)
    scene.run(well, 12)
    scene.epoch += 1
    scene.round((ME, "a1"), lost("a1", outcome=Outcome.HUNG))
    assert scene.detector._pairs["a1"].earlier == earlier


def test_outages_that_a_peer_takes_on_itself_are_not_its_link_s() -> None:
    """A node that finds itself at fault explains those before, too."""
    scene = settled()
    silences(scene, ["a1"])
    vain = lost("a1", outcome=Outcome.HUNG)
    blamed = Answer(outcome=Outcome.FAILED, stage=Stage.SIZES, told={"a1": HARD})
    for answer, earlier in ((vain, [1]), (blamed, []), (vain, [0])):
        scene.epoch += 1
        scene.round((ME, "a1"), answer)
        assert [pair.earlier for pair in scene.detector._pairs.values()] == earlier


def test_outages_before_and_after_a_slow_time_are_counted() -> None:
    """That a node is no longer slow does not mean that it loses no packets."""
    scene = settled()
    assert silences(scene, ("a1", "b2")) == set()
    assert scene.run(always(Answer(SLOW)), 2) == (Suspect(Part.NODE, ME, "slow"),)
    assert scene.run(well, 3) == ()
    assert silences(scene, ("a3",)) == {Suspect(Part.NODE, ME, "intermittent")}


def nobody(outcome: Outcome) -> Callable[[tuple[str, ...], RoundKind], Answer]:
    """A world in which every call ends like this."""

    def world(peers: tuple[str, ...], _: RoundKind) -> Answer:
        return lost(*peers[-1:], outcome=outcome)

    world.word = None  # type: ignore[attr-defined] # nobody can be asked either
    return world


def test_everybody_unreachable_means_oneself() -> None:
    """If nobody answers, on this leaf or another, this node is cut off and accuses nobody else."""
    scene = settled()
    cut_off = (Suspect(Part.NODE, ME, "unreachable"),)
    assert scene.run(nobody(Outcome.UNREACHABLE), 3) == cut_off
    assert {request.kind for request in scene.asked} == {RoundKind.LIGHT}
    assert scene.detector.score() == HARD
    assert scene.run(well, 4) == ()


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.UNAUTHORIZED])
@pytest.mark.parametrize("members", [3, 4, 16])
def test_everybody_refusing_is_not_oneself(members: int, outcome: Outcome) -> None:
    """If all other agents start again at once, each refusal has come over the network: the node
    whose agent was first accuses neither itself nor them nor its links, and has no bad score.
    Nor does one that has another key than the others, as when all are given a new one in one step.
    """
    scene = settled(dict.fromkeys((ME, *(f"a{number}" for number in range(1, members))), ""))
    for _ in range(40):
        assert scene.run(nobody(outcome)) == ()
        assert scene.detector.score() == 1.0
    assert scene.run(well, 4) == ()


@pytest.mark.parametrize(
    ("first", "seconds"),
    [
        (None, 600.0),
        (Outcome.INCONCLUSIVE, 600.0),
        (Outcome.HUNG, 600.0),
        (Outcome.DECLINED, 0.0),
    ],
)
def test_who_boots_first_is_not_cut_off(first: Outcome | None, seconds: float) -> None:
    """After a power cut, an agent that nobody has answered yet waits for ten minutes before it
    finds its node cut off. Once one has answered, it needs no more than the usual rounds.
    """
    scene = Scene(dict.fromkeys((ME, "a1", "a2", "a3"), ""))
    if first is not None:
        scene.round((ME, "a1"), lost(outcome=first))
    begun = scene.now
    while scene.now < begun + seconds - 20:
        assert scene.run(nobody(Outcome.UNREACHABLE)) == ()
        assert scene.detector.score() == 1.0
    assert scene.run(nobody(Outcome.UNREACHABLE), 8) == (Suspect(Part.NODE, ME, "unreachable"),)
    assert scene.run(well, 4) == ()


def test_everybody_booting_is_not_oneself() -> None:
    """Nor if all others were silent before, as nodes are while they boot."""
    scene = settled(dict.fromkeys((ME, "a1", "a2", "a3"), ""))
    scene.run(nobody(Outcome.UNREACHABLE), 2)
    for _ in range(16):
        found = scene.run(nobody(Outcome.REFUSED))
        assert Part.NODE not in {suspect.part for suspect in found}


def test_refusals_after_silence_are_no_outages() -> None:
    """Peers that are silent, refuse and then answer were booted: this node has lost no packets."""
    scene = settled()
    for name in ("a1", "b2", "a3"):
        for outcome in (Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.OK):
            scene.epoch += 1
            late = () if outcome is Outcome.OK else (name,)
            scene.round((ME, name), Answer(outcome=outcome, late=late), kind=RoundKind.LIGHT)
    assert scene.detector.suspects() == ()


def test_only_other_leaves_unreachable_is_the_leaf() -> None:
    """If the neighbors report the same, and no other leaf answers, the leaf is cut off."""
    scene = settled()

    def world(peers: tuple[str, ...], _: RoundKind) -> Answer:
        return (
            Answer(told={f"{peers[0]}/leaf": HARD}) if scene.leaves[peers[0]] == "leaf-a" else GONE
        )

    assert scene.run(world, 8) == (Suspect(Part.LEAF, "leaf-a", "unreachable"),)


def test_half_of_the_members_gone_accuses_none_of_the_living() -> None:
    """With every second member dead, this node still has some good rounds, so it is not cut off."""
    scene = Scene()
    scene.run(well, 6)
    dead = {name for number, name in enumerate(sorted(scene.leaves)) if number % 2}

    def world(peers: tuple[str, ...], _: RoundKind) -> Answer:
        return (
            GONE
            if dead & set(peers)
            else Answer(told={f"{peers[0]}--{name}": HARD for name in sorted(dead)[:4]})
        )

    for _ in range(20):
        assert {
            suspect.component for suspect in scene.run(world) if suspect.reason != "ambiguous"
        } <= dead


@pytest.mark.parametrize(
    ("outcome", "stage"),
    [
        (Outcome.HUNG, Stage.SIZES),
        (Outcome.CORRUPTED, Stage.VERIFY),
        (Outcome.FAILED, Stage.INIT),
        (Outcome.HUNG, Stage.INIT),
    ],
)
def test_collectives_that_end_badly_with_everybody(outcome: Outcome, stage: Stage) -> None:
    """Hangs, wrong data and errors with all peers are this node's, each with its reason."""
    scene = settled()
    late = (ME,) if outcome is Outcome.HUNG else ()
    assert scene.run(always(Answer(outcome=outcome, stage=stage, late=late)), 2) == (
        Suspect(Part.NODE, ME, str(outcome)),
    )
    assert scene.run(well, 3) == ()


@pytest.mark.parametrize("score", [1.0, HARD])
def test_hang_that_waits_for_the_peer_is_not_ours(score: float) -> None:
    """Rounds in which the other end was late do not count against this node."""
    scene = settled()

    def world(peers: tuple[str, ...], kind: RoundKind) -> Answer:
        if kind is RoundKind.LIGHT:
            return Answer()
        told = dict.fromkeys(peers, score)
        return Answer(outcome=Outcome.HUNG, stage=Stage.SIZES, late=peers, told=told)

    assert scene.run(world, 6) == ()
    assert scene.detector.score() == 1.0


@pytest.mark.parametrize(("ill", "named"), [(1, False), (2, True)])
def test_echoes_after_a_hung_round_tell_node_from_link(ill: int, *, named: bool) -> None:
    """After a collective that hung, this node exchanges echoes with two other members at once. If
    they go badly with both, it is this node; if only with one, that tells nothing of this node.
    """
    scene, peer = met()
    asked = list(scene.round((ME, peer), Answer(outcome=Outcome.HUNG, stage=Stage.SIZES)))
    for number in range(2):
        (request,) = asked
        assert request.kind is RoundKind.LIGHT
        assert peer not in request.members
        answer = lost(*request.members[1:]) if number < ill else Answer()
        asked = list(scene.round(request.members, answer, extra=True, kind=RoundKind.LIGHT))
    assert not asked
    assert scene.detector.suspects() == ((Suspect(Part.NODE, ME, "hung"),) if named else ())
    assert scene.run(well, 4) == ()


def test_wrong_data_with_one_peer_only_is_a_link() -> None:
    """If one pair gives wrong sums, and its ends right ones with others, it is the link."""
    scene, peer = met()
    world = with_peer(
        peer, Answer(outcome=Outcome.CORRUPTED, stage=Stage.VERIFY, told=agreeing(ME, peer, HARD))
    )
    assert scene.run(world, 3) == (Suspect(Part.LINK, f"{ME}--{peer}", "corrupted"),)


def test_local_rounds_that_end_badly() -> None:
    """A node whose own GPUs fail among themselves is accused without any peer."""
    scene = Scene()
    broken = Answer(outcome=Outcome.HUNG, stage=Stage.SIZES)
    asked: list[Confirmation] = []
    for _ in range(2):
        asked += scene.round((ME,), broken, kind=RoundKind.LOCAL)
    assert asked == [Confirmation((ME,), RoundKind.LOCAL)]
    for _ in range(3):
        scene.round((ME,), broken, kind=RoundKind.LOCAL, extra=True)
    assert scene.detector.suspects() == (Suspect(Part.NODE, ME, "hung"),)


@pytest.mark.parametrize("outcome", [Outcome.DECLINED, Outcome.INCONCLUSIVE])
def test_rounds_that_tell_nothing_accuse_nobody(outcome: Outcome) -> None:
    """A declined or disturbed round is no evidence; a reference that declines is replaced."""
    scene = settled()
    assert scene.run(always(Answer(outcome=outcome, stage=Stage.INVITE)), 10) == ()
    assert scene.asked == []
    busy: set[str] = set()

    def world(peers: tuple[str, ...], _: RoundKind) -> Answer:
        if len(scene.asked) == 1:
            busy.update(peers)
        return Answer(outcome=outcome) if peers and set(peers) <= busy else Answer(SLOW)

    assert scene.run(world, 3) == (Suspect(Part.NODE, ME, "slow"),)
    assert busy


def test_one_peer_is_not_asked_for_ever() -> None:
    """While all peers but one are busy, that one gets no more extra rounds than count."""
    scene = settled(dict.fromkeys(("a0", "a1", "a2", "a3"), ""))
    failed = Answer(outcome=Outcome.FAILED, stage=Stage.STORE)
    busy = {"a2", "a3"}

    def world(peers: tuple[str, ...], _: RoundKind) -> Answer:
        return Answer(outcome=Outcome.DECLINED) if busy & set(peers) else failed

    assert scene.run(world, 6) == ()
    assert Counter(scene.asked)[Confirmation(("a0", "a1"), RoundKind.RAIL)] <= 2 * 4
    busy.clear()
    assert scene.run(world, 2) == (Suspect(Part.NODE, "a0", "failed"),)


def test_two_nodes_cannot_be_told_apart() -> None:
    """With a single peer, the pair is accused as ambiguous."""
    scene = settled({"a0": "", "a1": ""})
    pair = (Suspect(Part.LINK, "a0--a1", "ambiguous"),)
    assert scene.run(always(Answer(SLOW, told={"a1--a0": SLOW})), 8) == pair
    assert scene.run(well, 4) == ()
    assert scene.run(always(GONE), 8) == pair


def test_without_baseline_nobody_is_accused() -> None:
    """Without baselines slow rounds are no evidence, but lost members are."""
    scene = Scene()
    scene.detector = Detector(ME, scene.leaves, Baselines(BaselineOptions()), lambda: scene.now)
    assert scene.run(always(Answer(3.0)), 6) == ()
    assert scene.run(always(GONE), 3) == (Suspect(Part.NODE, ME, "unreachable"),)


def test_baselines_learn_from_good_rounds_only() -> None:
    """Flagged timings, extra rounds, and those with a slow peer are never learnt."""
    scene = settled()
    before = scene.baselines.document()
    scene.now += 86400
    scene.run(always(Answer(SLOW, told={})), 30)
    assert scene.baselines.document() == before
    scene.run(well)
    assert scene.baselines.document() == before, "the fault may not flag every round"
    scene.run(lambda peers, _: Answer(told=dict.fromkeys(peers, SLOW)), 5)
    assert scene.baselines.document() == before


def test_members_that_leave_are_forgotten() -> None:
    """The accusation of a node ends when it leaves the list of members."""
    scene, peer = met()
    world = vanished(peer, Outcome.UNREACHABLE, HARD)
    assert scene.run(world, 2)
    scene.detector.apply_members(
        {name: leaf for name, leaf in scene.leaves.items() if name != peer}
    )
    assert scene.detector.suspects() == ()


def test_clock_that_jumped_back_stops_nothing() -> None:
    """After a clock that was years ahead is corrected, faults are found and end as usual."""
    scene = Scene()
    scene.now += 3e8
    scene.epoch += 30_000_000
    scene.run(well, 3)
    peer = partner(scene)
    assert scene.run(vanished(peer, Outcome.UNREACHABLE, HARD), 2) == (
        Suspect(Part.NODE, peer, "unreachable"),
    )
    scene.now -= 3e8
    scene.epoch -= 30_000_000
    assert scene.run(well, 2) == ()
    assert scene.run(always(Answer(SLOW)), 2) == (Suspect(Part.NODE, ME, "slow"),)
    assert scene.run(well, 3) == ()


def test_slow_echoes_are_no_score() -> None:
    """They depend on the load of both hosts."""
    scene = settled()
    for peer in ("b1", "b2", "b3"):
        timing = Timing("echo", 0, 1.0, 0.0)
        scene.observe(RoundKind.LIGHT, (ME, peer), Answer(), timing)
    assert scene.detector.score() == pytest.approx(1, abs=0.02)
    assert scene.detector.report().parts == ("light",)


def test_sizes_of_rounds_on_demand_leave_no_trace() -> None:
    """Sizes requested by hand are not learnt and add nothing to reports or state."""
    scene = settled()
    before, told = len(scene.baselines), scene.detector.report()
    for size in range(100):
        timing = Timing("all_reduce", size + 10, 1.0, 0.0, "0")
        scene.observe(RoundKind.RAIL, (ME, "b0"), Answer(), timing, extra=True)
    assert len(scene.baselines) == before
    assert all(signal.size < 10 for signal in scene.detector._history)
    assert scene.detector.report().node == told.node


def test_withdrawn_round_is_asked_again() -> None:
    """An extra round that could not be run does not hold up the next one."""
    scene = settled()
    scene.run(always(Answer(SLOW)))
    scene.epoch += 1
    first = scene.round((ME, "b2"), Answer(SLOW))
    assert len(first) == 1
    assert scene.round((ME, "b3"), Answer(SLOW), extra=True) == ()
    scene.detector.withdraw(first[0])
    assert len(scene.round((ME, "b1"), Answer(SLOW), extra=True)) == 1


def test_who_did_not_call_another_is_left_alone() -> None:
    """A member that was asked for a round and did not run it is not asked again at once."""
    scene = settled()
    for members in (("b1", "b2"), (ME, "b3")):
        scene.detector.withdraw(Confirmation(members, RoundKind.LIGHT))
    rests = [scene.detector._company.rests(name, scene.now) for name in ("b1", "b2", ME, "b3")]
    assert rests == [True, False, False, False]
