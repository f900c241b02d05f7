"""What is installed, read from files of every make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.jobs.installation import (
    Installations,
    Versions,
    _plausible,
    parse_assignments,
    parse_distributions,
    site_packages,
)
from dshealthd.linux.process_root import Root
from tests.jobs.elf import library

TORCH = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.3.0+cu121'
debug = False
cuda: Optional[str] = '12.1'
git_version = '97ff6cfd9c86c5c09d7ce775ab64ec5c99230f5d'
hip: Optional[str] = None
"""


WHOLE = ("torch-2.3.0.dist-info", "nvidia_nccl_cu12-2.20.5.dist-info", "deepspeed-0.14.4.dist-info")
VERSIONS = {"torch": "2.3.0+cu121", "cuda": "12.1", "nccl": "2.20.5", "deepspeed": "0.14.4"}
"""Of these distributions, without Python's."""


def installed(root: Path, prefix: str) -> Versions:
    """Return what is installed at a prefix below a root."""
    with Root.of_owner(root, prefix) as place:
        return Installations().environment(place, prefix)


def version(path: Path) -> Versions:
    """Return which NCCL a library is."""
    with Root.of_owner(path.parent, "/") as root:
        return Installations().library(root, f"/{path.name}")


def environment(prefix: Path, *distributions: str, torch: str = TORCH) -> Path:
    """Make a virtual environment's files, and return its directory of packages."""
    site = prefix / "lib/python3.11/site-packages"
    (site / "torch/lib").mkdir(parents=True)
    for name in distributions:
        (site / name).mkdir()
    (prefix / "pyvenv.cfg").write_text(
        "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11.2\n"
    )
    if torch:
        (site / "torch/version.py").write_text(torch)
    return site


def test_torch_version_file() -> None:
    """Both forms of assignment that PyTorch's build writes are understood, and None is no
    version.
    """
    found = parse_assignments(TORCH)
    assert (found["__version__"], found["cuda"]) == ("2.3.0+cu121", "12.1")
    assert "hip" not in found
    assert parse_assignments('cuda: Optional[str] = "13.0"\nhip = None\n') == {"cuda": "13.0"}


def test_distributions() -> None:
    """Names of metadata directories give what matters, whichever CUDA NCCL was packaged for."""
    names = [
        "nvidia_nccl_cu12-2.21.5.dist-info",
        "torch-2.3.0+cu121.dist-info",
        "deepspeed-0.14.4.egg-info",
        "torch",
        "x.py",
    ]
    strangers = [
        "torchvision-0.18.0.dist-info",
        "torch_geometric-2.5.dist-info",
        "deepspeed_kernels-0.0.1.dist-info",
    ]
    assert parse_distributions(names + strangers) == {
        ("nccl", "2.21.5"),
        ("torch", "2.3.0+cu121"),
        ("deepspeed", "0.14.4"),
    }


def test_virtual_environment(tmp_path: Path) -> None:
    """Torch with its build, CUDA, NCCL, DeepSpeed and Python are told."""
    environment(tmp_path / "opt/venv", *WHOLE)
    assert dict(installed(tmp_path, "/opt/venv")) == {**VERSIONS, "python": "3.11.2"}


def test_without_cuda(tmp_path: Path) -> None:
    """A torch for CPUs has no CUDA and no NCCL, though a library of the system may be there."""
    environment(tmp_path / "opt/venv", torch="__version__ = '2.3.0+cpu'\ncuda = None\n")
    library(tmp_path / "usr/lib/x86_64-linux-gnu/libnccl.so.2", b"NCCL version 2.18.1+cuda12.1\0")
    assert dict(installed(tmp_path, "/opt/venv")) == {"torch": "2.3.0+cpu", "python": "3.11.2"}


def test_system_nccl(tmp_path: Path) -> None:
    """A torch that uses the system's NCCL has the version that the library's file name says."""
    environment(tmp_path / "opt/venv")
    system = tmp_path / "usr/lib/x86_64-linux-gnu"
    system.mkdir(parents=True)
    (system / "libnccl.so.2").symlink_to("libnccl.so.2.21.5")
    (system / "libnccl.so.2.21.5").touch()
    assert ("nccl", "2.21.5") in installed(tmp_path, "/opt/venv")


