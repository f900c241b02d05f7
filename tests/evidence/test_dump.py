"""The reader of flight recorders' dumps.

Genuine ones, ones that another program made, and ones that are made to do harm.
"""

from __future__ import annotations

import functools
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.explain.dumps import digest_as_nobody, is_dump
from dshealthd.explain.flight_recorder import MAX_EXACT, MalformedDump, digest, load
from dshealthd.linux.forked import Ended
from tests.evidence.steps import take

MAX_DUMP = 32 << 20

GENUINE = """
import sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
tensor = torch.ones(4, 2)
for _ in range(3):
    dist.all_reduce(tensor)
dist.barrier(async_op=True)
sys.stdout.buffer.write(_dump_fr_trace())
sys.stdout.flush()
"""


def entry(
    number: int, name: str = "nccl:all_reduce", state: str = "scheduled", **others: Any
) -> dict[str, Any]:
    """Return an entry as torch 2.13 writes it for NCCL."""
    frames = [
        {
            "name": "all_reduce",
            "filename": "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
            "line": 1,
        },
        {"name": "forward", "filename": "/home/user/train.py", "line": 55},
    ]
    return {
        "frames": frames,
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": 1,
        "input_sizes": [[4096, 1024]],
        "state": state,
        "is_p2p": False,
        "retired": state == "completed",
        **others,
    }


def dump(*entries: Any, **others: Any) -> bytes:
    """Return a dump of these entries."""
    return pickle.dumps(
        {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}},
            "entries": list(entries),
            **others,
        },
        2,
    )


def read_in_child(data: bytes) -> Ended:
    """Have a dump read as a collection has it read."""
    return take(functools.partial(digest_as_nobody, data=data))[0]


def test_a_dump_of_torch_itself_is_read(tmp_path: Path) -> None:
    """What torch's own function dumps of real collectives over gloo is understood."""
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GENUINE, str(tmp_path / "store")],
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=200,
    ).stdout
    (group,) = digest(output)["groups"]
    assert (group["name"], group["entered"]) == ("0 default_pg", 4)
    assert [operation["name"] for operation in group["last"]] == [
        "all_reduce",
        "all_reduce",
        "all_reduce",
        "barrier",
    ]
    assert group["last"][0]["sizes"] == "4x2"
    assert group["last"][0]["at"].endswith("<module>")


def test_the_first_pending_operation_is_told_with_the_training_s_own_line() -> None:
    """What NCCL completed is not pending; the place is the innermost frame outside torch."""
    found = digest(dump(entry(7, state="completed"), entry(8, state="started"), entry(9)))
    (group,) = found["groups"]
    assert (group["entered"], group["completed"], group["ranks"]) == (9, 7, "[0, 1]")
    assert [(operation["number"], operation["state"]) for operation in group["pending"]] == [
        (8, "started"),
        (9, "scheduled"),
    ]
    assert group["pending"][0]["at"] == "/home/user/train.py:55 forward"


def test_status_of_the_group_counts_where_entries_do_not_tell() -> None:
    """Gloo leaves its entries scheduled for ever; the group's status tells what is complete."""
    found = digest(
        dump(entry(1), entry(2), entry(3), pg_status={"0": {"last_completed_collective": 2}})
    )
    assert [operation["number"] for operation in found["groups"][0]["pending"]] == [3]


def test_sends_and_receives_are_left_out() -> None:
    """Point-to-point operations are numbered apart, and two ranks' numbers cannot be compared."""
    assert digest(dump(entry(3, is_p2p=True)))["groups"] == []


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_dump_that_names_a_function_is_refused(tmp_path: Path) -> None:
    """Neither os.system nor anything else can be named, and nothing runs."""
    mark = tmp_path / "mark"
    with pytest.raises(MalformedDump, match=r"it imports posix\.system"):
        load(pickle.dumps({"entries": [Evil(f"touch {mark}")]}))
    assert not mark.exists()


@pytest.mark.parametrize("data", [
    pytest.param(b"cbuiltins\neval\n(S'1'\ntR.", id="protocol 0"),
    pytest.param(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", id="stack global"),
    pytest.param(b"\x80\x02\x82\x01.", id="extension"),
    pytest.param(b"Psomething\n.", id="persistent"),
    pytest.param(b"(ios\nsystem\n.", id="instance"),
    pytest.param(b"\x80\x02N}b.", id="build"),
    pytest.param(b"\x80\x02]\x81.", id="new object"),
    pytest.param(b"\x80\x05\x97.", id="buffer"),
    pytest.param(b"", id="empty"),
    pytest.param(b"\x80\x63.", id="protocol 99"),
    pytest.param(pickle.dumps([1, 2]), id="list"),
    pytest.param(pickle.dumps({"entries": 3}), id="no entries"),
])  # fmt: skip
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    """Every opcode that could reach outside, and every other shape, ends in one kind of error."""
    with pytest.raises(MalformedDump):
        digest(data)


@given(st.binary(max_size=300))
def test_any_bytes_end_in_a_document_or_one_error(data: bytes) -> None:
    """Garbage never raises anything else."""
    try:
        digest(data)
    except MalformedDump:
        pass
    except MemoryError:
        assert len(data) > 4


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=10,
)
KEYS = (
    "frames",
    "process_group",
    "pg_id",
    "collective_seq_id",
    "profiling_name",
    "input_sizes",
    "state",
    "is_p2p",
)


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES), max_size=4), VALUES, VALUES)
def test_plain_values_of_any_shape_are_digested(
    entries: list[dict[str, Any]], config: Any, status: Any
) -> None:
    """An entry may hold anything; what makes no sense is left out, and the rest is JSON."""
    good = [entry(1), *({**entry(number), **strange} for number, strange in enumerate(entries, 2))]
    found = digest(dump(*good, pg_config=config, pg_status=status))
    assert found["entries"] == len(good)
    assert found["groups"][0]["entered"] >= 1


