"""What ranks need in a container, by what gives it: a table for each runtime, and for pods."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from dshealthd.doctor.job.sources.slurm_options import gpus_per_node

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.doctor.job.start import Start

_AMD = re.compile(r"rocm|rocr|hip_|rccl|(?<![a-z])(amd|mi\d{2,3}\w?)(?![a-z])", re.IGNORECASE)
"""Names of AMD's, whose GPUs a container may see without an option."""
_BRIDGE = (
    "has a bridge of its own, where other nodes reach the ports that are published, but NCCL takes"
    " any: --network=host shares theirs"
)
_SHORT = "has 64 MB of shared memory: too few for NCCL between the GPUs of a node"
_DOCKER = {
    "driver": (
        ("--gpus", "--runtime", "--device", "--privileged"),
        "has no GPU in the container, unless the runtime of NVIDIA is its default",
    ),
    "network": (
        ("--network", "--net"),
        _BRIDGE,
    ),
    "shared memory": (("--ipc", "--shm-size", "-v", "--volume", "--mount"), _SHORT),
    "locked memory": (
        ("--ulimit", "--cap-add", "--privileged"),
        "has RDMA devices, but cannot lock memory for them beyond the daemon's limit",
    ),
}
_APPTAINER = {
    "driver": (
        ("--nv", "--nvccli", "--rocm"),
        "has no driver in the container, unless APPTAINER_NV or apptainer.conf says so",
    )
}
RUNTIMES: Mapping[str, Mapping[str, tuple[tuple[str, ...], str]]] = {
    "docker": _DOCKER,
    "podman": _DOCKER,
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
}
"""What ranks need in a container, the options that give it, and what it lacks without them."""
_NV = re.compile("(?:APPTAINER|SINGULARITY)_NV(?:CCLI)?")


def lacking(start: Start) -> Iterator[str]:
    """Yield what a container is not given that the ranks in it need."""
    outer = start.find("srun")
    asked = {**start.requested, **(outer.options if outer else {})}
    words = [word for one in start.chain for word in one.wrapper]
    text = " ".join((*words, *asked.values(), *start.variables, *start.program.variables))
    names = list(map(os.path.basename, words))
    at = next((at for at, one in enumerate(names) if one in RUNTIMES), len(names))
    given = {word.partition("=")[0] for word in words[at:]}
    # a variable may hold the options
    if names[at + 1 : at + 2] == ["build"] or any(word.startswith("$") for word in words):
        return
    needed = {
        "driver": bool(gpus_per_node(asked)) and not _AMD.search(text),
        "network": start.several["nodes"],
        "shared memory": (start.layout.ranks_per_node or 1) > 1,
        "locked memory": any("/dev/infiniband" in word for word in words[at:]),
    }
    for need, (options, lack) in RUNTIMES["".join(names[at : at + 1])].items() if given else ():
        is_set = need == "driver" and any(map(_NV.fullmatch, start.variables))
        if needed[need] and not given & {*options} and not is_set:
            yield f"{names[at]} without {options[0]} {lack}"
