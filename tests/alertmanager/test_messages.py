"""What a person reads, as the real Alertmanager writes it to Slack, PagerDuty and by mail from the
shipped examples.
"""

from __future__ import annotations

import email
import email.policy
import socketserver
import threading
import time
from collections.abc import Iterator
from email.message import EmailMessage
from typing import Any

import pytest

from dshealthd.symptoms.entry import RULESET
from tests.alertmanager.conftest import page_by_examples
from tests.lab.receiver import Receiver
from tests.lab.servers import Server, alertmanager, routes
from tests.lab.station import Loopback
from tests.waiting import until

ADDRESS = "127.0.0.62"
LABELS = {
    **RULESET,
    "alertname": "DshealthdGpuLost",
    "cluster": "a",
    "job": "dshealthd",
    "instance": "node-17:10061",
    "node": "node-17",
    "gpu": "3",
    "uuid": "GPU-8f2c",
    "severity": "critical",
    "component": "gpu",
    "symptom": "gpu-lost",
}
ANNOTATIONS = {
    "summary": "GPU lost",
    "description": (
        "GPU 3 of node-17 does not answer NVML any more: gpu_lost. First step: drain the "
        "node\nand look for Xid 79."
    ),
    "runbook_url": "https://example.com/gpu-lost.md",
}
LOST = {"labels": LABELS, "annotations": ANNOTATIONS, "startsAt": "2026-11-21T11:02:40Z"}
TEXT = """\
- node-17 GPU 3
  since: 2026-11-21 11:02:40 UTC
  why: GPU 3 of node-17 does not answer NVML any more: gpu_lost.
  first step: drain the node
and look for Xid 79.
  runbook: https://example.com/gpu-lost.md
"""


class Mailbox:
    """A mail server that keeps what it is given."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._handler())
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[socketserver.StreamRequestHandler]:
        mails = self.mails

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self._say("220 mailbox")
                for raw in self.rfile:
                    verb = raw[:4].strip().upper()
                    if verb == b"DATA":
                        self._say("354 go on")
                        lines = iter(self.rfile.readline, b".\r\n")
                        mails.append(
                            email.message_from_bytes(b"".join(lines), policy=email.policy.default)
                        )
                    self._say("221 bye" if verb == b"QUIT" else "250 ok")
                    if verb == b"QUIT":
                        return

            def _say(self, text: str) -> None:
                self.wfile.write(f"{text}\r\n".encode())

        return Handler


@pytest.fixture(scope="module")
def mailbox() -> Iterator[Mailbox]:
    """A mail server."""
    made = Mailbox()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(
    station: Loopback,
    tmp_path_factory: pytest.TempPathFactory,
    receiver: Receiver,
    mailbox: Mailbox,
) -> Iterator[Server]:
    """An Alertmanager that pages by PagerDuty and Slack, and writes tickets by mail.

    No more is changed than where those are.
    """
    directory = tmp_path_factory.mktemp("server")

    def examples(config: dict[str, Any]) -> None:
        page_by_examples(config, receiver, directory)
        found = {entry["name"]: entry for entry in config["receivers"]}
        (mail,) = found["dshealthd-ticket-mail"]["email_configs"]
        # The mailbox offers no authentication, so that none is used.
        mail |= {"smarthost": mailbox.address, "require_tls": False}
        found["dshealthd-ticket"]["email_configs"] = [mail]
        for route in routes(config):
            route |= {"group_wait": "200ms", "group_interval": "500ms"}

    with alertmanager(station, directory, receiver, examples) as made:
        yield made


def came(receiver: Receiver, name: str, number: int) -> Any:
    """Return a receiver's document of this number, from 0, once it has come."""
    assert receiver.wait(lambda: len(receiver.sent(name)) > number, 60), receiver.sent(name)
    return receiver.sent(name)[number].document


