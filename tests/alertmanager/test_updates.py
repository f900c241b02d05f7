"""What a person is told as more becomes known of a fault, by a real Alertmanager."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from tests.alertmanager.test_inhibition import Labels, alert
from tests.lab.receiver import FIRING, RESOLVED, Notification, Receiver
from tests.lab.servers import Server

LONG_AGO = "2026-01-01T00:00:00Z"
SECONDS = 60.0
"""In which a message comes; the routes of these tests wait a second."""


def hang(cause: str, **labels: str) -> Labels:
    """Return the page of a job that hangs, of a class."""
    labels |= {"alertname": "DshealthdJobHang", "class": cause}
    return alert("training-hang", component="job", **labels)


def failed(**labels: str) -> Labels:
    """Return the ticket of a job that has failed."""
    labels |= {"alertname": "DshealthdJobFailed", "audience": "owner"}
    return alert("child-failed", "warning", component="job", **labels)


ERROR = failed(node="b", reason="rank 1 ended with an error")
KILLED = failed(node="a", reason="rank 3 was killed, and the kernel reports an OOM kill here")
LOG = failed()


def told(receiver: Receiver, name: str, job: str) -> Sequence[Notification]:
    """Return the messages about a job, in their order."""
    return [
        notification
        for notification in receiver.sent(name)
        if notification.document["groupLabels"].get("training_job") == job
    ]


def shown(notification: Notification, labels: Labels) -> set[str]:
    """Return what a message says of the alert with these labels: whether it fires or has ended."""
    return {alert.status for alert in notification.alerts if alert.labels == labels}


def test_what_ten_nodes_have_is_one_ticket(server: Server, receiver: Receiver) -> None:
    """Tickets of one kind about ten nodes are one message, though five jobs run there."""
    alerts = [
        alert("host-errors", "warning", node=f"n{number}", training_job=f"slurm-{number % 5}")
        for number in range(10)
    ]
    server.ask("/api/v2/alerts", [{"labels": labels} for labels in alerts])

    def tickets() -> list[Notification]:
        return [
            one
            for one in receiver.sent("ticket")
            if one.document["groupLabels"].get("symptom") == "host-errors"
        ]

    assert receiver.wait(lambda: any(len(one.alerts) == len(alerts) for one in tickets()), SECONDS)
    assert len({one.document["groupKey"] for one in tickets()}) == 1


@pytest.mark.parametrize(("job", "name", "without", "cause"), [
    ("slurm-7", "page", hang("unknown"), hang("network", node="a", part="a--b")),
    ("slurm-8", "job-owner", ERROR, LOG),
    ("slurm-9", "job-owner", ERROR, KILLED),
    ("slurm-10", "job-owner", LOG, KILLED),
])  # fmt: skip
def test_cause_that_is_found_later_updates_the_message(
    server: Server, receiver: Receiver, job: str, name: str, without: Labels, cause: Labels
) -> None:
    """A message that names no cause, or a lesser one, is followed by one message that does, with
    the same key in a pager.

    Both fire for two minutes then, as the first goes on firing. That it ends is no third message,
    and the end of the second is the end of the page.
    """
    messages = partial(told, receiver, name, job)
    first, second = ({"labels": labels | {"training_job": job}} for labels in (without, cause))
    server.ask("/api/v2/alerts", [first])
    assert receiver.wait(lambda: len(messages()) == 1, SECONDS)
    assert shown(messages()[0], first["labels"]) == {FIRING}
    server.ask("/api/v2/alerts", [first, second])
    assert receiver.wait(lambda: len(messages()) == 2, SECONDS)
    assert shown(messages()[1], second["labels"]) == {FIRING}
    server.ask("/api/v2/alerts", [first | {"endsAt": LONG_AGO, "startsAt": LONG_AGO}])
    assert not receiver.wait(lambda: len(messages()) > 2, 3.0), messages()[2].alerts
    server.ask("/api/v2/alerts", [second | {"endsAt": LONG_AGO, "startsAt": LONG_AGO}])
    assert receiver.wait(lambda: len(messages()) == 3, SECONDS)
    assert messages()[2].document["status"] == RESOLVED
    assert len({message.document["groupKey"] for message in messages()}) == 1
