"""What tests need beyond Python: `python -m tests.needs [ARGUMENTS of pytest]` lists it.

Nothing is declared: a file needs a program that it, or a module of tests that it imports or starts,
names as a string.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "amtool": "prometheus-alertmanager",
    "chromium-headless-shell": "chromium-headless-shell",
    "faketime": "faketime",
    "gcc": "gcc",
    "mkfs.ext4": "e2fsprogs",
    "nft": "nftables",
    "openssl": "openssl",
    "pdsh": "pdsh",
    "prometheus": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "prometheus-node-exporter": "prometheus-node-exporter",
    "promtool": "prometheus",
    "setpriv": "util-linux",
    "ss": "iproute2",
    "sshd": "openssh-server",
    "strace": "strace",
    "tc": "iproute2",
    "unshare": "util-linux",
}
"""The Debian package of each program."""
TRAINING = re.compile(
    r"(?:torch|deepspeed|gloo)|.*\b(?:import|from) (?:torch|deepspeed)\b.*", re.DOTALL
)
"""Strings of files that run a training or a probe: names, and programs in Python."""


@functools.cache
def _read(file: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the strings in a file; and the modules that it imports, with what it imports from them
    as if all were such.
    """
    strings, modules = set(), set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(strings), frozenset(modules)


def _source(module: str) -> Path | None:
    """Return the file of a module of tests or benchmarks; None where there is none."""
    if module.partition(".")[0] not in {"tests", "bench"}:
        return None
    path = ROOT / module.replace(".", "/")
    return next(
        (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None
    )


@functools.cache
def _used(file: Path) -> frozenset[Path]:
    """Return the files of tests that one imports, or starts by name."""
    strings, modules = _read(file)
    names = {name for name in strings | modules if name.startswith(("tests.", "bench."))}
    scripts = {file.parent / text for text in strings if re.fullmatch(r"\w+\.py", text)}
    found = {_source(name) for name in names} | {script for script in scripts if script.is_file()}
    return frozenset(path for path in found if path is not None)


def closure(file: Path) -> set[Path]:
    """Return a file and all files of tests that it uses."""
    found, waiting = set[Path](), [file]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _used(path)
    return found


def programs(file: Path) -> set[str]:
    """Return the programs that a file of tests needs."""
    words = set().union(*(_read(path)[0] for path in closure(file)))
    # A library that is loaded, not a program that is started.
    library = {"faketime"} if any("libfaketime" in word for word in words) else set()
    return (words & PACKAGES.keys()) | library


@functools.cache
def _names_training(file: Path) -> bool:
    return any(TRAINING.fullmatch(text) for texts in _read(file) for text in texts)


def trains(file: Path) -> bool:
    """Tell whether a file of tests needs PyTorch."""
    return any(map(_names_training, closure(file)))


def chosen(arguments: list[str]) -> list[Path]:
    """Return the files that arguments of pytest choose; all of tests and bench, if they name
    none.
    """
    named = [ROOT / argument.partition("::")[0] for argument in arguments]
    paths = [path for path in named if path.exists()] or [ROOT / "tests", ROOT / "bench"]
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    return sorted(file for file in files if "fixtures" not in file.parts)


def main(arguments: list[str]) -> None:
    """Print `PROGRAM:PACKAGE` for each program, and `torch` where it is needed."""
    files = chosen(arguments)
    needed = sorted(set().union(*map(programs, files)))
    print(*(f"{name}:{PACKAGES[name]}" for name in needed), *["torch"] * any(map(trains, files)))


if __name__ == "__main__":
    main(sys.argv[1:])
