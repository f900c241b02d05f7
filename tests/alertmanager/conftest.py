"""A real Alertmanager with the shipped configuration, on an address of its module's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.receiver import Receiver
from tests.lab.servers import Server, alertmanager, routes
from tests.lab.station import Loopback


@pytest.fixture(scope="module")
def station(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loopback:
    """An address on which nobody else is given a port between the choice of one and the start."""
    address: str = getattr(request.module, "ADDRESS", "127.0.0.61")
    return Loopback("services", address, tmp_path_factory.mktemp("services"))


@pytest.fixture(scope="module")
def receiver(station: Loopback) -> Iterator[Receiver]:
    """What stands for webhooks, Slack and PagerDuty."""
    with Receiver(station) as made:
        yield made


@pytest.fixture(scope="module")
def server(
    station: Loopback, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> Iterator[Server]:
    """An Alertmanager that waits a second for what belongs together, and not as long as the shipped
    file has it.
    """

    def quick(config: dict[str, Any]) -> None:
        for route in routes(config):
            route |= {"group_wait": "1s", "group_interval": "1s"}

    with alertmanager(station, tmp_path_factory.mktemp("server"), receiver, quick) as made:
        yield made


def page_by_examples(config: dict[str, Any], receiver: Receiver, directory: Path) -> None:
    """Have pages sent by PagerDuty and Slack too, as the examples do, to the receiver."""
    for name, text in (("pagerduty", "k3y"), ("slack", f"{receiver.url}/slack")):
        (directory / name).write_text(text, encoding="ascii")
    found = {entry["name"]: entry for entry in config["receivers"]}
    (pagerduty,) = found["dshealthd-page-pagerduty"]["pagerduty_configs"]
    (slack,) = found["dshealthd-page-slack"]["slack_configs"]
    pagerduty["routing_key_file"] = str(directory / "pagerduty")
    pagerduty["url"] = f"{receiver.url}/v2/enqueue"
    slack["api_url_file"] = str(directory / "slack")
    found["dshealthd-page"] |= {"pagerduty_configs": [pagerduty], "slack_configs": [slack]}
