"""Which event is the cause, and which only follow from it.

Layers say what fails underneath what: hardware and the scheduler, the program of a rank, the
communication of all ranks, the launcher. Time orders events of one layer, as well as the clocks
allow. What follows a cause is its chain; what no cause explains is said to be unexplained.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dshealthd.explain import clocks
from dshealthd.explain.events import Event, Origin, Place, Stamp
from dshealthd.explain.identity import Identities
from dshealthd.explain.ledger import Verdict
from dshealthd.explain.recognition import Recognised

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.explain.recognition import Failure

CLEARED_AFTER = 10
"""Lines of progress after an error that say that it ended nothing; ranks print a few more."""
AFTERMATH = 30.0
"""Seconds after which a program's failure can no longer be what its peers suffered from: gloo and
NCCL notice a closed connection at once."""
BEFORE, AFTER = 900.0, 120.0
"""Seconds before and after the first failure in which a fault of the hardware may be its cause:
a watchdog waits 600 s, and the kernel's log is written a little later than the fault."""
MAX_CHAIN = 40
MAX_NAMED = 8
"""Ranks that one line names."""

_RANKING = {
    "hardware": 0,
    "program": 1,
    "communication": 2,
    "loss": 3,
    "scheduler": 4,
    "launcher": 5,
}
_COMMUNICATION = {"rendezvous-unreachable": 0, "gradient-sync-timeout": 1, "nccl-timeout": 1,
                  "ranks-stuck-at-init": 1, "nccl-all-reduce-failed": 3}  # fmt: skip
