"""The first hour on a bare Debian: what README and docs say to type works there as it is."""

from __future__ import annotations

import json

import pytest

from tests.deploy.bare import measure
from tests.deploy.machine import LONGEST, require_tools

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]


def test_the_first_hour() -> None:
    """The agent answers and the demo's first page comes, and little is installed for them.

    The seconds have the speed of the network in them: only those of a second time are held.
    """
    require_tools()
    took = measure()
    print(json.dumps(took, indent=2))
    assert took["run: seconds to the first answer, again"] < 10
    assert took["demo: seconds to its links, again"] < 30
    assert took["run: megabytes installed"] < 120
    assert took["demo: megabytes installed"] < 200