def test_page(server: Server, receiver: Receiver) -> None:
    """A page says which GPU of which node, since when, why, the first step and where the runbook
    is; and later that it is over.
    """
    server.ask("/api/v2/alerts", [LOST])
    slack = came(receiver, "slack", 0)["attachments"][0]
    assert slack["title"] == "GPU lost: node-17 GPU 3"
    assert slack["text"].strip() == TEXT.strip()
    assert slack["title_link"] == "https://example.com/gpu-lost.md"
    event = came(receiver, "pagerduty", 0)
    assert (event["routing_key"], event["event_action"]) == ("k3y", "trigger")
    assert event["payload"]["summary"] == "GPU lost: node-17 GPU 3"
    assert event["payload"]["severity"] == "critical"
    assert event["payload"]["custom_details"]["page"].strip() == TEXT.strip()
    assert event["links"] == [{"href": "https://example.com/gpu-lost.md", "text": "Runbook"}]

    server.ask(
        "/api/v2/alerts", [LOST | {"endsAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}]
    )
    assert came(receiver, "pagerduty", 1)["event_action"] == "resolve"
    over = came(receiver, "slack", 1)["attachments"][0]
    assert over["title"] == "Resolved: GPU lost: node-17 GPU 3"
    assert "\n  resolved: 20" in over["text"]


def test_ticket_by_mail(server: Server, mailbox: Mailbox) -> None:
    """A mail's subject names the first places of many, and its text all of them."""
    alerts = [
        {
            "labels": LABELS | {"severity": "warning", "symptom": "gpu-throttled", "gpu": str(gpu)},
            "annotations": ANNOTATIONS | {"summary": "GPU is throttled"},
        }
        for gpu in range(5)
    ]
    server.ask("/api/v2/alerts", alerts)
    # Where Alertmanager takes longer than it waits for the rest, a mail of some comes first.
    mail = until(
        lambda: next((mail for mail in mailbox.mails if "5 in all" in mail["Subject"]), None),
        server.log.read_text,
    )
    assert (
        mail["Subject"]
        == "GPU is throttled: node-17 GPU 0, node-17 GPU 1, node-17 GPU 2 … (5 in all)"
    )
    body = mail.get_body(("plain",))
    assert body is not None
    text = body.get_content()
    assert [line for line in text.splitlines() if line.startswith("-")] == [
        f"- node-17 GPU {gpu}" for gpu in range(5)
    ]
    assert mail.get_body(("html",)) is None
    assert text.count("first step: drain the node") == 5


@pytest.mark.parametrize(("labels", "where"), [
    ("component=node node=node-1 instance=node-1:10061", "node-1"),
    ("component=gpu node=node-1 part=GPU_3", "node-1 GPU 3"),
    ("component=gpu node=node-1 part=GPU_3 gpu=3", "node-1 GPU 3"),
    ("component=node node=node-1 part=", "node-1"),
    ("component=node node=node-1 part=node-1", "node-1"),
    ("component=node node=node-1 part=node-1/1", "node-1/1"),
    ("component=nic node=node-1 part=mlx5_0/1", "node-1 mlx5_0/1"),
    ("component=path node=node-1 part=/data", "node-1 /data"),
    ("component=path node=node part=node-1.img", "node node-1.img"),
    ("component=link node=node-1 peer=node-2 part=node-1--node-2", "node-1--node-2"),
    ("component=leaf leaf=leaf-3", "leaf leaf-3"),
    ("component=job job=dshealthd training_job=slurm-7", "job slurm-7"),
    ("component=gpu node=node-1 gpu=2 training_job=slurm-7", "node-1 GPU 2 job slurm-7"),
    ("component=fleet cluster=a", "cluster a"),
    ("component=fleet", "cluster without a name"),
    ("component=node instance=node-1:10061", "node-1:10061"),
])  # fmt: skip
def test_where(labels: str, where: str, server: Server, receiver: Receiver) -> None:
    """The part that an alert is about is told from its labels."""
    symptom = f"where {where}"
    shown = dict(label.replace("GPU_", "GPU ").split("=") for label in labels.split())
    common = {**RULESET, "alertname": "Where", "severity": "critical", "symptom": symptom}
    server.ask("/api/v2/alerts", [{"labels": common | shown}])

    def titles() -> list[str]:
        sent = receiver.sent("slack")
        return [one.document["attachments"][0]["title"] for one in sent]

    assert receiver.wait(lambda: f"{symptom}: {where}" in titles(), 60), titles()
