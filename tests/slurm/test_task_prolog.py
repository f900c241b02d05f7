"""The site's TaskProlog under a real slurmd: who is followed, and that no job is the worse for it.

A user writes neither a line nor a variable for it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.training import directory
from tests.agents import Scrape
from tests.deploy.slurm import SlurmCluster, require
from tests.lab.lab import Lab

SCRIPT = Path(__file__).with_name("script_train.py")
INSTALLED = "/usr/lib/dshealthd/training"
ARCHIVE = f"{INSTALLED}/{directory.ARCHIVE}"
SHOWN = ("sh", "-c", "echo path=$PYTHONPATH")
GPUS = ("/dev/null", "/dev/zero")
"""What the nodes have for GPUs; a job opens none of them."""
STEPS = 7
pytestmark = pytest.mark.timeout(600)


class Site(NamedTuple):
    """A cluster of two nodes whose agents run, and whose slurm.conf has the TaskProlog."""

    slurm: SlurmCluster
    package: Path
    """What the nodes have in `INSTALLED`."""

    def srun(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a step to its end, by a user with these variables."""
        return self.slurm.run("srun", "--quiet", *command, **variables)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Have a site that is switched on; skips where Slurm or torch is missing."""
    require()
    if importlib.util.find_spec("torch") is None:
        pytest.skip("takes torch")
    place = tmp_path_factory.mktemp("site")
    package = place / "package"
    directory.make(package / "training")
    with Lab(
        place / "lab", 2, collectors=("heartbeat_pages", "training", "job_environment"), start=False
    ) as lab:
        (place / "lib").mkdir()
        (place / "lib/dshealthd").symlink_to(package)
        for node in lab.nodes:
            # Where the package is installed.
            layers = f"lowerdir={place}/lib:/usr/lib"
            node.station.tool("mount", "-t", "overlay", "-o", layers, "overlay", "/usr/lib")
            node.start()
        prolog = shutil.copy2(package / "training/task-prolog", place / "dshealthd-task-prolog")
        with SlurmCluster(lab, place / "slurm", {"TaskProlog": str(prolog)}, GPUS) as slurm:
            yield Site(slurm, package)


def steps(scrapes: Mapping[str, Scrape], job: str) -> dict[tuple[str, str], float]:
    """Return the step of each rank of a job, by node and rank."""
    return {
        (node, labels["rank"]): value
        for node, scrape in scrapes.items()
        for key, value in scrape.series.get("dshealthd_job_step", {}).items()
        if (labels := dict(key))["training_job"] == job
    }


def test_srun_is_followed_from_the_first_step(site: Site, tmp_path: Path) -> None:
    """Each rank of `srun python train.py` on two nodes is at the step that it has made."""
    end = tmp_path / "end"
    job = site.slurm.command(
        *("sbatch", "--parsable", "-N2", "-n2", "--gpus-per-node=1", f"-o{tmp_path}/out"),
        *("--wrap", f"srun {sys.executable} {SCRIPT} {STEPS} {end}"),
    ).strip()
    expected = {("node-1", "0"): STEPS, ("node-2", "1"): STEPS}
    site.slurm.lab.wait(lambda scrapes: steps(scrapes, f"slurm-{job}") == expected, 240)
    end.touch()
    site.slurm.wait(lambda: (tmp_path / "out").read_text().count("has trained") == 2, 60, "its end")


def test_sbatch_with_torchrun_is_followed(site: Site, tmp_path: Path) -> None:
    """So are the ranks that torchrun starts in a batch script, without srun."""
    end = tmp_path / "end"
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2"
    job = site.slurm.command(
        *("sbatch", "--parsable", "-N1", "-n1", "--gres=gpu:2", f"-o{tmp_path}/out"),
        *("--wrap", f"{torchrun} {SCRIPT} {STEPS} {end}"),
    ).strip()
    site.slurm.lab.wait(
        lambda scrapes: sorted(steps(scrapes, f"slurm-{job}").values()) == [STEPS] * 2, 240
    )
    end.touch()
    site.slurm.wait(lambda: (tmp_path / "out").read_text().count("has trained") == 2, 60, "its end")


@pytest.mark.parametrize(("flags", "variables", "path"), [
    (["--gres=gpu:1"], {}, ARCHIVE),
    (["--gpus-per-task=1", "-n1"], {}, ARCHIVE),
    (["--gres=gpu:1"], {"PYTHONPATH": "/mine"}, f"/mine:{ARCHIVE}"),
    (["--gres=gpu:1"], {"PYTHONPATH": "/mine", "DSHEALTHD_HEARTBEAT": "0"}, "/mine"),
    ([], {"PYTHONPATH": "/mine"}, "/mine"),
    ([], {}, ""),
])  # fmt: skip
def test_whose_path_is_changed(
    site: Site, flags: list[str], variables: dict[str, str], path: str
) -> None:
    """Jobs with GPUs have the archive behind their own path, unless their user declines."""
    ended = site.srun(*flags, *SHOWN, **variables)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"path={path}\n", "")


@pytest.mark.parametrize("environment", ["exit 3\n", "(\n", None])
def test_broken_package(site: Site, environment: str | None) -> None:
    """Whether a node's package is damaged or gone, a job runs as without it."""
    saved = site.package.rename(site.package.with_name("saved"))
    try:
        if environment is not None:
            shutil.copytree(saved, site.package)
            (site.package / "training/environment.sh").write_text(environment)
        ended = site.srun("--gres=gpu:1", *SHOWN, PYTHONPATH="/mine")
        assert (ended.returncode, ended.stdout) == (0, "path=/mine\n"), ended.stderr
    finally:
        shutil.rmtree(site.package, ignore_errors=True)
        saved.rename(site.package)
