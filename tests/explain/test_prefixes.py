"""Lines of the kernel are found whatever stands before them."""

from __future__ import annotations

import random
from itertools import islice, product
from string import ascii_lowercase
from typing import Any

import pytest

from dshealthd.explain.events import Origin
from dshealthd.explain.facts import Recognized, SourceFacts
from dshealthd.explain.input import Raw
from dshealthd.explain.kinds import Kinds
from dshealthd.explain.ledger import Ledger
from dshealthd.explain.patterns import load
from dshealthd.explain.recognition import Recognizer
from dshealthd.explain.streams import HEAD, Line, Splitter
from dshealthd.explain.templates import Templates
from dshealthd.explain.tracebacks import Assembler
from dshealthd.linux import kernel_lines
from tests.explain.explaining import explained

LINES = sorted(
    {
        example
        for pattern in load().every
        for example in pattern.match
        if kernel_lines.event(example) or kernel_lines.xid(example) or kernel_lines.sxid(example)
    }
)
PREFIXES = [
    "    ", "\t", "> ", "| ", "* ", "1. ", "`", '"', "123:", "kern.log-", "/var/log/messages:17:",
    "kernel: ", "[  123.456789] ", "[ 123.456789][ T1234] ", "[    1.23] (2)[123:kworker] ",
    "[  +0.000005] ", "<4>", "<4>[  123.456789] ", "6,1234,5678,-;",
    "kern  :warn  : [   12.345678] ", "kern  :err   : [Mon Jan  5 10:00:00 2026] ",
    "[Mon Jan  5 10:00:00 2026] ", "Jan  5 10:00:00 gpu-1 ", "Jan  5 10:00:00 gpu-1 kernel: ",
    "Jan  5 10:00:00 gpu-1 kernel: [  123.456789] ", "2026-01-05T10:00:00+0000 gpu-1 kernel: ",
    "2026-01-05T10:00:00.123456+01:00 gpu-1 kernel: [ 1234.567890] ",
    "2026-01-05T10:00:00.123456+01:00 gpu-1 ", "2026/01/05 10:00:00 ", "01/05/2026 10:00:00 AM ",
    "05.01.2026 10:00:00 ", "23:07:26.123 ", "1767607200.123 ",
    "192.0.2.1: kern: warning: [2026-01-05T10:00:00.599716692Z]: ", "node-a  | ", "worker-0 app ",
    "[pod/worker-0/app] ", '{host="gpu-1",job="kernel"} ', "gpu-1 | CHANGED | rc=0 >> ",
    "gpu-1: ", "17: ", "[gpu-1] ", "c0-0c0s1n2 ", "host=gpu-1 msg=",
    "2026-01-05 10:00:00,123 INFO dmesg: ", "gpu-1 2026-01-05T10:00:00Z kernel ",
    "\x1b[33m[  123.456789] \x1b[0m",
]  # fmt: skip
"""Of dmesg, journalctl, syslog, grep, less, docker compose, stern, kubectl, Talos, Loki, ansible,
pdsh, srun, and of people."""
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
PARTS = [
    "gpu-7", "kernel", "warn", "10:00:00", "2026-01-05", "Jan 5", "12.5", "4711", "[4711]",
    "(stdout)", "<6>", "host=a", "rank3", "F", "…", "日志", "E", "->",
]  # fmt: skip
ENDS = ["", " ", ": ", " - ", " | ", ":", "]: ", ">", ", ", "\t", "='"]


def patterns_of(line: str) -> set[str]:
    """Return the patterns that a log of a single line matches."""
    recognizer = Recognizer()
    recognizer.add("job.out", [Raw(1, line)])
    return {event.pattern for event in recognizer.found.events}


def drawn(number: int) -> list[str]:
    """Return prefixes of one to four parts, as no list has them."""
    chance = random.Random(number)
    return [
        "".join(chance.choice(PARTS) + chance.choice(ENDS) for _ in range(chance.randrange(1, 5)))
        for _ in range(40)
    ]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_kernel_counts_after_any_prefix(line: str) -> None:
    """What the kernel prints cannot be mistaken, so nothing before it matters."""
    wanted = patterns_of(line)
    assert wanted
    for prefix in (*PREFIXES, *drawn(len(line))):
        assert patterns_of(prefix + line) == wanted, prefix


