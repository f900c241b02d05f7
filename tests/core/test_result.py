"""Why a source could not be read, from the error of the system."""

from __future__ import annotations

import errno
import os

import pytest

from dshealthd.core.collector import Reason
from dshealthd.core.result import os_reason


@pytest.mark.parametrize(("number", "reason"), [
    (errno.ENOENT, Reason.NOT_FOUND),
    (errno.ENODEV, Reason.NOT_FOUND),
    (errno.ENXIO, Reason.NOT_FOUND),
    (errno.ENOTDIR, Reason.NOT_FOUND),
    (errno.EACCES, Reason.PERMISSION_DENIED),
    (errno.EPERM, Reason.PERMISSION_DENIED),
    (errno.EIO, Reason.IO_ERROR),
    (errno.ESTALE, Reason.IO_ERROR),
])  # fmt: skip
def test_reasons(number: int, reason: Reason) -> None:
    """What is gone, what may not be read, and what fails."""
    assert os_reason(OSError(number, os.strerror(number))) is reason
