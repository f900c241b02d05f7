"""A real Alertmanager with the shipped configuration, on 127.0.0.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.receiver import Receiver
from tests.lab.servers import Server, alertmanager
from tests.lab.station import Loopback

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    """What receives."""
    with Receiver(Loopback("services", "127.0.0.1", tmp_path_factory.mktemp("receiver"))) as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Server]:
    """An Alertmanager that waits a second for what belongs together, and not as long as the shipped
    file has it.
    """
    directory = tmp_path_factory.mktemp("server")

    def quick(config: dict[str, Any]) -> None:
        for route in (config["route"], *config["route"]["routes"]):
            route |= {"group_wait": "1s", "group_interval": "1s"}

    with alertmanager(
        Loopback("services", "127.0.0.1", directory), directory, receiver, quick
    ) as made:
        yield made
