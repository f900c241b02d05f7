"""Times of input and forward passes on a CUDA device, read when it has come to them; a fake one."""

from __future__ import annotations

import pytest

from dshealthd.training.message import Totals
from dshealthd.training.step_timer import SHARE, Average, StepTimer, TrimmedAverage

LATE = 16
SPANS = 2048


class Device:
    """What of `torch.cuda` is used: a device that comes to events when, and at times that, it is
    told.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.capturing = False
        self.same = True

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802 - as torch has it
        """Return an event that can be timed."""
        assert enable_timing
        return Event(self)

    def is_current_stream_capturing(self) -> bool:
        """Return whether a graph is being captured."""
        return self.capturing

    def comes_to(self, *milliseconds: float) -> None:
        """Reach the next events, at these times."""
        to_come = (event for event in self.events if event.at is None)
        for time in milliseconds:
            next(to_come).at = time


class Event:
    """One event, whose time may be asked for when it has come."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self) -> None:
        """Put it behind what was launched."""
        assert not self.device.capturing
        self.device.events.append(self)

    def query(self) -> bool:
        """Return whether it has come; to ask fails the capture of a graph."""
        assert not self.device.capturing
        return self.at is not None

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds, as torch does; it raises if one has not come."""
        if self.at is None or end.at is None or not self.device.same:
            raise RuntimeError("not ready, or events of different devices")
        return end.at - self.at


def make_step(step_timer: StepTimer, micro_steps: int = 1) -> None:
    """Do what a step does; two events each on the device, of the first step one."""
    for micro_step in range(micro_steps):
        if micro_step:
            step_timer.micro_step_ended(0.0)
        step_timer.input_ended(0.0)
    step_timer.step_ended(0.0)


@pytest.fixture
def device() -> Device:
    """A CUDA device."""
    return Device()


@pytest.fixture
def step_timer(device: Device) -> StepTimer:
    """The times of a model on it."""
    found = StepTimer()
    found.on("cuda", device)
    return found


def test_device_that_is_behind(device: Device, step_timer: StepTimer) -> None:
    """Times are the device's, and are known when it has come to them."""
    make_step(step_timer)  # the first has no beginning
    make_step(step_timer)
    assert step_timer.input.value is None
    device.comes_to(100.0)
    device.comes_to(107.0, 150.0)
    assert step_timer.input.value is None
    make_step(step_timer)
    assert step_timer.input.value == pytest.approx(0.007)


def test_a_wait_for_others_is_no_input(device: Device, step_timer: StepTimer) -> None:
    """Who waits in a barrier after a step, for a rank that logs, does not wait for data."""
    make_step(step_timer)
    device.comes_to(100.0)
    step_timer.waited(step_timer.mark(0.0), 0.0)
    make_step(step_timer)
    device.comes_to(101.0, 141.0, 144.0, 160.0)
    make_step(step_timer)
    assert step_timer.input.value == pytest.approx(0.004)  # of 44 ms, of which 40 in the barrier
    host = StepTimer()
    host.on("cpu", None)
    for began in (0.0, 10.0):
        host.input_ended(began + 6.0)
        host.waited(began + 7.0, began + 9.0)
        host.step_ended(began + 10.0)
        host.waited(began + 11.0, began + 15.0)
    assert host.input.value == pytest.approx(2.0)


def test_micro_steps(device: Device, step_timer: StepTimer) -> None:
    """All inputs of a step count together."""
    make_step(step_timer)
    device.comes_to(0.0)
    make_step(step_timer, micro_steps=2)
    device.comes_to(10.0, 50.0, 55.0, 80.0)
    make_step(step_timer)
    assert step_timer.input.value == pytest.approx(0.015)


def test_device_that_hangs(device: Device, step_timer: StepTimer) -> None:
    """What is kept of a device that comes to nothing more is bounded, and the last averages
    stay.
    """
    make_step(step_timer)
    for _ in range(5 * LATE):
        make_step(step_timer)
    assert step_timer.input.value is None
    device.events.clear()
    assert len(step_timer._late) == LATE


def test_very_many_micro_steps(device: Device, step_timer: StepTimer) -> None:
    """A step with more micro-steps than are kept has no times, rather than wrong ones."""
    make_step(step_timer, micro_steps=2 * SPANS)
    device.comes_to(*(float(number) for number in range(len(device.events))))
    make_step(step_timer)
    assert step_timer.input.value is None


def test_events_of_two_devices(device: Device, step_timer: StepTimer) -> None:
    """Events whose distance cannot be told give no time."""
    make_step(step_timer)
    make_step(step_timer)
    device.comes_to(0.0, 1.0, 2.0)
    device.same = False
    make_step(step_timer)
    assert step_timer.input.value is None


def test_pause(device: Device, step_timer: StepTimer) -> None:
    """A step with a pause has no time of the input."""
    make_step(step_timer)
    step_timer.interrupted()
    make_step(step_timer)
    device.comes_to(*(float(number) for number in range(len(device.events))))
    make_step(step_timer)
    assert step_timer.input.value is None


