"""SELinux mode of this node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dshealthd.core.host import read

if TYPE_CHECKING:
    from dshealthd.core.host import Host

_MODES = {"0": "permissive", "1": "enforcing"}


def mode(host: Host) -> str:
    """Return SELinux's mode: `enforcing`, `permissive`, `disabled`, or `unknown` for other values.

    OSError if it cannot be read.
    """
    try:
        state = read(host.sys("fs/selinux/enforce")).strip()
    except FileNotFoundError:
        os.stat(host.sys("fs"))  # without sysfs nothing is known
        return "disabled"
    return _MODES.get(state, "unknown")