def test_the_lines_of_the_kernel_are_of_many_kinds() -> None:
    """The examples of patterns have Xids of several kinds, and events of most drivers."""
    assert len(LINES) > 12
    assert len(PREFIXES) > 28


@pytest.mark.parametrize(
    "line",
    [
        "+ dmesg -T | grep -E 'NVRM: Xid \\(PCI:[0-9a-f:]+\\): (48|79|94|95)'",
        '{"type": "permanent", "pattern": "NVRM: Xid \\\\(PCI:.*\\\\): 79, .*"}',
        "alert if the kernel log has `NVRM: Xid (PCI:...): 79` or `EXT4-fs error`",
        "watching for: NVRM: Xid, SXid (PCI:, Oops:, nvme timeout, Link is Down",
        "kernel.panic = 10, nmi_watchdog = 1, softlockup_panic = 0",
        "mlx5_core 0000:9a:00.0 ib3: Link up",
    ],
)
def test_what_only_speaks_of_the_kernel_s_lines_is_no_event(line: str) -> None:
    """Configurations, commands and help name no device and no number, as an event does."""
    assert explained("step 1 | loss 2.1", line, "step 2 | loss 2.0").outcome == "nothing"


ANYWHERE = [
    "123:", "slurm-4711.out:123:", "node-a  | ", "worker-0 \u203a pytorch ", "worker-0 pytorch ",
    "[pod/trainer-worker-3/pytorch] ", "2026-01-05T10:00:00.123456789Z ",
    "2026-01-05T10:00:00.123456789Z stderr F ", '{host="gpu-7", job="app"} ',
    '2026-01-05T10:00:00Z {app="trainer"} ', "Jan 05 10:00:00 gpu-7 kernel: ",
    "Jan  5 10:00:00 gpu-7 ", "Jan  5 10:00:00 gpu-7 python3[4711]: ",
    "Jan 05 10:00:00 gpu-7 slurmstepd[4711]: ", "<3>Jan  5 10:00:00 gpu-7 kernel: [12345.678901] ",
    "[12345.678901] ", "[Mon Jan  5 10:00:00 2026] ", "gpu-7 | CHANGED | rc=0 >> ", "gpu-7: ",
    "gpu-7.example.org: ", "3: ", "17: 3: ", "[1,3]<stderr>:", "[default3]:", "[rank3]: ",
    "[default3]:[rank3]: ", "2026-01-05 10:00:00,123 ", "2026-01-05 10:00:00,123 ERROR trainer: ",
    "01/05/2026 10:00:00 ", "05.01.2026 10:00:00 ", "10:00:00.123 ", "[10:00:00] ", "> ", "    ",
    "| ", "ERROR:__main__:", "[2026-01-05 10:00:00,123] [ERROR] ",
    "(Worker pid=4711, ip=192.0.2.4) ",
    "(EngineCore_0 pid=4711) ERROR 01-05 10:00:00 [core.py:700] ", "2026/01/05 10:00:00 ",
    'time="2026-01-05T10:00:00Z" level=error msg="',
]  # fmt: skip
"""Of grep, compose, stern, kubectl, CRI, Loki, journald, syslog, ansible, pdsh, srun, mpirun,
torch, loggers, dates of several countries, and quoting. None says that its line is only a warning:
an exception in one of those ended nothing."""


def found_in(prefix: str, example: str) -> set[str]:
    """Return the patterns that a log matches each of whose lines has a prefix."""
    recognizer = Recognizer()
    lines = enumerate(example.split("\n"), 1)
    recognizer.add("job.out", [Raw(number, prefix + line) for number, line in lines])
    return {event.pattern for event in recognizer.found.events}


@pytest.mark.parametrize("prefix", ANYWHERE)
def test_every_pattern_is_found_after_any_prefix(prefix: str) -> None:
    """What a pattern knows cannot be mistaken, so its own example needs no surroundings: all but
    bash's `Killed`, which is a word.
    """
    missed = [
        example
        for pattern in load().every
        for example in pattern.match
        if example != "Killed"
        and pattern.id in found_in("", example)
        and pattern.id not in found_in(prefix, example)
    ]
    assert missed == []


