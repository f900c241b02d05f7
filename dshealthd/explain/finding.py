"""The finding: what failed and why, whose it is, what proves it, and what to do first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.explain import remarks
from dshealthd.explain.accusation import ALIKE, ON_ALL, accused, are_alike, left_silently
from dshealthd.explain.case import MISMATCH, Case, prepare
from dshealthd.explain.causality import OF_LOST_PEERS, candidates, holding, is_telling, precedes
from dshealthd.explain.coverage import ABORTED, TERMINATED
from dshealthd.explain.events import Event, Place, listed
from dshealthd.explain.group_verdicts import GroupVerdict, judge_groups
from dshealthd.explain.names import named, only
from dshealthd.explain.patterns import advised, load
from dshealthd.explain.reading import PATTERN as STATED
from dshealthd.explain.reading import WORTH_READING, standing, worth_reading
from dshealthd.explain.remarks import NOTES, STATES

if TYPE_CHECKING:
    from dshealthd.explain.facts import Recognized

MAX_CHAIN = 40
"""Events shown of what followed: what a terminal of usual height holds."""
MAX_PROOF = 4
"""Lines of proof: somebody reads them all."""
MAX_AGAINST = 6
"""Candidates shown that are not the cause, a line each: the answer itself has some six lines."""
ENDED_BY_WATCHDOG = "and a rank that waits for another one ends the same way"
FROM_BEFORE = "the logs of all ranks from before the first of these lines"
AND_AFTER = "what these logs say after the last of these lines, or the logs of all ranks"

_NOTICED = re.compile(r"watchdog at work|Timeout at NCCL work")
"""Words of a watchdog that saw a collective fail; it also prints its state now and then."""
_PEER_LOST = "nccl-remote-error"
_HANGS = {f"nccl-timeout/{name}" for name in ("watchdog", "dump-signal", "heartbeat", "gloo")}
_OF_NO_RANK = {"symmetric", "mismatch"}
"""Kinds of verdicts that have a first step although they name no culprit."""
_OF_THE_JOB = {"host-memory-pressure"}
"""Slugs of faults that the job brings along to any node."""
_NO_NODE = re.compile(r"[\d.]+|[\da-f:]*:[\da-f:.]*|[\da-f]{12}|localhost\S*|\S*container\S*")
"""An address or a container's number, which no scheduler knows a node by."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """The answer."""

    outcome: str
    """found, undecided or nothing."""
    slug: str = ""
    title: str = ""
    """What it is in a few words; empty where the slug's title fits."""
    statement: str = ""
    step: str = ""
    """What to do first about this very cause; empty if nothing is known to be right."""
    root: Event | None = None
    ranks: tuple[int, ...] = ()
    """The culprits; empty if no rank is to blame."""
    host: str | None = None
    gpu: int | None = None
    device: str | None = None
    """The device that the line of the cause names."""
    pod: str | None = None
    pid: int | None = None
    is_symmetric: bool = False
    """Whether all ranks had the same error, or hung in the same operation."""
    time: float | None = None
    proof: tuple[Place, ...] = ()
    against: tuple[str, ...] = ()
    """Why other candidates are not the cause."""
    missing: tuple[str, ...] = ()
    """Information that would decide or confirm it."""
    chain: tuple[Event, ...] = ()
    verdicts: tuple[GroupVerdict, ...] = ()
    is_first: bool = True
    """Whether no line of failure stands before it that no pattern knows."""

    @property
    def excluded(self) -> tuple[str, ...]:
        """The nodes to leave out of the next attempt: those whose own part failed."""
        root, host = self.root, self.host
        if root is None or host is None or root.layer != "hardware" or root.weak:
            return ()
        is_node = _NO_NODE.fullmatch(host) is None
        return (host,) if is_node and root.slug not in _OF_THE_JOB else ()

    @property
    def sureness(self) -> str:
        """How sure the cause is, in words that tests calibrate; empty if there is none.

        A message that is known says why, one that is only quoted may be of anything. What is
        missing, a line of failure before it that no pattern knows, and one who only sees a process
        end or a peer fall silent leave room for another cause.
        """
        if self.outcome != "found":
            return ""
        if self.root is not None and self.root.pattern in {STATED, "child-failed/python"}:
            return "possible"
        is_seen_by_others = self.slug == "child-failed" or (
            self.root is not None and self.root.layer == "communication"
        )
        is_open = self.missing or is_seen_by_others or not self.is_first
        return "likely" if is_open else "certain"

    @property
    def is_known(self) -> bool:
        """Whether a pattern knows the cause; if not, it is quoted from the log as it is."""
        return self.root is None or self.root.pattern != STATED


