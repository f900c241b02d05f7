"""What the packages are made of, as far as it can be told without building and booting them."""

from __future__ import annotations

import functools
import hashlib
import http.server
import itertools
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.package import build, manual, runtime
from dshealthd.config import config, registry
from dshealthd.slurm.options import SlurmOptions
from tests.command_line import shell_script

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "deploy/package"
UNIT = PROJECT / "systemd/dshealthd.service"


def test_manual_has_every_command_and_option() -> None:
    """The pages name each command, flag and key, and no line reads as a request of roff by
    chance.
    """
    page = manual.dshealthd_8("2026-01-01")
    for name in ("--no-agent", "--healthy", "--range"):  # of commands with parsers of their own
        assert f"\\fB{manual.roff(name)}\\fR" in page
    for name, parser in manual.commands().items():
        assert f"\n\\fB{manual.roff(name)}\\fR\n" in page
        for action in manual.options(parser):
            assert f"\\fB{manual.roff(action.option_strings[0])}\\fR" in page
            assert manual.roff(manual.help_text(parser, action)) in page
        for action in manual.arguments(parser):
            assert f"\n{manual.roff(manual.help_text(parser, action))}\n" in page
    assert not re.search(r"%\(\w+\)|==SUPPRESS==", page + manual.zsh())
    reference = manual.dshealthd_toml_5("2026-01-01")
    for name in (*config.SECTIONS, *(f"collectors.{name}" for name in registry.all_collectors())):
        assert f".SH [{name}]\n" in reference
    requests = {line.split()[0] for line in (page + reference).splitlines() if line[:1] == "."}
    assert requests <= {".TH", ".SH", ".TP", ".B", ".RS", ".RE", ".PP", ".nf", ".fi"}


@pytest.mark.skipif(shutil.which("man") is None, reason="no man here")
def test_manual_is_sound_roff(tmp_path: Path) -> None:
    """`man` formats both pages without a warning."""
    for name, text in (
        ("dshealthd.8", manual.dshealthd_8("2026-01-01")),
        ("dshealthd.toml.5", manual.dshealthd_toml_5("2026-01-01")),
    ):
        (tmp_path / name).write_text(text)
        command = ["man", "--warnings=w", "-E", "UTF-8", "-l", str(tmp_path / name)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={"MANWIDTH": "200"}
        )
        if "not found" in done.stderr or done.returncode != 0:
            pytest.skip(f"man cannot format here: {done.stderr[:200]}")
        assert done.stderr == ""
        assert "DSHEALTHD" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dshealthd", "ev"], {"evidence"}),
        (["dshealthd", "keys", "--fi"], {"--file"}),
        (["dshealthd", "run", "--web.listen"], {"--web.listen-address"}),
        (["dshealthd", "doctor", "--no-a"], {"--no-agent"}),
        (["dshealthd", "explain", "--he"], {"--healthy", "--help"}),
        (["dshealthd", "free-port", "--ra"], {"--range"}),
    ],
)
def test_bash_completion(tmp_path: Path, words: list[str], expected: set[str]) -> None:
    """Bash completes commands, and the flags of the command that stands there."""
    (tmp_path / "completion").write_text(manual.bash())
    script = f"""
        . {tmp_path}/completion
        COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
        _dshealthd; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-euc", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert set(done.stdout.split()) == expected


def test_launcher_does_not_import_what_its_caller_names(tmp_path: Path) -> None:
    """As with `sudo -E` in a user's directory: neither is searched, here nor in workers, and no
    bytecode is left behind.
    """
    text = (PACKAGE / "dshealthd.sh").read_text()
    launcher = tmp_path / "dshealthd"
    launcher.write_text(text.replace("/usr/lib/dshealthd", str(tmp_path)))
    shell_script(tmp_path / "bin/python3", f'exec {sys.executable} "$@"')
    theirs = tmp_path / "theirs"
    for name in ("sitecustomize", "dshealthd", "pickle", "json"):
        (theirs / name).mkdir(parents=True)
        (theirs / name / "__init__.py").write_text(f"open({str(theirs / 'ran')!r}, 'w')\n")
    places = {"PYTHONPATH": str(theirs), "PYTHONHOME": str(theirs), "PYTHONSTARTUP": str(theirs)}
    (tmp_path / "_dump_0").write_bytes(pickle.dumps({"entries": []}))
    for arguments in (("--version",), ("explain", str(tmp_path / "_dump_0"))):
        done = subprocess.run(
            ["sh", launcher, *arguments],
            cwd=theirs,
            env={**os.environ, **places},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode in {0, 2}, done.stderr
        assert not (theirs / "ran").exists()
    flags = " ".join(text.splitlines()[-1].split()[2:5])
    assert flags == "-I -B -m"


@pytest.mark.parametrize("name", sorted(file.name for file in PACKAGE.glob("*.sh")))
def test_scripts_are_sound(name: str) -> None:
    """Each script of the package is a POSIX shell's."""
    subprocess.run(["sh", "-n", PACKAGE / name], check=True, timeout=60)


