"""A job of several nodes hangs for the rules exactly where it does for the view of the fleet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.job_states import TOGETHER, WORLD, Part
from tests.symptoms.promtool import asking, promtool, pruned

AT = 600
"""Seconds after the start, when the rules are asked; heartbeats ended at the start."""


def exported(job: str, node: str, part: Part) -> Iterator[tuple[str, str]]:
    """Yield the series, and their values, that a node's agent exports of its part of a job."""
    of = f'training_job="{job}", node="{node}"'
    silent = bool(part.cause)
    yield f'dshealthd_job_hang{{{of}, class="{part.cause or "none"}"}}', "1x60"
    yield f'dshealthd_job_world_size{{{of}, run="0"}}', f"{WORLD}x60"
    yield f'dshealthd_job_node_role_ranks{{{of}, role="data"}}', f"{part.ranks}x60"
    runnable = 0 if part.state == "suspended" else part.ranks
    yield f"dshealthd_job_runnable_ranks{{{of}}}", f"{runnable}x60"
    heard = "0x60" if silent or part.state == "paused" else "0+15x60"
    yield f"dshealthd_job_node_heartbeat_timestamp_seconds{{{of}}}", heard
    for rank in range(part.ranks if silent else 0):
        place = f'dshealthd_job_silent_rank_position{{{of}, rank="{node}{rank}", stage="unknown"}}'
        yield place, f"{part.step}x60"


def test_the_rules_agree_with_the_fleet(tmp_path: Path) -> None:
    """Each row of the table is a job of its own; those that hang are recorded, and no others."""
    played = [
        {"series": name, "values": values}
        for number, (parts, _) in enumerate(TOGETHER)
        for node, part in zip("ab", parts, strict=True)
        for name, values in exported(str(number), node, part)
    ]
    hung = {
        f'dshealthd:job:hang{{training_job="{number}"}}': 1
        for number, (_, state) in enumerate(TOGETHER)
        if state == "hung"
    }
    file = tmp_path / "states.yml"
    scene = asking("dshealthd:job:hang", f"{AT}s", played, hung, interval="15s")
    document = {"evaluation_interval": "15s", "tests": [scene]}
    file.write_text(json.dumps(document), encoding="utf-8")
    rules = tmp_path / "pruned"
    rules.mkdir()
    promtool("test", "rules", pruned(file, rules))
