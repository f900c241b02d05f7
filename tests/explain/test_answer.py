"""The answer as JSON, as its documentation has it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dshealthd.explain import answer, command
from tests.explain.watchdogs import Group, Rank, printed

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs" / "explain.md"


def test_the_schema_is_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of the answer is on the page and no other; so are those of its parts."""
    ranks = [Rank(rank, rank, 8, 8, 7) for rank in range(3)]
    ranks[1] = Rank(1, 1, None, 7, 7)
    lines = printed("2.9", Group(0, "default_pg", ranks), random.Random(1))
    (tmp_path / "job.out").write_text("".join(f"{text}\n" for *_, text in sorted(lines)))
    assert command.main(["--json", str(tmp_path)]) == command.EXIT_FOUND
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == [1]
    page = PAGE.read_text("utf-8")
    table = page.partition("## JSON")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(told)
    assert f"| `schema` | {answer.SCHEMA} |" in table
    parts = {**told["groups"][0], **told["read"], **told["proof"][0], **told["chain"][0]}
    words = set(re.findall(r"`(\w+)`", table.rpartition("|\n")[2]))
    assert set(parts) <= words
    assert words - set(parts) == {
        "behind", "stuck", "ahead", "missing", "mismatch", "symmetric", "unknown", "chain", "read",
    }  # fmt: skip
