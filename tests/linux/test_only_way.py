"""Nothing but `Root` opens what users name: a lint of the agent's own source.

Of the calls that open or look at a path, those of the rooms that know users' environments must take
a path that is spelt out here as the kernel's or the agent's own. Whoever adds one answers first who
chose the path: if a user did, it is opened by `dshealthd.linux.process_root`, which stands on
`regular_files`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import dshealthd

SOURCE = Path(dshealthd.__file__).parent
HOMES = {SOURCE / "linux" / name for name in ("process_root.py", "regular_files.py")}
ROOMS = ("jobs", "evidence", "collectors", "linux", "nvrx")
OPENERS = re.compile(
    "open|listdir|scandir|l?stat|readlink|walk|statvfs|l?exists|isdir|isfile|realpath|parsed|"
    "read_(text|bytes|existing)|iterdir|r?glob|is_file|is_dir|resolve|write_(text|bytes)|rmtree"
)
KERNEL = re.compile(
    r"(self\.)?(_context\.)?_?host\.(proc|sys|device)\((?!.*environment)"
    r"|f'\{(self\._proc|own|place|base)\}/[^{]*(\{pid\}|\{slot\})?[^{]*'$"
    r"|(self\.)?(_proc|_host\.procfs)$|'/proc/self/[^{]*'$"
)
"""Files of the kernel, whose names no user chooses; `place` is made from these in each module."""
OWN = {
    "collectors/filesystem.py": "paths of the configuration",
    "collectors/kernel_log.py": "the kernel's log",
    "collectors/network.py": "sysfs",
    "evidence/bundle.py": "the agent's own directory",
    "evidence/command.py": "the agent's own directory",
    "jobs/launches/breakpoints.py": "the libc of this process",
    "jobs/nccl/names.py": "a file of the package",
    "linux/forked.py": "procfs and /dev/null",
    "linux/journal.py": "journald's files of the system, which root alone writes",
    "linux/kmsg.py": "the kernel's log",
    "linux/infiniband.py": "sysfs",
    "linux/pci.py": "sysfs",
}
"""Modules that open what is not a process's, and whose paths come from elsewhere."""
SINGLE = {
    "collectors/disk.py": ("place",),  # procfs and sysfs
    "collectors/job_activity.py": ("place",),  # procfs
    "collectors/job_checkpoint.py": ("page[0]",),  # a descriptor of a heartbeat page
    # a fixed file of the node; driver/nvidia/gpus
    "collectors/nccl_inspector.py": ("self.host.root(SITE_PLUGIN)", "place"),
    # fixed paths of the node; of the node
    "collectors/software.py": (
        "self.host.root(paths[-1])",
        "self.host.root('etc/nccl.conf')",
        "self.host.root(path)",
        "self.host.root(f'{library}/libibverbs.so.1')",
    ),
    "evidence/flight_recorder.py": ("descriptor",),  # opened by Root
    "evidence/stacks.py": ("program",),  # py-spy, beside the agent or in its PATH
    # descriptors of a process in procfs; memory, by its mount
    "jobs/heartbeats/page.py": ("directory", "f'/proc/self/fd/{held}'"),
    # a look, in a directory opened by Root; opened by Root
    "jobs/nccl/inspector.py": ("name", "directory", "descriptor"),
    "jobs/network_devices.py": ("place",),  # sysfs
    # procfs
    "linux/activity.py": ("f'{task}/stat'", "f'{task}/schedstat'", "place", "f'{place}/{thread}'"),
    "linux/gpu_direct.py": ("place",),  # sysfs
    # of the node; named by the service's own settings, root's
    "linux/imex.py": ("host.root(CONFIG)", "host.root(path)"),
    "linux/mounts.py": ("f'/proc/self/fdinfo/{descriptor}'",),  # procfs, of the agent itself
    "linux/nvswitch.py": ("host.root(ENABLED)",),  # a fixed link of the node
    "linux/peer_user.py": ("f'{procfs}/self/net/{table}'",),  # procfs
    "linux/process.py": ("place", "host.procfs", "entry.path"),  # procfs
    "linux/process_limits.py": ("own",),  # procfs
    # of the node, below the fixed list; of the node, a fixed list
    "linux/security.py": ("place", "host.root(directory)"),
    # descriptors of a process in procfs; a descriptor of a process in procfs
    "linux/socket_owners.py": ("directory", "self._descriptor", "entry.name"),
    "linux/starvation.py": ("f'/proc/{pid}/schedstat'",),  # procfs, of the agent's own child
    "linux/tcp_sockets.py": ("namespace",),  # procfs
}
"""Paths of a module, as it spells them, and what they are."""
_WAYS_OUT = re.compile(r"(^|/)(root|cwd)/|/(root|cwd)$")


