"""What one agent concludes from its own rounds.

One judge, and a world that answers the rounds which it asks for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from dshealthd.probe.members.schedule import Timetable
from dshealthd.probe.observation import Kind, Observation, Outcome, Part, Stage, Suspect, Timing
from dshealthd.probe.options import BaselineOptions, VerdictOptions
from dshealthd.probe.verdicts.baseline import Baselines, TimingClass
from dshealthd.probe.verdicts.detector import Confirmation, Detector
from dshealthd.probe.verdicts.signals import UNTIMED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Those that take so long; the others are as usual."""
    outcome: Outcome = Outcome.OK
    stage: Stage = Stage.DONE
    late: tuple[str, ...] = ()
    told: dict[str, float] = field(default_factory=dict)
    """Scores, besides a good one of every peer."""
    silent: bool = False


World = "Callable[[tuple[str, ...], Kind], Answer]"


class Scene:
    """One judge, its schedule, and a clock."""

    def __init__(
        self, leaves: dict[str, str] | None = None, me: str = ME, parts: str = PARTS
    ) -> None:
        self.me = me
        self.leaves = FOUR_LEAVES if leaves is None else leaves
        self.parts = parts
        self.now = 1e9
        self.epoch = 1000
        self.baselines = Baselines(BaselineOptions())
        for number in range(64):
            for part in parts or ("",):
                value = USUAL * (1 + 0.01 * (number % 5 - 2))
                for far in (False, True):
                    self.baselines.update(
                        TimingClass("rail", "nccl", "all_reduce", 1, part, 2, far), value, number
                    )
                self.baselines.update(
                    TimingClass("local", "nccl", "matrix_product", 1, part, 1, far=False),
                    value,
                    number,
                )
        self.detector = Detector(
            me, self.leaves, self.baselines, VerdictOptions(), lambda: self.now
        )
        self.asked: list[Confirmation] = []

    def round(
        self, members: Sequence[str], answer: Answer, *, extra: bool = False, kind: Kind = Kind.RAIL
    ) -> tuple[Confirmation, ...]:
        """Let the judge see one round."""
        self.now += 1
        peers = [member for member in members if member != self.me]
        op = "matrix_product" if kind is Kind.LOCAL else "all_reduce"
        timings = [
            Timing(op, 1, USUAL * (answer.ratio if part in answer.parts else 1), 0.0, part)
            for part in (self.parts or ("",))
            if answer.outcome is Outcome.OK and kind is not Kind.LIGHT
        ]
        scores = {} if answer.silent else {**dict.fromkeys(peers, 1.0), **answer.told}
        epoch = -1 if extra else self.epoch
        return self.detector.observe(
            Observation(
                epoch,
                kind,
                "nccl",
                tuple(members),
                answer.outcome,
                answer.stage,
                tuple(timings),
                answer.late,
                "",
                tuple(scores.items()),
                self.now,
            )
        )

    def run(
        self, world: Callable[[tuple[str, ...], Kind], Answer], epochs: int = 1
    ) -> tuple[Suspect, ...]:
        """Run scheduled rounds, and the extra ones that are asked for.

        Return what stands at the end.
        """
        for _ in range(epochs):
            self.epoch += 1
            self.now += 10
            group = Timetable(self.leaves, self.leaves).group_of(self.me, self.epoch)
            asked = (
                list(self.round(group, world(tuple(m for m in group if m != self.me), Kind.RAIL)))
                if group
                else []
            )
            for _ in range(20):
                if not asked:
                    break
                request = asked.pop()
                self.asked.append(request)
                peers = tuple(member for member in request.members if member != self.me)
                asked += self.round(
                    request.members, world(peers, request.kind), extra=True, kind=request.kind
                )
        return self.detector.suspects()


def well(_: tuple[str, ...], __: Kind) -> Answer:
    """A world in which nothing is wrong."""
    return Answer()


def always(
    answer: Answer, local: Answer | None = None
) -> Callable[[tuple[str, ...], Kind], Answer]:
    """A world in which every round between nodes goes the same way."""
    return lambda _, kind: (local or Answer()) if kind is Kind.LOCAL else answer


def with_peer(
    name: str, answer: Answer, others: Answer | None = None
) -> Callable[[tuple[str, ...], Kind], Answer]:
    """A world in which rounds with one peer go another way than all others."""
    return lambda peers, _: answer if name in peers else (others or Answer())


def partner(scene: Scene) -> str:
    """Return who is met next."""
    group = Timetable(scene.leaves, scene.leaves).group_of(scene.me, scene.epoch + 1)
    return next(name for name in group if name != scene.me)


