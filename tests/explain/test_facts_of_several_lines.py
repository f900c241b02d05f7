"""What no single line says: fields and ranks joined over lines, order of causes, undecided logs."""

from __future__ import annotations

import pytest

from dshealthd.explain import command
from tests.explain.explaining import explained, explained_files

KERNEL = "Jan  5 10:00:00 gpu-7 kernel: "
CAUGHT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE, "
    "NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600060 milliseconds before timing out."
)
LOST = "gpu-1:77:9{0} [{0}] NCCL WARN socketProgress: Connection closed by remote peer gpu-2<51234>"


def test_an_oom_kill_is_one_event_over_two_lines_with_the_rank_of_its_pid() -> None:
    """The kernel names the process on one line and its memory on another, torchrun its rank."""
    finding = explained(
        KERNEL + "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0-1,"
        "oom_memcg=/job,task_memcg=/job,task=python,pid=4711,uid=1000",
        KERNEL + "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB, "
        "anon-rss:8123kB, file-rss:0kB",
        "E0105 10:00:02.000000 900 torch/distributed/elastic/multiprocessing/api.py:874] failed "
        "(exitcode: -9) local_rank: 2 (pid: 4711) of binary: /usr/bin/python3",
    )
    assert finding.slug == "host-memory-pressure"
    assert "process 4711 (python)" in finding.statement
    assert "8123kB" in finding.statement
    assert (finding.ranks, finding.host) == ((2,), "gpu-7")


def test_slurm_names_host_and_tasks_after_the_kill() -> None:
    """Slurmstepd counts the kills, srun says where and which tasks."""
    finding = explained(
        "slurmstepd: error: Detected 3 oom_kill events in StepId=4711.0. Some of the step tasks "
        "have been OOM Killed.",
        "srun: error: gpu-12: tasks 1-2,5: Out Of Memory",
    )
    assert (finding.slug, finding.ranks) == ("host-memory-pressure", (1, 2, 5))
    assert finding.host == "gpu-12"


def test_an_assertion_in_a_kernel_has_the_rank_of_the_exception_after_it() -> None:
    """CUDA prints the assertion without a rank, torch the error with one."""
    finding = explained(
        "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward: block: [0,0,0], thread: "
        "[3,0,0] Assertion `t >= 0 && t < n_classes` failed.",
        "[rank5]: torch.AcceleratorError: CUDA error: device-side assert triggered",
    )
    assert finding.slug == "cuda-fault"
    assert "t >= 0 && t < n_classes" in finding.statement
    assert finding.ranks == (5,)


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("RuntimeError: Triton Error [CUDA]: misaligned address [Rank 3]", (3,)),
        (
            ("what(): [PG ID 0 PG GUID 0(default_pg) Rank 6] Process group watchdog thread "
            "terminated with exception: CUDA error: an illegal memory access was encountered"),
            (6,),
        ),
        ("ERROR:root:Unexpected result nan on rank 3 at iteration #3 invocation #2", (3,)),
        ("AssertionError: Rank 4: found NaN in local forward loss calculation. Device: 4", (4,)),
        (("gpu1:1:2 [0] NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device "
          "1a"), (0, 1)),
        ("(VllmWorker rank=2 pid=77) RuntimeError: CUDA error: misaligned address", (2,)),
        ("srun: error: gpu-1: task 3: Segmentation fault (core dumped)", (3,)),
        (
            ("\x1b[36m(PolicyWorker[rank=8] pid=77, ip=10.0.0.5)\x1b[0m RuntimeError: CUDA error: "
            "misaligned address"),
            (8,),
        ),
        (
            ("[2026-01-05 10:00:00] CRITICAL [train.utils:98, rank=6] Uncaught OutOfMemoryError: "
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 6 has a total capacity of 79.1 "
            "GiB "
            "of which 1.2 GiB is free."),
            (6,),
        ),
    ],
)  # fmt: skip
def test_a_rank_is_read_in_each_form_in_which_libraries_write_it(
    line: str, ranks: tuple[int, ...]
) -> None:
    """In the text of the line, in the actor of a framework, as a task of srun."""
    assert explained(line).ranks == ranks


