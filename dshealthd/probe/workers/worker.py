"""The probe worker, one rank: joins collectives, times them, checks sums, reports its stage.

One plain file that depends on torch alone. It runs under the training's interpreter, as two kinds
of process:

- the *parent* (the fork server) has imported torch and has one thread. It forks workers on the
  agent's request and never touches `torch.cuda`, because a CUDA context does not survive a fork: a
  process of its own finds out how many GPUs torch can use. If importing torch starts threads, the
  parent starts each process anew instead of forking it.
- a *worker* is one rank, in a session of its own, for one round. It listens on nothing except the
  sockets of its backend.

The agent and the parent exchange packets of JSON, with descriptors attached:

    ← {"ready": PID, "torch": …, "gpus": N, "no_gpus": TEXT, …}
      or {"failed": REASON, "detail": …}
    → {"fork": N} + [channel, board]    ← {"forked": N, "pid": PID} + [pidfd]
    → {"reap": PID}                     ← {"reaped": PID, "status": WAIT STATUS}

A worker's channel carries frames: four bytes of length, big-endian, and JSON. Its first frame from
the agent is the job; then

    ← {"stage": STAGE}   ← {"timing": [OP, BYTES, SECONDS, BUS BANDWIDTH]}
    ← {"checksum": [LIBRARY, NUMBER]}
    ← {"end": OUTCOME, "stage": STAGE, "reason": SLUG, "detail": TEXT}
    ← {"id": N, "store": OP, "key": KEY, "value": BASE64 | INT | null, "timeout": SECONDS}
    → {"id": N, "value": …} or {"id": N, "error": TEXT}

The board is a small shared file. It starts with two counters (collectives entered, collectives
left), which need no system call and show how far a rank came after it has hung or died. The
worker's printed output follows.

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
import select
import signal
import socket
import statistics
import struct
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LENGTH = struct.Struct(">I")
COUNTERS = struct.Struct("=QQ")
MAX_DETAIL = 2000
"""Most characters of an error; the text of a library may be of any length."""
PACKET = 1 << 15
"""Bytes of the largest packet between agent and parent: an error of 12 bytes a character."""
PRIME = 4093
"""Period of the test pattern: below 2^12, so that sums over up to 4,096 ranks are exact in float32;
prime, so that no two places a power of two apart, as in a ring's chunks, hold the same value.
"""
BATCH = 32 << 20
"""Bytes of buffers to prepare before a run of timed repetitions, so that nothing else happens
between two of them.
"""
LINGER = 2.0
"""Seconds that a finished rank waits for the others, which may still be reading its memory."""
CUDA_DEADLINE = 20.0
"""Seconds for CUDA to start: a driver that keeps no GPU initialized initializes them one after the
other, in one to two seconds each; and an agent waits a minute for the fork server.
"""
DIED_WITH_PARENT = signal.SIGKILL
PR_SET_PDEATHSIG = 1
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
"""Slugs by text in the libraries' error messages, which have no codes."""


class StoreFailure(RuntimeError):
    """The agent could not carry out an operation of the rendezvous store."""


class VersionsDiffer(Exception):
    """The ranks run different versions, so their times are not comparable."""


