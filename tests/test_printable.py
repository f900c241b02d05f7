"""What users name cannot write on a reader's terminal."""

from __future__ import annotations

import json
import logging

from hypothesis import given
from hypothesis import strategies as st

from dshealthd.collection.worker import WorkerFormatter
from dshealthd.core.text import printable, printable_lines

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\nINFO all is well\u202egpj\u200b\x9b31m\udc80"


@given(st.text())
def test_any_text_becomes_one_printable_line(text: str) -> None:
    """Nothing but printable characters is left, and printable text stays as it is."""
    assert printable(text).isprintable()
    assert printable(text) == text or not text.isprintable()


@given(st.text())
def test_json_stays_json(text: str) -> None:
    """A JSON document means the same afterwards."""
    assert json.loads(printable_lines(json.dumps(text, ensure_ascii=False))) == text


def test_terminal_sequences_and_invented_lines() -> None:
    """ESC, OSC, CSI, line breaks, text direction and zero width are all told as escapes."""
    assert printable(HOSTILE) == (
        "a\\u001b]0;owned\\u0007\\u001b[2J\\nINFO all is well\\u202egpj\\u200b\\u009b31m\\udc80"
    )


def test_a_worker_s_log() -> None:
    """A message of a worker is one line."""
    record = logging.LogRecord("x", logging.WARNING, "", 0, "%s", (HOSTILE,), None)
    line = WorkerFormatter("worker jobs: %(levelname)s %(message)s").format(record)
    assert line.isprintable()
    assert line.startswith("worker jobs: WARNING a")
