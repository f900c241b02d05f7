"""The general reading: what a log says at its end, where no pattern knows it."""

from __future__ import annotations

import re
import time
from itertools import islice, product
from string import ascii_lowercase

import pytest

from dshealthd.explain import command, remarks
from dshealthd.explain.events import Place
from dshealthd.explain.input import Raw
from dshealthd.explain.recognition import Recognizer
from dshealthd.explain.streams import HEAD, Splitter
from dshealthd.explain.tracebacks import Assembler, Traceback
from tests.explain.explaining import explained, explained_files

WORTH_READING = 3

STEPS = [f"step {number}/800 | loss 2.1 | 0.3 s" for number in range(40)]
ENDS = [
    "ERROR: cannot get the cache: it is held by a lock of host n-2",
    "fatal: the queue lost its spindle",
    "2026-01-05 10:00:00,123 - trainer - CRITICAL - invalid shard 7 of the corpus",
    "Error: spool quota exceeded for /scratch/u",
    "panic: runtime error: index out of range [3] with length 3",
    "thread 'main' panicked at src/main.rs:3:5: no route",
    "com.example.ShardError: no shard 7",
    "  Warning  FailedScheduling  12s  default-scheduler  0/8 nodes are available: no GPU.",
]
"""Ends of logs that no pattern knows."""
HEALTHY = [
    "errors: 0, failed: 0",
    "0 errors, no failures",
    "INFO retry policy: abort on error, time-out 30 s",
    "[W105 10:00:00 x.cpp:3] Warning: connection failed, retrying",
    "this may cause errors if the timeout is exceeded",
    "WARNING: cache not found, falling back to the default",
    "12 passed, 0 failed, 1 xfailed",
    "INFO: epoch 10: 4711 tokens   loss 2.0",
    "train.py: step 12: 4711 samples          loss 2.0",
    "timeout=1800, fail_on_nan=False, error_if_nonfinite=True",
]
"""Lines of healthy runs with words of failure."""


@pytest.mark.parametrize("line", ENDS)
def test_a_failure_that_no_pattern_knows_is_quoted(line: str) -> None:
    """A log that ends in one never ends in silence: the answer has the log's own words."""
    finding = explained(*STEPS, line)
    assert (finding.outcome, finding.slug) == ("found", "child-failed")
    assert finding.proof[0].quote == line.strip()
    assert finding.step


@pytest.mark.parametrize("line", ENDS)
def test_what_healthy_lines_follow_was_no_end(line: str) -> None:
    """The same line in the middle of a run that goes on ended nothing."""
    assert explained(*STEPS, line, *STEPS).outcome == "nothing"


@pytest.mark.parametrize("line", HEALTHY)
def test_words_of_failure_in_healthy_lines_are_none(line: str) -> None:
    """Counts of none, options, warnings, and what was dealt with, speak of no failure."""
    assert explained(*STEPS, line).outcome == "nothing"


def test_where_the_job_worked_on_nobody_knows() -> None:
    """A few steps after an error do not show that it was over, nor that it ended the job."""
    error = "wandb: ERROR Run initialization has timed out after 90.0 sec."
    assert explained(*STEPS, error).outcome == "found"
    assert explained(*STEPS, error, *STEPS[:9]).outcome == "undecided"
    assert explained(*STEPS, error, *STEPS[:10]).outcome == "nothing"
    ranks = [f"[rank{rank}]: up" for rank in range(4)]  # of which each prints a few
    assert explained(*ranks, error, *STEPS[:11]).outcome == "undecided"
    assert explained(*ranks, error, *STEPS[:12]).outcome == "nothing"
    info = "INFO: a checkpoint is saved"
    assert explained(error, *[info] * 9).outcome != "nothing"
    assert explained(error, *[info] * 10).outcome == "nothing"


def test_words_of_failure_alone_are_undecided_and_to_be_read() -> None:
    """Without a level, an exception or an exit code, nobody says that the job failed."""
    odd = [f"shard {'abcdef'[number]} is unreachable" for number in range(5)]
    finding = explained(*STEPS, *odd)
    assert finding.outcome == "undecided"
    assert [place.quote for place in finding.proof] == odd[:WORTH_READING]
    assert command.EXIT[finding.outcome] == 3


