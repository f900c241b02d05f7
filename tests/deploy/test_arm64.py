"""The arm64 package, whose every instruction is emulated: laid over a Debian of this architecture.

Only what is ours is of the other architecture, which is also what shows that it needs nothing of
the system below. The emulator is registered in a user namespace of the test's own.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dshealthd import __version__
from tests.deploy.conftest import build
from tests.deploy.machine import LONGEST, require_tools, tree

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

EMULATOR = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
ENTER = """
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
cat "$1" >/proc/sys/fs/binfmt_misc/register
mount -t proc proc "$2/proc"
shift
exec chroot "$@"
"""


def emulated(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a tree, where programs for arm64 run too."""
    space = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
    return subprocess.run(
        [*space, "sh", "-euc", ENTER, "sh", str(EMULATOR), str(root), *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"},
    )


def test_commands_run_on_arm64(tmp_path: Path) -> None:
    """Version, metrics, a configuration's check and the doctor answer; workers start there too."""
    require_tools()
    if not EMULATOR.exists():
        pytest.skip("no emulator: apt-get install qemu-user-static")
    package = build(tmp_path / "dist", "--arch", "arm64")
    root = tmp_path / "root"
    shutil.copytree(tree("bookworm"), root, symlinks=True, ignore=lambda *_: {"dev"})
    (root / "dev").mkdir()
    (root / "dev/null").touch()
    subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)

    said = emulated(root, "/usr/lib/dshealthd/bin/python3", "-c", "import os; print(os.uname())")
    assert "machine='aarch64'" in said.stdout, said.stderr
    assert emulated(root, "dshealthd", "--version").stdout == f"dshealthd {__version__}\n"
    config = "/etc/dshealthd/dshealthd.toml"
    assert emulated(root, "dshealthd", "check-config", "--config.file", config).returncode == 0
    metrics = emulated(root, "dshealthd", "metrics")
    assert f',version="{__version__}"}} 1.0\n' in metrics.stdout, metrics.stderr
    doctor = emulated(root, "dshealthd", "doctor")
    assert doctor.returncode in {0, 1, 3}, doctor.stdout + doctor.stderr
    assert "Traceback" not in doctor.stdout + doctor.stderr
    print(doctor.stdout)
