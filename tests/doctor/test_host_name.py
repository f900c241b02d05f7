"""The remedies of the host name, pasted on a machine with names and a network of its own."""

from __future__ import annotations

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
    """Say what is found of the host name and paste its remedy, until there is none. Runs below."""
    while True:
        (found,) = results(host_name.CHECK, look(several=True))
        print(found.outcome.value, found.text)
        if not found.remedy:
            break
        apply(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_remedies_of_the_host_name(tmp_path: Path) -> None:
    """A name at 127.0.1.1 passes once the printed remedies are pasted: the first takes it out of
    /etc/hosts, after which it does not resolve, and the second puts the node's address there.
    """
    etc = tmp_path / "etc"
    shutil.copytree("/etc", etc, symlinks=True, ignore=shutil.ignore_patterns("*shadow*", "ssl"))
    (etc / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node17\n")
    (etc / "nsswitch.conf").write_text("hosts: files\n")
    script = "from tests.doctor.test_host_name import paste_remedies; paste_remedies()"
    within = ["unshare", "--mount", "--uts", "--net", "sh", "-c", REMEDIES, "sh", str(etc)]
    if subprocess.run(
        [*within[:4], "true"], check=False, capture_output=True, timeout=60
    ).returncode:
        pytest.skip("namespaces are not permitted here")
    done = subprocess.run(
        [*within, sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    said = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in said] == ["warning", "warning", "ok"]
    assert "the loopback interface" in said[0]
    assert "does not resolve" in said[1]
    assert "resolves to 10.9.0.1" in said[2]
