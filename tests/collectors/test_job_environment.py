"""Job environments: on small machines, and on this one with real processes."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dshealthd.core.collector import Reason
from dshealthd.core.result import CollectionResult
from dshealthd.jobs.nccl.names import known_names, misnomer
from tests.collectors.bench import Bench, Values, named, reasons, write
from tests.jobs.elf import library
from tests.jobs.machines import Machine, environ
from tests.waiting import until

MAX_NAMES = 256

JOB = f"slurm-{os.getpid()}"
RUN = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}


def of_job(result: CollectionResult, name: str, job: str = "") -> Values:
    """Return the samples of one metric, of one job or all, by their labels without job and run."""
    return {
        key[3:]: value
        for key, value in named(result, "job_").items()
        if key[0] == name and job in {"", *key[1:2]}
    }


class Node(Bench):
    """A small machine with interfaces, adapters and GPUs, and the collector on it."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__("job_environment", root, **options)
        self.root = root
        self.machine = Machine(root / "proc")
        (self.machine.process(40) / "comm").write_text("bash\n")

    def rank(
        self,
        number: int,
        changed: Mapping[str, str] | None = None,
        *,
        pid: int = 0,
        parent: int = 40,
    ) -> int:
        """Add a rank, and return its pid."""
        pid = pid or 100 + number
        self.machine.process(
            pid,
            {**RUN, "RANK": str(number), "LOCAL_RANK": str(number), **(changed or {})},
            parent=parent,
            start=pid,
        )
        names = [place.name for place in self.root.glob("sys/class/net/*")]
        lines = "".join(f"{name:>6}: 0 0\n" for name in names)
        write(self.machine.root, {f"{pid}/net/dev": f"Inter-|\n face |\n{lines}"})
        return pid

    def interfaces(self, **states: str) -> None:
        """Give the machine interfaces in these states."""
        for name, state in states.items():
            flags = "0x1003" if state != "disabled" else "0x1002"
            operstate = "unknown" if name == "lo" else state
            write(self.root / "sys/class/net" / name, {"flags": flags, "operstate": operstate})

    def adapter(self, name: str, *states: str) -> None:
        """Give the machine an adapter whose ports are in these states."""
        place = self.root / "sys/class/infiniband" / name / "ports"
        write(place, {f"{port}/state": state for port, state in enumerate(states, 1)})

    def gpus(self, count: int, *models: str) -> None:
        """Give the machine GPUs, of these models in turn."""
        for index in range(count):
            model = models[index % len(models)] if models else "0x2330"
            place = self.root / f"sys/bus/pci/devices/0000:{index:02x}:00.0"
            write(place, {"vendor": "0x10de", "class": "0x030200", "device": model})

    def problems(self) -> Values:
        """Return the problems by rank, variable and problem."""
        return of_job(self.collect(), "environment_problems")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node without training."""
    return Node(tmp_path)


def test_no_job(node: Node) -> None:
    """Without training there are no series, and none that say 0, but for the runs left out."""
    result = node.collect()
    assert [(sample.metric.name, sample.value) for sample in result.samples] == [
        ("dshealthd_job_runs_left_out", 0)
    ]


def test_gpus_that_a_run_holds(node: Node) -> None:
    """Those of all its processes together, and whether one of them has a terminal; none if their
    environment does not say.
    """
    node.rank(0, {"SLURM_STEP_GPUS": "0,1"})
    node.rank(1, {"SLURM_STEP_GPUS": "2"})
    assert of_job(node.collect(), "held_gpus") == {("false",): 3}
    node.machine.process(
        102, {**RUN, "RANK": "2", "SLURM_STEP_GPUS": "2"}, parent=40, start=102, terminal=34816
    )
    assert of_job(node.collect(), "held_gpus") == {("true",): 3}
    for pid in (100, 101, 102):
        node.machine.end(pid)
    node.rank(3, {"NVIDIA_VISIBLE_DEVICES": "all"})
    assert of_job(node.collect(), "held_gpus") == {}


def test_daemon_of_a_rank_is_no_rank(node: Node) -> None:
    """A daemon of another program that an earlier rank has left behind has its environment, and is
    not that rank.
    """
    for pid, program in (
        (node.rank(1), "python3.11"),
        (node.rank(1, pid=200, parent=1), "sccache"),
    ):
        (node.machine.root / str(pid) / "exe").symlink_to(f"/usr/bin/{program}")
    assert of_job(node.collect(), "processes") == {("1",): 1}


def test_orphans(node: Node) -> None:
    """A rank that has lost its launcher is left over."""
    node.rank(0)
    node.rank(1, {"SYSTEMD_EXEC_PID": "101"}, parent=1)
    (node.machine.root / "1/comm").write_text("systemd\n")
    assert of_job(node.collect(), "orphaned_ranks") == {(): 0}
    node.rank(0, parent=1)  # taken in by process 1: the same process, with another parent
    assert of_job(node.collect(), "orphaned_ranks") == {(): 1}


def test_orphans_unknown(node: Node) -> None:
    """Below the first process of a container it is not known who started a rank."""
    node.rank(0, parent=1)
    (node.machine.root / "1/comm").write_text("tini\n")
    assert of_job(node.collect(), "orphaned_ranks") == {}


@pytest.mark.parametrize(("changed", "problem"), [
    ({"RANK": "4"}, ("4", "RANK", "beyond")),
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, ("0", "LOCAL_RANK", "beyond")),
    ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, ("0", "LOCAL_RANK", "beyond")),
    ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "1", "TORCHELASTIC_RUN_ID": "x"},
     ("0", "LOCAL_RANK", "beyond")),
    ({"CUDA_VISIBLE_DEVICES": "0,2"}, ("0", "CUDA_VISIBLE_DEVICES", "absent")),
    ({"CUDA_VISIBLE_DEVICES": "1,1"}, ("0", "CUDA_VISIBLE_DEVICES", "repeated")),
    ({"LOCAL_RANK": "1"}, None),
    ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, None),
    ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"},
     None),
    ({"LOCAL_RANK": "7", "CUDA_VISIBLE_DEVICES": ""}, None),
    ({"LOCAL_RANK": "7", "CUDA_VISIBLE_DEVICES": "-1"}, None),
])  # fmt: skip
def test_ordinals(node: Node, changed: dict[str, str], problem: tuple[str, ...] | None) -> None:
    """Numbers beyond what there is are told, on a node with two GPUs. A rank below the number of
    GPUs, one with a GPU of its own, and a training that hides all GPUs are right.
    """
    node.gpus(2)
    node.rank(0, changed)
    assert node.problems() == ({problem: 1} if problem else {})


def test_ordinals_without_gpus(node: Node) -> None:
    """On a node without GPUs, or whose bus cannot be read, nothing is said of them."""
    node.rank(0, {"LOCAL_RANK": "9", "CUDA_VISIBLE_DEVICES": "0,0"})
    assert node.problems() == {}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("^docker,lo", ""),
        ("eth1,eth0", ""),
        ("x", ""),  # which NCCL ignores
        ("eth9", "absent"),
        ("eth1", "down"),
        ("ib0", "down"),
        ("lo", "loopback"),
        ("lo,eth1", "loopback"),
        ("docker0", "loopback"),  # which this node lacks, and which leads to no other
        ("docker0,eth0", ""),
        ("virbr0,br-0123456789ab", "loopback"),
        ("br-lan", "absent"),
        ("^docker,br-,virbr", "loopback"),  # eth0 is left, and lo comes before it
    ],
)
def test_interfaces(node: Node, value: str, problem: str) -> None:
    """What NCCL_SOCKET_IFNAME leaves is nothing, nothing that runs, or the loopback interface alone
    in a run of several nodes.
    """
    node.interfaces(lo="up", eth0="up", eth1="down", ib0="disabled")
    node.rank(0)
    node.rank(1, {"NCCL_SOCKET_IFNAME": value})
    assert node.problems() == ({("1", "NCCL_SOCKET_IFNAME", problem): 1} if problem else {})


def test_loopback_on_one_node(node: Node) -> None:
    """A run of one node may use the loopback interface."""
    node.interfaces(lo="up", eth0="up")
    for number in range(4):
        node.rank(number, {"NCCL_SOCKET_IFNAME": "lo"})
    assert node.problems() == {}


@pytest.mark.parametrize(
    ("value", "problems"),
    [
        ("=mlx5_0,mlx5_1", ()),
        ("^mlx5_2", ()),
        ("bnxt,mlx5", ()),
        ("", ()),
        ("bnxt", ("absent",)),
        ("mlx5_0,mlx5_7", ("absent",)),
        ("mlx5_2", ("down",)),
        ("mlx5_1:2", ("down",)),
        ("mlx5_0:2", ("absent",)),
        ("=mlx5_7,mlx5_2", ("absent", "down")),
        ("^mlx5_0,mlx5_1", ("down",)),
        ("^mlx5", ("absent",)),
    ],
)
def test_adapters(node: Node, value: str, problems: tuple[str, ...]) -> None:
    """What NCCL_IB_HCA leaves is nothing or not active, or one of the adapters that it names singly
    is.
    """
    node.adapter("mlx5_0", "4: ACTIVE")
    node.adapter("mlx5_1", "4: ACTIVE", "1: DOWN")
    node.adapter("mlx5_2", "1: DOWN")
    node.rank(0, {"NCCL_IB_HCA": value})
    assert node.problems() == {("0", "NCCL_IB_HCA", problem): 1 for problem in problems}


def test_adapters_on_a_node_without(node: Node) -> None:
    """Where there is no adapter, one that is named is absent; to exclude some changes nothing."""
    node.rank(0, {"NCCL_IB_HCA": "mlx5_0"})
    node.rank(1, {"NCCL_IB_HCA": "^mlx5_0"})
    assert node.problems() == {("0", "NCCL_IB_HCA", "absent"): 1}


def test_adapter_that_does_not_answer(node: Node) -> None:
    """An adapter that hung is a fault; it is there, and whether it works is not known."""
    node.adapter("mlx5_0", "4: ACTIVE")
    node.adapter("mlx5_1", "gibberish")
    node.hung["adapter mlx5_0"] = Reason.STUCK
    node.rank(0, {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"})
    result = node.collect()
    assert of_job(result, "environment_problems") == {}
    assert reasons(result) == {
        "adapter mlx5_0": Reason.STUCK,
        "adapter mlx5_1": Reason.MALFORMED,
    }


LESS = "".join(f"\0NCCL_NAME_{number}" for number in range(98)) + "\0NCCL_ENTIRELY_NEW\0"
ALL_NAMES = f"\0NCCL_ONE_MORE{LESS}"
"""As many names as a library has that names all of its own."""


@pytest.mark.parametrize(
    ("release", "names", "problems"),
    [
        ("2.30.7", "", {("0", "NCCL_SOCKET_IFNAME", "misspelt"): 1, ("0", "other", "unknown"): 1}),
        ("2.30.7", ALL_NAMES, {("0", "NCCL_SOCKET_IFNAME", "misspelt"): 1}),
        ("2.33.1", LESS, {}),
        ("2.33.1", ALL_NAMES, {("0", "NCCL_SOCKET_IFNAME", "misspelt"): 1}),
    ],
)
def test_names_that_the_library_reads(
    node: Node, tmp_path: Path, release: str, names: str, problems: Values
) -> None:
    """What the process's own library names is read; a newer one that names nothing may read all."""
    pid = node.rank(0, {"NCCL_SOCKET_IFNAMES": "eth0", "NCCL_ENTIRELY_NEW": "1"})
    place = tmp_path / "libnccl.so.2"
    library(place, f"\0NCCL version {release}+cuda13.1\0{names}".encode())
    process = node.machine.root / str(pid)
    for name in ("root", "cwd", "status", "auxv"):
        (process / name).unlink(missing_ok=True)
        (process / name).symlink_to(f"/proc/self/{name}")
    (process / "maps").write_text(
        f"7f00-7f01 r--p 00000000 fe:00 {place.stat().st_ino} {place}\n", encoding="ascii"
    )
    assert node.problems() == problems


