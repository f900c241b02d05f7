"""Texts for people: counts, and what users name, which cannot write on a reader's terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.cli import main as cli
from dshealthd.collection.worker import WorkerFormatter
from dshealthd.core.text import (
    duration,
    first_of,
    nodes_to_exclude,
    plural,
    printable,
    printable_lines,
    several,
)

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


FAILURE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
NAMED = "a\x1b]0;owned\x07\x1b[2J\u202egpj.log"
"""A name that a file may have."""


@pytest.mark.parametrize("words", [
    ("explain", "DIR"),
    ("explain", "--json", "DIR"),
    ("explain", "DIR/none"),
    ("explain", "x" * 6000),
    ("explain", NAMED),
    ("explain", f"--{NAMED}"),
    ("check-config", "--config.file", NAMED),
    ("check-config", f"--{NAMED}"),
    ("check-config", f"--probe.period={NAMED}"),
    (NAMED,),
    ("free-port", "--range", NAMED),
    ("doctor", "--config.file", NAMED),
    ("doctor", "--runbook", NAMED),
    ("doctor", "--only", NAMED),
    ("doctor", f"--{NAMED}"),
    ("keys", "show", NAMED),
    ("keys", "new", f"/proc/{NAMED}"),
    ("maintenance", "on", "--for", NAMED),
    ("maintenance", "show", "--path.state", NAMED),
    ("probe", "--config.file", NAMED),
    ("probe", NAMED),
    ("status", "--config.file", NAMED),
    ("status", NAMED),
    ("jobs", NAMED),
], ids=repr)  # fmt: skip
def test_commands_print_no_name_as_it_is(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a command is given that somebody else may have named, its output moves no cursor,
    adds no line, and is no traceback.
    """
    (tmp_path / NAMED).write_text(FAILURE)
    (tmp_path / f"{NAMED}.gz").write_bytes(b"\x1f\x8b\x08 no gzip")
    with contextlib.suppress(SystemExit):  # as argparse ends
        cli.main([word.replace("DIR", str(tmp_path)) for word in words])
    said = capsys.readouterr()
    text = said.out + said.err
    assert text.strip()
    assert [line for line in text.split("\n") if not line.isprintable()] == []
    assert "Traceback (most" not in text


@pytest.mark.parametrize(("number", "one", "several", "text"), [
    (0, "GPU", "", "0 GPUs"),
    (1, "GPU", "", "1 GPU"),
    (1.0, "GPU", "", "1 GPU"),
    (2.0, "GPU", "", "2 GPUs"),
    (1, "process hangs", "processes hang", "1 process hangs"),
    (3, "process hangs", "processes hang", "3 processes hang"),
    (1_048_576.0, "file", "", "1,048,576 files"),
    (math.inf, "file", "", "inf files"),
])  # fmt: skip
def test_plural(number: float, one: str, several: str, text: str) -> None:
    """One is in the singular; a large count is in full, with commas, and not as a power of ten."""
    assert plural(number, one, several) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0.1234, "0.123 s"),
    (119.4, "119 s"),
    (120, "2 min"),
    (7199, "120 min"),
    (7200, "2 h"),
    (172_799, "48 h"),
    (172_800, "2 d"),
])  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    """A unit is used from two of it on, as a rounded one would say too little."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        ((), ""),
        ("cab", "a, b, c"),
        ("dcab", "a, b, c, and 1 more"),
        ("edcab", "a, b, c, and 2 more"),
    ],
)
def test_three_are_named(texts: str, text: str) -> None:
    """In order, with how many more there are."""
    assert several(tuple(texts)) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [("", ""), ("a", "a"), ("a\nb", "a (and 1 more)"), ("a\nb\nc", "a (and 2 more)")],
)
def test_first_of_an_error(error: str, text: str) -> None:
    """Its first line, and how many follow."""
    assert first_of(error) == text


def test_nodes_to_leave_out() -> None:
    """Without any there is no option: no scheduler takes an empty list."""
    found = nodes_to_exclude(["a", "b"])
    assert "|".join(found) == "nodes|slurm|kubernetes|deepspeed"
    names, *options = found.values()
    assert names == ["a", "b"]
    assert options == ["--exclude=a,b", "kubernetes.io/hostname notin (a,b)", "--exclude=a@b"]
    assert nodes_to_exclude([]) == dict.fromkeys(found, "") | {"nodes": []}
