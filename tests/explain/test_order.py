"""The order of causes: each rule of the table has a scene in which it decides, and one beyond
it.
"""

from __future__ import annotations

import pytest

from tests.explain.explaining import explained, explained_files

OOM = "[rank1]: RuntimeError: CUDA error: out of memory"
LOST = (
    "[rank2]:[E1122 10:00:05.1 ProcessGroupNCCL.cpp:1] [Rank 2] NCCL error: remote process exited "
    "or there was a network error, NCCL version 2.21.5"
)
CANCELED = (
    "slurmstepd: error: *** JOB 7 ON gpu-1 CANCELLED AT 2026-01-05T10:00:09 DUE TO TIME LIMIT ***"
)
XID = "Jan  5 {}:00 gpu-7 kernel: NVRM: Xid (PCI:0000:dc:00): 79, GPU has fallen off the bus."
TIMED = "2026-01-05 10:00:00,123 ERROR trainer: RuntimeError: CUDA error: out of memory"
RAY = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem Worker IP address: 192.0.2.110 Worker port: 1 Worker PID: 90738 "
    "Worker"
)
SSH = "gpu3: ssh: connect to host gpu3 port 22: Connection refused"
TASK = "srun: error: gpu-1: task 5: Exited with exit code 1"
STAMP = "2026-01-05 10:00:00 "
NAN = "{'loss': nan, 'grad_norm': 0.4, 'learning_rate': 1e-05}"
AFTER = "[rank2]: RuntimeError: CUDA error: out of memory"
LATE = "2026-01-05 10:00:36,000 ERROR trainer: RuntimeError: CUDA error: out of memory"
BROKEN = (
    "[2026-01-05 10:00:00,100] n:1:2 [0] NCCL WARN Net : Call to recv from 10.2.8.7<58355> "
    "failed : Broken pipe"
)
TOLD = "2026-01-05 10:00:00,123 WARNING Received 15 death signal, shutting down workers"
TAKEN = "4m  Normal  TaintManagerEviction  pod/a-0  Marking for deletion Pod ml/a-0"
SCENES = [
    ([CANCELED, OOM], "job-ended"),
    ([TOLD, TAKEN], "node-failed"),
    ([XID.format("09:46"), TOLD], "gpu-lost"),
    ([XID.format("09:44"), TOLD], "job-ended"),
    ([OOM, CANCELED], "cuda-oom"),
    ([XID.format("09:58"), TIMED], "gpu-lost"),
    ([XID.format("09:46"), TIMED], "gpu-lost"),
    ([XID.format("09:45"), TIMED], "cuda-oom"),
    ([TIMED, XID.format("10:02")], "gpu-lost"),
    ([TIMED, XID.format("10:03")], "cuda-oom"),
    ([BROKEN, LATE], "nccl-remote-error"),  # by more than the clocks may differ, and 30 s
    ([BROKEN, LATE.replace(":36", ":35")], "cuda-oom"),
    ([BROKEN, TIMED], "cuda-oom"),
    ([STAMP + "step 3", LOST.partition("] ")[2], LATE], "cuda-oom"),  # of a time nobody says
    ([LOST, AFTER], "nccl-remote-error"),  # of the same rank, by the order of its lines
    ([AFTER, LOST], "cuda-oom"),
    ([RAY, LOST], "child-failed"),
    ([TASK, LOST], "nccl-remote-error"),
    ([XID.format("09:58"), CANCELED], "job-ended"),
    ([TASK + "39", OOM], "cuda-oom"),
    ([*[NAN] * 5, LOST], "nccl-remote-error"),
    ([TASK, *[NAN] * 5], "loss-nan"),
    ([XID.format("09:00"), STAMP + TASK], "child-failed"),
    ([XID.format("09:00"), STAMP + TASK, STAMP + CANCELED], "job-ended"),
]
"""Lines and the cause: on both sides of each condition of the order."""


@pytest.mark.parametrize(("lines", "slug"), SCENES)
def test_an_event_stands_where_its_layer_does_unless_something_explains_it(
    lines: list[str], slug: str
) -> None:
    """A scheduler's reason, a fault of another day, what follows from a broken connection, and a
    process that died before its peers lost it stand elsewhere.
    """
    assert explained(*lines).slug == slug


XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid=77, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("prefix", "excluded"),
    [
        ("salloc: ", ()),
        ("flux-job: ", ()),
        ("python3: ", ()),
        ("2026-01-05 10:00:00,123 trainer main: ", ()),
        ("2026-01-05T10:00:00+0000 ERROR trainer: ", ()),
        ("Jan  5 10:00:00 localhost kernel: ", ()),
        ("[pod/trainer-worker-3/pytorch] ", ()),
        ("3f2a9c1b7d4e:221:310 [5] NCCL WARN ", ()),
        ("Jan  5 10:00:00 gpu-7 kernel: ", ("gpu-7",)),
        ("2026-01-05T10:00:00+0000 zeus kernel: ", ("zeus",)),
    ],
)
def test_only_what_the_text_shows_to_be_a_node_is_excluded(
    prefix: str, excluded: tuple[str, ...]
) -> None:
    """A program before each line, a logger, a pod or a container is no node."""
    lines = [f"{prefix}starting {number}" for number in range(8)]
    finding = explained(*lines, prefix + XID_79)
    assert finding.slug == "gpu-lost"
    assert finding.excluded == excluded


def test_a_column_of_several_names_is_of_hosts() -> None:
    """As pdsh and ansible print it, unlike a program's name."""
    lines = [f"gpu-{number % 3}: starting {number}" for number in range(9)]
    assert explained(*lines, f"gpu-2: {XID_79}").excluded == ("gpu-2",)
    for more, host in (([], None), (["gpu-1: up"], "gpu-2")):  # four lines show it
        assert explained("gpu-1: a", "gpu-2: b", *more, "gpu-2: KeyError: 7").host == host


def test_a_rendezvous_that_closes_comes_after_any_error() -> None:
    """Torchrun closes it once a rank has failed."""
    finding = explained(
        (
            "RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer "
            "[192.0.2.31]:21527"
        ),
        "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 10/10 "
        "attempts left; will restart worker group",
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
    )
    assert finding.slug == "nccl-remote-error"
    assert "192.0.2.31" in finding.statement


@pytest.mark.parametrize(("second", "slug"), [(4, "job-ended"), (3, "cuda-oom")])
def test_a_scheduler_that_ends_a_failed_job_is_no_cause(second: int, slug: str) -> None:
    """Unless the clocks of its host and of the rank's leave it open which came first."""
    failed = f"2026-01-05T10:00:0{second}.000+00:00 gpu-1 train[7]: {OOM}"
    ended = f"2026-01-05T10:00:09.000+00:00 login {CANCELED.replace('slurmstepd:', 'slurmd[1]:')}"
    assert explained_files({"0": [failed], "1": [ended]}).slug == slug


def test_what_a_launcher_could_not_do_is_no_end_of_a_task() -> None:
    """It comes before the tasks that ended, but after what a program says of itself."""
    assert explained(TASK, SSH).slug == "rendezvous-unreachable"
    assert explained(OOM, SSH).slug == "cuda-oom"


def test_what_fails_after_the_job_was_told_to_end_follows_from_that() -> None:
    """A keyboard's interrupt closes what threads still use; one that comes later ends a failure."""
    told = "Detected KeyboardInterrupt, attempting graceful shutdown ..."
    closed = "OSError: [Errno 9] Bad file descriptor"
    assert explained("step 1 | loss 2.1", told, closed).slug == "job-ended"
    assert explained("step 1 | loss 2.1", closed, told).slug == "child-failed"


UNKNOWN = "srun: error: Launch for StepId=7.0 failed on node gpu-3: Credential expired"
TOLD = "W1118 10:00:05.1 99 torch/distributed/elastic/agent/server/api.py:7] Received {} death"
ENDS = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 99 got signal: 15"


@pytest.mark.parametrize("signal", ["Signals.SIGTERM", "15"])
def test_a_signal_does_not_explain_what_stands_before_it(signal: str) -> None:
    """Who sends it has a reason: a line of failure before it, but none after it."""
    told = f"{TOLD.format(signal)} signal, shutting down workers"
    finding = explained("step 1 | loss 2.1", UNKNOWN, told, ENDS)
    assert finding.statement == "Launch for StepId=7.0 failed on node gpu-3: Credential expired"
    assert finding.host == "gpu-3"
    assert explained("step 1 | loss 2.1", told, UNKNOWN, ENDS).slug == "job-ended"


def test_a_signal_has_the_reason_of_the_scheduler_that_sent_it() -> None:
    """Whichever has a time; a cancellation without a reason says no more than the signal."""
    told = "[2026-01-05 10:00:09,811] Received Signals.SIGTERM death signal, shutting down workers"
    assert explained(CANCELED, told).statement.endswith("it reached its time limit")
    assert explained(told, CANCELED).statement.endswith("it reached its time limit")
    bare = CANCELED.replace(" DUE TO TIME LIMIT", "")
    assert explained(told, bare).statement.endswith("SIGTERM")


GONE = (
    "n-1:7:9 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n-2"
)
FLUSHED = "n-1:7:9 [0] NCCL WARN NET/IB : Got completion from peer n-2<4> with error 12, opcode 0"


