"""The environment of a training process: its job, its rank and its NCCL settings.

Only the variables named here are ever kept; the rest of an environment may hold secrets.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_NATURAL = re.compile(r"[0-9]{1,12}")
"""As many digits as any id has."""
MAX_VALUE = 4096
"""Bytes; PATH_MAX. Launchers set no longer values, so these are left out."""
_SCHEDULERS = (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID"), ("lsf", "LSB_JOBID"))
_JOB_ID = re.compile(r"([0-9]{1,12})(?:\[([0-9]{0,12})\])?(?:\..*)?", re.DOTALL)
"""Number and element of an array in a job's id, which PBS writes as `77[3].server`."""
_ELEMENT = "LSB_JOBINDEX"
"""Element of LSF's arrays, whose jobs share LSB_JOBID; 0 for a job of no array."""
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that all ranks of a run must share."""
MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables with the name that mpirun gives a job, the same for its processes on all nodes."""
_PLACES = (
    "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "CONDA_PREFIX",
    "LOCAL_WORLD_SIZE",
)  # fmt: skip
_DEEPSPEED = ("CROSS_SIZE", "LOCAL_SIZE")
"""Variables that distinguish `deepspeed` from other launchers that set RANK.

deepspeed/launcher/launch.py sets them, torchrun does not.
"""
_WATCHDOGS = (
    "DEEPSPEED_TIMEOUT",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_ENABLE_MONITORING",
)
TIMEOUT = 600
"""Seconds after which collectives time out where a job does not tell: the default of NCCL's
watchdog in torch (`default_pg_nccl_timeout`) and of DeepSpeed since 0.19.6.
"""
_OTHER_VARIABLES = (
    "SLURM_STEP_ID", "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE", "NCCL_INSPECTOR_DUMP_DIR",
    "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "DSHEALTHD_RUN",
    "DSHEALTHD_HEARTBEAT",
)  # fmt: skip
_HELD = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Indices on the node of the GPUs of a step, and of the job: Slurm sets the first for the tasks of
steps, the second for the batch script, whose steps inherit it (sbatch(1), srun(1))."""
_HELD_BY_POD = "NVIDIA_VISIBLE_DEVICES"
"""UUIDs of a container's GPUs, as NVIDIA's device plugin sets it. Images set `all`, which says
nothing."""
_FLIGHT_RECORDER = (
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)
"""Path prefixes: of the FIFO that makes PyTorch dump its last collectives, and of the dumps."""
NCCL_COMMON = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_SOCKET_FAMILY",
    "NCCL_COLLNET_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_NTHREADS", "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS",
)  # fmt: skip
"""Settings by which each rank chooses on its own how it talks to the others.

They must be the same on all ranks.
"""
_NCCL = (
    "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT",
    "NCCL_NET_GDR_LEVEL", "NCCL_IB_SL", "NCCL_IB_TC", "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
)  # fmt: skip
"""Other settings whose values are checked."""
MAX_NAMES = 256
"""Most NCCL names that are looked at in one process; NCCL reads fewer."""
NAMES_LIMIT = 1 << 18
"""Bytes of an environment that are searched for NCCL names."""
_OTHERS = (
    "ACCELERATE_DISABLE_NCCL", "CUDA_MEMORY_FRACTION", "DEEPSPEED_DEBUG", "DEEPSPEED_PROFILE",
    "DS_ACCELERATORATOR",
)  # fmt: skip
_NAME = re.compile(rb"NCCL_[A-Z0-9_]{1,60}=")  # the literal prefix makes the search fast
_BEFORE = (b"\0", b"\0TORCH_")
_TRUE = {"1", "y", "yes", "t", "true"}
_INDEX = re.compile(r"\s*([+-]?\d{1,18})", re.ASCII)
"""As strtoul(3) of CUDA's driver reads it, up to a number that no node has a GPU of."""
_UUIDS = ("GPU-", "MIG-")


class Launcher(enum.StrEnum):
    """The launcher whose variables mark a process as training."""

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

ALLOWED = frozenset(itertools.chain(
    *_RANKS.values(), (name for _, name in _SCHEDULERS), (_ELEMENT,), RENDEZVOUS, MPI_JOBS, _PLACES,
    _DEEPSPEED, _WATCHDOGS, _OTHER_VARIABLES, _HELD, (_HELD_BY_POD,), _FLIGHT_RECORDER, NCCL_COMMON,
    _NCCL,
))  # fmt: skip
"""The variables that are kept. A variable added here must not be able to hold a secret."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of a process in its job; None if the launcher does not set it."""

    launcher: Launcher
    rank: int
    local_rank: int | None
    world_size: int | None


def parse_environ(data: bytes) -> dict[str, str]:
    """Return the allowed variables of `/proc/<pid>/environ`.

    The first of two equal names counts, as for getenv(3).
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
    """Return the names of the NCCL variables in a `/proc/<pid>/environ`, and of related ones that
    guides recommend: no values, a bounded number.
    """
    data = b"\0" + data[:NAMES_LIMIT]
    found = {name for name in _OTHERS if b"\0%s=" % name.encode() in data}
    # Matches within values are skipped.
    for match in itertools.islice(_NAME.finditer(data), MAX_NAMES):
        start = data.rfind(b"\0", max(0, match.start() - 7), match.start())
        if start >= 0 and data[start : match.start()] in _BEFORE:
            found.add(data[start + 1 : match.end() - 1].decode())
    return frozenset(found)


def launched_by(environment: Mapping[str, str], place: Launch) -> str:
    """Return the launcher that made a process's environment: deepspeed, torchrun, openmpi, pmi,
    slurm, or torch if something else set RANK.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    if place.launcher is Launcher.TORCH and all(name in environment for name in _DEEPSPEED):
        return "deepspeed"
    for launcher, names in _RANKS.items():
        if launcher is not Launcher.TORCH and names[0] in environment:
            return str(launcher)
    return "torch"


