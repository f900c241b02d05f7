"""The rendezvous ports on a fixture, against `ss`, and with a real orphan."""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dshealthd.collectors.rendezvous import RendezvousPorts, parse_ports
from dshealthd.core.collector import Reason, Worker
from dshealthd.core.host import Host
from dshealthd.core.options import Errors, decode
from dshealthd.core.result import CollectionOutcome
from dshealthd.linux.sock_diag import TcpState
from dshealthd.linux.socket_owners import Search
from dshealthd.linux.tcp_sockets import FEW
from tests.collectors.bench import FIXTURES, Bench, Values, exposed, named, unprivileged
from tests.netns import V4, V6, connection, leave_time_wait, listener, network_namespace, ss

LISTENER = (
    "import socket, sys, time; s = socket.create_server(('127.0.0.1', {port})); "
    "print(flush=True); time.sleep(60)"
)
LAUNCHER = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
    "print(p.pid, flush=True); p.wait()"
)


class Agent(Bench):
    """The collector, round by round."""

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        super().__init__("rendezvous", Host(procfs=procfs))

    def look(self, seconds: float = 0.0) -> Values:
        """Return the values of a round, by the last part of their name and their labels."""
        result = self.collect(seconds)
        assert result.outcome is CollectionOutcome.OK, result.detail
        return named(result, "rendezvous_")

    def until(self, key: tuple[str, ...]) -> Values:
        """Collect until this value is not 0, for at most a minute."""
        end = time.monotonic() + 60
        while not (values := self.look()).get(key) and time.monotonic() < end:
            time.sleep(0.01)
        return values


def process(
    proc: Path,
    pid: int,
    parent: int,
    comm: str,
    sockets: tuple[int, ...] = (),
    started: int = 0,
    environ: str = "",
) -> None:
    """Put a process into a `/proc`; `started` in ticks since boot."""
    place = proc / str(pid)
    shutil.rmtree(place, ignore_errors=True)
    (place / "fd").mkdir(parents=True)
    (place / "fd/0").symlink_to("/dev/null")
    for number, inode in enumerate(sockets, 3):
        (place / f"fd/{number}").symlink_to(f"socket:[{inode}]")
    (place / "comm").write_text(comm + "\n")
    (place / "environ").write_text(environ.replace(" ", "\0") + "\0")
    (place / "stat").write_text(
        f"{pid} ({comm}) S {parent} {pid} {pid} 0 -1 {' '.join('0' * 13)} {started} 0 0\n"
    )


@pytest.fixture
def proc(public_path: Path) -> Path:
    """Give a `/proc` with listeners 595058, 595073 and 595087, systemd, and no owners."""
    shutil.copytree(FIXTURES / "tcp/proc", public_path, dirs_exist_ok=True)
    process(public_path, 1, 0, "systemd")
    return public_path


def test_fixture(proc: Path) -> None:
    """An orphan, a launcher's child and a listener of nobody, with their ages, and clients."""
    process(proc, 4000, 1, "python3", (111, 595058), started=1000_00, environ="RANK=0 PATH=/bin")
    process(proc, 5000, 1, "torchrun")
    process(proc, 5001, 5000, "pt_main (x) y", (595073,), started=86000_00)
    agent = Agent(proc)
    result = agent.collect()
    assert result.outcome is CollectionOutcome.OK
    text = "".join(
        line
        for line in exposed(result.samples).splitlines(keepends=True)
        if 'age_seconds{orphaned="unk' not in line
    )
    assert text == (FIXTURES / "rendezvous/expected.prom").read_text()
    assert agent.look()["listener_age_seconds", "unknown"] < 5


def orphaned(proc: Path) -> str:
    """Return what a new agent calls the only listener that has an owner."""
    values = Agent(proc).look()
    labels = [label for label in ("true", "false", "unknown") if values["listeners", label] == 1]
    return labels[0] if labels else "unknown"


