"""Clocks of several hosts: how far they are apart, by what all ranks do at the same moment."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from dshealthd.explain import clocks
from dshealthd.explain.events import Stamp
from tests.explain.explaining import explained_files

START = datetime(2026, 1, 5, 10, tzinfo=UTC).timestamp()
FULL = "OSError: [Errno 28] No space left on device: '/ckpt/a'"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a"


def stamp(seconds: float) -> str:
    """Return a time as collectors of logs write it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def log(host: str, rank: int, ahead: float, last: tuple[float, str], seed: int) -> list[str]:
    """Return the log of a rank whose clock is so many seconds ahead: twenty steps, and an error."""
    chance = random.Random(seed)
    lines = [
        f"{stamp(START + step * 2 + ahead + chance.uniform(0, 0.1))} {host} train[7]: "
        f"[rank{rank}]: step {step} | loss 2.0"
        for step in range(1, 21)
    ]
    when, text = last
    return [*lines, f"{stamp(START + when + ahead)} {host} train[7]: [rank{rank}]: {text}"]


@pytest.mark.parametrize("ahead", [-3600.0, -20.0, 0.0, 3.0, 7200.0])
def test_the_first_error_is_the_first_by_one_clock(ahead: float) -> None:
    """Whatever the other host's clock shows, and though it be in another time zone."""
    first = log("gpu-1", 1, 0.0, (42.0, FULL), 1)
    second = log("gpu-2", 2, ahead, (43.0, OOM), 2)
    finding = explained_files({"0": first, "1": second})
    assert (finding.slug, finding.ranks) == ("disk-full", (1,))
    assert any("cuda-oom" in reason and "later" in reason for reason in finding.against)
    finding = explained_files({"0": second, "1": first})
    assert (finding.slug, finding.ranks) == ("disk-full", (1,))


def test_what_the_clocks_do_not_tell_is_a_tie() -> None:
    """Nearer than ranks print the same step, and where clocks share nothing."""
    near = explained_files(
        {"0": log("gpu-1", 1, 0.0, (42.0, FULL), 1), "1": log("gpu-2", 2, 50.0, (42.05, OOM), 2)}
    )
    assert any("tie" in reason for reason in near.against)
    alone = {
        "0": log("gpu-1", 1, 0.0, (42.0, FULL), 1)[-1:],
        "1": log("gpu-2", 2, 0.0, (45.0, OOM), 2)[-1:],
    }
    assert any("tie" in reason for reason in explained_files(alone).against)


def test_offsets_add_up_over_hosts_that_share_nothing_with_the_first() -> None:
    """A and B saw the same, and B and C: A and C are compared with twice the uncertainty."""

    def seen(first: int, last: int, ahead: float) -> dict[str, Stamp]:
        return {
            str(number): Stamp("iso", stamp(START + number + ahead + (number % 2) * 0.1))
            for number in range(first, last)
        }

    found = clocks.compare(
        {"a": seen(0, 50, 0.0), "b": seen(40, 70, 9.0), "c": seen(60, 80, -4.0), "d": {}}, 2026
    )
    assert found.offsets["b"][0] == pytest.approx(9.0, abs=0.1)
    assert found.offsets["c"][0] == pytest.approx(-4.0, abs=0.2)
    assert found.uncertainty("a", "c") == pytest.approx(2 * found.uncertainty("a", "b"))
    assert found.uncertainty("a", "d") == clocks.UNCERTAINTY
    assert found.uncertainty("a", "a") == 0.0
