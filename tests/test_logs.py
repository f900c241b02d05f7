"""The agent's log: how a line is written, and what becomes of those that nobody reads."""

from __future__ import annotations

import json
import logging
import os
import sys

import pytest

from dshealthd.agent.logs import LineWriter, _Formatter


def record(message: str) -> logging.LogRecord:
    """Return a record of one and a half seconds after 1970."""
    made = logging.LogRecord("x.y", logging.WARNING, "", 0, message, (), None)
    made.created, made.msecs = 1.5, 500.0
    return made


@pytest.mark.parametrize(("message", "written"), [
    ("word", "word"),
    ("", '""'),
    ("two words", '"two words"'),
    ("a=b", '"a=b"'),
    ('a"b', r'"a\"b"'),
    ("a\nb", r'"a\nb"'),
])  # fmt: skip
def test_a_line_of_logfmt(message: str, written: str) -> None:
    """What would not read as one word is quoted, and a message adds no line."""
    line = _Formatter("logfmt").format(record(message))
    assert line == f"ts=1970-01-01T00:00:01.500Z level=warning logger=x.y msg={written}"


def test_a_line_of_json() -> None:
    """With its traceback, if there is one."""
    failed = record("two words")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        failed.exc_info = sys.exc_info()
    line = json.loads(_Formatter("json").format(failed))
    assert (line["ts"], line["msg"]) == ("1970-01-01T00:00:01.500Z", "two words")
    assert line["traceback"].endswith("ZeroDivisionError: division by zero")


def test_lines_that_are_not_read_are_told() -> None:
    """Their number, after the next line; those that nobody can read any more are counted, too."""
    read_end, write_end = os.pipe()
    writer = LineWriter(write_end, waiting=1)
    writer._started = True  # by a thread that has no turn
    for number in range(3):
        writer.put(f"{number}")
    assert writer.dropped == 2
    writer._started = False
    writer.start()
    writer.flush(60.0)
    assert os.read(read_end, 1000).decode().splitlines() == [
        *("0", 'level=warning msg="2 log lines dropped: not read in time"')
    ]
    os.close(read_end)
    writer.put("3")
    writer.flush(60.0)
    assert writer.dropped == 3
    os.close(write_end)