_CRASHES = {-4, -7, -8, -9, -11}
"""Exit codes by signals that no launcher and no watchdog sends in an orderly end."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """The answer."""

    outcome: str
    """found, undecided or nothing."""
    slug: str = ""
    statement: str = ""
    root: Event | None = None
    ranks: tuple[int, ...] = ()
    """At fault; empty where no single one is."""
    host: str | None = None
    gpu: int | None = None
    time: float | None = None
    proof: tuple[Place, ...] = ()
    against: tuple[str, ...] = ()
    """Why other candidates are not the cause."""
    missing: tuple[str, ...] = ()
    """What would tell more."""
    chain: tuple[Event, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


@dataclass(slots=True)
class _Case:
    found: Recognised
    causes: list[Event] = field(default_factory=list)
    consequences: list[Event] = field(default_factory=list)
    recovered: list[Event] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    """Ranks that reported a failure of their own."""
    seen: set[int] = field(default_factory=set)
    world: int | None = None


def decide(found: Recognised, *, year: int) -> Finding:
    """Return the cause of what all logs say together."""
    # What is worked out here is not kept in what was read: a log that is followed is judged anew.
    found = replace(found, events=[replace(event) for event in found.events])
    case = _Case(found, seen=set(found.ranks_seen), world=found.world)
    _place(case, year)
    _signals(case)
    _sort(case)
    if not case.causes:
        return _without_cause(case)
    first = _first_failure(case.causes)
    ordered = sorted(case.causes, key=lambda event: _key(event, first, case))
    root = ordered[0]
    verdicts = found.ledger.verdicts(case.world, case.seen) if _is_timeout(root) else []
    ranks, proof, says = _accused(root, case, verdicts)
    slug = root.slug
    if slug == "nccl-remote-error" and (left := _left_silently(case)) is not None:
        slug, root = left.slug, left
        says = f"{left.says}, and {_ranks(ranks)} alone reported no error" if ranks else left.says
        proof = (left.place, *proof)
    if slug == "address-in-use" and not ranks:
        ranks = (0,)  # whose node holds the store
    if slug == "nccl-timeout" and found.ledger.in_gradients:
        slug = "gradient-sync-timeout"
    if root.layer == "launcher" and not ranks:
        case.missing.append("the log of the rank that failed first: none here has its error")
    chain = sorted(
        (event for event in (*case.causes, *case.consequences) if event is not root),
        key=lambda event: (event.time is None, event.time or 0.0, event.order),
    )
    _argue(root, ordered, case)
    return Finding(
        outcome="found",
        slug=slug,
        statement=says,
        root=root,
        ranks=ranks,
        host=root.host or root.origin.host or root.fields.get("host"),
        gpu=int(root.fields["gpu"]) if "gpu" in root.fields else root.origin.gpu,
        time=root.time,
        proof=proof,
        against=tuple(case.against[:6]),
        missing=tuple(dict.fromkeys(case.missing)),
        chain=tuple(chain[:MAX_CHAIN]),
        verdicts=tuple(verdicts),
    )


def _place(case: _Case, year: int) -> None:
    """Work out rank, time and attempt of every event."""
    found = case.found
    identities = Identities(found)
    events = found.events
    year = clocks.year_of((event.stamp for event in events if event.stamp), year)
    for event in events:
        event.rank = identities.rank(event.origin)
        if "rank" in event.fields and event.rank is None:
            event.rank = int(event.fields["rank"])
        if event.rank is None and "task" in event.fields:
            task = int(event.fields["task"])
            if not identities.is_node(event.origin.source, task):
                event.rank = task
        event.host = event.fields.get("host") or event.origin.host
        if event.stamp is not None:
            event.time = clocks.seconds(event.stamp, year)
        if event.rank is not None:
            case.seen.add(event.rank)
    for failure in found.failures:
        if failure.rank is not None:
            case.seen.add(failure.rank)


def _signals(case: _Case) -> None:
    """Turn what launchers say of a process that a signal ended into an event of that rank."""
    identities = Identities(case.found)
    told: set[int | None] = set()
    pids = {failure.pid for failure in case.found.failures if failure.root}
    causes = [event for event in case.found.events if event.role == "cause"]
    ranked = {event.rank for event in causes}
    for failure in case.found.failures:
        # A rank that its launcher saw fail and that printed nothing, while all others did.
        silent = None not in ranked and failure.rank not in ranked and (failure.exit or 0) > 0
        if failure.root and (failure.exit in _CRASHES or silent):
            told.add(failure.rank)
            case.found.events.append(_crash(failure, case))
    for event in list(case.found.events):
        code = event.fields.get("exit", "")
        if event.slug != "child-failed" or int(code or 0) not in _CRASHES:
            continue
        if int(event.fields.get("pid", -1)) in pids:
            continue  # the summary says the same, and which rank it was
        origin = Origin(
            event.origin.source,
            local=int(event.fields["local"]) if "local" in event.fields else None,
            pid=int(event.fields["pid"]) if "pid" in event.fields else None,
            task=event.origin.task,
        )
        rank = event.rank if event.rank is not None else identities.rank(origin)
        if rank in told or (rank is None and told):
            continue
        told.add(rank)
        event.role, event.layer, event.rank = "cause", "program", rank
        event.says = f"a rank was ended by {_signal(int(code))}"
        case.missing += _after_kill(int(code), event.host)


def _crash(failure: Failure, case: _Case) -> Event:
    code = failure.exit or 0
    case.missing += _after_kill(code, failure.host)
    stamp = Stamp("iso", failure.time.replace("_", " "))
    event = Event(
        slug="child-failed", pattern="child-failed/signal", role="cause", layer="program",
        says=f"rank {failure.rank} "
        + (f"was ended by {_signal(code)}" if code < 0 else f"ended with exit code {code}; these logs hold no message of its own"),
        place=failure.place,
        origin=Origin(failure.source, rank=failure.rank, host=failure.host), order=1 << 40,
        stamp=stamp, exact=False, fields={"exit": str(code)}, attempt=_last(case, failure.source),
    )  # fmt: skip
    event.rank, event.host, event.time = failure.rank, failure.host, clocks.seconds(stamp, 2000)
    return event


def _last(case: _Case, source: int) -> int:
    return case.found.sources[source].attempt


def _after_kill(code: int, host: str | None) -> list[str]:
    if code == -signal.SIGKILL:
        return [f"the kernel log of {host or 'the node'}: whether memory ran out (`journalctl -k`)"]
    return []


def _signal(code: int) -> str:
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _sort(case: _Case) -> None:
    """Tell causes from consequences, and from what the job recovered from."""
    found = case.found
    latest: dict[str, int] = defaultdict(int)
    for facts in found.sources:
        run = facts.name.partition("/attempt_")[0] if "/attempt_" in facts.name else facts.name
        latest[run] = max(latest[run], facts.attempt)
    enough = max(CLEARED_AFTER, 3 * len(case.seen))
    for event in found.events:
        facts = found.sources[event.origin.source]
        run = facts.name.partition("/attempt_")[0] if "/attempt_" in facts.name else facts.name
        later = facts.progress - event.progress
        if event.attempt < latest[run]:
            case.recovered.append(event)
        elif event.role == "loss":
            case.causes.append(event)
        elif event.role == "consequence":
            case.consequences.append(event)
        elif event.role == "cause":
            if later >= enough and event.pattern != "child-failed/signal":
                case.recovered.append(event)
                continue
            case.causes.append(event)
            if event.rank is not None and event.layer != "hardware":
                case.failed.add(event.rank)


def _first_failure(causes: Sequence[Event]) -> float | None:
    times = [
        event.time
        for event in causes
        if event.time is not None and event.layer in {"program", "communication", "launcher"}
    ]
    return min(times, default=None)


def _key(event: Event, first: float | None, case: _Case) -> tuple[object, ...]:
    """Order candidates: the least is the cause."""
    ranking = _RANKING["loss" if event.role == "loss" else event.layer]
    weak = event.weak
    if event.layer == "hardware" and first is not None and event.time is not None:
        if not first - BEFORE <= event.time <= first + AFTER:
            ranking = 6
    elif event.layer == "program" and event.role != "loss" and _is_aftermath(event, case):
        ranking = 6
    elif event.layer == "scheduler" and not weak and not _comes_after(event, case):
        ranking = -1
    elif event.layer == "launcher" and event.first:
        ranking = 2
    order: tuple[object, ...] = (_COMMUNICATION.get(event.slug, 2),) if ranking == 2 else (0,)  # noqa: PLR2004 - communication
    if ranking == 1 and weak and event.bare:
        weak, order = True, (1,)
    return (
        ranking, weak if ranking != 1 else False, *order, event.bare,
        event.time is None, event.time or 0.0, weak, event.origin.source, event.order,
    )  # fmt: skip


def _is_aftermath(event: Event, case: _Case) -> bool:
    """Tell whether a rank's failure came after the communication had broken."""
    for other in case.causes:
        if other.layer != "communication" or other.weak or other is event:
            continue
        if other.origin == event.origin and other.origin.labelled and other.order < event.order:
            return True
        if (
            other.exact
            and other.time is not None
            and event.time is not None
            and event.time > other.time + AFTERMATH + clocks.UNCERTAINTY
        ):
            return True
    return False