def test_of_equal_remarks_the_first_is_quoted() -> None:
    """By their times, where these are known, and else by their places."""
    late, early = (
        "2026-01-05 10:00:0{} fatal: shard {} is lost".format(*one) for one in ("9a", "5b")
    )
    assert explained_files({"a.log": [late], "b.log": [early]}).statement == "shard b is lost"
    bare = early.partition(" fatal")[2].replace("b", "c")
    assert (
        explained_files({"a.log": ["fatal" + bare], "b.log": [late]}).statement == "shard a is lost"
    )


def test_content_explains_more_than_its_wrapper() -> None:
    """What a launcher says of a task's end is no cause: what the task said before it is."""
    finding = explained(
        "slurmstepd: error: pyxis: container start failed with error code: 1",
        (
            "slurmstepd: error: pyxis:     enroot-switchroot: failed to execute: /bin/bash: No "
            "such file"
        ),
        "srun: error: n-2: task 1: Exited with exit code 1",
    )
    assert finding.statement == "failed to execute: /bin/bash: No such file"
    assert (finding.ranks, finding.host) == ((1,), "n-2")


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([("  Warning  BackoffLimitExceeded  58s  job-controller  Job has reached the specified "
           "backoff limit")], "undecided"),
        (["  Warning  FailedMount  58s  kubelet  no volume has reached the node"], "found"),
        (["Failure Policy:", "  Max Restarts:  3", "Exit Code:    1"], "undecided"),
        (["Terminal State:    Failed", "Exit Code:    1"], "undecided"),
        (["Terminal fault: the lease of shard 7 failed", "Exit Code:    1"], "found"),
    ],
)  # fmt: skip
def test_spent_attempts_settings_and_states_are_no_cause(lines: list[str], outcome: str) -> None:
    """What `kubectl describe` has of a job that failed: only its pods' logs say why."""
    assert explained(*lines).outcome == outcome


@pytest.mark.parametrize(
    "line",
    [
        "run.sh: 第 12 行: 28171 已杀死               python train.py",
        "run.sh\uff1a行 12\uff1a 28171 已杀死               python train.py",
        "./run.sh: Zeile 12: 28171 Getötet                python train.py",
        "./run.sh: ligne 7: 28171 Processus arrêté      python train.py",
        "./run.sh: 12 行: 28171 強制終了            python train.py",
    ],
)
def test_what_a_shell_says_of_a_signal_needs_no_language(line: str) -> None:
    """Its form shows that a signal ended the process, in every language of the user's."""
    finding = explained(*STEPS, line)
    assert (finding.outcome, finding.slug, finding.pid) == ("undecided", "child-failed", 28171)
    killed = explained(*STEPS, line, "srun: error: gpu-3: task 2: Exited with exit code 137")
    assert (killed.title, killed.ranks, killed.host) == ("A process was killed", (2,), "gpu-3")


@pytest.mark.parametrize(
    ("code", "title"),
    [(137, "A process was killed"), (139, "A process crashed"), (136, "A process crashed")],
)
def test_exit_codes_above_128_are_signals(code: int, title: str) -> None:
    """A shell adds 128 to the number of the signal, whatever program repeats it."""
    assert explained(*STEPS, f"worker process exited with status {code}").title == title
    assert explained(*STEPS, "worker process exited with status 100").outcome == "undecided"
    tool = f"INFO tool call of sandbox exited with code {code}"
    assert explained(*STEPS, tool, *STEPS[:2]).outcome == "nothing"
    assert explained(*STEPS, tool).outcome == "undecided"
    task = "srun: error: n2: task 1: {}"
    told = explained(task.format(f"Exited with exit code {code}")).statement
    assert f"{code}, for signal {code - 128} (SIG" in told
    assert explained(task.format("Killed")).statement == "srun: task 1 on n2: Killed"
    # A signal that launchers send in an orderly end says nothing.
    assert explained(*STEPS, "worker process exited with status 143").outcome == "undecided"


@pytest.mark.parametrize(
    "line",
    [
        (
            "(raylet) A worker died or was killed while executing a task by an unexpected system "
            "error. Worker exit type: INTENDED_SYSTEM_EXIT"
        ),
        "actor exits: The actor is dead because all references to the actor were removed.",
        "worker 3 terminated gracefully",
        "worker killed by user request",
    ],
)
def test_an_end_that_was_meant_is_no_failure(line: str) -> None:
    """Whoever reports it, as Ray of idle workers and of actors that the job lets go."""
    assert explained(*STEPS, line).outcome == "nothing"


