"""What a lower layer, another process or a native library says explains what a program reports."""

from __future__ import annotations

import pytest

from tests.explain.explaining import explained

STEP = "2026-08-03 19:40:50 step 9 | loss 2"
BUSY = "2026-08-03 19:40:51 [rank2]: RuntimeError: the device is busy or out of service"
FULL = "[rank2]: OSError: [Errno 28] No space left on device: '/a'"
ENDED = "srun: error: n-3: task 2: Exited with exit code 1"
LICENSE = "Aug  3 19:{}:52 {} gridd[1602]: Failed to get a license from 10.0.0.9"
CAUGHT = (
    "[rank{0}]:[E803 19:40:50.1 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600{0}00 milliseconds before timing out."
)
LOST = (
    "[rank0]: torch.distributed.DistBackendError: NCCL error in: a.cpp:1, remote process exited or "
    "there was a network error, NCCL version 2.26.2"
)


@pytest.mark.parametrize(
    ("error", "service", "is_reason"),
    [
        (BUSY, ("39", "n-3"), True),
        (BUSY, ("39", "n-4"), False),  # another node
        (BUSY, ("20", "n-3"), False),  # long before
        (BUSY, ("55", "n-3"), False),  # after it
        (FULL, ("39", "n-3"), False),  # says why itself
    ],
)
def test_a_service_of_the_node_explains_what_a_program_could_not_do(
    error: str, service: tuple[str, str], *, is_reason: bool
) -> None:
    """Shortly before, on the node of the rank, which is still the one that failed."""
    lines = (STEP, error, ENDED, STEP.replace("step 9", "end"), LICENSE.format(*service))
    finding = explained(*lines)
    assert finding.statement.startswith("Failed to get a license") == is_reason
    assert (finding.outcome, finding.ranks, finding.host) == ("found", (2,), "n-3")


@pytest.mark.parametrize(("killed", "is_reason"), [("40213", True), ("40214", False)])
def test_a_line_of_the_kernel_with_the_process_explains_its_end(
    killed: str, *, is_reason: bool
) -> None:
    """Whatever the program thinks of it."""
    finding = explained(
        "13: RuntimeError: DataLoader worker (pid 40213) is killed by signal: Bus error. It is "
        "possible that dataloader's workers are out of shared memory.",
        f"Jan 22 03:59:03 n-3 kernel: Memory failure: 0x3f8: Sending SIGBUS to pt_data:{killed} "
        "due to hardware memory corruption",
    )
    assert ("hardware memory corruption" in finding.statement) == is_reason


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        (["hcl.cpp:71(init): The condition failed. Invalid server type (4)",
          "[rank1]: RuntimeError: synStatus=20 [already acquired] Device acquire failed."],
         "Invalid server type"),
        (["[rank1]: RuntimeError: synStatus=20 [already acquired] Device acquire failed.",
          "hcl.cpp:71(init): The condition failed. Invalid server type (4)"],
         "RuntimeError: synStatus=20"),
        (["hcl.cpp:71(init): The condition failed. Invalid server type (4)",
          "hcl.cpp:99(open): The device cannot be opened (4)",
          "[rank1]: RuntimeError: synStatus=20 [already acquired] Device acquire failed."],
         "Invalid server type"),
        (["hcl.cpp:71(init): The condition failed. Invalid server type (4)",
          "[rank1]: ValueError: the tokenizer knows no word of that kind"],
         "ValueError: the tokenizer"),
    ],
)  # fmt: skip
def test_a_native_library_s_words_are_the_content_of_its_code(
    lines: list[str], quoted: str
) -> None:
    """Right before an exception that passes on what the library returned."""
    assert quoted in explained(STEP, *lines).statement


@pytest.mark.parametrize(
    ("who", "says_why"),
    [
        ("n-2:63:63 [3] init.cc:7 NCCL INFO comm 0x1 rank 3 nranks 8 cudaDev 3", True),
        ("n-2:63:63 NCCL INFO Bootstrap", False),
    ],
)
def test_a_rank_that_lost_nobody_says_why_it_was_lost(who: str, *, says_why: bool) -> None:
    """Its words may stand behind those of the rank that lost it; of nobody known they may not."""
    why = "n-2:63:70 [3] alloc.h:178 NCCL WARN Failed to register 4096 bytes"
    finding = explained(who, LOST, why)
    assert finding.outcome == ("found" if says_why else "undecided")


READS = "[rank3]: WARNING: timeout of store-2 while reading shard 7, try {}"


@pytest.mark.parametrize(
    ("form", "tries", "after", "is_reason"),
    [
        (READS, 3, (), True),
        ("[rank3]: WARNING: shard 7 made no progress for {}0 s", 3, (), True),
        ("[rank3]: store-2 stalled, no bytes for {}0 s", 3, (), True),
        ("[rank3]: WARNING: shard 7 is not cached, {}0 s", 3, (), False),
        (READS, 2, (), False),
        (READS, 3, (STEP,), False),
        (READS.replace("rank3", "rank2"), 3, (), False),  # which waits
        (READS.replace("timeout", "retrying after a timeout"), 3, (), False),
        ("[rank3]: WARNING: a worker process died, again {}", 3, (), False),
    ],
)
def test_what_a_rank_said_over_and_over_held_it(
    form: str, tries: int, after: tuple[str, ...], *, is_reason: bool
) -> None:
    """It is what the others waited for; not if a step was made after it, or if it was dealt with,
    or of another process.
    """
    reads = [form.format(number) for number in range(tries)]
    hung = [CAUGHT.format(rank) for rank in range(3)]
    ends = [line.replace("Watchdog", "what(): Watchdog") for line in hung]
    late = "2026-08-03 19:50:51 [rank3]: still here"
    finding = explained("WORLD_SIZE=4", STEP, *reads, *after, *hung, *ends, late)
    assert finding.ranks == (3,)
    assert (finding.slug == "child-failed") == is_reason