def _comes_after(event: Event, case: _Case) -> bool:
    """Tell whether the scheduler ended a job that had already failed."""
    for other in case.causes:
        if other.layer in {"scheduler", "launcher"} or other.role == "loss" or other is event:
            continue
        if other.time is not None and event.time is not None:
            if other.time < event.time - clocks.UNCERTAINTY:
                return True
        elif (
            other.origin.source == event.origin.source and other.order < event.order
        ) or other.origin.source != event.origin.source:
            return True
    return False


def _is_timeout(event: Event) -> bool:
    return event.slug in {"nccl-timeout", "gradient-sync-timeout"}


def _accused(
    root: Event, case: _Case, verdicts: Sequence[Verdict]
) -> tuple[tuple[int, ...], tuple[Place, ...], str]:
    """Return the ranks at fault, the proof, and the statement."""
    alike = [
        event
        for event in case.causes
        if event.slug == root.slug and event.layer == root.layer and event.role == root.role
    ]
    proof = [root.place]
    if root.layer != "communication":
        ranks = [root.rank] if root.rank is not None else _summary(case, root)
        same = sorted({event.rank for event in alike if event.rank is not None})
        if root.pattern == "child-failed/signal":
            return tuple(ranks), (root.place,), root.says
        if root.layer == "program" and len(same) > 1 and _tied(alike):
            ranks = same if len(same) < (case.world or len(case.seen)) else []
            text = f"{root.says} (on all ranks alike)" if not ranks else root.says
            return tuple(ranks), tuple(event.place for event in alike[:3]), text
        if root.role == "loss":
            ranks = []
        elif not ranks and root.slug == "child-failed" and (ranks := _absent(case)):
            text = f"{root.says}: {_ranks(ranks)}, which alone reported no failure of its own"
            return tuple(ranks), tuple(proof), text
        return tuple(ranks), tuple(proof), root.says
    if root.slug == "rendezvous-unreachable":
        ranks = sorted({event.rank for event in alike if event.rank is not None})
        return tuple(ranks), tuple(event.place for event in alike[:3]), root.says
    if _is_timeout(root):
        named = sorted({rank for rank, _ in case.found.ledger.named})
        for verdict in verdicts:
            if verdict.kind == "symmetric":
                case.missing.append("fabric and GPU counters: the fault is inside the collective")
                return (), verdict.proof, f"{verdict.says}: the fabric or a GPU is at fault"
            if verdict.culprits:
                text = f"{_ranks(verdict.culprits)} {verdict.says}"
                return verdict.culprits, (*verdict.proof, *proof)[:4], text
        if named:
            places = [place for _, place in case.found.ledger.named[:2]]
            return tuple(named), tuple(places), f"{root.says}; {_ranks(named)} did not take part"
        if verdicts:
            case.missing.append(f"logs of the other ranks ({verdicts[0].says})")
            return (), verdicts[0].proof[:3], verdicts[0].says
    absent = _absent(case)
    if root.slug == "ranks-stuck-at-init" and "key_rank" in root.fields and not absent:
        absent = [int(root.fields["key_rank"])]
    if absent:
        text = f"{root.says}; {_ranks(absent)} alone reported no failure of its own"
        failures = [f.place for f in case.found.failures if f.rank in absent]
        return tuple(absent), (*proof, *failures)[:4], text
    case.missing.append("the log of the rank that the others lost or waited for")
    return (), tuple(proof), root.says


