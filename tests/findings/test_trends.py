"""The last hour: what its lines hold and for how long, and when one rises, falls or is steady."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pytest

from dshealthd.collectors.gpu import MEMORY_USED, POWER, TEMPERATURE, UTILIZATION
from dshealthd.collectors.infiniband import ERRORS, TRANSMIT_BYTES
from dshealthd.collectors.memory import AVAILABLE
from dshealthd.collectors.training import STEP_SECONDS
from dshealthd.config import registry
from dshealthd.core.collector import Reason, Sample
from dshealthd.core.result import CollectionOutcome, CollectionResult, failed
from dshealthd.core.snapshot import Snapshot
from dshealthd.findings.entry import Entry
from dshealthd.findings.finding import Finding, State
from dshealthd.findings.trends import Trends, slope, trend

MAX_LINES, POINTS, STEP = 512, 120, 30.0
WALL = 1_800_000_000.0
MIB = 1 << 20


class Node:
    """A node's snapshot with a clock of the test's own, and its trends."""

    def __init__(self) -> None:
        """Begin with nothing, at the beginning of a step."""
        self.now = 100 * STEP
        self.snapshot = Snapshot(lambda: self.now, lambda: WALL)
        self.trends = Trends()

    def read(self, collector: str, *samples: Sample, seconds: float = 15.0) -> None:
        """Have a collector read these samples, and let that time pass."""
        self.snapshot.expect(collector, 60.0)
        self.snapshot.put(collector, CollectionResult(CollectionOutcome.OK, samples, duration=0.0))
        self.trends.settle(self.snapshot, self.now)
        self.now += seconds

    def document(self, *begun: Entry, wall: float = WALL) -> dict[str, Any]:
        """Return the lines as the API gives them."""
        found: dict[str, Any] = json.loads(self.trends.document("n1", wall, begun))
        return found

    def line(self, part: str, what: str) -> dict[str, Any]:
        """Return one of them."""
        (found,) = [
            line
            for line in self.document()["lines"]
            if (line["part"], line["what"]) == (part, what)
        ]
        return dict(found)


def heat(celsius: float, gpu: str = "0", uuid: str = "GPU-a", sensor: str = "core") -> Sample:
    """Return a GPU's temperature."""
    return TEMPERATURE(celsius, gpu, uuid, sensor)


def test_a_temperature_in_words() -> None:
    """Lowest and highest of the hour, the last one, and how fast it rises; a step's readings are
    its lowest and highest.
    """
    node = Node()
    for at in range(2 * POINTS):
        node.read("gpu", heat(54.0 if at < 220 else 54.0 + (at - 220) * 0.85))
    line = node.line("GPU 0", "core temperature")
    assert len(line["points"]) == POINTS
    assert line["points"][0] == 54
    assert line["points"][-1] == [69.3, 70.15]
    assert line["says"].startswith("54 to 70.2 °C in the last hour, now 70.2, rising ")
    assert line["says"].endswith(" K/min")


def test_a_gap_is_a_gap() -> None:
    """What could not be read is null and said to be unknown; it is neither 0 nor the last value."""
    node = Node()
    for _ in range(20):
        node.read("gpu", heat(60.0))
    for _ in range(20):
        node.snapshot.put("gpu", failed(Reason.IO_ERROR, "broken"))
        node.trends.settle(node.snapshot, node.now)
        node.now += 15
    gone = node.line("GPU 0", "core temperature")
    assert gone["points"][-10:] == [None] * 10
    assert gone["says"] == "60 °C in the last 10 min, unknown for 5 min"
    node.read("gpu", heat(62.0))
    back = node.line("GPU 0", "core temperature")
    assert "5 min of it unknown, now 62" in back["says"]
    assert not back["says"].endswith("steady")
    assert 0 not in back["points"]


