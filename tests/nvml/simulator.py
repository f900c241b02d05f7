"""A simulated NVML: build the library, write its scenario, and what a child process needs to load
it.

The scenario's keys and faults are documented at the top of ``libnvidia_ml_sim.c``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

Value = str | int | float

SOURCE = Path(__file__).with_name("libnvidia_ml_sim.c")
SONAME = "libnvidia-ml.so.1"
FLAGS = (
    *("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"),
    *("-fvisibility=hidden", "-pthread", f"-Wl,-soname,{SONAME}"),
    *os.environ.get("NVML_SIM_CFLAGS", "").split(),  # for sanitizers
)
FAULTS = ("delay", "crash", "dstate", "hang", "fail")


def cache_directory() -> Path:
    """A folder of this user's own that outlives the test run and that other users can read."""
    path = Path(tempfile.gettempdir()) / f"nvml-simulator-{os.getuid()}"
    path.mkdir(mode=0o755, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        message = f"{path} belongs to another user"
        raise PermissionError(message)
    return path


@functools.cache
def library() -> Path:
    """The shared library of the source as it is; several processes may build at once."""
    compiler = os.environ.get("CC", "gcc")
    digest = hashlib.sha256(SOURCE.read_bytes() + repr((compiler, FLAGS)).encode()).hexdigest()[:16]
    target = cache_directory() / f"libnvidia-ml-{digest}.so"
    if not target.exists():
        handle, building = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(handle)
        try:
            subprocess.run(
                [compiler, *FLAGS, "-o", building, str(SOURCE), "-lm"], check=True, timeout=120
            )
            os.chmod(building, 0o755)
            os.replace(building, target)
        finally:
            Path(building).unlink(missing_ok=True)
    return target


@functools.cache
def _loaded() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library()))
    loaded.nvmlSimIsKey.restype = loaded.nvmlSimText.restype = ctypes.c_bool
    return loaded