def test_names_and_of_job(node: Node) -> None:
    """Names that nothing reads, values out of range and transports that are off are told once, with
    how many ranks and the lowest.
    """
    wrong = {
        "NCCL_TIMEOUT": "1800",
        "NCCL_SOCKET_IFNAMES": "eth0",
        "NCCL_IB_TIMEOUT": "1000",
        "NCCL_P2P_DISABLE": "1",
    }
    more = {
        "NCCL_SHM_DISABLE": "true",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_OWN_PLUGINS_KNOB": "1",
        "DEEPSPEED_DEBUG": "1",
    }
    for number, address in enumerate(("0.0.0.0", "0.0.0.0", "127.0.0.1"), 1):
        node.rank(number, {**wrong, **more, "NCCL_RAS_ADDR": f"{address}:28028"})
    assert node.problems() == {
        ("1", "NCCL_TIMEOUT", "unread"): 3,
        ("1", "NCCL_SOCKET_IFNAME", "misspelt"): 3,
        ("1", "NCCL_IB_TIMEOUT", "out_of_range"): 3,
        ("1", "NCCL_P2P_DISABLE", "disabled"): 3,
        ("1", "NCCL_SHM_DISABLE", "no_number"): 3,
        ("1", "NCCL_IB_DISABLE", "disabled"): 3,
        ("1", "NCCL_NET", "disabled"): 3,
        ("1", "other", "unknown"): 3,
        ("1", "DEEPSPEED_DEBUG", "unread"): 3,
        ("1", "NCCL_RAS_ADDR", "exposed"): 2,
    }


