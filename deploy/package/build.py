"""Builds the deb, the RPM package and the tar.gz: `./dev package`.

All three hold one tree, with an interpreter of its own (runtime.py) below /usr/lib/dshealthd, so
that nothing is asked of the distribution but systemd. Nothing is compiled but bytecode, and nothing
is fetched when a package is installed: wheels and the interpreter come by the hashes of lock files.

The same commit gives the same bytes with the same liblzma: times are that of the commit.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import string
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from deploy.package import manual, runtime
from deploy.training import directory

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
MANYLINUX = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
"""Builds of wheels that run on glibc 2.28 (RHEL 8) and later."""
FORMATS = ("deb", "rpm", "tar.gz")
PY_SPY = "py-spy"
"""Packed beside the dependencies: without it evidence has no Python stacks."""
MODULES = f"{runtime.LIBRARY}/lib/python3/dist-packages"
"""Where Debian's interpreter looks for them."""
NOT_PACKED = re.compile(
    r".*\.(pyx|pxd|pxi|pyi|c|h|hash|pyc)|.*/py\.typed"
    r"|.*\.dist-info/(RECORD|INSTALLER|REQUESTED|WHEEL|(entry_points|top_level)\.txt)"
    r"|example\.py"  # of nvidia-ml-py
    r"|aiohttp/(pytest_plugin|test_utils|worker)\.py"
    r"|prometheus_client/(aiohttp|bridge|django|twisted)/.*"
    # It needs the host's libstdc++; frozenlist has the same in Python.
    r"|frozenlist/_frozenlist\..*\.so"
    # A second parser of YAML: only SafeLoader, which is Python, is called.
    r"|_yaml/.*|yaml/(_yaml\..*\.so|cyaml\.py)"
)
"""Sources, headers, examples and parts that the agent never loads, and what pip keeps for
itself."""


class BuildError(Exception):
    """The packages cannot be built as they should be."""


def main(arguments: list[str] | None = None) -> int:
    """Build what is asked for; status 1 says why that was not possible."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, default=PROJECT / "dist")
    parser.add_argument("--arch", choices=runtime.ARCHITECTURES, default=runtime.here())
    parser.add_argument("--format", choices=FORMATS, action="append")
    parser.add_argument("--version", help="instead of the project's; for tests of upgrades")
    parser.add_argument("--lock", type=Path, default=runtime.LOCK, help="instead of debian.lock")
    options = parser.parse_args(arguments)
    folder = PROJECT / "build"
    folder.mkdir(exist_ok=True)
    try:
        with (folder / "package.lock").open("w") as lock:  # two at once would share their tree
            fcntl.flock(lock, fcntl.LOCK_EX)
            for file in build(options):
                print(f"{file}  {file.stat().st_size / 1e6:.2f} MB", flush=True)
    except (BuildError, runtime.RuntimeBuildError, OSError) as error:
        print(f"package: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"package: {error}\n{error.stderr or ''}", file=sys.stderr)
        return 1
    return 0


def build(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the wheel for trainings, then a package of each format."""
    output, arch = options.output, options.arch
    epoch = commit_time()
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch)
    output.mkdir(parents=True, exist_ok=True)
    work = PROJECT / "build" / f"package-{arch}"
    shutil.rmtree(work, ignore_errors=True)
    root = work / "root"
    debian = runtime.fetch(arch, PROJECT / "build/debian-packages", options.lock)
    runtime.assemble(debian, root)
    wheels = fetch(arch, PROJECT / "build" / f"wheels-{arch}")
    own = wheel(PROJECT, work / "own", options.version)
    parts = {file: read_metadata(file) for file in [own, *wheels]}
    for file in parts:
        unpack(file, root)
    check_libraries(root)
    strip(root, arch)
    system_files(root, epoch)
    document = json.dumps(bill_of_materials(parts, debian, epoch), indent=1) + "\n"
    write(root / "usr/share/doc/dshealthd/sbom.cdx.json", document)
    compile_all(root, arch, options.lock)
    settle(root, epoch)
    yield wheel(PROJECT / "deploy/training", output, options.version)
    variables = {
        "ROOT": str(root),
        "ZSH": str(work / "_dshealthd"),
        "ARCH": arch,
        "VERSION": parts[own]["version"],
        "MTIME": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
    }
    description = string.Template((HERE / "nfpm.yaml").read_text(encoding="utf-8"))
    write(work / "nfpm.yaml", description.substitute(variables))
    for kind in (kind for kind in FORMATS if kind in (options.format or FORMATS)):
        target = output / f"dshealthd_{variables['VERSION']}_{arch}.{kind}"
        if kind == "tar.gz":
            tarball(root, target, epoch)
        else:
            command = [tool("nfpm"), "package", "--config", str(work / "nfpm.yaml")]
            command += ["--packager", kind, "--target", str(target.resolve())]
            subprocess.run(  # noqa: S603 - the packager that the lock file names
                command, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL
            )
        if kind == "deb":
            compress(target, arch)
        yield target