def _summary(case: _Case, root: Event) -> list[int]:
    """Return the rank that torchrun saw fail first, in the file of the event if there is one."""
    found = [
        failure for failure in case.found.failures if failure.root and failure.rank is not None
    ]
    own = [failure for failure in found if failure.source == root.origin.source] or found
    ranked = {event.rank for event in case.causes if event.layer == "communication"}
    left = [failure for failure in own if failure.rank not in ranked] or own
    times = sorted(left, key=lambda failure: failure.time)
    return [times[0].rank] if times and times[0].rank is not None else []


def _left_silently(case: _Case) -> Event | None:
    """Return what a launcher says of a rank that ended with a code that no exception gives."""
    for event in case.consequences:
        code = int(event.fields.get("exit", 0))
        if event.slug == "child-failed" and code > 1:
            return event
    return None


def _absent(case: _Case) -> list[int]:
    """Return the ranks that reported nothing while all others did; empty if that is not clear."""
    failures = [failure for failure in case.found.failures if failure.rank is not None]
    ended = {failure.rank for failure in failures if failure.exit == -signal.SIGTERM}
    told = {event.rank for event in case.causes if event.rank is not None and event.role != "loss"}
    told |= {
        failure.rank
        for failure in failures
        if failure.exit != -signal.SIGTERM and failure.rank is not None
    }
    if not told:
        return []
    size = case.world or max(case.seen | told) + 1
    absent = sorted(set(range(size)) - told)
    if absent and (2 * len(absent) < size or len(absent) == 1):
        return absent
    left = [rank for rank in ended - told if rank is not None]
    return left if len(left) == 1 else []


