"""Builds the Debian and RPM packages: `./dev package`.

One tree for every interpreter: `/usr/lib/dshealthd` is a virtual environment whose modules are
shared. Compiled modules carry their interpreter in their file name, so that the wheels of several
interpreters lie over each other, and each interpreter takes its own. Nothing is compiled here and
nothing is fetched when the package is installed: wheels come by the hashes of the lock files.

The same commit gives the same bytes: times are that of the commit.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import string
import subprocess
import sys
import time
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
VERSIONS = ("3.13", "3.12", "3.11")
"""Interpreters that the package runs on, the preferred one first."""
MANYLINUX = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
"""Builds of wheels that run on glibc 2.28 (RHEL 8) and later."""
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
PY_SPY = "py-spy"
"""Packed beside the dependencies: without it evidence has no Python stacks."""
LIBRARY = "usr/lib/dshealthd"
MODULES = f"{LIBRARY}/lib/python3/site-packages"
NOT_PACKED = re.compile(r".*\.(pyx|pxd|pxi|pyi|c|h|hash|pyc)|.*/(RECORD|INSTALLER|REQUESTED)")
"""Sources and headers, which nothing reads at run time, and what pip keeps for itself."""


class BuildError(Exception):
    """The packages cannot be built as they should be."""


def main(arguments: list[str] | None = None) -> int:
    """Build what is asked for; status 1 says why that was not possible."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, default=PROJECT / "dist")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="amd64")
    parser.add_argument("--format", choices=["deb", "rpm"], action="append")
    parser.add_argument("--version", help="instead of the project's; for tests of upgrades")
    options = parser.parse_args(arguments)
    formats = options.format or ["deb", "rpm"]
    folder = PROJECT / "build"
    folder.mkdir(exist_ok=True)
    try:
        with (folder / "package.lock").open("w") as lock:  # two at once would share their tree
            fcntl.flock(lock, fcntl.LOCK_EX)
            for file in build(options.output, options.arch, formats, options.version):
                print(f"{file}  {file.stat().st_size / 1e6:.2f} MB", flush=True)
    except (BuildError, subprocess.CalledProcessError, OSError) as error:
        print(f"package: {error}", file=sys.stderr)
        return 1
    return 0