@pytest.mark.parametrize(("parent", "environ", "verdict"), [
    (("systemd", 1), "A=1", "true"),
    (("systemd", 1), "A=1 SYSTEMD_EXEC_PID=4000", "false"),
    (("systemd", 1), "A=1 SYSTEMD_EXEC_PID=40", "true"),
    (("systemd", 900), "A=1", "true"),
    (("systemd", 900), "SYSTEMD_EXEC_PID=4000", "false"),
    (("bash", 900), "A=1", "false"),
    (("bash", 1), "A=1", "unknown"),
    (("tini", 1), "A=1", "unknown"),
    (("", 0), "A=1", "false"),
], ids=["orphan", "service", "child of service", "user's orphan", "user's service", "shell",
        "container's shell", "tini", "first process"])  # fmt: skip
def test_who_takes_in_orphans(
    proc: Path, parent: tuple[str, int], environ: str, verdict: str
) -> None:
    """Systemd knows its services from its orphans; of another process 1 it cannot be said."""
    comm, pid = parent
    process(proc, 4000, pid, "python3", (595058,), environ=environ)
    if pid:
        process(proc, pid, 0, comm)
    (proc / "net/tcp6").unlink()
    lines = (proc / "net/tcp").read_text().splitlines(keepends=True)
    (proc / "net/tcp").write_text("".join(line for line in lines if "595087" not in line))
    assert orphaned(proc) == verdict


def test_a_parent_lost_under_our_eyes_makes_an_orphan(proc: Path) -> None:
    """Whatever takes the process in, a parent that changes is a parent that is gone."""
    process(proc, 900, 1, "launcher")
    process(proc, 901, 1, "subreaper")
    process(proc, 4000, 900, "python3", (595058,))
    agent = Agent(proc)
    assert agent.look()["listeners", "false"] == 1
    process(proc, 4000, 901, "python3", (595058,))
    assert agent.look()["listeners", "true"] == 1


def test_a_socket_that_changes_hands_is_followed(proc: Path) -> None:
    """When the owner ends and a child has kept the socket, the child is found."""
    process(proc, 900, 1, "launcher")
    process(proc, 4000, 900, "python3", (595058,))
    agent = Agent(proc)
    assert agent.look()["listeners", "false"] == 1
    shutil.rmtree(proc / "4000")
    process(proc, 4001, 1, "python3", (595058,))
    assert agent.look()["listeners", "true"] == 1
    process(proc, 4001, 1, "python3", (7,))
    values = agent.look()
    assert (values["listeners", "true"], values["listeners", "unknown"]) == (0, 3)


def test_an_owner_that_cannot_be_seen_is_unknown(proc: Path) -> None:
    """Without the right to look, a listener is neither an orphan nor healthy."""
    process(proc, 4000, 900, "python3", (595058,))
    (proc / "4000/fd").chmod(0)
    with unprivileged():
        values = Agent(proc).look()
    assert [values["listeners", label] for label in ("true", "false", "unknown")] == [0, 0, 3]
    assert values["listener_age_seconds", "unknown"] < 5
    assert ("listener_age_seconds", "false") not in values


def test_the_age_of_a_new_listener_begins_when_it_appears(proc: Path) -> None:
    """A listener that appears later is as old as it has been seen, however old its process."""
    tcp = (proc / "net/tcp").read_text()
    (proc / "net/tcp").write_text(tcp.splitlines(keepends=True)[0])
    (proc / "net/tcp6").unlink()
    process(proc, 900, 1, "jupyter")
    process(proc, 4000, 900, "python3", (595058,), started=0)
    agent = Agent(proc)
    assert ("listener_age_seconds", "false") not in agent.look()
    (proc / "net/tcp").write_text(tcp)
    assert agent.look(10.0)["listener_age_seconds", "false"] == 0
    assert agent.look(15.0)["listener_age_seconds", "false"] == 15
    another = tcp.splitlines()[1].replace("595058", "77")
    (proc / "net/tcp").write_text(f"{tcp}{another}\n")
    assert agent.look(15.0)["listener_age_seconds", "unknown"] == 30


