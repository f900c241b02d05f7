"""JSON log records, one per line: Docker's json-file, `journalctl -o json`, structured loggers.

A record becomes the lines of a plain log, each prefixed with time and host.
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
"""Numbers above these are microseconds and milliseconds since 1970: seconds are never so large."""


def lines(text: str) -> list[str]:
    """Return a JSON log record's message as lines; the line itself if it is not a record."""
    if not text.startswith("{") or not any(key in text for key in _KEYS):
        return [text]
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # truncated, or a dictionary that a program printed
        return [text]
    message = next((record[name] for name in _MESSAGES if name in record), None)
    if isinstance(message, list):  # journald's form of a message that is not UTF-8
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
    """Return a JSON record's time as ISO 8601 in UTC; None if its format is unknown."""
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
