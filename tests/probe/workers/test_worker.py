"""The worker's own parts, its page, and the check of the environment that it runs in."""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import ctypes
import importlib
import io
import itertools
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.probe.workers import launch, worker
from dshealthd.probe.workers.fork_server import StatusPage
from dshealthd.probe.workers.store import LocalStore, StoreError
from dshealthd.probe.workers.worker_pool import describe_exit

MAX_KEY = 256
MAX_VALUE = 45_000
MAX_KEYS = 4096


@pytest.fixture(scope="module")
def torch() -> Any:
    """PyTorch, not imported before a test needs it: that takes a fifth of collecting all tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it grumbles about what is not installed beside it
        return importlib.import_module("torch")


def test_stands_alone() -> None:
    """The worker imports the standard library and torch, and every Python since 3.9 can read it."""
    source = Path(worker.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 9))
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.startswith("dshealthd")]
    assert {name for name in imported if name.startswith("torch")} == {"torch", "torch.distributed"}


@pytest.mark.parametrize("world", [1, 2, 8, 4096])
def test_pattern_is_exact(torch: Any, world: int) -> None:
    """What the ranks contribute adds up exactly, in single precision and in any order."""
    total = torch.zeros(5000)
    for rank in reversed(range(min(world, 8))):
        total += worker.pattern(rank, 1, 7, 20000)
    assert torch.equal(total, worker.pattern(0, min(world, 8), 7, 20000))
    assert float(worker.PRIME - 1) * world < 1 << 24


def test_pattern_differs(torch: Any) -> None:
    """Each rank, repetition and place has other data: a stale or shifted buffer shows."""
    mine = worker.pattern(0, 1, 0, 1 << 16)
    assert not torch.any(mine == worker.pattern(1, 1, 0, 1 << 16))
    assert not torch.any(mine == worker.pattern(0, 1, 1, 1 << 16))
    assert int((mine[1:] == mine[0]).nonzero()[0]) + 1 == 4093
    total = worker.pattern(0, 4, 3, 1 << 16)
    for distance in [1 << power for power in range(14)]:
        assert not torch.any(total[distance:] == total[:-distance])
    assert not torch.equal(total, worker.pattern(0, 4, 4, 1 << 16))


@pytest.mark.parametrize(
    ("rank", "salt", "first"), [(0, 0, [0.0, 31.0]), (0, 1, [89.0, 120.0]), (1, 0, [977.0, 1008.0])]
)
@pytest.mark.usefixtures("torch")
def test_pattern_of_all_releases(rank: int, salt: int, first: list[float]) -> None:
    """Each node adds up what the others must have given, which may have another release."""
    assert worker.pattern(rank, 1, salt, 8).tolist() == first


def test_difference(torch: Any) -> None:
    """The first wrong place is named with what is there and what must be; a NaN is wrong."""
    right = torch.arange(6.0)
    wrong = right.clone()
    wrong[4] = float("nan")
    assert worker.difference("sum", right, right.clone()) == ""
    assert (
        worker.difference("sum", wrong, right)
        == "sum is wrong in 1 of 6 places, first at index 4: nan, must be 4.0"
    )


def test_checksum(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is the same each time, and another one for a single bit in either precision."""
    steps = {"repetitions": 2, "order": 64}
    device = torch.device("cpu")
    number, wrong = worker.checksum(device, steps)
    assert (number, wrong) == (*worker.checksum(device, steps)[:1], "")
    multiply = torch.mm
    operands: list[list[float]] = []

    def noting(left: Any, right: Any) -> Any:
        operands[:] = [one.flatten()[:3].tolist() for one in (left, right)]
        return multiply(left, right)

    monkeypatch.setattr(torch, "mm", noting)
    assert worker.checksum(device, steps)[0] == number
    assert operands == [
        [(place - 32760) / 32768 for place in places]
        for places in ((0, 48271, 2 * 48271 - 65521), (0, 16807, 2 * 16807))
    ]
    counts = itertools.count()

    def unsteady(left: Any, right: Any) -> Any:
        return multiply(left, right) + next(counts)

    monkeypatch.setattr(torch, "mm", unsteady)
    first = "matrix product of order 64 in torch.bfloat16: other bits when repeated"
    assert worker.checksum(device, steps)[1] == first
    for kind in (torch.bfloat16, torch.float32):

        def flipping(left: Any, right: Any, kind: Any = kind) -> Any:
            product = multiply(left, right)
            if product.dtype == kind:
                product.view(torch.uint8)[63, 5] ^= 1
            return product

        monkeypatch.setattr(torch, "mm", flipping)
        other, wrong = worker.checksum(device, steps)
        assert (other != number, wrong) == (True, "")


