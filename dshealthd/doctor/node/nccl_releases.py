"""No NCCL with a known defect is in use or installed in a known environment."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.job_sources.remedies import paste
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

DEFECTS = {
    r"2\.29\.2": "hangs after a regression; PyTorch skipped it (pytorch/pytorch#174338)",
    r"2\.25\.1": "ncclCommAbort hangs (pytorch/pytorch#149153)",
    r"2\.17\.1": "ncclCommAbort hangs (pytorch/pytorch#119215)",
}
"""The NCCL releases of the alert DshealthdNcclKnownBad, and the defect of each."""
WITH_TORCH = (r"2\.21\.5", r"2\.3\.")
"""An NCCL release reported to fail with a PyTorch release."""


def defect(nccl: str, torch: set[str]) -> str:
    """Return the known defect of an NCCL release in an environment with these torch versions.

    Empty if none is known.
    """
    for release, text in DEFECTS.items():
        if re.match(rf"{release}(?:[.+-]|$)", nccl):
            return text
    nccl_pattern, torch_pattern = WITH_TORCH
    if re.match(rf"{nccl_pattern}(?:[.+-]|$)", nccl) and any(
        re.match(torch_pattern, one) for one in torch
    ):
        return "is reported to fail with PyTorch 2.3"
    return ""


def _problems(context: NodeContext) -> Iterator[Result]:
    versions: dict[tuple[str, str], dict[str, set[str]]] = {}
    for labels, _ in context.series("software_info"):
        where = labels["environment"], labels["training_job"]
        versions.setdefault(where, {}).setdefault(labels["component"], set()).add(labels["version"])
    for (environment, job), found in versions.items():
        place = job or environment or "the node"
        for nccl in sorted(found.get("nccl", ())):
            if text := defect(nccl, found.get("torch", set())):
                yield Result(
                    Outcome.WARNING,
                    f"NCCL {nccl} of {place} {text}",
                    remedy=f"{paste(f'{environment}/bin/python')} -m pip install --upgrade torch"
                    if environment
                    else "pip install --upgrade torch  # in that job's environment",
                    value=nccl,
                    source="runbook nccl-known-bad",
                    component=place,
                )


def _summary(context: NodeContext) -> str:
    found = {point.labels["version"] for point in context.series("software_info", component="nccl")}
    return f"no known defect in NCCL {', '.join(sorted(found))}" if found else "no NCCL in use"


CHECK = snapshot_check(
    "nccl-known-bad",
    "nccl-releases",
    "No NCCL release with a known defect is in use",
    ("software",),
    _summary,
    _problems,
)
