"""The Debian package on a booted machine: install, watch, reload, upgrade, reboot, remove,
purge.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.package import runtime
from dshealthd import __version__
from tests.deploy.conftest import build
from tests.deploy.machine import LONGEST, Machine, booted

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

CONFIG = "/etc/dshealthd/dshealthd.toml"
UNIT = "/usr/lib/systemd/system/dshealthd.service"
FAST = "[collectors.memory]\ninterval = '200ms'\n"
EXPOSURE = 3.6
"""What `systemd-analyze security` gives at most; of it 0.5 are for the network that is watched."""
SUITES = os.environ.get("DSHEALTHD_TEST_SUITES", "bullseye bookworm trixie").split()
MOST = 12.5e6
"""Bytes of a package: it is copied to a thousand nodes. docs/install.md has what they are. For the
aim of 12e6 there remain docstrings in bytecode (0.2e6) and `decimal`, which `statistics` needs for
the agent's medians (0.14e6)."""
OPTIONAL = {"grpc"}
"""What modules of ours may lack in the package."""
IMPORT_ALL = """
import importlib, os, sys
(place,) = (path for path in sys.path if path.endswith("dist-packages"))
for folder, _, files in os.walk(place):
    for name in (file.rpartition(".")[0] for file in files if file.endswith((".py", ".pyc"))):
        path = os.path.relpath(folder, place).split(os.sep)
        if "__pycache__" not in path and name != "__main__":
            module = ".".join(part for part in [*path, name] if part not in (".", "__init__"))
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                print(error.name)
"""
"""Imports all modules of the agent and of its libraries, and prints what they lack."""


@pytest.fixture(scope="module", params=SUITES)
def machine(request: pytest.FixtureRequest, package: Path) -> Iterator[Machine]:
    """A machine with the package installed."""
    with booted("node-1", request.param) as made:
        install(made, package)
        made.write(
            "/etc/systemd/system/dshealthd.service.d/test.conf", "[Service]\nWatchdogSec=4\n"
        )
        made.run("systemctl", "daemon-reload")
        made.run("systemctl", "restart", "dshealthd")
        yield made


@pytest.fixture(autouse=True)
def _as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give each test a service that runs on no configuration, and find no traceback in its log
    after.
    """
    since = time.time()
    yield
    if "machine" in request.fixturenames:
        machine = request.getfixturevalue("machine")
        log = machine.log(since)
        machine.write(CONFIG, "")
        machine.run("systemctl", "restart", "dshealthd")
        assert "Traceback" not in log, log


def install(machine: Machine, package: Path) -> None:
    """Install a package file as an administrator does."""
    shutil.copy(package, machine.root / "root")
    machine.run("dpkg", "--install", f"/root/{package.name}")


def doctor(machine: Machine) -> str:
    """Return what the doctor says; a machine without GPUs is no failure of the doctor."""
    done = machine.run("dshealthd", "doctor", check=False)
    assert done.returncode in {0, 1, 3}, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def failed(machine: Machine) -> set[str]:
    """Return the units that failed: of a fresh Debian 13 one fails in a container, by itself."""
    listed = machine.run("systemctl", "--failed", "--plain", "--no-legend").stdout
    return {line.split()[0] for line in listed.splitlines()}


def main_pid(machine: Machine) -> int:
    """Return the agent's pid as the machine sees it."""
    return int(machine.property("MainPID"))


def test_the_same_bytes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds of a commit give the same bytes, few enough to be copied to a thousand nodes."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    first, second = (build(tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size <= MOST


def test_bill_of_materials(machine: Machine) -> None:
    """Everything that is packed stands in the SBOM, with version, license, hash and sources."""
    bill = json.loads(machine.sh("cat /usr/share/doc/dshealthd/sbom.cdx.json"))
    assert bill["metadata"]["component"]["version"] == __version__
    parts = bill["components"]
    debian = {part["name"] for part in parts if part["purl"].startswith("pkg:deb/")}
    known = {(part["name"], part["version"]) for part in parts if part["name"] not in debian}
    listed = machine.sh("ls /usr/lib/dshealthd/lib/python3/dist-packages").split()
    packed = {
        (name.replace("_", "-").lower(), version)
        for name, version in (
            entry.removesuffix(".dist-info").rsplit("-", 1)
            for entry in listed
            if entry.endswith(".dist-info")
        )
        if name != "dshealthd"
    }
    assert known == packed
    assert debian == set(runtime.PACKAGES)
    assert all(part["licenses"] and part["hashes"] for part in parts)
    texts = set(machine.sh("ls /usr/share/doc/dshealthd/licenses").split())
    assert debian - {"base-files"} < texts
    assert {"LGPL-2.1", "GPL-3"} < texts
    for part in parts:
        if part["name"] in debian:
            assert part["externalReferences"][0]["url"].startswith("https://snapshot.debian.org/")