def test_numbers_of_a_million_digits_are_no_counts() -> None:
    """To write such a number takes Python hours."""
    found = digest(dump(entry(1), entry(1 << 4_000_000), entry(2, input_sizes=[[1 << 4_000_000]])))
    assert found["groups"][0]["entered"] == 2


def test_what_shares_itself_a_billion_times_is_read_at_once() -> None:
    """A list of lists of one list is small until somebody walks through it."""
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    assert digest(dump(entry(1, frames=bomb, input_sizes=bomb)))["groups"][0]["entered"] == 1


@pytest.mark.parametrize("data", [
    pytest.param(
        b"\x80\x02r" + struct.pack("<I", 0xFFFFFFF0) + b".", id="memo of four billion entries"
    ),
    pytest.param(
        b"\x80\x02" + b"]r" + struct.pack("<I", 0x7FFFFFF0) + b".",
        id="memo of two billion entries",
    ),
    pytest.param(
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", id="byte array of a terabyte"
    ),
])  # fmt: skip
def test_a_bomb_of_memory_ends_in_its_own_process(data: bytes) -> None:
    """What asks for more memory than there is says so, or is killed; the collection goes on."""
    step = read_in_child(data)
    assert step.value is None
    assert step.problem


def test_a_nest_a_million_deep_is_read_or_refused() -> None:
    """No recursion of Python or C ends the collection."""
    step = read_in_child(b"\x80\x02" + b"(" * 1_000_000 + b"t" * 1_000_000 + b".")
    assert step.problem


def test_the_largest_dump_that_is_taken_cannot_take_all_memory() -> None:
    """Each byte makes an object of 64, for which nobody's process has no room."""
    step = read_in_child(b"\x80\x02(" + b"}" * MAX_DUMP + b"l.")
    assert step.problem == "it needs more memory than its limit"


def test_the_reader_is_nobody_and_can_open_nothing() -> None:
    """The process that takes a dump apart has no user, no file and no child of its own to
    misuse.
    """

    def misuse(_emit: object) -> dict[str, Any]:
        digest_as_nobody(_emit, data=dump(entry(1)))  # type: ignore[arg-type] # emits nothing
        found: dict[str, Any] = {"user": os.geteuid()}
        acts: dict[str, Callable[[], int]] = {
            "file": lambda: os.open("/dev/null", os.O_RDONLY),
            "process": os.fork,
        }
        for name, act in acts.items():
            try:
                act()
                found[name] = True
            except OSError:
                found[name] = False
        return found

    step, _ = take(misuse)
    assert step.value["file"] is False
    if os.geteuid() == 0:
        assert step.value == {"user": 65534, "file": False, "process": False}


def test_the_members_of_a_large_group_are_whole() -> None:
    """A list that is cut would make ranks of a group look as if they were not in it."""
    ranks = str(list(range(1024)))
    for members, told in ((ranks, ranks), ("[" + "9" * 5000 + "]", ""), ("[1, x]", "")):
        document = {"entries": [entry(1)], "pg_config": {"0": {"name": "0", "ranks": members}}}
        (group,) = digest(pickle.dumps(document, protocol=2))["groups"]
        assert group["ranks"] == told


def test_counts_that_no_recorder_reaches_are_none() -> None:
    """The largest count that all readers of JSON hold is taken, the next one is no count."""
    (group,) = digest(dump(entry(MAX_EXACT), entry(MAX_EXACT + 1)))["groups"]
    assert [operation["number"] for operation in group["last"]] == [MAX_EXACT]


@pytest.mark.parametrize(
    ("head", "expected"),
    [(b"\x80\x02", True), (b"\x80\x05.", True), (b"\x80\x06", False), (b"\x80\x01", False),
     (b"\x80", False), (b"}\x02", False), (b"", False)],
)  # fmt: skip
def test_first_bytes_tell_a_dump(tmp_path: Path, *, head: bytes, expected: bool) -> None:
    """The opcode of pickle's protocol and its version, 2 to 5."""
    (tmp_path / "0").write_bytes(head)
    assert is_dump(str(tmp_path / "0")) is expected