def _tied(events: Sequence[Event]) -> bool:
    """Tell whether no order can be seen between these events."""
    times = [event.time for event in events if event.exact and event.time is not None]
    return len(times) < len(events) or max(times) - min(times) <= clocks.UNCERTAINTY


def _argue(root: Event, ordered: Sequence[Event], case: _Case) -> None:
    """Say why the other candidates are not the cause."""
    said = {root.slug}
    for event in ordered[1:]:
        if event.slug in said:
            continue
        said.add(event.slug)
        if _RANKING[event.layer] > _RANKING[root.layer]:
            reason = "follows from it"
        elif event.time is not None and root.time is not None and event.time > root.time:
            reason = f"came {event.time - root.time:.0f} s later"
        else:
            reason = "came later or explains less"
        case.against.append(f"{event.slug}: {event.says} ({_where(event)}) {reason}")
    for event in case.recovered[:2]:
        case.against.append(
            f"{event.slug}: {event.says} ({_where(event)}): the job went on after it"
        )


def _where(event: Event) -> str:
    return (
        f"rank {event.rank}" if event.rank is not None else f"{event.place.file}:{event.place.line}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_NAMED]))
    if len(ranks) > MAX_NAMED:
        shown += f" and {len(ranks) - MAX_NAMED} more"
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _without_cause(case: _Case) -> Finding:
    """Answer where only consequences, or nothing, were found."""
    roots = [failure for failure in case.found.failures if failure.root]
    if roots:
        failure = min(roots, key=lambda failure: failure.time)
        where = f"rank {failure.rank} on {failure.host}"
        return Finding(
            outcome="found",
            slug="child-failed",
            statement=f"{where} failed first with exit code {failure.exit}; its error is not here",
            ranks=(failure.rank,) if failure.rank is not None else (),
            host=failure.host,
            time=clocks.seconds(Stamp("iso", failure.time.replace("_", " ")), 2000),
            proof=(failure.place,),
            missing=(f"the log of rank {failure.rank} (run with `--redirects=3 --log-dir`)",),
            chain=tuple(case.consequences[:MAX_CHAIN]),
        )
    ended = [event for event in case.consequences if "exit" in event.fields]
    if ended:
        case.missing.append("the logs of the ranks: a launcher says only that one failed")
        return Finding(
            outcome="found", slug="child-failed", statement=ended[0].says, root=ended[0],
            ranks=tuple(_absent(case)), host=ended[0].host, time=ended[0].time,
            proof=(ended[0].place,), missing=tuple(case.missing),
            chain=tuple(case.consequences[:MAX_CHAIN]),
        )  # fmt: skip
    hung = [
        verdict
        for verdict in case.found.ledger.verdicts(case.world, case.seen)
        if verdict.culprits or verdict.kind == "symmetric"
    ]
    if hung and case.found.ledger.has_dumps:
        says = hung[0].says
        return Finding(
            outcome="found", slug="nccl-timeout", ranks=hung[0].culprits, proof=hung[0].proof[:4],
            statement=f"{_ranks(hung[0].culprits)} {says}" if hung[0].culprits else says,
            missing=("the logs of the ranks: whether the job hung at all, and why",),
            verdicts=tuple(hung),
        )  # fmt: skip
    telling = [
        event
        for event in case.consequences
        if not event.pattern.endswith(("/ended-by-launcher", "/exit", "/xid-after"))
    ]
    if telling:
        return Finding(
            outcome="undecided",
            statement="these logs hold only what followed from a failure",
            proof=tuple(event.place for event in telling[:3]),
            missing=("the logs of all ranks from before the first of these lines",),
            chain=tuple(case.consequences[:MAX_CHAIN]),
        )
    return Finding(outcome="nothing", chain=tuple(case.recovered[:MAX_CHAIN]))