@pytest.mark.parametrize(
    ("value", "disabled"), [("LOC", True), ("0", True), ("SYS", False), ("1", False), ("", False)]
)
# a parameter
def test_level_that_disables(node: Node, value: str, disabled: bool) -> None:  # noqa: FBT001
    """NCCL_P2P_LEVEL=LOC is NCCL_P2P_DISABLE=1 by another name."""
    node.rank(0, {"NCCL_P2P_LEVEL": value})
    assert bool(node.problems()) == disabled


def test_settings_that_differ(node: Node) -> None:
    """A rank with another value of what all must share is told."""
    for number in range(3):
        node.rank(number, {"NCCL_ALGO": "Ring"})
    node.rank(3)
    result = node.collect()
    assert of_job(result, "environment_problems") == {("3", "NCCL_ALGO", "differs"): 1}
    mixed = of_job(result, "setting_fingerprint")
    node.rank(3, {"NCCL_ALGO": "Ring"}, pid=104)
    node.machine.end(103)
    result = node.collect()
    assert of_job(result, "environment_problems") == {}
    alike = of_job(result, "setting_fingerprint")
    assert alike.keys() == mixed.keys() == {("",), ("NCCL_ALGO",)}
    assert alike != mixed
    assert all(0 <= value < 1 << 48 for value in (*alike.values(), *mixed.values()))
    assert of_job(node.collect(), "setting_fingerprint") == alike


