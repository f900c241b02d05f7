"""Collectives that hang, in every form in which their watchdogs' lines are handed in.

The lines are those of `watchdogs.py`; the forms are those of the genuine failures.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tests.explain.explaining import explained_files
from tests.explain.variants import Timed, forms
from tests.explain.watchdogs import RELEASES, Group, hung_group, printed

WANTED = 0.95
TURNS = 1
PER_NODE = 8


def absent(group: Group, chance: random.Random) -> int:
    """Have one rank never enter the collective; return which."""
    culprit = chance.choice(group.ranks)
    assert culprit.timed_out is not None
    culprit.enqueued = culprit.completed = culprit.timed_out - 1
    culprit.timed_out = None
    return culprit.rank


def other_size(group: Group, chance: random.Random) -> int:
    """Have one rank enter it with another size; return which."""
    culprit = chance.choice(group.ranks)
    culprit.numel += len(group.ranks) * chance.randrange(1, 1000)
    return culprit.rank


def other_operation(group: Group, chance: random.Random) -> int:
    """Have one rank enter another collective; return which."""
    culprit = chance.choice(group.ranks)
    culprit.operation = "BROADCAST" if culprit.operation != "BROADCAST" else "ALLREDUCE"
    return culprit.rank


def stuck(group: Group, chance: random.Random) -> int:
    """Have one rank's GPU stay at what the others have left; return which."""
    culprit = chance.choice(group.ranks)
    assert culprit.timed_out is not None
    culprit.timed_out -= 3
    culprit.completed -= 3
    return culprit.rank


FAULTS: tuple[tuple[Callable[[Group, random.Random], int], Sequence[str]], ...] = (
    (absent, RELEASES),
    (other_size, RELEASES[1:]),  # torch 2.0 prints no sizes
    (other_operation, RELEASES[1:]),
    (stuck, ("2.7", "2.9")),
)


def printed_by(group: Group, release: str, chance: random.Random) -> dict[str, list[Timed]]:
    """Return what each rank, or each node of eight, prints: steps, and then its watchdog."""
    per_node = chance.choice((1, PER_NODE)) if len(group.ranks) > PER_NODE else 1
    kind = "rank" if per_node == 1 else "node"
    units: dict[str, list[Timed]] = {}
    for state in group.ranks:
        lines = units.setdefault(f"{kind}{state.rank // per_node}", [])
        lines += [
            (float(step), f"[rank{state.rank}]: step {step} | loss 2.{step}") for step in range(5)
        ]
    for when, rank, text in printed(release, group, chance):
        units[f"{kind}{rank // per_node}"].append((when, text))
    return {name: sorted(lines, key=lambda timed: timed[0]) for name, lines in units.items()}


def variants(
    group: Group, release: str, chance: random.Random
) -> Iterator[tuple[str, dict[str, Sequence[str]]]]:
    """Return all forms of what the ranks of a group print."""
    units = printed_by(group, release, chance)
    yield (
        "separate",
        {f"{name}.log": [line for _, line in lines] for name, lines in units.items()},
    )
    yield from forms(units, chance)


def test_the_culprit_is_right_in_nearly_all_forms() -> None:
    """In 95 % of the variants the one culprit is named alone; cut ones name it or nobody."""
    outcomes: Counter[str] = Counter()
    wrong = []
    for fault, releases in FAULTS:
        for release in releases:
            for seed in range(TURNS):
                chance = random.Random(f"{fault.__name__} {release} {seed}")
                world = chance.choice((4, 8, 16, 64))
                group = hung_group(world, chance)
                culprit = fault(group, chance)
                for form, files in variants(group, release, chance):
                    finding = explained_files(files)
                    is_cut = form in {"head cut", "tail cut"}
                    right = finding.slug == "nccl-timeout" and finding.ranks == (culprit,)
                    if right and fault is stuck:
                        assert f"rank {culprit} alone did not finish" in str(finding.step)
                    kind = "right" if right else "none" if not finding.ranks else "other"
                    outcomes[f"{kind}{' of cut' * is_cut}"] += 1
                    if not right:
                        wrong.append(
                            f"{fault.__name__} {release} {world} {form}: rank {culprit}, not "
                            f"{finding.slug} {finding.ranks}"
                        )
    print(dict(outcomes), *wrong, sep="\n")
    whole = sum(outcomes[kind] for kind in ("right", "none", "other"))
    assert whole >= 100
    assert outcomes["right"] >= WANTED * whole
    assert outcomes["other"] + outcomes["other of cut"] == 0


def test_nobody_is_named_in_any_form_where_all_entered_the_same() -> None:
    """Unless one rank's report was cut away, the fault is inside the collective."""
    named = []
    count = 0
    for release in RELEASES:
        for seed in range(TURNS):
            chance = random.Random(f"symmetric {release} {seed}")
            group = hung_group(chance.choice((2, 4, 8, 16, 64)), chance)
            for form, files in variants(group, release, chance):
                finding = explained_files(files)
                count += 1
                if form == "merged" and release != "2.0":
                    assert "fabric or a GPU" in finding.statement
                if finding.ranks and not (form == "tail cut" and not files["job.out"][-1]):
                    named.append(f"{release} {len(group.ranks)} {form}: {finding.statement}")
    assert count >= 40
    assert named == []