def decide(found: Recognized, *, now: float) -> Finding:
    """Return the cause of the failure that all logs together show."""
    case = prepare(found, now=now)
    ordered = candidates(case)
    if not ordered:
        return _without_cause(case)
    root = ordered[0]
    _follow_end(root, case)
    _adopt(root, case)
    verdicts = _judged(case) if root.is_timeout else []
    ranks, proof, says = accused(root, case, verdicts)
    if case.explained is not None:  # whom what lies beneath it struck
        ranks = ranks or accused(case.explained, case, verdicts)[0]
    if root.is_timeout and len(ranks) == 1 and (held := holding(root, ranks[0], case)):
        case.explained, root, says, proof = root, held, held.says, (held.place, *proof)
    # A log that begins with it may have lost what came before, and the line's own beginning.
    is_torn = root.pattern == STATED and root.place.line == 1
    if is_torn:
        ranks = ()
    proof = proof or (root.place,)
    if root.pattern == STATED:
        proof = (*proof, *(event.place for event in worth_reading(standing(case))))[:WORTH_READING]
    # Ranks report this error when they have lost another one: a rank that left silently is the one
    # they lost, and so the cause.
    if root.slug == _PEER_LOST and (left := left_silently(case)) is not None:
        root, says, proof = left, left.says, (left.place, *proof)
    if root.pattern == "address-in-use/store":
        ranks = (0,)  # its node holds the store
    if root.layer == "launcher" and not root.first and not (ranks and root.is_effect):
        whose = listed(ranks) if ranks else "the rank that failed first"
        case.missing.append(f"the log of {whose}: no log here has its error")
    _argue(root, ordered, case)
    is_shared = _is_shared(root, ranks, says, case)
    # Not where the line says that its own node is right; of all that say it, the first is not to
    # blame.
    beside = {} if is_shared or "innocent" in root.fields else _beside(root, ranks, case)
    host = beside.get("host")
    # A collector's name of a pod is no host's.
    if host == beside.get("pod") or (is_torn and root.origin.host is None):
        host = None
    host = host and (case.identities.name(host) or host)
    if root.is_effect:
        case.missing.append(_sender(host))
    chain = sorted(
        (event for event in (*case.causes, *case.consequences) if event is not root),
        key=lambda event: (event.time is None, event.time or 0.0, event.order),
    )
    return Finding(
        outcome="undecided" if _says_no_reason(root, ranks, case) else "found",
        slug=root.slug,
        title=root.title,
        statement=says,
        step=_step(root, ranks, host, verdicts),
        root=root,
        ranks=ranks,
        host=host,
        gpu=int(beside["gpu"]) if "gpu" in beside else None,
        device=_device(root) or beside.get("device"),
        pod=beside.get("pod"),
        pid=int(beside["pid"]) if "pid" in beside else None,
        is_symmetric=says.endswith(ON_ALL)
        or (not ranks and any(verdict.kind == "symmetric" for verdict in verdicts)),
        time=root.time,
        proof=proof[:MAX_PROOF],
        against=tuple(case.against[:MAX_AGAINST]),
        missing=tuple(dict.fromkeys(case.missing)),
        chain=tuple(chain[:MAX_CHAIN]),
        verdicts=tuple(verdicts),
        is_first=not any(
            kept.remark.weight >= STATES and not kept.remark.wraps and precedes(kept.event, root)
            for kept in standing(case)
        ),
    )


def _says_no_reason(root: Event, ranks: Sequence[int], case: Case) -> bool:
    """Return whether even the first of the causes only follows from something that nobody says."""
    return (
        # The end of a process that did not crash: of a signal, who sent it and why.
        root.is_effect
        or (root.layer == "launcher" and not root.first and not root.is_crash)
        # Who waits, or has lost a peer, says nothing of that, even if all ranks do.
        or (root.pattern in _HANGS | OF_LOST_PEERS and not ranks)
        # Names and codes of a process that also says that a peer is silent.
        or (
            root.is_hollow
            and any(
                remarks.is_of_peers(kept.event.says) and kept.event.rank == root.rank
                for kept in standing(case, near=root)
            )
        )
    )


def _is_shared(root: Event, ranks: Sequence[int], says: str, case: Case) -> bool:
    """Return whether no single host is a cause's: where all ranks, or several hosts, say the same,
    where one only waits, or noticed that another is gone, and where its ranks are on several.
    """
    hosts = {case.identities.host(rank) for rank in ranks or root.ranks} - {None}
    if root.is_of_several or len(hosts) > 1:
        return True
    if says.endswith((ON_ALL, ALIKE)):
        return True
    if ranks:
        return False
    quote = root.place.quote
    is_programs = root.pattern == STATED and root.layer == "program" and not remarks.is_row(quote)
    if is_programs and remarks.is_of_others(quote):  # it speaks of another process
        return True
    hosts = {one.host for one in case.causes if are_alike(one, root)} - {None}
    return len(hosts) > 1 or root.is_timeout


