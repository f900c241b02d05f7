"""`dshealthd status`, `jobs` and `history`: the agents they query, their output and exit status."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core import documents
from dshealthd.core.text import nodes_to_exclude, plural, print_lines, printable
from dshealthd.findings.finding import ORDER, SCHEMA, State
from dshealthd.http.client import UNAUTHORIZED, Access, Client, local, remote
from dshealthd.http.exchange import Unreachable
from dshealthd.probe.options import ProbeOptions
from dshealthd.status import past, query, text
from dshealthd.status import runs as of_runs
from dshealthd.status.jobs import job_lines, parts_of, ranks, whole
from dshealthd.status.paint import EXIT, Paint, colored

if TYPE_CHECKING:
    from dshealthd.config.config import Config  # noqa: TC004 - nothing evaluates this type
    from dshealthd.status.query import AgentAnswer

NOT_SENT = (
    "a password is not sent to members that only an agent names: give the nodes, or a "
    "--config.file with probe.members"
)
"""What to do about a status of 401."""


@dataclass(frozen=True)
class AgentQuery:
    """The agents to query, and how to show their answers: their arguments."""

    loaded: Config
    access: Access
    nodes: Sequence[str]
    members: bool
    as_json: bool


def history(asked: AgentQuery, seconds: float) -> int:
    """Print what has happened to those nodes within the last `seconds`; return the exit status.

    0 all agents answered, 3 one did not.
    """
    if (answers := _answers(asked, Client.history)) is None:
        return EXIT[State.UNKNOWN]
    if asked.as_json:
        print(documents.dumps(past.report(answers, seconds)))
    else:
        paint = Paint(color=colored())
        print("\n\n".join("\n".join(past.node(each, seconds, paint)) for each in answers))
    return _of_all(answers)


def exclude(asked: AgentQuery, job: str) -> int:
    """Print which of those nodes to leave out of the next attempt of a job or run: those of which a
    fault of their own has struck it. Return the exit status: 0 all agents answered, 3 one did not,
    or nothing is known of that job.
    """
    if (answers := _answers(asked, Client.history)) is None:
        return EXIT[State.UNKNOWN]
    _print_problems(answers)
    attempts = [one for found in of_runs.runs(answers, job).values() for one in found]
    jobs = {job, *(one["job"] for one in attempts)}
    entries = (entry for each in answers for entry in each.document.get("entries", ()))
    if not (known := bool(attempts) or any(entry.job in jobs for entry in entries)):
        print_lines(f"nothing is known of {printable(job)}", error=True)
    blamed = {
        each.name: None if each.problem else past.faults_of_jobs(each, jobs) for each in answers
    }
    nodes = [name for name, found in blamed.items() if found]
    if asked.as_json:
        told = {"job": job, "nodes": blamed, "exclude": nodes_to_exclude(nodes)}
        print(documents.dumps({"schema": SCHEMA, **told}))
    else:
        print(",".join(map(printable, nodes)))
    return _of_all(answers) if known else EXIT[State.UNKNOWN]


def runs(asked: AgentQuery, job: str = "") -> int:
    """Print the attempts of all trainings of those nodes, or the report of one job or run. Return
    the exit status: 0 all agents answered, 3 one did not, or nothing is known of that job.
    """
    if (answers := _answers(asked, Client.history)) is None:
        return EXIT[State.UNKNOWN]
    found = of_runs.runs(answers, job)
    if asked.as_json:
        print(documents.dumps(of_runs.document(answers, found)))
    else:
        _print_problems(answers)
        now = max((answer.document.get("time", 0.0) for answer in answers), default=0.0)
        form = of_runs.report if job else of_runs.history
        shown = ["\n".join(form(run, attempts, now)) for run, attempts in found.items()]
        print("\n\n".join(shown) or f"no attempt {f'of {printable(job)} ' * bool(job)}is known")
    return _of_all(answers) if found or not job else EXIT[State.UNKNOWN]


def _answers(
    asked: AgentQuery, get: Callable[[Client], Mapping[str, Any]]
) -> list[AgentAnswer] | None:
    """Return what the agents answer; None, and say why, if it is unknown which to query."""
    try:
        return query.query_agents(_clients(asked), get)
    except (Unreachable, ValueError, ArithmeticError, OSError) as error:
        print_lines(f"dshealthd: {printable(str(error))}", error=True)
        return None


def _print_problems(answers: Sequence[AgentAnswer]) -> None:
    for answer in answers:
        if answer.problem:
            print_lines(f"{answer.name}: {answer.problem}", error=True)


def _of_all(answers: Sequence[AgentAnswer]) -> int:
    """Return the exit status of a command that takes the answer of each agent."""
    return EXIT[State.UNKNOWN if any(answer.problem for answer in answers) else State.OK]


def status(asked: AgentQuery) -> int:
    """Print the status of this node, the named nodes or all members; return the exit status.

    The worst node decides: 0 ok, 1 warning, 2 critical, 3 unknown.
    """
    if (answers := _answers(asked, Client.status)) is None:
        return EXIT[State.UNKNOWN]
    if asked.as_json:
        print(documents.dumps(query.report(answers)))
    else:
        paint = Paint(color=colored())
        ranked = sorted(answers, key=lambda answer: -ORDER.index(answer.state))
        print("\n\n".join("\n".join(text.node(answer, paint)) for answer in ranked))
    return EXIT[query.worst(answers)]


def jobs(asked: AgentQuery) -> int:
    """Print the training jobs of those nodes, each with its ranks; return the exit status.

    0 no job is hung, 2 one is, 3 an agent did not answer, has just started or left a job out.
    """
    if (answers := _answers(asked, Client.status)) is None:
        return EXIT[State.UNKNOWN]
    shown = documents.dumps(query.report(answers)) if asked.as_json else "\n".join(_jobs(answers))
    print(shown)
    return EXIT[_of_jobs(answers)]


def _jobs(answers: Sequence[AgentAnswer]) -> Iterator[str]:
    paint = Paint(color=colored())
    names = {job["job"] for answer in answers for job in answer.document.get("jobs", ())}
    hidden = 0
    for answer in answers:
        if why := answer.problem or answer.starting:
            yield f"{printable(answer.name)}  {printable(why)}"
        if unseen := text.unseen(answer):
            hidden += unseen
            who = plural(unseen, "process", "processes")
            yield f"{printable(answer.name)}  {who} could not be inspected: permission denied"
        for line in text.left_out(answer):
            yield f"{printable(answer.name)}  left out: {line}"
    for name in sorted(names):
        parts = parts_of(name, answers)
        yield from job_lines(name, parts, paint)
        yield from ranks(parts)
    if not names and not all(answer.problem or answer.starting for answer in answers):
        yield "no training jobs seen" if hidden else "no training jobs"


def _of_jobs(answers: Sequence[AgentAnswer]) -> State:
    names = {job["job"] for answer in answers for job in answer.document.get("jobs", ())}
    if any(whole(parts_of(name, answers)).state == "hung" for name in names):
        return State.CRITICAL
    nothing = not answers or any(
        answer.problem or answer.starting or answer.document.get("left_out") for answer in answers
    )
    return State.UNKNOWN if nothing else State.OK


def _clients(asked: AgentQuery) -> list[tuple[str, Client | str]]:
    """Return the agents to query. Raise Unreachable if the members are unknown.

    Nodes that the user or this configuration names receive the credentials; those that only an
    agent's answer names do not.
    """
    loaded, access = asked.loaded, asked.access
    if not asked.members and not asked.nodes:
        return [(query.HERE, local(loaded, access))]
    clients = [(node, _client(loaded, node, access)) for node in asked.nodes]
    if asked.members and loaded.section(ProbeOptions).members.sources:
        clients += [(node, _client(loaded, node, access)) for node in _configured(loaded)]
    elif asked.members:
        bare = access.without_credentials()
        told = local(loaded, access).targets()
        clients += [(node, _client(loaded, node, bare, NOT_SENT)) for node in told]
    # A node that is given twice, or is also a member, would count twice in its jobs.
    once: dict[str, tuple[str, Client | str]] = {}
    for name, client in clients:
        once.setdefault(client if isinstance(client, str) else client.url, (name, client))
    return [*once.values()]


def _configured(loaded: Config) -> list[str]:
    from dshealthd.probe.members.hostlist import MembershipError  # only probes need it
    from dshealthd.probe.members.targets import addresses

    try:
        return addresses(loaded)
    except (MembershipError, OSError) as error:
        raise Unreachable(str(error)) from error


def _client(
    loaded: Config, node: str, access: Access, unauthorized: str = UNAUTHORIZED
) -> Client | str:
    """Return the client for a node; why there is none if its name is invalid."""
    try:
        return remote(loaded, node, access, unauthorized)
    except (ValueError, ArithmeticError) as error:
        return str(error)
