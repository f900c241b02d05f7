"""The probe worker, one rank: joins collectives, times them, checks sums, tells the agent its
stage.

One plain file on torch alone. It runs under the interpreter that training uses, as two kinds of
process:

- the *parent* has imported torch and has one thread. It forks workers when the agent asks, and
  never touches `torch.cuda`: a CUDA context
  does not survive a fork. If its torch starts threads of its own at import, it starts workers
  afresh instead of forking them.
- a *worker* is one rank: its own session, one round, then gone. It holds no listener but the
  sockets of its backend.

The agent's words to the parent are packets of JSON, with descriptors attached:

    ← {"ready": PID, "torch": …, …} or {"failed": REASON, "detail": …}
    → {"fork": N} + [channel, board]    ← {"forked": N, "pid": PID} + [pidfd]
    → {"reap": PID}                     ← {"reaped": PID, "status": WAIT STATUS}

A worker's channel carries frames: four bytes of length, big-endian, and JSON. Its first frame from
the agent is the job; then

    ← {"stage": STAGE}   ← {"timing": [OP, BYTES, SECONDS, BUS BANDWIDTH]}
    ← {"checksum": [LIBRARY, NUMBER]}
    ← {"end": OUTCOME, "stage": STAGE, "reason": SLUG, "detail": TEXT}
    ← {"id": N, "store": OP, "key": KEY, "value": BASE64 | INT | null, "timeout": SECONDS}
    → {"id": N, "value": …} or {"id": N, "error": TEXT}

The board is a small shared file: two counters (collectives entered, collectives left), which cost
no system call and still tell how far a rank came that can no longer speak, and after them what the
worker prints.

Everything about NCCL and CUDA in this file was written from their documentation and has not yet
been run on a GPU.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import gc
import json
import mmap
import os
import queue
import secrets
import signal
import socket
import statistics
import struct
import sys
import threading
import time
import traceback
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

LENGTH = struct.Struct(">I")
COUNTERS = struct.Struct("=QQ")
PACKET = 1 << 16
"""Largest packet between agent and parent, in bytes."""
PRIME = 4093
"""Period of the test pattern: below 2^12, so that sums over up to 4,096 ranks are exact in float32;
and prime, so that no two places whose
distance is a power of two, as those of a ring's chunks are, hold the same value.
"""
BATCH = 32 << 20
"""Bytes of buffers that are prepared before a run of timed repetitions, so that nothing else
happens between two of them.
"""
LINGER = 2.0
"""Seconds that a rank which is done waits for the others to be.