def test_inherited_packages(tmp_path: Path) -> None:
    """An environment that includes the system's packages has those, unless it has its own."""
    environment(tmp_path / "opt/venv", "deepspeed-0.15.0.dist-info", torch="")
    (tmp_path / "opt/venv/pyvenv.cfg").write_text(
        "home = /usr/bin\ninclude-system-site-packages = true\nversion = 3.10.12\n"
    )
    local = tmp_path / "usr/local/lib/python3.10/dist-packages"
    (tmp_path / "usr/lib/python3.10").mkdir(parents=True)
    for name in ("deepspeed-0.14.0.dist-info", "nvidia_nccl_cu12-2.21.5.dist-info"):
        (local / name).mkdir(parents=True)
    found = installed(tmp_path, "/opt/venv")
    assert dict(found) == {"deepspeed": "0.15.0", "nccl": "2.21.5", "python": "3.10.12"}


def test_environment_that_includes_itself(tmp_path: Path) -> None:
    """An environment made by an interpreter of its own prefix does not go round in circles."""
    environment(tmp_path / "opt/venv")
    (tmp_path / "opt/venv/pyvenv.cfg").write_text(
        "home = /opt/venv/bin\ninclude-system-site-packages = true\n"
    )
    assert ("torch", "2.3.0+cu121") in installed(tmp_path, "/opt/venv")


def test_twice_installed(tmp_path: Path) -> None:
    """A component that a broken upgrade has left twice is told twice."""
    environment(tmp_path, "deepspeed-0.14.4.dist-info", "deepspeed-0.15.0.dist-info")
    found = installed(Path("/"), str(tmp_path))
    assert {version for component, version in found if component == "deepspeed"} == {
        "0.14.4",
        "0.15.0",
    }


def test_no_environment(tmp_path: Path) -> None:
    """A place without an interpreter's directory is no environment, rather than an empty one."""
    (tmp_path / "lib").mkdir()
    for prefix in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError):
            installed(Path("/"), str(prefix))


def test_remembered_until_it_changes(tmp_path: Path) -> None:
    """Packages are read again when their directory changes, and forgotten when a round does not ask
    for them.
    """
    site = environment(tmp_path, "deepspeed-0.14.4.dist-info")
    installations = Installations()
    root = Root.of_owner(site, "/")
    before = installations.site(root, "/")
    (site / "torch/version.py").write_text(
        "__version__ = 'unnoticed'\n"
    )  # pip replaces the metadata, and with it the directory, too
    installations.begin()
    assert installations.site(root, "/") is before
    (site / "deepspeed-0.14.4.dist-info").rename(site / "deepspeed-0.15.0.dist-info")
    os.utime(site, ns=(0, 1))
    assert ("deepspeed", "0.15.0") in installations.site(root, "/")
    installations.begin()
    installations.begin()
    assert not installations._before
    root.close()


@given(st.binary(max_size=200), st.integers(0, 63), st.binary(min_size=1, max_size=8))
def test_any_bytes_are_a_library(
    tmp_path_factory: pytest.TempPathFactory, constants: bytes, place: int, damage: bytes
) -> None:
    """A damaged or foreign file has no version."""
    path = tmp_path_factory.getbasetemp() / "damaged.so"
    library(path, constants)
    data = bytearray(path.read_bytes())
    data[place : place + len(damage)] = damage
    path.write_bytes(data)
    assert not version(path) or b"NCCL" in constants
    path.write_bytes(constants)
    assert not version(path)


def test_interpreters(tmp_path: Path) -> None:
    """The most precise name tells the version; of many, four are looked at."""
    for name in ("usr/lib/python3/dist-packages", "usr/lib/python3.11"):
        (tmp_path / name).mkdir(parents=True)
    assert installed(tmp_path, "/usr") == {("python", "3.11")}
    sites = [f"/env/lib/python3.{number}/site-packages" for number in range(5)]
    for site in sites:
        (tmp_path / site[1:]).mkdir(parents=True)
    with Root.of_owner(tmp_path, "/env") as root:
        assert site_packages(root, "/env") == sites[:0:-1]


def test_so_many_versions() -> None:
    """Of each component the same four are told each time, whatever a directory holds."""
    found = [("torch", f"2.{number}.0") for number in range(5)]
    assert _plausible([*reversed(found), ("nccl", "2.30.7")]) == {*found[:4], ("nccl", "2.30.7")}
    assert _plausible([("torch", "2" * 64), ("nccl", "2" * 65)]) == {("torch", "2" * 64)}
