"""`explain`: how many labeled logs it answers right. `python -m bench.score_explain FOLDER`.

The folder holds logs and `labels.tsv` with the columns `file`, `root` (a slug, `undecided`, `none`
for a log without a failure, or `other` for a cause without a slug), `also` (labels as good as
`root`, separated by blanks) and `rank` (numbers with commas, or `-` where the log names none).
`--steps` prints every answer with its first step, for a person to judge.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dshealthd.explain import answer, command

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class Score:
    """Counts, and the names of the logs that were answered wrong."""

    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, what: str, *, is_right: bool) -> None:
        """Count an answer."""
        (self.right if is_right else self.wrong).append(what)

    def __str__(self) -> str:
        """Return the counts and what was wrong."""
        total = len(self.right) + len(self.wrong)
        share = f"{len(self.right)} of {total} = {100 * len(self.right) / max(total, 1):.0f} %"
        return "\n  ".join([share, *self.wrong])


def main() -> None:
    """Explain every labeled log and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", action="store_true", help="print every answer")
    options = parser.parse_args()
    with (options.folder / "labels.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    roots, ranks, unseen, claims, others = Score(), Score(), Score(), Score(), []
    for row in rows:
        label, told = _explained(options.folder, row, show=options.steps)
        what = f"{row['file']}: wanted {row['root']} {row['rank']}, got {label} {told or '-'}"
        if row["root"] == "none":
            claims.add(what, is_right=label in {"none", *row["also"].split()})
            continue
        unseen.add(what, is_right=label != "none" or "none" in row["also"].split())
        if row["root"] == "other":
            others.append(what)
        else:
            roots.add(what, is_right=label in {row["root"], *row["also"].split()})
        if row["rank"] != "-":
            ranks.add(what, is_right=told == row["rank"])
    print(f"root: {roots}\nrank: {ranks}\nfailures that were seen: {unseen}")
    print(f"healthy logs without a claim: {claims}")
    print("causes without a slug, to be judged by hand:", *others, sep="\n  ")


def _explained(folder: Path, row: Mapping[str, str], *, show: bool) -> tuple[str, str]:
    """Return the label of an answer, and the ranks that it names."""
    recognizer, unread = command.read([str(folder / row["file"])])
    finding = command.conclude(recognizer)
    if show:
        print(f"=== {row['file']}: {row['root']} {row['rank']}")
        print(answer.text(finding, recognizer.found, unread).replace(f"{folder}/", ""))
    label = {"nothing": "none", "undecided": "undecided"}.get(finding.outcome, finding.slug)
    return label, ",".join(map(str, finding.ranks))


if __name__ == "__main__":
    main()
