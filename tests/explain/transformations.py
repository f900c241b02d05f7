"""Jobs that fail as no log has them, and what people and collectors do to logs: each keeps the
truth.

A drawn job has hosts of some convention, processes that say in some way who they are, a fault of
one of them, victims, and what its launcher prints of that. `transformed` does to its logs, or to
any others, what changes neither the cause nor whose it is.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Files = Mapping[str, Sequence[str]]

HOSTS: dict[str, Callable[[int], str]] = {
    "address": lambda n: f"10.4.7.{n + 11}",
    "cloud": lambda n: f"ip-10-0-3-{n + 17}.ec2.internal",
    "numbered": lambda n: f"gpu-a-{n + 1:02d}",
    "uppercase": lambda n: f"GPU-A-{n + 1:02d}",
    "long number": lambda n: f"nid{n + 1234:06d}",
    "qualified": lambda n: f"dgx-h100-{n + 7:02d}.cluster.example.org",
    "rack": lambda n: f"r{n + 1:02d}c1-u12",
    "instance": lambda n: f"compute-st-p5-48xlarge-{n + 1}",
    "short": lambda n: f"jz{n + 21}",
    "pool": lambda n: f"gke-pool-h100-1a2b3c4d-{'xyzw'[n % 4]}{n}z2",
}
"""Names of hosts as sites give them."""

STACK = ("Traceback (most recent call last):", '  File "/job/train.py", line 88, in main',
         "    loss = step(batch)")  # fmt: skip
MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total "
    "capacity of 79.11 GiB of which 1.03 GiB is free."
)
FAULTS = (
    ("cuda-oom", (*STACK, MEMORY)),
    ("child-failed", (*STACK, "KeyError: 'tokens'")),
    ("disk-full", (*STACK, "OSError: [Errno 28] No space left on device: '/scratch/ckpt/x.pt'")),
    ("cuda-fault", (*STACK, "RuntimeError: CUDA error: an illegal memory access was encountered")),
    ("child-failed", ("[loader] shard 17 is truncated: got 4096 bytes - cannot continue",)),
)
"""Slugs, and what the culprit prints."""
ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:3353, remote process exited or there was a network error, NCCL version 2"
)
REASON = (
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
)
LOST = (ERROR, REASON)
"""What a victim prints."""
CHATTER = (
    "step {n} | loss 2.{n} | lr 1e-4 | 1.2 s/it",
    "[INFO] iteration {n}/1000 loss=2.{n} grad_norm=1.2",
    "Epoch 1:  {n}%|██ | {n}/100 [00:{n:02d}<01:00,  1.2it/s]",
    "it=60{n:02d} bce=0.128 qps=9k",
    "INFO train: shard {n} ready",
    "étape {n} | perte 2.{n}",
)
SEATS = (
    "rank={rank} local_rank={local} pid={pid} host={host} device=cuda:{local}",
    "| distributed init (rank {rank}, local {local}, world {world}, node {host})",
    "{host}:{pid}:7 [{local}] NCCL INFO comm 0x5e rank {rank} nranks {world} busId 1b000 - Init",
    "[init] rank {rank}/{world} (local {local}) on {host}, pid {pid}",
    "worker started: global_rank={rank}, local_rank={local}, hostname={host}, pid={pid}",
    None,
)
"""How a process says which rank it is and where; not at all."""
RULE = "=" * 60
SUMMARY = (
    "failed (exitcode: 1) local_rank: {local} (pid: {pid}) of binary: /opt/bin/python",
    RULE, "/job/train.py FAILED", "Failures:", "  <NO_OTHER_FAILURES>",
    "Root Cause (first observed failure):", "[0]:", "  time      : 2026-02-03_03:37:43",
    "  host      : {host}", "  rank      : {rank} (local_rank: {local})",
    "  exitcode  : 1 (pid: {pid})", "  error_file: <N/A>", RULE,
)  # fmt: skip
LAUNCH = "[2026-02-03 03:37:43,123] [{}] [launch.py:325:sigkill_handler] "
LAUNCHERS: dict[str, Sequence[str]] = {
    "torchrun": SUMMARY,
    "srun": ("srun: error: {host}: task {rank}: Exited with exit code 1",
             "srun: launch/slurm: _step_signal: Terminating StepId=77.0"),
    "deepspeed": (LAUNCH.format("INFO") + "Killing subprocess {pid}",
                  LAUNCH.format("ERROR") + "['python', 't.py'] exits with return code = 1"),
    "entrypoint": ("entrypoint: trainer exited with status 1",),
    "none": (),
}  # fmt: skip
"""What the culprit's launcher prints of it."""
COLLECTORS: dict[str, tuple[str, str]] = {
    "torch": ("job.out", "[rank{rank}]: "),
    "tee": ("node{node}.out", "[default{local}]:"),
    "srun -l": ("job.out", "{rank}: "),
    "mpirun": ("job.out", "[1,{rank}]<stderr>:"),
    "ray": ("job.out", "(Trainer pid={pid}, ip={host}) "),
    "pdsh": ("job.out", "{host}: [rank{rank}]: "),
    "compose": ("job.out", "{host} | [rank{rank}]: "),
    "pdsh, stamped": ("job.out", "{host}: {time} [rank{rank}]: "),
    "a file each": ("rank{rank}.log", ""),
    "records": ("job.out", ""),
    "Hydra": ("job.out", "[{rank}]: "),
    "a name and a number": ("job.out", "rank{rank}: "),
    "a path": ("job.out", "{host}/rank{rank}: "),
    "a letter": ("job.out", "{time} {host} r{rank:02d} "),
    "settings": ("job.out", "[rank={rank} host={host}] "),
    "a node's number": ("job.out", "[node {node} rank {rank}] "),
    "a share": ("job.out", "{time} | (rank {rank}/{world}) "),
    "its own file": ("{host}/worker_{rank}.err", ""),
    "kubectl": ("job.out", "[pod/job-worker-{node}/pytorch] [rank{rank}]: "),
    "loki": ("job.out", '{time} {{pod="w-{node}", node="{host}"}} [rank{rank}]: '),
}
"""The file that has a process's lines, and what stands before each of them."""
SAY_HOST = {"ray", "records", "kubectl", "loki"}
COLUMNS_OF_HOSTS = {"pdsh", "compose", "pdsh, stamped", "a letter"}
"""Only if there are several."""
SAY_NO_RANK = {"tee", "ray", "its own file"}


