"""Nodes of the lab that probe each other.

Their configuration, their saboteur, and what their agents say of each other.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from dshealthd.probe.members.schedule import Timetable, epoch_at, root_order
from tests.agents import Scrape
from tests.command_line import shell_script
from tests.lab import Lab
from tests.lab.node import Node, toml

PORT = 10062
KEY = "0123456789abcdef" * 4
ROUNDS = "dshealthd_probe_rounds_total"
SUSPECT = "dshealthd_suspect"
KNOWN = 18
"""Good rounds after which a node knows what is usual."""
CLEAR = 12
"""Epochs after the end of a fault in which every accusation ends.

With four nodes each pair meets every third.
"""
PATIENCE = 60.0
"""Seconds that a wait lasts at least: a machine with other work skips rounds, and does not time
those in which an agent waited for a CPU. In how many rounds a fault is named does not depend on it.
"""
DISAGREES = "dshealthd_probe_peer_disagrees"
SKIPS = "dshealthd_probe_skips_total"
_SABOTAGE = Path(__file__).with_name("sabotage.py")
_SHOWN = (
    "dshealthd_probe_rounds",
    "dshealthd_probe_skips",
    "dshealthd_probe_peer_dis",
    "dshealthd_probe_conf",
    "dshealthd_probe_score",
    SUSPECT,
)


class Suspect(NamedTuple):
    """An accusation, as `dshealthd_suspect` has it."""

    kind: str
    component: str
    reason: str


def settings(
    node: Node,
    *,
    period: float,
    full: bool,
    gpus: str = "always",
    leaves: bool = False,
    slow_ratio: float = 9.0,
    confirmations: int = 60,
    large: bool = False,
) -> dict[str, Any]:
    """Return the section `[probe]` of a node.

    Rounds with gloo where they are `full`, between the agents alone otherwise; `confirmations` is
    how many extra ones a node may ask for in a minute. With `large` all have the large collective,
    of 4 MiB as shipped.

    Two cores that many nodes share make all times jump: only what takes several times
    (`slow_ratio`) as long as usual counts as slow.
    """
    probe: dict[str, Any] = {
        "period": f"{round(1000 * period)}ms",
        "large_every": int(large),
        "members": {"hostfile": str(node.hostfile)},
        "peer": {
            "listen_address": f"{node.address}:{PORT}",
            "key_file": str(secret(node, KEY)),
            "off_file": str(node.directory / "probe.off"),
        },
        "policy": {
            "gpus": gpus,
            "confirmations_per_minute": confirmations,
        },
        "baseline": {"slow_ratio": slow_ratio},
    }
    if leaves:
        probe["members"]["topology"] = str(node.directory / "topology.conf")
    if full:
        probe["python"] = str(interpreter(node))
        probe["worker"] = {"environment": [f"SABOTAGE={node.directory / 'sabotage'}"]}
    return {"probe": probe}


def secret(node: Node, key: str) -> Path:
    """Write a node's shared key, in place of one that it has, and return where."""
    new = node.directory / "key.new"
    new.touch(0o600)
    new.write_text(f"{key}\n", encoding="ascii")
    return new.replace(node.directory / "key")


def interpreter(node: Node) -> Path:
    """Return a node's own Python, which runs the worker honestly as long as nothing stands in the
    node's file `sabotage`.
    """
    options = "-I -B -W ignore"
    return shell_script(
        node.directory / "bin" / "python",
        f'shift {len(options.split()) + 1}\nexec {sys.executable} {options} {_SABOTAGE} "$@"',
    )