def test_health_is_quiet() -> None:
    """Rounds as usual accuse nobody, ask for nothing, and give a score of 1."""
    scene = Scene()
    assert scene.run(well, 20) == ()
    assert scene.asked == []
    assert scene.detector.score() == pytest.approx(1)
    assert dict(scene.detector.scores())[ME] == pytest.approx(1)


def test_single_spike_is_looked_at_and_dropped() -> None:
    """One slow round accuses nobody; the pair is run once more after the next good round, and that
    is all.
    """
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    scene.run(always(Answer(2.0, "1")))
    assert scene.run(well, 3) == ()
    assert [request.members for request in scene.asked] == [(ME, peer)]


def test_slow_node_is_named_after_two_rounds_and_confirmation() -> None:
    """Slow on all rails with everybody, while the neighbours are well.

    The node, by references that are all others.
    """
    scene = Scene()
    scene.run(well, 3)
    world = always(Answer(SLOW))
    assert scene.run(world) == ()
    assert scene.run(world) == (Suspect(Part.NODE, ME, "slow"),)
    peer_history = [request.members[1] for request in scene.asked if len(request.members) == 2]
    assert 3 <= len(set(peer_history)) <= 4
    assert {scene.leaves[name] == "leaf-a" for name in peer_history} == {True, False}
    assert dict(scene.detector.scores())[ME] == pytest.approx(SLOW, rel=0.02)


def test_cleared_when_it_is_over() -> None:
    """Three good rounds in a row end an accusation, and one bad one after that does not bring it
    back.
    """
    scene = Scene()
    scene.run(well, 3)
    assert scene.run(always(Answer(SLOW)), 3)
    assert scene.run(well, 3) == ()
    assert scene.detector.score() == pytest.approx(1)
    assert scene.run(always(Answer(SLOW))) == ()


def test_slow_rail_is_the_adapter_when_the_gpu_is_well() -> None:
    """One rail is slow: a local round is asked for, and when the GPU is as usual it is the adapter."""
    scene = Scene()
    scene.run(well, 3)
    assert scene.run(always(Answer(SLOW, "2")), 2) == (Suspect(Part.NIC, f"{ME}/nic2", "slow"),)
    assert Confirmation((ME,), Kind.LOCAL) in scene.asked
    assert dict(scene.detector.scores())[f"{ME}/2"] == pytest.approx(SLOW, rel=0.02)


def test_slow_gpu_explains_its_rail() -> None:
    """Where the GPU is slow in local rounds too, it is the GPU, and the adapter is not accused
    beside it.
    """
    scene = Scene()
    scene.run(well, 3)
    assert scene.run(always(Answer(SLOW, "2"), local=Answer(SLOW, "2")), 3) == (
        Suspect(Part.GPU, f"{ME}/gpu2", "slow"),
    )


def test_rail_without_local_round_is_ambiguous() -> None:
    """Where the GPU cannot be looked at, adapter and GPU are not told apart, and that is said."""
    scene = Scene()
    scene.run(well, 3)
    world = always(Answer(SLOW, "2"), local=Answer(outcome=Outcome.DECLINED))
    assert scene.run(world, 2) == (Suspect(Part.NIC, f"{ME}/nic2", "ambiguous"),)


def test_peer_that_takes_it_on_itself_explains_a_round() -> None:
    """Rounds with members that find themselves slow accuse nobody here, and ask for nothing."""
    scene = Scene()
    scene.run(well, 3)

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
        return Answer(SLOW, told=dict.fromkeys(peers, SLOW))

    assert (
        scene.run(lambda peers, kind: world(peers, kind) if scene.epoch % 2 else Answer(), 12) == ()
    )
    assert scene.asked == []


def test_slow_leaf_is_told_from_a_slow_node() -> None:
    """Slow with everybody, and the neighbours find the same of themselves, members elsewhere do
    not: the leaf.
    """
    scene = Scene()
    scene.run(well, 3)

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
        return Answer(SLOW, told={peer: SLOW for peer in peers if scene.leaves[peer] == "leaf-a"})

    scene.run(always(Answer(SLOW)))
    assert scene.run(world, 2) == (Suspect(Part.LEAF, "leaf-a", "slow"),)
    assert scene.run(well, 6) == ()


def test_slow_leaf_is_found_by_who_comes_later() -> None:
    """An agent that starts when its neighbours know of it already comes to the same, by its rounds
    with other leaves.
    """
    scene = Scene()
    world = scene.run(
        lambda peers, _: Answer(
            SLOW, told={peer: SLOW for peer in peers if scene.leaves[peer] == "leaf-a"}
        ),
        5,
    )
    assert world == (Suspect(Part.LEAF, "leaf-a", "slow"),)


