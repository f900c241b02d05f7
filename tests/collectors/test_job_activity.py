"""What training jobs do besides their steps, from the counters of their processes and sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from dshealthd.collectors import job_activity
from dshealthd.collectors.job_activity import (
    AWAITS,
    CHILDREN,
    CPU,
    FILES,
    PROCESS,
    SERVES,
    SOCKETS,
    TROUBLE,
    WATCHDOG,
    parse_interfaces,
    parse_io,
    script,
)
from dshealthd.core.collector import Reason
from dshealthd.jobs import shares
from dshealthd.jobs.rank_processes import RankProcesses, RankTrouble
from dshealthd.jobs.shares import share_places
from dshealthd.linux import sock_diag, socket_waits
from tests.collectors.bench import Bench, Values, reasons, values
from tests.jobs.machines import TORCH, Machine, stat_line

IO = "rchar: 5\nwchar: 7\nread_bytes: 0\nwrite_bytes: {}\ncancelled_write_bytes: 4\n"


class Scene(Bench):
    """A rank and its data loader, of one job, and the collector."""

    def __init__(self, path: Path) -> None:
        super().__init__("job_activity", path)
        self.machine = Machine(path / "proc")
        for pid in (10, 11):
            self.machine.process(pid, {**TORCH, "SLURM_JOB_ID": "7"})
            self.writes(pid, 1000)

    def writes(self, pid: int, count: int) -> None:
        """Have a process have written so many bytes."""
        (self.machine.root / str(pid) / "io").write_text(IO.format(count))

    def ran(self, pid: int, main: int, others: int = 0, state: str = "S") -> None:
        """Have a process's main thread, and its others, have run for so many ticks."""
        process = self.machine.root / str(pid)
        task = process / "task" / str(pid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "stat").write_bytes(stat_line(pid, state=state, ticks=main))
        (process / "stat").write_bytes(stat_line(pid, state=state, ticks=main + others))

    def look(self) -> tuple[Values, dict[str, Reason]]:
        """Return the rate of each job, ten seconds later, and the faults."""
        result = self.collect(10.0)
        return values(result, FILES), reasons(result)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A job whose processes have been looked at once."""
    made = Scene(tmp_path)
    assert made.look() == ({}, {})
    return made


def test_a_job_that_writes(scene: Scene) -> None:
    """All its processes count, since the look before."""
    scene.writes(10, 1000 + 2 * 10**7)
    scene.writes(11, 1500)
    rates, faults = scene.look()
    assert (rates, faults) == ({("slurm-7",): 2e6 + 50}, {})
    assert scene.look() == ({("slurm-7",): 0.0}, {})


def test_a_process_that_cannot_be_read_is_no_zero(scene: Scene) -> None:
    """It is a fault; its job's other processes count as far as they show that it works, and without
    any nothing is told of the job.
    """
    first, other = (scene.machine.root / str(pid) / "io" for pid in (10, 11))
    first.write_text("")
    for written, rates in ((1000 + 100_000, {}), (1000 + 200_010, {("slurm-7",): 10_001.0})):
        scene.writes(11, written)
        assert scene.look() == (rates, {"process 10": Reason.MALFORMED})
    for place in (first, other):
        place.unlink()
        place.mkdir()
    assert scene.look() == ({}, dict.fromkeys(("process 10", "process 11"), Reason.IO_ERROR))
    for place in (first, other):
        place.rmdir()
    assert scene.look() == ({}, {})  # they have ended


def test_what_the_kernel_does_not_tell() -> None:
    """A kernel without these counters is an error, not a job that moves nothing."""
    with pytest.raises(ValueError, match="no read_bytes"):
        parse_io(b"rchar: 5\nwchar: 7\n")
    with pytest.raises(ValueError, match="not an interface"):
        parse_interfaces(b"\n\neth0: 5\n")


def test_either_way_of_moving_bytes() -> None:
    """What is mapped shows as pages alone, and what a file system in user space gets does not."""
    assert parse_io(b"rchar: 1\nwchar: 2\nread_bytes: 30\nwrite_bytes: 40\n") == 70
    assert parse_io(b"rchar: 10\nwchar: 20\nread_bytes: 0\nwrite_bytes: 4\n") == 30


def cores(scene: Scene) -> Values:
    """Return what the child processes of each job took, ten seconds later."""
    return values(scene.collect(10.0), CHILDREN)


def test_child_processes(tmp_path: Path) -> None:
    """Those that run count, and those that a rank has waited for; the rank itself does not."""
    scene = Scene(tmp_path)
    variables = {**TORCH, "SLURM_JOB_ID": "7"}

    for own, waited, children, found in ((1000, 0, 0, {}), (2000, 500, 1500, {("slurm-7",): 2.0})):
        scene.machine.process(10, variables, ticks=own, waited=waited)
        scene.machine.process(11, variables, parent=10, ticks=children)
        assert cores(scene) == found


def test_children_that_get_no_cpu(tmp_path: Path) -> None:
    """One that is ready to compute is at work, however little of a CPU it gets; many that were
    ready for a moment are not.
    """
    scene = Scene(tmp_path)
    variables = {**TORCH, "SLURM_JOB_ID": "7"}

    def wait(seconds: float, *pids: int) -> Values:
        for pid in pids:
            scene.machine.process(pid, variables, parent=10)
            scene.writes(pid, 0)
            place = scene.machine.root / str(pid) / "schedstat"
            place.write_text(f"1000000000 {seconds * 1e9:.0f} 9\n")
        return cores(scene)

    assert wait(0.0, 11, 12, 13) == {}
    assert wait(1.0, 11, 12, 13) == {("slurm-7",): 0.1}
    assert wait(9.0, 13) == {("slurm-7",): 0.8}


def test_a_network_namespace_of_its_own(tmp_path: Path) -> None:
    """In a pod the interfaces tell what the job moves, as the agent does not see its
    connections.
    """
    head = b"Inter-|   Receive\n face |bytes\n"
    assert parse_interfaces(head + b"lo: 7 1 0 0 0 0 0 0 7 1\neth0: 5 1 0 0 0 0 0 0 9 1\n") == 14
    scene = Scene(tmp_path)
    for pid in (10, 11):
        place = scene.machine.root / str(pid)
        (place / "ns").mkdir()
        (place / "net").mkdir()
        (place / "ns" / "net").symlink_to("net:[9]")
    own = scene.machine.root / "self" / "ns"
    own.mkdir(parents=True)
    (own / "net").symlink_to("net:[1]")

    def rate(count: int) -> Values:
        for pid in (10, 11):
            (scene.machine.root / str(pid) / "net" / "dev").write_bytes(
                head + f"eth0: 0 1 0 0 0 0 0 0 {count} 1\n".encode()
            )
        return values(scene.collect(10.0), SOCKETS)

    assert rate(1000) == {}
    assert rate(51000) == {("slurm-7",): 5000.0}


def test_this_kernel_counts_an_upload(tmp_path: Path) -> None:
    """What a connection has sent, and its other end received, is known of the process that holds
    it.
    """
    scene = Scene(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sends = socket.create_connection(server.getsockname())
        receives, _ = server.accept()
    with sends, receives:
        place = scene.machine.root / "10" / "fd"
        (place / "5").symlink_to(f"socket:[{os.fstat(sends.fileno()).st_ino}]")
        assert values(scene.collect(10.0), SOCKETS) == {}
        assert values(scene.collect(10.0), SOCKETS) == {("slurm-7",): 0.0}
        sends.sendall(bytes(50_000))
        left = 50_000
        while left:
            left -= len(receives.recv(left))
        assert values(scene.collect(10.0), SOCKETS) == {("slurm-7",): 5000.0}


def test_no_connections_are_none_only_if_all_could_be_read(scene: Scene) -> None:
    """A job without connections moves nothing over them; one whose descriptors are closed to the
    agent may.
    """
    assert values(scene.collect(10.0), SOCKETS) == {("slurm-7",): 0.0}
    descriptors = scene.machine.root / "11" / "fd"
    descriptors.rmdir()
    descriptors.touch()  # what cannot be listed
    assert values(scene.collect(10.0), SOCKETS) == {}


def test_processes_that_get_no_turn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of those that are looked at are of another user, however many one has, and each job of a
    user has its turn. What such a part of a job does is told if it shows that the job works, and
    else unknown; a job of which all are looked at loses nothing.
    """
    users = {10: (8, 7), 11: (8, 7)} | dict.fromkeys(range(20, 90), (7, 8)) | {95: (7, 9)}
    for pid, (user, job) in users.items():
        place = scene.machine.process(pid, {**TORCH, "SLURM_JOB_ID": f"{job}"}, start=100 + pid)
        (place / "status").write_text(f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\n")
        scene.writes(pid, 1000)
    monkeypatch.setattr(job_activity, "MAX_PROCESSES", 6)
    looked_at = []
    for moved in (0, 100_000, 300_000):
        for pid in (10, 20, 89, 95):
            scene.writes(pid, 1000 + moved)
        scene.entered.clear()
        found = values(scene.collect(10.0), FILES)
        looked_at.append({int(part.split()[1]) for part in scene.entered})
    assert looked_at[1] == looked_at[2] == {10, 11, 20, 21, 22, 95}
    assert found == dict.fromkeys((("slurm-7",), ("slurm-8",), ("slurm-9",)), 20_000.0)
    scene.writes(20, 1000 + 300_100)
    assert values(scene.collect(10.0), FILES) == {("slurm-7",): 0.0, ("slurm-9",): 0.0}


@pytest.mark.parametrize("more", [0, 1])
def test_more_descriptors_than_are_looked_at(
    scene: Scene, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond them is not known, unless these show that the job works."""
    known = not more
    links = {10: ["pipe:[1]"] * 16_384, 11: ["pipe:[1]"] * (16_384 + more)}
    monkeypatch.setattr(job_activity, "open_files", lambda _, pid: links[pid])
    assert values(scene.collect(10.0), SOCKETS) == ({("slurm-7",): 0.0} if known else {})
    moved = {77: 1000, 88: 10**9}
    monkeypatch.setattr(sock_diag, "bytes_moved", lambda *_: moved)
    links[10][0] = links[11][0] = "socket:[77]"
    scene.collect(10.0)
    for rises, rate in ((0, 0.0), (100_000, 10_000.0), (100_010, 10_001.0)):
        moved[77] += rises
        told = known or rate > 10_000
        assert values(scene.collect(10.0), SOCKETS) == ({("slurm-7",): rate} if told else {})
    # One that was beyond them, and comes among them, has moved its bytes long ago.
    links[11][1] = "socket:[88]"
    new = values(scene.collect(10.0), SOCKETS)
    assert new == ({("slurm-7",): 1e8} if known else {})


def test_connections_of_ranks_at_work(scene: Scene) -> None:
    """What a rank whose main thread computes sends is not looked at; once it is idle, what it has
    sent before does not count.
    """
    scene.ran(10, 0)
    (scene.machine.root / "11" / "fd").rmdir()
    total = 0

    def collected(ticks: int) -> Values:
        nonlocal total
        total += ticks
        scene.ran(10, total)
        return values(scene.collect(10.0), SOCKETS)

    with socket.create_server(("127.0.0.1", 0)) as server:
        sends = socket.create_connection(server.getsockname())
        receives, _ = server.accept()
    with sends, receives:
        place = scene.machine.root / "10" / "fd" / "5"
        place.symlink_to(f"socket:[{os.fstat(sends.fileno()).st_ino}]")
        assert (collected(500), collected(10)) == ({}, {})  # a tenth of a core, 1 % of one
        sends.sendall(bytes(50_000))
        assert collected(9) == {}
        assert 0.0 <= collected(9)["slurm-7",] < 5000.0


def test_troubles_of_jobs_without_a_place(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run has ended with is told although the job is gone; else only what has a place is."""
    found = [
        RankTrouble(job, 0, 10, "killed", 5.0, over)
        for job, over in (("slurm-7", False), ("left out", False), ("gone", True))
    ]
    monkeypatch.setattr(RankProcesses, "troubles", lambda *_: iter(found))
    assert {job for job, *_ in values(scene.collect(), TROUBLE)} == {"slurm-7", "gone"}


RECEIVES = {"x86_64": 45, "aarch64": 207}
"""The number of recvfrom(2)."""


@pytest.mark.parametrize(
    ("master", "peers"), [("29500", {("slurm-7", "3", "10.0.0.7:8000"): 1.0}), ("8000", {})]
)
def test_an_answer_from_outside(
    tmp_path: Path, master: str, peers: dict[tuple[str, ...], float]
) -> None:
    """The rank that waits for one is told with its peer; its job's own store is no such peer, and
    its data loader's waits are not looked at.
    """
    scene = Scene(tmp_path)
    variables = {**TORCH, "SLURM_JOB_ID": "7", "MASTER_PORT": master}
    scene.machine.process(10, variables, parent=1)
    scene.machine.process(11, variables, parent=10)
    for pid in (10, 11):
        place = scene.machine.root / str(pid)
        (place / "syscall").write_text(f"{RECEIVES[os.uname().machine]} 0x5 0x7ffe 0x1 0x0 0x0\n")
        (place / "fd" / "5").symlink_to("socket:[77]")
        (place / "net").mkdir(exist_ok=True)
        (place / "net" / "tcp").write_text(
            "  sl  local_address rem_address   st tx_queue rx_queue\n"
            "   0: 0100007F:9C40 0700000A:1F40 01 00000000:00000000 00:00000000 00000000 0 0 77 1\n"
        )
    assert values(scene.collect(10.0), AWAITS) == peers
    scene.hung["process 10"] = Reason.STUCK
    assert values(scene.collect(10.0), AWAITS) == {}, "a process that hangs its reader is not read"


def test_this_kernel_counts_a_save(tmp_path: Path) -> None:
    """What a genuine process saves to a file is in its counter."""
    counters = Path("/proc/self/io")
    before = parse_io(counters.read_bytes())
    (tmp_path / "checkpoint").write_bytes(bytes(8 << 20))
    assert parse_io(counters.read_bytes()) - before >= 8 << 20


def test_what_a_rank_takes(scene: Scene) -> None:
    """The CPU time of its main thread, and of all; of a rank that is stopped, by a signal or a
    debugger, that says nothing.
    """

    def look(main: int, others: int = 0, state: str = "S") -> list[float]:
        scene.ran(10, main, others, state)
        found = values(scene.collect(10.0), CPU)
        assert found.keys() <= {("slurm-7", "3", "main"), ("slurm-7", "3", "all")}
        return [value for _, value in sorted(found.items(), reverse=True)]

    assert look(0) == []
    assert [look(20), look(20), look(20, 800)] == [[0.02, 0.02], [0.0, 0.0], [0.0, 0.8]]
    for state in "Tt":
        assert [look(20, 800, state), look(20, 800), look(20, 800)] == [[], [], [0.0, 0.0]]


def test_threads_for_which_there_is_no_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told of a rank whose main thread is idle: its other threads may want a CPU."""
    for ticks in (0, 20):
        scene.ran(10, ticks)
        scene.collect(10.0)
    for seconds, told in ((0.24, 2), (0.25, 0)):

        def share(*given: Any, seconds: float = seconds) -> Any:
            scene.now += seconds
            return share_places(*given)

        monkeypatch.setattr(shares, "share_places", share)
        assert len(values(scene.collect(10.0), CPU)) == told


@pytest.mark.parametrize("busier", [10, 11])
def test_two_processes_of_a_rank(scene: Scene, busier: int) -> None:
    """The one that takes more shows what the rank does."""
    for ticks in (0, 20):
        for pid in (10, 11):
            scene.ran(pid, ticks if pid == busier else ticks // 2)
        found = values(scene.collect(10.0), CPU)
    assert found["slurm-7", "3", "main"] == 0.02


@pytest.mark.parametrize(("wants", "all_threads"), [(9, 0.9), (3, 0.05)])
def test_a_thread_that_gets_no_cpu(scene: Scene, wants: int, all_threads: float) -> None:
    """Beside an idle main thread it counts with the time for which it waited for one; many that
    poll wait for a moment each.
    """
    tasks = scene.machine.root / "10" / "task"
    for thread in (10, 11, 12):
        (tasks / str(thread)).mkdir(parents=True)

    def look(seconds: int) -> dict[str, float]:
        scene.ran(10, 0, 5 * seconds)
        for thread, share in ((10, 0), (11, wants / 10), (12, 0.3)):
            running, waiting = int(0.025e9 * seconds), int(share * 1e9 * seconds)
            (tasks / str(thread) / "schedstat").write_text(f"{running} {waiting} 7\n")
        return {which: value for (_, _, which), value in values(scene.collect(10.0), CPU).items()}

    for seconds in range(0, 30, 10):  # until its main thread was idle for a sample
        look(seconds)
    assert look(30) == pytest.approx({"main": 0.0, "all": max(all_threads, wants / 10 + 0.025)})


def test_the_watchdog_of_a_job(tmp_path: Path) -> None:
    """The shortest of its processes' environments; NCCL's default where none says it."""
    scene = Scene(tmp_path)
    assert values(scene.collect(10.0), WATCHDOG) == {("slurm-7",): 600.0}
    variables = {**TORCH, "SLURM_JOB_ID": "7", "DEEPSPEED_TIMEOUT": "3"}
    scene.machine.process(12, variables)
    assert values(scene.collect(10.0), WATCHDOG) == {("slurm-7",): 180.0}


def test_ports_for_clients(tmp_path: Path) -> None:
    """A port that a rank has chosen is told; not one that the kernel has assigned, as of NCCL's and
    gloo's connections, nor that of the job's own store, nor that of RAS. Of many the first 64 are,
    in turns of the jobs.
    """
    scene = Scene(tmp_path)
    (scene.machine.root / "sys/net/ipv4").mkdir(parents=True)
    (scene.machine.root / "sys/net/ipv4/ip_local_port_range").write_text("32768\t60999\n")
    (scene.machine.root / "sys/net/ipv4/ip_local_reserved_ports").write_text("\n")
    ports = (*range(8000, 8065), 29500, 28028, 40000)
    place = scene.machine.root / "10"
    (place / "net").mkdir(exist_ok=True)
    lines = [
        f"   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:0 0 0 0 {port} 1\n"
        for port in ports
    ]
    (place / "net" / "tcp").write_text("  sl  local_address\n" + "".join(lines))
    for slot, port in enumerate(ports):
        (place / "fd" / str(slot)).symlink_to(f"socket:[{port}]")
    told = {("slurm-7", "3", str(port)): 1.0 for port in range(8000, 8064)}
    assert values(scene.collect(10.0), SERVES) == told
    other = scene.machine.process(12, {**TORCH, "SLURM_JOB_ID": "8"})
    (other / "fd" / "5").symlink_to("socket:[8064]")
    (place / "fd" / "64").unlink()
    del told["slurm-7", "3", "8063"]
    assert values(scene.collect(10.0), SERVES) == told | {("slurm-8", "3", "8064"): 1.0}


@pytest.mark.parametrize("user", [8, 7])
@pytest.mark.parametrize(("mine", "known"), [(16_384, True), (16_385, False)])
def test_descriptors_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: int, user: int, *, known: bool
) -> None:
    """However many one has open, half of those that are looked at are another's: that job must not
    seem to move nothing, nor to serve nobody.
    """
    links = {10: ["/dev/null"] * 40_000, 11: [], 20: ["/dev/null"] * (mine - 1) + ["socket:[8000]"]}
    for module in (job_activity, socket_waits):
        monkeypatch.setattr(module, "open_files", lambda _, pid: iter(links[pid]))
    scene = Scene(tmp_path)
    scene.machine.process(20, {**TORCH, "SLURM_JOB_ID": "8"})
    scene.writes(20, 1000)
    (scene.machine.root / "sys/net/ipv4").mkdir(parents=True)
    (scene.machine.root / "sys/net/ipv4/ip_local_port_range").write_text("32768\t60999\n")
    (scene.machine.root / "sys/net/ipv4/ip_local_reserved_ports").write_text("\n")
    for pid, owner in ((10, 7), (11, 7), (20, user)):
        place = scene.machine.root / str(pid)
        (place / "status").write_text("Name:\tpython\nUid:" + 4 * f"\t{owner}" + "\n")
        (place / "net").mkdir()
        (place / "net" / "tcp").write_text(
            "  sl  local_address\n"
            "   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:0 0 0 0 8000 1\n"
        )
    scene.collect(10.0)
    result = scene.collect(10.0)
    assert values(result, SOCKETS) == ({("slurm-8",): 0.0} if known else {})
    assert values(result, SERVES) == ({("slurm-8", "3", "8000"): 1.0} if known else {})


@pytest.mark.parametrize(("line", "name"), [
    (b"/usr/bin/python3\0-u\0/home/u/train.py\0--key\0secret\0", "train.py"),
    (b"python\0-X\0dev\0-m\0pkg.train\0--x\0", "pkg.train"),
    (b"/opt/bin/trainer\0config.yml\0", "trainer"),
    (b"python3\0-u\0-c\0import secret\0", "python3"),
    (b"python3\0" + b"x" * 65 + b"\0", "x" * 64),
    (b"python3\0", "python3"),
    (b"x" * 65 + b"\0", "x" * 64),
    (b"", ""),
])  # fmt: skip
def test_what_a_process_runs(line: bytes, name: str) -> None:
    """Its script or module is named, and no argument of it."""
    assert script(line.split(b"\0")) == name


def test_a_job_has_a_name_that_its_owner_knows(scene: Scene) -> None:
    """The first process tells what runs, and under which pid."""
    (scene.machine.root / "10" / "cmdline").write_bytes(b"python\0train.py\0")
    result = scene.collect(10.0)
    assert list(values(result, PROCESS)) == [("slurm-7", "train.py", "", "10")]
    for pid in (10, 11):
        scene.machine.end(pid)
    scene.collect(10.0)
    scene.machine.process(20, {**TORCH, "SLURM_JOB_ID": "8"})
    (scene.machine.root / "20" / "cmdline").write_bytes(b"python\0other.py\0")
    scene.writes(20, 0)
    for _ in range(2):
        assert list(values(scene.collect(10.0), PROCESS)) == [("slurm-8", "other.py", "", "20")]
    assert list(scene.collector._scripts.values()) == ["other.py"], "of those that run"


def test_so_many_jobs_have_series(tmp_path: Path) -> None:
    """The sixteen that others have."""
    scene = Scene(tmp_path)
    for pid in range(100, 134):
        job, rank = divmod(pid, 2)
        scene.machine.process(pid, {**TORCH, "RANK": f"{rank}", "SLURM_JOB_ID": f"{job}"})
        scene.ran(pid, 0, state="TS"[rank])
    for pid in (10, 11):
        scene.machine.end(pid)
    assert len(values(scene.collect(10.0), TROUBLE)) == 16
