"""What is said of names of variables."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.jobs.environment import NCCL_COMMON, nccl_variables
from dshealthd.jobs.nccl.names import Misnomer, known_names, misnomer

MAX_NAMES = 256


@pytest.mark.parametrize("name", [
    "NCCL_DEBUG", "NCCL_IB_HCA", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_INSPECTOR_ENABLE",
    "NCCL_VERSION", "NCCL_CE_CHUNK_SIZE", "NCCL_DEBUG_LEVELS", "NCCL_DYNAMIC_CHUNK_SIZE",
    "NCCL_IB_RAIL_POLICY", "NCCL_P2P_PER_CHANNEL_REG_NET_BW", "NCCL_PROGRESS_COUNTERS",
])  # fmt: skip
def test_names_that_are_read(name: str) -> None:
    """Names of NCCL, later releases too, of torch, of plugins, and those that images set are
    right.
    """
    assert misnomer(name) is None


@pytest.mark.parametrize(("name", "meant", "wrong"), [
    ("NCCL_TIMEOUT", "NCCL_TIMEOUT", Misnomer.UNREAD),
    ("DEEPSPEED_DEBUG", "DEEPSPEED_DEBUG", Misnomer.UNREAD),
    ("NCCL_IB_CUDA_SUPPORT", "NCCL_IB_CUDA_SUPPORT", Misnomer.RETIRED),
    ("NCCL_MIN_NRINGS", "NCCL_MIN_NRINGS", Misnomer.RENAMED),
    ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING", Misnomer.RENAMED),
    ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME", Misnomer.MISSPELT),
    ("NCCL_P2P_DISABLED", "NCCL_P2P_DISABLE", Misnomer.MISSPELT),
    ("NCCL_IB_HCAXY", "NCCL_IB_HCA", Misnomer.MISSPELT),  # 22 of 24 letters
    ("NCCL_IB_HCAXYZ", "other", Misnomer.UNKNOWN),  # 22 of 25
    ("NCCL_SOMETHING_OF_OURS", "other", Misnomer.UNKNOWN),
])  # fmt: skip
def test_names_that_are_wrong(name: str, meant: str, wrong: Misnomer) -> None:
    """Each kind of mistake is told as what it is, by a name of the data file."""
    assert misnomer(name) == (meant, wrong)


def test_names_retired_lately_are_let_be() -> None:
    """What a release reads that torch still comes with is no mistake."""
    assert known_names().retired["NCCL_WORK_FIFO_DEPTH"] == "2.21.5"
    assert misnomer("NCCL_WORK_FIFO_DEPTH") is None


@given(st.from_regex(r"(TORCH_)?NCCL_[A-Z0-9_]{1,60}", fullmatch=True))
def test_labels_are_bounded(name: str) -> None:
    """Whatever name a process makes up, what is told of it is a name of ours."""
    found = misnomer(name)
    have = known_names()
    assert found is None or found[0] in {
        "other",
        *have.known,
        *have.retired,
        *have.renamed,
        *have.unread,
    }


def test_the_data_is_consistent() -> None:
    """A name has one place in the file, what something is renamed to is read, and so is all that is
    compared between ranks.
    """
    have = known_names()
    assert not have.known & (have.retired.keys() | have.unread | have.foreign)
    assert set(have.renamed.values()) <= have.known
    assert set(NCCL_COMMON) <= have.known


def test_names_of_an_environment() -> None:
    """Names come out without their values, from the first entry to the last."""
    data = b"NCCL_DEBUG=INFO\0SECRET=NCCL_IB_HCA=x\0TORCH_NCCL_BLOCKING_WAIT=1\0\xff=1\0NCCL_b=1\0"
    data += b"NCCL_\xff=1\0DEEPSPEED_DEBUG=1\0NCCL_NO_VALUE"
    assert nccl_variables(data) == {"NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "DEEPSPEED_DEBUG"}


def test_names_of_a_hostile_environment() -> None:
    """Of any number of names a bounded one is kept."""
    assert (
        len(nccl_variables(b"".join(b"NCCL_%d=\0" % number for number in range(100_000))))
        == MAX_NAMES
    )
    assert nccl_variables(
        b"X=" + b"NCCL_A=" * 100 + b"\0NCCL_B=1\0TORCH_TORCH_NCCL_C=1\0XTORCH_NCCL_D=1\0"
    ) == {"NCCL_B"}
    for size, found in (((1 << 18) - 14, {"NCCL_DEBUG"}), ((1 << 18) - 13, set())):
        assert nccl_variables(b"X=" + b"x" * size + b"\0NCCL_DEBUG=") == found


@pytest.mark.parametrize("data", [
    b"\0" * (2 << 20),
    b"\0NCCL_AAAA" * (2 << 17),
    b"NCCL_A=" * (2 << 18),
    b"\0TORCH_NCCL_" * (2 << 17),
])  # fmt: skip
def test_time_is_bounded(data: bytes) -> None:
    """No environment takes long to search, whatever it is made of."""
    started = time.thread_time()
    nccl_variables(data)
    assert time.thread_time() - started < 5  # a search anew from each byte takes hours