def test_everybody_slow_is_no_leaf() -> None:
    """If members of all leaves find themselves slow, it is more than a leaf, or the usual has
    changed: ambiguous, by one name.
    """
    scene = Scene()
    scene.run(well, 3)
    start = scene.epoch
    scene.run(always(Answer(SLOW)))
    met = partner(scene)
    world = scene.run(
        lambda peers, _: Answer(
            SLOW,
            told={} if scene.epoch == start + 2 and met in peers else dict.fromkeys(peers, SLOW),
        ),
        3,
    )
    assert world == (Suspect(Part.LEAF, "fabric", "ambiguous"),)


def test_way_out_of_a_leaf() -> None:
    """Well inside, slow with every other leaf, and the neighbours say the same: the leaf."""
    scene = Scene()
    scene.run(well, 4)

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
        if scene.leaves[peers[0]] == "leaf-a":
            return Answer(told={f"{peers[0]}/leaf": SLOW})
        return Answer(SLOW)

    assert scene.run(world, 5) == (Suspect(Part.LEAF, "leaf-a", "slow"),)
    assert f"{ME}/leaf" in dict(scene.detector.scores())
    assert scene.run(well, 8) == ()


def agreeing(me: str, peer: str, ratio: float) -> dict[str, float]:
    """Return what a peer tells that finds the pair slow, and is well with others."""
    return {f"{peer}--{me}": ratio, f"{peer}--b0": 1.0, f"{peer}--c0": 1.0, f"{peer}--d3": 1.01}


@pytest.mark.parametrize("me", ["a0", "a1", "d2"])
def test_one_bad_pair_with_two_good_ends_is_a_link(me: str) -> None:
    """Both ends are well with others and agree on the pair.

    The link, by the same name from either end; it is cleared by rechecks.
    """
    scene = Scene(me=me)
    scene.run(well, 3)
    peer = partner(scene)
    world = with_peer(peer, Answer(SLOW, told=agreeing(me, peer, SLOW)))
    link = Suspect(Part.LINK, "--".join(sorted((me, peer))), "slow")
    scene.run(world)
    assert scene.run(world) == (link,)
    assert scene.run(world, 10) == (link,)
    assert scene.run(well, 8) == ()


def test_pair_that_only_one_end_finds_slow_is_ambiguous() -> None:
    """The other end finds the pair as usual (it may have been slow since before its baseline).

    Said, not guessed.
    """
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    assert scene.run(with_peer(peer, Answer(SLOW, told=agreeing(ME, peer, 1.0))), 4) == (
        Suspect(Part.LINK, f"{ME}--{peer}", "ambiguous"),
    )


def test_ambiguous_pair_is_decided_once_the_other_end_agrees() -> None:
    """The other end's baseline comes later than this one's: the accusation is corrected."""
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    ambiguous, slow = (Suspect(Part.LINK, f"{ME}--{peer}", what) for what in ("ambiguous", "slow"))
    assert scene.run(with_peer(peer, Answer(SLOW, told=agreeing(ME, peer, 1.0))), 4) == (ambiguous,)
    assert scene.run(with_peer(peer, Answer(SLOW, told=agreeing(ME, peer, SLOW))), 4) == (slow,)


def test_pair_is_not_ambiguous_before_the_other_end_has_met_others() -> None:
    """Extra rounds keep the other end from meeting others, so that nothing verifies it yet.

    That is not known, which differs from ends that disagree; it is said in the end.
    """
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    told = {f"{peer}--{ME}": SLOW, f"{peer}--b0": 1.0}
    alone = with_peer(peer, Answer(SLOW, told=told))
    assert scene.run(alone, 6) == ()
    agreed = with_peer(peer, Answer(SLOW, told=agreeing(ME, peer, SLOW)))
    assert scene.run(agreed) == (Suspect(Part.LINK, f"{ME}--{peer}", "slow"),)
    scene.run(well, 8)
    assert scene.run(alone, 24) == (Suspect(Part.LINK, f"{ME}--{peer}", "ambiguous"),)


def echoes(scene: Scene, epochs: int, led: dict[str, float]) -> tuple[Suspect, ...]:
    """Run light rounds of `a0` with a1, which are slow, and with a2 and a3, which are not.

    Those with a1 are led by this node, so that a1 times none of them; `led` is what a1 tells of
    rounds that it led itself.
    """
    told = {f"a1--{ME}": 1.0, "a1--a2": 1.0, "a1--a3": 1.0, **led}
    for _ in range(epochs):
        scene.epoch += 1
        for peer, seconds, epoch in (
            ("a1", 0.05, scene.epoch),
            ("a1", 0.05, -1),
            ("a1", 0.05, -1),
            ("a2", 0.001, scene.epoch),
            ("a3", 0.001, scene.epoch),
        ):
            scene.now += 1
            scores = {peer: 1.0, **(told if peer == "a1" else {})}
            scene.detector.observe(
                Observation(
                    epoch,
                    Kind.LIGHT,
                    "agent",
                    (ME, peer),
                    Outcome.OK,
                    Stage.DONE,
                    (Timing("echo", 64, seconds, 0.0),),
                    scores=tuple(scores.items()),
                    at=scene.now,
                )
            )
    return scene.detector.suspects()


