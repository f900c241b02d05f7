"""The interpreter that a package brings along: Debian's CPython with all that it loads, its C
library and loader included, so that the distribution below does not matter.

debian.lock has the address and the hash of each Debian package that it is taken from.
`python -m deploy.package.runtime renew` writes that file anew from Debian's index, after a security
update of OpenSSL or glibc for example; `runtime.py outdated` fails where Debian has something
newer.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LOCK = Path(__file__).with_name("debian.lock")
SUITE = "trixie"
VERSION = "3.13"
"""The suite's Python."""
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
PACKAGES = (
    "python3.13-minimal",
    "libpython3.13-minimal",
    "libpython3.13-stdlib",
    *("libc6", "libgcc-s1", "libssl3t64", "libzstd1", "zlib1g"),
    *("libexpat1", "libffi8", "libbz2-1.0", "liblzma5"),
    *("base-files", "gcc-14-base"),  # license texts, to which the others refer
)
LIBRARY = "usr/lib/dshealthd"
STANDARD = f"{LIBRARY}/lib/python{VERSION}"
STUBS = ("libdl.so.2", "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libutil.so.1")
"""Parts of glibc that are loaded from the start. A library of the host, such as NVML or a module of
NSS, may need one: the host's own would not fit our C library.
"""
LOADED_LATER = ("libgcc_s.so.1",)
"""What glibc opens by itself."""
LEFT_OUT = re.compile(
    r"(__pycache__|__phello__|config-.*|curses|dbm|ensurepip|idlelib|multiprocessing|pydoc_data"
    r"|site-packages|sqlite3|test|turtle.*|unittest|venv|xml/(dom|sax)|xmlrpc|_pyrepl"
    r"|ctypes/macholib)(/.*)?"
    # Debuggers, profilers and other tools of developers; clients of mail, news and FTP.
    r"|(antigravity|bdb|cProfile|cmd|code|codeop|doctest|fileinput|ftplib|imaplib|mailbox"
    r"|modulefinder|optparse|pdb|pickletools|plistlib|poplib|profile|pstats|pyclbr|pydoc"
    r"|rlcompleter"
    r"|sched|shelve|smtplib|symtable|tabnanny|this|trace|wave|webbrowser|zipapp"
    r"|concurrent/futures/process|configparser|http/cookiejar|__hello__)\.py"
    # Parts for other systems.
    r"|_(aix|android|apple|ios|osx)_support\.py|nturl2path\.py|_distutils_system_mod\.py|.*\.exe"
    r"|asyncio/(proactor_events|windows_.*)\.py"
    r"|_py(datetime|decimal|io)\.py|sitecustomize\.py|EXTERNALLY-MANAGED"
    r"|lib-dynload/(_codecs_|_multibytecodec|_test|_ctypes_test|_xxtest|xx|_interp|_lsprof"
    r"|_multiprocessing|_posixshmem).*"
)
"""What no agent imports. Extension modules that need a library outside PACKAGES go too."""
SNAPSHOT = "https://snapshot.debian.org/archive"
"""Keeps what a mirror no longer has: the same commit still gives the same package."""
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCES = tuple(
    f"deb [signed-by={KEYRING}] http://deb.debian.org/{archive} {suite} main"
    for archive, suite in (
        ("debian", SUITE),
        ("debian", f"{SUITE}-updates"),
        ("debian-security", f"{SUITE}-security"),
    )
)
SECONDS = 60
AR = b"!<arch>\n"


class RuntimeBuildError(Exception):
    """The interpreter cannot be put together."""


@dataclass(frozen=True)
class Debian:
    """A Debian package: what its control file says, and its file with its hash."""

    name: str
    version: str
    source: str
    arch: str
    file: Path
    sha256: str

    @property
    def purl(self) -> str:
        """The Debian package's name in a bill of materials."""
        version = urllib.parse.quote(self.version, safe="")
        return f"pkg:deb/debian/{self.name}@{version}?arch={self.arch}&distro={SUITE}"

    @property
    def sources(self) -> str:
        """Where the Debian package's source code is, which its licenses make us name."""
        name, _, version = self.source.partition(" ")
        version = version.strip("()") or self.version
        return f"https://snapshot.debian.org/package/{name}/{urllib.parse.quote(version)}/"


