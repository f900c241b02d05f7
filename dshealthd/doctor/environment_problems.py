"""What is wrong with variables of running jobs, as results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome, Result
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dshealthd.doctor.node_context import NodeContext

MEANINGS = {
    "absent": "names nothing that is on this node",
    "down": "names what is down",
    "loopback": "leaves a job of several nodes only the loopback interface",
    "out_of_range": "has a value out of its range",
    "no_number": "has a value that is no number to what reads it",
    "misspelt": "is nearly the name of a variable that nothing set reads",
    "unread": "is read by no release in use",
    "retired": "is no longer read",
    "renamed": "has another name by now",
    "differs": "differs between the ranks of this node",
    "disabled": "switches a fast transport off",
}


def problems(
    context: NodeContext, wanted: Callable[[str, str], bool], remedy: str
) -> Iterator[Result]:
    """Yield results on running jobs' variables for which `wanted(variable, problem)` holds."""
    for labels, ranks in context.series("job_environment_problems"):
        variable, problem = labels["variable"], labels["problem"]
        if ranks and wanted(variable, problem):
            meaning = MEANINGS.get(problem, problem.replace("_", " "))
            yield Result(
                Outcome.WARNING,
                f"{variable} of job {labels['job']} {meaning} ({plural(ranks, 'rank')}, rank "
                f"{labels.get('rank', '?')} the first)",
                remedy=remedy,
                component=f"{labels['job']}: {variable}",
            )
