"""A process that has executed a set-user-id program: of one user, with root's rights."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import until

MIXED_RIGHTS = "the process has the rights of more than one user"
"""Why nothing is read for such a process."""


@contextlib.contextmanager
def set_user_id_program(place: Path, user: int) -> Iterator[int]:
    """Run root's set-user-id `sleep` from a place that a user can get to, and give its pid."""
    program = place / "sleep"
    shutil.copy("/bin/sleep", program)
    os.chown(program, 0, 0)
    program.chmod(0o4755)
    with subprocess.Popen([str(program), "600"], user=user, group=user, extra_groups=[]) as process:
        try:
            ids = [str(user), "0", "0", "0"]
            # A mount with nosuid gives none of root's rights.
            until(lambda: _ids(process.pid) == ids, lambda: f"the user ids {ids}")
            yield process.pid
        finally:
            process.kill()


def _ids(pid: int) -> list[str]:
    """Return the real, effective, saved and file system user ids of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    return next(line.split()[1:] for line in status.splitlines() if line.startswith("Uid:"))
