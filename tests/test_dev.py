"""The set-up of a checkout, `./dev`, where nothing needs to be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command_line import shell_script

ROOT = Path(__file__).parents[1]
LOCK = "requirements.lock"
STAMP = (
    f'echo ".venv/{LOCK}.$(cksum <{LOCK} | cut -d" " -f1).$(cksum <pyproject.toml | cut -d" " -f1)"'
)
AS_ROOT = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
"""Root of a user namespace, whose mounts nobody else sees."""


TOOLS = [
    *("cat", "chmod", "cksum", "cut", "dirname", "dpkg-deb", "id", "ln", "mkdir", "mount", "mv"),
    *("rm", "sh", "tar", "unshare"),
]
SERVERS = ("prometheus", "prometheus-alertmanager")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout whose environment is up to date."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("dev", "pyproject.toml", LOCK, "requirements-dev.lock"):
        shutil.copy(ROOT / name, folder)
    (folder / ".venv").mkdir()
    named = subprocess.run(
        ["sh", "-c", STAMP], cwd=folder, check=True, capture_output=True, text=True
    )
    (folder / named.stdout.strip()).touch()
    return folder


def run(command: list[str], checkout: Path, path: str | None = None) -> str:
    """Return what a command prints, which ends well."""
    done = subprocess.run(
        command,
        cwd=checkout,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": path or os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_demo_installs_no_server(checkout: Path, tmp_path: Path) -> None:
    """`./dev demo` unpacks Prometheus and Alertmanager from their packages and installs neither.
    Alertmanager finds the templates that it opens by absolute path; other programs see no change.
    """
    tools, packages = tmp_path / "tools", tmp_path / "packages"
    for name in ("gcc", "ip", "tc", "nft", "mkfs.ext4"):
        shell_script(tools / name, "exit 0")
    for name in TOOLS:
        found = shutil.which(name)
        assert found, f"{name} is part of every Debian"
        (tools / name).symlink_to(found)
    shell_script(tools / "apt-cache", "echo known")
    shell_script(tools / "apt-get", f'[ "$1" = download ] && cat {packages}/$3.deb >$3.deb')
    template = "usr/share/prometheus/alertmanager/default.tmpl"
    for name in SERVERS:
        root = tmp_path / name
        shell_script(root / "usr/bin" / name, f'echo {name} "$@"; cat /{template} 2>&1 || true')
        (root / template).parent.mkdir(parents=True)
        (root / template).write_text("its template\n", encoding="ascii")
        (root / "DEBIAN").mkdir()
        (root / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: a\nDescription: b\n",
            encoding="ascii",
        )
        packages.mkdir(exist_ok=True)
        built = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(root)]
        subprocess.run([*built, str(packages / f"{name}.deb")], check=True, capture_output=True)
    shell_script(
        checkout / ".venv/bin/python",
        'prometheus --a "b c"; prometheus-alertmanager --a "b c"; [ -e /usr/share/doc ]',
    )
    hidden = "mkdir -p /run/empty && mount --bind /run/empty /usr/share/prometheus 2>/dev/null;"
    for _ in range(2):  # the second time nothing is unpacked
        said = run(
            [*AS_ROOT, f"mount -t tmpfs none /run; {hidden} ./dev demo"], checkout, str(tools)
        )
        first, *between, last = said.splitlines()
        assert (first, last) == ("prometheus --a b c", "its template")
        assert "No such file" in between[0]
        assert between[1:] == ["prometheus-alertmanager --a b c"]
    assert (checkout / "build/debian/prometheus/usr").is_dir()
