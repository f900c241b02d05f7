"""Eight simulated H100 with NVLink and two NDR adapters, as one scrape is printed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dshealthd.agent import node_figures
from dshealthd.config import registry
from tests.agents import Scrape
from tests.nvml.simulator import Simulator

ADAPTERS = Path(__file__).parents[1] / "collectors" / "fixtures" / "infiniband" / "sys"
MAX_SERIES = {"h100": 1200, "b200": 1200}
"""Below the 1,500 that a node may have, as jobs, Xids and files add to it."""


@pytest.fixture(scope="module", params=sorted(MAX_SERIES))
def profile(request: pytest.FixtureRequest) -> str:
    """Return the generation of the GPUs."""
    return str(request.param)


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory, profile: str) -> Scrape:
    """Return what `dshealthd metrics` prints on such a node."""
    directory = tmp_path_factory.mktemp("node")
    shutil.copytree(ADAPTERS, directory / "sys", symlinks=True)
    for odd in ("irdma0", "mlx5_2", "mlx5_3"):
        (directory / "sys/class/infiniband" / odd).unlink()
    gpus = Simulator(directory, profile=profile)
    gpus.pci_sysfs(directory / "sys")
    command = [sys.executable, "-m", "dshealthd", "metrics", "--path.sysfs", str(directory / "sys")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **gpus.environment()},
    )
    return Scrape(done.stdout, 0.0)


def test_everything_is_up(scrape: Scrape) -> None:
    """All GPU collectors and InfiniBand are up, eight GPUs and two ports are shown."""
    for name, kind in registry.all_collectors().items():
        if kind.worker in {"device", "fabric"} and kind.Options().enabled:
            assert scrape.value("dshealthd_collector_available", collector=name) is not None
            assert scrape.value("dshealthd_collector_up", collector=name) in {1, None}
    assert scrape.all("dshealthd_gpu_up") == [1.0] * 8
    assert scrape.value("dshealthd_gpus_expected") == scrape.value("dshealthd_gpus_visible") == 8
    assert scrape.all("dshealthd_infiniband_port_up") == [1.0] * 2


def test_series_are_few_and_labels_bounded(scrape: Scrape, profile: str) -> None:
    """The whole node stays far below 1,500 series, those of jobs aside."""
    of_the_node = [
        key
        for series in scrape.series.values()
        for key in series
        if "training_job" not in dict(key)
    ]  # other tests have jobs run here
    assert len(of_the_node) < MAX_SERIES[profile]
    labels = {label for key in of_the_node for label in key}
    assert not {"pid", "process", "comm", "message", "command"} & {name for name, _ in labels}
    assert max(len(value) for _, value in labels) <= 128
    declared = {
        metric for kind in registry.all_collectors().values() for metric in registry.metrics(kind)
    }
    declared |= {figure.name for figure in registry.declared(node_figures)}
    own = {
        name
        for name in scrape.series
        if name.startswith(
            ("dshealthd_collector_", "dshealthd_build", "dshealthd_config_", "process_")
        )
    }
    assert set(scrape.series) - own <= declared
