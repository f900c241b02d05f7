"""The container image: built out of the deb, and run with the rights of the DaemonSet."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import yaml_files
from tests.deploy.machine import LONGEST, tree
from tests.waiting import until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes" / "base"
ULIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")
"""Podman's own are more than a container that runs these tests may give."""


class Store:
    """Images and containers of this test alone."""

    def __init__(self, directory: Path) -> None:
        self._place = [f"--root={directory}/store", f"--runroot={directory}/run"]

    def buildah(self, *words: str) -> str:
        """Run buildah and return what it prints."""
        return self._run("buildah", *words)

    def podman(self, *words: str) -> str:
        """Run podman and return what it prints."""
        return self._run("podman", "--cgroup-manager=cgroupfs", "--runtime=runc", *words)

    def _run(self, tool: str, *words: str) -> str:
        command = [tool, *self._place, "--storage-driver=vfs", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()


@pytest.fixture(scope="module")
def store(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with the image, built on a Debian of Debian's own packages."""
    missing = [name for name in ("buildah", "podman", "runc") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: apt-get install {' '.join(missing)}")
    directory = tmp_path_factory.mktemp("images")
    made = Store(directory)
    base = made.buildah("from", "scratch")
    made.buildah("add", "--quiet", base, str(tree("bookworm")), "/")
    made.buildah("commit", "--quiet", base, "localhost/debian")
    made.buildah("rm", base)
    made.buildah(
        *("build", "--isolation=chroot", "--build-arg=BASE=localhost/debian", "--tag=dshealthd"),
        *("--file", str(ROOT / "deploy" / "container" / "Containerfile"), str(package.parent)),
    )
    yield made
    shutil.rmtree(directory, ignore_errors=True)


def answer(port: int, path: str) -> str | None:
    """Return what the agent answers; None where it does not, or not yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def test_runs_with_the_rights_of_the_base(store: Store, tmp_path: Path) -> None:
    """The agent is ready, without a capability and on a read-only root, as in the DaemonSet."""
    pod = yaml_files.load(BASE / "daemonset.yaml")
    security = pod["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    parts = [part.read_text(encoding="utf-8") for part in sorted((BASE / "config").iterdir())]
    config = tmp_path / "config"
    config.mkdir()
    (config / "dshealthd.toml").write_text(
        "".join(parts) + f'[web]\nlisten_address = "127.0.0.1:{port}"\n', encoding="utf-8"
    )
    (tmp_path / "state").mkdir()
    name = f"dshealthd-test-{os.getpid()}"
    store.podman(
        *("run", "--detach", f"--name={name}", "--network=host", *ULIMITS),
        *("--cap-drop=ALL", "--read-only", "--security-opt=no-new-privileges", "--tmpfs=/tmp"),
        f"--volume={config}:/etc/dshealthd:ro",
        f"--volume={tmp_path}/state:/var/lib/dshealthd",
        *("--volume=/proc:/host/proc:ro", "--volume=/:/host/root:ro,rslave"),
        "localhost/dshealthd",
    )
    try:
        until(lambda: answer(port, "/-/ready") == "ready\n", lambda: store.podman("logs", name))
        metrics = answer(port, "/metrics") or ""
        assert "\ndshealthd_build_info{" in metrics
        assert "dshealthd_collector_failing{" not in metrics
        capabilities = store.podman("exec", name, "sh", "-c", "grep CapEff /proc/1/status")
        assert int(capabilities.split()[1], 16) == 0
    finally:
        store.podman("rm", "--force", "--time=10", name)


def test_checks_its_configuration(store: Store) -> None:
    """What the init container runs names a mistake and fails."""
    with pytest.raises(AssertionError, match=r"web\.listen_addres"):
        store.podman(
            *("run", "--rm", "--network=none", *ULIMITS, "--entrypoint=/bin/sh"),
            *("localhost/dshealthd", "-ec"),
            "printf '[web]\\nlisten_addres = 1\\n' > /tmp/c.toml;"
            "exec dshealthd check-config --config.file /tmp/c.toml",
        )
