"""The checks of a node, one file for each subject."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext


def _found() -> tuple[Check[NodeContext], ...]:
    """Return the checks that are constants of this package's modules, or in one, by name."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    values = [
        one
        for name in names
        for value in vars(importlib.import_module(f"{__name__}.{name}")).values()
        for one in (value if isinstance(value, tuple) else (value,))
    ]
    found = {value.name: value for value in values if isinstance(value, Check)}
    return tuple(found[name] for name in sorted(found))


CHECKS = _found()
