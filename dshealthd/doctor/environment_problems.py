"""Problems with the environment variables of running jobs, as results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome, Result
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dshealthd.doctor.node_context import NodeContext

MEANINGS = {
    "absent": "names a device that this node does not have",
    "down": "names a device that is down",
    "loopback": "leaves a multi-node job only the loopback interface",
    "out_of_range": "has a value out of range",
    "no_number": "has a value that is not a number to its reader",
    "misspelt": "seems to be misspelt: a similar variable is set that nothing reads",
    "unread": "is not read by any release in use",
    "retired": "is no longer read",
    "renamed": "has been renamed",
    "differs": "differs between the ranks of this node",
    "disabled": "disables a fast transport",
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
                f"{variable} of job {labels['job']} {meaning} ({plural(ranks, 'rank')}, first rank "
                f"{labels.get('rank', '?')})",
                remedy=remedy,
                component=f"{labels['job']}: {variable}",
            )