class Probing(Lab):
    """A lab whose agents probe each other."""

    scrape_seconds = 2.0  # an agent that hangs must not take the epochs that are counted

    def __init__(
        self,
        directory: Path,
        nodes: int,
        *,
        period: float = 1.0,
        full: bool = True,
        policy: str = "always",
        collectors: Sequence[str] = ("memory",),
        confirmations: int = 60,
        large: bool = False,
        slow_ratio: float = 9.0,
    ) -> None:
        """`period` in seconds; with `full` rounds run collectives with gloo, otherwise they are
        echoes between agents.
        """
        self.period = period

        def config(node: Node) -> str:
            return toml(
                settings(
                    node,
                    period=period,
                    full=full,
                    gpus=policy,
                    confirmations=confirmations,
                    large=large,
                    slow_ratio=slow_ratio,
                )
            )

        super().__init__(directory, nodes, gpus=1, config=config, collectors=collectors)

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that it is."""
        return epoch_at(time.time(), self.period)

    def elapsed(self, since: float) -> float:
        """Return how many epochs have passed since a Unix time."""
        return (time.time() - since) / self.period

    def until_epoch(self, epoch: int) -> None:
        """Wait until an epoch begins."""
        time.sleep(max(0.0, epoch * self.period - time.time()))

    def await_(
        self, condition: Callable[[Mapping[str, Scrape]], object], epochs: float, what: str
    ) -> dict[str, Scrape]:
        """Return the first scrapes for which a condition holds, at most so many epochs later, and
        not before PATIENCE is over.

        What all nodes say is in the error.
        """
        try:
            return self.wait(condition, max(PATIENCE, epochs * self.period))
        except AssertionError as error:
            error.add_note(what)
            raise

    def told(self, scrapes: Mapping[str, Scrape] | None = None) -> str:
        """Return what the agents say of probes, and the ends of their logs."""
        lines = [
            f"{name}: {line}"
            for name, scrape in (scrapes or self.scrapes()).items()
            for line in scrape.text.splitlines()
            if line.startswith(_SHOWN)
        ]
        for node in self.nodes:
            with contextlib.suppress(OSError, ValueError):  # it may not answer
                lines += [f"{node.name} round: {entry}" for entry in history(node)[-40:]]
            lines += [f"{node.name} log: {line}" for line in node.log_tail()]
        return "\n".join(lines)


def history(node: Node) -> list[dict[str, Any]]:
    """Return a node's last rounds, as the status document has them."""
    found: list[dict[str, Any]] = node.status()["probe"]["rounds"]
    return found


def bad_rounds(node: Node, since: float) -> int:
    """Return in how many epochs since a Unix time a node's scheduled rounds did not go well.

    Slow ones do. Where a partner does not answer, a node tries others in the same epoch: that is
    one round of the schedule.
    """
    return len(
        {
            entry["epoch"]
            for entry in history(node)
            if entry["time"] >= since
            and entry["epoch"] is not None
            and entry["outcome"] not in {"ok", "declined"}
        }
    )


def suspects(scrape: Scrape) -> set[Suspect]:
    """Return whom an agent accuses."""
    return {
        Suspect(**dict(labels)) for labels, value in scrape.series.get(SUSPECT, {}).items() if value
    }


def rounds(scrape: Scrape, **labels: str) -> float:
    """Return how many rounds an agent has had."""
    return sum(scrape.all(ROUNDS, **labels))


def begun(lab: Probing, least: int = 3) -> Probing:
    """Wait until every node has had some good rounds."""
    lab.await_(
        lambda s: (
            len(s) == len(lab.nodes) and all(rounds(x, outcome="ok") >= least for x in s.values())
        ),
        60 + least,
        "good rounds",
    )
    return lab


def echoes_are_known(lab: Lab) -> Callable[[Mapping[str, Scrape]], bool]:
    """Return the condition that every node has led and timed KNOWN good scheduled rounds.

    Only the leader times an echo, and who leads is drawn in every epoch: of as many rounds a node
    may have led so few that it does not know what is usual. It learns a fault as such then, says
    that it is well, and its links are ambiguous for good.
    """
    led = set[tuple[str, float]]()

    def known(scrapes: Mapping[str, Scrape]) -> bool:
        led.update(
            (node.name, entry["time"])
            for node in lab.nodes
            if node.name in scrapes
            for entry in history(node)
            if entry["led"]
            and entry["outcome"] == "ok"
            and entry["epoch"] is not None
            and entry["timings"]  # none where an agent waited for a CPU
        )
        counts = Counter(name for name, _ in led)
        return all(counts[node.name] >= KNOWN for node in lab.nodes)

    return known


