"""Files in `path.state`, which survive a restart of the agent.

The directory may belong to the user `dshealthd` while root's commands use it, so a name there may
be a link or a FIFO: what is written is new, and what is read is a file.

This module is a program, too, which every write starts: what only its parent needs is imported
there, as subprocess would double its CPU time.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import sys

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE = 0o644  # they hold no secrets, and the agent may later run as another user

MEMORY = 256 << 20
"""Limit on the private memory, in bytes, of a child that touches a disk."""


def replace(path: str | os.PathLike[str], content: bytes, *, durable: bool) -> None:
    """Replace a state file; after an OSError or a kill at any point, the old one is intact.

    `durable` waits for the disk, so that the file also survives a reboot: call it in a thread.
    """
    temporary = f"{os.fspath(path)}.new"
    try:
        _unlink(temporary)  # left by a write that was killed, or put there by somebody else
        descriptor = os.open(temporary, _NEW, _MODE)
        try:
            os.fchmod(descriptor, _MODE)  # whatever the umask
            while content:
                content = content[os.write(descriptor, content) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        _unlink(temporary)
        raise


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # it does not exist, or what creates it next fails in the same way
        return


def read(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return at most `limit` bytes of a state file; OSError, also for what is not a file."""
    # Opening a FIFO must not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
        return file.read(limit)


def make_directory(path: str) -> None:
    """Create a state directory and its parents; OSError, also if no file can be created there."""
    os.makedirs(path, 0o750, exist_ok=True)
    if not os.access(path, os.W_OK):
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        code = errno.EROFS if read_only else errno.EACCES
        raise OSError(code, os.strerror(code), path)


def replace_in_child(path: str, content: bytes, *, durable: bool = False) -> None:
    """Call `replace` in a child. Raise OSError. Call it in a thread."""
    _in_child("sync" if durable else "replace", path, content)


def read_in_child(path: str, limit: int) -> bytes:
    """Return at most `limit` bytes of a state file, or raise OSError. Call it in a thread."""
    return _in_child("read", path, str(limit).encode())


def names_in_child(path: str) -> list[str]:
    """Return the names in a state directory, or raise OSError. Call it in a thread."""
    printed = _in_child("list", path)
    return [os.fsdecode(name) for name in printed.split(b"\0") if name]


def set_aside_in_child(path: str) -> None:
    """Rename an invalid state file to `*.bad`, or raise OSError. Call it in a thread."""
    _in_child("aside", path)


def make_directory_in_child(path: str) -> None:
    """Call `make_directory` in a child. Raise OSError. Call it in a thread."""
    _in_child("mkdir", path)


def _in_child(operation: str, path: str, content: bytes = b"") -> bytes:
    """Touch the state's disk in a separate process, and return its output, or raise OSError.

    A process that hangs with its disk cannot be killed, even if only one of its threads hangs: the
    agent would keep its port and its pid. So the agent's thread waits for a child, and that wait
    ends with the agent. If no child starts, that is a StartError.
    """
    import subprocess

    try:
        child = subprocess.Popen(  # noqa: S603 - this very file
            # Without the environment and site-packages: nothing is imported that others can write,
            # and less is loaded.
            [sys.executable, "-I", "-S", __file__, operation, os.path.abspath(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        # Not at the top: the child has none of our modules.
        from dshealthd.core.child import StartError

        # Unlike the FileNotFoundError of an interpreter or of /dev/null, it is not mistaken for a
        # state file that does not exist.
        raise StartError(f"the process for {path}", error) from error
    with child:
        printed, _ = child.communicate(content)
    if child.returncode:
        code = child.returncode if child.returncode > 0 else errno.EIO
        raise OSError(code, os.strerror(code), path)
    return printed


def _main(operation: str, path: str) -> int:
    """Run an operation of `_in_child` on a state file; return 0 or the error number."""
    # Before reading: the file may have any size.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    content = sys.stdin.buffer.read()
    try:
        if operation == "read":
            sys.stdout.buffer.write(read(path, int(content)))
        elif operation == "list":
            sys.stdout.buffer.write(b"\0".join(map(os.fsencode, os.listdir(path))))
        elif operation == "aside":
            os.replace(path, f"{path}.bad")
        elif operation == "mkdir":
            make_directory(path)
        else:
            replace(path, content, durable=operation == "sync")
    except OSError as error:
        return error.errno or errno.EIO
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