class Simulator:
    """One simulated node: a scenario file and a folder to load the library from, both inside
    ``directory``.

    A second Simulator on the same directory goes on with the scenario that is there.
    """

    def __init__(
        self, directory: str | os.PathLike[str], gpus: int = 8, *, profile: str = "h100"
    ) -> None:
        self.directory = Path(directory)
        self.scenario = self.directory / "scenario"
        self.calls_path = self.directory / "calls"
        self.trace_path = self.directory / "trace"
        self._library = self.directory / "lib" / SONAME
        self._library.parent.mkdir(parents=True, exist_ok=True)
        self.show_library()
        if not self.scenario.exists():
            self._write({"gpus": str(gpus), "profile": profile})

    def environment(self) -> dict[str, str]:
        """What a child process needs beyond its own environment."""
        return {
            "LD_LIBRARY_PATH": str(self._library.parent),
            "NVML_SIM_SCENARIO": str(self.scenario),
        }

    def set(self, gpu: int | None, key: str, value: Value) -> None:
        """Set a key for one physical GPU, or with None for all. KeyError if it is none."""
        if not _loaded().nvmlSimIsKey(key.encode()):
            raise KeyError(key)
        text = str(int(value)) if isinstance(value, bool) else str(value)
        if "#" in text or "\n" in text:
            message = f"{key}: a value is one line without a comment"
            raise ValueError(message)
        self._write(self._read() | {self._full(gpu, key): text})

    def unset(self, gpu: int | None, key: str) -> None:
        """Go back to the default; no error where the key was not set."""
        entries = self._read()
        entries.pop(self._full(gpu, key), None)
        self._write(entries)

    def fault(
        self, kind: str, value: Value = 1, *, gpu: int | None = None, function: str | None = None
    ) -> None:
        """Arm a fault: delay (seconds), crash (segv), dstate (a path), hang, or fail
        (a return code).

        ``function`` is a symbol with or without its ``_vN``, a pattern, or ``init``.
        """
        if kind not in FAULTS:
            raise KeyError(kind)
        self.set(gpu, kind if function is None else f"{kind}.{function}", value)

    def clear_faults(self) -> None:
        """Disarm every fault of every GPU."""
        self._write({key: value for key, value in self._read().items() if not self._is_fault(key)})

    def order(self, *gpus: int) -> None:
        """The physical GPUs that are visible from now on, in this order; all by default."""
        if gpus:
            self.set(None, "order", ",".join(map(str, gpus)))
        else:
            self.unset(None, "order")

    def value(self, gpu: int | None, key: str) -> str:
        """The text that the library has for a key now, its defaults included."""
        buffer = ctypes.create_string_buffer(1024)
        path = str(self.scenario).encode()
        if not _loaded().nvmlSimText(
            path, -1 if gpu is None else gpu, key.encode(), buffer, len(buffer)
        ):
            raise KeyError(key)
        return buffer.value.decode()

    def hide_library(self) -> None:
        """From now on the library is not to be found: the driver is not installed."""
        self._library.unlink(missing_ok=True)

    def show_library(self) -> None:
        """Make the library loadable (again)."""
        if not self._library.is_symlink():
            self._library.symlink_to(library())

    def watch(self) -> None:
        """Start recording what ``trace`` and ``calls`` return."""
        self._write(self._read() | {"trace": str(self.trace_path), "calls": str(self.calls_path)})

    def calls(self) -> Counter[str]:
        """How often each symbol was called since ``watch``, by all processes."""
        return (
            Counter(self.calls_path.read_text().split()) if self.calls_path.exists() else Counter()
        )

    def trace(self) -> list[tuple[str, int, int]]:
        """Each init and shutdown since ``watch``, with pid and the users that it left."""
        lines = self.trace_path.read_text().splitlines() if self.trace_path.exists() else []
        return [(event, int(pid), int(users)) for event, pid, users in map(str.split, lines)]

    def pci_sysfs(self, root: str | os.PathLike[str], *, missing: Collection[int] = ()) -> None:
        """Write ``bus/pci/devices`` below ``root`` for every GPU but the ``missing``."""
        base = Path(root)
        names = base / "bus" / "pci" / "devices"
        names.mkdir(parents=True, exist_ok=True)
        for gpu in range(int(self.value(None, "gpus"))):
            address = self.value(gpu, "pci")[4:].lower()
            device = base / "devices" / f"pci{address[:7]}" / address
            (names / address).unlink(missing_ok=True)
            if gpu in missing:
                continue
            device.mkdir(parents=True, exist_ok=True)
            (names / address).symlink_to(os.path.relpath(device, names))
            identity = int(self.value(gpu, "pci_device_id"), 0)
            (device / "vendor").write_text(f"0x{identity & 0xFFFF:04x}\n")
            (device / "device").write_text(f"0x{identity >> 16:04x}\n")
            (device / "class").write_text("0x030200\n")
            (device / "numa_node").write_text(f"{self.value(gpu, 'numa_node')}\n")

    @staticmethod
    def _full(gpu: int | None, key: str) -> str:
        return key if gpu is None else f"gpu{gpu}.{key}"

    @staticmethod
    def _is_fault(key: str) -> bool:
        head, _, rest = key.partition(".")
        kind = rest.partition(".")[0] if head.startswith("gpu") and head[3:].isdigit() else head
        return kind in FAULTS or kind in {"field_fail", "no_driver"}

    def _read(self) -> dict[str, str]:
        pairs = (
            line.partition("=") for line in self.scenario.read_text().splitlines() if "=" in line
        )
        return {key.strip(): value.strip() for key, _, value in pairs}

    def _write(self, entries: dict[str, str]) -> None:
        """Replace the file whole, with a time of change that no earlier version had."""
        before = self.scenario.stat().st_mtime_ns if self.scenario.exists() else 0
        handle, path = tempfile.mkstemp(dir=self.directory, prefix=".scenario")
        with os.fdopen(handle, "w") as file:
            file.writelines(f"{key} = {value}\n" for key, value in entries.items())
        changed = max(before + 1, time.time_ns())
        os.utime(path, ns=(changed, changed))
        os.chmod(path, 0o644)
        os.replace(path, self.scenario)