def until_both_lead(lab: Probing, one: Node, two: Node) -> None:
    """Wait until two nodes are about to meet twice, with each of them leading once.

    Who leads is drawn anew in every epoch, and only the leader times an echo: one run in eight
    would have the same node lead all of the first meetings.
    """
    names, pair = [node.name for node in lab.nodes], {one.name, two.name}
    no_leaves = dict.fromkeys(names, "")
    begin = lab.epoch + 2
    while True:
        meetings = [
            epoch
            for epoch in range(begin, begin + 2 * len(names))
            if set(Timetable(names, no_leaves).group_of(one.name, epoch)) == pair
        ]
        leaders = {root_order(pair, epoch)[0] for epoch in meetings[:2]}
        # The first meeting is an epoch later than needed: a fault may begin one too late.
        if len(leaders) == len(pair) and meetings[0] == begin + 2:
            break
        begin += 1
    lab.until_epoch(begin)


def named(
    lab: Probing,
    fault: AbstractContextManager[None],
    guilty: Node | tuple[Node, Node],
    reasons: set[str],
    *,
    by: tuple[Node, ...],
    epochs: float,
    clear: float = CLEAR,
    wrong: int = 3,
    links: bool = False,
) -> tuple[Mapping[str, Scrape], Mapping[str, Scrape]]:
    """Inject a fault and have `by`, or anybody, name it, nobody name anything else, and all be
    taken back after its end.

    Returns what all nodes said before, and with the fault.

    It is named after at most `wrong` scheduled rounds that did not go well for who names it first;
    confirmations come on top. With `links` those that end at the guilty node may be named as well.
    """
    kind, component = (
        ("link", "--".join(sorted(node.name for node in guilty)))
        if isinstance(guilty, tuple)
        else ("node", guilty.name)
    )
    right = {Suspect(kind, component, reason) for reason in reasons}

    def is_its_link(accused: Suspect) -> bool:
        return accused.kind == "link" and component in accused.component.split("--")

    def accusers(scrapes: Mapping[str, Scrape]) -> list[Node]:
        wrongly = set().union(*map(suspects, scrapes.values())) - right
        if links:
            wrongly = {accused for accused in wrongly if not is_its_link(accused)}
        assert not wrongly, f"{wrongly} are not {right}\n{lab.told(scrapes)}"
        return [
            node
            for node in lab.nodes
            if node.name in scrapes and not right.isdisjoint(suspects(scrapes[node.name]))
        ]

    well = lab.await_(
        lambda s: len(s) == len(lab.nodes) and not any(map(suspects, s.values())),
        CLEAR,
        "no suspects before the fault",
    )
    lab.until_epoch(lab.epoch + 1)
    begin = time.time()
    with fault:
        found = lab.await_(accusers, epochs, f"{right} by anybody")
        first = lab.elapsed(begin)
        needed = min(bad_rounds(node, begin) for node in accusers(found))
        assert needed <= wrong, lab.told(found)
        ill = lab.await_(
            lambda s: bool(named := accusers(s)) and set(by) <= set(named),
            epochs,
            f"{right} by {', '.join(node.name for node in by)}",
        )
        everybody = lab.elapsed(begin)
    begin = time.time()
    lab.await_(
        lambda s: len(s) == len(lab.nodes) and not any(map(suspects, s.values())),
        clear,
        "no suspects after the fault",
    )
    print(
        f"{component} {'/'.join(reasons)}: {needed} bad rounds, {first:.1f} epochs, "
        f"{everybody:.1f} all, {lab.elapsed(begin):.1f} to clear"
    )
    return well, ill
