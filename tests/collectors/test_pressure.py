"""Pressure stall information where the kernel has none; `test_golden.py` has its values."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from dshealthd.collectors import pressure
from dshealthd.core.result import CollectionOutcome
from tests.collectors.bench import Bench


@pytest.mark.parametrize(("number", "outcome"), [
    (errno.ENOENT, CollectionOutcome.NOT_AVAILABLE),  # without CONFIG_PSI
    (errno.EOPNOTSUPP, CollectionOutcome.NOT_AVAILABLE),  # without psi=1
    (errno.EIO, CollectionOutcome.ERROR),
])  # fmt: skip
def test_without_it(
    number: int, outcome: CollectionOutcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel without it, or in which it is off, lacks nothing; another error is one."""

    def read(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pressure, "read_parsed", read)
    assert Bench("pressure", tmp_path).collect().outcome is outcome
