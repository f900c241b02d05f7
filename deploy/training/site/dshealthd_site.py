"""What `import torch` calls in each process of a site that follows its trainings.

It stands in an archive of its own on PYTHONPATH, is the entry point `torch.backends` there, and
finds `dshealthd.training` beside the archive. Nothing is done in a process that no launcher has
started, and in others nothing but to wait for a step of an optimizer: data loaders, compilers and
other children of a rank make none. Python 3.9 or newer, and no module that torch has not imported.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""A variable of each launcher."""


def load() -> None:
    """Wait for the first step; torch calls this at the end of its import."""
    environ = os.environ
    if environ.get("DSHEALTHD_HEARTBEAT") != "0" and any(map(environ.__contains__, RANKS)):
        optimizers = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(FirstStep(getattr(sys.modules["torch"], "compiler", None)))


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
