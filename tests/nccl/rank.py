"""A rank of a job of genuine NCCL, run by a test as a process of its own.

Each line of standard input is a call of NCCL, and is answered by one line, `ok …` or `error …`:

    id                          a new unique id, in hexadecimal digits
    init COMM SIZE RANK ID      ncclCommInitRank; config and scalable are its other forms
    split COMM NEW COLOR KEY    ncclCommSplit; COLOR -1 takes no part
    do COMM OPERATION TIMES     a collective, or SendN and RecvN to and from rank N
    sync                        wait for the stream
    train COMM                  a step of a training: a collective, waited for, and its heartbeats
    skip                        the same without the collective, and the next step begun
    destroy COMM                ncclCommDestroy
    exit                        end as a program ends that destroys nothing

Needs nothing but Python, and for heartbeats `dshealthd.training`; `NCCLSIM_LIB` is the folder of
the libraries.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from types import SimpleNamespace

from dshealthd.training.heartbeat import Heartbeat

COUNT, FLOAT, SUM, ROOT = 1024, 7, 0, 0
NO_COLOR = -1
MODEL = SimpleNamespace(parameters=lambda: iter(()))
LIB = os.environ["NCCLSIM_LIB"]
cuda = ctypes.CDLL(f"{LIB}/libcudart.so", mode=ctypes.RTLD_GLOBAL)
nccl = ctypes.CDLL(f"{LIB}/libnccl.so.2")
Pointer = ctypes.c_void_p
Size = ctypes.c_size_t


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p
nccl.ncclCommInitRank.argtypes = [Pointer, ctypes.c_int, UniqueId, ctypes.c_int]
nccl.ncclCommInitRankConfig.argtypes = [*nccl.ncclCommInitRank.argtypes, Pointer]


class Failure(Exception):
    """NCCL refused a call."""


def check(result: int) -> None:
    """Raise Failure unless a call succeeded."""
    if result:
        last = (nccl.ncclGetLastError(None) or b"").decode()
        message = f"{nccl.ncclGetErrorString(result).decode()}: {last}"
        raise Failure(message)


class Rank:
    """The communicators of this process."""

    def __init__(self) -> None:
        cuda.cudaSetDevice(int(os.environ["LOCAL_RANK"]))
        self.communicators: dict[str, Pointer] = {}
        self.stream, self.buffer = Pointer(), Pointer()
        cuda.cudaStreamCreateWithFlags(ctypes.byref(self.stream), 1)
        cuda.cudaMalloc(ctypes.byref(self.buffer), Size(1 << 20))

    def run(self, words: list[str]) -> str:
        """Make the call of one line."""
        match words:
            case ["id"]:
                unique = UniqueId()
                check(nccl.ncclGetUniqueId(ctypes.byref(unique)))
                return bytes(unique.bytes).hex()
            case ["init", name, size, rank, unique_id]:
                made, unique = Pointer(), UniqueId.from_buffer_copy(bytes.fromhex(unique_id))
                check(nccl.ncclCommInitRank(ctypes.byref(made), int(size), unique, int(rank)))
                self.communicators[name] = made
            case ["config", name, size, rank, unique_id]:
                made, unique = Pointer(), UniqueId.from_buffer_copy(bytes.fromhex(unique_id))
                place = ctypes.byref(made)
                check(nccl.ncclCommInitRankConfig(place, int(size), unique, int(rank), None))
                self.communicators[name] = made
            case ["scalable", name, size, rank, unique_id]:
                made, unique = Pointer(), UniqueId.from_buffer_copy(bytes.fromhex(unique_id))
                numbers = (int(size), int(rank), 1)
                places = (ctypes.byref(made), *numbers, ctypes.byref(unique), None)
                check(nccl.ncclCommInitRankScalable(*places))
                self.communicators[name] = made
            case ["split", name, new, color, key]:
                made, old = Pointer(), self.communicators[name]
                check(nccl.ncclCommSplit(old, int(color), int(key), ctypes.byref(made), None))
                if int(color) != NO_COLOR:
                    self.communicators[new] = made
            case ["do", name, operation, times]:
                for _ in range(int(times)):
                    self.launch(self.communicators[name], operation)
            case ["sync"]:
                cuda.cudaStreamSynchronize(self.stream)
            case ["train", name]:
                self.forward_and_backward()
                self.launch(self.communicators[name], "AllReduce")
                check(cuda.cudaStreamSynchronize(self.stream))
                self.heartbeat.step()
            case ["skip"]:
                self.forward_and_backward()
                self.heartbeat.step()
                self.heartbeat.forward_began(MODEL)
            case ["destroy", name]:
                check(nccl.ncclCommDestroy(self.communicators.pop(name)))
            case _:
                message = f"not understood: {words}"
                raise Failure(message)
        return ""

    @functools.cached_property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this process, which asks torch whether it uses a GPU."""
        used = {"all": {"current": 1 << 30, "peak": 1 << 30}}
        torch = SimpleNamespace(
            cuda=SimpleNamespace(
                is_initialized=lambda: True,
                memory_stats_as_nested_dict=lambda: {
                    "allocated_bytes": used,
                    "reserved_bytes": used,
                },
            )
        )
        sys.modules.setdefault("torch", torch)  # type: ignore[arg-type] # all that is asked
        from dshealthd.training.heartbeat import Heartbeat

        return Heartbeat()

    def forward_and_backward(self) -> None:
        """Compute nothing, as a training without a GPU, and say so."""
        self.heartbeat.forward_began(MODEL)
        self.heartbeat.forward_ended()

    def launch(self, communicator: Pointer, operation: str) -> None:
        """Launch one operation."""
        number, place = Size(COUNT), self.buffer
        end = (communicator, self.stream)
        if operation == "AllReduce":
            check(nccl.ncclAllReduce(place, place, number, FLOAT, SUM, *end))
        elif operation == "Broadcast":
            check(nccl.ncclBroadcast(place, place, number, FLOAT, ROOT, *end))
        elif operation == "Reduce":
            check(nccl.ncclReduce(place, place, number, FLOAT, SUM, ROOT, *end))
        elif operation == "AllGather":
            check(nccl.ncclAllGather(place, place, number, FLOAT, *end))
        elif operation == "ReduceScatter":
            check(nccl.ncclReduceScatter(place, place, number, FLOAT, SUM, *end))
        elif operation == "AlltoAll":
            check(nccl.ncclAlltoAll(place, place, number, FLOAT, *end))
        elif operation in {"Gather", "Scatter"}:
            check(getattr(nccl, f"nccl{operation}")(place, place, number, FLOAT, ROOT, *end))
        elif operation.startswith("Send"):
            check(nccl.ncclSend(place, number, FLOAT, int(operation[4:]), *end))
        elif operation.startswith("Recv"):
            check(nccl.ncclRecv(place, number, FLOAT, int(operation[4:]), *end))
        else:
            raise Failure(operation)


def main() -> None:
    """Serve until there are no more lines."""
    rank = Rank()
    for line in sys.stdin:
        words = line.split()
        if words == ["exit"]:
            return
        try:
            answer = f"ok {rank.run(words)}"
        except (Failure, KeyError, ValueError) as error:
            answer = f"error {error!r}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
