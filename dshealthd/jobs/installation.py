"""Which versions of what training stands on are installed in a Python environment, read from its files: nothing is imported or run.

Places are those of the file system as the agent sees it, so that a container's environment is one below `/proc/<pid>/root`.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from typing import TYPE_CHECKING

from dshealthd.host import read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Versions = frozenset[tuple[str, str]]
"""Pairs of component and version; a component that is installed twice is there twice."""

_ASSIGNMENT = re.compile(r"^(\w+)\s*(?::[^=\n]*)?=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_DISTRIBUTION = re.compile(r"(deepspeed|nvidia_nccl_cu\d+|torch)-([0-9][^-]*?)(?:-py[\d.]+)?\.(?:dist-info|egg-info)", re.IGNORECASE)
_LIBRARY = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)")
_BANNER = re.compile(rb"NCCL version (\d+\.\d+\.\d+)\+cuda")
_INTERPRETER = re.compile(r"python3(\.\d+)?")
_CHUNK = 1 << 20
_SECTION_LIMIT = 64 << 20
"""Bytes of a library's constants that are searched; libnccl.so has half a MiB, a PyTorch that NCCL is linked into some ten."""


def parse_assignments(source: str) -> dict[str, str]:
    """Return the strings that a generated `version.py` assigns to names at its top level; None and other values are left out."""
    return dict(_ASSIGNMENT.findall(source))


def parse_settings(text: str) -> dict[str, str]:
    """Return the keys of `pyvenv.cfg`."""
    return {key.strip().lower(): value.strip() for key, equals, value in (line.partition("=") for line in text.splitlines()) if equals}


def parse_distributions(names: Iterable[str]) -> set[tuple[str, str]]:
    """Return component and version of the distributions that matter, from the names of their metadata directories."""
    found = set()
    for name in names:
        if match := _DISTRIBUTION.fullmatch(name):
            component, version = match.groups()
            found.add(("nccl" if component.lower().startswith("nvidia_nccl") else component.lower(), version))
    return found


def library_version(place: str) -> str | None:
    """Return the version of NCCL that a shared library is, or has linked into it; None if it does not say.

    Its file name says it outside of Python packages (`libnccl.so.2.21.5`), else the text that it prints at start.
    """
    try:
        name = os.path.basename(os.readlink(place))
    except OSError:
        name = os.path.basename(place)
    if match := _LIBRARY.fullmatch(name):
        return match[1]
    before = b""
    for chunk in _constants(place):
        if found := _BANNER.search(before + chunk):
            return found[1].decode()
        before = chunk[-64:]
    return None


def _constants(place: str) -> Iterator[bytes]:
    """Yield the section `.rodata` of a 64-bit ELF file in pieces, and nothing of other files. Raises OSError."""
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        header = os.pread(descriptor, 64, 0)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":  # noqa: PLR2004 - the header of 64-bit little-endian ELF
            return
        (table,) = struct.unpack_from("<Q", header, 40)
        size, count, names = struct.unpack_from("<3H", header, 58)
        total = os.fstat(descriptor).st_size
        sections = os.pread(descriptor, size * count, table) if table < total else b""
        entries = [struct.unpack_from("<IIQQQQ", sections, start) for start in range(0, len(sections) - 39, size or 64)]
        if names >= len(entries) or entries[names][4] > total:
            return
        text = os.pread(descriptor, min(entries[names][5], _CHUNK), entries[names][4])
        for name, _kind, _flags, _address, offset, length in entries:
            if text[name:].startswith(b".rodata\0"):
                end = min(offset + min(length, _SECTION_LIMIT), total)
                for start in range(offset, end, _CHUNK):
                    yield os.pread(descriptor, min(_CHUNK, end - start), start)
                return
    finally:
        os.close(descriptor)


