"""Where sockets are read from: netlink, files where it is refused, and once a round."""

from __future__ import annotations

import errno
import functools
import itertools
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dshealthd.core.collector import Context, Reason, SourceError
from dshealthd.core.host import Host
from dshealthd.linux import sock_diag
from dshealthd.linux.sock_diag import TcpSocket, TcpState
from dshealthd.linux.tcp_sockets import SocketCounts, Sockets, parse_sockstat
from dshealthd.linux.tcp_tables import TcpRow, parse_tcp
from tests import no_netlink
from tests.jobs.machines import Clock
from tests.netns import V4, V6, connection, leave_time_wait, listener, network_namespace, ss

PROC = Path(__file__).parent.parent / "collectors/fixtures/tcp/proc"
HEADER = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  "
    "timeout inode\n"
)


def context(procfs: Path, monotonic: Callable[[], float] = time.monotonic) -> Context:
    """Return a context whose `/proc` is elsewhere."""
    return Context(host=Host(procfs=procfs), monotonic=monotonic)


def counts(sockets: Sequence[TcpSocket | TcpRow]) -> dict[TcpState, int]:
    """Return how many sockets are in each state that there is."""
    return dict(Counter(TcpState(found.state) for found in sockets))


def test_sockstat_adds_the_families() -> None:
    """TIME_WAIT is one count for both families; sockets in use are counted apart and added."""
    assert parse_sockstat(
        (PROC / "net/sockstat").read_text(), (PROC / "net/sockstat6").read_text()
    ) == SocketCounts(time_wait=9, in_use=17)
    assert parse_sockstat("TCP: inuse 3 orphan 0 tw 5 alloc 4 mem 1\n") == SocketCounts(
        time_wait=5, in_use=3
    )


@pytest.mark.parametrize(
    "text", ["", "UDP: inuse 0\n", "TCP: inuse x tw 3\n", "TCP: inuse\n", "TCP: inuse 3\n"]
)
def test_sockstat_without_its_counts_is_malformed(text: str) -> None:
    """A missing or damaged TCP line is an error, not zero sockets."""
    with pytest.raises(ValueError, match=r".+"):
        parse_sockstat(text)


def test_tcp_files_are_read_as_the_same_sockets() -> None:
    """Ports, state, timer and inode of a line come out as netlink would tell them."""
    sockets = [*parse_tcp((PROC / "net/tcp").read_text())]
    assert len(sockets) == 15
    listens, waits = (29500, 0, TcpState.LISTEN, 0, 0), (29500, 36228, TcpState.TIME_WAIT, 3, 0)
    assert (sockets[0][2:7], sockets[0].inode) == (listens, 595058)
    assert (sockets[2][2:7], sockets[2].inode) == (waits, 0)
    sockets = [*parse_tcp((PROC / "net/tcp6").read_text())]
    expected = {
        TcpState.ESTABLISHED: 4,
        TcpState.FIN_WAIT2: 1,
        TcpState.TIME_WAIT: 3,
        TcpState.CLOSE_WAIT: 1,
        TcpState.LISTEN: 2,
    }
    assert counts(sockets) == expected


@pytest.mark.parametrize("line", [
    "0: nonsense\n",
    "   0: 0100007F:733C 00000000:0000 0A\n",
    "0: A:Z B:1 01 0:0 00:0 0 0 0 12 1\n",
])  # fmt: skip
def test_damaged_tcp_files_are_malformed(line: str) -> None:
    """A line that is no socket is an error that shows the line."""
    with pytest.raises(ValueError, match="not a socket"):
        list(parse_tcp(HEADER + line))


def test_a_proc_of_elsewhere_is_read_as_files() -> None:
    """With `--path.procfs` at a fixture, this machine's own sockets do not get in."""
    sockets = Sockets(context(PROC))
    assert counts(sockets.active())[TcpState.LISTEN] == 4
    assert sockets.complete()
    assert sorted(sockets.time_wait_ports(29500, 29600)) == [29500] * 3 + [29501] * 2