def test_other_devices() -> None:
    """On a device whose clock is not known here, nothing is measured."""
    step_timer = StepTimer()
    step_timer.on("xpu", None)
    for _ in range(3):
        make_step(step_timer)
    assert step_timer.input.value is None


def test_average() -> None:
    """The first values count alike, later ones a tenth."""
    average = Average()
    for value in (1.0, 2.0, 3.0):
        average.add(value)
    assert average.value == pytest.approx(2.0)
    for _ in range(100):
        average.add(7.0)
    assert average.value == pytest.approx(7.0, rel=0.01)


def test_trimmed_average() -> None:
    """One long step does not show, a change shows after the second step, three values are few."""
    average = TrimmedAverage()
    average.add(1.0)
    average.add(1.0)
    assert average.value is None
    for value in (*(8 * [1.0]), 60.0):
        average.add(value)
    assert average.value == pytest.approx(1.0)
    average.add(2.0)
    assert average.value == pytest.approx(9.0 / 8)


def make_waiting_step(step_timer: StepTimer) -> None:
    """Do what a step with one wait does; three events on the device."""
    begin = step_timer.mark(0.0)
    step_timer.waited(begin, 0.0)
    step_timer.step_ended(0.0)


def test_own_work_on_a_device(device: Device, step_timer: StepTimer) -> None:
    """Waits are between the events around them, own work is the rest; the first step has
    neither.
    """
    for step in range(4):
        make_waiting_step(step_timer)
        device.comes_to(step * 100.0 + 20.0, step * 100.0 + 50.0, step * 100.0 + 100.0)
    assert step_timer.work.value is None
    make_waiting_step(step_timer)
    assert step_timer.wait.value == pytest.approx(0.030)
    assert step_timer.work.value == pytest.approx(0.070)


def test_steps_without_a_wait_or_with_a_pause(device: Device, step_timer: StepTimer) -> None:
    """A step in which no wait is seen, as in a graph that is replayed, has an unknown one, not
    0.
    """
    for _ in range(5):
        step_timer.step_ended(0.0)
    for _ in range(5):
        step_timer.interrupted()
        make_waiting_step(step_timer)
    device.comes_to(*(float(number) for number in range(len(device.events))))
    make_waiting_step(step_timer)
    assert step_timer.wait.value is step_timer.work.value is None


def test_evaluation_is_no_part_of_a_step() -> None:
    """Nor are waits in it, of others that evaluate; the input begins behind it."""
    host = StepTimer()
    host.on("cpu", None)
    host.step_ended(0.0, 1)
    for now in (3.0, 5.0):
        host.waited(now - 1.0, now - 0.5)
        host.evaluated(now)
    host.input_ended(5.5)
    host.waited(5.75, 6.0)
    host.step_ended(6.0, 2)
    assert host.totals == Totals(2, 1, 0.75, 0.25)
    assert host.input.value == 0.5
    host.waited(6.25, 6.75)  # within the evaluation: the step itself has none that is seen
    host.evaluated(7.0)
    host.step_ended(8.0, 3)
    host.waited(9.0, 9.5)
    host.step_ended(10.0, 4)
    assert host.totals == Totals(4, 3, 0.75 + 1.0 + 1.5, 0.25 + 0.5)


def test_totals_leave_no_step_out() -> None:
    """A step in which the process stood still counts whole; so do steps without a wait, as soon as
    one follows that has one. A step with a marked pause is missing from the count as well.
    """
    host = StepTimer()
    host.on("cpu", None)
    assert host.totals is None
    ends = (0.0, 1.0, 2.0, 13.0, 14.0, 20.0, 21.0)
    for step, (end, waited) in enumerate(
        zip(ends, (0.5, 0.25, 0.0, 0.0, 0.5, 0.5, 0.25), strict=True)
    ):
        if waited:
            host.waited(end - waited, end)
        if end == 20.0:
            host.interrupted()
        host.step_ended(end, step)
        if step == 3:
            assert host.totals == Totals(1, 1, 0.75, 0.25)
    assert host.totals == Totals(6, 5, 14.0, 1.0)


@pytest.mark.parametrize(
    ("seconds", "waits", "share"), [(0.01, 0, 2 / 15), (0.01, 10, 1 / 15), (1e-6, 0, 1e-3)]
)
def test_share_of_steps_that_are_measured(
    monkeypatch: pytest.MonkeyPatch, seconds: float, waits: int, share: float
) -> None:
    """Measuring takes 0.15 ms a step and 15 µs for each wait in it: two thousandths of the time,
    and one step in a thousand at least.
    """
    monkeypatch.setattr("dshealthd.training.step_timer.SHARE", SHARE)  # as shipped
    host = StepTimer()
    host.on("cpu", None)
    for _ in range(waits):
        host.waited(0.0, 0.0)
    host.step_ended(1.0, 1, 1, seconds)
    assert host.share == pytest.approx(share)