def build(output: Path, arch: str, formats: list[str], version: str | None) -> Iterator[Path]:
    """Yield the wheel for trainings, then a package of each format."""
    epoch = commit_time()
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch)
    output.mkdir(parents=True, exist_ok=True)
    work = PROJECT / "build" / f"package-{arch}"
    shutil.rmtree(work, ignore_errors=True)
    root = work / "root"
    wheels = fetch(arch, PROJECT / "build" / f"wheels-{arch}")
    own = wheel(PROJECT, work / "own", version)
    parts = {file: read_metadata(file) for file in [own, *wheels]}
    for file in parts:
        unpack(file, root)
    environment(root)
    system_files(root, epoch)
    document = json.dumps(bill_of_materials(parts, epoch), indent=1) + "\n"
    write(root / "usr/share/doc/dshealthd/sbom.cdx.json", document)
    settle(root, epoch)
    yield wheel(PROJECT / "deploy/training", output, version)
    variables = {
        "ROOT": str(root),
        "ZSH": str(root.parent / "_dshealthd"),
        "ARCH": arch,
        "VERSION": parts[own]["version"],
        "MTIME": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
    }
    description = string.Template((HERE / "nfpm.yaml").read_text(encoding="utf-8"))
    write(work / "nfpm.yaml", description.substitute(variables))
    for kind in formats:
        target = output / f"dshealthd_{variables['VERSION']}_{arch}.{kind}"
        command = [nfpm(), "package", "--config", str(work / "nfpm.yaml"), "--packager", kind]
        subprocess.run(  # noqa: S603 - the packager that the lock file names
            [*command, "--target", str(target.resolve())],
            cwd=PROJECT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        yield target


def commit_time() -> int:
    """Return $SOURCE_DATE_EPOCH, else the time of the last commit; seconds since 1970."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    command = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True)  # noqa: S603 - a fixed program
    return int(done.stdout)


def nfpm() -> str:
    """Return where the packager is: beside this interpreter, or in the PATH."""
    beside = Path(sys.executable).with_name("nfpm")
    found = str(beside) if beside.exists() else shutil.which("nfpm")
    if found is None:
        message = "nfpm is not installed; ./dev package installs it"
        raise BuildError(message)
    return found


def locked(file: Path) -> dict[str, str]:
    """Return the entries of a lock file by name, each with its hashes."""
    entries = re.split(r"\n(?=[a-z0-9])", file.read_text(encoding="utf-8"))
    return {
        re.split(r"[=<>; ]", entry, maxsplit=1)[0]: entry.strip()
        for entry in entries
        if entry[:1].isalnum()
    }


def fetch(arch: str, directory: Path) -> list[Path]:
    """Return the wheels of all that dshealthd depends on, for each interpreter, and py-spy's."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = locked(PROJECT / "requirements.lock")
    wanted[PY_SPY] = locked(PROJECT / "requirements-dev.lock")[PY_SPY]
    list_file = directory / "requirements.txt"
    write(list_file, "\n".join(wanted.values()) + "\n")
    platforms = [f"--platform={name}_{ARCHITECTURES[arch]}" for name in MANYLINUX]
    stamp = directory / f"fetched.{hashlib.sha256(list_file.read_bytes()).hexdigest()[:16]}"
    if not stamp.exists():
        for old in (*directory.glob("*.whl"), *directory.glob("fetched.*")):
            old.unlink()
        for version in VERSIONS:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
            command += ["--require-hashes", "--only-binary=:all:", "--implementation=cp"]
            command += ["--disable-pip-version-check", f"--python-version={version}", *platforms]
            subprocess.run([*command, "-d", directory, "-r", list_file], check=True)  # noqa: S603 - a fixed program
        stamp.touch()
    by_name: dict[str, list[Path]] = {}
    for file in sorted(directory.glob("*.whl")):
        by_name.setdefault(normalized(file.name.split("-")[0]), []).append(file)
    project = Requirement("dshealthd")
    names = {PY_SPY, *closure(project.name, by_name)}
    return [file for name in sorted(names) for file in by_name[name]]


def closure(name: str, wheels: dict[str, list[Path]]) -> set[str]:
    """Return the names of all distributions that one needs, without itself."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        for requirement in requirements(current, wheels):
            if requirement.name not in found:
                found.add(requirement.name)
                waiting.append(requirement.name)
    return found


def requirements(name: str, wheels: dict[str, list[Path]]) -> Iterator[Requirement]:
    """Yield what one distribution needs on some interpreter that the package runs on."""
    if name == "dshealthd":
        import tomllib

        project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
        lines = project["dependencies"]
    else:
        lines = read_metadata(wheels[name][0])["requires"]
    for line in lines:
        requirement = Requirement(line)
        requirement.name = normalized(requirement.name)
        environments = ({"python_version": v, "python_full_version": f"{v}.0"} for v in VERSIONS)
        marker = requirement.marker
        if marker is None or any(
            marker.evaluate({**environment, "extra": ""}) for environment in environments
        ):
            yield requirement


def normalized(name: str) -> str:
    """Return a distribution's name as lock files write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_metadata(wheel: Path) -> dict[str, Any]:
    """Return name, version, license and requirements of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (
            name for name in archive.namelist() if re.fullmatch(r"[^/]*\.dist-info/METADATA", name)
        )
        fields = Parser().parsestr(archive.read(name).decode())
    return {
        "name": normalized(str(fields["Name"])),
        "version": str(fields["Version"]),
        "license": fields["License-Expression"] or fields["License"] or "",
        "requires": fields.get_all("Requires-Dist") or [],
    }


def wheel(project: Path, output: Path, version: str | None) -> Path:
    """Build the wheel of a project; with another version for a test of upgrades."""
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    source = project
    if version is not None and project == PROJECT:
        source = output / "source"
        shutil.copytree(PROJECT / "dshealthd", source / "dshealthd")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(PROJECT / name, source)
        init = source / "dshealthd/__init__.py"
        text = init.read_text(encoding="utf-8")
        write(init, re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', text))
    fresh = output / f".{project.name}"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(fresh)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)  # noqa: S603 - ours
    (made,) = fresh.glob("*.whl")
    target = made.replace(output / made.name)
    fresh.rmdir()
    return target


def unpack(wheel: Path, root: Path) -> None:
    """Lay a wheel over the tree; files that two wheels have must be the same."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith("/") or NOT_PACKED.fullmatch(name):
                continue
            data = archive.read(name)
            target = root / MODULES / name
            if (script := re.fullmatch(r"[^/]*\.data/scripts/(.*)", name)) is not None:
                target = root / LIBRARY / "bin" / script[1]
            elif ".dist-info/" in name and name.endswith(("WHEEL", "entry_points.txt")):
                continue
            if target.exists() and target.read_bytes() != data:
                message = f"{wheel.name}: {name} differs from that of another interpreter's wheel"
                raise BuildError(message)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(0o755 if target.parent.name == "bin" else 0o644)


def environment(root: Path) -> None:
    """Make the virtual environment around the modules, and the command that starts it."""
    library = root / LIBRARY
    write(library / "pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n")
    (library / "bin").mkdir(exist_ok=True)
    for version in VERSIONS:
        (library / "bin" / f"python{version}").symlink_to(f"/usr/bin/python{version}")
        packages = library / "lib" / f"python{version}" / "site-packages"
        packages.parent.mkdir(parents=True)
        packages.symlink_to("../python3/site-packages")
    # What an administrator adds, such as grpcio for NVRx: pip install --target.
    write(library / "lib/python3/site-packages/local.pth", "/usr/local/lib/dshealthd\n")
    launcher = (HERE / "dshealthd.sh").read_text(encoding="utf-8")
    launcher = launcher.replace("@VERSIONS@", " ".join(VERSIONS))
    write(root / "usr/bin/dshealthd", launcher.replace("@NAMES@", ",".join(VERSIONS)), 0o755)


def system_files(root: Path, epoch: int) -> None:
    """Put in what belongs to the system: unit, users, manual, completion, documentation."""
    systemd = PROJECT / "systemd"
    for source, target in {
        systemd / "dshealthd.service": "usr/lib/systemd/system/dshealthd.service",
        systemd / "dshealthd.sysusers": "usr/lib/sysusers.d/dshealthd.conf",
        systemd / "dshealthd.tmpfiles": "usr/lib/tmpfiles.d/dshealthd.conf",
        systemd / "unprivileged.conf": f"{LIBRARY}/unprivileged.conf",
        systemd / "evidence.conf": f"{LIBRARY}/evidence.conf",
        PROJECT / "docs/dshealthd.toml": "usr/share/doc/dshealthd/dshealthd.toml",
        PROJECT / "docs/metrics.md": "usr/share/doc/dshealthd/metrics.md",
        PROJECT / "LICENSE": "usr/share/doc/dshealthd/copyright",
    }.items():
        write(root / target, source.read_text(encoding="utf-8"))
    specification = importlib.util.spec_from_file_location("manual", HERE / "manual.py")
    assert specification is not None  # noqa: S101 - the file is there
    assert specification.loader is not None  # noqa: S101 - a file has a loader
    manual = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(manual)
    date = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    write(root / "usr/share/man/man8/dshealthd.8", manual.dshealthd_8(date))
    write(root / "usr/share/man/man5/dshealthd.toml.5", manual.dshealthd_toml_5(date))
    write(root / "usr/share/bash-completion/completions/dshealthd", manual.bash())
    write(root.parent / "_dshealthd", manual.zsh())  # Debian and Fedora have other places for it


def bill_of_materials(parts: dict[Path, dict[str, Any]], epoch: int) -> dict[str, Any]:
    """Return a CycloneDX document of what is packed, by name, version, license and hash."""
    components: dict[str, dict[str, Any]] = {}
    for file, found in parts.items():
        reference = f"pkg:pypi/{found['name']}@{found['version']}"
        component = components.setdefault(
            reference,
            {
                "type": "library",
                "bom-ref": reference,
                "name": found["name"],
                "version": found["version"],
                "purl": reference,
                "licenses": [{"license": {"name": found["license"] or "see its metadata"}}],
                "properties": [],
            },
        )
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        component["properties"].append({"name": f"wheel:{file.name}:sha256", "value": digest})
    application, *libraries = components.values()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "component": {**application, "type": "application"},
        },
        "components": libraries,
        "dependencies": [
            {
                "ref": application["bom-ref"],
                "dependsOn": [library["bom-ref"] for library in libraries],
            }
        ],
    }


def write(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file, with the folders it lies in."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)


def settle(root: Path, epoch: int) -> None:
    """Give everything the same time, and folders the mode that they have on a system."""
    for path in [*root.rglob("*"), root]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main())
