"""Nothing is claimed of logs of runs that go well, however much they look like trouble."""

# ruff: noqa: ISC004 - one item is one line of a log
from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from dshealthd.explain import progress
from dshealthd.explain.patterns import load
from dshealthd.explain.prefilter import bare
from dshealthd.explain.recognition import Recognizer
from dshealthd.explain.templates import Templates
from tests.explain.explaining import explained, explained_paths, explained_text
from tests.explain.test_genuine import runs
from tests.explain.variants import variants

MEGABYTES = int(os.environ.get("DSHEALTHD_HEALTHY_MEGABYTES", "1"))
"""Fifty take a minute or two, as nearly every line of the noise is one that patterns look at."""

CHATTER = [
    "{{'loss': 2.{n}, 'grad_norm': 0.{n}, 'learning_rate': 1e-05, 'epoch': 0.{s}}}",
    "\r 12%|█▏        | {n}/800000 [00:03<00:26,  1.79s/it]\r{{'loss': 2.{n}, 'grad_norm': 0.{n}}}",
    ('{{"time": "2026-01-05T10:00:{s:02d}Z", "level": "info", "message": "loss 2.{n} grad_norm '
     '0.{s}"}}'),
    " [2026-01-05 10:00:{s:02d}.123456] iteration {n:8d}/  100000 | consumed samples: {n:12d} | "
    "elapsed time per iteration (ms): 1234.{s} | throughput per GPU (TFLOP/s/GPU): 412.{s} | "
    "learning rate: 1.0E-04 | global batch size:   512 | lm loss: 2.{n}E+00 | loss scale: 1.0 | "
    "grad norm: 0.{s} | number of skipped iterations:   0 | number of nan iterations:   0 |",
    "(TaskRunner pid={n}) step:{n} - actor/entropy:0.{n} - actor/kl_loss:0.0{s} - "
    "actor/pg_loss:-0.0{s} - actor/grad_norm:0.{n} - perf/mfu/actor:0.3{s} - timing_s/step:{s}.1",
    "(SGLangEngine pid={n}) [2026-01-05 10:00:{s:02d} TP{g}] Decode batch. #running-req: {s}, "
    "#token: {n}, token usage: 0.{s}, cuda graph: True, gen throughput (token/s): {n}.{s}",
    "[2026-01-05 10:00:{s:02d} TP{g}] Prefill batch. #new-seq: 1, #new-token: {n}, #cached-token: "
    "0, #running-req: {s}, #queue-req: 0",
    "INFO 01-05 10:00:{s:02d} [loggers.py:118] Engine {n:03d}: Avg prompt throughput: {n}.1 "
    "tokens/s, Running: {s} reqs, Waiting: 0 reqs, GPU KV cache usage: 2.{s}%",
    "[rank{g}]:[titan] 2026-01-05 10:00:{s:02d},123 - root - INFO - step: {n}  loss:  2.{n}  "
    "grad_norm:  0.{s}  memory: 61.{s}GiB(64.00%)  tps: {n}  tflops: 412.{s}  mfu: 41.{s}%",
    "[2026-01-05 10:00:{s:02d},456] [INFO] [logging.py:96:log_dist] [Rank 0] step={n}, "
    "skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]",
    "[2026-01-05 10:00:{s:02d},456] [INFO] [config.py:1003:print]   nan_check "
    "................. error_if_nan",
    "check_for_nan_in_loss_and_grad ............. True",
    "Epoch {s}: 100%|██████████| {n}/800000 [00:03<00:26, 11.{s}it/s, v_num=0, train_loss=2.{n}]",
    "gpu-{h}:{n}:{n} [{g}] NCCL INFO Channel {s:02d}/0 : {g}[{g}] -> 7[7] via P2P/CUMEM/read",
    "gpu-{h}:{n}:{n} [{g}] NCCL INFO [Service thread] Connection closed by localRank {g}",
    'INFO:     10.0.0.{h}:{n} - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "memory allocated: {n} MB, out of memory margin ok",
    "error_rate: 0.{n}, failures: 0, timeouts: 0, exit code 0",
]  # fmt: skip
"""What healthy trainings and servers print at every step: transformers, Megatron-LM, verl, SGLang,
vLLM, torchtitan, DeepSpeed, Lightning, NCCL."""