def test_configuration_file(node: Node) -> None:
    """`/etc/nccl.conf` of the process's own root counts, below its environment."""
    place = node.machine.root / str(node.rank(0, {"NCCL_ALGO": "Ring"})) / "root/etc"
    place.mkdir(parents=True)
    (place / "nccl.conf").write_text(
        "# ours\nNCCL_ALGO=rubbish\nNCCL_P2P_DISABLE=1\nNCCL_TIMEOUT=1\n"
    )
    assert node.problems() == {
        ("0", "NCCL_P2P_DISABLE", "disabled"): 1,
        ("0", "NCCL_TIMEOUT", "unread"): 1,
    }


def test_configuration_file_that_cannot_be_read(node: Node) -> None:
    """A fault says at each collection that a part of the settings is unknown, until it can be read;
    the environment is told.
    """
    place = node.machine.root / str(node.rank(0, {"NCCL_P2P_DISABLE": "1"})) / "root/etc/nccl.conf"
    place.mkdir(parents=True)  # a directory: EISDIR
    for _ in range(2):
        result = node.collect()
        assert reasons(result) == {"process 100": Reason.IO_ERROR}
        assert of_job(result, "environment_problems") == {("0", "NCCL_P2P_DISABLE", "disabled"): 1}
    place.rmdir()
    assert node.collect().faults == ()


def test_settings_that_cannot_be_read_are_not_compared(node: Node) -> None:
    """A rank whose `/etc/nccl.conf` cannot be read may have what the others have there."""
    for number in range(3):
        place = node.machine.root / str(node.rank(number)) / "root/etc"
        place.mkdir(parents=True)
        (place / "nccl.conf").write_text("NCCL_ALGO=Ring\n")
    alike = of_job(node.collect(), "setting_fingerprint")
    place = node.machine.root / str(node.rank(3)) / "root/etc/nccl.conf"
    place.mkdir(parents=True)
    result = node.collect()
    assert reasons(result) == {"process 103": Reason.IO_ERROR}
    assert of_job(result, "environment_problems") == {}
    assert of_job(result, "setting_fingerprint") == {}
    place.rmdir()
    place.write_text("NCCL_ALGO=Ring\n")
    assert of_job(node.collect(), "setting_fingerprint") == alike != {}


