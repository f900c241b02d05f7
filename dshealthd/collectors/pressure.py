"""Pressure stall information: the share of time that tasks wait for CPU, memory and I/O.

From `/proc/pressure`.

Needs a kernel with PSI (CONFIG_PSI; `psi=1` on the command line where it is off by default).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping

from dshealthd.core.collector import Collector, Fault, NotAvailable, Sample, every, gauge
from dshealthd.core.host import lines_of
from dshealthd.core.result import read_parsed

STALLED_RATIO = gauge(
    "dshealthd_pressure_stalled_ratio",
    "Share of the last 10 s in which some, or all (full), non-idle tasks waited for the resource; "
    "avg10 of /proc/pressure.",
    *("resource", "tasks"),
)

_SHOWN = {"cpu": ("some",), "memory": ("some", "full"), "io": ("some", "full")}
"""`full` is meaningless for the CPU outside a cgroup."""
_SWITCHED_OFF = (
    "pressure stall information is disabled; psi=1 on the kernel command line enables it"
)


def parse_pressure(text: str) -> Mapping[str, float]:
    """Return the ratio of the last 10 s by `some` and `full`; ValueError if malformed."""
    shares = {}
    for line in lines_of(text):
        kind, *pairs = line.split()
        fields = dict(pair.split("=", 1) for pair in pairs)
        try:
            shares[kind] = float(fields["avg10"]) / 100
        except KeyError as error:
            raise ValueError(f"no {error} in {line!r}") from error
    return shares


class Pressure(Collector):
    """Reads three files; cannot hang."""

    Options = every("15s")

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the pressure stall information of each resource."""
        for resource, kinds in _SHOWN.items():
            try:
                shares = read_parsed(self.host.proc(f"pressure/{resource}"), parse_pressure)
            except FileNotFoundError as error:
                raise NotAvailable(str(error)) from error
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:  # compiled in, but disabled
                    raise NotAvailable(_SWITCHED_OFF) from error
                raise
            for kind in kinds:
                if kind in shares:
                    yield STALLED_RATIO(shares[kind], resource, kind)