def test_what_a_device_does_alone(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product and two copies, each as often as asked; a wrong element of the product shows."""
    device, steps = torch.device("cpu"), {"repetitions": 3, "order": 8, "bytes": 64}
    found = [*worker.device_steps(device, steps)]
    assert [(op, size, len(seconds), wrong) for op, size, seconds, wrong in found] == [
        ("matrix_product", 8 * 8 * 4, 3, ""),
        ("device_copy", 64, 3, ""),
        ("host_to_device", 64, 3, ""),
    ]
    multiply = torch.mm
    operands: set[float] = set()

    def break_one(left: Any, right: Any, out: Any) -> None:
        operands.update(left.flatten().tolist(), right.flatten().tolist())
        multiply(left, right, out=out)
        out[5, 7] += 1

    monkeypatch.setattr(torch, "mm", break_one)
    wrong = [told for *_, told in worker.device_steps(device, steps)]
    assert "of order 8, times a vector, is wrong in 1 of 8 places, first at index 5" in wrong[0]
    assert wrong[1:] == ["", ""]
    assert operands == {-1.0, 0.0, 1.0}


def test_times_of_a_gpu_are_those_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count milliseconds, once all that was queued is done."""
    done: list[str] = []

    class Event:
        """An event of CUDA."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            """Queue it."""
            done.append("event")

        def elapsed_time(self, _end: object) -> float:
            """Return the time between two."""
            assert done[-1] == "end"
            return 1500.0

    cuda = SimpleNamespace(Event=Event, synchronize=lambda _: done.append("end"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    device: Any = SimpleNamespace(type="cuda")
    assert worker.timed(device, [lambda: done.append("call")] * 2) == [1.5, 1.5]
    assert done == [*["event", "call", "event"] * 2, "end"]


class Played:
    """A round of rank 1 of four whose collectives are right and take half a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **job: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        self.prepared: list[tuple[int, int]] = []
        """Salt and size of each buffer of the rank."""
        self.at_once: list[int] = []
        self.wrong: Iterator[str] = iter(())
        agent: Any = SimpleNamespace(send=self.sent.append, stage=lambda _stage: None)
        board: Any = None
        given = {"rank": 1, "size": 4, "device": "cpu", "prefix": "", "timeout": 1.0} | job
        self.round = worker.RankRound(agent, board, given)
        monkeypatch.setattr(worker, "pattern", self._pattern)
        monkeypatch.setattr(worker, "timed", self._timed)
        monkeypatch.setattr(worker, "difference", lambda *_: next(self.wrong, ""))
        monkeypatch.setattr(worker, "reproducible", lambda _: "")
        for name in ("agent_store", "backend_options", "connect", "linger", "synchronize"):
            monkeypatch.setattr(worker, name, lambda *_: None)
        monkeypatch.setattr(worker, "prepare_environment", lambda _: None)

    def _pattern(self, first: int, ranks: int, salt: int, size: int) -> Any:
        if (first, ranks) == (1, 1):
            self.prepared.append((salt, size))
        else:
            assert (first, ranks, (salt, size) in self.prepared) == (0, 4, True)
        return SimpleNamespace(to=lambda _: None)

    def _timed(self, _device: object, calls: Sequence[object]) -> list[float]:
        self.at_once.append(len(calls))
        return [0.5] * len(calls)


@pytest.mark.parametrize(
    ("size", "at_once"), [(4, [5]), (16 << 20, [2, 2, 1]), (17 << 20, [1] * 5)]
)
def test_how_many_buffers_are_prepared(
    monkeypatch: pytest.MonkeyPatch, size: int, at_once: list[int]
) -> None:
    """At most 32 MiB at once, but one; no two hold the same data."""
    played = Played(monkeypatch)
    assert played.round.reduce_and_check(size, 5) == [0.5] * 5
    assert played.at_once == at_once
    assert len({*played.prepared}) == 5


def test_a_round_of_a_rank(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number connects it, then each size is warmed up, timed and verified. What is told is the
    bandwidth of the bus, of which a ring uses 2 (n - 1) / n for each byte, and the first result
    that is wrong.
    """
    del torch
    steps = {"device_steps": [], "steps": [(1000, 3), (2000, 2)], "warm_up": 2}
    played = Played(monkeypatch, **steps)
    played.round.run()
    sizes = [size for _, size in played.prepared]
    assert sizes == [4, *[1000] * 2, *[2000] * 2, *[1000] * 3, *[2000] * 2, 1000, 2000]
    assert played.sent == [
        {"timing": ["all_reduce", 1000, 0.5, 3000.0]},
        {"timing": ["all_reduce", 2000, 0.5, 6000.0]},
        {"end": "ok", "stage": "verify", "reason": "", "detail": ""},
    ]
    played = Played(monkeypatch, **steps)
    played.wrong = iter(["", "", "first", "", "", "second"])
    played.round.run()
    end = {
        "end": "corrupted",
        "stage": "warm_up",
        "reason": "wrong_data",
        "detail": "rank 1: first",
    }
    assert played.sent[-1] == end
    played = Played(monkeypatch, **steps, size=1, rank=0)
    monkeypatch.setattr(worker, "pattern", lambda *_: SimpleNamespace(to=lambda _: None))
    played.round.run()
    assert [next(iter(sent)) for sent in played.sent] == ["end"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_know_each_other_before_they_connect(
    monkeypatch: pytest.MonkeyPatch, rank: int, backend: str
) -> None:
    """NCCL's by a number that the first one draws; their versions are the same."""
    monkeypatch.setattr(worker, "versions", lambda _: "nccl 2")
    monkeypatch.setattr(secrets, "randbits", lambda bits: bits)
    monkeypatch.delenv("NCCL_SOCKET_MAGIC", raising=False)
    kept = {"here/0": b"nccl 2", "here/1": b"nccl 2", "magic": b"7"}

    def keep(key: str, text: str) -> None:
        kept[key] = text.encode()

    store = SimpleNamespace(set=keep, get=kept.__getitem__)
    worker.synchronize(store, {"rank": rank, "size": 2, "backend": backend})
    drawn = {0: "63", 1: "7"}[rank] if backend == "nccl" else None
    assert os.environ.get("NCCL_SOCKET_MAGIC") == drawn
    kept["here/2"] = b"nccl 3"
    with pytest.raises(worker.VersionsDiffer, match=rf"rank {rank} has nccl 2, rank 2 nccl 3$"):
        worker.synchronize(store, {"rank": rank, "size": 3, "backend": backend})


def test_a_rank_that_is_done_waits_for_the_others() -> None:
    """For two seconds; that they are gone does not matter."""
    asked: list[Any] = []

    def wait(*given: Any) -> None:
        asked.append(given)
        raise worker.StoreFailure("gone")

    store = SimpleNamespace(set=lambda *given: asked.append(given), wait=wait)
    worker.linger(store, {"rank": 1, "size": 2})
    assert asked == [("done/1", b"1"), (["done/0", "done/1"], timedelta(seconds=2))]


def test_cuda_has_20_seconds_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the process that starts it is killed, and nobody waits for its end."""
    waited: list[float] = []

    def nothing(*given: Any) -> tuple[list[int], ...]:
        waited.append(given[3])
        return [], [], []

    with socket.socket() as control, subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setattr(worker, "start", lambda *_: process.pid)
        monkeypatch.setattr(select, "select", nothing)
        monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))
        found = worker.usable_gpus(control, "")
        monkeypatch.undo()
        assert process.wait(60) == -signal.SIGKILL
    assert found == {"gpus": 0, "no_gpus": "CUDA does not start within 20 s"}
    assert waited == [20.0]


@pytest.mark.parametrize(("device", "hip", "versions", "told"), [
    ("cuda", None, (12, 4, 5), "H100, 132 SM 9.0, driver 570.1, torch 2.9, cuBLAS 12.4.5"),
    ("cuda", None, (), ""),
    ("cuda", "6.1", (12, 4, 5), ""),
    ("cpu", None, (12, 4, 5), ""),
])  # fmt: skip
def test_what_bits_depend_on(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str, versions: Sequence[int], told: str
) -> None:
    """GPU, driver, torch and the cuBLAS that is loaded, by its own word; nothing elsewhere."""

    def property_of(which: int, number: Any) -> int:
        number._obj.value = versions[which]
        return 0

    files = {
        "/sys/module/nvidia/version": "570.1\n",
        "/proc/self/maps": "7f00-7f10 r-xp 00000000 08:01 9    /a b/libcublas.so.12\n" * 2
        if versions
        else "",
    }
    gpu = SimpleNamespace(name="H100", multi_processor_count=132, major=9, minor=0)
    fake = SimpleNamespace(
        __version__="2.9",
        version=SimpleNamespace(hip=hip),
        cuda=SimpleNamespace(init=lambda: None, get_device_properties=lambda _: gpu),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(worker, "open", lambda path, **_: io.StringIO(files[path]), raising=False)
    libraries = {"/a b/libcublas.so.12": SimpleNamespace(cublasGetProperty=property_of)}
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    found: Any = SimpleNamespace(type=device)
    assert worker.reproducible(found) == told


@pytest.mark.parametrize(("error", "slug"), [
    (RuntimeError("[enforce fail] Connection closed by peer [127.0.0.1]:5"), "connection_lost"),
    (RuntimeError("Connect: Connection refused"), "refused"),
    (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), "timeout"),
    (RuntimeError("CUDA out of memory"), "out_of_memory"),
    (OSError(113, "No route to host"), "no_route"),
    (worker.StoreFailure("timeout"), "store"),
    (worker.VersionsDiffer("x"), "versions_differ"),
    (ValueError("something else"), "error"),
])  # fmt: skip
def test_reasons(error: Exception, slug: str) -> None:
    """What libraries say in words becomes one of a few slugs."""
    assert worker.reason(error) == slug


def test_an_error_of_any_length_fits_into_a_packet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why torch cannot be imported is told, cut, in a packet that is no larger than that takes."""
    (tmp_path / "torch.py").write_text("raise ImportError(chr(0x1F4A5) * 100_000)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    agent, parent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agent, parent:
        worker.serve(parent, "")
        packet = agent.recv(1 << 20)
    assert json.loads(packet)["detail"].endswith(chr(0x1F4A5))
    assert worker.PACKET / 2 < len(packet) <= worker.PACKET


@pytest.fixture
def channel() -> Iterator[tuple[Any, socket.socket]]:
    """Give a worker's store on one end of a channel, and its other end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with ours, theirs:
        agent = worker.AgentChannel(theirs)
        yield worker.agent_store(agent, "rail3/", 60.0), ours
        ours.close()
        if agent._reader is not None:
            agent._reader.join(60)
        agent._stream.close()


def answered(
    ours: socket.socket, answer: Callable[[dict[str, Any]], dict[str, Any]], count: int
) -> list[dict[str, Any]]:
    """Answer so many requests, in the reverse of the order in which they came, and return them."""
    with ours.makefile("rb") as stream:
        requests = [
            json.loads(stream.read(worker.LENGTH.unpack(stream.read(4))[0])) for _ in range(count)
        ]
        for request in reversed(requests):
            body = json.dumps({"id": request["id"], **answer(request)}).encode()
            ours.sendall(worker.LENGTH.pack(len(body)) + body)
    return requests


def test_store_operations(channel: tuple[Any, socket.socket]) -> None:
    """Every operation goes to the agent with its group's prefix; binary stays binary."""
    store, ours = channel
    replies: dict[str, Any] = {
        "set": True,
        "get": base64.b64encode(b"\0\xff").decode(),
        "add": 5,
        "check": True,
        "wait": True,
        "delete": True,
    }
    seen: list[dict[str, Any]] = []

    def serve() -> None:
        for _ in range(9):
            seen.extend(answered(ours, lambda one: {"value": value_of(one)}, 1))

    def value_of(one: dict[str, Any]) -> Any:
        return one["key"] != "rail3/none" and replies[one["store"]]

    agent = threading.Thread(target=serve)
    agent.start()
    store.set("a", b"\0\x01")
    assert store.get("a") == b"\0\xff"
    assert store.add("n", 2) == 5
    assert store.check(["a"]) is True
    assert store.check(["a", "none"]) is False
    store.wait(["a"])
    store.wait(["a"], timedelta(seconds=3))
    assert store.delete_key("a") is True
    agent.join(60)
    assert [(one["store"], one["key"]) for one in seen] == [
        (op, "rail3/" + key)
        for op, key in [
            ("set", "a"),
            ("get", "a"),
            ("add", "n"),
            *[("check", "a"), ("check", "a"), ("check", "none")],
            *[("wait", "a"), ("wait", "a")],
            ("delete", "a"),
        ]
    ]
    assert [one["timeout"] for one in seen if one["store"] == "wait"] == [60.0, 3.0]
    assert base64.b64decode(seen[0]["value"]) == b"\0\x01"


def test_store_from_two_threads(channel: tuple[Any, socket.socket]) -> None:
    """A thread that waits for a key keeps no other from the store, and each gets its own answer."""
    store, ours = channel
    found: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=lambda key=key: found.update({key: store.get(key)}))
        for key in ("x", "y")
    ]
    for thread in threads:
        thread.start()
    answered(ours, lambda one: {"value": base64.b64encode(one["key"].encode()).decode()}, 2)
    for thread in threads:
        thread.join(60)
    assert found == {"x": b"rail3/x", "y": b"rail3/y"}


def test_store_failure(channel: tuple[Any, socket.socket]) -> None:
    """What the agent could not do is an error that says so."""
    store, ours = channel
    agent = threading.Thread(target=answered, args=(ours, lambda _one: {"error": "timeout"}, 1))
    agent.start()
    with pytest.raises(worker.StoreFailure, match="get of rail3/a: timeout"):
        store.get("a")
    agent.join(60)
    closer = threading.Timer(0.1, ours.shutdown, [socket.SHUT_RDWR])
    closer.start()
    with pytest.raises(worker.StoreFailure, match="the agent is gone"):
        store.get("b")
    closer.join(60)


def test_local_store() -> None:
    """A get waits for another's set; an add counts; a wait ends; everything is bounded."""

    async def main() -> None:
        store = LocalStore()
        waiting = asyncio.create_task(store("get", "a", None, 60))
        await asyncio.sleep(0)
        assert await store("check", "a", None, 1) is False
        await store("set", "a", b"1", 1)
        assert await waiting == b"1"
        assert await store("add", "a", 4, 1) == 5
        assert await store("get", "a", None, 1) == b"5"
        assert await store("delete", "a", None, 1) is True
        with pytest.raises(TimeoutError):
            await store("wait", "a", None, 0.01)
        await store("set", "k" * MAX_KEY, b"v" * MAX_VALUE, 1)
        refused: list[tuple[str, str, bytes | int | None]] = [
            ("set", "k" * (MAX_KEY + 1), b""),
            ("set", "a", b"v" * (MAX_VALUE + 1)),
            ("set", "a", 5),
            ("explode", "a", None),
        ]
        for op, key, value in refused:
            with pytest.raises(StoreError):
                await store(op, key, value, 1)
        await store("set", "text", b"x", 1)
        with pytest.raises(StoreError, match="does not hold a number"):
            await store("add", "text", 1, 1)
        for number in range(MAX_KEYS - 2):
            await store("set", str(number), b"", 1)
        with pytest.raises(StoreError, match="full"):
            await store("set", "one more", b"", 1)
        await store("set", "text", b"", 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"", ""),
        (b"one\n\x1b[2Jtwo\xff\n", "one  [2Jtwo\ufffd"),
        (b"a" + b"b" * 599, "a" + "b" * 599),
        (b"a" + b"b" * 600, "b" * 600),
        (b"a" * 65_000 + b"the end", "a" * 593 + "the end"),
        (b"a" * 66_000 + b"the end", "a" * 600),
    ],
)
def test_end_of_what_is_printed(printed: bytes, shown: str) -> None:
    """The last 600 bytes on one line, of 64 KiB: a library that prints in a loop fills no more.
    The counters before it stay as they are.
    """
    page = StatusPage()
    os.pwrite(page.descriptor, (7).to_bytes(8, "little") + (5).to_bytes(8, "little"), 0)
    with contextlib.suppress(PermissionError):  # beyond the page
        while printed:
            printed = printed[os.write(page.descriptor, printed) :]
    assert page.printed() == shown
    assert page.counters() == (7, 5)
    page.close()