def four_that_know_their_echoes() -> Scene:
    """Return the scene of a0 on an unknown leaf with a1, a2 and a3, with usual echoes of 1 ms."""
    scene = Scene(dict.fromkeys((ME, "a1", "a2", "a3"), ""))
    usual = TimingClass("light", "agent", "echo", 64, "", 2, far=True)
    for number in range(64):
        scene.baselines.update(usual, 0.001, number)
    return scene


def test_echo_that_the_other_end_has_not_timed_is_not_ambiguous() -> None:
    """Only the leader times an echo: that the other end has answered does not say it was fast."""
    scene = four_that_know_their_echoes()
    assert echoes(scene, 8, {}) == ()
    found = echoes(scene, 1, {f"a1->{ME}": 50.0})
    assert found == (Suspect(Part.LINK, f"{ME}--a1", "slow"),)


@pytest.mark.parametrize(("led", "epochs"), [({f"a1->{ME}": 1.0}, 5), ({}, 16)])
def test_echo_that_the_other_end_never_finds_slow_is_ambiguous(
    led: dict[str, float], epochs: int
) -> None:
    """Soon where the ends disagree, and in the end where the other one never leads a round."""
    found = echoes(four_that_know_their_echoes(), epochs, led)
    assert found == (Suspect(Part.LINK, f"{ME}--a1", "ambiguous"),)


GONE = Answer(outcome=Outcome.UNREACHABLE, stage=Stage.INVITE, silent=True)


def vanished(
    name: str, outcome: Outcome, opinion: float | None
) -> Callable[[tuple[str, ...], Kind], Answer]:
    """A world in which one node does not answer this one, and in which others tell what they get
    from it.
    """

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
        if name in peers:
            return Answer(outcome=outcome, stage=Stage.INVITE, late=(name,), silent=True)
        return Answer(
            told={}
            if opinion is None
            else {f"{peers[0]}--{name}": opinion, f"{peers[0]}->{name}": opinion}
        )

    return world


def test_cut_link_whose_other_end_had_failed_with_another() -> None:
    """What the other end told last, before the link was cut, makes the link late, not ambiguous."""
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    assert scene.run(with_peer(peer, Answer(told={f"{peer}--b0": HARD}))) == ()
    cut = vanished(peer, Outcome.UNREACHABLE, 1.0)
    told = [scene.run(cut) for _ in range(30)]
    right = (Suspect(Part.LINK, f"{ME}--{peer}", "unreachable"),)
    assert set(told) == {(), right}
    assert told[-1] == right


def test_slow_round_of_the_other_end_by_chance_makes_no_link_ambiguous() -> None:
    """The other end agrees on the pair, and one of its two rounds with others was slow: once."""
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    told = {f"{peer}--{ME}": SLOW, f"{peer}--c0": 1.0}
    # As many bad rounds as it takes, in epochs in which the other end tells of one other.
    assert scene.run(with_peer(peer, Answer(SLOW, told=told)), 6) == ()
    chance = Answer(SLOW, told={**told, f"{peer}--b0": SLOW})
    assert scene.run(with_peer(peer, chance)) == ()
    agreed = Answer(SLOW, told=agreeing(ME, peer, SLOW))
    assert scene.run(with_peer(peer, agreed)) == (Suspect(Part.LINK, f"{ME}--{peer}", "slow"),)


@pytest.mark.parametrize("outcome", [Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.UNAUTHORIZED])
def test_node_that_nobody_reaches(outcome: Outcome) -> None:
    """Neither this node nor the next that was to meet it gets an answer.

    The node, with the reason.
    """
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    world = vanished(peer, outcome, HARD)
    scene.run(world)
    assert scene.run(world) == (Suspect(Part.NODE, peer, str(outcome)),)
    assert scene.run(well, 6) == ()


def test_node_that_others_reach_is_a_link() -> None:
    """Another member had a good round with it since: the way there is broken, not the node."""
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    assert scene.run(vanished(peer, Outcome.UNREACHABLE, 1.0), 3) == (
        Suspect(Part.LINK, f"{ME}--{peer}", "unreachable"),
    )
    assert scene.run(well, 8) == ()


def test_a_link_has_the_reason_that_it_has_now() -> None:
    """A peer that refused while its agent started, and whose way is cut then, is unreachable."""
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    scene.run(vanished(peer, Outcome.REFUSED, 1.0))
    found = scene.run(vanished(peer, Outcome.UNREACHABLE, 1.0), 3)
    assert found == (Suspect(Part.LINK, f"{ME}--{peer}", "unreachable"),)


