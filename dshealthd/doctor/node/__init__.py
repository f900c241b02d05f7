"""The checks of a node, one file each."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.doctor.check import Check
    from dshealthd.doctor.node_context import NodeContext


def _found() -> tuple[Check[NodeContext], ...]:
    """Return the check of every module in this package; adding a module adds its check."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}").CHECK for name in modules)


CHECKS = _found()