LOGGERS = [
    "2026-01-05 10:00:00,475 - trainer - INFO - [rank3]: ",
    "[2026-01-05 10:00:00] [INFO] [rank3]: ", "> [rank3]: ", "    [rank3]: ",
    "2026-01-05 10:00:00.123 | ERROR    | __main__:main:12 - ",
    "(RayWorkerVllm pid=7602) ERROR 01-05 10:00:00 ray_utils.py:45] ",
    "[2026-01-05 10:00:00,475][trainer][ERROR] - ",
    "[ERROR|trainer.py:1234] 2026-01-05 10:00:00,475 >> ", "[pod/train-0/worker] [rank3]: ",
    "2026-01-05T10:00:00.123456789Z stderr F [rank3]: ",
    "Jan  5 10:00:00.123456 gpu-1 train[4711]: [rank3]: ",
]  # fmt: skip
"""Of logging, loguru, vLLM, Hydra, transformers and quotations, and of collectors, before a
rank's."""


@pytest.mark.parametrize("prefix", [*ANYWHERE, *LOGGERS])
def test_a_traceback_is_read_after_any_prefix(prefix: str) -> None:
    """Its own head shows what stands before each of its lines."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/u/train.py", line 12, in main',
        "    load()",
        "ValueError: bad shard",
    ]
    finding = explained(
        *[f"starting {number}" for number in range(8)], *[prefix + x for x in lines]
    )
    assert finding.statement == "ValueError: bad shard at /home/u/train.py:12 in main"
    if "rank3" in prefix:
        assert finding.ranks == (3,)


UPLOAD = (
    "(Policy pid=20122, ip=10.44.2.13) Traceback (most recent call last):",
    '(Policy pid=20122, ip=10.44.2.13)   File "/app/save.py", line 4, in save',
    "(Policy pid=20122, ip=10.44.2.13) ShardError: the store is closed",
)
"""An exception of a process whose prefix names no rank."""


def test_a_process_says_its_rank_before_its_lines() -> None:
    """A process that puts its rank before one line has it in all its lines."""
    said = "(Policy pid=20122, ip=10.44.2.13) [rank 22] upload failed: the store is closed"
    assert explained(said, *UPLOAD).ranks == (22,)
    killed = "gpu-2 kernel: Out of memory: Killed process 20122 (python)"
    assert explained(said.replace("[rank 22] ", "[rank22]: "), killed).ranks == (22,)


def test_a_process_that_writes_for_several_ranks_has_none() -> None:
    """What a driver says of its workers is not its own rank."""
    said = [f"(Policy pid=20122, ip=10.44.2.13) [rank {rank}] ready" for rank in (21, 22)]
    assert explained(*said, *UPLOAD).ranks == ()


@pytest.mark.parametrize(("pid", "ranks"), [(655, ()), (2212, (2,))])
def test_a_summary_names_the_rank_of_no_other_process(pid: int, ranks: tuple[int, ...]) -> None:
    """Torchrun's summary names the rank of an exception only if it is of the same process."""
    finding = explained(
        f"(EngineCore pid={pid}) Traceback (most recent call last):",
        f'(EngineCore pid={pid})   File "/app/load.py", line 4, in load',
        f"(EngineCore pid={pid}) ShardError: no shard 7",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-03-11_08:34:27",
        "  host      : tr-4",
        "  rank      : 2 (local_rank: 2)",
        "  exitcode  : 1 (pid: 2212)",
        "  error_file: <N/A>",
        "============================================================",
    )
    assert finding.ranks == ranks


@pytest.mark.parametrize(("own", "host"), [(2, "c17"), (4, None)])
def test_a_launcher_of_many_hosts_adds_lines_of_its_own(own: int, host: str | None) -> None:
    """Hosts before most lines are a prefix, as those of pdsh, although its own lines have none."""
    finding = explained(
        "c91: loading the extension",
        *["+ pdsh -w 'c[17,91]' ./train.sh"] * own,
        "c17: loading the extension",
        "c17: panic: the shard is of another size",
        "c91: the others are gone",
    )
    assert finding.host == host


def test_names_in_a_column_have_one_form() -> None:
    """A driver's own name before a line is no host beside a column of another form."""
    finding = explained(
        "Jun 20 04:22:54 dgx-2 agent[2190]: tail rank=8 | step 222 loss 1.94",
        "Jun 20 04:23:24 dgx-1 agent[2214]: tail rank=0 | step 222 loss 1.98",
        "Jun 20 04:23:59 dgx-2 agent[2190]: tail rank=8 | step 226 loss 1.98",
        "Jun 20 04:24:31 dgx-2 kernel: nvidia-nvswitch2: SXid (PCI:0000:c7:00.0): 20034, Fatal, "
        "Link 41 LTSSM Fault Up",
    )
    assert finding.host == "dgx-2"