def test_node_that_calls_others_is_a_link_after_a_while() -> None:
    """Others were called by it since, and nobody has called it.

    Only when it stays silent towards this node is it the way there.
    """
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
        return GONE if peer in peers else Answer(told={f"{peers[0]}--{peer}": 1.0})

    assert scene.run(world, 2) == ()
    assert scene.run(world, 3) == (Suspect(Part.LINK, f"{ME}--{peer}", "unreachable"),)
    assert len(scene.asked) < 5 * 4, "others are asked once an epoch what they know"


def test_node_of_which_nobody_tells_is_ambiguous() -> None:
    """No other word on it: node or link is not guessed."""
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    assert scene.run(vanished(peer, Outcome.UNREACHABLE, None), 6) == (
        Suspect(Part.LINK, f"{ME}--{peer}", "ambiguous"),
    )


def test_two_members_alone_cannot_tell_which_of_them_it_is() -> None:
    """Without a third member it is neither: the rule `dshealthd:suspect:bad_end` asks Prometheus."""
    other = "n99"
    scene = Scene({ME: "", other: ""})
    assert scene.run(well, 3) == ()
    assert scene.run(vanished(other, Outcome.UNREACHABLE, None), 6) == (
        Suspect(Part.LINK, "--".join(sorted((ME, other))), "ambiguous"),
    )
    assert scene.run(well, 8) == ()


def test_node_that_calls_and_cannot_be_called() -> None:
    """Calls to a node are refused, by others too.

    Its own calls go well: the node, until a call to it goes well.
    """
    scene = Scene(dict.fromkeys(("a0", "a1", "a2", "a3"), ""))
    scene.run(well, 3)
    told = {"a2--a1": 1.0, "a3--a1": 1.0, "a2->a1": HARD, "a3->a1": HARD}
    refused = Answer(outcome=Outcome.REFUSED, stage=Stage.INVITE, late=("a1",), silent=True)
    found: set[Suspect] = set()
    for _ in range(6):
        scene.epoch += 1
        group = [
            peer
            for peer in Timetable(scene.leaves, scene.leaves).group_of(ME, scene.epoch)
            if peer != ME
        ]
        asked = list(scene.round((ME, *group), refused if "a1" in group else Answer(told=told)))
        if "a1" in group:
            asked += scene.round(("a1", ME), Answer(told={"a1--a2": 1.0, "a1--a3": 1.0}))
        for _ in range(10):
            if asked:
                members = asked.pop().members
                asked += scene.round(
                    members,
                    refused if "a1" in members else Answer(told=told),
                    extra=True,
                    kind=Kind.LIGHT,
                )
        found.update(scene.detector.suspects())
    assert found == {Suspect(Part.NODE, "a1", "refused")}
    assert scene.detector.suspects()
    (request,) = scene.round(("a1", ME), Answer(), kind=Kind.LIGHT)
    assert request.members == (ME, "a1")
    scene.round(request.members, Answer(), extra=True, kind=Kind.LIGHT)
    assert scene.detector.suspects() == ()


def test_peer_that_comes_and_goes_and_then_stays_away() -> None:
    """A node that answered now and then before it vanished is the node all the same.

    What counts is the time since its last answer.
    """
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    scene.run(vanished(peer, Outcome.UNREACHABLE, HARD))
    scene.now += 1
    scene.round((ME, peer), Answer(), extra=True, kind=Kind.LIGHT)
    found = {
        suspect
        for _ in range(8)
        for suspect in scene.run(vanished(peer, Outcome.UNREACHABLE, HARD))
    }
    assert found == {Suspect(Part.NODE, peer, "unreachable")}


def test_who_refuses_is_not_asked_for_what_its_rounds_come_to() -> None:
    """A peer whose rounds failed and who then refuses all calls is called a few times, and not
    again and again.
    """
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    scene.run(with_peer(peer, Answer(outcome=Outcome.FAILED, stage=Stage.VERIFY)))
    scene.asked.clear()
    scene.run(
        with_peer(
            peer, Answer(outcome=Outcome.REFUSED, stage=Stage.INVITE, late=(peer,), silent=True)
        ),
        4,
    )
    assert 0 < sum(peer in request.members for request in scene.asked) <= 8


@pytest.mark.parametrize(("opinion", "part"), [(HARD, Part.NODE), (1.0, Part.LINK)])
def test_who_declines_is_there(opinion: float, part: Part) -> None:
    """A node that was accused of refusing calls, and now declines rounds for another reason, is not
    accused any more.
    """
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    assert {suspect.part for suspect in scene.run(vanished(peer, Outcome.REFUSED, opinion), 3)} == {
        part
    }
    scene.round((ME, peer), Answer(outcome=Outcome.DECLINED, stage=Stage.INVITE, silent=True))
    assert scene.detector.suspects() == ()


