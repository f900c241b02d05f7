"""What is slow shows in the times of collectives with gloo.

Epochs are longer, as slow rounds must end within one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab import faults
from tests.lab.probing import KNOWN, Probing, begun, named, namespaced

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.lab, pytest.mark.timeout(200)]  # see test_probes.py


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes that know what is usual for their collectives."""
    with Probing(tmp_path_factory.mktemp("slow"), 4, period=2.0) as lab:
        yield begun(namespaced(lab), KNOWN)


def test_slow_node(full: Probing) -> None:
    """A slow node shows in the times of its collectives, and is named by itself."""
    _, two, *_ = full.nodes
    named(full, faults.slow(two, "15mbit"), two, {"slow"}, by=(two,), epochs=25)


def test_slow_pair(full: Probing) -> None:
    """A slow way between two nodes that are well with others is named as the link, by both."""
    one, two, *_ = full.nodes
    named(
        full, faults.slow_pair(one, two, "15mbit"), (one, two), {"slow"}, by=(one, two), epochs=30
    )
