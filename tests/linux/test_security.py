"""A firewall's files, as they are compared between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux.security import firewall_configuration
from tests.collectors.bench import write

RULES = "tcp dport 22 accept\ntcp dport 29500-29600 accept\n"


NFTABLES, UFW, ZONE = "nftables.conf", "ufw/ufw.conf", "firewalld/zones/public.xml"


def node(root: Path, files: Mapping[str, str]) -> Host:
    """Return a node with these files below /etc."""
    write(root / "etc", files)
    return Host(rootfs=root)


def test_comments_do_not_count_and_order_does(tmp_path: Path) -> None:
    """Rules that say the same are alike; another order may decide otherwise, and is not."""
    rules = firewall_configuration(node(tmp_path / "a", {NFTABLES: RULES}))
    again = f"#!/usr/sbin/nft -f\n\n  # made by Ansible on Monday\n{RULES}"
    assert firewall_configuration(node(tmp_path / "b", {NFTABLES: again})) == rules
    turned = "".join(reversed(RULES.splitlines(keepends=True)))
    assert firewall_configuration(node(tmp_path / "c", {NFTABLES: turned})) != rules


def test_every_kind_of_firewall(tmp_path: Path) -> None:
    """A zone of firewalld, rules of iptables, ufw that is enabled: each makes a node differ."""
    found = {
        firewall_configuration(node(tmp_path / str(number), files))
        for number, files in enumerate(
            (
                {"other": "x"},
                {UFW: "ENABLED=yes"},
                {UFW: "ENABLED=no"},
                {"iptables/rules.v4": "-A INPUT -j DROP"},
                {ZONE: "<zone/>"},
                {ZONE: "<zone/>", "firewalld/zones/x.xml.old": "y"},
            )
        )
    }
    assert len(found) == 5
    assert firewall_configuration(Host(rootfs=tmp_path / "0")) == ""


def test_what_cannot_be_read_is_no_absence(tmp_path: Path) -> None:
    """A file that cannot be read raises, so that nothing is compared; it is not left out."""
    (tmp_path / "etc/nftables.conf").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        firewall_configuration(Host(rootfs=tmp_path))