def test_who_declines_has_answered() -> None:
    """That a peer declined a call is told as an answer without a time; of a round that the peer
    began, this node has called nobody.
    """
    scene = Scene()
    scene.run(well)
    peer, other = sorted(scene.leaves.keys() - {ME})[-2:]
    declined = Answer(outcome=Outcome.DECLINED, stage=Stage.INVITE, silent=True)
    scene.round((ME, peer), declined)
    scene.round((other, ME), declined)
    told = dict(scene.detector.scores())
    assert told[f"{ME}->{peer}"] == UNTIMED
    assert f"{ME}->{other}" not in told


def silences(
    scene: Scene, names: Sequence[str], told: dict[str, float] | None = None
) -> set[Suspect]:
    """Let peers in turn give no answer, and answer at once when they are asked again.

    Return who is accused meanwhile.
    """
    found: set[Suspect] = set()
    for name in names:
        scene.epoch += 1
        scene.round(
            (ME, name),
            Answer(outcome=Outcome.HUNG, stage=Stage.INVITE, late=(name,), silent=True),
            kind=Kind.LIGHT,
        )
        scene.epoch += 1
        scene.round((ME, name), Answer(told=told or {}), kind=Kind.LIGHT)
        found.update(scene.detector.suspects())
    return found


def test_short_outages_with_several_peers_are_this_node() -> None:
    """Three times a peer is silent and answers soon after, each time another one.

    Packets of this node are lost.
    """
    scene = Scene()
    scene.run(well, 3)
    assert silences(scene, ("a1", "b2", "a3")) == {Suspect(Part.NODE, ME, "intermittent")}
    assert scene.detector.score() == HARD
    assert scene.run(well, 6)
    assert scene.run(well, 6) == ()


def test_one_outage_with_everybody_is_not_intermittent() -> None:
    """A node that was cut off for a moment does not go on to accuse itself when all answer again."""
    scene = Scene(dict.fromkeys(("a0", "a1", "a2", "a3"), ""))
    scene.run(well, 3)
    scene.run(
        lambda peers, _: Answer(
            outcome=Outcome.UNREACHABLE, stage=Stage.INVITE, late=peers, silent=True
        ),
        2,
    )
    found = {suspect.reason for _ in range(6) for suspect in scene.run(well)}
    assert "intermittent" not in found
    assert scene.detector.suspects() == ()


def test_short_outages_of_one_peer_are_not_this_node() -> None:
    """With one peer only it is the peer or the way to it.

    And a peer that takes them on itself does not count.
    """
    scene = Scene()
    scene.run(well, 3)
    assert silences(scene, ("a1", "a1", "a1", "a1")) <= {
        Suspect(Part.LINK, f"{ME}--a1", "ambiguous")
    }
    scene = Scene()
    scene.run(well, 3)
    assert silences(scene, ("a1", "b2", "c1", "a1"), {"a1": HARD, "b2": HARD, "c1": HARD}) == set()


def test_word_from_before_the_fault_is_not_believed() -> None:
    """A good round that another member had with the node before it was lost says nothing.

    No link is accused in the first epoch.
    """
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    assert scene.run(vanished(peer, Outcome.UNREACHABLE, 1.0)) == ()


@pytest.mark.parametrize("outcome", [Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.UNAUTHORIZED])
def test_everybody_unreachable_means_oneself(outcome: Outcome) -> None:
    """Nobody answers, on this leaf or another.

    This node is the one that is cut off, and it accuses nobody else.
    """
    scene = Scene()
    scene.run(well, 3)
    assert scene.run(always(Answer(outcome=outcome, stage=Stage.INVITE, silent=True)), 3) == (
        Suspect(Part.NODE, ME, str(outcome)),
    )
    assert scene.detector.score() == HARD
    assert scene.run(well, 4) == ()


def test_only_other_leaves_unreachable_is_the_leaf() -> None:
    """The neighbours answer and say the same, no other leaf does: the leaf is cut off."""
    scene = Scene()
    scene.run(well, 4)

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
        return (
            Answer(told={f"{peers[0]}/leaf": HARD}) if scene.leaves[peers[0]] == "leaf-a" else GONE
        )

    assert scene.run(world, 8) == (Suspect(Part.LEAF, "leaf-a", "unreachable"),)