def compress(deb: Path, arch: str) -> None:
    """Pack what nfpm left as it is: by liblzma it is a fifth smaller than by nfpm's own xz.

    Calls in x86 code are packed as absolute addresses, which repeat. The like for arm64 is not
    used:
    only liblzma 5.4 unpacks it, and Ubuntu 22.04 has 5.2.
    """
    filters: list[dict[str, int]] = [
        {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4}
    ]
    if arch == "amd64":
        filters.insert(0, {"id": lzma.FILTER_X86})
    with deb.open("r+b") as file:
        members = list(runtime.members(file.read()))
        file.seek(len(runtime.AR))
        for header, content in members:
            if header.startswith(b"data.tar "):
                packed = lzma.compress(content, filters=filters)
                line = b"%-16s%s%-10d`\n" % (b"data.tar.xz", header[16:48], len(packed))
            else:
                line, packed = header, content
            file.write(line + packed + b"\n" * (len(packed) % 2))
        file.truncate()


def commit_time() -> int:
    """Return $SOURCE_DATE_EPOCH, else the time of the last commit; seconds since 1970."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    command = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(  # noqa: S603 - a fixed program
        command, cwd=PROJECT, check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def tool(name: str) -> str:
    """Return where a program is: beside this interpreter, or in the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        message = f"{name} is not installed; ./dev package installs it"
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
    """Return the wheels of all that dshealthd depends on, and py-spy's."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = locked(PROJECT / "requirements.lock")
    wanted[PY_SPY] = locked(PROJECT / "requirements-package.lock")[PY_SPY]
    list_file = directory / "requirements.txt"
    write(list_file, "\n".join(wanted.values()) + "\n")
    platforms = [f"--platform={name}_{runtime.ARCHITECTURES[arch]}" for name in MANYLINUX]
    digest = hashlib.sha256(list_file.read_bytes()).hexdigest()[:16]
    stamp = directory / f"fetched.{runtime.VERSION}.{digest}"
    if not stamp.exists():
        for old in (*directory.glob("*.whl"), *directory.glob("fetched.*")):
            old.unlink()
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--require-hashes", "--only-binary=:all:", "--implementation=cp"]
        command += ["--disable-pip-version-check", f"--python-version={runtime.VERSION}"]
        command += [*platforms, "-d", str(directory), "-r", str(list_file)]
        subprocess.run(command, check=True)  # noqa: S603 - a fixed program
        stamp.touch()
    by_name = {normalized(file.name.split("-")[0]): file for file in directory.glob("*.whl")}
    return [by_name[name] for name in sorted({PY_SPY, *closure("dshealthd", by_name)})]


def closure(name: str, wheels: dict[str, Path]) -> set[str]:
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


def requirements(name: str, wheels: dict[str, Path]) -> Iterator[Requirement]:
    """Yield what one distribution needs on the package's interpreter."""
    if name == "dshealthd":
        project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
        lines = project["dependencies"]
    else:
        lines = read_metadata(wheels[name])["requires"]
    version = runtime.VERSION
    environment = {"python_version": version, "python_full_version": f"{version}.0", "extra": ""}
    for line in lines:
        requirement = Requirement(line)
        requirement.name = normalized(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate(environment):
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
    """Lay a wheel over the package's tree.

    The description in its metadata, mostly a changelog, stays where it is the only license text.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(archive.namelist())
        licensed = any(".dist-info/licenses/" in name for name in names)
        for name in names:
            if name.endswith("/") or NOT_PACKED.fullmatch(name):
                continue
            content = archive.read(name)
            if licensed and re.fullmatch(r"[^/]*\.dist-info/METADATA", name):
                content = content.partition(b"\n\n")[0] + b"\n"
            target = root / MODULES / name
            if (script := re.fullmatch(r"[^/]*\.data/scripts/(.*)", name)) is not None:
                target = root / runtime.LIBRARY / "bin" / script[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o755 if target.parent.name == "bin" else 0o644)


def check_libraries(root: Path) -> None:
    """Fail if a part needs a library that is not packed: the host's would be loaded, if it has
    one.
    """
    library = root / runtime.LIBRARY
    packed = {file.name for file in (library / "lib").iterdir()}
    for file in [*library.rglob("*.so"), library / "bin/python3"]:  # py-spy is a process of its own
        if missing := set(runtime.needs(file)) - packed:
            message = f"{file.name} needs {', '.join(sorted(missing))}, which is not packed"
            raise BuildError(message)


def strip(root: Path, arch: str) -> None:
    """Take the symbols for debuggers out of what wheels brought, five sixths of their size."""
    files = [*(root / MODULES).rglob("*.so"), root / runtime.LIBRARY / "bin" / PY_SPY]
    command = [tool(f"{runtime.ARCHITECTURES[arch]}-linux-gnu-strip"), "--strip-unneeded"]
    subprocess.run([*command, *map(str, files)], check=True)  # noqa: S603 - binutils


def compile_all(root: Path, arch: str, lock: Path) -> None:
    """Compile all modules by the interpreter that loads them, or its like for this machine.

    Nothing is compared with the sources when they are loaded: only a new package changes either.
    Of modules that are not ours only the bytecode is kept: tracebacks name file and line by it.
    Docstrings and asserts go from the standard library alone, which is tested without them.
    """
    like = root
    if arch != runtime.here():
        like = PROJECT / "build/package-compiler"
        runtime.assemble(
            runtime.fetch(runtime.here(), PROJECT / "build/debian-packages", lock), like
        )
    options = ["-q", "--invalidation-mode=unchecked-hash", "-s", str(root), "-p", "/"]
    compiler = [*runtime.command(like), "-m", "compileall", *options]
    own, standard = root / MODULES / "dshealthd", root / runtime.STANDARD
    others = [path for path in (root / MODULES).iterdir() if path != own]
    subprocess.run([*compiler, own], check=True)  # noqa: S603 - ours
    subprocess.run([*compiler, "-b", *others], check=True)  # noqa: S603 - ours
    subprocess.run([*compiler, "-b", "-o2", standard], check=True)  # noqa: S603 - ours
    for place in (*others, standard):
        for source in (place, *place.rglob("*.py")):
            if source.suffix == ".py":
                source.unlink()


def system_files(root: Path, epoch: int) -> None:
    """Put in what belongs to the system: command, unit, users, manual, completion,
    documentation.
    """
    library = root / runtime.LIBRARY
    systemd, slurm = PROJECT / "systemd", PROJECT / "deploy/slurm"
    for source, target in {
        systemd / "dshealthd.service": "usr/lib/systemd/system/dshealthd.service",
        systemd / "dshealthd-launches.service": (
            "usr/lib/systemd/system/dshealthd-launches.service"
        ),
        systemd / "dshealthd.sysusers": "usr/lib/sysusers.d/dshealthd.conf",
        systemd / "dshealthd.tmpfiles": "usr/lib/tmpfiles.d/dshealthd.conf",
        systemd / "unprivileged.conf": f"{runtime.LIBRARY}/unprivileged.conf",
        systemd / "evidence.conf": f"{runtime.LIBRARY}/evidence.conf",
        slurm / "dshealthd.nhc": f"{runtime.LIBRARY}/slurm/dshealthd.nhc",
        PROJECT / "docs/dshealthd.toml": "usr/share/doc/dshealthd/dshealthd.toml",
        PROJECT / "docs/metrics.md": "usr/share/doc/dshealthd/metrics.md",
        PROJECT / "LICENSE": "usr/share/doc/dshealthd/copyright",
    }.items():
        write(root / target, source.read_text(encoding="utf-8"))
    for name in ("dshealthd-health", "dshealthd-prolog", "dshealthd-epilog"):
        write(library / "slurm" / name, (slurm / name).read_text(encoding="utf-8"), 0o755)
    directory.make(library / "training")
    write(root / "usr/bin/dshealthd", (HERE / "dshealthd.sh").read_text(encoding="utf-8"), 0o755)
    # What an administrator adds, such as grpcio for NVRx: pip install --target.
    write(root / MODULES / "local.pth", "/usr/local/lib/dshealthd\n")
    date = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    write(root / "usr/share/man/man8/dshealthd.8", manual.dshealthd_8(date))
    write(root / "usr/share/man/man5/dshealthd.toml.5", manual.dshealthd_toml_5(date))
    write(root / "usr/share/bash-completion/completions/dshealthd", manual.bash())
    write(root.parent / "_dshealthd", manual.zsh())  # Debian and Fedora have other places for it


def bill_of_materials(
    parts: dict[Path, dict[str, Any]], debian: list[runtime.Debian], epoch: int
) -> dict[str, Any]:
    """Return a CycloneDX document of what is packed, by name, version, license and hash."""
    application, *libraries = [
        component(
            f"pkg:pypi/{found['name']}@{found['version']}",
            (found["name"], found["version"], found["license"] or "see its metadata"),
            hashlib.sha256(file.read_bytes()).hexdigest(),
        )
        for file, found in parts.items()
    ]
    for package in debian:
        license_file = f"see licenses/{package.name}"
        libraries.append(
            component(package.purl, (package.name, package.version, license_file), package.sha256)
            | {"externalReferences": [{"type": "distribution", "url": package.sources}]}
        )
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


def component(purl: str, names: tuple[str, str, str], digest: str) -> dict[str, Any]:
    """Return an entry of a bill of materials; `names` are its name, version and license."""
    name, version, license_name = names
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "licenses": [{"license": {"name": license_name}}],
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }


def tarball(root: Path, target: Path, epoch: int) -> None:
    """Pack the tree for systems with neither dpkg nor rpm, with what their scripts do."""
    library = root / runtime.LIBRARY
    for name in ("install.sh", "postinst.sh", "prerm.sh", "postrm.sh"):
        write(library / name, (HERE / name).read_text(encoding="utf-8"), 0o755)
    configuration = (HERE / "dshealthd.toml").read_text(encoding="utf-8")
    write(library / "dshealthd.toml", configuration)
    # Folders of others keep the mode that they have.
    entries = [
        path for path in sorted(root.rglob("*")) if not path.is_dir() or "dshealthd" in str(path)
    ]
    names = [f"/{path.relative_to(root)}" for path in entries if not path.is_dir()]
    write(library / "files", "\n".join([*names, f"/{runtime.LIBRARY}/files"]) + "\n")
    settle(root, epoch)
    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in [*entries, library / "files"]:
            information = archive.gettarinfo(path, str(path.relative_to(root)))
            information.uid = information.gid = 0
            information.uname = information.gname = "root"
            if path.is_dir():
                archive.addfile(information)
            else:
                with path.open("rb") as content:
                    archive.addfile(information, content)


def write(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file of the package, with the folders it lies in."""
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
