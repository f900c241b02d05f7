"""The checks of a node, one file for each subject."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _found() -> tuple[Check[NodeContext], ...]:
    """Return the checks in the modules of this package, by name; a constant adds its check."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    found = {
        value.name: value
        for name in names
        for value in vars(importlib.import_module(f"{__name__}.{name}")).values()
        if isinstance(value, Check)
    }
    return tuple(found[name] for name in sorted(found))


CHECKS = _found()
