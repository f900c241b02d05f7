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
OPENERS = {
    *("open", "listdir", "scandir", "stat", "lstat", "readlink", "walk", "statvfs", "exists"),
    *(
        "isdir",
        "isfile",
        "lexists",
        "realpath",
        "read_text",
        "read_bytes",
        "read_existing",
        "parsed",
    ),
    *(
        "iterdir",
        "glob",
        "rglob",
        "is_file",
        "is_dir",
        "resolve",
        "write_text",
        "write_bytes",
        "rmtree",
    ),
}
KERNEL = re.compile(
    r"(self\.)?(_context\.)?_?host\.(proc|sys|device)\((?!.*environment)"
    r"|f'\{(self\._proc|own|place|base)\}/[^{]*(\{pid\}|\{slot\})?[^{]*'$"
    r"|(self\.)?(_proc|_host\.procfs)$|'/proc/self/[^{]*'$"
)
"""Files of the kernel, whose names no user chooses; `place` is made from these in each module."""
OWN = {
    "collectors/filesystem.py": "paths of the configuration",
    "collectors/infiniband.py": "sysfs",
    "collectors/kernel.py": "procfs",
    "collectors/kernel_log.py": "the kernel's log",
    "collectors/maintenance.py": "the agent's own directory",
    "collectors/memory.py": "procfs",
    "collectors/network.py": "sysfs",
    "collectors/pressure.py": "procfs",
    "collectors/rendezvous.py": "procfs",
    "collectors/tcp_limits.py": "procfs",
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
    ("collectors/nccl_inspector.py", "place"): "driver/nvidia/gpus",
    ("collectors/open_files.py", "place"): "procfs",
    ("collectors/software.py", "self.host.root(path)"): "fixed paths of the node",
    ("collectors/software.py", "self.host.root(paths[-1])"): "fixed paths of the node",
    ("collectors/software.py", "self.host.root('etc/nccl.conf')"): "of the node",
    ("collectors/software.py", "self.host.root(f'{library}/libibverbs.so.1')"): "of the node",
    ("evidence/flight_recorder.py", "descriptor"): "opened by Root",
    ("evidence/stacks.py", "program"): "py-spy, beside the agent or in its PATH",
    ("jobs/heartbeats/page.py", "directory"): "descriptors of a process in procfs",
    ("jobs/heartbeats/page.py", "f'{directory}/{number}'"): "held by O_PATH, not opened",
    ("jobs/heartbeats/page.py", "f'/proc/self/fd/{held}'"): "memory, by its mount",
    ("linux/process_limits.py", "own"): "procfs",
    ("linux/process.py", "place"): "procfs",
    ("linux/socket_waits.py", "f'{place}/net/{table}'"): "procfs",
    ("collectors/job_activity.py", "place"): "procfs",
    ("collectors/nccl_inspector.py", "self.host.root(SITE_PLUGIN)"): "a fixed file of the node",
    ("linux/activity.py", "f'{task}/stat'"): "procfs",
    ("linux/activity.py", "f'{task}/schedstat'"): "procfs",
    ("linux/activity.py", "f'{place}/{thread}/status'"): "procfs",
    ("linux/activity.py", "f'{place}/{thread}/schedstat'"): "procfs",
    ("linux/activity.py", "place"): "procfs",
    ("jobs/nccl/inspector.py", "descriptor"): "opened by Root",
    ("jobs/nccl/inspector.py", "directory"): "opened by Root",
    ("jobs/nccl/inspector.py", "name"): "a look, in a directory opened by Root",
    ("jobs/network_devices.py", "place"): "sysfs",
    ("jobs/ras/peer.py", "entry.path"): "descriptors of a process in procfs",
    ("linux/ipv6.py", "entry.path"): "descriptors of a process in procfs",
    ("jobs/network_devices.py", "f'{place}/flags'"): "sysfs",
    ("jobs/ras/peer.py", "place"): "descriptors of the agent's peers in procfs",
    ("linux/socket_owners.py", "directory"): "descriptors of a process in procfs",
    ("linux/socket_owners.py", "entry.name"): "descriptors of a process in procfs",
    ("linux/socket_owners.py", "self._descriptor"): "a descriptor of a process in procfs",
    ("linux/peer_user.py", "f'{procfs}/self/net/{table}'"): "procfs",
    ("linux/tcp_sockets.py", "namespace"): "procfs",
    ("collectors/disk.py", "place"): "procfs and sysfs",
    ("linux/security.py", "host.root(directory)"): "of the node, a fixed list",
    ("linux/security.py", "place"): "of the node, below the fixed list",
    ("linux/imex.py", "host.root(CONFIG)"): "of the node",
    ("linux/imex.py", "host.root(path)"): "named by the service's own settings, root's",
    ("linux/gpu_direct.py", "place"): "sysfs",
    ("linux/nvswitch.py", "host.root(ENABLED)"): "a fixed link of the node",
    ("linux/daemons.py", "host.procfs"): "procfs",
    ("linux/daemons.py", "place"): "procfs",
    ("linux/pci.py", "base"): "sysfs",
    ("linux/pci.py", "f'{place}/{_VIRTUAL}'"): "sysfs",
    ("linux/pci.py", "place"): "sysfs",
    ("linux/process.py", "host.procfs"): "procfs",
    ("linux/starvation.py", "f'/proc/{pid}/schedstat'"): "procfs, of the agent's own child",
    ("linux/mounts.py", "f'/proc/self/fdinfo/{descriptor}'"): "procfs, of the agent itself",
    ("linux/starvation.py", "'/proc/thread-self/schedstat'"): "procfs, of the agent itself",
}
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
        if name not in OPENERS or owner == "root" or owner.startswith("Root."):
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
        if not KERNEL.match(path) and (module, path) not in SINGLE
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
