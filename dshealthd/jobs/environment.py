"""The environment of a training process: what its launcher tells it of job, rank and NCCL.

Which rank it is, and of which job.

Only the variables named here are ever kept of an environment; the rest may hold secrets.
"""

from __future__ import annotations

import enum
import itertools
import re
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
    Launcher.OPENMPI: (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    Launcher.PMI: ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    Launcher.SLURM: ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
}
_SCHEDULERS = (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID"), ("lsf", "LSB_JOBID"))
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Names that mpirun gives to a job, the same for all its processes on all nodes."""
_PLACES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "LOCAL_WORLD_SIZE",
)
_DEEPSPEED = ("CROSS_SIZE", "LOCAL_SIZE")
"""What tells `deepspeed` from others that set RANK.

Deepspeed/launcher/launch.py sets them, torchrun does not.
"""
_STEP = ("SLURM_STEP_ID",)
_RAS = ("NCCL_RAS_ADDR", "NCCL_RAS_ENABLE")
_INSPECTOR = ("NCCL_INSPECTOR_DUMP_DIR",)
_FLIGHT_RECORDER = (
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)
"""Prefixes of paths: where PyTorch takes the order to dump its last collectives, and where it
writes them.
"""
NCCL_COMMON = (
    *(
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_NET",
        "NCCL_IB_DISABLE",
        "NCCL_SOCKET_FAMILY",
        "NCCL_COLLNET_ENABLE",
        "NCCL_NVLS_ENABLE",
    ),
    *(
        "NCCL_BUFFSIZE",
        "NCCL_LL_BUFFSIZE",
        "NCCL_LL128_BUFFSIZE",
        "NCCL_P2P_NET_CHUNKSIZE",
        "NCCL_NTHREADS",
    ),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
)
"""Settings by which each rank chooses by itself how it talks to the others.

They must be the same on all.
"""
_NCCL = (
    *(
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_IB_TIMEOUT",
        "NCCL_IB_RETRY_CNT",
        "NCCL_NET_GDR_LEVEL",
    ),
    *(
        "NCCL_IB_SL",
        "NCCL_IB_TC",
        "NCCL_IB_QPS_PER_CONNECTION",
        "NCCL_SOCKET_NTHREADS",
        "NCCL_NSOCKS_PERTHREAD",
    ),
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"),
)
"""The others whose values are checked."""

ALLOWED = frozenset(
    (
        *(name for names in _RANKS.values() for name in names),
        *(name for _, name in _SCHEDULERS),
        *_RENDEZVOUS,
        *_MPI_JOBS,
        *_PLACES,
        *_DEEPSPEED,
        *_STEP,
        *_RAS,
        *_INSPECTOR,
        *_FLIGHT_RECORDER,
        *NCCL_COMMON,
        *_NCCL,
    )
)
"""The variables that are kept. Whoever adds one makes sure that it cannot hold a secret."""


MAX_NAMES = 256
"""Of one process; more than all that NCCL reads."""
NAMES_LIMIT = 1 << 18
"""Bytes of an environment that are searched for them."""
_OTHERS = (
    "ACCELERATE_DISABLE_NCCL",
    "CUDA_MEMORY_FRACTION",
    "DEEPSPEED_DEBUG",
    "DEEPSPEED_PROFILE",
    "DS_ACCELERATORATOR",
)
_NAME = re.compile(rb"NCCL_[A-Z0-9_]{1,60}=")  # begins with what is searched for fast
_BEFORE = (b"\0", b"\0TORCH_")


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of a process in its job; None where the launcher does not tell it."""

    launcher: Launcher
    rank: int
    local_rank: int | None
    world_size: int | None


def parse_environ(data: bytes) -> dict[str, str]:
    """Return the allowed variables of `/proc/<pid>/environ`.

    Of a name that occurs twice the first counts, as for getenv(3).
    """
    if b"RANK=" not in data and b"SLURM_PROCID=" not in data:
        return {}
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and len(value) <= MAX_VALUE and (key := name.decode(errors="replace")) in ALLOWED:
            found.setdefault(key, value.decode(errors="replace"))
    return found


def nccl_variables(data: bytes) -> frozenset[str]:
    """Return the names of what a `/proc/<pid>/environ` sets for NCCL, and of what guides set beside
    it: no values, a bounded number.
    """
    data = b"\0" + data[:NAMES_LIMIT]
    found = {name for name in _OTHERS if b"\0%s=" % name.encode() in data}
    # Those within values are passed over.
    for match in itertools.islice(_NAME.finditer(data), 4 * MAX_NAMES):
        start = data.rfind(b"\0", max(0, match.start() - 7), match.start())
        if start >= 0 and data[start : match.start()] in _BEFORE and len(found) < MAX_NAMES:
            found.add(data[start + 1 : match.end() - 1].decode())
    return frozenset(found)


def launched_by(environment: Mapping[str, str], place: Launch) -> str:
    """Return which launcher made a process's environment: deepspeed, torchrun, openmpi, pmi, slurm,
    or torch where RANK was set by something else.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    if place.launcher is Launcher.TORCH and all(name in environment for name in _DEEPSPEED):
        return "deepspeed"
    return next(
        (
            str(launcher)
            for launcher, names in _RANKS.items()
            if launcher is not Launcher.TORCH and names[0] in environment
        ),
        "torch",
    )


def scheduled(environment: Mapping[str, str]) -> str | None:
    """Return the scheduler's name of the job, such as `slurm-123`; None if the environment has
    none.
    """
    for scheduler, name in _SCHEDULERS:
        number = environment.get(name, "").partition(".")[0].partition("[")[0]
        if natural(number) is not None:
            return f"{scheduler}-{number}"
    return None


def is_loopback(address: str) -> bool:
    """Tell whether an environment's address, such as MASTER_ADDR, is of the machine itself."""
    return address.startswith("127.") or address in {"localhost", "::1", "[::1]"}


def launch(environment: Mapping[str, str]) -> Launch | None:
    """Return the place of a process in its job, by its environment.

    None if its environment is not that of a training process.
    """
    for launcher, (rank, local_rank, world_size) in _RANKS.items():
        place = natural(environment.get(rank))
        size = natural(environment.get(world_size))
        if place is not None and (
            size is not None or (launcher is Launcher.SLURM and "SLURM_JOB_ID" in environment)
        ):
            return Launch(launcher, place, natural(environment.get(local_rank)), size)
    return None


def job(environment: Mapping[str, str], machine: str) -> str:
    """Return the job's name by the environment, equal on all its nodes without asking any.

    Bounded, and safe as a label.

    That is the scheduler's number (`slurm-123`), else a digest of the rendezvous
    (`run-0c5d8a1e93f2`). A rendezvous on the loopback address is a job of this machine alone, and
    so is one that names no address: `machine` (any text that only processes of this machine have
    which reach each other there) keeps it apart from equal ones elsewhere, and in other containers.
    """
    if (number := scheduled(environment)) is not None:
        return number
    parts = [environment.get(name, "") for name in (*_RENDEZVOUS, *_MPI_JOBS)]
    address = parts[0] = parts[0].strip().lower()
    if is_loopback(address) or not (address or any(parts[-len(_MPI_JOBS) :])):
        parts.append(machine)
    import hashlib  # with OpenSSL behind it; on nodes of a scheduler no worker needs it

    return f"run-{hashlib.blake2b(chr(0).join(parts).encode(errors='replace'), digest_size=6).hexdigest()}"


def natural(text: str | None) -> int | None:
    """Return the number that a variable's `text` writes in plain digits; None otherwise."""
    return int(text) if text and len(text) <= 12 and text.isascii() and text.isdigit() else None  # noqa: PLR2004 - 12 digits hold any id
