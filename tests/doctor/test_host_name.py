"""The remedies of the host name, pasted on a machine with names and a network of its own."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dshealthd.doctor.node import host_name
from tests.doctor.looks import apply, look, results

REMEDIES = """
set -eu
mount --bind "$1" /etc
hostname node17
ip link set lo up
ip link add eth0 type veth peer name eth1
ip addr add 10.9.0.1/24 dev eth0
ip link set eth0 up
shift
exec "$@"
"""
"""Gives a process an /etc, a host name and a network of its own."""


def paste_remedies() -> None:
    """Say twice what is found of the host name, and paste its remedy in between. Runs below."""
    for _ in range(2):
        (found,) = results(host_name.HOST_NAME, look(several=True))
        print(found.outcome.value, found.text)
        if found.remedy:
            apply(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_remedies_of_the_host_name(tmp_path: Path) -> None:
    """A name at 127.0.1.1 or without an address passes by the remedy; other lines stay."""
    etc = tmp_path / "etc"
    shutil.copytree("/etc", etc, symlinks=True, ignore=shutil.ignore_patterns("*shadow*", "ssl"))
    other = "127.0.0.1 localhost{}\n127.0.1.1 node170 node17-ib\n"
    (etc / "nsswitch.conf").write_text("hosts: files\n")
    script = "from tests.doctor.test_host_name import paste_remedies; paste_remedies()"
    within = ["unshare", "--mount", "--uts", "--net", "sh", "-c", REMEDIES, "sh", str(etc)]
    if subprocess.run(
        [*within[:4], "true"], check=False, capture_output=True, timeout=60
    ).returncode:
        pytest.skip("namespaces are not permitted here")
    for before, word, then, after in (
        (other.format("") + "127.0.1.1 a.b node17\n", "loopback", "ok", "10.9.0.1 a.b node17\n"),
        (other.format(""), "does not resolve", "ok", "10.9.0.1 node17\n"),
        (other.format(" node17"), "loopback", "warning", ""),
    ):
        (etc / "hosts").write_text(before)
        done = subprocess.run(
            [*within, sys.executable, "-c", script],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).parents[2],
        )
        said = done.stdout.splitlines()
        assert [line.partition(" ")[0] for line in said] == ["warning", then], said
        assert word in said[0]
        changed = before.replace("127.0.1.1 a.b node17\n", "") + after
        assert (etc / "hosts").read_text() == changed


@pytest.mark.parametrize(("addresses", "outcome", "says"), [
    (["192.0.2.1", "192.0.2.2"], "ok", "an address of this node"),
    (["127.0.1.1", "192.0.2.2"], "ok", "an address of this node"),
    (["192.0.2.1", "192.0.2.3"], "warning", "but no interface of this node has it"),
    (["127.0.1.1", "127.0.0.1"], "warning", "would listen on the loopback interface"),
    (["192.0.2.2", "10.88.0.1"], "warning", "10.88.0.1, a container bridge"),
])  # fmt: skip
def test_several_addresses(
    addresses: list[str], outcome: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them has to be this node's, and none a container bridge's."""
    bridges = [ipaddress.ip_network("10.88.0.0/16"), ipaddress.ip_network("10.89.0.0/16")]
    monkeypatch.setattr(host_name, "_resolve", lambda _name: addresses)
    monkeypatch.setattr(host_name, "_here", lambda address: address.endswith(".2"))
    monkeypatch.setattr(host_name, "container_networks", lambda _host: bridges)
    (found,) = results(host_name.HOST_NAME, look(several=True))
    assert (found.outcome.value, says in found.text) == (outcome, True)


def test_addresses_of_this_node() -> None:
    """Those that a socket can be bound to."""
    assert [host_name._here(each) for each in ("127.0.0.1", "192.0.2.7", "2001:db8::7")] == [
        True, False, False,
    ]  # fmt: skip
    file = Path("/proc/net/if_inet6")
    assert host_name._here("::1") is (file.exists() and f"{1:032x} " in file.read_text())
