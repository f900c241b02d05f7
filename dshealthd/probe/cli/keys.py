"""`dshealthd keys`: make the key file that all nodes share, and rotate it without a missed round.

A node signs with the first key of its file and accepts every key in it. A rotation therefore takes
three files, each distributed to all nodes before the next is made: the first accepts the new key,
the second signs with it, the third drops the old one. A comment in the file records the step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from dshealthd.core.text import print_lines
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.peers.credentials import CredentialError, parse_keys, read_secret

if TYPE_CHECKING:
    from dshealthd.config.config import Config

DEFAULT = Path("/etc/dshealthd/probe.key")
KEY_BYTES = 32
"""Length of a new key, 256 bits; in the file it takes twice as many characters."""
STEPS = (
    "",
    "step 1 of 3: the new key is accepted, the old one signs",
    "step 2 of 3: the new key signs, the old one is accepted",
)
_STEP = re.compile(rb"^# rotation, step ([12]) of 3", re.MULTILINE)


class KeysError(Exception):
    """The action is not possible; the message says why."""


def keys(loaded: Config, action: str, file: str | None) -> int:
    """Make, rotate or show the key file; on failure, print why and return 1."""
    configured = loaded.section(ProbeOptions).peer.key_file or DEFAULT
    if "/" not in str(configured):  # systemd's credential, which it loads from the usual place
        configured = DEFAULT
    path = Path(file) if file is not None else configured
    try:
        {"new": new, "rotate": rotate, "show": show}[action](path)
    except (KeysError, CredentialError, OSError, ValueError, ArithmeticError) as error:
        detail = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, FileNotFoundError) and action != "new":
            detail += "; `dshealthd keys new` makes it, --file names another"
        print_lines(f"dshealthd keys {action}: {path}: {detail}", error=True)
        return 1
    return 0


def new(path: Path) -> None:
    """Make a key file; FileExistsError if there is one already, which may be in use."""
    _write(path, [_key()], 0)
    print_lines(f"{path}: made")
    show(path)
    print_lines(
        "Copy it to every node, owner root, mode 0600; then set probe.peer.key_file to its path."
    )


def rotate(path: Path) -> None:
    """Advance a key rotation by one step, or begin one."""
    found, step = _read(path)
    if len(found) == 1:
        after, step = [found[0], _key()], 1
    elif step == 1:
        after, step = [found[1], found[0]], 2
    elif step == 2:  # noqa: PLR2004 - of three steps
        after, step = [found[0]], 0
    else:
        raise KeysError("holds two keys and does not say which is new; remove the old one by hand")
    _replace(path, after, step)
    show(path)
    if step:
        print_lines("Copy this file to every node, then run `dshealthd keys rotate` again.")
    else:
        print_lines("Copy this file to every node to complete the rotation.")


def show(path: Path) -> None:
    """Print the fingerprints of a file's keys, which reveal nothing about the keys themselves."""
    found, step = _read(path)
    for number, key in enumerate(found):
        role = "signs" if number == 0 else "is accepted"
        print_lines(f"{path}: key {hashlib.sha256(key).hexdigest()[:12]} {role}")
    if step:
        print_lines(f"{path}: rotation, {STEPS[step]}")


def _key() -> bytes:
    return secrets.token_hex(KEY_BYTES).encode()


def _read(path: Path) -> tuple[tuple[bytes, ...], int]:
    """Return the keys of a file and its rotation step, 0 outside a rotation."""
    data = read_secret(path)
    match = _STEP.search(data)
    return parse_keys(data), int(match[1]) if match is not None else 0


def _replace(path: Path, keys: list[bytes], step: int) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # left by an interrupted rotation
    try:
        _write(temporary, keys, step)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write(path: Path, keys: list[bytes], step: int) -> None:
    """Write a new key file that only its owner can read, and wait until it is on disk."""
    lines = [b"# dshealthd: the key that all nodes share. Whoever has it speaks for any node."]
    if step:
        lines.append(f"# rotation, {STEPS[step]}".encode())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"\n".join([*lines, *keys]) + b"\n")
        file.flush()
        os.fsync(descriptor)
