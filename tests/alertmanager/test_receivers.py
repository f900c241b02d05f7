"""Receivers to copy: a real Alertmanager takes them, and sends what Opsgenie and ntfy expect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests import yaml_files
from tests.alertmanager.test_messages import LOST, TEXT
from tests.lab.receiver import Receiver
from tests.lab.servers import ALERTMANAGER, PART, alertmanager, routes
from tests.lab.station import Loopback

ADDRESS = "127.0.0.63"
ALERTS, TOPIC = "v2/alerts", "gpu-oncall?template=alertmanager"
"""Where Opsgenie and ntfy are sent it."""
FILE = ALERTMANAGER / PART


def test_opsgenie_and_ntfy(station: Loopback, receiver: Receiver, tmp_path: Path) -> None:
    """A page arrives at both, with the key from its file, and says what and where in their
    fields.
    """
    found = {one["name"]: one for one in yaml_files.load(FILE)["receivers"]}
    (opsgenie,) = found["dshealthd-page-opsgenie"]["opsgenie_configs"]
    (ntfy,) = found["dshealthd-page-ntfy"]["webhook_configs"]
    (tmp_path / "opsgenie").write_text("k3y", encoding="utf-8")
    (tmp_path / "ntfy").write_text("t0ken", encoding="utf-8")
    opsgenie |= {"api_key_file": str(tmp_path / "opsgenie"), "api_url": f"{receiver.url}/"}
    ntfy["url"] = ntfy["url"].replace("https://ntfy.example.com", receiver.url)
    ntfy["http_config"]["authorization"]["credentials_file"] = str(tmp_path / "ntfy")

    def adapt(config: dict[str, Any]) -> None:
        for route in routes(config):
            route |= {"group_wait": "1s"}
        page = next(found for found in config["receivers"] if found["name"] == "dshealthd-page")
        page |= {"opsgenie_configs": [opsgenie], "webhook_configs": [ntfy]}

    with alertmanager(station, tmp_path, receiver, adapt) as server:
        server.ask("/api/v2/alerts", [LOST])
        assert receiver.wait(lambda: receiver.sent(ALERTS) and receiver.sent(TOPIC), 60)
    taken = receiver.sent(ALERTS)[-1]
    alert = taken.document
    assert taken.authorization == "GenieKey k3y"
    assert alert["message"].endswith("GPU lost: node-17 GPU 3")
    assert alert["description"].strip() == TEXT.strip()
    assert (alert["priority"], alert["entity"]) == ("P1", "node-17")
    assert alert["tags"] == ["gpu-lost", "gpu"]
    taken = receiver.sent(TOPIC)[-1]
    assert taken.authorization == "Bearer t0ken"
    assert taken.document["alerts"][0]["annotations"]["summary"] == "GPU lost"


def test_teams_is_yaml_once_the_comment_signs_are_gone() -> None:
    """What is commented out, as Debian's Alertmanager does not know it, is a receiver of this
    file.
    """
    text = FILE.read_text(encoding="utf-8")
    head, _, commented = text.partition("  # - name: dshealthd-ticket-teams")
    commented = re.sub(r"(?m)^  # ", "  ", f"  # - name: dshealthd-ticket-teams{commented}")
    receivers = yaml.safe_load(head + commented)["receivers"]
    (teams,) = receivers[-1]["msteamsv2_configs"]
    assert teams.keys() == {"webhook_url_file", "send_resolved", "title", "text"}