def test_a_search_goes_on_from_round_to_round(proc: Path) -> None:
    """However many descriptors there are, a round takes a quarter of a second, and the owner is
    found in the end.
    """
    process(proc, 900, 1, "launcher")
    for pid in range(2000, 2040):
        process(proc, pid, 900, "other", (pid,))
    process(proc, 4000, 900, "python3", (595058,))
    ticks = itertools.count()
    search = Search(Host(procfs=proc), lambda: next(ticks) / 40, lambda _pid: True)
    search.owners({1})  # nobody has it
    assert next(ticks) == 1 + 11, "after its beginning, until more than 0.25 s are over"
    search.close()
    agent = Agent(proc)
    agent.clock = lambda: next(ticks) / 40
    rounds = 0
    while not agent.look()["listeners", "false"]:
        rounds += 1
        assert rounds < 100
    assert rounds > 1
    agent.collector.close()


def test_an_owner_that_cannot_be_read_now(proc: Path) -> None:
    """A lack of descriptors passes, and does not leave it unknown for as long as it lives."""
    process(proc, 4000, 1, "python3", (595058,))
    (proc / "4000/environ").unlink()
    (proc / "4000/environ").mkdir()  # opens, and cannot be read
    agent = Agent(proc)
    assert agent.look()["listeners", "unknown"] == 3
    (proc / "4000/environ").rmdir()
    (proc / "4000/environ").write_text("RANK=0\0")
    assert agent.look(61.0)["listeners", "true"] == 1


def test_an_owner_that_hangs_its_reader_is_left_out(proc: Path) -> None:
    """Its environment is read once the process was entered, in a worker and not in the agent."""
    process(proc, 4000, 1, "python3", (595058,), environ="RANK=0")
    agent = Agent(proc)
    agent.hung["process 4000"] = Reason.TIMEOUT
    assert agent.look()["listeners", "true"] == 0
    assert agent.entered == ["process 4000"]
    assert agent.collector.worker is Worker.STORAGE


