"""The torch and NCCL that a running process has loaded, and the Python environment it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.host import read_bytes
from dshealthd.jobs.installation import Installations, Versions, process_prefixes
from dshealthd.jobs.nccl import release

if TYPE_CHECKING:
    from dshealthd.jobs.processes import TrainingProcess
    from dshealthd.linux.process_root import Root

_TORCH = "/torch/lib/libtorch"


@dataclass(frozen=True, slots=True)
class Libraries:
    """Paths as the process sees them."""

    site: str | None
    """The package directory that torch was loaded from; None if it is not loaded."""
    nccl: str | None
    """The library that contains NCCL: its own, or torch's CUDA library.

    None if neither is loaded.
    """
    replaced: str | None
    """One of them that was upgraded or removed on disk while the process runs."""


def parse_maps(data: bytes) -> Libraries:
    """Return the torch and NCCL libraries in `/proc/<pid>/maps`."""
    found = release.parse_maps(data)
    torch = [one.path for one in found if _TORCH in one.path]
    nccl = sorted((not one.is_nccl, one.path) for one in found if one.may_contain_nccl)
    return Libraries(
        site=torch[0].rpartition(_TORCH)[0] if torch else None,
        nccl=nccl[0][1] if nccl else None,
        replaced=next((one.path for one in found if one.deleted), None),
    )


def libraries(place: str) -> Libraries:
    """Return the libraries loaded by a process; `place` is its directory in `/proc`.

    Raises OSError; other users' processes need CAP_SYS_PTRACE.
    """
    return parse_maps(read_bytes(f"{place}/maps", release.MAPS_LIMIT))


def versions(
    root: Root,
    place: str,
    process: TrainingProcess,
    loaded: Libraries,
    installations: Installations,
) -> Versions:
    """Return the versions that a process runs: what it has loaded, and for the other components
    what its environment has installed. Raises OSError.

    `place` is the process's directory in `/proc`, `root` its root.
    """
    found: Versions = frozenset()
    decided: set[str] = set()
    if loaded.site is not None:
        decided = {"torch", "cuda", "nccl"}
        site = installations.site(root, loaded.site)
        found = frozenset(pair for pair in site if pair[0] != "nccl")
        if loaded.nccl is not None:
            packaged = loaded.nccl.startswith(f"{loaded.site}/nvidia/nccl/")
            nccl = (
                packaged and frozenset(pair for pair in site if pair[0] == "nccl")
            ) or installations.library(root, loaded.nccl)
            found |= nccl
    decided |= {component for component, _ in found}
    for prefix in process_prefixes(place, process.environment, loaded.site):
        try:
            installed = installations.environment(root, prefix)
        except FileNotFoundError:
            continue
        return found | {pair for pair in installed if pair[0] not in decided}
    return found
