"""The section `[probe]`: what cannot be meant is an error at its key."""

from __future__ import annotations

from typing import Any

import pytest

from dshealthd.core.options import Errors, decode
from dshealthd.probe.options import ProbeOptions

PEER = {"listen_address": "b:1", "key_file": "k"}
NODES = {"nodes": ["a", "b"]}
NO_HOST = "names no single host; workers on other nodes connect to this address, too"
NO_PORT = 'is not "HOST:PORT" or ":PORT" with a port from 0 to 65535'


@pytest.mark.parametrize(
    ("table", "errors"),
    [
        ({}, []),
        ({"members": NODES, "peer": PEER, "worker": {"environment": ["A_1=", "B=c d=e"]}}, []),
        ({"members": {"dns": "all.gpu", "name": "a"}, "peer": {"listen_address": ""}}, []),
        (
            {"members": NODES | {"slurm": "b"}},
            ["probe.members.slurm: only one of nodes, slurm can say who the members are"],
        ),
        (
            {"members": {"dns": "a b", "name": "a/b"}},
            [
                'probe.members.dns: "a b" is not a valid node name',
                'probe.members.name: "a/b" is not a valid node name',
            ],
        ),
        *(
            (
                {"members": NODES, "peer": PEER | {"listen_address": address}},
                [f'probe.peer.listen_address: "{address}" {NO_HOST}'],
            )
            for address in (":10062", "0.0.0.0:10062", "[::]:10062", "[0:0::]:10062")
        ),
        (
            {"members": NODES, "peer": PEER | {"listen_address": "b"}},
            [f'probe.peer.listen_address: "b" {NO_PORT}'],
        ),
        (
            {"members": NODES, "peer": {"listen_address": "b:1"}},
            ["probe.peer.listen_address: needs key_file"],
        ),
        (
            {"peer": PEER},
            ["probe.peer: a listen address needs members; probe.members has no source of them"],
        ),
        (
            {"worker": {"environment": ["a=b", "A", "=b", "A=\n", "9=b"]}},
            [
                f'probe.worker.environment: "{entry}" is not NAME=VALUE'
                for entry in ("a=b", "A", "=b", "A=\n", "9=b")
            ],
        ),
    ],
)
def test_values_that_cannot_be(table: dict[str, Any], errors: list[str]) -> None:
    """Every problem is named with its key; what is usable is none."""
    found = Errors()
    decode(ProbeOptions, table, "probe", found)
    assert found == errors


@pytest.mark.parametrize(
    ("members", "address", "wanted"), [(NODES, "b:1", True), (NODES, "", False), ({}, "b:1", False)]
)
def test_probes_need_members_and_an_address(
    members: dict[str, Any], address: str, *, wanted: bool
) -> None:
    """With either alone they are off."""
    table = {"members": members, "peer": {"listen_address": address, "key_file": "k"}}
    assert decode(ProbeOptions, table, "probe", Errors()).wanted is wanted