NOISE = [
    *CHATTER,
    "[rank{g}]:[I105 10:00:{s:02d}.1 ProcessGroupNCCL.cpp:2314] [PG ID 0 PG GUID 0(default_pg) "
    "Rank "
    "{g}] NCCL Work update periodic: last enqueued NCCL work: {n}, last completed NCCL work: {n}.",
    "[2026-01-05 10:00:{s:02d},123] [WARNING] [stage3.py:2069:step] {n} pytorch allocator "
    "cache flushes since last step. this happens when there is high memory pressure.",
    "[2026-01-05 10:00:{s:02d},456] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] "
    "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "[2026-01-05 10:00:{s:02d},456] [INFO] [config.py:1003:print]   fp16_enabled "
    "................. False",
    "gpu-{h}:{n}:{n} [{g}] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.{h}<0>",
    "gpu-{h}:{n}:{n} [{g}] NCCL INFO comm 0x55d{n} rank {g} nranks 8 cudaDev {g} nvmlDev {g} "
    "busId 1b000 commId 0x{n} - Init COMPLETE",
    "gpu-{h}:{n}:{n} [{g}] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.",
    "gpu-{h}:{n}:{n} [{g}] NCCL INFO misc/socket.cc:835 -> 3",
    "gpu-{h}:{n}:{n} [{g}] NCCL INFO socketPollConnect: connect returned Connection refused, "
    "retrying (1/34) after sleep for 100 msec",
    "[W105 10:00:{s:02d}.1 socket.cpp:759] [c10d] The client socket has failed to connect to "
    "[gpu-0]:29500 (errno: 111 - Connection refused).",
    "[W105 10:00:{s:02d}.1 socket.cpp:426] [c10d] The server socket has failed to bind to "
    "[::]:29500 (errno: 98 - Address already in use).",
    "[rank{g}]:[W105 10:00:{s:02d}.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: "
    "destroy_process_group() was not called before program exit, which can leak resources.",
    "[rank{g}]:[W105 10:00:{s:02d}.1 TCPStore.cpp:125] [c10d] recvValue failed on "
    "SocketImpl(fd=3, addr=[localhost]:41, remote=[localhost]:29500): Failed to recv, got 0 "
    "bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "/opt/env/lib/python3.11/site-packages/torch/utils/checkpoint.py:460: UserWarning: "
    "torch.utils.checkpoint: please pass in use_reentrant=True or use_reentrant=False explicitly.",
    "/opt/env/lib/python3.11/site-packages/x.py:10: FutureWarning: In a future release this "
    "will raise ValueError: bad argument",
    "  warnings.warn('CUDA initialization: The NVIDIA driver on your system may be too old')",
    "WARNING:root:Retrying after error: HTTP 503 Service Unavailable",
    "step {n}/800000 | loss 2.{n} | 0.{s} s",
    "lm loss: 2.{n} | loss scale: 32768.0 | grad norm: nan | number of skipped iterations: 1 "
    "| number of nan iterations: 0 |",
    "Saving model checkpoint to /ckpt/global_step{n}",
    "[rank{g}]: Process rank: {g}, device: cuda:{g}, n_gpu: 1, distributed training: True",
    "gpu-{h} kernel: NVRM: Xid (PCI:0000:3b:00): 63, pid=1, name=python, Row Remapper: New "
    "row marked",
    "resource_tracker: There appear to be {n} leaked semaphore objects to clean up at shutdown",
]  # fmt: skip