Its memory may still be read by them.
"""
DIED_WITH_PARENT = signal.SIGKILL
PR_SET_PDEATHSIG = 1


class StoreFailure(RuntimeError):
    """The agent could not carry out an operation of the rendezvous store."""


class VersionsDiffer(Exception):
    """The ranks do not run the same torch, so that their times mean nothing."""


class AgentChannel:
    """The worker's end of its channel.

    Progress goes out, store operations go there and back, from whatever thread asks.
    """

    def __init__(self, channel: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._stream = channel.makefile("rb")
        self._channel = channel
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._reader: threading.Thread | None = None

    def receive(self) -> dict[str, Any]:
        """Return the agent's next frame; raises EOFError when it has closed the channel."""
        head = self._stream.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise EOFError
        message: dict[str, Any] = json.loads(self._stream.read(LENGTH.unpack(head)[0]))
        return message

    def send(self, message: dict[str, Any]) -> None:
        """Send the agent one frame of the worker."""
        body = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            self._channel.sendall(LENGTH.pack(len(body)) + body)

    def stage(self, name: str) -> None:
        """Say that a stage of the worker begins; its deadline starts anew."""
        self.send({"stage": name})

    def ask(self, op: str, key: str, value: str | int | None, timeout: float) -> Any:
        """Have a store operation of the worker done and return its value; raises StoreFailure."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            # A queue for each request: torch and its backends ask from threads of their own, and
            # each waits for its answer alone.
            number = len(self._answers)
            self._answers[number] = answer
        self.send({"id": number, "store": op, "key": key, "value": value, "timeout": timeout})
        message = answer.get()
        if "error" in message:
            text = f"store: {op} of {key}: {message['error']}"
            raise StoreFailure(text)
        return message["value"]

    def _read(self) -> None:
        """Hand each of the agent's answers to the worker's thread that waits for it.

        At the end of the channel all are told.
        """
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self.receive()
                self._answers[message["id"]].put(message)
        for answer in self._answers.values():
            answer.put({"error": "the agent is gone"})


class StatusWriter:
    """The shared file that the agent reads when the worker can no longer speak."""

    def __init__(self, descriptor: int) -> None:
        """Map the counters, and let everything that is printed follow them."""
        self._map = mmap.mmap(descriptor, COUNTERS.size)
        self.entered = self.left = 0
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    def enter(self) -> None:
        """Count a collective that the worker begins."""
        self.entered += 1
        COUNTERS.pack_into(self._map, 0, self.entered, self.left)

    def leave(self) -> None:
        """Count a collective that the worker has left; on a GPU it is queued, not done."""
        self.left += 1
        COUNTERS.pack_into(self._map, 0, self.entered, self.left)


def agent_store(agent: AgentChannel, prefix: str, timeout: float) -> Any:
    """Return the worker's rendezvous store whose every operation is carried out by the agent."""
    import torch.distributed as dist

    class AgentStore(dist.Store):  # type: ignore[misc,name-defined] # torch exports it only where it is built with it
        """The operations that process groups need; binary values travel as base64."""

        def set(self, key: str, value: bytes | str) -> None:
            """Set a value in the agent's store, from the worker."""
            data = value.encode() if isinstance(value, str) else bytes(value)
            agent.ask("set", prefix + key, base64.b64encode(data).decode(), timeout)

        def get(self, key: str) -> bytes:
            """Return a value of the agent's store to the worker, when somebody has set it."""
            return base64.b64decode(agent.ask("get", prefix + key, None, timeout))

        def add(self, key: str, amount: int) -> int:
            """Add, from the worker, to a number of the agent's store and return the sum."""
            return int(agent.ask("add", prefix + key, amount, timeout))

        def check(self, keys: list[str]) -> bool:
            """Say to the worker whether all keys of the agent's store are set."""
            return all(agent.ask("check", prefix + key, None, timeout) for key in keys)

        def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
            """Return to the worker when all keys of the agent's store are set."""
            for key in keys:
                agent.ask(
                    "wait",
                    prefix + key,
                    None,
                    min(timeout, limit.total_seconds()) if limit else timeout,
                )

        def delete_key(self, key: str) -> bool:
            """Forget a key of the agent's store, for the worker."""
            return bool(agent.ask("delete", prefix + key, None, timeout))

    store = AgentStore()
    store.set_timeout(timedelta(seconds=timeout))
    return store


