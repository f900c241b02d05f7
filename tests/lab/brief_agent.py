"""The agent, with findings that end seconds after their cause; the shipped ones stay for minutes.

Takes the command line of `dshealthd`.
"""

from __future__ import annotations

import sys

from dshealthd.cli import main as cli
from dshealthd.findings.catalogue import catalogue

KEEP_SECONDS = 15

if __name__ == "__main__":
    entries = catalogue()
    assert isinstance(entries, dict)
    for name, entry in entries.items():
        keep = min(entry.keep_seconds, float(KEEP_SECONDS))
        entries[name] = entry._replace(keep_seconds=keep)
    sys.exit(cli.main())