def test_a_round_reads_once(tmp_path: Path) -> None:
    """Within a round all collectors see the same sockets; the next round sees what has changed."""
    shutil.copytree(PROC, tmp_path / "proc")
    given = context(tmp_path / "proc")
    sockets = given.shared(Sockets)
    first = sockets.active()
    (tmp_path / "proc/net/tcp").write_text(HEADER)
    assert sockets.active() is first
    given.sweep += 1
    assert len(sockets.active()) == len(first) - 15


def test_without_ipv6_and_sockstat_the_files_do(tmp_path: Path) -> None:
    """A kernel without IPv6, or one without sockstat, still has its sockets counted."""
    (tmp_path / "net").mkdir()
    shutil.copy(PROC / "net/tcp", tmp_path / "net/tcp")
    sockets = Sockets(context(tmp_path))
    assert sockets.summary() is None
    assert counts(sockets.active())[TcpState.TIME_WAIT] == 5


def test_too_many_sockets_for_the_files_are_said(tmp_path: Path) -> None:
    """Beyond the bound the files are not read at all."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(HEADER)
    (tmp_path / "net/sockstat").write_text("TCP: inuse 10 orphan 0 tw 19990 alloc 4 mem 1\n")
    assert Sockets(context(tmp_path)).active() == []
    (tmp_path / "net/sockstat").write_text("TCP: inuse 10 orphan 0 tw 20000 alloc 4 mem 1\n")
    with pytest.raises(SourceError, match="20010 sockets are too many") as caught:
        Sockets(context(tmp_path)).active()
    assert caught.value.reason is Reason.TIMEOUT


@pytest.mark.parametrize(
    ("size", "error"), [(5_119_999, "not a socket"), (5_120_000, "more than 20000 sockets")]
)
def test_longer_files_than_announced_are_said(tmp_path: Path, size: int, error: str) -> None:
    """A file of unknown length that exceeds the bound is an error, not fewer sockets."""
    (tmp_path / "net").mkdir()
    with (tmp_path / "net/tcp").open("wb") as file:
        file.truncate(size)
    with pytest.raises(SourceError, match=error):
        Sockets(context(tmp_path)).active()


def test_malformed_files_are_an_error(tmp_path: Path) -> None:
    """What cannot be understood fails the round with its reason and place."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(HEADER + "rubbish\n")
    with pytest.raises(SourceError, match=r"net/tcp or tcp6: not a socket: 'rubbish'") as caught:
        Sockets(context(tmp_path)).active()
    assert caught.value.reason is Reason.MALFORMED
    (tmp_path / "net/sockstat").write_text("rubbish\n")
    with pytest.raises(SourceError, match="sockstat") as caught:
        Sockets(context(tmp_path)).summary()
    assert caught.value.reason is Reason.MALFORMED


def test_files_and_netlink_agree(tmp_path: Path) -> None:
    """Netlink and this kernel's own files give the same in the same moment."""
    (tmp_path / "net").symlink_to("/proc/net")
    with network_namespace():
        ours, theirs = listener(V4, 29500), listener(V6, 29501)
        pairs = [connection(ours), connection(theirs)]
        leave_time_wait(ours, 3, server=True)
        leave_time_wait(theirs, 3, server=False)
        found = []
        for procfs in (Path("/proc"), tmp_path):
            sockets = Sockets(context(procfs))
            # The timer's own kind may change in between.
            found.append(sorted(one._replace(timer=0) for one in sockets.active()))
            assert list(sockets.time_wait_ports(29500, 29600)) == [29500] * 3
        for end in (ours, theirs, *pairs[0], *pairs[1]):
            end.close()
    assert found[0] == found[1]
    assert len(found[0]) == 2 + 4 + 6


