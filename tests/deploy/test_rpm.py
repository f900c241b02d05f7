"""The RPM package, by rpm itself: on a booted Debian, as no mirror of a distribution with RPM is
at hand. What that leaves open is whether the names of its dependencies are those of RHEL.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dshealthd import __version__
from tests.deploy.conftest import BEFORE, build
from tests.deploy.machine import LONGEST, Machine, booted, require_tools
from tests.deploy.test_package import CONFIG, FAST, MOST, failed, main_pid

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

MORE = 1.25
"""Times a deb's size: nfpm packs it by an xz of its own."""
OF_DEB, OF_RPM = "/usr/share/zsh/vendor-completions/_dshealthd", "/usr/share/zsh/site-functions"


@pytest.fixture(scope="module")
def rpm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The RPM package of this checkout."""
    require_tools()
    if shutil.which("rpm") is None:
        pytest.skip("rpm is not installed: `./dev test-deploy` installs it")
    return build(tmp_path_factory.mktemp("rpm"), kind="rpm")


def query(package: Path, *what: str) -> list[str]:
    """Return what rpm says of a package file, by lines."""
    command = ["rpm", "--query", "--package", *what, str(package)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


def test_same_files_as_the_deb(rpm: Path, package: Path) -> None:
    """Both packages have the same files, all of root and none that others can write."""
    listed = subprocess.run(
        ["dpkg-deb", "--contents", str(package)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    deb = {
        line.split(maxsplit=5)[5].split(" -> ")[0].removeprefix(".").rstrip("/")
        for line in listed
        if not line.startswith("d")
    }
    form = "[%{FILEMODES:perms} %{FILEUSERNAME} %{FILEGROUPNAME} %{FILENAMES}\n]"
    entries = [line.split(maxsplit=3) for line in query(rpm, "--queryformat", form)]
    files = {name for mode, _, _, name in entries if not mode.startswith("d")}
    assert deb - files == {OF_DEB}
    assert files - deb == {f"{OF_RPM}/_dshealthd"}
    assert {(user, group) for _, user, group, _ in entries} == {("root", "root")}
    assert not [name for mode, *_, name in entries if mode[0] != "l" and "w" in mode[4:]]


def test_what_it_says(rpm: Path) -> None:
    """It asks for systemd alone, keeps the configuration, and is made reproducibly."""
    assert query(rpm, "--queryformat", "%{VERSION} %{LICENSE}") == [f"{__version__} Apache-2.0"]
    needed = {line for line in query(rpm, "--requires") if not line.startswith("rpmlib(")}
    assert {line for line in needed if not line.startswith("/bin/sh")} == {"systemd >= 247"}
    assert query(rpm, "--configfiles") == [CONFIG]
    assert query(rpm, "--queryformat", "%{BUILDHOST}") == ["localhost"]
    checked = subprocess.run(
        ["rpm", "--checksig", "--nosignature", str(rpm)], capture_output=True, text=True, check=True
    )
    assert "digests OK" in checked.stdout


def test_the_same_bytes_twice(rpm: Path, tmp_path: Path) -> None:
    """Two builds of a commit give the same bytes, few enough to be copied to a thousand nodes."""
    again = build(tmp_path, kind="rpm")
    assert rpm.read_bytes() == again.read_bytes()
    assert rpm.stat().st_size <= MOST * MORE


def install(machine: Machine, package: Path) -> str:
    """Install or upgrade by rpm, whose dependencies Debian has under other names."""
    shutil.copy(package, machine.root / "root")
    flags = ("--upgrade", "--nodeps", "--force-debian")
    done = machine.run("rpm", *flags, f"/root/{package.name}")
    return done.stdout + done.stderr


def test_install_upgrade_remove(rpm: Path, tmp_path: Path) -> None:
    """As with the deb: enabled, upgraded with configuration and state, ended by a removal alone."""
    before = build(tmp_path, "--version", BEFORE, kind="rpm")
    with booted("rpm-node", packages=("rpm",)) as machine:
        install(machine, before)
        assert machine.property("UnitFileState") == "enabled"
        machine.run("systemctl", "start", "dshealthd")
        assert machine.wait(machine.scrape).value("dshealthd_build_info", version=BEFORE) == 1
        machine.write(CONFIG, FAST)
        machine.write("/var/lib/dshealthd/counters", "kept")
        old = main_pid(machine)

        install(machine, rpm)
        machine.wait(
            lambda: machine.scrape().value("dshealthd_build_info", version=__version__) == 1,
            "the new version",
        )
        assert main_pid(machine) != old
        assert machine.property("UnitFileState") == "enabled"
        assert machine.sh(f"cat {CONFIG}") == FAST
        assert machine.sh("cat /var/lib/dshealthd/counters") == "kept"
        changed = machine.run("rpm", "--verify", "--nodeps", "dshealthd", check=False).stdout
        assert [line.split()[-1] for line in changed.splitlines()] == [CONFIG]

        machine.run("rpm", "--erase", "--force-debian", "dshealthd")
        assert machine.sh("pgrep -f '[d]shealthd run' || true") == ""
        assert machine.sh(f"cat {CONFIG}.rpmsave") == FAST
        assert machine.sh("find /usr -xdev -name '*dshealth*'") == ""
        assert failed(machine) == set()