def test_a_peer_that_is_gone_is_no_cause() -> None:
    """Why it ended is in its own log; a transfer that failed is a fault of its own."""
    gone = explained("step 1 | loss 2.1", GONE)
    assert (gone.outcome, gone.slug, gone.sureness) == ("undecided", "nccl-remote-error", "")
    assert gone.missing
    assert explained("step 1 | loss 2.1", FLUSHED).outcome == "found"
    assert explained(OOM, GONE).outcome == "found"


HEALTH = "[198542.853543] mlx5_core 0000:5e:00.0: device's health compromised - reached miss count"


@pytest.mark.parametrize(("name", "excluded"), [("n-2", ("n-2",)), ("n-3", ())])
def test_a_kernels_log_is_of_the_host_that_its_file_is_named_after(
    name: str, excluded: tuple[str, ...]
) -> None:
    """If the logs know such a host; its adapter's firmware explains its peers' errors."""
    other = FLUSHED.replace("n-1", "n-2").replace("peer n-2", "peer n-1")
    finding = explained_files(
        {"job.out": [FLUSHED, other, LOST], f"/var/log/{name}.dmesg": [HEALTH]}
    )
    assert (finding.slug, finding.excluded) == ("bad-link", excluded)
    recovered = HEALTH.replace("device's health compromised", "Port module event: module 0")
    finding = explained_files({"job.out": [FLUSHED, LOST], f"{name}.dmesg": [recovered]})
    assert finding.slug == "nccl-remote-error"


EVENT = "4m  Warning  SpotInterrupted  node/ip-77.internal  Spot interruption warning for i-0b92"


def test_a_row_of_events_is_not_later_than_the_lines_before_it() -> None:
    """Kubernetes' events are printed after the job: one that took a node explains its peers'
    errors, whose reporters are not to blame.
    """
    timed = "2026-02-21T13:21:51.2Z " + LOST
    finding = explained("2026-02-21T13:20:51.2Z step 1 | loss 2.1", timed, EVENT)
    assert (finding.slug, finding.host, finding.ranks) == ("job-ended", "ip-77.internal", ())


@pytest.mark.parametrize(
    ("command", "slug"),
    [("$ kubectl -n a describe workload b", "job-ended"), ("step 2 | loss 2.1", "disk-full")],
)
def test_what_a_command_printed_is_not_later_than_the_lines_before_it(
    command: str, slug: str
) -> None:
    """Somebody asked for it when all was over; what the job's own log has there came later."""
    full = "[rank2]: OSError: [Errno 28] No space left on device: '/ckpt/a'"
    told = "    Message:  Preempted to accommodate a workload due to reclamation within the cohort"
    assert explained("step 1 | loss 2.1", full, command, told).slug == slug


@pytest.mark.parametrize(
    ("command", "says", "outcome"),
    [
        ("$ kubectl describe pod a-2", "terminated in response to imminent node shutdown", "found"),
        ("$ kubectl describe pod a-2", "terminated in response to a failed job", "undecided"),
        ("step 2 | loss 2.1", "terminated in response to imminent node shutdown", "undecided"),
    ],
)
def test_a_status_that_a_command_printed_explains_what_stands_before_it(
    command: str, says: str, outcome: str
) -> None:
    """It has no time; if it says why, and not only that something else failed."""
    finding = explained("step 1 | loss 2.1", LOST, command, f"Message:    Pod was {says}.")
    assert finding.outcome == outcome


def test_a_line_without_a_stamp_is_no_older_than_the_lines_before_it() -> None:
    """Not as old as the last stamp of its own process, which may have been silent for hours."""
    finding = explained(
        "(A pid=11, ip=10.0.0.1) [2026-01-05 10:00:00] step 1 done",
        "(B pid=12, ip=10.0.0.2) [2026-01-05 10:05:00] step 2 done",
        "(B pid=12, ip=10.0.0.2) [rank 2] OSError: [Errno 28] No space left on device: '/ckpt/a'",
        "(A pid=11, ip=10.0.0.1) [rank 1] torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 2.00 GiB. GPU 1 has a total capacity of 79.00 GiB",
    )
    assert (finding.slug, finding.ranks) == ("disk-full", (2,))


def test_a_rank_that_no_log_has_is_not_blamed_for_its_silence() -> None:
    """Of two ranks, the one without a line may be the victim of the one that reports."""
    world = "[rank1]: world_size=2"
    assert explained(world, LOST.replace("ank 2", "ank 1").replace("rank2", "rank1")).ranks == ()


NOT_FOUND = (
    "{}[{} socket.cpp:767] [c10d] The IPv6 network addresses of (m-0, {}) cannot be retrieved "
    "(gai error: -3 - Temporary failure in name resolution)."
)
WAITED = (
    "torch.distributed.DistNetworkError: The client socket has timed out after 900000ms while "
    "trying to connect to (m-0, 2345)."
)