def test_a_refused_netlink_is_replaced_by_the_files() -> None:
    """Without AF_NETLINK `/proc/net` is read, with the counts of `ss`, and said once."""
    program = (
        "import logging, time; from dshealthd.core.collector import Context; from "
        "dshealthd.core.host import Host;from dshealthd.linux.tcp_sockets import Sockets; from "
        "dshealthd.linux.sock_diag import TcpState; logging.basicConfig();c = "
        "Context(host=Host()); s = Sockets(c); s.active(); c.sweep = 1;states = [found.state for "
        "found in s.active()]; print(*(states.count(s) for s in (TcpState.LISTEN, "
        "TcpState.ESTABLISHED, TcpState.TIME_WAIT)))"
    )
    with network_namespace():
        port = listener(V6)
        pair = connection(port)
        leave_time_wait(port, 4, server=False)
        command = [sys.executable, no_netlink.__file__, sys.executable, "-c", program]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        truth = ss()
        for end in (port, *pair):
            end.close()
    assert (
        list(map(int, done.stdout.split()))
        == [truth["listen"], truth["established"], truth["time_wait"]]
        == [1, 2, 4]
    )
    assert done.stderr.count("TCP sockets are read from /proc/net/tcp") == 1


def test_a_dump_that_takes_too_long_is_an_error() -> None:
    """A dump that has spent its budget ends with a reason: the loop is not blocked."""
    ticks = itertools.chain([0.0, 0.11], [0.0], itertools.repeat(0.09))
    sockets = Sockets(context(Path("/proc")), lambda: next(ticks))
    with network_namespace():
        with pytest.raises(SourceError, match="too much CPU time") as caught:
            sockets.active()
        assert sockets.active() == []
    assert caught.value.reason is Reason.TIMEOUT


def test_a_refused_netlink_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten minutes, as the kernel may search for a module each time. Another error is none."""
    tried, clock = list[float](), Clock()

    def refuse(*_: object, number: int = errno.EPERM) -> list[TcpSocket]:
        tried.append(clock.now)
        raise OSError(number, "refused")

    monkeypatch.setattr(sock_diag, "dump", refuse)
    given = context(Path("/proc"), clock)
    sockets = Sockets(given)
    for clock.now in (1000.0, 1599.0, 1600.0):
        given.sweep += 1
        sockets.active()
    assert tried == [1000.0, 1600.0]
    monkeypatch.setattr(sock_diag, "dump", functools.partial(refuse, number=errno.EIO))
    clock.now, given.sweep = 2200.0, given.sweep + 1
    with pytest.raises(OSError, match="refused"):
        sockets.active()


def test_a_dump_without_cpu_is_not_too_long() -> None:
    """On a node whose CPUs are all busy, seconds pass between two datagrams of a dump."""
    now = itertools.count(step=10.0)
    with network_namespace():
        port = listener(V4)
        try:
            active = Sockets(context(Path("/proc"), lambda: next(now))).active()
        finally:
            port.close()
    assert counts(active) == {TcpState.LISTEN: 1}


def test_ports_of_many_are_asked_for_less_often() -> None:
    """Ports of many sockets in TIME_WAIT are kept for some rounds; those of few are fresh."""
    now = [1000.0]
    with network_namespace():
        port = listener(V4, 29500)
        given = context(Path("/proc"), lambda: now[0])
        sockets = Sockets(given)

        def ports(seconds: float) -> int:
            now[0] += seconds
            given.sweep += 1
            return len(sockets.time_wait_ports(29500, 29600))

        leave_time_wait(port, 2, server=True)
        assert ports(0) == 2
        leave_time_wait(port, 1, server=True)
        assert ports(0) == 3
        leave_time_wait(port, 900, server=False)
        assert ports(5) == 3
        leave_time_wait(port, 1, server=True)
        assert ports(0) == 4
        leave_time_wait(port, 200, server=False)
        assert ports(5) == 4
        leave_time_wait(port, 4, server=True)
        assert ports(14) == 4
        assert ports(1) == 8
        port.close()
