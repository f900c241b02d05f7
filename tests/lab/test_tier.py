"""How many series of a busy node belong to the verdict tier."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dshealthd.config import registry
from tests.agents import Scrape
from tests.lab import Lab, Node
from tests.lab.node import merged, toml
from tests.lab.probing import rounds, settings
from tests.waiting import until

MOST = 120
GPUS = ADAPTERS = RANKS = 8
INFINIBAND = Path(__file__).parents[1] / "collectors" / "fixtures" / "infiniband" / "sys"
JOB = "slurm-4711"


def lay_out_adapters(node: Node) -> None:
    """Give a node eight adapters."""
    model = (INFINIBAND / "class/infiniband/mlx5_0").resolve()
    place = node.sysfs / "class" / "infiniband"
    place.mkdir(parents=True)
    for number in range(ADAPTERS):
        device = node.sysfs / "devices" / f"pci{number}" / "infiniband" / f"mlx5_{number}"
        shutil.copytree(model, device, symlinks=True)
        (place / device.name).symlink_to(os.path.relpath(device, place))


@contextlib.contextmanager
def ranks() -> Iterator[None]:
    """Run a job whose ranks send heartbeats."""
    with contextlib.ExitStack() as stack:
        for number in range(RANKS):
            environment = os.environ | {
                "SLURM_JOB_ID": "4711",
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29599",
            }
            command = [sys.executable, "-m", "tests.jobs.rank"]
            rank = stack.enter_context(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)
            )
            stack.callback(rank.kill)
        yield


def test_a_busy_node_has_few_series_that_rules_read(tmp_path: Path) -> None:
    """Eight GPUs, eight adapters, eight ranks of a job that send heartbeats, and probes: at most
    120 series are in the tier; nothing of it comes from a part that is missing here.
    """

    def config(node: Node) -> str:
        own = {
            "probe": {"members": {"name": node.member}},
            "collectors": {
                "network": {"include": ["lo"]},
            },
        }
        return toml(merged(settings(node, period=2.0, full=False), own))

    collectors = tuple(registry.all_collectors())
    made = Lab(
        tmp_path,
        2,
        gpus=GPUS,
        config=config,
        collectors=collectors,
        interval="1s",
        namespaces=False,
        start=False,
    )
    with made as lab:
        hostfile = "".join(f"{node.member} slots=1\n" for node in lab.nodes)
        for node in lab.nodes:
            lay_out_adapters(node)
            node.hostfile.write_text(hostfile, encoding="ascii")
            node.begin()
        for node in lab.nodes:
            node.finish()
        busy = lab.nodes[0]
        with ranks():

            def ready(scrape: Scrape) -> bool:
                return (
                    len(scrape.all("dshealthd_job_step", training_job=JOB)) == RANKS
                    and len(scrape.all("dshealthd_infiniband_port_up")) == ADAPTERS
                    and scrape.all("dshealthd_node_gpus_up") == [GPUS]
                    and rounds(scrape, outcome="ok") > 1
                    and bool(scrape.all("dshealthd_job_hang", training_job=JOB))
                )

            until(lambda: ready(busy.scrape()))
            everything, tier = busy.scrape(), Scrape(busy.get("/metrics?tier=verdict"), 0.0)
    # Without namespaces the agent sees what runs on this machine besides.
    counts = Counter(
        name
        for name, series in tier.series.items()
        for labels in series
        if dict(labels).get("training_job", JOB) in {JOB, ""}
    )
    assert sum(map(len, everything.series.values())) > 10 * MOST
    assert 0 < counts.total() <= MOST, counts.most_common()
    assert {"dshealthd_build_info", "dshealthd_job_hang", "dshealthd_members"} <= counts.keys()