def _only_noticed(root: Event, case: Case) -> bool:
    """Return whether a cause is of one who only noticed that another is gone."""
    return (root.pattern in OF_LOST_PEERS or root.layer == "launcher") and any(
        event.slug == _PEER_LOST and event.order <= root.order
        for event in (*case.causes, *case.consequences)
    )


def _sender(host: str | None) -> str:
    """Return which logs say who ended a process by a signal, and why."""
    node = host or "the process's node"
    return f"the kernel's log of {node} and the scheduler's at that time: who sent the signal, why"


def _follow_end(root: Event, case: Case) -> None:
    """Give a statement the ranks that ended first, and their host: what failed first ends before
    those that waited for it, or lost it, and alone ends by itself where all others are ended.
    """
    ends = [one for one in case.causes if one.layer == "launcher" and precedes(root, one)]
    ends.sort(key=lambda one: one.order)
    waited = [one.order for one in case.causes if one.layer == "communication"]
    own = [one for one in ends if one.fields.get("exit", "0") != "0" and not one.signal]
    is_alone = len(ends) > 1 and own == ends[:1]
    is_first = len(ends) > 1 and any(ends[0].order < at < ends[1].order for at in waited)
    is_there = root.host in {None, ends[0].host} if is_alone or is_first else False
    is_open = root.pattern == STATED or (is_alone and root.layer in {"hardware", "program"})
    if is_open and is_there and root.rank in {None, *ends[0].ranks}:
        root.rank, root.ranks, root.host = ends[0].rank, ends[0].ranks, ends[0].host


def _adopt(root: Event, case: Case) -> None:
    """Give a statement the only rank, and its host, whose end launchers report; an exception may be
    that of all ranks.
    """
    ends = [
        event
        for event in (*case.causes, *case.consequences)
        if event.layer == "launcher"
        and event.origin.source == root.origin.source
        and event.rank is not None
    ]
    is_own = root.pattern == STATED and case.explained is None
    if is_own and root.rank is None and len({(event.rank, event.ranks) for event in ends}) == 1:
        root.rank, root.ranks = ends[0].rank, ends[0].ranks
        root.host = root.host or ends[0].host


def _step(
    root: Event, ranks: Sequence[int], host: str | None, verdicts: Sequence[GroupVerdict]
) -> str:
    """Return the first step for a cause with its values filled in; empty if none is known."""
    values = {**root.fields, "log": root.place.file, "line": str(root.place.line)}
    if len(ranks) == 1:
        values["rank"] = str(ranks[0])
    if host is not None:
        values["host"] = host
    if frame := root.own_frame:
        values["frame"] = f"{frame.file}:{frame.line}"
    if not root.is_timeout:
        return advised(root.steps, values)
    steps = load().hang
    for verdict in verdicts:
        if verdict.culprits == tuple(ranks) and (ranks or verdict.kind in _OF_NO_RANK):
            return advised(steps[verdict.kind], {**values, "operation": verdict.operation})
    return advised(steps["missing"] if ranks else root.steps or steps["unknown"], values)


def _beside(root: Event, ranks: Sequence[int], case: Case) -> dict[str, str]:
    """Return where a cause is: what its line and those beside it name, unless others are to blame,
    and the host of the culprits.
    """
    host = only({case.identities.host(rank) for rank in ranks})
    if _speaks_of_others(root, ranks, case):
        return {"host": host} if host else {}
    values: dict[str, object] = {"pid": root.origin.pid, **named(root.place.quote)}
    # The GPU of a rank that lost a peer is that of the rank that noticed it.
    if root.origin.gpu is not None and (ranks or root.slug != _PEER_LOST):
        values["gpu"] = root.origin.gpu
    names = ("host", "pid", "pod", "device", "gpu")
    values |= {name: root.fields[name] for name in names if name in root.fields}
    values["host"] = root.host or host or values.get("host")
    return {name: str(value) for name, value in values.items() if value is not None}


def _device(root: Event) -> str | None:
    """Return the device that a line of the kernel names: of NVIDIA's driver it is a GPU."""
    address = root.fields.get("pci")
    if address is None:
        return f"AMD GPU node-{root.fields['agent']}" if "agent" in root.fields else None
    is_gpu = any(word in root.place.quote for word in ("NVRM", "nvidia ", "GPU"))
    return f"GPU {address}" if is_gpu else f"PCI device {address}"


def _judged(case: Case) -> list[GroupVerdict]:
    return judge_groups(case.found.ledger, case.world, case.seen, case.coverage)


