"""The versions of Python, torch, CUDA, NCCL and DeepSpeed in a Python environment.

They are read from files; nothing is imported or run. The owner of an environment may put anything
there, so files are opened only through `Root`, and their sizes and the versions found are bounded.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from dshealthd.core.host import Signature, read_bytes, signature
from dshealthd.jobs.nccl.release import read_library

if TYPE_CHECKING:
    from dshealthd.linux.process_root import Root

Versions = frozenset[tuple[str, str]]
"""Pairs of component and version; a component that is installed twice has two."""

_ASSIGNMENT = re.compile(r"^(\w+)\s*(?::[^=\n]*)?=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_DISTRIBUTION = re.compile(
    r"(deepspeed|nvidia_nccl_cu\d+|torch)-([0-9][^-]*?)(?:-py[\d.]+)?\.(?:dist-info|egg-info)",
    re.IGNORECASE,
)
_INTERPRETER = re.compile(r"python3(\.\d+)?")
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
"""Characters that PEP 440 and conda allow in a version."""
MAX_VERSIONS = 4
"""Most versions of one component. Each is a series: a broken upgrade leaves two, but a user could
make thousands.
"""
Key = tuple["Signature", int]
"""Signature of a path when it was read, and the uid whose rights were used."""
FILE = "deepspeed/git_version_info_installed.py"


def parse_assignments(source: str) -> dict[str, str]:
    """Return the strings that a package's `version.py` assigns to names at its top level.

    None and other values are left out.
    """
    return dict(_ASSIGNMENT.findall(source))


def parse_settings(text: str) -> dict[str, str]:
    """Return the keys of an environment's `pyvenv.cfg`."""
    return {
        key.strip().lower(): value.strip()
        for key, equals, value in (line.partition("=") for line in text.splitlines())
        if equals
    }


def parse_distributions(names: Iterable[str]) -> set[tuple[str, str]]:
    """Return component and version of the relevant distributions, from the names of their metadata
    directories.
    """
    found = set()
    for name in names:
        if match := _DISTRIBUTION.fullmatch(name):
            component, version = match[1].lower(), match[2]
            found.add(("nccl" if component.startswith("nvidia_nccl") else component, version))
    return found


class Installations:
    """A reader of environments that caches each result until the directory or library changes."""

    def __init__(self) -> None:
        self._found: dict[Key, Versions] = {}
        self._before: dict[Key, Versions] = {}

    def begin(self) -> None:
        """Start a round, and forget what the previous round did not use."""
        self._before, self._found = self._found, {}

    def environment(self, root: Root, prefix: str) -> Versions:
        """Return what is installed in the environment at `prefix`.

        Raises OSError if there is none.
        """
        base = prefix.rstrip("/")
        settings = parse_settings(_text(root, f"{base}/pyvenv.cfg"))
        versions = self._packages(root, base)
        # The interpreter that the environment was made with.
        home = os.path.dirname(settings.get("home", ""))
        if settings.get("include-system-site-packages") == "true" and home.startswith("/"):
            versions |= _missing(versions, self._packages(root, home.rstrip("/")))
        if any(component == "cuda" for component, _ in versions):
            system = (
                f"/usr/{lib}/libnccl.so.2"
                for lib in ("lib/x86_64-linux-gnu", "lib64", "lib/aarch64-linux-gnu")
            )
            versions |= _missing(versions, self._first(root, (f"{base}/lib/libnccl.so.2", *system)))
        python = _python(root, base, settings, _interpreters(root, base))
        return versions | _plausible({("python", python)})

    def site(self, root: Root, site: str) -> Versions:
        """Return what is installed in one directory of packages.

        Raises OSError if it cannot be read.
        """
        return self._remembered(root, site, lambda: _plausible(self._read(root, site)))

    def library(self, root: Root, path: str) -> Versions:
        """Return the NCCL version that a library is or contains; empty if it does not say.

        Raises OSError if it cannot be read.
        """

        def find() -> Versions:
            try:
                name = os.path.basename(root.link(path))
            except OSError:
                name = os.path.basename(path)
            descriptor = root.open(path)
            try:
                return _plausible(("nccl", one) for one in read_library(descriptor, name).versions)
            finally:
                os.close(descriptor)

        return self._remembered(root, path, find)

    def _remembered(self, root: Root, path: str, find: Callable[[], Versions]) -> Versions:
        status = root.stat(path)
        if status is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        key = signature(status), root.owner.uid
        if key not in self._found:
            self._found[key] = self._before[key] if key in self._before else find()
        return self._found[key]

    def _packages(self, root: Root, base: str) -> Versions:
        versions: Versions = frozenset()
        for site in site_packages(root, base):
            versions |= _missing(versions, self.site(root, site))
        return versions

    def _first(self, root: Root, libraries: Iterable[str]) -> Versions:
        """Return the version of the first of these libraries that exists."""
        for path in libraries:
            if root.stat(path) is not None:
                return self.library(root, path)
        return frozenset()

    def _read(self, root: Root, site: str) -> Versions:
        found = parse_distributions(root.names(site))
        torch = parse_assignments(_text(root, f"{site}/torch/version.py"))
        # torch.__version__ counts; the metadata may lack the build (+cu121).
        if "__version__" in torch:
            found = {pair for pair in found if pair[0] != "torch"} | {
                ("torch", torch["__version__"])
            }
        if "cuda" in torch:
            found.add(("cuda", torch["cuda"]))
        built = parse_assignments(_text(root, f"{site}/{FILE}"))
        versions = frozenset(found)
        if "version" in built:
            versions |= _missing(versions, frozenset({("deepspeed", built["version"])}))
        if "cuda" in torch:
            packaged = ("torch/lib/libnccl.so.2", "nvidia/nccl/lib/libnccl.so.2")
            versions |= _missing(
                versions, self._first(root, (f"{site}/{path}" for path in packaged))
            )
        return versions