def test_a_counter_becomes_its_rate() -> None:
    """Bytes become Gb/s, errors of all types those per minute; a reset is a gap, and what stays as
    it is is known to be 0.
    """
    node = Node()
    for at in range(41):
        sent = at * 15 * 40e9 / 8 if at < 21 else (at - 21) * 15 * 10e9 / 8
        errors = (ERRORS(float(at), "mlx5_0", "1", kind) for kind in ("a", "b"))
        node.read("infiniband", TRANSMIT_BYTES(sent, "mlx5_0", "1"), *errors)
        assert (node.line("mlx5_0/1", "sends")["says"] == "unknown") == (at == 0)
    line = node.line("mlx5_0/1", "sends")
    known = [point for point in line["points"] if point is not None]
    assert known == [40] * 10 + [40] + [10] * 10
    assert line["says"].startswith("10 to 40 Gb/s in the last 10 min, now 10")
    assert node.line("mlx5_0/1", "errors")["says"] == "8 per minute in the last 10 min"
    for _ in range(4):
        node.read("infiniband", TRANSMIT_BYTES(19 * 15 * 10e9 / 8, "mlx5_0", "1"))
    assert node.line("mlx5_0/1", "sends")["points"][-1] == 0


@pytest.mark.parametrize(("sample", "part", "what", "says"), [
    (MEMORY_USED(3 * 2.0**30, "0", "GPU-a"), "GPU 0", "memory", "3 GiB"),
    (AVAILABLE(5 * 2.0**30), "", "available memory", "5 GiB"),
    (UTILIZATION(0.07, "0", "GPU-a"), "GPU 0", "utilization", "7 %"),
    (POWER(1001.0, "0", "GPU-a"), "GPU 0", "power", "1,001 W"),
])  # fmt: skip
def test_units(sample: Sample, part: str, what: str, says: str) -> None:
    """Bytes are told in GiB, ratios in percent, and no figure with an exponent."""
    node = Node()
    node.read(registry.collectors_by_metric()[sample.metric.name], sample)
    assert node.line(part, what)["says"].startswith(f"{says} in the last")


def test_ranks_are_one_line() -> None:
    """The step time of a job is drawn from its fastest to its slowest rank."""
    node = Node()
    node.read("training", *(STEP_SECONDS(1.0 + rank / 10, "run-1", str(rank)) for rank in range(8)))
    assert node.line("run-1", "step time")["points"][-1] == [1, 1.7]


def test_another_gpu_with_the_index_of_a_lost_one_has_its_own_line() -> None:
    """A line belongs to the GPU, by its UUID; the index names the one that was read last."""
    node = Node()
    for _ in range(4):
        node.read("gpu", heat(50.0, "0", "GPU-a"), heat(80.0, "1", "GPU-b"))
    for _ in range(4):
        node.read("gpu", heat(80.0, "0", "GPU-b"))
    assert node.line("GPU 0", "core temperature")["says"].startswith("80 °C")
    assert {line["part"] for line in node.document()["lines"]} == {"GPU 0"}


def test_what_is_not_read_for_an_hour_is_forgotten() -> None:
    """As a job that has ended; whatever gap lies between, no old value looks new."""
    node = Node()
    node.read("training", STEP_SECONDS(1.0, "run-1", "0"))
    node.read("gpu", heat(50.0), seconds=3 * 3600.0)
    assert node.line("GPU 0", "core temperature")["points"][-1] == 50
    node.read("gpu", heat(60.0))
    (line,) = node.document()["lines"]
    assert [point for point in line["points"] if point is not None] == [60]


def test_values_that_no_line_holds_are_left_out() -> None:
    """Not a number, and beyond the range: neither breaks the document of all."""
    node = Node()
    node.read(
        "training", STEP_SECONDS(math.nan, "a", "0"), STEP_SECONDS(1e300, "b", "0"),
        STEP_SECONDS(math.inf, "c", "0"), STEP_SECONDS(-1e30, "d", "0"),
    )  # fmt: skip
    assert node.document()["lines"] == []


def test_full_within_its_bound() -> None:
    """More lines than it holds are counted and left out; all together take less than 1 MiB, and
    there is room again when some are gone.
    """
    node = Node()
    samples = [heat(50.0, str(at), f"GPU-{at:032x}") for at in range(MAX_LINES + 5)]
    node.read("gpu", *samples)
    assert node.document()["left_out"] == 5
    assert len(node.document()["lines"]) == MAX_LINES
    tracemalloc.start()
    other = Node()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(4):
        other.read("gpu", *samples)
    other.snapshot.put("gpu", failed(Reason.IO_ERROR, "broken"))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < MIB
    node.now += 3600
    node.read("gpu", *samples[-5:])
    assert node.document()["left_out"] == 0
    assert len(node.document()["lines"]) == 5


