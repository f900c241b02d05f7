"""The last minutes of the kernel log, for a bundle of evidence."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from dshealthd.core.collector import NotAvailable, SourceError
from dshealthd.core.text import printable
from dshealthd.linux.forked import Emit, Missing
from dshealthd.linux.journal import kernel_log_reader
from dshealthd.linux.kmsg import KERNEL, KernelLogRecord, kernel_clock

if TYPE_CHECKING:
    from dshealthd.core.host import Host


FILE = "kernel-log.txt"
AGE = 900.0
"""Age in seconds up to which lines are taken."""
MAX_RECORDS = 200_000
"""More than any buffer holds."""
MAX_LINES = 2_000
"""Most lines kept, the last ones: some 200 kB, at 100 bytes each."""
_SECONDS = 20.0
"""A journal may have months of lines to pass over; a collection waits longer for other steps."""


def collect(emit: Emit, host: Host, *, journal: bool) -> None:
    """Emit `kernel-log.txt`, newest lines last.

    OSError or `Missing` if the log, or a part of it, cannot be read.

    Lines that the kernel itself did not write are marked: any process with access to the log can
    forge them.
    """
    reader = kernel_log_reader(host, time.monotonic, journal=journal)
    oldest = kernel_clock() - AGE
    lines = deque[KernelLogRecord](maxlen=MAX_LINES)
    problem = ""
    try:
        lines.extend(
            record for record in reader.read(MAX_RECORDS, _SECONDS) if record.timestamp >= oldest
        )
    except (NotAvailable, SourceError) as error:
        problem = str(error)
    for record in lines:
        writer = "" if record.facility == KERNEL else f"(facility {record.facility}) "
        emit(
            FILE,
            f"[{record.timestamp:.6f}] {writer}{printable(record.message)}\n".encode(
                errors="replace"
            ),
        )
    if not (problem or reader.drained):
        problem = f"the newest lines are missing: it was not read to its end in {_SECONDS:g} s"
    reader.close()
    if problem:
        raise Missing(problem)
