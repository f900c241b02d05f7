"""Heartbeats for an unchanged program, from the moment it imports torch.

Torch's hook for all optimizers is registered when torch is imported.

There are two ways to start it:

- `DSHEALTHD_HEARTBEAT=1` in the environment. The distribution `dshealthd-training` installs a
  `.pth` file whose line makes an interpreter import this module at startup, only if the variable
  is set. It does not import torch. The line has no effect in interpreters that read no `.pth` files
  (`python -S`), nor if the package is only on PYTHONPATH.
- `python -m dshealthd.training script.py`, or `-m module`. `torchrun -m dshealthd.training
  script.py` starts ranks this way.

It reports steps, step times, waits for other ranks, losses and memory, and the stages of steps if
exactly one model has the parameters of that optimizer; of DeepSpeed what `attach(engine)` does. So
Hugging Face's Trainer, Accelerate and Lightning are followed, alone or over DeepSpeed. Gradient
norm and phases need a call in the script. Optimizers whose `step` is compiled as a whole or
replayed as a CUDA graph are not seen.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dshealthd.training.heartbeat import Heartbeat
from dshealthd.training.optimizer import AnyOptimizer
from dshealthd.training.site import is_interactive

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

log = logging.getLogger("dshealthd.training")

MODULE = "torch.optim.optimizer"


class OptimizerImportHook(importlib.abc.MetaPathFinder):
    """A finder that waits for the import of torch's optimizers, then removes itself."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - as the protocol wants
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Let the other finders find torch's module, and register once it is imported."""
        if name != MODULE:
            return None
        self.remove()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader

        def loaded(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            # The hook looks for the module in sys.modules, where it is before it is executed.
            _begin()

        # this loader serves this module alone
        loader.exec_module = loaded  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Stop waiting for the import of torch.

        In a list of its own: an import in another thread, which goes through the list just now,
        would skip a finder.
        """
        if self in sys.meta_path:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


def register() -> Heartbeat:
    """Report the steps of the program's optimizers from now on; torch must be imported."""
    heartbeat = Heartbeat()
    AnyOptimizer(heartbeat).register()
    return heartbeat


def _begin() -> None:
    """Report the steps from now on, but not those of a notebook: the environment may be that of
    all its user's programs.
    """
    if not is_interactive():
        register()


def start() -> None:
    """Report the steps of the program's optimizers as soon as torch is imported."""
    if MODULE in sys.modules:
        _begin()
    elif not any(isinstance(finder, OptimizerImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, OptimizerImportHook())