class Installations:
    """Reads environments, and remembers from round to round what it found, until the directory or the library changes."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self._found: dict[tuple[str, int, int], Versions] = {}
        self._before: dict[tuple[str, int, int], Versions] = {}

    def begin(self) -> None:
        """Start a round: what the last one did not ask for is forgotten."""
        self._before, self._found = self._found, {}

    def environment(self, root: str, prefix: str) -> Versions:
        """Return what is installed in the environment at `prefix` of the file system at `root`. Raises OSError if there is none."""
        root = root.rstrip("/")
        base = root + prefix.rstrip("/")
        settings = _settings(base)
        versions = self._packages(root, base)
        home = os.path.dirname(settings.get("home", ""))  # of the interpreter that the environment was made with
        if settings.get("include-system-site-packages") == "true" and home.startswith("/"):
            versions |= _missing(versions, self._packages(root, root + home.rstrip("/")))
        if any(component == "cuda" for component, _ in versions):
            system = (f"{root}/usr/{lib}/libnccl.so.2" for lib in ("lib/x86_64-linux-gnu", "lib64", "lib/aarch64-linux-gnu"))
            versions |= _missing(versions, self._first((f"{base}/lib/libnccl.so.2", *system)))
        return versions | {("python", _python(base, settings, _interpreters(base)))}

    def site(self, site: str) -> Versions:
        """Return what is installed in one directory of packages. Raises OSError if it cannot be read."""
        return self._remembered(site, lambda: frozenset(self._read(site)))

    def library(self, place: str) -> Versions:
        """Return which NCCL a library is or contains; empty if it does not say. Raises OSError if it cannot be read."""
        return self._remembered(place, lambda: frozenset({("nccl", version)} if (version := library_version(place)) else ()))

    def _remembered(self, place: str, find: Callable[[], Versions]) -> Versions:
        status = os.stat(place)
        key = (place, status.st_mtime_ns, status.st_size)
        if key not in self._found:
            self._found[key] = self._before[key] if key in self._before else find()
        return self._found[key]

    def _packages(self, root: str, base: str) -> Versions:
        """Return what all directories of packages of an interpreter hold."""
        bases = [base, f"{root}/usr/local"] if base == f"{root}/usr" else [base]
        sites = {
            os.path.realpath(f"{library}/{packages}"): None
            for library in (f"{base}/{lib}/{name}" for base in bases for lib in ("lib", "lib64") for name in _interpreters(base, lib))
            for packages in ("site-packages", "dist-packages")
        }
        if not _interpreters(base):
            raise FileNotFoundError(errno.ENOENT, "no Python environment", base)
        versions: Versions = frozenset()
        for site in sites:
            if os.path.isdir(site):
                versions |= _missing(versions, self.site(site))
        return versions

    def _first(self, libraries: Iterable[str]) -> Versions:
        """Return the version of the first library that there is."""
        for place in libraries:
            if os.path.exists(place):
                return self.library(place)
        return frozenset()

    def _read(self, site: str) -> Versions:
        found = parse_distributions(os.listdir(site))
        torch = _assignments(f"{site}/torch/version.py")
        if "__version__" in torch:  # what torch.__version__ says; the metadata may lack the build (+cu121)
            found = {pair for pair in found if pair[0] != "torch"} | {("torch", torch["__version__"])}
        if "cuda" in torch:
            found.add(("cuda", torch["cuda"]))
        built = _assignments(f"{site}/deepspeed/git_version_info_installed.py")
        versions = frozenset(found)
        if "version" in built:
            versions |= _missing(versions, frozenset({("deepspeed", built["version"])}))
        if "cuda" in torch:
            versions |= _missing(versions, self._first((f"{site}/torch/lib/libnccl.so.2", f"{site}/nvidia/nccl/lib/libnccl.so.2")))
        return versions


def _missing(have: Versions, more: Versions) -> Versions:
    """Return what `more` has of components that `have` lacks."""
    components = {component for component, _ in have}
    return frozenset(pair for pair in more if pair[0] not in components)


def _interpreters(base: str, lib: str = "lib") -> list[str]:
    """Return the directories of interpreters below a prefix, such as `python3.11`; none if there is no such prefix."""
    try:
        return sorted((name for name in os.listdir(f"{base}/{lib}") if _INTERPRETER.fullmatch(name)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _assignments(place: str) -> dict[str, str]:
    try:
        return parse_assignments(read(place, 1 << 16))
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _settings(base: str) -> dict[str, str]:
    try:
        return parse_settings(read(f"{base}/pyvenv.cfg", 1 << 16))
    except FileNotFoundError:
        return {}


def _python(base: str, settings: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the version of the interpreter: as exactly as its files say."""
    if version := settings.get("version_info") or settings.get("version"):
        return ".".join(version.split(".")[:3])
    for name in names:
        try:
            header = read(f"{base}/include/{name}/patchlevel.h", 1 << 16)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if match := re.search(r'#define\s+PY_VERSION\s+"([^"]+)"', header):
            return match[1]
    return max(names, key=len).removeprefix("python")
