"""Genuine sshds on the loopback interface, each for a key and a port of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.processes import free_port
from tests.command_line import shell_script
from tests.waiting import until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIG = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {directory}/host
PidFile {directory}/sshd.pid
AuthorizedKeysFile {directory}/{authorized}
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PubkeyAuthentication yes
PermitRootLogin yes
"""
CLIENT = """
Host {without_key}
    IdentityFile {directory}/other
Host * !{without_key}
    IdentityFile {directory}/user
Host *
    Port {port}
    IdentitiesOnly yes
    UserKnownHostsFile {directory}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""
WITHOUT_KEY = "127.0.0.11"
"""A host to which the client has no key."""


@contextlib.contextmanager
def sshd(directory: Path, port: int | None = None) -> Iterator[Path]:
    """Give an ssh that reaches 127.0.0.1 and 127.0.0.2, on a free port unless one is given."""
    if SSHD is None:
        pytest.skip("sshd is not installed")
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # what its init script does
    port = port or free_port()
    for name in ("host", "user", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True
        )
    shutil.copy(directory / "user.pub", directory / "authorized")
    (directory / "known_hosts").write_text(
        "".join(
            f"[{host}]:{port} {(directory / 'host.pub').read_text()}"
            for host in ("127.0.0.1", "127.0.0.2", WITHOUT_KEY)
        )
    )
    config = CONFIG.format(port=port, directory=directory, authorized="authorized")
    config += f"ListenAddress {WITHOUT_KEY}\n"
    (directory / "sshd_config").write_text(config)
    (directory / "ssh_config").write_text(
        CLIENT.format(port=port, directory=directory, without_key=WITHOUT_KEY)
    )
    client = shell_script(directory / "ssh", f'exec ssh -F {directory}/ssh_config "$@"')
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", directory / "sshd_config"],
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    try:
        address = ("127.0.0.1", port)
        log_so_far = (directory / "log").read_text
        until(lambda: socket.create_connection(address, 5), log_so_far, 60, (OSError,)).close()
        yield client
    finally:
        process.terminate()
        process.wait(60)