def watchdog_seconds(environment: Mapping[str, str], told: int) -> int:
    """Return the seconds after which a watchdog ends a process that hangs: the time-out of its
    collectives, as its process group has `told` it (0 if it has not), or that of the monitor of
    NCCL's watchdog if the job sets a shorter one.
    """
    minutes = natural(environment.get("DEEPSPEED_TIMEOUT")) or 0
    collectives = told or 60 * minutes or TIMEOUT
    monitor = natural(environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"))
    # As torch's getCvarBool reads it.
    monitors = environment.get("TORCH_NCCL_ENABLE_MONITORING", "1").lower() in _TRUE
    return min(collectives, monitor) if monitor and monitors else collectives


def scheduler_job(environment: Mapping[str, str]) -> str | None:
    """Return the scheduler's name of the job, such as `slurm-123`, or `pbs-123-4` for an element of
    an array, which is a job of its own; None if it has none.
    """
    for scheduler, name in _SCHEDULERS:
        if match := _JOB_ID.fullmatch(environment.get(name, "")):
            number, element = match.groups()
            if scheduler == "lsf" and natural(environment.get(_ELEMENT)):
                element = environment[_ELEMENT]
            return f"{scheduler}-{number}" + (f"-{element}" if element else "")
    return None


def held_gpus(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the GPUs that the scheduler has given to a process, as it names them; none if it does
    not say, or names parts of GPUs.
    """
    for name in (*_HELD, _HELD_BY_POD):
        if text := environment.get(name):
            found = text.split(",")
            whole = [
                entry.startswith("GPU-") if name == _HELD_BY_POD else natural(entry) is not None
                for entry in found
            ]
            return frozenset(found) if all(whole) else frozenset()
    return frozenset()


def is_loopback(address: str) -> bool:
    """Return whether an address, such as MASTER_ADDR, is the machine's own loopback."""
    return address.startswith("127.") or address in {"localhost", "::1", "[::1]"}


def launch(environment: Mapping[str, str]) -> Launch | None:
    """Return the place of a process in its job; None if its environment is not that of a training
    process.
    """
    for launcher, (rank, local_rank, world_size) in _RANKS.items():
        place = natural(environment.get(rank))
        size = natural(environment.get(world_size))
        if place is not None and (
            size is not None or (launcher is Launcher.SLURM and "SLURM_JOB_ID" in environment)
        ):
            return Launch(launcher, place, natural(environment.get(local_rank)), size)
    return None


def job_name(environment: Mapping[str, str], machine: str) -> str:
    """Return the job's name, which all its nodes derive alike from the environment.

    It is bounded, and safe as a label.

    The name is the scheduler's number (`slurm-123`), or else a digest of the rendezvous
    (`run-0c5d8a1e93f2`). A rendezvous on the loopback address, or without an address, is a job of
    this machine alone. `machine` (any text shared only by processes that reach each other over
    this loopback) distinguishes it from equal ones on other machines and in other containers.
    """
    if (number := scheduler_job(environment)) is not None:
        return number
    parts = [environment.get(name, "") for name in (*RENDEZVOUS, *MPI_JOBS)]
    address = parts[0] = parts[0].strip().lower()
    if is_loopback(address) or not (address or any(parts[-len(MPI_JOBS) :])):
        parts.append(machine)
    return f"run-{digest(*parts):012x}"


def digest(*parts: str) -> int:
    """Return a 48-bit digest of settings: a number that a metric's float holds exactly."""
    import hashlib  # loads OpenSSL: half a MiB in each worker that reads ranks

    text = "\0".join(parts).encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")


def natural(text: str | None) -> int | None:
    """Return the number that `text` writes in plain digits; None otherwise."""
    return int(text) if text and _NATURAL.fullmatch(text) else None


class Visible(NamedTuple):
    """The GPUs that a process sees, and the problems of the list."""

    devices: tuple[str, ...]
    """As they are listed; CUDA numbers them from 0 in this order."""
    repeated: bool = False
    """A GPU is listed twice: CUDA then shows none."""
    missing: bool = False
    """A listed GPU does not exist on the node: CUDA shows only those before it."""


def visible(text: str, gpus: int | None) -> Visible:
    """Return the GPUs that a `CUDA_VISIBLE_DEVICES` list makes visible.

    `gpus` is the number of GPUs of the node, None if unknown. UUIDs are not looked up.

    The rules are CUDA's, as in torch 2.13.0 (`torch.cuda._parse_visible_devices`): a list ends at
    the first entry that is not a GPU, and is empty if an entry occurs twice. An empty list, or one
    that starts with -1, hides GPUs on purpose.
    """
    prefix = next((prefix for prefix in _UUIDS if text.startswith(prefix)), None)
    found: list[str] = []
    for entry in text.split(","):
        if prefix is not None:
            if entry in found:
                return Visible((), repeated=True)
            if not entry.startswith(prefix):
                break
            found.append(entry)
            continue
        match = _INDEX.match(entry)
        index = int(match[1]) if match else -1
        if str(index) in found:
            return Visible((), repeated=True)
        if index < 0:
            break
        if gpus is not None and index >= gpus:
            return Visible(tuple(found), missing=True)
        found.append(str(index))
    return Visible(tuple(found))
