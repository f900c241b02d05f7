"""What users can make deep, wide or long is read up to a bound, and no further."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux.activity import demands
from dshealthd.linux.ipv6 import may_use_ipv6
from dshealthd.linux.pids_cgroup import Tasks, tasks_and_limit
from dshealthd.linux.security import firewall_configuration
from tests.collectors.bench import host, write


def test_nested_cgroups(tmp_path: Path) -> None:
    """Of a chain of cgroups the outermost 64 count."""
    for depth, current in ((64, 7), (65, 9)):
        path = "/".join("a" * depth)
        write(tmp_path, {"proc/1/cgroup": "0::/" + "/".join("a" * 65)})
        files = {"pids.current": str(current), "pids.max": "10"}
        write(tmp_path / "sys/fs/cgroup" / path, files)
        assert tasks_and_limit(host(tmp_path), 1) == Tasks(7, 10)


def test_threads(tmp_path: Path) -> None:
    """256 of them are read."""
    write(tmp_path, {f"1/task/{number}/schedstat": "1 2 3" for number in range(257)})
    assert len(demands(Host(procfs=tmp_path), 1)) == 256


def test_files_of_a_firewall(tmp_path: Path) -> None:
    """64 of a directory, the first by name."""
    files = {f"root/etc/nftables.d/{number:02}.nft": f"rule {number}" for number in range(65)}
    write(tmp_path, files)
    found = firewall_configuration(host(tmp_path))
    assert ("rule 63" in found, "rule 64" in found) == (True, False)


@pytest.mark.parametrize(("size", "may"), [((16 << 20) - 4, False), (16 << 20, True)])
def test_sockets_of_ipv6(tmp_path: Path, size: int, *, may: bool) -> None:
    """A table that is longer than is read counts as IPv6."""
    (tmp_path / "1/net").mkdir(parents=True)
    (tmp_path / "1/net/tcp6").write_text("sl \n" * (size // 4))
    assert may_use_ipv6(Host(procfs=tmp_path), 1) is may