class RankRound:
    """One rank's part in one round."""

    def __init__(self, agent: AgentChannel, board: StatusWriter, job: dict[str, Any]) -> None:
        """Note the job; nothing of torch is touched yet."""
        self.agent, self.board, self.job = agent, board, job
        self.rank: int = job["rank"]
        self.size: int = job["size"]
        self.salt = 0
        self.group: Any = None
        self.device: Any = None
        self.stage = ""
        self.wrong: tuple[str, str] | None = None
        """Stage and words of the first wrong result.

        The round goes on all the same, so that the others learn whether theirs is right.
        """

    def run(self) -> None:
        """Go through the worker's stages; raises when the round ends in one of them."""
        import torch

        self.begin("store")
        torch.set_num_threads(1)
        prepare_environment(self.job)
        store = agent_store(self.agent, self.job["prefix"], self.job["timeout"])
        meet(store, self.job)
        self.begin("init")
        self.device = torch.device(self.job["device"])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.group = connect(store, self.job)
        self.reduce_and_check(4, 1)  # NCCL connects with the first collective only
        self.begin("warm_up")
        sizes = [size for size, _ in self.job["steps"]]
        for size in sizes:
            self.reduce_and_check(size, self.job["warm_up"])
        for size, repetitions in self.job["steps"]:
            self.begin("sizes")
            self.report(
                "all_reduce",
                size,
                self.reduce_and_check(size, repetitions),
                2 * (self.size - 1) / self.size,
            )
        if self.job["device_steps"]:
            self.begin("sizes")
            for op, size, seconds, wrong in device_steps(self.device, self.job["device_steps"]):
                self.note(wrong)
                self.report(op, size, seconds, 1.0)
            if libraries := reproducible(self.device):
                number, wrong = checksum(self.device, self.job["device_steps"])
                self.note(wrong)
                self.agent.send({"checksum": [libraries, number]})
        self.begin("verify")
        for size in sizes:
            self.reduce_and_check(size, 1)
        self.conclude("ok", "", "")
        linger(store, self.job)

    def begin(self, stage: str) -> None:
        """Enter a stage of the worker's rank."""
        self.stage = stage
        self.agent.stage(stage)

    def conclude(self, outcome: str, reason: str, detail: str) -> None:
        """Say how the rank's round ended; wrong data is worse than whatever came after it."""
        if self.wrong is not None:
            self.stage, detail = self.wrong
            outcome, reason = "corrupted", "wrong_data"
        self.agent.send({"end": outcome, "stage": self.stage, "reason": reason, "detail": detail})

    def report(self, op: str, size: int, seconds: list[float], factor: float) -> None:
        """Send the agent the median of an operation's times.

        A group of one has nothing to reduce, and no time worth keeping.
        """
        if factor:
            median = statistics.median(seconds)
            self.agent.send({"timing": [op, size, median, size / median * factor]})

    def reduce_and_check(self, size: int, repetitions: int) -> list[float]:
        """All-reduce the worker's buffers of `size` bytes, check every sum, and return the seconds
        of each repetition.
        """
        seconds: list[float] = []
        while len(seconds) < repetitions:
            count = min(repetitions - len(seconds), max(1, BATCH // size))
            salts = range(self.salt, self.salt + count)
            # Another pattern for each: a buffer that a collective has not touched would otherwise
            # hold the right sum of an earlier one.
            self.salt += count
            buffers = [pattern(self.rank, 1, salt, size).to(self.device) for salt in salts]
            calls = [functools.partial(all_reduce, self, buffer) for buffer in buffers]
            seconds += timed(self.device, calls)
            for salt, buffer in zip(salts, buffers):  # noqa: B905 - Python 3.9 has no strict
                expected = pattern(0, self.size, salt, size).to(self.device)
                self.note(difference(f"all_reduce of {size} bytes", buffer, expected))
        return seconds

    def note(self, wrong: str) -> None:
        """Keep what was wrong with the rank's sums first; an empty text says that nothing was."""
        if wrong and self.wrong is None:
            self.wrong = self.stage, f"rank {self.rank}: {wrong}"


def all_reduce(round_: RankRound, tensor: torch.Tensor) -> None:
    """Sum a worker's tensor over the group, in place; a GPU's stream waits, not the caller."""
    round_.board.enter()
    round_.group.allreduce([tensor]).wait()
    round_.board.leave()


def pattern(first: int, ranks: int, salt: int, size: int) -> torch.Tensor:
    """Return the sum of what `ranks` ranks from `first` on contribute.

    Integers that differ by rank, place and repetition.
    """
    import torch

    place = torch.arange(PRIME, dtype=torch.int64) * 31 + salt * 89
    period = torch.zeros(PRIME, dtype=torch.int64)
    for rank in range(first, first + ranks):
        period += (place + rank * 977) % PRIME
    count = max(1, size // 4)
    return period.to(torch.float32).repeat(-(-count // PRIME))[:count].contiguous()


def difference(what: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    """Say where two tensors of a worker first differ; empty if they do not."""
    import torch

    if torch.equal(found, expected):
        return ""
    wrong = (found != expected).flatten().nonzero()
    index = int(wrong[0])
    values = float(found.flatten()[index]), float(expected.flatten()[index])
    places = f"{len(wrong)} of {found.numel()} places, first at index {index}"
    return f"{what} is wrong in {places}: {values[0]!r}, must be {values[1]!r}"


def timed(device: torch.device, operations: Sequence[Callable[[], object]]) -> list[float]:
    """Run a worker's operations one after the other and return the seconds of each.

    By CUDA events on a GPU, by the clock elsewhere.
    """
    import torch

    if device.type == "cuda":
        event: Any = torch.cuda.Event
        events = [(event(enable_timing=True), event(enable_timing=True)) for _ in operations]
        for (start, end), operation in zip(events, operations):  # noqa: B905 - Python 3.9 has no strict
            start.record()
            operation()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) / 1000 for start, end in events]
    seconds = []
    for operation in operations:
        start_time = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - start_time)
    return seconds


def device_steps(
    device: torch.device, steps: dict[str, Any]
) -> Iterator[tuple[str, int, list[float], str]]:
    """Yield operation, bytes, times and what is wrong of what a device does alone, which tells a
    slow GPU from a slow link.

    `steps`: `repetitions`, `order` of the square matrices, `bytes` of a copy. The size of a matrix
    product is that of one operand. The operands hold -1, 0 and 1, so that the product is exact in
    half precision; it is checked against a vector, as Freivalds does.
    """
    import torch

    repetitions, order, count = (
        int(steps["repetitions"]),
        int(steps["order"]),
        max(1, int(steps["bytes"]) // 4),
    )
    kind = torch.float16 if device.type == "cuda" else torch.float32
    source = torch.Generator().manual_seed(1)
    left, right = (
        torch.randint(-1, 2, (order, order), generator=source).to(kind).to(device) for _ in range(2)
    )
    product = torch.empty_like(left)
    # Not timed: the first product loads and picks kernels.
    torch.mm(left, right, out=product)
    seconds = timed(device, [lambda: torch.mm(left, right, out=product)] * repetitions)
    vector = torch.randint(0, 1000, (order, 1), generator=source).to(torch.float64).to(device)
    found, expected = product.double() @ vector, left.double() @ (right.double() @ vector)
    wrong = difference(f"matrix_product of order {order}, times a vector,", found, expected)
    yield "matrix_product", left.numel() * left.element_size(), seconds, wrong
    host = pattern(0, 1, 1, count * 4)
    if device.type == "cuda":
        host = host.pin_memory()
    there = host.to(device)
    for op, origin in (("device_copy", there), ("host_to_device", host)):
        target = torch.zeros_like(there)
        target.copy_(origin)
        copy = functools.partial(target.copy_, origin, non_blocking=True)
        seconds = timed(device, [copy] * repetitions)
        yield op, count * 4, seconds, difference(op, target.cpu(), host)


def reproducible(device: torch.device) -> str:
    """Return what equal bits of a device's matrix products depend on; empty where nobody promises
    any.

    cuBLAS does, for one version of it, one architecture and number of multiprocessors, in one
    stream (its documentation, "Results reproducibility"). Libraries of CPUs choose by the processor
    and how memory is aligned, those of AMD say nothing.
    """
    import torch

    if device.type != "cuda" or torch.version.hip:
        return ""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    version = cublas_version()
    if not version:
        return ""
    gpu = torch.cuda.get_device_properties(device)
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            driver = file.read().strip()
    except OSError:
        driver = "unknown"
    return (
        f"{gpu.name}, {gpu.multi_processor_count} SM {gpu.major}.{gpu.minor}, driver {driver}, "
        f"torch {torch.__version__}, cuBLAS {version}"
    )


def cublas_version() -> str:
    """Return the version of the cuBLAS that the worker has loaded; empty where it has none."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = [line.split(maxsplit=5)[5].strip() for line in file if "/libcublas.so" in line]
    if not paths:
        return ""
    library = ctypes.CDLL(paths[0])
    number, parts = ctypes.c_int(), []
    for which in range(3):  # major, minor, patch
        if library.cublasGetProperty(which, ctypes.byref(number)):
            return ""
        parts.append(str(number.value))
    return ".".join(parts)


def checksum(device: torch.device, steps: dict[str, Any]) -> tuple[int, str]:
    """Return the checksum of matrix products whose bits are the same on all devices alike, and what
    differs when they are repeated.

    The operands fill the mantissa, so that each product is rounded: a unit that rounds or carries
    wrongly shows, which products of small integers do not use. In bfloat16, on tensor cores, and in
    single precision, on the others.
    """
    import torch

    if device.type == "cuda":
        if hasattr(torch.backends.cuda, "preferred_blas_library"):
            torch.backends.cuda.preferred_blas_library("cublas")
        matmul = torch.backends.cuda.matmul
        matmul.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = False
    order = int(steps["order"])
    # Exact, as all are integers below 2^16 divided by 2^15; the period has no factor in common with
    # the order.
    period = 65521
    places = torch.arange(period, dtype=torch.int64)
    number, wrong = 0, ""
    for kind in (torch.bfloat16, torch.float32):
        left, right = (
            ((places * factor % period - 32760).to(torch.float32) / 32768)
            .to(kind)
            .repeat(-(-order * order // period))[: order * order]
            .reshape(order, order)
            .to(device)
            for factor in (48271, 16807)
        )
        first = torch.mm(left, right)
        for _ in range(int(steps["repetitions"])):
            if not wrong and not torch.equal(torch.mm(left, right), first):
                wrong = f"matrix product of order {order} in {kind}: other bits when repeated"
        host = first.cpu()
        size = host.numel() * host.element_size()
        number = zlib.crc32((ctypes.c_char * size).from_address(host.data_ptr()), number)
    return number, wrong


def prepare_environment(job: dict[str, Any]) -> None:
    """Set what NCCL and CUDA read when they start.

    It is the job's word against any file's of the machine, never a peer's.
    """
    os.environ.update(
        {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # devices are numbered as NVML numbers them
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # equal bits in each run, says cuBLAS
            "NCCL_DEBUG": "WARN",
            "NCCL_RAS_ENABLE": "0",  # no listener on port 28028, where the jobs' own is expected
            "NCCL_SOCKET_IFNAME": "=" + job["interface"],
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            # the agent's deadlines end a worker; its own watchdog would wait for minutes
            "TORCH_NCCL_ENABLE_MONITORING": "0",
        }
    )
    if job["adapter"]:
        os.environ["NCCL_IB_HCA"] = "=" + job["adapter"]


def versions(job: dict[str, Any]) -> str:
    """Return what must be equal on all ranks' workers for their times to be comparable."""
    import torch

    nccl = str(torch.cuda.nccl.version()) if job["backend"] == "nccl" else ""  # type: ignore[no-untyped-call]
    return " ".join(filter(None, [job["backend"], "torch", str(torch.__version__), nccl]))


def meet(store: Any, job: dict[str, Any]) -> None:
    """Wait until every rank's worker of the group is here and runs the same versions.

    Raises VersionsDiffer.
    """
    rank, size = job["rank"], job["size"]
    mine = versions(job)
    store.set(f"here/{rank}", mine)
    others = {other: store.get(f"here/{other}").decode() for other in range(size) if other != rank}
    different = {other: theirs for other, theirs in others.items() if theirs != mine}
    if different:
        raise VersionsDiffer(
            f"rank {rank} has {mine}, "
            + ", ".join(f"rank {other} {theirs}" for other, theirs in different.items())
        )
    if job["backend"] == "nccl":
        # NCCL's bootstrap believes whoever knows this number; versions that do not read it keep
        # their constant.
        if rank == 0:
            store.set("magic", str(secrets.randbits(63)))
        os.environ["NCCL_SOCKET_MAGIC"] = store.get("magic").decode()


def connect(store: Any, job: dict[str, Any]) -> Any:
    """Return the process group of the job's backend, which the worker joins."""
    import torch.distributed as dist

    limit = timedelta(seconds=job["timeout"])
    if job["backend"] == "nccl":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = limit  # noqa: SLF001 - the name that every version has
        return dist.ProcessGroupNCCL(store, job["rank"], job["size"], options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001 - the name that every version has
    # An address in numbers: gloo would otherwise look up the machine's own name and listen on
    # whatever that says.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=job["address"])]  # noqa: SLF001
    options._timeout = limit  # noqa: SLF001
    options._threads = 1  # noqa: SLF001
    return dist.ProcessGroupGloo(store, job["rank"], job["size"], options)


def linger(store: Any, job: dict[str, Any]) -> None:
    """Stay, as a worker, until the others are done too, or for a moment."""
    # This rank's result stands whatever becomes of the others.
    with contextlib.suppress(StoreFailure):
        store.set(f"done/{job['rank']}", b"1")
        store.wait([f"done/{rank}" for rank in range(job["size"])], timedelta(seconds=LINGER))


REASONS = (
    ("refused", "connection refused"),
    ("connection_lost", "closed by peer"),
    ("connection_lost", "reset by peer"),
    ("connection_lost", "broken pipe"),
    ("no_route", "no route to host"),
    ("no_route", "network is unreachable"),
    ("timeout", "timed out"),
    ("timeout", "timeout"),
    ("out_of_memory", "out of memory"),
    ("no_address", "cannot assign requested address"),
)
"""Slugs by what the libraries say; they have no error codes."""


def reason(error: BaseException) -> str:
    """Return the slug of a worker's error."""
    if isinstance(error, VersionsDiffer):
        return "versions_differ"
    if isinstance(error, StoreFailure):
        return "store"
    text = str(error).lower()
    return next((slug for slug, words in REASONS if words in text), "error")


def work(channel: socket.socket, descriptor: int) -> None:
    """Be one rank's worker, and end the process: no destructors, which can hang when a peer is
    gone.
    """
    # The agent kills the whole session, and with it whatever a library has started.
    os.setsid()
    board = StatusWriter(descriptor)
    agent = AgentChannel(channel)
    job = agent.receive()
    round_ = RankRound(agent, board, job)
    try:
        round_.run()
    except (
        VersionsDiffer,
        StoreFailure,
        RuntimeError,
        ValueError,
        OSError,
        AttributeError,
        ImportError,
    ) as error:
        round_.conclude("failed", reason(error), f"{type(error).__name__}: {error}"[:2000])
    os._exit(0)


def threads() -> int:
    """Return how many threads this process has, which workers would lose by a fork."""
    return len(os.listdir("/proc/self/task"))


def die_with(parent: int) -> None:
    """Have the kernel kill this process, a worker, when its parent ends."""
    if (
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, DIED_WITH_PARENT, 0, 0, 0)
        or os.getppid() != parent
    ):
        os._exit(1)


def start_worker(control: socket.socket, channel: int, board: int, roots: str) -> int:
    """Start one worker and return its pid: by fork, or afresh where this process has threads."""
    me = os.getpid()
    if threads() > 1:
        for descriptor in (channel, board):
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - positional only
        command = [
            sys.executable,
            "-I",
            "-B",
            "-W",
            "ignore",
            sys.argv[0],
            "worker",
            roots,
            str(me),
            str(channel),
            str(board),
        ]
        return os.posix_spawn(sys.executable, command, os.environ)
    pid = os.fork()
    if pid == 0:
        control.close()
        try:
            die_with(me)
            work(socket.socket(fileno=channel), board)
        finally:
            traceback.print_exc()  # reached by an unnamed exception only
            os._exit(70)
    return pid


def serve(control: socket.socket, roots: str) -> None:
    """Import torch, then fork and reap workers until the agent closes its end."""
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available():
            message = "this torch is built without torch.distributed"
            raise ImportError(message)  # noqa: TRY301 - handled with its kin
    except (ImportError, OSError) as error:
        reply(control, {"failed": "no_torch", "detail": f"{sys.executable}: {error}"})
        return
    torch.set_num_threads(1)
    # What is garbage now would be copied into each worker by the first collection there.
    gc.collect()
    gc.freeze()  # workers share these pages for as long as nobody writes to them
    about = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "python": sys.version.split()[0],
        "threads": threads(),
    }
    reply(control, {"ready": os.getpid(), **about})
    while True:
        packet, descriptors, _flags, _address = socket.recv_fds(control, PACKET, 2)
        if not packet:
            return
        message = json.loads(packet)
        if "fork" in message:
            pid = start_worker(control, descriptors[0], descriptors[1], roots)
            for descriptor in descriptors:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            reply(control, {"forked": message["fork"], "pid": pid}, pidfd)
            os.close(pidfd)
        elif "reap" in message:
            _, status = os.waitpid(message["reap"], 0)
            reply(control, {"reaped": message["reap"], "status": status})


def reply(control: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    """Send the agent one packet about a worker."""
    socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def main(arguments: list[str]) -> None:
    """Run as fork server (`parent ROOTS FD`) or worker (`worker ROOTS PARENT CHANNEL BOARD`)."""
    role, roots, *numbers = arguments
    allowed = roots.split(os.pathsep)
    # Only what was checked for foreign writers is imported; an environment can name other folders
    # in its .pth files.
    sys.path[:] = [
        path
        for path in sys.path
        if any(f"{os.path.realpath(path)}/".startswith(f"{root}/") for root in allowed)
    ]
    # Ctrl-C goes to the whole terminal group; the agent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if role == "parent":
        serve(socket.socket(fileno=int(numbers[0])), roots)
    else:
        die_with(int(numbers[0]))
        work(socket.socket(fileno=int(numbers[1])), int(numbers[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