def test_installed_and_active(machine: Machine) -> None:
    """The service is up and enabled, `/metrics` answers, nothing is refused by the hardening."""
    assert machine.property("ActiveState") == "active"
    assert machine.property("UnitFileState") == "enabled"
    scrape = machine.wait(
        lambda: (
            (found := machine.scrape()).value("dshealthd_collector_up", collector="clock")
            is not None
            and found
        ),
        "the clock",
    )
    assert scrape.value("dshealthd_build_info", version=__version__) == 1
    assert machine.wait(lambda: machine.get("/-/ready"), "ready")
    failing = machine.scrape().series.get("dshealthd_collector_failing", {})
    refused = [labels for labels in failing if ("reason", "permission_denied") in labels]
    assert not refused
    machine.wait(lambda: "collectors ok" in machine.property("StatusText"), "its status line")
    assert machine.sh("command -v dshealthd; ls /etc/dshealthd").split() == [
        "/usr/bin/dshealthd",
        "dshealthd.toml",
    ]
    assert machine.run("dshealthd", "--version").stdout == f"dshealthd {__version__}\n"


def test_doctor(machine: Machine) -> None:
    """The doctor and the agent's status answer, from a user's directory and environment too."""
    assert re.search(r"\d+ of \d+ checks OK", doctor(machine))
    odd = "cd /tmp && PYTHONHOME=/tmp PYTHONPATH=/tmp LC_ALL=de_DE.ISO-8859-1 dshealthd status"
    assert "collectors" in machine.sh(f"{odd}; true")


def test_tracebacks_name_lines(machine: Machine) -> None:
    """Without sources of what is not ours, a traceback still names each file and line."""
    for command, place in (
        ("import json; json.loads('')", "lib/python3.13/json/decoder.py"),
        ("import yaml; yaml.safe_load('[')", "dist-packages/yaml/parser.py"),
    ):
        python = "/usr/lib/dshealthd/bin/python3"
        said = machine.run(python, "-c", command, check=False).stderr
        assert re.search(rf'{re.escape(place)}", line \d+, in \w+\n', said), said
    sources = machine.sh("find /usr/lib/dshealthd -name '*.py'").split()
    ours = ("/dist-packages/dshealthd/", "/usr/lib/dshealthd/training/dshealthd/training/")
    assert all(any(place in source for place in ours) for source in sources)


def test_nothing_is_left_out_that_is_imported(machine: Machine) -> None:
    """Every module of the agent and of its libraries finds what it imports in the package."""
    lacking = machine.run("/usr/lib/dshealthd/bin/python3", "-I", "-B", "-c", IMPORT_ALL).stdout
    assert set(lacking.split()) == OPTIONAL


def test_no_library_of_the_host(machine: Machine) -> None:
    """The agent has loaded no library but those of the package: the host's fit another C
    library.
    """
    machine.wait(lambda: machine.get("/-/ready"), "ready")
    maps = machine.sh(f"cat /proc/{main_pid(machine)}/maps")
    loaded = set(re.findall(r"/\S+\.so\b\S*", maps))
    assert any(path.startswith("/usr/lib/dshealthd/") for path in loaded)
    assert {path for path in loaded if not path.startswith("/usr/lib/dshealthd/")} == set()


def exposure(machine: Machine) -> float:
    """Return and print how exposed systemd takes the service to be, and why."""
    report = machine.run("systemd-analyze", "security", "--no-pager", "dshealthd", check=False)
    print(report.stdout)
    return float(report.stdout.rsplit("dshealthd.service: ", 1)[1].split()[0])


def test_exposure(machine: Machine) -> None:
    """The unit is hardened as far as its functions allow, and no setting of it is misspelled."""
    assert exposure(machine) <= EXPOSURE
    verify = machine.run("systemd-analyze", "verify", UNIT, check=False)
    words = (verify.stdout + verify.stderr).splitlines()
    ours = [line for line in words if "dshealthd" in line and "man " not in line]
    assert all("RestartSteps" in line or "RestartMaxDelaySec" in line for line in ours), ours


def first_value(machine: Machine, name: str, **labels: str) -> float | None:
    """Return the value of a series of the agent; None as long as there is none."""
    return machine.scrape().value(name, **labels)