def test_a_signal_without_a_name() -> None:
    """A worker that a real-time signal has ended is told like any other."""
    ended: Any = SimpleNamespace(pid=7, status=35)
    told = describe_exit(ended, SimpleNamespace(printed=str))  # type: ignore[arg-type] # a page
    assert told == ("killed", "process 7 was ended by signal 35")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Make a small environment: an interpreter behind a link, a library, a package."""
    packages = tmp_path / "base" / "lib" / "python3.11" / "site-packages" / "torch"
    packages.mkdir(parents=True)
    (packages / "__init__.py").touch(0o644)
    (tmp_path / "base" / "bin").mkdir()
    (tmp_path / "base" / "bin" / "python3").touch(0o755)
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "lib" / "python3.11").mkdir(parents=True)
    (tmp_path / "env" / "pyvenv.cfg").write_text(
        f"home = {tmp_path / 'base' / 'bin'}\n", encoding="utf-8"
    )
    (tmp_path / "env" / "bin" / "python").symlink_to(tmp_path / "base" / "bin" / "python3")
    return tmp_path


def test_sound_environment(environment: Path) -> None:
    """What only its owner and root can write is accepted, with the folders of its modules."""
    objections, roots = launch.check(str(environment / "env" / "bin" / "python"))
    assert objections == []
    assert roots == [
        str(environment / "env" / "lib" / "python3.11"),
        str(environment / "base" / "lib" / "python3.11"),
    ]


@pytest.mark.parametrize("path", [
    "env",
    "env/bin",
    "env/pyvenv.cfg",
    "env/lib",
    "env/lib/python3.11",
    "base",
    "base/bin",
    "base/bin/python3",
    "base/lib/python3.11/site-packages",
    "base/lib/python3.11/site-packages/torch/__init__.py",
])  # fmt: skip
def test_writable_by_others(environment: Path, path: str) -> None:
    """Any file or folder that others can write is found, wherever on the way it is, and named."""
    target = environment / path
    target.chmod(0o777)
    objections, _ = launch.check(str(environment / "env" / "bin" / "python"))
    assert objections == [f"{target} is writable by everyone"]


def test_owned_by_others(environment: Path) -> None:
    """A file of another user or group is refused, also where a link leads out."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    packages = environment / "base" / "lib" / "python3.11" / "site-packages"
    outside = environment / "outside.so"
    outside.touch()
    (packages / "link.so").symlink_to(outside)
    python = str(environment / "env" / "bin" / "python")
    assert launch.check(python)[0] == []
    os.chown(outside, 4321, 0)
    assert launch.check(python)[0] == [f"{outside} belongs to user 4321"]
    os.chown(outside, 0, 4321)
    outside.chmod(0o664)
    assert launch.check(python)[0] == [f"{outside} is writable by group 4321"]


