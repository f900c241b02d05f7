"""The words for how sure an answer is promise no more than they keep.

Counted on logs with a known cause or a good end: each has formats and facts of public threads, and
a label that was written before `explain` first read it.
"""

from __future__ import annotations

import functools
import json
import lzma
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dshealthd.explain import answer, command
from tests.explain.explaining import explained

STORE = Path(__file__).with_name("labeled.json.xz")
PAGE = Path(__file__).parents[2] / "docs" / "explain.md"
HEAD = 12
"""Lines of an answer that somebody reads first."""
ROW = re.compile(r"^\| `([A-Z]+)` .*\| (\d+) % .*\| (\d+) of (\d+) \|$", re.MULTILINE)
"""A row of the page: a word, how often it is right at least, and how often on these logs."""


@functools.cache
def logs() -> dict[str, dict[str, Any]]:
    """Return the logs, each with its label."""
    found: dict[str, dict[str, Any]] = json.loads(lzma.decompress(STORE.read_bytes()))
    return found


def is_right(label: dict[str, Any], text: str, outcome: str) -> bool:
    """Return whether an answer says what a label has; of a good end, that nothing failed."""
    if label["kind"] == "healthy":
        return outcome == "nothing"
    if label["kind"] == "orderly" and outcome == "nothing":
        return True
    lines = [line for line in text.splitlines() if line.strip()][:HEAD]
    return any(re.search(one, "\n".join(lines), re.IGNORECASE) for one in label["mention"])


@functools.cache
def counted() -> tuple[Counter[str], Counter[str], list[str]]:
    """Return how often each word was used, how often it was right, and failures not noticed."""
    used: Counter[str] = Counter()
    right: Counter[str] = Counter()
    silent = []
    with tempfile.TemporaryDirectory() as folder:
        for number, label in logs().items():
            path = Path(folder, f"{number}.log")
            path.write_text(label["log"], encoding="utf-8", errors="surrogateescape")
            recognizer, _ = command.read([str(path)])
            finding = command.conclude(recognizer)
            text = answer.text(finding, recognizer.found, [])
            word = answer.SURENESS.get(finding.sureness, finding.outcome.upper())
            used[word] += 1
            right[word] += is_right(label, text, finding.outcome)
            if finding.outcome == "nothing" and label["kind"] == "failed":
                silent.append(number)
    return used, right, silent


@pytest.mark.parametrize("word", answer.SURENESS.values())
def test_a_word_promises_no_more_than_it_keeps(word: str) -> None:
    """The page has a promise for each word, and how often it was kept: both are true."""
    used, right, _ = counted()
    rows = {name: tuple(map(int, row)) for name, *row in ROW.findall(PAGE.read_text("utf-8"))}
    promised, *shown = rows[word]
    assert shown == [right[word], used[word]]
    assert 100 * right[word] >= promised * used[word]
    assert used[word] > len(answer.SURENESS)


def test_a_surer_word_is_right_more_often() -> None:
    """Otherwise the words would not help to decide what to do first."""
    rows = ROW.findall(PAGE.read_text("utf-8"))
    promised = [int(promise) for _, promise, *_ in rows]
    assert [name for name, *_ in rows] == list(answer.SURENESS.values())
    assert promised == sorted(promised, reverse=True)


def test_no_failure_is_passed_over() -> None:
    """*No failure found* is said of no log of a failure."""
    assert counted()[2] == []


CANNOT = "OSError: [Errno 28] No space left on device: '/ckpt/a'"
UNKNOWN = "ERROR: cannot get the cache: it is held by a lock of host n-2"
FLUSHED = "n-1:7:9 [0] NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 3"


@pytest.mark.parametrize(
    ("lines", "sureness"),
    [
        ((CANNOT,), "certain"),
        ((UNKNOWN, CANNOT), "likely"),
        ((CANNOT, UNKNOWN), "certain"),
        ((FLUSHED,), "likely"),
    ],
)
def test_a_cause_has_no_unknown_failure_before_it(lines: tuple[str, ...], sureness: str) -> None:
    """What stands before a message may be its cause, and a peer sees only that another is gone."""
    finding = explained("step 1 | loss 2.1", *lines)
    assert (finding.sureness, finding.is_known) == (sureness, True)