def test_a_clock_that_jumps_moves_nothing() -> None:
    """Lines are by the monotonic clock; findings are marked by their distance from now, and one
    that a wrong clock dated elsewhere is not drawn.
    """
    node = Node()
    for _ in range(8):
        node.read("gpu", heat(50.0))
    year = 365 * 86400.0
    entries = [
        Entry("finding", "GpuThrottled", "hot", begin, None, part="GPU 0", severity=State.WARNING)
        for begin in (WALL - 1800, WALL + year - 60, WALL + year + 60)
    ]
    boot = Entry("boot", "boot", "The node booted", WALL - 60, WALL - 60)
    assert [mark["begin"] for mark in node.document(*entries, boot)["marks"]] == [WALL - 1800]
    later = node.document(*entries, wall=WALL + year)
    assert [mark["begin"] for mark in later["marks"]] == [WALL + year - 60]
    assert later["lines"] == node.document()["lines"]


def test_the_trend_of_a_finding() -> None:
    """Of the sensor that it is about, or for throttling the GPU's own temperature; of another part,
    or what is not kept, nothing.
    """
    node = Node()
    for at in range(60):
        node.read(
            "gpu", heat(60.0 + at / 2), heat(70.0, sensor="memory"), POWER(600.0, "0", "GPU-a"),
            MEMORY_USED(7e10, "0", "GPU-a"),
        )  # fmt: skip

    def about(source: str, value: float | None, part: str = "GPU 0") -> str:
        return node.trends.of(
            Finding(
                slug="gpu-throttled", alert="DshealthdGpuThrottled", severity=State.WARNING,
                component="gpu", part=part, summary="", detail="", first_step="", runbook="",
                source=source, value=value,
            )
        )  # fmt: skip

    assert about("dshealthd_gpu_temperature_celsius", 89.0) == "core temperature rising 2 K/min"
    assert about("dshealthd_gpu_temperature_celsius", 70.0) == "memory temperature steady"
    assert about("dshealthd_gpu_throttle_active", 1.0) == "core temperature rising 2 K/min"
    assert about("dshealthd_gpu_throttle_active", 1.0, "GPU 1") == ""
    assert about("dshealthd_gpu_ecc_errors_total", 1.0) == ""


@pytest.mark.parametrize(("values", "rises"), [
    ([50.0] * 20, 0),
    ([50.0 + at for at in range(20)], 1),
    ([50.0 - at for at in range(20)], -1),
    # The least that a driver's integers show: two degrees in ten minutes are none, three are.
    ([70.0 + 2.15 * at / 19 for at in range(20)], 0),
    ([70.0 + 3.0 * at / 19 for at in range(20)], 1),
    # A step from one integer to the next.
    ([70.0] * 10 + [71.0] * 10, 0),
    # A rise of twice and of six times the scatter: 10 up and down.
    ([100.0 + 10.0 * (-1) ** at + 20.0 * at / 19 for at in range(20)], 0),
    ([100.0 + 10.0 * (-1) ** at + 60.0 * at / 19 for at in range(20)], 1),
    # A load that comes and goes.
    ([60.0 + 10.0 * math.sin(at) for at in range(20)], 0),
    # One spike at the end.
    ([60.0] * 19 + [80.0], 0),
])  # fmt: skip
def test_rising_falling_or_steady(values: list[float], rises: int) -> None:
    """On either side of the criterion: more than three times the scatter, and 1 % of the value."""
    found = slope(values)
    assert found is not None
    assert (found > 0) - (found < 0) == rises


@pytest.mark.parametrize(("steady", "word"), [(20, "steady"), (10, "rising")])
def test_ten_minutes_make_a_trend(steady: int, word: str) -> None:
    """What a line did before them has passed."""
    points = [(min(at, 39.0 - steady),) * 2 for at in range(40)]
    assert trend(points, "K/min").split()[0] == word


@pytest.mark.parametrize(
    ("first", "end", "known"),
    [(0, 10, 0.0), (0, 11, None), (19, 20, 0.0), (18, 20, None), (0, 20, None)],
)
def test_a_trend_needs_half_of_its_points_and_the_last(
    first: int, end: int, known: float | None
) -> None:
    """What is not known, from the first on to before the end, has no trend."""
    values = [math.nan if first <= at < end else 50.0 for at in range(20)]
    assert slope(values) == known
