"""Receivers to copy: a real Alertmanager takes them, and sends what Opsgenie and ntfy expect."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.alertmanager.test_messages import LOST, TEXT
from tests.lab.servers import alertmanager, routes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.receiver import Receiver
    from tests.lab.station import Loopback

ADDRESS = "127.0.0.63"
FILE = Path(__file__).parents[2] / "deploy/alertmanager/receivers.yml"
Request = tuple[str, str, Any]
"""Path, authorization and document."""


@pytest.fixture
def requests() -> Iterator[tuple[str, list[Request]]]:
    """A server's address, and what it is sent."""
    taken: list[Request] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.append((self.path, self.headers.get("Authorization", ""), json.loads(body)))
            self.send_response(202)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((ADDRESS, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://{ADDRESS}:{server.server_address[1]}", taken
    server.shutdown()
    server.server_close()
    thread.join()


def test_opsgenie_and_ntfy(
    requests: tuple[str, list[Request]], station: Loopback, receiver: Receiver, tmp_path: Path
) -> None:
    """A page arrives at both, with the key from its file, and says what and where in their fields."""
    url, taken = requests
    copied = yaml.safe_load(FILE.read_text(encoding="utf-8"))["receivers"]
    (opsgenie,) = copied[0]["opsgenie_configs"]
    (ntfy,) = copied[1]["webhook_configs"]
    (tmp_path / "opsgenie").write_text("k3y", encoding="utf-8")
    (tmp_path / "ntfy").write_text("t0ken", encoding="utf-8")
    opsgenie |= {"api_key_file": str(tmp_path / "opsgenie"), "api_url": f"{url}/"}
    ntfy["url"] = ntfy["url"].replace("https://ntfy.example.com", url)
    ntfy["http_config"]["authorization"]["credentials_file"] = str(tmp_path / "ntfy")

    def adapt(config: dict[str, Any]) -> None:
        for route in routes(config):
            route |= {"group_wait": "1s"}
        page = next(found for found in config["receivers"] if found["name"] == "dshealthd-page")
        page |= {"opsgenie_configs": [opsgenie], "webhook_configs": [ntfy]}
        config["receivers"] += copied

    with alertmanager(station, tmp_path, receiver, adapt) as server:
        server.ask("/api/v2/alerts", [LOST])
        end = time.monotonic() + 60
        while len(taken) < 2:
            assert time.monotonic() < end, taken
            time.sleep(0.1)
    found = {path.partition("?")[0]: (path, key, document) for path, key, document in taken}
    _, key, alert = found["/v2/alerts"]
    assert key == "GenieKey k3y"
    assert alert["message"].endswith("GPU lost: node-17 GPU 3")
    assert alert["description"].strip() == TEXT.strip()
    assert (alert["priority"], alert["entity"]) == ("P1", "node-17")
    assert alert["tags"] == ["gpu-lost", "gpu"]
    path, key, document = found["/gpu-oncall"]
    assert (path, key) == ("/gpu-oncall?template=alertmanager", "Bearer t0ken")
    assert document["alerts"][0]["annotations"]["summary"] == "GPU lost"


def test_teams_is_yaml_once_the_comment_signs_are_gone() -> None:
    """What is commented out, as Debian's Alertmanager does not know it, is a receiver of this file."""
    text = FILE.read_text(encoding="utf-8")
    head, _, commented = text.partition("  # - name: dshealthd-ticket-teams")
    commented = re.sub(r"(?m)^  # ", "  ", f"  # - name: dshealthd-ticket-teams{commented}")
    receivers = yaml.safe_load(head + commented)["receivers"]
    (teams,) = receivers[-1]["msteamsv2_configs"]
    assert teams.keys() == {"webhook_url_file", "send_resolved", "title", "text"}