def test_a_search_in_vain_rests(proc: Path) -> None:
    """A listener without owner is searched for again after a minute; a new one at once."""
    agent = Agent(proc)
    assert agent.look()["listeners", "unknown"] == 3
    process(proc, 900, 1, "launcher")
    process(proc, 4000, 900, "python3", (595058,))
    assert agent.look(59.0)["listeners", "unknown"] == 3
    assert agent.look(2.0)["listeners", "false"] == 1
    process(proc, 4001, 900, "python3", (600000,))
    lines = (proc / "net/tcp").read_text()
    (proc / "net/tcp").write_text(
        lines
        + lines.splitlines(keepends=True)[1].replace("595058", "600000").replace("733C", "733E")
    )
    assert agent.look(1.0)["listeners", "false"] == 2


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_states_agree_with_ss(*, many: bool) -> None:
    """By state, the sockets in the range are what `ss` lists with that filter, of both families."""
    with network_namespace():
        ends: list[socket.socket] = []
        for address in (V4, V6):
            for port in (29499, 29500, 29600, 29601):
                at = listener(address, port)
                ends += [at, *connection(at)]
                leave_time_wait(at, 4, server=True)
                leave_time_wait(at, 2, server=False)
            if many:
                leave_time_wait(ends[0], FEW // 2, server=False)
        ours = Agent().look()
        truth = ss("( sport >= 29500 and sport <= 29600 )")
        clients = ss("( dport >= 29500 and dport <= 29600 )")
        for end in ends:
            end.close()
    assert {state.label: ours["sockets", state.label] for state in TcpState} == {
        state.label: truth[state.label] for state in TcpState
    }
    assert (truth["listen"], truth["established"], truth["time_wait"]) == (4, 4, 16)
    assert ours["client_sockets", "established"] == clients["established"] == 4
    assert (ours["ports",], ours["ports_used",]) == (101, 2)


LIFE_OF_AN_ORPHAN = """
import os, subprocess, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from tests.collectors.test_rendezvous import Agent
Path("/proc/self/comm").write_text("systemd")  # this is process 1
with open("/dev/null") as nothing:
    launcher = subprocess.Popen(
        [sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE, text=True
    )
    pid = int(launcher.stdout.readline())
    launcher.stdout.readline()  # it listens
agent = Agent()
seen = [agent.until(("listeners", "false"))]
launcher.kill()
launcher.wait()
seen += [agent.look(), Agent().until(("listeners", "true"))]
for values in seen:
    for label in ("true", "false", "unknown"):
        print(values["listeners", label], values.get(("listener_age_seconds", label), -1))
os.kill(pid, 9)
os.waitpid(pid, 0)
"""


def test_life_of_an_orphan() -> None:
    """A real listener is its launcher's, and an orphan once that was killed, for the agent that saw
    it and for one that starts afterwards, in a namespace with a systemd of its own.
    """
    with network_namespace():
        command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
        arguments = [LIFE_OF_AN_ORPHAN, LAUNCHER, LISTENER.format(port=29555), *sys.path]
        done = subprocess.run(
            [*command, *arguments], check=False, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    shown = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert [number for number, _ in shown] == [0, 1, 0, 1, 0, 0, 1, 0, 0]
    assert all(0 <= age < 60 if number else age == -1 for number, age in shown)


UNICODE = ("\u0662\u0669\u0665\u0660\u0660", "29500\u00b2", " 29500", "+29500", "29_500")
"""Texts that Python takes for numbers, or nearly, and no launcher does."""


def test_ports_are_checked() -> None:
    """A range of ports is written first-last, or as one port."""
    assert parse_ports("29500-29600") == (29500, 29600)
    assert parse_ports("29500") == (29500, 29500)
    texts = ("", "0-5", "5-4", "1023", "1023-2000", "2000-65536", "a-b", "1-2-3", "-5")
    for malformed in (*texts, *UNICODE):
        errors = Errors()
        decode(RendezvousPorts.Options, {"ports": malformed}, "collectors.rendezvous", errors)
        message = f'"{malformed}" is not a range of ports from 1024 to 65535 such as "29500-29600"'
        assert errors == [f"collectors.rendezvous.ports: {message}"]


def test_connections_are_counted_by_the_orphans_port(proc: Path) -> None:
    """Ranks on one orphan's port are told as its own: two jobs on a node have two ports. Of two
    orphans on a port the older one tells its age.
    """
    listening = (proc / "net/tcp").read_text().splitlines(keepends=True)
    (proc / "net/tcp6").unlink()
    (line,) = (line for line in listening if " 595058 " in line)
    port = line.split()[1].rpartition(":")[2]
    second = line.replace(f":{port} ", ":7350 ").replace("595058", "700001")
    connected = [
        line.replace(" 0A ", " 01 ").replace("595058", str(700002 + number)) for number in range(3)
    ]
    young = line.replace("595058", "700009")
    (proc / "net/tcp").write_text("".join((listening[0], line, second, young, *connected)))
    process(proc, 4000, 1, "python3", (595058,), started=1000_00, environ="A=1")
    process(proc, 4002, 1, "python3", (700009,), started=86000_00, environ="A=1")
    process(proc, 4001, 1, "python3", (700001,), environ="A=1")
    one, other = str(int(port, 16)), str(0x7350)
    values = Agent(proc).until(("orphan_age_seconds", other))
    assert values["orphan_connections", one] == 3
    assert values["orphan_age_seconds", one] > 80_000
    assert values["orphan_connections", other] == 0
    assert values["orphan_age_seconds", other] > 0
    process(proc, 4001, 4000, "python3", (700001,), environ="A=1")
    assert ("orphan_age_seconds", other) not in Agent(proc).look()


def test_many_listeners(proc: Path) -> None:
    """The owners of 64 are searched for, and the lowest 16 orphaned ports have series."""
    heading, line = (proc / "net/tcp").read_text().splitlines(keepends=True)[:2]
    (proc / "net/tcp6").unlink()
    ports = range(29510, 29575)  # one more than are followed
    rows = [line.replace(":733C", f":{port:04X}").replace("595058", f"{port}") for port in ports]
    (proc / "net/tcp").write_text(heading + "".join(reversed(rows)))
    process(proc, 4000, 1, "python3", tuple(ports))
    values = Agent(proc).look()
    assert (values["listeners", "true"], values["listeners", "unknown"]) == (64, 1)
    shown = [int(key[1]) for key in values if key[0] == "orphan_connections"]
    assert shown == list(range(29511, 29527))
