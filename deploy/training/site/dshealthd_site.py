"""What `import torch` calls in each process of a site that follows its trainings.

It stands in an archive of its own on PYTHONPATH, is the entry point `torch.backends` there, and
finds `dshealthd.training` beside the archive. Nothing is done in a process that no launcher has
started, and in others nothing but to wait for a step of an optimizer: data loaders, compilers and
other children of a rank make none. Python 3.9 or newer, and no module that torch has not imported.

If the site has put NCCL's Inspector beside the archive, NCCL is told to load it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""A variable of each launcher."""
PLUGIN = "libnccl-profiler-inspector.so"
OURS = ("NCCL_PROFILER", "NCCL_INSPECTOR")
"""How the variables begin that are set only where a job has none of them."""
CONFIGURATIONS = ("~/.nccl.conf", "/etc/nccl.conf")
"""NCCL sets what these say, unless it is set (src/misc/param.cc)."""
DIRECTORY = "/tmp/nccl-inspector-%d"  # noqa: S108 - not used if it is somebody else's
"""Of one user. The agent looks for it there: a process's own changes do not show in `/proc`."""
OPEN_TO_OTHERS = 0o022
FOLDER, KIND = 0o040000, 0o170000  # as in `stat`, which torch need not have imported


def load() -> None:
    """Wait for the first step; torch calls this at the end of its import."""
    environ = os.environ
    if environ.get("DSHEALTHD_HEARTBEAT") == "0":
        decline()
    elif any(map(environ.__contains__, RANKS)):
        inspect(os.path.join(os.path.dirname(os.path.dirname(__file__)), PLUGIN))
        optimizers = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(FirstStep(getattr(sys.modules["torch"], "compiler", None)))


def decline() -> None:
    """Take the archive out of what children get: DeepSpeed's launcher passes `PYTHONPATH` on over
    ssh, and not the variable by which a user declines.
    """
    paths = os.environ.get("PYTHONPATH", "").split(":")
    kept = ":".join(path for path in paths if path != os.path.dirname(__file__))
    if kept:
        os.environ["PYTHONPATH"] = kept
    elif paths != [""]:
        del os.environ["PYTHONPATH"]


def inspect(plugin: str) -> None:
    """Have NCCL load its Inspector, if the site has it and this job has no profiler of its own."""
    if not os.access(plugin, os.R_OK) or any(name.startswith(OURS) for name in os.environ):
        return
    place = DIRECTORY % os.getuid()
    try:
        if any(map(_has_own, (os.environ.get("NCCL_CONF_FILE") or "", *CONFIGURATIONS))):
            return
        try:
            os.mkdir(place, 0o700)
        except FileExistsError:  # of an earlier job
            if not os.path.isdir(place):
                return
        # Here and now, and not in the shell of another node: in a directory of another user's, a
        # link would have the plugin overwrite any file of this one's.
        found = os.lstat(place)
    except (OSError, ValueError):
        return
    mode = found.st_mode & (KIND | OPEN_TO_OTHERS)
    if mode == FOLDER and found.st_uid == os.getuid():
        os.environ["NCCL_INSPECTOR_ENABLE"] = os.environ["NCCL_INSPECTOR_PROM_DUMP"] = "1"
        os.environ["NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"] = "30000000"  # its least
        os.environ["NCCL_INSPECTOR_DUMP_DIR"] = place
        os.environ["NCCL_PROFILER_PLUGIN"] = plugin


def _has_own(configuration: str) -> bool:
    """Return whether a configuration of NCCL names a profiler."""
    try:  # without waiting, should it be no file
        descriptor = os.open(os.path.expanduser(configuration), os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        text = os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
    return any(name.encode() in text for name in OURS)


class FirstStep:
    """The hook of all optimizers: with the first step it decides whether this process is followed.

    It stays, as torch goes through its hooks meanwhile.
    """

    def __init__(self, compiler: Any) -> None:
        self._compiling: Callable[[], bool] = getattr(compiler, "is_compiling", bool)
        self._follow: Callable[..., object] = self._begin

    def __call__(self, optimizer: Any, arguments: Any, named: Any) -> None:
        """Report a step; torch calls this."""
        if not self._compiling():
            self._follow(optimizer, arguments, named)

    def _begin(self, *step: Any) -> None:
        self._follow = _nothing
        try:
            self._follow = _hook() or _nothing
        except Exception:  # noqa: BLE001 - a defect of ours may not end a training
            return
        self._follow(*step)


def _nothing(*_: Any) -> None:
    pass


def _hook() -> Callable[..., object] | None:
    """Return what follows this process, from beside the archive: no path and no file is left."""
    directory, writes_none = os.path.dirname(os.path.dirname(__file__)), sys.dont_write_bytecode
    sys.path.insert(0, directory)
    sys.dont_write_bytecode = True
    try:
        from dshealthd.training import site

        return site.hook()
    finally:
        sys.dont_write_bytecode = writes_none
        sys.path.remove(directory)
