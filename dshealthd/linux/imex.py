"""IMEX, the service through which CUDA shares GPU memory between nodes of an NVLink domain.

Read from its files and `/proc`, without its command: `nvidia-imex-ctl` contacts other nodes and may
hang. https://docs.nvidia.com/multi-node-nvlink-systems/imex-guide/config.html
"""

from __future__ import annotations

import os

from dshealthd.core.host import Host, lines_of, read_existing
from dshealthd.linux.sock_diag import TcpState
from dshealthd.linux.tcp_tables import parse_tcp

CONFIG = "/etc/nvidia-imex/config.cfg"
NODES = "/etc/nvidia-imex/nodes_config.cfg"
CHANNELS = "nvidia-caps-imex-channels"
"""Directory below `/dev`; jobs need a channel in it."""
DAEMON = "nvidia-imex"
PORT = 50000
_MOST_SOCKETS = 1 << 23
"""Most bytes of a socket table that are read: some 50,000 sockets."""


def parse_settings(text: str) -> dict[str, str]:
    """Return the settings of IMEX's config.cfg."""
    lines = (line.partition("#")[0].partition("=") for line in lines_of(text))
    return {key.strip(): value.strip() for key, equals, value in lines if equals}


def parse_nodes(text: str) -> list[str]:
    """Return the addresses of IMEX's nodes_config.cfg."""
    lines = (line.partition("#")[0].strip() for line in lines_of(text))
    return [line for line in lines if line]


def settings(host: Host) -> dict[str, str]:
    """Return IMEX's settings; empty if it is not installed. OSError."""
    return parse_settings(read_existing(host.root(CONFIG)) or "")


def nodes(host: Host, configured: dict[str, str]) -> list[str]:
    """Return the nodes that share memory through IMEX; empty if none are listed. OSError."""
    path = configured.get("IMEX_NODE_CONFIG_FILE") or NODES
    return parse_nodes(read_existing(host.root(path)) or "")


def channels(host: Host) -> int:
    """Return the number of IMEX channels available to jobs. OSError."""
    try:
        return sum(name.startswith("channel") for name in os.listdir(host.device(CHANNELS)))
    except FileNotFoundError:
        return 0


def is_listening(host: Host, pid: int, port: int) -> bool:
    """Return whether this port has a listener in the network of `pid`. OSError, ValueError."""
    return any(
        (found.state, found.port) == (TcpState.LISTEN, port)
        for table in ("tcp", "tcp6")
        for found in parse_tcp(read_existing(host.proc(f"{pid}/net/{table}"), _MOST_SOCKETS) or "")
    )