def _speaks_of_others(root: Event, ranks: Sequence[int], case: Case) -> bool:
    """Return whether who reports a cause is not to blame for it."""
    if ranks:  # who waits for others says so, whichever rank it is
        return root.rank not in ({*ranks} if root.is_timeout else {None, *ranks})
    return root.pattern == MISMATCH or _only_noticed(root, case)


def _argue(root: Event, ordered: Sequence[Event], case: Case) -> None:
    said = {root.slug}
    for event in ordered[1:]:
        if event.slug in said:
            continue
        said.add(event.slug)
        case.against.append(f"{event.says} ({_where(event)}): came later or explains less")
    for event in case.recovered[:2]:
        case.against.append(f"{event.says} ({_where(event)}): the job continued after it")


def _where(event: Event) -> str:
    return (
        f"rank {event.rank}" if event.rank is not None else f"{event.place.file}:{event.place.line}"
    )


def _without_cause(case: Case) -> Finding:
    """Return the answer if only consequences, or nothing, were found."""
    ended = [one for one in case.consequences if "exit" in one.fields and not case.is_over(one)]
    if ended:
        ended.sort(key=lambda event: (event.pattern != "child-failed/signal", event.time or 0.0))
        code = int(ended[0].fields["exit"])
        own = ended[0].rank if code not in {ABORTED, TERMINATED} else None
        says = ended[0].says + (f", {ENDED_BY_WATCHDOG}" if code == ABORTED else "")
        ranks = () if own is None else (own,)
        whose = "logs of the ranks" if ended[0].rank is None else f"log of rank {ended[0].rank}"
        case.missing.append(f"the {whose}: a launcher only reports that one failed")
        if ended[0].is_effect:
            case.missing.append(_sender(ended[0].host))
        return Finding(
            outcome="undecided",
            slug="child-failed", title=ended[0].title, statement=says,
            root=ended[0], step=_step(ended[0], ranks, ended[0].host, []), ranks=ranks,
            host=ended[0].host, time=ended[0].time,
            proof=(ended[0].place,), missing=tuple(case.missing),
            chain=tuple(case.consequences[:MAX_CHAIN]),
        )  # fmt: skip
    hung = [verdict for verdict in _judged(case) if verdict.culprits or verdict.kind == "symmetric"]
    if hung and case.found.ledger.dumped:
        return Finding(
            outcome="found", slug="nccl-timeout", ranks=hung[0].culprits,
            proof=hung[0].proof[:MAX_PROOF],
            is_symmetric=hung[0].kind == "symmetric",
            statement=hung[0].text,
            missing=("the logs of the ranks: did the job hang at all, and why?",),
            verdicts=tuple(hung),
        )  # fmt: skip
    # A signal that came after an end says less than that.
    telling = [
        event for event in case.consequences
        if event.layer != "scheduler" and is_telling(event, case)
    ]  # fmt: skip
    # What is no mere hint says more, and so does what came first.
    telling.sort(key=lambda event: (event.weak, event.layer == "launcher"))
    if telling:
        says = f"these logs show only what followed from a failure: {telling[0].says}"
        return _undecided(
            case, says, telling, FROM_BEFORE, _step(telling[0], (), telling[0].host, [])
        )
    if said := worth_reading([kept for kept in standing(case) if kept.remark.weight != NOTES]):
        says = f"nothing says what happened; {plural(len(said), 'line')} may speak of a failure"
        return _undecided(case, says, said, AND_AFTER)
    if noticed := [event for event in case.found.events if _NOTICED.search(event.place.quote)]:
        says = f"torch's watchdog saw a collective fail: {noticed[0].says}"
        return _undecided(case, says, noticed, FROM_BEFORE, advised(load().hang["unknown"], {}))
    for cut in [
        source.unfinished for source in case.found.sources if source.unfinished is not None
    ]:
        return Finding(
            outcome="undecided",
            statement="these logs have a traceback without the exception that ends it",
            step=f"read that log on from {cut.file}:{cut.line}: the line that ends the traceback "
            "names the exception",
            proof=(cut,), missing=(f"the end of the traceback at {cut.file}:{cut.line}",),
            chain=tuple(case.recovered[:MAX_CHAIN]),
        )  # fmt: skip
    return Finding(outcome="nothing", chain=tuple(case.recovered[:MAX_CHAIN]))


def _undecided(
    case: Case, says: str, events: Sequence[Event], missing: str, step: str = ""
) -> Finding:
    """Return the answer that some lines deserve to be read."""
    return Finding(
        outcome="undecided", statement=says, step=step, missing=(missing,),
        proof=tuple(event.place for event in events[:WORTH_READING]),
        chain=tuple((case.consequences or case.recovered)[:MAX_CHAIN]),
    )  # fmt: skip
