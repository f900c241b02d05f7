"""The examination: runs the checks in parallel, each in a process that can be killed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.check import RESULTS, Check, Result, unknown, worst
from dshealthd.doctor.status_document import DEADLINE
from dshealthd.findings.finding import ORDER, State
from dshealthd.http.document import MAX_DOCUMENT
from dshealthd.linux.forked import Emit, Ended, Pool

if TYPE_CHECKING:
    import datetime as dt

    from dshealthd.doctor.options import Accepted
    from dshealthd.doctor.snapshot_check import SnapshotCheck

_LOOK = "the node's status"


@dataclass(frozen=True, slots=True)
class Examined:
    """One check and its results."""

    slug: str
    check: str
    title: str
    results: tuple[Result, ...]
    seconds: float

    @property
    def outcome(self) -> State:
        """The worst outcome among the check's results that count."""
        return worst(result.outcome for result in self.results if not result.accepted)


def examine(
    plain: Sequence[tuple[Check[Any], Any]],
    waiting: Sequence[SnapshotCheck],
    look: Callable[[], Mapping[str, Any]],
    context: Callable[[Mapping[str, Any]], Any],
    progress: Callable[[int, int, Sequence[str]], object],
) -> tuple[list[Examined], Mapping[str, Any]]:
    """Run all checks and return what they found, with the status document.

    `plain` are checks with their contexts, which start at once. `waiting` are checks that need the
    document that `look` returns; `context` makes their context from it. `progress` gets the number
    of checks that have ended, their total, and the names of those still running.
    """
    checks = {check.name: check for check in (*(check for check, _ in plain), *waiting)}
    found: dict[str, Examined] = {}
    document: Mapping[str, Any] = {}
    pool = Pool(max_answer=2 * MAX_DOCUMENT)  # the document, written anew with spaces

    def tick() -> None:
        progress(len(found), len(checks), pool.names)

    try:
        if waiting:
            pool.start(_LOOK, lambda _emit: look(), DEADLINE)
        for check, one in plain:
            pool.start(check.name, _runner(check, one), check.deadline)
        for ended in pool.ended(on_tick=tick):
            if ended.name != _LOOK:
                found[ended.name] = _examined(checks[ended.name], ended)
                continue
            if ended.problem:
                for check in waiting:
                    found[check.name] = _examined(check, ended)
                continue
            document = ended.value
            shared = context(document)
            for check in waiting:
                pool.start(check.name, _runner(check, shared), check.deadline)
    finally:
        pool.close()
    return [found[name] for name in checks], document


def _runner(check: Check[Any], context: Any) -> Callable[[Emit], object]:
    def run(_emit: Emit) -> object:
        return RESULTS.write([*check.run(context)], "results")

    return run


def _examined(check: Check[Any], ended: Ended) -> Examined:
    one = "" if ended.name == _LOOK else f" --only {check.name}"
    again = f"sudo dshealthd doctor{one}"
    if ended.problem:
        results: tuple[Result, ...] = (unknown(_why(check, ended), again),)
    else:
        results = RESULTS.read(ended.value, "results")
        results = results or (unknown("the check returned no result", again),)
    results = tuple(sorted(results, key=lambda one: -ORDER.index(one.outcome)))
    return Examined(check.slug, check.name, check.title, results, round(ended.seconds, 3))


def _why(check: Check[Any], ended: Ended) -> str:
    what = "reading the node's status" if ended.name == _LOOK else f"check {check.name}"
    return f"{what} {'hung' if ended.hung else 'failed'}: {ended.problem}"


def mark_accepted(
    examined: Iterable[Examined], accepted: Sequence[Accepted], today: dt.date
) -> list[Examined]:
    """Return the examined checks, with the results marked that the administrator accepts."""
    entries = [entry for entry in accepted if today <= entry.until]

    def mark(check: str, result: Result) -> Result:
        for entry in entries:
            if entry.check == check and entry.component in {"", result.component}:
                why = f"accepted until {entry.until}: {entry.reason}"
                return dataclasses.replace(result, accepted=why)
        return result

    return [
        dataclasses.replace(
            one,
            results=tuple(
                result if result.outcome is State.OK else mark(one.check, result)
                for result in one.results
            ),
        )
        for one in examined
    ]