def test_a_hang_without_a_culprit_is_undecided() -> None:
    """All waited alike: what for, these lines do not say; a rank that is missing is found."""
    names = "WORLD_SIZE=4"
    hung = explained(names, STEP, *(CAUGHT.format(rank) for rank in range(4)))
    assert (hung.outcome, hung.slug, hung.ranks) == ("undecided", "nccl-timeout", ())
    assert hung.proof


@pytest.mark.parametrize(("number", "outcome"), [(15, "undecided"), (2, "found"), (1, "found")])
def test_who_sent_a_signal_is_known_of_a_keyboard_and_a_terminal(number: int, outcome: str) -> None:
    """SIGTERM may come from anybody."""
    told = f"W0408 api.py:719] Received {number} death signal, shutting down workers"
    assert explained(STEP, told).outcome == outcome


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (["srun: error: n2: task 1: Exited with exit code 1"], "srun: task 1 on n2"),
        (["[gang] worker 3 on n2 exited with code 2"], "nothing says what happened"),
        (["srun: error: n2: task 1: Exited with exit code 143"], "the job was told to end"),
        (["n2: a.sh exited with code 2", "n1: step 9 | loss 2"], "the job was told to end"),
        ([], "the job was told to end"),
    ],
)
def test_a_signal_after_an_end_follows_from_it(ends: list[str], says: str) -> None:
    """A launcher sends it to the rest; not if what ended first had that signal, too, or if the
    job went on.
    """
    told = "n1: Received 15 death signal, shutting down workers"
    finding = explained("n1: step 8 | loss 2", *ends, told)
    assert finding.outcome == "undecided"
    assert finding.statement.startswith(says)


@pytest.mark.parametrize(
    ("rank", "begin", "who", "is_content"),
    [
        ("[rank2]: ", 0, "", False),
        ("[rank2]: ", 0, "[rank2]: ", True),
        ("[rank2]: ", 0, "(Engine pid=7) ", True),
        ("", 0, "", True),  # of nobody known
        ("[rank2]: ", 2, "", True),  # without its stack
    ],
)
def test_what_a_launcher_says_after_a_stack_is_not_its_content(
    rank: str, begin: int, who: str, *, is_content: bool
) -> None:
    """However little the exception says; what a server says may only be printed later."""
    stack = ("Traceback (most recent call last):", '  File "a.py", line 3, in f', "KeyError: 'x'")
    lines = [f"{rank}{line}" for line in stack[begin:]]
    finding = explained("step 8 | loss 2", *lines, f"{who}the gang failed, attempt 1 of 1")
    assert ("the gang" in finding.statement) == is_content


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("error: job 7 terminated due to quota exhaustion of group ml", "found"),
        ("error: job 7 terminated due to a quota failure", "found"),
        ("error: job 7 terminated due to signal 15", "undecided"),
        ("error: job 7 terminated due to one or more job failures", "undecided"),
        ("error: job 7 terminated, possibly due to quota exhaustion", "undecided"),
    ],
)
def test_an_end_that_says_why_is_a_cause(line: str, outcome: str) -> None:
    """That it ended is none."""
    assert explained(STEP, line).outcome == outcome


def test_an_exception_that_speaks_of_others_comes_after_one_that_says_why() -> None:
    """Although it was printed first."""
    finding = explained(
        STEP,
        "[rank0]: RuntimeError: the collective was aborted by a peer",
        "[rank2]: ValueError: corrupted record at 6720",
    )
    assert finding.statement.startswith("ValueError")


def test_what_failed_first_ended_first() -> None:
    """Those that waited for it end after their time-out."""
    finding = explained(
        STEP,
        "slurmstepd: error: pyxis: failed to create user namespace: Permission denied",
        "srun: error: c0203: tasks 2-3: Exited with exit code 1",
        "[rank0]: torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for "
        "clients. 2/4 clients joined.",
        "srun: error: c0201: tasks 0-1: Exited with exit code 1",
    )
    assert (finding.ranks, finding.host) == ((2, 3), "c0203")
    assert "user namespace" in finding.statement


@pytest.mark.parametrize(
    ("others", "host"),
    [
        (["n-1: task 0: Exited with exit code 143"], "n-3"),
        (["n-1: task 0: Killed", "n-2: task 1: Killed"], "n-3"),
        (["n-1: task 0: Exited with exit code 1"], None),
    ],
)
def test_what_alone_ended_by_itself_is_what_failed(others: list[str], host: str | None) -> None:
    """All others were ended by a signal, of their launcher or the scheduler."""
    ends = [ENDED, *(f"srun: error: {end}" for end in others)]
    for said in ("ValueError: no such shard", "nvml error: driver/library version mismatch"):
        finding = explained("step 8 | loss 2", said, *ends)
        assert (finding.host, finding.ranks) == (host, (2,) if host else ())


@pytest.mark.parametrize(("minute", "is_reason"), [("16", True), ("47", False)])
def test_a_driver_s_reset_explains_a_code(minute: str, *, is_reason: bool) -> None:
    """Of a call that only names it, if it was before; the only host is the kernel's, too."""
    finding = explained(
        "2026-09-22 10:16:30 [rank2]: RuntimeError: backend failed with error: 20 (A_DEVICE_LOST)",
        "2026-09-22 10:16:33 srun: error: n-3: task 2: Exited with exit code 1",
        "$ dmesg -T",
        f"[Tue Sep 22 10:{minute}:29 2026] xe 0000:83:00.0: [drm] GT0: Engine reset: engine=ccs",
    )
    assert ("Engine reset" in finding.statement) == is_reason
    assert finding.ranks == (2,)