def test_half_of_the_members_gone_accuses_none_of_the_living() -> None:
    """With every second member dead, this one has some good rounds, and so is not cut off."""
    scene = Scene()
    scene.run(well, 6)
    dead = {name for number, name in enumerate(sorted(scene.leaves)) if number % 2}

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
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
    """A hang, wrong data and an error are this node's if they happen with all peers, each under its
    own name.
    """
    scene = Scene()
    scene.run(well, 3)
    late = (ME,) if outcome is Outcome.HUNG else ()
    assert scene.run(always(Answer(outcome=outcome, stage=stage, late=late)), 2) == (
        Suspect(Part.NODE, ME, str(outcome)),
    )
    assert scene.run(well, 3) == ()


def test_hang_that_waits_for_the_peer_is_not_ours() -> None:
    """Rounds in which the other end was late do not count against this one."""
    scene = Scene()
    scene.run(well, 3)

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
        return Answer(
            outcome=Outcome.HUNG, stage=Stage.SIZES, late=peers, told=dict.fromkeys(peers, HARD)
        )

    assert scene.run(world, 6) == ()


def test_wrong_data_with_one_peer_only_is_a_link() -> None:
    """One pair gives wrong sums, both ends give right ones with others: the link, corrupted."""
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
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
        asked += scene.round((ME,), broken, kind=Kind.LOCAL)
    assert asked == [Confirmation((ME,), Kind.LOCAL)]
    for _ in range(3):
        scene.round((ME,), broken, kind=Kind.LOCAL, extra=True)
    assert scene.detector.suspects() == (Suspect(Part.NODE, ME, "hung"),)


@pytest.mark.parametrize("outcome", [Outcome.DECLINED, Outcome.INCONCLUSIVE])
def test_rounds_that_tell_nothing_accuse_nobody(outcome: Outcome) -> None:
    """A declined or disturbed round is no evidence at all.

    A reference that declines is replaced by another.
    """
    scene = Scene()
    scene.run(well, 3)
    assert scene.run(always(Answer(outcome=outcome, stage=Stage.INVITE)), 10) == ()
    assert scene.asked == []
    busy: set[str] = set()

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
        if len(scene.asked) == 1:
            busy.update(peers)
        return Answer(outcome=outcome) if peers and set(peers) <= busy else Answer(SLOW)

    assert scene.run(world, 3) == (Suspect(Part.NODE, ME, "slow"),)
    assert busy


def test_one_peer_is_not_asked_for_ever() -> None:
    """While the other peers are busy, the one that is not gets as many extra rounds as count, and
    the others get theirs once they are free.
    """
    scene = Scene(dict.fromkeys(("a0", "a1", "a2", "a3"), ""))
    scene.run(well, 3)
    failed = Answer(outcome=Outcome.FAILED, stage=Stage.STORE)
    busy = {"a2", "a3"}

    def world(peers: tuple[str, ...], _: Kind) -> Answer:
        return Answer(outcome=Outcome.DECLINED) if busy & set(peers) else failed

    assert scene.run(world, 6) == ()
    assert Counter(scene.asked)[Confirmation(("a0", "a1"), Kind.RAIL)] <= 2 * 4
    busy.clear()
    assert scene.run(world, 2) == (Suspect(Part.NODE, "a0", "failed"),)


def test_two_nodes_cannot_be_told_apart() -> None:
    """With a single peer a slow round may be either end or the way between.

    Ambiguous, on the pair.
    """
    scene = Scene({"a0": "", "a1": ""})
    scene.run(well, 3)
    pair = (Suspect(Part.LINK, "a0--a1", "ambiguous"),)
    assert scene.run(always(Answer(SLOW)), 8) == pair
    assert scene.run(well, 4) == ()
    assert scene.run(always(GONE), 8) == pair


def test_without_topology_no_leaf_is_named() -> None:
    """Members without leaves: a slow node is still found."""
    scene = Scene(dict.fromkeys(FOUR_LEAVES, ""))
    scene.run(well, 3)
    assert scene.run(always(Answer(SLOW)), 2) == (Suspect(Part.NODE, ME, "slow"),)


def test_whole_node_timings_name_the_node() -> None:
    """Rounds that time nodes as a whole, not their rails, lead to the node."""
    scene = Scene(parts="")
    scene.run(well, 3)
    assert scene.run(always(Answer(SLOW, parts="")), 1) == ()
    assert scene.run(lambda _, __: Answer(), 1) == ()


def test_without_baseline_nobody_is_accused() -> None:
    """A node that has just started knows no usual.

    Slow rounds are no evidence, while lost members are.
    """
    scene = Scene()
    scene.detector = Detector(
        ME, scene.leaves, Baselines(BaselineOptions()), VerdictOptions(), lambda: scene.now
    )
    assert scene.run(always(Answer(3.0)), 6) == ()
    assert scene.run(always(GONE), 3) == (Suspect(Part.NODE, ME, "unreachable"),)