def test_a_local_rank_on_one_node_is_the_rank() -> None:
    """Without another node, torchrun's local rank is the rank; after SIGABRT it is no culprit."""
    text = (
        "E0801 13:23:20.000000 32974 torch/distributed/elastic/multiprocessing/api.py:874] failed "
        "(exitcode: {}) local_rank: 3 (pid: 33054) of binary: /opt/venv/bin/python3"
    )
    assert explained(text.format(1)).ranks == (3,)
    assert explained(text.format(-6)).ranks == ()


def test_an_illegal_access_of_days_ago_does_not_acquit_a_broken_gpu() -> None:
    """A kernel log holds weeks and all programs: nothing of a job says which time matters."""
    access = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python3, Ch 00000008, MMU Fault"
    broken = "NVRM: Xid (PCI:0000:dc:00): 94, pid='<unknown>', name=<unknown>, Contained: SM (0x1)"
    finding = explained(KERNEL + access, KERNEL.replace("Jan  5", "Jan  9") + broken)
    assert (finding.slug, finding.device) == ("nccl-all-reduce-failed", "GPU 0000:dc:00")
    assert finding.against[0].endswith("explains less")


@pytest.mark.parametrize(
    "lines",
    [
        [
            ("[rank6]:[W729 10:15:17.529361055 TCPStore.cpp:125] [c10d] recvValue failed on "
            "SocketImpl(fd=76, addr=[localhost]:60950, remote=[localhost]:29500): Connection "
            "reset by peer")
        ],
        ["gpu1:77:99 [0] foo.cc:12 NCCL WARN Call to bar failed: Input/output error"],
        ["subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1."],
    ],
)  # fmt: skip
def test_consequences_alone_are_undecided_and_say_what_would_decide(lines: list[str]) -> None:
    """They are a failure's, so exit status 0 would be wrong; the log lacks its cause."""
    finding = explained(*lines)
    assert finding.outcome == "undecided"
    assert command.EXIT[finding.outcome] == command.EXIT_UNDECIDED
    assert finding.missing


