"""The section `[evidence]` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.options import Bytes, Duration, option

if TYPE_CHECKING:
    from collections.abc import Iterator


MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions:
    """What is kept of a job that hangs.

    One directory below `evidence` in `path.state`, once for each hang.
    """

    enabled: bool = option(
        True,
        "Whether evidence of hangs is taken. It can be taken by hand in any case: `dshealthd "
        "evidence`.",
    )
    after: Duration = option(
        "10s", "How long a job must have been hung before evidence is taken.", minimum="0s"
    )
    again_after: Duration = option(
        "30m",
        "Least time between two bundles of one job. A second one is taken of another hang "
        "only, not of one that goes on.",
        minimum="1m",
    )
    deadline: Duration = option(
        "90s", "How long a collection may take; what there is by then is kept.", minimum="30s"
    )
    max_bundles: int = option(
        16, "Bundles that are kept; the oldest one goes first.", minimum=1, maximum=1000
    )
    max_bytes: Bytes = option(
        Bytes(1024 * MIB), "Bytes of all bundles together.", minimum=Bytes(MIB)
    )
    max_bundle_bytes: Bytes = option(
        Bytes(128 * MIB), "Bytes of one bundle; what goes beyond is left out.", minimum=Bytes(MIB)
    )
    min_free_bytes: Bytes = option(
        Bytes(1024 * MIB),
        "Bytes that must be free on the disk beside a new bundle; otherwise none is made.",
        minimum=0,
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of evidence whose values cannot be used, and why."""
        if self.max_bytes < self.max_bundle_bytes:
            yield "max_bytes", f"must be at least max_bundle_bytes ({self.max_bundle_bytes})"