@pytest.mark.parametrize("level", ["ERROR", "[error]", "E0105 10:00:00.1 7 x.cc:1]", "<3>"])
def test_levels_of_many_loggers_are_read(level: str) -> None:
    """An error by its level is a statement, whoever logs it."""
    remark = remarks.read(f"{level} the queue is stuck", remarks.level_of(level, level[:1]))
    assert remark is not None
    assert remark.weight >= remarks.SAYS


def test_a_number_of_syslog_s_is_a_level() -> None:
    """Of lines that else differ in nothing."""
    assert explained("<6>the queue is stuck", "<3>the queue is stuck").outcome == "found"
    assert explained("<6>the queue is stuck").outcome == "nothing"


@pytest.mark.parametrize("unit", ["exit ", "a:1 ", "no a b ", "task ", "[a]", "x(", "1it [", "if "])
def test_hostile_lines_take_no_longer_than_others(unit: str) -> None:
    """No text makes the search for words grow with its square."""
    text = (unit * 2000)[: remarks.MAX_READ]
    began = time.thread_time()
    remarks.read(text, remarks.level_of(text))
    assert time.thread_time() - began < 0.5


HOLLOW, CORRUPT = "RuntimeError: load_all failed: ok=False", "ERROR loader: shard 7 is corrupt"


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        ([("sbatch: error: Batch job submission failed: Invalid generic resource (gres) "
           "specification")],
         "Invalid generic resource (gres) specification"),
        (["usage: train.py [-h]", ("train.py: error: unrecognized arguments: "
                                   "--lr")], "unrecognized arguments: --lr"),
        (["+ torchrun x.py", "/job/script: line 12: torchrun: command not found"],
         "/job/script: line 12: torchrun: command not found"),
        (["panic: runtime error: index out of range", ("srun: error: n1: task 0: Exited with "
                                                       "exit code 2")],
         "runtime error: index out of range"),
        (["UserWarning: x may fail", "worker 3 died", ("Reason: spool /x was not found on any "
                                                       "node"), "Killed"],
         "spool /x was not found on any node"),
        (["RuntimeError: build/a_b.cpp:64 XYZ function error: XyzGet(&id), error code is 11",
          "[rank0]: X0003: Failed to open. Reason: The address has been bound already."],
         "The address has been bound already."),
        ([CORRUPT, HOLLOW],
         "shard 7 is corrupt"),
        ([CORRUPT, "RuntimeError: no shard is left to load"],
         "RuntimeError: no shard is left to load"),
        ([HOLLOW, "srun: error: n1: task 0: Exited with exit code 1"],
         HOLLOW),
        ([HOLLOW, *["a line"] * 49, CORRUPT], "shard 7 is corrupt"),
        ([HOLLOW, *["a line"] * 50, CORRUPT], HOLLOW),
        (["Traceback (most recent call last):", '  File "t.py", line 7, in f',
          "ValueError: Caught ValueError in DataLoader worker process 2.",
          "Original Traceback (most recent call last):", '  File "d.py", line 9, in g',
          "ValueError: Checksum failure: /nvme/shard.7"],
         "ValueError: Checksum failure: /nvme/shard.7 at d.py:9 in g"),
        ([("docker: Error response from daemon: failed to create task: exit status 1: container-"
           "cli: initialization error: nvml error: driver not loaded: unknown."), "exit code 125"],
         "nvml error: driver not loaded: unknown."),
        (["RuntimeError: Critical error in pipeline:", "Error in MIXED operator `decoders.image`,",
          "encountered:", "Error in thread 3: Unrecognized image format"],
         "Error in thread 3: Unrecognized image format"),
        (["E0718 12:20:44.981000 31 x/api.py:882] Error in exit barrier. Elapsed: 600 seconds",
          "container-cli: requirement error: unsatisfied condition: cuda>=12.9, update it"],
         "unsatisfied condition: cuda>=12.9, update it"),
    ],
)  # fmt: skip
def test_the_innermost_content_is_quoted(lines: list[str], quoted: str) -> None:
    """Of a wrapper and its content, of a report and a reason, what says what happened."""
    assert explained(*STEPS, *lines).statement.endswith(quoted)


