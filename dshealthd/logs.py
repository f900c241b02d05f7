"""How log lines are written: logfmt or JSON on standard error, one line an event."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.config import Log


class _Formatter(logging.Formatter):
    """Writes the fields of a record in one of the two forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "ts": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(fields)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: str) -> str:
    """Quote what would not read as one word."""
    return json.dumps(value) if not value or set(value) & set(' ="') or not value.isprintable() else value


def configure(log: Log) -> None:
    """Send all log records to standard error as the config says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(log.format))
    logging.basicConfig(level=log.level.upper(), handlers=[handler], force=True)
