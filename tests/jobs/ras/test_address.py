"""Where RAS is looked for: what the environment says, and that it is this node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.jobs.ras.address import (
    Endpoint,
    endpoints,
    is_own_address,
    parse_address,
    ras_enabled,
    ras_exposed,
)

LOOPBACK = ("127.0.0.1", "::1")


def test_default() -> None:
    """Without a word of the job it is where NCCL listens by default, in both families."""
    assert endpoints({}) == (Endpoint("127.0.0.1", 28028), Endpoint("::1", 28028))


@pytest.mark.parametrize(("text", "hosts", "port"), [
    ("localhost:12345", LOOPBACK, 12345),
    ("LocalHost:1", LOOPBACK, 1),
    ("127.0.0.1:28028", ("127.0.0.1",), 28028),
    ("[::1]:65535", ("::1",), 65535),
    ("[::ffff:127.0.0.1]:28029", ("127.0.0.1",), 28029),
    ("0.0.0.0:28028", ("127.0.0.1",), 28028),
    ("[::]:28028", ("::1",), 28028),
    ("10.1.2.3:28028:0:1", ("10.1.2.3",), 28028),
])  # fmt: skip
def test_addresses(text: str, hosts: tuple[str, ...], port: int) -> None:
    """What NCCL understands is understood; an address that is any is asked over loopback."""
    assert parse_address(text) == (hosts, port)


@pytest.mark.parametrize(("text", "said"), [
    ("", "has no valid port"),
    ("localhost", "has no valid port"),
    ("localhost:0", "has no valid port"),
    ("localhost:65536", "has no valid port"),
    ("localhost:٣", "has no valid port"),
    ("[::1]", "has no valid port"),
    ("head.example:28028", "has a host name"),
    ("[fe80::1%eth0]:28028", "is not an address of this node"),
    ("192.0.2.77:28028", "is not an address of this node"),
    ("224.0.0.1:28028", "is not an address of this node"),
    ("255.255.255.255:28028", "is not an address of this node"),
    ("[2001:db8::77]:28028", "is not an address of this node"),
])  # fmt: skip
def test_refused(text: str, said: str) -> None:
    """What is no address, or another machine's, is never connected to, and the error quotes it."""
    with pytest.raises(ValueError, match=said) as caught:
        endpoints({"NCCL_RAS_ADDR": text})
    assert repr(text) in str(caught.value)


def test_own_addresses() -> None:
    """All of 127/8 is this node's, and a documentation address is not."""
    own = ["127.0.0.1", "127.9.9.9", "::1"]
    assert [host for host in (*own, "198.51.100.1") if is_own_address(host)] == own


@given(st.text())
def test_any_text(text: str) -> None:
    """Whatever a job writes there is an address of this node or a ValueError."""
    try:
        found = endpoints({"NCCL_RAS_ADDR": text})
    except ValueError:
        return
    assert all(is_own_address(endpoint.host) for endpoint in found)


@pytest.mark.parametrize(("text", "on"), [
    (None, True),
    ("", True),
    ("1", True),
    ("0x1", True),
    ("0", False),
    ("2", False),
    ("yes", True),
])  # fmt: skip
def test_enabled(text: str | None, *, on: bool) -> None:
    """RAS is on unless it is set to a number other than 1, as NCCL reads it."""
    assert ras_enabled({} if text is None else {"NCCL_RAS_ENABLE": text}) is on


@pytest.mark.parametrize(("environment", "is_exposed"), [
    ({}, False),
    ({"NCCL_RAS_ADDR": "localhost:28028"}, False),
    ({"NCCL_RAS_ADDR": "127.9.8.7:1"}, False),
    ({"NCCL_RAS_ADDR": "[::ffff:127.0.0.1]:1"}, False),
    ({"NCCL_RAS_ADDR": "0.0.0.0:28028"}, True),
    ({"NCCL_RAS_ADDR": "[::]:28028"}, True),
    ({"NCCL_RAS_ADDR": "10.1.2.3:28028"}, True),
    ({"NCCL_RAS_ADDR": "10.1.2.3:28028", "NCCL_RAS_ENABLE": "0"}, False),
    ({"NCCL_RAS_ADDR": "head.example:28028"}, False),
    ({"NCCL_RAS_ADDR": "no port"}, False),
])  # fmt: skip
def test_exposed(environment: dict[str, str], *, is_exposed: bool) -> None:
    """Any address but loopback is open to others; what is not understood is not claimed."""
    assert ras_exposed(environment) is is_exposed