@pytest.mark.parametrize("line", CHATTER)
def test_chatter_of_healthy_runs_is_not_examined(line: str) -> None:
    """What every step of a training prints must cost no more than any other line: no pattern is
    tried on it, except, for its values alone, those of values that a training reports.
    """
    text = line.format(n=4711, s=17, h=3, g=5)
    tried, _ = load().candidates(bare(text))
    assert [pattern.id for pattern in tried if pattern.role != "loss"] == []
    assert len(tried) <= 3
    find = Templates()
    block = "\n".join(line.format(n=n, s=n % 60, h=n % 8, g=n % 8) for n in range(1000)) + "\n"
    assert list(find(block.encode())) == []


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': nan, 'grad_norm': 0.4, 'learning_rate': 1e-05}",
        "\r 12%|█▏ | 1/8 [00:03<00:26,  1.79s/it]\r{'loss': 2.1, 'grad_norm': nan}\r",
        '{"message": "loss \\"nan\\""}',
        "step: 4  loss: \x1b[31mnan\x1b[0m",
        "\x1b[1mCUDA\x1b[0m out of \x1b[31mmemory\x1b[0m. Tried to allocate 2.00 GiB",
        '{"message": "\\"nvme_path\\" in DeepSpeed Config cannot be None"}',
        "\r  1%| | 1/9 [00:01<00:09]OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, "
        "reducing to 1\r  2%| | 2/9",
    ],
)
def test_what_matters_is_found_among_chatter(line: str) -> None:
    """The same lines with a NaN are examined, and errors in records and in colors."""
    find = Templates()
    before = "\n".join(chatter.format(n=1, s=1, h=1, g=1) for chatter in CHATTER) + "\n"
    assert list(find(f"{before}{line}\n{before}".encode())) == [len(before.encode())]


def noise(lines: int, seed: int) -> str:
    """Return the lines of a run that goes well, in an order of their own."""
    chance = random.Random(seed)
    texts = []
    for number in range(lines):
        line = chance.choice(NOISE)
        texts.append(
            line.format(n=number, s=number % 60, h=chance.randrange(8), g=chance.randrange(8))
        )
    return "\n".join([*texts, f"step {lines}/800000 | loss 2.1 | 0.3 s\n"])


@pytest.mark.parametrize("seed", range(2))
def test_warnings_of_healthy_runs_are_no_failure(seed: int, tmp_path: Path) -> None:
    """DeepSpeed, NCCL INFO, tqdm, loss scaling, retries: thousands of lines, and no claim."""
    finding = explained_text(tmp_path, noise(4000, seed))
    assert finding.outcome == "nothing", (finding.slug, finding.statement, finding.proof)