class AgentChannel:
    """The worker's end of its channel, for progress and any thread's store operations."""

    def __init__(self, channel: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._stream = channel.makefile("rb")
        self._channel = channel
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._reader: threading.Thread | None = None

    def receive(self) -> dict[str, Any]:
        """Return the agent's next frame. Raises EOFError if it has closed the channel."""
        head = self._stream.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise EOFError
        message: dict[str, Any] = json.loads(self._stream.read(LENGTH.unpack(head)[0]))
        return message

    def send(self, message: dict[str, Any]) -> None:
        """Send the agent one frame of the worker."""
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        with self._lock:
            self._channel.sendall(LENGTH.pack(len(body)) + body)

    def stage(self, name: str) -> None:
        """Report that a stage of the worker begins, which starts its deadline."""
        self.send({"stage": name})

    def request(self, op: str, key: str, value: str | int | None, timeout: float) -> Any:
        """Have the agent carry out a store operation; return its value. Raises StoreFailure."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            # A queue for each request: torch and its backends call from threads of their own, each
            # of which waits for its own answer.
            number = len(self._answers)
            self._answers[number] = answer
        self.send({"id": number, "store": op, "key": key, "value": value, "timeout": timeout})
        message = answer.get()
        if "error" in message:
            raise StoreFailure(f"store: {op} of {key}: {message['error']}")
        return message["value"]

    def _read(self) -> None:
        """Pass each of the agent's answers to the worker's thread that waits for it. When the
        channel closes, fail all waiting requests.
        """
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self.receive()
                self._answers[message["id"]].put(message)
        for answer in self._answers.values():
            answer.put({"error": "the agent is gone"})


class StatusWriter:
    """The shared file that the agent can read after the worker has hung or died."""

    def __init__(self, descriptor: int) -> None:
        """Map the counters, and redirect printed output to the file after them."""
        self._map = mmap.mmap(descriptor, COUNTERS.size)
        self.entered = self.left = 0
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    def enter(self) -> None:
        """Count a collective that the worker enters."""
        self.entered += 1
        COUNTERS.pack_into(self._map, 0, self.entered, self.left)

    def leave(self) -> None:
        """Count a collective that the worker has left; on a GPU it is queued, not finished."""
        self.left += 1
        COUNTERS.pack_into(self._map, 0, self.entered, self.left)


def agent_store(agent: AgentChannel, prefix: str, timeout: float) -> Any:
    """Return the worker's rendezvous store, which forwards every operation to the agent."""
    import torch.distributed as dist

    # torch exports it only where it is built with it
    class AgentStore(dist.Store):  # type: ignore[misc,name-defined]
        """The operations that process groups need; binary values travel as base64."""

        def set(self, key: str, value: bytes | str) -> None:
            data = value.encode() if isinstance(value, str) else bytes(value)
            agent.request("set", prefix + key, base64.b64encode(data).decode(), timeout)

        def get(self, key: str) -> bytes:
            return base64.b64decode(agent.request("get", prefix + key, None, timeout))

        def add(self, key: str, amount: int) -> int:
            return int(agent.request("add", prefix + key, amount, timeout))

        def check(self, keys: list[str]) -> bool:
            return all(agent.request("check", prefix + key, None, timeout) for key in keys)

        def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
            for key in keys:
                most = min(timeout, limit.total_seconds()) if limit else timeout
                agent.request("wait", prefix + key, None, most)

        def delete_key(self, key: str) -> bool:
            return bool(agent.request("delete", prefix + key, None, timeout))

    store = AgentStore()
    store.set_timeout(timedelta(seconds=timeout))
    return store


class RankRound:
    """One rank's part in one round."""

    def __init__(self, agent: AgentChannel, board: StatusWriter, job: dict[str, Any]) -> None:
        """Note the job without touching torch yet."""
        self.agent, self.board, self.job = agent, board, job
        self.rank: int = job["rank"]
        self.size: int = job["size"]
        self.salt = 0
        self.group: Any = None
        self.device: Any = None
        self.stage = "import"
        self.wrong: tuple[str, str] | None = None
        """Stage and description of the first wrong result. The round goes on, so that the other
        ranks learn whether their results are right.
        """

    def run(self) -> None:
        """Go through the worker's stages. Raises if the round ends in one of them."""
        import torch

        torch.set_num_threads(1)
        prepare_environment(self.job)
        self.device = torch.device(self.job["device"])
        # Before anybody is spoken to: what fails until here is this node's own fault.
        options = backend_options(self.job, self.device)
        self.begin("store")
        store = agent_store(self.agent, self.job["prefix"], self.job["timeout"])
        synchronize(store, self.job)
        self.begin("init")
        self.group = connect(store, self.job, options)
        self.reduce_and_check(4, 1)  # NCCL connects only with the first collective
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
                self.record(wrong)
                self.report(op, size, seconds, 1.0)
            if libraries := reproducible(self.device):
                number, wrong = checksum(self.device, self.job["device_steps"])
                self.record(wrong)
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
        """Report how the rank's round ended; wrong data outranks any later failure."""
        if self.wrong is not None:
            self.stage, detail = self.wrong
            outcome, reason = "corrupted", "wrong_data"
        self.agent.send({"end": outcome, "stage": self.stage, "reason": reason, "detail": detail})

    def report(self, op: str, size: int, seconds: list[float], factor: float) -> None:
        """Send the agent the median of an operation's times. A group of one has nothing to reduce,
        so its times are not reported.
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
            # A new pattern for each repetition: otherwise a buffer that a collective has not
            # touched could hold the right sum of an earlier one.
            self.salt += count
            buffers = [pattern(self.rank, 1, salt, size).to(self.device) for salt in salts]
            calls = [functools.partial(all_reduce, self, buffer) for buffer in buffers]
            seconds += timed(self.device, calls)
            for salt, buffer in zip(salts, buffers):  # noqa: B905 - Python 3.9 has no strict
                expected = pattern(0, self.size, salt, size).to(self.device)
                self.record(difference(f"all_reduce of {size} bytes", buffer, expected))
        return seconds

    def record(self, wrong: str) -> None:
        """Keep the rank's first wrong result; an empty text means that nothing is wrong."""
        if wrong and self.wrong is None:
            self.wrong = self.stage, f"rank {self.rank}: {wrong}"


def all_reduce(round_: RankRound, tensor: torch.Tensor) -> None:
    """Sum a worker's tensor over the group in place; on a GPU the stream waits, not the caller."""
    round_.board.enter()
    round_.group.allreduce([tensor]).wait()
    round_.board.leave()


def pattern(first: int, ranks: int, salt: int, size: int) -> torch.Tensor:
    """Return the sum of the contributions of `ranks` ranks from `first` on. Contributions are
    integers that differ by rank, place and repetition.
    """
    import torch

    place = torch.arange(PRIME, dtype=torch.int64) * 31 + salt * 89
    period = torch.zeros(PRIME, dtype=torch.int64)
    for rank in range(first, first + ranks):
        period += (place + rank * 977) % PRIME
    count = max(1, size // 4)
    return period.to(torch.float32).repeat(-(-count // PRIME))[:count].contiguous()


def difference(what: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return a text that says where two tensors of a worker first differ; empty if equal."""
    import torch

    if torch.equal(found, expected):
        return ""
    wrong = (found != expected).flatten().nonzero()
    index = int(wrong[0])
    values = float(found.flatten()[index]), float(expected.flatten()[index])
    places = f"{len(wrong)} of {found.numel()} places, first at index {index}"
    return f"{what} is wrong in {places}: {values[0]!r}, must be {values[1]!r}"


def timed(device: torch.device, operations: Sequence[Callable[[], object]]) -> list[float]:
    """Run a worker's operations one after the other and return the seconds of each. CUDA events
    time them on a GPU, the clock elsewhere.
    """
    import torch

    if device.type == "cuda":
        event: Any = torch.cuda.Event
        events = [(event(enable_timing=True), event(enable_timing=True)) for _ in operations]
        # Python 3.9 has no strict
        for (start, end), operation in zip(events, operations):  # noqa: B905
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
    """Yield operation, bytes, times and error text of each step that a device does alone; they
    tell a slow GPU from a slow link.

    `steps`: `repetitions`, `order` of the square matrices, `bytes` of a copy. The size of a matrix
    product is that of one operand. The operands hold -1, 0 and 1, so that the product is exact in
    half precision; Freivalds' algorithm checks it with a vector.
    """
    import torch

    repetitions, order = int(steps["repetitions"]), int(steps["order"])
    kind = torch.float16 if device.type == "cuda" else torch.float32
    source = torch.Generator().manual_seed(1)
    left, right = (
        torch.randint(-1, 2, (order, order), generator=source).to(kind).to(device) for _ in range(2)
    )
    product = torch.empty_like(left)
    # Not timed: the first product loads and selects kernels.
    torch.mm(left, right, out=product)
    seconds = timed(device, [lambda: torch.mm(left, right, out=product)] * repetitions)
    vector = torch.randint(0, 1000, (order, 1), generator=source).to(torch.float64).to(device)
    found, expected = product.double() @ vector, left.double() @ (right.double() @ vector)
    wrong = difference(f"matrix_product of order {order}, times a vector,", found, expected)
    yield "matrix_product", left.numel() * left.element_size(), seconds, wrong
    host = pattern(0, 1, 1, int(steps["bytes"]))
    if device.type == "cuda":
        host = host.pin_memory()
    there = host.to(device)
    for op, origin in (("device_copy", there), ("host_to_device", host)):
        target = torch.zeros_like(there)
        target.copy_(origin)
        copy = functools.partial(target.copy_, origin, non_blocking=True)
        seconds = timed(device, [copy] * repetitions)
        yield op, host.numel() * host.element_size(), seconds, difference(op, target.cpu(), host)


def reproducible(device: torch.device) -> str:
    """Return what the bits of a device's matrix products depend on; empty if its library does not
    promise equal bits.

    cuBLAS promises them for one version, one architecture and number of multiprocessors, in one
    stream (its documentation, "Results reproducibility"). CPU libraries choose code by processor
    and memory alignment; AMD's libraries promise nothing.
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
    """Return the version of the cuBLAS that the worker has loaded; empty if none."""
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
    """Return the checksum of matrix products whose bits are equal on identical devices, and a text
    about any difference when they are repeated.

    The operands fill the mantissa, so each product is rounded. This shows faults in rounding and
    carrying, which products of small integers do not exercise. bfloat16 runs on tensor cores,
    single precision on the other units.
    """
    import torch

    if hasattr(torch.backends.cuda, "preferred_blas_library"):
        torch.backends.cuda.preferred_blas_library("cublas")
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = False
    order = int(steps["order"])
    # Exact, as all are integers below 2^16 divided by 2^15; the period and the order are coprime.
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
    """Set the variables that NCCL and CUDA read when they start. They override any configuration
    file on this machine, and never come from a peer.
    """
    os.environ.update(
        {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the same numbering as NVML's
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS documents equal bits in each run
            "NCCL_DEBUG": "WARN",
            "NCCL_RAS_ENABLE": "0",  # no listener on port 28028, which jobs use
            "NCCL_SOCKET_IFNAME": "=" + job["interface"],
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            # the agent's deadlines end a worker; NCCL's watchdog would wait for minutes
            "TORCH_NCCL_ENABLE_MONITORING": "0",
        }
    )
    if job["adapter"]:
        os.environ["NCCL_IB_HCA"] = "=" + job["adapter"]


def versions(job: dict[str, Any]) -> str:
    """Return the versions that must match on all ranks' workers for their times to compare."""
    import torch

    found = [job["backend"], "torch", str(torch.__version__)]
    if job["backend"] == "nccl":
        found.append(str(torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return " ".join(found)


def synchronize(store: Any, job: dict[str, Any]) -> None:
    """Wait until every rank's worker of the group has arrived, and check that versions match.
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
        # NCCL's bootstrap trusts anyone who knows this number; versions that do not read it use a
        # constant.
        if rank == 0:
            store.set("magic", str(secrets.randbits(63)))
        os.environ["NCCL_SOCKET_MAGIC"] = store.get("magic").decode()


def backend_options(job: dict[str, Any], device: torch.device) -> Any:
    """Open what the worker's backend needs of this node alone, a context on the GPU or an address
    to listen on, and return the backend's options.
    """
    import torch
    import torch.distributed as dist

    options: Any
    if job["backend"] == "nccl":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        options = dist.ProcessGroupNCCL.Options()
    else:
        # the name that every version has
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001
        # A numeric address: gloo would otherwise listen on whatever the machine's own name resolves
        # to.
        device_ = dist.ProcessGroupGloo.create_device(hostname=job["address"])
        options._devices = [device_]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
    # the name that every version has
    options._timeout = timedelta(seconds=job["timeout"])  # noqa: SLF001
    return options


def connect(store: Any, job: dict[str, Any], options: Any) -> Any:
    """Join and return the process group of the job's backend, for the worker."""
    import torch.distributed as dist

    group = dist.ProcessGroupNCCL if job["backend"] == "nccl" else dist.ProcessGroupGloo
    return group(store, job["rank"], job["size"], options)


def linger(store: Any, job: dict[str, Any]) -> None:
    """Wait, as a worker, until the others are done too, but at most `LINGER` seconds."""
    # This rank's result is valid whatever happens to the others.
    with contextlib.suppress(StoreFailure):
        store.set(f"done/{job['rank']}", b"1")
        store.wait([f"done/{rank}" for rank in range(job["size"])], timedelta(seconds=LINGER))


def reason(error: BaseException) -> str:
    """Return the slug of a worker's error."""
    if isinstance(error, VersionsDiffer):
        return "versions_differ"
    if isinstance(error, StoreFailure):
        return "store"
    text = str(error).lower()
    return next((slug for slug, words in REASONS if words in text), "error")


def work(channel: int, descriptor: int) -> None:
    """Run one rank's worker, then exit without destructors, which can hang if a peer is gone."""
    # The agent kills the whole session, including whatever a library has started.
    os.setsid()
    board = StatusWriter(descriptor)
    agent = AgentChannel(socket.socket(fileno=channel))
    job = agent.receive()
    round_ = RankRound(agent, board, job)
    try:
        round_.run()
    except (
        VersionsDiffer,
        RuntimeError,
        ValueError,
        ArithmeticError,
        OSError,
        AttributeError,
        ImportError,
    ) as error:
        round_.conclude("failed", reason(error), f"{type(error).__name__}: {error}"[:MAX_DETAIL])
    os._exit(0)


def threads() -> int:
    """Return how many threads this process has; a forked worker would lose all but one."""
    return len(os.listdir("/proc/self/task"))


def die_with(parent: int) -> None:
    """Have the kernel kill this process, a worker, when its parent ends."""
    if (
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, DIED_WITH_PARENT, 0, 0, 0)
        or os.getppid() != parent
    ):
        os._exit(1)


def start(role: str, control: socket.socket, roots: str, *descriptors: int) -> int:
    """Start a process of the parent and return its pid: by fork, or as a new process if the parent
    has threads.
    """
    me = os.getpid()
    if threads() > 1:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - positional only
        flags, numbers = ("-I", "-B", "-W", "ignore"), map(str, (me, *descriptors))
        command = [sys.executable, *flags, sys.argv[0], role, roots, *numbers]
        return os.posix_spawn(sys.executable, command, os.environ)
    pid = os.fork()
    if pid == 0:
        control.close()
        try:
            die_with(me)
            ROLES[role](*descriptors)
        finally:
            traceback.print_exc()  # reached only on an unexpected exception
            os._exit(70)
    return pid


def count_gpus(descriptor: int) -> None:
    """Start CUDA in this process, which opens no context on a GPU, and write to a pipe how many
    GPUs torch can use, or why none.
    """
    import torch

    answer: dict[str, Any] = {"gpus": 0, "no_gpus": ""}
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call] # raises what is wrong as a text
        # Not `torch.cuda.device_count`, which asks NVML and counts GPUs that CUDA cannot use.
        answer["gpus"] = torch._C._cuda_getDeviceCount()  # noqa: SLF001
    except (AssertionError, AttributeError, OSError, RuntimeError) as error:
        answer["no_gpus"] = " ".join(str(error).split())[:500]
    os.write(descriptor, json.dumps(answer, allow_nan=False).encode())
    os._exit(0)


def usable_gpus(control: socket.socket, roots: str) -> dict[str, Any]:
    """Return how many GPUs torch can use here (`gpus`), and why it can use none (`no_gpus`)."""
    reader, writer = os.pipe()
    pid = start("gpus", control, roots, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        if not select.select([pipe], [], [], CUDA_DEADLINE)[0]:
            # It may hang in the driver, where a signal does not reach it: nobody waits for its end.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
            return {"gpus": 0, "no_gpus": f"CUDA does not start within {CUDA_DEADLINE:g} s"}
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not text:
        return {"gpus": 0, "no_gpus": f"starting CUDA ended the process: status {status}"}
    answer: dict[str, Any] = json.loads(text)
    return answer


def serve(control: socket.socket, roots: str) -> None:
    """Import torch, then fork and reap workers until the agent closes its end."""
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available():
            message = "this torch is built without torch.distributed"
            raise ImportError(message)  # noqa: TRY301 - handled with the other import errors
    except (ImportError, OSError) as error:
        reply(control, {"failed": "no_torch", "detail": f"{sys.executable}: {error}"[:MAX_DETAIL]})
        return
    torch.set_num_threads(1)
    # Otherwise the first collection in each worker would copy the pages of this garbage.
    gc.collect()
    gc.freeze()  # workers share these pages until one writes to them
    about = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "python": sys.version.split()[0],
        "threads": threads(),
        **usable_gpus(control, roots),
    }
    reply(control, {"ready": os.getpid(), **about})
    while True:
        packet, descriptors, _flags, _address = socket.recv_fds(control, PACKET, 2)
        if not packet:
            return
        message = json.loads(packet)
        if "fork" in message:
            pid = start("worker", control, roots, *descriptors)
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
    socket.send_fds(control, [json.dumps(message, allow_nan=False).encode()], descriptors)


ROLES: dict[str, Callable[..., None]] = {"gpus": count_gpus, "worker": work}
"""What a process of the parent does; its descriptors are the arguments."""


def main(arguments: list[str]) -> None:
    """Run as fork server (`parent ROOTS FD`) or as one of its processes (`ROLE ROOTS PARENT FD
    …`).
    """
    role, roots, *numbers = arguments
    allowed = roots.split(os.pathsep)
    # Import only from folders that `launch.py` has checked: .pth files can name others.
    sys.path[:] = [
        path
        for path in sys.path
        if any(f"{os.path.realpath(path)}/".startswith(f"{root}/") for root in allowed)
    ]
    # Ctrl-C reaches the whole terminal group; the agent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if role == "parent":
        serve(socket.socket(fileno=int(numbers[0])), roots)
    else:
        die_with(int(numbers[0]))
        ROLES[role](*map(int, numbers[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
