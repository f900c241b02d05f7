"""The role against three booted nodes; a second run changes nothing."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.machine import LONGEST, Machine, booted, lan

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

ROOT = Path(__file__).parents[2]
ANSIBLE = ROOT / "deploy" / "ansible"
COMMAND = Path(sys.executable).with_name("dshealthd")
ROUNDS = "dshealthd_probe_rounds_total"
FAST = {"probe": {"period": "2s"}}
HASH = "$2b$04$Qr8lJbjcpkx7oI.kYaEbmeyEP7COqSfkzfeF0apQ6y2wQbG5lvWy2"
"""bcrypt of `secret`, with the fewest rounds."""


def tool(name: str) -> str:
    """Return the place of one of Ansible's programs, from `./dev test-deploy` or the PATH."""
    beside = ROOT / "build" / "ansible" / "bin" / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: `./dev test-deploy` installs it")
    return found


class Nodes:
    """Booted machines, and Ansible's view of them."""

    def __init__(self, machines: list[Machine], directory: Path, package: Path) -> None:
        self.machines, self.directory = machines, directory
        self._variables: dict[str, Any] = {
            "dshealthd_package": str(package),
            "dshealthd_config": FAST,
            "dshealthd_probe_key_file": str(self.key),
        }
        subprocess.run([COMMAND, "keys", "new", "--file", self.key], check=True, timeout=60)

    @property
    def key(self) -> Path:
        """The key of the probes on the controller."""
        return self.directory / "probe.key"

    def play(
        self, playbook: str = "site.yml", *flags: str, check: bool = True, **variables: Any
    ) -> list[dict[str, Any]]:
        """Run a playbook and return each result, as `callback_plugins/report.py` writes it."""
        hosts = {
            machine.name: {
                "ansible_connection": "nsenter",
                "ansible_become": False,  # it is root, and there is no sudo
                "ansible_nsenter_pid": machine._init(),
                "ansible_python_interpreter": "/usr/bin/python3",
                "dshealthd_probe_address": f"10.78.0.{number}",
            }
            for number, machine in enumerate(self.machines, 1)
        }
        inventory = self.directory / "inventory.json"
        inventory.write_text(json.dumps({"gpu": {"hosts": hosts}}), encoding="utf-8")
        given = self.directory / "variables.json"
        given.write_text(json.dumps({**self._variables, **variables}), encoding="utf-8")
        report = self.directory / "report"
        report.write_text("", encoding="utf-8")
        here = Path(__file__).parent
        done = subprocess.run(
            [
                *(tool("ansible-playbook"), "-i", str(inventory), "-e", f"@{given}", *flags),
                str(ANSIBLE / playbook),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
            cwd=ANSIBLE,
            env={
                "PATH": f"{COMMAND.parent}:{os.environ['PATH']}",
                "HOME": str(self.directory),
                "LANG": "C.UTF-8",
                "ANSIBLE_CONNECTION_PLUGINS": str(here / "connection_plugins"),
                "ANSIBLE_CALLBACK_PLUGINS": str(here / "callback_plugins"),
                "ANSIBLE_STDOUT_CALLBACK": "report",
                "ANSIBLE_PIPELINING": "1",
                "REPORT": str(report),
            },
        )
        results = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        failed = [entry for entry in results if entry["failed"]]
        assert (done.returncode == 0) is check, f"{failed}\n{done.stdout}\n{done.stderr}"
        return results

    def changed(self, **variables: Any) -> set[str]:
        """Run the role once more and return the tasks that changed something."""
        return {entry["task"] for entry in self.play(**variables) if entry["changed"]}

    def rounds(self, outcome: str) -> list[float]:
        """Return how many rounds each node has had with an outcome; "other" is any but "ok"."""
        found = []
        for machine in self.machines:
            scrape = machine.scrape()
            if outcome == "other":
                found.append(sum(scrape.all(ROUNDS)) - sum(scrape.all(ROUNDS, outcome="ok")))
            else:
                found.append(sum(scrape.all(ROUNDS, outcome=outcome)))
        return found

    def more_rounds(self) -> None:
        """Wait until each node has had three more good rounds."""
        before = self.rounds("ok")
        self.machines[0].wait(
            lambda: min(map(operator.sub, self.rounds("ok"), before)) >= 3, "three more rounds"
        )


@pytest.fixture(scope="module")
def nodes(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three machines that know each other's names; nothing is installed yet."""
    tool("ansible-playbook")
    with contextlib.ExitStack() as stack:
        machines = [
            stack.enter_context(booted(f"gpu-{number}", namespace=name))
            for number, name in enumerate(stack.enter_context(lan(3, "10.78.0")), 1)
        ]
        names = "".join(f"10.78.0.{number} gpu-{number}\n" for number in (1, 2, 3))
        debs = tmp_path_factory.mktemp("debs")
        # What Ansible's module for apt needs on a node, and a minimal Debian lacks.
        command = "apt-get download -q python3-apt python-apt-common distro-info-data"
        subprocess.run(command.split(), check=True, cwd=debs, capture_output=True)
        for machine in machines:
            machine.write("/etc/hosts", f"127.0.0.1 localhost\n{names}")
            for deb in debs.glob("*.deb"):
                shutil.copy(deb, machine.root / "root")
            machine.sh("dpkg --install /root/*.deb && rm /root/*.deb")
        yield Nodes(machines, tmp_path_factory.mktemp("ansible"), package)


def test_install_and_once_more(nodes: Nodes) -> None:
    """`--check` says what would be done and does nothing; then it is done, and only once."""
    nodes.play("site.yml", "--check")
    for machine in nodes.machines:
        assert machine.run("systemctl", "cat", "dshealthd", check=False).returncode != 0
    nodes.play()
    for machine in nodes.machines:
        assert machine.property("ActiveState") == "active"
        assert machine.property("UnitFileState") == "enabled"
        machine.wait(lambda m=machine: m.get("/-/healthy"))  # type: ignore[misc] # bound here
        assert machine.sh("stat -c '%a %U' /etc/dshealthd/probe.key") == "600 root\n"
        assert "gpu-3 slots=1" in machine.sh("cat /etc/dshealthd/hostfile")
    pids = [machine.property("MainPID") for machine in nodes.machines]
    assert nodes.changed() == set()
    assert not any(entry["changed"] for entry in nodes.play("site.yml", "--check"))
    assert [machine.property("MainPID") for machine in nodes.machines] == pids


def test_nodes_probe_each_other_and_the_key_is_rotated(nodes: Nodes) -> None:
    """The members reach each other by what was distributed; a new key costs no round."""
    nodes.play()
    nodes.more_rounds()
    before = nodes.rounds("other")
    old = nodes.key.read_text(encoding="utf-8")
    nodes.play("rotate-key.yml")
    key = nodes.key.read_text(encoding="utf-8")
    assert key != old
    assert "rotation" not in key
    for machine in nodes.machines:
        assert machine.sh("cat /etc/dshealthd/probe.key") == key
    nodes.more_rounds()
    assert nodes.rounds("other") == before
    assert nodes.changed() == set()


def test_a_changed_configuration_is_reloaded(nodes: Nodes) -> None:
    """The agents keep their processes and what they know, unless only a restart takes it over."""
    nodes.play()
    pids = [machine.property("MainPID") for machine in nodes.machines]
    nodes.play(dshealthd_config={"probe": {"period": "3s"}})
    assert [machine.property("MainPID") for machine in nodes.machines] == pids
    for machine in nodes.machines:
        assert "configuration reloaded" in machine.sh("journalctl -u dshealthd --no-pager")
    nodes.play(dshealthd_config={**FAST, "log": {"level": "debug"}})
    assert not {machine.property("MainPID") for machine in nodes.machines} & set(pids)
    nodes.play()


def test_key_of_agents_without_the_rights_of_root(nodes: Nodes) -> None:
    """Installed and rotated, the key belongs to the user that reads it, and rounds go on."""
    nodes.play(dshealthd_unprivileged=True)
    nodes.play("rotate-key.yml", dshealthd_unprivileged=True)
    for machine in nodes.machines:
        mode = machine.sh("stat -c '%a %U' /etc/dshealthd/probe.key")
        assert mode == "600 dshealthd\n"
        assert machine.scrape().value("dshealthd_probe_peer_credentials_last_reload_successful")
    nodes.play()


def test_configuration_that_is_wrong_changes_nothing(nodes: Nodes) -> None:
    """The agent checks the file before it replaces the one in force; the agent goes on."""
    nodes.play()
    machine = nodes.machines[0]
    before = machine.sh("cat /etc/dshealthd/dshealthd.toml"), machine.property("MainPID")
    results = nodes.play(check=False, dshealthd_config={"probe": {"periode": "2s"}})
    assert "probe.periode" in " ".join(entry["text"] for entry in results if entry["failed"])
    assert (machine.sh("cat /etc/dshealthd/dshealthd.toml"), machine.property("MainPID")) == before


def test_preflight(nodes: Nodes) -> None:
    """A password instead of a hash, a short key and a strange variable end before any change."""
    (nodes.directory / "short.key").write_text("abc\n", encoding="utf-8")
    mistakes: tuple[dict[str, Any], ...] = (
        {"dshealthd_basic_auth_users": {"prometheus": "secret"}},
        {"dshealthd_probe_key_file": str(nodes.directory / "short.key")},
        {"dshealthd_tls_cert_file": "/nowhere.crt"},
        {"dshealthd_probe_port": "many"},
    )
    for variables in mistakes:
        results = nodes.play(check=False, **variables)
        names = [entry["node"] for entry in results if entry["failed"]]
        assert sorted(names) == sorted(machine.name for machine in nodes.machines), variables
        assert not any(entry["changed"] for entry in results), variables


def test_web_with_tls_and_a_user(nodes: Nodes) -> None:
    """A certificate from the controller and a user: HTTPS, and 401 without the password."""
    key, certificate = nodes.directory / "web.key", nodes.directory / "web.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=gpu"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    variables: dict[str, Any] = {
        "dshealthd_tls_cert_file": str(certificate),
        "dshealthd_tls_key_file": str(key),
        "dshealthd_basic_auth_users": {"prometheus": HASH},
    }
    nodes.play(**variables)
    assert nodes.changed(**variables) == set()
    ask = (
        "import ssl, sys, urllib.request as u, urllib.error as e\nc = "
        "ssl._create_unverified_context()\ntry: print(u.urlopen('https://127.0.0.1:10061/' + "
        "sys.argv[1], context=c).status)\nexcept e.HTTPError as error: print(error.code)\n"
    )
    for machine in nodes.machines:
        healthy = functools.partial(machine.run, "python3", "-c", ask, "-/healthy")
        machine.wait(lambda healthy=healthy: healthy().stdout == "200\n")  # type: ignore[misc]
        assert machine.run("python3", "-c", ask, "metrics").stdout == "401\n"
        assert (
            machine.sh("stat -c %a /etc/dshealthd/web.key /etc/dshealthd/web.yml") == "600\n600\n"
        )


@pytest.mark.parametrize(
    ("playbook", "variables", "message"),
    [
        ("site.yml", {}, "set dshealthd_probe_members for all"),
        ("site.yml", {"dshealthd_probe_members": "{{ groups['gpu'] }}"}, None),
        ("rotate-key.yml", {}, "without --limit"),
    ],
)
def test_limit_leaves_no_node_out(
    playbook: str, variables: dict[str, str], message: str | None, tmp_path: Path
) -> None:
    """A node that is set up again alone keeps its members, and a key is not rotated on some nodes;
    both end before anything is changed.
    """
    key = tmp_path / "probe.key"
    subprocess.run([COMMAND, "keys", "new", "--file", key], check=True, timeout=60)
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {f"gpu-{number}": local for number in (1, 2)}
    inventory = tmp_path / "inventory.json"
    inventory.write_text(json.dumps({"gpu": {"hosts": hosts}}), encoding="utf-8")
    given = {**variables, "dshealthd_probe_key_file": str(key)}
    done = subprocess.run(
        [
            *(tool("ansible-playbook"), "-i", inventory, "--check", "--limit", "gpu-1"),
            *("-e", json.dumps(given), "-e", "dshealthd_config_dir=/nowhere/here"),
            ANSIBLE / playbook,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ANSIBLE,
        env={**os.environ, "LANG": "C.UTF-8", "ANSIBLE_STDOUT_CALLBACK": "default"},
    )
    assert done.returncode  # later, as nothing is to be installed here
    known = ("set dshealthd_probe_members for all", "without --limit")
    said = " ".join(done.stdout.split())
    assert [text for text in known if text in said] == ([message] if message else []), done


def test_lint() -> None:
    """ansible-lint finds nothing, by its strictest profile."""
    done = subprocess.run(
        [tool("ansible-lint"), "--offline", "--nocolor", "--profile", "production", "."],
        capture_output=True,
        text=True,
        check=False,
        cwd=ANSIBLE,
        env={**os.environ, "PATH": f"{Path(tool('ansible-lint')).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
