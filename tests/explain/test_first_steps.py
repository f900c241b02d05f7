"""First steps: each belongs to the pattern that was found, and is filled with its values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dshealthd.explain import command, patterns
from dshealthd.explain.group_verdicts import KINDS
from dshealthd.linux import pci
from tests.explain.explaining import explained

EVERY = patterns.load().every
VALUE = re.compile(r"\{(\w+)(?:\|[^{}]+)?\}")
OF_A_FINDING = {"rank", "host", "frame", "log"}
"""Values of a finding that any step may use."""


def test_texts_name_values_that_exist() -> None:
    """A text in braces is a group of the expression, or in a step a value of the finding."""
    for pattern in EVERY:
        groups = {re.sub(r"_\d$", "", name) for name in pattern.regex.groupindex}
        for text in pattern.says:
            assert set(VALUE.findall(text)) <= groups, text
        for step in pattern.step:
            assert set(VALUE.findall(step)) <= groups | OF_A_FINDING, step
            assert step.count("`") % 2 == 0, step


def test_every_cause_has_a_step() -> None:
    """No new pattern falls back to advice for another cause."""
    without = {
        f"{pattern.slug}/{pattern.name}"
        for pattern in EVERY
        if pattern.role in {"cause", "loss"}
        and not pattern.step
        # What a hang needs depends on who hung: the verdict has the step.
        and pattern.slug not in {"nccl-timeout", "gradient-sync-timeout"}
    }
    assert without == set()


def test_every_verdict_has_a_step_for_one_rank_and_for_several() -> None:
    """The last step of each kind needs no rank."""
    hang = patterns.load().hang
    assert set(hang) == set(KINDS)
    for kind, steps in hang.items():
        assert "{rank}" not in steps[-1], kind


def test_a_step_has_the_values_of_its_line() -> None:
    """Port, host, GPU, FILE:LINE and quota's path come from the line that was found."""
    port = explained(
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29511, useIpv6: false, code: -98, name: EADDRINUSE"
    )
    assert "sport = :29511" in port.step
    xid = explained(
        "May 18 03:11:09 gpu-7 kernel: NVRM: Xid (PCI:0000:dc:00): 94, pid=1, name=a, Contained ECC"
    )
    assert "drain gpu-7" in xid.step
    assert "-i 0000:dc:00" in xid.step
    quota = explained("OSError: [Errno 122] Disk quota exceeded: '/scratch/u/ckpt/step_10'")
    assert "/scratch/u/ckpt/step_10" in quota.step


def test_no_step_stops_a_process_or_resets_a_gpu_that_the_agent_holds() -> None:
    """py-spy stops what it reads unless told not to; a driver refuses to reset a GPU in use."""
    hang = (step for steps in patterns.load().hang.values() for step in steps)
    steps = [*hang, *(step for pattern in EVERY for step in pattern.step)]
    spies = [step for step in steps if "py-spy" in step]
    resets = [step for step in steps if "--gpu-reset" in step]
    assert spies
    assert resets
    assert all("py-spy dump --nonblocking" in step for step in spies)
    assert all(0 <= step.find(pci.RELEASE) < step.find("--gpu-reset") for step in resets)


def test_a_transfer_over_ethernet_is_not_looked_for_in_a_subnet() -> None:
    """NCCL prints GIDs only of RoCE, which has neither a subnet manager nor `ibtracert`."""
    line = "gpu1:7:9 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.7<4> with error 12"
    roce = explained(f"{line}, opcode 0 localGid ::ffff:10.3.4.1 remoteGids::ffff:10.3.4.2")
    assert "the address ::ffff:10.3.4.1 (`rdma statistic`" in roce.step
    assert "ibtracert" in explained(line).step


@pytest.mark.parametrize("path", ["/a$(reboot)", "/a;reboot", "/a`reboot`", "/a b", "/a'b|c"])
def test_what_a_user_wrote_does_not_become_a_command(path: str) -> None:
    """A path with characters that a shell interprets is left out of a step, which root may
    paste.
    """
    finding = explained(f'OSError: [Errno 116] Stale file handle: "{path}"')
    quoted = explained(f"OSError: [Errno 116] Stale file handle: '{path}'")
    for one in (finding, quoted):
        assert one.slug == "checkpoint-path"
        assert "reboot" not in one.step
        assert one.step


def test_no_step_is_printed_where_none_is_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An exception of the program's own has no step, rather than one of another cause."""
    log = tmp_path / "job.out"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "/srv/train.py", line 31, in main\n'
        "KeyError: 'labels'\n"
    )
    assert command.main([str(log)]) == command.EXIT_FOUND
    told = capsys.readouterr().out
    assert "FIRST STEP" not in told
    assert "KeyError: 'labels' at /srv/train.py:31" in told
    assert "ChildFailedError" not in told


