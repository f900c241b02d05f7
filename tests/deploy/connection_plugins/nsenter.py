"""A connection of Ansible into a booted machine of the tests: nsenter by the pid of its init."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: nsenter
short_description: enter the namespaces of a process
description: Runs commands in all namespaces of a process, as root.
author: dshealthd developers
options:
  pid:
    description: the process
    required: true
    vars:
      - name: ansible_nsenter_pid
"""
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Connection(ConnectionBase):  # type: ignore[misc] # Ansible has no types here
    """Enters the namespaces of one process."""

    transport = "nsenter"
    has_pipelining = True

    def _connect(self) -> Connection:
        """Do nothing: each command enters by itself."""
        self._connected = True
        return self

    def _run(self, *command: str, data: bytes | None) -> tuple[int, bytes, bytes]:
        pid = str(self.get_option("pid"))
        enter = ["nsenter", "--target", pid, "--all", "--", "/usr/bin/env", "-i", "--chdir=/"]
        done = subprocess.run(
            [*enter, PATH, "LANG=C.UTF-8", "HOME=/root", *command],
            input=data or b"",
            capture_output=True,
            check=False,
            timeout=600,
        )
        return done.returncode, done.stdout, done.stderr

    def exec_command(
        self,
        cmd: str,
        in_data: bytes | None = None,
        sudoable: bool = True,  # noqa: FBT001, FBT002, ARG002 - Ansible's own
    ) -> tuple[int, bytes, bytes]:
        """Run a shell command."""
        return self._run("/bin/sh", "-c", cmd, data=in_data)

    def put_file(self, in_path: str, out_path: str) -> None:
        """Copy a file into the machine."""
        code, _, err = self._run(
            "/bin/sh", "-c", f"cat > '{out_path}'", data=Path(in_path).read_bytes()
        )
        if code:
            raise OSError(err.decode())

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Copy a file out of the machine."""
        code, out, err = self._run("cat", in_path, data=None)
        if code:
            raise OSError(err.decode())
        Path(out_path).write_bytes(out)

    def close(self) -> None:
        """Do nothing."""
        self._connected = False
