"""The last minutes of the kernel log, for a bundle of evidence."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dshealthd.core.text import printable
from dshealthd.linux.kmsg import KERNEL, KernelLogReader

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.linux.forked import Emit


FILE = "kernel-log.txt"
AGE = 900.0
"""Age in seconds up to which lines are taken."""
MAX_RECORDS = 200_000
"""More than any buffer holds."""
MAX_LINES = 2_000
"""Most lines kept, the last ones: some 200 kB, at 100 bytes each."""
_SECONDS = 5.0


def collect(emit: Emit, host: Host) -> None:
    """Emit `kernel-log.txt`, newest lines last.

    OSError if the log cannot be read.

    Lines that the kernel itself did not write are marked: any process with access to the log can
    forge them.
    """
    reader = KernelLogReader(host.device("kmsg"), time.monotonic)
    oldest = time.clock_gettime(time.CLOCK_MONOTONIC) - AGE
    lines = [record for record in reader.read(MAX_RECORDS, _SECONDS) if record.timestamp >= oldest]
    reader.close()
    for record in lines[-MAX_LINES:]:
        writer = "" if record.facility == KERNEL else f"(facility {record.facility}) "
        emit(
            FILE,
            f"[{record.timestamp:.6f}] {writer}{printable(record.message)}\n".encode(
                errors="replace"
            ),
        )