@pytest.mark.parametrize(
    ("first", "quoted"),
    [("TimeoutError", "CommError: no answer within 90 s from the tracker at t.py:7 in f"),
     ("TimeoutError: the tracker is asleep", "TimeoutError: the tracker is asleep at t.py:7 in f")],
)  # fmt: skip
def test_of_a_chain_the_first_that_says_something_is_quoted(first: str, quoted: str) -> None:
    """What was raised while handling a bare exception often says why that was raised."""
    frames = ["Traceback (most recent call last):", '  File "t.py", line 7, in f']
    then = ["", "The above exception was the direct cause of the following exception:", ""]
    last = "CommError: no answer within 90 s from the tracker"
    assert explained(*STEPS, *frames, first, *then, *frames, last).statement == quoted


@pytest.mark.parametrize(
    "text",
    ["Permission denied", "No space left on device", "шина отвалилась", "key not in map",
     "the device is busy or unavailable", "401 Client Error: Unauthorized for url: http://r/a"],
)  # fmt: skip
def test_a_message_that_says_why_is_not_hollow(text: str) -> None:
    """However short, and in any language."""
    assert not remarks.is_hollow(f"RuntimeError: {text}")


@pytest.mark.parametrize(
    "text",
    ["", "5", "the spool failed", "x_y failed: ok=False", "error in: a/b.cpp:64, code 11",
     "/a/b: internal error",
     "Command '['ninja', '-v']' returned non-zero exit status 1.",
     "502 Server Error: Bad Gateway for url: http://router:8000/v1/completions",
     "503 Service Unavailable\nFor more information check: https://developer.mozilla.org/503"],
)  # fmt: skip
def test_names_codes_and_symbols_say_nothing(text: str) -> None:
    """Nor do the words that say that something failed."""
    assert remarks.is_hollow(f"RuntimeError: {text}")


@pytest.mark.parametrize(
    "line",
    [
        (
            "[rank0]:[W105 10:00:00.1 socket.cpp:697] [c10d] The client socket has failed to "
            "connect to n1:29500"
        ),
        "trainer-0   0/1     CrashLoopBackOff   5 (20s ago)   5m",
        "[ 1208.123456] INFO: task python3:12345 blocked for more than 120 seconds.",
        "Shared connection to 10.0.0.4 closed",
    ],
)
def test_a_log_that_ends_in_trouble_is_never_called_healthy(line: str) -> None:
    """A warning, a status or a hint as the last words of a log is undecided; not so in its
    middle.
    """
    assert explained("starting 1", "starting 2", line).outcome == "undecided"
    assert explained("starting 1", line, *STEPS).outcome == "nothing"


@pytest.mark.parametrize("where", ["graph/topo.cc:493", "/a-b/src/topo.cc:493 (ncclTopoGet)"])
def test_what_nccl_warns_of_last_is_quoted(where: str) -> None:
    """NCCL has no higher level: its last warning says why it gave up, unless the job went on."""
    lines = [
        "gpu-1:75:95 [2] graph/xml.h:101 NCCL WARN Attribute arch of node cpu not found",
        f"gpu-1:75:95 [2] NCCL INFO {where} -> 3",
    ]
    finding = explained(*lines)
    assert finding.statement == "Attribute arch of node cpu not found"
    assert (finding.host, finding.sureness) == ("gpu-1", "possible")
    steps = [f"step {number} | loss 2.{number}" for number in range(20)]
    assert explained(*lines, *steps).outcome == "nothing"