def test_process_that_hangs(node: Node) -> None:
    """What was read of a process before it hung goes on being told."""
    node.rank(0, {"NCCL_P2P_DISABLE": "1"})
    before = node.problems()
    node.hung["process 100"] = Reason.STUCK
    assert node.problems() == before != {}


def test_vanishing_process(node: Node) -> None:
    """A rank that ends between the table's look and the collector's is no fault, and nothing is
    lost of the others.
    """
    node.interfaces(lo="up", eth0="up")
    for number in range(2):
        node.rank(number, {"NCCL_SOCKET_IFNAME": "eth9"})
    looks: list[str] = []

    def entering(part: str) -> None:
        looks.append(part)
        if part == "process 100" and looks.count(part) == 2:  # the first is the table's
            shutil.rmtree(node.machine.root / "100")

    node.context.entering = entering
    result = node.collect()
    assert looks.count("process 100") >= 2
    assert result.faults == ()
    assert of_job(result, "environment_problems") == {("1", "NCCL_SOCKET_IFNAME", "absent"): 1}


def test_huge_and_odd_environments(node: Node) -> None:
    """2 MiB of environment, and names that are no text, hide nothing of what is allowed, and
    nothing else comes out (fault 22).
    """
    odd = b"\xff\xfe=1\0NCCL_\xff\xfe=1\0=\0\0NCCL_ALGO\0"
    data = (
        odd
        + environ({**RUN, "RANK": "0", "NCCL_P2P_DISABLE": "1", "AWS_SECRET": "hush"})
        + b"X="
        + b"x" * (2 << 20)
    )
    node.machine.process(100, data)
    result = node.collect()
    assert result.faults == ()
    assert of_job(result, "environment_problems") == {("0", "NCCL_P2P_DISABLE", "disabled"): 1}
    assert not [sample for sample in result.samples if "hush" in str(sample.labels)]


def test_many_processes_with_many_variables(node: Node) -> None:
    """200 ranks with 300 variables each are told in a bounded number of series, and cost a bounded
    time from the second look on.
    """
    wrong = {f"{name}Q": "x" for name in sorted(known_names().known)[:100]}
    wrong |= {f"NCCL_{'ABCDEFGHIJ'[index % 10]}{index}": "1" for index in range(MAX_NAMES - 100)}
    environment = {
        **wrong,
        **{f"OTHER_{index}": "x" for index in range(40)},
        "WORLD_SIZE": "200",
    }
    for number in range(200):
        node.rank(number, environment, pid=1000 + number)
    node.rank(150, environment, pid=1200)
    result = node.collect()
    assert of_job(result, "ranks") == {(): 200}
    assert of_job(result, "lowest_rank") == {(): 0}
    # The rank that is used twice, and the first of the others.
    twice = {(str(rank),): 1 for rank in range(63)} | {("150",): 2}
    assert of_job(result, "processes") == twice
    problems = sorted({misnomer(name) or ("", "") for name in wrong})
    first = {("0", *problem): 201 for problem in problems[:64]}
    assert len(problems) > len(first)
    assert of_job(result, "environment_problems").keys() == first.keys()
    assert len(result.samples) < 200
    gc.collect()  # what earlier tests have left is searched before, not meanwhile
    started = time.process_time()
    node.collect()
    assert time.process_time() - started < 0.25


def test_runs_left_out(tmp_path: Path) -> None:
    """Of more runs than are shown the oldest are, and how many are not is told."""
    node = Node(tmp_path)
    for number in range(19):
        node.rank(0, {"MASTER_PORT": str(29500 + number)}, pid=100 + number)
    told = [(sample.metric.name, sample.value) for sample in node.collect().samples]
    ports = {value for name, value in told if name == "dshealthd_job_master_port"}
    assert ports == {*range(29500, 29516)}
    assert ("dshealthd_job_runs_left_out", 3) in told


@pytest.fixture
def sweep() -> Callable[[], CollectionResult]:
    """Return a function that collects on this machine."""
    return Bench("job_environment").collect