PREFIXES = [
    "job.node-1 [stderr] ",
    "worker-0  | ",
    "# ",
    "    > ",
    "   ",
    "trainer/0 ",
    "trainer-0 pytorch ",
    "2025-01-01T00:00:00.123456789Z stderr F job.node-1 [stderr] ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_watchdog_is_read_behind_any_prefix(prefix: str) -> None:
    """Collectors, quotations and indentation, and prefixes of prefixes."""
    lines = []
    for rank in (0, 2, 3):
        head = f"[rank{rank}]:[E1122 04:44:58.49958410 ProcessGroupNCCL.cpp:616] "
        lines += [
            f"{head}[Rank {rank}] " + CAUGHT.format(7),
            (
                f"{head}[PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by "
                "watchdog at work "
                "sequence id: 7 PG status: last enqueued work: 7, last completed work: 6"
            ),
        ]
    finding = explained(*(prefix + line for line in lines))
    assert finding.slug == "nccl-timeout"
    assert {rank for verdict in finding.verdicts for rank in verdict.waiting} == {0, 2, 3}


def test_lines_that_a_terminal_wrapped_are_whole() -> None:
    """Every line of a record but the last has the width of the terminal, often within a word."""
    width, lines = 100, []
    for rank in range(4):
        record = (
            f"[rank{rank}]:[E430 05:09:48.013703086 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID "
            f"0(default_pg) Rank {rank}] Received a dump signal due to a collective timeout "
            "from this local rank and we will try our best to dump the debug info. Last enqueued "
            "NCCL work: 9387, last completed NCCL work: 9386.This is most likely caused by "
            "incorrect usages."
        )
        lines += [record[start : start + width] for start in range(0, len(record), width)]
    finding = explained(*lines)
    assert finding.slug == "nccl-timeout"
    assert "#9387" in finding.statement


def test_a_record_that_a_logger_wrapped_is_whole() -> None:
    """The part after `timeout:` and the counts are on lines of their own, with the same prefix."""
    lines = []
    for rank in (8, 9):
        head = f"node-1 [stderr] [rank{rank}]:[E909 09:55:29.314629539 ProcessGroupNCCL.cpp:607] "
        first, second = CAUGHT.format(2070).split("WorkNCCL", 1)
        lines += [
            f"{head}[Rank {rank}] {first}",
            f"node-1 [stderr] WorkNCCL{second}",
            (
                f"{head}[PG 0 (default_pg) Rank {rank}] Exception (either an error or timeout) "
                "detected"
            ),
            (
                "node-1 [stderr] by watchdog at work: 2070, last enqueued NCCL work: 2070, last "
                "completed NCCL work: 2069."
            ),
        ]
    finding = explained(*lines)
    assert finding.slug == "nccl-timeout"
    assert "ALLREDUCE #2070 of the default_pg" in finding.statement


def test_a_lost_peer_comes_before_the_time_outs_of_those_that_waited_for_it() -> None:
    """A rank was killed and two ranks noticed at once; the rest timed out ten minutes later."""
    timeouts = [f"[rank{rank}]:[E ProcessGroupNCCL.cpp:563] [Rank {rank}] " + CAUGHT.format(5)
                for rank in (2, 3)]  # fmt: skip
    killed = explained("Killed", LOST.format(0), LOST.format(1), *timeouts)
    assert killed.slug == "child-failed"
    assert "SIGKILL" in killed.statement
    lost = explained(LOST.format(0), LOST.format(1), *timeouts)
    assert lost.slug == "nccl-remote-error"
    watchdogs_first = explained(*timeouts, LOST.format(0), "Killed")
    assert watchdogs_first.slug == "nccl-timeout"


def test_an_empty_wrapper_does_not_hide_what_nccl_said() -> None:
    """A parent's exception says that a child failed, not why."""
    finding = explained(
        TRUNCATED.format(1, 1),
        "Traceback (most recent call last):",
        '  File "/srv/train.py", line 9, in <module>',
        "torch.multiprocessing.spawn.ProcessRaisedException: ",
    )
    assert finding.slug == "nccl-environment"


def test_a_traceback_that_the_run_survived_is_no_cause() -> None:
    """A run that says that it finished did."""
    traceback = (
        "Traceback (most recent call last):",
        '  File "/srv/data.py", line 9, in load',
        "ValueError: bad image header",
    )
    finished = explained("step 1 | loss 2.1", *traceback, "step 2 | loss 2.0", "Training completed")
    assert finished.outcome == "nothing"
    assert explained("step 1 | loss 2.1", *traceback).slug == "child-failed"


def test_a_loss_scale_at_its_floor_for_several_steps_is_a_collapse() -> None:
    """One skipped step at the floor is usual; step after step nothing is learned."""
    line = (
        "[2021-01-26 22:04:15,191] [INFO] [Rank 0] Overflow detected. Skipping step. "
        "Attempted loss scale: 1.0, reducing to 1.0"
    )
    assert explained(line).outcome == "nothing"
    assert explained(*[line] * 4).slug == "loss-scale-collapse"


def test_gradients_that_stay_nan_are_a_cause_although_the_loss_is_finite() -> None:
    """The loss printed beside it is 0.0: it is not the line that clears it."""
    bad = "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.1}"
    good = "{'loss': 1.9, 'grad_norm': 0.7, 'learning_rate': 1e-05, 'epoch': 0.2}"
    assert explained(*[bad] * 5).slug == "loss-nan"
    assert explained(*[bad] * 5, good).outcome == "nothing"


def test_the_first_of_three_lines_names_the_gpu_that_is_off_the_bus() -> None:
    """The driver's message is split over lines, and its address is in the first one alone."""
    finding = explained(
        "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",
        "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "               NVRM: fallen off the bus and is not responding to commands.",
        "[ 1843.439662] NVRM: The NVIDIA probe routine failed for 1 device(s).",
    )
    assert (finding.slug, finding.device) == ("gpu-lost", "GPU 0000:b3:00.0")
    assert "GPU 0000:b3:00.0 fell off the bus" in finding.statement


@pytest.mark.parametrize(
    ("line", "slug", "told"),
    [
        (
            (
                "gpu1:4711 NCCL DIAG [INFO] Xid 79 detected 1 time on host gpu-7. For the "
                "response, see"
            ),
            "gpu-lost",
            "a GPU on gpu-7 fell off the bus",
        ),
        (
            (
                "gpu1:4711 NCCL DIAG [INFO] Xid 94 detected 2 times on host gpu-7. For the "
                "response, see"
            ),
            "nccl-all-reduce-failed",
            "a GPU on gpu-7 has an uncorrectable memory error: Xid 94",
        ),
        (
            (
                "gpu1:4711 NCCL DIAG [INFO] SXid 22013 detected 1 time (NVSwitch driver reported "
                "Fatal, link(s) {44}) on host gpu-7. See the"
            ),
            "bad-link",
            "a link of an NVSwitch on gpu-7 failed: fatal SXid 22013",
        ),
    ],
)
def test_nccl_s_own_diagnostics_name_the_host(line: str, slug: str, told: str) -> None:
    """From release 2.31, rank 0 prints what all nodes of the job found."""
    finding = explained(line)
    assert (finding.slug, finding.statement, finding.host) == (slug, told, "gpu-7")


FRAMES = (
    "Traceback (most recent call last):",
    '  File "/srv/train.py", line 31, in <module>',
    "    main()",
)


@pytest.mark.parametrize("lines", [FRAMES, FRAMES[1:]])
def test_a_traceback_that_was_cut_before_its_exception_is_no_healthy_end(
    lines: tuple[str, ...],
) -> None:
    """Its head may be cut off too; what the log lacks is its next line."""
    finding = explained("step 1 | loss 2.5", *lines)
    assert (finding.outcome, finding.ranks) == ("undecided", ())
    assert "the line that ends the traceback" in str(finding.step)
    assert "job.out:2" in finding.missing[0]
    assert explained(*lines, "step 2 | loss 2.4").outcome == "nothing"
    assert explained(*lines, "ValueError: 3").outcome != "nothing"


def test_a_watchdog_that_names_no_operation_is_undecided() -> None:
    """A collective failed, and the line does not tell how; the same counters when all is well do
    not.
    """
    state = "last enqueued NCCL work: 8, last completed NCCL work: 7."
    finding = explained(
        "[rank1]:[E816 01:45:40.2 ProcessGroupNCCL.cpp:1664] [PG ID 0 PG GUID 0(default_pg) "
        "Rank 1] "
        f"Exception (either an error or timeout) detected by watchdog at work: 8, {state}"
    )
    assert (finding.outcome, finding.ranks) == ("undecided", ())
    assert "the logs of all ranks" in str(finding.step)
    assert (
        explained(
            "I0816 01:45:40.200000 77 ProcessGroupNCCL.cpp:1664] [PG ID 0 PG GUID 0(default_pg) "
            f"Rank 1] NCCL Work update periodic: {state}"
        ).outcome
        == "nothing"
    )


SUMMARY = "Root Cause (first observed failure):\n[0]:\n  time      : 2026-01-05_10:00:00\n"


@pytest.mark.parametrize(
    ("lines", "host"),
    [
        ((SUMMARY + "  host : gpu-7.lan\n  rank : 3 (local_rank: 3)\n"
          "  exitcode : 1 (pid: 7)\n").split("\n"), "gpu-7.lan"),
        ((SUMMARY + "  host : localhost\n  rank : 3 (local_rank: 3)\n"
          "  exitcode : 1 (pid: 7)\n").split("\n"), None),
        (["srun: error: gpu-7: task 3: Exited with exit code 1"], "gpu-7"),
        (["srun: error: gpu-8: task 5: Exited with exit code 1"], None),
        (["srun: error: gpu-7: task 2: Exited with exit code 1",
          "srun: error: gpu-7: task 4: Exited with exit code 1"], None),
        (["gpu-7:4:5 [0] NCCL INFO Bootstrap : Using eth0", "gpu-7:5:6 [1] NCCL INFO x"], None),
        (["gpu-7:4:5 [0] NCCL INFO Bootstrap : Using eth0", "gpu-8:5:6 [0] NCCL INFO x"], None),
    ],
)  # fmt: skip
def test_the_host_is_that_which_a_launcher_names(lines: list[str], host: str | None) -> None:
    """For this very rank: a neighbor of it may be elsewhere, and so may be whose lines are here."""
    finding = explained(*lines, "[rank3]: RuntimeError: CUDA error: out of memory", *lines)
    assert (finding.ranks, finding.host) == ((3,), host)


NAN = (
    "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 11 at iteration #18015 "
    "invocation #2 (message='found NaN in local grad norm for bucket #4 in backward pass before "
    "data-parallel communication collective')"
)


def summary(host: str, *ranks: int, pid: int) -> tuple[str, ...]:
    """Return torchrun's summary of ranks of a host, whose processes begin at a pid."""
    lines = ["Failures:"]
    for number, rank in enumerate(ranks):
        if rank == ranks[-1]:
            lines.append("Root Cause (first observed failure):")
        lines += [
            f"[{number}]:",
            "  time      : 2026-05-27_03:13:33",
            f"  host      : {host}",
            f"  rank      : {rank} (local_rank: {rank % 8})",
            f"  exitcode  : 16 (pid: {pid + rank})",
        ]
    return (*lines, "=" * 60)


def test_a_summary_of_another_attempt_gives_no_host() -> None:
    """In the next attempt a rank is another process, maybe on another host."""
    first, second = summary("gpu-5", 9, 8, pid=100), summary("gpu-6", 11, 8, pid=200)
    assert explained(NAN, *first, *second).host is None
    assert explained(NAN, *second).host == "gpu-6"
    gone = "NVRM: Xid (PCI:0000:dc:00): 79, GPU has fallen off the bus."
    assert explained(gone, *second).ranks == ()  # whose GPU it is, nothing says
    assert explained(NAN, *summary("gpu-6", 9, 8, pid=100), *summary("gpu-6", 11, 10, pid=100)).host


def test_of_several_launchers_crashes_the_first_is_to_blame() -> None:
    """Others may have crashed as they lost it; so may one that failed in another way."""
    gone = "[rank0]: RuntimeError: NCCL error: remote process exited or there was a network error"
    other = "[rank2]: ValueError: a label"
    assert explained(gone, other, *summary("gpu-6", 3, pid=100)).ranks == (3,)
    crashes = [
        tuple(line.replace(": 16", ": -11").replace("13:33", at) for line in summary(*who, pid=100))
        for at, who in (("13:39", ("gpu-5", 9)), ("13:35", ("gpu-6", 3)))
    ]
    finding = explained_files({"a.log": crashes[0], "b.log": crashes[1]})
    assert (finding.ranks, finding.host) == ((3,), "gpu-6")


RERUN = "ERROR:megatron.core.rerun_state_machine:Rank 11, node {}, device 3, iteration #18015: {}!"
SPIKE = (
    "ERROR:megatron.core.rerun_state_machine:Unexpected result 91.2 on rank 11 at iteration "
    "#18015 invocation #1 (message='Spiky loss')"
)


@pytest.mark.parametrize("first", [NAN, SPIKE])
def test_megatron_s_second_result_says_whether_a_gpu_is_suspect(first: str) -> None:
    """Not the batch, where the same GPU computes another result; where another GPU does, it is
    right, and the one before is suspect, on whatever node that was.
    """
    again = RERUN.format("gpu-5", "Possible transient error!")
    finding = explained(first, again)
    assert finding.root is not None
    assert finding.root.pattern == "nccl-all-reduce-failed/result-differs"
    assert (finding.ranks, finding.host, finding.gpu) == ((11,), "gpu-5", 3)
    assert finding.excluded == ()  # an operation that is not deterministic does it, too
    reproduced = RERUN.format("gpu-5", "First rerun: unexpected result is reproducible (1 = 1)")
    for before in ((), (first, reproduced)):
        elsewhere = explained(*before, RERUN.format("gpu-6", "Possible persistent error!"))
        assert elsewhere.root is not None
        assert elsewhere.root.pattern == "nccl-all-reduce-failed/result-differs-elsewhere"
        assert (elsewhere.host, elsewhere.gpu, elsewhere.excluded) == (None, None, ())
        assert "that node, not gpu-6" in elsewhere.step


def test_a_result_that_another_gpu_confirms_is_the_program_s() -> None:
    """The loss is NaN on any GPU: batch or learning rate."""
    right = "Correct result (but possible Application error) (found NaN in local grad norm)"
    finding = explained(NAN, RERUN.format("gpu-6", right))
    assert finding.slug == "loss-nan"


TRUNCATED = (
    "{}: n{}:70:99 [5] bootstrap.cc:77 NCCL WARN Message truncated : received 1024 bytes instead "
    "of 256"
)


def test_who_reports_a_disagreement_need_not_differ() -> None:
    """Where nothing says who does, no host is named."""
    finding = explained(TRUNCATED.format(1, 1))
    assert finding.slug == "nccl-environment"
    assert (finding.host, finding.gpu, finding.pid) == (None, None, None)