SRUN = "srun: error: n2: task 1: Exited with exit code 1"
STORE = (
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the "
    "C10d store has failed."
)


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([SRUN], "undecided"),
        (["srun: error: n2: task 1: Segmentation fault"], "found"),
        (["srun: error: n2: task 1: Killed"], "undecided"),
        (["srun: error: n2: task 1: Bus error"], "undecided"),
        (["Fatal Python error: Bus error"], "found"),
        (
            [
                "srun: error: n2: task 1: Killed",
                "n2 kernel: Out of memory: Killed process 7 (python)",
            ],
            "found",
        ),
        (["[launch.py:434:x] ['python'] exits with return code = -7"], "undecided"),
        (["failed (exitcode: -15) local_rank: 1 (pid: 7) of binary: python"], "undecided"),
        (["RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."], "undecided"),
        (["spawn.ProcessExitedException: process 2 terminated with signal SIGKILL"], "undecided"),
        (["[rank: 3] Child process with PID 7 terminated with code -9."], "undecided"),
        (["7.0  train  FAILED  0:9  01:00:00", "n2: task 1: Killed"], "undecided"),
        (["7.0  train  OUT_OF_MEMORY  0:125  01:00:00", "n2: task 1: Killed"], "found"),
        (["ValueError: bad batch", SRUN], "found"),
        ([STORE], "found"),
        (["step 1 | loss 2.1", STORE], "undecided"),
    ],
)
def test_who_ended_is_said_although_nothing_says_why(lines: list[str], outcome: str) -> None:
    """An exit code is no cause, nor is a signal from a sender that nobody knows; a rendezvous that
    worked before is not unreachable.
    """
    finding = explained(*lines)
    assert finding.outcome == outcome
    assert finding.proof
    is_killed = outcome == "undecided" and not {SRUN, STORE}.intersection(lines)
    assert any("sent the signal" in one for one in finding.missing) == is_killed


@pytest.mark.parametrize(
    ("lines", "outcome", "whose"),
    [
        ([SRUN], "undecided", ["rank 1"]),
        (["torchrun", SRUN], "undecided", ["the rank that failed first"]),
        (["gpu3: ssh: connect to host gpu3 port 22: Connection refused"], "found", []),
        (["srun: error: n2: task 1: Killed"], "undecided", []),
    ],
)
def test_an_exit_code_asks_for_the_log_of_who_ended(
    lines: list[str], outcome: str, whose: list[str]
) -> None:
    """A signal for that of who sent it; what a launcher could not do needs neither."""
    finding = explained(*lines)
    logs = [re.fullmatch("the log of (.*): no log here has its error", one)
            for one in finding.missing]  # fmt: skip
    assert (finding.outcome, [log[1] for log in logs if log]) == (outcome, whose)


UNFOUND = "[WARNING] [engine.py:2601:load_checkpoint] Unable to find latest file at ckpt/latest"


@pytest.mark.parametrize(
    ("lines", "slug"),
    [
        ([UNFOUND], "checkpoint-incompatible"),
        ([UNFOUND, "[INFO] [x.py:4:f] building the data"], "child-failed"),
        ([UNFOUND.replace("WARNING", "ERROR"), "[INFO] [x.py:4:f] the end"],
         "checkpoint-incompatible"),
    ],
)  # fmt: skip
def test_a_warning_that_healthy_lines_follow_ended_nothing(lines: list[str], slug: str) -> None:
    """Whether or not a pattern knows it."""
    assert explained(*lines, "[ERROR] ['python'] exits with return code = -7").slug == slug


ADDED = "Jan  5 {}:00 n-1 kernel: nvme 0000:38:00.0:   device [144d:a824] error status=1000"


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        (["[exiting program after 62100 iterations] datetime: 2026-01-05 11:00:00 ",
          ADDED.format("10:20")], "nothing"),
        (["[exiting program after 62100 iterations] datetime: 2026-01-05 11:00:00 ",
          ADDED.format("11:20")], "undecided"),
        ([ADDED.format("10:20"), "9          gpu  COMPLETED      0:0"], "nothing"),
        ([ADDED.format("10:20"), "9.extern   gpu  COMPLETED      0:0"], "undecided"),
        ([ADDED.format("10:20"), "9          gpu     FAILED      1:0"], "undecided"),
    ],
)  # fmt: skip
def test_what_stands_behind_a_good_end_but_is_older_ended_nothing(
    lines: list[str], outcome: str
) -> None:
    """A kernel's log that somebody appended; Slurm's row of a whole job says how it ended."""
    assert explained("2026-01-05 10:59:59 step 1 | loss 2.1", *lines).outcome == outcome


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#1_Chan#0_DIMM#0", "nothing"),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#1_Chan#0_DIMM#0", "undecided"),
        ("mce: a correctable error of bank 4 in the last hour", "nothing"),
        ("mce: an uncorrectable error of bank 4 in the last hour", "undecided"),
    ],
)
def test_what_the_hardware_corrected_ended_nothing(said: str, outcome: str) -> None:
    """The kernel counts corrected errors and others in lines of one form."""
    read = f"n-1: [Fri Jan  2 22:01:07 2026] {said}"
    finding = explained(*STEPS, "Training completed", "$ pdsh -w n-1 dmesg -T", read)
    assert finding.outcome == outcome