def test_purge_removes_what_was_made_since() -> None:
    """The directories that the agent and Slurm's hooks make are no files of the package."""
    words = (PACKAGE / "postrm.sh").read_text().split()
    made = {config.Paths().state, SlurmOptions().run_directory}
    assert {str(path) for path in made} <= set(words)


def test_closure_of_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed is all that the project needs on the interpreter inside, and no build tool."""
    needs = {
        "a": ["yarl<2", 'brotli; extra == "speedups"', 'old; python_version < "3.11"'],
        "y": ["idna>=2.0", 'new; python_version >= "3.13"'],
    }
    monkeypatch.setattr(
        build, "read_metadata", lambda wheel: {"requires": needs.get(str(wheel), [])}
    )
    wheels = {"aiohttp": Path("a"), "yarl": Path("y"), "idna": Path("i")}
    wheels |= {name: Path(name) for name in ("bcrypt", "nvidia-ml-py", "pyyaml", "new")}
    wheels["prometheus-client"] = Path("prometheus")
    assert build.closure("dshealthd", wheels) == {
        *("aiohttp", "bcrypt", "idna", "new", "nvidia-ml-py", "prometheus-client"),
        *("pyyaml", "yarl"),
    }


def serve(folder: Path) -> http.server.ThreadingHTTPServer:
    """Serve a folder on a port of its own, until it is shut down."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_a_debian_package_that_is_gone_comes_from_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the mirror has dropped is taken from the archive, at the lock's moment; by its hash."""
    digest = hashlib.sha256(b"kept").hexdigest()
    server = serve(tmp_path)
    try:
        place = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(runtime, "SNAPSHOT", f"{place}/archive")
        url = f"{place}/debian/pool/x.deb"
        lock = tmp_path / "debian.lock"
        lock.write_text(f"# runtime.py renew, 20260102T030405Z\n{digest}  {url}\n")
        with pytest.raises(runtime.RuntimeBuildError, match="404"):
            runtime.download(url, digest, lock)
        kept = tmp_path / "archive/debian/20260102T030405Z/pool/x.deb"
        kept.parent.mkdir(parents=True)
        kept.write_bytes(b"other")
        with pytest.raises(runtime.RuntimeBuildError, match="not what debian"):
            runtime.download(url, digest, lock)
        kept.write_bytes(b"kept")
        assert runtime.download(url, digest, lock) == b"kept"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt here")