def test_cautious(machine: Machine) -> None:
    """With the drop-in for the cautious the agent is a user without capabilities, and serves."""
    folder = "/etc/systemd/system/dshealthd.service.d"
    machine.sh(f"ln -s /usr/lib/dshealthd/unprivileged.conf {folder}/; systemctl daemon-reload")
    try:
        machine.run("systemctl", "restart", "dshealthd")
        machine.wait(lambda: machine.get("/-/ready"), "ready")
        status = machine.sh(f"cat /proc/{main_pid(machine)}/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(fields["CapEff"], 16) == 0
        assert fields["Uid"].split()[0] == machine.sh("id -u dshealthd").strip()
        up = "dshealthd_collector_up"
        for name in ("memory", "clock", "training"):
            machine.wait(functools.partial(first_value, machine, up, collector=name), name)
        written = "dshealthd_state_write_last_success_timestamp_seconds"
        machine.wait(
            lambda: machine.scrape().value(written, file="findings"), "the judge's state", 90
        )
        assert exposure(machine) <= 3.0
    finally:
        machine.sh(f"rm {folder}/unprivileged.conf; systemctl daemon-reload")


def test_reload(machine: Machine) -> None:
    """A good file is taken over by a reload; a bad one fails it, is named, and changes nothing."""
    before = main_pid(machine)
    machine.write(CONFIG, FAST.replace("interval = '200ms'", "enabled = false"))
    machine.run("systemctl", "reload", "dshealthd")
    machine.wait(
        lambda: not machine.scrape().all("dshealthd_memory_total_bytes"), "memory turned off"
    )
    machine.write(CONFIG, "[collectors.memory]\nintervall = '200ms'\n")
    assert machine.run("systemctl", "reload", "dshealthd", check=False).returncode != 0
    assert "collectors.memory.intervall: unknown key; did you mean interval?" in machine.log()
    assert machine.property("ActiveState") == "active"
    assert not machine.scrape().all("dshealthd_memory_total_bytes")
    machine.write(CONFIG, FAST)
    machine.run("systemctl", "reload", "dshealthd")
    machine.wait(lambda: machine.scrape().all("dshealthd_memory_total_bytes"), "memory back")
    assert main_pid(machine) == before


def test_a_stuck_event_loop_is_restarted(machine: Machine) -> None:
    """An agent that is stopped is aborted by the watchdog, says where it was, and is replaced."""
    since = time.time()
    before, restarts = main_pid(machine), int(machine.property("NRestarts"))
    machine.run("kill", "-STOP", str(before))
    machine.wait(lambda: main_pid(machine) not in {0, before}, "another agent")
    machine.wait(lambda: machine.get("/-/healthy"), "an answer")
    assert int(machine.property("NRestarts")) == restarts + 1
    log = machine.log(since)
    assert "Watchdog timeout" in log
    assert "Fatal Python error: Aborted" in log
    assert "in run_forever" in log, "where the loop was"


def test_killed(machine: Machine) -> None:
    """After SIGKILL the agent is back on its port, and no worker of the old one is left."""
    before = main_pid(machine)
    workers = machine.sh(f"pgrep -P {before}").split()
    machine.run("kill", "-KILL", str(before))
    machine.wait(lambda: main_pid(machine) not in {0, before}, "another agent")
    machine.wait(lambda: machine.get("/-/healthy"), "an answer")
    assert not [
        pid for pid in workers if machine.run("kill", "-0", pid, check=False).returncode == 0
    ]


def test_never_gives_up(machine: Machine) -> None:
    """An agent that cannot start is tried again, not faster than every 5 s, until it can."""
    machine.write(CONFIG, "[web")
    machine.run("systemctl", "restart", "dshealthd", check=False)
    started, before = time.monotonic(), int(machine.property("NRestarts"))
    machine.wait(lambda: int(machine.property("NRestarts")) >= before + 3, "three restarts")
    assert time.monotonic() - started > 10
    machine.write(CONFIG, "")
    machine.wait(lambda: machine.property("ActiveState") == "active", "active by itself")


@pytest.mark.parametrize(
    ("config", "prepare", "expected"),
    [
        pytest.param("[web]\nlisten_address = ':100", "", "is not TOML", id="half-written config"),
        pytest.param(
            "[web]\nlisten_address = '127.0.0.1:10099'\n",
            'systemd-run --quiet --unit=taken --collect python3 -c "import socket,time; '
            "s=socket.socket(); s.bind(('127.0.0.1',10099)); s.listen(); time.sleep(900)\"; "
            "until ss -ltn | grep -q :10099; do sleep 0.1; done",
            "cannot serve on 127.0.0.1:10099",
            id="port taken",
        ),
        pytest.param(
            "[probe.members]\nnodes = ['node-1', 'node-2']\n[probe.peer]\n"
            "listen_address = '127.0.0.1:10062'\nkey_file = '/etc/dshealthd/probe.key'\n",
            "head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' >/etc/dshealthd/probe.key; "
            "chmod 644 /etc/dshealthd/probe.key",
            "has mode 0644, so others than its owner can access it; it must be 0600",
            id="wrong key permissions",
        ),
        pytest.param(
            "[web]\nconfig_file = '/etc/dshealthd/web.yml'\n",
            "printf 'tls_server_config:\\n  cert_file: [' >/etc/dshealthd/web.yml",
            "/etc/dshealthd/web.yml: is not YAML",
            id="half-written web config",
        ),
        pytest.param(
            "[probe.members]\nhostfile = '/etc/dshealthd/hostfile'\n[probe.peer]\n"
            "listen_address = '127.0.0.1:10062'\nkey_file = '/etc/dshealthd/probe.key'\n",
            "dshealthd keys new >/dev/null",
            "/etc/dshealthd/hostfile",
            id="no members",
        ),
        pytest.param("", "", "no GPUs: no NVIDIA GPU on the PCI bus", id="no NVML"),
        pytest.param(
            "",
            "cd /var/lib; mount --bind dshealthd dshealthd; mount -o remount,bind,ro dshealthd",
            "path.state: no state will survive a restart: [Errno 30] Read-only file system",
            id="read-only disk",
        ),
    ],
)
def test_bad_input_is_named(machine: Machine, config: str, prepare: str, expected: str) -> None:
    """What is wrong stands in one line of the status, and in the log where it is an error."""
    machine.run("systemctl", "stop", "dshealthd")
    since = time.time()
    machine.write(CONFIG, config)
    machine.sh(prepare or "true")
    try:
        machine.run("systemctl", "--no-block", "start", "dshealthd")
        text = machine.wait(
            lambda: expected in (found := machine.property("StatusText")) and found, "the status"
        )
        print(text)
        assert "\n" not in text
        if "no GPUs" not in expected:
            assert any(expected in line for line in machine.log(since).splitlines())
    finally:
        machine.sh("systemctl stop taken 2>/dev/null; cd /etc/dshealthd; rm -f probe.key web.yml")
        machine.sh("systemctl stop dshealthd; umount -q /var/lib/dshealthd; true")


@pytest.mark.parametrize("suite", SUITES)
def test_upgrade_reboot_remove_purge(suite: str, package_before: Path, package: Path) -> None:
    """An upgrade keeps configuration and state and restarts; a reboot starts it; purge ends all."""
    with booted("node-2", suite) as machine:
        before = set(machine.sh("find / -xdev -not -path '/proc/*' -name '*dshealth*'").split())
        failed_before = failed(machine)
        install(machine, package_before)
        version = package_before.name.split("_")[1]
        assert machine.wait(machine.scrape).value("dshealthd_build_info", version=version) == 1
        machine.write(CONFIG, FAST)
        machine.write("/var/lib/dshealthd/counters", "kept")
        machine.run("systemctl", "reload", "dshealthd")
        old = main_pid(machine)

        install(machine, package)
        machine.wait(
            lambda: (
                main_pid(machine) != old
                and machine.scrape().value("dshealthd_build_info", version=__version__) == 1
            ),
            "the new version",
        )
        owned = set(machine.sh("dpkg --listfiles dshealthd").split())
        there = set(machine.sh("find /usr/lib/dshealthd").split())
        assert there <= owned, "what the version before has left, or the new one has written"
        assert machine.sh(f"cat {CONFIG}") == FAST
        assert machine.sh("cat /var/lib/dshealthd/counters") == "kept"

        machine.write(CONFIG, "[web]\nprot = 1\n")
        running = main_pid(machine)
        again = machine.run("dpkg", "--install", f"/root/{package.name}")
        assert "web.prot: unknown key" in again.stdout + again.stderr
        assert main_pid(machine) == running, "an agent that runs was ended for one that cannot"
        machine.write(CONFIG, FAST)

        machine.reboot()
        machine.wait(lambda: machine.get("/-/ready"), "ready after the reboot")
        assert machine.sh("cat /var/lib/dshealthd/counters") == "kept"

        machine.run("dpkg", "--remove", "dshealthd")
        assert machine.sh("pgrep -f '[d]shealthd run' || true") == ""
        assert machine.sh(f"cat {CONFIG}") == FAST
        machine.run("dpkg", "--purge", "dshealthd")
        left = machine.sh("find / -xdev -not -path '/proc/*' -name '*dshealth*'").split()
        assert {path for path in left if not path.startswith(("/root/", "/var/log/"))} <= before
        assert "dshealthd" not in machine.sh("cat /etc/passwd /etc/group")
        assert failed(machine) <= failed_before
