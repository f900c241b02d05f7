"""The page *Install*, followed to the letter on two booted nodes that have nothing of ours.

Commands come from `docs/install.md` itself. What stands for one node's name or address there is
replaced by that of a node here, and `pdsh -a` by each node.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.machine import FETCH, LONGEST, Machine, booted, lan

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

PAGE = Path(__file__).parents[2] / "docs" / "install.md"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PATTERN = "dist/dshealthd_*_amd64.deb"
FAST = "[probe]\nperiod = '2s'\n"
"""What a test adds to the page's configuration: rounds more often than one in ten seconds."""


def blocks(heading: str, language: str) -> list[str]:
    """Return the code of a section of the page, block by block."""
    page = PAGE.read_text(encoding="utf-8")
    section = re.split(rf"^#+ {re.escape(heading)}$", page, maxsplit=1, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", section, re.MULTILINE | re.DOTALL)
    assert found, f"{heading}: no {language}"
    return found


def commands(heading: str) -> list[str]:
    """Return the commands of a section, without what is said of them."""
    lines = "".join(blocks(heading, "sh")).splitlines()
    return [line.split("  #")[0].strip() for line in lines]


SUITES = os.environ.get("DSHEALTHD_TEST_SUITES", "bookworm").split()


@pytest.fixture(scope="module", params=SUITES)
def nodes(request: pytest.FixtureRequest) -> Iterator[list[Machine]]:
    """Two nodes, which reach each other."""
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(lan(2, "10.77.0"))
        yield [
            stack.enter_context(booted(f"new-{number}", request.param, namespace=name))
            for number, name in enumerate(names, 1)
        ]


def good_rounds(node: Machine) -> float:
    """Return how many rounds of a node went well."""
    return sum(node.scrape().all("dshealthd_probe_rounds_total", outcome="ok"))


def test_the_page_from_top_to_bottom(nodes: list[Machine], package: Path) -> None:
    """Install, ask, configure, probe, go without rights, and remove: as written."""
    make, copy, install, ask = commands("Debian, Ubuntu, DGX OS")
    assert make == "make package"  # which made `package`
    assert copy == f"pdcp -a {PATTERN} /tmp/"
    assert package.match(Path(PATTERN).name)
    everywhere, what = shlex.split(install.removeprefix("pdsh -a "))[0], "pdsh -a "
    assert install.startswith(what)
    for node in nodes:
        shutil.copy(package, node.root / "root")
        node.sh(f"mv /root/{package.name} /tmp/")
        node.sh(everywhere)
    url = ask.removeprefix("curl ").replace("NODE", ADDRESSES[0])
    nodes[0].wait(lambda: nodes[1].run("python3", "-c", FETCH, url).stdout, "ready, from outside")

    for command in commands("Configuration"):
        nodes[0].sh(command)

    nodes[0].run("dshealthd", "keys", "new")
    (table,) = blocks("Probes between nodes", "toml")
    assert table.count("10.0.0.17") == 1
    for node, address in zip(nodes, ADDRESSES, strict=True):
        if node is not nodes[0]:
            node.write("/etc/dshealthd/probe.key", nodes[0].sh("cat /etc/dshealthd/probe.key"))
            node.sh("chmod 600 /etc/dshealthd/probe.key")
        node.write("/etc/dshealthd/hostfile", "".join(f"{name} slots=8\n" for name in ADDRESSES))
        fast = "[probe]\nperiod = '2s'\n" + table.replace("10.0.0.17", address)
        node.write("/etc/dshealthd/dshealthd.toml", fast)
        node.sh("systemctl reload dshealthd")
    for node in nodes:
        node.wait(
            lambda node=node: node.scrape().value("dshealthd_probe_up") == 1,  # type: ignore[misc]
            "probe_up",
        )
        # bound here
        node.wait(lambda node=node: good_rounds(node) >= 2, "rounds")  # type: ignore[misc]

    for command in commands("Rights"):
        nodes[0].sh(command)
    nodes[0].wait(lambda: nodes[0].get("/-/ready"), "ready without rights")
    assert "dshealthd" in nodes[0].sh("ps -o user= -C python3")
    nodes[0].wait(lambda: nodes[0].scrape().value("dshealthd_probe_up") == 1, "probe_up")
    nodes[0].wait(lambda: good_rounds(nodes[0]) >= 2, "rounds without rights")

    page = PAGE.read_text(encoding="utf-8")
    for command in ("apt-get remove", "apt-get purge"):
        assert f"`{command} dshealthd`" in page
        nodes[0].sh(f"{command} -y dshealthd")
    assert nodes[0].sh("find /etc /usr /var/lib /var/cache /run -name '*dshealthd*'") == ""
    assert "dshealthd" not in nodes[0].sh("cat /etc/passwd /etc/group")