def test_baselines_learn_from_good_rounds_only() -> None:
    """Flagged timings, extra rounds, and rounds with a peer that is slow by its own word are not
    learnt, however long it lasts.
    """
    scene = Scene()
    scene.run(well, 3)
    before = scene.baselines.document()
    scene.now += 86400
    scene.run(always(Answer(SLOW, told={})), 30)
    assert scene.baselines.document() == before
    scene.run(lambda peers, _: Answer(told=dict.fromkeys(peers, SLOW)), 5)
    assert scene.baselines.document() == before


def test_slow_echo_is_no_accusation() -> None:
    """The time of an echo between agents depends on the load of both hosts.

    Half as long again is nothing.
    """
    scene = Scene()
    for number in range(64):
        scene.baselines.update(
            TimingClass("light", "agent", "echo", 64, "", 2, far=False), 0.001, number
        )
        scene.baselines.update(
            TimingClass("light", "agent", "echo", 64, "", 2, far=True), 0.001, number
        )
    for number in range(10):
        peer = f"b{number % 4}"
        timing = Timing("echo", 64, 0.0015, 0.0)
        scene.epoch += 1
        scene.detector.observe(
            Observation(
                scene.epoch,
                Kind.LIGHT,
                "agent",
                (ME, peer),
                Outcome.OK,
                Stage.DONE,
                (timing,),
                scores=((peer, 1.0),),
                at=scene.now,
            )
        )
    assert scene.detector.suspects() == ()


def test_members_that_leave_are_forgotten() -> None:
    """An accusation of a node that is no longer a member goes with it."""
    scene = Scene()
    scene.run(well, 3)
    peer = partner(scene)
    world = vanished(peer, Outcome.UNREACHABLE, HARD)
    assert scene.run(world, 2)
    scene.detector.take_members({name: leaf for name, leaf in scene.leaves.items() if name != peer})
    assert scene.detector.suspects() == ()


def test_accusation_of_another_lapses() -> None:
    """Who meets a lost node later accuses it then.

    This node's own word holds for some epochs only.
    """
    scene = Scene({f"n{number:02}": f"leaf-{number // 16}" for number in range(64)}, me="n05")
    scene.run(well, 3)
    peer = partner(scene)
    world = vanished(peer, Outcome.UNREACHABLE, HARD)
    assert scene.run(world, 3) == (Suspect(Part.NODE, peer, "unreachable"),)
    assert scene.run(lambda peers, _: GONE if peer in peers else Answer(), 5) == ()


def test_group_round_counts_for_all_in_it() -> None:
    """A slow group is evidence on each of its members, and confirmed by pairs."""
    scene = Scene()
    groups = [("a0", "b0", "c0"), ("a0", "b1", "c1")]
    for number in range(64):
        scene.baselines.update(
            TimingClass("group", "nccl", "all_reduce", 1, "0", 3, far=True), USUAL, number
        )
    asked: tuple[Confirmation, ...] = ()
    for group in groups:
        asked = scene.round(group, Answer(SLOW, "0"), kind=Kind.GROUP)
        scene.epoch += 1
    assert [request.kind for request in asked] == [Kind.PAIR]
    assert len(asked[0].members) == 2


def test_stranger_rounds_are_ignored() -> None:
    """A round in which this node has no part says nothing to it."""
    scene = Scene()
    assert scene.round(("b0", "b1"), Answer(outcome=Outcome.HUNG)) == ()
    assert scene.detector.score() is None


def test_clock_that_jumped_back_stops_nothing() -> None:
    """After a clock that was years ahead is put right, faults are found and accusations end as
    before.
    """
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


def test_sizes_of_rounds_on_demand_leave_no_trace() -> None:
    """What somebody asks for by hand is not learnt, and does not grow what is told or kept."""
    scene = Scene()
    scene.run(well, 3)
    before, told = len(scene.baselines), scene.detector.scores()
    for size in range(100):
        timing = Timing("all_reduce", size + 10, 1.0, 0.0, "0")
        scene.detector.observe(
            Observation(
                -1, Kind.RAIL, "nccl", (ME, "b0"), Outcome.OK, Stage.DONE, (timing,), at=scene.now
            )
        )
    assert len(scene.baselines) == before
    assert dict(scene.detector.scores())[ME] == dict(told)[ME]


def test_withdrawn_round_is_asked_again() -> None:
    """An extra round that could not be run does not hold up the next."""
    scene = Scene()
    scene.run(well, 3)
    scene.run(always(Answer(SLOW)))
    scene.epoch += 1
    first = scene.round((ME, "b2"), Answer(SLOW))
    assert len(first) == 1
    assert scene.round((ME, "b3"), Answer(SLOW), extra=True) == ()
    scene.detector.withdraw(first[0])
    assert len(scene.round((ME, "b1"), Answer(SLOW), extra=True)) == 1
