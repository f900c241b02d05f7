"""What a process has loaded goes before what is installed."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

from dshealthd.core.host import Host
from dshealthd.jobs.installation import Installations
from dshealthd.jobs.loaded import libraries, parse_maps, versions
from dshealthd.linux.process_root import Root
from tests.jobs.elf import library
from tests.jobs.machines import TORCH, training_process
from tests.jobs.test_installation import VERSIONS, WHOLE, environment

SITE = "/opt/venv/lib/python3.11/site-packages"
MAPS = (
    "55d0c8a00000-55d0c8a01000 r--p 00000000 fe:00 1835 /usr/bin/python3.11\n"
    "7f1e40000000-7f1e40021000 rw-p 00000000 00:00 0 \n"
    f"7f1e80000000-7f1e90000000 r--p 00000000 fe:00 77 {SITE}/torch/lib/libtorch_cuda.so\n"
    f"7f1e90000000-7f1e90001000 r--p 00000000 fe:00 78 {SITE}/torch/lib/libtorch_python.so\n"
    "{nccl}7ffc0a000000-7ffc0a021000 rw-p 00000000 00:00 0 [stack]\n"
)
PACKAGED = f"7f1ea0000000-7f1ea0001000 r--p 00000000 fe:00 79 {SITE}/nvidia/nccl/lib/libnccl.so.2\n"


def directory(
    tmp_path: Path, maps: str, command: bytes = b"/opt/venv/bin/python\0train.py\0"
) -> Path:
    """Make the `/proc/<pid>` of a process in a container."""
    place = tmp_path / "50"
    (place / "root").mkdir(parents=True)
    (place / "maps").write_text(maps)
    (place / "cmdline").write_bytes(command)
    (place / "exe").symlink_to("/usr/bin/python3.11")
    environment(place / "root/opt/venv", *WHOLE)
    return place


def read(place: Path, **more: str) -> dict[str, str]:
    """Return what the process runs with."""
    process = training_process(50, {**TORCH, **more})
    with Root.of_process(Host(procfs=place.parent), int(place.name)) as root:
        return dict(versions(root, str(place), process, libraries(str(place)), Installations()))


def test_replaced_on_disk() -> None:
    """A library that was upgraded under a running job is told: what is on disk is not what runs."""
    data = MAPS.format(nccl=PACKAGED.replace("libnccl.so.2", "libnccl.so.2 (deleted)"))
    assert parse_maps(data.encode()).replaced == f"{SITE}/nvidia/nccl/lib/libnccl.so.2"


def test_packaged_nccl(tmp_path: Path) -> None:
    """NCCL loaded from the package has its version; the rest comes from the environment."""
    place = directory(tmp_path, MAPS.format(nccl=PACKAGED))
    assert read(place) == {**VERSIONS, "python": "3.11.2"}


def test_other_nccl_is_loaded(tmp_path: Path) -> None:
    """NCCL that was put before the package's by LD_LIBRARY_PATH or LD_PRELOAD is the one in use."""
    other = PACKAGED.replace(f"{SITE}/nvidia/nccl/lib/libnccl.so.2", "/opt/nccl/libnccl.so.2")
    place = directory(tmp_path, MAPS.format(nccl=other))
    library(place / "root/opt/nccl/libnccl.so.2", b"NCCL version 2.21.5+cuda12.4\0")
    assert read(place)["nccl"] == "2.21.5"


def test_nccl_inside_torch(tmp_path: Path) -> None:
    """A torch that NCCL is linked into has the version that its library says."""
    place = directory(tmp_path, MAPS.format(nccl=""))
    library(place / f"root{SITE}/torch/lib/libtorch_cuda.so", b"NCCL version 2.17.1+cuda12.1\0")
    assert read(place)["nccl"] == "2.17.1"


def test_before_torch_is_loaded(tmp_path: Path) -> None:
    """Until torch is loaded, what is installed is told."""
    assert read(directory(tmp_path, ""))["nccl"] == "2.20.5"


def test_activated_environment(tmp_path: Path) -> None:
    """Started as plain `python`, the environment is the activated one."""
    assert (
        read(directory(tmp_path, "", b"python\0train.py\0"), VIRTUAL_ENV="/opt/venv")["deepspeed"]
        == "0.14.4"
    )


def test_interpreter_by_a_relative_path(tmp_path: Path) -> None:
    """Started as `venv/bin/python`, it is the one below the directory that the process is in."""
    place = directory(tmp_path, "", b"venv/bin/python\0train.py\0")
    root = (place / "root").rename(tmp_path / "container")
    (place / "root").symlink_to(root)
    (place / "cwd").symlink_to(root / "opt")
    assert read(place)["deepspeed"] == "0.14.4"


def test_no_environment_at_all(tmp_path: Path) -> None:
    """A process that is no Python has no versions."""
    place = directory(tmp_path, "", b"bash\0")
    (place / "exe").unlink()
    (place / "exe").symlink_to("/bin/bash")
    assert read(place) == {}


def test_this_process() -> None:
    """On the real `/proc`, this interpreter's own version is found, and torch's where it is
    installed, without importing it.
    """
    place = f"/proc/{os.getpid()}"
    before = "torch" in sys.modules  # by another test of this process
    found = read(Path(place))
    assert found["python"].startswith("3.")
    installed = {distribution.name.lower() for distribution in importlib.metadata.distributions()}
    assert ("torch" in found) == ("torch" in installed)
    assert ("torch" in sys.modules) == before
