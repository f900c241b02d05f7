"""The tar.gz, on a booted machine: install, purge, and nothing left."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from dshealthd import __version__
from tests.deploy.conftest import build
from tests.deploy.machine import LONGEST, booted
from tests.deploy.test_install_page import commands
from tests.deploy.test_package import CONFIG, FAST, doctor

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]


def test_install_upgrade_remove_purge(tmp_path: Path) -> None:
    """The commands of the page install it; a removal keeps the configuration, a purge nothing."""
    package = build(tmp_path, kind="tar.gz")
    with booted("tar-node") as machine:
        find = "find / -xdev -not -path '/proc/*' -name '*dshealth*'"
        before = set(machine.sh(find).split())
        shutil.copy(package, machine.root / "root")
        page = commands("Without a package manager")
        assert len(page) == 2

        def install() -> None:
            for command in page:
                machine.sh(f"cd /root && {command}")
            machine.wait(lambda: machine.get("/-/ready"), "ready")
            assert machine.property("UnitFileState") == "enabled"

        install()
        assert machine.scrape().value("dshealthd_build_info", version=__version__) == 1
        assert re.search(r"\d+ of \d+ checks OK", doctor(machine))
        owners = machine.sh("find /usr/lib/dshealthd /usr/bin/dshealthd -not -user root")
        assert owners == ""
        machine.write(CONFIG, FAST)
        machine.sh("/usr/lib/dshealthd/install.sh remove")
        assert machine.sh("pgrep -f '[d]shealthd run' || true") == ""
        assert machine.sh(f"cat {CONFIG}") == FAST
        install()
        assert machine.sh(f"cat {CONFIG}") == FAST
        machine.sh("/usr/lib/dshealthd/install.sh purge")
        left = set(machine.sh(find).split())
        assert {path for path in left if not path.startswith(("/root/", "/var/log/"))} <= before
        assert "dshealthd" not in machine.sh("cat /etc/passwd /etc/group")