def test_an_exit_that_the_job_went_on_after_is_over() -> None:
    """As torchrun restarts the ranks; without their steps or a good end nobody knows."""
    ended = (
        "E0213 12:07:20.086000 87 torch/distributed/elastic/multiprocessing/api.py:869] failed "
        "(exitcode: 1) local_rank: 3 (pid: 876) of binary: /venv/bin/python3.11"
    )
    assert explained(ended, "training finished").outcome == "nothing"
    assert explained(ended, *STEPS[:10]).outcome == "nothing"
    assert explained(ended, *STEPS[:9]).outcome == "undecided"
    assert explained("training finished", ended).outcome == "undecided"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("    assert chunk.norm is not None", "AssertionError: assert chunk.norm is not None"),
        ("    check(chunk)", "AssertionError"),
    ],
)
def test_an_assertion_without_a_message_is_what_it_asserts(code: str, says: str) -> None:
    """Its line in the program says more than its name."""
    frame = '  File "/srv/train.py", line 9, in step'
    finding = explained("Traceback (most recent call last):", frame, code, "AssertionError")
    assert finding.statement == f"{says} at /srv/train.py:9 in step"


def test_the_answer_of_a_server_is_no_cause_where_the_server_says_why() -> None:
    """Only that a request was refused stands in the client's exception."""
    refused = "requests.exceptions.HTTPError: 400 Client Error: Bad Request for url: http://n1:1/a"
    reason = "Failed to update the weights: slice exceeds dimension size (256)"
    assert explained(reason, refused).statement == reason
    assert explained(refused).statement == refused
    # Four servers say it once each, and one says it now and then.
    for step, says in ((1, reason), (0, refused)):
        said = [f"(Engine pid={4 + step * n}) {line}" for n in range(4)
                for line in (reason, "INFO: answered")]  # fmt: skip
        assert explained(*said, refused).statement == says


def test_the_last_event_of_a_pod_is_what_it_ended_of() -> None:
    """It was scheduled since, so that it could not be is over."""
    row = "  Warning  {}  4m{}s  kubelet  {}".format
    finding = explained(
        row("FailedScheduling", 40, "0/42 nodes are available: 3 Insufficient nvidia.com/gpu"),
        row("UnexpectedAdmissionError", 12, "Allocate failed: requested 8 devices, available 7"),
    )
    assert finding.statement.startswith("UnexpectedAdmissionError")


def test_what_a_pod_got_beyond_is_over() -> None:
    """Rows that are no warnings show it; a container that ran may still fail for good."""
    row = "  {}  {}  4m  kubelet  {}".format
    mount = row("Warning", "FailedMount", "volume cache is held by another node")
    probe = row("Warning", "Unhealthy", "liveness probe refused on port 8080")
    started = row("Normal", "Started", "Started container trainer")
    assert explained(mount).statement.startswith("FailedMount")
    assert explained(mount, started).outcome == "nothing"
    assert explained(mount, *["a row"] * 19, started).outcome == "nothing"
    assert explained(mount, *["a row"] * 20, started).statement.startswith("FailedMount")
    assert explained(probe, started).statement.startswith("Unhealthy")


JOURNAL = "Nov 02 17:{} lab-2 {}"
STALE = "[rank2]: OSError: [Errno 116] Stale file handle: '/gpfs/a/shard'"


def test_the_exception_of_another_service_is_not_the_jobs() -> None:
    """Its journal stands behind the job's output; a job may also write to the journal itself."""
    error = "JS ERROR: TypeError: this.window_container is null"
    other = JOURNAL.format("20:48", f"gnome-shell[3210]: {error}")
    killed = (
        "systemd-oomd[1024]: Killed /user.slice/seg.scope due to memory used (126) / total (134)"
    )
    finding = explained("step 1 | loss 2.1", other, JOURNAL.format("26:14", killed))
    assert (finding.slug, finding.host) == ("host-memory-pressure", "lab-2")
    assert explained("step 1 | loss 2.1", other).root is None
    step = JOURNAL.format("20:47", "train[3210]: step 1 | loss 2.1")
    assert explained(step, other.replace("gnome-shell", "train")).slug == "child-failed"