def opened(source: str) -> list[tuple[int, str]]:
    """Return line and path of each call that opens or looks at something."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name, owner = ast.unparse(function), ""
        if isinstance(function, ast.Attribute):
            name, owner = function.attr, ast.unparse(function.value)
        elif name == "read" and node.args:  # dshealthd.core.host.read
            name = "read_text"
        if not OPENERS.fullmatch(name) or owner == "root" or owner.startswith("Root."):
            continue
        path = node.args[0] if node.args else None
        module = owner in {"os", "os.path", "io", "shutil", ""}
        found.append((node.lineno, ast.unparse(path) if module and path is not None else owner))
    return found


def strangers(module: str, source: str) -> list[str]:
    """Return the calls of a module that open what may be a user's."""
    if module in OWN:
        return []
    return [
        f"{module}:{line}: {path}"
        for line, path in opened(source)
        if not KERNEL.match(path) and path not in SINGLE.get(module, ())
    ]


def ways_out(source: str) -> list[int]:
    """Return the lines on which a path leads through a process's root or working directory."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "\n" not in node.value
        and " " not in node.value
        and _WAYS_OUT.search(node.value)
    ]


def test_no_other_way() -> None:
    """Each path that is opened in the rooms that know users' environments is nobody's to choose."""
    found = [
        stranger
        for room in ROOMS
        for file in sorted((SOURCE / room).rglob("*.py"))
        if file not in HOMES
        for stranger in strangers(str(file.relative_to(SOURCE)), file.read_text(encoding="utf-8"))
    ]
    assert not found


def test_nothing_is_listed_in_vain() -> None:
    """A module or a path that is no longer opened is not on the lists."""
    paths = {
        module: {
            path for _, path in opened((SOURCE / module).read_text()) if not KERNEL.match(path)
        }
        for module in (*OWN, *SINGLE)
    }
    assert all(paths.values())
    assert all(paths[module] >= set(listed) for module, listed in SINGLE.items())


def test_memory_of_processes() -> None:
    """Who reads it waits while the process holds its lock, which a user can make last: in a worker
    that has entered the process, in a thread, or in a child. A page that a user can withhold is
    asked for by nobody.
    """
    for files, expected in (
        ("environ|cmdline", {
            "collectors/job_activity.py",
            "jobs/installation.py",
            "jobs/processes.py",
            "linux/socket_owners.py",
        }),
        ("mem", {"linux/process.py"}),
    ):  # fmt: skip
        reads = re.compile(rf"[}}]/({files})\b")
        readers = [file for file in SOURCE.rglob("*.py") if reads.search(file.read_text())]
        assert {str(file.relative_to(SOURCE)) for file in readers} == expected


def test_no_path_through_a_process_s_root() -> None:
    """`/proc/<pid>/root` and `cwd` are entered in one place."""
    found = [
        f"{file}:{line}"
        for file in sorted(SOURCE.rglob("*.py"))
        if file not in HOMES
        for line in ways_out(file.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "open(process.environment['X'])",
        "os.open(prefix + '/pyvenv.cfg', os.O_RDONLY)",
        "read(f'{base}/{name}')",
        "read_bytes(host.proc(process.environment['X']))",
        "Path(process.environment['X']).read_text()",
        "os.path.exists(f'{root}/usr/lib/libnccl.so.2')",
        "os.listdir(site)",
    ],
)
def test_other_ways_are_seen(code: str) -> None:
    """The lint sees the ways in which users' files were opened before, and others."""
    assert strangers("jobs/new.py", code)


def test_ways_through_a_root_are_seen() -> None:
    """So does that for roots."""
    assert ways_out("host.proc(f'{pid}/root/etc/nccl.conf')")
    assert ways_out("f'{place}/cwd'")
    assert not ways_out("'root'")
