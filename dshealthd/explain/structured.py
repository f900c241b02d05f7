"""Log records in JSON, one a line: Docker's json-file, `journalctl -o json`, structured loggers.

A record becomes the lines that a plain log would have, with time and host before each.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

_MESSAGES = ("log", "MESSAGE", "message", "msg")
_TIMES = ("time", "timestamp", "@timestamp", "ts", "__REALTIME_TIMESTAMP")
_HOSTS = ("_HOSTNAME", "hostname", "host")
_KEYS = tuple(f'"{name}"' for name in _MESSAGES)
_MICROSECONDS, _MILLISECONDS = 1e14, 1e11
"""Numbers above these count microseconds and milliseconds since 1970: seconds never get there."""


def lines(text: str) -> list[str]:
    """Return a JSON log record's message as lines; the line itself where it is no record."""
    if not text.startswith("{") or not any(key in text for key in _KEYS):
        return [text]
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # cut off, or a dictionary that a program printed
        return [text]
    message = next((record[name] for name in _MESSAGES if name in record), None)
    if isinstance(message, list):  # journald's, where a message is no UTF-8
        if not all(isinstance(value, int) and 0 <= value < 256 for value in message):  # noqa: PLR2004 - a byte
            return [text]
        message = bytes(message).decode("utf-8", "replace")
    if not isinstance(message, str):
        return [text]
    when = _time(next((record[name] for name in _TIMES if name in record), None))
    host = next((record[name] for name in _HOSTS if name in record), None)
    prefix = f"{when} " if when else ""
    if when and isinstance(host, str) and host.replace("-", "").replace(".", "").isalnum():
        prefix += f"{host} json: "
    return [prefix + line for line in message.rstrip("\n").split("\n")]


def _time(value: Any) -> str | None:
    """Return a JSON record's time as ISO 8601 in UTC; None if it is none of the usual forms."""
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
    try:
        seconds = float(value)
        seconds /= 1e6 if seconds > _MICROSECONDS else 1e3 if seconds > _MILLISECONDS else 1
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
