"""Whether a process reaches its peers over IPv6."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux.ipv6 import may_use_ipv6, parse_bound
from tests.collectors.bench import write

HEAD = (
    "  sl  local_address                         remote_address  st tx rx tr tm retr uid to inode\n"
)


@pytest.mark.parametrize(("local", "counts"), [
    ("00000000000000000000000000000000", False),  # any address
    ("00000000000000000000000001000000", False),  # ::1
    ("0000000000000000FFFF00000100007F", False),  # 127.0.0.1, mapped
    ("000080FE00000000FF005450B6AD1DFE", True),  # link-local
    ("B80D01200000000000000000010000FF", True),  # 2001:db8::
])  # fmt: skip
def test_bound_address(local: str, counts: bool) -> None:  # noqa: FBT001 - a table
    """Addresses of an interface count, and those that any process has do not."""
    line = f"   0: {local}:A1B2 {'0' * 32}:0000 0A 0:0 00:0 0 1000 0 4711 1 0 100 0 0 10 0\n"
    assert parse_bound(HEAD + line) == ({4711} if counts else set())


def test_this_process() -> None:
    """A listener on IPv4 is no use of IPv6."""
    with socket.create_server(("127.0.0.1", 0)):
        assert not may_use_ipv6(Host(), os.getpid())


def test_rank_on_ipv6(tmp_path: Path) -> None:
    """A process with a socket at an address of an interface may use IPv6; another one does not."""
    line = f"   0: B80D01200000000000000000010000FF:A1B2 {'0' * 32}:0000 0A 0 0 0 0 0 4711"
    write(tmp_path, {"7/net/tcp6": HEAD + line})
    (tmp_path / "7/fd").mkdir()
    (tmp_path / "7/fd/3").symlink_to("socket:[4712]")
    assert not may_use_ipv6(Host(procfs=tmp_path), 7)
    (tmp_path / "7/fd/4").symlink_to("socket:[4711]")
    assert may_use_ipv6(Host(procfs=tmp_path), 7)
