"""Modules that a test imports when it first uses them.

Each worker reads every file of tests: an import of torch at its head would take three seconds of
each.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import pytest


class Lazy:
    """Stands for a module; the file of tests is skipped where torch is not installed."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec("torch") is None:
            pytest.skip("takes torch", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "_C":  # as pytest asks of all that a file has
            raise AttributeError(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that NumPy is not installed
            module = importlib.import_module(self._name)
        return getattr(module, name)