@pytest.mark.parametrize(("ranks", "kept"), [(4096, 4096), (4097, 1)])
def test_so_many_origins_are_remembered(ranks: int, kept: int) -> None:
    """All are forgotten beyond, so that a log of any number of ranks is read in bounded memory."""
    splitter = Splitter(0, "")
    lines = [splitter.split(f"[rank{rank:04}]: x") for rank in range(ranks)]
    assert [line.origin.rank for line in lines] == [*range(ranks)]
    (shape,) = {id(line.shape): line.shape for line in lines}.values()
    assert shape is not None
    assert len(shape.origins) == kept


@pytest.mark.parametrize(("number", "kept"), [(256, 256), (257, 1)])
def test_so_many_shapes_are_remembered(number: int, kept: int) -> None:
    """As many as are in half a MiB with their lines, so that any log is read in bounded memory."""
    splitter = Splitter(0, "")
    for first, second in islice(product(ascii_lowercase, repeat=2), number):
        splitter.split(f"{first}{second}".ljust(1024))
    assert len(splitter._shapes[None]) == kept


@pytest.mark.parametrize(
    ("known", "most"),
    [
        (Recognized().seats, 100_000),
        (SourceFacts("").origins, 10_000),
        (Assembler(print)._open, 4096),
    ],
)
def test_so_many_names_are_remembered(known: dict[Any, Any], most: int) -> None:
    """Logs may have any number of ranks, hosts, processes and reports."""
    for number in range(most + 1):
        known[number] = None
        known.setdefault(-number, None)
    assert len(known) == most


def test_so_many_events_are_kept() -> None:
    """And so many logs of one file are told apart."""
    recognizer, reports = Recognizer(), set[tuple[int, int, str]]()
    recognizer.add("all.log", (Raw(n, f"==> {n // 2} <==" if n % 2 else OOM) for n in range(2002)))
    assert len(recognizer.found.sources) == 1000
    (event,) = recognizer.found.events[:1]
    for number in range(100_001):
        recognizer.keep(event)
        Ledger._note(reports, (number, 0, ""))
    assert (len(recognizer.found.events), len(reports)) == (20_000, 100_000)


@pytest.mark.parametrize(("number", "kept"), [(256, 256), (257, 1)])
def test_so_many_kinds_of_lines_are_remembered(number: int, kept: int) -> None:
    """As many as are in 4 MiB with what a kind takes; then all are forgotten."""
    kinds = Kinds()
    for letters in islice(product(ascii_lowercase, repeat=2), number):
        line = Line(
            "".join(letters).ljust((1 << 14) - 512, "-"), Origin(), None, "", prefixed=False
        )
        kinds.of(line, "")
    assert len(kinds._known) == kept


@pytest.mark.parametrize(("number", "kept"), [(7332, 7332), (7333, 1)])
def test_so_many_templates_are_remembered(number: int, kept: int) -> None:
    """As many as are in 8 MiB with their entries, and none of more than a KiB."""
    find = Templates()
    words = islice(product(ascii_lowercase, repeat=3), number)
    find("\n".join("".join(letters).ljust(1024, "-") for letters in words).encode())
    assert len(find._known) == kept
    find(b"a" * 1025)
    assert len(find._known) == kept


@pytest.mark.parametrize(
    ("width", "number", "wrapped"),
    [(59, 2, False), (60, 2, True), (1000, 2, True), (1001, 2, False), (60, 1, False)],
)
def test_widths_at_which_logs_are_wrapped(width: int, number: int, *, wrapped: bool) -> None:
    """Terminals and loggers have between 60 and 1,000 columns; one full line shows nothing."""
    splitter = Splitter(0, "")
    splitter.learn(["x" * width, "and its rest"] * number)
    assert splitter._width == (width if wrapped else 0)


@pytest.mark.parametrize(("size", "taken"), [(127, True), (128, False)])
def test_what_is_taken_for_a_prefix(size: int, *, taken: bool) -> None:
    """What stands before a traceback's head, if it ends within the first 160 characters."""
    line = Splitter(0, "").split("-" * size + HEAD)
    assert (line.text == HEAD) is taken
    number = 8 + (not taken)
    assert (Splitter(0, "").split("[rank3]: " * number + "x").text == "x") is taken
