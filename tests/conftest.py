"""What holds for all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from dshealthd.agent import logs
from tests import frozen
from tests.schedule import (
    await_first,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
    tell_others,
)

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_runtest_logreport",
    "pytest_sessionfinish",
    "pytest_xdist_auto_num_workers",
    "pytest_xdist_make_scheduler",
]

# How fast examples are drawn says more of the machine than of the code.
PATIENT = settings(
    settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# Every run draws the same examples: only a change to the code turns it red. `./dev fuzz` draws new
# ones, and seventy times as many.
settings.register_profile("repeatable", PATIENT, derandomize=True, max_examples=15)
settings.register_profile("fuzz", PATIENT, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")


@pytest.hookimpl(trylast=True)  # the profile that the command line names has been loaded by then
def pytest_configure() -> None:
    """Draw the same examples, whichever tests ran before in this process.

    Hypothesis also draws constants that it finds in the source of the project's modules. Which of
    them are imported depends on the tests so far, so it must find none.
    """
    if settings().derandomize:
        pytest.MonkeyPatch().setattr(providers, "is_local_module_file", lambda _path: False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in given}))
    return True


def pytest_collection(session: pytest.Session) -> None:
    """Search for no garbage while tests are collected: there is none among so many new objects."""
    await_first(session.config)
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Search the tests and modules for garbage never again."""
    tell_others(session.config, collected=True)
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the end of all that still logs
def pytest_runtest_teardown() -> None:
    """Leave no log of the agent behind: its lines would appear between the results of tests."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler).__module__ == logs.__name__:
            root.removeHandler(handler)
            root.setLevel(logging.WARNING)
            logs.writer.flush(5.0)


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A directory that every user can get to.

    The parent of `tmp_path` is for its owner alone, and each start of pytest makes sure of that.
    """
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[frozen.Mount]:
    """A file system that can be frozen."""
    with frozen.mounted(tmp_path) as found:
        yield found