def test_an_error_that_the_run_went_on_after_is_no_cause(tmp_path: Path) -> None:
    """A batch that was skipped for lack of memory is told, and is not why a later run ended."""
    caught = (
        "ERROR skipped a batch\nTraceback (most recent call last):\n"
        '  File "/srv/train.py", line 7, in step\n    loss.backward()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    steps = "".join(f"step {number} | loss 2.1\n" for number in range(40))
    (tmp_path / "job.out").write_text(steps + caught + steps)
    assert explained_paths(tmp_path).outcome == "nothing"
    (tmp_path / "job.out").write_text(steps + caught + steps + "\nOSError: [Errno 28] No space "
                                      "left on device: '/ckpt/a'\n")  # fmt: skip
    finding = explained_paths(tmp_path)
    assert finding.slug == "disk-full"
    assert any("the job continued" in reason for reason in finding.against)


@pytest.mark.parametrize(
    ("form", "count", "outcome"),
    [
        ("[10:00:49] it {:5d}/7000 psnr=18.00 lr=1.00e-03", 10, "nothing"),
        ("[10:00:49] it {:5d}/7000 psnr=18.00 lr=1.00e-03", 9, "found"),
        ("[10:00:49] try {:5d}/7000 of the same", 10, "found"),
        ("[10:00:49] batch {} of the probe", 10, "nothing"),
    ],
)
def test_a_process_that_works_on_had_caught_its_error(form: str, count: int, outcome: str) -> None:
    """As a search for the batch size that fits: iterations count, by whatever values they have."""
    caught = (
        "probing batch size: 64",
        "Traceback (most recent call last):",
        '  File "/srv/train.py", line 7, in step',
        "    loss.backward()",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    )
    assert explained(*caught, *map(form.format, range(count))).outcome == outcome


IGNORED = (
    "Exception ignored in: <function Pool.__del__ at 0x7f2b1c0d5d00>\n"
    "Traceback (most recent call last):\n"
    '  File "/usr/lib/python3.12/multiprocessing/pool.py", line 271, in __del__\n'
    "    self._change_notifier.put(None)\n"
)


def test_an_exception_that_python_ignores_is_no_cause(tmp_path: Path) -> None:
    """A destructor's exception ends nothing; what it says of a disk or a GPU still counts, and so
    does the exception after it.
    """
    done = (
        f"step 8 | loss 2.1\nTraining finished.\n{IGNORED}OSError: [Errno 9] Bad file descriptor\n"
    )
    assert explained_text(tmp_path, done).outcome == "nothing"
    own = f"{IGNORED}OSError: [Errno 9] Bad file descriptor\n\nValueError: the cause\n"
    assert explained_text(tmp_path, own).statement == "ValueError: the cause"
    broken = f"step 8 | loss 2.1\n{IGNORED}OSError: [Errno 5] Input/output error: '/ckpt'\n"
    assert explained_text(tmp_path, broken).slug == "checkpoint-path"


@pytest.mark.parametrize(
    ("first", "last", "outcome"),
    [
        ("tool.VersionException: >- compiler 7 is no 12", "Exception ignored in: <f>", "found"),
        ("KeyError: 'no such shard'", "/a.py:3: UserWarning: BrokenPipeError in a pool", "found"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "ValueErrors: none", "nothing"),
    ],
)
def test_what_a_process_still_says_is_no_part_of_its_exception(
    first: str, last: str, outcome: str
) -> None:
    """Each line of a rank has its prefix, so that those of a message and others look alike."""
    lines = ["Traceback (most recent call last):", '  File "/a.py", line 3, in f', first, last]
    assert explained(*(f"[rank0]: {line}" for line in lines)).outcome == outcome


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("Job 'raysubmit_a1' succeeded", "nothing"),
        ("it succeeded", "found"),
        ("toolkit INFO Reporting training SUCCESS", "nothing"),
        ("toolkit INFO Reporting training success rates", "found"),
        ("reached max_steps=900, saving", "nothing"),
        ("max steps reached: 900", "nothing"),
        ("reached 900 steps, exiting", "nothing"),
        ("reached 900 retries, exiting", "found"),
        ("JobState=COMPLETED Reason=None", "nothing"),
        ("JobState=COMPLETING Reason=None", "found"),
    ],
)
def test_a_job_that_succeeded_had_no_failure(tmp_path: Path, end: str, outcome: str) -> None:
    """What was wrong before ended nothing, however few lines came after it."""
    text = f"step 8 | loss 2.1\nValueError: shard 7 has no rows, skipped\n{end}\n"
    assert explained_text(tmp_path, text).outcome == outcome


@pytest.mark.parametrize(
    ("text", "is_one"), [("step 4711.0 ON n1", False), ("step 4711. Next", True)]
)
def test_a_step_of_slurm_is_no_progress(text: str, *, is_one: bool) -> None:
    """Its number is the job's and the step's."""
    assert (progress.find(text) is not None) is is_one


