"""What a launcher tells a training process through its environment: which rank it is, and of which job.

Only the variables named here are ever kept of an environment; the rest may hold secrets.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_VALUE = 4096
"""Bytes; PATH_MAX. A longer value is nothing that a launcher sets, and is left out."""


class Launcher(enum.StrEnum):
    """Whose variables say that a process trains."""

    TORCH = "torch"
    """RANK and WORLD_SIZE: torchrun, deepspeed, accelerate, or by hand."""
    OPENMPI = "openmpi"
    PMI = "pmi"
    """MPICH, Intel MPI, MVAPICH."""
    SLURM = "slurm"
    """srun alone; frameworks then take their rank from SLURM_PROCID."""


_RANKS = {
    # launcher: rank, rank on the node, ranks in all
    Launcher.TORCH: ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    Launcher.OPENMPI: ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher.PMI: ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    Launcher.SLURM: ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
}
_SCHEDULERS = (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID"), ("lsf", "LSB_JOBID"))
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Names that mpirun gives to a job, the same for all its processes on all nodes."""
_PLACES = ("CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "CONDA_PREFIX", "LOCAL_WORLD_SIZE")
_RAS = ("NCCL_RAS_ADDR", "NCCL_RAS_ENABLE")

ALLOWED = frozenset(
    (
        *(name for names in _RANKS.values() for name in names),
        *(name for _, name in _SCHEDULERS),
        *_RENDEZVOUS,
        *_MPI_JOBS,
        *_PLACES,
        *_RAS,
    )
)
"""The variables that are kept. Whoever adds one makes sure that it cannot hold a secret."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of a process in its job; None where the launcher does not tell it."""

    launcher: Launcher
    rank: int
    local_rank: int | None
    world_size: int | None


def parse_environ(data: bytes) -> dict[str, str]:
    """Return the allowed variables of `/proc/<pid>/environ`; of a name that occurs twice the first counts, as for getenv(3)."""
    if b"RANK=" not in data and b"SLURM_PROCID=" not in data:
        return {}
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and len(value) <= MAX_VALUE and (key := name.decode(errors="replace")) in ALLOWED:
            found.setdefault(key, value.decode(errors="replace"))
    return found


def launch(environment: Mapping[str, str]) -> Launch | None:
    """Return the place of a process in its job; None if its environment is not that of a training process."""
    for launcher, (rank, local_rank, world_size) in _RANKS.items():
        place = _natural(environment.get(rank))
        size = _natural(environment.get(world_size))
        if place is not None and (size is not None or (launcher is Launcher.SLURM and "SLURM_JOB_ID" in environment)):
            return Launch(launcher, place, _natural(environment.get(local_rank)), size)
    return None


def job(environment: Mapping[str, str], machine: str) -> str:
    """Return the name of the job, equal on all its nodes without asking any: bounded, and safe as a label.

    That is the scheduler's number (`slurm-123`), else a digest of the rendezvous (`run-0c5d8a1e93f2`). A rendezvous on the loopback
    address is a job of this machine alone, and so is one that names no address: `machine` (any text that is this machine's own) keeps
    it apart from equal ones elsewhere. Two such jobs on one machine, in containers and on the same port, look the same.
    """
    for scheduler, name in _SCHEDULERS:
        number = environment.get(name, "").partition(".")[0].partition("[")[0]
        if _natural(number) is not None:
            return f"{scheduler}-{number}"
    parts = [environment.get(name, "") for name in (*_RENDEZVOUS, *_MPI_JOBS)]
    address = parts[0] = parts[0].strip().lower()
    if address.startswith("127.") or address in {"localhost", "::1", "[::1]"} or not (address or any(parts[-len(_MPI_JOBS) :])):
        parts.append(machine)
    return f"run-{hashlib.blake2b(chr(0).join(parts).encode(errors='replace'), digest_size=6).hexdigest()}"


def _natural(text: str | None) -> int | None:
    """Return the number that `text` writes in plain digits; None otherwise."""
    return int(text) if text and len(text) <= 12 and text.isascii() and text.isdigit() else None  # noqa: PLR2004 - 12 digits hold any id