def site_packages(root: Root, base: str) -> list[str]:
    """Return the package directories of the environment at a prefix.

    Raises OSError if there is no environment.
    """
    if not _interpreters(root, base):
        raise FileNotFoundError(errno.ENOENT, "no Python environment", base)
    bases = [base, "/usr/local"] if base == "/usr" else [base]
    found: dict[tuple[int, int], str] = {}  # lib64 is often a link to lib
    for library in (
        f"{place}/{lib}/{name}"
        for place in bases
        for lib in ("lib", "lib64")
        for name in _interpreters(root, base, lib)
    ):
        for packages in ("site-packages", "dist-packages"):
            site = f"{library}/{packages}"
            if (status := root.stat(site)) is not None and stat.S_ISDIR(status.st_mode):
                found.setdefault((status.st_dev, status.st_ino), site)
    return list(found.values())


def _plausible(found: Iterable[tuple[str, str]]) -> Versions:
    """Return the pairs with valid versions, at most `MAX_VERSIONS` of each component."""
    kept: dict[str, list[str]] = {}
    for component, version in sorted(found):
        if _VERSION.fullmatch(version) and len(kept.setdefault(component, [])) < MAX_VERSIONS:
            kept[component].append(version)
    return frozenset((component, version) for component in kept for version in kept[component])


def _missing(have: Versions, more: Versions) -> Versions:
    """Return the pairs in `more` whose components `have` lacks."""
    components = {component for component, _ in have}
    return frozenset(pair for pair in more if pair[0] not in components)


def _interpreters(root: Root, base: str, lib: str = "lib") -> list[str]:
    """Return the names of interpreter directories below a prefix, such as `python3.11`.

    Empty if there is no such prefix.
    """
    try:
        names = [name for name in root.names(f"{base}/{lib}") if _INTERPRETER.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(names, reverse=True)[:MAX_VERSIONS]


def _text(root: Root, path: str) -> str:
    """Return the text of a short file; empty if it does not exist. Raises OSError."""
    try:
        return root.read(path).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _python(root: Root, base: str, settings: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the version of an environment's interpreter, as exactly as its files say."""
    if version := settings.get("version_info") or settings.get("version"):
        return ".".join(version.split(".")[:3])
    for name in names:
        header = _text(root, f"{base}/include/{name}/patchlevel.h")
        if match := re.search(r'#define\s+PY_VERSION\s+"([^"]+)"', header):
            return match[1]
    return max(names, key=len).removeprefix("python")


def process_prefixes(place: str, environment: Mapping[str, str], site: str | None) -> Iterator[str]:
    """Yield possible prefixes of a running process's Python environment, most reliable first.

    `place` is its directory in `/proc`, `site` the package directory that torch was loaded from.
    Raises OSError.
    """
    program = os.fsdecode(read_bytes(f"{place}/cmdline").partition(b"\0")[0])
    # A virtual environment's interpreter is a link, which only this name shows.
    yield from _prefix(program)
    yield from (
        value
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX")
        if (value := environment.get(name, "")).startswith("/")
    )
    if site is not None and "/lib/python3" in site:
        yield site.partition("/lib/python3")[0]
    yield from _prefix(os.readlink(f"{place}/exe").removesuffix(" (deleted)"))


def _prefix(program: str) -> Iterator[str]:
    """Yield the prefix of a Python program's path, if it is one: relative, if the path is."""
    directory, _, name = program.rpartition("/")
    if directory.endswith("/bin") and name.startswith("python"):
        yield directory.removesuffix("/bin")
