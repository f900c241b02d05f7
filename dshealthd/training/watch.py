"""The watch of a program that is not changed: heartbeats from the moment it imports torch.

Torch's hook for all optimizers, registered as torch is imported.

It begins in one of two ways:

- `DSHEALTHD_HEARTBEAT=1` in the environment: the distribution `dshealthd-training` brings a line in
  a `.pth` file, by which an interpreter
  imports this module as it starts, and only if the variable is set. Torch is not imported for it.
  Interpreters that read no `.pth` files (`python -S`), and an installation by PYTHONPATH alone, do
  not see the line.
- `python -m dshealthd.training script.py`, or `-m module`; `torchrun -m dshealthd.training
  script.py` starts ranks so.

Reported are steps, step times and memory, and the stages of steps where there is one model with the
parameters of that optimizer. Loss, gradient norm and phases take a call in the script, DeepSpeed
takes `attach(engine)`; optimizers whose `step` is compiled as a whole or replayed as a CUDA graph
are not seen.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from typing import TYPE_CHECKING, Any

from dshealthd.training.heartbeat import Heartbeat
from dshealthd.training.optimizer import AnyOptimizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

log = logging.getLogger("dshealthd.training")

MODULE = "torch.optim.optimizer"


class OptimizerImportHook(importlib.abc.MetaPathFinder):
    """Waits for torch's optimizers to be imported; then it goes."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - as the protocol wants
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Let the other finders find torch's module, and have its end of import noticed."""
        if name != MODULE:
            return None
        self.remove()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            execute(module)
            # The module enters sys.modules before it is executed, which is where the hook looks for
            # it.
            register()

        spec.loader.exec_module = loaded  # type: ignore[method-assign] # of this one loader, which is made for this module
        return spec

    def remove(self) -> None:
        """Stop waiting for the program's import of torch."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def register(**named: Any) -> Heartbeat:
    """Watch from now on the steps of the program's optimizers; torch is imported.

    `named` is for `Heartbeat`.
    """
    heartbeat = Heartbeat(**named)
    AnyOptimizer(heartbeat).register()
    return heartbeat


def start() -> None:
    """Watch a program: report the steps of its optimizers, as soon as torch is imported."""
    if MODULE in sys.modules:
        register()
    elif not any(isinstance(finder, OptimizerImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, OptimizerImportHook())
