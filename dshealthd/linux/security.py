"""A node's protection: its firewall's files, to compare nodes, and SELinux' mode."""

from __future__ import annotations

import os
from collections.abc import Iterator

from dshealthd.core.host import Host, lines_of, read_existing

_FILES = (
    "etc/nftables.conf",  # Debian
    "etc/sysconfig/nftables.conf",  # Red Hat
    "etc/iptables/rules.v4",
    "etc/iptables/rules.v6",
    "etc/sysconfig/iptables",
    "etc/sysconfig/ip6tables",
    "etc/ufw/ufw.conf",
    "etc/ufw/user.rules",
    "etc/ufw/user6.rules",
    "etc/firewalld/firewalld.conf",
    "etc/firewalld/direct.xml",
)
_DIRECTORIES = ("etc/nftables", "etc/nftables.d", "etc/firewalld/zones", "etc/firewalld/policies")
_MAX_FILES = 64
"""Limit per directory."""
_MODES = {"0": "permissive", "1": "enforcing"}


def firewall_configuration(host: Host) -> str:
    """Return the rules of nftables, iptables, ufw and firewalld in order; empty for none."""
    return "\n".join(
        f"{path}:\n{text}" for path in _paths(host) if (text := _rules(host.root(path))) is not None
    )


def _paths(host: Host) -> Iterator[str]:
    yield from _FILES
    for directory in _DIRECTORIES:
        try:
            names = sorted(os.listdir(host.root(directory)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        # Skips backups by editors or firewalld, which are not in effect.
        yield from (
            f"{directory}/{name}"
            for name in names[:_MAX_FILES]
            if name.endswith((".nft", ".conf", ".xml"))
        )


def _rules(place: str) -> str | None:
    if (text := read_existing(place)) is None:
        return None
    lines = (line.strip() for line in lines_of(text))
    return "\n".join(line for line in lines if line and not line.startswith("#"))


def mode(host: Host) -> str:
    """Return SELinux's mode: enforcing, permissive, disabled or unknown. OSError."""
    state = read_existing(host.sys("fs/selinux/enforce"))
    if state is None:
        os.stat(host.sys("fs"))  # without sysfs nothing is known
        return "disabled"
    return _MODES.get(state.strip(), "unknown")
