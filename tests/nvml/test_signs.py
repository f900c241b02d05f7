"""Signs of hard faults that the frequent sweep sees, and tells those who export what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.core.collector import News
from tests.nvml.node import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Give two H100 that have been looked at once."""
    with Node(tmp_path, gpus=2) as made:
        seen = made.collect("gpu")
        assert (seen.news, seen.results["gpu"].reason) == ([], None)
        yield made


@pytest.mark.parametrize(("key", "value", "news"), [
    ("nvlink7_state", 0, News.NVLINK),
    ("ecc_volatile_uncorrected_dram", 1, News.GPU_MEMORY),
    ("remapped_failure", 1, News.GPU_MEMORY),
])  # fmt: skip
def test_change_is_told_once(node: Node, key: str, value: int, news: News) -> None:
    """A link that goes down, or a memory error, is news in one sweep."""
    assert node.collect("gpu").news == []
    node.simulator.set(1, key, value)
    assert node.collect("gpu").news == [news]
    assert node.collect("gpu").news == []


def test_sleeping_link_is_no_news(node: Node) -> None:
    """A link that goes to sleep to save power, or wakes up, has not changed."""
    node.simulator.set(1, "nvlink7_state", 2)
    assert node.collect("gpu").news == []


def test_signs_that_cannot_be_read(node: Node) -> None:
    """A failing call is no change, and no fault of the collector that merely looks for signs."""
    for field in (165, 4):
        node.simulator.set(None, f"field_fail.{field}", 999)
    seen = node.collect("gpu")
    assert seen.news == []
    assert seen.reasons() == {}
    for field in (165, 4):
        node.simulator.unset(None, f"field_fail.{field}")
    assert node.collect("gpu").news == []


def test_without_nvlinks(tmp_path: Path) -> None:
    """A GPU without NVLinks has the signs of its memory alone."""
    with Node(tmp_path, gpus=1) as node:
        node.simulator.set(None, "nvlink_count", "unsupported")
        assert node.collect("gpu").news == []
        node.simulator.set(0, "ecc_volatile_uncorrected_dram", 1)
        assert node.collect("gpu").news == [News.GPU_MEMORY]