@dataclass(frozen=True)
class Job:
    """A job that failed, and what its logs say of it."""

    name: str
    files: Files
    slug: str
    rank: int | None
    """The culprit; None if the logs do not say it."""
    host: str | None
    """Its host; None if the logs do not say it."""
    culprit: int


def drawn(seed: int) -> Job:
    """Return a job; the same for the same seed."""
    chance = random.Random(seed)
    convention, launcher, collector = (
        chance.choice(list(found)) for found in (HOSTS, LAUNCHERS, COLLECTORS)
    )
    per_node, nodes = chance.choice((2, 4, 8)), chance.choice((2, 3, 4))
    world = per_node * nodes
    culprit = chance.randrange(world)
    slug, fault = chance.choice(FAULTS)
    seat, chatter = chance.choice(SEATS), chance.choice(CHATTER)
    pid = chance.randrange(2000, 90000)
    who = [
        {
            "rank": rank, "node": rank // per_node, "local": rank % per_node, "world": world,
            "pid": pid + 10 * rank, "host": HOSTS[convention](rank // per_node),
        }
        for rank in range(world)
    ]  # fmt: skip
    events = [(1.0, rank, seat.format(**who[rank])) for rank in range(world) if seat]
    talkers = chance.choice(([0], range(world)))
    events += [(10.0 + n, rank, chatter.format(n=n)) for n in range(20) for rank in talkers]
    events += [(100.0, culprit, line) for line in fault]
    victims = chance.sample([rank for rank in range(world) if rank != culprit],
                            chance.choice((0, 1, world // 2, world - 1)))  # fmt: skip
    events += [(101.0 + chance.random(), rank, line) for rank in victims for line in LOST]
    files: dict[str, list[str]] = defaultdict(list)
    if collector == "kubectl":
        files["job.out"] = [
            f"job-worker-{node}   1/1   Running   0   16m   10.2.9.{node + 12}   "
            f"{HOSTS[convention](node)}   <none>"
            for node in range(nodes)
        ]
    for when, rank, text in sorted(events, key=lambda event: event[0]):
        time = f"2026-02-03T03:{30 + int(when) // 60:02d}:{int(when) % 60:02d}.000Z"
        name, prefix = COLLECTORS[collector]
        line = prefix.format(time=time, **who[rank]) + text
        if collector == "records":
            record = {"ts": time, "host": who[rank]["host"], "rank": rank, "msg": text}
            line = json.dumps(record)
        files[name.format(**who[rank])].append(line)
    own = COLLECTORS[collector][0].format(**who[culprit])
    end = "job.out" if "{rank}" in COLLECTORS[collector][0] else own
    files[end] += [line.format(**who[culprit]) for line in LAUNCHERS[launcher]]
    is_told = launcher == "torchrun" or bool(seat)
    several = len({rank // per_node for _, rank, _ in events}) > 1
    has_host = collector in SAY_HOST or (collector in COLUMNS_OF_HOSTS and several)
    return Job(
        f"{seed}: {convention}, {collector}, {launcher}, {seat}, {len(victims)} victims",
        files, slug,
        culprit if is_told or collector not in SAY_NO_RANK else None,
        str(who[culprit]["host"]) if is_told or has_host else None, culprit,
    )  # fmt: skip


MARKS = (
    "{n}:", "slurm-4711.out:{n}:", "{n:>6}  ", "{n:>6}\t", "    ", "\t", "> ", "| ", "[10:00:00] ",
    "10:00:00.123 ", "Jan  5 10:00:00 | ", "05.01.2026 10:00:00 ", "\x1b[32m", "- ",
)  # fmt: skip
"""What people and programs put before each line that says nothing: numbers, quotes, dates."""
COLUMNS = ("gpu-7: ", "trainer  | ", "trainer-abc12 pytorch ")
"""A single name before each line: it may be the program's."""


def marked(files: Files, mark: str) -> Files:
    """Return logs with a mark before each line."""
    return {
        name: [mark.format(n=number) + line for number, line in enumerate(lines, 1)]
        for name, lines in files.items()
    }


def recorded(files: Files, _chance: random.Random) -> Files:
    """Return logs as a container's runtime keeps them, in JSON; what JSON has stays as it is."""
    return {
        name: [
            line if line.startswith("{") else json.dumps({"log": line + "\n", "stream": "stderr"})
            for line in lines
        ]
        for name, lines in files.items()
    }


def begun(files: Files, chance: random.Random) -> Files:
    """Return logs that begin with what a batch script prints."""
    head = ["+ srun --nodes 4 python train.py", "Mon Jan  5 10:00:00 UTC 2026", "loading modules"]
    name = chance.choice(list(files))
    return {**files, name: [*head, *files[name]]}


def chatted(files: Files, chance: random.Random) -> Files:
    """Return logs in which processes say at their start what they load."""
    name = chance.choice(list(files))
    lines = [f"INFO: loaded shard {number} of 128" for number in range(chance.randrange(5, 60))]
    return {**files, name: [*lines, *files[name]]}


def framed(files: Files, _chance: random.Random) -> Files:
    """Return logs with empty lines at their beginning and end."""
    return {name: ["", *lines, ""] for name, lines in files.items()}


def renamed(files: Files, hosts: Sequence[str], convention: str) -> tuple[Files, dict[str, str]]:
    """Return logs with hosts of another convention, and the new name of each; addresses stay
    addresses.
    """
    new = {
        host: f"10.99.{number}.7" if _is_address(host) else HOSTS[convention](number)
        for number, host in enumerate(sorted(hosts, key=len, reverse=True))
    }
    words = {short: name for host, name in new.items() for short in (host, _short(host))}
    one = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    find = re.compile(rf"(?<![\w.-])(?:{one})(?![\w-]|\.\w)")
    return {
        name: [find.sub(lambda match: words[match[0]], line) for line in lines]
        for name, lines in files.items()
    }, new


def _is_address(host: str) -> bool:
    return re.fullmatch(r"[\d.]+", host) is not None


def _short(host: str) -> str:
    return host if _is_address(host) else host.partition(".")[0]


def transformed(files: Files, chance: random.Random) -> Iterator[tuple[str, Files]]:
    """Return what logs become by some of the transformations, one after another."""
    for mark in (*MARKS, *COLUMNS):
        yield repr(mark), marked(files, mark)
    for steps in ((recorded,), (begun,), (chatted,), (framed, chatted), (begun, recorded)):
        found = files
        for step in steps:
            found = step(found, chance)
        yield " ".join(step.__name__ for step in steps), found