@pytest.mark.parametrize(
    ("service", "error", "is_reason"),
    [
        (("19:40", "mmfs: [E] Node n-7 is being expelled because of an expired lease"), STALE, 1),
        (("19:20", "mmfs: [E] Node n-7 is being expelled because of an expired lease"), STALE, 0),
        (("19:40", "mmfs: [W] Node n-7 lease renewal is overdue"), STALE, 0),
        (("19:40", "mmfs: [E] Node n-7 is being expelled because of an expired lease"),
         "[rank2]: OSError: [Errno 28] No space left on device", 0),
    ],
)  # fmt: skip
def test_what_a_file_system_said_of_its_node_explains_a_lost_file(
    service: tuple[str, str], error: str, *, is_reason: int
) -> None:
    """Not long before, and not for an error that says why itself."""
    when, said = service
    lines = ["2026-08-03 19:40:50 step 9 | loss 2", error, f"Aug  3 {when}:52 n-3 {said}"]
    finding = explained(*lines)
    assert finding.statement.startswith("Node n-7") == bool(is_reason)
    assert (finding.ranks, finding.outcome) == ((2,), "found")


@pytest.mark.parametrize(("host", "is_reason"), [("n-7", True), ("n-8", False)])
def test_without_times_it_is_what_the_same_node_s_kernel_said(
    host: str, *, is_reason: bool
) -> None:
    """Another node has its own troubles."""
    lost = "2: [rank2]: OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/l/a'"
    ended = "srun: error: n-7: task 2: Exited with exit code 1"
    kernel = (
        f"Dec  9 12:05:51 {host} kernel: LustreError: 11-0: a-OST0014-osc-ffff8f0b: operation"
        " ldlm_enqueue to node 10.2.0.3@o2ib failed: rc = -107"
    )
    finding = explained(lost, ended, "srun: error: n-8: task 9: Terminated", kernel)
    assert (finding.slug == "checkpoint-path") == is_reason


def test_events_are_printed_after_the_job() -> None:
    """Who sent the signal stands behind what it did, in rows of either type."""
    finding = explained(
        "[pod/a-0/pytorch] step 9 | loss 2",
        "[pod/a-0/pytorch] W1108 14:40:06.118 torch/distributed/elastic/agent/server/api.py:900]"
        " Received 15 death signal, shutting down workers",
        "[pod/a-1/pytorch] [rank8]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils"
        ".hpp:268, remote process exited or there was a network error, NCCL version 2.21.5",
        "2m9s        Normal    Preempted               workload/pytorchjob-a   Preempted to"
        " accommodate a workload (UID: 5f0a9c1e) due to prioritization in the ClusterQueue",
    )
    assert finding.root is not None
    assert finding.root.pattern == "job-ended/preempted"


@pytest.mark.parametrize(
    ("row", "outcome", "where"),
    [
        ('Warning  Evicted  pod/a-2  Usage of "scratch" exceeds the limit', "found", "pod a-2"),
        ("Normal  Shutdown  node/n-7  Shutdown manager detected it", "found", "host n-7"),
        (
            "Normal  Preempted  5m  scheduler  Preempted by pod 1f3c on node n-7",
            "found",
            "host n-7",
        ),
        ("Warning  Evicted  pod/notebook-2  The node was low on disk", "undecided", "host a-0"),
        ("Normal  Killing  pod/a-2  Stopping container shutdown", "undecided", "host a-0"),
    ],
)
def test_the_reason_of_an_event_says_who_ended_a_pod(row: str, outcome: str, where: str) -> None:
    """Whatever its message says; not if the pod is of another job, or ended after a good end."""
    told = "[pod/a-0/main] Received 15 death signal, shutting down workers"
    finding = explained("[pod/a-0/main] step 9 | loss 2", told, f"16m  {row}")
    assert (finding.outcome, finding.pod or finding.host) == (outcome, where.split()[1])
    assert explained("step 9 | loss 2", "Training finished.", f"9m  {row}").outcome == "nothing"