HOLD = "print(flush=True); input()"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts a process of the job, and returns it once it has said so."""
    with ExitStack() as stack:

        def started(*command: str, says: int = 1, **variables: str) -> subprocess.Popen[bytes]:
            clean = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("NCCL_", "CUDA_", "TORCH", "SLURM"))
            }
            environment = {**clean, "SLURM_JOB_ID": str(os.getpid()), **variables}
            child = stack.enter_context(
                subprocess.Popen(
                    (sys.executable, *command), stdin=-1, stdout=-1, stderr=-3, env=environment
                )
            )
            stack.callback(child.terminate)
            assert child.stdout is not None
            assert all(child.stdout.readline() for _ in range(says))
            return child

        yield started


def test_real_processes(
    sweep: Callable[[], CollectionResult], start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Real ranks with faults in their environments are told by the real `/proc` and `/sys`, and
    gone when they have ended.
    """
    ranks = [
        start("-c", HOLD, **RUN | variables)
        for variables in (
            {"RANK": "0"},
            {"RANK": "1", "NCCL_SOCKET_IFNAME": "nosuch0", "NCCL_P2P_DISABLE": "1"},
            {"RANK": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_TIMEOUT": "1"},
            {"RANK": "2", "WORLD_SIZE": "3"},
        )
    ]
    result = sweep()
    assert of_job(result, "processes", JOB) == {("0",): 1, ("1",): 2, ("2",): 1}
    assert of_job(result, "environment_problems", JOB) == {
        ("1", "NCCL_SOCKET_IFNAME", "absent"): 1,
        ("1", "NCCL_SOCKET_IFNAME", "loopback"): 1,
        ("1", "NCCL_P2P_DISABLE", "disabled"): 1,
        ("1", "NCCL_TIMEOUT", "unread"): 1,
    }
    kin = [
        labels for labels in of_job(result, "rendezvous_kin_info", JOB) if labels[0] == "WORLD_SIZE"
    ]
    assert len(kin) == 1, "both runs differ in WORLD_SIZE alone, so that they have one kin"
    for rank in ranks:
        rank.communicate(timeout=60)
    assert of_job(sweep(), "ranks", JOB) == {}


def test_real_terminal(sweep: Callable[[], CollectionResult], tmp_path: Path) -> None:
    """A real process that a session with a terminal starts, as `srun --pty` does."""
    setsid = shutil.which("setsid")
    if setsid is None:
        pytest.skip("takes setsid of util-linux")
    own, theirs = os.openpty()
    variables = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": "0", "SLURM_JOB_GPUS": "0,1"}
    program = f"open({str(tmp_path / 'here')!r}, 'w').close(); {HOLD}"
    with subprocess.Popen(
        (setsid, "--ctty", sys.executable, "-c", program),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={"PATH": os.environ["PATH"], **variables},
    ) as process:
        try:
            until((tmp_path / "here").exists)
            assert of_job(sweep(), "held_gpus", JOB) == {("true",): 2}
        finally:
            process.kill()
            os.close(own)
            os.close(theirs)


def test_real_orphan(
    sweep: Callable[[], CollectionResult], start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """A real rank whose launcher is killed is left over; whoever takes it in."""
    program = (
        f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}], "
        "env={**os.environ, 'RANK': '0'})"
    )
    launcher = start("-c", program, **RUN)
    assert of_job(sweep(), "orphaned_ranks", JOB) == {(): 0}
    launcher.kill()
    launcher.wait(timeout=60)
    assert of_job(sweep(), "orphaned_ranks", JOB) == {(): 1}


def test_real_torchrun(
    sweep: Callable[[], CollectionResult], start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """What torchrun really starts is one run of two ranks, and torchrun itself is none of them."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("takes torch")
    program = "import os, sys; os.write(1, b'here\\n'); sys.stdin.read()"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python")
    launcher = start(*torchrun, sys.executable, "-c", program, says=2, OMP_NUM_THREADS="1")
    result = sweep()
    launcher.communicate(timeout=60)
    assert of_job(result, "run_info", JOB) == {("torchrun",): 1}
    assert of_job(result, "processes", JOB) == {("0",): 1, ("1",): 1}
    assert of_job(result, "world_size", JOB) == {(): 2}
    assert of_job(result, "orphaned_ranks", JOB) == {(): 0}


def test_gpus_of_two_models_need_an_order(node: Node) -> None:
    """Where GPUs are not alike, a rank that does not ask for the order of the bus is told of."""
    node.rank(0)
    node.rank(1, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    node.gpus(2, "0x2330", "0x2330")
    assert node.problems() == {}
    shutil.rmtree(node.root / "sys/bus/pci/devices")
    node.gpus(3, "0x2330", "0x2330", "0x20b2")
    assert node.problems() == {("0", "CUDA_DEVICE_ORDER", "unordered"): 1}
