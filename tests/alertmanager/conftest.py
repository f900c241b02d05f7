"""A real Alertmanager with the shipped configuration, on an address of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.receiver import Receiver
from tests.lab.servers import Server, alertmanager, routes
from tests.lab.station import Loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

ADDRESS = "127.0.0.61"
"""On which nobody else is given a port between the choice of one and the server's start."""


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    """What receives."""
    with Receiver(Loopback("services", ADDRESS, tmp_path_factory.mktemp("receiver"))) as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Server]:
    """An Alertmanager that waits a second for what belongs together, and not as long as the shipped
    file has it.
    """
    directory = tmp_path_factory.mktemp("server")

    def quick(config: dict[str, Any]) -> None:
        for route in routes(config):
            route |= {"group_wait": "1s", "group_interval": "1s"}

    with alertmanager(Loopback("services", ADDRESS, directory), directory, receiver, quick) as made:
        yield made
