"""Clock synchronization as adjtimex(2) tells it."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import subprocess
import sys
import time

import pytest

from dshealthd.collectors import clock
from dshealthd.collectors.clock import Timex, adjtimex
from dshealthd.core.collector import Reason
from dshealthd.core.result import CollectionOutcome
from tests.collectors.bench import Bench, named

STA_PLL, STA_UNSYNC, STA_NANO = 0x0001, 0x0040, 0x2000
SYNCHRONIZED = Timex(STA_PLL | STA_NANO, offset=-1_250_000, maximum_error=53500)


@pytest.mark.parametrize(
    ("timex", "values"),
    [
        (SYNCHRONIZED, (1, -0.00125, 0.0535)),
        (SYNCHRONIZED._replace(status=STA_PLL, offset=1250), (1, 0.00125, 0.0535)),
        # As at boot, and when no update has come for 9 hours.
        (Timex(STA_UNSYNC, offset=0, maximum_error=16_000_000), (0,)),
        # chronyd without rtcsync leaves the flag, and keeps the clock; it sets the error to 16 s
        # when it has lost its servers.
        (Timex(STA_UNSYNC, offset=0, maximum_error=17_288), (1, 0, 0.017288)),
        (Timex(STA_UNSYNC, offset=0, maximum_error=15_999_999), (1, 0, 15.999999)),
    ],
)
def test_what_the_kernel_says(timex: Timex, values: tuple[float, ...]) -> None:
    """Times are in seconds, of nanoseconds with STA_NANO, else of microseconds; without
    synchronization, offset and error mean nothing and are left out.
    """
    result = Bench("clock", None, lambda: timex).collect()
    metrics = (clock.SYNCHRONIZED, clock.OFFSET, clock.MAXIMUM_ERROR)
    assert named(result) == {
        (metric.name.removeprefix("dshealthd_"),): value
        for metric, value in zip(metrics, values, strict=False)
    }


def test_refused() -> None:
    """Where adjtimex is refused, that is an error, not an unsynchronized clock."""

    def refuse() -> Timex:
        raise PermissionError(errno.EPERM, "adjtimex: Operation not permitted")

    result = Bench("clock", None, refuse).collect()
    assert (result.outcome, result.reason, result.samples) == (
        CollectionOutcome.ERROR,
        Reason.PERMISSION_DENIED,
        (),
    )


ADJTIMEX = {"x86_64": 159, "aarch64": 171}
PERL = """
    my $timex = pack("x256");
    syscall($ARGV[0], $timex);
    my ($modes, $offset, $frequency, $maximum, $estimated, $status) = unpack("L x4 q4 l", $timex);
    print "$status $maximum";
"""
"""Asks the kernel by syscall(), which shares no code with ours; layout of 64-bit Linux."""


def test_against_another_caller() -> None:
    """This machine's status and maximum error are what another program gets."""
    number, perl = ADJTIMEX.get(os.uname().machine), shutil.which("perl")
    if number is None or perl is None:
        pytest.skip("no perl, or the number of the system call is not known here")
    shown = subprocess.run(
        [perl, "-e", PERL, str(number)], capture_output=True, text=True, check=True
    ).stdout
    status, maximum_error = map(int, shown.split())
    ours = adjtimex()
    assert ours.status == status
    assert ours.maximum_error == pytest.approx(maximum_error, abs=1_000_000)


def test_a_faked_clock_changes_nothing() -> None:
    """With libfaketime ten years ahead, the kernel's view of its clock is reported as it is."""
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    if not found:
        pytest.skip("libfaketime is not installed")
    script = (
        "import time; from dshealthd.collectors.clock import adjtimex; print(time.time(), "
        "adjtimex().status)"
    )
    environment = {**os.environ, "LD_PRELOAD": found[0], "FAKETIME": "+10y"}
    shown = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert float(shown[0]) > time.time() + 9 * 365 * 86400
    assert int(shown[1]) == adjtimex().status


def test_nothing_is_set() -> None:
    """Asking takes no privilege: an unprivileged process gets an answer too."""
    if os.geteuid() != 0:
        assert adjtimex().maximum_error >= 0
        return
    script = (
        "import os; from dshealthd.collectors.clock import adjtimex; os.setuid(65534); "
        "print(adjtimex().maximum_error)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert int(shown) >= 0