SHARED_MEMORY = [
    (
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_47_99>: No space "
        "left on device (28)"
    ),
    "RuntimeError: unable to write to file </torch_47_99>: No space left on device (28)",
    "OSError: [Errno 28] No space left on device: '/dev/shm/sem.mp-x1'",
    (
        "gpu1:77:99 [0] misc/shmutils.cc:48 NCCL WARN Call to posix_fallocate failed : No space "
        "left on device"
    ),
    (
        "NCCL WARN Error: failed to extend /dev/shm/nccl-a to 9637892 bytes, error: No space left "
        "on device (28)"
    ),
    (
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a (size 9637888), "
        "error: No space left on device"
    ),
    (
        "It appears as if there is not enough space for /dev/shm/vader_segment.gpu1.1 (the "
        "shared-memory backing"
    ),
]


@pytest.mark.parametrize("line", SHARED_MEMORY)
def test_a_full_shared_memory_is_not_the_disk(line: str) -> None:
    """ENOSPC of a segment in /dev/shm: no checkpoint is to be deleted."""
    finding = explained(line)
    assert finding.slug == "shared-memory"
    assert "df -h /dev/shm" in finding.step
    assert "checkpoint" not in finding.step


def test_a_semaphore_without_space_may_be_shared_memory() -> None:
    """A semaphore of Python's multiprocessing is a file in /dev/shm, though its error has no
    path: the step compares that with the disks.
    """
    finding = explained(
        "Traceback (most recent call last):",
        '  File "/srv/train.py", line 9, in <module>',
        '  File "/usr/lib/python3.10/multiprocessing/synchronize.py", line 57, in __init__',
        "    sl = self._semlock = _multiprocessing.SemLock(",
        "OSError: [Errno 28] No space left on device",
    )
    assert finding.slug == "disk-full"
    assert "/dev/shm" in finding.step


def test_a_full_disk_is_still_the_disk() -> None:
    """ENOSPC elsewhere is the file system's, with its path in the step."""
    finding = explained("OSError: [Errno 28] No space left on device: '/ckpt/global_step10/a.pt'")
    assert finding.slug == "disk-full"
    assert "df -h /ckpt/global_step10/a.pt" in finding.step


def test_an_impossible_count_is_nobodys_progress() -> None:
    """Releases as 2.2 print an uninitialized number as last completed: no other rank was ahead."""
    rank = "[rank1]:[E ProcessGroupNCCL.cpp:"
    finding = explained(
        f"{rank}563] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
        "OpType=ALLREDUCE, NumelIn=1572864, NumelOut=1572864, Timeout(ms)=600000) ran for 600021 "
        "milliseconds before timing out.",
        f"{rank}1537] [PG 1 Rank 1] Timeout at NCCL work: 1, last enqueued NCCL work: 1, last "
        "completed NCCL work: 93459313471793.",
    )
    assert (finding.slug, finding.ranks) == ("nccl-timeout", ())
    assert "others had completed" not in finding.statement


def test_victims_of_a_dead_master_are_not_the_culprits() -> None:
    """Of many ranks none of which reaches the master, none is to blame; a single one may be."""
    text = (
        "[rank{}]: torch.distributed.DistNetworkError: The client socket has timed out after "
        "60000ms while trying to connect to (gpu-1, 29500)."
    )
    many = explained(*(text.format(rank) for rank in range(1, 8)))
    assert (many.slug, many.ranks) == ("rendezvous-unreachable", ())
    assert "ranks 1, 2, 3, 4, 5, 6, 7" in many.statement
    others = [f"[rank{rank}]: joined" for rank in range(8) if rank != 5]
    assert explained(*others, text.format(5)).ranks == (5,)
    lost = text.format(1), text.format(2)
    for joined, ranks in (((0, 3, 4), (1, 2)), ((0, 3), ())):  # besides rank 0
        assert explained(*(f"[rank{rank}]: joined" for rank in joined), *lost).ranks == ranks


def test_a_triton_kernel_that_failed_could_run() -> None:
    """An illegal access is a bug of the kernel: the GPU is not called unfit for it."""
    finding = explained(
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"
    )
    assert finding.slug == "cuda-fault"
    assert "cannot run" not in finding.statement


@pytest.mark.parametrize(
    ("path", "host", "step", "other"),
    [
        ("/d", "n-1", "`df /d` on n-1", "`df /d` on n-1"),
        ("/$(id)", "n-1", "", ""),
        ("/d", "a\nb", "", "`df /d` on its node"),
    ],
)
def test_each_value_of_a_step_must_be_harmless(path: str, host: str, step: str, other: str) -> None:
    """One that is does not vouch for another; other words may stand for one that is not."""
    values = {"path": path, "host": host}
    assert patterns.advised(("`df {path}` on {host}",), values) == step
    assert patterns.advised(("`df {path}` on {host|its node}",), values) == other