def test_a_warning_after_a_good_end_is_none(tmp_path: Path) -> None:
    """Of processes that stop in some order."""
    late = "[rank3]:[W502 02:40:00.1 CudaIPCTypes.cpp:16] Producer process has been terminated"
    store = (
        "[rank6]:[W729 10:15:17.5 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=76, "
        "addr=[localhost]:60950, remote=[localhost]:29500): Connection reset by peer"
    )
    ends = {
        "training finished": "nothing",
        "goodbye": "undecided",
        "training finished\nvalidation loss: 2.0": "nothing",
        "training finished" + 10 * "\nstep 9 | loss 2.0": "undecided",  # of a stage
    }
    for end, outcome in ends.items():
        for line in (late, store):
            text = f"step 8 | loss 2.1\n{end}\n{line}\n"
            assert explained_text(tmp_path, text).outcome == outcome


def test_lines_of_progress_are_no_rest_of_a_line_before(tmp_path: Path) -> None:
    """Where something stands before all of them that is no known prefix."""
    steps = [f"01:{minute}:00 [0] step {minute} loss 4.6" for minute in range(10, 40)]
    group = "[rank0]:[W502 01:04:00.1 ProcessGroupNCCL.cpp:4] [PG ID 0 Rank 0]  using GPU 0"
    lost = "slurmstepd: error: *** STEP 6.0 ON gx11 CANCELLED AT 2026-05-02T00:43:02 DUE TO {} ***"
    lines = [*steps[:8], lost.format("JOB REQUEUE"), f"01:04:00 [0] {group}", *steps[8:]]
    assert explained_text(tmp_path, "\n".join(lines) + "\n").outcome == "nothing"


def test_a_needle_in_much_noise_is_found(tmp_path: Path) -> None:
    """The finder leaves out lines, and never one that matters."""
    text = noise(6_000, 9)
    needle = (
        "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5"
    )
    for where in (0.02, 0.5, 0.98):
        cut = text.index("\n", int(len(text) * where)) + 1
        path = tmp_path / "job.out"
        path.write_text(text[:cut] + needle + "\n" + text[cut:] if where > 0.9 else
                        text[:cut].replace("step ", "at ") + needle + "\n")  # fmt: skip
        found = Recognizer()
        found.add(str(path))
        places = [event.place.line for event in found.found.events if event.slug == "cuda-oom"]
        assert places == [text[:cut].count("\n") + 1]


def test_megabytes_of_healthy_runs_are_no_failure(tmp_path: Path) -> None:
    """What torch and DeepSpeed printed in runs that went well, and the noise, over and over."""
    healthy = [
        "\n".join(line for _, _, line in run["lines"])
        for run in runs().values()
        if run["fault"] == "none"
    ]
    assert len(healthy) >= 5
    block = "\n".join([*healthy, noise(20_000, 7)]).encode() + b"\n"
    path = tmp_path / "job.out"
    with path.open("wb") as file:
        for _ in range(MEGABYTES * 1_000_000 // len(block) + 1):
            file.write(block)
    assert path.stat().st_size >= MEGABYTES * 1_000_000
    finding = explained_paths(path)
    assert finding.outcome == "nothing", (finding.slug, finding.statement, finding.proof)


@pytest.mark.parametrize(
    "key", sorted(key for key, run in runs().items() if run["fault"] == "none")
)
def test_no_claim_on_a_genuine_run_that_went_well(key: str, tmp_path: Path) -> None:
    """Under each launcher, with and without DeepSpeed's engine, in every form."""
    for number, variant in enumerate(variants(runs()[key], 3)):
        finding = explained_paths(variant.write(tmp_path / str(number)))
        assert finding.outcome == "nothing", (variant.name, finding.slug, finding.proof)


def test_an_exception_stands_where_its_line_is() -> None:
    """A process that falls silent after an exception has not failed at the end of the log."""
    finding = explained(
        "(reward pid=612) Traceback (most recent call last):",
        '(reward pid=612)   File "/app/reward.py", line 40, in grade',
        "(reward pid=612) TokenError: unexpected end of a statement",
        *(f"(main pid=111) step {number}/16 reward 0.3" for number in range(3)),
        "(main pid=111) Training done!",
    )
    assert finding.outcome == "nothing"