@pytest.mark.parametrize(
    ("count", "named"), [(3, "0 is; 1 is; 2 is"), (5, "0 is; 1 is; 2 is; and 2 more")]
)
def test_so_many_objections_are_named(count: int, named: str) -> None:
    """Others are counted."""
    told = launch.refusal("python", [f"{number} is" for number in range(count)])
    assert told == f"others can change python: {named}"


@pytest.mark.parametrize(("links", "followed"), [(40, True), (41, False)])
def test_many_links(environment: Path, links: int, *, followed: bool) -> None:
    """As many as Linux follows; more are a loop."""
    python = environment / "base" / "bin" / "python3"
    for number in range(links):
        link = environment / "base" / "bin" / f"link{number}"
        link.symlink_to(python)
        python = link
    if followed:
        assert [*launch.way(str(python))] == []
    else:
        with pytest.raises(OSError, match="too many links"):
            [*launch.way(str(python))]


def test_sticky_folder_on_the_way(environment: Path) -> None:
    """A sticky folder on the way is no danger; inside the environment it is."""
    python = str(environment / "env" / "bin" / "python")
    environment.chmod(0o1777)
    assert launch.check(python)[0] == []
    (environment / "base" / "lib" / "python3.11" / "site-packages").chmod(0o1777)
    assert len(launch.check(python)[0]) == 1
