"""Genuine failures of torch and DeepSpeed under three launchers, in every form they come in.

The logs were made by `genuine.py` and are kept; the variants are made here.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from dshealthd.explain.finding import Finding
from tests.explain import genuine
from tests.explain.explaining import explained_paths
from tests.explain.variants import Variant, variants

WANTED = 0.95
FEW = 300
SAYS_NO_EXIT = {"exit", "killed", "segfault"}
"""Where no launcher tells how the rank ended, all that can be known is that its peers lost it."""


def runs() -> dict[str, dict[str, Any]]:
    """Return the logs that are kept."""
    found: dict[str, dict[str, Any]] = json.loads(lzma.decompress(genuine.STORE.read_bytes()))
    return found


def is_right(variant: Variant, finding: Finding, slug: str, rank: int | None) -> bool:
    """Tell whether root and rank are right."""
    slugs = {slug}
    if variant.fault in SAYS_NO_EXIT and not variant.has_root:
        slugs.add("nccl-remote-error")
    if rank is None or finding.ranks == (rank,):
        return finding.slug in slugs
    return finding.slug in slugs and not finding.ranks and not variant.names(rank)


def table(run: dict[str, Any]) -> tuple[str, int | None]:
    """Return what is wrong in a run."""
    faults = genuine.ENGINE_FAULTS if run["engine"] else genuine.FAULTS
    return faults[run["fault"]]


def tally(tmp_path: Path) -> tuple[list[str], list[str], list[str]]:
    """Explain all variants; return which are right, wrong, and wrong though the root was cut."""
    right, wrong, invented = [], [], []
    for seed, (key, run) in enumerate(sorted(runs().items())):
        slug, rank = table(run)
        if not slug:
            continue
        for number, variant in enumerate(variants(run, seed)):
            finding = explained_paths(variant.write(tmp_path / key.replace(" ", "-") / str(number)))
            got = f"{variant.name}: {slug} {rank}, not {finding.slug or '-'} {finding.ranks}"
            is_cut = not variant.has_root and not (
                variant.fault in SAYS_NO_EXIT and variant.holds(b"Connection closed by peer")
            )
            if is_right(variant, finding, slug, rank):
                right.append(got)
            elif not is_cut:
                wrong.append(got)
            elif finding.slug != "child-failed" and (
                finding.root and finding.root.layer in {"program", "hardware"}
            ):
                invented.append(got)
    return right, wrong, invented


def test_root_and_rank_are_right_in_nearly_all_variants(tmp_path: Path) -> None:
    """At least 95 % give the right slug and rank; no other rank is named, and no fault made up."""
    right, wrong, invented = tally(tmp_path)
    assert len(right) + len(wrong) >= FEW
    print(f"{len(right)} of {len(right) + len(wrong)} right", *wrong, *invented, sep="\n")
    assert len(right) / (len(right) + len(wrong)) >= WANTED, "\n".join(wrong)
    assert [got for got in wrong if not got.endswith("()")] == []
    assert len(invented) <= 0.01 * FEW, "\n".join(invented)
