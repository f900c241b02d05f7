"""The section `[evidence]` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from dshealthd.core.options import Bytes, Duration, Section, constant, option

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions(Section):
    """Evidence of hung jobs: one directory per hang, below `evidence` in `path.state`."""

    enabled: bool = option(
        True,
        "Whether evidence of hangs is collected automatically. `dshealthd evidence` works "
        "either way.",
    )
    after: Duration = option(
        "10s", "How long a job must be hung before evidence is collected.", minimum="0s"
    )
    again_after: Duration = constant("30m")
    """Least time between two bundles of one job. A second one is taken only of another hang, not of
    one that continues.
    """
    deadline: Duration = constant("90s")
    """Time limit of a collection; partial evidence is kept."""
    max_bundles: int = option(
        16, "Maximum number of bundles; the oldest is removed first.", minimum=1, maximum=1000
    )
    max_bytes: Bytes = option(
        Bytes(1024 * MIB), "Maximum size of all bundles together.", minimum=Bytes(MIB)
    )
    min_free_bytes: Bytes = option(
        Bytes(1024 * MIB),
        "Free disk space that a new bundle must leave; otherwise it is not written.",
        minimum=0,
    )

    @property
    def max_bundle_bytes(self) -> int:
        """Most bytes of one bundle; further data is left out. Eight fit beside each other."""
        return self.max_bytes // 8
