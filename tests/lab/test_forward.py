"""Ports of this machine that lead into the lab."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.lab import Lab
from tests.lab.forward import forwarded
from tests.lab.receiver import Receiver

if TYPE_CHECKING:
    from pathlib import Path


def test_a_server_of_the_lab_is_reached_from_this_machine(tmp_path: Path) -> None:
    """A request to the port here is answered there, however long it is, until the port is closed."""
    document = {"alerts": [], "filling": "x" * 1_000_000}
    with Lab(tmp_path, nodes=1, start=False) as lab, Receiver(lab.services) as receiver:
        with forwarded(lab.services, receiver.port) as place:
            request = urllib.request.Request(f"http://{place}/page", json.dumps(document).encode())
            for _ in range(3):
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert answer.read() == b"ok"
        assert [note.document for note in receiver.notifications] == 3 * [document]
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(request, timeout=60)
