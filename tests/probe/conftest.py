"""Tests of probes may be coroutines."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from _pytest.python import Function

from tests.probe.peering import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Function) -> bool | None:
    """Run a coroutine; a blocking call in its loop is an error, unless it `may_block`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    scene = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if hasattr(pyfuncitem.obj, "may_block"):
        asyncio.run(scene)
    else:
        run(scene)
    return True