def main(arguments: list[str] | None = None) -> int:
    """Renew the lock file, or say what is outdated; status 1 where something is, or in error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("action", choices=["renew", "outdated"])
    parser.add_argument("--lock", type=Path, default=LOCK)
    parser.add_argument("--source", action="append", help="a line of sources.list, for Debian's")
    options = parser.parse_args(arguments)
    try:
        newest = index(options.source or SOURCES)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"runtime: {error}", file=sys.stderr)
        return 1
    locked = read(options.lock) if options.lock.exists() else {}
    changed = sorted(set(newest) - set(locked))
    for url in changed:
        print(urllib.parse.unquote(url.rpartition("/")[2]))
    if options.action == "renew" and changed:
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        lines = [f"{newest[url]}  {url}\n" for url in sorted(newest)]
        options.lock.write_text(f"# runtime.py renew, {moment}\n{''.join(lines)}", encoding="utf-8")
    return 1 if options.action == "outdated" and changed else 0


def index(sources: Iterable[str]) -> dict[str, str]:
    """Return address and hash of each package in Debian's signed index, by apt in a root of its
    own.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        for folder in ("lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True)
        (root / "status").touch()
        (root / "sources.list").write_text("".join(f"{line}\n" for line in sources))
        options = {
            "Dir::Etc::sourcelist": root / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": root / "lists",
            "Dir::State::status": root / "status",
            "Dir::Cache": root / "cache",
            "APT::Architectures": ",".join(ARCHITECTURES),
            "APT::Sandbox::User": "root",
            "APT::Update::Error-Mode": "any",
        }
        apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
        subprocess.run([*apt, "update"], check=True)  # noqa: S603 - a fixed program
        wanted = [f"{package}:{arch}" for package in PACKAGES for arch in ARCHITECTURES]
        command = [*apt, "download", "--print-uris", *wanted]
        # a fixed program
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return dict(re.findall(r"^'(\S+)' \S+ \d+ SHA256:(\w+)$", done.stdout, re.MULTILINE))


def read(lock: Path) -> dict[str, str]:
    """Return the hash of each Debian package's address in a lock file."""
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    return {url: digest for digest, url in (line.split() for line in lines)}


def fetch(arch: str, folder: Path, lock: Path = LOCK) -> list[Debian]:
    """Return the packages of an architecture; those that the folder has are not fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for url, digest in sorted(read(lock).items()):
        if not url.endswith(f"_{arch}.deb"):
            continue
        file = folder / f"{digest}.deb"
        if not file.exists():
            file.with_suffix(".new").write_bytes(download(url, digest, lock))
            file.with_suffix(".new").replace(file)
        with member(file, "control") as archive:
            control = archive.extractfile("./control")
            text = control.read().decode() if control else ""  # every package has it
        fields = Parser().parsestr(text)
        name, version = str(fields["Package"]), str(fields["Version"])
        source = str(fields["Source"] or name)
        found.append(Debian(name, version, source, arch, file, digest))
    if missing := set(PACKAGES) - {package.name for package in found}:
        message = f"{lock.name} lacks {', '.join(sorted(missing))} for {arch}"
        raise RuntimeBuildError(message)
    return found


def download(url: str, digest: str, lock: Path) -> bytes:
    """Return what is at an address, or was when the lock file was written; checked by its hash."""
    moment = lock.read_text(encoding="utf-8").splitlines()[0].split()[-1]
    path = "/".join(url.split("/")[3:])
    problems = []
    for place in (url, f"{SNAPSHOT}/{path.replace('/', f'/{moment}/', 1)}"):
        try:
            # of the lock file
            with urllib.request.urlopen(place, timeout=SECONDS) as answer:  # noqa: S310
                data = bytes(answer.read())
        except (urllib.error.URLError, OSError) as error:
            problems.append(f"{place}: {error}")
            continue
        if hashlib.sha256(data).hexdigest() == digest:
            return data
        problems.append(f"{place}: not what {lock.name} has, by its hash")
    raise RuntimeBuildError("; ".join(problems))


def member(deb: Path, kind: str) -> tarfile.TarFile:
    """Return one of the archives in a Debian package, `control` or `data`."""
    for header, content in members(deb.read_bytes()):
        if header[:16].strip().rstrip(b"/") == f"{kind}.tar.xz".encode():
            # the caller closes it
            archive = tarfile.open(fileobj=io.BytesIO(lzma.decompress(content)))  # noqa: SIM115
            archive.extraction_filter = lambda entry, _path: entry  # trusted by its hash
            return archive
    message = f"{deb}: no {kind}.tar.xz"
    raise RuntimeBuildError(message)


def members(deb: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield header and content of each part of a Debian package: ar(5)."""
    place = len(AR)
    while place < len(deb):
        header = deb[place : place + 60]
        size = int(header[48:58])
        yield header, deb[place + 60 : place + 60 + size]
        place += 60 + size + size % 2  # padded to even sizes


def assemble(packages: list[Debian], root: Path) -> None:
    """Put the interpreter into a tree, and the license texts of what it is made of."""
    library = root / LIBRARY
    shutil.rmtree(root, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        for package in packages:
            with member(package.file, "data") as archive:
                archive.extractall(source)  # noqa: S202 - see there
        machine = ARCHITECTURES[packages[0].arch]
        libraries = source / f"usr/lib/{machine}-linux-gnu"
        standard = source / f"usr/lib/python{VERSION}"
        python = library / "bin/python3"
        for file in sorted(standard.rglob("*")):
            place = file.relative_to(standard)
            if file.is_file() and not LEFT_OUT.fullmatch(str(place)):
                if file.suffix == ".so" and not all(
                    (libraries / needed).exists() for needed in needs(file)
                ):
                    continue
                copy(file, root / STANDARD / place)
        copy(source / f"usr/bin/python{VERSION}", python)
        (loader,) = libraries.glob("ld-linux-*.so.*")
        copy(loader, library / "lib" / loader.name)
        patchelf(
            python,
            *("--set-interpreter", f"/{LIBRARY}/lib/{loader.name}"),
            # RPATH, not RUNPATH: it also says where libraries find what they need.
            *("--force-rpath", "--set-rpath", f"/{LIBRARY}/lib"),
            *(word for stub in STUBS for word in ("--add-needed", stub)),
        )
        python.chmod(0o755)
        (library / "lib" / loader.name).chmod(0o755)
        waiting = [python, *library.rglob("*.so"), *(libraries / name for name in LOADED_LATER)]
        while waiting:
            for needed in needs(waiting.pop()):
                if not (library / "lib" / needed).exists():
                    copy(libraries / needed, library / "lib" / needed)
                    waiting.append(library / "lib" / needed)
        for needed in LOADED_LATER:
            copy(libraries / needed, library / "lib" / needed)
        licenses(packages, source, root / "usr/share/doc/dshealthd/licenses")


def licenses(packages: list[Debian], source: Path, target: Path) -> None:
    """Copy each package's copyright file, and the licenses to which it refers."""
    common: set[str] = set()
    for package in packages:
        if package.name == "base-files":
            continue
        text = (source / "usr/share/doc" / package.name / "copyright").read_text(encoding="utf-8")
        common |= set(re.findall(r"/usr/share/common-licenses/([\w.-]*\w)", text))
        (target / package.name).parent.mkdir(parents=True, exist_ok=True)
        (target / package.name).write_text(text, encoding="utf-8")
    for name in common:
        copy(source / "usr/share/common-licenses" / name, target / name)


def copy(source: Path, target: Path) -> None:
    """Copy what a path of a Debian package leads to, readable for all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o644)


def patchelf(file: Path, *options: str) -> str:
    """Run patchelf on a file and return what it prints."""
    beside = Path(sys.executable).with_name("patchelf")
    program = str(beside) if beside.exists() else "patchelf"
    done = subprocess.run(  # noqa: S603 - the program that the lock file names
        [program, *options, str(file)], check=True, capture_output=True, text=True
    )
    return done.stdout


def needs(file: Path) -> Iterator[str]:
    """Yield the libraries that a program or library names."""
    yield from patchelf(file, "--print-needed").split()


def command(root: Path) -> list[str]:
    """Return the command that runs a tree's interpreter where it lies, on its own architecture."""
    library = root / LIBRARY
    (loader,) = (library / "lib").glob("ld-linux-*.so.*")
    python = str(library / "bin/python3")
    where = ["--library-path", str(library / "lib"), "--argv0", python]
    return [str(loader), *where, python, "-I", "-B"]


def here() -> str:
    """Return this machine's architecture as Debian names it."""
    return {machine: arch for arch, machine in ARCHITECTURES.items()}[os.uname().machine]


if __name__ == "__main__":
    sys.exit(main())