@pytest.mark.parametrize(("address", "name"), [("127.0.1.1", "loopback"), ("10.0.0.5", "gloo")])
def test_a_name_of_a_loopback_address_explains_a_failure_to_connect(
    address: str, name: str
) -> None:
    """Alone it is harmless: one node needs no other address."""
    fact = f"[train] world=2 rank=1 host=node-b gethostbyname={address}"
    mesh = "RuntimeError: Gloo connectFullMesh failed with [gloo/pair.cc:144] no error"
    finding = explained(fact, mesh)
    assert finding.root is not None
    assert finding.root.pattern == f"rendezvous-unreachable/{name}"
    assert finding.proof
    assert explained(fact, "step 1 | loss 2.1").outcome == "nothing"


@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "(raylet) ", "(Runner pid=9, ip=10.0.0.4) "])
def test_a_level_counts_wherever_the_text_begins(prefix: str) -> None:
    """What stands before it may be a prefix with any end; without the level, nothing fails."""
    assert explained(f"{prefix}Error: No node types can fulfill the request").outcome == "found"


@pytest.mark.parametrize(("length", "is_read"), [(0, True), (1, False)])
def test_so_much_of_a_line_is_read(length: int, *, is_read: bool) -> None:
    """Of a level and a tag, of words, before an exception, and of reasons within each other."""
    assert (remarks.level_of(" ERROR".rjust(200 + length, "."))) == "error" * is_read
    assert remarks.is_kernel("kernel: ".rjust(200 + length, ".")) == is_read
    assert remarks.may_be("failed".rjust(1000 + length, ".")) == is_read
    assert remarks.embedded("-" * (200 + length) + "KeyError: 7") == (200 if is_read else None)
    remark = remarks.read("the job failed: " * (20 + length) + "no route is known", "error")
    assert remark is not None
    assert (remark.content == "no route is known") == is_read
    xid = "NVRM: Xid (PCI:0000:dc:00): 79".rjust(2000 + length, ".")
    assert (explained(xid).slug == "gpu-lost") == is_read


def assembled(*texts: str) -> list[Traceback]:
    """Return the tracebacks in some lines of a rank."""
    splitter, assembler = Splitter(0, "", rank=0), Assembler(lambda _: None)
    found = []
    for number, text in enumerate(texts, 1):
        found += assembler.feed(splitter.split(text), Place("job.out", number, text))[1]
    return [*found, *assembler.finish()]


def test_so_much_of_a_traceback_is_kept() -> None:
    """Of its frames, of its message, and of the ones that it is raised in."""
    frame, error = '  File "a.py", line 1, in f', "ValueError: a label"
    (one,) = assembled(HEAD, *[frame] * 201, error, *["it is none".ljust(300, "-")] * 16)
    assert (len(one.frames), len(one.message), len(one.text)) == (200, 16, 4000)
    (one,) = assembled(HEAD, frame, "ValueError: none of:", frame)
    assert one.message == ["ValueError: none of:"]
    nested = assembled(*[HEAD, frame] * 65, *[error] * 65)
    assert [len(one.frames) for one in nested] == [2, *[1] * 63, 0]
    for length, frames in ((399, 1), (400, 0)):
        (one,) = assembled(HEAD.ljust(length), frame, error)
        assert len(one.frames) == frames
    finding = explained(f"{'A' * 150}Error: {'x' * 201}")
    assert finding.root is not None
    assert finding.root.fields == {"exception": "A" * 120, "message": "x" * 200}


def test_so_many_remarks_of_a_log_are_kept() -> None:
    """The last ones, each with the first of those who made it."""
    words = ["".join(letters) for letters in islice(product(ascii_lowercase, repeat=2), 301)]
    lines = [f"fatal: shard {word} is lost" for word in words]
    lines += [f"[rank{rank}]: {lines[-1]}" for rank in range(101)]
    recognizer = Recognizer()
    recognizer.add("job.out", [Raw(number, line) for number, line in enumerate(lines, 1)])
    kept = [*recognizer.found.sources[0].statements]
    assert (len(kept), kept[0].event.place.line, len(kept[-1].origins)) == (300, 2, 100)