@pytest.mark.parametrize(
    ("port", "after", "title"),
    [
        (2345, [WAITED], "The master's host name cannot be resolved"),
        (2346, [WAITED], "The master does not answer"),
        (2345, ["step 1 | loss 2.1", OOM], ""),
    ],
)
def test_the_reason_of_an_attempt_is_that_of_its_failure(
    port: int, after: list[str], title: str
) -> None:
    """A warning says why an attempt failed; it counts if all attempts to that address did."""
    lines = [NOT_FOUND.format("", f"W0330 10:00:0{number}.1", port) for number in (1, 2)]
    assert explained(*lines, *after).title == title


BESIDE = "rank={} local_rank={} pid=48{} host=gpu-{}"
WATCHDOG = (
    "[rank{0}]:[E0422 08:14:33.1 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600085 milliseconds before timing out."
)
BLOCKED = (
    "Apr 22 08:{}:53 gpu-{} kernel: INFO: task python3:48{} blocked for more than 120 seconds."
)


@pytest.mark.parametrize(
    ("minute", "host", "rank", "says"),
    [
        ("05", 1, 2, "task python3:482 blocked"),
        ("05", 1, 9, "task python3:489 blocked"),  # on its node, in the 15 minutes before
        ("05", 0, 9, "rank 2 never reported"),
        ("05", 0, 1, "rank 2 never reported"),  # of a process that others waited with
    ],
)
def test_a_rank_that_others_wait_for_is_held_up_by_what_is_beneath_it(
    minute: str, host: int, rank: int, says: str
) -> None:
    """The kernel speaks of its process or of its node, and it is still the one to blame."""
    seats = [BESIDE.format(rank, rank % 2, rank, rank // 2) for rank in range(4)]
    reports = [WATCHDOG.format(rank) for rank in (0, 1, 3)]
    reports += [line.replace("] [Rank", "] terminated with exception: [Rank") for line in reports]
    ends = ["srun: error: gpu-1: task 2: Killed", "$ ssh gpu-1 journalctl -k"]
    finding = explained(*seats, "[rank2]: up", *reports, *ends, BLOCKED.format(minute, host, rank))
    assert says in finding.statement
    assert finding.ranks == (2,)


@pytest.mark.parametrize(
    ("added", "ranks"),
    [
        ("[Wed Apr 22 08:05:53 2026] Lustre: Connection to scr3-OST001c was lost", (2,)),
        ("Apr 22 08:05:53 gpu-1 kernel: Lustre: Connection to scr3-OST001c was lost", (2,)),
        ("[rank2] 2026-04-22 08:05:53,106 INFO waits for its shard", ()),
    ],
)
def test_a_kernel_s_log_behind_the_job_s_is_no_other_rank_s(
    added: str, ranks: tuple[int, ...]
) -> None:
    """It is older than what stands before it, as another rank's log would be."""
    reports = [WATCHDOG.format(rank) for rank in (0, 1, 3)]
    stack = ["Exception raised from checkTimeout at a.cpp:618 (most recent call first):",
             "frame #0: c10::Error::Error"]  # fmt: skip
    end = "E0422 08:14:43.1 7 torch/x.py:869] failed (exitcode: -6) local_rank: 3 (pid: 90) of fn"
    up = [f"[rank{rank}] 2026-04-22 08:03:53,106 INFO step 8 | loss 2" for rank in range(4)]
    finding = explained("2026-04-22 08:03:52 WORLD_SIZE=4", *up, *reports, *stack, end, added)
    assert finding.ranks == ranks


def test_an_exception_with_the_words_of_a_warning_is_a_failure() -> None:
    """Torch warns of what it cannot initialize, and raises it when that is needed."""
    error = "Error 804: forward compatibility was attempted on non supported HW"
    warned = f'{{"level": "info", "message": "UserWarning: CUDA initialization: {error}"}}'
    healthy = ['{"level": "info", "message": "loading"}'] * 3
    assert explained(warned, *healthy).outcome == "nothing"
    raised = ["Traceback (most recent call last):", '  File "t.py", line 4, in main', "    init()"]
    finding = explained(warned, *raised, f"RuntimeError: {error}", *healthy)
    assert (finding.outcome, finding.slug) == ("found", "nvml-broken")


def test_who_only_noticed_that_a_peer_is_gone_is_named_by_nothing() -> None:
    """Neither by its pod nor by its process."""
    line = '2026-01-05T10:00:00Z {{pod="dlrm-0", node="gpu-7"}} {}'
    finding = explained(line.format("step 1 | loss 2.1"), line.format(GONE))
    assert (finding.outcome, finding.host, finding.pod, finding.pid) == ("undecided",) + (None,) * 3