def test_the_runtime_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A security update is named, and the renewed lock file has its address and hash; a mirror
    without an index leaves the file as it is.
    """
    monkeypatch.setattr(runtime, "PACKAGES", ("libssl3t64",))
    lock = tmp_path / "debian.lock"

    def renew(action: str, *versions: str) -> int:
        entries = [
            f"Package: libssl3t64\nArchitecture: {arch}\nVersion: {version}\nMaintainer: us\n"
            f"Filename: ./libssl3t64_{version}_{arch}.deb\nSize: 1\nSHA256: {number:064x}\n"
            "Description: of a test\n\n"
            for number, version in enumerate(versions)
            for arch in runtime.ARCHITECTURES
        ]
        (tmp_path / "Packages").write_text("".join(entries))
        source = f"deb [trusted=yes] file:{tmp_path} ./"
        return runtime.main([action, "--lock", str(lock), "--source", source])

    assert renew("renew", "3.5.9") == 0
    assert renew("outdated", "3.5.9") == 0
    before = lock.read_text()
    assert renew("outdated", "3.5.9", "3.5.10") == 1
    assert lock.read_text() == before
    assert renew("renew", "3.5.9", "3.5.10") == 0
    assert {url.rpartition("/")[2]: digest[-1] for url, digest in runtime.read(lock).items()} == {
        "libssl3t64_3.5.10_amd64.deb": "1",
        "libssl3t64_3.5.10_arm64.deb": "1",
    }
    renewed = lock.read_text()
    nowhere = f"deb [trusted=yes] file:{tmp_path}/nowhere ./"
    assert runtime.main(["renew", "--lock", str(lock), "--source", nowhere]) == 1
    assert lock.read_text() == renewed


def test_both_architectures_have_the_same_runtime() -> None:
    """The lock file has every package for each architecture, in one version."""
    names = {arch: set() for arch in runtime.ARCHITECTURES}  # type: dict[str, set[str]]
    for url in runtime.read(runtime.LOCK):
        name, arch = url.rpartition("/")[2].removesuffix(".deb").rsplit("_", 1)
        names[arch].add(name)
    amd64, arm64 = names.values()
    assert amd64 == arm64
    assert {name.split("_")[0] for name in amd64} == set(runtime.PACKAGES)


def project() -> dict[str, Any]:
    """Return what pyproject.toml says."""
    return tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(name: str) -> dict[str, Version]:
    """Return the version of each distribution that a file of exact versions names."""
    lines = (PROJECT / name).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line.rstrip("\\ ")) for line in lines if re.match(r"[A-Za-z0-9]", line)]
    versions: dict[str, Version] = {}
    for requirement in found:
        (pin,) = requirement.specifier
        assert pin.operator == "==", f"{name}: {requirement}"
        versions[canonicalize_name(requirement.name)] = Version(pin.version)
    return versions


def test_aiohttp_with_known_defects_is_excluded() -> None:
    """What the package requires admits no aiohttp that parses requests with known defects."""
    requirements = map(Requirement, project()["project"]["dependencies"])
    (aiohttp,) = (each for each in requirements if each.name == "aiohttp")
    assert aiohttp.marker is None  # it holds on every machine
    lowest = [Version(each.version) for each in aiohttp.specifier if each.operator == ">="]
    assert max(lowest) >= Version("3.14.5")
    assert pins("requirements.lock")["aiohttp"] in aiohttp.specifier


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("requirements.lock", ("build",)),
        ("requirements-dev.lock", ("build", "package", "dev")),
        ("requirements-package.lock", ("build", "package")),
        ("requirements-docs.lock", ("docs",)),
    ],
)
def test_lock_files_keep_to_the_ranges(name: str, groups: tuple[str, ...]) -> None:
    """A lock file pins everything that is asked for, at a version within its range."""
    content = project()
    alone = name in {"requirements-docs.lock", "requirements-package.lock"}
    wanted = [] if alone else list(content["project"]["dependencies"])
    for group in groups:
        wanted += [each for each in content["dependency-groups"][group] if isinstance(each, str)]
    pinned = pins(name)
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{name} lacks {requirement.name}"
        assert requirement.specifier.contains(version, prereleases=True), f"{name}: {requirement}"


def test_constraints_keep_to_the_ranges() -> None:
    """The torch of development, as constraints.txt pins it, is in the range that is supported."""
    content = project()["project"]
    wanted = itertools.chain(content["dependencies"], *content["optional-dependencies"].values())
    pinned = pins("constraints.txt")
    compared = set()
    for requirement in map(Requirement, wanted):
        if (version := pinned.get(canonicalize_name(requirement.name))) is not None:
            assert requirement.specifier.contains(version, prereleases=True), str(requirement)
            compared.add(requirement.name)
    assert "torch" in compared


OPENS = "CapabilityBoundingSet=~CAP_SETUID CAP_SETGID CAP_KILL"
NO_CLOCK = "ProtectClock=yes\nSystemCallFilter=~@clock"
NO_PROBES = "MemoryDenyWriteExecute=yes\nSystemCallFilter=~@resources"
USER = "User=dshealthd\nRemoveIPC=yes\nAmbientCapabilities=CAP_SYSLOG CAP_SYS_PTRACE"


def exposure(*arguments: str) -> tuple[str, subprocess.CompletedProcess[str]]:
    """Return the level at which systemd sees a unit exposed, and all that it says."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if "offline" in done.stderr:
        pytest.skip("this systemd cannot look at a unit that is not installed")
    found = re.search(r"exposure level for \S+: (\d+\.\d)", done.stdout)
    assert found is not None, done.stderr
    return found[1], done


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ("`CAP_KILL` away", [["CapabilityBoundingSet=~CAP_KILL"]]),
        ("`ProtectClock=`, without adjtimex(2)", [[NO_CLOCK]]),
        ("both,", [["CapabilityBoundingSet=~CAP_KILL", NO_CLOCK, NO_PROBES]]),
        ("`CAP_SETUID`, `CAP_SETGID`", [[OPENS]]),
        ("the same, and", [[OPENS, USER], [OPENS, NO_CLOCK]]),
    ],
)
def test_exposure_of_other_settings(row: str, changes: list[list[str]], tmp_path: Path) -> None:
    """What the documentation weighs is what systemd counts."""
    page = (PROJECT / "docs/install.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
    for number, change in enumerate(changes):
        unit = tmp_path / f"changed-{number}.service"
        text = UNIT.read_text(encoding="utf-8").partition("[Install]")[0]
        unit.write_text("\n".join([text, *change, ""]))
        level, _ = exposure(str(unit))
        assert f"| {level} |" in line


def test_a_worker_killed_for_its_memory_does_not_end_the_service() -> None:
    """By default systemd stops a service of which the OOM killer has taken a process, here often a
    worker, which the agent replaces by itself.
    """
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("OOM")] == [
        "OOMScoreAdjust=500",
        "OOMPolicy=continue",
    ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize(
    ("unit", "drop_in", "limit"),
    [
        ("dshealthd.service", None, 3.6),
        ("dshealthd.service", "unprivileged.conf", 2.6),
        ("dshealthd-launches.service", None, 2.1),
    ],
)
def test_exposure(unit: str, drop_in: str | None, limit: float, tmp_path: Path) -> None:
    """The unit stays as hardened as it is, and its settings are spelled as systemd has them."""
    root = tmp_path / "etc/systemd/system"
    (root / "dshealthd.service.d").mkdir(parents=True)
    shutil.copy(UNIT.parent / unit, root)
    if drop_in is not None:
        shutil.copy(UNIT.parent / drop_in, root / "dshealthd.service.d")
    level, done = exposure(f"--root={tmp_path}", unit)
    assert float(level) <= limit
    if unit == UNIT.name and drop_in is None:
        # A right that is granted has its reason in the documentation.
        page = (PROJECT / "docs/install.md").read_text(encoding="utf-8").replace("\\|", "|")
        granted = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("✗")]
        assert len(granted) > 10
        for name in granted:
            assert f"`{name.rpartition('~')[2]}`" in page, name
    unknown = [line for line in done.stderr.splitlines() if "Unknown" in line]
    later = ("RestartSteps", "RestartMaxDelaySec")  # systemd 254
    assert all(any(name in line for name in later) for line in unknown), unknown
