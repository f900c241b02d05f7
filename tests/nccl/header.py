"""What NCCL's header declares."""

from __future__ import annotations

import re

_LAUNCHES = re.compile(r"\sncclResult_t\s+(nccl\w+)\(([^()]*\bcudaStream_t\b[^()]*)\);")


def launching(header: str) -> dict[str, int]:
    """Return the functions that take a stream, and which argument is their communicator."""
    return {
        name: [argument.split()[0] for argument in arguments.split(",")].index("ncclComm_t")
        for name, arguments in _LAUNCHES.findall(header)
        if name != "ncclBcast"  # calls ncclBroadcast
    }
