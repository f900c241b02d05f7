"""What a person is told as more becomes known of a fault, by a real Alertmanager."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tests.alertmanager.test_inhibition import Labels, alert
from tests.lab.receiver import FIRING, RESOLVED, Notification, Receiver
from tests.lab.servers import Server

LONG_AGO = "2026-01-01T00:00:00Z"
SECONDS = 60.0
"""In which a message comes; the routes of these tests wait a second."""


def hang(cause: str, **labels: str) -> Labels:
    """Return the page of a job that hangs, of a class."""
    labels |= {"alertname": "DshealthdJobHang", "training_job": "slurm-7", "class": cause}
    return alert("training-hang", component="job", **labels)


def told(receiver: Receiver, job: str) -> Sequence[Notification]:
    """Return the pages of a job, in their order."""
    return [
        notification
        for notification in receiver.sent("page")
        if notification.document["groupLabels"].get("training_job") == job
    ]


def shown(notification: Notification) -> set[tuple[str, str]]:
    """Return class and status of each alert of a page."""
    return {(alert.labels["class"], alert.status) for alert in notification.alerts}


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


def test_cause_that_is_found_after_the_page_updates_it(server: Server, receiver: Receiver) -> None:
    """A page that names no cause is followed by one message that does, with the same key in a
    pager.

    Both fire for two minutes then, as the first goes on firing. That it ends is no third message,
    and the end of the second is the end of the page.
    """
    pages = partial(told, receiver, "slurm-7")
    unknown = {"labels": hang("unknown")}
    network = {"labels": hang("network", node="a", part="a--b")}
    server.ask("/api/v2/alerts", [unknown])
    assert receiver.wait(lambda: len(pages()) == 1, SECONDS)
    assert shown(pages()[0]) == {("unknown", FIRING)}
    server.ask("/api/v2/alerts", [unknown, network])
    assert receiver.wait(lambda: len(pages()) == 2, SECONDS)
    assert ("network", FIRING) in shown(pages()[1])
    server.ask("/api/v2/alerts", [unknown | {"endsAt": LONG_AGO, "startsAt": LONG_AGO}])
    assert not receiver.wait(lambda: len(pages()) > 2, 3.0), shown(pages()[2])
    server.ask("/api/v2/alerts", [network | {"endsAt": LONG_AGO, "startsAt": LONG_AGO}])
    assert receiver.wait(lambda: len(pages()) == 3, SECONDS)
    assert pages()[2].document["status"] == RESOLVED
    assert len({page.document["groupKey"] for page in pages()}) == 1
